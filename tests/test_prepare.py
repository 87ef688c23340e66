"""`waker prepare`: what travels to the server, and what may come back.

The box and the server are one computer, in a mount namespace with users of its own. A
person at a real terminal logs in over real ssh, and becomes root by real sudo or su.
Only prepare.py is a stand-in, where it must succeed or lie.
"""

import ast
import base64
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyte
import pytest
from boxes import PROCESSES
from conftest import (
    BOX,
    CHECKOUT,
    PIN,
    copy_checkout,
    has_other_users,
    interpose,
    need,
    wait_for,
)
from homelab import new_key, tcp_server
from packing import pack
from reported import ANSWER, HOST, HOST_KEY, LINES, MAC, OTHER_KEY, REPORTED
from ssh_servers import free_port, process
from stand_ins import calls, stub
from terminal import Terminal

import waker
from box import prepare

EXAMPLE = CHECKOUT.joinpath("waker.env.example").read_text()
PREPARE = CHECKOUT.joinpath("server/prepare.py").read_text()

# Instead of prepare.py: record how it was called, ask, and print what the test says.
STAND_IN = """
import json, os, pathlib, sys

_, *arguments = sys.argv
folder = pathlib.Path(__file__).parent
files = [str(path.relative_to(folder)) for path in folder.rglob("*")]
called = arguments, files, str(folder)
pathlib.Path("/mnt/called").write_text(json.dumps(called))  # only root can
if "--yes" not in arguments:
    with open("/dev/tty", "r+b", buffering=0) as terminal:
        terminal.write(b"Go on? [y/N] ")
        if terminal.readline() != b"y\\n":
            sys.exit("Nothing was changed.")
nonce = "" if "--undo" in arguments else arguments[arguments.index("--nonce") + 1]
answer = pathlib.Path("/mnt/answer").read_bytes()
os.write(1, answer.replace(b"NONCE", nonce.encode()))
sys.exit(0)
"""

# /etc is the namespace's own.
ENTER = """
mount --bind {folder} /mnt
mount -t tmpfs none /run
mkdir /run/sshd /run/upper /run/work
mount -t overlay none /etc -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work
mkdir -p /etc/waker
for name in passwd sudoers waker; do mount --bind /mnt/$name /etc/$name; done
mount --bind /mnt/local /usr/local/bin
# Otherwise, systemd says that root has no password.
sed 's/:[0-9].*/:1::::::/' /etc/passwd >/etc/shadow
exec {sshd} -D -e -f /dev/null -p {port} -h /mnt/host_key -o ListenAddress=127.0.0.1 \\
    -o UsePAM=no -o PermitRootLogin=yes -o PermitUserEnvironment=yes -o PidFile=none
"""
# The passwords of root and me are their names. The box is owner's.
PASSWD = """\
root:$1$x$5mkLE6wUP7mGhj.dNsKvp0:0:0::/mnt/root:/bin/sh
me:$1$x$9lxH4chu/.Pf65yKsvpAu.:1000:1000::/mnt/me:{shell}
owner:*:1001:1001::/mnt/owner:/bin/sh
sshd:*:101:65534::/run/sshd:/usr/sbin/nologin
nobody:*:65534:65534::/:/usr/sbin/nologin
"""
SUDOERS = """\
Defaults secure_path="/mnt/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Defaults use_pty
Defaults logfile=/mnt/sudo.log, loglinelen=0
owner ALL=(ALL) NOPASSWD: ALL
"""
# ssh's default key exchange takes 50 ms of CPU time.
SSH = """\
#!/bin/sh
exec /usr/bin/ssh -F none -p {port} -o UserKnownHostsFile=/mnt/known_hosts \\
    -o PreferredAuthentications=password -o KexAlgorithms=curve25519-sha256 "$@"
"""
# systemctl, or OpenWrt's init script, which starts a real waker.
SERVICE = f"""
name=waker
{PROCESSES}
case $1 in
is-active | running) runs && echo active ;;
show) cat /mnt/shown ;;
restart)
    stop
    set -- /usr/local/bin/waker --env-file /etc/waker/waker.env
    launch env -i PATH=$PATH $(cat /mnt/variables) "$@"
    ;;
esac
"""
STARTED = ["systemctl enable waker", "systemctl restart waker"]


PROGRAM = "/usr/bin/python3", "/mnt/program", "prepare"
SERVER = "me@127.0.0.1"


