"""``cancel`` and ``reschedule`` on a real broker: what they record, refuse and print."""

from __future__ import annotations

import json
import re
import time
from functools import partial

import amqp
import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner
from kombu import Queue

from kombu_binary_delay import AmendmentError, operate
from kombu_binary_delay.amendments import channel, stream
from kombu_binary_delay.amendments.record import MAX_TIME, Cancel
from kombu_binary_delay.cli import binary_delay, command
from kombu_binary_delay.operate import mover
from tests.waits import attempts, wait_until

#: An id as Celery makes it.
CELERYS = "2f1c3a52-5b0d-4a37-b2a5-3f6c44a7f0a1"
HOUR = 3_600_000  # in milliseconds, of which no test sees the end


@pytest.fixture
def run(vhost):
    """Run the command on the test's own virtual host."""

    def run(*arguments, asks=False, **more):
        place = ["-b", vhost.url, "-m", vhost.broker.management_url]
        if "--foreign-ladder" not in arguments:
            place += ["--radix", "2"]
        words = list(arguments)
        for command_ in ("cancel", "reschedule"):
            if command_ in words and not asks:
                words.insert(words.index(command_) + 1, "--yes")
        return CliRunner().invoke(binary_delay, [*place, *words], **more)

    return run


@pytest.fixture
def publish(connect, vhost):
    """Publish messages that wait two seconds, each with an id, and return when all are journalled.

    The journal is written without confirms.
    """
    connection = connect(confirm_publish=True, binary_delay={"journal": "stream"})
    Queue("mail")(connection.default_channel).declare()
    published: list[str] = []

    def publish(*ids, name="app.mail", delay=2000):
        published.extend(ids)
        for id_ in ids:
            connection.Producer().publish(
                id_,
                routing_key="mail",
                headers={"x-delay": delay, "task": name, "id": id_},
            )
        journal = "kbd.v2.journal"
        wait_until(lambda: vhost.waiting(journal).get(journal, 0) >= len(published))

    return publish


def arrived(collect, connect, count):
    bare = Queue("mail", no_declare=True)
    return [arrival.body for arrival in collect(connect(), [bare], count, more=1.5)]


def test_what_is_cancelled_by_id_a_file_or_standard_input_does_not_arrive(
    run, publish, connect, collect, tmp_path
):
    dashed = "--name=*"
    publish("argument", "file", "input", dashed, "kept")
    file = tmp_path / "ids.txt"
    file.write_text("file\n\n  file\n")

    planned = run("cancel", "kept", "--dry-run", "--json")
    words = ["argument", "-", "--file", str(file), "--", dashed]
    done = run("cancel", *words, input="input\n")

    assert json.loads(planned.output)["dry_run"] is True
    assert done.exit_code == 0, done.output
    assert "cancel 4 tasks" in done.output
    assert "cancellation recorded for 4 ids, kept until " in done.output
    assert "UTC (not checked whether they wait)" in done.output
    assert arrived(collect, connect, 1) == ["kept"]


@pytest.mark.parametrize("by_input", [False, True])
def test_a_byte_order_mark_is_no_part_of_an_id(run, tmp_path, by_input):
    file = tmp_path / "ids.txt"
    file.write_text("\ufeffone\ntwo\n", encoding="utf-8")

    given = ["-"] if by_input else ["--file", str(file)]
    done = run("cancel", *given, "--json", input=file.read_bytes())

    assert json.loads(done.stdout)["ids"] == ["one", "two"]


