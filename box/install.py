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
    check_and_enable,
    control,
    find_services,
    find_system,
    is_answering,
    is_booted,
    is_running,
    read_log,
    run,
)
from waker import Config, ConfigError

PYTHON: Final = "/usr/bin/python3"  # which runs waker; Debian's paramiko is for it
SETTINGS: Final = "waker.env", "ssh_key", "ssh_key.pub"
KEY: Final = CONFIG / "ssh_key"
PUBLIC_KEY: Final = CONFIG / "ssh_key.pub"
# What OpenWrt keeps when it is upgraded. Source: list_static_conffiles in sysupgrade.
KEEP: Final = Path("/lib/upgrade/keep.d/waker")
KEPT: Final = CONFIG, PROCD.program, PROCD.service, Path("/etc/rc.d/S95waker"), KEEP
HIDES: Final = Path("/etc/systemd/system/waker.service")  # our unit; drop-ins do not
# Where `make install PREFIX=/usr` of waker 3 has put it on a box with systemd.
OLDER: Final = Path("/usr/bin/waker"), Path("/usr/lib/systemd/system/waker.service")
LOCKS: Final = Path("/var/lib/dpkg/lock-frontend"), Path("/var/lib/apt/lists/lock")


@dataclass(frozen=True)
class NewFile:
    """A file to be written."""

    path: Path
    data: bytes = field(repr=False)  # perhaps a PIN or a key
    mode: int


class Plan(NamedTuple):
    """What will be done."""

    system: System
    packages: Sequence[str]  # of Debian
    files: Sequence[NewFile]
    has_new_key: bool
    starts: dict[Service, Config]  # with the settings that each will have
    is_filled_in: bool  # whether waker's own settings are
    folder: Path | None  # of --from
    moved: Sequence[Path]  # its files


# ---- Look ----------------------------------------------------------------------------
# Nothing here changes the box.


def check_place(system: System) -> None:
    """Raise Refused if something is in the way."""
    if os.path.lexists(CONFIG) and not CONFIG.is_dir():
        raise Refused(f"{CONFIG} is not a folder. Move it away.")
    if system is SYSTEMD and os.path.lexists(HIDES):
        raise Refused(
            f"{HIDES} would hide the unit that this installs. Remove it, or turn it"
            " into a drop-in with: sudo systemctl edit waker"
        )


def find_moved(folder: Path | None) -> list[Path]:
    """Return the files of --from. Raises: Refused."""
    if not folder:
        return []
    if not folder.is_dir() or (CONFIG.exists() and folder.samefile(CONFIG)):
        raise Refused(f"--from needs a folder, other than {CONFIG}.")
    return [folder / name for name in SETTINGS if folder.joinpath(name).exists()]


def has_paramiko() -> bool:
    """Return whether the Python that runs waker has paramiko, and all that it needs."""
    asked = [PYTHON, "-I", "-c", "import paramiko"]
    return not subprocess.run(asked, capture_output=True, check=False).returncode


def find_missing_packages(system: System) -> list[str]:
    """Return what apt must install. Raises: Refused if there is no apt, nor paramiko.

    Without an SSH client, waker runs, but cannot prepare a server.
    """
    if shutil.which("apt-get"):
        missing = [] if has_paramiko() else ["python3-paramiko"]
        return missing if shutil.which("ssh") else [*missing, "openssh-client"]
    if not has_paramiko():
        room = "\nThis needs about 30 MB of space." if system is PROCD else ""
        raise Refused(f"{explain_no_paramiko()}{room}")
    return []


def build_program(system: System) -> bytes:
    """Return the program, compiled for this Python. Raises: Refused."""
    sources = dict(read_sources())
    if system.program == waker.HERE:  # its code may be that of an older Python
        sources = {n: data for n, data in sources.items() if not n.endswith(".pyc")}
    try:
        pack.check_names(sources)
        return pack.build(sources | pack.compile_sources(sources))
    except ValueError as error:
        raise Refused(f"{waker.HERE} cannot be installed: {error}.") from None


