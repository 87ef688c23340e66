"""Our `cryptroot-unlock` for systemd initrds, as far as it needs no virtual machine.

OpenSSH, the shells, the script, the prompts and the helper that answers them are real.
The scripts in `initrds` simulate the rest: disks that can and cannot be unlocked.
"""

import contextlib
import os
import re
import signal
import subprocess
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    CHECKOUT,
    ODD_PASSPHRASE,
    need,
    wait_for,
    wait_for_process,
    with_limits,
)
from homelab import Settings, new_key
from ssh_servers import (
    ALONE,
    AS_USER_1,
    about_to_send,
    free_port,
    process,
    settings_at,
    ssh_to,
    unlock,
)

SCRIPT = CHECKOUT / "server/dracut/46initrd-ssh/cryptroot-unlock"
INITRDS = CHECKOUT / "tests/support/initrds"
PROMPTS = "/run/systemd/ask-password"
HELPER = "/usr/lib/systemd/systemd-reply-password"
ROOT = {"root": "x"}
HOME = {"root": "x", "home": "y"}
UNLOCKED = "unlocked: .* "
WRONG = "wrong_passphrase: .* disk "
GIVES_UP, GAVE_UP = "gave_up: .* was sent", "gave_up: .* not sent"
# The disk's own process may ask for a TPM's PIN.
PIN = """
echo 0::/system.slice/systemd-cryptsetup@root.service >FOLDER/cgroup
sh -c 'mount --bind FOLDER/cgroup /proc/$$/cgroup
    exec systemd-ask-password --no-tty --timeout=0 --id=tpm2-pin PIN:' >>FOLDER/tried &
"""
OPENED = "touch FOLDER/keys/open FOLDER/opened/open"
GAVE_UP_ON_ANOTHER = f"{OPENED}; touch FOLDER/keys/root FOLDER/failed/root"
# Nobody waits for another prompt as long as usual.
SHORTLY = "sed -i 's/-gt 30 /-gt 4 /' FOLDER/cryptroot-unlock"
NOT_YET = f"{SHORTLY}; {OPENED}; touch FOLDER/keys/root"
STRAY = f"""
{SHORTLY}
systemd-ask-password --no-tty --timeout=0 --id=cryptsetup:x X >>FOLDER/tried &
"""
# The prompt that is found first is the data disk's.
HOME_FIRST = f"cd {PROMPTS}; mv $(grep -l home ask.*) ask.000; cd -"

