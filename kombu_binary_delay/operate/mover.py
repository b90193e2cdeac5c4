"""Move messages out of a queue: publish or write them, wait for the confirm, then acknowledge.

If it is killed, no message is lost: those that were not acknowledged go back to their queue. Those
that were confirmed and not yet acknowledged exist twice, with the same message id.

A quorum queue counts what goes back, and drops a message at its delivery limit. So whatever ends a
run, what has come back often is published to its queue again, as a new message. A message that
py-amqp cannot decode is moved and published with the bytes that came.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import amqp
from amqp.exceptions import (
    AccessRefused,
    NotFound,
    PreconditionFailed,
    RecoverableConnectionError,
    ResourceLocked,
)

from kombu_binary_delay.errors import BinaryDelayError, UnconfirmedError
from kombu_binary_delay.ladder.envelope import HEADERS
from kombu_binary_delay.ladder.returns import MOST_RETURNS, RETURNS, returns
from kombu_binary_delay.publishing.batch import CONFIRMED, Outcome, PublishBatch
from kombu_binary_delay.wire.draining import drain, within
from kombu_binary_delay.wire.executor import is_deleted
from kombu_binary_delay.wire.received import copy_of
from kombu_binary_delay.wire.undecodable import take_undecodable, undecodable

from .errors import OperationError, UnreachableError
from .probe import Probe
from .progress import Progress, ignore
from .raw import raw_copy
from .snapshot import Row, delivery_limit, why_left

#: The most outstanding confirms. More gain nothing, and leave more duplicates after a kill.
WINDOW = 500
#: The most messages in this program. It is larger than the window, so that the broker delivers the
#: next messages while it confirms the last.
PREFETCH = 4 * WINDOW
#: The longest time to wait for a confirm, in seconds: a queue without a majority gives none, and a
#: broker that is short of memory or disk reads nothing.
PATIENCE = 60.0
#: The longest time to wait for the answer to a cancel or a close, in seconds.
_ANSWER = 15.0
_QUIET = 0.3  # seconds without a delivery, before the queue is asked whether it is empty
_MAX_IDLE = 10  # times that it was quiet, though the queue was not empty, before that is an error
_CONSUMER = "kombu-binary-delay"
#: RabbitMQ lets nobody declare a queue of such a name.
_NO_QUEUE = "amq.no-queue"

#: Returns how to publish a message again to where it came from, and its count; or None.
Requeue = Callable[[Any, str], "Send | None"]


@dataclass(frozen=True)
class Send:
    """Publish a message and, after the confirm, remove it from its queue.

    :param routing_key: a string, or bytes that are not UTF-8.
    :param count: the counter to increase.
    :param aside: whether to send it with Kombu's own transport to the broker that it came from.
    :param mandatory: whether it stays in its queue if it cannot be routed.
    """

    message: Any
    exchange: str
    routing_key: Any
    count: str
    aside: bool = False
    mandatory: bool = False


@dataclass(frozen=True)
class Keep:
    """Leave a message in its queue."""

    count: str
    why: str = ""


@dataclass(frozen=True)
class Done:
    """Remove a message from its queue: its work is done and confirmed."""

    count: str


Decision = Send | Keep | Done


class Mover:
    """Move messages out of queues.

    :param source: a :class:`kombu.Connection` to the broker to take them from.
    :param aside: another connection to the same broker, for messages that do not go to the target.
    :param target: a connection to the broker to send them to, with the transport that publishes.
    """

    def __init__(self, source: Any, aside: Any, target: Any) -> None:
        self._source = source
        self._onward = PublishBatch(target.channel(), WINDOW, self._on_outcome)
        self._aside = PublishBatch(aside.channel(), WINDOW, self._on_outcome)
        self._acks: Acks | None = None
        self._requeue: Requeue
        self._max_deliveries = MOST_RETURNS
        self._kept = 0
        self._done = 0
        #: What :func:`refused_user` has returned.
        self._users: dict[tuple[PublishBatch, str], str] = {}
        #: The number of messages by count.
        self.counts: Counter[str] = Counter()
        #: The reasons why messages could not be sent, and stay where they are.
        self.reasons: Counter[str] = Counter()
        #: By queue, why a message that has come back as often as is safe has to stay.
        self._at_limit: dict[str, str] = {}
        #: By queue, how many messages could not be sent.
        self._left: Counter[str] = Counter()

    def start_over(self) -> None:
        """Reset the counts of messages that could not be sent, before another attempt."""
        self.counts["left"] = 0
        self.reasons = Counter(self._at_limit.values())

    def close(self) -> None:
        """Send what is buffered, and close."""
        self._onward.close()
        self._aside.close()

    def run(  # noqa: PLR0913 - the last ones are for special cases
        self,
        queue: str,
        decide: Callable[[Any], Decision],
        *,
        requeue: Requeue,
        max_deliveries: int = MOST_RETURNS,
        limit: int | None = None,
        expected: int = 0,
        progress: Progress = ignore,
    ) -> int:
        """Take messages from a queue until it is empty, or after ``limit`` messages.

        Messages that stay are held by the channel, not in this program's memory, until the run
        ends.

        :param decide: returns what to do with a message, an :class:`amqp.Message`.
        :param requeue: returns how to publish again a message that stays but came back too often.
        :param max_deliveries: the limit for that, see :func:`max_deliveries`.
        :param limit: required if messages are published again to the end of the same queue, which
            would otherwise never be empty.
        :param expected: the number of messages before; after these, it asks whether more have come.
        :param progress: called now and then with the number of messages that all runs have done.
        :returns: the number of messages that left the queue for another place.
        :raises OperationError: if the queue does not exist, or is in exclusive use.
        :raises UnreachableError: if a broker went away, takes nothing, or closed the channel.
        """
        before, left = self._done, self.counts["left"]
        if queue in self._at_limit:
            # Each look would bring it nearer to the delivery limit.
            self.counts["left"] += self._left[queue]
            return 0
        self._queue, self._requeue, self._max_deliveries = queue, requeue, max_deliveries
        self._check_brokers()
        seen = idle = 0
        with self._consumer(queue, progress) as consumer:
            while limit is None or seen < limit:
                quiet = not consumer.wait()
                idle = idle if quiet else 0
                while consumer.taken and (limit is None or seen < limit):
                    seen += 1
                    if seen % WINDOW == 0:
                        consumer.acks.send()
                    what = decide(consumer.taken[0])
                    self._treat(consumer.taken.popleft(), what)
                if quiet or seen == expected:
                    self._flush()
                    ready = consumer.ready()
                    if not ready and not consumer.taken:
                        break
                    idle += quiet and not consumer.taken
                    if idle == _MAX_IDLE:
                        self.counts["left"] += ready
                        self.reasons[
                            f"the queue {queue!r} hands out nothing: check its other consumers"
                        ] += 1
                        break
                if self._kept >= PREFETCH // 2 or (self._kept and idle):
                    consumer.renew()
                    self._kept = 0
                progress(self._done)
        self._left[queue] = self.counts["left"] - left
        return self._done - before

    def _check_brokers(self) -> None:
        """Check that the brokers take messages, before any is taken that would have to go back."""
        for batch in (self._onward, self._aside):
            if batch.channel.connection is not None:
                refused_user(batch.channel.connection)

    @contextmanager
    def _consumer(self, queue: str, progress: Progress) -> Iterator[_Consumer]:
        consumer = _Consumer(self._source, queue)
        self._acks, self._kept = consumer.acks, 0
        try:
            consumer.renew()
            yield consumer
        finally:
            # Also after an interrupt: messages that were sent must not exist twice.
            with ExitStack() as steps:
                # The last one is the first. All are done, also after an error.
                steps.callback(lambda: progress(self._done))
                steps.callback(consumer.close)
                steps.callback(self._flush)
                steps.callback(self._put_back_at_limit, consumer.taken)
                steps.callback(consumer.stop)

    def _put_back_at_limit(self, taken: deque[Any]) -> None:
        """Publish again what was not decided and may not come back once more."""
        for message in taken:
            if self._may_not_come_back(message):
                self._keep(message, "undecided", "")

    def _treat(self, message: Any, what: Decision) -> None:
        if isinstance(what, Keep):
            self._keep(message, what.count, what.why)
        elif isinstance(what, Done):
            self._take(message.delivery_tag, what.count)
        else:
            self._publish(self._aside if what.aside else self._onward, what, message)

    def _keep(self, message: Any, count: str, why: str) -> None:
        if why:
            self.reasons[why] += 1
        again = None
        if self._may_not_come_back(message):
            again = self._requeue(message, count)
            if again is None:
                why = why or "it cannot enter its ladder again for the rest of its delay"
                self._stay_at_limit(count, why)
                return
        if again is None:
            self._stay(count)
        else:
            self._publish(self._aside, again, message, stays=True)

    def _may_not_come_back(self, message: Any) -> bool:
        return returns(message.properties.get(HEADERS)) >= self._max_deliveries

    def _publish(
        self, batch: PublishBatch, what: Send, message: Any, *, stays: bool = False
    ) -> None:
        if why := self._refused_user(batch, what):
            self._failed(message, why, stays=stays)
            return
        try:
            with self._reachable(batch):
                batch.publish(
                    what.message,
                    what.exchange,
                    what.routing_key,
                    mandatory=what.mandatory,
                    confirm_timeout=PATIENCE,
                    tag=(message, what.count, stays),
                )
        except UnreachableError:
            raise
        except BinaryDelayError as exc:
            self._failed(message, str(exc), stays=stays)

    def _refused_user(self, batch: PublishBatch, what: Send) -> str:
        """Return why the broker would refuse a message for its ``user_id``; empty if it does not.

        With the refusal, it would close the channel, on which others are not confirmed yet.
        """
        user, connection = what.message.properties.get("user_id"), batch.channel.connection
        if not user or connection is None:
            return ""
        if (batch, user) not in self._users:
            self._users[batch, user] = refused_user(connection, user)
        return self._users[batch, user]

    def _flush(self) -> None:
        with ExitStack() as steps:
            # The last one is the first. All are done, also after an error.
            steps.callback(self._remove_confirmed)
            # What the target refused may be published again by ``aside``.
            steps.callback(self._flush_batch, self._aside)
            steps.callback(self._flush_batch, self._onward)
            # A broker that confirms nothing may hold up the others until the program is killed.
            steps.callback(self._remove_confirmed)

    def _flush_batch(self, batch: PublishBatch) -> None:
        with self._reachable(batch):
            batch.flush()

    def _remove_confirmed(self) -> None:
        """Remove what is confirmed or safely written from the queue."""
        if self._acks is not None:
            self._acks.send()

    def _on_outcome(self, outcome: Outcome) -> None:
        message, count, stays = outcome.tag
        if outcome.state != CONFIRMED:
            self._failed(message, f"{outcome.state}: {outcome.reply_text}", stays=stays)
            return
        self._take(message.delivery_tag, count, stays=stays)

    def _take(self, tag: int, count: str, *, stays: bool = False) -> None:
        self.counts[count] += 1
        self._done += not stays
        if self._acks is not None:
            self._acks.add(tag)

    def _failed(self, message: Any, why: str, *, stays: bool) -> None:
        if stays:
            self._stay_at_limit("left", why)
        else:
            self._keep(message, "left", why)

    def _stay_at_limit(self, count: str, why: str) -> None:
        self._at_limit[self._queue] = (
            f"a message in {self._queue!r} has come back as often as is safe, and cannot be "
            f"published again: {why}; raise the queue's delivery-limit by a policy before the next "
            f"run"
        )
        self.reasons[self._at_limit[self._queue]] += 1
        self._stay(count)

    def _stay(self, count: str) -> None:
        self.counts[count] += 1
        self._kept += 1

    @contextmanager
    def _reachable(self, batch: PublishBatch) -> Iterator[None]:
        """Raise UnreachableError if a broker went away, or confirms nothing."""
        try:
            yield
        except UnconfirmedError as exc:
            if batch.channel.connection is not None:
                # A broker that confirms nothing does not answer a close either.
                batch.channel.connection.collect()
            raise UnreachableError(
                f"the broker went away or refused: {exc.__cause__ or exc}; {self._done} "
                f"messages were sent on, the unconfirmed ones are in their queue; run it again"
            ) from exc


def refused_user(connection: Any, user: str | None = None) -> str:
    """Return why a broker refuses messages with a ``user_id`` from us; empty if it does not.

    RabbitMQ checks it at each publish: https://www.rabbitmq.com/docs/validated-user-id

    :param connection: of py-amqp; one message is published on it, which no queue gets.
    :param user: None only finds out whether the broker takes messages.
    :raises UnreachableError: if the broker does not answer, as it is short of memory or disk.
    """
    try:
        with within(connection, PATIENCE):
            takes = _takes_user(connection, user)
    except (OSError, amqp.AMQPError) as exc:
        connection.collect()
        raise UnreachableError(
            f"the broker went away, or takes no messages within {PATIENCE:g} s: {exc!r}; look for "
            f"an alarm of its memory or disk, and run it again"
        ) from exc
    if takes:
        return ""
    return (
        f"RabbitMQ takes a message with the user_id {user!r} only from that user, or from one with "
        f"the tag impersonator: connect as such a user"
    )


def _takes_user(connection: Any, user: str | None) -> bool:
    channel, takes = amqp.Channel(connection), True
    channel.open()
    try:
        channel.basic_publish(amqp.Message("", user_id=user), "", _NO_QUEUE)
        # An answer to what was sent after it.
        channel.basic_qos(0, 0, a_global=False)
    except PreconditionFailed:
        takes = False
    except AccessRefused:
        # It may not publish to the default exchange, and so cannot ask.
        pass
    # py-amqp has opened it again after a refusal.
    channel.close()
    return takes


class _Consumer:
    """Takes messages from a queue, at most :data:`PREFETCH` ahead of those that are decided.

    RabbitMQ counts messages that stay against the prefetch of the consumer that they were delivered
    to, also after its cancellation. So a new consumer on the same channel gets the next messages.
    """

    def __init__(self, connection: Any, queue: str) -> None:
        self._connection = connection.connection
        self._queue = queue
        self._channel = amqp.Channel(self._connection, auto_decode=False)
        self._channel.open()
        take_undecodable(self._channel)
        self._number = 0
        self._is_consuming = False
        self.acks = Acks(self._channel)
        #: Messages that are not decided yet.
        self.taken: deque[Any] = deque()

    def wait(self) -> bool:
        """Wait a while for messages; return whether there are any."""
        if self.taken:
            return True
        try:
            drain(self._connection, _QUIET)
        except TimeoutError:
            return False
        return True

    def ready(self) -> int:
        """Return the number of ready messages, after all earlier deliveries have arrived.

        :raises OperationError: if the queue was deleted.
        :raises UnreachableError: if its node is down.
        """
        probe = Probe.using(self._channel)
        with self._named():
            count = probe.ready(self._queue)
        if count is None:
            # The channel was closed: the tags of its messages are not valid.
            self.acks.forget()
            if probe.has_queue(self._queue):
                raise UnreachableError(why_left([self._queue]))
            raise OperationError(f"the queue {self._queue!r} was deleted")
        return count

    def renew(self) -> None:
        """Start a new consumer with the full prefetch."""
        self._cancel()
        self._number += 1
        self._channel.basic_qos(0, PREFETCH, False)  # noqa: FBT003 - AMQP's order
        with self._named():
            self._channel.basic_consume(self._queue, self._tag, callback=self.taken.append)
        self._is_consuming = True

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Raise an error that names the queue, if the broker refuses it."""
        try:
            yield
        except NotFound as exc:
            if not is_deleted(exc):
                raise UnreachableError(why_left([self._queue])) from exc
            raise OperationError(f"the queue {self._queue!r} does not exist") from exc
        except ResourceLocked as exc:
            raise OperationError(
                f"the queue {self._queue!r} is exclusive: {exc.reply_text}"
            ) from exc
        except AccessRefused as exc:
            raise OperationError(
                f"the queue {self._queue!r} cannot be read: {exc.reply_text}"
            ) from exc

    def stop(self) -> None:
        """Take no more messages; what was on its way is then in :attr:`taken`."""
        if self._channel.is_open:
            with self._answered():
                self._cancel()

    def close(self) -> None:
        """Close the channel; the messages that were not acknowledged go back to their queue."""
        if self._channel.is_open:
            self.acks.send()
            with self._answered():
                self._channel.close()

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """End the connection if the broker does not answer in time.

        After an interrupt within a frame, no answer can be read, not even to a close.
        """
        try:
            with within(self._connection, _ANSWER):
                yield
        except (OSError, amqp.AMQPError):
            self._connection.collect()
            raise

    def _cancel(self) -> None:
        if self._is_consuming:
            self._is_consuming = False
            self._channel.basic_cancel(self._tag)

    @property
    def _tag(self) -> str:
        return f"{_CONSUMER}-{self._number}"


