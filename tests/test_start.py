"""A start, from the tap to the system: what it does, tells, and forgets."""

import contextlib
import gc
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PASSPHRASE, Client, daemon, running
from cryptroot_unlock import Disks
from homelab import Homelab, bind, new_key, public_line
from ssh_servers import paramiko_server
from test_daemon import MAC, wait_for, wait_for_child

import waker

BODY = {"passphrase": PASSPHRASE}
ENDS = ("done", "failed", "cancelled")
NOT_SENT = "The passphrase was not sent."


def start(client: Client, passphrase: str = PASSPHRASE) -> None:
    answer = client.call("POST", "/api/start", {"passphrase": passphrase})
    assert answer.status == 200, answer.body
    assert answer.json.keys() == {"success", "message"}
    assert answer.json["success"] is True


def told(client: Client) -> Any:
    return client.call("GET", "/api/status").json["start"]


def wait_until(client: Client, *phases: str) -> str:
    """Wait for a phase; returns its message."""

    def there() -> str:
        now = told(client)
        if now["phase"] in ENDS and now["phase"] not in phases:
            raise AssertionError(now)
        return str(now["message"]) if now["phase"] in phases else ""

    return wait_for(there)


def passphrases() -> list[object]:
    """Find what keeps the passphrase in the daemon, which runs in this process."""
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


@pytest.fixture(autouse=True)
def forget() -> None:
    """Free what an earlier test has left in a cycle."""
    gc.collect()


@pytest.fixture
def initrd(tmp_path: Path) -> Iterator[Any]:
    """Starts a machine that waits for its passphrase; yields a client and the initrd.

    After the unlock nothing boots.
    """
    with contextlib.ExitStack() as stack:

        def begin(disks: Disks, start_seconds: float = 600) -> tuple[Client, Any]:
            folder = tmp_path / "initrd"
            folder.mkdir()
            server = stack.enter_context(paramiko_server(folder, disks))
            settings = {"WAKER_PIN": "12345678"} | MAC | server.machine().settings()
            config = waker.read_config(settings, tmp_path)
            config = config._replace(start_seconds=start_seconds)
            return stack.enter_context(running(config)).log_in("12345678"), server

        yield begin


def test_a_machine_that_is_off_is_woken_and_unlocked_and_seen_up(
    owner: Client, lab: Homelab
) -> None:
    assert told(owner) is None
    start(owner)
    seen = [told(owner)["phase"]]

    def another() -> str:
        phase = str(told(owner)["phase"])
        return "" if phase == seen[-1] else phase

    while seen[-1] not in ENDS:
        seen.append(wait_for(another))
    order = ["waking", "unlocking", "booting", "done"]
    assert seen == [phase for phase in order if phase in seen]  # one may be too short
    assert (seen[0], seen[-1]) == ("waking", "done")
    status = owner.call("GET", "/api/status").json
    assert status["state"] == "up"
    assert status["start"]["message"] == "Unlocked: cryptroot. The system is up."
    assert status["start"].keys() == {*("phase", "outcome", "message", "seconds")}
    assert Disks.load(lab.state).received == [PASSPHRASE.encode().hex()]


def test_a_machine_that_is_up_is_left_alone(owner: Client, lab: Homelab) -> None:
    start(owner)
    wait_until(owner, "done")
    sent = list(lab.packets)
    start(owner, "another")
    assert wait_until(owner, "done") == f"The system is already up. {NOT_SENT}"
    assert lab.packets == sent
    assert len(Disks.load(lab.state).received) == 1


def test_a_machine_that_waits_already_is_not_woken(owner: Client, lab: Homelab) -> None:
    owner.call("POST", "/api/wol")
    lab.wait_for("locked")
    sent = list(lab.packets)
    start(owner)
    wait_until(owner, "done")
    assert lab.packets == sent


def test_a_wrong_passphrase_fails_and_a_right_one_goes_on(
    owner: Client, lab: Homelab
) -> None:
    start(owner, "wrong")
    assert wait_until(owner, "failed") == "Wrong passphrase for disk cryptroot."
    start(owner)
    wait_until(owner, "done")


