"""A homelab in one process: a machine to wake and unlock, on loopback.

It listens for its own magic packet, "powers on", runs an SSH server that behaves like
Debian's initrd, and after the unlock gives way to the booted system's, which has
another host key. Off means off: its ports swallow connections, as a sleeping machine's.

`make demo` runs it together with the daemon, and prints how to use both. It needs only
paramiko.
"""

import contextlib
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from threading import Event, Thread

import paramiko
from paramiko import common

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import waker

paramiko.util.get_logger("paramiko").setLevel("CRITICAL")  # it logs every hang-up
DROPBEAR = "SSH-2.0-dropbear_2022.83"
OPENSSH = "SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u7"


def new_key() -> paramiko.ECDSAKey:
    """Make a key pair; of the types that paramiko can make, the quickest."""
    return paramiko.ECDSAKey.generate()


def public_line(key: paramiko.PKey) -> str:
    """Write the public half, as in a .pub file."""
    return f"{key.get_name()} {key.get_base64()}"


def bind(address: str, port: int) -> socket.socket:
    """Reserve a TCP port, or any free one if 0; it refuses connections for now."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind((address, port))
    return taken


class Blackhole:
    """A port that swallows connections: a listener whose queue stays full."""

    def __init__(self, address: str, port: int) -> None:
        self._listener = bind(address, port)
        self._listener.listen(0)
        self._filler = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._filler.setblocking(False)  # somebody else may have filled it before
        self._filler.connect_ex((address, port))

    def close(self) -> None:
        self._filler.close()
        self._listener.close()


@dataclass
class Session(paramiko.ServerInterface):
    """One SSH connection: who may log in, and what a command does."""

    server: "SshServer"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = (username, public_line(key)) == ("root", self.server.authorized)
        return common.AUTH_SUCCESSFUL if known else common.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return common.OPEN_SUCCEEDED

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        run, arguments = self.server.run, (channel, command)
        Thread(target=run, args=arguments, daemon=True).start()
        return True


@dataclass
class SshServer:
    """An SSH server on one port. If it has a passphrase, it unlocks one disk."""

    listener: socket.socket
    host_key: paramiko.PKey
    ident: str
    authorized: str = ""
    passphrase: str = ""

    def __post_init__(self) -> None:
        self.ended = Event()  # set when the disk is open, and that was said
        self._is_open = False
        self._transports: list[paramiko.Transport] = []
        self.listener.listen(16)
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                transport = paramiko.Transport(self.listener.accept()[0])
                transport.local_version = self.ident
                transport.add_server_key(self.host_key)
                self._transports.append(transport)
                with contextlib.suppress(paramiko.SSHException, EOFError):
                    transport.start_server(Event(), Session(self))

    def run(self, channel: paramiko.Channel, command: bytes) -> None:
        """Run a command for a client, as its login shell would."""
        status = 127  # there is no such command
        with contextlib.suppress(OSError, EOFError):  # the client has gone
            if self.passphrase and command == b"cryptroot-unlock":
                status = self._unlock(channel)
            channel.send_exit_status(status)
            channel.shutdown_write()  # to close might overtake "the command has begun"
            if self._is_open:
                self.ended.set()

    def _unlock(self, channel: paramiko.Channel) -> int:
        """Act as `cryptroot-unlock` of cryptsetup-initramfs 2.6.1."""
        if self._is_open:
            return 0
        channel.sendall(b"Please unlock disk cryptroot\n")
        self._is_open = channel.makefile("rb").read() == self.passphrase.encode()
        if self._is_open:
            channel.sendall(b"cryptsetup: cryptroot set up successfully\n")
            return 0
        channel.sendall(b"cryptsetup: cryptsetup failed, bad password or options?\n")
        return 1

    def close(self) -> None:
        """Hang up on everybody."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for transport in self._transports:
            transport.close()


