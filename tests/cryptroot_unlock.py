"""Debian's `cryptroot-unlock`, as it behaves on a connection without a terminal.

Texts, exit statuses and their order are those of cryptsetup-initramfs 2.6.1, but it
does not wait. A JSON file has the disks, so that the homelab can call it and a real SSH
server can run it:

    python3 cryptroot_unlock.py STATE.json

It is not the script itself, and has no disk. tests/vm has both.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Disks:
    """What the initrd has to unlock, and how it behaves."""

    locked: dict[str, str]  # name: passphrase, in the order in which they ask
    mute: bool = False  # the command hangs before it asks
    lingers: bool = False  # the command takes its time to end
    slow: float = 0  # seconds that a key derivation takes
    received: list[str] = field(default_factory=list)  # every answer, in hex

    @classmethod
    def load(cls, path: Path) -> "Disks":
        return cls(**json.loads(path.read_text()))

    def save(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(path)  # whoever reads sees all of it


def cryptroot_unlock(
    path: Path, read: Callable[[], bytes], say: Callable[[str], None]
) -> int:
    """Run once; returns the exit status."""
    disks = Disks.load(path)
    if not disks.locked:
        return 0
    if disks.mute:
        read()
        return 1
    name, passphrase = next(iter(disks.locked.items()))
    say(f"Please unlock disk {name}\n")
    given = read()
    disks.received.append(given.hex())
    disks.save(path)
    time.sleep(disks.slow)
    text, status = "cryptsetup: cryptsetup failed, bad password or options?\n", 1
    if given == passphrase.encode():
        del disks.locked[name]
        disks.save(path)
        text, status = f"cryptsetup: {name} set up successfully\n", 0
    say(text)
    if disks.lingers:
        time.sleep(0.5)
    return status


def say_now(text: str) -> None:
    """Write the question to standard output, and everything else to standard error."""
    os.write(1 if text.startswith("Please") else 2, text.encode())


if __name__ == "__main__":
    read = sys.stdin.buffer.read
    sys.exit(cryptroot_unlock(Path(sys.argv[1]), read, say_now))
