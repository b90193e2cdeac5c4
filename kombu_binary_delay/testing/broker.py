"""A RabbitMQ in memory, whose clock is given: exchanges, queues, streams and messages. Pure.

It routes, lets expire, dead-letters, delivers and confirms as RabbitMQ 4.3 does. What a client asks
for comes by :mod:`.server`. Time passes only in :meth:`Broker.run_until`.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from heapq import heappop, heappush
from itertools import count
from typing import Any

from kombu_binary_delay.ladder.envelope import further_keys
from kombu_binary_delay.ladder.parts import Binding, Exchange
from kombu_binary_delay.ladder.simulate import route_message

#: What a RabbitMQ says of itself when a client connects.
SERVER_PROPERTIES: dict[str, Any] = {
    "product": "RabbitMQ",
    "version": "4.3.0",
    "capabilities": {
        "basic.nack": True,
        "connection.blocked": True,
        "consumer_cancel_notify": True,
        "exchange_exchange_bindings": True,
        "per_consumer_qos": True,
        "publisher_confirms": True,
    },
}
BUILT_IN = {
    "": "direct",
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.topic": "topic",
}
#: How often a quorum queue gives a message back before it drops it, since RabbitMQ 4.0.
_DELIVERY_LIMIT = 20
HEADERS = "application_headers"


class BrokerError(Exception):
    """An AMQP error that closes the channel, or the connection.

    :param code: the reply code.
    :param text: the reply text, as RabbitMQ words it.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.text = text


@dataclass(eq=False)
class Message:
    """A message in a queue.

    :param keys: the routing key, and those of ``CC`` and ``BCC``.
    :param expires: when it leaves its queue, in microseconds since the epoch; None for never.
    """

    body: bytes
    properties: dict[str, Any]
    exchange: str
    keys: list[str]
    expires: int | None = None
    redelivered: bool = False
    returns: int = 0

    @property
    def headers(self) -> dict[str, Any]:
        """The headers; empty if it has none."""
        return self.properties.get(HEADERS) or {}

    def copy(self) -> Message:
        """Return a message with the same content."""
        return replace(self)

    @property
    def priority(self) -> int:
        """The priority; 0 by default."""
        return self.properties.get("priority") or 0


@dataclass(eq=False)
class Consumer:
    """Takes the messages of a queue.

    :param deliver: called with each message.
    :param has_room: whether the consumer's prefetch limit has room for another message.
    :param cancel: called when the queue is deleted.
    """

    deliver: Callable[[Consumer, Queue, Message], None]
    has_room: Callable[[Consumer], bool]
    cancel: Callable[[Consumer], None]
    tag: str = ""
    no_ack: bool = False
    exclusive: bool = False
    prefetch: int = 0
    unacked: int = 0
    priority: int = 0
    #: Of a stream: the offset of the next record.
    offset: int = 0


@dataclass(eq=False)
class Queue:
    """A queue, or a stream, with what is ready in it."""

    name: str
    arguments: dict[str, Any]
    durable: bool = True
    auto_delete: bool = False
    owner: object = None
    ready: deque[Message] = field(default_factory=deque)
    consumers: list[Consumer] = field(default_factory=list)
    unacked: int = 0
    #: When a queue with ``x-expires`` is deleted, in microseconds since the epoch.
    ends: int | None = None
    #: Its place in the order of declaration.
    number: int = 0

    @property
    def next_event(self) -> int | None:
        """When something happens in it by itself next, in microseconds since the epoch."""
        # RabbitMQ lets expire only what is at the head.
        event = self.ready[0].expires if self.ready else None
        if self.ends is None or self.consumers:
            return event
        return self.ends if event is None else min(event, self.ends)

    @property
    def is_stream(self) -> bool:
        """Whether its messages stay after they are delivered."""
        return self.arguments.get("x-queue-type") == "stream"

    @property
    def is_quorum(self) -> bool:
        """Whether it counts how often a message was given back."""
        return self.arguments.get("x-queue-type") == "quorum"

    def insert(self, message: Message) -> None:
        """Put a message behind those of its priority."""
        prioritised = self.is_quorum or "x-max-priority" in self.arguments
        if not prioritised or not message.priority:
            self.ready.append(message)
            return
        at = next((i for i, m in enumerate(self.ready) if m.priority < message.priority), None)
        self.ready.insert(len(self.ready) if at is None else at, message)


