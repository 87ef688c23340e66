"""A start: wake, wait, unlock and watch, and what goes wrong on the way."""

from __future__ import annotations  # names of waker.py may go

import contextlib
import os
import re
import signal
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    PASSPHRASE,
    PIN,
    UNLOCK,
    daemon,
    each,
    interpose,
    is_open,
    result_of,
    wait_for,
    wait_for_process,
    with_limits,
)
from homelab import PACKET
from machine import (
    CLOSED,
    EARLY,
    ONCE,
    OPEN,
    SILENT,
    SLOWLY,
    SOON,
    Machine,
    wait_for_state,
    wait_until,
    wait_until_shown,
)
from namespaces import Home, ip

import waker

RIGHT = PASSPHRASE.encode()
UNSENT = "The passphrase was not sent."

# ---- From waking to the system -------------------------------------------------------


def test_a_start_wakes_unlocks_and_watches(machine: Machine) -> None:
    """It is idle as it watches, and logs no line twice."""
    with machine.waker(PACKET_SECONDS=1) as started:
        client = started.client
        answer = client.start()
        assert (answer.status, answer.json.keys()) == (200, {"success", "message"})
        start = wait_until(client, "waking")
        assert (start["outcome"], start["sent"]) == (None, False)
        wait_until_shown(client, lambda now: "Magic packet sent" in now["message"])
        packets: list[bytes] = []
        while len(packets) < 6:
            packets += wait_for(machine.packets)
        assert {*packets} == {PACKET}
        machine.ask()
        start, first = wait_until(client, "booting"), start
        assert (start["outcome"], start["sent"]) == ("unlocked", True)
        assert start["id"] == first["id"]
        assert "root" in start["message"]
        assert started.busy(1) < 0.1
        machine.show(CLOSED, CLOSED).show(CLOSED, OPEN)
        start = wait_until(client, "done")
        assert (start["outcome"], start["sent"]) == ("up", True)
        assert re.match("The system is up.*root", start["message"])
        times = start["times"]
        assert [*times] == ["waking", "unlocking", "booting", "done"]
        assert [*times.values()] == sorted(times.values())
        assert (times["waking"], times["done"]) == (0, start["seconds"])
        machine.show(OPEN, OPEN).packets()  # a system may use the initrd's port as well
        client.start("another")
        start = wait_until(client, "done")
        assert (start["outcome"], start["sent"]) == ("up", False)
        assert start["id"] != first["id"]
        assert "not sent" in start["message"]
        assert machine.packets() == []
        assert client.call("DELETE", "/api/start").status == 409
        started.stop()
    log = "\n".join(started.log)
    phases = re.findall("(?m)^start: (.*?):", log)
    assert phases[-4:] == ["unlocking", "booting", "done", "done"]
    assert "\nip=127.0.0.1 Started; " in log


TOO_LONG = {  # what the ports show, first and last, or None after an unlock
    "awake": ((CLOSED, CLOSED), "not_awake", "minutes.*initrd.*not sent"),
    "shuts down": (
        (CLOSED, SILENT),
        "not_awake",
        "minutes.*did not answer: check.*not sent",
    ),
    "not up": (None, "not_up", "root.*not answered yet"),
}


@each("ports outcome words", TOO_LONG)
def test_a_start_that_takes_too_long_says_what_it_saw(
    machine: Machine, ports: tuple[str, str] | None, outcome: str, words: str
) -> None:
    """It sends packets while something refuses, as a router does for who sleeps."""
    if ports:
        machine.show(ports[0], ports[0])
    else:
        machine.ask()
    with machine.starting(START_SECONDS=3) as client:
        if ports:
            wait_until_shown(client, lambda now: "answers" in now["message"])
            machine.show(ports[1], ports[1])
        start = wait_until(client, "failed")
    assert (start["outcome"], start["sent"]) == (outcome, not ports)
    assert re.search(words, start["message"])
    assert machine.packets() == [PACKET] * 3 * bool(ports)  # the next is due in 10 s