def test_a_machine_that_stays_silent_is_woken_again_and_again(
    config: waker.Config, lab: Homelab
) -> None:
    mac = waker.parse_mac("52:54:00:00:00:99")
    config = config._replace(mac=mac, packet_seconds=0.1, start_seconds=2)
    with running(config) as client:
        start(client.log_in())
        reason = "The machine did not wake: check power, network cable and Wake-on-LAN."
        assert wait_until(client, "failed") == f"{reason} {NOT_SENT}"
        assert told(client)["seconds"] >= 2
    assert len(lab.packets) >= 6  # three at a time
    assert set(lab.packets) == {waker.magic_packet(mac)}


def test_a_machine_that_is_awake_gets_no_packet(
    config: waker.Config, lab: Homelab
) -> None:
    with bind("127.0.0.1", 0) as one, bind("127.0.0.1", 0) as other:  # they refuse
        machine = config.machine._replace(
            initrd_port=one.getsockname()[1], system_port=other.getsockname()[1]
        )
        with running(config._replace(machine=machine, start_seconds=1)) as client:
            start(client.log_in())
            message = wait_until(client, "failed")
    assert "woke, but the SSH port of its initrd stayed closed" in message
    assert lab.packets == []


def test_what_keeps_the_packet_from_leaving_is_told(config: waker.Config) -> None:
    # UDP's port 0 is no destination.
    with running(config._replace(packet_port=0)) as client:
        start(client.log_in())
        message = wait_until(client, "failed")
    assert message.startswith("Failed to send WOL packet: ")
    assert message.endswith(NOT_SENT)


def test_an_initrd_that_is_not_that_far_yet_is_asked_again(initrd: Any) -> None:
    client, server = initrd(Disks({"d": PASSPHRASE}, early=True), start_seconds=5)
    start(client)
    wait_for(lambda: "not ready yet" in told(client)["message"])
    assert server.received() == []
    Disks({"d": PASSPHRASE}).save(server.state)
    assert wait_until(client, "booting") == "Unlocked: d."
    assert len(server.received()) == 1


def test_an_initrd_that_never_gets_that_far_is_told(initrd: Any) -> None:
    client, _ = initrd(Disks({"d": PASSPHRASE}, early=True), start_seconds=1)
    start(client)
    message = wait_until(client, "failed")
    assert message.startswith("the initrd is not ready yet")
    assert message.endswith(NOT_SENT)


def test_a_disk_that_was_unlocked_by_another_is_watched(initrd: Any) -> None:
    client, _ = initrd(Disks({}), start_seconds=2)
    start(client)
    told = "no passphrase is needed: every disk is already open"
    assert wait_until(client, "booting") == f"{told}. {NOT_SENT}"
    message = wait_until(client, "failed")
    assert message == f"{told}. {NOT_SENT} The system has not answered yet."


def test_an_unlock_without_a_verdict_is_watched(initrd: Any) -> None:
    client, server = initrd(Disks({"d": PASSPHRASE}, slow=9))
    start(client)
    wait_for(server.received)
    os.kill(wait_for_child(os.getpid()), signal.SIGKILL)
    told = "not confirmed: the unlocking process ended with status -9. The passphrase"
    told += " was sent."
    assert wait_until(client, "booting") == told
    assert cancel(client) == "Cancelled. The passphrase was sent."


def test_a_connection_that_breaks_off_is_tried_again(tmp_path: Path) -> None:
    """As one does in an initrd that is about to configure its network."""
    with paramiko_server(tmp_path, Disks({"d": PASSPHRASE})) as initrd:
        with bind("127.0.0.1", 0) as broken, bind("127.0.0.1", 0) as closed:
            broken.listen()
            broken.settimeout(0.2)
            machine = initrd.machine()._replace(
                initrd_port=broken.getsockname()[1], system_port=closed.getsockname()[1]
            )
            settings = {"WAKER_PIN": "12345678"} | MAC | machine.settings()
            config = waker.read_config(settings, tmp_path)
            with running(config) as client:
                start(client.log_in("12345678"))
                ends = time.monotonic() + 60
                while "does not speak SSH" not in told(client)["message"]:
                    assert time.monotonic() < ends
                    with contextlib.suppress(TimeoutError):
                        broken.accept()[0].close()
                assert told(client)["phase"] == "unlocking"
                cancel(client)