def test_what_is_rescheduled_arrives_at_the_later_time_and_once(run, publish, connect, collect):
    begin = time.time()
    publish("early", "late")

    done = run("reschedule", "late", "--countdown", "5", "--json")
    end = time.time()

    assert done.exit_code == 0, done.output
    assert (begin + 5) * 1000 - 1 <= json.loads(done.stdout)["due"] <= (end + 5) * 1000
    arrivals = collect(connect(), [Queue("mail", no_declare=True)], 2, more=1)
    at = {arrival.body: arrival.at for arrival in arrivals}
    assert set(at) == {"early", "late"}
    assert len(arrivals) == 2
    assert at["late"] - begin >= 5


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["reschedule", "--eta", "90d"], "a rescheduling"),
        # The record of a cancellation cannot wait on such a ladder either.
        (["--foreign-ladder", "nservicebus", "cancel"], "a cancellation"),
    ],
)
def test_what_would_be_forgotten_before_it_is_due_is_not_amended(run, publish, vhost, words, what):
    publish("soon", delay=HOUR)
    publish("far", delay=40 * 24 * HOUR)
    select = *words, "--source", "journal", "--json"

    for more in ((), ("--dry-run",)):
        refused = run(*select, "--name", "app.*", *more)
        assert refused.exit_code == 2
        assert re.search(
            rf"{what} for a due time in 34559\d\d s would expire before, "
            r"since records are kept for 2678400 s; "
            r"choose only tasks that are due within that time",
            json.loads(refused.stdout)["error"],
        )
    assert not any(queue["name"] == "kbd.v2.amendments.ids" for queue in vhost.queues())

    done = json.loads(run(*select, "--due-before", "31d").stdout)
    assert done["ids"] == ["soon"]
    until = time.time() + 31 * 86400
    assert done["until"] == pytest.approx(until * 1000, abs=60_000)


def test_a_pattern_cancels_what_the_journal_finds_and_no_more(run, publish, connect, collect):
    publish("one", "two", delay=HOUR)
    publish("other", name="app.report", delay=HOUR)
    select = "cancel", "--name", "app.m*", "--queue", "mail", "--source", "journal"

    planned = run(*select, "--dry-run", "--json")
    done = run(*select, "--json")

    assert json.loads(planned.stdout)["ids"] == ["one", "two"]
    assert (done.exit_code, json.loads(done.stdout)["complete"]) == (0, True), done.output
    assert json.loads(done.stdout)["source"] == "journal"
    # Others of their ids, which are due in this hour.
    publish("one", "two", "other")
    assert arrived(collect, connect, 1) == ["other"]


def test_what_a_pattern_finds_is_cancelled_in_time_for_the_first_and_for_the_last_of_it(
    run, publish, connect, collect, topology
):
    publish("soon", delay=HOUR)
    publish("far", delay=40 * 24 * HOUR)

    done = run("cancel", "--name", "app.*", "--source", "journal", "--json")

    assert json.loads(done.stdout)["ids"] == ["soon", "far"]
    # Another one of its id, which is due in this hour.
    publish("soon", "kept")
    assert arrived(collect, connect, 1) == ["kept"]
    status = json.loads(run("status", "--json").stdout)
    assert status["amendments"]["active"] == 2

    def waiting():
        [ladder] = json.loads(run("status", "--json").stdout)["ladders"]
        return sum(queue["messages"] for queue in ladder["queues"])

    # What has just left a queue is counted until the broker's next statistics.
    said = "both tasks, and the record that cancels what is due in forty days"
    wait_until(lambda: waiting() == 3, said)
    verified = run("verify")
    assert verified.exit_code == 0, verified.output
    # The way of that record is mended as well.
    connect("amqp").default_channel.queue_delete("kbd.v2.amendments.later")
    assert "the ladder does not lead to it" in run("verify").output
    mended = run("create")
    verified = run("verify")
    assert (mended.exit_code, verified.exit_code) == (0, 0), mended.output + verified.output