@pytest.mark.parametrize("is_first", [True, False])
def test_a_packet_that_cannot_be_sent_is_reported(
    home: Home, machine: Machine, is_first: bool
) -> None:
    """A start goes on, as the link may fail for a moment.

    If no packet has left, it says so at its end.
    """
    box, where = home[2], {"HOMELAB_HOST": "203.0.113.20", "HOMELAB_BROADCAST": ""}
    program = with_limits(machine.folder, START_SECONDS=4, PACKET_SECONDS=1)
    route, command = "203.0.113.0/24 via 198.51.100.2", box.command()
    if not is_first:
        ip(f"-n {box.name} route add {route}")
    with daemon(machine.settings(**where), *command, program=program) as started:
        client = started.client

        def start() -> tuple[str, Any]:
            client.log_in().start()
            if not is_first:
                wait_until_shown(client, lambda now: now["woke"])
                ip(f"-n {box.name} route delete {route}")
            wait_until_shown(client, lambda now: "trying again" in now["message"])
            error = client.call("POST", "/api/wol").error
            return error, wait_until(client, "failed")

        error, ended = box.run(start)
    assert re.match("Failed to send WOL packet: .", error)
    assert (ended["outcome"], ended["woke"]) == ("not_awake", not is_first)
    words = "no magic packet could be sent (Network is unreachable)"
    assert (words in ended["message"]) == is_first


# ---- Asking again --------------------------------------------------------------------


@pytest.mark.parametrize("pause", [2, 0])
def test_a_try_that_would_end_too_late_is_not_begun(
    machine: Machine, pause: int
) -> None:
    """Of four seconds, one takes over two, or nearly none. Then it says what to do."""
    machine.ask(f"sleep {pause}; {EARLY}")
    with machine.starting(READY_SECONDS=4, RETRY_SECONDS=1) as client:
        start = wait_until(client, "failed")
    assert start["outcome"] == "not_asked"
    assert "screen" in start["message"]
    assert not pause or len(machine.commands()) == 1


def test_a_machine_that_resets_has_its_time_to_ask_again(machine: Machine) -> None:
    """Even if nothing is left of the first time."""
    seconds = 6
    limits = {"READY_SECONDS": seconds, "RETRY_SECONDS": 1}
    with machine.ask(EARLY).starting(**limits) as client:
        wait_for(machine.commands)
        machine.show(SILENT, SILENT)
        time.sleep(seconds)
        machine.ask(f"[ -e early ] || {{ echo >early; {EARLY}; }}; disk root")
        start = wait_until_shown(client, lambda now: "looking again" in now["message"])
        assert (start["phase"], start["outcome"]) == ("unlocking", None)
        assert "sent" not in start["message"]
        assert wait_until(client, "booting")["outcome"] == "unlocked"


def test_nothing_denies_what_the_next_try_may_send(machine: Machine) -> None:
    """The first one finds that nobody asks."""
    early = f"[ -e early ] || {{ echo >early; {EARLY}; }}"
    machine.ask(f"{early}; {ONCE}; asks root; take; {SOON}; opens root")
    with machine.starting(RETRY_SECONDS=1) as client:
        start = wait_until_shown(client, lambda now: now["sent"])
        assert "sent" not in start["message"]
        machine.touch("go")
        assert wait_until(client, "booting")["outcome"] == "unlocked"


# ---- What decides is never old -------------------------------------------------------


def opens(stack: contextlib.ExitStack, machine: Machine) -> None:
    """Let the system's port open, and nothing else change."""
    address = "127.0.0.1", machine.system_port
    stack.enter_context(socket.create_server(address, backlog=99))


@pytest.mark.parametrize("request_", ["unlock", "start"])
def test_a_system_that_has_just_come_up_needs_nothing(
    machine: Machine, request_: str
) -> None:
    machine.show(CLOSED, CLOSED)
    with contextlib.ExitStack() as stack, machine.waker() as started:
        client = started.client
        assert client.status()["state"] == "booting"
        opens(stack, machine)
        if request_ == "unlock":
            answer = client.unlock()
            assert answer.json["message"] == f"The system is up. {UNSENT}"
        else:
            client.start()
            assert wait_until(client, "done")["woke"] is False
            assert client.status()["usual_seconds"] is None
    assert machine.packets() == []


def test_a_system_that_came_up_meanwhile_is_not_given_up(machine: Machine) -> None:
    """Somebody has typed the passphrase at the server, and so nothing asks."""
    machine.ask(f"{SOON}; {EARLY}")
    with contextlib.ExitStack() as stack, machine.starting(READY_SECONDS=1) as client:
        wait_for(machine.commands)
        opens(stack, machine)
        time.sleep(1)
        machine.touch("go")
        start = wait_until(client, "done")
    assert (start["outcome"], start["sent"]) == ("up", False)


