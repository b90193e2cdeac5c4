"""Every block of Python in README and docs/ runs, page by page, each page in its own virtual host.

Blocks of a page share their names. One after a comment `<!-- file: NAME -->` is that file; `pycon`
is a doctest; a worker that a console block starts is started. Blocks in comments prepare what
readers need not see. What a page asks the tool, and the list of queues in the tutorial, are asked
for real, and compared with what the page shows where that is the same each time.
"""

from __future__ import annotations

import doctest
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
from celery import _state
from celery.backends.rpc import ResultConsumer
from click.testing import CliRunner
from kombu import Producer

from dev.processes import Processes
from dev.worker import Worker
from kombu_binary_delay.cli import binary_delay
from tests.waits import PATIENCE, despite_a_slow_start

ROOT = Path(__file__).parents[2]
URL = "amqp://guest:guest@localhost//"
BLOCK = re.compile(
    r"(?:^<!-- file: (?P<file>\S+) -->\n)?"
    r"^```(?P<language>python|pycon|console)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: A command of a console block, and what the page shows that it prints.
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
#: The tool's own, with what is asked of it.
TOOL = re.compile(
    r"(?:kombu-binary-delay(?: -A (?P<app>\S+))?|celery -A (?P<celery>\S+) binary-delay)"
    r" (?P<asked>.*)"
)
#: What needs nothing that the page has not made, and destroys nothing.
ASKED = ("check", "status", "verify", "create --dry-run", "explain 10s", "export")
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    if BLOCK.search(path.read_text())
]


#: It starts Java.
SLOW = ["docs/how-to/spark.md"]
#: Its files are those of a Django project, which nothing here installs: they are compiled only.
OF_DJANGO = ["docs/how-to/django-and-flower.md"]
#: Its commands are for a cluster of three; its output is of one.
OF_CLUSTERS = ["docs/how-to/runbook.md"]
SINCE_KOMBU_5_7 = ["docs/how-to/publish-many.md"]


@pytest.fixture(scope="module")
def radix():
    """The pages show the default ladder."""


@pytest.fixture
def apart(monkeypatch, tmp_path):
    """Let Python forget the page's files, and Celery its apps.

    A task of one app is, by default, one of all others.
    """
    before, others = _state.get_current_app(), set(_state._get_active_apps())  # noqa: SLF001
    shared = set(_state._on_app_finalizers)  # noqa: SLF001 - there is no other way to it
    monkeypatch.setattr(_state, "_on_app_finalizers", shared)
    yield
    for app in set(_state._get_active_apps()) - others:  # noqa: SLF001
        # Nothing else closes the connection of results; its virtual host is gone by now.
        if isinstance(consumer := getattr(app.backend, "result_consumer", None), ResultConsumer):
            consumer.on_after_fork()
    before.set_current()
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in PAGES]
)
@pytest.mark.usefixtures("apart")
def test_the_code_of_a_page_runs(page, topology, vhost, tmp_path, monkeypatch):
    if page in SINCE_KOMBU_5_7 and not hasattr(Producer, "batch"):
        pytest.skip("Kombu before 5.7 has no Producer.batch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    text = (ROOT / page).read_text()
    with Processes("docs") as processes:
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            file, language, code = block.group("file", "language", "code")
            code = code.replace(URL, vhost.url).replace("timeout=60", f"timeout={PATIENCE}")
            if file:
                Path(file).parent.mkdir(exist_ok=True)
                Path(file).write_text(code)
                compile(code, f"{page}: {file}", "exec")
            elif language == "python":
                # As many newlines before it as in the page, so that a traceback has the right line.
                block_of_page = compile("\n" * line + code, page, "exec")
                despite_a_slow_start(partial(exec, block_of_page, names))
            elif language == "pycon":
                run_session(code, names, page, line)
            else:
                run_console(code, page, vhost, processes, topology)


def run_console(code, page, vhost, processes, topology):
    """Start the worker that a block starts, and ask what it asks; leave out all other commands."""
    if page in (*OF_DJANGO, *OF_CLUSTERS):
        return
    for command, shown in COMMAND.findall(code):
        if app := re.match(r"celery -A (\S+) worker", command):
            Worker(processes, app[1], {"PYTHONPATH": str(Path.cwd())})
        elif command.startswith("rabbitmqctl list_queues") and topology.queue_type == "quorum":
            names = {line.split("\t")[0] for line in shown.splitlines()}
            assert names
            assert names <= {queue["name"] for queue in vhost.queues()}
        elif (tool := TOOL.match(command)) and tool["asked"].startswith(ASKED):
            ask(tool, shown, vhost)


def ask(tool, shown, vhost):
    """Run the tool, with the app if the page has it."""
    words = shlex.split(re.split(r" [|>&#]", tool["asked"])[0])
    app = tool["app"] or tool["celery"]
    if app and Path(f"{app}.py").exists():
        words = ["-A", app, *words]
    places = {
        "BINARY_DELAY_BROKER": vhost.url,
        "BINARY_DELAY_MANAGEMENT": vhost.broker.management_url,
    }
    result = CliRunner().invoke(binary_delay, words, env=places)
    # What looks may find something: a part that does not exist yet, or a message that comes late.
    looks = tool["asked"].startswith(("check", "status", "verify"))
    assert result.exit_code in ((0, 1) if looks else (0,)), result.output
    if "check" in words and shown and result.exit_code == 0:
        kinds = re.compile(r"^(?:ok|note) +(\S+)", re.MULTILINE)
        assert set(kinds.findall(shown)) == set(kinds.findall(result.output))


def run_session(code, names, page, line):
    session = doctest.DocTestParser().get_doctest(code, names, page, page, line)
    output: list[str] = []
    # The session goes on with the names of the page, not with a copy.
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(session, out=output.append, clear_globs=False)
    names.update(session.globs)
    assert not runner.failures, "".join(output)
