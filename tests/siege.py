"""The daemon under attack, and whether its owner still gets through: `make siege`.

Each attack is made on daemons of its own under the usual limit of 1,024 descriptors,
whose stderr is a pipe that nobody reads. The attacker is a process of its own, which
opens each connection again two seconds after it was seen to be closed, or all of them
at once every two seconds. For ten seconds the owner, without a login, asks for the page
ten times a second.

Then it is done over TLS, as root, with an owner whose packets need 250 ms for a round
trip: in network namespaces, between which a program carries them. There the owner asks
once a second and tries three times, for 5 s each. The tables show the worst: until the
owner had the whole page, all tries together; requests that stayed without an answer.

    python3 tests/siege.py [TIMES [PART-OF-A-NAME ...]]
"""

import asyncio
import contextlib
import io
import math
import multiprocessing
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench import LOCAL, SETTINGS, Figures, figure, rss, show_head, show_row
from certificate import new_certificate
from conftest import daemon, need
from namespaces import IFF_TUN, hosts, ip, wire

Begin = Callable[[], Callable[[], None]]  # begins an attack; returns how to end it
Where = tuple[str, int]

HALF_TRIP = 0.125  # seconds that a packet of the owner takes, who is far away
LIMIT = ("prlimit", "--nofile=1024", "env", "MALLOC_ARENA_MAX=2")  # as in the unit
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /api/auth HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


# ---- The attacker --------------------------------------------------------------------


def record_hello(group: str) -> bytes:
    """Take the hello of `openssl s_client` with a key share of that group.

    (Python 3.11.2, as in Debian 12, can make none of ffdhe8192.)
    """
    with socket.create_server((LOCAL, 0)) as server:
        command = [need("openssl"), "s_client", "-groups", group, "-connect"]
        command.append(f"{LOCAL}:{server.getsockname()[1]}")
        with subprocess.Popen(command, stdin=-3, stdout=-3, stderr=-3):
            with server.accept()[0] as tcp:
                return tcp.recv(65536)


class Attack(NamedTuple):
    """What is done, by how many connections, from how many addresses."""

    kind: str
    first: bytes  # what a connection sends
    drip: bytes  # what it sends every second after it; if nothing, it reads a byte
    number: int
    addresses: int  # 0: that of the owner, as behind a proxy
    seconds: float  # that the owner waits longer at most, as promised
    bursts: bool = False  # all connections are opened again at once, every two seconds
    tabs: int = 1  # connections that the owner opens at a time

    def __str__(self) -> str:
        if not self.number:
            return "no attack"
        origin = f"{self.addresses:,}" if self.addresses else "the owner's proxy"
        owner = f", owner opens {self.tabs}" if self.tabs > 1 else ""
        return f"{self.number:,} {self.kind}, from {origin}{owner}"


def floods(kind: str, first: bytes = b"", drip: bytes = b"") -> list[Attack]:
    sizes = (1000, 1), (4000, 3)
    return [Attack(kind, first, drip, n, n, seconds) for n, seconds in sizes]


HELLO = record_hello("ffdhe8192")
QUIET = Attack("connections", b"", b"", 0, 0, 0)
EVERYWHERE = [
    *floods("silent connections"),
    *floods("garbage and stay", b"\x01\x02\x03\x04", b"\x01"),
]
NEAR = [
    QUIET,
    *floods("slow heads", GET, b"X: y\r\n"),
    Attack("slow heads in bursts", GET, b"X: y\r\n", 1000, 1000, 2, bursts=True),
    Attack("slow heads in bursts", GET, b"X: y\r\n", 4000, 4000, math.inf, bursts=True),
    Attack("slow heads", GET, b"X: y\r\n", 100, 100, 1, tabs=6),
    Attack("slow heads", GET, b"X: y\r\n", 1000, 0, math.inf),
    *floods("slow bodies", POST + b"Content-Length: 16384\r\n\r\n", b"x"),
    *floods("answers hardly read", GET + b"\r\n"),
    Attack("garbage and stay", b"\x01\x02\x03\x04", b"\x01", 72, 3, 1),
    *EVERYWHERE,
]
FAR = [
    QUIET,
    Attack("costly hellos, each in 4 s", HELLO, b"x", 80, 80, 0.5),
    Attack("stalled handshakes", HELLO[:100], b"", 200, 200, 1),
    *floods("stalled handshakes", HELLO[:100]),
    *EVERYWHERE,
]


async def keep_open(attack: Attack, where: Where, number: int) -> None:
    """Keep one of its connections open."""
    loop, net = asyncio.get_running_loop(), "127.1" if where[0] == LOCAL else "10.3"
    address = number % (attack.addresses or 1)
    await asyncio.sleep(number / attack.number)
    while True:
        with socket.socket() as tcp, contextlib.suppress(OSError):
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            if attack.addresses:
                tcp.bind((f"{net}.{address // 250}.{1 + address % 250}", 0))
            tcp.setblocking(False)
            await loop.sock_connect(tcp, where)
            tcp.send(attack.first)
            while attack.drip or await loop.sock_recv(tcp, 1):
                await asyncio.sleep(1)
                tcp.send(attack.drip)
                if attack.bursts:
                    break
        await asyncio.sleep(2 - time.monotonic() % 2 if attack.bursts else 2)


