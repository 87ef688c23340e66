"""What `prepare.py` refuses before it changes anything, and what undo makes of it."""

import json
import re
import subprocess
from typing import Any

import pytest
from conftest import CHECKOUT, each, wait_for
from facts import Refused, describe
from recorded import RECORDED, TABLE, find, probed
from simulated import KEY, PROGRAM, Server

LOCK = "/run/waker-prepare.lock"
# The first build waits until its folder is gone.
WAITS = "! mkdir $here/builds || while [ -e $here/builds ]; do sleep 0.05; done"


# ---- One run at a time ----


def test_a_second_run_is_refused_while_one_is_at_work(server: Server) -> None:
    """Whatever either of them does. Only root can open the lock, and undo leaves it."""
    for arguments in (f"--yes '{KEY}'", "--yes --undo"):
        server.spoil(WAITS)
        command = server.enter(f"exec env {PROGRAM} {arguments}")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
            wait_for((server.folder / "builds").exists)
            before = server.files()
            for others in (f"--yes '{KEY}'", "--yes --undo"):
                said = server.prepare(others, check=False)
                assert said.startswith("Nothing was changed on this server: `waker pr")
                assert said.endswith(
                    f" end it on the server, as root: kill {first.pid}\n"
                )
            assert server.files() == before
            (server.folder / "builds").rmdir()
            assert "The initrd of each kernel was examined." in first.communicate()[0]
            assert first.returncode == 0
        assert server.run(f"stat -c %a {LOCK}") == "600\n"
    server.spoil("")
    assert "The server is prepared." in server.prepare()


# ---- On recorded servers ----


def links_of(network: str, **changes: dict[str, Any]) -> str:
    """Return the links of a recorded network, with changes by interface."""
    links = {
        link["ifname"]: link for link in json.loads(probed(network=network)["links"])
    }
    for name, change in changes.items():
        links[name] = links.get(name, {}) | change
    return json.dumps([*links.values()])


def link_of(network: str, name: str) -> dict[str, Any]:
    links = json.loads(probed(network=network)["links"])
    return next(link for link in links if link["ifname"] == name)


VMBR0 = link_of("bridge", "vmbr0")
ROUTES = probed(network="bridge")["routes"]  # by vmbr0
BOND = {"master": "vmbr0", "addr_info": []}
VLAN = link_of("vlan", "vlan5") | {"ifname": "vmbr0.10"}
CABLE = {"flags": ["LOWER_UP"], "addr_info": [{"family": "inet"}]}
DRACUT = {"builder": "dracut"}
OMITS = "/etc/dracut.conf \n/etc/dracut.conf.d/own.conf x crypt\n"
DERIVED = "keyscript=/lib/cryptsetup/scripts/decrypt_derived"
KEYCTL = "keyscript=decrypt_keyctl"


def table(line: str) -> dict[str, str]:
    """Return a crypttab with another disk."""
    return {"crypttab": f"{TABLE}data UUID=x {line}\n"}


def half(package: str) -> dict[str, str]:
    """Return packages of which one is half installed."""
    return {"packages": f"{package} install half-configured\n{probed()['packages']}"}


def booted_by(name: str) -> dict[str, str]:
    return {"boot_loader": f"{name}\n", "root": "/boot in the encrypted root"}


