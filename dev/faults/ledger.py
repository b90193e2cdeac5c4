"""Purpose: what happened to each message, and the verdict on it.

Every program appends to a file of its own. A line is one `write` to a file opened for appending:
what is written stays when the process is killed in the next instant, as the kernel has it then. So
the ledger is honest if a program writes at the right moments: `sent` before a publish, `confirmed`
after it returned, `delivered` before anything is done with a message, `done` before its ack.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SENT = "sent"
CONFIRMED = "confirmed"
#: The publish raised: whether the broker took the message is not known.
FAILED = "failed"
DELIVERED = "delivered"
DONE = "done"
#: A program is about to cancel it, has the confirm of that, or was not given the message.
CANCELLING = "cancelling"
CANCELLED = "cancelled"
DROPPED = "dropped"
#: Seconds from the confirm of an amendment until every consumer has it: one that has met none yet
#: looks once a second. What is due later has left the ladder later; when its consumer wrote down
#: that it came says more about the machine.
LAG = 1.5

Entry = dict[str, Any]
#: The machine's clock, whatever a program makes of its own.
_now = time.time


@dataclass(frozen=True)
class Book:
    """One program's part of the ledger."""

    path: Path

    def write(self, event: str, message: str, **more: object) -> None:
        """Append an event of a message; it outlives this process."""
        entry = {"event": event, "id": message, "at": _now(), **more}
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(handle)

    def entries(self) -> list[Entry]:
        """Read all entries; a line that is still being written is left out."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_bytes().split(b"\n")[:-1]]


@dataclass(frozen=True)
class Verdict:
    """The summary of a ledger. Times are in seconds."""

    confirmed: int
    refused: int  # the publish raised, and the publisher knows
    delivered: int
    lost: tuple[str, ...]  # confirmed, belonging somewhere, and never done
    early: tuple[str, ...]
    misdelivered: tuple[str, ...]  # in another queue, or with other contents
    duplicates: int
    amended: int  # cancelled, or superseded by a later one with the same key; confirmed
    ran: tuple[str, ...]  # and delivered, though due later than that
    dropped: tuple[str, ...]  # though nobody had amended it
    lateness: tuple[float, ...]  # of the first delivery of each message, sorted

    @property
    def is_clean(self) -> bool:
        """Whether no confirmed message was lost, early or misdelivered, and amendments held."""
        return not (self.lost or self.early or self.misdelivered or self.ran or self.dropped)

    def late(self, share: float) -> float:
        """Return the lateness that this share of the messages does not exceed."""
        if not self.lateness:
            return 0.0
        return self.lateness[min(len(self.lateness) - 1, int(share * len(self.lateness)))]


def judge(entries: Iterable[Entry], *, ahead: float = 0.0) -> Verdict:
    """Read a ledger.

    :param ahead: how many seconds before it was due a message may come, where a clock was moved.
    """
    by_event: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: float(entry["at"])):
        by_event.setdefault(entry["event"], []).append(entry)

    def ids(event: str) -> set[str]:
        return {entry["id"] for entry in by_event.get(event, [])}

    # A message that is sent again, by a publisher who does not know, was first due at first.
    sent: dict[str, Entry] = {}
    for entry in by_event.get(SENT, []):
        sent.setdefault(entry["id"], entry)
    amended, excused = _amendments(by_event, sent)
    nowhere = {name for name, entry in sent.items() if not entry["queues"]}
    first: dict[str, float] = {}
    misdelivered = []
    ran = []
    copies: Counter[tuple[str, str]] = Counter()
    for entry in by_event.get(DELIVERED, []):
        first.setdefault(entry["id"], entry["at"])
        copies[entry["id"], entry["queue"]] += 1
        due = sent.get(entry["id"], entry).get("due", 0.0)
        if due > amended.get(entry["id"], math.inf) + LAG:
            ran.append(entry["id"])
        if entry["id"] not in sent or not _as_sent(sent[entry["id"]], entry):
            misdelivered.append(entry["id"])
    lateness = {name: at - sent[name]["due"] for name, at in first.items() if name in sent}
    return Verdict(
        confirmed=len(ids(CONFIRMED)),
        refused=len(ids(FAILED) - ids(CONFIRMED)),
        delivered=len(first),
        lost=tuple(sorted(ids(CONFIRMED) - ids(DONE) - nowhere - excused)),
        early=tuple(name for name, late in lateness.items() if late < -ahead),
        misdelivered=tuple(misdelivered),
        duplicates=sum(count - 1 for count in copies.values()),
        amended=len(amended),
        ran=tuple(ran),
        dropped=tuple(sorted(ids(DROPPED) - excused)),
        lateness=tuple(sorted(lateness.values())),
    )


def _amendments(
    by_event: dict[str, list[Entry]], sent: dict[str, Entry]
) -> tuple[dict[str, float], set[str]]:
    """Return since when each message is amended, and those that need not run.

    A cancel, or a later message with the same key, that nobody has confirmed may hold or not.
    """
    amended: dict[str, float] = {}
    for entry in by_event.get(CANCELLED, []):
        amended.setdefault(entry["id"], entry["at"])
    excused = {entry["id"] for entry in by_event.get(CANCELLING, [])}
    # Of a message whose publisher died before it was recorded, one copy is known to nobody: it
    # runs, and so does what it would have superseded.
    recorded: dict[str, float] = {}
    unknown: set[str] = set()
    for entry in by_event.get(CONFIRMED, []):
        if entry.get("recorded", True):
            recorded[entry["id"]] = float(entry["at"])
        else:
            unknown.add(entry["id"])
    earlier: dict[str, list[str]] = {}
    for name, entry in sent.items():
        if "key" not in entry:
            continue
        before = earlier.setdefault(entry["key"], [])
        excused.update(before)
        if name in recorded:
            for predecessor in before:
                amended[predecessor] = min(amended.get(predecessor, math.inf), recorded[name])
        before.append(name)
    return {name: at for name, at in amended.items() if name not in unknown}, excused


def _as_sent(sent: Entry, delivered: Entry) -> bool:
    return bool(
        delivered["queue"] in sent["queues"]
        and delivered["exchange"] == sent["exchange"]
        and delivered["routing_key"] == sent["routing_key"]
        and delivered["body"] == sent["id"]
    )