def test_if_the_initrd_has_gone_the_start_waits_for_the_system(
    machine: Machine,
) -> None:
    """Somebody typed the passphrase, and the system boots."""
    machine.ask(f"{SOON}; {EARLY}")
    limits = {"READY_SECONDS": 0, "SYSTEM_SECONDS": 1}
    limits |= {"START_SECONDS": 6, "RETRY_SECONDS": 7}  # so it goes at the last moment
    with machine.starting(**limits) as client:
        wait_for(machine.commands)
        machine.touch("go")
        wait_until_shown(client, lambda now: "looking again" in now["message"])
        machine.show(SILENT, SILENT)
        wait_until(client, "waking")
        machine.show(CLOSED, OPEN)
        start = wait_until(client, "done")
    assert (start["outcome"], start["sent"]) == ("up", False)


@pytest.mark.parametrize("phase", ["waking", "booting"])
def test_a_system_that_comes_up_at_the_last_moment_is_up(
    machine: Machine, phase: str
) -> None:
    """When the time of a start is over, it looks again."""
    if phase == "booting":
        machine.ask(SLOWLY)
    else:
        machine.show(CLOSED, CLOSED)
    limits = {"START_SECONDS": 4, "SYSTEM_SECONDS": 60}
    with contextlib.ExitStack() as stack, machine.starting(**limits) as client:
        wait_until_shown(client, lambda now: now["woke"] or now["phase"] == phase)
        opens(stack, machine)
        start = wait_until(client, "done")
    assert (start["outcome"], start["sent"]) == ("up", phase == "booting")
    assert start["seconds"] >= 4


# ---- One at a time, and what replaces a watch ----------------------------------------


def test_only_one_start_that_can_begin_replaces_a_watch(machine: Machine) -> None:
    """Until the first has sent, there is nothing to replace. None is sent twice."""
    script = f"asks root; take; {SOON}; rm go; exit 1"
    with machine.ask(script).starting() as client:
        wait_for(machine.received, lambda seen: seen == [RIGHT])
        assert (client.start("x").status, client.unlock("x").status) == (409, 409)
        machine.touch("go")
        first = wait_until(client, "booting")["message"]
        assert machine.received() == [RIGHT]
        machine.ssh_key.chmod(0o604)
        assert (client.start("x").status, client.unlock("x").status) == (500, 500)
        assert client.status()["start"]["phase"] == "booting"
        machine.ssh_key.chmod(0o600)
        with ThreadPoolExecutor(8) as pool:
            begun = [pool.submit(client.start, "y") for _ in range(8)]
        assert sorted(each.result().status for each in begun) == [200] + 7 * [409]
        machine.touch("go")
        wait_until(client, "booting")
        machine.touch("go")
        assert client.unlock("z").status == 500  # this replaces it, and is watched, too
        start = wait_until(client, "booting")
        assert (start["outcome"], start["message"]) == ("not_confirmed", first)
        assert [*start["times"]] == ["unlocking", "booting"]
        assert machine.received() == [RIGHT, b"y", b"z"]


def test_an_unconfirmed_unlock_is_watched_and_forgotten(machine: Machine) -> None:
    limits = {"SYSTEM_SECONDS": 1, "SHOWN_SECONDS": 3}
    with machine.ask("asks root; take").starting(**limits) as client:
        wait_until(client, "booting")
        machine.show(CLOSED, OPEN)
        start = wait_until(client, "done")
        assert start["outcome"] == "up"
        assert re.match("The system is up.*Not confirmed", start["message"])
        wait_until_shown(client, lambda now: now is None)


# ---- Cancelling ----------------------------------------------------------------------


def test_a_cancel_ends_a_start_that_wakes(machine: Machine) -> None:
    """At once, while the first look at its silent ports takes 0.8 s."""
    with machine.starting() as client:
        client.call("DELETE", "/api/start")
        start = wait_until(client, "cancelled")
    assert (start["outcome"], start["sent"]) == ("cancelled", False)
    assert machine.packets() == []


@pytest.mark.parametrize("way", ["DELETE", "SIGTERM"])
@pytest.mark.parametrize("script", ["sleep 60", SLOWLY], ids=["unsent", "sent"])
def test_a_cancel_sends_nothing_or_keeps_what_was_reported(
    machine: Machine, script: str, way: str
) -> None:
    is_sent = script == SLOWLY
    settings = machine.ask(script).settings()
    # Processes inherit that a signal is ignored, here from whatever started waker.
    with daemon(settings, "env", "--ignore-signal=TERM") as started:
        client = started.client.log_in()
        client.start()
        child = wait_for_process("unlock", started.process.pid)
        wait_for(machine.received if is_sent else machine.commands)
        assert os.getsid(child) == child  # ^C at a terminal is the daemon's alone
        began = time.monotonic()
        if way == "DELETE":
            assert client.call("DELETE", "/api/start").json["success"] is True
            start = wait_until(client, "cancelled")
            assert start["outcome"] == ("unlocked" if is_sent else "cancelled")
            assert start["sent"] == is_sent
            assert "cancelled" in start["times"]
            assert ("root" if is_sent else "not sent") in start["message"]
            assert client.call("DELETE", "/api/start").status == 409
        else:
            assert started.stop() == 0
            words = "(?i)unlocked.*root" if is_sent else "Cancelled.*not sent"
            assert re.search(words, "\n".join(started.log))
        assert time.monotonic() < began + 20  # an unlock may take 90
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert machine.received() == [RIGHT] * is_sent


