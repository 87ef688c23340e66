"""OpenWrt splits Python into packages: those in docs/openwrt.md are enough."""

import subprocess
import sys
from pathlib import Path

from conftest import CHECKOUT, PASSPHRASE, PIN, daemon, environment, make, run_waker
from machine import Machine

# Modules that are neither in python3-light nor in the dependencies of python3-paramiko,
# except for those that only these modules import. Source:
# lang/python/python3/files/*.mk of openwrt/packages, 24.10 and 25.12.
BLOCKED = """
asyncio cgi cgitb curses dbm decimal distutils doctest ensurepip idlelib lib2to3 lzma
multiprocessing pydoc pydoc_data readline sqlite3 tkinter turtledemo unicodedata
unittest uuid venv webbrowser xml xmlrpc
"""


def test_the_one_file_and_the_documented_packages_are_enough(
    machine: Machine, tmp_path: Path
) -> None:
    page = CHECKOUT.joinpath("docs/openwrt.md").read_text()
    assert "    opkg update && opkg install python3-paramiko\n" in page
    assert "    apk update && apk add python3-paramiko python3-six\n" in page
    assert "    make dist INIT=procd\n" in page
    make(tmp_path, "dist", "INIT=procd")
    link = tmp_path / "link"
    link.symlink_to("dist/waker")
    blocker = f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED.split()}))\n"
    tmp_path.joinpath("sitecustomize.py").write_text(blocker)  # None cannot be imported
    openwrt = machine.ask().settings(PIN=PIN) | {"PYTHONPATH": str(tmp_path)}
    importing = [sys.executable, "-c", "import unicodedata"]
    assert subprocess.call(importing, env=environment(openwrt)) == 1
    for command in ("--help", "check"):
        ended = run_waker(command, settings=openwrt)
        assert (ended.returncode, ended.stderr) == (0, ""), command
    with daemon(openwrt, program=(sys.executable, str(link))) as started:
        client = started.client.log_in()
        assert client.status()["state"] == "locked"
        assert client.call("POST", "/api/wol").status == 200
        assert client.unlock().json["message"] == "Unlocked: root."
    assert machine.received() == [PASSPHRASE.encode()]
