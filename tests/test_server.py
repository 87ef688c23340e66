"""`make server`: what travels to the server, and what may come back.

The box and the server are one computer, in a mount namespace with users of its own. A
person at a real terminal logs in over real ssh, and becomes root by real sudo or su.
Only prepare.py is a stand-in, where it must succeed or lie.
"""

import ast
import base64
import json
import os
import pty
import re
import secrets
import select
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import from_box
import pytest
from conftest import (
    CHECKOUT,
    MODULE,
    NO_ROOT,
    PIN,
    copy_checkout,
    need,
    need_root,
    wait_for,
)
from homelab import new_key
from ssh_servers import free_port, process

import waker

MAC, HOST = "52:54:00:12:34:56", "127.0.0.77"
BLOB = b"\0\0\0\x0bssh-ed25519\0\0\0 "
HOST_KEY = "ssh-ed25519 " + base64.b64encode(BLOB + bytes(32)).decode()
OTHER_KEY = "ssh-ed25519 " + base64.b64encode(BLOB + bytes(range(32))).decode()
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
folder = pathlib.Path(__file__).parent
called["files"] = [str(path.relative_to(folder)) for path in folder.rglob("*")]
called["folder"] = str(folder)
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
for name in group passwd shadow shells sudoers; do
    touch /etc/$name
    mount --bind /mnt/etc/$name /etc/$name
done
exec {sshd} -D -e -f /mnt/sshd_config
"""
PASSWD = """\
root:x:0:0::/mnt/root:/bin/sh
sshd:x:101:65534::/run/sshd:/usr/sbin/nologin
nobody:x:65534:65534::/:/usr/sbin/nologin
me:x:1000:1000::/mnt/me:{shell}
owner:x:1001:1001::/mnt/owner:/bin/sh
"""
SUDOERS = """\
Defaults secure_path="/mnt/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Defaults use_pty
Defaults logfile=/mnt/sudo.log, loglinelen=0
owner ALL=(ALL) NOPASSWD: ALL
"""
FREELY = f"{SUDOERS}me ALL=(ALL) NOPASSWD: ALL\n"
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
PermitUserEnvironment yes
PidFile none
"""
FILES = {"waker.env", "ssh_key", "ssh_key.pub"}  # in /etc/waker
STARTED = "waker check\nsystemctl enable waker\nsystemctl restart waker\n"
RECORD = 'echo "${0##*/} $*" >>/mnt/record'


def hash_password(password: str) -> str:
    command = [need("openssl"), "passwd", "-6", password]
    return subprocess.check_output(command, text=True).strip()


def can_be_others() -> bool:
    """Return whether there are other users: not in most user namespaces."""
    users = Path("/proc/self/uid_map").read_text().split()
    return int(users[2]) > 65535 and os.geteuid() == 0


class Terminal:
    """A program at a terminal, and what it has printed."""

    def __init__(self, command: list[str], patience: float = 60) -> None:
        self._patience = patience  # seconds without a word
        self._master, end = pty.openpty()
        # A terminal that is closed tells its shell, which ends the rest.
        shell = ["sh", "-c", '"$@"; exit', "sh", *command]
        leader = [need("setsid"), "--ctty", "--wait", *shell]
        self._process = subprocess.Popen(leader, stdin=end, stdout=end, stderr=end)
        os.close(end)
        self.printed = ""
        self._answered = 0

    def _read(self) -> bool:
        assert select.select([self._master], [], [], self._patience)[0], self.printed
        try:
            text = os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the last program has closed it
            return False
        # Between ssh's end and ours, both the server's terminal and this one add a \r.
        self.printed = re.sub("\r+\n", "\n", self.printed + text)
        return True

    def asks(self, prompt: str) -> bool:
        """Wait until it asks for something; returns whether it does."""
        while prompt not in self.printed[self._answered :]:
            if not self._read():
                return False
        return True

    def answer(self, prompt: str, text: str) -> None:
        """Type a line when it asks for it."""
        assert self.asks(prompt), self.printed
        self._answered = len(self.printed)
        os.write(self._master, f"{text}\n".encode())

    def hang_up(self) -> None:
        """Close the terminal's window."""
        os.close(self._master)
        self._process.wait(60)

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
        file.parent.mkdir(parents=True, exist_ok=True)
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

    def log_in(self, *variables: str, user: int = 1001) -> Terminal:
        """Run it, and give the SSH password."""
        terminal = self.server(*variables, user=user)
        terminal.answer("(yes/no/[fingerprint])?", "yes")
        terminal.answer("@127.0.0.1's password:", "me")
        return terminal

    def public_key(self) -> str:
        return self.folder.joinpath("waker/ssh_key.pub").read_text().strip()

    def was_called(self) -> bool:
        return self.folder.joinpath("called").exists()

    def called(self) -> dict[str, object]:
        """Return how prepare.py was called, on the server."""
        return dict(json.loads(self.folder.joinpath("called").read_text()))

    def services(self) -> str:
        """Return what was done with waker on the box."""
        record = self.folder / "record"
        return record.read_text() if record.exists() else ""

    def set_answer(self, answer: str | bytes, status: int = 0) -> None:
        self.write("answer", answer)
        self.write("status", str(status))


