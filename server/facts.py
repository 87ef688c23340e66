"""Turn what probes.sh printed into facts, or refuse.

Pure. Whatever waker could not unlock later is refused here, before anything is changed.
"""

import json
import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any, Final, NamedTuple

PACKAGES: Final = {
    "dracut": ("dracut-network", "openssh-server", "ethtool"),
    "initramfs-tools": ("cryptsetup-initramfs", "dropbear-initramfs", "ethtool"),
}
# The option in crypttab with which a disk that / does not need is opened in the initrd.
ATTACH: Final = {"dracut": "x-initrd.attach", "initramfs-tools": "initramfs"}
NOT_LUKS: Final = ("keyscript=", "plain", "tcrypt", "bitlk")  # how such options begin
TRUE: Final = ("1", "yes", "y", "true", "t", "on")  # for systemd
# How Debian's initrd is told to ask for an address; how not to.
ASKING: Final = ("", "on", "any", "all", "dhcp", "bootp", "both", "rarp")
FIXED: Final = ("", "off", "none", "static")
TOKENS: Final = {  # in a LUKS header, by systemd-cryptenroll: what a person must have
    "systemd-fido2": "a FIDO2 security key",
    "systemd-pkcs11": "a PKCS#11 smart card",
    "systemd-tpm2": "a TPM's PIN",
}

# ---- Values --------------------------------------------------------------------------

Probed = dict[str, str]  # what each function of probes.sh printed
Token = dict[str, Any]  # as in the JSON of a LUKS header
Link = dict[str, Any]  # as `ip -json` prints links, addresses and routes


class Refused(Exception):
    """Why the server cannot be prepared. Nothing was changed."""


class Disk(NamedTuple):
    """A line of crypttab."""

    name: str
    key: str
    options: list[str]


class Card(NamedTuple):
    """The network card, with the address that the initrd will have."""

    name: str
    mac: str  # the permanent one: a bridge or NetworkManager may change the current
    drivers: list[str]  # kernel modules, unless they are part of the kernel
    address: IPv4Interface
    router: str  # or ""
    has_dhcp: bool  # gave the address


class Ports(NamedTuple):
    """The ports of SSH servers."""

    system: str
    initrd: str


class Facts(NamedTuple):
    """What decides each change."""

    builder: str  # of the initrd: dracut or initramfs-tools
    disks: list[str]  # that ask for a passphrase in the initrd
    tpm_disks: list[str]  # of those, which a TPM opens
    card: Card
    ports: Ports
    own_ip: str  # the owner's setting for the initrd's address, or ""
    own_options: str  # the owner's options for dropbear, or ""
    missing: list[str]  # packages
    kernels: list[str]  # from the oldest to the newest
    kept: str  # the kernel whose image is kept


# ---- Packages and kernels ------------------------------------------------------------


def find_builder(probed: Probed) -> str:
    if not re.search(r"(?m)^ID(_LIKE)?=.*\bdebian\b", probed["system"]):
        raise Refused("it is neither Debian nor one of its relatives.")
    # After an interruption, a package that is wanted may not be installed.
    wanted = re.findall(r"(?m)^(\S+) (?:install|hold) ", probed["packages"])
    if "tinyssh-initramfs" in wanted:
        raise Refused("waker cannot use tinyssh. Remove the package tinyssh-initramfs.")
    for builder in PACKAGES:
        if builder in wanted:
            return builder
    raise Refused("neither initramfs-tools nor dracut builds its initrd.")


def check_kernels(probed: Probed) -> None:
    """Refuse a kernel that is half installed: GRUB could start it without an initrd."""
    half = r"(?m)^(linux-image-\S+) \S+ (?:unpacked|half-\S+|triggers-\S+)$"
    if found := re.search(half, probed["packages"]):
        raise Refused(f"{found[1]} is half installed. First run `dpkg --configure -a`.")


def find_kept(probed: Probed, kernels: Sequence[str]) -> str:
    """Find the kernel whose image is kept: the running one, or else the newest.

    If a copy exists, stay with its kernel.
    """
    images = probed["images"].split()
    with_image = [kernel for kernel in kernels if f"initrd.img-{kernel}" in images]
    if not with_image:
        raise Refused("no installed kernel has an initrd in /boot to keep.")
    for kernel in with_image:
        if f"initrd.img-{kernel}.before-waker" in images:
            return kernel
    running = probed["running"].strip()
    return running if running in with_image else with_image[-1]


