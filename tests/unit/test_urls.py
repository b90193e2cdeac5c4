"""Connections of our transport say of themselves what those of Kombu's own transport say."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES, pyamqp

from kombu_binary_delay import SettingsError, SSLTransport, Transport, register
from kombu_binary_delay.celery_side.urls import for_kombus_transport, is_broker_url

PATH = "kombu_binary_delay:Transport"
URLS = [
    "amqp://",
    "amqps://",
    "amqp://host",
    "amqp://host//",
    "amqp://host/%2F",
    "amqp://host/shop",
    "amqp://u%40:p%2F%40@host:1234/a%2Fb",
    "pyamqp://u:p@host:1234/shop",
    "AMQPS://u@host/shop",
    "amqp://host/shop?heartbeat=30",
    "amqp://a:1/x;amqps://u:p@b:2/y",
    "amqp://a:1/x;b",
]


def fields(connection: Connection) -> dict[str, Any]:
    """Return what a connection says before its transport is made, and after."""
    before = [connection.hostname, connection.port, connection.userid, connection.password]
    before += [connection.virtual_host, connection.heartbeat]
    info = connection.info()
    return {
        "before": before,
        "info": {**info, "transport": None, "ssl": None, "alternates": len(info["alternates"])},
        "is TLS": bool(connection.ssl),
        "URI": connection.as_uri().replace("pyamqp:", "amqp:"),
        "full URI": connection.as_uri(include_password=True).replace("pyamqp:", "amqp:"),
        "masked URI": connection.as_uri(mask="xx").replace("pyamqp:", "amqp:"),
    }


def with_alias(url: str) -> str:
    """Rewrite URLs of Kombu's schemes to ours."""
    secure = url.lower().replace("pyamqp", "amqp").replace("amqps:", "binary-delays:")
    return secure.replace("amqp:", "binary-delay:")


@pytest.mark.parametrize("way", ["path", "class", "alias"])
@pytest.mark.parametrize("url", URLS)
def test_a_connection_has_the_fields_that_it_has_by_kombus_transport(url, way):
    register()
    kombus = Connection(url)
    if way == "alias":
        ours = Connection(with_alias(url))
    else:
        ours = Connection(url, transport={"path": PATH, "class": Transport}[way])

    for _ in range(3 if ";" in url else 1):
        assert fields(ours) == fields(kombus)
        assert isinstance(ours.transport, Transport | SSLTransport)
        if way != "class":
            json.dumps(ours.info())
        for copy in (ours.clone(), pickle.loads(pickle.dumps(ours))):  # noqa: S301 - our own
            assert type(copy.transport) is type(ours.transport)
            assert copy.as_uri(include_password=True) == ours.as_uri(include_password=True)
        kombus.maybe_switch_next()
        ours.maybe_switch_next()


@pytest.mark.parametrize("url", ["amqps://a/x;b", "amqps://a/x;b;c"])
@pytest.mark.parametrize("transport", [PATH, Transport, "alias"])
def test_a_host_name_after_an_amqps_url_is_reached_over_tls_as_by_kombus_transport(url, transport):
    register()
    if transport == "alias":
        connection = Connection(with_alias(url))
    else:
        connection = Connection(url, transport=transport)
    for _ in connection.alt:
        connection.maybe_switch_next()
        assert connection.as_uri().startswith("amqps://")


CA = {"ca_certs": "ca.pem"}


