"""Streams of a node that is just starting, without a start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def take_away(vhost: Any, *streams: str) -> Callable[[], None]:
    """Make streams as they are before their node has started them; return what starts them."""
    if vhost.broker.release >= (4, 0):
        pytest.skip("only in Mnesia can a test take away what a starting node does not have yet")
    names = ", ".join(f'<<"{stream}">>' for stream in streams)

    def run(code: str) -> None:
        name = f'Name = rabbit_misc:r(<<"{vhost.name}">>, queue, Each)'
        vhost.broker.ctl("eval", f"[begin {name}, {code} end || Each <- [{names}]].")

    run(
        "persistent_term:put(Name, hd(mnesia:dirty_read(rabbit_queue, Name))), "
        "mnesia:dirty_delete(rabbit_queue, Name)"
    )
    return lambda: run("mnesia:dirty_write(rabbit_queue, persistent_term:get(Name))")
