"""Purpose: make a release, up to the upload.

    python -m dev.release prepare 0.1.0        write the version, and the changelog's heading
    python -m dev.release make 0.1.0 [--tag]   build and check what is committed; tag it if asked

`make release VERSION=0.1.0` is the second. It packs the commit that is checked out, installs the
wheel into an environment of its own, as a user would, with the newest Kombu and Celery, and there
runs both commands and sends a delayed message. The broker is a private one, or the one that the
environment names as for the tests. It uploads nothing: it prints the commands that would.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

from dev.broker import Broker, BrokerError
from dev.server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PROJECT, CHANGELOG = "pyproject.toml", "CHANGELOG.md"
UNRELEASED = "## [Unreleased]"
_VERSION = re.compile(r'^version = "(.*)"$', re.MULTILINE)
_SECTION = re.compile(r"^## \[(.+?)\](?: - (.+))?$", re.MULTILINE)


class ReleaseError(Exception):
    """The release cannot be made; the text says what to do."""


# --- the content of the files: pure ------------------------------------------------------


def sections(changelog: str) -> dict[str, tuple[str, str]]:
    """Return the date and the text of each section by version; "" if it has no date."""
    heads = list(_SECTION.finditer(changelog))
    ends = [*(head.start() for head in heads), len(changelog)][1:]
    return {
        head[1]: (head[2] or "", changelog[head.end() : end].strip())
        for head, end in zip(heads, ends, strict=True)
    }


def with_section(changelog: str, version: str, today: date) -> str:
    """Return the changelog with the unreleased changes under the heading of a version.

    :raises ReleaseError: if nothing is unreleased, or the version already has a section.
    """
    there = sections(changelog)
    if version in there:
        raise ReleaseError(f"{CHANGELOG} has a section {version} already")
    if not there.get("Unreleased", ("", ""))[1]:
        raise ReleaseError(f"{CHANGELOG} has nothing under '{UNRELEASED}'")
    heading = f"## [{version}] - {today:%Y-%m-%d}"
    return changelog.replace(f"{UNRELEASED}\n", f"{UNRELEASED}\n\n{heading}\n", 1)


def with_version(project: str, version: str) -> str:
    """Return pyproject.toml with another version.

    :raises ReleaseError: if it does not have exactly one.
    """
    text, count = _VERSION.subn(f'version = "{version}"', project)
    if count != 1:
        raise ReleaseError(f"{PROJECT} has {count} lines 'version = \"…\"', not one")
    return text


def disagreements(project: str, changelog: str, version: str) -> list[str]:
    """Return the reasons why these files are not ready for the release; none if they are."""
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        found.append(f"{version} is no version such as 0.1.0 or 0.1.0rc1")
    if (written := _VERSION.findall(project)) != [version]:
        found.append(f"{PROJECT} has the version {', '.join(written) or 'nothing'}, not {version}")
    there = sections(changelog)
    day, notes = there.get(version, ("", ""))
    if version not in there:
        found.append(f"{CHANGELOG} has no section '## [{version}] - DATE'")
    elif not _is_date(day):
        found.append(f"{CHANGELOG}: the section {version} has no date such as 2026-01-31")
    elif not notes:
        found.append(f"{CHANGELOG}: the section {version} is empty")
    if "Unreleased" not in there:
        found.append(f"{CHANGELOG} has no section '{UNRELEASED}' for what comes next")
    elif there["Unreleased"][1]:
        found.append(f"{CHANGELOG} has changes under '{UNRELEASED}' that the release would have")
    return found


def _is_date(text: str) -> bool:
    try:
        return datetime.strptime(text, "%Y-%m-%d").strftime("%Y-%m-%d") == text  # noqa: DTZ007 - a date has no zone
    except ValueError:
        return False


# --- the steps --------------------------------------------------------------------------


def prepare(version: str) -> None:
    """Write the version into pyproject.toml, and its heading into the changelog."""
    project, changelog = ROOT / PROJECT, ROOT / CHANGELOG
    texts = {
        changelog: with_section(changelog.read_text(), version, date.today()),  # noqa: DTZ011 - the day here
        project: with_version(project.read_text(), version),
    }
    for path, text in texts.items():
        path.write_text(text)
    say(f"wrote {PROJECT} and {CHANGELOG}. Read the notes, commit both, then make the release")


def make(version: str, *, tag: bool) -> None:
    """Build and check the release.

    :raises ReleaseError: at the first step that fails.
    """
    say(f"1. the files agree on {version}, and all is committed")
    problems = disagreements((ROOT / PROJECT).read_text(), (ROOT / CHANGELOG).read_text(), version)
    if changed := run("git", "status", "--porcelain", "--untracked-files=no"):
        problems.append(f"these are not committed:\n{changed}")
    if run("git", "tag", "--list", name_of_tag(version)):
        problems.append(f"there is a tag {name_of_tag(version)} already")
    if problems:
        raise ReleaseError("\n".join(problems))

    with tempfile.TemporaryDirectory(prefix="kbd-release-") as folder:
        say("2. build the source distribution, and the wheel from it")
        files = build(Path(folder, "source"), version)
        say("3. check them")
        twine = (sys.executable, "-m", "twine", "--no-color", "check", "--strict")
        print(run(*twine, *map(str, files)))
        [wheel] = (each for each in files if each.suffix == ".whl")
        check_wheel(wheel, version)
        say("4. install the wheel into a clean environment, and run both commands there")
        clean = install(wheel, Path(folder, "clean"), version)
        say("5. a delayed message, sent and received there")
        deliver(clean)
    if tag:
        say(f"6. tag {name_of_tag(version)}")
        notes = sections((ROOT / CHANGELOG).read_text())[version][1]
        # A line of Markdown may begin with #, which Git would take for a comment.
        message = f"{version}\n\n{notes}"
        run("git", "tag", "--annotate", "--cleanup=verbatim", "-m", message, name_of_tag(version))
    say("ready. Nothing has been uploaded. What is left to you:")
    if not tag:
        print(f"    git tag --annotate {name_of_tag(version)}     # or run this again with --tag")
    names = " ".join(str(each.relative_to(ROOT)) for each in files)
    print(f"    git push origin {name_of_tag(version)}")
    print(f"    .venv/bin/python -m twine upload {names}")


def name_of_tag(version: str) -> str:
    """Return the tag of a version."""
    return f"v{version}"


def build(source: Path, version: str) -> list[Path]:
    """Build both files of the commit, whatever else is in the folder; return them."""
    source.mkdir()
    archive = source.with_suffix(".tar")
    run("git", "archive", "--output", str(archive), "HEAD")
    shutil.unpack_archive(archive, source)
    built = source / "dist"
    run(sys.executable, "-m", "build", "--outdir", str(built), str(source))
    names = sorted(each.name for each in built.iterdir())
    stem = f"kombu_binary_delay-{version}"
    if names != [f"{stem}-py3-none-any.whl", f"{stem}.tar.gz"]:
        raise ReleaseError(f"built {', '.join(names)}: that is not {version}")
    DIST.mkdir(exist_ok=True)
    for name in names:
        print(f"    dist/{name}")
    return [Path(shutil.copy(built / name, DIST / name)) for name in names]


def check_wheel(wheel: Path, version: str) -> None:
    """Check the wheel's metadata.

    :raises ReleaseError: if it has another version or no licence.
    """
    with ZipFile(wheel) as packed:
        [name] = (each for each in packed.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = packed.read(name).decode()
    for line in (f"Version: {version}", "License-Expression: MIT", "License-File: LICENSE"):
        if f"\n{line}\n" not in metadata:
            raise ReleaseError(f"the wheel's metadata has no line '{line}'")


def install(wheel: Path, folder: Path, version: str) -> Path:
    """Install the wheel with its command, beside Celery, and run its two commands.

    :returns: the new environment's Python.
    """
    run(sys.executable, "-m", "venv", str(folder))
    programs = folder / "bin"
    python = programs / "python"
    run(str(python), "-m", "pip", "install", "--quiet", f"{wheel}[cli]", "celery", cwd=folder)
    says = run(str(programs / "kombu-binary-delay"), "--version", cwd=folder)
    if says != f"kombu-binary-delay, version {version}":
        raise ReleaseError(f"kombu-binary-delay --version prints {says!r}")
    print(f"    {says}")
    for command in ("kombu-binary-delay --help", "celery binary-delay --help"):
        program, *arguments = command.split()
        usage = run(str(programs / program), *arguments, cwd=folder).splitlines()
        print(f"    {command}: {usage[0]} … {len(usage)} lines")
    versions = dict(
        line.split("==")
        for line in run(str(python), "-m", "pip", "list", "--format=freeze").splitlines()
    )
    print(f"    beside Kombu {versions['kombu']} and Celery {versions['celery']}")
    return python


def deliver(python: Path) -> None:
    """Send a delayed message with that Python, and check that it waited on a ladder.

    :raises ReleaseError: if it did not.
    """
    given = Server.from_environment(os.environ)
    with nullcontext(given) if given else Broker(os.environ.get("RABBITMQ_ROOT")) as server:
        vhost = server.vhost()
        try:
            script = str(ROOT / "dev" / "release_message.py")
            # -I: neither this folder nor PYTHONPATH.
            print("    " + run(str(python), "-I", script, vhost.url, cwd=python.parent))
            waits = [row["name"] for row in vhost.queues() if ".level-" in row["name"]]
        finally:
            vhost.delete()
        if not waits:
            raise ReleaseError("the message has passed no ladder")
        print(f"    RabbitMQ {server.version}, through a ladder of {len(waits)} queues")


def run(*argv: str, cwd: Path = ROOT) -> str:
    """Run a program and return what it printed.

    :raises ReleaseError: if it fails, with its message.
    """
    # The environment of this program must not reach the programs of a user.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"NO_COLOR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def say(text: str) -> None:
    """Print a separate line."""
    print(f"release: {text}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say; 1 if it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m dev.release")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("prepare").add_argument("version")
    maker = verbs.add_parser("make")
    maker.add_argument("version")
    maker.add_argument("--tag", action="store_true", help="tag the commit, after all checks")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.verb == "prepare":
            prepare(chosen.version)
        else:
            make(chosen.version, tag=chosen.tag)
    except (ReleaseError, BrokerError) as problem:
        print(f"release: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
