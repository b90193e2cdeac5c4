"""Whose code runs while a declaration waits for its answer, and when."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
from amqp.exceptions import RecoverableConnectionError

from kombu_binary_delay.wire.connection import ConnectionMixin
from kombu_binary_delay.wire.frame_buffer import BufferingConnection, FrameBuffer


class Plain:
    """The calls of a connection that is buffered, without a broker."""

    def __init__(self) -> None:
        self.channels = {1: SimpleNamespace()}
        self.buffer = self.frame_buffer = FrameBuffer(self)
        self.ran: list[object] = []

    def on_inbound_method(self, channel, *frame):
        self.ran.append(frame)

    def blocking_read(self, timeout=None):
        return timeout

    def _on_blocked(self):
        self.ran.append("blocked")

    def _on_unblocked(self):
        self.ran.append("unblocked")


class Buffering(BufferingConnection, Plain):  # type: ignore[misc] # as of py-amqp
    """With nothing but the buffer."""

    def declare_until(self, error):
        with self.buffer.closed("the ladder"):
            self.on_inbound_method(1, "delivery")
            raise error


class Blocked(ConnectionMixin, Plain):  # type: ignore[misc] # as of py-amqp
    """With what the mixin does of an alarm."""


class Delivers(Plain):
    """A broker that sends one delivery after the other, and no answer."""

    left = 10_000

    def blocking_read(self, timeout=None):
        if timeout <= 0.001 or not self.left:
            raise TimeoutError
        self.left -= 1
        self.on_inbound_method(1, "delivery")
        return True


class Busy(ConnectionMixin, Delivers):  # type: ignore[misc] # as of py-amqp
    """The connection of a consumer without acks."""

    read_timeout, connected = 0.1, False


def test_deliveries_do_not_put_off_the_end_of_the_wait_for_an_answer(monkeypatch):
    connection, ticks = Busy(), count()
    monkeypatch.setattr("time.monotonic", lambda: next(ticks) / 1000)
    with (
        connection.buffer.closed("the ladder"),
        pytest.raises(RecoverableConnectionError, match=r"within 0\.1 s .* asked for the ladder"),
    ):
        connection.drain_events()
    assert connection.left > 9_000


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_comes_before_the_programs_own_callbacks(error):
    connection = Buffering()
    with pytest.raises(error):
        connection.declare_until(error())
    assert not connection.ran
    connection.read_waiting_first()
    assert connection.ran == [("delivery",)]


def test_after_an_error_the_callbacks_run_as_after_an_answer():
    connection = Buffering()
    with pytest.raises(OSError, match="reset"):
        connection.declare_until(OSError("reset"))
    assert connection.ran == [("delivery",)]


def test_what_a_program_does_at_an_alarms_end_does_not_run_within_a_declaration():
    connection = Blocked()
    connection._on_blocked()  # noqa: SLF001 - as py-amqp calls it
    assert (connection.is_blocked, connection.ran) == (True, ["blocked"])
    with connection.buffer.closed("the ladder"):
        connection._on_unblocked()  # noqa: SLF001
        assert (connection.is_blocked, connection.ran) == (False, ["blocked"])
    assert connection.ran == ["blocked", "unblocked"]
