"""A homelab in one process: a machine to wake and unlock, on loopback.

It listens for its own magic packet, "powers on", runs an SSH server that behaves like
Debian's initrd, and after the unlock gives way to the booted system's, which has
another host key. Off means off: its ports swallow connections, as a sleeping machine's.

`make demo` runs it together with the daemon, and prints how to use both. It needs only
paramiko.
"""

from __future__ import annotations  # names of waker.py may go

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import paramiko
from paramiko import common

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import waker

paramiko.util.get_logger("paramiko").setLevel("CRITICAL")  # it logs every hang-up
DROPBEAR = "SSH-2.0-dropbear_2022.83"
OPENSSH = "SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u7"
REJECTION = b"cryptsetup failed, bad password or options?"
MAC = "52:54:00:12:34:56"
ANOTHER_MAC = "52:54:00:65:43:21"
Settings = dict[str, str]
PACKET = b"\xff" * 6 + bytes.fromhex(MAC.replace(":", "")) * 16


def new_key() -> paramiko.ECDSAKey:
    """Make a key pair; of the types that paramiko can make, the quickest."""
    return paramiko.ECDSAKey.generate()


def public_line(key: paramiko.PKey) -> str:
    """Write the public half, as in a .pub file."""
    return f"{key.get_name()} {key.get_base64()}"


def reserve(address: str) -> socket.socket:
    """Take any free TCP port; it refuses connections for now."""
    taken = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind((address, 0))
    return taken


@contextlib.contextmanager
def blackhole(address: str, port: int) -> Iterator[None]:
    """Let a port swallow connections, by a listener whose queue stays full."""
    listener = socket.create_server((address, port), backlog=0)
    with listener, socket.socket() as filler:
        filler.setblocking(False)  # somebody else may have filled it before
        filler.connect_ex((address, port))
        yield


