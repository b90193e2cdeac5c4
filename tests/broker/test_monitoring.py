"""The dashboard and the alerting rules, over what a real broker exports to a real Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from kombu import Queue
from prometheus_client import CollectorRegistry, generate_latest

from dev.prometheus import TOOL, Prometheus
from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.export import alerts, grafana
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.operate import create
from kombu_binary_delay.telemetry import prometheus, watch
from tests.waits import PATIENCE

# What is scraped is a broker whose metrics are on a port that only we know.
pytestmark = pytest.mark.own_broker

SMALL = Topology(Ladder.binary(4, 1000))
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "monitor.md"
# RabbitMQ before 4 counts what is published by channel only.
BY_CHANNEL = "channel_exchange_metrics"


@pytest.fixture(scope="session")
def broker(own_broker):
    """What is scraped and queried is all that the broker has, so nothing else may be there."""
    return own_broker


@pytest.fixture
def scrape(broker):
    """The configuration that the documentation recommends, for this broker."""
    (block,) = re.findall(r"```yaml\n(scrape_configs:\n.*?)```", PAGE.read_text(), re.DOTALL)
    config: dict[str, Any] = yaml.safe_load(block)
    for job in config["scrape_configs"]:
        (target,) = job["static_configs"]
        target["targets"] = [broker.metrics_url.removeprefix("http://")]
        if "params" in job and broker.release < (4, 0):
            job["params"]["family"][1] = BY_CHANNEL
    return config


@pytest.fixture
def ladder(scrape, vhost, connect):
    """A ladder before a queue that takes its messages and one, unknown to it, that refuses them."""
    return Ladders(vhost, connect)


class Ladders:
    def __init__(self, vhost, connect):
        self._connect = connect
        self.vhost = vhost.name
        self.plain = connect("amqp", vhost.url)
        self.connection = self.prepare(vhost)

    def prepare(self, vhost):
        plain = self._connect("amqp", vhost.url)
        refuses = {"x-max-length": 1, "x-overflow": "reject-publish"}
        Queue("full", queue_arguments=refuses)(plain.channel()).declare()
        Queue("mail")(plain.channel()).declare()
        create(plain, SMALL, SMALL.whole + SMALL.to_queue("full") + SMALL.to_queue("mail"))
        return self._connect(url=vhost.url, binary_delay={"tick": 1000, "radix": 2, "levels": 4})

    def publish_past_the_relay(self, queue, *delays):
        """As a program did before anybody knew that the queue refuses messages."""
        for delay in delays:
            digits = SMALL.ladder.digits(delay)
            address = SMALL.address(digits, Destination("", queue))
            self.plain.Producer().publish(
                "m", exchange=SMALL.entry_exchange(digits), routing_key=address
            )

    def publish(self, queue, *delays, connection=None):
        producer = (connection or self.connection).Producer()
        for delay in delays:
            producer.publish("m", routing_key=queue, headers={"x-delay": delay})


def of_workers():
    """The page of a worker's telemetry."""
    registry = CollectorRegistry()
    end = prometheus.instrument(registry)
    watch.notify(watch.delivered, watch.Delivered("", "pay", "mail", 3.0, 10.0, 10, 10.1))
    page = generate_latest(registry).decode().splitlines()
    end()
    return page


