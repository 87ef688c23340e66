"""What runs waker on a box: systemd, or OpenWrt's procd."""

import contextlib
import ipaddress
import os
import re
import shlex
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import waker
from box import Failed, Refused
from waker import Address, Config, ConfigError

CONFIG: Final = Path("/etc/waker")
ENV_FILE: Final = CONFIG / "waker.env"
# What `systemctl show` prints for %d and ${CREDENTIALS_DIRECTORY}.
CREDENTIALS: Final = r"/run/credentials/[^/]+|\$\{?CREDENTIALS_DIRECTORY\}?"
# What a user types before a command for root.
SUDO: Final = "sudo " if shutil.which("sudo") else ""
ACTIVE: Final = "active", "activating", "reloading"  # activating: perhaps after a crash
PAGE_SECONDS: Final = 60  # a slow box needs 20 for the first page while it boots
LOG_LINES: Final = 10
MAX_ANSWER: Final = 1 << 18  # bytes; another program's answer may never end


class System(NamedTuple):
    """An init system, and where it expects waker."""

    name: str
    program: Path
    service_file: Path  # the unit, or the init script
    service_source: str  # its name in the one file


SYSTEMD: Final = System(
    name="systemd",
    program=Path("/usr/local/bin/waker"),
    service_file=Path("/usr/local/lib/systemd/system/waker.service"),
    service_source="waker.service",
)
PROCD: Final = System(
    name="procd",
    program=Path("/usr/bin/waker"),
    service_file=Path("/etc/init.d/waker"),
    service_source="waker.init",
)


class Service(NamedTuple):
    """A service that runs waker."""

    name: str
    is_running: bool
    shown: Mapping[str, str]  # properties as `systemctl show` prints them, or ""


def find_system() -> System | None:
    """Return this box's init system, if it is one of the two."""
    if Path("/etc/rc.common").exists():
        return PROCD
    return SYSTEMD if shutil.which("systemctl") else None


def is_booted(system: System) -> bool:
    """Return whether it is running, as sd_booted(3) does: not in a chroot."""
    return system is PROCD or Path("/run/systemd/system").is_dir()


def find_mount(path: Path) -> tuple[str, str]:
    """Return the type and the options of the file system that a path is on."""
    found = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if path.is_relative_to(folder):
            found = kind, options  # a later one covers those before
    return found


def check_memory() -> None:
    """Raise Refused if the next reboot would lose what is written to CONFIG."""
    kind, options = find_mount(CONFIG.resolve())
    upper = re.search(r"\bupperdir=([^,]+)", options)  # an overlay's, with all changes
    if upper:
        kind, _ = find_mount(Path(upper[1]))
    if kind == "tmpfs":
        raise Refused(
            f"{CONFIG} is in memory, so the next reboot would lose it. If this box has"
            " an overlay file system, turn that off, and reboot. On a Raspberry Pi:"
            f" {SUDO}raspi-config nonint do_overlayfs 1"
        )


# ---- Services ------------------------------------------------------------------------


def service_command(system: System, action: str, name: str = "waker") -> list[str]:
    """Return the command for an action on a service, such as `restart`."""
    if system is PROCD:
        return [f"/etc/init.d/{name}", action]
    return ["systemctl", action, name]


def run(command: list[str]) -> None:
    """Run a command. Raises: Failed."""
    if subprocess.run(command, check=False).returncode:
        raise Failed(f"`{' '.join(command)}` failed.")


def reload_units(system: System) -> None:
    """Let a systemd that is running read its units anew. Raises: Failed."""
    if system is SYSTEMD and is_booted(system):
        run(["systemctl", "daemon-reload"])


def ask_systemd(*arguments: str) -> str:
    """Return what systemctl prints; most commands need a systemd that is running."""
    command = ["systemctl", *arguments]
    asked = subprocess.run(command, capture_output=True, check=False)
    return asked.stdout.decode(errors="replace")


def is_running(system: System, name: str = "waker") -> bool:
    """Return whether a service runs, or is about to be restarted after a crash."""
    if system is PROCD:
        return not subprocess.call(service_command(system, "running", name))
    return ask_systemd("is-active", name).strip() in ACTIVE


def find_user_problem() -> str:
    """Return why systemd cannot make a user for our service, or an empty string."""
    has_problem = "getent group waker && ! getent passwd waker"
    has_problem += " && ! systemctl is-active waker"  # as another user, perhaps
    command = ["sh", "-c", f"{{ {has_problem}; }} >/dev/null"]
    if find_system() is not SYSTEMD or subprocess.call(command):
        return ""
    rename = f"{SUDO}groupmod --new-name waker-users waker"
    return f"there is a group waker, but no user waker. Run: {rename}"


def find_services(system: System) -> list[Service]:
    """Return the services that run the program, even those that are stopped."""
    if system is PROCD:
        names = ["waker"] if system.service_file.exists() else []
        return [Service(name, is_running(system), defaultdict(str)) for name in names]
    listed = ask_systemd("list-unit-files", "--type=service", "--plain", "--no-legend")
    names = [line.split()[0] for line in listed.splitlines()]
    names = [name for name in names if "@." not in name]  # not a template itself
    names.append("*.service")  # loaded units, such as a template's instances
    asked = (
        "Id,Type,ActiveState,ExecStart,WorkingDirectory,Environment,EnvironmentFiles"
    )
    found: dict[str, Service] = {}
    for text in ask_systemd("show", f"--property={asked}", *names).split("\n\n"):
        shown = defaultdict[str, str](str)
        for line in text.splitlines():
            key, _, value = line.partition("=")
            shown[key] += f"{value}\n"
        # It may be Python's argument. The path may be a link, have //, or be missing.
        start = shown["ExecStart"].replace("path=waker ", f"path={system.program} ")
        paths = map(os.path.realpath, re.findall(r"[ =](/\S+)", start))
        if os.path.realpath(system.program) in paths:
            name = shown["Id"].removesuffix(".service\n")
            is_active = shown["ActiveState"].strip() in ACTIVE
            is_daemon = shown["Type"] != "oneshot\n"  # not `waker state`, say
            found[name] = Service(name, is_active and is_daemon, shown)
    return [*found.values()]


