"""waker beside an empty server and `ssh`, in the same run: `make bench`, as root.

They take turns in each round. A cell shows the median of the rounds and, after an x,
the median of its ratios to the first row. Below each table is what waker promises.

- start: from the spawn to the whole page
- memory: the resident set at first, after 1,000 pages, and after an unlock
- idle: how often any thread of the daemon was switched to, in 10 s without a request
- pages: as ApacheBench asks for them, 8 at a time, each over a new connection
- unlock: from the start of the process to its end, with the same dropbear

waker is the one file that `make dist` makes, which is compiled at each start.

    python3 tests/bench.py [--rounds N] [PART ...]
"""

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from conftest import CHECKOUT, MACHINE, PASSPHRASE, PIN, daemon, environment, need
from cryptroot_unlock import Disks
from ssh_servers import dropbear, paramiko_server

Figures = Sequence[float]
Row = tuple[str, Figures]  # of one round

LOCAL = "127.0.0.1"
SETTINGS = MACHINE | {"WAKER_PIN": PIN}
EMPTY_SERVER = """
import signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

with open("ui.html", "rb") as file:
    PAGE = file.read()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_):
        pass

signal.signal(signal.SIGTERM, lambda *_: sys.exit())
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print("it listens on port", server.server_port, file=sys.stderr, flush=True)
server.serve_forever()
"""
SERVERS = {
    "http.server": (sys.executable, "-c", EMPTY_SERVER),
    "waker": (sys.executable, str(CHECKOUT / "dist/waker")),
}


# ---- Shared with siege.py ------------------------------------------------------------


def show_head(*columns: str) -> None:
    print(f"\n| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|", flush=True)


def show_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def figure(number: float) -> str:
    return f"{number:,.{0 if number >= 100 or number % 1 == 0 else 1}f}"


