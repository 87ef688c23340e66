"""SSH servers that act as an initrd, and a way to unlock them.

One is OpenSSH; machine.py has dropbear. The other accepts any key, and may lie.
"""

import contextlib
import json
import shlex
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paramiko
from conftest import PASSPHRASE, is_open, need, need_root, run_waker, wait_for
from homelab import DROPBEAR, bind, new_key, public_line
from paramiko.common import AUTH_SUCCESSFUL, OPEN_SUCCEEDED

Settings = dict[str, str]
Serve = Callable[[socket.socket], object]
# Whoever tests without root is root in a namespace, but may not set a user's groups
# there. So SSH servers are user 1 in a namespace within, and everybody's files are his.
AS_USER_1 = "unshare --user --map-user=1 --map-group=1"
HOST_KEY = new_key()
# Seconds for an unlock that uses up all its time. Five of them are reserved for
# reporting the outcome. A slow or busy machine needs up to ten to log in and ask.
SHORT_UNLOCK = 18
RESERVED: list[socket.socket] = []  # kept bound, so that no other program gets the port


def free_port() -> int:
    """Reserve a port that refuses connections until a server of ours listens on it."""
    RESERVED.append(bind("127.0.0.1", 0))
    return int(RESERVED[-1].getsockname()[1])


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


# ---- Unlocking them ------------------------------------------------------------------


def settings_at(
    folder: Path, port: int, host_key: paramiko.PKey = HOST_KEY, **others: object
) -> Settings:
    """Return what `waker unlock` needs; others such as SSH_USER replace these."""
    file = folder / "ssh_key"
    if not file.exists():
        new_key().write_private_key_file(str(file))
    values = {
        "HOMELAB_HOST": "127.0.0.1",
        "INITRD_SSH_PORT": port,
        "SSH_KEY": file,
        "SSH_HOST_KEY": public_line(host_key),
    }
    return {f"WAKER_{name}": str(value) for name, value in (values | others).items()}


def run_unlock(settings: Settings, given: str, seconds: int = 60) -> dict[str, Any]:
    """Run `waker unlock`; returns its result, whose form is always the same."""
    command = "unlock", "--seconds", str(seconds)
    ended = run_waker(*command, settings=settings, given=given)
    assert ended.stderr == ""
    *sent, result = map(json.loads, ended.stdout.splitlines())
    assert result.keys() == {"outcome", "sent", "message", "hint"}
    assert all(line == {"sent": True} for line in sent)
    assert result["sent"] == bool(sent)
    is_right = result["outcome"] in ("unlocked", "already_open", "up")
    assert ended.returncode == (0 if is_right else 1)
    return dict(result)


def unlock(settings: Settings, given: str = PASSPHRASE, seconds: int = 60) -> str:
    """Run `waker unlock`; returns the outcome, the message and the hint."""
    result = run_unlock(settings, given, seconds)
    words = f"{result['outcome']}:", result["message"], result["hint"]
    return " ".join(filter(None, words))


# ---- OpenSSH -------------------------------------------------------------------------


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


def prepare_sshd(folder: Path, port: int) -> tuple[Settings, str]:
    """Write OpenSSH's files; returns waker's settings, and the command to start it."""
    settings = settings_at(folder, port)
    HOST_KEY.write_private_key_file(str(folder / "host_key"))
    key = paramiko.ECDSAKey.from_private_key_file(settings["WAKER_SSH_KEY"])
    (folder / "authorized_keys").write_text(public_line(key))
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin prohibit-password\nPidFile none\n"
    )
    server = [need("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")]
    (folder / "passwd").write_text(f"root:x:1:1::{folder}:/bin/sh\n")
    (folder / "shadow").write_text("root:*:1::::::\n")  # or the account is locked
    (folder / "group").touch()  # nobody can give a terminal to the group tty
    mount = (
        "mount -t tmpfs none /run; mkdir /run/sshd; for name in passwd shadow group;"
        f" do mount --bind {folder}/$name /etc/$name; done"
    )
    return settings, f"{mount}; exec {AS_USER_1} {shlex.join(server)}"


@contextlib.contextmanager
def openssh(folder: Path, command: str) -> Iterator[Settings]:
    """Run OpenSSH, whose only command is this one."""
    port = free_port()
    settings, start = prepare_sshd(folder, port)
    with process(port, f"{start} -o {shlex.quote(f'ForceCommand={command}')}"):
        yield settings


# ---- A server that accepts any key, and may lie --------------------------------------

Step = str | Callable[[paramiko.Channel], bytes | None]
Act = Callable[[paramiko.Transport], object]


@dataclass
class Liar(paramiko.ServerInterface):
    """Its command plays one of `runs`; when there are no more, it is refused.

    A step of a run is text to send, or a function to call. `acts` are called at their
    moments: `keys`, `login`, `channel`, `exec` and `next channel`.
    """

    runs: Sequence[Sequence[Step]] = ()
    acts: Mapping[str, Act] = field(default_factory=dict)
    keys: Sequence[paramiko.PKey] = (HOST_KEY,)
    version: str = DROPBEAR
    window: int | None = None  # bytes that a client may send
    users: list[str] = field(default_factory=list)  # who tried to log in
    received: list[bytes] = field(default_factory=list)  # one item per answer
    _begun: int = 0  # how many runs
    _transport: Any = None

    def serve(self, connection: socket.socket) -> None:
        self._transport = paramiko.Transport(connection)
        self._transport.local_version = self.version
        for key in self.keys:
            self._transport.add_server_key(key)
        if self.window is not None:
            self._transport.default_window_size = self.window
        done = threading.Event()
        self._transport.start_server(done, self)
        done.wait(SHORT_UNLOCK)
        self._act("keys")

    def _act(self, moment: str) -> None:
        if moment in self.acts:
            with contextlib.suppress(EOFError):  # the client has gone
                self.acts[moment](self._transport)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.users.append(username)
        self._act("login")
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        self._act("next channel" if self._begun else "channel")
        return OPEN_SUCCEEDED

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        self._act("exec")
        self._begun += 1
        if self._begun > len(self.runs):
            return False
        run = self.runs[self._begun - 1]
        threading.Thread(target=self._play, args=(channel, run), daemon=True).start()
        return True

    def _play(self, channel: paramiko.Channel, run: Sequence[Step]) -> None:
        with contextlib.suppress(OSError, EOFError):  # the client has gone
            for step in run:
                if isinstance(step, str):
                    channel.sendall(step.encode())
                elif answer := step(channel):
                    self.received.append(answer)
            channel.send_exit_status(1)
            channel.shutdown_write()  # closing could overtake the reply to exec


def reads(channel: paramiko.Channel) -> bytes:
    """Read until the end of the input."""
    return b"".join(iter(lambda: channel.recv(1024), b""))
