"""Remedies for findings, with the exact commands. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kombu_binary_delay.ladder.foreign import ForeignLadder
from kombu_binary_delay.ladder.parts import Binding
from kombu_binary_delay.ladder.topology import Topology


@dataclass(frozen=True)
class Place:
    """The virtual host that commands are for, and the management API and its user."""

    vhost: str = "/"
    api: str = "http://localhost:15672"
    user: str = "guest"


HERE = Place()
MAKE = "'verify --fix' makes it"
MEND = "'verify --fix' mends it"
#: In the order in which rabbitmqctl takes them.
PERMISSIONS = ("configure", "write", "read")


def remake(topology: Topology) -> str:
    """Return how to replace objects that cannot be changed."""
    again = "'create'"
    if isinstance(topology, ForeignLadder):
        again = "let the programs that publish to it make it"
    return (
        f"it cannot be changed, only made anew: stop what publishes to it, wait until 'status' "
        f"shows the ladder empty or empty it with 'migrate', then 'teardown --ladder "
        f"{topology.prefix}' and {again}"
    )


def prefix_of(topology: Topology) -> str:
    """Return what the names of a namespace begin with, or those of another system's ladder."""
    return topology.namespace + ("" if isinstance(topology, ForeignLadder) else ".")


def stop_consumers(place: Place) -> str:
    """Return how to find the consumers of a level."""
    return f"stop them: 'rabbitmqctl list_consumers -p {shlex.quote(place.vhost)}' names them"


def unbind(place: Place, binding: Binding) -> str:
    """Return how to remove a foreign binding."""
    if binding.arguments:
        return "if nobody needs it, remove it on the exchange's page of the management interface"
    # The API names a binding by its key, encoded once; in a path, that is encoded once more. What
    # follows a ~ is a hash of the arguments.
    name = quote(binding.key, safe="").replace("~", "%7E") or "~"
    words = (place.vhost, "e", binding.source, "q" if binding.to_queue else "e")
    path = "/".join(quote(word, safe="") for word in (*words, binding.destination, name))
    url = shlex.quote(f"{place.api}/api/bindings/{path}")
    return f"if nobody needs it: curl -u {shlex.quote(place.user)} -X DELETE {url}"


def narrow(vhost: str, policy: Mapping[str, Any], prefix: str, *, operator: bool) -> str:
    """Return how to change a policy so that it does not match names with a prefix."""
    ours, given, kind = re.escape(prefix), policy["pattern"], "operator_" if operator else ""
    rest = given.removeprefix(f"^{ours}")
    # With an alternative, or a quantifier after the prefix, it may match other names.
    if rest != given and "|" not in given and not rest.startswith(("*", "?", "{")):
        words = [f"clear_{kind}policy", "-p", vhost, str(policy["name"])]
        return f"it is for the ladder's names alone, so remove it: rabbitmqctl {shlex.join(words)}"
    pattern = f"^(?!{ours}).*(?:{given})"
    words = [
        f"set_{kind}policy",
        "-p",
        vhost,
        "--priority",
        str(policy["priority"]),
        "--apply-to",
        str(policy["apply-to"]),
        str(policy["name"]),
        pattern,
        json.dumps(policy["definition"]),
    ]
    return f"leave out the ladder's names: rabbitmqctl {shlex.join(words)}"


def grant(
    vhost: str, user: str, row: Mapping[str, Any] | None, lacking: Mapping[str, Iterable[str]]
) -> str:
    """Return how to add missing permissions to those that a user has.

    :param row: the permissions that the user has; None for none.
    :param lacking: by each of :data:`PERMISSIONS`, the prefixes of names that it lacks.
    """
    patterns = []
    for permission in PERMISSIONS:
        has = str((row or {}).get(permission) or "")
        parts = [
            "" if has == "^$" else has,
            *(f"^{re.escape(p)}" for p in lacking.get(permission, ())),
        ]
        patterns.append("|".join(filter(None, dict.fromkeys(parts))) or "^$")
    words = ["set_permissions", "-p", vhost, user, *patterns]
    return f"rabbitmqctl {shlex.join(words)}"
