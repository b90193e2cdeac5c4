"""On a broker whose management API gives no statistics, nothing is lost and nothing hidden."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner
from kombu import Connection

from dev.broker import Broker
from kombu_binary_delay import Ladder, Topology, operate
from kombu_binary_delay.cli import binary_delay
from tests.waits import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.own_broker]


@pytest.fixture(scope="module")
def broker():
    # As RabbitMQ's image for Docker sets it.
    config = {"management_agent.disable_metrics_collector": "true"}
    with Broker(os.environ.get("RABBITMQ_ROOT"), config) as broker:
        yield broker


@pytest.fixture
def run(broker, vhost, topology):
    """Run the command on the test's own virtual host, with a small ladder."""
    place = ["-b", vhost.url, "-m", broker.management_url]
    ladder = ["--tick", "1000", "--radix", "2", "--levels", "4"]

    def run(*arguments):
        given = [*place, *ladder, "--queue-type", topology.queue_type, *arguments]
        return CliRunner().invoke(binary_delay, given)

    return run


def test_status_says_what_it_cannot_see(run):
    run("create")

    done = run("status", "--json")

    [trouble] = json.loads(done.stdout)["troubles"]
    assert done.exit_code == 1
    assert "this broker gives no statistics" in trouble


def test_a_teardown_of_what_cannot_be_counted_is_refused_and_changes_nothing(run, vhost):
    run("create")
    before = len(vhost.bindings())

    done = run("teardown", "--yes")

    assert (done.exit_code, "is not known" in done.output) == (3, True)
    assert len(vhost.bindings()) == before


def test_what_is_looked_at_again_and_again_is_not_dropped_at_a_low_delivery_limit(
    run, broker, vhost, topology
):
    if topology.queue_type == "classic":
        pytest.skip("classic queues have no delivery limit")
    ladder = Topology(Ladder.binary(4, 1000))
    with Connection(vhost.url) as connection:
        operate.create(connection, ladder, ladder.base)
        connection.Producer().publish("m", exchange=ladder.parking, routing_key="@..gone")
    broker.ctl("set_policy", "-p", vhost.name, "limit", ".*", '{"delivery-limit": 3}')
    wait_until(lambda: "limit" in broker.ctl("list_queues", "-p", vhost.name, "policy"))

    for _ in range(8):
        wait_until(lambda: vhost.waiting(ladder.parking) == {ladder.parking: 1})
        done = run("redrive")
        assert (done.exit_code, "'gone' does not exist" in done.output) == (1, True), done.output

    wait_until(lambda: vhost.waiting(ladder.parking) == {ladder.parking: 1})
