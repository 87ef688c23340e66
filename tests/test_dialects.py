"""The dialect systemd, where a virtual machine is not needed.

OpenSSH is real, and so are systemd's `systemd-ask-password` and its agent, and the
shells. The scripts in `initrds` do what is left: disks that open and that do not.
"""

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAM, environment, need, wait_for
from homelab import new_key, public_line
from ssh_servers import free_port, prepare_sshd, process
from test_unlock import ODD, unlock

import waker

SCRIPTS = Path(__file__).with_name("initrds")
SYSTEMD = waker.parse_dialect("systemd")
ROOT = {"root": "x"}
HOME = {"root": "x", "home": "y"}
BOTH = {"root": "x", "home": "x"}
LONG = {"a" * 240: "x", "b" * 240: "x"}
UNLOCKED = "unlocked: Unlocked: "
WRONG = "wrong_passphrase: Wrong passphrase for disk "
CAREFUL = (
    f"{WRONG}root. Be careful: after another wrong passphrase, systemd may give up"
)
GAVE_UP = "gave_up: the initrd has given up on a disk; restart the machine"
UNCONFIRMED = "not_confirmed: not confirmed: no answer came after the passphrase was"
OPEN = "already_open: no passphrase is needed: every disk is already open"
UP = "up: no passphrase is needed: the system is already up"
NO_AGENT = "error: logged in, but there is no unlock command"


def script(folder: Path, name: str) -> Path:
    """Copy a script, with the name of its folder in it."""
    path = folder / name
    text = (SCRIPTS / name).read_text()
    path.write_text(text.replace("FOLDER", shlex.quote(str(folder))))
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def systemd(
    folder: Path,
    keys: Mapping[str, str],
    *,
    initrd: bool = True,
    before: str = "",
    until: str = ".",
    config: str = "",
) -> Iterator[waker.Machine]:
    """Run OpenSSH in an initrd of systemd's kind.

    Its first disk asks at once, and the others when there is a file named `until`.
    What its disks were given is in a file named `tried`.
    """
    for program in ("systemd-ask-password", "systemd-tty-ask-password-agent"):
        need(program)
    our_key = new_key()
    our_key.write_private_key_file(str(folder / "ssh_key"))
    for name in ("keys", "opened", "failed"):
        (folder / name).mkdir()
    for disk, passphrase in keys.items():
        (folder / "keys" / disk).write_text(passphrase)
    (folder / "tried").touch()
    port, host_key, sshd = prepare_sshd(folder, public_line(our_key), config)
    place = shlex.quote(str(folder / "etc"))
    cryptsetup, quoted = script(folder, "cryptsetup.sh"), shlex.quote(str(folder))
    lines = [
        f"mkdir {place}; mount -t tmpfs none {place}; mkdir {place}/upper {place}/work",
        f"mount -t overlay none /etc -o lowerdir=/etc,upperdir={place}/upper"
        f",workdir={place}/work",
        "touch /etc/initrd-release" if initrd else "rm -f /etc/initrd-release",
        f"mount --bind {script(folder, 'systemctl.sh')} {need('systemctl')}",
        f"{sshd} & mkdir -p /run/systemd/ask-password",
        before.replace("FOLDER", quoted),
        *(
            f"(until [ -e {quoted}/{until if number else '.'} ]; do sleep 0.1; done;"
            f" sh {cryptsetup} {quoted} {disk}) &"
            for number, disk in enumerate(keys)
        ),
        "wait",
    ]
    options = ("--pid", "--fork", "--kill-child", "--mount-proc")
    with process(port, "\n".join(lines), *options):
        yield waker.Machine(
            host="127.0.0.1",
            dialect=SYSTEMD,
            initrd_port=port,
            system_port=free_port(),
            user="root",
            key=folder / "ssh_key",
            host_keys=waker.HostKey.parse_all(host_key),
        )


@pytest.mark.parametrize("dialect", waker.DIALECTS, ids=lambda row: row.name)
def test_the_command_itself_is_no_event(dialect: waker.Dialect) -> None:
    assert not dialect.events.search(f"sh: {dialect.command}: not found\n")


