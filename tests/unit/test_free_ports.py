"""Ports for servers that take seconds until they listen."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from dev import service
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


@pytest.mark.parametrize(
    ("lowest", "highest", "outside"),
    [(32768, 60999, True), (1024, 60999, True), (32768, 65535, True), (1024, 65535, False)],
)
def test_they_are_no_ports_of_clients_where_there_are_others(
    tmp_path, monkeypatch, lowest, highest, outside
):
    monkeypatch.setattr(service, "CLIENT_PORTS", tmp_path / "range")
    service.CLIENT_PORTS.write_text(f"{lowest}\t{highest}\n")

    ports = [each for _ in range(5) for each in free_ports(15)]

    assert outside == all(each < lowest or highest < each for each in ports)


def test_where_none_is_free_the_error_names_the_range(monkeypatch):
    monkeypatch.setattr(service, "_is_free", lambda _: False)

    with pytest.raises(OSError, match=r"not 6 free ports.*ip_local_port_range, \d+ to \d+"):
        free_ports(6)
