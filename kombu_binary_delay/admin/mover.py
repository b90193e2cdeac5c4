"""From a queue to somewhere else: published, confirmed, and only then acknowledged.

Killed at any point, it has lost nothing: what was not acknowledged is in its queue again. What was
confirmed and not yet acknowledged is there twice, with the same message id.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import amqp
from amqp.exceptions import NotFound

from kombu_binary_delay.batching.batch import CONFIRMED, Outcome, PublishBatch
from kombu_binary_delay.errors import BinaryDelayError, UnconfirmedError

from .errors import OperationError, UnreachableError
from .snapshot import Row, delivery_limit, depth

#: Confirms outstanding. More gain nothing, and take longer to repeat after a kill.
WINDOW = 500
#: Taken ahead of those, so that the broker hands out the next while it confirms the last.
AHEAD = 4 * WINDOW
#: Half of RabbitMQ's own limit to how often a message may come back to a quorum queue.
_MANY = 10
_QUIET = 0.3  # seconds without a delivery, before the queue is asked whether it is empty
_CONSUMER = "kombu-binary-delay"

Progress = Callable[[int], object]
#: Tells how a message gets back, as one that never came back, and under which count; or None.
Again = Callable[[Any, str], "Send | None"]


def nothing(count: int) -> None:
    """Make nothing of progress."""
    del count


@dataclass(frozen=True)
class Send:
    """Publish a message and, when it is confirmed, take it from its queue.

    :param count: under which it is counted.
    :param aside: whether to send it by the plain way, to the broker that it came from.
    :param mandatory: whether it stays in its queue where it cannot be routed to any.
    """

    message: Any
    exchange: str
    routing_key: str
    count: str
    aside: bool = False
    mandatory: bool = False


@dataclass(frozen=True)
class Keep:
    """Leave a message in its queue."""

    count: str
    why: str = ""


class Pump:
    """Move messages out of queues.

    :param source: a :class:`kombu.Connection` to take them from.
    :param aside: another one to the same broker, for what is not to go to the target.
    :param target: one to the broker to send them to, of the transport that is to publish.
    """

    def __init__(self, source: Any, aside: Any, target: Any) -> None:
        self._source = source
        self._onward = PublishBatch(target.channel(), WINDOW, self._settled)
        self._aside = PublishBatch(aside.channel(), WINDOW, self._settled)
        self._acks: Acks | None = None
        self._again: Again = _never
        self._many = _MANY
        self._done = 0
        #: How many messages came to what.
        self.counts: Counter[str] = Counter()
        #: Why some could not be sent, and stay where they were.
        self.reasons: Counter[str] = Counter()

    def start_over(self) -> None:
        """Forget what could not be sent: it is to be tried again."""
        self.counts["left"] = 0
        self.reasons.clear()

    def close(self) -> None:
        """Send what is to be sent, and end."""
        self._onward.close()
        self._aside.close()

    def run(  # noqa: PLR0913 - the last ones are for special cases
        self,
        queue: str,
        decide: Callable[[Any], Send | Keep],
        *,
        again: Again,
        many: int = _MANY,
        limit: int | None = None,
        expected: int = 0,
        progress: Progress = nothing,
    ) -> int:
        """Take messages out of a queue until it is empty, or ``limit`` were seen.

        :param decide: tells what is to become of a message, an :class:`amqp.Message`.
        :param again: what is to stay, and came back too often already, is published anew by it.
        :param many: how often is too often, see :func:`bearable`.
        :param limit: needed where it keeps any, or else these would be met again and again.
        :param expected: how many there were before: then it asks whether more have come.
        :param progress: is called now and then with the number of messages that all runs have
            done.
        :returns: how many left the queue for elsewhere.
        :raises OperationError: where the queue does not exist, or is in use by one alone.
        :raises UnreachableError: where a broker went away, or refused to go on.
        """
        connection = self._source.connection
        channel = amqp.Channel(connection, auto_decode=False)
        channel.open()
        self._acks = Acks(channel)
        self._again, self._many = again, many
        taken: deque[Any] = deque()
        before = self._done
        seen, seen_when_quiet = 0, -1
        try:
            channel.basic_qos(0, 0 if limit is not None else AHEAD, False)  # noqa: FBT003 - AMQP's order
            channel.basic_consume(queue, _CONSUMER, callback=taken.append)
            while limit is None or seen < limit:
                quiet = False
                try:
                    connection.drain_events(timeout=_QUIET)
                except TimeoutError:
                    quiet = True
                while taken and (limit is None or seen < limit):
                    seen += 1
                    if seen % WINDOW == 0:
                        self._acks.send()
                    self._treat(taken.popleft(), decide)
                if quiet or (limit is None and seen == expected):
                    self._flush()
                    empty = not depth(channel, queue)
                    # Nothing more comes, either, where all that it hands out is to be kept.
                    if not taken and (empty or seen_when_quiet == seen):
                        break
                    seen_when_quiet = seen if quiet else -1
                progress(self._done)
        except NotFound as exc:
            raise OperationError(f"the queue {queue!r} does not exist") from exc
        except amqp.exceptions.AccessRefused as exc:
            raise OperationError(f"the queue {queue!r} cannot be read: {exc.reply_text}") from exc
        finally:
            # Also where it is interrupted: what was sent is not to be there twice.
            try:
                self._flush()
            finally:
                # What was not acknowledged goes back.
                if channel.is_open:
                    channel.basic_cancel(_CONSUMER)
                    self._acks.settle()
                    channel.close()
                progress(self._done)
        return self._done - before

    def _treat(self, message: Any, decide: Callable[[Any], Send | Keep]) -> None:
        what = decide(message)
        if isinstance(what, Keep):
            self._keep(message, what.count, what.why)
        else:
            self._publish(self._aside if what.aside else self._onward, what, message)

    def _keep(self, message: Any, count: str, why: str) -> None:
        if why:
            self.reasons[why] += 1
        again = self._again(message, count) if deliveries(message) >= self._many else None
        if again is None:
            self.counts[count] += 1
        else:
            self._publish(self._aside, again, message, stays=True)

    def _publish(
        self, batch: PublishBatch, what: Send, message: Any, *, stays: bool = False
    ) -> None:
        try:
            with self._in_reach():
                batch.publish(
                    what.message,
                    what.exchange,
                    what.routing_key,
                    mandatory=what.mandatory,
                    tag=(message, what.count, stays),
                )
        except UnreachableError:
            raise
        except BinaryDelayError as exc:
            self._failed(message, str(exc), stays=stays)

    def _flush(self) -> None:
        # In this order: what could not be sent onward may be published anew aside.
        try:
            with self._in_reach():
                self._onward.flush()
        finally:
            with self._in_reach():
                self._aside.flush()
            if self._acks is not None:
                self._acks.send()

    def _settled(self, outcome: Outcome) -> None:
        message, count, stays = outcome.tag
        if outcome.state != CONFIRMED:
            self._failed(message, f"{outcome.state}: {outcome.reply_text}", stays=stays)
            return
        self.counts[count] += 1
        self._done += not stays
        if self._acks is not None:
            self._acks.add(message.delivery_tag)

    def _failed(self, message: Any, why: str, *, stays: bool) -> None:
        if stays:
            self.counts["left"] += 1
            self.reasons[why] += 1
        else:
            self._keep(message, "left", why)

    @contextmanager
    def _in_reach(self) -> Iterator[None]:
        """Tell a broker that went away from a message that cannot be sent."""
        try:
            yield
        except UnconfirmedError as exc:
            raise UnreachableError(
                f"the broker went away, or refused to go on: {exc.__cause__ or exc}; {self._done} "
                f"messages were sent on, and what it did not confirm is where it was: run it again"
            ) from exc


def _never(message: Any, count: str) -> None:
    del message, count


class Acks:
    """Acknowledges many messages with few commands.

    A channel hands its commands on to a quorum queue with at most 32 outstanding, and forgets the
    others when it is closed: the messages would be there again.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._tags: set[int] = set()
        self._upto = 0

    def add(self, tag: int) -> None:
        """Take note that a message is to be acknowledged."""
        self._tags.add(tag)

    def send(self) -> None:
        """Acknowledge all up to the first that is not to be."""
        upto = self._upto
        while upto + 1 in self._tags:
            upto += 1
            self._tags.remove(upto)
        if upto > self._upto:
            self._channel.basic_ack(upto, multiple=True)
            self._upto = upto

    def settle(self) -> None:
        """Acknowledge all, before the channel is closed."""
        self.send()
        for count, tag in enumerate(sorted(self._tags), start=1):
            self._channel.basic_ack(tag)
            if count % 16 == 0:
                time.sleep(0.05)
        if self._tags:
            time.sleep(1)
        self._tags.clear()


def bearable(queue: str, row: Row) -> int:
    """Tell how often a message may come back to a queue before it is to be published anew.

    Each return to a quorum queue counts as a delivery, and beyond a limit the message is dropped,
    or leaves a level early. Half of the limit leaves room for those who are interrupted.

    :param row: the queue, as the management API describes it.
    :raises OperationError: where it may not come back at all.
    """
    limit = delivery_limit(row)
    if limit == 0:
        raise OperationError(
            f"the queue {queue!r} has a delivery limit of 0, and would drop every message that is "
            f"looked at and put back; give it a higher one, by its policy or its arguments"
        )
    return _MANY if limit is None else max(1, min(_MANY, limit // 2))


def renewed(message: Any) -> Any:
    """Copy a message, as one that was never delivered."""
    headers = dict(message.properties.get("application_headers") or {})
    headers.pop("x-delivery-count", None)
    return amqp.Message(message.body, **{**message.properties, "application_headers": headers})


def deliveries(message: Any) -> int:
    """Tell how often a message was delivered and came back, where its queue counts that."""
    headers = message.properties.get("application_headers") or {}
    return int(headers.get("x-delivery-count") or 0)
