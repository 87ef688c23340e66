"""SSH servers other than the dropbear of machine.py, and a way to unlock them."""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from conftest import (
    CHECKOUT,
    MODULE,
    PASSPHRASE,
    environment,
    is_open,
    need,
    need_root,
    run_waker,
    wait_for,
)
from homelab import Settings, new_key, public_line, reserve, tcp_server

# Whoever tests without root is root in a namespace, but may not set a user's groups
# there. So SSH servers are user 1 in a namespace within, and everybody's files are his.
AS_USER_1 = "unshare --user --map-user=1 --map-group=1"
HOST_KEY = new_key()
BLOB = "AAAAC3NzaC1lZDI1NTE5AAAAIBY2xOJpJNDwk1cMHNNuzpGDxx0mcY1J1uFCK6mzUGmd"
KEY = f"ssh-ed25519 {BLOB}"  # of no server
FINGERPRINT = "SHA256:c5CSjps6Y5OSk8aYpkchHhILDzS+dm64U2iAOxSq/1g"  # by ssh-keygen -l
RESERVED: list[socket.socket] = []  # kept bound, so that no other program gets the port


def free_port() -> int:
    """Reserve a port, which refuses connections at every address."""
    RESERVED.append(reserve("::" if socket.has_dualstack_ipv6() else ""))
    return int(RESERVED[-1].getsockname()[1])


def settings_at(
    folder: Path, port: int, host_key: paramiko.PKey = HOST_KEY, **others: object
) -> Settings:
    """Return settings for an SSH server on `port`; pin `host_key`.

    The folder gets waker's key. Others such as SSH_USER replace these settings.
    """
    key = new_key()
    key.write_private_key_file(str(folder / "ssh_key"))
    (folder / "authorized_keys").write_text(public_line(key))
    values = {
        "HOMELAB_HOST": "127.0.0.1",
        "INITRD_SSH_PORT": port,
        "SSH_KEY": folder / "ssh_key",
        "SSH_HOST_KEY": public_line(host_key),
    }
    return {f"WAKER_{name}": str(value) for name, value in (values | others).items()}


def says(banner: bytes) -> contextlib.AbstractContextManager[int]:
    """Listen, and send each client a banner; yields the port."""
    return tcp_server(lambda tcp: tcp.sendall(banner))


ALONE = "--pid", "--fork", "--kill-child", "--mount-proc"  # for `process`


@contextlib.contextmanager
def process(
    port: int, script: str, *options: str, address: str = "127.0.0.1"
) -> Iterator[subprocess.Popen[str]]:
    """Start a server in a mount namespace, wait until it listens, and kill it later.

    With ALONE, whatever it has started goes with it, at once.
    """
    need_root()
    command = [need("unshare"), "--mount", *options, "sh", "-ec", script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            wait_for(lambda: is_open(port, address) or server.poll() is not None)
            assert server.poll() is None, server.communicate()[1]
            yield server
        finally:
            first = Path(f"/proc/{server.pid}/task/{server.pid}/children")
            if options and server.poll() is None:
                os.kill(int(first.read_text()), signal.SIGKILL)
            else:
                server.kill()


def unlock(
    settings: Settings,
    given: str = PASSPHRASE,
    program: Sequence[str] = MODULE,
) -> str:
    """Run `waker unlock`; returns the outcome and the message."""
    ended = run_waker("unlock", settings=settings, given=given, program=program)
    assert ended.stdout, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    return f"{result['outcome']}: {result['message']}"


def ssh_to(folder: Path, settings: Settings) -> list[str]:
    """Return OpenSSH's command to log in, which trusts only the pinned host key."""
    port, known = settings["WAKER_INITRD_SSH_PORT"], folder / "known_hosts"
    known.write_text(f"[127.0.0.1]:{port} {settings['WAKER_SSH_HOST_KEY']}\n")
    options = f"-F none -o UserKnownHostsFile={known} -o GlobalKnownHostsFile=none"
    options += f" -o BatchMode=yes -o IdentitiesOnly=yes -p {port}"
    options += f" -i {settings['WAKER_SSH_KEY']} root@127.0.0.1"
    return [need("ssh"), *options.split()]


@dataclass
class Unlocking:
    """`waker unlock` as a process, whose standard output is a full pipe.

    So it stops when it is about to send the passphrase, until somebody reads that.
    """

    process: subprocess.Popen[bytes]
    output: int

    def give(self, passphrase: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(passphrase.encode())
        self.process.stdin.close()

    def is_about_to_send(self) -> bool:
        """Return whether it ignores SIGTERM."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"SigIgn:\t(\w+)", status)
        return bool(found and int(found[1], 16) & 1 << signal.SIGTERM - 1)

    def finish(self) -> Any:
        """Read to its end; returns the result, or None if it printed none."""
        with open(self.output, closefd=False) as output:
            lines = output.read().strip().splitlines()
        self.process.wait(60)
        return json.loads(lines[-1]) if lines else None


DEFAULT = "env", "--default-signal=INT,HUP"  # nohup would ignore them


@contextlib.contextmanager
def unlocking(
    settings: Settings,
    by: Sequence[str] = DEFAULT,
    program: Sequence[str] = MODULE,
) -> Iterator[Unlocking]:
    """Run `waker unlock`; whoever wants it to begin must give it a passphrase."""
    output, its = os.pipe()
    os.write(its, b"\n" * fcntl.fcntl(its, fcntl.F_SETPIPE_SZ, 1))
    with subprocess.Popen(
        [*by, *program, "unlock"],
        cwd=CHECKOUT,
        env=environment(settings),
        stdin=subprocess.PIPE,
        stdout=its,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(its)
        try:
            yield Unlocking(process, output)
        finally:
            process.kill()
            os.close(output)


@contextlib.contextmanager
def about_to_send(
    settings: Settings,
    given: str = PASSPHRASE,
    program: Sequence[str] = MODULE,
) -> Iterator[Unlocking]:
    """Run `waker unlock` until a disk has asked, and nothing was sent yet."""
    with unlocking(settings, program=program) as child:
        child.give(given)
        wait_for(child.is_about_to_send)
        yield child
