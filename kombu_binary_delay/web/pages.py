"""The handler of each address. Handlers that read run in threads, and read through the reader."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any
from urllib.parse import urlencode
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from anyio import to_thread
from kombu.log import get_logger
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route

from kombu_binary_delay import operate
from kombu_binary_delay.operate.amend import CANCEL, RESCHEDULE
from kombu_binary_delay.operate.failures import named
from kombu_binary_delay.operate.status import parked_by_side
from kombu_binary_delay.operate.text import plain, plural
from kombu_binary_delay.operate.when import moment_of

from .actions import Action, Actions
from .drawing import environment
from .guard import FIELD, Tokens, asker, is_from_elsewhere, user_of, who
from .reader import FAILURES, Latest, Reader
from .watch import Broker, Now, Open, Watch, read_story, read_tasks

logger = get_logger(__name__)

REDRIVE = "redrive"
#: Seconds for which a result is new enough.
_NOW, _FINDINGS, _TASKS, _STORY, _SCHEDULES = 3.0, 60.0, 10.0, 3.0, 3.0
#: Seconds that a page waits for a first result, so that it always loads soon.
_FIRST, _SOON = 0.4, 8.0
_PAGE = 50
_EXAMPLES = 10
_MOST = 100_000  # tasks that one action may amend
_BARS = 60
_QUEUES = 12
#: The limits of a search: more would keep this machine busy for too long.
_LONGEST, _STARS = 500, 5
_TO_A_LINE = 100  # ids in a line of the log

#: What a page says of a form that was filled in: nothing, before it is sent.
_UNFILLED: Mapping[str, Any] = {"problem_words": "", "chosen": (), "when": "", "scope": "some"}
_FAILURES = {403: "Not allowed", 404: "There is no such page", 413: "Too long"}
_MINUTE, _HOUR, _DAY, _WEEK = 60_000, 3_600_000, 86_400_000, 604_800_000
SPANS = (("minute", _MINUTE), ("hour", _HOUR), ("day", _DAY), ("week", _WEEK))


@dataclass(frozen=True)
class Forecast:
    """How many tasks are due within a time: ``exact``, or at least and probably."""

    span: str
    milliseconds: int
    exact: int | None
    surely: int
    probably: int


#: The fields of the search.
_SEARCHED = ("name", "arguments", "queue", "id", "after", "before")


@dataclass(frozen=True)
class Asked:
    """The request for a page of tasks: the form's fields, and what they select."""

    words: Mapping[str, str]
    select: operate.Selection
    page: int = 0
    errors: Mapping[str, str] | None = None

    @property
    def is_search(self) -> bool:
        """Whether it asks for some of the tasks only."""
        return any(self.words[name] for name in _SEARCHED)

    def query(self, **changed: Any) -> str:
        """Return the request as the query of a URL."""
        words = {name: value for name, value in self.words.items() if value}
        words |= {name: str(value) for name, value in changed.items()}
        return urlencode(words)

    def said(self) -> str:
        """Return the selection in words."""
        words = [f"{name} {self.words[name]!r}" for name in _SEARCHED if self.words[name]]
        return ", ".join(words) or "all that wait"


