"""The one file that `make dist` makes, and what it must do as the checkout does."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import (
    BOX,
    CHECKOUT,
    MACHINE,
    MODULE,
    PIN,
    blocks,
    daemon,
    environment,
    make,
    need,
    run_waker,
)
from machine import Machine
from packing import COMPILE, pack, run, unpack

TOP = ["ui.html", "waker.env.example", "waker.init", "waker.py", "waker.service"]
CODE = [*CHECKOUT.glob("box/**/*.py")]
RUN = {"__main__.py", "waker.py", *(str(p.relative_to(CHECKOUT)) for p in CODE)}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The one file, as people copy it."""
    return pack(CHECKOUT, tmp_path / "waker")


def replace(program: Path, name: str, data: bytes) -> None:
    """Replace a file in the program: the last one of a name counts."""
    with zipfile.ZipFile(program, "a") as archive, pytest.warns(match="Duplicate name"):
        archive.writestr(name, data)


# ---- What is in it -------------------------------------------------------------------


def test_the_file_has_each_source_and_nothing_else(program: Path) -> None:
    folders = [*CHECKOUT.glob("box/**/*"), *CHECKOUT.glob("server/**/*")]
    sources = {str(path.relative_to(CHECKOUT)) for path in folders if path.is_file()}
    sources = {name for name in sources if "__pycache__" not in name}
    with zipfile.ZipFile(program) as archive:
        assert archive.namelist() == sorted({"__main__.py", *TOP, *sources})
        for name in (*TOP, *sources):
            assert archive.read(name) == CHECKOUT.joinpath(name).read_bytes()


def test_the_same_sources_make_the_same_file_with_any_python(
    program: Path, tmp_path: Path
) -> None:
    """In any time zone, and even from files that were unpacked."""
    make(tmp_path / "copy", "dist", "PYTHON=/usr/bin/python3", "TZ=EST5EDT")
    made = tmp_path / "copy/dist/waker"
    assert made.read_bytes() == program.read_bytes()
    assert made.stat().st_mode & 0o777 == 0o755  # README: sudo dist/waker check
    for origin in (program, unpack(program, tmp_path / "unpacked")):
        assert pack(origin, tmp_path / "again").read_bytes() == program.read_bytes()


def test_what_cannot_be_packed_replaces_no_program(
    program: Path, tmp_path: Path
) -> None:
    before = program.read_bytes()
    wrong = unpack(program, tmp_path / "wrong")
    wrong.joinpath("waker.py").write_text("no Python")
    full = need("prlimit"), "--fsize=99999"
    no_zip, half = CHECKOUT / "README.md", tmp_path / "half"
    half.mkdir()
    for source, by in ((wrong, ()), (no_zip, ()), (half, ()), (CHECKOUT, full)):
        with pytest.raises(subprocess.CalledProcessError):
            pack(source, program, COMPILE, by=by)
        assert program.read_bytes() == before
    assert {*tmp_path.iterdir()} == {program, wrong, half}


# ---- What is installed ---------------------------------------------------------------


@pytest.mark.slow
def test_what_is_installed_is_what_was_read(program: Path, tmp_path: Path) -> None:
    """README's command shows it. The code runs, so to compare sources shows nothing."""
    need("cmp")
    installed = pack(program, tmp_path / "installed", COMPILE)
    with zipfile.ZipFile(installed) as archive:
        names = {name for name in archive.namelist() if name.endswith(".pyc")}
    assert names == {f"{name}c" for name in RUN}
    commands = "\n".join(blocks("README.md", "## Read what you run"))
    commands = commands.replace("/usr/local/bin/waker", str(installed))
    commands = commands.replace("/usr/bin/python3", sys.executable)
    script = ["sh", "-ec", commands]
    subprocess.run(script, cwd=tmp_path, check=True)

    other = CHECKOUT.joinpath("waker.py").read_bytes().replace(b"< expiry", b"> expiry")
    tampered = unpack(program, tmp_path / "tampered")
    tampered.joinpath("waker.py").write_bytes(other)
    code = pack(tampered, tmp_path / "code", COMPILE)
    with zipfile.ZipFile(code) as archive:
        replace(installed, "waker.pyc", archive.read("waker.pyc"))
    ended = subprocess.run(script, cwd=tmp_path, capture_output=True, check=False)
    assert (ended.returncode, b"differ" in ended.stdout) == (1, True)


