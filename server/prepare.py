#!/usr/bin/env python3
"""Prepare a Debian-like server, so that waker can unlock its disk.

Run it as root on the server. It shows what it found and each change, and asks. Then
the initrd gets an address, an SSH server and waker's key, which can unlock and nothing
else, and the network card keeps Wake-on-LAN on. Beside it are the files that it
installs, with the paths that they have on the server.

What happens to /boot:

1. The image of the running kernel is copied, and GRUB's menu gets an entry for the copy
   if possible. Other kernels' images are not copied.
2. Settings are written, and packages installed. With initramfs-tools, that builds the
   newest kernel's image anew, with the settings but unexamined. With dracut, no image
   is touched.
3. For each kernel, the newest first, a new image is built elsewhere, examined, copied
   beside the old one, and renamed over it.

Undo restores the settings and removes packages, which with initramfs-tools builds the
newest image again. Then it does the same as step 3, and removes the copy last.

After a power cut or a lost connection, every image that this has put in place is whole,
and can open the disk at the screen. One from step 2 was not examined: if it fails,
choose the copy in GRUB's menu. The same command, run again, finishes the work.
"""

import argparse
import contextlib
import enum
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple, cast

from facts import (
    NOT_NOW,
    READ_ONLY,
    Card,
    Facts,
    Probed,
    Refused,
    check,
    describe,
    find_builder,
    understand,
)

MARK: Final = "# Written by waker's prepare.py. `waker prepare --undo` removes it."
RECORD: Final = Path("/var/lib/waker-prepare/record.json")
UNFINISHED: Final = RECORD.with_name("unfinished")  # is there during a run
IMAGES: Final = RECORD.with_name("images")  # where new ones are built
RUN_LOCK: Final = Path("/run/waker-prepare.lock")  # held as long as a run is at work
MODULES: Final = Path("/usr/lib/dracut/modules.d")
MENU: Final = "/boot/grub/custom.cfg"  # GRUB's own menu reads it
ENTRY: Final = "The initrd from before waker"
POSTRM: Final = "/etc/kernel/postrm.d/waker"
UNIT: Final = "waker-wake.service"
HERE: Final = Path(__file__).resolve().parent
MIB: Final = 1 << 20
MARGIN: Final = 20 * MIB  # by which an image grows: drivers and an SSH server
DPKG_LOCKS: Final = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock")
LOCK_SECONDS: Final = 600  # unattended upgrades may take as long
APT_UPDATE: Final = ("apt-get", "-q", "update")
APT: Final = (
    *("apt-get", "-qy", "--no-install-recommends", "--no-remove"),
    *(f"-oDPkg::Lock::Timeout={LOCK_SECONDS}", "-oDpkg::Options::=--force-confold"),
    "install",
)
# What examine says of dracut's images on a server that never had this program.
NEVER_HAD: Final = "it has no systemd-cryptsetup"
# Never remove these: the disk, or a login, may depend on them.
NEEDED: Final = "cryptsetup.*|dracut(-core)?|initramfs.*|openssh.*|systemd.*"
UNCHANGED: Final = "Nothing was changed on this server:"
ENVIRONMENT: Final = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
    "NEEDRESTART_SUSPEND": "1",  # it would restart the SSH server
    # dracut's trigger must not write over the image in use. initramfs-tools ignores it.
    "INITRD": "No",
}


class Failed(Exception):
    """A step failed after the work had begun."""


# ---- The plan: a list of changes, in order -------------------------------------------


class Kind(enum.Enum):
    """What a change does, in the words of the question."""

    COPY = "keep the image that works today as"
    FILE = "write"
    KEY = "limit waker's key to unlocking, with a line in"
    PACKAGE = "install"


class Change(NamedTuple):
    """One change. The plan is a list of these, and so is the record for undo."""

    kind: Kind
    name: str  # a path, or a package
    text: str = ""  # what is written; the path of what is copied
    before: str | None = None  # what was there; None if nothing was

    @property
    def is_spare(self) -> bool:
        """It keeps the old image bootable, so it is made first and undone last."""
        return self.name.startswith("/boot/") or self.name == POSTRM

    @property
    def is_in_image(self) -> bool:
        """It changes what goes into an image."""
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
            return f"{MARK}\nmenuentry '{ENTRY}' {{\n{entry}}}\n"
    return ""


