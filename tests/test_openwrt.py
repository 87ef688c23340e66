"""OpenWrt splits Python into packages: those in docs/openwrt.md are enough."""

import subprocess
import sys
from pathlib import Path

from conftest import CHECKOUT, PIN, daemon, environment, run_waker
from homelab import Homelab

import waker

# Modules that are neither in python3-light nor in the dependencies of python3-paramiko,
# except for those that only these modules import. Source:
# lang/python/python3/files/*.mk of openwrt/packages, 24.10 and 25.12.
BLOCKED = """
asyncio cgi cgitb curses dbm decimal distutils doctest ensurepip idlelib lib2to3 lzma
multiprocessing pydoc pydoc_data readline sqlite3 tkinter turtledemo unicodedata
unittest uuid venv webbrowser xml xmlrpc
"""


def test_the_documented_openwrt_packages_are_enough(
    lab: Homelab, config: waker.Config, tmp_path: Path
) -> None:
    page = CHECKOUT.joinpath("docs/openwrt.md").read_text()
    assert "    opkg update && opkg install python3-paramiko\n" in page
    assert "    apk update && apk add python3-paramiko python3-six\n" in page
    blocker = f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED.split()}))\n"
    tmp_path.joinpath("sitecustomize.py").write_text(blocker)  # None cannot be imported
    openwrt = lab.settings() | {"WAKER_PIN": PIN, "PYTHONPATH": str(tmp_path)}
    importing = [sys.executable, "-c", "import unicodedata"]
    assert subprocess.call(importing, env=environment(openwrt)) == 1
    with daemon(openwrt) as started:
        client = started.client.log_in()
        assert client.call("GET", "/").status == 200
        assert client.status()["state"] == "off"
        assert client.call("POST", "/api/wol").status == 200
        waker.wake(config)  # the daemon's packet went to port 9
        lab.wait_for("locked")
        for command, status in {"--help": 0, "check": 0, "unlock": 1}.items():
            ended = run_waker(command, settings=openwrt, given="wrong")
            assert (ended.returncode, ended.stderr) == (status, ""), command
        assert "Wrong passphrase" in ended.stdout
        assert client.unlock().json["message"] == "Unlocked: cryptroot."
