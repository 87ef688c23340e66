"""Simulated servers.

Each is this computer with folders of its own in a mount namespace, where prepare.py
sees a recorded network and disk. Whole servers are tested by `make test-vm`.
"""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import prepare
import pytest
from conftest import CHECKOUT, need
from recorded import GRUB, GRUB_KERNEL, SERVERS, TABLE, find, probed

KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 43} waker"
DROPBEAR = "/etc/dropbear/initramfs"
OWN_KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'B' * 43} me"
LIMITED = (
    "no-port-forwarding,no-agent-forwarding,no-X11-forwarding,no-pty,"
    f'command="cryptroot-unlock" {KEY}\n'
)
CONF = "/etc/initramfs-tools/conf.d/waker"
MODULE = f"{prepare.MODULES}/46initrd-ssh"
RECORD = str(prepare.RECORD)
KEYS = f"{DROPBEAR}/authorized_keys"
STATIC = "IP=192.168.1.20::192.168.1.1:255.255.255.0"
MARKED = f"--yes --nonce 5eed '{KEY}'"
PROGRAM = "PYTHONPATH=server /usr/bin/python3 -m prepare"  # compiled once
# It has Debian's initramfs-tools, and only lacks settings.
LAYERS = """
mkdir etc layers probed
for folder in etc layers; do mount -t tmpfs none $folder; done
(cd /etc; cp -a alternatives group ld.so.cache os-release passwd shells "$OLDPWD/etc")
for place in etc usr var; do
    lower=/$place layer=layers/$place
    [ $place != etc ] || lower=etc
    mkdir -p $layer/upper $layer/work
    layers=lowerdir=$lower,upperdir=$layer/upper,workdir=$layer/work
    mount -t overlay none /$place -o $layers
done
mount -t tmpfs -o size=100M none /boot
mount -t tmpfs none /run
touch cmdline
mount --bind cmdline /proc/cmdline
mkdir -p /etc/dropbear/initramfs
dropbearkey -t ed25519 -f /etc/dropbear/initramfs/dropbear_ed25519_host_key >&2
echo ready
exec sleep 1000
"""
# What prepare.py looks at there itself, unless a test replaces it.
REAL = ("crypttab", "own_ip", "own_options", "images", "grub", "menu", "boot")


def answers(said: str) -> list[str]:
    """Return what is between the markers, which come last."""
    *settings, end = said.partition("\nwaker-begin 5eed\n")[2].splitlines()
    assert end == "waker-end 5eed"
    return [line for line in settings if not line.startswith("WARNING: ")]


@dataclass
class Server:
    """This computer, but with layers of its own over what prepare.py changes."""

    folder: Path
    holder: int  # a process in its namespace
    kernel: str = probed()["kernels"].strip()
    image: str = f"/boot/initrd.img-{kernel}"

    def enter(self, command: str) -> list[str]:
        """Return a command that runs one of the shell there."""
        place = "--mount", f"--target={self.holder}"
        return [need("nsenter"), *place, "sh", "-c", f"cd {self.folder}; {command}"]

    def run(self, command: str, check: bool = True) -> str:
        """Run a command of the shell there; returns what it prints."""
        done = subprocess.run(
            self.enter(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            start_new_session=True,  # without a terminal that could be asked
        )
        assert not check or done.returncode == 0, done.stdout
        return done.stdout

    def prepare(self, arguments: str = f"--yes '{KEY}'", check: bool = True) -> str:
        return self.run(f"{PROGRAM} {arguments}", check)

    def undo(self, check: bool = True) -> str:
        return self.prepare("--yes --undo", check)

    def path(self, name: str) -> Path:
        return Path(f"/proc/{self.holder}/root{name}")

    def read(self, name: str) -> str:
        return self.path(name).read_text()

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).unlink(missing_ok=True)  # a link would lead out of the layers
        self.path(name).write_text(text)
        self.path(name).chmod(mode)

    def set(self, **outputs: str) -> None:
        """Set what functions of probes.sh print."""
        for name, text in outputs.items():
            (self.folder / "probed" / name).write_text(text)

    def spoil(self, commands: str) -> None:
        """Let commands change what goes into later images."""
        (self.folder / "spoil").write_text(commands)

    def count_builds(self) -> int:
        """Return how many images were built since this was asked."""
        built = (self.folder / "built").read_text()
        (self.folder / "built").write_text("")
        return len(built.splitlines())

    def files(self) -> list[str]:
        """List all that was changed: content, modes, links and what was removed."""
        where = "find layers/*/upper /boot -path '*/lib/dpkg' -prune -o"
        contents = f"{where} -type f -exec sha256sum {{}} +"
        others = f"{where} ! -type d -printf '%M %p %l\\n'"
        return sorted(self.run(f"{contents}; {others}").splitlines())

    def files_of_the_owner(self) -> list[str]:
        """Leave out images, which contain times, and what systemd and dpkg note."""
        return [f for f in self.files() if "initrd.img" not in f and "/usr/" not in f]

    def cut_power(self, moment: int, arguments: str = f"--yes '{KEY}'") -> None:
        """End prepare.py when it waits for the disk for the n-th time."""
        self.run("rm -f synced; [ -e sync ] || cp $(which sync) sync")
        script = (
            f"#!/bin/sh\necho >>{self.folder}/synced\n"
            f"[ $(wc -l <{self.folder}/synced) != {moment} ] || kill -KILL $PPID\n"
            f'exec {self.folder}/sync "$@"\n'
        )
        self.write("/usr/bin/sync", script, 0o755)
        self.prepare(arguments, check=False)
        assert int(self.run("wc -l <synced")) == moment


@pytest.fixture
def server(simulation: None, tmp_path: Path) -> Iterator[Server]:
    for program in ("unmkinitramfs", "cpio", "dropbearkey", "ethtool", "systemctl"):
        need(program)
    shutil.copytree(CHECKOUT / "server", tmp_path / "server")
    shutil.copy(SERVERS / "mkinitramfs.sh", tmp_path)
    with (tmp_path / "server/probes.sh").open("r+") as file:
        functions = file.read().removesuffix('"$1"\n')
        told = f'"{tmp_path}/probed/$1"'
        file.seek(0)
        file.write(f'{functions}[ ! -e {told} ] || exec cat {told}\n"$1"\n')
    build = f"#!/bin/sh\nexec sh {tmp_path}/mkinitramfs.sh $1\n"
    (tmp_path / "server/initramfs-tools/build").write_text(build)
    command = [need("unshare"), "--mount", "sh", "-ec", LAYERS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == b"ready\n"
            server = Server(tmp_path, holder.pid)
            known = {n: text for n, text in probed().items() if n not in REAL}
            for name in find().missing:
                known["packages"] += f"{name} install installed\n"
            # A driver that is part of the kernel.
            server.set(**known | {"drivers": "eth0\n"})
            menu = GRUB.replace(GRUB_KERNEL, server.kernel)
            server.write("/boot/grub/grub.cfg", menu)
            server.write("/etc/crypttab", TABLE)
            server.write(f"{DROPBEAR}/dropbear.conf", "#DROPBEAR_OPTIONS=\n")
            server.write("/usr/sbin/update-initramfs", "", 0o755)  # only to be there
            server.spoil("")
            server.run(f"sh ./mkinitramfs.sh {server.image}")
            server.count_builds()
            yield server
        finally:
            holder.kill()
