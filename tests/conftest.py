"""What the tests share: the daemon, in this process or its own, and a client."""

from __future__ import annotations  # names of waker.py may go

import contextlib
import functools
import gc
import http.client
import json
import os
import py_compile
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from homelab import MAC, Homelab, Settings

import waker

pytest_plugins = ["machine", "namespaces", "simulated"]  # which have fixtures
# The options and variables of the make that runs the tests are not for theirs. For
# users, Python buffers its output.
OPTIONS = "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "DESTDIR", "INIT", "PREFIX"
for variable in (*OPTIONS, "PYTHONUNBUFFERED"):
    os.environ.pop(variable, None)
PROGRAM = waker.__file__
CHECKOUT = Path(PROGRAM).parent
# The page, and the icon at its end, which is served by itself.
PAGE, _, ICON = CHECKOUT.joinpath("ui.html").read_bytes().partition(b"<!-- icon: ")
# For CHECKOUT, where make runs pytest. A script would be compiled at every start.
MODULE = (sys.executable, "-m", "waker")
BOX = (sys.executable, "-m", "box")  # with the commands of box/ as well
PIN = "pin-2468-pin"
PASSPHRASE = 'correct "horse" \\ stäple'
ODD_PASSPHRASE = "-n '$(id)` a\\tb\\0 " + "é" * 244 + "xy \u00a0 "  # 512 bytes
MACHINE = {"WAKER_HOMELAB_MAC": MAC, "WAKER_HOMELAB_HOST": "127.0.0.1"}
# Debian's packages of programs that have other names.
PACKAGES = {
    "ab": "apache2-utils",
    "cryptsetup": "cryptsetup-bin",
    "cmp": "diffutils",
    "ip": "iproute2",
    "fail2ban-regex": "fail2ban",
    "mke2fs": "e2fsprogs",
    "qemu-aarch64-static": "qemu-user-static",
    "qemu-system-aarch64": "qemu-system-arm",
    "qemu-system-x86_64": "qemu-system-x86",
    "sshd": "openssh-server",
    "update-binfmts": "binfmt-support",
    **dict.fromkeys(("dbclient", "dropbear", "dropbearkey"), "dropbear-bin"),
    **dict.fromkeys(("ssh", "ssh-keygen"), "openssh-client"),
    **dict.fromkeys(("systemctl", "systemd-analyze", "systemd-networkd"), "systemd"),
    **dict.fromkeys(
        ("nsenter", "prlimit", "setpriv", "setsid", "unshare"), "util-linux"
    ),
}
Fields = Mapping[str, str]
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skip", action="store_true", help="a skipped test has failed")
    parser.addoption("--cycles", type=int, default=1, help="boots in a row, tests/vm")
    parser.addoption("--screenshots", help="folder for pictures of the page")


# By module: how many of xdist's workers run its tests. Each starts a browser, or builds
# a program.
WORKERS = {"test_page": 4, "test_install": 4}
# Modules whose tests mostly wait: they begin while others keep the processors busy.
WAITS = "test_check", "test_start", "test_unlock", "test_watch"


