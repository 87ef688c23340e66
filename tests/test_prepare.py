"""`prepare.py`: what it makes of recorded servers, and what it does to simulated ones.

The recordings are what the commands of prepare.ini printed: of networks and disks in a
virtual machine with Debian 12, and of packages and kernels in Debian 12 and 13. A
simulated server is this computer with folders of its own in a mount namespace, where
prepare.py sees a recorded network and disk. Whole servers are tested by `make test-vm`.
"""

import configparser
import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import prepare
import pytest
from conftest import CHECKOUT, need, need_root

SERVERS = CHECKOUT / "tests/support/servers"
RECORDED = json.loads((SERVERS / "recorded.json").read_text())
GRUB = (SERVERS / "grub.cfg").read_text()
KEY = (
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIMKBvxKmFbCAJGv1tnxbjGBE" + "A" * 20 + " waker"
)
LIMITED = (
    "no-port-forwarding,no-agent-forwarding,no-X11-forwarding,no-pty,"
    f'command="cryptroot-unlock" {KEY}\n'
)
OWN_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ" + "B" * 42 + " me"
TABLE = "vda2_crypt UUID=00000000-0000-4000-8000-000000000001 none luks,discard\n"
MARK = prepare.MARK
TOOLS = "/etc/initramfs-tools"
BOX = "192.168.1.2 50000 192.168.1.20 22"


def seen(
    system: str = "initramfs-tools",
    network: str = "one card",
    disks: str = "LVM in LUKS",
    **others: str,
) -> dict[str, str]:
    """Put recordings together; `others` replace what they say."""
    whole = {"crypttab": TABLE, "running": "", "grub": GRUB}
    for kind, name in (("systems", system), ("networks", network), ("disks", disks)):
        whole |= RECORDED[kind][name]
    return whole | {name.replace("_", " "): text for name, text in others.items()}


def facts(box: str = BOX, card: str = "", **recordings: str) -> dict[str, str]:
    return prepare.understand(seen(**recordings), card, box)


def plan(**recordings: str) -> dict[str, str]:
    """Return what each file, or package, of a plan is to be."""
    known = facts(**recordings)
    files = prepare.read_files(known["builder"])
    return {c.name: c.text for c in prepare.make_plan(known, KEY, "menu", files)}


# ---- Facts ----


def test_the_builder_is_the_one_that_is_wanted() -> None:
    """Even if an interruption left it half-installed, or dracut's parts are there."""
    assert facts()["builder"] == "initramfs-tools"
    assert facts(system="dracut")["builder"] == "dracut"
    text = RECORDED["systems"]["dracut"]["packages"]
    broken = text.replace("dracut install installed", "dracut install half-configured")
    assert broken != text
    assert facts(system="dracut", packages=broken)["builder"] == "dracut"
    removed = text.replace("dracut install installed", "dracut deinstall config-files")
    with pytest.raises(prepare.Refused, match="neither initramfs-tools nor dracut"):
        facts(system="dracut", packages=removed)


def test_only_what_is_missing_is_installed() -> None:
    assert facts()["missing"] == "dropbear-initramfs ethtool"
    assert facts(system="dracut")["missing"] == "dracut-network ethtool"


@pytest.mark.parametrize(
    ("network", "box", "expected"),
    [
        ("one card", BOX, "eth0 192.168.1.20/24 192.168.1.1 vmxnet3"),
        ("one card", "", "eth0 192.168.1.20/24 192.168.1.1 vmxnet3"),
        ("two cards", "", "eth0 192.168.1.20/24 192.168.1.1 vmxnet3"),
        ("two cards", "10.9.9.9 50000 10.0.0.5 22", "eth1 10.0.0.5/8 10.0.0.1 e1000"),
        ("bridge", BOX, "eth0 192.168.1.20/24 192.168.1.1 vmxnet3"),
    ],
)
def test_the_card_is_the_one_that_leads_to_the_box(
    network: str, box: str, expected: str
) -> None:
    """Even behind a bridge. Without a box, it is that of the default route."""
    name = f"{network}, asked by the box" if box and network == "two cards" else network
    known = facts(box, network=name)
    shown = " ".join(known[n] for n in ("card", "address", "router", "drivers"))
    assert shown == expected


def test_the_mac_address_is_the_permanent_one() -> None:
    assert facts(network="bridge")["mac"] == "52:54:00:12:34:56"
    assert '"address":"02:00:00:00:00:99"' in seen(network="bridge")["links"]


def test_the_address_is_the_one_that_the_box_reaches() -> None:
    """A card may have others, which are those of services."""
    name = "two cards, asked by the box"
    links = json.loads(seen(network=name)["links"])
    for link in links:
        link["addr_info"].reverse()
    assert [a["local"] for a in links[2]["addr_info"]][1:] == ["10.0.0.9", "10.0.0.5"]
    known = facts("10.9.9.9 1 10.0.0.5 22", network=name, links=json.dumps(links))
    assert known["address"] == "10.0.0.5/8"


def test_an_address_from_dhcp_is_to_be_reserved() -> None:
    name = "two cards, asked by the box"
    assert "reserve" in facts("10.9.9.9 1 10.0.0.5 22", network=name)["DHCP"]
    assert facts()["DHCP"] == ""


def test_a_named_card_is_taken() -> None:
    for name in ("two cards", "two cards, asked by the box"):
        known = facts("", "eth1", network=name)
        assert (known["card"], known["host"]) == ("eth1", "10.0.0.5")
    # The address of a card in a bridge is the bridge's.
    assert facts("", "eth0", network="bridge")["host"] == "192.168.1.20"
    with pytest.raises(prepare.Refused, match=r"no card enp9s0\. It has eth0, eth1, "):
        facts("", "enp9s0")


