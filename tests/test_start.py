"""A start, from the tap to the system: what it does, tells, and forgets."""

import contextlib
import gc
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    MAC,
    PASSPHRASE,
    PIN,
    Client,
    daemon,
    new_app,
    no_threads,
    running,
    wait_for,
    wait_for_child,
)
from cryptroot_unlock import Disks
from homelab import Homelab, new_key, public_line
from namespaces import Home, home, ip, udp_packets
from ssh_servers import Initrd, free_port, paramiko_server
from test_unlock import peer

import waker

__all__ = ["home"]  # a fixture
ONE = {"d": PASSPHRASE}
NOT_SENT = "The passphrase was not sent."
SENT = "Cancelled. The passphrase was sent."


def told(client: Client) -> Any:
    return client.status()["start"]


def wait_until(client: Client, phase: str) -> str:
    """Wait for a phase; returns its outcome and its message."""
    there = wait_for(lambda: told(client), lambda now: now["phase"] == phase)
    return "{outcome}: {message}".format(**there)


def start(client: Client, phase: str, passphrase: str = PASSPHRASE) -> str:
    """Start, and wait for a phase; returns its outcome and its message."""
    assert client.start(passphrase).json["success"]
    return wait_until(client, phase)


def cancel(client: Client) -> str:
    assert client.call("DELETE", "/api/start").json["success"]
    return wait_until(client, "cancelled")


def is_forgotten() -> bool:
    """Tell whether nothing in this process has the passphrase of a start any more."""
    gc.collect()
    return not any(
        type(one) is waker.Passphrase
        or (type(one) is waker.Request and one.path == "/api/start")
        for one in gc.get_objects()
    )


@contextlib.contextmanager
def starting(
    folder: Path, disks: Disks, start_seconds: float = 600
) -> Iterator[tuple[Client, Initrd]]:
    """Start a machine that waits for its passphrase, and then boots nothing."""
    with paramiko_server(folder, disks) as initrd:
        settings = {"WAKER_PIN": PIN} | MAC | initrd.machine().settings()
        config = waker.read_config(settings, folder)
        with running(config._replace(start_seconds=start_seconds)) as client:
            assert client.log_in().start().status == 200
            yield client, initrd


