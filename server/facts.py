"""Turn what probes.sh printed into facts, or refuse.

Pure. Whatever waker could not unlock later is refused here, before anything is changed.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any, Final, NamedTuple

PACKAGES: Final = {
    "dracut": ("dracut-network", "openssh-server", "ethtool"),
    "initramfs-tools": ("cryptsetup-initramfs", "dropbear-initramfs", "ethtool"),
}
# If one of these is omitted, dracut omits our module or fails. Seen with dracut 106.
NEEDED_MODULES: Final = (
    *("base", "bash", "crypt", "dm", "fs-lib", "initrd-ssh", "initrd-ssh-last"),
    *("kernel-network-modules", "net-lib", "rootfs-block", "systemd"),
    *("systemd-ask-password", "systemd-cryptsetup", "systemd-networkd"),
    *("systemd-sysusers", "systemd-udevd", "udev-rules"),
)
# The crypttab option that makes the initrd open a disk that / does not need.
ATTACH: Final = {"dracut": "x-initrd.attach", "initramfs-tools": "initramfs"}
# Debian's keyscripts that ask a person. (decrypt_derived and passdev do not.)
ASKING_SCRIPTS: Final = (
    *("decrypt_gnupg", "decrypt_gnupg-sc", "decrypt_keyctl", "decrypt_opensc"),
    "decrypt_ssl",
)
CLEVIS: Final = {"clevis-dracut", "clevis-initramfs"}  # opens disks in the initrd
NOT_LUKS: Final = ("keyscript=", "plain", "tcrypt", "bitlk")  # how such options begin
TRUE: Final = ("1", "yes", "y", "true", "t", "on")  # for systemd
# How Debian's initrd is told to ask for an address; how not to.
ASKING: Final = ("", "on", "any", "all", "dhcp", "bootp", "both", "rarp")
FIXED: Final = ("", "off", "none", "static")
TOO_COMPLEX: Final = {  # interfaces, by their kind for `ip`
    "bond": "a bond",
    "openvswitch": "Open vSwitch",
    "team": "a team",
    "vlan": "a VLAN",
}
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
    helpers: dict[str, str]  # what opens some of them without waker
    card: Card
    ports: Ports
    own_ip: str  # the owner's setting for the initrd's address, or ""
    own_options: str  # the owner's options for dropbear, or ""
    missing: list[str]  # packages
    kernels: list[str]  # from the oldest to the newest
    kept: str  # the kernel whose image is kept


# ---- What rules a server out ---------------------------------------------------------
# "PROBE: PATTERN" rules it out if a line that the probe printed begins like that. {} is
# the pattern's group.

# Undo checks these as well: GRUB could start a half-installed kernel without an initrd.
NOT_NOW: Final = {
    r"packages: ((?:linux-(?:image|modules)|(?:proxmox|pve)-kernel)-\S+) \S+ "
    r"(?:unpacked|half-\S+|triggers-\S+)$": (
        "{} is half installed. First run `dpkg --configure -a`."
    ),
    "boot: unmounted": "/boot is not mounted, although it is in /etc/fstab. Mount it.",
}
# This, if there is something to change in /boot.
READ_ONLY: Final = {
    "boot: read-only": "/boot cannot be written. Is it mounted read-only?",
}
UNFIT: Final = {
    "init: none": "it does not run systemd, which must keep Wake-on-LAN on.",
    # A kernel gives the name of its own stub if GRUB gives none.
    r"boot_loader: (?!GRUB|Linux EFI stub)(\S.*)": (
        "it boots with {}, not with GRUB from /boot, which is all that waker knows."
    ),
    "packages: tinyssh-initramfs (?:install|hold) ": (
        "waker cannot use tinyssh. Remove the package tinyssh-initramfs."
    ),
    "file_systems: zfs": (
        "it uses ZFS. waker can neither unlock that, nor find LUKS disks below it."
    ),
    "disks: nbd|.* iscsi": "its disk is on the network, which the initrd takes down.",
}


def check(probed: Probed, rules: Mapping[str, str]) -> None:
    """Refuse a server that a rule rules out."""
    for rule, problem in rules.items():
        probe, _, pattern = rule.partition(": ")
        if found := re.search(f"(?m)^(?:{pattern})", probed[probe]):
            raise Refused(problem.format(*found.groups()))


# ---- Packages and kernels ------------------------------------------------------------


def find_builder(probed: Probed) -> str:
    if not re.search(r"(?m)^ID(_LIKE)?=.*\bdebian\b", probed["system"]):
        raise Refused("it is neither Debian nor one of its relatives.")
    # What is wanted counts: after an interruption, it may not be installed.
    wanted = re.findall(r"(?m)^(\S+) (?:install|hold) ", probed["packages"])
    for builder in PACKAGES:
        if builder in wanted:
            return builder
    raise Refused("neither initramfs-tools nor dracut builds its initrd.")


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


def check_modules(probed: Probed) -> None:
    """Refuse dracut settings that omit a module that ours needs."""
    lines = [line.split() for line in probed["omitted"].splitlines()]
    omitted = lines[-1][1:] if lines else []  # each line has those omitted so far
    for module in NEEDED_MODULES:
        if module in omitted:
            file = next(file for file, *modules in lines if module in modules)
            raise Refused(f"{file} makes dracut omit {module}, which waker needs.")


def list_installed(probed: Probed) -> list[str]:
    return re.findall(r"(?m)^(\S+) \S+ installed$", probed["packages"])


def find_missing(probed: Probed, builder: str) -> list[str]:
    """Name the packages to install."""
    names = [*PACKAGES[builder]]
    if builder == "dracut" and not probed["systemd_cryptsetup"]:
        names.append("systemd-cryptsetup")
    installed = list_installed(probed)
    return [name for name in names if name not in installed]


# ---- Disks ---------------------------------------------------------------------------


def asks(disk: Disk) -> bool:
    return disk.key in ("none", "-")


def read_options(disk: Disk) -> dict[str, str]:
    """Return the values of a disk's options, "" for those that have none."""
    return dict(option.partition("=")[::2] for option in disk.options)


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
    layers = [line.split() for line in probed["disks"].splitlines()]
    names = [layer[0] for layer in layers if "crypt" in layer[1:]]
    if not names:
        raise Refused("the disk with / is not encrypted. There is nothing to unlock.")
    if " crypt" in probed["boot_disks"]:
        raise Refused("/boot is encrypted: GRUB asks too early. Move it out of LUKS.")
    return [*dict.fromkeys(names)]


