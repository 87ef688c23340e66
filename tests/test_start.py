"""A start, from the tap to the booted system: what it does, reports and forgets."""

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
from ssh_servers import Initrd, free_port, paramiko_server, tcp_server, unlock

import waker

__all__ = ["home"]  # a fixture
ONE = {"d": PASSPHRASE}
NOT_SENT = "The passphrase was not sent."
OFF = waker.PortStates(waker.PortState.SILENT, waker.PortState.SILENT)


def shown(client: Client) -> Any:
    """Return the start as the status shows it."""
    return client.status()["start"]


def wait_until(client: Client, phase: str) -> str:
    """Wait for a phase; returns its outcome and its message."""
    start = wait_for(lambda: shown(client), lambda now: now["phase"] == phase)
    return "{outcome}: {message}".format(**start)


def start(client: Client, phase: str, passphrase: str = PASSPHRASE) -> str:
    """Start, and wait for a phase; returns its outcome and its message."""
    assert client.start(passphrase).json["success"]
    return wait_until(client, phase)


def cancel(client: Client, phase: str = "cancelled") -> str:
    """Cancel, and wait until that has happened; returns the outcome and the message."""
    assert client.call("DELETE", "/api/start").json["success"]
    return wait_until(client, phase)


def is_forgotten() -> bool:
    """Check that no object in this process holds the passphrase of a start."""
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
    """Start a machine that asks for its passphrase, but whose system never boots."""
    with paramiko_server(folder, disks) as initrd:
        settings = {"WAKER_PIN": PIN} | MAC | initrd.machine().settings()
        settings["WAKER_SYSTEM_SSH_PORT"] = str(free_port())
        config = waker.read_config(settings, folder)
        with running(config._replace(**figures)) as client:
            assert client.log_in().start().status == 200
            yield client, initrd


def test_a_start_wakes_and_unlocks_a_machine_until_it_is_up(
    owner: Client, lab: Homelab, capfd: pytest.CaptureFixture[str]
) -> None:
    assert shown(owner) is None
    wrong = "wrong_passphrase: Wrong passphrase for disk cryptroot."
    assert start(owner, "failed", "wrong") == wrong
    assert start(owner, "done") == "up: Unlocked: cryptroot. The system is up."
    begun = shown(owner)
    members = {"phase", "outcome", "message", "seconds", "sent", "times"}
    assert begun.keys() == members
    assert begun["sent"]
    assert [*begun["times"]] == ["waking", "unlocking", "booting", "done"]
    assert [*begun["times"].values()] == sorted(begun["times"].values())
    assert begun["times"]["waking"] == 0
    assert begun["times"]["done"] == begun["seconds"]
    assert start(owner, "done", "x") == f"up: The system is already up. {NOT_SENT}"
    assert len(lab.packets) == 3
    received = Disks.load(lab.state).received
    assert [bytes.fromhex(text).decode() for text in received] == ["wrong", PASSPHRASE]
    phases = dict.fromkeys(re.findall("start: (.*?):", capfd.readouterr().err))
    assert [*phases] == ["waking", "unlocking", "failed", "booting", "done"]


AWAKE = {"initrd_port": free_port(), "system_port": free_port()}
NOWHERE = {"host": "255.255.255.255"}  # TCP cannot connect there


def test_a_machine_that_stops_responding_is_not_called_asleep(
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
    ids=["silent", "awake", "not checked", "no packet", "bug"],
)
def test_a_failed_start_shows_its_reason_for_an_hour(
    config: waker.Config, lab: Homelab, ports: Any, figures: Any, end: str
) -> None:
    """Packets are repeated only if nothing shows that the machine is awake."""
    mac = waker.parse_mac("52:54:00:00:00:99")
    config = config._replace(machine=config.machine._replace(**ports), mac=mac)
    config = config._replace(**{"start_seconds": 6, "packet_seconds": 0.1} | figures)
    app, passphrase = new_app(config), waker.Passphrase("x")
    began = time.monotonic()
    app.starter.begin(passphrase, began)
    wait_for_starts()
    now = time.monotonic()
    start: Any = app.starter.members(now, OFF)
    assert re.fullmatch(end, "{outcome}: {message}".format(**start))
    assert start["sent"] == ("bug" in end)  # it may have been
    assert start["seconds"] <= now - began
    assert start["seconds"] >= 6 or not end.startswith("not_awake")
    assert app.starter.members(now + 3597, OFF) == start  # an hour after its end
    assert app.starter.members(now + 3600, OFF) is None
    assert not app.unlocker.claimed.locked()  # so another start may begin
    is_unseen = "did not wake" in end or "could not be checked" in end
    assert (len(lab.packets) >= 6) == is_unseen  # three at a time
    assert set(lab.packets) <= {waker.magic_packet(mac)}


