"""Guests: real Debian systems on encrypted disks, built of Debian's own packages.

A tree is an installed system; a guest is made of a copy, in the files that QEMU takes:
a kernel, an initrd and disks. cryptsetup encrypts the disks as plain files, so that no
device mapper is needed. All is kept in `.vm` until its recipe, here, changes.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from conftest import PASSPHRASE, PROGRAM, need, need_root

HERE = Path(__file__).parent
BUILD = Path(PROGRAM).with_name(".vm")
SSH_KEY = BUILD / "ssh_key"
ADDRESS = "192.168.77.20"
ROUTER = "192.168.77.1"

# The kernel of Debian 13 crashes under the QEMU of Debian 12, so all run that of 12.
PACKAGES = {
    "bookworm": "cryptsetup-initramfs,dropbear-initramfs,linux-image-cloud-amd64",
    "trixie": "cryptsetup,dracut,dracut-network,systemd-cryptsetup",
}
COMMON = "iproute2,kmod,openssh-server,python3-paramiko,systemd-sysv,udev,zstd"

LAN = f"""\
[Match]
Name=e*
[Network]
Address={ADDRESS}/24
Gateway={ROUTER}
"""


@dataclass(frozen=True)
class Guest:
    """A kind of machine."""

    name: str
    suite: str = "bookworm"
    dialect: str = "cryptroot"
    port: int = 2222  # of the initrd's SSH
    forced: bool = False  # that SSH runs nothing but cryptroot-unlock
    disks: Sequence[str] = ("cryptroot",)
    encrypted: bool = True
    iterations: int = 1000  # of PBKDF2; under TCG, a second has some 40,000

    @property
    def folder(self) -> Path:
        return BUILD / self.name

    def settings(self) -> dict[str, str]:
        """Write what waker is told about it."""
        return {
            "WAKER_HOMELAB_HOST": ADDRESS,
            "WAKER_INITRD": self.dialect,
            "WAKER_INITRD_SSH_PORT": str(self.port),
            "WAKER_SSH_KEY": str(SSH_KEY),
            "WAKER_SSH_HOST_KEY": (self.folder / "host_key.pub").read_text().strip(),
        }


GUESTS = (
    Guest("dropbear"),
    Guest("port-22", port=22),
    Guest("forced", forced=True),
    Guest("two-disks", disks=("cryptroot", "crypthome")),
    Guest("slow", iterations=800_000),
    Guest("dracut", suite="trixie", dialect="systemd"),
)


BOXES = (
    Guest("box-12", disks=("system",), encrypted=False),
    Guest("box-13", suite="trixie", disks=("system",), encrypted=False),
)


def run(*command: str | Path, given: str | None = None) -> str:
    """Run a command, which must succeed; returns what it printed."""
    done = subprocess.run(
        [need(str(command[0])), *command[1:]],
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def run_in(tree: Path, *command: str) -> str:
    """Run a command in a tree, with a /proc that goes away with it."""
    enter = 'mount -t proc proc "$0/proc"; exec chroot "$0" "$@"'
    return run("unshare", "--mount", "sh", "-ec", enter, tree, *command)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def uuid_of(guest: Guest, disk: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{guest.name}/{disk}"))


def install(suite: str) -> None:
    """Make a tree: Debian, and what all guests have in common."""
    tree = BUILD / suite
    run(
        *("unshare", "--mount", "mmdebstrap"),  # so that none of its mounts stays
        "--variant=minbase",
        f"--include={COMMON},{PACKAGES[suite]}",
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale")),
        suite,
        tree,
    )
    tree.chmod(0o755)
    write(tree / "etc/hostname", "guest\n")
    write(tree / "etc/systemd/network/10-lan.network", LAN)
    run_in(tree, "systemctl", "enable", "systemd-networkd")
    # Else each boot would be a first one, with all its chores.
    write(tree / "etc/machine-id", uuid.uuid4().hex + "\n")
    for folder in ("etc", "var"):
        (tree / folder / ".updated").touch()


def install_minimal(suite: str) -> None:
    """Make a Debian that has nothing but Python and paramiko."""
    tree = BUILD / f"minimal-{suite}"
    programs = "--variant=minbase", "--include=python3,python3-paramiko"
    run("unshare", "--mount", "mmdebstrap", *programs, suite, tree)
    tree.chmod(0o755)


def configure(guest: Guest, tree: Path, attach: str) -> None:
    """Tell a tree its disks; `attach` has them unlocked in the initrd."""
    lines = [f"{d} UUID={uuid_of(guest, d)} none luks,{attach}\n" for d in guest.disks]
    write(tree / "etc/crypttab", "".join(lines))
    places = zip(guest.disks, ("/", "/home"), strict=False)
    lines = [
        f"/dev/mapper/{disk} {place} ext4 defaults 0 0\n" for disk, place in places
    ]
    write(tree / "etc/fstab", "".join(lines))


def with_initramfs_tools(guest: Guest, tree: Path) -> tuple[Path, str]:
    """Make the initrd as README says for Debian; returns it, and its host key."""
    configure(guest, tree, "initramfs")
    options = f"-p {guest.port} -s -j -k" + " -c cryptroot-unlock" * guest.forced
    dropbear = tree / "etc/dropbear/initramfs"
    write(dropbear / "dropbear.conf", f'DROPBEAR_OPTIONS="{options}"\n')
    write(dropbear / "authorized_keys", SSH_KEY.with_suffix(".pub").read_text())
    network = f"IP={ADDRESS}::{ROUTER}:255.255.255.0\n"
    write(tree / "etc/initramfs-tools/conf.d/network", network)
    run_in(tree, "update-initramfs", "-u")
    host_key = "/etc/dropbear/initramfs/dropbear_ed25519_host_key"
    printed = run_in(tree, "dropbearkey", "-y", "-f", host_key)
    (initrd,) = tree.glob("boot/initrd.img-*")
    return initrd, next(line for line in printed.splitlines() if "ssh-" in line)


def with_dracut(guest: Guest, tree: Path) -> tuple[Path, str]:
    """Make the initrd as README says for dracut; returns it, and its host key."""
    configure(guest, tree, "x-initrd.attach")
    folder = tree / "etc/initrd-ssh"
    write(folder / "authorized_keys", SSH_KEY.with_suffix(".pub").read_text())
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host_key")
    module = tree / "usr/lib/dracut/modules.d/46initrd-ssh"
    shutil.copytree(HERE / "initrd-ssh", module)
    shutil.copytree(BUILD / "bookworm/lib/modules", tree / "lib/modules")
    write(
        tree / "etc/dracut.conf.d/initrd-ssh.conf",
        'add_dracutmodules+=" initrd-ssh "\nhostonly="no"\n'
        'install_items+=" /etc/crypttab "\n',
    )
    (version,) = (path.name for path in tree.glob("lib/modules/*"))
    run_in(tree, "dracut", "--force", "/boot/initrd", version)
    return tree / "boot/initrd", (folder / "host_key.pub").read_text()


def without_unlocking(guest: Guest, tree: Path) -> tuple[Path, str]:
    """Make a box to run waker on, which root may enter; it has no initrd of its own."""
    write(tree / "etc/fstab", "/dev/vda / ext4 defaults 0 0\n")
    authorized = tree / "root/.ssh/authorized_keys"
    write(authorized, SSH_KEY.with_suffix(".pub").read_text())
    authorized.parent.chmod(0o700)
    if guest.suite != "bookworm":
        shutil.copytree(BUILD / "bookworm/lib/modules", tree / "lib/modules")
    (initrd,) = BUILD.glob("bookworm/boot/initrd.img-*")
    return initrd, (tree / "etc/ssh/ssh_host_ed25519_key.pub").read_text()


def encrypt(image: Path, disk: str, guest: Guest) -> None:
    """Turn a file system into a LUKS2 disk, in place."""
    run(
        *("cryptsetup", "reencrypt", "--encrypt", "--batch-mode", "--resilience=none"),
        *("--type=luks2", f"--uuid={uuid_of(guest, disk)}", "--reduce-device-size=32M"),
        *("--pbkdf=pbkdf2", f"--pbkdf-force-iterations={guest.iterations}"),
        *("--key-file=-", image),
        given=PASSPHRASE,
    )


def build(guest: Guest) -> None:
    """Make the files of a guest."""
    tree = guest.folder / "tree"
    guest.folder.mkdir()
    run("cp", "--archive", "--one-file-system", BUILD / guest.suite, tree)
    make_initrd = with_dracut if guest.suite == "trixie" else with_initramfs_tools
    if not guest.encrypted:
        make_initrd = without_unlocking
    initrd, host_key = make_initrd(guest, tree)
    shutil.copy(initrd, guest.folder / "initrd")
    write(guest.folder / "host_key.pub", host_key)
    (kernel,) = (BUILD / "bookworm").glob("boot/vmlinuz-*")
    shutil.copy(kernel, guest.folder / "vmlinuz")
    for disk in guest.disks:
        image = guest.folder / disk
        content = () if disk == "crypthome" else ("-d", tree)
        run("mke2fs", "-q", "-t", "ext4", *content, image, "576M" if content else "32M")
        if guest.encrypted:
            with image.open("ab") as file:
                file.truncate(image.stat().st_size + (32 << 20))
            encrypt(image, disk, guest)
    shutil.rmtree(tree)


def build_all() -> None:
    """Make every guest, as many at a time as there are cores."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir()
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", SSH_KEY)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(install, PACKAGES))  # as a list, it raises what was raised
        list(pool.map(install_minimal, PACKAGES))
        list(pool.map(build, GUESTS + BOXES))
    for suite in PACKAGES:
        shutil.rmtree(BUILD / suite)


def recipe() -> str:
    """Digest all that decides what the guests are."""
    paths = [Path(__file__), *sorted(HERE.glob("initrd-ssh/*"))]
    whole = PASSPHRASE.encode() + b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(whole).hexdigest()


def ready() -> None:
    """Have the guests, made now or earlier."""
    need_root()
    for program in ("mmdebstrap", "unshare", "ssh-keygen", "mke2fs", "cryptsetup"):
        need(program)
    with (HERE / "guests.py").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = BUILD / "recipe"
        if not stamp.exists() or stamp.read_text() != recipe():
            build_all()
            write(stamp, recipe())
