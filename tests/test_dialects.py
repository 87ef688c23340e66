"""The systemd dialect, as far as it can be tested without a virtual machine.

OpenSSH, the shells, `systemd-ask-password` and its agent are real. The scripts in
`initrds` simulate the rest: disks that can and cannot be unlocked.
"""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    MAC,
    PROGRAM,
    environment,
    need,
    new_app,
    wait_for,
    wait_for_starts,
)
from cryptroot_unlock import Disks
from ssh_servers import (
    ODD_PASSPHRASE,
    SHORT_UNLOCK,
    free_port,
    prepare_sshd,
    process,
    unlock,
)

import waker

SCRIPTS = Path(__file__).with_name("initrds")
SYSTEMD = waker.parse_dialect("systemd")
ROOT = {"root": "x"}
HOME = {"root": "x", "home": "y"}
BOTH = {"root": "x", "home": "x"}
UNLOCKED = "unlocked: Unlocked: "
WRONG = "wrong_passphrase: Wrong passphrase for disk "
CAREFUL = "Be careful: after another wrong passphrase, systemd may give up"
GAVE_UP = (
    "gave_up: the server stopped asking for the passphrase and must be restarted."
    " The passph"
)
UNCONFIRMED = (
    "not_confirmed: Not confirmed: the passphrase was sent, but the initrd did"
)
OPEN = "already_open: no passphrase is needed: all disks seem to be open"
UP = "up: no passphrase is needed: the system is already up"
MISSING = "error: logged in, but there is no unlock command"
ENDED = "not_asked: the unlock command ended without asking; try again. The pass"
FOREIGN = "error: a prompt is not for a disk; answer it at the console"
# For a command over SSH, bash reads .bashrc.
NO_PRINTF = (
    "echo enable -n printf >FOLDER/.bashrc;"
    " sed -i 's|^root:.*|root:x:0:0::FOLDER:/bin/bash|' /etc/passwd"
)
# Another disk has failed, and the first one is still being checked.
ONE_FAILED = "touch FOLDER/keys/other FOLDER/failed/other; export DERIVATION=1"
PIN = "systemd-ask-password --no-tty --timeout=0 --id=tpm2-pin PIN: >>FOLDER/tried &"


@contextlib.contextmanager
def systemd(
    folder: Path, keys: dict[str, str], setup: str = "", until: str = ".", ssh: str = ""
) -> Iterator[waker.Machine]:
    """Run OpenSSH in a simulated systemd initrd; run `setup` before its disks ask.

    The first disk asks at once, the others as soon as the file `until` exists. The
    file `tried` lists the passphrases that each disk was given.
    """
    for name in ("keys", "opened", "failed", "etc"):
        (folder / name).mkdir()
    for disk, passphrase in keys.items():
        (folder / "keys" / disk).write_text(passphrase)
    (folder / "tried").touch()
    systemctl = folder / "systemctl"
    text = (SCRIPTS / "systemctl.sh").read_text()
    systemctl.write_text(text.replace("FOLDER", str(folder)))
    systemctl.chmod(0o755)
    initrd, sshd = prepare_sshd(folder, Disks({}))
    layers = f"lowerdir=/etc,upperdir={folder}/etc/upper,workdir={folder}/etc/work"
    lines = [
        f"mount -t tmpfs none {folder}/etc; mkdir {folder}/etc/upper {folder}/etc/work",
        f"mount -t overlay none /etc -o {layers}",
        f"touch /etc/initrd-release; mount --bind {systemctl} {need('systemctl')}",
        f"{sshd} {ssh} & mkdir -p /run/systemd/ask-password",
        setup.replace("FOLDER", str(folder)),
        *(
            f"(until [ -e {folder}/{until if number else '.'} ]; do sleep 0.1; done;"
            f" sh {SCRIPTS}/cryptsetup.sh {folder} {disk}) &"
            for number, disk in enumerate(keys)
        ),
        "wait",
    ]
    options = ("--pid", "--fork", "--kill-child", "--mount-proc")
    with process(initrd.port, "\n".join(lines), *options):
        yield initrd.machine()._replace(dialect=SYSTEMD, system_port=free_port())


