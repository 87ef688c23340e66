"""`prepare.py`: what it makes of recorded servers, and what it does to servers."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import prepare
import pytest
from conftest import CHECKOUT, need, need_other_users, wait_for
from facts import Refused, describe
from namespaces import hosts
from recorded import BOX, GRUB, GRUB_KERNEL, RECORDED, TABLE, find, probed
from simulated import DROPBEAR, KEY, PROGRAM, Server
from terminal import Terminal

OWN_KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'B' * 43} me"
LIMITED = (
    "no-port-forwarding,no-agent-forwarding,no-X11-forwarding,no-pty,"
    f'command="cryptroot-unlock" {KEY}\n'
)
MARK = prepare.MARK
MODULE = f"{prepare.MODULES}/46initrd-ssh"
CONF = "/etc/initramfs-tools/conf.d/waker"
RECORD = str(prepare.RECORD)
KEYS = f"{DROPBEAR}/authorized_keys"
STATIC = "IP=192.168.1.20::192.168.1.1:255.255.255.0"


def plan(**recordings: str) -> dict[str, str]:
    """Return what each file, or package, of a plan is to be."""
    facts = find(**recordings)
    files = prepare.read_files(facts.builder)
    return {c.name: c.text for c in prepare.make_plan(facts, KEY, "menu", files)}


# ---- Facts ----


def test_the_builder_is_the_one_that_is_wanted() -> None:
    """Even if an interruption left it half-installed, or dracut's parts are there."""
    debian, dracut = find(), find(builder="dracut")
    assert debian.builder == "initramfs-tools"
    assert debian.missing == ["dropbear-initramfs", "ethtool"]
    assert dracut.builder == "dracut"
    assert dracut.missing == ["dracut-network", "ethtool"]
    text, found = probed(builder="dracut")["packages"], "dracut install installed"
    broken = text.replace(found, "dracut install half-configured")
    assert find(packages=broken).builder == "dracut"
    removed = text.replace(found, "dracut deinstall config-files")
    with pytest.raises(Refused, match="neither initramfs-tools nor dracut"):
        find(packages=removed)


ETH0 = "eth0 52:54:00:12:34:56 192.168.1.20/24 192.168.1.1 vmxnet3"
ETH1 = "eth1 52:54:00:12:34:57 10.0.0.5/8 10.0.0.1 e1000"


@pytest.mark.parametrize(
    ("network", "wanted", "expected"),
    [
        ("one card", "", ETH0),
        ("two cards", "", ETH0),
        ("two cards", "eth1", ETH1),
        ("two cards, asked by the box", "", ETH1),
        ("two cards, asked by the box", "eth1", ETH1),
        ("bridge", "", ETH0),
        ("bridge", "eth0", ETH0),  # whose address is the bridge's
    ],
)
def test_the_card_is_the_one_that_leads_to_the_box(
    network: str, wanted: str, expected: str
) -> None:
    """Even behind a bridge, which may have changed its MAC address."""
    name, mac, drivers, address, router, _ = find(card=wanted, network=network).card
    assert " ".join([name, mac, str(address), router, *drivers]) == expected


def test_the_address_is_the_one_that_the_box_reaches() -> None:
    """A card may have others, which are those of services."""
    name = "two cards, asked by the box"
    links = json.loads(probed(network=name)["links"])
    for link in links:
        link["addr_info"].reverse()
    assert [a["local"] for a in links[2]["addr_info"]][1:] == ["10.0.0.9", "10.0.0.5"]
    card = find(network=name, links=json.dumps(links)).card
    assert str(card.address) == "10.0.0.5/8"
    assert card.has_dhcp
    links[2]["addr_info"] = sorted(links[2]["addr_info"], key=lambda a: a["local"])
    links[2]["addr_info"][0] |= {"scope": "link"}
    other = find(card="eth1", network="two cards", links=json.dumps(links)).card
    assert str(other.address) == "10.0.0.9/32"  # no route says which
    assert not find().card.has_dhcp


def test_routes_that_use_no_card_lead_to_none() -> None:
    """As to a box on the server itself. A card without a route has to be named."""
    local = '[{"dst": "::", "dev": "lo"}, {"dst": "default", "type": "prohibit"}]\n'
    assert find(routes=local + probed()["routes"]) == find()
    assert find(card="eth0", routes=local).card.router == ""


def test_a_bridge_may_lead_to_virtual_machines_as_well() -> None:
    name = "bridge"
    guest = {"ifname": "vnet0", "master": "vmbr0", "addr_info": []}
    links = [*json.loads(probed(network=name)["links"]), guest]
    assert find(network=name, links=json.dumps(links)).card.name == "eth0"


@pytest.mark.parametrize(
    ("expected", "connection", "recordings"),
    [
        ("22 2222", BOX, {}),
        ("2222 2222", "a 1 b 2222", {"listening": "192.168.1.20:2222"}),
        ("2222 2223", "a 1 b 2222", {"listening": "*:2222", "builder": "dracut"}),
        ("22 2223", BOX, {"ssh_ports": "0.0.0.0:22\n0.0.0.0:2222\n"}),
        ("22 2224", BOX, {"ssh_ports": "[::]:2222\n[::]:2223\n", "builder": "dracut"}),
        ("2200 2222", "", {"ssh_ports": "0.0.0.0:2200\n", "listening": "*:2200"}),
        ("2022 2222", "", {"ssh_ports": "[::]:2022 (Stream)\n", "listening": "*:2022"}),
        # The box came by a tunnel, to a port that is open there alone.
        ("22 2222", "a 1 b 2022", {"listening": "100.64.0.9:2022\n*:22\n"}),
        ("22 222", BOX, {"own_options": "-p 222 -s -j -k"}),
        ("22 99", BOX, {"own_options": "-s -p192.168.1.20:99 -c cryptroot-unlock"}),
        ("22 222", BOX, {"own_options": "-sjkp 222"}),
        ("22 22", BOX, {"own_options": "-s"}),
    ],
)
def test_the_ports_are_the_owners_or_do_not_collide(
    expected: str, connection: str, recordings: dict[str, str]
) -> None:
    assert " ".join(find(connection, **recordings).ports) == expected


