"""The subcommand ``spark audit-follow``: parse, call, print."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

from .audit import show_counts
from .before import check_before
from .failures import outage
from .shared import (
    FAILED,
    broker,
    check_call,
    check_job,
    conf,
    console,
    error_console,
    given_broker,
    job_id,
    late_after,
    limits_of,
    namespace,
    receipts,
    spark_session,
    usage,
)

if TYPE_CHECKING:
    from kombu_binary_delay.spark.follow import Step


@click.command(
    "audit-follow",
    help="""Give each task its verdict once it is final, and go on until stopped.

    Each step adds what the broker's journal has got to a table, and appends the verdicts of the
    tasks whose time has come. A second run goes on where the first has ended. `spark report` draws
    the verdicts so far.

    Exits with 1 where a threshold is exceeded: by default, a task that is lost or early.
    """,
)
@broker
@namespace
@receipts
@click.option(
    "--journal",
    required=True,
    metavar="TABLE",
    help="The table of the journal, to which the broker's new events are added.",
)
@click.option("--output", required=True, metavar="PATH", help="A folder for verdicts and steps.")
@job_id
@late_after
@click.option(
    "--patience",
    type=float,
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A task has its verdict so long after it was due: give more than the longest run, and the "
    "wait in a worker before it.",
)
@click.option(
    "--every",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="The time between the beginnings of two steps.",
)
@click.option("--once", is_flag=True, help="Do one step, as for a scheduler.")
@click.option(
    "--allow",
    metavar="NAME=NUMBER",
    multiple=True,
    help="As for audit; no task needs to be judged yet.",
)
@conf
def audit_follow(
    broker: str | None,
    namespace: str,
    receipts: str | None,
    journal: str,
    output: str,
    job_id: str | None,
    late_after: float,
    patience: float,
    every: float,
    once: bool,
    allow: tuple[str, ...],
    conf: tuple[str, ...],
) -> None:
    """Judge each task once its verdict is final, and go on until stopped."""
    check_call()
    from kombu_binary_delay.spark import schema as s  # noqa: PLC0415 - with Spark's
    from kombu_binary_delay.spark.audit import Thresholds, summarize  # noqa: PLC0415
    from kombu_binary_delay.spark.follow import audit_due, read_verdicts  # noqa: PLC0415
    from kombu_binary_delay.spark.journal import export_journal  # noqa: PLC0415
    from kombu_binary_delay.spark.tables import read  # noqa: PLC0415

    check_job(job_id, receipts)
    thresholds = limits_of(Thresholds, allow, judged=0.0)
    url = given_broker(broker)
    check_before(conf, reads=(receipts,), writes=(journal, output), broker=url)
    session = spark_session(conf)
    step = None
    with _stopped_by_signals() as stop:
        while not stop.is_set():
            begun = time.monotonic()
            try:
                export_journal(session, url, journal, namespace=namespace)
            except Exception as exc:
                away = outage(exc)
                # At the start, the broker may be the wrong one.
                if once or step is None or away is None:
                    raise
                error_console().print(f"the journal is read again in {every:g} s: {away}")
            else:
                with usage():
                    step = audit_due(
                        read(session, receipts, s.RECEIPTS) if receipts else None,
                        read(session, journal, s.JOURNAL),
                        output,
                        job_id=job_id,
                        late_after=late_after,
                        patience=patience,
                    )
                _show(step)
            if once:
                break
            stop.wait(max(0.0, begun + every - time.monotonic()))
    summary = summarize(read_verdicts(session, output), thresholds)
    show_counts(summary)
    if not summary["passed"]:
        sys.exit(FAILED)


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, so that a step that has begun is finished.

    The second signal does what it would have done without this.
    """
    stop = threading.Event()

    def ask(*_: object) -> None:
        restore()
        stop.set()
        # Not print, which the signal may have interrupted. Nobody may read it.
        with suppress(OSError):
            os.write(2, b"finishing this step; a second signal ends it\n")

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        restore()


def _show(step: Step) -> None:
    count = sum(step.verdicts.values())
    if not count and not step.corrected:
        return
    verdicts = ", ".join(f"{number:,} {name}" for name, number in sorted(step.verdicts.items()))
    console().print(
        f"due before {step.final_to:%Y-%m-%d %H:%M:%S} UTC: {count:,} judged"
        f"{f' ({verdicts})' if verdicts else ''}, {step.corrected:,} corrected"
    )
    for row in step.alarms:
        console().print(
            f"  {row['verdict']}: {row['task_id']} (key {row['key']}, queue {row['queue']})"
        )
