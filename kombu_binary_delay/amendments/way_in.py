"""The way in: what happens to a message that is delivered, before the program sees it.

One that was cancelled or superseded is dropped, or left to Celery's worker, which discards it as
revoked. One that was postponed is delayed again. Any other is given to the program as it was
published.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from amqp.exceptions import RecoverableConnectionError
from kombu.log import get_logger

from kombu_binary_delay.errors import AddressError, AmendmentError, DelayError, TopologyError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import ETA, EXPIRES, JITTER, TASK, X_DELAY, expiry_of, is_over
from kombu_binary_delay.ladder.envelope import (
    COPIES,
    HEADERS,
    OFFSET,
    due_of,
    left_at,
    seen_as,
)
from kombu_binary_delay.ladder.identity import id_and_headers
from kombu_binary_delay.ladder.returns import MOST_RETURNS, returns
from kombu_binary_delay.routing.router import Delivery
from kombu_binary_delay.telemetry import watch
from kombu_binary_delay.wire import alarms
from kombu_binary_delay.wire.mechanism import Mechanism
from kombu_binary_delay.wire.received import copy_of

from .memory import POSTPONED, SUPERSEDED, Fate
from .names import EXPIRED
from .record import REPLACES
from .stream import Amendments

logger = get_logger(__package__)

#: Why a message cannot be delayed again.
_UNDELAYED = (AddressError, AmendmentError, DelayError, TopologyError)

Dispatch = Callable[[Any], object]


class Worker(Protocol):
    """What Celery's worker does with its messages; see :mod:`.celery_side.tasks`."""

    def is_worker(self, callback: Any) -> bool:
        """Whether a consumer's callback is a worker's, which discards revoked tasks itself."""

    def hears_broadcasts(self, queue: str) -> bool:
        """Whether what is in a queue are broadcasts to workers."""

    def reads_results(self, callback: Any) -> bool:
        """Whether a consumer's callback reads results."""

    def may_revoke(self, body: Any) -> bool:
        """Whether a broadcast may revoke something."""

    def discard(self, task_id: str, receive: Callable[[], object]) -> bool:
        """Make the worker discard the task that it receives in this call."""

    def accept_here(self, task_id: str) -> None:
        """Make the worker accept a task that replaces a revoked one with the same id."""

    def with_own_nested(self, headers: dict[str, Any]) -> dict[str, Any]:
        """Return the headers of a task so that its retries keep those of this transport."""