def rss(pid: int) -> float:
    """Read the resident set of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


# ---- Parts: what is measured of each server in each round ----------------------------


def start(_: Path, rounds: int) -> Iterator[Row]:
    for name in list(SERVERS) * rounds:
        began = time.perf_counter()
        with daemon(SETTINGS, program=SERVERS[name]) as started:
            assert started.client.call("GET", "/").status == 200
            yield name, [(time.perf_counter() - began) * 1000]


def ask_for_pages(port: int) -> float:
    """Have ApacheBench ask for 1,000; returns how many came in a second."""
    command = [need("ab"), "-q", "-l", "-n", "1000", "-c", "8", f"{LOCAL}:{port}/"]
    told = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    assert "Non-2xx responses" not in told, told
    return float(re.findall(r"Requests per second: +([\d.]+)", told)[0])


def memory(folder: Path, rounds: int) -> Iterator[Row]:
    disks = Disks({"cryptroot": PASSPHRASE})
    with paramiko_server(folder, disks) as initrd:
        settings = SETTINGS | initrd.machine().settings()
        for name in list(SERVERS) * rounds:
            disks.save(initrd.state)
            with daemon(settings, program=SERVERS[name]) as started:
                figures = [rss(started.process.pid)]
                ask_for_pages(started.client.port)
                figures.append(rss(started.process.pid))
                if name == "waker":
                    assert started.client.log_in().unlock().status == 200
                yield name, [*figures, rss(started.process.pid)]


def switches(pid: int) -> int:
    """Read how often the threads of a process were switched to."""
    paths = Path(f"/proc/{pid}/task").glob("*/status")
    text = "".join(path.read_text() for path in paths)
    return sum(map(int, re.findall(r"_switches:\t(\d+)", text)))


def idle(_: Path, rounds: int) -> Iterator[Row]:
    with daemon(SETTINGS, program=SERVERS["waker"]) as started:
        assert started.client.call("GET", "/").status == 200
        time.sleep(3)  # until the connection's thread has ended
        before = switches(started.process.pid)
        time.sleep(10)
        yield "waker", [switches(started.process.pid) - before]


def pages(_: Path, rounds: int) -> Iterator[Row]:
    for name in list(SERVERS) * rounds:
        with daemon(SETTINGS, program=SERVERS[name]) as started:
            yield name, [ask_for_pages(started.client.port)]


def unlock(folder: Path, rounds: int) -> Iterator[Row]:
    disks = Disks({"cryptroot": PASSPHRASE})
    with dropbear(folder, disks) as initrd:
        known = folder / "known_hosts"
        known.write_text(f"[{LOCAL}]:{initrd.port} {initrd.host_key}\n")
        ssh = f"{need('ssh')} -F none -o UserKnownHostsFile={known} -o BatchMode=yes"
        ssh += " -o StrictHostKeyChecking=yes -o GlobalKnownHostsFile=none"
        ssh += f" -o IdentitiesOnly=yes -i {initrd.ssh_key} -p {initrd.port}"
        commands = {
            "ssh": [*ssh.split(), f"root@{LOCAL}", "cryptroot-unlock"],
            "waker": [*SERVERS["waker"], "unlock"],
        }
        env, given = environment(initrd.machine().settings()), PASSPHRASE.encode()
        for name in list(commands) * rounds:
            disks.save(initrd.state)
            began = time.perf_counter()
            subprocess.check_output(
                commands[name], env=env, input=given, stderr=subprocess.DEVNULL
            )
            yield name, [(time.perf_counter() - began) * 1000]
            assert not Disks.load(initrd.state).locked


Part = tuple[
    Callable[[Path, int], Iterator[Row]],
    Sequence[str],  # what its columns show
    str,  # what waker promises
    Callable[[Figures, Figures], bool],  # whether its figures and their ratios keep it
]
PARTS: dict[str, Part] = {
    "start": (
        start,
        ["ms to the first page"],
        "at most x1.8",
        lambda _, x: x[0] <= 1.8,
    ),
    "memory": (
        memory,
        ["MB at first", "after 1,000 pages", "waker: after an unlock"],
        "at most x1.4, and 1 MB more after an unlock",
        lambda mb, x: x[0] <= 1.4 and mb[2] - mb[0] <= 1,
    ),
    "idle": (idle, ["wake-ups in 10 s"], "none", lambda count, _: count[0] == 0),
    "pages": (pages, ["a second"], "at least x0.9", lambda _, x: x[0] >= 0.9),
    "unlock": (unlock, ["ms"], "at most x2", lambda _, x: x[0] <= 2),
}


def medians(rounds: Iterable[Figures]) -> list[float]:
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def show_part(name: str, folder: Path, rounds: int) -> bool:
    """Measure a part and print its table, waker last. Is all as it is promised?"""
    measure, columns, promise, keeps = PARTS[name]
    rows: dict[str, list[Figures]] = {}
    for row, figures in measure(folder, rounds):
        rows.setdefault(row, []).append(figures)
    show_head(name, *columns)
    (floor, first), *others = rows.items()
    middle = medians(first)
    ratios: list[float] = []
    show_row(floor, *map(figure, middle))
    for row, found in others:
        pairs = zip(found, first, strict=True)
        ratios = medians([x / y for x, y in zip(*pair, strict=True)] for pair in pairs)
        middle = medians(found)
        cells = zip(map(figure, middle), ratios, strict=True)
        show_row(row, *(f"{cell} x{ratio:.2f}" for cell, ratio in cells))
    kept = keeps(middle, ratios)
    print(f"\npromised: {promise}: {'holds' if kept else 'FAILS'}")
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure waker beside other servers.")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    arguments = parser.parse_args()
    print(os.cpu_count(), "processors,", "Python", platform.python_version())
    with tempfile.TemporaryDirectory() as name:
        folder, rounds = Path(name), arguments.rounds
        kept = [show_part(part, folder, rounds) for part in arguments.parts]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