class Home:
    """The box and the server; /mnt there is `folder`, which everybody can read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stubs = folder, folder / "bin"
        self.settings = folder / "waker/waker.env"
        self.page = free_port()
        self.example = f"{EXAMPLE}WAKER_LISTEN=0.0.0.0:{self.page}\n"
        self.pid = 0

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def enter(self, *command: str) -> list[str]:
        """Return a command that runs another one there."""
        return [need("nsenter"), "--mount", f"--target={self.pid}", *command]

    def pack(self, script: str) -> None:
        """Make the one file, with a script in place of prepare.py."""
        self.write("checkout/server/prepare.py", script)
        pack(self.folder / "checkout", self.folder / "program")

    def run(self, *command: str, user: int = 1001) -> Terminal:
        """Run a command on the box, as its user unless a test says so."""
        ids = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        become = [need("setpriv"), *ids, "env", "-i", "-C", "/mnt/checkout"]
        clean = ["PATH=/mnt/bin:/usr/bin:/bin", "TERM=dumb"]
        return Terminal(self.enter(*become, *clean, *command))

    def log_in(
        self,
        *options: str,
        command: Sequence[str] = PROGRAM,
        server: str = SERVER,
        user: int = 1001,
        password: str = "me",
    ) -> Terminal:
        """Run `waker prepare`, and give the SSH password."""
        terminal = self.run(*command, server, *options, user=user)
        terminal.answer("(yes/no/[fingerprint])?", "yes")
        terminal.answer("@127.0.0.1's password:", password)
        return terminal

    def prepare(
        self, *options: str, fails: bool = False, command: Sequence[str] = PROGRAM
    ) -> str:
        """Run it without another password or a question; returns what it shows."""
        terminal = self.log_in("--yes", *options, command=command)
        assert bool(terminal.end()) == fails, terminal.printed
        return terminal.printed

    def public_key(self) -> str:
        return self.folder.joinpath("waker/ssh_key.pub").read_text().strip()

    def called(self) -> tuple[list[str], list[str], Path]:
        """Return prepare.py's arguments, the files there, and their folder."""
        text = self.folder.joinpath("called").read_text()
        arguments, files, folder = json.loads(text)
        return arguments, files, Path(f"/proc/{self.pid}/root{folder}")

    def started(self) -> list[str]:
        """Return how systemctl was called to change something."""
        asks = "systemctl is-active", "systemctl list", "systemctl show"
        asked = (call for call in calls(self.stubs) if call.startswith("systemctl"))
        return [call for call in asked if not call.startswith(asks)]

    def assert_untouched(self, shown: str) -> None:
        """Check that nothing was written on the box, nor started, and it said so."""
        assert shown.count("Nothing was written on this box.") == 1
        assert self.settings.read_text() == self.example
        files = {path.name for path in self.settings.parent.iterdir()}
        assert files == {"waker.env", "ssh_key", "ssh_key.pub"}
        assert calls(self.stubs) == []


@pytest.fixture
def home(simulation: None, disk_path: Path) -> Iterator[Home]:
    need("sudo")
    home, port = Home(disk_path / "home"), free_port()
    copy_checkout(home.folder / "checkout")
    home.folder.joinpath("me").mkdir()
    home.write("passwd", PASSWD.format(shell="/bin/sh"))
    home.write("sudoers", f"{SUDOERS}me ALL=(ALL) NOPASSWD: ALL\n")
    home.pack(STAND_IN)
    home.write("answer", ANSWER)
    home.write("bin/ssh", SSH.format(port=port), 0o755)
    stub(home.stubs / "systemctl", SERVICE)
    stub(home.stubs / "journalctl", "cat /run/waker.log\n")
    waker = f'cd {CHECKOUT}; exec {sys.executable} -m box "$@"'
    home.write("local/waker", f"#!/bin/sh\n{waker}\n", 0o755)
    home.write("waker/waker.env", home.example, 0o600)
    new_key().write_private_key_file(str(home.folder / "host_key"))
    key = [need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", "waker", "-f"]
    subprocess.run([*key, str(home.folder / "waker/ssh_key")], check=True)
    home.folder.joinpath("waker").chmod(0o700)
    script = ENTER.format(folder=home.folder, sshd=need("sshd"), port=port)
    with process(port, script) as server:
        home.pid = server.pid
        yield home
        with contextlib.suppress(OSError):  # waker was not started, or has ended
            file = Path(f"/proc/{home.pid}/root/run/waker.pid")
            os.kill(int(file.read_text()), signal.SIGTERM)


WAYS = {
    "copied file": PROGRAM,
    "checkout": ("/usr/bin/python3", "-m", "box", "prepare"),
}


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS)
def test_one_command_prepares_the_server_and_starts_waker(home: Home, way: str) -> None:
    """One password for SSH, one for sudo, and one question."""
    home.write("sudoers", f"{SUDOERS}me ALL=(ALL) ALL\n")
    terminal = home.log_in(command=WAYS[way])
    terminal.answer("[sudo] password for me:", "me")
    terminal.answer("Go on?", "y")
    assert terminal.end() == 0, terminal.printed
    (*_, box, _, _, key), files, folder = home.called()
    assert re.fullmatch(r"127\.0\.0\.1 \d+ 127\.0\.0\.1 \d+", box)
    assert key == home.public_key()
    assert "dracut/46initrd-ssh/module-setup.sh" in files
    assert not {"box", "waker.py"} & {*files}
    assert not [*home.folder.glob("checkout/**/__pycache__")]  # of root's
    assert not folder.exists()
    shown = terminal.printed
    (pin,) = re.findall(r"Your new PIN, which is also in waker.env: (.*)", shown)
    assert waker.read_env_file(home.settings) == {
        "WAKER_PIN": pin,
        "WAKER_HOMELAB_MAC": MAC,
        "WAKER_HOMELAB_HOST": HOST,
        "WAKER_SYSTEM_SSH_PORT": "2022",  # the other port is the usual one
        "WAKER_SSH_HOST_KEY": HOST_KEY,
        "WAKER_LISTEN": f"0.0.0.0:{home.page}",
    }
    assert home.started() == STARTED
    assert pin not in home.folder.joinpath("sudo.log").read_text()
    assert "ok     configuration  all settings are valid" in shown
    assert f"\nwaker answers on port {home.page}.\n" in shown
    assert shown.endswith(f"from your phone at http://127.0.0.1:{home.page}/.\n")