def test_a_start_that_gets_no_thread_does_not_block_the_next(
    config: waker.Config,
) -> None:
    starter, passphrase = new_app(config).starter, waker.Passphrase("x")
    with no_threads(), pytest.raises(waker.Fault) as fault:
        starter.begin(passphrase, 0)
    assert (fault.value.status, fault.value.headers) == (503, (("Retry-After", "5"),))
    assert starter.members(0, OFF) is None
    starter.begin(passphrase, time.monotonic())
    starter.cancel()
    wait_for_starts()


def test_a_later_packet_that_fails_does_not_end_the_start(
    home: Home, tmp_path: Path
) -> None:
    """A restarting switch, or a card that changes its speed, interrupts the link."""
    router, machine, _ = home
    ip(f"-n {router.name} route del default")  # or the packet would leave there
    (tmp_path / "ssh_key").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (tmp_path / "ssh_key").chmod(0o600)
    settings = MAC | {"WAKER_PIN": PIN, "WAKER_HOMELAB_HOST": "192.168.77.99"}
    settings["WAKER_SSH_HOST_KEY"] = public_line(new_key())
    config = waker.read_config(settings, tmp_path)._replace(packet_seconds=0.1)
    starter = new_app(config).starter

    def message() -> str:
        start: Any = starter.members(time.monotonic(), OFF)
        return str(start["message"])

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
        wait_for(lambda: "not ready yet" in shown(client)["message"])
        Disks(ONE).save(lab.state)
        began = shown(client)["seconds"]  # within three more, it could retry often
        wait_for(lambda: shown(client)["seconds"] >= began + 3)
        assert lab.received() == []
        assert cancel(client) == f"cancelled: Cancelled. {NOT_SENT}"


def test_an_early_initrd_is_asked_again(tmp_path: Path) -> None:
    """However late it asks, its system then has all its time to boot."""
    figures = {"start_seconds": 5, "retry_seconds": 5, "packet_seconds": 600}
    disks = Disks(ONE, early=True)
    with starting(tmp_path, disks, **figures) as (client, initrd):
        wait_for(lambda: "not ready yet" in shown(client)["message"])
        assert shown(client)["outcome"] is None
        assert initrd.received() == []
        Disks(ONE).save(initrd.state)
        assert wait_until(client, "booting") == "unlocked: Unlocked: d."


def test_a_start_forgets_the_passphrase_before_it_waits_for_the_system(
    tmp_path: Path,
) -> None:
    with starting(tmp_path, Disks(ONE)) as (client, _):
        wait_until(client, "booting")
        wait_for(is_forgotten)
        assert shown(client)["phase"] == "booting"


def test_a_running_system_is_not_taken_for_its_initrd(tmp_path: Path) -> None:
    """Its own SSH server may use the initrd's port."""
    disks, system = Disks(ONE), socket.create_server(("127.0.0.1", 0))
    with system, paramiko_server(tmp_path, disks) as initrd:
        settings = {"WAKER_PIN": PIN} | MAC | initrd.machine().settings()
        settings["WAKER_SYSTEM_SSH_PORT"] = str(system.getsockname()[1])
        with running(waker.read_config(settings, tmp_path)) as client:
            ended = start(client.log_in(), "done")
            assert ended == f"up: The system is already up. {NOT_SENT}"
        assert initrd.received() == []


class CountingWatcher(waker.Watcher):
    """Counts how often a result is asked for."""

    count = 0

    def check(self, now: float) -> waker.PortStates:
        self.count += 1
        return super().check(now)


