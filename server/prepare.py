#!/usr/bin/env python3
"""Prepare a Debian-like server, so that waker can unlock its disk.

Run it as root on the server. It shows what it found and each change, and asks. Then
the initrd gets an address, an SSH server and waker's key, which can unlock and nothing
else, and the network card keeps Wake-on-LAN on. The image that works is kept in GRUB's
menu, and each new one is examined. Running it again finishes what was interrupted.
Beside it are the files that it installs, with the paths that they have on the server.
"""

import argparse
import configparser
import enum
import json
import os
import re
import shutil
import subprocess
import sys
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Final, NamedTuple

MARK: Final = "# Written by waker's prepare.py. `waker prepare --undo` removes it."
RECORD: Final = Path("/var/lib/waker-prepare/record.json")
UNFINISHED: Final = RECORD.with_name("unfinished")  # from the first change to the last
MODULE: Final = "/usr/lib/dracut/modules.d/46initrd-ssh"
UNIT: Final = "waker-wake.service"
# The kept image, its entry in GRUB's menu, and their hook: first to come, last to go.
SPARE: Final = ("/boot/", "/etc/kernel/postrm.d/waker")
NOT_LUKS: Final = r"script=|\b(plain|tcrypt|bitlk)\b"  # in crypttab's options
HERE: Final = Path(__file__).resolve().parent
SETTINGS: Final = configparser.ConfigParser(interpolation=None)
SETTINGS.read(HERE / "prepare.ini")

# ---- Facts, or a refusal: pure ----

Seen = dict[str, str]  # what the commands of prepare.ini printed
Facts = dict[str, str]  # what decides each change; lists are of words


class Refused(Exception):
    """Why the server cannot be prepared. Nothing was changed."""


class Failed(Exception):
    """What went wrong while it was changed."""


def find_builder(seen: Seen) -> str:
    if not re.search(r"(?m)^ID(_LIKE)?=.*\bdebian\b", seen["system"]):
        raise Refused("it is neither Debian nor one of its relatives.")
    # After an interruption, a package that is wanted may not be installed.
    wanted = re.findall(r"(?m)^(\S+) (?:install|hold) ", seen["packages"])
    if "tinyssh-initramfs" in wanted:
        raise Refused("waker cannot use tinyssh. Remove the package tinyssh-initramfs.")
    for builder in ("dracut", "initramfs-tools"):
        if builder in wanted:
            return builder
    raise Refused("neither initramfs-tools nor dracut builds its initrd.")


def find_disks(seen: Seen) -> str:
    """Name the encrypted disks that must be open before the system boots."""
    if "zfs" in seen["file systems"]:
        raise Refused("it uses ZFS, which waker cannot unlock.")
    layers = [line.split() for line in seen["disks"].splitlines()]
    if any("iscsi" in row or row[0].startswith("nbd") for row in layers):
        raise Refused("its disk is on the network, which the initrd takes down.")
    disks = [*dict.fromkeys(row[0] for row in layers if "crypt" in row[1:])]
    if not disks:
        raise Refused("the disk with / is not encrypted. There is nothing to unlock.")
    if " crypt" in seen["boot disks"]:
        raise Refused("/boot is encrypted: GRUB asks too early. Move it out of LUKS.")
    lines = re.findall(r"(?m)^\s*[^#\s].*", seen["crypttab"])
    table = {n: [*rest[1:], "none", ""][:2] for n, *rest in map(str.split, lines)}
    for disk in disks:
        if disk not in table:
            raise Refused(f"/ is on {disk}, but no line of /etc/crypttab has it.")
        key, options = table.pop(disk)
        if key not in ("none", "-") or re.search(NOT_LUKS, options):
            raise Refused(f"a key file or keyscript opens {disk}, or it is not LUKS.")
    for disk, (key, options) in table.items():
        if key in ("none", "-") and not re.search("initr|noauto|nofail", options):
            raise Refused(f"{disk} asks at the screen later. See docs/server.md.")
    return " ".join(disks)


