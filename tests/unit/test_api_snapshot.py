"""The public API is frozen in api.txt: names, bases, signatures, fields, constants.

Changed it on purpose? Approve the change by writing the file anew, and commit the difference:

    python tests/unit/test_api_snapshot.py
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kombu_binary_delay

APPROVED = Path(__file__).with_name("api.txt")
PACKAGE = kombu_binary_delay.__name__


def test_the_public_api_is_the_approved_one() -> None:
    approved = APPROVED.read_text(encoding="utf-8")
    assert api().splitlines() == approved.splitlines(), f"see {__file__} on how to approve"


def api() -> str:
    lines: list[str] = []
    for name in sorted(kombu_binary_delay.__all__):
        lines += _describe(name, getattr(kombu_binary_delay, name))
    return "\n".join(lines) + "\n"


def _describe(name: str, thing: Any) -> Iterator[str]:
    if inspect.isclass(thing):
        bases = [base.__name__ for base in thing.__bases__ if base is not object]
        yield f"class {name}" + (f"({', '.join(bases)})" if bases else "")
        for line in _members(thing):
            yield f"    {line}"
    elif callable(thing):
        yield f"def {name}{_signature(thing)}"
    else:
        yield f"{name} = {thing!r}"


def _members(cls: type) -> Iterator[str]:
    """Yield what we define: a class that extends Kombu's shows only what it adds or overrides."""
    if dataclasses.is_dataclass(cls):
        yield f"__init__{_signature(cls.__init__)}"
        for field in dataclasses.fields(cls):
            yield f"{field.name}: {field.type}"
    members: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        if parent.__module__.split(".")[0] == PACKAGE:
            members |= vars(parent)
    fields = getattr(cls, "__dataclass_fields__", {})
    for name, member in sorted(members.items()):
        if name.startswith("_") or name in fields:
            continue
        yield _member(name, member)


def _member(name: str, member: Any) -> str:
    if isinstance(member, (classmethod, staticmethod)):
        return f"@{type(member).__name__} def {name}{_signature(member.__func__)}"
    if isinstance(member, enum.Enum):
        return f"{name} = {member.value!r}"
    if inspect.isfunction(member):
        return f"def {name}{_signature(member)}"
    if inspect.isclass(member):
        return f"{name} = {member.__name__}"
    if hasattr(member, "__get__"):  # property, cached_property
        getter = getattr(member, "fget", None) or getattr(member, "func", None)
        returns = f": {inspect.signature(getter).return_annotation}" if getter else ""
        return f"@property {name}{returns}"
    # The values of a table may be sets, which have no order.
    return f"{name} = {sorted(member) if isinstance(member, Mapping) else member!r}"


class _Plain(str):
    """An annotation that shows without quotes, whatever version of Python writes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_plain(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    returns = _plain(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returns))


def _plain(annotation: Any) -> Any:
    return _Plain(annotation) if isinstance(annotation, str) else annotation


if __name__ == "__main__":
    APPROVED.write_text(api(), encoding="utf-8")
