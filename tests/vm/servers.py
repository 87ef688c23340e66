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
from computer import PATIENCE, STILL_LOCKED
from conftest import CHECKOUT, need, wait_for
from guests import ADDRESS
from trial import CONFIG, KNOWN, LOGIN, QUESTION, SUDO, Trial, trial_of

pytestmark = pytest.mark.timeout(4 * 3600)
# What the network looks like, and what failed at boot.
NETWORK = """
ip -o -4 address | sed 's/^[0-9]*: //'
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
CUT_SECONDS = 90  # that the emulation of a preparation works, or nearly so


@pytest.fixture(params=BARE, ids=lambda bare: bare.name)
def trial(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trial]:
    with trial_of(request.param, tmp_path) as trial:
        yield trial


def test_one_command_prepares_a_server(trial: Trial) -> None:
    trial.boot()
    trial.run(LATE)
    network, before = trial.run(NETWORK), trial.run(SNAPSHOT)
    assert f"{ADDRESS}/24" in network

    shown = trial.prepare(KNOWN, LOGIN, SUDO, QUESTION)
    assert shown.count(trial.settings()["WAKER_PIN"]) == 1
    check_again(trial)
    assert WAKES in trial.switch_off()
    with trial.waker() as owner:
        start = owner.start("wrong", trial.wake, STILL_LOCKED)
        assert start["outcome"] == "wrong_passphrase", start
        assert [owner.unlock("wrong")[0] for _ in range(9)] == [400] * 9
        trial.unlock(owner)
    # The network is as if nobody had used it before the boot.
    assert trial.run(NETWORK) == network

    kernel = trial.run(UPGRADE).strip()  # which gets a right image by itself
    trial.took("kernel upgrade")
    check_again(trial)
    assert WAKES in trial.switch_off()
    with trial.waker() as owner:
        trial.unlock(owner)
    assert trial.run("uname -r").strip() == kernel
    assert trial.run(NETWORK) == network
    trial.switch_off()
    trial.boot(menu=LAST_ENTRY)  # the image that was kept
    assert trial.run("uname -r").strip() != kernel
    assert trial.run(NETWORK) == network

    shown = trial.prepare(LOGIN, SUDO, QUESTION, options=["--undo"])
    changed = {*before.splitlines()} ^ {*trial.run(SNAPSHOT).splitlines()}
    names = {line.split()[-1] for line in changed if kernel not in line}
    left = re.findall(r"Left: (?:the package )?([^ ,]+?)\.?[ ,\n]", shown)
    assert names <= {"/boot/grub/grub.cfg", *left}
    assert WAKES not in trial.switch_off()
    trial.boot()
    assert trial.run(NETWORK) == network


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


@pytest.mark.parametrize("trial", [FIRST] * 5, indirect=True)
def test_a_power_cut_does_no_harm(trial: Trial) -> None:
    computer = trial.computer
    trial.boot()
    private = trial.box / CONFIG / "ssh_key"
    private.parent.mkdir()
    make_key = [need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f"]
    subprocess.run([*make_key, str(private)], check=True)
    key = private.with_suffix(".pub").read_text().strip()
    tar = [need("tar"), "-C", str(CHECKOUT / "server"), "-c", "."]
    packed = subprocess.run(tar, check=True, capture_output=True).stdout
    computer.run("tar -C /root -x", packed)
    assert computer.qemu
    pid = computer.qemu.pid
    moment = random.uniform(1, CUT_SECONDS)
    ends = processor_seconds(pid) + moment
    prepare = f"python3 /root/prepare.py --yes '{key}'"
    trial.run(f"setsid {prepare} </dev/null >/dev/console 2>&1 &")
    wait_for(
        lambda: processor_seconds(pid) > ends or PREPARED in computer.console,
        seconds=PATIENCE,
    )
    computer.cut_power()
    print(f"CUT after {moment:.0f} s:", *computer.console.splitlines()[-2:], sep="\n")
    trial.boot()
    trial.prepare(KNOWN, LOGIN, SUDO, options=["--yes"])
    trial.switch_off()
    with trial.waker() as owner:
        trial.unlock(owner)
