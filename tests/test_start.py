"""A start, from the tap to the booted system: what it does, reports and forgets."""

import contextlib
import gc
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    MAC,
    PASSPHRASE,
    PIN,
    PROGRAM,
    Client,
    daemon,
    environment,
    new_app,
    no_threads,
    serving,
    shortened,
    wait_for,
    wait_for_child,
)
from cryptroot_unlock import Disks
from homelab import OPENSSH, Homelab, SshServer, bind, new_key
from namespaces import Home, ip, udp_packets
from ssh_servers import (
    HOST_KEY,
    Initrd,
    Settings,
    dropbear,
    free_port,
    paramiko_server,
    settings_at,
    tcp_server,
    unlock,
)

import waker

ONE = {"d": PASSPHRASE}
RIGHT = PASSPHRASE.encode()
NOT_SENT = "The passphrase was not sent."
SYSTEM_PORT = free_port()  # of a system that boots only where a test says so
OFF = waker.PortStates(waker.PortState.SILENT, waker.PortState.SILENT)
ENDINGS = "done", "failed", "cancelled"
Look = Callable[[int], waker.PortStates]


def shown(client: Client) -> Any:
    """Return the start as the status shows it."""
    return client.status()["start"]


def in_words(start: Any) -> str:
    return "{outcome}: {message}".format(**start)


def wait_until(client: Client, phase: str) -> str:
    """Wait for a phase; returns its outcome and its message."""
    right = phase, *ENDINGS
    start = wait_for(lambda: shown(client), lambda now: now["phase"] in right)
    assert start["phase"] == phase, start
    return in_words(start)


def wait_until_said(client: Client, pattern: str) -> Any:
    """Wait for a message; returns the start."""
    return wait_for(
        lambda: shown(client), lambda now: re.search(pattern, now["message"])
    )


def start(client: Client, phase: str, passphrase: str = PASSPHRASE) -> str:
    """Start, and wait for a phase; returns its outcome and its message."""
    assert client.start(passphrase).json["success"]
    return wait_until(client, phase)


def cancel(client: Client, phase: str = "cancelled") -> str:
    """Cancel, and wait until that has happened; returns the outcome and the message."""
    assert client.call("DELETE", "/api/start").json["success"]
    return wait_until(client, phase)


def settings_of(initrd: Initrd) -> Settings:
    """Return the daemon's settings for a machine whose system never boots."""
    return {"WAKER_PIN": PIN} | MAC | initrd.settings(SYSTEM_SSH_PORT=SYSTEM_PORT)


def boot() -> contextlib.AbstractContextManager[SshServer]:
    """Open the system's SSH port."""
    server = SshServer(bind("127.0.0.1", SYSTEM_PORT), new_key(), OPENSSH)
    return contextlib.closing(server)


@contextlib.contextmanager
def starting(
    folder: Path, disks: Disks, **limits: float
) -> Iterator[tuple[Client, Initrd]]:
    """Start a machine that asks for its passphrase, but whose system never boots."""
    program = shortened(folder, **limits)
    with paramiko_server(folder, disks) as initrd:
        with daemon(settings_of(initrd), program=program) as started:
            assert started.client.log_in().start().status == 200
            yield started.client, initrd


# ---- A start, and what it reports ---------------------------------------------------


class Scripted(waker.Watcher):
    """Counts its checks, and finds what a test wants, given their number."""

    def __init__(self, config: waker.Config, look: Look | None = None) -> None:
        super().__init__(config)
        self.count = 0
        self.look = look

    def check(self, now: float) -> waker.PortStates:
        self.count += 1
        return self.look(self.count) if self.look else super().check(now)


def starter_of(config: waker.Config, settings: Settings, look: Look | None) -> Any:
    """Return a starter in this process, and its watcher."""
    unlocker = waker.Unlocker(config, Path(PROGRAM), environment(settings))
    watcher = Scripted(config, look)
    return waker.Starter(config, watcher, unlocker), watcher