def find_card(seen: Seen, wanted: str) -> dict[str, str]:
    """Find the card that is wanted, or else the one that leads to the box, or out."""
    links = {link["ifname"]: link for link in json.loads(seen["links"])}
    kinds = {n: k.get("linkinfo", {}).get("info_kind") for n, k in links.items()}
    rows = [line.split() for line in seen["drivers"].splitlines()]
    drivers = {card: [Path(module).name for module in rest] for card, *rest in rows}
    routes = [r for line in seen["routes"].splitlines() for r in json.loads(line)]
    routes = [route for route in routes if route.get("dev", "lo") != "lo"]
    if not wanted and not routes:
        raise Refused("it has no default route. Name the card with --interface.")
    via = wanted or routes[0]["dev"]
    if via not in links:
        raise Refused(f"it has no card {via}. It has {', '.join(drivers)}.")
    via = card = links[via].get("master", via)
    if kinds[via] == "bridge":  # which is as good as its one physical card
        cards = [n for n in links if links[n].get("master") == via and n in drivers]
        if len(cards) != 1:
            raise Refused(f"the bridge {via} has {len(cards)} physical cards, not 1.")
        (card,) = cards
    if f"/{card}/phy80211" in seen["wifi"]:
        raise Refused(f"{card} is Wi-Fi. Waking and unlocking need a cable.")
    if card not in drivers or links[card]["link_type"] != "ether":
        raise Refused(f"{card} is not a physical card. Name one: --interface.")
    # The first route wins. An address that it does not use may be another service's.
    route: dict[str, str] = {}
    for other in reversed([route for route in routes if route["dev"] == via]):
        route |= other
    addresses = [a for a in links[via]["addr_info"] if a["family"] == "inet"]
    addresses.sort(key=lambda a: (a["local"] != route.get("prefsrc"), a["scope"]))
    if not addresses:
        raise Refused(f"{via} has no IPv4 address, and the initrd needs one.")
    local = IPv4Interface(f"{addresses[0]['local']}/{addresses[0]['prefixlen']}")
    return {
        "card": card,
        # The permanent one: a bridge or NetworkManager may change the current.
        "mac": links[card].get("permaddr", links[card]["address"]),
        "drivers": " ".join(dict.fromkeys(drivers[card])),  # none if they are built in
        "host": str(local.ip),
        "address": str(local),
        "netmask": str(local.netmask),
        "router": route.get("gateway", ""),
        "DHCP": "reserve the address in your router" * ("dynamic" in addresses[0]),
    }


def find_ports(seen: Seen, builder: str, box: str) -> dict[str, str]:
    """Find the ports of the system's SSH server, and of the initrd's."""
    found = box.split()[3:] or re.findall(r"(?m):([0-9]+)(?= |$)", seen["ssh ports"])
    if not found:  # waker sees by it that the server is up
        raise Refused("it has no SSH server. Install the package openssh-server.")
    system, initrd, options = found[0], "2222", seen["own options"].strip()
    if builder == "dracut" and system == initrd:
        initrd = "2223"  # waker could not tell two OpenSSH servers apart
    if options:
        command = re.search(r"(?:^|\s)-[a-zA-Z]*?c\s*(\S.*)", options)
        if command and "cryptroot-unlock" not in command[1]:
            raise Refused(f"DROPBEAR_OPTIONS has another command: {command[1]}")
        port = re.search(r"(?:^|\s)-[a-zA-Z]*?p\s*(?:\S*:)?([0-9]+)", options)
        initrd = port[1] if port else "22"
    return {"system port": system, "initrd port": initrd, "own options": options}


