"""How the machine's state is observed, and how the magic packet leaves."""

import contextlib
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    MACHINE,
    PIN,
    daemon,
    each,
    interpose,
    run_waker,
    wait_for,
    with_limits,
)
from homelab import DROPBEAR, MAC, OPENSSH, PACKET, tcp_server
from machine import CLOSED, OPEN, SILENT, Machine, wait_for_state, wait_until
from namespaces import Home, ip, udp_packets
from ssh_servers import free_port, says

import waker


def state(host: str, initrd_port: int = 2222, system_port: int = 22, *by: str) -> Any:
    """Return what `waker state` prints, which needs no other settings."""
    where = {
        "WAKER_HOMELAB_HOST": host,
        "WAKER_INITRD_SSH_PORT": str(initrd_port),
        "WAKER_SYSTEM_SSH_PORT": str(system_port),
    }
    return json.loads(run_waker("state", settings=where, by=by).stdout)


# ---- What the ports show -------------------------------------------------------------

MEMBERS = "state", "reachable", "initrd_ssh_open", "system_ssh_open"
STATES = {
    "off": (SILENT, SILENT, ("off", False, False, False)),
    "booting": (CLOSED, SILENT, ("booting", True, False, False)),
    "locked": (OPEN, CLOSED, ("locked", True, True, False)),
    "up": (CLOSED, OPEN, ("up", True, False, True)),
    "both open": (OPEN, OPEN, ("up", True, True, True)),
}


@each("initrd system expected", STATES)
def test_the_status_shows_what_the_ports_do(
    machine: Machine, initrd: str, system: str, expected: tuple[object, ...]
) -> None:
    machine.show(initrd, system)
    with machine.waker() as started:
        status = started.client.status()
    assert (status["name"], status["start"]) == ("Home server", None)
    printed = state("127.0.0.1", machine.initrd_port, machine.system_port)
    for shown in (status, printed):
        assert tuple(shown[name] for name in MEMBERS) == expected


BANNERS = {
    "dropbear": (f"{DROPBEAR}\r\n", "locked"),
    # The key exchange follows at once.
    "OpenSSH": (f"{OPENSSH}\r\n\0\0\1\xacdropbear\n", "up"),
    "half a banner": (DROPBEAR[:8], "booting"),
    "no banner": ("", "booting"),
}


@each("banner expected", BANNERS)
def test_one_port_is_told_apart_by_its_banner(banner: str, expected: str) -> None:
    with says(banner.encode("latin-1")) as port:
        assert state("127.0.0.1", port, port)["state"] == expected


def test_an_address_may_be_unknown_absent_or_an_ipv6_one(home: Home) -> None:
    router = home[0]
    # Linux lets nobody connect to a broadcast address. That is no state of the machine.
    seen = state("127.255.255.255")
    assert (seen["state"], seen["reachable"]) == ("unknown", False)
    # Once a machine has not answered ARP for a while, Linux reports it as unreachable.
    ip(f"-n {router.name} route add unreachable 192.168.77.99")
    for address, expected in (("192.168.77.99", "off"), ("::1", "booting")):
        assert state(address, 2222, 22, *router.command())["state"] == expected


def test_only_a_real_connection_means_an_open_port(tmp_path: Path) -> None:
    """Linux can wake a connecting thread before it records the error.

    This happens to about 1 in 10,000 connections. Source: tcp_v4_err, tcp_ipv4.c
    """
    library = interpose(tmp_path, "int connect(void) { return 0; }")
    by = "env", f"LD_PRELOAD={library}"
    seen = state("127.0.0.1", free_port(), free_port(), *by)
    assert seen["state"] == "unknown"


# ---- In time, and not too often ------------------------------------------------------


def test_the_status_of_a_silent_machine_comes_within_a_second(machine: Machine) -> None:
    def take_time() -> float:
        began = time.monotonic()
        assert client.status()["state"] == "off"
        return time.monotonic() - began

    with machine.waker(SYSTEM_SECONDS=0) as started:  # both ports, each time
        client = started.client
        # A busy computer may need a second attempt.
        wait_for(take_time, lambda seconds: seconds < 1, seconds=8)
        client.start()
        wait_for(take_time, lambda seconds: 0.5 < seconds < 1, seconds=8)


