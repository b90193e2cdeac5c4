"""What the records of one stream say of its names: of ids, or of keys. Pure.

It depends on the records of a name only, in the order of their stream.

Of the messages with one name, the *valid* one is that of the last record in that order, which is
the same for all consumers and depends on no clock. The generations that it supersedes are
remembered while their messages can still arrive. One that arrives much later, after an outage, is
recognised by the time in its name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .record import Cancel, Supersede, time_of

#: How long a superseded generation is remembered after its message was due, in milliseconds.
ON_ITS_WAY = 600_000
#: How much the times of a cancellation and of a replacement may be wrong, in milliseconds: by the
#: clocks that wrote them, and by the minutes in which expiry times are kept.
UNSURE = 60_000

CANCELLED = "cancelled"
SUPERSEDED = "superseded"
POSTPONED = "postponed"
#: Not amended: it came too late.
EXPIRED = "expired"


class Fate(NamedTuple):
    """What happens to an amended message.

    :param reason: ``cancelled``, ``superseded`` and ``expired`` are dropped, ``postponed`` is
        delayed again.
    :param due: of a postponed message, in milliseconds since the epoch.
    :param by_key: whether the amendment names its key, not its id.
    """

    reason: str
    due: int = 0
    by_key: bool = False


class Known:
    """What is known of one name."""

    __slots__ = (
        "at",
        "cancelled",
        "cancelled_kept",
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
        #: Those of the latter that were cancelled with their name.
        self.cancelled_kept: dict[str, int] = {}

    def has(self, generation: str, now: int) -> bool:
        """Return whether the record of this generation was read."""
        earlier = self.superseded, self.kept, self.cancelled_kept
        return generation == self.generation or any(
            generations.get(generation, 0) > now for generations in earlier
        )

    def cancel(self) -> None:
        """Cancel the valid one and those that are kept."""
        self.cancelled = True
        self.cancelled_kept.update(self.kept)
        self.kept = {}

    def fate(self, generation: str, now: int) -> Fate | None:
        """Return what happens to the message of a generation; None if it passes."""
        if generation == self.generation:
            return Fate(CANCELLED) if self.cancelled else None
        if self.superseded.get(generation, 0) > now:
            return Fate(SUPERSEDED)
        if self.kept.get(generation, 0) > now:
            return None
        if self.cancelled_kept.get(generation, 0) > now:
            return Fate(CANCELLED)
        # It may be forgotten, as it was superseded so long ago; or its record was not read yet.
        began = time_of(generation)
        is_older = bool(self.generation) and began + ON_ITS_WAY < now and began < self.at
        return Fate(SUPERSEDED) if is_older else None

    def fate_without_generation(self, *, is_first: bool) -> Fate | None:
        """Return what happens to a message that has none.

        :param is_first: whether it is the first with its id, and not what continues it.
        """
        if self.generation and is_first:
            return Fate(SUPERSEDED)
        return Fate(CANCELLED) if self.cancelled else None

    def supersede(self, record: Supersede, now: int) -> None:
        """Make the generation of a record the valid one."""
        before, due = self.generation, self.due
        if self.has(record.generation, now):
            # It was written twice.
            return
        # A writer's clock that is ahead must not make others look old.
        at = min(record.at, now)
        first = record.at
        if before:
            # A message that would postpone the first beyond the longest wait starts a new series.
            limit = record.longest_wait
            waits = record.at < due and not self.cancelled
            if limit is None or self.cancelled or (waits and record.due <= self.first + limit):
                # Unless its time shows that it is older, remember it for as long as the name.
                is_older = time_of(before) < at
                forget_at = max(due, now) + ON_ITS_WAY if is_older else self.until
                self.superseded[before] = forget_at
                self.until = max(self.until, forget_at)
                first = self.first if waits else first
            else:
                self.kept[before] = self.until
        self.generation, self.at, self.due = record.generation, at, record.due
        self.first = first
        self.revived = self.revived or self.cancelled
        self.cancelled, self.postponed = False, 0

    def inherit(self, before: Known) -> None:
        """Add what was known before the stream was deleted."""
        if self.generation in {"", before.generation}:
            # What was read since says nothing new of which one is valid.
            for field in ("generation", "at", "due", "first", "revived"):
                setattr(self, field, getattr(before, field))
            self.cancelled = self.cancelled or before.cancelled
            self.postponed = self.postponed or before.postponed
            self.until = max(self.until, before.until)
        self.cancelled_kept = {**before.cancelled_kept, **self.cancelled_kept}
        kept = {**before.kept, **self.kept}
        self.kept = {name: kept[name] for name in kept if name not in self.cancelled_kept}
        self.superseded = {**before.superseded, **self.superseded}
        # Its record was written again, after the stream was deleted.
        self.superseded.pop(self.generation, None)
        earlier = before.generation
        is_known = earlier in self.kept or earlier in self.cancelled_kept
        if earlier and self.generation and self.generation != earlier and not is_known:
            # A generation from before the stream was deleted is superseded by the one in it now.
            self.superseded.setdefault(earlier, before.due + ON_ITS_WAY)

    def forget(self, now: int) -> None:
        """Remove the generations that have expired."""
        for generations in (self.superseded, self.kept, self.cancelled_kept):
            if generations:
                forget(generations, now)


class Names:
    """What the records of one stream say of its names.

    :param max_age: how long the stream keeps records, in milliseconds.
    """

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age
        self._known: dict[str, Known] = {}

    def __len__(self) -> int:
        """Return how many names have active amendments."""
        return len(self._known)

    def find(self, name: object, now: int) -> Known | None:
        """Return what is known of a name; None if nothing."""
        known = self._known.get(name) if isinstance(name, str) else None
        return known if known is not None and known.until > now else None

    def known(self, name: str, until: int, now: int) -> Known:
        """Return what is known of a name, to be remembered until a time."""
        known = self.find(name, now)
        if known is None:
            known = self._known[name] = Known()
        known.until = max(known.until, until)
        return known

    def cancel(
        self, name: str, record: Cancel, until: int, now: int, *, came_by_ladder: bool
    ) -> None:
        """Cancel what has a name.

        :param came_by_ladder: whether other records may have overtaken this one.
        """
        known = self.find(name, now)
        if known is None:
            self._cancel_unknown(name, record, until)
        elif not (came_by_ladder and known.generation and known.at + UNSURE > record.at):
            # Otherwise the message that it names has been replaced since.
            known.cancel()
            known.until = max(known.until, until)

    def _cancel_unknown(self, name: str, record: Cancel, until: int) -> None:
        """Cancel a name without a record: there is no message, as its record would come before."""

    def supersede(self, record: Supersede, until: int, now: int) -> None:
        """Make the generation of a record the valid one of its name."""
        self.known(record.name, until, now).supersede(record, now)

    def inherit(self, before: Any) -> None:
        """Add what an earlier memory of the same kind knew: its stream may have been deleted."""
        for name, known in before._known.items():  # noqa: SLF001 - of another of these
            self._known.setdefault(name, known).inherit(known)

    def forget(self, now: int) -> None:
        """Remove what has expired."""
        for name in [name for name, known in self._known.items() if known.until <= now]:
            del self._known[name]
        for known in self._known.values():
            known.forget(now)


class Ids(Names):
    """The same of ids, of which most are only cancelled: their messages have no other record."""

    def __init__(self, max_age: int) -> None:
        super().__init__(max_age)
        #: The expiry times of those.
        self._cancelled: dict[str, int] = {}
        #: When those of them were cancelled that are remembered for longer than others.
        self._cancelled_at: dict[str, int] = {}

    def __len__(self) -> int:
        """Return how many ids have active amendments."""
        return len(self._cancelled) + super().__len__()

    def is_cancelled(self, name: str, now: int) -> bool:
        """Return whether this is all that is known of an id."""
        return self._cancelled.get(name, 0) > now

    def cancelled_since(self, name: str) -> int:
        """Return when such an id was cancelled, or until when it may have been."""
        at = self._cancelled_at.get(name)
        return self._cancelled.get(name, 0) - self.max_age if at is None else at

    def known(self, name: str, until: int, now: int) -> Known:
        """Return what is known of an id; if it was cancelled, that is part of it from now on."""
        is_new = self.find(name, now) is None
        known = super().known(name, until, now)
        if is_new:
            cancelled_until = self._cancelled.pop(name, 0)
            self._cancelled_at.pop(name, None)
            known.cancelled = cancelled_until > now
            known.until = max(known.until, cancelled_until)
        return known

    def _cancel_unknown(self, name: str, record: Cancel, until: int) -> None:
        self._cancelled[name] = max(self._cancelled.get(name, 0), until)
        if record.due is not None or name in self._cancelled_at:
            self._cancelled_at[name] = max(self._cancelled_at.get(name, 0), record.at)

    def inherit(self, before: Ids) -> None:
        """Add what an earlier memory knew: its stream may have been deleted."""
        since = {
            name: max(self.cancelled_since(name), before.cancelled_since(name))
            for name in {*self._cancelled_at, *before._cancelled_at}
        }
        for name, until in before._cancelled.items():
            known = self._known.get(name)
            if known is None:
                self._cancelled[name] = max(self._cancelled.get(name, 0), until)
                continue
            known.until = max(known.until, until)
            # What was read since replaces it, or only postpones it.
            if known.generation:
                known.revived = True
            else:
                known.cancelled = True
        self._cancelled_at = {name: since[name] for name in since if name in self._cancelled}
        for name, known in before._known.items():
            if name not in self._cancelled:
                self._known.setdefault(name, known).inherit(known)

    def forget(self, now: int) -> None:
        """Remove what has expired."""
        super().forget(now)
        forget(self._cancelled, now)
        self._cancelled_at = {
            name: at for name, at in self._cancelled_at.items() if name in self._cancelled
        }


def forget(remembered: dict[Any, int], now: int) -> None:
    """Remove what has expired, by the expiry times that are the values."""
    for name in [name for name, until in remembered.items() if until <= now]:
        del remembered[name]
