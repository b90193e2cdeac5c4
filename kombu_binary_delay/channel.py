"""Topology, turned into channel calls, on a channel of ours alone on the user's connection.

A refusal closes it, and never the user's own; and while it waits for an answer, nothing else is
done on the connection. It must not import what decides on the declarations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import (
    AccessRefused,
    ChannelError,
    PreconditionFailed,
    RecoverableConnectionError,
)

from .errors import BinaryDelayError, TopologyError
from .model.topology import Binding, Part


class OwnChannel:
    """One connection's channel for declarations, opened when it is first lent.

    :param refused: told why a message was refused, for which nobody waits.
    """

    def __init__(
        self,
        connection: Any,
        namespace: str,
        refused: Callable[[BaseException], object] = lambda _: None,
    ) -> None:
        self._connection = connection
        self._namespace = namespace
        self._refused = refused
        self._channel: Any = None
        self._talking = False
        self._serving = False
        #: What came in amid a declaration, and is still to be dispatched.
        self.held: deque[Callable[[], object]] = deque()
        #: How often it was lent.
        self.talks = 0

    def take(self, channel_id: int, dispatch: Callable[[], object]) -> None:
        """Dispatch what came in, or, amid a declaration, hold what is for another channel.

        Else a delivery would run the user's callback in between, and what that publishes could
        take, or wait for, the very answer that the declaration waits for.
        """
        # Channel 0 is the connection itself.
        if self._talking and channel_id not in (0, getattr(self._channel, "channel_id", None)):
            # Only for as long: each publish reads, and nearly always nothing is held.
            self._connection.blocking_read = self._connection.read_held_first
            self.held.append(dispatch)
        elif self._talking or self._serving:
            dispatch()
        else:
            self.held.append(dispatch)
            self._serve()

    def serve_next(self) -> bool:
        """Dispatch the first that is held, if one is and may be: it comes before all to be read."""
        if self._talking or not self.held:
            return False
        dispatch = self.held.popleft()
        if not self.held:
            vars(self._connection).pop("blocking_read", None)
        dispatch()
        return True

    def _serve(self) -> None:
        """Dispatch all that is held, one after the other.

        Not one within the other, however many are held meanwhile: a consumer that publishes, or
        has its deliveries journalled, would reach the end of the stack.
        """
        if self._serving:
            return
        self._serving = True
        try:
            while self.serve_next():
                pass
        finally:
            self._serving = False

    @contextmanager
    def lend(self, what: str, also: str = "") -> Iterator[Any]:
        """Lend the channel for some declaration, while the others hold what comes in for them.

        :param what: what is declared, for the words of an error.
        :param also: the permission that this takes on something that is not the ladder's.
        :raises TopologyError: where the broker refuses.
        """
        outermost, self._talking = not self._talking, True
        self.talks += 1
        try:
            with self._explained(what, also):
                channel = self._open()
                try:
                    yield channel
                except (ChannelError, BinaryDelayError):
                    # The broker's answer, or our reading of it.
                    raise
                except BaseException:
                    # Interrupted: the answer to this would be taken for that to the next.
                    self._abandon(channel)
                    raise
        finally:
            if outermost:
                self._talking = False
                # What is raised here is the user's own, and is not explained as ours.
                self._serve()

    def _open(self) -> Any:
        if self._connection.channels is None:
            raise RecoverableConnectionError("the connection is closed")
        if self._channel is None or not self._channel.is_open:
            # Not our own class of channel: what we declare is not to be mirrored.
            self._channel = _Quiet(self._connection)
            self._channel.on_refusal = self._on_refusal
            self._channel.open()
        return self._channel

    def _abandon(self, channel: Any) -> None:
        """Close a channel without waiting, and ignore what is still to come for it."""
        self._channel = None
        with suppress(OSError, amqp.AMQPError):
            channel.is_closing = True
            channel.send_method(spec.Channel.Close, "BsBB", (0, "", 0, 0))

    def _on_refusal(self, error: BaseException, method: tuple[int, int]) -> None:
        if method == spec.Basic.Publish:
            self._refused(error)
        # Whoever waits for an answer waits in vain: with the channel, that has gone, too.
        if self._talking or method != spec.Basic.Publish:
            raise error

    @contextmanager
    def _explained(self, what: str, also: str) -> Iterator[None]:
        try:
            yield
        except AccessRefused as exc:
            raise TopologyError(
                f"RabbitMQ refused to declare {what}: {exc.reply_text}; grant this user the "
                f"permissions configure, write and read on names that begin with "
                f"'{self._namespace}.'{also and f', and {also}'}; or make the topology beforehand "
                f"and set declare to 'never'"
            ) from exc
        except PreconditionFailed as exc:
            remedy = ""
            if "inequivalent arg" in str(exc.reply_text):
                remedy = "; it stands with other arguments: delete it, or set another namespace"
            raise TopologyError(f"{what} cannot be declared: {exc.reply_text}{remedy}") from exc
        except ChannelError as exc:
            raise TopologyError(f"RabbitMQ refused to declare {what}: {exc}") from exc


class _Quiet(amqp.Channel):
    """A channel that, where the broker closes it, raises in nobody's code but ours."""

    on_refusal: Callable[[BaseException, tuple[int, int]], None]

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        try:
            super()._on_close(reply_code, reply_text, class_id, method_id)
        except ChannelError as exc:
            self.on_refusal(exc, (class_id, method_id))


def declare_part(channel: Any, part: Part) -> None:
    """Declare a part on a channel, and wait until the broker has."""
    send(channel, part)
    wait(channel)


def send(channel: Any, part: Part) -> None:
    """Send the declarations of a part, without waiting: the next answer tells of all of them."""
    for queue in part.queues:
        channel.queue_declare(
            queue.name,
            durable=True,
            auto_delete=False,
            arguments=dict(queue.arguments),
            nowait=True,
        )
    for exchange in part.exchanges:
        channel.exchange_declare(
            exchange.name,
            exchange.type,
            durable=True,
            auto_delete=False,
            arguments=dict(exchange.arguments),
            nowait=True,
        )
    for binding in part.bindings:
        _bind_one(channel, binding, nowait=True)


def look_for(channel: Any, exchanges: Iterable[str]) -> None:
    """Ask for exchanges, without waiting: where one is not there, the next answer is NotFound."""
    for exchange in exchanges:
        channel.exchange_declare(exchange, "", passive=True, nowait=True)


def wait(channel: Any) -> None:
    """Wait until the broker has done all that it was sent without waiting."""
    channel.basic_qos(0, 0, a_global=False)


def bind(channel: Any, bindings: tuple[Binding, ...]) -> None:
    """Make bindings, and wait for the last of them."""
    for binding in bindings[:-1]:
        _bind_one(channel, binding, nowait=True)
    _bind_one(channel, bindings[-1], nowait=False)


def unbind(channel: Any, bindings: tuple[Binding, ...]) -> None:
    """Remove bindings."""
    for each in bindings:
        remove = channel.queue_unbind if each.to_queue else channel.exchange_unbind
        remove(each.destination, each.source, each.key, arguments=dict(each.arguments))


def _bind_one(channel: Any, binding: Binding, *, nowait: bool) -> None:
    call = channel.queue_bind if binding.to_queue else channel.exchange_bind
    call(
        binding.destination,
        binding.source,
        binding.key,
        nowait=nowait,
        arguments=dict(binding.arguments),
    )
