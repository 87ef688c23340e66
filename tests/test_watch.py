"""How the machine's state is observed, where its ports are not plain to see.

The usual states are in test_promises.py.
"""

import contextlib
import json
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import CHECKOUT, MODULE, environment, wait_for
from homelab import DROPBEAR
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
