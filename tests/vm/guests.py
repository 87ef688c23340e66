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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Interface
from pathlib import Path

import prepare
import pytest
from conftest import CHECKOUT, PASSPHRASE, PROGRAM, blocks, need, need_root
from facts import Card, Facts, Ports

BUILD = Path(PROGRAM).with_name(".vm")
SSH_KEY = BUILD / "ssh_key"
AUTHORIZED = SSH_KEY.with_suffix(".pub")
OTHER = "the passphrase of cryptdata"
ADDRESS = "192.168.77.20"
ROUTER = "192.168.77.1"
MAC = "52:54:00:12:34:56"
# Of the kernel. Without norandmaps, the emulation takes minutes. Beside other tests, a
# timer may be late, at which a kernel panics if it looks.
OPTIONS = (
    "console=ttyS0 norandmaps mitigations=off no_timer_check cryptomgr.notests panic=1"
)

# What docs/server.md says: dracut makes the guests' initrds by these commands, after
# those that install packages.
MODULE, LAN, BUILD_IT = blocks("docs/server.md", "## Fedora")
MODULE = MODULE.partition("openssh-server\n")[2]
LAN = LAN.replace("192.168.1.20", ADDRESS).replace("192.168.1.1", ROUTER)
# What prepare.py finds out about the others.
LAN_ADDRESS = IPv4Interface(f"{ADDRESS}/24")
CARD = Card("enp0s3", MAC, ["virtio_net"], LAN_ADDRESS, ROUTER, has_dhcp=False)

# The kernel of Debian 13 crashes under the QEMU of Debian 12, so all run that of 12.
# With busybox there, dracut may leave out bash, which is root's shell.
PACKAGES = {
    "bookworm": "cryptsetup-initramfs dropbear-initramfs linux-image-cloud-amd64",
    "trixie": "busybox cryptsetup dracut dracut-network systemd-cryptsetup",
}
BOX = "openssh-client python3-paramiko"
COMMON = "curl iproute2 kmod openssh-server systemd-sysv udev zstd"
# All that a guest has; with every driver there is, an initrd would take far longer.
DRIVERS = "dm_crypt ext4 virtio_blk virtio_net virtio_pci"
# Offers the packages that were downloaded, from the tree itself and nowhere else.
ARCHIVE = """\
mkdir /archive
mv /var/cache/apt/archives/*.deb /archive
cd /archive
for file in *.deb; do
    dpkg-deb -f "$file"
    echo "Filename: $file"
    echo "Size: $(stat -c %s "$file")"
    echo "SHA256: $(sha256sum "$file" | cut -d' ' -f1)"
    echo
done >Packages
rm -rf /etc/apt/sources.list.d/* /var/lib/apt/lists/*
echo 'deb [trusted=yes] file:/archive ./' >/etc/apt/sources.list
"""


@dataclass(frozen=True)
class Guest:
    """A kind of machine."""

    name: str
    suite: str = "bookworm"
    port: int = 2222  # of the initrd's SSH
    forced: bool = True  # that SSH runs nothing but the unlock command
    disks: Sequence[str] = ("cryptroot",)
    encrypted: bool = True
    tries: int | None = None  # that systemd gives a passphrase, 0 for any number
    iterations: int = 1000  # of PBKDF2; under TCG, a second has some 40,000

    @property
    def folder(self) -> Path:
        return BUILD / self.name

    @property
    def host_key(self) -> Path:
        """The public key of the initrd's SSH; of the system's, where that is all."""
        return self.folder / "host_key.pub"

    def hardware(self) -> list[str]:
        """Return QEMU's arguments; nothing that is written to the disks stays."""
        root = "mapper/cryptroot" if self.encrypted else "vda ip=off"
        # Beside other tests, disks may appear after systemd's 90 s. The console shows
        # systemd's warnings.
        options = (
            f"root=/dev/{root} rw {OPTIONS} systemd.default_device_timeout_sec=600"
            " systemd.journald.forward_to_console=1"
            " systemd.journald.max_level_console=warning"
        )
        arguments = [
            *(["-no-reboot"] if self.encrypted else []),
            *("-kernel", str(BUILD / "vmlinuz")),
            *("-initrd", str(self.folder / "initrd"), "-append", options),
            *("-device", f"virtio-net-pci,netdev=lan,mac={MAC},romfile="),
        ]
        for disk in self.disks:
            image = f"if=virtio,format=raw,snapshot=on,file={self.folder / disk}"
            arguments += ["-drive", image]
        return arguments

    def settings(self) -> dict[str, str]:
        """Write what waker is told about it."""
        return {
            "WAKER_HOMELAB_MAC": MAC,
            "WAKER_HOMELAB_HOST": ADDRESS,
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
    Guest("two-disks", port=22, forced=False, disks=["cryptroot", "crypthome"]),
    Guest("slow", iterations=400_000),
    Guest("dracut", suite="trixie", tries=0, disks=["cryptroot", "crypthome"]),
    Guest("dracut-shell", suite="trixie", forced=False, tries=3),
    Guest("dracut-differ", suite="trixie", tries=0, disks=["cryptroot", "cryptdata"]),
)
UNSTABLE = Guest("unstable", suite="sid", tries=0)


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


