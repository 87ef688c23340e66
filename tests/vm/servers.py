"""Bare servers, from the first command to the undo, and through power cuts.

Only `make test-servers` runs this, since it takes hours.
"""

import os
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bare import BARE, FIRST
from computer import PATIENCE
from conftest import CHECKOUT, need, wait_for
from guests import ADDRESS, ROUTER
from trial import CONFIG, KNOWN, LOGIN, QUESTION, SUDO, Trial, trial_of

pytestmark = pytest.mark.timeout(4 * 3600)
# What the network looks like, and what failed at boot.
NETWORK = """
ip -o -4 address | sed 's/^[0-9]*: //; s/valid_lft.*//'
ip -4 route
ip -br link | sort
sort /run/network/ifstate 2>/dev/null || true
nmcli -t -f NAME,DEVICE,STATE connection show --active 2>/dev/null || true
systemctl --failed --no-legend
"""
# Files that a preparation may change, and packages.
SNAPSHOT = """
find /etc /boot /usr/lib/dracut /usr/lib/systemd /usr/share/initramfs-tools \
    /var/lib/waker-prepare -type f ! -name 'initrd.img-*' -exec sha256sum {} + || true
dpkg-query -Wf '${db:Status-Status} ${Package}\\n'
"""
IMAGES = "stat -c '%n %i %Y' /boot/initrd.img-*"
WAKES = "late: \tWake-on: g"
# Runs after all services have ended.
LATE = """
mkdir -p /usr/lib/systemd/system-shutdown
cat >/usr/lib/systemd/system-shutdown/late <<'END'
#!/bin/sh
ethtool enp0s3 | sed -n 's/^.Wake-on/late: &/p' >/dev/console
END
chmod 755 /usr/lib/systemd/system-shutdown/late
"""
UPGRADE = """
export DEBIAN_FRONTEND=noninteractive
newest=$(cd /archive && ls | sed -n 's/^\\(linux-image-[^_]*\\)_.*/\\1/p')
apt-get install -qy --no-install-recommends $newest >&2
echo ${newest#linux-image-}
"""
LAST_ENTRY = "\x05\r"  # of GRUB's menu
PREPARED = "The server is prepared."
BUILDING = "Building and examining"
RENAMED = "a new file is in /boot"
# Waits after a rename, before the file system is written to the disk.
SLOW_SYNC = f"""
mv /usr/bin/sync /usr/bin/fast-sync
cat >/usr/bin/sync <<'END'
#!/bin/sh
[ "$*" != "-f /boot" ] || {{ echo {RENAMED} >/dev/console; sleep 30; }}
exec fast-sync "$@"
END
chmod 755 /usr/bin/sync
"""
FAST_SYNC = "[ ! -e /usr/bin/fast-sync ] || mv /usr/bin/fast-sync /usr/bin/sync"
# The seconds that the emulation of a preparation works, or nearly so; with dracut.
CUT_SECONDS = {False: 90, True: 150}
BUILD_SECONDS = 20  # and the build of one image, at the least
BRIDGE, MANAGER = BARE[2:]  # with dracut
DRACUT = MANAGER
# What the owner has for the second card. With ifupdown, systemd-networkd does not run.
# But dracut puts its settings into an image that is for this computer alone.
LEFT_ALONE = "printf '[main]\nno-auto-default=*\n' >/etc/NetworkManager/conf.d/own.conf"
BY_IFUPDOWN = """
cat >>/etc/network/interfaces <<END

auto enp0s4
iface enp0s4 inet static
    address 10.77.0.9/24
END
printf '[Match]\nName=*\n[Network]\nDHCP=yes\n' >/etc/systemd/network/00-own.network
"""
BY_NETWORKD = f"""
systemctl -q disable NetworkManager
systemctl -q enable systemd-networkd
cat >/etc/systemd/network/lan.network <<END
[Match]
Name=enp0s3
[Network]
Address={ADDRESS}/24
Gateway={ROUTER}
END
cat >/etc/systemd/network/second.network <<END
[Match]
Name=enp0s4
[Network]
DHCP=ipv4
END
"""


@pytest.fixture(params=BARE, ids=lambda bare: bare.name)
def trial(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trial]:
    with trial_of(request.param, tmp_path) as trial:
        yield trial


def test_one_command_prepares_a_server(trial: Trial) -> None:
    trial.boot()
    trial.run(LATE)
    network, before = network_of(trial), trial.run(SNAPSHOT)
    assert f"{ADDRESS}/24" in network

    shown = trial.prepare(KNOWN, LOGIN, SUDO, QUESTION)
    assert shown.count(trial.settings()["WAKER_PIN"]) == 1
    check_again(trial)
    assert WAKES in trial.switch_off()
    with trial.waker() as owner:
        start = owner.start("wrong", trial.wake, "not_confirmed")
        assert start["outcome"] == "wrong_passphrase", start
        assert [owner.unlock("wrong")[0] for _ in range(9)] == [400] * 9
        trial.unlock(owner)
    # The network is as if nobody had used it before the boot.
    assert network_of(trial) == network

    kernel = trial.run(UPGRADE).strip()  # which gets a right image by itself
    trial.took("kernel upgrade")
    check_again(trial)
    assert WAKES in trial.switch_off()
    with trial.waker() as owner:
        trial.unlock(owner)
    assert trial.run("uname -r").strip() == kernel
    assert network_of(trial) == network
    trial.switch_off()
    trial.boot(menu=LAST_ENTRY)  # the image that was kept
    assert trial.run("uname -r").strip() != kernel
    assert network_of(trial) == network

    shown = trial.prepare(LOGIN, SUDO, QUESTION, options=["--undo"])
    changed = {*before.splitlines()} ^ {*trial.run(SNAPSHOT).splitlines()}
    names = {line.split()[-1] for line in changed if kernel not in line}
    left = re.findall(r"Left: (?:the package )?([^ ,]+?)\.?[ ,\n]", shown)
    assert names <= {"/boot/grub/grub.cfg", *left}
    assert WAKES not in trial.switch_off()
    trial.boot()
    assert network_of(trial) == network


