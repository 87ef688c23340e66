"""`waker install` on simulated boxes, what packagers get, and the demo."""

import contextlib
import fcntl
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import homelab
import pytest
from boxes import PYTHON, RC_COMMON, Box, new_box
from conftest import (
    CHECKOUT,
    MACHINE,
    PIN,
    Client,
    each,
    interpose,
    is_open,
    make,
    need,
    wait_for,
)
from machine import Machine
from packing import BLOCKED, COMPILE, pack, unpack
from ssh_servers import free_port, says, ssh_to
from stand_ins import calls, stub
from terminal import Terminal

from box import system

PROGRAM = "/usr/local/bin/waker"
UNIT = "/usr/local/lib/systemd/system/waker.service"
SETTINGS = "/etc/waker/waker.env"
KEY, PUBLIC = "/etc/waker/ssh_key", "/etc/waker/ssh_key.pub"
EXAMPLE = CHECKOUT.joinpath("waker.env.example").read_bytes()
UNITS = "usr/lib/systemd/system"  # of a package
PREPARE = """\
Next, prepare the server, without sudo:

    waker prepare me@192.168.1.20

(with your user and your server's address)
"""
CHECK = "Next, check that everything works:\n\n    sudo waker check\n"
KEPT = "/lib/upgrade/keep.d/waker"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one file, as people copy it."""
    return pack(CHECKOUT, tmp_path_factory.mktemp("release") / "waker")


@pytest.fixture
def box(simulation: None, program: Path, tmp_path: Path) -> Iterator[Box]:
    with new_box(tmp_path / "box", program) as box:
        yield box


@pytest.fixture
def router(box: Box) -> Box:
    """An OpenWrt box, with only the Python modules that OpenWrt packages."""
    names = "apt apt-get dpkg systemctl journalctl sudo"
    box.run(f"cd /usr/bin; rm -f {names}; cd {box.stubs}; rm -f {names}")
    stub(box.stubs / "logread", "cat /run/waker.log\n")
    box.write("/etc/rc.common", RC_COMMON)
    box.run("mkdir -p /etc/init.d /etc/rc.d /lib/upgrade/keep.d")
    blocker = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED.split()}))\n"
    box.write("/usr/lib/python3/dist-packages/blocker.pth", blocker)
    return box


ELSEWHERE = "192.0.2.1:8080"  # no address of this box


def settle(box: Box, folder: str = "/etc/waker", **others: str) -> int:
    """Write valid settings to a folder, with others; returns the page's port."""
    port = free_port()
    values = MACHINE | {"WAKER_PIN": PIN, "WAKER_LISTEN": f"127.0.0.1:{port}"}
    lines = [f"{name}={value}\n" for name, value in (values | others).items()]
    box.write(f"{folder}/waker.env", "".join(lines))
    return port


@functools.cache
def compile_program(version: str = "") -> bytes:
    """Return the program as it is installed, perhaps with another version's number."""
    with tempfile.TemporaryDirectory() as name:
        folder, sources = Path(name), CHECKOUT
        if version:
            sources = unpack(pack(CHECKOUT, folder / "waker"), folder / "sources")
            file = sources / "waker.py"
            changed = re.sub('(_version__ = )".*"', rf'\1"{version}"', file.read_text())
            file.write_text(changed)
        return pack(sources, folder / "compiled", COMPILE).read_bytes()


def new() -> dict[str, tuple[int, bytes]]:
    """Return the program and the unit that are installed."""
    unit = CHECKOUT.joinpath("waker.service").read_bytes()
    return {PROGRAM: (0o755, compile_program()), UNIT: (0o644, unit)}


def put_old(box: Box) -> dict[str, tuple[int, bytes]]:
    """Put an older waker there, with settings and a key; returns the files."""
    box.write(PROGRAM, compile_program("old"), 0o755)
    box.write(UNIT, b"# old\n" + new()[UNIT][1], 0o644)
    settle(box)
    for path in (KEY, PUBLIC):
        box.write(path, "of the owner")
    box.run("systemctl enable waker")
    assert box.run("waker --version") == "waker old\n"
    return box.installed()


def run_old(box: Box) -> dict[str, tuple[int, bytes]]:
    """Run an older waker, and waker2 for a second server; returns the files."""
    put_old(box)
    second = new()[UNIT][1].replace(b"/etc/waker/", b"/etc/waker2/")
    box.write("/etc/systemd/system/waker2.service", second, 0o644)
    for name in ("waker", "waker2"):
        port = settle(box, f"/etc/{name}")
        box.run(f"systemctl restart {name}")
        wait_for(partial(is_open, port))
    return box.installed()


def pids(box: Box) -> list[str]:
    return [box.path(f"/run/{name}.pid").read_text() for name in ("waker", "waker2")]


# ---- A new box -----------------------------------------------------------------------


