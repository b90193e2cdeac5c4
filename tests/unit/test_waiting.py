"""Waiting tasks as values: which are asked for, how they are sorted, counted and shown."""

from __future__ import annotations

import io
import json
import resource
import tempfile
import time
import zlib
from base64 import b64encode

import amqp
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from kombu_binary_delay import Ladder, Topology, operate
from kombu_binary_delay.amendments.memory import Fate, Memory
from kombu_binary_delay.amendments.parts import way_of_records
from kombu_binary_delay.amendments.record import MAX_TIME, CancelStamped, Supersede
from kombu_binary_delay.cli import binary_delay, output
from kombu_binary_delay.cli.tasks import _View
from kombu_binary_delay.cli.words import moment
from kombu_binary_delay.journal import events
from kombu_binary_delay.ladder.address import Destination
from kombu_binary_delay.ladder.identity import id_and_headers
from kombu_binary_delay.operate.waiting import journal, node, script, table
from kombu_binary_delay.operate.waiting.journal import level_at
from kombu_binary_delay.operate.waiting.table import taken_back

ALL = operate.Selection()
#: When these tests began, in milliseconds since the epoch.
BEGIN = time.time_ns() // 1_000_000
HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\n\u202egpj.exe\x9b31m"


def a_task(number=1, **given):
    told = {
        "id": f"{number:036}",
        "name": "shop.pay",
        "args": "(1,)",
        "kwargs": "{}",
        "exchange": "",
        "routing_key": "mail",
        "due": 1_800_000_000_000 + number,
        "retries": 0,
        "level": None,
        "source": "node",
    }
    return operate.WaitingTask(**{**told, **given})


def table_of(*tasks: operate.WaitingTask, missing=(), complete=True):
    table = operate.TaskTable("node")
    with table.filling():
        for task in tasks:
            table.add(task)
    table.missing, table.complete = missing, complete
    return table


@pytest.mark.parametrize(
    ("select", "takes"),
    [
        ({}, True),
        ({"name": "shop.*"}, True),
        ({"name": "SHOP.*"}, False),
        ({"name": ""}, False),
        ({"queue": "ma?l"}, True),
        ({"queue": "events:*"}, False),
        ({"ids": frozenset({f"{1:036}"})}, True),
        ({"ids": frozenset({"x"})}, False),
        ({"after": 1_800_000_000_001}, True),
        ({"after": 1_800_000_000_002}, False),
        ({"before": 1_800_000_000_001}, False),
        ({"before": 1_800_000_000_002, "name": "*.pay", "queue": "mail"}, True),
    ],
    ids=str,
)
def test_a_selection_takes_what_has_all_of_it(select, takes):
    assert table_of(a_task()).count(operate.Selection(**select)) == takes


def test_a_destination_is_named_with_its_exchange():
    assert a_task().queue == "mail"
    assert a_task(exchange="events", routing_key="a.b").queue == "events:a.b"


def test_the_earliest_are_in_order_and_all_are_counted():
    table = table_of(*map(a_task, (5, 3, 9, 1, 7)))
    assert [task.due % 10 for task in table.tasks(limit=3)] == [1, 3, 5]
    assert table.count() == 5


def test_tasks_are_counted_by_name_and_by_queue():
    table = table_of(a_task(1), a_task(2), a_task(3, name=None, exchange="e"))
    assert table.count_by("name") == [
        operate.Count("shop.pay", 2, 1_800_000_000_001, 1_800_000_000_002),
        operate.Count("", 1, 1_800_000_000_003, 1_800_000_000_003),
    ]
    counted = [(count.value, count.tasks) for count in table.count_by("queue")]
    assert counted == [("mail", 2), ("e:mail", 1)]


