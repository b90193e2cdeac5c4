"""The only file that turns topology into channel calls.

A :class:`Declarer` remembers what one connection has declared and does the rest on a channel of
its own, so that a refusal never closes the user's channel. It must not import the transport.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from uuid import uuid4

from amqp.exceptions import (
    NotFound,
    PreconditionFailed,
    ResourceLocked,
)
from kombu.log import get_logger

from .address import Destination
from .channel import OwnChannel
from .errors import AddressError, TopologyError
from .settings import Settings
from .topology import IMITABLE, Binding, Part

logger = get_logger(__name__)

#: The types of the exchanges that every RabbitMQ has.
BUILT_IN = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.topic": "topic",
}
#: Quorum queues have a message TTL, and dead-letter at least once, since RabbitMQ 3.10.
QUORUM_SINCE = (3, 10)

#: The most queues for one delay each that a connection makes, and the delays that it counts.
MAX_OWN_QUEUES = 64
MAX_DELAYS = 1024

_warned: set[str] = set()


class _Bound(NamedTuple):
    """A binding that somebody made from an exchange to a queue or another exchange."""

    exchange: str
    destination: str
    key: str
    to_queue: bool


class Declarer:
    """What one connection has declared of the topology, and the means to declare the rest.

    The ladder side is declared for the first delayed publish that needs it. The delivery side
    repeats the bindings made on this connection once it delays or consumes; from then on, each as
    it is made.

    :raises SettingsError: for settings that cannot be.
    """

    def __init__(self, connection: Any, settings: Settings) -> None:
        self.own = OwnChannel(connection, settings.namespace)
        self._declares = settings.declare != "never"
        self._queue_per_delay = settings.queue_per_delay
        self._patterns = settings.outlets
        self.topology = settings.topology(can_quorum=_can_quorum(connection, settings))
        self._types: dict[str, str] = dict(BUILT_IN)
        self._bound: dict[_Bound, None] = {}
        self._queues: dict[str, None] = {}
        #: Whether a queue needs an outlet, where that is known.
        self._refuses: dict[str, bool] = {}
        self.forget()
        #: Whether a level that stands may be taken to stand on all that is below it.
        self._trusts = True

    def forget(self) -> None:
        """Forget what stands on the broker: it has told us that something is gone."""
        self._trusts = False
        self._height = -1
        self._base = False
        self._delays: dict[tuple[int, ...], bool] = {}
        self._made: set[object] = set()
        self._active = False

    def is_ours(self, reply_text: str) -> bool:
        """Whether the broker's words are about something that this declarer declares."""
        return self.topology.prefix in reply_text or self.topology.delivery in reply_text

    # -- for a delayed publish -----------------------------------------------------------------

    def entry(self, digits: tuple[int, ...]) -> str:
        """Name the exchange to publish a message to."""
        return self.topology.own if self._queue_per_delay else self.topology.entry(digits)

    def prepare(self, digits: tuple[int, ...], exchange: str, keys: list[str]) -> bool:
        """Let all stand that a message needs on its way to a destination.

        :param digits: its delay.
        :param keys: its routing keys, queues' names where the exchange is the default one.
        :returns: whether anything had to be declared, which takes time.
        :raises TopologyError: where the broker refuses, or the exchange is of a type that no
            delayed message can reach.
        """
        if self._types.get(exchange, "topic") not in (*IMITABLE, "headers"):
            raise TopologyError(
                f"the exchange {exchange!r} is of the type {self._types[exchange]!r}, which reads "
                f"routing keys in its own way, while a delayed message arrives with another; delay "
                f"to a direct, topic, fanout or headers exchange instead"
            )
        if not self._declares:
            return False
        talks = self.own.talks
        if not self._active:
            self.activate()
        if not exchange:
            for queue in keys:
                if ("", queue) not in self._made:
                    self._lead_to(queue)
        elif self._types.get(exchange) == "headers":
            self._stand_behind(exchange)
        # After the delivery side, which finds out whether a part of the whole is gone.
        height = self.topology.needs(digits)
        if height > self._height:
            self._raise_to(height)
        if self._queue_per_delay and not self._delays.get(digits):
            self._serve(digits)
        return self.own.talks > talks

    def address(self, digits: tuple[int, ...], destination: Destination) -> str:
        """Write the routing key with which a message enters the ladder.

        :raises AddressError: where the destination cannot be written.
        """
        exchange = destination.exchange
        if exchange:
            # To be safe, one whose type is not known is taken for one that reads wildcards.
            topic = self._types.get(exchange, "topic") == "topic"
            return self.topology.address(digits, destination, topic=topic)
        outlet = self._has_outlet(destination.routing_key)
        return self.topology.address(digits, destination, outlet=outlet)

    # -- for a connection that binds, consumes or unbinds --------------------------------------

    def activate(self) -> None:
        """Repeat the bindings made so far on the delivery side.

        :raises TopologyError: where the broker refuses the delivery side itself.
        """
        if not self._declares or self._active:
            return
        if self._bound or self._queues:
            self._lay_base()
        self._active = True
        for queue in list(self._queues):
            self._quietly(self._lead_to, queue)
        for bound in list(self._bound):
            self._quietly(self._mirror, bound)

    def activate_or_warn(self) -> None:
        """Do as :meth:`activate`, for a caller whose own work does not depend on it."""
        try:
            self.activate()
        except TopologyError as exc:
            # Once is enough: what is consumed next would only be refused the same again.
            self._active = True
            logger.warning("delayed messages may not reach the queues bound here: %s", exc)

    def declared_exchange(self, exchange: str, exchange_type: str) -> None:
        """Take note of an exchange's type."""
        if exchange:
            self._types[exchange] = exchange_type

    def declared_queue(self, queue: str, *, refuses: bool | None) -> None:
        """Take note of a queue that lives on, and so can be addressed by its name.

        :param refuses: whether it refuses messages while it is full; None where that is not known.
        """
        if not self._is_private(queue):
            if refuses is not None:
                self._refuses[queue] = refuses
            if refuses and self.topology.queue_type == "classic":
                _warn_once(
                    f"the queue {queue!r} rejects messages while it is full: delayed ones that "
                    f"come from classic queues are lost then; quorum queues keep them"
                )
            self._queues[queue] = None
            self._made.discard(("", queue))
            if self._active:
                self._quietly(self._lead_to, queue)

    def bound(self, exchange: str, destination: str, key: str, *, to_queue: bool) -> None:
        """Take note of a binding, and repeat it if this connection delays or consumes."""
        if self._mirrors(exchange, destination):
            bound = _Bound(exchange, destination, key, to_queue)
            self._bound[bound] = None
            # Whoever binds again may know that what we made has gone meanwhile.
            self._made -= {bound, exchange, destination}
            if self._active:
                self._quietly(self._mirror, bound)

    def unbound(self, exchange: str, destination: str, key: str, *, to_queue: bool) -> None:
        """Undo what :meth:`bound` did, here or in another process."""
        if not self._mirrors(exchange, destination):
            return
        bound = _Bound(exchange, destination, key, to_queue)
        self._bound.pop(bound, None)
        self._made.discard(bound)
        if self._declares:
            self._quietly(self._unmirror, bound)

    def deleted_queue(self, queue: str) -> None:
        """Forget a queue; the broker has removed its bindings, ours among them."""
        self._queues.pop(queue, None)
        self._refuses.pop(queue, None)
        self._made.discard(("", queue))
        self._forget_bound(lambda bound: bound.to_queue and bound.destination == queue)

    def deleted_exchange(self, exchange: str) -> None:
        """Remove the shadow of an exchange that is gone."""
        self._types.pop(exchange, None)
        if not self._mirrors(exchange):
            return
        self._made.discard(exchange)
        self._forget_bound(
            lambda bound: (
                exchange in (bound.exchange, None if bound.to_queue else bound.destination)
            )
        )
        if self._declares:
            self._quietly(self._remove_shadow, exchange)

    # -- channel calls -------------------------------------------------------------------------

    def _raise_to(self, height: int) -> None:
        """Declare the levels up to ``height``, lowest first.

        A level's exchange is declared after all that is below it, so where the highest one takes
        its own bindings again, all of the rest stands: one round trip for a new connection. Unless
        somebody has deleted a part of it: then, each level is declared again.
        """
        levels = self.topology.levels
        if not self._trusts:
            self._mend(height)
        with self.own.lend(f"the levels up to {height}") as channel:
            try:
                # The lowest one, too: the delivery exchange alone may have been made anew.
                _bind(channel, levels[0].bindings + levels[height].bindings)
            except NotFound:
                self._base = False
                self._lay_base()
                for level in levels[: height + 1]:
                    _declare(channel, level)
                _bind(channel, levels[height].bindings)
            if self._queue_per_delay:
                _declare(channel, self.topology.own_base)
                new = range(self._height + 1, height + 1)
                _bind(channel, sum((self.topology.own_enter(level) for level in new), ()))
        self._height = height

    def _mend(self, height: int) -> None:
        """Declare all levels up to ``height``, and bind those that stand above it, again."""
        levels = self.topology.levels
        self._base = False
        self._lay_base()
        with self.own.lend(f"the levels up to {height}") as channel:
            for level in levels[: height + 1]:
                _declare(channel, level)
            # Levels above lost their way into what was gone. The first that is not there ends it.
            with suppress(NotFound):
                for level in levels[height:]:
                    _bind(channel, level.bindings)
        self._trusts = True

    def _serve(self, digits: tuple[int, ...]) -> None:
        """Give a delay a queue of its own, from its second use on, and to the first few only.

        An application whose delays hardly ever repeat would litter the broker with queues.
        """
        if digits not in self._delays:
            if len(self._delays) == MAX_DELAYS:
                self._delays = {each: True for each, served in self._delays.items() if served}
            self._delays[digits] = False
        elif sum(self._delays.values()) < MAX_OWN_QUEUES:
            # Held by whoever makes such a queue or prunes one: so none is pruned while it is made.
            lock = f"{self.topology.own}.lock"
            with self.own.lend("a queue for one delay") as channel, suppress(ResourceLocked):
                channel.queue_declare(lock, exclusive=True, auto_delete=True)
                part = self.topology.own_queue(digits)
                _declare(channel, part)
                _bind(channel, part.bindings)
                channel.queue_delete(lock)
                self._delays[digits] = True

    def _lay_base(self) -> None:
        if self._base:
            return
        with self.own.lend("the delivery exchange and the parking queue") as channel:
            _declare(channel, self.topology.base)
            # One answer for all that was sent without waiting.
            channel.exchange_declare(self.topology.delivery, "topic", passive=True)
        self._base = True

    def _lead_to(self, queue: str) -> None:
        """Bind a queue that is addressed through the default exchange."""
        self._lay_base()
        self._ask_for_outlet(queue)
        with self.own.lend(
            f"the way to the queue {queue!r}", f"write on the queue {queue!r}"
        ) as channel:
            try:
                if self._has_outlet(queue):
                    self._let_into(channel, queue)
                else:
                    way = self.topology.to_queue(queue)
                    self._bind_again(channel, way.bindings, self._lay_base)
            except NotFound:
                self._queues.pop(queue, None)
                if not self.topology.parking:
                    raise TopologyError(
                        f"the queue {queue!r} does not exist, and this ladder has no place where a "
                        f"message without a destination could wait; declare the queue first"
                    ) from None
                logger.warning(
                    "the queue %r does not exist: delayed messages for it are parked in %r unless "
                    "it is declared and bound before they are due",
                    queue,
                    self.topology.parking,
                )
                return
            except ResourceLocked as exc:
                raise TopologyError(
                    f"the queue {queue!r} is exclusive to another connection, which RabbitMQ lets "
                    f"nobody else bind; delay to a queue that is not exclusive"
                ) from exc
        self._made.add(("", queue))

    def _has_outlet(self, queue: str) -> bool:
        # Only at least once does what a queue refuses come back, and hold up others.
        at_least_once = self.topology.queue_type == "quorum" and self.topology.mirrors
        return at_least_once and (
            self._refuses.get(queue, False)
            or any(fnmatchcase(queue, pattern) for pattern in self._patterns)
        )

    def _ask_for_outlet(self, queue: str) -> None:
        """Find out whether others, who know the queue's arguments, have given it an outlet."""
        if queue in self._refuses or self._has_outlet(queue):
            return
        if self.topology.queue_type != "quorum" or not self.topology.mirrors:
            return
        with self.own.lend(f"whether {queue!r} has an outlet") as channel:
            try:
                channel.queue_declare(self.topology.into_name(queue), passive=True)
            except NotFound:
                self._refuses[queue] = False
            else:
                self._refuses[queue] = True

    def _let_into(self, channel: Any, queue: str) -> None:
        part = self.topology.into(queue)
        _declare(channel, part)
        self._bind_again(channel, part.bindings, self._lay_base)

    def _mirror(self, bound: _Bound) -> None:
        if bound in self._made:
            return
        exchange_type = self._type_of(bound.exchange)
        if not bound.to_queue:
            self._type_of(bound.destination)
        self._stand_around(bound)
        if exchange_type in IMITABLE:
            if bound.to_queue:
                self._ask_for_outlet(bound.destination)
            outlet = bound.to_queue and self._has_outlet(bound.destination)
            try:
                mirrors = self._mirror_of(bound, exchange_type, outlet=outlet)
            except AddressError as exc:
                logger.warning("%s", exc)
                return
            with self.own.lend(
                f"the binding of {bound.destination!r}",
                f"write on {bound.destination!r}" if bound.to_queue else "",
            ) as channel:
                try:
                    if outlet:
                        self._let_into(channel, bound.destination)
                    self._bind_again(channel, mirrors, lambda: self._stand_around(bound))
                    if outlet:
                        # Someone who did not know may have led to the queue itself.
                        _unbind(channel, self._mirror_of(bound, exchange_type))
                except NotFound:
                    # It went away since, and its bindings with it.
                    self._bound.pop(bound, None)
                    return
        self._made.add(bound)

    def _unmirror(self, bound: _Bound) -> None:
        exchange_type = self._type_of(bound.exchange)
        if exchange_type not in IMITABLE:
            return
        outlet = bound.to_queue and self._has_outlet(bound.destination)
        for way in {outlet, False}:
            with self.own.lend(f"the removal of {bound}") as channel, suppress(NotFound):
                # What is not there is unbound.
                _unbind(channel, self._mirror_of(bound, exchange_type, outlet=way))

    def _mirror_of(
        self, bound: _Bound, exchange_type: str, *, outlet: bool = False
    ) -> tuple[Binding, ...]:
        target = self.topology.into_name(bound.destination) if outlet else bound.destination
        return self.topology.mirror(
            bound.exchange, exchange_type, target, bound.key, to_queue=bound.to_queue
        )

    def _bind_again(
        self, channel: Any, bindings: tuple[Binding, ...], declare: Callable[[], None]
    ) -> None:
        """Bind; where it is our side that has gone meanwhile, declare that and bind again."""
        try:
            _bind(channel, bindings)
        except NotFound as exc:
            if not self.is_ours(str(exc)):
                raise
            self.forget()
            self._active = True
            declare()
            _bind(channel, bindings)

    def _stand_around(self, bound: _Bound) -> None:
        self._stand_behind(bound.exchange)
        if not bound.to_queue:
            self._stand_behind(bound.destination)

    def _stand_behind(self, exchange: str) -> None:
        """Declare the shadow of an exchange, with an outlet where it routes by headers."""
        if exchange in self._made:
            return
        self._lay_base()
        by_headers = self._types.get(exchange) == "headers"
        part = self.topology.outlet(exchange) if by_headers else self.topology.shadow(exchange)
        also = f"write on the exchange {exchange!r}" if by_headers else ""
        with self.own.lend(f"the way to the exchange {exchange!r}", also) as channel:
            _declare(channel, part)
            _bind(channel, part.bindings)
        self._made.add(exchange)

    def _remove_shadow(self, exchange: str) -> None:
        with self.own.lend(f"the removal of the way to {exchange!r}") as channel:
            channel.exchange_delete(self.topology.shadow_name(exchange))
            # What an outlet held would expire into nothing, now that its exchange is gone.
            channel.queue_delete(self.topology.outlet_name(exchange))

    def _type_of(self, exchange: str) -> str:
        """Tell the type of an exchange that stands; ask the broker where nobody here declared it.

        AMQP has no such question. A declaration with an argument that no exchange has is refused,
        and RabbitMQ names the type it found first of all.
        """
        if exchange not in self._types:
            with self.own.lend(
                f"the type of the exchange {exchange!r}", f"configure on the exchange {exchange!r}"
            ) as channel:
                try:
                    channel.exchange_declare(
                        exchange, "fanout", arguments={"x-binary-delay-probe": str(uuid4())}
                    )
                except PreconditionFailed as exc:
                    found = re.search(r"arg 'type' .* current is '?([\w-]+)", str(exc))
                    self._types[exchange] = found[1] if found else "fanout"
                else:
                    # It was gone, and only the question made it.
                    channel.exchange_delete(exchange, if_unused=True)
                    return "topic"
        return self._types[exchange]

    def _mirrors(self, *names: str) -> bool:
        """Whether what is between these exchanges and queues is repeated on the delivery side."""
        return self.topology.mirrors and not any(self._is_private(name) for name in names)

    def _is_private(self, name: str) -> bool:
        """Whether it is no business of ours: the ladder itself, or Celery's control and events."""
        return (
            not name
            or self.topology.owns(name)
            or name.endswith(".pidbox")
            or name == "celeryev"
            or name.startswith("celeryev.")
        )

    def _forget_bound(self, gone: Any) -> None:
        for bound in [each for each in self._bound if gone(each)]:
            del self._bound[bound]
            self._made.discard(bound)

    def _quietly(self, call: Any, argument: object) -> None:
        """Do what the user's own call, which has succeeded already, does not depend on."""
        try:
            call(argument)
        except (TopologyError, AddressError) as exc:
            logger.warning("delayed messages may not arrive as others do: %s", exc)


