"""The messages to a phone: when they are sent, and how they are set up and removed.

The script runs as on a box, with the real `waker state`. Its phone is an HTTP server.
"""

import contextlib
import os
import pty
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import CHECKOUT, environment, need, need_root
from machine import CLOSED, OPEN, SILENT, Machine
from ssh_servers import free_port

NOTIFY = CHECKOUT / "box/notify"
WAITING = "The server is waiting for its passphrase."
UP = "The server is up."
PORTS = {
    "off": (SILENT, SILENT),
    "booting": (CLOSED, CLOSED),
    "up-lost": (CLOSED, SILENT),  # one packet was lost, which looks like booting
    "locked-lost": (SILENT, CLOSED),
    "locked": (OPEN, CLOSED),
    "up": (CLOSED, OPEN),
}
NO_ROUTE = "224.0.0.1"  # nobody connects to a multicast address


def hello(state: str) -> str:
    return f"Messages from waker arrive here. The server is {state}."


class Phone(ThreadingHTTPServer):
    """Receives messages. Like ntfy, it repeats the topic in its answer."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        super().__init__((address, 0), Receiver)
        self.topic = f"/{secrets.token_hex(8)}"
        self.url = f"http://{address}:{self.server_port}{self.topic}"
        self.status = 200
        self.paths: list[str] = []
        self.messages: list[str] = []  # that it has accepted
        self.arrived, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    @contextlib.contextmanager
    def listening(self) -> Iterator["Phone"]:
        with self:
            threading.Thread(target=self.serve_forever, daemon=True).start()
            try:
                yield self
            finally:
                self.may_answer.set()
                self.shutdown()

    def new_messages(self) -> list[str]:
        """Return the messages since the last call."""
        messages, self.messages = self.messages, []
        return messages


class Receiver(BaseHTTPRequestHandler):
    server: Phone

    def do_POST(self) -> None:
        message = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.arrived.set()
        self.server.may_answer.wait(60)
        self.server.paths.append(self.path)
        if self.server.status == 200:
            self.server.messages.append(message)
        self.send_response(self.server.status)
        self.send_header("Location", f"/elsewhere{self.path}")  # followed by a GET
        self.end_headers()
        self.wfile.write(f'{{"topic": "{self.path}"}}'.encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.fixture
def phone() -> Iterator[Phone]:
    with Phone().listening() as phone:
        yield phone


@dataclass
class Box:
    """Has waker and its settings, the phone's address, and the last state."""

    folder: Path
    machine: Machine
    shell: str = "sh"

    def __post_init__(self) -> None:
        self.state = self.folder / "state"
        self.settings, self.url = self.folder / "waker.env", self.folder / "notify_url"
        self.waker = self.folder / "bin/waker"
        for folder in (self.state, self.waker.parent):
            folder.mkdir()
        waker = f'#!/bin/sh\nexec {sys.executable} {CHECKOUT}/waker.py "$@"\n'
        self.waker.write_text(waker)
        self.waker.chmod(0o755)
        self.settle()

    def settle(self, **others: str) -> None:
        settings = self.machine.settings(**others)
        # Without a key: the unit passes none.
        del settings["WAKER_SSH_KEY"], settings["WAKER_SSH_HOST_KEY"]
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self.settings.write_text("".join(lines))

    def show(self, state: str) -> None:
        """Let a check find the server in that state."""
        if state == "unknown":
            self.settle(HOMELAB_HOST=NO_ROUTE)
        else:
            self.settle()
            self.machine.show(*PORTS[state])

    def environment(self) -> dict[str, str]:
        path = f"{self.waker.parent}:{os.environ['PATH']}"
        ours = {"PATH": path, "STATE_DIRECTORY": f"{self.state}"}
        return environment(ours | {"HOME": str(self.folder)})

    def command(self) -> list[str]:
        shell, *applet = self.shell.split()
        files = f"{NOTIFY}/notify", str(self.settings), str(self.url)
        return [need(shell), *applet, *files]

    def check(self) -> subprocess.CompletedProcess[str]:
        """Do what the timer does every minute."""
        return subprocess.run(
            self.command(),
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def box(machine: Machine, phone: Phone, tmp_path: Path) -> Box:
    need("curl")
    box = Box(tmp_path, machine)
    box.url.write_text(f"{phone.url}\n")
    return box


# ---- What is sent, and when ----------------------------------------------------------

# Each check finds a state, and may send a message.
CHECKS = {
    "it waits and is up again": "up=hello locked=waits locked booting up=up up",
    "it was locked too briefly to be seen": "off=hello off up=up",
    "it was seen while it booted": "off=hello booting booting up=up",
    "it waits at first": "locked=waits locked up=up",
    "it boots at first": "booting=hello locked=waits",
    "one check gets no answer": "up=hello off up off up",
    "two checks get no answer": "up=hello off off up=up",
    "one check gets no answer while it waits": "locked=waits off locked",
    "one packet is lost": "up=hello up-lost up off up",
    "one packet is lost while it waits": "locked=waits locked-lost locked",
    "its SSH server restarts": "up=hello booting up",
    "its SSH server has stopped": "up=hello booting booting up=up",
    "two checks get no answer while it waits": "locked=waits off off locked=waits",
    "the power fails briefly": "up=hello off locked=waits off up=up",
    "it restarts": "up=hello off booting locked=waits booting up=up",
    "the box has no network": "unknown up=hello unknown unknown up",
    "the box has no network while it waits": "locked=waits unknown locked unknown",
    "the box has no network between": "up=hello off unknown off up=up",
}


@pytest.mark.parametrize("shell", ["dash", "busybox sh"])
@pytest.mark.parametrize("checks", CHECKS.values(), ids=CHECKS)
def test_a_message_is_sent_only_when_the_state_has_changed(
    checks: str, shell: str, box: Box, phone: Phone
) -> None:
    box.shell = shell
    for check in checks.split():
        state, _, message = check.partition("=")
        words = {"": [], "hello": [hello(state)], "waits": [WAITING], "up": [UP]}
        box.show(state)
        ended = box.check()
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
        assert phone.new_messages() == words[message], check


@pytest.mark.parametrize("failure", ["status 500", "status 302", "refused"])
def test_a_message_that_cannot_be_sent_is_tried_again(
    failure: str, box: Box, phone: Phone
) -> None:
    kind, _, status = failure.partition(" ")

    def fail() -> None:
        if kind == "refused":
            box.url.write_text(f"http://127.0.0.1:{free_port()}{phone.topic}\n")
        phone.status = int(status or 200)
        ended = box.check()
        assert ended.returncode
        assert ended.stderr.startswith("curl: (")
        assert phone.new_messages() == []

    def succeed(*messages: str) -> None:
        box.url.write_text(f"{phone.url}\n")
        phone.status = 200
        assert box.check().returncode == 0
        assert phone.new_messages() == [*messages]

    box.show("up")
    fail()  # the very first message
    succeed(hello("up"))
    box.show("locked")
    fail()
    fail()
    succeed(WAITING)
    succeed()
    # If the server is as it was before, the message is not sent any more.
    box.show("up")
    fail()
    box.show("locked")
    succeed()
    # Its next state has another message.
    box.show("off")
    succeed()
    succeed()
    box.show("locked")
    fail()
    box.show("up")
    succeed(UP)


def test_wrong_settings_are_an_error_and_change_nothing(box: Box, phone: Phone) -> None:
    box.settings.write_text("WAKER_HOMELAB_HOST=nonsense\n")
    ended = box.check()
    assert ended.returncode == os.EX_CONFIG
    assert "WAKER_HOMELAB_HOST" in ended.stderr
    assert [*box.state.iterdir()] == []
    assert phone.messages == []


def test_a_full_disk_repeats_no_message(box: Box, phone: Phone) -> None:
    """In a mount namespace, on a file system that has room for one file."""
    need_root()
    box.show("locked")
    script = """
        mount -t tmpfs -o size=4k none "$STATE_DIRECTORY"
        echo up >"$STATE_DIRECTORY/last"
        for n in 1 2 3; do "$@" && exit 1; done
        mount -o remount,size=64k none "$STATE_DIRECTORY"
        "$@"
        "$@" """
    enter = [need("unshare"), "--mount", "sh", "-ec", script, "sh", *box.command()]
    subprocess.run(enter, env=box.environment(), check=True)
    assert phone.messages == [WAITING]


# ---- The topic's address -------------------------------------------------------------


def test_the_address_arrives_as_it_is(box: Box, phone: Phone) -> None:
    """Even quotes and backslashes, which `install` refuses, do no harm."""
    path = r"/a?b=c%20d&e=$HOME&f={1,2}[3-4]~;@:!*()+,`id`'" + r'"\n\\'
    box.url.write_text(phone.url.replace(phone.topic, path) + "\n")
    # Whatever root's curl is told in general is not for this one.
    box.folder.joinpath(".curlrc").write_text(f'url = "{phone.url}"\n')
    assert box.check().returncode == 0
    assert phone.paths == [path]


def test_no_process_has_the_address_in_its_arguments_or_environment(
    box: Box, phone: Phone
) -> None:
    phone.may_answer.clear()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        box.command(), env=box.environment(), stdout=pipe, stderr=pipe
    ) as process:
        assert phone.arrived.wait(60)
        public = b""
        for file in ("cmdline", "environ"):
            for path in Path("/proc").glob(f"[0-9]*/{file}"):
                with contextlib.suppress(OSError):  # it has ended, or is another user's
                    public += path.read_bytes()
        phone.may_answer.set()
        printed = process.communicate()
    assert b"--config" in public  # curl's own arguments were there
    assert phone.topic.encode() not in public
    assert printed == (b"", b"")
    assert phone.messages


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:1{topic}",
        "http://nowhere.invalid{topic}",
        "http://127.0.0.1:99999{topic}",
        "http://no such host{topic}",
        "ftp://127.0.0.1{topic}",
        "file://{topic}",
        "{topic}",
    ],
)
def test_an_address_that_does_not_work_is_not_printed(
    address: str, box: Box, phone: Phone
) -> None:
    box.url.write_text(address.format(topic=phone.topic) + "\n")
    ended = box.check()
    assert ended.returncode
    assert "curl: (" in ended.stderr
    assert phone.topic.strip("/") not in ended.stdout + ended.stderr


