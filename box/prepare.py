"""Prepare a server from the box, and take over the settings that it reports.

The user whose SSH keys log in to the server runs this. If only root may change the
folder with waker.env and the key, sudo runs this file again: with `--own-key` to read
the public key, and with `--settle` to write the settings.

The server's prepare.py, which is server/prepare.py here, travels in ssh's command line
with the files beside it and the public key. So the terminal is free for passwords and
for the question that it asks. The answer is whatever a server prints. Only five
settings are accepted, between two lines with a nonce, if the server's prepare.py
succeeded and waker's own parsers accept every value, and notes for the owner, which are
shown again at the end. Otherwise, nothing is written.
"""

import argparse
import base64
import contextlib
import fcntl
import io
import ipaddress
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, cast

import waker
from box import Failed, Refused
from box.files import new_name, read_sources, write_new
from box.system import CONFIG, SUDO, check_and_start, check_memory, find_system
from waker import ConfigError

# What Python runs to run this again. -B: no files of root's in a checkout.
OURSELVES: Final = (
    ("-B", "-m", "box") if waker.HERE.is_dir() else ("-B", str(waker.HERE))
)
DEFAULTS: Final = {name: default for name, (_, default, *_) in waker.SETTINGS.items()}
MAX_OUTPUT: Final = 1 << 20  # bytes of a server's output; a preparation prints less
# What the owner must read at the end, as the server's prepare.py prints it.
NOTE: Final = re.compile("(?:WARNING|TO DO): [ -~]{1,300}")
MAX_NOTES: Final = 3  # lines; the server's prepare.py has two
MAX_KEY: Final = 8192  # characters of a public key's line; the largest have 3,000
EXPLAINED: Final = 3  # exit status of a failure with a message; sudo's own is 1
# Ends whatever sequence the server's last bytes began, and resets colours and letters:
# what comes next must not go into the window's title, or be invisible.
PLAIN_AGAIN: Final = "\33\\\33[m\33(B\17"
# 31 characters that no font makes look alike, and that need no shift on a phone. Twelve
# have 59 bits.
ALPHABET: Final = "abcdefghjkmnpqrstuvwxyz23456789"
PIN_LENGTH: Final = 12


# ---- Values --------------------------------------------------------------------------


def format_key(key: waker.HostKey) -> str:
    """Format a public key as in a .pub file, without a comment."""
    kind = key[4 : 4 + int.from_bytes(key[:4])].decode()
    return f"{kind} {base64.b64encode(key).decode()}"


def parse_key(text: str) -> str:
    """Parse a line that has exactly one public key. Raises: ValueError."""
    if len(text) > MAX_KEY:
        raise ValueError
    (key,) = waker.parse_host_keys(text)
    return format_key(key)


# The settings that a server reports. What is written is formatted anew.
PARSERS: Final[Mapping[str, Callable[[str], str]]] = {
    "WAKER_HOMELAB_MAC": lambda text: waker.parse_mac(text).hex(":"),
    "WAKER_HOMELAB_HOST": waker.plain_address,
    "WAKER_INITRD_SSH_PORT": lambda text: str(waker.parse_port(text)),
    "WAKER_SYSTEM_SSH_PORT": lambda text: str(waker.parse_port(text)),
    "WAKER_SSH_HOST_KEY": parse_key,
}


def find_answer(output: bytes, nonce: str) -> list[str]:
    """Return the lines between the two that have the nonce. Raises: ValueError."""
    text = output.decode("ascii", "replace").replace("\r\n", "\n")
    # What the user types meanwhile is shown as well, perhaps before the first of them.
    begin, end = f"waker-begin {nonce}\n", f"waker-end {nonce}\n"
    answer, is_ended, _ = text.partition(begin)[2].partition(end)
    if text.count(begin) != 1 or text.count(end) != 1 or not is_ended:
        raise ValueError
    return answer.removesuffix("\n").split("\n")


def parse_settings(lines: Sequence[str]) -> dict[str, str]:
    """Parse the five settings, each of them once. Raises: ValueError."""
    values: dict[str, str] = {}
    for line in lines:
        name, _, text = line.partition("=")
        if name not in PARSERS or name in values:
            raise ValueError
        values[name] = PARSERS[name](text)
    if values.keys() != PARSERS.keys():
        raise ValueError
    return values


def parse_answer(output: bytes, nonce: str) -> tuple[dict[str, str], list[str]]:
    """Return the settings and the notes that a server reports. Raises: ValueError."""
    lines = find_answer(output, nonce)
    notes = [line for line in lines if NOTE.fullmatch(line)]
    if len(notes) > MAX_NOTES:
        raise ValueError
    return parse_settings([line for line in lines if line not in notes]), notes


