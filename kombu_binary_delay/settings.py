"""``broker_transport_options["binary_delay"]``, read once into a frozen value. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from .errors import LadderError, SettingsError
from .ladder import Ladder
from .topology import QUEUE_TYPES, Topology

DECLARE = ("lazy", "never")
#: The key in ``broker_transport_options`` that holds our settings.
KEY = "binary_delay"

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True)
class Settings:
    """What a user may set; the defaults are meant to be right for nearly everyone.

    :param tick: the smallest delay in milliseconds; every delay is rounded up to whole ticks.
    :param levels: the number of binary levels; the longest delay is ``(2**levels - 1) * tick``.
    :param queue_type: ``"quorum"`` or ``"classic"``; None takes quorum where the broker can
        (RabbitMQ 3.10 and later) and classic, with a warning, elsewhere.
    :param declare: ``"lazy"`` declares what is needed when it is first needed; ``"never"``
        declares nothing, for brokers whose administrator has made the topology.
    :param protocol_1: whether to read delays out of the JSON bodies of Celery's task protocol 1,
        for apps with ``task_protocol = 1``; each undelayed publish then costs a look at its body.
    :param namespace: the first word of every exchange and queue of the ladder: 1 to 32 letters,
        digits, ``-`` or ``_``.
    :raises SettingsError: for a value that cannot be.
    """

    tick: int = 125
    levels: int = 31
    queue_type: str | None = None
    declare: str = "lazy"
    protocol_1: bool = False
    namespace: str = "kbd"

    def __post_init__(self) -> None:
        try:
            Ladder.binary(self.levels, self.tick)
        except LadderError as exc:
            raise SettingsError(f"{KEY}: {exc}") from exc
        self._choice("queue_type", (*QUEUE_TYPES, None))
        self._choice("declare", DECLARE)
        if not isinstance(self.protocol_1, bool):
            raise SettingsError(f"{KEY}: protocol_1 must be True or False, got {self.protocol_1!r}")
        if not isinstance(self.namespace, str) or not _NAMESPACE.fullmatch(self.namespace):
            raise SettingsError(
                f"{KEY}: namespace must be 1 to 32 letters, digits, '-' or '_', "
                f"got {self.namespace!r}"
            )

    @classmethod
    def from_transport_options(cls, options: Mapping[str, Any] | None) -> Settings:
        """Read the settings out of a connection's transport options.

        :raises SettingsError: for anything but a mapping of known keys to possible values.
        """
        given = (options or {}).get(KEY)
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise SettingsError(f"{KEY} must be a mapping of settings, got {given!r}")
        known = [each.name for each in fields(cls)]
        for key in given:
            if key not in known:
                raise SettingsError(f"{KEY}: unknown setting {key!r}{_instead(key, known)}")
        return cls(**given)

    def topology(self, *, can_quorum: bool = True) -> Topology:
        """Compute the topology that these settings describe.

        :param can_quorum: whether the broker has quorum queues with message TTL; decides the
            queue type only where the user has not.
        """
        queue_type = self.queue_type or ("quorum" if can_quorum else "classic")
        return Topology(Ladder.binary(self.levels, self.tick), self.namespace, queue_type)

    def _choice(self, name: str, choices: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            near = _instead(value, [choice for choice in choices if choice])
            raise SettingsError(f"{KEY}: {name} must be one of {listed}, got {value!r}{near}")


def _instead(given: object, known: list[str]) -> str:
    near = get_close_matches(str(given), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