def run_probe(name: str, tools: str) -> str:
    """Run a function of probes.sh with others in place of programs."""
    script = tools + (CHECKOUT / "server/probes.sh").read_text()
    return subprocess.check_output(["sh", "-c", script, "probes.sh", name], text=True)


def test_forwarded_ports_are_no_ssh_server() -> None:
    """`ssh -X` and `ssh -R` make sshd listen, too, on the loopback interface.

    systemd holds a socket only if it is active.
    """
    text = 'LISTEN 0 128 127.0.0.1:6010 0.0.0.0:* users:(("sshd",pid=9,fd=7))\n'
    real = 'LISTEN 0 128 [::]:2200 [::]:* users:(("sshd",pid=7,fd=4))\n'
    for status, held in ((1, ""), (0, "[::]:22 (Stream)\n")):
        systemctl = (
            f"case $* in *show*) echo '[::]:22 (Stream)' ;; esac; return {status}"
        )
        tools = (
            f"ss() {{ printf '%s' '{text}{real}'; }}; systemctl() {{ {systemctl}; }}\n"
        )
        assert run_probe("ssh_ports", tools) == f"[::]:2200\n{held}"


def test_a_link_file_may_choose_a_card_by_its_mac_address(tmp_path: Path) -> None:
    """Only the section Link gives a card another one."""
    file = tmp_path / "a.link"
    tools = f"udevadm() {{ case $3 in */lo) echo ID_NET_LINK_FILE={file} ;; esac; }}\n"
    file.write_text("[Match]\nMACAddress=52:54\n[Link]\nMACAddressPolicy=none\n")
    assert run_probe("link_macs", tools) == ""
    for setting in ("\tMACAddress = 02:01", "MACAddressPolicy\t=random"):
        file.write_text(f"[Match]\nMACAddress=52:54\n [Link]\n{setting}\n")
        assert run_probe("link_macs", tools) == f"lo {file} {setting}\n"
    same = "eth0 /x.link MACAddress=52-54-00-12-34-56"
    assert find(link_macs=same) == find()


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("LVM in LUKS", "vda2_crypt"),
        ("btrfs of two encrypted disks", "cryptroot cryptroot2"),
        ("RAID, LUKS, LVM", "md0_crypt"),
    ],
)
def test_the_disks_are_those_below_the_root(root: str, expected: str) -> None:
    table = "".join(f"{name} UUID=x none luks\n" for name in expected.split())
    assert find(root=root, crypttab=table).disks == expected.split()


@pytest.mark.parametrize(
    ("builder", "other", "asks"),
    [
        ("initramfs-tools", "/root/key luks", False),
        ("initramfs-tools", "none luks,nofail", False),
        ("dracut", "- noauto", False),
        ("initramfs-tools", "none luks,initramfs", True),
        ("dracut", "none x-initrd.attach", True),
    ],
)
def test_other_disks_open_by_themselves_stay_closed_or_ask_in_the_initrd(
    builder: str, other: str, asks: bool
) -> None:
    """For that, each builder has an option of its own, and ignores the other's."""
    facts = find(builder=builder, crypttab=f"{TABLE}data UUID=x {other}\n")
    assert facts.disks == (["vda2_crypt", "data"] if asks else ["vda2_crypt"])


def test_a_tpm_without_a_pin_opens_its_disk() -> None:
    """Whether crypttab names it or the LUKS header alone. Debian's initrd has none."""
    option = TABLE.replace("discard", "tpm2-device=auto")
    for recordings in ({"crypttab": option}, {"tokens": RECORDED["tokens"]["TPM"]}):
        facts = find(builder="dracut", **recordings)
        assert facts.helpers == {"vda2_crypt": "a TPM"}
        assert describe(facts)[-1].startswith("vda2_crypt opens by itself, with a TPM")
        assert find(**recordings).helpers == {}
    assert find(builder="dracut").helpers == {}
    asks = find(tokens=RECORDED["tokens"]["TPM with a PIN"])
    assert asks.helpers == {}


def test_with_dracut_settings_of_initramfs_tools_do_not_count() -> None:
    """They may be left over, even if dracut comes with an update-initramfs."""
    facts = find(builder="dracut", own_ip="IP=off", own_options="-s -c /bin/x")
    assert (facts.own_ip, facts.own_options) == ("", "")
    assert facts.ports == ("22", "2222")
    assert describe(find(own_options="-s"))[-1].endswith("which stay: -s")


def test_an_initrd_that_asks_for_an_address_may_stay_if_the_system_does_too() -> None:
    network = "two cards, asked by the box"
    for own_ip in ("IP=dhcp", "IP=:::::eth1:dhcp"):
        facts = find(network=network, own_ip=own_ip)
        assert facts.own_ip == own_ip
        assert describe(facts)[-1].endswith(f"which stays: {own_ip}")


