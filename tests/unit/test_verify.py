"""Whatever is taken from a ladder, or put to it, is named, with what it causes."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_binary_delay import Ladder, Settings, Topology
from kombu_binary_delay.amendments.parts import amendments_part
from kombu_binary_delay.cli.connect import Target
from kombu_binary_delay.journal import stream_part
from kombu_binary_delay.ladder.foreign import CELERY, FOREIGN_LADDERS, NSERVICEBUS
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part
from kombu_binary_delay.operate import Management, Snapshot
from kombu_binary_delay.operate.errors import UnlistedError
from kombu_binary_delay.operate.fix import absent
from kombu_binary_delay.operate.remedy import remake
from kombu_binary_delay.operate.verify import compare, dead_letters, verify

TOPOLOGY = Topology(Ladder.binary(4, 1000))
TOPOLOGIES = [
    TOPOLOGY,
    Topology(Ladder(2000, (4, 3)), "Up_per", "classic", "skip"),
    NSERVICEBUS,
]


_NOTHING = Part()


def snapshot_of(part: Part) -> Any:
    return Snapshot(
        {
            exchange.name: {
                "name": exchange.name,
                "type": exchange.type,
                "durable": True,
                "arguments": dict(exchange.arguments),
            }
            for exchange in part.exchanges
        },
        {
            queue.name: {
                "name": queue.name,
                "type": dict(queue.arguments).get("x-queue-type", "classic"),
                "durable": True,
                "arguments": dict(queue.arguments),
            }
            for queue in part.queues
        },
        frozenset(part.bindings),
    )


def without(mapping, name):
    return {key: value for key, value in mapping.items() if key != name}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.prefix)
def test_a_whole_ladder_has_no_difference(topology):
    assert not list(compare(topology, snapshot_of(topology.whole), declares=False))


@given(st.sampled_from(TOPOLOGIES), st.data())
def test_whatever_is_missing_is_named(topology, data):
    snapshot = snapshot_of(topology.whole)
    gone = data.draw(
        st.sampled_from(
            [*topology.whole.exchanges, *topology.whole.queues, *topology.whole.bindings]
        )
    )
    if isinstance(gone, Binding):
        snapshot = replace(snapshot, bindings=snapshot.bindings - {gone})
        name = gone.destination
    elif gone in topology.whole.exchanges:
        snapshot = replace(snapshot, exchanges=without(snapshot.exchanges, gone.name))
        name = gone.name
    else:
        snapshot = replace(snapshot, queues=without(snapshot.queues, gone.name))
        name = gone.name

    # Who declares nothing enters by the levels, and misses no entry exchange.
    is_entry_exchange = isinstance(gone, Exchange) and name in topology.whole.entry_exchanges
    declares = is_entry_exchange or data.draw(st.booleans())
    differences = list(compare(topology, snapshot, declares=declares))

    assert any(difference.severity == "error" and difference.causes for difference in differences)
    assert all(
        "'verify --fix'" in difference.remedy
        for difference in differences
        if difference.severity == "error"
    )
    # What is to be made brings back what was there, and no more.
    whole, lacking = snapshot_of(topology.whole), absent(topology.whole, snapshot)
    if isinstance(gone, Binding):
        assert lacking == Part(bindings=(gone,))
    else:
        assert {gone} == {*lacking.exchanges, *lacking.queues}
        assert not absent(topology.whole, whole).exchanges
    assert any(name in difference.what for difference in differences)


def test_entries_are_not_missed_by_who_declares_nothing():
    entry_exchanges = {queue.name for level in TOPOLOGY.levels for queue in level.queues}
    snapshot = snapshot_of(TOPOLOGY.whole)
    kept = {name: row for name, row in snapshot.exchanges.items() if name not in entry_exchanges}

    assert not list(compare(TOPOLOGY, replace(snapshot, exchanges=kept), declares=False))


def test_dead_letters_that_only_the_plugin_would_delay_are_noted():
    def queue(exchange, **more):
        return {"arguments": {"x-dead-letter-exchange": exchange, **more}}

    part = TOPOLOGY.whole + TOPOLOGY.mirror("events")
    snapshot = snapshot_of(part + Part(exchanges=(Exchange("other", "topic"),)))
    policy = {"dead-letter-exchange": "events"}
    queues = {
        "orders": queue("events"),
        "by policy": {"effective_policy_definition": policy},
        "retry in 5 s": queue("events", **{"x-message-ttl": 5000}),
        "by policy in 5 s": {"effective_policy_definition": {**policy, "message-ttl": 5000}},
        "unmirrored": queue("other"),
        "old": queue("the plugin's", **{"x-dead-letter-routing-key": "k"}),
        "default": queue(""),
        "none": {},
    }
    exchanges = {**snapshot.exchanges, "the plugin's": {"type": "x-delayed-message"}}
    snapshot = replace(snapshot, queues={**snapshot.queues, **queues}, exchanges=exchanges)

    notes = list(dead_letters(TOPOLOGY, snapshot))

    assert [(note.severity, note.what, note.found.partition(" dead")[0]) for note in notes] == [
        ("note", "exchange events", "what orders and 1 more"),
        ("note", "exchange the plugin's", "what old"),
    ]
    assert ["it has the ladder's key" in note.causes for note in notes] == [True, False]
    assert not list(dead_letters(NSERVICEBUS, snapshot_of(NSERVICEBUS.whole)))


@pytest.mark.parametrize(
    ("argument", "value", "causes"),
    [
        ("x-message-ttl", 10, "leave it early"),
        ("x-message-ttl", 10**9, "leave it late"),
        ("x-message-ttl", None, "never leave"),
        ("x-dead-letter-exchange", "elsewhere", "go elsewhere"),
        ("x-dead-letter-routing-key", "k", "lose their address"),
        ("x-dead-letter-strategy", "at-most-once", "can be lost between levels"),
        ("x-overflow", None, "can be lost between levels"),
        ("x-expires", 1000, "the queue is deleted"),
        ("x-max-length", 10, "refuses or drops"),
    ],
)
def test_another_argument_of_a_queue_is_named_with_what_it_causes(argument, value, causes):
    snapshot = snapshot_of(TOPOLOGY.whole)
    row = snapshot.queues[TOPOLOGY.level_name(2) + ".1"]
    row["arguments"] = without(row["arguments"], argument)
    if value is not None:
        row["arguments"][argument] = value

    (difference,) = compare(TOPOLOGY, snapshot)

    assert (difference.severity, difference.what) == ("error", f"queue {row['name']}")
    assert argument in difference.found
    assert f"'teardown --ladder {TOPOLOGY.prefix}'" in difference.remedy
    assert causes in difference.causes
    assert "cannot declare it" in difference.causes


@pytest.mark.parametrize("flag", ["internal", "auto_delete"])
def test_an_exchange_that_programs_cannot_declare_is_named(flag):
    snapshot = snapshot_of(TOPOLOGY.whole)
    snapshot.exchanges[TOPOLOGY.delivery][flag] = True
    (difference,) = compare(TOPOLOGY, snapshot)
    assert (difference.what, difference.found) == (
        f"exchange {TOPOLOGY.delivery}",
        flag.replace("_", "-"),
    )
    assert "applications that declare it cannot" in difference.causes


def test_levels_that_no_message_has_needed_are_no_fault_where_applications_make_them():
    low = TOPOLOGY.base + TOPOLOGY.levels[0] + TOPOLOGY.levels[1]

    (lazy,) = compare(TOPOLOGY, snapshot_of(low))
    (never,) = compare(TOPOLOGY, snapshot_of(low), declares=False)

    assert (lazy.severity, lazy.what) == ("note", "levels 2 to 3")
    assert (never.severity, never.causes) == (
        "error",
        "a publish with a delay of 4 s or more fails with 404",
    )


def test_a_consumer_and_a_foreign_binding_on_a_level_are_named():
    snapshot = snapshot_of(TOPOLOGY.whole)
    snapshot.queues[TOPOLOGY.level_name(0) + ".1"]["consumers"] = 1
    snapshot = replace(
        snapshot, bindings=snapshot.bindings | {Binding(TOPOLOGY.level_name(1), "spy", "#")}
    )

    consumer, binding = compare(TOPOLOGY, snapshot)

    assert "before they are due" in consumer.causes
    assert "'#'" in binding.found
    assert "rabbitmqctl list_consumers -p /" in consumer.remedy
    assert binding.remedy.endswith(f"/api/bindings/%2F/e/{TOPOLOGY.level_name(1)}/q/spy/%2523")
    assert "spy" in binding.what


class Api(Management):
    """A management API that has policies, and permissions of a user."""

    def __init__(self, topology, policies=(), permission=None, more=_NOTHING):
        super().__init__("http://nowhere", "/", "me", "")
        everything = {"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
        part = topology.whole + more
        snapshot = snapshot_of(part)
        self.__dict__["answers"] = {
            "overview": {"rabbitmq_version": "4.3.6"},
            "feature-flags": [],
            "users": [{**everything, **(permission or {})}],
            "exchanges": list(snapshot.exchanges.values()),
            "queues": list(snapshot.queues.values()),
            "bindings": [
                {
                    "source": binding.source,
                    "destination": binding.destination,
                    "destination_type": "queue" if binding.to_queue else "exchange",
                    "routing_key": binding.key,
                    "arguments": dict(binding.arguments),
                }
                for binding in part.bindings
            ],
            "operator-policies": [],
            "vhost-limits": [],
            "user-limits": [],
            "policies": [
                {"name": "p", "pattern": "level", "priority": 0, "apply-to": "all", **policy}
                for policy in policies
            ],
        }

    def get(self, *path: str, query: str = "") -> Any:
        return self.__dict__["answers"][path[0]]


CLASSIC = Topology(Ladder.binary(4, 1000), queue_type="classic")
LOST = "can be lost between levels"


@pytest.mark.parametrize(
    ("topology", "definition", "pattern", "expected"),
    [
        (TOPOLOGY, {"overflow": "drop-head"}, "level", ("error", LOST)),
        (TOPOLOGY, {"overflow": "reject-publish-dlx"}, "level", ("error", LOST)),
        (TOPOLOGY, {"overflow": "reject-publish"}, "level", None),
        (CLASSIC, {"overflow": "drop-head"}, "level", None),
        (TOPOLOGY, {"dead-letter-strategy": "at-most-once"}, "level", None),
        (TOPOLOGY, {"dead-letter-exchange": "elsewhere"}, "", None),
        (CLASSIC, {"dead-letter-exchange": "elsewhere"}, "", None),
        (TOPOLOGY, {"dead-letter-routing-key": "k"}, "level", ("error", "lose their address")),
        (TOPOLOGY, {"delivery-limit": 0}, "parking", ("warning", "refuse to look")),
        (TOPOLOGY, {"delivery-limit": 3}, "", None),
        (TOPOLOGY, {"delivery-limit": -1}, "", None),
        (CLASSIC, {"delivery-limit": 0}, "", None),
        (TOPOLOGY, {"max-length": 9}, "level", ("error", "refuses messages")),
        (CLASSIC, {"max-length": 9}, "level", ("error", "drops its oldest")),
        (CLASSIC, {"max-length": 9, "overflow": "reject-publish"}, "l", ("error", "refuses")),
        (TOPOLOGY, {"message-ttl": 10_000}, "level", None),
        (TOPOLOGY, {"message-ttl": 9}, "^kbd.*level", ("error", "leave early")),
        (TOPOLOGY, {"message-ttl": 9}, "^shop", None),
        *(
            (TOPOLOGY, {"message-ttl": 9}, pattern, ("note", "see for yourself"))
            for pattern in (r"\Q.\E", "^x(?i)y", r"\p{L}", "[[:alpha:]]", "(?<a>b)", "(?R)")
        ),
    ],
)
def test_a_policy_is_named_where_it_would_break_the_ladder(topology, definition, pattern, expected):
    policy = {"definition": definition, "pattern": pattern}

    done = verify(Api(topology, [policy]), topology, declares=False)

    about = [difference for difference in done.differences if difference.what == "policy p"]
    if expected is None:
        assert not about
    else:
        said = f"{about[0].causes}; {about[0].remedy}"
        assert (about[0].severity, expected[1] in said) == (expected[0], True)
        exact = "rabbitmqctl set_policy -p" in about[0].remedy
        assert exact == (expected[0] != "note")
    assert done.sound == (expected is None or expected[0] == "note")


@pytest.mark.parametrize(
    ("permission", "severity"),
    [
        ({}, None),
        ({"write": r"^kbd\."}, None),
        ({"configure": "", "write": "", "read": ""}, "error"),
        ({"write": ""}, "error"),
        ({"write": "^$"}, "error"),
        ({"write": r"\Akbd\..*\z(?-m)"}, "note"),
    ],
)
def test_a_permission_is_read_as_rabbitmq_reads_it(permission, severity):
    done = verify(Api(TOPOLOGY, permission=permission), TOPOLOGY)

    about = {
        difference.severity
        for difference in done.differences
        if difference.what.startswith("permissions")
    }
    assert about == ({severity} if severity else set())
    assert done.sound == (severity != "error")


@pytest.mark.parametrize(("user", "severity"), [("me", "note"), ("shop", "error")])
def test_a_user_that_rabbitmq_does_not_list_is_none_unless_it_has_logged_in(
    user, severity, monkeypatch
):
    def get(api, *path, query=""):
        if path[0] == "users":
            raise UnlistedError
        return answer(api, *path, query=query)

    answer = Api.get
    monkeypatch.setattr(Api, "get", get)

    (difference,) = verify(Api(TOPOLOGY), TOPOLOGY, user=user).differences

    assert (difference.severity, difference.what) == (severity, f"permissions of {user}")
    assert "LDAP" in difference.remedy


AMENDMENTS = amendments_part(Settings())
JOURNAL = stream_part(Settings(journal="stream"))


@pytest.mark.parametrize(
    ("pattern", "definition", "severity", "remedy"),
    [
        (r"^kbd\.v2\.journal$", {"max-length-bytes": 9}, "note", ""),
        ("journal", {"max-age": "1D"}, "note", ""),
        ("journal", {"max-age": "8D"}, None, ""),
        ("journal", {"max-age": "08D"}, None, ""),
        (
            r"^kbd\.v2\.amendments\.ids$",
            {"max-age": "1D"},
            "warning",
            "so remove it: rabbitmqctl clear_policy -p / p",
        ),
        ("ids", {"max-age": "1D"}, "warning", r" '^(?!kbd\.).*(?:ids)' "),
        (r"^kbd\.|ids", {"max-length-bytes": 9}, "warning", r" '^(?!kbd\.).*(?:^kbd\.|ids)' "),
        (r"^kbd\.*", {"max-length-bytes": 9}, "warning", r" '^(?!kbd\.).*(?:^kbd\.*)' "),
    ],
)
def test_a_policy_that_shortens_a_stream_is_named_with_what_is_forgotten(
    pattern, definition, severity, remedy
):
    policy = {"definition": definition, "pattern": pattern}

    done = verify(Api(TOPOLOGY, [policy], more=AMENDMENTS + JOURNAL), TOPOLOGY, declares=False)

    about = {
        difference.severity: difference
        for difference in done.differences
        if difference.what == "policy p"
    }
    assert done.sound == (severity != "warning")
    if severity is None:
        assert not about
        return
    assert remedy in about[severity].remedy if remedy else not about[severity].remedy
    forgets = "what was cancelled may run" if severity == "warning" else "is not listed"
    assert forgets in about[severity].causes


@pytest.mark.parametrize(
    ("declares", "remedy"), [(True, ": the next program makes"), (False, "; then 'verify --fix'")]
)
def test_a_journal_that_is_no_stream_is_named_with_what_makes_it_anew(declares, remedy):
    [queue] = JOURNAL.queues
    other = replace(JOURNAL, queues=(replace(queue, arguments=(("x-queue-type", "quorum"),)),))
    api = Api(TOPOLOGY, [], more=AMENDMENTS + other)
    differences = verify(api, TOPOLOGY, journal=JOURNAL, declares=declares).differences
    [kind] = [
        difference
        for difference in differences
        if "quorum" in difference.found and difference.what.endswith("journal")
    ]
    assert kind.remedy.startswith(f"delete the queue{remedy}")


@pytest.mark.parametrize("declares", [True, False])
def test_a_journal_that_is_kept_for_another_time_than_programs_say_is_named(declares):
    other = stream_part(Settings(journal="stream", journal_max_age="30D"))
    api = Api(TOPOLOGY, [], more=AMENDMENTS + JOURNAL)
    differences = verify(api, TOPOLOGY, journal=other, declares=declares).differences
    [age] = [difference for difference in differences if difference.what == "queue kbd.v2.journal"]
    assert (age.severity, "'7D'" in age.found, "30D" in age.found) == ("warning", True, True)


@pytest.mark.parametrize(
    ("topology", "permission", "remedies"),
    [
        (TOPOLOGY, {"write": "^a$"}, {r"set_permissions -p / me '.*' '^a$|^kbd\.' '.*'"}),
        (
            CELERY,
            {"configure": "^$", "read": "^celery"},
            {
                "set_permissions -p / me '^celery_delayed_' '.*' '^celery'",
                r"set_permissions -p / me '^celery_delayed_' '.*' '^celery|^kbd\.'",
            },
        ),
        (
            CELERY,
            {"read": ""},
            {
                "set_permissions -p / me '.*' '.*' '^celery_delayed_'",
                r"set_permissions -p / me '.*' '.*' '^celery_delayed_|^kbd\.'",
            },
        ),
        (
            CELERY,
            {"vhost": "other"},
            {"set_permissions -p / me '^celery_delayed_' '^celery_delayed_' '^celery_delayed_'"},
        ),
    ],
)
def test_what_a_user_lacks_is_granted_on_the_names_of_its_ladder(topology, permission, remedies):
    done = verify(Api(topology, permission=permission), topology, amendments=AMENDMENTS)

    about = {
        difference.remedy
        for difference in done.differences
        if difference.what.startswith("permissions")
    }
    assert about == {f"rabbitmqctl {remedy}" for remedy in remedies}
    # What is granted is enough.
    for remedy in remedies:
        for granted in shlex.split(remedy)[-3:]:
            assert ".*" in granted or re.search(granted, topology.level_name(3))


@pytest.mark.parametrize(
    "topology", [TOPOLOGY, *FOREIGN_LADDERS.values()], ids=lambda ladder: ladder.prefix
)
def test_what_a_remedy_says_of_a_ladder_names_it_as_the_commands_know_it(topology):
    words = shlex.split(remake(topology).partition("'teardown ")[2].partition("'")[0])

    assert Target().topology(ladder=words[-1]) == topology
