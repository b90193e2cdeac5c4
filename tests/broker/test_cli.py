"""The command line on a real broker: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import amqp
import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner
from kombu import Connection, Exchange, Queue
from starlette.testclient import TestClient

from dev.cluster import Cluster
from kombu_binary_delay import Ladder, Topology, operate
from kombu_binary_delay.cli import binary_delay, command
from kombu_binary_delay.cli.web import asgi_app
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.foreign import FOREIGN_LADDERS
from kombu_binary_delay.ladder.parts import Part
from tests.waits import PATIENCE, wait_until


@pytest.fixture
def run(broker, vhost):
    """Run the command on the test's own virtual host."""

    def run(*arguments, url=None, **more):
        place = ["-b", url or vhost.url, "-m", broker.management_url]
        return CliRunner().invoke(binary_delay, [*place, *arguments], **more)

    return run


@pytest.fixture
def tick(topology):
    """Options for a small ladder of the type that this broker can have."""
    return "--tick", "1000", "--radix", "2", "--levels", "4", "--queue-type", topology.queue_type


@pytest.fixture
def small(topology):
    return Topology(Ladder.binary(4, 1000), queue_type=topology.queue_type)


MINUTE = 60_000  # in milliseconds


@pytest.fixture
def slow(tick):
    """The same of a minute, where messages are to wait until the test has ended."""
    return tick[0], str(MINUTE), *tick[2:]


def publish(connect, *delays, queue="mail", tick=1000):
    settings = {"tick": tick, "radix": 2, "levels": 4}
    connection = connect(binary_delay=settings, confirm_publish=True)
    for delay in delays:
        connection.Producer().publish("m", routing_key=queue, headers={"x-delay": delay})
    return connection


def declare(connect, queue="mail"):
    Queue(queue)(connect("amqp").channel()).declare()


def test_a_ladder_made_ahead_takes_urgent_messages_and_goes_as_a_whole(
    run, tick, connect, collect, vhost
):
    declare(connect)
    made = run(*tick, "create", "--queue", "mail")
    sound = run(*tick, "--declare", "never", "verify")
    settings = {"tick": 1000, "radix": 2, "levels": 4, "declare": "never"}
    connection = connect(binary_delay=settings, confirm_publish=True)
    connection.Producer().publish("m", routing_key="mail", headers={"x-delay": 1000}, priority=9)
    arrived = collect(connection, [Queue("mail")], 1)

    assert [result.exit_code for result in (made, sound)] == [0, 0], sound.output
    assert len(arrived) == 1
    # What has arrived is a while longer in the broker's figures.
    wait_until(lambda: run(*tick, "teardown", "--yes").exit_code == 0)
    assert {row["name"] for row in vhost.queues()} == {"mail"}


def test_create_verify_status_and_teardown(run, slow, connect):
    declare(connect)
    missing = run(*slow, "--declare", "never", "verify")
    planned = run(*slow, "create", "--queue", "mail", "--dry-run", "--json")
    made = run(*slow, "create", "--queue", "mail")
    sound = run(*slow, "--declare", "never", "verify")
    empty = run(*slow, "status")
    publish(connect, 9 * MINUTE, 9 * MINUTE, tick=MINUTE)
    waiting = run(*slow, "status", "--json")
    refused = run(*slow, "teardown", "--yes")
    gone = run(*slow, "teardown", "--yes", "--force", "--json")

    assert (missing.exit_code, sound.exit_code) == (1, 0)
    assert "not sound" in missing.output
    assert json.loads(planned.output)["dry_run"] is True
    assert "queues made" in made.output
    assert "sound: nothing" in sound.output
    assert "\nempty\n" in empty.output
    ladders = json.loads(waiting.output)["ladders"]
    assert sum(queue["messages"] for ladder in ladders for queue in ladder["queues"]) == 2
    assert refused.exit_code == 3
    assert "2 messages wait" in refused.output
    assert gone.exit_code == 0
    assert '"lost": 2' in gone.output


def test_on_a_terminal_a_teardown_asks_and_a_no_changes_nothing(run, tick, vhost, monkeypatch):
    monkeypatch.setattr(command, "_is_terminal", lambda: True)
    nothing = run(*tick, "teardown", input="n\n")
    run(*tick, "create")
    before = what_exists(vhost)
    refused = run(*tick, "teardown", input="n\n")
    after = what_exists(vhost)
    unasked = run(*tick, "teardown", "--yes", "--force", "--json")

    assert (nothing.exit_code, "Go on?" in nothing.output) == (0, False)
    assert (refused.exit_code, before == after) == (2, True)
    asked = f"in the virtual host {vhost.name}: "
    assert all(word in refused.output for word in ("remove the ladder kbd.v2-1000ms-", asked))
    assert (unasked.exit_code, "Go on?" in unasked.output) == (0, False), unasked.output
    assert not vhost.queues()


def test_what_the_setting_relays_names_is_reached_where_nothing_is_declared(
    run, tick, connect, collect, small
):
    queue = Queue("mail", Exchange("events", "topic"), "k")(connect("amqp").channel())
    queue.declare()
    relays = ("--relays", "other,ma*")

    exported = run(*tick, *relays, "export", "definitions", "--queue", "mail")
    made = run(*tick, *relays, "create", "--queue", "mail", "--exchange", "events")

    relay = small.queue_type == "quorum"
    bindings = json.loads(exported.output)["bindings"]
    ways = [binding["source"] for binding in bindings if binding["routing_key"] == "#.@..mail"]
    assert ways == [small.delivery if relay else small.to_queues]
    assert made.exit_code == 0, made.output
    settings = {"tick": 1000, "radix": 2, "levels": 4, "declare": "never", "relays": ["ma*"]}
    connection = connect(binary_delay=settings)
    for exchange, key in (("", "mail"), ("events", "k")):
        connection.Producer().publish(
            "m", exchange=exchange, routing_key=key, headers={"x-delay": 1000}
        )
    assert {arrival.exchange for arrival in collect(connection, [queue], 2)} == {"", "events"}
    assert run(*tick, "--declare", "never", "verify").exit_code == 0


