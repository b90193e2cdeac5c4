"""What pages show besides Python can be parsed: commands, YAML, JSON. No broker is needed.

Python is run by tests/broker/test_docs.py, and so is what asks a broker and changes nothing.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
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
    found = []
    for page, text in blocks("console", "sh", "bash", "text"):
        joined = re.sub(r"\\\n>?\s*", "", text)
        found += [
            (page, END.split(line.removeprefix("$ "))[0].strip())
            for line in joined.splitlines()
            if line.startswith(("$ ", "kombu-binary-delay spark "))
        ]
    return found


def parse(command, arguments, parent=None):
    """Read a command line as the tool does, without doing it."""
    with command.make_context(command.name, arguments, parent=parent) as context:
        if isinstance(command, click.Group):
            rest = [*getattr(context, "_protected_args", ()), *context.args]
            _, subcommand, rest = command.resolve_command(context, rest)
            parse(subcommand, rest, context)


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page, line in dict.fromkeys(commands()) if TOOL.match(f"{line} ")],
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
        lines = [each[2:] for each in text.splitlines() if each.startswith(("$ ", "> "))]
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
