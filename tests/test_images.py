"""The initrds that `prepare.py` builds on simulated servers, and their hooks."""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import CHECKOUT, need
from simulated import DROPBEAR, KEY, Server


def test_the_new_image_is_there_for_grub_which_reads_no_journal(server: Server) -> None:
    if not os.access("/dev/loop-control", os.W_OK):
        pytest.skip("need loop devices")
    server.run(
        """truncate -s 100M boot.img; mke2fs -q -t ext4 boot.img
        mkdir boot view; mount -o loop boot.img boot; cp -a /boot/. boot; sync
        mount --bind boot /boot"""
    )
    server.prepare()
    server.run("cp boot.img view.img; mount -o loop,ro,noload view.img view")
    assert server.run("cd view; sha256sum initrd*") == server.run(
        "cd boot; sha256sum initrd*"
    )


SPOILED = """
rm root-x/.ssh/authorized_keys etc/dropbear/dropbear_ed25519_host_key
rm sbin/cryptsetup sbin/dropbear bin/cryptroot-unlock
echo IP=1.2.3.4 >>conf/conf.d/waker
sed -i s/,tries=0// cryptroot/crypttab
"""
WRONG = (
    "authorized_keys differs",
    "host_key differs",
    "it has no cryptsetup",
    "it has no dropbear",
    "it has no cryptroot-unlock",
    "its conf/conf.d/waker differs",
    "does not have the right options",
)
# As in Ubuntu's images, another archive has the drivers.
EARLY = """
mkdir -p early/lib/modules
touch early/lib/modules/missing.ko
(cd early; find . | cpio --quiet -o -H newc) >early.cpio
rm -r early
gzip() { cat early.cpio; command gzip; }
"""


@pytest.mark.quick
def test_a_wrong_image_is_never_put_in_place(server: Server) -> None:
    """Neither by the undo, which needs less of it."""
    image = server.image
    before = server.run(f"sha256sum <{image}")

    def fails(spoil: str, *reasons: str, arguments: str = f"--yes '{KEY}'") -> None:
        server.spoil(spoil)
        said = server.prepare(arguments, check=False)
        assert f"FAILED: the new {image} is not used: " in said, said
        assert [why for why in reasons if why not in said] == []
        assert "WAKER_" not in said
        assert server.run(f"sha256sum <{image}") == before

    fails(SPOILED, *WRONG)
    fails(": >cryptroot/crypttab", "has no line for vda2_crypt")
    # As a full disk may leave it: empty on the server, and then in the image.
    name = "dropbear_ed25519_host_key"
    key = server.path(f"{DROPBEAR}/{name}").read_bytes()
    fails(f": >{DROPBEAR}/{name} >etc/dropbear/{name}", f"{name} differs")
    server.path(f"{DROPBEAR}/{name}").write_bytes(key)
    # modinfo knows no such module, and calls it missing.
    server.set(drivers="eth0 /lib/modules/missing\n")
    fails("", "it has no driver missing")
    server.write(f"{DROPBEAR}/dropbear.conf", "")  # its owner may have emptied it
    fails("echo old >etc/dropbear/dropbear.conf", "dropbear.conf differs")
    server.spoil(EARLY)
    assert "The server is prepared." in server.prepare()

    before = server.run(f"sha256sum <{image}")
    again = "restart it, run `waker prepare --undo` again. (If it does not boot"
    kept = f"use the kept image, {image}.before-waker.)"
    undo = "--yes --undo"
    fails("rm sbin/cryptsetup", "no cryptsetup", again, kept, arguments=undo)
    assert server.run(f"ls {image}*") == f"{image}\n{image}.before-waker\n"
    server.spoil("")
    assert "Undone" in server.undo()


def test_an_image_that_does_not_fit_is_left_for_a_second_run(server: Server) -> None:
    old = server.run(f"sha256sum <{server.image}")
    server.run("head -c 70M /dev/zero >/boot/other")
    server.spoil("head -c 40M /dev/urandom >large")
    said = server.prepare(check=False)
    assert "FAILED: /boot needs 41 MiB free for the new initrd.img-" in said
    assert (
        "\nThe server is half prepared. Before you restart it, run the same c" in said
    )
    assert server.run(f"sha256sum <{server.image}") == old
    server.run("rm /boot/other")
    assert "The server is prepared." in server.prepare()


def test_every_kernels_image_is_built_and_the_newest_first(server: Server) -> None:
    """An old kernel may lack the driver of the network card."""
    older, newer = "/boot/initrd.img-6.0.0-9-amd64", server.image
    server.set(kernels=f"6.0.0-9-amd64\n{server.kernel}\n", running="6.0.0-9-amd64\n")
    server.run(f"cp {newer} {older}")
    old = server.run(f"sha256sum <{older}")
    server.spoil("case $image in */initrd.img-6.0.0*) rm sbin/dropbear ;; esac")
    hook = f'#!/bin/sh\necho "$@" >>{server.folder}/copied\n'  # of a boot loader
    server.write("/etc/initramfs/post-update.d/copy", hook, 0o755)
    said = server.prepare(check=False)
    assert f"FAILED: the new {older} is not used" in said, said
    assert server.run(f"sha256sum <{older}") == old
    assert server.run(f"sha256sum <{newer}") != old

    server.spoil("")
    server.count_builds()
    server.run("head -c 80M /dev/zero >/boot/x.waker-new")  # of an interruption
    server.prepare()
    assert server.count_builds() == 1
    copied = {*server.run("cat copied").splitlines()}
    assert copied == {f"{server.kernel} {newer}", f"6.0.0-9-amd64 {older}"}
    assert server.run("ls /boot/*.before-waker") == f"{older}.before-waker\n"
    server.run(f"cp {older}.before-waker {older}")
    server.prepare()
    assert server.count_builds() == 1