# ---- The server ----------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "fish", "tcsh", "zsh"])
def test_any_login_shell_will_do(shell: str, home: Home) -> None:
    """The real prepare.py fits into one argument, which Linux limits to 128 KiB."""
    home.write("passwd", PASSWD.format(shell=need(shell)))
    home.pack(STAND_IN + PREPARE)
    home.prepare("--interface", "a $HOME")
    arguments, _, _ = home.called()
    assert arguments[:3] == ["--yes", "--interface", "a $HOME"]


@pytest.mark.quick
def test_root_is_who_knows_its_password(home: Home) -> None:
    """If the user may not use sudo, or is root, as on a router without sudo.

    waker does not get root's variables.
    """
    home.write("sudoers", SUDOERS)
    terminal = home.log_in()
    terminal.answer("[sudo] password for me:", "me")
    terminal.answer("root password is needed.\nPassword:", "root")
    terminal.answer("Go on?", "y")
    assert terminal.end() == 0, terminal.printed
    (*_, key), _, _ = home.called()
    assert key == home.public_key()
    assert home.started() == STARTED

    home.folder.joinpath("sudo.log").unlink()
    terminal = home.log_in(
        "--yes",
        command=("env", "WAKER_LISTEN=nonsense", *PROGRAM),
        server="root@127.0.0.1",
        user=0,
        password="root",
    )
    assert terminal.end() == 0, terminal.printed
    assert home.started() == STARTED
    assert not home.folder.joinpath("sudo.log").exists()


def test_a_server_without_python_says_what_to_install(home: Home) -> None:
    for name in ("sh", "mktemp", "base64", "tar", "gzip", "rm", "id", "sudo"):
        home.write(f"none/{name}", f'#!/bin/sh\nexec {need(name)} "$@"', 0o755)
    home.write("minimal/json.py", "raise ImportError")  # as in python3-minimal
    home.write("old/sitecustomize.py", "import sys; sys.version_info = (3, 10)")
    for line, is_old in (
        ("PATH=/mnt/none", False),
        ("PYTHONPATH=/mnt/minimal", False),
        ("PYTHONPATH=/mnt/old", True),  # apt would have no other
    ):
        home.write("me/.ssh/environment", f"{line}\n")
        shown = home.prepare(fails=True)
        assert ("needs Debian 12 or Ubuntu 24.04, or later." in shown) == is_old
        assert ("    apt install python3\n" in shown) != is_old
        home.assert_untouched(shown)


@pytest.mark.quick
def test_a_command_of_the_users_for_this_server_is_not_run(home: Home) -> None:
    """Some open tmux wherever they log in. ssh refuses to run two commands.

    Others run none, to forward ports.
    """
    home.write("config", "RemoteCommand touch /mnt/ran\nSessionType none\n")
    client = home.folder.joinpath("bin/ssh").read_text()
    home.write("bin/ssh", client.replace("-F none", "-F /mnt/config"), 0o755)
    home.prepare()
    assert home.started() == STARTED
    assert not home.folder.joinpath("ran").exists()