def network_of(trial: Trial) -> str:
    """Return what the network looks like, once that does not change any more."""

    def look_twice() -> tuple[str, str]:
        return trial.run(NETWORK), trial.run(f"sleep 5\n{NETWORK}")

    return wait_for(look_twice, lambda looks: looks[0] == looks[1], PATIENCE)[0]


def check_again(trial: Trial) -> None:
    """Run the command again: it builds nothing, and no setting changes."""
    images, settings = trial.run(IMAGES), trial.settings()
    trial.prepare(LOGIN, SUDO)
    assert trial.run(IMAGES) == images
    assert trial.settings() == settings


def processor_seconds(pid: int) -> float:
    """Return how long a process has worked."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    ticks = sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def copy_program(trial: Trial) -> str:
    """Copy the server's part to the server; returns the command that prepares it."""
    private = trial.box / CONFIG / "ssh_key"
    private.parent.mkdir()
    make_key = [need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f"]
    subprocess.run([*make_key, str(private)], check=True)
    key = private.with_suffix(".pub").read_text().strip()
    tar = [need("tar"), "-C", str(CHECKOUT / "server"), "-c", "."]
    packed = subprocess.run(tar, check=True, capture_output=True).stdout
    trial.computer.run("tar -C /root -x", packed)
    return f"python3 /root/prepare.py --yes '{key}'"


def cut_power(trial: Trial, command: str, moment: str) -> None:
    """Run a command on the server, and cut its power at that moment."""
    computer, begin = trial.computer, len(trial.computer.console)
    assert computer.qemu
    pid = computer.qemu.pid
    seconds = CUT_SECONDS[trial.bare.has_dracut]
    trial.run(f"setsid {command} </dev/null >/dev/console 2>&1 &")
    if moment == "rename":  # of an image, the second file that comes into /boot
        trial.wait_for(RENAMED, begin, count=2)
        seconds = 1
    if moment == "build":
        trial.wait_for(BUILDING, begin)
        seconds = BUILD_SECONDS
    ends = processor_seconds(pid) + random.uniform(0, seconds)
    wait_for(
        lambda: processor_seconds(pid) > ends or PREPARED in computer.console,
        seconds=PATIENCE,
    )
    computer.cut_power()
    print(f"CUT, {moment}:", *computer.console.splitlines()[-2:], sep="\n")


@pytest.mark.parametrize(
    ("trial", "moment"),
    [
        *[(FIRST, "random")] * 5,
        *[(DRACUT, "random")] * 5,
        *((DRACUT, moment) for moment in ("build", "rename")),
    ],
    indirect=["trial"],
)
def test_a_power_cut_does_no_harm(trial: Trial, moment: str) -> None:
    trial.boot()
    command = copy_program(trial)
    if moment == "rename":
        trial.run(SLOW_SYNC)
    cut_power(trial, command, moment)
    trial.boot()
    trial.run(FAST_SYNC)
    trial.prepare(KNOWN, LOGIN, SUDO, options=["--yes"])
    trial.switch_off()
    with trial.waker() as owner:
        trial.unlock(owner)


@pytest.mark.parametrize("trial", [FIRST], indirect=True)
def test_a_second_run_changes_nothing(trial: Trial) -> None:
    """The first one goes on, although its box has vanished."""
    trial.boot()
    command, begin = copy_program(trial), len(trial.computer.console)
    trial.run(f"setsid {command} </dev/null >/dev/console 2>&1 &")
    trial.wait_for("Unpacking dropbear-initramfs", begin)
    second = trial.computer.ssh(command)
    assert second.returncode == 1
    assert b"`waker prepare` is already at work on it." in second.stderr
    trial.wait_for(PREPARED, begin)
    trial.prepare(KNOWN, LOGIN, SUDO)
    trial.switch_off()
    with trial.waker() as owner:
        trial.unlock(owner)


@pytest.mark.parametrize("trial", [DRACUT], indirect=True)
def test_a_power_cut_during_undo_does_no_harm(trial: Trial) -> None:
    trial.boot()
    command = copy_program(trial)
    trial.run(command)
    cut_power(trial, "python3 /root/prepare.py --yes --undo", "build")
    trial.boot()
    trial.run("python3 /root/prepare.py --yes --undo")
    assert "nothing to undo" in trial.run("python3 /root/prepare.py --yes --undo")
    trial.switch_off()
    trial.boot()


@pytest.mark.parametrize(
    ("trial", "settings", "second"),
    [
        (MANAGER, LEFT_ALONE, ""),
        (BRIDGE, BY_IFUPDOWN, "10.77.0.9/24"),
        (MANAGER, BY_NETWORKD, "10.77.0.15/24"),
    ],
    indirect=["trial"],
    ids=["left-alone", "ifupdown", "networkd"],
)
def test_the_second_card_is_as_if_there_were_no_initrd(
    trial: Trial, settings: str, second: str
) -> None:
    """In the first test, NetworkManager manages it. QEMU plays its network's router."""
    trial.boot()
    trial.run(settings)
    trial.switch_off()
    trial.boot()
    network = network_of(trial)
    assert re.findall(r"inet (10\.77\.0\.\S+)", network) == second.split()
    trial.prepare(KNOWN, LOGIN, SUDO, QUESTION)
    trial.switch_off()
    with trial.waker() as owner:
        trial.unlock(owner)
    assert network_of(trial) == network
