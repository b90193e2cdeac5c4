"""What monitors a ladder is read back by Grafana's own models and by a parser of PromQL."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models import dashboard as models

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.export import alerts, grafana
from kombu_binary_delay.export.monitoring import names, within
from kombu_binary_delay.ladder.foreign import FOREIGN_LADDERS

TOPOLOGIES = [
    Topology(),
    Topology(Ladder(2000, (4, 3)), "Up_per", "classic"),
    Topology(Ladder.uniform(4), layout="skip", lane=2),
    *FOREIGN_LADDERS.values(),
]


@pytest.fixture(params=TOPOLOGIES, ids=lambda topology: topology.prefix)
def topology(request):
    return request.param


def rules_of(topology: Topology) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(alerts(topology))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def read_by_grafana(document: dict[str, Any]) -> dict[str, Any]:
    """Let Grafana's models read a dashboard; of panels and queries, each kind has its own."""
    plugins.register_default_plugins()
    text = encoder.JSONEncoder().encode(models.Dashboard.from_json(document))
    read: dict[str, Any] = json.loads(text)
    return read


def test_a_dashboard_is_one_to_grafana_itself(topology):
    document = json.loads(grafana(topology))

    # Grafana adds what is left at its default, and leaves out what it does not know.
    assert lost(document, read_by_grafana(document)) == []


def test_grafana_would_see_what_it_does_not_know():
    document = json.loads(grafana(Topology()))
    panel = document["panels"][0]
    for place in (document, panel, panel["options"], panel["targets"][0]):
        place["unknown"] = 1

    assert lost(document, read_by_grafana(document)) == [
        *(f"/panels/0/{place}unknown" for place in ("targets/0/", "options/", "")),
        "/unknown",
    ]


def lost(given: Any, read: Any, path: str = "") -> list[str]:
    if isinstance(given, dict) and isinstance(read, dict):
        return [
            child
            for key, value in given.items()
            for child in (
                lost(value, read[key], f"{path}/{key}") if key in read else [f"{path}/{key}"]
            )
        ]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        pairs = enumerate(zip(given, read, strict=True))
        return [child for at, pair in pairs for child in lost(*pair, f"{path}/{at}")]
    return [] if given == read else [path]


def test_panels_fill_the_rows_and_do_not_overlap(topology):
    panels = json.loads(grafana(topology))["panels"]
    places = [panel["gridPos"] for panel in panels]

    assert len({panel["id"] for panel in panels}) == len(panels)
    for y in {place["y"] for place in places}:
        assert sum(place["w"] for place in places if place["y"] == y) == 24
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


def test_every_query_is_promql(topology):
    panels = json.loads(grafana(topology))["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [rule["expr"] for rule in rules_of(topology)]

    for query in queries:
        promql_parser.parse(query.replace("$__rate_interval", "1m"))


def test_the_queries_are_about_these_queues_and_no_others(topology):
    asked = names(topology)
    ladders = [topology]
    if topology.is_ours:
        ladders = [topology, *topology.lanes(3), topology.for_urgent()]
    queues = {queue.name for ladder in ladders for part in ladder.levels for queue in part.queues}
    ways_in = {
        exchange.name for ladder in ladders for part in ladder.levels for exchange in part.exchanges
    }
    others = {"", "mail", "level-00.1", f"x{min(queues)}", f"{min(queues)}.x"}
    if topology.is_ours:
        direct = [
            ladder.direct_queue(ladder.ladder.digits(ladder.ladder.maximum)) for ladder in ladders
        ]
        queues |= {queue.name for part in direct for queue in part.queues}
        ways_in |= {ladder.direct for ladder in ladders}
        parking = {ladder.parking for ladder in ladders}
        relays = {ladder.queue_relay_name("mail") for ladder in ladders}
        relays |= {ladder.exchange_relay_name("events") for ladder in ladders}
        aside = parking | relays
        assert {queue for queue in aside if re.fullmatch(asked["parking"], queue)} == parking
        assert {queue for queue in aside if re.fullmatch(asked["relays"], queue)} == relays
        others |= aside

    assert {queue for queue in queues | others if re.fullmatch(asked["levels"], queue)} == queues
    assert {
        exchange for exchange in ways_in | others if re.fullmatch(asked["ways_in"], exchange)
    } == ways_in


@pytest.mark.parametrize("topology", TOPOLOGIES[:3], ids=lambda topology: topology.prefix)
def test_the_forecast_takes_a_level_for_sure_when_its_longest_way_is_over(topology):
    ladder = topology.ladder
    for milliseconds in (60_000, 3_600_000):
        surely, _ = within(topology, milliseconds)
        names = re.search(r'queue=~"(.*?)"', surely)
        assert names
        for level, radix in enumerate(reversed(ladder.radices)):
            below = ladder.digits(ladder.maximum)[ladder.levels - level :]
            for digit in (ladder.word(level, value) for value in range(1, radix)):
                leaves = ladder.delay((digit, *below)) <= milliseconds
                for lane in [*topology.lanes(2), replace(topology, lane=0)]:
                    queue = f"{lane.level_name(level)}.{digit}"
                    assert bool(re.fullmatch(names[1], queue)) == leaves, queue


def test_levels_of_all_lanes_are_added_up_under_the_names_that_the_dashboard_knows():
    topology = Topology(Ladder.binary(3, 1000), queue_type="classic")
    panels = json.loads(grafana(replace(topology, lane=2)))["panels"]
    (waiting,) = (panel for panel in panels if panel["title"] == "Waiting, by level")
    named = {
        override["matcher"]["options"]: override["properties"][0]["value"]
        for override in waiting["fieldConfig"]["overrides"]
    }
    relabel = re.search(
        r'label_replace\(.*, "level", "\$1\$2", "queue", "(.*)"\)', waiting["targets"][0]["expr"]
    )

    assert list(named.values()) == ["1 s", "2 s", "4 s"]
    assert relabel
    (direct,) = topology.direct_queue(topology.ladder.digits(1000)).queues
    assert re.fullmatch(relabel[1], direct.name)
    for lane in (topology, *topology.lanes(2), topology.for_urgent()):
        match = re.fullmatch(relabel[1], f"{lane.level_name(0)}.1")
        assert match
        assert match[1] + match[2] in named
