"""AMQP 0-9-1 for clients in this process: frames in, frames out, without a socket.

A :class:`Session` is the broker's end of one connection. It reads the frames that py-amqp writes,
asks the :class:`.broker.Broker`, and queues the frames that py-amqp then reads. So all code of a
client above the socket is the real one.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any

import amqp
from amqp import spec
from amqp.serialization import dumps, loads

from kombu_binary_delay.ladder.parts import Binding

from .broker import HEADERS, Broker, BrokerError, Consumer, Message, Queue

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
FRAME_MAX = 131072
_HEAD = struct.Struct(">BHI")
_METHOD, _HEADER, _BODY, _HEARTBEAT = 1, 2, 3, 8
Frame = tuple[int, int, bytes]
Sig = tuple[int, int]


@dataclass(eq=False)
class _Delivery:
    queue: Queue
    message: Message
    consumer: Consumer | None


@dataclass(eq=False)
class _Channel:
    """The broker's end of one channel."""

    number: int
    confirms: bool = False
    published: int = 0
    prefetch: int = 0
    limit: int = 0
    last_queue: str = ""
    tags: Any = field(default_factory=lambda: count(1))
    unacked: OrderedDict[int, _Delivery] = field(default_factory=OrderedDict)
    consumers: dict[str, tuple[Queue, Consumer]] = field(default_factory=dict)
    #: A publish whose header or body has not come yet.
    publish: tuple[str, str, bool] | None = None
    content: Any = None
    #: What a transaction publishes and settles at its commit.
    transaction: list[Callable[[], object]] | None = None
    is_closing: bool = False

    def has_room(self, consumer: Consumer) -> bool:
        """Return whether both prefetch limits have room."""
        if not consumer.no_ack and self.limit and len(self.unacked) >= self.limit:
            return False
        return not consumer.prefetch or consumer.unacked < consumer.prefetch