@pytest.mark.parametrize("status", [302, 404, 500])
def test_an_error_of_the_phones_server_does_not_print_the_address(
    status: int, box: Box, phone: Phone
) -> None:
    phone.status = status
    ended = box.check()
    assert ended.returncode
    assert "curl: (" in ended.stderr
    assert phone.topic.strip("/") not in ended.stdout + ended.stderr
    assert phone.paths == [phone.topic]


# ---- The units -----------------------------------------------------------------------


def test_systemd_understands_every_line_of_the_units(tmp_path: Path) -> None:
    units = ["waker-notify.service", "waker-notify.timer"]
    for name in units:
        text = NOTIFY.joinpath(name).read_text()
        program = text.replace("/usr/local/bin/waker-notify", need("true"))
        tmp_path.joinpath(name).write_text(program)
    verify = [need("systemd-analyze"), "verify", "--man=no", "--recursive-errors=no"]
    printed = subprocess.check_output(
        [*verify, *units], cwd=tmp_path, stderr=subprocess.STDOUT
    )
    assert printed == b""


def test_the_service_is_hardened() -> None:
    """Exposure of at most 1.2, by systemd's own scale of 0 to 10."""
    command = [need("systemd-analyze"), "security", "--offline=true", "--threshold=12"]
    unit = str(NOTIFY / "waker-notify.service")
    ended = subprocess.run(
        [*command, unit], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-300:]


