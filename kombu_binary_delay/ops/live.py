"""What stands in a virtual host, as the management API and the broker itself tell it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from amqp.exceptions import NotFound

from kombu_binary_delay.topology import Binding

from .management import Management

_MINUTE = "?msg_rates_age=60&msg_rates_incr=5&lengths_age=60&lengths_incr=5"

Row = Mapping[str, Any]
#: Is told what goes on, where that takes a while.
Say = Callable[[str], object]


@dataclass(frozen=True)
class Live:
    """Exchanges and queues by name, as the API describes them, and bindings."""

    exchanges: Mapping[str, Row]
    queues: Mapping[str, Row]
    bindings: frozenset[Binding]

    @classmethod
    def read(cls, management: Management, *, rates: bool = False) -> Live:
        """Read all of a virtual host.

        :param rates: whether rates are to be averages of the last minute.

        :raises UnreachableError: where the API does not answer.
        """
        return cls(
            {row["name"]: row for row in management.here("exchanges")},
            {row["name"]: row for row in management.here("queues", _MINUTE if rates else "")},
            frozenset(_binding(row) for row in management.here("bindings") if row["source"]),
        )


def silent(text: str) -> None:
    """Tell nobody."""
    del text


def arguments(row: Row) -> dict[str, Any]:
    """Read the arguments of an exchange or queue; none is an empty list to some releases."""
    return dict(row.get("arguments") or {})


def leaving(row: Row) -> int:
    """Count messages that are due, in the hands of a queue's dead-letter worker."""
    return int(row.get("messages_dlx") or 0)


def unseen(row: Row) -> int:
    """Count what is in a queue and not ready: on its way out, or with a consumer."""
    return leaving(row) + int(row.get("messages_unacknowledged") or 0)


def ready(connection: Any, queues: Iterable[str]) -> dict[str, int]:
    """Count the messages in queues, now: the API's own figures are up to ten seconds old.

    Queues that do not exist are left out.
    """
    found: dict[str, int] = {}
    channel = connection.channel()
    for queue in queues:
        try:
            found[queue] = channel.queue_declare(queue, passive=True).message_count
        except NotFound:  # noqa: PERF203 - it costs the channel
            channel = connection.channel()
    channel.close()
    return found


def _binding(row: Row) -> Binding:
    return Binding(
        row["source"],
        row["destination"],
        row["routing_key"],
        row["destination_type"] == "queue",
        tuple(sorted(arguments(row).items())),
    )
