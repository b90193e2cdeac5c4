"""Whatever goes wrong ends a subcommand with its exit code, and names are shown as they are."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import amqp
import click
import pytest
from click.testing import CliRunner
from kombu.exceptions import OperationalError

from kombu_binary_delay import errors
from kombu_binary_delay.cli import binary_delay
from kombu_binary_delay.cli.command import subcommand
from kombu_binary_delay.cli.connect import Target
from kombu_binary_delay.export.files import write_file
from kombu_binary_delay.operate import (
    Management,
    OperationError,
    RefusedError,
    UnreachableError,
    management,
)

NO_API = r"does not answer: [^;]*; enable it"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away, or mounts it")


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (RefusedError("why"), 3),
        (UnreachableError("why"), 4),
        (errors.UnconfirmedError("why"), 4),
        (amqp.NotFound("why"), 4),
        (UnicodeError("why"), 4),
        (OperationalError("why"), 4),
        (ConnectionError("why"), 4),
        (OperationError("why"), 2),
        (errors.TopologyError("why"), 2),
        (errors.SettingsError("why"), 2),
        (click.UsageError("why"), 2),
        (FileNotFoundError(errno.ENOENT, "why", "/no/file"), 2),
        (OSError(errno.ENOSPC, "why"), 2),
        (UnicodeEncodeError("ascii", "\u2192", 0, 1, "why"), 2),
        (UnicodeEncodeError("idna", "\xff", 0, 1, "why"), 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_exit_code_and_is_said_in_words_or_as_json(raised, code):
    @click.command()
    @subcommand
    def fail(target, printer):
        raise raised

    in_words, as_json = (
        CliRunner().invoke(fail, arguments, obj=Target()) for arguments in ([], ["--json"])
    )

    assert (in_words.exit_code, as_json.exit_code) == (code, code)
    assert "why" in in_words.output
    assert "why" in json.loads(as_json.output)["error"]
    assert ("no RabbitMQ" in in_words.output) <= (code == 4)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", NO_API),
        (b"what\r\n\r\n", NO_API),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", NO_API),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwhat", NO_API),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 101 + b"\r\n", NO_API),
        (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", "answered 503 to overview; it is over"),
        (None, "has given no answer to overview within 0.5 s; it is overloaded"),
    ],
    ids=["nothing", "no HTTP", "too little", "no JSON", "too many headers", "error", "late"],
)
def test_a_management_api_that_answers_nonsense_or_late_cannot_be_reached(
    answer, said, monkeypatch
):
    monkeypatch.setattr(management, "_TIMEOUT", 0.5 if answer is None else 70)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with suppress(OSError), server.accept()[0] as taken:
                taken.recv(9999)
                if answer is None:
                    over.wait()
                else:
                    taken.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        api = Management(f"http://127.0.0.1:{server.getsockname()[1]}", "/", "u", "p")

        with pytest.raises(UnreachableError, match=said):
            api.get("overview")
        over.set()
        thread.join()


@pytest.mark.parametrize(
    "name", [":a[/x]b", ":[red]foo", "[bold]", ":x:warning:y", "events:[link=x]k", "\\[a]"]
)
def test_names_are_shown_as_they_are(name):
    done = CliRunner().invoke(binary_delay, ["explain", "10s", "--to", name])

    assert done.exit_code == 0, done.output
    key = name.partition(":")[2] or name
    assert done.output.count(key) >= 2, done.output


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("explain 10s", 0, b"1010?1 s 000?125 ms"),
        ("explain 10s > /dev/full", 2, b"the output cannot be written: No space left on device"),
        ("export definitions --queue $'\\xff'", 2, b"'\\udcff' cannot be written in utf-8"),
    ],
)
def test_what_the_output_cannot_hold_is_no_fault_of_the_broker(words, code, said):
    shell = ["bash", "-c", f"{sys.executable} -m kombu_binary_delay.cli {words}"]
    done = subprocess.run(
        shell,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("export svg --queue a-name-that-is-longer-than-its-box", 0, ""),
        ("export definitions --queue $'\\xff'", 2, "'\\udcff' cannot be written in utf-8"),
        # The shell's limit stands for a full disk.
        ("export definitions", 2, "ladder: File too large"),
    ],
)
def test_a_file_is_written_in_utf_8_and_replaced_as_a_whole_or_not_at_all(
    tmp_path, words, code, said
):
    (tmp_path / "real").write_text("before")
    (tmp_path / "real").chmod(0o640)
    file = tmp_path / "ladder"
    file.symlink_to("real")
    limit = "ulimit -f 1; " if "large" in said else ""
    command = f"{limit}{sys.executable} -B -m kombu_binary_delay.cli {words} -o {file}"
    shell = ["bash", "-c", command]
    done = subprocess.run(
        shell,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )

    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    written = file.read_text("utf-8")
    assert (written == "before") == bool(code)
    assert code or "\N{HORIZONTAL ELLIPSIS}" in written
    assert file.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ladder", "real"]


def test_a_device_is_written_to_and_not_replaced():
    done = CliRunner().invoke(binary_delay, ["export", "definitions", "-o", "/dev/full"])

    assert (done.exit_code, "/dev/full: No space left on device" in done.output) == (2, True)
    assert Path("/dev/full").is_char_device()


def test_a_redirected_output_keeps_what_is_before_and_after(tmp_path):
    command = f"{sys.executable} -B -m kombu_binary_delay.cli export definitions -o /dev/stdout"
    shell = f"{{ echo before; {command}; echo after; }} >{tmp_path}/file"
    subprocess.run(["bash", "-c", shell], check=True)  # noqa: S607

    first, second, *_, last = (tmp_path / "file").read_text().splitlines()
    assert (first, second, last) == ("before", "{", "after")


@as_root
def test_a_file_that_is_replaced_keeps_its_owner_and_its_group(tmp_path):
    file = tmp_path / "file"
    file.touch()
    os.chown(file, 65534, 65533)

    write_file(file, "after")

    known = file.stat()
    assert (file.read_text(), known.st_uid, known.st_gid) == ("after", 65534, 65533)


@pytest.mark.parametrize("mode", [0o555, 0o777], ids=["folder", "owner"])
def test_a_file_that_cannot_be_replaced_for_want_of_rights_is_written_in_place(mode):
    # Not tmp_path: nobody else may see that.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "file")
        file.write_text("what was before is longer")
        file.chmod(0o666)
        Path(folder).chmod(mode)
        before = os.geteuid()
        try:
            if before == 0:
                os.seteuid(65534)
            write_file(file, "after")
        finally:
            os.seteuid(before)
            Path(folder).chmod(0o755)
        assert (file.read_text(), file.stat().st_uid) == ("after", before)
        assert [*Path(folder).iterdir()] == [file]


@as_root
def test_a_file_that_is_a_mount_point_is_written_in_place(tmp_path):
    file = tmp_path / "file"
    file.touch()
    command = f"{sys.executable} -B -m kombu_binary_delay.cli export definitions -o {file}"
    script = f"mount --bind {file} {file} && exec {command}"
    subprocess.run(["unshare", "--mount", "sh", "-c", script], check=True)  # noqa: S607

    assert json.loads(file.read_text())["queues"]


@pytest.fixture
def no_rich(monkeypatch):
    """Let imports fail as they do without the extra ``cli``."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "rich":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "kombu_binary_delay.cli.output", raising=False)
    monkeypatch.delattr("kombu_binary_delay.cli.output", raising=False)


