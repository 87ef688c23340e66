"""The messages to a phone: when they are sent, and how they are set up and removed.

The script runs as on a box, with the real `waker state`. Its phone is an HTTP server.
"""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
from boxes import PYTHON, need_system_python
from conftest import CHECKOUT, each, environment, need
from machine import CLOSED, OPEN, SILENT, Machine
from phones import UP, WAITING, Phone, hello
from ssh_servers import free_port
from stand_ins import mounted, stub

from box.system import SUDO

PORTS = {
    "off": (SILENT, SILENT),
    "unknown": (SILENT, SILENT),
    "booting": (CLOSED, CLOSED),
    "locked": (OPEN, CLOSED),
    "up": (CLOSED, OPEN),
}
PLACES = "etc", "run", "usr/local", "var/lib"  # of the box
NO_ROUTE = "224.0.0.1"  # nobody connects to a multicast address
Ended = subprocess.CompletedProcess[str]


@pytest.fixture
def phone() -> Iterator[Phone]:
    with Phone().listening() as phone:
        yield phone


# systemctl, without a systemd: it prints what it is asked, and starts the service, as a
# user that exists only meanwhile.
SYSTEMCTL = """\
echo "systemctl $*"
[ "$*" = "start waker-notify.service" ] || exit 0
[ ! -e /run/fails ] || exit 1
mkdir -p /var/lib/private
[ -L /var/lib/waker-notify ] || {
    mv /var/lib/waker-notify /var/lib/private
    ln -s private/waker-notify /var/lib
}
export STATE_DIRECTORY=/var/lib/private/waker-notify
unit=/usr/local/lib/systemd/system/waker-notify.service
exec $(sed -n 's|%d|/etc/waker|g; s/^ExecStart=//p' $unit)
"""


