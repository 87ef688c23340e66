"""A start, from the tap to the system: what it does, tells, and forgets."""

import contextlib
import gc
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import (
    MAC,
    PASSPHRASE,
    PIN,
    Client,
    daemon,
    no_threads,
    running,
    wait_for,
    wait_for_child,
)
from cryptroot_unlock import Disks
from homelab import Homelab
from ssh_servers import Initrd, free_port, paramiko_server
from test_unlock import peer

import waker

ONE = {"d": PASSPHRASE}
NOT_SENT = "The passphrase was not sent."
SENT = "Cancelled. The passphrase was sent."
BUSY = "Another unlock or start is running; wait for it to end"


def told(client: Client) -> Any:
    return client.status()["start"]


def wait_until(client: Client, phase: str) -> str:
    """Wait for a phase; returns its outcome and its message."""

    def there() -> str:
        now = told(client)
        if now["phase"] == phase:
            return f"{now['outcome']}: {now['message']}"
        assert now["phase"] not in ("done", "failed", "cancelled"), now
        return ""

    return wait_for(there)


def start(client: Client, phase: str, passphrase: str = PASSPHRASE) -> str:
    """Start, and wait for a phase; returns its outcome and its message."""
    answer = client.start(passphrase)
    assert (answer.status, answer.json["success"]) == (200, True)
    return wait_until(client, phase)


def cancel(client: Client) -> str:
    answer = client.call("DELETE", "/api/start")
    text = "Cancelling; the status shows the result"
    assert answer.json == {"success": True, "message": text}
    return wait_until(client, "cancelled")


def passphrases() -> list[object]:
    """Find what keeps the passphrase in the daemon, which runs in this process."""
    gc.collect()
    found: list[object] = [
        one
        for one in gc.get_objects()
        if type(one) is waker.Passphrase
        or (type(one) is waker.Request and PASSPHRASE[:7].encode() in (one.body or b""))
    ]
    for frame in sys._current_frames().values():
        for place, _ in traceback.walk_stack(frame):
            if place.f_code.co_filename == waker.__file__:
                values = place.f_locals.values()
                found += [one for one in values if PASSPHRASE[:7] in str(one)]
    return found


@pytest.fixture
def initrd(tmp_path: Path) -> Iterator[Any]:
    """Starts a machine that waits for its passphrase; yields a client and the initrd.

    After the unlock nothing boots. `figures` are for the configuration.
    """
    with contextlib.ExitStack() as stack:

        def begin(disks: Disks, **figures: Any) -> tuple[Client, Initrd]:
            (tmp_path / "initrd").mkdir()
            server = stack.enter_context(paramiko_server(tmp_path / "initrd", disks))
            settings = {"WAKER_PIN": PIN} | MAC | server.machine().settings()
            config = waker.read_config(settings, tmp_path)._replace(**figures)
            return stack.enter_context(running(config)).log_in(), server

        yield begin


def test_a_machine_is_woken_unlocked_and_seen_up(owner: Client, lab: Homelab) -> None:
    other = Client(owner.port).log_in()
    assert told(owner) is None
    assert owner.start().json.keys() == {"success", "message"}
    seen = [told(owner)["phase"]]
    while seen[-1] != "done":
        seen.append(wait_for(lambda: {told(owner)["phase"]} - {seen[-1]}).pop())
    order = ["waking", "unlocking", "booting", "done"]
    assert seen == [phase for phase in order if phase in seen]  # one may be too short
    assert seen[0] == "waking"
    assert owner.status()["state"] == "up"
    now = told(other)  # each client sees the same start
    assert now.keys() == {"phase", "outcome", "message", "seconds"}
    assert now["message"] == "Unlocked: cryptroot. The system is up."
    received = [PASSPHRASE.encode().hex()]
    assert Disks.load(lab.state).received == received
    sent = list(lab.packets)  # a machine that is up is left alone
    assert start(owner, "done", "x") == f"up: The system is already up. {NOT_SENT}"
    assert lab.packets == sent
    assert Disks.load(lab.state).received == received


def test_a_machine_that_waits_is_not_woken(owner: Client, lab: Homelab) -> None:
    owner.call("POST", "/api/wol")
    lab.wait_for("locked")
    sent = list(lab.packets)
    wrong = "wrong_passphrase: Wrong passphrase for disk cryptroot."
    assert start(owner, "failed", "wrong") == wrong
    assert start(owner, "done").startswith("up: ")
    assert lab.packets == sent


