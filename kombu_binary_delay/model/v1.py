"""Ladders of the earlier form ``v1``, for messages that still wait on one. Pure.

Their digits are decimal figures, and some of their names differ; all else is as in ``v2``. Programs
neither declare such a ladder nor publish to it. Operators can move its messages and remove it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from kombu_binary_delay.errors import LadderError

from .address import MARK
from .ladder import Ladder
from .parts import Exchange, Part
from .topology import Topology


class LadderV1(Ladder):
    """A ladder whose digits are decimal figures."""

    def word(self, level: int, digit: int) -> str:
        """Write a digit of a level."""
        del level
        return str(digit)

    def digits(self, delay: float) -> tuple[str, ...]:
        """Write a delay as :meth:`Ladder.digits` does, in decimal figures."""
        return tuple(str(int(digit, 2)) for digit in super().digits(delay))

    def delay(self, digits: tuple[str, ...]) -> int:
        """Read digits back as a delay in milliseconds.

        :raises LadderError: if there are more digits than levels, or a level has no such digit.
        """
        if len(digits) > self.levels or not all(map(_is_decimal, digits)):
            raise LadderError(f"{digits!r} are not the digits of a delay on the ladder {self.name}")
        levels = range(len(digits) - 1, -1, -1)
        return super().delay(
            tuple(
                Ladder.word(self, level, int(digit))
                for level, digit in zip(levels, digits, strict=True)
            )
        )


def _is_decimal(digit: str) -> bool:
    return digit.isascii() and digit.isdecimal() and str(int(digit)) == digit


@dataclass(frozen=True)
class TopologyV1(Topology):
    """A ladder of the form ``v1`` as declared on a broker."""

    ladder: Ladder = field(default_factory=partial(LadderV1.uniform, 4))

    version = "v1"
    numerals = LadderV1

    @property
    def to_queues(self) -> str:
        """The name of the delivery exchange, which routes to queues itself."""
        return self.delivery

    @cached_property
    def base(self) -> Part:
        """The parking queue and the delivery exchange."""
        base = super().base
        return replace(base, exchanges=(base.exchanges[0], self._exchange(self.delivery)))

    def _ttl(self, wait: int) -> int:
        """Return the wait itself: quorum queues of this form can be a millisecond early."""
        return wait

    def mirror_name(self, exchange: str) -> str:
        """Return the name of the mirror of an exchange."""
        return self._behind("to", exchange)

    def exchange_relay_name(self, exchange: str) -> str:
        """Return the name of the relay of an exchange."""
        return self._behind("outlet", exchange)

    def queue_relay_name(self, queue: str) -> str:
        """Return the name of the relay of a queue, and of the exchange behind it."""
        return self._behind("into", queue)

    def queue_relay(self, queue: str) -> Part:
        """Return the relay of a queue; addresses for it have a mark of their own."""
        part, name = super().queue_relay(queue), self.queue_relay_name(queue)
        behind = Exchange(name, "fanout", (("alternate-exchange", self.parking),))
        lead, *rest = part.bindings
        lead = replace(lead, key=lead.key.replace(f"#.{MARK}.", "#.@!.", 1))
        return replace(part, exchanges=(behind,), bindings=(lead, *rest))

    @cached_property
    def direct(self) -> str:
        """The name of the exchange before the direct queues."""
        return f"{self.prefix}.own"

    @cached_property
    def direct_fallback(self) -> str:
        """The name of the exchange that leads delays without a direct queue to the levels."""
        return f"{self.prefix}.enter"
