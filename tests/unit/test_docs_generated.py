"""What a code host shows of README and docs: plain Markdown, with figures that are current."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from dev.faults.scenarios import CASES
from docs.generate.__main__ import ROOT, pages
from docs.generate.benchmarks import RESULTS, figure
from docs.generate.faults import runs
from docs.generate.pages import fill

FIGURES = sorted(path for path in (ROOT / "docs").glob("**/*.svg") if "_build" not in path.parts)
PAGES = [page.relative_to(ROOT).as_posix() for page in pages()]
#: The scenarios in which something is killed, stopped, frozen or cut; the ladder is whole.
KILLED = (
    *("broker killed", "publisher ends", "consumer ends", "Celery worker ends"),
    *("cluster of three", "connection cut"),
)
#: Those that code hosts highlight as what they are.
LANGUAGES = {
    "console",
    "erlang",
    "ini",
    "json",
    "pycon",
    "python",
    "sh",
    "sql",
    "text",
    "yaml",
}


def test_what_is_committed_is_what_the_command_writes():
    # In a process of its own: Celery changes the command that it takes over, for its `-h`.
    check = [sys.executable, "-m", "docs.generate", "--check"]
    ended = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)

    stale = ended.stdout.split() or [ended.stderr]
    assert ended.returncode == 0, f"run `python -m docs.generate`, for {', '.join(stale)}"


@pytest.mark.parametrize("name", RESULTS)
def test_a_published_figure_is_of_a_recorded_run_of_a_commit(name):
    commit = RESULTS[name]["machine"]["commit"]
    assert re.fullmatch(r"[0-9a-f]{7,}", commit), f"{name} is of {commit}: measure it again"


def test_each_fault_is_recorded_and_names_its_commit():
    rows = runs()

    unknown = [row for row in rows if not re.fullmatch(r"[0-9a-f]{7,}", row.get("commit", ""))]
    assert not unknown
    recorded = {(row["scenario"], row["case"]) for row in rows}
    assert recorded == {(case.scenario, case.name) for case in CASES}


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_a_figure_needs_nothing_but_itself(path):
    ET.fromstring(path.read_text())  # noqa: S314 - our own
    # Neither variables of a page nor anything fetched: a code host shows it as an image.
    assert not re.search(r"var\(|@import|href=|<script|<foreignObject", path.read_text())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_nothing_that_only_sphinx_understands(page):
    text = re.sub(r"<!--.*?-->", "", (ROOT / page).read_text(), flags=re.DOTALL)

    for fence in re.findall(r"^```+(.+)$", text, re.MULTILINE):
        assert fence in LANGUAGES, f"a code host shows this as it stands: {fence}"
    for pattern in (r"^:::", r"\{[a-z:]+\}`", r"^\.\. \w+::", r"^:\w[\w-]*:"):
        assert not re.search(pattern, text, re.MULTILINE), f"a code host shows it raw: {pattern}"


def part(name):
    return f"before\n\n<!-- generated: {name} -->\nold\n<!-- end -->\n\nafter\n"


def test_only_a_generated_part_of_a_page_is_replaced():
    page = fill(part("sum 1, 2"), {"sum": lambda arguments, before: f"{before}{arguments}"})

    assert page == (
        "before\n\n<!-- generated: sum 1, 2 -->\n\nbefore\n\n['1, 2']\n\n<!-- end -->\n\nafter\n"
    ).replace("'1, 2'", "'1', '2'")


def test_a_part_that_nothing_makes_is_an_error():
    with pytest.raises(ValueError, match="nothing makes 'tables'"):
        fill(part("tables"), {})


def test_a_part_without_an_end_is_an_error():
    with pytest.raises(ValueError, match="has no line"):
        fill("<!-- generated: cli -->\n", {"cli": lambda *_: ""})


def headlines():
    """Return the figures that README begins with, as it has them, from the recorded runs."""
    figures = []
    for run in ("burst", "burst-on-4.3"):
        ours, native = (figure(run, row, "p99") for row in ("ours", "celery-native"))
        share = 100 * figure(run, "ours", "cpu_us", "ratio")
        figures += [f"{share:.0f} %", f"{ours:.0f} ms", f"{native / 1000:.0f} s"]
    killed = [row for row in runs() if row["scenario"] in KILLED]
    lost, early, confirmed = (
        sum(row[column] for row in killed) for column in ("lost", "early", "confirmed")
    )
    return [*figures, f"{lost} lost and {early} early", f"{confirmed:,} confirmed"]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_headline_figures_are_those_of_the_recorded_runs(page):
    words = re.sub(r"[\s*]+", " ", (ROOT / page).read_text())

    assert [headline for headline in headlines() if headline not in words] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_a_link_from_outside_of_the_site_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text()):
        path, _, anchor = target.partition("#")
        linked = ROOT / (path or page)
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, target


def test_a_reader_of_the_readme_can_follow_links_to_every_page():
    to_read, reached = [ROOT / "README.md"], set()
    while to_read:
        page = to_read.pop()
        reached.add(page)
        # What a code host shows as a link: neither in a comment nor in code.
        shown = re.sub(
            r"<!--.*?-->|^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        links = re.findall(r"\]\((?!https?:)([^)#\s]+\.md)", shown)
        to_read += {(page.parent / link).resolve() for link in links} - reached

    assert {page for page in pages() if page.is_relative_to(ROOT / "docs")} <= reached
