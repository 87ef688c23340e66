"""What systemd is told by the daemon that it has started."""

import contextlib
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import daemon
from homelab import Homelab


@pytest.fixture(params=["in the file system", "abstract"])
def systemd(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[socket.socket, str]]:
    """Listen as systemd does; also the name under which."""
    name = str(tmp_path / "notify")
    if request.param == "abstract":
        name = "@" + name
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(re.sub("^@", "\0", name))
        listener.settimeout(10)
        yield listener, name


def drain(listener: socket.socket) -> None:
    """Take what is under way, and listen no longer than a second from now on."""
    listener.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while listener.recv(99):
            pass
    listener.settimeout(1)


def test_systemd_is_told_of_the_start_of_life_and_of_the_end(
    systemd: tuple[socket.socket, str], lab: Homelab
) -> None:
    listener, name = systemd
    settings = lab.settings() | {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "600000"}
    with daemon(settings) as started:
        assert started.client.log_in().token
        told = [listener.recv(99) for _ in range(4)]
        assert told == [b"READY=1", *[b"WATCHDOG=1"] * 3]
        started.process.send_signal(signal.SIGSTOP)
        drain(listener)
        with pytest.raises(TimeoutError):
            listener.recv(99)
        started.process.send_signal(signal.SIGCONT)
        assert listener.recv(99) == b"WATCHDOG=1"
        assert started.stop() == 0
    while (last := listener.recv(99)) == b"WATCHDOG=1":
        pass
    assert last == b"STOPPING=1"


def test_a_watchdog_that_waits_for_another_process_is_not_told(
    systemd: tuple[socket.socket, str], lab: Homelab
) -> None:
    listener, name = systemd
    about = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    with daemon(lab.settings() | about) as started:
        assert listener.recv(99) == b"READY=1"
        started.client.log_in()
        assert started.stop() == 0
        assert listener.recv(99) == b"STOPPING=1"


def test_a_systemd_that_does_not_hear_is_no_reason_to_end(
    lab: Homelab, tmp_path: Path
) -> None:
    name = str(tmp_path / "nobody")
    with daemon(lab.settings() | {"NOTIFY_SOCKET": name}) as started:
        assert started.client.log_in().token
        assert started.stop() == 0
    assert started.log[1] == f"NOTIFY_SOCKET {name}: No such file or directory"