def understand(seen: Seen, wanted_card: str, box: str) -> Facts:
    """Turn what was seen into facts. Raises Refused."""
    facts = {"builder": find_builder(seen), "disks": find_disks(seen)}
    facts |= find_card(seen, wanted_card) | find_ports(seen, facts["builder"], box)
    own_ip = facts["own ip"] = seen["own ip"].partition("\n")[0].strip()
    address, *others = re.sub(r"^\w+=|[\"']", "", own_ip).split(":")
    own = f"{facts['host']}::{facts['router']}:{facts['netmask']}"
    is_other = address in ("off", "none") or {*others[4:5]} - {"", facts["card"]}
    if is_other or (address[:1].isdigit() and own not in own_ip):
        raise Refused(f"the initrd has {own_ip}, not {own}. Remove that.")
    packages = SETTINGS[facts["builder"]]["packages"].split()
    installed = re.findall(r"(?m)^(\S+) \S+ installed$", seen["packages"])
    facts["missing"] = " ".join(name for name in packages if name not in installed)
    images, kernels = seen["images"].split(), seen["kernels"].split()
    works = [kernel for kernel in reversed(kernels) if f"initrd.img-{kernel}" in images]
    if not works:
        raise Refused("no installed kernel has an initrd in /boot to keep.")
    # Once one is kept, no other. The running kernel's works.
    is_kept = {k: f"initrd.img-{k}.before-waker" in images for k in works}
    facts["kept"] = max(works, key=lambda k: (is_kept[k], k == seen["running"].strip()))
    return facts | {"kernels": " ".join(kernels)}


def make_menu(seen: Seen, kernel: str) -> str:
    """Copy the kernel's entry of GRUB's menu for the kept image, if that can be."""
    ours = r"(?ms)^# Written by waker's prepare\.py\. .*?^}$"  # by version 3, too
    if re.sub(ours, "", seen["menu"]).strip():  # it is the owner's
        return ""
    for body in re.findall(r"(?ms)^\s*menuentry [^{]*{\n(.*?)^\s*}$", seen["grub"]):
        line = rf"(?m)^(\s*initrd\s.*initrd\.img-{re.escape(kernel)})(?!\S)"
        entry, found = re.subn(line, r"\1.before-waker", body)
        if found:
            return f"{MARK}\nmenuentry 'The initrd from before waker' {{\n{entry}}}\n"
    return ""


# ---- The plan: a list of changes, in order ----


class Kind(enum.Enum):
    """What a change does, in the question's words."""

    COPY = "keep the image that works today as"
    FILE = "write"
    KEY = "limit waker's key to unlocking, with a line in"
    PACKAGE = "install"


class Change(NamedTuple):
    """One change. The plan is a list of these, and so is the record for undo."""

    kind: Kind
    name: str  # a path, or a package
    text: str = ""  # what is written; the path of what is copied
    before: str = ""  # what undo puts back


def fill(template: str, words: Facts) -> str:
    return re.sub("@([#a-z ]+)@", lambda found: words[found[1]], template)


def make_plan(facts: Facts, key: str, menu: str, files: Facts) -> list[Change]:
    """Plan all, done already or not; settings first, so that no image lacks them."""
    words = {**facts, "key": key, "bootif": facts["mac"].replace(":", "-")}
    # Each begins a line, and turns it into a comment if the line is not needed.
    for name in ("ip", "options"):
        words[f"#{name}"] = "#" * bool(facts[f"own {name}"])
    words["#router"] = "#" * (not facts["router"])
    image = f"/boot/initrd.img-{facts['kept']}"
    plan = [Change(Kind.COPY, f"{image}.before-waker", image)]
    plan += [Change(Kind.FILE, "/boot/grub/custom.cfg", menu)] if menu else []
    for path, template in files.items():
        text = fill(template.replace("Port 2222", "Port @initrd port@"), words)
        kind = Kind.KEY if path.endswith("/authorized_keys") else Kind.FILE
        plan.append(Change(kind, path, text))
    return plan + [Change(Kind.PACKAGE, name) for name in facts["missing"].split()]


def put_key(text: str, line: str) -> str:
    """Put a line in the place of those with the same key; all others stay."""
    (key,) = re.findall("AAAA[^ ]+", line)
    lines = text.splitlines()
    places = [n for n, old in enumerate(lines) if key in old and old[0] != "#"]
    if len(places) == 1 and 'cryptroot-unlock"' in lines[places[0]]:
        return text  # the owner's own limits may be stricter
    kept = [old for n, old in enumerate(lines) if n not in places]
    kept.insert(places[0] if places else len(kept), line.strip())
    return "\n".join(kept) + "\n"


# ---- Doors to the system: nothing else runs programs, or reads and writes files ----


