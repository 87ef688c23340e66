"""waker beside an empty server and `ssh`, in the same run: `make bench`, as root.

They take turns in each round. docs/load.md explains the figures. Times begin with the
start of the process; MB are its resident set. ApacheBench asks for 8 pages at a time.

    python3 tests/load/bench.py [ROUNDS]
"""

import contextlib
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from conftest import CHECKOUT, MACHINE, PASSPHRASE, PIN, daemon, environment, need
from machine import Machine

Figures = Sequence[float]
Row = tuple[str, Figures]  # of one round

LOCAL = "127.0.0.1"
SETTINGS = MACHINE | {"WAKER_PIN": PIN}
EMPTY_SERVER = """
import signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

with open("ui.html", "rb") as file:
    page = file.read()

class Handler(BaseHTTPRequestHandler):
    log_message = lambda *_: None

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

signal.signal(signal.SIGTERM, lambda *_: sys.exit())
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print("it listens on port", server.server_port, file=sys.stderr, flush=True)
server.serve_forever()
"""
SERVERS = {
    "http.server": (sys.executable, "-c", EMPTY_SERVER),
    "waker": (sys.executable, str(CHECKOUT / "dist/waker")),
}


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


def ask_for_pages(port: int) -> float:
    """Have ApacheBench ask for 1,000; returns how many came in a second."""
    command = [need("ab"), "-q", "-l", "-n", "1000", "-c", "8", f"{LOCAL}:{port}/"]
    told = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    assert "Non-2xx responses" not in told, told
    return float(re.findall(r"Requests per second: +([\d.]+)", told)[0])


def serve(machine: Machine, rounds: int) -> Iterator[Row]:
    for name in list(SERVERS) * rounds:
        settings = machine.ask().settings(PIN=PIN)
        began = time.perf_counter()
        with daemon(settings, program=SERVERS[name]) as started:
            pid, client = started.process.pid, started.client
            assert client.call("GET", "/").status == 200
            figures = [(time.perf_counter() - began) * 1000, rss(pid)]
            figures.append(ask_for_pages(client.port))
            if name == "waker":
                assert client.log_in().unlock().status == 200
            yield name, [*figures, rss(pid)]


def unlock(machine: Machine, rounds: int) -> Iterator[Row]:
    known = machine.folder / "known_hosts"
    port = machine.ask().initrd_port
    known.write_text(f"[{LOCAL}]:{port} {machine.host_key}\n")
    ssh = f"{need('ssh')} -F none -o UserKnownHostsFile={known} -o BatchMode=yes"
    ssh += " -o StrictHostKeyChecking=yes -o GlobalKnownHostsFile=none"
    ssh += f" -o IdentitiesOnly=yes -i {machine.ssh_key} -p {port}"
    commands = {
        "ssh": [*ssh.split(), f"root@{LOCAL}", "cryptroot-unlock"],
        "waker": [*SERVERS["waker"], "unlock"],
    }
    env, given = environment(machine.settings()), PASSPHRASE.encode()
    for name in list(commands) * rounds:
        machine.ask()
        began = time.perf_counter()
        subprocess.run(
            commands[name], env=env, input=given, capture_output=True, check=True
        )
        yield name, [(time.perf_counter() - began) * 1000]
        assert machine.received() == [given]


def medians(rounds: Sequence[Figures]) -> list[float]:
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def show_table(*columns: str, rows: Iterator[Row]) -> tuple[Figures, Figures]:
    """Print two rows; returns the figures of the second one, and their ratios."""
    found: dict[str, list[Figures]] = {}
    for name, figures in rows:
        found.setdefault(name, []).append(figures)
    (floor, first), (name, second) = found.items()
    pairs = [zip(*pair, strict=True) for pair in zip(second, first, strict=True)]
    ratios = medians([[x / y for x, y in pair] for pair in pairs])
    cells = zip(map(figure, medians(second)), ratios, strict=True)
    show_head(*columns)
    show_row(floor, *map(figure, medians(first)))
    show_row(name, *(f"{cell} x{ratio:.2f}" for cell, ratio in cells))
    return medians(second), ratios


def main(rounds: int) -> int:
    """Print tables and promises; returns 0 if all is as it is promised."""
    print(os.cpu_count(), "processors,", "Python", platform.python_version())
    columns = ["server", "ms to the first page", "MB", "pages a second"]
    columns.append("MB after 1,000, and an unlock by waker")
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.closing(Machine(Path(name))) as machine,
    ):
        figures, ratios = show_table(*columns, rows=serve(machine, rounds))
        _, (slower,) = show_table("unlock", "ms", rows=unlock(machine, rounds))
    kept = figures[3] - figures[1]
    promises = {
        "at most x1.45 of the time to the first page": ratios[0] <= 1.45,
        "at most x1.25 of the memory": ratios[1] <= 1.25,
        "at least x0.9 of the pages": ratios[2] >= 0.9,
        "after an unlock, at most 1 MB more than at first": kept <= 1,
        "at most x2 of the time of an unlock": slower <= 2,
    }
    show_head("promise", "result")
    for promise, holds in promises.items():
        show_row(promise, "holds" if holds else "FAILS")
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or ["7"])[0])))
