"""What providers and operators set: names of hosts, default queue types, policies and limits."""

from __future__ import annotations

import json
import logging
import socket
import time
from urllib.parse import urlsplit, urlunsplit

import pytest
from celery import Celery
from click.testing import CliRunner
from kombu import Queue

from kombu_binary_delay import AmendmentError, cancel, reschedule
from kombu_binary_delay.celery_side import tasks
from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.journal import writer
from kombu_binary_delay.ladder.versions import AMAZON, AMAZON_POLICY

NAME = "b-1234abcd.mq.eu-west-1.amazonaws.com"
#: A ladder of few queues.
FEW = "--radix", "2", "--levels", "4"


@pytest.fixture
def amazon(vhost, monkeypatch):
    """The URL of the virtual host, by a name that is like those of Amazon MQ."""
    here = urlsplit(vhost.url)
    resolve = socket.getaddrinfo

    def resolve_ours(host, *arguments, **options):
        return resolve(here.hostname if host == NAME else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_ours)
    for warnings in (tasks._warnings, writer.warnings):  # noqa: SLF001 - others may have warned
        warnings.clear()
    place = here.netloc.replace(here.hostname, NAME)
    return urlunsplit((here.scheme, place, here.path, "", ""))


@pytest.fixture
def run(vhost):
    def run(*arguments, url=None, ladder=FEW):
        command = ["-b", url or vhost.url, *ladder, *arguments]
        environment = {"BINARY_DELAY_MANAGEMENT": vhost.broker.management_url}
        return CliRunner().invoke(binary_delay, command, env=environment)

    return run


@pytest.fixture
def differences(run):
    def differences(*options, ladder=FEW, user="guest"):
        done = run(*options, "verify", "--json", "--user", user, ladder=ladder)
        compared = json.loads(done.stdout)
        return [
            (row["severity"], row["what"], row["remedy"])
            for row in compared["differences"]
            if row["severity"] != "note"
        ]

    return differences


def test_a_revoke_on_amazon_mq_declares_nothing_and_says_so_once(amazon, vhost, connect, caplog):
    connection = connect(url=amazon, binary_delay={"journal": "stream"})
    app = Celery("shop", broker=amazon)
    app.conf.broker_transport = connection.transport_cls
    with caplog.at_level(logging.WARNING):
        app.control.revoke("a")
        app.control.revoke(["b", "c"])
        app.pool.force_close_all()
        for refused in (
            lambda: cancel("a", connection=connection),
            lambda: reschedule("a", countdown=9, connection=connection),
            lambda: connection.Producer().publish("x", headers={"x-delay-key": "k"}),
        ):
            with pytest.raises(AmendmentError, match=r"Amazon MQ .* cancel with Celery's revoke"):
                refused()
    assert vhost.queues() == []
    assert [exchange["name"] for exchange in vhost.exchanges()] == ["celery.pidbox"]  # Celery's
    said = sorted(text for text in caplog.messages if AMAZON in text)
    assert [text.partition(" is ")[0] for text in said] == ["a revoke", "the journal"]


def test_delays_work_on_amazon_mq_and_no_command_makes_a_stream(amazon, vhost, connect, run):
    connection = connect(url=amazon, binary_delay={"journal": "stream"})
    mail = Queue("mail", queue_arguments={"x-queue-type": "quorum"})(connection.channel())
    mail.declare()
    connection.Producer().publish("x", routing_key="mail", headers={"x-delay": 200})

    made = run("--journal", "stream", "create", url=amazon)
    checked = run("check", "--delay", "200ms", "--late", "60", url=amazon)
    listed = run("tasks", "--source", "journal", url=amazon)

    assert (made.exit_code, checked.exit_code) == (0, 0), made.output + checked.output
    assert "cancel with Celery's revoke" in " ".join(checked.output.split())
    assert "Amazon MQ" in listed.output
    end = time.monotonic() + 60
    while (message := mail.get()) is None and time.monotonic() < end:
        time.sleep(0.05)
    assert message.payload == "x"
    assert {queue["type"] for queue in vhost.queues()} == {"quorum"}