def agrees(name: str, old: str, new: str) -> bool:
    """Return whether a setting says already what the server reports."""
    try:
        if name == "WAKER_SSH_HOST_KEY":  # there may be several
            return new in map(format_key, waker.parse_host_keys(old))
        return PARSERS[name](old) == new
    except ValueError:  # not set, or a mistake
        return False


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """Set settings that have no value in the text of a waker.env.

    Each goes where it is empty, or where the example shows it, or else to the end.
    """
    line_end = "\r\n" if "\r\n" in text else "\n"
    whole = read_sources()["waker.env.example"].decode()
    for name, value in values.items():
        shown = re.findall(rf"(?m)^#{name}=.*$", whole)
        empty = rf"{name}[ \t]*=[ \t]*(?:\"\"|'')?"
        example = "|".join([rf"#[ \t]*{empty}", *map(re.escape, shown)])
        for pattern in (empty, example):
            place = rf"(?m)^(\ufeff?)[ \t]*(?:{pattern})[ \t]*(?=\r?$)"
            text, count = re.subn(place, rf"\g<1>{name}={value}", text, count=1)
            if count:
                break
        else:
            if text and not text.endswith("\n"):
                text += line_end
            text += f"{name}={value}{line_end}"
    return text


# ---- The server ----------------------------------------------------------------------


def remote_command(arguments: str) -> str:
    """Return the command that runs the server's prepare.py, for any login shell.

    `arguments` are quoted for sh.
    """
    sources, packed = read_sources(), io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in sources.items():
            folder, _, path = name.partition("/")
            if folder == "server":
                member = tarfile.TarInfo(path)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    files = base64.b64encode(packed.getvalue()).decode()
    script = sources["server/remote.sh"].decode()
    script = script.replace("@FILES@", files).replace("@ARGUMENTS@", arguments)
    encoded = base64.b64encode(script.encode()).decode()
    # Every shell leaves this alone between single quotes. The terminal must stay the
    # standard input: sudo and the server's prepare.py read from it.
    return f"exec sh -c 'eval \"$(echo {encoded} | base64 -d)\"'"


def run_there(server: str, command: str) -> tuple[int, bytes]:
    """Run a command over ssh, at this terminal; returns the status and the output.

    Raises: ConfigError if the server prints more than MAX_OUTPUT.
    """
    output = bytearray()
    # The user's settings for this server may have another command, or none.
    options = ["-o", "RemoteCommand=none", "-o", "SessionType=default"]
    ssh = ["ssh", "-t", *options, server, command]
    with subprocess.Popen(ssh, stdout=subprocess.PIPE, bufsize=0) as process:
        printed = cast("IO[bytes]", process.stdout)
        while chunk := printed.read(65536):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            if len(output) <= MAX_OUTPUT:  # keep the beginning, in any case
                output += chunk
    if sys.stdout.isatty():
        print(end=PLAIN_AGAIN, flush=True)
    if len(output) > MAX_OUTPUT:
        raise ConfigError(
            "The server printed more than 1 MiB. Nothing was written on this box."
        )
    return process.returncode, bytes(output)


# ---- The box -------------------------------------------------------------------------
# What only root may do if the settings are root's.


