"""RabbitMQ's configuration files, as they are written for each release."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.export.broker_config import ADVANCED, CONF, SETTINGS, broker_config

SINCE_3_10 = {
    "dead_letter_worker_consumer_prefetch": "128",
    "dead_letter_worker_publisher_confirm_timeout": "5000",
}
WAL = {"raft.wal_max_size_bytes": "67108864"}


def export(*arguments: str):
    return CliRunner().invoke(binary_delay, ["export", "broker-config", *arguments])


@pytest.mark.parametrize(
    ("release", "expected", "conf"),
    [
        ("3.10", SINCE_3_10, WAL),
        ("3.10.8", SINCE_3_10, WAL),
        ("4.0", SINCE_3_10, {}),
        ("4.3", SINCE_3_10, {}),
        ("5.0", SINCE_3_10, {}),
    ],
)
def test_only_what_is_recommended_for_a_release_is_written_for_it(release, expected, conf):
    files = broker_config(release)
    assert set(files) == {CONF, ADVANCED}
    settings = [line for line in files[ADVANCED].splitlines() if "%%" not in line]
    assert dict(re.findall(r"\{(\w+), (\d+)\}", "\n".join(settings))) == expected
    lines = [line for line in files[CONF].splitlines() if line and not line.startswith("# ")]
    assert dict(line.split(" = ") for line in lines) == conf
    # An Erlang term: each bracket is closed, and a period ends it.
    text = "".join(settings)
    assert text.endswith("].")
    assert all(text.count(a) == text.count(b) for a, b in ("[]", "{}"))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_setting_says_beside_it_what_it_does_and_costs(setting):
    files = broker_config("3.10")
    lines = files[CONF if setting.conf else ADVANCED].splitlines()
    written = f"{setting.conf} = " if setting.conf else f"{{{setting.name},"
    (at,) = [number for number, line in enumerate(lines) if written in line]
    assert lines[at - 1].lstrip().startswith("# " if setting.conf else "%% ")
    assert "Costs " in setting.does
    assert "default" in setting.does


def test_the_files_are_written_into_a_folder_and_never_over_others(tmp_path):
    folder = tmp_path / "rabbitmq"
    done = export("--rabbitmq", "3.10", "-o", str(folder))
    assert done.exit_code == 0, done.output
    assert {path.name: path.read_text() for path in folder.iterdir()} == broker_config("3.10")
    again = export("-o", str(folder))
    assert again.exit_code == 2
    assert "has rabbitmq.conf and advanced.config already" in again.output
    nowhere = export("-o", str(tmp_path / "no" / "where"))
    assert nowhere.exit_code == 2
    assert "No such file" in nowhere.output


def test_the_files_are_printed_with_their_names_or_as_json(tmp_path):
    printed = export().output
    for name, text in broker_config().items():
        assert f"==> {name} <==\n{text}" in printed
    files = json.loads(export("--json").output)["files"]
    assert files == broker_config()
    written = export("--json", "-o", str(tmp_path / "config.json"))
    assert (written.exit_code, written.output) == (0, "")
    assert json.loads((tmp_path / "config.json").read_text())["files"] == files
    into_a_folder = export("--json", "-o", str(tmp_path))
    assert into_a_folder.exit_code == 2
    assert "Is a directory" in into_a_folder.output


def test_what_is_no_release_is_an_error():
    refused = export("--rabbitmq", "newest")
    assert refused.exit_code == 2
    assert "'newest' is no release of RabbitMQ, such as 3.10" in refused.output
