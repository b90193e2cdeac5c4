"""Manifests for RabbitMQ's Messaging Topology Operator, ``rabbitmq.com/v1beta1``. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue

from .names import shorten

_LONGEST = 253  # characters of a Kubernetes name


def kubernetes(part: Part, vhost: str = "/", cluster: str = "rabbitmq") -> str:
    """Return a part as a JSON list of Exchanges, Queues and Bindings, which kubectl takes as YAML.

    :param cluster: the name of the ``RabbitmqCluster`` that they belong to.
    """
    common = {"vhost": vhost, "rabbitmqClusterReference": {"name": cluster}}
    documents = [
        *(
            _document("Exchange", _name(exchange.name), _exchange(exchange), common)
            for exchange in part.exchanges
        ),
        *(_document("Queue", _name(queue.name), _queue(queue), common) for queue in part.queues),
        *(
            _document("Binding", _between(binding), _binding(binding), common)
            for binding in part.bindings
        ),
    ]
    listed = {"apiVersion": "v1", "kind": "List", "items": documents}
    return json.dumps(listed, indent=2, ensure_ascii=False) + "\n"


def _document(kind: str, name: str, spec: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "rabbitmq.com/v1beta1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {**spec, **common},
    }


def _exchange(exchange: Exchange) -> dict[str, Any]:
    spec = {"name": exchange.name, "type": exchange.type, "durable": True, "autoDelete": False}
    return spec | ({"arguments": dict(exchange.arguments)} if exchange.arguments else {})


def _queue(queue: Queue) -> dict[str, Any]:
    arguments = dict(queue.arguments)
    # The operator has a separate field for the type, and accepts it in both places.
    kind = {"type": arguments["x-queue-type"]} if "x-queue-type" in arguments else {}
    spec = {"name": queue.name, **kind, "durable": True, "autoDelete": False}
    return spec | ({"arguments": arguments} if arguments else {})


def _binding(binding: Binding) -> dict[str, Any]:
    spec = {
        "source": binding.source,
        "destination": binding.destination,
        "destinationType": "queue" if binding.to_queue else "exchange",
        "routingKey": binding.key,
    }
    return spec | ({"arguments": dict(binding.arguments)} if binding.arguments else {})


def _name(name: str) -> str:
    plain = _plain(name)
    return plain if plain == name and len(name) <= _LONGEST else _cut(plain, name)


def _between(binding: Binding) -> str:
    return _cut(_plain(f"{binding.source}.to.{binding.destination}"), repr(binding))


def _plain(name: str) -> str:
    """Return a valid name for Kubernetes: its parts begin and end with a letter or digit."""
    parts = (re.sub(r"[^a-z0-9-]", "-", part).strip("-") for part in name.lower().split("."))
    return ".".join(part or "x" for part in parts)


def _cut(plain: str, name: str) -> str:
    # Short enough to stay whole with its digest, which needs a letter or digit before it.
    return shorten(plain[: _LONGEST - 9].rstrip(".-"), name, _LONGEST)
