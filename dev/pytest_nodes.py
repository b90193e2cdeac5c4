"""Purpose: nodes for pytest-celery that are processes of this machine, so that no Docker is needed.

pytest-celery runs tests against a broker, a result backend and workers, each a *node* that wraps a
container. Here are nodes of the same classes around processes. To use them, override these
fixtures of pytest-celery:

    @pytest.fixture(scope="module")
    def celery_broker():
        with Broker() as rabbitmq:                  # dev.broker, or any other dev.server.Server
            yield LocalBroker(rabbitmq)

    @pytest.fixture(scope="module")
    def celery_backend(tmp_path_factory):
        return LocalBackend(tmp_path_factory.mktemp("results"))

    @pytest.fixture(scope="module")
    def celery_worker(celery_broker, celery_backend):
        env = {"BROKER": celery_broker.config()["url"], ...}    # for the app to read
        with Processes("worker") as processes:
            yield LocalWorker(processes, "my.app", env, "--pool=solo")

    def test_a_task_outlives_its_worker(celery_setup):
        result = my_task.apply_async(countdown=1)
        celery_setup.worker.kill()
        celery_setup.worker.restart()
        assert result.get(timeout=10)

They support all that a node has: `config`, `ready`, `logs`, `wait_for_log`, `assert_log_exists`,
`name`, `hostname`, `kill` with any signal, `restart`, `teardown`. Scopes wider than one test are
fine. This module imports neither this project's transport nor its tests.
"""

from __future__ import annotations

import os
import signal as signals
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import psutil
from pytest_celery import (
    DEFAULT_WORKER_NAME,
    DEFAULT_WORKER_QUEUE,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestContainer,
    CeleryTestWorker,
)

from dev.broker import Broker
from dev.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import celery

    from dev.processes import Processes
    from dev.server import Server, VHost

RUNNING, EXITED = "running", "exited"


