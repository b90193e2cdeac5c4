"""The recording of the demo: what it shows, and when, with CSS alone."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest

from docs.generate import recording
from docs.generate.recording import CAST, HOLD, IDLE, SPEED

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def picture(tmp_path):
    """Draws a recording of these events."""

    def draw(*events):
        cast = tmp_path / "demo.cast"
        head = {"version": 2, "width": 20, "height": 4, "title": "demo"}
        cast.write_text("".join(json.dumps(line) + "\n" for line in (head, *events)))
        return recording.recording(cast)

    return draw


def still(svg):
    """Return the text that stands where nothing moves."""
    groups = ET.fromstring(svg).findall(f"{SVG}g")  # noqa: S314 - our own
    return [text.text for group in groups if group.get("class", "")[:1] == "e" for text in group]


def shown(svg, words):
    """Return when the words are there: each change of their visibility, in per cent."""
    (name,) = re.findall(rf'<g class="[ef] (k\d+)">\n(?:<(?!/g).*\n)*.*>{words}<', svg)
    (rule,) = re.findall(rf"@keyframes {name}{{(.*?}})}}", svg)
    return [(float(at), how) for at, how in re.findall(r"([\d.]+)%{visibility:(\w+)}", rule)]


def test_where_nothing_moves_the_last_screen_stands(picture):
    svg = picture([0, "o", "first\r\n"], [2, "o", "second"], [4, "o", "\x1b[2K\rthird"])

    assert still(svg) == ["first", "third"]
    assert "animation" not in svg.partition("@media (prefers-reduced-motion:no-preference)")[0]


def test_what_was_written_over_is_shown_as_long_as_it_stood(picture):
    svg = picture([0, "o", "first\r\n"], [1, "o", "second"], [2, "o", "\x1b[2K\rthird"])

    whole = 2 / SPEED + HOLD
    begin, end = 100 * 1 / SPEED / whole, 100 * 2 / SPEED / whole
    assert shown(svg, "second") == [
        (0, "hidden"),
        (pytest.approx(begin, abs=0.01), "visible"),
        (pytest.approx(end, abs=0.01), "hidden"),
    ]


def test_a_time_in_which_nothing_changes_is_shortened(picture):
    svg = picture([0, "o", "first\r\n"], [60, "o", "second"])

    assert f"animation:{IDLE / SPEED + HOLD:.2f}s" in svg
    assert "60 s, shown in" in svg


def test_columns_and_bars_do_not_depend_on_the_font(picture):
    svg = picture([0, "o", "  8 s \x1b[32m████\x1b[0m"])

    assert 'textLength="25.2">8 s<' in svg
    assert re.search(r'<rect class="green" x="[\d.]+" y="\d+" width="33.6"', svg)
    assert "█" not in svg


def test_the_recorded_demo_fits_its_terminal_and_ends_well():
    svg = recording.recording()

    assert CAST.with_suffix(".svg").stat().st_size < 150_000
    words = still(svg)
    assert words[-1] == "Nothing lost, nothing early."
    # The beginning has not left the screen.
    assert "a private RabbitMQ starts, on 127.0.0.1" in words
