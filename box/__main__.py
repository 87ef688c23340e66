"""The commands of the one file: those of waker.py, and those of this folder.

`make dist` puts this file at the top of the one file, where Python starts. In a
checkout, run `python3 -m box`.
"""

import sys

import waker

COMMANDS = waker.COMMANDS | {
    "install": "install waker on this box, or upgrade it",
    "prepare": "prepare a server, so that waker can unlock it",
    "check": "find out why waking or unlocking does not work",
    "uninstall": "remove waker from this box",
}


def split(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the command, or "", and the other arguments.

    Options may come first: waker --env-file FILE check
    """
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        place += 2 if arguments[place] == "--env-file" else 1
    command = "".join(arguments[place : place + 1])
    return command, arguments[:place] + arguments[place + 1 :]


def main(arguments: list[str]) -> int:
    """Run a command, and return the exit status."""
    command, others = split(arguments)
    # The daemon must not load any of these.
    if command in ("install", "uninstall"):
        from box import install

        return install.main(command, others)
    if command == "prepare":
        from box import prepare

        return prepare.main(others)
    if command == "check":
        from box import check

        return check.main(arguments, COMMANDS)
    return waker.main(arguments, COMMANDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