def run(*command: str, check: bool = True, shown: bool = False) -> str:
    """Run a program; returns what it prints, unless that is shown. Raises Failed."""
    to = None if shown else subprocess.PIPE
    done = subprocess.run(command, stdout=to, stderr=to, errors="replace", check=False)
    if check and done.returncode:
        raise Failed(f"`{' '.join(command)}` failed. {(done.stderr or '')[-2000:]}")
    return done.stdout or ""


def read(name: str | Path) -> str:
    path = Path(name)
    return path.read_text(errors="surrogateescape") if path.exists() else ""


def put(path: Path) -> None:
    """Put a new file in place: a power cut leaves the old one or the whole new one."""
    run("sync", "-f", f"{path}.waker-new")  # -f, because GRUB reads no journal
    Path(f"{path}.waker-new").rename(path)
    run("sync", "-f", str(path.parent))


def write(name: str | Path, text: str, mode: int) -> None:
    path = Path(name).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Path(f"{path}.waker-new")
    new.write_text(text, errors="surrogateescape")
    new.chmod(mode)
    put(path)


def read_files(builder: str) -> dict[str, str]:
    """Read the files to install, which are beside this one; returns them by path."""
    roots = {"system/etc": "/etc", f"{builder}/etc": "/etc"}
    roots[f"{builder}/46initrd-ssh"] = MODULE
    files: dict[str, str] = {}
    for root, target in roots.items():
        for path in sorted((HERE / root).rglob("*")):
            if path.is_file():
                files[f"{target}/{path.relative_to(HERE / root)}"] = path.read_text()
    return files


def examine(image: str, kernel: str, state: str, facts: Facts) -> list[str]:
    """Look into an image; returns what is wrong with it."""
    lists = facts["builder"], facts["disks"], facts["drivers"]
    return run("sh", f"{HERE}/examine", state, image, kernel, *lists).splitlines()


def build(kernel: str, state: str, facts: Facts) -> None:
    """Build an image, unless it is right. Raises Failed, without harm, if it is not."""
    image = f"/boot/initrd.img-{kernel}"
    if examine(image, kernel, state, facts):
        print(f"Building and examining {image}, which may take minutes.", flush=True)
        how = SETTINGS[facts["builder"]]["build"]
        run("sh", "-c", how, f"{image}.waker-new", kernel)
        if wrong := examine(f"{image}.waker-new", kernel, state, facts):
            Path(f"{image}.waker-new").unlink()
            raise Failed(f"the new {image} is not used: {'; '.join(wrong)}.")
        put(Path(image))
    for hooks in Path("/etc/initramfs").glob("post-update.d"):  # some boot loaders have
        run("run-parts", f"--arg={kernel}", f"--arg={image}", str(hooks))  # copies


# ---- Applying and undoing: a change is in the record before it is applied ----


def read_record() -> list[Change]:
    return [Change(Kind[row[0]], *row[1:]) for row in json.loads(read(RECORD) or "[]")]


def note(change: Change) -> None:
    """Add a change to the record. Of one made again, what was there at first counts."""
    # Several keys may have come into the same file.
    record = {(c.name, c.text * (c.kind is Kind.KEY)): c for c in read_record()}
    place = change.name, change.text * (change.kind is Kind.KEY)
    record[place] = change._replace(before=record.get(place, change).before)
    rows = [(change.kind.name, *change[1:]) for change in record.values()]
    write(RECORD, json.dumps(rows, indent=1), 0o600)


def is_done(change: Change) -> bool:
    if change.kind in (Kind.COPY, Kind.PACKAGE):
        return change.kind is Kind.COPY and Path(change.name).exists()
    text, now = change.text, read(change.name)
    return now == (put_key(now, text) if change.kind is Kind.KEY else text)


def find_work(plan: list[Change]) -> list[Change]:
    """Return what is left to do. Raises Refused rather than lose an owner's changes."""
    todo = [change for change in plan if not is_done(change)]
    files = [change.name for change in todo if change.kind is Kind.FILE]
    # A run that was interrupted may have changed the record alone.
    for old in read_record() * (not UNFINISHED.exists()):
        if old.name in files and read(old.name) not in ("", old.text, old.before):
            raise Refused(f"{old.name} has your changes. Move them, and delete it.")
    return todo


