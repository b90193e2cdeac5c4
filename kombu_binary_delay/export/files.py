"""Write a file that the user has named: all of it, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

#: The errors of a file that can be written, but not replaced: its folder or its owner does not
#: permit it, or it is a mount point.
_KEPT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
_DESCRIPTORS = {"/dev/stdout": 1, "/dev/stderr": 2}


def write_file(path: Path, text: str) -> None:
    """Write a file in UTF-8. If that fails, as on a full disk, the file stays as it was.

    A device, a pipe and a file that cannot be replaced are written in place.

    :raises OSError: with the name of the file.
    :raises UnicodeEncodeError: if the text has what UTF-8 cannot encode.
    """
    written = text.encode()
    is_special = path.absolute().parts[1:2] in (("dev",), ("proc",))
    try:
        if is_special or (path.exists() and not path.is_file()):
            _write(path, written)
        else:
            _replace(path.resolve(), written)  # a symbolic link stays one
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, str(path)) from exc


def _replace(path: Path, written: bytes) -> None:
    """Write beside a file, and then rename."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            new = Path(folder, path.name)
            new.write_bytes(written)
            with suppress(FileNotFoundError):
                known = path.stat()
                os.chown(new, known.st_uid, known.st_gid)
                shutil.copymode(path, new)
            new.replace(path)
    except OSError as exc:
        if exc.errno not in _KEPT:
            raise
        _write(path, written)


def _write(path: Path, written: bytes) -> None:
    # A redirected output that is opened by its name would be written from its beginning.
    descriptor = _DESCRIPTORS.get(str(path))
    with path.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(written)
