"""Purpose: one private broker for several processes, such as the workers of pytest-xdist.

The process that outlives the others makes a `SharedBroker` and hands its `address` round. The
broker starts when the first process asks for it, and ends with `close()`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Client, Connection, Listener
from threading import Thread

from dev.broker import Broker, BrokerError, Node
from dev.processes import Processes

_GET, _END = "get", "end"


class SharedBroker(AbstractContextManager["SharedBroker"]):
    """A broker that starts when it is first asked for.

    root: as for `Broker`.
    """

    def __init__(self, root: str | None = None) -> None:
        self._root = root
        self._broker: Broker | None = None
        self._answer: Node | str | None = None
        # Only its owner may enter the folder, and so connect to us.
        self._processes = Processes("shared")
        self.address = str(self._processes.folder / "socket")
        self._listener = Listener(self.address, "AF_UNIX", backlog=64)
        self._thread = Thread(target=self._serve, name="shared broker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the broker, if it has been started. No process can use it afterwards."""
        with Client(self.address) as connection:
            connection.send(_END)
        self._thread.join()
        self._listener.close()
        if self._broker:
            self._broker.close()
        self._processes.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            with self._listener.accept() as connection:
                if _request(connection) == _END:
                    return
                _reply(connection, self._start())

    def _start(self) -> Node | str:
        if self._answer is None:
            try:
                self._broker = Broker(self._root)
                self._broker.start()
                self._answer = self._broker.seen()
            except Exception as error:  # noqa: BLE001 - all who ask have to hear of it
                self._answer = f"the shared broker has not started: {error}"
        return self._answer


def shared_broker(address: str) -> Node:
    """Return the broker of the `SharedBroker` at this address; start it if necessary.

    :raises BrokerError: if it does not start.
    """
    with Client(address) as connection:
        connection.send(_GET)
        answer = connection.recv()
    if not isinstance(answer, Node):
        raise BrokerError(answer)
    return answer


def _request(connection: Connection) -> object:
    with suppress(EOFError, OSError):
        return connection.recv()
    return None


def _reply(connection: Connection, answer: object) -> None:
    with suppress(OSError):  # the client has ended
        connection.send(answer)
