"""How a difference and its remedy are shown on a terminal."""

from __future__ import annotations

import io

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from kombu_binary_delay.cli import binary_delay, output
from kombu_binary_delay.operate import Difference

LONG = "x" * 90


def shown(remedy: str) -> list[str]:
    difference = Difference(
        "error", "policy limit", "it matches the ladder", "messages leave", remedy
    )
    drawn = io.StringIO()
    Console(file=drawn, width=60).print(
        output._difference(difference, set()),  # noqa: SLF001 - as it draws each
        crop=False,
    )
    return [line.strip() for line in drawn.getvalue().splitlines()]


@pytest.mark.parametrize("command", [f"rabbitmqctl set_policy {LONG}", f"curl -X DELETE {LONG}"])
def test_a_command_to_copy_is_one_line_however_narrow_the_terminal(command):
    assert shown(f"leave out the ladder's names: {command}")[-2:] == [
        "→ leave out the ladder's names:",
        command,
    ]
    assert shown(command)[-1] == f"→ {command}"


def test_what_names_a_command_in_passing_is_a_sentence():
    lines = shown("stop them: 'rabbitmqctl list_consumers -p shop' names them")
    assert " ".join(lines[-2:]).startswith("→ stop them: 'rabbitmqctl list_consumers")


@pytest.mark.parametrize(("value", "coloured"), [("", True), ("1", False)])
def test_errors_have_no_colour_where_the_environment_says_so(monkeypatch, value, coloured):
    monkeypatch.setenv("NO_COLOR", value)
    done = CliRunner().invoke(
        binary_delay, ["-b", "amqp://127.0.0.1:1", "status"], color=True, prog_name="tool"
    )
    assert done.exit_code == 4
    assert ("\x1b[31m" in done.stderr) is coloured, click.unstyle(done.stderr)
