"""Bare servers: an encrypted disk as after Debian's installer, and nothing for waker.

This computer needs no device mapper to make one. LVM describes a loop device that it
does not activate, mke2fs writes the file system to the place of the logical volume,
and cryptsetup encrypts the whole as a plain file. The system then boots once, with an
initrd made here, to make its own initrd and to install GRUB.
"""

import hashlib
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from computer import PATIENCE, computer_of
from conftest import PASSPHRASE, PROGRAM, need, need_root
from guests import ADDRESS, ARCHIVE, MAC, OPTIONS, ROUTER, encrypt, run, run_in, write

# Apart from `.vm`, which guests.py removes as a whole.
BUILD = Path(PROGRAM).with_name(".vm-bare")
ROOT_KEY = BUILD / "root_key"  # with which the tests look into a server; not waker's
PASSWORD = "me and my server"
UUID = "00000000-0000-4000-8000-000000000001"  # of the LUKS disk
DISK = "vda2_crypt"
ASKING = f"Please unlock disk {DISK}"
MIB = 1 << 20
BOOT_MIB, ROOT_MIB = 384, 1536
BOOT_AT, LUKS_AT = 1, 1 + BOOT_MIB  # MiB
SYSTEM = (
    "cryptsetup,dbus,grub-pc,iproute2,kmod,libpam-systemd,lvm2,netbase,openssh-server,"
    "python3,sudo,systemd-sysv,udev,zstd"
)
INITRAMFS_TOOLS = "initramfs-tools,cryptsetup-initramfs,ifupdown"
DRACUT = "dracut,systemd-cryptsetup"
INTERFACES = "etc/network/interfaces"
STATIC = f"""\
auto lo
iface lo inet loopback

allow-hotplug enp0s3
iface enp0s3 inet static
    address {ADDRESS}/24
    gateway {ROUTER}
"""
BRIDGE = f"""\
auto lo
iface lo inet loopback

iface enp0s3 inet manual

auto vmbr0
iface vmbr0 inet static
    address {ADDRESS}/24
    gateway {ROUTER}
    bridge-ports enp0s3
    bridge-fd 0
"""
PROFILE = f"""\
[connection]
id=lan
type=ethernet
interface-name=enp0s3

[ipv4]
method=manual
addresses={ADDRESS}/24
gateway={ROUTER}
"""
FILES = {
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 guest\n",
    "etc/crypttab": f"{DISK} UUID={UUID} none luks,discard\n",
    "etc/fstab": "/dev/mapper/guest--vg-root / ext4 errors=remount-ro 0 1\n"
    "/dev/vda1 /boot ext4 defaults 0 2\n",
    "etc/default/grub.d/console.cfg": f"""\
GRUB_TIMEOUT=2
GRUB_CMDLINE_LINUX_DEFAULT=
GRUB_CMDLINE_LINUX="{OPTIONS}"
GRUB_TERMINAL=serial
GRUB_SERIAL_COMMAND="serial --speed=115200"
""",
}
# Installs the oldest of Debian 12's kernels (later ones crash in QEMU 7.2), and offers
# the newest, with what else the server may want to install, on its own disk.
INSTALL = f"""
if [ $SUITE != bookworm ]; then
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
        [ ! -s $file ] || sed s/$SUITE/bookworm/ $file >>/etc/apt/sources.list.d/b.list
    done
    apt-get -q update
fi
kernels=linux-image-6.1.0-[0-9]*-cloud-amd64
apt-cache pkgnames linux-image-6.1 | grep -x "$kernels" | sort -V >/tmp/kernels
export INITRD=No
apt-get install -qy --no-install-recommends $(head -n 1 /tmp/kernels)
apt-get clean
apt-get install -qy --download-only --no-install-recommends \
    $OFFERED $(tail -n 1 /tmp/kernels)
{ARCHIVE}
apt-get -q update
useradd --create-home --shell /bin/bash --groups sudo me
echo "me:$PASSWORD" | chpasswd
usermod --password '!' root
systemd-machine-id-setup
touch /etc/.updated /var/.updated
"""
# Makes LVM's labels, by the tree's own LVM.
DESCRIBE = """
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
loop=$(losetup --find --show "$1")
trap 'losetup --detach $loop' EXIT
lvm() { chroot "$0" lvm "$@" --driverloaded n --nolocking --devices $loop; }
lvm pvcreate $loop
lvm vgcreate guest-vg $loop
lvm lvcreate --activate n --zero n --wipesignatures n -n root -l 100%FREE guest-vg
"""
# Makes an initrd for the first boot of every server.
FIRST_INITRD = """
config=/etc/initramfs-tools
cp -rp $config /etc/crypttab /tmp
echo MODULES=list >$config/conf.d/z
printf '%s\n' dm_crypt ext4 virtio_blk virtio_pci >$config/modules
sed -i 's/$/,initramfs/' /etc/crypttab
mkinitramfs -o /initrd $(ls /lib/modules)
rm -r $config
mv /tmp/initramfs-tools /tmp/crypttab /etc
"""
# Runs as init in the first boot.
FINISH = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
set -ex
mount -o remount,rw /
mount /boot
if [ -e /usr/bin/dracut ]; then dracut --force /boot/initrd.img-$(uname -r) $(uname -r)
else update-initramfs -c -k all; fi
grub-install /dev/vda
update-grub
umount /boot
rm /finish
sync
echo finished
for key in u o; do echo $key >/proc/sysrq-trigger; done # remount read-only, power off
sleep 60
"""


@dataclass(frozen=True)
class Bare:
    """A kind of server."""

    name: str
    suite: str = "trixie"
    packages: str = INITRAMFS_TOOLS  # that make its initrd and its network
    files: Mapping[str, str] = field(default_factory=dict)  # besides FILES
    has_spare: bool = False  # another network card, without a cable

    @property
    def disk(self) -> Path:
        return BUILD / self.name

    @property
    def has_dracut(self) -> bool:
        return "dracut" in self.packages

    def hardware(self, disk: Path) -> list[str]:
        """Return QEMU's arguments; vmxnet3 has Wake-on-LAN."""
        arguments = ["-drive", f"if=virtio,format=raw,file={disk}"]
        arguments += ["-device", f"vmxnet3,netdev=lan,mac={MAC},addr=3,romfile="]
        if self.has_spare:  # which the kernel finds first
            arguments += ["-device", "vmxnet3,id=spare,addr=2,romfile="]
        if self.has_dracut:  # another network, whose router QEMU plays
            arguments += ["-netdev", "user,id=second,net=10.77.0.0/24"]
            arguments += ["-device", "vmxnet3,netdev=second,addr=4,romfile="]
        return arguments


