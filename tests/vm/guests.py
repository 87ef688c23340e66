"""Guests: real Debian systems on encrypted disks, built of Debian's own packages.

A tree is an installed system. Of each are made a disk, the same disk encrypted, and the
initrds of its guests, in the files that QEMU takes. Guests that differ in their initrd
alone share a disk. cryptsetup encrypts a disk as a plain file, so that no device mapper
is needed. All is kept in `.vm` until its recipe, here, changes.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from conftest import PASSPHRASE, PROGRAM, need, need_root

HERE = Path(__file__).parent
BUILD = Path(PROGRAM).with_name(".vm")
SSH_KEY = BUILD / "ssh_key"
AUTHORIZED = SSH_KEY.with_suffix(".pub")
ADDRESS = "192.168.77.20"
ROUTER = "192.168.77.1"

# The kernel of Debian 13 crashes under the QEMU of Debian 12, so all run that of 12.
PACKAGES = {
    "bookworm": "cryptsetup-initramfs dropbear-initramfs linux-image-cloud-amd64",
    "trixie": "cryptsetup dracut dracut-network systemd-cryptsetup",
}
COMMON = "iproute2 kmod openssh-server systemd-sysv udev zstd"
# All that a guest has; with every driver there is, an initrd would take far longer.
DRIVERS = "dm_crypt ext4 virtio_blk virtio_net virtio_pci"
LAN = f"[Match]\nName=e*\n[Network]\nAddress={ADDRESS}/24\nGateway={ROUTER}\n"


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

    @property
    def host_key(self) -> Path:
        """The public key of the initrd's SSH; of the system's, where that is all."""
        return self.folder / "host_key.pub"

    def settings(self) -> dict[str, str]:
        """Write what waker is told about it."""
        return {
            "WAKER_HOMELAB_HOST": ADDRESS,
            "WAKER_INITRD": self.dialect,
            "WAKER_INITRD_SSH_PORT": str(self.port),
            "WAKER_SSH_KEY": str(SSH_KEY),
            "WAKER_SSH_HOST_KEY": self.host_key.read_text().strip(),
        }


BOXES = (
    Guest("box-12", disks=["system"], encrypted=False),
    Guest("box-13", suite="trixie", disks=["system"], encrypted=False),
)
GUESTS = (
    Guest("dropbear"),
    Guest("port-22", port=22),
    Guest("forced", forced=True),
    Guest("two-disks", disks=["cryptroot", "crypthome"]),
    Guest("slow", iterations=400_000),
    Guest("dracut", suite="trixie", dialect="systemd"),
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


def install(suite: str) -> None:
    """Make two trees: one has nothing but Python and paramiko, one what guests need."""
    tree, minimal = BUILD / suite, BUILD / f"minimal-{suite}"
    packages = f"{COMMON} {PACKAGES[suite]}"
    hooks = (
        f'cp --archive --one-file-system "$1" {minimal}',
        # The initrds are made later.
        f'INITRD=No chroot "$1" apt-get install -y --no-install-recommends {packages}',
    )
    run(
        *("unshare", "--mount", "mmdebstrap"),  # so that none of its mounts stays
        *("--variant=minbase", "--include=python3-paramiko"),
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale")),
        *("--dpkgopt=force-unsafe-io", *(f"--customize-hook={hook}" for hook in hooks)),
        *(suite, tree),
    )
    tree.chmod(0o755)
    minimal.chmod(0o755)
    write(tree / "etc/hostname", "guest\n")
    write(tree / "etc/systemd/network/10-lan.network", LAN)
    run_in(tree, "systemctl", "enable", "systemd-networkd")
    # Else each boot would be a first one, with all its chores.
    run_in(tree, "systemd-machine-id-setup")
    for folder in ("etc", "var"):
        (tree / folder / ".updated").touch()
    write(tree / "root/.ssh/authorized_keys", AUTHORIZED.read_text())
    (tree / "root/.ssh").chmod(0o700)


def with_initramfs_tools(guest: Guest, tree: Path) -> str:
    """Make the initrd as README says for Debian; returns its host key."""
    dropbear = tree / "etc/dropbear/initramfs"
    options = f"-p {guest.port} -s -j -k" + " -c cryptroot-unlock" * guest.forced
    write(dropbear / "dropbear.conf", f'DROPBEAR_OPTIONS="{options}"\n')
    shutil.copy(AUTHORIZED, dropbear / "authorized_keys")
    network = f"IP={ADDRESS}::{ROUTER}:255.255.255.0\n"
    write(tree / "etc/initramfs-tools/conf.d/network", network)
    key = dropbear / "dropbear_ed25519_host_key"
    key.unlink()  # each guest has one of its own, so that none is taken for another
    path = f"/{key.relative_to(tree)}"
    printed = run_in(tree, "dropbearkey", "-t", "ed25519", "-f", path)
    run_in(tree, "update-initramfs", "-u")
    return next(line for line in printed.splitlines() if "ssh-" in line)


def with_dracut(guest: Guest, tree: Path) -> str:
    """Make the initrd as README says for dracut; returns its host key."""
    folder = tree / "etc/initrd-ssh"
    write(folder / "authorized_keys", AUTHORIZED.read_text())
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host_key")
    shutil.copytree(HERE / "initrd-ssh", tree / "usr/lib/dracut/modules.d/46initrd-ssh")
    write(
        tree / "etc/dracut.conf.d/initrd-ssh.conf",
        'add_dracutmodules+=" initrd-ssh "\nhostonly="no"\ncompress="cat"\n'
        f'install_items+=" /etc/crypttab "\ndrivers=" {DRIVERS} "\n'
        'omit_dracutmodules+=" hwdb kernel-modules-extra nvdimm overlay-root "\n',
    )
    (version,) = (path.name for path in tree.glob("lib/modules/*"))
    run_in(tree, "dracut", "--force", "/boot/initrd", version)
    return (folder / "host_key.pub").read_text()


def encrypt(plain: Path, image: Path, iterations: int) -> None:
    """Make a LUKS2 disk of a file system."""
    run("cp", plain, image)
    with image.open("ab") as file:
        file.truncate(plain.stat().st_size + (32 << 20))
    run(
        *("cryptsetup", "reencrypt", "--encrypt", "--type=luks2", "--batch-mode"),
        *("--resilience=none", "--reduce-device-size=32M", "--key-file=-"),
        *("--pbkdf=pbkdf2", f"--pbkdf-force-iterations={iterations}", image),
        given=PASSPHRASE,
    )


def build(suite: str) -> None:
    """Make the guests of a suite: their disks are of one tree, which then changes."""
    tree, plain = BUILD / suite, BUILD / f"{suite}-system"
    make_initrd, attach = with_initramfs_tools, "initramfs"
    if suite == "trixie":
        make_initrd, attach = with_dracut, "x-initrd.attach"
    run("mke2fs", "-q", "-t", "ext4", "-d", tree, plain, "576M")
    for guest in (guest for guest in BOXES + GUESTS if guest.suite == suite):
        guest.folder.mkdir()
        if not guest.encrypted:
            (guest.folder / "system").hardlink_to(plain)
            shutil.copy(BUILD / "initrd.img", guest.folder / "initrd")
            shutil.copy(tree / "etc/ssh/ssh_host_ed25519_key.pub", guest.host_key)
            continue
        lines = ""
        for disk in guest.disks:
            image = BUILD / f"{suite}-{disk}-{guest.iterations}"
            if not image.exists():
                encrypt(plain, image, guest.iterations)
            (guest.folder / disk).hardlink_to(image)
            uuid = run("cryptsetup", "luksUUID", image).strip()
            lines += f"{disk} UUID={uuid} none luks,{attach}\n"
        write(tree / "etc/crypttab", lines)
        write(guest.host_key, make_initrd(guest, tree))
        (initrd,) = tree.glob("boot/initrd*")
        shutil.copy(initrd, guest.folder / "initrd")
    shutil.rmtree(tree)


def build_all() -> None:
    """Make every guest, as many at a time as there are cores."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir()
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", SSH_KEY)
    tree = BUILD / "bookworm"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(install, PACKAGES))  # as a list, it raises what was raised
        # The kernel is for all guests; its first initrd is for boxes.
        write(tree / "etc/initramfs-tools/conf.d/modules", "MODULES=list\n")
        write(tree / "etc/initramfs-tools/modules", DRIVERS.replace(" ", "\n"))
        run_in(tree, "update-initramfs", "-c", "-k", "all")
        for name in ("vmlinuz", "initrd.img"):
            (path,) = tree.glob(f"boot/{name}-*")
            shutil.copy(path, BUILD / name)
        shutil.copytree(tree / "lib/modules", BUILD / "trixie/lib/modules")
        list(pool.map(build, PACKAGES))


def ready() -> None:
    """Have the guests, made now or, by the same recipe, earlier."""
    need_root()
    for program in ("cryptsetup", "mke2fs", "mmdebstrap", "qemu-system-x86_64"):
        need(program)
    paths = [Path(__file__), *sorted(HERE.glob("initrd-ssh/*"))]
    whole = PASSPHRASE.encode() + b"".join(path.read_bytes() for path in paths)
    recipe, stamp = hashlib.sha256(whole).hexdigest(), BUILD / "recipe"
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != recipe:
            build_all()
            write(stamp, recipe)