# What a server has, the reason, and what the probes print.
REFUSALS: dict[str, tuple[str, dict[str, str]]] = {
    "sysvinit": ("it does not run systemd", {"init": "none\n"}),
    "Proxmox's kernel": (
        "proxmox-kernel-6.8-9 is half installed. First run `dpkg --configure -a`.",
        half("proxmox-kernel-6.8-9"),
    ),
    "Proxmox's old kernel": (
        "pve-kernel-6.2.16-3-pve is",
        half("pve-kernel-6.2.16-3-pve"),
    ),
    "Ubuntu's modules": ("linux-modules-6.8.0-9 is", half("linux-modules-6.8.0-9")),
    "a kernel without driver": (
        "kernel 6.1.0-9 has no driver vmxnet3 for eth0: remove that kernel, or build",
        {"missing_drivers": "6.1.0-9 vmxnet3\n"},
    ),
    "omit_dracutmodules": (
        "/etc/dracut.conf.d/own.conf makes dracut omit crypt, which waker needs",
        DRACUT | {"omitted": OMITS},
    ),
    "/boot not mounted": (
        "/boot is not mounted, although it is in /etc/fstab. Mount it.",
        {"boot": "unmounted\n", "boot_disks": probed()["disks"]},
    ),
    "a tailnet": (
        "nothing listens on port 22 of 192.168.1.20, so waker could not see that",
        {"listening": "100.64.0.9:22\n[::]:22\n192.168.1.20:2222\n"},
    ),
    "decrypt_keyctl": (
        "the keyscript decrypt_keyctl asks a person to open data, and waker does not",
        table(f"none luks,{KEYCTL}"),
    ),
    "decrypt_keyctl in the initrd": (
        "decrypt_keyctl asks",
        table(f"id luks,{KEYCTL},initramfs"),
    ),
    "decrypt_keyctl with dracut": (
        "decrypt_keyctl asks",
        table(f"none x-initrd.attach,{KEYCTL}") | DRACUT,
    ),
    "decrypt_derived": (
        "systemd runs no keyscript.) In /etc/crypttab, add initramfs (the initrd opens",
        table(f"vda2_crypt luks,{DERIVED}"),
    ),
    "passdev": (
        "data may ask",
        table("/dev/disk/by-label/x:/key luks,keyscript=passdev"),
    ),
    "a keyscript, dracut": (
        "data has a keyscript, which neither dracut nor systemd runs. In /etc/cryptt",
        table(f"vda2_crypt {DERIVED},x-initrd.attach") | DRACUT,
    ),
    "a TPM, later": (
        "add x-initrd.attach (the initrd opens it), or add nofail or noauto, there and",
        table("none luks,tpm2-device=auto") | DRACUT,
    ),
    "a detached header": (
        "vda2_crypt has a detached header",
        {"crypttab": f"{TABLE.strip()},header=/x\n", "tokens": "vda2_crypt \n"}
        | DRACUT,
    ),
    "ZFS on LUKS": (
        "it uses ZFS. waker can neither unlock that, nor find LUKS disks below it.",
        {"file_systems": "zfs\next4\n"},
    ),
    "a bond": ("bond0 is a bond, which the initrd cannot use.", {"network": "bond"}),
    "a bond's card": ("bond0 is a bond, ", {"network": "bond", "card": "eth0"}),
    "a VLAN": ("vlan5 is a VLAN, which the initrd cannot use.", {"network": "vlan"}),
    "a bridge over a bond": (
        "bond0 is a bond, ",
        {"links": links_of("bond", bond0=BOND, vmbr0=VMBR0), "routes": ROUTES},
    ),
    "a VLAN of a bridge": (
        "vmbr0.10 is a VLAN, ",
        {
            "links": links_of("bridge", vlan=VLAN),
            "routes": ROUTES.replace("vmbr0", "vmbr0.10"),
        },
    ),
    "Open vSwitch": (
        "vmbr0 is Open vSwitch, which",
        {
            "links": links_of(
                "bridge", vmbr0={"linkinfo": {"info_kind": "openvswitch"}}
            ),
            "routes": ROUTES,
        },
    ),
    "Wi-Fi and a cable": (
        "Waking and unlocking need a cable. Use the one in eth0: --interface eth0.",
        {"network": "wifi", "links": links_of("wifi", eth0=CABLE)},
    ),
    "systemd-boot": (
        "it boots with systemd-boot 2, not with GRUB from /boot, which is all that",
        booted_by("systemd-boot 2"),
    ),
    "a unified image": (
        "it boots with systemd-stub 257",
        booted_by("systemd-stub 257"),
    ),
    "Proxmox's ESP": (
        "it boots with proxmox-boot-tool",
        booted_by("proxmox-boot-tool"),
    ),
}


@each("reason recordings", REFUSALS)
def test_a_server_is_refused_with_the_reason(
    reason: str, recordings: dict[str, str]
) -> None:
    with pytest.raises(Refused, match=re.escape(reason)):
        find(**recordings)


ACCEPTED: dict[str, dict[str, str]] = {
    "GRUB": {"boot_loader": "GRUB 2.12-9\n"},
    "GRUB without its name": {"boot_loader": "Linux EFI stub 7.3.0\n"},
    "a keyscript of the swap space": table(f"vda2_crypt swap,{DERIVED}")
    | {"swap": "data crypt \nvda3 part\n"},
    "a socket of the card": {"listening": "*%eth0:22\n"},
    "no driver for another card": {"missing_drivers": "6.1.0-9-amd64 e1000\n"},
    "a keyscript in the initrd": table(f"none luks,{DERIVED},initramfs"),
    "a keyscript of nobody's": table(f"none luks,{KEYCTL},noauto"),
    "a module after all": DRACUT | {"omitted": f"{OMITS}/etc/dracut.conf.d/z.conf \n"},
}


