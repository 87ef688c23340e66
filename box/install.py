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
    find_services,
    find_system,
    is_booted,
    is_running,
    read_log,
    run,
    service_command,
    wait_for_page,
)
from waker import Config, ConfigError

PYTHON: Final = "/usr/bin/python3"  # which runs waker; Debian's paramiko is for it
SETTINGS: Final = "waker.env", "ssh_key", "ssh_key.pub"
KEY: Final = CONFIG / "ssh_key"
PUBLIC_KEY: Final = CONFIG / "ssh_key.pub"
# Lists what an upgrade of OpenWrt keeps. Source: list_static_conffiles in sysupgrade.
KEEP_FILE: Final = Path("/lib/upgrade/keep.d/waker")
ENABLED: Final = Path("/etc/rc.d/S95waker")  # by waker.init's START=95
KEEP_LINES: Final = CONFIG, PROCD.program, PROCD.service_file, ENABLED, KEEP_FILE
HIDES: Final = Path("/etc/systemd/system/waker.service")  # our unit; drop-ins do not
# Where `make install PREFIX=/usr` of waker 3 has put it on a box with systemd.
OLDER: Final = Path("/usr/bin/waker"), Path("/usr/lib/systemd/system/waker.service")
# Whoever changes packages holds the first, and whoever updates their lists the second.
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
    packages: Sequence[str]  # of Debian, to be installed
    files: Sequence[NewFile]
    needs_key: bool
    starts: dict[Service, Config]  # the services to start, with their settings
    is_configured: bool  # whether waker's own settings have been filled in
    source_folder: Path | None  # of --from
    source_files: Sequence[Path]  # its files, to be deleted at the end


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


def find_source_files(folder: Path) -> list[Path]:
    """Return the files that --from moves. Raises: Refused."""
    if not folder.is_dir() or (CONFIG.exists() and folder.samefile(CONFIG)):
        raise Refused(f"--from needs a folder, other than {CONFIG}.")
    return [folder / name for name in SETTINGS if folder.joinpath(name).exists()]


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
        missing = [] if has_paramiko() else ["python3-paramiko"]
        return missing if shutil.which("ssh") else [*missing, "openssh-client"]
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
    except ValueError as error:
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


def has_values(env_file: Path) -> bool:
    """Return whether any setting has a value. Raises: ConfigError."""
    return env_file.exists() and any(waker.read_env_file(env_file).values())


def read_settings(env_file: Path) -> Config:
    """Read settings as this version does. Raises: ConfigError, with the file's name."""
    values = waker.read_env_file(env_file)
    try:
        return waker.read_config(values, env_file.parent)
    except ConfigError as error:
        raise ConfigError(f"{env_file}:\n{error}") from None


def find_own_settings(folder: Path) -> Path:
    """Return where the settings are that --from gives waker. Raises: ConfigError."""
    for file in (folder / "waker.env", ENV_FILE):
        if file.exists():
            return file
    raise ConfigError(f"{folder} has no waker.env, and neither has {CONFIG}.")


def read_services(
    system: System, folder: Path | None
) -> tuple[dict[Service, Config], list[Service]]:
    """Read the settings that each service will have.

    Returns the services to start, with their settings, and those that stay stopped, if
    they have settings. Raises: ConfigError
    """
    starts, stopped = {}, []
    for service in find_services(system):
        if folder and service.name == "waker":
            starts[service] = read_settings(find_own_settings(folder))
        elif is_running(system, service.name):
            starts[service] = read_settings(service.env_file)
        elif has_values(service.env_file):
            read_settings(service.env_file)  # a mistake would stop it later
            stopped.append(service)
    return starts, stopped


def look(folder: Path | None) -> Plan:
    """Find out what to do. Raises: Refused, ConfigError, OSError."""
    sources = read_sources()  # which compares every checksum
    system = find_system()
    if not system:
        raise Refused("this needs systemd or OpenWrt's procd, but neither is here.")
    check_place(system)
    files, moved = plan_files(system), find_source_files(folder) if folder else []
    files += [NewFile(CONFIG / f.name, f.read_bytes(), 0o600) for f in moved]
    if not folder and not os.path.lexists(ENV_FILE):
        files.append(NewFile(ENV_FILE, sources["waker.env.example"], 0o600))
    starts, stopped = read_services(system, folder)
    return Plan(
        system=system,
        packages=find_missing_packages(system),
        files=files,
        needs_key=not folder and not any(map(os.path.lexists, (KEY, PUBLIC_KEY))),
        starts=starts,
        is_configured="waker" in [service.name for service in (*starts, *stopped)],
        source_folder=folder,
        source_files=moved,
    )