@pytest.mark.quick
def test_a_new_box_gets_all_that_it_lacks_and_is_told_what_is_next(box: Box) -> None:
    """The key is shown nowhere: `waker prepare` sends it. Nothing is started yet."""
    box.run(f"rm {box.paramiko}")
    stub(box.stubs / "apt-get", box.apt_get)
    shown = box.run(f"umask 077; {PYTHON} waker install --yes")
    assert shown.endswith(PREPARE)
    files = box.installed()
    key, public = files.pop(KEY), files.pop(PUBLIC)
    assert files == new() | {SETTINGS: (0o600, EXAMPLE)}
    assert (key[0], public[0]) == (0o600, 0o600)
    assert public[1].decode() not in shown
    assert box.run("stat -c '%a %U' /etc/waker") == "700 root\n"
    assert box.run("stat -c %a /usr/local/lib/systemd") == "755\n"
    called = calls(box.stubs)
    repair, update, install = (c for c in called if c.startswith(("dpkg", "apt-get")))
    # dpkg must not ask about a file that somebody has changed.
    assert repair == "dpkg --force-confold --configure -a"
    assert update.endswith(" update")
    assert " DPkg::Options::=--force-confold install --no-install-recom" in install
    assert install.endswith(" python3-paramiko")
    assert called[-1] == "systemctl daemon-reload"
    assert not [call for call in called if re.search("enable waker|start", call)]


def test_a_second_run_leaves_settings_and_key_as_somebody_has_made_them(
    box: Box,
) -> None:
    box.install()
    first = box.installed()
    calls(box.stubs)
    box.install()
    assert box.installed() == first
    assert not [call for call in calls(box.stubs) if call.startswith("apt-get")]
    # Somebody is filling in the settings.
    box.write(SETTINGS, "WAKER_PIN=\nWAKER_HOMELAB_NAME=x\n")
    assert box.install().endswith(CHECK)
    box.run(f"chmod 710 /etc/waker; ln -sf ../unmounted {SETTINGS}; rm {KEY}")
    before = box.installed()
    box.install()
    assert box.installed() == before
    assert box.run("stat -c %a /etc/waker") == "710\n"


def test_openssh_and_dropbear_accept_the_new_key(box: Box, machine: Machine) -> None:
    box.install()
    settings = machine.ask().settings()
    authorized = machine.folder / "home/.ssh/authorized_keys"
    box.run(f"cp {KEY} {PUBLIC} {machine.folder}; cat {PUBLIC} >{authorized}")
    derived = subprocess.check_output([need("ssh-keygen"), "-yf", str(machine.ssh_key)])
    assert box.path(PUBLIC).read_bytes() == derived.strip() + b" waker\n"
    ssh = ssh_to(machine.folder, settings)
    unlocked = subprocess.run([*ssh, "cryptroot-unlock"], input=b"x", check=False)
    assert unlocked.returncode != 255  # which would be ssh's own
    assert machine.received() == [b"x"]


def test_nothing_is_done_without_an_answer(box: Box) -> None:
    silent = "nobody answered. Without a terminal, use --yes.\n"
    answers = {
        "": silent,
        "n\n": "you did not answer y.\n",
        "\n": "you did not answer y.\n",
    }
    for answer, reason in answers.items():
        status, shown = box.waker("install", answer)
        assert (status, box.installed()) == (1, {})
        for path in (PROGRAM, UNIT, SETTINGS, KEY):
            assert f"\n    write {path}" in shown
        assert f"Nothing was changed: {reason}" in shown
    assert box.waker("install", "y\n")[0] == 0
    assert PROGRAM in box.installed()


@pytest.mark.parametrize("lock", ["dpkg/lock-frontend", "apt/lists/lock"])
def test_apt_waits_for_a_lock(box: Box, lock: str) -> None:
    box.run(f"rm {box.paramiko}")
    stub(box.stubs / "apt-get", box.apt_get)
    box.write(f"/var/lib/{lock}", "")
    command = box.enter(PYTHON, str(box.program), "install", "--yes")
    with box.path(f"/var/lib/{lock}").open("ab") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        installing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert installing.stdout
        lines = iter(installing.stdout.readline, "")
        assert any("as soon as apt is free" in line for line in lines)
        waits = re.compile(rf"-> POSIX .*:{os.fstat(held.fileno()).st_ino} ")
        wait_for(lambda: waits.search(Path("/proc/locks").read_text()))
        for path in (SETTINGS, KEY, PUBLIC):  # meanwhile, somebody makes them
            box.write(path, "of the owner")
    with installing:
        assert installing.stdout.read().endswith(PREPARE)
    owners = (0o600, b"of the owner")
    assert box.installed() == new() | dict.fromkeys((SETTINGS, KEY, PUBLIC), owners)


def test_apt_tries_again_after_a_minute_with_new_lists(box: Box) -> None:
    box.run(f"rm {box.paramiko}; mkdir fails")
    stub(box.stubs / "sleep")
    fails_once = f"if rmdir {box.folder}/fails 2>/dev/null; then exit 100; fi\n"
    stub(box.stubs / "apt-get", f"{fails_once}{box.apt_get}")
    box.write("/var/lib/apt/lists/half", "")
    assert box.install().endswith(PREPARE)
    called = [call for call in calls(box.stubs) if "systemctl" not in call]
    packages = ["dpkg", "apt-get", "sleep", "dpkg", "apt-get", "apt-get"]
    assert [call.split()[0] for call in called] == packages
    # Without the internet, there are no others.
    assert box.path("/var/lib/apt/lists/half").exists()
    lists = [re.findall(r"Lists=(\S+)", call) for call in called if "apt-get" in call]
    assert lists[0] != lists[1] == lists[2]
    assert not box.path(lists[1][0]).exists()


