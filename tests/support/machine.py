"""A machine that is off, asks for a passphrase or is up, as a test says.

Its initrd is dropbear, which runs a shell script of the test's as `cryptroot-unlock`.
"""

import contextlib
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    PASSPHRASE,
    Client,
    Daemon,
    daemon,
    need,
    wait_for,
    with_limits,
)
from homelab import Ports, Settings, blackhole
from ssh_servers import ALONE, AS_USER_1, process

SILENT, CLOSED, OPEN = "does not answer", "refuses connections", "is open"

# The words of Debian's cryptroot-unlock, for scripts that act as one.
WORDS = """
cd "$(dirname "$0")"
echo "$SSH_ORIGINAL_COMMAND" >>commands
asks() { echo "Please unlock disk $1"; }
take() { # a client that hangs up has given nothing
    given=$(od -An -v -tx1 | tr -d ' \\n')
    [ -z "$given" ] || echo "$given" >>received
}
opens() { echo "cryptsetup: $1 set up successfully" >&2; }
rejects() {
    echo 'cryptsetup: cryptsetup failed, bad password or options?' >&2
    exit 1
}
disk() { # asks until it gets the right passphrase, and is open from then on
    [ -e "$1.open" ] && return
    asks "$1" && take
    [ "$(tail -n 1 received)" = "$(cat right)" ] || rejects
    echo >"$1.open" && opens "$1" && exit
}
"""
ONCE = "[ -e root.open ] && exit; echo >root.open"
SLOWLY = f"{ONCE}; asks root; take; sleep 1; opens root"
EARLY = "echo Try again later; exit 1"
SOON = "until [ -e go ]; do sleep 0.1; done"  # until a test makes the file
# What waker 3's cryptroot-unlock for systemd says before its rejection.
WARNS = "echo cryptroot-unlock: systemd may give up after another wrong passphrase"


class Machine(Ports):
    """A machine whose ports show what a test wants, by default on loopback.

    Its initrd is dropbear.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shown = contextlib.ExitStack()

    def show(self, initrd: str = SILENT, system: str = SILENT) -> "Machine":
        """Let each port be silent, closed or open. Whatever was there is gone."""
        self._shown.close()
        for port, state in ((self.initrd_port, initrd), (self.system_port, system)):
            if state == SILENT:
                self._shown.enter_context(blackhole(self.address, port))
            if state == OPEN:
                listener = socket.create_server((self.address, port), backlog=99)
                self._shown.enter_context(listener)
        return self

    def make_keys(self) -> None:
        """Make its keys and waker's when they are needed first."""
        if self.host_key:
            return
        file = str(self.folder / "host_key")
        host_key = [need("dropbearkey"), "-t", "ed25519", "-f", file]
        made = subprocess.run(host_key, check=True, capture_output=True, text=True)
        self.host_key = re.findall("ssh-ed25519 .*", made.stdout)[0]
        ssh_key = [need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f"]
        subprocess.run([*ssh_key, str(self.ssh_key)], check=True)
        home = self.folder / "home/.ssh"
        home.mkdir(parents=True, mode=0o700)
        shutil.copy(f"{self.ssh_key}.pub", home / "authorized_keys")
        passwd = f"root:x:1:1::{self.folder}/home:/bin/sh\n"
        self.folder.joinpath("passwd").write_text(passwd)

    def ask(self, script: str = "disk root", right: str = PASSPHRASE) -> "Machine":
        """Boot to the initrd, whose unlock command is the script. No disk is open."""
        self.make_keys()
        self.show(CLOSED, CLOSED)
        for left in ("received", "commands", "root.open", "data.open"):
            self.folder.joinpath(left).unlink(missing_ok=True)
        self.folder.joinpath("right").write_text(right.encode().hex())
        command = self.folder / "cryptroot-unlock"
        command.write_text(WORDS + script)
        server = [need("dropbear"), "-F", "-s", "-r", "host_key", "-P", "pid", "-p"]
        server += [f"{self.address}:{self.initrd_port}", "-c", f"exec sh {command}"]
        mount = f"cd {self.folder}; mount --bind passwd /etc/passwd; exec {AS_USER_1}"
        script = f"{mount} {shlex.join(server)}"
        running = process(self.initrd_port, script, *ALONE, address=self.address)
        self._shown.enter_context(running)
        return self

    def received(self) -> list[bytes]:
        """Return what the unlock command was given, each time."""
        file = self.folder / "received"
        lines = file.read_text().splitlines() if file.exists() else []
        return [bytes.fromhex(line) for line in lines]

    def commands(self) -> list[str]:
        """Return the commands that it was asked to run."""
        file = self.folder / "commands"
        return file.read_text().splitlines() if file.exists() else []

    def touch(self, name: str) -> None:
        """Make the file that a script waits for."""
        self.folder.joinpath(name).touch()

    def settings(self, **others: object) -> Settings:
        self.make_keys()
        return super().settings(**{"HOMELAB_NAME": "Home server"} | others)

    @contextlib.contextmanager
    def waker(
        self, settings: Settings | None = None, /, **limits: float
    ) -> Iterator[Daemon]:
        """Run the daemon for this machine, with shorter limits; its owner logs in."""
        limits["packet_port"] = self.packet_port
        program = with_limits(self.folder, **limits)
        with daemon(settings or self.settings(), program=program) as started:
            started.client.log_in()
            yield started

    @contextlib.contextmanager
    def starting(self, **limits: float) -> Iterator[Client]:
        """Run the daemon, and begin a start."""
        with self.waker(**limits) as started:
            assert started.client.start().status == 200
            yield started.client

    def close(self) -> None:
        self._shown.close()
        super().close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine that is off."""
    folder = tmp_path / "machine"
    folder.mkdir()
    with contextlib.closing(Machine(folder)) as machine:
        yield machine.show()


ENDINGS = "done", "failed", "cancelled"


def wait_until(client: Client, phase: str) -> Any:
    """Wait until a start has reached a phase; returns what the status shows."""
    start = wait_until_shown(client, lambda now: now["phase"] in (phase, *ENDINGS))
    assert start["phase"] == phase, start
    return start


def wait_until_shown(client: Client, right: Callable[[Any], object]) -> Any:
    """Wait until the status shows the right start. It has news once a second."""
    return wait_for(lambda: client.status()["start"], right, pause=0.2)


def wait_for_state(client: Client, state: str, seconds: float = 50) -> Any:
    """Wait until the status shows that state; returns the status."""
    return wait_for(client.status, lambda now: now["state"] == state, seconds, 0.2)