def agree(lines: Iterable[str], *, yes: bool) -> None:
    """Show what will be done, and ask unless `yes`. Raises: Refused."""
    print("This will:", *(f"    {line}" for line in lines), sep="\n")
    if yes:
        return
    try:
        answer = input("Go on? [y/N] ")
    except EOFError:
        raise Refused("nobody answered. Without a terminal, use --yes.") from None
    if answer[:1] not in ("y", "Y"):
        raise Refused("you did not answer y.")


def show_and_ask(plan: Plan, *, yes: bool) -> None:
    """Show what was found and what will be done, and ask. Raises: Refused."""
    system = plan.system
    name = platform.freedesktop_os_release()["PRETTY_NAME"]
    python = platform.python_version()
    print(f"Found: {name}, with {system.name} and Python {python}")
    if system.program.exists():
        print(f"Found: {system.program}, which this replaces")
    will = [f"install {package} with apt" for package in plan.packages]
    will += [f"write {file.path}" for file in plan.files]
    if plan.needs_key:
        will += [f"write {KEY}, a new SSH key"]
    if plan.source_folder:
        will += ["start waker at every boot"]
    will += [f"restart {service.name}" for service in plan.starts]
    will += [f"delete {file}" for file in plan.source_files]
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


def remove(path: Path) -> None:
    """Remove a file, or a folder if it is empty. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()


def write_beside(file: NewFile, unfinished: contextlib.ExitStack) -> None:
    """Write what will replace a file, and make its folder. Raises: Failed.

    `unfinished` takes that back: it removes the new file, and empty folders. Once the
    new file has been renamed, it finds nothing to remove.
    """
    try:
        missing = [folder for folder in file.path.parents if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(mode=0o700 if folder == CONFIG else 0o755)
            unfinished.callback(remove, folder)
        unfinished.callback(remove, new_name(file.path))
        write_new(file.path, file.data, file.mode)
    except OSError as error:
        problem = f"{file.path} cannot be written: {error.strerror}"
        raise Failed(f"{problem}. waker is as it was before.") from None


def carry_out(plan: Plan) -> None:
    """Install packages and write files, or leave all files as they are.

    Raises: Failed, OSError
    """
    files = list(plan.files)
    with contextlib.ExitStack() as unfinished:
        for file in files:
            write_beside(file, unfinished)
        if plan.packages:
            install_packages(plan.packages)
        if plan.needs_key:
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
    if wait_for_page(system, service, config.listen):
        print(f"{name} answers on port {port}.")
        return True
    print(f"{name} does not answer on port {port}. Its log ends with:\n")
    print(read_log(system, name))
    return False


def start(plan: Plan) -> bool:
    """Start what must run; returns whether all of it answers. Raises: Failed."""
    system = plan.system
    if not is_booted(system):
        if plan.source_folder:
            run(service_command(system, "enable"))
        print(f"Nothing was started, because {system.name} is not running here.")
        return True
    if system is SYSTEMD:
        run(["systemctl", "daemon-reload"])
    if plan.source_folder:
        check_and_enable(system)
        print()
    for service in plan.starts:
        run(service_command(system, "restart", service.name))
    answers = [report(system, service, plan.starts[service]) for service in plan.starts]
    return all(answers)


def explain_older(system: System) -> str:
    """Say how to remove what waker 3 has installed in /usr, or return ""."""
    older = [str(path) for path in OLDER if path.exists()]
    if system is not SYSTEMD or not older:
        return ""
    lines = ["An older waker is in /usr. If none of your units run it, remove it:\n"]
    asked = service_command(system, "is-enabled")
    if not subprocess.run(asked, capture_output=True, check=False).returncode:
        lines.append("    sudo systemctl reenable waker")
    return "\n".join([*lines, f"    sudo rm {' '.join(older)}\n\n"])


def explain_preparing(system: System) -> str:
    """Say how to prepare a server, and show the public key if it must be pasted."""
    without = ", without sudo" if system.as_root else ""
    step = f"Next, prepare the server{without}:\n\n    waker prepare me@192.168.1.20"
    try:
        prepare.check_client()
    except ConfigError as error:
        key = PUBLIC_KEY.read_text().strip() if PUBLIC_KEY.exists() else ""
        step += f"\n\n{error} Or prepare the server by hand, with waker's public key:"
        step += f"\n\n    {key}"
    return step


def next_step(plan: Plan) -> str:
    """Say what to do next."""
    root = plan.system.as_root
    if plan.source_folder:
        return "Next, open waker's page on your phone."
    if plan.starts:
        return f"Next, see whether all is right:\n\n    {root}waker check"
    if plan.needs_key or not plan.is_configured:
        return explain_preparing(plan.system)
    enable = shlex.join(service_command(plan.system, "enable"))
    restart = shlex.join(service_command(plan.system, "restart"))
    lines = [f"    {root}{command}" for command in ("waker check", enable, restart)]
    return "\n".join(["Next, check the settings, and start waker:\n", *lines])


def install(folder: Path | None, *, yes: bool) -> int:
    """Install waker; returns 0 if all that was started answers, or else 1.

    Raises: Refused, Failed, ConfigError, OSError
    """
    plan = look(folder)
    show_and_ask(plan, yes=yes)
    carry_out(plan)
    print("\nwaker is installed.")
    if not start(plan):
        if plan.source_files:
            print(f"\nThe files in {folder} stay there. Correct them.")
        return 1
    if plan.source_files:
        os.sync()  # it must start at the next boot before they go
    for file in plan.source_files:
        file.unlink()
    print(f"\n{explain_older(plan.system)}{next_step(plan)}")
    return 0


# ---- Uninstall -----------------------------------------------------------------------


def uninstall(*, yes: bool) -> None:
    """Remove what was installed. Raises: Refused, Failed, OSError."""
    system = find_system()
    if not system or not system.program.exists():
        raise Refused("waker is not installed here.")
    names = [service.name for service in find_services(system)]
    others = [n for n in names if n != "waker" and is_running(system, n)]
    if others:
        stop = f"sudo systemctl disable --now {' '.join(others)}"
        raise Refused(f"{' and '.join(others)} still needs waker. First run: {stop}")
    # The program goes last, so that a run that was cut short can be repeated.
    files = system.service_file, KEEP_FILE, system.program
    files_here = [file for file in files if file.exists()]
    sends_messages = notify.is_installed()
    will = ["send no more messages to your phone"] if sends_messages else []
    print(f"Your settings and keys in {CONFIG} stay. Installed packages stay, too.")
    agree([*will, *(f"delete {file}" for file in files_here)], yes=yes)
    if sends_messages:
        notify.uninstall()
    if system.service_file in files_here:
        if is_booted(system):
            run(service_command(system, "stop"))
        run(service_command(system, "disable"))
    for file in files_here:
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
    messages = (
        "messages to your phone when the server waits for its passphrase or is up"
    )
    add("part", nargs="?", choices=["notify"], metavar="notify", help=messages)
    add("--yes", action="store_true", help="do not ask")
    if command == "install":
        parser.description = "Install waker on this box, or upgrade it."
        source = f"move settings and key from this folder to {CONFIG}, and start waker"
        add("--from", metavar="FOLDER", type=Path, dest="folder", help=source)
    else:
        parser.description = (
            "Remove waker from this box, but not its settings and keys."
        )
        parser.set_defaults(folder=None)
    given = parser.parse_args(arguments)
    if given.part and given.folder:
        parser.error("--from has nothing for notify")
    return given


def run_command(command: str, given: argparse.Namespace) -> int:
    """Run a command, and return its exit status. Raises what the commands raise."""
    if os.geteuid():
        again = shlex.join(["python3", *sys.argv])
        raise Refused(f"this needs root. Run: sudo {again}")
    if given.part:
        notify.install() if command == "install" else notify.uninstall()
        return 0
    if command == "uninstall":
        uninstall(yes=given.yes)
        return 0
    use_right_python()
    return install(given.folder and given.folder.resolve(), yes=given.yes)


def main(command: str, arguments: Sequence[str]) -> int:
    """Run `install` or `uninstall`.

    Exit status 0: done; 1: it failed, or a service does not answer; 78: a setting is
    wrong, and nothing was changed.
    """
    given = parse_arguments(command, arguments)
    os.umask(0o022)
    if isinstance(sys.stdout, io.TextIOWrapper):  # so that commands print in order
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