@pytest.fixture
def home(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Home]:
    need_root()
    if not can_be_others():
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
    key = [need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "waker", "-f"]
    subprocess.run([*key, str(folder / "waker/ssh_key")], check=True)
    folder.joinpath("waker").chmod(0o700)
    check = f'exec {shlex.join(MODULE)} "$@"'
    home.write("bin/waker", f"#!/bin/sh\n{RECORD}\ncd {CHECKOUT}\n{check}", 0o755)
    home.write("bin/systemctl", f"#!/bin/sh\n{RECORD}", 0o755)
    copy_checkout(folder / "checkout")
    home.write("checkout/server/prepare.py", STAND_IN)
    home.set_answer(ANSWER)
    for name in ("owner", "root"):
        home.write(f"{name}/.ssh/config", SSH_CONFIG.format(port=port))
    for path in (folder / "owner", folder / "owner/.ssh"):
        os.chown(path, 1001, 1001)
    script = ENTER.format(folder=folder, sshd=need("sshd"))
    with process(port, script) as server:
        home.pid = server.pid
        yield home


def test_one_command_prepares_the_server_and_starts_waker(home: Home) -> None:
    """One password for SSH, one for sudo, and one question."""
    before = home.settings.stat()
    terminal = home.log_in()
    terminal.answer("[sudo] password for me:", "me")
    terminal.answer("Go on?", "y")
    assert terminal.end() == 0, terminal.printed
    called = home.called()
    assert re.fullmatch(r"127\.0\.0\.1 \d+ 127\.0\.0\.1 \d+", str(called["box"]))
    assert called["KEY"] == home.public_key()
    assert called["uid"] == 0
    assert "dracut/46initrd-ssh/module-setup.sh" in str(called["files"])
    assert "from_box" not in str(called["files"])
    assert not Path(str(called["folder"])).exists()
    values = waker.read_env_file(home.settings)
    (pin,) = re.findall(
        r"Your new PIN, which is also in waker.env: (.*)", terminal.printed
    )
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
    assert home.services() == STARTED
    assert pin not in home.folder.joinpath("sudo.log").read_text()
    assert "ok     configuration  all settings are valid" in terminal.printed
    assert re.search(
        "unlock it from your phone at http://127.0.0.1:8080/.\n$", terminal.printed
    )


# ---- The server ----------------------------------------------------------------------


@pytest.mark.parametrize("home", ["bash", "fish", "tcsh", "zsh"], indirect=True)
def test_any_login_shell_will_do(home: Home) -> None:
    random = "".join(f"# {secrets.token_hex(40)}\n" for _ in range(400))
    home.write(
        "checkout/server/prepare.py", STAND_IN + random
    )  # as long as the real one
    home.write("etc/sudoers", FREELY)
    terminal = home.log_in("OPTIONS=--yes --card 'a $$HOME'")
    assert terminal.end() == 0, terminal.printed
    assert home.called()["card"] == "a $HOME"
    assert home.called()["uid"] == 0


def test_a_user_who_may_not_use_sudo_gives_the_root_password(home: Home) -> None:
    home.write("etc/sudoers", SUDOERS)
    terminal = home.log_in()
    terminal.answer("[sudo] password for me:", "me")
    terminal.answer("root password is needed.\nPassword:", "root")
    terminal.answer("Go on?", "y")
    assert terminal.end() == 0, terminal.printed
    assert home.called()["uid"] == 0
    assert home.called()["KEY"] == home.public_key()


