"""``migrate`` and ``transfer``: move delayed messages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import click

from kombu_binary_delay import operate
from kombu_binary_delay.amendments.parts import IDS, stream_name
from kombu_binary_delay.ladder.topology import Topology
from kombu_binary_delay.operate.failures import named
from kombu_binary_delay.operate.migrate import refuse_a_circle

from .command import FOUND, OK, SOON, Printer, dry_run, subcommand
from .connect import Target

_from_ladder = click.option(
    "--from",
    "ladder",
    metavar="LADDER",
    help="The ladder to empty, as 'status' names it, or shorter: 250ms-2x30, celery, nservicebus; "
    "or Celery's with a prefix: shop_celery_delayed_.",
)
_from_queue = click.option(
    "--from-queue",
    metavar="NAME",
    help="Or an ordinary queue, of which to move the tasks that have an eta in the future.",
)
_exchange = click.option(
    "--exchange",
    metavar="NAME",
    help="For Celery's own ladder: the exchange that messages were published to, if no binding "
    "says it.",
)


@click.command(
    short_help="Move what waits to another ladder.",
    help="""Move what waits from one ladder to another, in the same virtual host.

    A message keeps its due time. If neither the message nor NServiceBus's headers say it, the
    message waits for as long as it could at most on its old ladder.

    A message leaves its queue only when the broker has confirmed its copy. So you can stop it at
    any time, and run it again. What cannot be read goes to a poison queue, which the output names,
    and the exit status is 1.

    \b
      kombu-binary-delay migrate --from 250ms-2x30 --dry-run
      kombu-binary-delay -A shop migrate --from celery
      kombu-binary-delay migrate --from-queue tasks
      kombu-binary-delay migrate --from nservicebus-v1 --to nservicebus
    """,
)
@_from_ladder
@_from_queue
@click.option(
    "--to", "to", metavar="LADDER", help="The ladder to fill.  [default: that of the settings]"
)
@_exchange
@dry_run
@partial(subcommand, management=True, cleaning=SOON)
def migrate(
    broker: Target,
    printer: Printer,
    ladder: str | None,
    from_queue: str | None,
    to: str | None,
    exchange: str | None,
    dry_run: bool,
) -> int:
    """Move what waits from one ladder to another, in the same virtual host."""
    if ladder is None and from_queue is None:
        raise click.UsageError("say what to move: --from or --from-queue")
    return _move(broker, broker, printer, (ladder, from_queue), to, exchange, dry_run=dry_run)


@click.command(
    short_help="Move what waits to another broker.",
    help="""Move what waits to another broker or virtual host, to the ladder of the settings.

    Without --from, that is the ladder it is taken from. It works as 'migrate' does. Make the
    destination queues there first: a message that finds none is parked there.

    Cancellations stay behind: a task that was cancelled, rescheduled or superseded here runs there
    at its first due time, so cancel it there, too. The output warns if there are any. Only a
    cancellation that itself waits on the ladder goes along.

    \b
      kombu-binary-delay transfer --to-broker amqp://new:5672// --dry-run
      kombu-binary-delay transfer --to-broker amqp://new:5672//
      kombu-binary-delay transfer --to-broker amqp://localhost/shop \\
        --from 250ms-2x30
    """,
)
@click.option("--to-broker", metavar="URL", required=True, help="The broker, or virtual host.")
@click.option(
    "--to-management",
    metavar="URL",
    help="Its management API, for the setting foreign_ladder.  [default: its host, port 15672; "
    "with TLS, 15671]",
)
@_from_ladder
@_from_queue
@_exchange
@dry_run
@partial(subcommand, management=True, cleaning=SOON)
def transfer(
    broker: Target,
    printer: Printer,
    to_broker: str,
    to_management: str | None,
    ladder: str | None,
    from_queue: str | None,
    exchange: str | None,
    dry_run: bool,
) -> int:
    """Move what waits to another broker, or another virtual host, to the ladder of the settings."""
    there = replace(Target.of(None, to_broker, to_management, broker.given), option="--to-broker")
    return _move(broker, there, printer, (ladder, from_queue), None, exchange, dry_run=dry_run)


def _move(
    here: Target,
    there: Target,
    printer: Printer,
    origin: tuple[str | None, str | None],
    to: str | None,
    exchange: str | None,
    *,
    dry_run: bool,
) -> int:
    ladder, queue = origin
    if ladder is not None and queue is not None:
        raise click.UsageError("--from and --from-queue are two origins: give one")
    with here.plain() as connection:
        management = here.management(connection)
        ladders = here.lanes(connection, ladder)
        if here is there:
            # What is urgent may be on a ladder that both have.
            filled = here.filled(connection, to)
            ladders = [ladder for ladder in ladders if ladder not in filled] or ladders
        source: list[Topology] | str = queue or ladders
        snapshot = operate.Snapshot.read(management)
        planned = operate.plan(connection, snapshot, source)
        # Before a dry run ends: it must not promise what the run refuses.
        with named(there), there.plain() as sending:
            target = there.filled(sending, to)
            asked_there = None if here is there else there.management(sending)
            refuse_a_circle(connection, sending, source, target)
    into = there.on(target[0]) if to is not None and target[0].is_ours else there
    if here is there and queue is None and target[0].is_ours:
        _warn_of_another_side(printer, ladders[0], target[0])
    # Of a queue, or of another system's ladder, those of the settings count.
    own = queue is None and ladders[0].is_ours
    before = ladders[0].namespace if own else here.settings.namespace
    after = target[0].namespace if target[0].is_ours else before
    if (here is not there or before != after) and stream_name(before, IDS) in snapshot.queues:
        place = "there" if here is not there else f"in the namespace {after}"
        printer.log(
            f"! what was cancelled, rescheduled or superseded is not so {place}: only a "
            f"cancellation that waits in the first queue of the ladder that it entered goes along"
        )
    if dry_run:
        if queue is not None:
            printer.log(
                f"of what is in {queue}, only the tasks that have an eta in the future are moved"
            )
        printer.show(planned, "plan", dry=True, messages=planned.messages)
        return FOUND if planned.reasons else OK
    connect: Any = there.plain
    if target[0].is_ours:
        # What is moved is no new message, and what is left of a delay is no delay of its own.
        connect = partial(into.delaying, queue_per_delay=False)
        # The journal of this namespace has what waits on another of its ladders already.
        if here is there and not queue and _is_of_one_journal(ladders[0], target[0]):
            connect = partial(connect, journal=None)
    brokers = (here,) if here is there else (here, there)
    from .progress import bar  # noqa: PLC0415 - Rich comes with the extra `cli`

    with named(*brokers), bar("move", planned.messages) as update:
        done = operate.migrate(
            here.plain,
            connect,
            management,
            source,
            target,
            there=asked_there,
            exchange=exchange,
            namespace=here.settings.namespace,
            progress=update,
        )
    printer.show(done, "migration")
    return FOUND if done.reasons or done.poison else OK


def _warn_of_another_side(printer: Printer, source: Topology, target: Topology) -> None:
    """Warn that a message for an exchange may be parked, which would have arrived."""
    if source.delivery != target.delivery:
        printer.log(
            f"! {target.prefix} has another delivery side, {target.delivery}: a message for an "
            f"exchange that it does not lead to is parked when it is due; start consumers with its "
            f"settings first, or run 'create --exchange' for each exchange"
        )


def _is_of_one_journal(one: Topology, other: Topology) -> bool:
    return one.namespace == other.namespace
