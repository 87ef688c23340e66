"""The dialect systemd, where a virtual machine is not needed.

OpenSSH is real, and so are systemd's `systemd-ask-password` and its agent, and the
shells. The scripts in `initrds` do what is left: disks that open and that do not.
"""

import contextlib
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import PASSPHRASE, PROGRAM, environment, need
from homelab import bind, new_key, public_line
from ssh_servers import free_port, prepare_sshd, process
from test_daemon import wait_for
from test_unlock import ODD, unlock

import waker

SCRIPTS = Path(__file__).with_name("initrds")
SYSTEMD = waker.parse_dialect("systemd")
UNCONFIRMED = "not confirmed: no answer came after the passphrase was sent; "


@dataclass
class Initrd:
    """An initrd that runs, and the folder in which it shows what happens."""

    machine: waker.Machine
    folder: Path

    def tried(self) -> list[str]:
        """All passphrases that its disks were given, each after the disk's name."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "tried").read_text().splitlines()
        return []


def script(folder: Path, name: str) -> Path:
    """Copy a script, with the name of its folder in it."""
    path = folder / name
    text = (SCRIPTS / name).read_text()
    path.write_text(text.replace("FOLDER", shlex.quote(str(folder))))
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def sshd(
    folder: Path,
    dialect: waker.Dialect,
    keys: Mapping[str, str],
    script: str,
    config: str = "",
) -> Iterator[Initrd]:
    """Run a script, in it OpenSSH at SSHD, in namespaces that end when it ends.

    Then the system is up.
    """
    our_key = new_key()
    our_key.write_private_key_file(str(folder / "ssh_key"))
    for name in ("keys", "opened", "failed"):
        (folder / name).mkdir()
    for disk, passphrase in keys.items():
        (folder / "keys" / Path(disk).name).write_text(passphrase)
    (folder / "seconds").write_text("0.2")
    port, host_key, start = prepare_sshd(folder, public_line(our_key), config)
    system_port = free_port()
    machine = waker.Machine(
        host="127.0.0.1",
        dialect=dialect,
        initrd_port=port,
        system_port=system_port,
        user="root",
        key=folder / "ssh_key",
        host_keys=waker.HostKey.parse_all(host_key),
    )
    options = ("--pid", "--fork", "--kill-child", "--mount-proc")
    with process(port, script.replace("SSHD", start), *options) as server:

        def boot() -> None:
            server.wait()
            with bind("127.0.0.1", system_port) as system:
                system.listen()
                over.wait()

        over = threading.Event()
        booting = threading.Thread(target=boot)
        booting.start()
        try:
            yield Initrd(machine, folder)
        finally:
            over.set()
    booting.join()


@contextlib.contextmanager
def systemd(
    folder: Path,
    keys: Mapping[str, str],
    *,
    initrd: bool = True,
    before: str = "",
    until: str = ".",
    config: str = "",
) -> Iterator[Initrd]:
    """Run an initrd of systemd's kind.

    Its first disk asks at once, and the others when there is a file named `until`.
    """
    for program in ("systemd-ask-password", "systemd-tty-ask-password-agent"):
        need(program)
    place = shlex.quote(str(folder / "etc"))
    cryptsetup, quoted = script(folder, "cryptsetup.sh"), shlex.quote(str(folder))
    lines = [
        f"mkdir {place}; mount -t tmpfs none {place}; mkdir {place}/upper {place}/work",
        f"mount -t overlay none /etc -o lowerdir=/etc,upperdir={place}/upper"
        f",workdir={place}/work",
        "touch /etc/initrd-release" if initrd else "rm -f /etc/initrd-release",
        f"mount --bind {script(folder, 'systemctl.sh')} {need('systemctl')}",
        "SSHD & mkdir -p /run/systemd/ask-password",
        before,
        *(
            f"(until [ -e {quoted}/{until if number else '.'} ]; do sleep 0.1; done;"
            f" sh {cryptsetup} {quoted} {disk}) &"
            for number, disk in enumerate(keys)
        ),
        "wait",
    ]
    with sshd(folder, SYSTEMD, keys, "\n".join(lines), config) as started:
        yield started


@pytest.mark.parametrize("dialect", waker.DIALECTS, ids=lambda row: row.name)
def test_a_shell_that_repeats_the_command_tells_no_event(
    dialect: waker.Dialect,
) -> None:
    assert not dialect.events.search(f"sh: {dialect.command}: not found\n")


def test_systemd_gets_one_line_and_unlocks(tmp_path: Path) -> None:
    with systemd(tmp_path, {"root": PASSPHRASE}) as initrd:
        outcome = unlock(initrd.machine)
        assert outcome == waker.Result("unlocked", True, "Unlocked: root.")
        assert initrd.tried() == [f"root {PASSPHRASE}"]


def test_systemd_tells_a_wrong_passphrase_and_warns(tmp_path: Path) -> None:
    with systemd(tmp_path, {"root": PASSPHRASE}) as initrd:
        outcome = unlock(initrd.machine, "wrong")
        assert outcome.outcome == "wrong_passphrase"
        assert outcome.message.startswith(
            "Wrong passphrase for disk root. Be careful: "
        )
        assert "after another wrong passphrase, systemd may give up" in outcome.message
        outcome = unlock(initrd.machine)
        assert outcome.message == "Unlocked: root."
        assert initrd.tried() == ["root wrong", f"root {PASSPHRASE}"]


def test_systemd_is_never_given_an_empty_passphrase(tmp_path: Path) -> None:
    with systemd(tmp_path, {"root": PASSPHRASE, "home": "another"}) as initrd:
        for _ in range(2):
            unlock(initrd.machine, "wrong")
        time.sleep(1)  # in which an end of input would have been told
        assert set(initrd.tried()) == {"home wrong", "root wrong"}


@pytest.mark.parametrize("passphrase", [" ", ODD])
def test_systemd_gets_odd_passphrases_exactly(tmp_path: Path, passphrase: str) -> None:
    with systemd(tmp_path, {"root": passphrase}) as initrd:
        outcome = unlock(initrd.machine, passphrase)
        assert outcome.outcome == "unlocked"
        assert initrd.tried() == [f"root {passphrase}"]


def test_systemd_unlocks_several_disks_with_one_passphrase(tmp_path: Path) -> None:
    with systemd(tmp_path, dict.fromkeys(("home", "root"), PASSPHRASE)) as initrd:
        outcome = unlock(initrd.machine)
        assert outcome.message in ("Unlocked: home, root.", "Unlocked: root, home.")
        assert sorted(initrd.tried()) == [f"home {PASSPHRASE}", f"root {PASSPHRASE}"]


def test_systemd_answers_a_disk_that_asks_later(tmp_path: Path) -> None:
    keys = dict.fromkeys(("root", "home"), PASSPHRASE)
    with systemd(tmp_path, keys, until="tried") as initrd:
        outcome = unlock(initrd.machine)
        assert outcome == waker.Result("unlocked", True, "Unlocked: root, home.")


def test_systemd_is_given_nothing_more_when_waker_has_gone(tmp_path: Path) -> None:
    keys = dict.fromkeys(("root", "home"), PASSPHRASE)
    with systemd(tmp_path, keys, until="gone") as initrd:
        with subprocess.Popen(
            [sys.executable, PROGRAM, "unlock"],
            env=environment(initrd.machine.settings()),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        ) as child:
            assert child.stdin
            child.stdin.write(PASSPHRASE.encode())
            child.stdin.close()
            wait_for(initrd.tried)
            child.kill()
        (tmp_path / "gone").touch()
        unlock(initrd.machine, "wrong")  # for which the other disk has to ask
        assert initrd.tried() == [f"root {PASSPHRASE}", "home wrong"]


def test_systemd_names_the_disk_that_wants_another_passphrase(tmp_path: Path) -> None:
    with systemd(tmp_path, {"home": "another", "root": PASSPHRASE}) as initrd:
        outcome = unlock(initrd.machine)
        assert outcome.outcome == "wrong_passphrase"
        assert outcome.message.startswith("Wrong passphrase for disk home. ")
        outcome = unlock(initrd.machine, "another")
        assert outcome == waker.Result("unlocked", True, "Unlocked: home.")


def test_systemd_that_gives_up_is_told_and_gets_nothing_more(tmp_path: Path) -> None:
    with systemd(tmp_path, {"root": PASSPHRASE}) as initrd:
        for _ in range(2):
            assert unlock(initrd.machine, "wrong").outcome == "wrong_passphrase"
        outcome = unlock(initrd.machine, "wrong")
        assert outcome.outcome == "gave_up"
        assert "the initrd has given up on a disk" in outcome.message
        assert outcome.sent
        outcome = unlock(initrd.machine)
        assert "the initrd has given up on a disk" in outcome.message


def test_systemd_that_gave_up_on_one_disk_and_opened_another_claims_neither(
    tmp_path: Path,
) -> None:
    with systemd(tmp_path, {"home": "another", "root": PASSPHRASE}) as initrd:
        for _ in range(2):
            assert unlock(initrd.machine, "wrong").outcome == "wrong_passphrase"
        outcome = unlock(initrd.machine)
        assert "the initrd has given up on a disk" in outcome.message
        assert "root" not in outcome.message


def test_names_of_disks_may_be_long(tmp_path: Path) -> None:
    names = [letter * 240 for letter in "ab"]
    with systemd(tmp_path, dict.fromkeys(names, PASSPHRASE)) as initrd:
        assert unlock(initrd.machine, "wrong").outcome == "wrong_passphrase"
        assert unlock(initrd.machine).outcome == "unlocked"


def test_systemd_whose_disks_are_open_gets_nothing(tmp_path: Path) -> None:
    with systemd(tmp_path, {}) as initrd:
        outcome = unlock(initrd.machine)
        assert outcome.message.startswith("no passphrase is needed: every disk is")


def test_systemd_that_is_not_that_far_yet_is_waited_for(tmp_path: Path) -> None:
    with systemd(tmp_path, {"root": PASSPHRASE}, before="sleep 3") as initrd:
        outcome = unlock(initrd.machine)
        assert outcome.message == "Unlocked: root."


def test_the_booted_system_is_not_taken_for_an_initrd(tmp_path: Path) -> None:
    with systemd(tmp_path, {"root": PASSPHRASE}, initrd=False) as initrd:
        outcome = unlock(initrd.machine)
        assert "the system is already up" in outcome.message
        assert initrd.tried() == []


def test_a_passphrase_goes_to_no_prompt_that_is_not_of_a_disk(tmp_path: Path) -> None:
    pin = "systemd-ask-password --no-tty --timeout=0 --id=tpm2-pin PIN:"
    before = f"{pin} >{shlex.quote(str(tmp_path / 'pin'))} &"
    with systemd(tmp_path, {"root": PASSPHRASE}, before=before) as initrd:
        outcome = unlock(initrd.machine)
        assert "a prompt is not for a disk; answer it by hand" in outcome.message
        assert not outcome.sent
        assert initrd.tried() == []
    assert (tmp_path / "pin").read_text() == ""


def test_an_initrd_that_makes_way_for_the_system_has_not_given_up(
    tmp_path: Path,
) -> None:
    (tmp_path / "over").touch()
    with systemd(tmp_path, {"root": PASSPHRASE}) as initrd:
        outcome = unlock(initrd.machine, seconds=10)
        assert outcome.message.startswith(UNCONFIRMED)


def test_a_systemd_that_tells_nothing_has_unlocked_nothing(tmp_path: Path) -> None:
    (tmp_path / "silent").touch()
    with systemd(tmp_path, {"root": PASSPHRASE}) as initrd:
        outcome = unlock(initrd.machine, seconds=10)
        assert outcome.message.startswith(UNCONFIRMED)


def test_a_systemd_without_an_agent_is_told(tmp_path: Path) -> None:
    nowhere = "SetEnv PATH=/nonexistent"
    with systemd(tmp_path, {"root": PASSPHRASE}, config=nowhere) as initrd:
        outcome = unlock(initrd.machine)
        assert "there is no unlock command" in outcome.message
