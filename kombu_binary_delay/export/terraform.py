"""A Terraform module for the provider ``cyrilgdn/rabbitmq``. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from kombu_binary_delay.errors import AddressError
from kombu_binary_delay.model.parts import Arguments, Binding, Exchange, Part, Queue

from .names import shorten

_HEAD = """\
# A ladder of kombu-binary-delay, as a Terraform module. Made by a program: do not edit.
# Keep this file beside that of another ladder until its queues are empty: Terraform deletes what is
# in no file any more, and prevent_destroy goes with it.

terraform {
  required_providers {
    rabbitmq = {
      source = "cyrilgdn/rabbitmq"
    }
  }
}

variable "vhost" {
  description = "The virtual host to make the ladder in."
  type        = string
  default     = VHOST
}
"""


def terraform(part: Part, vhost: str = "/") -> str:
    """Return a part as a module with one variable, ``vhost``, which is this one by default.

    Its queues have ``prevent_destroy``, because they hold delayed messages. That does not protect
    queues that a later module leaves out: Terraform deletes them, with what waits in them.

    :raises AddressError: if a name has a ``/``, which the provider cannot bind.
    """
    exchanges = _labels(each.name for each in part.exchanges)
    queues = _labels(each.name for each in part.queues)
    blocks = [_HEAD.replace("VHOST", _string(vhost))]
    blocks += [_exchange(each, exchanges[each.name]) for each in part.exchanges]
    blocks += [_queue(each, queues[each.name]) for each in part.queues]
    blocks += [_binding(each, exchanges, queues) for each in part.bindings]
    return "\n".join(blocks)


def _exchange(exchange: Exchange, label: str) -> str:
    arguments = ""
    if exchange.arguments:
        arguments = f"\n    arguments = {_object(exchange.arguments, 4)}"
    return f"""\
resource "rabbitmq_exchange" "{label}" {{
  name  = {_string(exchange.name)}
  vhost = var.vhost

  settings {{
    type        = {_string(exchange.type)}
    durable     = true
    auto_delete = false{arguments}
  }}
}}
"""


def _queue(queue: Queue, label: str) -> str:
    return f"""\
resource "rabbitmq_queue" "{label}" {{
  name  = {_string(queue.name)}
  vhost = var.vhost

  settings {{
    durable     = true
    auto_delete = false
    arguments_json = jsonencode({_object(queue.arguments, 4)})
  }}

  lifecycle {{
    prevent_destroy = true
  }}
}}
"""


def _binding(binding: Binding, exchanges: dict[str, str], queues: dict[str, str]) -> str:
    for name in (binding.source, binding.destination):
        # In the provider's identifier of a binding, it separates the names.
        if "/" in name:
            raise AddressError(
                f"the provider cyrilgdn/rabbitmq cannot bind {name!r}, since it has a /: export "
                f"definitions or kubernetes; or leave it out, and use the command create for it"
            )
    # Its identifier in Terraform must not change when other resources are added or removed.
    words = f"{binding.source} to {binding.destination}"
    label = shorten(_plain(words), repr(binding), 120)
    targets, kind = (queues, "queue") if binding.to_queue else (exchanges, "exchange")
    arguments = ""
    if binding.arguments:
        arguments = f"\n  arguments_json = jsonencode({_object(binding.arguments, 2)})"
    return f"""\
resource "rabbitmq_binding" "{label}" {{
  vhost            = var.vhost
  source           = {_reference("exchange", binding.source, exchanges)}
  destination      = {_reference(kind, binding.destination, targets)}
  destination_type = "{kind}"
  routing_key      = {_string(binding.key)}{arguments}
}}
"""


def _reference(kind: str, name: str, labels: dict[str, str]) -> str:
    # Objects that are not in the module must exist already.
    return f"rabbitmq_{kind}.{labels[name]}.name" if name in labels else _string(name)


def _labels(names: Iterable[str]) -> dict[str, str]:
    taken: dict[str, str] = {}
    for name in names:
        label = _plain(name)
        taken[name] = label if label not in taken.values() else shorten(label, name, 120)
    return taken


def _plain(name: str) -> str:
    label = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:120]
    return label if re.match(r"[A-Za-z_]", label) else f"_{label}"


def _object(arguments: Arguments, indent: int) -> str:
    if not arguments:
        return "{}"
    width = max(len(json.dumps(name)) for name, _ in arguments)
    inner = "".join(
        f"{' ' * (indent + 2)}{json.dumps(name):{width}} = {_value(value)}\n"
        for name, value in arguments
    )
    return f"{{\n{inner}{' ' * indent}}}"


def _value(value: str | int) -> str:
    return _string(value) if isinstance(value, str) else json.dumps(value)


def _string(text: str) -> str:
    """Return a string as an HCL literal, in which ``${`` and ``%{`` begin a template."""
    return '"' + "".join(_characters(text)) + '"'


def _characters(text: str) -> Iterator[str]:
    for position, character in enumerate(text):
        if character in '"\\':
            yield "\\" + character
        elif ord(character) < 0x20:
            yield f"\\u{ord(character):04x}"
        elif character in "$%" and text[position + 1 : position + 2] == "{":
            yield character * 2
        else:
            yield character
