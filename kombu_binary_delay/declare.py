"""What a connection has to declare, and when.

A :class:`Declarer` takes note of what one connection declares and binds, and has the ladder and the
ways to its destinations made when the connection first delays or consumes. It must not import the
transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

from kombu.log import get_logger

from .channel import OwnChannel
from .delivery import Bound, Delivery
from .errors import AddressError, TopologyError
from .journal import Journal
from .levels import Levels
from .model.address import Destination
from .model.topology import IMITABLE, Topology
from .model.versions import QUORUM_SINCE, URGENT, is_since
from .settings import Settings

logger = get_logger(__name__)

_warned: set[str] = set()


class Declarer:
    """What one connection has declared of the topology, and the means to declare the rest.

    The ladder side is declared for the first delayed publish that needs it. The delivery side
    repeats the bindings made on this connection once it delays or consumes; from then on, each as
    it is made.

    :raises SettingsError: for settings that cannot be.
    """

    def __init__(self, connection: Any, settings: Settings) -> None:
        self.own = OwnChannel(connection, settings.namespace, self._refused)
        self._declares = settings.declare != "never"
        self.topology = settings.topology(can_quorum=_can_quorum(connection, settings))
        self.journal: Journal | None = None
        if settings.journal is not None:
            server = connection.server_properties
            self.journal = Journal(settings, self.topology, self.own.lend, server)
        self.delivery = Delivery(self.own, self.topology, settings.relays, self._lost)
        lanes = self.topology.lanes(settings.lanes)
        self._lanes = [self._levels(each, settings) for each in lanes]
        self._urgent: Levels | None = None
        if self.topology.keeps_urgent_apart(connection.server_properties):
            self._urgent = self._levels(self.topology.for_urgent(), settings)
        self._bound: dict[Bound, None] = {}
        self._queues: dict[str, None] = {}
        self._published = 0
        self._active = False
        #: Whether it has shown that something of ours is gone, in the middle of declaring.
        self._gap = False

    def _levels(self, topology: Topology, settings: Settings) -> Levels:
        return Levels(
            self.own,
            topology,
            self.delivery.lay_base_again,
            queue_per_delay=settings.queue_per_delay,
            declares=self._declares,
        )

    def forget(self) -> None:
        """Forget what stands on the broker: it has told us that something is gone."""
        for lane in (*self._lanes, self._urgent):
            if lane is not None:
                lane.forget()
        self.delivery.forget()
        self._active = False

    def _refused(self, error: BaseException) -> None:
        # Only the journal publishes there.
        if self.journal is not None:
            self.journal.end(error)

    def _lost(self) -> None:
        active = self._active
        self.forget()
        # Not here: what noticed it is to end first. Then _repeat makes all of it again.
        self._active, self._gap = active, active

    # -- for a delayed publish -----------------------------------------------------------------

    def lane(self, properties: Mapping[str, Any]) -> Levels:
        """Choose the ladder for a message: by its id, so that a message keeps its lane."""
        if self._urgent is not None and (properties.get("priority") or 0) >= URGENT:
            return self._urgent
        if len(self._lanes) == 1:
            return self._lanes[0]
        name = properties.get("message_id") or properties.get("correlation_id")
        self._published += 1
        number = crc32(str(name).encode()) if name else self._published
        return self._lanes[number % len(self._lanes)]

    def prepare(
        self, lane: Levels, digits: tuple[int, ...], exchange: str, keys: list[str]
    ) -> bool:
        """Let all stand that a message needs on its way to a destination.

        :param lane: the ladder that it takes.
        :param digits: its delay.
        :param keys: its routing keys, queues' names where the exchange is the default one.
        :returns: whether anything had to be declared, which takes time.
        :raises TopologyError: where the broker refuses, or the exchange is of a type that no
            delayed message can reach.
        """
        kind = self.delivery.types.get(exchange)
        if kind is not None:
            self._refuse_unreachable(exchange, kind)
        queues = () if exchange else keys
        if not self._declares or (kind != "headers" and self._stands(lane, digits, queues)):
            return False
        talks = self.own.talks
        if lane.has_gap():
            self.forget()
        if not self._active:
            self.activate()
        for queue in queues:
            # No queue has an empty name; to bind, that is the one that a channel declared last.
            if queue:
                self._lead_to(queue)
        if kind == "headers":
            self.delivery.stand_behind(exchange)
        self._fill_gap()
        # After the delivery side, which finds out whether a part of the whole is gone.
        lane.prepare(digits)
        return self.own.talks > talks

    def _stands(self, lane: Levels, digits: tuple[int, ...], queues: Iterable[str]) -> bool:
        """Whether all is known to stand that a message needs, as nearly always."""
        return (
            self._active
            and not self._gap
            and lane.stands(digits)
            and all(map(self.delivery.leads_to, queues))
        )

    def _refuse_unreachable(self, exchange: str, kind: str) -> None:
        if kind not in (*IMITABLE, "headers"):
            raise TopologyError(
                f"the exchange {exchange!r} is of the type {kind!r}, which reads routing keys in "
                f"its own way, while a delayed message arrives with another; delay to a direct, "
                f"topic, fanout or headers exchange instead"
            )
        if kind != "headers":
            return
        for bound in self._bound:
            reads_keys = self.delivery.types.get(bound.destination) in ("direct", "topic")
            if bound.exchange == exchange and not bound.to_queue and reads_keys:
                raise TopologyError(
                    f"the headers exchange {exchange!r} is bound to {bound.destination!r}, which "
                    f"reads routing keys, and a delayed message arrives there with another; bind "
                    f"queues to {exchange!r} itself, or delay to {bound.destination!r}"
                )

    def address(self, digits: tuple[int, ...], destination: Destination) -> str:
        """Write the routing key with which a message enters a ladder.

        :raises AddressError: where the destination cannot be written.
        """
        exchange = destination.exchange
        if exchange:
            # To be safe, one whose type is not known is taken for one that reads wildcards.
            topic = self.delivery.types.get(exchange, "topic") == "topic"
            return self.topology.address(digits, destination, topic=topic)
        relay = self.delivery.has_relay(destination.routing_key)
        return self.topology.address(digits, destination, relay=relay)

    def believes(self, destination: Destination, topology: Topology) -> bool:
        """Whether a message from a ladder was published to where its key says.

        A foreign ladder's key has no exchange: it may be a queue's name, or a topic exchange's key.
        """
        return topology.mirrors or destination.routing_key in self._queues

    # -- for a connection that binds, consumes or unbinds --------------------------------------

    def activate(self) -> None:
        """Repeat the bindings made so far on the delivery side.

        :raises TopologyError: where the broker refuses the delivery side itself.
        """
        if not self._declares or self._active:
            return
        if self._bound or self._queues:
            self.delivery.lay_base()
        self._active = True
        try:
            self._repeat()
            self._fill_gap()
        except BaseException:
            # Of a callback, or a time limit: the rest is still to be done.
            self._active = False
            raise

    def _repeat(self) -> None:
        self._gap = False
        for queue in list(self._queues):
            self._quietly(self._lead_to, queue)
        for bound in list(self._bound):
            self._quietly(self._mirror, bound)

    def _fill_gap(self) -> None:
        """Make all again, where it has shown that a part of it is gone."""
        if self._gap:
            self._repeat()

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
            self.delivery.types[exchange] = exchange_type

    def declared_queue(self, queue: str, *, refuses: bool | None) -> None:
        """Take note of a queue that lives on, and so can be addressed by its name.

        :param refuses: whether it refuses messages while it is full; None where that is not known.
        """
        if not self._is_private(queue):
            if refuses is not None:
                self.delivery.refuses[queue] = refuses
            if refuses and self.topology.queue_type == "classic":
                _warn_once(
                    f"the queue {queue!r} rejects messages while it is full: delayed ones that "
                    f"come from classic queues are lost then; quorum queues keep them"
                )
            self._queues[queue] = None
            if refuses is not None:
                # Whoever declares it may have made it anew; whoever looks has not.
                self.delivery.doubt(("", queue))
            if self._active:
                self._quietly(self._lead_to, queue)
                self._fill_gap()

    def bound(self, exchange: str, destination: str, key: str, *, to_queue: bool) -> None:
        """Take note of a binding, and repeat it if this connection delays or consumes."""
        if self._mirrors(exchange, destination):
            bound = Bound(exchange, destination, key, to_queue)
            self._bound[bound] = None
            # Whoever binds again may know that what we made has gone meanwhile.
            self.delivery.doubt(bound, exchange, destination)
            if self._active:
                self._quietly(self._mirror, bound)
                self._fill_gap()

    def unbound(self, exchange: str, destination: str, key: str, *, to_queue: bool) -> None:
        """Undo what :meth:`bound` did, here or in another process."""
        if not self._mirrors(exchange, destination):
            return
        bound = Bound(exchange, destination, key, to_queue)
        self._bound.pop(bound, None)
        self.delivery.doubt(bound)
        if self._declares:
            self._quietly(self.delivery.unmirror, bound)

    def deleted_queue(self, queue: str) -> None:
        """Forget a queue; the broker has removed its bindings, ours among them."""
        self._queues.pop(queue, None)
        self.delivery.refuses.pop(queue, None)
        self.delivery.doubt(("", queue))
        self._forget_bound(lambda bound: bound.to_queue and bound.destination == queue)

    def deleted_exchange(self, exchange: str) -> None:
        """Remove the mirror of an exchange that is gone."""
        self.delivery.types.pop(exchange, None)
        if not self._mirrors(exchange):
            return
        self.delivery.doubt(exchange)
        self._forget_bound(
            lambda bound: (
                exchange in (bound.exchange, None if bound.to_queue else bound.destination)
            )
        )
        if self._declares:
            self._quietly(self.delivery.remove_mirror, exchange)

    # -- how -----------------------------------------------------------------------------------

    def _lead_to(self, queue: str) -> None:
        if not self.delivery.lead_to(queue):
            self._queues.pop(queue, None)

    def _mirror(self, bound: Bound) -> None:
        if not self.delivery.mirror_bindings(bound):
            self._bound.pop(bound, None)

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
            self.delivery.doubt(bound)

    def _quietly(self, call: Any, argument: object) -> None:
        """Do what the user's own call, which has succeeded already, does not depend on."""
        try:
            call(argument)
        except (TopologyError, AddressError) as exc:
            logger.warning("delayed messages may not arrive as others do: %s", exc)


def _can_quorum(connection: Any, settings: Settings) -> bool:
    server = connection.server_properties
    able = is_since(server, QUORUM_SINCE)
    if settings.queue_type == "classic" or (settings.queue_type is None and not able):
        reason = (
            "the settings ask for it"
            if settings.queue_type
            else f"{server.get('product')} {server.get('version', '')} has no better"
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
