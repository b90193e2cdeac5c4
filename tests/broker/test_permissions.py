"""Exactly which permissions delays take on RabbitMQ, and what the ladder lets somebody do.

The tables of docs/how-to/permissions.md are the tables here. Each is tested twice: what it says is
enough, and with one line less it is not.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import amqp
import pytest
from amqp.exceptions import AccessRefused, NotFound
from kombu import Exchange, Producer, Queue

from dev.server import BrokerError
from kombu_binary_delay import AmendmentError, Settings, Topology, TopologyError, cancel, reschedule
from kombu_binary_delay.amendments import reading
from kombu_binary_delay.amendments.parts import amendments_part
from kombu_binary_delay.amendments.record import Cancel
from kombu_binary_delay.journal import writer
from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.operate import Chosen, Management, amend, judge_of, status
from kombu_binary_delay.operate.declare import declare
from tests.waits import drain_until, wait_until

Names = tuple[str, ...]
KINDS = ("configure", "write", "read")
PASSWORD = uuid.uuid4().hex
DEFAULT = "amq.default"  # how permissions name the default exchange


@dataclass(frozen=True)
class Grant:
    """What a user may do: regular expressions, each to be matched as a whole."""

    configure: Names = ()
    write: Names = ()
    read: Names = ()
    topics: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, str]:
        return {kind: f"^({'|'.join(getattr(self, kind))})$" for kind in KINDS}

    def less_one(self) -> Iterator[tuple[str, str, Grant]]:
        for kind in KINDS:
            names = getattr(self, kind)
            for name in names:
                rest = tuple(other for other in names if other != name)
                changed: Any = {kind: rest}
                yield kind, name, replace(self, **changed)


@pytest.fixture
def login(broker, vhost) -> Iterator[Callable[[Grant], str]]:
    """Make a user who may do what a grant says, and no more; return his URL."""
    users: list[str] = []

    def login(grant: Grant) -> str:
        users.append(f"user-{uuid.uuid4().hex[:8]}")
        broker.api("PUT", f"users/{users[-1]}", {"password": PASSWORD, "tags": ""})
        broker.api("PUT", f"permissions/{vhost.name}/{users[-1]}", grant.body())
        for exchange, write in grant.topics.items():
            body = {"exchange": exchange, "write": write, "read": "^$"}
            broker.api("PUT", f"topic-permissions/{vhost.name}/{users[-1]}", body)
        return str(vhost.url_of(users[-1], PASSWORD))

    yield login
    for user in users:
        broker.api("DELETE", f"users/{user}")


# -- what RabbitMQ checks ----------------------------------------------------------------------

LEAD = {"x-dead-letter-exchange": "x"}
ALTERNATE = {"alternate-exchange": "x"}
CHECKS: dict[str, tuple[Callable[[Any], object], Grant]] = {
    "declare an exchange": (
        lambda channel: channel.exchange_declare("new", "topic", auto_delete=False),
        Grant(configure=("new",)),
    ),
    "declare an exchange with an alternate": (
        lambda channel: channel.exchange_declare(
            "new", "topic", auto_delete=False, arguments=ALTERNATE
        ),
        Grant(configure=("new",), read=("new",), write=("x",)),
    ),
    "declare a queue": (
        lambda channel: channel.queue_declare("new", durable=True, auto_delete=False),
        Grant(configure=("new",)),
    ),
    "declare a queue that dead-letters": (
        lambda channel: channel.queue_declare(
            "new", durable=True, auto_delete=False, arguments=LEAD
        ),
        Grant(configure=("new",), read=("new",), write=("x",)),
    ),
    "bind a queue": (
        lambda channel: channel.queue_bind("q", "x", "k"),
        Grant(write=("q",), read=("x",)),
    ),
    "bind an exchange": (
        lambda channel: channel.exchange_bind("y", "x", "k"),
        Grant(write=("y",), read=("x",)),
    ),
    "publish": (
        lambda channel: channel.basic_publish_confirm(amqp.Message("m"), "x", "k"),
        Grant(write=("x",)),
    ),
    "publish to a queue by its name": (
        lambda channel: channel.basic_publish_confirm(amqp.Message("m"), "", "q"),
        Grant(write=(re.escape(DEFAULT),)),
    ),
    "consume": (lambda channel: channel.basic_consume("q"), Grant(read=("q",))),
}


@pytest.fixture
def allows(vhost, login) -> Callable[[Grant, Callable[[Any], object]], bool]:
    """Return whether a user with a grant may do something, where the queue `q` exists."""

    def allows(grant: Grant, call: Callable[[Any], object]) -> bool:
        url = login(grant)
        user, _, rest = url.removeprefix("amqp://").partition(f":{PASSWORD}@")
        with amqp.Connection(
            rest.partition("/")[0], userid=user, password=PASSWORD, virtual_host=vhost.name
        ) as connection:
            try:
                call(connection.channel())
            except AccessRefused:
                return False
        return True

    with vhost.connect() as connection:
        channel = connection.channel()
        channel.queue_declare("q", durable=True, auto_delete=False)
        for exchange in ("x", "y"):
            channel.exchange_declare(exchange, "topic", durable=True, auto_delete=False)
    return allows


@pytest.mark.parametrize("what", CHECKS)
def test_what_rabbitmq_checks_itself(allows, what):
    call, grant = CHECKS[what]

    for kind, name, less in grant.less_one():
        assert not allows(less, call), f"without {kind} on {name}"
    assert allows(grant, call)


QUESTIONS: dict[str, Callable[[Any, str], object]] = {
    "q": lambda channel, name: channel.queue_declare(name, passive=True),
    "x": lambda channel, name: channel.exchange_declare(name, "topic", passive=True),
}


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("name", QUESTIONS)
def test_any_permission_on_a_name_lets_a_user_ask_whether_it_exists(broker, allows, name, exists):
    version = tuple(map(int, re.findall(r"\d+", broker.version)[:3]))
    asked = name if exists else "missing"

    def ask(channel: Any) -> None:
        with nullcontext() if exists else pytest.raises(NotFound):
            QUESTIONS[name](channel, asked)

    for kind in KINDS:
        one: Any = {kind: (asked,)}
        strict = version in {(4, 2, 6), (4, 3, 0)} and kind != "configure"
        assert allows(Grant(**one), ask) != strict
    assert allows(Grant(), ask) == (version < (4, 2, 6))


# -- what each role takes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def names(topology) -> dict[str, str]:
    """What the docs call these names, as regular expressions."""
    return {
        "level exchanges": re.escape(topology.prefix) + r"\.level-[0-9]+",
        "urgent levels": re.escape(topology.for_urgent().prefix) + r"\.level-[0-9]+",
        "direct": re.escape(topology.direct),
        "for one delay": re.escape(topology.prefix) + r"\.(fallback|direct(\.[0-9]+ms|\.lock)?)",
        "level queues": re.escape(topology.prefix) + r"\.level-[0-9]+\.[01]+",
        "delivery": re.escape(topology.delivery),
        "to queues": re.escape(topology.to_queues),
        "parking": re.escape(topology.parking),
        "mirror": re.escape(topology.mirror_name("events")),
        "mirror of headers": re.escape(topology.mirror_name("by-headers")),
        "relay-to-exchange": re.escape(topology.exchange_relay_name("by-headers")),
        "relay-to-queue": re.escape(topology.queue_relay_name("mail")),
        "journal": r"kbd\.v2\.journal",
        "lock of the journal": r"kbd\.v2\.journal\.lock",
        "amendments": r"kbd\.v2\.amendments",
        "streams of amendments": r"kbd\.v2\.amendments\.(ids|keys)",
        "lock of amendments": r"kbd\.v2\.amendments\.lock",
        "way of amendments": r"kbd\.v2\.amendments\.later",
    }


#: A publisher who makes the ladder where it does not exist.
PUBLISHER = Grant(
    configure=("level exchanges", "level queues", "delivery", "to queues", "parking"),
    write=("level exchanges", "level queues", "delivery", "to queues", "parking"),
    read=("level exchanges", "level queues", "delivery", "to queues", "parking"),
)
#: Per queue that is delayed to by its name, and was not declared on the same connection.
PER_QUEUE = Grant(
    configure=("relay-to-queue",), write=("relay-to-queue", "mail"), read=("relay-to-queue",)
)
#: Per headers exchange that is delayed to and was declared on the same connection.
PER_HEADERS = Grant(
    configure=("mirror of headers", "relay-to-exchange", "by-headers"),
    write=("mirror of headers", "relay-to-exchange", "by-headers"),
    read=("mirror of headers", "relay-to-exchange"),
)
#: A consumer who declares and binds what it consumes from: on its own names, and on the ladder.
CONSUMER = Grant(configure=("mail", "events"), write=("mail",), read=("mail", "events"))
CONSUMER_ON_LADDER = Grant(
    configure=("delivery", "to queues", "parking", "mirror"),
    # On the relay, since a binding past it is to be the only one.
    write=("to queues", "parking", "mirror", "relay-to-queue"),
    read=("delivery", "to queues", "parking", "mirror"),
)
#: A consumer that is to read what was amended.
READER = Grant(read=("streams of amendments",))
#: A user who amends, where the exchange and its streams exist; and where they do not.
CANCELLER = Grant(write=("amendments",))
CANCELLER_WHO_DECLARES = Grant(
    configure=("amendments", "streams of amendments", "lock of amendments"),
    write=("amendments", "streams of amendments"),
    read=("amendments",),
)
#: One who cancels what is due far ahead, beside what a publisher needs.
CANCELLER_AHEAD = Grant(
    configure=("way of amendments",),
    write=("amendments", "way of amendments"),
    read=("amendments", "way of amendments"),
)
#: Where an administrator has made all of it, and ``declare`` is ``"never"``.
PUBLISHER_NEVER = Grant(write=("level exchanges",))
CONSUMER_NEVER = Grant(read=("mail",))


def together(*grants: Grant) -> Grant:
    names: Any = {
        kind: tuple(dict.fromkeys(name for grant in grants for name in getattr(grant, kind)))
        for kind in KINDS
    }
    return Grant(**names)


@pytest.fixture
def granted(login, names):
    """Log a user in with a grant of a table."""

    def granted(grant: Grant) -> str:
        real: Any = {
            kind: tuple(names.get(name, re.escape(name)) for name in getattr(grant, kind))
            for kind in KINDS
        }
        return str(login(Grant(**real, topics=grant.topics)))

    return granted


def forget_the_ladder(vhost):
    for row in vhost.queues():
        # One that is exclusive to a connection goes with it.
        with suppress(BrokerError):
            vhost.broker.api("DELETE", f"queues/{vhost.name}/{row['name']}")
    wait_until(lambda: not vhost.queues())
    for row in vhost.exchanges():
        vhost.broker.api("DELETE", f"exchanges/{vhost.name}/{row['name']}")


def publish(connection, body, exchange="", key="mail", delay=1, **options):
    Producer(connection.default_channel).publish(
        body, exchange=exchange, routing_key=key, headers={"x-delay": delay}, **options
    )


def test_a_publisher_who_declares_needs_what_the_table_says_and_nothing_less(
    vhost, connect, granted, collect
):
    whole = together(PUBLISHER, PER_QUEUE)
    grants = [*whole.less_one(), ("", "", whole)]
    for kind, name, grant in grants:
        forget_the_ladder(vhost)
        with vhost.connect() as plain:
            plain.channel().queue_declare("mail", durable=True, auto_delete=False)
        connection = connect(url=granted(grant), confirm_publish=True)
        if name:
            with pytest.raises(TopologyError, match=r"access.* refused.*permission") as refusal:
                # Two levels, so that one leads to the other.
                publish(connection, "never", delay=1125)
            assert "configure, write and read on names that begin with 'kbd.'" in str(
                refusal.value
            ), f"without {kind} on {name}"
            on_the_way = name in PER_QUEUE.write
            assert ("write on the queue 'mail'" in str(refusal.value)) == on_the_way
        else:
            publish(connection, "works", delay=1125)
        connection.release()

    assert [arrival.body for arrival in collect(connect(), [Queue("mail")], 1)] == ["works"]


def test_a_publisher_with_a_queue_for_one_delay_needs_what_the_page_says(connect, granted, vhost):
    Queue("mail")(connect().default_channel).declare()
    less = together(PUBLISHER, PER_QUEUE)
    names = ("for one delay",)
    more = together(less, Grant(configure=names, write=names, read=names))
    options = {"binary_delay": {"queue_per_delay": True}}
    with pytest.raises(TopologyError, match=r"direct|fallback"):
        publish(connect(url=granted(less), **options), "never", delay=60_000)
    publisher = connect(url=granted(more), confirm_publish=True, **options)
    for _ in range(3):
        publish(publisher, "sent", delay=60_000)
    assert any(row["name"].endswith(".direct.60000ms") for row in vhost.queues())


def test_a_publisher_to_an_exchange_of_others_needs_nothing_on_it(connect, granted, collect):
    queue = Queue("mail", Exchange("events", "topic"), "order.*")
    owner = connect()
    queue(owner.default_channel).declare()
    assert queue(owner.default_channel).get() is None
    publish(connect(url=granted(PUBLISHER)), "works", exchange="events", key="order.new")

    assert [arrival.body for arrival in collect(owner, [queue], 1)] == ["works"]


def test_a_publisher_to_a_headers_exchange_needs_write_on_it_for_the_relay(
    vhost, connect, granted, collect
):
    exchange = Exchange("by-headers", "headers")
    queue = Queue("mail", exchange, binding_arguments={"x-match": "all"})
    whole = together(PUBLISHER, PER_HEADERS)
    for kind, name, grant in [
        (kind, name, together(PUBLISHER, less)) for kind, name, less in PER_HEADERS.less_one()
    ] + [("", "", whole)]:
        forget_the_ladder(vhost)
        # It exists, and so does its queue, without our knowing.
        plain = connect("amqp")
        queue(plain.default_channel).declare()
        connection = connect(url=granted(grant))
        if name == "by-headers" and kind == "configure":
            # To declare what exists takes the permission too; that is RabbitMQ's, not ours.
            with pytest.raises(AccessRefused):
                exchange(connection.default_channel).declare()
            continue
        exchange(connection.default_channel).declare()
        if name:
            with pytest.raises(TopologyError, match="write on the exchange 'by-headers'"):
                publish(connection, "never", exchange="by-headers")
        else:
            publish(connection, "works", exchange="by-headers")
            (arrival,) = collect(plain, [Queue("mail", no_declare=True)], 1)
            assert arrival.body == "works"


def test_a_consumer_who_declares_needs_what_the_table_says_or_is_warned(
    vhost, connect, granted, collect, caplog
):
    queue = Queue("mail", Exchange("events", "topic"), "order.*")
    for kind, name, grant in [
        (kind, name, together(CONSUMER, less)) for kind, name, less in CONSUMER_ON_LADDER.less_one()
    ] + [("", "", together(CONSUMER, CONSUMER_ON_LADDER))]:
        forget_the_ladder(vhost)
        caplog.clear()
        connection = connect(url=granted(grant))
        queue(connection.default_channel).declare()
        connection.Consumer(queue).consume()
        # It also looks whether all is still there.
        connection.connection.look_at = 0
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.01)
        assert ("permissions configure, write and read" in caplog.text) == bool(name), (
            f"without {kind} on {name}: {caplog.text}"
        )
        connection.release()

    administrator = connect()
    publish(administrator, 1, "events", "order.paid")
    publish(administrator, 2)
    bare = Queue("mail", no_declare=True)
    consumer = connect(url=granted(together(CONSUMER, CONSUMER_ON_LADDER)))
    assert {arrival.body for arrival in collect(consumer, [bare], 2)} == {1, 2}


#: Whoever writes the journal where it may not exist yet.
JOURNAL = Grant(configure=("journal", "lock of the journal"), write=(DEFAULT,))


def test_a_journal_needs_what_the_page_says_and_without_it_disturbs_no_consumer(
    vhost, connect, granted, collect, caplog
):
    enough = together(CONSUMER, CONSUMER_ON_LADDER, JOURNAL)
    bare = Queue("mail", no_declare=True)
    Queue("mail")(connect().default_channel).declare()
    less = [grant for _, _, grant in JOURNAL.less_one()]
    for grant in (together(CONSUMER, CONSUMER_ON_LADDER, more) for more in (JOURNAL, *less)):
        with suppress(BrokerError):
            vhost.broker.api("DELETE", f"queues/{vhost.name}/kbd.v2.journal")
        caplog.clear()
        writer.warnings.clear()  # another test may have been warned
        consumer = connect(url=granted(grant), binary_delay={"journal": "stream"})
        for number in range(3):
            publish(connect(), number)
            assert [arrival.body for arrival in collect(consumer, [bare], 1)] == [number]
        ended = caplog.text.count("the journal misses events")
        assert ended == (0 if grant == enough else 1)


def test_whose_binding_leads_from_an_exchange_of_others_needs_configure_to_learn_its_type(
    vhost, connect, granted, caplog
):
    with vhost.connect() as plain:
        plain.channel().exchange_declare("events", "topic", durable=True, auto_delete=False)
    queue = Queue("mail", Exchange("events", no_declare=True), "order.*")
    narrow = replace(CONSUMER, configure=("mail",))

    connection = connect(url=granted(together(narrow, CONSUMER_ON_LADDER)))
    queue(connection.default_channel).declare()
    connection.Consumer(queue).consume()

    assert "configure on the exchange 'events'" in caplog.text


# -- amendments ----------------------------------------------------------------------------------


@pytest.fixture
def unwarned():
    reading._warnings.clear()  # noqa: SLF001 - another test may have been warned


@pytest.mark.usefixtures("unwarned")
def test_who_may_not_cancel_what_is_far_ahead_cancels_none_of_several(vhost, connect, granted):
    administrator = connect()
    cancel("other", connection=administrator)
    now = time.time_ns() // 1_000_000
    chosen = Chosen({"near": now + 60_000, "far": now + 40 * 86_400_000})
    with pytest.raises(AmendmentError, match=r"cannot be amended: .* refused"):
        amend(connect(url=granted(CANCELLER)), "cancel", chosen)
    judge = judge_of(administrator)
    assert [judge({"message_id": id_}) is None for id_ in ("other", "near")] == [False, True]


@pytest.mark.usefixtures("unwarned")
def test_to_cancel_needs_what_the_table_says_and_is_granted_apart_from_publishing(
    vhost, connect, granted
):
    publisher = connect(url=granted(together(PUBLISHER, PER_QUEUE)))
    with pytest.raises(AmendmentError, match=r"may not amend.*|permissions? .* 'kbd\."):
        cancel("never", connection=publisher)
    for kind, name, grant in CANCELLER_WHO_DECLARES.less_one():
        with pytest.raises(AmendmentError, match=r"cannot be amended|may not amend"):
            cancel("never", connection=connect(url=granted(grant)))
        assert not any("amendments" in row["name"] for row in vhost.queues() if kind == name), name
        forget_the_ladder(vhost)
    cancel("one", connection=connect(url=granted(CANCELLER_WHO_DECLARES)))
    cancel("two", connection=connect(url=granted(CANCELLER)))
    with pytest.raises(AmendmentError, match=r"the permission write on 'kbd\.v2\.amendments'"):
        cancel("never", connection=publisher)


@pytest.mark.usefixtures("unwarned")
def test_to_cancel_what_is_far_ahead_needs_what_the_table_says(vhost, connect, granted):
    eta = datetime.now(UTC) + timedelta(days=40)
    for _, _, grant in CANCELLER_AHEAD.less_one():
        cancel("other", connection=connect())
        with pytest.raises(AmendmentError, match=r"refused to declare|may not amend"):
            cancel("x", eta=eta, connection=connect(url=granted(together(PUBLISHER, grant))))
        forget_the_ladder(vhost)
    cancel("other", connection=connect())
    cancel("x", eta=eta, connection=connect(url=granted(together(PUBLISHER, CANCELLER_AHEAD))))


def two_are_there(connect):
    """Publish two delayed messages; return the administrator's connection."""
    administrator = connect()
    Queue("mail")(administrator.default_channel).declare()
    for name in ("cancelled", "kept"):
        publish(administrator, name, message_id=name)
    return administrator


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize("writes", [(DEFAULT,), ()], ids=["answers", "reads-only"])
def test_a_consumer_reads_amendments_if_it_may_read_their_streams_and_is_warned_if_not(  # noqa: PLR0913, PLR0917
    vhost, connect, granted, collect, caplog, writes
):
    administrator = two_are_there(connect)
    cancel("cancelled", connection=administrator)
    bare = Queue("mail", no_declare=True)
    less = replace(CONSUMER_NEVER, write=writes)

    reader = connect(
        url=granted(together(less, READER)),
        binary_delay={"declare": "never"},
    )
    assert [arrival.body for arrival in collect(reader, [bare], 1)] == ["kept"]
    assert "amendments are not read" not in caplog.text

    publish(administrator, "cancelled", message_id="cancelled")
    other = connect(url=granted(less), binary_delay={"declare": "never"})
    assert [arrival.body for arrival in collect(other, [bare], 1)] == ["cancelled"]
    assert "permission read on names that begin with 'kbd.v2.amendments.'" in caplog.text


