"""A homelab in one process: a machine to wake and unlock, on loopback.

It listens for its own magic packet, "powers on", runs an SSH server that behaves like
Debian's initrd, and after the unlock gives way to the booted system's, which has
another host key. Off means off: its ports swallow connections, as a sleeping machine's.

Run as a program it adds the daemon, and tells how to use both:

    python3 tests/homelab.py
"""

import contextlib
import socket
import sys
import tempfile
import threading
from pathlib import Path

import paramiko
from cryptroot_unlock import Disks, cryptroot_unlock
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_RESOURCE_SHORTAGE,
    OPEN_SUCCEEDED,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import waker

DROPBEAR = "SSH-2.0-dropbear_2022.83"
paramiko.util.get_logger("paramiko").setLevel("CRITICAL")  # it logs every hang-up

OPENSSH = "SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u7"


class PowerLost(Exception):
    """The machine has no power any more."""


def new_key() -> paramiko.ECDSAKey:
    """Make a key pair; of the types that paramiko can make, the quickest."""
    return paramiko.ECDSAKey.generate()


def public_line(key: paramiko.PKey) -> str:
    """Write the public half, as in a .pub file."""
    return f"{key.get_name()} {key.get_base64()}"


def bind(address: str, port: int) -> socket.socket:
    """Take a TCP port; 0 is any free one. It refuses connections so far."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind((address, port))
    return taken


def bind_udp(address: str, port: int) -> socket.socket:
    """Take a UDP port for oneself alone: SO_REUSEADDR would let others share it."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    taken.bind((address, port))
    taken.settimeout(0.05)
    return taken


class Blackhole:
    """A port that swallows connections: a listener whose queue stays full."""

    def __init__(self, address: str, port: int = 0) -> None:
        self._listener = bind(address, port)
        self._listener.listen(0)
        self.port = int(self._listener.getsockname()[1])
        self._filler = socket.create_connection((address, self.port))

    def close(self) -> None:
        self._filler.close()
        self._listener.close()


class Session(paramiko.ServerInterface):
    """One SSH connection: who may log in, and what a command does.

    It takes one command at a time: dropbear, too, may end a channel that is opened
    while the command of another one ends.
    """

    def __init__(self, server: "SshServer") -> None:
        self._server = server
        self._channel: paramiko.Channel | None = None

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if (username, public_line(key)) == ("root", self._server.authorized):
            return AUTH_SUCCESSFUL
        return AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        busy = self._channel and not self._channel.eof_sent
        return OPEN_FAILED_RESOURCE_SHORTAGE if busy else OPEN_SUCCEEDED

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        self._channel = channel
        run = threading.Thread(target=self._server.run, args=(channel, command))
        run.daemon = True
        run.start()
        return True


