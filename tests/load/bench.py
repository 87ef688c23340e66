"""waker beside an empty server, plain paramiko and `ssh`: `make bench`, as root.

They take turns in each round. docs/load.md explains the figures. Times begin with the
start of the process; MB are its resident set. ApacheBench asks for 8 pages at a time.

    python3 tests/load/bench.py [ROUNDS]
"""

import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from conftest import CHECKOUT, PASSPHRASE, daemon, environment, need
from machine import Machine
from ssh_servers import ssh_to

Figures = Sequence[float]
Command = tuple[str, ...]

EMPTY_SERVER = """
import signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

page = open("ui.html", "rb").read()

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
EMPTY = sys.executable, "-c", EMPTY_SERVER
# What an unlock needs of paramiko.
PLAIN_UNLOCK = """
import os, sys
import paramiko

names = "HOMELAB_HOST", "INITRD_SSH_PORT", "SSH_KEY", "SSH_HOST_KEY"
host, port, key, pinned = (os.environ[f"WAKER_{name}"] for name in names)
transport = paramiko.Transport((host, int(port)))
transport.start_client()
if transport.get_remote_server_key().get_base64() not in pinned.split():
    sys.exit("the host key differs")
transport.auth_publickey("root", paramiko.Ed25519Key.from_private_key_file(key))
channel = transport.open_session()
channel.exec_command("cryptroot-unlock")
if b"Please unlock disk root" in channel.recv(100):
    channel.sendall(sys.stdin.buffer.read())
    channel.shutdown_write()
status = channel.recv_exit_status()
transport.close()
sys.exit(status)
"""
PARAMIKO = sys.executable, "-c", PLAIN_UNLOCK
LATER = "MB after 1,000, and an unlock by waker"
INSTALLED = CHECKOUT / "dist/installed"
WAKER = sys.executable, str(INSTALLED)


def show_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def show_head(*columns: str) -> None:
    print(f"\n| {' | '.join(columns)} |")
    show_row(*["---"] * len(columns))


def figure(number: float) -> str:
    return f"{number:,.{0 if number >= 100 or number % 1 == 0 else 1}f}"


def ask_for_pages(port: int) -> float:
    """Have ApacheBench ask for 1,000; returns how many came in a second."""
    command = [need("ab"), "-q", "-l", "-n", "1000", "-c", "8", f"127.0.0.1:{port}/"]
    told = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    assert "Non-2xx responses" not in told, told
    return float(re.findall(r"Requests per second: +([\d.]+)", told)[0])


def serve(machine: Machine, server: Command) -> Figures:
    """Return ms to the first page, MB, pages a second, and MB in the end."""
    settings = machine.ask().settings()
    began = time.perf_counter()
    with daemon(settings, program=server) as started:
        client = started.client
        assert client.call("GET", "/").status == 200
        figures = [(time.perf_counter() - began) * 1000, started.memory() / 1e6]
        figures.append(ask_for_pages(client.port))
        if server == WAKER:
            assert client.log_in().unlock().status == 200
        return [*figures, started.memory() / 1e6]


def unlock(machine: Machine, command: Command) -> Figures:
    """Return the ms that it takes."""
    env, given = environment(machine.ask().settings()), PASSPHRASE.encode()
    began = time.perf_counter()
    subprocess.run(command, env=env, input=given, capture_output=True, check=True)
    taken = (time.perf_counter() - began) * 1000
    assert machine.received() == [given]
    return [taken]


def medians(rounds: Sequence[Figures]) -> Figures:
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def compare(
    names: Sequence[str], rounds: Sequence[Sequence[Figures]]
) -> tuple[Figures, Figures]:
    """Print medians; returns the last one's, and their ratios to the first one's."""
    first, *others = zip(*rounds, strict=True)
    show_row(names[0], *map(figure, medians(first)))
    for name, figures in zip(names[1:], others, strict=True):
        pairs = [zip(*pair, strict=True) for pair in zip(first, figures, strict=True)]
        ratios = medians([[y / x for x, y in pair] for pair in pairs])
        cells = zip(map(figure, medians(figures)), ratios, strict=True)
        show_row(name, *(f"{cell} x{ratio:.2f}" for cell, ratio in cells))
    return medians(others[-1]), ratios


def main(times: int) -> int:
    """Print tables and promises; returns 0 if all is as it is promised."""
    print(os.cpu_count(), "processors,", "Python", platform.python_version())
    compiler = [sys.executable, "-IS", str(CHECKOUT / "box/pack.py"), "--compile"]
    subprocess.run([*compiler, CHECKOUT / "dist/waker", INSTALLED], check=True)
    with tempfile.TemporaryDirectory() as name, closing(Machine(Path(name))) as machine:
        show_head("server", "ms to the first page", "MB", "pages a second", LATER)
        rounds = [
            [serve(machine, each) for each in (EMPTY, WAKER)] for _ in range(times)
        ]
        figures, ratios = compare(["http.server", "waker"], rounds)
        show_head("unlock", "ms")
        ssh = *ssh_to(machine.folder, machine.settings()), "cryptroot-unlock"
        ways = PARAMIKO, ssh, (*WAKER, "unlock")
        rounds = [[unlock(machine, each) for each in ways] for _ in range(times)]
        _, (ratio,) = compare(["paramiko", "ssh", "waker"], rounds)
    kept = figures[3] - figures[1]
    promises = {
        "at most x1.45 of the time to the first page": ratios[0] <= 1.45,
        "at most x1.25 of the memory": ratios[1] <= 1.25,
        "at least x0.9 of the pages": ratios[2] >= 0.9,
        "after an unlock, at most 1 MB more than at first": kept <= 1,
        "an unlock takes no longer than with plain paramiko": ratio <= 1,
    }
    show_head("promise", "result")
    for promise, holds in promises.items():
        show_row(promise, "holds" if holds else "FAILS")
    return 0 if all(promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or ["7"])[0])))
