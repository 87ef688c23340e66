"""What is seen of the machine: the state, within a second, and never a guess."""

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from conftest import PASSPHRASE, Client, running
from cryptroot_unlock import Disks
from homelab import DROPBEAR, OPENSSH, Homelab, bind
from namespaces import Namespace, home, ip
from ssh_servers import SERVERS, free_port
from test_daemon import wait_for

import waker

__all__ = ["home"]  # a fixture
T = TypeVar("T")

OPEN, CLOSED, SILENT, UNSEEN = waker.Port
OFF = waker.Sight(SILENT, SILENT)
BOOTING = waker.Sight(CLOSED, CLOSED)
LOCKED = waker.Sight(OPEN, CLOSED)
UP = waker.Sight(CLOSED, OPEN)


@pytest.mark.parametrize(
    ("initrd", "system", "state"),
    [
        (SILENT, SILENT, "off"),
        (CLOSED, SILENT, "booting"),
        (SILENT, CLOSED, "booting"),
        (CLOSED, CLOSED, "booting"),
        (OPEN, SILENT, "locked"),
        (OPEN, CLOSED, "locked"),
        (CLOSED, OPEN, "up"),
        (SILENT, OPEN, "up"),
        (OPEN, OPEN, "up"),
        (UNSEEN, OPEN, "up"),
        (UNSEEN, UNSEEN, "unknown"),
        (UNSEEN, SILENT, "unknown"),
        (SILENT, UNSEEN, "unknown"),
        (CLOSED, UNSEEN, "unknown"),
        (OPEN, UNSEEN, "unknown"),
    ],
)
def test_two_ports_tell_the_state(
    initrd: waker.Port, system: waker.Port, state: str
) -> None:
    assert waker.Sight(initrd, system).members() == {
        "state": state,
        "reachable": bool({OPEN, CLOSED} & {initrd, system}),
        "initrd_ssh_open": initrd is OPEN,
        "system_ssh_open": system is OPEN,
    }


@pytest.mark.parametrize(
    ("says", "sight"),
    [
        (f"{DROPBEAR}\r\n", LOCKED),
        (f"{DROPBEAR}\r\nkey exchange of OpenSSH", LOCKED),
        (f"{OPENSSH}\r\n", UP),
        ("SSH-2.0-tinyssh_20230101\r\n", UP),
        ("Not allowed at this time\r\n", UP),
        ("", waker.Sight(UNSEEN, UNSEEN)),
    ],
    ids=["dropbear", "dropbear goes on", "OpenSSH", "tinyssh", "a penalty", "nothing"],
)
def test_one_shared_port_is_told_apart_by_its_identification(
    config: waker.Config, says: str, sight: waker.Sight
) -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = int(listener.getsockname()[1])
        machine = config.machine._replace(initrd_port=port, system_port=port)
        with ThreadPoolExecutor() as pool:
            looking = pool.submit(waker.look, machine)
            with listener.accept()[0] as tcp:
                tcp.sendall(says.encode())
                assert looking.result() == sight


def within_a_second(ask: Callable[[], T]) -> T:
    """Return what comes within a second; who is late for want of a processor may again.

    What takes longer by itself is late every time.
    """
    for _ in range(4):
        began = time.monotonic()
        answer = ask()
        if time.monotonic() - began < 1:
            return answer
    raise TimeoutError


def state(client: Client) -> str:
    """Ask for the status; it must come within a second."""
    answer = within_a_second(lambda: client.call("GET", "/api/status"))
    assert answer.status == 200
    return str(answer.json["state"])


@pytest.mark.parametrize("shared_port", [False, True])
def test_the_states_of_a_machine_from_off_to_up(
    tmp_path: Path, config: waker.Config, *, shared_port: bool
) -> None:
    disks = Disks({"cryptroot": PASSPHRASE})
    (tmp_path / "machine").mkdir()
    lab = Homelab(tmp_path / "machine", disks=disks, shared_port=shared_port)
    config = waker.read_config({"WAKER_PIN": "24681012"} | lab.settings(), tmp_path)
    config = config._replace(packet_port=lab.packet_port)
    with contextlib.closing(lab), running(config) as client:
        client.log_in("24681012")
        assert state(client) == "off"
        client.call("POST", "/api/wol")
        lab.wait_for("locked")
        wait_for(lambda: state(client) == "locked")
        answer = client.call("POST", "/api/unlock", {"passphrase": PASSPHRASE})
        assert answer.status == 200
        lab.wait_for("up")
        assert waker.look(config.machine) == UP


@pytest.mark.parametrize(("server", "sight"), [("dropbear", LOCKED), ("openssh", UP)])
def test_a_shared_port_with_real_servers(
    tmp_path: Path, server: str, sight: waker.Sight
) -> None:
    with SERVERS[server](tmp_path, Disks({})) as start:
        assert waker.look(start.machine()) == sight


