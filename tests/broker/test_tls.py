"""`amqps://` is TLS, whichever way the transport was configured; a failover keeps both.

With real certificates, and a broker that has a port for each. What
connected, and whether that was TLS, is asked of the broker.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import trustme
from celery import Celery
from kombu import Connection, Queue
from kombu.exceptions import OperationalError

from dev.broker import Broker, VHost
from kombu_binary_delay import Transport, TransportMixin, register
from kombu_binary_delay.cli.connect import Target
from kombu_binary_delay.ladder.envelope import HEADER
from kombu_binary_delay.spark.journal import _Stream
from tests.waits import wait_until

AT_ONCE = {"max_retries": 1, "interval_start": 0, "interval_step": 0}

#: A port that nobody listens on.
NOBODY = "guest:guest@127.0.0.1:1//"
PATH = "kombu_binary_delay:Transport"
SSL_PATH = "kombu_binary_delay:SSLTransport"


class OwnTransport(Transport):
    """Somebody's own, with an alias of his own."""

    alias = "own-delay"


@pytest.fixture(scope="module")
def vhost(own_broker: Broker) -> VHost:
    """One for all: each test takes what it has published, and none looks for more."""
    return own_broker.vhost()


@pytest.fixture
def trusted(certificates, monkeypatch) -> str:
    """Let this machine trust the authority, as it does the usual ones."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    return str(certificates / "ca.pem")


@pytest.fixture
def distrusted(tmp_path) -> str:
    """Make another authority, which has not signed the broker's certificate."""
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    return str(tmp_path / "other.pem")


@contextmanager
def connected(url: str | list[str], transport: Any = None, **options: Any) -> Iterator[Connection]:
    register()
    with Connection(url, transport=transport, connect_timeout=30, **options) as connection:
        connection.ensure_connection(**{**AT_ONCE, "max_retries": 3})
        yield connection


def deliver(connection: Connection) -> bool:
    """Publish a delayed message and receive it; return whether that was over TLS."""
    channel = connection.default_channel
    Queue("q", channel=channel).declare()
    connection.Producer().publish("x", routing_key="q", headers={"x-delay": 250})
    message = wait_until(lambda: channel.basic_get("q", no_ack=True))
    assert message.headers.get(HEADER), "it was not delayed"
    assert isinstance(connection.transport, TransportMixin)
    return isinstance(connection.connection.sock, ssl.SSLSocket)


def as_the_broker_has_it(vhost: VHost, connections: Iterable[Connection]) -> list[dict[str, Any]]:
    """Ask the broker, which knows a connection by its client's port."""
    ports = [connection.connection.sock.getsockname()[1] for connection in connections]

    def listed() -> list[dict[str, Any]] | None:
        connections = vhost.broker.api("GET", f"vhosts/{vhost.name}/connections")
        rows = {row.get("peer_port"): row for row in connections}
        is_whole = all("ssl" in rows.get(port, ()) for port in ports)
        return [rows[port] for port in ports] if is_whole else None

    return wait_until(listed, "the broker does not list all of them") or []


def at(vhost: VHost, scheme: str) -> str:
    """Write the URL of the broker's TLS port, or of its plain one, with a scheme."""
    secure = scheme.lower().endswith("s")
    url = vhost.tls_url if secure else vhost.url
    return f"{scheme}://{url.partition('://')[2]}"


#: Every way of saying which transport, and that it is to be TLS.
WAYS: dict[str, tuple[str, Any]] = {
    "a path and amqps": ("amqps", PATH),
    "a path and pyamqps": ("pyamqps", PATH),
    "a path and AMQPS": ("AMQPS", PATH),
    "a class and amqps": ("amqps", Transport),
    "the path of the one over TLS and amqps": ("amqps", SSL_PATH),
    "an alias": ("binary-delays", None),
    "an alias and its name": ("binary-delays", "binary-delay"),
    "an alias with a path": ("binary-delays", PATH),
    "a class of somebody's own and amqps": ("amqps", OwnTransport),
    "an alias of somebody's own": ("own-delays", OwnTransport),
}
PLAIN_WAYS = [("amqp", PATH), ("amqp", Transport), ("binary-delay", None)]


