"""What operators do with a ladder, on a real broker."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote
from zlib import crc32

import amqp
import pytest
from kombu import Connection, Exchange, Queue

from dev.broker import Broker
from kombu_binary_delay import Ladder, Settings, Topology
from kombu_binary_delay.export import definitions
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.parts import Part
from kombu_binary_delay.ladder.parts import Queue as PartQueue
from kombu_binary_delay.ladder.versions import STREAMS_ALWAYS_SINCE
from kombu_binary_delay.operate import (
    Management,
    OperationError,
    RefusedError,
    Snapshot,
    UnreachableError,
    create,
    declare,
    explain,
    probe,
    prune,
    ready,
    status,
    teardown,
    verify,
    ways,
)
from kombu_binary_delay.operate.remedy import PERMISSIONS
from kombu_binary_delay.operate.teardown import held
from tests.waits import wait_until


@pytest.fixture
def small(topology):
    """Four levels of a second, of the queue type that this broker can have."""
    return Topology(Ladder.binary(4, 1000), queue_type=topology.queue_type)


@pytest.fixture
def slow(topology):
    """The same of a minute, where a message is to wait until the test has ended."""
    return Topology(Ladder.binary(4, MINUTE), queue_type=topology.queue_type)


@pytest.fixture
def plain(vhost):
    """What an operator has: a connection by Kombu's own transport."""
    with Connection(vhost.url, connect_timeout=30) as connection:
        yield connection


@pytest.fixture
def management(broker, plain):
    return Management.of(plain, broker.management_url)


@pytest.fixture
def operator(plain, management, vhost):
    return plain, management, vhost


MINUTE = 60_000  # in milliseconds
SMALL = {"tick": 1000, "radix": 2, "levels": 4}
SLOW = {**SMALL, "tick": MINUTE}


def publish(connection, queue, *delays):
    for delay in delays:
        connection.Producer().publish("m", routing_key=queue, headers={"x-delay": delay})


def errors(verification):
    return [difference for difference in verification.differences if difference.severity == "error"]


# -- create, verify, export ----------------------------------------------------------------------


def test_what_create_makes_is_what_verify_expects(plain, management, small):
    before = verify(management, small, declares=False)
    planned = create(plain, small, small.whole, dry_run=True)
    nothing = verify(management, small, declares=False)
    made = create(plain, small, small.whole)
    again = create(plain, small, small.whole)

    assert errors(before) == errors(nothing) != []
    assert planned == made
    assert set(made.queues) == {queue.name for queue in small.whole.queues}
    assert verify(management, small, declares=False).sound
    assert (again.exchanges, again.queues) == ((), ())


def test_imported_definitions_are_what_the_transport_declares(broker, plain, management, small):
    part = small.whole + small.exchange_relay("my.headers")
    create(plain, small, part)
    other = broker.vhost()
    try:
        broker.api("POST", "definitions", json.loads(definitions(part, other.name)))
        with Connection(other.url) as connection:
            imported = Snapshot.read(Management.of(connection, broker.management_url))
    finally:
        other.delete()
    declared = Snapshot.read(management)

    for kind in ("exchanges", "queues"):
        ours, theirs = getattr(declared, kind), getattr(imported, kind)
        assert ours.keys() == theirs.keys()
        for name, row in ours.items():
            for key in ("type", "durable", "auto_delete", "arguments"):
                assert row[key] == theirs[name][key], (name, key)
    assert declared.bindings == imported.bindings


def test_a_topology_that_the_transport_has_made_is_sound(connect, plain, management, small):
    connection = connect(binary_delay={"tick": 1000, "radix": 2, "levels": 4}, confirm_publish=True)
    Queue("mail", Exchange("events", "topic"), "order.*")(connection.channel()).declare()
    publish(connection, "mail", 3000)

    verification = verify(management, small)

    assert verification.sound, verification
    assert "levels 2 to 3" in {difference.what for difference in verification.differences}


def test_a_way_to_an_exchange_repeats_its_bindings_and_leads_to_its_queues_by_name(
    connect, plain, management, small, collect
):
    channel = plain.channel()
    queue = Queue("mail", Exchange("events", "topic"), "order.*")(channel)
    queue.declare()
    part = small.whole + ways(small, Snapshot.read(management), [], ["events"])
    create(plain, small, part)
    connection = connect(binary_delay={"tick": 1000, "radix": 2, "levels": 4, "declare": "never"})

    connection.Producer().publish(
        1, exchange="events", routing_key="order.paid", headers={"x-delay": 1000}
    )
    publish(connection, "mail", 1000)

    arrivals = collect(connection, [queue], 2)
    assert {arrival.exchange for arrival in arrivals} == {"", "events"}
    assert verify(management, small, declares=False).sound


def test_a_way_to_nothing_is_refused(plain, management, small):
    snapshot = Snapshot.read(management)

    with pytest.raises(OperationError, match="'nowhere' does not exist"):
        ways(small, snapshot, ["nowhere"], [])
    with pytest.raises(OperationError, match="'nothing' does not exist"):
        ways(small, snapshot, [], ["nothing"])