def test_the_kept_images_kernel_is_the_running_one() -> None:
    """Or the newest, if that is not installed any more; but no second one is kept."""
    kernels = "6.1.0-1\n6.1.0-2\n6.1.0-10\n"
    images = re.sub("(?m)^", "initrd.img-", kernels.strip())
    for running, kept_before, expected in (
        ("6.1.0-2\n", "", "6.1.0-2"),
        ("6.1.0-9\n", "", "6.1.0-10"),
        ("6.1.0-2\n", "\ninitrd.img-6.1.0-1.before-waker\n", "6.1.0-1"),
    ):
        boot = images + kept_before
        assert find(kernels=kernels, running=running, images=boot).kept == expected


RD_OPTIONS = f"quiet rd.luks.options={TABLE.split('=')[1][:36]}=fido2-device=auto"
HALF = "linux-image-6.1.0-9 install half-configured\n"
LUKS = "vda2_crypt UUID=x none luks,"


def token(kind: str) -> str:
    """Return the probe `tokens` for a disk with a token, of which little is known."""
    return f'vda2_crypt {{"tokens": {{"0": {{"type": "{kind}"}}}}}}\n'


REFUSALS = [
    ("no default route", {"network": "no route"}),
    ("has no IPv4 address", {"network": "no address"}),
    ("wlan0 is Wi-Fi", {"network": "wifi"}),
    ("vmbr0 has 2 physical cards, not 1", {"network": "bridge of two cards"}),
    ("is not encrypted. There is nothing", {"root": "not encrypted"}),
    ("/boot is encrypted", {"root": "/boot in the encrypted root"}),
    ("uses ZFS", {"file_systems": "zfs\next4\n", "root": "not encrypted"}),
    ("on the network", {"disks": "cryptroot crypt \nsda disk iscsi\n"}),
    ("on the network", {"disks": "cryptroot crypt \nnbd0 disk \n"}),
    (f"the initrd has IP=off, not {STATIC[3:]}", {"own_ip": "IP=off\n"}),
    ("has IP=192.168.1.77, not 192.168.1.20", {"own_ip": "IP=192.168.1.77\n"}),
    ("eth7:off, not 192", {"own_ip": f"{STATIC}::eth7:off\n"}),
    ("168.1.1:24, not 192", {"own_ip": "IP=192.168.1.20::192.168.1.1:24\n"}),
    ("IP=192.168.1.77:::, not 192.168.1.20", {"own_ip": "IP=192.168.1.77:::"}),
    ("asks for an address (IP=dhcp)", {"own_ip": "IP=dhcp"}),
    ("fixed: 192.168.1.20. Remove", {"own_ip": "IP=:::::eth0:dhcp"}),
    ("eth0:dhcp), but the system's", {"own_ip": f"{STATIC}::eth0:dhcp"}),
    ("the initrd has IP=::::::off, not", {"own_ip": "IP=::::::off"}),
    ("the initrd has IP=eth1:dhcp, not", {"own_ip": "IP=eth1:dhcp"}),
    ("has luks.options=", {"builder": "dracut", "kernel_options": RD_OPTIONS}),
    ("the option headless=1", {"builder": "dracut", "crypttab": LUKS + "headless=1"}),
    ("the option verify.", {"builder": "dracut", "crypttab": LUKS + "verify"}),
    ("/x.link gives eth0 another MAC", {"link_macs": "eth0 /x.link MACAddress = 02::"}),
    ("linux-image-6.1.0-9 is half", {"packages": HALF + probed()["packages"]}),
    ("header of vda2_crypt cannot be", {"builder": "dracut", "tokens": "data {}"}),
    ("it has no SSH server", {"ssh_ports": ""}),
    ("tinyssh", {"packages": "tinyssh-initramfs install installed\n"}),
    ("no line of /etc/crypttab", {"crypttab": "other x none x"}),
    ("a key file or", {"crypttab": "vda2_crypt x /root/key luks\n"}),
    ("keyscript opens", {"crypttab": "vda2_crypt x none luks,keyscript=/bin/x\n"}),
    ("it is not LUKS", {"crypttab": "vda2_crypt x none plain"}),
    ("data may ask", {"crypttab": TABLE + "# x\n data UUID=x none luks\n"}),
    ("add initramfs (the", {"crypttab": TABLE + "data UUID=x none x-initrd.attach"}),
    (
        "add x-initrd.attach (the",
        {"crypttab": TABLE + "data UUID=x none initramfs", "builder": "dracut"},
    ),
    *(
        (f"vda2_crypt asks for {name} at", {"builder": "dracut", where: text})
        for name, where, text in (
            ("a TPM's PIN", "tokens", RECORDED["tokens"]["TPM with a PIN"]),
            ("a FIDO2 security key", "tokens", token("systemd-fido2")),
            ("a PKCS#11 smart card", "tokens", token("systemd-pkcs11")),
            ("a TPM's PIN", "crypttab", f"{LUKS}tpm2-device=auto,tpm2-pin=yes"),
            ("a FIDO2 security key", "crypttab", f"{LUKS}fido2-device=auto"),
            ("a PKCS#11 smart card", "crypttab", f"{LUKS}pkcs11-uri=auto"),
        )
    ),
    ("has another command: /bin/x", {"own_options": "-p 2222 -c /bin/x"}),
    ("has another command: /bin/x", {"own_options": "-p 2222 -sjkc /bin/x"}),
    ("neither Debian nor", {"system": 'ID=fedora\nVARIANT_ID="debian"\n'}),
    ("an initrd in /boot to keep", {"images": "vmlinuz-6.1.0-56-cloud-amd64\n"}),
]


@pytest.mark.parametrize(("reason", "recordings"), REFUSALS)
def test_a_server_that_waker_cannot_unlock_is_refused(
    reason: str, recordings: dict[str, str]
) -> None:
    """What was seen decides, before anything is changed."""
    with pytest.raises(Refused, match=re.escape(reason)):
        find(connection="", **recordings)