class SshServer:
    """An SSH server on one port, with one host key and at most one command."""

    def __init__(
        self,
        listener: socket.socket,
        host_key: paramiko.PKey,
        ident: str,
        authorized: str = "",
        state: Path | None = None,
    ) -> None:
        self.authorized = authorized
        self.ended = threading.Event()  # set when the last disk is unlocked
        self._listener = listener
        self._host_key = host_key
        self._ident = ident
        self._state = state
        self._transports: list[paramiko.Transport] = []
        listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                transport = paramiko.Transport(connection)
                transport.local_version = self._ident
                transport.add_server_key(self._host_key)
                self._transports.append(transport)
                with contextlib.suppress(paramiko.SSHException, EOFError):
                    transport.start_server(threading.Event(), Session(self))

    def run(self, channel: paramiko.Channel, command: bytes) -> None:
        """Run a command for a client, as its login shell would."""
        with contextlib.suppress(OSError, EOFError, PowerLost):  # the client has gone
            if command != b"cryptroot-unlock" or not self._state:
                channel.sendall_stderr(b"sh: %b: not found\n" % command)
                channel.send_exit_status(127)
                channel.shutdown_write()
                return
            status = cryptroot_unlock(
                self._state,
                channel.makefile("rb").read,
                lambda text: channel.sendall(text.encode()),
                self._lose_power,
            )
            channel.send_exit_status(status)
            channel.shutdown_write()  # to close might overtake "the command has begun"
            if not Disks.load(self._state).locked:
                self.ended.set()

    def _lose_power(self) -> None:
        self.close()
        self.ended.set()
        raise PowerLost

    def close(self) -> None:
        """Hang up on everybody."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for transport in self._transports:
            transport.close()


class Homelab:
    """The machine. Its folder has our key and the state of its disks.

    `pace` is how long its firmware and its boot take, in seconds each; `idents` are the
    SSH identification strings of its initrd and of its system.
    """

    def __init__(
        self,
        folder: Path,
        *,
        disks: Disks,
        address: str = "127.0.0.1",
        packet_port: int = 0,
        shared_port: bool = False,
        pace: float = 0,
        idents: tuple[str, str] = (DROPBEAR, OPENSSH),
    ) -> None:
        self.address = address
        self.mac = "52:54:00:12:34:56"
        self.state = folder / "disks.json"
        self.ssh_key = folder / "ssh_key"
        self._pace = pace
        self._idents = idents
        self._stop = threading.Event()
        self._changed = threading.Condition()
        disks.save(self.state)
        client_key = new_key()
        client_key.write_private_key_file(str(self.ssh_key))
        self._authorized = public_line(client_key)
        self._initrd_key, self._system_key = new_key(), new_key()
        self.host_key = public_line(self._initrd_key)
        self.packets: list[bytes] = []
        self._udp = bind_udp("", packet_port)  # so that a broadcast is heard, too
        self.packet_port = int(self._udp.getsockname()[1])
        # Each port stays taken from end to end, whoever listens on it in between.
        self._taken = [bind(address, 0) for _ in range(1 if shared_port else 2)]
        ports = [int(taken.getsockname()[1]) for taken in self._taken]
        self.initrd_port, self.system_port = ports[0], ports[-1]
        holes = [Blackhole(address, port) for port in ports]
        self.phase = "off"
        self._thread = threading.Thread(target=self._live, args=(holes,), daemon=True)
        self._thread.start()

    def settings(self) -> dict[str, str]:
        """Tell the daemon's settings for this machine."""
        return {
            "WAKER_HOMELAB_MAC": self.mac,
            "WAKER_HOMELAB_HOST": self.address,
            "WAKER_HOMELAB_BROADCAST": self.address,
            "WAKER_INITRD_SSH_PORT": str(self.initrd_port),
            "WAKER_SYSTEM_SSH_PORT": str(self.system_port),
            "WAKER_SSH_KEY": str(self.ssh_key),
            "WAKER_SSH_HOST_KEY": self.host_key,
        }

    def _enter(self, phase: str) -> None:
        with self._changed:
            self.phase = phase
            self._changed.notify_all()

    def wait_for(self, phase: str) -> None:
        """Wait until the machine is in a phase: off, booting, locked or up."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.phase == phase, 60):
                raise TimeoutError(f"it is {self.phase}, not {phase}")

    def _sleep_until_packet(self) -> None:
        wanted = b"\xff" * 6 + bytes.fromhex(self.mac.replace(":", "")) * 16
        packet = b""
        while packet != wanted and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                packet = self._udp.recv(2048)
                self.packets.append(packet)

    def _live(self, holes: list[Blackhole]) -> None:
        """Sleep, boot, wait for the passphrase, boot on, be up; each once."""
        self._sleep_until_packet()
        for hole in holes:
            hole.close()
        self._enter("booting")
        self._stop.wait(self._pace)
        with contextlib.closing(
            SshServer(
                bind(self.address, self.initrd_port),
                self._initrd_key,
                self._idents[0],
                authorized=self._authorized,
                state=self.state,
            )
        ) as initrd:
            self._enter("locked")
            while not (initrd.ended.wait(0.05) or self._stop.is_set()):
                pass
        if Disks.load(self.state).locked:
            self._enter("off")
            return
        self._enter("booting")
        self._stop.wait(self._pace)
        listener = bind(self.address, self.system_port)
        with contextlib.closing(SshServer(listener, self._system_key, self._idents[1])):
            self._enter("up")
            self._stop.wait()

    def close(self) -> None:
        """Take the machine away."""
        self._stop.set()
        self._thread.join()
        self._udp.close()
        for taken in self._taken:
            taken.close()


def choose_port(address: str, wish: int) -> int:
    """Tell a free port, the wish if it is one."""
    try:
        taken = bind(address, wish)
    except OSError:
        taken = bind(address, 0)
    with taken:
        return int(taken.getsockname()[1])


def main() -> int:
    """Run the homelab and the daemon until ^C."""
    pin, passphrase = "24681012", "correct horse battery staple"
    with tempfile.TemporaryDirectory(prefix="waker-demo-") as name:
        folder = Path(name)
        machine = Homelab(folder, disks=Disks({"cryptroot": passphrase}), pace=4)
        port = choose_port("127.0.0.1", 8080)
        settings = machine.settings() | {
            "WAKER_PIN": pin,
            "WAKER_HOMELAB_NAME": "demo machine",
            "WAKER_LISTEN": f"127.0.0.1:{port}",
        }
        config = waker.read_config(settings, folder)._replace(
            packet_port=machine.packet_port
        )
        print(f"Open        http://127.0.0.1:{port}/")
        print(f"PIN         {pin}")
        print(f"passphrase  {passphrase}")
        print("End with ^C. What follows is the daemon's log.", flush=True)
        program = Path(waker.__file__)
        app = waker.App(config, program)
        status = waker.serve(app)
        machine.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
