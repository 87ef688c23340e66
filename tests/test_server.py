"""`make server`: what travels to the server, and what may come back.

The box and the server are one computer, in a mount namespace with users of its own. A
person at a real terminal logs in over real ssh, and becomes root by real sudo or su.
Only prepare.py is a stand-in, where it must succeed or lie.
"""

import json
import os
import pty
import re
import select
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import CHECKOUT, MODULE, NO_ROOT, copy_checkout, need, need_root
from homelab import new_key, public_line
from ssh_servers import free_port, process

import waker

MAC, HOST = "52:54:00:12:34:56", "127.0.0.77"
HOST_KEY = public_line(new_key()).strip()
OTHER_KEY = public_line(new_key()).strip()
WAKERS = new_key()
REPORTED = {
    "WAKER_HOMELAB_MAC": MAC,
    "WAKER_HOMELAB_HOST": HOST,
    "WAKER_INITRD_SSH_PORT": "2222",
    "WAKER_SYSTEM_SSH_PORT": "22",
    "WAKER_SSH_HOST_KEY": HOST_KEY,
}
LINES = "".join(f"{name}={value}\n" for name, value in REPORTED.items())
ANSWER = f"waker-begin NONCE\n{LINES}waker-end NONCE\n"
EXAMPLE = CHECKOUT.joinpath("waker.env.example").read_text()

# Instead of prepare.py: record how it was called, ask, and print what the test says.
STAND_IN = """
import argparse, json, os, pathlib, sys

parser = argparse.ArgumentParser()
for name in ("--card", "--box", "--nonce"):
    parser.add_argument(name)
for name in ("--yes", "--undo"):
    parser.add_argument(name, action="store_true")
parser.add_argument("KEY", nargs="?")
called = vars(parser.parse_args())
beside = pathlib.Path(__file__).with_name("dracut")
called["files"] = sorted(path.name for path in beside.rglob("*"))
called["folder"] = str(beside.parent)
called["uid"] = os.getuid()
pathlib.Path("/mnt/called").write_text(json.dumps(called))
if not called["yes"]:
    with open("/dev/tty", "r+b", buffering=0) as terminal:
        terminal.write(b"Go on? [y/N] ")
        if terminal.readline() != b"y\\n":
            sys.exit("Nothing was changed.")
answer = pathlib.Path("/mnt/answer").read_bytes()
os.write(1, answer.replace(b"NONCE", (called["nonce"] or "").encode()))
sys.exit(int(pathlib.Path("/mnt/status").read_text()))
"""

# /etc is the namespace's own. Passwords are the users' names.
ENTER = """
mount --bind {folder} /mnt
mount -t tmpfs none /run
mkdir /run/sshd /run/upper /run/work
mount -t overlay none /etc -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work
mkdir -p /etc/waker
mount --bind /mnt/waker /etc/waker
cp /mnt/etc/* /etc
chmod 440 /etc/sudoers
exec {sshd} -D -e -f /mnt/sshd_config
"""
PASSWD = """\
root:x:0:0::/root:/bin/sh
sshd:x:101:65534::/run/sshd:/usr/sbin/nologin
nobody:x:65534:65534::/:/usr/sbin/nologin
me:x:1000:1000::/mnt/me:{shell}
owner:x:1001:1001::/mnt/owner:/bin/sh
"""
SUDOERS = """\
Defaults secure_path="/mnt/bin:/usr/sbin:/usr/bin:/sbin:/bin"
owner ALL=(ALL) NOPASSWD: ALL
"""
SSH_CONFIG = """\
Host *
    HostName 127.0.0.1
    Port {port}
    UserKnownHostsFile /mnt/known_hosts
    PreferredAuthentications password
"""


SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey /mnt/host_key
UsePAM no
PermitRootLogin yes
PidFile none
"""
RECORD = 'echo "${0##*/} $*" >>/mnt/record'


def hash_password(password: str) -> str:
    command = [need("openssl"), "passwd", "-6", password]
    return subprocess.check_output(command, text=True).strip()


class Terminal:
    """A program at a terminal, and what it has printed."""

    def __init__(self, command: list[str]) -> None:
        self._master, end = pty.openpty()
        leader = [need("setsid"), "--ctty", "--wait", *command]
        self._process = subprocess.Popen(leader, stdin=end, stdout=end, stderr=end)
        os.close(end)
        self.printed = ""
        self._answered = 0

    def _read(self) -> bool:
        assert select.select([self._master], [], [], 60)[0], self.printed
        try:
            self.printed += os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the last program has closed it
            return False
        return True

    def answer(self, prompt: str, text: str) -> None:
        """Wait until it asks; then type a line."""
        while prompt not in self.printed[self._answered :]:
            assert self._read(), self.printed
        self._answered = len(self.printed)
        os.write(self._master, f"{text}\n".encode())

    def end(self) -> int:
        """Return the exit status."""
        while self._read():
            pass
        os.close(self._master)
        return self._process.wait(60)


class Home:
    """The box and the server; /mnt there is `folder`, which everybody can read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = folder / "waker/waker.env"
        self.pid = 0

    def write(self, path: str, text: str | bytes, mode: int = 0o644) -> Path:
        file = self.folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        file.chmod(mode)
        return file

    def server(self, *variables: str, user: int = 1001) -> Terminal:
        """Run `make server` on the box; its user calls it, unless a test says so."""
        enter = [need("nsenter"), "--mount", f"--target={self.pid}"]
        become = [
            need("setpriv"),
            f"--reuid={user}",
            f"--regid={user}",
            "--clear-groups",
        ]
        clean = [
            "env",
            "-i",
            "-C",
            "/mnt/checkout",
            "PATH=/mnt/bin:/usr/bin:/bin",
            "TERM=dumb",
        ]
        make = ["make", "PYTHON=/usr/bin/python3", "server", "SERVER=me@server"]
        return Terminal([*enter, *become, *clean, *make, *variables])

    def called(self) -> dict[str, object]:
        """Return how prepare.py was called, on the server."""
        return dict(json.loads(self.folder.joinpath("called").read_text()))

    def set_answer(self, answer: str | bytes, status: int = 0) -> None:
        self.write("answer", answer)
        self.write("status", str(status))


