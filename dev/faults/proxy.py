"""Purpose: a wire that can be cut: a TCP proxy on loopback, to one broker.

Each connection through it may carry a random number of bytes, both ways together; then it is cut
with a reset, in the middle of whatever it was: a handshake, a declaration, a frame, a confirm.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from contextlib import AbstractContextManager, suppress
from urllib.parse import urlsplit

HOST = "127.0.0.1"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time


class Proxy(AbstractContextManager["Proxy"]):
    """Listens on a port of its own and passes bytes on.

    target: the port to connect to.
    budget: the fewest and the most bytes that a connection carries; None cuts nothing.
    """

    def __init__(self, target: int, budget: tuple[int, int] | None = None, seed: int = 1) -> None:
        self.budget = budget
        self.cuts = 0
        self._target = target
        self._draw = random.Random(seed)  # noqa: S311 - where to cut
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self._pairs: set[_Pair] = set()
        self._lock = threading.Lock()
        #: How many bytes a client sends at once, and the pause after them, in seconds.
        self.at_once, self.pause = 65536, 0.0
        self.reads = threading.Event()
        self.reads.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def through(self, url: str) -> str:
        """Return the URL of a broker by way of this proxy."""
        parts = urlsplit(url)
        return parts._replace(netloc=f"{parts.netloc.rpartition(':')[0]}:{self.port}").geturl()

    def slow(self, at_once: int, pause: float) -> None:
        """Pass on what clients send in small parts, from now on; the broker answers as fast."""
        self.at_once, self.pause = at_once, pause

    def hold(self) -> None:
        """Read nothing more, from now on."""
        self.reads.clear()

    def cut(self) -> None:
        """Cut every connection now."""
        self.reads.set()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.cut()

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        # Until the server's socket is closed.
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                try:
                    server = socket.create_connection((HOST, self._target), timeout=5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        left = float("inf")
        if self.budget:
            # Evenly among the orders of magnitude: some die in the handshake, some live long.
            least, most = self.budget
            left = least * (most / least) ** self._draw.random()
        pair = _Pair(self, client, server, left)
        with self._lock:
            self._pairs.add(pair)
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=pair.forward, args=(source, sink), daemon=True).start()

    def ended(self, pair: _Pair, *, by_us: bool) -> None:
        """Forget a connection."""
        with self._lock:
            if pair in self._pairs:
                self._pairs.discard(pair)
                self.cuts += by_us


class _Pair:
    """One connection: what the client sees, and what the broker sees."""

    def __init__(
        self, proxy: Proxy, client: socket.socket, server: socket.socket, left: float
    ) -> None:
        self._proxy, self._sockets, self._left = proxy, (client, server), left

    def forward(self, source: socket.socket, sink: socket.socket) -> None:
        """Pass bytes on in one direction, to the last that this connection may carry."""
        with suppress(OSError):
            is_client = source is self._sockets[0]
            while self._proxy.reads.wait() and (
                block := source.recv(self._proxy.at_once if is_client else 65536)
            ):
                if is_client:
                    time.sleep(self._proxy.pause)
                part = block[: int(self._left)] if self._left < len(block) else block
                self._left -= len(block)
                sink.sendall(part)
                if self._left <= 0:
                    self.cut()
                    return
        self._end(by_us=False)

    def cut(self) -> None:
        """Reset both sides."""
        for end in self._sockets:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._end(by_us=True)

    def _end(self, *, by_us: bool) -> None:
        # Where the budget is spent, either side may end it before we do.
        self._proxy.ended(self, by_us=by_us or self._left <= 0)
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