def plan_files(system: System) -> list[NewFile]:
    """Return the program and its service. Raises: Refused."""
    files = [
        NewFile(system.program, build_program(system), 0o755),
        NewFile(system.service, read_sources()[system.source], system.mode),
    ]
    if system is PROCD:
        kept = "".join(f"{path}\n" for path in KEPT)
        files.append(NewFile(KEEP, kept.encode(), 0o644))
    return files


def is_filled_in(env_file: Path) -> bool:
    """Return whether any setting has a value. Raises: ConfigError."""
    return env_file.exists() and any(waker.read_env_file(env_file).values())


def read_settings(env_file: Path) -> Config:
    """Read settings as this version does. Raises: ConfigError, with the file's name."""
    try:
        values = waker.read_env_file(env_file)
        return waker.read_config(values, env_file.parent)
    except ConfigError as error:
        raise ConfigError(f"{env_file}:\n{error}") from None


def read_services(
    system: System, folder: Path | None
) -> tuple[dict[Service, Config], list[Service]]:
    """Read the settings that each service will have, if it has any.

    Returns the services that will be started, with their settings, and the others.
    Raises: ConfigError
    """
    starts, others = {}, []
    for service in find_services(system):
        env_file, will_start = service.env_file, is_running(system, service.name)
        if folder and service.name == "waker":
            own, will_start = folder / "waker.env", True
            env_file = own if own.exists() else ENV_FILE
        if will_start:
            starts[service] = read_settings(env_file)
        elif is_filled_in(env_file):
            read_settings(env_file)
            others.append(service)
    return starts, others


def look(folder: Path | None) -> Plan:
    """Find out what to do. Raises: Refused, ConfigError, OSError."""
    read_sources()  # which compares the checksum of each file
    system = find_system()
    if not system:
        raise Refused("this needs systemd or OpenWrt's procd, but neither is here.")
    check_place(system)
    files, moved = plan_files(system), find_moved(folder)
    files += [NewFile(CONFIG / f.name, f.read_bytes(), 0o600) for f in moved]
    if not folder and not os.path.lexists(ENV_FILE):
        example = read_sources()["waker.env.example"]
        files.append(NewFile(ENV_FILE, example, 0o600))
    starts, others = read_services(system, folder)
    return Plan(
        system=system,
        packages=find_missing_packages(system),
        files=files,
        has_new_key=not folder and not any(map(os.path.lexists, (KEY, PUBLIC_KEY))),
        starts=starts,
        is_filled_in="waker" in [service.name for service in (*starts, *others)],
        folder=folder,
        moved=moved,
    )


def agree(lines: Iterable[str], *, yes: bool) -> None:
    """Show what will be done, and ask unless that is answered. Raises: Refused."""
    print("This will:", *(f"    {line}" for line in lines), sep="\n")
    answer = "y" if yes else ""
    with contextlib.suppress(EOFError):
        answer = answer or input("Go on? [y/N] ")
    if answer[:1] not in ("y", "Y"):
        raise Refused("you did not answer y. Without a terminal, use --yes.")


def show_and_ask(plan: Plan, *, yes: bool) -> None:
    """Show what was found and will be done, and ask. Raises: Refused."""
    system = plan.system
    name = platform.freedesktop_os_release()["PRETTY_NAME"]
    python = platform.python_version()
    print(f"Found: {name}, with {system.name} and Python {python}")
    if system.program.exists():
        print(f"Found: {system.program}, which this replaces")
    will = [f"install {package} with apt" for package in plan.packages]
    will += [f"write {file.path}" for file in plan.files]
    if plan.has_new_key:
        will += [f"write {KEY}, a new SSH key"]
    if plan.folder:
        will += ["start waker at every boot"]
    will += [f"restart {service.name}" for service in plan.starts]
    will += [f"delete {file}" for file in plan.moved]
    agree(will, yes=yes)


