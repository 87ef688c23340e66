"""What `make card` makes, and what a Raspberry Pi does with it.

`make test-vm` has cloud-init and systemd as well, but takes minutes and tries less.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import CHECKOUT, MACHINE, PIN, make, need
from stand_ins import calls, mounted, stub

FAIL_IF_TOLD = 'test ! -e "${0%/*}/no ${0##*/} $1"'  # by a file of that name
SETTINGS = "".join(f"{n}={v}\n" for n, v in (MACHINE | {"WAKER_PIN": PIN}).items())
SECRETS = {"waker.env", "ssh_key", "ssh_key.pub"}
INSTALLED = {"waker", "waker.service"} | SECRETS
FILES = INSTALLED | {"pack.py"}
REPORT = "report.txt"
RESTART = ["systemctl enable waker", "systemctl restart waker"]


@pytest.fixture(scope="session")
def new_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make card` makes, with right settings."""
    need("ssh-keygen")
    folder = tmp_path_factory.mktemp("checkout")
    make(folder, "card")
    folder.joinpath("dist/card/waker/waker.env").write_text(SETTINGS)
    return folder / "dist/card"


class Pi:
    """The folders to which the script writes, and what it calls."""

    def __init__(self, folder: Path, new_card: Path) -> None:
        self.folder, self.stubs = folder, folder / "stubs"
        for name in ("etc", "var/lib/cloud/scripts/per-boot", "usr/local/bin", "stubs"):
            folder.joinpath(name).mkdir(parents=True)
        # These programs cannot run here, or take long.
        for name in ("apt-get", "dpkg", "sleep", "sync", "systemctl"):
            stub(self.stubs / name, FAIL_IF_TOLD)
        shutil.copytree(new_card, folder / "boot/firmware")
        self.card = folder / "boot/firmware/waker"
        # At the first boot, cloud-init runs it before it looks for what runs at each.
        assert self._run("/boot/firmware/vendor-data") == 0
        assert self.on_card() == FILES

    def _run(self, script: str) -> int:
        enter = mounted(self.folder, "boot", "etc", "usr/local", "var/lib")
        path = f"PATH={self.stubs}:/usr/sbin:/usr/bin:/sbin:/bin"
        return subprocess.call([*enter, "env", path, script])

    def boot(self) -> str:
        """Return the report. Its words must fit the script's status."""
        status = self._run("/var/lib/cloud/scripts/per-boot/waker")
        report = self.card.joinpath(REPORT).read_text()
        assert ("waker is installed." in report) == (status == 0), report
        assert ("waker is not ready." in report) == (status != 0), report
        return report

    def on_card(self) -> set[str]:
        return {path.name for path in self.card.iterdir()}

    def installed(self) -> dict[str, tuple[int, bytes]]:
        """Return modes and contents by name."""
        files = [*self.folder.glob("etc/waker/*"), *self.folder.glob("usr/**/*")]
        return {
            path.name: (path.stat().st_mode & 0o777, path.read_bytes())
            for path in files
            if path.is_file()
        }


@pytest.fixture
def pi(tmp_path: Path, new_card: Path) -> Pi:
    return Pi(tmp_path, new_card)


def test_a_card_that_is_made_again_keeps_its_key_and_settings(new_card: Path) -> None:
    kept = [new_card / "waker" / name for name in sorted(SECRETS)]
    before = [path.read_bytes() for path in kept]
    shown = make(new_card.parents[1], "card").stdout
    assert [path.read_bytes() for path in kept] == before
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o600, 0o644, 0o600]
    assert new_card.joinpath("waker/ssh_key.pub").read_text() in shown


def test_a_card_is_installed_and_only_what_was_used_leaves_it(pi: Pi) -> None:
    """Later, the card may have a new program alone."""
    own = {name: pi.card.joinpath(name).read_bytes() for name in FILES}
    source, compiled = own["waker"], pi.folder / "compiled"
    command = ["/usr/bin/python3", "-IS", f"{CHECKOUT}/box/pack.py", "--compile"]
    subprocess.run([*command, f"{pi.card}/waker", compiled], check=True)
    own["waker"] = compiled.read_bytes()
    pi.card.joinpath("notes.txt").touch()
    pi.boot()
    assert pi.on_card() == {REPORT, "notes.txt"}
    modes = dict.fromkeys(SECRETS, 0o600) | {"waker": 0o755, "waker.service": 0o644}
    installed = {name: (modes[name], own[name]) for name in INSTALLED}
    assert pi.installed() == installed
    paramiko, *others = calls(pi.stubs)[-5:]
    assert re.fullmatch("apt-get .*install .*python3-paramiko", paramiko)
    assert others == ["sync", *RESTART, "sync"]
    pi.boot()
    assert calls(pi.stubs) == []
    # Without its packer, a new program stays as it is; with it, it is compiled there.
    # A packer alone has nothing to do.
    for names, expected in (
        ("waker", source),
        ("waker pack.py", own["waker"]),
        ("pack.py", own["waker"]),
    ):
        for name in names.split():
            pi.card.joinpath(name).write_bytes(
                own[name] if name == "pack.py" else source
            )
        pi.boot()
        assert pi.installed() == installed | {"waker": (0o755, expected)}
        assert pi.on_card() == {REPORT, "notes.txt"}


def test_the_next_boot_tries_again_if_a_call_failed(pi: Pi) -> None:
    """So the card must still have everything."""
    for call in ("apt-get -qq", *RESTART):
        fails = pi.stubs / f"no {call.removesuffix(' waker')}"
        fails.touch()
        pi.boot()
        assert pi.on_card() == FILES | {REPORT}
        assert calls(pi.stubs)[-1].startswith(call)
        fails.unlink()
    pi.boot()
    assert calls(pi.stubs)[-3:] == [*RESTART, "sync"]
    assert pi.installed().keys() == INSTALLED
    assert pi.on_card() == {REPORT}


MISTAKES = {
    # Python would run it. Only packing it again compares the checksums.
    "Bad CRC": ("waker pack.py", b"<!DOCTYPE html>", b"<!DOCTYPE htmm>"),
    "The file waker is damaged": ("waker", b"PK", b""),
    "WAKER_PIN must be": ("waker.env", PIN.encode(), b"short"),
}


@pytest.mark.parametrize("report", MISTAKES)
def test_a_mistake_on_the_card_is_reported_and_changes_nothing(
    pi: Pi, report: str
) -> None:
    names, right, wrong = MISTAKES[report]
    files = {name: pi.card.joinpath(name).read_bytes() for name in names.split()}
    pi.boot()
    before = pi.installed()
    calls(pi.stubs)
    for file, data in files.items():
        pi.card.joinpath(file).write_bytes(data.replace(right, wrong))
    assert report in pi.boot()
    assert pi.installed() == before
    assert pi.on_card() == {REPORT, *files}
    assert calls(pi.stubs)[-1].startswith("apt-get")