@pytest.mark.usefixtures("unwarned")
def test_a_consumer_that_may_only_read_reads_all_records_however_long_that_takes(
    vhost, connect, granted, collect, monkeypatch
):
    def slowly(records, *arguments):
        time.sleep(0.01)
        take(records, *arguments)

    administrator = two_are_there(connect)
    cancel("never", connection=administrator)
    now = time.time_ns() // 1_000_000
    administrator.connection.delay_mechanism.amendments.write(
        [Cancel((f"{number}",), now) for number in range(700)]
    )
    cancel("cancelled", connection=administrator)
    take = reading.Reader._take  # noqa: SLF001 - to read as long as from a large stream
    monkeypatch.setattr(reading.Reader, "_take", slowly)

    url = granted(together(replace(CONSUMER_NEVER, write=()), READER))
    reader = connect(url=url, binary_delay={"declare": "never"})

    bare = Queue("mail", no_declare=True)
    assert [arrival.body for arrival in collect(reader, [bare], 1)] == ["kept"]


@pytest.mark.usefixtures("unwarned")
def test_a_consumer_that_may_only_read_reads_streams_without_a_record(
    vhost, connect, granted, caplog
):
    administrator = connect()
    Queue("mail")(administrator.default_channel).declare()
    declare(administrator, Topology(), amendments_part(Settings()))
    # A stream that has just been declared may not have started.
    time.sleep(1)
    less = replace(together(CONSUMER_NEVER, READER), write=())
    reader = connect(url=granted(less), binary_delay={"declare": "never"})

    reader.Consumer(Queue("mail", no_declare=True)).consume()

    # A consumer that waits for a record gives up some time, and goes on without amendments.
    assert "amendments are not read" not in caplog.text
    assert reader.connection.delay_mechanism.amendments.reader.is_reading


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize(
    ("grant", "active"),
    [(Grant(), None), (READER, 1), (together(READER, Grant(write=(DEFAULT,))), 1)],
    ids=["none", "reads", "reads-and-marks"],
)
def test_status_counts_amendments_for_those_who_may_read_them(
    vhost, connect, granted, grant, active
):
    administrator = connect()
    cancel("cancelled", connection=administrator)
    management = Management.of(administrator, vhost.broker.management_url)

    state = status(administrator, management, Topology(), None, connect(url=granted(grant)))

    assert state.amendments is not None
    assert state.amendments.active == active


