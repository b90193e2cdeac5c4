"""What goes wrong is said once, in a sentence: what was tried, and what to change."""

from __future__ import annotations

import json
import sys
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from kombu_binary_delay.cli import binary_delay


@pytest.fixture
def user(broker, vhost):
    """A user without tags who may write only; the caller names what it may do besides."""
    name = f"{vhost.name}-user"
    made = []

    def user(tags="", *, permissions=True):
        broker.api("PUT", f"users/{name}", {"password": "p", "tags": tags})
        made.append(name)
        if permissions:
            rights = {"configure": "^$", "write": ".*", "read": "^$"}
            broker.api("PUT", f"permissions/{vhost.name}/{name}", rights)
        return name

    yield user
    for name in set(made):
        broker.api("DELETE", f"users/{name}")


def fail(*arguments, code, env=None):
    """Run the command, which fails without a traceback; return what it printed."""
    done = CliRunner().invoke(binary_delay, arguments, env=env)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == code, done.output
    return done.output


def in_words(*arguments, **options):
    return " ".join(fail(*arguments, **options).split())


def as_json(*arguments, **options):
    return json.loads(fail(*arguments, "--json", **options).splitlines()[-1])["error"]


def run(*arguments, **options):
    """Run the command in words and as JSON, which have the same error; return the words."""
    said = in_words(*arguments, **options)
    assert as_json(*arguments, **options) in said
    return said


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("amqp://u:hush@127.0.0.1:1/v", "no RabbitMQ answers at 127.0.0.1:1 (virtual host v, user"),
        ("amqp://127.0.0.1:1;amqp://127.0.0.1:2", "at 127.0.0.1:1, 127.0.0.1:2 (virtual host /,"),
        ("amqp://guest:hush@{host}/{vhost}", "at {host} refuses the user 'guest' or its password"),
        ("amqp://{me}@{host}/none", "has no virtual host 'none'; make it with 'rabbitmqctl add_v"),
        ("amqp://{api}/", "what listens at {api} (virtual host /, user guest) closed"),
        ("amqps://{host}/", "no TLS with RabbitMQ at {host}"),
    ],
    ids=["dead", "dead list", "password", "vhost", "no AMQP", "no TLS"],
)
def test_a_broker_that_does_not_let_us_in_is_named_with_what_to_change(broker, vhost, url, words):
    place = urlsplit(vhost.url)
    credentials, _, host = place.netloc.rpartition("@")
    api = urlsplit(broker.management_url).netloc.rpartition("@")[2]
    names = {"host": host, "vhost": vhost.name, "me": credentials, "api": api}
    url, words = url.format(**names), words.format(**names)

    # The first connects by Kombu's transport and the second by ours, each of which takes long.
    for said in (in_words("status", "-b", url, code=4), as_json("check", "-b", url, code=4)):
        assert words in said
        assert "hush" not in said
        assert said.endswith(("change --broker", "; start it, or correct --broker"))


def test_each_command_names_the_broker_that_does_not_answer_and_what_named_it():
    url, words = "amqp://u:hush@127.0.0.1:1/v", "no RabbitMQ answers at 127.0.0.1:1 (virtual host v"

    by_option = [run(command, "-b", url, code=4) for command in ("status", "check")]
    by_variable = run("verify", "--fix", code=4, env={"BINARY_DELAY_BROKER": url})

    for said in (*by_option, by_variable):
        assert words in said
        assert "hush" not in said
    assert all(said.endswith("start it, or correct --broker") for said in by_option)
    assert by_variable.endswith("start it, or correct BINARY_DELAY_BROKER")


def test_transfer_names_the_broker_that_does_not_answer(broker, vhost, topology):
    ladder = ["--tick", "1000", "--radix", "2", "--levels", "2", "--no-amendments"]
    place = ["-b", vhost.url, "-m", broker.management_url]
    place += [*ladder, "--queue-type", topology.queue_type]
    assert CliRunner().invoke(binary_delay, ["create", *place]).exit_code == 0

    said = run("transfer", *place, "--to-broker", "amqp://u:hush@127.0.0.1:1/x", code=4)

    assert "at 127.0.0.1:1 (virtual host x, user u): Connection refused" in said
    assert said.endswith("; start it, or correct --to-broker")


