"""What a wheel holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]


def copy_if_there(source: str, target: str) -> None:
    """Copy a file, unless another test has just removed it."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


def test_a_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    # A copy, because setuptools also packs what an earlier build left in build/.
    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        # What other tests and builds write and remove meanwhile is not there.
        ignore=shutil.ignore_patterns(
            *(".*", "__pycache__", "*.egg-info", "build", "dist", "_build", "htmlcov")
        ),
        copy_function=copy_if_there,
    )
    package = source / "kombu_binary_delay"
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*pip, "--wheel-dir", tmp_path, "."],
        cwd=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    [wheel] = tmp_path.glob("*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    written = {path for path in package.rglob("*") if path.suffix == ".py"}
    written.add(package / "py.typed")
    written.update((package / "export" / "templates").iterdir())
    for part in ("spark", "web"):
        written.update((package / part).glob("templates/*.html"))
    written.update((package / "web" / "static").iterdir())
    assert packed == {path.relative_to(source).as_posix() for path in written}
