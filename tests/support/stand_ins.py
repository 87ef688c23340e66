"""This computer, but with a test's folders in place of its own, and with stubs."""

from pathlib import Path

from conftest import need, need_root

RECORD = """\
#!/bin/sh
echo "${0##*/}" "$@" >>"${0%/*}/calls"
"""


def mounted(folder: Path, *places: str) -> list[str]:
    """Return the prefix of a command that finds `folder`/etc at /etc, and so on."""
    need_root()
    mounts = [f"mount --bind {folder}/{place} /{place}" for place in places]
    script = "\n".join([*mounts, 'exec "$@"'])
    return [need("unshare"), "--mount", "sh", "-ec", script, "sh"]


def stub(program: Path, script: str = "") -> None:
    """Make a program that records how it was called, and then runs a shell script."""
    program.write_text(RECORD + script)
    program.chmod(0o755)


def calls(stubs: Path) -> list[str]:
    """Return how the stubs in a folder were called since this was asked."""
    record = stubs / "calls"
    lines = record.read_text().splitlines() if record.exists() else []
    record.unlink(missing_ok=True)
    return lines