@pytest.mark.parametrize(
    ("definition", "causes"),
    [
        ({"message-ttl": 100}, "leave early"),
        ({"expires": 600_000}, "deleted when it is idle"),
        ({"max-length": 5}, "a full queue"),
        ({"dead-letter-routing-key": "k"}, "lose their address"),
        ({"max-length": 5, "overflow": "drop-head"}, "drops its oldest"),
    ],
)
def test_a_policy_that_breaks_the_ladder_is_named(operator, small, definition, causes):
    plain, management, vhost = operator
    create(plain, small, small.whole)
    policy = {"pattern": "level", "definition": definition, "apply-to": "queues", "priority": 1}
    harmless = {"pattern": "level", "definition": {"max-in-memory-length": 9}, "priority": 0}
    vhost.broker.api("PUT", f"policies/{vhost.name}/harmless", harmless)
    vhost.broker.api("PUT", f"policies/{vhost.name}/mean", policy)

    differences = errors(verify(management, small))

    assert {difference.what for difference in differences} == {"policy mean"}
    assert any(causes in difference.causes for difference in differences)


@pytest.mark.parametrize(
    ("definition", "tick", "ticks"),
    # A quarter of an hour, of which nobody waits for the end; and a second.
    [({"message-ttl": 100}, MINUTE, 15), ({"dead-letter-routing-key": "k"}, 1000, 1)],
    ids=["leave early", "lose their address"],
)
def test_a_policy_does_what_verify_says(  # noqa: PLR0913, PLR0917
    operator, connect, topology, definition, tick, ticks
):
    plain, _, vhost = operator
    ladder = Topology(Ladder.binary(4, tick), queue_type=topology.queue_type)
    create(plain, ladder, ladder.whole)
    policy = {"pattern": "level", "definition": definition, "apply-to": "queues"}
    vhost.broker.api("PUT", f"policies/{vhost.name}/mean", policy)
    connection = connect(binary_delay={**SMALL, "tick": tick})
    Queue("mail")(connection.channel()).declare()
    place = "mail" if "message-ttl" in definition else ladder.parking

    def one_is_there():
        # One more each time: RabbitMQ tells the queues of their policy in the background.
        publish(connection, "mail", ticks * tick)
        return vhost.waiting(place).get(place)

    wait_until(one_is_there)


@pytest.mark.own_broker
@pytest.mark.parametrize(
    ("definition", "breaks"),
    [
        ({"overflow": "drop-head"}, True),
        ({"overflow": "reject-publish"}, False),
        ({"dead-letter-strategy": "at-most-once"}, False),
        ({"dead-letter-exchange": "elsewhere"}, False),
    ],
)
def test_a_policy_makes_a_level_lose_messages_only_where_verify_says_so(
    operator, broker, small, definition, breaks
):
    plain, management, vhost = operator
    if small.queue_type == "classic":
        pytest.skip("a classic level passes messages on at most once, whatever the policy")
    create(plain, small, small.whole)
    definition = {**definition, "max-length": 987654}
    policy = {"pattern": "level", "definition": definition, "apply-to": "queues"}
    vhost.broker.api("PUT", f"policies/{vhost.name}/mean", policy)
    level = f"{{'{vhost.name}_{small.level_name(0)}.1', node()}}"

    def state():
        return broker.ctl("eval", f"ra:local_query({level}, fun(State) -> State end).")

    # Its length shows when the policy has been applied.
    applied = wait_until(lambda: next((text for text in [state()] if "987654" in text), ""))

    assert ("at_most_once" in applied) == breaks
    assert "elsewhere" not in applied
    differences = [
        error for error in errors(verify(management, small)) if "max-length" not in error.found
    ]
    assert bool(differences) == breaks


def test_a_missing_user_and_missing_permissions_are_named(broker, vhost, plain, management, small):
    create(plain, small, small.whole)
    # As the virtual host, which exists.
    name = vhost.name
    nobody = verify(management, small, user=name)
    broker.api("PUT", f"users/{name}", {"password": "p", "tags": ""})
    try:
        none = verify(management, small, user=name)
        grant = {"configure": r"^kbd\.", "write": "^orders$", "read": ".*"}
        broker.api("PUT", f"permissions/{vhost.name}/{name}", grant)
        some = verify(management, small, user=name)
        grant["write"] = r"^kbd\."
        broker.api("PUT", f"permissions/{vhost.name}/{name}", grant)
        all_of_them = verify(management, small, user=name)
    finally:
        broker.api("DELETE", f"users/{name}")

    assert [error.found for error in errors(nobody)] == ["RabbitMQ has no such user"]
    assert [error.found for error in errors(none)] == ["none in this virtual host"]
    assert [error.found.split(" on ")[0] for error in errors(some)] == ["no write permission"]
    assert all_of_them.sound


