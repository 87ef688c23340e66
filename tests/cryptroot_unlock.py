"""Debian's `cryptroot-unlock`, as it behaves on a connection without a terminal.

The texts, the exit statuses and the order are those of cryptsetup-initramfs 2.6.1; what
is left out is the waiting. Its disks and its moods are a JSON file, so that the homelab
can call it and a real SSH server can run it:

    python3 cryptroot_unlock.py STATE.json

But: it is not the script itself, and has no disk. That test is another one.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

SSH_SERVERS = ("dropbear", "sshd", "sshd-session")


@dataclass
class Disks:
    """What the initrd has to unlock, and how it behaves."""

    locked: dict[str, str]  # name: passphrase, in the order in which they ask
    early: bool = False  # the scripts of the initrd have not begun
    idle: bool = False  # nothing asks
    mute: bool = False  # the command hangs before it asks
    lingers: bool = False  # the command takes its time to end
    slow: float = 0  # seconds that a key derivation takes
    wordless: bool = False  # the command ends well, and says nothing of the answer
    gives_up: bool = False  # the command does not wait for the end of a derivation
    dies: str = ""  # power is lost `before` it asks, or `after` it was answered
    received: list[str] = field(default_factory=list)  # every answer, in hex

    @classmethod
    def load(cls, path: Path) -> "Disks":
        return cls(**json.loads(path.read_text()))

    def save(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(path)  # whoever reads sees all of it


def try_passphrase(disks: Disks, name: str, given: bytes) -> tuple[str, int]:
    """Open a disk or not; returns what the script says then, and its status."""
    if given != disks.locked[name].encode():
        return "cryptsetup: cryptsetup failed, bad password or options?\n", 1
    del disks.locked[name]
    return f"cryptsetup: {name} set up successfully\n", 0


def cryptroot_unlock(
    path: Path,
    read: Callable[[], bytes],
    say: Callable[[str], None],
    lose_power: Callable[[], None],
) -> int:
    """Run once; returns the exit status."""
    disks = Disks.load(path)
    if disks.early:
        say("Try again later\n")
        return 1
    if not disks.locked:
        return 0
    if disks.idle:
        say("Error: Timeout reached while waiting for askpass.\n")
        return 1
    if disks.mute:
        read()
        return 1
    if disks.dies == "before":
        lose_power()
    name = next(iter(disks.locked))
    say(f"Please unlock disk {name}\n")
    given = read()
    disks.received.append(given.hex())
    disks.save(path)
    time.sleep(disks.slow)
    if disks.wordless:
        return 0
    text, status = try_passphrase(disks, name, given)
    if disks.gives_up:
        text, status = "Error: Timeout reached while waiting for PID 321.\n", 1
    disks.save(path)
    if disks.dies == "after":
        lose_power()
    say(text)
    if disks.lingers:
        time.sleep(0.5)
    return status


def kill_the_ssh_server() -> None:
    """End every ancestor of this process that is an SSH server, and the process."""
    pid = os.getpid()
    while pid > 1:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        about = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        if about["Name"] in SSH_SERVERS:
            os.kill(pid, signal.SIGKILL)
        pid = int(about["PPid"])
    sys.exit(1)


if __name__ == "__main__":

    def say_now(text: str) -> None:
        os.write(1 if text.startswith("Please") else 2, text.encode())

    sys.exit(
        cryptroot_unlock(
            Path(sys.argv[1]), sys.stdin.buffer.read, say_now, kill_the_ssh_server
        )
    )
