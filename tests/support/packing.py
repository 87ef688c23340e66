"""The one file that `make dist` makes."""

import subprocess
import sys
from pathlib import Path

from conftest import CHECKOUT, run_waker

COMPILE = "--compile"
# Modules that are neither in python3-light nor in the dependencies of python3-paramiko,
# except for those that only these modules import. Source:
# lang/python/python3/files/*.mk of openwrt/packages, 24.10 and 25.12.
BLOCKED = """
asyncio cgi cgitb curses dbm decimal distutils doctest ensurepip idlelib lib2to3 lzma
multiprocessing pydoc pydoc_data readline sqlite3 tkinter turtledemo unicodedata
unittest uuid venv webbrowser xml xmlrpc
"""


def pack(source: Path, target: Path, *options: str, by: tuple[str, ...] = ()) -> Path:
    """Pack the program with this Python."""
    command = [*by, sys.executable, "-IS", str(CHECKOUT / "box/pack.py"), *options]
    subprocess.run([*command, str(source), str(target)], check=True)
    return target


def run(program: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run it with this Python; returns its status and all that it printed."""
    command = sys.executable, str(program)
    ended = run_waker(*arguments, settings=variables, program=command)
    return ended.returncode, ended.stdout + ended.stderr


def unpack(program: Path, folder: Path) -> Path:
    """Unpack it with Python's own tool, as README says."""
    command = [sys.executable, "-m", "zipfile", "-e", str(program), str(folder)]
    subprocess.run(command, check=True)
    return folder
