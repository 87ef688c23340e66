"""A start, from the tap to the system: what it does, tells, and forgets."""

import contextlib
import gc
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    wait_for_starts,
)
from cryptroot_unlock import Disks
from homelab import OPENSSH, Homelab, SshServer, bind, new_key, public_line
from namespaces import Home, home, ip, udp_packets
from ssh_servers import Initrd, free_port, paramiko_server
from test_unlock import peer

import waker

__all__ = ["home"]  # a fixture
ONE = {"d": PASSPHRASE}
NOT_SENT = "The passphrase was not sent."


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
    """Cancel, and wait until that has happened; returns the outcome and the message."""
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
    folder: Path, disks: Disks, **figures: Any
) -> Iterator[tuple[Client, Initrd]]:
    """Start a machine that waits for its passphrase, and then boots nothing."""
    with paramiko_server(folder, disks) as initrd:
        settings = {"WAKER_PIN": PIN} | MAC | initrd.machine().settings()
        settings["WAKER_SYSTEM_SSH_PORT"] = str(free_port())
        config = waker.read_config(settings, folder)
        with running(config._replace(**figures)) as client:
            assert client.log_in().start().status == 200
            yield client, initrd


def test_a_machine_is_woken_once_unlocked_and_seen_up(
    owner: Client, lab: Homelab, capfd: pytest.CaptureFixture[str]
) -> None:
    assert told(owner) is None
    wrong = "wrong_passphrase: Wrong passphrase for disk cryptroot."
    assert start(owner, "failed", "wrong") == wrong
    assert start(owner, "done") == "up: Unlocked: cryptroot. The system is up."
    begun = told(owner)
    members = {"phase", "outcome", "message", "seconds", "sent", "times"}
    assert begun.keys() == members
    assert begun["sent"]
    assert [*begun["times"]] == ["waking", "unlocking", "booting", "done"]
    assert [*begun["times"].values()] == sorted(begun["times"].values())
    assert begun["times"]["waking"] == 0
    assert begun["times"]["done"] == begun["seconds"]
    assert start(owner, "done", "x") == f"up: The system is already up. {NOT_SENT}"
    assert len(lab.packets) == 3
    given = [bytes.fromhex(text).decode() for text in Disks.load(lab.state).received]
    assert given == ["wrong", PASSPHRASE]
    phases = dict.fromkeys(re.findall("start: (.*?):", capfd.readouterr().err))
    assert [*phases] == ["waking", "unlocking", "failed", "booting", "done"]


AWAKE = {"initrd_port": free_port(), "system_port": free_port()}
NOWHERE = {"host": "255.255.255.255"}  # TCP cannot connect there


def test_a_machine_that_falls_silent_is_not_said_to_have_slept(
    lab: Homelab, config: waker.Config
) -> None:
    lab.disks.idle = True
    config = config._replace(packet_seconds=600, retry_seconds=0.1, start_seconds=8)
    with running(config) as client:
        start(client.log_in(), "unlocking")
        lab._power_cut.set()  # noqa: SLF001 - `obey` waits for input
        ended = wait_until(client, "failed")
    assert ended == f"not_awake: The server stopped responding. {NOT_SENT}"