def test_a_ladder_that_is_made_ahead_has_the_way_in_that_queue_per_delay_takes(
    run, tick, connect, collect
):
    queue = Queue("mail")(connect("amqp").channel())
    queue.declare()
    layout = ("--queue-per-delay",)

    made = run(*tick, *layout, "create", "--queue", "mail")
    sound = run(*tick, *layout, "--declare", "never", "verify")

    assert (made.exit_code, sound.exit_code) == (0, 0), made.output + sound.output
    settings = {"tick": 1000, "radix": 2, "levels": 4, "declare": "never", "queue_per_delay": True}
    connection = connect(binary_delay=settings, confirm_publish=True)
    for _ in range(2):
        connection.Producer().publish("m", routing_key="mail", headers={"x-delay": 1000})
    assert len(collect(connection, [queue], 2)) == 2
    *_, last = run(*tick, *layout, "teardown", "--yes", "--force", "--json").output.splitlines()
    assert json.loads(last)["keeps"] == []


def test_an_exchange_that_another_systems_ladder_does_not_know_is_refused(run, connect, vhost):
    Queue("mail", Exchange("events", "topic"), "k")(connect("amqp").channel()).declare()

    done = run("--foreign-ladder", "celery", "create", "--exchange", "events")

    assert (done.exit_code, "does not know the exchange 'events'" in done.output) == (2, True)
    assert not [exchange for exchange in vhost.exchanges() if "celery" in exchange["name"]]


def test_status_draws_what_waits(run, slow, connect):
    declare(connect)
    publish(connect, 14 * MINUTE, 14 * MINUTE, 10 * MINUTE, tick=MINUTE)

    shown = run(*slow, "status")

    assert shown.exit_code == 0
    words = [line.split() for line in shown.output.splitlines()]
    assert "3 waiting" in shown.output
    assert ["level", "wait", "waiting", "left", "after"] in words
    assert any(line[:4] == ["03", "8", "min", "3"] for line in words), shown.output
    assert any(line[:1] == ["surely"] for line in words)
    assert "\x1b" not in shown.output, "colour is for terminals"


def test_status_counts_by_destination_from_the_journal(run, tick, connect):
    for queue in ("mail", "orders"):
        declare(connect, queue)
    settings = {"tick": 100_000, "radix": 2, "levels": 4, "journal": "stream"}
    connection = connect(binary_delay=settings, confirm_publish=True)
    for queue in ("mail", "mail", "orders"):
        connection.Producer().publish("m", routing_key=queue, headers={"x-delay": 900_000})
    options = (*tick, "--tick", "100000")

    def counts():
        status = json.loads(run(*options, "status", "--destinations", "--json").output)
        return {row["value"]: row["tasks"] for row in status["destinations"]}

    end = time.monotonic() + PATIENCE
    while counts() != {"mail": 2, "orders": 1}:
        assert time.monotonic() < end, counts()
    shown = run("status", "--destinations", *options)

    assert shown.exit_code == 0, shown.output
    heads = "destination waiting first due (UTC) last due (UTC)"
    assert heads in [" ".join(line.split()) for line in shown.output.splitlines()]
    assert "3 waiting, from the journal" in shown.output


def test_a_part_that_is_missing_is_trouble_and_a_whole_ladder_is_none(
    run, tick, connect, vhost, small
):
    declare(connect)  # what is parked would be trouble too
    publish(connect, 9000)
    whole = run(*tick, "status", "--json")
    with Connection(vhost.url, connect_timeout=PATIENCE) as operator:
        operator.channel().queue_delete(small.level_name(1) + ".1")

    broken = run(*tick, "status", "--json")

    assert (whole.exit_code, json.loads(whole.output)["troubles"]) == (0, [])
    (trouble,) = json.loads(broken.output)["troubles"]
    assert broken.exit_code == 1
    assert f"queue {small.level_name(1)}.1: missing" in trouble
    assert "'verify' says what to do" in trouble


def test_a_binding_of_yours_with_a_list_or_a_table_stops_no_subcommand(run, tick, connect, vhost):
    declare(connect)
    run(*tick, "create", "--queue", "mail")
    with Connection(vhost.url, connect_timeout=PATIENCE) as connection:
        channel = connection.channel()
        channel.exchange_declare("yours", "headers", durable=True, auto_delete=False)
        nested = {"x-match": "any", "kinds": ["a", "b"], "from": {"node": "a"}}
        channel.queue_bind("mail", "yours", arguments=nested)
    before = what_exists(vhost)
    suffix = "" if tick[-1] == "quorum" else "-classic"

    done = [
        run(*tick, *arguments, "--json")
        for arguments in (
            ["status"],
            ["verify"],
            ["create", "--dry-run"],
            ["--levels", "3", "migrate", "--from", f"1000ms-2x4{suffix}"],
            ["prune"],
            ["teardown", "--dry-run"],
        )
    ]

    assert [result.exit_code for result in done] == [0] * len(done), [
        result.output for result in done
    ]
    assert all(json.loads(result.stdout) for result in done)
    assert what_exists(vhost) == before


def test_parked_messages_are_counted_and_redriven(run, tick, connect, vhost):
    publish(connect, 1000, 1000, queue="gone")
    parking = Topology(queue_type=tick[-1]).parking

    def both_are_parked():
        wait_until(lambda: vhost.waiting(parking) == {parking: 2})

    both_are_parked()
    status = run(*tick, "status")
    counted = run(*tick, "redrive", "--dry-run", "--only", "gone")
    stays = run(*tick, "redrive", "--json")
    [reason] = json.loads(stays.stdout)["reasons"]
    both_are_parked()
    declare(connect, "elsewhere")
    sent = run(*tick, "redrive", "--to", "elsewhere", "--json")

    assert (status.exit_code, "2 messages parked" in status.output) == (1, True)
    assert (counted.exit_code, f"{parking}        2" in counted.output) == (0, True)
    assert "which of them --only takes is seen when they are taken" in counted.output
    assert (stays.exit_code, json.loads(stays.output)["stays"]) == (1, 2)
    words = "the queue 'gone' does not exist; declare it, or send them elsewhere with --to"
    assert reason == f"2 stay: {words}"
    assert (sent.exit_code, json.loads(sent.output)["sent"]) == (0, 2)
    assert vhost.waiting("elsewhere") == {"elsewhere": 2}


