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
#: How long a key is remembered after its message was due, in milliseconds: as its stream does.
_KEYS_MAX_AGE = 86_400_000
#: So long ago, by its publisher's clock, a message may be whose record is still to come: in
#: milliseconds.
_JUST_NOW = 60_000
#: How often to look for what can be forgotten, in milliseconds.
_FORGET_EVERY = 60_000
#: How long something is remembered is rounded up to a multiple of this, in milliseconds.
_ROUND = 60_000

CANCELLED = "cancelled"
SUPERSEDED = "superseded"
POSTPONED = "postponed"


class Verdict(NamedTuple):
    """What becomes of a message that has been amended.

    :param reason: ``cancelled`` and ``superseded`` are dropped, ``postponed`` is delayed again.
    :param due: of what is postponed, in milliseconds since the epoch.
    :param by_key: whether its key is the reason, and not its id.
    """

    reason: str
    due: int = 0
    by_key: bool = False


class _Amended:
    """What is known of one id or key, besides that it was cancelled."""

    __slots__ = (
        "at",
        "cancelled",
        "due",
        "first",
        "generation",
        "postponed",
        "revived",
        "until",
    )

    def __init__(self) -> None:
        #: The only valid one; empty where none supersedes what was published first.
        self.generation = ""
        #: When that was published, when it is due, and when the first was that it put off.
        self.at = self.due = self.first = 0
        self.cancelled = False
        #: Whether the valid one came after a cancellation.
        self.revived = False
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
        self._keyed: dict[str, _Amended] = {}
        self._superseded: dict[str, int] = {}
        #: Generations that are to run although a later one is valid, too.
        self._kept: dict[str, int] = {}
        self._forgotten = self._until = 0

    def __len__(self) -> int:
        """Return how many amendments are active."""
        ids = len(self._cancelled) + len(self._amended)
        return ids + len(self._stamped) + len(self._keyed)

    def learn(self, record: Record, now: int) -> None:
        """Take note of the next record of a stream.

        :param now: milliseconds since the epoch.
        """
        # A clock that is ahead is not to make a record stay for ever.
        written = min(record.at, now)
        due = getattr(record, "due", None)
        keyed = getattr(record, "keyed", False)
        max_age = min(_KEYS_MAX_AGE, self._max_age) if keyed else self._max_age
        until = max(written, due or 0) + max_age
        if until > now:
            self._note(record, self._rounded(until), now)
        if now - self._forgotten > _FORGET_EVERY or now < self._forgotten:
            self._forget(now)

    def _note(self, record: Record, until: int, now: int) -> None:
        match record:
            case Cancel(keyed=True):
                # A key that nobody superseded has nothing to cancel: the record would be before.
                for name in record.names:
                    if name in self._keyed:
                        self._keyed[name].cancelled = True
            case Cancel():
                for name in record.names:
                    self._cancel(name, until)
            case CancelStamped():
                for stamp, values in record.stamps:
                    self._stamped.update(dict.fromkeys([(stamp, each) for each in values], until))
            case Postpone():
                self._of(record.name, until).postponed = record.due
            case Supersede():
                self._supersede(record, until, now)

    def judge(self, properties: Mapping[str, Any], now: int) -> Verdict | None:
        """Return what becomes of a message that arrives; None where it passes.

        :param properties: as it was published.
        :param now: milliseconds since the epoch.
        """
        name, headers = names_of(properties)
        amended = self._amended.get(name)
        if amended is not None or GENERATION in headers:
            verdict = self._judge_named(name, headers, amended, now)
            if verdict is not None:
                return verdict
        if self._stamped and self._has_stamp(headers, now):
            return Verdict(CANCELLED)
        if self._cancelled.get(name, 0) > now and not self.awaits_record(properties, now):
            return Verdict(CANCELLED)
        if amended is not None and amended.postponed > now:
            return Verdict(POSTPONED, amended.postponed)
        return None

    def revives(self, properties: Mapping[str, Any], now: int) -> bool:
        """Return whether a message that passes replaces one that was cancelled before.

        :param now: milliseconds since the epoch.
        """
        name, headers = names_of(properties)
        amended = self._amended.get(name)
        if amended is None:
            return self.awaits_record(properties, now)
        return (
            amended.revived
            and not amended.cancelled
            and headers.get(GENERATION) == amended.generation
        )

    def awaits_record(self, properties: Mapping[str, Any], now: int) -> bool:
        """Return whether a message has just replaced a cancelled one, by a record still unread.

        It passes: where the record never comes, both run rather than none.

        :param now: milliseconds since the epoch.
        """
        name, headers = names_of(properties)
        generation = headers.get(GENERATION)
        return (
            isinstance(generation, str)
            and headers.get(REPLACES) == name
            # With the record, it is no longer among these.
            and self._cancelled.get(name, 0) > now
            and abs(now - time_of(generation)) <= _JUST_NOW
        )

    def _judge_named(
        self, name: str, headers: Mapping[str, Any], amended: _Amended | None, now: int
    ) -> Verdict | None:
        key, replaces = headers.get(KEY), headers.get(REPLACES)
        generation = headers.get(GENERATION)
        verdict = None
        if isinstance(generation, str):
            # What has a key and no generation was published by somebody who knows of neither.
            if isinstance(key, str):
                verdict = self._judge_generation(self._keyed.get(key), generation, now)
                verdict = verdict and verdict._replace(by_key=True)
            if isinstance(replaces, str):
                replaced = self._amended.get(replaces)
                verdict = self._judge_generation(replaced, generation, now) or verdict
        if amended is not None and not (isinstance(generation, str) and replaces == name):
            # A task that replaces itself by another, as Celery's can, goes on under its id.
            is_first = not headers.get("replaced_task_nesting")
            verdict = self._judge_first(amended, is_first=is_first) or verdict
        return verdict

    def _judge_generation(
        self, valid: _Amended | None, generation: str, now: int
    ) -> Verdict | None:
        if generation in self._superseded:
            return Verdict(SUPERSEDED)
        if valid is None or generation in self._kept:
            return None
        if generation == valid.generation:
            return Verdict(CANCELLED) if valid.cancelled else None
        return Verdict(SUPERSEDED) if self._is_older(generation, valid, now) else None

    @staticmethod
    def _judge_first(amended: _Amended, *, is_first: bool) -> Verdict | None:
        if amended.generation and is_first:
            return Verdict(SUPERSEDED)
        return Verdict(CANCELLED) if amended.cancelled else None

    def inherit(self, before: Memory) -> None:
        """Take over what another memory knows besides: its stream may have been deleted since."""
        for name, until in before._cancelled.items():
            if name not in self._amended:
                self._cancelled.setdefault(name, until)
        for name, amended in before._amended.items():
            if name not in self._cancelled:
                self._take_over(self._amended, name, amended)
        for name, amended in before._keyed.items():
            self._take_over(self._keyed, name, amended)
        self._stamped = {**before._stamped, **self._stamped}
        self._superseded = {**before._superseded, **self._superseded}
        self._kept = {**before._kept, **self._kept}

    def _take_over(self, known: dict[str, _Amended], name: str, amended: _Amended) -> None:
        valid = known.setdefault(name, amended)
        before = amended.generation
        if before and valid.generation and valid.generation != before:
            # What was valid before the stream was deleted is superseded by what is in it now.
            self._superseded.setdefault(before, amended.due + _ON_ITS_WAY)

    def _of(self, name: str, until: int, *, keyed: bool = False) -> _Amended:
        known = self._keyed if keyed else self._amended
        amended = known.get(name)
        if amended is None:
            amended = known[name] = _Amended()
            if not keyed:
                amended.until = self._cancelled.pop(name, 0)
                amended.cancelled = amended.until > 0
        amended.until = max(amended.until, until)
        return amended

    def _cancel(self, name: str, until: int) -> None:
        if name in self._amended:
            self._of(name, until).cancelled = True
        else:
            self._cancelled[name] = max(self._cancelled.get(name, 0), until)

    def _supersede(self, record: Supersede, until: int, now: int) -> None:
        amended = self._of(record.name, until, keyed=record.keyed)
        before, due = amended.generation, amended.due
        if record.generation == before or record.generation in self._superseded:
            return
        first = record.at
        if before:
            # Who would put off the first for longer than it may wait begins anew.
            limit = record.longest_wait
            waits = record.at < due
            if limit is None or (waits and record.due <= amended.first + limit):
                # What its time does not tell to be older must be remembered for as long as the key.
                is_older = time_of(before) < record.at
                self._superseded[before] = (
                    max(due, now) + _ON_ITS_WAY if is_older else amended.until
                )
                first = amended.first if waits else first
            else:
                self._kept[before] = amended.until
        amended.generation, amended.at, amended.due = record.generation, record.at, record.due
        amended.first = first
        amended.revived = amended.revived or amended.cancelled
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

    def _rounded(self, until: int) -> int:
        """Return the end of a time's minute: one object for all records of that minute."""
        until += -until % _ROUND
        if until != self._until:
            self._until = until
        return self._until

    def _forget(self, now: int) -> None:
        self._forgotten = now
        for each in (self._cancelled, self._stamped, self._superseded, self._kept):
            _drop_until(each, now)
        for known in (self._amended, self._keyed):
            for name in [name for name, each in known.items() if each.until <= now]:
                del known[name]


def _drop_until(remembered: dict[Any, int], now: int) -> None:
    for name in [name for name, until in remembered.items() if until <= now]:
        del remembered[name]
