"""Purpose: record `make demo` in a terminal of 80 columns and 24 lines.

    python -m dev.record_demo

It writes docs/demo.cast, in asciinema's format (asciicast v2): the terminal's output with times.
`python -m docs.generate` makes docs/demo.svg from it. RABBITMQ_ROOT names the broker, as for the
demo. A failed run is not kept.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from codecs import getincrementaldecoder
from pathlib import Path

CAST = Path(__file__).parents[1] / "docs" / "demo.cast"
COLUMNS, LINES = 80, 24
COMMAND = "make demo"
# The command, once everything is installed.
ARGV = [sys.executable, "-m", "dev.demo"]


def record(argv: list[str]) -> tuple[list[tuple[float, str]], int]:
    """Run a program in a new terminal; return its output with times in seconds, and its status."""
    begin = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        environment = {**os.environ, "TERM": "xterm-256color"}
        for each in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(each, None)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        os.execve(argv[0], argv, environment)  # noqa: S606 - no shell is needed
    decode = getincrementaldecoder("utf-8")().decode
    events = []
    try:
        while output := os.read(terminal, 1 << 16):
            sys.stdout.buffer.write(output)
            sys.stdout.flush()
            events.append((time.monotonic() - begin, decode(output)))
    except OSError:  # on Linux, this means that the program has ended
        pass
    return events, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    """Record a run; return its exit status."""
    events, status = record(ARGV)
    if status == 0:
        head = {"version": 2, "width": COLUMNS, "height": LINES, "title": COMMAND}
        lines = [head, *([round(when, 3), "o", text] for when, text in events)]
        CAST.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
