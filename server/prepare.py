#!/usr/bin/env python3
"""Prepare a Debian-like server, so that waker can unlock its disk.

Run it as root on the server. It shows what it found and each change, and asks. Then
the initrd gets an address, an SSH server and waker's key, which can unlock and nothing
else, and the network card keeps Wake-on-LAN on. Beside it are the files that it
installs, with the paths that they have on the server.

What happens to /boot, in this order:

1. The image that works is copied, and GRUB's menu offers the copy if that can be done.
2. Settings are written, then packages installed. Their scripts may build images, which
   have the settings but were not examined.
3. A new image is built for each kernel, beside the old one, and examined. Only if
   nothing is wrong with it, it takes the old one's place, by a rename.

Whenever the power is cut, the server boots as before: with the old image, with one of
those two kinds, or with the copy. Running this again finishes what was interrupted.
"""

import argparse
import enum
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

from facts import (
    MIB,
    Facts,
    Probed,
    Refused,
    describe,
    estimate_room,
    find_builder,
    understand,
)

MARK: Final = "# Written by waker's prepare.py. `waker prepare --undo` removes it."
RECORD: Final = Path("/var/lib/waker-prepare/record.json")
UNFINISHED: Final = RECORD.with_name("unfinished")  # from the first change to the last
MODULES: Final = Path("/usr/lib/dracut/modules.d")
MENU: Final = "/boot/grub/custom.cfg"  # GRUB's own menu reads it
POSTRM: Final = "/etc/kernel/postrm.d/waker"
UNIT: Final = "waker-wake.service"
HERE: Final = Path(__file__).resolve().parent
LOCKS: Final = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock")
LOCK_SECONDS: Final = 600  # unattended upgrades may take as long
APT_UPDATE: Final = ("apt-get", "-q", "update")
APT: Final = (
    *("apt-get", "-qy", "--no-install-recommends", "--no-remove"),
    *(f"-oDPkg::Lock::Timeout={LOCK_SECONDS}", "-oDpkg::Options::=--force-confold"),
    "install",
)
# Packages that the encrypted disk, or a login, may need by now.
NEEDED: Final = "cryptsetup.*|dracut(-core)?|initramfs.*|openssh.*|systemd.*"
ENVIRONMENT: Final = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
    "NEEDRESTART_SUSPEND": "1",  # it would restart the SSH server
    "INITRD": "No",  # or dracut's trigger would write over the image in use
}


class Failed(Exception):
    """What went wrong while it was changed."""


# ---- The plan: a list of changes, in order -------------------------------------------


class Kind(enum.Enum):
    """What a change does, in the question's words."""

    COPY = "keep the image that works today as"
    FILE = "write"
    KEY = "limit waker's key to unlocking, with a line in"
    PACKAGE = "install"


UNDOING: Final = {  # the same in the question of undo
    Kind.COPY: "remove",
    Kind.FILE: "take back",
    Kind.KEY: "take waker's key out of",
    Kind.PACKAGE: "remove, unless something needs it, the package",
}


class Change(NamedTuple):
    """One change. The plan is a list of these, and so is the record for undo."""

    kind: Kind
    name: str  # a path, or a package
    text: str = ""  # what is written; the path of what is copied
    before: str | None = None  # what was there; None if nothing was

    @property
    def is_spare(self) -> bool:
        """It belongs to the image that is kept: first to come, last to go."""
        return self.name.startswith("/boot/") or self.name == POSTRM

    @property
    def is_in_image(self) -> bool:
        """It changes images, so that new ones are needed."""
        return not self.is_spare and not self.name.endswith(UNIT)


def make_words(facts: Facts, key: str) -> dict[str, str]:
    """Return the words that take the place of @NAME@ in files."""
    card = facts.card
    return {
        "key": key,
        "mac": card.mac,
        "bootif": card.mac.replace(":", "-"),
        "card": card.name,
        "drivers": " ".join(card.drivers),
        "address": str(card.address),
        "host": str(card.address.ip),
        "netmask": str(card.address.netmask),
        "router": card.router,
        "initrd port": facts.ports.initrd,
        "kept": facts.kept,
        # Each begins a line, and turns it into a comment if the line is not needed.
        "#ip": "#" if facts.own_ip else "",
        "#options": "#" if facts.own_options else "",
        "#router": "" if card.router else "#",
    }


