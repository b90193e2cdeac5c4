"""What was cancelled or superseded does not run, and nothing else is dropped, whatever breaks.

Of the messages that wait, every third is cancelled; and of others, which have keys, only the latest
of each key is to run. Then something breaks, before any of them is due.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import amqp
from kombu import Connection

import kombu_binary_delay
from dev.faults.environment import BUSY, Case, Environment, ScenarioError
from dev.faults.ledger import (
    CANCELLED,
    CANCELLING,
    CONFIRMED,
    DELIVERED,
    DROPPED,
    LAG,
    SENT,
    Book,
)
from dev.faults.programs import TRANSPORT
from kombu_binary_delay import Settings
from kombu_binary_delay.amendments.parts import amendments_part, exchange_name, stream_name
from kombu_binary_delay.amendments.record import KEY, Cancel
from kombu_binary_delay.wire.executor import declare
from kombu_binary_delay.wire.mechanism import mechanism_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Fault = Callable[[Environment], None]

COUNT, KEYS = 150, 15
#: Seconds from publish to due time: a broker may be killed and started in between. The last is for
#: a machine that is too slow to cancel in time.
WAIT, SHORT_WAIT, LONG_WAIT = (9.0, 12.0), (4.0, 6.0), (60.0, 63.0)
DAY = 86_400_000  # milliseconds
YEAR = 365 * DAY
EXCHANGE = exchange_name("kbd")
IDS, KEYED = stream_name("kbd", "ids"), stream_name("kbd", "keys")


def prepare(env: Environment) -> None:
    """Declare the queue, the ladder and the streams, old enough to survive a SIGKILL."""
    env.queue("inbox")
    with env.vhost.connect() as connection:
        declare(connection.channel(), amendments_part(Settings()))
    env.declare_ladder("inbox")


def publish(env: Environment, name: str = "m", **more: Any) -> list[str]:
    """Publish, and wait until all is confirmed; return the names."""
    before = env.count(CONFIRMED)
    count = more.pop("count", COUNT)
    wait = more.pop("wait", SHORT_WAIT if env.short else WAIT)
    env.publisher(["inbox"], count, 300, wait, name=name, **more).wait(180)
    env.wait_for(CONFIRMED, before + count, 5)
    return [f"{name}-{number}" for number in range(count)]


def amend(env: Environment, name: str = "") -> None:
    """Publish with keys and without, and cancel every third of those without before it is due.

    :raises ScenarioError: where the machine is too slow for that.
    """
    for wait in (SHORT_WAIT, WAIT, LONG_WAIT) if env.short else (WAIT, LONG_WAIT):
        publish(env, f"k{name}-{wait[0]:g}", keys=KEYS, wait=wait)
        names = publish(env, f"m{name}-{wait[0]:g}", wait=wait)[::3]
        before = env.count(CANCELLED)
        env.canceller(names, at_once=5).wait(180)
        env.wait_for(CANCELLED, before + len(names), 5)
        if most_wait(env, names):
            return
    raise ScenarioError(f"what waits {LONG_WAIT[0]:g} s was not cancelled before it was due")


def most_wait(env: Environment, names: list[str]) -> bool:
    """Return whether most of what was cancelled is not due: what is may run, and shows nothing."""
    due: dict[str, float] = {
        entry["id"]: entry["due"] for entry in env.entries() if entry["event"] == SENT
    }
    return sum(due[name] > time.time() + LAG for name in names) > len(names) / 2


def waiting(fault: Fault, *, consumers: int = 1) -> Fault:
    """Make the scenario of a fault between the amendments and the due times."""

    def scenario(env: Environment) -> None:
        prepare(env)
        for _ in range(consumers):
            env.consumer("inbox")
        amend(env)
        fault(env)
        env.wait_until_done(patience=240)

    return scenario


def broker_killed(env: Environment) -> None:
    """Kill the broker, and start it again."""
    env.broker.kill()
    env.broker.start()


def nodes_killed(env: Environment) -> None:
    """Kill one node after the other, each with messages and amendments of its own."""
    prepare(env)
    for _ in range(2):
        env.consumer("inbox")
    nodes = env.nodes[:1] if env.short else env.nodes
    for number, node in enumerate(nodes):
        amend(env, str(number))
        node.kill()
        time.sleep(3)
        node.start()
        if env.cluster:
            env.cluster.wait_until_whole()
    env.wait_until_done(patience=240)
    env.notes["times"] = len(nodes)


def consumers_killed(env: Environment) -> None:
    """Cancel while no consumer is up; kill those that start, before they acknowledge and after."""
    prepare(env)
    amend(env)
    for when in ("before", "after") * (1 if env.short else 4):
        env.consumer("inbox", dies_at=10, dies=when).wait(180)
    env.consumer("inbox")
    env.wait_until_done()


def workers_killed(env: Environment) -> None:
    """Revoke Celery tasks while no worker is up; kill workers, and start others."""
    env.queue("tasks")
    with env.vhost.connect() as connection:
        declare(connection.channel(), amendments_part(Settings()))
    env.declare_ladder("tasks")
    for first, longest in ((0, 12.0), (90, 2 * LONG_WAIT[1])):
        env.send_tasks(90, first=first, rate=300, longest=longest)
        names = [f"task-{number}" for number in range(first, first + 90, 3)]
        env.canceller(names, celery=True).wait(180)
        env.wait_for(CANCELLED, first // 3 + 30, 5)
        if most_wait(env, names):
            break
    else:
        raise ScenarioError(f"tasks of up to {longest:g} s were not cancelled before they were due")
    for _ in range(1 if env.short else 3):
        before = env.count(DELIVERED)
        worker = env.worker("--concurrency=2")
        env.wait_for(DELIVERED, before + 10)
        worker.kill()
    worker = env.worker("--concurrency=2")
    env.wait_until_done()
    worker.stop()


def canceller_killed(env: Environment) -> None:
    """Kill programs in the middle of cancelling: what they had no confirm of may run or not."""
    prepare(env)
    env.consumer("inbox")
    names = publish(env, count=900, wait=(15.0, 18.0))
    for round_ in range(3):
        before = env.count(CANCELLED)
        canceller = env.canceller(names[round_ * 300 : round_ * 300 + 300], rate=10_000)
        env.wait_for(CANCELLED, before + 15 + 10 * round_)
        canceller.kill()
    env.notes["cancels without a confirm"] = env.count(CANCELLING) - env.count(CANCELLED)
    env.wait_until_done()


def publishers_killed(env: Environment) -> None:
    """Kill publishers between the confirm of a message with a key and that of its record."""
    prepare(env)
    env.consumer("inbox")
    rounds, in_a_round = (3, 20) if env.short else (20, 20)
    for number in range(rounds):
        env.publisher(
            ["inbox"],
            in_a_round + 1,
            200,
            WAIT,
            first=number * in_a_round,
            keys=7,
            dies_after=in_a_round,
        ).wait(180)
    env.wait_until_done()
    env.notes["times"] = rounds


def many(env: Environment) -> None:
    """Start a consumer while very many amendments are there; again, and again."""
    count = 100_000
    prepare(env)
    amend(env)
    write(env, count)
    began, before = time.monotonic(), env.count(DELIVERED)
    for when in ("before", "after"):
        consumer = env.consumer("inbox", dies_at=10, dies=when)
        env.wait_for(DELIVERED, before + 1)
        env.notes.setdefault("seconds until the first message", time.monotonic() - began)
        consumer.wait(180)
    env.consumer("inbox")
    env.wait_until_done()
    env.notes["amendments"] = count


def write(env: Environment, count: int, at: int = 0) -> None:
    """Write so many amendments of other messages, one in a record."""
    now = at or time.time_ns() // 1_000_000
    with Connection(env.vhost.url, transport=TRANSPORT) as connection:
        connection.connect()
        amendments = mechanism_of(connection.connection).amendments  # type: ignore[union-attr]
        for first in range(0, count, 5000):
            part = range(first, min(first + 5000, count))
            amendments.write([Cancel((f"other-{number}",), now) for number in part])


def stream_deleted(env: Environment) -> None:
    """Delete a stream, and then the other: what was read counts, and they are made again.

    What is deleted before anybody has read it is gone. A consumer looks at once a second, while it
    takes delayed messages.
    """
    count = 150 if env.short else 600
    env.publisher(["inbox"], count, 10, (0.2, 0.4), name="busy")
    for round_ in range(1 if env.short else 5):
        for name in (IDS, KEYED):
            wait_until_read(env)
            env.broker.api("DELETE", f"queues/{env.vhost.name}/{name}")
            publish(env, f"late{round_}-{name[-4:]}", keys=KEYS, count=30)
            env.canceller(publish(env, f"later{round_}-{name[-4:]}", count=30)[::3]).wait(180)


def wait_until_read(env: Environment) -> None:
    """Wait until a consumer has read all amendments of now: it reads those of a stream in order.

    :raises ScenarioError: where it does not.
    """
    book = Book(env.new_book())
    for attempt in range(10):
        # The first of two with one key is superseded, and the second cancelled, last of all.
        key = {KEY: f"{book.path.stem}-{attempt}"}
        # Where a machine is too slow to cancel in time, the next attempt gives it longer.
        delay = min(2.0**attempt, 30.0)
        names = publish(env, key[KEY], count=2, wait=(delay, delay), headers=key)
        for name in names:
            book.write(CANCELLING, name)
        with Connection(env.vhost.url, transport=TRANSPORT) as connection:
            kombu_binary_delay.cancel(names[1], connection=connection)
        ends = partial(ends_of, env, *names)
        env.wait_until(lambda: len(ends()) == 2, "the end of two messages")  # noqa: B023
        if {*ends().values()} == {DROPPED}:
            return
    raise ScenarioError("no consumer has read amendments in time")


def ends_of(env: Environment, *names: str) -> dict[str, str]:
    """Return what became of messages that were delivered or dropped."""
    ends = (DELIVERED, DROPPED)
    return {
        entry["id"]: entry["event"]
        for entry in env.entries()
        if entry["id"] in names and entry["event"] in ends
    }


def truncated(env: Environment) -> None:
    """Let retention take records that consumers have read, while others are written."""
    settings = Settings()
    part = amendments_part(settings)
    small = tuple(
        replace(
            queue,
            arguments=(
                ("x-queue-type", "stream"),
                ("x-max-age", "1s"),
                ("x-stream-max-segment-size-bytes", 20_000),
            ),
        )
        for queue in part.queues
    )
    env.queue("inbox")
    with env.vhost.connect() as connection:
        declare(connection.channel(), replace(part, queues=small))
    env.declare_ladder("inbox")
    env.consumer("inbox")
    amend(env)
    for _ in range(4):
        time.sleep(1)
        write(env, 2000)
    with env.vhost.connect() as connection:
        left = read_first(connection, IDS)
    env.notes["first record left"] = left
    env.check("records that retention left", int(left == 0), 0)
    amend(env, "after")
    env.wait_until_done()


def read_first(connection: amqp.Connection, stream: str) -> int:
    """Return the offset of the first record of a stream."""
    channel = connection.channel()
    offsets: list[int] = []
    channel.basic_qos(0, 1, a_global=False)
    channel.basic_consume(
        stream,
        callback=lambda message: offsets.append(message.headers["x-stream-offset"]),
        arguments={"x-stream-offset": "first"},
    )
    while not offsets:
        connection.drain_events(timeout=BUSY)
    return offsets[0]


def poisoned(env: Environment) -> None:
    """Write what is no record into the streams, and records of next year and of last year."""
    prepare(env)
    env.consumer("inbox")
    now = time.time_ns() // 1_000_000
    kept = publish(env, "kept")
    spoil(env, now, kept)
    amend(env)
    spoil(env, now, kept)
    names = publish(env, "next-year", count=20)
    book = Book(env.new_book())
    for name in names:
        book.write(CANCELLING, name)
    record = {"cancel": names, "at": now + YEAR, "due": now + 2 * YEAR}
    append(env, json.dumps(record).encode())
    for name in names:
        book.write(CANCELLED, name)
    env.consumer("inbox")
    env.wait_until_done()


def spoil(env: Environment, now: int, kept: list[str]) -> None:
    """Write poison, none of which amends the messages that are named in it."""
    for body in (
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 900_000,
        b"1" * 5000,
        b"x" * 2_000_000,
        json.dumps({"cancel": kept}).encode(),
        json.dumps({"cancel": kept, "at": 1e300}).encode(),
        json.dumps({"cancel": [*kept, 7], "at": now}).encode(),
        json.dumps({"cancel": kept, "at": now, "due": "soon"}).encode(),
        json.dumps({"cancel": kept, "at": now - YEAR}).encode(),
        json.dumps({"postpone": kept[0], "at": now, "due": -1}).encode(),
        json.dumps({"supersede": kept[1], "at": now, "due": now, "by": ["x"]}).encode(),
    ):
        for key in ("ids", "keys"):
            append(env, body, key)
    # Past the exchange of the amendments: who may not write there cannot amend.
    append(env, json.dumps({"cancel": kept, "at": now}).encode(), IDS, "")


def append(env: Environment, body: bytes, key: str = "ids", exchange: str = EXCHANGE) -> None:
    """Append anything to a stream."""
    with env.vhost.connect() as connection:
        channel = connection.channel()
        channel.confirm_select()
        channel.basic_publish_confirm(amqp.Message(body), exchange, key)


def clock_stepped(env: Environment, step: float, *, of_consumer: bool) -> None:
    """Put the clock of the consumer, or of who cancels, forward or back."""
    prepare(env)
    first = {"clock_step": step} if of_consumer else {}
    env.consumer("inbox", **first)
    publish(env, "first", count=10, wait=(0.5, 1.0))
    env.wait_for(DELIVERED, 10)
    publish(env, "k", keys=KEYS)
    names = publish(env)[::3]
    env.canceller(names, at_once=5, **({} if of_consumer else {"clock_step": step})).wait(180)
    env.wait_until_done()


def withdrawn(env: Environment) -> None:
    """Withdraw the right to cancel, and then the right to read, from one who had both."""
    prepare(env)
    everything = dict.fromkeys(("configure", "write", "read"), ".*")
    env.broker.api("PUT", "users/limited", {"password": "x", "tags": ""})
    grant(env, everything)
    urls = [env.vhost.url_of("limited", "x")]
    env.consumer("inbox", urls=urls)
    amend(env)
    names = publish(env, "refused", count=40)
    before = env.count(CANCELLED)
    env.canceller(names[:20], urls=urls).wait(180)
    grant(env, {**everything, "write": "^(?!kbd.v2.amendments$).*"})
    # RabbitMQ remembers for a minute what a channel was allowed.
    canceller = env.canceller(names[20:], urls=urls)
    canceller.wait(180)
    env.check("cancels that were made without the right", env.count(CANCELLED) - before - 20, 0)
    env.check("who may not cancel and did", int("may not amend" not in canceller.log()), 0)
    # What is read already goes on: RabbitMQ asks for the permission at the beginning.
    grant(env, {**everything, "read": "^(?!kbd.v2.amendments).*"})
    publish(env, "late", keys=KEYS)
    env.wait_until_done()
    env.notes["cancels that were refused"] = env.count(CANCELLING) - env.count(CANCELLED)


def grant(env: Environment, permissions: dict[str, str]) -> None:
    """Give the user of less rights what he may do."""
    env.broker.api("PUT", f"permissions/{env.vhost.name}/limited", permissions)


def alarmed(env: Environment, *, amended: bool) -> None:
    """Run out of memory: a consumer goes on, one that starts as well, and what waits is amended.

    RabbitMQ does not even read what comes from a connection that publishes then.

    :param amended: whether anything is; where nothing has ever been, consumers look for it.
    """
    env.queue("inbox")
    env.declare_ladder("inbox")
    env.consumer("inbox")
    if amended:
        amend(env)
    else:
        publish(env)
    with env.broker.alarm():
        env.consumer("inbox")
        env.wait_until_done()
        env.check("not done while the alarm lasted", len(env.verdict().lost), 0)


SCENARIO = "amended"
since = (3, 10)
CASES = (
    Case(SCENARIO, "broker killed", waiting(broker_killed), short=True, since=since),
    Case(SCENARIO, "each of three nodes killed", nodes_killed, nodes=3, short=True, since=since),
    Case(SCENARIO, "no consumer up, then killed", consumers_killed, short=True, since=since),
    Case(SCENARIO, "no Celery worker up, then killed", workers_killed, short=True, since=since),
    Case(SCENARIO, "who cancels is killed", canceller_killed, since=since),
    Case(
        SCENARIO,
        "publisher killed between message and record",
        publishers_killed,
        short=True,
        since=since,
    ),
    Case(SCENARIO, "100,000 amendments at the start", many, since=since),
    Case(SCENARIO, "streams deleted", waiting(stream_deleted), short=True, since=since),
    Case(SCENARIO, "stream truncated by retention", truncated, since=since),
    Case(SCENARIO, "poison, and a record of next year", poisoned, short=True, since=since),
    *(
        Case(
            SCENARIO,
            f"clock of {who} {words}",
            partial(clock_stepped, step=step, of_consumer=who == "the consumer"),
            since=since,
        )
        for who in ("the consumer", "who cancels")
        for words, step in (("1 h forward", 3600.0), ("1 h back", -3600.0))
    ),
    Case(SCENARIO, "permissions withdrawn", withdrawn, since=since),
    Case(
        SCENARIO,
        "memory alarm, nothing ever amended",
        partial(alarmed, amended=False),
        short=True,
        since=since,
    ),
    Case(SCENARIO, "memory alarm", partial(alarmed, amended=True), since=since),
)
