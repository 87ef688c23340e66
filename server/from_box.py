"""Prepare a server from the box, and take over the settings that it reports.

    python3 -m server.from_box prepare CONFIG SERVER [OPTION of prepare.py...]

`make server` runs this, as the user whose SSH keys log in to SERVER. CONFIG is the
folder with waker.env and ssh_key.pub. If only root may change it, sudo runs this file
again: with `key` to read the public key, and with `settle` to write the settings.

prepare.py, the files beside it and the public key travel in ssh's command line. That
leaves the terminal to the passwords and to prepare.py's question. The answer is
whatever a server prints. Only five settings are accepted, between two lines with a
nonce, if prepare.py succeeded and waker's own parsers accept every value. Otherwise,
nothing is written.
"""

import base64
import contextlib
import io
import ipaddress
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, cast

import waker
from waker import ConfigError

CHECKOUT: Final = Path(__file__).resolve().parent.parent
INSTALLED: Final = Path("/etc/waker")
EXAMPLE: Final = CHECKOUT.joinpath("waker.env.example").read_text()
DEFAULTS: Final = {name: default for name, (default, *_) in waker.SETTINGS.items()}
MAX_OUTPUT: Final = 65536  # bytes of the server's output that are kept, from its end
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


def find_settings(output: bytes, nonce: str) -> list[str]:
    """Return the lines between the two that have the nonce. Raises: ValueError."""
    text = output.decode("ascii", "replace").replace("\r\n", "\n")
    # What the user types meanwhile is shown as well, perhaps before the first of them.
    begin, end = f"waker-begin {nonce}\n", f"waker-end {nonce}\n"
    settings, is_ended, _ = text.partition(begin)[2].partition(end)
    if text.count(begin) != 1 or text.count(end) != 1 or not is_ended:
        raise ValueError
    return settings.removesuffix("\n").split("\n")


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
    for name, value in values.items():
        shown = re.findall(rf"(?m)^#{name}=.*$", EXAMPLE)
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
    """Return the command that runs prepare.py, for any login shell.

    `arguments` are those of prepare.py, quoted for sh.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in CHECKOUT.glob("server/*"):
            if path.name not in ("from_box.py", "remote.sh", "__pycache__"):
                archive.add(path, path.name)
    files = base64.b64encode(packed.getvalue()).decode()
    script = CHECKOUT.joinpath("server/remote.sh").read_text()
    script = script.replace("@FILES@", files).replace("@ARGUMENTS@", arguments)
    encoded = base64.b64encode(script.encode()).decode()
    # Every shell leaves this alone between single quotes. The terminal must stay the
    # standard input: sudo and prepare.py read from it.
    return f"exec sh -c 'eval \"$(echo {encoded} | base64 -d)\"'"


def run_there(server: str, command: str) -> tuple[int, bytes]:
    """Run a command over ssh, at this terminal; returns the status and the output."""
    output = b""
    ssh = ["ssh", "-t", server, command]
    with subprocess.Popen(ssh, stdout=subprocess.PIPE, bufsize=0) as process:
        printed = cast("IO[bytes]", process.stdout)
        while chunk := printed.read(MAX_OUTPUT):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            output = (output + chunk)[-MAX_OUTPUT:]
    return process.returncode, output


# ---- The box -------------------------------------------------------------------------
# What only root may do if the settings are root's.


def read_settings(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the text of waker.env, and its settings. Raises: ConfigError."""
    file = folder / "waker.env"
    if not file.exists():
        first = "make dist && sudo make install"
        if folder != INSTALLED:
            first = "make card (for OpenWrt, see docs/openwrt.md)"
        raise ConfigError(f"{file} is missing. First run: {first}")
    text = file.read_bytes().decode("utf-8", "surrogateescape")
    return text, waker.read_env_file(file) if text.strip() else {}


def read_key(folder: Path) -> str:
    """Return waker's public key, if waker.env can be changed. Raises: ConfigError."""
    read_settings(folder)
    real = folder.joinpath("waker.env").resolve()
    if not os.access(real.parent, os.W_OK):
        raise ConfigError(f"{real} cannot be changed: its folder is read-only")
    file = folder / "ssh_key.pub"
    try:
        return parse_key(file.read_text())
    except (OSError, ValueError):
        make = f"ssh-keygen -y -f {folder}/ssh_key | tee {file}"
        raise ConfigError(f"{file} has no public key. Make it with: {make}") from None