@pytest.mark.parametrize(
    "case",
    [
        ({"root": ODD}, {}, {ODD: f"{UNLOCKED}root."}, [f"root {ODD}"]),
        ({"root": " "}, {}, {" ": f"{UNLOCKED}root."}, ["root  "]),
        (BOTH, {}, {"x": f"{UNLOCKED}(root, home|home, root)"}, ["home x", "root x"]),
        (BOTH, {"until": "opened/root"}, {"x": f"{UNLOCKED}root, home"}, None),
        (LONG, {}, {"y": WRONG, "x": UNLOCKED}, None),
        # Never an empty passphrase, which would show between these.
        (
            *(HOME, {}, {"x": f"{WRONG}home. ", "y": f"{UNLOCKED}home."}),
            ["home x", "home y", "root x"],
        ),
        # It gives up on the third wrong one, and then gets nothing more.
        (
            *(ROOT, {}, {"1": CAREFUL, "2": CAREFUL, "3": GAVE_UP, "x": GAVE_UP}),
            ["root 1", "root 2", "root 3"],
        ),
        # It gave up on one disk and opened another one: neither is claimed.
        (HOME, {}, {"1": WRONG, "2": WRONG, "x": f"{GAVE_UP}. The"}, None),
        ({}, {}, {"x": OPEN}, []),
        (ROOT, {"initrd": False}, {"x": UP}, []),
        (ROOT, {"config": "SetEnv PATH=/nonexistent"}, {"x": NO_AGENT}, []),
        (ROOT, {"before": "sleep 2"}, {"x": f"{UNLOCKED}root."}, ["root x"]),
        # An initrd that makes way for the system, and a silent one, confirm nothing.
        (ROOT, {"before": "touch FOLDER/over"}, {"x": UNCONFIRMED}, ["root x"]),
        (ROOT, {"before": "touch FOLDER/silent"}, {"x": UNCONFIRMED}, ["root x"]),
    ],
    ids=[
        *("odd", "blank", "two", "later", "long", "another", "gives up", "neither"),
        *("open", "booted", "no agent", "early", "over", "silent"),
    ],
)
def test_systemd_is_answered_and_told_as_what_was_seen(
    tmp_path: Path, case: Any
) -> None:
    keys, options, told, tried = case
    with systemd(tmp_path, keys, **options) as machine:
        for passphrase, pattern in told.items():
            seconds = 14 if pattern == UNCONFIRMED else 60  # it waits to the end
            result = unlock(machine, passphrase, seconds)
            assert re.match(pattern, f"{result.outcome}: {result.message}")
        lines = sorted((tmp_path / "tried").read_text().splitlines())
        assert tried in (None, lines)


def test_systemd_is_given_nothing_more_when_waker_has_gone(tmp_path: Path) -> None:
    with systemd(tmp_path, BOTH, until="gone") as machine:
        with subprocess.Popen(
            [sys.executable, PROGRAM, "unlock"],
            env=environment(machine.settings()),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        ) as child:
            assert child.stdin
            child.stdin.write(b"x")
            child.stdin.close()
            wait_for((tmp_path / "tried").read_text)
            child.kill()
        (tmp_path / "gone").touch()
        unlock(machine, "wrong")  # for which the other disk has to ask
        tried = (tmp_path / "tried").read_text().splitlines()
        assert tried == ["root x", "home wrong"]


def test_a_passphrase_goes_to_no_prompt_that_is_not_of_a_disk(tmp_path: Path) -> None:
    pin = "systemd-ask-password --no-tty --timeout=0 --id=tpm2-pin PIN:"
    before = f"{pin} >{shlex.quote(str(tmp_path / 'pin'))} &"
    with systemd(tmp_path, ROOT, before=before) as machine:
        result = unlock(machine)
        assert "a prompt is not for a disk; answer it by hand" in result.message
        assert not result.sent
        assert (tmp_path / "tried").read_text() == ""
    assert (tmp_path / "pin").read_text() == ""