@pytest.mark.parametrize(
    ("args", "kwargs", "call"),
    [
        ("(886,)", "{'channel': 'push'}", "shop.pay(886, channel='push')"),
        ("(1, 2)", "{}", "shop.pay(1, 2)"),
        ("[]", "{'at': datetime.date(2030, 1, 31)}", "shop.pay(at=datetime.date(2030, 1, 31))"),
        ("()", None, "shop.pay()"),
        (None, None, "shop.pay"),
        ("(1, 2...", "{'a': 1, 'b...", "shop.pay((1, 2..., **{'a': 1, 'b...)"),
        ("()", "{'a b': 1}", "shop.pay(**{'a b': 1})"),
        ("()", "{**{}}", "shop.pay(**{**{}})"),
        ("()", "(" * 300, f"shop.pay(**{'(' * 300})"),
    ],
)
def test_a_task_is_shown_as_its_call(args, kwargs, call):
    assert a_task(args=args, kwargs=kwargs).call == call


@pytest.mark.parametrize(
    ("passed", "level"),
    [
        (0, "level-02.1"),
        (3_999, "level-02.1"),
        (4_000, "level-00.1"),
        (4_999, "level-00.1"),
        (5_000, None),
    ],
)
def test_the_journal_computes_the_level_from_the_time_that_has_passed(passed, level):
    topology = Topology(Ladder.binary(4, 1000))
    expected = level and f"{topology.prefix}.{level}"
    assert level_at(topology, 5_000, passed) == expected
    assert level_at(topology, 99_000_000, passed) is None


def page(*pairs, compressed=True):
    """Write a page as Erlang does: pairs of a routing key and the properties."""

    def binary(words):
        return b"m" + len(words).to_bytes(4, "big") + words

    listed = b"".join(b"h\x02" + binary(key) + binary(rest) for key, rest in pairs)
    term = b"l" + len(pairs).to_bytes(4, "big") + listed + b"j" if pairs else b"j"
    if compressed:
        return b"\x83P" + len(term).to_bytes(4, "big") + zlib.compress(term)
    return b"\x83" + term


def on_the_way(topology, left, number, **headers):
    """Write a message that had so many milliseconds left, as a node shows it in its level."""
    due = BEGIN + left
    headers = {"id": f"{number}", "task": "t", "x-binary-delay": {"due": due}, **headers}
    message = amqp.Message("", application_headers=headers)
    digits = topology.ladder.digits(left)
    key = topology.address(digits, Destination("", "mail"))
    return key.encode(), message._serialize_properties()  # noqa: SLF001 - as it is sent


def show(monkeypatch, name, *pairs):
    """Make the node show one queue, with these messages."""

    def run(_, expression):
        if "list_names" in expression:
            yield [b"queue", b"rabbit_quorum_queue", b64encode(name.encode())]
        else:
            yield [b"begin", b"0"]
            yield [b"page", b"%d" % len(pairs), b64encode(page(*pairs))]

    monkeypatch.setattr(node.NodeReader, "_run", run)


@pytest.mark.parametrize(
    ("properties", "id_"),
    [
        ({}, None),
        ({"message_id": "m"}, "m"),
        ({"message_id": "m", "application_headers": {"task": "t", "id": "i"}}, "i"),
        ({"message_id": "m", "application_headers": {"task": "t", "id": 7}}, None),
        ({"message_id": "m", "application_headers": {"id": "i"}}, "m"),
        ({"correlation_id": "request", "reply_to": "r"}, "request"),
        # A reply.
        ({"correlation_id": "request"}, None),
    ],
    ids=str,
)
def test_lists_name_a_message_as_the_consumers_that_amend_it(monkeypatch, properties, id_):
    topology = Topology(Ladder.binary(4, 1000))
    headers = properties.get("application_headers", {})
    waits = {"x-binary-delay": {"due": BEGIN + 7_000}}
    written = amqp.Message("", **{**properties, "application_headers": {**headers, **waits}})
    key = topology.address(topology.ladder.digits(7_000), Destination("", "mail"))
    show(
        monkeypatch,
        f"{topology.prefix}.level-02.1",
        (key.encode(), written._serialize_properties()),  # noqa: SLF001 - as it is sent
    )

    [listed] = operate.from_node("", "/", topology)

    assert listed.id == id_
    assert events.about(properties, "", "mail").get("id") == id_
    assert id_and_headers(properties)[0] == (id_ or "")


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_record_of_amendments_is_no_task_whatever_the_settings_ladder(monkeypatch, queue_type):
    settings = Topology(Ladder.binary(4, 1000), queue_type=queue_type)
    topology = Topology(Ladder.binary(4, 1000))
    written = amqp.Message("", application_headers={"x-binary-delay": {"due": BEGIN + 7_000}})
    key = topology.address(topology.ladder.digits(7_000), way_of_records(topology))
    record = key.encode(), written._serialize_properties()  # noqa: SLF001 - as it is sent
    show(monkeypatch, f"{topology.prefix}.level-02.1", record, on_the_way(topology, 7_000, 1))

    assert [task.id for task in operate.from_node("", "/", settings)] == ["1"]


