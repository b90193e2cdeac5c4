"""A client for RabbitMQ's management HTTP API. It only reads."""

from __future__ import annotations

import json
import ssl
from base64 import b64encode
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from .errors import UnreachableError

_TIMEOUT = 30  # seconds
_PORT, _TLS_PORT = 15672, 15671


@dataclass(frozen=True)
class Management:
    """The management API of a broker, for one virtual host.

    :param url: such as ``http://localhost:15672``.
    :param authorities: a file of CA certificates to trust in addition to the system's.
    """

    url: str
    vhost: str
    user: str
    password: str = field(repr=False)
    authorities: str | None = None

    @classmethod
    def of(cls, connection: Any, url: str | None = None) -> Management:
        """Return the API of the broker of a :class:`kombu.Connection`.

        :param url: its URL, if not on the standard port of the connection's host; a user and a
            password in it replace those of the connection.
        :raises UnreachableError: for an invalid URL.
        """
        # Only an open connection shows whether it uses TLS, and which host it is connected to.
        _ = connection.connection
        given = _read(url) if url else urlsplit(_default_url(connection))
        place = given.netloc.rpartition("@")[2]
        return cls(
            urlunsplit((given.scheme, place, given.path.rstrip("/"), "", "")),
            connection.virtual_host or "/",
            unquote(given.username or "") or connection.userid or "guest",
            unquote(given.password or "") or _password(connection) or "guest",
            connection.ssl.get("ca_certs") if isinstance(connection.ssl, dict) else None,
        )

    def get(self, *path: str, query: str = "") -> Any:
        """Return the JSON at a path under ``/api``; this escapes the words of the path.

        :raises UnreachableError: if the API does not answer, or refuses.
        """
        url = "/".join([f"{self.url}/api", *(quote(word, safe="") for word in path)]) + query
        credentials = b64encode(f"{self.user}:{self.password}".encode()).decode()
        request = Request(url, headers={"Authorization": f"Basic {credentials}"})  # noqa: S310 - http or https, see above
        try:
            with urlopen(request, timeout=_TIMEOUT, context=self._context) as answer:  # noqa: S310 - see above
                return json.loads(answer.read())
        except HTTPError as exc:
            raise UnreachableError(self._refusal(exc.code, path)) from exc
        except (URLError, OSError, ValueError, HTTPException) as exc:
            raise UnreachableError(
                f"the management API at {self.url} does not answer: {getattr(exc, 'reason', exc)}; "
                f"enable the plugin rabbitmq_management, or say where the API is"
            ) from exc

    def here(self, kind: str, query: str = "") -> Any:
        """Return all objects of a kind, such as ``queues``, in the virtual host."""
        return self.get(kind, self.vhost, query=query)

    @property
    def _context(self) -> ssl.SSLContext | None:
        if not self.url.startswith("https"):
            return None
        context = ssl.create_default_context()
        if self.authorities is not None:
            context.load_verify_locations(self.authorities)
        return context

    def _refusal(self, code: int, path: tuple[str, ...]) -> str:
        asked = "/".join(path)
        if code in (401, 403):
            return (
                f"the management API at {self.url} does not let the user {self.user!r} read "
                f"{asked}; give it the tag 'monitoring', or 'administrator' for permissions"
            )
        return f"the management API at {self.url} answered {code} to {asked}"


def _password(connection: Any) -> str | None:
    """Return a connection's password; call it if it is a function."""
    password: Any = connection.password
    found: str | None = password() if callable(password) else password
    return found


def _default_url(connection: Any) -> str:
    """Return the default URL of the API of a connection's broker."""
    scheme, port = ("https", _TLS_PORT) if connection.ssl else ("http", _PORT)
    host = connection.hostname or "localhost"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _read(url: str) -> SplitResult:
    try:
        given = urlsplit(url)
        is_one = given.scheme in ("http", "https") and (given.hostname, given.port)[0]
    except ValueError:
        is_one = False
    # A slash in a password ends the host, and the @ then comes after it.
    if not is_one or "@" in given.path + given.query + given.fragment:
        # What it says may be a password.
        shown = "what was given" if "@" in url else repr(url)
        raise UnreachableError(
            f"{shown} is not the URL of a management API, such as 'http://localhost:15672'; "
            f"percent-encode special characters in the user and password, such as %2F for a slash"
        )
    return given
