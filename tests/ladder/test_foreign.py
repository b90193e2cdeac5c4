"""Other systems' ladders, exactly as those systems make them."""

import pytest

from kombu_binary_delay import AddressError, DelayError, Ladder, Topology
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.foreign import (
    CELERY,
    FOREIGN_LADDERS,
    NSERVICEBUS,
    NSERVICEBUS_V1,
    celery,
    ladder_of_name,
)
from kombu_binary_delay.ladder.parts import Binding
from kombu_binary_delay.ladder.recognise import ladder_of_exchange
from kombu_binary_delay.ladder.simulate import walk

ADDRESS = Destination("", "some-address")
WHOLE_SECONDS = [0, 1, 2, 3, 10, 15, 28, 86_400, 2**28 - 2, 2**28 - 1]


@pytest.fixture
def native():
    """Kombu's side of Celery's own ladder."""
    return pytest.importorskip(
        "kombu.transport.native_delayed_delivery", reason="Kombu has Celery's ladder since 5.5"
    )


@pytest.mark.parametrize(
    ("delay", "level"),
    [(0, 0), (1, 0), (2, 1), (3, 1), (10, 3), (15, 3), (28, 4), (2**28 - 2, 27), (2**28 - 1, 27)],
)
@pytest.mark.parametrize("ladder", [NSERVICEBUS, NSERVICEBUS_V1])
def test_a_message_enters_nservicebus_where_nservicebus_lets_it_enter(ladder, delay, level):
    digits = ladder.ladder.digits(delay * 1000)

    key = ladder.address(digits, ADDRESS)

    assert ladder.entry_exchange(digits) == ladder.level_name(level)
    assert key == ".".join(f"{delay:028b}") + ".some-address"
    assert ladder.parse(key) == (digits, ADDRESS)


@pytest.mark.parametrize("delay", WHOLE_SECONDS[1:])
def test_a_message_enters_celerys_ladder_at_the_top_with_the_key_that_kombu_computes(delay, native):
    digits = CELERY.ladder.digits(delay * 1000)

    assert CELERY.entry_exchange(digits) == "celery_delayed_27"
    assert CELERY.address(digits, Destination("", "a.b")) == native.calculate_routing_key(
        delay, "a.b"
    )


@pytest.mark.parametrize("ladder", FOREIGN_LADDERS.values())
def test_a_delay_beyond_28_bits_of_seconds_is_refused(ladder):
    with pytest.raises(DelayError, match="268435455000"):
        ladder.ladder.digits(2**28 * 1000)


@pytest.mark.parametrize("ladder", FOREIGN_LADDERS.values())
@pytest.mark.parametrize("delay", WHOLE_SECONDS)
def test_a_message_waits_its_delay_and_reaches_its_address(ladder, delay):
    digits = ladder.ladder.digits(delay * 1000)
    part = ladder.whole + ladder.to_queue("a.b")

    path = walk(part, ladder.entry_exchange(digits), ladder.address(digits, Destination("", "a.b")))

    assert path.total == delay * 1000
    assert path.arrived == {"a.b"}


@pytest.mark.parametrize("ladder", [*FOREIGN_LADDERS.values(), Topology()])
@pytest.mark.parametrize("seconds", [*range(1, 130), *WHOLE_SECONDS])
def test_a_message_is_known_by_the_exchange_that_its_last_wait_led_to(ladder, seconds):
    ours = Topology(Ladder.binary(5, 1000))
    digits = ladder.ladder.digits(seconds * 1000)
    part = ladder.whole + ladder.to_queue("q")
    key = ladder.address(digits, Destination("", "q"))

    way = walk(part, ladder.entry_exchange(digits), key)

    last = ladder.entry_exchange(digits)
    if way.waits:
        (queue,) = (queue for queue in ladder.whole.queues if queue.name == way.waits[-1].queue)
        last = dict(queue.arguments)["x-dead-letter-exchange"]
    theirs = ladder_of_exchange(last, ours)
    assert theirs
    assert theirs == (ours if ladder.is_ours else ladder)
    assert theirs.destination(key) == Destination("", "q")