@pytest.mark.parametrize(
    "case",
    [
        (
            {"root": ODD_PASSPHRASE},
            {},
            {ODD_PASSPHRASE: f"{UNLOCKED}root."},
            [f"root {ODD_PASSPHRASE}"],
        ),
        (BOTH, {"until": "opened/root"}, {"x": f"{UNLOCKED}root, home"}, None),
        # Never an empty passphrase, which would show between these.
        (
            *(HOME, {}, {"x": f"{WRONG}home. ", "y": f"{UNLOCKED}home."}),
            ["home x", "home y", "root x"],
        ),
        # systemd gives up after the third wrong one, which opened the other disk. From
        # then on, no disk asks.
        (
            HOME,
            {},
            {"1": f"{WRONG}.*{CAREFUL}", "2": WRONG, "x": GAVE_UP, "y": GAVE_UP},
            [f"{disk} {given}" for disk in ("home", "root") for given in "12x"],
        ),
        ({}, {}, {"x": OPEN}, []),
        (ROOT, {"setup": "rm /etc/initrd-release"}, {"x": UP}, []),
        (ROOT, {"ssh": "-o SetEnv=PATH=/nonexistent"}, {"x": MISSING}, []),
        # A command that is forced and does nothing proves nothing.
        (ROOT, {"ssh": "-o ForceCommand=true"}, {"x": ENDED}, []),
        # An external printf would show the passphrase to every process.
        (ROOT, {"setup": NO_PRINTF}, {"x": MISSING}, []),
        (ROOT, {"setup": ONE_FAILED}, {"1": f"{WRONG}root. "}, ["root 1"]),
        (ROOT, {"setup": "sleep 5"}, {"x": f"{UNLOCKED}root."}, ["root x"]),
        (ROOT, {"setup": PIN}, {"x": FOREIGN}, []),
        # An initrd that hands over to the system, or says nothing, confirms nothing.
        (ROOT, {"setup": "touch FOLDER/over"}, {"x": UNCONFIRMED}, ["root x"]),
        (ROOT, {"setup": "touch FOLDER/silent"}, {"x": UNCONFIRMED}, ["root x"]),
    ],
    ids=[
        *("odd", "later", "another", "gives up", "open"),
        *("booted", "no agent", "forced", "no printf", "one failed"),
        *("early", "foreign", "over", "silent"),
    ],
)
def test_each_outcome_of_a_systemd_initrd_is_reported(
    tmp_path: Path, case: Any
) -> None:
    keys, options, expected, tried = case
    with systemd(tmp_path, keys, **options) as machine:
        for passphrase, pattern in expected.items():
            # An unconfirmed unlock uses up all its time.
            seconds = SHORT_UNLOCK if pattern == UNCONFIRMED else 60
            message = unlock(machine, passphrase, seconds)
            assert re.match(pattern, message), (passphrase, message)
        lines = sorted((tmp_path / "tried").read_text().splitlines())
        assert tried in (None, lines)


@pytest.mark.parametrize(
    "case",
    [
        (
            {"root": ODD_PASSPHRASE},
            "",
            {"wrong": WRONG, ODD_PASSPHRASE: f"{UNLOCKED}root."},
        ),
        (HOME, "", {"1": f"{WRONG}.*{CAREFUL}", "2": WRONG, "x": GAVE_UP}),
        ({}, "", {"x": OPEN}),
        (ROOT, "rm /etc/initrd-release", {"x": UP}),
        (ROOT, PIN, {"x": FOREIGN}),
    ],
    ids=["odd", "gives up", "open", "booted", "foreign"],
)
def test_the_unlock_script_of_version_2_1_still_works(
    tmp_path: Path, case: Any
) -> None:
    """An initrd keeps the script of its forced command when waker is upgraded."""
    keys, setup, expected = case
    forced = f"-o ForceCommand='sh {SCRIPTS}/unlock-2.1.sh'"
    with systemd(tmp_path, keys, setup, ssh=forced) as machine:
        for passphrase, pattern in expected.items():
            message = unlock(machine, passphrase)
            assert re.match(pattern, message), (passphrase, message)