def test_what_a_user_who_only_monitors_may_not_read_is_named(
    broker, vhost, plain, management, small
):
    create(plain, small, small.whole)
    me = f"user-{vhost.name}"
    broker.api("PUT", f"users/{me}", {"password": me, "tags": "monitoring"})
    try:
        broker.api("PUT", f"permissions/{vhost.name}/{me}", dict.fromkeys(PERMISSIONS, "^$"))
        verification = verify(replace(management, user=me, password=me), small)
    finally:
        broker.api("DELETE", f"users/{me}")

    flag = "feature flag stream_queue"
    unread = {
        difference.what: difference
        for difference in verification.differences
        if difference.found == "could not be read"
    }
    # Classic levels do without it, and later releases always have it.
    assert (flag in unread) == (broker.release < STREAMS_ALWAYS_SINCE)
    assert f"permissions of {me}" in unread
    assert all(
        f"set_user_tags {me} administrator" in difference.remedy for difference in unread.values()
    )
    assert verification.sound


def test_a_management_api_that_does_not_answer_is_named(plain):
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1 does not answer"):
        Management.of(plain, "http://127.0.0.1:1").get("overview")
    with pytest.raises(UnreachableError, match="is not the URL"):
        Management.of(plain, "localhost:15672")


# -- status --------------------------------------------------------------------------------------


def test_status_counts_what_waits_by_level_on_every_ladder(connect, plain, management, slow):
    ours = connect(binary_delay=SLOW, confirm_publish=True)
    several = {"tick": 2 * MINUTE, "radix": 2, "levels": 10}
    other = connect(binary_delay=several, confirm_publish=True)
    channel = ours.channel()
    Queue("mail")(channel).declare()
    publish(ours, "mail", 9 * MINUTE, 9 * MINUTE, 9 * MINUTE)
    publish(other, "mail", 500 * MINUTE)

    state = status(plain, management, slow)

    current, old = sorted(state.ladders, key=lambda ladder: ladder.name != slow.prefix)
    assert (current.name, current.current, current.messages) == (slow.prefix, True, 3)
    assert (old.current, old.messages) == (False, 1)
    assert {queue.queue: queue.messages for queue in current.queues if queue.messages} == {
        f"{slow.level_name(3)}.1": 3
    }
    assert [queue.latest for queue in current.queues] == [ticks * MINUTE for ticks in (1, 3, 7, 15)]
    assert current.within(15 * MINUTE) == (3, 3)
    assert current.within(MINUTE) == (0, 0)
    assert not state.troubles


def test_status_forecasts_to_the_end_of_the_ladder_and_tells_relays_from_parking(
    plain, management, small
):
    channel = plain.channel()
    retry = {"x-message-ttl": 3_600_000, "x-dead-letter-exchange": "events"}
    for name in ("retry", "jobs.parking", "jobs.poison"):
        Queue(name, Exchange("events", "topic"), name, queue_arguments=retry)(channel).declare()
    part = small.whole + small.to_queue("retry") + small.exchange_relay("headers.parking")
    relays = [small.exchange_relay_name("headers.parking")]
    part += ways(small, Snapshot.read(management), [], ["events"])
    if small.queue_type == "quorum":
        for name in ("jobs.parking", "jobs.poison"):
            part += small.queue_relay(name)
            relays.append(small.queue_relay_name(name))
    # Without a way on, what is in a relay stays there to be counted.
    stays = [
        PartQueue(queue.name, queue.arguments[:1]) if queue.name in relays else queue
        for queue in part.queues
    ]
    create(plain, small, replace(part, queues=tuple(stays)))
    for name in relays:
        plain.Producer().publish("m", routing_key=name)
    wait_until(lambda: status(plain, management, small).relays == len(relays))

    state = status(plain, management, small)

    (ladder,) = state.ladders
    assert [queue.latest for queue in ladder.queues] == [1000, 3000, 7000, 15000]
    assert (state.parked, state.troubles) == (0, ())


def test_status_tells_what_is_parked(connect, plain, management, vhost, small):
    connection = connect(binary_delay={"tick": 1000, "radix": 2, "levels": 4})
    publish(connection, "gone", 1000, 1000)
    wait_until(lambda: vhost.waiting(small.parking).get(small.parking) == 2)

    state = status(plain, management, small)

    assert state.parked == 2
    assert "2 messages parked" in state.troubles[0]


def test_status_names_a_level_that_is_stuck(plain, management, small):
    if small.queue_type == "classic":
        pytest.skip("a classic level passes messages on at most once, and is never stuck")
    Queue("full", queue_arguments={"x-max-length": 1, "x-overflow": "reject-publish"})(
        plain.channel()
    ).declare()
    # Straight behind delivery, as no application of ours would bind it.
    create(plain, small, small.whole + small.to_queue("full"))
    for _ in range(40):
        plain.Producer().publish("m", exchange=small.level_name(0), routing_key="1.@..full")

    def stuck():
        return [
            trouble
            for trouble in status(plain, management, small).troubles
            if "not taken" in trouble
        ]

    (trouble, *_) = wait_until(stuck)

    assert trouble.startswith(f"{small.level_name(0)}.1: ")