# ---- make install-notify -------------------------------------------------------------

# systemctl, without a systemd: it prints what it is asked, and starts the service.
SYSTEMCTL = """\
#!/bin/sh
echo "systemctl $*"
[ "$*" = "start waker-notify.service" ] || exit 0
export STATE_DIRECTORY=/var/lib/private/waker-notify
mkdir -p $STATE_DIRECTORY
unit=$(find /usr/local -path '*/lib/systemd/system/waker-notify.service')
exec $(sed -n 's|%d|/etc/waker|g; s/^ExecStart=//p' $unit)
"""
MAKE = f"make --silent -C {CHECKOUT}"
INSTALL = f"{MAKE} install-notify INIT=systemd"
REFUSED = f"if {INSTALL}; then exit 9; fi"
# Prints all that an installation may change.
OWN = "/etc/waker /etc/systemd/system /var/lib/private"  # only the test's files
LIST = f"find $layers/*/upper {OWN} -printf '%p %y %m %s %T@ %i\\n' | sort"


@dataclass
class Root:
    """A mount namespace in which `make install` has run, with a folder of its own."""

    box: Box

    def run(self, script: str, stdin: int | str = "") -> tuple[int, str]:
        """Run a script; returns its status and what it printed.

        What changes in /etc, /usr/local and /var/lib goes away with the namespace.
        """
        enter = f"""
            layers={self.box.folder}/layers
            mkdir -p $layers; mount -t tmpfs none $layers
            for folder in /etc /usr/local /usr/local/bin /usr/local/lib /var/lib; do
                layer=$layers/$(echo $folder | tr / -)
                mkdir -p $folder $layer/upper $layer/work
                mount -t overlay none $folder \
                    -o lowerdir=$folder,upperdir=$layer/upper,workdir=$layer/work
            done
            mkdir -p {OWN}
            for folder in {OWN}; do mount -t tmpfs -o mode=700 none $folder; done
            cp {self.box.settings} /etc/waker
            cp {self.box.waker} {self.box.folder}/systemctl /usr/local/bin
            export PATH=/usr/local/bin:$PATH
            {script}"""
        self.box.folder.joinpath("systemctl").write_text(SYSTEMCTL)
        self.box.folder.joinpath("systemctl").chmod(0o755)
        given = {"input": stdin} if isinstance(stdin, str) else {"stdin": stdin}
        ended = subprocess.run(
            [need("unshare"), "--mount", "sh", "-ec", enter],
            env=self.box.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=120,
            **given,
        )
        return ended.returncode, ended.stdout


