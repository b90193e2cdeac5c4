"""The handler of each address. Handlers that read run in threads, and read through the reader."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any
from urllib.parse import urlencode

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
from kombu_binary_delay.operate.status import parked_by_side
from kombu_binary_delay.operate.text import plain
from kombu_binary_delay.operate.when import moment_of

from .drawing import environment
from .guard import FIELD, Tokens, asker, is_from_elsewhere, user_of, who
from .index import Filter, Index
from .looks import Broker, Now, Open, Watch, read_index, read_story
from .plans import Plan, Plans
from .reader import FAILURES, Look, Reader

logger = get_logger(__name__)

REDRIVE = "redrive"
#: Seconds for which a result is new enough.
_NOW, _FINDINGS, _TASKS, _STORY = 3.0, 60.0, 10.0, 3.0
#: Seconds that a page waits for a first result, so that it always loads soon.
_FIRST, _SOON = 0.4, 8.0
_PAGE = 50
_MOST = 100_000  # tasks that one action may amend
_BARS = 60
_QUEUES = 12
#: The limits of a search: more would keep this machine busy for too long.
_LONGEST, _STARS = 500, 5
_TO_A_LINE = 100  # ids in a line of the log

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


@dataclass(frozen=True)
class Asked:
    """The request for a page of tasks: the form's fields, and their values."""

    words: Mapping[str, str]
    which: Filter
    page: int = 0
    errors: Mapping[str, str] | None = None

    def query(self, **changed: Any) -> str:
        """Return the request as the query of a URL."""
        words = {name: value for name, value in self.words.items() if value}
        words |= {name: str(value) for name, value in changed.items()}
        return urlencode(words)

    def said(self) -> str:
        """Return the selection in words."""
        words = [f"{name} {value!r}" for name, value in self.words.items() if value]
        return ", ".join(words) or "all that wait"


