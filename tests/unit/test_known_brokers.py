"""What is known of brokers: which may have streams, and which releases have defects."""

from __future__ import annotations

import pytest

from kombu_binary_delay.ladder.defects import DEFECTS, defects_of
from kombu_binary_delay.ladder.versions import why_no_streams

NEW = {"Celery": "5.7.0", "Kombu": "5.7.0"}


@pytest.mark.parametrize(
    ("rabbitmq", "others", "named"),
    [
        ("4.3.6", NEW, {}),
        ("4.4.0", NEW, {}),
        ("4.3.3", NEW, {"16974": "4.3.4"}),
        ("4.3.0", NEW, {"16652": "4.3.3", "16203": "4.3.1", "16974": "4.3.4", "16272": "4.3.1"}),
        (
            "4.3.0-rc.1+7",
            NEW,
            {"16652": "4.3.3", "16203": "4.3.1", "16974": "4.3.4", "16272": "4.3.1"},
        ),
        ("4.2.7", NEW, {"16652": "4.3.3"}),
        ("4.2.5", NEW, {"16652": "4.3.3", "16203": "4.2.7"}),
        ("4.0.5", NEW, {}),
        ("3.10.8", NEW, {"11339": "4.0.1"}),
        (
            "3.13.7",
            {"Celery": "5.6.2", "Kombu": "5.6.2"},
            {"11339": "4.0.1", "10668": "5.7", "10112": "5.6.3"},
        ),
        ("4.0.5", {"Celery": "5.6.2", "Kombu": "5.6.2"}, {"10668": "5.7"}),
        ("4.3.6", {"Celery": "5.4.0"}, {"10668": "5.7", "10290": "5.7"}),
        ("4.3.6", {"Celery": "", "Kombu": "5.6.2"}, {"2531": "5.7"}),
        ("", {"Celery": "5.4.0"}, {}),
    ],
)
def test_a_release_is_named_with_what_cures_its_defects(rabbitmq, others, named):
    defects = list(defects_of(rabbitmq, others))
    assert {known.has.rpartition("#")[2]: known.remedy for known in defects} == {
        number: f"upgrade to {cure}" for number, cure in named.items()
    }


def test_each_defect_has_its_source_in_the_repository_of_its_product():
    for defect in DEFECTS:
        assert defect.source.startswith("https://github.com/")
        assert defect.product.lower() in defect.source
        assert defect.fixed == tuple(sorted(defect.fixed))


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("b-1234abcd.mq.eu-west-1.amazonaws.com:5671", True),
        ("b-1234abcd-1.mq.us-gov-west-1.amazonaws.com", True),
        ("B-1234ABCD.MQ.eu-west-1.ON.AWS.", True),
        ("b-1234abcd.mq.cn-north-1.amazonaws.com.cn:5671", True),
        ("ec2-1-2-3-4.eu-west-1.compute.amazonaws.com:5672", False),
        ("abc.lambda-url.eu-west-1.on.aws", False),
        ("b-1234abcd.mq.eu-west-1.amazonaws.com.example.org", False),
        ("rabbit.mq.example.org:5672", False),
    ],
)
def test_streams_are_refused_by_the_names_that_amazon_gives_to_its_brokers(host, is_one):
    server = {"product": "RabbitMQ", "version": "4.2.1"}
    assert ("Amazon MQ" in why_no_streams(server, host)) == is_one
    assert bool(why_no_streams(server, host)) == is_one


@pytest.mark.parametrize(
    "server",
    [{"product": "LavinMQ", "version": "4.3.0"}, {"product": "RabbitMQ", "version": "3.9.29"}],
)
def test_streams_are_refused_where_none_are_known(server):
    assert server["version"] in why_no_streams(server, "localhost:5672")