class Pages:
    """The pages, with what they share: readers, tokens, and actions to be confirmed."""

    def __init__(
        self, broker: Broker, source: Open, *, allow_changes: bool, hide_arguments: bool
    ) -> None:
        self._broker = broker
        # Now, as invalid settings must be an error before the first request.
        self._declares = broker.settings.declare != "never"
        self._source = source
        self._allow = allow_changes
        self._hide = hide_arguments
        self._watch = Watch(broker)
        # Slow readings must not block the page that users look at most.
        self._reader = Reader("web-now", self._watch.close)
        self._tasks_reader = Reader("web-tasks")
        self._story_reader = Reader("web-story")
        self._templates = environment()
        self._tokens = Tokens()
        self._actions = Actions()
        self._redriving = Lock()

    def routes(self) -> list[Route]:
        """Return the addresses with their handlers."""
        routes = [
            Route("/", self.now, name="now"),
            Route("/now", self.now_part),
            Route("/forecast", self.forecast),
            Route("/tasks", self.tasks, name="tasks"),
            Route("/results", self.results),
            Route("/task", self.task, name="task"),
            Route("/schedules", self.schedules, name="schedules"),
        ]
        if self._allow:
            routes += [
                Route("/plan", self.plan, methods=["POST"]),
                Route("/plan", self.planned, methods=["GET"]),
                Route("/act", self.act, methods=["POST"]),
            ]
        return routes

    def failures(self) -> dict[Any, Any]:
        """Return the handlers of errors."""

        def refused(request: Request, exc: HTTPException) -> Response:
            title = _FAILURES.get(exc.status_code, "Not done")
            own = {"Not Found": "", "Method Not Allowed": ""}
            words = {"title": title, "words": own.get(exc.detail, exc.detail)}
            return self._show(request, "failure", words, exc.status_code)

        def failed(_: Request, __: Exception) -> Response:
            return PlainTextResponse("This failed; the log of the program says why.", 500)

        return {HTTPException: refused, Exception: failed}

    def close(self) -> None:
        """End the threads and close the connection."""
        self._reader.close()
        self._tasks_reader.close()
        self._story_reader.close()

    # --- Now ------------------------------------------------------------------------

    def now(self, request: Request) -> Response:
        """Show the messages that are delayed now."""
        return self._show(request, "now", self._now(_FIRST))

    def now_part(self, request: Request) -> Response:
        """Show a part of it that changes."""
        template = "now_top" if request.query_params.get("part") == "top" else "now_part"
        return self._show(request, template, self._now(0.0))

    def forecast(self, request: Request) -> Response:
        """Return how many tasks are due in each part of a time, for the chart."""
        now = _now()
        latest = self._tasks_read(0.0)
        if latest.value is None or latest.error:
            nothing = latest.value is None and self._nothing_waits()
            blank = {"start": now, "end": now, "counts": []}
            return JSONResponse({**blank, "error": latest.error, "nothing": nothing})
        table: operate.TaskTable = latest.value
        start, end = (_number(request.query_params.get(name)) for name in ("start", "end"))
        if end is None:
            end = max(table.last() or now, now + _MINUTE) + 1
        start = max(start or now, now)
        end = max(end, start + _BARS)
        counts = table.histogram(start, end, _BARS)
        return JSONResponse({"start": start, "end": end, "counts": counts, "error": None})

    def _now(self, wait: float) -> dict[str, Any]:
        latest = self._reader.get("now", self._watch.now, _NOW, wait)
        findings = self._reader.get("findings", self._watch.findings, _FINDINGS)
        tasks = self._tasks_read(0.0)
        # An old list is not what is due now.
        table: operate.TaskTable | None = None if tasks.error else tasks.value
        ladders = latest.value.status.ladders if latest.value else ()
        waiting = operate.Selection(after=_now())
        return {
            "latest": latest,
            "findings": findings,
            "troubles": _troubles(latest.value, findings.value or ()) if latest.value else (),
            "declares": self._declares,
            "tasks": tasks,
            "table": table,
            "forecast": [_expect(span, length, ladders, table) for span, length in SPANS],
            "waiting": sum(ladder.messages for ladder in ladders),
            "taken_back": table.taken_back(waiting) if table else 0,
            "queues": table.count_by("queue", waiting, _QUEUES) if table else (),
        }

    # --- Tasks ----------------------------------------------------------------------

    def tasks(self, request: Request) -> Response:
        """Show the delayed tasks, with a search form."""
        return self._show(request, "tasks", self._tasks(request.query_params, _FIRST))

    def results(self, request: Request) -> Response:
        """Show the part of it that changes."""
        return self._show(request, "results", self._tasks(request.query_params, 0.0))

    def task(self, request: Request) -> Response:
        """Show one task's story."""
        task_id = request.query_params.get("id", "")
        template = "story" if "part" in request.query_params else "task"
        return self._show(request, template, self._task(request, task_id))

    def schedules(self, request: Request) -> Response:
        """Show the schedules of all apps, or the part of the page that changes."""
        template = "schedules_part" if "part" in request.query_params else "schedules"
        latest = self._reader.get("schedules", self._watch.schedules, _SCHEDULES, _FIRST)
        return self._show(request, template, {"latest": latest})

    def _task(self, request: Request, task_id: str) -> dict[str, Any]:
        if is_from_elsewhere(request):
            # Another site can make a browser ask for any number of them. A link from there shows
            # the page, which then asks by itself.
            latest = self._story_reader.last(task_id)
        else:
            latest = self._story_reader.get(
                task_id,
                lambda: read_story(self._source, self._broker, task_id, hide=self._hide),
                _STORY,
                _FIRST,
                by=asker(request),
            )
        return {"task_id": task_id, "latest": latest, "hide": self._hide}

    def _tasks_read(self, wait: float, since: float | None = None) -> Latest:
        return self._tasks_reader.get(
            "tasks",
            lambda: read_tasks(self._source, self._broker, hide=self._hide),
            _TASKS,
            wait,
            since,
        )

    def _tasks(self, words: Mapping[str, str], wait: float) -> dict[str, Any]:
        asked = _asked(words)
        latest = self._tasks_read(wait)
        table: operate.TaskTable | None = latest.value
        shown: list[operate.WaitingTask] = []
        count = 0
        if table is not None and not asked.errors:
            count = table.count(asked.select)
            shown = [*map(_shown, table.tasks(asked.select, _PAGE, asked.page * _PAGE))]
        return {
            "latest": latest,
            "asked": asked,
            "shown": shown,
            "count": count,
            "unseen": table.unseen(asked.select) if table else (),
            "first": asked.page * _PAGE + 1,
            "more": (asked.page + 1) * _PAGE < count,
            "hide": self._hide,
            "nothing_waits": table is None and self._nothing_waits(),
        }

    def _nothing_waits(self) -> bool:
        """Return whether the broker is known to have no delayed message."""
        now: Now | None = self._reader.get("now", self._watch.now, _NOW, _FIRST).value
        return now is not None and not any(ladder.messages for ladder in now.status.ladders)

    # --- acts -----------------------------------------------------------------------

    async def plan(self, request: Request) -> Response:
        """Count what an action would change, and keep it until it is confirmed."""
        form = await self._tokens.form(request)
        try:
            action = await to_thread.run_sync(self._planned_action, request, form)
        except FAILURES as exc:
            why = f"The broker did not take part: {exc}."
            return await to_thread.run_sync(self._plan_again, request, form, why, 502)
        except ValueError as exc:
            return await to_thread.run_sync(self._plan_again, request, form, f"{exc}.", 400)
        self._actions.add(action)
        return RedirectResponse(self._at(request, f"/plan?key={action.key}"), 303)

    def _plan_again(
        self, request: Request, form: Mapping[str, list[str]], why: str, status: int
    ) -> Response:
        """Show the page of a form again, as it was filled in, with why it was not done."""
        words = _first(form)
        chosen = form.get("chosen", [])
        kept: dict[str, Any] = {
            "problem_words": why,
            "chosen": chosen,
            "when": words.get("when", ""),
        }
        if words.get("action") == REDRIVE:
            return self._show(request, "now", {**self._now(_FIRST), **kept}, status)
        if words.get("page_of") == "task" and chosen:
            return self._show(request, "task", {**self._task(request, chosen[0]), **kept}, status)
        kept["scope"] = words.get("scope", "some")
        return self._show(request, "tasks", {**self._tasks(words, _FIRST), **kept}, status)

    def planned(self, request: Request) -> Response:
        """Show what an action would change, is changing or has changed."""
        action = self._action_of(request, request.query_params.get("key", ""))
        known = {task.id for task in action.examples}
        others = [id_ for id_ in (action.chosen.dues if action.chosen else ()) if id_ not in known]
        room = max(_EXAMPLES - len(action.examples), 0)
        words = {
            "plan": action,
            "others": others[:room],
            "left": list(action.left.items())[:_EXAMPLES],
            "most": _QUEUES,
        }
        return self._show(request, "plan", words)

    async def act(self, request: Request) -> Response:
        """Do the confirmed action, once."""
        form = await self._tokens.form(request)
        action = self._action_of(request, form.get("key", [""])[0])
        if self._actions.take(action):
            await to_thread.run_sync(self._act, request, action)
        return RedirectResponse(self._at(request, f"/plan?key={action.key}"), 303)

    def _action_of(self, request: Request, key: str) -> Action:
        action = self._actions.get(key, user_of(request))
        if action is None:
            raise HTTPException(404, "This was not planned by you, or too long ago. Plan it anew.")
        return action

    def _planned_action(self, request: Request, form: Mapping[str, list[str]]) -> Action:
        """Return the action of a form.

        :raises ValueError: for an invalid form.
        """
        user, words = user_of(request), _first(form)
        kind = words.get("action", "")
        if kind == REDRIVE:
            return self._planned_redrive(user)
        if kind not in (CANCEL, RESCHEDULE):
            raise ValueError("This is no act")
        due = _moment(words.get("when", ""), words.get("zone", ""))
        if kind == CANCEL and due is not None:
            raise ValueError("'Reschedule to' has a time: clear it to cancel, or press Reschedule")
        if kind == RESCHEDULE and (due is None or due <= _now()):
            raise ValueError("Say a time that is still to come, such as 2h")
        tasks, chosen, said = self._chosen(form, words)
        with named(self._broker), self._broker.delaying() as connection:
            # This finds out now whether the broker supports it.
            planned = operate.amend(connection, kind, chosen, due, dry_run=True)
        if planned.left and not planned.ids:
            raise ValueError(next(iter(planned.left.values())))
        chosen = replace(chosen, dues={id_: chosen.dues[id_] for id_ in planned.ids})
        tasks = [task for task in tasks if task.id in chosen.dues]
        queues = Counter(queue for _, queue in {(task.id, task.queue) for task in tasks})
        action = Action(
            kind,
            user,
            said,
            chosen,
            tuple(map(_shown, sorted(tasks, key=lambda task: task.due)[:_EXAMPLES])),
            tuple(sorted(queues.items(), key=lambda counted: (-counted[1], counted[0]))),
            due,
            0 if due is None else _unmoved(tasks, due),
            left=planned.left,
        )
        if action.unmoved and action.unmoved == action.count:
            raise ValueError(f"{action.kept}: say a later time")
        return action

    def _chosen(
        self, form: Mapping[str, list[str]], words: Mapping[str, str]
    ) -> tuple[list[operate.WaitingTask], operate.Chosen, str]:
        """Return the waiting tasks of a form, what to amend, and the selection in words.

        :raises ValueError: for an invalid form, or if the tasks cannot be read now.
        """
        latest = self._tasks_read(_SOON)
        table: operate.TaskTable | None = latest.value
        if words.get("scope") == "all":
            asked = _asked(words)
            if latest.error:
                raise ValueError(f"The tasks cannot be read now: {latest.error}")
            if asked.errors or table is None:
                raise ValueError("The tasks are not read yet, or the search is not understood")
            if table.count(asked.select) > _MOST:
                raise ValueError(f"These are more than {_MOST:,} tasks: search for fewer")
            tasks = list(table.tasks(asked.select))
            return tasks, operate.choose(tasks), asked.said()
        ids = tuple(dict.fromkeys(form.get("chosen", [])))
        if not ids:
            raise ValueError("No task is chosen: mark some, or take all that were found")
        tasks = self._waiting(ids, table)
        known = operate.choose(tasks).dues
        # One that does not wait is amended as well, without a due time.
        chosen = operate.Chosen({id_: known.get(id_) for id_ in ids}, by_search=True)
        return tasks, chosen, "one by one"

    def _waiting(
        self, ids: Collection[str], table: operate.TaskTable | None
    ) -> list[operate.WaitingTask]:
        """Return those of these tasks that wait.

        :raises ValueError: if the tasks cannot be read now.
        """
        these = operate.Selection(ids=frozenset(ids))
        tasks = list(table.tasks(these)) if table else []
        if len({task.id for task in tasks}) < len(ids):
            # It may have been published since that was read.
            asked = time.time()
            latest = self._tasks_read(_SOON, since=time.monotonic())
            if latest.value is None or latest.error or latest.at - latest.took < asked:
                why = latest.error or "load the list again, and choose from that"
                raise ValueError(f"The tasks could not be read anew in time: {why}")
            tasks = list(latest.value.tasks(these))
        return tasks

    def _planned_redrive(self, user: str) -> Action:
        """Count what is parked; where it is to go is in the messages, and none is taken."""
        with named(self._broker), self._broker.plain() as connection:
            management = self._broker.management(connection)
            sides = parked_by_side(connection, self._broker.topology())
            planned = [operate.parked(connection, side, management) for side in sides]
        return Action(
            REDRIVE,
            user,
            "all that is parked",
            queues=tuple(queue for preview in planned for queue in preview.queues),
            reasons=tuple(reason for preview in planned for reason in preview.reasons),
        )

    def _redrive(self) -> operate.Redrive:
        """Redrive what is parked, in each parking queue of the namespace, as Now counts them."""
        # Meanwhile, another would not see the messages that this one has read.
        with self._redriving, named(self._broker), self._broker.plain() as connection:
            management = self._broker.management(connection)
            sides = parked_by_side(connection, self._broker.topology())
            done = [operate.redrive(self._broker.plain, side, management) for side in sides]
        return operate.Redrive(
            tuple(parked for redriven in done for parked in redriven.parked),
            tuple(reason for redriven in done for reason in redriven.reasons),
        )

    def _act(self, request: Request, action: Action) -> None:
        """Do the action, and log the user and the action before and after it.

        It logs warnings, because a site that mounts the pages may not keep lower levels.
        """
        by, said = plain(who(request)), plain(action.said)
        what = f"{action.kind} {action.count:,} ({said})"
        logger.warning("%s: %s", by, what)
        ids = list(action.chosen.dues) if action.chosen else []
        for start in range(0, len(ids), _TO_A_LINE):
            listed = " ".join(map(plain, ids[start : start + _TO_A_LINE]))
            logger.warning("%s: %s of %s", by, action.kind, listed)
        began = time.monotonic()
        try:
            action.result = self._done(action)
        except FAILURES as exc:
            action.error = str(exc) or type(exc).__name__
            logger.error("%s: %s failed: %s", by, what, plain(action.error))  # noqa: TRY400 - its words say it
            return
        except Exception:
            # Else its page would show it as one that has not ended.
            action.error = "the log of this program says why"
            logger.exception("%s: %s failed", by, what)
            return
        logger.warning("%s: %s done: %s", by, what, action.result)
        # The list must soon leave them out, or show their new times.
        self._tasks_read(2.0, since=began)
        self._reader.get("now", self._watch.now, _NOW, since=began)

    def _done(self, action: Action) -> str:
        if action.chosen is not None:
            with named(self._broker), self._broker.delaying() as connection:
                done = operate.amend(connection, action.kind, action.chosen, action.due)
            word = "cancelled" if action.kind == CANCEL else "rescheduled"
            count = plural(len(done.ids) - action.unmoved, "task")
            moved = f"{count} {word}, as far as they still wait: the broker has recorded it."
            return f"{moved} {action.kept}." if action.kept else moved
        redriven = self._redrive()
        sent, stays = redriven.sent, redriven.stays
        words = [f"{sent:,} sent on, {stays:,} still parked", *redriven.reasons]
        if (unseen := action.count - sent - stays) > 0:
            words.append(f"{unseen:,} are not there any more, or another program is reading them")
        if any("--to" in reason for reason in redriven.reasons):
            words.append("These options are those of kombu-binary-delay redrive")
        return f"{'. '.join(words)}."

    # --- what all share ---------------------------------------------------------------

    def _show(
        self, request: Request, template: str, words: Mapping[str, Any], status: int = 200
    ) -> Response:
        page = self._templates.get_template(f"{template}.html").render(
            base=request.scope.get("root_path", ""),
            path=request.url.path,
            user=user_of(request),
            allow=self._allow,
            field=FIELD,
            token=self._tokens.of(request) if self._allow else "",
            **{**_UNFILLED, **words},
        )
        response = HTMLResponse(page, status)
        if self._allow:
            self._tokens.remember(request, response)
        return response

    @staticmethod
    def _at(request: Request, path: str) -> str:
        return f"{request.scope.get('root_path', '')}{path}"