@contextlib.contextmanager
def tcp_server(
    serve: Callable[[socket.socket], object], address: str = "127.0.0.1", port: int = 0
) -> Iterator[int]:
    """Listen, and pass each connection to `serve`, in turn; yields the port."""
    listener = socket.create_server((address, port))

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed, or the client has gone
            while True:
                serve(listener.accept()[0])

    Thread(target=accept, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@dataclass
class SshServer(paramiko.ServerInterface):
    """An SSH server. If it has a passphrase, any command unlocks one disk."""

    keys: Sequence[paramiko.PKey]
    version: str = DROPBEAR
    authorized: str = ""  # the public key that may log in as root
    passphrase: str = ""
    is_open: Event = field(default_factory=Event)  # the disk
    transport: Any = None  # of the last connection

    def serve(self, connection: socket.socket) -> None:
        self.transport = transport = paramiko.Transport(connection)
        transport.local_version = self.version
        for key in self.keys:
            transport.add_server_key(key)
        with contextlib.suppress(paramiko.SSHException, EOFError):
            transport.start_server(Event(), self)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = (username, public_line(key)) == ("root", self.authorized)
        return common.AUTH_SUCCESSFUL if known else common.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return common.OPEN_SUCCEEDED

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        Thread(target=self._run, args=(channel,), daemon=True).start()
        return True

    def _run(self, channel: paramiko.Channel) -> None:
        with contextlib.suppress(OSError, EOFError):  # the client has gone
            channel.send_exit_status(self.run(channel))
            channel.shutdown_write()  # to close might overtake "the command has begun"

    def run(self, channel: paramiko.Channel) -> int:
        """Act as `cryptroot-unlock` of cryptsetup-initramfs 2.6.1."""
        if self.is_open.is_set() or not self.passphrase:
            return 0
        channel.sendall(b"Please unlock disk cryptroot\n")
        is_right = channel.makefile("rb").read() == self.passphrase.encode()
        result = b"cryptroot set up successfully" if is_right else REJECTION
        channel.sendall(b"cryptsetup: %s\n" % result)
        if is_right:
            self.is_open.set()
        return 1 - is_right


@dataclass
class Ports:
    """The ports of a machine, and the daemon's settings for it."""

    folder: Path  # has our key
    address: str = "127.0.0.1"
    packet_port: int = 0  # for UDP; 0 is any free one
    host_key: str = ""  # of the initrd

    def __post_init__(self) -> None:
        self.ssh_key = self.folder / "ssh_key"
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("", self.packet_port))  # an address would exclude broadcasts
        self.packet_port = int(self._udp.getsockname()[1])
        # Each port stays taken from end to end, whoever listens on it in between.
        self._taken = [reserve(self.address) for _ in range(2)]
        ports = [int(taken.getsockname()[1]) for taken in self._taken]
        self.initrd_port, self.system_port = ports

    def settings(self, **others: object) -> Settings:
        values = {
            "HOMELAB_MAC": MAC,
            "HOMELAB_HOST": self.address,
            "HOMELAB_BROADCAST": "127.255.255.255",
            "INITRD_SSH_PORT": self.initrd_port,
            "SYSTEM_SSH_PORT": self.system_port,
            "SSH_KEY": self.ssh_key,
            "SSH_HOST_KEY": self.host_key,
        }
        settings = (values | others).items()
        return {f"WAKER_{name}": str(value) for name, value in settings}

    def config(self, settings: Settings) -> waker.Config:
        """Read the settings; packets go to this machine's port, which needs no root."""
        config = waker.read_config(settings, self.folder)
        return config._replace(packet_port=self.packet_port)

    def packets(self) -> list[bytes]:
        """Return the packets that have arrived since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._udp.recv(2048, socket.MSG_DONTWAIT))
        return found

    def close(self) -> None:
        for taken in (self._udp, *self._taken):
            taken.close()


@dataclass
class Homelab(Ports):
    """The machine."""

    passphrase: str = field(kw_only=True)
    pace: float = 0  # seconds that its firmware and its boot take, each

    def __post_init__(self) -> None:
        super().__post_init__()
        client_key, self._initrd_key, self._system_key = (new_key() for _ in range(3))
        client_key.write_private_key_file(str(self.ssh_key))
        self._authorized = public_line(client_key)
        self.host_key = public_line(self._initrd_key)
        self._off, self._power_cut, self._closed = Event(), Event(), Event()
        self._thread = Thread(target=self._live, daemon=True)
        self._thread.start()
        self._off.wait()

    def obey(self, descriptor: int) -> None:
        """Cut the power of the running machine at each input, until that ends."""
        while os.read(descriptor, 1024):
            self._power_cut.set()

    def _live(self) -> None:
        while not self._closed.is_set():
            self._sleep()
            self._power_cut.clear()
            if not self._closed.is_set():
                self._run()

    def _sleep(self) -> None:
        """Be off until the magic packet comes."""
        self.packets()  # what came while it was awake wakes nobody later
        with contextlib.ExitStack() as holes:
            for port in (self.initrd_port, self.system_port):
                holes.enter_context(blackhole(self.address, port))
            self._off.set()
            while PACKET not in self.packets() and not self._closed.wait(0.05):
                pass

    def _run(self) -> None:
        """Boot, wait for the passphrase, boot on, and be up until the power is cut."""
        self._power_cut.wait(self.pace)
        key, is_cut = self._initrd_key, self._power_cut.is_set
        initrd = SshServer([key], DROPBEAR, self._authorized, self.passphrase)
        with tcp_server(initrd.serve, self.address, self.initrd_port):
            while not (is_cut() or initrd.is_open.wait(0.05)):
                pass
        self._power_cut.wait(self.pace)
        if not is_cut():
            system = SshServer([self._system_key], OPENSSH)
            with tcp_server(system.serve, self.address, self.system_port):
                self._power_cut.wait()

    def close(self) -> None:
        """Take the machine away."""
        self._closed.set()
        self._power_cut.set()
        self._thread.join()
        super().close()


def main(wish: str = "127.0.0.1:8080", *, pace: float = 4) -> int:
    """Run the homelab and the daemon until ^C; Enter switches the machine off."""
    try:
        needs = {"WAKER_LISTEN": wish}
        with waker.listen(waker.read_config(needs, Path(), needs).listen) as free:
            address, port = listen = free.getsockname()[:2]
    except (waker.ConfigError, OSError) as error:
        code = getattr(error, "errno", None)
        reason = os.strerror(code) if code else "it is no ADDRESS:PORT"
        host = "0.0.0.0" if wish.startswith("0.0.0.0:") else "127.0.0.1"
        sys.exit(f"{wish} cannot be used: {reason}. Try make demo LISTEN={host}:8090")
    pin, passphrase = "24681012", "correct horse battery staple"
    with tempfile.TemporaryDirectory(prefix="waker-demo-") as name:
        machine = Homelab(Path(name), passphrase=passphrase, pace=pace)
        own = {"WAKER_PIN": pin, "WAKER_HOMELAB_NAME": "demo server"}
        config = machine.config(machine.settings() | own)._replace(listen=listen)
        if address in ("::", "0.0.0.0"):  # a phone needs one of this box's own
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
                with contextlib.suppress(OSError):  # there is no network
                    udp.connect(("192.0.2.1", 9))  # which sends nothing
                    address = udp.getsockname()[0]
        host = f"[{address}]" if ":" in address else address
        print(f"Open        http://{host}:{port}/")
        print(f"PIN         {pin}\npassphrase  {passphrase}")
        print(
            "Press Enter to switch the server off, Ctrl-C to end. The log:", flush=True
        )
        Thread(target=machine.obey, args=(0,), daemon=True).start()
        environment = dict(os.environ) | machine.settings()
        command = sys.executable, waker.__file__, "unlock"
        return waker.serve(waker.App(config, (command, environment)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
