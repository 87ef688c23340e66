"""Network namespaces: hosts within this computer, connected as in a home network.

Any function can run in a namespace. The sockets that it opens stay in that namespace,
even if code outside uses them later.
"""

import contextlib
import ctypes
import fcntl
import io
import secrets
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from conftest import need, need_root

T = TypeVar("T")

CLONE_NEWNET = 0x40000000  # linux/sched.h
ETH_P_ALL = 0x0003  # linux/if_ether.h
TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN, IFF_TAP, IFF_NO_PI = 0x0001, 0x0002, 0x1000


def ip(arguments: str) -> None:
    """Run `ip`."""
    subprocess.run([need("ip"), *arguments.split()], check=True, capture_output=True)


class Namespace(NamedTuple):
    """A host."""

    name: str

    def command(self) -> list[str]:
        """Return the prefix for a command that is to run here."""
        return [need("ip"), "netns", "exec", self.name]

    def run(self, function: Callable[[], T]) -> T:
        """Call a function in a thread of this namespace."""

        def move() -> None:
            with Path(f"/run/netns/{self.name}").open() as place:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(place.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")

        with ThreadPoolExecutor(1, initializer=move) as thread:
            return thread.submit(function).result()

    def plug_in(self, kind: int, name: str, address: str) -> io.FileIO:
        """Add a TUN or TAP interface; the file reads and writes its packets."""
        try:
            tun = self.run(lambda: io.FileIO("/dev/net/tun", "r+"))
        except OSError as error:  # in a container, or if only root may open it
            pytest.skip(f"need /dev/net/tun: {error.strerror}")
        request = struct.pack("16sH22x", name.encode(), kind | IFF_NO_PI)
        fcntl.ioctl(tun, TUNSETIFF, request)
        ip(f"-n {self.name} address add {address} brd + dev {name}")
        ip(f"-n {self.name} link set {name} up")
        return tun

    def capture(self) -> socket.socket:
        """Open a socket that receives every frame that arrives at this host."""
        kind, protocol = socket.SOCK_DGRAM, socket.htons(ETH_P_ALL)
        packets = self.run(lambda: socket.socket(socket.AF_PACKET, kind, protocol))
        packets.settimeout(0.3)
        return packets


def wire(one: Namespace, name: str, address: str, other: Namespace, far: str) -> None:
    """Connect two hosts by a cable; `name` is the interface of the first one."""
    ip(f"link add {name} netns {one.name} type veth peer name eth0 netns {other.name}")
    for place, own, end in ((one, address, name), (other, far, "eth0")):
        ip(f"-n {place.name} addr add {own} brd + dev {end}")
        ip(f"-n {place.name} link set {end} up")


def udp_packets(capture: socket.socket) -> list[tuple[str, bytes]]:
    """Read the UDP packets that arrived; returns destinations and payloads."""
    found = []
    with contextlib.suppress(TimeoutError):
        while packet := capture.recv(2048):
            if packet[:1] == b"\x45" and packet[9] == socket.IPPROTO_UDP:
                port = int.from_bytes(packet[22:24], "big")
                found.append((f"{socket.inet_ntoa(packet[16:20])}:{port}", packet[28:]))
    return found


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Namespace]]:
    need_root()
    with contextlib.ExitStack() as stack:
        made = [Namespace(f"waker-{secrets.token_hex(6)}") for _ in range(count)]
        for host in made:
            ip(f"netns add {host.name}")
            stack.callback(ip, f"netns del {host.name}")
            ip(f"-n {host.name} link set lo up")
        yield made


Home = tuple[Namespace, Namespace, Namespace]


@pytest.fixture
def home() -> Iterator[Home]:
    """Make a router, a machine at its `lan` port, and a provider at its `wan` port."""
    with hosts(3) as (router, machine, provider):
        wire(router, "lan", "192.168.77.1/24", machine, "192.168.77.20/24")
        wire(router, "wan", "198.51.100.2/24", provider, "198.51.100.1/24")
        ip(f"-n {router.name} route add default via 198.51.100.1")
        yield router, machine, provider
