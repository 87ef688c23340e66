"""What `facts.py` makes of recorded servers."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import CHECKOUT
from facts import Refused, describe
from recorded import BOX, RECORDED, TABLE, find, probed
from simulated import CONF, STATIC, Server


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