# ---- Refusals ------------------------------------------------------------------------

REFUSALS = {
    "no init system": (
        "rm -f /usr/bin/systemctl {stubs}/systemctl",
        "needs systemd or",
    ),
    "read-only": (
        "mount -t tmpfs -o ro none /usr/local",
        f"{PROGRAM} cannot be written",
    ),
    "full disk": (
        "rm {paramiko}; mount -t tmpfs -o size=64k none /usr/local/bin",
        f"{PROGRAM} cannot be written: No space left on device",
    ),
    "file": ("touch /etc/waker", "/etc/waker is not a folder. Move it away."),
    "dangling link": ("ln -s /nowhere /etc/waker", "/etc/waker is not a folder."),
    "read-only, upgrade": (
        f"touch {PROGRAM}; mount -o remount,ro /usr/local",
        f"{PROGRAM} cannot be written: Read-only file system",
    ),
    "folder": (f"mkdir -p {UNIT}", f"{UNIT} is a folder. Move it away."),
    "masked": (
        "systemctl mask waker",
        "waker.service is masked. First run: sudo systemctl unmask waker",
    ),
    "masked until the next boot": (
        "systemctl mask --runtime waker",
        "waker.service is masked. First run: sudo systemctl unmask --runtime waker",
    ),
    "in memory": (
        "mkdir /etc/waker; mount -t tmpfs none /etc/waker",
        "/etc/waker is in memory, so the next reboot would lose it.",
    ),
    "group without a user": (
        "echo waker:x:4000: >>/etc/group",
        "there is a group waker, but no user waker.",
    ),
    "damaged": (
        "sed -i 's/<!DOCTYPE html>/<!DOCTYPE htmm>/' waker",
        "is damaged: Bad CRC",
    ),
    "no apt": (
        "rm -f {paramiko} /usr/bin/apt-get {stubs}/apt-get",
        "paramiko is missing",
    ),
    "apt fails": (
        "cd {stubs}; rm {paramiko}; ln -sf /bin/false apt-get; ln -s /bin/true sleep",
        "apt could not install paramiko. waker itself was not changed.",
    ),
}


@each("first reason", REFUSALS)
def test_a_refusal_names_its_reason_and_changes_nothing(
    first: str, reason: str, box: Box
) -> None:
    box.run(first.format(stubs=box.stubs, paramiko=box.paramiko))
    folders = "find /etc/waker /usr/local -type d 2>&1 || :"
    before, there = box.installed(), box.run(folders)
    status, shown = box.waker("install --yes")
    assert (status, box.installed()) == (1, before)
    assert reason in shown.splitlines()[-1]
    assert not [call for call in calls(box.stubs) if call.startswith("apt-get")]
    assert "Traceback" not in shown
    assert box.run(folders) == there


def test_only_root_installs_and_only_the_one_file_without_compiled_code(
    box: Box,
) -> None:
    other_user = need("unshare"), "--user", PYTHON
    status, shown = box.call(*other_user, "waker", "install", "--yes")
    assert status == 1
    assert shown.endswith(" root. Run: sudo python3 waker install --yes\n")
    command = "env", "-C", str(CHECKOUT), PYTHON, "-B", "-m", "box", "install"
    status, shown = box.call(*command)
    assert status == 1
    assert shown.endswith(": this is a checkout. Run: sudo make install\n")
    with zipfile.ZipFile(box.program, "a") as archive:
        archive.writestr("box/check.pyc", b"")
    assert "check.pyc would run in place of its source" in box.waker("install --yes")[1]
    assert box.installed() == {}


def test_what_a_refusal_advises_leads_on(box: Box) -> None:
    """As it is printed."""
    box.run("systemctl mask waker")
    for _ in range(2):
        _, shown = box.waker("install --yes")
        box.run(f'sudo() {{ "$@"; }}\n{shown.split("First run: ")[1]}')
        box.run("systemctl mask --runtime waker || :")
    box.run("systemctl unmask --runtime waker; echo waker:x:4000: >>/etc/group")
    _, shown = box.waker("install --yes")
    box.run(f'sudo() {{ "$@"; }}\n{shown.split("Run: ")[1]}')
    box.install()


@pytest.mark.quick
def test_a_system_whose_changes_are_in_memory_is_refused(box: Box) -> None:
    """As with the overlay file system of Raspberry Pi OS."""
    box.run(
        "cd /run; mkdir upper work root; layers=upperdir=/run/upper,workdir=/run/work\n"
        "mount -t overlay none root -o lowerdir=/,$layers\n"
        "for place in proc run tmp usr; do mount --rbind /$place root/$place; done"
    )
    command = "chroot", "/run/root", PYTHON, str(box.program), "install", "--yes"
    status, shown = box.call(*command)
    assert status == 1
    assert "/etc/waker is in memory" in shown
    assert "do_overlayfs 1" in shown


