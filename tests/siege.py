"""The daemon under attack, and whether its owner still gets through: `make siege`.

Each attack is made three times, on a daemon of its own under the usual limit of 1,024
descriptors, whose stderr is a pipe that nobody reads. The attacker is a process of its
own on the same machine; it opens a connection again two seconds after it was closed.
For ten seconds the owner asks for the page ten times a second.

Then it is done once more over TLS, with an owner whose packets need 250 ms for a round
trip: in network namespaces, between which a program carries them. There the owner asks
once a second and tries three times, for 5 s each. The table shows medians of three:

- p50 and worst: milliseconds until the owner had the whole page, all tries together
- lost: requests of the owner that stayed without an answer
- memory: MB more than before, at the worst; threads, at the worst

    python3 tests/siege.py [NAME-OF-AN-ATTACK ...]
"""

import contextlib
import fcntl
import functools
import itertools
import math
import os
import queue
import resource
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench import LOCAL, SETTINGS, Table, rss
from certificate import new_certificate
from conftest import Daemon, daemon
from namespaces import Namespace, hosts, ip, wire

AGAIN = 2.0  # seconds after which an attacker opens what was closed
HALF_TRIP = 0.125  # seconds that a packet of the owner takes, who is far away
TIMES = 3  # that each attack is made
LIMIT = ("prlimit", "--nofile=1024", "env", "MALLOC_ARENA_MAX=2")  # as in the unit

TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN = 0x1001  # with IFF_NO_PI

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /api/auth HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
# What a connection sends at first, and what every second after it.
KINDS = {
    "slow heads": (GET, b"X: y\r\n"),
    "slow bodies": (POST + b"Content-Length: 16384\r\n\r\n", b"x"),
    "answers not read": (GET + b"\r\n", b""),
    "garbage and stay": (b"\x01\x02\x03\x04", b""),
    "silent connections": (b"", b""),
    "stalled handshakes": (b"", b""),  # with the first half of a hello
    "costly hellos a second": (b"", b""),  # with a whole one, each on a connection
}


class Attack(NamedTuple):
    """What is done, by how many, from how many addresses."""

    kind: str
    number: int
    addresses: int

    def __str__(self) -> str:
        return f"{self.number:,} {self.kind}, from {self.addresses:,}"


def floods(*kinds: str) -> list[Attack]:
    return [Attack(kind, number, number) for kind in kinds for number in (1000, 4000)]


PLAIN = (
    Attack("silent connections", 0, 0),
    *floods("slow heads", "slow bodies", "answers not read", "silent connections"),
    Attack("garbage and stay", 72, 3),
    *floods("garbage and stay"),
)
TLS = (
    Attack("silent connections", 0, 0),
    Attack("stalled handshakes", 200, 200),
    Attack("costly hellos a second", 20, 20),
    *floods("silent connections", "garbage and stay", "stalled handshakes"),
)


# ---- The attacker --------------------------------------------------------------------


def connect(host: str, port: int, address: str) -> socket.socket:
    """Begin to connect from an address."""
    tcp = socket.socket()
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    tcp.bind((address, 0))
    tcp.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        tcp.connect((host, port))
    return tcp


@functools.cache
def record_hello(group: str) -> bytes:
    """Take the hello that `openssl s_client` sends with a key share of that group."""
    with socket.create_server((LOCAL, 0)) as server:
        command = ["openssl", "s_client", "-groups", group]
        command += ["-connect", f"{LOCAL}:{server.getsockname()[1]}"]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as client:
            with server.accept()[0] as tcp, tcp.makefile("rb") as file:
                head = file.read(5)
                hello = head + file.read(int.from_bytes(head[3:]))
            client.kill()
    return hello


def keep_one(host: str, port: int, address: str, kind: str) -> Iterator[None]:
    """Keep one connection open; each step connects, or sends a little more."""
    first, drip = KINDS[kind]
    if kind == "stalled handshakes":
        first = record_hello("X25519")[:100]
    while True:
        tcp, following = connect(host, port, address), first
        while True:
            yield
            try:
                if following:
                    tcp.send(following)
                elif tcp.recv(1, socket.MSG_PEEK) == b"":
                    break
                following = drip
            except BlockingIOError:
                pass
            except OSError:
                break
        tcp.close()
        after = time.monotonic() + AGAIN
        while time.monotonic() < after:
            yield


def keep_open(kind: str, count: int, sources: list[str], host: str, port: int) -> None:
    """Keep `count` connections open; a dripping one has its turn once a second."""
    slots = [
        keep_one(host, port, sources[n % len(sources)], kind) for n in range(count)
    ]
    pace = 1.0 if KINDS[kind][1] else 0.1  # seconds
    while True:
        began = time.monotonic()
        for number, slot in enumerate(slots):
            next(slot)
            early = began + pace * number / count - time.monotonic()
            if early > 0.002:
                time.sleep(early)
        time.sleep(max(began + pace - time.monotonic(), 0))


def send_hellos(rate: int, sources: list[str], host: str, port: int) -> None:
    """Send a costly hello that many times a second, each over a new connection."""
    hello, held = record_hello("ffdhe8192"), []
    for number in itertools.count():
        tcp = connect(host, port, sources[number % len(sources)])
        time.sleep(1 / rate)
        with contextlib.suppress(OSError):
            tcp.send(hello)
        held.append(tcp)
        if len(held) > rate:
            held.pop(0).close()