@pytest.mark.parametrize(
    ("ports", "figures", "end"),
    [
        ({}, {}, f"not_awake: The server did not wake: check power, .* {NOT_SENT}"),
        (
            AWAKE,
            {},
            f"not_awake: The server woke, but its initrd.s SSH port .* {NOT_SENT}",
        ),
        (NOWHERE, {}, f"not_awake: The server could not be checked; .* {NOT_SENT}"),
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
    off = waker.PortStates(waker.PortState.SILENT, waker.PortState.SILENT)
    with no_threads(), pytest.raises(waker.Fault) as fault:
        app.starter.begin(passphrase, 0)
    assert (fault.value.status, fault.value.headers) == (503, (("Retry-After", "5"),))
    assert app.starter.members(0, off) is None
    began = time.monotonic()
    app.starter.begin(passphrase, began)
    wait_for_starts()
    now = time.monotonic()
    told: Any = app.starter.members(now, off)
    assert re.fullmatch(end, "{outcome}: {message}".format(**told))
    assert told["seconds"] <= now - began
    assert told["seconds"] >= 3 or not end.startswith("not_awake")
    assert app.starter.members(now + 3590, off) == told
    assert app.starter.members(now + 3600, off) is None
    is_unseen = "did not wake" in end or "could not be checked" in end
    assert (len(lab.packets) >= 6) == is_unseen  # three at a time
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

    off = waker.PortStates(waker.PortState.SILENT, waker.PortState.SILENT)

    def message() -> str:
        told: Any = starter.members(time.monotonic(), off)
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


def test_an_early_initrd_is_not_asked_again_at_once(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE, early=True), retry_seconds=60) as (client, lab):
        wait_for(lambda: "not ready yet" in told(client)["message"])
        Disks(ONE).save(lab.state)
        began = told(client)["seconds"]  # in three more, it could try again and again
        wait_for(lambda: told(client)["seconds"] >= began + 3)
        assert lab.received() == []
        assert cancel(client) == f"cancelled: Cancelled. {NOT_SENT}"


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
    over = {"start_seconds": 0, "prompt_seconds": 0}
    with starting(tmp_path, disks, **over) as (client, initrd):
        if disks.slow:
            wait_for(initrd.received)
            os.kill(wait_for_child(os.getpid()), signal.SIGKILL)
        assert re.fullmatch(end, wait_until(client, "failed"))


def test_a_passphrase_that_may_have_been_sent_is_not_sent_again(
    tmp_path: Path,
) -> None:
    """The connection is lost after the answer, and the initrd asks again."""
    disks = Disks({"d": "another"}, dies="hangs up")
    figures = {"retry_seconds": 0.1, "start_seconds": 2}
    with starting(tmp_path, disks, **figures) as (client, initrd):
        told = wait_until(client, "failed")
        assert told.startswith("not_up: Not confirmed: the passphrase was sent, but")
        assert initrd.received() == [PASSPHRASE.encode()]


def test_what_could_only_fail_wakes_nobody(config: waker.Config, lab: Homelab) -> None:
    machine = config.machine._replace(host_keys=())
    with running(config._replace(machine=machine)) as client:
        answer = client.log_in().start()
        assert (answer.status, told(client)) == (500, None)
        assert answer.error == f"Failed to start: {waker.NOT_PINNED}. {NOT_SENT}"
    with running(config) as client:
        client.log_in()
        lab.ssh_key.unlink()  # the daemon runs already
        remedy = f"make it with: ssh-keygen -t ed25519 -N '' -f {lab.ssh_key}"
        fault = f"SSH key {lab.ssh_key} is missing; correct the path, or {remedy}."
        fault += f" {NOT_SENT}"
        for answer, wish in ((client.start(), "start"), (client.unlock(), "unlock")):
            assert answer.status == 500
            assert answer.error == f"Failed to {wish}: {fault}"
        assert told(client) is None
    assert lab.packets == []


# ---- Watching, and what ends it ------------------------------------------------------


LOST = (
    "not_confirmed: Not confirmed: the passphrase was sent, but the connection was lost"
    " before the initrd confirmed it."
)
DOUBT = (
    f"{LOST} The initrd is still running: it may still be checking the passphrase, or"
    " the passphrase was wrong."
)


def listen_at(machine: waker.Machine) -> SshServer:
    """Open the system's port."""
    return SshServer(bind("127.0.0.1", machine.system_port), new_key(), OPENSSH)


def test_what_was_not_confirmed_is_doubted_while_the_initrd_runs(
    tmp_path: Path,
) -> None:
    """And whatever was reported, the system may come up."""
    disks = Disks({"d": "another"}, dies="hangs up")
    with starting(tmp_path, disks, doubt_seconds=4) as (client, _):
        assert wait_until(client, "booting") == LOST
        seen = wait_for(lambda: told(client), lambda now: "still" in now["message"])
        assert seen["phase"] == "booting"
        assert "{outcome}: {message}".format(**seen) == DOUBT
        assert seen["seconds"] - seen["times"]["booting"] >= 3  # whole ones
        assert client.app
        with contextlib.closing(listen_at(client.app.config.machine)):
            up, reported = wait_until(client, "done").split(". ", 1)
    assert up == "up: The system is up"
    assert reported in LOST


def test_nothing_is_doubted_once_the_initrd_has_ended(tmp_path: Path) -> None:
    disks = Disks({"d": "another"}, dies="for good")
    with starting(tmp_path, disks, doubt_seconds=0, start_seconds=4) as (client, _):
        reported = LOST.removeprefix("not_confirmed: ")
        assert wait_until(client, "failed") == f"not_up: {reported} {SLOW}"


def test_a_cancelled_watch_keeps_what_the_unlock_reported(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE, dies="hangs up")) as (client, _):
        assert wait_until(client, "booting") == LOST
        assert cancel(client) == LOST


