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
from collections.abc import Iterator
from pathlib import Path

import cryptroot_unlock
from conftest import need, need_root, wait_for
from cryptroot_unlock import Disks
from homelab import DROPBEAR, SshServer, bind, new_key, public_line

import waker

RESERVED: list[socket.socket] = []  # bound to the end: nobody else gets them


def free_port() -> int:
    """Reserve a port that refuses connections until a server of ours listens on it."""
    RESERVED.append(bind("127.0.0.1", 0))
    return int(RESERVED[-1].getsockname()[1])


class Initrd:
    """An initrd; its folder has the disks, our key, and a real server's command."""

    def __init__(self, folder: Path, disks: Disks, host_key: str) -> None:
        self.host_key, self.port = host_key, free_port()
        self.state, self.ssh_key = folder / "disks.json", folder / "ssh_key"
        disks.save(self.state)
        key = new_key()
        key.write_private_key_file(str(self.ssh_key))
        self.authorized = public_line(key)
        self.command = folder / "cryptroot-unlock"
        program = [sys.executable, cryptroot_unlock.__file__, str(self.state)]
        self.command.write_text(f"#!/bin/sh\nexec {shlex.join(program)}\n")
        self.command.chmod(0o755)
        right = '[ "$SSH_ORIGINAL_COMMAND" = cryptroot-unlock ]'
        self.forced = f"{right} && exec {self.command}"

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


@contextlib.contextmanager
def process(port: int, script: str, *options: str) -> Iterator[None]:
    """Run a server in a mount namespace until it listens, and end it afterwards."""
    need_root()
    command = [need("unshare"), "--mount", *options, "sh", "-ec", script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            is_open = waker.PortState.OPEN, ""
            wait_for(
                lambda: waker.probe_port("127.0.0.1", port) == is_open or server.poll()
            )
            assert server.poll() is None, server.communicate()[1]
            yield
        finally:
            server.kill()


@contextlib.contextmanager
def paramiko_server(folder: Path, disks: Disks) -> Iterator[Initrd]:
    key = new_key()
    initrd = Initrd(folder, disks, public_line(key))
    listener = bind("127.0.0.1", initrd.port)
    server = SshServer(listener, key, DROPBEAR, initrd.authorized, initrd.state)
    with contextlib.closing(server):
        yield initrd


@contextlib.contextmanager
def dropbear(folder: Path, disks: Disks) -> Iterator[Initrd]:
    key, home = str(folder / "host_key"), folder / "home"
    making = [need("dropbearkey"), "-t", "ed25519", "-f", key]
    made = subprocess.run(making, check=True, capture_output=True, text=True)
    host_key = next(line for line in made.stdout.splitlines() if "ssh-ed25519 " in line)
    initrd = Initrd(folder, disks, host_key)
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    (home / ".ssh/authorized_keys").write_text(initrd.authorized)
    (folder / "passwd").write_text(f"root:x:0:0::{home}:/bin/sh\n")
    server = [need("dropbear"), "-F", "-E", "-s", "-p", f"127.0.0.1:{initrd.port}"]
    server += ["-r", key, "-P", str(folder / "pid"), "-c", initrd.forced]
    script = f"mount --bind {folder}/passwd /etc/passwd; exec {shlex.join(server)}"
    with process(initrd.port, script):
        yield initrd


def prepare_sshd(folder: Path, disks: Disks) -> tuple[Initrd, str]:
    """Write OpenSSH's files, too; returns how it is started, without more options."""
    key = new_key()
    key.write_private_key_file(str(folder / "host_key"))
    initrd = Initrd(folder, disks, public_line(key))
    (folder / "authorized_keys").write_text(initrd.authorized)
    (folder / "sshd_config").write_text(
        f"Port {initrd.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin prohibit-password\nPidFile none\n"
    )
    server = [need("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")]
    start = f"mount -t tmpfs none /run; mkdir /run/sshd; exec {shlex.join(server)}"
    return initrd, start


@contextlib.contextmanager
def openssh(folder: Path, disks: Disks) -> Iterator[Initrd]:
    initrd, start = prepare_sshd(folder, disks)
    forced = shlex.quote(f"ForceCommand={initrd.forced}")
    with process(initrd.port, f"{start} -o {forced}"):
        yield initrd


SERVERS = {"homelab": paramiko_server, "dropbear": dropbear, "openssh": openssh}
