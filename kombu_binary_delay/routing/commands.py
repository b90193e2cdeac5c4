"""The router's commands to the broker, and their answers. Pure.

The router is a generator: it yields these values and receives the answers. The
:class:`.wire.executor.Executor` runs them on a real broker, the tests on a simulated one.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from kombu_binary_delay.errors import AddressError, TopologyError
from kombu_binary_delay.ladder.parts import Binding, Part


class Answer(Enum):
    """The result of a command."""

    DONE = "done"
    #: Something in the command does not exist. A part of the command may have been done.
    MISSING = "missing"
    #: A queue in the command is exclusive to another connection.
    LOCKED = "locked"


class OutOfReachError(TopologyError):
    """Something in the command exists, but its node is down or just starting."""


@dataclass(frozen=True)
class Ensure:
    """Declare a part; what exists stays as it is. Answer: DONE, MISSING or LOCKED.

    :param what: what is declared, for the text of an error.
    :param needs: a permission on a name outside the ladder, for the same text.
    :param lock: an exclusive queue to hold during the command; LOCKED if another connection has it.
    """

    part: Part
    what: str
    needs: str = ""
    lock: str = ""


@dataclass(frozen=True)
class Look:
    """Ask whether exchanges and queues exist, without a change. Answer: DONE, MISSING or LOCKED.

    :param bindings: of the ladder's own exchanges, to be made again if all of that exists: the
        broker cannot be asked for a binding.
    :param others: bindings to remove after that. Then ``bindings`` of the same exchanges are made
        once more: whoever has made the others may have removed these meanwhile.
    """

    exchanges: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    bindings: tuple[Binding, ...] = ()
    others: tuple[Binding, ...] = ()


@dataclass(frozen=True)
class AskType:
    """Ask for the type of an exchange, without a change.

    Answer: the type; MISSING; or None if it is not direct, topic, fanout or headers.
    """

    exchange: str


@dataclass(frozen=True)
class AskTemporary:
    """Ask whether a queue ends by itself and takes every message until then, without a change.

    It ends by itself if it is auto-delete or expires. Answer: True; or False, also if this user may
    not ask, or the broker does not say.
    """

    queue: str


@dataclass(frozen=True)
class Unbind:
    """Remove bindings; those that do not exist are ignored. Answer: DONE."""

    bindings: tuple[Binding, ...]
    what: str


@dataclass(frozen=True)
class Delete:
    """Delete exchanges and queues; those that do not exist are ignored. Answer: DONE."""

    exchanges: tuple[str, ...]
    queues: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Pause:
    """Do nothing for a time, in seconds. Answer: DONE."""

    seconds: float


@dataclass(frozen=True)
class Warn:
    """Write a warning to the log. Answer: DONE.

    :param once: whether to write this text only once an hour in a process.
    """

    text: str
    once: bool = False


Command: TypeAlias = Ensure | Look | AskType | AskTemporary | Unbind | Delete | Pause | Warn
#: A generator of commands. It receives an answer for each; a refusal is thrown as TopologyError.
Steps: TypeAlias = Generator[Command, Any, None]


def log_refusals(steps: Steps, *, once: bool = False) -> Steps:
    """Run steps; if the broker refuses one, warn and skip the rest.

    :param once: as of :class:`Warn`.
    """
    try:
        yield from steps
    except (TopologyError, AddressError) as exc:
        yield Warn(
            f"delayed messages may not reach every destination that others reach: {exc}", once=once
        )


def names_in(part: Part) -> tuple[list[str], list[str]]:
    """Return the names of the exchanges and the names of the queues of a part."""
    return [exchange.name for exchange in part.exchanges], [queue.name for queue in part.queues]