def test_amazon_mq_behind_another_name_is_told_by_its_operator_policy(vhost, differences):
    policy = {"pattern": ".*", "apply-to": "queues", "definition": {"max-length": 10**9}}
    vhost.broker.api("PUT", f"operator-policies/{vhost.name}/{AMAZON_POLICY}", policy)
    [named] = [row for row in differences() if "amendments to False" in row[2]]
    assert named[:2] == ("error", f"operator-policy {AMAZON_POLICY}")
    assert not [row for row in differences("--no-amendments") if "amendments" in row[2]]


@pytest.mark.parametrize("kind", ["classic", "quorum", "stream"])
def test_the_default_queue_type_changes_no_queue_of_ours(vhost, connect, collect, run, kind):
    vhost.broker.api("PUT", f"vhosts/{vhost.name}", {"default_queue_type": kind})
    connection = connect(binary_delay={"journal": "stream"})
    mail = Queue("mail", queue_arguments={"x-queue-type": "quorum"})
    collect(connection, [mail], 0, more=0)
    connection.Producer().publish("x", routing_key="mail", headers={"x-delay": 200})
    cancel("another", connection=connection)

    assert [arrival.body for arrival in collect(connection, [mail], 1)] == ["x"]
    verified = run("--journal", "stream", "verify")
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize(
    "policy",
    [
        ("operator-policies", {"message-ttl": 60_000}, "error"),
        ("operator-policies", {"expires": 60_000_000}, "error"),
        ("operator-policies", {"max-length": 1_000_000}, "error"),
        ("policies", {"message-ttl": 50}, "error"),
        ("policies", {"delivery-limit": 50}, None),
    ],
    ids=str,
)
def test_a_policy_on_all_queues_is_judged_by_what_it_does(vhost, run, differences, policy):
    kind, definition, severity = policy
    body = {"pattern": ".*", "apply-to": "queues", "definition": definition}
    vhost.broker.api("PUT", f"{kind}/{vhost.name}/all", body)
    assert run("create").exit_code == 0
    word = kind.replace("ies", "y")
    named = {row[0] for row in differences() if row[1] == f"{word} all"}
    assert named == ({severity} if severity else set())
    if definition == {"message-ttl": 50}:
        checked = run("check", "--delay", "1s", "--late", "60")
        assert (checked.exit_code, "too early" in checked.output) == (1, True), checked.output


def test_limits_without_room_are_named_with_the_radix_that_fits(vhost, user, differences):
    def about(limit, *, radix, user="guest"):
        ladder = ("--radix", radix) if radix else ()
        return [row for row in differences(ladder=ladder, user=user) if limit in row[1]]

    vhost.broker.api("PUT", f"vhost-limits/{vhost.name}/max-queues", {"value": 33})
    [of_queues] = about("max-queues", radix=None)
    assert of_queues[0] == "warning"
    assert "set radix to 2, for a ladder of 32 queues" in of_queues[2]
    assert not about("max-queues", radix="2")
    vhost.broker.api("PUT", f"vhost-limits/{vhost.name}/max-queues", {"value": 20})
    [of_queues] = about("max-queues", radix="2")
    assert "radix" not in of_queues[2]

    name = urlsplit(user()).username
    vhost.broker.api("PUT", f"user-limits/{name}/max-channels", {"value": 2})
    [of_channels] = about("max-channels", radix="2", user=name)
    assert of_channels[0] == "warning"


def test_a_check_at_the_limit_of_queues_says_which_radix_has_fewer(vhost, connect, run):
    vhost.broker.api("PUT", f"vhost-limits/{vhost.name}/max-queues", {"value": 33})
    channel = connect("amqp").channel()
    for number in range(20):
        Queue(f"other{number}")(channel).declare()
    done = run("check", "--delay", "1s", ladder=())
    assert done.exit_code == 1
    assert "set radix to 2, for a ladder of 32 queues" in " ".join(done.output.split())
