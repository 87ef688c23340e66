"""The messages to a phone: when they are sent, and where they go.

The script runs as on a box, with the real `waker state`. Its phone is an HTTP server.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import CHECKOUT, environment, need, need_root
from machine import CLOSED, OPEN, SILENT, Machine
from ssh_servers import free_port

NOTIFY = CHECKOUT / "box/notify"
WAITING = "The server is waiting for its passphrase."
UP = "The server is up."
PORTS = {
    "off": (SILENT, SILENT),
    "booting": (CLOSED, CLOSED),
    "locked": (OPEN, CLOSED),
    "up": (CLOSED, OPEN),
}
NO_ROUTE = "224.0.0.1"  # nobody connects to a multicast address


def hello(state: str) -> str:
    return f"Messages from waker arrive here. The server is {state}."


class Phone(ThreadingHTTPServer):
    """Receives messages. Like ntfy, it repeats the topic in its answer."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        super().__init__((address, 0), Receiver)
        self.topic = f"/{secrets.token_hex(8)}"
        self.url = f"http://{address}:{self.server_port}{self.topic}"
        self.status = 200
        self.paths: list[str] = []
        self.messages: list[str] = []  # that it has accepted
        self.arrived, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    @contextlib.contextmanager
    def listening(self) -> Iterator["Phone"]:
        with self:
            threading.Thread(target=self.serve_forever, daemon=True).start()
            try:
                yield self
            finally:
                self.may_answer.set()
                self.shutdown()

    def new_messages(self) -> list[str]:
        """Return the messages since the last call."""
        messages, self.messages = self.messages, []
        return messages