def test_a_start_that_finds_no_thread_leaves_room_for_the_next_one(
    owner: Client,
) -> None:
    assert owner.app
    passphrase = waker.Passphrase(PASSPHRASE)
    usual = threading.stack_size(1 << 46)  # bytes, which nobody has
    try:
        with pytest.raises(waker.Fault) as fault:
            owner.app.starter.begin(passphrase, time.monotonic())
    finally:
        threading.stack_size(usual)
    assert fault.value.status == 503
    assert fault.value.headers == (("Retry-After", "5"),)
    assert told(owner) is None
    assert owner.call("DELETE", "/api/start").status == 409
    start(owner)
    wait_until(owner, "done")


def test_another_host_key_ends_a_start(owner: Client, tmp_path: Path) -> None:
    assert owner.app
    machine = owner.app.config.machine
    other = waker.HostKey.parse(public_line(new_key()))
    config = owner.app.config._replace(machine=machine._replace(host_keys=(other,)))
    with running(config) as client:
        start(client.log_in())
        message = wait_until(client, "failed")
    assert message.startswith("the host key differs: ")
    assert message.endswith(NOT_SENT)


def test_a_system_that_is_not_seen_up_is_told(initrd: Any) -> None:
    client, _ = initrd(Disks({"d": PASSPHRASE}), start_seconds=2)
    start(client)
    message = "Unlocked: d. The system has not answered yet."
    assert wait_until(client, "failed") == message


def test_what_could_only_fail_is_refused_before_the_machine_is_woken(
    config: waker.Config, lab: Homelab
) -> None:
    machine = config.machine._replace(host_keys=())
    with running(config._replace(machine=machine)) as client:
        answer = client.log_in().call("POST", "/api/start", BODY)
        assert (answer.status, told(client)) == (500, None)
    assert answer.error == f"Failed to start: {waker.NO_PIN}"
    assert lab.packets == []


def test_one_runs_at_a_time(owner: Client, lab: Homelab) -> None:
    owner.call("POST", "/api/wol")
    lab.wait_for("locked")
    Disks({"cryptroot": PASSPHRASE}, slow=1).save(lab.state)
    answers = []
    unlock = threading.Thread(
        target=lambda: answers.append(owner.call("POST", "/api/unlock", BODY))
    )
    unlock.start()
    wait_for(lambda: Disks.load(lab.state).received)
    busy = "Another unlock or start is running; wait for it to end"
    assert owner.call("POST", "/api/start", BODY).error == busy
    assert owner.call("DELETE", "/api/start").status == 409
    unlock.join()
    assert answers[0].status == 200


def test_neither_another_start_nor_an_unlock_runs_beside_a_start(owner: Client) -> None:
    start(owner)
    for path in ("/api/start", "/api/unlock"):
        answer = owner.call("POST", path, BODY)
        assert answer.status == 409
        assert answer.error.startswith("Another unlock or start is running")
    wait_until(owner, "done")


@pytest.mark.parametrize("passphrase", ["", "a\nb", "x" * 513])
def test_a_passphrase_that_is_none_starts_nothing(
    owner: Client, passphrase: str
) -> None:
    answer = owner.call("POST", "/api/start", {"passphrase": passphrase})
    assert answer.status == 400
    assert told(owner) is None


def test_without_a_start_there_is_nothing_to_cancel(owner: Client) -> None:
    answer = owner.call("DELETE", "/api/start")
    assert (answer.status, answer.error) == (409, "No start is running")


def cancel(client: Client) -> str:
    """Cancel; returns what the start tells from then on."""
    answer = client.call("DELETE", "/api/start")
    assert (answer.status, answer.json["success"]) == (200, True)
    return wait_until(client, "cancelled")


def test_a_start_that_is_cancelled_while_it_wakes_sends_nothing_more(
    config: waker.Config, lab: Homelab
) -> None:
    config = config._replace(mac=waker.Mac(b"\0" * 6), packet_seconds=0)
    with running(config) as client:
        start(client.log_in())
        wait_for(lambda: lab.packets)
        assert cancel(client) == f"Cancelled. {NOT_SENT}"
        assert passphrases() == []
        start(client)  # which shows that nothing of the first one is left
        wait_until(client, "waking")
        cancel(client)


def test_a_start_that_is_cancelled_before_the_disk_asks_sends_nothing(
    initrd: Any,
) -> None:
    client, server = initrd(Disks({"d": PASSPHRASE}, mute=True))
    start(client)
    wait_until(client, "unlocking")
    child = wait_for_child(os.getpid())
    assert cancel(client) == f"Cancelled. {NOT_SENT}"
    assert not Path(f"/proc/{child}").exists()
    assert server.received() == []
    assert passphrases() == []


