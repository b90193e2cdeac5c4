"""The ladder's numeral system: a delay is a binary number of ticks; a level reads some of its bits.

A :class:`Ladder` writes delays in digits, and each digit in bits. Pure: it must not import anything
that does I/O, reads a clock, or knows Kombu beyond the root of our errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, groupby, islice, repeat
from operator import mul
from typing import TYPE_CHECKING

from kombu_binary_delay.errors import DelayError, LadderError

from .durations import human

if TYPE_CHECKING:
    from collections.abc import Iterator

#: RabbitMQ refuses an ``x-message-ttl`` above ten years of 365 days.
MAX_TTL = 315_360_000_000
#: The longest wait of a digit, in milliseconds: the TTL of its queue can be one longer.
MAX_WAIT = MAX_TTL - 1
#: AMQP 0-9-1 writes a routing key as a short string: one octet of length.
MAX_KEY = 255
#: The most bytes of a key that digits take, with dots: no ladder within MAX_WAIT needs more. A
#: digit of b bits takes b + 1 bytes and has a radix above 2**(b - 1), and the lower radices, times
#: the highest less one, are at most MAX_WAIT < 2**38.2. So a lower level takes at most 2 bytes for
#: each factor of 2, and the highest, of b bits, b + 1 bytes for b - 1 of them; together, in whole
#: bytes, b + 1 + floor(2 * (38.2 - (b - 1))): at most 2 + 76, for 39 levels of radix 2.
#: So all ladders leave the same room for the destination.
MAX_DIGITS = 78
#: The most queues of a ladder. Anybody who may declare an exchange can give it a ladder's name, and
#: operators' commands then list that ladder's queues.
MAX_QUEUES = 10_000

#: The longest delay of the default ladder, in ticks: 8.5 years in steps of 125 ms.
REACH = 2**31
#: The radices of the default ladder's lowest levels, lowest first; those above have radix 2. Most
#: delays are short, so low levels read many bits, and a message waits in few of them. Long delays
#: are rare, so high levels have few queues: 72 in all. With a tick of 125 ms, the lowest level ends
#: at whole seconds, so delays of whole seconds do not wait in it.
LOWEST = (8, 16, 16, 16, 4, 4, 4, 4)

_NAME = re.compile(r"([1-9][0-9]*)ms((?:-[1-9][0-9]*x[1-9][0-9]*)+)")


@dataclass(frozen=True)
class Ladder:
    """A tick and a radix for each level, highest level first.

    A digit is a word of bits, as wide as the highest digit of its level: ``"00"`` to ``"11"`` for a
    radix of 4, ``"0"`` and ``"1"`` for 2, ``"0000"`` to ``"1001"`` for 10. If every radix is a
    power of two, the digits of a delay, joined, are its number of ticks in binary.

    The *weight* of a level is the tick times the radices of all levels below it. The digit of value
    ``d`` means a wait of ``d`` times the weight.

    :param tick: the smallest delay, in whole milliseconds, at least 1.
    :param radices: one radix per level, each at least 2, highest level first.
    :raises LadderError: if the ladder is invalid, or RabbitMQ cannot hold it.
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
            raise LadderError("a ladder needs at least one level, got no radix; give one per level")
        for radix in self.radices:
            if not _whole(radix) or radix < 2:
                raise LadderError(f"every radix must be a whole number >= 2, got {radix!r}")
        weight = self.tick
        for level, radix in enumerate(reversed(self.radices)):
            if (radix - 1) * weight > MAX_WAIT:
                raise LadderError(
                    f"level {level} would need an x-message-ttl above RabbitMQ's limit, {MAX_TTL} "
                    f"ms (10 years); use fewer levels or a smaller tick"
                )
            weight *= radix
        queues = sum(self.radices) - len(self.radices)
        if queues > MAX_QUEUES:
            raise LadderError(
                f"a ladder can have at most {MAX_QUEUES} queues, and each level has one less than "
                f"its radix, which makes {queues}; use lower radices and more levels"
            )

    @classmethod
    def default(cls, levels: int | None = None, tick: int = 125) -> Ladder:
        """Return the ladder that is used if no radix is chosen.

        It reads three bits on the lowest level, four on each of the next three, two on the next
        four, and one on each above.

        :param levels: the number of levels, N: the lowest of these. By default, enough for
            ``2**31`` ticks, or as many as RabbitMQ's longest TTL allows.
        :param tick: the smallest delay in milliseconds.
        """
        return cls._rising(chain(LOWEST, repeat(2)), levels, tick)

    @classmethod
    def uniform(cls, radix: int, levels: int | None = None, tick: int = 125) -> Ladder:
        """Return a ladder whose levels all have the same radix.

        :param radix: the number of digits of a level: 8 if it reads three bits. A level has a queue
            for each digit except zero: ``radix - 1`` queues.
        :param levels: the number of levels, N. By default, enough for ``2**31`` ticks, or as many
            as RabbitMQ's longest TTL allows; the highest level can then have a lower radix.
        :param tick: the smallest delay in milliseconds.
        """
        return cls._rising(repeat(radix), levels, tick)

    @classmethod
    def _rising(cls, radices: Iterator[int], levels: int | None, tick: int) -> Ladder:
        """Return the ladder of as many radices as are asked for, or needed; lowest level first."""
        if levels is not None:
            if not _whole(levels) or not 1 <= levels <= MAX_KEY:
                raise LadderError(
                    f"levels must be a whole number from 1 to {MAX_KEY}, the longest routing key, "
                    f"got {levels!r}"
                )
            return cls(tick, tuple(islice(radices, levels))[::-1])
        # One level runs every check that does not depend on the number of levels.
        rising = [*cls(tick, (next(radices),)).radices]
        reached = rising[0]
        while reached < REACH:
            longest = MAX_WAIT // (reached * tick) + 1
            highest = min(next(radices), -(-REACH // reached), longest)
            if highest < 2:
                break
            rising.append(highest)
            reached *= highest
        return cls(tick, tuple(reversed(rising)))

    @classmethod
    def binary(cls, levels: int | None = None, tick: int = 125) -> Ladder:
        """Return a ladder whose levels read one bit each: :meth:`uniform` with radix 2."""
        return cls.uniform(2, levels, tick)

    @classmethod
    def from_name(cls, name: str) -> Ladder:
        """Read a ladder back from :attr:`name`.

        :raises LadderError: if ``name`` is not the name of a ladder.
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
        """The ladder's name, which defines it: ``125ms-2x31`` is 31 levels of radix 2."""
        runs = (f"{radix}x{len(list(run))}" for radix, run in groupby(self.radices))
        return "-".join([f"{self.tick}ms", *runs])

    @property
    def levels(self) -> int:
        """The number of levels, N."""
        return len(self.radices)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """The wait of a digit of value 1 at each level, in milliseconds, highest level first."""
        weights = [self.tick]
        for radix in reversed(self.radices[1:]):
            weights.append(weights[-1] * radix)
        return tuple(reversed(weights))

    @cached_property
    def maximum(self) -> int:
        """The longest delay in milliseconds."""
        return self.weights[0] * self.radices[0] - self.tick

    def word(self, level: int, digit: int) -> str:
        """Write a digit of a level in bits; level 0 is the lowest."""
        return _word(digit, self.radices[-1 - level])

    def digits(self, delay: float) -> tuple[str, ...]:
        """Write a delay in milliseconds as digits, highest first, rounded *up* to whole ticks.

        Each digit is in bits. Leading zeros are left out, so a delay of 0 has no digits.

        :raises DelayError: if the delay is negative or longer than :attr:`maximum`.
        """
        if not 0 <= delay <= self.maximum:
            raise DelayError(self._out_of_range(delay))
        return _digits(self.radices, -int(-delay // self.tick))

    def _out_of_range(self, delay: float) -> str:
        if not delay >= 0:
            return f"a delay of {delay:g} ms is not 0 or more"
        given, longest = human(delay), human(self.maximum)
        if given == longest:
            given, longest = f"{delay:.0f} ms", f"{self.maximum} ms"
        return (
            f"a delay of {given} is longer than {longest}, the longest of the ladder {self.name}; "
            f"use a shorter delay{', or a ladder with more levels' * self._can_hold(delay)}"
        )

    def _can_hold(self, delay: float) -> bool:
        """Return whether a ladder with more levels can hold a delay: TTLs have a limit."""
        ladder = self
        try:
            while ladder.maximum < delay:
                ladder = Ladder(ladder.tick, (2, *ladder.radices))
        except LadderError:
            return False
        return True

    def delay(self, digits: tuple[str, ...]) -> int:
        """Read digits, highest first, back as a delay in milliseconds.

        :raises LadderError: if there are more digits than levels, or a level has no such digit.
        """
        above = max(self.levels - len(digits), 0)
        values = [*map(_value, digits, self.radices[above:])]
        if len(digits) > self.levels or None in values:
            raise LadderError(f"{digits!r} are not the digits of a delay on the ladder {self.name}")
        return sum(map(mul, values, self.weights[above:]))


def hops(digits: tuple[str, ...]) -> int:
    """Count the queues in which a delay with these digits waits: one per digit above zero."""
    return sum("1" in digit for digit in digits)


# Delays repeat, such as those of retries.
@lru_cache(maxsize=4096)
def _digits(radices: tuple[int, ...], rest: int) -> tuple[str, ...]:
    digits = []
    for radix in reversed(radices):
        if not rest:
            break
        rest, digit = divmod(rest, radix)
        digits.append(_word(digit, radix))
    return tuple(reversed(digits))


@lru_cache(maxsize=4096)
def _word(digit: int, radix: int) -> str:
    return f"{digit:0{_width(radix)}b}"


def _width(radix: int) -> int:
    return (radix - 1).bit_length()


@lru_cache(maxsize=4096)
def _value(word: str, radix: int) -> int | None:
    if len(word) != _width(radix) or word.strip("01"):
        return None
    value = int(word, 2)
    return value if value < radix else None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