def test_amqps_is_tls_whichever_way_the_transport_was_configured_and_the_broker_says_so(
    vhost, trusted
):
    with ExitStack() as stack:
        secure = [
            stack.enter_context(connected(at(vhost, scheme), transport))
            for scheme, transport in WAYS.values()
        ]
        plain = [
            stack.enter_context(connected(at(vhost, scheme), transport))
            for scheme, transport in PLAIN_WAYS
        ]
        assert dict(zip(WAYS, map(deliver, secure), strict=True)) == dict.fromkeys(WAYS, True)
        assert not any(map(deliver, plain))
        assert [row["ssl"] for row in as_the_broker_has_it(vhost, secure)] == [True] * len(secure)
        assert [row["ssl"] for row in as_the_broker_has_it(vhost, plain)] == [False] * len(plain)


@pytest.mark.parametrize("way", WAYS)
def test_amqps_is_an_error_where_nobody_speaks_tls_and_never_plaintext(vhost, trusted, way):
    scheme, transport = WAYS[way]
    register()
    plain_port = f"{scheme}://{vhost.url.partition('://')[2]}"
    with (
        Connection(plain_port, transport=transport) as connection,
        pytest.raises(connection.connection_errors, match=r"(?i)ssl"),
    ):
        connection.transport.establish_connection()


@pytest.mark.parametrize(
    "case",
    [
        ("amqp", "amqps", PATH),
        ("amqp", "amqps", Transport),
        ("amqp", "amqps", OwnTransport),
        ("amqp", "amqps", SSL_PATH),
        ("amqps", "amqps", PATH),
        ("binary-delay", "binary-delays", None),
        ("binary-delays", "binary-delays", None),
        ("binary-delay", "amqps", None),
        ("amqp", "binary-delays", PATH),
        ("amqp", "amqp", PATH),
        ("amqp", "amqp", Transport),
        ("amqp", "amqp", OwnTransport),
        ("amqps", "amqp", PATH),
        ("binary-delay", "binary-delay", None),
        ("binary-delays", "binary-delay", None),
        ("amqps", "binary-delay", PATH),
    ],
)
@pytest.mark.parametrize("as_list", [True, False], ids=["list", "semicolon"])
def test_a_failover_keeps_the_transport_and_takes_tls_from_each_url(vhost, trusted, case, as_list):
    first, second, transport = case
    urls = [f"{first}://{NOBODY}", at(vhost, second)]
    with connected(urls if as_list else ";".join(urls), transport) as connection:
        assert deliver(connection) == second.endswith("s")
        # And back again, and round once more: on every one of them.
        for scheme in (first, second, first, second):
            connection.maybe_switch_next()
            assert isinstance(connection.transport, TransportMixin)
            assert bool(connection.ssl) == (scheme.endswith("s") or transport == SSL_PATH)


@pytest.mark.parametrize("hand_in", ["ssl", "URL", "Celery"])
def test_an_authority_handed_in_is_the_one_that_counts(vhost, trusted, distrusted, hand_in):
    def connection(authority: str) -> Connection:
        options = {
            "ca_certs": authority,
            "cert_reqs": ssl.CERT_REQUIRED,
            "server_hostname": "localhost",
        }
        if hand_in == "ssl":
            # With a plain scheme: the options ask for TLS.
            url = vhost.tls_url.replace("amqps", "amqp")
            return Connection(url, transport=PATH, ssl=options, connect_timeout=30)
        if hand_in == "URL":
            query = f"?ssl_ca_certs={authority}&ssl_cert_reqs=CERT_REQUIRED"
            return Connection(vhost.tls_url + query, transport=PATH, connect_timeout=30)
        app = Celery(broker=vhost.tls_url.replace("amqps", "amqp"), set_as_current=False)
        app.conf.broker_transport = PATH
        app.conf.broker_use_ssl = options
        app.conf.broker_connection_timeout = 30
        return app.connection_for_write()

    with connection(trusted) as good:
        assert deliver(good)
    with (
        connection(distrusted) as bad,
        pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"),
    ):
        bad.transport.establish_connection()


