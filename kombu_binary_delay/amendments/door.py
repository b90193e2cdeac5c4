"""The part of a channel where amendments are made, and where they count.

On the way out, a revoke that Celery broadcasts is recorded before it leaves, and a message with a
key or a replaced id is recorded after it. On the way in, a message that was cancelled or superseded
is dropped, and one that was postponed is delayed again, before the program sees it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import amqp
from kombu.log import get_logger

from kombu_binary_delay.errors import AddressError, AmendmentError, DelayError, TopologyError
from kombu_binary_delay.follow import FollowingChannel
from kombu_binary_delay.model.delay import ETA, TASK, due_time

from . import celery
from .memory import POSTPONED, SUPERSEDED, Verdict
from .record import (
    GENERATION,
    KEY,
    LONGEST_WAIT,
    REPLACES,
    Supersede,
    check_name,
    check_wait,
    names_of,
    new_generation,
)
from .stream import IDS, KEYS, Amendments

logger = get_logger(__package__)

_HEADERS = "application_headers"
#: The longest delay of a message with a key, in milliseconds: half as long as its record is kept.
LONGEST_KEYED = 43_200_000

Dispatch = Callable[[Any], object]
Judge = Callable[[Mapping[str, Any]], Verdict | None]


@dataclass(frozen=True)
class Dropped:
    """A message that a consumer did not get.

    :param id: of the task or the message; empty where it has none.
    :param reason: ``cancelled`` or ``superseded``.
    :param queue: that it was taken from.
    :param properties: those that it arrived with.
    :param body: as it was published.
    """

    id: str
    reason: str
    queue: str
    properties: Mapping[str, Any]
    body: Any


_listeners: list[Callable[[Dropped], object]] = []


def on_dropped(listener: Callable[[Dropped], object]) -> Callable[[Dropped], object]:
    """Have a function called with each message that this process drops; usable as a decorator.

    Not for tasks that a Celery worker discards: those have Celery's own signal ``task_revoked``.
    """
    _listeners.append(listener)
    return listener


class AmendingChannel(FollowingChannel):
    """The part of a channel that makes amendments, and keeps to them."""

    # -- outward -------------------------------------------------------------------------------

    def _record_broadcast(self, msg: Any) -> None:
        """Record what a broadcast of Celery's revokes, before it leaves."""
        amendments = self._amendments
        now = time.time_ns() // 1_000_000
        records = celery.records_of_broadcast(msg.properties, msg.body, now)
        if not records:
            return
        try:
            amendments.write(records)
        except AmendmentError as exc:
            logger.warning("a revoke will not outlive the workers that are up now: %s", exc)

    def _begin_generation(self, msg: Any, asked: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
        """Return a message with a generation, and what to do after its publish.

        :param asked: the headers by which it asks for a delay.
        :raises AmendmentError: for a key that is none, or a broker that cannot.
        """
        amendments = self._amendments
        amendments.require()
        if not self.supports_batch_publish:
            raise AmendmentError(
                f"a message with {KEY} or {REPLACES} cannot be published in a transaction, which "
                f"may be rolled back; publish it on a channel without tx_select"
            )
        headers = msg.properties[_HEADERS]
        name = KEY if KEY in headers else REPLACES
        wait = check_wait(headers.get(LONGEST_WAIT))
        now = time.time_ns() // 1000
        at = now // 1000
        due = -(-(due_time(asked, now) or now) // 1000)
        longest = max(due - at, wait or 0)
        if name == KEY and longest > LONGEST_KEYED:
            raise AmendmentError(
                f"a message with {name} can wait for at most {LONGEST_KEYED // 1000} s, got "
                f"{longest / 1000:g} s; give it an id, and replace it by that"
            )
        generation = new_generation(at)
        record = Supersede(check_name(headers[name], name), generation, due, at, wait)
        amended = amqp.Message(msg.body)
        amended.properties = {**msg.properties, _HEADERS: {**headers, GENERATION: generation}}
        return amended, partial(amendments.write, [record], KEYS if name == KEY else IDS)

    # -- inward --------------------------------------------------------------------------------

    def basic_consume(
        self, queue: str = "", consumer_tag: str = "", *args: Any, **kwargs: Any
    ) -> Any:
        """Consume, having read what was amended so far."""
        if self._router.is_private(queue):
            return super().basic_consume(queue, consumer_tag, *args, **kwargs)
        self._amendments.catch_up()
        tag = super().basic_consume(queue, consumer_tag, *args, **kwargs)
        dispatch = self.callbacks.get(tag)
        if dispatch is not None:
            self.callbacks[tag] = partial(self._deliver, self._amendments.verdict, dispatch, tag)
        return tag

    def basic_get(
        self,
        queue: str = "",
        no_ack: bool = False,  # noqa: FBT001, FBT002 - amqp's own
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Get a message: the first that is to be delivered."""
        self._amendments.catch_up()
        while True:
            message = super().basic_get(queue, no_ack, *args, **kwargs)
            if message is None:
                return None
            message.delivery_info["no_ack"] = no_ack
            verdict = self._amendments.verdict(message.properties)
            if verdict is None or not self._keep_to(verdict, message):
                return message

    def _deliver(self, judge: Judge, dispatch: Dispatch, tag: str, message: Any) -> None:
        """Dispatch a message to a consumer, unless it was amended."""
        verdict = judge(message.properties)
        if verdict is None:
            dispatch(message)
        elif verdict.reason != POSTPONED and celery.is_worker(dispatch):
            self._leave_to_worker(verdict, dispatch, message)
        else:
            message.delivery_info["no_ack"] = tag in self.no_ack_consumers
            if not self._keep_to(verdict, message):
                dispatch(message)

    def _leave_to_worker(self, verdict: Verdict, dispatch: Dispatch, message: Any) -> None:
        """Have Celery's worker discard a task, as it does what was revoked."""
        name, headers = names_of(message.properties)
        if verdict.reason == SUPERSEDED and (REPLACES in headers or KEY not in headers):
            # The task that replaces it has the same id, and is not revoked.
            self._drop(verdict, message)
            return
        celery.revoke_here(name)
        dispatch(message)

    def _keep_to(self, verdict: Verdict, message: Any) -> bool:
        """Drop a message or delay it again; return whether that was possible."""
        if verdict.reason != POSTPONED:
            self._drop(verdict, message)
            return True
        try:
            self._delay_again(message, verdict.due * 1000)
        except (AddressError, AmendmentError, DelayError, TopologyError) as exc:
            logger.warning("%s is not postponed, but delivered now: %s", _name(message), exc)
            return False
        self._acknowledge(message)
        return True

    def _drop(self, verdict: Verdict, message: Any) -> None:
        self._acknowledge(message)
        name, _ = names_of(message.properties)
        queue = self._queue_of(message.delivery_info)
        logger.info(
            "dropped %s from the queue %r: it was %s", _name(message), queue, verdict.reason
        )
        dropped = Dropped(name, verdict.reason, queue, message.properties, message.body)
        for listener in _listeners:
            listener(dropped)

    def _delay_again(self, message: Any, due: int) -> None:
        """Publish a message again to the queue that it came from, with what is left of its delay.

        :param due: microseconds since the epoch.
        """
        now = time.time_ns() // 1000
        longest = now + self._router.topology.ladder.maximum * 1000
        info = message.delivery_info
        found = self._router.received(
            info.get("exchange", ""),
            info.get("routing_key", ""),
            message.properties,
            self._queue_of(info),
        )
        properties = found.properties if found else message.properties
        headers = dict(properties.get(_HEADERS) or {})
        if headers.get(ETA) is not None and TASK in headers:
            headers[ETA] = datetime.fromtimestamp(due / 1_000_000, timezone.utc).isoformat()
        again = amqp.Message(message.body)
        # To that queue alone: its twins in other queues are delayed again, each to its own.
        plan = self.plan(
            {**properties, _HEADERS: headers},
            min(due, longest),
            "",
            self._queue_of(info),
            now,
        )
        again.properties = plan.properties
        self._amendments.publish(again, plan.exchange, plan.routing_key)

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