def apply(change: Change) -> None:
    path, text = Path(change.name), change.text
    match change.kind:
        case Kind.COPY:
            note(change)
            # It may contain keys.
            run("sh", "-c", 'umask 077; cat "$0" >"$1"', text, f"{path}.waker-new")
            put(path)
        case Kind.FILE:
            note(change._replace(before=read(path)))
            write(path, text, 0o755 if text.startswith("#!") else 0o644)
        case Kind.KEY:
            after = put_key(read(path), text)
            gone = {*read(path).splitlines()} - {*after.splitlines()}
            note(change._replace(before="\n".join(gone)))
            write(path, after, 0o600)
        case Kind.PACKAGE:
            # Others come along. Those that are upgraded have their version in brackets.
            apt = *SETTINGS["apt"]["install"].split(), path.name
            for name in re.findall(r"(?m)^Inst (\S+) \(", run(*apt, "--simulate")):
                note(Change(Kind.PACKAGE, name))
            run(*apt, shown=True)


def take_back(change: Change) -> str:
    """Undo a change; returns what is left, or nothing."""
    path, text = Path(change.name), change.text
    now = read(path) if change.kind in (Kind.FILE, Kind.KEY) else ""
    Path(f"{path}.waker-new").unlink(missing_ok=True)
    match change.kind:
        case Kind.COPY:
            path.unlink(missing_ok=True)
        case Kind.FILE | Kind.KEY if now == text and not change.before:
            path.unlink()
        case Kind.FILE if now == text:
            write(path, change.before, path.stat().st_mode & 0o777)
        case Kind.FILE if now and now != change.before:
            return f"{path}, which you have changed"
        case Kind.KEY if f"\n{text}" in f"\n{now}":  # a whole line
            old = f"{change.before}\n".lstrip()
            write(path, f"\n{now}".replace(f"\n{text}", f"\n{old}")[1:], 0o600)
        case Kind.KEY if text.split()[-2] in now.replace(change.before, ""):
            return f"waker's key in {path}, because you have changed its line"
    return ""


def purge(names: list[str]) -> list[str]:
    """Remove packages that nothing needs; returns what is left of them."""
    # The encrypted root, or a login, may need these by now.
    keep = "cryptsetup.*|dracut(-core)?|initramfs.*|openssh.*|systemd.*"
    if read("/etc/dropbear/initramfs/authorized_keys"):  # which has the owner's keys
        keep += "|dropbear.*"
    gone = [name for name in names if not re.fullmatch(keep, name)]
    run("sh", "-c", SETTINGS["apt"]["purge"], "sh", *gone, check=False)
    states = run("dpkg-query", "-Wf", "${Package} ${db:Status-Status}\n").splitlines()
    return [f"the package {name}" for name in names if f"{name} installed" in states]


def agree(title: str, lines: list[str], *, yes: bool) -> None:
    """Show what will be done, and ask unless the answer is given. Raises Refused."""
    print(title, *(f"    {line}" for line in lines), sep="\n")
    print("    build and examine the initrd of each kernel, which takes minutes")
    how = 'printf "Go on? [y/N] " >/dev/tty; read -r answer </dev/tty; echo "$answer"'
    if not yes and run("sh", "-c", how, check=False)[:1] not in ("y", "Y"):
        raise Refused("you did not answer y. Without a terminal, use --yes.")


def show_settings(facts: Facts, nonce: str) -> None:
    if not re.search("Wake-on: .*g", run("ethtool", facts["card"], check=False)):
        print(f"WARNING: the driver of {facts['card']} offers no Wake-on-LAN.")
    host_key = run("sh", "-c", SETTINGS[facts["builder"]]["host key"]).strip()
    lines = fill(SETTINGS["waker.env"]["lines"], {**facts, "host key": host_key})
    begin = f"waker-begin {nonce}" if nonce else "Put these lines into waker.env:"
    print(f"\n{begin}{lines}\n" + f"waker-end {nonce}" * bool(nonce))


