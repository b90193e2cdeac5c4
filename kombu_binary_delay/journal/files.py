"""The journal as files in a folder: one rotating file per process."""

from __future__ import annotations

import logging
import os
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

#: The size in bytes at which a file is rotated, and the number of old files to keep.
FILE_SIZE = 100_000_000
FILES = 10


def append(folder: str, line: str) -> None:
    """Append a line to this process's file in a folder, which is created if it does not exist.

    :raises OSError: if it cannot be written.
    """
    key = (folder, os.getpid())
    if key not in _files:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # One file per process: two processes that rotate the same file would lose lines.
        path = Path(folder, f"journal-{os.getpid()}-{time.time_ns()}.jsonl")
        _files[key] = _File(path, maxBytes=FILE_SIZE, backupCount=FILES, encoding="utf-8")
    # handle() takes the lock: threads share the file.
    _files[key].handle(logging.makeLogRecord({"msg": line}))


class _File(RotatingFileHandler):
    """A rotating file that raises if it cannot be written; logging would print each error."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging's
        """Raise the error."""
        error = sys.exc_info()[1]
        if error is not None:
            raise error


_files: dict[tuple[str, int], _File] = {}
