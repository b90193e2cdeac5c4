"""The benchmark runs, section by section, and writes what it found. Nothing is said of speed."""

import json
from contextlib import nullcontext

import pytest

from benchmarks import __main__ as bench
from benchmarks.__main__ import main
from benchmarks.report import table

#: One of each kind; `make bench ARGS=--quick` runs all of them, which takes some minutes.
SAMPLE = [
    *("connecting", "publishing", "burst", "waiting", "worker"),
    *("amendments", "delivery", "herd-100000", "spark", "spark-tables"),
]
#: Those that count what was lost and early.
COUNTING = {"burst", "herd-100000"}


@pytest.mark.slow
@pytest.mark.parametrize("section", SAMPLE)
def test_a_section_of_the_benchmark_runs(section, own_broker, tmp_path, capsys, monkeypatch):
    # A broker of its own for each matters to the figures alone.
    monkeypatch.setattr(bench, "Broker", lambda _: nullcontext(own_broker))
    main(["--quick", "--only", section, "--into", str(tmp_path)])

    # Its name has the release, if that is not the usual one.
    (path,) = (tmp_path / "results").glob(f"{section}*.json")
    result = json.loads(path.read_text())
    assert result["machine"]["rabbitmq"]
    assert result["found"]
    for count in ("missing", "early"):
        counted = [row[count]["most"] for row in result["found"].values() if count in row]
        assert (bool(counted), any(counted)) == (section in COUNTING, False), count
    text = table(section, result)
    assert text.startswith("|  |")
    assert len(text.splitlines()) > 4
    assert text in capsys.readouterr().out


def test_an_unknown_section_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--quick", "--only", "speed"])
    assert "there is no speed" in capsys.readouterr().err