# -- without the right to declare --------------------------------------------------------------

NEVER = {"declare": "never"}


@pytest.fixture
def made_beforehand(connect, topology):
    """All that the roles below need, made by an administrator as docs/how-to/operate.md has it."""
    administrator = connect("amqp")
    channel = administrator.default_channel
    part = sum(topology.levels[:4], topology.base) + topology.mirror("events")
    part += sum(topology.for_urgent().levels[:4], topology.direct_base)
    part += Part(
        bindings=tuple(binding for n in range(4) for binding in topology.direct_bindings(n))
    )
    events = Exchange("events", "topic")
    for name, key in (("mail", "order.*"), ("secret", "secret.#")):
        Queue(name, events, key, channel=channel).declare()
        mirrored = topology.mirror_bindings("events", "topic", name, key, to_queue=True)
        part += topology.to_queue(name) + Part(bindings=mirrored)
    for queue in part.queues:
        arguments = dict(queue.arguments)
        channel.queue_declare(queue.name, durable=True, auto_delete=False, arguments=arguments)
    for exchange in part.exchanges:
        arguments = dict(exchange.arguments)
        channel.exchange_declare(
            exchange.name, exchange.type, durable=True, auto_delete=False, arguments=arguments
        )
    for binding in part.bindings:
        bind = channel.queue_bind if binding.to_queue else channel.exchange_bind
        bind(binding.destination, binding.source, binding.key, arguments=dict(binding.arguments))
    return connect(binary_delay=NEVER)


