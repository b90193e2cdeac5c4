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
from .looks import Broker, Open
from .pages import Pages

_STATIC = Path(__file__).with_name("static")


def application(  # noqa: PLR0913 - what is shown, to whom, and what they may do
    broker: Broker,
    place: Open,
    *,
    authenticate: Authenticate | None,
    allow_changes: bool = False,
    hide_arguments: bool = False,
    hosts: Collection[str] | None = None,
) -> Starlette:
    """Make the application, to be served by itself or mounted in another one.

    It is to be served by one process: what was read from the broker is kept in its memory.

    :param broker: where the broker is.
    :param place: opens the source of tasks.
    :param authenticate: takes a Starlette request and returns the name of whoever asks, None to
        refuse, or a response; a function or a coroutine. None lets everybody in who can connect.
    :param allow_changes: whether tasks may be cancelled and rescheduled, and messages redriven.
    :param hide_arguments: whether the arguments of tasks are left out.
    :param hosts: by which host names pages may be asked for; None for any.
    """
    pages = Pages(broker, place, allow_changes=allow_changes, hide_arguments=hide_arguments)

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