def test_a_build_that_fails_leaves_no_file(tmp_path: Path) -> None:
    """It could fill /boot, so that apt cannot build another image either."""
    called = "echo $*, hooks: $NO_POST_UPDATE_HOOKS"  # what build asks for
    script = f'#!/bin/sh\n{called}\necho part >"$2"\nexit 1\n'
    for name in ("mkinitramfs", "dracut", "dropbearkey"):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    asked = {
        "initramfs-tools": "-o image 6.1, hooks:\n",
        "dracut": "--force image 6.1, hooks: 1\n",
    }
    for builder, call in asked.items():
        build = ["sh", f"{CHECKOUT}/server/{builder}/build", "image", "6.1"]
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        ended = subprocess.run(
            build, env=path, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode
        assert ended.stdout.endswith(call)
        assert not (tmp_path / "image").exists()


def test_a_build_makes_the_host_key_that_an_old_dropbear_lacks(tmp_path: Path) -> None:
    build = (CHECKOUT / "server/initramfs-tools/build").read_text()
    key = tmp_path / "dropbear_ed25519_host_key"
    script = build.replace(DROPBEAR, str(tmp_path)).replace("mkinitramfs", "echo")
    for _ in range(2):
        subprocess.run(["sh", "-ec", script, "sh", "image", "6.1"], check=True)
        made = subprocess.check_output([need("dropbearkey"), "-y", "-f", str(key)])
        assert b"ssh-ed25519 " in made


def test_the_kept_image_is_removed_with_its_kernel(server: Server) -> None:
    server.prepare()
    kept, hook = f"{server.image}.before-waker", "/etc/kernel/postrm.d/waker"
    server.run(f"{hook} 6.9.9-other /boot/vmlinuz-6.9.9-other")
    server.run(f"DEB_MAINT_PARAMS='upgrade 6' {hook} {server.kernel} /boot/x")
    assert server.run(f"ls {kept} /boot/grub/custom.cfg")
    server.run(f"{hook} {server.kernel} /boot/vmlinuz-{server.kernel}")
    left = server.run(f"ls {server.image}* /boot/grub")
    assert left == f"{server.image}\n\n/boot/grub:\ngrub.cfg\n"
    # There is no reason to keep another.
    assert "Nothing was changed" in server.prepare()


@pytest.mark.quick
def test_the_hook_adds_the_drivers_of_card_and_bus(server: Server) -> None:
    server.set(drivers="eth0 /lib/modules/card /lib/modules/phy\n")
    server.prepare(check=False)  # there are no such modules
    functions = 'manual_add_modules() { echo "$@"; }\nsys_walk_mod_add() { echo $1; }\n'
    server.write("/usr/share/initramfs-tools/hook-functions", functions)
    device = "/sys/class/net/eth0/device"
    server.run(f"mount -t tmpfs none /sys/class/net; mkdir -p {device}")
    assert server.run("/etc/initramfs-tools/hooks/waker") == f"card phy\n{device}\n"


def test_the_hook_lets_tries_of_the_owners_own_stay(server: Server) -> None:
    """And it ends, even if the card has another name by now, or is gone."""
    lines = {
        "a UUID=x none luks": "a UUID=x none luks,tries=0",
        "a UUID=x none luks,tries=5": "a UUID=x none luks,tries=5",
        "a UUID=x none": "a UUID=x none tries=0",
        "a UUID=x /key luks": "a UUID=x /key luks",
        "a UUID=x none luks,keyscript=/x": "a UUID=x none luks,keyscript=/x",
    }
    server.prepare()
    copy = server.folder / "image/cryptroot/crypttab"
    copy.parent.mkdir(parents=True)
    copy.write_text("\n".join(lines))
    hook = "/etc/initramfs-tools/hooks/waker"
    server.run(f"sed -i s/eth0/gone/ {hook}; DESTDIR=image {hook}")
    assert copy.read_text().splitlines() == [*lines.values()]


def test_ubuntus_initrd_leaves_nothing_to_netplan(server: Server) -> None:
    """An image without that is built anew, if there is netplan."""
    server.prepare()
    server.count_builds()
    server.write("/usr/sbin/netplan", "", 0o755)
    script = "scripts/init-bottom/waker"
    said = server.prepare(check=False)
    assert f"its {script} differs" in said  # the stand-in for mkinitramfs has none
    server.write("/run/netplan/eth0.yaml", "network: {}\n")
    assert server.run(f"/etc/initramfs-tools/{script} prereqs; ls /run/netplan")
    assert server.run(f"/etc/initramfs-tools/{script}; ls /run/netplan") == ""