@pytest.fixture
def root(box: Box) -> Root:
    need_root()
    need("make")
    return Root(box)


STARTED = """\
systemctl daemon-reload
Sending a message to your phone.
systemctl start waker-notify.service
systemctl enable --quiet --now waker-notify.timer
"""


def test_install_sends_a_message_and_starts_the_timer(root: Root, phone: Phone) -> None:
    status, printed = root.run(INSTALL, phone.url)  # without a line's end
    assert (status, phone.messages) == (0, [hello("off")])
    assert STARTED in printed
    assert phone.topic not in printed


def test_install_puts_each_file_in_its_place_and_uninstall_removes_it(
    root: Root, phone: Phone
) -> None:
    units = "/usr/local/lib/systemd/system/waker-notify"
    modes = {
        "/etc/waker/notify_url": "600 0:0",
        "/usr/local/bin/waker-notify": "755 0:0",
        f"{units}.service": "644 0:0",
        f"{units}.timer": "644 0:0",
    }
    script = f"""
        umask 077
        {LIST} >before
        {INSTALL} >/dev/null
        stat -c '%n %a %u:%g' {" ".join(modes)}
        cat /etc/waker/notify_url
        {MAKE} uninstall DESTDIR=/nowhere
        echo ---
        {MAKE} uninstall INIT=systemd
        echo ---
        find /etc/waker /usr/local/bin/waker* /usr/local/lib/systemd/system/waker* \
            /var/lib/*waker* /var/lib/private/waker* || true"""
    status, printed = root.run(f"cd $layers; {script}", f"{phone.url}\n")
    assert status == 0, printed
    installed, removed, left = printed.split("---\n")
    for name, mode in modes.items():
        assert f"{name} {mode}\n" in installed
    assert f"\n{phone.url}\n" in installed
    assert "systemctl" not in installed
    assert removed.startswith("systemctl disable --quiet --now waker-notify.timer\n")
    found = re.findall("(?m)^/.*", left)
    assert found == ["/etc/waker", "/etc/waker/waker.env"]


def test_install_replaces_an_address(root: Root, phone: Phone) -> None:
    """Or keeps it. The old file may have any mode. The old timer is stopped first."""
    script = f"""
        echo https://ntfy.sh/old >/etc/waker/notify_url
        chmod 644 /etc/waker/notify_url
        {INSTALL}
        echo ---
        echo {phone.url}/new | {INSTALL}
        echo | {INSTALL} >/dev/null
        stat -c %a /etc/waker/notify_url
        ls /etc/waker"""
    status, printed = root.run(script, phone.url)
    assert status == 0, printed
    first, again = printed.split("---\n")
    assert "disable" not in first
    assert again.startswith(
        "systemctl disable --quiet --now waker-notify.timer\n"
        "systemctl stop waker-notify.service\n"
    )
    assert STARTED in again
    assert again.endswith("600\nnotify_url\nwaker.env\n")
    assert phone.paths == [phone.topic, f"{phone.topic}/new", f"{phone.topic}/new"]
    assert phone.messages == [hello("off")] * 3


def test_install_uses_the_prefix(root: Root, phone: Phone) -> None:
    script = f"""
        mkdir -p /usr/local/else/bin
        cp /usr/local/bin/waker /usr/local/else/bin
        {INSTALL} PREFIX=/usr/local/else
        cat /usr/local/else/lib/systemd/system/waker-notify.service"""
    status, printed = root.run(script, phone.url)
    assert (status, phone.messages) == (0, [hello("off")])
    assert "\nExecStart=/usr/local/else/bin/waker-notify %d/" in printed
    assert "\nEnvironment=PATH=/usr/local/else/bin:/usr/bin:/bin\n" in printed