def read_settings(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the text of waker.env, and its settings. Raises: ConfigError."""
    file = folder / "waker.env"
    if not file.exists():
        raise ConfigError(f"{file} is missing. Run: {SUDO}waker install")
    text = file.read_bytes().decode("utf-8", "surrogateescape")
    return text, waker.read_env_file(file) if text.strip() else {}


def replace_settings(file: Path, text: str, expected: Mapping[str, str]) -> None:
    """Replace waker.env at once, and keep its owner and mode.

    Raises: ConfigError if that fails, or if it would not be read as expected.
    """
    new = new_name(file)
    data = text.encode("utf-8", "surrogateescape")
    try:
        old = file.stat()
        write_new(file, data, old.st_mode & 0o7777, (old.st_uid, old.st_gid))
        will_be_read = None
        with contextlib.suppress(ConfigError):
            will_be_read = waker.read_env_file(new)
        if will_be_read != expected:
            raise ConfigError(
                f"Put the settings above into {file} by hand, and run this again."
            )
        new.replace(file)
        os.sync()
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    finally:
        new.unlink(missing_ok=True)


def make_missing(folder: Path) -> None:
    """Make the settings and the key that a folder of the user's lacks.

    Raises: ConfigError, OSError
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / "waker.env"
    key, public = folder / "ssh_key", folder / "ssh_key.pub"
    if not any(map(os.path.lexists, (key, public))):  # keep either one
        program = shutil.which("ssh-keygen")
        if not program:
            packages = "openssh-client (on OpenWrt, openssh-keygen)"
            raise ConfigError(f"ssh-keygen is missing. Install the package {packages}.")
        make = [program, "-q", "-t", "ed25519", "-N", "", "-C", "waker", "-f", str(key)]
        if subprocess.run(make, check=False).returncode:
            raise ConfigError(f"ssh-keygen could not make {key}")
    if not os.path.lexists(file):
        if not key.exists():  # to make new settings would lose those on the box
            raise ConfigError(
                f"{file} and {key} are missing. Fetch waker.env from the box."
            )
        example = read_sources()["waker.env.example"]
        write_new(file, example, 0o600).replace(file)


def read_key(folder: Path) -> str:
    """Return waker's public key, if waker.env can be changed. Raises: ConfigError."""
    if folder == CONFIG:
        check_memory()
    else:
        make_missing(folder)
    read_settings(folder)
    real = folder.joinpath("waker.env").resolve()
    if not os.access(real.parent, os.W_OK):
        raise ConfigError(f"{real} cannot be changed: its folder is read-only")
    file = folder / "ssh_key.pub"
    try:
        return parse_key(file.read_text())
    except (OSError, ValueError):
        key, public = shlex.quote(f"{folder}/ssh_key"), shlex.quote(str(file))
        sudo = SUDO if folder == CONFIG else ""
        make = f"{sudo}ssh-keygen -y -f {key} | {sudo}tee {public}"
        raise ConfigError(f"{file} has no public key. Make it with: {make}") from None


def start_waker() -> str:
    """Run waker with its settings; returns where its page is, if that is known.

    Raises: ConfigError, Failed.
    """
    system = find_system()
    if not system:
        raise ConfigError("Neither systemd nor procd is here to start waker.")
    config = check_and_start(system)
    host, port = config.listen
    listens = ipaddress.ip_address(host)
    if listens.is_loopback:  # behind a proxy, which has another address
        return ""
    if listens.is_unspecified:
        try:
            host = waker.find_source_address(config)
        except OSError:  # there is no route now
            return ""
    return f" at http://{f'[{host}]' if ':' in host else host}:{port}/"


def show_pin(pin: str, file: Path) -> None:
    """Show a new PIN at the terminal: standard output may be somebody's log."""
    try:
        with Path("/dev/tty").open("w") as terminal:
            words = "Your new PIN, which is also in waker.env"
            terminal.write(f"{PLAIN_AGAIN}\n{words}: {pin}\n")
    except OSError:
        print(f"\nYour new PIN is in {file}.")


def write_settings(folder: Path, found: Mapping[str, str]) -> dict[str, str]:
    """Fill in what waker.env lacks, including a PIN, and show what that is.

    Returns the reported settings that waker.env contradicts, which it still does.
    Raises: ConfigError, OSError.
    """
    file = folder / "waker.env"
    new_name(file.resolve()).unlink(missing_ok=True)  # of a run that was killed
    text, present = read_settings(folder)
    differs = {
        name: value
        for name, value in found.items()
        if not agrees(name, present.get(name) or DEFAULTS[name], value)
    }
    kept = {name: value for name, value in differs.items() if present.get(name)}
    added = {name: value for name, value in differs.items() if name not in kept}
    if not present.get("WAKER_PIN"):
        added["WAKER_PIN"] = "".join(
            secrets.choice(ALPHABET) for _ in range(PIN_LENGTH)
        )
    if added:
        new = fill_in(text, added)
        replace_settings(file.resolve(), new, present | added)
    print(f"\nWritten to {file}: {', '.join(added) or 'nothing new'}.")
    for name, value in kept.items():
        print(f"\n{name} was kept, but the server reports a different value:")
        print(f"    {waker.printable(present[name])}\n    {value} (the server's)")
    if "WAKER_PIN" in added:
        show_pin(added["WAKER_PIN"], file)
    return kept


def settle(folder: Path, lines: Sequence[str]) -> None:
    """Add the settings to waker.env, and start waker if they are this box's own.

    Raises: ConfigError, Failed, OSError.
    """
    try:
        found = parse_settings(lines)
    except ValueError:
        raise ConfigError("These are not the settings that a server reports.") from None
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # until this process ends
    kept = write_settings(folder, found)
    if folder != CONFIG:
        print(f"\nThe server is prepared. Next, let waker use {folder}, on this box or")
        print("on another one, to which you copy it.")
        return
    where = start_waker()
    if kept:
        print("\nFirst compare the settings above that differ.")
    print(f"\nNext, reboot the server, and unlock it from your phone{where}.")


# ---- Commands ------------------------------------------------------------------------


def check_client() -> None:
    """Raise ConfigError unless `ssh` is OpenSSH's."""
    client = shutil.which("ssh")
    version = b""
    if client:
        asked = subprocess.run([client, "-V"], capture_output=True, check=False)
        version = asked.stdout + asked.stderr
    if b"OpenSSH" in version:
        return
    found = "there is none" if not client else f"{client} is another client"
    if b"Dropbear" in version:  # it ends if a command has more than 16 KiB
        found = f"{client} is Dropbear's, which cannot send so long a command"
    problem = f"This needs OpenSSH's client, but here {found}."
    raise ConfigError(f"{problem} Install the package openssh-client.")


def run_as_owner(
    folder: Path, *step: str, stdout: int | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run this again, as somebody who may change the folder. Raises: ConfigError."""
    command = [sys.executable, *OURSELVES, "prepare", *step]
    is_others = folder.is_dir() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    if os.geteuid() and is_others:
        if not shutil.which("sudo"):
            problem = f"You may not change {folder}, and there is no sudo here."
            raise ConfigError(f"{problem} Run this as root.")
        command.insert(0, "sudo")
    return subprocess.run(command, stdout=stdout, check=False)


def set_up_box(
    folder: Path, found: Mapping[str, str], notes: Sequence[str], typed: str
) -> int:
    """Write the settings that the server reported; returns the exit status.

    `notes` are for the user to read last. `typed` is the command to repeat if this
    fails. Raises: ConfigError.
    """
    settings = [f"{name}={value}" for name, value in found.items()]
    status = run_as_owner(folder, "--settle", str(folder), *settings).returncode
    if status not in (0, EXPLAINED):  # perhaps because of a wrong password
        print(f"\nThe server is prepared. To set up this box, repeat: {typed}")
    if notes:
        print("\nThe server says:", *notes, sep="\n")
    return status


def prepare_server(given: argparse.Namespace, typed: str) -> int:
    """Prepare the server, or undo that; returns the exit status.

    `typed` is the user's command. Raises: ConfigError, OSError.
    """
    folder = given.config.absolute()
    if folder == CONFIG and not folder.exists() and not given.undo:
        raise ConfigError(
            f"{folder} is missing. Install waker first, or name a folder for its key"
            " and settings: --config FOLDER"
        )
    check_client()
    options = [f"--{name}" for name in ("undo", "yes") if getattr(given, name)]
    options += ["--interface", given.interface] if given.interface else []
    arguments, nonce = shlex.join(options), secrets.token_hex(16)
    if not given.undo:
        shown = run_as_owner(folder, "--own-key", str(folder), stdout=subprocess.PIPE)
        if shown.returncode:
            return shown.returncode
        key = f"{shown.stdout.decode().strip()} waker"
        # Of which the first word is the address of this box.
        connection = '--ssh-connection "$SSH_CONNECTION"'
        arguments += f" {connection} --nonce {nonce} {shlex.quote(key)}"
    status, output = run_there(given.server, remote_command(arguments))
    if status:
        raise ConfigError("Nothing was written on this box.")
    if given.undo:
        print("\nThe settings on this box stay.")
        return 0
    try:
        found, notes = parse_answer(output, nonce)
    except ValueError:
        raise ConfigError(
            "The server did not report each setting once, with a valid value. Nothing"
            " was written on this box."
        ) from None
    return set_up_box(folder, found, notes, typed)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="waker prepare", allow_abbrev=False)
    parser.description = "Prepare a server, so that waker can unlock its disk."
    add = parser.add_argument
    name = "as ssh knows it: me@192.168.1.20 or ssh://me@192.168.1.20:2200"
    add("server", metavar="SERVER", help=name)
    own = "a folder with waker.env and waker's key, which are made if they are missing"
    own += f" [{CONFIG}]"
    add("--config", metavar="FOLDER", type=Path, default=CONFIG, help=own)
    card = "the server's network card; by default, the one that leads to this box"
    add("--interface", metavar="NAME", default="", help=card)
    add("--undo", action="store_true", help="undo what this did")
    add("--yes", action="store_true", help="do not ask")
    given = parser.parse_args(arguments)
    if not given.server or given.server.startswith("-"):
        parser.error(f"SERVER must be {name}")
    return given


def main(arguments: list[str]) -> int:
    """Run the command, or a step of it that only root may do."""
    if not sys.stdout:
        sys.exit("This needs its standard output, to show what the server says.")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end without a traceback
    step, values = arguments[:1], arguments[1:]
    try:
        if step == ["--own-key"]:
            print(read_key(Path(*values)))
        elif step == ["--settle"]:
            settle(Path(*values[:1]), values[1:])
        else:
            typed = shlex.join(["waker", "prepare", *arguments])
            return prepare_server(parse_arguments(arguments), typed)
    except (ConfigError, Refused, Failed) as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or 'standard output'}: {error.strerror}"
    else:
        return 0
    print(f"\n{problem}", file=sys.stderr)
    return EXPLAINED
