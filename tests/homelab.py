"""A homelab in one process: a machine to wake and unlock, on loopback.

It listens for its own magic packet, "powers on", runs an SSH server that behaves like
Debian's initrd, and after the unlock gives way to the booted system's, which has
another host key. Off means off: its ports swallow connections, as a sleeping machine's.

As a program, `make demo`, it adds the daemon and tells how to use both. It needs
paramiko and nothing else.
"""

import contextlib
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import paramiko
from cryptroot_unlock import Disks, cryptroot_unlock
from paramiko import common

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
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
        self._filler = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._filler.setblocking(False)  # somebody else may have filled it before
        self._filler.connect_ex((address, self.port))

    def close(self) -> None:
        self._filler.close()
        self._listener.close()


class Session(paramiko.ServerInterface):
    """One SSH connection: who may log in, and what a command does.

    It takes one command at a time: dropbear, too, may refuse one while another ends.
    """

    def __init__(self, server: "SshServer") -> None:
        self._server = server
        self._channel: paramiko.Channel | None = None

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if (username, public_line(key)) == ("root", self._server.authorized):
            return common.AUTH_SUCCESSFUL
        return common.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        busy = self._channel and not self._channel.eof_sent
        return common.OPEN_FAILED_RESOURCE_SHORTAGE if busy else common.OPEN_SUCCEEDED

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
        self._listener, self._state = listener, state
        self._host_key, self._ident = host_key, ident
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
        with contextlib.suppress(OSError, EOFError):  # the client has gone
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
        raise EOFError

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
        self.state, self.ssh_key = folder / "disks.json", folder / "ssh_key"
        self._pace, self._disks = pace, disks
        self._stop, self._power_cut = threading.Event(), threading.Event()
        self._changed = threading.Condition()
        client_key = new_key()
        client_key.write_private_key_file(str(self.ssh_key))
        self._authorized = public_line(client_key)
        self._initrd, self._system = ((new_key(), ident) for ident in idents)
        self.host_key = public_line(self._initrd[0])
        self.packets: list[bytes] = []
        self._udp = bind_udp("", packet_port)  # so that a broadcast is heard, too
        self.packet_port = int(self._udp.getsockname()[1])
        # Each port stays taken from end to end, whoever listens on it in between.
        self._taken = [bind(address, 0) for _ in range(1 if shared_port else 2)]
        self._ports = [int(taken.getsockname()[1]) for taken in self._taken]
        self.initrd_port, self.system_port = self._ports[0], self._ports[-1]
        self._turn_off()
        self._thread = threading.Thread(target=self._live, daemon=True)
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

    def _turn_off(self) -> None:
        self._disks.save(self.state)
        self._power_cut.clear()
        self._holes = [Blackhole(self.address, port) for port in self._ports]
        self._enter("off")

    def obey(self, descriptor: int) -> None:
        """Cut the power of the running machine at each input, until that ends."""
        while os.read(descriptor, 1024):
            if self.phase != "off":
                self._power_cut.set()

    def _sleep_until_packet(self) -> None:
        wanted = b"\xff" * 6 + bytes.fromhex(self.mac.replace(":", "")) * 16
        packet = b""
        while packet != wanted and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                packet = self._udp.recv(2048)
                self.packets.append(packet)

    def _boot(self) -> None:
        """Wait for the passphrase, boot on, and be up until the power is cut."""
        self._enter("booting")
        self._power_cut.wait(self._pace)
        listener = bind(self.address, self.initrd_port)
        initrd = SshServer(listener, *self._initrd, self._authorized, self.state)
        with contextlib.closing(initrd):
            self._enter("locked")
            while not (initrd.ended.wait(0.05) or self._power_cut.is_set()):
                pass
        if Disks.load(self.state).locked:
            return
        self._enter("booting")
        self._power_cut.wait(self._pace)
        listener = bind(self.address, self.system_port)
        with contextlib.closing(SshServer(listener, *self._system)):
            self._enter("up")
            self._power_cut.wait()

    def _live(self) -> None:
        while not self._stop.is_set():
            self._sleep_until_packet()
            for hole in self._holes:
                hole.close()
            self._boot()
            with contextlib.suppress(TimeoutError):
                while self._udp.recv(2048):
                    pass  # came while it was awake, and must not wake it later
            self._turn_off()

    def close(self) -> None:
        """Take the machine away."""
        self._stop.set()
        self._power_cut.set()
        self._thread.join()
        for taken in [self._udp, *self._taken]:
            taken.close()
        for hole in self._holes:
            hole.close()


def choose_address(wishes: Sequence[str]) -> tuple[str, int]:
    """Take the first that can be listened on, or end the program."""
    for wish in wishes:
        with contextlib.suppress(ValueError, OSError):
            with waker.listen(waker.parse_listen(wish)) as free:
                return str(free.getsockname()[0]), int(free.getsockname()[1])
    sys.exit("LISTEN must be a free ADDRESS:PORT of this box, such as 0.0.0.0:8080")


def url(address: str, port: int) -> str:
    """Write a URL that a phone can open; for every address, with one of this box."""
    if address in ("::", "0.0.0.0"):
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with udp, contextlib.suppress(OSError):  # there is no network
            udp.connect(("192.0.2.1", 9))  # this sends nothing
            address = str(udp.getsockname()[0])
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}/"


def main(*wish: str) -> int:
    """Run the homelab and the daemon until ^C; Enter switches the machine off."""
    pin, passphrase = "24681012", "correct horse battery staple"
    listen = choose_address(wish or ("127.0.0.1:8080", "127.0.0.1:0"))
    with tempfile.TemporaryDirectory(prefix="waker-demo-") as name:
        machine = Homelab(Path(name), disks=Disks({"cryptroot": passphrase}), pace=4)
        own = {"WAKER_PIN": pin, "WAKER_HOMELAB_NAME": "demo machine"}
        config = waker.read_config(machine.settings() | own, Path(name))
        config = config._replace(packet_port=machine.packet_port, listen=listen)
        print(f"Open        {url(*listen)}")
        print(f"PIN         {pin}\npassphrase  {passphrase}")
        print("Enter switches the machine off, ^C ends. The log:", flush=True)
        threading.Thread(target=machine.obey, args=(0,), daemon=True).start()
        return waker.serve(waker.App(config, Path(waker.__file__)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
