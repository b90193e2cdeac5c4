from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lab.keeper import Keeper
from tests.acceptance.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lab.server import Server


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    with Keeper("acceptance") as keeper:
        yield keeper


@pytest.fixture(scope="module")
def new_stage(broker: Server, keeper: Keeper) -> Iterator[Callable[..., Stage]]:
    """Make stages, each in a fresh virtual host; end all of them with the module."""
    stages: list[Stage] = []

    def make(*args: Any, **kwargs: Any) -> Stage:
        stages.append(Stage(broker.vhost(), keeper, *args, **kwargs))
        return stages[-1]

    yield make
    for stage in stages:
        stage.begin_to_close()
    unwell = [log for stage in stages for log in stage.close()]
    for stage in stages:
        stage.vhost.delete()
    assert not unwell, "\n\n".join(unwell)