# ---- What is written ----


def test_the_initrd_gets_its_address_on_one_card() -> None:
    """Unless the owner has given it the same address."""
    settings = [
        MARK,
        "# A line that begins with # gives way to your own setting.",
        STATIC,
        "BOOTIF=01-52-54-00-12-34-56",
        'export DROPBEAR_OPTIONS="-p 2222 -s -j -k"',
    ]
    assert plan(network="bridge")[CONF].splitlines() == settings
    settings[2] = f"#{STATIC}"
    assert plan(own_ip=f"{STATIC}::eth0")[CONF].splitlines() == settings


def test_dracuts_network_is_that_of_one_card() -> None:
    text = plan(builder="dracut", network="bridge")
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
    assert f"{MODULE}/module-setup.sh" in text
    assert text[f"{MODULE}/sshd_config"].startswith("Port 2222\n")
    restricted = f'restrict,command="/usr/bin/cryptroot-unlock" {KEY}\n'
    assert text["/etc/initrd-ssh/authorized_keys"] == restricted


@pytest.mark.parametrize("builder", ["initramfs-tools", "dracut"])
def test_settings_come_before_packages(builder: str) -> None:
    """And the kept image before all. Files in /etc, but keys, say who wrote them."""
    facts, texts = find(builder=builder), plan(builder=builder)
    kept = f"/boot/initrd.img-{facts.kept}.before-waker"
    first, second, *files = texts
    if builder == "dracut":  # it would build no image without the package
        assert files.pop() == "/etc/dracut.conf.d/initrd-ssh.conf"
    one, other = files[-2:]
    del files[-2:]
    assert [first, second] == [kept, "/boot/grub/custom.cfg"]
    assert [one, other] == facts.missing
    assert all(name.startswith("/") for name in files)
    assert not re.findall(r"@#?[a-z ]+@", "".join(texts.values()))
    for name in files:
        if name.startswith("/etc") and not name.endswith("authorized_keys"):
            assert MARK in texts[name].splitlines()[:2], name


def test_wake_on_lan_is_set_at_the_start_and_at_the_end() -> None:
    unit = plan()["/etc/systemd/system/waker-wake.service"].replace("\\\n", "")
    values = dict(re.findall(r"(?m)^(\w+)=(.*)$", unit))
    assert values["ExecStart"] == values["ExecStop"]
    assert values["RemainAfterExit"] == "yes"  # or nothing is run at the end
    assert values["Environment"] == "mac=52:54:00:12:34:56"  # whatever its name is


def test_the_kept_image_has_the_entry_of_its_kernel() -> None:
    entry = prepare.make_menu({"grub": GRUB, "menu": ""}, GRUB_KERNEL)
    lines = [line.split() for line in entry.splitlines()]
    assert ["initrd", f"/initrd.img-{GRUB_KERNEL}.before-waker"] in lines
    (linux,) = [line for line in lines if line[0] == "linux"]
    assert linux[1:3] == [f"/vmlinuz-{GRUB_KERNEL}", "root=/dev/mapper/guest--vg-root"]
    assert entry.startswith(f"{MARK}\nmenuentry 'The initrd from before waker' {{\n")
    assert entry.endswith("}\n")
    assert entry.count("{") == entry.count("}") == 1
    # Beside the processor's microcode.
    ucode = GRUB.replace("\tinitrd\t", "\tinitrd\t/intel-ucode.img ")
    entry = prepare.make_menu({"grub": ucode, "menu": ""}, GRUB_KERNEL)
    assert f"initrd\t/intel-ucode.img /initrd.img-{GRUB_KERNEL}.before-waker\n" in entry
    # In place of the one that waker 3.1 made.
    old = "# Written by waker's prepare.py. `make server UNDO=1` removes it."
    menus = [{"grub": GRUB, "menu": entry.replace(MARK, mark)} for mark in (MARK, old)]
    entries = {prepare.make_menu(menu, GRUB_KERNEL) for menu in menus}
    assert entries == {prepare.make_menu({"grub": GRUB, "menu": ""}, GRUB_KERNEL)}
    # None if the owner has entries of his own, or GRUB none for this kernel.
    owners = {"grub": GRUB, "menu": "menuentry 'mine' {}\n"}
    assert prepare.make_menu(owners, GRUB_KERNEL) == ""
    assert prepare.make_menu({"grub": "", "menu": ""}, GRUB_KERNEL) == ""
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
    ids=range(8),
)
def test_wakers_key_can_only_unlock_and_other_keys_stay(
    before: str, after: str
) -> None:
    assert prepare.put_key(before, LIMITED) == after


# ---- What it does to a simulated server ----


WRONG_CALLS = {
    f"'{KEY}'": "you did not answer y",  # there is no terminal
    f"--yes '{KEY[:-30]}'": "needs waker's whole public key",
    "--yes": "needs waker's whole public key",
    f"--yes --interface eth9 '{KEY}'": "no card eth9. It has eth0",
}


def test_a_refusal_changes_nothing(server: Server) -> None:
    before = server.files()

    def refuses(reason: str, arguments: str = f"--yes '{KEY}'") -> None:
        said = server.prepare(arguments, check=False)
        words = f"Nothing was changed on this server: .*{re.escape(reason)}"
        assert re.search(f"(?m)^{words}", said), (reason, said)

    for arguments, reason in WRONG_CALLS.items():
        refuses(reason, arguments)
    server.run("mount -o remount,size=20M /boot")
    refuses(" MiB free")
    server.set(**probed(images="vmlinuz-6.1.0-56-cloud-amd64\n"))
    refuses("an initrd in /boot to keep")
    assert server.files() == before