def make_plan(facts: Facts, key: str, menu: str, files: dict[str, str]) -> list[Change]:
    """List every change in order, including those already made.

    Settings come before packages, so that no image lacks them. With dracut, the setting
    that asks for our module comes last: no image could be built before all is there.

    `key` is waker's public key, `menu` the text of GRUB's or "", and `files` are to be
    installed, by path, with words to fill in.
    """
    words = make_words(facts, key)
    image = f"/boot/initrd.img-{facts.kept}"
    plan = [Change(Kind.COPY, f"{image}.before-waker", image)]
    if menu:
        plan.append(Change(Kind.FILE, MENU, menu))
    last: list[Change] = []
    for path, template in files.items():
        # sshd_config has no words, because docs/server.md has people copy the module.
        text = template.replace("Port 2222", "Port @initrd port@")
        text = re.sub("@([#a-z ]+)@", lambda found: words[found[1]], text)
        kind = Kind.KEY if path.endswith("/authorized_keys") else Kind.FILE
        place = last if path.startswith("/etc/dracut.conf.d/") else plan
        place.append(Change(kind, path, text))
    packages = [Change(Kind.PACKAGE, name) for name in facts.missing]
    return plan + packages + last


# ---- Doors to the system -------------------------------------------------------------
# Programs are run here alone, and texts are read and written here alone.


def run(*command: str, check: bool = True, shown: bool = False) -> str:
    """Run a program; returns what it prints, unless that is shown. Raises Failed."""
    to = None if shown else subprocess.PIPE
    if not shutil.which(command[0]):
        if check:
            raise Failed(f"the program {command[0]} is missing.")
        return ""
    done = subprocess.run(command, stdout=to, stderr=to, errors="replace", check=False)
    if check and done.returncode:
        raise Failed(f"`{' '.join(command)}` failed. {(done.stderr or '')[-2000:]}")
    return done.stdout or ""


def read(name: str | Path) -> str:
    """Read a file, or nothing if there is none. Line ends and odd bytes stay."""
    path = Path(name)
    return path.read_bytes().decode(errors="surrogateescape") if path.exists() else ""


def remove(path: Path) -> None:
    """Remove a file, if it is there. A read-only disk fails even if it is not."""
    if path.exists():
        path.unlink()


def name_new(path: Path) -> Path:
    """Name the file that is written in full before it takes the place of another."""
    return Path(f"{path}.waker-new")


def put(new: Path, path: Path) -> None:
    """Put a new file in place: a power cut leaves the old one or the whole new one."""
    run("sync", "-f", str(new))  # -f, because GRUB reads no journal
    new.rename(path)
    run("sync", "-f", str(path.parent))


def write(name: str | Path, text: str, mode: int) -> None:
    path = Path(name).resolve()  # a link of the owner's stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    new = name_new(path)
    new.write_bytes(text.encode(errors="surrogateescape"))
    new.chmod(mode)
    put(new, path)


def copy_image(source: Path, path: Path) -> None:
    """Copy an image, for root alone: it may contain keys."""
    new = name_new(path)
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)
    shutil.copyfile(source, new)
    put(new, path)


def probe(name: str, address: str = "") -> str:
    """Run a function of probes.sh. One that fails has found nothing."""
    return run("sh", str(HERE / "probes.sh"), name, address, check=False)


def probe_all(address: str) -> Probed:
    script = (HERE / "probes.sh").read_text()
    names = re.findall(r"(?m)^(\w+)\(\) [{(]", script)
    return {name: probe(name, address) for name in names}


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


