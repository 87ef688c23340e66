"""What runs waker on a box: systemd, or OpenWrt's procd."""

import contextlib
import ipaddress
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import waker
from box import Failed
from box.files import read_sources
from waker import Address

CONFIG: Final = Path("/etc/waker")
ENV_FILE: Final = CONFIG / "waker.env"
# Where systemd looks for units. A later folder overrides an earlier one.
# Source: systemd.unit(5).
UNIT_FOLDERS: Final = (
    Path("/usr/lib/systemd/system"),
    Path("/usr/local/lib/systemd/system"),
    Path("/run/systemd/system"),
    Path("/etc/systemd/system"),
)
NO_FILE: Final = Path("/nonexistent")  # the settings come from elsewhere
PAGE_SECONDS: Final = 60  # a slow box needs 20 for the first page while it boots
LOG_LINES: Final = 10


class System(NamedTuple):
    """An init system, and where it expects waker."""

    name: str
    program: Path
    service_file: Path  # the unit, or the init script
    service_source: str  # its name in the one file
    service_mode: int
    as_root: str  # what a user types before a command for root


SYSTEMD: Final = System(
    name="systemd",
    program=Path("/usr/local/bin/waker"),
    service_file=Path("/usr/local/lib/systemd/system/waker.service"),
    service_source="waker.service",
    service_mode=0o644,
    as_root="sudo ",
)
PROCD: Final = System(
    name="procd",
    program=Path("/usr/bin/waker"),
    service_file=Path("/etc/init.d/waker"),
    service_source="waker.init",
    service_mode=0o755,
    as_root="",
)


class Service(NamedTuple):
    """A service that runs waker."""

    name: str
    env_file: Path  # its settings


def find_system() -> System | None:
    """Return this box's init system, if it is one of the two."""
    if Path("/etc/rc.common").exists():
        return PROCD
    return SYSTEMD if shutil.which("systemctl") else None


def is_booted(system: System) -> bool:
    """Return whether it is running; systemd is not in a chroot.

    Source: sd_booted(3)
    """
    return system is PROCD or Path("/run/systemd/system").is_dir()


# ---- Services ------------------------------------------------------------------------


def read_units() -> dict[str, str]:
    """Return the text of each service's unit and drop-ins, by the service's name.

    A link to /dev/null (a masked unit) or to a unit of another name has none.
    """
    units: dict[str, str] = {}
    for folder in UNIT_FOLDERS:
        for unit in folder.glob("*.service"):
            if unit.is_file() and unit.resolve().name == unit.name:
                units[unit.stem] = unit.read_text(errors="replace")
    for folder in UNIT_FOLDERS:
        for part in sorted(folder.glob("*.service.d/*.conf")):
            if part.is_file():
                name = part.parent.name.removesuffix(".service.d")
                text = part.read_text(errors="replace")
                units[name] = f"{units.get(name, '')}\n{text}"
    return units


def read_values(unit: str, name: str) -> list[str]:
    """Return what a unit assigns to a name; an empty value takes back all before it."""
    whole = re.sub(r"\\\n[ \t]*", " ", unit)
    values: list[str] = []
    for value in re.findall(rf"(?m)^[ \t]*{name}[ \t]*=(.*)$", whole):
        values = [*values, value.strip()] if value.strip() else []
    return values


def find_env_file(unit: str, arguments: Sequence[str]) -> Path:
    """Return which settings a unit passes to waker with these arguments."""
    environment = " ".join(read_values(unit, "Environment"))
    if read_values(unit, "EnvironmentFile") or "WAKER_" in environment:
        return NO_FILE
    option = re.search(r"--env-file[= ](\S+)", " ".join(arguments))
    if not option:
        return ENV_FILE
    folder, _, credential = option[1].rpartition("/")
    if folder not in ("%d", "${CREDENTIALS_DIRECTORY}"):
        return Path(option[1])
    for value in reversed(read_values(unit, "LoadCredential")):  # the last one wins
        name, _, source = value.partition(":")
        if name == credential:
            return Path(source.strip())
    return NO_FILE  # an encrypted credential, perhaps


def find_services(system: System) -> Iterator[Service]:
    """Yield each service that runs the program, and always our own.

    Our own may have no unit yet, or the one that waker 3 has installed in /usr.
    """
    if system is PROCD:
        yield Service("waker", ENV_FILE)
        return
    units = read_units()
    units.setdefault("waker", "")
    for name, unit in units.items():
        start = "".join(read_values(unit, "ExecStart")[-1:])
        program, *arguments = start.replace('"', "").split() or [""]
        is_ours = program.lstrip("-@:+!|") == str(system.program)
        if name == "waker" or is_ours:
            yield Service(name, find_env_file(unit, arguments))


def service_command(system: System, action: str, name: str = "waker") -> list[str]:
    """Return the command for an action on a service, such as `restart`."""
    if system is PROCD:
        return [f"/etc/init.d/{name}", action]
    return ["systemctl", action, name]


def run(command: list[str]) -> None:
    """Run a command. Raises: Failed."""
    if subprocess.run(command, check=False).returncode:
        raise Failed(f"`{' '.join(command)}` failed.")


def is_running(system: System, name: str = "waker") -> bool:
    """Return whether a service runs, or is about to be restarted after a crash."""
    if not is_booted(system):
        return False
    if system is PROCD:
        command = service_command(system, "running", name)
        return Path(command[0]).exists() and not subprocess.call(command)
    asked = subprocess.run(
        service_command(system, "is-active", name),
        stdout=subprocess.PIPE,
        check=False,
    )
    return asked.stdout.strip() in (b"active", b"activating", b"reloading")


def is_showing_page(host: str, port: int, seconds: float) -> bool:
    """Return whether this version's page is there. Raises: OSError."""
    page, answer = read_sources()["ui.html"], b""
    deadline = time.monotonic() + seconds
    with waker.open_tcp(host, port, seconds) as tcp:
        tcp.sendall(b"GET / HTTP/1.1\r\nHost: waker\r\n\r\n")
        # Another program's answer may never end.
        while len(answer) < 2 * len(page) and (chunk := tcp.recv(65536)):
            answer += chunk
            tcp.settimeout(max(0, deadline - time.monotonic()))
    return answer.endswith(page)


def wait_for_page(system: System, service: Service, listen: Address) -> bool:
    """Wait until a service that was started serves its page; returns whether it does.

    False means that it has ended, or that it took too long.
    """
    host, port = listen
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1"
    deadline = time.monotonic() + PAGE_SECONDS
    while time.monotonic() < deadline and is_running(system, service.name):
        with contextlib.suppress(OSError):  # it does not listen yet
            if is_showing_page(host, port, deadline - time.monotonic()):
                return True
        time.sleep(0.2)
    return False


def read_log(system: System, name: str) -> str:
    """Return the last lines that a service has logged."""
    command = ["journalctl", "--quiet", "--output=cat", f"--unit={name}"]
    command += [f"--lines={LOG_LINES}"]
    if system is PROCD:
        command = ["logread", "-e", name]
    shown = subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout
    return "\n".join(shown.decode(errors="replace").splitlines()[-LOG_LINES:])


def check_and_enable(system: System, program: str) -> bool:
    """Check the settings with the program, and run waker with them at every boot.

    Returns whether the check found nothing that is wrong. Raises: Failed.
    """
    print("\nwaker check:\n", flush=True)
    check = [program, "check"]
    checked = subprocess.run(check, check=False).returncode
    if checked == os.EX_CONFIG:
        raise Failed("Correct these settings, and run the same command again.")
    run(service_command(system, "enable"))
    return not checked
