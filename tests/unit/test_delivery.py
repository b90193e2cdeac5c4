"""What is wrong between delivery and the users' queues is named, and its repair mends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part
from kombu_binary_delay.ladder.simulate import by_source, route_message
from kombu_binary_delay.operate import Snapshot, repair, ways
from kombu_binary_delay.operate.delivery import faults, orphans

TOPOLOGY = Topology(Ladder.binary(2, 1000))
CLASSIC = replace(TOPOLOGY, queue_type="classic")
NAMES = ("full", "limited", "other")
REFUSES = {"x-overflow": "reject-publish", "x-max-length": 1}
USERS: dict[str, Any] = {
    "exchanges": {
        name: {"name": name, "type": kind}
        for name, kind in (
            ("orders", "topic"),
            ("mails", "direct"),
            ("all", "fanout"),
            ("by-headers", "headers"),
        )
    },
    "queues": {
        "mail": {"name": "mail", "arguments": {}},
        "full": {"name": "full", "arguments": REFUSES},
        "limited": {
            "name": "limited",
            "arguments": {},
            "policy": "limits",
            "effective_policy_definition": {"overflow": "reject-publish-dlx"},
        },
        "x" * 250: {"name": "x" * 250, "arguments": []},
    },
}
BOUND = (
    Binding("orders", "mail", "eu.*"),
    Binding("orders", "full", "eu.#"),
    Binding("orders", "x" * 250, "#"),
    Binding("mails", "mail", "mail"),
    Binding("mails", "limited", "mail"),
    Binding("all", "mail", "a"),
    Binding("all", "orders", "", to_queue=False),
    Binding("by-headers", "mail", "", arguments=(("x-match", "all"),)),
)


def with_part(snapshot: Snapshot, part: Part, stale: tuple[Binding, ...] = ()) -> Snapshot:
    return Snapshot(
        {
            **{
                exchange.name: {"name": exchange.name, "type": exchange.type}
                for exchange in part.exchanges
            },
            **snapshot.exchanges,
        },
        {
            **{
                queue.name: {"name": queue.name, "arguments": dict(queue.arguments)}
                for queue in part.queues
            },
            **snapshot.queues,
        },
        (snapshot.bindings | set(part.bindings)) - set(stale),
    )


def whole(topology: Topology = TOPOLOGY, bound: tuple[Binding, ...] = BOUND) -> Snapshot:
    """What exists where all ways are as they should be."""
    users = Snapshot(USERS["exchanges"], USERS["queues"], frozenset(bound))
    led = ways(topology, users, users.queues, users.exchanges)
    return with_part(users, topology.whole + led)


def mended(topology: Topology, snapshot: Snapshot) -> Snapshot:
    mend = repair(topology, snapshot)
    return with_part(snapshot, mend.missing, mend.stale)


def grave(topology: Topology, snapshot: Snapshot) -> list[Any]:
    return [fault for fault in faults(topology, snapshot) if fault.severity != "note"]


@pytest.mark.parametrize("exchange", ["by-headers", "mails"])
def test_a_way_to_an_exchange_leads_to_its_queues_by_name_too(exchange):
    users = Snapshot(USERS["exchanges"], USERS["queues"], frozenset(BOUND))
    led = ways(TOPOLOGY, users, [], [exchange])
    for binding in BOUND:
        if binding.source == exchange:
            relay = TOPOLOGY.queue_relay(binding.destination).bindings
            straight = TOPOLOGY.to_queue(binding.destination).bindings
            assert set(led.bindings).issuperset(straight) or set(led.bindings).issuperset(relay)


@pytest.mark.parametrize("topology", [TOPOLOGY, CLASSIC], ids=["quorum", "classic"])
def test_what_is_led_to_as_it_should_be_has_no_fault(topology):
    assert not list(faults(topology, whole(topology)))


@pytest.mark.parametrize(
    ("put", "severity", "words"),
    [
        (
            TOPOLOGY.mirror_bindings("orders", "topic", "full", "eu.#", to_queue=True),
            "error",
            "by its argument x-overflow",
        ),
        (
            TOPOLOGY.mirror_bindings("orders", "topic", "mail", "old", to_queue=True),
            "error",
            "has no such binding any more",
        ),
        (
            TOPOLOGY.mirror_bindings("all", "fanout", "mails", "", to_queue=False),
            "error",
            "has no such binding any more",
        ),
        ([Binding(TOPOLOGY.delivery, "mail", "#.@..gone")], "error", "none of this ladder's"),
        (
            [Binding(TOPOLOGY.queue_relay_name("full"), "mail", "")],
            "error",
            "none of this ladder's",
        ),
        ([Binding("orders", "mail", "us.*")], "warning", "is not repeated"),
        ([Binding("orders", "full", "us.*")], "warning", "is not repeated"),
        ([Binding("orders", "mails", "us.*", to_queue=False)], "warning", "is not repeated"),
        ([Binding(TOPOLOGY.mirror_name("gone"), "mail", "#")], "error", "does not exist"),
    ],
)
def test_a_binding_too_many_is_named_and_mended(put, severity, words):
    snapshot = whole()
    gone = TOPOLOGY.mirror("gone")
    snapshot = with_part(
        snapshot,
        (gone if put[0].source == gone.exchanges[0].name else Part()) + Part((), (), tuple(put)),
    )

    differences = grave(TOPOLOGY, snapshot)

    assert {(difference.severity, words in difference.found) for difference in differences} == {
        (severity, True)
    }
    assert all("'verify --fix'" in difference.remedy for difference in differences)
    assert not grave(TOPOLOGY, mended(TOPOLOGY, snapshot))


@pytest.mark.parametrize(
    ("queue", "why"),
    [("full", "by its argument x-overflow"), ("limited", "by the policy limits")],
)
def test_a_queue_that_may_refuse_is_named_unless_a_relay_takes_precedence(queue, why):
    users = Snapshot(USERS["exchanges"], USERS["queues"], frozenset())
    snapshot = with_part(users, TOPOLOGY.whole + TOPOLOGY.to_queue(queue))

    (fault,) = grave(TOPOLOGY, snapshot)

    assert (fault.severity, why in fault.found) == ("error", True)
    assert not grave(TOPOLOGY, mended(TOPOLOGY, snapshot))
    assert not grave(TOPOLOGY, with_part(whole(), TOPOLOGY.to_queue(queue)))


def test_a_refusing_queue_that_one_binding_leads_to_straight_keeps_its_relay_for_the_others():
    snapshot = whole(bound=(*BOUND, other := Binding("mails", "full", "full")))
    led = [
        TOPOLOGY.mirror_bindings("mails", "direct", name, other.key, to_queue=True)
        for name in (TOPOLOGY.queue_relay_name("full"), "full")
    ]
    snapshot = with_part(snapshot, Part(bindings=led[1]), led[0])

    (fault,) = grave(TOPOLOGY, snapshot)

    assert (fault.severity, fault.what) == ("error", "binding from mails to full")
    again = mended(TOPOLOGY, snapshot)
    assert again.bindings == snapshot.bindings - {*led[1]} | {*led[0]}
    assert not grave(TOPOLOGY, again)


def test_a_queue_that_mirrors_lead_to_straight_stays_so_where_it_has_a_relay_for_its_name():
    snapshot = with_part(whole(), TOPOLOGY.queue_relay("mail"))

    led = ways(TOPOLOGY, snapshot, ["mail"], USERS["exchanges"])

    assert set(led.bindings) <= snapshot.bindings
    assert not grave(TOPOLOGY, snapshot)


@pytest.mark.parametrize("same", [True, False], ids=["the same binding", "two bindings"])
def test_a_queue_that_mirrors_lead_to_straight_and_by_its_relay_is_named_and_mended(same):
    straight, by_relay = (
        TOPOLOGY.mirror_bindings("orders", "topic", name, "eu.*", to_queue=True)
        for name in ("mail", TOPOLOGY.queue_relay_name("mail"))
    )
    part = TOPOLOGY.queue_relay("mail") + Part(bindings=by_relay)
    snapshot = with_part(whole(), part, () if same else straight)

    (fault,) = grave(TOPOLOGY, snapshot)

    assert (fault.severity, "twice" in fault.causes) == ("error" if same else "warning", True)
    again = mended(TOPOLOGY, snapshot)
    assert not grave(TOPOLOGY, again)
    assert again.bindings.issuperset(straight)
    assert again.bindings.isdisjoint(by_relay)


def test_what_somebody_has_bound_to_see_all_that_is_delivered_is_named_and_left():
    snapshot = with_part(whole(), Part((), (), (Binding(TOPOLOGY.delivery, "mail", "#"),)))

    (fault,) = grave(TOPOLOGY, snapshot)

    assert (fault.severity, fault.stale, "only there" in fault.causes) == ("error", (), True)


@given(st.data())
def test_whatever_is_taken_from_or_bound_beside_the_transport_is_found_and_mended(data):
    """Any bindings of the users' made or removed, any of ours removed or left over."""
    topology = data.draw(st.sampled_from([TOPOLOGY, CLASSIC]))
    before = data.draw(st.sets(st.sampled_from(BOUND)))
    now = data.draw(st.sets(st.sampled_from(BOUND)))
    snapshot = whole(topology, tuple(before))
    mirrors = sorted(
        (binding for binding in snapshot.bindings - set(topology.whole.bindings) - before), key=repr
    )
    lost = data.draw(st.sets(st.sampled_from(mirrors))) if mirrors else set()
    snapshot = replace(snapshot, bindings=snapshot.bindings - before - lost | now)

    again = mended(topology, snapshot)

    assert not grave(topology, again)
    asked = whole(topology, tuple(now))
    for exchange, key in (("orders", "eu.x"), ("mails", "mail"), ("all", "z")):
        address = topology.address((), Destination(exchange, key))
        # Where delivery leads to the exchange at all; without, it is parked.
        if topology.mirror_name(exchange) in snapshot.exchanges:
            assert reached(topology, again, address) == reached(topology, asked, address)


def reached(topology: Topology, snapshot: Snapshot, key: str) -> list[str]:
    """Where delivery leads a message to, by relays as well, and how often."""
    exchanges = {name: Exchange(name, row["type"]) for name, row in snapshot.exchanges.items()}
    ends: list[str] = []
    bindings = by_source(snapshot.bindings)
    for name in route_message(exchanges, bindings, topology.delivery, [key]):
        is_relay = topology.owns(name)
        ends += route_message(exchanges, bindings, name, [key]) if is_relay else [name]
    return sorted(ends)


@pytest.mark.parametrize("exchange", ["gone", "g" * 240])
def test_what_leads_to_nothing_that_exists_is_an_orphan(exchange):
    part = TOPOLOGY.exchange_relay(exchange) + TOPOLOGY.queue_relay(exchange)
    existing = with_part(whole(), part)

    assert set(orphans(TOPOLOGY, existing)) == {
        TOPOLOGY.mirror_name(exchange),
        TOPOLOGY.exchange_relay_name(exchange),
        TOPOLOGY.queue_relay_name(exchange),
    }
    assert not orphans(TOPOLOGY, whole())
