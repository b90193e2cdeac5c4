"""The settings in ``broker_transport_options["binary_delay"]``, as one frozen value. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property, lru_cache
from typing import Any

from .errors import LadderError, SettingsError
from .ladder.foreign import FOREIGN_LADDERS
from .ladder.ladder import Ladder
from .ladder.topology import LAYOUTS, QUEUE_TYPES, Topology

DECLARE = ("lazy", "never")
#: The key in ``broker_transport_options`` that holds our settings.
KEY = "binary_delay"
#: The setting ``journal`` that means a stream queue on the broker, and not a folder.
STREAM = "stream"

#: Each lane is a ladder of queues. A cluster gains nothing from more lanes than a few per node.
MAX_LANES = 64

_BESIDE_A_FOREIGN_LADDER = (
    "declare",
    "foreign_ladder",
    "journal",
    "journal_max_age",
    "journal_arguments",
    "amendments",
    "amendments_max_age",
    "jitter",
)
_MAX_AGE = re.compile(r"(0*[1-9][0-9]*)([YMDhms])")
#: The units of RabbitMQ's ``x-max-age``, in milliseconds.
_UNITS = {
    "Y": 31_536_000_000,
    "M": 2_592_000_000,
    "D": 86_400_000,
    "h": 3_600_000,
    "m": 60_000,
    "s": 1000,
}
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True)
class Settings:
    """The transport's settings. The defaults suit nearly every application.

    :param tick: the smallest delay in milliseconds; every delay is rounded up to whole ticks.
    :param levels: the number of levels; with a ``radix``, the longest delay is ``(radix**levels -
        1) * tick``. By default, enough levels for ``2**31`` ticks (8.5 years with the default
        tick), or as many as RabbitMQ's longest TTL allows.
    :param radix: the number of values of the bits that a level reads: 8 is three bits a level, with
        seven queues; 2 is one bit a level, with one queue. A list sets the radix of each level,
        highest first. By default, low levels read more bits than high ones:
        :meth:`Ladder.default`.
    :param layout: ``"chain"`` or ``"skip"``. ``"chain"`` leads from each level to the next;
        ``"skip"`` leads straight to the next level where a message waits: fewer exchanges to pass,
        more bindings.
    :param queue_per_delay: whether to make a queue for each delay that a connection uses more than
        once, so that a message waits in one queue; for applications with few distinct delays.
    :param queue_type: ``"quorum"``, or ``"classic"`` for levels that can lose messages in a crash.
    :param declare: ``"lazy"`` declares each part of the topology when it is first needed;
        ``"never"`` declares nothing, for brokers where an administrator makes the topology.
    :param foreign_ladder: another system's ladder in the same virtual host, to delay on instead of
        ours: ``"nservicebus"``, ``"nservicebus-v1"`` or ``"celery"``. It reaches queues by name
        only. Beside it you can set only ``declare``, ``jitter``, and the settings
        of the journal and the amendments.
    :param relays: glob patterns of queues that may reject messages because of a policy, or because
        their nodes are down. Each gets a relay, so that its messages do not hold up others, unless
        it is exclusive or auto-delete. Queues declared with ``reject-publish``, and lasting queues
        that the connection has not declared, always have one.
    :param amendments: whether consumers honour cancellations, reschedules and replacements, and
        whether a revoke is recorded for them; needs streams. Turn it off for Amazon MQ behind
        another name than its own.
    :param amendments_max_age: how long a cancellation is kept: from now and, if it names a due time
        that is more than two days ahead, again from a day before that. In the form of
        ``journal_max_age``. A stream that exists keeps its age: run ``verify`` with a new value,
        and follow its remedy, before programs get it.
    :param jitter: the longest time, in milliseconds, by which delayed messages arrive later than
        they are due, on purpose: each by its own share, which its id decides, so that many that are
        due at one moment do not arrive at one moment. The header ``x-delay-jitter`` of a message
        overrides it.
    :param lanes: the number of ladders to spread messages over, by message id; for clusters, whose
        nodes then share the work.
    :param journal: where to record what happens to delayed messages: ``"stream"`` for a stream on
        the broker, or the path of a folder, with a slash in it, for rotating local files. By
        default, nowhere. On a broker without streams, ``"stream"`` writes to the folder
        ``<namespace>-journal`` in the system's folder for temporary files, which a warning names.
    :param journal_max_age: how long the stream keeps events: a number and one of the units ``Y``,
        ``M``, ``D``, ``h``, ``m`` and ``s``, as in RabbitMQ's ``x-max-age``. A stream that exists
        keeps its age; ``verify`` names the difference.
    :param journal_arguments: whether the journal has the arguments of waiting tasks, as Celery's
        ``argsrepr`` and ``kwargsrepr`` write them, up to 256 characters each. Turn it off if they
        are confidential.
    :param namespace: the first word of the names of all exchanges and queues of the ladder: 1 to 32
        letters, digits, ``-`` or ``_``; not ``amq``, which RabbitMQ reserves.
    :raises SettingsError: for an invalid value.
    """

    tick: int = 125
    levels: int | None = None
    radix: int | tuple[int, ...] | None = None
    layout: str = "chain"
    queue_per_delay: bool = False
    queue_type: str = "quorum"
    declare: str = "lazy"
    foreign_ladder: str | None = None
    relays: tuple[str, ...] = ()
    journal: str | None = None
    journal_max_age: str = "7D"
    journal_arguments: bool = True
    amendments: bool = True
    amendments_max_age: str = "31D"
    jitter: float = 0
    lanes: int = 1
    namespace: str = "kbd"

    def __post_init__(self) -> None:
        for name in ("radix", "relays"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.radix, tuple) and self.levels is not None:
            raise SettingsError(
                f"{KEY}: a list of radices sets the number of levels; leave levels out, "
                f"got {self.levels!r}"
            )
        try:
            self.ladder  # noqa: B018 - for its checks
        except LadderError as exc:
            raise SettingsError(f"{KEY}: {exc}") from exc
        self._choice("foreign_ladder", (*FOREIGN_LADDERS, None))
        if self.foreign_ladder is not None:
            self._leave_out_beside_a_foreign_ladder()
        self._choice("layout", LAYOUTS)
        self._choice("queue_type", QUEUE_TYPES)
        self._choice("declare", DECLARE)
        self._switch("queue_per_delay")
        self._switch("journal_arguments")
        self._switch("amendments")
        if type(self.lanes) is not int or not 1 <= self.lanes <= MAX_LANES:
            raise SettingsError(
                f"{KEY}: lanes must be a whole number from 1 to {MAX_LANES}, got {self.lanes!r}"
            )
        if not isinstance(self.relays, tuple) or not all(
            isinstance(relay, str) for relay in self.relays
        ):
            raise SettingsError(
                f"{KEY}: relays must be a list of queue names or patterns, got {self.relays!r}"
            )
        self._check_journal()
        if not isinstance(self.namespace, str) or not _NAMESPACE.fullmatch(self.namespace):
            raise SettingsError(
                f"{KEY}: namespace must be 1 to 32 letters, digits, '-' or '_', "
                f"got {self.namespace!r}"
            )
        if self.namespace == "amq":
            raise SettingsError(
                f"{KEY}: namespace must not be 'amq', since RabbitMQ reserves names that begin "
                f"with 'amq.'; choose another"
            )
        self._check_jitter()

    @classmethod
    def from_transport_options(cls, options: Mapping[str, Any] | None) -> Settings:
        """Read the settings from a connection's transport options.

        :raises SettingsError: for an unknown key or an invalid value; or if a setting, or a key
            that is nearly ours, stands beside our key, where nothing would read it.
        """
        known = [setting.name for setting in fields(cls)]
        for key in options or {}:
            if key in known:
                raise SettingsError(
                    f"{key!r} must be inside {KEY!r}: write {{{KEY!r}: {{{key!r}: ...}}}}"
                )
            if _is_nearly_ours(str(key)):
                raise SettingsError(f"unknown transport option {key!r}; did you mean {KEY!r}?")
        given = (options or {}).get(KEY)
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise SettingsError(f"{KEY} must be a mapping of settings, got {given!r}")
        for key in given:
            if key not in known:
                raise SettingsError(f"{KEY}: unknown setting {key!r}{_instead(key, known)}")
        return cls(**given)

    @cached_property
    def ladder(self) -> Ladder:
        """The ladder that these settings describe."""
        if isinstance(self.radix, tuple):
            return Ladder(self.tick, self.radix)
        if self.radix is None:
            return Ladder.default(self.levels, self.tick)
        return Ladder.uniform(self.radix, self.levels, self.tick)

    def topology(self) -> Topology:
        """Compute the topology that these settings describe."""
        if self.foreign_ladder is not None:
            return FOREIGN_LADDERS[self.foreign_ladder]
        return _topology(self.ladder, self.namespace, self.queue_type, self.layout)

    def _leave_out_beside_a_foreign_ladder(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if field.name not in _BESIDE_A_FOREIGN_LADDER and given != field.default:
                raise SettingsError(
                    f"{KEY}: {field.name} cannot be set for the ladder of "
                    f"{self.foreign_ladder!r}, got {given!r}; leave it out"
                )

    def _check_jitter(self) -> None:
        longest = self.topology().ladder.maximum
        is_number = isinstance(self.jitter, (int, float)) and not isinstance(self.jitter, bool)
        if not is_number or not 0 <= self.jitter <= longest:
            raise SettingsError(
                f"{KEY}: jitter must be a number of milliseconds from 0 to {longest}, the longest "
                f"delay of the ladder, got {self.jitter!r}"
            )

    def _check_journal(self) -> None:
        journal = self.journal
        is_path = isinstance(journal, str) and ("/" in journal or "\\" in journal)
        if journal not in (None, STREAM) and not is_path:
            raise SettingsError(
                f"{KEY}: journal must be {STREAM!r}, a folder's path with a slash in it such as "
                f"'./journal', or None, got {journal!r}{_near(str(journal).lower(), [STREAM])}"
            )
        for name in ("journal_max_age", "amendments_max_age"):
            if not isinstance(age := getattr(self, name), str) or not _MAX_AGE.fullmatch(age):
                raise SettingsError(
                    f"{KEY}: {name} must be a number and a unit such as '7D' or '12h', got {age!r}"
                )

    def _switch(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise SettingsError(f"{KEY}: {name} must be True or False, got {value!r}")

    def _choice(self, name: str, choices: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            raise SettingsError(
                f"{KEY}: {name} must be one of {listed}, got {value!r}{_near(value, choices)}"
            )


@lru_cache(maxsize=64)
def _topology(*parts: Any) -> Topology:
    # Each connection needs it, and its levels take longer to compute than to look at.
    return Topology(*parts)


@lru_cache(maxsize=256)
def _is_nearly_ours(key: str) -> bool:
    # Each connection asks for the same few.
    return key != KEY and bool(get_close_matches(key, [KEY], cutoff=0.8))


def milliseconds(max_age: str) -> int:
    """Return a time such as ``"7D"``, in the form of RabbitMQ's ``x-max-age``, in milliseconds."""
    count, unit = _MAX_AGE.fullmatch(max_age).groups()  # type: ignore[union-attr] # was checked
    return int(count) * _UNITS[unit]


def _instead(given: object, known: list[str]) -> str:
    return _near(given, known) or f"; use one of {', '.join(known)}"


def _near(given: object, known: Iterable[str | None]) -> str:
    near = get_close_matches(str(given), filter(None, known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