@pytest.mark.parametrize("phase", ["waking", "booting"])
def test_a_start_that_waits_looks_once_a_second_and_logs_no_line_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], phase: str
) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        machine = initrd.machine()._replace(system_port=free_port())
        if phase == "waking":
            machine = machine._replace(initrd_port=free_port())
        settings = {"WAKER_PIN": PIN} | MAC | machine.settings()
        config = waker.read_config(settings, tmp_path)._replace(start_seconds=4)
        watcher = CountingWatcher(machine)
        starter = waker.Starter(config, watcher, new_app(config).unlocker)
        starter.begin(waker.Passphrase(PASSPHRASE), time.monotonic())
        wait_for_starts()
    start: Any = starter.members(time.monotonic(), OFF)
    assert [*start["times"]][-2:] == [phase, "failed"]
    assert 3 <= watcher.count <= start["seconds"] + 3
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len({*lines}) > 1


SLOW = "The system has not answered yet."


@pytest.mark.parametrize(
    ("disks", "figure", "end"),
    [
        (
            Disks(ONE, early=True),
            "prompt_seconds",
            f"not_asked: the initrd is not ready.* {NOT_SENT}",
        ),
        (
            Disks({}),
            "start_seconds",
            f"not_up: no passphrase is needed: .* {NOT_SENT} {SLOW}",
        ),
        (Disks(ONE), "start_seconds", f"not_up: Unlocked: d. {SLOW}"),
        (
            Disks(ONE, slow=9),
            "start_seconds",
            f"not_up: Not confirmed: .* was sent, but .* {SLOW}",
        ),
    ],
    ids=["too early", "already open", "unlocked", "not confirmed"],
)
def test_a_start_that_times_out_reports_what_it_knows(
    tmp_path: Path, disks: Disks, figure: str, end: str
) -> None:
    with starting(tmp_path, disks, **{figure: 0}) as (client, initrd):
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
        ended = wait_until(client, "failed")
        assert ended.startswith("not_up: Not confirmed: the passphrase was sent, but")
        assert initrd.received() == [PASSPHRASE.encode()]


def test_a_start_without_a_pinned_host_key_wakes_nothing(
    config: waker.Config, lab: Homelab
) -> None:
    machine = config.machine._replace(host_keys=())
    with running(config._replace(machine=machine)) as client:
        answer = client.log_in().start()
        assert (answer.status, shown(client)) == (500, None)
        assert answer.error == f"Failed to start: {waker.NOT_PINNED}. {NOT_SENT}"
    assert lab.packets == []


def test_a_start_without_an_ssh_key_wakes_nothing(
    config: waker.Config, lab: Homelab
) -> None:
    with running(config) as client:
        client.log_in()
        lab.ssh_key.unlink()  # after the daemon has checked it
        remedy = f"make it with: ssh-keygen -t ed25519 -N '' -f {lab.ssh_key}"
        fault = f"SSH key {lab.ssh_key} is missing; correct the path, or {remedy}."
        fault += f" {NOT_SENT}"
        for answer, request in ((client.start(), "start"), (client.unlock(), "unlock")):
            assert answer.status == 500, request
            assert answer.error == f"Failed to {request}: {fault}"
        assert shown(client) is None
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
    """Open the system's SSH port."""
    return SshServer(bind("127.0.0.1", machine.system_port), new_key(), OPENSSH)


def test_an_unconfirmed_unlock_is_doubted_while_the_initrd_runs(
    tmp_path: Path,
) -> None:
    """The doubt ends with the initrd, and the system may still come up."""
    disks = Disks({"d": "another"}, dies="hangs up")
    with starting(tmp_path, disks, doubt_seconds=4) as (client, initrd):
        assert wait_until(client, "booting") == LOST
        seen = wait_for(lambda: shown(client), lambda now: "still" in now["message"])
        assert seen["phase"] == "booting"
        assert "{outcome}: {message}".format(**seen) == DOUBT
        assert seen["seconds"] - seen["times"]["booting"] >= 3  # of the 4, rounded
        Disks(ONE, dies="before").save(initrd.state)
        unlock(initrd.machine())  # by somebody else
        seen = wait_for(
            lambda: shown(client), lambda now: "still" not in now["message"]
        )
        assert "{outcome}: {message}".format(**seen) == LOST
        assert client.app
        with contextlib.closing(listen_at(client.app.config.machine)):
            up, reported = wait_until(client, "done").split(". ", 1)
    assert up == "up: The system is up"
    assert reported in LOST


