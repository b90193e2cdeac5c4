"""``verify --fix`` makes what is missing, leaves all else, and names the command for the rest."""

from __future__ import annotations

import json
import shlex

import amqp
import pytest
from click.testing import CliRunner
from kombu import Connection, Exchange, Queue

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.operate import Management
from tests.waits import wait_until


@pytest.fixture
def small(topology):
    return Topology(Ladder.binary(4, 100_000), queue_type=topology.queue_type)


@pytest.fixture
def run(broker, vhost, small):
    place = ["-b", vhost.url, "-m", broker.management_url]
    place += ["--tick", "100000", "--radix", "2", "--levels", "4", "--queue-type", small.queue_type]

    def run(*arguments, code):
        done = CliRunner().invoke(binary_delay, [*arguments, *place])
        assert done.exit_code == code, done.output
        return done.output

    return run


@pytest.fixture
def channel(vhost):
    with Connection(vhost.url) as operator:
        yield operator.channel()


def names(vhost):
    return {row["name"] for row in (*vhost.exchanges(), *vhost.queues())}


@pytest.mark.parametrize("declare", ["lazy", "never"])
def test_what_is_missing_is_made_and_what_waits_is_left_where_it_is(
    run, channel, vhost, small, declare
):
    """Given: a ladder with a message in it, without a queue, two exchanges and some bindings."""
    channel.queue_declare("mail", durable=True)
    Queue("orders", Exchange("events", "topic"), "k")(channel).declare()
    run("create", "--queue", "mail", "--exchange", "events", code=0)
    whole = names(vhost)
    level = small.level_name
    channel.basic_publish(amqp.Message("m"), level(3), "0.0.0.1.@..mail")
    channel.queue_delete(f"{level(1)}.1")
    channel.exchange_delete(level(2))
    channel.exchange_delete(f"{level(3)}.1")
    for binding in vhost.bindings():
        if (binding["source"], binding["destination"]) == (small.mirror_name("events"), "orders"):
            channel.queue_unbind("orders", binding["source"], binding["routing_key"])
    channel.queue_bind("mail", level(0), "spy")

    verification = json.loads(run("verify", "--json", "--declare", declare, code=1))
    shown = run("verify", "--fix", "--declare", declare, code=1)
    left = json.loads(run("verify", "--json", "--declare", declare, code=1))
    again = run("verify", "--fix", "--declare", declare, code=1)

    assert all(
        difference["remedy"]
        for difference in verification["differences"]
        if difference["severity"] != "note"
    )
    said = {difference["found"] for difference in verification["differences"]}
    assert {"missing", "the key 'k' is not repeated for delayed messages"} < said
    assert "mended:" in shown
    assert "nothing to mend here that is safe" in again
    assert names(vhost) == whole if declare == "lazy" else names(vhost) >= whole - {f"{level(3)}.1"}
    (stranger,) = (
        difference for difference in left["differences"] if difference["severity"] != "note"
    )
    assert "none of this ladder's" in stranger["found"]
    wait_until(lambda: vhost.waiting(f"{level(3)}.1") == {f"{level(3)}.1": 1})


def test_the_command_that_removes_a_strange_binding_removes_no_other(
    run, channel, broker, vhost, small
):
    channel.queue_declare("mail", durable=True)
    run("create", code=0)
    keys = {"", "a", "a~b", "a.#/ö~", "~"}
    for key in keys:
        channel.queue_bind("mail", small.level_name(0), key)

    while keys:
        verification = json.loads(run("verify", "--json", code=1))
        strange = [
            difference
            for difference in verification["differences"]
            if difference["severity"] == "error"
        ]
        assert {difference["found"] for difference in strange} == {
            f"a binding with the key {key!r} that is none of this ladder's" for key in keys
        }
        *_, curl, option, user, x, method, url = shlex.split(strange[0]["remedy"])
        broker.api(method, url.partition("/api/")[2])
        assert [curl, option, x, method] == ["curl", "-u", "-X", "DELETE"]
        assert user
        keys = {key for key in keys if repr(key) not in strange[0]["found"]}
    run("verify", code=0)


def test_what_a_program_binds_while_the_broker_is_read_stays(
    run, vhost, small, connect, monkeypatch
):
    """Given: a worker that starts after the first answer of the management API."""

    def answer(management, what, *arguments):
        rows = here(management, what, *arguments)
        if what in {"bindings", "exchanges", "queues"} and not begun:
            begun.append(what)
            connection = connect()
            Queue("new", Exchange("events", "topic"), "k")(connection.channel()).declare()
            connection.Producer().publish(
                "m", exchange="events", routing_key="k", headers={"x-delay": 3_600_000}
            )
        return rows

    run("create", code=0)
    here = Management.here
    begun: list[str] = []
    monkeypatch.setattr(Management, "here", answer)

    run("create", code=0)

    ways = {(binding["source"], binding["destination"]) for binding in vhost.bindings()}
    assert begun
    assert (small.delivery, small.mirror_name("events")) in ways


def test_a_queue_that_is_exclusive_to_a_plain_program_hinders_no_repair(
    run, channel, connect, vhost, small
):
    """Given: a subscriber without the transport, and a binding that is not repeated any more."""
    Queue("mail", Exchange("events", "topic"), "k")(channel).declare()
    run("create", "--exchange", "events", code=0)
    subscriber = connect("amqp").channel()
    Queue("mine", Exchange("events", "topic"), "k", exclusive=True)(subscriber).declare()
    mirror = small.mirror_name("events")
    (repeated,) = (binding for binding in vhost.bindings() if binding["source"] == mirror)
    channel.queue_unbind("mail", mirror, repeated["routing_key"])

    run("verify", "--fix", code=1)
    mended = [binding["destination"] for binding in vhost.bindings() if binding["source"] == mirror]
    verification = json.loads(run("verify", "--json", code=1))
    (left,) = (row for row in verification["differences"] if row["severity"] != "note")
    run("create", "--exchange", "events", code=0)
    refused = run("create", "--queue", "mine", code=2)

    assert mended == ["mail"]
    assert (left["severity"], "exclusive" in left["remedy"]) == ("warning", True)
    assert "'mine' is exclusive" in refused


@pytest.mark.parametrize("state", ["nothing", "whole", "wrong"])
def test_what_is_whole_or_wrong_is_left(run, channel, vhost, small, state):
    if state == "whole":
        run("create", code=0)
    if state == "wrong":
        channel.queue_declare(f"{small.level_name(0)}.1", durable=True)
    before = names(vhost)

    done = run("verify", "--fix", "--json", code=1 if state == "wrong" else 0)

    (verification,) = map(json.loads, done.splitlines())
    errors = [
        difference
        for difference in verification["differences"]
        if difference["severity"] == "error"
    ]
    assert verification["sound"] == (state != "wrong") == (not errors)
    assert before <= names(vhost)
    if state == "wrong":
        # What is missing beside it is made; it itself is for the operator.
        assert verification["fixed"]["exchanges"]
        assert f"'teardown --ladder {small.prefix}'" in errors[0]["remedy"]
    else:
        assert names(vhost) == before