def test_what_was_created_is_there_for_others_at_once(vhost, plain, small):
    with vhost.connect() as other:
        channel = other.channel()
        for number in range(20):
            name = f"alone-{number}"
            create(plain, small, Part(queues=(PartQueue(name, (("x-queue-type", "quorum"),)),)))

            assert channel.queue_declare(name, passive=True).queue == name


# -- teardown and prune --------------------------------------------------------------------------


def test_teardown_refuses_while_messages_wait_and_changes_nothing(
    connect, plain, management, vhost, slow
):
    connection = connect(binary_delay=SLOW, confirm_publish=True)
    Queue("mail")(connection.channel()).declare()
    publish(connection, "mail", 9 * MINUTE, 9 * MINUTE)
    before = Snapshot.read(management)

    with pytest.raises(RefusedError, match=r"2 messages wait \(2 in .*level-03"):
        teardown(plain, management, slow, stats_delay=0)

    after = Snapshot.read(management)
    assert before.bindings == after.bindings
    assert before.queues.keys() == after.queues.keys()
    lost = teardown(plain, management, slow, force=True, dry_run=True)
    assert lost.lost == 2
    assert vhost.waiting(f"{slow.level_name(3)}.1") == {f"{slow.level_name(3)}.1": 2}
    assert teardown(plain, management, slow, force=True).lost == 2
    assert not [exchange for exchange in vhost.exchanges() if exchange["name"].startswith("kbd")]
    assert [queue["name"] for queue in vhost.queues()] == ["mail"]


@pytest.mark.own_broker
def test_a_queue_whose_leader_is_busy_is_not_taken_for_empty(
    broker, plain, vhost, small, monkeypatch
):
    """On a machine with more to do than it has processors: most round trips are slow.

    The probe's clock is ours, so that no more of them are slow than we say.
    """
    if small.queue_type == "classic":
        pytest.skip("a classic queue has no leader that could be away")
    # Not a level: its message would expire where this takes long.
    name, leader = "busy", f"{{'{vhost.name}_busy', node()}}"
    Queue(name, queue_arguments={"x-queue-type": "quorum"})(plain.channel()).declare()
    plain.Producer().publish("m", routing_key=name)
    asking = probe.Probe(plain)
    broker.ctl("eval", f"sys:suspend({leader}).")
    answers: list[int] = []
    clock: Any = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    ask, ping = amqp.Channel.queue_declare, amqp.Channel.exchange_declare

    def asked(channel, *arguments, **options):
        if len(answers) == 12:
            broker.ctl("eval", f"sys:resume({leader}).")
        begin = time.monotonic()
        answer = ask(channel, *arguments, **options)
        # RabbitMQ waits 250 ms for a leader.
        clock.now += 0.25 if len(answers) < 12 else time.monotonic() - begin
        answers.append(answer.message_count)
        return answer

    def slow(channel, *arguments, **options):
        clock.now += 0.001 if len(answers) % 3 == 2 else 0.1
        return ping(channel, *arguments, **options)

    monkeypatch.setattr(probe, "time", clock)
    monkeypatch.setattr(amqp.Channel, "queue_declare", asked)
    monkeypatch.setattr(amqp.Channel, "exchange_declare", slow)

    assert asking.ready(name) == 1
    # What RabbitMQ said of it meanwhile.
    assert answers[:12] == [0] * 12


@pytest.mark.slow
@pytest.mark.own_broker
def test_a_ladder_with_a_queue_that_has_no_leader_stays(slow):
    if slow.queue_type == "classic":
        pytest.skip("a classic queue has no leader that could be away")
    name = f"{slow.level_name(3)}.1"
    # On a broker that nobody needs afterwards.
    with Broker(os.environ.get("RABBITMQ_ROOT")) as broker:
        vhost = broker.vhost()
        leader = f"{{'{vhost.name}_{name}', node()}}"
        with Connection(vhost.url) as plain:
            management = Management.of(plain, broker.management_url)
            create(plain, slow, slow.whole)
            plain.Producer().publish("m", routing_key=name)
            wait_until(lambda: any(row.get("messages") for row in vhost.queues()))
            before = Snapshot.read(management)
            broker.ctl("eval", f"ra:stop_server(quorum_queues, {leader}).")
            assert plain.channel().queue_declare(name, passive=True).message_count == 0

            with pytest.raises(RefusedError, match=f"1 messages wait|number of messages in {name}"):
                teardown(plain, management, slow)

            after = Snapshot.read(management)
    assert (before.bindings, before.queues.keys()) == (after.bindings, after.queues.keys())


@pytest.mark.own_broker
def test_messages_are_counted_as_they_are_now_though_the_api_keeps_slow_listings(
    own_broker, plain, vhost
):
    """Where a listing takes seconds, RabbitMQ returns it again for five times as long."""
    # What keeps the listings reads this when it starts, which it does when it is asked again.
    multiplier = (
        "application:set_env(rabbitmq_management, management_db_cache_multiplier, {}), "
        "S = rabbit_mgmt_db_cache_sup, "
        "[{{supervisor:terminate_child(S, Id), supervisor:delete_child(S, Id)}} "
        "|| {{Id, _, _, _}} <- supervisor:which_children(S)]."
    )
    management = Management.of(plain, own_broker.management_url)
    channel = plain.channel()
    Queue("mail")(channel).declare()
    wait_until(lambda: any(row.get("messages") == 0 for row in vhost.queues()))
    own_broker.ctl("eval", multiplier.format(10**8))
    try:
        assert not held(plain, management, ["mail"], stats_current=True)
        plain.Producer().publish("m", routing_key="mail")
        # What a consumer has is counted by the API alone.
        wait_until(lambda: channel.basic_get("mail", no_ack=False))

        wait_until(lambda: held(plain, management, ["mail"]) == {"mail": 1})
    finally:
        own_broker.ctl("eval", multiplier.format(5))