def test_root_needs_neither_sudo_nor_a_second_password(home: Home) -> None:
    """Not on the box either: a router with OpenWrt has no sudo."""
    terminal = home.server("SERVER=root@server", user=0)
    terminal.answer("(yes/no/[fingerprint])?", "yes")
    terminal.answer("@127.0.0.1's password:", "root")
    terminal.answer("Go on?", "y")
    assert terminal.end() == 0, terminal.printed
    assert home.called()["uid"] == 0
    assert home.services() == STARTED
    assert not home.folder.joinpath("sudo.log").exists()


@pytest.mark.parametrize("python", ["none", "minimal", "old"])
def test_a_server_without_python_says_what_to_install(home: Home, python: str) -> None:
    for name in ("sh", "mktemp", "base64", "tar", "gzip", "rm", "id", "sudo"):
        home.write(f"none/{name}", f'#!/bin/sh\nexec {need(name)} "$@"', 0o755)
    home.write("minimal/json.py", "raise ImportError")  # as in python3-minimal
    home.write("old/sitecustomize.py", "import sys; sys.version_info = (3, 10)")
    variable = "PATH" if python == "none" else "PYTHONPATH"
    home.write("me/.ssh/environment", f"{variable}=/mnt/{python}\n")
    terminal = home.log_in()
    assert terminal.end() != 0
    assert "needs Python 3.11 or later, with all its parts." in terminal.printed
    assert "    apt install python3\n" in terminal.printed
    assert_untouched(home, terminal)


# ---- What comes back -----------------------------------------------------------------

# What a server may print; NONCE is the right one.
LIES = {
    "another user's lines": LINES,
    "no end": ANSWER.partition("waker-end")[0],
    "cut in the middle": ANSWER[:200],
    "no nonce": ANSWER.replace(" NONCE", ""),
    "another nonce": ANSWER.replace("NONCE", "0" * 32),
    "two answers": ANSWER * 2,
    "two ends": f"{ANSWER}waker-end NONCE\n",
    "the end first": f"waker-end NONCE\nwaker-begin NONCE\n{LINES}",
    "two MAC addresses": ANSWER.replace(LINES, f"WAKER_HOMELAB_MAC={MAC}\n{LINES}"),
    "no port": ANSWER.replace("WAKER_SYSTEM_SSH_PORT=22\n", ""),
    "another setting": ANSWER.replace(LINES, f"{LINES}WAKER_LISTEN=0.0.0.0:80\n"),
    "another one instead": ANSWER.replace("SYSTEM_SSH_PORT", "PIN"),
    "a setting in a value": ANSWER.replace(HOST, f"{HOST} WAKER_PIN=12345678"),
    "two lines in one": ANSWER.replace(HOST, f"{HOST}\rWAKER_PIN=12345678"),
    "words between": ANSWER.replace(LINES, f"\n{LINES}"),
    "a wrong MAC address": ANSWER.replace(MAC, "ff:ff:ff:ff:ff:ff"),
    "a name for the address": ANSWER.replace(HOST, "server.example"),
    "a scope": ANSWER.replace(HOST, "fe80::1%eth0"),
    "a port that is none": ANSWER.replace("=2222", "=0"),
    "two host keys": ANSWER.replace(HOST_KEY, f"{HOST_KEY},{OTHER_KEY}"),
    "half a host key": ANSWER.replace(HOST_KEY, HOST_KEY[:60]),
    "no host key": ANSWER.replace(HOST_KEY, ""),
    "a certificate authority": ANSWER.replace(
        HOST_KEY, f"@cert-authority * {HOST_KEY}"
    ),
    "control characters": ANSWER.replace(HOST_KEY, f"{HOST_KEY} \33]0;title\7"),
    "bytes": ANSWER.replace("=22\n", "=22\xff\n"),
    "too much to keep": ANSWER + 70_000 * "x",
    "nothing": "",
}


def assert_untouched(home: Home, terminal: Terminal) -> None:
    """Check that nothing was written on the box, nor started."""
    assert terminal.printed.count("Nothing was written on this box.") == 1
    assert home.settings.read_text() == EXAMPLE
    assert {path.name for path in home.settings.parent.iterdir()} == FILES
    assert home.services() == ""


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused(lie: str) -> None:
    output = LIES[lie].replace("NONCE", "the nonce").encode()[-from_box.MAX_OUTPUT :]
    with pytest.raises(ValueError, match=r"^|$"):
        from_box.parse_settings(from_box.find_settings(output, "the nonce"))


