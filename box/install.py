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
import re
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
    SUDO,
    SYSTEMD,
    System,
    ask_systemd,
    check_memory,
    find_services,
    find_system,
    find_user_problem,
    is_booted,
    is_running,
    read_service_settings,
    reload_units,
    run,
    service_command,
    wait_and_report,
)
from waker import Config, ConfigError, UnlockError

PYTHON: Final = "/usr/bin/python3"  # which runs waker; Debian's paramiko is for it
KEY: Final = CONFIG / "ssh_key"
PUBLIC_KEY: Final = CONFIG / "ssh_key.pub"
OWNERS: Final = ENV_FILE, KEY, PUBLIC_KEY  # which `install` never replaces
# Lists what an upgrade of OpenWrt keeps. Source: list_static_conffiles in sysupgrade.
KEEP_FILE: Final = Path("/lib/upgrade/keep.d/waker")
ENABLED: Final = Path("/etc/rc.d/S95waker")  # by waker.init's START=95
KEEP_LINES: Final = CONFIG, PROCD.program, PROCD.service_file, ENABLED, KEEP_FILE
OWN_UNIT: Final = Path("/etc/systemd/system/waker.service")  # the owner's, or a mask
LOCK: Final = Path("/var/run/waker-install.lock")  # OpenWrt has no /run
# apt holds the first while it changes packages, the second while it updates its lists.
APT_LOCKS: Final = Path("/var/lib/dpkg/lock-frontend"), Path("/var/lib/apt/lists/lock")


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
    restarts: dict[str, Config]  # services, with their settings
    stopped: Sequence[str]  # services


def list_files(system: System) -> tuple[Path, ...]:
    """List what `uninstall` removes: the program last, so that it can be repeated."""
    return system.service_file, KEEP_FILE, system.program


# ---- Look ----------------------------------------------------------------------------
# Nothing in this section changes the box, except that systemd reads its units anew.


def check_mask() -> None:
    """Raise Refused if systemd may not start or disable our unit."""
    state = ask_systemd("is-enabled", "waker")
    if state.startswith("masked"):
        option = "--runtime " if "runtime" in state else ""
        unmask = f"{SUDO}systemctl unmask {option}waker"
        raise Refused(f"waker.service is masked. First run: {unmask}")


def check_place(system: System) -> None:
    """Raise Refused if something is in the way."""
    if os.path.lexists(CONFIG) and not CONFIG.is_dir():
        raise Refused(f"{CONFIG} is not a folder. Move it away.")
    for path in (system.program, system.service_file):
        if path.is_dir():
            raise Refused(f"{path} is a folder. Move it away.")
    if system is SYSTEMD:
        check_memory()
        check_mask()
        if problem := find_user_problem():
            raise Refused(problem)


def has_paramiko() -> bool:
    """Return whether the Python that runs waker has paramiko, and all that it needs."""
    asked = [PYTHON, "-I", "-c", "import paramiko"]
    return not subprocess.run(asked, capture_output=True, check=False).returncode


def find_missing_packages(system: System) -> list[str]:
    """Return what apt must install.

    Without an SSH client, waker runs, but cannot prepare a server. Raises: Refused if
    paramiko is missing and there is no apt.
    """
    if shutil.which("apt-get"):
        found = {"python3-paramiko": has_paramiko()}
        found["openssh-client"] = bool(shutil.which("ssh"))
        return [name for name in found if not found[name]]
    if not has_paramiko():
        room = "\nThis needs about 30 MB of space." if system is PROCD else ""
        raise Refused(f"{explain_no_paramiko()}{room}")
    return []


def build_program(system: System) -> bytes:
    """Return the program, compiled for this Python. Raises: Refused."""
    sources = dict(read_sources())
    # The installed program has compiled code, perhaps of an older Python. In a copied
    # file, it is refused.
    if system.program.resolve() == waker.HERE:
        sources = {n: data for n, data in sources.items() if not n.endswith(".pyc")}
    try:
        pack.check_names(sources)
        return pack.build(sources | pack.compile_sources(sources))
    except (OSError, ValueError) as error:
        raise Refused(f"{waker.HERE} cannot be installed: {error}.") from None


