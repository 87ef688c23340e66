"""The daemon under attack, and its owner's requests meanwhile: `make siege`.

Each attack has a daemon of its own, under the usual limit of 1,024 descriptors, and
lasts some seconds; its stderr is a pipe that nobody reads. The attacker is a process of
its own, on the same machine; it opens again whatever the daemon closes. The owner asks
for something 25 times a second, each time over a new connection, and once has the
machine unlocked. What the table tells:

- p50, p99, worst: milliseconds from the owner's connect to the whole answer
- unanswered: of the owner's requests
- unlock: what was told of the one that ran meanwhile
- RSS, in MB, and threads, each before, at the worst, and afterwards
- CPU afterwards, in percent of one core

Before, it prints what the costliest inputs cost.

    python3 tests/siege.py [NAME-OF-AN-ATTACK ...]
"""

import contextlib
import itertools
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from conftest import PASSPHRASE, PIN, Client, Daemon, daemon
from cryptroot_unlock import Disks
from ssh_servers import paramiko_server

import waker

SECONDS = 8.0  # of each attack
PACE = 0.04  # seconds between two requests of the owner
AFTER = waker.CLIENT_SECONDS + 3  # seconds until all must be as it was
OWNER = "127.0.0.1"


# ---- The attacker --------------------------------------------------------------------


def source(number: int) -> str:
    """Name one of the 60,000 addresses that an attacker has here."""
    return f"127.{1 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"


def connect(port: int, address: str) -> socket.socket:
    """Begin to connect from an address."""
    tcp = socket.socket()
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    tcp.bind((address, 0))
    tcp.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        tcp.connect((OWNER, port))
    return tcp


class Slot:
    """One connection of the attacker's, opened again whenever it is closed."""

    def __init__(self, port: int, address: str, first: bytes, drip: bytes) -> None:
        self._port = port
        self._address = address
        self._first = first
        self._drip = drip
        self._tcp: socket.socket | None = None
        self._next = b""

    def tick(self) -> None:
        """Connect, or send a little more."""
        if self._tcp is None:
            self._tcp, self._next = connect(self._port, self._address), self._first
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
            self._tcp = None


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /api/auth HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WRONG = b'{"pin":"wrong!"}'
FIRST_AND_DRIP = {
    "slow heads": (GET, b"X: y\r\n"),
    "slow bodies": (POST + b"Content-Length: 16384\r\n\r\n", b"x"),
    "big heads": (GET + b"X: " + b"y" * 16000, b"y"),
    "idle": (b"", b""),
    "never read": (GET + b"\r\n", b""),
    "garbage": (b"\x16\x03\x01\x02", b"\x00"),
    "wrong PINs": (POST + b"Content-Length: %d\r\n\r\n" % len(WRONG) + WRONG, b""),
}


def keep_open(kind: str, count: int, spread: str, port: int) -> None:
    """Keep `count` connections open, each with something sent every second."""
    first, drip = FIRST_AND_DRIP[kind]
    slots = [
        Slot(port, source(number) if spread == "many" else OWNER, first, drip)
        for number in range(count)
    ]
    while True:
        began = time.monotonic()
        for number, slot in enumerate(slots):
            slot.tick()
            early = began + number / count - time.monotonic()
            if early > 0.002:
                time.sleep(early)


def flood(kind: str, count: int, spread: str, port: int) -> None:
    """Connect, send, and leave, as fast as it goes."""
    first = FIRST_AND_DRIP[kind.removeprefix("flood: ")][0]
    gone: list[socket.socket] = []
    for place in itertools.cycle(range(60000)):
        tcp = connect(port, source(place) if spread == "many" else OWNER)
        with contextlib.suppress(OSError):
            tcp.send(first)
        gone.append(tcp)
        if len(gone) > 200:
            gone.pop(0).close()


# ---- The owner -----------------------------------------------------------------------


class Figures(NamedTuple):
    """What was measured in one attack, as the table shows it."""

    attack: str
    p50: str
    p99: str
    worst: str
    unanswered: str
    unlock: str
    rss: str
    threads: str
    cpu: str


def ask(client: Client, method: str, path: str) -> float | None:
    """Make a request; returns how long that took, in ms, or None without a 200."""
    began = time.perf_counter()
    try:
        answer = client.call(method, path)
    except OSError:
        return None
    return (time.perf_counter() - began) * 1000 if answer.status == 200 else None


class Watch(threading.Thread):
    """Notes the most memory and threads that a daemon has had."""

    def __init__(self, started: Daemon) -> None:
        super().__init__(daemon=True)
        self._watched = started
        self.rss, self.threads, self.over = started.rss(), started.threads(), False

    def run(self) -> None:
        while not self.over:
            self.rss = max(self.rss, self._watched.rss())
            self.threads = max(self.threads, self._watched.threads())
            time.sleep(0.1)


