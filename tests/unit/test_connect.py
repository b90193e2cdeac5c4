"""Where the command works: TLS wherever it was asked for, and no secret in what it prints."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import click
import pytest
import trustme
from celery import Celery
from click.testing import CliRunner

from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.cli.connect import Target
from kombu_binary_delay.operate import Management, UnreachableError

SSL_PATH = "kombu_binary_delay:SSLTransport"


def target_of(**conf: Any) -> Target:
    app = Celery("shop", broker="amqp://guest:guest@rabbit//", set_as_current=False)
    app.conf.update(conf)
    return Target.of(app, None, None, {})


@pytest.mark.parametrize(
    ("conf", "is_secure"),
    [
        ({}, False),
        ({"broker_transport": "kombu_binary_delay:Transport"}, False),
        ({"broker_transport": "pyamqp"}, False),
        ({"broker_transport": SSL_PATH}, True),
        ({"broker_transport": "amqps"}, True),
        ({"broker_transport": SSL_PATH, "broker_url": ["amqp://a//", "amqp://b//"]}, True),
        ({"broker_use_ssl": {"ca_certs": "ca.pem"}}, True),
        ({"broker_transport": SSL_PATH, "broker_use_ssl": {"ca_certs": "ca.pem"}}, True),
    ],
)
def test_what_an_app_asks_to_be_over_tls_is(conf, is_secure):
    target = target_of(**conf)

    for connection in (target.plain(), target.delaying()):
        assert bool(connection.transport.client.ssl) is is_secure
        assert connection.transport.default_connection_params["port"] == (
            5671 if is_secure else 5672
        )
        if "broker_use_ssl" in conf:
            assert connection.ssl == conf["broker_use_ssl"]


@pytest.mark.parametrize("scheme", ["amqp", "amqps", "binary-delays"])
def test_what_a_url_says_of_tls_is_read_as_our_transport_reads_it(scheme):
    query = "?ssl_ca_certs=ca.pem&connect_timeout=3&ssl_cert_reqs=CERT_REQUIRED"
    target = Target.of(
        None, f"{scheme}://rabbit/shop{query};{scheme}://u:&ssl_p@other/shop", None, {}
    )

    for connection in (target.plain(), target.delaying()):
        assert connection.transport.client.ssl == {
            "ca_certs": "ca.pem",
            "cert_reqs": ssl.CERT_REQUIRED,
        }
        assert connection.virtual_host == "shop"
    assert target.url.count("ssl_") == 1, "that one is a password"


def test_an_app_logs_in_as_it_does_itself():
    target = target_of(broker_login_method="EXTERNAL")

    assert target.plain().login_method == target.delaying().login_method == "EXTERNAL"


@pytest.mark.parametrize(
    ("conf", "host", "expected"),
    [
        ({"broker_url": "amqp://rabbit"}, "rabbit", ("me", "secret", "shop", 5673)),
        ({"broker_url": "amqp://u:p@rabbit:1/v"}, "rabbit", ("u", "p", "v", 1)),
        ({"broker_url": "rabbit"}, "rabbit", ("me", "secret", "shop", 5673)),
        ({"broker_url": None}, "localhost", ("me", "secret", "shop", 5673)),
        ({"broker_url": "amqp://rabbit", "broker_password": lambda: "fresh"}, "rabbit", None),
    ],
)
def test_an_apps_own_user_password_virtual_host_and_port_count_as_in_celery(conf, host, expected):
    given = {"user": "me", "password": "secret", "vhost": "shop", "port": 5673}
    app = Celery("shop", set_as_current=False)
    app.conf.update({**{f"broker_{name}": value for name, value in given.items()}, **conf})
    target = Target.of(app, None, None, {})

    for connection in (target.plain(), target.delaying(), app.connection_for_write()):
        connection.transport  # noqa: B018 - ours reads the URL when it is made
        assert (connection.hostname or "localhost") == host
        account = connection.userid, connection.password, connection.virtual_host, connection.port
        if expected is None:
            assert account[1]() == "fresh"
        else:
            assert account == expected
    assert "secret" not in repr(target)
    elsewhere = Target.of(app, "amqp://other", None, {}).plain()
    assert (elsewhere.userid, elsewhere.virtual_host) == (None, "/"), "a URL that is given counts"


def connected(**more: Any) -> Any:
    """What Kombu knows of a connection that is made."""
    given = {"hostname": "rabbit", "ssl": False, "userid": "us:er", "password": "p@ss"}
    return SimpleNamespace(**{**given, "virtual_host": "/", "connection": object(), **more})


class Late:
    """A connection of Kombu's that records its TLS and its host when it is made."""

    hostname, ssl, userid, password, virtual_host = "first", False, "u", "p", "/"

    @property
    def connection(self) -> object:
        self.hostname, self.ssl = "second", True
        return self


