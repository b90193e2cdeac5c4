"""Write a file that the user has named: all of it, or nothing."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


def write_file(path: Path, text: str) -> None:
    """Write a file in UTF-8. If that fails, as on a full disk, the file stays as it was.

    :raises OSError: with the name of the file.
    :raises UnicodeEncodeError: if the text has what UTF-8 cannot encode.
    """
    written = text.encode()
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(written)  # a device or a pipe
        else:
            _replace(path.resolve(), written)  # a symbolic link stays one
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, str(path)) from exc


def _replace(path: Path, written: bytes) -> None:
    """Write beside a file, and then rename."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        new = Path(folder, path.name)
        new.write_bytes(written)
        with suppress(FileNotFoundError):
            shutil.copymode(path, new)
        new.replace(path)