@pytest.mark.parametrize(
    ("system", "box", "ports", "options", "expected"),
    [
        ("initramfs-tools", BOX, "", "", "22 2222"),
        ("initramfs-tools", "a 1 b 2222", "", "", "2222 2222"),
        ("dracut", "a 1 b 2222", "", "", "2222 2223"),
        (
            "initramfs-tools",
            "",
            "0.0.0.0:2200\n[::]:2200\n[::]:22 (Stream)",
            "",
            "2200 2222",
        ),
        ("initramfs-tools", "", "[::]:2022 (Stream)\n", "", "2022 2222"),
        ("initramfs-tools", BOX, "", "-p 222 -s -j -k", "22 222"),
        (
            "initramfs-tools",
            BOX,
            "",
            "-s -p192.168.1.20:99 -c cryptroot-unlock",
            "22 99",
        ),
        ("initramfs-tools", BOX, "", "-sjkp 222", "22 222"),
        ("initramfs-tools", BOX, "", "-s", "22 22"),
    ],
)
def test_the_ports_are_the_owners_or_do_not_collide(
    system: str, box: str, ports: str, options: str, expected: str
) -> None:
    known = facts(box, system=system, ssh_ports=ports, own_options=options)
    assert f"{known['system port']} {known['initrd port']}" == expected


def test_forwarded_ports_are_no_ssh_server() -> None:
    """`ssh -X` and `ssh -R` make sshd listen, too, on the loopback interface."""
    text = 'LISTEN 0 128 127.0.0.1:6010 0.0.0.0:* users:(("sshd",pid=9,fd=7))\n'
    real = 'LISTEN 0 128 [::]:2200 [::]:* users:(("sshd",pid=7,fd=4))\n'
    settings = prepare.SETTINGS["look"]["ssh ports"].partition("; systemctl")[0]
    command = settings.replace("ss -Hltnp", f"printf '%s' '{text}{real}'")
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=True)
    assert done.stdout == b"[::]:2200\n"


@pytest.mark.parametrize(
    ("disks", "expected"),
    [
        ("LVM in LUKS", "vda2_crypt"),
        ("LUKS, btrfs with a subvolume", "cryptroot"),
        ("btrfs of two encrypted disks", "cryptroot cryptroot2"),
        ("RAID, LUKS, LVM", "md0_crypt"),
    ],
)
def test_the_disks_are_those_below_the_root(disks: str, expected: str) -> None:
    table = "".join(f"{name} UUID=x none luks\n" for name in expected.split())
    assert facts(disks=disks, crypttab=table)["disks"] == expected


# ---- Refusals ----

REFUSALS: dict[str, tuple[str, dict[str, str]]] = {
    "no default route": ("no default route", {"network": "no route"}),
    "no address": ("has no IPv4 address", {"network": "no address"}),
    "bond": ("bond0 is not a physical card", {"network": "bond"}),
    "VLAN": ("vlan5 is not a physical", {"network": "vlan"}),
    "tunnel": ("wg0 is not a physical", {"network": "wireguard"}),
    "Wi-Fi": ("wlan0 is Wi-Fi", {"network": "wifi"}),
    "two cards in a bridge": (
        "vmbr0 has 2 physical cards, not 1",
        {"network": "bridge of two cards"},
    ),
    "a bond in a bridge": (
        "vmbr0 has 0 physical cards, not 1",
        {"network": "bridge of a bond"},
    ),
    "not encrypted": ("is not encrypted. There is nothing", {"disks": "not encrypted"}),
    "/boot in the encrypted root": (
        "/boot is encrypted",
        {"disks": "/boot in the encrypted root"},
    ),
    "/boot encrypted apart": (
        "/boot is encrypted",
        {"disks": "/boot encrypted apart"},
    ),
    "ZFS": ("uses ZFS", {"file_systems": "zfs\next4\n", "disks": "not encrypted"}),
    "iSCSI": ("on the network", {"disks ": "cryptroot crypt \nsda disk iscsi\n"}),
    "NBD": ("on the network", {"disks ": "cryptroot crypt \nnbd0 disk \n"}),
    "no address in the initrd": (
        "the initrd has IP=off, not 192.168.1.20::192.168.1.1:255.255.255.0",
        {"own_ip": "IP=off\n"},
    ),
    "another address in the initrd": (
        "the initrd has IP=192.168.1.77, not 192.168.1.20",
        {"own_ip": "IP=192.168.1.77\n"},
    ),
    "another card in the initrd": (
        "eth7:off', not 192",
        {"own_ip": "IP='192.168.1.20:::255.255.255.0::eth7:off'\n"},
    ),
    "no SSH server": ("it has no SSH server", {"ssh_ports": ""}),
    "tinyssh": ("tinyssh", {"packages": "tinyssh-initramfs install installed\n"}),
    "no line in crypttab": ("no line of /etc/crypttab", {"crypttab": "other x none x"}),
    "a key file": ("a key file or", {"crypttab": "vda2_crypt x /root/key luks\n"}),
    "a keyscript": (
        "keyscript opens vda2_crypt",
        {"crypttab": "vda2_crypt x none luks,keyscript=/bin/x\n"},
    ),
    "plain encryption": (
        "it is not LUKS",
        {"crypttab": "vda2_crypt x none plain"},
    ),
    "a disk that asks later": (
        "data asks at the screen later",
        {"crypttab": TABLE + "# x\n data UUID=x none luks\n"},
    ),
    "a static address without its netmask": (
        "IP=192.168.1.20::192.168.1.1:24, not 192",
        {"own_ip": "IP=192.168.1.20::192.168.1.1:24\n"},
    ),
    "another command": (
        "DROPBEAR_OPTIONS has another command: /bin/x",
        {"own_options": "-p 2222 -c /bin/x"},
    ),
    "another command after other letters": (
        "DROPBEAR_OPTIONS has another command: /bin/x",
        {"own_options": "-p 2222 -sjkc /bin/x"},
    ),
    "an address of its own": (
        r"ip=192.168.1.77:::, not 192.168.1.20",
        {"own_ip": "ip=192.168.1.77:::"},
    ),
    "Fedora": ("neither Debian nor", {"system ": 'ID=fedora\nVARIANT_ID="debian"\n'}),
    "no image": (
        "an initrd in /boot to keep",
        {"images": "vmlinuz-6.1.0-56-cloud-amd64\n"},
    ),
}


def refused(case: dict[str, str]) -> dict[str, str]:
    """Put a case together; a name with a space is that of a command's output."""
    recordings = {name: text for name, text in case.items() if name[-1] != " "}
    direct = {name[:-1]: text for name, text in case.items() if name[-1] == " "}
    return seen(**recordings) | direct


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_prepared_is_refused(name: str) -> None:
    reason, case = REFUSALS[name]
    with pytest.raises(prepare.Refused, match=reason):
        prepare.understand(refused(case), "", "")