def read_variables(service: Service) -> dict[str, str]:
    """Return the settings among a service's variables. Raises: ConfigError."""
    # In quotes, systemctl escapes $ and `. shlex would keep these backslashes.
    text = re.sub(r"\\([$`])", r"\1", service.shown["Environment"])
    variables = dict(word.split("=", 1) for word in shlex.split(text))
    lines = r"(?m)^/(.*) \(ignore_errors=(\w+)\)$"
    for pattern, may_fail in re.findall(lines, service.shown["EnvironmentFiles"]):
        files = sorted(Path("/").glob(pattern))
        if not files and may_fail == "no":
            raise ConfigError(f"{service.name}: /{pattern} is missing")
        for file in files:
            if file.read_bytes().strip():
                variables |= waker.read_env_file(file)
    return {n: v for n, v in variables.items() if n.startswith("WAKER_")}


def find_source(service: Service, path: Path) -> Path | None:
    """Return where a file is, even if systemd passes it as a credential, or None."""
    if not re.fullmatch(CREDENTIALS, str(path.parent)):
        return path
    # `systemctl show` cannot print LoadCredential=. The last line wins.
    unit = ask_systemd("cat", f"{service.name}.service")
    loads = rf"(?m)^\s*LoadCredential\s*=\s*{re.escape(path.name)}\s*:\s*(\S+)"
    instance = service.name.partition("@")[2]
    found = [source.replace("%i", instance) for source in re.findall(loads, unit)]
    return Path(found[-1]) if found and re.match("/[^%]+$", found[-1]) else None


def read_service_settings(service: Service) -> Config:
    """Return the settings of a service after a restart with this version.

    Raises: ConfigError.
    """
    name, values = service.name, read_variables(service)
    where = f"{name}'s variables" if values else name
    folder = Path(service.shown["WorkingDirectory"].strip().lstrip("!") or "/")
    option = re.search(r" --env-file[= ](\S+)", service.shown["ExecStart"])
    # As in waker.py: read a file if it is named, or if no variable is set.
    if option or not values:
        path = folder / (option[1] if option else ENV_FILE)
        file = find_source(service, path)
        if not file:
            raise ConfigError(f"first stop {name}: only systemd can read its settings")
        where = f"{where}, {file}"
        values = waker.read_env_file(file) | values
        folder = file.parent
        key = find_source(service, path.with_name("ssh_key"))
        if key and not values.get("WAKER_SSH_KEY"):
            values["WAKER_SSH_KEY"] = str(key)
    try:
        return waker.read_config(values, folder)
    except ConfigError as error:
        raise ConfigError(f"{where}:\n{error}") from None


# ---- Starting ------------------------------------------------------------------------


def read_page(listen: Address, seconds: float) -> bytes:
    """Return what an address answers to a browser, or b"" if nothing does."""
    host, port = listen
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1"
    answer, deadline = b"", time.monotonic() + seconds
    with (
        contextlib.suppress(OSError),  # a timeout included
        waker.open_tcp(host, port, seconds) as tcp,
    ):
        tcp.sendall(b"GET / HTTP/1.1\r\nHost: waker\r\n\r\n")
        while len(answer) < MAX_ANSWER and (chunk := tcp.recv(65536)):
            answer += chunk
            tcp.settimeout(max(0, deadline - time.monotonic()))
    return answer


def read_log(system: System, name: str) -> str:
    """Return the last lines that a service has logged."""
    command = ["journalctl", "-q", "-o", "cat", "-u", name, "-n", str(LOG_LINES)]
    if system is PROCD:
        command = ["logread", "-e", name]
    shown = subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout
    return "\n".join(shown.decode(errors="replace").splitlines()[-LOG_LINES:])


def wait_and_report(system: System, name: str, config: Config) -> bool:
    """Wait until a service that was restarted serves its page.

    Say whether it does, and return that. If not, it has ended, or it took too long.
    """
    page, deadline = waker.Page().plain.body, time.monotonic() + PAGE_SECONDS
    while (left := deadline - time.monotonic()) > 0 and is_running(system, name):
        if read_page(config.listen, left).endswith(page):
            print(f"{name} answers on port {config.listen[1]}.")
            return True
        time.sleep(0.2)
    print(f"{name} does not answer. Its log ends with:\n\n{read_log(system, name)}\n")
    return False


def check_and_start(system: System) -> Config:
    """Check the settings with the program, and run waker with them, now and at boot.

    Returns the settings. Raises: Failed if anything is wrong.
    """
    print("\nwaker check:\n", flush=True)
    # The service does not get root's variables. sudo's PATH may lack the program.
    path = {"PATH": os.environ.get("PATH", os.defpath)}
    check = [str(system.program), "check"]
    checked = subprocess.run(check, env=path, check=False).returncode
    if checked == os.EX_CONFIG:
        raise Failed("Correct these settings, and run the same command again.")
    for action in ("enable", "restart"):
        run(service_command(system, action))
    plain = Service("waker", is_running=True, shown=defaultdict(str))
    ours = [s for s in find_services(system) if s.name == "waker"] or [plain]
    config = read_service_settings(ours[0])
    print()
    if not wait_and_report(system, "waker", config) or checked:
        raise Failed("Correct what is wrong, and run the same command again.")
    return config
