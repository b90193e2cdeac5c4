"""Purpose: the output of ``--help``, for the command or a subcommand."""

from __future__ import annotations

from typing import Any

import click

from kombu_binary_delay.cli import binary_delay

WIDTH = 88  # columns of the terminal


def cli_help(arguments: list[str], _: str) -> str:
    """Return the help of the subcommand that the argument names, or of the whole command.

    A subcommand of another has the name of that before its own: ``spark plan``.
    """
    name = "kombu-binary-delay"
    command: Any = binary_delay
    context = click.Context(command, info_name=name, terminal_width=WIDTH)
    for subcommand in " ".join(arguments).split():
        command = command.commands[subcommand]
        context = click.Context(command, info_name=subcommand, parent=context, terminal_width=WIDTH)
    return f"```text\n{command.get_help(context)}\n```"