def answers(said: str) -> list[str]:
    """Return what is between the markers, which come last."""
    *settings, end = said.partition("\nwaker-begin 5eed\n")[2].splitlines()
    assert end == "waker-end 5eed"
    return [line for line in settings if not line.startswith("WARNING: ")]


MARKED = f"--yes --nonce 5eed '{KEY}'"
WAKES = "#!/bin/sh\nprintf '\\tSupports Wake-on: pumbg\\n\\tWake-on: d\\n'"


def test_it_shows_what_it_will_do_and_asks(server: Server) -> None:
    bare = server.files()
    for answer in ("n", "y"):
        assert server.files() == bare
        terminal = Terminal(server.enter(f"{PROGRAM} '{KEY}'"))
        terminal.answer("Go on? [y/N]", answer)
        assert terminal.end() == (answer == "n"), terminal.printed
    found, plan, result = re.split(r"This will:|Go on\?", terminal.printed)
    assert "\n    network card: eth0 (52:54:00:12:34:56), 192.168.1.20/24, r" in found
    assert f"\n    limit waker's key to unlocking, with a line in {KEYS}\n" in plan
    assert "\n    examine the initrd of each kernel" in plan
    assert "which takes minutes\n" in plan
    settings, warning = result.split("\nWARNING: ")
    assert warning.startswith("the driver of eth0 offers no Wake-on-LAN, so waker can")
    assert "\nPut these lines into waker.env:\nWAKER_HOMELAB_MAC=" in settings
    server.write("/usr/sbin/ethtool", WAKES, 0o755)
    by_dhcp = '"scope":"global","dynamic":true'
    server.set(links=probed()["links"].replace('"scope":"global"', by_dhcp))
    said = server.prepare()
    assert "WARNING" not in said
    *_, last = said.splitlines()
    assert last.startswith("TO DO: reserve 192.168.1.20 for 52:54:00:12:34:56 in your")
    assert f"\n    take waker's key out of {KEYS}\n" in server.undo()


def test_the_card_keeps_wake_on_lan_from_now_on(server: Server) -> None:
    server.run("cp $(command -v systemctl) .")
    script = f'echo "$@" >>{server.folder}/asked; exec {server.folder}/systemctl "$@"'
    server.write("/usr/bin/systemctl", f"#!/bin/sh\n{script}\n", 0o755)
    for run in (server.prepare, server.prepare, server.undo):
        run()
    unit = "waker-wake.service"
    asked = [f"{verb} {unit}" for verb in ("enable", "restart", "disable --now")]
    lines = (server.folder / "asked").read_text().splitlines()
    assert [line for line in lines if unit in line] == asked


def test_a_server_is_prepared_once_and_undone(server: Server) -> None:
    bare, image = server.files_of_the_owner(), server.image
    said = server.prepare(MARKED)
    host_key = f"{DROPBEAR}/dropbear_ed25519_host_key"
    shown = server.run(f"dropbearkey -y -f {host_key}")
    (public,) = re.findall(r"ssh-ed25519 \S+", shown)
    assert answers(said) == [
        "WAKER_HOMELAB_MAC=52:54:00:12:34:56",
        "WAKER_HOMELAB_HOST=192.168.1.20",
        "WAKER_INITRD_SSH_PORT=2222",
        "WAKER_SYSTEM_SSH_PORT=22",
        f"WAKER_SSH_HOST_KEY={public}",
    ]
    assert server.run("systemctl is-enabled waker-wake") == "enabled\n"
    assert server.run(f"ls {image}*") == f"{image}\n{image}.before-waker\n"
    assert server.run(f"stat -c %a {image}.before-waker") == "600\n"  # it has keys
    table = server.run(f"unmkinitramfs {image} x; cat x/cryptroot/crypttab; rm -r x")
    assert table == TABLE.replace("discard", "discard,tries=0")
    assert server.read("/etc/crypttab") == TABLE
    assert server.count_builds() == 1

    prepared = server.files()
    said = server.prepare(MARKED)
    assert "Nothing was changed" in said
    assert "This will" not in said
    assert len(answers(said)) == 5
    assert (server.files(), server.count_builds()) == (prepared, 0)

    # If a run did not end, the next one does the rest, even if every file is right.
    server.run("systemctl disable waker-wake; touch /var/lib/waker-prepare/unfinished")
    assert "Nothing was changed" not in server.prepare()
    assert server.run("systemctl is-enabled waker-wake") == "enabled\n"

    said = server.undo()
    assert "\nUndone. The initrd of each kernel was examined.\n" in said
    assert server.files_of_the_owner() == bare
    assert server.run(f"ls {image}*") == f"{image}\n"
    inside = server.run(f"unmkinitramfs {image} x; cat x/root-x/.ssh/* x/conf/*/*; :")
    assert "ssh-ed25519" not in inside
    assert "IP=" not in inside
    assert server.undo() == "There is nothing to undo. Nothing was changed.\n"


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


