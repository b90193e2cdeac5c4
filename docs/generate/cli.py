"""Purpose: a table of the subcommands, with what each does. ``--help`` says more."""

from __future__ import annotations

from kombu_binary_delay.cli import binary_delay

from .markdown import table


def cli_commands(_: list[str], __: str) -> str:
    """Return a table of the subcommands and their one line."""
    rows = [
        [f"`{name}`", command.short_help or ""] for name, command in binary_delay.commands.items()
    ]
    return table(["Subcommand", "What it does"], rows, text=2)
