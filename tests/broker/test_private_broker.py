"""The private broker keeps its promises: data and ports last, it is private, and it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import amqp
import pytest

from dev.broker import Broker, BrokerError
from dev.processes import Processes
from dev.service import START
from dev.shared_broker import SharedBroker, shared_broker
from tests.waits import PATIENCE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = os.environ.get("RABBITMQ_ROOT")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def private() -> Iterator[Broker]:
    """A broker of this module alone: it is going to be killed."""
    with Broker(ROOT) as broker:
        yield broker


def listeners(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports a process listens on, as the kernel has them."""
    found = set()
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # One may be closed meanwhile.
        with suppress(FileNotFoundError):
            links.append(str(link.readlink()))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                address, port = local.split(":")
                found.add((address, int(port, 16)))
    return found


@pytest.mark.own_broker
@pytest.mark.parametrize("again", ["stop and start", "kill and start"])
def test_a_durable_message_and_the_ports_outlive(private: Broker, again: str) -> None:
    vhost, ports = private.vhost(), private.ports
    with vhost.connect() as connection:
        channel = connection.channel()
        channel.confirm_select()
        channel.queue_declare("kept", durable=True, auto_delete=False)
        message = amqp.Message("still here", delivery_mode=2)
        channel.basic_publish_confirm(message, routing_key="kept")

    if again == "kill and start":
        # A SIGKILL may undo a young declaration, which is RabbitMQ's doing; not an older one.
        private.restart()
        assert private.ports == ports
        private.kill()
    else:
        private.stop()
    with pytest.raises(ConnectionRefusedError):
        vhost.connect()
    private.start()

    assert private.ports == ports
    with vhost.connect() as connection:
        assert connection.channel().basic_get("kept", no_ack=True).body == "still here"
    vhost.delete()


@pytest.mark.own_broker
def test_it_listens_on_its_own_ports_and_on_loopback_only(private: Broker) -> None:
    found = set().union(*(listeners(pid) for pid in private.pids))
    assert {port for _, port in found} == set(private.ports)
    assert {address for address, _ in found} <= {
        "0100007F",  # 127.0.0.1
        "0" * 24 + "01000000",  # ::1, which epmd adds by itself
    }


@pytest.mark.own_broker
def test_virtual_hosts_share_nothing(private: Broker) -> None:
    one, other = private.vhost(), private.vhost()
    with one.connect() as connection:
        channel = connection.channel()
        channel.exchange_declare("e", "topic", durable=True, auto_delete=False)
        channel.queue_declare("q", durable=True, auto_delete=False)
        channel.queue_bind("q", "e", "key")
        channel.basic_publish(amqp.Message("one"), "e", "key")
        wait_until(lambda: one.waiting("q", "unknown") == {"q": 1})
    assert [row["name"] for row in one.queues()] == ["q"]
    assert [row["name"] for row in one.exchanges()] == ["e"]
    assert [(row["source"], row["destination"]) for row in one.bindings()] == [("e", "q")]
    assert (other.queues(), other.exchanges(), other.bindings()) == ([], [], [])
    one.delete()
    other.delete()
    with pytest.raises(BrokerError, match="404"):
        one.queues()


@pytest.mark.own_broker
def test_two_brokers_run_side_by_side_and_closing_one_leaves_nothing_of_it(private: Broker) -> None:
    with Broker(ROOT) as second:
        pids, folder = second.pids, second.folder
        assert second.version == private.version
        assert not set(second.ports) & set(private.ports)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not folder.exists()
    private.vhost().delete()


def test_a_missing_broker_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=r"no /usr/lib/rabbitmq/bin/rabbitmq-server"):
        Broker(str(tmp_path))


@pytest.mark.own_broker
def test_a_broker_that_cannot_start_says_why() -> None:
    with pytest.raises(BrokerError, match="no_such_setting"), Broker(ROOT, {"no_such_setting": 1}):
        pass


@pytest.mark.own_broker
def test_a_shared_broker_is_one_for_all_who_ask_and_ends_with_its_owner() -> None:
    ask = "from dev.shared_broker import shared_broker; print(shared_broker({!r}).vhost().name)"
    with SharedBroker(ROOT) as shared:
        folder = Path(shared.address).parent
        argv = [sys.executable, "-c", ask.format(shared.address)]
        asking = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        try:
            made = {each.communicate(timeout=START + PATIENCE)[0].strip() for each in asking}
        finally:
            for each in asking:
                each.kill()
                each.communicate()
        seen = shared_broker(shared.address)
        # It can be administered from here, too.
        assert made | {"/"} == set(seen.ctl("list_vhosts", "--quiet", "name").split()) - {"name"}
    assert not folder.exists()
    assert not seen.folder.exists()
    with pytest.raises(ConnectionRefusedError):
        seen.connect("/")


def test_a_shared_broker_that_does_not_start_is_an_error_to_all_who_ask(tmp_path: Path) -> None:
    with SharedBroker(str(tmp_path)) as shared:
        for _ in range(2):
            with pytest.raises(BrokerError, match="the shared broker has not started: no /usr/lib"):
                shared_broker(shared.address)


def test_what_a_keeper_has_spawned_ends_even_when_we_are_killed() -> None:
    program = """
import sys, time
from dev.processes import Processes
processes = Processes("test")
child = processes.spawn(["sleep", "600"], {"PATH": "/usr/bin:/bin"}, processes.folder / "log")
print(child.pid, processes.folder, flush=True)
time.sleep(600)
"""
    victim = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with victim:
        assert victim.stdout
        pid, folder = victim.stdout.readline().split()
        victim.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: is_gone(int(pid)))


def test_a_keeper_takes_the_whole_process_group(tmp_path: Path) -> None:
    with Processes("test") as processes:
        log = processes.folder / "log"
        parent = processes.spawn(["sh", "-c", "sleep 600 & echo $!; wait"], {"PATH": "/bin"}, log)
        wait_until(lambda: log.read_text().endswith("\n"))
        pids = [parent.pid, int(log.read_text())]
    wait_until(lambda: all(map(is_gone, pids)))


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
