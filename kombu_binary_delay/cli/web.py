"""``web``: pages that show delayed messages."""

from __future__ import annotations

import ipaddress
import logging
import os
from contextlib import ExitStack
from functools import partial
from typing import IO, Any

import click

from kombu_binary_delay.errors import SettingsError
from kombu_binary_delay.operate.waiting import JOURNAL, NODE

from .asked import Asked, accepts_places, asked_after
from .connect import Target
from .sources import TaskSource, choose

_USERS = "BINARY_DELAY_WEB_USERS"


@click.command(
    short_help="Show what waits on pages for a browser.",
    help="""Show what waits on pages for a browser: what is due when, the ladder, each task.

    Serves http://127.0.0.1:8025 to this machine, and changes nothing, unless you say so. With
    --allow-changes, tasks can be cancelled and rescheduled and parked messages redriven; each act
    shows its count and is confirmed first, and the log says who did what.

    Another address than this machine's needs users with passwords, or a proxy that knows who asks.
    A line of --users or of the variable BINARY_DELAY_WEB_USERS is a user with a hash, as
    --new-user prints it. Passwords travel unencrypted without TLS: put a proxy with TLS in front.

    \b
      kombu-binary-delay web
      celery -A shop binary-delay web --allow-changes
      kombu-binary-delay web --new-user ann >> users.txt
      kombu-binary-delay web --host 0.0.0.0 --users users.txt
      kombu-binary-delay web --host 10.0.0.5 --proxy 10.0.0.2 \\
        --user-header X-Forwarded-User
    """,
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to bind to.")
@click.option("--port", type=click.IntRange(0, 65535), default=8025, show_default=True)
@click.option("--allow-changes", is_flag=True, help="Let users cancel, reschedule and redrive.")
@click.option("--hide-arguments", is_flag=True, help="Do not show the arguments of tasks.")
@click.option("--users", type=click.File(encoding="utf-8"), help="A file with a user a line.")
@click.option("--new-user", metavar="NAME", help="Ask for a password, print the line, and end.")
@click.option("--user-header", metavar="NAME", help="The header in which a proxy says who asks.")
@click.option(
    "--proxy",
    "proxies",
    metavar="ADDRESS",
    multiple=True,
    help="From where that header is believed; an address or a network, may be repeated.  "
    "[default: 127.0.0.1 and ::1]",
)
@choose
@partial(accepts_places, management=True)
@click.pass_obj
def web(
    asked: Asked,
    /,
    host: str,
    port: int,
    allow_changes: bool,
    hide_arguments: bool,
    users: IO[str] | None,
    new_user: str | None,
    user_header: str | None,
    proxies: tuple[str, ...],
    source: str | None,
    node_command: str | None,
    **given: Any,
) -> None:
    """Serve the pages until Ctrl-C."""
    broker = asked_after(asked, given).target()
    try:
        import uvicorn  # noqa: F401, PLC0415 - it comes with the extra `web`

        from kombu_binary_delay.web import guard, passwords  # noqa: PLC0415 - see above
        from kombu_binary_delay.web.application import application  # noqa: PLC0415 - see above
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in ("anyio", "jinja2", "starlette", "uvicorn"):
            raise
        raise click.UsageError(
            f"this needs {exc.name}: pip install with the extra `web`, as in '.[web]'"
        ) from exc
    if new_user is not None:
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        try:
            click.echo(passwords.line_for(new_user, password))
        except ValueError as exc:
            raise click.UsageError(str(exc)) from exc
        return
    try:
        authenticate = _authenticate(_lines(users), user_header, proxies)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    is_local = _is_local(host)
    if authenticate is None and not is_local:
        raise click.UsageError(
            f"{host} is not this machine alone: give --users or {_USERS}, or --user-header for a "
            f"proxy that knows who asks"
        )
    try:
        app = application(
            broker,
            partial(_open, broker, source=source, node_command=node_command, said=set()),
            authenticate=authenticate,
            allow_changes=allow_changes,
            hide_arguments=hide_arguments,
            hosts={*guard.LOCAL_HOSTS, host} if authenticate is None else None,
        )
    except SettingsError as exc:
        raise click.UsageError(str(exc)) from exc
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    _serve(app, host, port)


def _authenticate(lines: str | None, user_header: str | None, proxies: tuple[str, ...]) -> Any:
    """Return what says who asks; None if nothing does.

    :param lines: users with hashes of their passwords.
    :raises ValueError: for invalid users or proxies, or for options that exclude each other.
    """
    from kombu_binary_delay.web import guard, passwords  # noqa: PLC0415 - it needs the extra `web`

    if user_header is None and proxies:
        raise ValueError("--proxy needs --user-header, the header that is believed from it")
    if user_header is None:
        return None if lines is None else guard.by_password(passwords.read(lines))
    if lines is not None:
        raise ValueError(
            f"--user-header believes a proxy, and --users or {_USERS} asks for passwords: give one"
        )
    return guard.by_header(user_header, proxies or ("127.0.0.1", "::1"))


def _serve(app: Any, host: str, port: int) -> None:
    """Serve the pages until Ctrl-C.

    :raises click.UsageError: if the address cannot be listened on.
    """
    import uvicorn  # noqa: PLC0415 - it comes with the extra `web`

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        # The client is the address that connects; a proxy's headers about it are ignored.
        proxy_headers=False,
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(config)
    try:
        server.run()
    except KeyboardInterrupt:
        return
    except SystemExit as exc:
        if server.started:
            raise
        # Uvicorn has logged the reason. Its code, 3, is one of ours for something else.
        raise click.UsageError(
            f"cannot listen on {host}, port {port}, as the log says: give another --port, or as "
            f"--host an address of this machine"
        ) from exc


def asgi_app(
    authenticate: Any,
    *,
    app: Any = None,
    broker: str | None = None,
    management: str | None = None,
    settings: dict[str, Any] | None = None,
    source: str | None = None,
    node_command: str | None = None,
    allow_changes: bool = False,
    hide_arguments: bool = False,
) -> Any:
    """Return the pages as an ASGI application, which you can mount in your site.

    :param authenticate: takes a Starlette request, and returns the name of the user, None to
        refuse, or a response such as a redirect to your login; a coroutine, or a function, which
        is called in a thread.
    :param app: a Celery app, whose broker and settings are used.
    :param broker: the broker's URL, instead of the app's.
    :param management: the URL of the broker's management API.
    :param settings: the transport's settings.
    :param source: ``"journal"`` or ``"node"``.
    :param node_command: a command that runs ``rabbitmqctl`` on the broker's host.
    :raises SettingsError: for invalid settings, or another ``source``.
    """
    if source not in (JOURNAL, NODE, None):
        raise SettingsError(f"source must be {JOURNAL!r}, {NODE!r} or None, got {source!r}")
    from kombu_binary_delay.web.application import application  # noqa: PLC0415 - it needs the extra `web`

    target = Target.of(app, broker, management, settings or {})
    return application(
        target,
        partial(_open, target, source=source, node_command=node_command, said=set()),
        authenticate=authenticate,
        allow_changes=allow_changes,
        hide_arguments=hide_arguments,
    )


def _open(
    broker: Target,
    stack: ExitStack,
    *,
    source: str | None,
    node_command: str | None,
    said: set[str],
) -> TaskSource:
    return TaskSource.of(broker, stack, source, node_command, said)


def _lines(users: IO[str] | None) -> str | None:
    """Return the lines of users, from the file or else from the environment."""
    if users is None:
        return os.environ.get(_USERS)
    try:
        return users.read()
    except UnicodeDecodeError as exc:
        raise click.UsageError("the file of users is no text") from exc


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
