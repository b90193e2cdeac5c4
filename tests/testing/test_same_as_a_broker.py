"""The kit cannot lie: the same programs end alike on it and on a real RabbitMQ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from celery import _state, signals
from celery._state import _set_current_app, get_current_app
from celery.contrib.testing.worker import start_worker

from kombu_binary_delay.testing import Delayed
from tests.testing.programs import PROGRAMS, Run, Shop
from tests.waits import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dev.server import Server

Runs = dict[str, list[Run]]


@pytest.fixture(scope="module")
def on_kit() -> Runs:
    with Delayed() as delayed, Shop() as shop:
        for name, program in PROGRAMS.items():
            program(shop, name)
            delayed.run_until_idle()
        return shop.runs


@pytest.fixture(scope="module")
def as_it_was() -> Iterator[None]:
    """Celery's test worker sets the root logger's level and the current app for all that follow."""

    def leave_logging_alone(**_: Any) -> None:
        pass

    current, default = get_current_app(), _state.default_app
    signals.setup_logging.connect(leave_logging_alone)
    yield
    signals.setup_logging.disconnect(leave_logging_alone)
    _set_current_app(current)
    _state.set_default_app(default)


@pytest.fixture(scope="module")
def on_broker(broker: Server, on_kit: Runs, as_it_was: None) -> Iterator[Runs]:
    vhost = broker.vhost()
    with Shop(vhost.url) as shop:
        shop.app.amqp.queues.select_add("mail")
        # One task at a time, as on the kit: the order of two that are due together is then known.
        worker = start_worker(shop.app, perform_ping_check=False, queues="celery,mail")
        with worker:
            for name, program in PROGRAMS.items():
                program(shop, name)
            count = sum(map(len, on_kit.values()))
            wait_until(lambda: sum(map(len, shop.runs.values())) >= count, f"{count} ends")
        yield shop.runs
    vhost.delete()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_alike_on_the_kit_and_on_a_broker(name, on_kit, on_broker):
    assert on_kit[name] == on_broker[name]