def test_a_usr_local_that_is_mounted_late_needs_a_unit_elsewhere(box: Box) -> None:
    box.write("/etc/fstab", "# x /usr/local\nUUID=1\t/usr/local ext4 defaults 0 2\n")
    shown = box.install()
    assert "systemd reads its units before /etc/fstab mounts /usr/local." in shown
    (command,) = re.findall("sudo (cp .*)", shown)
    box.run(command)
    assert "/etc/fstab" not in box.install()
    box.write("/etc/fstab", "# x /usr/local x\n/x /usr/local/lib x\n")
    box.run("rm /etc/systemd/system/waker.service")
    assert "/etc/fstab" not in box.install()


def test_another_python_is_not_used(box: Box) -> None:
    """Here, it is one that lacks what makes the key."""
    box.run(f"{PYTHON} -m venv --without-pip other")
    status, shown = box.call("other/bin/python", "waker", "install", "--yes")
    assert status == 0, shown
    assert new().items() <= box.installed().items()


def test_a_full_tmp_is_named(box: Box) -> None:
    box.run("mkdir /run/full; mount -t tmpfs -o size=64k none /run/full")
    full = "env", "TMPDIR=/run/full", PYTHON
    status, shown = box.call(*full, str(box.program), "install", "--yes")
    assert (status, box.installed()) == (1, {})
    assert re.search(r"/run/full/.*: No space left on device\.$", shown)


def test_the_installed_program_can_install_itself_again(box: Box) -> None:
    """Even if /usr/local is a link."""
    box.run("mkdir /run/local; mount --bind /usr/local /run/local; umount /usr/local")
    box.run("rm -r /usr/local; ln -s /run/local /usr")
    box.install()
    before = box.run(f"sha256sum {PROGRAM}")
    status, shown = box.call(PROGRAM, "install", "--yes")
    assert status == 0, shown
    assert box.run(f"sha256sum {PROGRAM}") == before


@pytest.mark.quick
def test_another_installation_must_have_ended(box: Box) -> None:
    """Or this one could replace a key that the other one has just made."""
    lock = "/run/waker-install.lock"
    box.write(lock, "")
    with box.path(lock).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, shown = box.waker("install --yes")
        assert (status, box.installed()) == (1, {})
        assert "another `waker install` or `uninstall` is running." in shown
    box.run(f"rm {lock}")
    box.install()
    # Nobody else can hold it.
    assert box.run(f"stat -c '%a %U' {lock}") == "600 root\n"


# ---- Upgrades ------------------------------------------------------------------------


def test_an_upgrade_keeps_settings_and_restarts_what_was_running(box: Box) -> None:
    old = run_old(box)
    before = pids(box)
    shown = box.install()
    for name in ("waker", "waker2"):
        assert f"\n    restart {name}\n" in shown
        assert re.search(rf"(?m)^{name} answers on port \d+\.$", shown)
    assert shown.endswith(CHECK)
    assert box.installed() == old | new()
    assert not {*before} & {*pids(box)}
    box.run("systemctl stop waker2; touch /run/waker2.crashed")  # it would restart soon
    assert "waker2 answers on port" in box.install()
    # A stopped service is not started, nor a disabled one enabled.
    box.run("systemctl stop waker2; systemctl stop waker; systemctl disable waker")
    stopped = pids(box)
    shown = box.install()
    for name in ("waker", "waker2"):
        is_named = (
            f"\nFound: {name}, which is stopped, so its settings are not checked\n"
        )
        assert is_named in shown
    assert shown.endswith(CHECK)
    assert pids(box) == stopped
    assert not [name for name in box.installed() if "wants" in name]


OWN_UNITS = "/etc/systemd/system"
DROP_IN = f"{OWN_UNITS}/waker.service.d/own.conf"
TEMPLATE = """\
ExecStart=/usr/local/bin/waker --env-file %d/x
LoadCredential=x:/etc/waker-%i/waker.env
"""
BY_PYTHON = """\
ExecStart=/usr/bin/python3 /usr/local//bin/waker --env-file=/etc/wk/waker.env
"""
# Where a service may have its settings: its name, its unit, and the place.
PLACES = {
    "its file": ("waker", "", "", SETTINGS),
    "a second service's file": ("waker2", "", "", "/etc/waker2/waker.env"),
    "a drop-in": ("waker", "", "", DROP_IN),
    "a file of variables": (
        *("waker", DROP_IN, "EnvironmentFile=-/etc/default/wak*\n"),
        "/etc/default/waker",
    ),
    "a template's instance": (
        *("waker@b", f"{OWN_UNITS}/waker@.service", TEMPLATE),
        "/etc/waker-b/waker.env",
    ),
    "a file named after Python": (
        *("wk", f"{OWN_UNITS}/wk.service", BY_PYTHON),
        "/etc/wk/waker.env",
    ),
}