def metrics(scrape):
    """What the jobs of a scrape configuration find: names, and the labels of each."""
    labels_of: dict[str, set[str]] = {}
    for job in scrape["scrape_configs"]:
        (static,) = job["static_configs"]
        families = "&".join(
            f"family={family}" for family in job.get("params", {}).get("family", [])
        )
        url = f"http://{static['targets'][0]}{job.get('metrics_path', '/metrics')}?{families}"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            lines = answer.read().decode().splitlines()
        for line in lines + of_workers():
            if match := re.match(r"(\w+)(?:\{(.*)\})? ", line):
                labels = set(re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', match[2] or ""))
                # And what Prometheus adds by itself, and by the configuration.
                labels |= {"instance", "job", *static.get("labels", {})}
                labels_of.setdefault(match[1], set()).update(labels)
    return labels_of


class Selectors(dict[str, set[str]]):
    """The metrics in a query, with the labels that it matches them by."""

    def __init__(self, query: str) -> None:
        super().__init__()
        self._walk(promql_parser.parse(query))

    def _walk(self, node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            labels = {matcher.name for matcher in node.matchers.matchers}
            self.setdefault(str(node.name), set()).update(labels)
        for name in ("lhs", "rhs", "expr", "vector_selector"):
            if (below := getattr(node, name, None)) is not None:
                self._walk(below)
        for argument in getattr(node, "args", ()):
            self._walk(argument)


def queries(topology=SMALL):
    panels = json.loads(grafana(topology))["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    (group,) = yaml.safe_load(alerts(topology))["groups"]
    return [*map(in_prometheus, asked), *(rule["expr"] for rule in group["rules"])]


def in_prometheus(expr):
    """A query of the dashboard with values for Grafana's variables."""
    return re.sub(r"\$(cluster|vhost)", ".*", expr.replace("$__rate_interval", "1m"))


def grouped_by(query):
    return {
        label.strip()
        for labels in re.findall(r"by \((.*?)\)", query)
        for label in labels.split(",")
    }


def test_every_metric_and_label_that_is_asked_for_is_there(broker, ladder, scrape):
    ladder.publish("mail", 8000)
    exchange, channel = (
        f"rabbitmq_detailed_{by}_messages_published_total" for by in ("exchange", "channel")
    )
    missing: list[tuple[str, set[str], str]] = []

    def all_is_there():
        # The broker counts in the background.
        labels_of = metrics(scrape)
        # Of these two, each version has one: the queries take what there is.
        labels_of.setdefault(exchange, labels_of.get(channel, set()))
        labels_of.setdefault(channel, labels_of[exchange])
        missing.clear()
        for query in queries():
            asked = Selectors(query)
            known = set().union(*(labels_of.get(name, set()) for name in asked))
            # And what the query makes itself.
            known |= set(re.findall(r', "(\w+)", "\$1\$2", ', query))
            wanted = {**asked, "any of them": grouped_by(query)}
            there = {**labels_of, "any of them": known}
            missing.extend(
                (name, labels, query)
                for name, labels in wanted.items()
                if not (name in there and labels <= there[name])
            )
        return not missing

    end = time.monotonic() + PATIENCE
    while not all_is_there():
        assert time.monotonic() < end, missing
        time.sleep(0.5)


def test_a_query_for_a_metric_that_is_not_there_would_be_noticed(ladder, scrape):
    assert Selectors('sum(rate(a{x="1"}[5m])) / max_over_time((b - c{y=~"2"})[5m:15s])') == {
        "a": {"x"},
        "b": set(),
        "c": {"y"},
    }
    assert "rabbitmq_detailed_queue_messages_dlx" not in metrics(scrape)


def hurried(rules):
    """The same rules on a faster clock: what takes minutes takes seconds."""
    seconds = {"1m": "1s", "2m": "12s", "5m": "20s", "10m": "20s", "15s": "3s"}
    # These would fire where the machine stalls for seconds, and have cases of their own below.
    apart = "Late|ArrivesLate|NotOnTime|DiskFills|Unwatched"
    rules = re.sub(rf" +- alert: BinaryDelay(?:{apart})\n(?: {{8}}.*\n)*", "", rules)
    return re.sub(r"\b(\d+[ms])\b", lambda time: seconds[time[1]], rules)


@pytest.mark.slow
def test_alerts_fire_for_what_is_wrong_and_not_for_what_is_busy(broker, ladder, scrape):
    scrape["global"] = {"scrape_interval": "3s", "evaluation_interval": "1s"}
    busy = broker.vhost()
    done = threading.Event()
    healthy = ladder.prepare(busy)

    def be_busy():
        while not done.wait(0.01):
            ladder.publish("mail", 1000, 3000, 7000, connection=healthy)

    # A relay for a queue that this publisher knows to refuse; none for one that it does not.
    refuses = {"x-max-length": 1, "x-overflow": "reject-publish"}
    known = Queue("known", queue_arguments=refuses)
    known(ladder.connection.channel()).declare()
    publisher = threading.Thread(target=be_busy)
    publisher.start()
    try:
        with Prometheus(scrape, hurried(alerts(SMALL))) as prometheus:
            ladder.publish("gone", 1000)
            ladder.publish("known", *[2000] * 40)
            ladder.publish_past_the_relay("full", *[8000] * 40)
            firing = fires_until(
                prometheus,
                {"BinaryDelayLevelStuck", "BinaryDelayParked", "BinaryDelayRelayFilling"},
            )
            for query in queries():
                prometheus.query(query)
            waiting = queries()[0]
            assert sum(value for _, value in prometheus.query(waiting)) > 40
    finally:
        done.set()
        publisher.join()
        busy.delete()

    where = {
        name: {(label["vhost"], label["queue"]) for label in labels}
        for name, labels in firing.items()
    }
    assert where == {
        "BinaryDelayLevelStuck": {(ladder.vhost, f"{SMALL.level_name(3)}.1")},
        "BinaryDelayParked": {(ladder.vhost, SMALL.parking)},
        "BinaryDelayRelayFilling": {(ladder.vhost, SMALL.queue_relay_name("known"))},
    }


def fires_until(prometheus, names, timeout=180):
    """What fires when these do; nothing must fire that is not among them."""
    end = time.monotonic() + timeout
    while True:
        firing = prometheus.alerts()
        assert firing.keys() <= names
        if firing.keys() == names:
            return firing
        assert time.monotonic() < end, f"only {sorted(firing)} fire"
        time.sleep(0.5)


# -- what takes minutes, on Prometheus' own clock for tests of rules -------------------------------

LEVEL = f"{SMALL.level_name(0)}.1"
FIVE_A_SECOND = "0+75x200"
NONE = "0x200"


def of_queue(kind, queue, values):
    return {
        "series": f'rabbitmq_detailed_queue_messages{kind}{{vhost="v",queue="{queue}"}}',
        "values": values,
    }


def case(held, confirmed=FIVE_A_SECOND, ready="100x200", queue=LEVEL):
    """Fifty minutes of a queue, four scrapes a minute."""
    counter = "rabbitmq_global_messages_dead_lettered_confirmed_total"
    labels = 'queue_type="rabbit_quorum_queue",dead_letter_strategy="at_least_once"'
    total = [int(number) + 100 for number in spelled(held)] if ready != NONE else spelled(held)
    return [
        of_queue("", queue, " ".join(map(str, total))),
        of_queue("_ready", queue, ready),
        of_queue("_unacked", queue, NONE),
        {"series": f"{counter}{{{labels}}}", "values": confirmed},
    ]


def spelled(values):
    """Write `8x20 0x180` out."""
    return [
        value for run in values.split() for value in [run.split("x")[0]] * int(run.split("x")[1])
    ]


def disk(free):
    """Fifty minutes of a node with a quiet ladder, and with bytes of free disk."""
    labels = '{instance="a"}'
    return [
        *case("0x200"),
        {"series": f"rabbitmq_disk_space_available_bytes{labels}", "values": free},
        {"series": f"rabbitmq_disk_space_available_limit_bytes{labels}", "values": "50e6x200"},
    ]


def arrivals(at_once, late):
    """Fifty minutes of a worker: so many more each scrape come at once, and late by 20 s to 30."""
    whole = at_once + late
    buckets = {"1.0": at_once, "20.0": at_once, "30.0": whole, "+Inf": whole}
    labels = 'messaging_destination_name="mail",celery_task_name="pay"'
    name = "messaging_delay_lateness_seconds"
    return [
        *case("0x200"),
        *(
            {"series": f'{name}_bucket{{{labels},le="{le}"}}', "values": f"0+{count}x200"}
            for le, count in buckets.items()
        ),
        {"series": f"{name}_count{{{labels}}}", "values": f"0+{whole}x200"},
    ]


CASES = {
    "all arrive within a tick": (arrivals(100, 0), set()),
    "a few arrive late": (arrivals(98, 2), {"ArrivesLate"}),
    "many arrive late": (arrivals(40, 60), {"ArrivesLate", "NotOnTime"}),
    "nothing leaves": (case("0x20 40x180", "0x200"), {"Stuck", "Late"}),
    "nothing leaves, and more comes": (
        case("0x20 " + " ".join(f"{40 + at}x1" for at in range(180)), "0+0x200"),
        {"Stuck", "Late"},
    ),
    "busy, each scrape sees other messages on their way": (
        case(" ".join(f"{at % 7}x1" for at in range(200)), "0+4500x200"),
        set(),
    ),
    "a burst that takes six minutes to go": (
        case(
            "0x20 " + " ".join(f"{9000 - 375 * at}x1" for at in range(25)) + " 0x155",
            "0x20 0+375x25 9375x155",
        ),
        {"Late"},
    ),
    "under load, more held than a worker takes, and moving": (
        case(" ".join(f"{40 + at % 5}x1" for at in range(200)), "0+4500x200"),
        set(),
    ),
    "a few three minutes late after a crash, among many": (
        case("0x40 7x12 0x148", "0+4500x200"),
        set(),
    ),
    "a few three minutes late after a crash, and nothing else": (
        case("0x40 7x12 0x148", "0x52 7x148"),
        {"Late"},
    ),
    "a relay that nobody empties": (
        case("40x200", ready=NONE, queue=SMALL.queue_relay_name("mail")),
        {"RelayFilling", "Unwatched"},
    ),
    "a few parked": (
        case("3x200", ready=NONE, queue=SMALL.parking),
        {"Parked", "Unwatched"},
    ),
    "a disk with room": (disk("20e9x200"), set()),
    "a disk on which a log is written and removed": (
        disk("20e9x40 19.5e9x20 20e9x140"),
        set(),
    ),
    "a disk that is full within four hours": (disk("20e9-30e6x200"), {"DiskFills"}),
    "a disk that is full within days": (disk("300e9-30e6x200"), set()),
    "a disk that is nearly full": (disk("900e6x200"), {"DiskFills"}),
}


FIRING = re.findall("alert: BinaryDelay(.*)", alerts(SMALL))


def test_what_fires_within_45_minutes(tmp_path):
    (tmp_path / "rules.yml").write_text(alerts(SMALL))
    expressions = " or ".join(
        f'count by (alertname) (count_over_time(ALERTS{{alertname="BinaryDelay{alert}",'
        f'alertstate="firing"}}[45m]))'
        for alert in FIRING
    )
    names = {"Stuck": "LevelStuck"}
    asked = {
        name: [
            {"labels": f'{{alertname="BinaryDelay{names.get(fire, fire)}"}}', "value": 1}
            for fire in sorted(fires)
        ]
        for name, (_, fires) in CASES.items()
    }
    tests = [
        of_promtool(name, CASES[name][0], [(expressions, expected)])
        for name, expected in asked.items()
    ]
    by_promtool(tmp_path, tests, rule_files=["rules.yml"])


def of_promtool(name, series, asked):
    """What some expressions are to be after 45 minutes of some series."""
    tests = [
        {"expr": expr, "eval_time": "45m", "exp_samples": expected} for expr, expected in asked
    ]
    return {"name": name, "interval": "15s", "input_series": series, "promql_expr_test": tests}


def by_promtool(folder, tests, **more):
    """Let Prometheus' own tool evaluate expressions; it names those that are wrong."""
    test = {"evaluation_interval": "15s", "tests": tests, **more}
    (folder / "test.yml").write_text(yaml.safe_dump(test))

    done = subprocess.run(
        [TOOL, "test", "rules", "test.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def in_cluster(name, series):
    """The same series with the label of a cluster."""
    return [
        {
            **one_series,
            "series": one_series["series"].replace("{", f'{{rabbitmq_cluster="{name}",', 1),
        }
        for one_series in series
    ]


def published(by, values):
    name = f"rabbitmq_detailed_{by}_messages_published_total"
    return {"series": f'{name}{{vhost="v",exchange="{SMALL.level_name(0)}"}}', "values": values}


def test_the_dashboard_mixes_up_no_clusters_and_no_lanes(tmp_path):
    in_lane = f"{SMALL.lanes(2)[1].level_name(0)}.1"
    panels = {panel["title"]: panel["targets"] for panel in json.loads(grafana(SMALL))["panels"]}
    series = [
        *in_cluster("late", [*case("40x200"), published("exchange", FIVE_A_SECOND)]),
        *in_cluster("late", case("5x200", ready=NONE, queue=in_lane)[:3]),
        *in_cluster("too", [*case("35x200"), published("channel", FIVE_A_SECOND)]),
        *in_cluster("idle", case("0x200", NONE)),
    ]
    expected = {
        "Late, per hop": (9, "{}"),
        "On their way": (80, "{}"),
        "Waiting, by level": (380, f'{{level="{LEVEL}"}}'),
        "Due and not gone, by level": (40, f'{{level="{LEVEL}"}}'),
        "In and out": (10, "{}"),
    }

    asked = [
        (in_prometheus(panels[title][0]["expr"]), [{"labels": labels, "value": value}])
        for title, (value, labels) in expected.items()
    ]
    by_promtool(tmp_path, [of_promtool("the dashboard", series, asked)])


@pytest.mark.parametrize("topology", [Topology(), SMALL], ids=lambda topology: topology.prefix)
def test_rules_are_what_promtool_takes(tmp_path, topology):
    (tmp_path / "rules.yml").write_text(alerts(topology))

    done = subprocess.run(
        [TOOL, "check", "rules", tmp_path / "rules.yml"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "SUCCESS: 8 rules found" in done.stdout, done.stdout + done.stderr
