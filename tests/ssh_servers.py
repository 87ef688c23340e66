"""SSH servers that act as an initrd, and a way to unlock them.

One is the homelab's own; the others are Debian's dropbear and OpenSSH. Each serves one
machine: its disks are a file, its one command is the emulation of `cryptroot-unlock`,
and its files stay in a folder of the test. The real servers need a home directory, so
they run as root in a mount namespace.
"""

import contextlib
import json
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import cryptroot_unlock
import paramiko
from conftest import PASSPHRASE, is_open, need, need_root, run_waker, wait_for
from cryptroot_unlock import Disks
from homelab import DROPBEAR, SshServer, bind, new_key, public_line
from machine import AS_USER_1

Settings = dict[str, str]
HOST_KEY = new_key()
ODD_PASSPHRASE = "-n '$(id)` a\\tb\\0 " + "é" * 244 + "xy \u00a0 "  # 512 bytes
# Seconds for an unlock that uses up all its time. Five of them are reserved for
# reporting the outcome. A slow or busy machine needs up to ten to log in and ask.
SHORT_UNLOCK = 18
RESERVED: list[socket.socket] = []  # kept bound, so that no other program gets the port


def free_port() -> int:
    """Reserve a port that refuses connections until a server of ours listens on it."""
    RESERVED.append(bind("127.0.0.1", 0))
    return int(RESERVED[-1].getsockname()[1])


class Initrd:
    """An initrd. Its folder holds the disks, waker's key and the unlock command."""

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
        is_expected = '[ "$SSH_ORIGINAL_COMMAND" = cryptroot-unlock ]'
        self.forced = f"{is_expected} && exec {self.command}"

    def settings(self, **others: object) -> Settings:
        """Return what `waker unlock` needs; others such as SSH_USER replace these."""
        values = {
            "HOMELAB_HOST": "127.0.0.1",
            "INITRD_SSH_PORT": self.port,
            "SSH_KEY": self.ssh_key,
            "SSH_HOST_KEY": self.host_key,
        }
        return {
            f"WAKER_{name}": str(value) for name, value in (values | others).items()
        }

    def received(self) -> list[bytes]:
        return [bytes.fromhex(text) for text in Disks.load(self.state).received]


@contextlib.contextmanager
def process(port: int, script: str, *options: str) -> Iterator[None]:
    """Start a server in a mount namespace, wait until it listens, and kill it later."""
    need_root()
    command = [need("unshare"), "--mount", *options, "sh", "-ec", script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            wait_for(lambda: is_open("127.0.0.1", port) or server.poll() is not None)
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
    command = [need("dropbearkey"), "-t", "ed25519", "-f", key]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    host_key = next(line for line in made.stdout.splitlines() if "ssh-ed25519 " in line)
    initrd = Initrd(folder, disks, host_key)
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    (home / ".ssh/authorized_keys").write_text(initrd.authorized)
    (folder / "passwd").write_text(f"root:x:1:1::{home}:/bin/sh\n")
    server = [need("dropbear"), "-F", "-E", "-s", "-p", f"127.0.0.1:{initrd.port}"]
    server += ["-r", key, "-P", str(folder / "pid"), "-c", initrd.forced]
    mount = f"mount --bind {folder}/passwd /etc/passwd"
    script = f"{mount}; exec {AS_USER_1} {shlex.join(server)}"
    with process(initrd.port, script):
        yield initrd


def prepare_sshd(folder: Path, disks: Disks) -> tuple[Initrd, str]:
    """Write OpenSSH's files; returns the initrd and the command that starts OpenSSH."""
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
    (folder / "passwd").write_text(f"root:x:1:1::{folder}:/bin/sh\n")
    (folder / "shadow").write_text("root:*:1::::::\n")  # or the account is locked
    (folder / "group").touch()  # nobody can give a terminal to the group tty
    mount = (
        "mount -t tmpfs none /run; mkdir /run/sshd; for name in passwd shadow group;"
    )
    mount += f" do mount --bind {folder}/$name /etc/$name; done"
    start = f"{mount}; exec {AS_USER_1} {shlex.join(server)}"
    return initrd, start


@contextlib.contextmanager
def openssh(folder: Path, disks: Disks) -> Iterator[Initrd]:
    initrd, start = prepare_sshd(folder, disks)
    forced = shlex.quote(f"ForceCommand={initrd.forced}")
    with process(initrd.port, f"{start} -o {forced}"):
        yield initrd


SERVERS = {"homelab": paramiko_server, "dropbear": dropbear, "openssh": openssh}


# ---- Servers of any kind -------------------------------------------------------------

Serve = Callable[[socket.socket], object]


@contextlib.contextmanager
def tcp_server(serve: Serve) -> Iterator[int]:
    """Listen, and pass each connection to `serve`, in turn; yields the port."""
    listener = bind("127.0.0.1", 0)
    listener.listen()

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed, or the client has gone
            while True:
                serve(listener.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def settings_at(
    folder: Path, port: int, host_key: paramiko.PKey = HOST_KEY, **others: object
) -> Settings:
    """Return settings for an SSH server on `port`; pin `host_key`."""
    initrd = Initrd(folder, Disks({}), public_line(host_key))
    return initrd.settings(INITRD_SSH_PORT=port, **others)


# ---- The unlock ----------------------------------------------------------------------


def unlock(settings: Settings, given: str = PASSPHRASE, seconds: int = 60) -> str:
    """Run `waker.py unlock` as the daemon does.

    Returns the outcome, the message, and a hint if there is one.
    """
    child = run_waker("unlock", f"--seconds={seconds}", settings=settings, given=given)
    assert child.stderr == ""
    *sent, result = map(json.loads, child.stdout.splitlines())
    outcome, message = result["outcome"], result["message"]
    is_success = outcome in ("unlocked", "already_open", "up")
    assert child.returncode == (not is_success)
    assert result["sent"] == bool(sent)
    assert all(line == {"sent": True} for line in sent)
    if outcome not in ("unlocked", "wrong_passphrase", "not_confirmed"):
        ending = "was sent" if sent else "was not sent"
        assert message.endswith(f"The passphrase {ending}.")
    return " ".join(filter(None, (f"{outcome}:", message, result["hint"])))