# ---- Disks ---------------------------------------------------------------------------


def asks(disk: Disk) -> bool:
    return disk.key in ("none", "-")


def parse_crypttab(text: str) -> dict[str, Disk]:
    disks: dict[str, Disk] = {}
    for line in text.splitlines():
        fields = line.split()
        if fields and not fields[0].startswith("#"):
            key = fields[2] if len(fields) > 2 else "none"
            options = fields[3].split(",") if len(fields) > 3 else []
            disks.setdefault(fields[0], Disk(fields[0], key, options))
    return disks


def find_root_disks(probed: Probed) -> list[str]:
    """Name the encrypted disks that / needs."""
    if "zfs" in probed["file_systems"]:
        raise Refused("it uses ZFS, which waker cannot unlock.")
    layers = [line.split() for line in probed["disks"].splitlines()]
    if any("iscsi" in layer or layer[0].startswith("nbd") for layer in layers):
        raise Refused("its disk is on the network, which the initrd takes down.")
    names = [layer[0] for layer in layers if "crypt" in layer[1:]]
    if not names:
        raise Refused("the disk with / is not encrypted. There is nothing to unlock.")
    if " crypt" in probed["boot_disks"]:
        raise Refused("/boot is encrypted: GRUB asks too early. Move it out of LUKS.")
    return [*dict.fromkeys(names)]


def find_disks(probed: Probed, builder: str) -> list[Disk]:
    """Find the disks that ask in the initrd. Refuse others that ask at the screen."""
    table = parse_crypttab(probed["crypttab"])
    disks: list[Disk] = []
    for name in find_root_disks(probed):
        if name not in table:
            raise Refused(f"/ is on {name}, but no line of /etc/crypttab has it.")
        disk = table.pop(name)
        if not asks(disk) or any(o.startswith(NOT_LUKS) for o in disk.options):
            raise Refused(f"a key file or keyscript opens {name}, or it is not LUKS.")
        disks.append(disk)
    for disk in filter(asks, table.values()):
        if ATTACH[builder] in disk.options:
            disks.append(disk)
        elif not {"noauto", "nofail"} & {*disk.options}:
            raise Refused(
                f"{disk.name} asks at the screen later. See docs/server.md, or add"
                f" {ATTACH[builder]} to its options in /etc/crypttab."
            )
    return disks


def list_tokens(disk: Disk) -> list[Token]:
    """List the tokens that the options of a disk name."""
    values = dict(option.partition("=")[::2] for option in disk.options)
    tokens: list[Token] = []
    if "fido2-device" in values:
        tokens.append({"type": "systemd-fido2"})
    if "pkcs11-uri" in values:
        tokens.append({"type": "systemd-pkcs11"})
    if "tpm2-device" in values:
        has_pin = values.get("tpm2-pin", "").lower() in TRUE
        tokens.append({"type": "systemd-tpm2", "tpm2-pin": has_pin})
    return tokens


def check_options(probed: Probed, disks: Sequence[Disk]) -> None:
    """Refuse options with which systemd does not ask once, or not as crypttab says."""
    # Those of all disks do not count for a disk that is in crypttab.
    if found := re.search(r"luks\.options=[0-9a-fA-F-]{36}=", probed["kernel_options"]):
        raise Refused(f"the kernel has {found[0]}... Move that to /etc/crypttab.")
    for disk in disks:
        for option in disk.options:
            name, _, value = option.partition("=")
            if name in ("headless", "verify") and (value.lower() in ("", *TRUE)):
                raise Refused(f"{disk.name} has the option {option}. Remove that.")


