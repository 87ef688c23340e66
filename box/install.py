"""Install waker on this box, or remove it: `waker install`, `waker uninstall`.

`install` looks, shows what it will do, and asks once. New files are written beside the
old ones, and take their places when all of them are on the disk. So a power cut leaves
the old program or the new one, and a second run finishes.
"""

import argparse
import contextlib
import fcntl
import importlib
import io
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import waker
from box import Failed, Refused, notify, pack, prepare
from box.check import explain_no_paramiko
from box.files import new_name, read_sources, write_new
from box.system import (
    CONFIG,
    ENV_FILE,
    PROCD,
    SYSTEMD,
    Service,
    System,
    find_services,
    find_system,
    is_booted,
    is_running,
    read_log,
    run,
    service_command,
    wait_for_page,
)
from waker import Config, ConfigError, UnlockError

PYTHON: Final = "/usr/bin/python3"  # which runs waker; Debian's paramiko is for it
KEY: Final = CONFIG / "ssh_key"
PUBLIC_KEY: Final = CONFIG / "ssh_key.pub"
OWNERS: Final = ENV_FILE, KEY, PUBLIC_KEY  # which nothing replaces
# Lists what an upgrade of OpenWrt keeps. Source: list_static_conffiles in sysupgrade.
KEEP_FILE: Final = Path("/lib/upgrade/keep.d/waker")
ENABLED: Final = Path("/etc/rc.d/S95waker")  # by waker.init's START=95
KEEP_LINES: Final = CONFIG, PROCD.program, PROCD.service_file, ENABLED, KEEP_FILE
HIDES: Final = Path("/etc/systemd/system/waker.service")  # our unit; drop-ins do not
# Where waker 3 has put its files on a box with systemd if PREFIX was /usr.
OLDER_UNITS: Final = Path("/usr/lib/systemd/system")
OLDER_TIMER: Final = OLDER_UNITS / notify.TIMER
OLDER: Final = (
    Path("/usr/bin/waker"),
    OLDER_UNITS / "waker.service",
    Path("/usr/bin/waker-notify"),
    OLDER_UNITS / notify.SERVICE,
    OLDER_TIMER,
)
# Whoever changes packages holds the first, and whoever updates their lists the second.
LOCKS: Final = Path("/var/lib/dpkg/lock-frontend"), Path("/var/lib/apt/lists/lock")
# Valid values of what has no default, to find mistakes in settings that lack some.
FILLERS: Final = {
    "WAKER_PIN": "a PIN for now",
    "WAKER_HOMELAB_MAC": "02:00:00:00:00:01",
    "WAKER_HOMELAB_HOST": "192.0.2.1",
}


@dataclass(frozen=True)
class NewFile:
    """A file to be written."""

    path: Path
    data: bytes = field(repr=False)  # perhaps a PIN or a key
    mode: int


class Plan(NamedTuple):
    """What will be done."""

    system: System
    packages: Sequence[str]  # of Debian, to be installed
    files: Sequence[NewFile]
    key_files: Sequence[Path]  # to be made
    starts: dict[Service, Config | None]  # with their settings, if they can be read
    is_configured: bool  # whether waker's own settings have been filled in


def list_files(system: System) -> tuple[Path, ...]:
    """List what `uninstall` removes: the program last, so that it can be repeated."""
    return system.service_file, KEEP_FILE, system.program


# ---- Look ----------------------------------------------------------------------------
# Nothing in this section changes the box.


def check_place(system: System) -> None:
    """Raise Refused if something is in the way."""
    if os.path.lexists(CONFIG) and not CONFIG.is_dir():
        raise Refused(f"{CONFIG} is not a folder. Move it away.")
    if system is SYSTEMD and os.path.lexists(HIDES):
        raise Refused(
            f"{HIDES} would hide the unit that this installs. Remove it, or turn it"
            " into a drop-in with: sudo systemctl edit waker"
        )
    for path in (system.program, system.service_file):
        if path.is_dir():
            raise Refused(f"{path} is a folder. Move it away.")


