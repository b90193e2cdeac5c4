"""The client's end of a connection to a broker in this process, in place of py-amqp's socket."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from amqp.transport import _AbstractTransport

from .errors import StandsStillError
from .server import PROTOCOL_HEADER, Session

#: An error of the kit itself, for a program that waits although time stands still.
WAITS = (
    "the program waits without a limit for a message that cannot come, since time stands still: "
    "call `advance` or `run`, or wait with a timeout"
)


class _NoSocket:
    """What py-amqp and this package ask of a socket."""

    def __init__(self) -> None:
        self._timeout: float | None = None

    def gettimeout(self) -> float | None:
        return self._timeout

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def getpeername(self) -> tuple[str, int]:
        return "kombu_binary_delay.testing", 5672

    getsockname = getpeername


class InProcess(_AbstractTransport):
    """Writes frames to a :class:`.server.Session`, and reads those that it has queued.

    :param open_session: returns the broker's end.
    :raises ConnectionRefusedError: by :meth:`connect`, during an outage.
    """

    def __init__(self, host: str, open_session: Callable[[], Session], **_: Any) -> None:
        super().__init__(host)
        self.connected = False
        self.sock: _NoSocket | None = None
        self._open = open_session
        self._session: Session | None = None

    def connect(self) -> None:
        """Begin a session."""
        if not self.connected:
            self._session = self._open()
            self.sock = _NoSocket()
            self.write(PROTOCOL_HEADER)
            self.connected = True

    def write(self, data: Any) -> None:
        """Pass what is written to the broker, at once."""
        self._alive().receive(bytes(data))

    def read_frame(self, *_: Any) -> tuple[int, int, bytes]:
        """Return the next frame.

        :raises TimeoutError: at once, if none has come: none can come meanwhile.
        """
        session = self._alive()
        if session.frames:
            return session.frames.popleft()
        if self.sock is None or self.sock.gettimeout() is None:
            raise StandsStillError(WAITS)
        raise TimeoutError("timed out")

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing to read, and no error either."""
        session = self._session
        return session is not None and session.is_open and not session.frames

    def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            session.end()
        self.sock = None
        self.connected = False

    def cut(self) -> None:
        """End the session as a killed peer does: the client notices when it reads or writes."""
        if self._session is not None:
            self._session.frames.clear()
            self._session.end()

    def _alive(self) -> Session:
        session = self._session
        if session is None or not (session.is_open or session.frames):
            self.connected = False
            raise OSError(errno.ECONNRESET, "the broker closed the connection")
        return session