def find_tpm_disks(probed: Probed, disks: Sequence[Disk]) -> list[str]:
    """Find disks that systemd opens with a TPM. Refuse what needs a person there.

    waker has the passphrase alone: systemd would ask for a PIN in another way.
    """
    headers = dict(line.split(" ", 1) for line in probed["tokens"].splitlines())
    found: list[str] = []
    for disk in disks:
        if not headers.get(disk.name):
            problem = f"the LUKS header of {disk.name} cannot be read."
            raise Refused(f"{problem} Install cryptsetup, and open the disk.")
        header = json.loads(headers[disk.name])
        tokens = [*header.get("tokens", {}).values(), *list_tokens(disk)]
        for token in tokens:
            kind = token["type"]
            if kind == "systemd-tpm2" and not token.get("tpm2-pin"):
                found.append(disk.name)
            elif kind in TOKENS:
                raise Refused(f"{disk.name} asks for {TOKENS[kind]} at the server.")
    return [*dict.fromkeys(found)]


# ---- Network -------------------------------------------------------------------------


def find_routes(probed: Probed) -> list[Link]:
    """Find routes that use an interface; the one to the box comes first."""
    routes: list[Link] = []
    for line in probed["routes"].splitlines():
        routes += [r for r in json.loads(line) if r.get("dev", "lo") != "lo"]
    return routes


def find_drivers(probed: Probed) -> dict[str, list[str]]:
    """Find the physical cards; returns the names of their kernel modules by card."""
    drivers: dict[str, list[str]] = {}
    for line in probed["drivers"].splitlines():
        card, *modules = line.split()
        drivers[card] = [*dict.fromkeys(Path(module).name for module in modules)]
    return drivers


def find_only_card(bridge: str, cards: Iterable[str], links: dict[str, Link]) -> str:
    """Return the one physical card in a bridge."""
    found = [n for n in cards if links.get(n, {}).get("master") == bridge]
    if len(found) != 1:
        raise Refused(f"the bridge {bridge} has {len(found)} physical cards, not 1.")
    return found[0]


def find_card(probed: Probed, wanted: str) -> Card:
    """Find the card that is wanted, or else the one that leads to the box, or out."""
    links = {link["ifname"]: link for link in json.loads(probed["links"] or "[]")}
    drivers, routes = find_drivers(probed), find_routes(probed)
    if not wanted and not routes:
        raise Refused("it has no default route. Name the card with --interface.")
    interface = wanted or routes[0]["dev"]
    if interface not in links:
        raise Refused(f"it has no card {interface}. It has {', '.join(drivers)}.")
    interface = card = links[interface].get("master", interface)
    if links[interface].get("linkinfo", {}).get("info_kind") == "bridge":
        card = find_only_card(interface, drivers, links)
    if f"/{card}/phy80211" in probed["wifi"]:
        raise Refused(f"{card} is Wi-Fi. Waking and unlocking need a cable.")
    if card not in drivers or links[card]["link_type"] != "ether":
        raise Refused(f"{card} is not a physical card. Name one: --interface.")
    # The first route wins. An address that it does not use may belong to a service.
    route: Link = {}
    for other in reversed([r for r in routes if r["dev"] == interface]):
        route |= other
    addresses = [a for a in links[interface]["addr_info"] if a["family"] == "inet"]
    addresses.sort(key=lambda a: a["scope"] != "global")
    addresses.sort(key=lambda a: a["local"] != route.get("prefsrc"))
    if not addresses:
        raise Refused(f"{interface} has no IPv4 address, and the initrd needs one.")
    return Card(
        name=card,
        mac=links[card].get("permaddr", links[card]["address"]),
        drivers=drivers[card],
        address=IPv4Interface(f"{addresses[0]['local']}/{addresses[0]['prefixlen']}"),
        router=route.get("gateway", ""),
        has_dhcp="dynamic" in addresses[0],
    )


def check_link_mac(probed: Probed, card: Card) -> None:
    """Refuse a card to which a .link file gives another MAC address in the initrd."""
    for line in probed["link_macs"].splitlines():
        name, file, setting = line.split(" ", 2)
        digits = re.sub("[^0-9a-f]", "", setting.partition("=")[2].lower())
        if name == card.name and digits != card.mac.replace(":", ""):
            raise Refused(f"{file} gives {name} another MAC address. Remove that.")


