"""The program as users run it: its secrets, the process that unlocks, its commands."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    CHECKOUT,
    GET,
    MACHINE,
    MODULE,
    PAGE,
    PASSPHRASE,
    PIN,
    PROGRAM,
    daemon,
    each,
    environment,
    make,
    need,
    result_of,
    run_python,
    run_waker,
    wait_for,
    wait_for_process,
    with_limits,
)
from machine import SOON, Machine

import waker

# ---- Secrets -------------------------------------------------------------------------


def test_a_value_does_not_show_its_secret_when_it_is_printed() -> None:
    config = waker.read_config(MACHINE | {"WAKER_PIN": PIN}, Path())
    app = waker.App(config, ([], {}))
    token = app.tokens.issue(0)
    body = json.dumps({"passphrase": PASSPHRASE}).encode()
    values = [
        *(config, config.pin, waker.Passphrase(PASSPHRASE), app, app.tokens),
        waker.Request("POST", "/x", {"x": token}, body, "192.0.2.1", 0),
        waker.Response({"token": token}),
    ]
    shown = f"{values} {[*map(str, values)]}"
    assert [secret for secret in (PIN, "horse", token) if secret in shown] == []


def test_a_bug_is_logged_by_its_place_and_without_its_text(machine: Machine) -> None:
    """The text may quote a secret, as this one of a paramiko of the test's own does."""
    bug = f"raise ValueError({PASSPHRASE!r})"
    machine.folder.joinpath("paramiko.py").write_text(bug)
    settings = machine.settings() | {"PYTHONPATH": str(machine.folder)}
    ended = run_waker("unlock", settings=settings, given=PASSPHRASE)
    assert ended.stderr == "bug: ValueError, paramiko.py:1\n"
    assert (ended.returncode, ended.stdout) == (70, "")


def test_an_unlock_shows_no_secret_and_leaves_nothing(machine: Machine) -> None:
    """Not in arguments, environment, log, answers and files; and no core dump."""
    secret, shown = "the-secret-passphrase", ""
    machine.ask(f"[ -e go ] && exit; asks d; take; {SOON}; opens d", secret)
    files = {*machine.folder.rglob("*")}
    # No encoding changes the lines between the processes, nor hides that it was sent.
    settings = machine.settings() | {"PYTHONIOENCODING": "utf-16"}
    with machine.waker(settings) as started, ThreadPoolExecutor() as pool:
        wait_for(lambda: started.uses()[0] == 2)  # threads
        parent, idle = started.process.pid, started.uses()
        client = started.client
        client.attempt("a-wrong-pin")
        answers = [client.call("POST", f"/api/unlock?{secret}", secret.encode())]
        unlocking = pool.submit(client.unlock, secret)
        child = wait_for_process("unlock", parent)
        wait_for(machine.received, lambda seen: seen == [secret.encode()])
        for pid in (parent, child):
            proc = Path(f"/proc/{pid}")
            shown += (proc / "cmdline").read_text()
            limits = (proc / "limits").read_text()
            assert re.search(r"core file size +[01] +[01] ", limits)
        childs = (proc / "environ").read_text()
        machine.touch("go")
        answers.append(unlocking.result())
        assert answers[-1].status == 200
        answers.append(client.unlock(f"{secret}\n"))
        assert not proc.exists()
        assert client.call("DELETE", "/api/start").status == 200  # or it is watched
        wait_for(lambda: started.uses() == idle)
        assert started.stop() == 0
    shown += "\n".join(started.log) + "".join(str(answer) for answer in answers)
    for hidden in (secret, client.token, PIN, "a-wrong-pin"):
        assert hidden not in shown + childs
    assert "PIN accepted" in shown  # what was searched is the log
    left = {path.name for path in machine.folder.rglob("*") if path not in files}
    assert left <= {"received", "commands", "go", "waker.py", "waker.pyc", "ui.html"}


# ---- The process that unlocks --------------------------------------------------------


def test_a_process_that_dies_after_it_sent_is_reported(machine: Machine) -> None:
    with (
        machine.ask("asks root; take; sleep 60").waker() as started,
        ThreadPoolExecutor() as pool,
    ):
        unlocking = pool.submit(started.client.unlock)
        child = wait_for_process("unlock", started.process.pid)
        wait_for(machine.received)
        os.kill(child, signal.SIGKILL)
        answer = unlocking.result()
        assert answer.status == 500
        assert re.search(
            "^Not confirmed: .*may have been sent.*status -9", answer.error
        )
        assert started.client.start().status == 200  # the next may begin


