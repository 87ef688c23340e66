"""The program as users run it: its secrets, the process that unlocks, its commands."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import (
    CHECKOUT,
    MACHINE,
    MODULE,
    PASSPHRASE,
    PIN,
    daemon,
    each,
    environment,
    make,
    need,
    need_root,
    new_app,
    run_waker,
    shortened,
    wait_for,
    wait_for_child,
)
from machine import SOON, Machine

import waker

# ---- Secrets -------------------------------------------------------------------------


def test_a_value_does_not_show_its_secret_when_it_is_printed() -> None:
    config = waker.read_config(MACHINE | {"WAKER_PIN": PIN}, Path())
    app = new_app(config)
    token = app.gate.issue_token(0)
    body = json.dumps({"passphrase": PASSPHRASE}).encode()
    values = [
        *(config, config.pin, waker.Passphrase(PASSPHRASE), app, app.gate),
        waker.Request("POST", "/x", {"x": token}, body, "192.0.2.1", 0),
        waker.Response({"token": token}),
    ]
    shown = f"{values} {[*map(str, values)]}"
    secrets = [PIN, "horse", token]
    for digest in (waker.sha256(PIN.encode()), waker.sha256(token.encode())):
        secrets += [digest.hex(), repr(digest)[2:-1]]
    assert [secret for secret in secrets if secret in shown] == []


def unlock_with(
    machine: Machine, paramiko: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run `waker unlock` with a paramiko of the test's own."""
    machine.folder.joinpath("paramiko.py").write_text(paramiko)
    settings = machine.settings() | {"PYTHONPATH": str(machine.folder)}
    return run_waker("unlock", *options, settings=settings, given=PASSPHRASE)


def test_a_bug_is_logged_by_its_place_and_without_its_text(machine: Machine) -> None:
    """The text may quote a secret, as this one does."""
    ended = unlock_with(machine, f"raise ValueError({PASSPHRASE!r})")
    assert ended.stderr == "bug: ValueError, paramiko.py:1\n"
    assert (ended.returncode, ended.stdout) == (70, "")


def test_an_unlock_shows_no_secret_and_leaves_nothing(machine: Machine) -> None:
    """Not in arguments, environment, log, answers and files; and no core dump."""
    secret, shown = "the-secret-passphrase", ""
    machine.ask(f"[ -e go ] && exit; asks d; take; {SOON}; opens d", secret)
    files = {*machine.folder.rglob("*")}
    with machine.waker() as started, ThreadPoolExecutor() as pool:
        wait_for(lambda: started.uses()[0] == 2)  # threads
        parent, idle = started.process.pid, started.uses()
        client = started.client
        client.attempt("a-wrong-pin")
        answers = [client.call("POST", f"/api/unlock?{secret}", secret.encode())]
        unlocking = pool.submit(client.unlock, secret)
        child = wait_for_child(parent)
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


KILLED = "^Failed to unlock: .*status -9.*not sent"
CHILDREN = {  # what the initrd does, what ends the process, and what is said of it
    "dies before it sends": ("sleep 60", signal.SIGKILL, KILLED),
    "dies after it sent": (
        *("asks root; take; sleep 60", signal.SIGKILL),
        "^Not confirmed: .*was sent.*status -9",
    ),
    "hangs": ("", signal.SIGSTOP, KILLED),  # by itself it would end in time
}


@each("script stroke words", CHILDREN)
def test_a_process_that_dies_or_hangs_is_reported(
    machine: Machine, script: str, stroke: signal.Signals, words: str
) -> None:
    limits = {} if script else {"UNLOCK_SECONDS": 6}
    with (
        machine.ask(script or "sleep 60").waker(**limits) as started,
        ThreadPoolExecutor() as pool,
    ):
        unlocking = pool.submit(started.client.unlock)
        child = wait_for_child(started.process.pid)
        if script:
            wait_for(machine.received if "take" in script else machine.commands)
        os.kill(child, stroke)
        began = time.monotonic()
        answer = unlocking.result()
        assert time.monotonic() < began + 30
        assert answer.status == 500
        assert re.search(words, answer.error)
        assert not Path(f"/proc/{child}").exists()
        assert started.client.start().status == 200  # the next may begin


