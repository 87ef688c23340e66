"""What is seen of the machine: the state, within a second, and never a guess."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import CHECKOUT, PASSPHRASE, PIN, no_threads, running, wait_for
from cryptroot_unlock import Disks
from homelab import DROPBEAR, OPENSSH, Homelab, bind
from namespaces import Namespace, home, ip
from ssh_servers import SERVERS, free_port

import waker

__all__ = ["home"]  # a fixture
Home = tuple[Namespace, Namespace, Namespace]

OPEN, CLOSED, SILENT, UNSEEN = waker.Port
LOCKED = waker.Sight(OPEN, CLOSED)
UP = waker.Sight(CLOSED, OPEN)
NOTHING = waker.Sight(UNSEEN, UNSEEN)


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
        (f"{DROPBEAR}\r\nkey exchange of OpenSSH", LOCKED),
        (f"{OPENSSH}\r\n", UP),
        ("SSH-2.0-tinyssh_20230101\r\n", UP),
        ("Not allowed at this time\r\n", UP),
        ("", NOTHING),
    ],
    ids=["dropbear", "OpenSSH", "tinyssh", "a penalty", "nothing"],
)
def test_a_shared_port_is_told_by_its_identification(
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


@pytest.mark.parametrize(("server", "sight"), [("dropbear", LOCKED), ("openssh", UP)])
def test_a_shared_port_of_real_servers(
    tmp_path: Path, server: str, sight: waker.Sight
) -> None:
    with SERVERS[server](tmp_path, Disks({})) as initrd:
        assert waker.look(initrd.machine()) == sight


@pytest.mark.parametrize("shared_port", [False, True])
def test_a_machine_from_off_to_up(tmp_path: Path, *, shared_port: bool) -> None:
    disks = Disks({"cryptroot": PASSPHRASE})
    lab = Homelab(tmp_path, disks=disks, shared_port=shared_port)
    config = waker.read_config({"WAKER_PIN": PIN} | lab.settings(), tmp_path)
    config = config._replace(packet_port=lab.packet_port)
    with contextlib.closing(lab), running(config) as client:
        assert client.log_in().status()["state"] == "off"
        client.call("POST", "/api/wol")
        lab.wait_for("locked")
        wait_for(lambda: client.status()["state"] == "locked")
        assert client.unlock().status == 200
        lab.wait_for("up")
        wait_for(lambda: client.status()["state"] == "up")


def test_each_port_is_looked_at_by_itself(config: waker.Config) -> None:
    """One that swallows does not hide another; the machine sleeps here, so both do."""
    with bind("127.0.0.1", 0) as listener:
        port = int(listener.getsockname()[1])
        machine = config.machine._replace(system_port=port)
        assert waker.look(machine) == waker.Sight(SILENT, CLOSED)
        listener.listen()
        assert waker.look(machine) == waker.Sight(SILENT, OPEN)


# ---- Never a guess -------------------------------------------------------------------


def within_a_second(look: Callable[[], waker.Sight]) -> waker.Sight:
    """Look, for a second at most; who is late for want of a processor may again.

    What takes longer by itself is late every time.
    """
    for _ in range(9):
        began = time.monotonic()
        sight = look()
        if time.monotonic() - began < 1:
            return sight
    raise TimeoutError


def blackhole(_: Namespace, machine: Namespace) -> None:
    ip(f"-n {machine.name} link set eth0 down")


def drop(router: Namespace, _: Namespace) -> None:
    ip(f"-n {router.name} neigh replace 192.168.77.20 lladdr 02:00:00:00:00:01 dev lan")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cut", [blackhole, drop])
def test_a_machine_that_is_cut_off_is_off_within_a_second(
    home: Home,
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
    assert seen == waker.Sight(SILENT, SILENT)


@pytest.mark.parametrize("host", ["203.0.113.9", "2001:db8::9"])
def test_without_a_route_nothing_is_seen(
    home: Home, config: waker.Config, host: str
) -> None:
    _, _, lonely = home
    there = config.machine._replace(host=host)
    assert within_a_second(lambda: lonely.run(lambda: waker.look(there))) == NOTHING


FULL = """
import pathlib, resource, socket, waker
values = {"WAKER_HOMELAB_HOST": "127.0.0.1"}
machine = waker.Machine(*waker.parse_settings(7, values, pathlib.Path()))
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
holes = []
try:
    while True:
        holes.append(socket.socket())
except OSError:
    assert waker.look(machine) == (waker.Port.UNSEEN, waker.Port.UNSEEN)
"""


def test_without_a_descriptor_nothing_is_claimed() -> None:
    """In a process of its own: here, another test's thread may free one."""
    subprocess.run([sys.executable, "-c", FULL], cwd=CHECKOUT, check=True)


def test_without_a_thread_nothing_is_claimed(config: waker.Config) -> None:
    with no_threads():
        assert waker.look(config.machine) == NOTHING


# ---- Few connections -----------------------------------------------------------------


def test_a_port_is_not_knocked_at_twice_a_second(config: waker.Config) -> None:
    """All who ask within a second, or at the same time, share one look."""
    with bind("127.0.0.1", 0) as port:
        port.listen(99)
        port.setblocking(False)

        def came() -> int:
            """Count who came since the last call; each has hung up."""
            count = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    with port.accept()[0] as connection:
                        connection.settimeout(9)
                        assert connection.recv(1) == b""
                        count += 1
            return count

        number = int(port.getsockname()[1])
        machine = config.machine._replace(initrd_port=number, system_port=free_port())
        watcher = waker.Watcher(machine)
        with ThreadPoolExecutor(20) as pool:
            asked = [pool.submit(watcher.look, 100 + n / 100) for n in range(20)]
        assert {look.result() for look in asked} == {LOCKED}
        assert watcher.look(100.9) == LOCKED
        assert came() == 1
        assert watcher.look(101.2) == LOCKED
        assert came() == 1
