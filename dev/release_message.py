"""Purpose: send and receive one delayed message with the installed package, for dev/release.py.

    python -I dev/release_message.py URL

It imports nothing of this folder, and prints where the package is that it used.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kombu import Connection, Queue

import kombu_binary_delay

DELAY = 1.5  # seconds
PATIENCE = 60  # seconds


def main(url: str) -> str:
    """Send and receive a delayed message; return the result in words."""
    package = Path(kombu_binary_delay.__file__)
    if not package.is_relative_to(sys.prefix):
        sys.exit(f"{package} is not what this environment has installed")
    received: list[tuple[Any, float]] = []

    def receive(body: Any, message: Any) -> None:
        received.append((body, time.time()))
        message.ack()

    with Connection(url, transport="kombu_binary_delay:Transport") as connection:
        queue = Queue("mail")(connection.default_channel)
        queue.declare()
        sent = time.time()
        headers = {"x-delay": int(DELAY * 1000)}
        connection.Producer().publish("hello", routing_key="mail", headers=headers)
        with connection.Consumer([queue], callbacks=[receive]):
            while not received and time.time() < sent + PATIENCE:
                with suppress(TimeoutError):
                    connection.drain_events(timeout=1)
    if not received:
        sys.exit(f"nothing arrived in {PATIENCE} s")
    [(body, arrived)] = received
    if body != "hello" or arrived - sent < DELAY:
        sys.exit(f"{body!r} arrived after {arrived - sent:.3f} s, not 'hello' after {DELAY} s")
    return f"{body!r} arrived after {arrived - sent:.3f} s; it was to wait {DELAY} s"


if __name__ == "__main__":
    print(main(sys.argv[1]))