def attack(kind: str, count: int, addresses: int, host: str, port: int) -> None:
    """Attack until this process is killed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    net = "127.1" if host == LOCAL else "10.3"
    sources = [f"{net}.{n // 250}.{1 + n % 250}" for n in range(addresses)]
    if kind == "costly hellos a second":
        send_hellos(count, sources, host, port)
    keep_open(kind, count, sources, host, port)


# ---- The owner -----------------------------------------------------------------------


def ask(where: tuple[str, int], tls: ssl.SSLContext | None) -> float:
    """Ask for the page, far away three times; returns the milliseconds."""
    began = time.perf_counter()
    for _ in range(3 if tls else 1):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(where, 5 if tls else 20) as tcp,
            tls.wrap_socket(tcp) if tls else tcp as connection,
        ):
            connection.sendall(GET + b"\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
            if answer.startswith(b"HTTP/1.1 200 "):
                return (time.perf_counter() - began) * 1000
    return math.inf


def besiege(
    started: Daemon,
    attacker: Sequence[str],
    where: tuple[str, int],
    tls: ssl.SSLContext | None,
) -> list[float]:
    """Have a daemon attacked, and be its owner meanwhile; returns the figures."""
    pid, answers = started.process.pid, []
    before, memory, threads = rss(pid), 0.0, 0
    with ThreadPoolExecutor(200) as pool, subprocess.Popen(attacker) as attacking:
        time.sleep(2)  # until all of them are there
        for beat in range(100):
            if not tls or beat % 10 == 0:
                answers.append(pool.submit(ask, where, tls))
            memory = max(memory, rss(pid) - before)
            threads = max(threads, len(list(Path(f"/proc/{pid}/task").iterdir())))
            time.sleep(0.1)
        times = sorted(answer.result() for answer in answers)
        attacking.kill()
    lost = times.count(math.inf)
    answered = times[: len(times) - lost] or [math.inf]
    return [statistics.median(answered), answered[-1], lost, memory, threads]


def command(attack: Attack, host: str, port: int) -> list[str]:
    row = [*map(str, attack), host, str(port)]
    return [sys.executable, __file__, "--attack", *row]


def near(attack: Attack) -> list[float]:
    """Attack over loopback, without TLS."""
    with daemon(SETTINGS, *LIMIT) as started:
        where = LOCAL, started.client.port
        return besiege(started, command(attack, *where), where, None)


# ---- The owner who is far away -------------------------------------------------------


def plug_in() -> int:
    """Make a network interface whose packets we carry; returns its descriptor."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"long", IFF_TUN))
    return tun


def carry(from_: int, to: int) -> None:
    """Carry packets from one interface to another, each HALF_TRIP seconds late.

    (The kernel's own netem is not in every kernel.)
    """
    late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        while True:
            due, packet = late.get()
            time.sleep(max(due - time.monotonic(), 0))
            os.write(to, packet)

    threading.Thread(target=deliver, daemon=True).start()
    while packet := os.read(from_, 65536):
        late.put((time.monotonic() + HALF_TRIP, packet))


def lay_long_cable(one: Namespace, address: str, other: Namespace, far: str) -> None:
    """Connect two hosts by a line that takes its time."""
    ends = [place.run(plug_in) for place in (one, other)]
    for place, own in ((one, address), (other, far)):
        ip(f"-n {place.name} address add {own} dev long")
        ip(f"-n {place.name} link set long up")
    for way in (ends, ends[::-1]):
        threading.Thread(target=carry, args=way, daemon=True).start()


def far(attack: Attack) -> list[float]:
    """Attack over TLS, with an owner in another network, 250 ms away."""
    with hosts(3) as (box, attacker, home), tempfile.TemporaryDirectory() as folder:
        wire(box, "bad", "10.1.0.1/16", attacker, "10.1.0.2/16")
        lay_long_cable(box, "10.2.0.1/24", home, "10.2.0.2/24")
        # The attacker's addresses are on its loopback, and routed to it.
        ip(f"-n {attacker.name} route add local 10.3.0.0/16 dev lo")
        ip(f"-n {box.name} route add 10.3.0.0/16 via 10.1.0.2")
        certificate = new_certificate(Path(folder))
        tls = ssl.create_default_context(cafile=str(certificate.cert))
        tls.check_hostname = False
        settings = SETTINGS | certificate.settings() | {"WAKER_LISTEN": "[::]:0"}
        with daemon(settings, *LIMIT, *box.command()) as started:
            port = started.client.port
            attacking = [*attacker.command(), *command(attack, "10.1.0.1", port)]
            where = "10.2.0.1", port
            return home.run(lambda: besiege(started, attacking, where, tls))


def main(names: list[str]) -> None:
    """Print the tables."""
    columns = "p50 ms", "worst ms", "lost", "memory MB", "threads"
    for where, attacks in ((near, PLAIN), (far, TLS)):
        title = "attack, TLS, 250 ms away" if where is far else "attack"
        table = Table(columns, compares=False)
        table.show_head(title)
        for attack in attacks:
            row = str(attack)
            if not names or any(name in row for name in names):
                for _ in range(TIMES):
                    table.add(row, *where(attack))
                table.show_row(row)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        kind, count, addresses, host, port = sys.argv[2:]
        attack(kind, int(count), int(addresses), host, int(port))
    main(sys.argv[1:])