def follow(tree: Path, commands: str, changes: Mapping[str, str]) -> str:
    """Run commands of the docs in a tree, with what a reader would change."""
    whole = {"ssh-ed25519 AAAA… waker": AUTHORIZED.read_text().strip(), **changes}
    for old, new in whole.items():
        commands = commands.replace(old, new)
    return run_in(tree, "sh", "-ec", f'sudo() {{ "$@"; }}; cd /root\n{commands}')


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(suite: str) -> None:
    """Make three trees: with Python and systemd, with what waker needs, and of guests.

    The first offers what the second has.
    """
    tree, minimal, fresh = (BUILD / f"{n}{suite}" for n in ("", "minimal-", "fresh-"))
    packages = f"{COMMON} {PACKAGES.get(suite) or PACKAGES['trixie']}"
    stale = ['--aptopt=Acquire::Check-Valid-Until "false"']  # the mirror may lag behind
    box = f"--no-install-recommends {BOX}"
    hooks = [
        'chroot "$1" apt-get clean',
        f'chroot "$1" apt-get install -y --download-only {box}',
        f'cp --archive --one-file-system "$1" {fresh}',
        f'chroot "$1" apt-get install -y {box}',
        f'cp --archive --one-file-system "$1" {minimal}',
        # The initrds are made later.
        f'INITRD=No chroot "$1" apt-get install -y --no-install-recommends {packages}',
    ]
    run(
        *("unshare", "--mount", "mmdebstrap"),  # so that none of its mounts stays
        *("--variant=minbase", "--include=python3,systemd"),
        *(stale if suite == "sid" else []),
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale")),
        *("--dpkgopt=force-unsafe-io", *(f"--customize-hook={hook}" for hook in hooks)),
        *(suite, tree),
    )
    for made in (fresh, minimal):
        made.chmod(0o755)
    run_in(fresh, "sh", "-ec", f"{ARCHIVE}\napt-get -q update")
    set_up(tree)


def set_up(tree: Path, authorized: Path = AUTHORIZED) -> None:
    """Give a tree its name, its network, and root's SSH key."""
    tree.chmod(0o755)
    write(tree / "etc/hostname", "guest\n")
    write(tree / "etc/systemd/network/10-lan.network", LAN)
    run_in(tree, "systemctl", "enable", "systemd-networkd")
    # Else each boot would be a first one, with all its chores.
    run_in(tree, "systemd-machine-id-setup")
    for folder in ("etc", "var"):
        (tree / folder / ".updated").touch()
    write(tree / "root/.ssh/authorized_keys", authorized.read_text())
    (tree / "root/.ssh").chmod(0o700)


def with_initramfs_tools(guest: Guest, tree: Path) -> str:
    """Make the initrd with the files of prepare.py; returns its host key."""
    # Each guest has a host key of its own, so that none is taken for another.
    host_key = "/etc/dropbear/initramfs/dropbear_ed25519_host_key"
    run_in(tree, "rm", host_key)
    run_in(tree, "dropbearkey", "-t", "ed25519", "-f", host_key)
    key = AUTHORIZED.read_text()
    ports = Ports("22", str(guest.port))
    facts = Facts("initramfs-tools", [], {}, CARD, ports, "", "", [], [], kept="")
    files = prepare.read_files("initramfs-tools")
    for _, path, text, _ in prepare.make_plan(facts, key, "", files)[1:]:
        is_key = path.endswith("/authorized_keys")
        write(tree / path[1:], key if is_key and not guest.forced else text)
        (tree / path[1:]).chmod(0o755 if text.startswith("#!") else 0o600)
    run_in(tree, "update-initramfs", "-u", "-k", "all")
    command = (CHECKOUT / "server/initramfs-tools/host-key").read_text()
    return run_in(tree, "sh", "-ec", command)


