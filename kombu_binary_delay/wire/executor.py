"""Run the router's commands on the broker, on a separate channel of the user's connection.

An error of the broker closes that channel, and never the user's. The executor decides nothing: it
runs each command and returns the answer. It must not import the router or the transport.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from struct import Struct
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import (
    AccessRefused,
    ChannelError,
    InternalError,
    NotFound,
    PreconditionFailed,
    RecoverableConnectionError,
    ResourceLocked,
)
from kombu.log import get_logger

from kombu_binary_delay.errors import BinaryDelayError, TopologyError
from kombu_binary_delay.ladder.foreign import FOREIGN_LADDERS, ForeignLadder
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue
from kombu_binary_delay.ladder.versions import why_no_streams
from kombu_binary_delay.routing.commands import (
    Answer,
    AskTemporary,
    AskType,
    Command,
    Delete,
    Ensure,
    Look,
    OutOfReachError,
    Pause,
    Steps,
    Unbind,
    Warn,
)

from .frame_buffer import FrameBuffer
from .repeating import Warnings

logger = get_logger(__name__)

_warnings = Warnings(logger)
#: What to say of a stream that was made with other settings, by its name.
OTHER_AGE = (
    "the stream {!r} keeps records for as long as it was made to, and not as the settings say: "
    "kombu-binary-delay verify names both, and the remedy"
)
#: The head of a frame, and that of a method in it (AMQP 0-9-1, section 4.2.3).
_FRAME, _METHOD = Struct(">BHI"), Struct(">HH")
#: The types to ask an exchange for, the most common first.
_TYPES = ("direct", "topic", "fanout", "headers")
#: What RabbitMQ's error says, before it names the exchange, if that has another type.
_OTHER_TYPE = "inequivalent arg 'type'"
#: RabbitMQ refuses a declaration with a number in place of the alternate exchange's name, whether
#: the exchange exists or not. So such a declaration reads the type and never changes anything.
_NO_NAME = (("alternate-exchange", 1),)
#: So it refuses one of a queue with these as ``x-expires`` or ``x-overflow``.
_NO_TIME, _NO_OVERFLOW = "?", 1
#: With these values of ``x-overflow``, a queue that is full drops its oldest message.
_TAKES_ALL = (None, "drop-head")
#: The end of RabbitMQ's error: the value of what differs, and, in most cases, its type.
_CURRENT = re.compile(
    r"none|the value '(?P<value>.*)' of type '(?P<type>\w+)'|'(?P<untyped>.*)'", re.DOTALL
)
_STREAM = ("x-queue-type", "stream")
_BOOLEANS = {"true": True, "false": False}
_INTEGERS = {"byte", "unsignedbyte", "short", "unsignedshort", "signedint", "unsignedint", "long"}


class Executor:
    """Runs commands on one connection.

    :param connection: of py-amqp; if it has a ``frame_buffer``, frames for other channels are
        buffered during a command.
    :param namespace: for the text of an error.
    """

    def __init__(self, connection: Any, namespace: str) -> None:
        self.connection = connection
        self._namespace = namespace
        self._buffer: FrameBuffer = getattr(connection, "frame_buffer", None) or FrameBuffer(
            connection
        )
        self._channel: Any = None
        #: The last warning about what the broker has refused, or of another reason; empty for none.
        self.last_warning = ""
        #: The error by which the broker closed the channel because of a publish, if it did.
        self.refused_publish: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a command waits for its answer."""
        return self._buffer.declaring

    def run(self, steps: Steps) -> None:
        """Run the router's commands.

        :raises TopologyError: if the broker refuses one and the router does not handle that.
        """
        answer: Any = None
        error: TopologyError | None = None
        while True:
            try:
                command = steps.throw(error) if error is not None else steps.send(answer)
            except StopIteration:
                return
            answer = error = None
            try:
                answer = self.do(command)
            except TopologyError as exc:
                error = exc

    @contextmanager
    def channel(self, what: str, needs: str = "") -> Iterator[Any]:
        """Yield the declaration channel; buffer frames for other channels until it is released.

        :param what: what is declared, for the text of an error.
        :param needs: the permission that it needs on a name outside the ladder.
        :raises TopologyError: if the broker refuses.
        """
        with self._buffer.closed(what), self._explained(what, needs):
            channel = self._open()
            try:
                yield channel
            except (ChannelError, BinaryDelayError):
                # The broker's error, or our translation of it.
                raise
            except BaseException:
                # Interrupted: the next command would take the answer to this one for its own.
                self._abandon(channel)
                raise

    def close(self) -> None:
        """Close the channel; the next command opens another one."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            with self._buffer.closed("the end of the declarations"):
                channel.close()

    # -- the commands --------------------------------------------------------------------------

    def do(self, command: Command) -> Any:
        """Run one command and return its answer.

        :raises TopologyError: if the broker refuses.
        """
        refused = self.refused_publish
        try:
            answer = self._do(command)
        except TopologyError:
            if self.refused_publish is refused:
                raise
        else:
            if self.refused_publish is refused:
                return answer
        # It was lost with the channel, which the broker has closed because of an earlier publish.
        return self._do(command)

    def _do(self, command: Command) -> Any:
        if isinstance(command, Warn):
            if command.once:
                _warnings.warn(command.text)
            elif command.text != self.last_warning:
                # A step that fails for the same reason as the one before is no news.
                logger.warning("%s", command.text)
            self.last_warning = command.text
        elif isinstance(command, Pause):
            time.sleep(command.seconds)
        elif isinstance(command, Look | AskType | AskTemporary):
            return self._ask(command)
        elif isinstance(command, Ensure):
            return self._ensure(command)
        elif isinstance(command, Unbind):
            with self.channel(command.what) as channel:
                unbind(channel, command.bindings)
        else:
            self._delete(command)
        return Answer.DONE

    def _ensure(self, command: Ensure) -> Answer:
        if not command.lock:
            return self._declare(command)
        with self._buffer.closed(command.what):
            try:
                return self._ensure_alone(command)
            except BinaryDelayError:
                raise
            except BaseException:
                # Interrupted: others wait for the lock, which would last as long as the connection.
                self._unlock_soon(command)
                raise

    def _ensure_alone(self, command: Ensure) -> Answer:
        with self.channel(command.what) as channel:
            try:
                channel.queue_declare(command.lock, exclusive=True, auto_delete=True)
            except ResourceLocked:
                return Answer.LOCKED
        try:
            answer = self._declare(command)
        except TopologyError:
            self._unlock(command)
            raise
        self._unlock(command)
        return answer

    def _declare(self, command: Ensure) -> Answer:
        try:
            for name in self.declare(command.part, command.what, command.needs):
                _warnings.warn(OTHER_AGE.format(name))
        except TopologyError as exc:
            if isinstance(exc.__cause__, NotFound) and is_deleted(exc.__cause__):
                return Answer.MISSING
            if isinstance(exc.__cause__, ResourceLocked):
                return Answer.LOCKED
            raise
        return Answer.DONE

    def declare(self, part: Part, what: str, needs: str = "") -> tuple[str, ...]:
        """Declare a part; a stream that exists keeps the age that it was made with.

        :param what: as of :class:`~.routing.commands.Ensure`, and ``needs``.
        :returns: the names of the streams whose age is another one.
        :raises TopologyError: if the broker refuses, or if it may have no streams, and one is asked
            for.
        """
        if any(_STREAM in queue.arguments for queue in part.queues):
            why = why_no_streams(self.connection.server_properties, self.connection.host)
            if why:
                raise TopologyError(f"{what} cannot be declared: {why}")
        try:
            with self.channel(what, needs) as channel:
                declare(channel, part)
        except TopologyError as exc:
            kept = tuple(queue for queue in part.queues if _has_another_age(queue, exc))
            if not kept:
                raise
            others = tuple(queue for queue in part.queues if queue not in kept)
            names = tuple(stream.name for stream in kept)
            return names + self.declare(replace(part, queues=others), what, needs)
        return ()

    def _unlock(self, command: Ensure) -> None:
        # The lock belongs to the connection, not to the channel, which an error closes.
        with self.channel(command.what) as channel:
            channel.queue_delete(command.lock)

    def _unlock_soon(self, command: Ensure) -> None:
        """Remove a lock without waiting for the broker, which may not answer."""
        if self.connection.channels is None:
            return
        with suppress(OSError, amqp.AMQPError):
            channel = _DeclarationChannel(self.connection, self._refused)
            channel.open()
            channel.send_method(spec.Queue.Delete, "Bsbbb", (0, command.lock, False, False, True))
            self._abandon(channel)

    def _ask(self, command: Look | AskType | AskTemporary) -> Any:
        if isinstance(command, AskType):
            return self._ask_type(command.exchange)
        if isinstance(command, AskTemporary):
            return self._ask_temporary(command.queue)
        return self._look(command)

    def _look(self, command: Look) -> Answer:
        # A user's queue may be asked for with its relay, and an exchange is alone.
        names = [f"the queue {queue!r}" for queue in command.queues[:1]]
        if command.exchanges:
            names = [f"the exchange {exchange!r}" for exchange in command.exchanges] + names
        with self.channel(names[0] if len(names) == 1 else "the ladder") as channel:
            try:
                with _in_one_piece(channel):
                    for exchange in command.exchanges:
                        _send(channel, Exchange(exchange, ""), passive=True)
                    for queue in command.queues:
                        _send(channel, Queue(queue, ()), passive=True)
                    # If something does not exist, the broker ignores all that follows.
                    for binding in command.bindings:
                        _bind(channel, binding)
                    for binding in command.others:
                        _unbind(channel, binding)
                    sources = {other.source for other in command.others}
                    for binding in command.bindings:
                        if binding.source in sources:
                            _bind(channel, binding)
                wait(channel)
            except NotFound as exc:
                return _missing(exc)
            except ResourceLocked:
                return Answer.LOCKED
        return Answer.DONE

    def _ask_type(self, exchange: str) -> str | Answer | None:
        what = f"the type of the exchange {exchange!r}"
        where = f" for exchange '{exchange}' in vhost '{self.connection.virtual_host}': "
        left = list(_TYPES)
        while left:
            kind = left.pop(0)
            with self.channel(what, f"configure on the exchange {exchange!r}") as channel:
                try:
                    with _in_one_piece(channel):
                        # Whether it exists, only this tells.
                        _send(channel, Exchange(exchange, ""), passive=True)
                        _send(channel, Exchange(exchange, kind, _NO_NAME))
                    wait(channel)
                except NotFound:
                    return Answer.MISSING
                except PreconditionFailed as exc:
                    refusal = str(exc.reply_text)
            # The error begins with what differs, the type or another property; its end may be cut.
            if not refusal.partition(" for exchange ")[0].endswith(_OTHER_TYPE):
                return kind
            # Otherwise it is whole, and ends with the type that the exchange has.
            said = f"{_OTHER_TYPE}{where}received '{kind}' but current is "
            for other in left:
                if refusal.endswith(f"{said}'{other}'"):
                    return other
            left.sort(key=lambda type_: f"'{type_}'" not in refusal)
        return None

    def _ask_temporary(self, queue: str) -> bool:
        """Ask for one property of a queue after the other: each error names the first that differs.

        RabbitMQ compares ``x-overflow`` after all that makes a queue end by itself.
        """
        properties = {"durable": True, "auto_delete": False}
        arguments: dict[str, Any] = {"x-expires": _NO_TIME, "x-overflow": _NO_OVERFLOW}
        differing: set[str] = set()
        while True:
            name, value = self._difference(queue, properties, arguments)
            if not name or name in differing:
                return False
            differing.add(name)
            if name == "x-overflow":
                return value in _TAKES_ALL and arguments.get("x-expires") != _NO_TIME
            if value is None:
                # It does not expire, and is not auto-delete, which RabbitMQ compares before.
                return False
            if name in properties:
                properties[name] = value
            else:
                arguments[name] = value
            if name == "auto_delete":
                # It ends by itself, whether it expires or not.
                arguments.pop("x-expires", None)

    def _difference(
        self, queue: str, properties: dict[str, bool], arguments: dict[str, Any]
    ) -> tuple[str, Any]:
        """Return what RabbitMQ says to differ between a queue and a declaration, and its value.

        :param arguments: with an invalid one, so that the declaration is refused in any case.
        :returns: as :func:`difference`.
        """
        what = f"the arguments of the queue {queue!r}"
        try:
            with self.channel(what) as channel:
                try:
                    channel.queue_declare(queue, **properties, arguments=arguments)
                except ChannelError as exc:
                    return difference(str(exc.reply_text), queue, self.connection.virtual_host)
        except UnicodeDecodeError:
            # RabbitMQ 3.10 can cut the error within a character.
            pass
        except InternalError as exc:
            raise TopologyError(
                f"RabbitMQ has closed the connection instead of reporting {what}, as it does if "
                f"they are long and not ASCII; declare the queue on this connection before you "
                f"delay to it"
            ) from exc
        return "", None

    def _delete(self, command: Delete) -> None:
        with self.channel(command.what) as channel:
            for exchange in command.exchanges:
                channel.exchange_delete(exchange)
            for queue in command.queues:
                channel.queue_delete(queue)

    # -- the channel ---------------------------------------------------------------------------

    def _open(self) -> Any:
        if self.connection.channels is None:
            raise RecoverableConnectionError("the connection is closed")
        if self._channel is None or not self._channel.is_open:
            # Not our own class of channel, which would follow these declarations.
            self._channel = _DeclarationChannel(self.connection, self._refused)
            self._channel.open()
        return self._channel

    def _abandon(self, channel: Any) -> None:
        """Close a channel without waiting, and ignore further frames for it."""
        self._channel = None
        with suppress(OSError, amqp.AMQPError):
            channel.is_closing = True
            channel.send_method(spec.Channel.Close, "BsBB", (0, "", 0, 0))

    def _refused(self, error: BaseException, method: tuple[int, int]) -> None:
        if method == spec.Basic.Publish:
            self.refused_publish = error
        # A command that waits for an answer would wait forever: it was lost with the channel.
        if self._buffer.declaring or method != spec.Basic.Publish:
            raise error

    def _foreign(self, refusal: ChannelError) -> ForeignLadder | None:
        """Return the other system's ladder that a refusal is about, if it is."""
        text = str(refusal.reply_text)
        return next(
            (ladder for ladder in FOREIGN_LADDERS.values() if ladder.is_named_in(text)), None
        )

    @contextmanager
    def _explained(self, what: str, needs: str) -> Iterator[None]:
        try:
            yield
        except AccessRefused as exc:
            foreign = self._foreign(exc)
            names = foreign.namespace if foreign else f"{self._namespace}."
            raise TopologyError(
                f"RabbitMQ refused to declare {what}: {exc.reply_text}; grant this user the "
                f"permissions configure, write and read on names that begin with "
                f"'{names}'{needs and f', and {needs}'}; or make the topology "
                f"beforehand (kombu-binary-delay create) and set declare to 'never'"
            ) from exc
        except PreconditionFailed as exc:
            remedy = ""
            if "inequivalent arg" in str(exc.reply_text):
                remedy = "; it exists with other arguments" + (
                    ", which its own system needs: use another ladder"
                    if self._foreign(exc)
                    else ": delete it when it is empty, or set another namespace"
                )
            raise TopologyError(f"{what} cannot be declared: {exc.reply_text}{remedy}") from exc
        except ChannelError as exc:
            if isinstance(exc, NotFound) and not is_deleted(exc):
                raise OutOfReachError(
                    f"RabbitMQ cannot reach {what}: {exc.reply_text}; start the node that has it; "
                    f"quorum queues stay reachable while most nodes run"
                ) from exc
            raise TopologyError(f"RabbitMQ refused to declare {what}: {exc}") from exc


