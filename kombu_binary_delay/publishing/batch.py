"""Publish many messages with a window of outstanding confirms.

Kombu's ``Producer.batch()`` (Kombu 5.7 and later) asks a channel for a :class:`PublishBatch`. It
also works alone, on any channel of Kombu's ``pyamqp`` transport or a similar one, ours or not. It
publishes on a separate channel of the user's connection, in confirm mode: the user's channel does
not change. This module must not import the transport.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import islice, repeat, takewhile
from threading import RLock
from typing import Any, NamedTuple, Self

import amqp
from amqp import spec
from amqp.exceptions import RecoverableConnectionError

from kombu_binary_delay.errors import AmendmentError, BinaryDelayError, UnconfirmedError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.envelope import HEADER, HEADERS
from kombu_binary_delay.wire.draining import drain, within
from kombu_binary_delay.wire.mechanism import mechanism_of
from kombu_binary_delay.wire.undecodable import undecodable

from .confirm import ConfirmChannel
from .frames import UNWRITABLE, Messages
from .template import Run
from .way_out import UNDELAYED, Outgoing, WayOut

CONFIRMED = "confirmed"
NACKED = "nacked"
RETURNED = "returned"
UNKNOWN = "unknown"
DISCARDED = "discarded"

#: The most messages to send at once; fewer if the window is smaller or the messages are large.
_AT_ONCE = 100
_AT_ONCE_BYTES = 65536
#: Why the outcome of a message that the broker has taken is unknown.
_UNRECORDED = "it was published, but not recorded, so what it supersedes is delivered as well"
#: The timeout for closing a channel after the broker failed to answer, in seconds.
_LAST_WORD = 1.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one message of a batch.

    :param tag: the publisher's name for it; None if it has none.
    :param state: one of

        * ``confirmed``: the broker has taken responsibility for it.
        * ``nacked``: the broker refused it; a full queue that rejects does so.
        * ``returned``: it was mandatory, and no queue matched. The broker has dropped it.
        * ``unknown``: it was sent, but the connection or the channel closed, or the timeout
          expired, before an answer came, or before what it supersedes was recorded. Another publish
          may duplicate it.
        * ``discarded``: it was never sent. Another publish cannot duplicate it.

    :param reply_code: the broker's reply code, if it gave one; otherwise 0.
    :param reply_text: the broker's reply text, or why the outcome is unknown or discarded.
    """

    tag: Any
    state: str
    reply_code: int = 0
    reply_text: str = ""


#: Mandatory and immediate, the write timeout and the confirm timeout in seconds.
_Options = tuple[tuple[bool, bool], float | None, float | None]


class _Pending:
    """A message that has no outcome yet: buffered, then sent."""

    __slots__ = (
        "body",
        "exchange",
        "mark",
        "options",
        "out",
        "properties",
        "records",
        "returned",
        "routing_key",
        "sent",
        "state",
        "tag",
    )

    def __init__(
        self,
        body: Any,
        properties: Any,
        exchange: str,
        routing_key: str,
        options: _Options,
        tag: Any,
        out: Outgoing | None = None,
    ) -> None:
        self.body = body
        #: As the program gives them, as the exchange and the routing key.
        self.properties = properties
        self.exchange = exchange
        self.routing_key = routing_key
        self.options = options
        self.tag = tag
        #: What to publish in its place, if it asks for a delay or supersedes others.
        self.out = out
        self.sent = False
        #: The records of what it supersedes, to be written when it is confirmed.
        self.records: Sequence[Any] = () if out is None else out.records
        #: The state of its outcome; empty until that is known.
        self.state = ""
        #: Identifies it if it is returned: AMQP gives returned messages no number. None until one
        #: is looked for.
        self.mark: tuple[object, ...] | None = None
        self.returned: Any = None

    @property
    def written(self) -> tuple[Any, str, str]:
        """The properties, the exchange and the routing key that are sent."""
        out = self.out
        if out is None:
            return self.properties, self.exchange, self.routing_key
        return out.properties, out.exchange, out.routing_key

    @property
    def headers(self) -> Any:
        """The headers that are sent."""
        return self.written[0].get(HEADERS)

    @property
    def name(self) -> str:
        """Its name in errors."""
        if self.tag is not None and not isinstance(self.tag, _Place):
            return repr(self.tag)
        return repr(
            self.properties.get("message_id")
            or self.properties.get("correlation_id")
            or f"{self.exchange}/{self.routing_key}"
        )