@pytest.mark.parametrize("state", ["booting", "locked"])
def test_a_second_of_requests_costs_one_check(machine: Machine, state: str) -> None:
    """OpenSSH penalises clients that connect too often.

    If both have one port, a check waits 0.4 s for the banner of this server, so that
    other requests come in the meantime.
    """
    mute = socket.create_server(("127.0.0.1", 0), backlog=99)
    with mute, ThreadPoolExecutor(9) as pool:
        port = str(mute.getsockname()[1])
        shared = {"SYSTEM_SSH_PORT": port} if state == "booting" else {}
        settings = machine.settings(INITRD_SSH_PORT=port, **shared)
        with machine.waker(settings) as started:
            began = time.monotonic()

            def ask(_: int) -> set[str]:
                seen = set()
                while time.monotonic() < began + 2.5:
                    seen.add(started.client.status()["state"])
                    time.sleep(0.05)
                return seen

            assert {state}.union(*pool.map(ask, range(9))) == {state}
            seconds = time.monotonic() - began
        assert count_connections(mute) <= seconds + 2  # one came with the token


def count_connections(listener: socket.socket) -> int:
    """Count the connections that have arrived since the last call."""
    listener.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


def test_an_open_system_is_checked_every_8_s_or_if_it_matters(machine: Machine) -> None:
    """`ufw limit` allows six connections in 30 s, and the owner's own SSH needs one.

    But if the initrd is back, as after kexec, the system has gone at once. And no
    unlock is told that the system is up by an old look.
    """
    machine.show(CLOSED, CLOSED)
    address = "127.0.0.1", machine.system_port
    with socket.create_server(address, backlog=99) as system:
        with machine.waker() as started:
            look = started.client.status
            began = time.monotonic()
            while time.monotonic() < began + 2.5:
                assert look()["state"] == "up"
                time.sleep(0.1)
            assert count_connections(system) == 1
            system.close()
            machine.show(OPEN, CLOSED)
            wait_for_state(started.client, "locked", 4)
            machine.show(CLOSED, OPEN)
            wait_for_state(started.client, "up", 4)
            began = time.monotonic()
            machine.show(CLOSED, CLOSED)
            wait_for(lambda: time.monotonic() > began + 1.2)
            assert look()["state"] == "up"
            answer = started.client.unlock()
    assert answer.status == 500
    assert "not sent" in answer.error


Looks = tuple[tuple[float, str, str, str], ...]
# Seconds, what the ports do then, and the state that is shown.
LOST: dict[str, Looks] = {
    "of the initrd": (
        (0, OPEN, CLOSED, "locked"),
        (1, SILENT, CLOSED, "locked"),
        (2, OPEN, CLOSED, "locked"),
        (3, SILENT, CLOSED, "locked"),
        (4, SILENT, CLOSED, "booting"),
    ),
    "of the system": (
        (0, CLOSED, OPEN, "up"),
        (8, CLOSED, SILENT, "up"),
        (9, CLOSED, OPEN, "up"),
        (17, CLOSED, SILENT, "up"),
        (18, CLOSED, SILENT, "booting"),
    ),
    "after a long time": (
        (0, CLOSED, OPEN, "up"),
        (20, CLOSED, SILENT, "booting"),
        (21, CLOSED, OPEN, "up"),
    ),
    "switched off": (
        (0, CLOSED, OPEN, "up"),
        (1, SILENT, SILENT, "up"),
        (2, SILENT, SILENT, "off"),
    ),
    "refused": ((0, OPEN, CLOSED, "locked"), (1, CLOSED, CLOSED, "booting")),
    "long ago": ((0, OPEN, SILENT, "locked"), (10, SILENT, SILENT, "off")),
}


@pytest.mark.parametrize("looks", LOST.values(), ids=LOST)
def test_one_lost_packet_is_no_news(machine: Machine, looks: Looks) -> None:
    """An open port survives one silence. But what decides is told the truth."""
    watcher = waker.Watcher(machine.config(machine.settings(PIN=PIN)))
    for now, initrd, system, state in looks:
        machine.show(initrd, system)
        assert watcher.probe_for_status(now).members()["state"] == state
        assert watcher.probe(now).initrd.value == initrd
    for ports in ((OPEN, OPEN), (SILENT, SILENT)):
        machine.show(*ports)
        states = watcher.probe(now, fresh=True)
        assert tuple(each.value for each in states) == ports


# What a fifth decision sees after 4 s, and what the status shows after 5, 29 and 30 s.
LIMITED_LOOKS = {
    "silent": ((SILENT, SILENT), (OPEN, CLOSED), "locked locked locked"),
    "a lost packet": ((CLOSED, SILENT), (CLOSED, OPEN), "up up up"),
    "none": (None, (OPEN, CLOSED), "up up locked"),
}