def test_the_journal_is_no_message_that_waits_and_stays(plain, management, vhost, small):
    create(plain, small, small.whole)
    journal = Queue("kbd.v2.journal", queue_arguments={"x-queue-type": "stream"})
    journal(plain.channel()).declare()
    plain.Producer().publish("event", routing_key=journal.name)
    wait_until(lambda: vhost.waiting(journal.name))

    done = teardown(plain, management, small, stats_delay=0)

    assert (done.lost, done.keeps) == (0, ())
    assert {queue["name"] for queue in vhost.queues()} == {journal.name}


def test_an_empty_ladder_goes_and_what_others_need_stays(  # noqa: PLR0913, PLR0917
    connect, plain, management, vhost, small, slow
):
    connection = connect(binary_delay=SLOW)
    Queue("mail")(connection.channel()).declare()
    publish(connection, "mail", 10 * MINUTE)
    create(plain, small, small.whole)

    removed = teardown(plain, management, small, stats_delay=0)

    assert removed.keeps == (slow.prefix,)
    left = {exchange["name"] for exchange in vhost.exchanges()} | {
        queue["name"] for queue in vhost.queues()
    }
    assert not [name for name in left if name.startswith(small.prefix)]
    assert {small.delivery, small.parking} <= left
    # And when the last one goes, so does all of it.
    with pytest.raises(RefusedError):
        teardown(plain, management, slow, stats_delay=0)
    teardown(plain, management, slow, force=True)
    assert {queue["name"] for queue in vhost.queues()} == {"mail"}


def test_a_message_that_comes_in_during_a_teardown_lets_all_be_put_back(
    connect, plain, management, vhost, slow
):
    connection = connect(binary_delay=SLOW)
    Queue("mail")(connection.channel()).declare()
    create(plain, slow, slow.whole + slow.to_queue("mail"))
    before = Snapshot.read(management)
    queue = f"{slow.level_name(3)}.1"

    def come_in(text):
        # By the default exchange, as no program would: the way that is left.
        plain.Producer().publish(
            "m",
            routing_key=queue,
            headers={"x-binary-delay": {"due": 0}},
        )
        wait_until(lambda: vhost.waiting(queue) == {queue: 1})

    with pytest.raises(RefusedError, match="put back as it was"):
        teardown(plain, management, slow, stats_delay=0, notify=come_in)

    after = Snapshot.read(management)
    assert before.bindings == after.bindings
    assert before.exchanges.keys() == after.exchanges.keys()
    assert vhost.waiting(queue) == {queue: 1}


@pytest.mark.parametrize("queue", [1, 4])
@pytest.mark.parametrize(
    ("way", "queue_type"), [("ladder", None), ("queue", None), ("queue", "classic")]
)
def test_what_comes_in_after_the_last_look_is_not_deleted(  # noqa: PLR0913, PLR0917
    connect, plain, management, vhost, slow, monkeypatch, way, queue_type, queue
):
    ladder = replace(slow, queue_type=queue_type or slow.queue_type)
    settings = {**SLOW, "queue_type": ladder.queue_type}
    connection = connect(binary_delay=settings, confirm_publish=True)
    straight = connect("amqp", confirm_publish=True)
    Queue("mail")(connection.channel()).declare()
    create(plain, ladder, ladder.whole + ladder.to_queue("mail"))
    before = Snapshot.read(management)
    level = f"{ladder.level_name(3)}.1"
    deletions = []

    def delete_empty(*arguments):
        deletions.append(1)
        if len(deletions) == queue:
            if way == "ladder":
                # A program that runs makes it again, if it is gone.
                publish(connection, "mail", 9 * MINUTE)
            else:
                straight.Producer().publish("m", routing_key=level)
        declare.delete_empty(*arguments)

    monkeypatch.setattr(sys.modules[held.__module__], "delete_empty", delete_empty)
    with pytest.raises(RefusedError, match="put back as it was"):
        teardown(plain, management, ladder, stats_delay=0)

    wait_until(lambda: vhost.waiting(level) == {level: 1})
    after = Snapshot.read(management)
    assert before.bindings <= after.bindings
    assert before.queues.keys() <= after.queues.keys()