def test_install_asks_on_a_terminal_and_suggests_a_random_topic(
    root: Root, phone: Phone
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{phone.url}\n".encode() * 3)
    again = f"{INSTALL}; rm /etc/waker/notify_url; {INSTALL}"
    try:
        status, printed = root.run(f"{INSTALL}; {again}", theirs)
    finally:
        os.close(theirs)
        os.close(ours)
    assert (status, phone.messages) == (0, [hello("off")] * 3)
    assert printed.count("only Enter to keep the one you have") == 1
    assert len({*re.findall(r"https://ntfy\.sh/[0-9a-f]{16}\b", printed)}) == 2


@pytest.mark.parametrize("failure", ["the phone's server fails", "no network"])
def test_install_fails_if_the_first_message_cannot_be_sent(
    failure: str, root: Root, phone: Phone
) -> None:
    if failure == "no network":
        root.box.show("unknown")
    else:
        phone.status = 500
    status, printed = root.run(INSTALL, phone.url)
    assert status
    assert "could not be sent" in printed
    assert "journalctl -u waker-notify\n" in printed
    assert "systemctl enable" not in printed
    assert phone.topic not in printed


OLD = "/etc/systemd/system/waker-notify"
REMEDIES = {
    "no curl": ("hide curl", "sudo apt install curl"),
    "no systemd": ("rm /usr/local/bin/systemctl; hide systemctl", "needs systemd"),
    "no waker": ("rm /usr/local/bin/waker", "sudo make install"),
    "no settings": ("rm /etc/waker/waker.env", "sudo make install"),
    "old service": (f"touch {OLD}.service", f"sudo rm -f {OLD}.service {OLD}.timer"),
    "old timer": (f"ln -s /x {OLD}.timer", "disable --now waker-notify.timer"),
}
HIDE = """hide() {
    ! file=$(command -v $1) || mount --bind /dev/null "$(readlink -f "$file")"
}"""


@pytest.mark.parametrize(("missing", "remedy"), REMEDIES.values(), ids=REMEDIES)
def test_install_names_what_is_missing_and_changes_nothing(
    missing: str, remedy: str, root: Root, phone: Phone
) -> None:
    script = f"{HIDE}; mkdir -p /etc/systemd/system; {missing}; before=$({LIST})"
    script += f'\n{REFUSED}\n[ "$({LIST})" = "$before" ]'
    status, printed = root.run(script, phone.url)
    assert status == 0, printed
    assert remedy in printed
    assert "systemctl " not in printed.replace("    sudo systemctl", "")
    assert not phone.messages


@pytest.mark.parametrize(
    "address",
    [
        "",
        "topic",
        "ntfy.sh/topic",
        "ftp://ntfy.sh/topic",
        "https://ntfy.sh",
        "https://ntfy.sh/",
        "https://ntfy.sh?topic/x",
        "https://ntfy.sh#topic/x",
        "https:///topic",
        "https://:80/topic",
        "https://ntfy.sh/two words",
        "https://ntfy.sh/a\tb",
        "https://ntfy.sh/\x1b[31m",
        "https://ntfy.sh/topic\r",
        "https://ntfy.sh/ä",
        "https://ntfy.sh/a\\b",
        'https://ntfy.sh/a"b',
        "https://ntfy.sh/a'b",
    ],
)
def test_install_refuses_what_is_not_an_address_and_changes_nothing(
    address: str, root: Root
) -> None:
    script = f'before=$({LIST})\n{REFUSED}\n[ "$({LIST})" = "$before" ]'
    status, printed = root.run(script, f"{address}\nhttps://ntfy.sh/second-line\n")
    assert status == 0, printed
    assert "https://ntfy.sh/YOUR-SECRET-TOPIC" in printed
    assert "systemctl" not in printed
    assert not address or f"{address}\n" not in printed


@pytest.mark.parametrize(
    "address", ["http://[::1]:{}/topic", "http://me:secret@127.0.0.1:{}/a/b?c=$d#e"]
)
def test_install_keeps_an_address_as_it_is(address: str, root: Root) -> None:
    """Nothing answers there."""
    given = address.format(free_port())
    status, printed = root.run(f"{REFUSED}; cat /etc/waker/notify_url", given)
    assert status == 0
    assert printed.endswith(f"\n{given}\n")