# ---- What is written ----


def test_the_initrd_gets_its_address_on_one_card() -> None:
    """Where the owner has nothing of his own."""
    assert plan(network="bridge")[f"{TOOLS}/conf.d/waker"].splitlines() == [
        MARK,
        "# A line that begins with # gives way to your own setting.",
        "IP=192.168.1.20::192.168.1.1:255.255.255.0",
        "BOOTIF=01-52-54-00-12-34-56",
        'export DROPBEAR_OPTIONS="-p 2222 -s -j -k"',
    ]


def test_what_the_owner_has_set_stays() -> None:
    text = plan(own_ip="IP=192.168.1.20::192.168.1.1:255.255.255.0::eth0")
    assert text[f"{TOOLS}/conf.d/waker"].splitlines()[2:] == [
        "#IP=192.168.1.20::192.168.1.1:255.255.255.0",
        "BOOTIF=01-52-54-00-12-34-56",
        'export DROPBEAR_OPTIONS="-p 2222 -s -j -k"',
    ]
    text = plan(own_options="-p 22 -s -c cryptroot-unlock")
    assert text[f"{TOOLS}/conf.d/waker"].splitlines()[2:] == [
        "IP=192.168.1.20::192.168.1.1:255.255.255.0",
        "BOOTIF=01-52-54-00-12-34-56",
        '#export DROPBEAR_OPTIONS="-p 22 -s -j -k"',
    ]


def test_dracuts_network_is_that_of_one_card() -> None:
    text = plan(system="dracut", network="bridge")
    assert text["/etc/initrd-ssh/lan.network"].splitlines() == [
        MARK,
        "[Match]",
        "PermanentMACAddress=52:54:00:12:34:56",
        "",
        "[Network]",
        "Address=192.168.1.20/24",
        "Gateway=192.168.1.1",
    ]
    assert text["/etc/dracut.conf.d/initrd-ssh.conf"].splitlines() == [
        MARK,
        'add_dracutmodules+=" initrd-ssh "',
        'hostonly="no"',
        'add_drivers+=" vmxnet3 "',
    ]
    assert f"{prepare.MODULE}/module-setup.sh" in text
    assert text[f"{prepare.MODULE}/sshd_config"].startswith("Port 2222\n")
    restricted = f'restrict,command="/usr/bin/cryptroot-unlock" {KEY}\n'
    assert text["/etc/initrd-ssh/authorized_keys"] == restricted


def test_settings_come_before_packages_and_the_kept_image_before_all() -> None:
    for system in ("initramfs-tools", "dracut"):
        names = [*plan(system=system)]
        kept = f"/boot/initrd.img-{facts(system=system)['kept']}.before-waker"
        assert names[:2] == [kept, "/boot/grub/custom.cfg"]
        assert names[-2:] == facts(system=system)["missing"].split()
        assert all(name.startswith("/") for name in names[:-2])


def test_no_word_of_a_template_is_left() -> None:
    for system in ("initramfs-tools", "dracut"):
        text = "".join(plan(system=system).values())
        assert not re.findall(r"@#?[a-z ]+@", text)


def test_all_that_is_written_carries_the_mark() -> None:
    """But keys, and the module of dracut, which is ours as a whole."""
    for system in ("initramfs-tools", "dracut"):
        for name, text in plan(system=system).items():
            if name.startswith("/etc") and not name.endswith("authorized_keys"):
                assert MARK in text.splitlines()[:2], name


def test_wake_on_lan_is_set_at_the_start_and_at_the_end() -> None:
    unit = plan()["/etc/systemd/system/waker-wake.service"]
    values = dict(re.findall(r"(?m)^(\w+)=(.*)$", unit))
    assert (
        values["ExecStart"] == values["ExecStop"] == "-/usr/sbin/ethtool -s eth0 wol g"
    )
    assert values["RemainAfterExit"] == "yes"  # or nothing is run at the end


def test_the_kept_images_kernel_is_the_running_one() -> None:
    kernels = {"kernels": "6.1.0-1\n6.1.0-2\n6.1.0-10\n"}
    images = "initrd.img-6.1.0-1\ninitrd.img-6.1.0-2\ninitrd.img-6.1.0-10\n"
    assert facts(running="6.1.0-2\n", images=images, **kernels)["kept"] == "6.1.0-2"
    assert facts(running="6.1.0-9\n", images=images, **kernels)["kept"] == "6.1.0-10"
    images += "initrd.img-6.1.0-1.before-waker\n"
    assert facts(running="6.1.0-2\n", images=images, **kernels)["kept"] == "6.1.0-1"


KERNEL = "6.1.0-47-cloud-amd64"


def test_the_kept_image_has_the_entry_of_its_kernel() -> None:
    entry = prepare.make_menu({"grub": GRUB, "menu": ""}, KERNEL)
    lines = [line.split() for line in entry.splitlines()]
    assert ["initrd", f"/initrd.img-{KERNEL}.before-waker"] in lines
    (linux,) = [line for line in lines if line[0] == "linux"]
    assert linux[1:3] == [f"/vmlinuz-{KERNEL}", "root=/dev/mapper/guest--vg-root"]
    assert entry.startswith(f"{MARK}\nmenuentry 'The initrd from before waker' {{\n")
    assert entry.endswith("}\n")
    assert entry.count("{") == entry.count("}") == 1
    # Beside the processor's microcode, and for a kernel that is not the newest.
    ucode = GRUB.replace("\tinitrd\t", "\tinitrd\t/intel-ucode.img ")
    entry = prepare.make_menu({"grub": ucode, "menu": ""}, KERNEL)
    assert f"initrd\t/intel-ucode.img /initrd.img-{KERNEL}.before-waker\n" in entry


