"""The web pages on a real broker: what they show, what they change, and for whom."""

from __future__ import annotations

import logging
import re
import time
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from kombu import Queue
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from kombu_binary_delay import Topology, operate
from kombu_binary_delay.cli.web import asgi_app
from kombu_binary_delay.web import guard, passwords
from kombu_binary_delay.web import pages as handlers
from tests.waits import PATIENCE, wait_until

JOURNAL = "kbd.v2.journal"
HOSTILE = "</td><script>alert('name')</script>\u202e"
ARGUMENTS = "('<img src=x onerror=alert(1)>',)"


@pytest.fixture(scope="module")
def radix():
    """The pages are served for the default ladder."""


@pytest.fixture
def publish(connect):
    """Publish tasks that wait an hour and more, each an hour longer than the one before."""
    connection = connect(confirm_publish=True, binary_delay={"journal": "stream"})
    Queue("mail")(connection.default_channel).declare()

    def publish(*ids, name="shop.pay", key="mail", **more):
        for hour, id_ in enumerate(ids, 1):
            eta = datetime.now(UTC) + timedelta(hours=hour)
            headers = {"id": id_, "task": name, "eta": eta.isoformat(), "argsrepr": ARGUMENTS}
            connection.Producer().publish("x", routing_key=key, headers={**headers, **more})
        return connection

    return publish


@pytest.fixture
def pages(vhost, broker):
    """Open the pages of the test's own virtual host; the options are those of ``asgi_app``."""
    opened = []

    def pages(authenticate=None, **options):
        options.setdefault("management", broker.management_url)
        app = asgi_app(authenticate, broker=vhost.url, source="journal", **options)
        client = TestClient(app, base_url="http://127.0.0.1")
        opened.append(client)
        return client.__enter__()

    yield pages
    for client in opened:
        client.__exit__(None, None, None)


def until(client, path, *words, auth=None):
    """Load a page until it has all of these words."""
    end = time.monotonic() + PATIENCE
    while not all(word in (page := client.get(path, auth=auth)).text for word in words):
        assert time.monotonic() < end, page.text
        time.sleep(0.2)
    return page.text


def token(page):
    [value, *_] = re.findall(r'name="token" value="([0-9a-f]{64})"', page)
    return value


def counted(number):
    return f'id="count">{number}<'


def test_the_pages_show_what_waits_and_trust_none_of_its_words(publish, pages):
    publish("one", "two")
    publish("</script>'\"&", name=HOSTILE)
    client = pages()

    now = until(client, "/", 'id="waiting">3<', "By the journal", "The ladder is sound")
    listed = until(client, "/tasks", counted(3))
    searched = client.get("/tasks?name=pay&before=90m").text
    unread = client.get("/tasks?before=soon").text
    complex_ = (
        client.get(f"/tasks?name={'*a' * 6}").text + client.get(f"/tasks?id={'x' * 501}").text
    )
    story = until(client, "/task?id=one", "It <strong>waits</strong>", "here now")
    hostile = until(client, "/task?id=%3C/script%3E'%22%26", "It <strong>waits</strong>")
    unknown = until(client, "/task?id=nobody", "is not known")

    assert re.search(r">mail</a></th><td class=\"number\">3<", now)
    assert "kbd.v2-125ms" in now
    for page in (listed, hostile):
        assert "alert(" in page
        for words in ("<script>a", "<img src=x", "onerror=alert(1)>'", "\u202e"):
            assert words not in page
    assert counted(1) in searched
    assert "is no delay" in unread
    assert complex_.count("no more than 500 characters, and 5 of them *") == 2
    assert "scheduled" in story
    assert "earlier tasks, and tasks of apps without a journal" in story + listed
    assert "waits in" not in unknown
    assert sum(client.get("/forecast").json()["counts"]) == 3
    for page in (now, listed, story):
        assert 'method="post"' not in page


def test_the_arguments_are_nowhere_where_they_are_hidden(publish, pages):
    publish("one")
    client = pages(hide_arguments=True)

    listed = until(client, "/tasks", counted(1))
    story = until(client, "/task?id=one", "It <strong>waits</strong>")

    assert "onerror" not in listed + story
    assert "Arguments are hidden" in listed