def test_an_unlock_is_not_doubted_once_the_initrd_has_ended(tmp_path: Path) -> None:
    disks = Disks({"d": "another"}, dies="for good")
    with starting(tmp_path, disks, doubt_seconds=0, start_seconds=4) as (client, _):
        reported = LOST.removeprefix("not_confirmed: ")
        assert wait_until(client, "failed") == f"not_up: {reported} {SLOW}"


@pytest.mark.parametrize(
    ("disks", "end"),
    [
        (Disks(ONE), f"Unlocked: d. {SLOW}"),
        (
            Disks({}),
            (
                "no passphrase is needed: all disks seem to be open. "
                f"The passphrase was not sent. {SLOW}"
            ),
        ),
        (
            Disks({"d": "another"}, dies="hangs up"),
            f"{DOUBT.removeprefix('not_confirmed: ')} {SLOW}",
        ),
    ],
    ids=["confirmed", "already open", "not confirmed"],
)
def test_only_an_unconfirmed_unlock_is_doubted(
    tmp_path: Path, disks: Disks, end: str
) -> None:
    """To the end, as its initrd runs on."""
    with starting(tmp_path, disks, doubt_seconds=0, start_seconds=3) as (client, _):
        assert wait_until(client, "failed") == f"not_up: {end}"


def test_a_cancelled_watch_keeps_what_the_unlock_reported(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE, dies="hangs up")) as (client, _):
        assert wait_until(client, "booting") == LOST
        assert cancel(client) == LOST


def test_a_cancelled_start_is_forgotten_once_the_machine_is_up(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE)) as (client, _):
        wait_until(client, "booting")
        cancel(client)
        assert client.app
        with contextlib.closing(listen_at(client.app.config.machine)):
            seen = wait_for(client.status, lambda now: now["state"] == "up")
        assert seen["start"] is None


class SlowWatcher(CountingWatcher):
    """Its second check finds the system up, but takes as long as a test wants."""

    def __init__(self, machine: waker.Machine) -> None:
        super().__init__(machine)
        self.may_end = threading.Event()

    def check(self, now: float) -> waker.PortStates:
        ports = super().check(now)
        if self.count < 2:
            return ports
        self.may_end.wait(60)  # seconds
        return ports._replace(system=waker.PortState.OPEN)


def test_a_watch_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    """Even if it sees the system only a moment later."""
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        machine = initrd.machine()._replace(system_port=free_port())
        settings = {"WAKER_PIN": PIN} | MAC | machine.settings()
        config, watcher = waker.read_config(settings, tmp_path), SlowWatcher(machine)
        starter = waker.Starter(config, watcher, new_app(config).unlocker)
        starter.begin(waker.Passphrase(PASSPHRASE), time.monotonic())
        wait_for(lambda: watcher.count == 2)  # it watches
        starter.end_watch()
        now = time.monotonic()
        start: Any = starter.members(now, OFF)
        watcher.may_end.set()
        wait_for_starts()
    assert "{phase}, {outcome}: {message}".format(**start) == (
        "cancelled, unlocked: Unlocked: d."
    )
    assert starter.members(now, OFF) == start


def test_a_refused_start_or_unlock_ends_no_watch(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE)) as (client, initrd):
        wait_until(client, "booting")
        initrd.ssh_key.unlink()
        assert client.start().status == client.unlock().status == 500
        assert shown(client)["phase"] == "booting"


def test_a_start_and_the_status_share_their_checks(tmp_path: Path) -> None:
    """OpenSSH penalises clients that connect too often."""
    with starting(tmp_path, Disks(ONE)) as (client, _):
        wait_until(client, "booting")
        assert client.app
        watcher, machine = client.app.watcher, client.app.config.machine
        with contextlib.closing(listen_at(machine)):
            # The next ten minutes share this result, although the port is closed again.
            ports = watcher.check(time.monotonic() + 600)
        assert ports == waker.PortStates(*[waker.PortState.OPEN] * 2)
        assert wait_until(client, "done") == "up: Unlocked: d. The system is up."
        assert start(client, "done") == f"up: The system is already up. {NOT_SENT}"


