"""Purpose: a running RabbitMQ, wherever it is; each test uses a virtual host of it.

A `Server` needs only the URLs of the broker and of its management API. It neither starts nor stops
the broker; the subclass `dev.broker.Broker` does.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import uuid
from base64 import b64encode
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

import amqp

from kombu_binary_delay.ladder.versions import release
from kombu_binary_delay.operate import ready

if TYPE_CHECKING:
    from collections.abc import Mapping

Rows = list[dict[str, Any]]


class BrokerError(RuntimeError):
    """The RabbitMQ is missing, or a request fails."""


class Server:
    """A RabbitMQ that we do not start or stop.

    url:            amqp://USER:PASSWORD@HOST:PORT, or amqps://; a virtual host in it is ignored.
    management_url: of its management plugin; by default http://HOST:15672 with the same user. The
                    user needs the tag `administrator`, since each test makes a virtual host.
    """

    def __init__(self, url: str, management_url: str | None = None) -> None:
        self._at = urlsplit(url)
        if self._at.scheme not in ("amqp", "amqps") or not self._at.hostname:
            raise BrokerError(f"{url!r} is no URL of a broker, as amqp://USER:PASSWORD@HOST:PORT")
        self.url = f"{self._at.scheme}://{self._at.netloc}//"
        host = self._at.hostname
        manage = urlsplit(management_url or f"http://{host}:15672")
        if manage.scheme not in ("http", "https") or not manage.hostname:
            raise BrokerError(f"{management_url!r} is no URL of a management API, as http://HOST")
        self._manager = (
            _user(manage.username, manage.password)
            if manage.username
            else _user(self._at.username, self._at.password)
        )
        self.management_url = f"{manage.scheme}://{manage.netloc.rpartition('@')[2]}"

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Server | None:
        """Return the server that RABBITMQ_URL and RABBITMQ_MANAGEMENT_URL name; None if unset."""
        url = env.get("RABBITMQ_URL")
        return cls(url, env.get("RABBITMQ_MANAGEMENT_URL")) if url else None

    # --- what it is -----------------------------------------------------------------

    @cached_property
    def version(self) -> str:
        """The version that the broker reports: "3.10.8"."""
        return str(self.api("GET", "overview")["rabbitmq_version"])

    @property
    def release(self) -> tuple[int, ...]:
        """The version's major and minor number: (3, 10)."""
        return release(self.version)

    @property
    def tls_url(self) -> str:
        """The URL for TLS.

        :raises BrokerError: if it is unknown.
        """
        if self._at.scheme == "amqps":
            return self.url
        raise BrokerError("this broker was not named by an amqps:// URL")

    # --- what it is used for --------------------------------------------------------

    def vhost(self) -> VHost:
        """Create and return a virtual host with a unique name."""
        name = f"env-{uuid.uuid4().hex[:12]}"
        self.api("PUT", f"vhosts/{name}", {})
        user = _user(self._at.username, self._at.password)[0]
        if user != self._manager[0]:
            everything = dict.fromkeys(("configure", "write", "read"), ".*")
            self.api("PUT", f"permissions/{name}/{quote(user, safe='')}", everything)
        return VHost(self, name)

    def connect(self, vhost: str) -> amqp.Connection:
        """Open a plain AMQP connection; it is the caller's to close."""
        tls = self._at.scheme == "amqps"
        user, password = _user(self._at.username, self._at.password)
        connection = amqp.Connection(
            f"{self._at.hostname}:{self._at.port or (5671 if tls else 5672)}",
            user,
            password,
            virtual_host=vhost,
            ssl=tls,
            connect_timeout=150,
            read_timeout=150,
        )
        connection.connect()
        return connection

    def api(self, method: str, path: str, body: object = None) -> Any:
        """Call the management HTTP API; `path` is what follows /api/."""
        request = urllib.request.Request(  # noqa: S310, the URL is checked above
            f"{self.management_url}/api/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": "Basic " + b64encode(":".join(self._manager).encode()).decode(),
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
                text = answer.read()
        except urllib.error.HTTPError as refusal:
            # Python 3.14 warns of a refusal that is never closed.
            with refusal:
                raise BrokerError(f"{method} {path}: {refusal} {refusal.read()!r}") from None
        return json.loads(text) if text else None


@dataclass(frozen=True)
class VHost:
    """One virtual host of a `Server`, and its content."""

    broker: Server
    name: str

    @property
    def url(self) -> str:
        """The URL for applications."""
        return f"{self.broker.url.removesuffix('/')}{self.name}"

    @property
    def tls_url(self) -> str:
        """The URL for applications over TLS."""
        return f"{self.broker.tls_url.removesuffix('/')}{self.name}"

    def url_of(self, user: str, password: str) -> str:
        """Return the URL for another user."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{user}:{password}@{rest.rpartition('@')[2]}"

    def queues(self) -> Rows:
        """Return the queues, as in the management API. Its message counts lag: see `waiting`."""
        return self._list("queues")

    def exchanges(self) -> Rows:
        """Return the declared exchanges, without the broker's own."""
        return [
            row
            for row in self._list("exchanges")
            if row["name"] and not row["name"].startswith("amq.")
        ]

    def bindings(self) -> Rows:
        """Return the bindings, without those of the default exchange."""
        return [row for row in self._list("bindings") if row["source"]]

    def waiting(self, *queues: str) -> dict[str, int]:
        """Return the number of ready messages in each of these queues that exists."""
        with self.connect() as connection:
            return ready(connection, queues)

    def connect(self) -> amqp.Connection:
        """Open a plain AMQP connection; it is the caller's to close."""
        return self.broker.connect(self.name)

    def delete(self) -> None:
        """Delete the virtual host with its content."""
        self.broker.api("DELETE", f"vhosts/{self.name}")

    def _list(self, kind: str) -> Rows:
        rows: Rows = self.broker.api("GET", f"{kind}/{self.name}")
        return rows


def _user(name: str | None, password: str | None) -> tuple[str, str]:
    return unquote(name or "guest"), unquote(password or "guest")