class Broker:
    """One virtual host, at a time that is given to it.

    :param now: the time in microseconds since the epoch.
    """

    #: Of exchanges.
    types: tuple[str, ...] = ("direct", "fanout", "headers", "topic")

    def __init__(self, now: int) -> None:
        self.now = now
        # What a process remembers of a broker, it remembers by the cluster's name.
        self.properties = {**SERVER_PROPERTIES, "cluster_name": f"testing-{uuid.uuid4()}"}
        self.exchanges = {name: Exchange(name, kind) for name, kind in BUILT_IN.items()}
        self.queues: dict[str, Queue] = {}
        #: By their source.
        self.bindings: dict[str, dict[Binding, None]] = {}
        #: Called with each message that enters a queue.
        self.on_enqueue: list[Callable[[Queue, Message], object]] = []
        self._declared: dict[str, tuple[Any, ...]] = {}
        self._names, self._numbers = count(1), count()
        #: At which times something may happen by itself, and in which queue, as a heap: each event
        #: has an entry, and an entry may have no event any more.
        self._events: list[tuple[int, int, Queue]] = []
        #: The queues that were reached, by the exchange and the keys, unless headers count, too.
        self._routes: dict[tuple[str, ...], list[Queue]] = {}
        self._by_headers = False

    def inherit(self, other: Broker, names: Iterable[str]) -> None:
        """Take from another broker exchanges and queues, without messages, and their bindings.

        An exchange that one of them leads to comes too, but alone.

        :param names: of the exchanges and queues.
        """
        whole = set(names)
        behind = {b.destination for n in whole for b in other.bindings.get(n, ()) if not b.to_queue}
        for name in [name for name in other.exchanges if name in whole or name in behind]:
            self.exchanges[name] = other.exchanges[name]
            self._declared[name] = other._declared[name]
            if name in whole:
                # To copy all is faster than to hash some.
                self.bindings[name] = bindings = other.bindings.get(name, {}).copy()
                for binding in [b for b in bindings if b.to_queue and b.destination not in whole]:
                    del bindings[binding]
        for name in [name for name in other.queues if name in whole]:
            self._add_queue(Queue(name, other.queues[name].arguments))

    # -- topology ------------------------------------------------------------------------------

    def declare_exchange(
        self, name: str, kind: str, arguments: dict[str, Any], flags: tuple[bool, bool, bool]
    ) -> None:
        """Declare an exchange.

        :param flags: durable, auto-delete and internal.
        """
        if kind not in self.types:
            raise BrokerError(503, f"COMMAND_INVALID - unknown exchange type '{kind}'")
        before = self.exchanges.get(name)
        if before is None:
            if name.startswith("amq."):
                raise BrokerError(403, f"ACCESS_REFUSED - exchange name '{name}' is reserved")
            self.exchanges[name] = Exchange(name, kind, tuple(arguments.items()))
            self._declared[name] = flags
            self._routes.clear()
            return
        declared = self._declared.get(name, flags)
        wanted: list[tuple[str, Any, Any]] = [("type", kind, before.type)]
        wanted += zip(("durable", "auto_delete", "internal"), flags, declared, strict=True)
        wanted += _compared(arguments, dict(before.arguments), ["alternate-exchange"])
        self._check_equivalent("exchange", name, wanted)

    def check_exchange(self, name: str) -> None:
        """Check that an exchange exists.

        :raises BrokerError: if it does not.
        """
        if name not in self.exchanges:
            raise BrokerError(404, f"NOT_FOUND - no exchange '{name}' in vhost '/'")

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Delete an exchange, and all bindings from and to it."""
        if name in BUILT_IN:
            raise BrokerError(403, f"ACCESS_REFUSED - exchange name '{name}' is reserved")
        if if_unused and self.bindings.get(name):
            raise BrokerError(406, f"PRECONDITION_FAILED - exchange '{name}' in vhost '/' in use")
        self.exchanges.pop(name, None)
        self._declared.pop(name, None)
        self.bindings.pop(name, None)
        self._remove_bindings(lambda b: b.destination == name and not b.to_queue)
        self._routes.clear()

    def declare_queue(
        self,
        name: str,
        arguments: dict[str, Any],
        flags: tuple[bool, bool, bool] = (True, False, False),
        owner: object = None,
    ) -> Queue:
        """Declare a queue; without a name, it gets one.

        :param flags: durable, exclusive and auto-delete.
        :param owner: the connection, which an exclusive queue belongs to.
        """
        durable, exclusive, auto_delete = flags
        before = self.queues.get(name) if name else None
        if before is not None:
            self._check_owner(before, owner)
            wanted: list[tuple[str, Any, Any]] = [
                ("durable", durable, before.durable),
                ("exclusive", exclusive, before.owner is not None),
                ("auto_delete", auto_delete, before.auto_delete),
            ]
            names = sorted(n for n in {*arguments, *before.arguments} if n.startswith("x-"))
            wanted += _compared(arguments, before.arguments, names)
            self._check_equivalent("queue", name, wanted)
            self._use(before)
            return before
        name = name or f"amq.gen-{next(self._names):022}"
        queue = Queue(name, dict(arguments), durable, auto_delete, owner if exclusive else None)
        self._add_queue(queue)
        self._routes.clear()
        self._use(queue)
        return queue

    def _add_queue(self, queue: Queue) -> None:
        queue.number = next(self._numbers)
        self.queues[queue.name] = queue

    def queue(self, name: str, owner: object = None) -> Queue:
        """Return a queue.

        :raises BrokerError: if there is none, or it is exclusive to another connection.
        """
        queue = self.queues.get(name)
        if queue is None:
            raise BrokerError(404, f"NOT_FOUND - no queue '{name}' in vhost '/'")
        self._check_owner(queue, owner)
        return queue

    def _check_owner(self, queue: Queue, owner: object) -> None:
        if queue.owner is not None and owner is not None and queue.owner is not owner:
            raise BrokerError(
                405,
                f"RESOURCE_LOCKED - cannot obtain exclusive access to locked queue "
                f"'{queue.name}' in vhost '/'",
            )

    def _check_equivalent(
        self, kind: str, name: str, wanted: Iterable[tuple[str, Any, Any]]
    ) -> None:
        for argument, received, current in wanted:
            if received != current:
                raise BrokerError(
                    406,
                    f"PRECONDITION_FAILED - inequivalent arg '{argument}' for {kind} '{name}' in "
                    f"vhost '/': received {_said(received)} but current is {_said(current)}",
                )

    def delete_queue(self, name: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """Delete a queue, and all bindings to it; return the number of messages in it."""
        queue = self.queues.get(name)
        if queue is None:
            return 0
        if if_unused and queue.consumers:
            raise BrokerError(406, f"PRECONDITION_FAILED - queue '{name}' in vhost '/' in use")
        if if_empty and (queue.ready or queue.unacked):
            raise BrokerError(406, f"PRECONDITION_FAILED - queue '{name}' in vhost '/' not empty")
        del self.queues[name]
        self._remove_bindings(lambda b: b.destination == name and b.to_queue)
        self._routes.clear()
        for consumer in queue.consumers:
            consumer.cancel(consumer)
        return len(queue.ready)

    def purge(self, queue: Queue) -> int:
        """Remove what is ready in a queue; return how many messages that were."""
        purged = len(queue.ready)
        queue.ready.clear()
        return purged

    def bind(self, binding: Binding) -> None:
        """Bind a queue or an exchange to an exchange."""
        self.check_exchange(binding.source)
        if binding.to_queue:
            self.queue(binding.destination)
        else:
            self.check_exchange(binding.destination)
        self.bindings.setdefault(binding.source, {})[binding] = None
        self._by_headers = self._by_headers or self.exchanges[binding.source].type == "headers"
        self._routes.clear()

    def unbind(self, binding: Binding) -> None:
        """Remove a binding, if it exists."""
        self.bindings.get(binding.source, {}).pop(binding, None)
        self._routes.clear()

    def _remove_bindings(self, is_gone: Callable[[Binding], bool]) -> None:
        for bindings in self.bindings.values():
            for binding in [b for b in bindings if is_gone(b)]:
                del bindings[binding]

    # -- publish -------------------------------------------------------------------------------

    def publish(self, exchange: str, key: str, properties: dict[str, Any], body: bytes) -> bool:
        """Publish a message.

        :returns: whether a queue has taken it. None, if one has refused it.
        :raises BrokerError: if there is no such exchange.
        """
        self.check_exchange(exchange)
        if self._declared.get(exchange, ())[2:] == (True,):
            text = f"ACCESS_REFUSED - cannot publish to internal exchange '{exchange}'"
            raise BrokerError(403, f"{text} in vhost '/'")
        headers = properties.get(HEADERS) or {}
        keys = [key, *further_keys(headers)]
        if "BCC" in headers:
            kept = {name: value for name, value in headers.items() if name != "BCC"}
            properties = {**properties, HEADERS: kept}
        return self._route(Message(body, properties, exchange, keys))

    def is_full(self, exchange: str, key: str, headers: dict[str, Any]) -> bool:
        """Return whether a queue that a message would go to refuses it."""
        return any(
            queue.arguments.get("x-overflow") == "reject-publish"
            and len(queue.ready) >= queue.arguments.get("x-max-length", float("inf"))
            for queue in self._reached(exchange, [key, *further_keys(headers)], headers)
        )

    def _reached(self, exchange: str, keys: list[str], headers: dict[str, Any]) -> list[Queue]:
        if not exchange:
            return [self.queues[key] for key in dict.fromkeys(keys) if key in self.queues]
        route = exchange, *keys
        if not self._by_headers and route in self._routes:
            return self._routes[route]
        names = route_message(self.exchanges, self.bindings, exchange, keys, headers)
        reached = [self.queues[name] for name in sorted(names) if name in self.queues]
        self._routes[route] = reached
        return reached

    def _route(self, message: Message) -> bool:
        queues = self._reached(message.exchange, message.keys, message.headers)
        for number, queue in enumerate(queues, 1):
            # The last one needs no copy.
            self._enqueue(queue, message if number == len(queues) else replace(message))
        return bool(queues)

    def _enqueue(self, queue: Queue, message: Message) -> None:
        now = self.now
        waits = [queue.arguments.get("x-message-ttl"), message.properties.get("expiration")]
        # As soon as RabbitMQ may: a quorum queue cuts off times to whole milliseconds.
        early = 1 if queue.is_quorum else 0
        ends = [now + max(int(wait) - early, 0) * 1000 for wait in waits if wait is not None]
        message.expires = min(ends, default=None)
        if queue.is_stream:
            message.expires = None
            queue.ready.append(message)
        else:
            queue.insert(message)
        longest = queue.arguments.get("x-max-length")
        if longest is not None and len(queue.ready) > longest and not queue.is_stream:
            self._die(queue, queue.ready.popleft(), "maxlen")
        self._note_event(queue)
        for listener in self.on_enqueue:
            listener(queue, message)
        self.dispatch(queue)

    # -- time ----------------------------------------------------------------------------------

    def next_event(self) -> int | None:
        """Return when something happens by itself next, in microseconds since the epoch."""
        events = self._events
        while events:
            at, _, queue = events[0]
            if queue.next_event == at and self.queues.get(queue.name) is queue:
                return at
            heappop(events)
        return None

    def _note_event(self, queue: Queue) -> None:
        """Note when something happens in a queue next: another message is at its head."""
        event = queue.next_event
        if event is not None:
            heappush(self._events, (event, queue.number, queue))

    def run_until(self, moment: int) -> None:
        """Advance to a moment, in microseconds since the epoch, with all that happens meanwhile."""
        while (event := self.next_event()) is not None and event <= moment:
            queue = heappop(self._events)[2]
            self.now = max(event, self.now)
            self._expire(queue)
        self.now = max(moment, self.now)

    def _expire(self, queue: Queue) -> None:
        """Expire what is due in a queue, and the queue itself if it has ended."""
        now = self.now
        while queue.ready and (at := queue.ready[0].expires) is not None and at <= now:
            self._die(queue, queue.ready.popleft(), "expired")
        if queue.ends is not None and not queue.consumers and queue.ends <= now:
            self.delete_queue(queue.name)
        else:
            self._note_event(queue)

    def _use(self, queue: Queue) -> None:
        lasts = queue.arguments.get("x-expires")
        if lasts is not None:
            queue.ends = self.now + int(lasts) * 1000
            self._note_event(queue)

    def _die(self, queue: Queue, message: Message, reason: str) -> None:
        """Dead-letter a message, or drop it."""
        onward = queue.arguments.get("x-dead-letter-exchange")
        if onward is None or onward not in self.exchanges:
            return
        key = queue.arguments.get("x-dead-letter-routing-key")
        dead = replace(message, exchange=onward, redelivered=False, returns=0)
        dead.properties = _with_death(queue.name, message, reason, self.now)
        if key is not None:
            dead.keys = [key]
            dead.properties[HEADERS].pop("CC", None)
        self._route(dead)

    # -- deliver -------------------------------------------------------------------------------

    def consume(self, queue: Queue, consumer: Consumer) -> None:
        """Add a consumer.

        :raises BrokerError: if it or another one is exclusive.
        """
        if queue.consumers and (consumer.exclusive or queue.consumers[0].exclusive):
            text = f"ACCESS_REFUSED - queue '{queue.name}' in vhost '/' in exclusive use"
            raise BrokerError(403, text)
        queue.consumers.append(consumer)
        queue.consumers.sort(key=lambda c: -c.priority)
        self._note_event(queue)

    def leave(self, queue: Queue, consumer: Consumer) -> None:
        """Remove a consumer; with the last one, an auto-delete queue goes."""
        if consumer in queue.consumers:
            queue.consumers.remove(consumer)
        self._use(queue)
        if queue.auto_delete and not queue.consumers:
            self.delete_queue(queue.name)
        else:
            self.dispatch(queue)

    def dispatch(self, queue: Queue) -> None:
        """Deliver what is ready to the consumers that have room."""
        if queue.is_stream:
            for consumer in queue.consumers:
                while consumer.offset < len(queue.ready) and consumer.has_room(consumer):
                    record = _at_offset(queue.ready[consumer.offset], consumer.offset)
                    consumer.offset += 1
                    consumer.deliver(consumer, queue, record)
            return
        while queue.ready:
            active = queue.consumers
            if queue.arguments.get("x-single-active-consumer"):
                active = active[:1]
            free = next((c for c in active if c.has_room(c)), None)
            if free is None:
                return
            if len(active) < len(queue.consumers):
                free.deliver(free, queue, self.take(queue))
                continue
            # The next message is the next consumer's, among those of one priority.
            queue.consumers.remove(free)
            at = [i for i, c in enumerate(queue.consumers) if c.priority < free.priority]
            queue.consumers.insert(at[0] if at else len(queue.consumers), free)
            free.deliver(free, queue, self.take(queue))

    def take(self, queue: Queue) -> Message:
        """Take the first message out of a queue."""
        message = queue.ready.popleft()
        self._note_event(queue)
        queue.unacked += 1
        if queue.is_quorum and message.returns:
            headers = {**message.headers, "x-delivery-count": message.returns}
            message.properties = {**message.properties, HEADERS: headers}
        return message

    def settle(self, queue: Queue, message: Message, *, requeue: bool, dead: bool = False) -> None:
        """Take back what was delivered.

        :param requeue: put it back to the head of its queue.
        :param dead: dead-letter it, as it was rejected.
        """
        if queue.is_stream:
            return
        queue.unacked -= 1
        if requeue and queue.name in self.queues:
            message.redelivered = True
            message.returns += 1
            limit = queue.arguments.get("x-delivery-limit", _DELIVERY_LIMIT)
            if queue.is_quorum and 0 <= limit < message.returns:
                self._die(queue, message, "delivery_limit")
            else:
                queue.ready.appendleft(message)
                self._note_event(queue)
        elif dead:
            self._die(queue, message, "rejected")

    def close(self, owner: object) -> None:
        """Delete the exclusive queues of a connection that ends."""
        for queue in [q for q in self.queues.values() if q.owner is owner]:
            self.delete_queue(queue.name)


def _compared(
    received: dict[str, Any], current: dict[str, Any], names: Iterable[str]
) -> list[tuple[str, Any, Any]]:
    return [(name, received.get(name), current.get(name)) for name in names]


def _said(value: Any) -> str:
    if value is None:
        return "none"
    return f"'{str(value).lower() if isinstance(value, bool) else value}'"


def _at_offset(message: Message, offset: int) -> Message:
    headers = {**message.headers, "x-stream-offset": offset}
    return replace(message, properties={**message.properties, HEADERS: headers})


def _with_death(queue: str, message: Message, reason: str, now: int) -> dict[str, Any]:
    """Return the properties of a dead letter, as RabbitMQ writes them."""
    properties = dict(message.properties)
    expiration = properties.pop("expiration", None)
    headers = dict(message.headers)
    deaths: list[dict[str, Any]] = list(headers.get("x-death") or [])
    same = [d for d in deaths if (d.get("queue"), d.get("reason")) == (queue, reason)]
    death: dict[str, Any] = {
        "count": 1,
        "reason": reason,
        "queue": queue,
        "time": datetime.fromtimestamp(now // 1_000_000, UTC).replace(tzinfo=None),
        "exchange": message.exchange,
        "routing-keys": message.keys,
    }
    if expiration is not None:
        death["original-expiration"] = expiration
    if same:
        death = {**same[0], "count": same[0]["count"] + 1}
    headers["x-death"] = [death, *(d for d in deaths if d not in same)]
    where = {"queue": queue, "reason": reason, "exchange": message.exchange}
    for name, value in where.items():
        headers.setdefault(f"x-first-death-{name}", value)
        headers[f"x-last-death-{name}"] = value
    properties[HEADERS] = headers
    return properties