def test_a_message_that_moves_down_meanwhile_is_listed_once(monkeypatch):
    topology = Topology(Ladder.binary(4, 1000))
    high, low = (f"{topology.prefix}.level-0{level}.1" for level in (2, 1))
    twice = on_the_way(topology, 6_000, 1)
    # The queue of level 1 is read when the message has left that of level 2.
    pages = {high: [twice, on_the_way(topology, 7_000, 2)], low: [twice, (b"no address", b"")]}

    def run(_, expression):
        if "list_names" in expression:
            names = [*pages, f"{topology.prefix}.level-00.1"]
            kinds = [b"rabbit_quorum_queue"] * 2 + [b"rabbit_classic_queue"]
            for name, kind in zip(names, kinds, strict=True):
                yield [b"queue", kind, b64encode(name.encode())]
        else:
            for number, name in enumerate((high, low)):
                yield [b"begin", b"%d" % number]
                yield [b"page", b"3", b64encode(page(*pages[name]))]
            yield [b"skip", b"1", b64encode(b"timeout")]

    monkeypatch.setattr(node.NodeReader, "_run", run)
    listing = operate.from_node("", "/", topology)
    assert [(task.id, task.level) for task in listing] == [("1", high), ("2", high)]
    assert not listing.complete
    assert listing.unseen() == (
        "1 classic queue of the ladder left out: a node cannot look into such",
        f"the queue {low} was not read: timeout",
        "amendments were not read: what was taken back is listed, too",
        "2 messages left the queue while it was read",
        "1 message could not be decoded",
    )


@pytest.mark.parametrize(
    ("reasons", "state", "left"),
    [
        (["superseded", None], "waiting", 7_000),
        (["superseded", "postponed"], "postponed", 7_000),
        (["superseded", "cancelled"], "superseded", 6_000),
        ([None, "superseded"], "waiting", 6_000),
    ],
    ids=str,
)
def test_of_a_replaced_task_the_valid_one_is_told_of(monkeypatch, reasons, state, left):
    topology = Topology(Ladder.binary(4, 1000))
    name = f"{topology.prefix}.level-02.1"
    both = [on_the_way(topology, 6_000, 1, place=0), on_the_way(topology, 7_000, 1, place=1)]
    show(monkeypatch, name, *both)

    def judge(properties):
        reason = reasons[properties["application_headers"]["place"]]
        return reason and Fate(reason)

    story = operate.story_by_node("", "/", topology, "1", judge)
    assert story.state == state
    assert story.task is not None
    assert story.task.due == BEGIN + left
    listed = list(operate.from_node("", "/", topology, judge=judge))
    assert len(listed) == sum(reason in (None, "postponed") for reason in reasons)