@pytest.mark.quick
def test_a_lost_connection_leaves_nothing_on_the_server(home: Home) -> None:
    terminal = home.log_in()
    assert terminal.asks("Go on?")
    _, _, folder = home.called()
    assert folder.is_dir()
    terminal.hang_up()
    wait_for(lambda: not folder.exists())
    assert home.settings.read_text() == home.example


@pytest.mark.quick
def test_undo_leaves_the_settings_alone(home: Home) -> None:
    for command in ("umount", "rmdir"):  # it needs no waker on this computer
        subprocess.run(home.enter(command, "/etc/waker"), check=True)
    shown = home.prepare("--undo")
    arguments, _, _ = home.called()
    assert arguments == ["--undo", "--yes"]
    assert "The settings on this box stay." in shown
    assert home.settings.read_text() == home.example
    assert calls(home.stubs) == []


# ---- What comes back -----------------------------------------------------------------

# Of the right form. No argument of a command could be much longer.
LONG = base64.b64encode(b"\0\0\0\7ssh-rsa\0\1\0\0" + bytes(65536)).decode()
# What a server may print; NONCE is the right one.
LIES = {
    "another user's lines": LINES,
    "no end": ANSWER.partition("waker-end")[0],
    "another nonce": ANSWER.replace("NONCE", "0" * 32),
    "two answers": ANSWER * 2,
    "two ends": f"{ANSWER}waker-end NONCE\n",
    "the end first": f"waker-end NONCE\nwaker-begin NONCE\n{LINES}",
    "two MAC addresses": ANSWER.replace(LINES, f"WAKER_HOMELAB_MAC={MAC}\n{LINES}"),
    "no port": ANSWER.replace("WAKER_INITRD_SSH_PORT=2222\n", ""),
    "another setting": ANSWER.replace(LINES, f"{LINES}WAKER_LISTEN=0.0.0.0:80\n"),
    "a setting in a value": ANSWER.replace(HOST, f"{HOST} WAKER_PIN=12345678"),
    "two lines in one": ANSWER.replace(HOST, f"{HOST}\rWAKER_PIN=12345678"),
    "words between": ANSWER.replace(LINES, f"\n{LINES}"),
    "a wrong MAC address": ANSWER.replace(MAC, "ff:ff:ff:ff:ff:ff"),
    "a scope": ANSWER.replace(HOST, "fe80::1%eth0"),
    "a port that is none": ANSWER.replace("=2222", "=0"),
    "two host keys": ANSWER.replace(HOST_KEY, f"{HOST_KEY},{OTHER_KEY}"),
    "half a host key": ANSWER.replace(HOST_KEY, HOST_KEY[:60]),
    "a long host key": ANSWER.replace(HOST_KEY, f"ssh-rsa {LONG}"),
    "a certificate authority": ANSWER.replace("=ssh-", "=@cert-authority * ssh-"),
    "control characters": ANSWER.replace(HOST_KEY, f"{HOST_KEY} \33]0;title\7"),
    "bytes": ANSWER.replace("=2022\n", "=2022\xff\n"),
    "a note in red": ANSWER.replace(
        "\nwaker-end", "\nTO DO: \33[31mnothing\nwaker-end"
    ),
    "many notes": ANSWER.replace("\nwaker-end", 4 * "\nTO DO: this" + "\nwaker-end"),
    "a long note": ANSWER.replace("\nwaker-end", f"\nTO DO: {'x' * 301}\nwaker-end"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused(lie: str) -> None:
    output = LIES[lie].replace("NONCE", "the nonce").encode()
    with pytest.raises(ValueError, match=r"^|$"):
        prepare.parse_answer(output, "the nonce")


def test_a_truth_is_understood_among_other_lines() -> None:
    noise = b"\xff\33[2JWAKER_PIN=12345678\r\nwaker-begin 0\r\ntyped"
    right = ANSWER.replace("\n", "\r\n").replace(MAC, MAC.upper().replace(":", "-"))
    output = noise + right.replace(HOST_KEY, f"host {HOST_KEY} initrd").encode() + noise
    assert prepare.parse_answer(output, "NONCE") == (REPORTED, [])


FAR = 70_000 * "x"
TWICE = "did not report each setting once"
REFUSED = {
    "no end": (LIES["no end"], TWICE),
    "two answers far apart": (
        ANSWER.replace(HOST_KEY, OTHER_KEY) + FAR + ANSWER,
        TWICE,
    ),
    "too much": (ANSWER + 15 * FAR, "printed more than 1 MiB"),
}


@pytest.mark.quick
def test_nothing_is_written_unless_the_preparation_has_succeeded(home: Home) -> None:
    for lie, words in REFUSED.values():
        home.write("answer", lie)
        shown = home.prepare(fails=True)
        assert words in shown
        home.assert_untouched(shown)

    home.write("answer", ANSWER)
    home.pack(STAND_IN.replace("exit(0)", "exit(1)"))
    shown = home.prepare(fails=True)
    assert "waker-end" in shown
    home.assert_untouched(shown)
    home.assert_untouched(home.prepare("--undo", fails=True))

    for program in (STAND_IN, PREPARE):  # which refuses this computer, or asks
        home.pack(program)
        terminal = home.log_in()
        if terminal.asks("[y/N]"):
            terminal.answer("[y/N]", "n")
        assert terminal.end() != 0
        assert "Nothing was changed" in terminal.printed
        assert "waker-begin" not in terminal.printed
        home.assert_untouched(terminal.printed)


NOTES = "WARNING: it offers no Wake-on-LAN.", "TO DO: reserve 192.168.1.20."


@pytest.mark.quick
def test_what_the_owner_must_do_comes_last(home: Home) -> None:
    """And without an escape sequence, if a program reads it."""
    notes = "\n".join(NOTES)
    home.write("answer", ANSWER.replace("\nwaker-end", f"\n{notes}\nwaker-end"))
    home.folder.joinpath("me").chmod(0o777)
    script = f'{" ".join(PROGRAM)} "$0" "$@" >/mnt/me/log'
    home.prepare(command=("sh", "-c", script))
    said = home.folder.joinpath("me/log").read_text()
    assert said.endswith("\nThe server says:\n{}\n{}\n".format(*NOTES))
    assert "\nNext, reboot the server, and unlock it from your phone at http" in said
    assert "\33" not in said


def test_after_a_wrong_password_on_the_box_it_says_how_to_go_on(home: Home) -> None:
    only = "NOPASSWD: /usr/bin/python3 -B /mnt/program prepare --own-key *"
    may = SUDOERS.replace("NOPASSWD: ALL", f"ALL, {only}\nDefaults passwd_tries=1")
    home.write("sudoers", f"{may}me ALL=(ALL) NOPASSWD: ALL\n")
    terminal = home.log_in("--yes", "--interface", "eth 0")
    terminal.answer("[sudo] password for owner:", "wrong")
    assert terminal.end() != 0
    again = "waker prepare me@127.0.0.1 --yes --interface 'eth 0'"
    words = f"The server is prepared. To set up this box, repeat: {again}\n"
    assert terminal.printed.endswith(words)
    assert home.settings.read_text() == home.example


# The last bytes of a hostile server: red, unseen, and in the window's title.
HIDES = "\33[31;8m\33]0;"


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_can_hide_nothing_that_the_box_says(home: Home, fails: bool) -> None:
    """Least of all the new PIN, and that nothing was written."""
    home.write("answer", (LIES["no end"] if fails else ANSWER) + HIDES)
    screen = pyte.Screen(132, 99)
    screen.set_mode(pyte.modes.LNM)  # new lines begin at the left
    pyte.Stream(screen).feed(home.prepare(fails=fails))
    words = "The server did not report" if fails else "Your new PIN, which"
    (line,) = (n for n, text in enumerate(screen.display) if text.startswith(words))
    assert screen.buffer[line][0].fg == "default"


# ---- The box -------------------------------------------------------------------------
# Settings elsewhere than in /etc/waker, such as a router's, are written and not used.

SETTLE = *BOX, "prepare", "--settle"


def settle(file: Path, *by: str, fails: bool = False) -> str:
    """Write what a server has reported, at a terminal; returns what that shows."""
    terminal = Terminal([*by, *SETTLE, str(file.parent), *LINES.splitlines()])
    assert bool(terminal.end()) == fails, terminal.printed
    return terminal.printed


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "waker.env"


NEW = LINES.replace("WAKER_INITRD_SSH_PORT=2222\n", "")  # which is the usual one
MINE = f'# mine\nWAKER_PIN="{PIN}" \n'
SHOWN = "#WAKER_SSH_HOST_KEY=ssh-ed25519 AAAA…\n"
FILLED_IN = (
    EXAMPLE.replace("PIN=\n", "PIN=*\n")
    .replace("MAC=\n", f"MAC={MAC}\n")
    .replace("HOST=\n", f"HOST={HOST}\n")
    .replace(SHOWN, f"WAKER_SSH_HOST_KEY={HOST_KEY}\n")
    .replace("#WAKER_SYSTEM_SSH_PORT=22\n", "WAKER_SYSTEM_SSH_PORT=2022\n")
)
EMPTY = f"""\
{SHOWN}WAKER_SSH_HOST_KEY="" \n\
#WAKER_HOMELAB_MAC=
 WAKER_HOMELAB_HOST = ''
"""
FILLED = f"""\
{SHOWN}WAKER_SSH_HOST_KEY={HOST_KEY}
WAKER_HOMELAB_MAC={MAC}
WAKER_HOMELAB_HOST={HOST}
WAKER_SYSTEM_SSH_PORT=2022
"""
SAME = (
    f"{MINE}{LINES}".replace(MAC, MAC.replace(":", "-"))
    .replace(HOST, f"'{HOST}'")
    .replace(HOST_KEY, f"{OTHER_KEY}, server {HOST_KEY} initrd")
)
OLD = f"\ufeff#WAKER_HOMELAB_HOST=192.0.2.1\n{MINE}#"  # without a last line end


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f"{NEW}WAKER_PIN=*\n"),
        (EXAMPLE, FILLED_IN),
        (MINE + EMPTY, MINE + FILLED),
        (OLD, f"{OLD}\n{NEW}"),
        (SAME, SAME),
    ],
    ids=["no file", "example", "empty", "commented", "the same"],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["Unix", "Windows"])
