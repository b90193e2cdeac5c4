"""Every file that names the supported versions names the same ones, those that tox crosses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from docs.generate.__main__ import pages

ROOT = Path(__file__).parents[2]
VERSION = r"\d+\.\d+"


def read(name: str) -> str:
    return (ROOT / name).read_text()


def crossed(*names: str) -> list[list[str]]:
    """Read a line of environments: of ``py{311,312}-celery{54}``, 3.11 and 3.12, and 5.4."""
    line = "-".join(rf"{name}\{{([\d,]+)\}}" for name in names)
    [groups] = re.findall(rf"^ *{line}$", read("tox.ini"), re.MULTILINE)
    return [[f"{version[0]}.{version[1:]}" for version in group.split(",")] for group in groups]


PYTHONS, CELERIES = crossed("py", "celery")
ENDS, CELERIES_THERE, RABBITMQS = crossed("py", "celery", "rabbitmq")
PYTHONS_THERE, SPARKS = crossed("py", "spark")


@pytest.mark.parametrize(
    ("name", "pattern", "versions"),
    [
        ("pyproject.toml", r'"Programming Language :: Python :: (3\.\d+)"', PYTHONS),
        ("pyproject.toml", r'^requires-python = ">=(.+)"', PYTHONS[:1]),
        ("pyproject.toml", r'^dependencies = \["kombu>=([\d.]+)"', CELERIES[:1]),
        ("tox.ini", r"--python-version (\S+)", PYTHONS[:1]),
        ("compose.yaml", r"image: rabbitmq:([\d.]+)-management$", RABBITMQS),
        ("compose.yaml", r"^  rabbitmq-([\d.]+):$", RABBITMQS),
        ("dev/unpack.sh", rf"\b[a-z]+ ({VERSION})(?=[,\n])", RABBITMQS),
        ("CONTRIBUTING.md", rf"^\| `make test-on-\w+` \| ({VERSION}) \|", RABBITMQS),
    ],
)
def test_a_list_of_versions_is_that_of_tox(name, pattern, versions):
    assert re.findall(pattern, read(name), re.MULTILINE) == versions


def test_tox_itself_knows_every_version_that_it_crosses():
    assert [PYTHONS[0], PYTHONS[-1]] == ENDS
    assert CELERIES_THERE == CELERIES
    # The newest Celery is pinned by the lock, the others by their number.
    pinned = [celery for celery in CELERIES if f": celery=={celery}.*" in read("tox.ini")]
    assert pinned == CELERIES[:-1]
    for package in ("celery", "kombu"):
        assert f"\n{package}=={CELERIES[-1]}." in read("constraints.txt")


def test_celery_is_asked_for_from_the_oldest_on():
    assert {*re.findall(r'"celery>=([\d.]+)"', read("pyproject.toml"))} == {CELERIES[0]}


def test_pyspark_is_asked_for_from_the_oldest_on_and_the_newest_is_pinned():
    asked = re.findall(r'"pyspark>=([\d.]+),<5"', read("pyproject.toml"))
    assert {*asked} == {SPARKS[0]}
    pinned = [spark for spark in SPARKS if f": pyspark=={spark}.*" in read("tox.ini")]
    assert pinned == SPARKS[:-1]
    assert f"\npyspark=={SPARKS[-1]}." in read("constraints.txt")
    # A line for each on the page, with what it has.
    section = read("docs/reference/compatibility.md").partition("\n## PySpark\n")[2]
    assert re.findall(rf"^\| ({VERSION})\.\d+ \|", section, re.MULTILINE) == SPARKS


def test_the_workflow_runs_what_tox_crosses():
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]

    # Text, since RabbitMQ 3.10 as a number is 3.1.
    assert jobs["matrix"]["strategy"]["matrix"] == {"python": PYTHONS, "celery": CELERIES}
    assert jobs["rabbitmq"]["strategy"]["matrix"] == {
        "python": ENDS,
        "celery": CELERIES,
        "rabbitmq": RABBITMQS,
    }
    assert jobs["spark"]["strategy"]["matrix"] == {"python": PYTHONS_THERE, "spark": SPARKS}
    assert {"run": ".ci/run"} in jobs["test"]["steps"]


@pytest.mark.parametrize(
    ("row", "supported", "tested"),
    [
        ("Python", ", ".join(PYTHONS), []),
        ("Celery, and Kombu of the same number", ", ".join(CELERIES), []),
        ("RabbitMQ", f"{RABBITMQS[0]} to {RABBITMQS[-1]}", RABBITMQS),
        ("PySpark, for the pipeline", f"{SPARKS[0]} to {SPARKS[-1]}", SPARKS),
    ],
)
def test_the_support_page_names_them(row, supported, tested):
    lines = re.findall(rf"^\| {row} \| (.+) \|$", read("docs/reference/support.md"), re.MULTILINE)

    assert lines[0].split(" | ")[0] == supported
    for version in tested:
        assert version in lines[0].split(" | ")[-1]


@pytest.mark.parametrize(
    ("product", "versions"), [("Python", PYTHONS), ("Celery", CELERIES), ("RabbitMQ", RABBITMQS)]
)
def test_where_a_page_names_the_whole_range_it_is_that_of_tox(product, versions):
    said = {
        range_
        for page in [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml"]
        for range_ in re.findall(rf"\b{product} ({versions[0]} to {VERSION})", page.read_text())
    }

    assert said <= {f"{versions[0]} to {versions[-1]}"}
