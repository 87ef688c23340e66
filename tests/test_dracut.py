"""The dracut modules that `prepare.py` installs, and what examines their image."""

import contextlib
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import prepare
import pytest
from conftest import CHECKOUT, need, need_other_users, wait_for
from namespaces import hosts
from recorded import RECORDED
from simulated import MODULE, Server

ON_RAID = RECORDED["disks"]["RAID, LUKS, LVM"]
ON_LVM = RECORDED["disks"]["LVM in LUKS"]


def run_module(server: Server, commands: str, devices: str) -> str:
    """Run functions of module-setup.sh on a server with recorded disks."""
    (server.folder / "devices").write_text(devices)
    setup = [
        f"source {CHECKOUT}/server/dracut/46initrd-ssh/module-setup.sh",
        "require_binaries() { :; }; dwarn() { :; }; derror() { echo error: $*; }",
        "list_devices() { cat devices; }",
    ]
    script = "\n".join([*setup, commands])
    return server.run(f"bash -c '{script}'")


def test_dracuts_image_asks_without_end_and_keeps_the_disk(server: Server) -> None:
    table = (
        "md0_crypt UUID=x none luks,discard\n"
        "data UUID=y /etc/key luks\n"
        "swap UUID=z - x-initrd.attach,tries=2\n"
        "home UUID=w /etc/key x-initrd.attach\n"
    )
    server.write("/etc/crypttab", table)
    assert run_module(server, "print_crypttab", ON_RAID["disks"]).splitlines() == [
        "md0_crypt UUID=x none luks,discard,x-initrd.attach,tries=0",
        "swap UUID=z - x-initrd.attach,tries=2",
        "home UUID=w /etc/key x-initrd.attach",
    ]
    # Without mdadm.conf, the array may have another number.
    server.write("/etc/crypttab", "md0_crypt /dev/md0")
    known = 'blkid() { echo 5eed; echo "$@" >&2; }; print_crypttab'
    assert "md0_crypt UUID=5eed none" in run_module(server, known, ON_RAID["disks"])
    server.write("/etc/crypttab", "md0_crypt UUID=x")
    assert run_module(server, "print_crypttab", ON_RAID["disks"]) == (
        "md0_crypt UUID=x none luks,x-initrd.attach,tries=0\n"
    )


def test_dracuts_image_assembles_the_arrays_of_the_root_alone(server: Server) -> None:
    (server.folder / "mdadm").write_text(ON_RAID["mdadm"])
    (uuid,) = re.findall("(?m)^MD_UUID=(.*)$", ON_RAID["mdadm"])
    commands = "mdadm() { echo asked $*; cat mdadm; }; print_arrays"
    assert run_module(server, commands, ON_RAID["disks"]) == f"rd.md.uuid={uuid}\n"
    assert run_module(server, commands, ON_LVM["disks"]) == ""


@pytest.mark.quick
def test_dracuts_image_has_roots_login_shell(server: Server) -> None:
    """Without it, sshd refuses root."""
    server.write("/etc/passwd", "root:x:0:0:root:/root:/usr/bin/fish\nsshd:x:1:1\n")
    server.write("/etc/initrd-ssh/host_key", "x")
    install = "inst_multiple() { echo $*; }; inst_simple() { :; }; SYSTEMCTL=:; install"
    said = run_module(server, f"initdir=$PWD/image; {install}", ON_LVM["disks"])
    assert "-o bash /usr/bin/fish\n" in said
    assert server.run("cat image/etc/passwd") == "sshd:x:1:1\n"


def test_dracuts_module_refuses_an_image_that_nobody_can_unlock(server: Server) -> None:
    """Without an address or a key, or if a disk is on the network."""
    for name in ("lan.network", "authorized_keys"):
        said = run_module(server, "check; echo $?", ON_LVM["disks"])
        assert said.startswith(f"error: initrd-ssh: /etc/initrd-ssh/{name} is missing")
        assert said.endswith("\n1\n")
        server.write(f"/etc/initrd-ssh/{name}", "x")
    for device in ("sda disk iscsi", "nbd0 disk"):
        said = run_module(server, "check; echo $?", f"vda2_crypt crypt\n{device}\n")
        assert said.startswith("error: initrd-ssh: the root file system needs the net")
        assert said.endswith("\n1\n")
    assert run_module(server, "check; echo $?", ON_LVM["disks"]) == "255\n"


SSH = "/etc/initrd-ssh"
LAST = f"{prepare.MODULES}/99initrd-ssh-last"
COPIES = {  # files of the server by their place in the image
    "etc/systemd/network/00-lan.network": f"{SSH}/lan.network",
    "etc/systemd/network/01-others.network": f"{LAST}/others.network",
    "etc/initrd-ssh/authorized_keys": f"{SSH}/authorized_keys",
    "etc/initrd-ssh/host_key": f"{SSH}/host_key",
    "etc/initrd-ssh/sshd_config": f"{MODULE}/sshd_config",
    "usr/bin/cryptroot-unlock": f"{MODULE}/cryptroot-unlock",
    "usr/bin/clean-card": f"{MODULE}/clean-card",
}
NEEDED = (
    *("systemd-cryptsetup", "sshd", "systemd-reply-password", "systemd-networkd"),
    "clean-card.service",
)


