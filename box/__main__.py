"""The commands of the one file: those of waker.py, and those of this folder.

`make dist` puts this file at the top of the one file, where Python starts. In a
checkout, run `python3 -m box`.
"""

import sys

import waker

COMMANDS = (
    ("install", "install waker on this box, or upgrade it"),
    ("uninstall", "remove it, but not its settings and keys"),
    ("check", "find out why waking or unlocking does not work"),
    ("prepare", "prepare a server, so that waker can unlock it"),
)
TAKE_A_VALUE = "--env-file", "--seconds"


def main(arguments: list[str]) -> int:
    """Run a command, and return the exit status."""
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        place += 2 if arguments[place] in TAKE_A_VALUE else 1
    command, others = arguments[place : place + 1], arguments[:]
    del others[place : place + 1]
    if command == ["check"]:
        from box import check

        return check.main(others)
    if command in (["install"], ["uninstall"]):
        from box import install

        return install.main(command[0], others)
    if command == ["prepare"]:
        from box import prepare

        return prepare.main(others)
    return waker.main(arguments, COMMANDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