class _DeclarationChannel(amqp.Channel):
    """A channel that raises nothing in the user's code if the broker closes it."""

    runs_no_user_code = True

    def __init__(
        self, connection: Any, refused: Callable[[BaseException, tuple[int, int]], None]
    ) -> None:
        super().__init__(connection)
        self._on_refusal = refused

    def open(self) -> None:
        """Open the channel without waiting: the answer comes before that to the first command.

        So does py-amqp after the broker has closed it.
        """
        self.send_method(spec.Channel.Open, "s", ("",))
        self.is_open = True

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        try:
            super()._on_close(reply_code, reply_text, class_id, method_id)
        except ChannelError as exc:
            self._on_refusal(exc, (class_id, method_id))


def is_deleted(refusal: NotFound) -> bool:
    """Whether a queue or exchange does not exist, by RabbitMQ's refusal of a declaration.

    RabbitMQ refuses it as well if it has the queue, but its node has stopped or is just starting.
    """
    return str(refusal.reply_text).startswith(("NOT_FOUND - no queue", "NOT_FOUND - no exchange"))


def difference(refusal: str, queue: str, vhost: str) -> tuple[str, Any]:
    """Read what differs between a queue and a declaration, by RabbitMQ's refusal, and its value.

    :returns: the name, and None if the queue lacks it; an empty name if the refusal does not say
        it, or its end is cut off.
    """
    start, _, end = refusal.partition(f"' for queue '{queue}' in vhost '{vhost}': received ")
    name = start.removeprefix("PRECONDITION_FAILED - inequivalent arg '")
    current = _CURRENT.fullmatch(end.partition(" but current is ")[2])
    if name == start or current is None:
        return "", None
    value, kind = current["value"], current["type"]
    if value is None:
        value = current["untyped"]
        kind = "long" if (value or "").isdecimal() else "bool" if value in _BOOLEANS else "longstr"
    if kind in _INTEGERS:
        return name, int(value)
    if kind == "bool":
        return name, _BOOLEANS.get(value)
    return (name, value) if kind == "longstr" else ("", None)


