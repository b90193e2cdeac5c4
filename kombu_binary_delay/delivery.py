"""The delivery side, as one connection makes it: the ways from delivery to destinations.

It must not import what knows when a connection begins to delay or to consume.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

from amqp.exceptions import NotFound, PreconditionFailed, ResourceLocked
from kombu.log import get_logger

from .channel import OwnChannel, bind, send, unbind
from .errors import AddressError, TopologyError
from .model.topology import IMITABLE, Binding, Topology

logger = get_logger(__name__)

#: The types of the exchanges that every RabbitMQ has.
BUILT_IN = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.headers": "headers",
    "amq.match": "headers",
    "amq.topic": "topic",
}


class Bound(NamedTuple):
    """A binding that somebody made from an exchange to a queue or another exchange."""

    exchange: str
    destination: str
    key: str
    to_queue: bool


class Delivery:
    """What one connection has declared behind delivery.

    :param own: the channel to declare on.
    :param relays: patterns of the names of queues that need a relay, whoever declares them.
    :param lost: called when the broker has told that something of ours is gone.
    """

    def __init__(
        self,
        own: OwnChannel,
        topology: Topology,
        relays: tuple[str, ...],
        lost: Callable[[], None],
    ) -> None:
        self._own = own
        self._topology = topology
        self._patterns = relays
        self._lost = lost
        #: The types of exchanges, and whether queues refuse messages, where that is known.
        self.types: dict[str, str] = dict(BUILT_IN)
        self.refuses: dict[str, bool] = {}
        #: Queues that do not exist, of which has been warned.
        self._missing: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Forget what stands on the broker."""
        self._base = False
        self._made: set[object] = set()

    def doubt(self, *made: object) -> None:
        """Forget whether some of it stands: a queue as ``("", queue)``, an exchange, a binding."""
        self._made.difference_update(made)

    def lay_base(self) -> None:
        """Declare the delivery exchange and the parking queue."""
        if self._base:
            return
        with self._own.lend("the delivery exchange and the parking queue") as channel:
            send(channel, self._topology.base)
            # One answer for all that was sent without waiting.
            channel.exchange_declare(self._topology.delivery, "topic", passive=True)
        self._base = True

    def lay_base_again(self) -> None:
        """Declare them even if they stood before."""
        self._base = False
        self.lay_base()

    # -- queues on the default exchange --------------------------------------------------------

    def leads_to(self, queue: str) -> bool:
        """Whether the way to a queue is known to stand, that one is addressed by its name."""
        return ("", queue) in self._made

    def lead_to(self, queue: str) -> bool:
        """Bind a queue that is addressed through the default exchange; tell whether it exists.

        :raises TopologyError: where the broker refuses.
        """
        if self.leads_to(queue):
            return True
        self.lay_base()
        self._ask_for_relay(queue)
        with self._own.lend(
            f"the way to the queue {queue!r}", f"write on the queue {queue!r}"
        ) as channel:
            try:
                if self.has_relay(queue):
                    self._let_into(channel, queue)
                else:
                    self._bind_again(
                        channel, self._topology.to_queue(queue).bindings, self.lay_base
                    )
            except NotFound:
                if not self._topology.parking:
                    raise TopologyError(
                        f"the queue {queue!r} does not exist, and this ladder has no place where a "
                        f"message without a destination could wait; declare the queue first"
                    ) from None
                if queue not in self._missing:
                    self._missing.add(queue)
                    logger.warning(
                        "the queue %r does not exist: delayed messages for it are parked in %r "
                        "unless it is declared and bound before they are due",
                        queue,
                        self._topology.parking,
                    )
                return False
            except ResourceLocked as exc:
                raise TopologyError(
                    f"the queue {queue!r} is exclusive to another connection, which RabbitMQ lets "
                    f"nobody else bind; delay to a queue that is not exclusive"
                ) from exc
        self._made.add(("", queue))
        self._missing.discard(queue)
        return True

    def has_relay(self, queue: str) -> bool:
        """Whether a queue is reached through a relay, as far as that is known."""
        if not self._topology.can_have_relays:
            return False
        if self.refuses.get(queue, False):
            return True
        return bool(self._patterns) and self._topology.wants_relay(queue, self._patterns)

    def _ask_for_relay(self, queue: str) -> None:
        """Find out whether others, who know the queue's arguments, have given it a relay.

        They may yet do so: "no" is the answer for now, and is asked for again with the next way.
        """
        if not self._topology.can_have_relays or queue in self.refuses or self.has_relay(queue):
            return
        with self._own.lend(f"whether {queue!r} has a relay") as channel, suppress(NotFound):
            channel.queue_declare(self._topology.queue_relay_name(queue), passive=True)
            self.refuses[queue] = True

    def _let_into(self, channel: Any, queue: str) -> None:
        part = self._topology.queue_relay(queue)
        send(channel, part)
        self._bind_again(channel, part.bindings, self.lay_base)

    # -- bindings of other exchanges -----------------------------------------------------------

    def mirror_bindings(self, bound: Bound) -> bool:
        """Repeat a binding on the mirror of its exchange; tell whether what it binds exists.

        :raises TopologyError: where the broker refuses.
        """
        if bound in self._made:
            return True
        exchange_type = self._type_of(bound.exchange)
        if not bound.to_queue:
            self._type_of(bound.destination)
        self._stand_around(bound)
        if exchange_type in IMITABLE and not self._imitate(bound, exchange_type):
            return False
        self._made.add(bound)
        return True

    def _imitate(self, bound: Bound, exchange_type: str) -> bool:
        if bound.to_queue:
            self._ask_for_relay(bound.destination)
        relay = bound.to_queue and self.has_relay(bound.destination)
        try:
            mirrors = self._mirror_of(bound, exchange_type, relay=relay)
        except AddressError as exc:
            logger.warning("%s", exc)
            return True
        also = f"write on {bound.destination!r}" if bound.to_queue else ""
        with self._own.lend(f"the binding of {bound.destination!r}", also) as channel:
            try:
                if relay:
                    self._let_into(channel, bound.destination)
                self._bind_again(channel, mirrors, lambda: self._stand_around(bound))
                if relay:
                    # Someone who did not know may have led to the queue itself.
                    unbind(channel, self._mirror_of(bound, exchange_type))
            except NotFound:
                # It went away since, and its bindings with it.
                return False
        return True

    def unmirror(self, bound: Bound) -> None:
        """Undo :meth:`mirror`, here or in another process.

        :raises TopologyError: where the broker refuses.
        """
        self._made.discard(bound)
        exchange_type = self._type_of(bound.exchange)
        if exchange_type not in IMITABLE:
            return
        relay = bound.to_queue and self.has_relay(bound.destination)
        for way in {relay, False}:
            with self._own.lend(f"the removal of {bound}") as channel, suppress(NotFound):
                # What is not there is unbound.
                unbind(channel, self._mirror_of(bound, exchange_type, relay=way))

    def _mirror_of(
        self, bound: Bound, exchange_type: str, *, relay: bool = False
    ) -> tuple[Binding, ...]:
        target = self._topology.queue_relay_name(bound.destination) if relay else bound.destination
        return self._topology.mirror_bindings(
            bound.exchange, exchange_type, target, bound.key, to_queue=bound.to_queue
        )

    def _bind_again(
        self, channel: Any, bindings: tuple[Binding, ...], declare: Callable[[], None]
    ) -> None:
        """Bind; where it is our side that has gone meanwhile, declare that and bind again."""
        try:
            bind(channel, bindings)
        except NotFound as exc:
            if not self._topology.is_named_in(str(exc)):
                raise
            self._lost()
            declare()
            bind(channel, bindings)

    # -- exchanges -----------------------------------------------------------------------------

    def stand_behind(self, exchange: str) -> None:
        """Declare the mirror of an exchange, with a relay where it routes by headers.

        :raises TopologyError: where the broker refuses.
        """
        if exchange in self._made:
            return
        self.lay_base()
        by_headers = self.types.get(exchange) == "headers"
        part = (
            self._topology.exchange_relay(exchange)
            if by_headers
            else self._topology.mirror(exchange)
        )
        also = f"write on the exchange {exchange!r}" if by_headers else ""
        with self._own.lend(f"the way to the exchange {exchange!r}", also) as channel:
            send(channel, part)
            bind(channel, part.bindings)
        self._made.add(exchange)

    def _stand_around(self, bound: Bound) -> None:
        self.stand_behind(bound.exchange)
        if not bound.to_queue:
            self.stand_behind(bound.destination)

    def remove_mirror(self, exchange: str) -> None:
        """Remove the way to an exchange that is gone.

        :raises TopologyError: where the broker refuses.
        """
        self._made.discard(exchange)
        with self._own.lend(f"the removal of the way to {exchange!r}") as channel:
            channel.exchange_delete(self._topology.mirror_name(exchange))
            # What a relay held would expire into nothing, now that its exchange is gone.
            channel.queue_delete(self._topology.exchange_relay_name(exchange))

    def _type_of(self, exchange: str) -> str:
        """Tell the type of an exchange that stands; ask the broker where nobody here declared it.

        AMQP has no such question. A declaration with an argument that no exchange has is refused,
        and RabbitMQ names the type it found first of all.
        """
        if exchange not in self.types:
            with self._own.lend(
                f"the type of the exchange {exchange!r}", f"configure on the exchange {exchange!r}"
            ) as channel:
                try:
                    channel.exchange_declare(
                        exchange, "fanout", arguments={"x-binary-delay-probe": str(uuid4())}
                    )
                except PreconditionFailed as exc:
                    found = re.search(r"arg 'type' .* current is '?([\w-]+)", str(exc))
                    self.types[exchange] = found[1] if found else "fanout"
                else:
                    # It was gone, and only the question made it.
                    channel.exchange_delete(exchange, if_unused=True)
                    return "topic"
        return self.types[exchange]
