"""waker beside its peers, every figure taken in the same run: `make bench`.

The peers (peers.py) have the same page, the same login and the same check of a token,
and run under the same Python. All take their turn in each round; a figure is the median
of the rounds, then the least and the most, then its ratio to the row that is named: the
median of the ratios of each round. The promises are judged by those ratios.
What the figures tell:

- start: from the spawn to the whole page; the page is asked for as soon as one connects
- memory: of the process, in MB of a million bytes; PSS divides what is shared by those
  who share it just then
- idle: CPU, and how often any thread of it was switched to, in 30 s without a request
- requests: ApacheBench's requests per second, each over a connection of its own, and
  its p50 and p99; waker refuses a PIN with 401 ten times a minute, and then with 429
- slow: the same while 200 connections from 200 addresses send a header field a second;
  0 where no request was answered in time
- off: the first status that a daemon tells of a machine that is not there
- unlock: from the start of the process to its end, with the same dropbear
- packet: Debian's wakeonlan, a process, and a request to a daemon that runs already
- growth: one daemon with more and more of something; the status is a Python client's

waker is the one file that `make dist` makes, which is compiled at each start; the
modules of the others have bytecode.

    python3 tests/bench.py [--rounds N] [--json FILE] [PART ...]
"""

import argparse
import contextlib
import csv
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cryptroot_unlock
import siege
from conftest import PASSPHRASE, PIN, PROGRAM, Client, daemon, environment, make
from cryptroot_unlock import Disks
from homelab import Blackhole, bind, bind_udp
from namespaces import hosts, wire
from ssh_servers import Initrd, dropbear, free_port, paramiko_server

# What follows `python` in a folder that has the programs, and their bytecode beside.
FLOOR = "http.server"
PEERS = {
    FLOOR: ("-m", "peers", "http.server"),
    "aiohttp": ("-m", "peers", "aiohttp"),
    "Flask, waitress": ("-m", "peers", "flask"),
    "FastAPI, uvicorn": ("-m", "peers", "fastapi"),
}
WAKER = "waker"
COMMANDS = PEERS | {WAKER: ("checkout/dist/waker",)}

PROGRAMS = {  # what is run, and Debian's package
    "ab": "apache2-utils",
    "dropbear": "dropbear-bin",
    "dropbearkey": "dropbear-bin",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "unshare": "util-linux",
    "wakeonlan": "wakeonlan",
}
LOCAL = "127.0.0.1"
MAC = "52:54:00:12:34:56"
SETTINGS = {
    "WAKER_HOMELAB_HOST": LOCAL,
    "WAKER_HOMELAB_MAC": MAC,
    "WAKER_HOMELAB_BROADCAST": LOCAL,
}
IDLE_SECONDS = 30
SLOW = 200  # connections
GIVE_UP = 3  # seconds without any answer
SIZES = (10, 100, 1000, 10000)


# ---- Tables --------------------------------------------------------------------------


