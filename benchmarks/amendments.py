"""Purpose: what amendments cost: consumers that know many, and those who revoke.

Each figure has its peer beside it, in turns: Kombu's own transport, py-amqp that reads the same
stream, Celery's broadcast.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import uuid
from functools import partial
from multiprocessing import get_context
from timeit import repeat
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import amqp
from celery import Celery
from kombu import Connection, Consumer, Queue, pools

from benchmarks.publishing import BODY, OURS, STOCK, WAYS
from benchmarks.rig import Row, Scale, disk, in_turns, let_rest, percentiles, summary
from dev.processes import resident
from kombu_binary_delay import Settings, cancel
from kombu_binary_delay.amendments.memory import Memory
from kombu_binary_delay.amendments.parts import IDS, stream_name
from kombu_binary_delay.amendments.record import Cancel, Record, split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection as End

    from dev.broker import Broker, VHost

#: The titles of the figures, and of those that are compared.
FIGURES = {
    "delivery_us": "CPU of a delivery to a plain consumer, µs",
    "delivery_instructions": "Python's instructions for it",
    "look_us": "the part that looks for amendments, CPU in a tight loop, µs",
    "look_instructions": "Python's instructions for that part",
    "catch_up_s": "reading all before the first delivery, one id a record, s",
    "catch_up_cpu_s": "the consumer's CPU for it, s",
    "memory_mb": "memory of a fresh process for them, MB",
    "disk_mb": "the broker's disk for them, MB",
    "lag_p50_ms": "from the confirm of a cancellation until a consumer knows it, p50, ms",
    "lag_p99_ms": "the same, p99, ms",
    "revokes_one": "revokes of one id, a second",
    "revokes_many": "revokes of a thousand ids, a second",
}
CASES = {
    "none": "ours, no amendments",
    "known": "ours, 100,000 known",
    "together": "ours, 100,000 written at once",
    "apart": "ours, 100,000 confirmed one by one",
    "reader": "py-amqp, 100,000 written at once",
    "twice": "ours, 200,000 written at once",
    "light": "ours, 50 a second",
    "stock": "Celery's broadcast alone",
    "lasting": "ours, which last",
    "kombu": WAYS["kombu"][0],
}
MANY = 100_000
IDS_AT_ONCE = 1000
INBOX = Queue("inbox", durable=True)
STREAM = stream_name(Settings().namespace, IDS)
PATIENCE = 60.0


def everything(broker: Broker, scale: Scale) -> dict[str, Row]:
    """Measure all that amendments cost, by what is compared."""
    rows: dict[str, Row] = {}
    for part in (_deliveries, _catching_up, _lag, _revokes):
        for case, figures in part(broker, scale).items():
            rows.setdefault(case, {}).update(figures)
    return rows


# -- what a delivery pays ----------------------------------------------------------------------


class _Consuming:
    """A plain consumer on a virtual host of its own, with so many ids cancelled there."""

    def __init__(self, broker: Broker, transport: str, known: int) -> None:
        self.vhost = broker.vhost()
        if known:
            _write(self.vhost, split(_new_ids(known), _now()))
        self.connection = Connection(self.vhost.url, transport=transport)
        self.channel = self.connection.channel()
        self.taken = 0
        INBOX(self.channel).declare()
        Consumer(self.channel, INBOX, callbacks=[self._take], prefetch_count=500).consume()
        self.message = amqp.Message(BODY, message_id=_new_ids(1)[0], application_headers={})
        # What a channel calls with each delivery: on Kombu's own, that is the callback itself.
        tag = self.channel.basic_consume("inbox", callback=self._nothing)
        self.deliver = self.channel.callbacks[tag]
        self.channel.basic_cancel(tag)

    def _take(self, _: Any, message: Any) -> None:
        self.taken += 1
        message.ack()

    @staticmethod
    def _nothing(message: Any) -> None:
        """Do what a consumer does."""

    def publish(self, count: int) -> None:
        with self.vhost.connect() as connection:
            channel = connection.channel()
            for name in _new_ids(count):
                message = amqp.Message(BODY, message_id=name, application_headers={})
                channel.basic_publish(message, "", INBOX.name)

    def drain(self, count: int) -> None:
        self.taken = 0
        while self.taken < count:
            self.connection.drain_events(timeout=PATIENCE)

    def look(self, rounds: int) -> Row:
        """Measure what it takes to look whether a message is amended."""
        took, counted = [], []
        for call in (partial(handler, self.message) for handler in (self.deliver, self._nothing)):
            # The least of many: what else the machine does only adds to it.
            took.append(min(repeat(call, timer=time.process_time, number=1000, repeat=rounds)))
            counted.append(instructions(call))
        return {
            "look_us": (took[0] - took[1]) / 1000 * 1e6,
            "look_instructions": counted[0] - counted[1],
        }

    def close(self) -> None:
        self.connection.close()
        self.vhost.delete()


def _deliveries(broker: Broker, scale: Scale) -> dict[str, Row]:
    count = scale.pick(5000, 20)
    many = scale.pick(MANY, 100)
    cases = {"kombu": (STOCK, 0), "none": (OURS, 0), "known": (OURS, many)}
    consumers = {name: _Consuming(broker, *case) for name, case in cases.items()}

    def measure(name: str) -> Row:
        consumer = consumers[name]
        consumer.publish(count)
        _rest(broker, scale)
        gc.collect()
        cpu = time.process_time()
        consumer.drain(count)
        cpu = time.process_time() - cpu
        consumer.publish(10)
        row = {
            "delivery_us": cpu / count * 1e6,
            "delivery_instructions": instructions(partial(consumer.drain, 10)) / 10,
        }
        # The other has nothing to look for.
        return row if name == "kombu" else row | consumer.look(scale.pick(200, 2))

    runs = in_turns(list(cases), scale, measure, "deliveries", 5)
    for consumer in consumers.values():
        consumer.close()
    return summary(runs, "kombu")


# -- what it takes to know them ----------------------------------------------------------------


def _catching_up(broker: Broker, scale: Scale) -> dict[str, Row]:
    count = scale.pick(MANY, 100)
    vhosts, disks = {}, {}
    for name in ("together", "apart"):
        vhosts[name] = broker.vhost()
        before = disk(broker.folder)
        _write(vhosts[name], _records(count), at_once=name == "together")
        _rest(broker, scale)
        disks[name] = (disk(broker.folder) - before) / 1e6
    vhosts["reader"] = vhosts["together"]

    def measure(name: str) -> Row:
        read = _read_plainly if name == "reader" else _catch_up
        return _in_a_fresh_process(read, vhosts[name].url, count)

    figures = summary(in_turns(list(vhosts), scale, measure, "catching up"), "reader")
    for name, size in disks.items():
        figures[name]["disk_mb"] = {"median": size}
    # And what the setting amendments_max_age is chosen by.
    vhosts["twice"] = vhosts["together"]
    _write(vhosts["twice"], _records(count))
    _rest(broker, scale)
    count *= 2
    figures |= summary(in_turns(["twice"], scale, measure, "catching up"))
    for name in ("together", "apart"):
        vhosts[name].delete()
    return figures


def _records(count: int) -> list[Record]:
    return [Cancel((name,), _now()) for name in _new_ids(count)]


def _in_a_fresh_process(function: Callable[[str, int], Row], url: str, count: int) -> Row:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (url, count))


def _catch_up(url: str, count: int) -> Row:
    """Begin to consume, and weigh what was read before."""
    with Connection(url, transport=OURS) as connection:
        channel = connection.channel()
        INBOX(channel).declare()
        consumer = Consumer(channel, INBOX)
        gc.collect()
        before, start, cpu = resident(os.getpid()), time.monotonic(), time.process_time()
        consumer.consume()
        took, cpu = time.monotonic() - start, time.process_time() - cpu
        gc.collect()
        memory = resident(os.getpid()) - before
        known = len(connection.connection.delay_mechanism.amendments.memory)
    if known != count:
        raise RuntimeError(f"{known} of {count} amendments were read")
    return {"memory_mb": memory / 1e6, "catch_up_s": took, "catch_up_cpu_s": cpu}


def _read_plainly(url: str, count: int) -> Row:
    """Read the stream as py-amqp does, and keep nothing."""
    read = 0

    def take(message: amqp.Message) -> None:
        nonlocal read
        read += 1
        if read % 500 == 0:
            channel.basic_ack(message.delivery_tag, multiple=True)

    with Connection(url, transport=STOCK) as connection:
        channel = connection.channel()
        channel.basic_qos(0, 1000, a_global=False)
        start, cpu = time.monotonic(), time.process_time()
        channel.basic_consume(STREAM, callback=take, arguments={"x-stream-offset": "first"})
        while read < count:
            connection.drain_events(timeout=PATIENCE)
        took, cpu = time.monotonic() - start, time.process_time() - cpu
    return {"catch_up_s": took, "catch_up_cpu_s": cpu}


# -- how soon one counts -----------------------------------------------------------------------


def _lag(broker: Broker, scale: Scale) -> dict[str, Row]:
    count = scale.pick(500, 5)

    def measure(_: str) -> Row:
        vhost = broker.vhost()
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        consumer = context.Process(target=_watch, args=(vhost.url, count, theirs), daemon=True)
        confirmed = []
        with Connection(vhost.url, transport=OURS) as connection:
            # The streams exist before the consumer begins.
            cancel("the first", connection=connection)
            consumer.start()
            ours.recv()
            for name in _new_ids(count):
                cancel(name, connection=connection)
                confirmed.append(time.time())
                time.sleep(0.02)
        if not ours.poll(PATIENCE):
            raise TimeoutError("not all amendments were read")
        known = ours.recv()
        consumer.join()
        vhost.delete()
        late = percentiles((k - c) * 1000 for k, c in zip(known, confirmed, strict=True))
        return {"lag_p50_ms": late["p50"], "lag_p99_ms": late["p99"]}

    return summary(in_turns(["light"], scale, measure, "lag"))


def _watch(url: str, count: int, end: End) -> None:
    """Consume, and say when each amendment was known."""
    known: list[float] = []
    learn = Memory.learn

    def noted(memory: Memory, record: Record, now: int, *, came_by_ladder: bool = False) -> None:
        learn(memory, record, now, came_by_ladder=came_by_ladder)
        # Each cancellation has a record for keys as well.
        if not getattr(record, "keyed", False):
            known.append(time.time())

    with Connection(url, transport=OURS) as connection:
        channel = connection.channel()
        INBOX(channel).declare()
        Consumer(channel, INBOX).consume()
        with patch.object(Memory, "learn", noted):
            end.send("ready")
            while len(known) < count:
                connection.drain_events(timeout=PATIENCE)
    end.send(known)


# -- what others pay ---------------------------------------------------------------------------


def _revokes(broker: Broker, scale: Scale) -> dict[str, Row]:
    vhost = broker.vhost()
    apps = {
        name: Celery(
            name, broker=vhost.url, broker_transport=transport, set_as_current=False, backend=None
        )
        for name, transport in (("stock", STOCK), ("lasting", OURS))
    }

    def measure(name: str) -> Row:
        revoke = apps[name].control.revoke
        ones, many = scale.pick(300, 3), scale.pick(20, 1)
        return {
            "revokes_one": _rate(revoke, _new_ids(ones)),
            "revokes_many": _rate(revoke, [_new_ids(IDS_AT_ONCE) for _ in range(many)]),
        }

    for app in apps.values():
        app.control.revoke(_new_ids(1))
    figures = summary(in_turns(list(apps), scale, measure, "revokes", 3), "stock")
    pools.reset()
    vhost.delete()
    return figures


def _rate(function: Callable[[Any], object], arguments: list[Any]) -> float:
    start = time.perf_counter()
    for argument in arguments:
        function(argument)
    return len(arguments) / (time.perf_counter() - start)


# -- what they all need ------------------------------------------------------------------------


def instructions(call: Callable[[], object]) -> int:
    """Count the instructions of Python's that a call executes."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def _write(vhost: VHost, records: Sequence[Record], *, at_once: bool = True) -> None:
    """Write records and wait for the confirms: of all of them, or of one after the other."""
    with Connection(vhost.url, transport=OURS) as connection:
        connection.connect()
        amendments = connection.connection.delay_mechanism.amendments
        for group in [records] if at_once else [[record] for record in records]:
            amendments.write(group)


def _rest(broker: Broker, scale: Scale) -> None:
    if not scale.quick:
        let_rest(broker)


def _new_ids(count: int) -> list[str]:
    return [str(uuid.uuid4()) for _ in range(count)]


def _now() -> int:
    return time.time_ns() // 1_000_000
