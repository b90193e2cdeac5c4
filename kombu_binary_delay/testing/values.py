"""What a test sees of tasks: frozen values that pytest shows well. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call of a task as a test expects it: equal to one that waits, or that ran.

    :param due_in: in seconds from now; None for any.
    """

    task: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    due_in: float | None = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Waiting | Ran | Call):
            return self._key == other._key and (
                self.due_in is None
                or not isinstance(other, Waiting | Call)
                or self.due_in == other.due_in
            )
        return NotImplemented

    __hash__ = None  # type: ignore[assignment] # it is equal to values that are not equal

    @property
    def _key(self) -> Any:
        return self.task, _plain(self.args), _plain(self.kwargs)

    def __repr__(self) -> str:
        return _shown(self.task, self.args, self.kwargs, due_in=self.due_in)


@dataclass(frozen=True)
class Waiting:
    """A task, or another message, that waits.

    :param task: the task's name; empty for another message, whose body is the only argument.
    :param due: when it is due.
    :param due_in: in how many seconds.
    :param queue: the destination: a queue, or ``exchange:routing key``.
    :param headers: as its consumer will see them.
    """

    task: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    due_in: float
    due: datetime = field(compare=False)
    queue: str = field(compare=False, default="")
    id: str = field(compare=False, default="")
    headers: Mapping[str, Any] = field(compare=False, repr=False, default_factory=dict)

    @property
    def _key(self) -> Any:
        return self.task, _plain(self.args), _plain(self.kwargs)

    def __repr__(self) -> str:
        return _shown(self.task, self.args, self.kwargs, due_in=self.due_in, queue=self.queue)


@dataclass(frozen=True)
class Ran:
    """A task that ran, or another message that was delivered.

    :param at: when.
    :param state: Celery's: ``SUCCESS``, ``RETRY``, ``FAILURE``, ...
    :param result: what it returned, or its exception.
    :param retries: Celery's count.
    """

    task: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    at: datetime
    state: str
    result: Any
    retries: int
    id: str

    @property
    def _key(self) -> Any:
        return self.task, _plain(self.args), _plain(self.kwargs)

    def __repr__(self) -> str:
        return _shown(self.task, self.args, self.kwargs, state=self.state, at=str(self.at))


@dataclass(frozen=True)
class Cancelled:
    """A task or message that was taken back instead of delivered.

    :param reason: ``revoked`` or ``expired`` of a Celery task; ``cancelled`` or ``superseded``.
    """

    task: str
    id: str
    reason: str


def call(task: Any, /, *args: Any, due_in: float | None = None, **kwargs: Any) -> Call:
    """Return a call to compare with: ``delayed.waiting() == [call(remind, 7, due_in=3600)]``.

    :param task: a task or its name; ``""`` for a message that is no task.
    """
    return Call(getattr(task, "name", task), args, kwargs, due_in)


def _plain(value: Any) -> Any:
    """Return a value as JSON would carry it: a tuple is a list."""
    if isinstance(value, Mapping):
        return {name: _plain(element) for name, element in value.items()}
    return [_plain(element) for element in value] if isinstance(value, list | tuple) else value


def _shown(task: str, args: Any, kwargs: Mapping[str, Any], **further: Any) -> str:
    parts = [task or "''", *map(repr, args)]
    parts += [f"{name}={value!r}" for name, value in kwargs.items()]
    parts += [f"{name}={value!r}" for name, value in further.items() if value not in (None, "")]
    return f"call({', '.join(parts)})"
