"""The one file that `make dist` makes, and what it must do as the checkout does."""

import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHECKOUT, PASSPHRASE, PIN, daemon, environment, make, need
from machine import Machine

import waker

NAMES = ["waker.py", "ui.html", "__main__.py"]  # and the code, if it is compiled
VERSION = f"waker {waker.__version__}\n"


def pack(source: Path, target: Path, *limits: str) -> Path:
    """Pack the program with this Python."""
    command = [*limits, sys.executable, "-IS", str(CHECKOUT / "box/pack.py")]
    subprocess.run([*command, str(source), str(target)], check=True)
    return target


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return pack(CHECKOUT, tmp_path / "waker")


def run(program: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run it with this Python; returns its status and all that it printed."""
    ended = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=environment(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


def change(program: Path, name: str, edit: Callable[[bytes], bytes]) -> None:
    """Change one of the files in the program."""
    with zipfile.ZipFile(program) as archive:
        files = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(program, "w") as archive:
        for each, data in files.items():
            archive.writestr(each, edit(data) if each == name else data)


# ---- What is in it -------------------------------------------------------------------


def test_the_same_sources_make_the_same_program(tmp_path: Path) -> None:
    """So people can compare what is installed with what they have read."""
    built = []
    for zone in ("UTC", "EST5EDT"):
        make(tmp_path / zone, "dist", f"TZ={zone}")
        built.append(tmp_path / zone / "dist/waker")
    assert built[0].read_bytes() == built[1].read_bytes()
    assert built[0].stat().st_mode & 0o777 == 0o755  # README: sudo dist/waker check
    with zipfile.ZipFile(built[0]) as archive:
        assert archive.namelist() == [*NAMES, "waker.pyc"]
        for name in NAMES[:2]:
            assert archive.read(name) == (CHECKOUT / name).read_bytes()
    # Its files have other dates than their copies, and the archive has none.
    whole = {
        pack(origin, tmp_path / "packed").read_bytes()
        for origin in (CHECKOUT, tmp_path / "UTC", built[1])
    }
    assert len(whole) == 1


def test_what_cannot_be_packed_replaces_no_program(tmp_path: Path) -> None:
    program = pack(CHECKOUT, tmp_path / "waker")
    before = program.read_bytes()
    for name, data in (("waker.py", b"no Python"), ("ui.html", None)):
        folder = tmp_path / name
        folder.mkdir()
        for each in NAMES[:2]:
            if each != name:
                folder.joinpath(each).write_bytes((CHECKOUT / each).read_bytes())
            elif data:
                folder.joinpath(each).write_bytes(data)
        with pytest.raises(subprocess.CalledProcessError):
            pack(folder, program)
    with pytest.raises(subprocess.CalledProcessError):
        pack(CHECKOUT / "README.md", program)
    with pytest.raises(subprocess.CalledProcessError):
        pack(CHECKOUT, program, need("prlimit"), "--fsize=99999")  # the disk is full
    assert program.read_bytes() == before


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_the_compiled_code_is_what_runs(program: Path, zone: str) -> None:
    """Python compares time stamps, if there are any, in local time."""
    change(program, "waker.py", lambda _: b"no Python")
    assert run(program, "--version", TZ=zone) == (0, VERSION)


def test_another_python_takes_the_source(program: Path) -> None:
    """It does not know the number that begins the code."""
    change(program, "waker.pyc", lambda code: b"\0\0\r\n" + code[4:99])
    assert run(program, "--version") == (0, VERSION)


# ---- What it does --------------------------------------------------------------------


def test_it_works_from_a_read_only_file_system(
    machine: Machine, program: Path, tmp_path: Path
) -> None:
    script = 'mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"; exec "$@"'
    read_only = "unshare", "--mount", "sh", "-ec", script, str(tmp_path)
    settings = machine.ask().settings()
    command = (sys.executable, str(program))
    with daemon(settings, *read_only, program=command) as started:
        client = started.client.log_in()
        assert client.call("GET", "/").body == CHECKOUT.joinpath("ui.html").read_bytes()
        assert client.unlock().json["message"] == "Unlocked: root."
    assert machine.received() == [PASSPHRASE.encode()]
    own = {"WAKER_PIN": PIN, "WAKER_LISTEN": "127.0.0.1:0"}
    status, shown = run(program, "check", **machine.ask().settings(), **own)
    assert (status, shown.count("WRONG")) == (0, 0), shown
    assert "root can log in" in shown


def test_an_upgrade_does_not_disturb_a_daemon_that_runs(
    machine: Machine, program: Path, tmp_path: Path
) -> None:
    """In the new archive, everything has another place."""
    newer = tmp_path / "newer"
    newer.mkdir()
    for name in NAMES[:2]:
        newer.joinpath(name).write_bytes((CHECKOUT / name).read_bytes() + b"\n" * 999)
    command = (sys.executable, str(program))
    with daemon(machine.ask().settings(), program=command) as started:
        client = started.client.log_in()
        page = client.call("GET", "/").body
        pack(newer, program)
        assert client.unlock().json["message"] == "Unlocked: root."
        assert client.call("GET", "/").body == page


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--help"], 0, "usage: waker"),
        (["shutdown"], 2, "usage: waker"),
        (["--env-file", "/nowhere"], 78, "/nowhere: No such file"),
        (["unlock"], 78, "WAKER_HOMELAB_HOST is not set"),
    ],
    ids=str,
)
def test_its_statuses_are_those_of_the_checkout(
    program: Path, arguments: list[str], status: int, words: str
) -> None:
    seen, shown = run(program, *arguments, WAKER_INITRD_SSH_PORT="2222")
    assert seen == status
    assert words in shown


def test_a_traceback_names_the_line(program: Path) -> None:
    """As does the log, which names it without a traceback."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import waker; waker.parse_mac('')"
    )
    command = [sys.executable, "-c", code, str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    with pytest.raises(ValueError) as here:  # noqa: PT011 - the line matters
        waker.parse_mac("")
    line = traceback.extract_tb(here.tb)[-1].lineno
    assert f'File "waker.py", line {line}, in parse_mac' in ended.stderr
