"""A start: what happens when something goes wrong, and what it forgets.

Its usual course is in test_promises.py.
"""

import contextlib
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import (
    PASSPHRASE,
    PIN,
    UNLOCK,
    Daemon,
    daemon,
    environment,
    is_open,
    new_app,
    serving,
    shortened,
    wait_for,
    wait_for_child,
)
from machine import CLOSED, OPEN, Machine, slow_to_open, wait_until, wait_until_shown
from namespaces import Home, ip, udp_packets

import waker

GO = "until [ -e go ]; do sleep 0.1; done"  # until a test makes the file


@contextlib.contextmanager
def starting(machine: Machine, **limits: float) -> Iterator[Daemon]:
    """Run the daemon, and begin a start."""
    with machine.waker(**limits) as started:
        assert started.client.log_in().start().status == 200
        yield started


# ---- What is sent, and what is forgotten ---------------------------------------------


def test_nothing_is_sent_once_the_daemon_has_died(machine: Machine) -> None:
    machine.ask(f"{GO}; asks root; take; echo >taken")
    with starting(machine) as started:
        wait_for(machine.has_run)
        started.process.kill()
        assert started.process.wait(60) == -signal.SIGKILL
        machine.folder.joinpath("go").touch()
        assert started.process.stderr
        started.process.stderr.read()  # until the unlocking process has ended
    wait_for(machine.folder.joinpath("taken").exists)
    assert machine.received() == []


# Delays each process that is about to begin until the pipe's other end is closed.
DELAY = """
import sys

def wait(event, arguments):
    if event == "subprocess.Popen":
        with open("{}") as pipe:
            pipe.read()

sys.addaudithook(wait)
"""


def test_nothing_is_sent_after_a_cancel_while_the_process_begins(
    machine: Machine,
) -> None:
    pipe = machine.ask().folder / "pipe"
    os.mkfifo(pipe)
    machine.folder.joinpath("sitecustomize.py").write_text(DELAY.format(pipe))
    slow = {"PYTHONPATH": str(machine.folder)}
    with daemon(machine.settings() | slow) as started:
        client = started.client.log_in()
        client.start()
        with pipe.open("w"):  # it begins now
            assert client.call("DELETE", "/api/start").status == 200
        start = wait_until(client, "cancelled")
    assert (start["outcome"], start["sent"]) == ("cancelled", False)
    assert machine.received() == []


def test_a_cancel_ends_a_process_that_would_inherit_an_ignored_signal(
    machine: Machine,
) -> None:
    """If whatever started waker ignores SIGTERM."""
    machine.ask(f"{GO}; disk root")
    ignoring = "env", "--ignore-signal=TERM"
    with daemon(machine.settings(), *ignoring) as started:
        client = started.client.log_in()
        client.start()
        wait_for(machine.has_run)
        assert client.call("DELETE", "/api/start").status == 200
        assert wait_until(client, "cancelled")["outcome"] == "cancelled"
        machine.folder.joinpath("go").touch()
    assert machine.received() == []


def test_a_request_that_sigterm_overtakes_starts_nothing(machine: Machine) -> None:
    machine.make_keys()
    with machine.waker() as started, ThreadPoolExecutor() as pool:
        client, log = started.client.log_in(), started.process.stderr
        assert log
        with slow_to_open(machine.ssh_key) as is_waited_for:
            starting = pool.submit(client.start)
            wait_for(is_waited_for)
            started.process.terminate()
            wait_for(log.readline, lambda line: line == "stopping\n")
            wait_for(lambda: not is_open("127.0.0.1", client.port))
        assert starting.result().status == 503
        assert started.process.wait(60) == 0
    assert machine.packets() == []


def app_of(machine: Machine) -> waker.App:
    config = waker.read_config(machine.settings(PIN=PIN), machine.folder)
    return new_app(config, machine.settings())


def is_forgotten() -> bool:
    """Check that no object in this process holds the passphrase of a start."""
    gc.collect()
    return not any(
        type(one) is waker.Passphrase
        or (type(one) is waker.Request and one.path == "/api/start")
        for one in gc.get_objects()
    )