@pytest.mark.parametrize("moment", [1, 4, 9, 14, 19])
def test_an_interruption_is_undone_or_finished(server: Server, moment: int) -> None:
    """The owner had put waker's key there before, without a limit."""
    server.write(KEYS, f"{KEY}\n", 0o600)
    bare, image = server.files_of_the_owner(), server.image

    def cut_power_and_boot() -> str:
        old = server.run(f"sha256sum <{image}")
        server.cut_power(moment)
        # It boots by its old image: that is in use, or in GRUB's menu.
        assert old in server.run(f"for file in {image}*; do sha256sum <$file; done")
        return old

    cut_power_and_boot()
    said = server.undo(check=False)
    assert "Undone" in said or ("nothing to undo" in said and moment == 1)
    server.run("rm -rf /var/lib/waker-prepare")
    assert server.files_of_the_owner() == bare

    old = cut_power_and_boot()
    assert len(answers(server.prepare(MARKED))) == 5
    assert server.run(f"sha256sum <{image}.before-waker") == old
    assert "Nothing was changed" in server.prepare()

    server.cut_power(3 + moment % 4, "--yes --undo")
    assert "Nothing was changed" not in server.prepare()
    assert server.run("systemctl is-enabled waker-wake") == "enabled\n"
    server.cut_power(3 + moment % 4, "--yes --undo")
    said = server.undo()
    assert "Undone" in said
    assert "Left:" not in said
    assert server.files_of_the_owner() == bare
    assert server.run(f"ls {image}*") == f"{image}\n"


def test_a_server_of_waker_3_is_taken_over_and_given_back(server: Server) -> None:
    """With its host key. Its settings had no mark, and its key no limit."""
    server.write(KEYS, f"{OWN_KEY}\n")
    server.write("/etc/initramfs-tools/conf.d/resume", "RESUME=none\n")  # as on any
    # Step 3 of its README.
    server.run(
        f"""cd {DROPBEAR}
        echo 'DROPBEAR_OPTIONS="-p 2222 -s -j -k -c cryptroot-unlock"' |
            tee -a dropbear.conf
        echo '{STATIC}' | tee /etc/initramfs-tools/conf.d/waker
        echo '{KEY}' | tee -a authorized_keys"""
    )
    old = {
        name: server.read(name) for name in (f"{DROPBEAR}/dropbear.conf", KEYS, CONF)
    }
    host_key = server.run(f"sha256sum {DROPBEAR}/*host_key")
    server.prepare()
    assert server.run(f"sha256sum {DROPBEAR}/*host_key") == host_key
    assert server.read(f"{DROPBEAR}/dropbear.conf") == old[f"{DROPBEAR}/dropbear.conf"]
    assert server.read(KEYS) == f"{OWN_KEY}\n{LIMITED}"
    assert "Nothing was changed" in server.prepare()
    assert server.read(CONF).splitlines()[2:] == [
        STATIC,
        "BOOTIF=01-52-54-00-12-34-56",
        '#export DROPBEAR_OPTIONS="-p 2222 -s -j -k"',
    ]
    # Later, its address changes.
    server.set(links=probed()["links"].replace('"192.168.1.20"', '"192.168.1.30"'))
    server.cut_power(5)  # the record has the new file already
    assert server.read(CONF).splitlines()[2] == STATIC
    server.prepare()
    assert server.read(CONF).splitlines()[2] == STATIC.replace("1.20", "1.30")
    second = KEY.replace("AAA waker", "CCC waker")  # of another box
    server.prepare(f"--yes '{second}'")
    assert server.read(KEYS) == f"{OWN_KEY}\n{LIMITED}{LIMITED.replace(KEY, second)}"
    server.cut_power(6, "--yes --undo")
    assert server.read(CONF) == old[CONF]
    assert "Left:" not in server.undo()
    assert {name: server.read(name) for name in old} == old


def test_a_server_of_waker_3_1_is_taken_over(server: Server) -> None:
    """A comment that has changed needs no new image. Its record is understood."""
    server.write(KEYS, f"{OWN_KEY}\n{KEY}\n")
    bare = server.files_of_the_owner()
    server.prepare()
    old_mark = "# Written by waker's prepare.py. `make server UNDO=1` removes it."
    rows = []
    for change in json.loads(server.read(RECORD)):
        kind, name, text, before = change.values()
        if kind == "FILE":
            text = text.replace(MARK, old_mark)
            server.path(name).write_text(text)
        if kind == "KEY":  # only the lines that it replaced
            before = KEY
        rows.append([kind, name, text, before or ""])
    server.write(RECORD, json.dumps(rows))
    server.run(f"sh ./mkinitramfs.sh {server.image}")
    server.count_builds()
    said = server.prepare()
    assert server.count_builds() == 0
    assert "The server is prepared." in said
    assert server.read(CONF).startswith(MARK)
    assert "Nothing was changed" in server.prepare()
    server.spoil("rm sbin/cryptsetup")  # so undo is run twice
    assert "FAILED" in server.undo(check=False)
    server.spoil("")
    assert "Left:" not in server.undo()
    assert server.files_of_the_owner() == bare


DAMAGED = (
    *("", "[{", "{}", "[1]", "[{}]", '[["FILE", "/x"]]', '[["X", "/x", "", ""]]'),
    '[["KEY", "/x", "", ""]]',
)


@pytest.mark.parametrize("text", [*DAMAGED, '[["FILE", "/x", 1, ""]]'])
def test_a_damaged_record_is_kept_and_named(server: Server, text: str) -> None:
    server.write(RECORD, text)
    before = server.files()
    for arguments in (f"--yes '{KEY}'", "--yes --undo"):
        said = server.prepare(arguments, check=False)
        assert f"Nothing was changed on this server: {RECORD} is damaged" in said
    assert server.files() == before


def test_a_failure_is_a_sentence(server: Server) -> None:
    before = server.files()
    assert "unrecognized arguments: --und" in server.prepare("--yes --und", check=False)
    assert server.files() == before
    server.run(f"mkdir -p {CONF}.waker-new")
    said = server.prepare(check=False)
    assert f"FAILED: [Errno 21] Is a directory: '{CONF}.waker-new'\nThe se" in said
    server.run(f"rmdir {CONF}.waker-new")
    server.prepare()


