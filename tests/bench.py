"""waker beside other servers, every figure taken in the same run: `make bench`.

The others (peers.py) serve the same page under the same Python. All take turns in each
round. A cell shows the median of the rounds and, after an x, the median of its ratios
to the first row. Below each table is what waker promises, and whether it holds.

- start: from the spawn to the whole page
- memory: the resident set at first, after 1,000 pages, and after an unlock
- idle: how often any thread of the daemon was switched to, in 10 s without a request
- pages: as ApacheBench asks for them, 8 at a time, each over a new connection
- unlock: from the start of the process to its end, with the same dropbear

waker is the one file that `make dist` makes, which is compiled at each start; what the
others import has bytecode. It wants root, for dropbear.

    python3 tests/bench.py [--rounds N] [PART ...]
"""

import argparse
import contextlib
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conftest import CHECKOUT, PASSPHRASE, PIN, Client, environment, make, need
from cryptroot_unlock import Disks
from ssh_servers import Initrd, dropbear, free_port, paramiko_server

LOCAL = "127.0.0.1"
SETTINGS = {
    "WAKER_PIN": PIN,
    "WAKER_HOMELAB_HOST": LOCAL,
    "WAKER_HOMELAB_MAC": "52:54:00:12:34:56",
}
WAKER = "waker"
# What follows `python` in a folder that has the programs; the first is the floor.
SERVERS = {
    "http.server": ("-m", "peers", "http.server"),
    WAKER: ("checkout/dist/waker",),
    "aiohttp": ("-m", "peers", "aiohttp"),
    "Flask on waitress": ("-m", "peers", "Flask"),
}


# ---- Shared with siege.py ------------------------------------------------------------


@dataclass
class Table:
    """Figures of all rounds, by row; each row is compared to the first one."""

    columns: Sequence[str]
    compares: bool = True
    rows: dict[str, list[Sequence[float]]] = field(default_factory=dict)

    def add(self, row: str, *figures: float) -> None:
        """Note what was measured in a round."""
        self.rows.setdefault(row, []).append(figures)

    def ratio(self, row: str, place: int = 0) -> float:
        """Take the median of the ratios of each round."""
        rounds = zip(self.rows[row], next(iter(self.rows.values())), strict=True)
        return statistics.median(own[place] / other[place] for own, other in rounds)

    def show_head(self, title: str) -> None:
        print(f"\n| {title} | {' | '.join(self.columns)} |")
        print("|---" * (1 + len(self.columns)) + "|", flush=True)

    def show_row(self, row: str) -> None:
        cells = []
        for place, rounds in enumerate(zip(*self.rows[row], strict=True)):
            median = statistics.median(rounds)
            text = f"{median:,.{0 if median >= 100 or median % 1 == 0 else 1}f}"
            if self.compares and row != next(iter(self.rows)):
                text += f" x{self.ratio(row, place):.2f}"
            cells.append(text)
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


def rss(pid: int) -> float:
    """Read the resident set of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


# ---- Parts ---------------------------------------------------------------------------


@contextlib.contextmanager
def serving(
    folder: Path, name: str, settings: Mapping[str, str] = SETTINGS
) -> Iterator[tuple[int, Client]]:
    """Run a server; look every millisecond for its port. Yields its process id."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, *SERVERS[name]],
        cwd=folder,
        env=environment({**settings, "WAKER_LISTEN": f"{LOCAL}:{port}"}),
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((LOCAL, port)).close()
                break
            time.sleep(0.001)
        yield process.pid, Client(port)
    finally:
        process.terminate()
        process.wait(30)


def start(folder: Path, rounds: int) -> Table:
    table = Table(["ms to the first page"])
    for number in range(rounds + 1):
        for name in SERVERS:
            began = time.perf_counter()
            with serving(folder, name) as (_, client):
                assert client.call("GET", "/").status == 200
                if number:  # the first one is to have all files in memory
                    table.add(name, (time.perf_counter() - began) * 1000)
    return table


def ask_for_pages(client: Client) -> float:
    """Have ApacheBench ask for 1,000; returns how many came in a second."""
    command = [need("ab"), "-q", "-l", "-n", "1000", "-c", "8"]
    address = f"http://{LOCAL}:{client.port}/"
    told = subprocess.check_output([*command, address], text=True, stderr=-3)
    assert "Non-2xx responses" not in told, told
    return float(re.findall(r"Requests per second: +([\d.]+)", told)[0])