def test_a_ladder_that_a_program_is_making_stays(  # noqa: PLR0913, PLR0917
    connect, plain, management, vhost, slow, monkeypatch
):
    connection = connect(binary_delay=SLOW, confirm_publish=True)
    Queue("mail")(connection.channel()).declare()
    two = sum(slow.levels[:2], slow.base)
    create(plain, slow, two + slow.to_queue("mail"))
    made: list[Snapshot] = []

    def make_more(*arguments, **options):
        if not made:
            publish(connection, "mail", 9 * MINUTE)
            made.append(Snapshot.read(management))
        return held(*arguments, **options)

    monkeypatch.setattr(sys.modules[held.__module__], "held", make_more)
    with pytest.raises(RefusedError, match="is declaring parts of"):
        teardown(plain, management, slow, stats_delay=0)

    after = Snapshot.read(management)
    assert after.bindings == made[0].bindings
    assert after.queues.keys() == made[0].queues.keys()


def test_a_teardown_that_is_interrupted_puts_all_back(plain, management, small):
    Queue("mail")(plain.channel()).declare()
    create(plain, small, small.whole + small.to_queue("mail"))
    before = Snapshot.read(management)

    def interrupt(text):
        plain.close()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        teardown(plain, management, small, notify=interrupt)

    after = Snapshot.read(management)
    assert before.bindings == after.bindings
    assert before.exchanges.keys() == after.exchanges.keys()


def test_a_teardown_whose_management_api_goes_away_puts_all_back(plain, management, small):
    create(plain, small, small.whole)
    before = Snapshot.read(management)
    api = replace(management)

    def go_away(text):
        object.__setattr__(api, "url", "http://127.0.0.1:1")

    with pytest.raises(UnreachableError, match=r"does not answer.* put back as it was"):
        teardown(plain, api, small, stats_delay=0, notify=go_away)

    after = Snapshot.read(management)
    assert before.bindings == after.bindings
    assert before.exchanges.keys() == after.exchanges.keys()


@pytest.mark.parametrize("raised", [None, KeyboardInterrupt])
def test_a_teardown_whose_broker_goes_away_says_what_is_half_removed(
    vhost, management, small, raised
):
    said = []
    with Connection(vhost.url) as plain:
        Queue("mail")(plain.channel()).declare()
        create(plain, small, small.whole + small.to_queue("mail"))

        def go_away(text):
            said.append(text)
            plain.close()
            plain.port = 1
            if raised and len(said) == 1:
                raise raised

        with pytest.raises(raised or UnreachableError) as error:
            teardown(plain, management, small, stats_delay=0, notify=go_away)

    words = said[-1] if raised else str(error.value)
    assert f"the ladder {small.prefix} is half removed" in words
    mend = f"when RabbitMQ answers, run 'verify --fix --ladder {small.prefix}', and 'create' with"
    assert f"Connection refused; {mend} --queue for each of mail, to which" in words


@pytest.mark.parametrize(
    ("configure", "read", "words"),
    [
        ("^$", ".*", "grant this user the permission configure"),
        ("^{prefix}", ".*", "put back as it was"),
        ("^{prefix}", "^$", "is half removed: its exchanges {prefix}.level-"),
    ],
)
def test_a_teardown_that_is_refused_says_what_it_has_removed(  # noqa: PLR0913, PLR0917
    plain, management, user, small, configure, read, words
):
    create(plain, small, small.whole)
    before = Snapshot.read(management)

    with (
        Connection(user(configure=configure.format(prefix=small.prefix), read=read)) as theirs,
        pytest.raises(OperationError, match="ACCESS_REFUSED") as error,
    ):
        teardown(theirs, management, small, stats_delay=0)

    said, after = str(error.value), Snapshot.read(management)
    assert words.format(prefix=small.prefix) in said
    assert f"{small.delivery} are deleted" not in said
    if "half removed" not in said:
        assert before.bindings == after.bindings
        assert before.exchanges.keys() == after.exchanges.keys()


def test_a_forced_teardown_that_is_refused_halfway_can_be_repeated(plain, management, user, small):
    create(plain, small, small.whole)

    with (
        Connection(user(configure=f"^{small.prefix}")) as theirs,
        pytest.raises(UnreachableError, match=rf"ACCESS_REFUSED.*{small.prefix} is half removed"),
    ):
        teardown(theirs, management, small, force=True)

    teardown(plain, management, small, force=True)
    after = Snapshot.read(management)
    assert not [name for name in (*after.exchanges, *after.queues) if small.owns(name)]


@pytest.mark.parametrize("becomes", ["gone", "exclusive"])
def test_an_interrupted_teardown_puts_back_all_that_can_be(
    connect, plain, management, small, becomes
):
    for name in ("first", "mail"):
        Queue(name)(plain.channel()).declare()
    create(plain, small, small.whole + small.to_queue("first") + small.to_queue("mail"))
    # It is put back before what comes later in the alphabet.
    way = small.mirror_bindings("x", "direct", "first", "k", to_queue=True)
    create(plain, small, small.mirror("x") + Part(bindings=way))
    said = []

    def interrupt(text):
        said.append(text)
        if len(said) == 1:
            plain.channel().queue_delete("first")
            if becomes == "exclusive":
                Queue("first", exclusive=True)(connect("amqp").channel()).declare()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        teardown(plain, management, small, notify=interrupt)

    after = Snapshot.read(management)
    assert {
        binding.destination for binding in after.bindings if binding.source == small.to_queues
    } == {"mail"}
    assert set(small.whole.bindings) <= after.bindings
    assert "but for the bindings of first" in said[-1]


