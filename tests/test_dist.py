"""The one file: it is what the two files are, and it runs alone."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import CHECKOUT, PASSPHRASE, PROGRAM, daemon, make, need
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


def test_the_changes_begin_with_its_version() -> None:
    changes = CHECKOUT.joinpath("CHANGELOG.md").read_text()
    first = re.findall(r"(?m)^## (.*)$", changes)[0]
    assert first == waker.__version__
