"""Kombu's event loop does not wait for its sockets while it has work of ours to do."""

from __future__ import annotations

import socket
from contextlib import closing
from types import SimpleNamespace

import pytest
from kombu import Connection
from kombu.asynchronous import Hub

from kombu_binary_delay.compat.hub import poll_at_once_if_ready, read_while_held_up


@pytest.fixture
def hub():
    with closing(Hub()) as hub:
        yield hub


@pytest.fixture
def register():
    """Register a connection that receives nothing."""
    ours, broker = socket.socketpair()
    connection = SimpleNamespace(
        sock=ours, transport=SimpleNamespace(), connected=True, is_held_up=False
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


@pytest.mark.parametrize("is_held_up", [True, False])
def test_the_loop_reads_by_itself_only_while_something_is_held(hub, is_held_up):
    reads: list[str] = []
    connection = SimpleNamespace(connected=True, is_held_up=is_held_up)
    read_while_held_up(hub, connection, lambda: reads.append("read"))
    (timer,) = hub.timer.queue

    timer.entry()

    assert reads == ["read"] * is_held_up
    assert not timer.entry.canceled


def test_a_connection_that_has_ended_leaves_no_timer_in_the_loop(hub):
    reads: list[str] = []
    connection = SimpleNamespace(connected=False, is_held_up=True)
    read_while_held_up(hub, connection, lambda: reads.append("read"))
    (timer,) = hub.timer.queue

    timer.entry()

    assert not reads
    assert timer.entry.canceled
