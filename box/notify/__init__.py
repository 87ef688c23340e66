"""Set up messages to a phone: `waker install notify`, `waker uninstall notify`.

The topic's address is a secret, and sudo logs arguments. So it is read from the
terminal, or from standard input.
"""

import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from box import Failed, Refused
from box.files import new_name, read_sources, write_new
from box.system import (
    CONFIG,
    ENV_FILE,
    SYSTEMD,
    find_system,
    is_booted,
    run,
)

TIMER: Final = "waker-notify.timer"
SERVICE: Final = "waker-notify.service"
PROGRAM: Final = Path("/usr/local/bin/waker-notify")
UNITS: Final = SYSTEMD.service_file.parent
URL_FILE: Final = CONFIG / "notify_url"
# Where systemd puts the state of a service with DynamicUser=yes, and a link to it.
STATE: Final = Path("/var/lib/private/waker-notify")
STATE_LINK: Final = Path("/var/lib/waker-notify")
OWN_UNITS: Final = Path("/etc/systemd/system")  # which hide ours
IN_THE_WAY: Final = OWN_UNITS / SERVICE, OWN_UNITS / TIMER  # of waker 3.0
VISIBLE: Final = r"[!#-&(-\[\]-~]+"  # ASCII, but no quotes and no backslash
TOPIC: Final = r"https?://[^/:?#][^?#]*/[^?#]+([?#].*)?"  # not only a host's name


def find_files() -> list[Path]:
    """Return what is here of an installation, even of one that was interrupted."""
    files = URL_FILE, PROGRAM, UNITS / SERVICE, UNITS / TIMER
    return [path for file in files for path in (new_name(file), file) if path.exists()]


def check_place() -> None:
    """Raise Refused if the messages cannot be set up here."""
    if find_system() is not SYSTEMD or not is_booted(SYSTEMD):
        raise Refused("messages need a box with systemd.")
    if not shutil.which("curl"):
        raise Refused("curl is missing. First run: sudo apt install curl")
    if not shutil.which("waker") or not ENV_FILE.exists():
        raise Refused("waker is not installed. First run: sudo python3 waker install")
    for unit in IN_THE_WAY:
        if os.path.lexists(unit):
            raise Refused(
                f"{unit} is in the way. You may have it from waker 3.0. First run:\n"
                f"    sudo systemctl disable --now {TIMER}\n"
                f"    sudo rm -f {' '.join(map(str, IN_THE_WAY))}"
            )


def ask_for_url() -> str:
    """Return the topic's address. Raises: Refused."""
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


def stop() -> None:
    """Let no check run, and no other begin. Raises: Failed, OSError."""
    now = ["--now"] if is_booted(SYSTEMD) else []
    if UNITS.joinpath(TIMER).exists():
        run(["systemctl", "disable", "--quiet", *now, TIMER])
    if now and UNITS.joinpath(SERVICE).exists():
        run(["systemctl", "stop", SERVICE])


def install() -> None:
    """Send messages from now on. Raises: Refused, Failed, OSError."""
    check_place()
    url = ask_for_url()
    stop()  # no check may run with old and new files mixed
    sources = read_sources()
    for folder in (PROGRAM.parent, UNITS):
        folder.mkdir(parents=True, exist_ok=True)
    write_new(URL_FILE, f"{url}\n".encode(), 0o600).replace(URL_FILE)
    write_new(PROGRAM, sources["box/notify/notify"], 0o755).replace(PROGRAM)
    for name in (SERVICE, TIMER):
        unit = UNITS / name
        write_new(unit, sources[f"box/notify/{name}"], 0o644).replace(unit)
    run(["systemctl", "daemon-reload"])
    # Without a recorded state, the service always sends a message. If waker cannot
    # check the server, the service succeeds without one, but records nothing.
    shutil.rmtree(STATE, ignore_errors=True)
    print("Sending a message to your phone.", flush=True)
    start = ["systemctl", "start", SERVICE]
    has_failed = subprocess.run(start, check=False).returncode
    if has_failed or not STATE.joinpath("last").exists():
        raise Failed(
            "the message could not be sent, so messages stay off. To see why, run:\n"
            "    sudo journalctl -u waker-notify\n"
            "    sudo waker state\n"
            "Then run this again."
        )
    run(["systemctl", "enable", "--quiet", "--now", TIMER])
    print("It was sent. From now on, waker checks the server every minute.")


def uninstall() -> None:
    """Send no more messages, and forget the topic. Raises: Refused, Failed, OSError."""
    files = find_files()
    if not files:
        raise Refused("the messages are not installed.")
    stop()  # a check that begins now would make its state anew
    shutil.rmtree(STATE, ignore_errors=True)
    if STATE_LINK.is_symlink():
        STATE_LINK.unlink()
    for file in files:
        file.unlink(missing_ok=True)
    print("waker no longer sends messages to your phone. It has forgotten the address.")