# On Debian, dracut's images are for any computer. The owner of an encrypted disk asks
# for one of this computer, or tells the kernel about the disk.
DEP = "etc/initramfs-tools/conf.d/owner"
FIRST = Bare("bare-12", "bookworm", files={INTERFACES: STATIC, DEP: "MODULES=dep\n"})
BARE = (
    FIRST,
    Bare("bare-13", files={INTERFACES: STATIC}, has_spare=True),
    Bare(
        "bare-bridge",
        packages=f"{DRACUT},ifupdown,bridge-utils",
        files={
            INTERFACES: BRIDGE,
            "etc/dracut.conf.d/owner.conf": 'hostonly="yes"\n',
        },
    ),
    Bare(
        "bare-manager",
        packages=f"{DRACUT},network-manager",
        files={
            "etc/NetworkManager/system-connections/lan.nmconnection": PROFILE,
            "etc/default/grub.d/disk.cfg": 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX'
            f' rd.luks.name={UUID}={DISK}"\n',
        },
    ),
)


def install(bare: Bare, tree: Path) -> None:
    """Make a tree of an installed system."""
    offered = "dracut-network" if bare.has_dracut else "dropbear-initramfs"
    variables = {
        "INSTALL": INSTALL,
        "OFFERED": f"{offered} ethtool",
        "PASSWORD": PASSWORD,
        "SUITE": bare.suite,
    }
    run(
        *("env", *(f"{name}={value}" for name, value in variables.items())),
        *("unshare", "--mount", "mmdebstrap", "--variant=minbase"),
        f"--include={SYSTEM},{bare.packages}",
        *(f"--dpkgopt=path-exclude=/usr/share/{n}/*" for n in ("doc", "locale", "man")),
        "--dpkgopt=force-unsafe-io",
        '--customize-hook=chroot "$1" sh -ec "$INSTALL"',
        *(bare.suite, tree),
    )
    tree.chmod(0o755)
    for name, text in {**FILES, **bare.files}.items():
        write(tree / name, text)
        if name.endswith(".nmconnection"):  # which may have a password
            (tree / name).chmod(0o600)
    write(tree / "root/.ssh/authorized_keys", ROOT_KEY.with_suffix(".pub").read_text())
    (tree / "root/.ssh").chmod(0o700)
    write(tree / "finish", FINISH)
    (tree / "finish").chmod(0o755)