def has_paramiko() -> bool:
    """Return whether the Python that runs waker has paramiko, and all that it needs."""
    asked = [PYTHON, "-I", "-c", "import paramiko"]
    return not subprocess.run(asked, capture_output=True, check=False).returncode


def is_half_installed(package: str) -> bool:
    """Return whether dpkg was interrupted before it had configured a package."""
    command = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    asked = subprocess.run(command, capture_output=True, check=False)
    return asked.stdout.startswith((b"half-", b"unpacked"))


def find_missing_packages(system: System) -> list[str]:
    """Return what apt must install.

    Without an SSH client, waker runs, but cannot prepare a server. Raises: Refused if
    paramiko is missing and there is no apt.
    """
    if shutil.which("apt-get"):
        found = {"python3-paramiko": has_paramiko()}
        found["openssh-client"] = bool(shutil.which("ssh"))
        return [name for name in found if not found[name] or is_half_installed(name)]
    if not has_paramiko():
        room = "\nThis needs about 30 MB of space." if system is PROCD else ""
        raise Refused(f"{explain_no_paramiko()}{room}")
    return []


def build_program(system: System) -> bytes:
    """Return the program, compiled for this Python. Raises: Refused."""
    sources = dict(read_sources())
    # The installed program has compiled code, perhaps of an older Python. A file that
    # was copied to the box may not have any.
    if system.program == waker.HERE:
        sources = {n: data for n, data in sources.items() if not n.endswith(".pyc")}
    try:
        pack.check_names(sources)
        return pack.build(sources | pack.compile_sources(sources))
    except (OSError, ValueError) as error:
        raise Refused(f"{waker.HERE} cannot be installed: {error}.") from None


def plan_files(system: System) -> list[NewFile]:
    """Return the program and its service. Raises: Refused."""
    files = [
        NewFile(system.program, build_program(system), 0o755),
        NewFile(
            system.service_file,
            read_sources()[system.service_source],
            system.service_mode,
        ),
    ]
    if system is PROCD:
        lines = "".join(f"{path}\n" for path in KEEP_LINES)
        files.append(NewFile(KEEP_FILE, lines.encode(), 0o644))
    return files


def read_settings(env_file: Path, *, may_lack_some: bool = False) -> Config:
    """Read settings as this version does. Raises: ConfigError, with the file's name."""
    values, names = waker.read_env_file(env_file), [*waker.SETTINGS]
    if may_lack_some:
        values |= {name: values.get(name) or value for name, value in FILLERS.items()}
        names.remove("WAKER_SSH_KEY")
    try:
        return waker.read_config(values, env_file.parent, names)
    except ConfigError as error:
        raise ConfigError(f"{env_file}:\n{error}") from None


def is_empty(env_file: Path) -> bool:
    return not env_file.is_file() or not env_file.read_bytes().strip()


def is_complete(env_file: Path) -> bool:
    """Return whether all that has no default is filled in. Raises: ConfigError."""
    values = {} if is_empty(env_file) else waker.read_env_file(env_file)
    return all(values.get(name) for name in FILLERS)


def read_services(system: System) -> dict[Service, Config | None]:
    """Read the settings that each service will have. Raises: ConfigError.

    Returns the services to start, with their settings, if these are in a file.
    """
    starts: dict[Service, Config | None] = {}
    for service in find_services(system):
        env_file = service.env_file
        if is_running(system, service.name):
            starts[service] = read_settings(env_file) if env_file.is_file() else None
        elif not is_empty(env_file):
            read_settings(env_file, may_lack_some=True)  # someone may be filling it in
    return starts


def look() -> Plan:
    """Find out what to do. Raises: Refused, ConfigError, OSError."""
    sources = read_sources()  # which compares every checksum
    system = find_system()
    if not system:
        raise Refused("this needs systemd or OpenWrt's procd, but neither is here.")
    check_place(system)
    files, key_files = plan_files(system), []
    if not os.path.lexists(ENV_FILE):
        files.append(NewFile(ENV_FILE, sources["waker.env.example"], 0o600))
    if not os.path.lexists(PUBLIC_KEY):
        key_files = [path for path in (KEY, PUBLIC_KEY) if not os.path.lexists(path)]
    return Plan(
        system=system,
        packages=find_missing_packages(system),
        files=files,
        key_files=key_files,
        starts=read_services(system),
        is_configured=is_complete(ENV_FILE),
    )


