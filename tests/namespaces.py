"""Network namespaces: other hosts on this machine, wired as a home is.

A function that runs in a namespace is an ordinary one; the sockets that it makes stay
there, whoever uses them later.
"""

import contextlib
import ctypes
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from conftest import need, need_root

T = TypeVar("T")

CLONE_NEWNET = 0x40000000  # linux/sched.h
ETH_P_ALL = 0x0003  # linux/if_ether.h
NUMBERS = itertools.count()


def ip(arguments: str) -> None:
    """Run `ip`."""
    subprocess.run([need("ip"), *arguments.split()], check=True, capture_output=True)


class Namespace:
    """A host."""

    def __init__(self) -> None:
        self.name = f"waker-{os.getpid()}-{next(NUMBERS)}"
        ip(f"netns add {self.name}")
        ip(f"-n {self.name} link set lo up")

    def close(self) -> None:
        ip(f"netns del {self.name}")

    def command(self) -> list[str]:
        """Tell what to put before a command that is to run here."""
        return [need("ip"), "netns", "exec", self.name]

    def run(self, function: Callable[[], T]) -> T:
        """Call a function in a thread that has moved here."""
        results: list[T] = []
        errors: list[BaseException] = []

        def moved() -> None:
            try:
                with Path(f"/run/netns/{self.name}").open() as place:
                    libc = ctypes.CDLL(None, use_errno=True)
                    if libc.setns(place.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                results.append(function())
            except BaseException as error:  # noqa: BLE001 - raised again, below
                errors.append(error)

        thread = threading.Thread(target=moved)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def capture(self) -> socket.socket:
        """Hear every frame that arrives at this host."""

        def listen() -> socket.socket:
            packets = socket.socket(
                socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL)
            )
            packets.settimeout(0.3)
            return packets

        return self.run(listen)


def wire(one: Namespace, name: str, address: str, other: Namespace, far: str) -> None:
    """Lay a cable between two hosts; `name` is the interface at the first one."""
    ip(f"link add {name} netns {one.name} type veth peer name eth0 netns {other.name}")
    ip(f"-n {one.name} addr add {address} brd + dev {name}")
    ip(f"-n {other.name} addr add {far} brd + dev eth0")
    ip(f"-n {one.name} link set {name} up")
    ip(f"-n {other.name} link set eth0 up")


def udp_packets(capture: socket.socket) -> list[tuple[str, bytes]]:
    """Read what has arrived: the destination and the payload of each UDP packet."""
    found = []
    try:
        while True:
            packet = capture.recv(2048)
            if packet[:1] == b"\x45" and packet[9] == socket.IPPROTO_UDP:
                port = int.from_bytes(packet[22:24], "big")
                found.append((f"{socket.inet_ntoa(packet[16:20])}:{port}", packet[28:]))
    except TimeoutError:
        return found


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Namespace]]:
    need_root()
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Namespace())) for _ in range(count)
        ]


@pytest.fixture
def home() -> Iterator[tuple[Namespace, Namespace, Namespace]]:
    """Make a router, the machine behind its `lan`, and a provider behind its `wan`."""
    with hosts(3) as (router, machine, provider):
        wire(router, "lan", "192.168.77.1/24", machine, "192.168.77.20/24")
        wire(router, "wan", "198.51.100.2/24", provider, "198.51.100.1/24")
        ip(f"-n {router.name} route add default via 198.51.100.1")
        yield router, machine, provider
