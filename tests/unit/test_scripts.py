"""The shell scripts behind `make`, in a copy where they find other programs and another system."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

DEV = Path(__file__).parents[2] / "dev"
#: Each program writes its name and arguments into `calls`, and then does as little as will do.
PROGRAMS = {
    "id": "echo ${ID:-0}",
    "sudo": 'case $1 in -n) exit 1 ;; *) exec "$@" ;; esac',
    "apt-get": """
        case $1 in install)
            case " $* " in *" openjdk-17-jre-headless "*) echo 17 >java-release ;; esac
            echo "apt says"
            exit ${APT:-0}
        esac""",
    "systemctl": "[ $1 != cat ] || [ $2 = epmd ]",
    "java": """echo 'openjdk version "'"$(cat java-release)"'.0.1" 2026-01-01' >&2""",
    "python3": """
        case "$*" in
        -VV) echo "Python 3.11.2" ;;
        "-c import ensurepip") exit ${ENSUREPIP:-0} ;;
        "-c import sys; print"*) echo python3.11-venv ;;
        "-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
        "-m pip --version") exit ${PIP:-0} ;;
        "-m pip install -qq --group"*) sleep ${SLOWLY:-0} && echo installed >>calls ;;
        esac""",
    "mmdebstrap": 'for last; do :; done; sleep 0.2; mkdir "$last"',
}


@pytest.fixture
def here(tmp_path):
    """A folder with copies of the scripts and what they read, and the programs."""
    for each in ("dev", "bin", "etc", "usr/lib/rabbitmq/bin", "usr/share/zoneinfo"):
        (tmp_path / each).mkdir(parents=True)
    for script in DEV.glob("*.sh"):
        # The system is in the folder, too; /bin/sh and /dev/null are the real ones.
        text = re.sub(r"(?<=[\s=])/(?=(usr|etc|run)/)", f"{tmp_path}/", script.read_text())
        copy = tmp_path / "dev" / script.name
        copy.write_text(text)
        copy.chmod(0o755)
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>calls\n{text}\n')
        program.chmod(0o755)
    for each in ("pyproject.toml", "constraints.txt", "setup.cfg", "usr/share/zoneinfo/UTC"):
        (tmp_path / each).touch()
    (tmp_path / "usr/lib/rabbitmq/bin/rabbitmq-server").touch()
    (tmp_path / "etc/os-release").write_text("ID=ubuntu\nVERSION_CODENAME=noble\n")
    (tmp_path / "java-release").write_text("17")
    return tmp_path


def run(here, script, *arguments, **env):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RABBITMQ")}
    kept |= {"PATH": f"{here / 'bin'}:{os.environ['PATH']}", "HOME": str(here)}
    for each in ("JAVA_HOME", "PYTHON", "XDG_CACHE_HOME"):
        kept.pop(each, None)
    return subprocess.run(
        [here / "dev" / script, *arguments],
        cwd=here,
        check=False,
        capture_output=True,
        text=True,
        env={**kept, **env},
    )


def calls(here):
    return (here / "calls").read_text().splitlines()


def asked_for(here):
    """Which packages are to be installed."""
    lines = [each for each in calls(here) if each.startswith("apt-get install")]
    return " ".join(lines).partition("recommends ")[2]


def make_venv(here, made_for):
    """Make a virtual environment; ``made_for`` is None if another tool has made it."""
    (here / ".venv/bin").mkdir(parents=True)
    (here / ".venv/of-mine").touch()
    shutil.copy(here / "bin/python3", here / ".venv/bin/python")
    if made_for is not None:
        (here / ".venv/made-for").write_text(made_for)


@pytest.mark.parametrize(
    ("group", "system", "env", "packages"),
    [
        ("demo", {}, {}, ""),
        ("demo", {"no server": True}, {}, "rabbitmq-server"),
        # It is for the tests; the demo starts a broker of its own.
        ("demo", {"no server": True}, {"RABBITMQ_URL": "amqp://"}, "rabbitmq-server"),
        ("demo", {"no server": True}, {"RABBITMQ_ROOT": "/x"}, ""),
        ("test", {"no server": True}, {"RABBITMQ_URL": "amqp://"}, "prometheus"),
        ("docs", {"no server": True}, {}, ""),
        ("pipeline", {"java": "17"}, {}, ""),
        ("pipeline", {"java": "1.8"}, {}, "default-jre-headless"),
        ("pipeline", {"java": "11"}, {}, "default-jre-headless"),
        ("pipeline", {"java": "11", "release": "jammy"}, {}, "openjdk-17-jre-headless"),
        ("docs", {}, {"ENSUREPIP": "1"}, "python3.11-venv"),
        ("docs", {"made for": "elsewhere"}, {"ENSUREPIP": "1"}, "python3.11-venv"),
    ],
)
def test_what_is_missing_is_installed_and_no_more(here, group, system, env, packages):
    if "no server" in system:
        (here / "usr/lib/rabbitmq/bin/rabbitmq-server").unlink()
    if "release" in system:
        (here / "etc/os-release").write_text(f"ID=ubuntu\nUBUNTU_CODENAME={system['release']}\n")
    if "made for" in system:
        make_venv(here, system["made for"])
    (here / "java-release").write_text(system.get("java", "17"))

    run(here, "install.sh", group, **env)

    assert asked_for(here) == packages


def test_what_is_installed_and_yet_not_found_is_named(here):
    (here / "java-release").write_text("11")

    done = run(here, "install.sh", "pipeline")

    assert done.returncode == 1
    assert "not found: default-jre-headless; see PATH and, for Java 17, JAVA_HOME" in done.stderr


@pytest.mark.parametrize("apt", ["0", "1"])
def test_no_service_comes_with_a_program_even_if_the_installation_fails(here, apt):
    """Given: the service epmd was there before."""
    (here / "run/systemd/system").mkdir(parents=True)
    (here / "java-release").write_text("11")
    (here / "etc/os-release").write_text("VERSION_CODENAME=jammy\n")

    done = run(here, "install.sh", "pipeline", APT=apt)

    assert (done.returncode, "apt says" in done.stderr) == (int(apt), apt == "1")
    assert [each.split()[-1] for each in calls(here) if "systemctl disable" in each] == [
        "rabbitmq-server",
        "prometheus",
        "epmd.socket",
    ]


@pytest.mark.parametrize("link", [False, True], ids=["folder", "link"])
def test_a_virtual_environment_of_yours_is_used_and_kept(here, link):
    make_venv(here, "another place" if link else None)
    if link:
        (here / ".venv").rename(here / "shared")
        (here / ".venv").symlink_to("shared")
    archive = here / ".venv/lib/python3.11/site-packages/pyspark/python/lib/pyspark.zip"
    archive.parent.mkdir(parents=True)
    archive.touch()
    (here / "usr/bin").mkdir()
    (here / "usr/bin/prometheus").touch()

    done = run(here, "install.sh", "test")

    assert done.returncode == 0, done.stderr
    assert "installed" in calls(here)
    make_clean(here)
    assert (here / ".venv/of-mine").exists()
    assert archive.exists()


def make_clean(here):
    makefile = DEV.parent / "Makefile"
    subprocess.run(["make", "-s", "-f", makefile, "clean"], cwd=here, check=True)  # noqa: S607


def make_link(venv):
    venv.symlink_to("nowhere")


@pytest.mark.parametrize("make", [Path.mkdir, make_link], ids=["empty folder", "dangling link"])
def test_what_is_no_virtual_environment_becomes_one_of_the_script(here, make):
    make(here / ".venv")

    done = run(here, "install.sh", "docs")

    assert done.returncode == 0, done.stderr
    assert (here / ".venv/made-for").read_text()
    make_clean(here)
    assert not (here / ".venv").exists()


@pytest.mark.parametrize("made_for", ["another place", ""], ids=["moved", "interrupted"])
def test_a_virtual_environment_that_the_script_has_made_is_made_anew_where_it_must(here, made_for):
    make_venv(here, made_for)

    first, second = (run(here, "install.sh", "docs") for _ in range(2))

    assert (first.returncode, second.returncode, second.stderr) == (0, 0, "")
    assert not (here / ".venv/of-mine").exists()
    assert calls(here).count("installed") == 1


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"PIP": "1"}, "no pip in .venv: run '.venv/bin/python -m ensurepip', or remove .venv"),
        ({"PYTHON": "python3.12"}, "the Python of .venv is not python3.12: remove .venv"),
    ],
)
def test_a_virtual_environment_of_yours_that_cannot_be_used_is_kept_and_named(here, env, said):
    make_venv(here, None)
    other = here / "bin/python3.12"
    other.write_text((here / "bin/python3").read_text().replace("3.11.2", "3.12.1"))
    other.chmod(0o755)

    done = run(here, "install.sh", "docs", **env)

    assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    assert (here / ".venv/of-mine").exists()


def two_at_once(here, *arguments, **env):
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run, here, *arguments, **env) for _ in range(2)]
        return [each.result() for each in runs]


def test_two_installations_at_once_do_it_one_after_the_other(here):
    done = two_at_once(here, "install.sh", "docs", SLOWLY="0.2")

    assert [each.returncode for each in done] == [0, 0]
    assert calls(here).count("installed") == 1


@pytest.mark.parametrize("status", [65, 127], ids=["no locks", "no flock"])
def test_without_locks_it_goes_on_and_waits_for_nobody(here, status):
    flock = here / "bin/flock"
    flock.write_text(f"#!/bin/sh\nexit {status}\n")
    flock.chmod(0o755)

    done = run(here, "install.sh", "docs")

    assert (done.returncode, "waits" in done.stderr) == (0, False), done.stderr


def test_two_at_once_unpack_a_broker_one_after_the_other(here):
    done = two_at_once(here, "unpack.sh", "trixie")

    folder = here / ".cache/kombu_binary_delay/brokers/trixie"
    assert [each.stdout for each in done] == [f"{folder}\n"] * 2
    assert folder.is_dir()
    assert len([each for each in calls(here) if each.startswith("mmdebstrap")]) == 1


def test_all_tests_begin_only_with_a_sudo_that_asks_for_no_password_in_the_background(here):
    done = run(here, "test.sh", "--all", ID="1000")

    assert (done.returncode, "be root, or have sudo that asks for no password" in done.stderr) == (
        1,
        True,
    )
    assert [each for each in calls(here) if "mmdebstrap" in each] == []