def test_settings_go_where_the_file_has_room_for_them(
    file: Path, before: str, after: str, line_end: str
) -> None:
    file.write_text(before, newline=line_end)
    shown = settle(file)
    text = file.read_bytes().decode()
    text = re.sub("WAKER_PIN=[a-z2-9]{12}", "WAKER_PIN=*", text)
    assert text == after.replace("\n", line_end if before else "\n")
    assert ("nothing new" in shown) == (after == before)
    assert "a different value" not in shown
    assert [*file.parent.iterdir()] == [file]


def test_another_value_stays_and_is_named_with_the_servers(file: Path) -> None:
    old = {
        "HOMELAB_MAC": "52:54:00:65:43:21",
        "HOMELAB_HOST": "a\33name",
        "INITRD_SSH_PORT": "2",
        "SYSTEM_SSH_PORT": "22",
        "SSH_HOST_KEY": OTHER_KEY,
    }
    before = MINE + "".join(f"WAKER_{name}={value}\n" for name, value in old.items())
    file.write_text(before)
    shown = settle(file)
    assert file.read_text() == before
    for name, value in old.items():
        escaped = value.replace("\33", r"\x1b")
        kept = f"WAKER_{name} was kept, but the server reports a different value:\n"
        theirs = f"{REPORTED[f'WAKER_{name}']} (the server's)"
        assert f"\n{kept}    {escaped}\n    {theirs}\n" in shown
    assert "\33" not in shown
    assert PIN not in shown


