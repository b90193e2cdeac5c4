"""The options for broker, app and settings, before the subcommand and after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import click
from click.core import ParameterSource

from .app import load_app
from .connect import Target
from .options import settings_options

_BROKER = "BINARY_DELAY_BROKER"
_PREFIX = "asked_"


@dataclass(frozen=True)
class Asked:
    """The values of the options, not checked yet.

    :param app: a Celery app, or the name of one; None for none.
    :param broker: a URL; None for the app's, or the default.
    :param broker_option: the option or variable that the URL came from.
    :param management: the URL of the management API; None for the default.
    :param given: settings of the transport.
    """

    app: Any = None
    broker: str | None = None
    broker_option: str = "--broker"
    management: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def target(self) -> Target:
        """Load the app, and return its broker with the settings.

        :raises click.UsageError: for an invalid app, broker or setting.
        """
        app = load_app(self.app) if isinstance(self.app, str) else self.app
        target = Target.of(app, self.broker, self.management, self.given)
        return replace(target, option=self.broker_option) if self.broker else target


def place_options(*, after: bool, management: bool = False) -> list[click.Option]:
    """Return the options ``--app``, ``--broker`` and ``--management``, and one for each setting.

    :param after: whether they are for a subcommand. Options after it override those before it and
        in the environment.
    """

    def option(*names: str, envvar: str | None = None, **more: Any) -> click.Option:
        *_, name = names
        own = f"{_PREFIX}{name.strip('-')}" if after else name.strip("-")
        return click.Option([*names, own], envvar=None if after else envvar, **more)

    return [
        option(
            "-A",
            "--app",
            metavar="MODULE",
            help="The Celery app whose broker and settings to use, as its worker's -A has it.",
        ),
        option(
            "-b",
            "--broker",
            metavar="URL",
            envvar=_BROKER,
            help="RabbitMQ's URL.  [default: the app's, or amqp://guest:guest@localhost//]",
        ),
        option(
            "-m",
            "--management",
            metavar="URL",
            envvar="BINARY_DELAY_MANAGEMENT",
            hidden=not management,
            help="The URL of its management API.  [default: http:// and the broker's host, "
            "port 15672; with TLS https:// and port 15671]",
        ),
        *settings_options(_PREFIX if after else ""),
    ]


def asked_before(context: click.Context, params: Mapping[str, Any], app: Any) -> Asked:
    """Return the values of the group's options.

    :param app: the Celery app that Celery's own command has loaded; None for none.
    """
    by_variable = context.get_parameter_source("broker") == ParameterSource.ENVIRONMENT
    params = {name: value for name, value in params.items() if value is not None}
    return Asked(
        params.pop("app", app),
        params.pop("broker", None),
        _BROKER if by_variable else "--broker",
        params.pop("management", None),
        params,
    )


def asked_after(before: Asked, params: dict[str, Any]) -> Asked:
    """Return the options after a subcommand, and remove them from its parameters."""
    names = [name for name in params if name.startswith(_PREFIX)]
    given = {
        name[len(_PREFIX) :]: value for name in names if (value := params.pop(name)) is not None
    }
    if "broker" in given:
        before = replace(before, broker_option="--broker")
    places = {name: given.pop(name) for name in ("app", "broker", "management") if name in given}
    return replace(before, **places, given={**before.given, **given})


def accepts_places(function: Callable[..., Any], *, management: bool = False) -> Callable[..., Any]:
    """Add to a subcommand the options that may also stand before it.

    :param management: whether it asks the management API.
    """
    made = vars(function).setdefault("__click_params__", [])
    # Click lists them in the reverse order.
    made[:0] = reversed(place_options(after=True, management=management))
    return function
