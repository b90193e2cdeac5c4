"""Purpose: `make faults`: run the scenarios, print the table, and fail where a promise was broken.

python -m dev.faults [--short] [--list] [--json FILE] [WORD ...]

A case runs if every word is a part of its name. RABBITMQ_ROOT chooses another broker.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from dev.faults.environment import run_case
from dev.faults.report import Row, merge, table, to_row
from dev.faults.scenarios import CASES


def main() -> int:
    """Run the cases that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dev.faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of a case's name")
    parser.add_argument("--short", action="store_true", help="only what the tests run, and less")
    parser.add_argument("--list", action="store_true", help="only name the cases")
    parser.add_argument("--json", type=Path, help="a file to put the figures into")
    arguments = parser.parse_args()
    chosen = [
        case
        for case in CASES
        if (case.short or not arguments.short)
        and all(word in f"{case.scenario}: {case.name}" for word in arguments.words)
    ]
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if arguments.list or not chosen:
        for case in chosen or CASES:
            console.print(f"{case.scenario}: {case.name}")
        return 0 if chosen else 2
    rows: list[Row] = []
    broken = False
    for case in chosen:
        start = time.monotonic()
        console.print(f"{case.scenario}: {case.name} ...")
        try:
            outcome = run_case(case, os.environ.get("RABBITMQ_ROOT"), short=arguments.short)
        except Exception as error:  # noqa: BLE001 - the other scenarios are to run
            console.print(f"  could not run: {error!r}", markup=False)
            broken = True
            continue
        if outcome is None:
            console.print(f"  not on a RabbitMQ before {'.'.join(map(str, case.since))}")
            continue
        rows.append(to_row(outcome))
        broken = broken or not outcome.holds
        console.print(f"  {time.monotonic() - start:.0f} s, {rows[-1]}", markup=False)
        if arguments.json:
            merge(arguments.json, rows[-1:])
    console.print(table(rows))
    return int(broken)


if __name__ == "__main__":
    # So that what we started ends in order. Ctrl-C is an exception already.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
