"""Purpose: a private, real RabbitMQ for the demo and the tests: start, stop, kill, restart.

A `Broker` has its own data folder, its own epmd and its own free ports, all of them on
127.0.0.1; a RabbitMQ which the machine may already run neither sees it nor is seen.
`stop`, `kill` and `restart` keep the data and the ports; `close` removes everything.
Virtual hosts share nothing: each test uses a fresh one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import amqp

from dev.processes import Process, Processes
from dev.server import BrokerError, Server, VHost
from dev.service import HOST, START, Service, free_ports, listens, wait_until
from kombu_binary_delay.export.broker_config import ADVANCED, CONF, broker_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SERVER = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # the one in PATH would `su` to rabbitmq
CTL = "/usr/lib/rabbitmq/bin/rabbitmqctl"
EPMD = 4  # the index of its port among a node's ports
# In milliseconds. RabbitMQ's defaults, 5 and 10 s, are too short for clients on a busy machine.
HANDSHAKE_TIMEOUT = 60_000

__all__ = ["DEFAULTS", "Broker", "BrokerError", "Node", "VHost"]

# An `advanced` without settings.
DEFAULTS = "[]."
_LITTLE_MEMORY = "vm_memory_monitor:set_vm_memory_high_watermark(0.00001)"
#: Wait until all connections know of an alarm: one that publishes just before is not blocked.
_UNTIL_ALL_KNOW = (
    "Running = fun() -> [P || P <- rabbit_networking:connections(),"
    " (catch rabbit_reader:info(P, [state])) =:= [{state, running}]] end,"
    "Wait = fun Again(0) -> late; Again(N) -> case Running() of [] -> ok;"
    " _ -> timer:sleep(50), Again(N - 1) end end, Wait(1000)."
)


class Node(Server):
    """A RabbitMQ node on this machine, as seen by processes that did not start it.

    You can query and administer it. Only the `Broker` that started it ends it.

    root:   as for `Broker`.
    name:   of the node, with the @.
    folder: where its data, configuration and logs are, until it is closed.
    ports:  AMQP, management, metrics, distribution, epmd, and AMQP over TLS where asked for.
    """

    def __init__(self, root: Path | None, name: str, folder: Path, ports: list[int]) -> None:
        self._root = root
        self.node = name
        self.folder = folder
        self.ports = ports
        self._amqp_port, self._http_port, self._metrics_port, *others = ports
        self._dist_port, self._epmd_port, *self._tls_ports = others
        super().__init__(
            f"amqp://guest:guest@{HOST}:{self._amqp_port}", f"http://{HOST}:{self._http_port}"
        )
        self.metrics_url = f"http://{HOST}:{self._metrics_port}"

    @property
    def tls_url(self) -> str:
        """The URL for TLS. Its host is localhost, the name that the certificate needs."""
        if not self._tls_ports:
            raise BrokerError("this broker was not given a certificate")
        return f"amqps://guest:guest@localhost:{self._tls_ports[0]}//"

    def log(self, lines: int = 100) -> str:
        """Return the last lines that the node printed."""
        text = (self.folder / "console.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    # --- administration -------------------------------------------------------------

    def ctl(self, *arguments: str, timeout: float = START) -> str:
        """Run `rabbitmqctl`, and return its output.

        :raises BrokerError: if it fails, with its message.
        """
        argv, env = self._command([CTL, "-n", self.node, *arguments])
        try:
            done = subprocess.run(
                argv,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise BrokerError(f"rabbitmqctl {arguments[0]}: no answer in {timeout:g} s") from late
        if done.returncode:
            raise BrokerError(f"rabbitmqctl {arguments[0]}: {done.returncode}\n{done.stdout}")
        return done.stdout

    # --- how its programs are run ---------------------------------------------------

    @property
    def _inside(self) -> Path:
        """The folder's path, as the node sees it."""
        return Path("/mnt") if self._root else self.folder

    def _command(self, argv: list[str]) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and environment to run one of the broker's programs.

        More arguments of the program can be appended.
        """
        inside = self._inside
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": str(inside),  # the Erlang cookie
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
            # For every Erlang process of the node, including the helper that looks for epmd.
            "ERL_AFLAGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_CRASH_DUMP_SECONDS": "0",  # a dump would land in the caller's folder
            # While rabbitmqctl waits for an answer, it is not to keep a processor busy.
            "RABBITMQ_CTL_ERL_ARGS": "+S 1 +sbwt none +sbwtdcpu none +sbwtdio none",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_MNESIA_BASE": f"{inside}/data",
            "RABBITMQ_LOG_BASE": f"{inside}/log",
            "RABBITMQ_CONFIG_FILE": f"{inside}/rabbitmq.conf",
            "RABBITMQ_CONFIG_FILES": f"{inside}/conf.d",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{inside}/advanced.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{inside}/enabled_plugins",
            "RABBITMQ_CONF_ENV_FILE": "/nonexistent",
            # The start script then becomes the node, instead of its parent, so that our SIGTERM
            # and SIGKILL reach the node.
            "RUNNING_UNDER_SYSTEMD": "true",
        }
        if self._root:
            argv = ["unshare", "--mount", "sh", "-ec", self._chroot_script(), "sh", *argv]
        return argv, env

    def _chroot_script(self) -> str:
        # The mounts are in the process's namespace, and end with it.
        root = shlex.quote(str(self._root))
        return (
            f"mount -t proc proc {root}/proc; mount --rbind /dev {root}/dev\n"
            f"mount --bind {shlex.quote(str(self.folder))} {root}/mnt\n"
            f"touch {root}/etc/hosts; mount --bind /etc/hosts {root}/etc/hosts\n"
            f'exec chroot {root} "$@"'
        )


class Broker(Node, Service):
    """A private RabbitMQ node, configured as `export broker-config` recommends.

    root:     a folder with an unpacked Debian that has another RabbitMQ (started by
              chroot, which needs root); None uses the one installed on this machine.
    config:   more lines for rabbitmq.conf.
    advanced: the Erlang term of advanced.config, in place of the recommended one.
    name:     the part of the node's name before the @.
    beside:   a node to form a cluster with, whose epmd and cookie are then shared.
    data:     a folder with the data of a stopped node, which is copied and used.
    tls:      a folder with ca.pem, cert.pem and key.pem; the node also listens on a TLS port.
    """

    def __init__(  # noqa: PLR0913 - each with a default
        self,
        root: str | None = None,
        config: Mapping[str, str | int] | None = None,
        advanced: str | None = None,
        *,
        name: str = "dev",
        beside: Broker | None = None,
        data: Path | None = None,
        tls: Path | None = None,
    ) -> None:
        if not Path(root or "/", SERVER.lstrip("/")).exists():
            raise BrokerError(f"no {SERVER} in {root or 'this machine'}: run dev/install.sh demo")
        self._processes = Processes("broker")
        self._beside = beside
        self._epmd: Process | None = None
        self._node: Process | None = None
        ports = free_ports(6 if tls else 5)
        if beside:
            ports[EPMD] = beside.ports[EPMD]
        node = f"{name}@localhost"
        super().__init__(Path(root) if root else None, node, self._processes.folder, ports)
        files = broker_config(_installed(root))
        if advanced is not None:
            files[ADVANCED] = advanced
        self._write_files({**self._tls_settings(tls), **(config or {})}, files)
        if data:
            shutil.copytree(data, self.folder / "data")

    # --- life -----------------------------------------------------------------------

    def start(self, timeout: float = START) -> None:
        """Start the node, and wait until it answers."""
        if self.is_running:
            return
        self.begin_to_start()
        self.wait_until_up(timeout)

    def begin_to_start(self) -> None:
        """Start the node without waiting: nodes of a cluster may wait for each other."""
        if not self._beside and (not self._epmd or self._epmd.poll() is not None):
            self._epmd = self._spawn(["epmd"])
            wait_until(lambda: listens(self._epmd_port), START, "epmd does not listen")
        self._node = self._spawn([SERVER])

    def wait_until_up(self, timeout: float = START) -> None:
        """Wait until the node answers."""
        if self._node is None:
            raise BrokerError("the node is not started")
        try:
            wait_until(self._answers, timeout, "no answer", self._node)
        except (TimeoutError, ChildProcessError) as failure:
            raise BrokerError(f"RabbitMQ: {failure}\n{self.log()}") from None

    def stop(self) -> None:
        """Stop the node as an administrator would. Data and ports are kept."""
        if self._node:
            # Longer than a stop takes on a busy machine: a SIGKILL may lose data, a stop must not.
            self._processes.stop(self._node, START)
            self._node = None

    def kill(self) -> None:
        """Send SIGKILL to the node. Data and ports are kept."""
        if self._node:
            self._processes.kill(self._node)
            self._node = None

    def freeze(self) -> None:
        """Send SIGSTOP to the node: it exists, but does nothing until `thaw`."""
        self._signal(signal.SIGSTOP)
        # On a machine with much to do, its threads may still answer for a moment.
        try:
            wait_until(self._is_frozen, 150, f"{self.node} does not stop")
        except TimeoutError:
            self.thaw()
            raise

    def thaw(self) -> None:
        """Send SIGCONT to the node."""
        self._signal(signal.SIGCONT)

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """Have too little memory meanwhile: the broker blocks connections that publish."""
        try:
            # By one call: each starts an Erlang.
            self.ctl("eval", f"{_LITTLE_MEMORY}, {_UNTIL_ALL_KNOW}")
            yield
        finally:
            self.ctl("set_vm_memory_high_watermark", "0.6")

    def restart(self) -> None:
        """Stop and start the node."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End the node, and remove its folder."""
        self._node = self._epmd = None
        self._processes.close()

    def seen(self) -> Node:
        """Return the node for another process: it can be pickled."""
        return Node(self._root, self.node, self.folder, self.ports)

    # --- what it is -----------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the node's process runs."""
        return self._node is not None and self._node.poll() is None

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that we started: the node, and its epmd."""
        return [process.pid for process in (self._node, self._epmd) if process]

    # --- how it is started ----------------------------------------------------------

    def _tls_settings(self, folder: Path | None) -> dict[str, str | int]:
        if folder is None:
            return {}
        # Copied to where the node, which may run in another root, can read them.
        shutil.copytree(folder, self.folder / "tls")
        inside = self._inside / "tls"
        return {
            "listeners.ssl.1": f"{HOST}:{self._tls_ports[0]}",
            "ssl_handshake_timeout": HANDSHAKE_TIMEOUT,
            "ssl_options.cacertfile": f"{inside}/ca.pem",
            "ssl_options.certfile": f"{inside}/cert.pem",
            "ssl_options.keyfile": f"{inside}/key.pem",
            "ssl_options.verify": "verify_peer",
            "ssl_options.fail_if_no_peer_cert": "false",
        }

    def _write_files(self, config: Mapping[str, str | int], files: Mapping[str, str]) -> None:
        settings: dict[str, str | int] = {
            "listeners.tcp.1": f"{HOST}:{self._amqp_port}",
            "management.tcp.ip": HOST,
            "management.tcp.port": self._http_port,
            "prometheus.tcp.ip": HOST,
            "prometheus.tcp.port": self._metrics_port,
            "collect_statistics_interval": 1000,
            "handshake_timeout": HANDSHAKE_TIMEOUT,
            **config,
        }
        lines = "".join(f"{key} = {value}\n" for key, value in settings.items())
        for name, text in files.items():
            (self.folder / name).write_text(text + lines if name == CONF else text)
        (self.folder / "enabled_plugins").write_text("[rabbitmq_management, rabbitmq_prometheus].")
        (self.folder / "conf.d").mkdir()
        cookie = self.folder / ".erlang.cookie"
        if self._beside:
            cookie.write_text((self._beside.folder / cookie.name).read_text())
        else:
            cookie.write_text(uuid.uuid4().hex)
        cookie.chmod(0o400)

    def _spawn(self, argv: list[str]) -> Process:
        return self._processes.spawn(*self._command(argv), self.folder / "console.log")

    def _signal(self, number: signal.Signals) -> None:
        if self._node:
            os.killpg(self._node.pid, number)

    def _is_frozen(self) -> bool:
        """Whether all threads of the node's process group have stopped or ended, as Linux says."""
        for stat in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                state, _, group, *_ = stat.read_text().rpartition(") ")[2].split()
                if self._node and int(group) == self._node.pid and state not in "TtZX":
                    return False
        return True

    def _answers(self) -> bool:
        try:
            self.connect("/").close()
            self.api("GET", "overview")
        except (OSError, amqp.AMQPError, BrokerError):
            return False
        return True


def _installed(root: str | None) -> str:
    """Return the version of the RabbitMQ that is installed in a root."""
    folders = Path(root or "/", "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")
    return next(folders).name.partition("-")[2]
