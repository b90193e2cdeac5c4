"""Purpose: Kombu's own broker tests, those of the installed release, with our transport.

    python -m dev.kombu_suite [WAY ...] [-- ARGUMENT ...]    the arguments go to pytest

It takes `t/integration/test_py_amqp.py` out of Kombu's source distribution, which pip downloads
into the cache, and runs it once for each way to name our transport, each in a separate virtual
host. The broker is a private one, or the one that the environment names as for our own tests.

This file is also the pytest plugin of those runs: it makes each of Kombu's connections ours. Kombu
repeats a test that fails up to five times; here, none is repeated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kombu
import pytest
from kombu.transport import TRANSPORT_ALIASES

from dev.broker import Broker
from dev.server import Server
from kombu_binary_delay import register

ROOT = Path(__file__).parents[1]
SUITE = "t/integration/test_py_amqp.py"
OURS = "kombu_binary_delay:Transport"

SCHEME, ALIAS, TRANSPORT = "scheme", "alias", "transport"
#: The ways in which the suite, whose URLs begin with `pyamqp://`, gets our transport.
WAYS = {
    SCHEME: "its URLs begin with binary-delay://",
    ALIAS: "the name pyamqp means our transport",
    TRANSPORT: "our transport is named beside its URLs",
}
#: In these tests, Kombu expects its connection to ignore what was named beside the URL.
FORGETFUL = (
    "test_PyAMQPFailover::test_failover_switches_to_alternate_url",
    "test_PyAMQPFailover::test_failover_to_alias_alternate_is_allowed",
)
_WAY = "KOMBU_SUITE_WAY"


def main(arguments: list[str]) -> int:
    """Run the suite in the ways that the arguments name, or in all; return the exit status."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    ways = arguments[:split] or list(WAYS)
    if unknown := set(ways) - WAYS.keys():
        sys.exit(f"kombu_suite: no such way: {', '.join(unknown)}; there are {', '.join(WAYS)}")
    folder = source()
    failed = False
    with ExitStack() as stack:
        server = Server.from_environment(os.environ) or stack.enter_context(
            Broker(os.environ.get("RABBITMQ_ROOT"))
        )
        for way in ways:
            sys.stdout.write(f"Kombu {version('kombu')}, RabbitMQ {server.version}: {WAYS[way]}\n")
            sys.stdout.flush()
            failed |= run(folder, server, way, arguments[split + 1 :]) != 0
    return int(failed)


def source() -> Path:
    """Return the tests of the installed Kombu; download them if they are not in the cache yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"kombu-{version('kombu')}"
    folder = cache / "kombu_binary_delay" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            # Its build requirements are installed, because our own wheel needs them too.
            pip += ["--no-binary=kombu", "--no-build-isolation", "--dest", partial]
            subprocess.run([*pip, name.replace("-", "==")], check=True)
            with tarfile.open(next(Path(partial).glob("*.tar.gz"))) as archive:
                tests = [member for member in archive if member.name.startswith(f"{name}/t/")]
                archive.extractall(partial, members=tests, filter="data")
            shutil.move(f"{partial}/{name}", folder)
    return folder


def run(folder: Path, server: Server, way: str, arguments: list[str]) -> int:
    """Run the suite in one way, in a fresh virtual host, and return pytest's exit status."""
    vhost = server.vhost()
    host, _, port = vhost.url.removeprefix("amqp://").rpartition(":")
    env = {
        **os.environ,
        _WAY: way,
        "PYTHONPATH": str(ROOT),
        # The suite makes a URL from these: so one may contain the user, the other a path.
        "RABBITMQ_HOST": host,
        "RABBITMQ_5672_TCP": port,
    }
    options = ["-p", "dev.kombu_suite", "-p", "no:cacheprovider", "-c", os.devnull]
    options += ["--rootdir", str(folder), "-o", "python_classes=test_*", "-o", "markers=env\nflaky"]
    left_out = FORGETFUL if way == TRANSPORT else ()
    options += [f"--deselect={SUITE}::{test}" for test in left_out]
    argv = [sys.executable, "-m", "pytest", "-q", *options, SUITE, *arguments]
    try:
        return subprocess.run(argv, env=env, cwd=folder, check=False).returncode
    finally:
        vhost.delete()


# -- as the plugin -----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    way, connect = os.environ[_WAY], kombu.Connection

    def by_scheme(url: Any, *args: Any, **kwargs: Any) -> Any:
        ours = url.replace("pyamqp://", "binary-delay://") if isinstance(url, str) else url
        return connect(ours, *args, **kwargs)

    def by_transport(*args: Any, **kwargs: Any) -> Any:
        return connect(*args, transport=OURS, **kwargs)

    if way == SCHEME:
        register()
        monkeypatch.setattr(kombu, "Connection", by_scheme)
    elif way == ALIAS:
        monkeypatch.setitem(TRANSPORT_ALIASES, "pyamqp", OURS)
    else:
        monkeypatch.setattr(kombu, "Connection", by_transport)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
