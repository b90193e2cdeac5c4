"""The journal in a folder: rotating files, one for each process."""

from __future__ import annotations

import logging
import os
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

#: A file is rotated at this size in bytes, and as many old ones kept.
FILE_SIZE = 100_000_000
FILES = 10


def append(folder: str, line: str) -> None:
    """Append a line to this process's file in a folder, which is made if it is not there.

    :raises OSError: where it cannot be written.
    """
    key = (folder, os.getpid())
    if key not in _files:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # One a process: two that rotate the same file would lose lines.
        path = Path(folder, f"journal-{os.getpid()}-{time.time_ns()}.jsonl")
        _files[key] = _File(path, maxBytes=FILE_SIZE, backupCount=FILES, encoding="utf-8")
    # Its lock, too: threads share it.
    _files[key].handle(logging.makeLogRecord({"msg": line}))


class _File(RotatingFileHandler):
    """A rotating file that raises where it cannot be written; logging would print each time."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging's
        """Raise what came up."""
        error = sys.exc_info()[1]
        if error is not None:
            raise error


_files: dict[tuple[str, int], _File] = {}
