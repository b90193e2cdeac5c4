"""Send one short delayed message through the real ladder, and report the findings.

It declares the same as any publish with a delay, and a private queue, which it deletes at the end.
It must not change anything else on the broker.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import amqp
from amqp.exceptions import AccessRefused, MessageNacked, NotFound, PreconditionFailed

from kombu_binary_delay.amendments.stream import INSTEAD
from kombu_binary_delay.celery_side.failures import to_raise_a_limit
from kombu_binary_delay.celery_side.worker_log import confirms, describe, known_defects
from kombu_binary_delay.errors import DelayError, TopologyError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import X_DELAY
from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.settings import Settings
from kombu_binary_delay.wire.mechanism import TRANSPORT, delays, mechanism_of, without_transport

from .declare import declare
from .errors import OperationError
from .limits import fewer
from .probe import Probe

#: How long to continue to wait for a late message, in seconds.
_PATIENCE = 25.0
_CONFIRM = 30.0  # seconds
_LOOK = "look at `kombu-binary-delay status` and `kombu-binary-delay verify`"


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    ``remedy`` is what to do if the state is not ``"ok"``; a command to copy has its own line.
    """

    what: str
    state: Literal["ok", "note", "error"]
    said: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """All findings of a check, and whether none of them is an error."""

    findings: tuple[Finding, ...]
    passed: bool


def check_app(app: Any) -> Iterator[Finding]:
    """Yield whether a Celery app uses our transport, as findings."""
    asked = app.conf.broker_transport
    try:
        with app.connection_for_write() as connection:
            transport = connection.get_transport_cls()
            confirmed = confirms(connection.transport_options)
    except (ImportError, AttributeError, KeyError) as exc:
        yield Finding(
            "transport",
            "error",
            f"the app's transport {asked!r} cannot be loaded: {exc}",
            f'set app.conf.broker_transport = "{TRANSPORT}"',
        )
        return
    name = f"{transport.__module__}:{transport.__name__}"
    if not delays(transport):
        yield Finding(
            "transport",
            "error",
            f"the app uses {name}, so its delayed tasks do not wait on the ladder",
            f'add one line:\napp.conf.broker_transport = "{TRANSPORT}"\nor, in the settings of '
            f'Django:\nCELERY_BROKER_TRANSPORT = "{TRANSPORT}"',
        )
        return
    yield Finding("transport", "ok", f"the app uses {name}")
    if not confirmed:
        yield Finding(
            "confirms",
            "note",
            "publisher confirms are off: what a broken connection loses is lost",
            "add to the transport options, broker_transport_options or Django's "
            'CELERY_BROKER_TRANSPORT_OPTIONS:\n"confirm_publish": True',
        )
    if app.conf.task_always_eager:
        yield Finding(
            "transport",
            "error",
            "the app's setting task_always_eager is on: each task runs at once, without a broker",
            "turn task_always_eager off",
        )


def check(connection: Any, settings: Settings, delay: float, late: float) -> Iterator[Finding]:
    """Send a delayed message to a private queue, wait for it, and yield the findings.

    :param connection: a :class:`kombu.Connection` by our transport with these settings.
    :param delay: in milliseconds.
    :param late: seconds after the due time from which a message counts as late.
    :raises DelayError: if the delay is zero, or out of the ladder's range.
    :raises OperationError: if the connection is by another transport.
    """
    if not delay:
        raise DelayError("got a delay of 0: what is due at once waits nowhere; give one of 1 s")
    broker = connection.connection
    mechanism = mechanism_of(broker)
    if mechanism is None:
        raise OperationError(without_transport(connection))
    server = broker.server_properties
    topology: Topology = mechanism.router.topology
    expected = topology.ladder.delay(topology.ladder.digits(delay)) / 1000
    yield Finding("connection", "ok", connection.as_uri())
    yield Finding("broker", "ok", f"{server.get('product')} {server.get('version', '')}")
    for known in known_defects(server):
        said = f"{known.release} {known.has}: {known.what}"
        yield Finding("broker", "note", said, known.remedy)
    if why := mechanism.amendments.why_impossible:
        yield Finding("cancelling", "note", why, INSTEAD)
    yield Finding("ladder", "ok", describe(topology))
    trial = _Trial(connection, settings, topology, delay)
    try:
        try:
            yield trial.prepare()
            seen = trial.send_and_wait(expected + late + _PATIENCE)
        except _Refusal as exc:
            yield exc.finding
            return
        if seen is None:
            yield trial.lost(expected)
            return
        yield judge(delay / 1000, expected, seen, late)
        yield trial.way()
    finally:
        trial.close()
    yield Finding("clean-up", "ok", f"the queue {trial.queue!r} is deleted, with its binding")


