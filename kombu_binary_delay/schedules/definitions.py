"""The schedules of an app, as values and as JSON, and what an ``apply`` changes. Without I/O.

All times are milliseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kombu.utils import json

from kombu_binary_delay.errors import ScheduleError, shown

from .when import When

#: The longest name of a schedule, in bytes: it is a part of the name of a queue.
MAX_NAME = 120
#: What happens to an occurrence while the last one still runs.
ALLOW, SKIP = "allow", "skip"
#: How many earlier series a schedule remembers.
_BEFORE = 10
_NEEDED = frozenset({"task", "schedule"})
_ENTRY = _NEEDED | {"args", "kwargs", "options", "relative"}
#: The key of our settings among the options of an entry.
OURS = "binary_delay"


@dataclass(frozen=True)
class Schedule:
    """A schedule.

    :param catch_up: how many of the occurrences that were missed run, the latest.
    :param overlap: ``allow``, or ``skip`` for one run at a time.
    :param series: names the occurrences since ``when`` was changed; others are dropped.
    :param since: when the series began.
    :param before: when earlier series ended. What was due by then may still be on its way.
    """

    name: str
    task: str
    when: When
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    options: Any = field(default_factory=dict)
    catch_up: int = 1
    overlap: str = ALLOW
    paused: bool = False
    series: str = ""
    since: int = 0
    before: Mapping[str, int] = field(default_factory=dict)

    def same_as(self, other: Schedule) -> bool:
        """Whether both send the same at the same times."""
        return replace(other, **{name: getattr(self, name) for name in _STATE}) == self

    def renewed(self, series: str, now: int, *, paused: bool = False) -> Schedule:
        """Return it with a new series, which has no occurrence up to now."""
        ended = [*self.before.items(), *([(self.series, now)] if self.series else [])]
        before = {} if self.paused else dict(ended[-_BEFORE:])
        return replace(self, series=series, since=now, before=before, paused=paused)


_STATE = "paused", "series", "since", "before"
Definitions = dict[str, Schedule]


@dataclass(frozen=True)
class Applied:
    """What ``apply`` has changed or, in a dry run, would change, by the names of schedules."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()


def of_entry(name: Any, entry: Any, app: Any) -> Schedule:
    """Return the schedule of an entry of Celery's ``beat_schedule``.

    :raises ScheduleError: if it cannot be kept as data; it names the schedule.
    """
    try:
        return _of_entry(name, entry, app)
    except (ScheduleError, TypeError, ValueError) as exc:
        raise ScheduleError(f"the schedule {shown(name)} cannot be applied: {exc}") from exc


def _of_entry(name: Any, entry: Any, app: Any) -> Schedule:
    if not isinstance(name, str) or not 0 < len(name.encode()) <= MAX_NAME:
        raise ScheduleError(f"its name must be text of 1 to {MAX_NAME} bytes")
    if not isinstance(entry, Mapping) or not _NEEDED <= entry.keys() <= _ENTRY:
        raise ScheduleError(
            f"an entry has 'task' and 'schedule', and perhaps "
            f"{', '.join(map(repr, sorted(_ENTRY - _NEEDED)))}; got {shown(entry)}"
        )
    options = dict(entry.get("options") or {})
    ours = options.pop(OURS, None) or {}
    if "task_id" in options:
        raise ScheduleError("each run has an id of its own: leave out the option task_id")
    if unknown := ours.keys() - {"catch_up", "overlap", "timezone"}:
        raise ScheduleError(f"{sorted(unknown)} is none of catch_up, overlap and timezone")
    when = When.of(
        entry["schedule"], app, ours.get("timezone"), relative=bool(entry.get("relative"))
    )
    catch_up, overlap = ours.get("catch_up", 1), ours.get("overlap", ALLOW)
    if type(catch_up) is not int or catch_up < 1:
        raise ScheduleError(f"catch_up must be a whole number >= 1, got {shown(catch_up)}")
    if overlap not in (ALLOW, SKIP):
        raise ScheduleError(f"overlap must be {ALLOW!r} or {SKIP!r}, got {shown(overlap)}")
    args, kwargs = entry.get("args") or (), entry.get("kwargs") or {}
    args, kwargs, options = map(_as_data, (list(args), dict(kwargs), options))
    return Schedule(name, str(entry["task"]), when, args, kwargs, options, catch_up, overlap)


def _as_data(value: Any) -> Any:
    """Return arguments or options as they come back from JSON.

    :raises ScheduleError: if JSON cannot hold them, as Kombu writes it.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as exc:
        raise ScheduleError(f"{shown(value)} is not data for JSON: {exc}") from exc


def merge(
    before: Definitions, wanted: Definitions, series: Iterator[str], now: int
) -> tuple[Definitions, Applied]:
    """Return the schedules after an ``apply``, and what it changes.

    A schedule that is paused stays paused.

    :param series: names for new series.
    """
    after: Definitions = {}
    names: dict[str, list[str]] = {"added": [], "changed": [], "unchanged": []}
    for name, schedule in wanted.items():
        old = before.get(name)
        if old is None:
            after[name] = schedule.renewed(next(series), now)
            names["added"].append(name)
            continue
        state = {kept_field: getattr(old, kept_field) for kept_field in _STATE}
        kept = replace(schedule, **state)
        names["unchanged" if kept == old else "changed"].append(name)
        is_same_time = kept.when == old.when
        after[name] = kept if is_same_time else kept.renewed(next(series), now, paused=old.paused)
    removed = tuple(name for name in before if name not in wanted)
    return after, Applied(
        **{word: tuple(changed) for word, changed in names.items()}, removed=removed
    )


def to_line(definitions: Definitions) -> str:
    """Write schedules as JSON."""
    written = {
        name: {
            **{key: value for key, value in asdict(schedule).items() if key != "name"},
            "when": schedule.when.data(),
        }
        for name, schedule in definitions.items()
    }
    return str(json.dumps({"schedules": written}))


def from_line(line: str | bytes) -> Definitions | None:
    """Read what :func:`to_line` wrote; None if it is something else."""
    try:
        read = json.loads(line)["schedules"]
        return {
            name: Schedule(name, **{**fields, "when": When.read(fields["when"])})
            for name, fields in read.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
