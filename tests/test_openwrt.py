"""What `make dist` makes for OpenWrt, with the packages in docs/openwrt.md."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHECKOUT, PAGE, PASSPHRASE, PIN, daemon, environment
from machine import Machine
from packing import BLOCKED, pack, run, unpack


@pytest.mark.slow
def test_the_one_file_and_the_documented_packages_are_enough(
    machine: Machine, tmp_path: Path
) -> None:
    """Even on a read-only file system, and while an upgrade replaces the file."""
    page = CHECKOUT.joinpath("docs/openwrt.md").read_text()
    assert "    opkg update && opkg install python3-paramiko\n" in page
    assert "    apk update && apk add python3-paramiko python3-six\n" in page
    program, link = pack(CHECKOUT, tmp_path / "waker"), tmp_path / "link"
    link.symlink_to(program)
    blocker = f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED.split()}))\n"
    tmp_path.joinpath("sitecustomize.py").write_text(blocker)  # None cannot be imported
    openwrt = machine.ask().settings(PIN=PIN) | {"PYTHONPATH": str(tmp_path)}
    importing = [sys.executable, "-c", "import unicodedata"]
    assert subprocess.call(importing, env=environment(openwrt)) == 1

    script = 'mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"; exec "$@"'
    read_only = "unshare", "--mount", "sh", "-ec", script, str(tmp_path)
    command = sys.executable, str(link)
    status, shown = run(link, "check", **openwrt)
    assert status == 0, shown
    assert "root can log in" in shown
    assert run(link, "prepare", "--help", **openwrt)[0] == 0
    with daemon(openwrt, *read_only, program=command) as started:
        # In the new archive, everything has another place.
        newer = unpack(program, tmp_path / "newer")
        for name in ("waker.py", "ui.html"):
            with newer.joinpath(name).open("a") as file:
                file.write("\n" * 999)
        pack(newer, program)
        client = started.client.log_in()
        assert client.status()["state"] == "locked"
        assert client.call("POST", "/api/wol").status == 200
        assert client.unlock().json["message"] == "Unlocked: root."
        assert client.call("GET", "/").body == PAGE
    assert machine.received() == [PASSPHRASE.encode()]
