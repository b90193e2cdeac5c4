"""Purpose: the badges of README, as pictures that ask no service.

Each states what is recorded here: in pyproject.toml, in the runs of the conformance suite, and in
docs/badges/coverage.txt, which `dev/test.sh --record-coverage` writes.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from . import conformance

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "badges"

_WIDE, _NARROW, _MARGIN = 7, 4.5, 8  # px
_GREY, _BLUE, _GREEN = "#4a5058", "#0a4bff", "#1a7f37"


def badges() -> dict[Path, str]:
    """Return the text of each badge by its file."""
    runs = conformance.load()
    project = (ROOT / "pyproject.toml").read_text()
    (license_name,) = re.findall(r'^license = "(.+)"$', project, re.MULTILINE)
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    coverage = float((FOLDER / "coverage.txt").read_text())
    return {
        FOLDER / f"{name}.svg": _badge(label, value, colour)
        for name, label, value, colour in (
            ("python", "Python", _range(pythons), _BLUE),
            ("rabbitmq", "RabbitMQ", _range([run["rabbitmq"] for run in runs]), _BLUE),
            ("celery", "Celery", _range([run["celery"] for run in runs]), _BLUE),
            # Not rounded up.
            ("coverage", "coverage of the core", f"{int(coverage)} %", _GREEN),
            ("license", "license", license_name, _GREEN),
        )
    }


def _range(versions: list[str]) -> str:
    """Write the first and the last of versions, without their patch levels."""
    minors = sorted(tuple(map(int, each.split(".")[:2])) for each in versions)
    first, last = (".".join(map(str, each)) for each in (minors[0], minors[-1]))
    return f"{first} \N{EN DASH} {last}"


def _badge(label: str, value: str, colour: str) -> str:
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
<rect x="{left}" width="{right}" height="20" fill="{colour}"/></g>
{texts}
</svg>
"""


def _width(text: str) -> int:
    """Return about how wide a text is, with its margins, in px."""
    return round(sum(_NARROW if each in " .fijlrtI" else _WIDE for each in text) + 2 * _MARGIN)