def begin(starter: waker.Starter, now: float = 0) -> Callable[[], None]:
    """Start; returns a function that waits for the end."""
    others = {*threading.enumerate()}
    starter.begin(waker.Passphrase(PASSPHRASE), now or time.monotonic())
    threads = {*threading.enumerate()} - others  # it may have ended already

    def join() -> None:
        for thread in threads:
            if not thread.daemon:  # as those of the tests' servers are
                thread.join()

    return join


def members(starter: waker.Starter, ahead: float = 0) -> Any:
    """Return what the status says of the starts, some seconds ahead."""
    return starter.members(time.monotonic() + ahead, OFF)


def test_a_start_that_woke_the_machine_says_how_long_it_took(
    lab: Homelab, tmp_path: Path
) -> None:
    program = shortened(tmp_path, packet_port=lab.packet_port)
    with daemon(lab.settings(), program=program) as started:
        client = started.client.log_in()
        assert client.status()["usual_seconds"] is None
        assert start(client, "done") == "up: Unlocked: cryptroot. The system is up."
        usual = wait_for(lambda: client.status()["usual_seconds"])
        assert usual == shown(client)["seconds"]
    assert len(lab.packets) == 3


def test_usual_is_the_median_of_the_last_five_starts_that_woke_the_machine(
    config: waker.Config, lab: Homelab
) -> None:
    """One that sent no packet, or found no system, does not count."""
    up = OFF._replace(system=waker.PortState.OPEN)
    states = [up]
    starter, _ = starter_of(config, lab.settings(), lambda _: states.pop(0))
    begin(starter, time.monotonic() - 300)()
    assert members(starter)["usual_seconds"] is None
    seen = []
    for age in (500, 10, 40, 20, 50, 30):
        states[:] = OFF, up
        begin(starter, time.monotonic() - age)()
        seen.append(members(starter)["usual_seconds"] // 10)
    assert seen == [50, 50, 4, 4, 4, 3]
    states[:] = [OFF] * 9
    wait_for_end = begin(starter, time.monotonic() - 900)
    starter.cancel()
    wait_for_end()
    assert members(starter)["usual_seconds"] // 10 == 3


def test_a_rejection_passes_on_the_initrds_warning_as_a_hint(tmp_path: Path) -> None:
    """And nothing else has one."""
    script = "#!/bin/sh\necho Please unlock disk d\ncat >/dev/null\n"
    rejects = "echo 'cryptsetup: cryptsetup failed, bad password or options?'; exit 1\n"
    warning = "cryptroot-unlock: systemd may give up after another wrong passphrase"
    wrong = "wrong_passphrase: Wrong passphrase for disk d."
    with dropbear(tmp_path, Disks(ONE)) as initrd:
        with daemon(settings_of(initrd)) as started:
            client = started.client.log_in()
            for warns, hint in ((f"echo {warning}\n", "systemd may give up"), ("", "")):
                initrd.command.write_text(script + warns + rejects)
                assert start(client, "failed") == wrong
                assert hint in (shown(client)["hint"] or "")
                assert (shown(client)["hint"] is None) == (not hint)
                answer = client.unlock()
                assert (answer.status, "give up" in answer.error) == (400, bool(hint))
            initrd.command.write_text(f"{script}echo cryptsetup: d set up successfully")
            start(client, "booting")
            assert shown(client)["hint"] is None


def test_a_bug_ends_a_start_which_is_shown_for_an_hour(
    config: waker.Config, lab: Homelab
) -> None:
    """The passphrase may have been sent. Another start may begin."""
    states = [OFF]
    starter, _ = starter_of(config, lab.settings(), lambda _: states.pop())
    begin(starter)()
    seen = members(starter)["start"]
    assert seen["phase"] == "failed"
    words = r"error: bug: IndexError, .*:\d+\. The passphrase may have been sent\."
    assert re.fullmatch(words, in_words(seen))
    assert seen["sent"]
    assert members(starter, 3590)["start"] == seen
    assert members(starter, 3601)["start"] is None
    begin(starter)()


def test_a_start_that_gets_no_thread_does_not_block_the_next(
    config: waker.Config, lab: Homelab
) -> None:
    starter, _ = starter_of(config, lab.settings(), lambda _: OFF)
    with no_threads(), pytest.raises(waker.Fault) as fault:
        begin(starter)
    assert (fault.value.status, fault.value.headers) == (503, (("Retry-After", "5"),))
    assert members(starter)["start"] is None
    wait_for_end = begin(starter)
    starter.cancel()
    wait_for_end()


def test_a_machine_that_cannot_be_checked_is_not_called_asleep(
    lab: Homelab, tmp_path: Path
) -> None:
    """Linux lets nobody connect to a broadcast address."""
    nowhere = lab.settings() | {"WAKER_HOMELAB_HOST": "127.255.255.255"}
    with daemon(nowhere, program=shortened(tmp_path, start_seconds=1)) as started:
        ended = start(started.client.log_in(), "failed")
    assert ended.startswith("not_awake: the server could not be checked")


def test_a_packet_that_fails_does_not_end_the_start(home: Home, tmp_path: Path) -> None:
    """A restarting switch, or a card that changes its speed, interrupts the link."""
    router, machine, _ = home
    ip(f"-n {router.name} route del default")  # or the packet would leave there
    settings = settings_at(tmp_path, 22, HOST_KEY, HOMELAB_HOST="192.168.77.99") | MAC
    program = shortened(tmp_path, packet_seconds=0.1)
    with (
        machine.capture() as frames,
        daemon(settings, *router.command(), program=program) as started,
    ):
        client = started.client

        def message() -> str:
            return str(router.run(lambda: shown(client))["message"])

        router.run(lambda: client.log_in().start())
        wait_for(lambda: udp_packets(frames))
        ip(f"-n {router.name} link set lan down")
        failed = "Failed to send WOL packet: Network is unreachable; trying again"
        wait_for(lambda: message() == failed)
        udp_packets(frames)
        ip(f"-n {router.name} link set lan up")
        wait_for(lambda: udp_packets(frames))


def test_a_running_system_is_not_taken_for_its_initrd(tmp_path: Path) -> None:
    """Its own SSH server may use the initrd's port."""
    with boot(), starting(tmp_path, Disks(ONE)) as (client, initrd):
        up = f"up: the system is already up. {NOT_SENT}"
        assert wait_until(client, "done") == up
        assert initrd.received() == []


@pytest.mark.parametrize("phase", ["waking", "booting"])
def test_a_start_that_waits_looks_once_a_second_and_logs_no_line_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], phase: str
) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        settings = settings_of(initrd)
        if phase == "waking":
            settings["WAKER_INITRD_SSH_PORT"] = str(free_port())
        config = waker.read_config(settings, tmp_path)
        starter, watcher = starter_of(config, settings, None)
        wait_for_end = begin(starter)

        def seen() -> Any:
            return members(starter)["start"]

        wait_for(seen, lambda now: now["phase"] == phase and now["seconds"] >= 5)
        starter.cancel()
        wait_for_end()
    assert [*seen()["times"]][-2:] == [phase, "cancelled"]
    assert 3 <= watcher.count <= seen()["seconds"] + 3
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len({*lines}) > 1


