"""SSH servers that stand for an initrd: the homelab's own, and Debian's real ones.

Each serves one machine: its disks are a file, its one command is the emulation of
`cryptroot-unlock`, and its files stay in a folder of the test. The real servers want a
home directory, so they run as root, in a mount namespace of their own.
"""

import contextlib
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cryptroot_unlock
import paramiko
from conftest import need, need_root, wait_for
from cryptroot_unlock import Disks
from homelab import DROPBEAR, SshServer, bind, new_key, public_line

import waker


@dataclass
class Initrd:
    """Where it listens, which host key it shows, and which key of ours it knows."""

    port: int
    host_key: str
    ssh_key: Path
    state: Path

    def machine(self) -> waker.Machine:
        return waker.Machine(
            host="127.0.0.1",
            dialect=waker.DIALECTS[0],
            initrd_port=self.port,
            system_port=self.port,
            user="root",
            key=self.ssh_key,
            host_keys=waker.HostKey.parse_all(self.host_key),
        )

    def received(self) -> list[bytes]:
        return [bytes.fromhex(text) for text in Disks.load(self.state).received]


RESERVED: list[socket.socket] = []  # each is bound, and never listens


def free_port() -> int:
    """Reserve a port that refuses connections until somebody listens on it.

    It stays bound as long as the tests run, so nobody else gets it by chance; a server
    that sets SO_REUSEADDR can listen on it.
    """
    RESERVED.append(bind("127.0.0.1", 0))
    return int(RESERVED[-1].getsockname()[1])


def prepare(folder: Path, disks: Disks) -> tuple[Path, Path, str]:
    """Write the disks and our key; returns both files and the authorized line."""
    state, ssh_key, key = folder / "disks.json", folder / "ssh_key", new_key()
    disks.save(state)
    key.write_private_key_file(str(ssh_key))
    return state, ssh_key, public_line(key)


def machine_at(folder: Path, port: int, host_key: paramiko.PKey) -> waker.Machine:
    """Tell of a machine where any server may listen, with that host key pinned."""
    state, ssh_key, _ = prepare(folder, Disks({}))
    return Initrd(port, public_line(host_key), ssh_key, state).machine()


@contextlib.contextmanager
def process(port: int, script: str, *options: str) -> Iterator[None]:
    """Run a server in a mount namespace until it listens, and end it afterwards."""
    need_root()
    command = [need("unshare"), "--mount", *options, "sh", "-ec", script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:

        def listens() -> bool:
            if server.poll() is not None:
                raise RuntimeError(server.communicate()[1])
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                return True
            return False

        try:
            wait_for(listens)
            yield
        finally:
            server.kill()


def emulation(state: Path, *, present: bool) -> str:
    """Write the command that runs the emulation, if that is what was asked for."""
    program = [sys.executable, cryptroot_unlock.__file__, str(state)]
    run = (
        f'[ "$SSH_ORIGINAL_COMMAND" = cryptroot-unlock ] && exec {shlex.join(program)}'
    )
    return run if present else "exec nothing-of-this-name"


@contextlib.contextmanager
def paramiko_server(
    folder: Path, disks: Disks, *, command: bool = True
) -> Iterator[Initrd]:
    state, ssh_key, authorized = prepare(folder, disks)
    host_key, listener = new_key(), bind("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    server = SshServer(
        listener, host_key, DROPBEAR, authorized, state if command else None
    )
    with contextlib.closing(server):
        yield Initrd(port, public_line(host_key), ssh_key, state)


@contextlib.contextmanager
def dropbear(folder: Path, disks: Disks, *, command: bool = True) -> Iterator[Initrd]:
    state, ssh_key, authorized = prepare(folder, disks)
    home, port = folder / "home" / ".ssh", free_port()
    home.mkdir(parents=True, mode=0o700)
    (home / "authorized_keys").write_text(authorized)
    (folder / "passwd").write_text(f"root:x:0:0::{home.parent}:/bin/sh\n")
    (folder / "run").write_text(f"#!/bin/sh\n{emulation(state, present=command)}\n")
    (folder / "run").chmod(0o755)
    made = subprocess.run(
        [need("dropbearkey"), "-t", "ed25519", "-f", folder / "host_key"],
        check=True,
        capture_output=True,
        text=True,
    )
    host_key = next(line for line in made.stdout.splitlines() if "ssh-ed25519 " in line)
    server = [need("dropbear"), "-F", "-E", "-s", "-p", f"127.0.0.1:{port}"]
    server += ["-r", str(folder / "host_key"), "-P", str(folder / "pid")]
    server += ["-c", str(folder / "run")]
    script = f"mount --bind {folder}/passwd /etc/passwd; exec {shlex.join(server)}"
    with process(port, script):
        yield Initrd(port, host_key, ssh_key, state)


def prepare_sshd(folder: Path, authorized: str, more: str = "") -> tuple[int, str, str]:
    """Write OpenSSH's files; returns its port, its host key, and how it is started."""
    port, host_key = free_port(), new_key()
    host_key.write_private_key_file(str(folder / "host_key"))
    (folder / "authorized_keys").write_text(authorized)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
        f"PermitRootLogin prohibit-password\nPidFile none\n{more}\n"
    )
    server = [need("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")]
    start = f"mount -t tmpfs none /run; mkdir /run/sshd; exec {shlex.join(server)}"
    return port, public_line(host_key), start


@contextlib.contextmanager
def openssh(folder: Path, disks: Disks, *, command: bool = True) -> Iterator[Initrd]:
    state, ssh_key, authorized = prepare(folder, disks)
    forced = f"ForceCommand {emulation(state, present=command)}"
    port, host_key, start = prepare_sshd(folder, authorized, forced)
    with process(port, start):
        yield Initrd(port, host_key, ssh_key, state)


SERVERS: dict[str, Callable[..., contextlib.AbstractContextManager[Initrd]]] = {
    "homelab": paramiko_server,
    "dropbear": dropbear,
    "openssh": openssh,
}


@contextlib.contextmanager
def tinysshd(folder: Path, disks: Disks) -> Iterator[Initrd]:
    """Run tinysshd the way inetd does: a process for each connection."""
    state, ssh_key, _ = prepare(folder, disks)
    keys = folder / "tinyssh"
    subprocess.run([need("tinysshd-makekey"), keys], check=True, capture_output=True)
    printed = subprocess.run(
        [need("tinysshd-printkey"), keys], check=True, capture_output=True, text=True
    )
    server, listener = need("tinysshd"), bind("127.0.0.1", 0)
    listener.listen()

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                with connection:
                    subprocess.run(
                        [server, str(keys)],
                        stdin=connection.fileno(),
                        stdout=connection.fileno(),
                        check=False,
                    )

    threading.Thread(target=accept, daemon=True).start()
    port = int(listener.getsockname()[1])
    line = next(line for line in printed.stdout.splitlines() if "ssh-ed25519 " in line)
    with contextlib.closing(listener):
        yield Initrd(port, line, ssh_key, state)
        listener.shutdown(socket.SHUT_RDWR)
