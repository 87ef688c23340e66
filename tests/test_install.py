"""`waker install` on simulated boxes, what packagers get, and the demo."""

import fcntl
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
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
from ssh_servers import free_port, ssh_to
from stand_ins import calls, stub
from test_notify import Receiver
from test_openwrt import BLOCKED
from test_pack import COMPILE, pack, unpack
from test_prepare import Terminal

QUIET = ["systemctl is-active waker", "systemctl daemon-reload"]
PROGRAM = "/usr/local/bin/waker"
UNIT = "/usr/local/lib/systemd/system/waker.service"
SETTINGS = "/etc/waker/waker.env"
KEY, PUBLIC = "/etc/waker/ssh_key", "/etc/waker/ssh_key.pub"
EXAMPLE = CHECKOUT.joinpath("waker.env.example").read_bytes()
UNITS = "usr/lib/systemd/system"  # of a package
PREPARE = "    waker prepare me@192.168.1.20\n"
KEPT = "/lib/upgrade/keep.d/waker"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one file, as people copy it."""
    return pack(CHECKOUT, tmp_path_factory.mktemp("release") / "waker")


@pytest.fixture
def box(program: Path, tmp_path: Path) -> Iterator[Box]:
    with new_box(tmp_path / "box", program) as box:
        yield box


@pytest.fixture
def router(box: Box) -> Box:
    """An OpenWrt box, with only the Python modules that OpenWrt packages."""
    names = "apt apt-get dpkg systemctl journalctl"
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


def test_a_new_box_gets_all_that_it_lacks_and_is_told_what_is_next(box: Box) -> None:
    """The key is shown nowhere: `waker prepare` sends it. Nothing is started yet."""
    box.run(f"rm {box.paramiko}")
    stub(box.stubs / "apt-get", box.apt_get)
    shown = box.run(f"umask 077; {PYTHON} waker install --yes")
    assert shown.endswith(f"without sudo:\n\n{PREPARE}")
    files = box.installed()
    key, public = files.pop(KEY), files.pop(PUBLIC)
    assert files == new() | {SETTINGS: (0o600, EXAMPLE)}
    assert (key[0], public[0]) == (0o600, 0o600)
    assert public[1].decode() not in shown
    assert box.run("stat -c '%a %U' /etc/waker") == "700 root\n"
    assert box.run("stat -c %a /usr/local/lib/systemd") == "755\n"
    called = calls(box.stubs)
    looked, repair, update, install, _ = (c for c in called if "dpkg-query" not in c)
    # dpkg must not ask about a file that somebody has changed.
    assert repair == "dpkg --force-confold --configure -a"
    assert update.endswith(" update")
    assert " DPkg::Options::=--force-confold install --no-install-recom" in install
    assert install.endswith(" python3-paramiko")
    assert [call for call in called if "systemctl" in call] == QUIET
    assert looked == QUIET[0]


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
    assert box.install().endswith(PREPARE)
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
        assert any("Waiting until another program" in line for line in lines)
        waits = re.compile(rf"-> POSIX .*:{os.fstat(held.fileno()).st_ino} ")
        wait_for(lambda: waits.search(Path("/proc/locks").read_text()))
        for path in (SETTINGS, KEY, PUBLIC):  # meanwhile, somebody makes them
            box.write(path, "of the owner")
    with installing:
        assert installing.stdout.read().endswith(PREPARE)
    owners = (0o600, b"of the owner")
    assert box.installed() == new() | dict.fromkeys((SETTINGS, KEY, PUBLIC), owners)


def test_packages_that_dpkg_has_not_configured_are_repaired(box: Box) -> None:
    """Although they seem to work."""
    stub(
        box.stubs / "dpkg-query", "case $* in *openssh-client) echo unpacked ;; esac\n"
    )
    assert "\n    install openssh-client with apt\n" in box.install()
    assert "dpkg --force-confold --configure -a" in calls(box.stubs)


def test_apt_tries_again_after_a_minute_with_new_lists(box: Box) -> None:
    box.run(f"rm {box.paramiko}; mkdir fails")
    stub(box.stubs / "sleep")
    fails_once = f"if rmdir {box.folder}/fails 2>/dev/null; then exit 100; fi\n"
    stub(box.stubs / "apt-get", f"{fails_once}{box.apt_get}")
    box.write("/var/lib/apt/lists/half", "")
    assert box.install().endswith(PREPARE)
    called = [c for c in calls(box.stubs) if not c.startswith(("system", "dpkg-q"))]
    packages = ["dpkg", "apt-get", "sleep", "dpkg", "apt-get", "apt-get"]
    assert [call.split()[0] for call in called] == packages
    # Without the internet, there are no others.
    assert box.path("/var/lib/apt/lists/half").exists()
    lists = [re.findall(r"Lists=(\S+)", call) for call in called if "apt-get" in call]
    assert lists[0] != lists[1] == lists[2]
    assert not box.path(lists[1][0]).exists()


# ---- Refusals ------------------------------------------------------------------------

HIDDEN = "/etc/systemd/system/waker.service would hide the unit"
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
    "own unit": ("touch /etc/systemd/system/waker.service", HIDDEN),
    "masked": ("ln -s /dev/null /etc/systemd/system/waker.service", HIDDEN),
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
        "apt could not install paramiko. waker is as it was before.",
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


def test_drop_ins_are_welcome_and_another_python_is_not_used(box: Box) -> None:
    """Here, it is one that lacks what makes the key."""
    box.write("/etc/systemd/system/waker.service.d/own.conf", "[Service]\n")
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


def test_another_installation_must_have_ended(box: Box) -> None:
    """Or this one could replace a key that the other one has just made."""
    folder = os.open(box.path("/etc"), os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    status, shown = box.waker("install --yes")
    assert (status, box.installed()) == (1, {})
    assert "another installation of waker is running" in shown
    os.close(folder)
    box.install()


# ---- Upgrades ------------------------------------------------------------------------


def test_an_upgrade_keeps_settings_and_restarts_what_was_running(box: Box) -> None:
    old = run_old(box)
    before = pids(box)
    shown = box.install()
    for name in ("waker", "waker2"):
        assert f"\n    restart {name}\n" in shown
        assert re.search(rf"(?m)^{name} answers on port \d+\.$", shown)
    assert shown.endswith("Next, see whether all is right:\n\n    sudo waker check\n")
    assert box.installed() == old | new()
    assert not {*before} & {*pids(box)}
    box.run("systemctl stop waker2; touch /run/waker2.crashed")  # it would restart soon
    assert "waker2 answers on port" in box.install()
    # A stopped service is not started, nor a disabled one enabled.
    box.run("systemctl stop waker2; systemctl stop waker; systemctl disable waker")
    stopped = pids(box)
    by_hand = "    sudo systemctl enable waker\n    sudo systemctl restart waker\n"
    assert box.install().endswith(f"    sudo waker check\n{by_hand}")
    assert pids(box) == stopped
    assert not [name for name in box.installed() if "wants" in name]


@pytest.mark.parametrize("name", ["waker", "waker2"])
def test_a_mistake_in_the_settings_of_a_service_stops_an_upgrade(
    box: Box, name: str
) -> None:
    """Even if it is not running now."""
    run_old(box)
    before = pids(box)
    settle(box, f"/etc/{name}", WAKER_SSH_USER="a b")
    files = box.installed()
    for _ in range(2):
        status, shown = box.waker("install --yes")
        assert status == 78
        assert f"Nothing was changed: /etc/{name}/waker.env:\nWAKER_SSH_USER" in shown
        assert box.installed() == files
        assert pids(box) == before
        box.run(f"systemctl stop {name}")


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
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as other:
        threading.Thread(target=other.serve_forever, args=(0.05,)).start()
        settle(box, WAKER_LISTEN=f"127.0.0.1:{other.server_port}")
        status, shown = box.waker("install --yes")
        other.shutdown()
    assert status == 1
    assert "waker does not answer." in shown


SERVICES = {
    "/usr/lib/systemd/system/waker.service": "ExecStart=/usr/bin/waker",
    "/etc/systemd/system/wk2.service": "ExecStart=/usr/local/bin/waker --env-file=/a",
    "/usr/lib/systemd/system/wk3.service": "ExecStart=/bin/true",
    "/etc/systemd/system/wk3.service.d/own.conf": (
        "ExecStart=\nExecStart=-/usr/local/bin/waker --env-file %d/x\n"
        "LoadCredential=x:/b"
    ),
    "/etc/systemd/system/wk4.service": (
        'ExecStart = "/usr/local/bin/waker" \\\n  --env-file "%d/y"\n'
        "LoadCredential=y:/a\nLoadCredential=x:/b\nLoadCredential=y: /c"
    ),
    "/etc/systemd/system/wk5.service": (
        "ExecStart=/usr/local/bin/waker --env-file %d/x\nLoadCredentialEncrypted=x:/d"
    ),
    "/etc/systemd/system/wk6.service": "ExecStart=/usr/local/bin/waker\nExecStart=",
    "/etc/systemd/system/wk8.service": (
        "ExecStart=/usr/local/bin/waker\nEnvironment=A=1 WAKER_LISTEN=:1"
    ),
    "/etc/systemd/system/wk7.service": "ExecStart=/usr/local/bin/waker-notify",
}
FIND = """
from box import system
for service in sorted(system.find_services(system.SYSTEMD)):
    print(*service)