STRANGERS = {
    # Each would run in place of a source that somebody has read.
    "box/check.pyc": "would run in place of its source",
    "waker/__init__.py": "is none of waker's files",
    "argparse.py": "is none of waker's files",
    # This would be written elsewhere, by root.
    "box/../../elsewhere.py": "is no file's name",
}


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("options", [[COMPILE], []], ids=["compiled", "packed"])
def test_a_file_with_other_members_is_not_installed(
    program: Path, tmp_path: Path, name: str, options: list[str]
) -> None:
    with zipfile.ZipFile(program, "a") as archive:
        archive.writestr(name, b"")
    command = [sys.executable, str(CHECKOUT / "box/pack.py"), *options]
    command += [str(program), str(tmp_path / "installed")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"{name} {STRANGERS[name]}\n" in ended.stderr
    assert (ended.returncode, [*tmp_path.iterdir()]) == (1, [program])


def test_the_compiled_code_is_what_runs_unless_this_python_differs(
    program: Path,
) -> None:
    """Python compares time stamps, if there are any, in local time."""
    right = 0, run_waker("--version").stdout
    pack(program, program, COMPILE)
    replace(program, "waker.py", b"no Python")
    for zone in ("UTC", "Europe/Berlin"):
        assert run(program, "--version", TZ=zone) == right
    # Python does not know the number that begins this code.
    replace(program, "waker.py", CHECKOUT.joinpath("waker.py").read_bytes())
    replace(program, "waker.pyc", b"\0\0\r\n" + b"code" * 24)
    assert run(program, "--version") == right


# ---- What it does --------------------------------------------------------------------


def test_its_statuses_and_messages_are_those_of_the_checkout(program: Path) -> None:
    for arguments in (["--env-file", "/nowhere"], ["unlock"], ["check"]):
        here = run_waker(*arguments, program=BOX)
        assert here.returncode
        assert run(program, *arguments) == (here.returncode, here.stdout + here.stderr)


def test_what_check_accepts_can_be_served(program: Path) -> None:
    """A damaged page stops both."""
    replace(program, "ui.html", b"")
    for command in ("check", "serve"):
        ended = run(program, command, **MACHINE, WAKER_PIN=PIN)
        assert ended == (78, "ui.html is damaged; reinstall it\n")


def test_help_lists_each_command_and_a_wrong_one_is_told_them(program: Path) -> None:
    shown = run(program, "--help")
    own = run_waker("--help", program=MODULE).stdout
    commands = "serve", "unlock", "state", "install", "prepare", "check", "uninstall"
    assert shown[1].startswith("usage: waker [")
    assert re.findall(r"(?m)^  ([a-z]+)  +\w", shown[1]) == [*commands]
    assert re.findall(r"(?m)^  ([a-z]+)  +\w", own) == [*commands[:3]]
    for wrong in (["chekc"], ["--env-file", "check", "chekc"]):
        status, error = run(program, *wrong)
        assert status == 2
        assert re.findall("[a-z]+", error.split("choose from")[1]) == [*commands]


@pytest.mark.slow
def test_a_command_may_stand_behind_options(program: Path, tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    file.write_text("no setting")
    for options in (["--env-file", str(file)], [f"--env-file={file}"]):
        for arguments in ([*options, "check"], ["check", *options]):
            status, shown = run(program, *arguments)
            assert (status, shown.startswith(f"{file}, line 1 must")) == (78, True)
    for command in ("install", "uninstall", "prepare"):
        usage = f"usage: waker {command} ["
        assert run(program, command, "--help")[1].startswith(usage)


def test_it_runs_from_any_folder_and_under_any_name(
    program: Path, tmp_path: Path
) -> None:
    """Another package may have the name of ours, as PyPI's python-box does."""
    for folder in ("here", "packages/box"):
        (tmp_path / folder).mkdir(parents=True)
    for module in ("here/box.py", "here/waker.py", "packages/box/__init__.py"):
        (tmp_path / module).write_text("raise SystemExit('another one')")
    moved = program.rename(tmp_path / "here/its name.zip.new")
    ended = subprocess.run(
        [sys.executable, str(moved), "check"],
        cwd=tmp_path / "here",
        env=environment({"PYTHONPATH": str(tmp_path / "packages"), "WAKER_PIN": PIN}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 78
    assert ended.stderr.startswith("WAKER_HOMELAB_HOST is not set")


def test_neither_the_daemon_nor_an_unlock_loads_what_sets_up_a_box(
    machine: Machine, program: Path
) -> None:
    replace(program, "box/__init__.py", b"raise SystemExit('box is loaded')")
    assert run(program, "check") == (1, "box is loaded\n")
    command = sys.executable, str(program)
    with daemon(machine.ask().settings(), program=command) as started:
        assert started.client.log_in().unlock().status == 200