def test_a_machine_is_woken_once_unlocked_and_seen_up(
    owner: Client, lab: Homelab, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(owner) is None
    wrong = "wrong_passphrase: Wrong passphrase for disk cryptroot."
    assert start(owner, "failed", "wrong") == wrong
    assert start(owner, "done") == "up: Unlocked: cryptroot. The system is up."
    assert told(owner).keys() == {"phase", "outcome", "message", "seconds"}
    assert start(owner, "done", "x") == f"up: The system is already up. {NOT_SENT}"
    assert len(lab.packets) == 3
    given = [bytes.fromhex(text).decode() for text in Disks.load(lab.state).received]
    assert given == ["wrong", PASSPHRASE]
    phases = dict.fromkeys(re.findall("start: (.*?):", capfd.readouterr().err))
    assert [*phases] == ["waking", "unlocking", "failed", "booting", "done"]


AWAKE = {"initrd_port": free_port(), "system_port": free_port()}


@pytest.mark.parametrize(
    ("ports", "figures", "end"),
    [
        ({}, {}, f"not_awake: The machine did not wake: check power, .* {NOT_SENT}"),
        (AWAKE, {}, f"not_awake: The machine woke, but the SSH port .* {NOT_SENT}"),
        # UDP's port 0 is no destination.
        ({}, {"packet_port": 0}, f"error: Failed to send WOL packet: .* {NOT_SENT}"),
        ({}, {"start_seconds": "a bug"}, r"error: bug: TypeError, waker.py:\d+. .*"),
    ],
)
def test_a_start_that_fails_says_why_for_an_hour(
    config: waker.Config, lab: Homelab, ports: Any, figures: Any, end: str
) -> None:
    """One without a thread leaves room. Silence is woken again and again, no other."""
    mac = waker.parse_mac("52:54:00:00:00:99")
    config = config._replace(machine=config.machine._replace(**ports), mac=mac)
    config = config._replace(**{"start_seconds": 3, "packet_seconds": 0.1} | figures)
    app, passphrase = new_app(config), waker.Passphrase("x")
    with no_threads(), pytest.raises(waker.Fault) as fault:
        app.starter.begin(passphrase, 0)
    assert (fault.value.status, fault.value.headers) == (503, (("Retry-After", "5"),))
    assert app.starter.members(0) is None
    began = time.monotonic()
    app.starter.begin(passphrase, began)
    with app.unlocker.busy:
        now = time.monotonic()  # it has ended
    told: Any = app.starter.members(now)
    assert re.fullmatch(end, "{outcome}: {message}".format(**told))
    assert told["seconds"] <= now - began
    assert told["seconds"] >= 3 or not end.startswith("not_awake")
    assert app.starter.members(now + 3590) == told
    assert app.starter.members(now + 3600) is None
    assert (len(lab.packets) >= 6) == ("did not wake" in end)  # three at a time
    assert set(lab.packets) <= {waker.magic_packet(mac)}


def test_a_later_packet_that_fails_does_not_end_the_start(
    home: Home, tmp_path: Path
) -> None:
    """A switch that restarts, or a card that changes its speed, takes the link away."""
    router, machine, _ = home
    ip(f"-n {router.name} route del default")  # or the packet would leave there
    (tmp_path / "ssh_key").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (tmp_path / "ssh_key").chmod(0o600)
    settings = MAC | {"WAKER_PIN": PIN, "WAKER_HOMELAB_HOST": "192.168.77.99"}
    settings["WAKER_SSH_HOST_KEY"] = public_line(new_key())
    config = waker.read_config(settings, tmp_path)._replace(packet_seconds=0.1)
    starter = new_app(config).starter

    def message() -> str:
        told: Any = starter.members(time.monotonic())
        return str(told["message"])

    with machine.capture() as frames:
        router.run(lambda: starter.begin(waker.Passphrase("x"), time.monotonic()))
        wait_for(lambda: udp_packets(frames))
        ip(f"-n {router.name} link set lan down")
        failed = "Failed to send WOL packet: Network is unreachable; trying again"
        wait_for(lambda: message() == failed)
        udp_packets(frames)
        ip(f"-n {router.name} link set lan up")
        wait_for(lambda: udp_packets(frames))
    starter.cancel()
    wait_for(lambda: message().startswith("Cancelled"))


def test_an_early_initrd_is_asked_again(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE, early=True)) as (client, initrd):
        wait_for(lambda: "not ready yet" in told(client)["message"])
        assert initrd.received() == []
        Disks(ONE).save(initrd.state)
        assert wait_until(client, "booting") == "unlocked: Unlocked: d."
        wait_for(is_forgotten)


SLOW = "The system has not answered yet."


@pytest.mark.parametrize(
    ("disks", "end"),
    [
        (Disks(ONE, early=True), f"not_asked: the initrd is not ready.* {NOT_SENT}"),
        (Disks({}), f"not_up: no passphrase is needed: .* {NOT_SENT} {SLOW}"),
        (Disks(ONE), f"not_up: Unlocked: d. {SLOW}"),
        (Disks(ONE, slow=9), f"not_up: Not confirmed: .* was sent, but .* {SLOW}"),
    ],
)
def test_a_start_whose_time_is_over_tells_what_was_seen(
    tmp_path: Path, disks: Disks, end: str
) -> None:
    with starting(tmp_path, disks, start_seconds=0) as (client, initrd):
        if disks.slow:
            wait_for(initrd.received)
            os.kill(wait_for_child(os.getpid()), signal.SIGKILL)
        assert re.fullmatch(end, wait_until(client, "failed"))


