"""A computer that a magic packet switches on: a network card, and QEMU.

The card is one end of a cable, the other is in the bridge of a LAN of its own. While
the power is off it hears what comes; what QEMU gets is the same end of the same cable.
"""

import contextlib
import fcntl
import os
import selectors
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import Answer, Client, daemon, need
from guests import ROUTER, Guest
from namespaces import Namespace, hosts, ip

MAC = "52:54:00:12:34:56"
TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000


@dataclass
class Lan:
    """A router, where waker runs, and a switch with the computer's cable."""

    router: Namespace
    switch: Namespace
    cable: int  # file descriptor of the computer's end

    def cut(self, *, cut: bool) -> None:
        """Cut the cable, or mend it."""
        ip(f"-n {self.switch.name} link set tap0 {'down' if cut else 'up'}")


@contextlib.contextmanager
def home_lan() -> Iterator[Lan]:
    with hosts(2) as (router, switch):
        name = switch.name
        ip(f"-n {name} link add bridge type bridge")
        ip(f"link add lan netns {router.name} type veth peer name port netns {name}")
        ip(f"-n {router.name} address add {ROUTER}/24 dev lan")
        ip(f"-n {router.name} link set lan up")

        def plug_in() -> int:
            cable = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            kind = struct.pack("16sH22x", b"tap0", IFF_TAP | IFF_NO_PI)
            fcntl.ioctl(cable, TUNSETIFF, kind)
            return cable

        cable = switch.run(plug_in)
        for port in ("port", "tap0"):
            ip(f"-n {name} link set {port} master bridge up")
        ip(f"-n {name} link set bridge up")
        try:
            yield Lan(router, switch, cable)
        finally:
            os.close(cable)


def is_magic(frame: bytes) -> bool:
    """Tell whether a card would wake: the pattern may be anywhere in a frame."""
    return b"\xff" * 6 + bytes.fromhex(MAC.replace(":", "")) * 16 in frame


class Computer:
    """A guest that is off at first; nothing that it writes to its disks stays."""

    def __init__(self, guest: Guest, lan: Lan, console: Path) -> None:
        self.guest = guest
        self._lan = lan
        self._console = console
        self._console.write_text("")
        self._qemu: subprocess.Popen[bytes] | None = None

    def hear(self, seconds: float = 2) -> bool:
        """Listen to the cable; a right magic packet switches it on."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._lan.cable, selectors.EVENT_READ)
            while selector.select(max(deadline - time.monotonic(), 0)):
                if is_magic(os.read(self._lan.cable, 65536)):
                    self.switch_on()
                    return True
        return False

    def switch_on(self) -> None:
        root = "mapper/cryptroot" if self.guest.encrypted else "vda ip=off"
        disks = [
            f"if=virtio,format=raw,snapshot=on,file={self.guest.folder / disk}"
            for disk in self.guest.disks
        ]
        # Without norandmaps the emulation takes minutes. The console is to show what
        # systemd has to complain of.
        options = (
            f"root=/dev/{root} console=ttyS0 norandmaps mitigations=off"
            " cryptomgr.notests panic=1 systemd.journald.forward_to_console=1"
            " systemd.journald.max_level_console=warning"
        )
        command = [
            *(need("setpriv"), "--pdeathsig", "KILL"),
            *(need("qemu-system-x86_64"), "-accel", "tcg", "-cpu", "Westmere"),
            *("-machine", "q35", "-m", "768", "-nodefaults"),
            *("-display", "none", "-serial", "mon:stdio"),
            *(["-no-reboot"] if self.guest.encrypted else []),
            *("-kernel", str(self.guest.folder / "vmlinuz")),
            *("-initrd", str(self.guest.folder / "initrd"), "-append", options),
            *("-netdev", f"tap,id=lan,fd={self._lan.cable}"),
            *("-device", f"virtio-net-pci,netdev=lan,mac={MAC},romfile="),
            *(word for disk in disks for word in ("-drive", disk)),
        ]
        with self._console.open("ab") as console:
            self._qemu = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=console,
                pass_fds=[self._lan.cable],
            )

    def is_on(self) -> bool:
        return self._qemu is not None and self._qemu.poll() is None

    def cut_power(self) -> None:
        if self._qemu:
            self._qemu.kill()
            self._qemu.communicate()
            self._qemu = None

    def type(self, text: str) -> None:
        """Type at the console."""
        assert self._qemu
        assert self._qemu.stdin
        self._qemu.stdin.write(text.encode())
        self._qemu.stdin.flush()

    def plug(self, *, in_: bool) -> None:
        """Pull the computer's network plug, or put it in again: a command to QEMU."""
        self.type(f"\x01cset_link lan {'on' if in_ else 'off'}\n\x01c")

    @property
    def console(self) -> str:
        """All that the console has shown."""
        return self._console.read_text(errors="replace").replace("\r", "")

    def wait_for(self, text: str, count: int = 1, seconds: float = 120) -> None:
        """Wait until the console has shown a text that many times."""
        deadline = time.monotonic() + seconds
        while self.console.count(text) < count:
            assert self.is_on(), "the computer is off"
            assert time.monotonic() < deadline, f"the console never showed {text!r}"
            time.sleep(0.1)


@dataclass
class Owner:
    """Uses waker's API, and nothing else."""

    client: Client
    router: Namespace

    def call(self, method: str, path: str, body: object = None) -> Answer:
        return self.router.run(lambda: self.client.call(method, path, body))

    def state(self) -> str:
        return str(self.call("GET", "/api/status").json["state"])

    def wait_for(self, state: str, seconds: float = 120) -> float:
        """Wait until the machine is in that state; returns the seconds that it took."""
        began = time.monotonic()
        while (seen := self.state()) != state:
            assert time.monotonic() - began < seconds, f"it is {seen}, never {state}"
            time.sleep(0.2)
        return time.monotonic() - began

    def wait_for_start(self, seconds: float = 180) -> Any:
        """Wait until a start has ended; returns what is told of it."""
        deadline = time.monotonic() + seconds
        while (told := self.call("GET", "/api/status").json["start"])["phase"] in (
            "waking",
            "unlocking",
            "booting",
        ):
            assert time.monotonic() < deadline, told
            time.sleep(0.2)
        return told

    def unlock(self, passphrase: str) -> tuple[int, str]:
        """Returns the status, and the message or the error."""
        answer = self.call("POST", "/api/unlock", {"passphrase": passphrase})
        return answer.status, answer.json[
            "message" if answer.status == 200 else "error"
        ]


@contextlib.contextmanager
def owner_of(guest: Guest, lan: Lan) -> Iterator[Owner]:
    """Start waker on the router as its users start it, with a guest as the machine."""
    settings = guest.settings() | {"WAKER_HOMELAB_MAC": MAC}
    with daemon(settings, *lan.router.command()) as started:
        owner = Owner(started.client, lan.router)
        lan.router.run(started.client.log_in)
        yield owner