def agree(lines: Iterable[str], *, yes: bool) -> None:
    """Show what will be done, and ask unless `yes`. Raises: Refused."""
    print("This will:", *(f"    {line}" for line in lines), sep="\n")
    if yes:
        return
    try:
        answer = input("Go on? [y/N] ")
    except (EOFError, RuntimeError, UnicodeDecodeError):  # perhaps it is closed
        raise Refused("nobody answered. Without a terminal, use --yes.") from None
    if answer[:1] not in ("y", "Y"):
        raise Refused("you did not answer y.")


def show_and_ask(plan: Plan, *, yes: bool) -> None:
    """Show what was found and what will be done, and ask. Raises: Refused."""
    system = plan.system
    name = "Linux"
    with contextlib.suppress(OSError):  # /etc/os-release is missing
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    python = platform.python_version()
    print(f"Found: {name}, with {system.name} and Python {python}")
    if system.program.exists():
        print(f"Found: {system.program}, which this replaces")
    will = [f"install {package} with apt" for package in plan.packages]
    will += [f"write {file.path}" for file in plan.files]
    will += [f"write {path}" for path in plan.key_files]
    will += [f"restart {service.name}" for service in plan.starts]
    agree(will, yes=yes)


# ---- Install -------------------------------------------------------------------------


def install_packages(names: Sequence[str]) -> None:
    """Install Debian packages, after any other apt. Raises: Failed, OSError."""
    for path in LOCKS:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print("Waiting until another program has finished with apt.")
                fcntl.lockf(lock, fcntl.LOCK_EX)
    print(f"Installing {' and '.join(names)}.")
    script = read_sources()["box/install-packages"].decode()
    command = ["sh", "-c", script, "install-packages", *names]
    failed = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if not has_paramiko():
        raise Failed("apt could not install paramiko. waker is as it was before.")
    if failed and not shutil.which("ssh"):
        print("apt has failed. waker runs without it, but cannot prepare a server.")


def make_key() -> list[NewFile]:
    """Make an Ed25519 key in OpenSSH's format."""
    importlib.invalidate_caches()  # it may have been installed a moment ago
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - as above
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return [
        NewFile(KEY, private, 0o600),
        NewFile(PUBLIC_KEY, public + b" waker\n", 0o600),
    ]


def derive_public_key() -> list[NewFile]:
    """Make the public half of the key that the box has."""
    warnings.simplefilter("ignore")  # as waker does when it uses paramiko
    try:
        key = waker.load_key(KEY)
    except UnlockError:  # `waker check` says what is wrong with it
        print(f"{PUBLIC_KEY} was not written, because {KEY.name} cannot be read.")
        return []
    line = f"{key.get_name()} {key.get_base64()} waker\n"
    return [NewFile(PUBLIC_KEY, line.encode(), 0o600)]