def test_a_truth_is_understood_among_other_lines() -> None:
    noise = b"\xff\33[2JWAKER_PIN=12345678\r\nwaker-begin 0\r\ntyped"
    right = ANSWER.replace("\n", "\r\n").replace(MAC, MAC.upper().replace(":", "-"))
    output = noise + right.replace(HOST_KEY, f"host {HOST_KEY} initrd").encode() + noise
    assert from_box.parse_settings(from_box.find_settings(output, "NONCE")) == REPORTED


@pytest.mark.parametrize("lie", ["no end", "two MAC addresses", "too much to keep"])
def test_a_lie_changes_nothing_on_the_box(home: Home, lie: str) -> None:
    home.set_answer(LIES[lie])
    home.write("etc/sudoers", FREELY)
    terminal = home.log_in("OPTIONS=--yes")
    assert terminal.end() != 0
    assert "did not report each setting once" in terminal.printed
    assert_untouched(home, terminal)


def test_right_lines_do_not_count_if_the_preparation_failed(home: Home) -> None:
    home.set_answer(ANSWER, status=1)
    terminal = home.log_in()
    terminal.answer("[sudo] password for me:", "me")
    terminal.answer("Go on?", "y")
    assert terminal.end() != 0
    assert "waker-end" in terminal.printed
    assert_untouched(home, terminal)


def test_a_lost_connection_leaves_nothing_on_the_server(home: Home) -> None:
    terminal = home.log_in()
    terminal.answer("[sudo] password for me:", "me")
    assert terminal.asks("Go on?")
    folder = Path(f"/proc/{home.pid}/root{home.called()['folder']}")
    assert folder.is_dir()
    terminal.hang_up()
    wait_for(lambda: not folder.exists())
    assert home.settings.read_text() == EXAMPLE


def test_who_says_no_changes_nothing(home: Home) -> None:
    terminal = home.log_in()
    terminal.answer("[sudo] password for me:", "me")
    terminal.answer("Go on?", "n")
    assert terminal.end() != 0
    assert_untouched(home, terminal)


def test_undo_leaves_the_settings_alone(home: Home) -> None:
    home.settings.parent.joinpath("ssh_key.pub").unlink()  # it needs none
    terminal = home.log_in("UNDO=1")
    terminal.answer("[sudo] password for me:", "me")
    terminal.answer("Go on?", "y")
    assert terminal.end() == 0, terminal.printed
    called = home.called()
    assert (called["undo"], called["KEY"], called["uid"]) == (True, None, 0)
    assert "The settings on this box stay." in terminal.printed
    assert home.settings.read_text() == EXAMPLE
    assert home.services() == ""


# ---- The box -------------------------------------------------------------------------
# Settings elsewhere than in /etc/waker, such as an SD card's, are written and not used.