def test_a_start_forgets_the_passphrase_as_soon_as_its_unlock_ends(
    tmp_path: Path,
) -> None:
    """However that ends."""

    def is_forgotten() -> bool:
        """Check that no object in this process holds the passphrase of a start."""
        gc.collect()
        return not any(
            type(one) is waker.Passphrase
            or (type(one) is waker.Request and one.path == "/api/start")
            for one in gc.get_objects()
        )

    with paramiko_server(tmp_path, Disks(ONE, mute=True)) as initrd:
        settings = settings_of(initrd)
        config = waker.read_config(settings, tmp_path)
        with serving(new_app(config, settings)) as client:
            client.log_in().start()
            wait_for_child(os.getpid())
            assert not is_forgotten()
            cancel(client)
            wait_for(is_forgotten)
            for passphrase, phase in (("wrong", "failed"), (PASSPHRASE, "booting")):
                Disks(ONE).save(initrd.state)
                start(client, phase, passphrase)
                wait_for(is_forgotten)
            cancel(client)  # what it logs is not the next test's


# ---- Trying again while no disk asks -------------------------------------------------


def test_an_early_initrd_is_not_asked_again_at_once(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE, early=True)) as (client, initrd):
        wait_until_said(client, "not ready yet")
        Disks(ONE).save(initrd.state)
        began = shown(client)["seconds"]  # within three more of the five
        wait_for(lambda: shown(client)["seconds"] >= began + 3)
        assert initrd.received() == []
        assert cancel(client) == f"cancelled: cancelled. {NOT_SENT}"


