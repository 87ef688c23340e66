"""A program at a terminal, and a person who answers it."""

import os
import pty
import re
import select
import subprocess

from conftest import need
from ssh_servers import DEFAULT


class Terminal:
    """A program at a terminal, and what it has printed."""

    def __init__(self, command: list[str], patience: float = 60) -> None:
        self._patience = patience  # seconds without a word
        self._master, end = pty.openpty()
        # A terminal that is closed tells its shell, which ends the rest.
        shell = [*DEFAULT, "sh", "-c", '"$@"; exit', "sh", *command]
        leader = [need("setsid"), "--ctty", "--wait", *shell]
        self._process = subprocess.Popen(leader, stdin=end, stdout=end, stderr=end)
        os.close(end)
        self.printed = ""
        self._answered = 0

    def _read(self) -> bool:
        assert select.select([self._master], [], [], self._patience)[0], self.printed
        try:
            text = os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the last program has closed it
            return False
        # Between ssh's end and ours, both the server's terminal and this one add a \r.
        before, last = self.printed[:-9], self.printed[-9:] + text
        self.printed = before + re.sub("\r+\n", "\n", last)
        return True

    def asks(self, prompt: str) -> bool:
        """Wait until it asks for something; returns whether it does."""
        while prompt not in self.printed[self._answered :]:
            if not self._read():
                return False
        return True

    def answer(self, prompt: str, text: str) -> None:
        """Type a line when it asks for it."""
        assert self.asks(prompt), self.printed
        self._answered = len(self.printed)
        os.write(self._master, f"{text}\n".encode())

    def hang_up(self) -> None:
        """Close the terminal's window."""
        os.close(self._master)
        self._process.wait(60)

    def end(self) -> int:
        """Return the exit status."""
        while self._read():
            pass
        os.close(self._master)
        return self._process.wait(60)
