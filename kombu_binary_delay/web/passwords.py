"""Users with passwords, as lines ``name:scrypt$...``; passwords themselves are not stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Mapping

_N, _R, _P = 2**14, 8, 1  # 16 MB and some 50 ms per check


def line_for(user: str, password: str) -> str:
    """Return the line of a user, for the file of users or the environment variable.

    :raises ValueError: for a name that :func:`read` would not read back; for no password.
    """
    is_a_line = user.strip() == user and user.splitlines() == [user]
    if not is_a_line or user[0] == "#" or set(user) & set(":;"):
        raise ValueError(
            f"{user!r} cannot be a user's name: it must not be empty, begin with #, begin or end "
            f"with a blank, or have a colon, a semicolon or a line break"
        )
    if not password:
        raise ValueError("a user needs a password")
    salt = secrets.token_bytes(16)
    words = [str(_N), str(_R), str(_P), b64encode(salt).decode()]
    words.append(b64encode(_hash(password, salt, _N, _R, _P)).decode())
    return f"{user}:scrypt${'$'.join(words)}"


def read(text: str) -> dict[str, str]:
    """Read lines of users; skip empty lines and those that begin with #.

    :returns: password hashes, for :func:`is_password`, by user name.
    :raises ValueError: for an invalid line; the message does not repeat the line.
    """
    users = {}
    for number, line in enumerate(text.replace(";", "\n").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, colon, hashed = line.strip().partition(":")
        if not user or not colon or not _is_hash(hashed):
            raise ValueError(
                f"line {number} of the users is not NAME:scrypt$...; "
                f"write one with 'kombu-binary-delay web --new-user NAME'"
            )
        users[user] = hashed
    if not users:
        raise ValueError("there are no users")
    return users


class Checker:
    """Checks names and passwords; a password that was right is not hashed again."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users
        self._key = secrets.token_bytes(32)
        self._known: set[bytes] = set()
        # The time of a check must not show whether a user exists.
        self._nobody = line_for("nobody", secrets.token_hex()).partition(":")[2]

    def is_right(self, user: str, password: str) -> bool:
        """Return whether a user has this password."""
        seal = hmac.digest(self._key, f"{user}\0{password}".encode(), "sha256")
        if seal in self._known:
            return True
        known = self._users.get(user)
        right = is_password(password, known or self._nobody) and known is not None
        if right:
            self._known.add(seal)
        return right


def is_password(password: str, hashed: str) -> bool:
    """Return whether ``scrypt$...`` was made from this password.

    :raises ValueError: for another text, or one that was cut off.
    """
    kind, n, r, p, salt, digest = hashed.split("$")
    made = _hash(password, b64decode(salt, validate=True), int(n), int(r), int(p))
    known = b64decode(digest, validate=True)
    if kind != "scrypt" or len(known) != len(made):
        raise ValueError("this is not a whole hash by scrypt")
    return hmac.compare_digest(made, known)


def _is_hash(text: str) -> bool:
    """Return whether this is whole, and scrypt takes its numbers."""
    try:
        is_password("", text)
    except (ValueError, OverflowError):
        return False
    return True


def _hash(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=n, r=r, p=p, maxmem=2**27, dklen=32)
