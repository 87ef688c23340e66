"""A computer that a magic packet switches on: a network cable, and QEMU.

One end of the cable is an interface of the router. While the computer is off, the test
reads packets from the other end; when it is on, QEMU uses that end as its network card.
"""

import contextlib
import io
import select
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from conftest import PIN, Answer, Client, daemon, need, wait_for
from guests import ADDRESS, MAC, ROUTER, SSH_KEY
from namespaces import IFF_TAP, Namespace, hosts

PATIENCE = 600  # seconds: a guest shares its processor with others
# QEMU, and what it emulates.
X86_64 = "qemu-system-x86_64", "-accel", "tcg", "-cpu", "Westmere", "-machine", "q35"
MAGIC = b"\xff" * 6 + bytes.fromhex(MAC.replace(":", "")) * 16


@dataclass
class Computer:
    """A computer that is off at first."""

    hardware: Sequence[str]  # QEMU's arguments for its disks and its network card
    key: Path  # root's, for SSH
    router: Namespace
    cable: io.FileIO  # the computer's end
    log: Path  # of its console
    emulator: Sequence[str] = X86_64
    qemu: subprocess.Popen[bytes] | None = None

    def listen(self) -> bool:
        """Wait for a magic packet on the cable; it switches the computer on."""
        ends = time.monotonic() + 10
        while select.select([self.cable], [], [], max(0, ends - time.monotonic()))[0]:
            # A network card finds the pattern anywhere in a frame.
            if MAGIC in self.cable.read(65536):
                self.switch_on()
                return True
        return False

    def switch_on(self) -> None:
        command = [
            *self.router.command(),  # from which no packet leaves this computer
            *(need("setpriv"), "--pdeathsig", "KILL"),
            *(need(self.emulator[0]), *self.emulator[1:]),
            *("-m", "768", "-nodefaults"),
            *("-display", "none", "-serial", "mon:stdio"),
            *("-netdev", f"tap,id=lan,fd={self.cable.fileno()}"),
            *self.hardware,
        ]
        with self.log.open("ab") as console:
            self.qemu = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=console,
                pass_fds=[self.cable.fileno()],
            )

    def cut_power(self) -> None:
        if self.qemu:
            self.qemu.kill()
            self.is_off()

    def is_off(self) -> None:
        """Wait until the computer is off."""
        if self.qemu:
            self.qemu.communicate(timeout=PATIENCE)
            self.qemu = None
        for connection in self.log.parent.glob("ssh-*"):
            connection.unlink()

    def type(self, text: str) -> None:
        """Type at the console."""
        assert self.qemu
        assert self.qemu.stdin
        self.qemu.stdin.write(text.encode())
        self.qemu.stdin.flush()

    def plug(self, *, in_: bool) -> None:
        """Plug the network cable in or out, by a command to QEMU."""
        self.type(f"\x01cset_link lan {'on' if in_ else 'off'}\n\x01c")

    def ssh(
        self, command: str, given: bytes = b"", port: int = 22
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command as root; whoever is at the end of the cable is trusted."""
        options = (
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "ConnectTimeout=60",  # a guest may be busy
            "ControlMaster=auto",  # reuse one connection: each takes seconds
            f"ControlPath={self.log.parent}/ssh-{port}",
            "ControlPersist=300",
            "ServerAliveInterval=5",
        )
        shell = [need("ssh"), "-q", "-p", str(port), "-i", str(self.key)]
        shell += [f"-o{option}" for option in options]
        return subprocess.run(
            [*self.router.command(), *shell, f"root@{ADDRESS}", command],
            input=given,
            capture_output=True,
            check=False,
        )

    def run(self, command: str, given: bytes = b"", port: int = 22) -> str:
        """Run a command, which must succeed; returns what it printed."""
        done = self.ssh(command, given, port)
        assert done.returncode == 0, done
        return done.stdout.decode()

    @property
    def console(self) -> str:
        """All text that the console has shown."""
        return self.log.read_text(errors="replace").replace("\r", "")

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the console has shown a text that many times."""
        wait_for(
            lambda: self.console, lambda shown: shown.count(text) >= count, PATIENCE
        )


@contextlib.contextmanager
def computer_of(
    hardware: Sequence[str],
    folder: Path,
    key: Path = SSH_KEY,
    emulator: Sequence[str] = X86_64,
) -> Iterator[Computer]:
    """Connect a computer that is off to a router, where waker runs."""
    with hosts(1) as (router,), router.plug_in(IFF_TAP, "lan", f"{ROUTER}/24") as cable:
        log = folder / "console"
        computer = Computer(hardware, key, router, cable, log, emulator)
        computer.log.touch()
        try:
            yield computer
        finally:
            computer.cut_power()
            print(computer.console)  # pytest shows it if a test fails


@dataclass
class Owner:
    """Uses only waker's API."""

    client: Client
    router: Namespace

    def call(self, method: str, path: str, body: object = None) -> Answer:
        return self.router.run(lambda: self.client.call(method, path, body))

    def status(self) -> Any:
        return self.call("GET", "/api/status").json

    def wait_for(self, state: str) -> None:
        """Wait until the machine is in that state."""
        wait_for(self.status, lambda status: status["state"] == state, PATIENCE)

    def start(
        self,
        passphrase: str,
        listen: Callable[[], bool] = lambda: True,
        until: str = "never",
    ) -> Any:
        """Start with one request; `listen` waits for the magic packet.

        Returns the start when it ends, or when it has the outcome `until`.
        """
        begun = self.call("POST", "/api/start", {"passphrase": passphrase})
        assert begun.status == 200
        assert listen()

        def has_ended(status: Any) -> bool:
            start = status["start"]
            ended = start["phase"] in ("done", "failed")
            return ended or start["outcome"] == until

        return wait_for(self.status, has_ended, PATIENCE)["start"]

    def unlock(self, passphrase: str) -> tuple[int, str]:
        """Returns the status, and the message or the error."""
        answer = self.call("POST", "/api/unlock", {"passphrase": passphrase})
        message = answer.json.get("message") or answer.json["error"]
        return answer.status, message


@contextlib.contextmanager
def waker_on(router: Namespace, settings: dict[str, str]) -> Iterator[Owner]:
    """Start waker on the router."""
    with daemon(settings, *router.command()) as started:
        pin = settings.get("WAKER_PIN", PIN)
        router.run(partial(started.client.log_in, pin))
        yield Owner(started.client, router)
    print(*started.log, sep="\n")  # pytest shows it if a test fails
