"""A box with Debian 13 for arm64, from a bare system to an unlocked server.

Only `make test-arm64` runs this, since emulating a processor takes minutes. The router
plays the server, with this computer's dropbear as its initrd. Only the clients are
emulated, so their ratio for an unlock is larger than in bench.py.
"""

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import EMPTY_SERVER, Figures, compare, figure, show_head, show_row
from booted import INSTALL, LISTENS, Box
from computer import Owner, computer_of
from conftest import PASSPHRASE, PIN, PROGRAM, Client, make, need, need_root
from guests import ADDRESS, ARCHIVE, LAN, MAC, ROUTER, run, set_up
from homelab import ANOTHER_MAC
from machine import Machine
from namespaces import ip

pytestmark = pytest.mark.timeout(2 * 3600)
# Apart from `.vm`, which guests.py removes as a whole.
BUILD = Path(PROGRAM).with_name(".vm-arm64")
ROOT_KEY = BUILD / "root_key"  # with which the test controls the box; not waker's
PUBLIC_KEY = ROOT_KEY.with_suffix(".pub")
DISK = BUILD / "disk"
KERNEL = BUILD / "vmlinuz"
NEEDED = (
    "arch-test",  # by mmdebstrap
    "mke2fs",
    "mmdebstrap",
    "qemu-aarch64-static",  # by the kernel, to run the guest's programs here
    "qemu-system-aarch64",
    "update-binfmts",
)
SYSTEM = "iproute2,kmod,openssh-server,python3,systemd,systemd-sysv,udev"
KERNEL_PACKAGE = "linux-image-cloud-arm64"
IN_TREE = 'chroot "$1" apt-get install -y --no-install-recommends'
# Leaves what `waker install` needs as downloaded packages, in a repository in the tree.
MAKE_TREE = (
    *("env", f"ARCHIVE={ARCHIVE}"),
    *("unshare", "--mount", "mmdebstrap", "--arch=arm64", "--variant=minbase"),
    *(f"--dpkgopt=path-exclude=/usr/share/{n}/*" for n in ("doc", "locale", "man")),
    *("--dpkgopt=force-unsafe-io", f"--include={SYSTEM}"),
    f"--customize-hook=INITRD=No {IN_TREE} {KERNEL_PACKAGE}",
    '--customize-hook=chroot "$1" apt-get clean',
    f"--customize-hook={IN_TREE} --download-only python3-paramiko",
    '--customize-hook=chroot "$1" sh -ec "$ARCHIVE"',
    "trixie",
)
# The processor of a Raspberry Pi 4.
VIRT = (
    *("qemu-system-aarch64", "-accel", "tcg"),
    *("-cpu", "cortex-a72", "-machine", "virt"),
)
# The kernel's driver for NVMe is built in, so there is no initrd.
HARDWARE = (
    *("-kernel", str(KERNEL)),
    *("-append", "console=ttyAMA0 root=/dev/nvme0n1 rw panic=1"),
    *("-drive", f"if=none,id=disk,format=raw,snapshot=on,file={DISK}"),
    *("-device", "nvme,drive=disk,serial=1"),
    *("-device", f"virtio-net-pci,netdev=lan,mac={MAC},romfile="),
)
# Wakes the server.
PACKET = b"\xff" * 6 + bytes.fromhex(ANOTHER_MAC.replace(":", "")) * 16
ROUNDS = 5
# Starts a server; prints the ms to its first page, and its resident set in MB.
FIRST_PAGE = """
import re, subprocess, sys, time, urllib.request

began = time.perf_counter()
server = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE, text=True)
port = server.stderr.readline().split()[-1]
urllib.request.urlopen(f"http://127.0.0.1:{port}/").read()
print((time.perf_counter() - began) * 1000)
status = open(f"/proc/{server.pid}/status").read()
print(int(re.search("VmRSS:(.*) kB", status)[1]) * 1024 / 1e6)
server.terminate()
"""
EMPTY = "python3", "-c", EMPTY_SERVER
WAKER = (
    *("env", "WAKER_LISTEN=127.0.0.1:0"),
    *("waker", "--env-file", "/etc/waker/waker.env"),
)


def build() -> None:
    """Make the box's disk, on which waker's packages wait for its own apt."""
    run("rm", "-rf", BUILD)
    BUILD.mkdir()
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ROOT_KEY)
    tree = BUILD / "tree"
    # systemd does this at boot, but a container may have none.
    run("update-binfmts", "--enable", "qemu-aarch64")
    run(*MAKE_TREE, tree)
    set_up(tree, PUBLIC_KEY)
    (kernel,) = tree.glob("boot/vmlinuz-*")
    run("mv", kernel, KERNEL)
    run("mke2fs", "-q", "-t", "ext4", "-d", tree, DISK, "1G")
    run("rm", "-rf", tree)


def ready() -> None:
    """Have the box, made now or, by the same recipe, earlier."""
    need_root()
    for program in NEEDED:
        need(program)
    recipe = "\n".join([*MAKE_TREE, LAN])
    stamp = BUILD / "recipe"
    if not stamp.exists() or stamp.read_text() != recipe:
        build()
        stamp.write_text(recipe)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """A booted box to which the one file was copied."""
    ready()
    make(tmp_path / "checkout", "dist")
    with computer_of(HARDWARE, tmp_path, ROOT_KEY, VIRT) as computer:
        computer.switch_on()
        box = Box(computer)
        box.wait("true")
        program = tmp_path / "checkout/dist/waker"
        box.run("cat >waker", program.read_bytes())
        yield box


