"""What users do with delays, as short programs that run alike on the kit and on a real broker.

Each program gets a shop and a tag, which the tasks that it sends have as their first argument.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Self

from celery import Celery, chain, chord, group, signals

import kombu_binary_delay
from kombu_binary_delay.amendments.record import KEY

OURS = "kombu_binary_delay:Transport"
Program = Callable[["Shop", str], object]
PROGRAMS: dict[str, Program] = {}


class Run(NamedTuple):
    """How a task ended."""

    task: str
    args: tuple[Any, ...]
    state: str
    retries: int


class Shop:
    """A Celery app with some tasks, and what they did, by tag."""

    def __init__(self, url: str = "amqp://") -> None:
        self.app = app = Celery("shop", broker=url, backend="cache+memory://", set_as_current=False)
        app.conf.broker_transport = OURS
        app.conf.broker_transport_options = {"confirm_publish": True, "binary_delay": {"radix": 2}}
        app.conf.worker_hijack_root_logger = False
        self.runs: dict[str, list[Run]] = {}

        @app.task(shared=False, name="note")
        def note(tag: str, number: int = 0) -> Any:
            return number

        @app.task(shared=False, name="total")
        def total(numbers: list[int], tag: str) -> int:
            return sum(numbers)

        @app.task(shared=False, name="retries", bind=True, max_retries=2)
        def retries(self: Any, tag: str) -> None:
            raise self.retry(countdown=1)

        @app.task(
            shared=False,
            name="backs_off",
            bind=True,
            autoretry_for=(ValueError,),
            retry_backoff=1,
            retry_jitter=False,
            max_retries=2,
        )
        def backs_off(self: Any, tag: str) -> int:
            if self.request.retries < 2:
                raise ValueError(tag)
            retries: int = self.request.retries
            return retries

        @app.task(shared=False, name="fails", acks_late=True)
        def fails(tag: str) -> None:
            raise ValueError(tag)

        @app.task(shared=False, name="on_failure")
        def on_failure(request: Any, exc: Any, traceback: Any) -> None:
            pass

        self.note, self.total, self.retries = note, total, retries
        self.backs_off, self.fails = backs_off, fails

    def __enter__(self) -> Self:
        signals.task_postrun.connect(self._ran, weak=False)
        signals.task_revoked.connect(self._revoked, weak=False)
        return self

    def __exit__(self, *_: object) -> None:
        signals.task_postrun.disconnect(self._ran)
        signals.task_revoked.disconnect(self._revoked)

    def _ran(self, *, task: Any, args: Any, state: str, **_: Any) -> None:
        if task.app.main == "shop":
            tag = next(value for value in args if isinstance(value, str))
            run = Run(task.name, _plain(args), state, task.request.retries)
            self.runs.setdefault(tag, []).append(run)

    def _revoked(self, *, request: Any, expired: bool, **_: Any) -> None:
        args = request.args or []
        tag = next((value for value in args if isinstance(value, str)), "")
        state = "EXPIRED" if expired else "REVOKED"
        self.runs.setdefault(tag, []).append(Run(request.task, _plain(args), state, 0))


def _plain(args: Any) -> tuple[Any, ...]:
    return tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args)


def program(function: Program) -> Program:
    """Add a program to the table."""
    PROGRAMS[function.__name__] = function
    return function


@program
def a_countdown(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag,), countdown=1)


@program
def an_eta(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag,), eta=datetime.now(UTC) + timedelta(seconds=1))


@program
def an_eta_in_the_past(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag,), eta=datetime.now(UTC) - timedelta(hours=1))


@program
def no_delay(shop: Shop, tag: str) -> None:
    shop.note.delay(tag)


@program
def the_order_of_due_times(shop: Shop, tag: str) -> None:
    for number, countdown in enumerate((3, 1, 2, 0)):
        shop.note.apply_async((tag, number), countdown=countdown)


@program
def a_retry_with_a_countdown(shop: Shop, tag: str) -> None:
    shop.retries.delay(tag)


@program
def a_backoff(shop: Shop, tag: str) -> None:
    shop.backs_off.delay(tag)


@program
def a_delayed_task_that_retries(shop: Shop, tag: str) -> None:
    shop.backs_off.apply_async((tag,), countdown=1)


@program
def a_failure(shop: Shop, tag: str) -> None:
    shop.fails.apply_async((tag,), countdown=1)


@program
def a_link(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag, 1), countdown=1, link=shop.note.si(tag, 2).set(countdown=1))


@program
def a_link_on_an_error(shop: Shop, tag: str) -> None:
    shop.fails.apply_async((tag,), countdown=1, link_error=shop.note.si(tag, 2).set(countdown=1))


@program
def a_chain(shop: Shop, tag: str) -> None:
    steps = [shop.note.si(tag, number).set(countdown=1) for number in range(3)]
    chain(*steps).apply_async()


@program
def a_group(shop: Shop, tag: str) -> None:
    group(shop.note.si(tag, number).set(countdown=number) for number in (1, 2)).apply_async()


@program
def a_chord(shop: Shop, tag: str) -> None:
    chord([shop.note.si(tag, number).set(countdown=number) for number in (1, 2)])(shop.total.s(tag))


@program
def an_expiry_before_it_is_due(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag,), countdown=2, expires=1)


@program
def an_expiry_after_it_is_due(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag,), countdown=1, expires=60)


@program
def a_revoke(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag,), countdown=4).revoke()


@program
def a_cancel(shop: Shop, tag: str) -> None:
    cancelled = shop.note.apply_async((tag, 1), countdown=4)
    shop.note.apply_async((tag, 2), countdown=2)
    with shop.app.connection() as connection:
        kombu_binary_delay.cancel(cancelled, connection=connection)


@program
def a_reschedule(shop: Shop, tag: str) -> None:
    later = shop.note.apply_async((tag, 1), countdown=3)
    shop.note.apply_async((tag, 2), countdown=2)
    with shop.app.connection() as connection:
        kombu_binary_delay.reschedule(later, countdown=6, connection=connection)


@program
def a_debounce(shop: Shop, tag: str) -> None:
    for number in range(3):
        shop.note.apply_async((tag, number), countdown=3, headers={KEY: tag})


@program
def another_queue(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag,), countdown=1, queue="mail")


@program
def a_priority(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag,), countdown=1, priority=9)


@program
def acks_late(shop: Shop, tag: str) -> None:
    shop.fails.apply_async((tag,))


@program
def a_jitter(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag,), countdown=1, headers={"x-delay-jitter": 500})


@program
def a_plain_delay_in_milliseconds(shop: Shop, tag: str) -> None:
    shop.note.apply_async((tag,), headers={"x-delay": 1000})