def journalled(monkeypatch, *lines):
    """Make the journal have these lines."""
    monkeypatch.setattr(journal, "has_journal", lambda *_: True)
    monkeypatch.setattr(journal, "_lines", lambda *_: lines)


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        (["scheduled"], "waiting"),
        (["scheduled", "released"], "arrived"),
        (["scheduled", "released", "executed"], "executed"),
        (["scheduled", "released", "executed REVOKED"], "cancelled"),
        (["scheduled", "cancelled"], "cancelled"),
        (["scheduled", "cancelled", "released"], "cancelled"),
        (["scheduled", "cancelled", "released", "executed"], "executed"),
        (["scheduled", "cancelled", "scheduled"], "waiting"),
        (["scheduled", "postponed"], "postponed"),
        (["scheduled", "postponed", "scheduled later"], "waiting"),
        (["scheduled", "released", "scheduled"], "waiting"),
        (["scheduled", "of another kind"], "waiting"),
        (["released", "executed"], "executed"),
        # A retry is scheduled before the attempt ends.
        (["scheduled", "released", "scheduled later", "executed RETRY"], "waiting"),
        (["scheduled", "scheduled later", "executed RETRY", "released later"], "arrived"),
        # What was replaced is dropped when it is due.
        (["scheduled", "scheduled later", "cancelled"], "waiting"),
        (["scheduled later", "scheduled", "executed", "cancelled later"], "executed"),
        (["scheduled", "scheduled later", "cancelled at any time"], "cancelled"),
    ],
    ids=str,
)
def test_the_story_of_a_task_ends_with_what_is_known_of_its_last_attempt(monkeypatch, kinds, state):
    soon = (BEGIN + 3_600_000) * 1000
    due = {"later": soon + 2_000_000, "at any time": None}
    told = [{"event": "cancelled", "at": 1, "id": "another", "due": soon}]
    for event in kinds:
        kind, _, rest = event.partition(" ")
        ended = rest if rest.isupper() else "SUCCESS"
        told.append({"event": kind, "at": 1, "id": "t", "due": due.get(rest, soon), "state": ended})
    journalled(monkeypatch, *map(json.dumps, told))

    story = operate.story_by_journal(None, Topology(), "t")

    assert (story.state, len(story.events)) == (state, len(kinds))


@pytest.mark.parametrize(
    ("left", "ran", "said"),
    [
        (
            4,
            700,
            "4.7 s: 4 s by the broker; 200 ms in the backlog of its queue; 500 ms in the worker",
        ),
        (0, None, "4.2 s: nothing by the broker; 4.2 s in the backlog of its queue"),
        (None, None, "4.2 s: 4.2 s in the backlog of its queue, or by the broker"),
    ],
)
def test_the_story_says_where_lateness_arose(monkeypatch, left, ran, said):
    begin = (BEGIN // 1000 - 3600) * 1_000_000
    due = begin + 5_000_000
    prefix = Topology().prefix
    came = {"event": "released", "id": "t", "at": due + 4_200_000, "due": due}
    if left is not None:
        came["left"] = due + left * 1_000_000
    told = [
        # An attempt before, which was later.
        {"event": "scheduled", "id": "t", "at": begin - 99_000_000, "due": begin - 98_000_000},
        {"event": "released", "id": "t", "at": begin - 1, "due": begin - 98_000_000},
        {"event": "scheduled", "id": "t", "at": begin, "due": due, "levels": prefix},
        came,
    ]
    if ran is not None:
        told.append(
            {"event": "executed", "id": "t", "at": due + 4_000_000 + ran * 1000, "due": due}
        )
    journalled(monkeypatch, *map(json.dumps, told))

    story = operate.story_by_journal(None, Topology(), "t")
    written = io.StringIO()
    Console(file=written, width=120).print(output.story(story))

    assert f"It was late by {said}." in written.getvalue()
    assert story.asked == 5000
    assert story.levels == ((f"{prefix}.level-01.0101", begin // 1000 + 5000),)
    assert f"{moment(due // 1000)}, {prefix}.level-01.0101" in written.getvalue()


#: Numbers and others that ended a reader: Python has them, and what it calls does not.
ODD = [10**40, 2**63, MAX_TIME * 1000 + 1000, -1, 1.5, float("inf"), True, "soon", [], {}]
JSON = st.recursive(
    st.none() | st.sampled_from(ODD) | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    *("event", "at", "id", "due", "task", "name", "args", "kwargs", "exchange", "key"),
    *("retries", "levels", "state", "generation", "hops", "ladder", "left"),
)
SCHEDULED = {"event": "scheduled", "at": 1, "due": (BEGIN + 3_600_000) * 1000, "id": "t"}
#: An event as it should be, in which a field or two are not.
FORGED = st.builds(
    lambda kind, odd: {**SCHEDULED, "event": kind, **odd},
    st.sampled_from(["scheduled", "released", "executed", "cancelled", "postponed"]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2),
)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("event", [None, 7, ["scheduled"]]),
        ("at", [None, *ODD]),
        ("due", [None, *ODD]),
        ("retries", ODD),
        ("hops", ODD),
        ("id", [7, ["t"]]),
        ("generation", ["x-delay-key", [1]]),
    ],
)
def test_a_line_with_a_value_that_no_event_has_is_no_event(field, values):
    assert events.from_line(json.dumps(SCHEDULED)) == SCHEDULED
    for value in values:
        assert events.from_line(json.dumps({**SCHEDULED, field: value})) is None, value


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "id": st.text() | st.integers(),
            "task": st.text(),
            "eta": st.sampled_from(["0001-01-01T00:00Z", "9999-12-31T23:59-12:00"]) | JSON,
            "x-delay-jitter": JSON,
            "retries": JSON,
            "argsrepr": JSON,
            "x-delay-key": st.text(),
            "stamps": JSON,
            "x-binary-delay": st.fixed_dictionaries({"due": JSON}),
        },
    )
)
def test_each_event_that_is_written_is_read_again(headers):
    topology = Topology()
    properties = {"application_headers": headers}
    key = topology.address(topology.ladder.digits(7_000), Destination("", "mail"))
    scheduled = events.scheduled(topology, properties, topology.level_name(3), key)
    written = [{"event": "released", **events.about(properties, "", "mail")}]
    # Of a forged message alone, it is not known when it is due.
    if scheduled is not None and "due" in scheduled:
        written.append({"event": "scheduled", **scheduled})
    for fields in written:
        event = {"at": BEGIN * 1000, **fields}
        assert events.from_line(events.to_line(event)) == event