@pytest.fixture
def machine(box: Box, tmp_path: Path) -> Iterator[Machine]:
    """A server that is off, at the other end of the box's cable."""
    folder = tmp_path / "machine"
    folder.mkdir()
    router = box.computer.router
    ip(f"-n {router.name} link set lan address {ANOTHER_MAC}")
    made = router.run(lambda: Machine(folder, ROUTER, packet_port=9))
    with contextlib.closing(made):
        router.run(made.show)
        yield made


def ask(box: Box, machine: Machine) -> None:
    """Boot the server, until its initrd asks for the passphrase."""
    box.computer.router.run(machine.ask)


def install(box: Box, machine: Machine) -> None:
    """Install waker with what it needs, and let the server accept its new key."""
    shown = box.run(INSTALL)
    assert "\n    install python3-paramiko with apt\n" in shown
    settings = machine.settings(
        HOMELAB_MAC=ANOTHER_MAC, HOMELAB_BROADCAST="255.255.255.255", SSH_KEY="ssh_key"
    )
    box.settle(settings | {"WAKER_PIN": PIN})
    authorized = machine.folder / "home/.ssh/authorized_keys"
    authorized.write_text(box.run("cat /etc/waker/ssh_key.pub"))


def reboot(box: Box) -> None:
    """Reboot the box, on which the service has not run yet."""
    box.run("systemctl enable waker")
    box.run("systemd-run --on-active=1 systemctl reboot")
    box.wait(LISTENS)


def read_status(box: Box) -> dict[str, str]:
    """Read what the kernel says of the daemon."""
    lines = box.run(f"cat /proc/{box.show('MainPID')}/status").splitlines()
    return dict(line.split(":\t", 1) for line in lines)


def memory(box: Box) -> float:
    """Return the MB of the daemon's resident set."""
    return int(read_status(box)["VmRSS"].removesuffix("kB")) * 1024 / 1e6


def assert_sandboxed(box: Box) -> None:
    """Neither systemd nor the kernel has refused a line of the unit."""
    status = read_status(box)
    assert "0" not in status["Uid"].split()
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    own, first = (
        box.run(f"readlink /proc/{pid}/ns/mnt /proc/{pid}/ns/user").split()
        for pid in (box.show("MainPID"), 1)
    )
    assert not {*own} & {*first}
    box.run("systemd-analyze security --threshold=12 waker")
    warnings = "journalctl --sync; journalctl -q -b -p warning -u waker --output=cat"
    assert box.run(warnings) == ""


def unlock(owner: Owner, machine: Machine) -> None:
    """Wake the server, and unlock it at the second try."""
    owner.router.run(owner.client.log_in)
    owner.wait_for("off")
    assert owner.call("POST", "/api/wol").status == 200
    assert machine.packets() == [PACKET] * 3
    owner.router.run(machine.ask)
    owner.wait_for("locked")
    assert owner.unlock("wrong") == (400, "Wrong passphrase for disk root.")
    assert owner.unlock(PASSPHRASE) == (200, "Unlocked: root.")
    assert machine.received() == [b"wrong", PASSPHRASE.encode()]


def time_server(box: Box, server: tuple[str, ...]) -> Figures:
    """Return ms to the first page, and MB."""
    command = shlex.join(["python3", "-c", FIRST_PAGE, *server])
    return [*map(float, box.run(f"cd sources; {command}").split())]


def time_unlock(box: Box, machine: Machine, command: str) -> Figures:
    """Return the ms that it takes."""
    ask(box, machine)
    clock = "date +%s%N"
    timed = f"began=$({clock}); {command} >&2; echo $(($({clock}) - began))"
    taken = int(box.run(timed, PASSPHRASE.encode())) / 1e6
    assert machine.received() == [PASSPHRASE.encode()]
    return [taken]


def ssh_from(box: Box, machine: Machine) -> str:
    """Return OpenSSH's command to unlock, which trusts only the pinned host key."""
    port = machine.initrd_port
    box.write("known_hosts", f"[{ROUTER}]:{port} {machine.host_key}\n")
    options = "-F none -o UserKnownHostsFile=known_hosts -o GlobalKnownHostsFile=none"
    options += f" -o BatchMode=yes -o IdentitiesOnly=yes -p {port}"
    return f"ssh {options} -i /etc/waker/ssh_key root@{ROUTER} cryptroot-unlock"


def measure(box: Box, machine: Machine) -> None:
    """Print tables: medians, and ratios of waker to what does as much."""
    box.run("python3 -m zipfile -e waker sources")  # with the page
    show_head("server, on arm64", "ms to the first page", "MB")
    servers = [
        (time_server(box, EMPTY), time_server(box, WAKER)) for _ in range(ROUNDS)
    ]
    compare(["http.server", "waker"], servers)
    show_head("unlock, on arm64", "ms")
    ssh = ssh_from(box, machine)
    unlocks = [
        (time_unlock(box, machine, ssh), time_unlock(box, machine, "waker unlock"))
        for _ in range(ROUNDS)
    ]
    compare(["ssh", "waker"], unlocks)


def test_an_arm64_box_is_installed_rebooted_and_used(
    box: Box, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(box, machine)
    install(box, machine)
    checked = box.run("waker check")
    assert "pinned and verified" in checked
    assert "can log in" in checked
    box.computer.router.run(machine.show)  # off
    reboot(box)
    assert_sandboxed(box)
    idle = memory(box)
    unlock(Owner(Client(8080, host=ADDRESS), box.computer.router), machine)
    kept, peak = memory(box), int(box.show("MemoryPeak")) / 1e6
    assert_sandboxed(box)
    with capsys.disabled():
        measure(box, machine)
        show_head("the service, on arm64", "MB")
        show_row("idle", figure(idle))
        show_row("after two unlocks", figure(kept))
        show_row("at most, as MemoryMax counts", figure(peak))