def test_the_passphrase_is_forgotten_once_the_unlock_ends(machine: Machine) -> None:
    machine.ask("sleep 60")
    with serving(app_of(machine)) as client:
        client.log_in().start()
        wait_for_child(os.getpid())
        assert not is_forgotten()
        client.call("DELETE", "/api/start")
        wait_until(client, "cancelled")
        wait_for(is_forgotten)
        machine.ask()
        client.start()
        wait_until(client, "booting")
        wait_for(is_forgotten)


# ---- Waking and waiting --------------------------------------------------------------


def test_a_failed_link_does_not_end_a_start(home: Home, machine: Machine) -> None:
    """A restarting switch, or a card that changes its speed, interrupts the link."""
    router, asleep, _ = home
    ip(f"-n {router.name} route del default")  # or the packet would leave there
    ip(f"-n {router.name} link set lan down")
    machine.make_keys()
    where = {"HOMELAB_HOST": "192.168.77.99", "HOMELAB_BROADCAST": ""}
    settings, host = machine.settings(**where), router.command()
    program = shortened(machine.folder, packet_seconds=0.1)
    with asleep.capture() as frames, daemon(settings, *host, program=program) as it:

        def fail() -> None:
            it.client.log_in().start()
            wait_until_shown(it.client, lambda now: "trying again" in now["message"])

        router.run(fail)
        ip(f"-n {router.name} link set lan up")
        wait_for(lambda: udp_packets(frames))


def test_a_start_that_could_send_no_packet_says_why(
    home: Home, machine: Machine
) -> None:
    """While that lasts, and at its end. Here, a route refuses the broadcast."""
    router, _, _ = home
    ip(f"-n {router.name} route add prohibit 203.0.113.255")
    machine.make_keys()
    where = {"HOMELAB_HOST": "192.168.77.99", "HOMELAB_BROADCAST": "203.0.113.255"}
    settings, host = machine.settings(**where), router.command()
    program = shortened(machine.folder, start_seconds=3)
    with daemon(settings, *host, program=program) as it:

        def fail() -> Any:
            client = it.client.log_in()
            client.start()
            wait_until_shown(client, lambda now: "trying again" in now["message"])
            return wait_until(client, "failed")

        start = router.run(fail)
    assert (start["outcome"], start["woke"]) == ("not_awake", False)
    assert re.search("no magic packet.*Permission denied", start["message"])


def test_a_waiting_start_is_idle_and_logs_no_line_twice(machine: Machine) -> None:
    """Nor does it doubt a confirmed unlock."""
    machine.ask()
    with starting(machine, doubt_seconds=0) as started:
        wait_until(started.client, "booting")
        assert started.busy(3) < 0.1
        machine.show(CLOSED, OPEN)
        wait_until(started.client, "done")
        started.stop()
    logged = re.findall("(?m)^start: (.*?):", "\n".join(started.log))
    assert logged == ["unlocking", "booting", "done"]


def test_a_try_that_would_end_too_late_is_not_begun(machine: Machine) -> None:
    """Of six seconds, each takes over four. Then it is said what to do."""
    machine.ask("sleep 4; echo Try again later; exit 1")
    with starting(machine, prompt_seconds=6, retry_seconds=0.5) as started:
        start = wait_until(started.client, "failed")
    assert start["outcome"] == "not_asked"
    assert "screen" in start["hint"]
    tries = machine.folder.joinpath("commands").read_text().splitlines()
    assert len(tries) == 1


def test_a_warning_of_the_initrd_is_shown_until_the_next_start(
    machine: Machine,
) -> None:
    warns = "cryptroot-unlock: systemd may give up after another wrong passphrase"
    with machine.ask(f"asks root; take; echo {warns}; rejects").waker() as started:
        client = started.client.log_in()
        assert "give up" in client.unlock().error
        client.start()
        assert "give up" in wait_until(client, "failed")["hint"]
        machine.ask("asks root; take; rejects")
        client.start()
        assert wait_until(client, "failed")["hint"] is None


# ---- Watching, and what ends it ------------------------------------------------------


