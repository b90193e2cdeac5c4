"""`check` on a real broker: what it finds, what it says to do, and what it leaves behind."""

from __future__ import annotations

import json
import sys
import uuid

import amqp
import pytest
from click.testing import CliRunner

from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.operate.check import judge

OURS = "kombu_binary_delay:Transport"
KINDS = "configure", "write", "read"


@pytest.fixture(scope="module")
def radix():
    """Without options, the command checks the default ladder."""


@pytest.fixture
def check(vhost):
    def check(*arguments, url=None, options=()):
        command = ["-b", url or vhost.url, *options, "check", "--late", "60", *arguments]
        return CliRunner().invoke(binary_delay, command)

    return check


@pytest.fixture
def app(tmp_path, monkeypatch):
    """Write a module with a Celery app of these settings, and return the option that names it."""
    written = []

    def app(**settings):
        name = f"shop_{uuid.uuid4().hex[:8]}"
        code = f"from celery import Celery\napp = Celery('shop')\napp.conf.update({settings!r})\n"
        (tmp_path / f"{name}.py").write_text(code)
        written.append(name)
        return ["-A", name]

    monkeypatch.syspath_prepend(tmp_path)
    yield app
    for name in written:
        sys.modules.pop(name, None)


def test_a_ladder_that_works_passes_and_only_the_ladder_stays(check, app, vhost, topology):
    arguments = app(broker_transport=OURS)

    first = check(options=arguments)
    again = check("--json", options=(*arguments, "--journal", "stream", "--queue-per-delay"))

    assert (first.exit_code, again.exit_code) == (0, 0), first.output + again.output
    assert "declared 27 of the 27" in " ".join(first.output.split())
    assert f"1 s in {topology.prefix}.level-01.0001" in " ".join(first.output.split())
    said = {finding["what"]: finding["said"] for finding in json.loads(again.output)["findings"]}
    assert said["topology"] == "all 27 parts that this delay needs existed already"
    assert said["transport"] == "the app uses kombu_binary_delay.transport:Transport"
    assert said["confirms"].startswith("publisher confirms are off")
    part = topology.base + topology.levels[0] + topology.levels[1]
    assert {queue["name"] for queue in vhost.queues()} == {queue.name for queue in part.queues}
    assert {exchange["name"] for exchange in vhost.exchanges()} == {
        exchange.name for exchange in part.exchanges
    }
    assert not any("check" in binding["destination"] for binding in vhost.bindings())


def test_users_who_may_do_no_more_than_delay_may_check(check, user, vhost):
    checked = check(url=user(**dict.fromkeys(KINDS, r"^kbd\.")))

    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, 'app.conf.broker_transport = "kombu_binary_delay:Transport"'),
        ({"broker_transport": "no.such:Transport"}, 'app.conf.broker_transport = "kombu_binary'),
        ({"broker_transport": OURS, "task_always_eager": True}, "turn task_always_eager off"),
    ],
)
def test_an_app_that_does_not_delay_by_us_is_told_what_to_add(check, app, vhost, settings, remedy):
    checked = check(options=app(**settings))

    assert checked.exit_code == 1, checked.output
    assert remedy in " ".join(checked.output.split())
    assert not vhost.queues()


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("^mail$", "may not have a queue"), (r"^kbd\.check", "may not declare|refused to declare")],
)
def test_a_user_without_permissions_is_told_which(check, user, vhost, pattern, said):
    checked = check(url=user(**dict.fromkeys(KINDS, pattern)))

    words = " ".join(checked.output.split())
    assert checked.exit_code == 1, words
    assert any(text in words for text in said.split("|"))
    assert "grant" in words
    assert "'kbd.'" in words
    assert not vhost.queues()


def test_a_message_that_comes_too_early_is_an_error(check, vhost, topology):
    policy = {"pattern": r"\.level-", "definition": {"message-ttl": 100}, "apply-to": "queues"}
    vhost.broker.api("PUT", f"policies/{vhost.name}/short", policy)

    # However slow the broker is.
    checked = check("--delay", "1h")

    assert checked.exit_code == 1, checked.output
    assert "too early" in checked.output
    assert "message-ttl" in checked.output


def test_no_delay_checks_nothing(check, vhost):
    done = check("--delay", "0s")
    assert (done.exit_code, "what is due at once waits nowhere" in done.output) == (2, True)
    assert not vhost.queues()


def test_where_nothing_may_be_declared_the_ladder_must_exist(check, vhost):
    checked = check(options=("--declare", "never"))

    words = " ".join(checked.output.split())
    assert checked.exit_code == 1, words
    assert "kombu-binary-delay create" in words
    assert not vhost.queues()


def test_parts_of_the_ladder_that_nobody_may_declare_are_missed(check, vhost, topology):
    assert check().exit_code == 0
    with vhost.connect() as connection:
        channel = amqp.Channel(connection)
        channel.open()
        channel.exchange_delete(topology.level_name(1))

    checked = check(options=("--declare", "never"))

    assert checked.exit_code == 1, checked.output
    assert "1 of the 27 parts" in " ".join(checked.output.split())


def test_of_several_lanes_only_the_one_that_the_message_takes_is_made(check, topology):
    checked = check("--json", options=("--lanes", "3"))

    said = {finding["what"]: finding["said"] for finding in json.loads(checked.output)["findings"]}
    assert checked.exit_code == 0, checked.output
    assert "declared 27 of the 27" in said["topology"]
    assert "-lane" in said["way"]


def test_a_message_that_does_not_come_is_an_error(check, vhost, topology, monkeypatch):
    # given a ladder whose queue for a second holds its messages for a day
    assert check().exit_code == 0
    held = f"{topology.prefix}.level-01.0001"
    arguments = {
        "x-queue-type": topology.queue_type,
        "x-message-ttl": 86_400_000,
        "x-dead-letter-exchange": topology.level_name(0),
    }
    with vhost.connect() as connection:
        channel = amqp.Channel(connection)
        channel.open()
        channel.queue_delete(held)
        channel.queue_declare(held, durable=True, auto_delete=False, arguments=arguments)
        channel.queue_bind(held, held, "")
    monkeypatch.setattr(sys.modules["kombu_binary_delay.operate.check"], "_PATIENCE", 1.0)
    # when
    checked = check("--late", "0", options=("--declare", "never"))
    # then
    words = " ".join(checked.output.split())
    assert checked.exit_code == 1, words
    assert "the message has not come" in words
    assert topology.parking in words
    assert not [queue for queue in vhost.queues() if "check" in queue["name"]]


@pytest.mark.parametrize(
    ("seen", "state", "said"),
    [
        (0.9, "error", "too early"),
        (1.0, "ok", "came after 1.000 s"),
        (6.0, "ok", "came after 6.000 s"),
        (6.2, "error", "5.200 s late"),
    ],
)
def test_a_delay_is_judged_by_the_one_that_was_asked_for(seen, state, said):
    finding = judge(1.0, 1.0, seen, 5.0)

    assert finding.state == state
    assert said in finding.said
    assert bool(finding.remedy) == (state != "ok")
