"""OpenWrt's Python comes in packages: what README has installed must be enough."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from certificate import new_certificate
from conftest import CHECKOUT, PIN, daemon, environment, run_waker, wait_for
from homelab import Homelab

import waker

# What neither python3-light has nor what python3-paramiko depends on. Source:
# lang/python/python3/files/*.mk of openwrt/packages, 24.10 and 25.12.
BLOCKED = """
asyncio cgi cgitb unicodedata _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp
_codecs_kr _codecs_tw _multibytecodec dbm _dbm _gdbm decimal _decimal distutils
lib2to3 lzma _lzma multiprocessing _multiprocessing curses _curses _curses_panel
doctest pydoc pydoc_data readline sqlite3 _sqlite3 unittest uuid _uuid venv ensurepip
xml xmlrpc _elementtree pyexpat idlelib tkinter _tkinter turtledemo webbrowser
"""
THIRD_PARTY = "paramiko cryptography bcrypt nacl cffi _cffi_backend pycparser ply"
THIRD_PARTY += " six sitecustomize waker"  # six is in the line of 25.12
BLOCKER = f'''
import sys

BLOCKED = set("""{BLOCKED}""".split())
ALLOWED = set("{THIRD_PARTY}".split()) | sys.stdlib_module_names - BLOCKED

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if not path and name not in ALLOWED:
            raise ImportError(f"{{name}} is in no package of OpenWrt that we name")

for name in BLOCKED & sys.modules.keys():
    del sys.modules[name]
sys.meta_path.insert(0, Blocker())
'''


@pytest.fixture
def openwrt(tmp_path: Path, lab: Homelab) -> dict[str, str]:
    """Settings and an environment in which Python has what README's packages have."""
    folder = tmp_path / "openwrt"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return lab.settings() | {"WAKER_PIN": PIN, "PYTHONPATH": str(folder)}


def test_these_are_the_packages_and_no_others(openwrt: dict[str, str]) -> None:
    readme = CHECKOUT.joinpath("README.md").read_text()
    assert re.search(
        r"(?m)^    opkg update && opkg install python3-paramiko +#", readme
    )
    assert re.search(
        r"(?m)^    apk update && apk add python3-paramiko python3-six #", readme
    )
    for module in ("unicodedata", "asyncio", "pytest"):
        ended = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            env=environment(openwrt),
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"{module} is in no package of OpenWrt" in ended.stderr


def test_it_wakes_watches_and_unlocks(
    openwrt: dict[str, str], lab: Homelab, config: waker.Config, tmp_path: Path
) -> None:
    with daemon(openwrt) as started:
        client = started.client.log_in()
        assert client.call("GET", "/").status == 200
        assert client.status()["state"] == "off"
        assert client.call("POST", "/api/wol").status == 200
        waker.wake(config)  # the other one went to port 9
        lab.wait_for("locked")
        wait_for(lambda: client.status()["initrd_ssh_open"])
        assert client.unlock().json["message"] == "Unlocked: cryptroot."
    with daemon(openwrt | new_certificate(tmp_path).settings()):
        pass  # it found all that HTTPS needs


@pytest.mark.parametrize(
    "case",
    [
        (["check"], {}, 0, ""),
        (["--help"], {}, 0, ""),
        ([], {"WAKER_X": "x"}, 78, "WAKER_X is not a setting; see `waker --help`\n"),
    ],
)
def test_its_other_commands_run_there_too(openwrt: dict[str, str], case: Any) -> None:
    arguments, more, status, told = case
    ended = run_waker(*arguments, settings=openwrt | more)
    assert (ended.returncode, ended.stderr) == (status, told)