def test_an_unlock_that_hangs_ends_itself_in_time(machine: Machine) -> None:
    """Even if its main thread is blocked, and no daemon is there to kill it."""
    began = time.monotonic()
    ended = unlock_with(machine, "import time; time.sleep(60)", "--seconds=6")
    assert 6 <= time.monotonic() - began < 30
    assert (ended.returncode, ended.stdout) == (-signal.SIGALRM, "")


def unlock_by(command: list[str]) -> waker.Result:
    """Unlock by a process of which the test says what it does."""
    start = waker.Start(waker.Passphrase(PASSPHRASE), 0, waits=False)
    return start.unlock((command, os.environ))


SENT = '{"sent": true}\n'
RESULT = '{"outcome": "unlocked", "sent": true, "message": "m", "hint": null}'


@pytest.mark.parametrize(
    ("printed", "outcome"),
    [
        ("hello", "error"),
        (f'{SENT}{{"outcome": "unlocked"}}', "not_confirmed"),
        (f"{SENT}{RESULT.replace('unlocked', 'opened')}", "not_confirmed"),
        (f"{SENT}{RESULT}\nhello", "not_confirmed"),
    ],
    ids=["no result", "half a result", "unknown outcome", "more than a result"],
)
def test_only_a_complete_result_is_believed(
    capfd: pytest.CaptureFixture[str], printed: str, outcome: str
) -> None:
    code = f"import sys; print({printed!r}); sys.exit('why')"
    result = unlock_by([sys.executable, "-c", code])
    assert (result.outcome.word, result.sent) == (outcome, SENT in printed)
    assert "status 1; see waker's log" in result.message
    assert "why\n" in capfd.readouterr().err  # the log


def test_a_process_that_cannot_start_has_sent_nothing() -> None:
    result = unlock_by(["/nowhere"])
    assert (result.outcome, result.sent) == (waker.Outcome.ERROR, False)
    assert re.search("cannot start: No such file.*not sent", result.message)


def test_the_lines_between_the_processes_have_no_encoding(machine: Machine) -> None:
    """Or a disk could be opened, and the passphrase be said not to be sent."""
    odd = {"PYTHONIOENCODING": "utf-16"}
    with machine.waker(machine.ask().settings() | odd) as started:
        assert started.client.unlock().json["message"] == "Unlocked: root."


# ---- SIGTERM -------------------------------------------------------------------------


def test_sigterm_ends_an_unlock_that_has_sent_nothing(machine: Machine) -> None:
    with (
        ThreadPoolExecutor() as pool,
        machine.ask("sleep 60").waker() as started,
    ):
        unlocking = pool.submit(started.client.unlock)
        wait_for(machine.commands)
        started.process.terminate()
        try:
            wait_for(lambda: started.process.poll() is not None, seconds=5)
            assert re.search("cancelled.* not sent", unlocking.result().error)
        finally:
            machine.show()  # or it would go on for a minute
            assert started.process.wait(60) == 0


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_daemon_at_once(
    machine: Machine, ending: signal.Signals
) -> None:
    """The first one lets an unlock finish, which may take a minute."""
    default = "env", "--default-signal=INT"  # nohup would ignore it
    settings = machine.ask("asks root; take; sleep 60").settings()
    with daemon(settings, *default) as started, ThreadPoolExecutor() as pool:
        client = started.client.log_in()
        unlocking = pool.submit(client.unlock)
        wait_for(machine.received)
        process = started.process
        assert process.stderr
        process.send_signal(ending)
        assert "stopping\n" in process.stderr
        process.send_signal(ending)
        try:
            wait_for(lambda: process.poll() is not None, seconds=5)
        finally:
            machine.show()  # or the unlock would go on
        assert isinstance(unlocking.exception(), ConnectionError)
        assert process.returncode == -ending
        assert process.stderr.read() == ""  # no traceback


# ---- Commands ------------------------------------------------------------------------