def make_disk(bare: Bare, tree: Path) -> None:
    """Make a disk of a tree: a classic table of partitions, /boot, and LUKS."""
    mke2fs = ("mke2fs", "-q", "-t", "ext4")
    plain, luks = tree.with_name("plain"), tree.with_name("luks")
    with bare.disk.open("wb") as file:
        file.truncate(LUKS_AT * MIB)
    boot = ("-E", f"offset={BOOT_AT * MIB}", "-d", tree / "boot")
    run(*mke2fs, *boot, bare.disk, f"{BOOT_MIB}M")
    shutil.rmtree(tree / "boot")
    (tree / "boot").mkdir()
    with plain.open("wb") as file:
        file.truncate(ROOT_MIB * MIB)
    run("unshare", "--mount", "sh", "-ec", DESCRIBE, tree, plain)
    # LVM's own part is as big as one of its extents would be, at most.
    root = ("-E", f"offset={MIB}", "-d", tree)
    run(*mke2fs, *root, plain, f"{ROOT_MIB - 4}M")
    encrypt(plain, luks, PASSPHRASE, 1000)
    run("cryptsetup", "luksUUID", "--batch-mode", "--uuid", UUID, luks)
    copy = ("conv=notrunc,sparse", "bs=1M", f"seek={LUKS_AT}")
    run("dd", "status=none", *copy, f"if={luks}", f"of={bare.disk}")
    with bare.disk.open("r+b") as file:
        file.truncate(LUKS_AT * MIB + luks.stat().st_size)
        file.seek(446)
        sizes = BOOT_MIB * MIB, luks.stat().st_size
        for place, size in zip((BOOT_AT, LUKS_AT), sizes, strict=True):
            # In sectors of 512 bytes; what counts cylinders is unused.
            row = struct.pack("<4xB3xII", 0x83, place * MIB // 512, size // 512)
            file.write(row)
        file.seek(510)
        file.write(b"\x55\xaa")


def boot_first(bare: Bare, folder: Path) -> None:
    """Boot a server once, in which it makes its initrd and installs GRUB."""
    options = f"{OPTIONS} root=/dev/mapper/guest--vg-root init=/finish"
    hardware = bare.hardware(bare.disk)
    hardware += ["-kernel", str(BUILD / "vmlinuz"), "-initrd", str(BUILD / "initrd")]
    hardware += ["-append", options, "-no-reboot"]
    with computer_of(hardware, folder, ROOT_KEY) as computer:
        computer.switch_on()
        computer.wait_for(ASKING)
        computer.type(f"{PASSPHRASE}\n")
        assert computer.qemu
        computer.qemu.wait(2 * PATIENCE)
        assert "\nfinished\n" in computer.console


def build(bare: Bare) -> None:
    """Make a server; the first one also makes what the others begin with."""
    folder = BUILD / "part"
    run("rm", "-rf", folder)
    folder.mkdir()
    if not ROOT_KEY.exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ROOT_KEY)
    tree = folder / "tree"
    install(bare, tree)
    if bare is FIRST:
        run_in(tree, "sh", "-ec", FIRST_INITRD)
        (tree / "initrd").rename(BUILD / "initrd")
        (kernel,) = tree.glob("boot/vmlinuz-*")
        shutil.copy(kernel, BUILD / "vmlinuz")
    make_disk(bare, tree)
    boot_first(bare, folder)
    run("rm", "-rf", folder)


def ready(bare: Bare) -> None:
    """Have a server, made now or, by the same recipe, earlier."""
    need_root()
    for program in ("cryptsetup", "mke2fs", "mmdebstrap", "qemu-system-x86_64"):
        need(program)
    if bare is not FIRST:
        ready(FIRST)
    BUILD.mkdir(exist_ok=True)
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = bare.disk.with_suffix(".recipe")
    if not stamp.exists() or stamp.read_text() != recipe:
        build(bare)
        write(stamp, recipe)