@pytest.mark.parametrize("confirm_publish", [False, True], ids=["no-confirm", "confirm"])
def test_without_the_right_to_declare_a_publisher_needs_to_write_to_the_levels_only(
    made_beforehand, connect, granted, collect, confirm_publish
):
    options = {"binary_delay": NEVER, "confirm_publish": confirm_publish}
    connection = connect(url=granted(PUBLISHER_NEVER), **options)
    publish(connection, 1)
    publish(connection, 2, "events", "order.paid")
    consumer = connect(url=granted(CONSUMER_NEVER), binary_delay=NEVER)

    arrivals = collect(consumer, [Queue("mail", no_declare=True)], 2)

    assert {arrival.body: (arrival.exchange, arrival.key) for arrival in arrivals} == {
        1: ("", "mail"),
        2: ("events", "order.paid"),
    }


@pytest.mark.usefixtures("made_beforehand", "unwarned")
@pytest.mark.parametrize("may", [True, False], ids=["may publish", "may not"])
def test_a_consumer_puts_off_what_was_rescheduled_if_it_may_write_to_the_levels(  # noqa: PLR0913, PLR0917
    vhost, connect, granted, collect, caplog, may
):
    administrator = connect()
    countdown = 1.9 if may else 3600
    due = time.time() + countdown
    publish(administrator, 1, message_id="put off")
    reschedule("put off", countdown=countdown, connection=administrator)
    grant = together(CONSUMER_NEVER, READER, PUBLISHER_NEVER if may else Grant())
    consumer = connect(url=granted(grant), binary_delay=NEVER)

    [arrival] = collect(consumer, [Queue("mail", no_declare=True)], 1)

    assert (arrival.at >= due) == may
    refused = r"put off is not postponed, but delivered now: .*'kbd\.v2.*level-.*refused"
    assert bool(re.search(refused, caplog.text)) != may


