"""The source of delayed tasks: its options, and its default."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import click

from kombu_binary_delay import operate
from kombu_binary_delay.amendments.parts import IDS, stream_name
from kombu_binary_delay.celery_side.failures import BROKER_ERRORS, in_words
from kombu_binary_delay.errors import AmendmentError
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.operate.probe import Probe, cluster_name
from kombu_binary_delay.operate.waiting import JOURNAL, NODE

from .command import wrapped
from .connect import Target

_CTL = "rabbitmqctl"


def choose(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options ``--source`` and ``--node-command`` to a subcommand."""
    source = click.option(
        "--source",
        type=click.Choice([JOURNAL, NODE]),
        help="Where to read what waits.  [default: the node with --node-command; else the journal, "
        "if there is one; else the node, if rabbitmqctl is on this machine]",
    )
    command = click.option(
        "--node-command",
        metavar="COMMAND",
        envvar="BINARY_DELAY_NODE_COMMAND",
        help="The words before rabbitmqctl that run it on the broker's host, such as 'docker "
        "exec rabbit', "
        "'kubectl exec rabbit-0 --', 'ssh rabbit sudo'.  [default: none, for this host]",
    )
    return source(command(function))


class TaskSource:
    """One source of tasks, ready to be read.

    :param connection: an open connection, for the journal; None for the node.
    :param amending: a connection by our transport, for the amendments.
    """

    def __init__(
        self, broker: Target, connection: Any, command: str, amending: Any, said: set[str]
    ) -> None:
        self._broker = broker
        self._connection = connection
        self._command = command
        self._amending = amending
        self._vhost = broker.plain().virtual_host or "/"
        self._topology: Topology = broker.topology()
        self._namespace = broker.settings.namespace
        self.name = NODE if connection is None else JOURNAL
        self._said = said

    @classmethod
    def of(
        cls,
        broker: Target,
        stack: ExitStack,
        source: str | None,
        command: str | None,
        said: set[str] | None = None,
    ) -> TaskSource:
        """Return the requested source, or else the one that exists.

        :param stack: closes the connections.
        :param said: the warnings that were printed already; that of each look is added.
        :raises OperationError: if there is none.
        """
        connection = None
        if source == NODE or (source is None and command is not None):
            command = command or ""
        elif source is None and shutil.which(_CTL) is not None and not _has_journal(broker):
            command = ""
        else:
            connection, command = stack.enter_context(broker.plain()), ""
        amending = stack.enter_context(broker.delaying())
        return cls(broker, connection, command, amending, set() if said is None else said)

    def tasks(self) -> operate.TaskTable:
        """Read the waiting tasks, with all amendments until now."""
        judge = self._judge()
        if self._connection is None:
            return operate.from_node(
                self._command, self._vhost, self._topology, judge, cluster=self._cluster()
            )
        return operate.from_journal(
            self._connection, self._topology, judge, namespace=self._namespace
        )

    def story(self, task_id: str) -> operate.Story:
        """Return the story of one task, as this source knows it."""
        judge = self._judge()
        if self._connection is None:
            return operate.story_by_node(
                self._command, self._vhost, self._topology, task_id, judge, cluster=self._cluster()
            )
        return operate.story_by_journal(
            self._connection, self._topology, task_id, judge, namespace=self._namespace
        )

    def _cluster(self) -> str | None:
        """Return the name of the broker's cluster; None if the broker did not answer."""
        return cluster_name(self._amending) if self._amending.connected else None

    def _judge(self) -> Any:
        """Return what applies the amendments; None, with a warning, if they cannot be read."""
        try:
            judge = operate.judge_of(self._amending)
            reader = self._amending.connection.delay_mechanism.amendments.reader
            if reader.is_reading:
                return judge
            with Probe(self._amending) as probe:
                if not probe.has_stream(stream_name(self._namespace, IDS)):
                    return judge
            why = "this user may not read the stream of amendments, or its node is just starting"
            if not self._broker.settings.amendments:
                why = "the setting amendments is off, so programs with these settings run it"
        except (AmendmentError, *BROKER_ERRORS) as exc:
            # The node can be read even if its broker is unreachable.
            why = in_words(exc, self._broker)
        if why not in self._said:
            # Once, and not at each look.
            self._said.add(why)
            listed = "what was taken back is listed, too"
            if self._connection is None and self._cluster() is None:
                listed += ", and whether this node is that broker's is not checked"
            click.echo(wrapped(f"! {listed}: {why}"), err=True)
        return None


def words_of(task: operate.WaitingTask) -> dict[str, Any]:
    """Return a task as a mapping for JSON."""
    return {**dataclasses.asdict(task), "queue": task.queue}


def _has_journal(broker: Target) -> bool:
    with broker.plain() as connection:
        return operate.has_journal(connection, broker.settings.namespace)
