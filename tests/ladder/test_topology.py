"""The table that everything else reads."""

import pytest

from kombu_binary_delay import AddressError, Ladder, Topology
from kombu_binary_delay.ladder.address import ROOM, Destination, format_address
from kombu_binary_delay.ladder.foreign import CELERY, FOREIGN_LADDERS
from kombu_binary_delay.ladder.ladder import MAX_KEY, MAX_TTL, MAX_WAIT
from kombu_binary_delay.ladder.parts import Binding, Part
from kombu_binary_delay.ladder.recognise import topology_of_name
from kombu_binary_delay.ladder.simulate import matches_topic, walk
from kombu_binary_delay.ladder.versions import can_be_denied

SECONDS = Topology(Ladder.binary(4, 1000))


def test_a_level_is_an_exchange_and_a_queue_per_digit_that_expires_into_the_level_below():
    level = Topology(Ladder(2000, (4, 4)), "ns").levels[1]

    *entry_exchanges, exchange = level.exchanges
    assert (exchange.name, exchange.type) == ("ns.v2-2000ms-4x2.level-01", "topic")
    assert [queue.wait for queue in level.queues] == [8000, 16000, 24000]
    assert [queue.name[-3:] for queue in level.queues] == [".01", ".10", ".11"]
    for queue in level.queues:
        assert dict(queue.arguments) == {
            "x-queue-type": "quorum",
            "x-message-ttl": (queue.wait or 0) + 1,
            "x-dead-letter-exchange": "ns.v2-2000ms-4x2.level-00",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
    assert keys_from(exchange.name, level) == ["*.01.#", "*.10.#", "*.11.#", "*.00.#"]
    for fanout, queue in zip(entry_exchanges, level.queues, strict=True):
        assert (fanout.name, fanout.type) == (queue.name, "fanout")
        assert Binding(fanout.name, queue.name, "") in level.bindings


def keys_from(exchange, part):
    return [binding.key for binding in part.bindings if binding.source == exchange]


def test_skip_bindings_are_the_gists_with_the_lowest_digit_first():
    """Ingest ``1.*.*.*``, ``0.1.*.*``, ``0.0.1.*``, ``0.0.0.1``; done ``0.0.0.0``; and so on."""
    skip = Topology(Ladder.binary(4, 1000), layout="skip")
    wanted = [
        ["*.*.*.1.#", "*.*.1.0.#", "*.1.0.0.#", "1.0.0.0.#", "0.0.0.0.#"],
        ["*.*.1.#", "*.1.0.#", "1.0.0.#", "0.0.0.#"],
        ["*.1.#", "1.0.#", "0.0.#"],
        ["1.#", "0.#"],
    ]

    assert [
        keys_from(skip.level_name(level), skip.levels[level]) for level in (3, 2, 1, 0)
    ] == wanted
    leads = [binding for binding in skip.levels[3].bindings if binding.source == skip.level_name(3)]
    assert [lead.destination for lead in leads] == [
        *(f"{skip.level_name(level)}.1" for level in (3, 2, 1, 0)),
        skip.delivery,
    ]


def test_factor_n_waits_once_in_place_value():
    factor = Topology(Ladder(2000, (4, 4, 4, 4)))
    digits = factor.ladder.digits(255_000)

    path = walk(
        factor.whole + factor.to_queue("q"),
        factor.entry_exchange(digits),
        factor.address(digits, Destination("", "q")),
    )

    assert factor.ladder.weights == (128_000, 32_000, 8_000, 2_000)
    assert [wait.milliseconds for wait in path.waits] == [2 * 128_000]


def test_a_relay_is_whole_before_a_message_can_come_into_it():
    topology = Topology()
    part = topology.queue_relay("q")
    *before, last = part.in_order()
    assert last == next(binding for binding in part.bindings if binding.source == topology.delivery)
    assert {*before} == {*part.queues, *part.exchanges, *part.bindings} - {last}


def test_a_delay_with_a_direct_queue_waits_in_one_place_and_one_without_on_the_levels():
    digits = SECONDS.ladder.digits(11_000)
    part = (
        SECONDS.whole
        + SECONDS.direct_base
        + SECONDS.to_queue("q")
        + SECONDS.direct_queue(("1", "0", "1"))
    )
    part += Part(bindings=sum((SECONDS.direct_bindings(level) for level in range(4)), ()))
    address = SECONDS.address(digits, Destination("", "q"))

    without = walk(part, SECONDS.direct, address)
    served = walk(part + SECONDS.direct_queue(digits), SECONDS.direct, address)

    assert [wait.milliseconds for wait in without.waits] == [8000, 2000, 1000]
    assert [wait.milliseconds for wait in served.waits] == [11_000]
    assert without.arrived == served.arrived == {"q"}


@pytest.mark.parametrize(
    "topology",
    [
        Topology(),
        Topology(Ladder(2000, (4, 4, 10)), "my-own_1", "classic"),
        Topology(Ladder.uniform(4), layout="skip"),
        Topology(Ladder.binary(), "a", "classic", "skip"),
        Topology(layout="skip", lane=12),
        Topology(layout="skip", urgent=True),
        Topology(queue_type="classic", urgent=True),
    ],
)
def test_a_topology_is_read_back_from_the_name_of_any_part_of_its_ladder(topology):
    digits = topology.ladder.digits(topology.ladder.maximum)
    part = topology.whole + topology.direct_base + topology.direct_queue(digits)
    for declared in (*part.exchanges, *part.queues):
        if not declared.name.startswith(f"{topology.delivery_prefix}."):
            assert topology_of_name(declared.name) == topology


@pytest.mark.parametrize(
    "name",
    [
        "",
        "orders",
        "kbd.v2.delivery",
        "kbd.v2-125ms.x",
        "kbd.v2-0ms-2x1.level-00",
        "kbd.v3-1ms-2x1.x",
    ],
)
def test_a_strangers_name_has_no_topology(name):
    assert topology_of_name(name) is None


def test_classic_levels_have_names_of_their_own_and_no_arguments_of_quorum_queues():
    quorum, classic = Topology(), Topology(queue_type="classic")

    assert not {queue.name for queue in quorum.whole.queues} & {
        queue.name for queue in classic.whole.queues
    }
    for queue in classic.whole.queues:
        assert dict(queue.arguments)["x-queue-type"] == "classic"
        assert "x-dead-letter-strategy" not in dict(queue.arguments)


def test_lanes_have_names_of_their_own_and_one_delivery_side():
    alone, *lanes = Topology().lanes(1) + Topology().lanes(3)

    assert alone == Topology()
    assert len({lane.prefix for lane in (alone, *lanes)}) == 4
    assert {lane.delivery for lane in (alone, *lanes)} == {alone.delivery}
    assert {lane.queue_relay("q") for lane in (alone, *lanes)} == {alone.queue_relay("q")}
    for queue in lanes[2].levels[0].queues:
        assert dict(queue.arguments)["x-queue-leader-locator"] == "balanced"


def test_no_queue_that_can_hold_a_message_expires_or_is_limited():
    for queue in Topology().whole.queues:
        assert not {"x-expires", "x-max-length", "x-max-length-bytes"} & set(dict(queue.arguments))


def test_every_exchange_parks_what_finds_no_way():
    topology = Topology()
    everything = topology.whole + topology.mirror("x")

    for exchange in everything.exchanges:
        if exchange.name != topology.parking:
            # What finds no relay and no mirror may still be led straight to a queue.
            after = topology.to_queues if exchange.name == topology.delivery else topology.parking
            assert dict(exchange.arguments) == {"alternate-exchange": after}


def test_ten_seconds_wait_eight_and_then_two():
    digits = SECONDS.ladder.digits(10_000)
    address = format_address(digits, Destination("", "destination"))

    path = walk(
        SECONDS.whole + SECONDS.to_queue("destination"),
        SECONDS.entry_exchange(digits),
        address,
    )

    assert address == "0.1.0.1.@..destination"
    assert [wait.milliseconds for wait in path.waits] == [8000, 2000]
    assert path.arrived == {"destination"}


@pytest.mark.parametrize(
    ("delay", "level"),
    # NServiceBus's vectors, but for zero, which is a plain publish with us.
    [(1, 0), (2, 1), (3, 1), (10, 3), (15, 3), (28, 4), (2**28 - 2, 27), (2**28 - 1, 27)],
)
def test_a_message_enters_at_its_first_digit_that_is_not_zero(delay, level):
    ladder = Ladder.binary(28, 1000)

    topology = Topology(ladder)

    assert topology.entry_exchange(ladder.digits(delay * 1000)) == f"{topology.level_name(level)}.1"


def test_a_destination_that_is_an_address_already_starts_from_its_own():
    topology = Topology()
    wanted = Destination("orders", "eu.new")
    address = format_address(("01", "00", "01"), wanted)

    assert topology.unwrap(Destination(topology.level_name(3), address)) == wanted
    assert topology.unwrap(Destination(topology.delivery, address)) == wanted


@pytest.mark.parametrize("exchange", ["", "orders", "kbd.v3.delivery", "kbd.v2"])
def test_a_users_key_that_imitates_an_address_stays_what_it_is(exchange):
    forged = Destination(exchange, "0.1.@.orders.eu.new")

    assert Topology().unwrap(forged) == forged


def test_an_unreadable_key_on_a_level_is_left_to_the_parking_queue():
    topology = Topology()
    broken = Destination(topology.level_name(3), "what is this")

    assert topology.unwrap(broken) == broken
    assert walk(topology.whole, topology.level_name(3), "what is this").arrived == {
        topology.parking
    }


def test_a_message_for_a_destination_that_is_gone_is_parked():
    topology = Topology()
    digits = topology.ladder.digits(1000)
    gone = format_address(digits, Destination("", "gone"))

    path = walk(topology.whole, topology.entry_exchange(digits), gone)

    assert path.arrived == {topology.parking}


def test_a_topic_pattern_too_long_to_stand_behind_the_digits_is_refused():
    with pytest.raises(AddressError, match="1 bytes too long"):
        Topology().mirror_bindings("x", "topic", "q", "k" * 250, to_queue=True)


@pytest.mark.parametrize("length", [1, 108, 109, 112, 130, 170, 173, 174, 176, 255])
@pytest.mark.parametrize("inner", ["b", "b" * 60, "b" * 255])
@pytest.mark.parametrize(
    ("outer", "kind"),
    [("a", "direct"), ("a" * 255, "direct"), ("a" * 64, "fanout"), ("a", "topic")],
)
def test_a_key_of_any_length_passes_exchanges_with_names_of_any_length(outer, kind, inner, length):
    topology, key = Topology(), "k" * length
    digits = topology.ladder.digits(1000)
    bindings = topology.mirror_bindings(
        outer, kind, inner, "#" if kind == "topic" else key, to_queue=False
    ) + topology.mirror_bindings(inner, "direct", "q", key, to_queue=True)
    mirrors = topology.mirror(outer) + topology.mirror(inner)
    way = topology.whole + mirrors + Part(bindings=bindings)
    if kind == "topic" and length > ROOM - len("@.a."):
        # It must be readable for wildcards.
        with pytest.raises(AddressError, match="use a shorter key"):
            format_address(digits, Destination(outer, key), topic=True)
        return

    address = format_address(digits, Destination(outer, key), topic=kind == "topic")
    path = walk(way, topology.entry_exchange(digits), address)

    assert path.arrived == {"q"}


def test_no_binding_key_has_more_than_the_two_hashes_that_rabbitmq_takes():
    topology = Topology()

    for key in ("#", "#.a", "a.#.b", "#.a.#", "#.a.#.b", "#.#", "#a.#b"):
        for binding in topology.mirror_bindings("x", "topic", "q", key, to_queue=True):
            assert binding.key.split(".").count("#") <= 2


def test_all_names_and_keys_fit_into_a_short_string():
    topology = Topology(Ladder(1, (2, 3) * 14), namespace="n" * 32, queue_type="classic")
    long = "é" * 127
    part = topology.whole + topology.exchange_relay(long) + topology.to_queue(long)
    part += Part(
        bindings=tuple(
            binding
            for kind in ("direct", "topic", "fanout")
            for to_queue in (True, False)
            for binding in topology.mirror_bindings(
                long, kind, long, "#.k.#" + "k" * 150, to_queue=to_queue
            )
        )
    )

    names = [exchange.name for exchange in part.exchanges]
    names += [queue.name for queue in part.queues]
    keys = [binding.key for binding in part.bindings]
    assert max(len(name.encode()) for name in (*names, *keys)) <= MAX_KEY
    assert len(part.exchanges) == len({exchange.name for exchange in part.exchanges})
    assert len(part.queues) == len({queue.name for queue in part.queues})


@pytest.mark.parametrize(
    ("topology", "more"),
    [
        (Topology(), 1),
        (Topology(layout="skip", lane=2), 1),
        (Topology(Ladder(MAX_WAIT, (2,))), 1),
        (Topology(queue_type="classic"), 0),
        *((foreign, 0) for foreign in FOREIGN_LADDERS.values()),
    ],
    ids=lambda value: getattr(value, "prefix", None),
)
def test_a_queues_ttl_is_its_wait_and_what_a_quorum_queue_cuts_off(topology, more):
    """Those that are not ours, or no longer made, stay as they are."""
    part = sum(topology.levels, Part())
    weights = reversed(topology.ladder.weights)
    radices = reversed(topology.ladder.radices)
    waits = [
        digit * weight
        for weight, radix in zip(weights, radices, strict=True)
        for digit in range(1, radix)
    ]
    if topology.is_ours:
        direct = topology.direct_queue(topology.ladder.digits(topology.ladder.tick))
        part, waits = part + direct, [*waits, topology.ladder.tick]

    assert [queue.wait for queue in part.queues] == waits
    assert [dict(queue.arguments)["x-message-ttl"] for queue in part.queues] == [
        wait + more for wait in waits
    ]
    assert max(waits) + more <= MAX_TTL


@pytest.mark.parametrize("topology", [Topology(), Topology(queue_type="classic")])
def test_a_relay_waits_for_nothing(topology):
    part = topology.queue_relay("q") + topology.exchange_relay("x")

    assert [(queue.wait, dict(queue.arguments)["x-message-ttl"]) for queue in part.queues] == [
        (0, 0),
        (0, 0),
    ]


@pytest.mark.parametrize(
    ("pattern", "key", "matches"),
    [
        ("#", "", True),
        ("*", "", False),
        ("", "", True),
        ("a.#.b", "a.b", True),
        ("a.#.b", "a.x.y.b", True),
        ("#.b", "a.b", True),
        ("*.b", "a.a.b", False),
        ("#.#", "a", True),
        ("*", ".", False),
        ("*.*", ".", True),
        ("a.*", "a.*", True),
        ("#.a.#.b.#", "a.a.c.b", True),
        ("#.a.#.b.#", "b.a", False),
    ],
)
def test_the_walk_matches_topics_as_rabbitmq_does(pattern, key, matches):
    assert matches_topic(pattern, key) is matches


def test_the_walk_refuses_a_message_in_two_level_queues_at_once():
    doubled = SECONDS.whole + Part(
        bindings=(Binding(SECONDS.level_name(3), SECONDS.level_name(2) + ".1", "*.*.*.1.#"),)
    )

    with pytest.raises(ValueError, match="more than one queue at once"):
        walk(doubled, SECONDS.level_name(3), "0.0.0.1.@..q")


@pytest.mark.parametrize(
    ("version", "apart"),
    [("3.13.7", False), ("4.0.5", True), ("4.2.1", True), ("4.3.0", False), ("5.0.0", False)],
)
def test_urgent_messages_are_kept_apart_where_they_would_hold_up_others(version, apart):
    server = {"product": "RabbitMQ", "version": version}
    assert Topology().keeps_urgent_apart(server) is apart
    assert not Topology(queue_type="classic").keeps_urgent_apart(server)
    assert not CELERY.keeps_urgent_apart(server)


@pytest.mark.parametrize("letter", ["é", "日", "🐇"])
@pytest.mark.parametrize("length", [30, 200, 254])
def test_a_broker_can_say_that_what_stands_for_a_strange_name_is_missing(letter, length):
    topology = Topology(namespace="n" * 32, queue_type="classic")
    name = letter * (length // len(letter.encode()))
    made = [
        topology.mirror_name(name),
        topology.queue_relay_name(name),
        topology.exchange_relay_name(name),
    ]

    assert len({*made}) == 3
    for made_name in made:
        assert can_be_denied(made_name, "v" * 80)
        assert len(made_name.encode()) <= 128
    assert can_be_denied("x" * 255, "v" * 255)
    assert not can_be_denied(letter * 60, "v" * 180)
