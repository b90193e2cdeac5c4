"""What waits is listed, from the journal and from the node, and nothing is disturbed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
import tracemalloc
from base64 import b64encode
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import amqp
import pytest
from click.testing import CliRunner
from kombu import Exchange, Queue

import kombu_binary_delay
from dev.broker import CTL
from dev.cluster import Cluster
from kombu_binary_delay import Ladder, PublishBatch, Topology, operate
from kombu_binary_delay.amendments.record import (
    KEY,
    REPLACES,
    CancelStamped,
    Supersede,
    new_generation,
)
from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.cli.connect import Target
from kombu_binary_delay.cli.sources import TaskSource
from kombu_binary_delay.journal import events as journal_events
from kombu_binary_delay.operate.waiting import script
from kombu_binary_delay.wire.streams import pages
from tests.waits import PATIENCE, attempts, drain_until, wait_until

HOUR = 3600  # in seconds, of which no test sees the end
STREAM = "kbd.v2.journal"
MANY = 4_000
#: Bytes that reading many tasks may hold at a time: a page, and not all of them, which take 6 MB.
FLAT = 4_000_000
#: The ladder that has the fewest queues: what waits is listed in the same way on all.
LADDER = Topology(Ladder.binary())


def reach(node, folder):
    """Write a program that runs rabbitmqctl on the host of a node."""
    argv, env = node._command([CTL, "-n", node.node])  # noqa: SLF001 - as its own `ctl` has it
    script = folder / f"beside-{node.node}"
    # A shell script: with its imports, Python takes nearly as long to start as rabbitmqctl.
    words = ["env", "-i", *(f"{name}={value}" for name, value in env.items()), *argv]
    script.write_text(f"""\
#!/bin/sh -e
[ "$1" = rabbitmqctl ]
shift
exec {shlex.join(words)} "$@"
""")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def beside(vhost, tmp_path):
    return reach(vhost.broker, tmp_path)


@pytest.fixture
def once(beside, tmp_path):
    """Ask the node each question once: rabbitmqctl takes seconds for an answer.

    The questions name the virtual host and the queues. What is selected is not a part of them.
    """
    script = tmp_path / "once"
    script.write_text(f"""\