def make_menu(probed: Probed, kernel: str) -> str:
    """Copy the kernel's entry of GRUB's menu for the kept image, if that can be."""
    ours = r"(?ms)^# Written by waker's prepare\.py\. .*?^}$"  # by version 3, too
    if re.sub(ours, "", probed["menu"]).strip():  # it is the owner's
        return ""
    for body in re.findall(r"(?ms)^\s*menuentry [^{]*{\n(.*?)^\s*}$", probed["grub"]):
        line = rf"(?m)^(\s*initrd\s.*initrd\.img-{re.escape(kernel)})(?!\S)"
        entry, found = re.subn(line, r"\1.before-waker", body)
        if found:
            return f"{MARK}\nmenuentry 'The initrd from before waker' {{\n{entry}}}\n"
    return ""


def make_plan(facts: Facts, key: str, menu: str, files: dict[str, str]) -> list[Change]:
    """Plan all, done already or not; settings first, so that no image lacks them.

    `key` is waker's public key, `menu` the text of GRUB's or "", and `files` are to be
    installed, by path, with words to fill in.
    """
    words = make_words(facts, key)
    image = f"/boot/initrd.img-{facts.kept}"
    plan = [Change(Kind.COPY, f"{image}.before-waker", image)]
    if menu:
        plan.append(Change(Kind.FILE, MENU, menu))
    for path, template in files.items():
        text = template.replace("Port 2222", "Port @initrd port@")
        text = re.sub("@([#a-z ]+)@", lambda found: words[found[1]], text)
        kind = Kind.KEY if path.endswith("/authorized_keys") else Kind.FILE
        plan.append(Change(kind, path, text))
    plan += [Change(Kind.PACKAGE, name) for name in facts.missing]
    return plan


# ---- Doors to the system -------------------------------------------------------------
# Nothing else runs programs, or reads and writes files.


def run(*command: str, check: bool = True, shown: bool = False) -> str:
    """Run a program; returns what it prints, unless that is shown. Raises Failed."""
    to = None if shown else subprocess.PIPE
    done = subprocess.run(command, stdout=to, stderr=to, errors="replace", check=False)
    if check and done.returncode:
        raise Failed(f"`{' '.join(command)}` failed. {(done.stderr or '')[-2000:]}")
    return done.stdout or ""


def read(name: str | Path) -> str:
    """Read a file, or nothing if there is none. Line ends and odd bytes stay."""
    path = Path(name)
    return path.read_bytes().decode(errors="surrogateescape") if path.exists() else ""


def put(path: Path) -> None:
    """Put a new file in place: a power cut leaves the old one or the whole new one."""
    run("sync", "-f", f"{path}.waker-new")  # -f, because GRUB reads no journal
    Path(f"{path}.waker-new").rename(path)
    run("sync", "-f", str(path.parent))


def write(name: str | Path, text: str, mode: int) -> None:
    path = Path(name).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = Path(f"{path}.waker-new")
    new.write_bytes(text.encode(errors="surrogateescape"))
    new.chmod(mode)
    put(path)


def probe(address: str) -> Probed:
    """Run every function of probes.sh. A probe that fails has found nothing."""
    script = HERE / "probes.sh"
    names = re.findall(r"(?m)^(\w+)\(\) [{(]", script.read_text())
    return {n: run("sh", str(script), n, address, check=False) for n in names}


def read_files(builder: str) -> dict[str, str]:
    """Read the files to install, which are beside this one; returns them by path."""
    folders = {HERE / "system/etc": Path("/etc"), HERE / builder / "etc": Path("/etc")}
    for module in sorted((HERE / builder).glob("[0-9]*")):
        folders[module] = MODULES / module.name
    files: dict[str, str] = {}
    for folder, target in folders.items():
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                files[str(target / path.relative_to(folder))] = path.read_text()
    return files


def is_locked() -> bool:
    """Return whether another program installs packages just now."""
    for name in filter(os.path.exists, LOCKS):
        with Path(name).open("ab") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def wait_for_packages() -> None:
    """Wait while another program installs packages. Raises Refused if it takes long."""
    ends = time.monotonic() + LOCK_SECONDS
    if is_locked():
        print("Waiting for another program that installs packages.", flush=True)
    while is_locked():
        if time.monotonic() > ends:
            raise Refused(f"another program holds {LOCKS[0]}. Try again later.")
        time.sleep(1)