def declare_part(channel: Any, part: Part) -> None:
    """Declare a part on a channel, and wait until the broker has."""
    _declare(channel, part)
    if part.bindings:
        # One answer for all that was sent without waiting.
        _bind(channel, part.bindings[-1:])


def _declare(channel: Any, part: Part) -> None:
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


def _bind(channel: Any, bindings: tuple[Binding, ...]) -> None:
    """Make bindings, and wait for the last of them."""
    for binding in bindings[:-1]:
        _bind_one(channel, binding, nowait=True)
    _bind_one(channel, bindings[-1], nowait=False)


def _unbind(channel: Any, bindings: tuple[Binding, ...]) -> None:
    for each in bindings:
        remove = channel.queue_unbind if each.to_queue else channel.exchange_unbind
        remove(each.destination, each.source, each.key, arguments=dict(each.arguments))


def _bind_one(channel: Any, binding: Binding, *, nowait: bool) -> None:
    bind = channel.queue_bind if binding.to_queue else channel.exchange_bind
    bind(
        binding.destination,
        binding.source,
        binding.key,
        nowait=nowait,
        arguments=dict(binding.arguments),
    )


def _can_quorum(connection: Any, settings: Settings) -> bool:
    properties = connection.server_properties
    product, version = properties.get("product"), str(properties.get("version", ""))
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:2])
    able = product == "RabbitMQ" and numbers >= QUORUM_SINCE
    if settings.queue_type == "classic" or (settings.queue_type is None and not able):
        reason = (
            "the settings ask for it"
            if settings.queue_type
            else f"{product} {version} has no better"
        )
        _warn_once(
            f"delayed messages wait in classic queues, since {reason}: a broker that crashes can "
            f"lose those that are moving between levels; quorum queues (RabbitMQ 3.10 and later) "
            f"do not"
        )
    return able


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning("%s", message)