def test_without_the_right_to_write_to_the_levels_a_publish_is_refused_with_the_remedy(
    made_beforehand, connect, granted
):
    remedy = r"access to exchange 'kbd\.v2.*level-00'.* refused.*the permission write on that exch"
    confirming = connect(url=granted(Grant()), binary_delay=NEVER, confirm_publish=True)
    with pytest.raises(TopologyError, match=remedy):
        publish(confirming, "never")

    # Without confirms the refusal comes when it comes, as an error of the channel.
    connection = connect(url=granted(Grant()), binary_delay=NEVER)
    publish(connection, "never")
    with pytest.raises(AccessRefused, match=remedy):
        drain_until(connection, lambda: False)


def test_a_retry_of_a_worker_without_permissions_on_the_ladder_is_not_lost(
    connect, granted, collect
):
    queue = Queue("mail")
    connection = connect(url=granted(Grant(configure=("mail",), write=(DEFAULT,), read=("mail",))))
    queue(connection.default_channel).declare()
    eta = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    headers = {"id": "1", "task": "t", "eta": eta, "retries": 1}

    Producer(connection.default_channel).publish("again", routing_key="mail", headers=headers)

    assert [arrival.headers["eta"] for arrival in collect(connection, [queue], 1)] == [eta]


def test_without_read_on_the_queue_a_consumer_is_refused_by_rabbitmq(
    made_beforehand, connect, granted
):
    consumer = connect(url=granted(Grant()), binary_delay=NEVER)
    with pytest.raises(AccessRefused, match="queue 'mail'"):
        consumer.Consumer(Queue("mail", no_declare=True)).consume()