@each("name unit text place", PLACES)
def test_a_mistake_in_the_settings_of_a_running_service_stops_an_upgrade(
    name: str, unit: str, text: str, place: str, box: Box
) -> None:
    """Wherever they are."""
    run_old(box)
    if unit:
        box.write(unit, f"[Service]\n{text}")
    is_whole = place.endswith("waker.env")
    port = settle(box, str(Path(place).parent) if is_whole else "/etc/waker")
    right = box.path(place).read_text() if is_whole else ""
    box.write(place, right)
    box.run(f"systemctl restart {name}")
    wait_for(partial(is_open, port))
    before = box.path(f"/run/{name}.pid").read_text()
    in_unit = '[Service]\nEnvironment="WAKER_SSH_USER=a b"\n'
    mistake = in_unit if place == DROP_IN else "WAKER_SSH_USER='a b'\n"
    box.write(place, right + mistake)
    old = box.installed()
    status, shown = box.waker("install --yes")
    assert (status, box.installed()) == (78, old)
    assert re.search(rf"Nothing was changed: {name}.*:\nWAKER_SSH_USER", shown)
    assert box.path(f"/run/{name}.pid").read_text() == before
    box.write(place, right)
    assert f"\n{name} answers on port {port}." in box.install()
    assert box.path(f"/run/{name}.pid").read_text() != before


REFUSED = {
    "a file that a unit needs is missing": (
        f"mkdir {OWN_UNITS}/waker.service.d; cp /run/needs.conf {DROP_IN}",
        "waker: /etc/gone is missing",
    ),
    "two have the same port": (
        "cp /etc/waker/waker.env /etc/waker2",
        "two of waker2, waker have the same WAKER_LISTEN.",
    ),
}


@pytest.mark.quick
@each("first reason", REFUSED)
def test_a_service_that_could_not_start_again_stops_an_upgrade(
    first: str, reason: str, box: Box
) -> None:
    run_old(box)
    before = pids(box)
    box.write("/run/needs.conf", "[Service]\nEnvironmentFile=/etc/gone\n")
    box.run(first)
    old = box.installed()
    status, shown = box.waker("install --yes")
    assert (status, box.installed(), pids(box)) == (78, old, before)
    assert shown.endswith(f"Nothing was changed: {reason}\n")


def test_a_service_that_does_not_answer_shows_its_log(box: Box) -> None:
    run_old(box)
    settle(box, WAKER_LISTEN=ELSEWHERE)
    status, shown = box.waker("install --yes")
    assert status == 1
    assert "waker does not answer. Its log ends with:" in shown
    assert "WAKER_LISTEN: " in shown
    assert "waker2 answers on" in shown


def test_another_program_on_the_port_is_not_taken_for_waker(box: Box) -> None:
    run_old(box)
    with says(b"HTTP/1.1 200 OK\r\n\r\nhello") as port:
        settle(box, WAKER_LISTEN=f"127.0.0.1:{port}")
        status, shown = box.waker("install --yes")
    assert status == 1
    assert "waker does not answer." in shown


