"""``cancel`` and ``reschedule`` on a real broker: what they record, refuse and print."""

from __future__ import annotations

import json
import time

import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner
from kombu import Queue

from kombu_binary_delay.cli import amend, binary_delay


@pytest.fixture(autouse=True)
def streams(broker):
    """Amendments are in streams."""
    if broker.release < (3, 9):
        pytest.skip("RabbitMQ before 3.9 has no streams")


@pytest.fixture
def run(broker, vhost):
    """Run the command on the test's own virtual host."""

    def run(*arguments, **more):
        place = ["-b", vhost.url, "-m", broker.management_url]
        return CliRunner().invoke(binary_delay, [*place, *arguments], **more)

    return run


@pytest.fixture
def publish(connect):
    """Publish messages that wait two seconds, each with an id."""
    connection = connect(confirm_publish=True, binary_delay={"journal": "stream"})
    Queue("mail")(connection.default_channel).declare()

    def publish(*ids, name="app.mail", delay=2000):
        for each in ids:
            connection.Producer().publish(
                each,
                routing_key="mail",
                headers={"x-delay": delay, "task": name, "id": each},
            )

    return publish


def arrived(collect, connect, count):
    bare = Queue("mail", no_declare=True)
    return [each.body for each in collect(connect(), [bare], count, more=1.5)]


def test_what_is_cancelled_by_id_a_file_or_standard_input_does_not_arrive(
    run, publish, connect, collect, tmp_path
):
    publish("argument", "file", "input", "kept")
    file = tmp_path / "ids.txt"
    file.write_text("file\n\n  file\n")

    planned = run("cancel", "kept", "--dry-run", "--json")
    done = run("cancel", "argument", "-", "--file", str(file), input="input\n")

    assert json.loads(planned.output)["dry_run"] is True
    assert done.exit_code == 0, done.output
    assert "cancel 3 tasks" in done.output
    assert "3 tasks cancelled: recorded" in done.output
    assert arrived(collect, connect, 1) == ["kept"]


def test_what_is_rescheduled_arrives_at_the_later_time_and_once(run, publish, connect, collect):
    begin = time.time()
    publish("early", "late")

    done = run("reschedule", "late", "--countdown", "5", "--json")

    assert done.exit_code == 0, done.output
    assert abs(json.loads(done.stdout)["due"] - (begin + 5) * 1000) < 1000
    arrivals = collect(connect(), [Queue("mail", no_declare=True)], 2, more=1)
    assert [each.body for each in arrivals] == ["early", "late"]
    assert arrivals[1].at - begin >= 5


def test_a_pattern_cancels_what_the_journal_finds_and_no_more(run, publish, connect, collect):
    publish("one", "two", delay=6000)
    publish("other", name="app.report", delay=6000)
    select = "cancel", "--name", "app.m*", "--queue", "mail", "--source", "journal"

    planned = run(*select, "--dry-run", "--json")
    done = run(*select, "--json")

    assert json.loads(planned.stdout)["ids"] == ["one", "two"]
    assert (done.exit_code, json.loads(done.stdout)["complete"]) == (0, True), done.output
    assert json.loads(done.stdout)["source"] == "journal"
    assert arrived(collect, connect, 1) == ["other"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["cancel"], 2, "say what to amend"),
        (["cancel", ""], 2, "must be a string that is not empty"),
        (["cancel", "x" * 256], 2, "at most 255 bytes"),
        (["cancel", "a", "--name", "b"], 2, "not both"),
        (["cancel", "a", "--eta", "2001-01-31T12:00"], 2, "has passed"),
        (["cancel", "a", "--eta", "40d"], 2, "set amendments_max_age to more"),
        (["cancel", "--name", "a", "--eta", "40d"], 2, "goes with ids"),
        (["cancel", "--name", "a", "--source", "journal"], 2, "there is no journal"),
        (["reschedule", "a"], 2, "--eta or --countdown"),
        (["reschedule", "a", "--eta", "1h", "--countdown", "3"], 2, "--eta or --countdown"),
        (["--no-amendments", "cancel", "a"], 2, "the setting amendments is False"),
        (["--declare", "never", "cancel", "a"], 2, "kombu-binary-delay create"),
    ],
)
def test_what_cannot_be_amended_is_refused_with_the_reason_and_nothing_is_made(
    run, vhost, arguments, code, said
):
    for json_or_not in ([], ["--json"]):
        done = run(*arguments, *json_or_not)
        assert (done.exit_code, said in done.output) == (code, True), done.output
    assert not vhost.queues()


def test_on_a_terminal_it_asks_and_a_no_changes_nothing(run, vhost, monkeypatch):
    monkeypatch.setattr(amend, "_is_terminal", lambda: True)

    refused = run("cancel", "one", "two", input="n\n")
    nothing = vhost.queues()
    agreed = run("cancel", "one", "two", input="y\n")
    unasked = run("cancel", "three", "--yes")

    assert (refused.exit_code, nothing) == (2, [])
    assert "cancel 2 tasks" in refused.output
    assert "nothing was changed" in refused.output
    assert "2 tasks cancelled" in agreed.output
    assert (unasked.exit_code, "Go on?" in unasked.output) == (0, False)


def test_it_is_a_subcommand_of_celerys_command_as_well(vhost, monkeypatch):
    app = Celery("shop", broker=vhost.url, set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    app.conf.worker_hijack_root_logger = False
    monkeypatch.setattr("celery.bin.celery.find_app", lambda *_, **__: app)
    monkeypatch.setitem(celery_command.commands, "binary-delay", binary_delay)

    done = CliRunner().invoke(
        celery_command, ["-A", "shop", "binary-delay", "cancel", "one", "--json"]
    )

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ids"] == ["one"]