@each("recordings", {name: (row,) for name, row in ACCEPTED.items()})
def test_what_does_no_harm_is_accepted(recordings: dict[str, str]) -> None:
    assert find(**recordings).disks == ["vda2_crypt"]


def test_wi_fi_alone_is_refused_without_advice() -> None:
    for links in (links_of("wifi"), links_of("wifi", eth0={"flags": ["LOWER_UP"]})):
        with pytest.raises(Refused, match=r"need a cable\.$"):
            find(network="wifi", links=links)


def test_dracut_gets_the_package_that_opens_the_disk() -> None:
    """If it is a package of its own. Otherwise, systemd has it."""
    for builder, path in (("dracut", ""), ("initramfs-tools", ""), ("dracut", "/x\n")):
        packages = probed(builder=builder)["packages"]
        packages = packages.replace("systemd-cryptsetup install installed\n", "")
        facts = find(builder=builder, packages=packages, systemd_cryptsetup=path)
        is_missing = (builder, path) == ("dracut", "")
        assert ("systemd-cryptsetup" in facts.missing) == is_missing


def test_what_opens_the_disk_by_itself_is_said() -> None:
    tokens = 'vda2_crypt {"tokens": {"0": {"type": "clevis"}}}\n'
    for helper, package in (
        ("Clevis", "clevis-initramfs"),
        ("Mandos", "mandos-client"),
    ):
        packages = f"{probed()['packages']}{package} install installed\n"
        *_, last = describe(find(packages=packages, tokens=tokens))
        assert last.startswith(
            f"vda2_crypt opens by itself, with {helper}; waker is ask"
        )
    assert find(tokens=tokens).helpers == {}  # nothing of Clevis is in the initrd


# ---- On simulated servers ----


def probe(server: Server, name: str) -> str:
    """Return what a function of probes.sh prints there."""
    script = f"{CHECKOUT}/server/probes.sh"
    return server.run(f"sh {script} {name} 2>/dev/null", check=False)


def test_systemd_counts_only_if_it_runs(server: Server) -> None:
    """Not its program, which may be there without."""
    assert probe(server, "init") == "none\n"
    server.run("mkdir -p /run/systemd/system")
    assert probe(server, "init") == ""


@pytest.mark.quick
def test_dracuts_settings_are_read_as_dracut_does(server: Server) -> None:
    """In the order of their names; the owner's file hides one of the same name."""
    own, nine = "/etc/dracut.conf.d/own.conf", "/usr/lib/dracut/dracut.conf.d/9.conf"
    server.write(own, 'omit_dracutmodules+=" crypt\n dm "\n')
    server.write(nine, 'omit_dracutmodules=" dm "\n')
    server.write("/usr/lib/dracut/dracut.conf.d/own.conf", "exit 1\n")
    lines = probe(server, "omitted").splitlines()
    assert lines == ["/etc/dracut.conf", f"{nine} dm", f"{own} dm crypt dm"]


@pytest.mark.quick
def test_a_boot_loader_gives_its_name(server: Server) -> None:
    """In UTF-16, behind four bytes of attributes."""
    variables = "/sys/firmware/efi/efivars"
    server.run(f"mount -t tmpfs none /sys/firmware; mkdir -p {variables}")
    assert probe(server, "boot_loader") == ""
    for name, value in (
        ("LoaderInfo", "systemd-boot 2"),
        ("StubInfo", "systemd-stub 2"),
    ):
        file = server.path(f"{variables}/{name}-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f")
        file.write_bytes(b"\6\0\0\0" + f"{value}\0".encode("utf-16-le"))
    server.write("/etc/kernel/proxmox-boot-uuids", "")
    names = "systemd-boot 2\nsystemd-stub 2\nproxmox-boot-tool\n"
    assert probe(server, "boot_loader") == names