def check_keyscript(disk: Disk, builder: str) -> None:
    """Refuse a keyscript that asks a person, or that nothing runs."""
    script = read_options(disk).get("keyscript", "")
    if Path(script).name in ASKING_SCRIPTS:
        raise Refused(
            f"the keyscript {script} asks a person to open {disk.name}, and waker does"
            " not answer it. Remove it: waker gives each disk the same passphrase."
        )
    if script and builder == "dracut":
        raise Refused(
            f"{disk.name} has a keyscript, which neither dracut nor systemd runs. In"
            " /etc/crypttab, use a key file alone, or nofail without x-initrd.attach."
        )


def asks_in_initrd(disk: Disk, builder: str, swap: Sequence[str]) -> bool:
    """Return whether the initrd asks for a disk that / does not need.

    Refuse a disk for which systemd may ask later. Debian's initrd runs the keyscripts
    of disks with `swap`, from which it would resume.
    """
    attach, is_early = ATTACH[builder], ATTACH[builder] in disk.options
    if not is_early and {"noauto", "nofail"} & {*disk.options}:
        return False
    check_keyscript(disk, builder)
    has_keyscript = "keyscript" in read_options(disk)
    if has_keyscript and disk.name in swap:
        return False
    if (asks(disk) or has_keyscript) and not is_early:
        raise Refused(
            f"{disk.name} may ask at the screen later. (A TPM or Clevis may fail, and"
            f" systemd runs no keyscript.) In /etc/crypttab, add {attach} (the initrd"
            " opens it), or add nofail or noauto, there and in /etc/fstab (nothing"
            " waits for it)."
        )
    return asks(disk) and not has_keyscript


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
    swap = re.findall(r"(?m)^(\S+) +crypt\b", probed["swap"])
    return disks + [d for d in table.values() if asks_in_initrd(d, builder, swap)]