class _Place(NamedTuple):
    """The tag of a message of a run."""

    run: Run
    place: int


#: A sent message of a run: its place, its options, to where it was published, and when it is due.
_OfRun = tuple[Run, int, _Options, tuple[str, str], int | None]


class PublishBatch:
    """Publish with up to ``max_size`` confirms outstanding.

    Messages are buffered, up to a hundred, and then sent in one write. The broker confirms them
    while the next ones are buffered; the batch waits only when ``max_size`` messages are
    unconfirmed. A delay counts from the call of :meth:`publish`.

    Used alone, it is a context manager: on exit, it flushes (after an exception, it discards) and
    closes. Use it from several threads only if nothing else uses the connection meanwhile.

    :param channel: the channel to publish on behalf of.
    :param max_size: the most messages that may be sent and not yet confirmed, and the most that are
        buffered.
    :param on_outcome: called with the :class:`Outcome` of each message, from within the methods of
        the batch. If it is given, a message that was nacked or returned raises no error.
    :raises TypeError: if the channel is not one of py-amqp.
    :raises ValueError: if ``max_size`` is not a whole number >= 1.
    """

    def __init__(
        self,
        channel: Any,
        max_size: int = 1000,
        on_outcome: Callable[[Outcome], object] | None = None,
    ) -> None:
        if not isinstance(channel, amqp.Channel):
            raise TypeError(
                f"a publish batch needs a channel of py-amqp, got {channel!r}; use channel() or "
                f"default_channel of a kombu.Connection to RabbitMQ"
            )
        if isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1:
            raise ValueError(f"max_size must be a whole number >= 1, got {max_size!r}")
        self.channel = channel
        self.max_size = max_size
        self._at_once = min(max_size, _AT_ONCE)
        self._on_outcome = on_outcome
        self._connection = _alive(channel)
        #: None for a channel without our transport, which delays nothing.
        self._way_out: WayOut | None = getattr(channel, "way_out", None)
        self._confirm_channel: ConfirmChannel | None = None
        self._messages: Any = None
        #: The confirm timeouts of all messages.
        self._limits: set[float | None] = set()
        self._number = 0
        self._buffer: deque[_Pending] = deque()
        self._sent: dict[int, _Pending | _OfRun] = {}  # by delivery tag, ascending
        #: Those that were sent, up to a delivery tag, by what identifies them if they are returned.
        self._marks: dict[tuple[object, ...], deque[_Pending]] = {}
        self._marked = 0
        self._to_note: list[Outgoing] = []
        #: The messages that supersede others, in the order in which to record that.
        self._to_record: deque[_Pending] = deque()
        self._unreported: deque[tuple[_Pending, Outcome]] = deque()
        self._unconfirmed: list[tuple[_Pending, Outcome]] = []
        self._busy = False
        self._failed: BaseException | None = None
        self._over = ""
        self._lock = RLock()

    # -- Kombu's interface ---------------------------------------------------------------------

    def publish(
        self,
        message: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        confirm_timeout: float | None = None,
        *,
        tag: Any = None,
    ) -> None:
        """Publish a message that the channel's ``prepare_message`` made.

        :param timeout: the write timeout in seconds. Among messages that are sent at once, the
            shortest counts.
        :param confirm_timeout: how long to wait for the confirm, in seconds. By default, as long as
            ``timeout``, or without a limit. Among the messages of a window, the shortest counts.
        :param tag: your name for the message in its :class:`Outcome`.
        :raises DelayError, AddressError, TopologyError, AmendmentError: as ``basic_publish``; the
            message is then not in the batch.
        :raises UnconfirmedError: if the connection or the channel has closed.
        :raises RuntimeError: if the batch is closed or discarded.
        """
        properties = _copied(message.properties)
        options = ((mandatory, immediate), timeout, confirm_timeout or timeout)
        body = message.body
        if isinstance(body, (bytearray, memoryview)):
            body = bytes(body)
        pending = _Pending(body, properties, exchange or "", routing_key or "", options, tag)
        headers, way_out = properties.get(HEADERS), self._way_out
        with self._lock:
            self.check()
            if way_out is not None and headers and way_out.concerns(headers):
                self._make_out(pending, way_out)
                # A callback may have closed it meanwhile.
                self.check()
            self._put(pending)

    def fill(
        self, run: Run, *, mandatory: bool = False, confirm_timeout: float | None = None
    ) -> None:
        """Publish messages of a kind in less time than :meth:`publish`; they are the same messages.

        They come after what is buffered. ``run`` has the outcome of each; ``on_outcome`` is not
        called. A message that cannot be published is discarded there, and the others go on.

        :raises UnconfirmedError, RuntimeError: as :meth:`publish`. A message without a state was
            then not sent.
        """
        options: _Options = ((mandatory, False), None, confirm_timeout)
        with self._lock:
            self.check()
            place = 0
            while place < len(run.bodies):
                end = place
                if self._way_out is not None and not self._busy:
                    self._send_all()
                    self._wait(self.max_size - self._at_once)
                    self._make_ready(0)
                    self._limits.add(confirm_timeout)
                    end = self._write_run(self._way_out, run, place, options)
                    self._note()
                if end == place:
                    # It needs more than to be written.
                    self._fill_one(run, place, options)
                    end += 1
                place = end
            self._report()

    def _fill_one(self, run: Run, place: int, options: _Options) -> None:
        """Publish one message of a run as any other."""
        read, to, due = run.read(place), run.template.destination, run.due[place]
        pending = _Pending(run.bodies[place], read, *to, options, _Place(run, place))
        way_out = self._way_out
        try:
            if way_out is not None and way_out.concerns(read[HEADERS]):
                self._make_out(pending, way_out)
            elif way_out is not None and due is not None:
                pending.out = way_out.ready_at(read, to, due, options[2])
        except BinaryDelayError as exc:
            self._set_outcome(pending, DISCARDED, 0, str(exc))
        else:
            self.check()
            self._put(pending)

    def _write_run(self, way_out: WayOut, run: Run, begin: int, options: _Options) -> int:
        """Write the next messages of a run; return the place of the first that is not written."""
        self._fail_if_lost()
        # One alone, if one of them cannot be written.
        for count in (self._at_once, 1):
            with suppress(*UNWRITABLE):
                written = self._gather_run(way_out, run, slice(begin, begin + count), options)
                break
        else:
            return begin
        if written:
            self._sent.update(enumerate(written, self._number + 1))
            self._number += len(written)
            self._send_gathered([])
            if way_out.is_noting:
                self._to_note.extend(map(_outgoing, written))
        return begin + len(written)

    def _gather_run(
        self, way_out: WayOut, run: Run, part: slice, options: _Options
    ) -> list[_OfRun]:
        """Gather messages of a run; fewer if they are large, or one needs more than that.

        :raises UNWRITABLE: if one cannot be written; nothing is gathered then.
        """
        headers, dues, ways = way_out.enter(run, part, time.time_ns() // 1000)
        messages = zip(run.bodies[part], headers, ways, strict=False)
        try:
            count = self._messages.add_encoded(messages, options[0], _AT_ONCE_BYTES)
        except BaseException:
            self._messages.clear()
            raise
        places = range(part.start, part.start + count)
        return list(zip(repeat(run), places, repeat(options), ways, dues, strict=False))

    def _put(self, pending: _Pending) -> None:
        self._limits.add(pending.options[2])
        self._buffer.append(pending)
        if pending.records:
            self._to_record.append(pending)
        # A callback that publishes while the batch waits must not start a second wait.
        if len(self._buffer) >= self._at_once and not self._busy:
            self._send_all()
        if self._unreported:
            self._report()

    def flush(self) -> None:
        """Send what is buffered, and wait for all confirms.

        Deliveries and other events of the connection are handled meanwhile.

        :raises UnconfirmedError: if a message since the last flush was nacked or returned, and
            there is no ``on_outcome``; or if the connection or the channel has closed.
        """
        with self._lock:
            self.check()
            # Messages that a callback publishes meanwhile are flushed, too.
            while self._buffer or self._sent:
                self._send_all()
                self._wait()
            self._note()
            self._report()
            self._complain()

    def check(self) -> None:
        """Check that the batch takes messages.

        :raises UnconfirmedError: after an error that has ended it.
        :raises RuntimeError: after it was closed or discarded.
        """
        if self._over:
            raise RuntimeError(f"the publish batch is {self._over}; make a new one")
        if self._failed is not None:
            raise UnconfirmedError(
                "the publish batch cannot be used after a failure; make a new one"
            ) from self._failed

    def discard(self) -> None:
        """Drop what is buffered. Messages that were sent stay sent."""
        with self._lock:
            self._over = self._over or "discarded"
            while self._buffer:
                self._set_outcome(self._buffer.popleft(), DISCARDED, 0, "the batch was discarded")
            self._report()
            self._unconfirmed.clear()

    def close(self) -> None:
        """Close the channel of the batch.

        :raises UnconfirmedError: if messages were neither flushed nor discarded.
        """
        with self._lock:
            discarded, self._over = self._over == "discarded", "closed"
            channel, self._confirm_channel = self._confirm_channel, None
            try:
                if channel is not None:
                    self._wait_to_record(channel)
                    # Confirms may come until the broker has closed it.
                    self._close(channel)
            finally:
                self._set_rest("it was not flushed", "the batch was closed before its confirm came")
                try:
                    self._note()
                finally:
                    self._report()
                    if discarded:
                        self._unconfirmed.clear()
            self._complain()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        try:
            if exc_type is None:
                self.flush()
        finally:
            self.discard()
            self.close()

    # -- sending and waiting -------------------------------------------------------------------

    def _make_out(self, pending: _Pending, way_out: WayOut) -> None:
        """Make ready what a new message asks for; an error about it comes here, and not later."""
        try:
            pending.out = way_out.ready(
                pending.properties,
                Destination(pending.exchange, pending.routing_key),
                pending.options[2],
                in_transaction=self.channel.in_transaction,
            )
            pending.records = pending.out.records
        except BinaryDelayError:
            raise
        except BaseException as exc:
            if self._is_cut_off(exc):
                self._buffer.append(pending)
                self._fail(exc)
            raise

    def _send_all(self) -> None:
        busy, self._busy = self._busy, True
        try:
            while self._buffer:
                self._fail_if_lost()
                room = min(self._at_once, len(self._buffer))
                # These may run callbacks, which can use the batch in any way.
                self._wait(self.max_size - room)
                self._make_ready(room)
                if self._buffer and not self._is_lost():
                    self._write(self._gather(room))
                self._note()
        finally:
            self._busy = busy

    def _make_ready(self, room: int) -> None:
        """Open the channel, and rewrite the delays that are shorter by now."""
        try:
            if self._buffer or not room:
                self._open()
            # Twice: a declaration can take long, and then other delays are shorter, too. Not more
            # often: if each declaration takes long, that would never end.
            for _ in range(2):
                now = time.time_ns() // 1000
                for pending in list(islice(self._buffer, room)):
                    out = pending.out
                    if out is not None and out.until <= now and self._way_out is not None:
                        self._make_out_again(self._way_out, pending, out)
        except BaseException as exc:
            if self._is_cut_off(exc):
                self._fail(exc)
            # It comes from a callback, and the batch can go on.
            raise

    def _make_out_again(self, way_out: WayOut, pending: _Pending, out: Outgoing) -> None:
        try:
            out = way_out.ready_again(out, pending.options[2])
        except UNDELAYED as exc:
            if pending in self._buffer:
                self._buffer.remove(pending)
                self._set_outcome(pending, DISCARDED, 0, str(exc))
            return
        # A callback may have flushed it meanwhile.
        if not pending.sent:
            pending.out = out

    def _gather(self, room: int) -> list[_Pending]:
        """Return the messages to write at once; fewer if they are large."""
        gathered, unwritable = [], []
        try:
            for pending in islice(self._buffer, room):
                try:
                    self._messages.add(pending.body, *pending.written, pending.options[0])
                except UNWRITABLE as exc:
                    unwritable.append((pending, f"it cannot be written: {exc}"))
                    continue
                gathered.append(pending)
                if self._messages.size >= _AT_ONCE_BYTES:
                    break
        except BaseException:
            self._messages.clear()
            raise
        for pending, reason in unwritable:
            self._buffer.remove(pending)
            self._set_outcome(pending, DISCARDED, 0, reason)
        return gathered

    def _write(self, gathered: list[_Pending]) -> None:
        """Write the gathered messages, the first of the buffer, to the broker."""
        if not gathered:
            return
        limits = [pending.options[1] for pending in gathered if pending.options[1] is not None]
        for pending in gathered:
            self._number += 1
            self._sent[self._number] = self._buffer.popleft()
            pending.sent = True
        self._send_gathered(limits)
        self._to_note.extend(pending.out for pending in gathered if pending.out is not None)

    def _send_gathered(self, limits: list[float]) -> None:
        """Send what is gathered; ``limits`` are for how long it may take, in seconds."""
        try:
            with within(self._connection, min(limits)) if limits else nullcontext():
                self._messages.send()
        except BaseException as exc:
            self._give_up(exc)
            if isinstance(exc, (OSError, amqp.AMQPError)):
                self._fail(exc)
            # A time limit, or an interrupt: it must reach the caller.
            self._end(exc)
            raise

    def _note(self) -> None:
        """Write the journal's events and the records of what was sent; this may run callbacks."""
        if self._to_note and self._way_out is not None:
            # A callback may come here again.
            sent, self._to_note = self._to_note, []
            try:
                self._way_out.note(sent)
            except BaseException:
                # An interrupt. Readers take an event that is written twice for one.
                self._to_note[:0] = sent
                raise
        done: list[_Pending] = []
        while self._to_record and self._to_record[0].state:
            pending = self._to_record.popleft()
            if pending.state == CONFIRMED:
                done.append(pending)
        if done and self._way_out is not None:
            self._write_records(self._way_out, done)

    def _write_records(self, way_out: WayOut, done: list[_Pending]) -> None:
        """Record what confirmed messages supersede; only then is their outcome complete."""
        try:
            way_out.record([record for pending in done for record in pending.records])
        except BaseException as exc:
            for pending in done:
                self._set_outcome(pending, UNKNOWN, 0, f"{_UNRECORDED}: {exc}")
            mechanism = mechanism_of(self._connection)
            if mechanism is not None:
                mechanism.amendments.end_if_unanswered(exc)
            if self._failed is None and not self._connection.connected:
                self._fail(exc)
            if isinstance(exc, AmendmentError):
                # Only in the outcomes: the caller may be publishing another message.
                return
            raise
        for pending in done:
            pending.records = ()
            self._set_outcome(pending, CONFIRMED)

    def _wait(self, most: int = 0) -> None:
        """Wait until at most ``most`` of the sent messages are without an answer."""
        if len(self._sent) <= most:
            return
        patience = self._patience()
        end = None if patience is None else time.monotonic() + patience
        busy, self._busy = self._busy, True
        try:
            while len(self._sent) > most:
                self._fail_if_lost()
                left = None if end is None else max(end - time.monotonic(), 0.001)
                try:
                    drain(self._connection, left)
                except TimeoutError:
                    if end is not None and time.monotonic() < end:
                        # From a callback.
                        raise
                    limit = f"{patience:g} s" if patience else "the connection's read timeout"
                    self._fail(TimeoutError(f"not all confirms came within {limit}"))
                except Exception as exc:
                    # Otherwise it comes from a callback of the user's, and the batch goes on.
                    if self._is_lost():
                        self._fail(exc)
                    raise
        finally:
            self._busy = busy

    def _open(self) -> None:
        if self._confirm_channel is None:
            channel = ConfirmChannel(self._connection, auto_decode=False)
            messages = Messages(self._connection, channel.channel_id)
            self._wait_to_open(channel)
            channel.on_ack = self._on_ack
            channel.events["basic_nack"].add(self._on_nack)
            channel.events["basic_return"].add(self._on_return)
            if self._confirm_channel is None and not self._over:
                self._confirm_channel, self._messages = channel, messages
            else:
                # A callback has opened one already, or closed the batch.
                channel.close()

    def _wait_to_open(self, channel: ConfirmChannel) -> None:
        limits = [pending.options[2] for pending in self._buffer if pending.options[2]]
        end = time.monotonic() + min(limits, default=0.0)
        try:
            with within(self._connection, min(limits)) if limits else nullcontext():
                channel.open()
                channel.confirm_select()
        except TimeoutError:
            if limits and time.monotonic() < end:
                # From a callback.
                raise
            limit = f"{min(limits):g} s" if limits else "the connection's read timeout"
            self._fail(TimeoutError(f"the channel was not opened within {limit}"))

    def _close(self, channel: ConfirmChannel) -> None:
        """Close the channel; wait for that only if the broker may still answer in time."""
        if channel.connection is None or not self._connection.connected:
            return
        limit = self._patience() if self._failed is None else _LAST_WORD
        channel.is_closing = True
        try:
            with within(self._connection, limit) if limit else nullcontext():
                channel.send_method(spec.Channel.Close, "BsBB", (0, "", 0, 0))
        except OSError as exc:
            self._give_up(exc)
            return
        if self._failed is None:
            # If the connection failed, there is nothing left to close.
            with suppress(OSError, amqp.AMQPError):
                channel.wait(spec.Channel.CloseOk, timeout=limit)

    def _give_up(self, cause: BaseException) -> None:
        """End the connection: it is broken, or it is unknown how much was written to it."""
        connection = self._connection
        if mechanism_of(connection) is None:
            connection.collect()
        else:
            # This may be in a callback of its consumer, which would wait for nothing.
            connection.end(RecoverableConnectionError(f"a publish batch was cut off: {cause}"))

    def _wait_to_record(self, channel: ConfirmChannel) -> None:
        """Wait a moment for the confirms of messages whose records are still to be written."""
        end = time.monotonic() + _LAST_WORD
        with suppress(TimeoutError, OSError, amqp.AMQPError):
            while (
                self._failed is None
                and channel.connection is not None
                and any(pending.sent and not pending.state for pending in self._to_record)
                and time.monotonic() < end
            ):
                drain(self._connection, _LAST_WORD)

    def _patience(self) -> float | None:
        """Return the timeout for the outstanding confirms, in seconds; None for no limit."""
        if len(self._limits) < 2:
            return next(iter(self._limits), None)
        limits = (_options(sent)[2] for sent in self._sent.values())
        return min((limit for limit in limits if limit), default=None)

    def _is_lost(self) -> bool:
        gone = self._confirm_channel is not None and self._confirm_channel.connection is None
        return gone or not self._connection.connected

    def _is_cut_off(self, error: BaseException) -> bool:
        """Whether an error ends the connection, now or by Kombu, which then connects again."""
        return self._is_lost() or isinstance(error, RecoverableConnectionError)

    def _fail_if_lost(self) -> None:
        if self._is_lost():
            refusal = self._confirm_channel and self._confirm_channel.refusal
            self._fail(refusal or RecoverableConnectionError("it was closed"))

    def _fail(self, cause: BaseException) -> None:
        """End the batch, and raise an error that names all unconfirmed messages."""
        failed = self._end(cause)
        failed, self._unconfirmed = self._unconfirmed or failed, []
        raise UnconfirmedError(_complaint(failed), _outcomes(failed)) from cause

    def _end(self, cause: BaseException) -> list[tuple[_Pending, Outcome]]:
        """End the batch; the outcomes of the sent messages are unknown."""
        self._failed = cause
        if not self._connection.connected:
            self._give_up(cause)
        reason = str(cause) or type(cause).__name__
        self._set_rest(f"it was not sent: {reason}", reason)
        if self._connection.connected and not isinstance(cause, TimeoutError):
            # Only the channel has closed.
            with suppress(BinaryDelayError, OSError, amqp.AMQPError):
                self._note()
        for pending in self._to_record:
            if pending.state == CONFIRMED:
                self._set_outcome(pending, UNKNOWN, 0, f"{_UNRECORDED}: {reason}")
        self._to_record.clear()
        failed = [outcome for outcome in self._unreported if outcome[1].state != CONFIRMED]
        self._report()
        return failed

    # -- outcomes ------------------------------------------------------------------------------

    def _on_ack(self, number: int, multiple: bool) -> None:
        for sent in self._answered(number, multiple):
            if isinstance(sent, tuple):
                sent[0].states[sent[1]] = CONFIRMED
            elif sent.returned is None:
                self._set_outcome(sent, CONFIRMED)
            else:
                self._set_outcome(
                    sent, RETURNED, sent.returned.reply_code, sent.returned.reply_text
                )

    def _on_nack(self, number: int, multiple: bool) -> None:
        for sent in self._answered(number, multiple):
            self._set_outcome(_whole(sent), NACKED, 0, "the broker refused it")

    def _on_return(self, exc: Any, exchange: str, routing_key: str, message: Any) -> None:
        """Find the returned message; its ack comes after it."""
        cut = undecodable(message)
        key: Any = (cut and cut.routing_key) or routing_key
        self._mark_sent()
        mark = _mark(message.body, message.properties, exchange, key)
        if cut and mark not in self._marks:
            # Of what was returned, its ids could not be read.
            mark = next((written for written in self._marks if written[:3] == mark[:3]), mark)
        waiting = self._marks.get(mark)
        if not waiting:
            raise exc
        # Equal messages without ids differ in their headers, which an exchange may have routed by.
        headers = message.properties.get(HEADERS)
        pending = next((sent for sent in waiting if sent.headers == headers), waiting[0])
        waiting.remove(pending)
        if not waiting:
            del self._marks[mark]
        pending.returned = exc
        # The user's handlers for messages returned on the channel get this one, too.
        for handler in list(self.channel.events.get("basic_return") or ()):
            handler(exc, exchange, routing_key, message)

    def _mark_sent(self) -> None:
        """Mark the mandatory messages that were sent since the last return."""
        # Most batches have no return. What is returned has no answer yet.
        for number in [number for number in self._sent if number > self._marked]:
            pending = self._sent[number] = _whole(self._sent[number])
            if pending.options[0][0]:
                pending.mark = _mark(pending.body, *pending.written)
                self._marks.setdefault(pending.mark, deque()).append(pending)
        self._marked = self._number

    def _answered(self, number: int, multiple: bool) -> list[_Pending | _OfRun]:
        sent = self._sent
        if not multiple:
            return [sent.pop(number)] if number in sent else []
        answered = list(takewhile(number.__ge__, sent))
        return [sent.pop(tag) for tag in answered]

    def _set_outcome(self, pending: _Pending, state: str, code: int = 0, text: str = "") -> None:
        self._unmark(pending)
        pending.state = state
        is_told = self._on_outcome is not None or isinstance(pending.tag, _Place)
        if state == CONFIRMED and (not is_told or pending.records):
            # There is no handler and no callback; or what it supersedes is to be recorded first.
            return
        self._unreported.append((pending, Outcome(pending.tag, state, code, text)))

    def _unmark(self, pending: _Pending) -> None:
        # What was returned has been found by its mark, and is no longer looked for.
        if pending.mark is None or pending.returned is not None:
            return
        waiting = self._marks.get(pending.mark)
        if waiting and pending in waiting:
            waiting.remove(pending)
            if not waiting:
                del self._marks[pending.mark]

    def _set_rest(self, buffered: str, sent: str) -> None:
        for pending in self._sent.values():
            self._set_outcome(_whole(pending), UNKNOWN, 0, sent)
        self._sent.clear()
        while self._buffer:
            self._set_outcome(self._buffer.popleft(), DISCARDED, 0, buffered)

    def _report(self) -> None:
        while self._unreported:
            pending, outcome = self._unreported.popleft()
            if isinstance(outcome.tag, _Place):
                run, place = outcome.tag
                run.states[place] = outcome.state
                if outcome.state != CONFIRMED:
                    run.replies[place] = outcome.reply_code, outcome.reply_text
            elif self._on_outcome is not None:
                self._on_outcome(outcome)
            elif outcome.state != CONFIRMED and not (
                # Then the channel's handlers have reported it.
                outcome.state == RETURNED and self.channel.events.get("basic_return")
            ):
                self._unconfirmed.append((pending, outcome))

    def _complain(self) -> None:
        failed, self._unconfirmed = self._unconfirmed, []
        if failed:
            raise UnconfirmedError(_complaint(failed), _outcomes(failed))


def _whole(sent: _Pending | _OfRun) -> _Pending:
    """Return a sent message with all that may be asked of it."""
    if not isinstance(sent, tuple):
        return sent
    run, place, options, way, _ = sent
    pending = _Pending(run.bodies[place], run.read(place), *way, options, _Place(run, place))
    pending.sent = True
    return pending


def _outgoing(sent: _OfRun) -> Outgoing:
    """Return a sent message of a run for :meth:`.WayOut.note`."""
    run, place, _, way, due = sent
    read, to = run.read(place), run.template.destination
    waits = due if way != to else None
    if waits is not None:
        read[HEADERS][HEADER] = {"due": -(-waits // 1000)}
    return Outgoing(read, *way, is_delayed=due is not None, due=waits, given=(read, to))


def _options(sent: _Pending | _OfRun) -> _Options:
    return sent[2] if isinstance(sent, tuple) else sent.options


def _alive(channel: Any) -> Any:
    if channel.connection is None:
        raise RecoverableConnectionError("the channel is closed")
    return channel.connection


def _copied(properties: dict[str, Any]) -> dict[str, Any]:
    """Return properties as they are now: callers may use one dict of headers for all of a batch."""
    # Its own copy: those of a message that cannot be decoded are of another type.
    copied = properties.copy()
    if (headers := copied.get(HEADERS)) is not None:
        copied[HEADERS] = dict(headers)
    return copied


def _mark(
    body: Any, properties: dict[str, Any], exchange: str, routing_key: str
) -> tuple[object, ...]:
    if isinstance(body, str):
        # An empty body comes back empty, whatever its encoding.
        body = body and body.encode(properties.get("content_encoding") or "utf-8")
    names = (properties.get(name) for name in ("message_id", "correlation_id"))
    # They are text, unless something has made them of bytes that may change.
    hashable = (
        bytes(name) if isinstance(name, (bytearray, memoryview)) else name for name in names
    )
    return (exchange, routing_key, bytes(body or b""), *hashable)


def _outcomes(failed: list[tuple[_Pending, Outcome]]) -> tuple[Outcome, ...]:
    return tuple(outcome for _, outcome in failed)


def _complaint(failed: list[tuple[_Pending, Outcome]]) -> str:
    named = [
        f"{pending.name} {outcome.state}"
        + (f" ({outcome.reply_text})" if outcome.reply_text else "")
        for pending, outcome in failed[:3]
    ]
    if len(failed) > len(named):
        named.append(f"and {len(failed) - len(named)} more")
    return f"{len(failed)} messages of the batch were not confirmed: {', '.join(named)}"
