"""Ports for servers that take seconds until they listen."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from dev.service import free_ports

ANOTHER = """
import random
random.sample = lambda ports, _: list(ports)
from dev.service import free_ports
print(*free_ports(6))
"""


def test_two_processes_are_never_given_the_same(monkeypatch):
    """Given: both try the same ports, in the same order."""
    monkeypatch.setattr(random, "sample", lambda ports, _: list(ports))
    ours = [*free_ports(6), *free_ports(6)]

    done = subprocess.run(
        [sys.executable, "-c", ANOTHER],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )

    theirs = [int(each) for each in done.stdout.split()]
    assert len({*ours, *theirs}) == 18
