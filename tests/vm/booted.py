"""A booted Debian that becomes a box."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from computer import PATIENCE, Computer
from conftest import need, wait_for

INSTALL = "python3 waker install --yes"
LISTENS = "ss -lnt | grep -q :8080"  # with Type=exec, a service is active before that


@dataclass
class Box:
    """A booted Debian, and root's shell on it."""

    computer: Computer

    def run(self, command: str, given: bytes = b"") -> str:
        """Run a command, which must succeed; returns what it printed."""
        return self.computer.run(command, given)

    def wait(self, command: str) -> None:
        """Wait until a command succeeds."""
        ssh = self.computer.ssh
        wait_for(lambda: ssh(command), lambda done: done.returncode == 0, PATIENCE)

    def send(self, folder: Path, to: str) -> None:
        """Copy what is in a folder."""
        pack = [need("tar"), "-C", str(folder), "-c", "."]
        packed = subprocess.run(pack, check=True, capture_output=True).stdout
        self.run(f"mkdir -p {to}; tar -C {to} --no-overwrite-dir -x", packed)

    def write(self, path: str, content: str) -> None:
        self.run(f"cat > {path} && chmod 600 {path}", content.encode())

    def settle(self, settings: dict[str, str]) -> None:
        """Write the settings."""
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self.write("/etc/waker/waker.env", "".join(lines))

    def journal(self) -> list[str]:
        """Read what waker has logged."""
        read = "journalctl --sync; journalctl -q --identifier=waker --output=cat"
        return self.run(read).splitlines()

    def show(self, name: str) -> str:
        """Read a property of the unit."""
        return self.run(f"systemctl show waker --value -p {name}").strip()

    def fail_to_start(self) -> list[str]:
        """Check that the service does not start; returns the lines that say why."""
        self.run("systemctl restart waker")
        self.wait("systemctl is-failed waker")
        assert (self.show("ExecMainStatus"), self.show("NRestarts")) == ("78", "0")
        return self.journal()