def _has_another_age(queue: Queue, error: TopologyError) -> bool:
    """Whether the broker refuses to declare a stream because its ``x-max-age`` is another one."""
    text = str(getattr(error.__cause__, "reply_text", ""))
    # A queue that is no stream has none.
    is_other = f"inequivalent arg 'x-max-age' for queue '{queue.name}'" in text
    return is_other and "current is none" not in text


def _missing(refusal: NotFound) -> Answer:
    if is_deleted(refusal):
        return Answer.MISSING
    raise refusal


def declare(channel: Any, part: Part) -> None:
    """Declare a part on a channel, and wait until the broker has done so."""
    with _in_one_piece(channel):
        for declared in part.in_order():
            if isinstance(declared, Binding):
                _bind(channel, declared)
            else:
                _send(channel, declared)
    wait(channel)


@contextmanager
def _in_one_piece(channel: Any) -> Iterator[None]:
    """Gather what is sent on a channel, and write it at once: each write wakes the broker."""
    connection, pieces = channel.connection, list[bytes]()
    write_frame = connection.frame_writer

    def gather(
        kind: int, number: int, method: tuple[int, int], arguments: Any, content: Any
    ) -> None:
        if content or number != channel.channel_id:
            write_frame(kind, number, method, arguments, content)
            return
        payload = _METHOD.pack(*method) + (arguments or b"")
        pieces.append(b"%b%b\xce" % (_FRAME.pack(kind, number, len(payload)), payload))

    connection.frame_writer = gather
    try:
        yield
    finally:
        connection.frame_writer = write_frame
        if pieces:
            connection.transport.write(b"".join(pieces))


