"""Declare streams, read them to their end, and read on from there.

RabbitMQ does not say where a stream ends. But it sends a consumer all that it has, up to the limit
of what is not acknowledged, before it answers what the channel asks after an ack. So a reading is
at the end when an answer comes and less than that limit came before it. That takes a round trip, no
permission but that to read, and holds in an alarm, too. Only a stream without any record sends
nothing by which to know that its reading has begun.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, RecoverableConnectionError, error_for_code

from kombu_binary_delay.errors import BinaryDelayError, TopologyError
from kombu_binary_delay.ladder.envelope import OFFSET
from kombu_binary_delay.ladder.versions import why_no_streams
from kombu_binary_delay.routing.commands import Answer, Ensure, Look, OutOfReachError

from . import deliveries
from .deliveries import StreamRecord
from .draining import drain, within
from .executor import Executor
from .undecodable import take_undecodable

#: How many records the broker sends ahead; they are acknowledged in groups of half of it.
PREFETCH = 2000
#: How long to wait for the broker, in seconds.
PATIENCE = 30.0
#: The same for the first record of a stream that has none, as far as the broker says. It counts
#: them every few seconds.
QUIET = 1.0
#: How long to wait for another program that declares a stream, or for a node that has just started
#: and makes it available, in seconds.
DECLARING = 10.0
#: How often to try again what another program or a starting node prevents, in seconds.
_AGAIN = 0.05


class StreamError(BinaryDelayError):
    """A stream cannot be read to its end."""


def declare(executor: Executor, command: Ensure | Look, patience: float = DECLARING) -> Answer:
    """Declare streams, or see that they exist; return when they can be published to.

    If two programs declare a stream at once, one gets the answer before the stream has started, and
    its publish would end the connection. So one declares it, and the others wait.

    :param command: with a lock where that may be so.
    :param patience: how long to wait for another program, or for a node that starts, in seconds.
    :raises TopologyError: if the broker refuses, or that takes longer.
    """
    end = time.monotonic() + patience
    while True:
        try:
            answer: Answer = executor.do(command)
        except OutOfReachError:
            if time.monotonic() > end:
                raise
        else:
            if answer is not Answer.LOCKED:
                return answer
        if time.monotonic() > end:
            raise TopologyError(f"another program has been declaring it for {patience:g} s")
        time.sleep(_AGAIN)


def count(connection: Any, stream: str) -> int | None:
    """Return how many records a stream has, which may be some seconds old; None if not known.

    :param connection: of py-amqp.
    :raises amqp.NotFound: if it does not exist, or its node has stopped or is just starting; see
        :func:`~.executor.is_deleted`.
    """
    channel = _AskingChannel(connection)
    channel.open()
    try:
        return int(channel.queue_declare(stream, passive=True).message_count)
    except AccessRefused:
        # RabbitMQ 4.2.6 and 4.3.0 ask for configure, but not from a consumer.
        return None
    finally:
        if channel.is_open:
            channel.close()


def pages(
    connection: Any, stream: str, begin: str | int = "first", until: int | None = None
) -> Iterator[list[StreamRecord]]:
    """Yield the records of a stream, up to those that it has now, some thousands at a time.

    :param connection: of py-amqp.
    :param begin: as of :meth:`StreamChannel.read`.
    :param until: the offset of a record that another node has: it is waited for.
    :raises amqp.NotFound: as :func:`count`.
    :raises StreamError: if the broker stops to answer, or ends the reading.
    """
    page: list[StreamRecord] = []
    records = count(connection, stream)
    channel = StreamChannel(connection, page.append)
    try:
        channel.read({stream: records}, begin)
        while True:
            is_end = channel.read_on()
            if not page and until is not None:
                if not channel.read_until(lambda: bool(page)):
                    return
                is_end = False
            if page:
                taken, page[:] = list(page), []
                if until is not None and taken[-1].offset >= until:
                    until = None
                yield taken
            if is_end and until is None:
                return
    finally:
        channel.leave()


def last_offset(connection: Any, stream: str) -> int | None:
    """Return the offset of a stream's last record; None if it has none.

    The parameters and errors are those of :func:`pages`.
    """
    last = None
    for page in pages(connection, stream, "last"):
        last = page[-1].offset
    return last


class _AskingChannel(amqp.Channel):
    """A channel for one question, which takes one round trip."""

    runs_no_user_code = True

    def open(self) -> None:
        """Open the channel without waiting: the answer comes before that to the question."""
        self.send_method(spec.Channel.Open, "s", ("",))
        self.is_open = True

    def _do_revive(self) -> None:
        # The broker has closed it, and py-amqp would open it again.
        self.collect()


class StreamChannel(amqp.Channel):
    """A channel that reads streams. It stays closed if the broker closes it.

    :param connection: of py-amqp.
    :param take: called with each :class:`~.deliveries.StreamRecord`, in the order of its stream.
    :param ended: called when the broker has ended the reading of a stream.
    """

    runs_no_user_code = True
    #: The error by which the broker closed it.
    refusal: BaseException | None = None

    def __init__(
        self,
        connection: Any,
        take: Callable[[StreamRecord], object],
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        if connection is None or connection.channels is None:
            raise RecoverableConnectionError("the connection is closed")
        if why := why_no_streams(connection.server_properties, connection.host):
            raise StreamError(why)
        super().__init__(connection, auto_decode=False)
        self._take, self._ended = take, ended
        #: The streams that are read, by their consumers' tags.
        self._reading: dict[str, str] = {}
        #: Until when to wait for the first record of those that have sent none, by the same.
        self._silent: dict[bytes, float] = {}
        #: Those of which the broker has counted some.
        self._expected: dict[bytes, str] = {}
        self._has_lost = self._is_answered = self._is_live = False
        #: How many records have come; the last one's tag, and up to which they are acknowledged.
        self._count = self._tag = self._acknowledged = 0
        self._heard = 0.0
        take_undecodable(self)
        self.open()

    @property
    def streams(self) -> list[str]:
        """The streams that are being read."""
        return list(self._reading.values()) if self.is_open and not self.is_closing else []

    def read(self, streams: Mapping[str, int | None], begin: str | int = "first") -> None:
        """Begin to read streams.

        :param streams: with the numbers of their records, see :func:`count`.
        :param begin: ``first``; ``last`` for the last few records; ``next``; or an offset, where a
            few earlier records may come as well.
        :raises amqp.AMQPError: if the broker refuses.
        """
        self.basic_qos(0, PREFETCH, a_global=False)
        for stream, records in streams.items():
            # Before the answer, records may come.
            tag = f"{stream}-{self.channel_id}"
            # From an offset, there may be nothing, whatever is before.
            if records and begin in {"first", "last"}:
                self._expected[tag.encode()] = stream
                self._silent[tag.encode()] = time.monotonic() + PATIENCE
            else:
                self._silent[tag.encode()] = time.monotonic() + QUIET
            self._reading[tag] = stream
            try:
                self.basic_consume(
                    stream, tag, arguments={OFFSET: begin}, on_cancel=self._on_consumer_end
                )
            except RecoverableConnectionError:
                # The channel was closed meanwhile, which raises no error of its own.
                if self.refusal is not None:
                    raise self.refusal from None
                raise

    def read_to_end(self) -> None:
        """Read all that the streams have now.

        :raises StreamError: if the broker stops to answer, or ends the reading.
        """
        while not self.read_on():
            pass

    def read_on(self) -> bool:
        """Read about as much as the broker sends ahead; return whether that was all.

        :raises StreamError: as :meth:`read_to_end`.
        """
        while self._silent and (first := min(self._silent.values())) > time.monotonic():
            self.read_until(lambda: not self._silent, first)
        if late := [self._expected[tag] for tag in self._silent if tag in self._expected]:
            raise StreamError(
                f"RabbitMQ has sent nothing of {' and '.join(late)} for {PATIENCE:g} s, which "
                f"has records"
            )
        self._silent = {}
        before = self._count
        self._acknowledge()
        self._is_answered = False
        self.send_method(spec.Basic.Qos, "lBb", (0, PREFETCH, False))
        if not self.read_until(lambda: self._is_answered):
            raise StreamError(f"RabbitMQ did not answer within {PATIENCE:g} s")
        return self._count - before < PREFETCH

    def read_until(self, is_enough: Callable[[], bool], limit: float = math.inf) -> bool:
        """Read until ``is_enough``, the limit, or nothing has come for long; return ``is_enough``.

        :param limit: as of :func:`time.monotonic`.
        :raises StreamError: if the broker has ended the reading.
        """
        begun = time.monotonic()

        def is_over() -> bool:
            if is_enough() or self.has_left or self._has_lost:
                return True
            now = time.monotonic()
            return now > limit or now > max(begun, self._heard) + PATIENCE

        connection = self.connection
        if is_over() or connection is None:
            pass
        elif deliveries.is_possible(connection):
            with within(connection, PATIENCE):
                deliveries.read(connection, self.channel_id, self._receive, is_over)
        else:
            while not is_over():
                with suppress(TimeoutError):
                    drain(connection, 0.05)
        if self.refusal is not None:
            raise self.refusal
        if self.has_left or self._has_lost:
            raise StreamError("RabbitMQ ended the reading of the stream")
        return is_enough()

    def go_on(self) -> None:
        """Acknowledge each record at once from now on.

        RabbitMQ closes a channel that holds a delivery for longer than ``consumer_timeout``.
        """
        self._acknowledge()
        self._is_live = True

    @property
    def has_left(self) -> bool:
        """Whether the channel is closed, by the broker or by us."""
        return self.is_closing or not self.is_open

    def leave(self) -> None:
        """Close the channel without waiting."""
        if self.has_left:
            return
        with suppress(OSError, amqp.AMQPError):
            self.is_closing = True
            self.send_method(spec.Channel.Close, "BsBB", (0, "", 0, 0))

    def dispatch_method(self, method_sig: tuple[int, int], payload: Any, content: Any) -> Any:
        """Handle a record directly: there may be a hundred thousand."""
        if method_sig == spec.Basic.Deliver:
            # While the channel closes, some may still come.
            if not self.has_left:
                self._receive(StreamRecord(payload, content.body, message=content))
            return None
        if method_sig == spec.Basic.QosOk:
            self._is_answered = True
        return super().dispatch_method(method_sig, payload, content)

    def _receive(self, delivery: StreamRecord) -> None:
        if self._silent:
            self._silent.pop(delivery.consumer, None)
        self._count += 1
        self._tag, self._heard = delivery.tag, time.monotonic()
        self._take(delivery)
        if self._is_live or self._tag - self._acknowledged >= PREFETCH // 2:
            self._acknowledge()

    def _acknowledge(self) -> None:
        # RabbitMQ would close the connection for an ack on a channel that is being closed.
        if self._tag > self._acknowledged and not self.has_left:
            self._acknowledged = self._tag
            self.basic_ack(self._tag, multiple=True)

    def _on_consumer_end(self, tag: str) -> None:
        """Note that the broker has ended a reading: the stream was deleted, or its node stops."""
        self._reading.pop(tag, None)
        self._has_lost = not self._is_live
        self._ended()

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        self.send_method(spec.Channel.CloseOk)
        self.refusal = error_for_code(
            reply_code, reply_text, (class_id, method_id), amqp.ChannelError
        )
        # Else our own close has crossed it, and the broker answers that, too.
        if not self.is_closing:
            self.collect()