@example([json.dumps({**SCHEDULED, "at": 10**40})])
@given(st.lists(st.one_of(FORGED, JSON).map(json.dumps) | st.binary() | st.text(), max_size=6))
def test_no_line_of_the_journal_ends_a_listing_or_hides_another(lines):
    kept = {**SCHEDULED, "id": "kept"}
    read = [events.from_line(line) for line in lines]
    memory = Memory(BEGIN)
    memory.learn(CancelStamped((("order", ("7",)),), BEGIN), BEGIN)
    memory.learn(Supersede("t", "1-a", BEGIN, BEGIN), BEGIN)

    def judge(properties):
        return memory.judge(properties, BEGIN)

    with pytest.MonkeyPatch.context() as patch:
        journalled(patch, *lines, json.dumps(kept))
        listing = operate.from_journal(None, Topology(), judge=judge)
        assert "kept" in [task.id for task in listing]
        skipped = read.count(None)
        assert any("cannot be read" in said for said in listing.unseen()) == (skipped > 0)
        drawn(output.tasks(list(listing), output.task_foot(listing, ALL, 1)), 200)
        listing.histogram(0, 2**53, 60)
        for id_ in ("t", "kept"):
            drawn(output.story(operate.story_by_journal(None, Topology(), id_, judge)), 200)
    for event in filter(None, read):
        assert events.from_line(events.to_line(event)) == event


@pytest.mark.parametrize("compressed", [True, False])
def test_a_page_of_messages_is_read_as_erlang_writes_it(compressed):
    for pairs in ([], [(b"k", b"")], [(b"a.b", b"x" * 1000), (b"", b"\x00")]):
        assert node._pairs(page(*pairs, compressed=compressed)) == pairs  # noqa: SLF001 - its reader
    for wrong in (b"", b"\x83", b"\x83a\x01", b"\x83P\x00\x00\x00\x09no", page((b"k", b""))[:-9]):
        with pytest.raises(
            operate.UnreachableError, match="something else than a page of messages"
        ):
            node._pairs(wrong)  # noqa: SLF001 - its reader