def test_the_owners_own_menu_stays() -> None:
    assert (
        prepare.make_menu({"grub": GRUB, "menu": "menuentry 'mine' {}\n"}, KERNEL) == ""
    )
    assert prepare.make_menu({"grub": "", "menu": ""}, KERNEL) == ""
    assert prepare.make_menu({"grub": GRUB, "menu": ""}, "6.1.0-4") == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", LIMITED),
        (OWN_KEY, f"{OWN_KEY}\n{LIMITED}"),  # no last newline: no key is joined
        (f"{OWN_KEY}\n", f"{OWN_KEY}\n{LIMITED}"),
        (f"{KEY}\n{OWN_KEY}\n", f"{LIMITED}{OWN_KEY}\n"),  # as waker 3.0 wrote it
        (f"{KEY}\n{LIMITED}", LIMITED),  # the first line would have won
        (f'from="192.168.1.2",{LIMITED}', f'from="192.168.1.2",{LIMITED}'),
        (f"# {KEY}\n", f"# {KEY}\n{LIMITED}"),
        (LIMITED, LIMITED),
    ],
)
def test_wakers_key_can_only_unlock_and_other_keys_stay(
    before: str, after: str
) -> None:
    assert prepare.put_key(before, LIMITED) == after


# ---- A simulated server ----


