"""``status``: delayed, parked and stuck messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import click

from kombu_binary_delay import operate
from kombu_binary_delay.ladder.foreign import FOREIGN_LADDERS
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.settings import Settings

from .command import FOUND, OK, Printer, ladder, subcommand
from .connect import Target
from .sources import TaskSource, choose
from .values import Seconds

_HISTORY = 60  # looks


@click.command(
    short_help="Show what waits, and what is parked or stuck.",
    help="""Show what waits, level by level, when it leaves, and what is parked or stuck.

    A line a level: how many messages wait in each of its queues, and after what time all of them
    have left the ladder. Every ladder of the namespace is shown. What is wrong comes last, and with
    --watch first: alarms of nodes, disks that are nearly full, missing parts, levels that are
    stuck, parked messages. What waits is counted at this moment; rates, and what is leaving, are up
    to ten seconds old.

    'amendments' counts what was cancelled, rescheduled or superseded and still counts. With a
    journal on the broker, 'late' is of the messages that arrived in the last hour.

    Ends with 1 where something is wrong, or with --destinations could not be read. With --watch
    --json, prints one line of JSON a look.

    \b
      kombu-binary-delay status
      kombu-binary-delay -A shop status --watch
      kombu-binary-delay status --destinations
      kombu-binary-delay status --json
    """,
)
@click.option("--watch", is_flag=True, help="Look again and again, until Ctrl-C.")
@click.option(
    "--every",
    type=Seconds(min=0.5),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to pause between two looks.",
)
@click.option(
    "--destinations",
    is_flag=True,
    help="Count what waits by destination, too. Reads each message from the journal or the node, "
    "as 'tasks' does: a million take a minute or two.",
)
@choose
@ladder
@partial(subcommand, management=True)
def status(
    broker: Target,
    printer: Printer,
    watch: bool,
    every: float,
    destinations: bool,
    source: str | None,
    node_command: str | None,
    ladder: str | None,
) -> int:
    """Show what waits, level by level, when it leaves, and what is parked or stuck."""
    with ExitStack() as stack:
        # It connects only if there are amendments to read.
        connection = stack.enter_context(broker.plain())
        amending = stack.enter_context(broker.delaying())
        management = broker.management(connection)
        topology = broker.topology(ladder)
        expected = broker.expected(connection, ladder)
        asked = {lane.prefix for lane in expected.lanes}
        if ladder is not None:
            # Those of the settings are in use, whichever is asked for.
            used = broker.expected(connection).lanes
            own = [lane for lane in used if topology.owns(lane.delivery)]
            if destinations and not own:
                raise click.UsageError(_not_read(topology, broker.settings))
            lanes = dict.fromkeys((*expected.lanes, *own))
            expected = replace(expected, lanes=tuple(lanes))
        tasks = TaskSource.of(broker, stack, source, node_command) if destinations else None
        last_hour = operate.LastHour(broker.settings.namespace, topology.ladder.tick)

        def look() -> _View:
            status = operate.status(
                connection,
                management,
                topology,
                expected,
                amending if broker.settings.amendments else None,
                last_hour,
            )
            return _View(status, None if tasks is None else tasks.tasks())

        if watch:
            # The user ends it with Ctrl-C.
            with suppress(KeyboardInterrupt):
                if printer.as_json:
                    while True:
                        _show(printer, look())
                        time.sleep(every)
                _watch(look, every)
            return OK
        seen = look()
    if ladder is not None and asked.isdisjoint(shown.name for shown in seen.status.ladders):
        raise operate.OperationError(f"nothing of the ladder {ladder} exists in this virtual host")
    _show(printer, seen)
    return FOUND if seen.status.troubles or not seen.complete else OK


def _not_read(topology: Topology, settings: Settings) -> str:
    """Return why the destinations on a ladder that is none of the settings' are not counted."""
    names = [name for name, other in FOREIGN_LADDERS.items() if other == topology]
    if names:
        instead = f"give --foreign-ladder {names[0]}, too"
    elif settings.foreign_ladder is not None:
        instead = "leave out foreign_ladder"
    else:
        instead = f"give --namespace {topology.namespace}, too"
    return (
        f"--destinations counts what waits on the ladders of the settings, of which "
        f"{topology.prefix} is none; {instead}"
    )


@dataclass(frozen=True)
class _View:
    """The result of one look; without tasks unless their destinations were requested."""

    status: operate.Status
    tasks: operate.TaskTable | None = None

    @property
    def complete(self) -> bool:
        return self.tasks is None or self.tasks.complete

    def drawn(self) -> list[Any]:
        from . import output  # noqa: PLC0415 - Rich comes with the extra `cli`

        if self.tasks is None:
            return []
        foot = output.task_foot(self.tasks, operate.Selection(), self.tasks.count())
        return [output.counts(self.tasks.count_by("queue"), "destination", foot), ""]


def _show(printer: Printer, seen: _View) -> None:
    if printer.as_json:
        more: dict[str, Any] = {}
        if seen.tasks is not None:
            more = {
                "destinations": [asdict(count) for count in seen.tasks.count_by("queue")],
                "source": seen.tasks.source,
                "matched": seen.tasks.count(),
                "complete": seen.tasks.complete,
                "unseen": seen.tasks.unseen(),
            }
        printer.show(seen.status, "status", **more)
        return
    from . import output  # noqa: PLC0415 - Rich comes with the extra `cli`

    output.console().print(output.status(seen.status, *seen.drawn()))


def _watch(look: Callable[[], _View], every: float) -> None:
    from .console import watch  # noqa: PLC0415 - Rich comes with the extra `cli`
    from .status_screen import watched  # noqa: PLC0415 - see above

    history: deque[tuple[float, float]] = deque(maxlen=_HISTORY)

    def draw() -> Any:
        seen = look()
        ladders = seen.status.ladders
        history.append(
            (
                sum(ladder.rate_in or 0.0 for ladder in ladders),
                sum(ladder.rate_out or 0.0 for ladder in ladders),
            )
        )
        return watched(seen.status, list(history), *seen.drawn())

    watch(draw, every)