def test_what_is_chosen_is_cancelled_after_its_count_was_confirmed(
    publish, pages, caplog, connect, vhost
):
    publish("one", "three")
    publish("two", key="mail.high")
    publish("mail-1", name="mail.digest")
    client = pages(allow_changes=True)
    listed = until(client, "/tasks", counted(4))
    form = {"action": "cancel", "token": token(listed)}

    planned = client.post("/plan", data={**form, "chosen": ["one", "two"]})
    confirm = {"token": token(planned.text), "key": planned.url.params["key"]}
    still = until(client, "/tasks", counted(4))
    with caplog.at_level(logging.INFO, "kombu_binary_delay.web"):
        done = client.post("/act", data=confirm)
        again = client.post("/act", data=confirm)

    assert "Cancel 2 tasks" in planned.text
    rows = [f'{queue}</th><td class="number">1<' for queue in ("mail", "mail.high")]
    assert all(row in planned.text for row in rows)
    assert "one" in still
    assert "2 tasks cancelled" in done.text
    assert "2 tasks cancelled" in again.text
    said = [record.getMessage() for record in caplog.records if "cancel of" in record.getMessage()]
    assert said == ["somebody at testclient: cancel of one two"], "once, though confirmed twice"
    until(client, "/tasks", counted(2), "2 cancelled or superseded tasks are not shown")
    until(client, "/task?id=one", "is cancelled")
    # A whole search, to a later time.
    words = {"action": "reschedule", "scope": "all", "name": "mail", "when": "5h"}
    planned = client.post("/plan", data={**words, "token": form["token"]})
    assert "Reschedule 1 task<" in planned.text
    client.post("/act", data={**confirm, "key": planned.url.params["key"]})
    until(client, "/tasks?after=4h", counted(1), "mail.digest")
    with connect() as connection:
        left = operate.from_journal(connection, Topology(), judge=operate.judge_of(connection))
        assert {task.id for task in left} == {"three", "mail-1"}


def test_tasks_that_are_first_due_after_their_new_time_are_counted_apart(publish, pages):
    publish("one", "two", "three")
    client = pages(allow_changes=True)
    form = {"action": "reschedule", "token": token(until(client, "/tasks", counted(3)))}

    def reschedule(**chosen):
        planned = client.post("/plan", data={**form, **chosen})
        key = {"key": planned.url.params["key"], "token": form["token"]}
        return planned.text, client.post("/act", data=key).text

    planned, done = reschedule(chosen=["one", "two", "three"], when="90m")
    later = "2 tasks are first due later than that, and run then."
    # What is postponed is delayed again when it is first due, be it for less.
    reschedule(chosen="one", when="5h")
    until(client, "/tasks?after=4h", counted(1))
    all_planned, all_done = reschedule(scope="all", when="150m")

    assert later in planned
    waits = "as far as they still wait: the broker has recorded it"
    assert f"1 task rescheduled, {waits}. {later}" in done
    assert "1 task is first due later than that" in all_planned
    assert "2 tasks rescheduled" in all_done
    until(client, "/tasks?after=149m&before=150m", counted(2))


def test_what_cannot_be_amended_is_named_and_the_others_are_amended(publish, pages):
    publish("one", "x" * 300)
    client = pages(allow_changes=True)
    form = {"action": "cancel", "scope": "all", "token": token(until(client, "/tasks", counted(2)))}

    planned = client.post("/plan", data=form)
    key = {"key": planned.url.params["key"], "token": form["token"]}
    done = client.post("/act", data=key).text

    assert "1 cannot be amended, and wait on" in planned.text
    assert "must have at most 255 bytes, got 300" in planned.text
    assert "1 task cancelled" in done
    until(client, "/tasks", counted(1))


def test_what_was_published_since_the_list_was_read_is_amended_by_its_own_due_time(
    publish, pages, vhost, topology, monkeypatch
):
    monkeypatch.setattr(handlers, "_SOON", PATIENCE)
    publish("one")
    client = pages(allow_changes=True)
    form = {"chosen": "far", "token": token(until(client, "/tasks", counted(1)))}
    eta = datetime.now(UTC) + timedelta(days=60)
    headers = {"id": "far", "task": "shop.pay", "eta": eta.isoformat()}
    publish().Producer().publish("x", routing_key="mail", headers=headers)
    wait_until(lambda: vhost.waiting(JOURNAL).get(JOURNAL, 0) >= 2)

    moved = client.post("/plan", data={**form, "action": "reschedule", "when": "5h"})
    planned = client.post("/plan", data={**form, "action": "cancel"})
    confirm = {"token": token(planned.text), "key": planned.url.params["key"]}
    client.post("/act", data=confirm)

    # Its record is not kept for so long.
    assert "a rescheduling for a due time in" in moved.text
    until(client, "/tasks", counted(1), "1 cancelled or superseded task is not shown")
    # The cancellation waits as well.
    wait_until(
        lambda: (
            sum(
                queue.get("messages", 0)
                for queue in vhost.queues()
                if queue["name"].startswith(topology.prefix)
            )
            == 3
        )
    )


