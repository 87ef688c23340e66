"""A machine on loopback that is off, asks for a passphrase or is up, as a test says.

Its initrd is dropbear, which runs a shell script of the test's as `cryptroot-unlock`.
"""

import contextlib
import ctypes
import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    MACHINE,
    PASSPHRASE,
    Client,
    Daemon,
    daemon,
    is_open,
    need,
    need_root,
    shortened,
    wait_for,
)
from homelab import Blackhole, bind
from ssh_servers import AS_USER_1, run_unlock

MAC = MACHINE["WAKER_HOMELAB_MAC"]
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


class Machine:
    """A machine on loopback, whose ports show what a test wants.

    Its initrd is dropbear.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ssh_key = folder / "ssh_key"
        self.host_key = ""  # made when it is needed first
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("", 0))
        self.packet_port = int(self._udp.getsockname()[1])
        self._taken = [bind("127.0.0.1", 0) for _ in range(2)]
        ports = [int(taken.getsockname()[1]) for taken in self._taken]
        self.initrd_port, self.system_port = ports
        self._shown = contextlib.ExitStack()

    def show(self, initrd: str = SILENT, system: str = SILENT) -> "Machine":
        """Let each port be silent, closed or open. Whatever was there is gone."""
        self._shown.close()
        for port, state in ((self.initrd_port, initrd), (self.system_port, system)):
            if state == SILENT:
                hole = Blackhole("127.0.0.1", port)
                self._shown.callback(hole.close)
            if state == OPEN:
                listener = self._shown.enter_context(bind("127.0.0.1", port))
                listener.listen(99)
        return self

    def make_keys(self) -> None:
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
        need_root()  # a mount namespace of its own has the home that dropbear needs
        if not self.host_key:
            self.make_keys()
        self.show(CLOSED, CLOSED)
        for left in ("received", "commands", "root.open", "data.open"):
            self.folder.joinpath(left).unlink(missing_ok=True)
        self.folder.joinpath("right").write_text(right.encode().hex())
        command = self.folder / "cryptroot-unlock"
        command.write_text(WORDS + script)
        server = [need("dropbear"), "-F", "-s", "-r", "host_key", "-P", "pid", "-p"]
        server += [f"127.0.0.1:{self.initrd_port}", "-c", f"exec sh {command}"]
        namespace = [need("unshare"), "--mount", "--pid", "--fork"]
        mount = f"mount --bind {self.folder}/passwd /etc/passwd; exec {AS_USER_1}"
        process = subprocess.Popen(
            [*namespace, "sh", "-c", f"{mount} {shlex.join(server)}"],
            cwd=self.folder,
            stderr=subprocess.DEVNULL,
        )

        def cut_power() -> None:
            """Kill the namespace's first process, and thereby all, at once."""
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            if process.poll() is None:
                os.kill(int(children.read_text()), signal.SIGKILL)
            process.wait()  # until all of them have gone

        self._shown.callback(cut_power)
        port = self.initrd_port
        wait_for(lambda: is_open("127.0.0.1", port) or process.poll() is not None)
        assert process.poll() is None
        return self

    def received(self) -> list[bytes]:
        """Return what the unlock command was given, each time."""
        file = self.folder / "received"
        lines = file.read_text().splitlines() if file.exists() else []
        return [bytes.fromhex(line) for line in lines]

    def has_run(self) -> bool:
        return self.folder.joinpath("commands").exists()

    def packets(self) -> list[bytes]:
        """Return the packets that have arrived since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._udp.recv(2048, socket.MSG_DONTWAIT))
        return found

    def settings(self, **others: str) -> dict[str, str]:
        values = {
            "HOMELAB_MAC": MAC,
            "HOMELAB_HOST": "127.0.0.1",
            "HOMELAB_NAME": "Home server",
            "HOMELAB_BROADCAST": "127.255.255.255",
            "INITRD_SSH_PORT": str(self.initrd_port),
            "SYSTEM_SSH_PORT": str(self.system_port),
            "SSH_KEY": str(self.ssh_key),
            "SSH_HOST_KEY": self.host_key,
        }
        return {f"WAKER_{name}": value for name, value in (values | others).items()}

    def waker(self, **limits: float) -> contextlib.AbstractContextManager[Daemon]:
        """Run the daemon for this machine, with some limits shortened."""
        limits["packet_port"] = self.packet_port
        program = shortened(self.folder, **limits)
        return daemon(self.settings(), program=program)

    def unlock(
        self, given: str = PASSPHRASE, seconds: int = 60, /, **others: str
    ) -> dict[str, Any]:
        """Run `waker unlock`; returns its result, whose form is always the same."""
        return run_unlock(self.settings(**others), given, seconds)

    def close(self) -> None:
        self._shown.close()
        for taken in (self._udp, *self._taken):
            taken.close()


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


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@contextlib.contextmanager
def slow_to_open(file: Path) -> Iterator[Callable[[], bool]]:
    """Make whoever opens the file wait. Yields a function: does anybody wait?

    A lease does that: the kernel asks its holder to give it up first, by a signal that
    is ignored unless there is a handler. Source: fcntl(2).
    """
    with file.open("r+b") as leased:
        set_signal = 10  # F_SETSIG
        fcntl.fcntl(leased, set_signal, signal.SIGURG)
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield lambda: fcntl.fcntl(leased, fcntl.F_GETLEASE) != fcntl.F_WRLCK


class Frozen:
    """Stops some threads of another process, as if it had no processor for them.

    They must be asleep: one that has Python's lock would stop the others as well.
    """

    SEIZE, INTERRUPT, DETACH, ALL = 0x4206, 0x4207, 17, 0x40000000  # ptrace(2), wait(2)

    def __init__(self, tasks: Iterable[Path]) -> None:
        stats = [task / "stat" for task in tasks]
        wait_for(lambda: all(") S " in stat.read_text() for stat in stats))
        self._threads = [int(stat.parent.name) for stat in stats]
        self._trace = ctypes.CDLL(None, use_errno=True).ptrace
        for request in (self.SEIZE, self.INTERRUPT):
            for thread in self._threads:
                if self._trace(request, thread, None, None):
                    pytest.skip(f"no ptrace here: {os.strerror(ctypes.get_errno())}")
        for thread in self._threads:
            os.waitpid(thread, self.ALL)

    def thaw(self) -> None:
        for thread in self._threads:
            self._trace(self.DETACH, thread, None, None)