@pytest.mark.parametrize("disks", [Disks(ONE), Disks(ONE, dies="hangs up")])
def test_a_new_start_replaces_a_watch(tmp_path: Path, disks: Disks) -> None:
    """Of many at the same moment, one does, and it sends only if a disk asks."""
    with starting(tmp_path, disks) as (client, initrd):
        wait_until(client, "booting")
        Disks({"second": "x"}, slow=2, received=["66"]).save(initrd.state)
        with ThreadPoolExecutor(8) as pool:
            begun = [pool.submit(client.start, "x") for _ in range(8)]
        assert sorted(each.result().status for each in begun) == [200] + 7 * [409]
        assert wait_until(client, "booting") == "unlocked: Unlocked: second."
        assert initrd.received() == [b"f", b"x"]
        starts = [t for t in threading.enumerate() if t.name == "start"]
        wait_for(lambda: sum(thread.is_alive() for thread in starts) == 1)
        assert told(client)["phase"] == "booting"


def test_an_unlock_ends_a_watch(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE)) as (client, initrd):
        wait_until(client, "booting")
        Disks({"second": "x"}).save(initrd.state)
        assert client.unlock("x").json["message"] == "Unlocked: second."
        assert wait_until(client, "cancelled") == "unlocked: Unlocked: d."
        answer = client.call("DELETE", "/api/start")
        assert (answer.status, answer.error) == (409, "No start is running")


@pytest.mark.parametrize("host_key", ["the right one", "another"])
def test_a_failed_start_is_forgotten_when_the_system_is_up(
    tmp_path: Path, host_key: str
) -> None:
    """But not another host key: any program may listen on the system's port."""
    right = host_key == "the right one"
    with paramiko_server(tmp_path, Disks({"d": "another"})) as initrd:
        settings = {"WAKER_PIN": PIN} | MAC | initrd.machine().settings()
        settings["WAKER_SYSTEM_SSH_PORT"] = str(free_port())
        if not right:
            settings["WAKER_SSH_HOST_KEY"] = public_line(new_key())
        config = waker.read_config(settings, tmp_path)
        with running(config) as client:
            client.log_in()
            outcome = "wrong_passphrase" if right else "host_key_differs"
            assert start(client, "failed").startswith(outcome)
            assert told(client)["sent"] == right
            with contextlib.closing(listen_at(config.machine)):
                wait_for(lambda: client.status()["state"] == "up")
                assert (told(client) is None) == right
            wait_for(lambda: client.status()["state"] != "up")
            assert (told(client) is None) == right


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
    cancelled, sent = threading.Event(), threading.Event()
    cancelled.set()
    unlocker = new_app(config).unlocker
    result = unlocker.run(waker.Passphrase(PASSPHRASE), cancelled, sent)
    assert (result.sent, sent.is_set()) == (False, False)
    assert Disks.load(lab.state).received == []


@pytest.mark.parametrize(
    ("disks", "received", "end"),
    [
        (Disks(ONE, mute=True), [], f"cancelled: Cancelled. {NOT_SENT}"),
        (Disks(ONE, slow=1), [PASSPHRASE.encode()], "unlocked: Unlocked: d."),
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
            assert cancel(started.client) == "unlocked: Unlocked: d."
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
        "start: cancelled: Unlocked: d.",
        *["start: unlocking: Connecting to the initrd"] * 2,
        "stopping",
    ]