def test_who_may_only_write_to_the_levels_can_neither_see_nor_take_what_waits(
    made_beforehand, connect, granted, topology
):
    user = connect(url=granted(PUBLISHER_NEVER), binary_delay=NEVER)
    queue = topology.levels[0].queues[0].name
    for call in (
        lambda channel: channel.basic_get(queue),
        lambda channel: channel.basic_get(topology.parking),
        lambda channel: channel.queue_purge(queue),
        lambda channel: channel.queue_delete(queue),
        lambda channel: channel.queue_bind(queue, topology.delivery, "#"),
        lambda channel: channel.exchange_delete(topology.delivery),
    ):
        with pytest.raises(AccessRefused):
            call(user.channel())


# -- what the ladder lets one do ---------------------------------------------------------------


def test_who_may_write_to_the_levels_reaches_every_queue_that_the_ladder_leads_to(
    made_beforehand, connect, granted, collect
):
    """RabbitMQ checks no permission when it dead-letters, so this is a right, and documented."""
    user = connect(url=granted(PUBLISHER_NEVER), binary_delay=NEVER, confirm_publish=True)
    for exchange, key in (("events", "secret.plan"), ("", "secret")):
        with pytest.raises(AccessRefused):
            Producer(user.channel()).publish("now", exchange=exchange, routing_key=key)
        publish(user, key, exchange, key)

    arrivals = collect(made_beforehand, [Queue("secret", no_declare=True)], 2)
    assert {arrival.body for arrival in arrivals} == {"secret", "secret.plan"}