def test_each_kernel_is_asked_for_each_cards_driver(server: Server) -> None:
    driver = "/sys/class/net/eth0/device/driver"
    server.run(f"mount -t tmpfs none /sys/class/net; mkdir -p {driver} /lib/modules/9")
    server.run(f"ln -s /sys/class/net {driver}/module")
    versions = "#!/bin/sh\n[ $1 = sort ] && cat || echo 9\n"
    server.write("/usr/bin/linux-version", versions, 0o755)
    assert probe(server, "missing_drivers") == "9 net\n"
    server.write("/usr/sbin/modinfo", '#!/bin/sh\n[ "$*" = "-k 9 net" ]', 0o755)
    assert probe(server, "missing_drivers") == ""


def test_boot_is_mounted_and_can_be_written_or_not(server: Server) -> None:
    server.write("/etc/fstab", "/boot /srv none bind\nnone /boot tmpfs\n")
    assert probe(server, "boot") == ""
    server.run("mount -o remount,ro /boot")
    assert probe(server, "boot") == "read-only\n"
    server.run("umount /boot")
    assert "unmounted\n" in probe(server, "boot")
    server.write("/etc/fstab", "/boot /srv none bind\n")
    assert "unmounted" not in probe(server, "boot")


def record(server: Server, kept: str) -> None:
    """Record that a copy of the image was begun, as the first change is."""
    change = {"kind": "COPY", "name": kept, "text": server.image, "before": None}
    server.write("/var/lib/waker-prepare/record.json", json.dumps([change]))


@pytest.mark.quick
def test_undo_needs_a_writable_boot_only_to_remove_what_is_there(
    server: Server,
) -> None:
    """As 4.0.0 left it: it had begun to copy the image. Later, there is one."""
    image = server.image
    server.run("mount -o remount,ro /boot")
    record(server, f"{image}.before-waker")
    server.write("/var/lib/waker-prepare/unfinished", "")
    said = server.prepare(check=False)
    assert said.startswith(
        "Nothing was changed on this server: /boot cannot be written"
    )
    assert "\nThe server is half prepared. " in said
    assert ".before-waker" not in said  # there is none
    assert "Undone." in server.undo()
    server.run("mount -o remount,rw /boot")
    server.prepare()
    server.run("mount -o remount,ro /boot")
    before = server.files()
    assert "changed on this server: /boot cannot be written" in server.undo(check=False)
    assert server.files() == before
    server.run("mount -o remount,rw /boot")
    assert "Undone." in server.undo()


def test_undo_needs_no_systemd(server: Server) -> None:
    bare = server.files_of_the_owner()
    server.prepare()
    server.run("systemctl disable waker-wake")  # as 4.0.0 left it on such a server
    server.run("rm $(command -v systemctl)")
    server.set(init="none\n")
    said = server.undo()
    assert "Undone." in said
    assert "Left:" not in said
    assert server.files_of_the_owner() == bare


@pytest.mark.quick
def test_undo_accepts_images_that_never_had_systemd_cryptsetup(server: Server) -> None:
    """As 4.0.0 left a server with dracut. But it puts none in place of one that has it.

    In place of dracut's images are archives. The kernel knows the disk.
    """
    server.set(**RECORDED["systems"]["dracut"] | {"kernels": f"{server.kernel}\n"})
    server.run("echo rd.luks.uuid=x >cmdline; mkdir -p files/etc/initrd-ssh")
    server.write("/usr/bin/lsinitrd", '#!/bin/sh\nexec tar -xf "$2"\n', 0o755)
    build = f'echo >>{server.folder}/built; tar -cf "$1" -T /dev/null\n'
    (server.folder / "server/dracut/build").write_text(build)
    kept, key = f"{server.image}.before-waker", "etc/initrd-ssh/authorized_keys"
    server.run(f"cd files; touch {key} systemd-cryptsetup")
    for content in ("-T /dev/null", key):
        server.run(f"tar -C files -cf {server.image} {content}; touch {kept}")
        record(server, kept)
        assert "Undone." in server.undo()
        assert server.run("ls /boot/init*") == f"{server.image}\n"
        assert server.count_builds() == (content == key)
        assert server.run(f"tar -tf {server.image}") == ""
    server.run(f"tar -C files -cf {server.image} {key} systemd-cryptsetup")
    record(server, kept)
    assert "is not used: it has no systemd-cryptsetup" in server.undo(check=False)
    assert server.run(f"tar -tf {server.image}") == f"{key}\nsystemd-cryptsetup\n"