def test_prune_removes_queues_for_one_delay_that_are_empty(  # noqa: PLR0913, PLR0917
    connect, plain, management, vhost, topology, monkeypatch
):
    tall = Topology(Ladder.binary(10, 1000), queue_type=topology.queue_type)
    settings = {**SMALL, "levels": 10, "queue_per_delay": True}
    connection = connect(binary_delay=settings, confirm_publish=True)
    Queue("mail")(connection.channel()).declare()
    publish(connection, "mail", *[5000] * 3, *[1000_000] * 3)
    idle, busy = f"{tall.direct}.5000ms", f"{tall.direct}.1000000ms"
    wait_until(lambda: vhost.waiting("mail") == {"mail": 3})
    # What has left a queue is a while longer in the broker's figures.
    wait_until(lambda: prune(plain, management, tall, dry_run=True).removed)

    limit = f"vhost-limits/{vhost.name}/max-queues"
    vhost.broker.api("PUT", limit, {"value": len(vhost.queues())})
    with pytest.raises(OperationError, match=r"queue limit .* rabbitmqctl set_vhost_limits"):
        prune(plain, management, tall, stats_delay=0)
    vhost.broker.api("DELETE", limit)

    def delete_empty(*arguments):
        # After the last look, by the way that is left.
        plain.Producer().publish("m", routing_key=idle)
        wait_until(lambda: vhost.waiting(idle)[idle])
        declare.delete_empty(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[prune.__module__], "delete_empty", delete_empty)
        assert prune(plain, management, tall, stats_delay=0).removed == ()
    wait_until(lambda: prune(plain, management, tall, dry_run=True).removed)
    planned = prune(plain, management, tall, dry_run=True)
    pruned = prune(plain, management, tall, stats_delay=0)

    assert (planned.removed, planned.kept) == ((idle,), (busy,))
    assert pruned == planned
    assert vhost.waiting(idle, busy).keys() == {busy}
    # A message walks down the levels that its publisher takes to exist.
    publish(connection, "mail", 5000)
    wait_until(lambda: vhost.waiting("mail") == {"mail": 4})


def leave_over(connection, exchange="events", queue="mail"):
    """Use an auto-delete exchange and queue, which refuses messages, and let both go."""
    channel = connection.channel()
    arguments = {"x-overflow": "reject-publish", "x-max-length": 10}
    bound = Queue(
        queue,
        Exchange(exchange, "topic", auto_delete=True),
        "k",
        auto_delete=True,
        queue_arguments=arguments,
    )(channel)
    bound.declare()
    publish(connection, queue, 1000)
    wait_until(bound.get)
    with connection.Consumer(bound, channel=channel):
        pass
    wait_until(lambda: not bound_exists(connection, queue))
    return bound


def bound_exists(connection, queue):
    with connection.clone() as other:
        return bool(ready(other, [queue]))


@pytest.mark.parametrize("name", ["events", "long" * 50])
def test_prune_removes_mirrors_and_relays_whose_originals_are_gone(  # noqa: PLR0913, PLR0917
    name, connect, plain, management, vhost, small
):
    connection = connect(binary_delay=SMALL, confirm_publish=True)
    bound = leave_over(connection, name, name)
    Queue("mail", Exchange("stay", "topic"), "k")(connection.channel()).declare()
    left = {small.mirror_name(name)}
    if small.queue_type == "quorum":
        left |= {small.queue_relay_name(name)}

    def seen():
        # What a relay has in its hands is a statistic, which may be some seconds old.
        pruned = prune(plain, management, small, dry_run=True)
        return {*pruned.exchanges, *pruned.removed} == left

    wait_until(seen)
    before = Snapshot.read(management)

    planned = prune(plain, management, small, dry_run=True)
    unchanged = Snapshot.read(management)
    pruned = prune(plain, management, small, stats_delay=0)
    after = Snapshot.read(management)

    assert (before.bindings, before.exchanges.keys()) == (
        unchanged.bindings,
        unchanged.exchanges.keys(),
    )
    assert set(planned.exchanges) | set(planned.removed) == left
    assert pruned == planned
    assert before.exchanges.keys() - after.exchanges.keys() == set(planned.exchanges)
    assert before.queues.keys() - after.queues.keys() == set(planned.removed)
    assert verify(management, small).sound
    # What comes back gets its ways anew.
    again = connect(binary_delay=SMALL, confirm_publish=True)
    bound(again.channel()).declare()
    publish(again, name, 1000)
    again.Producer().publish("m", exchange=name, routing_key="k", headers={"x-delay": 1000})
    wait_until(lambda: vhost.waiting(name) == {name: 2})