@dataclass
class Card:
    """A folder with waker.env."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "waker.env"

    def run(self, *arguments: str, enter: Sequence[str] = ()) -> tuple[int, str]:
        """Run from_box.py at a terminal; returns its status and what it shows."""
        command, *others = arguments
        module = [sys.executable, "-m", "server.from_box", command, str(self.folder)]
        terminal = Terminal([*enter, *module, *others])
        return terminal.end(), terminal.printed

    def settle(self, enter: Sequence[str] = (), **others: str) -> tuple[int, str]:
        """Write what a server has reported."""
        values = REPORTED | {f"WAKER_{name}": text for name, text in others.items()}
        lines = [f"{name}={value}" for name, value in values.items()]
        return self.run("settle", *lines, enter=enter)

    def text(self) -> str:
        """Return what is in the file, with * for the new PIN."""
        text = self.file.read_bytes().decode()
        return re.sub(r"(?m)^WAKER_PIN=[a-z2-9]{12}(?=\r?$)", "WAKER_PIN=*", text)


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return Card(tmp_path)


NEW = f"""\
WAKER_HOMELAB_MAC={MAC}
WAKER_HOMELAB_HOST={HOST}
WAKER_SSH_HOST_KEY={HOST_KEY}
"""
MINE = f'# mine\nWAKER_PIN="{PIN}" \n'
EMPTY = "WAKER_HOMELAB_MAC=\n WAKER_HOMELAB_HOST = ''\nWAKER_SSH_HOST_KEY=\"\" \n"
SHOWN = "#WAKER_SSH_HOST_KEY=ssh-ed25519 AAAA…\n"
BEFORE_AND_AFTER = {
    "nothing": ("", f"{NEW}WAKER_PIN=*\n"),
    "an empty line": ("\n", f"\n{NEW}WAKER_PIN=*\n"),
    "the example": (
        EXAMPLE,
        EXAMPLE.replace("PIN=\n", "PIN=*\n")
        .replace("MAC=\n", f"MAC={MAC}\n")
        .replace("HOST=\n", f"HOST={HOST}\n")
        .replace(SHOWN, f"WAKER_SSH_HOST_KEY={HOST_KEY}\n"),
    ),
    "a PIN": (MINE, MINE + NEW),
    "a last line without an end": (MINE + "#", f"{MINE}#\n{NEW}"),
    "lines from Windows": (
        f"{MINE}{EMPTY}x=1".replace("\n", "\r\n"),
        f"{MINE}{NEW}x=1".replace("\n", "\r\n"),
    ),
    "lines from Windows without the last end": (
        f"#\r\nWAKER_PIN={PIN}",
        f"#\nWAKER_PIN={PIN}\n{NEW}".replace("\n", "\r\n"),
    ),
    "a byte order mark": (f"\ufeff{EMPTY}{MINE}", f"\ufeff{NEW}{MINE}"),
    "empty values": (MINE + EMPTY, MINE + NEW),
    "empty values after the example's": (MINE + SHOWN + EMPTY, MINE + SHOWN + NEW),
    "empty comments": (MINE + EMPTY.replace("WAKER", "#WAKER"), MINE + NEW),
    "an old value in a comment": (
        f"#WAKER_HOMELAB_HOST=192.0.2.1\n{MINE}",
        f"#WAKER_HOMELAB_HOST=192.0.2.1\n{MINE}{NEW}",
    ),
    "the same values": (MINE + NEW, MINE + NEW),
    "the same values, written differently": (
        f"{MINE}{NEW}WAKER_SYSTEM_SSH_PORT=22\n".replace(MAC, MAC.replace(":", "-"))
        .replace(HOST, f"'{HOST}'")
        .replace(HOST_KEY, f"{OTHER_KEY}, server {HOST_KEY} initrd"),
        "",
    ),
}


@pytest.mark.parametrize("case", BEFORE_AND_AFTER)
def test_settings_go_where_the_file_has_room_for_them(card: Card, case: str) -> None:
    before, after = BEFORE_AND_AFTER[case]
    card.file.write_bytes(before.encode())
    status, shown = card.settle()
    assert status == 0, shown
    assert card.text() == (after or before)
    assert ("nothing new" in shown) == (after in ("", before))
    assert "a different value" not in shown
    assert [path.name for path in card.folder.iterdir()] == ["waker.env"]


def test_ports_are_written_if_they_are_not_the_usual_ones(card: Card) -> None:
    card.file.write_text(f"{MINE}{NEW}#WAKER_SYSTEM_SSH_PORT=22\n")
    assert card.settle(INITRD_SSH_PORT="2223", SYSTEM_SSH_PORT="2022")[0] == 0
    ports = "WAKER_SYSTEM_SSH_PORT=2022\nWAKER_INITRD_SSH_PORT=2223\n"
    assert card.text() == f"{MINE}{NEW}{ports}"


def test_another_value_stays_and_is_named_with_the_servers(card: Card) -> None:
    before = f"{MINE}{NEW}WAKER_INITRD_SSH_PORT=2\n"
    before = before.replace(MAC, "52:54:00:65:43:21").replace(HOST_KEY, OTHER_KEY)
    card.file.write_text(before.replace(HOST, "a\33name"))
    status, shown = card.settle()
    assert status == 0
    assert card.text() == before.replace(HOST, "a\33name")
    for name, old, new in [
        ("HOMELAB_MAC", "52:54:00:65:43:21", MAC),
        ("HOMELAB_HOST", r"a\x1bname", HOST),
        ("INITRD_SSH_PORT", "2", "2222"),
        ("SSH_HOST_KEY", OTHER_KEY, HOST_KEY),
    ]:
        kept = f"WAKER_{name} was kept, but the server reports a different value:\n"
        assert f"\n{kept}    {old}\n    {new} (the server's)\n" in shown
    assert PIN not in shown


def test_the_file_keeps_its_owner_its_mode_and_the_link_to_it(card: Card) -> None:
    real = card.folder / "elsewhere/settings"
    real.parent.mkdir()
    real.write_text(MINE)
    real.chmod(0o640)
    owner = (1234, 2345) if can_be_others() else (os.getuid(), os.getgid())
    os.chown(real, *owner)
    card.file.symlink_to("elsewhere/settings")
    assert card.settle()[0] == 0
    assert card.file.readlink() == Path("elsewhere/settings")
    assert real.read_text() == MINE + NEW
    after = real.stat()
    assert (after.st_mode & 0o7777, after.st_uid, after.st_gid) == (0o640, *owner)
    assert [path.name for path in real.parent.iterdir()] == ["settings"]


def test_a_full_disk_leaves_the_old_settings(card: Card) -> None:
    """A file system of one page, which the settings fill."""
    need_root()
    before = f"{MINE}#{'x' * 4000}\n"
    script = f"""
        mount -t tmpfs none {card.folder} -o size=4k
        printf %s '{before}' >{card.folder}/waker.env
        "$@" || status=$?
        ls -A {card.folder}; cat {card.folder}/waker.env; exit $status"""
    enter = [need("unshare"), "--mount", "sh", "-c", script, "sh"]
    status, shown = card.settle(enter)
    assert status == 1
    assert "No space left on device" in shown
    assert shown.endswith(f"\nwaker.env\n{before}")


def test_settings_that_would_be_read_differently_are_not_written(card: Card) -> None:
    """Python's lines may end where an editor shows none."""
    before = f"{MINE}WAKER_HOMELAB_MAC=\vWAKER_HOMELAB_HOST=\n"
    card.file.write_text(before)
    status, shown = card.settle()
    assert status == 1
    assert "Put the five settings above into" in shown
    assert card.text() == before
    assert [path.name for path in card.folder.iterdir()] == ["waker.env"]


