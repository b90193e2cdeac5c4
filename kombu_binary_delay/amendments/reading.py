"""Read all amendments before a connection consumes, and follow them from then on.

A record counts only if it came through the exchange of the amendments, and was published to that
exchange, so only a user that may write to it can amend.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import amqp
from amqp.exceptions import AccessRefused, NotFound
from kombu.log import get_logger

from kombu_binary_delay.errors import BinaryDelayError
from kombu_binary_delay.ladder.delay import ETA
from kombu_binary_delay.ladder.envelope import HEADER, HEADERS
from kombu_binary_delay.wire.deliveries import StreamRecord
from kombu_binary_delay.wire.executor import is_deleted
from kombu_binary_delay.wire.frame_buffer import FrameBuffer
from kombu_binary_delay.wire.repeating import Warnings
from kombu_binary_delay.wire.streams import PREFETCH, StreamChannel, count
from kombu_binary_delay.wire.undecodable import undecodable

from .memory import Fate, Memory
from .parts import ENTERED
from .record import GENERATION, from_line

#: What the broker is asked for, in errors.
ASKED_FOR = "the amendments"
#: How often a connection that takes delayed messages tries to read the amendments, in seconds.
_LOOK_EVERY = 1.0
#: The same where there are none yet, or after a failure that is not a missing permission.
LOOK_AGAIN = 30.0
#: How much later than its message a record can come, in seconds.
_AWAITED = 1.0

#: RabbitMQ's error on a node that joined after the stream was declared, or is just starting.
_NO_REPLICA = "replica on the local node"
#: How long a node that has just started takes to make its streams available, in seconds.
RECOVERY = 5.0
#: How long to wait for such a node where it is known that it has the streams, in seconds.
_START = 15.0

_NEVER = float("-inf")
_NONE: Mapping[str, Any] = {}

#: How many broadcasts of revokes this process has received, by the broker, the virtual host and the
#: exchange. With a green pool, a worker receives them by another connection than its tasks.
_heard: Counter[tuple[str, str, str]] = Counter()

_warnings = Warnings(get_logger(__package__))


def _may_be_amended(headers: Mapping[str, Any]) -> bool:
    """Whether a message was delayed: by this transport, or as a task by another way."""
    return HEADER in headers or headers.get(ETA) is not None


class Reader:
    """The amendments that one connection reads.

    :param connection: of py-amqp.
    :param exchange: of the amendments.
    :param streams: behind it.
    :param max_age: how long they keep records, in milliseconds.
    :param is_possible: whether the settings want amendments, and the broker has streams.
    :param exist: asks whether streams exist, without a line in the broker's log; None if this
        user or the broker does not let it.
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        connection: Any,
        exchange: str,
        streams: list[str],
        max_age: int,
        is_possible: bool,  # noqa: FBT001
        exist: Callable[[list[str]], bool | None],
    ) -> None:
        self._connection = connection
        self._buffer: FrameBuffer = connection.frame_buffer
        self._exchange, self._streams, self._max_age = exchange, streams, max_age
        self._counts = exchange.encode()
        self._exist = exist
        self.memory = Memory(max_age)
        self._channel: StreamChannel | None = None
        self._can_read = is_possible
        #: When it last tried to read, or, after a failure, is not to try before.
        self._looked = _NEVER
        self._place = connection.host, connection.virtual_host, exchange
        #: How many broadcasts there were then.
        self._heard = _heard[self._place]
        #: The streams that did not exist then.
        self._missing: list[str] = []
        #: How many records have come since all were read.
        self._behind = 0

    @property
    def is_reading(self) -> bool:
        """Whether all existing records have been read, and new ones are read as they come.

        It is False after the broker cancelled a consumer or closed the channel.
        """
        return self._channel is not None and self._channel.streams == self._streams

    def catch_up(self, *, wait: bool = True) -> None:
        """Read all records that are confirmed so far, if they are not being read already.

        A failure is logged as a warning: the consumer works without amendments.

        :param wait: whether to wait some seconds for streams of a node that is just starting.
        """
        if self.is_reading or not self._can_read:
            return
        now = time.monotonic()
        # Not after a recent failure.
        since = now if wait and now > self._looked else _NEVER
        self._looked = now
        try:
            self._begin_and_wait(since)
        except AccessRefused as exc:
            self._can_read = False
            self._warn(
                f"{exc.reply_text}; grant this user the permission read on names that begin with "
                f"'{self._exchange}.', or set amendments to False"
            )
        except (amqp.ChannelError, BinaryDelayError) as exc:
            self._put_off(exc)

    def refresh(self) -> None:
        """Read all records that are confirmed so far."""
        channel = self._channel
        if channel is None or not self.is_reading:
            self.catch_up()
            return
        try:
            with self._buffer.closed(ASKED_FOR):
                channel.read_to_end()
        except (amqp.ChannelError, BinaryDelayError) as exc:
            self._leave()
            self._put_off(exc)
        self._behind = 0

    def look(self, headers: Mapping[str, Any] = _NONE) -> None:
        """Catch up, unless that was tried lately.

        :param headers: of the message that is to be judged.
        """
        if self.is_reading:
            return
        heard = _heard[self._place]
        every = _LOOK_EVERY
        if heard != self._heard:
            every = 0.0
        elif self._missing and GENERATION not in headers:
            every = LOOK_AGAIN
        if time.monotonic() - self._looked > every:
            self._heard = heard
            self.catch_up(wait=False)

    def heard(self) -> None:
        """Look again with the next message: a broadcast has come that revokes something."""
        _heard[self._place] += 1

    def fate(self, properties: Mapping[str, Any]) -> Fate | None:
        """Return what happens to a message that arrives; None if it passes."""
        headers = properties.get(HEADERS)
        if headers and self._can_read and not self.is_reading and _may_be_amended(headers):
            # The first amendment, after this began to consume, may have created the streams.
            self.look(headers)
        if not self.memory:
            return None
        if self._behind >= PREFETCH:
            # While a program is busy with a message, nothing reads the records, and the broker
            # sends no more than these.
            self.refresh()
        now = time.time_ns() // 1_000_000
        if self.memory.awaits_record(properties, now):
            # It was published an instant ago, and may have been cancelled since.
            self._read_on(lambda: not self.memory.awaits_record(properties, now))
            now = time.time_ns() // 1_000_000
        return self.memory.judge(properties, now)

    def _read_on(self, is_enough: Callable[[], bool]) -> None:
        """Read until ``is_enough``, or for a second."""
        channel = self._channel
        if channel is None or not self.is_reading:
            return
        try:
            with self._buffer.closed(ASKED_FOR):
                channel.read_until(is_enough, time.monotonic() + _AWAITED)
        except (amqp.ChannelError, BinaryDelayError) as exc:
            self._leave()
            self._put_off(exc)

    def _begin_and_wait(self, since: float) -> None:
        """Catch up; repeat that for a while from then on if the node is just starting."""
        while True:
            try:
                with self._buffer.closed(ASKED_FOR):
                    self._begin()
            except BaseException as exc:
                # Reading on after a failure, or an interrupt, would read each record twice.
                self._leave()
                if time.monotonic() > since + _start_behind(exc):
                    raise
                time.sleep(0.2)
            else:
                return

    def _begin(self) -> None:
        if self._missing and self._exist(self._missing) is False:
            return
        existing = self._existing()
        self._missing = [stream for stream in self._streams if stream not in existing]
        if list(existing) == (self._channel.streams if self._channel is not None else []):
            return
        # What was read before counts until everything is read again.
        self._leave()
        memory = Memory(self._max_age)
        channel = self._channel = StreamChannel(
            self._connection, partial(self._take, memory), self._look_soon
        )
        channel.read(existing)
        channel.read_to_end()
        channel.go_on()
        memory.inherit(self.memory, time.time_ns() // 1_000_000)
        self.memory, self._behind = memory, 0

    def _existing(self) -> dict[str, int | None]:
        """Return the streams that exist, and how many records they have; see :func:`count`."""
        existing: dict[str, int | None] = {}
        for stream in self._streams:
            try:
                existing[stream] = count(self._connection, stream)
            except NotFound as exc:
                if not is_deleted(exc):
                    raise
        return existing

    def _take(self, memory: Memory, delivery: StreamRecord) -> None:
        self._behind += 1
        if delivery.exchange != self._counts:
            return
        came_by_ladder = False
        if delivery.may_have(ENTERED):
            # It waited on the ladder, or is to look so.
            message = delivery.message
            entered = (message.headers or {}).get(ENTERED)
            if undecodable(message) or entered not in {None, self._exchange}:
                return
            came_by_ladder = entered is not None
        record = from_line(delivery.body)
        if record is not None:
            memory.learn(record, time.time_ns() // 1_000_000, came_by_ladder=came_by_ladder)

    def _look_soon(self) -> None:
        """Look again with the next message: a stream was deleted, or its node stopped."""
        self._looked = _NEVER

    def _leave(self) -> None:
        """Close the channel without waiting."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.leave()

    def _put_off(self, failure: BaseException) -> None:
        self._looked = max(self._looked, time.monotonic() + LOOK_AGAIN)
        reason = str(failure)
        if isinstance(failure, NotFound):
            names = " and ".join(self._streams)
            reason = f"RabbitMQ has not started {names}; see that the node that has them runs"
        elif _NO_REPLICA in reason:
            reason = f"{reason}, which rabbitmq-streams add_replica makes"
        self._warn(f"{reason}; it is tried again in {LOOK_AGAIN:g} s")

    @staticmethod
    def _warn(reason: str) -> None:
        _warnings.warn(f"amendments are not read, so cancelled messages run: {reason}")


def _start_behind(failure: BaseException) -> float:
    """Return how long a failure may last, in seconds, because the node is just starting."""
    if isinstance(failure, NotFound) and not is_deleted(failure):
        return _START
    no_replica = isinstance(failure, amqp.ChannelError) and _NO_REPLICA in str(failure)
    return RECOVERY if no_replica else _NEVER
