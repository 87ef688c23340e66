"""What is seen of the machine: the state, within a second, and never a guess."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from conftest import PASSPHRASE, Client, daemon, running
from cryptroot_unlock import Disks
from homelab import DROPBEAR, OPENSSH, Homelab, bind
from namespaces import Namespace, home, ip
from ssh_servers import SERVERS, free_port
from test_daemon import wait_for

import waker

__all__ = ["home"]  # a fixture
T = TypeVar("T")

OFF = waker.Sight("off")
BOOTING = waker.Sight("booting", reachable=True)
LOCKED = waker.Sight("locked", reachable=True, initrd_ssh_open=True)
UP = waker.Sight("up", reachable=True, system_ssh_open=True)
BOTH = UP._replace(initrd_ssh_open=True)
UNKNOWN = LOCKED._replace(state="unknown")

CLOSED = waker.Door(answered=True)
SILENT = waker.Door()
OPEN = waker.Door(open=True, answered=True)


def saying(ident: str) -> waker.Door:
    return waker.Door(open=True, answered=True, ident=ident.encode())


@pytest.mark.parametrize(
    ("initrd", "system", "sight"),
    [
        (SILENT, SILENT, OFF),
        (CLOSED, SILENT, BOOTING),
        (SILENT, CLOSED, BOOTING),
        (CLOSED, CLOSED, BOOTING),
        (OPEN, SILENT, LOCKED),
        (OPEN, CLOSED, LOCKED),
        (CLOSED, OPEN, UP),
        (SILENT, OPEN, UP),
        (OPEN, OPEN, BOTH),
    ],
)
def test_two_ports_tell_the_state(
    initrd: waker.Door, system: waker.Door, sight: waker.Sight
) -> None:
    seen = waker.judge(waker.DIALECTS[0], initrd, system, shared=False)
    assert seen == sight


@pytest.mark.parametrize(
    ("dialect", "door", "sight"),
    [
        ("cryptroot", SILENT, OFF),
        ("cryptroot", CLOSED, BOOTING),
        ("cryptroot", saying(DROPBEAR), LOCKED),
        ("cryptroot", saying(OPENSSH), UP),
        ("cryptroot", saying("SSH-2.0-tinyssh"), UNKNOWN),
        ("cryptroot", OPEN, UNKNOWN),
        ("systemd", saying(DROPBEAR), LOCKED),
        ("systemd", saying(OPENSSH), UNKNOWN),
    ],
)
def test_one_shared_port_is_told_apart_by_its_identification(
    dialect: str, door: waker.Door, sight: waker.Sight
) -> None:
    row = waker.parse_dialect(dialect)
    assert waker.judge(row, door, door, shared=True) == sight


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


def status(client: Client) -> waker.Sight:
    """Ask for the status; it must come within a second."""
    answer = within_a_second(lambda: client.call("GET", "/api/status"))
    assert answer.status == 200
    seen = answer.json
    assert seen.pop("name")
    assert seen.pop("start") is None
    return waker.Sight(**seen)


@pytest.mark.parametrize("shared_port", [False, True])
def test_the_states_of_a_machine_from_off_to_up(
    tmp_path: Path, config: waker.Config, *, shared_port: bool
) -> None:
    disks = Disks({"cryptroot": PASSPHRASE})
    (tmp_path / "machine").mkdir()
    lab = Homelab(tmp_path / "machine", disks=disks, shared_port=shared_port)
    reader = waker.Reader({"WAKER_PIN": "24681012"} | lab.settings())
    config = waker.read_config(reader, tmp_path)._replace(packet_port=lab.packet_port)
    with contextlib.closing(lab), running(config) as client:
        client.log_in("24681012")
        assert status(client) == OFF
        client.call("POST", "/api/wol")
        lab.wait_for("locked")
        assert status(client) == LOCKED
        answer = client.call("POST", "/api/unlock", {"passphrase": PASSPHRASE})
        assert answer.status == 200
        lab.wait_for("up")
        seen = waker.look(config.machine)
        assert seen == UP


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
        assert status(client.log_in()) == BOOTING


def test_a_port_that_swallows_does_not_hide_one_that_is_open(
    lab: Homelab, config: waker.Config
) -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = int(listener.getsockname()[1])
        machine = config.machine._replace(system_port=port)
        assert machine.initrd_port == lab.initrd_port  # which swallows
        with running(config._replace(machine=machine)) as client:
            assert status(client.log_in()) == UP


def test_any_port_that_accepts_will_do_for_the_initrd(two_ports: waker.Config) -> None:
    with bind("127.0.0.1", two_ports.machine.initrd_port) as listener:
        listener.listen()
        with running(two_ports) as client:
            assert status(client.log_in()) == LOCKED


def blackhole(_: Namespace, machine: Namespace) -> None:
    ip(f"-n {machine.name} link set eth0 down")


def drop(router: Namespace, _: Namespace) -> None:
    ip(f"-n {router.name} neigh replace 192.168.77.20 lladdr 02:00:00:00:00:01 dev lan")


def no_route(router: Namespace, _: Namespace) -> None:
    ip(f"-n {router.name} route add unreachable 192.168.77.20")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cut", [blackhole, drop, no_route])
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

    def ask() -> waker.Sight:
        # The daemon's probing threads begin in the namespace of the one that made them.
        return waker.Watcher(there).look(time.monotonic())

    assert within_a_second(lambda: router.run(ask)) == OFF


def test_a_name_that_hangs_in_the_resolver_is_off_within_a_second(
    home: tuple[Namespace, Namespace, Namespace],
) -> None:
    router, machine, _ = home
    blackhole(router, machine)
    settings = {
        "WAKER_HOMELAB_MAC": "52:54:00:12:34:56",
        "WAKER_HOMELAB_HOST": "box.lan",
    }
    with (
        router.resolver("192.168.77.20"),
        daemon(settings, *router.command()) as waking,
    ):
        client = router.run(waking.client.log_in)
        for _ in range(3):
            assert router.run(lambda: status(client)) == OFF


def test_while_the_resolver_hangs_the_last_sight_is_told_for_a_little_while(
    home: tuple[Namespace, Namespace, Namespace],
) -> None:
    router, machine, _ = home
    settings = {
        "WAKER_HOMELAB_MAC": "52:54:00:12:34:56",
        "WAKER_HOMELAB_HOST": "box.lan",
    }
    with (
        router.resolver("192.168.77.99", "192.168.77.20 box.lan\n") as known,
        daemon(settings, *router.command()) as waking,
    ):
        client = router.run(waking.client.log_in)
        assert router.run(lambda: status(client)) == BOOTING
        known.write_text("")
        blackhole(router, machine)
        assert router.run(lambda: status(client)) == BOOTING
        seen = [router.run(lambda: status(client)) for _ in range(6)]
        assert seen[-1] == OFF  # a look ago is enough, ten seconds ago is not


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
        assert watcher.look(100.0).initrd_ssh_open
        assert watcher.look(100.9).initrd_ssh_open
        assert count() == 1
        assert watcher.look(101.0).initrd_ssh_open
        assert count() == 2


def test_all_who_ask_meanwhile_share_one_look(config: waker.Config) -> None:
    with counting() as (port, count):
        shared = config.machine._replace(initrd_port=port, system_port=port)
        watcher = waker.Watcher(shared)
        threads = [
            threading.Thread(target=watcher.look, args=(float(number),))
            for number in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert count() == 1


def test_who_asked_before_a_look_was_over_needs_no_other_one(
    config: waker.Config,
) -> None:
    """The machine sleeps: what is known of it is not for those who ask later."""
    watcher = waker.Watcher(config.machine)
    assert watcher.known(100.0) is None
    watcher.look(100.0)
    assert watcher.known(100.7) == waker.Sight()
    assert watcher.known(101.0) is None


def test_no_connection_is_left_open(config: waker.Config) -> None:
    listener = bind("127.0.0.1", 0)
    listener.listen()
    with listener:
        port = int(listener.getsockname()[1])
        waker.look(config.machine._replace(initrd_port=port, system_port=port))
        with listener.accept()[0] as connection:
            connection.settimeout(1)
            assert connection.recv(1) == b""