def list_tokens(disk: Disk) -> list[Token]:
    """List the tokens that the options of a disk name."""
    values = read_options(disk)
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


def read_headers(probed: Probed) -> dict[str, list[Token]]:
    """Return the tokens in LUKS headers, for the disks whose header can be read."""
    headers: dict[str, list[Token]] = {}
    for line in probed["tokens"].splitlines():
        name, _, text = line.partition(" ")
        if text:
            headers[name] = [*json.loads(text).get("tokens", {}).values()]
    return headers


def find_helpers(probed: Probed, disks: Sequence[Disk]) -> dict[str, str]:
    """Return whether Clevis or Mandos opens a disk, by the disk's name."""
    installed, headers = list_installed(probed), read_headers(probed)
    helpers: dict[str, str] = {}
    for disk in disks:
        kinds = [token["type"] for token in headers.get(disk.name, [])]
        if "mandos-client" in installed:
            helpers[disk.name] = "Mandos"
        elif "clevis" in kinds and CLEVIS & {*installed}:
            helpers[disk.name] = "Clevis"
    return helpers


def find_tpm_disks(probed: Probed, disks: Sequence[Disk]) -> list[str]:
    """Find disks that systemd opens with a TPM. Refuse what needs a person there.

    waker has the passphrase alone: systemd would ask for a PIN in another way.
    """
    headers = read_headers(probed)
    found: list[str] = []
    for disk in disks:
        if disk.name not in headers:
            if "header" in read_options(disk):
                raise Refused(
                    f"{disk.name} has a detached header. waker cannot read it."
                )
            problem = f"the LUKS header of {disk.name} cannot be read."
            raise Refused(f"{problem} Install cryptsetup, and open the disk.")
        for token in headers[disk.name] + list_tokens(disk):
            kind = token["type"]
            if kind == "systemd-tpm2" and not token.get("tpm2-pin"):
                found.append(disk.name)
            elif kind in TOKENS:
                raise Refused(f"{disk.name} asks for {TOKENS[kind]} at the server.")
    return found


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


def find_kind(link: Link) -> str:
    """Return the kind of a virtual interface, "" for others."""
    kind: str = link.get("linkinfo", {}).get("info_kind", "")
    return kind


def check_kind(link: Link) -> None:
    """Refuse an interface that the initrd cannot have."""
    if what := TOO_COMPLEX.get(find_kind(link)):
        raise Refused(f"{link['ifname']} is {what}, which the initrd cannot use.")


def find_only_card(bridge: str, cards: Iterable[str], links: dict[str, Link]) -> str:
    """Return the one physical card in a bridge."""
    members = [n for n, link in links.items() if link.get("master") == bridge]
    found = [name for name in members if name in cards]
    if len(found) == 1:
        return found[0]
    for name in members:
        check_kind(links[name])
    raise Refused(f"the bridge {bridge} has {len(found)} physical cards, not 1.")


def find_cable(probed: Probed, links: dict[str, Link]) -> str:
    """Name a card that could be used instead of Wi-Fi, or return ""."""
    for name in find_drivers(probed):
        link = links.get(name, {})
        is_up = "LOWER_UP" in link.get("flags", []) and link["link_type"] == "ether"
        has_address = any(a["family"] == "inet" for a in link.get("addr_info", []))
        if is_up and has_address and f"/{name}/phy80211" not in probed["wifi"]:
            return name
    return ""


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
    check_kind(links[interface])
    if find_kind(links[interface]) == "bridge":
        card = find_only_card(interface, drivers, links)
    if f"/{card}/phy80211" in probed["wifi"]:
        cable = find_cable(probed, links)
        hint = f" Use the one in {cable}: --interface {cable}." if cable else ""
        raise Refused(f"{card} is Wi-Fi. Waking and unlocking need a cable.{hint}")
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