class Pages:
    """The pages, with what they share: readers, tokens, and actions to be confirmed."""

    def __init__(
        self, broker: Broker, place: Open, *, allow_changes: bool, hide_arguments: bool
    ) -> None:
        self._broker = broker
        # Now, as invalid settings must be an error before the first request.
        self._declares = broker.settings.declare != "never"
        self._place = place
        self._allow = allow_changes
        self._hide = hide_arguments
        self._watch = Watch(broker)
        # Slow readings must not block the page that users look at most.
        self._reader = Reader("web-now", self._watch.close)
        self._tasks_reader = Reader("web-tasks")
        self._story_reader = Reader("web-story")
        self._templates = environment()
        self._tokens = Tokens()
        self._plans = Plans()
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
            own = {"Not Found": "There is no such page.", "Method Not Allowed": "Not done here."}
            words = own.get(exc.detail, exc.detail)
            return self._show(request, "failure", {"words": words}, exc.status_code)

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
        """Show the part of it that changes."""
        return self._show(request, "now_part", self._now(0.0))

    def forecast(self, request: Request) -> Response:
        """Return how many tasks are due in each part of a time, for the chart."""
        now = time.time_ns() // 1_000_000
        look = self._index(0.0)
        if look.value is None or look.error:
            return JSONResponse({"start": now, "end": now, "counts": [], "error": look.error})
        index: Index = look.value
        start, end = (_number(request.query_params.get(each)) for each in ("start", "end"))
        if end is None:
            end = max(index.last() or now, now + _MINUTE) + 1
        start = max(start or now, 0)
        end = max(end, start + _BARS)
        counts = index.histogram(start, end, _BARS)
        return JSONResponse({"start": start, "end": end, "counts": counts, "error": None})

    def _now(self, wait: float) -> dict[str, Any]:
        look = self._reader.get("now", self._watch.now, _NOW, wait)
        findings = self._reader.get("findings", self._watch.findings, _FINDINGS)
        tasks = self._index(0.0)
        # An old list is not what is due now.
        index: Index | None = None if tasks.error else tasks.value
        ladders = look.value.status.ladders if look.value else ()
        return {
            "look": look,
            "findings": findings,
            "troubles": _troubles(look.value, findings.value or ()) if look.value else (),
            "declares": self._declares,
            "tasks": tasks,
            "index": index,
            "forecast": [_expect(span, each, ladders, index) for span, each in SPANS],
            "waiting": sum(each.messages for each in ladders),
            "queues": index.by_queue(_QUEUES) if index else (),
        }

    # --- Tasks ----------------------------------------------------------------------

    def tasks(self, request: Request) -> Response:
        """Show the delayed tasks, with a search form."""
        return self._show(request, "tasks", self._tasks(request, _FIRST))

    def results(self, request: Request) -> Response:
        """Show the part of it that changes."""
        return self._show(request, "results", self._tasks(request, 0.0))

    def task(self, request: Request) -> Response:
        """Show one task's story."""
        task_id = request.query_params.get("id", "")
        if is_from_elsewhere(request):
            # Another site can make a browser ask for any number of them. A link from there shows
            # the page, which then asks by itself.
            look = self._story_reader.last(task_id)
        else:
            look = self._story_reader.get(
                task_id,
                lambda: read_story(self._place, self._broker, task_id, hide=self._hide),
                _STORY,
                _FIRST,
                by=asker(request),
            )
        template = "story" if "part" in request.query_params else "task"
        return self._show(request, template, {"task_id": task_id, "look": look, "hide": self._hide})

    def _index(self, wait: float, since: float | None = None) -> Look:
        return self._tasks_reader.get(
            "tasks", lambda: read_index(self._place, hide=self._hide), _TASKS, wait, since
        )

    def _tasks(self, request: Request, wait: float) -> dict[str, Any]:
        asked = _asked(request.query_params)
        look = self._index(wait)
        index: Index | None = look.value
        found: list[operate.WaitingTask] = []
        count = 0
        if index is not None and not asked.errors:
            count = index.count(asked.which)
            found = index.page(asked.which, _PAGE, asked.page * _PAGE)
        return {
            "look": look,
            "asked": asked,
            "found": found,
            "count": count,
            "first": asked.page * _PAGE + 1,
            "more": (asked.page + 1) * _PAGE < count,
            "hide": self._hide,
        }

    # --- acts -----------------------------------------------------------------------

    async def plan(self, request: Request) -> Response:
        """Count what an action would change, and keep it until it is confirmed."""
        form = await self._tokens.form(request)
        try:
            plan = await to_thread.run_sync(self._plan, request, form)
        except FAILURES as exc:
            raise HTTPException(502, f"The broker did not take part: {exc}.") from exc
        except ValueError as exc:
            raise HTTPException(400, f"{exc}.") from exc
        self._plans.add(plan)
        return RedirectResponse(self._at(request, f"/plan?key={plan.key}"), 303)

    def planned(self, request: Request) -> Response:
        """Show what an action would change, is changing or has changed."""
        plan = self._plan_of(request, request.query_params.get("key", ""))
        examples = list(plan.chosen.dues.items())[:10] if plan.chosen else []
        left = list(plan.left.items())[:10]
        words = {"plan": plan, "examples": examples, "left": left, "most": _QUEUES}
        return self._show(request, "plan", words)

    async def act(self, request: Request) -> Response:
        """Do the confirmed action, once."""
        form = await self._tokens.form(request)
        plan = self._plan_of(request, form.get("key", [""])[0])
        if self._plans.take(plan):
            await to_thread.run_sync(self._act, request, plan)
        return RedirectResponse(self._at(request, f"/plan?key={plan.key}"), 303)

    def _plan_of(self, request: Request, key: str) -> Plan:
        plan = self._plans.get(key, user_of(request))
        if plan is None:
            raise HTTPException(404, "This was not planned by you, or too long ago. Plan it anew.")
        return plan

    def _plan(self, request: Request, form: Mapping[str, list[str]]) -> Plan:
        """Return the plan of an action.

        :raises ValueError: for an invalid form.
        """
        user = user_of(request)
        words = {name: values[0] for name, values in form.items()}
        action = words.get("action", "")
        if action == REDRIVE:
            return self._plan_redrive(user)
        if action not in (CANCEL, RESCHEDULE):
            raise ValueError("This is no act")
        due = _moment(words.get("when", ""))
        if action == CANCEL and due is not None:
            raise ValueError("'Reschedule to' has a time: clear it to cancel, or press Reschedule")
        if action == RESCHEDULE and (due is None or due <= time.time() * 1000):
            raise ValueError("Say a time that is still to come, such as 2h")
        tasks, chosen, said = self._chosen(form, words)
        with self._broker.delaying() as connection:
            # This finds out now whether the broker supports it.
            planned = operate.amend(connection, action, chosen, due, dry_run=True)
        if planned.left and not planned.ids:
            raise ValueError(next(iter(planned.left.values())))
        chosen = replace(chosen, dues={each: chosen.dues[each] for each in planned.ids})
        tasks = [each for each in tasks if each.id in chosen.dues]
        queues = Counter(queue for _, queue in {(each.id, each.queue) for each in tasks})
        most = tuple(sorted(queues.items(), key=lambda each: (-each[1], each[0])))
        unmoved = 0 if due is None else _unmoved(tasks, due)
        plan = Plan(action, user, said, chosen, most, due, unmoved, left=planned.left)
        if unmoved and unmoved == plan.count:
            raise ValueError(f"{plan.kept}: say a later time")
        return plan

    def _chosen(
        self, form: Mapping[str, list[str]], words: Mapping[str, str]
    ) -> tuple[list[operate.WaitingTask], operate.Chosen, str]:
        """Return the waiting tasks of a form, what to amend, and the selection in words.

        :raises ValueError: for an invalid form, or if the tasks cannot be read now.
        """
        look = self._index(_SOON)
        index: Index | None = look.value
        if words.get("scope") == "all":
            asked = _asked(words)
            if look.error:
                raise ValueError(f"The tasks cannot be read now: {look.error}")
            if asked.errors or index is None:
                raise ValueError("The tasks are not read yet, or the search is not understood")
            if index.count(asked.which) > _MOST:
                raise ValueError(f"These are more than {_MOST:,} tasks: search for fewer")
            tasks = index.all_of(asked.which)
            return tasks, operate.choose(tasks), asked.said()
        ids = tuple(dict.fromkeys(form.get("chosen", [])))
        if not ids:
            raise ValueError("No task is chosen: mark some, or take all that were found")
        tasks = self._waiting(ids, index)
        known = operate.choose(tasks).dues
        # One that does not wait is amended as well, without a due time.
        chosen = operate.Chosen({each: known.get(each) for each in ids}, found=True)
        return tasks, chosen, "one by one"

    def _waiting(self, ids: Collection[str], index: Index | None) -> list[operate.WaitingTask]:
        """Return those of these tasks that wait.

        :raises ValueError: if the tasks cannot be read now.
        """
        found = index.by_ids(ids) if index else []
        if len({each.id for each in found}) < len(ids):
            # It may have been published since that was read.
            asked = time.time()
            look = self._index(_SOON, since=time.monotonic())
            if look.value is None or look.error or look.at - look.took < asked:
                why = look.error or "load the list again, and choose from that"
                raise ValueError(f"The tasks could not be read anew in time: {why}")
            found = look.value.by_ids(ids)
        return found

    def _plan_redrive(self, user: str) -> Plan:
        """Count what is parked; where it is to go is in the messages, and none is taken."""
        with self._broker.plain() as connection:
            management = self._broker.management(connection)
            sides = parked_by_side(connection, self._broker.topology())
            planned = [operate.parked(connection, side, management) for side in sides]
        return Plan(
            REDRIVE,
            user,
            "all that is parked",
            queues=tuple(queue for each in planned for queue in each.queues),
            reasons=tuple(reason for each in planned for reason in each.reasons),
        )

    def _redrive(self) -> operate.Redrive:
        """Redrive what is parked, in each parking queue of the namespace, as Now counts them."""
        # Meanwhile, another would not see the messages that this one has read.
        with self._redriving, self._broker.plain() as connection:
            management = self._broker.management(connection)
            sides = parked_by_side(connection, self._broker.topology())
            done = [operate.redrive(self._broker.plain, side, management) for side in sides]
        return operate.Redrive(
            tuple(parked for each in done for parked in each.parked),
            tuple(reason for each in done for reason in each.reasons),
        )

    def _act(self, request: Request, plan: Plan) -> None:
        """Do the action, and log the user and the action before and after it.

        It logs warnings, because a site that mounts the pages may not keep lower levels.
        """
        by, said = plain(who(request)), plain(plan.said)
        what = f"{plan.action} {plan.count:,} ({said})"
        logger.warning("%s: %s", by, what)
        ids = list(plan.chosen.dues) if plan.chosen else []
        for start in range(0, len(ids), _TO_A_LINE):
            listed = " ".join(map(plain, ids[start : start + _TO_A_LINE]))
            logger.warning("%s: %s of %s", by, plan.action, listed)
        began = time.monotonic()
        try:
            plan.result = self._done(plan)
        except FAILURES as exc:
            plan.error = str(exc) or type(exc).__name__
            logger.error("%s: %s failed: %s", by, what, plain(plan.error))  # noqa: TRY400 - its words say it
            return
        except Exception:
            # Else its page would show it as one that has not ended.
            plan.error = "the log of this program says why"
            logger.exception("%s: %s failed", by, what)
            return
        logger.warning("%s: %s done: %s", by, what, plan.result)
        # The list must soon leave them out, or show their new times.
        self._index(2.0, since=began)
        self._reader.get("now", self._watch.now, _NOW, since=began)

    def _done(self, plan: Plan) -> str:
        if plan.chosen is not None:
            with self._broker.delaying() as connection:
                done = operate.amend(connection, plan.action, plan.chosen, plan.due)
            word = "cancelled" if plan.action == CANCEL else "rescheduled"
            count = _tasks(len(done.ids) - plan.unmoved)
            moved = f"{count} {word}, as far as they still wait: the broker has recorded it."
            return f"{moved} {plan.kept}." if plan.kept else moved
        redriven = self._redrive()
        sent, stays = redriven.sent, redriven.stays
        words = [f"{sent:,} sent on, {stays:,} still parked", *redriven.reasons]
        if (unseen := plan.count - sent - stays) > 0:
            words.append(f"{unseen:,} are not there any more, or another program is reading them")
        if any("--to" in each for each in redriven.reasons):
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
            **words,
        )
        response = HTMLResponse(page, status)
        if self._allow:
            self._tokens.remember(request, response)
        return response

    @staticmethod
    def _at(request: Request, path: str) -> str:
        return f"{request.scope.get('root_path', '')}{path}"