class Acks:
    """Acknowledges messages in transactions.

    A commit is answered after the acknowledgements, and is one command to a quorum queue: a channel
    sends such a queue at most 32 commands ahead, keeps the others, and drops them when it closes.

    :param channel: the channel of the deliveries; it then only counts what is committed.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._tags: list[int] = []
        self._is_begun = self._is_gone = False
        channel.tx_select()

    def add(self, tag: int) -> None:
        """Acknowledge a message with the next :meth:`send`."""
        if not self._is_gone:
            self._tags.append(tag)

    def forget(self) -> None:
        """Drop all acknowledgements, also later ones: the queue is gone."""
        self._is_gone, self._is_begun = True, False
        self._tags.clear()

    def send(self) -> None:
        """Acknowledge, and wait until the broker has done so.

        :raises TimeoutError: if it does not answer.
        """
        if not (self._tags or self._is_begun):
            return
        if self._channel.connection is None:
            raise RecoverableConnectionError("the connection broke before all were acknowledged")
        with within(self._channel.connection, PATIENCE):
            # After an interrupt, the next call goes on.
            self._is_begun = True
            while self._tags:
                self._channel.basic_ack(self._tags.pop())
            self._channel.tx_commit()
            self._is_begun = False


def max_deliveries(queue: str, row: Row) -> int:
    """Return how often a message may come back to a queue before it must be published again.

    Each return to a quorum queue counts as a delivery. At the delivery limit, the message is
    dropped, or leaves a level early. Half of the limit leaves room for interrupted runs.

    :param row: the queue, as the management API describes it.
    :raises OperationError: if the delivery limit is 0.
    """
    limit = delivery_limit(row)
    if limit == 0:
        raise OperationError(
            f"the queue {queue!r} has a delivery limit of 0, and would drop every message that is "
            f"read and put back; set a higher limit in its policy or its arguments"
        )
    if row.get("type") == "quorum" and "effective_policy_definition" not in row:
        # Without statistics, the API does not give the policy: assume the lowest possible limit.
        return 1
    return MOST_RETURNS if limit is None else max(1, min(MOST_RETURNS, limit // 2))


def as_new(message: Any, *without: str) -> Any:
    """Return a copy of a message, as if it was never delivered.

    :param without: headers to leave out.
    """
    without = (RETURNS, *without)
    if odd := undecodable(message):
        return raw_copy(message.body, odd.properties, without=without)
    headers = dict(message.properties.get(HEADERS) or {})
    for name in without:
        headers.pop(name, None)
    return copy_of(message, {**message.properties, HEADERS: headers})


def key_of(message: Any) -> Any:
    """Return the routing key of a delivered message: a string, or bytes that are not UTF-8."""
    odd = undecodable(message)
    return (odd and odd.routing_key) or message.delivery_info["routing_key"]


def why_undecodable(message: Any, queue: str) -> str:
    """Return why a message cannot be decoded, and where it is; empty if it can."""
    odd = undecodable(message)
    if odd is None:
        return ""
    return f"a message in {queue!r} with the key {key_of(message)!r} cannot be decoded: {odd.why}"
