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
from kombu_binary_delay.operate.failures import named
from kombu_binary_delay.operate.reading import sources
from kombu_binary_delay.operate.status import parked_by_side
from kombu_binary_delay.operate.trouble import alarms
from kombu_binary_delay.schedules import Schedules
from kombu_binary_delay.settings import Settings


class Broker(Protocol):
    """A broker's address and settings; the command line's ``Target`` is one."""

    @property
    def settings(self) -> Settings:
        """The settings of the transport."""
        ...

    @property
    def option(self) -> str:
        """The option or setting that names it, for error messages."""
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

    def schedules(self, connection: Any) -> tuple[Schedules, ...]:
        """Return the schedules of all apps on the broker."""
        ...


class TaskSource(Protocol):
    """The journal or the node; the command line has one."""

    def tasks(self) -> operate.TaskTable:
        """Read the delayed tasks."""
        ...

    def story(self, task_id: str) -> operate.Story:
        """Return the story of one task, as this source knows it."""
        ...


#: Opens a source of tasks; the stack closes what it has opened.
Open = Callable[[ExitStack], TaskSource]


@dataclass(frozen=True)
class Now:
    """What the broker has now.

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
            with named(self._broker):
                return self._now()
        except BaseException:
            self.close()
            raise

    def findings(self) -> tuple[operate.Verification, ...]:
        """Return the differences between the broker and the topology, as ``verify`` does."""
        try:
            with named(self._broker):
                return tuple(self._broker.verify(self._open()))
        except BaseException:
            self.close()
            raise

    def schedules(self) -> tuple[Schedules, ...]:
        """Return the schedules of all apps."""
        try:
            with named(self._broker):
                return self._broker.schedules(self._open())
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
                    *(source.name, source.wait, 2 * source.wait, counts[source.name], 0),
                    level=source.level,
                )
                for source in sources(lane, counts)
            ]
            queues.sort(key=lambda queue: (queue.wait, queue.queue))
            if queues:
                ladders.append(operate.LadderStatus(lane.prefix, True, tuple(queues), None, None))  # noqa: FBT003 - it is in use
        server = connection.connection.server_properties
        return operate.Status(
            time.time(),
            str(server.get("version", "")),
            connection.virtual_host or "/",
            tuple(ladders),
            sum(parked_by_side(connection, topology).values()),
            None,
            (),
        )


def read_tasks(source: Open, broker: Broker, *, hide: bool) -> operate.TaskTable:
    """Read all delayed tasks from a source.

    :param hide: whether to leave out their arguments.
    """
    with ExitStack() as stack, named(broker):
        table = source(stack).tasks()
    if hide:
        table.hide_arguments()
    return table


@dataclass(frozen=True)
class TaskView:
    """One task's story, and its way down the ladder; empty if that is unknown.

    :param begins: when it was scheduled, in milliseconds since the epoch.
    :param here: which of the ``waits`` it is in, from 0.
    """

    story: operate.Story
    begins: int = 0
    waits: tuple[operate.Wait, ...] = ()
    here: int = 0


def read_story(source: Open, broker: Broker, task_id: str, *, hide: bool) -> TaskView:
    """Read and return the story of one task."""
    with ExitStack() as stack, named(broker):
        story = source(stack).story(task_id)
    task = story.task
    if hide and task is not None:
        task = replace(task, args=None, kwargs=None)
        story = replace(story, task=task)
    scheduled = [event for event in story.events if event.kind == "scheduled"]
    if task is None or task.level is None or not scheduled:
        return TaskView(story)
    begins, due = scheduled[-1].at, scheduled[-1].due
    if begins is None or due is None:
        return TaskView(story)
    # A lane, the broker's kind of queues: only the level says which ladder it is on.
    topology = topology_of_name(task.level) or broker.topology()
    destination = Destination(task.exchange, task.routing_key)
    try:
        waits = operate.explain(topology, max(due - begins, 0), destination, begins).waits
    except (AddressError, DelayError):
        return TaskView(story)
    queues = [wait.queue for wait in waits]
    if task.level not in queues:
        return TaskView(story)
    return TaskView(story, begins, waits, queues.index(task.level))
