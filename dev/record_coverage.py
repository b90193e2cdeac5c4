"""Purpose: report what the last `make test` has covered of the mechanism, and record it.

    python -m dev.record_coverage

It writes each line with its colour into htmlcov/, and the figures, file by file, into
docs/reference/coverage.json, to be committed before a release.
"""

from __future__ import annotations

import json
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from coverage import Coverage

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "reference" / "coverage.json"


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Reduce what `coverage json` writes to a record of a few figures.

    A per cent is of lines and branches together, with one decimal, rounded down.
    """

    def figures(counted: dict[str, Any]) -> dict[str, Any]:
        return {
            "lines": counted["num_statements"],
            "branches": counted["num_branches"],
            "percent": int(counted["percent_covered"] * 10) / 10,
        }

    measured = datetime.fromisoformat(report["meta"]["timestamp"])
    return {
        "date": f"{measured:%Y-%m-%d}",
        "coverage": report["meta"]["version"],
        "python": ".".join(map(str, sys.version_info[:2])),
        "total": figures(report["totals"]),
        "files": {
            name.removeprefix("kombu_binary_delay/"): figures(file["summary"])
            for name, file in sorted(report["files"].items())
            if file["summary"]["num_statements"]
        },
    }


def main() -> int:
    """Write both; 1 if there is nothing to report."""
    measured = Coverage(config_file=str(ROOT / "pyproject.toml"))
    if not Path(measured.config.data_file).exists():
        print("coverage: nothing is measured yet: run `make test` first", file=sys.stderr)
        return 1
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        measured.json_report(outfile=str(report))
        record = summary(json.loads(report.read_text()))
    measured.html_report(directory=str(ROOT / "htmlcov"))
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    total = record["total"]
    print(f"{total['percent']} % of {total['lines']} lines and {total['branches']} branches")
    print(f"htmlcov/index.html shows which; recorded in {RECORD.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