@pytest.hookimpl(tryfirst=True)  # before -m selects, and before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_simulated = "simulation" in getattr(item, "fixturenames", ())
        if is_simulated and not item.get_closest_marker("quick"):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.stem not in WAITS)
    for number, item in enumerate(items):
        if count := WORKERS.get(item.path.stem):
            group = f"{item.path.stem} {number % count}"
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish() -> None:
    gc.freeze()  # Python's garbage collector skips what all tests share


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and item.config.getoption("--no-skip"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but no test may be: {report.longrepr}"
    return report


def each(names: str, table: Mapping[str, object]) -> pytest.MarkDecorator:
    """Run a test for each row of a table, which has a name and some columns."""
    return pytest.mark.parametrize(names.split(), table.values(), ids=[*table])


def need(program: str, *other_names: str) -> str:
    """Return a program's path, or skip."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin:/lib/systemd"
    for name in (program, *other_names):
        if found := shutil.which(name, path=path):
            return found
    pytest.skip(f"need {program} (package {PACKAGES.get(program, program)})")


def need_root() -> None:
    """Skip without root, or where root may make no namespaces, as in a chroot.

    tests/enter would have made an ordinary user root, by these two programs.
    """
    if os.geteuid():
        need("unshare")
        need("ip")
        pytest.skip("need root, because this system gives others no namespaces")
    need_namespaces()


def has_other_users() -> bool:
    """Return whether there are others than root, as in few user namespaces."""
    users = Path("/proc/self/uid_map").read_text().split()
    return int(users[2]) > 65535 and os.geteuid() == 0


def need_other_users() -> None:
    need_root()
    if not has_other_users():
        pytest.skip("need root: this system lets others be one user alone")


@functools.cache
def need_namespaces() -> None:
    probe = [need("unshare"), "--mount", "--net", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("need namespaces, which nobody can make here")


def wait_for(
    look: Callable[[], T],
    right: Callable[[T], object] = bool,
    seconds: float = 50,
    pause: float = 0.05,
) -> T:
    """Call `look` until its result is right, and return that."""
    deadline = time.monotonic() + seconds
    while not right(seen := look()):
        assert time.monotonic() < deadline, seen
        time.sleep(pause)  # leaves the processor to what it waits for
    return seen


def is_open(port: int, address: str = "127.0.0.1") -> bool:
    """Return whether a TCP port of this computer accepts connections."""
    with socket.socket() as tcp:
        return tcp.connect_ex((address, port)) == 0


def wait_for_process(argument: str, parent: int = 0) -> int:
    """Wait for the only process with that argument; returns its pid."""

    def find() -> list[str]:
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                arguments = proc.joinpath("cmdline").read_bytes().split(b"\0")
                if argument.encode() in arguments:
                    status = proc.joinpath("status").read_text()
                    if not parent or f"\nPPid:\t{parent}\n" in status:
                        found.append(proc.name)
        return found

    (pid,) = wait_for(find)
    return int(pid)


def interpose(folder: Path, code: str) -> str:
    """Compile C functions, which LD_PRELOAD puts in place of libc's; returns a path."""
    library = str(folder / "interposed.so")
    command = [need("gcc"), "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", library]
    subprocess.run([*command, "-xc", "-"], input=code, text=True, check=True)
    return library


def copy_checkout(folder: Path) -> None:
    """Copy what the Makefile needs: neither docs nor tests."""
    left_out = shutil.ignore_patterns(".*", "dist", "docs", "__pycache__", "test_*.py")
    shutil.copytree(CHECKOUT, folder, ignore=left_out, dirs_exist_ok=True)


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make in a folder that gets a copy of the checkout."""
    copy_checkout(folder)
    command = [need("make"), "--silent", "-C", str(folder), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)


def blocks(page: str, start: str) -> list[str]:
    """Return the commands and files in the section of a page that begins so."""
    text = CHECKOUT.joinpath(page).read_text()
    text = text[text.index(start) :].split("\n## ", 1)[0]
    found = re.findall(r"(?m)(?:^ {4}.*\n|^\n(?= {4}))+", text)
    return [re.sub(r"(?m)^ {4}", "", block).strip("\n") + "\n" for block in found]


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: Fields
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"])


@dataclass
class Client:
    """Talks to a daemon as a program would."""

    port: int
    token: str = ""
    host: str = "127.0.0.1"

    def call(
        self, method: str, path: str, body: object = None, headers: Fields | None = None
    ) -> Answer:
        """Make a request; bytes go as they are, anything else as JSON."""
        fields = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        if body is not None:
            fields["Content-Type"] = "application/json"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, data, fields | dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())

    def raw(self, request: bytes) -> tuple[int, bytes]:
        """Send bytes; returns the status and the body that come back."""
        with socket.create_connection((self.host, self.port), timeout=20) as tcp:
            tcp.sendall(request)
            received = b"".join(iter(lambda: tcp.recv(65536), b""))
        head, _, body = received.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def attempt(self, pin: str, headers: Fields | None = None) -> Answer:
        return self.call("POST", "/api/auth", {"pin": pin}, headers)

    def log_in(self, pin: str = PIN) -> Client:
        answer = self.attempt(pin)
        assert answer.status == 200, answer.body
        self.token = answer.json["token"]
        return self

    def status(self) -> Any:
        answer = self.call("GET", "/api/status")
        assert answer.status == 200, answer.body
        return answer.json

    def unlock(self, passphrase: object = PASSPHRASE) -> Answer:
        return self.call("POST", "/api/unlock", {"passphrase": passphrase})

    def start(self, passphrase: object = PASSPHRASE) -> Answer:
        return self.call("POST", "/api/start", {"passphrase": passphrase})


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /api/auth HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def environment(settings: Settings) -> dict[str, str]:
    """Make an environment with these settings and no others."""
    others = {n: v for n, v in os.environ.items() if not n.startswith("WAKER_")}
    return others | settings


UNLOCK = *MODULE, "unlock"


@contextlib.contextmanager
def serving(config: waker.Config, settings: Settings | None = None) -> Iterator[Client]:
    """Run the daemon in this process. To unlock, it needs the machine's settings."""
    app = waker.App(config, (UNLOCK, environment(settings or {})))
    tcp = waker.listen(("127.0.0.1", 0))
    server = waker.Server(app, tcp)
    threading.Thread(target=server.serve_forever, args=(None,)).start()
    try:
        yield Client(int(tcp.getsockname()[1]))
    finally:
        app.starter.stop()
        server.stop()


@dataclass
class Daemon:
    """The daemon in a process of its own, as its users run it."""

    process: subprocess.Popen[str]
    client: Client
    log: list[str]

    def uses(self) -> tuple[int, int]:
        """Count its threads, and its descriptors."""
        proc = Path(f"/proc/{self.process.pid}")
        return len([*proc.glob("task/*")]), len([*proc.glob("fd/*")])

    def memory(self) -> int:
        """Return the size of its resident set, in bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """Return for how many seconds it has used a processor."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        ticks = sum(map(int, stat.rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def busy(self, seconds: float) -> float:
        """Return the share of the time in which it uses a processor."""
        before = self.cpu_seconds()
        time.sleep(seconds)
        return (self.cpu_seconds() - before) / seconds

    def count_naps(self) -> int:
        """Return how often its threads have waited for something."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/status")
        shown = "".join(path.read_text() for path in tasks)
        return sum(map(int, re.findall(r"(?m)^voluntary_ctxt_switches:\t(\d+)", shown)))

    def stop(self) -> int:
        """Send SIGTERM; returns the exit status, and completes the log."""
        self.process.terminate()
        status = self.process.wait(120)
        assert self.process.stderr
        self.log += self.process.stderr.read().splitlines()
        return status


def with_limits(folder: Path, **limits: float) -> tuple[str, ...]:
    """Copy the program, with other limits; returns the command that runs the copy.

    A limit is a constant of waker.py, or a default of its Config. The copy is compiled
    here, once, and not by each of the processes that run it.
    """
    text = Path(PROGRAM).read_text()
    for name, value in limits.items():
        text, count = re.subn(rf"(?m)^( *{name}: \w+ =) [\d.]+", rf"\1 {value}", text)
        assert count == 1, f"waker.py has no single number {name}"
    copy = folder / "waker.py"
    copy.write_text(text)
    shutil.copy(CHECKOUT / "ui.html", folder)
    made = py_compile.compile(str(copy), str(copy.with_suffix(".pyc")), doraise=True)
    return sys.executable, str(made)


def run_waker(
    *arguments: str,
    settings: Settings | None = None,
    given: str = "",
    by: Sequence[str] = (),
    program: Sequence[str] = MODULE,
) -> subprocess.CompletedProcess[str]:
    """Run a command of waker.py to its end, perhaps by another command."""
    return subprocess.run(
        [*by, *program, *arguments],
        cwd=CHECKOUT,
        env=environment(settings or {}),
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,  # seconds; an unlock takes at most 60
    )


@functools.cache
def result_of(outcome: str) -> str:
    """Return what `waker unlock` prints at its end, with this outcome in it."""
    ended = run_waker("unlock", settings=MACHINE)  # which is given no passphrase
    return ended.stdout.strip().replace("error", outcome)


def run_python(code: str, folder: Path = CHECKOUT, given: str = "") -> str:
    """Run code that imports waker, of a folder, to its end; returns what it printed."""
    command = [sys.executable, "-c", code]
    return subprocess.check_output(
        command, cwd=folder, input=given, text=True, timeout=30
    )


@contextlib.contextmanager
def daemon(
    settings: Settings, *command: str, program: tuple[str, ...] = MODULE
) -> Iterator[Daemon]:
    """Run the daemon, and assert that it ends with status 0."""
    process = subprocess.Popen(
        [*command, *program],
        cwd=CHECKOUT,
        env=environment({"WAKER_PIN": PIN, "WAKER_LISTEN": "127.0.0.1:0"} | settings),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    log = [process.stderr.readline()]
    assert "listens on" in log[0], log[0] + process.communicate()[1]
    started = Daemon(process, Client(int(log[0].split()[-1])), log)
    try:
        yield started
        if process.poll() is None:
            assert started.stop() == 0, log
    except BaseException:  # which is what the test should end with, and soon
        process.kill()  # even if it takes no signal any more
        process.wait()
        raise


@pytest.fixture
def simulation() -> None:
    """Mark what simulates a whole box or server: it is slow, unless marked as quick.

    Such computers have several users, and files that are root's.
    """
    need_other_users()


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A folder that is not in memory, where waker refuses to be set up.

    On Debian 13, `tmp_path` is.
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Homelab]:
    """A machine that sleeps."""
    with contextlib.closing(Homelab(tmp_path, passphrase=PASSPHRASE)) as machine:
        yield machine


@pytest.fixture
def config(lab: Homelab) -> waker.Config:
    """The daemon's configuration for it."""
    return lab.config({"WAKER_PIN": PIN} | lab.settings())


@pytest.fixture
def api(config: waker.Config, lab: Homelab) -> Iterator[Client]:
    """A client of the daemon for it, without a token."""
    with serving(config, lab.settings()) as client:
        yield client