def test_the_file_is_replaced_but_keeps_its_owner_mode_and_link(file: Path) -> None:
    real = file.parent / "elsewhere/settings"
    real.parent.mkdir()
    real.write_text(MINE)
    real.chmod(0o640)
    owner = (1234, 2345) if has_other_users() else (os.getuid(), os.getgid())
    os.chown(real, *owner)
    before = real.stat()
    file.symlink_to("elsewhere/settings")
    settle(file)
    assert file.readlink() == Path("elsewhere/settings")
    assert real.read_text() == MINE + NEW
    after = real.stat()
    assert (after.st_mode & 0o7777, after.st_uid, after.st_gid) == (0o640, *owner)
    assert after.st_ino != before.st_ino
    assert [path.name for path in real.parent.iterdir()] == ["settings"]


@pytest.mark.parametrize("call", ["fchown", "fchmod", "fsync"])
def test_a_disk_that_fails_is_named_and_loses_nothing(
    file: Path, tmp_path_factory: pytest.TempPathFactory, call: str
) -> None:
    file.write_text(MINE)
    fails = f"#include <errno.h>\nint {call}() {{ errno = EIO; return -1; }}"
    library = interpose(tmp_path_factory.mktemp("library"), fails)
    shown = settle(file, "env", f"LD_PRELOAD={library}", fails=True)
    assert f"{file} cannot be written: Input/output error" in shown
    assert file.read_text() == MINE
    assert [*file.parent.iterdir()] == [file]