# ---- The record ----------------------------------------------------------------------
# A change is in it before it is made.


def parse_change(row: object) -> Change:
    """Parse an entry of the record. Raises ValueError, KeyError, TypeError."""
    if isinstance(row, dict):
        change = Change(**row | {"kind": Kind[row["kind"]]})
    else:  # by version 3, which had "" for what was not there, ...
        word, name, text, before = cast("list[str]", row)
        change = Change(Kind[word], name, text, before or None)
        if change.kind is Kind.KEY and before:  # ... and only the lines it took out
            change = change._replace(before=f"{before}\n")
    if not all(isinstance(text, str) for text in (*change[1:3], change.before or "")):
        raise TypeError
    return change


def read_record() -> list[Change]:
    """Read the changes that were begun. Raises Refused."""
    try:
        rows = json.loads(read(RECORD) or "[]")
        if not isinstance(rows, list):
            raise TypeError
        return [parse_change(row) for row in rows]
    except (ValueError, KeyError, TypeError):
        raise Refused(
            f"{RECORD} is damaged, or another program's. Undo needs it: repair it, or"
            " move it away."
        ) from None


def record_change(change: Change) -> None:
    """Add a change to the record. Of one made again, what was there at first counts."""

    def place(change: Change) -> tuple[str, str]:
        # Several keys may have come into the same file.
        return change.name, change.text if change.kind is Kind.KEY else ""

    record = {place(old): old for old in read_record()}
    first = record.get(place(change), change)
    record[place(change)] = change._replace(before=first.before)
    rows = [c._asdict() | {"kind": c.kind.name} for c in record.values()]
    write(RECORD, json.dumps(rows, indent=1), 0o600)


# ---- Changes: for each kind, how it is made and how it is taken back -----------------
# To take back returns what is left, or nothing. It may be done twice.


def keep_image(change: Change) -> None:
    record_change(change)
    # It may contain keys.
    copy = 'umask 077; cat "$0" >"$1"'
    run("sh", "-c", copy, change.text, f"{change.name}.waker-new")
    put(Path(change.name))


def drop_image(change: Change) -> str:
    Path(change.name).unlink(missing_ok=True)
    return ""


def restore(change: Change) -> None:
    """Give a file back as it was."""
    path = Path(change.name)
    if change.before is None:
        path.unlink()
    else:
        write(path, change.before, path.stat().st_mode & 0o777)


def write_file(change: Change) -> None:
    before = read(change.name) if Path(change.name).exists() else None
    record_change(change._replace(before=before))
    write(change.name, change.text, 0o755 if change.text.startswith("#!") else 0o644)


def restore_file(change: Change) -> str:
    now = read(change.name)
    if now == change.text and Path(change.name).exists():
        restore(change)
    elif now not in ("", change.before):
        return f"{change.name}, which you have changed"
    return ""


def find_key(line: str) -> str:
    (key,) = re.findall("AAAA[^ ]+", line)
    return str(key)


def has_key(line: str, key: str) -> bool:
    return key in line and not line.lstrip().startswith("#")


def put_key(text: str, line: str) -> str:
    """Put a line in the place of those with the same key; all others stay."""
    key, lines = find_key(line), text.removesuffix("\n").split("\n")
    places = [n for n, old in enumerate(lines) if has_key(old, key)]
    if len(places) == 1 and 'cryptroot-unlock"' in lines[places[0]]:
        return text  # the owner's own limits may be stricter
    if not places:
        end = "\n" if text and not text.endswith("\n") else ""
        return f"{text}{end}{line}"
    kept = [old for n, old in enumerate(lines) if n not in places]
    kept.insert(places[0], line.rstrip("\n"))
    return "\n".join(kept) + "\n"


def limit_key(change: Change) -> None:
    path = Path(change.name)
    before = read(path) if path.exists() else None
    record_change(change._replace(before=before))
    mode = 0o600 if before is None else path.stat().st_mode & 0o777
    write(path, put_key(before or "", change.text), mode)