def test_silence_is_woken_again_and_again(config: waker.Config, lab: Homelab) -> None:
    mac = waker.parse_mac("52:54:00:00:00:99")
    config = config._replace(mac=mac, packet_seconds=0.1, start_seconds=2)
    with running(config) as client:
        reason = "The machine did not wake: check power, network cable and Wake-on-LAN."
        assert start(client.log_in(), "failed") == f"not_awake: {reason} {NOT_SENT}"
        assert told(client)["seconds"] >= 2
    assert len(lab.packets) >= 6  # three at a time
    assert set(lab.packets) == {waker.magic_packet(mac)}


def test_who_is_awake_gets_no_packet(config: waker.Config, lab: Homelab) -> None:
    machine = config.machine._replace(initrd_port=free_port(), system_port=free_port())
    with running(config._replace(machine=machine, start_seconds=1)) as client:
        message = start(client.log_in(), "failed")
    assert "woke, but the SSH port of its initrd stayed closed" in message
    assert lab.packets == []


def test_what_keeps_the_packet_from_leaving_is_told(config: waker.Config) -> None:
    # UDP's port 0 is no destination.
    with running(config._replace(packet_port=0)) as client:
        message = start(client.log_in(), "failed")
    assert message.startswith("error: Failed to send WOL packet: ")
    assert message.endswith(NOT_SENT)


def test_an_early_initrd_is_asked_again(initrd: Any) -> None:
    client, server = initrd(Disks(ONE, early=True))
    client.start()
    wait_for(lambda: "not ready yet" in told(client)["message"])
    assert server.received() == []
    Disks(ONE).save(server.state)
    assert wait_until(client, "booting") == "unlocked: Unlocked: d."
    assert len(server.received()) == 1


ALREADY = "no passphrase is needed: every disk is already open"
SLOW = "The system has not answered yet."


@pytest.mark.parametrize(
    "case",
    [
        (Disks(ONE, early=True), {}, f"not_asked: the initrd is not ready.*{NOT_SENT}"),
        (Disks({}), {}, f"not_up: {ALREADY}. {NOT_SENT} {SLOW}"),
        (Disks(ONE), {}, f"not_up: Unlocked: d. {SLOW}"),
        (Disks({"d": "x"}), {}, "wrong_passphrase: Wrong passphrase for disk d."),
        (
            *(Disks(ONE, wordless=True), {"unlock_seconds": 14}),
            f"not_up: not confirmed.* The passphrase was sent. {SLOW}",
        ),
    ],
    ids=["early", "open", "not up", "wrong", "not confirmed"],
)
def test_a_start_that_fails_is_told_and_forgotten(initrd: Any, case: Any) -> None:
    disks, figures, end = case
    client, _ = initrd(disks, start_seconds=1, **figures)
    assert re.fullmatch(end, start(client, "failed"))
    assert passphrases() == []


def test_a_connection_that_breaks_off_is_tried_again(config: waker.Config) -> None:
    """As one does in an initrd that is about to configure its network."""
    with peer(socket.socket.close) as port:
        machine = config.machine._replace(initrd_port=port, system_port=free_port())
        with running(config._replace(machine=machine)) as client:
            client.log_in().start()
            wait_for(lambda: "does not speak SSH" in told(client)["message"])
            assert told(client)["phase"] == "unlocking"
            cancel(client)


def test_what_could_only_fail_wakes_nobody(config: waker.Config, lab: Homelab) -> None:
    machine = config.machine._replace(host_keys=())
    with running(config._replace(machine=machine)) as client:
        answer = client.log_in().start()
        assert (answer.status, told(client)) == (500, None)
        assert answer.error == f"Failed to start: {waker.NO_PIN}"
        for passphrase in ("", "a\nb", "x" * 513):
            assert client.start(passphrase).status == 400
    assert lab.packets == []


