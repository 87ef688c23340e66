"""OpenWrt's Python comes in packages: what README has installed must be enough."""

import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from certificate import new_certificate
from conftest import PASSPHRASE, PIN, PROGRAM, daemon, environment, run_waker
from homelab import Homelab
from test_daemon import wait_for

import waker

README = Path(PROGRAM).with_name("README.md").read_text()

# What python3-light lacks, by package; python3-base and -light have all the rest.
# Source: lang/python/python3/files/*.mk of openwrt/packages, 24.10 and 25.12.
SPLIT = {
    "asyncio": ["asyncio"],
    "cgi": ["cgi", "cgitb"],
    "codecs": [
        *("unicodedata", "_codecs_cn", "_codecs_hk", "_codecs_iso2022"),
        *("_codecs_jp", "_codecs_kr", "_codecs_tw", "_multibytecodec"),
    ],
    "ctypes": ["ctypes", "_ctypes"],
    "dbm": ["dbm", "_dbm", "_gdbm"],
    "decimal": ["decimal", "_decimal"],
    "distutils": ["distutils"],
    "email": ["email"],
    "lib2to3": ["lib2to3"],
    "logging": ["logging"],
    "lzma": ["lzma", "_lzma"],
    "multiprocessing": ["multiprocessing", "_multiprocessing"],
    "ncurses": ["curses", "_curses", "_curses_panel"],
    "openssl": ["_ssl", "_hashlib"],
    "pydoc": ["doctest", "pydoc", "pydoc_data"],
    "readline": ["readline"],
    "sqlite3": ["sqlite3", "_sqlite3"],
    "unittest": ["unittest"],
    "urllib": ["urllib"],
    "uuid": ["uuid", "_uuid"],
    "venv": ["venv", "ensurepip"],
    "xml": ["xml", "xmlrpc", "_elementtree", "pyexpat"],
    "nowhere": ["idlelib", "tkinter", "_tkinter", "turtledemo", "webbrowser"],
}

# What python3-paramiko depends on, and what that depends on. Source: the same.
CLOSURE = {"email", "logging", "openssl", "urllib", "ctypes"}
THIRD_PARTY = {"paramiko", "cryptography", "bcrypt", "nacl", "cffi", "_cffi_backend"}
THIRD_PARTY |= {"pycparser", "ply", "six"}  # six is in the line of 25.12

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        foreign = name not in sys.stdlib_module_names | ALLOWED
        if not path and (foreign or name in BLOCKED):
            raise ImportError(f"{name} is in no package of OpenWrt that we name")

for name in BLOCKED & sys.modules.keys():
    del sys.modules[name]
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def openwrt(tmp_path: Path) -> dict[str, str]:
    """The environment in which Python has what README's packages have, and no more."""
    blocked = {name for key in SPLIT.keys() - CLOSURE for name in SPLIT[key]}
    allowed = THIRD_PARTY | {"sitecustomize", "waker"}
    names = f"BLOCKED = {blocked}\nALLOWED = {allowed}\n"
    folder = tmp_path / "openwrt"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(names + BLOCKER)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    "line",
    [
        "opkg update && opkg install python3-paramiko",
        "apk update && apk add python3-paramiko python3-six",
    ],
)
def test_these_are_the_packages_that_the_readme_names(line: str) -> None:
    assert f"\n    {line}\n" in README


@pytest.mark.parametrize("module", ["unicodedata", "asyncio", "decimal", "pytest"])
def test_what_other_packages_have_is_not_there(
    module: str, openwrt: dict[str, str]
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env=environment(openwrt),
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{module} is in no package of OpenWrt that we name" in ended.stderr


def test_it_wakes_watches_and_unlocks_all_the_same(
    openwrt: dict[str, str], lab: Homelab, config: waker.Config
) -> None:
    with daemon(lab.settings() | openwrt) as started:
        client = started.client.log_in()
        assert client.call("GET", "/").status == 200
        assert client.call("GET", "/api/status").json["state"] == "off"
        assert client.call("POST", "/api/wol").status == 200
        waker.wake(config)  # the other one went to port 9
        lab.wait_for("locked")
        wait_for(lambda: client.call("GET", "/api/status").json["initrd_ssh_open"])
        answer = client.call("POST", "/api/unlock", {"passphrase": PASSPHRASE})
        assert (answer.status, answer.json["message"]) == (200, "Unlocked: cryptroot.")


@pytest.mark.parametrize("command", ["check", "--help", "--version"])
def test_its_other_commands_run_there_too(
    command: str, openwrt: dict[str, str], lab: Homelab
) -> None:
    settings = lab.settings() | openwrt | {"WAKER_PIN": PIN}
    ended = run_waker(command, settings=settings)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_it_speaks_https_there(
    openwrt: dict[str, str], lab: Homelab, tmp_path: Path
) -> None:
    certificate = new_certificate(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate.cert))
    with daemon(lab.settings() | openwrt | certificate.settings()) as started:
        address = started.client.host, started.client.port
        with (
            socket.create_connection(address) as tcp,
            context.wrap_socket(tcp, server_hostname="127.0.0.1") as tls,
        ):
            tls.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert tls.recv(99).startswith(b"HTTP/1.1 200 ")


def test_its_faults_are_told_there(openwrt: dict[str, str], lab: Homelab) -> None:
    settings = lab.settings() | openwrt | {"WAKER_PIN": PIN, "WAKER_PINN": "x"}
    ended = run_waker(settings=settings)
    assert ended.returncode == 78
    told = "WAKER_PINN is not a setting; see `waker --help`\n"
    assert ended.stderr == told