def test_a_cancel_before_the_process_begins_gives_it_nothing(tmp_path: Path) -> None:
    program = ["tee", str(tmp_path / "given")], os.environ
    process = waker.UnlockProcess(program, waker.Passphrase(PASSPHRASE))
    process.cancel()
    result = process.run(lambda: None)
    assert (result.outcome.word, result.sent) == ("cancelled", False)
    assert tmp_path.joinpath("given").read_bytes() == b""


# Opening the SSH key waits, as on a network that hangs, while a folder exists there.
SLOW_KEY = """
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int mode = va_arg(more, int);
    va_end(more);
    while (strstr(path, "/ssh_key") && access("%(slow)s", F_OK) == 0) {
        mkdir("%(slow)s/waits", 0700);
        usleep(10000);
    }
    return syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
"""


def test_a_slow_key_file_delays_no_status_and_no_sigterm(machine: Machine) -> None:
    slow = machine.folder / "slow"
    library = interpose(machine.folder, SLOW_KEY % {"slow": slow})
    settings = machine.settings() | {"LD_PRELOAD": library}
    with machine.waker(settings) as started, ThreadPoolExecutor() as pool:
        client, log = started.client, started.process.stderr
        assert log
        slow.mkdir()
        starting = pool.submit(client.start)
        wait_for(slow.joinpath("waits").exists)
        status = pool.submit(client.status)
        wait_for(status.done, seconds=3)
        assert status.result()["state"] == "off"
        started.process.terminate()
        wait_for(log.readline, lambda line: line == "stopping\n")
        wait_for(lambda: not is_open(client.port))
        slow.rename(machine.folder / "quick")
        assert starting.result().status == 503
        assert started.process.wait(60) == 0
    assert machine.packets() == []


def test_nothing_is_sent_once_the_daemon_has_died(machine: Machine) -> None:
    machine.ask(f"{SOON}; asks root; take; echo >taken")
    with machine.waker() as started:
        started.client.start()
        wait_for(machine.commands)
        started.process.kill()
        assert started.process.wait(60) == -signal.SIGKILL
        machine.touch("go")
        assert started.process.stderr
        started.process.stderr.read()  # until the unlocking process has ended
    wait_for(machine.folder.joinpath("taken").exists)
    assert machine.received() == []


# ---- What cannot begin, and failures of the box --------------------------------------


def test_a_start_that_cannot_unlock_wakes_nothing(machine: Machine) -> None:
    """But an unlock of a system that is up is a success, even if waker cannot."""
    with machine.waker(machine.settings(SSH_HOST_KEY="")) as started:
        client = started.client
        for request, ask in (("start", client.start), ("unlock", client.unlock)):
            answer = ask()
            assert answer.status == 500
            words = f"Failed to {request}: no host key is pinned.*was not sent"
            assert re.match(words, answer.error)
        assert client.status()["start"] is None
        assert machine.packets() == []
        machine.show(CLOSED, OPEN)
        wait_for_state(client, "up")
        answer = client.unlock()
    assert answer.status == 200
    assert "not sent" in answer.json["message"]


OFF, UP, LOCKED = (SILENT, SILENT), (SILENT, OPEN), (OPEN, SILENT)


def starter_of(
    machine: Machine, process: Sequence[str] = UNLOCK
) -> tuple[waker.Starter, Any]:
    """Return a starter, and its watcher, which finds what a test wants."""

    class Scripted(waker.Watcher):
        found: list[tuple[str, str]]  # in this order, and then nothing
        error: Any = None

        def probe(self, now: float, *, fresh: bool = False) -> waker.PortStates:
            if self.error:
                raise self.error
            return waker.PortStates(*map(waker.PortState, self.found.pop(0)))

    watcher = Scripted(machine.config(machine.settings(PIN=PIN)))
    return waker.Starter(watcher, (process, {})), watcher