def release_key(change: Change) -> str:
    now, before, key = read(change.name), change.before or "", find_key(change.text)
    if now == put_key(before, change.text):
        restore(change)
        return ""
    # You have changed the file since. Give back the lines that ours took the place of.
    ours, lines = change.text.rstrip("\n"), now.split("\n")
    old = [line for line in before.split("\n") if has_key(line, key)]
    if ours in lines:
        place = lines.index(ours)
        lines[place : place + 1] = old
        write(change.name, "\n".join(lines), Path(change.name).stat().st_mode & 0o777)
    elif any(has_key(line, key) and line not in old for line in lines):
        return f"waker's key in {change.name}, because you have changed its line"
    return ""


def install_package(change: Change) -> None:
    # Others come along. Those that are upgraded have their version in brackets.
    coming = run(*APT, change.name, "--simulate")
    for name in re.findall(r"(?m)^Inst (\S+) \(", coming):
        record_change(Change(Kind.PACKAGE, name))
    try:
        run(*APT, change.name, shown=True)
    except Failed as error:
        keeper = read("/etc/etckeeper/etckeeper.conf")
        if re.search(r"(?m)^\s*AVOID_COMMIT_BEFORE_INSTALL=[\"']?1", keeper):
            raise Failed(f"{error}First run `etckeeper commit`.") from None
        raise
    if change.name == "dropbear-initramfs":
        print("(There is no need to check ip=: the initrd's address is set.)")


def remove_packages(names: Sequence[str]) -> list[str]:
    """Remove packages that nothing needs; returns what is left of them."""
    keep = NEEDED
    keys = Path("/etc/dropbear/initramfs")
    if read(keys / "authorized_keys"):  # which has the owner's keys
        keep += "|dropbear.*"
    gone = [name for name in names if not re.fullmatch(keep, name)]
    # Unlike apt, dpkg leaves what others need.
    run("dpkg", "--purge", *gone, check=False)
    # Debian 13's dropbear-initramfs leaves the public keys that it made.
    for public in keys.glob("*_host_key.pub"):
        if not public.with_suffix("").exists():
            public.unlink()
    states = run("dpkg-query", "-Wf", "${Package} ${db:Status-Status}\n").splitlines()
    return [f"the package {name}" for name in names if f"{name} installed" in states]


def is_done(change: Change) -> bool:
    now = read(change.name) if change.kind in (Kind.FILE, Kind.KEY) else ""
    match change.kind:
        case Kind.COPY:
            return Path(change.name).exists()
        case Kind.FILE:
            return now == change.text
        case Kind.KEY:
            return now == put_key(now, change.text)
        case Kind.PACKAGE:
            return False  # the plan has those that are missing


def make(change: Change) -> None:
    match change.kind:
        case Kind.COPY:
            keep_image(change)
        case Kind.FILE:
            write_file(change)
        case Kind.KEY:
            limit_key(change)
        case Kind.PACKAGE:
            install_package(change)


def take_back(changes: Sequence[Change]) -> list[str]:
    """Take changes back, the last one first; returns what is left."""
    left: list[str] = []
    for change in reversed(changes):
        if change.kind is not Kind.PACKAGE:  # which go together
            Path(f"{change.name}.waker-new").unlink(missing_ok=True)
        match change.kind:
            case Kind.COPY:
                left.append(drop_image(change))
            case Kind.FILE:
                left.append(restore_file(change))
            case Kind.KEY:
                left.append(release_key(change))
    left += remove_packages([c.name for c in changes if c.kind is Kind.PACKAGE])
    return [what for what in left if what]


# ---- Images --------------------------------------------------------------------------


class Needs(NamedTuple):
    """What an image must have."""

    state: str  # prepared or undone
    builder: str
    disks: Sequence[str]
    drivers: Sequence[str] = ()


def examine(image: str, kernel: str, needs: Needs) -> list[str]:
    """Look into an image; returns what is wrong with it."""
    lists = " ".join(needs.disks), " ".join(needs.drivers)
    given = needs.state, image, kernel, needs.builder, *lists
    return run("sh", str(HERE / "examine"), *given).splitlines()


