"""The daemon under attack, and whether its owner still gets through: `make siege`.

Each attack is made three times, on a daemon of its own under the usual limit of 1,024
descriptors, whose stderr is a pipe that nobody reads. The attacker is a process of its
own on the same machine; it opens a connection again two seconds after it was closed.
The owner asks for the page ten times a second, each time over a new connection.

Then everything is done once more over TLS, with an owner whose packets need 250 ms for
a round trip: in network namespaces, between which a program carries them. There the
owner asks once a second and tries three times, for 5 s each. What the table tells, as
medians of three:

- p50 and worst: milliseconds until the owner had the whole answer, all tries together
- lost: requests of the owner that stayed without an answer
- memory: MB more than before, at the worst; threads, at the worst

Before the table, it prints what the costliest inputs cost.

    python3 tests/siege.py [--costs] [NAME-OF-AN-ATTACK ...]
"""

import contextlib
import fcntl
import functools
import http.client
import io
import itertools
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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from certificate import new_certificate
from conftest import PIN, Daemon, daemon
from namespaces import Namespace, hosts, ip, wire

import waker

SECONDS = 10.0  # of each attack
AGAIN = 2.0  # seconds after which an attacker opens what was closed
HALF_TRIP = 0.125  # seconds that a packet of the owner takes, who is far away
TRIES = 3  # of this owner
PATIENCE = 5  # seconds of each of these tries
TIMES = 3  # that each attack is made

TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN = 0x1001  # with IFF_NO_PI


# ---- The attacker --------------------------------------------------------------------

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /api/auth HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
# What is sent at first, and what every second after it.
KINDS = {
    "slow heads": (GET, b"X: y\r\n"),
    "slow bodies": (POST + b"Content-Length: 16384\r\n\r\n", b"x"),
    "answers not read": (GET + b"\r\n", b""),
    "garbage and stay": (b"\x01\x02\x03\x04", b""),
    "idle": (b"", b""),
    "stalled handshakes": (b"", b""),  # with the first half of a hello
    "costly hellos": (b"", b""),  # with a whole one, and a new connection each time
}


def source(number: int) -> str:
    """Name one of the 60,000 addresses that an attacker has on loopback."""
    return f"127.{1 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"


def connect(host: str, port: int, address: str) -> socket.socket:
    """Begin to connect from an address."""
    tcp = socket.socket()
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    tcp.bind((address, 0))
    tcp.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        tcp.connect((host, port))
    return tcp


class Slot:
    """One connection of the attacker's, opened again two seconds after it is closed."""

    def __init__(self, host: str, port: int, address: str, kind: str) -> None:
        self._where = host, port, address
        self._first, self._drip = KINDS[kind]
        if kind == "stalled handshakes":
            self._first = record_hello("X25519")[:100]
        self._tcp: socket.socket | None = None
        self._next = b""
        self._after = 0.0

    def tick(self) -> None:
        """Connect, or send a little more."""
        if self._tcp is None:
            if time.monotonic() >= self._after:
                self._tcp, self._next = connect(*self._where), self._first
            return
        try:
            if self._next:
                self._tcp.send(self._next)
            elif self._tcp.recv(1, socket.MSG_PEEK) == b"":
                raise ConnectionResetError
            self._next = self._drip
        except BlockingIOError:
            pass
        except OSError:
            self._tcp.close()
            self._tcp, self._after = None, time.monotonic() + AGAIN


@functools.cache
def record_hello(group: str) -> bytes:
    """Take the hello that `openssl s_client` sends with a key share of that group."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}"]
        command += ["-groups", group]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as client:
            with server.accept()[0] as tcp:
                hello = tcp.recv(65536)
                while len(hello) < 5 + int.from_bytes(hello[3:5], "big"):
                    hello += tcp.recv(65536)
            client.kill()
    return hello


def keep_open(kind: str, count: int, sources: list[str], host: str, port: int) -> None:
    """Keep `count` connections open; each has its turn ten times a second."""
    slots = [Slot(host, port, sources[n % len(sources)], kind) for n in range(count)]
    pace = 0.1 if KINDS[kind][1] == b"" else 1.0  # seconds
    while True:
        began = time.monotonic()
        for number, slot in enumerate(slots):
            slot.tick()
            early = began + pace * number / count - time.monotonic()
            if early > 0.002:
                time.sleep(early)


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


# ---- The owner -----------------------------------------------------------------------


class Owner:
    """Asks for the page, from near or from far away."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self.times: list[float] = []  # milliseconds
        self.lost = 0

    def _ask_once(self) -> bool:
        patience = PATIENCE if self._tls else 20
        connection = (
            http.client.HTTPSConnection(
                self._host, self._port, timeout=patience, context=self._tls
            )
            if self._tls
            else http.client.HTTPConnection(self._host, self._port, timeout=patience)
        )
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/")
            answer = connection.getresponse()
            return answer.status == 200 and bool(answer.read())
        return False

    def ask(self) -> None:
        """Make a request; far away, try three times."""
        began = time.perf_counter()
        for _ in range(TRIES if self._tls else 1):
            if self._ask_once():
                self.times.append((time.perf_counter() - began) * 1000)
                return
        self.lost += 1

    def ask_often(self) -> None:
        """Make a request at each beat, whether the ones before are answered or not."""
        pace, threads = 1.0 if self._tls else 0.1, []
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends:
            threads.append(threading.Thread(target=self.ask))
            threads[-1].start()
            time.sleep(pace)
        for thread in threads:
            thread.join()