async def assault(attack: Attack, where: Where) -> None:
    """Attack until this process is killed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    await asyncio.gather(*(keep_open(attack, where, n) for n in range(attack.number)))


def begin(work: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    """Work in a new process, in this thread's namespace; returns how to end it."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=lambda: asyncio.run(work()), daemon=True)
    process.start()
    return process.kill


# ---- The owner -----------------------------------------------------------------------


def ask(where: Where, tls: ssl.SSLContext | None) -> float:
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
    pid: int,
    begin_attack: Begin,
    where: Where,
    tabs: int = 1,
    tls: ssl.SSLContext | None = None,
) -> Figures:
    """Be the owner of a daemon that is attacked; returns the figures."""
    answers, before, memory, threads = [], rss(pid), 0.0, 0
    end_attack = begin_attack()
    with ThreadPoolExecutor(200) as pool:
        time.sleep(2)  # all of them come within the first second
        for beat in range(100):
            if not tls or beat % 10 == 0:
                answers += [pool.submit(ask, where, tls) for _ in range(tabs)]
            memory = max(memory, rss(pid) - before)
            threads = max(threads, len(list(Path(f"/proc/{pid}/task").iterdir())))
            time.sleep(0.1)
        times = sorted(answer.result() for answer in answers)
    end_attack()
    lost = times.count(math.inf)
    answered = times[: len(times) - lost] or [math.inf]
    return [statistics.median(answered), answered[-1], lost, memory, threads]


def near(attack: Attack) -> Figures:
    """Attack over loopback, without TLS."""
    settings = SETTINGS
    if not attack.addresses:
        settings = SETTINGS | {"WAKER_TRUSTED_PROXY": LOCAL}
    with daemon(settings, *LIMIT) as started:
        where = LOCAL, started.client.port
        attacking = partial(begin, partial(assault, attack, where))
        return besiege(started.process.pid, attacking, where, attack.tabs)


async def carry(*ends: io.FileIO) -> None:
    """Carry packets from each of two interfaces to the other, HALF_TRIP seconds late.

    (The kernel's own netem is not in every kernel.)
    """
    loop = asyncio.get_running_loop()

    def take(from_: io.FileIO, to: io.FileIO) -> None:
        loop.call_later(HALF_TRIP, to.write, from_.read(65536))

    for end, other in (ends, ends[::-1]):
        loop.add_reader(end, take, end, other)
    await asyncio.Event().wait()


def far(attack: Attack) -> Figures:
    """Attack over TLS, with an owner in another network, 250 ms away."""
    with (
        hosts(3) as (box, attacker, home),
        box.plug_in(IFF_TUN, "long", "10.2.0.1/24") as here,
        home.plug_in(IFF_TUN, "long", "10.2.0.2/24") as there,
        TemporaryDirectory() as folder,
    ):
        wire(box, "bad", "10.1.0.1/16", attacker, "10.1.0.2/16")
        # The attacker's addresses are on its loopback, and routed to it.
        ip(f"-n {attacker.name} route add local 10.3.0.0/16 dev lo")
        ip(f"-n {box.name} route add 10.3.0.0/16 via 10.1.0.2")
        certificate = new_certificate(Path(folder))
        tls = ssl.create_default_context(cafile=str(certificate.cert))
        tls.check_hostname = False
        settings = SETTINGS | certificate.settings() | {"WAKER_LISTEN": "[::]:0"}
        end_carrying = begin(partial(carry, here, there))
        with daemon(settings, *LIMIT, *box.command()) as started:
            pid, port = started.process.pid, started.client.port
            work = partial(assault, attack, ("10.1.0.1", port))
            attacking = partial(attacker.run, partial(begin, work))
            where = "10.2.0.1", port
            figures = home.run(lambda: besiege(pid, attacking, where, tls=tls))
        end_carrying()
        return figures


def main(times: int, names: list[str]) -> int:
    """Print the tables; returns 0 if all is as it is promised."""
    broken = 0
    for measure, attacks in ((near, NEAR), (far, FAR)):
        title = "attack, TLS, 250 ms away" if measure is far else "attack"
        show_head(title, "p50 ms", "worst ms", "lost", "MB more", "threads", "promised")
        usual = 0.0  # ms at worst, without an attack
        for attack in attacks:
            if attack.number and not any(name in str(attack) for name in names):
                continue
            rounds = [measure(attack) for _ in range(times)]
            figures = [max(column) for column in zip(*rounds, strict=True)]
            _, worst, lost, memory, _ = figures
            usual = usual or worst
            most = usual + 1000 * attack.seconds
            kept = worst <= most and lost == 0 and memory <= 8
            promise = f"{figure(most)} ms, 0, 8 MB: {'holds' if kept else 'FAILS'}"
            if not attack.addresses and attack.number:
                kept, promise = True, "no promise"  # an owner who shares a proxy
            show_row(str(attack), *map(figure, figures), promise)
            broken += not kept
    return min(broken, 1)


if __name__ == "__main__":
    times, *names = sys.argv[1:] or ["3"]
    sys.exit(main(int(times), names or [""]))