def write_settings(folder: Path, text: str, expected: Mapping[str, str]) -> None:
    """Replace waker.env at once, and keep its owner, mode and link.

    Raises: ConfigError, OSError
    """
    real = folder.joinpath("waker.env").resolve()
    before = real.stat()
    descriptor, name = tempfile.mkstemp(prefix=".waker.env.", dir=real.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            file.flush()
            os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fchmod(descriptor, before.st_mode & 0o7777)
            os.fsync(descriptor)
        will_be_read = None
        with contextlib.suppress(ConfigError):
            will_be_read = waker.read_env_file(part)
        if will_be_read != expected:
            raise ConfigError(f"Put the five settings above into {real} by hand.")
        part.replace(real)
    finally:
        part.unlink(missing_ok=True)
    directory = os.open(real.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def start_waker(folder: Path) -> str:
    """Check the settings, and run waker with them from now on.

    Returns where its page is, if that is known. Raises: ConfigError
    """
    print("\nwaker check:\n", flush=True)
    check = ["waker", "check"]
    checked = subprocess.run(check, check=False).returncode
    if checked == os.EX_CONFIG:
        raise ConfigError("Correct this in waker.env, and run the same command again.")
    commands = [["systemctl", "enable", "waker"], ["systemctl", "restart", "waker"]]
    if Path("/etc/rc.common").exists():  # OpenWrt
        commands = [["/etc/init.d/waker", "enable"], ["/etc/init.d/waker", "restart"]]
    for command in commands:
        if subprocess.run(command, check=False).returncode:
            raise ConfigError(f"`{' '.join(command)}` failed.")
    if checked:
        raise ConfigError("waker was started. Correct what is WRONG, and restart it.")
    values = waker.read_env_file(folder / "waker.env")
    config = waker.read_config(values, folder)
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


def settle(folder: Path, found: Mapping[str, str]) -> None:
    """Add the settings to waker.env, and start waker. Raises: ConfigError, OSError."""
    file = folder / "waker.env"
    text, present = read_settings(folder)
    added: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name, value in found.items():
        if not agrees(name, present.get(name) or DEFAULTS[name], value):
            differing = kept if present.get(name) else added
            differing[name] = value
    pin = "".join(secrets.choice(ALPHABET) for _ in range(PIN_LENGTH))
    if not present.get("WAKER_PIN"):
        added["WAKER_PIN"] = pin
    if added:
        write_settings(folder, fill_in(text, added), present | added)
    print(f"\nWritten to {file}: {', '.join(added) or 'nothing new'}.")
    for name, value in kept.items():
        print(f"\n{name} was kept, but the server reports a different value:")
        print(f"    {waker.printable(present[name])}\n    {value} (the server's)")
    if "WAKER_PIN" in added:  # not to standard output, which may be somebody's log
        with contextlib.suppress(OSError), Path("/dev/tty").open("w") as terminal:
            terminal.write(f"\nYour new PIN, which is also in waker.env: {pin}\n")
    if folder != INSTALLED:
        print(f"\nThe server is prepared. The box needs {folder} next.")
        return
    where = start_waker(folder)
    if kept:
        print("\nFirst compare the settings above that differ.")
    left = "One thing is left: reboot the server, and unlock it from your phone"
    print(f"\n{left}{where}.")


# ---- Commands ------------------------------------------------------------------------


def prepare_server(folder: Path, server: str = "", *options: str) -> int:
    """Prepare the server, or undo that. Raises: ConfigError, OSError."""
    if not server or server.startswith("-"):
        raise ConfigError("Name the server: make server SERVER=me@192.168.1.20")
    again = [sys.executable, "-B", "-m", "server.from_box"]  # -B: no files of root's
    if os.geteuid() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        again.insert(0, "sudo")
    nonce = secrets.token_hex(16)
    arguments = shlex.join(options)
    if "--undo" not in options:
        read = [*again, "key", str(folder)]
        shown = subprocess.run(read, cwd=CHECKOUT, stdout=subprocess.PIPE, check=False)
        if shown.returncode:
            return shown.returncode
        key = f"{shown.stdout.decode().strip()} waker"
        # The first word of SSH_CONNECTION is the address of this box.
        box = '--box "$SSH_CONNECTION"'
        arguments += f" {box} --nonce {nonce} {shlex.quote(key)}"
    status, output = run_there(server, remote_command(arguments))
    if status:
        raise ConfigError("Nothing was written on this box.")
    if "--undo" in options:
        print("\nwaker cannot unlock the server now. The settings on this box stay.")
        return 0
    try:
        found = parse_settings(find_settings(output, nonce))
    except ValueError:
        raise ConfigError(
            "The server did not report each setting once, with a valid value. Nothing"
            " was written on this box."
        ) from None
    settings = [f"{name}={value}" for name, value in found.items()]
    write = [*again, "settle", str(folder), *settings]
    return subprocess.run(write, cwd=CHECKOUT, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        sys.exit(__doc__)
    command, folder = arguments[0], Path(arguments[1]).absolute()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end without a traceback
    try:
        if command == "prepare":
            return prepare_server(folder, *arguments[2:])
        if command == "key":
            print(read_key(folder))
        if command == "settle":
            settle(folder, parse_settings(arguments[2:]))
    except ConfigError as error:
        sys.exit(f"\n{error}")
    except OSError as error:
        sys.exit(f"\n{error.filename}: {error.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
