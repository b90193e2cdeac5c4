"""``help``: what all subcommands have in common."""

from __future__ import annotations

import click

from .options import settings_options

_EXIT = (
    ("0", "all is well"),
    ("1", "something was found, such as a difference or a parked message"),
    ("2", "it cannot be done as asked"),
    ("3", "it would lose messages, and was refused"),
    ("4", "the broker or its management API does not answer, or refuses the user or what was sent"),
)


@click.command(
    name="help",
    short_help="Say more about settings, exit or a subcommand.",
    help="""Say more about a TOPIC: 'settings', 'exit', or the name of a subcommand.

    \b
      kombu-binary-delay help settings
      kombu-binary-delay help exit
    """,
)
@click.argument("name", metavar="TOPIC", required=False)
@click.pass_context
def topic(context: click.Context, name: str | None) -> None:
    """Say more about a topic."""
    group = context.find_root() if context.parent is None else context.parent
    commands = getattr(group.command, "commands", {})
    if name is None:
        click.echo(group.get_help())
    elif name == "settings":
        click.echo(_settings(context))
    elif name == "exit":
        formatter = context.make_formatter()
        with formatter.section("The exit status is"):
            formatter.write_dl(_EXIT)
        click.echo(formatter.getvalue().rstrip())
    elif name in commands:
        command = commands[name]
        with click.Context(command, parent=group, info_name=name) as own:
            click.echo(command.get_help(own))
    else:
        raise click.UsageError(
            f"there is no topic {name!r}: give 'settings', 'exit' or the name of a subcommand"
        )


def _settings(context: click.Context) -> str:
    """Return the help of the options that are settings of the transport."""
    formatter = context.make_formatter()
    formatter.write_text(
        "The settings of your programs, which name the ladder. With -A, they are read from the "
        "Celery app. Otherwise give the options before the subcommand or after it, or set them in "
        "the environment, such as BINARY_DELAY_TICK."
    )
    records = [option.get_help_record(context) for option in settings_options(hidden=False)]
    with formatter.section("Options"):
        formatter.write_dl([record for record in records if record is not None])
    return formatter.getvalue().rstrip()