def test_only_one_start_that_can_begin_replaces_a_watch(machine: Machine) -> None:
    with starting(machine.ask()) as started:
        client = started.client
        wait_until(client, "booting")
        machine.ssh_key.chmod(0o604)
        assert (client.start().status, client.unlock().status) == (500, 500)
        assert client.status()["start"]["phase"] == "booting"
        machine.ssh_key.chmod(0o600)
        machine.ask(f"{GO}; disk root", "x")
        with ThreadPoolExecutor(8) as pool:
            begun = [pool.submit(client.start, "x") for _ in range(8)]
        assert sorted(each.result().status for each in begun) == [200] + 7 * [409]
        machine.folder.joinpath("go").touch()
        assert wait_until(client, "booting")["outcome"] == "unlocked"
        assert machine.received() == [b"x"]


OFF = waker.PortStates(waker.PortState.SILENT, waker.PortState.SILENT)
UP = OFF._replace(system=waker.PortState.OPEN)


class Scripted(waker.Watcher):
    """Finds what a test wants, in this order, and then nothing."""

    states: list[waker.PortStates]
    error: Any = None

    def check(self, now: float, *, max_age: float = 1) -> waker.PortStates:
        if self.error:
            raise self.error
        return self.states.pop(0)


def starter_of(machine: Machine) -> tuple[waker.Starter, Scripted]:
    machine.make_keys()
    config = app_of(machine).config
    watcher = Scripted(config)
    process = UNLOCK, environment(machine.settings())
    return waker.Starter(config, watcher, process), watcher


@contextlib.contextmanager
def start_of(starter: waker.Starter, ago: float = 0) -> Iterator[None]:
    """Begin a start, and wait for its end."""
    others = {*threading.enumerate()}
    began = time.monotonic() - ago
    starter.begin(waker.Passphrase(PASSPHRASE), began, waits=True)
    threads = {*threading.enumerate()} - others
    yield
    for thread in threads:
        thread.join()


def members(starter: waker.Starter) -> Any:
    """Return what the status says of the starts."""
    return starter.report(time.monotonic(), OFF)


# ---- Usual time, and failures of the box ---------------------------------------------


def test_the_usual_time_is_the_median_of_the_last_five(machine: Machine) -> None:
    """One that sent no packet, or found no system, does not count."""
    starter, watcher = starter_of(machine)
    seen = []
    for ago, found in (
        (300, [UP]),
        (900, [OFF] * 9),
        *((ago, [OFF, UP]) for ago in (600, 500, 10, 550, 510, 20)),
    ):
        watcher.states = [*found]
        with start_of(starter, ago):
            if UP not in found:
                starter.cancel()
        seen.append((members(starter)["usual_seconds"] or 0) // 10)
    assert seen == [0, 0, 60, 60, 50, 55, 51, 50]


def test_a_bug_ends_a_start_and_the_next_may_begin(machine: Machine) -> None:
    """No process had begun, so nothing was sent."""
    starter, watcher = starter_of(machine)
    watcher.states = []
    for _ in range(2):
        with start_of(starter):
            pass
        start = members(starter)["start"]
    assert (start["phase"], start["sent"]) == ("failed", False)
    assert re.search("bug: IndexError.*was not sent", start["message"])


class Unnamed(type):
    """Makes errors that cannot be described."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise MemoryError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_that_cannot_be_described_blocks_no_start(machine: Machine) -> None:
    starter, watcher = starter_of(machine)
    watcher.error = Unnamed("Bug", (Exception,), {})
    for _ in range(2):
        with start_of(starter):
            pass
    assert members(starter)["start"]["phase"] == "failed"


def test_a_start_that_gets_no_thread_has_not_begun(machine: Machine) -> None:
    starter, watcher = starter_of(machine)
    watcher.states = [UP] * 2
    for shown in (None, "done"):  # what is shown stays
        usual = threading.stack_size(1 << 46)  # bytes: more than any system has
        try:
            with pytest.raises(waker.Fault, match="Too busy"), start_of(starter):
                pass
        finally:
            threading.stack_size(usual)
        start = members(starter)["start"]
        assert (start and start["phase"]) == shown
        with start_of(starter):
            pass
        assert members(starter)["start"]["phase"] == "done"
