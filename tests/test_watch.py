"""How the machine's state is observed, where its ports are not plain to see.

The usual states are in test_promises.py.
"""

import contextlib
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import CHECKOUT, MODULE, daemon, environment, shortened, wait_for
from homelab import DROPBEAR, bind
from machine import CLOSED, OPEN, Machine
from namespaces import Home, ip
from ssh_servers import free_port, tcp_server

import waker


def state(host: str, initrd_port: int, system_port: int, *command: str) -> str:
    """Return what `waker state` reports. A command may be needed to run it."""
    where = {
        "WAKER_HOMELAB_HOST": host,
        "WAKER_INITRD_SSH_PORT": str(initrd_port),
        "WAKER_SYSTEM_SSH_PORT": str(system_port),
    }
    run = [*command, *MODULE, "state"]
    shown = subprocess.check_output(run, cwd=CHECKOUT, env=environment(where))
    return str(json.loads(shown)["state"])


def test_half_a_banner_is_none() -> None:
    """Or a locked machine with one port for both could be taken for one that is up."""
    with tcp_server(lambda tcp: tcp.sendall(DROPBEAR[:8].encode())) as port:
        assert state("127.0.0.1", port, port) == "booting"


def test_what_follows_a_banner_is_no_part_of_it() -> None:
    with tcp_server(lambda tcp: tcp.sendall(b"SSH-2.0-x\r\n\x00\nkeys")) as port:
        seen = waker.probe_port("127.0.0.1", port, banner=True)
    assert seen == (waker.PortState.OPEN, "SSH-2.0-x")


def test_a_machine_that_does_not_answer_arp_is_off(home: Home) -> None:
    """After a while, Linux reports it as unreachable."""
    router, absent = home[0], "192.168.77.99"
    ip(f"-n {router.name} route add unreachable {absent}")
    assert state(absent, 2222, 22, *router.command()) == "off"


def test_a_machine_may_have_an_ipv6_address() -> None:
    with socket.socket(socket.AF_INET6) as tcp:
        try:
            tcp.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"need ::1: {error.strerror}")
        tcp.listen()
        assert state("::1", tcp.getsockname()[1], free_port()) == "locked"


def test_only_a_real_connection_means_an_open_port(home: Home) -> None:
    """Linux can wake a connecting thread before it records the error.

    This happens to about 1 in 10,000 connections. To provoke it, the test takes the
    error away. Source: tcp_v4_err, net/ipv4/tcp_ipv4.c
    """
    interval = Path("/proc/sys/net/ipv4/neigh/lan/retrans_time_ms")
    home[0].run(lambda: interval.write_text("50"))

    def take_error() -> tuple[int, tuple[waker.PortState, str]]:
        with socket.socket() as tcp:  # the next socket gets its number
            error, place = 0, (tcp.fileno(), tcp.family, tcp.type)
        with ThreadPoolExecutor() as pool:
            probe = pool.submit(
                home[0].run, lambda: waker.probe_port("192.168.77.99", 22)
            )
            while not (error or probe.done()):
                # Until the socket exists, its number is unused, or another file's.
                with contextlib.suppress(OSError), socket.fromfd(*place) as same:
                    while not (error or probe.done()):
                        error = same.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return error, probe.result()

    # On a busy computer, the error may be missed; the next probe has one again.
    _, (seen, _) = wait_for(take_error, lambda taken: taken[0])
    assert seen is waker.PortState.UNKNOWN


# ---- A firewall that limits connections, such as `ufw limit` -------------------------


def test_the_status_looks_at_an_open_system_every_8_s(machine: Machine) -> None:
    """The owner's own SSH needs one of six connections in 30 s."""
    machine.show(CLOSED)
    with bind("127.0.0.1", 0) as system:
        system.listen(99)
        settings = machine.settings(SYSTEM_SSH_PORT=str(system.getsockname()[1]))
        with daemon(settings) as started:
            client, began = started.client.log_in(), time.monotonic()
            while time.monotonic() < began + 3:
                assert client.status()["state"] == "up"
        system.setblocking(False)
        system.accept()[0].close()
        with pytest.raises(BlockingIOError):
            system.accept()


def test_a_system_that_has_gone_is_seen_at_once_if_its_initrd_is_back(
    machine: Machine,
) -> None:
    """As after kexec, which no look at the system's port would show for 8 s."""
    with daemon(machine.show(CLOSED, OPEN).settings()) as started:
        client = started.client.log_in()
        assert client.status()["state"] == "up"
        machine.show(OPEN, CLOSED)
        wait_for(client.status, lambda now: now["state"] == "locked", seconds=4)


def test_nobody_is_told_that_a_system_is_up_by_an_old_look(machine: Machine) -> None:
    """The status may show it, but an unlock looks again."""
    machine.make_keys()
    with machine.show(CLOSED, OPEN).waker() as started:
        client = started.client.log_in()
        began = time.monotonic()
        machine.show(CLOSED, CLOSED)
        wait_for(lambda: time.monotonic() > began + 1.2)
        assert client.status()["state"] == "up"
        answer = client.unlock()
    assert answer.status == 500
    assert "not sent" in answer.error


def count_syns(capture: socket.socket, port: int, seconds: float) -> int:
    """Count the connections to a port that are tried in that time."""
    count, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        with contextlib.suppress(TimeoutError):
            packet = capture.recv(2048)
            is_tcp = packet[:1] == b"\x45" and packet[9] == socket.IPPROTO_TCP
            is_there = int.from_bytes(packet[22:24], "big") == port
            count += is_tcp and is_there and packet[33] == 2  # SYN alone
    return count


def test_a_start_does_not_use_up_what_a_firewall_allows(
    home: Home, machine: Machine
) -> None:
    """Or it would itself keep the system that it waits for from answering."""
    router, server, _ = home
    machine.make_keys()
    where = {"HOMELAB_HOST": "192.168.77.20", "HOMELAB_BROADCAST": ""}
    settings, host = machine.settings(**where), router.command()
    program = shortened(machine.folder, system_seconds=2)
    with server.capture() as packets, daemon(settings, *host, program=program) as it:
        router.run(lambda: it.client.log_in().start())
        tried = count_syns(packets, machine.system_port, 7)
    assert 2 <= tried <= 5