def check_drivers(probed: Probed, card: Card) -> None:
    """Refuse a kernel that has no driver for the card, although another one has it."""
    for line in probed["missing_drivers"].splitlines():
        kernel, driver = line.split()
        if driver in card.drivers:
            problem = f"kernel {kernel} has no driver {driver} for {card.name}"
            raise Refused(f"{problem}: remove that kernel, or build the driver for it.")


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


def list_ssh_ports(probed: Probed) -> list[str]:
    return re.findall(r"(?m):([0-9]+)(?= |$)", probed["ssh_ports"])


def find_system_port(probed: Probed, card: Card, connection: str) -> str:
    """Find the port of the system's SSH server, by which waker sees that it is up.

    `connection` is SSH_CONNECTION, whose last word is the port that the box uses. It
    may have come by another card, or by a tunnel.
    """
    found = connection.split()[3:] + list_ssh_ports(probed)
    if not found:
        raise Refused("it has no SSH server. Install the package openssh-server.")
    # A socket may be bound to an interface as well.
    listening = re.sub("%[^:]*", "", probed["listening"]).split()
    for port in found:
        for address in ("*", "0.0.0.0", card.address.ip):  # noqa: S104 # of the server
            if f"{address}:{port}" in listening:
                return port
    problem = f"nothing listens on port {found[0]} of {card.address.ip}"
    raise Refused(
        f"{problem}, so waker could not see that the system is up. Is there a"
        " ListenAddress in the SSH server's configuration?"
    )


def find_initrd_port(probed: Probed, builder: str, options: str, system: str) -> str:
    """Find a port for the initrd's SSH server.

    `options` are the owner's for dropbear. `system` is the port of the system's server.
    """
    if options:
        port = re.search(r"(?:^|\s)-[a-zA-Z]*?p\s*(?:\S*:)?([0-9]+)", options)
        return port[1] if port else "22"
    taken = {*list_ssh_ports(probed), system}
    if builder == "initramfs-tools":
        taken.remove(system)  # waker can tell dropbear from it
    free = (str(port) for port in range(2222, 2300) if str(port) not in taken)
    return next(free)


# ---- All of them ---------------------------------------------------------------------


def understand(probed: Probed, wanted_card: str, connection: str) -> Facts:
    """Turn what was probed into facts. Raises Refused."""
    check(probed, NOT_NOW | UNFIT)
    builder = find_builder(probed)
    disks = find_disks(probed, builder)
    card = find_card(probed, wanted_card)
    check_drivers(probed, card)
    system = find_system_port(probed, card, connection)
    helpers = find_helpers(probed, disks)
    own_ip = own_options = ""
    if builder == "dracut":  # systemd asks, and knows tokens
        check_modules(probed)
        check_options(probed, disks)
        helpers |= dict.fromkeys(find_tpm_disks(probed, disks), "a TPM")
    else:
        check_link_mac(probed, card)
        own_ip = find_own_ip(probed, card)
        own_options = find_own_options(probed)
    kernels = probed["kernels"].split()
    return Facts(
        builder=builder,
        disks=[disk.name for disk in disks],
        helpers=helpers,
        card=card,
        ports=Ports(system, find_initrd_port(probed, builder, own_options, system)),
        own_ip=own_ip,
        own_options=own_options,
        missing=find_missing(probed, builder),
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
    for disk, helper in facts.helpers.items():
        opens = f"opens by itself, with {helper}; waker is asked only if that fails"
        lines.append(f"{disk} {opens}")
    return lines