@pytest.mark.usefixtures("no_rich")
def test_without_rich_nothing_is_done_that_could_not_be_shown_and_json_is_to_be_had():
    nowhere = ["-b", "amqp://127.0.0.1:1//"]

    refused = CliRunner().invoke(binary_delay, [*nowhere, "teardown", "--force"])
    as_json = CliRunner().invoke(binary_delay, ["explain", "10s", "--json"])
    exported = CliRunner().invoke(binary_delay, ["export", "definitions"])

    assert (refused.exit_code, "this needs Rich" in refused.output) == (2, True)
    assert json.loads(as_json.output)["delay"] == 10_000
    assert json.loads(exported.output)["queues"]


def test_what_is_to_be_made_has_all_streams():
    names = ["kbd.v2.journal", "kbd.v2.amendments.ids", "kbd.v2.amendments.keys"]
    for format_ in ("definitions", "terraform", "kubernetes"):
        done = CliRunner().invoke(binary_delay, ["--journal", "stream", "export", format_])
        assert [name for name in names if name in done.output] == names


@pytest.mark.parametrize("release", ["3.13", "4.0", "4.2.1", "4.3"])
def test_what_is_to_be_made_has_the_ladder_for_urgent_messages_on_releases_that_use_it(release):
    def has_it(name):
        done = CliRunner().invoke(binary_delay, ["export", name, "--rabbitmq", release])
        return "-urgent.level-00" in done.output

    formats = ["definitions", "terraform", "kubernetes"]
    assert [has_it(format_) for format_ in formats] == [release in {"4.0", "4.2.1"}] * 3


@pytest.mark.parametrize("format_", ["definitions", "terraform", "kubernetes"])
def test_a_queue_that_is_named_twice_is_written_once(format_):
    once, twice = (
        CliRunner().invoke(binary_delay, ["export", format_, *["--queue", "mail"] * times])
        for times in (1, 2)
    )

    assert "mail" in once.output
    assert twice.output == once.output


HELPS = """
import json
from kombu_binary_delay.cli import binary_delay

def helps(command, context):
    yield command.get_help(context)
    for name, each in getattr(command, "commands", {}).items():
        yield from helps(each, type(context)(each, parent=context, info_name=name))

print(json.dumps(list(helps(binary_delay, binary_delay.make_context("x", ["spark"])))))
"""


def test_without_docstrings_the_command_and_its_help_are_the_same():
    """Given: ``python -OO``, which leaves out docstrings and assertions."""
    shown, without = (
        json.loads(subprocess.check_output([sys.executable, *mode, "-c", HELPS], text=True))
        for mode in ([], ["-OO"])
    )

    assert shown == without
    assert len(shown) > len(binary_delay.commands)
    assert all("\n\n  " in text for text in shown)


def test_a_signal_that_the_program_handles_is_left_to_it():
    got = []

    @click.command()
    @subcommand
    def wait(target, printer):
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        done = CliRunner().invoke(wait, ["--json"], obj=Target())
    finally:
        signal.signal(signal.SIGTERM, before)

    assert (done.exit_code, got) == (0, [signal.SIGTERM])


def test_an_alarm_of_the_programs_own_stays():
    @click.command()
    @subcommand
    def nothing(target, printer):
        pass

    before = signal.alarm(3600)
    try:
        CliRunner().invoke(nothing, ["--json"], obj=Target())
        left = signal.alarm(0)
    finally:
        signal.alarm(before)

    assert left > 3000


def test_a_subcommand_runs_in_any_thread():
    codes = []

    @click.command()
    @subcommand
    def nothing(target, printer):
        pass

    thread = threading.Thread(
        target=lambda: codes.append(CliRunner().invoke(nothing, ["--json"], obj=Target()).exit_code)
    )
    thread.start()
    thread.join()

    assert codes == [0]