def judge(asked: float, expected: float, seen: float, late: float) -> Finding:
    """Return the finding about the measured delay; all times in seconds.

    :param asked: the requested delay.
    :param expected: the requested delay, rounded up to ticks.
    :param seen: the measured delay.
    :param late: how much later than ``expected`` a message may arrive.
    """
    said = f"asked for {asked:g} s, came after {seen:.3f} s"
    if expected > asked:
        said += f", with {expected:g} s in whole ticks"
    if seen < asked:
        remedy = (
            f"a queue of the ladder has another message TTL than it should, by a policy with "
            f"message-ttl perhaps: {_LOOK}"
        )
        return Finding("delay", "error", f"{said}: too early", remedy)
    if seen > expected + late:
        said += f": {seen - expected:.3f} s late"
        remedy = f"the broker is overloaded, or a level is held up: {_LOOK}"
        return Finding("delay", "error", said, remedy)
    return Finding("delay", "ok", said)


class _Refusal(Exception):  # noqa: N818 - it ends a check, and is never seen outside
    def __init__(self, what: str, said: str, remedy: str) -> None:
        super().__init__(said)
        self.finding = Finding(what, "error", said, remedy)


class _Trial:
    """One message, its queue, and the channels for both."""

    def __init__(
        self, connection: Any, settings: Settings, topology: Topology, delay: float
    ) -> None:
        self._connection, self._settings, self._topology = connection, settings, topology
        self._delay = delay
        self._arrived: list[tuple[float, Mapping[str, Any]]] = []
        self._queue = f"{settings.namespace}.check-{uuid.uuid4().hex[:12]}"
        #: If there are several lanes, the message's id decides its lane.
        self._properties = {"message_id": self._queue, "delivery_mode": 2}
        #: A channel of our transport, to publish as applications do.
        self._channel = connection.channel()
        #: A channel of py-amqp, which shows the message unchanged.
        self._raw = amqp.Channel(connection.connection)

    @property
    def queue(self) -> str:
        """The name of the private queue."""
        return self._queue

    def prepare(self) -> Finding:
        """Declare the private queue and the parts that a publish with this delay needs."""
        try:
            self._channel.queue_declare(self._queue, exclusive=True, auto_delete=True)
        except AccessRefused as exc:
            raise _Refusal(
                "permissions",
                f"the user may not have a queue for this check: {exc.reply_text}",
                f"grant configure, write and read on names that begin with "
                f"'{self._settings.namespace}.', or run the check as a user who has them",
            ) from exc
        except PreconditionFailed as exc:
            raise _Refusal("topology", exc.reply_text, self._on_refusal(exc.reply_text)) from exc
        parts = [self._needed(lane) for lane in self._lanes()]
        before = self._missing(sum(parts, Part()))
        try:
            if self._settings.declare == "never":
                # Applications do not bind there: the transport does it for their queues.
                topology = self._topology
                declare(self._connection, topology, topology.to_queue(self._queue))
            now = time.time_ns() // 1000
            due = now + int(self._delay * 1000)
            to = Destination("", self._queue)
            out = self._channel.way_out.ready_at(self._properties, to, due)
        except TopologyError as exc:
            raise _Refusal("permissions", str(exc), self._on_refusal(str(exc))) from exc
        self._raw.open()
        self._raw.basic_consume(self._queue, no_ack=True, callback=self._take)
        return self._prepared(parts[out.lane], before)

    def send_and_wait(self, patience: float) -> float | None:
        """Publish, and return the seconds until the message arrived; None if it did not.

        :param patience: seconds to wait.
        """
        message = amqp.Message(
            "kombu-binary-delay check",
            application_headers={X_DELAY: int(self._delay)},
            **self._properties,
        )
        began = time.monotonic()
        try:
            self._channel.basic_publish_confirm(message, "", self._queue, confirm_timeout=_CONFIRM)
        except (TopologyError, NotFound) as exc:
            raise _Refusal("publish", str(exc), self._on_refusal()) from exc
        except MessageNacked as exc:
            raise _Refusal(
                "publish",
                "the broker rejected the message: a queue of the ladder is full or not available",
                _LOOK,
            ) from exc
        except TimeoutError as exc:
            raise _Refusal(
                "publish",
                f"the broker did not confirm the message within {_CONFIRM:g} s",
                "look for an alarm of memory or disk: it blocks connections that publish"
                if getattr(self._connection.connection, "is_blocked", False)
                else _LOOK,
            ) from exc
        while not self._arrived and (left := began + patience - time.monotonic()) > 0:
            with suppress(TimeoutError):
                self._connection.drain_events(timeout=left)
        return self._arrived[0][0] - began if self._arrived else None

    def way(self) -> Finding:
        """Return a finding about the ladder's queues in which the message waited."""
        waits = {
            queue.name: queue.wait
            for lane in self._lanes()
            for queue in (*lane.whole.queues, *lane.base.queues)
        }
        deaths = reversed(self._arrived[0][1].get("x-death") or [])
        said = [
            f"{(waits[death['queue']] or 0) / 1000:g} s in {death['queue']}"
            for death in deaths
            if death.get("queue") in waits
        ]
        if said:
            return Finding("way", "ok", f"waited {', then '.join(said)}")
        return Finding("way", "note", "the message does not say in which queues it waited")

    def lost(self, expected: float) -> Finding:
        """Return a finding about a message that did not arrive."""
        parking = self._topology.parking
        return Finding(
            "delay",
            "error",
            f"asked for {expected:g} s, and the message has not come",
            f"{_LOOK}. If it comes after all, its queue {self._queue!r} is gone"
            + (f", and it is parked in {parking!r}" if parking else ""),
        )

    def close(self) -> None:
        """Delete the queue and so its bindings."""
        # If the connection broke, the broker has deleted the queue.
        with suppress(OSError, amqp.AMQPError):
            if self._raw.is_open:
                # First, because the broker notifies a consumer whose queue is deleted.
                self._raw.close()
            self._channel.queue_delete(self._queue)

    def _take(self, message: Any) -> None:
        headers = message.properties.get(HEADERS) or {}
        self._arrived.append((time.monotonic(), headers))

    def _lanes(self) -> list[Topology]:
        return self._topology.lanes(self._settings.lanes)

    def _needed(self, lane: Topology) -> Part:
        """Return the parts that a publish with this delay needs in a lane."""
        height = lane.needs(lane.ladder.digits(self._delay))
        return sum(lane.levels[: height + 1], lane.base)

    def _missing(self, part: Part) -> set[str] | None:
        """Return the names in a part that do not exist; None if this user may not ask."""
        exchanges = {exchange.name for exchange in part.exchanges}
        queues = {queue.name for queue in part.queues}
        try:
            with Probe(self._connection) as probe:
                missing = {exchange for exchange in exchanges if not probe.has_exchange(exchange)}
                return missing | {queue for queue in queues if not probe.has_queue(queue)}
        except AccessRefused:
            return None

    def _prepared(self, part: Part, before: set[str] | None) -> Finding:
        if before is None:
            return Finding("topology", "note", "this user may not ask what of the ladder exists")
        names = {exchange.name for exchange in part.exchanges} | {
            queue.name for queue in part.queues
        }
        count, gone = len(names), self._missing(part) or set()
        if gone:
            said = f"{len(gone)} of the {count} parts that this delay needs do not exist"
            raise _Refusal("topology", said, self._on_refusal())
        made = before & names
        if not made:
            return Finding(
                "topology", "ok", f"all {count} parts that this delay needs existed already"
            )
        said = f"declared {len(made)} of the {count} parts that this delay needs; they stay"
        return Finding("topology", "ok", f"{said}, as after any publish with a delay")

    def _on_refusal(self, said: str = "") -> str:
        limit = to_raise_a_limit(said, self._connection.virtual_host or "/")
        if limit is not None:
            most = re.search(r"queue limit .*\((\d+)\)", said)
            less = fewer(self._topology, int(most[1])) if most else ""
            return f"{limit}; or {less}" if less else limit
        if self._settings.declare == "never":
            return (
                "the setting declare is 'never': make the ladder with `kombu-binary-delay create`, "
                "and run the check as a user who may bind a queue to it"
            )
        return "grant the permissions, or set declare to 'never' and make the ladder beforehand"