def build(kernel: str, needs: Needs) -> None:
    """Build an image, unless it is right. Raises Failed, without harm, if it is not."""
    image = f"/boot/initrd.img-{kernel}"
    if examine(image, kernel, needs):
        print(f"Building and examining {image}, which may take minutes.", flush=True)
        new = f"{image}.waker-new"
        run("sh", str(HERE / needs.builder / "build"), new, kernel)
        if wrong := examine(new, kernel, needs):
            Path(new).unlink()
            raise Failed(f"the new {image} is not used: {'; '.join(wrong)}.")
        put(Path(image))
    for hooks in Path("/etc/initramfs").glob("post-update.d"):  # some boot loaders have
        run("run-parts", f"--arg={kernel}", f"--arg={image}", str(hooks))  # copies


def check_room(facts: Facts) -> None:
    """Refuse a /boot that is too small for what is to be built."""
    images = [Path(f"/boot/initrd.img-{kernel}") for kernel in facts.kernels]
    sizes = [path.stat().st_size if path.exists() else 0 for path in images]
    need = estimate_room(facts.builder, sizes)
    kept = Path(f"/boot/initrd.img-{facts.kept}")
    if not Path(f"{kept}.before-waker").exists():
        need += kept.stat().st_size
    left = sum(path.stat().st_size for path in find_left_over())
    if shutil.disk_usage("/boot").free + left < need:
        raise Refused(f"/boot needs {need // MIB} MiB free. Remove an old kernel.")


def find_left_over() -> list[Path]:
    """Find files that an interruption left in /boot."""
    return [path for path in Path("/boot").glob("*.waker-new") if path.is_file()]


# ---- Commands ------------------------------------------------------------------------


def agree(title: str, lines: Sequence[str], *, yes: bool) -> None:
    """Show what will be done, and ask unless the answer is given. Raises Refused."""
    print(title, *(f"    {line}" for line in lines), sep="\n")
    how = 'printf "Go on? [y/N] " >/dev/tty; read -r answer </dev/tty; echo "$answer"'
    if not yes and run("sh", "-c", how, check=False)[:1] not in ("y", "Y"):
        raise Refused("you did not answer y. Without a terminal, use --yes.")


def show_settings(facts: Facts, nonce: str) -> None:
    """Print the box's settings; with a nonce, between two lines that it recognises."""
    card = facts.card
    if not re.search("Wake-on: .*g", run("ethtool", card.name, check=False)):
        print(f"WARNING: the driver of {card.name} offers no Wake-on-LAN.")
    if card.has_dhcp:
        problem = "or it may get another one"
        print(f"TO DO: in your router, reserve {card.address.ip} for {card.mac},")
        print(f"    {problem}.")
    host_key = run("sh", str(HERE / facts.builder / "host-key")).strip()
    settings = {
        "WAKER_HOMELAB_MAC": card.mac,
        "WAKER_HOMELAB_HOST": str(card.address.ip),
        "WAKER_INITRD_SSH_PORT": facts.ports.initrd,
        "WAKER_SYSTEM_SSH_PORT": facts.ports.system,
        "WAKER_SSH_HOST_KEY": host_key,
    }
    if nonce:
        print(f"\nThe box reads its settings from these lines:\nwaker-begin {nonce}")
    else:
        print("\nPut these lines into waker.env:")
    print(*(f"{name}={value}" for name, value in settings.items()), sep="\n")
    if nonce:
        print(f"waker-end {nonce}")


def find_work(plan: Sequence[Change]) -> list[Change]:
    """Return what is left to do. Raises Refused rather than lose an owner's changes."""
    todo = [change for change in plan if not is_done(change)]
    files = [change.name for change in todo if change.kind is Kind.FILE]
    if UNFINISHED.exists():  # the record may have what was not written yet
        return todo
    for old in read_record():
        if old.name in files and read(old.name) not in ("", old.text, old.before):
            raise Refused(f"{old.name} has your changes. Move them, and delete it.")
    return todo


def carry_out(todo: Sequence[Change]) -> None:
    """Make changes. Until the images are right, the work is unfinished."""
    write(UNFINISHED, "", 0o600)
    for path in find_left_over():
        path.unlink()
    packages = [change for change in todo if change.kind is Kind.PACKAGE]
    for change in todo:
        if change not in packages:
            make(change)
    if packages:
        run("dpkg", "--configure", "-a", shown=True)  # after an interruption
        run(*APT_UPDATE, check=False, shown=True)  # a source may be broken
    for change in packages:
        make(change)
    run("systemctl", "enable", UNIT)
    run("systemctl", "restart", UNIT, check=False)