@pytest.mark.parametrize(
    "disks",
    [Disks(ONE), Disks(ONE, dies="hangs up")],
    ids=["confirmed", "not confirmed"],
)
def test_a_new_start_replaces_a_watch(tmp_path: Path, disks: Disks) -> None:
    """If several arrive together, one is accepted. It answers the disk that asks."""
    with starting(tmp_path, disks) as (client, initrd):
        wait_until(client, "booting")
        Disks({"second": "x"}, slow=2, received=["66"]).save(initrd.state)
        with ThreadPoolExecutor(8) as pool:
            begun = [pool.submit(client.start, "x") for _ in range(8)]
        assert sorted(each.result().status for each in begun) == [200] + 7 * [409]
        assert wait_until(client, "booting") == "unlocked: Unlocked: second."
        assert initrd.received() == [b"f", b"x"]
        starts = [each for each in threading.enumerate() if each.name == "start"]
        wait_for(lambda: sum(thread.is_alive() for thread in starts) == 1)
        assert shown(client)["phase"] == "booting"


def test_an_unlock_ends_a_watch(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE)) as (client, initrd):
        wait_until(client, "booting")
        Disks({"second": "x"}).save(initrd.state)
        assert client.unlock("x").json["message"] == "Unlocked: second."
        assert wait_until(client, "cancelled") == "unlocked: Unlocked: d."
        answer = client.call("DELETE", "/api/start")
        assert (answer.status, answer.error) == (409, "No start is running")


@pytest.mark.parametrize("right", [True, False], ids=["pinned", "another key"])
def test_a_failure_is_forgotten_once_up_unless_the_host_key_differs(
    tmp_path: Path, right: bool
) -> None:
    """A wrong host key stays an alarm: any program may open the system's port."""
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
            assert shown(client)["sent"] == right
            with contextlib.closing(listen_at(config.machine)):
                wait_for(lambda: client.status()["state"] == "up")
                assert (shown(client) is None) == right
            wait_for(lambda: client.status()["state"] != "up")
            assert (shown(client) is None) == right


# ---- Cancelling ----------------------------------------------------------------------


def test_a_cancel_ends_the_wait_for_an_early_initrd(config: waker.Config) -> None:
    """The initrd hangs up while it configures its network, so waker would retry."""
    with tcp_server(socket.socket.close) as port:
        machine = config.machine._replace(initrd_port=port, system_port=free_port())
        with running(config._replace(machine=machine)) as client:
            client.log_in().start()
            wait_for(lambda: "does not speak SSH" in shown(client)["message"])
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
    ("disks", "received", "phase", "end"),
    [
        (Disks(ONE, mute=True), [], "cancelled", f"cancelled: Cancelled. {NOT_SENT}"),
        (
            Disks(ONE, slow=1),
            [PASSPHRASE.encode()],
            "cancelled",
            "unlocked: Unlocked: d.",
        ),
        (
            Disks({"d": "another"}, slow=1),
            [PASSPHRASE.encode()],
            "failed",
            "wrong_passphrase: Wrong passphrase for disk d.",
        ),
    ],
    ids=["before sending", "after sending", "wrong passphrase"],
)
def test_a_cancel_lets_an_unlock_finish_once_the_passphrase_was_sent(
    tmp_path: Path, disks: Disks, received: list[bytes], phase: str, end: str
) -> None:
    with starting(tmp_path, disks) as (client, initrd):
        child = wait_for_child(os.getpid())
        wait_for(lambda: initrd.received() == received)
        for answer in (client.start(), client.unlock()):
            assert answer.status == 409
            assert answer.error.startswith("Another unlock or start is running")
        assert cancel(client, phase) == end
        assert not Path(f"/proc/{child}").exists()
        assert initrd.received() == received
        wait_for(is_forgotten)
        answer = client.call("DELETE", "/api/start")
        assert (answer.status, answer.error) == (409, "No start is running")


def test_sigterm_cancels_a_start_and_the_log_has_each_step(tmp_path: Path) -> None:
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
    # A request is logged after its start has begun, so these lines may change places.
    assert sorted(started.log[2:]) == [
        "ip=127.0.0.1 Cancelling; the status shows the result",
        *["ip=127.0.0.1 Started; the status shows progress"] * 2,
        "start: booting: Unlocked: d.",
        f"start: cancelled: Cancelled. {NOT_SENT}",
        "start: cancelled: Unlocked: d.",
        *["start: unlocking: Connecting to the initrd"] * 2,
        "stopping",
    ]
