"""The directive ``cli-help``: what ``--help`` prints, of the command or of a subcommand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from kombu_binary_delay.cli import binary_delay

if TYPE_CHECKING:
    from sphinx.application import Sphinx

WIDTH = 88


def cli_help(subcommand: str | None) -> str:
    """Write the help as a terminal of a fixed width shows it."""
    name = "kombu-binary-delay"
    context = click.Context(binary_delay, info_name=name, terminal_width=WIDTH)
    if subcommand is None:
        return binary_delay.get_help(context)
    command = binary_delay.commands[subcommand]
    return command.get_help(
        click.Context(command, info_name=subcommand, parent=context, terminal_width=WIDTH)
    )


class CliHelp(SphinxDirective):
    """The help of a subcommand, or without one of the whole command."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the text in place of the directive."""
        text = cli_help(self.arguments[0] if self.arguments else None)
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("cli-help", CliHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