class Session:
    """The broker's end of one connection.

    :param now: returns the time in microseconds since the epoch.
    """

    def __init__(self, broker: Broker, now: Callable[[], int]) -> None:
        self.broker = broker
        self._now = now
        #: What the client is to read next.
        self.frames: deque[Frame] = deque()
        self.is_open = True
        self._channels: dict[int, _Channel] = {}
        self._data = b""
        self._greeted = False

    # -- frames --------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Take what the client writes."""
        self.broker.run_until(self._now())
        self._data += data
        if not self._greeted:
            if len(self._data) < len(PROTOCOL_HEADER):
                return
            self._data = self._data[len(PROTOCOL_HEADER) :]
            self._greeted = True
            start = (0, 9, self.broker.properties, b"PLAIN AMQPLAIN", b"en_US")
            self._send(0, spec.Connection.Start, "ooFSS", start)
        at = 0
        while self.is_open and len(self._data) - at >= _HEAD.size:
            kind, number, size = _HEAD.unpack_from(self._data, at)
            end = at + _HEAD.size + size
            if len(self._data) <= end:
                break
            payload = self._data[at + _HEAD.size : end]
            at = end + 1
            self._receive_frame(kind, number, payload)
        self._data = self._data[at:]

    def _receive_frame(self, kind: int, number: int, payload: bytes) -> None:
        channel = self._channels.get(number)
        try:
            if kind == _METHOD:
                sig: Sig = struct.unpack_from(">HH", payload)
                self._receive_method(number, channel, sig, payload)
            elif kind in (_HEADER, _BODY) and channel is not None and channel.publish is not None:
                self._receive_content(channel, kind, payload)
        except BrokerError as exc:
            self._refuse(number, exc)

    def _receive_method(self, number: int, channel: _Channel | None, sig: Sig, buf: bytes) -> None:
        if sig[0] == spec.Connection.CLASS_ID:
            self._connection_method(sig)
            return
        if sig == spec.Channel.Open:
            self._channels[number] = _Channel(number)
            self._send(number, spec.Channel.OpenOk, "S", (b"",))
            return
        if channel is None or (channel.is_closing and sig != spec.Channel.CloseOk):
            return
        method = _METHODS.get(sig)
        if method is None:
            raise BrokerError(540, f"NOT_IMPLEMENTED - method {sig}")
        format_, function = method
        function(self, channel, *_arguments(format_, buf))

    def _send(self, number: int, sig: Sig, format_: str = "", values: Any = ()) -> None:
        arguments = dumps(format_, values) if format_ else b""
        self.frames.append((_METHOD, number, struct.pack(">HH", *sig) + arguments))

    def _send_content(
        self, number: int, sig: Sig, format_: str, values: Any, message: Message
    ) -> None:
        self._send(number, sig, format_, values)
        content = amqp.Message()
        content.properties = message.properties
        header = struct.pack(">HHQ", spec.Basic.CLASS_ID, 0, len(message.body))
        self.frames.append((_HEADER, number, header + content._serialize_properties()))
        size = FRAME_MAX - 8
        for at in range(0, len(message.body), size):
            self.frames.append((_BODY, number, message.body[at : at + size]))

    def _refuse(self, number: int, error: BrokerError) -> None:
        """Close the channel, or the connection, with an error."""
        if error.code in (501, 503, 504, 505, 530, 540, 541):
            self._send(0, spec.Connection.Close, "BsBB", (error.code, error.text, 0, 0))
            self._end_channels()
            return
        channel = self._channels[number]
        channel.is_closing = True
        self._end_channel(channel)
        self._send(number, spec.Channel.Close, "BsBB", (error.code, error.text, 0, 0))

    # -- connection ----------------------------------------------------------------------------

    def _connection_method(self, sig: Sig) -> None:
        if sig == spec.Connection.StartOk:
            self._send(0, spec.Connection.Tune, "BlB", (2047, FRAME_MAX, 0))
        elif sig == spec.Connection.Open:
            self._send(0, spec.Connection.OpenOk, "s", ("",))
        elif sig == spec.Connection.Close:
            self._send(0, spec.Connection.CloseOk)
            self.end()
        elif sig == spec.Connection.CloseOk:
            self.end()

    def end(self) -> None:
        """End the connection: what was not acknowledged goes back to its queues."""
        if self.is_open:
            self.is_open = False
            self._end_channels()
            self.broker.close(self)

    def _end_channels(self) -> None:
        for channel in list(self._channels.values()):
            self._end_channel(channel)
        self._channels.clear()

    def _end_channel(self, channel: _Channel) -> None:
        consumers, channel.consumers = list(channel.consumers.values()), {}
        for queue, consumer in consumers:
            if consumer in queue.consumers:
                queue.consumers.remove(consumer)
        self._requeue(channel)
        for queue, consumer in consumers:
            self.broker.leave(queue, consumer)

    def _requeue(self, channel: _Channel) -> None:
        unacked, channel.unacked = channel.unacked, OrderedDict()
        for delivery in reversed(unacked.values()):
            self._settle(delivery, requeue=True)
        for queue in {id(d.queue): d.queue for d in unacked.values()}.values():
            self.broker.dispatch(queue)

    # -- channel -------------------------------------------------------------------------------

    def _close_channel(self, channel: _Channel, *_: Any) -> None:
        self._end_channel(channel)
        self._send(channel.number, spec.Channel.CloseOk)
        self._channels.pop(channel.number, None)

    def _channel_closed(self, channel: _Channel) -> None:
        self._channels.pop(channel.number, None)

    def _flow(self, channel: _Channel, active: bool) -> None:
        self._send(channel.number, spec.Channel.FlowOk, "b", (active,))

    def _confirm(self, channel: _Channel, nowait: bool) -> None:
        channel.confirms = True
        if not nowait:
            self._send(channel.number, spec.Confirm.SelectOk)

    def _select(self, channel: _Channel) -> None:
        channel.transaction = channel.transaction or []
        self._send(channel.number, spec.Tx.SelectOk)

    def _commit(self, channel: _Channel) -> None:
        steps, channel.transaction = channel.transaction or [], []
        for step in steps:
            step()
        self._send(channel.number, spec.Tx.CommitOk)

    def _roll_back(self, channel: _Channel) -> None:
        channel.transaction = []
        self._send(channel.number, spec.Tx.RollbackOk)

    # -- topology ------------------------------------------------------------------------------

    def _declare_exchange(
        self,
        channel: _Channel,
        _: int,
        name: str,
        kind: str,
        passive: bool,
        durable: bool,
        auto_delete: bool,
        internal: bool,
        nowait: bool,
        arguments: dict[str, Any],
    ) -> None:
        if passive:
            self.broker.check_exchange(name)
        else:
            flags = bool(durable), bool(auto_delete), bool(internal)
            self.broker.declare_exchange(name, kind, arguments, flags)
        self._answer(channel, spec.Exchange.DeclareOk, nowait)

    def _delete_exchange(
        self, channel: _Channel, _: int, name: str, if_unused: bool, nowait: bool
    ) -> None:
        self.broker.delete_exchange(name, if_unused=bool(if_unused))
        self._answer(channel, spec.Exchange.DeleteOk, nowait)

    def _bind_exchange(self, channel: _Channel, *given: Any) -> None:
        _, destination, source, key, nowait, arguments = given
        self.broker.bind(_between(source, destination, key, arguments))
        self._answer(channel, spec.Exchange.BindOk, nowait)

    def _unbind_exchange(self, channel: _Channel, *given: Any) -> None:
        _, destination, source, key, nowait, arguments = given
        self.broker.unbind(_between(source, destination, key, arguments))
        self._answer(channel, spec.Exchange.UnbindOk, nowait)

    def _declare_queue(
        self,
        channel: _Channel,
        _: int,
        name: str,
        passive: bool,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        nowait: bool,
        arguments: dict[str, Any],
    ) -> None:
        if passive:
            queue = self.broker.queue(name or channel.last_queue, self)
        else:
            flags = bool(durable), bool(exclusive), bool(auto_delete)
            queue = self.broker.declare_queue(name, arguments, flags, self)
        channel.last_queue = queue.name
        ready = 0 if queue.is_stream else len(queue.ready)
        counted = (queue.name, ready, len(queue.consumers))
        self._answer(channel, spec.Queue.DeclareOk, nowait, "sll", counted)

    def _delete_queue(self, channel: _Channel, *given: Any) -> None:
        _, name, if_unused, if_empty, nowait = given
        flags = {"if_unused": bool(if_unused), "if_empty": bool(if_empty)}
        deleted = self.broker.delete_queue(name or channel.last_queue, **flags)
        self._answer(channel, spec.Queue.DeleteOk, nowait, "l", (deleted,))

    def _bind_queue(self, channel: _Channel, *given: Any) -> None:
        _, name, source, key, nowait, arguments = given
        name = name or channel.last_queue
        self.broker.bind(Binding(source, name, key, arguments=tuple(arguments.items())))
        self._answer(channel, spec.Queue.BindOk, nowait)

    def _unbind_queue(self, channel: _Channel, *given: Any) -> None:
        _, name, source, key, arguments = given
        name = name or channel.last_queue
        self.broker.unbind(Binding(source, name, key, arguments=tuple(arguments.items())))
        self._send(channel.number, spec.Queue.UnbindOk)

    def _purge(self, channel: _Channel, _: int, name: str, nowait: bool) -> None:
        queue = self.broker.queue(name or channel.last_queue, self)
        purged = self.broker.purge(queue)
        self._answer(channel, spec.Queue.PurgeOk, nowait, "l", (purged,))

    def _answer(
        self, channel: _Channel, sig: Sig, nowait: Any, format_: str = "", values: Any = ()
    ) -> None:
        if not nowait:
            self._send(channel.number, sig, format_, values)

    # -- publish -------------------------------------------------------------------------------

    def _publish(self, channel: _Channel, *given: Any) -> None:
        _, exchange, key, mandatory, _ = given
        channel.publish, channel.content = (exchange, key, bool(mandatory)), None

    def _receive_content(self, channel: _Channel, kind: int, payload: bytes) -> None:
        if kind == _HEADER:
            channel.content = amqp.Message()
            channel.content.inbound_header(payload)
        else:
            channel.content.inbound_body(payload)
        if channel.content.ready and channel.publish is not None:
            publish, channel.publish = channel.publish, None
            step = partial(self._take, channel, *publish, channel.content)
            if channel.transaction is None:
                step()
            else:
                channel.transaction.append(step)

    def _take(
        self, channel: _Channel, exchange: str, key: str, mandatory: bool, content: Any
    ) -> None:
        properties, body = content.properties, bytes(content.body or b"")
        headers = properties.get(HEADERS) or {}
        channel.published += channel.confirms
        is_refused = channel.confirms and self.broker.is_full(exchange, key, headers)
        if (
            not is_refused
            and not self.broker.publish(exchange, key, properties, body)
            and mandatory
        ):
            message = Message(body, properties, exchange, [key])
            values = (312, "NO_ROUTE", exchange, key)
            self._send_content(channel.number, spec.Basic.Return, "Bsss", values, message)
        if channel.confirms:
            answer = spec.Basic.Nack if is_refused else spec.Basic.Ack
            self._send(channel.number, answer, "Lb", (channel.published, False))

    # -- consume -------------------------------------------------------------------------------

    def _qos(self, channel: _Channel, _: int, prefetch: int, a_global: bool) -> None:
        if a_global:
            channel.limit = prefetch
        else:
            channel.prefetch = prefetch
        self._send(channel.number, spec.Basic.QosOk)
        for queue, _consumer in channel.consumers.values():
            self.broker.dispatch(queue)

    def _consume(self, channel: _Channel, *given: Any) -> None:
        _, name, tag, _, no_ack, exclusive, nowait, arguments = given
        queue = self.broker.queue(name or channel.last_queue, self)
        tag = tag or f"amq.ctag-{next(channel.tags)}"
        consumer = Consumer(
            partial(self._deliver, channel),
            channel.has_room,
            partial(self._cancelled, channel),
            tag,
            bool(no_ack),
            bool(exclusive),
            channel.prefetch,
            priority=arguments.get("x-priority", 0),
            offset=_offset_of(queue, arguments.get("x-stream-offset")),
        )
        self.broker.consume(queue, consumer)
        channel.consumers[tag] = queue, consumer
        self._answer(channel, spec.Basic.ConsumeOk, nowait, "s", (tag,))
        self.broker.dispatch(queue)

    def _cancel(self, channel: _Channel, tag: str, nowait: bool) -> None:
        queue, consumer = channel.consumers.pop(tag, (None, None))
        if queue is not None and consumer is not None:
            self.broker.leave(queue, consumer)
        self._answer(channel, spec.Basic.CancelOk, nowait, "s", (tag,))

    def _cancelled(self, channel: _Channel, consumer: Consumer) -> None:
        channel.consumers.pop(consumer.tag, None)
        self._send(channel.number, spec.Basic.Cancel, "sb", (consumer.tag, True))

    def _deliver(
        self, channel: _Channel, consumer: Consumer, queue: Queue, message: Message
    ) -> None:
        tag = next(channel.tags)
        if consumer.no_ack:
            self.broker.settle(queue, message, requeue=False)
        else:
            consumer.unacked += 1
            channel.unacked[tag] = _Delivery(queue, message, consumer)
        values = (consumer.tag, tag, message.redelivered, message.exchange, message.keys[0])
        self._send_content(channel.number, spec.Basic.Deliver, "sLbss", values, message)

    def _get(self, channel: _Channel, _: int, name: str, no_ack: bool) -> None:
        queue = self.broker.queue(name or channel.last_queue, self)
        if queue.is_stream:
            text = f"NOT_IMPLEMENTED - basic.get not supported by stream queue '{name}'"
            raise BrokerError(540, text)
        if not queue.ready:
            self._send(channel.number, spec.Basic.GetEmpty, "s", ("",))
            return
        message = self.broker.take(queue)
        tag = next(channel.tags)
        if no_ack:
            self.broker.settle(queue, message, requeue=False)
        else:
            channel.unacked[tag] = _Delivery(queue, message, None)
        values = (tag, message.redelivered, message.exchange, message.keys[0], len(queue.ready))
        self._send_content(channel.number, spec.Basic.GetOk, "Lbssl", values, message)

    def _ack(self, channel: _Channel, tag: int, multiple: bool) -> None:
        self._settle_tags(channel, tag, multiple)

    def _reject(self, channel: _Channel, tag: int, requeue: bool) -> None:
        self._settle_tags(channel, tag, None, requeue=bool(requeue), dead=not requeue)

    def _nack(self, channel: _Channel, tag: int, multiple: bool, requeue: bool) -> None:
        self._settle_tags(channel, tag, multiple, requeue=bool(requeue), dead=not requeue)

    def _settle_tags(
        self,
        channel: _Channel,
        tag: int,
        multiple: Any,
        *,
        requeue: bool = False,
        dead: bool = False,
    ) -> None:
        unacked = channel.unacked
        tags = [t for t in unacked if t <= tag or tag == 0] if multiple else [tag]
        if not multiple and tag not in unacked:
            raise BrokerError(406, f"PRECONDITION_FAILED - unknown delivery tag {tag}")
        step = partial(self._settle_all, [unacked.pop(t) for t in tags], requeue, dead)
        if channel.transaction is None:
            step()
        else:
            channel.transaction.append(step)

    def _settle_all(self, deliveries: list[_Delivery], requeue: bool, dead: bool) -> None:
        # The last first: each goes to the head of its queue.
        for delivery in reversed(deliveries):
            self._settle(delivery, requeue=requeue, dead=dead)
        for queue in {id(d.queue): d.queue for d in deliveries}.values():
            self.broker.dispatch(queue)

    def _settle(self, delivery: _Delivery, *, requeue: bool, dead: bool = False) -> None:
        if delivery.consumer is not None:
            delivery.consumer.unacked -= 1
        self.broker.settle(delivery.queue, delivery.message, requeue=requeue, dead=dead)

    def _recover(self, channel: _Channel, _: bool) -> None:
        self._requeue(channel)
        self._send(channel.number, spec.Basic.RecoverOk)


