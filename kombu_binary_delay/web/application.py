"""The ASGI application: the pages, behind their guard."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from .guard import Authenticate, Guard
from .pages import Pages
from .watch import Broker, Open

_STATIC = Path(__file__).with_name("static")


def application(  # noqa: PLR0913 - what is shown, to whom, and what they may do
    broker: Broker,
    source: Open,
    *,
    authenticate: Authenticate | None,
    allow_changes: bool = False,
    hide_arguments: bool = False,
    hosts: Collection[str] | None = None,
) -> Starlette:
    """Return the application, which you serve alone or mount in another one.

    Serve it by one process: it keeps what it has read from the broker in memory.

    :param broker: where the broker is.
    :param source: opens the source of tasks.
    :param authenticate: takes a Starlette request and returns the user's name, None to refuse, or
        a response; a coroutine, or a function, which is called in a thread. None admits every user
        who can connect.
    :param allow_changes: whether users may cancel and reschedule tasks, and redrive messages.
    :param hide_arguments: whether to leave out the arguments of tasks.
    :param hosts: the host names that requests may use; None for any.
    :raises SettingsError: for invalid settings of the broker.
    """
    pages = Pages(broker, source, allow_changes=allow_changes, hide_arguments=hide_arguments)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        yield
        pages.close()

    return Starlette(
        routes=[*pages.routes(), Mount("/static", StaticFiles(directory=_STATIC), name="static")],
        middleware=[Middleware(Guard, authenticate=authenticate, hosts=hosts)],
        exception_handlers=pages.failures(),
        lifespan=lifespan,
    )
