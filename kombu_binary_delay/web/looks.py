"""Read for pages from a broker, through :mod:`..operate`; each call reads again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kombu_binary_delay import operate
from kombu_binary_delay.errors import AddressError, DelayError
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.recognise import topology_of_name
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.operate.reading import sources
from kombu_binary_delay.operate.status import parked_by_side
from kombu_binary_delay.operate.trouble import alarms
from kombu_binary_delay.settings import Settings

from .index import Index


class Broker(Protocol):
    """A broker's address and settings; the command line's ``Target`` is one."""

    @property
    def settings(self) -> Settings:
        """The settings of the transport."""
        ...

    def plain(self) -> Any:
        """Return a connection by Kombu's own transport."""
        ...

    def delaying(self) -> Any:
        """Return a connection by our transport."""
        ...

    def expected(self, connection: Any) -> operate.Expected:
        """Return the ladders that are used side by side, and what else should be so."""
        ...

    def topology(self, connection: Any = None) -> Topology:
        """Return the first of the ladders."""
        ...

    def verify(self, connection: Any) -> list[operate.Verification]:
        """Compare the broker with the ladders of the settings."""
        ...

    def management(self, connection: Any) -> operate.Management:
        """Return the management API of a connection's broker."""
        ...


class Place(Protocol):
    """One source of tasks."""

    def waiters(self, select: operate.Selection) -> operate.Waiters:
        """Return the delayed tasks of this source."""
        ...

    def story(self, task_id: str) -> operate.Story:
        """Return the story of one task, as this source knows it."""
        ...


#: Opens a source of tasks; the stack closes what it has opened.
Open = Callable[[ExitStack], Place]


@dataclass(frozen=True)
class Now:
    """One look at the broker.

    :param status: as :func:`operate.status` returns it.
    :param alarms: in sentences.
    :param missing: the values that could not be read, in sentences.
    """

    status: operate.Status
    alarms: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class Watch:
    """Reads from the broker on one connection, which is reopened after a failure."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._connection: Any = None

    def now(self) -> Now:
        """Return the messages in the levels, the parked ones, and the alarms."""
        try:
            return self._now()
        except BaseException:
            self.close()
            raise

    def findings(self) -> tuple[operate.Verification, ...]:
        """Return the differences between the broker and the topology, as ``verify`` does."""
        try:
            return tuple(self._broker.verify(self._open()))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; it is reopened when needed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):
                connection.release()

    def _open(self) -> Any:
        if self._connection is None:
            self._connection = self._broker.plain()
            self._connection.ensure_connection(max_retries=1, timeout=10)
        return self._connection

    def _now(self) -> Now:
        connection = self._open()
        management = self._broker.management(connection)
        expected = self._broker.expected(connection)
        topology = self._broker.topology()
        try:
            status = operate.status(connection, management, topology, expected)
        except operate.UnreachableError as exc:
            status = self._counted(connection, topology, expected.lanes)
            missing = f"Rates, alarms, relays and findings are missing: {exc}."
            return Now(status, (), (missing,))
        return Now(status, tuple(alarms(management)))

    def _counted(
        self, connection: Any, topology: Topology, lanes: Iterable[Topology]
    ) -> operate.Status:
        """Return the levels' message counts over AMQP, which work without the management API."""
        ladders = []
        for lane in lanes:
            names = [queue.name for part in lane.levels for queue in part.queues]
            counts = operate.ready(connection, names)
            queues = [
                # The waits below a level sum up to less than the level's own wait.
                operate.Waiting(
                    *(each.name, each.wait, 2 * each.wait, counts[each.name], 0),
                    level=each.level,
                )
                for each in sources(lane, counts)
            ]
            queues.sort(key=lambda each: (each.wait, each.queue))
            if queues:
                ladders.append(operate.LadderStatus(lane.prefix, True, tuple(queues), 0.0, 0.0))  # noqa: FBT003 - it is in use
        server = connection.connection.server_properties
        return operate.Status(
            time.time(),
            str(server.get("version", "")),
            connection.virtual_host or "/",
            tuple(ladders),
            sum(parked_by_side(connection, topology).values()),
            0,
            (),
        )


def read_index(place: Open, *, hide: bool) -> Index:
    """Read all delayed tasks from a source, and return their index."""
    with ExitStack() as stack:
        return Index(place(stack).waiters(operate.Selection()), hide=hide)


@dataclass(frozen=True)
class Told:
    """One task's story, and its route down the ladder; empty if that is unknown.

    :param begins: when it was scheduled, in milliseconds since the epoch.
    :param here: which of the ``stays`` it is in, from 0.
    """

    story: operate.Story
    begins: int = 0
    stays: tuple[operate.Stay, ...] = ()
    here: int = 0


def read_story(place: Open, broker: Broker, task_id: str, *, hide: bool) -> Told:
    """Read and return the story of one task."""
    with ExitStack() as stack:
        story = place(stack).story(task_id)
    if hide and story.task is not None:
        story = replace(story, task=replace(story.task, args=None, kwargs=None))
    scheduled = next((each for each in reversed(story.events) if each.kind == "scheduled"), None)
    if scheduled is None or scheduled.due is None or story.task is None or story.task.level is None:
        return Told(story)
    # A lane, the broker's kind of queues: only the level says which ladder it is on.
    topology = topology_of_name(story.task.level) or broker.topology()
    destination = Destination(story.task.exchange, story.task.routing_key)
    try:
        delay = max(scheduled.due - scheduled.at, 0)
        stays = operate.explain(topology, delay, destination, scheduled.at).stays
    except (AddressError, DelayError):
        return Told(story)
    queues = [each.queue for each in stays]
    if story.task.level not in queues:
        return Told(story)
    return Told(story, scheduled.at, stays, queues.index(story.task.level))
