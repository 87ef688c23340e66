"""The one file: it is what the two files are, and it runs alone; and the demo."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import CHECKOUT, PASSPHRASE, PROGRAM, Client, daemon, make, need, wait_for
from homelab import Homelab

import waker

SOURCE = Path(PROGRAM).read_text()
PAGE = CHECKOUT.joinpath("ui.html").read_text()


def test_it_is_the_source_with_the_page_inside_every_time(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "other"):
        make(folder, "dist")
        line = 'PAGE: Final = r"""\n'
        made = (folder / "dist" / "waker").read_text()
        assert made == SOURCE.replace(line, line + PAGE, 1)


@pytest.mark.parametrize("how", ["alone", "by a symlink"])
def test_it_serves_the_page_and_unlocks_without_any_other_file(
    how: str, lab: Homelab, config: waker.Config, tmp_path: Path
) -> None:
    make(tmp_path / "made", "dist")
    folder = tmp_path / "alone"
    folder.mkdir()
    program = (tmp_path / "made" / "dist" / "waker").rename(folder / "waker")
    if how == "by a symlink":
        program = tmp_path / "waker"
        program.symlink_to("alone/waker")
    assert program.stat().st_mode & 0o777 == 0o755
    with daemon(lab.settings(), program=(sys.executable, str(program))) as started:
        client = started.client.log_in()
        assert client.call("GET", "/").body == PAGE.encode()
        waker.wake(config)
        lab.wait_for("locked")
        answer = client.call("POST", "/api/unlock", {"passphrase": PASSPHRASE})
        assert (answer.status, answer.json["message"]) == (200, "Unlocked: cryptroot.")
    assert [path.name for path in folder.iterdir()] == ["waker"]


def test_the_checkout_can_be_run_by_a_symlink(lab: Homelab, tmp_path: Path) -> None:
    link = tmp_path / "waker"
    link.symlink_to(PROGRAM)
    with daemon(lab.settings(), program=(sys.executable, str(link))) as started:
        assert started.client.call("GET", "/").body == PAGE.encode()


def test_an_older_one_is_never_taken_for_it(tmp_path: Path) -> None:
    make(tmp_path, "dist")
    ahead = time.time() + 3600
    os.utime(tmp_path / "dist" / "waker", (ahead, ahead))
    page = tmp_path / "ui.html"
    page.write_text(page.read_text().replace("<title>", "<title>new "))
    command = [need("make"), "--silent", "-C", str(tmp_path), "dist"]
    subprocess.run(command, check=True)
    assert "<title>new " in (tmp_path / "dist" / "waker").read_text()
    for damage in (page.read_text() + '"""', ""):
        page.write_text(damage)
        assert subprocess.run(command, capture_output=True, check=False).returncode == 2
        assert "<title>new " in (tmp_path / "dist" / "waker").read_text()


DEMO_PARTS = "homelab", "cryptroot_unlock"
DEMO = sys.executable, str(CHECKOUT / "tests/homelab.py")


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*DEMO, "0.0.0.0:0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as started:
        yield started
        started.terminate()


def test_the_demo_can_be_shown_twice(demo: subprocess.Popen[str]) -> None:
    assert demo.stdin
    assert demo.stdout
    lines = [demo.stdout.readline().strip() for _ in range(5)]
    assert "listens on" in lines[-1]
    where, pin, passphrase = (line.split(None, 1)[1] for line in lines[:3])
    url = urlsplit(where)
    client = Client(url.port or 0, host=url.hostname or "").log_in(pin)

    def state() -> str:
        return str(client.call("GET", "/api/status").json["state"])

    for _ in range(2):
        assert state() == "off"
        client.call("POST", "/api/start", {"passphrase": passphrase})
        wait_for(lambda: state() == "up")
        demo.stdin.write("\n")
        demo.stdin.flush()
        wait_for(lambda: state() == "off")
    demo.stdin.close()
    assert state() == "off"
    demo.terminate()
    assert demo.wait() == 0


@pytest.mark.parametrize("wish", ["8080", "203.0.113.9:80", "box:80"])
def test_a_demo_that_cannot_listen_says_so(wish: str) -> None:
    ended = subprocess.run([*DEMO, wish], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "LISTEN must be a free ADDRESS:PORT of this box, such as 0.0.0.0:8080\n"
    )


def test_the_demo_needs_paramiko_and_nothing_else() -> None:
    sources = [CHECKOUT / "tests" / f"{name}.py" for name in DEMO_PARTS]
    lines = "".join(path.read_text() for path in sources)
    modules = set(re.findall(r"(?m)^ *(?:import|from) (\w+)", lines))
    assert modules - sys.stdlib_module_names == {"paramiko", "waker", *DEMO_PARTS[1:]}


def test_the_targets_of_make_are_in_columns(tmp_path: Path) -> None:
    lines = make(tmp_path, "help").stdout.splitlines()
    assert len(lines) > 10
    assert {line[19] for line in lines} == {" "}
    assert not [line for line in lines if line[20] == " " or len(line) > 80]


def test_the_changes_begin_with_its_version() -> None:
    changes = CHECKOUT.joinpath("CHANGELOG.md").read_text()
    first = re.findall(r"(?m)^## (.*)$", changes)[0]
    assert first == waker.__version__