@pytest.mark.parametrize(
    ("words", "far_stays"),
    [
        (["cancel", "--queue", "mail"], True),
        (["cancel", "--name", "app.*"], True),
        (["reschedule", "--queue", "mail", "--due-before", "31d", "--countdown", "7200"], False),
    ],
    ids=str,
)
def test_what_cannot_be_amended_is_named_and_stays_and_the_others_are_amended(  # noqa: PLR0913, PLR0917
    run, publish, connect, collect, words, far_stays
):
    long, half, far = "x" * 300, "half \ud800", "in the year 5000"
    publish("one", long, delay=HOUR)
    now = time.time_ns() // 1000
    forged = {"event": "scheduled", "at": now, "key": "mail", "task": "app.mail"}
    channel = connect("amqp").default_channel
    for id_, due in ((half, now + HOUR * 1000), (far, 95_617_584_000_000_000)):
        line = json.dumps({**forged, "id": id_, "due": due})
        channel.basic_publish(amqp.Message(line), "", "kbd.v2.journal")
    select = *words, "--source", "journal"

    wait_until(lambda: run("tasks", "--json", "--id", far).stdout.count(far))
    planned = json.loads(run(*select, "--dry-run", "--json").stdout)
    shown = " ".join(run(*select, "--dry-run").output.split())
    done = run(*select, "--json")

    left = {long: "at most 255 bytes, got 300", half: "UTF-8"}
    left |= {far: "the longest delay of the ladder"} if far_stays else {}
    for report in (planned, json.loads(done.stdout)):
        assert (report["ids"], report["left"].keys()) == (["one"], left.keys())
        assert all(why in report["left"][id_] for id_, why in left.items())
    assert (done.exit_code, "one" in done.stderr, "xxx" in done.stderr) == (1, True, False)
    assert f"{len(left)} cannot be amended, and wait on" in shown
    assert "got 300: 'xxx" in shown
    # Another one of its id, which is due in this hour.
    publish("one", long)
    assert arrived(collect, connect, 1) == [long]


#: What cannot be amended, and what is said of it.
REFUSED = [
    (["cancel"], "say what to cancel"),
    (["reschedule", "--countdown", "9"], "say what to reschedule"),
    (["cancel", ""], "must be a non-empty string"),
    (["cancel", "x" * 256], "at most 255 bytes"),
    (["cancel", "a", "--name", "b"], "not both"),
    (["cancel", "a", "--eta", "2001-01-31T12:00"], "has passed"),
    (["cancel", "a", "--eta", "9999d"], "the longest delay of the ladder"),
    *(
        (["reschedule", "a", option, time], f"'{time}' is not a time up to the year 9999")
        for option, time in (
            ("--eta", "3000000d"),
            ("--eta", "9" * 400 + "d"),
            ("--eta", "9999-12-31T23:59-12:00"),
            ("--countdown", "1e12"),
            ("--countdown", "inf"),
            ("--countdown", "nan"),
        )
    ),
    (["cancel", "--name", "a", "--eta", "40d"], "goes with ids"),
    (["cancel", "--name", "a", "--source", "journal"], "there is no journal"),
    (["reschedule", "a"], "--eta or --countdown"),
    (["reschedule", "a", "--eta", "1h", "--countdown", "3"], "--eta or --countdown"),
    (["--no-amendments", "cancel", "a"], "the setting amendments is False"),
    (["--declare", "never", "cancel", "a"], "kombu-binary-delay create"),
]


def test_what_cannot_be_amended_is_refused_with_the_reason_and_nothing_is_made(run, vhost):
    for arguments, said in REFUSED:
        for json_or_not in ([], ["--json"]):
            done = run(*arguments, *json_or_not)
            assert (done.exit_code, said in done.output) == (2, True), done.output
    assert not vhost.queues()


@pytest.mark.parametrize(
    ("action", "due", "new"),
    [("cancel", MAX_TIME + 1, None), ("reschedule", None, MAX_TIME + 1)],
)
def test_a_time_after_the_year_9999_is_refused_by_a_dry_run_too(connect, vhost, action, due, new):
    for dry_run in (True, False):
        with pytest.raises(AmendmentError, match=r"253402300800000 ms .* after the year 9999"):
            operate.amend(connect(), action, operate.Chosen({"a": due}), new, dry_run=dry_run)
    assert not vhost.queues()


@pytest.mark.parametrize(("action", "new"), [("cancel", None), ("reschedule", MAX_TIME)])
def test_what_waits_until_after_the_year_9999_is_named_and_stays(connect, vhost, action, new):
    chosen = operate.Chosen({"a": MAX_TIME + 1}, by_search=True)
    done = operate.amend(connect(), action, chosen, new)
    assert (done.ids, "253402300800000 ms" in done.left["a"]) == ((), True)
    assert not vhost.queues()


