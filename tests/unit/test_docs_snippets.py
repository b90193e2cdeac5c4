"""What pages show besides Python can be parsed: commands, YAML, JSON. No broker is needed.

Python is run by tests/broker/test_docs.py, and so is what asks a broker and changes nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from kombu_binary_delay.cli import binary_delay

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
TOOL = re.compile(r"(?:kombu-binary-delay|celery -A \S+ binary-delay)\s")
#: Where one command ends, and the shell goes on with another, or with a file.
END = re.compile(r"\s(?:\||&&|>>?|#)\s|\s(?:&&|\|)$")


def blocks(*languages):
    return [
        (path.relative_to(ROOT).as_posix(), block[2])
        for path in PAGES
        for block in BLOCK.finditer(path.read_text())
        if block[1] in languages
    ]


def commands():
    """Return each command that a reader is shown, with its page."""
    shown = []
    for page, text in blocks("console", "sh", "bash", "text"):
        joined = re.sub(r"\\\n>?\s*", "", text)
        shown += [
            (page, END.split(line.removeprefix("$ "))[0].strip())
            for line in joined.splitlines()
            if line.startswith(("$ ", "kombu-binary-delay spark "))
        ]
    return shown


def submitted():
    """Return what a reader is shown to submit to Spark, as commands of the tool."""
    texts = {page: re.sub(r"\\\n\s*", "", text) for page, text in blocks("text")}
    submits = re.compile(
        r"^spark-submit .*main(?:__)?\.py (.*)|^SPARK_REMOTE=\S+ (.*)", re.MULTILINE
    )
    return [
        (page, f"kombu-binary-delay spark {submit[1]}" if submit[1] else submit[2])
        for page, text in texts.items()
        for submit in submits.finditer(text)
    ]


def parse(command, arguments, parent=None):
    """Read a command line as the tool does, without doing it."""
    with command.make_context(command.name, arguments, parent=parent) as context:
        if isinstance(command, click.Group):
            rest = [*getattr(context, "_protected_args", ()), *context.args]
            _, subcommand, rest = command.resolve_command(context, rest)
            parse(subcommand, rest, context)


@pytest.mark.parametrize(
    ("page", "line"),
    [
        (page, line)
        for page, line in dict.fromkeys([*commands(), *submitted()])
        if TOOL.match(f"{line} ")
    ],
)
def test_the_tool_takes_what_a_page_gives_it(page, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    # Celery's own options come before.
    words = words[4:] if words[0] == "celery" else words[1:]
    for name in ("reminders.parquet", "receipts", "journal", "audit"):
        (tmp_path / name).mkdir()
    for name in ("ids.txt", "users.txt"):
        (tmp_path / name).touch()

    parse(binary_delay, words)


def test_what_explain_prints_is_what_the_page_shows():
    page = (ROOT / "docs" / "how-to" / "operate.md").read_text()
    shown = page.partition("$ celery -A shop binary-delay explain 10s --to orders\n")[2]
    shown = next(BLOCK.finditer(shown.partition("```\n")[2]))[2]

    printed = CliRunner().invoke(binary_delay, ["explain", "10s", "--to", "orders"])

    assert printed.exit_code == 0
    assert without_time(printed.output) == without_time(shown)


def without_time(text):
    """Leave out the line that says when the message is due."""
    return [line.rstrip() for line in text.splitlines() if not line.startswith("due ")]


def test_make_and_python_find_what_pages_name():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, line in commands():
        words = shlex.split(line)
        if words[0] == "make":
            assert words[1] in targets, f"{page}: {line}"
        elif words[0].endswith("python") and words[1] == "-m" and "." in words[2]:
            assert importlib.util.find_spec(words[2]), f"{page}: {line}"


def test_a_shell_can_read_every_command():
    for page, text in blocks("console", "sh", "bash"):
        lines = [line[2:] for line in text.splitlines() if line.startswith(("$ ", "> "))]
        script = "\n".join(lines)
        read = subprocess.run(
            ["/bin/bash", "-n"], input=script, text=True, capture_output=True, check=False
        )
        assert not read.stderr, f"{page}: {read.stderr}"


@pytest.mark.parametrize(("page", "text"), blocks("yaml", "yml"))
def test_yaml_can_be_read(page, text):
    assert list(yaml.safe_load_all(text))


@pytest.mark.parametrize(("page", "text"), blocks("json"))
def test_json_can_be_read(page, text):
    for line in [text] if text.startswith("{\n") else text.splitlines():
        json.loads(line)


#: It is run in a process of its own with the path of a DAG, and prints what Airflow makes of that.
BY_AIRFLOW = """
import json, sys
from airflow.dag_processing.dagbag import DagBag

bag = DagBag(sys.argv[1])
assert not bag.import_errors, bag.import_errors
found = {
    task.task_id: [task.bash_command, sorted(task.upstream_task_ids), dag.dag_id]
    for dag in bag.dags.values()
    for task in dag.tasks
}
most = [dag.max_active_runs for dag in bag.dags.values()]
print("found:", json.dumps([most, any(dag.catchup for dag in bag.dags.values()), found]))
"""
#: The same without Airflow, by doubles of the two classes that the DAG uses.
BY_DOUBLES = """
import json, runpy, sys
from types import ModuleType

found, most, names = {}, [], []

class DAG:
    def __init__(self, name, schedule, start_date, max_active_runs):
        names.append(name)
        most.append(max_active_runs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

class BashOperator:
    def __init__(self, task_id, bash_command, retries=0):
        self.name = task_id
        found[task_id] = [bash_command, [], names[-1]]

    def __rshift__(self, other):
        found[other.name][1].append(self.name)

for name in ("airflow", "airflow.sdk", "airflow.providers", "airflow.providers.standard",
             "airflow.providers.standard.operators", "airflow.providers.standard.operators.bash"):
    double = sys.modules[name] = ModuleType(name)
    double.DAG, double.BashOperator = DAG, BashOperator
runpy.run_path(sys.argv[1])
print("found:", json.dumps([most, False, found]))
"""


def test_the_dag_of_a_page_runs_its_commands_in_order_and_the_tool_takes_them(
    tmp_path, monkeypatch
):
    page = (ROOT / "docs" / "how-to" / "spark.md").read_text()
    [code] = re.findall(
        r"^<!-- file: dags/\S+ -->\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    file = tmp_path / "dag.py"
    file.write_text(code)
    script = BY_AIRFLOW if importlib.util.find_spec("airflow") else BY_DOUBLES
    airflow = {"AIRFLOW_HOME": str(tmp_path / "home"), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    env = {**os.environ, **airflow}
    words = [sys.executable, "-c", script, str(file)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [printed] = re.findall(r"^found: (.*)$", done.stdout, re.MULTILINE)
    most, catches_up, tasks = json.loads(printed)

    assert (most, catches_up) == ([1, 1], False)
    # The audit is of two days before, when nine o'clock of the day between is over everywhere.
    assert {name: (upstream, dag) for name, (_, upstream, dag) in tasks.items()} == {
        "publish": ([], "reminders"),
        "export": ([], "audit_reminders"),
        "audit": (["export"], "audit_reminders"),
    }
    monkeypatch.chdir(tmp_path)
    for command, *_ in tasks.values():
        line = command.replace("{{ ds }}", "2030-01-31")
        line = line.replace("{{ macros.ds_add(ds, -2) }}", "2030-01-29")
        assert "{{" not in line
        assert line.startswith("kombu-binary-delay spark ")
        parse(binary_delay, shlex.split(line)[1:])