def _expect(
    span: str,
    milliseconds: int,
    ladders: tuple[operate.LadderStatus, ...],
    table: operate.TaskTable | None,
) -> Forecast:
    exact = None
    if table is not None:
        now = _now()
        exact = table.count(operate.Selection(after=now, before=now + milliseconds))
    both = [ladder.within(milliseconds) for ladder in ladders]
    surely, probably = sum(least for least, _ in both), sum(likely for _, likely in both)
    return Forecast(span, milliseconds, exact, surely, probably)


def _troubles(now: Now, findings: Collection[operate.Verification]) -> list[str]:
    """Return the troubles that the page shows neither as an alarm nor as a finding."""
    shown = [
        f"{difference.what}: {difference.found}"
        for verification in findings
        for difference in verification.differences
    ]
    return [
        trouble
        for trouble in now.status.troubles
        if trouble not in now.alarms and not any(words in trouble for words in shown)
    ]


def _asked(words: Mapping[str, str]) -> Asked:
    """Return the request in the form of the tasks."""
    kept = {name: words.get(name, "").strip() for name in (*_SEARCHED, "zone")}
    times: dict[str, int | None] = {}
    errors: dict[str, str] = {}
    for name in ("after", "before"):
        try:
            times[name] = _moment(kept[name], kept["zone"])
        except ValueError as exc:
            errors[name] = str(exc)
    for name in ("name", "arguments", "queue", "id"):
        if len(kept[name]) > _LONGEST or kept[name].count("*") > _STARS:
            errors[name] = f"no more than {_LONGEST} characters, and {_STARS} of them *"
            kept[name] = kept[name][:_LONGEST]
    select = operate.Selection(
        kept["name"] or None,
        kept["queue"] or None,
        # What is due already leaves the ladder.
        after=max(times.get("after") or 0, _now()),
        before=times.get("before"),
        id_begins=kept["id"],
        arguments=kept["arguments"] or None,
        loose=True,
    )
    return Asked(kept, select, min(_number(words.get("page")) or 0, 10**6), errors)


def _moment(text: str, zone: str) -> int | None:
    """Return a time in milliseconds since the epoch; None for an empty text.

    :param zone: the time zone of the browser, which shows times in it.
    :raises ValueError: for an invalid time, or one without a zone if that of the browser is not
        known.
    """
    text = text.strip()
    if not text:
        return None
    try:
        own = ZoneInfo(zone) if zone else None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        own = None
    return moment_of(text, time.time() * 1000, zone=own)


def _now() -> int:
    return time.time_ns() // 1_000_000


def _first(form: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: values[0] for name, values in form.items()}


def _shown(task: operate.WaitingTask) -> operate.WaitingTask:
    """Return a task without an id that no link can name, such as one with half a character."""
    try:
        (task.id or "").encode()
    except UnicodeEncodeError:
        return replace(task, id=None)
    return task


def _number(text: str | None) -> int | None:
    """Return a whole number that SQLite can hold; None for any other text."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 15:
        return None
    return int(text)


def _unmoved(tasks: Iterable[operate.WaitingTask], due: int) -> int:
    """Return how many tasks with an id are first due after a time."""
    return len({task.id for task in tasks if task.id and (task.first_due or task.due) > due})
