"""Purpose: what every recording names: the commit that ran, the day, and the processor."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """Return the ``processor``, the number of ``cores``, the ``commit`` and the ``date`` (UTC)."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _processor() -> str:
    """Name the processor, with its family and model: a host may call several the same."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if not said.keys() >= {"model name", "cpu family", "model"}:
        return said.get("model name", platform.machine())
    return f"{said['model name']} ({said['cpu family']}/{said['model']})"


def _commit() -> str:
    """Return the commit that is measured; results that this run has written do not change it."""
    git = ["git", "-C", str(Path(__file__).parents[1])]

    def said(*words: str) -> str:
        done = subprocess.run([*git, *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = said("status", "--porcelain", "--untracked-files=no", "--", ":!docs")
    return said("describe", "--always") + ("-dirty" if changed else "")
