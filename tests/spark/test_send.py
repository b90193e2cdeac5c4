"""What is sent, and what becomes of it, with a real broker and without Spark."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue

from kombu_binary_delay import ChannelMixin
from kombu_binary_delay.spark import schema as s
from kombu_binary_delay.spark.send import Sender, Target

ETA = datetime.now(timezone.utc) + timedelta(days=2)
MICROS = round(ETA.timestamp() * 1_000_000)
OURS = "kombu_binary_delay:Transport"


def micros(seconds):
    return time.time_ns() // 1000 + round(seconds * 1_000_000)


def send(vhost, rows, **target):
    return [each for part in Sender(Target(vhost.url, **target)).send(rows) for each in part]


def take(vhost, queue, transport="pyamqp"):
    with Connection(vhost.url, transport=transport) as connection:
        message = Queue(queue)(connection.default_channel).get(no_ack=True)
        return None if message is None else message


def compared(message):
    """What a worker sees, but for what names the sending process."""
    headers = {name: value for name, value in message.headers.items() if name != "origin"}
    properties = {name: each for name, each in message.properties.items() if name != "reply_to"}
    if "expiration" in properties:  # milliseconds from the publish, the later the fewer
        properties["expiration"] = round(int(properties["expiration"]), -5)
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
    delayed, calls = ChannelMixin.delayed, []

    def breaks(channel, *given):
        calls.append(given)
        if len(calls) == 4:
            raise ConnectionResetError("a declaration found the connection gone")
        return delayed(channel, *given)

    monkeypatch.setattr(ChannelMixin, "delayed", breaks)
    rows = [{"task": "t", "task_id": str(number), "countdown": 60} for number in range(6)]

    sent = send(vhost, rows)

    assert sorted((each.row["task_id"], each.status) for each in sent) == [
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
    past = datetime.now(timezone.utc) - timedelta(seconds=1)
    app.send_task("shop.remind", task_id="an-id", eta=past, **{"args": (), **options})
    theirs = take(vhost, queue)
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
    row = {"task": "t", "task_id": "an-id", "eta": micros(0.3), "key": "k"}
    [sent] = send(vhost, [row])
    deadline = time.time() + 10
    while (message := take(vhost, "celery", OURS)) is None and time.time() < deadline:
        time.sleep(0.02)
    assert message is not None
    assert time.time_ns() // 1000 >= sent.due
    assert message.headers["id"] == "an-id"
    assert sent.hops == 1  # 300 ms are three ticks, one digit


def test_settings_choose_the_ladder(vhost):
    settings = {"tick": 250, "radix": 2, "levels": 8, "namespace": "mine"}
    [sent] = send(vhost, [{"task": "t", "task_id": "i", "countdown": 60.0}], settings=settings)
    assert sent.status == s.PUBLISHED
    waiting = [row["name"] for row in vhost.queues() if row["name"].startswith("mine.v1-250ms-2x8")]
    assert len(waiting) == 8


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"eta": micros(1e10)}, "outside of 0 to"),
        ({"args": '{"a": 1}'}, "must be a list"),
        ({"args": "[1"}, "delimiter"),
        ({"headers": "[1]"}, "must be a JSON object"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_the_next_goes_out(vhost, row, words):
    bad = {"task": "t", "task_id": "bad", "eta": MICROS, **row}
    good = {"task": "t", "task_id": "good", "eta": MICROS}
    found = {sent.row["task_id"]: sent for sent in send(vhost, [good, bad, good])}
    assert {name: sent.status for name, sent in found.items()} == {
        "good": s.PUBLISHED,
        "bad": s.REFUSED,
    }
    assert words in found["bad"].detail


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
    assert s.NACKED in [each.status for each in sent]


def test_a_rate_is_kept(vhost):
    rows = [{"task": "t", "task_id": f"{n}", "eta": MICROS} for n in range(20)]
    begin = time.monotonic()
    sent = send(vhost, rows, rate=20)
    assert time.monotonic() - begin > 0.9
    assert {each.status for each in sent} == {s.PUBLISHED}


def test_rows_are_sent_in_windows_and_every_one_is_told_once(vhost):
    rows = [{"task": "t", "task_id": f"{n}", "eta": MICROS} for n in range(3500)]
    parts = list(Sender(Target(vhost.url)).send(rows))
    assert len(parts) > 2
    told = [str(each.row["task_id"]) for part in parts for each in part]
    assert sorted(told) == sorted(str(row["task_id"]) for row in rows)


@pytest.mark.own_broker
@pytest.mark.slow
def test_a_broker_that_is_killed_and_comes_back_gets_what_it_had_not_confirmed():
    from lab.broker import Broker  # noqa: PLC0415

    with Broker() as broker:
        vhost = broker.vhost()
        # The ladder is older than the second in which a quorum queue can be lost with its node.
        send(vhost, [{"task": "t", "task_id": "first", "eta": MICROS}])
        time.sleep(2)

        def rows():
            for number in range(4000):
                if number == 2500:
                    broker.kill()
                    broker.start()
                yield {"task": "t", "task_id": f"{number}", "eta": MICROS}

        sent = send(vhost, rows())
        assert {each.status for each in sent} == {s.PUBLISHED}
        assert len({each.row["task_id"] for each in sent}) == len(sent) == 4000
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            waiting = sum(row.get("messages", 0) for row in vhost.queues())
            if waiting >= 4001:
                break
            time.sleep(0.5)
        assert waiting >= 4001