class Watch(threading.Thread):
    """Notes the most memory and threads that a daemon has."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._proc = Path(f"/proc/{pid}")
        self.before = self.rss = self._read_rss()
        self.threads, self.over = 0, False

    def _read_rss(self) -> float:
        pages = int((self._proc / "statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6

    def run(self) -> None:
        while not self.over:
            self.rss = max(self.rss, self._read_rss())
            count = len(list((self._proc / "task").iterdir()))
            self.threads = max(self.threads, count)
            time.sleep(0.1)


class Figures(NamedTuple):
    """What was measured in one attack."""

    p50: float
    worst: float
    lost: float
    memory: float
    threads: float


class Attack(NamedTuple):
    """What is done, by how many, from how many addresses."""

    kind: str
    how_many: int
    addresses: int

    def __str__(self) -> str:
        if self.kind == "costly hellos":
            return f"{self.how_many} costly hellos a second"
        return f"{self.how_many:,} {self.kind}, from {self.addresses:,}"


NONE = Attack("none", 0, 1)
PLAIN = (
    NONE,
    *(
        Attack(kind, count, count)
        for kind in ("slow heads", "slow bodies", "answers not read", "idle")
        for count in (1000, 4000)
    ),
    Attack("garbage and stay", 72, 3),
    Attack("garbage and stay", 1000, 1000),
    Attack("garbage and stay", 4000, 4000),
)
TLS = (
    NONE,
    Attack("stalled handshakes", 200, 200),
    Attack("costly hellos", 20, 20),
    *(
        Attack(kind, count, count)
        for kind in ("idle", "garbage and stay", "stalled handshakes")
        for count in (1000, 4000)
    ),
)


def besiege(
    started: Daemon, attack: Attack, host: str, place: Namespace | None, owner: Owner
) -> Figures:
    """Attack a daemon from a place, and be its owner meanwhile."""
    watch = Watch(started.process.pid)
    watch.start()
    me = [*(place.command() if place else []), sys.executable, __file__, "--attack"]
    row = [attack.kind, str(attack.how_many), str(attack.addresses)]
    row += [host, str(started.client.port)]
    with contextlib.ExitStack() as stack:
        if attack is not NONE:
            attacker = stack.enter_context(subprocess.Popen([*me, *row]))
            stack.callback(attacker.kill)
            time.sleep(2)
        owner.ask_often()
    watch.over = True
    times = sorted(owner.times) or [float("nan")]
    return Figures(
        times[len(times) // 2],
        times[-1],
        owner.lost,
        watch.rss - watch.before,
        watch.threads,
    )


MACHINE = {
    "WAKER_HOMELAB_MAC": "52:54:00:12:34:56",
    "WAKER_HOMELAB_HOST": "127.0.0.1",
    "WAKER_PIN": PIN,
}
LIMIT = ("prlimit", "--nofile=1024", "env", "MALLOC_ARENA_MAX=2")  # as in the unit


def near(attack: Attack) -> Figures:
    """Attack over loopback, without TLS."""
    with daemon(MACHINE, *LIMIT) as started:
        host = started.client.host
        return besiege(
            started, attack, host, None, Owner(host, started.client.port, None)
        )


def plug_in(name: str) -> int:
    """Make a network interface whose packets we carry; returns its descriptor."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN))
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
    ends = [place.run(partial(plug_in, "long")) for place in (one, other)]
    for place, own in ((one, address), (other, far)):
        ip(f"-n {place.name} address add {own} dev long")
        ip(f"-n {place.name} link set long up")
    for way in (ends, ends[::-1]):
        threading.Thread(target=carry, args=way, daemon=True).start()


def far(attack: Attack) -> Figures:
    """Attack over TLS, with an owner in another network, 250 ms away."""
    with (
        hosts(3) as (box, attacker, home),
        tempfile.TemporaryDirectory() as folder,
    ):
        wire(box, "bad", "10.1.0.1/16", attacker, "10.1.0.2/16")
        lay_long_cable(box, "10.2.0.1/24", home, "10.2.0.2/24")
        # The attacker's addresses are on its loopback, and routed to it.
        ip(f"-n {attacker.name} route add local 10.3.0.0/16 dev lo")
        ip(f"-n {box.name} route add 10.3.0.0/16 via 10.1.0.2")
        certificate = new_certificate(Path(folder))
        context = ssl.create_default_context(cafile=str(certificate.cert))
        context.check_hostname = False
        settings = MACHINE | certificate.settings() | {"WAKER_LISTEN": "[::]:0"}
        with daemon(settings, *LIMIT, *box.command()) as started:
            owner = Owner("10.2.0.1", started.client.port, context)
            return home.run(
                partial(besiege, started, attack, "10.1.0.1", attacker, owner)
            )


