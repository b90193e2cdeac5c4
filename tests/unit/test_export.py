"""Each format, read back by a parser of somebody else's, says what the table says."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kombu_binary_delay import AddressError, Ladder, Topology
from kombu_binary_delay.export import (
    definitions,
    kubernetes,
    terraform,
)
from kombu_binary_delay.ladder.foreign import FOREIGN_LADDERS
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue

STRANGE = 'Straße "${x}" %{y} \\ #1; it\'s <b>'
TOPOLOGIES = [
    Topology(Ladder.binary(5, 1000)),
    Topology(Ladder(2000, (4, 3)), "Up_per", "classic"),
    Topology(),
    Topology(Ladder.binary(4, 1000), "shop_", layout="skip"),
    *FOREIGN_LADDERS.values(),
]


def part_of(topology: Topology) -> Part:
    """The ladder with ways to a plain queue, to a strange one, and to exchanges."""
    part = topology.whole + topology.to_queue("mail") + topology.to_queue(STRANGE)
    part += Part(queues=(Queue("bare", ()), Queue("one", (("x-single-active-consumer", True),))))
    if not topology.is_ours:
        return part
    part += topology.exchange_relay("my.headers") + topology.mirror(STRANGE)
    bindings = topology.mirror_bindings(STRANGE, "topic", "mail", "#.a.*", to_queue=True)
    bindings += topology.mirror_bindings(STRANGE, "fanout", "mail", "ignored", to_queue=True)
    return part + Part(bindings=bindings)


@pytest.fixture(params=TOPOLOGIES, ids=lambda topology: topology.prefix)
def part(request):
    return part_of(request.param)


def arguments(mapping):
    return tuple((mapping or {}).items())


def test_definitions_are_json_that_holds_the_part(part):
    read = json.loads(definitions(part, "a/vhost"))

    assert {object_["vhost"] for kind in read.values() for object_ in kind} == {"a/vhost"}
    assert part == Part(
        tuple(
            Exchange(exchange["name"], exchange["type"], arguments(exchange["arguments"]))
            for exchange in read["exchanges"]
        ),
        tuple(Queue(queue["name"], arguments(queue["arguments"])) for queue in read["queues"]),
        tuple(
            Binding(
                binding["source"],
                binding["destination"],
                binding["routing_key"],
                binding["destination_type"] == "queue",
                arguments(binding["arguments"]),
            )
            for binding in read["bindings"]
        ),
    )


def test_a_terraform_module_is_json_that_holds_the_part(part):
    module = json.loads(terraform(part, "a/vhost"), object_pairs_hook=once)
    kinds = module["resource"]
    exchanges, queues = kinds["rabbitmq_exchange"], kinds["rabbitmq_queue"]

    def name(value):
        reference = re.fullmatch(r"\$\{rabbitmq_(exchange|queue)\.([\w-]+)\.name\}", value)
        if not reference:
            return text(value)
        return text({"exchange": exchanges, "queue": queues}[reference[1]][reference[2]]["name"])

    assert module["variable"]["vhost"]["default"] == "a/vhost"
    assert {resource["vhost"] for kind in kinds.values() for resource in kind.values()} == {
        "${var.vhost}"
    }
    assert all(queue["lifecycle"]["prevent_destroy"] for queue in queues.values())
    assert part == Part(
        tuple(
            Exchange(
                text(exchange["name"]),
                exchange["settings"]["type"],
                tuple(
                    (it, text(of)) for it, of in exchange["settings"].get("arguments", {}).items()
                ),
            )
            for exchange in exchanges.values()
        ),
        tuple(
            Queue(
                text(queue["name"]),
                arguments(json.loads(text(queue["settings"]["arguments_json"]))),
            )
            for queue in queues.values()
        ),
        tuple(
            Binding(
                name(binding["source"]),
                name(binding["destination"]),
                text(binding["routing_key"]),
                binding["destination_type"] == "queue",
                arguments(json.loads(text(binding.get("arguments_json", "{}")))),
            )
            for binding in kinds["rabbitmq_binding"].values()
        ),
    )


def once(pairs):
    """Read an object of JSON; each label in a module is one resource."""
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def text(template):
    """Return what Terraform reads in a string that calls nothing."""
    assert not re.search(r"(?<![$%])[$%]\{", template), template
    return re.sub(r"([$%])\1\{", r"\1{", template)


@pytest.mark.parametrize(
    "part",
    [
        Topology().to_queue("a/b"),
        Topology().queue_relay("a/b"),
        Topology().mirror("a/b") + Topology().exchange_relay("a/b"),
    ],
    ids=["queue", "relay", "exchange"],
)
def test_a_terraform_module_has_no_name_that_its_provider_cannot_bind(part):
    with pytest.raises(AddressError, match=r"cannot bind 'kbd.*a/b'|cannot bind 'a/b'"):
        terraform(part)


def test_manifests_are_a_list_that_holds_the_part(part):
    documents = json.loads(kubernetes(part, "a/vhost", "a-cluster"))["items"]
    specs = {
        kind: [document["spec"] for document in documents if document["kind"] == kind]
        for kind in ("Exchange", "Queue", "Binding")
    }

    assert {document["apiVersion"] for document in documents} == {"rabbitmq.com/v1beta1"}
    named = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(named) == len(set(named))
    for _, name in named:
        assert is_kubernetes_name(name), name
    for document in documents:
        assert document["spec"]["vhost"] == "a/vhost"
        assert document["spec"]["rabbitmqClusterReference"] == {"name": "a-cluster"}
    assert part == Part(
        tuple(
            Exchange(spec["name"], spec["type"], arguments(spec.get("arguments")))
            for spec in specs["Exchange"]
        ),
        tuple(Queue(spec["name"], arguments(spec.get("arguments"))) for spec in specs["Queue"]),
        tuple(
            Binding(
                spec["source"],
                spec["destination"],
                spec["routingKey"],
                spec["destinationType"] == "queue",
                arguments(spec.get("arguments")),
            )
            for spec in specs["Binding"]
        ),
    )


def is_kubernetes_name(name):
    """Check as the API server does, by its rule for an RFC 1123 subdomain."""
    part = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    return len(name) <= 253 and re.fullmatch(rf"{part}(\.{part})*", name) is not None


NAMES = st.text(st.sampled_from("ab0.-_ éÄİ/") | st.characters(codec="utf-8"), max_size=260)


@settings(deadline=None)
@given(NAMES, NAMES, NAMES)
@example("_jobs", "a..b", "éa")
@example("a" * 243 + ".-b", ".", "-")
@example("a" * 254, "A" * 254, "a-.b")
def test_whatever_a_name_kubernetes_takes_it_and_it_stays_apart_from_others(one, two, three):
    part = Part(
        (Exchange(one),),
        tuple(Queue(name, ()) for name in dict.fromkeys((one, two, three))),
        tuple(Binding(one, two, key) for key in dict.fromkeys((one, three))),
    )

    documents = json.loads(kubernetes(part))["items"]

    assert [document["spec"]["name"] for document in documents if document["kind"] == "Queue"] == [
        queue.name for queue in part.queues
    ]
    named = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert all(is_kubernetes_name(name) for _, name in named), named
    assert len(named) == len(set(named))
