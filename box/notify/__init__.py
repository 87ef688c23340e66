"""Set up messages to a phone: `waker install notify`, `waker uninstall notify`.

The topic's address is a secret, and sudo logs arguments. So it is read from standard
input.
"""

import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from box import Failed, Refused
from box.files import new_name, read_sources, write_new
from box.system import (
    CONFIG,
    ENV_FILE,
    SUDO,
    SYSTEMD,
    check_memory,
    find_system,
    is_booted,
    reload_units,
    run,
)

TIMER: Final = "waker-notify.timer"
SERVICE: Final = "waker-notify.service"
PROGRAM: Final = Path("/usr/local/bin/waker-notify")
UNITS: Final = SYSTEMD.service_file.parent
URL_FILE: Final = CONFIG / "notify_url"
STATE: Final = Path("/var/lib/waker-notify")  # with DynamicUser=yes, it is a link
VISIBLE: Final = r"[!#-&(-\[\]-~]+"  # ASCII, without quotes and backslashes
# With a path. Before the host, there may be a user and a password, or :TOKEN.
TOPIC: Final = r"https?://(:[^/?#@]+@)?[^/:?#@][^?#]*/[^?#]+([?#].*)?"


def find_files() -> list[Path]:
    """Return the files of an installation, even of one that was interrupted."""
    files = URL_FILE, PROGRAM, UNITS / SERVICE, UNITS / TIMER
    return [path for file in files for path in (new_name(file), file) if path.exists()]


def check_place() -> None:
    """Raise Refused if the messages cannot be set up here."""
    if find_system() is not SYSTEMD or not is_booted(SYSTEMD):
        raise Refused("messages need a box with systemd.")
    if not shutil.which("curl"):
        raise Refused(f"curl is missing. First run: {SUDO}apt install curl")
    if not SYSTEMD.program.exists() or not ENV_FILE.exists():
        install = f"{SUDO}python3 waker install"
        raise Refused(f"waker is not installed. First run: {install}")
    check_memory()


def ask_for_url() -> str:
    """Return the topic's address. Raises: Refused."""
    if not sys.stdin:
        raise Refused("your topic's address is read from standard input.")
    is_known = URL_FILE.exists()
    if sys.stdin.isatty() and is_known:
        print("Your topic's address, or just Enter to keep the one you have:")
    elif sys.stdin.isatty():
        # A random topic, because people use what an example shows.
        example = f"https://ntfy.sh/{secrets.token_hex(8)}"
        print(f"Your topic's address (you could choose {example}):")
    url = sys.stdin.buffer.readline().decode("latin-1").strip()
    if not url and is_known:
        url = URL_FILE.read_text().strip()
    if not re.fullmatch(VISIBLE, url) or not re.fullmatch(TOPIC, url):
        raise Refused(
            "this is not the address of a topic. It must look like this, without\n"
            "spaces, quotes or backslashes: https://ntfy.sh/YOUR-SECRET-TOPIC"
        )
    return url


def send_first(url: str) -> str:
    """Send a message as the service will, and return the state that it records.

    Raises: Refused.
    """
    print("Sending a message to your phone.", flush=True)
    script = read_sources()["box/notify/notify"].decode()
    with tempfile.TemporaryDirectory(dir="/run") as name:
        url_file, last = Path(name, "url"), Path(name, "last")
        url_file.write_text(f"{url}\n")  # in a folder that only root can enter
        command = ["sh", "-c", script, PROGRAM.name, str(ENV_FILE), str(url_file)]
        path = f"{SYSTEMD.program.parent}:/usr/bin:/bin"
        own = {"PATH": path, "STATE_DIRECTORY": name}
        failed = subprocess.run(command, env=own, check=False).returncode
        # If waker cannot check the server, it sends nothing, and records nothing.
        if not failed and last.exists():
            return last.read_text()
    raise Refused(
        "the message could not be sent. If no reason is shown above, waker could not"
        f" check the server. Run: {SUDO}waker state"
    )


def stop() -> None:
    """Let no check run, and no other begin. Raises: Failed, OSError."""
    now = ["--now"] if is_booted(SYSTEMD) else []
    if UNITS.joinpath(TIMER).exists():
        run(["systemctl", "disable", "--quiet", *now, TIMER])
    if now and UNITS.joinpath(SERVICE).exists():
        run(["systemctl", "stop", SERVICE])


def forget_state() -> Path:
    """Remove the folder of what the service has recorded; returns its path."""
    folder = STATE.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def install() -> None:
    """Send messages from now on. Raises: Refused, Failed, OSError."""
    check_place()
    url = ask_for_url()
    state = send_first(url)
    stop()  # no check may run with old and new files mixed
    sources = read_sources()
    for folder in (PROGRAM.parent, UNITS):
        folder.mkdir(parents=True, exist_ok=True)
    write_new(URL_FILE, f"{url}\n".encode(), 0o600).replace(URL_FILE)
    write_new(PROGRAM, sources["box/notify/notify"], 0o755).replace(PROGRAM)
    for name in (SERVICE, TIMER):
        unit = UNITS / name
        write_new(unit, sources[f"box/notify/{name}"], 0o644).replace(unit)
    reload_units(SYSTEMD)
    folder = forget_state()
    folder.mkdir()
    # Or the service would send it again. systemd gives the file to the service's user.
    folder.joinpath("last").write_text(state)
    start = ["systemctl", "start", SERVICE]
    if subprocess.run(start, check=False).returncode:
        raise Failed(
            "the message was sent, but the service cannot run, so messages are off. To"
            f" see why, run: {SUDO}journalctl -u waker-notify"
        )
    run(["systemctl", "enable", "--quiet", "--now", TIMER])
    print("The message was sent. From now on, waker checks the server every minute.")


def uninstall() -> None:
    """Send no more messages, and forget the topic. Raises: Refused, Failed, OSError."""
    files = find_files()
    if not files:
        raise Refused("the messages are not installed.")
    stop()  # a check that begins now would record its state again
    forget_state()
    if STATE.is_symlink():
        STATE.unlink()
    for file in files:
        file.unlink(missing_ok=True)
    reload_units(SYSTEMD)
    print("waker no longer sends messages to your phone. It has forgotten the address.")