def memory(folder: Path, rounds: int) -> Table:
    table = Table(["MB at first", "after 1,000 pages", "waker: after an unlock"])
    disks = Disks({"cryptroot": PASSPHRASE})
    with paramiko_server(folder, disks) as initrd:
        settings = SETTINGS | initrd.machine().settings()
        for name in list(SERVERS) * rounds:
            disks.save(initrd.state)
            with serving(folder, name, settings) as (pid, client):
                first = rss(pid)
                ask_for_pages(client)
                later = rss(pid)
                if name == WAKER:
                    body = {"passphrase": PASSPHRASE}
                    answer = client.log_in().call("POST", "/api/unlock", body)
                    assert answer.status == 200, answer.body
                table.add(name, first, later, rss(pid))
    return table


def switches(pid: int) -> int:
    """Read how often the threads of a process were switched to."""
    paths = Path(f"/proc/{pid}/task").glob("*/status")
    text = "".join(path.read_text() for path in paths)
    return sum(map(int, re.findall(r"_switches:\t(\d+)", text)))


def idle(folder: Path, _: int) -> Table:
    table = Table(["wake-ups in 10 s"])
    with serving(folder, WAKER) as (pid, client):
        assert client.call("GET", "/").status == 200
        time.sleep(3)  # until the connection's thread has ended
        before = switches(pid)
        time.sleep(10)
        table.add(WAKER, switches(pid) - before)
    return table


def pages(folder: Path, rounds: int) -> Table:
    table = Table(["a second"])
    for name in list(SERVERS) * rounds:
        with serving(folder, name) as (_, client):
            table.add(name, ask_for_pages(client))
    return table


def ssh_command(initrd: Initrd, folder: Path) -> list[str]:
    """Write how OpenSSH unlocks, with the host key pinned."""
    known = folder / "known_hosts"
    known.write_text(f"[{LOCAL}]:{initrd.port} {initrd.host_key}\n")
    options = [f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes"]
    options += ["BatchMode=yes", "IdentitiesOnly=yes", "GlobalKnownHostsFile=none"]
    command = [need("ssh"), "-F", "none", "-i", str(initrd.ssh_key)]
    command += [word for option in options for word in ("-o", option)]
    return [*command, "-p", str(initrd.port), f"root@{LOCAL}", "cryptroot-unlock"]


def unlock(folder: Path, rounds: int) -> Table:
    table = Table(["ms"])
    disks = Disks({"cryptroot": PASSPHRASE})
    with dropbear(folder, disks) as initrd:
        env = environment(initrd.machine().settings())
        commands = {
            "ssh": ssh_command(initrd, folder),
            WAKER: [sys.executable, *SERVERS[WAKER], "unlock"],
        }
        for name, command in list(commands.items()) * rounds:
            disks.save(initrd.state)
            given, began = PASSPHRASE.encode(), time.perf_counter()
            subprocess.run(
                command,
                cwd=folder,
                env=env,
                input=given,
                check=True,
                capture_output=True,
            )
            table.add(name, (time.perf_counter() - began) * 1000)
            assert not Disks.load(initrd.state).locked
    return table


# Each part, what waker promises of it, and whether that holds.
PARTS: dict[str, tuple[Callable[[Path, int], Table], str, Callable[[Table], bool]]] = {
    "start": (start, "at most x1.8", lambda table: table.ratio(WAKER) <= 1.8),
    "memory": (
        memory,
        "at most x1.4, and 1 MB more after an unlock",
        lambda table: (
            table.ratio(WAKER) <= 1.4
            and all(last - first <= 1 for first, _, last in table.rows[WAKER])
        ),
    ),
    "idle": (idle, "none", lambda table: table.rows[WAKER] == [(0,)]),
    "pages": (pages, "at least x0.9", lambda table: table.ratio(WAKER) >= 0.9),
    "unlock": (unlock, "at most x2", lambda table: table.ratio(WAKER) <= 2),
}


def main() -> int:
    """Print the tables, and whether the promises hold."""
    parser = argparse.ArgumentParser(description="Measure waker beside other servers.")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    print(os.cpu_count(), "processors,", "Python", platform.python_version())
    kept = True
    with tempfile.TemporaryDirectory(prefix="waker-bench-") as name:
        folder = Path(name)
        shutil.copy(CHECKOUT / "ui.html", folder)
        shutil.copy(Path(__file__).with_name("peers.py"), folder)
        make(folder / "checkout", "dist")
        for part in arguments.parts or PARTS:
            measure, promise, holds = PARTS[part]
            table = measure(folder, arguments.rounds)
            table.show_head(part)
            for row in table.rows:
                table.show_row(row)
            kept = kept and holds(table)
            print(f"\npromised: {promise}: {'holds' if holds(table) else 'FAILS'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
