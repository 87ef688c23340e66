"""The one file: it is what the two files are, and it runs alone."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from conftest import PASSPHRASE, PROGRAM, daemon, need
from homelab import Homelab

import waker

CHECKOUT = Path(PROGRAM).parent
SOURCE = Path(PROGRAM).read_text()
PAGE = CHECKOUT.joinpath("ui.html").read_text()


def make_dist(folder: Path) -> Path:
    """Make the one file of a copy, in a folder of its own."""
    for name in ("Makefile", "waker.py", "ui.html"):
        (folder / name).write_bytes((CHECKOUT / name).read_bytes())
    make = [need("make"), "--silent", "--always-make", "-C", str(folder), "dist"]
    subprocess.run(make, check=True)
    return folder / "dist" / "waker"


def test_it_is_the_source_with_the_page_inside_every_time(tmp_path: Path) -> None:
    made = [make_dist(tmp_path).read_text() for _ in range(2)]
    line = 'PAGE: Final = r"""\n'
    assert made[0] == made[1] == SOURCE.replace(line, line + PAGE, 1)


@pytest.mark.parametrize("how", ["alone", "by a symlink"])
def test_it_serves_the_page_and_unlocks_without_any_other_file(
    how: str, lab: Homelab, config: waker.Config, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("made", "alone", "links")]
    for folder in folders:
        folder.mkdir()
    program = make_dist(folders[0]).rename(folders[1] / "waker")
    if how == "by a symlink":
        program = folders[2] / "waker"
        program.symlink_to("../alone/waker")
    assert program.stat().st_mode & 0o777 == 0o755
    with daemon(lab.settings(), program=str(program)) as started:
        client = started.client.log_in()
        assert client.call("GET", "/").body == PAGE.encode()
        waker.send_magic_packet(config)
        lab.wait_for("locked")
        answer = client.call("POST", "/api/unlock", {"passphrase": PASSPHRASE})
        assert (answer.status, answer.json["message"]) == (200, "Unlocked: cryptroot.")
    assert [path.name for path in folders[1].iterdir()] == ["waker"]


def test_the_checkout_can_be_run_by_a_symlink(lab: Homelab, tmp_path: Path) -> None:
    link = tmp_path / "waker"
    link.symlink_to(PROGRAM)
    with daemon(lab.settings(), program=str(link)) as started:
        assert started.client.call("GET", "/").body == PAGE.encode()


def test_its_metadata_names_what_a_trial_has_to_install() -> None:
    # The expression, and how a block is read, are those of PEP 723.
    found = re.search(
        r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$",
        SOURCE,
    )
    assert found
    assert found["type"] == "script"
    lines = [line.removeprefix("#")[1:] for line in found["content"].splitlines()]
    assert tomllib.loads("\n".join(lines)) == {
        "requires-python": ">=3.11",
        "dependencies": ["paramiko>=2.12"],
    }