# ---- Install -------------------------------------------------------------------------


def install_packages(names: Sequence[str]) -> None:
    """Install Debian packages, once nobody else does. Raises: Failed, OSError."""
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
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise Failed("apt could not install the packages. waker is as it was before.")
    if not has_paramiko():
        raise Failed(f"{PYTHON} cannot import paramiko. waker is as it was before.")


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


def remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def write_beside(file: NewFile, unfinished: contextlib.ExitStack) -> None:
    """Write what will replace a file, and make its folder. Raises: Refused.

    `unfinished` removes both again, unless they are in use by then.
    """
    try:
        missing = [folder for folder in file.path.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700 if folder == CONFIG else 0o755)
            unfinished.callback(remove_if_empty, folder)
        unfinished.callback(new_name(file.path).unlink, missing_ok=True)
        write_new(file.path, file.data, file.mode)
    except OSError as error:
        raise Refused(f"{file.path} cannot be written: {error.strerror}.") from None


def carry_out(plan: Plan) -> None:
    """Install packages and write files, or leave all files as they are.

    Raises: Refused, Failed, OSError
    """
    files = list(plan.files)
    with contextlib.ExitStack() as unfinished:
        for file in files:
            write_beside(file, unfinished)
        if plan.packages:
            install_packages(plan.packages)
        if plan.has_new_key:
            key = make_key()
            for file in key:
                write_beside(file, unfinished)
            files += key
        for file in files:
            new_name(file.path).replace(file.path)
    os.sync()


def report(system: System, service: Service, config: Config) -> bool:
    """Say whether a service that was started answers; returns that."""
    name, port = service.name, config.listen[1]
    if is_answering(system, service, config.listen):
        print(f"{name} answers on port {port}.")
        return True
    print(f"{name} does not answer on port {port}. Its log ends with:\n")
    print(read_log(system, name))
    return False


def start(plan: Plan) -> bool:
    """Start what must run; returns whether all of it answers. Raises: Failed."""
    system = plan.system
    if not is_booted(system):
        if plan.folder:
            run(control(system, "enable"))
        print(f"Nothing was started, because {system.name} is not running here.")
        return True
    if system is SYSTEMD:
        run(["systemctl", "daemon-reload"])
    if plan.folder:
        check_and_enable(system)
        print()
    for service in plan.starts:
        run(control(system, "restart", service.name))
    answers = [report(system, *started) for started in plan.starts.items()]
    return all(answers)


def explain_older(system: System) -> str:
    """Say how to remove what waker 3 has installed in /usr, or return ""."""
    older = [str(path) for path in OLDER if path.exists()]
    if system is not SYSTEMD or not older:
        return ""
    lines = ["An older waker is in /usr. If none of your units run it, remove it:\n"]
    asked = control(system, "is-enabled")
    if not subprocess.run(asked, capture_output=True, check=False).returncode:
        lines.append("    sudo systemctl reenable waker")
    return "\n".join([*lines, f"    sudo rm {' '.join(older)}\n\n"])


def next_step(plan: Plan) -> str:
    """Say what to do next."""
    root = plan.system.as_root
    if plan.folder:
        return "Next, open waker's page on your phone."
    if plan.starts:
        return f"Next, see whether all is right:\n\n    {root}waker check"
    if plan.is_filled_in and not plan.has_new_key:
        enable, restart = (control(plan.system, act) for act in ("enable", "restart"))
        steps = (["waker", "check"], enable, restart)
        lines = [f"    {root}{shlex.join(step)}" for step in steps]
        return "\n".join(["Next, check the settings, and start waker:\n", *lines])
    without = ", without sudo" if root else ""
    step = f"Next, prepare the server{without}:\n\n    waker prepare me@192.168.1.20"
    try:
        prepare.check_client()
    except ConfigError as error:
        key = PUBLIC_KEY.read_text() if PUBLIC_KEY.exists() else ""
        step += f"\n\n{error} Or prepare the server by hand, with waker's public key:"
        step += f"\n\n    {key.strip()}"
    return step


