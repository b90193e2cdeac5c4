"""The part of a channel that writes amendments and honours them.

At a publish, a revoke that Celery broadcasts is recorded before the broadcast, and a message with a
key or a replaced id is recorded after the message. At a delivery, before the program sees it, a
message that was cancelled or superseded is dropped, and one that was postponed is delayed again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import amqp
from amqp.exceptions import RecoverableConnectionError
from kombu.exceptions import KombuError
from kombu.log import get_logger

from kombu_binary_delay.errors import AddressError, AmendmentError, DelayError, TopologyError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.delay import ETA, JITTER, RETRIES, TASK, is_retry
from kombu_binary_delay.ladder.envelope import COPIES, HEADERS, OFFSET, seen_as
from kombu_binary_delay.ladder.identity import names_of
from kombu_binary_delay.ladder.returns import MOST_RETURNS, returns
from kombu_binary_delay.routing.router import Delivery
from kombu_binary_delay.settings import milliseconds
from kombu_binary_delay.wire import alarms
from kombu_binary_delay.wire.following import FollowingChannel
from kombu_binary_delay.wire.received import copy_of, keep_body

from . import celery
from .memory import POSTPONED, SUPERSEDED
from .memory import Fate as Verdict
from .parts import KEYS_MAX_AGE
from .record import (
    GENERATION,
    KEY,
    LONGEST_WAIT,
    REPLACES,
    Supersede,
    check_name,
    check_wait,
    new_generation,
)
from .stream import Amendments

logger = get_logger(__package__)

#: The longest delay of a message with a key, in milliseconds: half the time its record is kept.
LONGEST_KEYED = milliseconds(KEYS_MAX_AGE) // 2

#: Why a message cannot be delayed again.
_UNDELAYED = (AddressError, AmendmentError, DelayError, TopologyError)

Dispatch = Callable[[Any], object]
Judge = Callable[[Mapping[str, Any]], Verdict | None]


@dataclass(frozen=True)
class Dropped:
    """A message that was dropped instead of delivered.

    :param id: of the task or the message; empty if it has none.
    :param reason: ``cancelled`` or ``superseded``.
    :param queue: the queue that it was taken from.
    :param properties: as it arrived.
    :param body: as it was published.
    """

    id: str
    reason: str
    queue: str
    properties: Mapping[str, Any]
    body: Any


_listeners: list[Callable[[Dropped], object]] = []


def on_dropped(listener: Callable[[Dropped], object]) -> Callable[[Dropped], object]:
    """Register a function to call with each message that this process drops; also a decorator.

    It is not called for tasks that a Celery worker discards: use Celery's signal ``task_revoked``.
    """
    _listeners.append(listener)
    return listener


class AmendingChannel(FollowingChannel):
    """The part of a channel that writes amendments and honours them."""

    # -- outward -------------------------------------------------------------------------------

    def _record_broadcast(self, msg: Any) -> None:
        """Record what a broadcast of Celery's revokes, before it is published."""
        amendments = self._amendments
        if not amendments.is_wanted:
            return
        now = time.time_ns() // 1_000_000
        try:
            records = celery.records_of_broadcast(msg.properties, msg.body, now)
            if records:
                amendments.write(records)
        except KombuError as exc:
            logger.warning("a revoke is not recorded, only sent to the running workers: %s", exc)

    @staticmethod
    def begins_generation(headers: Mapping[str, Any] | None) -> bool:
        """Return whether a message supersedes others; a retry of a task does not."""
        if not headers or GENERATION in headers:
            return False
        # A retry has the generation of its task. That has none if its publisher was without this
        # transport, and is older than whatever has one by now.
        was_tried = TASK in headers and bool(headers.get(RETRIES))
        return REPLACES in headers or (KEY in headers and not was_tried)

    def begin_generation(
        self, msg: Any, asked: dict[str, Any], destination: Destination
    ) -> tuple[Any, list[Supersede]]:
        """Return the message with a generation, and the records to write after its publish.

        :param asked: the headers that ask for its delay.
        :raises BinaryDelayError: if the message cannot be delayed to its destination.
        :raises AmendmentError: if the key is invalid, or the broker or user cannot amend.
        """
        amendments = self._amendments
        amendments.require()
        if not self.supports_batch_publish:
            raise AmendmentError(
                f"a message with {KEY} or {REPLACES} cannot be published in a transaction, since "
                f"its record cannot be rolled back; publish it on a channel without tx_select"
            )
        headers = msg.properties[HEADERS]
        wait = check_wait(headers.get(LONGEST_WAIT))
        if wait is not None and KEY not in headers:
            raise AmendmentError(f"{LONGEST_WAIT} needs {KEY}, which this message does not have")
        now = time.time_ns() // 1000
        at = now // 1000
        generation = new_generation(at)
        amended = amqp.Message(msg.body)
        amended.properties = {**msg.properties, HEADERS: {**headers, GENERATION: generation}}
        wanted = self.due(amended.properties, asked, now)
        if not (amendments.can_write or is_retry(headers)):
            # What is refused has declared nothing. Later, the plan of the publish is soon enough.
            self._router.check(amended.properties, wanted, destination, now)
        due = -(-(wanted or now) // 1000)
        longest = max(due - at, wait or 0)
        if KEY in headers and longest > LONGEST_KEYED:
            raise AmendmentError(
                f"a message with {KEY} can wait for at most {LONGEST_KEYED // 1000} s, got "
                f"{longest / 1000:g} s; give it an id, and replace it by its id"
            )
        records = [
            Supersede(check_name(headers[name], name), generation, due, at, limit, keyed=keyed)
            for name, limit, keyed in ((KEY, wait, True), (REPLACES, None, False))
            if name in headers
        ]
        amendments.prepare()
        return amended, records

    def due(self, properties: Mapping[str, Any], asked: dict[str, Any], now: int) -> int | None:
        """Return when a message is due, in microseconds since the epoch.

        :param asked: the headers that ask for its delay.
        :returns: None if it asks for none.
        :raises DelayError: if it is invalid.
        """
        name = ""
        if JITTER in asked:
            # A message without any name is nobody's to publish again.
            headers = properties.get(HEADERS) or {}
            names = *map(properties.get, ("message_id", "correlation_id")), headers.get(GENERATION)
            found = (each for each in names if each and isinstance(each, str))
            name = next(found, None) or str(uuid.uuid4())
        due: int | None = self._router.due(asked, now, name)
        return due

    def record_generations(self, records: list[Supersede]) -> None:
        """Record what published messages supersede.

        :raises AmendmentError: if the broker does not take the records.
        """
        try:
            self._amendments.write(records)
        except AmendmentError as exc:
            names = ", ".join(repr(each.name) for each in records[:3])
            raise AmendmentError(
                f"{len(records)} messages were published, but not recorded, so the messages that "
                f"they supersede are delivered as well ({names}): {exc}"
            ) from exc

    # -- inward --------------------------------------------------------------------------------

    def dispatch_method(self, method_sig: tuple[int, int], payload: Any, content: Any) -> Any:
        """Handle a method of the broker's; what comes with one may have to be published again."""
        if content is not None:
            keep_body(content)
        return super().dispatch_method(method_sig, payload, content)

    def basic_consume(  # noqa: PLR0913, PLR0917 - amqp's own
        self,
        queue: str = "",
        consumer_tag: str = "",
        no_local: bool = False,  # noqa: FBT001, FBT002
        no_ack: bool = False,  # noqa: FBT001, FBT002
        exclusive: bool = False,  # noqa: FBT001, FBT002
        nowait: bool = False,  # noqa: FBT001, FBT002
        callback: Dispatch | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Consume, having read what was amended so far."""
        tag = consumer_tag or f"ctag-{uuid.uuid4().hex}"
        if queue.endswith(celery.BROADCASTS) and callback is not None:
            callback = partial(self._hear, callback)
        # A result has no id of its own by which it could be amended.
        if not (
            self._router.is_private(queue or self._last_queue) or celery.reads_results(callback)
        ):
            self._amendments.catch_up()
            if callback is not None:
                judge = self._amendments.verdict
                callback = partial(self._deliver, judge, callback, tag, no_ack)
        # amqp does this when the broker has answered. But where another consumer's callback runs
        # while that is waited for, and declares, the first deliveries are dispatched together with
        # the answer: amqp would reject them, and without acks they would be lost.
        self.callbacks[tag] = callback
        if no_ack:
            self.no_ack_consumers.add(tag)
        options = (no_local, no_ack, exclusive, nowait, callback)
        try:
            return super().basic_consume(queue, tag, *options, *args, **kwargs)
        except BaseException:
            self.callbacks.pop(tag, None)
            self.no_ack_consumers.discard(tag)
            raise

    def _hear(self, dispatch: Dispatch, message: Any) -> None:
        """Dispatch a broadcast. If it revokes something, there are amendments now."""
        if celery.may_revoke(message.body):
            self._amendments.heard()
        dispatch(message)

    def basic_get(
        self,
        queue: str = "",
        no_ack: bool = False,  # noqa: FBT001, FBT002 - amqp's own
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Get a message; dropped and postponed messages are skipped."""
        self._amendments.look()
        while True:
            message = super().basic_get(queue, no_ack, *args, **kwargs)
            if message is None:
                return None
            message.delivery_info["no_ack"] = no_ack
            verdict = self._amendments.verdict(message.properties)
            again = partial(self._put_back, message)
            if verdict is None or not self._keep_to(verdict, message, again):
                return message

    def _deliver(
        self,
        judge: Judge,
        dispatch: Dispatch,
        tag: str,
        no_ack: bool,  # noqa: FBT001 - once for each delivery
        message: Any,
    ) -> None:
        """Dispatch a message to a consumer, unless it was amended."""
        verdict = judge(message.properties)
        if verdict is None:
            headers = message.properties.get(HEADERS)
            if (
                headers
                and REPLACES in headers
                and self._amendments.memory.revives(message.properties, time.time_ns() // 1_000_000)
            ):
                # A Celery worker that got the broadcast has the id in its own set.
                celery.accept_here(names_of(message.properties)[0])
            dispatch(message)
            return
        # Not by what py-amqp knows of the consumer, which may be cancelled by now.
        message.delivery_info["no_ack"] = no_ack
        if verdict.reason != POSTPONED and celery.is_worker(dispatch):
            self._leave_to_worker(verdict, dispatch, message)
            return
        again = partial(self._deliver_again, judge, dispatch, tag, no_ack, message)
        if not self._keep_to(verdict, message, again):
            dispatch(message)

    def _deliver_again(
        self,
        judge: Judge,
        dispatch: Dispatch,
        tag: str,
        no_ack: bool,  # noqa: FBT001 - as in _deliver
        message: Any,
    ) -> None:
        if tag in self.callbacks:
            self._deliver(judge, dispatch, tag, no_ack, message)
        else:
            # Its consumer was cancelled.
            self._put_back(message)

    def _put_back(self, message: Any) -> None:
        self.basic_reject(message.delivery_info["delivery_tag"], requeue=True)

    def _leave_to_worker(self, verdict: Verdict, dispatch: Dispatch, message: Any) -> None:
        """Dispatch a task so that Celery's worker discards it as revoked."""
        if verdict.reason == SUPERSEDED and not verdict.by_key:
            # The task that replaces it has the same id, and is not revoked.
            self._drop(verdict, message)
            return
        name, _ = names_of(message.properties)
        # Not for longer: the next task with the id may replace this one.
        if not celery.discard(name, partial(dispatch, message)):
            logger.warning(
                "%s was %s, but may run: Celery has not asked whether it is revoked, as for a task "
                "whose class has a Strategy of its own",
                _name(message),
                verdict.reason,
            )

    def _keep_to(self, verdict: Verdict, message: Any, again: Callable[[], object]) -> bool:
        """Drop a message or delay it again; return False if the latter was not possible.

        :param again: does this once more, for when the broker blocks publishers.
        """
        if verdict.reason != POSTPONED:
            self._drop(verdict, message)
            return True
        has_acks = not message.delivery_info.get("no_ack")
        try:
            if alarms.is_recent(self.connection):
                self._hold(message, verdict.due, again)
                return True
            self._delay_again(message, verdict.due * 1000)
        except (*_UNDELAYED, RecoverableConnectionError) as exc:
            if has_acks and isinstance(exc, RecoverableConnectionError):
                # The broker gives it again.
                raise
            logger.warning("%s is not postponed, but delivered now: %s", _name(message), exc)
            return False
        self._acknowledge(message)
        return True

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
        if self._prefetch and self._holding + 1 >= self._prefetch:
            raise AmendmentError(
                f"the broker blocks publishers, and the prefetch limit, {self._prefetch}, has no "
                f"room for another message that waits"
            )
        self._holding += 1
        self._amendments.hold(due, partial(self._try_again, again, self._lives))

    def _try_again(self, again: Callable[[], object], lives: int) -> None:
        # A channel that has closed has given its messages back, also where it is open again.
        if lives == self._lives and self.is_open and not self.is_closing:
            self._holding -= 1
            again()

    def basic_qos(
        self,
        prefetch_size: int,
        prefetch_count: int,
        a_global: bool,  # noqa: FBT001 - amqp's own
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Limit the number of messages in the program, and remember the limit."""
        self._prefetch = prefetch_count
        return super().basic_qos(prefetch_size, prefetch_count, a_global, *args, **kwargs)

    def _do_revive(self) -> None:
        self._lives += 1
        self._holding = 0
        # py-amqp before 5.4.2 takes the channel, opened anew, for one in confirm mode.
        self._confirm_selected = False
        super()._do_revive()

    #: The prefetch limit; 0 for none. How many messages are held, and how often it was opened anew.
    _prefetch = _holding = _lives = 0

    def _drop(self, verdict: Verdict, message: Any) -> None:
        self._acknowledge(message)
        if self._mechanism.journal is not None:
            found = self._arrived(message)
            # Of a message without an `eta`, only the ladder's header has the due time.
            self._mechanism.journal.taken_back(message.properties, found.destination, again=False)
        name, _ = names_of(message.properties)
        queue = self._queue_of(message.delivery_info)
        logger.info(
            "dropped %s from the queue %r: it was %s", _name(message), queue, verdict.reason
        )
        dropped = Dropped(name, verdict.reason, queue, message.properties, message.body)
        for listener in _listeners:
            try:
                listener(dropped)
            except Exception:
                # The message is acknowledged: an exception would only stop the consumer.
                logger.exception("%r failed for %s", listener, _name(message))

    def _delay_again(self, message: Any, due: int) -> None:
        """Publish a message again to the queue that it came from, for the rest of its delay.

        :param due: microseconds since the epoch.
        """
        queue = self._queue_of(message.delivery_info)
        if not queue:
            raise AmendmentError("the queue that it came from is not known")
        if OFFSET in (message.properties.get(HEADERS) or {}):
            raise AmendmentError("it is in a stream, which keeps it, and gives it to others too")
        if not self.supports_batch_publish:
            raise AmendmentError("the channel has a transaction, whose rollback would duplicate it")
        # If it is due by now, at least one tick remains, as in a batch.
        now = min(time.time_ns() // 1000, due - 1)
        longest = now + self._router.topology.ladder.maximum * 1000
        found = self._arrived(message)
        headers = dict(found.properties.get(HEADERS) or {})
        if headers.get(ETA) is not None and TASK in headers:
            headers[ETA] = datetime.fromtimestamp(due / 1_000_000, UTC).isoformat()
        # Somebody has named this time.
        headers.pop(JITTER, None)
        # To that queue only: copies in other queues are delayed again to theirs. On delivery, it
        # must still look as it was published.
        copies = {name: headers.pop(name) for name in COPIES if name in headers}
        properties = {**found.properties, HEADERS: headers}
        plan = self.plan(properties, min(due, longest), "", queue, now)
        seen_as(plan.properties[HEADERS], found.destination, copies)
        again = copy_of(message, plan.properties)
        self._amendments.publish(again, plan.exchange, plan.routing_key)
        journal = self._mechanism.journal
        if journal is not None:
            journal.taken_back(message.properties, found.destination, again=True)
            journal.scheduled(plan.properties, plan.exchange, plan.routing_key)

    def _arrived(self, message: Any) -> Delivery:
        """Return how a message was published, whether a ladder delivered it or not."""
        info = message.delivery_info
        exchange, key = info.get("exchange", ""), info.get("routing_key", "")
        found = self._router.received(exchange, key, message.properties, self._queue_of(info))
        return found or Delivery(Destination(exchange, key), message.properties)

    def _acknowledge(self, message: Any) -> None:
        if not message.delivery_info.get("no_ack"):
            self.basic_ack(message.delivery_info["delivery_tag"])

    @property
    def _amendments(self) -> Amendments:
        amendments: Amendments = self._mechanism.amendments
        return amendments


def _name(message: Any) -> str:
    name, headers = names_of(message.properties)
    return f"{headers.get(TASK) or 'the message'} {name or 'without an id'}"