def run_start(starter: waker.Starter, ago: float = 0, *, cancel: bool = False) -> Any:
    """Run a start to its end; returns what the status says of it."""
    others = {*threading.enumerate()}  # some of an earlier test may end meanwhile
    starter.begin(waker.Passphrase(PASSPHRASE), waits=True).began -= ago
    if cancel:
        starter.cancel()
    wait_for(lambda: others.issuperset(threading.enumerate()))
    return starter.members(time.monotonic())


def test_the_passphrase_is_forgotten_once_the_unlock_ends(machine: Machine) -> None:
    """The start itself is still shown."""
    starter, watcher = starter_of(machine)
    watcher.found = [UP]
    passphrase = waker.Passphrase(PASSPHRASE)
    its = weakref.ref(passphrase)
    start = starter.begin(passphrase, waits=True)
    del passphrase
    start.unlock_ended.wait()
    wait_for(lambda: its() is None)
    assert starter.members(time.monotonic())


def test_the_usual_time_is_the_median_of_the_last_five(machine: Machine) -> None:
    """One that sent no packet, or found no system, does not count.

    Nor does one that somebody unlocked at the server, for the time to unlock.
    """
    starter, watcher = starter_of(machine, ["/bin/echo", result_of("unlocked")])
    seen = []
    for ago, found in (
        (300, [UP]),
        (900, [OFF] * 9),
        *((ago, [OFF, UP]) for ago in (600, 500, 10)),
        *((ago, [OFF, LOCKED, UP]) for ago in (550, 510, 20)),
    ):
        watcher.found = [*found]
        run_start(starter, ago, cancel=UP not in found)
        seen.append([(usual or 0) // 10 for usual in starter.usual_times().values()])
    whole, to_unlock = zip(*seen, strict=True)
    assert whole == (0, 0, 60, 60, 50, 55, 51, 50)
    assert to_unlock == (0, 0, 0, 0, 0, 55, 55, 51)


def test_a_start_says_after_how_long_it_gave_up(machine: Machine) -> None:
    starter, watcher = starter_of(machine)
    watcher.found = [OFF] * 9
    message = run_start(starter, ago=661)["message"]
    assert message.startswith("after 11 minutes, the server did not answer: ")


class Unnamed(type):
    """Makes errors that cannot be described."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise MemoryError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_ends_a_start_and_the_next_may_begin(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says whether the passphrase may have been sent."""
    starter, watcher = starter_of(machine, ["/bin/echo", result_of("unlocked")])
    for kind in (type, Unnamed) * 2:
        watcher.error = kind("Bug", (Exception,), {})
        start = run_start(starter)
        assert (start["phase"], start["sent"]) == ("failed", False)
        assert re.search("Internal error.*was not sent", start["message"])
    watcher.error, watcher.found = None, [LOCKED]  # the next look is a bug
    start = run_start(starter)
    assert (start["phase"], start["sent"]) == ("failed", True)
    assert re.search("Internal error.* may have been sent", start["message"])
    log = capfd.readouterr().err
    assert re.findall(r"(?m)^bug: (\w+), ", log) == ["Bug"] * 2 + ["IndexError"]


def test_a_start_that_gets_no_thread_has_not_begun(machine: Machine) -> None:
    starter, watcher = starter_of(machine)
    watcher.found = [UP] * 2
    for shown in (None, "done"):  # what is shown stays
        usual = threading.stack_size(1 << 46)  # bytes: more than any system has
        try:
            with pytest.raises(waker.HttpError, match="Too busy"):
                run_start(starter)
        finally:
            threading.stack_size(usual)
        start: Any = starter.members(time.monotonic())
        assert (start and start["phase"]) == shown
        assert run_start(starter)["phase"] == "done"


def test_a_start_that_gets_no_thread_replaces_no_watch(machine: Machine) -> None:
    starter, watcher = starter_of(machine, ["/bin/echo", result_of("unlocked")])
    watcher.found = [LOCKED] + [OFF] * 99
    watch = starter.begin(waker.Passphrase(PASSPHRASE), waits=True)
    wait_for(watch.unlock_ended.is_set)
    usual = threading.stack_size(1 << 46)  # bytes: more than any system has
    try:
        with pytest.raises(waker.HttpError, match="Too busy"):
            starter.begin(waker.Passphrase(PASSPHRASE), waits=True)
    finally:
        threading.stack_size(usual)
    assert not watch.cancelled.is_set()
    starter.stop()
