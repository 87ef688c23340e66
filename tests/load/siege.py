"""The daemon under attack, and whether its owner still gets through: `make siege`.

Each attack is made on daemons of its own under the usual limit of 1,024 descriptors,
whose stderr is a pipe that nobody reads. For ten seconds the owner, without a login,
asks for the page ten times a second. docs/load.md says what the attacker does.

    python3 tests/load/siege.py [TIMES [PART-OF-A-NAME ...]]
"""

import asyncio
import contextlib
import math
import multiprocessing
import resource
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bench import Figures, figure, show_head, show_row
from conftest import GET, MACHINE, POST, daemon

Where = tuple[str, int]

FORK = multiprocessing.get_context("fork")
LIMIT = ("prlimit", "--nofile=1024", "env", "MALLOC_ARENA_MAX=2")  # as in the unit


# ---- The attacker --------------------------------------------------------------------


class Attack(NamedTuple):
    """What as many addresses do, with a connection each."""

    kind: str
    number: int
    seconds: float  # that the owner waits longer at most, as promised
    first: bytes = b""  # what a connection sends
    drip: bytes = b""  # what it sends every second then; if nothing, it reads a byte
    bursts: bool = False  # all connections are opened again at once, every two seconds

    def __str__(self) -> str:
        return f"{self.number:,} {self.kind}"


HEADS = GET, b"X: y\r\n"
SLOW = {
    "silent connections": (b"", b""),
    "slow heads": HEADS,
    "slow bodies": (POST + b"Content-Length: 16384\r\n\r\n", b"x"),
    "answers hardly read": (GET + b"\r\n", b""),
    "garbage and stay": (b"\x01\x02\x03\x04", b"\x01"),
}
ATTACKS = [
    Attack("connections", 0, 0),
    *(Attack(kind, 1000, 1, first, drip) for kind, (first, drip) in SLOW.items()),
    *(Attack(kind, 4000, 3, first, drip) for kind, (first, drip) in SLOW.items()),
    Attack("slow heads in bursts", 1000, 2, *HEADS, bursts=True),
]


async def keep_open(attack: Attack, where: Where, number: int) -> None:
    """Keep one of its connections open."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(number / attack.number)
    while True:
        with socket.socket() as tcp, contextlib.suppress(OSError):
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            tcp.bind((f"127.1.{number // 250}.{1 + number % 250}", 0))
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


# ---- The owner -----------------------------------------------------------------------


def ask(where: Where) -> float:
    """Ask for the page; returns the milliseconds."""
    began = time.perf_counter()
    with contextlib.suppress(OSError), socket.create_connection(where, 20) as tcp:
        tcp.sendall(GET + b"\r\n")
        answer = b"".join(iter(lambda: tcp.recv(65536), b""))
        if answer.startswith(b"HTTP/1.1 200 "):
            return (time.perf_counter() - began) * 1000
    return math.inf


def besiege(attack: Attack) -> Figures:
    """Be the owner of a daemon that is attacked; returns the figures."""
    with daemon(MACHINE, *LIMIT) as started, ThreadPoolExecutor(200) as owner:
        where = "127.0.0.1", started.client.port
        before = memory = started.memory()
        answers, threads = [], 0
        attacker = FORK.Process(target=lambda: asyncio.run(assault(attack, where)))
        attacker.start()
        try:
            time.sleep(2)  # all of them come within the first second
            for _ in range(100):
                answers.append(owner.submit(ask, where))
                memory = max(memory, started.memory())
                threads = max(threads, started.uses()[0])
                time.sleep(0.1)
            times = sorted(answer.result() for answer in answers)
        finally:
            attacker.kill()
    lost = times.count(math.inf)
    answered = times[: len(times) - lost] or [math.inf]
    more = (memory - before) / 1e6
    return [statistics.median(answered), answered[-1], lost, more, threads]


def main(times: int, names: list[str]) -> int:
    """Print the table; returns 0 if all is as it is promised."""
    broken = 0
    show_head("attack", "p50 ms", "worst ms", "lost", "MB more", "threads", "promised")
    usual = 0.0  # ms at worst, without an attack
    for attack in ATTACKS:
        if attack.number and not any(name in str(attack) for name in names):
            continue
        rounds = [besiege(attack) for _ in range(times)]
        figures = [max(column) for column in zip(*rounds, strict=True)]
        _, worst, lost, memory, _ = figures
        usual = usual or worst
        most = usual + 1000 * attack.seconds
        kept = worst <= most and lost == 0 and memory <= 8
        promise = f"{figure(most)} ms, 0, 8 MB: {'holds' if kept else 'FAILS'}"
        show_row(str(attack), *map(figure, figures), promise)
        broken += not kept
    return min(broken, 1)


if __name__ == "__main__":
    times, *names = sys.argv[1:] or ["3"]
    sys.exit(main(int(times), names or [""]))