"""


def test_the_services_that_run_waker_are_found(box: Box) -> None:
    for name, text in SERVICES.items():
        box.write(name, f"[Service]\n{text}\n")
    units = "/etc/systemd/system"
    box.run(f"cd {units}; ln -s wk2.service alias.service; ln -s /dev/null no.service")
    box.run(f"mkdir {units}/ssh.service.d; ln -s /gone {units}/ssh.service.d/x.conf")
    _, shown = box.call("env", "-C", str(CHECKOUT), PYTHON, "-B", "-c", FIND)
    assert shown.splitlines() == [
        "waker /etc/waker/waker.env",
        "wk2 /a",
        "wk3 /b",
        "wk4 /c",
        "wk5 /nonexistent",
        "wk8 /nonexistent",
    ]


def test_what_waker_3_has_put_into_usr_is_taken_over(box: Box) -> None:
    """And the commands that remove it leave waker enabled and working."""
    unit = CHECKOUT.joinpath("waker.service").read_text()
    box.write("/usr/bin/waker", "#!/bin/sh\nexec sleep 1000\n", 0o755)
    old = unit.replace("/usr/local/bin", "/usr/bin")
    box.write("/usr/lib/systemd/system/waker.service", old, 0o644)
    settle(box)
    box.run("systemctl enable waker; systemctl restart waker")
    shown = box.install()
    assert "waker answers on port" in shown
    commands = shown.split("remove it:\n\n")[1].split("\n\n")[0]
    box.run(f'sudo() {{ "$@"; }}\n{commands}')
    links = [data for name, (_, data) in box.installed().items() if "wants" in name]
    assert links == [UNIT.encode()]
    assert "An older waker" not in box.install()
    timer = "/usr/lib/systemd/system/waker-notify.timer"
    box.write(timer, "")
    lines = box.install().split("remove it:\n\n")[1].splitlines()
    assert lines[1] == "    sudo waker install notify"
    assert lines[3] == f"    sudo rm {timer}"


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


def cut_power(box: Box, library: str, moment: int) -> bool:
    """Install, and cut the power at that moment; returns whether it came to that.

    Check that the program and its unit are whole: the old ones or the new ones.
    """
    before = box.installed()
    command = f"LD_PRELOAD={library} CUT_AT={moment} {PYTHON} waker install --yes"
    status, shown = box.call("sh", "-c", f"{command}; exit $?")
    assert status in (0, 128 + signal.SIGKILL), shown
    after = box.installed()
    for name, file in new().items():
        assert after.get(name) in (before.get(name), file)
    return bool(status)


@pytest.mark.parametrize("moment", [1, 2, 5, 8, 11, 12])
def test_a_power_cut_leaves_nothing_half_done_on_a_new_box(
    box: Box, library: str, moment: int
) -> None:
    """It has five files, each of which is synced and renamed, and one sync of all."""
    is_cut = cut_power(box, library, moment)
    assert is_cut == (moment <= 11)
    if is_cut:
        assert box.install().endswith(PREPARE)
    files = box.installed()
    assert {*files} == {PROGRAM, UNIT, SETTINGS, KEY, PUBLIC}
    derived = box.run(f"ssh-keygen -yf {KEY}").strip()
    assert files[PUBLIC][1].decode() == f"{derived} waker\n"


@pytest.mark.parametrize("moment", [1, 2, 3, 4, 5, 6])
def test_a_power_cut_leaves_the_old_waker_or_the_new_one(
    box: Box, library: str, moment: int
) -> None:
    old = put_old(box)
    is_cut = cut_power(box, library, moment)
    assert is_cut == (moment <= 5)  # two files, and one sync of all
    if is_cut:
        box.install()
    assert box.installed() == old | new()


# ---- OpenWrt -------------------------------------------------------------------------


def test_openwrt_gets_its_init_script_and_keeps_waker_when_upgraded(
    router: Box,
) -> None:
    shown = router.install()
    assert shown.endswith(
        "Next, prepare the server:\n\n    waker prepare me@192.168.1.20\n"
    )
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
    assert "waker2 still needs waker. First run: sudo systemctl disable" in shown
    assert box.run("systemctl is-active waker") == "active\n"
    box.run("systemctl stop waker2")
    before = box.installed()
    status, shown = box.waker("uninstall", "n\n")
    assert (status, box.installed()) == (1, before)
    assert f"{SETTINGS} and waker's key stay, and so do installed packages.\n" in shown
    for path in (UNIT, PROGRAM):
        assert f"\n    delete {path}\n" in shown
    box.write("/etc/waker/.waker.env.new", "of a run that was killed")
    assert box.waker("uninstall", "y\n")[0] == 0
    kept = {
        n: f
        for n, f in before.items()
        if n.startswith(("/etc/waker", "/etc/systemd/system/waker2"))
    }
    assert box.installed() == kept
    assert box.run("systemctl is-active waker || :") == ""
    assert box.waker("uninstall --yes")[1].endswith("waker is not installed here.\n")


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
