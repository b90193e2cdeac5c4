"""The notebook runs from its first cell to its last, in a kernel of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "examples" / "pipeline.ipynb"


@pytest.mark.slow
def test_the_notebook_goes_from_a_table_to_the_proof(vhost, tmp_path):
    # The kernel runs where the notebook is.
    notebook = Path(shutil.copy(NOTEBOOK, tmp_path))
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from nbclient.cli import main; main()"),
            *(str(notebook), "--timeout=600", f"--output={tmp_path / 'done.ipynb'}"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "RABBITMQ_URL": vhost.url,
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "done.ipynb").read_text())["cells"]
    said = "".join(
        "".join(output.get("text", ""))
        for cell in cells
        for output in cell.get("outputs", ())
        if output.get("name") == "stdout"
    )
    assert "300 published, 0 failed, 0 rejected" in said
    assert "300 executed" in said
    assert "300 tasks, passed: True" in said


def test_the_notebook_is_ten_cells_with_nothing_of_the_machine_that_ran_it():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 10
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
