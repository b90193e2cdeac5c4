"""An option for each setting of the transport, with its help in the words of operators."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from kombu_binary_delay.settings import Settings

#: Settings that only publishing programs use.
NOT_FOR_OPERATORS = ("jitter",)
HELP = {
    "tick": "The smallest delay, in milliseconds; delays are rounded up to whole ticks.  "
    "[default: 125]",
    "levels": "How many levels the ladder has. Each more makes the longest delay as many times as "
    "long as --radix says.  [default: for delays up to 2**31 ticks, or 10 years: 16 with the "
    "default tick and radix, for 3,106 days]",
    "radix": "8 for three bits of the delay a level, with seven queues each; 2 for one bit a "
    "level, with one queue each, and three times as many levels. Or a list such as 2,4,4, with a "
    "radix for each level, the highest first.  [default: 8 on the lowest level, 16 on three, 4 on "
    "four, 2 on the rest]",
    "layout": "'chain': what leaves a level passes all those below. 'skip': it goes straight to "
    "the next level in which it waits, by more bindings.  [default: chain]",
    "queue_per_delay": "Whether a delay that is asked for again gets a queue of its own; for "
    "applications with few distinct delays.  [default: no]",
    "queue_type": "'quorum' or 'classic' levels.  [default: quorum]",
    "declare": "'lazy': programs make what they need when they first need it. 'never': they "
    "declare nothing, and 'create' makes the ladder.  [default: lazy]",
    "foreign_ladder": "Use another system's ladder in the same virtual host: 'celery', "
    "'nservicebus' or 'nservicebus-v1'.",
    "relays": "Queues that may refuse messages because of a policy, or because their nodes are "
    "down, as patterns with a comma between: mail,orders-*. Each gets a relay, and holds up no "
    "other queue.",
    "amendments": "Whether what was cancelled, rescheduled or superseded counts; needs "
    "streams.  [default: yes]",
    "amendments_max_age": "How long a cancellation is remembered: from now and, for a due time "
    "that is more than two days ahead, again from a day before it. A number and one of Y, M, D, h, "
    "m and s.  [default: 31D]",
    "lanes": "How many ladders side by side programs use, to share the work among the nodes of a "
    "cluster.  [default: 1]",
    "journal": "'stream' for a journal in a stream on the broker, or a folder's path for one in "
    "local files.  [default: no journal]",
    "journal_max_age": "How long the stream keeps the journal: a number and one of Y, M, D, h, m "
    "and s.  [default: 7D]",
    "journal_arguments": "Whether the journal has the arguments of tasks.  [default: yes]",
    "namespace": "The first word of the names of all exchanges and queues of the ladder.  "
    "[default: kbd]",
}


def settings_options(prefix: str = "", *, hidden: bool = True) -> list[click.Option]:
    """Return an option for each setting.

    :param prefix: the prefix of the parameters' names. With one, the options do not read
        environment variables.
    :param hidden: whether the help of their command leaves them out.
    """
    made = []
    for setting in fields(Settings):
        if setting.name in NOT_FOR_OPERATORS:
            continue
        name = setting.name.replace("_", "-")
        switch = isinstance(setting.default, bool)
        made.append(
            click.Option(
                [f"--{name}/--no-{name}" if switch else f"--{name}", f"{prefix}{setting.name}"],
                default=None,
                callback=_read,
                envvar=None if prefix else f"BINARY_DELAY_{setting.name.upper()}",
                metavar=None if switch else setting.name.upper(),
                help=HELP[setting.name],
                is_eager=True,
                hidden=hidden,
            )
        )
    return made


def _read(context: click.Context, option: click.Parameter, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    name = option.opts[0]
    if name in ("--tick", "--levels", "--radix", "--lanes"):
        try:
            numbers = [int(number) for number in value.split(",")]
        except ValueError:
            by = context.get_parameter_source(str(option.name))
            variable = f", as {option.envvar} says" * (by == ParameterSource.ENVIRONMENT)
            raise click.BadParameter(f"{value!r} is not a whole number{variable}") from None
        return numbers if len(numbers) > 1 else numbers[0]
    return value.split(",") if name == "--relays" else value