def test_a_new_pin_is_random_and_shown_at_the_terminal_alone(card: Card) -> None:
    pins = set()
    for _ in range(3):
        card.file.write_text("WAKER_PIN=\n")
        _, shown = card.settle()
        pin = waker.read_env_file(card.file)["WAKER_PIN"]
        assert shown.count(pin) == 1
        pins.add(pin)
    assert len(pins) == 3
    assert all(re.fullmatch("[a-hjkmnp-z2-9]{12}", pin) for pin in pins)
    assert len(set(from_box.ALPHABET)) ** 12 > 2**59
    # Without a terminal, it is only in the file.
    card.file.write_text("WAKER_PIN=\n")
    lines = [f"{name}={value}" for name, value in REPORTED.items()]
    module = [sys.executable, "-m", "server.from_box", "settle", str(card.folder)]
    alone = [need("setsid"), "--wait", *module, *lines]
    log = subprocess.check_output(alone, text=True, stderr=subprocess.STDOUT)
    assert waker.read_env_file(card.file)["WAKER_PIN"] not in log


# ---- Before anything is sent ---------------------------------------------------------


def fails_at_once(home: Home, words: str, *variables: str, user: int = 1001) -> None:
    """Check that `make server` fails before ssh has begun."""
    terminal = home.server(*variables, user=user)
    assert terminal.end() != 0
    assert words in terminal.printed
    assert "authenticity" not in terminal.printed
    assert not home.was_called()


def test_an_old_python_gets_as_far_as_wakers_own_words() -> None:
    source = CHECKOUT.joinpath("server/from_box.py").read_text()
    ast.parse(source, feature_version=(3, 9))


