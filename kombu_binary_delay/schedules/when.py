"""When a schedule is due, as data, and the due times that follow by Celery's own schedules.

A due time follows from the last one and never from now, so no schedule drifts. All times are
milliseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Self
from zoneinfo import ZoneInfo

from kombu_binary_delay.errors import ScheduleError, shown

#: The shortest interval, in milliseconds.
SHORTEST = 100
_NO_DATA = "is no crontab, interval or solar event of Celery's: nothing else can be kept as data"
_FIELDS = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")


@dataclass(frozen=True)
class When:
    """When a schedule is due.

    :param kind: ``crontab``, ``every`` or ``solar``.
    :param value: the five fields of a crontab, as :meth:`celery.schedules.crontab.from_string`
        reads them; an interval in milliseconds; or event, latitude and longitude.
    :param zone: the name of the time zone.
    :param relative: whether an interval is rounded to its unit, as by Celery.
    """

    kind: str
    value: Any
    zone: str
    relative: bool = False

    @classmethod
    def of(cls, given: Any, app: Any, zone: str | None = None, *, relative: bool = False) -> Self:
        """Return when a schedule of Celery's is due: a number of seconds, or one of its objects.

        :param zone: by default, that of the schedule or of the app.
        :raises ScheduleError: if it is of another kind, or has a zone without a name.
        """
        from celery import schedules  # noqa: PLC0415 - Celery is no dependency

        if not isinstance(given, int | float | timedelta | schedules.BaseSchedule):
            raise ScheduleError(f"{shown(given)} {_NO_DATA}")
        schedule = schedules.maybe_schedule(given, relative, app=app)
        now = schedule.nowfun
        zone = _zone(zone or (now and now().tzinfo) or app.timezone)
        if isinstance(schedule, schedules.crontab):
            fields = (getattr(schedule, f"_orig_{field}") for field in _FIELDS)
            return cls("crontab", " ".join(map(_field, fields)), zone)
        if isinstance(schedule, schedules.solar):
            return cls("solar", [schedule.event, schedule.lat, schedule.lon], zone)
        if type(schedule) is schedules.schedule:
            every = round(schedule.run_every / timedelta(milliseconds=1))
            if every < SHORTEST:
                raise ScheduleError(f"an interval must be at least {SHORTEST} ms, got {every} ms")
            return cls("every", every, zone, bool(schedule.relative))
        raise ScheduleError(f"{shown(given)} {_NO_DATA}")

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """Return what :meth:`data` wrote."""
        (kind,) = data.keys() - {"zone", "relative"}
        return cls(kind, data[kind], data["zone"], bool(data.get("relative")))

    def data(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        written = {self.kind: self.value, "zone": self.zone}
        return {**written, "relative": True} if self.relative else written

    def __str__(self) -> str:
        if self.kind == "every":
            return f"every {self.value / 1000:g} s" + ", rounded" * self.relative
        value = self.value if self.kind == "crontab" else "{} at {}, {}".format(*self.value)
        return f"{value} ({self.zone})"

    def following(self, last: int) -> int:
        """Return the due time that follows a time.

        A crontab's local time that does not exist counts as that many minutes after the last one
        that does; of one that exists twice, the first counts.
        """
        if self.kind == "every" and not self.relative:
            return last + int(self.value)
        at = datetime.fromtimestamp(last / 1000, self._tz)
        schedule = self._schedule
        schedule.nowfun = lambda: at
        while True:
            if self.kind == "crontab":
                # On the clock's face; what Celery adds in seconds depends on its release.
                start, delta, _ = schedule.remaining_delta(at, tz=self._tz)
                end = start + delta
            else:
                end = at.astimezone(UTC) + schedule.remaining_estimate(at)
            for candidate in (end, end.replace(fold=1)):
                due: int = round(candidate.timestamp() * 1000)
                if due > last:
                    return due
            # What repeats on the clock's face lies behind.
            at = end

    @cached_property
    def _tz(self) -> ZoneInfo:
        return ZoneInfo(self.zone)

    @cached_property
    def _schedule(self) -> Any:
        from celery import schedules  # noqa: PLC0415 - Celery is no dependency

        schedule: Any
        if self.kind == "crontab":
            schedule = schedules.crontab(**dict(zip(_FIELDS, self.value.split(), strict=True)))
        elif self.kind == "solar":
            schedule = schedules.solar(*self.value)
        else:
            schedule = schedules.schedule(self.value / 1000, self.relative)
        # It would ask the current app.
        vars(schedule)["tz"] = self._tz
        return schedule


def _zone(zone: Any) -> str:
    name = str(zone)
    try:
        return ZoneInfo(name).key
    except (ValueError, OSError):
        raise ScheduleError(
            f"the time zone {name!r} has no name that others know; set app.conf.timezone, such as "
            f"'Europe/Berlin'"
        ) from None


def _field(value: Any) -> str:
    if isinstance(value, str):
        return "".join(value.split())
    return ",".join(map(str, sorted(value))) if isinstance(value, Iterable) else str(value)