def test_however_late_a_disk_asks_its_system_has_all_its_time_to_boot(
    tmp_path: Path,
) -> None:
    limits = {"start_seconds": 4, "retry_seconds": 4}
    with starting(tmp_path, Disks(ONE, early=True), **limits) as (client, initrd):
        early = wait_until_said(client, "not ready yet")
        assert (early["phase"], early["outcome"]) == ("unlocking", None)
        Disks(ONE).save(initrd.state)
        assert wait_until(client, "booting") == "unlocked: Unlocked: d."
        wait_until(client, "failed")
        times = shown(client)["times"]
    assert times["booting"] >= 4
    assert times["failed"] - times["booting"] >= 3  # of the 4, rounded


def test_a_cancel_ends_the_wait_for_an_initrd_that_hangs_up(tmp_path: Path) -> None:
    """As it may while it configures its network, so waker would try again."""
    with tcp_server(socket.socket.close) as port:
        settings = settings_at(tmp_path, port, SYSTEM_SSH_PORT=SYSTEM_PORT) | MAC
        program = shortened(tmp_path, retry_seconds=100)
        with daemon(settings, program=program) as started:
            client = started.client.log_in()
            client.start()
            wait_until_said(client, "hung up")
            assert cancel(client) == f"cancelled: cancelled. {NOT_SENT}"


@pytest.mark.parametrize("slow", [False, True], ids=["at once", "slowly"])
def test_a_try_that_would_end_too_late_is_not_begun(tmp_path: Path, slow: bool) -> None:
    """Six seconds for an initrd that answers at once, or only after four."""
    tries = tmp_path / "tries"
    script = f"#!/bin/sh\necho >>{tries}\n{'sleep 4' * slow}\necho Try again later\n"
    program = shortened(tmp_path, prompt_seconds=6, retry_seconds=0.5)
    with dropbear(tmp_path, Disks(ONE)) as initrd:
        initrd.command.write_text(script)
        with daemon(settings_of(initrd), program=program) as started:
            client = started.client.log_in()
            ended = start(client, "failed")
            times = shown(client)["times"]
    assert re.fullmatch(f"not_asked: the initrd is not ready .* {NOT_SENT}", ended)
    count = len(tries.read_text())
    assert count == 1 if slow else count > 1
    assert 3 <= times["failed"] - times["unlocking"] <= 7


# ---- Watching, and what ends it ------------------------------------------------------


SLOW = "The system has not answered yet."
LOST = (
    "Not confirmed: the passphrase was sent, but the connection was lost before the"
    " initrd confirmed it."
)
DOUBT = (
    f"{LOST} The initrd is still running: it may still be checking the passphrase, or"
    " the passphrase was wrong."
)
HANGS_UP = Disks({"d": "another"}, dies="hangs up")


def test_an_unconfirmed_unlock_is_doubted_while_the_initrd_runs(tmp_path: Path) -> None:
    """The doubt ends with the initrd, and the system may still come up."""
    with starting(tmp_path, HANGS_UP, doubt_seconds=4) as (client, initrd):
        assert wait_until(client, "booting") == f"not_confirmed: {LOST}"
        seen = wait_until_said(client, "still")
        assert in_words(seen) == f"not_confirmed: {DOUBT}"
        assert seen["seconds"] - seen["times"]["booting"] >= 3  # of the 4, rounded
        Disks(ONE, dies="before").save(initrd.state)
        unlock(initrd.settings())  # by somebody else
        seen = wait_until_said(client, "^((?!still).)*$")
        assert in_words(seen) == f"not_confirmed: {LOST}"
        with boot():
            assert wait_until(client, "done") == f"up: The system is up. {LOST}"