def test_the_next_run_removes_what_a_killed_one_has_left(
    file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It has a PIN that nobody was told."""
    file.write_text(MINE.replace("WAKER_PIN", "WAKER_SSH_USER"))
    dies = "#include <signal.h>\nint fsync(int fd) { return raise(SIGKILL); }"
    library = interpose(tmp_path_factory.mktemp("library"), dies)
    settle(file, "env", f"LD_PRELOAD={library}", fails=True)
    (left,) = {*file.parent.iterdir()} - {file}
    assert "WAKER_PIN=" in left.read_text()
    file.write_text(MINE + LINES)  # to which there is nothing to add
    settle(file)
    assert [*file.parent.iterdir()] == [file]


def test_two_runs_write_one_after_the_other(file: Path) -> None:
    """Or both would make a PIN, and one that was shown would be lost."""
    file.write_text("")
    folder = os.open(file.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    terminal = Terminal([*SETTLE, str(file.parent), *LINES.splitlines()])
    waits = re.compile(rf"-> FLOCK .*:{file.parent.stat().st_ino} ")
    wait_for(lambda: waits.search(Path("/proc/locks").read_text()))
    file.write_text(MINE)
    os.close(folder)
    assert terminal.end() == 0
    assert file.read_text() == MINE + NEW


def test_settings_that_would_be_read_differently_are_not_written(file: Path) -> None:
    """Python's lines may end where an editor shows none."""
    before = f"{MINE}WAKER_HOMELAB_MAC=\vWAKER_HOMELAB_HOST=\n"
    file.write_text(before)
    shown = settle(file, fails=True)
    assert "Put the settings above into" in shown
    assert file.read_text() == before
    assert [*file.parent.iterdir()] == [file]


def test_a_new_pin_is_random_and_shown_at_the_terminal_alone(file: Path) -> None:
    assert len(set(prepare.ALPHABET)) ** 12 > 2**59
    file.write_text("WAKER_PIN=\n")
    shown = settle(file)
    pin = waker.read_env_file(file)["WAKER_PIN"]
    assert re.fullmatch("[a-hjkmnp-z2-9]{12}", pin)
    assert shown.count(pin) == 1
    # Without a terminal, it is only in the file.
    file.write_text("WAKER_PIN=\n")
    alone = need("setsid"), "--wait", *SETTLE, str(file.parent), *LINES.splitlines()
    log = subprocess.check_output(alone, text=True, stderr=subprocess.STDOUT)
    assert f"Your new PIN is in {file}.\n" in log
    other = waker.read_env_file(file)["WAKER_PIN"]
    assert other != pin
    assert other not in log


# ---- Before anything is sent ---------------------------------------------------------


def test_an_old_python_gets_as_far_as_wakers_own_words() -> None:
    source = CHECKOUT.joinpath("box/__main__.py").read_text()
    ast.parse(source, feature_version=(3, 9))


@pytest.mark.quick
def test_what_would_fail_later_fails_at_once(home: Home) -> None:
    def fails(words: str, *options: str, command: Sequence[str] = PROGRAM) -> None:
        terminal = home.run(*command, *options)
        assert terminal.end() != 0
        assert words in terminal.printed.replace("\n", " ")
        assert "authenticity" not in terminal.printed  # ssh has not begun

    fails("the following arguments are required: SERVER")
    for server in ("", "-oProxyCommand=true"):
        fails("SERVER must be as ssh knows it: me@192.168.1.20", "--", server)
    for option in ("--und", "--yess"):  # an abbreviation could mean another one later
        fails(f"unrecognized arguments: {option}", SERVER, option)
    home.settings.write_text("WAKER_PIN=1\nWAKER_PIN=2\n")
    fails("line 2: WAKER_PIN is set twice", SERVER)
    home.settings.unlink()
    fails("/etc/waker/waker.env is missing", SERVER)
    home.settings.write_text("")
    for key in (f"{home.public_key()}, {OTHER_KEY}\n", ""):
        home.write("waker/ssh_key.pub", key)
        fails("ssh_key.pub has no public key. Make it with: sudo ssh-keygen -y", SERVER)
    home.write("waker/ssh_key.pub", OTHER_KEY)
    home.settings.write_text(home.example)
    read_only = home.enter("mount", "-o", "remount,bind,ro", "/etc/waker")
    subprocess.run(read_only, check=True)
    fails("its folder is read-only", SERVER)
    in_memory = home.enter("mount", "-t", "tmpfs", "none", "/etc/waker")
    subprocess.run(in_memory, check=True)
    fails("/etc/waker is in memory", SERVER)
    subprocess.run(home.enter("umount", "/etc/waker"), check=True)
    typo = "--config", "/mnt/none/router"  # where root could make a folder
    fails("/mnt/none: Permission denied", SERVER, *typo)
    # What the box lacks.
    no_sudo = "env", "PATH=/mnt/bin", *PROGRAM
    fails("there is no sudo here. Run this as root.", SERVER, command=no_sudo)
    home.stubs.joinpath("ssh").unlink()
    fails("but here there is none. Install the pack", SERVER, command=no_sudo)
    home.stubs.joinpath("ssh").symlink_to(need("dbclient"))
    fails("but here /mnt/bin/ssh is Dropbear's, which", SERVER)
    subprocess.run(home.enter("umount", "/etc/waker"), check=True)
    subprocess.run(home.enter("rmdir", "/etc/waker"), check=True)
    fails("/etc/waker is missing. Install waker first, or name a folder", SERVER)
    assert calls(home.stubs) == []


# ---- Afterwards ----------------------------------------------------------------------


def test_mistakes_in_other_settings_are_reported(home: Home) -> None:
    home.settings.write_text(f"{EXAMPLE}WAKER_LISTEN=here\n")
    shown = home.prepare(fails=True)
    assert "WAKER_LISTEN must be written as" in shown
    assert "run the same command again" in shown
    assert home.started() == []
    assert waker.read_env_file(home.settings)["WAKER_HOMELAB_MAC"] == MAC
    # waker can run with others.
    home.settings.write_text(home.example)
    home.settings.chmod(0o644)
    shown = home.prepare(fails=True)
    assert "WRONG  configuration" in shown
    assert f"waker answers on port {home.page}." in shown
    assert shown.endswith("Correct what is wrong, and run the same command again.\n")
    assert home.started() == STARTED


def test_a_port_that_is_set_in_a_drop_in_is_the_one_where_the_page_must_be(
    home: Home,
) -> None:
    port = free_port()
    other = f"WAKER_LISTEN=0.0.0.0:{port}"
    home.write("variables", other)
    start = "argv[]=/usr/local/bin/waker --env-file /etc/waker/waker.env"
    home.write("shown", f"Id=waker.service\nExecStart={start} ;\nEnvironment={other}\n")
    assert home.prepare().endswith(f"phone at http://127.0.0.1:{port}/.\n")


@pytest.mark.quick
def test_another_program_on_the_port_is_named(home: Home) -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\nhello"
    with tcp_server(lambda tcp: tcp.sendall(answer), port=home.page):
        shown = home.prepare(fails=True)
    assert f"WRONG  web port       another program answers on {home.page}." in shown
    assert "or choose another port in WAKER_LISTEN" in shown
    log = "WAKER_LISTEN: Address already in use"
    assert f"waker does not answer. Its log ends with:\n\n{log}" in shown
    assert "from your phone" not in shown


def test_a_folder_for_a_router_gets_a_key_and_the_settings(
    home: Home,
) -> None:
    """Without sudo, and without a waker on this computer. Later, both are kept."""
    folder, config = home.folder / "me/new/router", ("--config", "/mnt/me/new/router")
    home.folder.joinpath("me").chmod(0o777)
    home.prepare(*config)
    settings = waker.read_env_file(folder / "waker.env")
    assert settings["WAKER_SSH_HOST_KEY"] == HOST_KEY
    (*_, key), _, _ = home.called()
    files = {path.name: path for path in folder.iterdir()}
    assert files.keys() == {"waker.env", "ssh_key", "ssh_key.pub"}
    assert files["ssh_key.pub"].read_text() == f"{key}\n"
    private = folder, files["waker.env"], files["ssh_key"]
    for path in private:
        assert (path.stat().st_mode & 0o077, path.stat().st_uid) == (0, 1001)
    before = {path.name: path.read_bytes() for path in files.values()}
    for lost in ("", "ssh_key"):  # which may be on the router alone by now
        if before.pop(lost, None):
            files[lost].unlink()
        home.prepare(*config)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    files["waker.env"].unlink()  # whose other settings are on the router
    terminal = home.run(*PROGRAM, SERVER, *config)
    assert terminal.end() != 0
    assert "Fetch waker.env from the box." in terminal.printed
    assert [*folder.iterdir()] == [files["ssh_key.pub"]]
    assert home.settings.read_text() == home.example
    assert calls(home.stubs) == []
    assert "owner :" not in home.folder.joinpath("sudo.log").read_text()


def test_on_openwrt_waker_is_started_in_its_way(home: Home) -> None:
    home.settings.write_text(f"{EXAMPLE}WAKER_LISTEN=127.0.0.1:{home.page}\n")
    services = home.folder / "init.d"
    services.mkdir()
    stub(services / "waker", SERVICE)
    layers = "lowerdir=/usr/bin,upperdir=/run/up,workdir=/run/on"
    script = f"""
        cd /etc; touch rc.common; mkdir -p init.d /run/up /run/on
        mount -B /mnt/init.d init.d; mount -t overlay none /usr/bin -o {layers}
        cp /usr/local/bin/waker /usr/bin
    """
    subprocess.run(home.enter("sh", "-ec", script), check=True)
    # Only the owner knows the address of the proxy before it.
    assert home.prepare().endswith("unlock it from your phone.\n")
    assert home.started() == []
    assert calls(services)[:3] == ["waker enable", "waker restart", "waker running"]
