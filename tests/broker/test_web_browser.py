"""The web pages in a real browser: each page and act, users, hostile words, a broker that stops."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from kombu import Queue
from playwright.sync_api import expect, sync_playwright

from dev.processes import Processes
from dev.service import wait_until
from kombu_binary_delay import PublishBatch
from kombu_binary_delay.web import passwords

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MANY = 2_500
HOSTILE = "evil.task<script>alert('name')</script>\u202e"
ARGUMENTS = "('<img src=x onerror=alert(1)>',)"
PATIENCE = 60_000  # milliseconds

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def radix():
    """The pages are served for the default ladder."""


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        # dev/install.sh brings one; Ubuntu has none in its packages.
        pytest.skip(f"a browser is needed, one of {', '.join(BROWSERS)}")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        # Its sandbox takes what a container does not give.
        options = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@pytest.fixture
def serve(vhost, tmp_path):
    """Serve the pages by the command, and return their address."""
    with Processes("web") as processes:

        def serve(*options, **env):
            place = ["-b", vhost.url, "-m", vhost.broker.management_url]
            command = [sys.executable, "-m", "kombu_binary_delay.cli", *place, "web"]
            log = tmp_path / "web.log"
            process = processes.spawn(
                [*command, "--source", "journal", "--port", "0", *options],
                {**os.environ, "PYTHONPATH": str(ROOT), **env},
                log,
            )

            def addresses():
                return re.findall(r"running on (http://\S*:[1-9]\d*) ", log.read_text())

            wait_until(lambda: bool(addresses()), 60, "the pages are not served", process)
            [address] = addresses()
            return address, log

        yield serve


@pytest.fixture
def visit(browser):
    """Open a tab of a browser of its own, which must have nothing to complain of."""
    contexts, complaints = [], []

    def refuse(dialog):
        complaints.append(dialog.message)
        dialog.dismiss()

    def visit(address, *, fails=False, **options):
        options.setdefault("timezone_id", "Europe/Berlin")
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        tab = context.new_page()
        if not fails:
            tab.on("console", lambda said: complaints.append(said.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", refuse)
        tab.goto(address)
        # One is refused for its address.
        complaints.clear()
        return tab

    yield visit
    for context in contexts:
        context.close()
    assert not complaints


def publish(connection, count):
    """Publish tasks that are due in the third hour from now, and a hostile one in the fifth."""
    channel = connection.default_channel
    Queue("mail")(channel).declare()
    now = datetime.now(UTC)
    with PublishBatch(channel, 1000) as batch:
        for number in range(count + 1):
            name, hours = ("shop.pay", 2 + number / count) if number < count else (HOSTILE, 4.5)
            headers = {
                "id": f"task-{number}",
                "task": name,
                "eta": (now + timedelta(hours=hours)).isoformat(),
                "argsrepr": ARGUMENTS,
                "kwargsrepr": "{}",
            }
            message = channel.prepare_message(b"[]", headers=headers)
            batch.publish(message, "", "mail")


def drag(tab, chart, until):
    """Drag over half a chart; again where it was drawn anew meanwhile, as for another scheme."""
    for _ in range(12):
        expect(chart).to_be_visible()
        box = chart.bounding_box() or {}
        tab.mouse.move(box.get("x", 0) + 1, box.get("y", 0) + 50)
        tab.mouse.down()
        tab.mouse.move(box.get("x", 0) + box.get("width", 0) / 2, box.get("y", 0) + 60, steps=5)
        tab.mouse.up()
        with suppress(AssertionError):
            expect(until).to_be_visible(timeout=5000)
            return
    raise AssertionError("the chart is not dragged to a time")


@pytest.fixture
def journalling(connect):
    return connect(binary_delay={"journal": "stream"})


def test_now_shows_figures_and_a_chart_that_is_dragged_to_a_time(serve, visit, journalling):
    publish(journalling, 500)
    address, _ = serve()
    tab = visit(address)

    expect(tab.locator("#waiting")).to_have_text("501")
    expect(tab.get_by_text("The ladder is sound")).to_be_visible()
    expect(tab.get_by_text("with UTC beside")).to_be_visible()
    expect(tab.locator("time .utc").first).to_contain_text("UTC")
    for width in (400, 1000, 1600):
        for scheme in ("light", "dark"):
            tab.set_viewport_size({"width": width, "height": 900})
            tab.emulate_media(color_scheme=scheme)
            assert tab.evaluate(WIDER) <= 0, width
    tab.get_by_role("button", name="day").click()
    listing = tab.get_by_role("link", name=re.compile("^List the 501 due from"))
    drag(tab, tab.locator("#chart .u-over"), until=listing)
    listing.click()
    expect(tab.locator("#count")).to_have_text("501")
    for zone, says in (("UTC", "in UTC"), ("Europe/London", "in your zone")):
        expect(visit(address, timezone_id=zone).locator("#zone")).to_contain_text(says)


def test_tasks_are_searched_cancelled_and_rescheduled(serve, visit, journalling):
    lines = [passwords.line_for(name, name) for name in ("ann", "bob")]
    publish(journalling, MANY)
    address, log = serve("--allow-changes", BINARY_DELAY_WEB_USERS=";".join(lines))
    ann, bob = ({"username": name, "password": name} for name in ("ann", "bob"))
    tab = visit(f"{address}/tasks", http_credentials=ann)

    # By the keyboard; what is hostile is only text.
    expect(tab.locator("#count")).to_have_text(f"{MANY + 1:,}")
    tab.keyboard.press("Tab")
    expect(tab.get_by_role("link", name="Skip to the content")).to_be_focused()
    assert tab.evaluate(NAMELESS) == []
    tab.get_by_label("Name", exact=True).fill("EVIL")
    tab.keyboard.press("Enter")
    expect(tab.locator("#count")).to_have_text("1")
    row = tab.locator(".tasks tbody tr")
    expect(row).to_contain_text("evil.task<script>alert('name')</script>\\u202e")
    expect(row).to_contain_text(ARGUMENTS.replace(",)", ")"))
    row.get_by_role("link").click()
    expect(tab.get_by_text("here now")).to_be_visible()

    # Enter in the form plans a rescheduling, and nothing is confirmed by another Enter.
    tab.get_by_label("Reschedule to").fill("2d")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("heading", name="Reschedule 1 task")).to_be_visible()
    expect(tab.get_by_role("button", name="Reschedule 1 task")).not_to_be_focused()
    tab.goto(f"{address}/task?id=task-{MANY}")

    # One is cancelled from its story; all others are rescheduled, and the other user sees it.
    tab.get_by_role("button", name="Cancel it").click()
    tab.get_by_role("button", name="Cancel 1 task").click()
    expect(tab.get_by_text("1 task cancelled")).to_be_visible()
    tab.goto(f"{address}/tasks?name=shop.*&before=4h")
    tab.get_by_label(f"all {MANY:,}").check()
    tab.get_by_label("Reschedule to").fill("2d")
    tab.get_by_role("button", name="Reschedule tasks").click()
    other = visit(tab.url, http_credentials=bob)
    expect(other.get_by_text("not planned by you")).to_be_visible()
    tab.get_by_role("button", name=f"Reschedule {MANY:,} tasks").click()
    expect(tab.get_by_text(f"{MANY:,} tasks rescheduled")).to_be_visible()
    other.goto(f"{address}/tasks?after=1d")
    expect(other.locator("#count")).to_have_text(f"{MANY:,}")
    other.goto(f"{address}/tasks")
    expect(other.get_by_text("1 cancelled or superseded task is not shown")).to_be_visible()
    said = log.read_text()
    assert f"'ann' from 127.0.0.1: cancel of task-{MANY}" in said
    assert f"reschedule {MANY:,} (name 'shop.*', before '4h') done" in said
    assert "bob" not in said
    assert "ann:" not in said


def test_a_page_that_gets_no_answer_or_a_refusal_says_that_it_is_not_up_to_date(
    serve, visit, journalling
):
    publish(journalling, 10)
    address, _ = serve()
    lost = "This page is not up to date"

    def refuse(route):
        route.fulfill(status=502, body="Bad Gateway")

    def lead_away(route):
        # As a site's login does, when a session has ended.
        route.fulfill(status=302, headers={"location": "/static/icon.svg"})

    def never(_):
        pass

    for path, part, answers in (
        ("/", "**/now?part=top", (refuse, lead_away, never)),
        ("/", "**/forecast?*", (refuse, lead_away, never)),
        ("/tasks", "**/results?*", (refuse, lead_away)),
    ):
        tab = visit(f"{address}{path}", fails=True)
        expect(tab.locator("#waiting, #count")).to_have_text("11")
        for answer in answers:
            expect(tab.get_by_text(lost)).to_be_hidden()
            # As a proxy does while the program is down.
            tab.route(part, answer)
            expect(tab.get_by_text(lost)).to_be_visible()
            expect(tab.locator("#waiting, #count")).to_have_text("11")
            tab.unroute(part)


def test_focus_and_selected_text_stay_while_a_page_reads_on(serve, visit, journalling):
    publish(journalling, 10)
    address, _ = serve("--allow-changes")

    def is_written_anew(tab, part):
        """Wait until a part of the page was written once more."""
        before = tab.locator(f"{part} > *").first.element_handle()
        wait_until(lambda: not before.evaluate("it => it.isConnected"), 60, "it stays")

    tasks = visit(f"{address}/tasks")
    expect(tasks.locator("#count")).to_have_text("11")
    for focused in (
        tasks.get_by_role("link", name="task-3", exact=True),
        tasks.get_by_label("Choose shop.pay task-4"),
        tasks.get_by_role("button", name="Cancel tasks"),
    ):
        focused.focus()
        is_written_anew(tasks, "#results")
        expect(focused).to_be_focused()

    now = visit(address)
    expect(now.locator("#waiting")).to_have_text("11")
    now.evaluate(COUNT_CHANGES)
    again(now)
    assert now.evaluate("window.changes") == 0
    drag(now, now.locator("#chart .u-over"), until=now.get_by_text("Show all again"))
    now.get_by_role("button", name="Show all again").focus()
    now.evaluate("getSelection().selectAllChildren(document.getElementById('waiting'))")
    again(now)
    expect(now.get_by_role("button", name="Show all again")).to_be_focused()
    assert now.evaluate("String(getSelection())") == "11"
    # Somebody has left it like that.
    now.evaluate("const before = Date.now; Date.now = () => before() + 61_000;")
    is_written_anew(now, "#now")


def again(tab):
    """Wait until a page has asked for all that changes once more, and written it."""
    for _ in range(3):
        with tab.expect_response("**/forecast?*"):
            pass


@pytest.mark.own_broker
def test_a_page_says_that_the_broker_stopped_and_goes_on_when_it_is_back(
    own_broker, serve, visit, journalling
):
    publish(journalling, 10)
    journalling.release()
    address, _ = serve()
    now, tasks = visit(address), visit(f"{address}/tasks")
    expect(now.locator("#waiting")).to_have_text("11")
    expect(tasks.locator("#count")).to_have_text("11")

    try:
        own_broker.stop()
        for tab in (now, tasks):
            expect(tab.get_by_text("The broker cannot be read.")).to_be_visible()
        expect(now.locator("#waiting")).to_have_text("11")
    finally:
        own_broker.start()

    for tab in (now, tasks):
        expect(tab.get_by_text("The broker cannot be read.")).to_be_hidden()
    expect(now.locator("#waiting")).to_have_text("11")


#: Counts how often the words below the chart are written.
COUNT_CHANGES = """
window.changes = 0;
const all = { childList: true, characterData: true, subtree: true };
new MutationObserver((changes) => { window.changes += changes.length; })
  .observe(document.getElementById("range"), all);
"""
#: How much wider than the window a page is, in pixels.
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: What can be typed into or pressed, and says to nobody what it is.
NAMELESS = """
[...document.querySelectorAll("input:not([type=hidden]), button, select")]
  .filter((each) => !each.labels?.length && !each.ariaLabel && !each.textContent.trim())
  .map((each) => each.outerHTML)
"""
