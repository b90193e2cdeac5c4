"""What cannot be amended is refused with an error that says what to do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, chain, current_app, group
from kombu import Connection

from kombu_binary_delay import AmendmentError, cancel, replace, reschedule
from tests.acceptance.local_system import LocalSystem


@pytest.fixture(scope="module")
def system(new_system) -> LocalSystem:
    """Give one without a worker, on whose ladder a task waits; nothing else happens there."""
    system: LocalSystem = new_system("careful")
    system.send_note(countdown=3600)
    return system


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


LONG = "a" * 256
NONSENSE: Any = object()


def with_plain_connection(system: LocalSystem) -> None:
    with Connection(system.vhost.url) as connection:
        cancel("a", connection=connection)


@pytest.fixture
def _current(system: LocalSystem):
    before = current_app._get_current_object()  # noqa: SLF001
    system.app.set_current()
    yield
    before.set_current()


@pytest.mark.usefixtures("_current")
@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda s: cancel(None), "non-empty string, got None"),
        (lambda s: cancel(7), "non-empty string, got 7"),
        (lambda s: cancel(""), "non-empty string, got ''"),
        (lambda s: cancel(b"id"), "non-empty string, got b'id'"),
        (lambda s: cancel({"a": 1}), "non-empty string, got {'a': 1}"),
        (lambda s: cancel([]), "got no task; give at least one id"),
        (lambda s: cancel(["a", None]), "non-empty string, got None"),
        (lambda s: cancel(LONG), "at most 255 bytes, got 256: 'aaa"),
        (lambda s: cancel("\ud800"), r"UTF-8 can encode, got '\\ud800'"),
        (lambda s: cancel("a", eta=soon(-1)), "has passed; give a time in the future"),
        (lambda s: cancel("a", eta=soon(1).replace(tzinfo=None)), "datetime with a time zone"),
        (lambda s: cancel("a", eta=NONSENSE), "datetime with a time zone, got <object"),
        (lambda s: cancel("a", connection="amqp://"), "kombu.Connection, got 'amqp://'"),
        (with_plain_connection, "connection without the transport kombu_binary_delay:Transport"),
        (lambda s: reschedule("a"), "exactly one of eta and countdown, got eta None"),
        (lambda s: reschedule("a", eta=soon(1), countdown=1), "exactly one of eta and"),
        (lambda s: reschedule([], countdown=1), "got no task; give at least one id"),
        (lambda s: reschedule("a", countdown=NONSENSE), "a number of seconds, got <object"),
        (lambda s: reschedule("a", countdown=True), "a number of seconds, got True"),
        (lambda s: reschedule("a", countdown=float("nan")), "a number of seconds, got nan"),
        (lambda s: reschedule("a", countdown=-1), "has passed"),
        (lambda s: replace(s.task("note"), ""), "non-empty string, got ''"),
        (lambda s: replace("note", "a"), "signature of one task, got 'note'; use task"),
        (
            lambda s: replace(group(s.task("note"), s.task("note")), "a"),
            "signature of one task, got group",
        ),
        (lambda s: replace(chain(s.task("note"), s.task("note")), "a"), "signature of one task"),
        (lambda s: replace(s.task("note"), "a", headers=5), "headers must be a mapping, got 5"),
        *[
            (call, "connection without the transport kombu_binary_delay:Transport")
            for call in (
                lambda s: replace(Celery(broker=s.vhost.url).signature("note"), "a"),
                lambda s: replace(s.task("note"), "a", connection=Connection(s.vhost.url)),
                lambda s: replace(s.task("note"), "a", producer=Connection(s.vhost.url).Producer()),
            )
        ],
        (
            lambda s: replace(s.task("note"), "a", headers={"x-delay-key-max-wait": 5}),
            "x-delay-key-max-wait needs x-delay-key, which this message does not have",
        ),
        *[
            (lambda s, given=given: s.send("note", countdown=1, headers=given), complaint)
            for given, complaint in [
                ({"x-delay-key": None}, "x-delay-key must be a non-empty string, got None"),
                ({"x-delay-key": 7}, "x-delay-key must be a non-empty string, got 7"),
                ({"x-delay-key": LONG}, "x-delay-key must have at most 255 bytes, got 256"),
                (
                    {"x-delay-key": "k", "x-delay-key-max-wait": "5"},
                    "milliseconds above 0, got '5'",
                ),
                ({"x-delay-key": "k", "x-delay-key-max-wait": 0}, "milliseconds above 0, got 0"),
            ]
        ],
        (
            lambda s: s.send("note", countdown=50_000, headers={"x-delay-key": "k"}),
            r"at most 43200 s, got (50000|499\d\d(\.\d)?) s; give it an id",
        ),
    ],
)
def test_bad_input_is_refused_with_a_clear_error_and_nothing_half_done(
    system: LocalSystem, call: Any, complaint: str
):
    exchanges = system.exchanges()
    with pytest.raises(AmendmentError, match=complaint):
        call(system)
    system.wait_for_waiting(1)
    assert system.exchanges() == exchanges