@dataclass
class Server:
    """This computer, but with layers of its own over what prepare.py changes."""

    folder: Path
    holder: int  # a process in its namespace

    def run(self, command: str, check: bool = True) -> str:
        """Run a command of the shell there; returns what it prints."""
        enter = [need("nsenter"), "--mount", f"--target={self.holder}", "sh", "-c"]
        done = subprocess.run(
            [*enter, f"cd {self.folder}; {command}"],
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
        return self.run(f"/usr/bin/python3 server/prepare.py {arguments}", check)

    def files(self) -> str:
        """List all that was changed: content, modes, links and what was removed."""
        where = "find layers/*/upper /boot -path '*/lib/dpkg' -prune -o"
        return self.run(
            f"{where} -type f -exec sha256sum {{}} + | sort -k 2;"
            f" {where} ! -type d -printf '%M %p %l\\n' | sort -k 2"
        )

    def read(self, path: str) -> str:
        return self.run(f"cat {path}")

    def write(self, path: str, text: str) -> None:
        shutil.copy(self._save(text), self.folder / "given")
        self.run(f"mkdir -p $(dirname {path}); cp given {path}")

    def _save(self, text: str) -> Path:
        file = self.folder / "text"
        file.write_text(text)
        return file

    def set(self, **outputs: str) -> None:
        """Set what commands of prepare.ini print."""
        settings = configparser.ConfigParser(interpolation=None)
        settings.read(self.folder / "server/prepare.ini")
        for output, text in outputs.items():
            name = output.replace("_", " ")
            (self.folder / "seen" / name).write_text(text)
            settings["look"][name] = f"cat '{self.folder}/seen/{name}'"
        build = f"sh {self.folder}/mkinitramfs.sh $0"
        settings["initramfs-tools"]["build"] = build
        with (self.folder / "server/prepare.ini").open("w") as file:
            settings.write(file)


REAL = ("crypttab", "own options", "images", "grub", "menu")  # are looked at there
ETC = "alternatives group ld.so.cache os-release passwd shells"


@contextlib.contextmanager
def simulated(folder: Path) -> Iterator[Server]:
    """Make a server with Debian's initramfs-tools that only lacks settings."""
    need_root()
    for program in ("unmkinitramfs", "cpio", "dropbearkey", "ethtool", "systemctl"):
        need(program)
    shutil.copytree(CHECKOUT / "server", folder / "server")
    text = (SERVERS / "mkinitramfs.sh").read_text()
    (folder / "mkinitramfs.sh").write_text(text.replace("FOLDER", str(folder)))
    (folder / "seen").mkdir()
    (folder / "dropbear-initramfs").touch()
    lines = ["set -e", f"mkdir {folder}/layers {folder}/etc; cd {folder}"]
    lines += [
        f"(cd /etc; cp -a {ETC} {folder}/etc)",
        f"mount -t tmpfs none {folder}/layers",
    ]
    for place in ("etc", "usr", "var"):
        lower = f"{folder}/etc" if place == "etc" else f"/{place}"
        layers = f"lowerdir={lower},upperdir=layers/{place}/upper"
        lines += [f"mkdir -p layers/{place}/upper layers/{place}/work"]
        lines += [
            f"mount -t overlay none /{place} -o {layers},workdir=layers/{place}/work"
        ]
    lines += ["mount -t tmpfs -o size=100M none /boot", "echo ready", "exec sleep 1000"]
    command = [need("unshare"), "--mount", "sh", "-c", "\n".join(lines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == b"ready\n"
            server = Server(folder, holder.pid)
            whole = seen()
            known = {n: text for n, text in whole.items() if n not in REAL}
            packages = whole["packages"] + "".join(
                f"{name} install installed\n" for name in facts()["missing"].split()
            )
            drivers = "eth0\n"  # a driver that is part of the kernel
            server.set(**known | {"packages": packages, "drivers": drivers})
            for path, content in {
                "/etc/crypttab": TABLE,
                "/boot/grub/grub.cfg": GRUB.replace(KERNEL, whole["kernels"].strip()),
                "/etc/initramfs-tools/initramfs.conf": "MODULES=most\n",
                "/etc/dropbear/initramfs/dropbear.conf": "#DROPBEAR_OPTIONS=\n",
                "/usr/sbin/update-initramfs": "",  # only to be there
            }.items():
                server.write(path, content)
            server.run("chmod 755 /usr/sbin/update-initramfs")
            make = "dropbearkey -t ed25519 -f"
            server.run(f"{make} /etc/dropbear/initramfs/dropbear_ed25519_host_key")
            server.run(
                f"rm -f built; sh mkinitramfs.sh /boot/initrd.img-{first(server)}"
            )
            server.run("rm built")
            yield server
        finally:
            holder.kill()


def first(server: Server) -> str:
    return (server.folder / "seen/kernels").read_text().split()[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with simulated(tmp_path) as made:
        yield made


def test_a_refusal_changes_nothing(server: Server) -> None:
    """Each of them, by the program itself."""
    before = server.files()
    for reason, case in REFUSALS.values():
        server.set(**refused(case))
        said = server.prepare(check=False)
        assert re.search(f"^Nothing was changed on this server: .*{reason}", said), said
        assert server.files() == before


def test_a_wrong_call_changes_nothing(server: Server) -> None:
    before = server.files()
    for arguments, reason in {
        f"'{KEY}'": "you did not answer y",  # there is no terminal
        f"--yes '{KEY[:-30]}'": "needs waker's whole public key",
        f"--yes --card eth9 '{KEY}'": "no card eth9",
        "--yes": "needs waker's whole public key",
        "--yes --undo": "nothing to undo",
    }.items():
        said = server.prepare(arguments, check=False)
        assert re.search(f"Nothing was changed on this server: .*{reason}", said), said
        assert server.files() == before


def test_too_little_room_is_refused(server: Server) -> None:
    server.run("mount -o remount,size=20M /boot")
    before = server.files()
    assert re.search("/boot needs [0-9]+ MiB free", server.prepare(check=False))
    assert server.files() == before


def answers(said: str, nonce: str) -> list[str]:
    """Return what is between the markers, which come last."""
    *_, begin, mac, host, initrd, system, key, end = said.splitlines()
    assert (begin, end) == (f"waker-begin {nonce}", f"waker-end {nonce}")
    return [mac, host, initrd, system, key]


def test_a_server_is_prepared_once_and_undone(server: Server) -> None:
    bare = server.files()
    said = server.prepare(f"--yes --nonce 5eed '{KEY}'")
    assert answers(said, "5eed")[:4] == [
        "WAKER_HOMELAB_MAC=52:54:00:12:34:56",
        "WAKER_HOMELAB_HOST=192.168.1.20",
        "WAKER_INITRD_SSH_PORT=2222",
        "WAKER_SYSTEM_SSH_PORT=22",
    ]
    key = server.run(
        "dropbearkey -y -f /etc/dropbear/initramfs/dropbear_ed25519_host_key"
    )
    (public,) = re.findall(r"ssh-ed25519 \S+", key)
    assert answers(said, "5eed")[4] == f"WAKER_SSH_HOST_KEY={public}"
    assert server.run("systemctl is-enabled waker-wake") == "enabled\n"
    image = f"/boot/initrd.img-{first(server)}"
    assert server.run(f"ls {image}*") == f"{image}\n{image}.before-waker\n"
    assert server.run(f"stat -c %a {image}.before-waker") == "600\n"  # it has keys
    table = server.run(f"unmkinitramfs {image} x; cat x/cryptroot/crypttab; rm -r x")
    assert table == TABLE.replace("discard", "discard,tries=0")
    assert server.read("/etc/crypttab") == TABLE
    assert server.run("cat built") == "built\n"

    prepared = server.files()
    said = server.prepare(f"--yes --nonce 5eed '{KEY}'")
    assert "Nothing was changed" in said
    assert len(answers(said, "5eed")) == 5
    assert (server.files(), server.run("cat built")) == (prepared, "built\n")

    said = server.prepare("--yes --undo")
    assert "\nUndone. The initrd of each kernel was examined.\n" in said
    assert images_aside(server.files()) == images_aside(bare)
    assert server.run(f"ls {image}*") == f"{image}\n"
    inside = server.run(
        f"unmkinitramfs {image} x; cat x/root-x/.ssh/* x/conf/conf.d/*; :"
    )
    assert "ssh-ed25519" not in inside
    assert "IP=" not in inside
    assert "nothing to undo" in server.prepare("--yes --undo", check=False)


def images_aside(files: str) -> list[str]:
    """Leave out images, which differ by their time, and what systemd and dpkg note."""
    lines = files.splitlines()
    return [line for line in lines if "initrd.img" not in line and "/usr/" not in line]


def cut_power(server: Server, when: int, arguments: str = f"--yes '{KEY}'") -> None:
    """End prepare.py when a file is about to be put in place for the n-th time."""
    server.run("cp $(which sync) real-sync")
    script = (
        f"#!/bin/sh\necho >>{server.folder}/synced\n"
        f"[ $(wc -l <{server.folder}/synced) != {when} ] || kill -KILL $PPID\n"
        f'exec {server.folder}/real-sync "$@"\n'
    )
    server.write("/usr/bin/sync", script)
    server.run("chmod 755 /usr/bin/sync")
    server.prepare(arguments, check=False)
    assert int(server.run("wc -l <synced")) == when
    server.write("/usr/bin/sync", f'#!/bin/sh\nexec {server.folder}/real-sync "$@"\n')


MOMENTS = pytest.mark.parametrize("when", range(1, 20, 3))


@MOMENTS
def test_an_interruption_is_finished_by_the_next_run(server: Server, when: int) -> None:
    image = f"/boot/initrd.img-{first(server)}"
    old = server.run(f"sha256sum <{image}")
    cut_power(server, when)
    kept = f"{image}.before-waker"
    # It boots by its old image: that is in use, or in GRUB's menu.
    assert old in server.run(f"for file in {image}*; do sha256sum <$file; done")
    said = server.prepare(f"--yes --nonce ab '{KEY}'")
    assert len(answers(said, "ab")) == 5
    assert server.run(f"sha256sum <{kept}") == old
    assert "Nothing was changed" in server.prepare()


def test_a_run_that_did_not_end_is_not_taken_for_a_finished_one(server: Server) -> None:
    """Even if each file and image is right already."""
    server.prepare()
    server.run("systemctl disable waker-wake; touch /var/lib/waker-prepare/unfinished")
    assert "Nothing was changed" not in server.prepare()
    assert server.run("systemctl is-enabled waker-wake") == "enabled\n"
    assert "Nothing was changed" in server.prepare()


def test_the_hook_ends_without_its_card(server: Server) -> None:
    """An image can still be built when the card has another name, or has gone."""
    server.prepare()
    server.run(f"DESTDIR=/var/tmp timeout 30 sh -e {TOOLS}/hooks/waker")


@MOMENTS
def test_an_interruption_can_be_undone(server: Server, when: int) -> None:
    bare = images_aside(server.files())
    cut_power(server, when)
    said = server.prepare("--yes --undo", check=False)
    assert "Undone" in said or ("nothing to undo" in said and when == 1)
    server.run("rm -rf /var/lib/waker-prepare")
    assert images_aside(server.files()) == bare


def test_a_server_of_waker_3_is_taken_over_and_given_back(server: Server) -> None:
    """With its host key. Its settings had no mark, and its key no limit."""
    folder, options = "/etc/dropbear/initramfs", "-p 2222 -s -j -k -c cryptroot-unlock"
    server.write(f"{folder}/authorized_keys", f"{OWN_KEY}\n")
    server.write(f"{TOOLS}/conf.d/resume", "RESUME=none\n")  # as on any server
    address = "IP=192.168.1.20::192.168.1.1:255.255.255.0"
    # Step 3 of its README.
    server.run(
        f"""cd /etc/dropbear/initramfs
        echo 'DROPBEAR_OPTIONS="{options}"' | tee -a dropbear.conf
        echo '{address}' | tee /etc/initramfs-tools/conf.d/waker
        echo '{KEY}' | tee -a authorized_keys"""
    )
    files = f"{folder}/dropbear.conf", f"{folder}/authorized_keys"
    old = {path: server.read(path) for path in (*files, f"{TOOLS}/conf.d/waker")}
    host_key = server.run(f"sha256sum {folder}/*host_key")
    server.prepare()
    assert server.run(f"sha256sum {folder}/*host_key") == host_key
    assert server.read(f"{folder}/dropbear.conf") == old[f"{folder}/dropbear.conf"]
    assert server.read(f"{folder}/authorized_keys") == f"{OWN_KEY}\n{LIMITED}"
    assert server.read(f"{TOOLS}/conf.d/waker").splitlines()[2:] == [
        address,
        "BOOTIF=01-52-54-00-12-34-56",
        '#export DROPBEAR_OPTIONS="-p 2222 -s -j -k"',
    ]
    # Later, its address changes.
    links = seen()["links"].replace('"192.168.1.20"', '"192.168.1.30"')
    server.set(links=links)
    server.prepare()
    settings = server.read(f"{TOOLS}/conf.d/waker").splitlines()
    assert settings[2] == "IP=192.168.1.30::192.168.1.1:255.255.255.0"
    server.prepare("--yes --undo")
    for path, text in old.items():
        assert server.read(path) == text


def test_undo_keeps_what_the_owner_has_changed_since(server: Server) -> None:
    server.prepare()
    keys, conf = (
        "/etc/dropbear/initramfs/authorized_keys",
        f"{TOOLS}/conf.d/waker",
    )
    server.write(keys, f"{server.read(keys)}{OWN_KEY}\n")
    server.write(conf, f"{server.read(conf)}MODULES=dep\n")
    said = server.prepare("--yes --undo")
    assert f"Left: {conf}, which you have changed." in said
    assert server.read(keys) == f"{OWN_KEY}\n"
    assert "MODULES=dep" in server.read(conf)


def test_a_second_run_loses_no_change_of_the_owner(server: Server) -> None:
    """Neither in what it has written nor in GRUB's menu."""
    assert "WARNING: the kept" not in server.prepare()
    conf, menu = f"{TOOLS}/conf.d/waker", "/boot/grub/custom.cfg"
    server.write(menu, f"menuentry 'mine' {{\n}}\n{server.read(menu)}")
    server.write(conf, f"{server.read(conf)}MODULES=dep\n")
    before = server.files()
    said = server.prepare(check=False)
    assert f"Nothing was changed on this server: {conf} has your changes" in said
    assert server.files() == before
    server.run(f"rm {conf}")
    assert "WARNING: the kept image gets no entry" in server.prepare()
    assert server.read(menu).startswith("menuentry 'mine'")


def test_undo_removes_packages_but_not_what_opens_the_disk(server: Server) -> None:
    need("tcsh")
    need("cryptsetup")
    server.prepare()
    record = "/var/lib/waker-prepare/record.json"
    rows = json.loads(server.read(record))
    for name in ("dropbear_rsa_host_key.pub", "own_host_key", "own_host_key.pub"):
        server.write(f"/etc/dropbear/initramfs/{name}", "x")
    rows += [["PACKAGE", name, "", None] for name in ("tcsh", "cryptsetup-bin")]
    server.write(record, json.dumps(rows))
    said = server.prepare("--yes --undo")
    assert "Left: the package cryptsetup-bin." in said
    assert "tcsh" not in said.partition("Undone.")[2]
    assert server.run("cd /etc/dropbear/initramfs; ls *.pub") == "own_host_key.pub\n"
    status = "dpkg-query -Wf '${db:Status-Status} ' cryptsetup-bin tcsh"
    assert server.run(status, check=False).split().count("installed") == 1


@pytest.mark.parametrize("when", [1, 2, 3, 4])
def test_an_undo_that_was_interrupted_goes_on(server: Server, when: int) -> None:
    """The owner had put waker's key there before, without a limit."""
    keys = "/etc/dropbear/initramfs/authorized_keys"
    server.write(keys, f"{KEY}\n")
    server.run(f"chmod 600 {keys}")
    bare = images_aside(server.files())
    server.prepare()
    cut_power(server, when, "--yes --undo")
    said = server.prepare("--yes --undo")
    assert "Undone" in said
    assert "Left: waker's key" not in said
    assert images_aside(server.files()) == bare


def test_undo_gives_up_the_kept_image_only_for_a_good_one(server: Server) -> None:
    server.prepare()
    image = f"/boot/initrd.img-{first(server)}"
    before = server.run(f"sha256sum <{image}")
    server.run("sed -i 's/touch sbin.cryptsetup/true/' mkinitramfs.sh")
    said = server.prepare("--yes --undo", check=False)
    assert "it has no cryptsetup" in said
    assert server.run(f"sha256sum <{image}; ls {image}.before-waker").startswith(before)
    server.run("sed -i 's/^true$/touch sbin\\/cryptsetup/' mkinitramfs.sh")
    assert "Undone" in server.prepare("--yes --undo")


SPOILED: dict[str, str] = {
    "rm root-x/.ssh/authorized_keys": "authorized_keys differs",
    "rm etc/dropbear/dropbear_ed25519_host_key": "host_key differs",
    "echo IP=1.2.3.4 >>conf/conf.d/waker": "its conf/conf.d/waker differs",
    "rm sbin/dropbear": "it has no dropbear",
    "rm bin/cryptroot-unlock": "it has no cryptroot-unlock",
    "rm sbin/cryptsetup": "it has no cryptsetup",
    "sed -i s/,tries=0// cryptroot/crypttab": "does not have the right options",
    ": >cryptroot/crypttab": "has no line for vda2_crypt",
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_wrong_image_is_never_put_in_place(server: Server, spoil: str) -> None:
    image = f"/boot/initrd.img-{first(server)}"
    before = server.run(f"sha256sum <{image}")
    server.run(f"sed -i 's|^find . .*cpio|{spoil}\\n&|' mkinitramfs.sh")
    said = server.prepare(check=False)
    assert "FAILED" in said
    assert SPOILED[spoil] in said, said
    assert "WAKER_" not in said
    assert server.run(f"sha256sum <{image}") == before


def test_every_kernels_image_is_built_and_examined(server: Server) -> None:
    older, newer = "6.0.0-9-amd64", first(server)
    server.set(kernels=f"{older}\n{newer}\n", running=f"{older}\n")
    server.run(f"cp /boot/initrd.img-{newer} /boot/initrd.img-{older}")
    server.prepare()
    assert server.run("cat built") == "built\nbuilt\n"
    assert (
        server.run("ls /boot/*.before-waker")
        == f"/boot/initrd.img-{older}.before-waker\n"
    )
    server.run(
        f"rm built; cp /boot/initrd.img-{older}.before-waker /boot/initrd.img-{older}"
    )
    server.prepare()
    assert server.run("cat built") == "built\n"


def test_the_newest_kernels_image_does_not_wait_for_an_old_ones(server: Server) -> None:
    """Which may lack the driver of the network card."""
    older, newer = "6.0.0-9-amd64", first(server)
    server.set(kernels=f"{older}\n{newer}\n", running=f"{newer}\n")
    server.run(f"cp /boot/initrd.img-{newer} /boot/initrd.img-{older}")
    spoil = f"case $image in *{older}*) rm sbin/dropbear ;; esac"
    server.run(f"sed -i 's|^find . .*cpio|{spoil}\\n&|' mkinitramfs.sh")
    old = server.run(f"sha256sum </boot/initrd.img-{older}")
    said = server.prepare(check=False)
    assert f"FAILED: the new /boot/initrd.img-{older} is not used" in said, said
    assert server.run(f"sha256sum </boot/initrd.img-{older}") == old
    assert server.run(f"sha256sum </boot/initrd.img-{newer}") != old


def test_drivers_may_be_outside_of_the_main_archive(server: Server) -> None:
    """As in Ubuntu's images. modinfo knows no such module, and calls it missing."""
    server.set(drivers="eth0 /lib/modules/missing\n")
    assert "it has no driver missing" in server.prepare(check=False)
    server.run("mkdir -p early/lib/modules; touch early/lib/modules/missing.ko")
    server.run("(cd early; find . | cpio --quiet -o -H newc) >early.cpio")
    prepend = f'cat {server.folder}/early.cpio - >"$image"'
    server.run(f"sed -i 's|gzip >.*|gzip \\| {prepend}|' mkinitramfs.sh")
    assert "The server is prepared." in server.prepare()


@pytest.mark.parametrize("builder", ["initramfs-tools", "dracut"])
def test_a_build_that_fails_leaves_no_file(builder: str, tmp_path: Path) -> None:
    """It could fill /boot, so that apt cannot build another image either."""
    for name in ("mkinitramfs", "dracut", "dropbearkey"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\necho part >"$2"\nexit 1\n')
        program.chmod(0o755)
    image = tmp_path / "initrd.img"
    done = subprocess.run(
        ["sh", "-c", prepare.SETTINGS[builder]["build"], str(image), "6.1"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode
    assert not image.exists()


def test_the_kernels_hook_removes_the_kept_image_with_its_kernel(
    server: Server,
) -> None:
    server.prepare()
    image, hook = f"/boot/initrd.img-{first(server)}", "/etc/kernel/postrm.d/waker"
    server.run(f"{hook} 6.9.9-other /boot/vmlinuz-6.9.9-other")
    assert server.run("ls /boot/grub/custom.cfg")
    server.run(f"DEB_MAINT_PARAMS='upgrade 6' {hook} {first(server)} /boot/x")
    assert server.run(f"ls {image}.before-waker /boot/grub/custom.cfg")
    server.run(f"{hook} {first(server)} /boot/vmlinuz-{first(server)}")
    assert (
        server.run(f"ls {image}* /boot/grub") == f"{image}\n\n/boot/grub:\ngrub.cfg\n"
    )
    # There is no reason to keep another.
    assert "Nothing was changed" in server.prepare()


def test_tries_of_the_owners_own_stay(server: Server) -> None:
    for line, expected in {
        "a UUID=x none luks": "a UUID=x none luks,tries=0",
        "a UUID=x none luks,tries=5": "a UUID=x none luks,tries=5",
        "a UUID=x none": "a UUID=x none tries=0",
        "a UUID=x /key luks": "a UUID=x /key luks",
        "a UUID=x none luks,keyscript=/x": "a UUID=x none luks,keyscript=/x",
    }.items():
        server.write("/etc/crypttab", TABLE)
        server.prepare()
        server.write("/usr/share/initramfs-tools/hook-functions", FUNCTIONS)
        server.write(f"{server.folder}/image/cryptroot/crypttab", f"{line}\n")
        server.run(f"DESTDIR={server.folder}/image /etc/initramfs-tools/hooks/waker")
        table = server.read(f"{server.folder}/image/cryptroot/crypttab")
        assert table == f"{expected}\n"


FUNCTIONS = "manual_add_modules() { :; }; sys_walk_mod_add() { :; }\n"


def test_it_is_short_and_needs_only_python() -> None:
    """It decides whether a server still boots, so whoever runs it can read it."""
    text = (CHECKOUT / "server/prepare.py").read_text()
    assert len(text.splitlines()) <= 500
    assert {*re.findall(r"(?m)^(?:import|from) (\w+)", text)} <= sys.stdlib_module_names


# ---- The module of dracut ----


def run_module(server: Server, commands: str, devices: str) -> str:
    """Run functions of module-setup.sh on a server with recorded disks."""
    server.write(f"{server.folder}/devices", devices)
    setup = [
        "source server/dracut/46initrd-ssh/module-setup.sh",
        "require_binaries() { :; }; dwarn() { :; }; derror() { echo error: $*; }",
        f"list_devices() {{ cat {server.folder}/devices; }}",
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
    devices = RECORDED["disks"]["RAID, LUKS, LVM"]["disks"]
    assert run_module(server, "print_crypttab", devices).splitlines() == [
        "md0_crypt UUID=x none luks,discard,x-initrd.attach,tries=0",
        "swap UUID=z - x-initrd.attach,tries=2",
        "home UUID=w /etc/key x-initrd.attach",
    ]
    # Without mdadm.conf, the array may have another number.
    server.write("/etc/crypttab", "md0_crypt /dev/md0")
    known = 'blkid() { echo 5eed; echo "$@" >&2; }; print_crypttab'
    assert "md0_crypt UUID=5eed none" in run_module(server, known, devices)
    server.write("/etc/crypttab", "md0_crypt UUID=x")
    assert run_module(server, "print_crypttab", devices) == (
        "md0_crypt UUID=x none luks,x-initrd.attach,tries=0\n"
    )


def test_dracuts_image_assembles_the_arrays_of_the_root_alone(server: Server) -> None:
    commands = f"mdadm() {{ echo asked $*; cat {server.folder}/mdadm; }}; print_arrays"
    server.write(f"{server.folder}/mdadm", (SERVERS / "mdadm").read_text())
    devices = RECORDED["disks"]["RAID, LUKS, LVM"]["disks"]
    (uuid,) = re.findall("(?m)^MD_UUID=(.*)$", (SERVERS / "mdadm").read_text())
    assert run_module(server, commands, devices) == f"rd.md.uuid={uuid}\n"
    devices = RECORDED["disks"]["LVM in LUKS"]["disks"]
    assert run_module(server, commands, devices) == ""


def test_dracuts_module_refuses_a_disk_on_the_network(server: Server) -> None:
    server.run("mkdir -p /etc/initrd-ssh; cd /etc/initrd-ssh")
    for name in ("lan.network", "authorized_keys"):
        server.write(f"/etc/initrd-ssh/{name}", "x")
    for device in ("sda disk iscsi", "nbd0 disk"):
        devices = f"vda2_crypt crypt\n{device}\n"
        said = run_module(server, "check; echo $?", devices)
        assert said.startswith("error: initrd-ssh: the root file system needs the net")
        assert said.endswith("\n1\n")
    devices = RECORDED["disks"]["LVM in LUKS"]["disks"]
    assert run_module(server, "check; echo $?", devices) == "255\n"


# A connection on the port of the initrd's SSH server, which is closed after `begun`.
CONNECTION = """
import pathlib, socket, time
server = socket.create_server(("", 2222))
client = socket.create_connection(("127.0.0.1", 2222))
accepted, _ = server.accept()
pathlib.Path("connected").touch()
while not pathlib.Path("begun").exists():
    time.sleep(0.1)
time.sleep(SECONDS)
pathlib.Path("closed").write_text(str(time.time_ns()))
client.close()
accepted.close()
"""
CLEAN = r"""
mount --make-rprivate /
mount -t tmpfs none /run
mount -t sysfs -o ro sysfs /sys # so systemd-networkd waits for no udev
mkdir -p /run/systemd /run/etc /run/work
mount -t overlay none /etc -o lowerdir=/etc,upperdir=/run/etc,workdir=/run/work
mkdir -p /etc/systemd/network /etc/initrd-ssh
printf '[Match]
Name=card
[Network]
Address=192.168.1.20/24
Gateway=192.168.1.1
'     >/etc/systemd/network/00-lan.network
echo "Port 2222" >/etc/initrd-ssh/sshd_config
ip link set lo up
ip link add card type veth peer switch
ip link add other type veth peer far
for card in switch other far; do ip link set $card up; done
ip address add 192.168.9.1/24 dev other
show() {
    ip -o address | grep -w inet
    ip route
    ip -br link show dev card
    (cd /proc/sys/net/ipv6/conf/card; grep . accept_ra addr_gen_mode disable_ipv6)
}
show >before
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
"$1" connection.py &
until [ -e connected ]; do sleep 0.1; done
date +%s%N >begun
sh clean-card
show >after
"""


def clean(folder: Path, seconds: int, most: int) -> dict[str, str]:
    """Run clean-card beside systemd-networkd, with a connection for some seconds.

    It waits for that at most so long. Returns what the script has noted, by name.
    """
    need_root()
    for program in ("ip", "unshare", "systemctl", "/lib/systemd/systemd-networkd"):
        need(program)
    text = (CHECKOUT / "server/dracut/46initrd-ssh/clean-card").read_text()
    assert text.count("seconds + 3") == 1
    text = text.replace("seconds + 3", f"seconds + {most}")
    (folder / "clean-card").write_text(text)
    connection = CONNECTION.replace("SECONDS", str(seconds))
    (folder / "connection.py").write_text(connection)
    namespace = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")
    command = [*namespace, "sh", "-c", CLEAN, "sh", sys.executable]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_card_is_left_as_it_was_found(tmp_path: Path) -> None:
    """Its address, its route, and the settings of the kernel; other cards stay.

    Before that, the verdict on the passphrase reaches its client.
    """
    noted = clean(tmp_path, seconds=1, most=60)
    begun, closed, stopped = (int(noted[n]) for n in ("begun", "closed", "stopped"))
    assert begun < closed < stopped < begun + 50e9
    assert "192.168.1.20/24" in noted["during"]
    assert "default via 192.168.1.1" in noted["during"]
    assert "accept_ra:0" in noted["during"]
    states = [re.sub(r"@\S+|<.*>|\s+", " ", noted[n]) for n in ("before", "after")]
    assert states[0] == states[1]
    assert "192.168.9.1/24" in states[1]


def test_a_connection_keeps_the_card_for_three_seconds_at_most(tmp_path: Path) -> None:
    noted = clean(tmp_path, seconds=90, most=3)
    assert "closed" not in noted
    assert int(noted["stopped"]) - int(noted["begun"]) > 2e9  # it counts whole seconds
