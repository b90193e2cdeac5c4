"""Kombu's event loop does not wait for its sockets while it has work of ours to do."""

from __future__ import annotations

import math
import socket
from contextlib import closing
from types import SimpleNamespace

import pytest
from amqp.exceptions import RecoverableConnectionError
from kombu import Connection
from kombu.asynchronous import Hub

from kombu_binary_delay.celery_side.hub import poll_at_once_if_ready, release_in_time


@pytest.fixture
def hub():
    with closing(Hub()) as hub:
        yield hub


@pytest.fixture
def register():
    """Register a connection that receives nothing."""
    ours, broker = socket.socketpair()
    connection = SimpleNamespace(
        sock=ours,
        transport=SimpleNamespace(),
        connected=True,
        is_held_up=False,
        look_at=math.inf,
    )
    transport = Connection(transport="kombu_binary_delay:Transport").transport
    with ours, broker:
        yield lambda hub: transport.register_with_event_loop(connection, hub)


def record_polls(hub):
    """Return a list of the poller's timeouts, which the loop fills; it waits for none of them."""
    timeouts: list[float] = []
    hub.poller.poll = timeouts.append
    return timeouts


def test_the_loop_does_not_wait_if_a_timer_has_left_a_callback(hub, register):
    timeouts = record_polls(hub)
    done: list[str] = []
    register(hub)
    hub.call_later(0, hub.call_soon, done.append, "acknowledged")

    hub.run_once()
    assert timeouts == [0]

    hub.run_once()
    assert done == ["acknowledged"]
    assert timeouts[1] > 0


def test_nor_if_that_callback_sets_a_timer_that_is_due(hub, register):
    timeouts = record_polls(hub)
    done: list[str] = []
    register(hub)
    hub.call_later(0, hub.call_soon, hub.call_later, 0, done.append, "run")

    while not done:
        hub.run_once()

    assert timeouts[:-1] == [0]


def test_a_callback_that_adds_itself_again_does_not_hold_up_timers(hub, register):
    record_polls(hub)
    register(hub)
    done: list[str] = []

    def again():
        hub.call_soon(again)

    again()
    hub.run_once()
    hub.call_later(0, done.append, "run")
    hub.run_once()

    assert done == ["run"]


def test_a_reconnect_adds_nothing_to_the_loop(hub, register):
    register(hub)
    poll, on_tick = hub.poller.poll, set(hub.on_tick)

    register(hub)

    assert hub.poller.poll is poll
    assert hub.on_tick == on_tick


def test_a_loop_that_was_reset_does_not_wait_either(hub, register):
    register(hub)
    hub.reset()
    timeouts = record_polls(hub)
    register(hub)
    hub.call_later(0, hub.call_soon, list)

    hub.run_once()

    assert timeouts == [0]


@pytest.mark.parametrize("missing", ["poller", "poll", "_ready"])
def test_a_loop_that_lacks_a_part_waits_as_it_did(missing):
    timeouts: list[float] = []
    poller = SimpleNamespace(poll=timeouts.append)
    loop = SimpleNamespace(poller=poller, _ready={"a callback"})
    delattr(poller if missing == "poll" else loop, missing)

    poll_at_once_if_ready(loop)

    if missing != "poll":
        poller.poll(2)
        assert timeouts == [2]


@pytest.fixture
def holding(hub):
    """Let a loop look after a connection, and run that once."""

    def holding(release, **state):
        state = {"ended": None, "is_held_up": False, "look_at": math.inf, **state}
        connection = SimpleNamespace(release_held=release, **state)
        if connection.ended:
            hub.readers[7] = (print, (connection, hub))
        release_in_time(hub, connection)
        (timer,) = hub.timer.queue
        timer.entry()
        record_polls(hub)
        hub.run_once()
        return timer.entry

    return holding


@pytest.mark.parametrize("is_held_up", [True, False])
def test_the_loop_looks_for_what_is_due_while_something_is_held(holding, is_held_up):
    looks: list[str] = []

    timer = holding(lambda: looks.append("look"), connected=True, is_held_up=is_held_up)

    assert looks == ["look"] * is_held_up
    assert not timer.canceled


@pytest.mark.parametrize("is_due", [True, False])
def test_the_loop_looks_in_time_whether_the_ladder_exists(holding, is_due):
    looks: list[str] = []
    look_at = 0.0 if is_due else math.inf

    holding(None, connected=True, look=lambda: looks.append("look"), look_at=look_at)

    assert looks == ["look"] * is_due


def test_an_error_of_that_ends_the_loop_so_that_its_program_connects_again(holding):
    def end():
        raise RecoverableConnectionError("an alarm")

    with pytest.raises(RecoverableConnectionError, match="an alarm"):
        holding(end, connected=True, is_held_up=True)


def test_a_connection_that_was_ended_unseen_ends_its_loop_and_no_later_one(hub, holding):
    ended = RecoverableConnectionError("an alarm")
    with pytest.raises(RecoverableConnectionError, match="an alarm"):
        holding(None, connected=False, ended=ended)
    hub.reset()
    hub.run_once()


def test_a_connection_that_has_ended_leaves_no_timer_in_the_loop(holding):
    looks: list[str] = []

    timer = holding(lambda: looks.append("look"), connected=False, is_held_up=True)

    assert not looks
    assert timer.canceled
