"""The screen of ``status``: figures in columns, within the terminal, and trouble in sight."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kombu_binary_delay import Ladder, Settings, Topology
from kombu_binary_delay.cli import console, status_screen
from kombu_binary_delay.operate import (
    AmendmentsStatus,
    Arrivals,
    LadderStatus,
    Management,
    Status,
    UnreachableError,
    Waiting,
)
from kombu_binary_delay.operate.trouble import alarms

TOPOLOGY = Topology()


def waiting(topology=TOPOLOGY, count=1234):
    return tuple(
        Waiting(queue.name, queue.wait, 4 * queue.wait, count, 0, None, level)
        for level, part in enumerate(topology.levels)
        for queue in part.queues
    )


LADDER = LadderStatus(TOPOLOGY.prefix, current=True, queues=waiting(), rate_in=12.5, rate_out=3.25)
TROUBLES = tuple(f"{TOPOLOGY.prefix}.level-{i:02}.001: {'it is stuck ' * 9}" for i in range(15))
STATUS = Status(
    1.0,
    "4.3.6",
    "shop",
    (LADDER, replace(LADDER, name="old", current=False)),
    15,
    3,
    TROUBLES[:1],
    AmendmentsStatus(2),
    (("kbd.v2.relay-to-queue.ledger", 3),),
    Arrivals(12_345, 3.2, 120.4, 0.991, complete=True),
)
HISTORY = [(1.0, 0.5)] * 60


@pytest.fixture(params=[(80, 24), (120, 40)], ids=["80x24", "120x40"])
def terminal(request, monkeypatch):
    width, height = request.param
    made = Console(
        width=width, height=height, markup=False, highlight=False, force_interactive=True
    )
    for module in (console, status_screen):
        monkeypatch.setattr(module, "console", lambda: made)
    return made


def lines(terminal, drawn):
    with terminal.capture() as captured:
        terminal.print(drawn)
    return captured.get().splitlines()


@pytest.mark.parametrize("count", [0, 1, 1234, 9_876_543])
def test_no_line_is_longer_than_the_terminal_and_no_figure_is_cut(terminal, count):
    queues = waiting(count=count)
    ladder = replace(LADDER, queues=queues)
    stuck = replace(ladder, queues=(replace(queues[0], leaving=count, trouble="t"), *queues[1:]))

    shown = lines(terminal, status_screen.status(replace(STATUS, ladders=(ladder, stuck))))

    assert max(map(len, shown)) <= terminal.width
    assert "…" not in "".join(shown)
    if count:
        header = next(line.split() for line in shown if line.startswith("level"))
        assert header == ["level", "wait", "waiting", "left", "after"]
        first = next(line.split() for line in shown if line.startswith("00"))
        assert first[:4] == ["00", "125", "ms", f"{7 * count:,}"]


@pytest.mark.parametrize("radix", [3, 4])
@pytest.mark.parametrize("count", [1, 9_876_543])
@pytest.mark.parametrize("leaving", [0, 32])
def test_no_figure_is_cut_where_a_level_has_several_queues(terminal, radix, count, leaving):
    topology = Settings(radix=radix).topology()
    first, *others = waiting(topology, count)
    ladder = replace(LADDER, queues=(replace(first, leaving=leaving), *others))

    shown = lines(terminal, status_screen.status(replace(STATUS, ladders=(ladder,))))

    assert "…" not in "".join(shown)
    header = next(line.split() for line in shown if line.startswith("level"))
    assert ("leaving" in header) == bool(leaving)
    # The figure of each queue, where they have room.
    assert count > 1 or len([name for name in header if name.startswith(".")]) == radix - 1


@pytest.mark.parametrize("troubles", [1, 15])
def test_what_is_watched_fits_and_has_trouble_at_the_top(terminal, troubles):
    value = replace(STATUS, troubles=TROUBLES[:troubles])

    shown = lines(terminal, status_screen.watched(value, HISTORY))

    assert len(shown) < terminal.height
    assert max(map(len, shown)) <= terminal.width
    assert shown[0].startswith("RabbitMQ 4.3.6  virtual host shop")
    assert shown[1].startswith("parked 15   in relays 3   amendments 2")
    assert shown[2].startswith(f"! {TROUBLES[0][:30]}")
    assert "more lines" in shown[-1]


@pytest.mark.parametrize(
    "options",
    [{}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}],
    ids=["no terminal", "a dumb one"],
)
def test_where_nothing_can_be_drawn_again_each_look_is_printed_whole(options, monkeypatch):
    file = io.StringIO()
    looks: list[object] = []
    made = Console(file=file, width=80, height=24, markup=False, **options)
    for module in (console, status_screen):
        monkeypatch.setattr(module, "console", lambda: made)

    def look():
        if len(looks) == 2:
            raise KeyboardInterrupt
        looks.append(status_screen.watched(replace(STATUS, troubles=TROUBLES), HISTORY))
        return looks[-1]

    with pytest.raises(KeyboardInterrupt):
        console.watch(look, 0)

    shown = file.getvalue()
    assert shown.count("RabbitMQ 4.3.6  virtual host shop") == 2
    assert shown.count("level-14.001") == 2
    assert "more lines" not in shown
    assert "\x1b" not in shown


def test_when_all_is_seen_trouble_comes_last(terminal):
    shown = lines(terminal, status_screen.status(STATUS))

    assert any("relay-to-queue.ledger" in line for line in shown)
    assert shown[-2].startswith("! ") or shown[-1].startswith("! ")


@pytest.mark.parametrize("count", [1, 1234, 9_876_543])
def test_where_a_level_has_three_queues_each_has_a_column(terminal, count):
    ladder = replace(LADDER, queues=waiting(Topology(Ladder.uniform(4)), count))

    shown = lines(terminal, status_screen.status(replace(STATUS, ladders=(ladder,))))

    assert max(map(len, shown)) <= terminal.width
    header = next(line.split() for line in shown if line.startswith("level"))
    assert header == ["level", "wait", ".01", ".10", ".11", "waiting", "left", "after"]
    first = next(line.split() for line in shown if line.startswith("00"))
    assert first[:7] == ["00", "125", "ms", *[f"{count:,}"] * 3, f"{3 * count:,}"]


@pytest.mark.parametrize("form", ["radix 2", "radix 16", "direct"])
def test_ladders_of_another_form_are_shown_in_numbers(terminal, form):
    topology = Topology(Ladder.uniform({"radix 2": 2, "radix 16": 16}.get(form, 4)))
    queues = waiting(topology, 5)
    if form == "direct":
        queues += tuple(Waiting(f"d{i}", i, i, 7 + i, 0) for i in range(1, 9))
    ladder = replace(LADDER, queues=queues)

    shown = lines(terminal, status_screen.status(replace(STATUS, ladders=(ladder,))))

    assert max(map(len, shown)) <= terminal.width
    line = next(line.split() for line in shown if line.startswith("01"))
    assert f"{5 * len(topology.levels[1].queues)}" in line
    assert (sum(line.startswith("direct") for line in shown) == 5) == (form == "direct")


class Api(Management):
    """A management API that knows nodes."""

    def __init__(self, *nodes):
        super().__init__("http://a", "/", "u", "p")
        self.__dict__["nodes"] = nodes

    def get(self, *path, query=""):
        assert path == ("nodes",)
        if not vars(self)["nodes"]:
            raise UnreachableError("no")
        return vars(self)["nodes"]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"running": True, "mem_alarm": False, "disk_free_alarm": False, "partitions": []}, None),
        ({"running": False}, "is down"),
        ({"running": True, "mem_alarm": True}, "memory, and blocks all publishers"),
        ({"running": True, "disk_free_alarm": True}, "disk space, and blocks all publishers"),
        ({"disk_free": 1_124_000_000, "disk_free_limit": 50_000_000}, None),
        ({"disk_free": 650_000_000, "disk_free_limit": 50_000_000}, "has 600 MB of disk left"),
        ({"disk_free": "disk_free_monitoring_disabled", "disk_free_limit": 50_000_000}, None),
        ({"running": True, "partitions": ["b@h"]}, "does not see the nodes b@h"),
    ],
)
def test_an_alarm_of_a_node_is_named(node, words):
    troubles = list(alarms(Api({"name": "a@h", **node})))

    assert len(troubles) == (words is not None)
    assert all(words in trouble and "a@h" in trouble for trouble in troubles)


def test_alarms_that_a_user_may_not_see_are_left_out():
    assert not list(alarms(Api()))