def _expect(
    span: str, milliseconds: int, ladders: tuple[operate.LadderStatus, ...], index: Index | None
) -> Forecast:
    exact = None
    if index is not None:
        exact = index.count(Filter(before=time.time_ns() // 1_000_000 + milliseconds))
    both = [each.within(milliseconds) for each in ladders]
    surely, probably = sum(each[0] for each in both), sum(each[1] for each in both)
    return Forecast(span, milliseconds, exact, surely, probably)


def _troubles(now: Now, findings: Collection[operate.Verification]) -> list[str]:
    """Return the troubles that the page shows neither as an alarm nor as a finding."""
    shown = [f"{each.what}: {each.found}" for one in findings for each in one.differences]
    return [
        each
        for each in now.status.troubles
        if each not in now.alarms and not any(words in each for words in shown)
    ]


def _asked(words: Mapping[str, str]) -> Asked:
    """Return the request in the form of the tasks."""
    kept = {
        each: words.get(each, "").strip() for each in ("name", "queue", "id", "after", "before")
    }
    times: dict[str, int | None] = {}
    errors: dict[str, str] = {}
    for each in ("after", "before"):
        try:
            times[each] = _moment(kept[each])
        except ValueError as exc:
            errors[each] = str(exc)
    for each in ("name", "queue", "id"):
        if len(kept[each]) > _LONGEST or kept[each].count("*") > _STARS:
            errors[each] = f"no more than {_LONGEST} characters, and {_STARS} of them *"
            kept[each] = kept[each][:_LONGEST]
    which = Filter(kept["name"], kept["queue"], kept["id"], times.get("after"), times.get("before"))
    return Asked(kept, which, min(_number(words.get("page")) or 0, 10**6), errors)


def _moment(text: str) -> int | None:
    """Return a time in milliseconds since the epoch; None for an empty text.

    :raises ValueError: for an invalid time, or one without a zone: a page shows times in that of
        its reader.
    """
    text = text.strip()
    return moment_of(text, time.time() * 1000, zone=None) if text else None


def _number(text: str | None) -> int | None:
    """Return a whole number that SQLite can hold; None for any other text."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 15:
        return None
    return int(text)


def _unmoved(tasks: Iterable[operate.WaitingTask], due: int) -> int:
    """Return how many tasks with an id are first due after a time."""
    return len({each.id for each in tasks if each.id and (each.first_due or each.due) > due})


def _tasks(count: int) -> str:
    return f"{count:,} task" + ("s" if count != 1 else "")