@each("seen then states", LIMITED_LOOKS)
def test_the_limit_for_firewalls_hides_no_silence(
    machine: Machine, seen: tuple[str, str] | None, then: tuple[str, str], states: str
) -> None:
    """After four decisions, the status may not probe an open port for 30 s."""
    watcher = waker.Watcher(machine.config(machine.settings(PIN=PIN)))
    machine.show(CLOSED, OPEN)
    for now in range(4):
        watcher.probe(now, fresh=True)
    if seen:
        machine.show(*seen)
        watcher.probe(4, fresh=True)
    machine.show(*then)
    shown = [watcher.probe_for_status(now).members()["state"] for now in (5, 29, 30)]
    assert shown == states.split()


def test_requests_that_come_during_a_probe_wait_for_it(machine: Machine) -> None:
    """Or the first ones would be told nothing, or what was seen hours ago."""
    machine.show(SILENT, CLOSED)  # which takes 0.4 s
    watcher = waker.Watcher(machine.config(machine.settings(PIN=PIN)))
    with ThreadPoolExecutor(5) as pool:
        shown = {*pool.map(watcher.probe_for_status, [0] * 5)}
    assert [states.members()["state"] for states in shown] == ["booting"]


def busy_watcher(seconds: float) -> Any:
    """Return a watcher whose probes take that long, and which counts them."""

    class Busy(waker.Watcher):
        count = 0
        begun, may_end = threading.Event(), threading.Event()

        def _probe_ports(self, now: float, *, fresh: bool) -> None:
            self.count += 1
            self.begun.set()
            self.may_end.wait(seconds)

    return Busy(waker.Config())


def test_a_status_that_waited_for_a_probe_makes_none() -> None:
    """Both together could take 1.6 s."""

    def count_probes() -> int:
        watcher = busy_watcher(0.4)
        with ThreadPoolExecutor() as pool:
            pool.submit(watcher.probe, 0, fresh=True)
            watcher.begun.wait(50)
            watcher.probe_for_status(9)
        return int(watcher.count)

    # A busy computer may need a second attempt.
    wait_for(count_probes, lambda count: count == 1, seconds=8)


def test_the_status_does_not_wait_for_several_decisions() -> None:
    watcher = busy_watcher(9)  # as for one decision after the other
    with ThreadPoolExecutor() as pool:
        deciding = pool.submit(watcher.probe, 0, fresh=True)
        watcher.begun.wait(50)
        status = pool.submit(watcher.probe_for_status, 0)
        wait_for(lambda: status.done() or deciding.done())
        assert not deciding.done()
        watcher.may_end.set()


def test_the_owner_can_log_in_through_a_firewall_that_counts(machine: Machine) -> None:
    """Four connections in 30 s are waker's, unless something is decided by them."""
    watcher = waker.Watcher(machine.config(machine.settings(PIN=PIN)))
    address = "127.0.0.1", machine.system_port
    counts = []
    machine.show(CLOSED, CLOSED)
    with socket.create_server(address, backlog=99) as system:
        for now in range(60):
            machine.show(OPEN if now % 2 else CLOSED, CLOSED)  # it is news each time
            watcher.probe_for_status(now)
            counts.append(count_connections(system))
        watcher.probe(now, fresh=True)
        assert count_connections(system) == 1
    assert [now for now in range(60) if counts[now]] == [0, 1, 2, 3, 30, 31, 32, 33]


def test_one_port_is_spared_as_well_while_the_system_is_up(machine: Machine) -> None:
    port, seen = str(machine.system_port), []

    def serve(tcp: socket.socket) -> None:
        seen.append(tcp)
        tcp.sendall(f"{OPENSSH}\r\n".encode())

    with machine.waker(machine.settings(INITRD_SSH_PORT=port)) as started:
        assert started.client.status()["state"] == "off"
        machine.show(CLOSED, CLOSED)
        with tcp_server(serve, port=machine.system_port):
            wait_for_state(started.client, "up")
            began = time.monotonic()
            while time.monotonic() < began + 2.5:
                assert started.client.status()["state"] == "up"
                time.sleep(0.1)
    assert len(seen) == 1


def test_a_start_spares_what_a_firewall_allows(home: Home, machine: Machine) -> None:
    """Or it would itself keep the system that it waits for from answering."""
    router, server, _ = home
    where = {"HOMELAB_HOST": "192.168.77.20", "HOMELAB_BROADCAST": ""}
    settings, host = machine.settings(**where), router.command()
    program, tried = with_limits(machine.folder, SYSTEM_SECONDS=2), 0
    with server.capture() as packets, daemon(settings, *host, program=program) as it:
        router.run(lambda: it.client.log_in().start())
        began = time.monotonic()
        while time.monotonic() < began + 4.5:
            with contextlib.suppress(TimeoutError):
                packet = packets.recv(2048)
                is_there = packet[22:24] == machine.system_port.to_bytes(2)
                tried += is_there and packet[33] == 2  # SYN alone
    assert 3 <= tried <= 4


