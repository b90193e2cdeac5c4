"""Limit how long to wait for a broker, and tell a silent one from a connection that broke."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amqp.platform import KNOWN_TCP_OPTS

_USER_TIMEOUT = "TCP_USER_TIMEOUT"
#: The transport option ``socket_settings`` of what sends much at once: to end a connection only
#: where the broker takes nothing for 60 s, in ms. py-amqp's 1000 ms are less than an overloaded
#: broker makes publishers wait.
PATIENT = {getattr(socket, _USER_TIMEOUT): 60_000} if _USER_TIMEOUT in KNOWN_TCP_OPTS else {}


def drain(connection: Any, timeout: float | None) -> None:
    """Handle the next event of a py-amqp connection; the timeout is in seconds, or None.

    :raises ConnectionAbortedError: if the kernel gave up the connection, which ends it.
    :raises TimeoutError: if nothing comes within the timeout, or from a callback.
    """
    try:
        connection.drain_events(timeout=timeout)
    except TimeoutError as exc:
        raise_if_aborted(connection, exc)
        raise


@contextmanager
def within(connection: Any, seconds: float) -> Iterator[None]:
    """Limit each read from a py-amqp connection, and each write to it, in this block.

    :raises ConnectionAbortedError: as :func:`drain`.
    :raises TimeoutError: if one takes longer.
    """
    try:
        with connection.transport.having_timeout(seconds):
            yield
    except TimeoutError as exc:
        raise_if_aborted(connection, exc)
        raise
    except OSError as exc:
        # At the end, py-amqp restores the timeout of a socket that may be closed by now.
        if exc.errno == errno.EBADF and exc.__context__ is not None:
            raise exc.__context__ from None
        raise


def raise_if_aborted(connection: Any, timeout: TimeoutError) -> None:
    """Raise an error in place of a timeout if it is not one of reading.

    The kernel's own timeout, ``TCP_USER_TIMEOUT``, ends the connection, but py-amqp takes it for a
    silent broker, and the connection for a whole one.
    """
    if not connection.connected:
        return
    try:
        connection.sock.getpeername()
    except OSError:
        connection.collect()
        raise ConnectionAbortedError(
            "the connection broke, as the broker took nothing for long; to wait longer, set "
            "socket.TCP_USER_TIMEOUT, 1000 ms by default, in the transport option "
            "`socket_settings`"
        ) from timeout
