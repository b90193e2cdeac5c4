"""The one way out: what a delayed message needs is made here, and noted here once it is sent.

A publish, a batch, a message that is postponed and one that an operator moves ask :class:`WayOut`
what to publish where; a record of ours that waits on the ladder asks :func:`through`; a message for
another system's ladder, :func:`onto`. They differ only in the channel by which they send, and in
how they wait. This module must not import amendments or the journal, which are arguments.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from amqp.exceptions import RecoverableConnectionError

from kombu_binary_delay.errors import AddressError, DelayError, TopologyError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import (
    CELERY_EXPIRES,
    CHORD_UNLOCK,
    ETA,
    GENERATION,
    JITTER,
    TASK,
    X_DELAY,
    bounded,
    due_time,
    expiry_of,
)
from kombu_binary_delay.ladder.envelope import HEADERS, wrap
from kombu_binary_delay.ladder.identity import id_and_headers
from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.routing.commands import Answer, Ensure, Warn
from kombu_binary_delay.routing.router import Router
from kombu_binary_delay.telemetry import watch
from kombu_binary_delay.wire.executor import Executor

from .frames import UNWRITABLE, EncodedMessage
from .template import Run

#: Why a message cannot be delayed.
UNDELAYED = (AddressError, DelayError, TopologyError)
#: Later than any due time, in microseconds since the epoch.
EVER = 2**63


class Outgoing(NamedTuple):
    """What to publish where, and what to do once the broker has it; for :meth:`WayOut.done`."""

    properties: dict[str, Any]
    exchange: str
    routing_key: str
    #: Whether it asks for a delay, also one of zero: the journal then has an event of it.
    is_delayed: bool = False
    #: When it is due, in microseconds since the epoch; None if it does not wait.
    due: int | None = None
    #: Until when this may be sent, in microseconds since the epoch; later, its delay is a tick
    #: shorter, see :meth:`WayOut.ready_again`.
    until: int = EVER
    #: The records of what it supersedes.
    records: Sequence[Any] = ()
    #: The properties and the destination that the program gives it.
    given: tuple[dict[str, Any], Destination] = ({}, Destination("", ""))
    lane: int = 0


class Events(Protocol):
    """The journal, as far as the way out needs it."""

    @property
    def is_ready(self) -> bool:
        """Whether an event can be written without another question to the broker."""

    def prepare(self) -> None:
        """Declare what the first event needs."""

    def scheduled(self, *messages: tuple[dict[str, Any], str, str]) -> None:
        """Record that messages were published to the ladder."""


class Generations(Protocol):
    """What messages supersede; see :class:`kombu_binary_delay.amendments.generations`."""

    @staticmethod
    def supersedes(headers: Mapping[str, Any], /) -> bool:
        """Return whether a message with these headers supersedes others."""

    def named(
        self, properties: dict[str, Any], now: int, /, *, in_transaction: bool
    ) -> dict[str, Any]:
        """Return the properties with a generation."""

    def records(
        self,
        properties: Mapping[str, Any],
        due: int | None,
        now: int,
        check: Callable[[], object],
        /,
    ) -> Sequence[Any]:
        """Return the records to write after the publish of such a message."""

    def write(self, records: Sequence[Any], /) -> None:
        """Record what published messages supersede."""


class WayOut:
    """How the messages of one connection leave it.

    :param connection: a :class:`.ConnectionMixin`.
    :param journal: None if the journal is off.
    :param generations: names and records what supersedes other messages.
    """

    def __init__(
        self,
        connection: Any,
        router: Router,
        executor: Executor,
        journal: Events | None,
        generations: Generations,
    ) -> None:
        self._connection, self._router, self._executor = connection, router, executor
        self._journal, self._generations = journal, generations
        #: In microseconds.
        self._tick = router.topology.ladder.tick * 1000

    def concerns(self, headers: Mapping[str, Any]) -> bool:
        """Return whether a message with these headers asks for a delay or supersedes others.

        Any other is published as it is.
        """
        return asks_for_delay(headers) or self._generations.supersedes(headers)

    def ready(
        self,
        properties: dict[str, Any],
        destination: Destination,
        timeout: float | None = None,
        *,
        in_transaction: bool = False,
    ) -> Outgoing:
        """Return how to publish a message of the program, by what its headers ask for.

        On return, all that it needs exists: exchanges, queues and bindings, the journal, and the
        streams of amendments. The properties that are given do not change.

        :param timeout: how long to wait for each answer of the broker, in seconds; by default, the
            connection's ``read_timeout``, or :data:`.wire.connection.ANSWER_LIMIT`.
        :param in_transaction: whether the publish can be rolled back.
        :raises DelayError: if the delay is invalid or out of range.
        :raises AddressError: if the destination is invalid, or too long for a delayed message.
        :raises TopologyError: if the broker refuses to declare what the delay needs.
        :raises AmendmentError: if what it supersedes is invalid, or cannot be recorded.
        :raises RecoverableConnectionError: if the broker does not answer in time.
        """
        headers = properties.get(HEADERS) or {}
        now = time.time_ns() // 1000
        is_delayed = asks_for_delay(headers)
        if is_delayed and self._router.jitter:
            properties = self._with_jitter(properties, headers)
        supersedes = self._generations.supersedes(headers)
        if supersedes:
            properties = self._generations.named(properties, now, in_transaction=in_transaction)
        due = self._due(properties, now)
        records: Sequence[Any] = ()
        if supersedes:
            check = partial(self._router.plans.check, properties, due, destination, now)
            records = self._generations.records(properties, due, now, check)
        if not is_delayed:
            return Outgoing(properties, *destination, records=records)
        return self._planned((properties, destination), due, now, timeout, records)

    def enter(
        self, run: Run, part: slice, now: int
    ) -> tuple[Sequence[bytes], Sequence[int | None], Sequence[tuple[str, str]]]:
        """Return how to publish messages of a kind at once, if nothing else is needed for them.

        :param part: which messages of the run.
        :param now: microseconds since the epoch.
        :returns: of each, up to the first that only :meth:`ready` can make ready: the flags and
            properties as they are written, when it is due, in microseconds since the epoch, and the
            exchange and the routing key.
        :raises DelayError: if the jitter of one is too long.
        :raises UNWRITABLE: if AMQP cannot encode a value of one.
        """
        template, dues, further = run.template, run.due[part], run.further and run.further[part]
        can_wait = self._journal is None or self._journal.is_ready
        if self._router.jitter:
            can_wait = can_wait and not (template.has_last or self.is_noting)
            if can_wait:
                dues, further = self._later(run, part, now)
        if not (can_wait and run.is_usual):
            dues = dues[: run.count_plain(part, can_wait=can_wait)]
        # By one of them, a message has its lane.
        ids = map(run.properties.get, ("message_id", "correlation_id"))
        names = next((column[part] for column in ids if column), repeat(None))
        ways = self._router.plans.enter(template.destination, dues, names, now, template.priority)
        dues, count = dues[: len(ways)], len(ways)
        millis = [None if due is None or due <= now else -(-due // 1000) for due in dues]
        written = slice(part.start, part.start + count)
        return template.encode(run, written, millis, further and further[:count]), dues, ways

    def _later(
        self, run: Run, part: slice, now: int
    ) -> tuple[list[int | None], list[Mapping[str, Any]]]:
        """Return when messages of a run are due, and their further headers, with jitter."""
        dues: list[int | None] = []
        further: list[Mapping[str, Any]] = []
        for place in range(*part.indices(len(run.bodies))):
            due, own = run.due[place], run.further[place] if run.further else {}
            if due is not None:
                read = run.read(place)
                jittered = self._with_jitter(read, read[HEADERS])
                if jittered is not read:
                    own, due = {**own, JITTER: self._router.jitter}, self._due(jittered, now) or due
            dues.append(due)
            further.append(own)
        return dues, further

    @property
    def is_noting(self) -> bool:
        """Whether :meth:`note` has anything to do for a message that is sent now."""
        return bool(self._journal or watch.published or self._router.relies_on_others)

    def ready_at(
        self,
        properties: dict[str, Any],
        destination: Destination,
        due: int,
        timeout: float | None = None,
    ) -> Outgoing:
        """Return how to publish a message that is due at a time, and at least one tick from now.

        :param due: microseconds since the epoch.
        :raises BinaryDelayError, RecoverableConnectionError: as :meth:`ready`.
        """
        now = min(time.time_ns() // 1000, due - 1)
        return self._planned((properties, destination), due, now, timeout)

    def ready_again(self, out: Outgoing, timeout: float | None = None) -> Outgoing:
        """Return how to publish a message now that was not sent when it was ready.

        If it is due by now, one tick remains: without a delay, RabbitMQ would apply its expiration.

        :raises BinaryDelayError, RecoverableConnectionError: as :meth:`ready`.
        """
        if out.due is None:
            return out
        now = min(time.time_ns() // 1000, out.due - 1)
        return self._planned(out.given, out.due, now, timeout, out.records)

    def ready_without_delay(
        self,
        properties: dict[str, Any],
        destination: Destination,
        why: Exception,
        *,
        in_transaction: bool = False,
    ) -> Outgoing:
        """Return how to publish a retry of a task without the delay that it cannot have.

        Celery would drop the task; a worker keeps it until it is due.
        """
        headers = properties[HEADERS]
        self._executor.do(
            Warn(f"a retry of {headers[TASK]} is left to a worker to keep until it is due: {why}")
        )
        records: Sequence[Any] = ()
        if self._generations.supersedes(headers):
            now = time.time_ns() // 1000
            properties = self._generations.named(properties, now, in_transaction=in_transaction)
            records = self._generations.records(properties, None, now, lambda: None)
        return Outgoing(properties, *destination, records=records)

    def done(self, out: Outgoing) -> None:
        """Do what is left to do once the broker has a message.

        :raises AmendmentError: as :meth:`record`.
        """
        self.note((out,))
        if out.records:
            self.record(out.records)

    def note(self, outs: Sequence[Outgoing]) -> None:
        """Write the events of messages that were sent to the journal, all at once."""
        waiting = [(out, out.due) for out in outs if out.due is not None]
        if waiting:
            # The next one need not wait: of one that was sent by a batch, the confirm says it.
            self._router.relies_on_others = False
        if self._journal is not None:
            delayed = (
                (out.properties, out.exchange, out.routing_key) for out in outs if out.is_delayed
            )
            self._journal.scheduled(*delayed)
        if watch.published:
            for out, due in waiting:
                self._notify(out, due)

    def _notify(self, out: Outgoing, due: int) -> None:
        """Notify listeners of a message that is on the ladder."""
        name, _ = id_and_headers(out.given[0])
        wait = self._router.deliveries.wait(out.exchange, out.routing_key, out.properties[HEADERS])
        asked = (wait or 0) / 1000
        task = watch.task_of(out.given[0])
        message = watch.Published(name, task, *out.given[1], asked, due / 1_000_000)
        watch.notify(watch.published, message)

    def record(self, records: Sequence[Any]) -> None:
        """Record what messages supersede that the broker has.

        :raises AmendmentError: if the broker does not take the records.
        """
        self._generations.write(records)

    def _planned(
        self,
        given: tuple[dict[str, Any], Destination],
        due: int | None,
        now: int,
        timeout: float | None,
        records: Sequence[Any] = (),
    ) -> Outgoing:
        properties, destination = given
        properties = _expiring(properties, due, now)
        router, journal = self._router, self._journal
        plan = router.plans.publish(properties, due, destination, now)
        is_noted = journal is None or journal.is_ready
        if plan.needs or not is_noted:
            # Where the broker blocks publishers, it answers nothing after the publish.
            with self._connection.answered_within(timeout):
                if journal is not None and not is_noted:
                    journal.prepare()
                # Twice: what a shorter delay passes may be something else.
                for _ in range(2):
                    if plan.needs:
                        self._executor.run(router.prepare(plan.needs, now))
                    if due is None or due <= now:
                        break
                    # That took time, which is a part of the delay; at least one tick remains.
                    now = min(time.time_ns() // 1000, due - 1)
                    plan = router.plans.publish(properties, due, destination, now, plan.lane)
                    if not plan.needs:
                        break
        exchange, key, wrapped, lane, _ = plan
        until = EVER
        if due is not None:
            ticks = -((now - due) // self._tick)
            # No delay is shorter than one tick.
            if ticks > 1:
                until = due - (ticks - 1) * self._tick
            elif ticks < 1:
                due = None
        is_delayed = True
        return Outgoing(wrapped, exchange, key, is_delayed, due, until, records, given, lane)

    def _with_jitter(
        self, properties: dict[str, Any], headers: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the properties of a delayed message, with the jitter of the settings.

        A message that has jitter of its own, or is not delayed, stays as it is, and so does what
        polls a chord. The header shows readers of the message, who do not know the publisher's
        settings, when it arrives.
        """
        if JITTER in headers or due_time(headers, 0) is None or headers.get(TASK) == CHORD_UNLOCK:
            return properties
        return {**properties, HEADERS: {**headers, JITTER: self._router.jitter}}

    def _due(self, properties: Mapping[str, Any], now: int) -> int | None:
        headers = properties.get(HEADERS) or {}
        name = ""
        if JITTER in headers:
            # A message without any name is nobody's to publish again.
            ids = map(properties.get, ("message_id", "correlation_id"))
            names = *ids, headers.get(GENERATION)
            usable = (name for name in names if name and isinstance(name, str))
            name = next(usable, None) or str(uuid.uuid4())
        return self._router.due(headers, now, name)


