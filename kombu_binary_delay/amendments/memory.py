"""The amendments that one consuming connection has read, and what they do to a message. Pure.

A message that no record names always passes. Records expire by time only: a record counts until the
due time that it names (or else the time it was written), and then for as long as the stream keeps
records.

Records with ids and records with keys come by two streams, which have no common order. So what is
known of an id depends on the records of that id only, in their order, and what is known of a key
likewise. A message that has a key and replaces an id is judged by both.

Of the messages with one key, the *valid* one is that of the last record in the order of the stream,
which is the same for all consumers and depends on no clock. The generations that it supersedes are
remembered while their messages can still arrive. One that arrives much later, after an outage, is
recognised by the time in its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kombu_binary_delay.ladder.identity import names_of
from kombu_binary_delay.settings import milliseconds

from .parts import KEYS_MAX_AGE
from .record import (
    GENERATION,
    KEY,
    NESTING,
    REPLACES,
    Cancel,
    CancelStamped,
    Postpone,
    Record,
    Supersede,
    stamps_of,
    time_of,
)

#: How long a superseded generation is remembered after its message was due, in milliseconds.
_ON_ITS_WAY = 600_000
#: How long a key is remembered after its message was due, in milliseconds: as its stream does.
_KEYS_MAX_AGE = milliseconds(KEYS_MAX_AGE)
#: The greatest age, by its publisher's clock, of a message whose record may still be on its way, in
#: milliseconds.
_JUST_NOW = 60_000
#: How much the times of a cancellation and of a replacement may be wrong, in milliseconds: by the
#: clocks that wrote them, and by `_ROUND`.
_UNSURE = 60_000
#: How often to remove expired amendments, in milliseconds.
_FORGET_EVERY = 60_000
#: The expiry times of amendments are rounded up to a multiple of this, in milliseconds.
_ROUND = 60_000

CANCELLED = "cancelled"
SUPERSEDED = "superseded"
POSTPONED = "postponed"


class Verdict(NamedTuple):
    """What happens to an amended message.

    :param reason: ``cancelled`` and ``superseded`` are dropped, ``postponed`` is delayed again.
    :param due: of a postponed message, in milliseconds since the epoch.
    :param by_key: whether the amendment names its key, not its id.
    """

    reason: str
    due: int = 0
    by_key: bool = False


class _Amended:
    """What is known of one id or key, apart from cancellations."""

    __slots__ = (
        "at",
        "called_off",
        "cancelled",
        "due",
        "first",
        "generation",
        "kept",
        "postponed",
        "revived",
        "superseded",
        "until",
    )

    def __init__(self) -> None:
        #: The only valid generation; empty if none supersedes the first message.
        self.generation = ""
        #: When it was published, when it is due, and when the first message that it postpones was.
        self.at = self.due = self.first = 0
        self.cancelled = False
        #: Whether the valid one came after a cancellation.
        self.revived = False
        self.postponed = 0
        self.until = 0
        #: Earlier generations that do not run, and how long to remember them.
        self.superseded: dict[str, int] = {}
        #: Those that still run although a later one is valid.
        self.kept: dict[str, int] = {}
        #: Those of the latter that were cancelled with their key.
        self.called_off: dict[str, int] = {}

    def knows(self, generation: str, now: int) -> bool:
        """Return whether the record of this generation was read."""
        return generation == self.generation or any(
            each.get(generation, 0) > now for each in (self.superseded, self.kept, self.called_off)
        )

    def cancel(self) -> None:
        """Cancel the valid one and those that are kept."""
        self.cancelled = True
        self.called_off.update(self.kept)
        self.kept = {}


class Memory:
    """The amendments that one connection knows.

    :param max_age: how long the stream keeps records, in milliseconds.
    """

    def __init__(self, max_age: int) -> None:
        self._max_age = max_age
        #: The expiry time of each cancelled name. Most records are of this kind.
        self._cancelled: dict[str, int] = {}
        #: When those of them were cancelled that are remembered for longer than others.
        self._cancelled_at: dict[str, int] = {}
        self._stamped: dict[tuple[str, str], int] = {}
        self._amended: dict[str, _Amended] = {}
        self._keyed: dict[str, _Amended] = {}
        self._forgotten = self._until = 0

    def __len__(self) -> int:
        """Return how many amendments are active."""
        ids = len(self._cancelled) + len(self._amended)
        return ids + len(self._stamped) + len(self._keyed)

    def __bool__(self) -> bool:
        """Return whether any amendment is active; each delivery asks."""
        return bool(self._cancelled or self._amended or self._stamped or self._keyed)

    def learn(self, record: Record, now: int, *, rode: bool = False) -> None:
        """Add the next record of a stream.

        :param now: milliseconds since the epoch.
        :param rode: whether it waited on the ladder, so that others may have overtaken it.
        """
        # A writer's clock that is ahead must not make a record stay forever.
        written = min(record.at, now)
        due = getattr(record, "due", None)
        keyed = getattr(record, "keyed", False)
        max_age = min(_KEYS_MAX_AGE, self._max_age) if keyed else self._max_age
        until = max(written, due or 0) + max_age
        if until <= now and isinstance(record, Cancel):
            # Of what is known for longer, it stays cancelled as long.
            keyed = record.keyed
            names = (each for each in record.names if self._find(each, now, keyed=keyed))
            record = replace(record, names=tuple(names))
            until = now + 1 if record.names else 0
        if until > now:
            self._note(record, self._rounded(until), now, rode=rode)
        if now - self._forgotten > _FORGET_EVERY or now < self._forgotten:
            self._forget(now)

    def _note(self, record: Record, until: int, now: int, *, rode: bool) -> None:
        match record:
            case Cancel():
                cancel = record if record.at <= now else replace(record, at=now)
                for name in cancel.names:
                    self._cancel(name, cancel, until, now, rode=rode)
            case CancelStamped():
                for stamp, values in record.stamps:
                    self._stamped.update(dict.fromkeys([(stamp, each) for each in values], until))
            case Postpone():
                self._of(record.name, until, now).postponed = record.due
            case Supersede():
                self._supersede(record, until, now)

    def judge(self, properties: Mapping[str, Any], now: int) -> Verdict | None:
        """Return what happens to a message that arrives; None if it passes.

        :param properties: as it was published.
        :param now: milliseconds since the epoch.
        """
        name, headers = names_of(properties)
        amended = self._amended.get(name)
        if amended is not None and amended.until <= now:
            amended = None
        if amended is not None or GENERATION in headers:
            verdict = self._judge_named(name, headers, amended, now)
            if verdict is not None:
                return verdict
        if self._stamped and self._has_stamp(headers, now):
            return Verdict(CANCELLED)
        if self._cancelled.get(name, 0) > now and not self._is_unrecorded(properties, now):
            return Verdict(CANCELLED)
        if amended is not None and amended.postponed > now:
            return Verdict(POSTPONED, amended.postponed)
        return None

    def revives(self, properties: Mapping[str, Any], now: int) -> bool:
        """Return whether a message that passes replaces one that was cancelled before.

        :param now: milliseconds since the epoch.
        """
        name, headers = names_of(properties)
        amended = self._find(name, now)
        if amended is None:
            return self._is_unrecorded(properties, now)
        return (
            amended.revived
            and not amended.cancelled
            and headers.get(GENERATION) == amended.generation
        )

    def awaits_record(self, properties: Mapping[str, Any], now: int) -> bool:
        """Return whether a message has just replaced a cancelled one, by a record still unread.

        :param now: milliseconds since the epoch.
        """
        began = self._replaced_cancelled(properties, now)
        # A publisher's clock may be ahead.
        return began is not None and now - began <= _JUST_NOW

    def _is_unrecorded(self, properties: Mapping[str, Any], now: int) -> bool:
        """Whether a message has replaced a cancelled one, by a record that was not read.

        It passes: where the record never comes, both run rather than none. One that claims to be of
        a time to come does not: whoever publishes a message could make it run in spite of any
        cancellation.
        """
        began = self._replaced_cancelled(properties, now)
        return began is not None and began <= now + _UNSURE

    def _replaced_cancelled(self, properties: Mapping[str, Any], now: int) -> int | None:
        """Return when a message claims to have replaced one that was cancelled before; else None.

        :returns: milliseconds since the epoch; None also if its record was read.
        """
        name, headers = names_of(properties)
        generation = headers.get(GENERATION)
        # With the record, it is no longer among these.
        until = self._cancelled.get(name, 0)
        if until <= now or not isinstance(generation, str) or headers.get(REPLACES) != name:
            return None
        began = time_of(generation)
        return began if began + _UNSURE >= self._cancelled_since(name) else None

    def _cancelled_since(self, name: str) -> int:
        at = self._cancelled_at.get(name)
        return self._cancelled.get(name, 0) - self._max_age if at is None else at

    def _judge_named(
        self, name: str, headers: Mapping[str, Any], amended: _Amended | None, now: int
    ) -> Verdict | None:
        key, replaces = headers.get(KEY), headers.get(REPLACES)
        generation = headers.get(GENERATION)
        verdict = None
        if isinstance(generation, str):
            # A message with a key but no generation comes from a program without this transport.
            if isinstance(key, str):
                keyed = self._find(key, now, keyed=True)
                verdict = self._judge_generation(keyed, generation, now)
                verdict = verdict and verdict._replace(by_key=True)
            if isinstance(replaces, str):
                replaced = self._find(replaces, now)
                verdict = self._judge_generation(replaced, generation, now) or verdict
        if amended is not None and not (isinstance(generation, str) and replaces == name):
            # A task that calls Celery's replace() continues under its id.
            is_first = not headers.get(NESTING)
            verdict = self._judge_first(amended, is_first=is_first) or verdict
        return verdict

    def _judge_generation(
        self, valid: _Amended | None, generation: str, now: int
    ) -> Verdict | None:
        if valid is None:
            return None
        if generation == valid.generation:
            return Verdict(CANCELLED) if valid.cancelled else None
        if valid.superseded.get(generation, 0) > now:
            return Verdict(SUPERSEDED)
        if valid.kept.get(generation, 0) > now:
            return None
        if valid.called_off.get(generation, 0) > now:
            return Verdict(CANCELLED)
        return Verdict(SUPERSEDED) if self._is_older(generation, valid, now) else None

    @staticmethod
    def _judge_first(amended: _Amended, *, is_first: bool) -> Verdict | None:
        if amended.generation and is_first:
            return Verdict(SUPERSEDED)
        return Verdict(CANCELLED) if amended.cancelled else None

    def inherit(self, before: Memory, now: int) -> None:
        """Add what an earlier memory knew: its stream may have been deleted since.

        :param now: milliseconds since the epoch.
        """
        before._forget(now)
        self._forget(now)
        since = {
            name: max(self._cancelled_since(name), before._cancelled_since(name))
            for name in {*self._cancelled_at, *before._cancelled_at}
        }
        for name, until in before._cancelled.items():
            amended = self._amended.get(name)
            if amended is None:
                self._cancelled[name] = max(self._cancelled.get(name, 0), until)
                continue
            amended.until = max(amended.until, until)
            # What was read since replaces it, or only postpones it.
            if amended.generation:
                amended.revived = True
            else:
                amended.cancelled = True
        self._cancelled_at = {name: since[name] for name in since if name in self._cancelled}
        for name, amended in before._amended.items():
            if name not in self._cancelled:
                self._take_over(self._amended, name, amended)
        for name, amended in before._keyed.items():
            self._take_over(self._keyed, name, amended)
        self._stamped = {**before._stamped, **self._stamped}

    @staticmethod
    def _take_over(known: dict[str, _Amended], name: str, amended: _Amended) -> None:
        valid = known.setdefault(name, amended)
        if valid.generation in {"", amended.generation}:
            # What was read since says nothing new of which one is valid.
            for each in ("generation", "at", "due", "first", "revived"):
                setattr(valid, each, getattr(amended, each))
            valid.cancelled = valid.cancelled or amended.cancelled
            valid.postponed = valid.postponed or amended.postponed
            valid.until = max(valid.until, amended.until)
        valid.called_off = {**amended.called_off, **valid.called_off}
        kept = {**amended.kept, **valid.kept}
        valid.kept = {each: kept[each] for each in kept if each not in valid.called_off}
        valid.superseded = {**amended.superseded, **valid.superseded}
        # Its record was written again, after the stream was deleted.
        valid.superseded.pop(valid.generation, None)
        before = amended.generation
        is_known = before in valid.kept or before in valid.called_off
        if before and valid.generation and valid.generation != before and not is_known:
            # A generation from before the stream was deleted is superseded by the one in it now.
            valid.superseded.setdefault(before, amended.due + _ON_ITS_WAY)

    def _find(self, name: str, now: int, *, keyed: bool = False) -> _Amended | None:
        amended = (self._keyed if keyed else self._amended).get(name)
        return amended if amended is not None and amended.until > now else None

    def _of(self, name: str, until: int, now: int, *, keyed: bool = False) -> _Amended:
        amended = self._find(name, now, keyed=keyed)
        if amended is None:
            amended = (self._keyed if keyed else self._amended)[name] = _Amended()
            if not keyed:
                amended.until = self._cancelled.pop(name, 0)
                amended.cancelled = amended.until > now
                self._cancelled_at.pop(name, None)
        amended.until = max(amended.until, until)
        return amended

    def _cancel(self, name: str, record: Cancel, until: int, now: int, *, rode: bool) -> None:
        amended = self._find(name, now, keyed=record.keyed)
        if record.keyed:
            # A key without a record has nothing to cancel: its record would have come before.
            if amended is not None:
                amended.cancel()
        elif amended is None:
            known = self._cancelled.get(name, 0)
            if known <= now:
                self._cancelled_at.pop(name, None)
            self._cancelled[name] = max(known, until)
            if record.due is not None or name in self._cancelled_at:
                self._cancelled_at[name] = max(self._cancelled_at.get(name, 0), record.at)
        elif not (rode and amended.generation and amended.at + _UNSURE > record.at):
            # Otherwise the message that it names has been replaced since.
            self._of(name, until, now).cancelled = True

    def _supersede(self, record: Supersede, until: int, now: int) -> None:
        amended = self._of(record.name, until, now, keyed=record.keyed)
        before, due = amended.generation, amended.due
        if amended.knows(record.generation, now):
            # It was written twice.
            return
        # A writer's clock that is ahead must not make others look old.
        at = min(record.at, now)
        first = record.at
        if before:
            # A message that would postpone the first beyond the longest wait starts a new series.
            limit = record.longest_wait
            waits = record.at < due and not amended.cancelled
            if (
                limit is None
                or amended.cancelled
                or (waits and record.due <= amended.first + limit)
            ):
                # Unless its time shows that it is older, remember it for as long as the key.
                is_older = time_of(before) < at
                forget_at = max(due, now) + _ON_ITS_WAY if is_older else amended.until
                amended.superseded[before] = forget_at
                amended.until = max(amended.until, forget_at)
                first = amended.first if waits else first
            else:
                amended.kept[before] = amended.until
        amended.generation, amended.at, amended.due = record.generation, at, record.due
        amended.first = first
        amended.revived = amended.revived or amended.cancelled
        amended.cancelled, amended.postponed = False, 0

    @staticmethod
    def _is_older(generation: str, valid: _Amended, now: int) -> bool:
        """Whether an unknown generation was superseded so long ago that it is forgotten.

        Otherwise it may be so new that its record has not been read.
        """
        published = time_of(generation)
        return bool(valid.generation) and published + _ON_ITS_WAY < now and published < valid.at

    def _has_stamp(self, headers: Mapping[str, Any], now: int) -> bool:
        return any(
            self._stamped.get((name, value), 0) > now
            for name, values in stamps_of(headers).items()
            for value in values
        )

    def _rounded(self, until: int) -> int:
        """Return the end of a time's minute; all records of that minute share the object."""
        until += -until % _ROUND
        if until != self._until:
            self._until = until
        return self._until

    def _forget(self, now: int) -> None:
        self._forgotten = now
        for each in (self._cancelled, self._stamped):
            _drop_until(each, now)
        self._cancelled_at = {
            name: at for name, at in self._cancelled_at.items() if name in self._cancelled
        }
        for known in (self._amended, self._keyed):
            for name in [name for name, each in known.items() if each.until <= now]:
                del known[name]
            for amended in known.values():
                for dropped in (amended.superseded, amended.kept, amended.called_off):
                    if dropped:
                        _drop_until(dropped, now)


def _drop_until(remembered: dict[Any, int], now: int) -> None:
    for name in [name for name, until in remembered.items() if until <= now]:
        del remembered[name]