# ---- The magic packet ----------------------------------------------------------------

LIMITED = "255.255.255.255"
# Where the packet is sent to, for which server, and what is wrong with it.
DESTINATIONS = {
    "limited": (LIMITED, "192.168.77.20", ""),
    "directed": ("192.168.77.255", "192.168.77.20", ""),
    "of loopback": ("127.255.255.255", "127.0.0.1", ""),
    "of another network": ("203.0.113.255", "203.0.113.9", ""),
    "limited, elsewhere": (LIMITED, "203.0.113.9", "the server is on another network"),
    "the server": ("192.168.77.20", "192.168.77.20", "not a broadcast address"),
    "of a smaller network": (
        "192.168.77.127",
        "192.168.77.20",
        "not a broadcast address",
    ),
    "the network": ("192.168.77.0", "192.168.77.20", "not a broadcast address"),
    "a netmask": ("255.255.255.0", "192.168.77.20", "not a broadcast address"),
    "nowhere": ("0.0.0.0", "192.168.77.20", "not a broadcast address"),
}


def test_a_packet_that_wakes_nobody_is_found_out(home: Home) -> None:
    router = home[0]
    for broadcast, host, expected in DESTINATIONS.values():
        settings = MACHINE | {"WAKER_HOMELAB_HOST": host, "WAKER_PIN": PIN}
        settings["WAKER_HOMELAB_BROADCAST"] = broadcast
        config = waker.read_config(settings, Path())
        problem = router.run(partial(waker.find_packet_problem, config))
        assert expected in problem
        assert bool(problem) == bool(expected)


WOKE_NOBODY = {
    "elsewhere": (LIMITED, "203.0.113.9", "the server is on another network"),
    "the server": ("192.168.77.30", "192.168.77.30", "not a broadcast address"),
}


@each("broadcast host expected", WOKE_NOBODY)
def test_a_start_whose_packets_woke_nobody_says_why(
    home: Home, machine: Machine, broadcast: str, host: str, expected: str
) -> None:
    router = home[0]
    settings = machine.settings(HOMELAB_HOST=host, HOMELAB_BROADCAST=broadcast)
    program = with_limits(machine.folder, START_SECONDS=2)
    with daemon(settings, *router.command(), program=program) as started:

        def start() -> Any:
            started.client.log_in().start()
            return wait_until(started.client, "failed")

        ended = router.run(start)
    assert (ended["outcome"], ended["woke"]) == ("not_awake", True)
    assert re.search(f"did not answer.*{expected}.*not sent", ended["message"])


# The second packet does not leave.
ONE_LEAVES = """
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

ssize_t sendto(int fd, const void *data, size_t size, int flags,
               const struct sockaddr *to, socklen_t length) {
    static int count;
    if (count++ == 0)
        return syscall(SYS_sendto, fd, data, size, flags, to, length);
    errno = ENETDOWN;
    return -1;
}
"""


def test_one_packet_that_left_is_a_success(machine: Machine, tmp_path: Path) -> None:
    settings = machine.settings() | {"LD_PRELOAD": interpose(tmp_path, ONE_LEAVES)}
    with machine.waker(settings) as started:
        answer = started.client.call("POST", "/api/wol")
    assert (answer.status, machine.packets()) == (200, [PACKET])


@pytest.mark.parametrize("broadcast", [LIMITED, "192.168.77.255"])
def test_the_packet_leaves_by_the_right_interface(home: Home, broadcast: str) -> None:
    """The one that leads to the machine, without configuration. To UDP port 9."""
    router, machine, provider = home
    settings = MACHINE | {"WAKER_HOMELAB_HOST": "192.168.77.20"}
    if broadcast != LIMITED:  # the default
        settings["WAKER_HOMELAB_BROADCAST"] = broadcast
    at_machine, at_provider = machine.capture(), provider.capture()
    with at_machine, at_provider, daemon(settings, *router.command()) as started:
        answer = router.run(lambda: started.client.log_in().call("POST", "/api/wol"))
        assert udp_packets(at_machine) == [(f"{broadcast}:9", PACKET)] * 3
        assert udp_packets(at_provider) == []
    message = f"Magic packet sent to {MAC} from 192.168.77.1"
    assert (answer.status, answer.json) == (200, {"success": True, "message": message})