SSHD_CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PidFile none
ForceCommand {shell} {folder}/cryptroot-unlock
"""


@contextlib.contextmanager
def systemd(  # noqa: PLR0913 - most tests want one or two of them
    folder: Path,
    keys: dict[str, str],
    setup: str = "",
    *,
    then: str = "",
    options: str = "",
    shell: str = "dash",
) -> Iterator[Settings]:
    """Run OpenSSH in a simulated systemd initrd, which crypttab's `options` apply to.

    Run `setup` before its disks ask, all at once. Run `then` when they do, before
    OpenSSH starts. The file `tried` lists the passphrases that each disk was given.
    """
    for name in ("keys", "opened", "failed", "units", "etc"):
        (folder / name).mkdir()
    for disk, passphrase in keys.items():
        (folder / "keys" / disk).write_text(passphrase)
    key, port = new_key(), free_port()
    key.write_private_key_file(str(folder / "host_key"))
    settings = settings_at(folder, port, key)
    systemctl = (INITRDS / "systemctl.sh").read_text().replace("FOLDER", str(folder))
    for name, text in {
        "tried": "",
        "options": options,
        "systemctl": systemctl,
        "passwd": f"root:x:1:1::{folder}:/bin/sh\n",
        "shadow": "root:*:1::::::\n",  # or the account is locked
        "group": "",  # nobody can give a terminal to the group tty
        "crypttab": "".join(f"{disk} /dev/x none\n" for disk in keys),
        "initrd-release": "",
        "sshd_config": SSHD_CONFIG.format(folder=folder, port=port, shell=shell),
        "cryptroot-unlock": SCRIPT.read_text(),
    }.items():
        (folder / name).write_text(text)
    (folder / "systemctl").chmod(0o755)
    layers = f"lowerdir=/etc,upperdir={folder}/etc/upper,workdir={folder}/etc/work"
    lines = [
        f"cd {folder}; mount -t tmpfs none etc; mkdir etc/upper etc/work",
        f"mount -t overlay none /etc -o {layers}",
        "cp --remove-destination passwd shadow group crypttab initrd-release /etc",
        f"mount --bind systemctl {need('systemctl')}",
        f"mount -t tmpfs none /run; mkdir -p /run/sshd {PROMPTS}",
        setup.replace("FOLDER", str(folder)),
        *(f"sh {INITRDS}/cryptsetup.sh {folder} {disk} &" for disk in keys),
        f"until [ $(grep -ls Id=cryptsetup {PROMPTS}/ask.* | wc -l) = {len(keys)} ]",
        "do sleep 0.05; done" if keys else "do break; done",
        then,
        f"{AS_USER_1} {need('sshd')} -D -e -f {folder}/sshd_config & wait",
    ]
    with process(port, "\n".join(lines), *ALONE):
        yield settings


CASES = {
    # A data disk that asks first does not keep the root disk waiting.
    "root disk first": (
        *(HOME, {"then": HOME_FIRST}),
        {"x": f"{WRONG}home; unlocked: root", "y": f"{UNLOCKED}home."},
        ["root x", "home x", "home y"],
    ),
    "gives up": (
        *(ROOT, {}),
        {"1": f"{WRONG}root", "2": WRONG, "3": GIVES_UP, "x": GAVE_UP},
        ["root 1", "root 2", "root 3"],
    ),
    "every disk open": ({}, {"setup": OPENED}, {"x": "already_open: "}, []),
    "another may ask soon": ({}, {"setup": NOT_YET}, {"x": "not_asked: "}, []),
    "gave up on another": (
        *({}, {"setup": GAVE_UP_ON_ANOTHER}),
        *({"x": "error: .* a disk is open, and systemd gave up on another"}, []),
    ),
    "PIN and passphrase asked for": (
        *(ROOT, {"setup": PIN}),
        {"1": f"{WRONG}root", "x": f"{UNLOCKED}root."},
        ["root 1", "root x"],
    ),
    "asked for by another process": (
        *({}, {"setup": STRAY}),
        *({"x": "error: .*: process [0-9]+ asks, .* not sent"}, []),
    ),
    "booted": (ROOT, {"setup": "rm /etc/initrd-release"}, {"x": "up: "}, []),
    "no helper": (
        *(ROOT, {"setup": f"mount --bind /dev/null {HELPER}"}),
        *({"x": f"error: .* {HELPER} is missing.* not sent"}, []),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
def test_each_outcome_of_a_systemd_initrd(tmp_path: Path, case: Any) -> None:
    """And each disk is given what is meant for it, and nothing else."""
    keys, options, expected, tried = case
    with systemd(tmp_path, keys, **options) as settings:
        for passphrase, pattern in expected.items():
            message = unlock(settings, passphrase)
            assert re.match(pattern, message), (passphrase, message)
        assert (tmp_path / "tried").read_text().splitlines() == tried


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["dash", "busybox sh", "bash --posix"])
def test_any_passphrase_works_in_any_shell(tmp_path: Path, shell: str) -> None:
    need(shell.partition(" ")[0])
    keys = {"Дом-1": ODD_PASSPHRASE}
    with systemd(tmp_path, keys, shell=shell) as settings:
        assert re.match(f"{WRONG}Дом-1", unlock(settings, "wrong"))
        assert re.match(f"{UNLOCKED}Дом-1", unlock(settings, ODD_PASSPHRASE))
        tried = (tmp_path / "tried").read_text().splitlines()
    assert tried == ["Дом-1 wrong", f"Дом-1 {ODD_PASSPHRASE}"]


def test_a_disk_opened_at_the_console_is_not_unlocked(tmp_path: Path) -> None:
    console = (
        "(until [ -e FOLDER/console ]; do sleep 0.1; done;"
        " echo x | systemd-tty-ask-password-agent --query) &"
    )
    with systemd(tmp_path, ROOT, console) as settings:
        program = with_limits(tmp_path, UNLOCK_SECONDS=18)
        with about_to_send(settings, "x", program=program) as child:
            (tmp_path / "console").touch()
            wait_for((tmp_path / "opened/root").exists)
            result = child.finish()
        assert (result["outcome"], result["sent"]) == ("not_confirmed", True)
        assert (tmp_path / "tried").read_text() == "root x\n"


OURS = f"disk{os.getpid()}"  # no other test has a disk of this name


def test_a_prompt_that_lingers_is_no_second_one(tmp_path: Path) -> None:
    """On a busy server, systemd may take a while to read the answer."""
    with systemd(tmp_path, {OURS: "x"}) as settings:
        with about_to_send(settings, "x") as child:
            asker = wait_for_process(f"--id=cryptsetup:/dev/{OURS}")
            os.kill(asker, signal.SIGSTOP)
            threading.Timer(1, os.kill, (asker, signal.SIGCONT)).start()
            result = child.finish()
        assert result["outcome"] == "unlocked"


def test_a_person_at_a_terminal_types_unseen(tmp_path: Path) -> None:
    """Whoever hangs up instead has not answered, and used up no try."""
    with systemd(tmp_path, {OURS: "x"}, options=",tries=0") as settings:
        command = ssh_to(tmp_path, settings)
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        assert ended.stdout.decode().startswith(f"Please unlock disk {OURS}")
        assert ended.returncode not in (0, 255)
        for typed, said in (
            ("secret", "cryptsetup: cryptsetup failed, bad password or options?"),
            ("x", f"cryptsetup: {OURS} set up successfully"),
        ):
            with subprocess.Popen(
                [*command, "-tt"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ) as person:
                try:
                    asker = wait_for_process(f"Please unlock disk {OURS}:")
                    with Path(f"/proc/{asker}/fd/0").open() as file:
                        wait_for(lambda: not termios.tcgetattr(file)[3] & termios.ECHO)
                    shown = person.communicate(f"{typed}\n".encode())[0].decode()
                finally:
                    person.kill()
            assert said in shown
            assert "secret" not in shown
        assert (tmp_path / "tried").read_text() == f"{OURS} secret\n{OURS} x\n"
