"""How a message that a ladder delivers was published. Pure."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from kombu_binary_delay.errors import AddressError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.envelope import (
    HEADER,
    HEADERS,
    carried,
    name_deaths,
    published_as,
    unwrap,
)
from kombu_binary_delay.ladder.recognise import ladder_of_exchange, parking_of
from kombu_binary_delay.ladder.topology import Topology

from .knowledge import Knowledge


class Delivery(NamedTuple):
    """The destination and properties with which a message that a ladder delivers was published."""

    destination: Destination
    properties: dict[str, Any]


class Deliveries:
    """Reads what one connection receives.

    :param known: the state of the connection, which this only reads.
    """

    def __init__(self, known: Knowledge) -> None:
        self._known, self._topology = known, known.topology
        #: How a message of ours is read, whichever ladder this connection publishes to.
        self._ours = (
            known.topology
            if known.topology.is_ours
            else Topology(namespace=known.settings.namespace)
        )

    def received(
        self, exchange: str, routing_key: str, properties: dict[str, Any], queue: str
    ) -> Delivery | None:
        """Return how a message that a ladder delivers was published; None if no ladder did.

        :param queue: the queue that it was taken from; empty if it is not known.
        """
        headers = properties.get(HEADERS)
        by = ladder_of_exchange(exchange, self._topology)
        if by is None:
            if not (headers and HEADER in headers):
                return None
            by = self._ladder_of(exchange)
        ladder, written = self._written(by, routing_key, headers or {})
        destination = Destination(exchange, routing_key)
        if written is not None:
            # Otherwise the exchange is the program's: it came by a relay, or as a dead letter.
            destination = Destination(exchange, written.routing_key)
            if by is not None:
                destination = self._published_to(ladder, written, destination, queue)
        if headers:
            destination, copies = published_as(headers) or (destination, {})
            properties = {**properties, HEADERS: {**headers, **copies}}
            unwrap(properties, ladder.owns)
            name_deaths(properties[HEADERS], headers, partial(self._came_by, headers))
            if ladder.delay_header:
                properties[HEADERS].pop(ladder.delay_header, None)
        return Delivery(destination, properties)

    def wait(self, exchange: str, routing_key: str, headers: dict[str, Any]) -> int | None:
        """Return for how long a ladder was to keep a message, in milliseconds.

        :returns: None if the address does not say.
        """
        by = ladder_of_exchange(exchange, self._topology)
        for ladder in (by,) if by else (self._ours, self._topology):
            with suppress(AddressError):
                return ladder.ladder.delay(ladder.parse(routing_key, carried(headers))[0])
        return None

    def _came_by(self, headers: dict[str, Any], exchange: str, key: str) -> Destination | None:
        """Return how a message was published that came by this; None if it came by no ladder."""
        by = self._ladder_of(exchange)
        if by is None:
            # Of what has been dead-lettered before, the key may be the address still.
            written = self._written(None, key, headers)[1]
            published, _ = published_as(headers) or (written, {})
            return written and Destination(exchange, (published or written).routing_key)
        if not by.is_ours:
            return None
        published, _ = published_as(headers) or (None, {})
        return published or self._written(by, key, headers)[1]

    def _ladder_of(self, exchange: str) -> Topology | None:
        """Return the ladder of an exchange: of any system or namespace; None if of none."""
        by = ladder_of_exchange(exchange, self._topology)
        if by is None and parking_of(exchange):
            by = Topology(namespace=exchange.partition(".")[0])
        return by

    def _written(
        self, by: Topology | None, key: str, headers: dict[str, Any]
    ) -> tuple[Topology, Destination | None]:
        """Return the ladder that wrote a routing key, and the destination in it, if any.

        :param by: the ladder that has delivered the message; None for a dead letter, or a relay's.
        """
        ladders = (by,) if by else (self._ours, self._topology)
        for ladder in ladders:
            with suppress(AddressError):
                return ladder, ladder.destination(key, carried(headers))
        return ladders[0], None

    def _published_to(
        self, ladder: Topology, written: Destination, arrived: Destination, queue: str
    ) -> Destination:
        """Return the destination that the consumer sees, and that a retry is published to.

        A foreign ladder's key has no exchange: it is a queue's name, or a topic exchange's key. So
        a retry of such a message goes to the queue that it came from, by our own ladder.
        """
        if ladder.is_ours:
            return written
        if queue:
            return Destination("", queue)
        return written if written.routing_key in self._known.declared else arrived
