"""What the demo prints has room in a terminal of 80 columns and 24 lines."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from dev.demo_count import Spread
from dev.demo_display import Display, Picture

LEVELS = [{125: 1, 250: 20, 375: 300}, {32_000: 1}, {128_000: 4, 256_000: 900}]
SLOW = Spread((12.4321, 120.5, 121.5))


@pytest.fixture
def display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich takes that for a terminal
    # As long after its start as on a slow machine.
    monkeypatch.setattr(Display, "_elapsed", 123.4)
    return Display()


@pytest.mark.parametrize("is_away", [False, True])
def test_a_picture_has_a_line_for_each_level_near_and_one_for_the_others(display, is_away, capsys):
    display.show(Picture(LEVELS, is_away, 500, 500, SLOW))

    drawn = display._console.render_lines(display._draw(), pad=False)  # noqa: SLF001
    lines = ["".join(segment.text for segment in line).rstrip() for line in drawn]
    display.close()
    counts = "500 of 500 have run, late 2.01 min / 2.02 min / 2.02 min (p50/p99/max)"
    assert lines[0] == f"123.4 s  {counts}"
    begins = [
        " ".join(word for word in line.split() if "\N{FULL BLOCK}" not in word) for line in lines
    ]
    assert begins[3:] == ["longer 904", "32 s 1", "125 ms to 375 ms 321", "have run 500"]


def test_a_picture_for_the_documentation_has_what_was_said_one_moment_and_the_report(
    display, tmp_path, capsys
):
    display.show(Picture(LEVELS, is_away=False, arrived=400, expected=500, lateness=SLOW))
    display.keep_moment()
    display.show(Picture(LEVELS, is_away=True, arrived=500, expected=500, lateness=SLOW))
    display.say("the worker is killed")
    display.report([("lost", 0)], good=True)
    display.save(tmp_path / "demo.svg", "the demo")

    text = " ".join(ET.fromstring((tmp_path / "demo.svg").read_text()).itertext())  # noqa: S314 - our own
    words = text.replace("\N{NO-BREAK SPACE}", " ")
    assert "400 of 500 have run" in words
    assert "is away" not in words
    assert (
        words.index("400 of 500")
        < words.index("the worker is killed")
        < words.index("Nothing lost")
    )


def test_the_report_takes_the_place_of_the_picture(display, capsys):
    display.show(Picture(LEVELS, is_away=False, arrived=500, expected=500, lateness=SLOW))
    display.report([("lost", 0), ("late (p50 / p99 / max)", SLOW)], good=True)

    # What is erased comes before what erases it.
    left = capsys.readouterr().out.rpartition("\x1b[2K")[2]
    assert "have run" not in left
    assert "lost" in left
    assert "Nothing lost, nothing early." in left