@pytest.mark.parametrize(
    ("disks", "end"),
    [
        (Disks(ONE), "Unlocked: d."),
        (Disks({}), f"all disks seem to be open already. {NOT_SENT}"),
        (HANGS_UP, DOUBT),
        (Disks({"d": "another"}, dies="for good"), LOST),
    ],
    ids=["confirmed", "already open", "not confirmed", "initrd has ended"],
)
def test_only_an_unconfirmed_unlock_is_doubted_while_its_initrd_runs(
    tmp_path: Path, disks: Disks, end: str
) -> None:
    """To the end. What may have been sent is not sent again, even if a disk asks."""
    limits = {"doubt_seconds": 0, "start_seconds": 3, "retry_seconds": 0.1}
    with starting(tmp_path, disks, **limits) as (client, initrd):
        assert wait_until(client, "failed") == f"not_up: {end} {SLOW}"
        assert initrd.received() == [RIGHT] * bool(disks.locked)


def test_a_cancelled_start_is_forgotten_once_the_machine_is_up(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE)) as (client, _):
        wait_until(client, "booting")
        cancel(client)
        with boot():
            seen = wait_for(client.status, lambda now: now["state"] == "up")
        assert seen["start"] is None


def test_a_watch_that_was_replaced_changes_nothing(
    config: waker.Config, lab: Homelab, capfd: pytest.CaptureFixture[str]
) -> None:
    """Even if it sees the system only a moment later."""
    waker.wake(config)
    lab.wait_for("locked")
    may_end = threading.Event()
    locked = OFF._replace(initrd=waker.PortState.OPEN)

    def look(count: int) -> waker.PortStates:
        """The second check finds the system up, but takes as long as the test wants."""
        if count != 2:
            return locked
        may_end.wait(60)  # seconds
        return locked._replace(system=waker.PortState.OPEN)

    starter, watcher = starter_of(config, lab.settings(), look)
    first = begin(starter)
    wait_for(lambda: watcher.count == 2)  # it watches
    second = begin(starter)
    may_end.set()
    first()
    starter.cancel()
    second()
    lines = capfd.readouterr().err.splitlines()
    phases = [line.split(": ")[1] for line in lines if line.startswith("start: ")]
    assert phases[:3] == ["unlocking", "booting", "cancelled"]
    assert "start: cancelled: Unlocked: cryptroot." in lines
    assert "done" not in phases


def test_a_refused_start_or_unlock_ends_no_watch(tmp_path: Path) -> None:
    with starting(tmp_path, Disks(ONE)) as (client, initrd):
        wait_until(client, "booting")
        initrd.ssh_key.unlink()
        assert client.start().status == client.unlock().status == 500
        assert shown(client)["phase"] == "booting"


def test_a_start_and_the_status_share_their_checks(tmp_path: Path) -> None:
    """OpenSSH penalises clients that connect too often."""
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        settings = settings_of(initrd)
        app = new_app(waker.read_config(settings, tmp_path), settings)
        with serving(app) as client:
            start(client.log_in(), "booting")
            with boot():
                # The next ten minutes share this result, although the port closes.
                ports = app.watcher.check(time.monotonic() + 600)
            assert ports == waker.PortStates(*[waker.PortState.OPEN] * 2)
            assert wait_until(client, "done") == "up: Unlocked: d. The system is up."


def test_of_several_new_starts_one_replaces_a_watch(tmp_path: Path) -> None:
    """It answers the disk that asks."""
    with starting(tmp_path, Disks(ONE)) as (client, initrd):
        wait_until(client, "booting")
        Disks({"second": "x"}, slow=2, received=["66"]).save(initrd.state)
        with ThreadPoolExecutor(8) as pool:
            begun = [pool.submit(client.start, "x") for _ in range(8)]
        assert sorted(each.result().status for each in begun) == [200] + 7 * [409]
        assert wait_until(client, "booting") == "unlocked: Unlocked: second."
        assert initrd.received() == [b"f", b"x"]