def test_nothing_that_somebody_names_is_erlang_or_shell():
    hostile = '">>), init:stop(), (<<"$(reboot)`\'\\'
    for written in (script.read_queues(hostile, [hostile]), script.list_queues(hostile, [hostile])):
        assert "reboot" not in written
        assert "stop" not in written


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--node-command", "false"], 4, "the node: false rabbitmqctl printed nothing. Run this"),
        (["--node-command", "nonesuch"], 4, "Run this on the broker's host, or keep a journal ("),
        (["--node-command", "echo kbd"], 4, "cannot list from the node: echo kbd rabbitmqctl"),
        (
            ["--node-command", "docker 'x"],
            2,
            '"docker \'x", cannot be read as a shell reads them: No',
        ),
        (["--due-before", "soon"], 2, "is no delay"),
        (["--due-before", "20300131"], 2, "is no delay"),
        (["--every", "nan"], 2, "'nan' is no number of seconds"),
        (["--every", "inf"], 2, "'inf' is no number of seconds"),
        (["--watch", "--limit", "0"], 2, "--watch needs a --limit above 0"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_an_error(words, code, said):
    done = CliRunner().invoke(binary_delay, ["tasks", *words])
    assert (done.exit_code, said in done.stderr) == (code, True), done.output


@pytest.mark.parametrize("command", ["cancel", "reschedule"])
@pytest.mark.parametrize("id_", ["-7", "--of=9", "--nam"])
def test_an_id_that_looks_like_an_option_is_asked_for_after_two_dashes(command, id_):
    done = CliRunner().invoke(binary_delay, [command, id_])
    assert done.exit_code == 2
    words = " ".join(done.stderr.split())
    assert f"begins with a dash after '--', as in 'binary-delay {command} -- ID'" in words, words


def test_without_room_for_temporary_files_a_listing_is_no_fault_of_the_broker(monkeypatch):
    soon = (BEGIN + 3_600_000) * 1000
    scheduled = {"event": "scheduled", "at": 1, "due": soon, "args": "x" * 1000}
    monkeypatch.setattr(table, "_CACHE", 1)
    journalled(monkeypatch, *[json.dumps({**scheduled, "id": "1"})] * 1000)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    # It stands for a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(operate.OperationError, match=r"temporary database .* SQLITE_TMPDIR"):
            list(operate.from_journal(None, Topology()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    with pytest.raises(operate.OperationError, match="no temporary file can be made: No usable"):
        operate.from_node("true", "/", Topology())


def test_times_are_in_utc_whatever_the_machines_time_zone_is(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        written = moment(0), moment(0, zone=False)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert written == ("1970-01-01 00:00:00 UTC", "1970-01-01 00:00:00")


def test_a_task_has_two_lines_where_all_are_printed(capsys):
    _View(table_of(a_task(1), a_task(2)), ALL, 0, None).print()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        "2027-01-15 08:00:00 UTC",
        "",
        "2027-01-15 08:00:00 UTC",
        "",
        "2 waiting, from the node",
    ]


def test_what_is_good_to_know_is_a_note_in_one_line_and_what_is_wrong_is_marked():
    sentences = ("it is empty", taken_back(1), taken_back(2))
    wrong = drawn(output.task_foot(table_of(missing=sentences, complete=False), ALL, 0), 200)
    fine = drawn(output.task_foot(table_of(missing=sentences), ALL, 0), 200)
    assert [line[:2] for line in wrong.splitlines()[1:]] == ["! "] * 3
    assert fine.splitlines()[1].rstrip() == (
        "note: it is empty; 1 cancelled or superseded task is not shown; it will not run; "
        "2 cancelled or superseded tasks are not shown; they will not run"
    )


@pytest.mark.parametrize(
    ("action", "drawing", "text"),
    [
        (
            "cancel",
            output.amended,
            "cancellation recorded for 1 task, kept until 1970-01-01 00:00:09 UTC",
        ),
        (
            "cancel",
            output.amended_by_id,
            (
                "cancellation recorded for 1 id, kept until 1970-01-01 00:00:09 UTC (not checked "
                "whether they wait)"
            ),
        ),
        (
            "reschedule",
            output.amended,
            (
                "recorded for 1 task: not before 1970-01-01 00:00:05 UTC; one that is due later "
                "keeps its time"
            ),
        ),
    ],
)
def test_what_was_recorded_is_said_and_no_more(action, drawing, text):
    amended = operate.Amended(action, ("x",), 5000, 9000)
    assert drawn(drawing(amended), 200).splitlines()[0].rstrip() == text


def test_where_rabbitmqctl_is_not_found_all_ways_out_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(binary_delay, ["tasks", "--source", "node"])
    said = "Run this on the broker's host, or give --node-command, or keep a journal (setting"
    assert (done.exit_code, said in done.stderr) == (4, True), done.output


def drawn(value, width):
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system=None).print(value)
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("size", [1, 1000])
def test_a_listing_fits_its_terminal_and_obeys_nothing_in_it(width, size, monkeypatch):
    monkeypatch.setattr(output, "console", lambda: Console(width=width))
    words = HOSTILE * size
    hostile = a_task(name=words, args=words, kwargs=words, routing_key=words, id=words)
    listed = [hostile, a_task(), a_task(due=2**63 - 1), a_task(name=None, id=None, args=None)]
    waiting = table_of(*listed, *map(a_task, range(5)), missing=("a queue was not read",))
    foot = output.task_foot(waiting, ALL, 4)
    shown = drawn(output.tasks(listed, foot), width)
    story = operate.Story(
        words, "waiting", "node", hostile, (operate.Event(words, 1, state=words),)
    )
    shown += drawn(output.story(story), width)
    shown += drawn(output.counts(waiting.count_by("name"), "name", foot), width)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    # A line or two for each, and no stairs.
    assert len(lines) < 40
    assert all(line.isprintable() for line in lines), [
        line for line in lines if not line.isprintable()
    ]
    assert "4 of 9 waiting" in shown


def test_ids_queues_and_keys_are_shown_and_obeyed_by_no_terminal():
    places = (Destination("", HOSTILE), Destination(HOSTILE, HOSTILE))
    shown = [
        output.amended(operate.Amended("cancel", (HOSTILE,), None, 9000)),
        output.redriven(
            operate.Redrive(tuple(operate.Parked(place, 1, 1) for place in places), ())
        ),
        output.plan(operate.Preview(((HOSTILE, 1),))),
        output.verification(
            operate.Verification(
                "4.3",
                HOSTILE,
                "kbd",
                (operate.Difference("error", HOSTILE, HOSTILE, HOSTILE, HOSTILE),),
            )
        ),
        output.status(
            operate.Status(0, "4.3", HOSTILE, (), 0, 1, (HOSTILE,), in_relays=((HOSTILE, 1),))
        ),
    ]
    for drawing in shown:
        lines = drawn(drawing, 200).splitlines()
        assert any("gpj.exe" in line for line in lines)
        assert all(line.isprintable() for line in lines), lines


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ((), ""),
        (("a",), "; in use, and kept: 1 queue"),
        (("a", "b"), "; in use, and kept: 2 queues"),
    ],
)
def test_queues_that_are_in_use_are_counted_where_there_are_any(kept, said):
    shown = drawn(output.pruning(operate.Pruning((), kept, ())), 200)
    assert shown.splitlines()[0].rstrip() == f"0 queues and 0 exchanges removed{said}"


def test_more_names_than_linux_takes_in_an_argument_are_asked_for_in_parts():
    names = [f"{'long' * 60}-{number}" for number in range(1000)]

    parts = list(script.batches(names))

    assert [name for part in parts for name in part] == names
    assert max(len(script.read_queues("v" * 255, part)) for part in parts) < 131_072
    assert list(script.batches([])) == []
