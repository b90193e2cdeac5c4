"""The picture of a ladder: what it says, that nothing hides anything, and how it looks."""

from __future__ import annotations

import io
import re
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import resvg_py
from PIL import Image, ImageChops, ImageFont

from kombu_binary_delay import Ladder, Topology
from kombu_binary_delay.export import svg
from kombu_binary_delay.export.brief import shorten_key, shorten_words
from kombu_binary_delay.ladder.durations import human
from kombu_binary_delay.ladder.foreign import FOREIGN_LADDERS

GOLDEN = Path(__file__).parent / "pictures"
HOUR = 3_600_000
LONG = "company.reminders.europe-west.high-priority"
SHORT, DEFAULT = Topology(Ladder.uniform(4, 4)), Topology()
#: Each has a picture in ``pictures``, which shows the look of one kind of figure.
PICTURES = {
    "whole": (SHORT, 10_000, "mail"),
    "folded": (DEFAULT, HOUR, "mail"),
    "one-queue-a-level": (DEFAULT, HOUR + 125, LONG),
    "every-level": (DEFAULT, DEFAULT.ladder.maximum, "mail"),
    "skip": (Topology(layout="skip"), HOUR, "mail"),
    "nothing-to-wait": (DEFAULT, 0, "mail"),
    "celery-native": (FOREIGN_LADDERS["celery"], 10_000, "mail"),
}
CASES = {
    **PICTURES,
    **{
        f"{topology.prefix}, {delay} ms": (topology, delay, "mail")
        for topology in (SHORT, DEFAULT, Topology(SHORT.ladder, layout="skip"))
        for delay in (125, 375, 1_000, 3_000, 10_000, 24_000, 31_875)
    },
    "binary": (Topology(Ladder.binary()), 98_765_432, "mail"),
    "decimal": (Topology(Ladder.uniform(10)), 987_000, LONG),
    "decimal, skip": (Topology(Ladder.uniform(10), layout="skip"), 900_000, "mail"),
    "foreign": (FOREIGN_LADDERS["nservicebus"], 1_234_000, LONG),
    "strange": (Topology(Ladder(2000, (4, 3)), "Up_per"), 6_000, 'Straße "${x}" %{y} \\ #1; <b>'),
}
#: Pixels a character, in fonts that are rather wide; and how far a text rises above its line.
WIDTHS, RISE = {"title": 8.1, "note": 7.0, "key": 7.25, "address": 7.85}, 9


def read(case):
    return ET.fromstring(svg(*CASES[case]))  # noqa: S314 - our own


def texts(image):
    return [element for element in image.iter() if element.tag.endswith("}text")]


def place(text):
    """Where a text stands: left, top, right and bottom."""
    width = WIDTHS[text.attrib["class"]] * len("".join(text.itertext()))
    x, y = float(text.attrib["x"]), float(text.attrib["y"])
    left = (
        x - width * {"start": 0, "middle": 0.5, "end": 1}[text.attrib.get("text-anchor", "start")]
    )
    return left, y - RISE, left + width, y + 2