@pytest.fixture
def two_ports(config: waker.Config) -> waker.Config:
    """Point the daemon at two ports on which nobody listens."""
    machine = config.machine._replace(initrd_port=free_port(), system_port=free_port())
    return config._replace(machine=machine)


def test_a_port_that_refuses_proves_the_machine_reachable(
    two_ports: waker.Config,
) -> None:
    with running(two_ports) as client:
        assert state(client.log_in()) == "booting"


def test_a_port_that_swallows_does_not_hide_one_that_is_open(
    lab: Homelab, config: waker.Config
) -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = int(listener.getsockname()[1])
        machine = config.machine._replace(system_port=port)
        assert machine.initrd_port == lab.initrd_port  # which swallows
        with running(config._replace(machine=machine)) as client:
            assert state(client.log_in()) == "up"


def test_any_port_that_accepts_will_do_for_the_initrd(two_ports: waker.Config) -> None:
    with bind("127.0.0.1", two_ports.machine.initrd_port) as listener:
        listener.listen()
        with running(two_ports) as client:
            assert state(client.log_in()) == "locked"


def blackhole(_: Namespace, machine: Namespace) -> None:
    ip(f"-n {machine.name} link set eth0 down")


def drop(router: Namespace, _: Namespace) -> None:
    ip(f"-n {router.name} neigh replace 192.168.77.20 lladdr 02:00:00:00:00:01 dev lan")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cut", [blackhole, drop])
def test_a_machine_that_is_cut_off_is_off_within_a_second(
    home: tuple[Namespace, Namespace, Namespace],
    config: waker.Config,
    cut: Callable[[Namespace, Namespace], None],
    *,
    shared: bool,
) -> None:
    router, machine, _ = home
    there = config.machine._replace(
        host="192.168.77.20", initrd_port=22 if shared else 2222, system_port=22
    )
    cut(router, machine)
    # The thread that looks begins in the namespace of the one that made it.
    seen = within_a_second(lambda: router.run(lambda: waker.look(there)))
    assert seen == OFF


@pytest.mark.parametrize("host", ["203.0.113.9", "2001:db8::9"])
def test_without_a_route_nothing_is_claimed(
    home: tuple[Namespace, Namespace, Namespace], config: waker.Config, host: str
) -> None:
    _, _, lonely = home
    there = config.machine._replace(host=host)
    seen = within_a_second(lambda: lonely.run(lambda: waker.look(there)))
    assert (seen, seen.members()["state"]) == (waker.Sight(UNSEEN, UNSEEN), "unknown")


def test_without_a_descriptor_nothing_is_claimed(config: waker.Config) -> None:
    used = len(list(Path("/proc/self/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    holes = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, hard))
        with contextlib.suppress(OSError):
            while True:
                holes.append(socket.socket())
        assert waker.look(config.machine) == waker.Sight(UNSEEN, UNSEEN)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for hole in holes:
            hole.close()


def test_without_a_thread_nothing_is_claimed(config: waker.Config) -> None:
    usual = threading.stack_size(1 << 46)  # bytes, which nobody has
    try:
        assert waker.look(config.machine) == waker.Sight(UNSEEN, UNSEEN)
    finally:
        threading.stack_size(usual)


@contextlib.contextmanager
def counting() -> Iterator[tuple[int, Callable[[], int]]]:
    """Listen, and hang up when the other one does; also what counts who came."""
    listener = bind("127.0.0.1", 0)
    listener.listen()
    port = int(listener.getsockname()[1])
    came: list[object] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, address = listener.accept()
                came.append(address)
                with connection:
                    connection.recv(1)

    def count() -> int:
        with socket.create_connection(("127.0.0.1", port)) as last:
            wait_for(lambda: last.getsockname() in came)  # after all others
            came.remove(last.getsockname())
        return len(came)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield port, count
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_an_open_port_is_not_knocked_at_twice_a_second(config: waker.Config) -> None:
    with counting() as (port, count):
        machine = config.machine._replace(initrd_port=port, system_port=free_port())
        watcher = waker.Watcher(machine)
        for now in (100.0, 100.9):
            assert watcher.look(now).initrd is OPEN
        assert count() == 1
        assert watcher.look(101.0).initrd is OPEN
        assert count() == 2


def test_all_who_ask_meanwhile_share_one_look(config: waker.Config) -> None:
    with counting() as (port, count):
        shared = config.machine._replace(initrd_port=port, system_port=port)
        watcher = waker.Watcher(shared)
        with ThreadPoolExecutor(20) as pool:
            asked = [pool.submit(watcher.look, 100 + n / 100) for n in range(20)]
        assert len({look.result() for look in asked}) == 1
        assert count() == 1


def test_no_connection_is_left_open(config: waker.Config) -> None:
    listener = bind("127.0.0.1", 0)
    listener.listen()
    with listener:
        port = int(listener.getsockname()[1])
        waker.look(config.machine._replace(initrd_port=port, system_port=port))
        with listener.accept()[0] as connection:
            connection.settimeout(1)
            assert connection.recv(1) == b""