def test_who_may_write_to_the_levels_reaches_nothing_that_the_ladder_does_not_lead_to(
    made_beforehand, vhost, connect, granted, topology
):
    with vhost.connect() as plain:
        channel = plain.channel()
        channel.queue_declare("apart", durable=True, auto_delete=False)
        channel.queue_bind("apart", "events", "apart")
        user = connect(url=granted(PUBLISHER_NEVER), binary_delay=NEVER, confirm_publish=True)
        publish(user, 1, "events", "apart")
        publish(user, 2, "", "apart")
        wait_until(lambda: vhost.waiting(topology.parking) == {topology.parking: 2})
        assert vhost.waiting("apart") == {"apart": 0}


#: The pattern by which the docs choose the exchanges that need a topic permission.
TO_RESTRICT = re.search(
    r"grep -E '(.+)'\)", (Path(__file__).parents[2] / "docs/how-to/permissions.md").read_text()
)


def restricted(names: Iterable[str]) -> set[str]:
    """Return those of some exchanges that the command of the docs gives a topic permission."""
    assert TO_RESTRICT
    return {name for name in names if re.search(TO_RESTRICT[1], name)}


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("layout", ["chain", "skip"])
def test_each_exchange_that_a_publisher_writes_to_gets_a_topic_permission_and_no_other(
    queue_type, layout
):
    one = Topology(queue_type=queue_type, layout=layout)
    ladders = [one, *one.lanes(2), one.for_urgent()]
    part = sum((ladder.whole + ladder.direct_base for ladder in ladders), one.mirror("x.level-00"))

    assert restricted(exchange.name for exchange in part.exchanges) == {
        name
        for ladder in ladders
        for name in (ladder.direct, *(ladder.level_name(n) for n in range(ladder.ladder.levels)))
    }


