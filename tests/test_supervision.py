"""What systemd is told by the daemon that it has started."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import (
    PASSPHRASE,
    PIN,
    PROGRAM,
    Client,
    daemon,
    environment,
    new_app,
    running,
)
from cryptroot_unlock import Disks
from homelab import Homelab
from ssh_servers import free_port, paramiko_server

import waker


@pytest.fixture(params=["@"], ids=["abstract"])
def systemd(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[socket.socket, str]]:
    """Listen as systemd does; also the name under which."""
    name = f"{request.param}{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(re.sub("^@", "\0", name))
        listener.settimeout(10)
        yield listener, name


def fill(name: str) -> None:
    """Send more than a listener can take."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                other.sendto(b"of another service", re.sub("^@", "\0", name))


def drain(listener: socket.socket) -> None:
    """Take what is under way, and listen no longer than a second from now on."""
    listener.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while listener.recv(99):
            pass
    listener.settimeout(1)


@pytest.mark.parametrize(
    "systemd", ["", "@"], ids=["in the file system", "abstract"], indirect=True
)
def test_systemd_is_told_of_the_start_of_life_and_of_the_end(
    systemd: tuple[socket.socket, str], lab: Homelab
) -> None:
    listener, name = systemd
    settings = lab.settings() | {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "600000"}
    with daemon(settings) as started:
        assert started.client.log_in().token
        assert listener.recv(99) == b"READY=1"
        for _ in range(3):
            began = time.monotonic()
            assert listener.recv(99) == b"WATCHDOG=1"
            assert time.monotonic() - began < 0.6
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


def test_ready_is_told_when_it_listens(
    systemd: tuple[socket.socket, str], lab: Homelab
) -> None:
    listener, name = systemd
    port = free_port()
    settings = lab.settings() | {"WAKER_LISTEN": f"127.0.0.1:{port}"}
    settings |= {"WAKER_PIN": PIN, "NOTIFY_SOCKET": name}
    with subprocess.Popen(
        [sys.executable, PROGRAM], env=environment(settings), stderr=subprocess.DEVNULL
    ) as process:
        assert listener.recv(99) == b"READY=1"
        assert Client(port).log_in().token
        process.terminate()


def test_it_lives_as_long_as_its_loop_turns(
    systemd: tuple[socket.socket, str], config: waker.Config
) -> None:
    listener, name = systemd
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "200000"}
    app = new_app(config, environment)
    app.supervisor.ready(time.monotonic())
    assert listener.recv(99) == b"READY=1"
    listener.settimeout(0.5)
    with pytest.raises(TimeoutError):  # nobody runs the server
        listener.recv(99)
    with running(config, app):
        assert listener.recv(99) == b"WATCHDOG=1"


def test_it_lives_while_it_waits_for_an_unlock_to_end(
    systemd: tuple[socket.socket, str], tmp_path: Path
) -> None:
    listener, name = systemd
    with paramiko_server(tmp_path, Disks({"d": PASSPHRASE}, slow=1)) as initrd:
        settings = initrd.machine().settings() | {"NOTIFY_SOCKET": name}
        settings |= {"WAKER_HOMELAB_MAC": "52:54:00:12:34:56"}
        with daemon(settings | {"WATCHDOG_USEC": "400000"}) as started:
            client = started.client.log_in()
            body = {"passphrase": PASSPHRASE}
            answers: list[int] = []

            def unlock() -> None:
                answers.append(client.call("POST", "/api/unlock", body).status)

            thread = threading.Thread(target=unlock)
            thread.start()
            while not initrd.received():
                listener.recv(99)
            started.process.terminate()
            while listener.recv(99) != b"STOPPING=1":
                pass
            assert listener.recv(99) == b"WATCHDOG=1"
            assert answers == []
            thread.join()
            assert started.process.wait(10) == 0
    assert answers == [200]


def test_a_systemd_that_hangs_does_not_hold_it(
    systemd: tuple[socket.socket, str], lab: Homelab
) -> None:
    listener, name = systemd
    about = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "200000"}
    with daemon(lab.settings() | about) as started:
        assert listener.recv(99) == b"READY=1"
        fill(name)
        began = time.monotonic()
        while time.monotonic() < began + 1:
            assert started.client.call("GET", "/").status == 200
        assert started.stop() == 0
    told = f"NOTIFY_SOCKET {name}: Resource temporarily unavailable"
    assert told in started.log


def test_a_watchdog_that_waits_for_another_process_is_not_told(
    systemd: tuple[socket.socket, str], lab: Homelab
) -> None:
    listener, name = systemd
    about = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": "1"}
    with daemon(lab.settings() | about) as started:
        assert listener.recv(99) == b"READY=1"
        listener.settimeout(0.5)
        with pytest.raises(TimeoutError):
            listener.recv(99)
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


@pytest.mark.parametrize("microseconds", ["", "0", "-5", "1", "abc", "9" * 13])
def test_a_watchdog_that_makes_no_sense_is_none(
    lab: Homelab, microseconds: str
) -> None:
    with daemon(lab.settings() | {"WATCHDOG_USEC": microseconds}) as started:
        assert started.client.log_in().token
        assert started.busy(0.5) < 0.3


def test_systemd_hears_of_the_start_though_it_is_busy(
    systemd: tuple[socket.socket, str], lab: Homelab
) -> None:
    listener, name = systemd
    fill(name)
    with daemon(lab.settings() | {"NOTIFY_SOCKET": name}):
        while (heard := listener.recv(99)) == b"of another service":
            pass
        assert heard == b"READY=1"
