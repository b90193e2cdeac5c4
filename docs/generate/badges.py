"""Purpose: the badges of README, as pictures without an external service.

Each shows a value that is recorded here: in pyproject.toml, in the runs of the conformance suite,
and in docs/badges/coverage.txt, which `dev/test.sh --record-coverage` writes.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import NamedTuple

from . import conformance

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "badges"

_WIDE, _NARROW, _MARGIN = 7, 4.5, 8  # px
_GREY, _BLUE, _GREEN = "#4a5058", "#0a4bff", "#1a7f37"


class Badge(NamedTuple):
    """The text of a badge, and its link."""

    name: str
    label: str
    value: str
    colour: str
    link: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.svg"


def badges() -> list[Badge]:
    """Return all badges, with the recorded values."""
    project = (ROOT / "pyproject.toml").read_text()
    (license_name,) = re.findall(r'^license = "(.+)"$', project, re.MULTILINE)
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    # Not rounded up.
    coverage = f"{int(float((FOLDER / 'coverage.txt').read_text()))} %"
    where, checks = "docs/reference/compatibility.md", "CONTRIBUTING.md#checks"
    return [
        Badge("python", "Python", between(pythons), _BLUE, "pyproject.toml"),
        Badge("rabbitmq", "RabbitMQ", between(conformance.tried("rabbitmq")), _BLUE, where),
        Badge("celery", "Celery", between(conformance.tried("celery")), _BLUE, where),
        Badge("coverage", "coverage of the core", coverage, _GREEN, checks),
        Badge("license", "license", license_name, _GREEN, "LICENSE"),
    ]


def figures() -> dict[Path, str]:
    """Return the SVG text of each badge by its file."""
    return {badge.path: _draw(badge) for badge in badges()}


def row(_: list[str], __: str) -> str:
    """Return all badges as Markdown, for README."""
    return "\n".join(
        f"[![{each.label} {each.value}]({each.path.relative_to(ROOT).as_posix()})]({each.link})"
        for each in badges()
    )


def between(versions: list[str]) -> str:
    """Return the first and the last of versions, without their patch levels."""
    minors = sorted(tuple(map(int, each.split(".")[:2])) for each in versions)
    return " to ".join(".".join(map(str, each)) for each in (minors[0], minors[-1]))


def _draw(badge: Badge) -> str:
    label, value = badge.label, badge.value
    left, right = map(_width, (label, value))
    texts = "\n".join(
        f'<text x="{middle:g}" y="14">{escape(text)}</text>'
        for text, middle in ((label, left / 2), (value, left + right / 2))
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20">
<title>{escape(label)}: {escape(value)}</title>
<style>text{{font:11px Verdana,'DejaVu Sans',sans-serif;fill:#fff;text-anchor:middle}}</style>
<clipPath id="round"><rect width="{left + right}" height="20" rx="4"/></clipPath>
<g clip-path="url(#round)"><rect width="{left + right}" height="20" fill="{_GREY}"/>
<rect x="{left}" width="{right}" height="20" fill="{badge.colour}"/></g>
{texts}
</svg>
"""


def _width(text: str) -> int:
    """Return the approximate width of a text with its margins, in px."""
    return round(sum(_NARROW if each in " .fijlrtI" else _WIDE for each in text) + 2 * _MARGIN)
