"""A bare server, and a box beside it that prepares, wakes and unlocks it."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bare import ASKING, DISK, PASSWORD, ROOT_KEY, Bare, ready
from computer import PATIENCE, Computer, Owner, computer_of, waker_on
from conftest import CHECKOUT, PASSPHRASE, need, wait_for
from guests import ADDRESS, run
from packing import pack
from terminal import Terminal

import waker

CONFIG = "settings"
# What `waker prepare` asks, and the answers.
KNOWN = "(yes/no/[fingerprint])?", "yes"
LOGIN = f"me@{ADDRESS}'s password:", PASSWORD
SUDO = "[sudo] password for me:", PASSWORD
QUESTION = "Go on? [y/N]", "y"


def new_box(folder: Path) -> Path:
    """Make a folder with nothing but the one file and an SSH client."""
    folder.mkdir()
    pack(CHECKOUT, folder / "waker")
    known = folder / "known_hosts"  # not this computer's
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {need("ssh")} -oUserKnownHostsFile={known} "$@"\n')
    ssh.chmod(0o755)
    return folder


@dataclass
class Trial:
    """A bare server, which is off, and a box beside it, on the router."""

    bare: Bare
    computer: Computer
    box: Path
    begun: float = field(default_factory=time.monotonic)

    def took(self, what: str) -> None:
        """Print how long the last step took."""
        now = time.monotonic()
        print(f"{self.bare.name}: {now - self.begun:.0f} s {what}", flush=True)
        self.begun = now

    def run(self, command: str) -> str:
        return self.computer.run(command)

    def boot(self, menu: str = "") -> None:
        """Switch it on, and type the passphrase; `menu` are keys for GRUB's menu."""
        computer, begin = self.computer, len(self.computer.console)
        computer.switch_on()
        if self.bare.has_spare:
            computer.type("\x01cset_link spare off\n\x01c")
        if menu:
            self.wait_for("GNU GRUB", begin)
            computer.type(menu)
        asks = "passphrase for disk" if self.bare.has_dracut else ASKING
        self.wait_for(asks, begin)
        computer.type(f"{PASSPHRASE}\n")
        self.wait_for("guest login:", begin)
        self.wait_for_shell()
        self.took(f"boot by hand {menu and 'with the kept image'}")

    def wait_for(self, text: str, begin: int, count: int = 1) -> None:
        """Wait until the console shows a text so often, after so many characters."""
        wait_for(
            lambda: self.computer.console[begin:].count(text),
            lambda shown: shown >= count,
            PATIENCE,
        )

    def wait_for_shell(self) -> None:
        ssh = self.computer.ssh
        wait_for(lambda: ssh("true"), lambda done: done.returncode == 0, PATIENCE)

    def switch_off(self) -> str:
        """Shut it down; returns what it shows then."""
        begin = len(self.computer.console)
        self.computer.ssh("systemctl poweroff")
        self.computer.is_off()
        self.took("shutdown")
        return self.computer.console[begin:]

    def prepare(self, *answers: tuple[str, str], options: Sequence[str] = ()) -> str:
        """Run `waker prepare` on the router; returns what its terminal showed."""
        terminal = Terminal(
            [
                *self.computer.router.command(),
                *("env", "-C", str(self.box), f"PATH={self.box}:{os.environ['PATH']}"),
                *(sys.executable, "waker", "prepare", f"me@{ADDRESS}"),
                *("--config", CONFIG, *options),
            ],
            3600,  # an image may take long
        )
        for prompt, answer in answers:
            terminal.answer(prompt, answer)
        status = terminal.end()
        print(terminal.printed)
        assert status == 0
        assert PASSWORD not in terminal.printed
        self.took(" ".join(["waker prepare", *options]))
        return terminal.printed

    def settings(self) -> dict[str, str]:
        """Return the box's settings; the key is beside them."""
        config = self.box / CONFIG
        settings = waker.read_env_file(config / "waker.env")
        return settings | {"WAKER_SSH_KEY": str(config / "ssh_key")}

    def wake(self) -> bool:
        return self.computer.qemu is not None or self.computer.listen()

    def unlock(self, owner: Owner) -> None:
        """Wake it with waker if it is off, and unlock it."""
        start = owner.start(PASSPHRASE, self.wake)
        assert start["message"] == f"The system is up. Unlocked: {DISK}.", start
        self.wait_for_shell()
        self.took("up by waker")

    @contextlib.contextmanager
    def waker(self) -> Iterator[Owner]:
        """Run waker on the router with the box's settings; the server is off."""
        with waker_on(self.computer.router, self.settings()) as owner:
            owner.wait_for("off")
            yield owner


@contextlib.contextmanager
def trial_of(bare: Bare, folder: Path) -> Iterator[Trial]:
    """Copy a bare server, and make a box."""
    ready(bare)
    disk, box = folder / "disk", new_box(folder / "box")
    run("cp", "--sparse=always", bare.disk, disk)
    with computer_of(bare.hardware(disk), folder, ROOT_KEY) as computer:
        yield Trial(bare, computer, box)