class WayIn:
    """How the deliveries of one channel come to the program.

    :param channel: a :class:`.ChannelMixin`.
    """

    def __init__(self, channel: Any, worker: Worker) -> None:
        self._channel, self._worker = channel, worker
        #: The prefetch limit; 0 for none.
        self.prefetch = 0
        #: How many messages are held, and how often the channel was opened anew.
        self._holding = self._reopened = 0
        #: Whether what is dispatched now is left to a worker, to discard it.
        self._is_discarding = False

    # -- what is delivered ---------------------------------------------------------------------

    def consumer(
        self, queue: str, tag: str, callback: Dispatch | None, *, no_ack: bool
    ) -> Dispatch | None:
        """Return the callback to consume with, having read what was amended so far."""
        if callback is not None and self._worker.hears_broadcasts(queue):
            callback = partial(self._hear, callback)
        # A result has no id of its own by which it could be amended.
        if self._mechanism.router.is_private(queue) or self._worker.reads_results(callback):
            return callback
        self._amendments.reader.catch_up()
        if callback is None:
            return None
        return partial(self._deliver, self._amendments.reader.fate, callback, tag, no_ack)

    def _hear(self, dispatch: Dispatch, message: Any) -> None:
        """Dispatch a broadcast. If it revokes something, there are amendments now."""
        if self._worker.may_revoke(message.body):
            self._amendments.reader.heard()
        dispatch(message)

    def passes(self, message: Any, *, no_ack: bool) -> bool:
        """Judge a message that was got; return whether it is the program's."""
        message.delivery_info["no_ack"] = no_ack
        fate = self._amendments.reader.fate(message.properties) or _expired(message)
        return fate is None or not self._handle(fate, message, partial(self._put_back, message))

    def _deliver(
        self,
        judge: Callable[[Mapping[str, Any]], Fate | None],
        dispatch: Dispatch,
        tag: str,
        no_ack: bool,  # noqa: FBT001 - once for each delivery
        message: Any,
    ) -> None:
        """Dispatch a message to a consumer, unless it was amended."""
        fate = judge(message.properties) or _expired(message)
        if fate is None:
            headers = message.properties.get(HEADERS)
            if (
                headers
                and REPLACES in headers
                and self._amendments.memory.revives(message.properties, time.time_ns() // 1_000_000)
            ):
                # A Celery worker that got the broadcast has the id in its own set.
                self._worker.accept_here(id_and_headers(message.properties)[0])
            dispatch(message)
            return
        # Not by what py-amqp knows of the consumer, which may be cancelled by now.
        message.delivery_info["no_ack"] = no_ack
        if fate.reason != POSTPONED and self._worker.is_worker(dispatch):
            self._leave_to_worker(fate, dispatch, message)
            return
        again = partial(self._deliver_again, judge, dispatch, tag, no_ack, message)
        if not self._handle(fate, message, again):
            dispatch(message)

    def _deliver_again(
        self,
        judge: Callable[[Mapping[str, Any]], Fate | None],
        dispatch: Dispatch,
        tag: str,
        no_ack: bool,  # noqa: FBT001 - as in _deliver
        message: Any,
    ) -> None:
        if tag in self._channel.callbacks:
            self._deliver(judge, dispatch, tag, no_ack, message)
        else:
            # Its consumer was cancelled.
            self._put_back(message)

    def _handle(self, fate: Fate, message: Any, again: Callable[[], object]) -> bool:
        """Drop a message or delay it again; return False if the latter was not possible.

        :param again: does this once more, for when the broker blocks publishers.
        """
        if fate.reason != POSTPONED:
            self._drop(fate, message)
            return True
        has_acks = not message.delivery_info.get("no_ack")
        try:
            if alarms.is_recent(self._channel.connection):
                self._hold(message, fate.due, again)
                return True
            self._delay_again(message, fate.due * 1000)
        except (*_UNDELAYED, RecoverableConnectionError) as exc:
            if has_acks and isinstance(exc, RecoverableConnectionError):
                # The broker gives it again.
                raise
            logger.warning("%s is not postponed, but delivered now: %s", _name(message), exc)
            return False
        self._acknowledge(message)
        return True

    # -- dropped, or left to the worker --------------------------------------------------------

    def _leave_to_worker(self, fate: Fate, dispatch: Dispatch, message: Any) -> None:
        """Dispatch a task so that Celery's worker discards it as revoked."""
        if fate.reason == SUPERSEDED and not fate.by_key:
            # The task that replaces it has the same id, and is not revoked.
            self._drop(fate, message)
            return
        name, _ = id_and_headers(message.properties)
        self._is_discarding = True
        try:
            # Not for longer: the next task with the id may replace this one.
            is_discarded = self._worker.discard(name, partial(dispatch, message))
        finally:
            self._is_discarding = False
        if is_discarded:
            self._notify_dropped(fate, message, by_worker=True)
        else:
            logger.warning(
                "%s was %s, but may run: Celery has not asked whether it is revoked, as for a task "
                "whose class has a Strategy of its own",
                _name(message),
                fate.reason,
            )

    def _drop(self, fate: Fate, message: Any) -> None:
        self._acknowledge(message)
        journal = self._mechanism.journal
        if journal is not None:
            # Of a message without an `eta`, only the ladder's header has the due time.
            to = self._as_published(message).destination
            journal.taken_back(message.properties, to, again=False)
        queue = self._channel.following.queue_of(message.delivery_info)
        logger.info("dropped %s from the queue %r: it was %s", _name(message), queue, fate.reason)
        self._notify_dropped(fate, message)

    def _notify_dropped(self, fate: Fate, message: Any, *, by_worker: bool = False) -> None:
        if watch.dropped:
            name, _ = id_and_headers(message.properties)
            queue = self._channel.following.queue_of(message.delivery_info)
            dropped = watch.Dropped(
                name, fate.reason, queue, message.properties, message.body, by_worker
            )
            watch.notify(watch.dropped, dropped)

    # -- delayed again -------------------------------------------------------------------------

    def _delay_again(self, message: Any, due: int) -> None:
        """Publish a message again to the queue that it came from, for the rest of its delay.

        :param due: microseconds since the epoch.
        """
        mechanism = self._mechanism
        queue = self._channel.following.queue_of(message.delivery_info)
        if not queue:
            raise AmendmentError("the queue that it came from is not known")
        if OFFSET in (message.properties.get(HEADERS) or {}):
            raise AmendmentError("it is in a stream, which keeps it, and gives it to others too")
        if not self._channel.supports_batch_publish:
            raise AmendmentError("the channel has a transaction, whose rollback would duplicate it")
        longest = time.time_ns() // 1000 + mechanism.router.topology.ladder.maximum * 1000
        published = self._as_published(message)
        headers = dict(published.properties.get(HEADERS) or {})
        if headers.get(ETA) is not None and TASK in headers:
            headers[ETA] = datetime.fromtimestamp(due / 1_000_000, UTC).isoformat()
        # Somebody has named this time.
        headers.pop(JITTER, None)
        # To that queue only: copies in other queues are delayed again to theirs. On delivery, it
        # must still look as it was published.
        copies = {name: headers.pop(name) for name in COPIES if name in headers}
        properties = {**published.properties, HEADERS: headers}
        out = mechanism.way_out.ready_at(properties, Destination("", queue), min(due, longest))
        seen_as(out.properties[HEADERS], published.destination, copies)
        again = copy_of(message, out.properties)
        self._amendments.publish(again, out.exchange, out.routing_key)
        if mechanism.journal is not None:
            to = published.destination
            mechanism.journal.taken_back(message.properties, to, again=True)
        mechanism.way_out.done(out)

    def _hold(self, message: Any, due: int, again: Callable[[], object]) -> None:
        """Hold a message that cannot be delayed again while the broker blocks publishers.

        :raises AmendmentError: if it is without acks, came too often, or would stop this channel's
            consumers: the alarm may need them to go on.
        """
        if message.delivery_info.get("no_ack"):
            raise AmendmentError("the broker blocks publishers, and would not give it again")
        came = returns(message.properties.get(HEADERS))
        if came >= MOST_RETURNS:
            raise AmendmentError(
                f"the broker blocks publishers, and has given it {came} times before: at its "
                f"queue's delivery limit, it would be dropped"
            )
        if self.prefetch and self._holding + 1 >= self.prefetch:
            raise AmendmentError(
                f"the broker blocks publishers, and the prefetch limit, {self.prefetch}, has no "
                f"room for another message that waits"
            )
        self._holding += 1
        self._amendments.held.hold(due, partial(self._try_again, again, self._reopened))

    def _try_again(self, again: Callable[[], object], reopened: int) -> None:
        # A channel that has closed has given its messages back, also where it is open again.
        channel = self._channel
        if reopened == self._reopened and channel.is_open and not channel.is_closing:
            self._holding -= 1
            again()

    def reopened(self) -> None:
        """Take into account that the channel was opened anew."""
        self._reopened += 1
        self._holding = 0

    # -- as it was published -------------------------------------------------------------------

    def unwrap(self, message: Any, mechanism: Mechanism) -> None:
        """Change a message, in place, into what was published; the journal has an event of it.

        :param mechanism: of the connection that it came by, from which the channel may have gone.
        """
        info, journal = message.delivery_info, mechanism.journal
        came_to = Destination(info.get("exchange", ""), info.get("routing_key", ""))
        queue = self._channel.following.queue_of(info)
        delivery = mechanism.router.deliveries.received(*came_to, message.properties, queue)
        told = None
        if delivery is None:
            if journal is not None:
                journal.received(message.properties, came_to)
        else:
            if journal is not None or watch.delivered:
                wrapped = message.properties.get(HEADERS) or {}
                left = left_at(wrapped, mechanism.router.topology.owns)
                if journal is not None:
                    journal.released(message.properties, delivery.destination, left)
                if watch.delivered and not self._is_discarding:
                    told = self._notify(message, wrapped, queue, left, mechanism)
            info["exchange"], info["routing_key"] = delivery.destination
            message.properties = delivery.properties
        headers = message.properties.get(HEADERS)
        if not headers:
            return
        kept = headers
        if X_DELAY in headers and is_over(headers[X_DELAY]):
            # Celery gives it to a retry, too.
            kept = {name: value for name, value in headers.items() if name != X_DELAY}
        if told is not None and TASK in headers:
            kept = {**kept, watch.DELIVERED: told}
        kept = self._worker.with_own_nested(kept)
        if kept is not headers:
            message.properties = {**message.properties, HEADERS: kept}

    @staticmethod
    def _notify(
        message: Any,
        wrapped: dict[str, Any],
        queue: str,
        left: int | None,
        mechanism: Mechanism,
    ) -> dict[str, float | None] | None:
        """Notify listeners of a message that has waited; return what its task gets to know.

        :param wrapped: its headers as it came.
        """
        due = due_of(wrapped)
        if due is None:
            return None
        info = message.delivery_info
        wait = mechanism.router.deliveries.wait(
            info.get("exchange", ""), info.get("routing_key", ""), wrapped
        )
        name, _ = id_and_headers(message.properties)
        arrived = watch.Delivered(
            name,
            watch.task_of(message.properties),
            queue,
            None if wait is None else wait / 1000,
            due / 1_000_000,
            left,
            time.time(),
            bool(info.get("redelivered")),
        )
        watch.notify(watch.delivered, arrived)
        return {"asked": arrived.asked, "due": arrived.due, "lateness": arrived.lateness}

    def _as_published(self, message: Any) -> Delivery:
        """Return how a message was published, whether a ladder delivered it or not."""
        info = message.delivery_info
        came_to = Destination(info.get("exchange", ""), info.get("routing_key", ""))
        queue = self._channel.following.queue_of(info)
        delivery = self._mechanism.router.deliveries.received(*came_to, message.properties, queue)
        return delivery or Delivery(came_to, message.properties)

    def _acknowledge(self, message: Any) -> None:
        if not message.delivery_info.get("no_ack"):
            self._channel.basic_ack(message.delivery_info["delivery_tag"])

    def _put_back(self, message: Any) -> None:
        self._channel.basic_reject(message.delivery_info["delivery_tag"], requeue=True)

    @property
    def _mechanism(self) -> Mechanism:
        mechanism: Mechanism = self._channel.mechanism
        return mechanism

    @property
    def _amendments(self) -> Amendments:
        return self._mechanism.amendments


def _expired(message: Any) -> Fate | None:
    """Return the fate of a message that comes too late; None if it does not.

    Celery's workers check that of their tasks themselves.
    """
    headers = message.properties.get(HEADERS)
    if not headers or EXPIRES not in headers or TASK in headers:
        return None
    due = due_of(headers)
    try:
        expires = None if due is None else expiry_of(headers, due)
    except DelayError:
        return None
    return None if expires is None or expires > time.time_ns() // 1000 else Fate(EXPIRED)


def _name(message: Any) -> str:
    name, headers = id_and_headers(message.properties)
    return f"{headers.get(TASK) or 'the message'} {name or 'without an id'}"
