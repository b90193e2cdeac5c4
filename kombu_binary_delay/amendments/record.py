"""The records of amendments, as values and as lines of JSON. Pure.

Times are milliseconds since the epoch, by the clock of the record's writer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

from kombu_binary_delay.errors import AmendmentError, shown
from kombu_binary_delay.ladder import delay

KEY, REPLACES, GENERATION = delay.KEY, delay.REPLACES, delay.GENERATION
#: The header with the longest time, in milliseconds, by which later messages postpone the first.
LONGEST_WAIT = "x-delay-key-max-wait"
#: Celery's header with the stamps of a task: by their names a value, or several.
STAMPS = "stamps"
#: Celery's header that counts how often a task was replaced under its id by its own ``replace``.
NESTING = "replaced_task_nesting"

#: The longest name, in bytes: AMQP's limit for short strings.
MAX_NAME = 255
#: The most ids in one record.
MAX_IDS = 1000
#: The largest record, in bytes; a larger message is not a record.
MAX_BYTES = 1_000_000
#: The latest valid time.
MAX_TIME = delay.LATEST


@dataclass(frozen=True)
class Cancel:
    """Drop the messages with one of these ids or keys.

    :param at: when it was written.
    :param due: when the last of them is due; None if not known.
    :param keyed: whether the names are keys. An id and a key may be the same word.
    """

    names: tuple[str, ...]
    at: int
    due: int | None = None
    keyed: bool = False


@dataclass(frozen=True)
class CancelStamped:
    """Drop the tasks that have one of these values in a stamp of Celery's."""

    stamps: tuple[tuple[str, tuple[str, ...]], ...]
    at: int


@dataclass(frozen=True)
class Postpone:
    """Delay the message with this id until a later time."""

    name: str
    due: int
    at: int


@dataclass(frozen=True)
class Supersede:
    """Of all messages with this id or key, only this generation is valid from now on.

    :param due: when the message of this generation is due.
    :param longest_wait: in milliseconds, since the first of the messages that supersede each other;
        None for no limit.
    :param keyed: whether the name is a key.
    """

    name: str
    generation: str
    due: int
    at: int
    longest_wait: int | None = None
    keyed: bool = False


Record: TypeAlias = Cancel | CancelStamped | Postpone | Supersede


def to_line(record: Record) -> str:
    """Write a record as compact JSON."""
    written: dict[str, Any]
    match record:
        case Cancel():
            written = {"cancel": record.names}
            if record.due is not None:
                written["due"] = record.due
        case CancelStamped():
            written = {"cancel_stamped": dict(record.stamps)}
        case Postpone():
            written = {"postpone": record.name, "due": record.due}
        case Supersede():
            written = {"supersede": record.name, "by": record.generation, "due": record.due}
            if record.longest_wait is not None:
                written["longest_wait"] = record.longest_wait
    if getattr(record, "keyed", False):
        written["keyed"] = True
    written["at"] = record.at
    return json.dumps(written, separators=(",", ":"))