def install(given: argparse.Namespace) -> int:
    """Install waker; returns 0 if all that was started answers, or else 1.

    Raises: Refused, Failed, ConfigError, OSError
    """
    plan = look(given.folder)
    show_and_ask(plan, yes=given.yes)
    carry_out(plan)
    print("\nwaker is installed.")
    if not start(plan):
        if plan.moved:
            print(f"\nCorrect that in {plan.folder}, and run the same command again.")
        return 1
    if plan.moved:
        os.sync()  # what was written must outlive a power cut before its origin goes
    for file in plan.moved:
        file.unlink()
    print(f"\n{explain_older(plan.system)}{next_step(plan)}")
    return 0


# ---- Uninstall -----------------------------------------------------------------------


def uninstall(given: argparse.Namespace) -> None:
    """Remove what was installed. Raises: Refused, Failed, OSError."""
    system = find_system()
    if not system or not system.program.exists():
        raise Refused("waker is not installed here.")
    names = [service.name for service in find_services(system)]
    others = [n for n in names if n != "waker" and is_running(system, n)]
    if others:
        stop = f"sudo systemctl disable --now {' '.join(others)}"
        raise Refused(f"{' and '.join(others)} needs the program. First run: {stop}")
    # The program comes last: as long as it is there, it can be run again.
    places = system.service, KEEP, system.program
    files = [file for file in places if file.exists()]
    will = ["send no more messages to your phone"] if notify.is_installed() else []
    will += [f"delete {file}" for file in files]
    print(f"Your settings and keys in {CONFIG} stay, and so do packages.")
    agree(will, yes=given.yes)
    if notify.is_installed():
        notify.uninstall()
    if system.service in files:
        if is_booted(system):
            run(control(system, "stop"))
        run(control(system, "disable"))
    for file in files:
        file.unlink()
    print(f"waker is removed.\n{explain_older(system)}")


# ---- Commands ------------------------------------------------------------------------


def use_right_python() -> None:
    """Run this again if another Python runs it. Raises: Refused, OSError."""
    if waker.HERE.is_dir():
        raise Refused("this is a checkout. Run: sudo make install")
    if sys.executable != PYTHON:
        os.execv(PYTHON, [PYTHON, "-B", *sys.argv])  # noqa: S606 - no shell is wanted


def parse_arguments(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"waker {command}", allow_abbrev=False)
    add = parser.add_argument
    about = "messages to your phone when the server waits and is up"
    add("part", nargs="?", choices=["notify"], metavar="notify", help=about)
    add("--yes", action="store_true", help="do not ask")
    if command == "install":
        parser.description = "Install waker on this box, or upgrade it."
        about = "take settings and key out of this folder, and run waker with them"
        add("--from", metavar="FOLDER", type=Path, dest="folder", help=about)
    else:
        parser.description = (
            "Remove waker from this box, but not its settings and keys."
        )
    return parser.parse_args(arguments)


def run_command(command: str, given: argparse.Namespace) -> int:
    """Run a command; returns its exit status. Raises as these do."""
    if os.geteuid():
        again = shlex.join(["python3", *sys.argv])
        raise Refused(f"this needs root. Run: sudo {again}")
    if command == "install" and not given.part:
        use_right_python()
        return install(given)
    if command == "install":
        notify.install()
    elif given.part:
        notify.uninstall()
    else:
        uninstall(given)
    return 0


def main(command: str, arguments: Sequence[str]) -> int:
    """Run `install` or `uninstall`; 0: done; 1: not done; 78: a setting is wrong."""
    given = parse_arguments(command, arguments)
    os.umask(0o022)
    if isinstance(sys.stdout, io.TextIOWrapper):  # keep the order of what others print
        sys.stdout.reconfigure(line_buffering=True)
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
        sys.exit(f"FAILED: {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit("\nStopped. To finish, run the same command again.")
