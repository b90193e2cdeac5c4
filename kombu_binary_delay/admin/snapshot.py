"""What stands in a virtual host, as the management API and the broker itself tell it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from amqp.exceptions import NotFound

from kombu_binary_delay.model.parts import Binding

from .errors import OperationError
from .management import Management

_MINUTE = "?msg_rates_age=60&msg_rates_incr=5&lengths_age=60&lengths_incr=5"
#: A quorum queue whose leader is too busy to answer within 250 ms is said to hold nothing (see
#: rabbit_quorum_queue:stat/1). What came sooner, in seconds, was an answer of the leader's own.
_NO_ANSWER = 0.2
_TIMES_ASKED = 60
_UP = ("running", "idle", "flow", None)

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
    """Tell whether a queue has a leader; one that has none is said to hold nothing."""
    return row.get("state") in _UP and row.get("leader", "") is not None


def ready(connection: Any, queues: Iterable[str]) -> dict[str, int]:
    """Count the messages in queues, now: the API's own figures are up to ten seconds old.

    Queues that do not exist are left out.

    :raises OperationError: see :func:`depth`.
    """
    found: dict[str, int] = {}
    channel = connection.channel()
    for queue in queues:
        try:
            found[queue] = depth(channel, queue)
        except NotFound:  # noqa: PERF203 - it costs the channel
            channel = connection.channel()
    channel.close()
    return found


def depth(channel: Any, queue: str) -> int:
    """Count the messages ready in a queue, now, and never take a busy one for an empty one.

    :raises OperationError: where it stays too busy to tell.
    """
    way = float("inf")
    for _ in range(_TIMES_ASKED):
        asked = time.monotonic()
        count = channel.queue_declare(queue, passive=True).message_count
        took = time.monotonic() - asked
        if count or took < _NO_ANSWER:
            return int(count)
        # Or was it only the way to the broker that took so long?
        asked = time.monotonic()
        channel.exchange_declare("amq.direct", "direct", passive=True)
        way = min(way, time.monotonic() - asked)
        if took - way < _NO_ANSWER:
            return 0
    raise OperationError(
        f"the queue {queue!r} did not tell how many messages it holds, however often it was asked; "
        f"its broker is overloaded: try again"
    )


def _binding(row: Row) -> Binding:
    return Binding(
        row["source"],
        row["destination"],
        row["routing_key"],
        row["destination_type"] == "queue",
        tuple(sorted(arguments(row).items())),
    )