def remove(path: Path) -> None:
    """Remove a file, or a folder if it is empty. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()


def write_beside(file: NewFile, unfinished: contextlib.ExitStack) -> None:
    """Write what will replace a file, and make its folder. Raises: OSError.

    `unfinished` takes that back: it removes the new file, and the folder if it is
    empty. Once the new file has been renamed, it finds nothing to remove.
    """
    missing = [folder for folder in file.path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700 if folder == CONFIG else 0o755)
        unfinished.callback(remove, folder)
    unfinished.callback(remove, new_name(file.path))
    write_new(file.path, file.data, file.mode)


def carry_out(plan: Plan) -> None:
    """Install packages and write files, or leave all files as they are.

    Raises: Refused, Failed, OSError
    """
    for path in (*OWNERS, *list_files(plan.system)):
        remove(new_name(path))  # of a run that was killed
    with contextlib.ExitStack() as unfinished:
        for file in plan.files:
            try:
                write_beside(file, unfinished)
            except OSError as error:
                problem = f"{file.path} cannot be written: {error.strerror}"
                raise Refused(f"{problem}.") from None
        if plan.packages:
            install_packages(plan.packages)
        key = []
        if plan.key_files:
            is_new = KEY in plan.key_files
            key = make_key() if is_new else derive_public_key()
        for file in key:
            write_beside(file, unfinished)
        for file in [*plan.files, *key]:
            # Somebody may have made the owner's files by now.
            if file.path not in OWNERS or not os.path.lexists(file.path):
                new_name(file.path).replace(file.path)
    os.sync()


def report(system: System, service: Service, config: Config | None) -> bool:
    """Say whether a service that was restarted runs; returns that."""
    name = service.name
    if config and wait_for_page(system, service, config.listen):
        print(f"{name} answers on port {config.listen[1]}.")
        return True
    if not config and is_running(system, name):  # only its unit knows where it answers
        print(f"{name} was restarted.")
        return True
    print(f"{name} does not answer. Its log ends with:\n\n{read_log(system, name)}\n")
    return False


def start(plan: Plan) -> list[str]:
    """Start what must run; returns the services that do not. Raises: Failed."""
    system = plan.system
    if not is_booted(system):
        print(f"Nothing was started, because {system.name} is not running here.")
        return []
    if system is SYSTEMD:
        run(["systemctl", "daemon-reload"])
    for service in plan.starts:  # if that fails, the log says why
        restart = service_command(system, "restart", service.name)
        subprocess.run(restart, check=False)
    return [s.name for s in plan.starts if not report(system, s, plan.starts[s])]


def explain_older(system: System) -> str:
    """Say how to remove what waker 3 has installed in /usr, or return ""."""
    older = [str(path) for path in OLDER if path.exists()]
    if system is not SYSTEMD or not older:
        return ""
    lines = ["An older waker is in /usr. If it is not from a package, and no unit of"]
    lines += ["yours runs it, remove it:\n"]
    asked = service_command(system, "is-enabled")
    if not subprocess.run(asked, capture_output=True, check=False).returncode:
        lines += ["    sudo systemctl reenable waker"]
    if OLDER_TIMER.exists():
        lines += ["    sudo waker install notify"]
        lines += [f"    sudo systemctl reenable {notify.TIMER}"]
    return "\n".join([*lines, f"    sudo rm {' '.join(older)}\n\n"])


def explain_preparing(system: System) -> str:
    """Say how to prepare a server, and show the public key if it must be pasted."""
    without = ", without sudo" if system.as_root else ""
    step = f"Next, prepare the server{without}:\n\n    waker prepare me@192.168.1.20"
    try:
        prepare.check_client()
    except ConfigError as error:
        step += f"\n\n{error}"
        if KEY.exists() and PUBLIC_KEY.exists():
            step += " Or prepare the server by hand, with waker's public key:"
            step += f"\n\n    {PUBLIC_KEY.read_text().strip()}"
    return step


def next_step(plan: Plan) -> str:
    """Say what to do next."""
    system, root = plan.system, plan.system.as_root
    if KEY in plan.key_files or not plan.is_configured:
        return explain_preparing(system)
    commands = ["waker check"]
    if "waker" not in [service.name for service in plan.starts]:
        actions = "enable", "restart"
        commands += [shlex.join(service_command(system, action)) for action in actions]
    lines = [f"    {root}{command}" for command in commands]
    return "\n".join(["Next, see whether all is right:\n", *lines])


def install(*, yes: bool) -> int:
    """Install waker; returns 0 if all that was started answers, or else 1.

    Raises: Refused, Failed, ConfigError, OSError
    """
    try:
        plan = look()
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}.") from None
    show_and_ask(plan, yes=yes)
    carry_out(plan)
    print("\nwaker is installed.")
    silent = start(plan)
    if silent:
        return 1
    print(f"\n{explain_older(plan.system)}{next_step(plan)}")
    return 0


# ---- Uninstall -----------------------------------------------------------------------


def uninstall(*, yes: bool) -> None:
    """Remove what was installed. Raises: Refused, Failed, OSError."""
    system = find_system()
    if not system or not system.program.exists():
        raise Refused("waker is not installed here.")
    others = [s.name for s in find_services(system) if s.name != "waker"]
    running = [name for name in others if is_running(system, name)]
    if running:
        stop = f"sudo systemctl disable --now {' '.join(running)}"
        raise Refused(f"{' and '.join(running)} still needs waker. First run: {stop}")
    files, messages = list_files(system), notify.find_files()
    print(f"{ENV_FILE} and waker's key stay, and so do installed packages.")
    will = [f"delete {file}" for file in (*messages, *files) if file.exists()]
    agree([*will, *(f"leave {name} without a program" for name in others)], yes=yes)
    if messages:
        notify.uninstall()
    if is_running(system):
        run(service_command(system, "stop"))
    if system.service_file.exists() or HIDES.exists():
        run(service_command(system, "disable"))
    for file in (*OWNERS, *files):
        remove(new_name(file))
    for file in files:
        file.unlink(missing_ok=True)
    print("waker is removed.")
    if older := [str(path) for path in OLDER if path.exists()]:
        print(f"Another one is still in /usr: {' '.join(older)}")


# ---- Commands ------------------------------------------------------------------------


def use_right_python() -> None:
    """Run this again if another Python runs it. Raises: Refused."""
    if sys.executable == PYTHON:
        return
    if not Path(PYTHON).exists():
        raise Refused(f"{PYTHON}, which would run waker, is missing.")
    os.execv(PYTHON, [PYTHON, "-B", *sys.argv])  # noqa: S606 - no shell is wanted


def lock() -> None:
    """Let no other installation change what this one finds, until this process ends.

    Raises: Refused
    """
    folder = os.open(CONFIG.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused("another installation of waker is running.") from None


def parse_arguments(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"waker {command}", allow_abbrev=False)
    add = parser.add_argument
    about = "only the messages to your phone"
    add("part", nargs="?", choices=["notify"], metavar="notify", help=about)
    add("--yes", action="store_true", help="do not ask")
    if command == "install":
        parser.description = "Install waker on this box, or upgrade it."
    else:
        parser.description = "Remove waker from this box, but keep its settings."
    return parser.parse_args(arguments)


def run_command(command: str, given: argparse.Namespace) -> int:
    """Run a command, and return its exit status. Raises what the commands raise."""
    is_main = command == "install" and not given.part
    if is_main and waker.HERE.is_dir():
        raise Refused("this is a checkout. Run: sudo make install")
    if os.geteuid():
        again = shlex.join(["python3", *sys.argv])
        raise Refused(f"this needs root. Run: sudo {again}")
    if is_main:
        use_right_python()
    lock()
    if is_main:
        return install(yes=given.yes)
    if not given.part:
        uninstall(yes=given.yes)
    elif command == "install":
        notify.install()
    else:
        notify.uninstall()
    return 0


def main(command: str, arguments: Sequence[str]) -> int:
    """Run `install` or `uninstall`.

    Exit status 0: done; 1: it failed, or a service does not answer; 78: a setting is
    wrong, and nothing was changed.
    """
    given = parse_arguments(command, arguments)
    os.umask(0o022)
    if isinstance(sys.stdout, io.TextIOWrapper):  # so that commands print in order
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        return run_command(command, given)
    except ConfigError as error:
        print(f"Nothing was changed: {error}", file=sys.stderr)
        return os.EX_CONFIG
    except Refused as error:
        sys.exit(f"Nothing was changed: {error}")
    except Failed as error:
        sys.exit(f"FAILED: {error}")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(f"FAILED: {where}{error.strerror}")
    except KeyboardInterrupt:
        sys.exit("\nStopped. To finish, run the same command again.")