def test_dracuts_image_is_examined(server: Server) -> None:
    """An image that was prepared and one after an undo."""
    image = server.folder / "dracut"
    server.write("/usr/bin/lsinitrd", f"#!/bin/sh\ncp -a {image}/. .\n", 0o755)
    server.write("/boot/image", "")
    for name in COPIES.values():
        server.write(name, name)

    def examine(state: str, *missing: str, options: str = "") -> str:
        shutil.rmtree(image, ignore_errors=True)
        table = {"etc/crypttab": f"vda2_crypt UUID=x none {options}\n"}
        for name, text in (COPIES | table | dict.fromkeys(NEEDED, "")).items():
            if name not in missing:
                image.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
                image.joinpath(name).write_text(text)
        command = f"sh server/examine {state} /boot/image 6.1 dracut vda2_crypt ''"
        return server.run(command, check=False)

    right = "x-initrd.attach,tries=0"
    assert examine("prepared", options=right) == ""
    for name, text in COPIES.items():
        said = examine("prepared", name, options=right)
        assert said == f"its {name} differs from {text}\n"
    for name in NEEDED:
        assert examine("prepared", name, options=right) == f"it has no {name}\n"
    for part in right.split(","):
        words = "its etc/crypttab does not have the right options"
        assert examine("prepared", options=part).startswith(words)
    assert examine("undone", *COPIES, *NEEDED[1:]) == ""
    assert "no systemd-cryptsetup" in examine("undone", *NEEDED)
    for line, wrong in (("rd.luks.uuid=x", False), ("quiet", True)):
        (server.folder / "cmdline").write_text(line)
        said = examine("undone", "etc/crypttab")
        assert ("etc/crypttab has no line for vda2_crypt" in said) == wrong


# What a server with systemd-networkd does, until clean-card has ended.
CLEAN = r"""
mount --make-rprivate /
mount -t tmpfs none /run
mount -o remount,bind,ro /sys # so systemd-networkd waits for no udev
mkdir -p /run/systemd /run/etc /run/work
mount -t overlay none /etc -o lowerdir=/etc,upperdir=/run/etc,workdir=/run/work
mkdir -p /etc/systemd/network /etc/initrd-ssh
printf '[Match]
Name=card
[Network]
Address=192.168.1.20/24
Gateway=192.168.1.1
'     >/etc/systemd/network/00-lan.network
cp others.network /etc/systemd/network/01-others.network
printf '[Match]
Kind=!*
Type=!loopback
[Network]
DHCP=yes
'     >/etc/systemd/network/zzzz-dracut-default.network
echo "Port 2222" >/etc/initrd-ssh/sshd_config
ip link add card type veth peer switch
ip link add used type veth peer unused
show() {
    ip -o address | grep -w inet
    ip route
    ip -br link
    (cd /proc/sys/net/ipv6/conf/card; grep . accept_ra addr_gen_mode disable_ipv6)
}
show >before
for card in switch used; do ip link set $card up; done
ip address add 192.168.9.1/24 dev used
/lib/systemd/systemd-networkd 2>networkd &
networkd=$!
until grep -q NETWORK_FILE=/etc /run/systemd/netif/links/* 2>/dev/null &&
    ip route | grep -q default; do sleep 0.1; done
show >during
printf '#!/bin/sh
date +%%s%%N >stopped
kill %s; sleep 0.5
' $networkd >/run/systemctl
chmod 755 /run/systemctl
mount --bind /run/systemctl "$(command -v systemctl)"
date +%s%N >begun
sh clean-card
show >after
"""


def clean(folder: Path, most: int, *, close: bool) -> dict[str, str]:
    """Run clean-card during a connection, which is closed when that is waited for.

    It waits for `most` seconds at most. Returns what the script has noted, by name.
    """
    need_other_users()  # or systemd-networkd cannot become its own
    for program in ("unshare", "systemctl", "systemd-networkd"):
        need(program)
    text = (CHECKOUT / "server/dracut/46initrd-ssh/clean-card").read_text()
    for old, new in (("+ 3", f"+ {most}"), ("sleep 0.1", "touch waits; sleep 0.1")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "clean-card").write_text(text)
    shutil.copy(CHECKOUT / "server/dracut/99initrd-ssh-last/others.network", folder)
    with hosts(1) as (server,), contextlib.ExitStack() as connection:
        listener = server.run(lambda: socket.create_server(("", 2222)))
        client = server.run(lambda: socket.create_connection(("127.0.0.1", 2222)))
        for end in (listener, client, listener.accept()[0]):
            connection.enter_context(end)
        alone = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c")
        command = [*server.command(), *alone, CLEAN]
        with subprocess.Popen(command, cwd=folder) as process:
            try:
                waits = folder / "waits"
                wait_for(lambda: waits.exists() or process.poll() is not None)
                if close:
                    (folder / "closed").write_text(str(time.time_ns()))
                    connection.close()
                assert process.wait(120) == 0
            finally:
                process.kill()
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.slow
def test_cards_are_left_as_they_were_found(tmp_path: Path) -> None:
    """Addresses, routes, and the settings of the kernel. dracut's own network settings
    do not count. Before that, the verdict on the passphrase reaches its client.
    """
    noted = clean(tmp_path, most=60, close=True)
    begun, closed, stopped = (int(noted[n]) for n in ("begun", "closed", "stopped"))
    assert begun < closed < stopped < begun + 50e9
    assert "192.168.1.20/24" in noted["during"]
    assert "default via 192.168.1.1" in noted["during"]
    assert "accept_ra:0" in noted["during"]
    assert "192.168.9.1/24" in noted["during"]
    assert re.search(r"(?m)^unused\S+ +DOWN ", noted["during"])
    assert noted["before"] == noted["after"]


@pytest.mark.slow
def test_a_connection_keeps_the_cards_for_three_seconds_at_most(tmp_path: Path) -> None:
    noted = clean(tmp_path, most=3, close=False)
    assert int(noted["stopped"]) - int(noted["begun"]) > 2e9  # it counts whole seconds