@pytest.mark.parametrize("is_copy", [False, True], ids=["original", "copy"])
@pytest.mark.parametrize(
    ("url", "given", "expected"),
    [
        ("amqps://a:1;amqp://b:2", False, [(1, True, {}), (2, False, {})]),
        ("amqps://a;amqp://b", False, [(5671, True, {}), (5672, False, {})]),
        ("amqps://a;b;amqp://c", False, [(5671, True, {}), (5671, True, {}), (5672, False, {})]),
        ("amqps://a?ssl_ca_certs=ca.pem;amqp://b", False, [(5671, True, CA), (5672, False, CA)]),
        ("amqps://a?ssl_ca_certs=ca.pem;amqps://b", False, [(5671, True, CA)] * 2),
        ("amqp://a;amqp://b?ssl_ca_certs=ca.pem", False, [(5672, False, {}), (5671, True, CA)]),
        ("amqps://a;amqp://b", True, [(5671, True, {})] * 2),
        ("amqp://a;amqp://b", CA, [(5671, True, CA)] * 2),
    ],
)
@pytest.mark.parametrize("way", [PATH, Transport, "alias"])
def test_each_url_of_a_connection_and_of_its_copies_has_its_own_tls_and_port(
    way, url, given, expected, is_copy
):
    register()
    if way == "alias":
        connection = Connection(with_alias(url), ssl=given)
    else:
        connection = Connection(url, transport=way, ssl=given)
    if is_copy:
        connection = connection.clone()
    for port, is_tls, options in expected * 2:
        restored = pickle.loads(pickle.dumps(connection))  # noqa: S301 - our own
        for copy_ in (connection, connection.clone(), restored):
            tls = copy_.ssl if isinstance(copy_.ssl, dict) else {}
            # As py-amqp does when it connects.
            copy_.port = copy_.port or copy_.transport.default_connection_params["port"]
            assert (copy_.port, bool(copy_.ssl), tls) == (port, is_tls, options)
        connection.maybe_switch_next()


@pytest.mark.parametrize("scheme", ["amqp", "amqps", "binary-delay", "binary-delays"])
def test_a_transport_named_by_its_tls_alias_beside_the_url_is_tls_for_every_url(scheme):
    register()
    for url in (f"{scheme}://a", "a", f"{scheme}://a;amqp://b;amqps://c", "a;amqp://b"):
        connection = Connection(url, transport="binary-delays")
        for _ in range(3):
            assert connection.as_uri().startswith("amqps://")
            assert isinstance(connection.transport, Transport | SSLTransport)
            connection.maybe_switch_next()


@pytest.mark.parametrize("scheme", ["memory", "redis", "rediss", "sqs", "librabbitmq", "nonsense"])
@pytest.mark.parametrize("transport", [PATH, Transport, SSLTransport, "binary-delay"])
def test_the_scheme_of_another_broker_is_an_error_that_names_it_at_whichever_url(scheme, transport):
    register()
    expected = pytest.raises(SettingsError, match=rf"scheme is '{scheme}'.*use amqp:// or amqps://")
    with expected:
        Connection(f"{scheme}://127.0.0.1:1//", transport=transport)
    with expected:
        Connection([f"{scheme}://127.0.0.1:1//", "amqp://"], transport=transport)
    later = Connection(["amqp://127.0.0.1:1//", f"{scheme}://b"], transport=transport)
    with expected:
        later.connect()
    with expected:
        later.switch(f"{scheme}://b")


def test_other_transports_connections_are_left_alone():
    assert Connection("memory://").transport.driver_type == "memory"
    assert Connection("redis+socket:///tmp/x").hostname == "socket:///tmp/x"
    assert type(Connection("amqp://a;pyamqp://b").transport) is pyamqp.Transport
    memory = Connection("memory://")
    memory.switch("amqp://u@host/x")
    assert (memory.hostname, memory.userid, memory.virtual_host) == ("host", "u", "x")
    assert type(memory.transport) is pyamqp.Transport


def test_a_connection_by_path_needs_no_import_and_no_registration_beforehand():
    program = (
        "from kombu import Connection\n"
        f"c = Connection('amqp://127.0.0.1:1//;amqps://u@h:2/x', transport={PATH!r})\n"
        "print(c.port, c.virtual_host, type(c.transport).__module__)\n"
        "c.maybe_switch_next()\n"
        "print(c.as_uri(), type(c.transport).__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.decode().splitlines() == [
        "1 / kombu_binary_delay.transport",
        "amqps://u:**@h:2/x kombu_binary_delay.transport",
    ]


def test_which_urls_are_those_of_our_brokers(monkeypatch):
    monkeypatch.setitem(TRANSPORT_ALIASES, "own-delay", PATH)
    for url in ("amqp://", "PYAMQPS://h", "binary-delay://h", "binary-delays://h", "own-delay://h"):
        assert is_broker_url(url)
    for url in ("redis://h", "sqla://h", "file:///x", "/folder", "amqp", "own-delay", "memory"):
        assert not is_broker_url(url)


def test_a_url_for_kombus_transport_has_its_tls_options_beside_it():
    url = "binary-delays://h/x?ssl_ca_certs=ca.pem&heartbeat=5;amqp://b"

    assert for_kombus_transport(url) == ("amqps://h/x?heartbeat=5;amqp://b", {"ca_certs": "ca.pem"})