def test_a_broker_whose_authority_this_machine_does_not_trust_is_refused(vhost, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with (
        Connection(vhost.tls_url, transport=PATH) as connection,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        connection.transport.establish_connection()


def test_a_broker_of_another_name_is_refused_where_a_name_is_asked_for(vhost, trusted):
    options = {"ca_certs": trusted, "server_hostname": "elsewhere.example"}
    with (
        Connection(vhost.tls_url, transport=PATH, ssl=options) as connection,
        pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"),
    ):
        connection.transport.establish_connection()


def test_each_host_is_asked_for_its_own_name_where_the_options_leave_it_open(vhost, trusted):
    options = {"ca_certs": trusted, "server_hostname": None}
    with connected(vhost.tls_url, PATH, ssl=options) as connection:
        assert deliver(connection)
        assert connection.ssl["server_hostname"] is None


def test_a_client_may_show_a_certificate_of_its_own(vhost, trusted, authority, tmp_path):
    issued = authority.issue_cert("someone@example.org", common_name="someone")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "me.pem")
    options = {"ca_certs": trusted, "certfile": str(tmp_path / "me.pem")}
    with connected(vhost.tls_url, PATH, ssl=options) as connection:
        assert deliver(connection)
        (row,) = as_the_broker_has_it(vhost, [connection])
        assert "someone" in row["peer_cert_subject"]


def test_a_failover_keeps_the_options_for_tls(vhost, trusted, distrusted):
    options = {"ca_certs": trusted, "cert_reqs": ssl.CERT_REQUIRED}
    urls = [f"amqps://{NOBODY}", vhost.tls_url]
    with connected(urls, PATH, ssl=options) as connection:
        assert deliver(connection)
    with (
        Connection(urls, transport=PATH, ssl={**options, "ca_certs": distrusted}) as connection,
        pytest.raises(OperationalError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        connection.ensure_connection(**AT_ONCE)


@pytest.mark.parametrize("scheme", ["amqps", "pyamqps", "AMQPS", "binary-delays", "binary-delay"])
@pytest.mark.parametrize("before", ["", f"amqp://{NOBODY};"], ids=["alone", "failover"])
def test_the_journal_is_read_over_tls_where_its_url_says_so(vhost, trusted, scheme, before):
    # Nobody has written to it; and no port takes what is meant for the other.
    assert _Stream({"broker": before + at(vhost, scheme)}).end() == 0


@pytest.mark.parametrize("scheme", ["amqps", "pyamqps", "binary-delays"])
def test_the_journal_is_never_read_in_plaintext_where_its_url_says_tls(vhost, trusted, scheme):
    plain_port = f"{scheme}://{vhost.url.partition('://')[2]}"
    with pytest.raises((OSError, OperationalError), match=r"(?i)ssl"):
        _Stream({"broker": plain_port}).end()


@pytest.mark.parametrize(
    ("urls", "transport", "scheme"),
    [
        (["amqps"], None, "https"),
        (["amqp"], None, "http"),
        ([NOBODY, "amqps"], PATH, "https"),
        (["amqps", NOBODY], SSL_PATH, "https"),
    ],
)
def test_an_operator_reaches_broker_and_management_api_over_tls_as_the_app_does(
    vhost, trusted, urls, transport, scheme
):
    app = Celery(set_as_current=False)
    app.conf.broker_url = [f"amqp://{url}" if url == NOBODY else at(vhost, url) for url in urls]
    app.conf.broker_transport = transport
    target = Target.of(app, None, None, {})

    with target.plain() as connection:
        management = target.management(connection)
        assert isinstance(connection.connection.sock, ssl.SSLSocket) == (scheme == "https")

    port = {"http": 15672, "https": 15671}[scheme]
    assert management.url == f"{scheme}://127.0.0.1:{port}"
