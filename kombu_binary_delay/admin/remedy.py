"""Remedies for findings, with the exact commands. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kombu_binary_delay.model.parts import Binding
from kombu_binary_delay.model.topology import Topology


@dataclass(frozen=True)
class Place:
    """The virtual host that commands are for, and the management API and its user."""

    vhost: str = "/"
    api: str = "http://localhost:15672"
    user: str = "guest"


HERE = Place()
MAKE = "'verify --fix' makes it"
MEND = "'verify --fix' mends it"


def remake(topology: Topology) -> str:
    """Return how to replace objects that cannot be changed."""
    return (
        f"it cannot be changed, only made anew: stop what publishes to it, wait until 'status' "
        f"shows the ladder empty or empty it with 'migrate', then 'teardown --ladder "
        f"{topology.prefix}' and 'create'"
    )


def stop_consumers(place: Place) -> str:
    """Return how to find the consumers of a level."""
    return f"stop them: 'rabbitmqctl list_consumers -p {shlex.quote(place.vhost)}' names them"


def unbind(place: Place, binding: Binding) -> str:
    """Return how to remove a foreign binding."""
    if binding.arguments:
        return "if nobody needs it, remove it on the exchange's page of the management interface"
    # The API names a binding by its key, encoded once; in a path, that is encoded once more.
    name = quote(binding.key, safe="") or "~"
    words = (place.vhost, "e", binding.source, "q" if binding.to_queue else "e")
    path = "/".join(quote(each, safe="") for each in (*words, binding.destination, name))
    url = shlex.quote(f"{place.api}/api/bindings/{path}")
    return f"if nobody needs it: curl -u {shlex.quote(place.user)} -X DELETE {url}"


def narrow(vhost: str, policy: Mapping[str, Any], namespace: str, *, operator: bool) -> str:
    """Return how to change a policy so that it does not match our objects."""
    pattern = f"^(?!{re.escape(namespace)}\\.).*(?:{policy['pattern']})"
    verb = "set_operator_policy" if operator else "set_policy"
    words = [
        verb,
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
    vhost: str, user: str, row: Mapping[str, Any] | None, namespace: str, what: Iterable[str]
) -> str:
    """Return how to add missing permissions to those that a user has.

    :param row: the permissions that the user has; None for none.
    :param what: the missing ones: ``configure``, ``write``, ``read``.
    """
    lacking = set(what)
    ours = f"^{re.escape(namespace)}\\."
    patterns = []
    for each in ("configure", "write", "read"):
        has = str((row or {}).get(each) or "")
        has = "" if has == "^$" else has
        wide = "|".join(filter(None, (has, ours))) if each in lacking else has or "^$"
        patterns.append(wide)
    words = ["set_permissions", "-p", vhost, user, *patterns]
    return f"rabbitmqctl {shlex.join(words)}"