def plan_files(system: System) -> list[NewFile]:
    """Return the program and its service. Raises: Refused."""
    service = read_sources()[system.service_source]
    files = [
        NewFile(system.program, build_program(system), 0o755),
        NewFile(system.service_file, service, 0o755 if system is PROCD else 0o644),
    ]
    if system is PROCD:
        lines = "".join(f"{path}\n" for path in KEEP_LINES)
        files.append(NewFile(KEEP_FILE, lines.encode(), 0o644))
    return files


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
    reload_units(system)  # a restart would use those on the disk
    services = find_services(system)
    restarts = {s.name: read_service_settings(s) for s in services if s.is_running}
    places = {config.listen for config in restarts.values()}
    if len(places) < len(restarts):
        raise ConfigError(f"two of {', '.join(restarts)} have the same WAKER_LISTEN.")
    return Plan(
        system=system,
        packages=find_missing_packages(system),
        files=files,
        key_files=key_files,
        restarts=restarts,
        stopped=[s.name for s in services if not s.is_running],
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
    print(f"Found: {system.name} and Python {platform.python_version()}")
    if system.program.exists():
        print(f"Found: {system.program}, which this replaces")
    for name in plan.stopped:
        print(f"Found: {name}, which is stopped, so its settings are not checked")
    will = [f"install {package} with apt" for package in plan.packages]
    will += [f"write {file.path}" for file in plan.files]
    will += [f"write {path}" for path in plan.key_files]
    will += [f"restart {name}" for name in plan.restarts]
    agree(will, yes=yes)


# ---- Install -------------------------------------------------------------------------


def install_packages(names: Sequence[str]) -> None:
    """Install Debian packages. Raises: Failed, OSError."""
    print(f"Installing {' and '.join(names)}, as soon as apt is free.")
    for path in APT_LOCKS:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
    script = read_sources()["box/install-packages"].decode()
    command = ["sh", "-c", script, "install-packages", *names]
    failed = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if not has_paramiko():
        raise Failed("apt could not install paramiko. waker itself was not changed.")
    if failed and not shutil.which("ssh"):
        print("apt could not install openssh-client, which `waker prepare` needs.")


def make_key() -> list[NewFile]:
    """Make an Ed25519 key in OpenSSH's format."""
    importlib.invalidate_caches()  # it may have been installed a moment ago
    from cryptography.hazmat.primitives import serialization as to  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

    key, ssh = ed25519.Ed25519PrivateKey.generate(), to.PrivateFormat.OpenSSH
    private = key.private_bytes(to.Encoding.PEM, ssh, to.NoEncryption())
    ssh_line = to.Encoding.OpenSSH, to.PublicFormat.OpenSSH
    public = key.public_key().public_bytes(*ssh_line)
    return [
        NewFile(KEY, private, 0o600),
        NewFile(PUBLIC_KEY, public + b" waker\n", 0o600),
    ]


def derive_public_key() -> list[NewFile]:
    """Derive the public half of the key that the box has."""
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


def explain_mount() -> None:
    """Say how systemd finds our unit if /usr/local is mounted too late."""
    fstab = Path("/etc/fstab")
    lines = fstab.read_text(errors="replace") if fstab.exists() else ""
    if re.search(r"(?m)^[^#\n]*\s/usr/local/?\s", lines) and not OWN_UNIT.exists():
        print("\nsystemd reads its units before /etc/fstab mounts /usr/local. Run:\n")
        print(f"    {SUDO}cp {SYSTEMD.service_file} {OWN_UNIT.parent}")


def explain_preparing() -> None:
    """Say how to prepare a server, and show the public key if it must be pasted."""
    without = ", without sudo" if SUDO else ""
    print(f"\nNext, prepare the server{without}:\n\n    waker prepare me@192.168.1.20")
    print("\n(with your user and your server's address)")
    try:
        prepare.check_client()
    except ConfigError as error:
        print(f"\n{error} Or prepare the server by hand, with waker's public key:")
        print(f"\n    {PUBLIC_KEY.read_text().strip()}")


def install(*, yes: bool) -> int:
    """Install waker; returns 0 if every service that was restarted answers, else 1.

    Raises: Refused, Failed, ConfigError, OSError
    """
    try:
        plan = look()
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}.") from None
    system = plan.system
    show_and_ask(plan, yes=yes)
    carry_out(plan)
    print("\nwaker is installed.")
    if not is_booted(system):
        print(f"Nothing was started, because {system.name} is not running here.")
    reload_units(system)
    for name in plan.restarts:  # if that fails, the log says why
        subprocess.run(service_command(system, "restart", name), check=False)
    restarts = plan.restarts.items()
    answers = [wait_and_report(system, name, config) for name, config in restarts]
    if not all(answers):
        return 1
    if system is SYSTEMD:
        explain_mount()
    if KEY in plan.key_files:
        explain_preparing()
    else:
        print(f"\nNext, check that everything works:\n\n    {SUDO}waker check")
    return 0