class ProcessContainer(CeleryTestContainer):
    """The container interface of a pytest-celery node, implemented by a process.

    A subclass implements its status, signals, restart and output.
    """

    def __init__(self, container_id: str) -> None:
        # Without the base class's: there is no Docker container.
        self._id = container_id

    @property
    def id(self) -> str:
        """A unique id; a node uses its first twelve characters as the host name."""
        return self._id

    @property
    def name(self) -> str:
        """The name in messages."""
        return f"{type(self).__name__} {self._id}"

    @property
    def status(self) -> str:
        """The status, in Docker's words."""
        raise NotImplementedError

    @property
    def attrs(self) -> dict[str, Any]:
        """Docker's description: empty."""
        return {}

    def logs(self) -> str:
        """Return all of its output."""
        return ""

    def reload(self) -> None:
        """Do nothing: the status of a process is always current."""

    def ready(self) -> bool:
        """Return whether it may be used. Starting it waits for that."""
        return self.status == RUNNING

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal, by its name or its number."""
        raise NotImplementedError

    def restart(self, timeout: float = 10) -> None:
        """Stop it, if it runs, and start it again with the same options.

        timeout: what pytest-celery lets Docker wait before it kills; a process takes its time.
        """
        raise NotImplementedError


class BrokerProcess(ProcessContainer):
    """A private virtual host on a RabbitMQ, which can be restarted only if we started it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.vhost: VHost = server.vhost()
        super().__init__(self.vhost.name)

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """What an app needs to know."""
        url = self.vhost.url
        return {"url": url, "host_url": url, "vhost": self.vhost.name}

    @property
    def status(self) -> str:
        """Whether the node runs; always true for a broker that we did not start."""
        return EXITED if isinstance(self.server, Broker) and not self.server.is_running else RUNNING

    def logs(self) -> str:
        """Return the node's output."""
        return self._broker.log(lines=10_000)

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send SIGKILL, SIGSTOP or SIGCONT to the node, or stop it cleanly for SIGTERM."""
        actions = {
            signals.SIGKILL: Broker.kill,
            signals.SIGTERM: Broker.stop,
            signals.SIGSTOP: Broker.freeze,
            signals.SIGCONT: Broker.thaw,
        }
        action = actions.get(_number(signal))
        if action is None:
            raise ValueError(f"a broker takes {_list(actions)}, not {signal!r}")
        action(self._broker)

    def restart(self, timeout: float = 10) -> None:  # noqa: ARG002 - as the base class says
        """Stop and start the node; durable queues and messages are kept."""
        self._broker.restart()

    def teardown(self) -> None:
        """Delete the virtual host. The RabbitMQ continues to run."""
        self.vhost.delete()

    @property
    def _broker(self) -> Broker:
        if not isinstance(self.server, Broker):
            raise TypeError(f"{self.server.url} is somebody else's broker, not ours to control")
        return self.server


class ResultFolder(ProcessContainer):
    """Celery's file system backend: it needs no process and no installation."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.name)
        self._folder = folder

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """What an app needs to know."""
        url = f"file://{self._folder}"
        return {"url": url, "host_url": url}

    @property
    def status(self) -> str:
        """Whether the folder exists."""
        return RUNNING if self._folder.is_dir() else EXITED

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Raise an error: a folder cannot be killed, so such a test would prove nothing."""
        raise TypeError(f"a folder takes no signals, such as {signal!r}")

    def restart(self, timeout: float = 10) -> None:  # noqa: ARG002 - the base class has it
        """Raise an error, as `kill` does."""
        raise TypeError("a folder cannot be restarted")


class WorkerProcess(ProcessContainer):
    """A `celery worker`, ready when this returns; `processes` ends it when it closes."""

    def __init__(
        self, processes: Processes, app: str, env: Mapping[str, str], *options: str
    ) -> None:
        self._processes, self._app, self._env, self._options = processes, app, env, options
        self._before = ""
        self.worker = self._start(self.worker_name())
        super().__init__(self.worker.name.partition("@")[2])

    @classmethod
    def version(cls) -> str:
        """Return the version of Celery, the same as for the tests."""
        import celery  # noqa: PLC0415 - whoever has no tests needs none

        return str(celery.__version__)

    @classmethod
    def log_level(cls) -> str:
        """Return the worker's log level."""
        return "INFO"

    @classmethod
    def worker_name(cls) -> str:
        """Return the first part of every worker's name."""
        return str(DEFAULT_WORKER_NAME)

    @classmethod
    def worker_queue(cls) -> str:
        """Return the queue that a worker consumes, unless its options name another."""
        return str(DEFAULT_WORKER_QUEUE)

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """An empty configuration: no program connects to a worker."""
        return {}

    @property
    def status(self) -> str:
        """Whether its main process runs."""
        return RUNNING if self.worker.is_running else EXITED

    def logs(self) -> str:
        """Return all of its output, including that before a restart."""
        return self._before + self.worker.log()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send SIGKILL to the worker and its pool at once, other signals to its main process."""
        if _number(signal) == signals.SIGKILL:
            self.worker.kill()
        else:
            os.kill(self.worker.pid, _number(signal))

    def restart(self, timeout: float = 10) -> None:  # noqa: ARG002 - as the base class says
        """Stop it as an administrator would, if it runs, and start it with the same name."""
        self.worker.stop()
        self._before = self.logs()
        self.worker = self._start(self.worker.name)

    def teardown(self) -> None:
        """Stop it."""
        self.worker.stop()

    def _start(self, name: str) -> Worker:
        return Worker(self._processes, self._app, self._env, *self._options, name=name)


class LocalBroker(CeleryTestBroker):
    """A virtual host on a RabbitMQ: `vhost`, with its content."""

    def __init__(self, server: Server) -> None:
        super().__init__(BrokerProcess(server))

    @property
    def vhost(self) -> VHost:
        """The virtual host, for tests to inspect."""
        return cast("BrokerProcess", self.container).vhost


class LocalBackend(CeleryTestBackend):
    """Results in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ResultFolder(folder))


class LocalWorker(CeleryTestWorker):
    """A `celery worker` on this machine.

    processes:  ends it when it closes.
    module:  what Celery's -A takes.
    env:     more environment variables for it.
    options: more arguments for `celery worker`.
    app:     the app as tests see it.
    """

    def __init__(
        self,
        processes: Processes,
        module: str,
        env: Mapping[str, str],
        *options: str,
        app: celery.Celery | None = None,
    ) -> None:
        super().__init__(WorkerProcess(processes, module, env, *options), app)

    def hostname(self) -> str:
        """Return its name for Celery's remote control."""
        return cast("WorkerProcess", self.container).worker.name

    def get_running_processes_info(
        self, columns: list[str] | None = None, filters: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Return a description, as of `psutil`, of its main process and those of its pool."""
        main = psutil.Process(self.container.worker.pid)
        rows = []
        for process in (main, *main.children(recursive=True)):
            # A child may end meanwhile.
            with suppress(psutil.NoSuchProcess):
                rows.append(process.as_dict(columns))
        wanted = (filters or {}).items()
        return [row for row in rows if all(row.get(key) == value for key, value in wanted)]


def _number(signal: str | int) -> signals.Signals:
    return signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal)


def _list(numbers: Iterable[signals.Signals]) -> str:
    return ", ".join(signal.name for signal in numbers)