def from_line(line: str | bytes) -> Record | None:
    """Read a record; None if the line is not a valid one."""
    if len(line) > MAX_BYTES:
        return None
    try:
        # Given bytes, json would first detect the encoding, which takes as long as the parsing.
        read = json.loads(line if isinstance(line, str) else str(line, "utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or not _is_time(read.get("at")):
        return None
    for word, reader in _READERS.items():
        if word in read:
            return reader(read, read["at"])
    return None


def _read_cancel(read: dict[str, Any], at: int) -> Cancel | None:
    names, due = read["cancel"], read.get("due")
    if _are_names(names) and (due is None or _is_time(due)):
        return Cancel(tuple(names), at, due, _is_keyed(read))
    return None


def _read_cancel_stamped(read: dict[str, Any], at: int) -> CancelStamped | None:
    stamps = read["cancel_stamped"]
    if isinstance(stamps, dict) and all(map(_are_names, stamps.values())):
        return CancelStamped(tuple((name, tuple(values)) for name, values in stamps.items()), at)
    return None


def _read_postpone(read: dict[str, Any], at: int) -> Postpone | None:
    name, due = read["postpone"], read.get("due")
    return Postpone(name, due, at) if _is_name(name) and _is_time(due) else None


def _read_supersede(read: dict[str, Any], at: int) -> Supersede | None:
    name, generation, due = read["supersede"], read.get("by"), read.get("due")
    wait = read.get("longest_wait")
    if not (_is_name(name) and _is_name(generation) and _is_time(due)):
        return None
    if not (wait is None or _is_time(wait)):
        return None
    return Supersede(name, generation, due, at, wait, _is_keyed(read))


_READERS: dict[str, Callable[[dict[str, Any], int], Record | None]] = {
    "cancel": _read_cancel,
    "cancel_stamped": _read_cancel_stamped,
    "postpone": _read_postpone,
    "supersede": _read_supersede,
}


def new_generation(at: int) -> str:
    """Return a new name for a generation: its time and a random part."""
    return f"{at:x}-{secrets.token_hex(6)}"


def time_of(generation: str) -> int:
    """Return when a generation began, in milliseconds since the epoch; 0 if that is no time."""
    try:
        at = int(generation.partition("-")[0], 16)
    except ValueError:
        return 0
    return at if 0 <= at <= MAX_TIME else 0


def check_name(name: object, what: str) -> str:
    """Return an id or a key if it is valid.

    :raises AmendmentError: if it is not a string, is empty, or is too long.
    """
    if not isinstance(name, str) or not name:
        raise AmendmentError(f"{what} must be a non-empty string, got {shown(name)}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise AmendmentError(
            f"{what} must be text that UTF-8 can encode, got {shown(name)}"
        ) from None
    if size > MAX_NAME:
        raise AmendmentError(
            f"{what} must have at most {MAX_NAME} bytes, got {size}: {name[:60]!r}…"
        )
    return name


def check_wait(value: object) -> int | None:
    """Return the longest wait that a header asks for, in milliseconds.

    :raises AmendmentError: if it is not a whole number of milliseconds above 0.
    """
    if value is None:
        return None
    if type(value) is not int or not 0 < value <= MAX_TIME:
        raise AmendmentError(
            f"{LONGEST_WAIT} must be a whole number of milliseconds above 0, got {shown(value)}"
        )
    return value


def judged_by(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers that decide whether a message was amended, as JSON can hold them.

    These are all that a judge reads, beside those of :func:`.identity.id_and_headers`.
    """
    names = KEY, REPLACES, GENERATION
    judged: dict[str, Any] = {
        name: headers[name] for name in names if isinstance(headers.get(name), str)
    }
    if stamps := stamps_of(headers):
        judged[STAMPS] = stamps
    if headers.get(NESTING):
        judged[NESTING] = True
    return judged


def stamps_of(headers: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the stamps of a task, by their names; empty if it has none."""
    stamps = headers.get(STAMPS)
    if not isinstance(stamps, Mapping):
        return {}
    return {
        name: list(map(_word, given if isinstance(given, (list, tuple)) else (given,)))
        for name, given in stamps.items()
        if isinstance(name, str)
    }


def _word(value: object) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):
        # Too large a number, or nested too deep: nobody revokes by it.
        return ""


def _is_keyed(read: dict[str, Any]) -> bool:
    return read.get("keyed") is True


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value != ""


def _are_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, (list, tuple)) and all(map(_is_name, value))


def _is_time(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_TIME


def split(
    names: Iterable[str], at: int, due: int | None = None, *, keyed: bool = False
) -> list[Cancel]:
    """Return the records that cancel many names, each of a bounded size."""
    listed = list(dict.fromkeys(names))
    begins = range(0, len(listed), MAX_IDS)
    return [Cancel(tuple(listed[begin : begin + MAX_IDS]), at, due, keyed) for begin in begins]