# ---- Uninstall -----------------------------------------------------------------------


def find_processes(program: Path) -> list[str]:
    """Return the other processes that run the program outside our own services."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = process.joinpath("cmdline").read_bytes().split(b"\0")
            group = process.joinpath("cgroup").read_text().strip()
            is_ours = group.endswith(("/waker.service", f"/{notify.SERVICE}"))
            runs = b"python" in words[0] and os.fsencode(program) in words
            is_here = process.joinpath("root").samefile("/")  # not in a container
            if runs and is_here and not is_ours:
                found.append(process.name)
    return [f"process {n}" for n in found if n != str(os.getpid())]


def find_others(system: System) -> list[str]:
    """Return the other services that use the program. Raises: Refused if one runs."""
    others = [s for s in find_services(system) if s.name != "waker"]
    running = [s.name for s in others if s.is_running]
    if system is SYSTEMD:
        running = running or find_processes(system.program)
    if running:
        raise Refused(f"first stop what runs waker: {', '.join(running)}")
    return [s.name for s in others]


def uninstall(*, yes: bool) -> None:
    """Remove what was installed. Raises: Refused, Failed, OSError."""
    system = find_system()
    if not system or not system.program.exists():
        raise Refused("waker is not installed here.")
    others, messages = find_others(system), notify.find_files()
    files = [*messages, *(path for path in list_files(system) if path.exists())]
    read_only = [file for file in files if not os.access(file.parent, os.W_OK)]
    if read_only:
        raise Refused(f"{read_only[0]} is in a read-only folder.")
    if system is SYSTEMD:
        check_mask()
    print(f"{ENV_FILE} and waker's key stay, and so do installed packages.")
    will = [f"delete {file}" for file in files]
    will += [f"leave {name} without a program" for name in others]
    will += [f"leave {OWN_UNIT}, which is yours"] if OWN_UNIT.exists() else []
    agree(will, yes=yes)
    if messages:
        notify.uninstall()
    if is_running(system):
        run(service_command(system, "stop"))
    if system.service_file.exists() or OWN_UNIT.exists():
        run(service_command(system, "disable"))
    for file in (*OWNERS, *list_files(system)):
        remove(new_name(file))
    for file in files:
        file.unlink(missing_ok=True)
    reload_units(system)
    print("waker is removed.")


# ---- Commands ------------------------------------------------------------------------


def lock() -> None:
    """Keep other installations out until this process ends. Raises: Refused."""
    # Only root can open it: whoever can read a file can lock it.
    file = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused("another `waker install` or `uninstall` is running.") from None


def parse_arguments(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"waker {command}", allow_abbrev=False)
    add = parser.add_argument
    part = "only the messages to your phone"
    add("part", nargs="?", choices=["notify"], metavar="notify", help=part)
    add("--yes", action="store_true", help="do not ask")
    parser.description = "Remove waker from this box, but keep its settings."
    if command == "install":
        parser.description = "Install waker on this box, or upgrade it."
    return parser.parse_args(arguments)


def run_command(command: str, given: argparse.Namespace) -> int:
    """Run a command, and return its exit status. Raises what the commands raise."""
    is_main = command == "install" and not given.part
    if is_main and waker.HERE.is_dir():
        raise Refused(f"this is a checkout. Run: {SUDO}make install")
    if os.geteuid():
        run_it = f"Run: {SUDO}" if SUDO else "As root, run: "
        raise Refused(f"this needs root. {run_it}{shlex.join(['python3', *sys.argv])}")
    if is_main and sys.executable != PYTHON:
        if not Path(PYTHON).exists():
            raise Refused(f"{PYTHON}, which would run waker, is missing.")
        os.execv(PYTHON, [PYTHON, "-B", *sys.argv])  # noqa: S606 - no shell is wanted
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