@dataclass
class Table:
    """Figures of all rounds, by row and column."""

    title: str
    base: str = ""  # the row to which the others are compared
    rows: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, row: str, figures: Mapping[str, float]) -> None:
        """Note what was measured in a round."""
        kept = self.rows.setdefault(row, {})
        for column, figure in figures.items():
            kept.setdefault(column, []).append(figure)

    def ratio(self, row: str, column: str, base: str = "") -> float:
        """Take the median of the ratios of each round; infinite to what is nothing."""
        own, other = (
            self.rows.get(name, {}).get(column, []) for name in (row, base or self.base)
        )
        ratios = [a / b if b else math.inf for a, b in zip(own, other, strict=False)]
        return statistics.median(ratios) if ratios else math.inf

    def cell(self, row: str, column: str) -> str:
        """Write the median, the spread and the ratio."""
        figures = self.rows[row].get(column)
        if not figures:
            return "none"
        text = amount(statistics.median(figures))
        if len(figures) > 1:
            text += f" ({amount(min(figures))}..{amount(max(figures))})"
        if self.base and column in self.rows[self.base]:
            text += f" x{self.ratio(row, column):.2f}"
        return text

    def export(self) -> dict[str, Any]:
        """Tell all rounds, and the medians."""
        medians = {
            row: {name: statistics.median(taken) for name, taken in columns.items()}
            for row, columns in self.rows.items()
        }
        return vars(self) | {"medians": medians}

    def show(self) -> None:
        """Print it, with its columns in line."""
        columns = list(dict.fromkeys(c for row in self.rows.values() for c in row))
        ratio = f" (ratios: to {self.base})" if self.base else ""
        lines = [["", *columns]]
        lines += [[row, *(self.cell(row, c) for c in columns)] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(f"\n{self.title}{ratio}")
        for line in lines:
            cells = (
                f"{text:{width}}" for text, width in zip(line, widths, strict=True)
            )
            print("  " + "  ".join(cells).rstrip())
        sys.stdout.flush()


def amount(figure: float) -> str:
    """Write a figure with as many digits as tell something."""
    if figure % 1 == 0 or abs(figure) >= 1000:
        return f"{figure:,.0f}"
    return f"{figure:.{1 if abs(figure) >= 10 else 2}f}"


# ---- Servers -------------------------------------------------------------------------


@dataclass
class Bench:
    """Where the programs lie, and how often each figure is taken."""

    folder: Path
    rounds: int


@dataclass
class Server:
    """One that runs, and its client."""

    pid: int
    client: Client

    def memory(self, when: str) -> dict[str, float]:
        """Read what it has of memory, in MB."""
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        found = dict(re.findall(r"(?m)^(Rss|Pss): +(\d+) kB", text))
        return {f"{n.upper()} {when}": int(kb) * 1024 / 1e6 for n, kb in found.items()}

    def effort(self) -> tuple[float, int]:
        """Read its CPU time, in ms, and how often its threads were switched to."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        switches = 0
        for path in Path(f"/proc/{self.pid}/task").glob("*/status"):
            switches += sum(
                map(int, re.findall(r"_switches:\t(\d+)", path.read_text()))
            )
        return ticks * 1000 / os.sysconf("SC_CLK_TCK"), switches


def wait_until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server takes connections; look every millisecond."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((LOCAL, port)).close()
            return
        time.sleep(0.001)
    raise RuntimeError(f"{process.args!r} does not listen")


@contextlib.contextmanager
def serving(
    bench: Bench, name: str, settings: Mapping[str, str] = SETTINGS
) -> Iterator[Server]:
    """Run a server from its spawn to its end."""
    port = free_port()
    own = {"WAKER_PIN": PIN, "WAKER_LISTEN": f"{LOCAL}:{port}"}
    with (bench.folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *COMMANDS[name]],
            cwd=bench.folder,
            env=environment({**settings, **own}),
            stdout=log,
            stderr=log,
        )
    try:
        wait_until_open(port, process)
        yield Server(process.pid, Client(port))
    finally:
        process.terminate()
        process.wait(30)


def take_all(listener: socket.socket) -> None:
    """Accept connections, and hang up."""
    with contextlib.suppress(OSError):  # closed
        while True:
            listener.accept()[0].close()


@contextlib.contextmanager
def machine_up() -> Iterator[dict[str, str]]:
    """Have a machine whose system is up; yields the settings for it."""
    with bind(LOCAL, 0) as listener:
        listener.listen(128)
        threading.Thread(target=take_all, args=(listener,), daemon=True).start()
        yield SETTINGS | {
            "WAKER_INITRD_SSH_PORT": str(free_port()),
            "WAKER_SYSTEM_SSH_PORT": str(listener.getsockname()[1]),
        }
        listener.shutdown(socket.SHUT_RDWR)


# ---- Load ----------------------------------------------------------------------------


def load(
    bench: Bench, server: Server, what: str, count: int, at_once: int
) -> dict[str, float]:
    """Make requests with ab: status, page or refused PIN; all must get their answer."""
    wrong, percents = bench.folder / "wrong.json", bench.folder / "percents.csv"
    wrong.write_text('{"pin": "wrong-13579"}')
    percents.unlink(missing_ok=True)
    path, options = {
        "status": (
            "/api/status",
            ["-H", f"Authorization: Bearer {server.client.token}"],
        ),
        "page": ("/", []),
        "refused PIN": ("/api/auth", ["-p", str(wrong), "-T", "application/json"]),
    }[what]
    options += ["-q", "-l", "-s", str(GIVE_UP), "-n", str(count), "-c", str(at_once)]
    told = subprocess.run(
        [
            "ab",
            *options,
            "-e",
            str(percents),
            f"http://{LOCAL}:{server.client.port}{path}",
        ],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    speed = re.search(r"Requests per second: +([\d.]+)", told)
    if not speed:
        return {"requests/s": 0.0}
    refused = re.search(r"Non-2xx responses: +(\d+)", told)
    if int(refused[1] if refused else 0) != (count if what == "refused PIN" else 0):
        raise RuntimeError(f"not the answers that were expected:\n{told}")
    at = dict(row[:2] for row in csv.reader(percents.read_text().splitlines()))
    return {
        "requests/s": float(speed[1]),
        "p50 ms": float(at["50"]),
        "p99 ms": float(at["99"]),
    }


# What is asked for, how many at a time, and how many in all; slow ones: fewer.
LOADS = (
    ("status", 1, 1000),
    *((w, 8, 2000) for w in ("status", "page", "refused PIN")),
)
SLOW_LOADS = tuple((what, 8, 500) for what in ("status", "page", "refused PIN"))
Load = tuple[str, int, int]


def make_tables(part: str, loads: Sequence[Load]) -> dict[Load, Table]:
    """Make a table for each load."""
    return {row: Table(f"{part}: {row[0]}, {row[1]} at a time", FLOOR) for row in loads}


def all_loads(
    bench: Bench, tables: Mapping[Load, Table], name: str, server: Server
) -> None:
    """Make a round of requests to one server."""
    for (what, at_once, count), table in tables.items():
        table.add(name, load(bench, server, what, count, at_once))


# ---- Parts ---------------------------------------------------------------------------


def start(bench: Bench) -> Iterator[Table]:
    """Measure how long a server takes to its first answer."""
    table = Table("start", FLOOR)
    for number in range(max(bench.rounds, 7) + 1):
        for name in COMMANDS:
            began = time.perf_counter()
            with serving(bench, name) as server:
                assert server.client.call("GET", "/").status == 200
                took = (time.perf_counter() - began) * 1000
                if number:  # the first one is to have all files in memory
                    table.add(name, {"ms to the first answer": took})
    yield table


def memory(bench: Bench) -> Iterator[Table]:
    """Measure memory before and after what is asked of a server."""
    table = Table("memory, MB", FLOOR)
    disks = Disks({"cryptroot": PASSPHRASE})
    with paramiko_server(bench.folder, disks) as initrd:
        settings = SETTINGS | initrd.machine().settings()
        for name in list(COMMANDS) * bench.rounds:
            disks.save(initrd.state)
            with serving(bench, name, settings) as server:
                time.sleep(0.5)  # to settle
                table.add(name, server.memory("idle"))
                server.client.log_in()
                for what in ("status", "page"):
                    load(bench, server, what, 500, 8)
                table.add(name, server.memory("after 1,000 requests"))
                if name == WAKER:
                    body = {"passphrase": PASSPHRASE}
                    answer = server.client.call("POST", "/api/unlock", body)
                    assert answer.status == 200, answer.body
                    table.add(name, server.memory("after an unlock"))
    yield table


def idle(bench: Bench) -> Iterator[Table]:
    """Measure what servers do while nobody asks for anything; all at the same time."""
    table = Table(f"idle for {IDLE_SECONDS} s")
    with contextlib.ExitStack() as stack:
        servers = {n: stack.enter_context(serving(bench, n)) for n in COMMANDS}
        for server in servers.values():
            assert server.client.call("GET", "/").status == 200
        time.sleep(2)  # to settle
        before = {name: server.effort() for name, server in servers.items()}
        time.sleep(IDLE_SECONDS)
        for name, server in servers.items():
            cpu, switches = server.effort()
            done = {
                "CPU ms": cpu - before[name][0],
                "wake-ups": switches - before[name][1],
            }
            table.add(name, done)
    yield table


def requests(bench: Bench) -> Iterator[Table]:
    """Measure how fast requests are answered."""
    tables = make_tables("requests", LOADS)
    with contextlib.ExitStack() as stack:
        settings = stack.enter_context(machine_up())
        servers = {
            n: stack.enter_context(serving(bench, n, settings)) for n in COMMANDS
        }
        for server in servers.values():
            server.client.log_in()
        for _ in range(bench.rounds):
            for name, server in servers.items():
                all_loads(bench, tables, name, server)
    yield from tables.values()


def slow(bench: Bench) -> Iterator[Table]:
    """Measure the same while others are slow."""
    tables = make_tables("slow", SLOW_LOADS)
    with machine_up() as settings:
        for name in list(COMMANDS) * bench.rounds:
            with serving(bench, name, settings) as server:
                server.client.log_in()
                command = [sys.executable, siege.__file__, "--attack", "slow heads"]
                command += [str(SLOW), str(SLOW), LOCAL, str(server.client.port)]
                with subprocess.Popen(command) as others:
                    try:
                        time.sleep(2.5)  # until all of them are there
                        all_loads(bench, tables, name, server)
                    finally:
                        others.kill()
    yield from tables.values()


def absences() -> Iterator[tuple[str, dict[str, str]]]:
    """Make machines that are off: how, and the settings."""
    nobody = "192.168.77.99"
    yield "ports refuse", {}
    with contextlib.closing(Blackhole(LOCAL)) as one:
        with contextlib.closing(Blackhole(LOCAL)) as other:
            ports = {"INITRD": str(one.port), "SYSTEM": str(other.port)}
            yield "blackholed", {f"WAKER_{n}_SSH_PORT": p for n, p in ports.items()}
    yield "no such host in the LAN", {"WAKER_HOMELAB_HOST": nobody}


def first_status(client: Client) -> float:
    """Measure how long a status takes, in seconds."""
    client.log_in()
    began = time.perf_counter()
    assert client.call("GET", "/api/status").json["state"] in ("off", "booting")
    return time.perf_counter() - began


def off(bench: Bench) -> Iterator[Table]:
    """Measure how long a status takes where the machine is off."""
    table = Table("off")
    with hosts(2) as (box, machine):
        wire(box, "lan", "192.168.77.1/24", machine, "192.168.77.20/24")
        for how, settings in absences():
            closed = {
                "WAKER_INITRD_SSH_PORT": str(free_port()),
                "WAKER_SYSTEM_SSH_PORT": str(free_port()),
            }
            for _ in range(bench.rounds):
                in_box = "WAKER_HOMELAB_HOST" in settings
                command = box.command() if in_box else []
                with daemon(SETTINGS | closed | settings, *command) as started:
                    ask = functools.partial(first_status, started.client)
                    seconds = box.run(ask) if in_box else ask()
                    table.add(how, {"s to the first status": seconds})
    yield table


# ---- The unlock ----------------------------------------------------------------------


UNLOCK_PARTS = {  # what waker tells, and what it has done then
    "sent": "start, imports, login, and the command until the passphrase has left",
    "unlocked": "the verdict, and the command again for another disk",
    "end": "end of the process",
}


def milliseconds(command: Sequence[str], folder: Path, given: bytes = b"") -> float:
    """Measure how long a program runs."""
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, input=given, check=True, capture_output=True)
    return (time.perf_counter() - began) * 1000


def ssh_command(initrd: Initrd, folder: Path) -> list[str]:
    """Write how OpenSSH unlocks, with the host key pinned."""
    known = folder / "known_hosts"
    known.write_text(f"[{LOCAL}]:{initrd.port} {initrd.host_key}\n")
    options = [f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes"]
    options += ["BatchMode=yes", "IdentitiesOnly=yes", "GlobalKnownHostsFile=none"]
    command = ["ssh", "-F", "none", "-i", str(initrd.ssh_key), "-p", str(initrd.port)]
    command += [word for option in options for word in ("-o", option)]
    return [*command, f"root@{LOCAL}", "cryptroot-unlock"]


def steps(command: Sequence[str], bench: Bench, initrd: Initrd) -> dict[str, float]:
    """Let waker unlock; returns when each line came and when all was over, in ms."""
    began, times = time.perf_counter(), {}
    with subprocess.Popen(
        command,
        cwd=bench.folder,
        env=environment(initrd.machine().settings()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(PASSPHRASE.encode())
        process.stdin.close()
        for line in process.stdout:
            told = json.loads(line)
            times[told.get("outcome", "sent")] = (time.perf_counter() - began) * 1000
    assert "unlocked" in times, times
    return times | {"end": (time.perf_counter() - began) * 1000}


def parts_of_a_start(bench: Bench, parts: Table) -> None:
    """Measure what an unlock does before it connects, in programs of their own."""
    python, both = sys.executable, {}
    for code in ("pass", "import waker", "import waker, paramiko"):
        both[code] = milliseconds([python, "-c", code], bench.folder)
    anew = milliseconds([python, "waker.py", "--version"], bench.folder)
    ready = milliseconds([python, "-m", "waker", "--version"], bench.folder)
    told = {
        "alone: start of the interpreter": both["pass"],
        "alone: import of waker, compiled": both["import waker"] - both["pass"],
        "alone: to compile waker.py": anew - ready,
        "alone: import of paramiko": both["import waker, paramiko"]
        - both["import waker"],
    }
    for row, took in told.items():
        parts.add(row, {"ms": took})


def unlock(bench: Bench) -> Iterator[Table]:
    """Measure the unlock, and OpenSSH doing the same."""
    table, parts = Table("unlock", "ssh"), Table(f"unlock, its parts: {WAKER}")
    disks, given = Disks({"cryptroot": PASSPHRASE}), PASSPHRASE.encode()
    with dropbear(bench.folder, disks) as initrd:
        ssh = ssh_command(initrd, bench.folder)
        for _ in range(max(bench.rounds, 7)):
            disks.save(initrd.state)
            table.add("ssh", {"ms": milliseconds(ssh, bench.folder, given)})
            assert not Disks.load(initrd.state).locked
            disks.save(initrd.state)
            command = [sys.executable, *COMMANDS[WAKER], "unlock"]
            times = steps(command, bench, initrd)
            table.add(WAKER, {"ms": times["end"]})
            last = 0.0
            for name, part in UNLOCK_PARTS.items():
                parts.add(part, {"ms": times[name] - last})
                last = times[name]
            parts_of_a_start(bench, parts)
            disks.save(initrd.state)
            emulation = [sys.executable, cryptroot_unlock.__file__, str(initrd.state)]
            for row in ("opens", "finds nothing to open"):
                took = milliseconds(emulation, bench.folder, given)
                parts.add(f"alone: cryptroot-unlock {row}", {"ms": took})
    yield table
    yield parts


def packet(bench: Bench) -> Iterator[Table]:
    """Measure the magic packet, and see that both send the same one."""
    table = Table("packet", "wakeonlan")
    wanted = b"\xff" * 6 + bytes.fromhex(MAC.replace(":", "")) * 16
    with bind_udp(LOCAL, 9) as udp, serving(bench, WAKER) as server:
        udp.settimeout(5)
        server.client.log_in()
        for _ in range(max(bench.rounds, 7) * 3):
            command = ["wakeonlan", "-i", LOCAL, "-p", "9", MAC]
            table.add("wakeonlan", {"ms": milliseconds(command, bench.folder)})
            began = time.perf_counter()
            assert server.client.call("POST", "/api/wol").status == 200
            took = (time.perf_counter() - began) * 1000
            table.add(f"{WAKER}, three packets", {"ms": took})
            assert [udp.recv(2048) for _ in range(4)] == [wanted] * 4
    yield table


# ---- Growth --------------------------------------------------------------------------


def as_client(number: int) -> dict[str, str]:
    """Write the header field that makes us a client of another address."""
    return {"X-Forwarded-For": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"}


def log_in_as(client: Client, number: int) -> None:
    """Log in; ten times each, from one address after the other."""
    answer = client.call("POST", "/api/auth", {"pin": PIN}, as_client(number // 10))
    assert answer.status == 200, answer.body
    client.token = answer.json["token"]


def attempt_as(client: Client, number: int) -> None:
    """Make an attempt that counts, from an address that nobody else has."""
    answer = client.call("POST", "/api/auth", {}, as_client(1 + number))
    assert answer.status in (400, 429), answer.body


def growth(bench: Bench) -> Iterator[Table]:
    """Measure memory and latency with more and more of what a daemon keeps."""
    table = Table("growth")
    held: list[socket.socket] = []

    def hold(client: Client, number: int) -> None:
        held.append(siege.connect(LOCAL, client.port, siege.source(number)))
        if number % 200 == 0:
            time.sleep(0.02)  # or the queue of those who want in would be full

    makers: dict[str, Callable[[Client, int], None]] = {
        "idle connections": hold,
        "tokens": log_in_as,
        "limiter entries": attempt_as,
    }
    for kind, add in makers.items():
        settings = SETTINGS | {"WAKER_TRUSTED_PROXY": "127.0.0.0/8"}
        with machine_up() as ports, serving(bench, WAKER, ports | settings) as server:
            log_in_as(server.client, 0)
            done = 1 if add == log_in_as else 0
            for size in SIZES:
                while add == hold and held:
                    held.pop().close()
                for number in range(0 if add == hold else done, size):
                    add(server.client, number)
                done = size
                time.sleep(0.5)  # to settle
                for _ in range(100):
                    began = time.perf_counter()
                    assert server.client.call("GET", "/api/status").status == 200
                    took = (time.perf_counter() - began) * 1000
                    table.add(f"{size:,} {kind}", {"status ms": took})
                table.add(f"{size:,} {kind}", server.memory("MB"))
        while held:
            held.pop().close()
    yield table


PARTS: dict[str, Callable[[Bench], Iterator[Table]]] = {
    "start": start,
    "memory": memory,
    "idle": idle,
    "requests": requests,
    "slow": slow,
    "off": off,
    "unlock": unlock,
    "packet": packet,
    "growth": growth,
}


# ---- Promises ------------------------------------------------------------------------


class Promise(NamedTuple):
    """What is promised, what was found, and whether it holds."""

    promise: str
    found: str
    holds: bool


def compare(
    table: Table, row: str, column: str, base: str, limit: float, *, least: bool = False
) -> Promise:
    """Judge a figure by its ratio to another row's: at most the limit, or at least."""
    ratio = table.ratio(row, column, base)
    own, other = (
        amount(statistics.median(table.rows[name].get(column, [math.inf])))
        for name in (row, base)
    )
    return Promise(
        f"{table.title}: {row}: {column} {'>=' if least else '<='} {limit:g} x {base}",
        f"{own} to {other}, x{ratio:.2f}",
        ratio >= limit if least else ratio <= limit,
    )


def judge_memory(table: Table) -> Iterator[Promise]:
    """Judge the memory at first, and what is kept later."""
    yield compare(table, WAKER, "RSS idle", FLOOR, 1.4)
    columns = table.rows[WAKER]
    for later in ("after 1,000 requests", "after an unlock"):
        pairs = zip(columns["RSS idle"], columns[f"RSS {later}"], strict=True)
        change = max((after - before for before, after in pairs), key=abs)
        what = f"{table.title}: {WAKER}: RSS {later} is idle's +-1"
        yield Promise(what, f"{change:+.2f} at the worst", abs(change) <= 1)


def judge_requests(table: Table) -> Iterator[Promise]:
    """Judge how fast the page is; all else is shown, not required."""
    if "page" in table.title:
        yield compare(table, WAKER, "requests/s", FLOOR, 0.9, least=True)


def judge_idle(table: Table) -> Iterator[Promise]:
    """Judge the rest."""
    (times,) = table.rows[WAKER]["wake-ups"]
    yield Promise(f"{table.title}: {WAKER}: no wake-up", f"{times:g}", times == 0)


def judge_off(table: Table) -> Iterator[Promise]:
    """Judge the slowest answer of each kind."""
    for row, columns in table.rows.items():
        worst = max(columns["s to the first status"])
        yield Promise(f"off: {row}: at most 1 s", f"{worst:.2f} s", worst <= 1)


def judge_time(table: Table) -> Iterator[Promise]:
    """Judge waker by its time."""
    limit = 1.8 if table.title == "start" else 2
    for column in table.rows.get(WAKER, {}):
        yield compare(table, WAKER, column, table.base, limit)


JUDGES: dict[str, Callable[[Table], Iterator[Promise]]] = {
    "start": judge_time,
    "memory": judge_memory,
    "idle": judge_idle,
    "requests": judge_requests,
    "off": judge_off,
    "unlock": judge_time,
}


# ---- The run -------------------------------------------------------------------------


def missing() -> str:
    """Tell what is not there, and what helps; empty if nothing is."""
    if os.geteuid():
        return "root is needed, for namespaces and port 9"
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    packages = {p for name, p in PROGRAMS.items() if not shutil.which(name, path=path)}
    return f"apt install {' '.join(sorted(packages))}" if packages else ""


def prepare(folder: Path) -> None:
    """Copy the programs to where they run, and compile them."""
    here = Path(__file__).parent
    for path in (PROGRAM, Path(PROGRAM).with_name("ui.html"), here / "peers.py"):
        shutil.copy(path, folder)
    make(folder / "checkout", "dist")
    compile_all = [sys.executable, "-m", "compileall", "-q", str(folder)]
    subprocess.run(compile_all, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def about() -> dict[str, Any]:
    """Tell on what, and when, all this was measured."""
    lines = Path(__file__).with_name("bench_requirements.txt").read_text().splitlines()
    names = [line.partition("==")[0] for line in lines if "==" in line]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


def main(argv: Sequence[str]) -> int:
    """Measure, print the tables and the promises."""
    parser = argparse.ArgumentParser(description="Measure waker beside its peers.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args(argv)
    fault = missing()
    unknown = set(arguments.parts) - set(PARTS)
    if fault or unknown:
        sys.exit(f"bench: {fault or 'the parts are: ' + ', '.join(PARTS)}")
    told = about()
    tables: list[Table] = []
    promises: list[Promise] = []
    print(*(f"{name} {what}" for name, what in told.items()), sep="; ")
    with tempfile.TemporaryDirectory(prefix="waker-bench-") as name:
        prepare(Path(name))
        for part in arguments.parts or PARTS:
            for table in PARTS[part](Bench(Path(name), arguments.rounds)):
                table.show()
                tables.append(table)
                if part in JUDGES:
                    promises += JUDGES[part](table)
    print("\npromises")
    for promise in promises:
        verdict = "holds" if promise.holds else "does not hold"
        print(f"  {verdict:15}{promise.promise}: {promise.found}")
    if arguments.json:
        told |= {"tables": [table.export() for table in tables]}
        told |= {"promises": [promise._asdict() for promise in promises]}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