def test_it_waits_while_others_install_packages(server: Server) -> None:
    """As unattended upgrades do at night. Until then, nothing is changed."""
    hold = (
        "import fcntl, time; file = open('/var/lib/dpkg/lock-frontend', 'w');"
        "fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); time.sleep(1000)"
    )
    holder = server.enter(f'exec /usr/bin/python3 -c "{hold}"')
    with subprocess.Popen(holder, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        before = server.files()
        program = server.enter(f"exec env {PROGRAM} --yes '{KEY}'")
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout
            line = waiting.stdout.readline()
            assert line == "Waiting for another program that installs packages.\n"
            assert server.files() == before
            process.kill()
            assert "The server is prepared." in waiting.stdout.read()


def test_it_waits_again_before_packages_change(server: Server) -> None:
    """An upgrade may begin while settings are written."""
    server.set(packages=probed()["packages"] + "dropbear-initramfs install installed\n")
    apt = APT.format(fails="update", folder=server.folder)
    server.write("/usr/bin/apt-get", apt, 0o755)
    server.run("cp $(which sync) sync")
    hold = (
        "import fcntl, os, time; file = open('/var/lib/dpkg/lock-frontend', 'w');"
        "fcntl.lockf(file, fcntl.LOCK_EX); open('held', 'w')\n"
        "while os.path.exists('held'): time.sleep(0.05)"
    )
    (server.folder / "hold").write_text(hold)
    script = f"""#!/bin/sh
cd {server.folder}
if [ ! -e once ]; then
    touch once
    /usr/bin/python3 hold >/dev/null 2>&1 &
    until [ -e held ]; do sleep 0.05; done
fi
exec ./sync "$@"
"""
    server.write("/usr/bin/sync", script, 0o755)
    for arguments in (f"--yes '{KEY}'", "--yes --undo"):
        (server.folder / "once").unlink(missing_ok=True)
        program = server.enter(f"exec env {PROGRAM} {arguments}")
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            for line in process.stdout:
                if line == "Waiting for another program that installs packages.\n":
                    (server.folder / "held").unlink()
        assert process.returncode == 0
        assert not (server.folder / "held").exists()


@pytest.mark.parametrize(
    "keys",
    [
        f"# me\f{OWN_KEY}\n",  # one comment, not an active key
        f"# me\r{OWN_KEY}\n",
        f"{OWN_KEY}\r\n{KEY}\r\n",
        f"{KEY}\n{OWN_KEY}\n{KEY} again",
        f"{OWN_KEY} \udcff\n",
        f"{KEY}\n{LIMITED}",
        "",
    ],
    ids=range(7),
)
def test_own_keys_stay_to_the_byte(server: Server, keys: str) -> None:
    owners = keys.encode(errors="surrogateescape")
    server.write(KEYS, "", 0o640)
    server.path(KEYS).write_bytes(owners)
    server.prepare()
    lines = server.path(KEYS).read_bytes().split(b"\n")
    assert LIMITED.strip().encode() in lines
    assert all(KEY.encode() in line or line in lines for line in owners.split(b"\n"))
    server.spoil("rm sbin/cryptsetup")  # so undo is run twice
    assert "FAILED" in server.undo(check=False)
    server.spoil("")
    assert "Left:" not in server.undo()
    assert server.path(KEYS).read_bytes() == owners
    assert server.run(f"stat -c %a {KEYS}") == "640\n"


def test_the_last_setting_of_the_address_counts(server: Server) -> None:
    """As in the initrd: that of the kernel, or else of the last file."""
    folder, look = "/etc/initramfs-tools", "sh server/probes.sh own_ip"
    server.write(f"{folder}/initramfs.conf", "MODULES=most\nIP=dhcp\n")
    server.write(f"{folder}/conf.d/own.dpkg-old", "IP=off\n")  # nobody reads it
    assert server.run(look) == "IP=dhcp\n"
    server.write(f"{folder}/conf.d/own", "export IP='192.168.1.9'  # mine\n")
    server.write(CONF, f"{STATIC}\n")
    assert server.run(look) == "IP=192.168.1.9\n"
    (server.folder / "cmdline").write_text("quiet ip=off\n")
    assert server.run(look) == "IP=off\n"


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


def test_what_the_owner_has_changed_since_is_not_lost(server: Server) -> None:
    """In what was written, in GRUB's menu, or beside waker's key."""
    menu, own_entry = "/boot/grub/custom.cfg", "menuentry 'mine' {\n}\n"
    assert "WARNING: the kept" not in server.prepare()
    server.write(menu, own_entry + server.read(menu))
    server.write(KEYS, f"{server.read(KEYS)}{OWN_KEY}\n")
    changed = f"{server.read(CONF)}MODULES=dep\n"
    server.write(CONF, changed)
    before = server.files()
    said = server.prepare(check=False)
    assert f"Nothing was changed on this server: {CONF} has your changes" in said
    assert server.files() == before

    # Even if a run was interrupted.
    other = "/etc/kernel/postrm.d/waker"
    ours = server.read(other)
    server.write(other, "mine")
    server.run(f"rm {CONF}; touch /var/lib/waker-prepare/unfinished")
    said = server.prepare(check=False)
    assert f"Nothing was changed on this server: {other} has your changes" in said
    assert "\nThe server is half prepared. " in said
    server.write(other, ours, 0o755)
    assert "WARNING: the kept image gets no entry" in server.prepare()
    assert server.read(menu).startswith(own_entry)

    server.write(CONF, changed)
    server.write(KEYS, f'from="192.168.1.2",{server.read(KEYS)}')
    said = server.undo()
    assert f"Left: {CONF}, which you have changed." in said
    assert f"Left: waker's key in {KEYS}, because you have changed" in said
    assert server.read(CONF) == changed
    assert server.read(KEYS) == f'from="192.168.1.2",{LIMITED}{OWN_KEY}\n'
    assert server.read(menu).startswith(own_entry)


def package(name: str) -> dict[str, str | None]:
    """Return an entry of the record."""
    return {"kind": "PACKAGE", "name": name, "text": "", "before": None}


def test_undo_removes_packages_but_not_what_opens_the_disk(server: Server) -> None:
    """Nor what lets its owner do that with another key."""
    need("tcsh")
    need("cryptsetup")
    server.write(KEYS, f"{OWN_KEY}\n")
    server.write(CONF, f"{STATIC}\n")  # waker 3.0's
    server.prepare()
    server.run(f"rm {CONF}")
    rows = json.loads(server.read(RECORD))
    needed = "cryptsetup-bin", "dropbear-bin"
    rows += map(package, ("tcsh", *needed))
    server.write(RECORD, json.dumps(rows))
    for name in ("dropbear_rsa_host_key.pub", "own_host_key", "own_host_key.pub"):
        server.write(f"{DROPBEAR}/{name}", "x")
    server.write("/etc/initrd-ssh/host_key.pub", "x")  # of dracut's module
    interrupted = "/^Package: ethtool$/,/^Version/s/ok installed/ok unpacked/"
    server.run(f"sed -i '{interrupted}' /var/lib/dpkg/status")
    known = (server.folder / "probed/packages").read_text()
    server.set(packages=f"{known}linux-image-6.9 install unpacked\n")
    assert "linux-image-6.9 is half installed" in server.undo(check=False)
    server.set(packages=known)
    said = server.undo()
    assert "Left: /etc/initrd-ssh/host_key.pub." in said
    for name in needed:
        assert f"Left: the package {name}." in said
    assert "tcsh" not in said.partition("Undone.")[2]
    assert f"Left: {CONF}" not in said  # it is not there any more
    assert server.run(f"cd {DROPBEAR}; ls *.pub") == "own_host_key.pub\n"
    status = "dpkg-query -Wf '${Package} ${db:Status-Status}, ' cryptsetup-bin ethtool"
    assert server.run(status) == "cryptsetup-bin installed, ethtool installed, "
    assert server.run("command -v tcsh", check=False) == ""


def test_undo_leaves_no_dropbear_that_came_with_it(server: Server) -> None:
    """If nobody else has a key there. So the key goes first."""
    server.prepare()
    rows = json.loads(server.read(RECORD))
    rows.append(package("dropbear-bin"))
    server.write(RECORD, json.dumps(rows))
    assert "dropbear" not in server.undo().partition("Undone.")[2]
    assert server.run("command -v dropbear", check=False) == ""


# As apt-get of Debian 12 announces packages. It fails if its last argument is so.
APT = """#!/bin/sh
echo "$@" >>{folder}/asked
case $* in *" {fails}") echo "E: why" >&2; exit 100 ;; esac
echo "Inst libmnl0 [1.0.4-2] (1.0.4-3 Debian:12.12/oldstable [amd64])"
echo "Inst ethtool (1:6.1-1 Debian:12.12/oldstable [amd64])"
"""


def test_packages_are_installed_before_an_image_is_built(server: Server) -> None:
    """What is only upgraded with them is not undone."""
    packages = f"{probed()['packages']}dropbear-initramfs install installed\n"
    server.set(packages=packages)
    server.count_builds()

    def let_fail(last: str) -> None:
        apt = APT.format(fails=last, folder=server.folder)
        server.write("/usr/bin/apt-get", apt, 0o755)

    for fails in ("--simulate", "ethtool"):
        let_fail(fails)
        said = server.prepare(MARKED, check=False)
        assert re.search("(?m)^FAILED: `apt-get .* ethtool.*` failed", said)
        assert "E: why" in said
        assert "waker-begin" not in said
    assert server.count_builds() == 0
    conf = server.path("/etc/etckeeper/etckeeper.conf")
    conf.parent.mkdir()
    for setting, hint in (("# ", False), ("", True)):  # it has aborted apt
        conf.write_text(f"{setting}AVOID_COMMIT_BEFORE_INSTALL=1\n")
        said = server.prepare(check=False)
        assert ("\nIf etckeeper refused it, first run `etckee" in said) == hint
    let_fail("update")
    (server.folder / "asked").unlink()
    packages = packages.replace("cryptsetup-initramfs install installed\n", "")
    server.set(packages=packages)
    said = server.prepare()  # it shows what apt says
    assert "\nE: why\n" in said
    assert "\nInst ethtool" in said
    record = json.loads(server.read(RECORD))
    assert [c["name"] for c in record if c["kind"] == "PACKAGE"] == ["ethtool"]
    update, *installs = (server.folder / "asked").read_text().splitlines()
    assert update.endswith("update")
    assert len(installs) == 4  # each of two packages is tried first
    for option in ("--no-remove", "Lock::Timeout=600", "Options::=--force-confold"):
        assert all(option in line for line in installs)


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


def test_it_needs_only_python() -> None:
    for path in CHECKOUT.glob("server/*.py"):
        imported = {*re.findall(r"(?m)^(?:import|from) (\w+)", path.read_text())}
        assert imported <= {*sys.stdlib_module_names, "facts"}


# ---- The module of dracut ----

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


def test_a_connection_keeps_the_cards_for_three_seconds_at_most(tmp_path: Path) -> None:
    noted = clean(tmp_path, most=3, close=False)
    assert int(noted["stopped"]) - int(noted["begun"]) > 2e9  # it counts whole seconds