def test_an_answer_that_comes_slowly_ends_in_time() -> None:
    """Between two bytes as well: a negative timeout, which is rare, is an error."""

    def send_bytes(tcp: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other end has gone
            while True:
                tcp.sendall(b"x")

    with homelab.tcp_server(send_bytes) as port:
        for _ in range(20):
            assert not system.read_page(("127.0.0.1", port), 0.02).strip(b"x")


# What systemd 252 and 257 print, shortened.
SHOWN = r"""
ExecStart={ path=/usr/local/bin/waker ; argv[]=/usr/local/bin/waker --env-file \
/run/credentials/waker.service/waker.env ; ignore_errors=no ; status=0/0 }
Environment=MALLOC_ARENA_MAX=2
Id=waker.service
ActiveState=active

ExecStart={ path=/usr/local/bin/waker ; argv[]=/usr/local/bin/waker --env-file \
/run/credentials/waker@b.service/waker.env ; ignore_errors=no ; status=0/0 }
Environment=MALLOC_ARENA_MAX=2 WAKER_HOMELAB_NAME=unit
Id=waker@b.service
ActiveState=activating

ExecStart={ path=/usr/bin/python3 ; argv[]=/usr/bin/python3 -B /usr/local//bin/waker ; }
Environment="WAKER_PIN=a b\$c\`d\"e'f\\g  12345" WAKER_HOMELAB_NAME=Küche A=1 \
WAKER_HOMELAB_MAC=52:54:00:12:34:57 WAKER_LISTEN=127.0.0.1:8083
EnvironmentFiles=/etc/wk3-*.env (ignore_errors=no)
EnvironmentFiles=/etc/missing (ignore_errors=yes)
Id=wk3.service
ActiveState=inactive

ExecStart={ path=/bin/sh ; argv[]=/bin/sh -c exec /usr/local/bin/waker ; }
Id=wk4.service
ActiveState=failed

ExecStart={ path=waker ; argv[]=waker ; }
Environment=WAKER_PIN=12345678
EnvironmentFiles=/etc/waker/waker.env (ignore_errors=no)
Id=wk8.service
ActiveState=active
WorkingDirectory=!/etc/waker-b

ExecStart={ path=/usr/local/bin/waker ; argv[]=/usr/local/bin/waker state ; }
Id=wk9.service
Type=oneshot
ActiveState=activating

ExecStart={ path=/usr/local/bin/waker ; argv[]=/usr/local/bin/waker --env-file \
/run/credentials/wk5.service/waker.env ; ignore_errors=no ; status=0/0 }
Id=wk5.service
ActiveState=reloading

ExecStart={ path=/usr/local/bin/waker-notify ; argv[]=/usr/local/bin/waker-notify x }
Id=waker-notify.service
ActiveState=active

ExecStart={ path=/usr/bin/logger ; argv[]=/usr/bin/logger -t waker ; }
Id=wk6.service
ActiveState=active

Id=wk7.service
ActiveState=inactive
"""
CAT = """\
[Service]
LoadCredential=waker.env:/etc/waker/waker.env
#LoadCredential=waker.env:/etc/comment
 LoadCredential = waker.env: /etc/waker-%i/own.env
LoadCredential=ssh_key:/etc/shared_key
"""
SYSTEMCTL = """
case "$*" in
show*) cat {0}/shown ;;
"cat waker.service") cat {1}/waker.service ;;
"cat waker@b.service") cat {0}/template ;;
esac
"""
FIND = """
from box import system
from waker import ConfigError
for service in system.find_services(system.SYSTEMD):
    try:
        config = system.read_service_settings(service)
        has_pin = config.pin.matches("a b$c`d\\"e'f\\\\g  12345")
        found = config.name, config.listen[1], str(config.key), has_pin
    except ConfigError as error:
        found = str(error).splitlines()[0]
    print(service.name, service.is_running, found)
"""


@pytest.mark.quick
def test_services_are_what_systemd_says(box: Box) -> None:
    stub(box.stubs / "systemctl", SYSTEMCTL.format(box.folder, CHECKOUT))
    box.folder.joinpath("shown").write_text(SHOWN.replace("\\\n", ""))
    box.folder.joinpath("template").write_text(CAT)
    for port, name in enumerate(("waker", "waker-b"), 1):
        own = {"WAKER_HOMELAB_NAME": name, "WAKER_LISTEN": f"[::]:{port}"}
        settle(box, f"/etc/{name}", **own)
    box.run("mv /etc/waker-b/waker.env /etc/waker-b/own.env")
    box.write("/etc/wk3-a.env", "WAKER_HOMELAB_HOST=192.0.2.1\nWAKER_HOMELAB_NAME=x\n")
    box.write("/etc/wk3-b.env", "\n")
    _, shown = box.call("env", "-C", str(CHECKOUT), PYTHON, "-B", "-c", FIND)
    assert shown.splitlines() == [
        "waker True ('waker', 1, '/etc/waker/ssh_key', False)",
        "waker@b True ('unit', 2, '/etc/shared_key', False)",
        "wk3 False ('x', 8083, '/ssh_key', True)",
        "wk4 False ('waker', 1, '/etc/waker/ssh_key', False)",
        "wk8 True ('waker', 1, '/etc/waker-b/ssh_key', False)",
        "wk9 False ('waker', 1, '/etc/waker/ssh_key', False)",
        "wk5 True first stop wk5: only systemd can read its settings",
    ]


# ---- A power cut ---------------------------------------------------------------------

# Kill the process when it waits for the disk, or renames a file, for the n-th time.
CUT = """
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
__attribute__((constructor)) static void begin(void) {
    unsetenv("LD_PRELOAD"); // what it starts is not counted
}
static void count(void) {
    static int n;
    if (++n == atoi(getenv("CUT_AT"))) raise(SIGKILL);
}
int fsync(int fd) { count(); return syscall(SYS_fsync, fd); }
int rename(const char *a, const char *b) { count(); return syscall(SYS_rename, a, b); }
void sync(void) { count(); syscall(SYS_sync); }
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpose(tmp_path_factory.mktemp("library"), CUT)


def cut_power(box: Box, library: str, moment: int) -> None:
    """Install, and cut the power at that moment.

    Check that the program and its unit are whole: the old ones or the new ones.
    """
    before = box.installed()
    command = f"LD_PRELOAD={library} CUT_AT={moment} {PYTHON} waker install --yes"
    status, shown = box.call("sh", "-c", f"{command}; exit $?")
    assert status == 128 + signal.SIGKILL, shown
    after = box.installed()
    for name, file in new().items():
        assert after.get(name) in (before.get(name), file)


@pytest.mark.parametrize("moment", [8, 11])
def test_a_power_cut_leaves_nothing_half_done_on_a_new_box(
    box: Box, library: str, moment: int
) -> None:
    """It gets five files: they are synced, then renamed, and then all is synced."""
    cut_power(box, library, moment)
    assert box.install().endswith((PREPARE, CHECK))
    files = box.installed()
    assert {*files} == {PROGRAM, UNIT, SETTINGS, KEY, PUBLIC}
    derived = box.run(f"ssh-keygen -yf {KEY}").strip()
    assert files[PUBLIC][1].decode() == f"{derived} waker\n"


@pytest.mark.parametrize("moment", [4, 5])
def test_a_power_cut_leaves_the_old_waker_or_the_new_one(
    box: Box, library: str, moment: int
) -> None:
    """Even if one of two files was replaced. The last moment is before the sync."""
    old = put_old(box)
    cut_power(box, library, moment)
    box.install()
    assert box.installed() == old | new()


# ---- OpenWrt -------------------------------------------------------------------------


def test_openwrt_gets_its_init_script_and_keeps_waker_when_upgraded(
    router: Box,
) -> None:
    shown = router.install()
    assert shown.endswith(PREPARE.replace(", without sudo", ""))
    files = router.installed()
    compiled = new()[PROGRAM]
    assert files["/usr/bin/waker"] == compiled
    script = (0o755, CHECKOUT.joinpath("waker.init").read_bytes())
    assert files["/etc/init.d/waker"] == script
    settle(router)
    router.run("/etc/init.d/waker enable; /etc/init.d/waker restart")
    kept = router.run(f"find $(cat {KEPT}) '(' -type f -o -type l ')' | sort").split()
    assert kept == sorted(router.installed())
    assert "waker answers on port" in router.install()

    # Without OpenSSH's client, somebody has to paste the key.
    stub(router.stubs / "ssh", "echo Dropbear v2022.83 >&2\n")
    router.run(f"/etc/init.d/waker stop; rm {KEY} {PUBLIC}")
    shown = router.install()
    assert shown.endswith(f"public key:\n\n    {router.path(PUBLIC).read_text()}")

    status, shown = router.waker("uninstall --yes")
    assert status == 0, shown
    assert {*router.installed()} == {SETTINGS, KEY, PUBLIC}


def test_openwrts_packages_come_first(router: Box) -> None:
    router.run(f"rm {router.paramiko}")
    for tool, command in (
        ("apk", "apk update && apk add python3-paramiko python3-six"),
        ("opkg", "opkg update && opkg install python3-paramiko"),
    ):
        stub(router.stubs / tool)
        status, shown = router.waker("install --yes")
        assert status == 1
        assert command in shown
        assert "30 MB" in shown
        assert router.installed() == {}


# ---- Uninstall -----------------------------------------------------------------------


def test_uninstall_leaves_settings_keys_and_nothing_else(box: Box) -> None:
    run_old(box)
    status, shown = box.waker("uninstall --yes")
    assert status == 1
    assert "first stop what runs waker: waker2\n" in shown
    assert box.run("systemctl is-active waker") == "active\n"
    box.run("systemctl stop waker2")
    before = box.installed()
    status, shown = box.waker("uninstall", "n\n")
    assert (status, box.installed()) == (1, before)
    assert f"{SETTINGS} and waker's key stay, and so do installed packages.\n" in shown
    for path in (UNIT, PROGRAM):
        assert f"\n    delete {path}\n" in shown
    assert "\n    leave waker2 without a program\n" in shown
    box.write("/etc/waker/.waker.env.new", "of a run that was killed")
    calls(box.stubs)
    assert box.waker("uninstall", "y\n")[0] == 0
    kept = {
        n: f
        for n, f in before.items()
        if n.startswith(("/etc/waker", "/etc/systemd/system/waker2"))
    }
    assert box.installed() == kept
    assert box.run("systemctl is-active waker || :") == ""
    assert "systemctl daemon-reload" in calls(box.stubs)
    assert box.waker("uninstall --yes")[1].endswith("waker is not installed here.\n")


def test_uninstall_refuses_while_somebody_runs_waker_by_hand(box: Box) -> None:
    """But not because of the process of its own service."""
    run_old(box)
    box.run("systemctl stop waker2")
    port = settle(box, "/run/by_hand")
    command = box.enter(PROGRAM, "--env-file", "/run/by_hand/waker.env")
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as by_hand:
        wait_for(partial(is_open, port))
        before = box.installed()
        status, shown = box.waker("uninstall --yes")
        assert (status, box.installed()) == (1, before)
        (number,) = re.findall("first stop what runs waker: process ([0-9]+)\n", shown)
        box.run(f"kill {number}")
        by_hand.wait(60)
    assert box.waker("uninstall --yes")[0] == 0


UNREMOVABLE = {
    "read-only": ("mount -o remount,ro /usr/local", "is in a read-only folder."),
    "masked": ("systemctl mask waker", "systemctl unmask waker"),
}


@each("first reason", UNREMOVABLE)
def test_uninstall_removes_nothing_if_it_cannot_remove_all(
    first: str, reason: str, box: Box
) -> None:
    put_old(box)
    box.write("/etc/waker/notify_url", "of messages")
    box.run(first)
    before = box.installed()
    status, shown = box.waker("uninstall --yes")
    assert (status, box.installed()) == (1, before)
    assert reason in shown


def test_uninstall_stops_waker_even_if_its_unit_was_moved(box: Box) -> None:
    run_old(box)
    box.run(f"systemctl stop waker2; mv {UNIT} /etc/systemd/system")
    status, shown = box.waker("uninstall --yes")
    assert status == 0, shown
    assert box.run("systemctl is-active waker || :") == ""
    assert not [name for name in box.installed() if "wants" in name]


# ---- For packagers -------------------------------------------------------------------


def test_a_packager_gets_program_and_unit_but_no_key_and_settings(
    tmp_path: Path,
) -> None:
    make(tmp_path, "install", "PREFIX=/usr", "DESTDIR=root")
    root = tmp_path / "root"
    program, unit = (
        root / "usr/bin/waker",
        root / "usr/lib/systemd/system/waker.service",
    )
    found = {p: p.stat().st_mode & 0o777 for p in root.rglob("*") if p.is_file()}
    assert found == {program: 0o755, unit: 0o644}
    assert "\nExecStart=/usr/bin/waker --env-file " in unit.read_text()
    # Another computer's Python may differ.
    assert program.read_bytes() == tmp_path.joinpath("dist/waker").read_bytes()


# ---- systemd and procd ---------------------------------------------------------------


def test_systemd_understands_every_line_of_the_units(tmp_path: Path) -> None:
    """And rates the exposure of what sends messages at most 1.2, on a scale to 10."""
    analyze = need("systemd-analyze")
    make(tmp_path, "install", "PREFIX=/usr", "DESTDIR=root")
    units = tmp_path / "root" / UNITS
    shutil.copytree(CHECKOUT / "box/notify", units, dirs_exist_ok=True)
    program = tmp_path / "root/usr/local/bin/waker-notify"
    program.parent.mkdir(parents=True)
    units.joinpath("notify").rename(program)
    names = "waker.service", "waker-notify.service", "waker-notify.timer"
    verify = [analyze, "verify", "--man=no", "--recursive-errors=no"]
    verify += [
        f"--root={tmp_path}/root",
        *(f"/usr/lib/systemd/system/{name}" for name in names),
    ]
    assert subprocess.check_output(verify, stderr=subprocess.STDOUT) == b""
    rate = [analyze, "security", "--offline=true", "--threshold=12"]
    subprocess.run([*rate, str(units / "waker-notify.service")], check=True)


# Instead of /etc/rc.common: print what the script asks the system to do.
RECORDS = f"""\
for name in user_exists group_add_next user_add id chown chmod find logger \
    procd_open_instance procd_set_param procd_close_instance
do
    eval "$name() {{ echo $name \\"\\$@\\"; }}"
done
. {CHECKOUT}/waker.init
echo "$USE_PROCD $START $env_file"
env_file=./waker.env
"""
INSTANCE = """\
user_add waker  group_add_next waker
chown root:waker /etc/waker
chmod 0750 /etc/waker
find /etc/waker -type f -exec chown waker:waker {} ; -exec chmod 0600 {} ;
chown root:waker ./waker.env
chmod 0640 ./waker.env
procd_set_param command /usr/bin/waker --env-file ./waker.env
procd_set_param user waker
procd_set_param file ./waker.env
procd_set_param respawn 3600 5 0
procd_set_param term_timeout 100
procd_set_param stdout 1
procd_set_param stderr 1
procd_close_instance
"""
REFUSAL = "so waker is not started"
ROUTERS = {
    "new user": ("user_exists() { false; }", INSTANCE),
    "no user": ("id() { false; }", f"there is no user waker, {REFUSAL}"),
    "no settings": ("rm waker.env", f"./waker.env is missing, {REFUSAL}"),
}


@each("system asked", ROUTERS)
def test_procd_runs_waker_as_its_own_user_or_not_at_all(
    system: str, asked: str, tmp_path: Path
) -> None:
    tmp_path.joinpath("waker.env").touch()
    script = f"{RECORDS}{system}\nstart_service"
    command = [need("busybox"), "sh", "-c", script]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    printed = ended.stdout.decode()
    assert printed.startswith("1 95 /etc/waker/waker.env\n")
    # In this order: whoever gets the settings last can change them.
    places = [printed.find(line) for line in asked.splitlines()]
    assert min(places) >= 0
    assert places == sorted(places)
    assert ended.returncode == (REFUSAL in asked)
    assert ("procd_open_instance" in printed) == (asked == INSTANCE)


# ---- make demo -----------------------------------------------------------------------


def test_the_demo_shows_its_secrets_and_enter_switches_its_server_off() -> None:
    where = f"0.0.0.0:{free_port()}"  # nobody else takes it before the demo does
    folder = CHECKOUT / "tests/support"
    quickly = f"import homelab; print(homelab.main('{where}', pace=0.1))"
    demo = Terminal(["env", "-C", str(folder), sys.executable, "-c", quickly])
    assert demo.asks("listens on")
    place = r"http://(.*):(\d+)/\nPIN +(.*)\npassphrase +(.*)\n"
    ((host, port, pin, passphrase),) = re.findall(place, demo.printed)
    client = Client(int(port), host=host).log_in(pin)
    assert client.start(passphrase).status == 200
    demo.answer("\nstart: booting: Unlocked: cryptroot.\n", "")
    wait_for(lambda: client.status()["state"] == "off")
    demo.answer("", "\3")  # Ctrl-C interrupts its shell as well
    demo.end()
    assert "\n0\n" in demo.printed  # its threads may still say something


def test_a_demo_that_cannot_listen_says_so() -> None:
    with pytest.raises(SystemExit, match=r"Cannot assign.*make demo LISTEN=127"):
        homelab.main("203.0.113.9:80")