def test_prune_leaves_what_holds_messages_and_what_comes_back_meanwhile(
    connect, plain, management, vhost, small
):
    if small.queue_type == "classic":
        pytest.skip("a classic ladder has no use for relays before queues")
    connection = connect(binary_delay=SMALL, confirm_publish=True)
    bound = leave_over(connection)
    full = small.queue_relay("gone")
    # Without a way on, what is in a relay stays there to be counted.
    (relay,) = full.queues
    stays = replace(full, queues=(PartQueue(relay.name, relay.arguments[:1]),), bindings=())
    create(plain, small, replace(stays, bindings=small.queue_relay("gone").bindings[:1]))
    plain.Producer().publish("m", routing_key=relay.name)
    wait_until(lambda: vhost.waiting(relay.name) == {relay.name: 1})
    before = Snapshot.read(management)
    again = connect("amqp")

    pruned = prune(
        plain,
        management,
        small,
        stats_delay=0,
        # By a program without the transport, which makes nothing of ours anew.
        notify=lambda _: bound(again.channel()).declare(),
    )

    after = Snapshot.read(management)
    assert (pruned.removed, pruned.exchanges) == ((), ())
    assert before.bindings <= after.bindings
    assert vhost.waiting(relay.name) == {relay.name: 1}
    connection.Producer().publish("m", exchange="events", routing_key="k", headers={"x-delay": 1})
    wait_until(lambda: vhost.waiting("mail") == {"mail": 1})


def test_names_with_slashes_are_asked_for_as_they_are(broker, small):
    name = f"a/b {uuid.uuid4().hex}"
    broker.api("PUT", f"vhosts/{quote(name, safe='')}", {})
    try:
        url = f"{broker.url.removesuffix('/')}{quote(name, safe='')}"
        with Connection(url) as connection:
            management = Management.of(connection, broker.management_url)
            create(connection, small, small.whole + Part())
            assert verify(management, small, declares=False).sound
    finally:
        broker.api("DELETE", f"vhosts/{quote(name, safe='')}")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"relays": ("ma*",)},
        {"lanes": 3},
        {"queue_per_delay": True},
        {"lanes": 2, "queue_per_delay": True, "relays": ("mail",)},
    ],
    ids=str,
)
def test_explain_and_the_broker_agree(connect, collect, small, monkeypatch, more):
    monkeypatch.setattr("kombu_binary_delay.routing.knowledge.LOOK_AGAIN", 10**15)
    settings = {**SMALL, **more, "queue_type": small.queue_type}
    connection = connect(binary_delay=settings)
    queue = Queue("mail")(connection.channel())
    queue.declare()
    # Of the first lane, whatever their number.
    of_the_first_lane = next(name for name in "abcdefgh" if crc32(name.encode()) % 6 == 0)

    def send():
        connection.Producer().publish(
            "m", routing_key="mail", headers={"x-delay": 3000}, message_id=of_the_first_lane
        )

    # What declares has a part of its delay behind it then, and the first message of a delay has no
    # queue of its own yet.
    for _ in range(2):
        send()
    stock = connect("amqp")
    collect(stock, [queue], 2)
    now = round(time.time() * 1000)
    explained = explain(small, 3000, Destination("", "mail"), now, settings=Settings(**settings))
    send()

    arrivals = collect(stock, [queue], 1)

    assert {arrival.key for arrival in arrivals} == {explained.key}
    ways = [{header["queue"] for header in arrival.headers["x-death"]} for arrival in arrivals]
    assert ways == [{wait.queue for wait in explained.waits}]
    assert all(arrival.at * 1000 >= explained.due for arrival in arrivals)


def test_a_queue_that_refuses_is_led_to_by_a_relay_and_named_when_it_is_full(
    connect, operator, small
):
    plain, management, _ = operator
    if small.queue_type == "classic":
        pytest.skip("a classic ladder has no use for relays before queues")
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    Queue("full", Exchange("events", "topic"), "k", queue_arguments=arguments)(
        plain.channel()
    ).declare()
    part = small.whole + ways(small, Snapshot.read(management), ["full"], ["events"])
    create(plain, small, part)
    connection = connect(binary_delay={"tick": 1000, "radix": 2, "levels": 4, "relays": ["full"]})

    publish(connection, "full", *[1000] * 40)

    assert verify(management, small, declares=False).sound
    into = small.queue_relay_name("full")

    def is_named():
        state = status(plain, management, small)
        return (state.relays or 0) >= 32 and any(
            trouble.startswith(into) for trouble in state.troubles
        )

    wait_until(is_named)


def test_create_leaves_a_stream_of_another_age_as_it_is_and_makes_the_rest(vhost, plain, small):
    old, new = (
        PartQueue("kbd.v2.journal", (("x-queue-type", "stream"), ("x-max-age", age)))
        for age in ("7D", "30D")
    )
    create(plain, small, Part(queues=(old,)))
    made = create(plain, small, small.whole + Part(queues=(new,)))
    assert made.other_age == ("kbd.v2.journal",)
    names = {row["name"]: row["arguments"] for row in vhost.queues()}
    assert names["kbd.v2.journal"]["x-max-age"] == "7D"
    assert {queue.name for queue in small.whole.queues} <= names.keys()