HANGS = """
import os, waker
program = ("sleep", "9"), os.environ
print(waker.UnlockProcess(program, waker.Passphrase("x")).run(print))
"""


def test_a_process_that_hangs_ends_in_time(tmp_path: Path) -> None:
    """By itself, even if its main thread is blocked, or else by the daemon.

    The daemon kills it five seconds after its time is up: here, after one second.
    """
    with_limits(tmp_path, UNLOCK_SECONDS=-4)
    assert "status -9" in run_python(HANGS, tmp_path)
    tmp_path.joinpath("paramiko.py").write_text("import time; time.sleep(60)")
    program = with_limits(tmp_path, UNLOCK_SECONDS=6)
    ended = run_waker("unlock", settings=MACHINE, given=PASSPHRASE, program=program)
    assert ended.returncode == -signal.SIGALRM


def unlock_by(*command: str) -> Any:
    """Unlock by a process of which the test says what it does."""
    passphrase = waker.Passphrase(PASSPHRASE)
    return waker.UnlockProcess((command, os.environ), passphrase).run(lambda: None)


def test_an_unlock_needs_no_other_thread() -> None:
    """Or its process would be running already when there is none."""
    usual = threading.stack_size(1 << 46)  # bytes: more than any system has
    try:
        result = unlock_by("/bin/echo", result_of("unlocked"))
    finally:
        threading.stack_size(usual)
    assert result.outcome.word == "unlocked"


SENT = '{"sent": true}\n'
REPORTS = {  # with results of these outcomes
    "no result": ("hello", "error"),
    "half a result": (f'{SENT}{{"outcome": "unlocked"}}', "not_confirmed"),
    "unknown outcome": (f"{SENT}%(opened)s", "not_confirmed"),
    "more than a result": (f"{SENT}%(unlocked)s\nhello", "not_confirmed"),
}


@each("printed outcome", REPORTS)
def test_only_a_complete_result_is_believed(
    capfd: pytest.CaptureFixture[str], printed: str, outcome: str
) -> None:
    script = 'echo "$0"; echo why >&2; kill -9 $$'
    results = {word: result_of(word) for word in ("opened", "unlocked")}
    result = unlock_by("sh", "-c", script, printed % results)
    assert (result.outcome.word, result.sent) == (outcome, SENT in printed)
    assert "status -9; see waker's log" in result.message
    assert "why\n" in capfd.readouterr().err  # the log


def test_a_process_that_cannot_start_has_sent_nothing() -> None:
    result = unlock_by("/nowhere")
    assert (result.outcome.word, result.sent) == ("error", False)
    assert re.search("cannot start: No such file.*not sent", result.message)


# ---- SIGTERM -------------------------------------------------------------------------


def test_sigterm_ends_all_that_waits(machine: Machine) -> None:
    """An unlock that has sent nothing, which is answered, and half a request."""
    with (
        ThreadPoolExecutor() as pool,
        machine.ask("sleep 60").waker() as started,
        socket.create_connection(("127.0.0.1", started.client.port)) as waiting,
    ):
        waiting.sendall(GET)
        unlocking = pool.submit(started.client.unlock)
        wait_for(machine.commands)
        started.process.terminate()
        try:
            wait_for(lambda: started.process.poll() is not None, seconds=5)
            assert re.search("Cancelled.* not sent", unlocking.result().error)
        finally:
            machine.show()  # or it would go on for a minute
            assert started.process.wait(60) == 0


def test_a_second_signal_ends_the_daemon_at_once(machine: Machine) -> None:
    """The first one lets an unlock finish, which may take a minute."""
    default = "env", "--default-signal=INT"  # nohup would ignore it
    settings = machine.ask("asks root; take; sleep 60").settings()
    with daemon(settings, *default) as started, ThreadPoolExecutor() as pool:
        unlocking = pool.submit(started.client.log_in().unlock)
        wait_for(machine.received)
        process = started.process
        assert process.stderr
        process.send_signal(signal.SIGINT)
        assert "stopping\n" in process.stderr
        process.send_signal(signal.SIGINT)
        try:
            wait_for(lambda: process.poll() is not None, seconds=5)
        finally:
            machine.show()  # or the unlock would go on
        assert isinstance(unlocking.exception(), ConnectionError)
        assert process.returncode == -signal.SIGINT
        assert "Traceback" not in process.stderr.read()