def test_without_a_terminal_it_needs_consent_for_what_was_not_named_by_its_id(run, publish):
    publish("known", delay=HOUR)

    pattern = run("cancel", "app.*", asks=True)
    unknown = run("cancel", "nonsense", asks=True)
    by_name = run("cancel", "--name", "app.*", "--source", "journal", asks=True)
    by_id = [run("cancel", id_, asks=True) for id_ in (CELERYS, "known")]

    refused = [done.exit_code for done in (pattern, unknown, by_name)]
    assert (refused, [done.exit_code for done in by_id]) == ([2] * 3, [0] * 2), by_id[1].output
    assert "give --name 'app.*' for all tasks" in pattern.output
    assert "no task that waits has the id 'nonsense', says the journal" in unknown.output
    assert "give --yes" in by_name.output


def test_on_a_terminal_it_asks_for_a_file_and_not_for_ids_that_were_typed(
    run, vhost, monkeypatch, tmp_path
):
    monkeypatch.setattr(command, "_is_terminal", lambda: True)
    file = tmp_path / "ids.txt"
    file.write_text("one\x1b[2J\ntwo\nthree\nfour\n")

    refused = run("cancel", "--file", str(file), asks=True, input="n\n")
    nothing = vhost.queues()
    agreed = run("cancel", "--file", str(file), asks=True, input="y\n")
    unasked = [run("cancel", CELERYS, asks=True), run("cancel", "--file", str(file))]

    assert (refused.exit_code, nothing) == (2, [])
    assert "cancel 4 tasks: one\\x1b[2J, two, three, …" in refused.output
    assert "nothing was changed" in refused.output
    assert (agreed.exit_code, "Go on?" in agreed.output) == (0, True)
    assert [(result.exit_code, "Go on?" in result.output) for result in unasked] == [(0, False)] * 2