def meet(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_written_over_a_box_or_another_text_or_the_edge(case):
    image = read(case)
    width, height = float(image.attrib["width"]), float(image.attrib["height"])
    boxes = [
        (x, y, x + float(element.attrib["width"]), y + float(element.attrib["height"]))
        for element in image.iter()
        if element.tag.endswith("}rect") and "x" in element.attrib
        for x, y in [(float(element.attrib["x"]), float(element.attrib["y"]))]
    ]
    assert len(boxes) > 2

    placed = {text: place(text) for text in texts(image)}
    for text, (left, top, right, bottom) in placed.items():
        said = "".join(text.itertext())
        assert left >= 0, said
        assert right <= width, said
        assert top >= 0, said
        assert bottom <= height, said
        for box in boxes:
            inside = box[0] <= left and right <= box[2] and box[1] <= top and bottom <= box[3]
            assert inside or not meet(placed[text], box), said
    for (one, at), (other, elsewhere) in combinations(placed.items(), 2):
        assert not meet(at, elsewhere), ("".join(one.itertext()), "".join(other.itertext()))


@pytest.mark.parametrize("case", CASES)
def test_a_picture_fits_a_page_and_has_each_queue_that_the_message_waits_in(case):
    topology, delay, queue = CASES[case]
    image = read(case)
    words = ["".join(text.itertext()) for text in texts(image)]

    digits = topology.ladder.digits(delay)
    waits = [
        human(int(digit, 2) * weight)
        for digit, weight in zip(reversed(digits), reversed(topology.ladder.weights), strict=False)
        if int(digit, 2)
    ]
    assert set(waits) <= set(words)
    assert f"at {human(delay)}" in words
    assert queue in "".join(image.itertext())
    # One that waits in more than seven queues is higher, and no wait can be left out.
    assert float(image.attrib["height"]) <= 1005 or len(waits) > 7


def test_what_xml_does_not_allow_in_a_name_is_replaced():
    image = ET.fromstring(svg(SHORT, 10_000, "mail\x00\x1b\ufffe\uffff"))  # noqa: S314 - our own

    assert "mail\N{REPLACEMENT CHARACTER}" in "".join(image.itertext())


@pytest.mark.parametrize("case", CASES)
def test_levels_that_are_folded_are_counted(case):
    topology, *_ = CASES[case]
    words = ["".join(text.itertext()) for text in texts(read(case))]

    folded = sum(int(word.split()[0]) for word in words if word.endswith(" more levels"))
    names = {
        topology.level_name(level).rpartition(".")[2] for level in range(topology.ladder.levels)
    }
    levels = {word.partition(".")[0] for word in words} & names
    assert folded + len(levels) == topology.ladder.levels


def test_a_small_ladder_is_shown_whole():
    words = {"".join(text.itertext()) for text in texts(read("whole"))}

    assert {"publish", "delayed by 10 s", "0 s to 8 s", "8 s to 10 s", "at 10 s"} <= words
    assert {"00.00.01.01.@..mail", "level-02.01", "*.*.01.#", "375 ms", "parking"} <= words


# -- how it looks -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def font(tmp_path_factory):
    """The font that Pillow brings: a bare machine has none, and others have others."""
    path = tmp_path_factory.mktemp("font") / "font.ttf"
    loaded: Any = ImageFont.load_default(10)
    path.write_bytes(loaded.path.getvalue())
    return str(path), loaded.getname()[0]


def drawn(text, font):
    """Render it by a library that needs no browser."""
    path, family = font
    png = resvg_py.svg_to_bytes(
        svg_string=text,
        background="#ffffff",
        skip_system_fonts=True,
        font_files=[path],
        sans_serif_family=family,
        monospace_family=family,
    )
    return Image.open(io.BytesIO(bytes(png))).convert("RGB")


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_looks_as_it_did(name, font):
    """Its text may differ from the one that is kept, its pixels may not.

    After a change that is meant, and looked at: ``python tests/unit/test_pictures.py``.
    """
    golden = drawn((GOLDEN / f"{name}.svg").read_text(), font)
    image = drawn(svg(*PICTURES[name]), font)

    assert image.size == golden.size
    more = ImageChops.difference(image, golden).point(lambda level: 255 * (level > 32))
    different = more.convert("L")
    share = sum(different.histogram()[1:]) / (image.width * image.height)
    assert share < 0.0001, f"differs in {different.getbbox()}"


def test_a_renderer_that_knows_little_of_css_shows_the_text_and_no_black_boxes(font):
    whole = svg(*PICTURES["folded"])
    without_text = re.sub("<text.*?</text>", "", whole)

    images = drawn(whole, font), drawn(without_text, font)
    shades, fewer = (image.convert("L").histogram() for image in images)

    # Mostly the ground and the boxes, both light; and letters, which are dark.
    assert sum(shades[230:]) > 0.85 * sum(shades)
    assert sum(shades[:100]) > 1.2 * sum(fewer[:100])


# -- texts that are shortened -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("*.*.01.#", "*.*.01.#"),
        ("*.*.*.*.*.*.*.01.#", "*…*.*.*.*.01.#"),
        ("#.@..company.reminders", "#…reminders"),
        ("#.@..companyreminders", "#.@..companyr…"),
    ],
)
def test_a_key_is_shortened_by_whole_words(key, text):
    assert shorten_key(key, 14) == text


@pytest.mark.parametrize(
    ("read_at", "text"),
    [
        ((), "…03.04.05.06.@..mail"),
        ((1,), "00.01.02.03.04.05…"),
        ((3,), "00.01.02.03.04.05…"),
        ((7, 8, 9), "…03.04.05.06.@..mail"),
    ],
)
def test_of_an_address_what_is_read_remains_and_what_is_beside_it(read_at, text):
    words = ["00", "01", "02", "03", "04", "05", "06", "@", "", "mail"]
    kinds = ["read" if at in read_at else "" for at in range(len(words))]

    short = shorten_words(words, kinds, 20)

    assert "".join(text for text, _ in short) == text
    assert [word for word, kind in short if kind] == [words[at] for at in read_at if words[at]]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for picture, arguments in PICTURES.items():
        (GOLDEN / f"{picture}.svg").write_text(svg(*arguments) + "\n")