#: Forms that cannot be, and what is said of them.
FORMS: list[tuple[dict[str, str], str]] = [
    ({"action": "cancel"}, "No task is chosen"),
    ({"action": "purge", "chosen": "one"}, "This is no act"),
    ({"action": "reschedule", "chosen": "one", "when": "1999-01-01T00:00Z"}, "still to come"),
    ({"action": "reschedule", "chosen": "one", "when": "soon"}, "is no delay"),
    (
        {"action": "reschedule", "chosen": "one", "when": "2999-01-31 12:00"},
        "write it as 2030-01-31T12:00Z",
    ),
    ({"action": "reschedule", "chosen": "one", "when": "3000000d"}, "up to the year 9999"),
    ({"action": "reschedule", "chosen": "one", "when": "9" * 15}, "is no delay"),
    ({"action": "reschedule", "chosen": "one", "when": "30m"}, "1 task is first due later"),
    ({"action": "cancel", "chosen": "one", "when": "2h"}, "'Reschedule to' has a time"),
    ({"action": "cancel", "scope": "all", "before": "soon"}, "not understood"),
    ({"action": "cancel", "chosen": "x" * 600}, "the id of a task"),
]


def test_a_form_that_cannot_be_is_refused_in_words(publish, pages, monkeypatch, subtests):
    monkeypatch.setattr(handlers, "_SOON", PATIENCE)
    publish("one")
    client = pages(allow_changes=True)
    listed = until(client, "/tasks", counted(1))
    for form, says in FORMS:
        with subtests.test(says):
            refused = client.post("/plan", data={**form, "token": token(listed)})

            assert refused.status_code in (400, 502)
            assert says in refused.text.replace("&#39;", "'")


def test_forms_need_the_token_of_their_page_and_user(publish, pages, vhost):
    publish("one")
    lines = [passwords.line_for(name, name) for name in ("ann", "bob")]
    check = guard.by_password(passwords.read("\n".join(lines)))
    client = pages(check, allow_changes=True)
    ann, bob = ("ann", "ann"), ("bob", "bob")
    post = partial(client.post, "/plan")
    listed = until(client, "/tasks", counted(1), auth=ann)
    form = {"action": "cancel", "chosen": "one", "token": token(listed)}

    planned = post(data=form, auth=ann)
    refused = [
        post(data=form, auth=bob),
        post(data={**form, "token": "0" * 64}, auth=ann),
        post(data={**form, "token": "\u0660"}, auth=ann),
        post(data=form, auth=ann, headers={"sec-fetch-site": "cross-site"}),
        post(data=form),
    ]
    long = post(content=b"x" * 2_000_001, auth=ann)
    bobs = until(client, "/tasks", counted(1), auth=bob)
    key = {"key": planned.url.params["key"], "token": token(bobs)}
    stolen = client.post("/act", data=key, auth=bob)
    client.cookies.clear()
    refused.append(post(data=form, auth=ann))

    assert planned.status_code == 200
    assert [result.status_code for result in refused] == [403, 403, 403, 403, 401, 403]
    assert (long.status_code, stolen.status_code) == (413, 404)
    assert "one" in until(client, "/tasks", counted(1), auth=ann)


def test_what_is_parked_is_counted_and_redriven(publish, pages, connect, vhost, topology):
    connection = publish("one")
    for queue in ("gone", "gone", "away"):
        connection.Producer().publish("late", routing_key=queue, headers={"x-delay": 1})
    wait_until(lambda: vhost.waiting(topology.parking) == {topology.parking: 3})
    client = pages(allow_changes=True)
    now = until(client, "/now?part=top", "<dt>parked</dt><dd>3<", "Redrive what is parked")
    Queue("gone")(connect("amqp").default_channel).declare()

    plans = [
        client.post("/plan", data={"action": "redrive", "token": token(now)}) for _ in range(2)
    ]
    forms = [{"key": plan.url.params["key"], "token": token(plan.text)} for plan in plans]
    done = client.post("/act", data=forms[0])
    wait_until(lambda: vhost.waiting(topology.parking) == {topology.parking: 1})
    rest = client.post("/act", data=forms[1])

    assert all("Redrive 3 messages" in plan.text for plan in plans)
    assert "2 sent on, 1 still parked. 1 stays: the queue &#39;away&#39; does not" in done.text
    assert "0 sent on, 1 still parked. 1 stays: the queue &#39;away&#39; does not" in rest.text
    assert "2 are not there any more, or another program is reading them. These" in rest.text
    assert vhost.waiting("gone") == {"gone": 2}