def find_own_ip(probed: Probed, card: Card) -> str:
    """Return the owner's address for Debian's initrd. Refuse another than the system's.

    IP=ADDRESS:SERVER:ROUTER:NETMASK:NAME:CARD:PROTOCOL. Source: initramfs.conf(5)
    """
    setting = probed["own_ip"].partition("\n")[0].strip()
    if not setting:
        return ""
    host, netmask = str(card.address.ip), str(card.address.netmask)
    fields = setting.removeprefix("IP=").split(":") + [""] * 6
    address, _, router, mask, _, name, protocol = fields[:7]
    is_right = (address, router, mask) == (host, card.router, netmask)
    if address[:1].isdigit():
        asks = protocol not in FIXED
    else:
        asks = address in ASKING and protocol in ASKING
    if name not in ("", card.name) or not (is_right or asks):
        right = f"{host}::{card.router}:{netmask}"
        raise Refused(f"the initrd has {setting}, not {right}. Remove that.")
    if asks and not card.has_dhcp:
        problem = f"the initrd asks for an address ({setting}), but the system's is"
        raise Refused(f"{problem} fixed: {host}. Remove that.")
    return setting


def find_own_options(probed: Probed) -> str:
    """Return the owner's options for dropbear. Refuse another command."""
    options = probed["own_options"].strip()
    command = re.search(r"(?:^|\s)-[a-zA-Z]*?c\s*(\S.*)", options)
    if command and "cryptroot-unlock" not in command[1]:
        raise Refused(f"DROPBEAR_OPTIONS has another command: {command[1]}")
    return options


def find_ports(probed: Probed, builder: str, options: str, connection: str) -> Ports:
    """Find the ports of the system's SSH server, and of the initrd's.

    `options` are the owner's for dropbear. `connection` is SSH_CONNECTION, whose last
    word is the port that the box uses.
    """
    found = re.findall(r"(?m):([0-9]+)(?= |$)", probed["ssh_ports"])
    found = connection.split()[3:] + found
    if not found:  # waker sees by it that the server is up
        raise Refused("it has no SSH server. Install the package openssh-server.")
    system = found[0]
    if options:
        port = re.search(r"(?:^|\s)-[a-zA-Z]*?p\s*(?:\S*:)?([0-9]+)", options)
        return Ports(system, port[1] if port else "22")
    taken = {*found}
    if builder == "initramfs-tools":  # dropbear may share the port by which waker looks
        taken.remove(system)
    free = (str(port) for port in range(2222, 2300) if str(port) not in taken)
    return Ports(system, next(free))


# ---- All of them ---------------------------------------------------------------------


def understand(probed: Probed, wanted_card: str, connection: str) -> Facts:
    """Turn what was probed into facts. Raises Refused."""
    builder = find_builder(probed)
    check_kernels(probed)
    disks = find_disks(probed, builder)
    card = find_card(probed, wanted_card)
    tpm_disks: list[str] = []
    own_ip = own_options = ""
    if builder == "dracut":  # systemd asks, and knows tokens
        check_options(probed, disks)
        tpm_disks = find_tpm_disks(probed, disks)
    else:
        check_link_mac(probed, card)
        own_ip = find_own_ip(probed, card)
        own_options = find_own_options(probed)
    installed = re.findall(r"(?m)^(\S+) \S+ installed$", probed["packages"])
    kernels = probed["kernels"].split()
    return Facts(
        builder=builder,
        disks=[disk.name for disk in disks],
        tpm_disks=tpm_disks,
        card=card,
        ports=find_ports(probed, builder, own_options, connection),
        own_ip=own_ip,
        own_options=own_options,
        missing=[name for name in PACKAGES[builder] if name not in installed],
        kernels=kernels,
        kept=find_kept(probed, kernels),
    )


def describe(facts: Facts) -> list[str]:
    """Say what was found, in the words of a person."""
    card = facts.card
    router = f", router {card.router}" if card.router else ""
    lines = [
        f"encrypted disks: {', '.join(facts.disks)}",
        f"network card: {card.name} ({card.mac}), {card.address}{router}",
        f"SSH: port {facts.ports.system}; in the initrd, {facts.ports.initrd}",
        f"initrd: built by {facts.builder}, for {', '.join(facts.kernels)}",
    ]
    if facts.own_ip:
        lines.append(f"your address for the initrd, which stays: {facts.own_ip}")
    if facts.own_options:
        lines.append(f"your dropbear options, which stay: {facts.own_options}")
    for disk in facts.tpm_disks:
        opens = "opens by itself, with a TPM; waker is asked only if that fails"
        lines.append(f"{disk} {opens}")
    return lines