def only(vhost: Any, pattern: str) -> dict[str, str]:
    """Topic permissions that let a user delay to what a pattern says: one for each exchange."""
    return dict.fromkeys(restricted(row["name"] for row in vhost.exchanges()), pattern)


#: The patterns of the docs: for a queue, and for some keys of an exchange.
TO_MAIL = r"^([01]+\.)+@\.\.mail$"
TO_ORDERS = r"^([01]+\.)+@\.events\.order\."


MAIL = {("", "mail")}
ORDERS = {("events", "order.paid"), ("events", "order.new")}
#: A pattern, and what it allows; the grant, settings and properties of a publisher.
RESTRICTED: dict[str, tuple[str, set[tuple[str, str]], Grant, dict[str, Any], dict[str, Any]]] = {
    "a queue": (TO_MAIL, MAIL, PUBLISHER_NEVER, {}, {}),
    "some keys of an exchange": (TO_ORDERS, ORDERS, PUBLISHER_NEVER, {}, {}),
    # On RabbitMQ 4.0 to 4.2, these have levels of their own.
    "urgent messages": (
        TO_MAIL,
        MAIL,
        together(PUBLISHER_NEVER, Grant(write=("urgent levels",))),
        {},
        {"priority": 9},
    ),
    "direct queues": (TO_MAIL, MAIL, Grant(write=("direct",)), {"queue_per_delay": True}, {}),
}


@pytest.mark.parametrize("case", RESTRICTED)
def test_topic_permissions_restrict_where_a_user_can_delay_to(
    vhost, made_beforehand, connect, granted, case
):
    pattern, allowed, grant, settings, properties = RESTRICTED[case]
    url = granted(replace(grant, topics=only(vhost, pattern)))
    user = connect(url=url, binary_delay={**NEVER, **settings}, confirm_publish=True)
    refused = {
        ("", "mail"),
        ("", "secret"),
        ("", "mail.secret"),
        ("events", "order.paid"),
        ("events", "order.new"),
        ("events", "secret.order.paid"),
        ("events.order", "x"),
        ("other", "order.paid"),
        ("", "@.events.order.paid"),
        ("", "1.@..mail"),
    } - allowed

    for delay in (1, 1500):
        for exchange, key in allowed:
            publish(user, "x", exchange, key, delay, **properties)
        for exchange, key in refused:
            with pytest.raises(TopologyError, match="topic permission write"):
                publish(user, "x", exchange, key, delay, **properties)


def test_topic_permissions_cover_further_keys_since_rabbitmq_4(
    broker, vhost, made_beforehand, connect, granted
):
    """Before, a message's CC and BCC headers pass them by: RabbitMQ's own gap, and documented."""
    url = granted(replace(PUBLISHER_NEVER, topics=only(vhost, TO_MAIL)))
    user = connect(url=url, binary_delay=NEVER, confirm_publish=True)
    covered = broker.release >= (4, 0)

    def publish_with(name: str) -> None:
        Producer(user.default_channel).publish(
            "x", routing_key="mail", headers={"x-delay": 1, name: ["secret"]}
        )

    for name in ("CC", "BCC"):
        if covered:
            with pytest.raises(TopologyError, match="topic permission write"):
                publish_with(name)
        else:
            publish_with(name)


def test_who_may_not_read_the_mirror_of_an_exchange_cannot_bind_to_its_delayed_messages(
    made_beforehand, connect, granted, topology
):
    mirror = topology.mirror_name("events")
    spy = Grant(configure=("spy",), write=("spy",), read=("spy",))
    with pytest.raises(AccessRefused):
        spy_on(connect(url=granted(spy)), mirror)

    # It is the same right as read on the exchange itself, and the docs say so.
    spy_on(connect(url=granted(replace(spy, read=("spy", "mirror")))), mirror)


def spy_on(connection: Any, exchange: str) -> None:
    channel = connection.default_channel
    channel.queue_declare("spy", durable=True, auto_delete=False)
    channel.queue_bind("spy", exchange, "#")


def test_a_relay_is_never_made_by_who_may_not_write_to_its_exchange(connect, granted, vhost):
    with vhost.connect() as plain:
        plain.channel().exchange_declare("by-headers", "headers", durable=True, auto_delete=False)
    less = replace(PER_HEADERS, write=("mirror of headers", "relay-to-exchange"))
    connection = connect(url=granted(together(PUBLISHER, less)))
    Exchange("by-headers", "headers")(connection.default_channel).declare()

    with pytest.raises(TopologyError, match="write on the exchange 'by-headers'"):
        publish(connection, "never", exchange="by-headers", key="")

    assert not [row["name"] for row in vhost.queues() if ".relay-to-" in row["name"]]