class Box:
    """A box on which waker is installed; `bin` has stand-ins."""

    def __init__(self, folder: Path, machine: Machine, phone: Phone) -> None:
        self.folder, self.machine, self.phone = folder, machine, phone
        self.state = folder / "var/lib/private/waker-notify"
        self.settings = folder / "etc/waker/waker.env"
        self.url = self.settings.with_name("notify_url")
        folders = "bin", "etc/waker", "etc/systemd/system", "run/systemd/system"
        for name in (*folders, "usr/local/bin", "var/lib"):
            folder.joinpath(name).mkdir(parents=True)
        waker = f'cd {CHECKOUT} && exec {sys.executable} -m waker "$@"\n'
        for place in ("bin", "usr/local/bin"):
            stub(folder / place / "waker", waker)
        stub(folder / "bin/systemctl", SYSTEMCTL)
        self.show("off")

    def show(self, state: str) -> None:
        """Let a check find the server in that state."""
        host = NO_ROUTE if state == "unknown" else "127.0.0.1"
        settings = self.machine.show(*PORTS[state]).settings(HOMELAB_HOST=host)
        # Without a key: the unit passes none.
        del settings["WAKER_SSH_KEY"], settings["WAKER_SSH_HOST_KEY"]
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self.settings.write_text("".join(lines))

    def run(self, *command: str, given: str = "") -> Ended:
        """Run a command with the environment of the unit."""
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        own = {"PATH": path, "STATE_DIRECTORY": str(self.state)}
        return subprocess.run(
            command,
            env=environment(own | {"HOME": str(self.folder)}),
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def check(self, shell: str = "sh", url: str = "") -> tuple[int, str]:
        """Do what the timer does every minute; returns the status and the errors."""
        self.state.mkdir(parents=True, exist_ok=True)
        self.url.write_text(f"{url or self.phone.url}\n")
        program, *applet = shell.split()
        files = CHECKOUT / "box/notify/notify", self.settings, self.url
        ended = self.run(need(program), *applet, *map(str, files))
        assert ended.stdout == ""
        return ended.returncode, ended.stderr

    def fail(self, shell: str = "sh", url: str = "") -> None:
        """Do that, and assert that it fails without printing the topic."""
        status, errors = self.check(shell, url)
        assert status
        assert "curl: (" in errors
        assert self.phone.topic.strip("/") not in errors

    def notify(self, command: str, given: str = "", first: str = "") -> Ended:
        """Install or uninstall the messages as root, perhaps after another command."""
        need_system_python()
        waker = f"cd {CHECKOUT}; {PYTHON} -m box {command} notify"
        enter = mounted(self.folder, *PLACES)
        return self.run(*enter, "sh", "-ec", f"{first}\n{waker}", given=given)

    def refuse(self, words: str, given: str = "", first: str = "") -> None:
        """Assert that an installation says so and fails, without a trace of the URL."""
        ended = self.notify("install", given, first)
        assert ended.returncode
        assert words in ended.stderr
        assert "systemctl" not in ended.stdout
        assert self.phone.topic not in ended.stdout + ended.stderr
        assert self.phone.messages == []

    def installed(self) -> dict[str, int]:
        """Return the modes of the files that an installation makes."""
        files = "usr/local/**/*waker-notify*", "etc/waker/*notify*"
        found = [path for pattern in files for path in self.folder.glob(pattern)]
        return {path.name: path.stat().st_mode & 0o777 for path in found}


@pytest.fixture
def box(machine: Machine, phone: Phone, disk_path: Path) -> Box:
    need("curl")
    return Box(disk_path, machine, phone)


# ---- What is sent, and when ----------------------------------------------------------

# Each check finds a state. It sends a message (=), fails to do so (!), or does nothing.
CHECKS = {
    "it waits and is up again": "up=hello up locked=waits locked booting up=up",
    "one check finds no open port": "up=hello off up booting up off locked=waits",
    "it boots at first": "booting=hello booting locked=waits booting locked off up=up",
    "two checks find no open port": "up=hello booting off up=up off booting off up=up",
    "and then it waits again": "locked=waits off booting locked=waits",
    "no network": "unknown up=hello booting unknown up booting unknown off up=up",
    "no message can be sent": "up!500 up=hello locked!302 locked!404 locked=waits",
    "what could not be sent is no longer true": (
        "up=hello locked!500 up booting booting locked!500 up=up"
    ),
}


@pytest.mark.parametrize("checks", CHECKS.values(), ids=CHECKS)
def test_a_message_is_sent_once_when_the_state_has_changed(
    checks: str, box: Box, phone: Phone
) -> None:
    """In two shells, which take turns."""
    expected = []
    for check, shell in zip(checks.split(), cycle(["dash", "busybox sh"])):
        state, *then = re.split("([=!])", check)
        box.show(state)
        if "!" in then:
            phone.status = int(then[1])
            box.fail(shell)
            phone.status = 200
        else:
            words = {"hello": hello(state), "waits": WAITING, "up": UP}
            expected += [words[word] for word in then[1:]]
            assert box.check(shell) == (0, "")
        assert phone.messages == expected, check


def test_a_check_that_cannot_look_or_remember_sends_nothing(box: Box) -> None:
    """Otherwise it would repeat its message every minute, as long as a disk is full."""
    box.state.joinpath("last.new").mkdir(parents=True)  # so it cannot be written
    assert box.check()[0]
    box.settings.write_text("WAKER_HOMELAB_HOST=nonsense\n")
    status, errors = box.check()
    assert status == os.EX_CONFIG
    assert "WAKER_HOMELAB_HOST" in errors
    assert box.phone.messages == []


# ---- The topic's address -------------------------------------------------------------


def test_the_address_arrives_as_it_is_and_no_process_shows_it(
    box: Box, phone: Phone
) -> None:
    """Even quotes and backslashes, which `install` refuses, do no harm."""
    odd = phone.topic + r"?b=c%20d&e=$HOME&f={1,2}[3-4]~;@:!*()+,`id`'" + r'"\n\\'
    # Whatever root's curl is told in general is not for this one.
    box.folder.joinpath(".curlrc").write_text(f'url = "{phone.url}"\n')
    assert box.check(url=phone.url.replace(phone.topic, odd)) == (0, "")
    assert phone.paths == [odd]
    assert b"--config" in phone.processes  # curl's own arguments were there
    assert phone.topic.encode() not in phone.processes


def test_an_address_that_does_not_work_is_not_printed(box: Box, phone: Phone) -> None:
    box.show("up")
    refuses, impossible = "http://127.0.0.1:1", "http://127.0.0.1:99999"
    unknown, spaces = "http://nowhere.invalid", "http://no such host"
    for origin in (refuses, impossible, unknown, spaces, "ftp://x", "file://", ""):
        box.fail(url=origin + phone.topic)
    assert box.check() == (0, "")
    assert phone.messages == [hello("up")]


# ---- waker install notify ------------------------------------------------------------

STOPPED = """\
systemctl disable --quiet --now waker-notify.timer
systemctl stop waker-notify.service
"""
SENDING = "Sending a message to your phone.\n"
STARTED = """\
systemctl daemon-reload
systemctl start waker-notify.service
systemctl enable --quiet --now waker-notify.timer
"""


def test_install_asks_on_a_terminal_and_uninstall_removes_everything(
    box: Box, phone: Phone
) -> None:
    """Another installation replaces the address, or keeps it."""
    keyboard, terminal = pty.openpty()
    asks = f"exec <{os.ttyname(terminal)}"
    with os.fdopen(keyboard, "wb", 0) as typed, os.fdopen(terminal):
        typed.write(f"{phone.url}\n{phone.url}/new\n\n".encode())
        first = box.notify("install", first=f"umask 077; {asks}").stdout
        box.url.chmod(0o644)
        second = box.notify("install", first=asks).stdout
        assert box.notify("install", first=asks).returncode == 0
    assert phone.messages == [hello("off")] * 3
    assert phone.paths == [phone.topic, f"{phone.topic}/new", f"{phone.topic}/new"]
    assert re.search(r"https://ntfy\.sh/(?!0+\b)[0-9a-f]{16}\b", first)
    assert f":\n{SENDING}{STARTED}" in first
    assert phone.topic not in first + second
    assert "just Enter to keep the one you have" in second
    assert f":\n{SENDING}{STOPPED}{STARTED}" in second
    assert box.state.joinpath("last").read_text() == "off\n"
    units = {"waker-notify.service": 0o644, "waker-notify.timer": 0o644}
    files = {"notify_url": 0o600, "waker-notify": 0o755} | units
    assert box.installed() == files

    shown = box.notify("uninstall").stdout
    assert shown.startswith(f"{STOPPED}systemctl daemon-reload\n")
    assert box.installed() == {}
    assert [*box.folder.glob("var/lib/**/*waker*")] == []
    assert "not installed" in box.notify("uninstall").stderr
    # One that was killed has left the timer: a service that has gone cannot be stopped.
    (box.folder / "usr/local/lib/systemd/system/waker-notify.timer").touch()
    assert "systemctl stop" not in box.notify("uninstall").stdout
    assert box.installed() == {}
    box.url.write_text("of an installation that was killed")
    assert box.notify("uninstall").returncode == 0
    assert box.installed() == {}
    assert not box.state.exists()


def test_if_the_first_message_cannot_be_sent_nothing_is_changed(box: Box) -> None:
    """Neither on a new box, nor where messages arrive."""
    topic = box.phone.topic
    urls = {
        f"http://[::1]:{free_port()}{topic}": "off",
        f"http://me:x@127.0.0.1:{free_port()}{topic}/b?c=$d#e": "off",
        box.phone.url: "unknown",
    }
    for url, state in urls.items():
        box.show(state)
        box.refuse("could not be sent", url)
        assert box.installed() == {}
    box.show("up")
    assert box.notify("install", box.phone.url).returncode == 0
    before = box.installed()
    for url, state in urls.items():
        box.show(state)
        box.phone.messages.clear()
        box.refuse("could not be sent", url)
        assert box.installed() == before
        assert box.url.read_text() == f"{box.phone.url}\n"
        assert box.state.joinpath("last").read_text() == "up\n"
    assert [*box.folder.glob("run/tmp*")] == []


def test_a_service_that_cannot_run_is_not_started_every_minute(box: Box) -> None:
    ended = box.notify("install", box.phone.url, "touch /run/fails")
    assert "the message was sent, but the service cannot run" in ended.stderr
    assert "systemctl enable" not in ended.stdout


def test_a_user_of_the_owners_may_run_the_service(box: Box) -> None:
    """With DynamicUser=no, its state is no link."""
    public = box.folder / "var/lib/waker-notify"
    for _ in range(2):
        assert box.notify("install", box.phone.url).returncode == 0
        public.unlink()
        box.state.rename(public)
    assert box.phone.messages == [hello("off")] * 2
    assert box.notify("uninstall").returncode == 0
    assert [*box.folder.glob("var/lib/**/*waker*")] == []


def test_an_access_token_is_part_of_the_address(box: Box, phone: Phone) -> None:
    """ntfy takes a password without a user's name for a token."""
    url = phone.url.replace("//", "//:tk_1@")
    assert box.notify("install", url).returncode == 0
    assert phone.tokens == ["Basic OnRrXzE="]


INSTALL = f"{SUDO}python3 waker install"
REMEDIES = {
    "no waker": ("rm /usr/local/bin/waker", INSTALL),
    "no settings": ("rm /etc/waker/waker.env", INSTALL),
    "in memory": (
        "mount -t tmpfs none /etc/waker; touch /etc/waker/waker.env",
        "/etc/waker is in memory",
    ),
    "no systemd": ("rmdir /run/systemd/system", "a box with systemd"),
    "no input": ("exec <&-", "from standard input"),
}


@each("missing remedy", REMEDIES)
def test_install_names_what_is_missing_and_changes_nothing(
    missing: str, remedy: str, box: Box
) -> None:
    box.refuse(remedy, box.phone.url, missing)
    assert box.installed() == {}


def test_install_refuses_what_is_not_an_address_and_changes_nothing(box: Box) -> None:
    starts = (
        "ntfy.sh/x",
        "ftp://ntfy.sh/x",
        "https:///x",
        "https://:80/x",
        "https://@/x",
    )
    no_topics = "https://ntfy.sh/", "https://ntfy.sh?x/y", "https://ntfy.sh#x/y"
    signs = (f"https://ntfy.sh/a{sign}b" for sign in " \\\"'ä")
    for url in ("", *starts, *no_topics, *signs):
        given = f"{url}\nhttps://ntfy.sh/second-line"
        box.refuse("https://ntfy.sh/YOUR-SECRET-TOPIC", given)
        assert box.installed() == {}, url
