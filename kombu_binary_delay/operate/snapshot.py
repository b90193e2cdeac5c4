"""The exchanges, queues and bindings of a virtual host, from the management API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kombu_binary_delay.ladder.parts import Binding
from kombu_binary_delay.ladder.topology import WORKER_HOLDS

from .management import Management

#: Without a range of samples, RabbitMQ may return the listing of an earlier request: it keeps that
#: for five times as long as it took to make.
_NOW = "?lengths_age=5&lengths_incr=5"
_MINUTE = "?msg_rates_age=60&msg_rates_incr=5&lengths_age=60&lengths_incr=5"
#: The samples of a minute that show whether messages leave: one each 5 s, of which the last may be
#: of the time before. A herd that is released is due at once too, but is less in each.
_LOOKED_AT = 4
#: Without statistics, some releases say of a queue that is up only that it is live.
_UP = ("running", "idle", "flow", "live", None)
#: What to say of a queue that is not up.
NOT_UP = (
    "it has no leader, or is not up, so the number of its messages is not known; start the nodes "
    "that have it or, if they run, see their logs"
)

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

        :param rates: whether to read rates as averages over the last minute.
        :raises UnreachableError: if the API does not answer.
        """
        # The bindings first: what they lead from and to is then known, though programs declare.
        bindings = frozenset(_binding(row) for row in management.here("bindings") if row["source"])
        return cls(
            {row["name"]: row for row in management.here("exchanges")},
            queues_now(management, rates=rates),
            bindings,
        )

    def is_exclusive(self, queue: str) -> bool:
        """Return whether RabbitMQ lets only the connection that declared a queue bind it."""
        return bool(self.queues.get(queue, {}).get("exclusive"))

    def removable(self, bindings: Iterable[Binding]) -> tuple[Binding, ...]:
        """Return those of some bindings that are not of an exclusive queue."""
        return tuple(
            binding
            for binding in bindings
            if not (binding.to_queue and self.is_exclusive(binding.destination))
        )


def queues_now(management: Management, *, rates: bool = False) -> dict[str, Row]:
    """Return the queues by name, as they are now and not as an earlier request found them.

    :param rates: as for :meth:`Snapshot.read`.
    :raises UnreachableError: if the API does not answer.
    """
    rows = management.here("queues", _MINUTE if rates else _NOW)
    return {row["name"]: row for row in rows}


def arguments(row: Row) -> dict[str, Any]:
    """Return the arguments of an exchange or queue; some releases write none as an empty list."""
    return dict(row.get("arguments") or {})


def delivery_limit(row: Row) -> int | None:
    """Return the delivery limit of a quorum queue; None if nothing sets it."""
    if row.get("type") != "quorum":
        return None
    policy = row.get("effective_policy_definition") or {}
    said = arguments(row).get("x-delivery-limit"), policy.get("delivery-limit")
    # RabbitMQ uses the lower one; since 4.0, a negative one means no limit.
    return min((text for text in said if isinstance(text, int) and text >= 0), default=None)


def leaving(row: Row) -> int:
    """Return the number of expired messages that a queue's dead-letter worker has."""
    return int(row.get("messages_dlx") or 0)


def is_held_up(row: Row) -> bool:
    """Return whether a queue's dead-letter worker is full and has passed nothing on for 15 s.

    Without samples, return whether it is full.
    """
    if leaving(row) < WORKER_HOLDS:
        return False
    series = [
        [sample["sample"] for sample in (row.get(f"{name}_details") or {}).get("samples") or ()]
        for name in ("messages", "messages_ready", "messages_unacknowledged")
    ]
    # The latest is first.
    held = [total - ready - unacked for total, ready, unacked in zip(*series, strict=False)]
    looked_at = held[:_LOOKED_AT]
    return all(before >= WORKER_HOLDS and now >= before for now, before in pairwise(looked_at))


def unseen(row: Row) -> int:
    """Return the number of messages that are not ready: expired, or with a consumer."""
    return leaving(row) + int(row.get("messages_unacknowledged") or 0)


def is_up(row: Row) -> bool:
    """Return whether a queue has a leader, on a node that runs."""
    return row.get("state") in _UP and row.get("leader", "") is not None


def unknown(queues: Iterable[str], rows: Mapping[str, Row]) -> tuple[str, ...]:
    """Return the queues whose number of messages is not known, whatever was counted.

    RabbitMQ answers that such a queue is empty or, if it is a classic one, not there.

    :param rows: the queues of the virtual host, as the management API describes them.
    """
    return tuple(name for name in queues if name in rows and not is_up(rows[name]))


def why_left(queues: Sequence[str]) -> str:
    """Return why what is in :func:`unknown` queues is left."""
    more = ", …" if len(queues) > 3 else ""
    return f"{', '.join(queues[:3])}{more}: {NOT_UP}, and run it again"


def _binding(row: Row) -> Binding:
    return Binding(
        row["source"],
        row["destination"],
        row["routing_key"],
        row["destination_type"] == "queue",
        tuple(sorted(arguments(row).items())),
    )