def prepare(probed: Probed, options: argparse.Namespace) -> None:
    if not re.fullmatch(r"ssh-ed25519 AAAA[A-Za-z0-9+/]{64} [!-~]+", options.key):
        raise Refused("it needs waker's whole public key, 'ssh-ed25519 AAAA… waker'.")
    facts = understand(probed, options.interface, options.ssh_connection)
    needs = Needs("prepared", facts.builder, facts.disks, facts.card.drivers)
    menu, files = make_menu(probed, facts.kept), read_files(facts.builder)
    todo = find_work(make_plan(facts, options.key, menu, files))
    is_right = not any(
        examine(f"/boot/initrd.img-{kernel}", kernel, needs) for kernel in facts.kernels
    )
    is_finished = all(c.is_spare for c in todo) and not UNFINISHED.exists()
    if is_finished and is_right:
        print("The server is already prepared. Nothing was changed.")
        show_settings(facts, options.nonce)
        return

    check_room(facts)
    print("Found:", *(f"    {line}" for line in describe(facts)), sep="\n")
    if not menu:
        print("WARNING: the kept image gets no entry in GRUB's menu. Note its name.")
    lines = [f"{change.kind.value} {change.name}" for change in todo]
    if not is_right or any(change.is_in_image for change in todo):
        lines.append("build the initrd of each kernel that needs a new one, in minutes")
    lines.append("examine the initrd of each kernel")
    agree("This will:", lines, yes=options.yes)
    wait_for_packages()

    carry_out(todo)
    for kernel in reversed(facts.kernels):  # the one that boots comes first
        build(kernel, needs)
    UNFINISHED.unlink()
    print("The server is prepared. The initrd of each kernel was examined.")
    show_settings(facts, options.nonce)


def undo(probed: Probed, options: argparse.Namespace) -> None:
    record = read_record()
    if not record:
        raise Refused("there is nothing to undo.")
    # Whatever opens them by now.
    disks = re.findall(r"(?m)^(\S+) +crypt\b", probed["disks"])
    needs = Needs("undone", find_builder(probed), disks)
    lines = [f"{UNDOING[change.kind]} {change.name}" for change in reversed(record)]
    lines.append("build and examine the initrd of each kernel, which takes minutes")
    agree("This will undo the preparation:", lines, yes=options.yes)
    wait_for_packages()

    run("dpkg", "--configure", "-a", shown=True)
    run("systemctl", "disable", "--now", UNIT, check=False)
    left = take_back([change for change in record if not change.is_spare])
    for kernel in probed["kernels"].split():
        build(kernel, needs)
    left += take_back([change for change in record if change.is_spare])
    left += map(str, Path("/etc/initrd-ssh").glob("host_key*"))
    for module in MODULES.glob("*initrd-ssh*"):
        run("rmdir", str(module), check=False)
    shutil.rmtree(RECORD.parent)
    print("Undone. The initrd of each kernel was examined.")
    for what in left:
        print(f"Left: {what}.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.description = "Prepare a server for waker."
    add = parser.add_argument
    add("key", nargs="?", default="", help="waker's public key")
    add("--undo", action="store_true", help="take everything back")
    add("--yes", action="store_true", help="do not ask")
    add("--interface", default="", metavar="NAME", help="the network card to use")
    connection = "$SSH_CONNECTION, which begins with the box's address"
    add("--ssh-connection", default="", metavar="WORDS", help=connection)
    add("--nonce", default="", help="marks the lines with settings")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    os.environ |= ENVIRONMENT
    os.umask(0o022)
    try:
        if os.geteuid():
            raise Refused("run it as root, with sudo or su.")
        wait_for_packages()
        probed = probe(options.ssh_connection.partition(" ")[0])
        (undo if options.undo else prepare)(probed, options)
    except Refused as error:
        sys.exit(f"Nothing was changed on this server: {error}")
    except (Failed, OSError, KeyboardInterrupt) as error:
        problem = str(error) or "stopped."
        sys.exit(
            f"FAILED: {problem}\nThe server boots as before. Run this again to finish"
            " it, or undo it."
        )


if __name__ == "__main__":
    main()