def test_what_would_fail_later_fails_at_once(home: Home) -> None:
    fails_at_once(home, "make server SERVER=me@192.168.1.20", "SERVER=")
    option = "SERVER=-oProxyCommand=touch /mnt/record"
    fails_at_once(home, "make server SERVER=me@192.168.1.20", option)
    no_card = "dist/card/waker/waker.env is missing. First run: make card (for OpenWrt,"
    fails_at_once(home, no_card, "CONFIG=dist/card/waker")
    home.settings.write_text("WAKER_PIN=1\nWAKER_PIN=2\n")
    fails_at_once(home, "line 2: WAKER_PIN is set twice")
    home.settings.unlink()
    fails_at_once(home, "First run: make dist && sudo make install")
    home.settings.write_text("")
    home.write("waker/ssh_key.pub", f"{home.public_key()}, {OTHER_KEY}\n")
    fails_at_once(home, "ssh_key.pub has no public key. Make it with: ssh-keygen -y")
    home.settings.parent.joinpath("ssh_key.pub").unlink()
    fails_at_once(home, "ssh_key.pub has no public key. Make it with: ssh-keygen -y")
    home.write("etc/sudoers", "me ALL=(ALL) ALL\n")
    assert home.services() == ""


def test_a_read_only_folder_is_noticed_before_anything_is_sent(card: Card) -> None:
    need_root()
    card.file.write_text(EXAMPLE)
    card.folder.joinpath("ssh_key.pub").write_text(HOST_KEY)
    assert card.run("key") == (0, f"{HOST_KEY}\n")
    mount = f"mount --bind {card.folder} {card.folder} && mount -o remount,bind,ro $_"
    mount = mount.replace("$_", str(card.folder))
    script = f'{mount} && exec "$@"'
    enter = [need("unshare"), "--mount", "sh", "-c", script, "sh"]
    status, shown = card.run("key", enter=enter)
    assert (status, "its folder is read-only" in shown) == (1, True)


# ---- Afterwards ----------------------------------------------------------------------


def test_a_mistake_in_another_setting_is_reported_and_waker_not_started(
    home: Home,
) -> None:
    home.settings.write_text(f"{EXAMPLE}WAKER_LISTEN=here\n")
    home.write("etc/sudoers", FREELY)
    terminal = home.log_in("OPTIONS=--yes")
    assert terminal.end() != 0
    assert "WAKER_LISTEN must be ADDRESS:PORT" in terminal.printed
    assert "run the same command again" in terminal.printed
    assert home.services() == "waker check\n"
    assert waker.read_env_file(home.settings)["WAKER_HOMELAB_MAC"] == MAC


def test_a_wrong_line_is_not_hidden_by_the_end(home: Home) -> None:
    home.settings.chmod(0o644)
    home.write("etc/sudoers", FREELY)
    terminal = home.log_in("OPTIONS=--yes")
    assert terminal.end() != 0
    assert "WRONG" in terminal.printed
    assert "Correct what is WRONG, and restart it." in terminal.printed
    assert home.services() == STARTED


def test_a_cards_settings_are_filled_in_by_its_owner(home: Home) -> None:
    """Without sudo, and without a waker on this computer."""
    card = home.folder / "checkout/dist/card/waker"
    for path in home.settings.parent.iterdir():
        home.write(f"checkout/dist/card/waker/{path.name}", path.read_text(), 0o600)
    for path in (card, *card.iterdir()):
        os.chown(path, 1001, 1001)
    home.write("etc/sudoers", FREELY)
    terminal = home.log_in("OPTIONS=--yes", "CONFIG=dist/card/waker")
    assert terminal.end() == 0, terminal.printed
    assert waker.read_env_file(card / "waker.env")["WAKER_SSH_HOST_KEY"] == HOST_KEY
    assert card.joinpath("waker.env").stat().st_uid == 1001
    assert home.settings.read_text() == EXAMPLE
    assert home.services() == ""
    assert "owner :" not in home.folder.joinpath("sudo.log").read_text()


def test_the_real_program_refuses_this_computer(home: Home) -> None:
    """Or asks, if its disk is encrypted; nobody says yes."""
    program = CHECKOUT / "server/prepare.py"
    home.write("checkout/server/prepare.py", program.read_bytes())
    terminal = home.log_in()
    terminal.answer("[sudo] password for me:", "me")
    if terminal.asks("[y/N]"):
        terminal.answer("[y/N]", "n")
    assert terminal.end() != 0
    assert "Traceback" not in terminal.printed
    assert "waker-begin" not in terminal.printed
    assert_untouched(home, terminal)


def test_everything_fits_into_one_argument() -> None:
    """Linux takes 128 KiB. Source: MAX_ARG_STRLEN in linux/binfmts.h."""
    assert CHECKOUT.joinpath("server/prepare.py").exists()
    assert len(from_box.remote_command("x" * 1000)) < 100_000
