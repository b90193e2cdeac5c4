"""Declare and delete parts of a topology: the only changes that operators' functions make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from amqp.exceptions import AccessRefused, NotFound, PreconditionFailed, ResourceLocked

from kombu_binary_delay.errors import TopologyError
from kombu_binary_delay.ladder.parts import Binding, Part
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.wire.executor import Executor, unbind

from .errors import OperationError, RefusedError, UnreachableError
from .probe import Probe
from .snapshot import Row
from .text import plural

#: The broker's answers to a binding whose queue or exchange is gone, or is another connection's.
_CANNOT_BE_BOUND = (NotFound, ResourceLocked)


def declare(
    connection: Any, topology: Topology, part: Part, stale: Iterable[Binding] = ()
) -> tuple[str, ...]:
    """Declare a part, and then remove the bindings that it replaces.

    :param connection: a :class:`kombu.Connection`.
    :returns: the names of streams that exist, and keep another age.
    :raises TopologyError: if the broker refuses.
    """
    executor = Executor(connection.connection, topology.namespace)
    what = "a part of the ladder"
    try:
        kept = executor.declare(part, what)
        with executor.channel(what) as channel:
            unbind(channel, stale)
        return kept
    finally:
        executor.close()


def restore(connection: Any, topology: Topology, part: Part) -> tuple[Binding, ...]:
    """Declare a part of before, and return the bindings that cannot be made any more.

    Their queue or exchange is gone, or the queue is exclusive to another connection.

    :raises TopologyError: if the broker refuses anything else.
    """
    if _could_declare(connection, topology, part):
        return ()
    # Which one it was, the error does not say for sure; what follows it was not declared.
    declare(connection, topology, replace(part, bindings=()))
    return tuple(
        binding
        for binding in part.bindings
        if not _could_declare(connection, topology, Part(bindings=(binding,)))
    )


def _could_declare(connection: Any, topology: Topology, part: Part) -> bool:
    """Declare a part; return whether all of its bindings could be made."""
    try:
        declare(connection, topology, part)
    except TopologyError as exc:
        if isinstance(exc.__cause__, _CANNOT_BE_BOUND):
            return False
        raise
    return True


def delete_exchanges(
    connection: Any, names: Iterable[str], deleted: list[str] | None = None
) -> None:
    """Delete exchanges; those that do not exist are ignored.

    :param deleted: gets the name of each that is deleted or, after another error than a refusal,
        may be.
    :raises UnreachableError: if this user may not delete one.
    """
    deleted = [] if deleted is None else deleted
    channel = connection.channel()
    for name in names:
        # Before: an interrupt may come when the broker has done it.
        deleted.append(name)
        try:
            channel.exchange_delete(name)
        except AccessRefused as exc:
            deleted.pop()
            raise UnreachableError(
                f"RabbitMQ refused to delete the exchange {name!r}: {exc.reply_text}; grant this "
                f"user the permission configure on what is to be removed"
            ) from exc
    channel.close()


def delete_empty(channel: Any, probe: Probe, row: Row, ways: Iterable[str] = ()) -> None:
    """Delete a queue that is empty and stays so: no exchange that leads to it exists any more.

    RabbitMQ deletes a classic queue only if it is empty, on request. For a quorum queue it refuses
    that request, so this looks just before. A message that has expired and waits to be passed on is
    in no count but that of the statistics: only without ways, there can be none that is newer.

    :param row: the queue, as the management API describes it.
    :param ways: the exchanges that led to it.
    :raises RefusedError: if a message is in it, or a way exists; then the queue stays.
    :raises OperationError: if a message came in at the very moment, and is deleted.
    """
    name = row["name"]
    again = next((way for way in ways if probe.can_ask(way) and probe.has_exchange(way)), None)
    if again is not None:
        raise RefusedError(
            f"a program has declared the exchange {again!r} again; stop the programs that publish "
            f"to it, and try again"
        )
    count = probe.ready(name) or 0
    if not count:
        try:
            count = channel.queue_delete(name, if_empty=row.get("type") == "classic")
        except PreconditionFailed:
            count = probe.ready(name) or 1
        else:
            if count:
                raise OperationError(
                    f"{plural(count, 'message')} came into the queue {name!r} while it was deleted "
                    f"and lost; stop the programs that publish to it"
                )
            return
    raise RefusedError(
        f"{plural(count, 'message')} came into the queue {name!r}; stop the programs that publish "
        f"to it, and wait until it is empty"
    )
