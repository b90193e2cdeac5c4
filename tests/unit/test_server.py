"""A broker that somebody else runs is known by its URL."""

from __future__ import annotations

import pytest

from dev.server import BrokerError, Server, VHost


def test_without_a_url_there_is_no_such_broker():
    assert Server.from_environment({}) is None


@pytest.mark.parametrize(
    ("env", "url", "management"),
    [
        ({"RABBITMQ_URL": "amqp://h"}, "amqp://h//", "http://h:15672"),
        ({"RABBITMQ_URL": "amqp://u:p@h:5673/some"}, "amqp://u:p@h:5673//", "http://h:15672"),
        (
            {"RABBITMQ_URL": "amqps://h", "RABBITMQ_MANAGEMENT_URL": "https://a:b@m:443"},
            "amqps://h//",
            "https://m:443",
        ),
    ],
)
def test_the_environment_names_a_broker_and_its_management(env, url, management):
    server = Server.from_environment(env)

    assert server
    assert (server.url, server.management_url) == (url, management)


def test_a_virtual_host_has_a_url_for_each_user():
    vhost = VHost(Server("amqp://guest:guest@h:5672"), "v")

    assert vhost.url == "amqp://guest:guest@h:5672/v"
    assert vhost.url_of("me", "secret") == "amqp://me:secret@h:5672/v"


@pytest.mark.parametrize(
    ("url", "management"), [("redis://h", None), ("h:5672", None), ("amqp://h", "ftp://h")]
)
def test_what_is_no_url_of_a_broker_is_refused_by_name(url, management):
    with pytest.raises(BrokerError, match=repr(management or url)):
        Server(url, management)