def test_it_is_a_subcommand_of_celerys_command_as_well(vhost, monkeypatch):
    app = Celery("shop", broker=vhost.url, set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    app.conf.worker_hijack_root_logger = False
    monkeypatch.setattr("celery.bin.celery.find_app", lambda *_, **__: app)
    monkeypatch.setitem(celery_command.commands, "binary-delay", binary_delay)

    done = CliRunner().invoke(
        celery_command, ["-A", "shop", "binary-delay", "cancel", CELERYS, "--json"]
    )

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ids"] == [CELERYS]


# -- the streams, as the other subcommands see them ----------------------------------------------

AMENDMENTS = {"kbd.v2.amendments.ids", "kbd.v2.amendments.keys"}
SMALL = ("--tick", "1000", "--radix", "2", "--levels", "4")


@pytest.fixture
def ladder(topology):
    return *SMALL, "--queue-type", topology.queue_type


def test_create_makes_the_streams_and_the_last_teardown_removes_them(run, ladder, vhost):
    other = *ladder, "--levels", "3"
    made = [run(*options, "create") for options in (ladder, other)]
    sound = run(*ladder, "--declare", "never", "verify")
    cancelled = run(*ladder, "--declare", "never", "cancel", "one", "two")
    first = run(*ladder, "teardown", "--yes")
    kept = {row["name"] for row in vhost.queues()} & AMENDMENTS
    last = run(*other, "teardown", "--yes", "--json")

    assert [result.exit_code for result in (*made, sound, cancelled, first, last)] == [0] * 6
    assert kept == AMENDMENTS
    forgotten = "what was cancelled or rescheduled is forgotten"
    assert [forgotten in " ".join(result.output.split()) for result in (first, last)] == [
        False,
        True,
    ]
    assert json.loads(last.stdout)["lost"] == 0, "a record is no message that waits"
    assert set(json.loads(last.stdout)["queues"]) >= AMENDMENTS
    assert not vhost.queues()


def test_status_counts_what_is_amended(run, ladder, vhost):
    run(*ladder, "create")
    before = run(*ladder, "status", "--json")
    run("cancel", "one", "two")
    run("reschedule", "three", "--countdown", "60")
    queues = {row["name"] for row in vhost.queues()}
    counted = run(*ladder, "status", "--json")
    shown = run(*ladder, "status")
    off = run(*ladder, "--no-amendments", "status", "--json")

    assert json.loads(before.stdout)["amendments"]["active"] == 0
    assert json.loads(counted.stdout)["amendments"]["active"] == 3
    assert "amendments 3" in shown.output
    assert json.loads(off.stdout)["amendments"] is None
    assert {row["name"] for row in vhost.queues()} == queues


@pytest.mark.own_broker
def test_status_is_shown_in_an_alarm_too(run, own_broker):
    run("cancel", "one")

    with own_broker.alarm():
        shown = run("status", "--json")

    assert json.loads(shown.stdout)["amendments"] == {"active": 1}


def test_verify_says_what_is_wrong_with_the_streams(run, ladder, vhost, connect):
    def differences(*arguments):
        done = run(*ladder, *arguments, "verify", "--json")
        return {
            (difference["severity"], difference["what"], difference["found"])
            for difference in json.loads(done.stdout)["differences"]
            if "amendments" in difference["what"] or "streams" in difference["what"]
        }

    run(*ladder, "--no-amendments", "create")
    none = ("amendments", "none made yet"), ("amendments", "no exchange and no streams")
    assert differences() == {("note", *none[0])}
    assert differences("--declare", "never") == {("warning", *none[1])}
    assert not differences("--declare", "never", "--no-amendments")

    run(*ladder, "create")
    assert not differences("--declare", "never")
    ids = "queue kbd.v2.amendments.ids"
    other = "x-max-age is '31D', should be '7D'"
    assert differences("--amendments-max-age", "7D") == {("warning", ids, other)}

    policy = {"pattern": "^kbd", "definition": {"message-ttl": 1, "expires": 1, "max-age": "1h"}}
    vhost.broker.api("PUT", f"policies/{vhost.name}/short", policy)
    done = run(*ladder, "--declare", "never", "verify")
    assert "max-age applies to kbd.v2.amendments.ids and 1 more queues" in done.output
    assert "amendments.ids" not in done.output.replace(
        "max-age applies to kbd.v2.amendments.ids", ""
    )

    name = f"user-{vhost.name}"
    vhost.broker.api("PUT", f"users/{name}", {"password": "p", "tags": ""})
    grant = {"configure": ".*", "write": ".*", "read": r"^kbd\.v2[.-](?!amendments)"}
    try:
        vhost.broker.api("PUT", f"permissions/{vhost.name}/{name}", grant)
        done = run(*ladder, "verify", "--user", name)
    finally:
        vhost.broker.api("DELETE", f"users/{name}")
    assert "no read permission on kbd.v2.amendments.ids" in done.output

    channel = connect("amqp").default_channel
    channel.queue_delete("kbd.v2.amendments.keys")
    assert differences() == {("error", "queue kbd.v2.amendments.keys", "missing")}
    channel.exchange_delete("kbd.v2.amendments")
    assert ("error", "exchange kbd.v2.amendments", "missing") in differences()


def test_an_export_has_the_streams_unless_it_is_told_otherwise(run, vhost, ladder):
    run(*ladder, "create")
    for name in ("definitions", "terraform", "kubernetes"):
        assert "kbd.v2.amendments.keys" in run(*ladder, "export", name).output
        assert "amendments" not in run(*ladder, "--no-amendments", "export", name).output
    # As RabbitMQ itself has them.
    exported = run(*ladder, "export", "definitions", "--vhost", vhost.name).output
    vhost.broker.api("POST", "definitions", json.loads(exported))
    assert run(*ladder, "--declare", "never", "verify").exit_code == 0


def test_a_cancellation_that_rides_the_ladder_moves_with_what_it_cancels(  # noqa: PLR0913, PLR0917
    run, publish, connect, collect, monkeypatch, topology
):
    monkeypatch.setattr(stream, "FAR_AHEAD", 1500)
    monkeypatch.setattr(stream, "LEAD", 1000)

    def are_active(count):
        amendments = json.loads(run("status", "--json").stdout)["amendments"]
        return amendments["active"] == count

    # The cancellation leaves the ladder a second before the messages. As many digits on both
    # ladders: the old one must not get back what is moved.
    for number, attempt in enumerate(attempts(44_000, 109_000)):
        seconds = attempt.delay // 1000 + 1
        publish(f"cancelled {number}", f"kept {number}", delay=1000 * seconds)
        now = time.time_ns() // 1_000_000
        due = now + 1000 * seconds
        amendments = connect().connection.delay_mechanism.amendments
        amendments.write_ahead(Cancel((f"cancelled {number}",), now, due), due)
        is_riding = are_active(number)

        moved = run("--tick", "250", "migrate", "--from", topology.prefix, "--json")
        attempt.end()

        # It leaves the ladder a second before the messages: until then, nobody need ask.
        time.sleep(max(0, due / 1000 - 2 - time.time()))
        wait_until(partial(are_active, number + 1))
        bare = Queue("mail", no_declare=True)
        arrivals = collect(connect(), [bare], 1, more=2, timeout=attempt.limit)
        if not attempt.was_in_time:
            assert run("--tick", "250", "teardown", "--yes", "--force").exit_code == 0

    assert is_riding
    assert json.loads(moved.stdout)["moved"] == 3, moved.output
    assert [arrival.body for arrival in arrivals] == [f"kept {number}"]


@pytest.mark.own_broker
def test_a_cancellation_that_a_broker_in_an_alarm_does_not_take_ends_a_migration(
    run, own_broker, topology, monkeypatch
):
    """Given: a cancellation that waits on the ladder."""
    monkeypatch.setattr(stream, "FAR_AHEAD", 1500)
    monkeypatch.setattr(stream, "LEAD", 1000)
    cancelled = run("cancel", "one", "--eta", "1h")
    monkeypatch.setattr(mover, "PATIENCE", 2.0)

    with own_broker.alarm():
        done = run("--tick", "250", "migrate", "--from", topology.prefix)

    assert cancelled.exit_code == 0, cancelled.output
    assert (done.exit_code, "takes no messages within 2 s" in done.output) == (4, True), done.output
    wait_until(lambda: run("--tick", "250", "migrate", "--from", topology.prefix).exit_code == 0)


@pytest.mark.own_broker
def test_a_cancellation_that_a_broker_in_an_alarm_does_not_confirm_ends(
    run, own_broker, monkeypatch
):
    run("cancel", "one")
    monkeypatch.setattr(channel.RecordChannel.wait_for_next, "__defaults__", (2.0,))

    with own_broker.alarm():
        done = run("cancel", "two")

    assert done.exit_code == 4, done.output
    assert "RabbitMQ did not answer within 2 s" in done.output


def test_a_transfer_says_that_amendments_stay(run, publish, broker):
    publish("one", delay=HOUR)
    run("cancel", "one")
    other = broker.vhost()
    try:
        done = run("transfer", "--to-broker", other.url, "--dry-run")
    finally:
        other.delete()

    assert done.exit_code == 0, done.output
    assert "what was cancelled, rescheduled or superseded is not so there" in done.output


def test_prune_and_migrate_leave_the_streams_alone(run, ladder, vhost):
    run(*ladder, "create")
    run("cancel", "one")
    other = *ladder, "--levels", "3"

    pruned = run(*ladder, "prune")
    moved = run(
        *other, "migrate", "--from", "1000ms-2x4" if "quorum" in ladder else "1000ms-2x4-classic"
    )

    assert (pruned.exit_code, moved.exit_code) == (0, 0), pruned.output + moved.output
    assert {row["name"] for row in vhost.queues()} >= AMENDMENTS
    assert json.loads(run(*ladder, "status", "--json").stdout)["amendments"]["active"] == 1


def test_a_move_from_another_namespace_says_that_amendments_stay(run, publish):
    publish("one", delay=HOUR)
    run("cancel", "one")
    ladder = json.loads(run("status", "--json").stdout)["ladders"][0]["name"]

    done = run("--namespace", "shop", "migrate", "--from", ladder, "--dry-run")

    assert done.exit_code == 0, done.output
    assert "superseded is not so in the namespace shop" in done.output