def test_names_with_colons_are_redriven_by_what_is_parked_and_exists(run, tick, connect, vhost):
    parking = Topology(queue_type=tick[-1]).parking
    run(*tick, "create")
    Exchange("Shop:Paid", "topic")(connect("amqp").channel()).declare()
    declare(connect, "jobs:high")
    declare(connect, "else:where")
    with Connection(vhost.url, connect_timeout=PATIENCE) as connection:
        for key in ("@..jobs:high", "@.Shop:Paid.eu", "@..gone"):
            connection.Producer().publish("m", exchange=parking, routing_key=key)
    wait_until(lambda: vhost.waiting(parking) == {parking: 3})

    nothing = run(*tick, "redrive", "--only", "jobs:low", "--json")
    wait_until(lambda: vhost.waiting(parking) == {parking: 3})
    queue = run(*tick, "redrive", "--only", "jobs:high", "--json")
    wait_until(lambda: vhost.waiting(parking) == {parking: 2})
    exchange = run(*tick, "redrive", "--only", "Shop:Paid:eu", "--to", "else:where", "--json")
    wait_until(lambda: vhost.waiting(parking) == {parking: 1})
    declare(connect, "Shop:Paid:eu")
    either = run(*tick, "redrive", "--to", "Shop:Paid:eu")
    both = "the exchange Shop:Paid with the key 'eu' or the queue Shop:Paid:eu, which exist"

    words = "nothing is parked for the exchange jobs with the key 'low' or the queue jobs:low"
    assert (nothing.exit_code, words in nothing.stderr) == (0, True)
    assert [json.loads(result.stdout)["sent"] for result in (queue, exchange)] == [1, 1]
    assert (either.exit_code, both in either.output) == (2, True)
    assert "nothing is parked" not in queue.stderr + exchange.stderr
    wait_until(
        lambda: vhost.waiting("jobs:high", "else:where") == {"jobs:high": 1, "else:where": 1}
    )


def test_what_is_parked_beside_the_settings_ladder_is_redriven_by_its_name(
    run, tick, connect, vhost
):
    """Given: a message in the parking queue of another type."""
    other = {"quorum": "classic", "classic": "quorum"}
    declare(connect)
    run(*tick, "create", "--queue", "mail")
    side = Topology(queue_type=other[tick[-1]])
    with Connection(vhost.url, connect_timeout=PATIENCE) as connection:
        operate.create(connection, side, side.whole)
        connection.Producer().publish("m", exchange=side.parking, routing_key="@..mail")

    for arguments in (), ("--ladder", side.prefix):
        [trouble] = json.loads(run(*tick, "status", *arguments, "--json").stdout)["troubles"]
        assert "1 message parked" in trouble
        [command] = re.findall("'(redrive --ladder .*)'", trouble)
        planned = run(*tick, *command.split(), "--dry-run", "--json")
        assert json.loads(planned.stdout)["messages"] == 1
    done = run(*tick, *command.split(), "--json")

    assert json.loads(done.stdout)["sent"] == 1
    assert vhost.waiting("mail", side.parking) == {"mail": 1, side.parking: 0}


def test_migrate_and_transfer(broker, run, slow, connect, small):
    declare(connect)
    publish(connect, 12 * MINUTE, 13 * MINUTE, tick=MINUTE)
    kind = ("--queue-type", small.queue_type)
    suffix = "" if small.queue_type == "quorum" else "-classic"
    name = f"{MINUTE}ms-2x4{suffix}"
    other = broker.vhost()
    try:
        planned = run(*kind, "migrate", "--from", name, "--dry-run", "--json")
        same = [run(*slow, "migrate", "--from", name, *dry) for dry in ([], ["--dry-run"])]
        dead = run(*slow, "transfer", "--to-broker", "amqp://127.0.0.1:1//", "--dry-run")
        of_all = run(*kind, "migrate", "--from-queue", "mail", "--dry-run")
        shop = "--namespace", "shop", "migrate", "--from", f"kbd.v2-{name}", "--dry-run"
        beside = run(*kind, *shop)
        moved = run(*kind, "migrate", "--from", name, "--json")
        away = run(*kind, "transfer", "--to-broker", other.url, "--json")
        there = run(*kind, "status", "--json", url=other.url)
    finally:
        other.delete()

    assert json.loads(planned.output)["messages"] == 2
    assert [(result.exit_code, "are the same ladder" in result.output) for result in same] == [
        (2, True),
        (2, True),
    ]
    assert (dead.exit_code, ", or correct --to-broker" in dead.output) == (4, True)
    assert "only the tasks that have an eta in the future are moved" in of_all.output
    assert "or run 'create --exchange' for each exchange" in beside.output
    assert (moved.exit_code, json.loads(moved.output)["moved"]) == (0, 2)
    assert (away.exit_code, json.loads(away.output)["moved"]) == (0, 2)
    assert sum(queue["messages"] for queue in json.loads(there.output)["ladders"][0]["queues"]) == 2


def test_what_cannot_be_read_between_ladders_of_others_is_in_the_namespace_of_the_settings(
    run, tick, vhost
):
    old = FOREIGN_LADDERS["celery"]
    with Connection(vhost.url) as connection:
        operate.create(connection, old, old.whole)
        connection.Producer().publish("?", exchange=old.level_name(9), routing_key="1." * 20)

    move = "migrate", "--from", "celery", "--to", "nservicebus", "--json"
    done = json.loads(run("--namespace", "shop", *move).stdout)

    assert (done["poison"], done["poison_queue"]) == (1, "shop.v2.poison")