# ---- The costliest inputs ------------------------------------------------------------

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
JSON = b'{"pin":'
ODD_HEADS = {
    "a long value": HEAD + b"X:" + b"y" * 16000,
    "blanks": HEAD + b"X:" + b" \t" * 8000,
    "a long name": HEAD + b"a" * 16000,
    "blanks in Content-Length": HEAD + b"Content-Length:" + b" " * 16000 + b"x",
    "digits": HEAD + b"Content-Length:" + b"1" * 16000,
    "3,000 fields": HEAD + b"a:\r\n" * 3000 + b"b:",
    "99 fields": HEAD + b"\r\n".join([b"a: " + b"b" * 150] * 99),
    "a list of proxies": HEAD
    + b"X-Forwarded-For: "
    + b"10.0.0.1," * 1750
    + b"10.0.0.1",
    "commas": HEAD + b"X-Forwarded-For: " + b"," * 16000,
    "colons": HEAD + b"X-Forwarded-For: " + b":" * 16000,
    "a long method": b"A" * 16000,
    "a long path": b"GET /" + b"%41" * 5400 + b'" HTTP/1.1\r\nHost: x',
    "a long query": b"GET /" + b"?" * 16200 + b'" HTTP/1.1\r\nHost: x',
    "a long authority": b"GET http://[" + b":" * 16200 + b" HTTP/1.1\r\nHost: x",
    "a long Host": b"GET / HTTP/1.1\r\nHost: " + b"a." * 8000 + b"@",
    "carriage returns": HEAD + b"X:" + b"\r" * 16000,
    "a long token": HEAD + b"Authorization: Bearer " + b" " * 16000,
}
ODD_BODIES = {
    "brackets": b"[" * 16384,
    "as many as may be": b"[" * 599 + b"1," * 7800,
    "a big number": JSON + b"1" * 16000 + b"}",
    "a big fraction": JSON + b"1." + b"1" * 16000 + b"}",
    "many names": b"{" + b",".join(b'"%d":1' % n for n in range(1500)) + b"}",
    "escapes": JSON + b'"' + b"\\ud800" * 2700 + b'"}',
    "many numbers": b"[" + b"4300" * 4000,
    "no UTF-8": b"\xff" * 16384,
}


def milliseconds(read: Callable[[], object]) -> float:
    """Measure the processor's time for a reading; the least of several."""
    times = []
    for _ in range(20):
        began = time.process_time()
        with contextlib.suppress(waker.Fault):
            read()
        times.append((time.process_time() - began) * 1000)
    return min(times)


def read_head(head: bytes) -> None:
    """Read as the daemon does."""
    file: io.BufferedReader = io.BufferedReader(io.BytesIO(head + b"\r\n\r\n"))
    proxies = waker.parse_networks("10.0.0.0/8")
    waker.read_request(file, "10.0.0.1", proxies)


def read_body(body: bytes) -> None:
    request = waker.Request("POST", "/", "", 0, "application/json", "", body)
    waker.text_member(request, "pin")


def costs() -> Iterator[tuple[str, float]]:
    """Measure what inputs of 16 KiB cost, in ms of CPU."""
    for name, head in ODD_HEADS.items():
        yield f"head: {name}", milliseconds(partial(read_head, head))
    for name, body in ODD_BODIES.items():
        yield f"body: {name}", milliseconds(partial(read_body, body))


def main(names: list[str]) -> int:
    """Print the tables."""
    if not names or names == ["--costs"]:
        print("input of 16 KiB | ms of CPU")
        for name, cost in costs():
            print(f"{name} | {cost:.2f}")
    if names == ["--costs"]:
        return 0
    print("attack", *Figures._fields, sep=" | ", flush=True)
    for where, attacks in ((near, PLAIN), (far, TLS)):
        for attack in attacks:
            title = f"{attack}{', TLS, 250 ms away' if where is far else ''}"
            if names and not any(name in title for name in names):
                continue
            rounds = [where(attack) for _ in range(TIMES)]
            medians = [
                statistics.median(column) for column in zip(*rounds, strict=True)
            ]
            print(
                title, *(f"{figure:.1f}" for figure in medians), sep=" | ", flush=True
            )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        kind, count, addresses, host, port = sys.argv[2:]
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        near_by = host.startswith("127.")
        sources = [
            source(n) if near_by else f"10.3.{n // 250}.{1 + n % 250}"
            for n in range(int(addresses))
        ]
        if kind == "costly hellos":
            send_hellos(int(count), sources, host, int(port))
        keep_open(kind, int(count), sources, host, int(port))
    sys.exit(main(sys.argv[1:]))
