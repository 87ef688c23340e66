"""The one file that `make dist` makes, and what it must do as the checkout does."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import CHECKOUT, make, need, run_waker

import waker

SOURCES = ["waker.py", "ui.html"]
NAMES = [*SOURCES, "__main__.py"]  # and the code, if it is compiled


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
    command = sys.executable, str(program)
    ended = run_waker(*arguments, settings=variables, program=command)
    return ended.returncode, ended.stdout + ended.stderr


def replace(program: Path, name: str, data: bytes) -> None:
    """Replace a file in the program: the last one of a name counts."""
    with zipfile.ZipFile(program, "a") as archive, pytest.warns(match="Duplicate name"):
        archive.writestr(name, data)


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
        for name in SOURCES:
            assert archive.read(name) == (CHECKOUT / name).read_bytes()
    # Its files have other dates than their copies, and the archive has none.
    whole = {
        pack(origin, tmp_path / "packed").read_bytes()
        for origin in (CHECKOUT, tmp_path / "UTC", built[1])
    }
    assert len(whole) == 1


def test_what_cannot_be_packed_replaces_no_program(
    program: Path, tmp_path: Path
) -> None:
    before = program.read_bytes()
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    wrong.joinpath("ui.html").touch()
    wrong.joinpath("waker.py").write_text("no Python")
    full = need("prlimit"), "--fsize=99999"
    for source, limits in ((wrong, ()), (CHECKOUT / "README.md", ()), (CHECKOUT, full)):
        with pytest.raises(subprocess.CalledProcessError):
            pack(source, program, *limits)
        assert program.read_bytes() == before


def test_the_compiled_code_is_what_runs_unless_this_python_differs(
    program: Path,
) -> None:
    """Python compares time stamps, if there are any, in local time."""
    right = 0, f"waker {waker.__version__}\n"
    replace(program, "waker.py", b"no Python")
    for zone in ("UTC", "Europe/Berlin"):
        assert run(program, "--version", TZ=zone) == right
    # Python does not know the number that begins this code.
    replace(program, "waker.py", CHECKOUT.joinpath("waker.py").read_bytes())
    replace(program, "waker.pyc", b"\0\0\r\n" + b"code" * 24)
    assert run(program, "--version") == right


def test_its_statuses_and_messages_are_those_of_the_checkout(program: Path) -> None:
    assert run(program, "--help")[1].startswith("usage: waker [")
    for arguments in (["--env-file", "/nowhere"], ["unlock"]):
        here = run_waker(*arguments)
        assert here.returncode
        assert run(program, *arguments) == (here.returncode, here.stdout + here.stderr)