def test_one_unlock_or_start_runs_at_a_time(initrd: Any) -> None:
    client, server = initrd(Disks(ONE, mute=True))
    answer = client.call("DELETE", "/api/start")
    assert (answer.status, answer.error) == (409, "No start is running")
    with ThreadPoolExecutor() as pool:
        unlocking = pool.submit(client.unlock)
        child = wait_for_child(os.getpid())
        for answer in (client.start(), client.unlock()):
            assert (answer.status, answer.error) == (409, BUSY)
        assert client.call("DELETE", "/api/start").status == 409
        os.kill(child, signal.SIGKILL)
    assert unlocking.result().status == 500
    Disks(ONE).save(server.state)
    start(client, "booting")
    for answer in (client.start(), client.unlock()):
        assert (answer.status, answer.error) == (409, BUSY)


def test_a_start_without_a_thread_leaves_room_for_the_next_one(initrd: Any) -> None:
    client, _ = initrd(Disks(ONE))
    with no_threads(), pytest.raises(waker.Fault) as fault:
        client.app.starter.begin(waker.Passphrase("x"), time.monotonic())
    assert fault.value.status == 503
    assert fault.value.headers == (("Retry-After", "5"),)
    assert told(client) is None
    start(client, "booting")


def test_a_bug_ends_a_start_and_the_next_one_can_begin(initrd: Any) -> None:
    client, _ = initrd(Disks(ONE), start_seconds=cast("float", "a bug, on purpose"))
    for _ in range(2):
        message = start(client, "failed")
        bug = r"error: bug: TypeError, waker\.py:\d+\. The passphrase may have been"
        assert re.fullmatch(rf"{bug} sent\.", message)


def test_an_end_is_told_for_an_hour(initrd: Any) -> None:
    client, _ = initrd(Disks({"d": "x"}))
    start(client, "failed")
    starter, now = client.app.starter, time.monotonic()
    told = starter.members(now)
    assert told == starter.members(now + 3500)
    assert starter.members(now + 3601) is None


# ---- Cancelling ----------------------------------------------------------------------


def test_a_cancel_ends_the_waking(config: waker.Config, lab: Homelab) -> None:
    with running(config._replace(mac=waker.Mac(b"\0" * 6))) as client:
        client.log_in()
        for _ in range(2):  # the second one shows that nothing of the first is left
            client.start()
            wait_for(lambda: lab.packets)
            assert cancel(client) == f"cancelled: Cancelled. {NOT_SENT}"
            assert passphrases() == []


def test_a_cancel_before_the_disk_asks_sends_nothing(initrd: Any) -> None:
    client, server = initrd(Disks(ONE, mute=True))
    start(client, "unlocking")
    child = wait_for_child(os.getpid())
    assert cancel(client) == f"cancelled: Cancelled. {NOT_SENT}"
    assert not Path(f"/proc/{child}").exists()
    assert server.received() == []
    assert passphrases() == []


def test_a_cancel_after_sending_keeps_the_outcome(initrd: Any) -> None:
    client, server = initrd(Disks(ONE, slow=3))
    client.start()
    wait_for(server.received)
    assert cancel(client) == f"unlocked: {SENT}"
    assert passphrases() == []


def test_a_cancel_while_the_system_boots_says_so(initrd: Any) -> None:
    client, _ = initrd(Disks(ONE))
    client.start()
    starter = client.app.starter
    wait_for(lambda: starter.members(time.monotonic())["phase"] == "booting")
    assert passphrases() == []  # no later request has taken its place in a worker
    assert cancel(client) == f"unlocked: {SENT}"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_a_start(tmp_path: Path, end: signal.Signals) -> None:
    with paramiko_server(tmp_path, Disks(ONE, mute=True)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            started.client.log_in().start()
            child = wait_for_child(started.process.pid)
            started.process.send_signal(end)
            assert started.process.wait(10) == 0
            assert not Path(f"/proc/{child}").exists()
            started.stop()
    assert started.log[-1] == f"start: cancelled: Cancelled. {NOT_SENT}"
    assert initrd.received() == []


def test_the_log_tells_who_began_it_and_how_it_went(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            start(started.client.log_in(), "booting")
            cancel(started.client)
            started.stop()
    assert sorted(started.log[2:]) == [
        "ip=127.0.0.1 Cancelling; the status shows the result",
        "ip=127.0.0.1 Started; the status shows progress",
        "start: booting: Unlocked: d.",
        f"start: cancelled: {SENT}",
        "start: unlocking: Connecting to the initrd",
        "stopping",
    ]
