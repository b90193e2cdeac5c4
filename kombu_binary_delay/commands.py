"""The router's commands to the broker, and their answers. Pure.

The router yields these values, one after the other; whoever runs them sends back the answer. The
:class:`~kombu_binary_delay.executor.Executor` runs them on a real broker, the tests on a simulated
one.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from .model.parts import Binding, Part


class Answer(Enum):
    """What came of a command."""

    DONE = "done"
    #: Something that it names does not exist. Some of the rest may have been done.
    MISSING = "missing"
    #: A queue that it names belongs to another connection alone.
    LOCKED = "locked"


@dataclass(frozen=True)
class Ensure:
    """Declare all of a part that does not exist yet. Answer: DONE, MISSING or LOCKED.

    :param what: what is declared, for the text of an error.
    :param needs: a permission on something that is not the ladder's, for the same text.
    :param lock: the name of an exclusive queue to hold meanwhile; LOCKED if another holds it.
    """

    part: Part
    what: str
    needs: str = ""
    lock: str = ""


@dataclass(frozen=True)
class Look:
    """Ask whether exchanges and queues exist, and change nothing.

    Answer: DONE, MISSING or LOCKED.
    """

    exchanges: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()


@dataclass(frozen=True)
class AskType:
    """Ask for the type of an exchange, and change nothing.

    Answer: its name; MISSING; or None where it is none of direct, topic, fanout and headers.
    """

    exchange: str


@dataclass(frozen=True)
class Unbind:
    """Remove bindings; one that does not exist is no error. Answer: DONE."""

    bindings: tuple[Binding, ...]
    what: str


@dataclass(frozen=True)
class Delete:
    """Delete exchanges and queues; one that does not exist is no error. Answer: DONE."""

    exchanges: tuple[str, ...]
    queues: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Warn:
    """Write a warning to the log. Answer: DONE.

    :param once: whether only the first such text of a process is written.
    """

    text: str
    once: bool = False


Command: TypeAlias = Ensure | Look | AskType | Unbind | Delete | Warn
#: Commands one after the other. Each is answered; a refusal is thrown in as a TopologyError.
Steps: TypeAlias = Generator[Command, Any, None]
