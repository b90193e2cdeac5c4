"""What one consumer's connection has read of amendments, and what becomes of a message. Pure.

A message that no record names always passes. What is forgotten is forgotten by time alone: a
record holds until the due time that it names, or else its own time, and then for as long as the
stream keeps records.

Of those with one key, the *valid* one is that of the last record in the order of the stream, which
all consumers share, and not of any clock. So the generations that it supersedes are remembered, for
as long as their messages can be on their way. One that arrives much later, after an outage, is not
among them: it is told by the time in its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .record import (
    GENERATION,
    KEY,
    REPLACES,
    Cancel,
    CancelStamped,
    Postpone,
    Record,
    Supersede,
    names_of,
    time_of,
)

#: How long a superseded generation is remembered after its message was due, in milliseconds.
_ON_ITS_WAY = 600_000
#: How often to look for what can be forgotten, in milliseconds.
_FORGET_EVERY = 60_000

CANCELLED = "cancelled"
SUPERSEDED = "superseded"
POSTPONED = "postponed"


class Verdict(NamedTuple):
    """What becomes of a message that has been amended.

    :param reason: ``cancelled`` and ``superseded`` are dropped, ``postponed`` is delayed again.
    :param due: of what is postponed, in milliseconds since the epoch.
    """

    reason: str
    due: int = 0


class _Amended:
    """What is known of one id or key, besides that it was cancelled."""

    __slots__ = ("at", "cancelled", "due", "first", "generation", "of_keys", "postponed", "until")

    def __init__(self) -> None:
        #: The only valid one; empty where none supersedes what was published first.
        self.generation = ""
        #: When that was published, when it is due, and when the first was that it put off.
        self.at = self.due = self.first = 0
        self.cancelled = False
        #: Whether it comes from the stream of keys.
        self.of_keys = False
        self.postponed = 0
        self.until = 0


class Memory:
    """The amendments that one connection knows.

    :param max_age: how long the stream keeps records, in milliseconds.
    """

    def __init__(self, max_age: int) -> None:
        self._max_age = max_age
        #: Until when each is remembered. Plain cancellations are the many: they have a dict alone.
        self._cancelled: dict[str, int] = {}
        self._stamped: dict[tuple[str, str], int] = {}
        self._amended: dict[str, _Amended] = {}
        self._superseded: dict[str, int] = {}
        #: Generations that are to run although a later one is valid, too.
        self._kept: dict[str, int] = {}
        self._forgotten = 0

    def __len__(self) -> int:
        """Return how many amendments are active."""
        return len(self._cancelled) + len(self._stamped) + len(self._amended)

    def learn(self, record: Record, now: int, *, of_keys: bool = False) -> None:
        """Take note of the next record of a stream.

        Between two streams, there is no order. So a key is superseded and cancelled by records of
        the stream of keys alone, and an id by those of the stream of ids.

        :param now: milliseconds since the epoch.
        :param of_keys: whether it is the stream of keys.
        """
        # A clock that is ahead is not to make a record stay for ever.
        written = min(record.at, now)
        due = getattr(record, "due", None)
        until = max(written, due or 0) + self._max_age
        if until > now:
            match record:
                case Cancel():
                    for name in record.names:
                        self._cancel(name, until, of_keys=of_keys)
                case CancelStamped():
                    for stamp, values in record.stamps:
                        self._stamped.update(
                            dict.fromkeys([(stamp, each) for each in values], until)
                        )
                case Postpone():
                    amended = self._of(record.name, until)
                    amended.postponed = record.due
                case Supersede():
                    self._supersede(record, until, now, of_keys=of_keys)
        if now - self._forgotten > _FORGET_EVERY or now < self._forgotten:
            self._forget(now)

    def judge(self, properties: Mapping[str, Any], now: int) -> Verdict | None:
        """Return what becomes of a message that arrives; None where it passes.

        :param properties: as it was published.
        :param now: milliseconds since the epoch.
        """
        name, headers = names_of(properties)
        amended = self._amended.get(name)
        key, generation = headers.get(KEY) or headers.get(REPLACES), headers.get(GENERATION)
        if isinstance(key, str) and isinstance(generation, str):
            verdict = self._judge_generation(key, generation, now)
        else:
            # What has a key and no generation was published by somebody who knows of neither.
            by_id = amended and not amended.of_keys and KEY not in headers
            verdict = self._judge_first(amended) if amended and by_id else None
        if verdict is not None:
            return verdict
        if self._cancelled.get(name, 0) > now or (self._stamped and self._has_stamp(headers, now)):
            return Verdict(CANCELLED)
        if amended is not None and amended.postponed > now:
            return Verdict(POSTPONED, amended.postponed)
        return None

    def _judge_generation(self, key: str, generation: str, now: int) -> Verdict | None:
        if generation in self._superseded:
            return Verdict(SUPERSEDED)
        valid = self._amended.get(key)
        if valid is None or generation in self._kept:
            return None
        if generation == valid.generation:
            return Verdict(CANCELLED) if valid.cancelled else None
        return Verdict(SUPERSEDED) if self._is_older(generation, valid, now) else None

    @staticmethod
    def _judge_first(amended: _Amended) -> Verdict | None:
        if amended.generation:
            return Verdict(SUPERSEDED)
        return Verdict(CANCELLED) if amended.cancelled else None

    def inherit(self, before: Memory) -> None:
        """Take over what another memory knows besides: its stream may have been deleted since."""
        for name, until in before._cancelled.items():
            if name not in self._amended:
                self._cancelled.setdefault(name, until)
        for name, amended in before._amended.items():
            now_valid = self._amended.get(name)
            if now_valid is not None and now_valid.generation and amended.generation:
                # What was valid before the stream was deleted is superseded by what is in it now.
                superseded = {amended.generation: amended.due + _ON_ITS_WAY}
                if now_valid.generation not in superseded:
                    self._superseded = {**superseded, **self._superseded}
            elif name not in self._cancelled:
                self._amended.setdefault(name, amended)
        self._stamped = {**before._stamped, **self._stamped}
        self._superseded = {**before._superseded, **self._superseded}
        self._kept = {**before._kept, **self._kept}

    def _of(self, name: str, until: int) -> _Amended:
        amended = self._amended.get(name)
        if amended is None:
            amended = self._amended[name] = _Amended()
            amended.until = self._cancelled.pop(name, 0)
            amended.cancelled = amended.until > 0
        amended.until = max(amended.until, until)
        return amended

    def _cancel(self, name: str, until: int, *, of_keys: bool) -> None:
        amended = self._amended.get(name)
        if amended is not None and amended.of_keys == of_keys:
            self._of(name, until).cancelled = True
        elif of_keys:
            # No message has had that key: it is an id.
            return
        else:
            self._cancelled[name] = max(self._cancelled.get(name, 0), until)

    def _supersede(self, record: Supersede, until: int, now: int, *, of_keys: bool) -> None:
        if of_keys and record.name not in self._amended:
            self._amended[record.name] = _Amended()
        amended = self._of(record.name, until)
        amended.of_keys = of_keys
        before, due = amended.generation, amended.due
        if record.generation == before or record.generation in self._superseded:
            return
        first = record.at
        if before:
            # Who would put off the first for longer than it may wait begins anew.
            limit = record.longest_wait
            waits = record.at < due
            if limit is None or (waits and record.due <= amended.first + limit):
                self._superseded[before] = max(due, now) + _ON_ITS_WAY
                first = amended.first if waits else first
            else:
                self._kept[before] = amended.until
        amended.generation, amended.at, amended.due = record.generation, record.at, record.due
        amended.first = first
        amended.cancelled, amended.postponed = False, 0

    @staticmethod
    def _is_older(generation: str, valid: _Amended, now: int) -> bool:
        """Whether a generation that we do not know was superseded so long ago that we forgot it.

        One that is new may be so new that its record has not been read.
        """
        published = time_of(generation)
        return bool(valid.generation) and published + _ON_ITS_WAY < now and published < valid.at

    def _has_stamp(self, headers: Mapping[str, Any], now: int) -> bool:
        stamps = headers.get("stamps")
        if not isinstance(stamps, Mapping):
            return False
        for name, given in stamps.items():
            for value in given if isinstance(given, (list, tuple)) else (given,):
                if self._stamped.get((name, str(value)), 0) > now:
                    return True
        return False

    def _forget(self, now: int) -> None:
        self._forgotten = now
        for each in (self._cancelled, self._stamped, self._superseded, self._kept):
            _drop_until(each, now)
        for name in [name for name, each in self._amended.items() if each.until <= now]:
            del self._amended[name]


def _drop_until(remembered: dict[Any, int], now: int) -> None:
    for name in [name for name, until in remembered.items() if until <= now]:
        del remembered[name]