def with_dracut(guest: Guest, tree: Path) -> str:
    """Make the initrd as docs/server.md says for Fedora; returns its host key."""
    shutil.copytree(CHECKOUT / "server/dracut", tree / "root/server/dracut")
    (tree / "etc/initrd-ssh/host_key").unlink(missing_ok=True)
    forced = 'restrict,command="/usr/bin/cryptroot-unlock" '
    follow(tree, MODULE, {} if guest.forced else {forced: ""})
    shutil.rmtree(tree / "root/server")
    write(tree / "etc/initrd-ssh/lan.network", LAN)
    write(
        tree / "etc/dracut.conf.d/guest.conf",
        f'compress="cat"\ndrivers=" {DRIVERS} "\n'
        'omit_dracutmodules+=" hwdb kernel-modules-extra nvdimm overlay-root "\n',
    )
    (version,) = (path.name for path in tree.glob("lib/modules/*"))
    here = {"dracut --force": f"dracut --force /boot/initrd {version}"}
    return follow(tree, BUILD_IT, here).splitlines()[-1]


def encrypt(plain: Path, image: Path, passphrase: str, iterations: int) -> None:
    """Make a LUKS2 disk of a file system."""
    run("cp", plain, image)
    with image.open("ab") as file:
        file.truncate(plain.stat().st_size + (32 << 20))
    run(
        *("cryptsetup", "reencrypt", "--encrypt", "--type=luks2", "--batch-mode"),
        *("--resilience=none", "--reduce-device-size=32M", "--key-file=-"),
        *("--pbkdf=pbkdf2", f"--pbkdf-force-iterations={iterations}", image),
        given=passphrase,
    )


def build(suite: str, guests: Sequence[Guest]) -> None:
    """Make the guests of a suite: their disks are of one tree, which then changes."""
    tree, plain = BUILD / suite, BUILD / f"{suite}-system"
    make_initrd, attach = with_initramfs_tools, "luks,initramfs"
    if suite != "bookworm":
        make_initrd, attach = with_dracut, "luks,x-initrd.attach"
        shutil.copytree(BUILD / "modules", tree / "lib/modules")
    run("mke2fs", "-q", "-t", "ext4", "-d", tree, plain, "576M")
    for guest in (guest for guest in guests if guest.suite == suite):
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
                given = OTHER if disk == "cryptdata" else PASSPHRASE
                encrypt(plain, image, given, guest.iterations)
            (guest.folder / disk).hardlink_to(image)
            uuid = run("cryptsetup", "luksUUID", image).strip()
            tries = "" if guest.tries is None else f",tries={guest.tries}"
            lines += f"{disk} UUID={uuid} none {attach}{tries}\n"
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
        shutil.copytree(tree / "lib/modules", BUILD / "modules")
        list(pool.map(partial(build, guests=BOXES + GUESTS), PACKAGES))


def ready() -> None:
    """Have the guests, made now or, by the same recipe, earlier."""
    need_root()
    for program in ("cryptsetup", "mke2fs", "mmdebstrap", "qemu-system-x86_64"):
        need(program)
    paths = [Path(__file__), *sorted(CHECKOUT.glob("server/**/*"))]
    whole = b"".join(
        path.read_bytes() for path in paths if path.suffix != ".pyc" and path.is_file()
    )
    texts = (PASSPHRASE, MODULE, LAN, BUILD_IT)
    recipe = hashlib.sha256(whole + "".join(texts).encode()).hexdigest()
    stamp = BUILD / "recipe"
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != recipe:
            build_all()
            write(stamp, recipe)


def make_unstable() -> None:
    """Make the guest with today's Debian unstable, or fail if there is none today."""
    ready()
    for path in BUILD.glob("*sid*"):
        run("rm", "-rf", path)
    run("rm", "-rf", UNSTABLE.folder)
    try:
        install("sid")
    except RuntimeError as error:
        pytest.fail(f"Debian unstable itself is broken, or its mirror: {error}")
    build("sid", [UNSTABLE])