@pytest.mark.parametrize("shell", ["dash", "busybox sh"])
def test_the_unlock_script_needs_no_bash(tmp_path: Path, shell: str) -> None:
    """By the docs, an initrd's `sh` runs it. Here, root's shell may be bash."""
    need(shell.removesuffix(" sh"))
    script = tmp_path / "unlock"
    script.write_text(waker.SYSTEMD_COMMAND)
    forced = f"-o ForceCommand='{shell} {script}'"
    with systemd(tmp_path, {"root": ODD_PASSPHRASE}, ssh=forced) as machine:
        assert unlock(machine, "wrong").startswith(f"{WRONG}root. ")
        assert unlock(machine, ODD_PASSPHRASE) == f"{UNLOCKED}root."


def test_a_start_of_a_booted_system_is_done(tmp_path: Path) -> None:
    """Its OpenSSH still answers at the initrd's port, and its own port is closed."""
    with systemd(tmp_path, ROOT, "rm /etc/initrd-release") as machine:
        settings = MAC | {"WAKER_PIN": "24681012"} | machine.settings()
        starter = new_app(waker.read_config(settings, tmp_path)).starter
        starter.begin(waker.Passphrase("x"), time.monotonic())
        wait_for_starts()
        ports = waker.check_ports(machine)
    start: Any = starter.members(time.monotonic(), ports)
    assert start["phase"] == "done"
    assert "{outcome}: {message}".format(**start).startswith(UP)


def test_a_disk_that_was_opened_at_the_console_is_not_called_unlocked(
    tmp_path: Path,
) -> None:
    console = (
        "(until [ -e FOLDER/console ]; do sleep 0.1; done;"
        " echo x | systemd-tty-ask-password-agent --query) &"
    )
    with systemd(tmp_path, ROOT, console) as machine:
        deadline = time.monotonic() + 60

        def answer_at_the_console() -> None:
            (tmp_path / "console").touch()
            wait_for((tmp_path / "opened/root").exists)

        passphrase = waker.Passphrase("x")
        result = waker.unlock(machine, passphrase, deadline, answer_at_the_console)
        assert f"{result.outcome}: {result.message}".startswith(UNCONFIRMED)


def test_an_end_of_input_is_not_an_answer(tmp_path: Path) -> None:
    """To systemd it would be an empty passphrase, and use up a try."""
    with systemd(tmp_path, ROOT) as machine:
        with contextlib.closing(waker.open_transport(machine)) as transport:
            waker.exchange_keys(transport, machine)
            waker.log_in(transport, machine)
            command = waker.Command(transport, SYSTEMD)
            until = time.monotonic() + 60
            assert command.next_event(until) == (waker.Outcome.ASKS, ["root"])
            command._channel.shutdown_write()  # noqa: SLF001
            assert command.next_event(until) == (waker.Outcome.ENDED, [])
        assert (tmp_path / "tried").read_text() == ""


def test_no_more_disks_are_answered_once_waker_is_killed(tmp_path: Path) -> None:
    passphrase, tried = tmp_path / "passphrase", tmp_path / "tried"
    passphrase.write_text("x")
    command = sys.executable, PROGRAM, "unlock"
    with systemd(tmp_path, BOTH, until="gone") as machine:
        settings = environment(machine.settings())
        with passphrase.open() as given:
            with subprocess.Popen(command, env=settings, stdin=given) as child:
                wait_for(tried.read_text)
                child.kill()
        (tmp_path / "gone").touch()
        unlock(machine, "wrong")  # only possible if the other disk still asks
        assert tried.read_text().splitlines() == ["root x", "home wrong"]
