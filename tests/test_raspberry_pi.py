"""What `make card` makes, and what a Raspberry Pi does with it.

`make test-vm` has cloud-init and systemd as well, but takes minutes and tries less.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import Box, new_box
from conftest import MACHINE, PIN, make, need
from ssh_servers import KEY, free_port
from stand_ins import calls, stub

SECRETS = {"waker.env", "ssh_key", "ssh_key.pub"}
FILES = {"waker"} | SECRETS
REPORT = "report.txt"
AT_BOOT = "/var/lib/cloud/scripts/per-boot/waker"


@pytest.fixture(scope="session")
def new_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make card` makes."""
    need("ssh-keygen")
    folder = tmp_path_factory.mktemp("checkout")
    make(folder, "card")
    return folder / "dist/card"


class Pi:
    """A Raspberry Pi with this card."""

    def __init__(self, box: Box, new_card: Path) -> None:
        self.box, self.card = box, box.path("/boot/firmware/waker")
        shutil.copytree(new_card, self.card.parent, dirs_exist_ok=True)
        values = MACHINE | {"WAKER_PIN": PIN, "WAKER_SSH_HOST_KEY": KEY}
        values["WAKER_LISTEN"] = f"127.0.0.1:{free_port()}"
        self.settings = "".join(f"{name}={value}\n" for name, value in values.items())
        self.card.joinpath("waker.env").write_text(self.settings)
        for file in self.card.iterdir():
            file.chmod(0o755)  # as on any vfat
        stub(box.stubs / "sleep")
        # At the first boot, cloud-init runs it before it looks for what runs at each.
        box.run(f"mkdir -p {Path(AT_BOOT).parent}; /boot/firmware/vendor-data")
        assert self.on_card() == FILES

    def boot(self) -> str:
        """Return the report. Its words must fit the script's status."""
        status, shown = self.box.call(AT_BOOT)
        assert shown == ""
        report = self.card.joinpath(REPORT).read_text()
        assert ("waker is installed. What" in report) == (status == 0), report
        assert ("waker is not ready." in report) == (status != 0), report
        return report

    def on_card(self) -> set[str]:
        return {path.name for path in self.card.iterdir()}


@pytest.fixture
def pi(tmp_path: Path, new_card: Path) -> Iterator[Pi]:
    with new_box(tmp_path / "box", new_card / "waker/waker") as box:
        yield Pi(box, new_card)


def test_a_card_that_is_made_again_keeps_its_key_and_settings(new_card: Path) -> None:
    kept = [new_card / "waker" / name for name in sorted(SECRETS)]
    with new_card.joinpath("waker/waker.env").open("a") as settings:
        settings.write("# of the owner\n")
    before = [path.read_bytes() for path in kept]
    shown = make(new_card.parents[1], "card").stdout
    assert [path.read_bytes() for path in kept] == before
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o600, 0o644, 0o600]
    assert new_card.joinpath("waker/ssh_key.pub").read_text() in shown


def test_a_card_is_installed_and_only_what_was_used_leaves_it(pi: Pi) -> None:
    """Later, the card may have a new program or new settings alone."""
    own = {name: pi.card.joinpath(name).read_bytes() for name in FILES}
    pi.card.joinpath("notes.txt").touch()
    report = pi.boot()
    assert "paramiko" in report  # in the table of `waker check`
    assert "waker answers on port" in report
    assert pi.on_card() == {REPORT, "notes.txt"}
    installed = pi.box.installed()
    for name in SECRETS:
        assert installed[f"/etc/waker/{name}"] == (0o600, own[name])
    assert pi.box.run("systemctl is-enabled waker; systemctl is-active waker")
    calls(pi.box.stubs)
    assert pi.boot() == report  # of the boot before
    assert calls(pi.box.stubs) == []

    pi.card.joinpath("waker").write_bytes(own["waker"])
    pi.boot()
    assert pi.box.installed() == installed
    settings = f"{pi.settings}WAKER_HOMELAB_NAME=another name\n"
    pi.card.joinpath("waker.env").write_text(settings)
    pi.boot()
    changed = {"/etc/waker/waker.env": (0o600, settings.encode())}
    assert pi.box.installed() == installed | changed
    assert pi.on_card() == {REPORT, "notes.txt"}


def test_the_next_boot_tries_again_if_a_call_failed(pi: Pi) -> None:
    """So the card must still have everything."""
    pi.box.run(f"rm {pi.box.paramiko}")
    stub(pi.box.stubs / "apt-get", "exit 100\n")
    assert "apt could not install paramiko" in pi.boot()
    assert calls(pi.box.stubs).count("sleep 60") == 1
    assert pi.on_card() == FILES | {REPORT}
    assert pi.box.installed() == {}
    stub(pi.box.stubs / "apt-get", pi.box.apt_get)
    systemctl = pi.box.stubs / "systemctl"
    working = systemctl.read_text()
    for call, report in (
        ("enable", "`systemctl enable waker` failed"),
        ("restart", "waker does not answer. Its log ends with:"),
    ):
        stub(systemctl, f"[ $1 != {call} ] || exit 1\n{working}")
        assert report in pi.boot()
        assert pi.on_card() == FILES | {REPORT}
    systemctl.write_text(working)
    pi.boot()
    assert pi.on_card() == {REPORT}


def test_a_mistake_on_the_card_is_reported_and_changes_nothing(pi: Pi) -> None:
    program = pi.card.joinpath("waker").read_bytes()
    for report, name, data in (
        ("WAKER_PIN must be", "waker.env", pi.settings.replace(PIN, "short").encode()),
        ("/ssh_key is not a private key", "ssh_key", b"another file"),
        ("Bad CRC", "waker", program.replace(b"<!DOCTYPE html>", b"<!DOCTYPE htmm>")),
        ("SyntaxError", "waker", program.replace(b"PK", b"")),
    ):
        right = pi.card.joinpath(name).read_bytes()
        pi.card.joinpath(name).write_bytes(data)
        assert report in pi.boot()
        assert pi.box.installed() == {}
        assert pi.on_card() == FILES | {REPORT}
        pi.card.joinpath(name).write_bytes(right)
    pi.boot()
    before = pi.box.installed()
    pi.card.joinpath("ssh_key").write_text("another one")
    pi.card.joinpath("waker.env").write_text("WAKER_PIN=short\n")
    assert "WAKER_PIN must be" in pi.boot()
    assert pi.box.installed() == before