def prepare(seen: Seen, options: argparse.Namespace) -> None:
    if not re.fullmatch(r"ssh-ed25519 AAAA[A-Za-z0-9+/]{64} [!-~]+", options.key):
        raise Refused("it needs waker's whole public key, 'ssh-ed25519 AAAA… waker'.")
    facts = understand(seen, options.interface, options.box)
    menu, files = make_menu(seen, facts["kept"]), read_files(facts["builder"])
    todo = find_work(make_plan(facts, options.key, menu, files))
    kernels = facts["kernels"].split()
    wrong = (examine(f"/boot/initrd.img-{k}", k, "prepared", facts) for k in kernels)
    is_left = UNFINISHED.exists() or any(not c.name.startswith(SPARE) for c in todo)
    if not is_left and not any(wrong):
        print("The server is already prepared. Nothing was changed.")
        return show_settings(facts, options.nonce)
    for left in Path("/boot").glob("*.waker-new"):  # by an interruption
        left.unlink()
    image = Path(f"/boot/initrd.img-{facts['kept']}")
    copies = 2 - Path(f"{image}.before-waker").exists()
    need = image.stat().st_size * copies + (20 << 20) * len(kernels)
    if shutil.disk_usage("/boot").free < need:
        raise Refused(f"/boot needs {need >> 20} MiB free. Remove an old kernel.")
    print("Found:", *(f"    {n}: {s}" for n, s in facts.items() if s), sep="\n")
    if not menu:
        print("WARNING: the kept image gets no entry in GRUB's menu. Note its name.")
    agree("This will:", [f"{c.kind.value} {c.name}" for c in todo], yes=options.yes)
    write(UNFINISHED, "", 0o600)
    for change in todo:
        if change.kind is Kind.PACKAGE:  # after an interruption; a source may be broken
            run("sh", "-c", SETTINGS["apt"]["begin"], shown=True)
        apply(change)
    run("systemctl", "enable", UNIT)
    run("systemctl", "restart", UNIT, check=False)
    for kernel in reversed(kernels):  # the one that boots comes first
        build(kernel, "prepared", facts)
    UNFINISHED.unlink()
    print("The server is prepared. The initrd of each kernel was examined.")
    return show_settings(facts, options.nonce)


def undo(seen: Seen, options: argparse.Namespace) -> None:
    if not (record := read_record()):
        raise Refused("there is nothing to undo.")
    # Whatever opens them by now.
    disks = " ".join(re.findall(r"(?m)^(\S+) +crypt\b", seen["disks"]))
    facts = {"builder": find_builder(seen), "disks": disks, "drivers": ""}
    agree("This will undo:", [c.name for c in record], yes=options.yes)
    run("dpkg", "--configure", "-a", shown=True)
    run("systemctl", "disable", "--now", UNIT, check=False)
    spare = [change for change in record if change.name.startswith(SPARE)]
    left = [take_back(change) for change in reversed(record) if change not in spare]
    left += purge([change.name for change in record if change.kind is Kind.PACKAGE])
    for kernel in seen["kernels"].split():
        build(kernel, "bare", facts)
    left += [take_back(change) for change in spare]
    left += map(str, Path("/etc/initrd-ssh").glob("host_key*"))
    run("rmdir", MODULE, check=False)
    shutil.rmtree(RECORD.parent)
    left = [f"Left: {what}." for what in left if what]
    print("Undone. The initrd of each kernel was examined.", *left, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare a server for waker.")
    parser.add_argument("key", nargs="?", default="", help="waker's public key")
    parser.add_argument("--undo", action="store_true", help="take everything back")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--interface", default="", help="the network card to use")
    parser.add_argument("--box", default="", help="$SSH_CONNECTION")
    parser.add_argument("--nonce", default="", help="marks the lines with settings")
    options = parser.parse_args()
    os.environ |= {n.upper(): text for n, text in SETTINGS["environment"].items()}
    os.umask(0o022)
    look, box = SETTINGS["look"].items(), options.box.partition(" ")[0]
    try:
        if os.geteuid():
            raise Refused("run it as root, with sudo or su.")
        seen = {name: run("sh", "-c", how, "", box, check=False) for name, how in look}
        (undo if options.undo else prepare)(seen, options)
    except Refused as error:
        sys.exit(f"Nothing was changed on this server: {error}")
    except (Failed, KeyboardInterrupt) as error:
        sys.exit(f"FAILED: {str(error) or 'stopped.'}\nRun it again, or undo it.")


if __name__ == "__main__":
    main()