@pytest.mark.parametrize(
    ("management", "words"),
    [
        ("http://127.0.0.1:1", "at http://127.0.0.1:1 does not answer: Connection refused; enable"),
        ("foo", "'foo' is not the URL of a management API"),
        ("{amqp}", "does not answer"),
        ("{url}/no/such", "/no/such shows the user"),
        ("{wrong}", "refuses the user 'guest' or its password"),
    ],
    ids=["dead", "no URL", "AMQP", "path", "password"],
)
def test_a_management_api_that_is_not_there_is_named_with_the_option(
    broker, vhost, management, words
):
    url = broker.management_url
    names = {
        "amqp": f"http://{urlsplit(vhost.url).netloc.rpartition('@')[2]}",
        "url": url,
        "wrong": url.replace("://", "://guest:hush@"),
    }

    said = run("status", "-b", vhost.url, "-m", management.format(**names), code=4)

    assert words in said
    assert "--management" in said
    assert "hush" not in said


@pytest.mark.parametrize(
    ("verb", "tags", "permissions", "code", "words"),
    [
        ("status", "", True, 4, "'rabbitmqctl set_user_tags {name} monitoring'"),
        ("status", "monitoring", False, 4, "'rabbitmqctl set_permissions -p {vhost} {name} "),
        ("create", "monitoring", True, 2, "grant this user the permissions configure"),
        (
            "verify --fix --declare never",
            "monitoring",
            True,
            2,
            "grant this user the permissions configure",
        ),
    ],
)
def test_a_user_who_may_not_is_named_with_what_lets_it(  # noqa: PLR0913, PLR0917
    broker, vhost, user, verb, tags, permissions, code, words
):
    name = user(tags, permissions=permissions)
    host = urlsplit(vhost.url).netloc.rpartition("@")[2]
    url = f"amqp://{name}:p@{host}/{vhost.name}"

    said = run(*verb.split(), "-b", url, "-m", broker.management_url, code=code)

    assert words.format(name=name, vhost=vhost.name) in said


@pytest.mark.parametrize(
    ("limits", "kind", "verb", "code", "remedy"),
    [
        ("vhost-limits/{vhost}", "connections", "status", 4, "set_vhost_limits -p {vhost}"),
        ("user-limits/{name}", "connections", "status", 4, "set_user_limits {name}"),
        ("vhost-limits/{vhost}", "queues", "check", 1, "set_vhost_limits -p {vhost}"),
    ],
    ids=["connections", "connections of the user", "queues"],
)
def test_a_limit_that_is_reached_is_named_with_what_raises_it(  # noqa: PLR0913, PLR0917
    broker, vhost, user, limits, kind, verb, code, remedy
):
    names = {"name": user(), "vhost": vhost.name}
    rights = {"configure": ".*", "write": ".*", "read": ".*"}
    broker.api("PUT", "permissions/{vhost}/{name}".format(**names), rights)
    broker.api("PUT", f"{limits.format(**names)}/max-{kind}", {"value": 0})
    host = urlsplit(vhost.url).netloc.rpartition("@")[2]

    said = in_words(
        verb, "-b", "amqp://{name}:p@{host}/{vhost}".format(**names, host=host), code=code
    )

    assert f"{kind[:-1]} limit" in said
    assert f"raise this limit with: rabbitmqctl {remedy.format(**names)}" in said
    assert f'"max-{kind}": NUMBER' in said
    assert "permissions" not in said


APP = "from celery import Celery\napp = Celery(set_as_current=False, "


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "there is no module 'kbd_test_app' in this folder or on PYTHONPATH"),
        ("raise RuntimeError('boom')", "RuntimeError: boom, at "),
        ("def", "SyntaxError: "),
        ("import kbd_no_such_module", "No module named 'kbd_no_such_module'"),
        ("x = 1", "the module kbd_test_app has no Celery app"),
        (
            APP + "broker_transport_options={'binary_delay': {'tik': 4}})",
            "unknown setting 'tik'; did you mean 'tick'?",
        ),
        (
            APP + "broker='amqp://u:hush@127.0.0.1:1/v')",
            "user u): Connection refused; start it, or correct the Celery app's broker_url",
        ),
    ],
)
def test_an_app_that_does_not_do_is_named_with_the_reason(tmp_path, monkeypatch, source, words):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kbd_test_app", raising=False)
    if source is not None:
        (tmp_path / "kbd_test_app.py").write_text(source)

    said = run("status", "-A", "kbd_test_app", code=4 if "refused" in words else 2)

    assert words in said
    assert "hush" not in said