# ---- Cancelling ----------------------------------------------------------------------


def test_a_cancel_changes_no_verdict(tmp_path: Path) -> None:
    """The passphrase was sent already."""
    with starting(tmp_path, Disks({"d": "another"}, slow=1)) as (client, initrd):
        wait_for(lambda: initrd.received() == [RIGHT])
        ended = cancel(client, "failed")
        assert ended == "wrong_passphrase: Wrong passphrase for disk d."
        assert initrd.received() == [RIGHT]
        answer = client.call("DELETE", "/api/start")
        assert (answer.status, answer.error) == (409, "No start is running")


def test_sigterm_cancels_a_start_and_the_log_has_each_step(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        with daemon(settings_of(initrd)) as started:
            start(started.client.log_in(), "booting")
            assert cancel(started.client) == "unlocked: Unlocked: d."
            Disks(ONE, mute=True).save(initrd.state)
            started.client.start()
            child = wait_for_child(started.process.pid)
            began = time.monotonic()
            assert started.stop() == 0
            assert time.monotonic() < began + 5  # the initrd would hang for 60
            assert not Path(f"/proc/{child}").exists()
    assert initrd.received() == []
    # A request is logged after its start has begun, so these lines may change places.
    assert sorted(started.log[2:]) == [
        "ip=127.0.0.1 Cancelling; the status shows the result",
        *["ip=127.0.0.1 Started; the status shows progress"] * 2,
        "start: booting: Unlocked: d.",
        "start: cancelled: Unlocked: d.",
        f"start: cancelled: cancelled. {NOT_SENT}",
        *["start: unlocking: Connecting to the initrd"] * 2,
        "stopping",
    ]


def test_after_sigterm_nothing_starts(tmp_path: Path) -> None:
    """Not even what had been asked for before: here, the key's file is slow."""
    with paramiko_server(tmp_path, Disks(ONE)) as initrd, ThreadPoolExecutor() as pool:
        with daemon(settings_of(initrd)) as started:
            client, log = started.client.log_in(), started.process.stderr
            start(client, "booting")
            Disks(ONE).save(initrd.state)
            key = initrd.ssh_key.rename(tmp_path / "key")
            os.mkfifo(initrd.ssh_key, 0o600)
            answer = pool.submit(client.start)
            pipe = open_for_reader(initrd.ssh_key)
            key.rename(initrd.ssh_key)
            started.process.terminate()
            assert log
            wait_for(log.readline, lambda line: line.startswith("start: cancelled"))
            os.write(pipe, initrd.ssh_key.read_bytes())
            os.close(pipe)
            assert started.process.wait(60) == 0
    assert (answer.result().status, answer.result().error) == (503, "waker is stopping")
    assert initrd.received() == []


def open_for_reader(pipe: Path) -> int:
    """Open a named pipe for writing, once somebody reads it."""

    def attempt() -> int:
        with contextlib.suppress(OSError):
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        return 0

    return wait_for(attempt)


def test_a_child_sends_nothing_once_its_daemon_has_died(tmp_path: Path) -> None:
    go, given = tmp_path / "go", tmp_path / "given"
    script = f"#!/bin/sh\ntouch {go}.waits\nuntil [ -e {go} ]; do sleep 0.1; done\n"
    script += f"echo Please unlock disk d\ncat >{given}\n"
    with dropbear(tmp_path, Disks(ONE)) as initrd:
        initrd.command.write_text(script)
        with daemon(settings_of(initrd)) as started:
            started.client.log_in().start()
            wait_for(Path(f"{go}.waits").exists)
            started.process.kill()
            assert started.process.wait(60) == -signal.SIGKILL
            go.touch()
            assert started.process.stderr
            log = started.process.stderr.read()  # until the child has ended, too
        wait_for(given.exists)
    assert given.read_bytes() == b""
    assert "start: unlocking" in log
    assert "bug:" not in log
