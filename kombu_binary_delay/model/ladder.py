"""The numeral system: a delay is a number, a queue is a digit.

A :class:`Ladder` writes delays in a positional system. Pure: it must not import anything that
does I/O, reads a clock, or knows Kombu beyond the root of our errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from kombu_binary_delay.errors import DelayError, LadderError

#: RabbitMQ refuses an ``x-message-ttl`` above ten years of 365 days.
MAX_TTL = 315_360_000_000
#: AMQP 0-9-1 writes a routing key as a short string: one octet of length.
MAX_KEY = 255
#: The most of it that digits may take, dots included: 39 levels of radix 2. No ladder needs more,
#: for MAX_TTL ends each sooner, and what is left to the destination is the same on all of them.
MAX_DIGITS = 78

#: The ticks that a ladder reaches unless told otherwise: 8.5 years in steps of an eighth second.
REACH = 2**31
#: Four counts best: fewer waits than binary has, and bursts leave through more queues side by side.
RADIX = 4

_NAME = re.compile(r"([1-9][0-9]*)ms((?:-[1-9][0-9]*x[1-9][0-9]*)+)")


@dataclass(frozen=True)
class Ladder:
    """A tick and a radix for each level, highest level first.

    The *weight* of a level is the tick times the radices of all levels below it. A digit ``d`` at
    a level stands for a wait of ``d`` times its weight.

    :param tick: the smallest delay, in whole milliseconds, at least 1.
    :param radices: one radix per level, each at least 2, highest level first.
    :raises LadderError: where such a ladder cannot be built on RabbitMQ.
    """

    tick: int
    radices: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "radices", tuple(self.radices))
        if not _whole(self.tick) or self.tick < 1:
            raise LadderError(
                f"tick must be a whole number of milliseconds >= 1, got {self.tick!r}"
            )
        if not self.radices:
            raise LadderError("a ladder needs at least one level, got no radix")
        for radix in self.radices:
            if not _whole(radix) or radix < 2:
                raise LadderError(f"every radix must be a whole number >= 2, got {radix!r}")
        length = sum(len(str(radix - 1)) + 1 for radix in self.radices)
        if length > MAX_DIGITS:
            raise LadderError(
                f"the digits of {len(self.radices)} levels could take {length} of a routing key's "
                f"{MAX_KEY} bytes, {MAX_DIGITS} are left to them; use fewer levels"
            )
        longest = (self.radices[0] - 1) * self.weights[0]
        if longest > MAX_TTL:
            raise LadderError(
                f"the highest level would need an x-message-ttl of {longest} ms, RabbitMQ's limit "
                f"is {MAX_TTL} ms (10 years); use fewer levels or a smaller tick"
            )

    @classmethod
    def uniform(cls, radix: int = RADIX, levels: int | None = None, tick: int = 125) -> Ladder:
        """Give every level the same radix.

        :param radix: a level has one queue for each digit above 0: ``radix - 1`` of them.
        :param levels: the number of levels, N; None for as many as reach ``2**31`` ticks, or as
            RabbitMQ can have where that is fewer. The highest then counts no further than that.
        :param tick: the smallest delay in milliseconds.
        """
        if levels is not None:
            if not _whole(levels) or levels < 1:
                raise LadderError(f"levels must be a whole number >= 1, got {levels!r}")
            return cls(tick, (radix,) * levels)
        # The lowest level has every check that does not depend on their number.
        ladder = cls(tick, (radix,))
        while (reached := ladder.maximum // tick + 1) < REACH:
            highest = min(radix, -(-REACH // reached), MAX_TTL // (reached * tick) + 1)
            if highest < 2:
                break
            ladder = cls(tick, (highest, *ladder.radices))
        return ladder

    @classmethod
    def binary(cls, levels: int | None = None, tick: int = 125) -> Ladder:
        """Give every level radix 2: :meth:`uniform` of 2."""
        return cls.uniform(2, levels, tick)

    @classmethod
    def from_name(cls, name: str) -> Ladder:
        """Read a ladder back from :attr:`name`.

        :raises LadderError: where ``name`` is not what :attr:`name` writes.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise LadderError(f"{name!r} is not the name of a ladder, such as '125ms-2x31'")
        runs = [run.split("x") for run in match[2][1:].split("-")]
        if sum(int(count) for _, count in runs) > MAX_KEY:
            raise LadderError(f"{name!r} has more levels than a routing key has bytes")
        return cls(int(match[1]), tuple(int(radix) for radix, n in runs for _ in range(int(n))))

    @cached_property
    def name(self) -> str:
        """The ladder in a word that says all of it: ``125ms-2x31`` is 31 levels of radix 2."""
        runs = (f"{radix}x{len(list(run))}" for radix, run in groupby(self.radices))
        return "-".join([f"{self.tick}ms", *runs])

    @property
    def levels(self) -> int:
        """The number of levels, N."""
        return len(self.radices)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """What a digit 1 at each level waits, in milliseconds, highest level first."""
        weights = [self.tick]
        for radix in reversed(self.radices[1:]):
            weights.append(weights[-1] * radix)
        return tuple(reversed(weights))

    @cached_property
    def maximum(self) -> int:
        """The longest delay in milliseconds: every digit at its highest."""
        return self.weights[0] * self.radices[0] - self.tick

    def digits(self, delay: float) -> tuple[int, ...]:
        """Write a delay in milliseconds as digits, highest first, rounded *up* to whole ticks.

        As numbers are, without leading zeros: a delay of 0 has no digits.

        :raises DelayError: where the delay is negative or beyond :attr:`maximum`.
        """
        if not 0 <= delay <= self.maximum:
            raise DelayError(
                f"a delay of {delay} ms is outside of 0 to {self.maximum} ms, the range of the "
                f"ladder {self.name}; use a shorter delay, or a ladder with more levels"
            )
        return _digits(self.radices, -int(-delay // self.tick))

    def delay(self, digits: tuple[int, ...]) -> int:
        """Read digits, highest first, back as a delay in milliseconds.

        :raises LadderError: where there are more digits than levels, or one not below its radix.
        """
        above = self.levels - len(digits)
        if above < 0 or any(
            not 0 <= digit < radix
            for digit, radix in zip(digits, self.radices[above:], strict=True)
        ):
            raise LadderError(f"{digits!r} are not the digits of a delay on the ladder {self.name}")
        return sum(
            digit * weight for digit, weight in zip(digits, self.weights[above:], strict=True)
        )


# Delays repeat: those of retries, say, or whole seconds.
@lru_cache(maxsize=4096)
def _digits(radices: tuple[int, ...], rest: int) -> tuple[int, ...]:
    digits = []
    for radix in reversed(radices):
        if not rest:
            break
        rest, digit = divmod(rest, radix)
        digits.append(digit)
    return tuple(reversed(digits))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