@dataclass
class Homelab:
    """The machine. Its folder has our key."""

    folder: Path
    passphrase: str
    address: str = "127.0.0.1"
    packet_port: int = 0  # for UDP; 0 is any free one
    pace: float = 0  # seconds that its firmware and its boot take, each

    def __post_init__(self) -> None:
        self.mac = "52:54:00:12:34:56"
        self.ssh_key = self.folder / "ssh_key"
        client_key, self._initrd_key, self._system_key = (new_key() for _ in range(3))
        client_key.write_private_key_file(str(self.ssh_key))
        self._authorized = public_line(client_key)
        self.host_key = public_line(self._initrd_key)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.settimeout(0.05)
        self._udp.bind(("", self.packet_port))  # an address would exclude broadcasts
        self.packet_port = int(self._udp.getsockname()[1])
        # Each port stays taken from end to end, whoever listens on it in between.
        self._taken = [bind(self.address, 0) for _ in range(2)]
        ports = [int(taken.getsockname()[1]) for taken in self._taken]
        self.initrd_port, self.system_port = ports
        self._off, self._power_cut, self._closed = Event(), Event(), Event()
        self._thread = Thread(target=self._live, daemon=True)
        self._thread.start()
        self._off.wait()

    def settings(self) -> dict[str, str]:
        """Return the daemon's settings for this machine."""
        return {
            "WAKER_HOMELAB_MAC": self.mac,
            "WAKER_HOMELAB_HOST": self.address,
            "WAKER_HOMELAB_BROADCAST": "127.255.255.255",
            "WAKER_INITRD_SSH_PORT": str(self.initrd_port),
            "WAKER_SYSTEM_SSH_PORT": str(self.system_port),
            "WAKER_SSH_KEY": str(self.ssh_key),
            "WAKER_SSH_HOST_KEY": self.host_key,
        }

    def obey(self, descriptor: int) -> None:
        """Cut the power of the running machine at each input, until that ends."""
        while os.read(descriptor, 1024):
            if not self._off.is_set():
                self._power_cut.set()

    def _live(self) -> None:
        wanted = b"\xff" * 6 + bytes.fromhex(self.mac.replace(":", "")) * 16
        while not self._closed.is_set():
            ports = self.initrd_port, self.system_port
            holes = [Blackhole(self.address, port) for port in ports]
            self._off.set()
            while not self._closed.is_set():
                with contextlib.suppress(TimeoutError):
                    if self._udp.recv(2048) == wanted:
                        break
            self._off.clear()
            for hole in holes:
                hole.close()
            self._run()
            self._power_cut.clear()
            with contextlib.suppress(TimeoutError):
                while True:  # what came while it was awake wakes nobody later
                    self._udp.recv(2048)

    def _run(self) -> None:
        """Boot, wait for the passphrase, boot on, and be up until the power is cut."""
        self._power_cut.wait(self.pace)
        listener, key = bind(self.address, self.initrd_port), self._initrd_key
        initrd = SshServer(listener, key, DROPBEAR, self._authorized, self.passphrase)
        with contextlib.closing(initrd):
            while not (self._power_cut.is_set() or initrd.ended.wait(0.05)):
                pass
        if not initrd.ended.is_set():
            return
        self._power_cut.wait(self.pace)
        listener = bind(self.address, self.system_port)
        with contextlib.closing(SshServer(listener, self._system_key, OPENSSH)):
            self._power_cut.wait()

    def close(self) -> None:
        """Take the machine away."""
        self._closed.set()
        self._power_cut.set()
        self._thread.join()
        for taken in [self._udp, *self._taken]:
            taken.close()


def main(wish: str = "127.0.0.1:8080") -> int:
    """Run the homelab and the daemon until ^C; Enter switches the machine off."""
    try:
        with waker.listen(waker.parse_listen(wish)) as free:
            address, port = listen = free.getsockname()[:2]
    except (ValueError, OSError):
        right = "LISTEN must be a free ADDRESS:PORT of this box, such as 127.0.0.1:8090"
        sys.exit(f"{wish} cannot be used; {right}")
    pin, passphrase = "24681012", "correct horse battery staple"
    with tempfile.TemporaryDirectory(prefix="waker-demo-") as name:
        machine = Homelab(Path(name), passphrase, pace=4)
        own = {"WAKER_PIN": pin, "WAKER_HOMELAB_NAME": "demo server"}
        config = waker.read_config(machine.settings() | own, Path(name))
        config = config._replace(packet_port=machine.packet_port, listen=listen)
        if address in ("::", "0.0.0.0"):  # a phone needs one of this box's own
            outside = config._replace(broadcast=IPv4Address("192.0.2.1"))
            with contextlib.suppress(OSError):  # there is no network
                address = waker.find_source_address(outside)
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