def _send(channel: Any, declared: Exchange | Queue, *, passive: bool = False) -> None:
    """Send a declaration, and do not wait for its answer, which py-amqp then ignores.

    With an answer to each, a time limit counts anew for each, and not for all levels at once. To a
    question, only a refusal is an answer.
    """
    durable, exclusive, internal, auto_delete, nowait = True, False, False, False, passive
    arguments = dict(declared.arguments)
    if isinstance(declared, Queue):
        flags = (passive, durable, exclusive, auto_delete, nowait)
        channel.send_method(spec.Queue.Declare, "BsbbbbbF", (0, declared.name, *flags, arguments))
    else:
        flags = (passive, durable, auto_delete, internal, nowait)
        names = (0, declared.name, declared.type)
        channel.send_method(spec.Exchange.Declare, "BssbbbbbF", (*names, *flags, arguments))


def unbind(channel: Any, bindings: Iterable[Binding]) -> None:
    """Remove bindings."""
    for binding in bindings:
        remove = channel.queue_unbind if binding.to_queue else channel.exchange_unbind
        remove(binding.destination, binding.source, binding.key, arguments=dict(binding.arguments))


def _bind(channel: Any, binding: Binding) -> None:
    call = channel.queue_bind if binding.to_queue else channel.exchange_bind
    call(
        binding.destination,
        binding.source,
        binding.key,
        nowait=True,
        arguments=dict(binding.arguments),
    )


def _unbind(channel: Any, binding: Binding) -> None:
    names = (0, binding.destination, binding.source, binding.key)
    arguments = dict(binding.arguments)
    if binding.to_queue:
        # AMQP has no way to ask for no answer. py-amqp ignores it.
        channel.send_method(spec.Queue.Unbind, "BsssF", (*names, arguments))
    else:
        channel.send_method(spec.Exchange.Unbind, "BsssbF", (*names, True, arguments))


def wait(channel: Any) -> None:
    """Wait for one answer; the broker sends it after all that was sent without waiting."""
    channel.basic_qos(0, 0, a_global=False)
