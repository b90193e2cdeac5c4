"""Users with passwords, as lines ``name:scrypt$...``; passwords themselves are nowhere kept."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Mapping

_N, _R, _P = 2**14, 8, 1  # 16 MB and some 50 ms a look


def line_for(user: str, password: str) -> str:
    """Write the line of a user: what a file of users, or the variable, holds.

    :raises ValueError: for a name with a colon or a line break, or an empty one, or no password.
    """
    if not user or not password or set(user) & set(":\r\n;"):
        raise ValueError("a user needs a name without a colon or semicolon, and a password")
    salt = secrets.token_bytes(16)
    words = [str(_N), str(_R), str(_P), b64encode(salt).decode()]
    words.append(b64encode(_hash(password, salt, _N, _R, _P)).decode())
    return f"{user}:scrypt${'$'.join(words)}"


def read(text: str) -> dict[str, str]:
    """Read lines of users; empty ones and those that begin with # are left out.

    :returns: by names, what :func:`is_password` takes.
    :raises ValueError: for a line that is not one; its words are not repeated.
    """
    users = {}
    for number, line in enumerate(text.replace(";", "\n").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, colon, hashed = line.strip().partition(":")
        if not user or not colon or len(hashed.split("$")) != 6 or hashed[:7] != "scrypt$":
            raise ValueError(
                f"line {number} of the users is not NAME:scrypt$...; "
                f"write one with 'kombu-binary-delay web --new-user NAME'"
            )
        users[user] = hashed
    if not users:
        raise ValueError("there are no users")
    return users


class Checker:
    """Checks names and passwords; what was right is right again without the cost of a hash."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users
        self._key = secrets.token_bytes(32)
        self._known: set[bytes] = set()
        # Whoever has no such name learns nothing from how long it takes.
        self._nobody = line_for("nobody", secrets.token_hex()).partition(":")[2]

    def is_right(self, user: str, password: str) -> bool:
        """Whether a user has this password."""
        seal = hmac.digest(self._key, f"{user}\0{password}".encode(), "sha256")
        if seal in self._known:
            return True
        known = self._users.get(user)
        right = is_password(password, known or self._nobody) and known is not None
        if right:
            self._known.add(seal)
        return right


def is_password(password: str, hashed: str) -> bool:
    """Whether ``scrypt$...`` was made of this password."""
    _, n, r, p, salt, digest = hashed.split("$")
    made = _hash(password, b64decode(salt), int(n), int(r), int(p))
    return hmac.compare_digest(made, b64decode(digest))


def _hash(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=n, r=r, p=p, maxmem=2**27, dklen=32)