def test_what_is_cancelled_before_its_process_begins_sends_nothing(
    initrd: Any,
) -> None:
    client, server = initrd(Disks({"d": PASSPHRASE}))
    unlocker = client.app.unlocker
    unlocker.claim()
    unlocker.cancelled.set()
    outcome = unlocker.run(waker.Passphrase(PASSPHRASE))
    unlocker.busy.release()
    assert outcome.message.endswith(NOT_SENT)
    assert server.received() == []


def test_a_start_that_is_cancelled_after_sending_keeps_what_it_is_told(
    initrd: Any,
) -> None:
    client, server = initrd(Disks({"d": PASSPHRASE}, slow=4))
    start(client)
    wait_for(server.received)
    answer = client.call("DELETE", "/api/start")
    text = "Cancelling; the status shows the result"
    assert answer.json == {"success": True, "message": text}
    assert told(client)["phase"] == "unlocking"
    assert wait_until(client, "cancelled") == "Cancelled. The passphrase was sent."
    assert told(client)["outcome"] == "unlocked"
    assert passphrases() == []


def test_a_start_that_is_cancelled_while_the_system_boots_says_so(initrd: Any) -> None:
    client, _ = initrd(Disks({"d": PASSPHRASE}))
    start(client)
    starter = client.app.starter
    wait_for(lambda: starter._told[0] == "booting")
    assert passphrases() == []  # no later request has taken its place in a worker
    assert cancel(client) == "Cancelled. The passphrase was sent."


def test_the_passphrase_of_a_start_that_fails_is_forgotten(initrd: Any) -> None:
    client, _ = initrd(Disks({"d": "another"}), start_seconds=2)
    start(client)
    wait_until(client, "failed")
    assert passphrases() == []


def test_a_bug_ends_a_start_and_the_next_one_can_begin(owner: Client) -> None:
    assert owner.app
    mended, owner.app.starter._watcher = owner.app.starter._watcher, None  # type: ignore[assignment]
    start(owner)
    answer = wait_until(owner, "failed")
    text = r"bug: AttributeError, waker\.py:\d+\. The passphrase may have been sent\."
    assert re.fullmatch(text, answer)
    owner.app.starter._watcher = mended
    start(owner)
    wait_until(owner, "done")


def test_the_seconds_stand_still_at_the_end_and_are_told_for_an_hour(
    owner: Client,
) -> None:
    start(owner)
    wait_until(owner, "done")
    assert owner.app
    starter = owner.app.starter
    began, ended = starter._began, starter._ended
    for later in (0.0, 100.0, waker.KEPT_SECONDS - 0.1):
        now = starter.members(ended + later)
        assert now
        assert now["seconds"] == int(ended - began)
    assert starter.members(ended + waker.KEPT_SECONDS + 0.1) is None


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_a_start(tmp_path: Path, end: signal.Signals) -> None:
    with paramiko_server(tmp_path, Disks({"d": "p"}, mute=True)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            start(started.client.log_in())
            child = wait_for_child(started.process.pid)
            started.process.send_signal(end)
            assert started.process.wait(10) == 0
            assert not Path(f"/proc/{child}").exists()
            started.stop()
    assert started.log[-1].endswith(f"start: cancelled: Cancelled. {NOT_SENT}")
    assert initrd.received() == []


def test_the_log_tells_who_began_it_and_how_it_went(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"d": PASSPHRASE})) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            start(started.client.log_in())
            wait_until(started.client, "booting")
            cancel(started.client)
            started.stop()
    log = "\n".join(started.log)
    for line in (
        "ip=127.0.0.1 Started; the status shows progress",
        "ip=127.0.0.1 Cancelling; the status shows the result",
        "start: unlocking: Connecting to the initrd",
        "start: booting: Unlocked: d.",
        "start: cancelled: Cancelled. The passphrase was sent.",
    ):
        assert line in log
    assert PASSPHRASE not in log


def test_two_clients_see_the_same_start(owner: Client) -> None:
    other = Client(owner.port).log_in()
    start(owner)
    phases = {told(client)["phase"] for client in (owner, other)}
    assert len(phases) == 1
    wait_until(other, "done")
    assert told(owner) == told(other)
