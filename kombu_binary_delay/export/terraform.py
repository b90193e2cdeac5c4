"""A Terraform module in JSON (``.tf.json``) for the provider ``cyrilgdn/rabbitmq``. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from kombu_binary_delay.errors import AddressError
from kombu_binary_delay.ladder.parts import Binding, Exchange, Part, Queue

from .names import shorten

_Json = dict[str, Any]

_HEAD = (
    "A ladder of kombu-binary-delay, as a Terraform module. Made by a program: do not edit. Keep "
    "this file beside that of another ladder until its queues are empty: Terraform deletes what is "
    "in no file any more, and prevent_destroy goes with it."
)
_LONGEST = 120  # characters of a label


def terraform(part: Part, vhost: str = "/") -> str:
    """Return a part as a module with one variable, ``vhost``, which is this one by default.

    Its queues have ``prevent_destroy``, because they hold delayed messages. That does not protect
    queues that a later module leaves out: Terraform deletes them, with what waits in them.

    :raises AddressError: if a name has a ``/``, which the provider cannot bind.
    """
    exchanges = _labels(exchange.name for exchange in part.exchanges)
    queues = _labels(queue.name for queue in part.queues)
    resources = {
        "rabbitmq_exchange": {
            exchanges[exchange.name]: _exchange(exchange) for exchange in part.exchanges
        },
        "rabbitmq_queue": {queues[queue.name]: _queue(queue) for queue in part.queues},
        "rabbitmq_binding": {
            _label_of(binding): _binding(binding, exchanges, queues) for binding in part.bindings
        },
    }
    document = {
        "//": _HEAD,
        "terraform": {"required_providers": {"rabbitmq": {"source": "cyrilgdn/rabbitmq"}}},
        "variable": {
            "vhost": {
                "description": "The virtual host to make the ladder in.",
                "type": "string",
                # A default is no template.
                "default": vhost,
            }
        },
        "resource": {kind: resource for kind, resource in resources.items() if resource},
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _exchange(exchange: Exchange) -> _Json:
    settings: _Json = {"type": exchange.type, "durable": True, "auto_delete": False}
    if exchange.arguments:
        settings["arguments"] = {name: _text(value) for name, value in exchange.arguments}
    return {"name": _text(exchange.name), "vhost": "${var.vhost}", "settings": settings}


def _queue(queue: Queue) -> _Json:
    arguments = _text(json.dumps(dict(queue.arguments)))
    return {
        "name": _text(queue.name),
        "vhost": "${var.vhost}",
        "settings": {"durable": True, "auto_delete": False, "arguments_json": arguments},
        "lifecycle": {"prevent_destroy": True},
    }


def _binding(binding: Binding, exchanges: dict[str, str], queues: dict[str, str]) -> _Json:
    for name in (binding.source, binding.destination):
        # In the provider's identifier of a binding, it separates the names.
        if "/" in name:
            raise AddressError(
                f"the provider cyrilgdn/rabbitmq cannot bind {name!r}, since it has a /: export "
                f"definitions or kubernetes; or leave it out, and use the command create for it"
            )
    targets, kind = (queues, "queue") if binding.to_queue else (exchanges, "exchange")
    bound = {
        "vhost": "${var.vhost}",
        "source": _reference("exchange", binding.source, exchanges),
        "destination": _reference(kind, binding.destination, targets),
        "destination_type": kind,
        "routing_key": _text(binding.key),
    }
    if binding.arguments:
        bound["arguments_json"] = _text(json.dumps(dict(binding.arguments)))
    return bound


def _label_of(binding: Binding) -> str:
    # Its identifier in Terraform must not change when other resources are added or removed.
    words = f"{binding.source} to {binding.destination}"
    return shorten(_plain(words), repr(binding), _LONGEST)


def _reference(kind: str, name: str, labels: dict[str, str]) -> str:
    # Objects that are not in the module must exist already.
    return f"${{rabbitmq_{kind}.{labels[name]}.name}}" if name in labels else _text(name)


def _labels(names: Iterable[str]) -> dict[str, str]:
    taken: dict[str, str] = {}
    for name in names:
        label = _plain(name)
        taken[name] = label if label not in taken.values() else shorten(label, name, _LONGEST)
    return taken


def _plain(name: str) -> str:
    label = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_LONGEST]
    return label if re.match(r"[A-Za-z_]", label) else f"_{label}"


def _text(value: Any) -> Any:
    """Return a value that Terraform reads as it is: in its strings, these begin a template."""
    return re.sub(r"[$%](?=\{)", r"\g<0>\g<0>", value) if isinstance(value, str) else value
