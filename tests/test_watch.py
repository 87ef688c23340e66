"""What is seen of the machine: the state, within a second, and never a guess."""

import contextlib
import functools
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import no_threads, wait_for
from homelab import DROPBEAR, OPENSSH, bind
from namespaces import Home, home, ip
from ssh_servers import free_port

import waker

__all__ = ["home"]  # a fixture

OPEN, CLOSED, SILENT, UNKNOWN = waker.PortState
LOCKED = waker.PortStates(OPEN, CLOSED)
OFF = waker.PortStates(SILENT, SILENT)
NOTHING = waker.PortStates(UNKNOWN, UNKNOWN)


@pytest.mark.parametrize(
    ("initrd", "system", "state"),
    [
        (SILENT, SILENT, "off"),
        (CLOSED, SILENT, "booting"),
        (SILENT, CLOSED, "booting"),
        (OPEN, CLOSED, "locked"),
        (OPEN, OPEN, "up"),
        (UNKNOWN, OPEN, "up"),
        (OPEN, UNKNOWN, "unknown"),
        (UNKNOWN, SILENT, "unknown"),
    ],
)
def test_two_ports_tell_the_state(
    initrd: waker.PortState, system: waker.PortState, state: str
) -> None:
    assert waker.PortStates(initrd, system).members() == {
        "state": state,
        "reachable": bool({OPEN, CLOSED} & {initrd, system}),
        "initrd_ssh_open": initrd is OPEN,
        "system_ssh_open": system is OPEN,
    }


@pytest.mark.parametrize(
    ("says", "sight"),
    [
        (f"{DROPBEAR}\r\nkey exchange of OpenSSH", LOCKED),
        (f"{OPENSSH}\r\nkey exchange of dropbear", waker.PortStates(CLOSED, OPEN)),
        ("", waker.PortStates(CLOSED, CLOSED)),  # reachable, and SSH is not up yet
    ],
)
def test_a_shared_port_is_told_by_its_identification(
    config: waker.Config, says: str, sight: waker.PortStates
) -> None:
    with bind("127.0.0.1", 0) as listener, ThreadPoolExecutor() as pool:
        port = int(listener.getsockname()[1])
        machine = config.machine._replace(initrd_port=port, system_port=port)
        assert waker.check_ports(machine) == waker.PortStates(CLOSED, CLOSED)
        listener.listen()
        looking = pool.submit(waker.check_ports, machine)
        with listener.accept()[0] as tcp:
            tcp.sendall(says.encode())
            assert looking.result() == sight


def test_who_does_not_answer_is_off_within_a_second_and_our_own_failure_is_told(
    home: Home, config: waker.Config
) -> None:
    router = home[0]
    there = config.machine._replace(host="192.168.77.20")

    def sees_in_time(sight: waker.PortStates) -> bool:
        began = time.monotonic()
        # The thread that looks begins in the namespace of the one that made it.
        assert router.run(lambda: waker.check_ports(there)) == sight
        return time.monotonic() < began + 1

    for change, sight in (
        ("neigh replace 192.168.77.20 lladdr 02:00:00:00:00:01 dev lan", OFF),
        ("route add unreachable 192.168.77.20", OFF),  # told so if no ARP is answered
        ("route replace prohibit 192.168.77.20", NOTHING),
    ):
        ip(f"-n {router.name} {change}")
        # Who is late for want of a processor may look again.
        wait_for(functools.partial(sees_in_time, sight))


def test_a_port_is_not_open_because_no_error_is_found(home: Home) -> None:
    """Linux wakes who connects before it notes the error; here, we take that away.

    Source: tcp_v4_err, net/ipv4/tcp_ipv4.c; about 1 of 10,000 is awake in between.
    """
    pause = Path("/proc/sys/net/ipv4/neigh/lan/retrans_time_ms")
    home[0].run(lambda: pause.write_text("50"))

    def take_error() -> tuple[int, tuple[waker.PortState, str]]:
        with socket.socket() as tcp:  # the next socket gets its number
            error, place = 0, (tcp.fileno(), tcp.family, tcp.type)
        with ThreadPoolExecutor() as pool:
            knock = pool.submit(
                home[0].run, lambda: waker.probe_port("192.168.77.99", 22)
            )
            while not (error or knock.done()):
                # Until it is there, the number is nobody's, or another file's.
                with contextlib.suppress(OSError), socket.fromfd(*place) as same:
                    while not (error or knock.done()):
                        error = same.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return error, knock.result()

    # Who is late for want of a processor may take the next one.
    assert wait_for(take_error, lambda seen: seen[0])[1] == (UNKNOWN, "")


def test_without_a_thread_nothing_is_claimed(config: waker.Config) -> None:
    with no_threads():
        assert waker.check_ports(config.machine) == NOTHING


def test_a_port_is_not_knocked_at_twice_a_second(config: waker.Config) -> None:
    """All who ask within a second, or at the same time, share one look."""
    with bind("127.0.0.1", 0) as port, ThreadPoolExecutor(20) as pool:
        port.listen(99)
        number = int(port.getsockname()[1])
        machine = config.machine._replace(initrd_port=number, system_port=free_port())
        watcher = waker.Watcher(machine)
        asked = pool.map(watcher.check, [100 + n / 100 for n in range(20)])
        assert set(asked) == {LOCKED}
        assert watcher.check(100.6) == LOCKED
        assert watcher.check(100.9) == LOCKED
        assert watcher.check(101.2) == LOCKED
        port.setblocking(False)
        for _ in range(2):
            with port.accept()[0] as connection:
                connection.settimeout(9)
                assert connection.recv(1) == b""  # it has hung up
        with pytest.raises(BlockingIOError):
            port.accept()


def test_those_who_ask_at_the_same_time_share_one_check(config: waker.Config) -> None:
    """It takes its time: the port that both systems share accepts, and is silent."""
    with bind("127.0.0.1", 0) as port, ThreadPoolExecutor(5) as pool:
        port.listen(9)
        number = int(port.getsockname()[1])
        machine = config.machine._replace(initrd_port=number, system_port=number)
        seen = pool.map(waker.Watcher(machine).check, [100] * 5)
        assert set(seen) == {waker.PortStates(CLOSED, CLOSED)}
        port.setblocking(False)
        port.accept()[0].close()
        with pytest.raises(BlockingIOError):
            port.accept()