def besiege(started: Daemon, name: str, attackers: list[list[str]]) -> Figures:
    """Attack a daemon, be its owner meanwhile, and see what is left of it."""
    client = started.client.log_in()
    for _ in range(20):
        ask(client, "GET", "/")
    watch = Watch(started)
    before = (watch.rss, watch.threads)
    watch.start()
    unlocks: list[int] = []
    unlock = threading.Thread(
        target=lambda: unlocks.append(
            client.call("POST", "/api/unlock", {"passphrase": PASSPHRASE}).status
        )
    )
    times: list[float] = []
    missed = 0
    me = [sys.executable, __file__, "--attack"]
    attacks = [subprocess.Popen([*me, *row, str(client.port)]) for row in attackers]
    try:
        time.sleep(1)
        unlock.start()
        ends = time.monotonic() + SECONDS
        for method, path in itertools.cycle((("GET", "/"), ("POST", "/api/wol"))):
            if time.monotonic() > ends:
                break
            took = ask(client, method, path)
            if took is None:
                missed += 1
            else:
                times.append(took)
            time.sleep(PACE)
        unlock.join()
    finally:
        for process in attacks:
            process.kill()
            process.wait()
    time.sleep(AFTER)
    watch.over = True
    times.sort()
    places = (len(times) // 2, len(times) * 99 // 100, len(times) - 1)
    p50, p99, worst = (f"{times[n]:.1f}" if times else "none" for n in places)
    return Figures(
        name,
        p50,
        p99,
        worst,
        f"{missed} of {missed + len(times)}",
        " ".join(map(str, unlocks)),
        f"{before[0]:.1f} {watch.rss:.1f} {started.rss():.1f}",
        f"{before[1]} {watch.threads} {started.threads()}",
        f"{100 * started.busy(3):.1f}",
    )


def attacks() -> Iterator[tuple[str, list[list[str]], int]]:
    """List the attacks: name, attackers, and the descriptors that the daemon has."""
    yield "none", [], 1024
    for spread in ("one", "many"):
        for kind in ("slow heads", "slow bodies", "idle", "never read"):
            for count in (50, 200, 1000, 4000):
                yield f"{count} {kind}, {spread}", [[kind, str(count), spread]], 1024
        for kind in ("big heads", "garbage", "wrong PINs"):
            yield f"1000 {kind}, {spread}", [[kind, "1000", spread]], 1024
        for kind in ("idle", "never read", "wrong PINs"):
            yield f"flood: {kind}, {spread}", [["flood: " + kind, "0", spread]], 1024
    yield "200 idle, 64 descriptors", [["idle", "200", "many"]], 64


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
    "a long path": b"GET /" + b"%41" * 2700 + b'" HTTP/1.1\r\nHost: x',
    "a long query": b"GET /" + b"?" * 8100 + b'" HTTP/1.1\r\nHost: x',
    "a long authority": b"GET http://[" + b":" * 8100 + b" HTTP/1.1\r\nHost: x",
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
    """Read as the daemon does: while it comes, when it is there, and by a worker."""
    waker.request_size(head, 0)
    waker.request_size(head + b"\r\n\r\n", len(head))
    proxies = waker.parse_networks("10.0.0.0/8")
    waker.parse_request(head + b"\r\n\r\n", "10.0.0.1", proxies, 0)


def read_body(body: bytes) -> None:
    request = waker.Request("POST", "/", "", 0, "application/json", "", body)
    waker.text_member(request, "pin")


def print_costs() -> None:
    """Print the table of what inputs of 16 KiB cost."""
    print("input of 16 KiB | ms of CPU")
    for name, head in ODD_HEADS.items():
        print(f"head: {name} | {milliseconds(partial(read_head, head)):.2f}")
    for name, body in ODD_BODIES.items():
        print(f"body: {name} | {milliseconds(partial(read_body, body)):.2f}")


def main(names: list[str]) -> int:
    """Print the tables."""
    if not names:
        print_costs()
    print(*Figures._fields, sep=" | ", flush=True)
    for name, attackers, descriptors in attacks():
        if names and not any(wanted in name for wanted in names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            disks = Disks({"cryptroot": PASSPHRASE}, slow=1)
            with paramiko_server(Path(folder), disks) as initrd:
                settings = initrd.machine().settings() | {
                    "WAKER_HOMELAB_MAC": "52:54:00:12:34:56",
                    "WAKER_HOMELAB_BROADCAST": OWNER,
                    "WAKER_PIN": PIN,
                }
                limit = ("prlimit", f"--nofile={descriptors}")
                with daemon(settings, *limit) as started:
                    figures = besiege(started, name, attackers)
        print(*figures, sep=" | ", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        kind, count, spread, port = sys.argv[2:]
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        (flood if kind.startswith("flood") else keep_open)(
            kind, int(count), spread, int(port)
        )
    sys.exit(main(sys.argv[1:]))