#!/bin/sh -e
answer={shlex.quote(str(tmp_path))}/answer-$(printf %s "$*" | cksum | tr " " -)
[ -e "$answer" ] || {beside} "$@" > "$answer"
cat "$answer"
""")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def on_node(vhost, beside):
    """List what waits by the node."""

    def on_node(command=beside):
        return operate.from_node(command, vhost.name, LADDER)

    return on_node


@pytest.fixture
def journalling(connect):
    return connect(binary_delay={"journal": "stream"})


@pytest.fixture
def by_journal(connect, vhost, topology):
    """List what waits by the journal, once it has ``events``."""

    def by_journal(events):
        settle(vhost, events)
        return operate.from_journal(connect("amqp"), topology)

    return by_journal


def settle(vhost, events):
    """Wait until the journal has so many events: they are written without confirms."""
    with vhost.connect() as connection:

        def written():
            read = (record for page in pages(connection, STREAM) for record in page)
            return sum(len(journal_events.lines(record.body)) for record in read)

        wait_until(lambda: not events or written() >= events)


def hence(seconds):
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def publish(connection, *tasks, exchange="", key="mail", name="shop.pay", **more):
    """Publish tasks: pairs of an id and the seconds that it is to wait."""
    channel = connection.default_channel
    Queue("mail")(channel).declare()
    with PublishBatch(channel, 1000) as batch:
        for number, (id_, seconds) in enumerate(tasks):
            headers = {
                "id": id_,
                "task": name,
                "eta": hence(seconds),
                "retries": 2,
                "argsrepr": f"({number},)",
                "kwargsrepr": "{'a': 1}",
                **more,
            }
            message = channel.prepare_message(
                b"[[], {}, {}]",
                content_type="application/json",
                content_encoding="utf-8",
                headers=headers,
                properties={"delivery_mode": 2},
            )
            batch.publish(message, exchange, key)


def publish_by_the_hour(connection):
    """Publish tasks of each hour, and another; return a time between the fifth hour and it."""
    publish(connection, *((f"{number}", (1 + number) * HOUR) for number in range(9)))
    publish(connection, ("x", 6 * HOUR), name="other.task")
    return int(time.time() + 5.5 * HOUR) * 1000


def write(vhost, *events):
    """Write to the journal as others might; what is no text is sent as JSON."""
    with vhost.connect() as connection:
        channel = connection.channel()
        for event in events:
            body = event if isinstance(event, (str, bytes)) else json.dumps(event)
            channel.basic_publish(amqp.Message(body), "", STREAM)


def ids(tasks):
    return sorted(str(task.id) for task in tasks)


def selected(table, **select):
    return ids(table.tasks(operate.Selection(**select)))


def soon():
    return time.time_ns() // 1000 + HOUR * 1_000_000


# -- the node ------------------------------------------------------------------------------------


@pytest.mark.own_broker
def test_the_node_lists_what_waits_and_disturbs_nothing(connect, collect, on_node, vhost):
    connection = connect(binary_delay={"radix": None})
    channel = connection.default_channel
    events = Exchange("events", "topic")
    Queue("all", events, "#")(channel).declare()
    begin = time.time() * 1000
    publish(connection, ("later", HOUR))
    end = time.time() * 1000
    publish(connection, ("paid", HOUR), exchange="events", key="order.paid", name="shop.paid")
    plain = {"x-delay": HOUR * 1000}
    connection.Producer().publish("x", routing_key="mail", headers=plain, message_id="m-1")
    connection.Producer().publish("x", routing_key="mail", headers=plain, priority=9)
    publish(connection, ("soon", 10))

    listing = on_node()
    tasks = {task.id: task for task in listing}
    assert listing.complete
    [said] = listing.unseen()
    assert "amendments were not read" in said
    # By now it may have arrived.
    assert set(tasks) | {"soon"} == {"soon", "later", "paid", "m-1", None}
    later = tasks["later"]
    assert (later.name, later.args, later.kwargs) == ("shop.pay", "(0,)", "{'a': 1}")
    assert (later.queue, later.retries, later.source) == ("mail", 2, "node")
    assert begin - 1 <= later.due - HOUR * 1000 <= end + 1
    assert later.level in {row["name"] for row in vhost.queues()}
    levels = [row for row in vhost.queues() if ".level-" in row["name"]]
    assert not [row for row in levels if row.get("messages_unacknowledged")]
    told = [name for row in levels for name in row.get("message_stats", {})]
    assert not [name for name in told if name.startswith(("get", "deliver", "redeliver", "ack"))]
    assert tasks["paid"].queue == "events:order.paid"
    assert (tasks["m-1"].name, tasks["m-1"].queue, tasks["m-1"].retries) == (None, "mail", None)

    [arrived] = collect(connect(), [Queue("mail")], 1)
    assert arrived.headers["id"] == "soon"
    assert "x-delivery-count" not in arrived.headers
    assert set(ids(on_node())) == {"later", "paid", "m-1", "None"}


@pytest.mark.own_broker
def test_the_node_shows_what_is_asked_for(connect, on_node, once):
    connection = connect()
    middle = publish_by_the_hour(connection)
    table = on_node(once)
    assert selected(table, ids=frozenset({"3", "x", "nobody"})) == ["3", "x"]
    assert selected(table, after=middle, name="shop.*") == ["5", "6", "7", "8"]
    assert selected(table, queue="m*l", before=middle - 3 * HOUR * 1000) == ["0", "1"]


@pytest.mark.own_broker
@pytest.mark.usefixtures("own_broker")
def test_what_moves_meanwhile_is_listed_once(connect, on_node):
    connection = connect()
    for attempt in attempts(15_000, 30_000, 120_000):
        wait = attempt.delay / 1000
        tasks = {f"{wait}-{number}": wait + number / 400 for number in range(400)}
        publish(connection, *tasks.items())
        # Their highest bits are ones: each leaves a level for the next after 8 s of 15, after 12 s.
        half = time.time() + wait * 8 / 15
        while not attempt.is_over:
            began = time.time()
            listed = selected(on_node(), ids=frozenset(tasks))
            if attempt.is_over:
                break
            assert listed == sorted(tasks)
            if began < half < time.time():
                attempt.end()
    assert attempt.was_in_time, "no listing has ended before they were due"


@pytest.mark.own_broker
def test_more_levels_than_one_command_takes_are_read_by_several(connect, on_node, monkeypatch):
    publish(connect(), ("near", HOUR), ("far", 1000 * HOUR))
    commands = []
    read_queues = script.read_queues

    def read(vhost, names):
        commands.append(names)
        return read_queues(vhost, names)

    monkeypatch.setattr(script, "LONGEST", 1500)
    monkeypatch.setattr(script, "read_queues", read)

    assert ids(on_node()) == ["far", "near"]
    assert len(commands) > 1


@pytest.mark.own_broker
@pytest.mark.slow
def test_a_listing_of_the_node_holds_a_page_and_no_more(connect, on_node):
    publish(connect(), *((f"{number}", 3600 + number) for number in range(MANY)))
    tracemalloc.start()
    try:
        assert sum(1 for _ in on_node()) == MANY
        assert tracemalloc.get_traced_memory()[1] < FLAT
    finally:
        tracemalloc.stop()


#: Counts the processes of a node that wait in an expression that was evaluated there.
EVALUATING = """
length([P || P <- processes(), P =/= self(),
  process_info(P, current_function) =:= {current_function, {prim_eval, 'receive', 2}}
  orelse process_info(P, initial_call) =:= {initial_call, {erl_eval, expr, 5}}])."""


@pytest.mark.own_broker
def test_a_reading_that_has_its_task_ends_on_the_node(connect, on_node, own_broker, vhost, beside):
    publish(connect(), *((f"{number}", 3600) for number in range(3000)))
    # It reads no further than the task.
    assert operate.story_by_node(beside, vhost.name, LADDER, "0").state == "waiting"
    wait_until(
        lambda: own_broker.ctl("--quiet", "eval", EVALUATING).strip() == "0", "the node goes on"
    )
    assert sum(1 for _ in on_node()) == 3000


@pytest.mark.own_broker
def test_headers_of_any_kind_are_shown_or_counted(connect, on_node):
    connection = connect()
    publish(connection, ("\x1b[31m\x00é", HOUR), name="a\r\nb", argsrepr="x" * 9000, kwargsrepr=[1])
    publish(connection, ("y", HOUR), retries="many", argsrepr=None)
    publish(connection, ("z", HOUR), id=7, extra={"deep": [{"er": [1, 2**40, b"\xff"]}]})
    tasks = {task.id: task for task in on_node()}
    assert set(tasks) == {"\x1b[31m\x00é", "y", None}
    odd = tasks["\x1b[31m\x00é"]
    assert (odd.name, len(odd.args), odd.kwargs) == ("a\r\nb", 256, None)
    assert (tasks["y"].retries, tasks["y"].args) == (None, None)
    assert tasks[None].name is None


@pytest.mark.own_broker
def test_classic_levels_are_not_looked_into_and_the_journal_is_named(connect, vhost, beside):
    publish(connect(binary_delay={"queue_type": "classic"}), ("c", HOUR))
    with pytest.raises(operate.OperationError, match="classic queues, which cannot be looked into"):
        operate.from_node(beside, vhost.name, LADDER)
    publish(connect(), ("q", HOUR))
    listing = operate.from_node(beside, vhost.name, LADDER)
    assert ids(listing) == ["q"]
    assert not listing.complete
    assert " classic queues of the ladder left out" in listing.unseen()[0]


@pytest.mark.own_broker
def test_the_node_reads_the_ladders_of_others_too(connect, vhost, beside):
    options = {"binary_delay": {"foreign_ladder": "nservicebus"}}
    publish(connect(**options), ("n", 3600))
    done = run(vhost, "--foreign-ladder", "nservicebus", "tasks", "--node-command", beside)
    assert done["tasks"][0]["id"] == "n"
    assert done["tasks"][0]["level"].startswith("nsb.v2.delay-level-")


@pytest.mark.own_broker
@pytest.mark.slow
def test_any_node_of_a_cluster_reads_all_of_it(connect, tmp_path):
    with Cluster(os.environ.get("RABBITMQ_ROOT")) as cluster:
        options = {"binary_delay": {"lanes": 3}}
        publish(
            connect(url=cluster.nodes[0].url, **options),
            *((f"{number}", 3600 + number) for number in range(200)),
        )
        paths = [reach(node, tmp_path) for node in cluster]
        for path in paths:
            listing = operate.from_node(path, "/", LADDER)
            assert ids(listing) == sorted(map(str, range(200)))
        cluster.nodes[0].kill()

        def all_is_read_by_another():
            # Leaders are elected, and until then some levels cannot be read.
            with suppress(operate.OperationError):
                listing = operate.from_node(paths[1], "/", LADDER)
                return ids(listing) == sorted(map(str, range(200))) and listing.complete
            return False

        wait_until(all_is_read_by_another)


@pytest.mark.own_broker
def test_where_rabbitmqctl_runs_elsewhere_it_is_reached_by_ssh(
    connect, on_node, vhost, beside, tmp_path
):
    publish(connect(), ("s", HOUR))
    shell = tmp_path / "ssh"
    # As ssh does it: the words become one, for a shell on the other side.
    shell.write_text(f'#!/bin/sh\nshift\nexec sh -c "{beside} $*"\n')
    shell.chmod(0o755)
    assert ids(operate.from_node(f"{shell} rabbit", vhost.name, LADDER)) == ["s"]


@pytest.mark.own_broker
def test_the_command_reads_the_node_and_tells_of_one_task(connect, on_node, vhost, once):
    del on_node  # it skips where there is nothing to read
    publish(connect(), ("a-1", HOUR), ("a-2", 2 * HOUR))
    listed = run(vhost, "tasks", "--node-command", once, "--limit", "1")
    assert (listed["source"], listed["matched"], listed["complete"]) == ("node", 2, True)
    assert [task["id"] for task in listed["tasks"]] == ["a-1"]
    everything = run(vhost, "tasks", "--node-command", once, "--limit", "0")
    assert len(everything["tasks"]) == 2
    told = run(vhost, "explain", "--task", "a-2", "--node-command", once)
    assert (told["state"], told["task"]["queue"]) == ("waiting", "mail")
    run(vhost, "explain", "--task", "nobody", "--node-command", once, code=1)


def test_a_node_of_another_broker_is_refused_and_never_an_empty_list(vhost, tmp_path):
    with vhost.connect() as connection:
        ours = connection.server_properties["cluster_name"]
    other = tmp_path / "beside-another"
    for cluster, has_vhost, said in [
        ("rabbit@other", "true", f"'rabbit@other', and the broker in use is '{ours}'"),
        (ours, "false", f"'{ours}', which has no virtual host '{vhost.name}'"),
    ]:
        line = f"kbd node {b64encode(cluster.encode()).decode()} {has_vhost}"
        other.write_text(f"#!/bin/sh\nprintf '{line}\\nkbd end\\n'\n")
        other.chmod(0o755)
        for words in (
            ["tasks"],
            ["explain", "--task", "x"],
            ["cancel", "--name", "*"],
            ["status", "--destinations"],
        ):
            options = ["-m", vhost.broker.management_url, *words]
            refused = run(vhost, *options, "--node-command", str(other), code=2)
            assert said in refused["error"]
            assert "give the --node-command that reaches one" in refused["error"]


@pytest.mark.own_broker
def test_the_node_says_of_which_cluster_it_is(on_node, once, vhost):
    del on_node  # it skips where there is nothing to read
    with vhost.connect() as connection:
        ours = connection.server_properties["cluster_name"]
    assert ids(operate.from_node(once, vhost.name, LADDER, cluster=ours)) == []
    with pytest.raises(operate.OperationError, match=f"'{ours}', and the broker in use is 'other'"):
        operate.from_node(once, vhost.name, LADDER, cluster="other")
    with pytest.raises(operate.OperationError, match="has no virtual host 'nonesuch'"):
        operate.from_node(once, "nonesuch", LADDER)


def run(vhost, *words, code=0):
    done = CliRunner().invoke(binary_delay, ["-b", vhost.url, *words, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


# -- the journal ---------------------------------------------------------------------------------


def test_the_journal_lists_what_has_not_arrived(journalling, collect, by_journal, topology):
    publish(journalling, ("soon", 1), ("later", HOUR))
    publish(journalling, ("paid", HOUR), exchange="amq.topic", key="order.paid")
    headers = {"x-delay": HOUR * 1000, "task": "shop.now", "id": "no-eta"}
    journalling.Producer().publish("x", routing_key="mail", headers=headers)
    journalling.Producer().publish("x", routing_key="mail", headers={"x-delay": HOUR * 1000})
    collect(journalling, [Queue("mail")], 1)
    listing = by_journal(6)
    tasks = {task.id: task for task in listing}
    assert set(tasks) == {"later", "paid", "no-eta", None}
    later = tasks["later"]
    assert (later.name, later.args, later.kwargs) == ("shop.pay", "(1,)", "{'a': 1}")
    assert (later.queue, later.retries, later.source) == ("mail", 2, "journal")
    assert later.level.startswith(f"{topology.prefix}.level-")
    assert tasks["paid"].queue == "amq.topic:order.paid"
    assert tasks["no-eta"].name == "shop.now"
    assert listing.unseen()[0].startswith("journal since ")


@pytest.mark.parametrize(
    ("settings", "is_known"),
    [
        ({"lanes": 3}, True),
        ({"declare": "never"}, True),
        ({"queue_per_delay": True}, False),
        ({"layout": "skip"}, False),
        ({"radix": 4}, False),
        ({"foreign_ladder": "nservicebus-v1"}, False),
    ],
    ids=str,
)
def test_the_journal_names_the_level_in_which_a_task_waits_or_none(  # noqa: PLR0913, PLR0917
    connect, vhost, by_journal, journalling, settings, is_known
):
    if settings == {"declare": "never"}:
        publish(journalling, ("first", HOUR))
    else:
        del journalling  # it skips where there are no streams
    publish(connect(binary_delay={"journal": "stream", **settings}), ("waits", HOUR))

    [task] = [task for task in by_journal(1) if task.id == "waits"]

    assert (task.level is not None) == is_known
    if is_known:
        wait_until(lambda: vhost.waiting(task.level).get(task.level))


def test_what_is_cancelled_or_postponed_waits_no_longer(journalling, vhost, by_journal):
    publish(journalling, *((name, HOUR) for name in ("kept", "cancelled", "postponed", "gone")))
    settle(vhost, 4)
    due = {task.id: task.due for task in by_journal(4)}
    at = time.time_ns() // 1000
    write(
        vhost,
        {"event": "cancelled", "at": at, "id": "cancelled"},
        {"event": "postponed", "at": at, "id": "postponed"},
        {"event": "scheduled", "at": at, "id": "postponed", "key": "mail", "due": soon()},
        {"event": "executed", "at": at, "id": "gone", "due": due["gone"] * 1000 + 1},
        {"event": "cancelled", "at": at, "id": "nobody"},
        {"event": "invented", "at": at, "id": "kept"},
    )
    assert ids(by_journal(10)) == ["gone", "kept", "postponed"]


def test_what_replaces_a_message_waits_when_the_first_has_been_dropped(
    journalling, vhost, by_journal
):
    queue = Queue("mail")(journalling.default_channel)
    queue.declare()
    for delay, headers in ((500, {}), (HOUR * 1000, {REPLACES: "a"})):
        journalling.Producer().publish(
            "x", "mail", message_id="a", headers={**headers, "x-delay": delay}
        )
    with journalling.Consumer(queue, callbacks=[lambda *_: None]):
        drain_until(journalling, lambda: vhost.waiting(STREAM).get(STREAM, 0) >= 3)
    assert ids(by_journal(3)) == ["a"]


def test_the_journal_shows_what_is_asked_for(journalling, by_journal):
    middle = publish_by_the_hour(journalling)
    table = by_journal(10)
    assert selected(table, name="other.*") == ["x"]
    assert selected(table, ids=frozenset({"3", "x", "nobody"})) == ["3", "x"]
    assert selected(table, after=middle, name="shop.*") == ["5", "6", "7", "8"]


def test_what_others_write_to_the_journal_hides_nothing(journalling, connect, vhost, by_journal):
    stream = {"x-queue-type": "stream", "x-max-age": "7D"}
    Queue(STREAM, queue_arguments=stream, channel=connect("amqp").default_channel).declare()
    odd = {"event": "scheduled", "at": 1, "due": soon(), "id": "--odd"}
    # The first one says since when there is a journal.
    write(vhost, {**odd, "at": 10**40})
    half = "half a pair: \ud800"
    publish(journalling, ("kept", HOUR), (half, HOUR))
    settle(vhost, 3)
    forged: tuple[Any, ...] = (
        "no JSON",
        b"\xff\xfe",
        "[" * 100_000,
        [1],
        None,
        {},
        {"event": ["scheduled"]},
        {"event": "cancelled", "at": 1, "id": ["kept"]},
        {"event": "released", "at": 1, "id": "kept", "due": "soon"},
        {"event": "cancelled", "at": 1, "id": "kept", "due": 10**40},
        {**odd, "due": 10**40},
        {**odd, "retries": 10**40},
        {**odd, "task": ["a"], "args": 7, "exchange": {}, "ladder": 1},
    )
    others = (
        {"event": "cancelled", "at": 1, "id": "\udfff"},
        {**odd, "event": "invented"},
        {**odd, "key": "mail", "task": None},
    )
    write(vhost, *forged, *others)
    settle(vhost, 3 + len(forged) + len(others))
    for words in (["--limit", "0"], ["--count-by", "queue"]):
        listed = run(vhost, "tasks", "--source", "journal", *words)
        assert listed["matched"] == 3
        assert f"{1 + len(forged)} lines of the journal cannot be read" in listed["unseen"]
    tasks = {task.id: task for task in by_journal(0)}
    assert set(tasks) == {"kept", half, "--odd"}
    assert run(vhost, "tasks", "--source", "journal", "--id", "--odd")["matched"] == 1
    assert run(vhost, "explain", "--source", "journal", "--task", "--odd")["state"] == "waiting"


def test_a_journal_that_sends_nothing_is_an_error_and_no_empty_list(
    journalling, by_journal, monkeypatch
):
    # What the broker counts, it does not send.
    arguments = {"x-queue-type": "stream"}
    Queue(STREAM, queue_arguments=arguments, channel=journalling.default_channel).declare()
    monkeypatch.setattr("kombu_binary_delay.wire.streams.count", lambda *_: 1)
    monkeypatch.setattr("kombu_binary_delay.wire.streams.PATIENCE", 0.5)

    with pytest.raises(operate.UnreachableError, match=f"sent nothing of {STREAM}"):
        list(by_journal(0))


@contextmanager
def written_to(vhost):
    """Write to the journal, twenty times a second, for a minute at most."""
    begun, stop = threading.Event(), threading.Event()

    def write_on():
        with vhost.connect() as connection:
            channel = connection.channel()
            for _ in range(1200):
                channel.basic_publish(amqp.Message('{"event": "invented"}'), "", STREAM)
                begun.set()
                if stop.wait(0.05):
                    return

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        assert begun.wait(PATIENCE)
        yield writer
    finally:
        stop.set()
        writer.join()


def test_a_journal_that_is_written_to_meanwhile_is_read_to_where_it_ended(
    journalling, vhost, by_journal
):
    publish(journalling, ("waits", HOUR))
    settle(vhost, 1)
    with written_to(vhost) as writer:
        assert ids(by_journal(1)) == ["waits"]
        assert writer.is_alive()


def take_back(connection):
    """Take back some of seven tasks, and return what is to be listed, and to be told of them."""
    publish(connection, *((name, HOUR) for name in ("cancelled", "kept", "postponed", "replaced")))
    publish(connection, ("far", 9 * 24 * HOUR))
    publish(connection, ("stamped", HOUR), stamps={"order": 7})
    # A task that has replaced another goes on under its id, by Celery's own `replace`.
    publish(connection, ("goes on", HOUR), replaced_task_nesting=1)
    now = datetime.now(UTC)
    at = int(now.timestamp() * 1000)
    connection.connection.delay_mechanism.amendments.write(
        [
            CancelStamped((("order", ("7",)),), at),
            Supersede("goes on", new_generation(at), at, at, None, keyed=False),
        ]
    )
    later = now + timedelta(hours=3)
    kombu_binary_delay.cancel("cancelled", connection=connection)
    # Its record waits on the ladder as well, and is no task.
    kombu_binary_delay.cancel("far", eta=now + timedelta(days=9), connection=connection)
    kombu_binary_delay.reschedule("postponed", eta=later, connection=connection)
    states = dict.fromkeys(("cancelled", "far"), "cancelled")
    states |= {"kept": "waiting", "postponed": "postponed"}
    return {"goes on", "kept", "postponed", "replaced"}, later.timestamp() * 1000, states


@pytest.mark.own_broker
def test_the_node_leaves_out_what_was_taken_back(connect, vhost, once, on_node):
    listed, later, states = take_back(connect())
    done = run(vhost, "tasks", "--node-command", once)
    due = {task["id"]: task["due"] for task in done["tasks"]}
    assert set(due) == listed
    assert abs(due["postponed"] - later) < 1000
    assert done["unseen"] == ["3 cancelled or superseded tasks are not shown; they will not run"]
    for id_, state in states.items():
        told = run(vhost, "explain", "--task", id_, "--node-command", once)
        assert told["state"] == state
    assert len(ids(on_node(once))) == 7


def test_the_journal_leaves_out_what_was_taken_back(journalling, vhost):
    listed, later, states = take_back(journalling)
    settle(vhost, 7)
    done = run(vhost, "tasks", "--source", "journal")
    due = {task["id"]: task["due"] for task in done["tasks"]}
    assert set(due) == listed
    assert abs(due["postponed"] - later) < 1000
    assert "3 cancelled or superseded tasks are not shown" in done["unseen"][-1]
    for id_, state in states.items():
        assert run(vhost, "explain", "--task", id_, "--source", "journal")["state"] == state


def test_the_journal_lists_of_messages_without_an_id_the_last_one_with_a_key(journalling, vhost):
    for countdown in (HOUR, 2 * HOUR):
        headers = {"x-delay": countdown * 1000, KEY: "reindex"}
        journalling.Producer().publish("x", routing_key="mail", headers=headers)
    settle(vhost, 2)
    done = run(vhost, "tasks", "--source", "journal")
    [last] = done["tasks"]
    assert (last["id"], last["due"] > (time.time() + HOUR + 600) * 1000) == (None, True)
    assert "1 cancelled or superseded task is not shown" in done["unseen"][-1]


def test_behind_another_systems_ladder_the_journal_and_the_amendments_are_found(
    connect, vhost, broker
):
    connection = connect(binary_delay={"foreign_ladder": "celery", "journal": "stream"})
    publish(connection, ("one", HOUR), ("two", HOUR))
    kombu_binary_delay.cancel("two", connection=connection)
    settle(vhost, 2)
    options = ["-m", broker.management_url, "--foreign-ladder", "celery"]
    by_journal = ["--source", "journal"]

    listed = run(vhost, *options, "tasks", *by_journal)
    told = run(vhost, *options, "explain", "--task", "one", *by_journal)
    counted = run(vhost, *options, "status", "--destinations", *by_journal)

    assert [task["id"] for task in listed["tasks"]] == ["one"]
    assert told["state"] == "waiting"
    assert [(row["value"], row["tasks"]) for row in counted["destinations"]] == [("mail", 1)]
    assert counted["amendments"]["active"] == 1


def test_each_look_knows_what_was_amended_since_the_last(journalling, vhost):
    publish(journalling, *((name, HOUR) for name in ("a", "b", "c")))
    settle(vhost, 3)
    with ExitStack() as stack:
        source = TaskSource.of(Target.of(None, vhost.url, None, {}), stack, "journal", None)
        # There are no streams of amendments yet.
        seen = [ids(source.tasks())]
        for name in ("a", "b"):
            kombu_binary_delay.cancel(name, connection=journalling)
            seen.append(ids(source.tasks()))

    assert seen == [["a", "b", "c"], ["b", "c"], ["c"]]


@pytest.mark.slow
def test_a_listing_of_the_journal_holds_little_of_it(journalling, by_journal):
    publish(journalling, *((f"{number}", 3600 + number) for number in range(MANY)))
    tracemalloc.start()
    try:
        assert sum(1 for _ in by_journal(MANY)) == MANY
        assert tracemalloc.get_traced_memory()[1] < FLAT
    finally:
        tracemalloc.stop()


def test_without_a_journal_its_remedies_are_named(connect, vhost, broker):
    connection = connect("amqp")
    with pytest.raises(operate.OperationError, match="set journal to 'stream'"):
        operate.from_journal(connection, LADDER)
    run(vhost, "tasks", "--source", "journal", code=2)
    connection.channel().queue_declare(STREAM, durable=True, auto_delete=False)
    with pytest.raises(operate.OperationError, match="cannot be read"):
        list(operate.from_journal(connection, LADDER))


def test_the_command_lists_counts_and_tells_of_one_task(
    journalling, connect, collect, vhost, monkeypatch
):
    hostile = "\x1b]0;owned\x07\x1b[2J\u202e"
    publish(
        journalling, ("arrived", 1), ("waits", 2 * HOUR), name=f"shop.{hostile}", argsrepr=hostile
    )
    publish(journalling, *((f"b-{number}", HOUR) for number in range(3)), name="shop.b")
    collect(journalling, [Queue("mail")], 1)
    settle(vhost, 6)

    listed = run(vhost, "tasks", "--limit", "2")
    assert (listed["source"], listed["matched"], len(listed["tasks"])) == ("journal", 4, 2)
    assert ids(map(Named, listed["tasks"])) == ["b-0", "b-1"]
    counted = run(vhost, "tasks", "--count-by", "name", "--name", "*.b")
    assert [(row["value"], row["tasks"]) for row in counted["counts"]] == [("shop.b", 3)]

    told = run(vhost, "explain", "--task", "waits")
    assert [event["kind"] for event in told["events"]] == ["scheduled"]
    assert (told["state"], told["task"]["queue"]) == ("waiting", "mail")
    gone = run(vhost, "explain", "--task", "arrived")
    assert [event["kind"] for event in gone["events"]] == ["scheduled", "released"]
    assert gone["state"] == "arrived"
    assert gone["late"]["broker"] + gone["late"]["backlog"] < PATIENCE * 1000
    options = ["-m", vhost.broker.management_url]
    late = run(vhost, *options, "status")["arrivals"]
    assert (late["messages"], late["complete"]) == (1, True)
    assert 0 < late["p50"] == late["p99"]
    assert late["on_time"] == (late["p99"] <= LADDER.ladder.tick)
    # What came since the last look, and not again what came before.
    last_hour = operate.LastHour("kbd", LADDER.ladder.tick)
    with vhost.connect() as connection:
        first = last_hour.read(connection)
        assert first
        assert first.messages == 1
        now = time.time_ns() // 1000
        event = {"event": "released", "at": now, "due": now - 60_000_000, "id": "x"}
        write(vhost, {**event, "left": now})
        write(vhost, event)  # it was due when it was published
        settle(vhost, 8)
        again = last_hour.read(connection)
        assert again
        assert again.messages == 2
        assert again.p99 == pytest.approx(60_000, rel=0.02)
    run(vhost, "explain", "2f1c3a52-5b0d-4a37-b2a5-3f6c44a7f0a1", code=1)

    for words in (["tasks"], ["tasks", "--limit", "0"], ["explain", "--task", "waits"]):
        done = CliRunner().invoke(binary_delay, ["-b", vhost.url, *words])
        assert done.exit_code == 0, done.output
        assert "waits" in done.output
        assert all(line.isprintable() for line in done.output.splitlines())


@pytest.mark.parametrize("limit", ["0", "50"])
def test_what_may_not_be_read_is_one_object_with_an_error(journalling, vhost, limit):
    publish(journalling, ("waits", HOUR))
    settle(vhost, 1)
    name = f"user-{vhost.name}"
    vhost.broker.api("PUT", f"users/{name}", {"password": "x", "tags": ""})
    rights = {"configure": ".*", "write": ".*", "read": "mail"}
    vhost.broker.api("PUT", f"permissions/{vhost.name}/{name}", rights)

    words = ["tasks", "--source", "journal", "--json", "--limit", limit]
    done = CliRunner().invoke(binary_delay, ["-b", vhost.url_of(name, "x"), *words])
    vhost.broker.api("DELETE", f"users/{name}")

    assert done.exit_code != 0
    assert "refused" in json.loads(done.stdout)["error"]


def test_who_may_only_read_lists_what_waits_and_not_what_was_taken_back(journalling, vhost, user):
    publish(journalling, ("waits", HOUR), ("cancelled", HOUR))
    settle(vhost, 2)
    url = user(configure="^$", write="^$", read=r"^kbd\.v2\.(journal|amendments\.(ids|keys))$")
    for listed in ({"waits", "cancelled"}, {"waits"}):
        done = CliRunner().invoke(binary_delay, ["-b", url, "tasks", "--json"])
        assert (done.exit_code, done.stderr) == (0, "")
        assert {task["id"] for task in json.loads(done.stdout)["tasks"]} == listed
        kombu_binary_delay.cancel("cancelled", connection=journalling)


class Named:
    def __init__(self, task):
        self.id = task["id"]


def test_celerys_own_command_lists_too(journalling, vhost):
    publish(journalling, ("one", HOUR))
    settle(vhost, 1)
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-b", vhost.url, "binary-delay", "tasks", "--json"],
        stdout=subprocess.PIPE,
        check=True,
        timeout=PATIENCE,
    )
    assert [task["id"] for task in json.loads(done.stdout)["tasks"]] == ["one"]