def _expiring(properties: dict[str, Any], due: int | None, now: int) -> dict[str, Any]:
    """Return the properties of a message that expires so long after it is due.

    Of a task, Celery's workers check it. Of another message, a consumer with the transport does,
    and RabbitMQ if the message is due already: it drops an ``expiration`` where it dead-letters.

    :raises DelayError: if the header cannot be read, or that is after the year 9999.
    """
    headers = properties.get(HEADERS)
    if due is None or not headers or (expires := expiry_of(headers, due)) is None:
        return properties
    if TASK in headers:
        moment = datetime.fromtimestamp(bounded(expires // 1000) / 1000, UTC)
        return {**properties, HEADERS: {**headers, CELERY_EXPIRES: moment.isoformat()}}
    if due <= now:
        return {**properties, "expiration": str(max((expires - now) // 1000, 0))}
    return properties


def asks_for_delay(headers: Mapping[str, Any]) -> bool:
    """Return whether the headers ask for a delay, also one of zero."""
    return headers.get(ETA) is not None or X_DELAY in headers


def encoded(connection: Any, body: Any, properties: dict[str, Any]) -> EncodedMessage:
    """Return a message of which it is known that it can be written to a connection.

    Otherwise the broker would end the connection.

    :param connection: of py-amqp; None if the channel is closed.
    :raises DelayError: if it cannot be written.
    :raises RecoverableConnectionError: if there is no connection.
    """
    if connection is None:
        raise RecoverableConnectionError("basic_publish: connection closed")
    try:
        return EncodedMessage(body, properties, connection.frame_max)
    except UNWRITABLE as exc:
        raise DelayError(f"it cannot be written: {exc}") from exc


def through(  # noqa: PLR0913 - by what, from where, to where, and what that needs
    router: Router,
    executor: Executor,
    exchange: str,
    destination: Destination,
    due: int,
    *,
    way: Part,
    declare: Callable[[], object],
) -> Outgoing:
    """Return how to publish a record of ours that waits on the ladder, through an exchange of ours.

    On return, the levels exist, and lead on to the destination.

    :param due: microseconds since the epoch.
    :param way: what leads from the ladder to the destination.
    :param declare: declares the exchange and the destination, if one is missing.
    :raises DelayError: if the delay is longer than the ladder's maximum.
    :raises TopologyError: if the broker refuses to declare what it needs.
    """
    now = time.time_ns() // 1000
    plan, enter = router.plans.through(exchange, destination, due, now)
    executor.run(router.prepare(plan.needs, now))
    command = Ensure(way + Part(bindings=(enter,)), f"the way of {exchange!r} through the ladder")
    if executor.do(command) is Answer.MISSING:
        declare()
        executor.do(command)
    return Outgoing(plan.properties, plan.exchange, plan.routing_key, due=due)


def onto(
    ladder: Topology, properties: dict[str, Any], destination: Destination, due: int, now: int
) -> Outgoing:
    """Return how to publish a message to a ladder that no router knows, as another system's is.

    What leads from it to the destination is the caller's to make.

    :param due: milliseconds since the epoch, as ``now``; at least one tick remains.
    :raises DelayError: if the delay is longer than the ladder's maximum.
    :raises AddressError: if the destination does not fit into its routing key.
    """
    digits = ladder.ladder.digits(max(due - now, 1))
    wrapped, key = wrap(
        properties, destination, due, lambda to: ladder.address(digits, to), ladder.owns
    )
    return Outgoing(wrapped, ladder.entry_exchange(digits), key, due=due * 1000)


def back_onto(
    ladder: Topology,
    properties: dict[str, Any],
    place: Destination,
    had: int,
    digits: Sequence[str],
) -> Outgoing:
    """Return how to publish a message to the ladder that it has left, with other digits.

    :param properties: as it came; only the addresses in its ``CC`` change.
    :param place: the exchange to enter by, and its address until now.
    :param had: how many digits its addresses have.
    :param digits: of what remains of its delay.
    """

    def again(address: str) -> str:
        if not ladder.is_ours:
            try:
                return ladder.address(tuple(digits), ladder.parse(address)[1])
            except AddressError:
                # Its publisher knows nothing of the ladder, which no such key goes through.
                return address
        way = address.split(".", had)[-1]
        return ".".join([*reversed(digits), way])

    headers = dict(properties.get(HEADERS) or {})
    if isinstance(headers.get("CC"), list):
        headers["CC"] = [again(key) if isinstance(key, str) else key for key in headers["CC"]]
    return Outgoing({**properties, HEADERS: headers}, place.exchange, again(place.routing_key))