@pytest.mark.parametrize(
    "exchange",
    [
        "",
        "orders",
        "celery_delayed_28",
        "celery_delayed_03",
        "celery_delayed_emails",
        "shop_celery_delayed_emails",
        "shop_celery_delayed_28",
        "_celery_delayed_3",
        "celery_delayed_delivery_log",
        "kbd.v3.delivery",
        "nsb.delay-",
        "nsb.v2.delay-level-3",
    ],
)
def test_an_exchange_of_the_users_is_no_ladders(exchange):
    assert ladder_of_exchange(exchange, Topology()) is None
    assert not any(ladder.owns(exchange) for ladder in FOREIGN_LADDERS.values())
    assert not CELERY.is_named_in(f"no access to exchange '{exchange}' in vhost '/'")


@pytest.mark.parametrize("prefix", ["", "shop", "a_celery_delayed", "{}", "two\nlines"])
def test_celerys_ladder_is_known_by_the_names_that_kombu_gives_it_with_any_prefix(prefix, native):
    if prefix and not hasattr(native, "_celery_delayed_delivery_exchange"):
        pytest.skip("Kombu before 5.7 has no prefix")
    more = (prefix,) if prefix else ()
    levels = [native.level_name(level, *more) for level in range(28)]
    delivery = f"{prefix}_celery_delayed_delivery" if prefix else "celery_delayed_delivery"

    ladder = celery(prefix)

    assert [ladder.level_name(level) for level in range(-1, 28)] == [delivery, *levels]
    assert {ladder_of_name(name) for name in (delivery, *levels)} == {ladder}
    assert {queue.name for queue in ladder.whole.queues} == set(levels)
    assert ladder.is_named_in(f"no access to exchange '{levels[0]}' in vhost '/'")


@pytest.mark.parametrize("ladder", FOREIGN_LADDERS.values())
@pytest.mark.parametrize(
    ("destination", "complaint"),
    [
        (Destination("x", "k"), "not the exchange 'x'"),
        (Destination("", ""), "1 to 199"),
        (Destination("", "k" * 200), "takes 200 bytes"),
    ],
)
def test_what_a_foreign_ladder_cannot_address_is_refused(ladder, destination, complaint):
    with pytest.raises(AddressError, match=complaint):
        ladder.address(("1",), destination)


@pytest.mark.parametrize("key", ["", "orders", "0.1.@..orders", "0." * 28, "2." * 28 + "orders"])
@pytest.mark.parametrize("ladder", FOREIGN_LADDERS.values())
def test_what_is_no_key_of_a_foreign_ladder_is_not_read(ladder, key):
    with pytest.raises(AddressError):
        ladder.parse(key)


def test_the_names_and_arguments_of_nservicebus_are_its_own():
    queues = {queue.name: dict(queue.arguments) for queue in NSERVICEBUS.whole.queues}
    first = {queue.name: dict(queue.arguments) for queue in NSERVICEBUS_V1.whole.queues}

    assert list(queues) == [f"nsb.v2.delay-level-{level:02d}" for level in range(28)]
    assert list(first) == [f"nsb.delay-level-{level:02d}" for level in range(28)]
    assert queues["nsb.v2.delay-level-03"] == {
        "x-queue-type": "quorum",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-message-ttl": 8000,
        "x-dead-letter-exchange": "nsb.v2.delay-level-02",
    }
    assert first["nsb.delay-level-00"] == {
        "x-queue-mode": "lazy",
        "x-message-ttl": 1000,
        "x-dead-letter-exchange": "nsb.delay-delivery",
    }
    level = NSERVICEBUS.levels[27]
    assert {(binding.destination, binding.key, binding.to_queue) for binding in level.bindings} == {
        ("nsb.v2.delay-level-27", "1.#", True),
        ("nsb.v2.delay-level-26", "0.#", False),
    }
    assert NSERVICEBUS.to_queue("orders").bindings == (
        Binding("nsb.v2.delay-delivery", "orders", "#.orders"),
    )