@pytest.mark.parametrize(
    ("connection", "url", "expected"),
    [
        (connected(), None, ("http://rabbit:15672", "us:er", "p@ss")),
        (connected(ssl=True), None, ("https://rabbit:15671", "us:er", "p@ss")),
        (connected(password=lambda: "fresh"), None, ("http://rabbit:15672", "us:er", "fresh")),
        (connected(hostname="::1"), None, ("http://[::1]:15672", "us:er", "p@ss")),
        (Late(), None, ("https://second:15671", "u", "p")),
        (connected(), "https://api/x/", ("https://api/x", "us:er", "p@ss")),
        (connected(), "http://me:p%40ss%2F@api:1", ("http://api:1", "me", "p@ss/")),
        (connected(), "http://m%40e@[::1]:1", ("http://[::1]:1", "m@e", "p@ss")),
    ],
)
def test_the_management_api_is_found_beside_the_broker_or_where_it_is_said_to_be(
    connection, url, expected
):
    management = Management.of(connection, url)

    assert (management.url, management.user, management.password) == expected


def test_the_authority_that_the_app_trusts_counts_for_the_management_api_too(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"

        def serve():
            for _ in range(2):
                taken, _ = listener.accept()
                with taken, suppress(OSError), server.wrap_socket(taken, server_side=True) as safe:
                    safe.recv(9999)
                    safe.sendall(b"HTTP/1.0 200 OK\r\n\r\n{}")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            Management.of(connected(ssl=True), url).get("overview")
        trusting = connected(ssl={"ca_certs": str(tmp_path / "ca.pem")})
        assert Management.of(trusting, url).get("overview") == {}
        thread.join()


@pytest.mark.parametrize(
    "url",
    [
        "localhost:15672",
        "us:hush@ush:15672",
        "http://us:hush/ush@host:15672",
        "http://us:12/hush@host:15672",
        "http://us:12?hush@host:15672",
        "http://us:12#hush@host:15672",
        "http://us:hush]@[host:15672",
        "ftp://us:hush@host",
    ],
)
def test_what_is_no_url_of_a_management_api_is_refused_and_no_password_repeated(url):
    with pytest.raises(UnreachableError, match="is not the URL of a management API") as raised:
        Management.of(connected(), url)

    assert "ush" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("foo://us:hush@host//", "must be a RabbitMQ"),
        ("redis://us:hush@host/0", "must be a RabbitMQ"),
        ("memory://", "must be a RabbitMQ"),
        ("amqp://us:hu/sh@host//", "percent-encoded"),
        ("amqp://a//;amqps://us:hu#sh@host//", "percent-encoded"),
        ("amqp://us:hu?sh@host//", "percent-encoded"),
    ],
)
def test_what_is_no_broker_of_ours_is_refused_and_no_password_repeated(url, words):
    done = CliRunner().invoke(binary_delay, ["-b", url, "status"])
    moved = CliRunner().invoke(binary_delay, ["transfer", "--to-broker", url])

    for result in (done, moved):
        assert (result.exit_code, words in " ".join(result.output.split())) == (2, True)
        assert not [part for part in ("hush", "hu", "sh@") if part in result.output.lower()]


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"broker_transport_options": {"binary_delay": ["x"]}}, "must be a mapping"),
        ({"broker_transport": "no.such:Transport"}, "cannot be loaded"),
        ({"broker_transport": "what"}, "cannot be loaded"),
        ({"broker_url": "redis://localhost"}, "must be a RabbitMQ"),
    ],
)
def test_an_app_that_cannot_be_is_refused(conf, words):
    with pytest.raises(click.UsageError, match=words):
        target_of(**conf)