def test_help_names_each_setting_and_version_the_version() -> None:
    text = run_waker("--help")
    assert text.returncode == 0
    words = re.findall(r"\w+", text.stdout)
    assert {*waker.SETTINGS, "serve", "check", "unlock", "state"} <= {*words}
    ended = run_waker("--version")
    assert (ended.returncode, ended.stdout) == (0, f"waker {waker.__version__}\n")


NOWHERE = "--env-file", "/nowhere/waker.env"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("shutdown",), 2),
        (("--seconds", "5", "unlock"), 2),
        *((NOWHERE + command, 78) for command in ((), ("check",), ("unlock",))),
    ],
    ids=str,
)
def test_a_command_that_cannot_run_says_so_by_its_status(
    arguments: tuple[str, ...], status: int
) -> None:
    ended = run_waker(*arguments)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert ended.stderr


def test_a_port_that_is_taken_ends_the_daemon_with_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = MACHINE | {"WAKER_PIN": PIN, "WAKER_LISTEN": f"127.0.0.1:{port}"}
        ended = run_waker(settings=settings)
    assert ended.returncode == 1
    assert str(port) in ended.stderr


def type_passphrase(machine: Machine, typed: bytes) -> tuple[str, bytes]:
    """Return what `waker unlock` printed, and what the terminal shows after all."""
    ours, its = os.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", "env", "--default-signal=INT", *MODULE, "unlock"],
        cwd=CHECKOUT,
        env=environment(machine.settings()),
        stdin=its,
        stdout=subprocess.PIPE,
        stderr=its,
        text=True,
    ) as child:
        assert os.read(ours, 12) == b"Passphrase: "
        stat = Path(f"/proc/{child.pid}/stat")
        wait_for(lambda: ") S " in stat.read_text())  # it reads; before, ^C is lost
        os.write(ours, typed)
        printed, _ = child.communicate(timeout=60)
    os.write(its, b".")  # marks the end of what was shown
    shown = b""
    while not shown.endswith(b"."):
        shown += os.read(ours, 4096)
    os.close(ours)
    os.close(its)
    return printed, shown


def test_a_passphrase_typed_at_the_prompt_is_not_shown(machine: Machine) -> None:
    """It is taken as it is, spaces included. ^C ends the prompt without a traceback."""
    given = f" {PASSPHRASE} "
    machine.ask("disk root", given)
    printed, shown = type_passphrase(machine, f"{given}\n".encode())
    assert ('"Unlocked: root."' in printed, shown) == (True, b"\r\n.")
    assert machine.received() == [given.encode()]
    printed, shown = type_passphrase(machine, b"\x03")
    assert '"cancelled"' in printed
    assert b"Traceback" not in shown


# ---- The box -------------------------------------------------------------------------


def test_one_file_is_enough_and_needs_no_privileges(tmp_path: Path) -> None:
    """Alone in a folder, into which it writes nothing."""
    make(tmp_path / "build", "dist")
    program = tmp_path / "box/waker"
    program.parent.mkdir()
    (tmp_path / "build/dist/waker").rename(program)
    powerless = [need("setpriv"), "--bounding-set=-all"] if not os.geteuid() else []
    with daemon(MACHINE, *powerless, program=(sys.executable, str(program))) as started:
        client = started.client.log_in()
        assert client.call("GET", "/").body == CHECKOUT.joinpath("ui.html").read_bytes()
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


def test_it_runs_in_a_container_whose_limits_are_lower() -> None:
    need_root()  # setpriv takes the right to raise them
    low = need("prlimit"), "--core=0:0", "--data=66000000:66000000"
    by = need("setpriv"), "--bounding-set=-sys_resource", *low
    own = {"WAKER_PIN": PIN, "WAKER_LISTEN": "127.0.0.1:0"}
    ended = run_waker("check", settings=MACHINE | own, by=by)
    assert "ok     paramiko" in ended.stdout


def test_without_paramiko_it_only_wakes_and_watches(machine: Machine) -> None:
    program = shortened(machine.folder, packet_port=machine.packet_port)
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
