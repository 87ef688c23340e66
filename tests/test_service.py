"""The unit, as far as it can be checked without a booted systemd."""

import subprocess
from pathlib import Path

from conftest import PROGRAM, need

import waker

UNIT = Path(PROGRAM).with_name("waker.service")


def test_systemd_understands_the_unit() -> None:
    seen = subprocess.run(
        [need("systemd-analyze"), "verify", "--man=no", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (seen.returncode, seen.stderr) == (0, "")


def test_a_fault_in_the_configuration_is_not_tried_again() -> None:
    assert f"\nRestartPreventExitStatus={waker.EX_CONFIG}\n" in UNIT.read_text()