def test_a_passphrase_that_may_have_been_sent_is_not_sent_again(
    tmp_path: Path,
) -> None:
    """The connection is lost after the answer, and the initrd asks again."""
    disks = Disks({"d": "another"}, dies="hangs up")
    with starting(tmp_path, disks, start_seconds=7) as (client, initrd):
        told = wait_until(client, "failed")  # another try would come after 5 s
        assert told.startswith("not_up: Not confirmed: the passphrase was sent, but")
        assert initrd.received() == [PASSPHRASE.encode()]


def test_what_could_only_fail_wakes_nobody(config: waker.Config, lab: Homelab) -> None:
    machine = config.machine._replace(host_keys=())
    with running(config._replace(machine=machine)) as client:
        answer = client.log_in().start()
        assert (answer.status, told(client)) == (500, None)
        assert answer.error == f"Failed to start: {waker.NO_PIN}. {NOT_SENT}"
    with running(config) as client:
        client.log_in()
        lab.ssh_key.unlink()  # the daemon runs already
        fault = f"SSH key {lab.ssh_key} is missing or empty. {NOT_SENT}"
        for answer, wish in ((client.start(), "start"), (client.unlock(), "unlock")):
            assert answer.status == 500
            assert answer.error == f"Failed to {wish}: {fault}"
        assert told(client) is None
    assert lab.packets == []


# ---- Cancelling ----------------------------------------------------------------------


def test_a_cancel_ends_the_wait_for_an_early_initrd(config: waker.Config) -> None:
    """It hangs up while it configures its network, and would be asked again."""
    with peer(socket.socket.close) as port:
        machine = config.machine._replace(initrd_port=port, system_port=free_port())
        with running(config._replace(machine=machine)) as client:
            client.log_in().start()
            wait_for(lambda: "does not speak SSH" in told(client)["message"])
            assert cancel(client) == f"cancelled: Cancelled. {NOT_SENT}"


def test_a_cancel_before_the_process_begins_sends_nothing(
    config: waker.Config, lab: Homelab
) -> None:
    waker.wake(config)
    lab.wait_for("locked")
    unlocker = new_app(config).unlocker
    unlocker.claim("unlock")
    unlocker.cancelled.set()
    assert not unlocker.run(waker.Passphrase(PASSPHRASE)).sent
    assert Disks.load(lab.state).received == []


@pytest.mark.parametrize(
    ("disks", "received", "end"),
    [
        (Disks(ONE, mute=True), [], f"cancelled: Cancelled. {NOT_SENT}"),
        (Disks(ONE, slow=1), [PASSPHRASE.encode()], f"unlocked: {SENT}"),
    ],
)
def test_a_cancel_ends_what_sent_nothing_and_lets_the_rest_finish(
    tmp_path: Path, disks: Disks, received: list[bytes], end: str
) -> None:
    with starting(tmp_path, disks) as (client, initrd):
        child = wait_for_child(os.getpid())
        wait_for(lambda: initrd.received() == received)
        for answer in (client.start(), client.unlock()):
            assert answer.status == 409
            assert answer.error.startswith("Another unlock or start is running")
        assert cancel(client) == end
        assert not Path(f"/proc/{child}").exists()
        assert initrd.received() == received
        wait_for(is_forgotten)
        answer = client.call("DELETE", "/api/start")
        assert (answer.status, answer.error) == (409, "No start is running")


def test_a_signal_cancels_a_start_and_the_log_tells_it_all(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            start(started.client.log_in(), "booting")
            assert cancel(started.client) == f"unlocked: {SENT}"
            Disks(ONE, mute=True).save(initrd.state)
            started.client.start()
            child = wait_for_child(started.process.pid)
            assert started.stop() == 0
            assert not Path(f"/proc/{child}").exists()
    assert initrd.received() == []
    # Who began something is told when it has begun: these lines may change places.
    assert sorted(started.log[2:]) == [
        "ip=127.0.0.1 Cancelling; the status shows the result",
        *["ip=127.0.0.1 Started; the status shows progress"] * 2,
        "start: booting: Unlocked: d.",
        f"start: cancelled: Cancelled. {NOT_SENT}",
        f"start: cancelled: {SENT}",
        *["start: unlocking: Connecting to the initrd"] * 2,
        "stopping",
    ]