@lru_cache(maxsize=1024)
def _arguments(format_: str, buf: bytes) -> tuple[Any, ...]:
    # Clients say the same again and again. Nobody may change a table in it.
    return tuple(loads(format_, buf, 4)[0]) if format_ else ()


def _between(source: str, destination: str, key: str, arguments: dict[str, Any]) -> Binding:
    return Binding(source, destination, key, to_queue=False, arguments=tuple(arguments.items()))


def _offset_of(queue: Queue, begin: Any) -> int:
    """Return where a consumer of a stream begins."""
    if not queue.is_stream:
        return 0
    if isinstance(begin, int):
        return min(begin, len(queue.ready))
    if begin == "last":
        return max(len(queue.ready) - 1, 0)
    return 0 if begin == "first" else len(queue.ready)


#: The format of the arguments of each method, and what handles it.
_METHODS: dict[Sig, tuple[str, Callable[..., None]]] = {
    spec.Channel.Flow: ("b", Session._flow),
    spec.Channel.Close: ("BsBB", Session._close_channel),
    spec.Channel.CloseOk: ("", Session._channel_closed),
    spec.Exchange.Declare: ("BssbbbbbF", Session._declare_exchange),
    spec.Exchange.Delete: ("Bsbb", Session._delete_exchange),
    spec.Exchange.Bind: ("BsssbF", Session._bind_exchange),
    spec.Exchange.Unbind: ("BsssbF", Session._unbind_exchange),
    spec.Queue.Declare: ("BsbbbbbF", Session._declare_queue),
    spec.Queue.Delete: ("Bsbbb", Session._delete_queue),
    spec.Queue.Bind: ("BsssbF", Session._bind_queue),
    spec.Queue.Unbind: ("BsssF", Session._unbind_queue),
    spec.Queue.Purge: ("Bsb", Session._purge),
    spec.Basic.Qos: ("lBb", Session._qos),
    spec.Basic.Consume: ("BssbbbbF", Session._consume),
    spec.Basic.Cancel: ("sb", Session._cancel),
    spec.Basic.Publish: ("Bssbb", Session._publish),
    spec.Basic.Get: ("Bsb", Session._get),
    spec.Basic.Ack: ("Lb", Session._ack),
    spec.Basic.Reject: ("Lb", Session._reject),
    spec.Basic.Nack: ("Lbb", Session._nack),
    spec.Basic.Recover: ("b", Session._recover),
    spec.Confirm.Select: ("b", Session._confirm),
    spec.Tx.Select: ("", Session._select),
    spec.Tx.Commit: ("", Session._commit),
    spec.Tx.Rollback: ("", Session._roll_back),
}