def take_lock() -> IO[str]:
    """Let no second run begin until the file is closed. Raises Refused.

    Only root can open it. Nobody removes it, or two runs could each lock another file.
    """
    try:
        lock = os.fdopen(os.open(RUN_LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(
            "`waker prepare` is already at work on it. Wait until that ends, and try"
            " again. If you can no longer answer its question, end it on the server, as"
            f" root: kill {read(RUN_LOCK)}"
        ) from None
    except OSError as error:
        raise Refused(f"{RUN_LOCK}: {error.strerror}.") from None
    lock.truncate()
    print(os.getpid(), file=lock, flush=True, end="")
    return lock


def dpkg_is_busy() -> bool:
    """Return whether another program installs packages just now."""
    for name in filter(os.path.exists, DPKG_LOCKS):
        with Path(name).open("ab") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def wait_for_packages() -> None:
    """Wait while another program installs packages. Raises Failed if it takes long."""
    ends = time.monotonic() + LOCK_SECONDS
    if dpkg_is_busy():
        print("Waiting for another program that installs packages.", flush=True)
    while dpkg_is_busy():
        if time.monotonic() > ends:
            raise Failed(f"another program holds {DPKG_LOCKS[0]}. Try again later.")
        time.sleep(1)


# ---- Keys in authorized_keys ---------------------------------------------------------
# Bytes that are no UTF-8, and odd line ends, stay as they are.


def find_key(line: str) -> str:
    """Return the key in a line of ours, which ends with it and a word of comment."""
    *_, key, _ = line.split()
    return key


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


# ---- The record ----------------------------------------------------------------------
# A change is in it before it is made.


def update_change(change: Change) -> Change:
    """Translate an entry by version 3. It had "" for what was not there.

    Of keys, it kept only the lines that it had replaced.
    """
    before = change.before or None
    if before and change.kind is Kind.KEY:
        before += "\n"
    return change._replace(before=before)


def parse_change(row: object) -> Change:
    """Parse an entry of the record. Raises ValueError, KeyError, TypeError."""
    values = row
    if isinstance(row, dict):
        values = [row[field] for field in Change._fields]
    word, name, text, before = cast("list[str]", values)
    if not all(isinstance(value, str) for value in (word, name, text, before or "")):
        raise TypeError
    change = Change(Kind[word], name, text, before)
    if change.kind is Kind.KEY:
        find_key(text)
    return change if isinstance(row, dict) else update_change(change)


def read_record() -> list[Change]:
    """Read the changes that were begun. Raises Refused."""
    if not RECORD.exists():
        return []
    try:
        rows = json.loads(read(RECORD))
        if not isinstance(rows, list):
            raise TypeError
        return [parse_change(row) for row in rows]
    except (ValueError, KeyError, TypeError):
        raise Refused(
            f"{RECORD} is damaged, or another program's. Undo needs it: repair it, or"
            " move it away."
        ) from None


def record_change(change: Change) -> None:
    """Add a change to the record. Of one made again, keep what was there at first."""

    def identify(change: Change) -> tuple[str, str]:
        # Each key in a file is a change of its own.
        return change.name, change.text if change.kind is Kind.KEY else ""

    record = {identify(old): old for old in read_record()}
    first = record.get(identify(change), change)
    record[identify(change)] = change._replace(before=first.before)
    rows = [c._asdict() | {"kind": c.kind.name} for c in record.values()]
    write(RECORD, json.dumps(rows, indent=1), 0o600)


# ---- Changes: for each kind, how it is made and how it is taken back -----------------
# What takes a change back returns what it had to leave, or "". It may be done twice.


def keep_image(change: Change) -> None:
    record_change(change)
    copy_image(Path(change.text), Path(change.name))


def drop_image(change: Change) -> str:
    remove(Path(change.name))
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


def limit_key(change: Change) -> None:
    path = Path(change.name)
    before = read(path) if path.exists() else None
    record_change(change._replace(before=before))
    mode = 0o600 if before is None else path.stat().st_mode & 0o777
    write(path, put_key(before or "", change.text), mode)


def release_key(change: Change) -> str:
    now, before, key = read(change.name), change.before or "", find_key(change.text)
    if now == before:
        return ""
    if now == put_key(before, change.text):
        restore(change)
        return ""
    # The owner has changed the file since. Put back the lines that ours replaced.
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
    # Others come along. Only those that are new have no older version in brackets.
    coming = run(*APT, change.name, "--simulate")
    for name in re.findall(r"(?m)^Inst (\S+) \(", coming):
        record_change(Change(Kind.PACKAGE, name))
    try:
        run(*APT, change.name, shown=True)
    except Failed as error:
        keeper = read("/etc/etckeeper/etckeeper.conf")
        if re.search(r"(?m)^\s*AVOID_COMMIT_BEFORE_INSTALL=[\"']?1", keeper):
            hint = "If etckeeper refused it, first run `etckeeper commit`."
            raise Failed(f"{error}\n{hint}") from None
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
    # At once, because some need others. Unlike apt, dpkg leaves what others need.
    if gone:
        wait_for_packages()
        run("dpkg", "--purge", *gone, check=False)
    # Debian 13's dropbear-initramfs leaves the public keys that it made.
    for public in keys.glob("*_host_key.pub"):
        if not public.with_suffix("").exists():
            public.unlink()
    states = run("dpkg-query", "-Wf", "${Package} ${db:Status-Status}\n").splitlines()
    return [f"the package {name}" for name in names if f"{name} installed" in states]


def is_done(change: Change) -> bool:
    match change.kind:
        case Kind.COPY:
            return Path(change.name).exists()
        case Kind.FILE:
            return read(change.name) == change.text
        case Kind.KEY:
            now = read(change.name)
            return now == put_key(now, change.text)
        case Kind.PACKAGE:
            return False  # the plan has those that are missing


def describe_undo(change: Change) -> str:
    match change.kind:
        case Kind.COPY:
            return f"remove {change.name}"
        case Kind.FILE:
            verb = "remove" if change.before is None else "restore"
            return f"{verb} {change.name}"
        case Kind.KEY:
            return f"take waker's key out of {change.name}"
        case Kind.PACKAGE:
            return f"remove the package {change.name}, unless something needs it"


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


def take_back(change: Change) -> str:
    """Undo a change, but for packages, which go together. Returns what is left."""
    if change.kind is not Kind.PACKAGE:  # of an interruption
        remove(name_new(Path(change.name)))
    match change.kind:
        case Kind.COPY:
            return drop_image(change)
        case Kind.FILE:
            return restore_file(change)
        case Kind.KEY:
            return release_key(change)
        case Kind.PACKAGE:
            return ""


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


def replace_image(kernel: str, needs: Needs, accepted: Sequence[str]) -> None:
    """Build and examine an image, and put it in place. Raises Failed, without harm.

    `accepted` may be wrong with it.
    """
    image = Path(f"/boot/initrd.img-{kernel}")
    # Elsewhere, because nobody knows how large it will be, and /boot may be small.
    shutil.rmtree(IMAGES, ignore_errors=True)
    IMAGES.mkdir(mode=0o700)
    # In a new folder: if a run was killed, its builder may still write to the old one.
    new = Path(tempfile.mkdtemp(dir=IMAGES), image.name)
    run("sh", str(HERE / needs.builder / "build"), str(new), kernel)
    wrong = examine(str(new), kernel, needs)
    if wrong := [what for what in wrong if what not in accepted]:
        raise Failed(f"the new {image} is not used: {'; '.join(wrong)}.")
    size = new.stat().st_size
    if shutil.disk_usage("/boot").free < size:
        need = f"/boot needs {size // MIB + 1} MiB free for the new {image.name}."
        raise Failed(f"{need} Remove an old kernel.")
    copy_image(new, image)
    shutil.rmtree(IMAGES)


def build(kernel: str, needs: Needs) -> None:
    """Replace a kernel's image, unless it is right already. Raises Failed.

    Undo does not ask for systemd-cryptsetup if the image in place has none.
    """
    image = f"/boot/initrd.img-{kernel}"
    wrong = examine(image, kernel, needs)
    accepted = [NEVER_HAD] if needs.state == "undone" and NEVER_HAD in wrong else []
    if wrong != accepted:
        print(f"Building and examining {image}, which may take minutes.", flush=True)
        replace_image(kernel, needs, accepted)
    hooks = Path("/etc/initramfs/post-update.d")
    if hooks.is_dir():  # some boot loaders keep copies of images
        run("run-parts", f"--arg={kernel}", f"--arg={image}", str(hooks))


def build_all(needs: Needs) -> None:
    """Build the image of every kernel. Others may have come during the question."""
    kernels = probe("kernels").split()
    if not kernels:
        raise Failed("`linux-version list` finds no kernel.")
    for kernel in reversed(kernels):  # the one that boots comes first
        build(kernel, needs)


def find_left_over() -> list[Path]:
    """Find new files that an interruption left in /boot."""
    return [path for path in Path("/boot").glob("*.waker-new") if path.is_file()]


def check_room(facts: Facts, wrong: Sequence[str]) -> None:
    """Refuse a /boot that is too small for new images of the kernels that need one."""
    kept = Path(f"/boot/initrd.img-{facts.kept}")
    size = kept.stat().st_size
    need = size + MARGIN * len(wrong)  # one stands beside the one that it replaces
    if not Path(f"{kept}.before-waker").exists():
        need += size
    left = sum(path.stat().st_size for path in find_left_over())
    if shutil.disk_usage("/boot").free + left < need:
        raise Refused(f"/boot needs {need // MIB} MiB free. Remove an old kernel.")


# ---- Commands ------------------------------------------------------------------------


def ask() -> str:
    """Ask at the terminal; returns the answer, or nothing if there is no terminal."""
    try:
        with Path("/dev/tty").open("w") as terminal:
            terminal.write("Go on? [y/N] ")
        with Path("/dev/tty").open(errors="replace") as terminal:
            return terminal.readline()
    except OSError:
        return ""


def agree(title: str, lines: Sequence[str], *, yes: bool) -> None:
    """Show what will be done, and ask unless the answer is given. Raises Refused."""
    print(title, *(f"    {line}" for line in lines), sep="\n", flush=True)
    if yes:
        return
    if not ask().startswith(("y", "Y")):
        raise Refused("you did not answer y. Without a terminal, use --yes.")


def read_host_key(builder: str) -> str:
    """Return the initrd's public host key. Raises Failed."""
    return run("sh", str(HERE / builder / "host-key")).strip()


def find_notes(card: Card) -> list[str]:
    """Say what the owner must do, or waker will not find or wake the server."""
    notes: list[str] = []
    if not re.search("Wake-on: .*g", run("ethtool", card.name, check=False)):
        problem = f"WARNING: the driver of {card.name} offers no Wake-on-LAN, so waker"
        remedy = "Look for it in the firmware (BIOS), or use another card."
        notes.append(f"{problem} cannot wake this server by this card. {remedy}")
    if card.has_dhcp:
        reserve = f"TO DO: reserve {card.address.ip} for {card.mac} in your router."
        notes.append(f"{reserve} Otherwise, the server's address may change.")
    return notes


def show_settings(facts: Facts, host_key: str, nonce: str) -> None:
    """Print the box's settings, and last what the owner must do.

    With a nonce, all that stands between two lines that the box recognises.
    """
    card = facts.card
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
    for note in find_notes(card):
        print(note if nonce else f"\n{note}")
    if nonce:
        print(f"waker-end {nonce}")


def is_ours(name: str, text: str) -> bool:
    """Return whether we wrote a text, in whatever version. Modules have no mark."""
    return name.startswith(f"{MODULES}/") or "# Written by waker's prepare.py" in text


def find_work(plan: Sequence[Change]) -> list[Change]:
    """Return what is left to do. Refuse to write over what the owner has changed."""
    todo = [change for change in plan if not is_done(change)]
    files = [change.name for change in todo if change.kind is Kind.FILE]
    for old in read_record():
        if old.name not in files:
            continue
        now = read(old.name)
        # After an interruption, a file of ours may still be older than the record.
        is_older = UNFINISHED.exists() and is_ours(old.name, now)
        if now not in ("", old.text, old.before) and not is_older:
            raise Refused(f"{old.name} has your changes. Move them, and delete it.")
    return todo


def begin() -> None:
    """Wait for others. From now on, the work is unfinished until images are right."""
    wait_for_packages()
    write(UNFINISHED, "", 0o600)
    for path in find_left_over():
        path.unlink()


def finish_packages() -> None:
    """Let dpkg finish what an interruption has left."""
    wait_for_packages()
    run("dpkg", "--configure", "-a", shown=True)


def carry_out(todo: Sequence[Change]) -> None:
    packages = [change for change in todo if change.kind is Kind.PACKAGE]
    for change in todo:
        if change in packages[:1]:
            finish_packages()
            run(*APT_UPDATE, check=False, shown=True)  # a source may be broken
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
    images = {kernel: Path(f"/boot/initrd.img-{kernel}") for kernel in facts.kernels}
    wrong = [k for k, image in images.items() if examine(str(image), k, needs)]
    is_finished = all(c.is_spare for c in todo) and not UNFINISHED.exists()
    if is_finished and not wrong:
        print("The server is already prepared. Nothing was changed.")
        show_settings(facts, read_host_key(facts.builder), options.nonce)
        return

    check(probed, READ_ONLY)
    check_room(facts, wrong)
    print("Found:", *(f"    {line}" for line in describe(facts)), sep="\n")
    if not menu:
        print("WARNING: the kept image gets no entry in GRUB's menu. Note its name.")
    lines = [f"{change.kind.value} {change.name}" for change in todo]
    if wrong or any(change.is_in_image for change in todo):
        lines.append(
            "build a new initrd for each kernel that needs one, which takes minutes"
        )
    lines.append("examine the initrd of each kernel")
    agree("This will:", lines, yes=options.yes)

    begin()
    carry_out(todo)
    build_all(needs)
    host_key = read_host_key(facts.builder)
    UNFINISHED.unlink()
    print("The server is prepared. The initrd of each kernel was examined.")
    if menu:
        print(f"If it does not boot, choose '{ENTRY}' in GRUB's menu.")
    show_settings(facts, host_key, options.nonce)


def undo(probed: Probed, options: argparse.Namespace) -> None:
    record = read_record()
    if not record:
        UNFINISHED.unlink(missing_ok=True)
        print("There is nothing to undo. Nothing was changed.")
        return
    check(probed, NOT_NOW)
    ours = [change.name for change in record if change.name.startswith("/boot/")]
    if any(map(os.path.exists, ours)):  # or else, nothing in /boot is to be removed
        check(probed, READ_ONLY)
    # Every disk below /, however it is opened.
    disks = dict.fromkeys(re.findall(r"(?m)^(\S+) +crypt\b", probed["disks"]))
    needs = Needs("undone", find_builder(probed), [*disks])
    record.reverse()
    lines = [describe_undo(change) for change in record]
    lines.append(
        "build a new initrd for each kernel that needs one, which takes minutes"
    )
    agree("This will undo the preparation:", lines, yes=options.yes)

    begin()
    finish_packages()
    run("systemctl", "disable", "--now", UNIT, check=False)
    packages = [change.name for change in record if change.kind is Kind.PACKAGE]
    left = [take_back(change) for change in record if not change.is_spare]
    # The key is gone by now, so dropbear may stay only for the owner's.
    left += remove_packages(packages)
    build_all(needs)
    left += [take_back(change) for change in record if change.is_spare]
    left += map(str, Path("/etc/initrd-ssh").glob("host_key*"))
    for module in MODULES.glob("*initrd-ssh*"):
        with contextlib.suppress(OSError):  # what is not empty stays
            module.rmdir()
    shutil.rmtree(RECORD.parent)
    print("Undone. The initrd of each kernel was examined.")
    for what in filter(None, left):
        print(f"Left: {what}.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.description = "Prepare a server for waker."
    add = parser.add_argument
    add("key", nargs="?", default="", help="waker's public key")
    add("--undo", action="store_true", help="undo what this did")
    add("--yes", action="store_true", help="do not ask")
    add("--interface", default="", metavar="NAME", help="the network card to use")
    connection = "$SSH_CONNECTION, which begins with the box's address"
    add("--ssh-connection", default="", metavar="WORDS", help=connection)
    add("--nonce", default="", help="marks the lines with settings")
    return parser.parse_args()


def advise(options: argparse.Namespace) -> str:
    """Say what to do if this run has failed half-way, or an earlier one."""
    if options.undo:
        again = "run `waker prepare --undo` again"
    else:
        again = "run the same command again, or `waker prepare --undo`"
    advice = f"The server is half prepared. Before you restart it, {again}."
    for kept in Path("/boot").glob("initrd.img-*.before-waker"):
        advice += f" (If it does not boot, use the kept image, {kept}.)"
    return advice


def execute(options: argparse.Namespace) -> None:
    """Prepare the server, or undo that. If it fails, exit and say what to do."""
    try:
        wait_for_packages()
        probed = probe_all(options.ssh_connection.partition(" ")[0])
        if options.undo:
            undo(probed, options)
        else:
            prepare(probed, options)
    except Refused as error:
        problem = f"{UNCHANGED} {error}"
    except (Failed, OSError, KeyboardInterrupt) as error:
        problem = f"FAILED: {str(error) or 'stopped.'}"
    else:
        return
    if UNFINISHED.exists():
        problem += f"\n{advise(options)}"
    sys.exit(problem)


def main() -> None:
    options = parse_arguments()
    os.environ |= ENVIRONMENT
    os.umask(0o022)
    try:
        if os.geteuid():
            raise Refused("run it as root, with sudo or su.")
        lock = take_lock()
    except Refused as error:
        sys.exit(f"{UNCHANGED} {error}")
    with lock:
        execute(options)


if __name__ == "__main__":
    main()
