"""A client for RabbitMQ's management HTTP API. It only reads."""

from __future__ import annotations

import json
import re
import shlex
import ssl
from base64 import b64encode
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from .errors import UnlistedError, UnreachableError

#: How long to wait for a connection, and for an answer, in seconds. RabbitMQ itself gives a listing
#: 60, and more if there are over 30,000 queues.
_CONNECT, _TIMEOUT = 10, 70
_PORT, _TLS_PORT = 15672, 15671
_BUSY = "it is overloaded or just starting: try again later, and look into the broker's log"
_SAY_WHERE = "Say where it is with --management or BINARY_DELAY_MANAGEMENT"


class _Connection(HTTPConnection):
    """A connection that waits longer for an answer than to be made."""

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(_TIMEOUT)


class _ConnectionWithTLS(_Connection, HTTPSConnection):
    """The same with TLS."""


class _Patient(HTTPHandler):
    def http_open(self, req: Request) -> Any:
        return self.do_open(_Connection, req)


class _PatientWithTLS(HTTPSHandler):
    def __init__(self, context: ssl.SSLContext | None) -> None:
        super().__init__(context=context)
        self._given = context

    def https_open(self, req: Request) -> Any:
        return self.do_open(_ConnectionWithTLS, req, context=self._given)


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

        :raises UnreachableError: if the API does not answer, or refuses; of the kind
            ``UnlistedError`` if it has no such object.
        """
        url = "/".join([f"{self.url}/api", *(quote(word, safe="") for word in path)]) + query
        credentials = b64encode(f"{self.user}:{self.password}".encode()).decode()
        request = Request(url, headers={"Authorization": f"Basic {credentials}"})  # noqa: S310 - http or https, see above
        try:
            with self._opener.open(request, timeout=_CONNECT) as answer:
                return json.loads(answer.read())
        except HTTPError as exc:
            kind = UnlistedError if exc.code == HTTPStatus.NOT_FOUND else UnreachableError
            with exc:
                raise kind(self._refusal(exc, path)) from exc
        except TimeoutError as exc:
            # It is connected: what fails before that is an URLError.
            raise UnreachableError(
                f"the management API at {self.url} has given no answer to {'/'.join(path)} within "
                f"{_TIMEOUT} s; {_BUSY}"
            ) from exc
        except (URLError, OSError, ValueError, HTTPException) as exc:
            raise UnreachableError(
                f"the management API at {self.url} does not answer: {_reason(exc)}; enable it with "
                f"'rabbitmq-plugins enable rabbitmq_management' on the broker's host, or say where "
                f"it is with --management or BINARY_DELAY_MANAGEMENT"
            ) from exc

    def here(self, kind: str, query: str = "") -> Any:
        """Return all objects of a kind, such as ``queues``, in the virtual host."""
        return self.get(kind, self.vhost, query=query)

    @property
    def _opener(self) -> OpenerDirector:
        return build_opener(_Patient(), _PatientWithTLS(context=self._context))

    @property
    def _context(self) -> ssl.SSLContext | None:
        if not self.url.startswith("https"):
            return None
        context = ssl.create_default_context()
        if self.authorities is not None:
            context.load_verify_locations(self.authorities)
        return context

    def _refusal(self, exc: HTTPError, path: tuple[str, ...]) -> str:
        asked, api = "/".join(path), f"the management API at {self.url}"
        name, user = repr(self.user), shlex.quote(self.user)
        reason = _said(exc)
        # As in `here`; other names may be equal to the virtual host's.
        if exc.code == HTTPStatus.NOT_FOUND and path[1:] == (self.vhost,):
            return (
                f"{api} shows the user {name} no virtual host {self.vhost!r}; is it that of this "
                f"broker? {_SAY_WHERE}"
            )
        if exc.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return f"{api} answered {exc.code} to {asked}; {_BUSY}"
        if exc.code not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return (
                f"{api} answered {exc.code} to {asked}; is it RabbitMQ's management API? "
                f"{_SAY_WHERE}"
            )
        if "virtual host" in reason:
            return (
                f"{api} does not let the user {name} see the virtual host {self.vhost!r}; give it "
                f"permissions there with 'rabbitmqctl set_permissions -p "
                f"{shlex.quote(self.vhost)} {user} CONFIGURE WRITE READ'"
            )
        needed = re.match(r"Not (management|monitor|administrator) user", reason)
        if needed or exc.code == HTTPStatus.FORBIDDEN:
            tag = "administrator" if needed and needed[1] == "administrator" else "monitoring"
            return (
                f"{api} does not let the user {name} read {asked}; give it the tag with "
                f"'rabbitmqctl set_user_tags {user} {tag}'"
            )
        return (
            f"{api} refuses the user {name} or its password; change them in the broker's URL, or "
            f"name others in that of --management"
        )


def _reason(exc: Exception) -> str:
    """Write why there is no answer."""
    inner = getattr(exc, "reason", exc)
    return str(getattr(inner, "strerror", None) or inner)


def _said(exc: HTTPError) -> str:
    """Read what the API gives as its reason; nothing where it gives none."""
    try:
        return str(json.loads(exc.read()).get("reason") or "")
    except (ValueError, AttributeError, OSError, HTTPException):
        return ""


def _password(connection: Any) -> str | None:
    """Return a connection's password; call it if it is a function."""
    password: Any = connection.password
    known: str | None = password() if callable(password) else password
    return known


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
            f"{shown} is not the URL of a management API, such as 'http://localhost:15672'; change "
            f"--management or BINARY_DELAY_MANAGEMENT, and write what is special in a user and a "
            f"password percent-encoded, such as %2F for a slash"
        )
    return given