# ---- Commands ------------------------------------------------------------------------


def test_help_names_each_setting_and_command() -> None:
    text = run_waker("--help")
    assert text.returncode == 0
    words = re.findall(r"\w+", text.stdout)
    assert {*waker.SETTINGS, "serve", "unlock", "state"} <= {*words}


def test_a_command_that_cannot_run_says_so_by_its_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = MACHINE | {"WAKER_PIN": PIN, "WAKER_LISTEN": address}
        for command, status in {
            "shutdown": 2,
            "--env-file /nowhere/waker.env": 78,
        }.items():
            ended = run_waker(*command.split(), settings=settings)
            assert (ended.returncode, ended.stdout) == (status, ""), command
            assert ended.stderr
        ended = run_waker(settings=settings)
        assert ended.returncode == 1
        assert re.fullmatch("WAKER_LISTEN: Address already in use.*\n", ended.stderr)


def test_a_page_that_is_missing_or_damaged_is_reported(tmp_path: Path) -> None:
    program = sys.executable, str(shutil.copy(PROGRAM, tmp_path))
    for words in ("the page .*/ui.html: No such file", "ui.html is damaged"):
        ended = run_waker(settings=MACHINE | {"WAKER_PIN": PIN}, program=program)
        assert ended.returncode == 78
        assert re.match(f"{words}.*\n$", ended.stderr)
        (tmp_path / "ui.html").touch()


def test_a_passphrase_typed_at_the_prompt_is_not_shown(machine: Machine) -> None:
    """It is taken as it is, spaces included."""
    given = f" {PASSPHRASE} "
    settings = machine.ask("disk root", given).settings()
    ours, its = os.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", *MODULE, "unlock"],
        cwd=CHECKOUT,
        env=environment(settings),
        stdin=its,
        stdout=subprocess.PIPE,
        stderr=its,
    ) as child:
        assert os.read(ours, 12) == b"Passphrase: "
        os.write(ours, f"{given}\n".encode())
        assert b'"Unlocked: root."' in child.communicate(timeout=60)[0]
    assert machine.received() == [given.encode()]
    os.close(its)
    assert os.read(ours, 4096) == b"\r\n"
    os.close(ours)


# ---- The box -------------------------------------------------------------------------


def test_one_file_is_enough_and_needs_no_privileges(tmp_path: Path) -> None:
    """Alone in a folder, into which it writes nothing.

    Nor may it raise a limit of 0 for core dumps, which some containers have.
    """
    make(tmp_path / "build", "dist")
    program = tmp_path / "box/waker"
    program.parent.mkdir()
    (tmp_path / "build/dist/waker").rename(program)
    powerless = [need("prlimit"), "--core=0:0"]
    if not os.geteuid():
        powerless += [need("setpriv"), "--bounding-set=-all"]
    with daemon(MACHINE, *powerless, program=(sys.executable, str(program))) as started:
        client = started.client.log_in()
        assert client.call("GET", "/").body == PAGE
        assert client.status()["name"] == "127.0.0.1"
        shown = Path(f"/proc/{started.process.pid}/status").read_text()
        assert re.search(r"CapEff:\t0+\n", shown)
    assert [*program.parent.iterdir()] == [program]


def test_the_service_is_hardened() -> None:
    """Exposure of at most 1.2, by systemd's own scale of 0 to 10."""
    command = [need("systemd-analyze"), "security", "--offline=true", "--threshold=12"]
    unit = str(CHECKOUT / "waker.service")
    ended = subprocess.run(
        [*command, unit], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-300:]


def test_without_paramiko_it_only_wakes_and_watches(machine: Machine) -> None:
    program = with_limits(machine.folder, packet_port=machine.packet_port)
    bare = program[0], "-S", program[1]  # without the installed modules
    with daemon(machine.settings(), program=bare) as started:
        client = started.client.log_in()
        assert client.status()["state"] == "off"
        for answer in (client.start(), client.unlock()):
            assert answer.status == 500
            assert re.search("paramiko.*not sent", answer.error)
        assert client.status()["start"] is None
        assert machine.packets() == []
        assert client.call("POST", "/api/wol").status == 200
