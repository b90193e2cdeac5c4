"""The house rules as tests: style, types, import contract, documentation, and what a wheel holds.

What runs here for `lint` and `docs` is read from tox.ini, so that both check the same.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]


def tox_commands(env: str) -> list[str]:
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    return tox[f"testenv:{env}"]["commands"].strip().splitlines()


def run(command: str, cwd: Path = ROOT) -> None:
    # The tools of this virtual environment, also where it was not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        shlex.split(command),
        cwd=cwd,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"


@pytest.mark.slow
@pytest.mark.parametrize("command", tox_commands("lint"))
def test_style_types_and_imports_are_clean(command: str) -> None:
    run(command)


@pytest.mark.slow
@pytest.mark.parametrize("command", tox_commands("docs"))
def test_the_documentation_builds_without_a_warning(command: str, tmp_path: Path) -> None:
    run(command.format(env_tmp_dir=tmp_path, **{"/": os.sep}))


@pytest.mark.slow
def test_a_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    # A copy, because setuptools also packs what an earlier build left in build/.
    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist"),
    )
    package = source / "kombu_binary_delay"
    run(f"pip wheel --no-build-isolation --no-deps --no-index --wheel-dir {tmp_path} .", source)
    [wheel] = tmp_path.glob("*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    written = {path for path in package.rglob("*") if path.suffix == ".py"}
    written.add(package / "py.typed")
    assert packed == {path.relative_to(source).as_posix() for path in written}