class Receiver(BaseHTTPRequestHandler):
    server: Phone

    def do_POST(self) -> None:
        message = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.arrived.set()
        self.server.may_answer.wait(60)
        self.server.paths.append(self.path)
        if self.server.status == 200:
            self.server.messages.append(message)
        self.send_response(self.server.status)
        self.send_header("Location", f"/elsewhere{self.path}")  # followed by a GET
        self.end_headers()
        self.wfile.write(f'{{"topic": "{self.path}"}}'.encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def phone() -> Iterator[Phone]:
    with Phone().listening() as phone:
        yield phone


@dataclass
class Box:
    """Has waker and its settings, the phone's address, and the last state."""

    folder: Path
    machine: Machine
    shell: str = "sh"

    def __post_init__(self) -> None:
        self.state = self.folder / "state"
        self.settings, self.url = self.folder / "waker.env", self.folder / "notify_url"
        self.waker = self.folder / "bin/waker"
        for folder in (self.state, self.waker.parent):
            folder.mkdir()
        waker = f'#!/bin/sh\nexec {sys.executable} {CHECKOUT}/waker.py "$@"\n'
        self.waker.write_text(waker)
        self.waker.chmod(0o755)
        self.settle()

    def settle(self, **others: str) -> None:
        settings = self.machine.settings(**others)
        # Without a key: the unit passes none.
        del settings["WAKER_SSH_KEY"], settings["WAKER_SSH_HOST_KEY"]
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self.settings.write_text("".join(lines))

    def show(self, state: str) -> None:
        """Let a check find the server in that state."""
        if state == "unknown":
            self.settle(HOMELAB_HOST=NO_ROUTE)
        else:
            self.settle()
            self.machine.show(*PORTS[state])

    def environment(self) -> dict[str, str]:
        path = f"{self.waker.parent}:{os.environ['PATH']}"
        ours = {"PATH": path, "STATE_DIRECTORY": f"{self.state}"}
        return environment(ours | {"HOME": str(self.folder)})

    def command(self) -> list[str]:
        shell = need(*self.shell.split()[:1]), *self.shell.split()[1:]
        return [*shell, f"{NOTIFY}/notify", str(self.settings), str(self.url)]

    def check(self) -> subprocess.CompletedProcess[str]:
        """Do what the timer does every minute."""
        return subprocess.run(
            self.command(),
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def box(machine: Machine, phone: Phone, tmp_path: Path) -> Box:
    need("curl")
    box = Box(tmp_path, machine)
    box.url.write_text(f"{phone.url}\n")
    return box


# ---- What is sent, and when ----------------------------------------------------------

# Each check finds a state, and may send a message.
CHECKS = {
    "it waits and is up again": "up=hello locked=waits locked booting up=up up",
    "it was locked too briefly to be seen": "off=hello off up=up",
    "it was seen while it booted": "off=hello booting booting up=up",
    "it waits at first": "locked=waits locked up=up",
    "it boots at first": "booting=hello locked=waits",
    "one check gets no answer": "up=hello off up off up",
    "two checks get no answer": "up=hello off off up=up",
    "one check gets no answer while it waits": "locked=waits off locked",
    "two checks get no answer while it waits": "locked=waits off off locked=waits",
    "the power fails briefly": "up=hello off locked=waits off up=up",
    "it restarts": "up=hello off booting locked=waits booting up=up",
    "the box has no network": "unknown up=hello unknown unknown up",
    "the box has no network while it waits": "locked=waits unknown locked unknown",
    "the box has no network between": "up=hello off unknown off up=up",
}


@pytest.mark.parametrize("shell", ["dash", "busybox sh"])
@pytest.mark.parametrize("checks", CHECKS.values(), ids=CHECKS)
def test_a_message_is_sent_only_when_the_state_has_changed(
    checks: str, shell: str, box: Box, phone: Phone
) -> None:
    box.shell = shell
    for check in checks.split():
        state, _, message = check.partition("=")
        words = {"": [], "hello": [hello(state)], "waits": [WAITING], "up": [UP]}
        box.show(state)
        ended = box.check()
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
        assert phone.new_messages() == words[message], check


@pytest.mark.parametrize("failure", ["status 500", "status 302", "refused"])
def test_a_message_that_cannot_be_sent_is_tried_again(
    failure: str, box: Box, phone: Phone
) -> None:
    kind, _, status = failure.partition(" ")

    def fail() -> None:
        if kind == "refused":
            box.url.write_text(f"http://127.0.0.1:{free_port()}{phone.topic}\n")
        phone.status = int(status or 200)
        ended = box.check()
        assert ended.returncode
        assert ended.stderr.startswith("curl: (")
        assert phone.new_messages() == []

    def succeed(*messages: str) -> None:
        box.url.write_text(f"{phone.url}\n")
        phone.status = 200
        assert box.check().returncode == 0
        assert phone.new_messages() == [*messages]

    box.show("up")
    fail()  # the very first message
    succeed(hello("up"))
    box.show("locked")
    fail()
    fail()
    succeed(WAITING)
    succeed()
    # If the server is as it was before, the message is not sent any more.
    box.show("up")
    fail()
    box.show("locked")
    succeed()
    # Its next state has another message.
    box.show("off")
    succeed()
    succeed()
    box.show("locked")
    fail()
    box.show("up")
    succeed(UP)


def test_wrong_settings_are_an_error_and_change_nothing(box: Box, phone: Phone) -> None:
    box.settings.write_text("WAKER_HOMELAB_HOST=nonsense\n")
    ended = box.check()
    assert ended.returncode == os.EX_CONFIG
    assert "WAKER_HOMELAB_HOST" in ended.stderr
    assert [*box.state.iterdir()] == []
    assert phone.messages == []


def test_a_full_disk_repeats_no_message(box: Box, phone: Phone) -> None:
    """In a mount namespace, on a file system that has room for one file."""
    need_root()
    box.show("locked")
    script = """
        mount -t tmpfs -o size=4k none "$STATE_DIRECTORY"
        echo up >"$STATE_DIRECTORY/last"
        for n in 1 2 3; do "$@" && exit 1; done
        mount -o remount,size=64k "$STATE_DIRECTORY"
        "$@"
        "$@" """
    enter = [need("unshare"), "--mount", "sh", "-ec", script, "sh", *box.command()]
    subprocess.run(enter, env=box.environment(), check=True)
    assert phone.messages == [WAITING]


# ---- The topic's address -------------------------------------------------------------


def test_the_address_arrives_as_it_is(box: Box, phone: Phone) -> None:
    """Even quotes and backslashes, which `install` refuses, do no harm."""
    path = r"/a?b=c%20d&e=$HOME&f={1,2}[3-4]~;@:!*()+,`id`'" + r'"\n\\'
    box.url.write_text(phone.url.replace(phone.topic, path) + "\n")
    # Whatever root's curl is told in general is not for this one.
    box.folder.joinpath(".curlrc").write_text(f'url = "{phone.url}"\n')
    assert box.check().returncode == 0
    assert phone.paths == [path]


def test_no_process_has_the_address_in_its_arguments_or_environment(
    box: Box, phone: Phone
) -> None:
    phone.may_answer.clear()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        box.command(), env=box.environment(), stdout=pipe, stderr=pipe
    ) as process:
        assert phone.arrived.wait(60)
        public = b""
        for file in ("cmdline", "environ"):
            for path in Path("/proc").glob(f"[0-9]*/{file}"):
                with contextlib.suppress(OSError):  # it has ended, or is another user's
                    public += path.read_bytes()
        phone.may_answer.set()
        printed = process.communicate()
    assert b"--config" in public  # curl's own arguments were there
    assert phone.topic.encode() not in public
    assert printed == (b"", b"")
    assert phone.messages


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:1{topic}",
        "http://nowhere.invalid{topic}",
        "http://127.0.0.1:99999{topic}",
        "http://no such host{topic}",
        "ftp://127.0.0.1{topic}",
        "file://{topic}",
        "{topic}",
    ],
)
def test_an_address_that_does_not_work_is_not_printed(
    address: str, box: Box, phone: Phone
) -> None:
    box.url.write_text(address.format(topic=phone.topic) + "\n")
    ended = box.check()
    assert ended.returncode
    assert "curl: (" in ended.stderr
    assert phone.topic.strip("/") not in ended.stdout + ended.stderr


@pytest.mark.parametrize("status", [302, 404, 500])
def test_an_error_of_the_phones_server_does_not_print_the_address(
    status: int, box: Box, phone: Phone
) -> None:
    phone.status = status
    ended = box.check()
    assert ended.returncode
    assert "curl: (" in ended.stderr
    assert phone.topic.strip("/") not in ended.stdout + ended.stderr
    assert phone.paths == [phone.topic]


# ---- The units -----------------------------------------------------------------------


def test_systemd_understands_every_line_of_the_units(tmp_path: Path) -> None:
    units = ["waker-notify.service", "waker-notify.timer"]
    for name in units:
        text = NOTIFY.joinpath(name).read_text()
        program = text.replace("/usr/local/bin/waker-notify", need("true"))
        tmp_path.joinpath(name).write_text(program)
    verify = [need("systemd-analyze"), "verify", "--man=no", "--recursive-errors=no"]
    printed = subprocess.check_output(
        [*verify, *units], cwd=tmp_path, stderr=subprocess.STDOUT
    )
    assert printed == b""


def test_the_service_is_hardened() -> None:
    """Exposure of at most 1.2, by systemd's own scale of 0 to 10."""
    command = [need("systemd-analyze"), "security", "--offline=true", "--threshold=12"]
    unit = str(NOTIFY / "waker-notify.service")
    ended = subprocess.run(
        [*command, unit], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-300:]
