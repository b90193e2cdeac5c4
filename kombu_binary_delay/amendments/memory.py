"""The amendments that one consuming connection has read, and what they do to a message. Pure.

A message that no record names always passes. Records expire by time only: a record counts until the
due time that it names (or else the time it was written), and then for as long as the stream keeps
records.

Records with ids and records with keys come by two streams, which have no common order. So there are
two memories of :mod:`.names`, and a message that has a key and replaces an id is judged by both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kombu_binary_delay.ladder.identity import id_and_headers
from kombu_binary_delay.settings import milliseconds

from .names import CANCELLED, POSTPONED, SUPERSEDED, UNSURE, Fate, Ids, Known, Names, forget
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

__all__ = ["CANCELLED", "POSTPONED", "SUPERSEDED", "Fate", "Memory"]

#: How long a key is remembered after its message was due, in milliseconds: as its stream does.
_KEYS_MAX_AGE = milliseconds(KEYS_MAX_AGE)
#: The greatest age, by its publisher's clock, of a message whose record may still be on its way, in
#: milliseconds.
_JUST_NOW = 60_000
#: How often to remove expired amendments, in milliseconds.
_FORGET_EVERY = 60_000
#: The expiry times of amendments are rounded up to a multiple of this, in milliseconds.
_ROUND = 60_000


class Memory:
    """The amendments that one connection knows.

    :param max_age: how long the stream of ids keeps records, in milliseconds.
    """

    def __init__(self, max_age: int) -> None:
        self._ids = Ids(max_age)
        self._keys = Names(min(_KEYS_MAX_AGE, max_age))
        #: The expiry times of revoked stamps, by their names and values.
        self._stamped: dict[tuple[str, str], int] = {}
        self._forgotten = self._until = 0

    def __len__(self) -> int:
        """Return how many amendments are active."""
        return len(self._ids) + len(self._keys) + len(self._stamped)

    def __bool__(self) -> bool:
        """Return whether any amendment is active; each delivery asks."""
        return bool(self._ids or self._stamped or self._keys)

    def learn(self, record: Record, now: int, *, came_by_ladder: bool = False) -> None:
        """Add the next record of a stream.

        :param now: milliseconds since the epoch.
        :param came_by_ladder: whether it waited there, so that others may have overtaken it.
        """
        # A writer's clock that is ahead must not make a record stay forever.
        written = min(record.at, now)
        due = getattr(record, "due", None)
        names = self._keys if getattr(record, "keyed", False) else self._ids
        until = max(written, due or 0) + names.max_age
        if until <= now and isinstance(record, Cancel):
            # Of what is known for longer, it stays cancelled as long.
            known = tuple(name for name in record.names if names.find(name, now))
            record, until = replace(record, names=known), now + 1
        if until > now:
            self._note(record, names, self._rounded(until), now, came_by_ladder=came_by_ladder)
        if now - self._forgotten > _FORGET_EVERY or now < self._forgotten:
            self._forget(now)

    def _note(
        self, record: Record, names: Names, until: int, now: int, *, came_by_ladder: bool
    ) -> None:
        match record:
            case Cancel():
                cancel = record if record.at <= now else replace(record, at=now)
                for name in cancel.names:
                    names.cancel(name, cancel, until, now, came_by_ladder=came_by_ladder)
            case CancelStamped():
                for stamp, values in record.stamps:
                    self._stamped.update(dict.fromkeys([(stamp, value) for value in values], until))
            case Postpone():
                names.known(record.name, until, now).postponed = record.due
            case Supersede():
                names.supersede(record, until, now)

    def judge(self, properties: Mapping[str, Any], now: int) -> Fate | None:
        """Return what happens to a message that arrives; None if it passes.

        :param properties: as it was published.
        :param now: milliseconds since the epoch.
        """
        name, headers = id_and_headers(properties)
        known = self._ids.find(name, now)
        if known is not None or GENERATION in headers:
            fate = self._judge_named(name, headers, known, now)
            if fate is not None:
                return fate
        if self._stamped and self._has_stamp(headers, now):
            return Fate(CANCELLED)
        if self._ids.is_cancelled(name, now) and not self._is_unrecorded(properties, now):
            return Fate(CANCELLED)
        if known is not None and known.postponed > now:
            return Fate(POSTPONED, known.postponed)
        return None

    def _judge_named(
        self, name: str, headers: Mapping[str, Any], known: Known | None, now: int
    ) -> Fate | None:
        replaces, generation = headers.get(REPLACES), headers.get(GENERATION)
        fate = None
        # A message with a key but no generation comes from a program without this transport.
        if isinstance(generation, str):
            if (valid := self._keys.find(headers.get(KEY), now)) is not None:
                fate = valid.fate(generation, now)
                fate = fate and fate._replace(by_key=True)
            if (valid := self._ids.find(replaces, now)) is not None:
                fate = valid.fate(generation, now) or fate
        if known is not None and not (isinstance(generation, str) and replaces == name):
            # A task that calls Celery's replace() continues under its id.
            is_first = not headers.get(NESTING)
            fate = known.fate_without_generation(is_first=is_first) or fate
        return fate

    def revives(self, properties: Mapping[str, Any], now: int) -> bool:
        """Return whether a message that passes replaces one that was cancelled before.

        :param now: milliseconds since the epoch.
        """
        name, headers = id_and_headers(properties)
        known = self._ids.find(name, now)
        if known is None:
            return self._is_unrecorded(properties, now)
        return known.revived and not known.cancelled and headers.get(GENERATION) == known.generation

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
        return began is not None and began <= now + UNSURE

    def _replaced_cancelled(self, properties: Mapping[str, Any], now: int) -> int | None:
        """Return when a message claims to have replaced one that was cancelled before; else None.

        :returns: milliseconds since the epoch; None also if its record was read.
        """
        name, headers = id_and_headers(properties)
        generation = headers.get(GENERATION)
        # With the record, the id is not only cancelled.
        if not self._ids.is_cancelled(name, now) or headers.get(REPLACES) != name:
            return None
        if not isinstance(generation, str):
            return None
        began = time_of(generation)
        return began if began + UNSURE >= self._ids.cancelled_since(name) else None

    def inherit(self, before: Memory, now: int) -> None:
        """Add what an earlier memory knew: its stream may have been deleted since.

        :param now: milliseconds since the epoch.
        """
        before._forget(now)
        self._forget(now)
        self._ids.inherit(before._ids)
        self._keys.inherit(before._keys)
        self._stamped = {**before._stamped, **self._stamped}

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
        self._ids.forget(now)
        self._keys.forget(now)
        forget(self._stamped, now)
