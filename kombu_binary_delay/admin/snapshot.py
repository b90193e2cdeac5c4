"""What exists in a virtual host, as the management API describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kombu_binary_delay.model.parts import Binding

from .management import Management

_MINUTE = "?msg_rates_age=60&msg_rates_incr=5&lengths_age=60&lengths_incr=5"
_UP = ("running", "idle", "flow", None)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """Exchanges and queues by name, as the API describes them, and bindings."""

    exchanges: Mapping[str, Row]
    queues: Mapping[str, Row]
    bindings: frozenset[Binding]

    @classmethod
    def read(cls, management: Management, *, rates: bool = False) -> Snapshot:
        """Read all of a virtual host.

        :param rates: whether rates are to be averages of the last minute.
        :raises UnreachableError: where the API does not answer.
        """
        return cls(
            {row["name"]: row for row in management.here("exchanges")},
            {row["name"]: row for row in management.here("queues", _MINUTE if rates else "")},
            frozenset(_binding(row) for row in management.here("bindings") if row["source"]),
        )


def arguments(row: Row) -> dict[str, Any]:
    """Read the arguments of an exchange or queue; none is an empty list to some releases."""
    return dict(row.get("arguments") or {})


def delivery_limit(row: Row) -> int | None:
    """Read how often a message may come back to a quorum queue; None where nothing says."""
    if row.get("type") != "quorum":
        return None
    policy = row.get("effective_policy_definition") or {}
    said = arguments(row).get("x-delivery-limit"), policy.get("delivery-limit")
    # RabbitMQ takes the lower one; since 4.0, a negative one is none.
    return min((each for each in said if isinstance(each, int) and each >= 0), default=None)


def leaving(row: Row) -> int:
    """Count messages that are due, in the hands of a queue's dead-letter worker."""
    return int(row.get("messages_dlx") or 0)


def unseen(row: Row) -> int:
    """Count what is in a queue and not ready: on its way out, or with a consumer."""
    return leaving(row) + int(row.get("messages_unacknowledged") or 0)


def is_up(row: Row) -> bool:
    """Return whether a queue has a leader; one that has none is said to hold nothing."""
    return row.get("state") in _UP and row.get("leader", "") is not None


def _binding(row: Row) -> Binding:
    return Binding(
        row["source"],
        row["destination"],
        row["routing_key"],
        row["destination_type"] == "queue",
        tuple(sorted(arguments(row).items())),
    )