def test_each_parking_queue_that_is_counted_is_redriven(publish, pages, vhost, connect):
    connection = publish("one")
    sides = Topology(), Topology(queue_type="classic")
    parking = [side.parking for side in sides]
    with connect("amqp") as plain:
        for side in sides:
            operate.create(plain, side, side.whole)
            # It waited on a ladder of another radix before.
            connection.Producer().publish(
                "m", exchange=side.parking, routing_key="00.00.01.01.@..mail"
            )
    wait_until(lambda: vhost.waiting(*parking) == dict.fromkeys(parking, 1))
    client = pages(allow_changes=True)
    now = until(client, "/now?part=top", "<dt>parked</dt><dd>2<")
    unmanaged = until(
        pages(management="http://127.0.0.1:1"), "/now?part=top", "<dt>parked</dt><dd>2<"
    )

    planned = client.post("/plan", data={"action": "redrive", "token": token(now)})
    form = {"key": planned.url.params["key"], "token": token(planned.text)}
    done = client.post("/act", data=form)

    assert "Not all can be read" in unmanaged
    assert "Redrive 2 messages" in planned.text
    assert "2 sent on, 0 still parked" in done.text
    assert vhost.waiting(*parking, "mail") == {**dict.fromkeys(parking, 0), "mail": 2}


def test_an_old_list_of_tasks_is_not_shown_as_what_is_due_now(publish, pages, monkeypatch):
    publish("one")
    monkeypatch.setattr(handlers, "_TASKS", 0.0)
    client = pages(allow_changes=True)
    form = {"action": "cancel", "scope": "all", "token": token(until(client, "/tasks", counted(1)))}

    def fail(*_, **__):
        raise OSError("no space is left")

    monkeypatch.setattr(handlers, "read_tasks", fail)
    now = until(client, "/now", "the tasks are not read: No space is left.")
    old = until(
        client, "/results", "No space is left.", "What you see of the list of tasks is from"
    )
    drawn = client.get("/forecast").json()
    refused = client.post("/plan", data=form)

    assert "1 surely, 1 probably" in now
    assert "No tasks wait" not in now
    assert counted(1) in old
    assert (drawn["counts"], drawn["error"]) == ([], "no space is left")
    assert refused.status_code == 400
    assert "The tasks cannot be read now: no space is left" in refused.text


def test_the_ladder_for_urgent_messages_is_missed_where_nobody_declares_it(pages, monkeypatch):
    # As RabbitMQ 4.0 to 4.2 need it.
    monkeypatch.setattr(Topology, "keeps_urgent_apart", lambda *_: True)
    ladders = [Topology().prefix, Topology().for_urgent().prefix]
    missing = [f"</strong> (<code>{ladder}</code>): missing" for ladder in ladders]

    now = until(pages(settings={"declare": "never"}), "/now", *missing)

    assert "first delayed message makes" not in now
    assert "'verify' says" not in now.replace("&#39;", "'"), "each finding is shown once"


def test_without_the_management_api_the_levels_are_counted_all_the_same(publish, pages):
    publish("one")
    client = pages(management="http://127.0.0.1:1")

    now = until(client, "/", 'id="waiting">1<', "Not all can be read", "By the journal")

    assert "does not answer" in now
    assert "level 3" in now


def test_the_pages_are_mounted_in_another_site(publish, vhost, broker):
    publish("one")

    async def authenticate(request):
        return request.headers.get("x-operator")

    app = asgi_app(
        authenticate,
        broker=vhost.url,
        management=broker.management_url,
        source="journal",
        allow_changes=True,
    )
    site = Starlette(routes=[Mount("/admin/waiting", app)])
    with TestClient(site, headers={"x-operator": "ann"}) as client:
        listed = until(client, "/admin/waiting/tasks", counted(1), "ann")
        form = {"action": "cancel", "chosen": "one", "token": token(listed)}
        planned = client.post("/admin/waiting/plan", data=form)
        nobody = client.get("/admin/waiting/tasks", headers={"x-operator": ""})

        assert planned.url.path == "/admin/waiting/plan"
        assert "Cancel 1 task" in planned.text
        assert nobody.status_code == 403
        for address in re.findall(r'(?:href|src|action|hx-get)="([^"]*)"', listed):
            assert address.startswith(("/admin/waiting/", "#"))
        assert client.get("/admin/waiting/static/page.js").status_code == 200
