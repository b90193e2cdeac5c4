"""What is sent, and what becomes of it, with a real broker and without Spark."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime, timedelta
from itertools import islice
from threading import Timer
from types import SimpleNamespace

import pyarrow as pa
import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue

from kombu_binary_delay import AmendmentError, UnconfirmedError
from kombu_binary_delay.amendments.channel import RecordChannel
from kombu_binary_delay.amendments.record import Supersede
from kombu_binary_delay.amendments.stream import Amendments
from kombu_binary_delay.ladder.delay import spread
from kombu_binary_delay.ladder.foreign import FOREIGN_LADDERS
from kombu_binary_delay.ladder.ladder import hops
from kombu_binary_delay.publishing.way_out import WayOut
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark import send as sending
from kombu_binary_delay.spark.publish import receipts_of
from kombu_binary_delay.spark.rows import COLUMNS, Rows
from kombu_binary_delay.spark.send import _PAUSE, Sender, Target, _Producer
from tests.starting import take_away
from tests.waits import wait_until

ETA = datetime.now(UTC) + timedelta(days=2)
MICROS = round(ETA.timestamp() * 1_000_000)
DAY = 86_400_000  # milliseconds
OURS = "kombu_binary_delay:Transport"


def micros(seconds):
    return time.time_ns() // 1000 + round(seconds * 1_000_000)


def send(vhost, rows, settings=None, size=10_000, **target):
    # On the ladder with the fewest queues.
    target["settings"] = {"radix": 2, **(settings or {})}
    return sent_by(Sender(Target(vhost.url, **target)), rows, size)


def batches(rows, size=10_000):
    """Yield rows as Spark does."""
    kinds = {"eta": pa.int64(), "due": pa.int64(), "expires": pa.int64(), "priority": pa.int32()}
    kinds["countdown"] = pa.float64()
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in COLUMNS])
    rows = iter(rows)
    while part := list(islice(rows, size)):
        yield pa.RecordBatch.from_pylist(part, schema)


def outcomes_of(parts):
    """Return what is known of each row, as an object."""
    names = ("due", "published_at", "queue", "status", "detail")
    return [
        SimpleNamespace(
            task_id=rows["task_id"][place],
            action=rows.actions[place],
            **{name: getattr(rows, name)[place] for name in names},
        )
        for rows in parts
        for place in range(len(rows))
    ]


def sent_by(sender, rows, size=10_000):
    return [one for _, parts in sender.send(batches(rows, size)) for one in outcomes_of(parts)]


def take(vhost, queue, transport="pyamqp"):
    with Connection(vhost.url, transport=transport) as connection:
        message = Queue(queue)(connection.default_channel).get(no_ack=True)
        return None if message is None else message


def compared(message):
    """What a worker sees, but for what names the sending process."""
    headers = {name: value for name, value in message.headers.items() if name != "origin"}
    properties = {name: value for name, value in message.properties.items() if name != "reply_to"}
    if "expiration" in properties:  # milliseconds from the publish, the later the fewer
        properties["expiration"] = DAY * 2 < int(properties["expiration"]) <= DAY * 3
    return (
        json.loads(message.body),
        headers,
        properties,
        message.content_type,
        message.content_encoding,
        message.delivery_info["exchange"],
        message.delivery_info["routing_key"],
    )


def test_a_break_that_a_declaration_notices_leaves_no_row_without_a_word(vhost, monkeypatch):
    ready, calls = WayOut.ready, []

    def breaks(way_out, *given, **options):
        calls.append(given)
        if len(calls) == 4:
            raise ConnectionResetError("a declaration found the connection gone")
        return ready(way_out, *given, **options)

    monkeypatch.setattr(WayOut, "ready", breaks)
    rows = [{"task": "t", "task_id": str(number), "countdown": 60} for number in range(6)]

    sent = send(vhost, rows)

    assert sorted((outcome.task_id, outcome.status) for outcome in sent) == [
        (str(number), s.PUBLISHED) for number in range(6)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"args": [1, "ü", None], "kwargs": {"x": {"y": [True]}}},
        {"queue": "other"},
        {"priority": 7},
        {"headers": {"tenant": "a"}},
        {"expires": ETA + timedelta(days=1)},
        {"kwargs": {"long": "x" * 5000}},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_message_is_the_one_that_celery_sends(vhost, options):
    # Both are due: so what is compared is what went in, and not what the ladder restores.
    app = Celery(broker=vhost.url, set_as_current=False)
    app.conf.broker_transport = OURS
    queue = options.get("queue", "celery")
    past = datetime.now(UTC) - timedelta(seconds=1)
    app.send_task("shop.remind", task_id="an-id", eta=past, **{"args": (), **options})
    theirs = wait_until(lambda: take(vhost, queue))
    row = {"task": "shop.remind", "task_id": "an-id", "eta": round(past.timestamp() * 1e6)}
    for name, value in options.items():
        if name == "expires":
            row[name] = round(value.timestamp() * 1e6)
        else:
            row[name] = json.dumps(value) if isinstance(value, (dict, list)) else value
    [sent] = send(vhost, [row])
    assert (sent.status, sent.queue) == (s.PUBLISHED, queue)
    ours = take(vhost, queue)
    assert compared(ours) == compared(theirs)


def test_a_delayed_message_waits_and_comes_as_it_was(vhost):
    row = {"task": "t", "task_id": "an-id", "countdown": 10.0, "key": "k"}
    [sent] = send(vhost, [row])
    message = wait_until(lambda: take(vhost, "celery", OURS))
    assert time.time_ns() // 1000 >= sent.due
    assert message.headers["id"] == "an-id"


def test_a_receipt_has_the_queues_in_which_a_message_waits():
    ladder = Target(settings={"radix": 10, "levels": 5, "tick": 250}).ladder()
    delays = [0, 1, 249_999, 250_000, 250_001, 2_500_000, 1_234_567_890, -5]
    ids = [{"task_id": f"{n}", "eta": MICROS + delay} for n, delay in enumerate(delays)]
    [batch] = batches(ids)
    batch = batch.append_column("key", pa.nulls(len(ids), pa.string()))
    parts = [Rows(batch.slice(0, 3)), Rows(batch.slice(3))]
    for rows in parts:
        rows.published_at = [MICROS] * len(rows)
        rows.queue, rows.status = ["q"] * len(rows), [s.PUBLISHED] * len(rows)
    parts[0].status[1] = parts[0].queue[2] = None
    receipts = receipts_of(batch, parts, "j", ladder, (3, 1)).to_pylist()
    waited = {row["task_id"]: row["hops"] for row in receipts}
    expected = {f"{n}": hops(ladder.digits(max(d, 0) / 1000)) for n, d in enumerate(delays)}
    del expected["1"]
    assert waited == {**expected, "2": None}
    assert {(row["job_id"], row["partition"], row["attempt"]) for row in receipts} == {("j", 3, 1)}


def test_settings_choose_the_ladder(vhost):
    settings = {"tick": 250, "radix": 2, "levels": 8, "namespace": "mine"}
    [sent] = send(vhost, [{"task": "t", "task_id": "i", "countdown": 60.0}], settings=settings)
    assert sent.status == s.PUBLISHED
    waiting = [row["name"] for row in vhost.queues() if row["name"].startswith("mine.v2-250ms-2x8")]
    assert len(waiting) == 8


def test_a_receipt_has_the_due_time_with_its_jitter(vhost):
    eta = micros(1)
    rows = [
        {"task": "t", "task_id": str(number), "eta": eta, "headers": headers}
        # The first messages of a kind prove the template that makes the others.
        for number, headers in enumerate([None] * 4 + ['{"x-delay-jitter": 0}'] * 4)
    ]
    sent = {outcome.task_id: outcome for outcome in send(vhost, rows, settings={"jitter": 2000})}
    arrived: dict[str, int | None] = {}
    while len(arrived) < len(rows):
        headers = wait_until(lambda: take(vhost, "celery")).headers
        # Without this header, it was due before it was sent.
        arrived[headers["id"]] = headers.get("x-binary-delay", {}).get("due")
    for number, name in enumerate(map(str, range(8))):
        due = eta + (spread(name, 2_000_000) if number < 4 else 0)
        assert sent[name].due == due <= time.time_ns() // 1000
        assert arrived[name] in (-(-due // 1000), None)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"eta": micros(1e10)}, "is longer than"),
        ({"countdown": -9e10}, "out of range"),
        ({"countdown": 60.0, "expires": 10**18}, "out of range"),
        ({"eta": None}, "neither eta nor countdown"),
        ({"args": '{"a": 1}'}, "args must be a JSON array"),
        ({"args": "0"}, "args must be a JSON array"),
        ({"kwargs": "[1]"}, "kwargs must be a JSON object"),
        ({"args": "[1"}, "delimiter"),
        ({"headers": "[1]"}, "headers must be a JSON object"),
        ({"headers": '{"a": [1e999]}'}, "a header cannot be inf, which is no finite number"),
        ({"queue": "q" * 256}, "queue is longer than 255 bytes"),
        ({"args": "[" * 100_000}, "recursion depth"),
        ({"headers": json.dumps({"large": "x" * 131_072})}, "raise frame_max in rabbitmq.conf"),
        ({"headers": '{"task": "u"}'}, 'headers has "task", which is set by the row'),
        # For these, the broker closes the channel that they come on.
        ({"eta": micros(-1), "exchange": "nowhere", "routing_key": "x"}, "no exchange 'nowhere'"),
        ({"eta": micros(-1), "expires": micros(1e10)}, "invalid expiration"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_the_next_goes_out(vhost, row, words):
    bad = {"task": "t", "task_id": "bad", "eta": MICROS, **row}
    good = [{"task": "t", "task_id": f"good {number}", "eta": MICROS} for number in range(2)]
    sent = send(vhost, [good[0], bad, good[1]])
    assert sorted((outcome.task_id, outcome.status) for outcome in sent) == [
        ("bad", s.REFUSED),
        ("good 0", s.PUBLISHED),
        ("good 1", s.PUBLISHED),
    ]
    assert words in next(outcome.detail for outcome in sent if outcome.task_id == bad["task_id"])


def test_a_queue_that_stands_otherwise_is_named_with_the_remedy_and_the_rest_goes_out(vhost):
    with Connection(vhost.url) as connection:
        arguments = {"x-queue-type": "quorum"}
        Queue("mail", queue_arguments=arguments)(connection.default_channel).declare()
    rows = [
        {
            "task": "t",
            "task_id": f"{number}",
            "countdown": 60.0,
            "queue": "mail" if number % 2 else None,
        }
        for number in range(6)
    ]
    sent = {outcome.task_id: outcome for outcome in send(vhost, rows)}
    assert [sent[f"{number}"].status for number in range(6)] == [s.PUBLISHED, s.REFUSED] * 3
    assert "inequivalent arg 'x-queue-type' for queue 'mail'" in sent["1"].detail
    assert "name by app the application that has it" in sent["1"].detail


@pytest.mark.own_broker
@pytest.mark.parametrize("is_patient", [True, False], ids=["in its patience", "after it"])
def test_a_queue_whose_node_is_down_is_waited_for_and_is_used_when_it_is_back(
    vhost, monkeypatch, is_patient
):
    with Connection(vhost.url) as connection:
        for name in ("mail", "post"):
            Queue(name, Exchange(name), name)(connection.default_channel).declare()
    start, start_other = (Timer(_PAUSE, take_away(vhost, name)) for name in ("mail", "post"))
    if not is_patient:
        monkeypatch.setattr(_Producer, "waits_until", 0.0)

    def rows():
        row = {"task": "t", "countdown": 60.0, "queue": "mail"}
        if is_patient:
            start.start()
        yield {**row, "task_id": "1"}
        if not is_patient:
            start.start()
        start.join()
        time.sleep(_PAUSE)
        yield {**row, "task_id": "2"}
        # The next outage has a patience of its own.
        start_other.start()
        yield {**row, "task_id": "3", "queue": "post"}

    sent = {outcome.task_id: outcome for outcome in send(vhost, rows(), size=1)}

    assert [sent[id_].status for id_ in "23"] == [s.PUBLISHED] * 2
    if is_patient:
        assert sent["1"].status == s.PUBLISHED
    else:
        assert sent["1"].status == s.REFUSED
        assert "is down or inaccessible; start its node, and publish again" in sent["1"].detail


def test_an_application_without_a_transport_delays_by_ours_though_it_has_quorum_queues(
    vhost, monkeypatch
):
    # Which Celery would otherwise send round by its own ladder.
    app = Celery("quorum", broker=vhost.url, set_as_current=False)
    arguments = {"x-queue-type": "quorum"}
    mail = Queue("mail", Exchange("post", "topic"), routing_key="m", queue_arguments=arguments)
    app.conf.task_queues = [mail]
    monkeypatch.setitem(sys.modules, "quorum_of_this_test", SimpleNamespace(app=app))
    row = {"task": "t", "task_id": "i", "eta": MICROS, "queue": "mail"}
    [one] = sent_by(Sender(Target(app="quorum_of_this_test:app")), [row])
    assert (one.status, one.queue) == (s.PUBLISHED, "post/m")


def test_each_target_gets_its_own_whatever_the_environment_says(broker, vhost, monkeypatch):
    for name in ("CELERY_BROKER_URL", "CELERY_BROKER_WRITE_URL"):
        monkeypatch.setenv(name, "amqp://127.0.0.1:1//")
    other = broker.vhost()
    try:
        for number, target in enumerate([vhost, other, vhost]):
            [sent] = send(target, [{"task": "t", "task_id": f"{number}", "eta": micros(-1)}])
            assert sent.status == s.PUBLISHED
        messages = [take(target, "celery") for target in (vhost, vhost, other)]
        assert [message and message.headers["id"] for message in messages] == ["0", "2", "1"]
    finally:
        other.delete()


@pytest.fixture
def shop(monkeypatch):
    app = Celery("shop", broker="amqp://read//", set_as_current=False)
    app.conf.update(
        broker_write_url="amqp://write//",
        broker_use_ssl={"ca_certs": "ca.pem"},
        broker_login_method="EXTERNAL",
        broker_transport_options={"binary_delay": {"foreign_ladder": "nservicebus"}},
    )
    # A process reads an application once, by its name.
    app.main = f"shop_{id(app)}"
    monkeypatch.setitem(sys.modules, app.main, SimpleNamespace(app=app))
    return app


@pytest.mark.parametrize(("broker", "host"), [(None, "write"), ("amqp://b//", "b")])
def test_an_application_is_connected_to_as_it_connects_and_stays_as_it_was(shop, broker, host):
    before = dict(shop.conf)
    target = Target(broker, f"{shop.main}:app")
    connection = target.connection()
    assert connection.hostname == host
    assert (connection.ssl, connection.login_method) == ({"ca_certs": "ca.pem"}, "EXTERNAL")
    assert connection.transport_cls == OURS
    # It is the ladder that its messages take, from which receipts have their hops.
    assert target.ladder() == FOREIGN_LADDERS["nservicebus"].ladder
    assert dict(shop.conf) == before


def test_an_event_that_says_that_a_task_was_sent_is_no_outcome_of_the_task(vhost, monkeypatch):
    app = Celery("events", set_as_current=False)
    app.conf.task_send_sent_event = True
    app.conf.task_routes = {"lost": "q" * 256}
    monkeypatch.setitem(sys.modules, "events_of_this_test", SimpleNamespace(app=app))
    rows = [{"task": "t", "task_id": f"{number}", "countdown": 60.0} for number in range(3)]
    lost = {"task": "lost", "task_id": "lost", "countdown": 60.0}
    sent = send(vhost, [lost, *rows], app="events_of_this_test:app")
    # Nobody listens to events.
    assert sorted((outcome.task_id, outcome.status, outcome.queue) for outcome in sent) == [
        *((f"{number}", s.PUBLISHED, "celery") for number in range(3)),
        ("lost", s.REFUSED, None),
    ]


def test_a_row_that_ends_the_channel_amid_events_takes_no_other_along(vhost, monkeypatch):
    app = Celery("events", set_as_current=False)
    app.conf.task_send_sent_event = True
    monkeypatch.setitem(sys.modules, "events_of_this_test", SimpleNamespace(app=app))
    rows = [{"task": "t", "task_id": f"{number}", "eta": micros(-1)} for number in range(700)]
    rows[10]["expires"] = micros(1e10)
    sent = send(vhost, rows, app="events_of_this_test:app")

    assert [outcome.task_id for outcome in sent if outcome.status != s.PUBLISHED] == ["10"]
    came = set()
    with Connection(vhost.url) as connection:
        queue = Queue("celery")(connection.default_channel)
        while message := queue.get(no_ack=True):
            came.add(message.headers["id"])
    assert came == {f"{number}" for number in range(700) if number != 10}


def test_what_finds_no_queue_is_told_and_not_lost_silently(vhost):
    row = {"task": "t", "task_id": "i", "eta": micros(-1), "exchange": "amq.topic"}
    [sent] = send(vhost, [{**row, "routing_key": "nobody"}])
    assert (sent.status, sent.detail) == (s.RETURNED, "NO_ROUTE")
    assert sent.queue == "amq.topic/nobody"


def test_what_a_full_queue_rejects_is_told(vhost):
    with Connection(vhost.url) as connection:
        arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
        exchange = Exchange("amq.direct", passive=True)
        full = Queue("full", exchange, routing_key="full", queue_arguments=arguments)
        full(connection.default_channel).declare()
    row = {"task": "t", "task_id": "i", "eta": micros(-1), "exchange": "amq.direct"}
    row["routing_key"] = "full"
    sent = send(vhost, [row, row])
    # Which of them, the broker decides as they come.
    assert s.NACKED in [outcome.status for outcome in sent]


def test_a_rate_is_kept(vhost):
    rows = [{"task": "t", "task_id": f"{n}", "eta": MICROS} for n in range(20)]
    begin = time.monotonic()
    sent = send(vhost, rows, rate=20)
    assert time.monotonic() - begin > 0.9
    assert {outcome.status for outcome in sent} == {s.PUBLISHED}


@pytest.mark.own_broker
@pytest.mark.slow
@pytest.mark.parametrize("actions", [[s.PUBLISH], [s.CANCEL], [s.CANCEL, s.PUBLISH]], ids=str)
def test_a_broker_that_confirms_nothing_ends_the_sending(own_broker, vhost, monkeypatch, actions):
    rows = [{"action": action, "task": "t", "task_id": "1", "eta": MICROS} for action in actions]
    send(vhost, rows)
    monkeypatch.setattr(RecordChannel.wait_for_next, "__defaults__", (2.0,))

    with own_broker.alarm():
        # This is the limit of what a new connection declares, too.
        sender = Sender(Target(vhost.url, patience=30, settings={"radix": 2}))
        parts = sender.send(batches(rows, 1))
        if s.CANCEL in actions:
            [refused] = outcomes_of(next(parts)[1])
            assert "RabbitMQ did not answer within 2 s" in str(refused.detail)
        if s.PUBLISH in actions:
            with pytest.raises(UnconfirmedError, match="not all confirms came within 30 s"):
                list(parts)


@pytest.mark.slow
def test_a_broker_that_is_killed_and_comes_back_gets_what_it_had_not_confirmed(own_broker, vhost):
    # Ladder and streams are older than the second in which a node that dies can lose them.
    first = {"task_id": "first", "eta": MICROS}
    send(vhost, [{"task": "t", **first}, {"action": s.CANCEL, **first}])
    time.sleep(3)

    def rows():
        for number in range(1500):
            # More than a window of each kind has gone by.
            if number == 1200:
                own_broker.kill()
                own_broker.start()
            yield {"task": "t", "task_id": f"{number}", "eta": MICROS}
            yield {"action": s.CANCEL, "task_id": f"{number}", "eta": MICROS}

    sent = send(vhost, rows(), size=100)
    assert {(outcome.action, outcome.status) for outcome in sent} == {
        (s.PUBLISH, s.PUBLISHED),
        (s.CANCEL, s.RECORDED),
    }
    assert len({(outcome.action, outcome.task_id) for outcome in sent}) == len(sent) == 3000
    with Connection(vhost.url, transport=OURS) as connection:
        connection.connect()
        amendments = connection.connection.delay_mechanism.amendments
        amendments.reader.catch_up()
        assert len(amendments.memory) == 1501

    def all_wait():
        rows_of = (row for row in vhost.queues() if row.get("type") != "stream")
        return sum(row.get("messages", 0) for row in rows_of) >= 1501

    wait_until(all_wait)


def amended(vhost, rows, **target):
    rows = [{"task_id": id_, "action": action, "eta": eta} for id_, action, eta in rows]
    return {outcome.task_id: outcome for outcome in send(vhost, rows, **target)}


@pytest.fixture
def verdict(vhost):
    """What becomes of a task that arrives."""
    with Connection(vhost.url, transport=OURS) as connection:
        connection.connect()
        amendments = connection.connection.delay_mechanism.amendments

        def verdict(task_id):
            amendments.reader.catch_up()
            now = time.time_ns() // 1_000_000
            judgement = amendments.memory.judge(
                {"application_headers": {"id": task_id, "task": "t"}}, now
            )
            return judgement and (judgement.reason, judgement.due)

        yield verdict


def test_rows_cancel_and_reschedule_as_the_functions_do(vhost, verdict):
    # More than one record holds.
    rows: list[tuple[str, str, int | None]]
    rows = [(f"{number}", s.CANCEL, None) for number in range(1500)]
    rows += [("due", s.CANCEL, MICROS), ("past", s.CANCEL, micros(-60))]
    rows += [(f"later {number}", s.RESCHEDULE, MICROS + 1) for number in range(1500)]
    sent = amended(vhost, rows)
    assert {outcome.status for outcome in sent.values()} == {s.RECORDED}
    assert len(sent) == len(rows)
    assert all(outcome.published_at for outcome in sent.values())
    assert {verdict(id_) for id_ in ("0", "1499", "due", "past")} == {("cancelled", 0)}
    # To the millisecond, and not early.
    assert verdict("later 1499") == ("postponed", -(-(MICROS + 1) // 1000))
    assert verdict("another") is None


def test_a_few_records_cancel_many_rows(vhost):
    amended(vhost, [("first", s.CANCEL, None)])
    name = "kbd.v2.amendments.ids"

    def records():
        with Connection(vhost.url) as connection:
            return connection.default_channel.queue_declare(name, passive=True).message_count

    # The stream begins with a record that names nothing.
    wait_until(lambda: records() == 2)
    amended(vhost, [(f"{number}", s.CANCEL, None) for number in range(2500)])
    wait_until(lambda: records() == 5)


def test_rows_due_later_than_records_are_kept_are_cancelled_by_those_that_wait(vhost):
    settings = {"amendments_max_age": "20s"}
    rows = [(f"{number}", s.CANCEL, micros(86400 + number)) for number in range(20)]
    sent = amended(vhost, rows, settings=settings)
    assert {outcome.status for outcome in sent.values()} == {s.RECORDED}

    def waiting():
        names = {row["name"]: row.get("messages", 0) for row in vhost.queues()}
        return sum(count for name, count in names.items() if "amendments" not in name)

    # A record is there from half of that time before its first task, so for the last one, too.
    wait_until(lambda: waiting() in (4, 5))


@pytest.mark.parametrize(
    ("first", "last", "ahead", "at_once"),
    [
        (5, 60, [60], 1),
        (60, 90, [90, 60], 0),
        (60, 60, [60], 0),
        # A record for the second comes too shortly before the first.
        (60.1, 60.9, [61, 60], 0),
        (5, 20, [], 1),
    ],
)
def test_a_cancellation_is_there_before_each_due_time_that_is_known(
    vhost, monkeypatch, first, last, ahead, at_once
):
    aheads: list[int] = []
    writes: list[object] = []
    monkeypatch.setattr(Amendments, "write_ahead", lambda _, __, due: aheads.append(due))
    monkeypatch.setattr(Amendments, "write", lambda _, records: writes.append(records))
    today = time.time() // 86400
    due, eta = (round((today + days) * 86400 * 1_000_000) for days in (first, last))
    send(vhost, [{"task_id": "a", "action": s.CANCEL, "due": due, "eta": eta}])
    assert [round(moment / DAY - today) for moment in aheads] == ahead
    assert len(writes) == at_once


def test_an_amendment_that_cannot_be_recorded_is_refused_and_the_next_row_goes_out(vhost):
    rows = [{"task_id": "a", "action": s.CANCEL}, {"task": "t", "task_id": "b", "eta": MICROS}]
    sent = {
        outcome.task_id: outcome for outcome in send(vhost, rows, settings={"amendments": False})
    }
    assert {name: outcome.status for name, outcome in sent.items()} == {
        "a": s.REFUSED,
        "b": s.PUBLISHED,
    }
    assert "amendments are off" in sent["a"].detail


def test_cancellations_are_recorded_together_at_any_rate(vhost, monkeypatch):
    init, made = Rows.__init__, list[int]()

    def counts(rows, batch):
        made.append(len(batch))
        init(rows, batch)

    monkeypatch.setattr(Rows, "__init__", counts)
    sent = amended(vhost, [(f"{number}", s.CANCEL, None) for number in range(1200)], rate=5)
    assert {one.status for one in sent.values()} == {s.RECORDED}
    assert made == [1000, 200]


@pytest.mark.parametrize("action", [s.PUBLISH, s.RESCHEDULE])
def test_an_amendment_does_not_wait_for_all_rows_of_a_slow_slice(vhost, monkeypatch, action):
    monkeypatch.setattr(sending, "_SOON", 0.0)
    write, written = Amendments.write, list[int]()

    def notes(amendments, records):
        write(amendments, records)
        written.append(time.time_ns() // 1000)

    monkeypatch.setattr(Amendments, "write", notes)
    rows = [
        {"task_id": "a", "action": s.CANCEL},
        {"action": action, "task": "t", "task_id": "b", "eta": MICROS},
        {"task": "t", "task_id": "c", "eta": MICROS},
    ]

    *_, last = send(vhost, rows, rate=2)
    assert written[0] <= (last.published_at or 0)


def test_an_amendment_survives_a_break_of_its_connection(vhost, monkeypatch):
    write, calls = Amendments.write, []

    def breaks(amendments, records):
        calls.append(records)
        write(amendments, records)
        if len(calls) == 1:
            raise ConnectionResetError("the broker has it, and its confirm was lost")

    monkeypatch.setattr(Amendments, "write", breaks)
    sent = amended(vhost, [("a", s.CANCEL, None), ("b", s.RESCHEDULE, micros(600))])
    assert {name: outcome.status for name, outcome in sent.items()} == dict.fromkeys(
        "ab", s.RECORDED
    )


def keyed(*names):
    headers = json.dumps({"x-delay-key": "k"})
    return [{"task": "t", "task_id": name, "countdown": 60.0, "headers": headers} for name in names]


def test_of_a_key_the_last_row_runs_whatever_the_kinds_of_the_others(vhost):
    rows = keyed(*"12345")
    for number, row in enumerate(rows):
        row["countdown"] = 3.0 + number / 10
        row["priority"] = 5 if number % 2 else None
    # So that templates make them.
    headers = json.dumps({"tenant": 1})
    first = [{**row, "countdown": None, "eta": micros(3600), "headers": headers} for row in rows]
    sent = send(vhost, [*first, *rows])
    assert {one.status for one in sent} == {s.PUBLISHED}
    message = wait_until(lambda: take(vhost, "celery", OURS))
    assert message.headers["id"] == "5"


def test_a_break_does_not_send_again_what_has_an_outcome(vhost, monkeypatch):
    write, refused, sent = Amendments.write, list[object](), list[str]()

    def refuses(amendments, records):
        if isinstance(records[0], Supersede) and not refused:
            refused.append(records)
            raise AmendmentError("the streams did not take it")
        write(amendments, records)

    def breaks(producer, message, exchange, routing_key, at):
        sent.append(message.properties["correlation_id"])
        if sent[-1] == "1500" and sent.count("1500") == 1:
            producer.channel.connection.transport.sock.shutdown(2)
        publish(producer, message, exchange, routing_key, at)

    publish = _Producer.send
    monkeypatch.setattr(Amendments, "write", refuses)
    monkeypatch.setattr(_Producer, "send", breaks)
    # Each of a kind of its own, so that no template makes it; and more than a window of them.
    others = [
        {"task": f"t{number}", "task_id": f"{number}", "countdown": 60.0} for number in range(1600)
    ]
    first, *rest = send(vhost, [*keyed("a"), *others])
    assert sent.count("a") == 1
    assert "it was published, but not recorded" in first.detail
    assert {one.status for one in rest} == {s.PUBLISHED}


def test_a_record_that_is_refused_is_said_of_the_row_whose_message_it_is_for(vhost, monkeypatch):
    write, refused = Amendments.write, list[object]()

    def refuses(amendments, records):
        # Its first write checks that it may write.
        if isinstance(records[0], Supersede) and not refused:
            refused.append(records)
            raise AmendmentError("the streams did not take it")
        write(amendments, records)

    monkeypatch.setattr(Amendments, "write", refuses)
    # So slow, each is recorded while the next one is published.
    sent = {outcome.task_id: outcome for outcome in send(vhost, keyed(*"abc"), rate=10)}
    assert {name: outcome.status for name, outcome in sent.items()} == dict.fromkeys(
        "abc", s.PUBLISHED
    )
    assert "it was published, but not recorded" in sent["a"].detail
    assert (sent["b"].detail, sent["c"].detail) == (None, None)


def test_a_row_with_a_key_waits_for_the_streams_of_a_broker_that_comes_back(vhost, monkeypatch):
    # By this, records and the check before them are written.
    write = Amendments._write  # noqa: SLF001 - see above
    failures = [AmendmentError("not yet"), ConnectionResetError("gone")]

    def fails(amendments, lines):
        if failures:
            raise failures.pop()
        write(amendments, lines)

    monkeypatch.setattr(Amendments, "_write", fails)
    begun = micros(0)
    [sent] = send(vhost, keyed("a"))
    assert (sent.status, sent.detail, failures) == (s.PUBLISHED, None, [])
    # Its receipt says when it was published, and not when that was first tried.
    assert sent.published_at > begun + _PAUSE * 1_000_000