@pytest.fixture
def home(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Home]:
    need_root()
    users = Path("/proc/self/uid_map").read_text().split()
    if int(users[2]) < 65536:  # sudo must become another one
        pytest.skip(NO_ROOT)
    need("sudo")
    shell = need(getattr(request, "param", "dash"))
    folder = tmp_path / "home"
    folder.mkdir()
    home = Home(folder)
    port = free_port()
    hashes = {name: hash_password(name) for name in ("root", "me")}
    home.write("etc/passwd", PASSWD.format(shell=shell))
    home.write("etc/group", "root:x:0:\ntty:x:5:\nme:x:1000:\nowner:x:1001:\n")
    shadow = "".join(f"{name}:{hash_}:1::::::\n" for name, hash_ in hashes.items())
    home.write("etc/shadow", shadow + "owner:*:1::::::\nsshd:*:1::::::\n", 0o600)
    home.write("etc/sudoers", SUDOERS + "me ALL=(ALL) ALL\n")
    home.write("etc/shells", f"/bin/sh\n{shell}\n")
    new_key().write_private_key_file(str(folder / "host_key"))
    home.write("sshd_config", SSHD_CONFIG.format(port=port))
    folder.joinpath("me").mkdir()
    home.write("waker/waker.env", EXAMPLE, 0o600)
    home.write("waker/ssh_key.pub", f"{public_line(WAKERS).strip()} waker\n")
    WAKERS.write_private_key_file(str(folder / "waker/ssh_key"))
    folder.joinpath("waker").chmod(0o700)
    check = f'exec {shlex.join(MODULE)} "$@"'
    home.write("bin/waker", f"#!/bin/sh\n{RECORD}\ncd {CHECKOUT}\n{check}", 0o755)
    home.write("bin/systemctl", f"#!/bin/sh\n{RECORD}", 0o755)
    copy_checkout(folder / "checkout")
    home.write("checkout/server/prepare.py", STAND_IN)
    home.set_answer(ANSWER)
    folder.joinpath("owner/.ssh").mkdir(parents=True)
    home.write("owner/.ssh/config", SSH_CONFIG.format(port=port))
    for path in (folder / "owner", folder / "owner/.ssh"):
        os.chown(path, 1001, 1001)
    script = ENTER.format(folder=folder, sshd=need("sshd"))
    with process(port, script) as server:
        home.pid = server.pid
        yield home


def test_one_command_prepares_the_server_and_starts_waker(home: Home) -> None:
    """One password for SSH, one for sudo, and one question."""
    before = home.settings.stat()
    terminal = home.server()
    terminal.answer("(yes/no/[fingerprint])?", "yes")
    terminal.answer("me@127.0.0.1's password:", "me")
    terminal.answer("[sudo] password for me:", "me")
    terminal.answer("Go on?", "y")
    assert terminal.end() == 0, terminal.printed
    called = home.called()
    assert re.fullmatch(r"127\.0\.0\.1 \d+ 127\.0\.0\.1 \d+", str(called["box"]))
    assert called["KEY"] == f"{public_line(WAKERS).strip()} waker"
    assert called["uid"] == 0
    assert "cryptroot-unlock" in str(called["files"])
    assert not Path(str(called["folder"])).exists()
    values = waker.read_env_file(home.settings)
    (pin,) = re.findall("Your new PIN, .*: (.*)\r", terminal.printed)
    assert re.fullmatch("[a-z2-9]{12}", pin)
    assert values == {
        "WAKER_PIN": pin,
        "WAKER_HOMELAB_MAC": MAC,
        "WAKER_HOMELAB_HOST": HOST,
        "WAKER_SSH_HOST_KEY": HOST_KEY,
    }
    after = home.settings.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (0, 0, before.st_mode)
    assert after.st_ino != before.st_ino
    services = "waker check\nsystemctl enable waker\nsystemctl restart waker\n"
    assert home.folder.joinpath("record").read_text() == services
    assert "ok     configuration  all settings are valid" in terminal.printed
    assert re.search(
        "unlock it from your phone at http://127.0.0.1:8080/.\r\n$", terminal.printed
    )