def test_lanes_are_filled_and_emptied_together_and_never_into_themselves(
    broker, run, slow, connect, vhost
):
    if slow[-1] == "classic":
        pytest.skip("lanes are for quorum queues")
    declare(connect)
    publish(connect, *range(13 * MINUTE, 15 * MINUTE + 1, MINUTE // 2), tick=MINUTE)
    alone, lanes = Topology(Ladder.binary(4, MINUTE)), (*slow, "--lanes", "2")
    name = f"{MINUTE}ms-2x4"
    one, two = alone.lanes(2)
    elsewhere = vhost.url.replace("127.0.0.1", "localhost")
    other = broker.vhost()
    try:
        widened = run(*lanes, "migrate", "--from", name, "--json")
        inside = waiting(vhost, alone, one, two)
        refused = [
            run(*lanes, "migrate", "--from", f"{name}-lane1"),
            run(*lanes, "transfer", "--to-broker", elsewhere),
            run(*slow, "migrate", "--from", f"{name}-lane1", "--to", f"{name}-lane2"),
            run(*lanes, "migrate", "--from", f"{name}-lane1", "--to", f"{name}-urgent"),
        ]
        planned = run(*lanes, "transfer", "--to-broker", other.url, "--dry-run", "--json")
        away = run(*lanes, "transfer", "--to-broker", other.url, "--json")
        outside = waiting(other, alone, one, two)
    finally:
        other.delete()

    assert elsewhere != vhost.url
    assert [json.loads(result.output).get("moved") for result in (widened, away)] == [5, 5]
    assert json.loads(planned.output)["messages"] == 5
    assert inside[0] == outside[0] == 0
    assert sorted(inside[1:]) == sorted(outside[1:]) == [2, 3]
    assert [result.exit_code for result in refused] == [2, 2, 2, 2]
    same = "are the same ladder"
    words = (same, same, "is one of several lanes", f"find it themselves; name kbd.v2-{name}")
    for said, done in zip(words, refused, strict=True):
        assert said in " ".join(done.output.split())


def waiting(vhost, *ladders):
    return [
        sum(vhost.waiting(*(q.name for q in ladder.whole.queues)).values()) for ladder in ladders
    ]


#: Where the tests run under `nohup`, it would ignore SIGHUP.
SIGHUP_ENDS_IT = ["env", "--default-signal=HUP"]


@pytest.fixture
def started(broker, vhost):
    """Start the command as a program."""

    @contextmanager
    def started(*arguments, by=SIGHUP_ENDS_IT):
        place = ["-b", vhost.url, "-m", broker.management_url]
        with subprocess.Popen(
            [*by, sys.executable, "-m", "kombu_binary_delay.cli", *place, *arguments],
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            yield process

    return started


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_teardown_that_a_signal_ends_puts_all_back(  # noqa: PLR0913, PLR0917
    run, started, tick, connect, vhost, number
):
    declare(connect)
    run(*tick, "create", "--queue", "mail")
    before = what_exists(vhost)

    with started(*tick, "teardown", "--yes") as process:
        assert any("deleted the exchanges" in said for said in process.stderr)
        process.send_signal(number)

    assert process.returncode == 128 + number
    assert what_exists(vhost) == before


COUNTED = ["status", "--destinations", "--source", "journal", "--ladder"]


#: What cannot be done, and what is said of it.
IMPOSSIBLE = [
    (["-A", "no.such.app", "status"], "no Celery app can be loaded from 'no.such.app'"),
    (["status", "--nonsense"], "No such option"),
    (["--tick", "0", "status"], "tick must be a whole number"),
    (["--tick", "x", "status"], "'x' is not a whole number"),
    (["explain", "soon"], "for a task's id that is no UUID: explain --task soon"),
    (["explain", "99999w"], "longer than 8.51 years"),
    (["teardown", "--yes", "--ladder", "what"], "is no ladder's name"),
    (["migrate"], "say what to move"),
    (["migrate", "--from", "celery", "--from-queue", "q"], "give one"),
    (["migrate", "--from-queue", "kbd.v2.parking"], "redrive what is parked"),
    (["migrate", "--from-queue", "kbd.v2.poison"], "is a part of a ladder"),
    (["migrate", "--from-queue", "celery_delayed_5"], "is a part of a ladder"),
    (["migrate", "--from", "shop_celery_delayed_"], "no queue of the ladder shop_celery_"),
    (["redrive"], "there is no parking queue"),
    ([*COUNTED, "nservicebus"], "of which nsb.v2.delay- is none; give --foreign-ladder n"),
    ([*COUNTED, "shop.v2-125ms-2x31"], "of the settings, of which shop.v2-125ms-2x31 is n"),
    (["--foreign-ladder", "celery", *COUNTED, "125ms-2x31"], "leave out foreign_ladder"),
    ([*COUNTED, "kbd.v2-125ms-2x1-4x15"], "there is no journal 'kbd.v2.journal'"),
    (["--namespace", "shop", *COUNTED, "shop.v2-125ms-2x31"], "no journal 'shop.v2.journ"),
]


def test_what_cannot_be_done_is_said_with_an_exit_code(run):
    for arguments, words in IMPOSSIBLE:
        done = run(*arguments)

        assert done.exit_code == 2, arguments
        assert words in " ".join(done.output.split()), arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["status", "--json"],
        ["export", "kubernetes"],
    ],
    ids=" ".join,
)
def test_an_output_that_nobody_reads_ends_it_quietly_as_a_pipe_does(broker, vhost, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    place = ["-b", vhost.url, "-m", broker.management_url]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kombu_binary_delay.cli", *place, *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (141, "")


def test_settings_come_from_options_and_the_environment(run):
    variables = {"BINARY_DELAY_TICK": "500"}
    option = run("--tick", "1000", "explain", "1s", "--json", env=variables)
    after = run("--tick", "77", "explain", "1s", "--json", "--tick", "1000", env=variables)
    environment = run("explain", "1s", "--json", env=variables)
    radices = run("explain", "1s", "--json", "--radix", "4,3,2")

    shown = (option, after, environment, radices)
    assert [json.loads(result.output)["ladder"] for result in shown] == [
        "kbd.v2-1000ms-2x6-4x4-16x3-8x1",
        "kbd.v2-1000ms-2x6-4x4-16x3-8x1",
        "kbd.v2-500ms-2x7-4x4-16x3-8x1",
        "kbd.v2-125ms-4x1-3x1-2x1",
    ]


def test_celery_has_the_command_with_the_settings_of_its_app(broker, vhost, monkeypatch):
    app = Celery("shop", broker=vhost.url, set_as_current=False)
    app.conf.broker_transport = "kombu_binary_delay:Transport"
    app.conf.broker_transport_options = {"binary_delay": {"tick": 250, "namespace": "shop"}}
    app.conf.worker_hijack_root_logger = False
    for where in ("celery.bin.celery", "celery.app.utils"):
        monkeypatch.setattr(f"{where}.find_app", lambda *_, **__: app)
    monkeypatch.setitem(celery_command.commands, "binary-delay", binary_delay)
    management = ["--management", broker.management_url]

    by_celery = CliRunner().invoke(
        celery_command, ["-A", "shop", "binary-delay", *management, "status", "--json"]
    )
    after = CliRunner().invoke(
        celery_command,
        ["-A", "shop", "binary-delay", "explain", "1s", "-A", "shop", "--tick", "500", "--json"],
    )
    alone = CliRunner().invoke(binary_delay, ["-A", "shop", "explain", "1s", "--json"])

    assert by_celery.exit_code == 0, by_celery.output
    assert json.loads(by_celery.output)["vhost"] == vhost.name
    assert json.loads(alone.output)["ladder"] == "shop.v2-250ms-2x8-4x4-16x3-8x1"
    assert json.loads(after.output)["ladder"] == "shop.v2-500ms-2x7-4x4-16x3-8x1"


@pytest.mark.parametrize("subcommand", sorted(binary_delay.commands))
def test_every_verb_has_help_with_examples_and_json(subcommand):
    shown = CliRunner().invoke(binary_delay, [subcommand, "--help"])

    assert shown.exit_code == 0
    assert f"kombu-binary-delay {subcommand}" in shown.output
    # What Spark finds is tables, and the summary a file.
    assert "--json" in shown.output or subcommand in {
        "spark",
        "web",
        "help",
        "schedule",
    }
    examples = [line for line in shown.output.splitlines() if "binary-delay " in line]
    assert max(map(len, examples)) <= 80
    assert 0 < len(binary_delay.commands[subcommand].short_help or "") <= 55


def test_export_writes_each_format_to_a_file(run, tmp_path):
    for name in ("terraform", "definitions", "kubernetes"):
        path = tmp_path / name

        done = run("export", name, "-o", str(path), "--queue", "mail")

        assert done.exit_code == 0, done.output
        assert "mail" in path.read_text()


def test_a_teardown_of_an_old_ladder_leaves_what_the_settings_ladder_needs(
    run, tick, connect, small, vhost
):
    old = (
        (*tick, "--no-amendments", "create"),
        (*tick, "teardown", "--yes", "--ladder", small.prefix),
    )
    new = ("--queue-type", small.queue_type)
    # A worker of the new settings: it has consumed, and no message of theirs was delayed yet.
    worker = connect(binary_delay={"queue_type": small.queue_type})
    queue = Queue("mail", Exchange("events", "topic"), "k")(worker.channel())
    queue.declare()
    queue.get()
    side = {row["name"] for row in (*vhost.exchanges(), *vhost.queues())}

    none = Topology(Ladder.binary(5, 999), queue_type=small.queue_type)
    gone = run(*new, "teardown", "--yes", "--ladder", none.prefix, "--json")
    settings_ladder_is_none = run(*new, "teardown", "--yes", "--json")
    made = run(*old[0])
    removed = run(*new, "teardown", "--yes", "--ladder", small.prefix, "--force", "--json")
    left = {row["name"] for row in (*vhost.exchanges(), *vhost.queues())}
    run(*old[0])
    all_of_it = run(*old[1], "--force", "--json")

    assert made.exit_code == 0, made.output
    assert small.delivery in side
    assert small.mirror_name("events") in side
    assert left == side
    settings_ladder = Topology(queue_type=small.queue_type).prefix
    for done in (gone, removed):
        *_, last = done.output.splitlines()
        assert json.loads(last)["keeps"] == [settings_ladder]
    assert json.loads(settings_ladder_is_none.output)["exchanges"] == []
    *_, last = all_of_it.output.splitlines()
    assert json.loads(last)["keeps"] == []
    assert not [exchange for exchange in vhost.exchanges() if exchange["name"].startswith("kbd")]


def test_the_amendments_of_programs_on_another_systems_ladder_stay(broker, run, tick, vhost):
    run(*tick, "create")
    ladder = Topology(Ladder.binary(4, 1000)).prefix
    foreign = ("--foreign-ladder", "celery")

    planned = [
        run(*settings, "teardown", "--yes", "--ladder", ladder, "--dry-run", "--json")
        for settings in (tick, foreign, (*foreign, "--no-amendments"))
    ]
    gone = run(*foreign, "teardown", "--yes", "--ladder", ladder, "--force")

    streams = ["kbd.v2.amendments.ids", "kbd.v2.amendments.keys"]
    going = [json.loads(result.output.splitlines()[-1])["queues"] for result in planned]
    assert [set(streams).issubset(names) for names in going] == [True, False, True]
    assert gone.exit_code == 0, gone.output
    assert sorted(queue["name"] for queue in vhost.queues()) == streams


def test_ladders_side_by_side_are_made_verified_shown_and_removed_together(run, tick):
    if tick[-1] == "classic":
        pytest.skip("lanes are for quorum queues")
    lanes = (*tick, "--lanes", "2", "--no-amendments")
    made = run(*lanes, "create", "--json")
    sound = run(*lanes, "--declare", "never", "verify", "--json")
    shown = run(*lanes, "status", "--json")
    exported = run(*lanes, "export", "definitions")
    gone = run(*lanes, "teardown", "--yes", "--force", "--json")

    queues = json.loads(made.output)["queues"]
    assert len([name for name in queues if "-urgent" not in name]) == 2 * 4 + 1
    assert all(json.loads(line)["sound"] for line in sound.output.splitlines())
    assert all(ladder["current"] for ladder in json.loads(shown.output)["ladders"])
    assert len(json.loads(exported.output)["queues"]) == 2 * 4 + 1
    *first, last = (json.loads(line) for line in gone.stdout.splitlines())
    assert all(report["keeps"] for report in first)
    assert last["keeps"] == []


def test_ladders_side_by_side_go_together_or_not_at_all(run, tick, vhost, small):
    """Given: a parked message, which the last of them to go would take with it."""
    if tick[-1] == "classic":
        pytest.skip("lanes are for quorum queues")
    lanes = (*tick, "--lanes", "2", "--no-amendments")
    run(*lanes, "create")
    with Connection(vhost.url) as plain:
        plain.Producer().publish("m", exchange=small.parking)
    wait_until(lambda: vhost.waiting(small.parking) == {small.parking: 1})
    before = {row["name"] for row in (*vhost.exchanges(), *vhost.queues())}

    planned = run(*lanes, "teardown", "--dry-run")
    refused = run(*lanes, "teardown", "--yes")

    assert [planned.exit_code, refused.exit_code] == [3, 3]
    assert {row["name"] for row in (*vhost.exchanges(), *vhost.queues())} == before


def test_what_direct_queues_and_the_journal_need_is_missed_and_made_again(run, tick, vhost, small):
    """Given: programs that declare nothing, and what they publish to is deleted."""
    never = (*tick, "--queue-per-delay", "--journal", "stream", "--declare", "never")
    run(*never, "create")
    whole = {row["name"] for row in (*vhost.exchanges(), *vhost.queues())}
    bindings = vhost.bindings()
    with Connection(vhost.url) as plain:
        channel = plain.channel()
        channel.exchange_delete(small.direct)
        channel.queue_delete(f"{small.delivery_prefix}.journal")
        way = small.direct_bindings(2)[0]
        channel.exchange_unbind(way.destination, way.source, way.key)

    missed = [run(*never, subcommand) for subcommand in ("verify", "status")]
    mended = run(*never, "verify", "--fix")
    again = [run(*never, subcommand) for subcommand in ("verify", "status")]

    assert [result.exit_code for result in (*missed, mended, *again)] == [1, 1, 0, 0, 0], (
        mended.output
    )
    assert "a delayed publish fails with 404" in " ".join(missed[0].output.split())
    assert {row["name"] for row in (*vhost.exchanges(), *vhost.queues())} == whole
    assert len(vhost.bindings()) == len(bindings)


@pytest.mark.parametrize("apart", [False, True], ids=["one ladder", "urgent apart"])
def test_a_ladder_from_before_programs_declared_nothing_misses_no_level(  # noqa: PLR0913, PLR0917
    run, tick, slow, connect, vhost, small, monkeypatch, apart
):
    """Given: a low delay on that ladder, and a whole one of the settings."""
    declare(connect)
    publish(connect, 3 * MINUTE, tick=MINUTE)
    # As on RabbitMQ 4.0 to 4.2; what publishes must ask the broker.
    monkeypatch.setattr("kombu_binary_delay.ladder.topology.lets_urgent_hold_up", lambda _: apart)
    old = replace(small, ladder=Ladder.binary(4, MINUTE))
    never = (*tick, "--declare", "never")
    run(*never, "create", "--queue", "mail")
    looks = ("verify", "status", "verify --fix")

    names = [old.prefix, small.prefix]
    sound = [run(*never, *look.split(), "--ladder", name) for look in looks for name in names]
    with Connection(vhost.url) as plain:
        plain.channel().queue_delete(f"{old.level_name(0)}.1")
    missed = [run(*never, *look.split(), "--ladder", old.prefix) for look in looks[:2]]
    mended = run(*never, *looks[2].split(), "--ladder", old.prefix)
    with Connection(vhost.url) as plain:
        plain.channel().queue_delete(f"{small.level_name(3)}.1")
    missed.append(run(*never, "status", "--ladder", old.prefix))
    before = run(*slow, "--declare", "never", "verify")

    assert [result.exit_code for result in sound] == [0] * 6, [result.output for result in sound]
    assert [result.exit_code for result in (*missed, mended)] == [1, 1, 1, 0]
    assert f"queue {old.level_name(0)}.1: missing" in missed[1].output
    assert f"queue {small.level_name(3)}.1: missing" in missed[2].output
    assert (before.exit_code, "levels 2 to 3" in before.output) == (1, True)
    assert not vhost.waiting(f"{old.level_name(2)}.1")


def test_the_ladder_for_urgent_messages_belongs_to_all_lanes_where_it_is_filled(
    broker, run, slow, connect, vhost
):
    """Given: a ladder with two messages, of which one is urgent, that becomes two lanes."""
    if slow[-1] == "classic":
        pytest.skip("lanes are for quorum queues")
    one = Topology(Ladder.binary(4, MINUTE))
    urgent = one.for_urgent()
    lanes = (*slow, "--lanes", "2", "--no-amendments")
    declare(connect)
    publish(connect, 9 * MINUTE, tick=MINUTE)
    with Connection(vhost.url) as plain:
        operate.create(plain, urgent, urgent.whole)
        plain.Producer().publish(
            "m",
            exchange=urgent.entry_exchange(("1", "0", "0", "0")),
            routing_key=urgent.address(("1", "0", "0", "0"), Destination("", "mail")),
        )

    emptied = run(*lanes, "migrate", "--from", urgent.prefix, "--json")
    moved = run(*lanes, "migrate", "--from", one.prefix, "--json")
    gone = run(*lanes, "teardown", "--yes", "--ladder", one.prefix, "--force", "--json")
    shown = run(*lanes, "status", "--ladder", urgent.prefix, "--json")

    is_filled = (4, 0) <= broker.release < (4, 3)
    assert (emptied.exit_code, "are the same ladder" in emptied.output) == (
        (2, True) if is_filled else (0, False)
    )
    assert (moved.exit_code, json.loads(moved.output)["moved"]) == (0, 1)
    *_, last = gone.output.splitlines()
    assert (gone.exit_code, json.loads(last)["lost"]) == (0, 0)
    ladders = json.loads(shown.output)["ladders"]
    held = {
        ladder["name"]: sum(queue["messages"] for queue in ladder["queues"]) for ladder in ladders
    }
    assert (held.pop(urgent.prefix), sum(held.values())) == ((1, 1) if is_filled else (0, 2))
    assert held.keys() <= {lane.prefix for lane in one.lanes(2)}
    assert all(ladder["current"] for ladder in ladders)


def test_what_is_migrated_is_in_the_journal_once(run, slow, connect):
    declare(connect)
    settings = {"tick": MINUTE, "radix": 2, "levels": 4, "journal": "stream"}
    connection = connect(binary_delay=settings, confirm_publish=True)
    for name in ("one", "two"):
        connection.Producer().publish(
            "m", routing_key="mail", message_id=name, headers={"x-delay": 9 * MINUTE}
        )
    journal = ("--journal", "stream")
    wider = (*journal, "--tick", str(2 * MINUTE), *slow[2:])

    moved = run(*wider, "migrate", "--from", f"{MINUTE}ms-2x4", "--json")
    listed = run(*wider, "tasks", "--source", "journal", "--json")

    assert (moved.exit_code, json.loads(moved.output)["moved"]) == (0, 2)
    assert sorted(task["id"] for task in json.loads(listed.output)["tasks"]) == ["one", "two"]


def test_a_message_of_another_user_stays_parked_and_holds_up_no_others(  # noqa: PLR0913, PLR0917
    run, tick, user, connect, vhost, small
):
    """Given: RabbitMQ refuses what has another ``user_id`` than who sends it."""
    declare(connect)
    theirs = connect("amqp", url=user())
    run(*tick, "create", "--queue", "mail")
    key = small.address((), Destination("", "mail"))
    for more in ({}, {}, {"user_id": theirs.userid}, {}):
        theirs.Producer().publish("m", exchange=small.parking, routing_key=key, **more)
    wait_until(lambda: vhost.waiting(small.parking) == {small.parking: 4})

    first = run(*tick, "redrive", "--json")
    # What stays is ready again a moment later.
    wait_until(lambda: vhost.waiting(small.parking) == {small.parking: 1})

    assert first.exit_code == 1, first.output
    assert "tag impersonator" in first.output
    assert vhost.waiting("mail") == {"mail": 3}


# -- what was done without the transport, and what is not known -----------------------------------


def bind(url, method, queue, exchange, key):
    """Bind or unbind as a program without the transport does."""
    with Connection(url) as connection:
        getattr(connection.channel(), method)(queue, exchange, key)


@pytest.mark.parametrize("method", ["queue_unbind", "queue_bind"])
def test_what_was_bound_or_unbound_without_the_transport_is_found_and_mended(  # noqa: PLR0913, PLR0917
    method, run, tick, connect, vhost, small
):
    ours = connect(binary_delay={"tick": 1000, "radix": 2, "levels": 4}, confirm_publish=True)
    events = Exchange("events", "topic")
    other = Queue("other", events, "x")(ours.channel())
    other.declare()
    declare(connect)
    if method == "queue_unbind":
        Queue("mail", events, "order.*")(ours.channel()).declare()
    ours.Producer().publish("m", exchange="events", routing_key="x", headers={"x-delay": 1000})
    bind(vhost.url, method, "mail", "events", "order.*")

    before = run(*tick, "verify")
    planned = run(*tick, "create", "--dry-run", "--json")
    still = run(*tick, "verify")
    mended = run(*tick, "create", "--json")
    sound = run(*tick, "verify")
    ours.Producer().publish(
        "m", exchange="events", routing_key="order.paid", headers={"x-delay": 1000}
    )

    removed = int(method == "queue_unbind")
    assert [result.exit_code for result in (before, still, mended, sound)] == [1, 1, 0, 0], (
        before.output
    )
    assert ("no such binding any more" if removed else "is not repeated") in before.output
    for result in (planned, mended):
        assert json.loads(result.output)["removed_bindings"] == removed
    place = small.parking if removed else "mail"
    wait_until(lambda: vhost.waiting(place) == {place: 1})


def test_create_adds_no_second_way_to_a_queue_that_its_owner_bound(  # noqa: PLR0913, PLR0917
    run, tick, connect, collect, vhost, small
):
    """Given: it has a relay as well, made by a publisher that knew no more than its name."""
    if small.queue_type == "classic":
        pytest.skip("classic levels have no relays")
    settings = {"tick": 1000, "radix": 2, "levels": 4}
    owner, publisher = (connect(binary_delay=settings) for _ in range(2))
    Queue("mail", Exchange("events", "topic"), "k")(owner.default_channel).declare()
    owner.default_channel.basic_get("mail")
    publisher.Producer().publish("m", routing_key="mail", headers={"x-delay": 1000})

    made = run(*tick, "create", "--exchange", "events")
    sound = run(*tick, "verify")
    publisher.Producer().publish("m", "k", exchange="events", headers={"x-delay": 1000})

    assert (made.exit_code, sound.exit_code) == (0, 0), sound.output
    assert small.queue_relay_name("mail") in {row["name"] for row in vhost.queues()}
    # Not by our transport, which would bind the queue once more.
    assert len(collect(connect("amqp"), [Queue("mail")], 2)) == 2


@pytest.mark.parametrize("how", ["argument", "policy"])
@pytest.mark.parametrize("exchange", ["", "events"])
def test_a_full_queue_that_refuses_is_named_and_holds_up_nobody_when_it_is_mended(  # noqa: PLR0913, PLR0917
    how, exchange, run, tick, connect, vhost, small
):
    """Given: a queue declared without the transport, and led to by somebody who did not know."""
    if small.queue_type == "classic":
        pytest.skip("a classic level passes messages on at most once, and is never held up")
    limits = {"max-length": 1, "overflow": "reject-publish"}
    arguments = {f"x-{name}": value for name, value in limits.items()} if how == "argument" else {}
    plain = connect("amqp")
    Queue("full", Exchange("events", "topic"), "k", queue_arguments=arguments)(
        plain.channel()
    ).declare()
    declare(connect)
    ways = small.whole + small.to_queue("full") + small.mirror("events")
    ways += Part(bindings=small.mirror_bindings("events", "topic", "full", "k", to_queue=True))
    with Connection(vhost.url, connect_timeout=PATIENCE) as operator:
        operate.create(operator, small, ways + small.to_queue("mail"))
    if how == "policy":
        policy = {"pattern": "^full$", "definition": limits, "apply-to": "queues"}
        vhost.broker.api("PUT", f"policies/{vhost.name}/limits", policy)
        wait_until(lambda: any(row.get("policy") for row in vhost.queues()))

    before = run(*tick, "verify")
    mended = run(*tick, "create")
    sound = run(*tick, "verify")
    sender = connect(binary_delay={"tick": 1000, "radix": 2, "levels": 4, "declare": "never"})
    key = "k" if exchange else "full"
    producer = sender.Producer()
    # More than a level's dead-letter worker has in hand: 32, or 128 as we recommend.
    for _ in range(600):
        producer.publish("m", key, exchange=exchange, headers={"x-delay": 1000})
    time.sleep(2)
    sender.Producer().publish("m", "mail", headers={"x-delay": 1000})

    assert [result.exit_code for result in (before, mended, sound)] == [1, 0, 0], sound.output
    assert "it may refuse messages" in before.output
    assert "the queue may refuse messages" in before.output
    assert ("the setting relays" in before.output) == (how == "policy")
    wait_until(lambda: vhost.waiting("mail") == {"mail": 1}, "held up")


def test_status_names_a_level_that_is_held_up(run, tick, vhost, small):
    """Given: a full queue that rejects and has no relay, as somebody bound it."""
    if small.queue_type == "classic":
        pytest.skip("a classic level passes messages on at most once, and is never held up")
    limits = {"x-max-length": 1, "x-overflow": "reject-publish"}
    with Connection(vhost.url, connect_timeout=PATIENCE) as operator:
        channel = operator.channel()
        Queue("full", queue_arguments=limits)(channel).queue_declare()
        operate.create(operator, small, small.whole + small.to_queue("full"))
        for _ in range(600):
            way = small.address(("1",), Destination("", "full"))
            channel.basic_publish(amqp.Message("m", delivery_mode=2), small.level_name(0), way)

    def held_up():
        return "due and not taken" in run(*tick, "status").output

    wait_until(held_up, "the level is named")


@pytest.mark.own_broker
@pytest.mark.slow
def test_what_a_node_that_is_down_holds_is_never_taken_for_nothing(slow):
    """Given: a cluster whose other node has all leaders, or all classic queues."""
    old = Topology(Ladder.binary(4, MINUTE), queue_type=slow[-1])
    level = f"{old.level_name(3)}.1"
    with Cluster(os.environ.get("RABBITMQ_ROOT"), size=2) as cluster:
        here, other = cluster
        confirmed = {"confirm_publish": True}
        with Connection(other.url, transport_options=confirmed) as connection:
            operate.create(connection, old, old.whole)
            for name in (level, old.parking):
                connection.Producer().publish("m", routing_key=name)
        with Connection(here.url) as connection:
            there = Topology(Ladder.binary(4, MINUTE), queue_type="classic")
            operate.create(connection, there, there.whole)
            connection.Producer().publish("m", routing_key=there.parking)
        other.kill()
        wait_until(lambda: cluster.running() == {here.node})

        def run(*arguments):
            place = ["-b", here.url, "-m", here.management_url, "--queue-type", slow[-1]]
            return CliRunner().invoke(binary_delay, [*place, *arguments])

        move = "migrate", "--from", old.prefix
        moved = [run(*move), run(*move, "--dry-run"), run(*move, "--json")]
        parked = [run("redrive", "--only", "mail"), run("redrive", "--dry-run", "--json")]
        shown, drawn = run("status", "--json"), run("status")
        page = _plan_a_redrive(here, slow[-1])

    assert [result.exit_code for result in (*moved, *parked, shown, drawn)] == [1] * 7
    for name, answers in ((level, moved), (old.parking, parked)):
        for answer in answers:
            said = " ".join(answer.output.split())
            assert re.search(rf"{name}[^:]*: it has no leader, or is not up", said), said
    assert "nothing is parked" not in parked[0].output
    assert re.search(
        rf"^{old.prefix} .*\nno messages that are known of", drawn.output, re.MULTILINE
    )
    troubles = json.loads(shown.stdout)["troubles"]
    for name in (level, old.parking):
        assert any(trouble.startswith(f"{name}: it has no leader") for trouble in troubles), (
            troubles
        )
    assert "Redrive 1 message<" in page
    assert f"{old.parking}: it has no leader" in page


def _plan_a_redrive(node, queue_type):
    """Return the page that asks whether to send on what is parked on a node of a cluster."""
    app = asgi_app(
        None,
        broker=node.url,
        management=node.management_url,
        settings={"queue_type": queue_type},
        allow_changes=True,
    )
    with TestClient(app, base_url="http://127.0.0.1") as client:
        wait_until(lambda: "Redrive what is parked" in client.get("/now?part=top").text)
        [token] = re.findall(
            r'name="token" value="([0-9a-f]{64})"', client.get("/now?part=top").text
        )
        return client.post("/plan", data={"action": "redrive", "token": token}).text


@pytest.mark.slow
def test_many_lanes_are_made_on_an_empty_virtual_host(run, topology):
    """Given: more names that do not exist than the broker lets a connection have channels."""
    if topology.queue_type == "classic":
        pytest.skip("lanes are for quorum queues")

    planned = run("--lanes", "40", "create", "--dry-run", "--json")

    assert planned.exit_code == 0, planned.output
    assert len(json.loads(planned.output)["exchanges"]) > 2047


def test_a_ladder_that_does_not_exist_is_no_success(run, tick):
    for arguments, code in (
        (["verify", "--ladder", "777ms-2x4"], 1),
        (["status", "--ladder", "777ms-2x4"], 2),
        (["migrate", "--from", "777ms-2x4"], 2),
        (["migrate", "--from", "777ms-2x4", "--dry-run"], 2),
        (["migrate", "--from", "nservicebus"], 2),
        (["transfer", "--to-broker", "amqp://localhost/x"], 2),
    ):
        done = run(*tick, *arguments)

        assert done.exit_code == code, done.output
        assert "sound: nothing" not in done.output
        assert "0 messages" not in done.output


@pytest.fixture
def another(broker):
    """Another virtual host of the same broker."""
    there = broker.vhost()
    yield there
    there.delete()


@pytest.mark.parametrize("empty", [True, False])
def test_whoever_asks_changes_nothing(  # noqa: PLR0913, PLR0917
    empty, run, tick, connect, vhost, another, small
):
    """Given: nothing at all, or a ladder with faults of every kind, a message, and a parked one."""
    if not empty:
        declare(connect)
        publish(connect, 9000)
        publish(connect, 1, queue="gone")
        with Connection(vhost.url, connect_timeout=PATIENCE) as operator:
            channel = operator.channel()
            # As the one that an earlier release of ours deleted when it asked for its type.
            channel.exchange_declare("temporary", "fanout", durable=False, auto_delete=True)
            operate.create(operator, small, small.mirror("gone") + small.queue_relay("mail"))
            channel.queue_unbind("mail", small.queue_relay_name("mail"), "")
        wait_until(lambda: vhost.waiting(small.parking) == {small.parking: 1})
    before, there = what_exists(vhost), what_exists(another)

    for arguments, codes in (
        (["verify"], (0, 1)),
        (["verify", "--ladder", "777ms-2x4"], (1, 1)),
        (["status"], (0, 1)),
        (["explain", "10s"], (0, 0)),
        (["export", "definitions"], (0, 0)),
        (["create", "--dry-run"], (0, 0)),
        (["create", "--queue", "mail", "--exchange", "amq.topic", "--dry-run"], (2, 0)),
        (["redrive", "--dry-run"], (2, 0)),
        (["migrate", "--from", "777ms-2x4", "--dry-run"], (2, 2)),
        (["transfer", "--to-broker", another.url, "--dry-run"], (2, 0)),
        (["prune", "--dry-run"], (0, 0)),
        (["teardown", "--dry-run", "--force"], (0, 0)),
        (["--journal", "stream", "--queue-per-delay", "create", "--dry-run"], (0, 0)),
    ):
        done = run(*tick, *arguments)

        assert done.exit_code == codes[not empty], done.output
        assert what_exists(vhost) == before, arguments
    assert what_exists(another) == there
    assert empty or vhost.waiting(small.parking) == {small.parking: 1}


def what_exists(vhost):
    return (
        {(row["name"], row["type"], str(row["arguments"])) for row in vhost.exchanges()},
        {(row["name"], str(row["arguments"])) for row in vhost.queues()},
        {(row["source"], row["destination"], row["routing_key"]) for row in vhost.bindings()},
    )
