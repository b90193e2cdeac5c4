"""The parts of the web pages that need no broker: reading once for all, searching, coming in."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from kombu_binary_delay import Topology
from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.cli.connect import Target
from kombu_binary_delay.cli.web import asgi_app
from kombu_binary_delay.errors import SettingsError
from kombu_binary_delay.operate import (
    Event,
    OperationError,
    Selection,
    Story,
    TaskTable,
    WaitingTask,
)
from kombu_binary_delay.operate.text import plain
from kombu_binary_delay.web import actions as web_actions
from kombu_binary_delay.web import drawing, guard, pages, passwords
from kombu_binary_delay.web.actions import Action, Actions
from kombu_binary_delay.web.application import application
from kombu_binary_delay.web.reader import Reader
from kombu_binary_delay.web.watch import read_story, read_tasks
from tests.waits import PATIENCE, wait_until

HOUR = 3_600_000
USER_HEADER = ["--user-header", "X-User"]


# --- the reader ---------------------------------------------------------------------


@pytest.fixture
def reader():
    reader = Reader("test")
    yield reader
    reader.close()


def test_ten_pages_that_ask_at_the_same_time_cost_one_reading(reader):
    readings, going, looks = [], threading.Event(), []

    def read():
        going.wait(PATIENCE)
        readings.append(1)
        return "figures"

    def ask():
        looks.append(reader.get("now", read, age=600, wait=PATIENCE))

    asking = [threading.Thread(target=ask) for _ in range(10)]
    for thread in asking:
        thread.start()
    going.set()
    for thread in asking:
        thread.join(PATIENCE)

    assert [look.value for look in looks] == ["figures"] * 10
    assert reader.get("now", read, age=600).value == "figures"
    assert len(readings) == 1


def test_what_was_read_stays_with_the_reason_why_there_is_nothing_newer(reader):
    failing = False

    def read():
        if failing:
            raise OperationError("the broker is away")
        return "figures"

    first = reader.get("now", read, age=600, wait=PATIENCE)
    failing = True
    second = reader.get("now", read, age=600, wait=PATIENCE, since=time.monotonic())
    failing = False
    third = reader.get("now", read, age=600, wait=PATIENCE, since=time.monotonic())

    assert (first.value, first.error) == ("figures", None)
    assert (second.value, second.at, second.error) == ("figures", first.at, "the broker is away")
    assert (third.value, third.error) == ("figures", None)


def test_what_was_changed_during_a_reading_is_read_again(reader):
    begun, going = threading.Event(), threading.Event()

    def before():
        begun.set()
        going.wait(PATIENCE)
        return "before"

    reader.get("tasks", before, age=600)
    begun.wait(PATIENCE)
    reader.get("tasks", lambda: "after", age=600, since=time.monotonic())
    going.set()

    end = time.monotonic() + PATIENCE
    while reader.get("tasks", lambda: "after", age=600, wait=1).value != "after":
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("read", ["now", "findings"])
def test_a_value_is_said_to_be_old_while_it_or_another_is_waited_for(reader, monkeypatch, read):
    monkeypatch.setattr("kombu_binary_delay.web.reader._SLOW", 0.0)
    going = threading.Event()
    reader.get("now", lambda: "figures", age=0, wait=PATIENCE)
    reader.get(read, lambda: going.wait(PATIENCE), age=600)
    end = time.monotonic() + PATIENCE
    while (look := reader.get("now", going.wait, age=600)).error is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    going.set()

    assert "has not answered for" in look.error
    assert look.value == "figures"


def test_who_asks_for_many_values_has_one_place_in_the_line(reader):
    going, readings = threading.Event(), []

    def ask(key, by, wait=0.0):
        def read():
            going.wait(PATIENCE)
            readings.append(key)
            return key

        return reader.get(key, read, age=600, wait=wait, by=by)

    for number in range(1000):
        ask(number, "a flood")
    mine = ask("mine", "me")
    going.set()

    assert (mine.value, mine.busy) == (None, False)
    assert ask("mine", "me", PATIENCE).value == "mine"
    # At most the one that is read, the last of the flood, and mine.
    assert len(readings) <= 3


def test_where_too_many_ask_the_next_one_is_told_at_once(reader):
    going = threading.Event()
    for number in range(1000):
        reader.get(number, going.wait, age=600, by=number)

    look = reader.get("mine", lambda: "mine", age=600, wait=PATIENCE, by="me")
    going.set()

    assert (look.value, look.busy) == (None, True)
    wait_until(lambda: reader.get("mine", lambda: "mine", age=600, by="me").value == "mine")


def test_a_defect_in_a_reading_is_no_end_of_the_pages(reader):
    def read():
        raise ZeroDivisionError("secret")

    look = reader.get("now", read, age=600, wait=PATIENCE)

    assert look.error == "reading failed; the log of this program says why"
    assert reader.get("other", lambda: 1, age=600, wait=PATIENCE).value == 1


# --- the table ----------------------------------------------------------------------


def table_of(*tasks):
    table = TaskTable("journal")
    with table.filling():
        for waiting in tasks:
            table.add(waiting)
    table.missing = ("what was published without it",)
    return table


def task(id_, name, due, queue="mail", args="(1,)"):
    return WaitingTask(id_, name, args, "{}", "", queue, due, 0, None, "journal")


@pytest.fixture(scope="module")
def now():
    return time.time_ns() // 1_000_000


@pytest.fixture(scope="module")
def table(now):
    return table_of(
        task("a1", "shop.pay", now + HOUR),
        task("a2", "Shop.remind", now + 2 * HOUR, "sms-mail", "('customer909',)"),
        task("b1", "crm.[sync]", now + 3 * HOUR, "it's; --"),
        task(None, None, now + 4 * HOUR),
        task("past", "shop.pay", now - HOUR),
        task("\ud800", "half a pair", now + 5 * HOUR),
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, ["a1", "a2", "b1", None, None]),
        ({"name": "shop"}, ["a1", "a2"]),
        ({"name": "shop.*"}, ["a1"]),
        ({"name": "shop.[!a-o]*"}, ["a1"]),
        ({"name": '"shop"'}, []),
        ({"name": '"shop.pay"'}, ["a1"]),
        ({"name": "%"}, []),
        ({"name": "' or 1=1 --"}, []),
        ({"queue": "it's; --"}, ["b1"]),
        ({"id": "a"}, ["a1", "a2"]),
        ({"arguments": "CUSTOMER909"}, ["a2"]),
        ({"arguments": "customer9091"}, []),
        ({"queue": "mail", "name": "pay"}, ["a1"]),
        ({"queue": '"mail"'}, ["a1", None, None]),
        ({"queue": "mai"}, ["a1", "a2", None, None]),
        ({"queue": "MAIL"}, ["a1", "a2", None, None]),
        ({"queue": "?m[!a]*"}, ["a2"]),
    ],
    ids=str,
)
def test_tasks_are_searched(table, words, expected):
    select = pages._asked(words).select  # noqa: SLF001 - as the form is read
    shown = map(pages._shown, table.tasks(select, 10))  # noqa: SLF001 - as they are listed
    assert [waiting.id for waiting in shown] == expected
    assert table.count(select) == len(expected)


def test_tasks_are_paged_counted_and_searched_by_due_time_and_id(table, now):
    waiting = Selection(after=now)
    assert [task.id for task in table.tasks(waiting, 2, 1)] == ["a2", "b1"]
    due = Selection(after=now + 2 * HOUR, before=now + 3 * HOUR)
    assert [task.id for task in table.tasks(due)] == ["a2"]
    assert table.histogram(now, now + 6 * HOUR, 6) == [0, 1, 1, 1, 1, 1]
    [counted] = table.count_by("queue", waiting, 1)
    assert (counted.value, counted.tasks) == ("mail", 3)
    ids = frozenset({"b1", "gone", "\ud800"})
    assert [task.name for task in table.tasks(Selection(ids=ids))] == ["crm.[sync]", "half a pair"]


def test_the_link_of_a_queue_finds_what_is_counted_and_no_other_queue(now):
    names = ["mail", "mail ", " mail", "email", "MAIL", "mail-high", "a[b]", "ab", "a*", "a?", " "]
    tasks = table_of(*(task(name, "pay", now + HOUR, name) for name in names))
    page = drawing.environment().from_string("{{ name | exactly | urlencode }}")

    with browser(away(tasks)) as client:
        read_until(client, "/tasks", f'id="count">{len(names)}<')
        for name in names:
            listed = client.get(f"/tasks?queue={page.render(name=name)}").text
            assert re.findall('task[?]id=([^"]*)"', listed) == [quote(name)]


def test_hidden_arguments_are_not_even_kept(now):
    tasks = table_of(task("a", "pay", now + HOUR, args="(secret,)"))

    read_tasks(lambda _: SimpleNamespace(tasks=lambda: tasks), Target(), hide=True)

    [kept] = tasks.tasks()
    assert (kept.args, kept.kwargs) == (None, None)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        *((text, "is no delay, such as 10s") for text in ("20300131", "1790010112345", "3600")),
        ("2030-01-31T24:00Z", "is no delay, such as 10s"),  # Python 3.14 reads it
        # Without a script, the zone of the reader is not known.
        ("2030-01-31T12:00", "has no time zone: write it as 2030-01-31T12:00Z"),
        ("2030-01-31", "has no time zone: write it as 2030-01-31T12:00Z"),
        # Python reads it as one o'clock.
        ("2030-01-31+01:00", "is no delay, such as 10s"),
    ],
)
def test_a_time_that_could_be_another_is_refused(now, typed, says):
    with browser(away(table_of(task("a", "pay", now + HOUR)))) as client:
        read_until(client, "/tasks", 'id="count">1<')
        for name in ("after", "before"):
            page = client.get("/tasks", params={name: typed}).text
            assert f"&#39;{typed}&#39; {says}" in page
            assert 'id="count"' not in page


@pytest.mark.parametrize(
    ("typed", "zone", "is_after"),
    [
        ("2h", "", False),
        ("2030-01-31 12:00:00 UTC", "Asia/Tokyo", True),
        ("2030-01-31 21:00:00", "Asia/Tokyo", True),
        ("2030-01-31T21:00", "Asia/Tokyo", True),
        ("2030-01-31T21:01", "Asia/Tokyo", False),
    ],
)
def test_a_time_is_understood_as_the_page_shows_it(now, typed, zone, is_after):
    noon = int(datetime(2030, 1, 31, 12, tzinfo=UTC).timestamp() * 1000)
    with browser(away(table_of(task("a", "pay", noon), task("b", "pay", now + HOUR)))) as client:
        read_until(client, "/tasks", 'id="count">2<')
        page = client.get("/tasks", params={"after": typed, "zone": zone}).text
    count = 1 if is_after or typed == "2h" else 0
    assert f'id="count">{count}<' in page


# --- how it looks -------------------------------------------------------------------


def test_names_from_elsewhere_are_seen_as_they_are():
    page = drawing.environment().from_string("{{ name | visible }}")

    assert page.render(name="<b>\u202e\n") == "&lt;b&gt;\\u202e\\n"
    assert plain("one\nline\x1b[2J") == "one\\nline\\x1b[2J"


PREFIX = Topology().prefix.rstrip(".")


@pytest.mark.parametrize(
    ("settings", "level", "past"),
    [
        ({}, f"{PREFIX}.level-02.0001", [f"{PREFIX}.level-03.1110"]),
        ({}, f"{PREFIX}-classic.level-03.1110", []),
        ({"lanes": 3}, f"{PREFIX}-lane2.level-02.0001", [f"{PREFIX}-lane2.level-03.1110"]),
        ({"lanes": 3}, None, None),
        ({"queue_per_delay": True}, None, None),
        ({"foreign_ladder": "celery"}, "celery_delayed_10", ["celery_delayed_11"]),
        ({}, "celery_delayed_10", None),
    ],
)
def test_the_way_down_the_ladder_is_that_of_the_queue_in_which_a_task_waits(
    now, settings, level, past
):
    waits = replace(task("a", "pay", now + HOUR), level=level)
    scheduled = Event("scheduled", now, now + HOUR)
    story = Story("a", "waiting", "journal", waits, (scheduled,))

    told = read_story(
        lambda _: SimpleNamespace(story=lambda _: story), Target(given=settings), "a", hide=False
    )

    assert told.story == story
    if past is None:
        assert not told.waits
    else:
        assert [wait.queue for wait in told.waits[: told.here + 1]] == [*past, level]


# --- who comes in -------------------------------------------------------------------


def test_a_password_is_kept_as_a_hash_and_known_again():
    line = passwords.line_for("ann", "open: sesame")
    users = passwords.read(f"# users\n{line}\n")
    checker = passwords.Checker(users)

    assert "sesame" not in line
    assert checker.is_right("ann", "open: sesame")
    assert checker.is_right("ann", "open: sesame")
    assert not checker.is_right("ann", "open")
    assert not checker.is_right("bob", "open: sesame")


@pytest.mark.parametrize(
    "name", ["", " ", "#ann", " ann", "ann ", "an:n", "an;n", "ann\n", "a\rn", "a\u2028n"]
)
def test_a_name_that_would_not_be_read_back_is_no_users_name(name):
    with pytest.raises(ValueError, match="cannot be a user's name"):
        passwords.line_for(name, "sesame")


#: A whole line, of a password that nobody knows.
LINE = f"ann:scrypt$16384$8$1${'A' * 22}==${'A' * 43}="


@pytest.mark.parametrize(
    "text",
    [
        *("", "ann", "ann:secret", ":scrypt$1$1$1$a$b"),
        *(LINE.replace("$8$", "$r$"), LINE.replace("scrypt", "crypt")),
        *(LINE[:-cut] for cut in (1, 2, 4, 20, 50)),
    ],
)
def test_bad_users_are_refused_and_not_repeated(text):
    with pytest.raises(ValueError, match="user") as refused:
        passwords.read(text)
    assert "secret" not in str(refused.value)
    assert "scrypt$1" not in str(refused.value)


def away(tasks=None, story=None, **options):
    """Make pages of a broker that nobody can reach, whose tasks may be known all the same."""
    target = Target("amqp://guest:hidden-word@127.0.0.1:1//")

    def place(_):
        if tasks is None:
            raise OperationError("there is no journal")
        return SimpleNamespace(tasks=lambda: tasks, story=lambda _: story)

    return application(target, place, authenticate=options.pop("authenticate", None), **options)


def browser(app, host="127.0.0.1", **options):
    return TestClient(app, base_url=f"http://{host}", **options)


def read_until(client, path, words):
    """Load a page until it has these words."""
    end = time.monotonic() + PATIENCE
    while words not in (page := client.get(path)).text:
        assert page.status_code == 200
        assert time.monotonic() < end
        time.sleep(0.1)
    return page.text


def test_a_page_says_that_the_broker_is_away_and_no_secrets():
    with browser(away()) as client:
        for path in ("/", "/now?part=top"):
            assert "hidden-word" not in read_until(client, path, "The broker cannot be read")
        for path in ("/tasks", "/results", "/task?id=x"):
            assert "hidden-word" not in read_until(client, path, "There is no journal.")


def test_pages_come_with_a_strict_policy_and_nothing_from_elsewhere():
    with browser(away()) as client:
        page = client.get("/")
        script = client.get("/static/page.js")

    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert "http" not in page.text.replace("http-equiv", "")
    assert "style=" not in page.text
    assert "<script>" not in page.text
    assert page.headers["cache-control"] == "no-store"
    assert script.status_code == 200
    assert script.headers["content-security-policy"] == policy


def test_enter_in_a_form_plans_a_rescheduling_and_never_a_cancellation(now):
    waiting = task("a", "pay", now + HOUR)
    story = Story("a", "waiting", "journal", waiting)
    app = away(table_of(waiting), story, allow_changes=True)

    with browser(app) as client:
        listed = read_until(client, "/tasks", 'id="count">1<')
        told = read_until(client, "/task?id=a", "Act on it")

    # A browser presses the first button of the form.
    for page in (listed, told):
        form = page[page.index('method="post"') :]
        assert re.findall('<button name="action" value="([a-z]*)"', form) == [
            "reschedule",
            "cancel",
        ]


def test_nothing_can_be_changed_unless_that_is_allowed():
    with browser(away()) as client:
        assert client.post(
            "/plan", data={"action": "cancel", "chosen": "x"}
        ).status_code == 405 or (client.post("/plan").status_code == 404)
        assert client.post("/act").status_code == 404
        assert 'method="post"' not in client.get("/tasks").text


@pytest.mark.parametrize(
    ("chunks", "says"),
    [([b"x" * 1_000_000] * 6, "2,000,000 bytes"), ([b"x=1&" * 2001], "2,000 fields")],
)
def test_a_form_is_read_up_to_its_limits_whether_its_length_is_said_or_not(chunks, says):
    with browser(away(allow_changes=True)) as client:
        unsaid = client.post("/plan", content=(chunk for chunk in chunks))
        said = client.post("/plan", content=b"".join(chunks))

    assert (unsaid.status_code, said.status_code) == (413, 413)
    assert says in unsaid.text
    assert says in said.text


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_makes_the_program_read_no_task(now, site):
    told = Story("a", "waiting", "journal", task("a", "pay", now + HOUR))
    readings = []

    def story(task_id):
        readings.append(task_id)
        return told

    def place(_):
        return SimpleNamespace(story=story)

    app = application(Target("amqp://127.0.0.1:1//"), place, authenticate=None)
    with browser(app) as client:
        begin = time.monotonic()
        for number in range(100):
            page = client.get(f"/task?id={number}", headers={"sec-fetch-site": site})
        took = time.monotonic() - begin
        # A link from there works all the same: the page itself asks.
        assert 'hx-trigger="load, tick' in page.text
        read_until(client, "/task?id=a&part=1", "It <strong>waits")
        linked = client.get("/task?id=a", headers={"sec-fetch-site": site}).text

    assert readings == ["a"]
    assert "It <strong>waits" in linked
    assert took < 100 * pages._FIRST  # noqa: SLF001 - no request has waited


def test_another_name_for_this_machine_is_refused():
    app = away(hosts={*guard.LOCAL_HOSTS})

    with browser(app) as here, browser(app, "[::1]") as six, browser(app, "evil.example") as trick:
        assert here.get("/tasks").status_code == 200
        assert six.get("/tasks").status_code == 200
        assert trick.get("/tasks").status_code == 400
        assert here.get("/tasks", headers={"host": "[::1"}).status_code == 400


def test_users_need_their_password():
    users = passwords.read(passwords.line_for("ann", "sesame"))

    with browser(away(authenticate=guard.by_password(users))) as client:
        refused = client.get("/tasks")
        wrong = client.get("/tasks", auth=("ann", "open"))
        garbage = client.get("/tasks", headers={"authorization": b"Basic \xff\xff"})
        static = client.get("/static/page.js")
        right = client.get("/tasks", auth=("ann", "sesame"))

    assert [answer.status_code for answer in (refused, wrong, garbage, static)] == [401] * 4
    assert refused.headers["www-authenticate"].startswith("Basic")
    assert right.status_code == 200
    assert "ann" in right.text


def test_a_header_counts_from_the_proxy_and_from_nobody_else():
    app = away(authenticate=guard.by_header("X-User", ["10.0.0.0/8"]))
    said = {"X-User": "ann"}

    with (
        browser(app, client=("10.1.2.3", 1)) as proxy,
        browser(app, client=("11.0.0.1", 1)) as other,
    ):
        assert proxy.get("/tasks", headers=said).status_code == 200
        assert proxy.get("/tasks").status_code == 403
        assert other.get("/tasks", headers=said).status_code == 403


def test_the_request_s_state_is_shared_with_the_site_around_the_pages():
    left = []

    class Site:
        def __init__(self, app):
            self._app = app

        async def __call__(self, scope, receive, send):
            state = scope.setdefault("state", {})
            state["user"] = "the site's own"
            await self._app(scope, receive, send)
            if scope["type"] == "http":
                left.append(state["user"])

    with browser(Site(away(authenticate=lambda _: "ann", allow_changes=True))) as client:
        assert "ann" in client.get("/tasks").text
    assert left == ["the site's own"]


def test_a_function_that_says_who_asks_does_not_hold_up_other_requests():
    def authenticate(_):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return "ann"

    class Asker:
        async def __call__(self, _):
            return "bob"

    with browser(away(authenticate=authenticate)) as client:
        assert "ann" in client.get("/tasks").text
    with browser(away(authenticate=Asker())) as client:
        assert "bob" in client.get("/tasks").text


def test_a_plan_is_done_once_and_by_whoever_made_it():
    actions = Actions()
    action = Action("cancel", "ann", "all")
    actions.add(action)

    assert actions.get(action.key, "bob") is None
    assert actions.get(action.key, "ann") is action
    assert [actions.take(action), actions.take(action)] == [True, False]


@pytest.mark.parametrize("unexpected", [ZeroDivisionError("why"), OperationError("why")])
def test_an_act_that_runs_or_failed_is_not_shown_as_one_to_begin(monkeypatch, unexpected):
    actions, going = Actions(), threading.Event()
    plan = Action("redrive", "", "all", queues=(("kbd.v2.parking", 1),))
    actions.add(plan)

    def act(*_):
        going.wait(PATIENCE)
        raise unexpected

    monkeypatch.setattr(pages, "Actions", lambda: actions)
    monkeypatch.setattr(pages.Pages, "_done", act)
    with browser(away(allow_changes=True)) as client:
        path, answers = f"/plan?key={plan.key}", []
        unused = client.get(path).text
        token, *_ = re.findall(r'name="token" value="([0-9a-f]{64})"', unused)
        form = {"key": plan.key, "token": token}
        acting = threading.Thread(target=lambda: answers.append(client.post("/act", data=form)))
        acting.start()
        wait_until(lambda: plan.began)
        monkeypatch.setattr(web_actions, "_AGE", -1)
        running = client.get(path).text
        going.set()
        acting.join()
        failed = client.get(path).text

    assert "<button" in unused
    assert "autofocus" not in unused
    assert "Running</strong> since <time" in running
    assert [answer.status_code for answer in answers] == [200]
    assert "It failed." in answers[0].text == failed
    assert "<button" not in running + failed


# --- the command --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "env", "says"),
    [
        (["--host", "10.0.0.1"], {}, "--users"),
        (["--host", "10.0.0.1"], {"BINARY_DELAY_WEB_USERS": "ann:secret"}, "line 1 of the users"),
        (["--users", "-", *USER_HEADER], {}, "give one"),
        (USER_HEADER, {"BINARY_DELAY_WEB_USERS": LINE}, "give one"),
        (["--proxy", "10.0.0.2"], {}, "--proxy needs --user-header"),
        (["--tick", "0"], {}, "tick must be a whole number of milliseconds >= 1, got 0"),
        ([], {"BINARY_DELAY_NAMESPACE": "a.b"}, "namespace must be 1 to 32 letters"),
        (["--host", "host.invalid", *USER_HEADER], {}, "cannot listen on host.invalid, port 8025"),
        (["--host", "192.0.2.1", *USER_HEADER], {}, "cannot listen on 192.0.2.1, port 8025"),
    ],
)
def test_a_server_that_cannot_be_is_refused_before_it_serves(options, env, says):
    refused = CliRunner().invoke(binary_delay, ["web", *options], env=env)

    assert refused.exit_code == 2
    assert says in refused.output
    assert "secret" not in refused.output


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = CliRunner().invoke(binary_delay, ["web", "--port", str(port)], env={})

    assert refused.exit_code == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in refused.output


def test_pages_with_invalid_settings_are_refused_when_they_are_made():
    with pytest.raises(SettingsError, match="got 0"):
        asgi_app(None, settings={"tick": 0})
    with pytest.raises(SettingsError, match="got 'nodes'"):
        asgi_app(None, source="nodes")


def test_a_new_user_whose_line_would_be_a_comment_is_refused():
    refused = CliRunner().invoke(binary_delay, ["web", "--new-user", "#ann"], input="a\na\n")

    assert refused.exit_code == 2
    assert "'#ann' cannot be a user's name" in refused.output


def test_a_new_user_is_a_line_with_a_hash():
    made = CliRunner().invoke(binary_delay, ["web", "--new-user", "ann"], input="sesame\nsesame\n")

    assert made.exit_code == 0
    [line] = [line for line in made.output.splitlines() if line.startswith("ann:")]
    assert passwords.Checker(passwords.read(line)).is_right("ann", "sesame")
