"""The program as users run it: the process that unlocks, its end, and its prompt."""

import json
import os
import re
import signal
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
    environment,
    need,
    need_root,
    new_app,
    run_waker,
    wait_for,
)
from machine import Machine

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


def test_a_bug_is_logged_by_its_place_and_without_its_text(machine: Machine) -> None:
    """The text may quote a secret, as this one does."""
    machine.make_keys()
    file = machine.folder / "paramiko.py"
    file.write_text(f"raise ValueError({PASSPHRASE!r})")
    settings = machine.settings() | {"PYTHONPATH": str(machine.folder)}
    ended = run_waker("unlock", settings=settings, given=PASSPHRASE)
    assert ended.stderr == "bug: ValueError, paramiko.py:1\n"
    assert (ended.returncode, ended.stdout) == (70, "")


# ---- The process that unlocks --------------------------------------------------------


def test_an_unlock_that_hangs_ends_itself_in_time(machine: Machine) -> None:
    """Even if its main thread is blocked, and no daemon is there to kill it."""
    machine.make_keys()
    machine.folder.joinpath("paramiko.py").write_text("import time; time.sleep(60)")
    settings = machine.settings() | {"PYTHONPATH": str(machine.folder)}
    began = time.monotonic()
    ended = run_waker("unlock", "--seconds=6", settings=settings, given=PASSPHRASE)
    assert 6 <= time.monotonic() - began < 30
    assert (ended.returncode, ended.stdout) == (-signal.SIGALRM, "")


def unlock_by(folder: Path, code: str) -> waker.Result:
    """Unlock by a process of which the test says what it does."""
    program = folder / "child.py"
    program.write_text(f"import sys\n{code}\n")
    start = waker.Start(waker.Passphrase(PASSPHRASE), 0, waits=False)
    return start.unlock(([sys.executable, str(program)], os.environ))


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
    tmp_path: Path, capfd: pytest.CaptureFixture[str], printed: str, outcome: str
) -> None:
    result = unlock_by(tmp_path, f"print({printed!r})\nsys.exit('why')")
    assert (result.outcome.word, result.sent) == (outcome, SENT in printed)
    assert "status 1; see waker's log" in result.message
    assert "why\n" in capfd.readouterr().err  # the log


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


def test_the_lines_between_the_processes_have_no_encoding(machine: Machine) -> None:
    """Or a disk could be opened, and the passphrase be said not to be sent."""
    odd = {"PYTHONIOENCODING": "utf-16"}
    with daemon(machine.ask().settings() | odd) as started:
        assert started.client.log_in().unlock().json["message"] == "Unlocked: root."


def test_a_process_that_cannot_start_has_sent_nothing() -> None:
    start = waker.Start(waker.Passphrase(PASSPHRASE), 0, waits=False)
    result = start.unlock((["/nowhere"], {}))
    assert (result.outcome, result.sent) == (waker.Outcome.ERROR, False)
    assert re.search("cannot start: No such file.*not sent", result.message)


# Importing paramiko takes long, as it does from an SD card that is busy.
SLOW_IMPORT = """
import sys, time

def wait(event, arguments):
    if event == "import" and arguments[0] == "paramiko":
        time.sleep(2)

sys.addaudithook(wait)
"""


def test_an_unlock_on_a_slow_box_has_a_result_in_time(machine: Machine) -> None:
    """Nothing answers, which it would otherwise wait for in addition."""
    machine.make_keys()
    machine.folder.joinpath("sitecustomize.py").write_text(SLOW_IMPORT)
    settings = machine.settings() | {"PYTHONPATH": str(machine.folder)}
    ended = run_waker("unlock", "--seconds=6", settings=settings, given=PASSPHRASE)
    assert json.loads(ended.stdout)["outcome"] == "not_asked"


def test_an_unlock_survives_its_terminal_if_that_is_wanted(machine: Machine) -> None:
    """As with nohup, or in a shell script that ignores the signal."""
    machine.ask("until [ -e go ]; do sleep 0.1; done; disk root")
    ignoring = ["env", "--ignore-signal=HUP", *MODULE, "unlock"]
    with subprocess.Popen(
        ignoring,
        cwd=CHECKOUT,
        env=environment(machine.settings()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as unlocking:
        assert unlocking.stdin
        unlocking.stdin.write(PASSPHRASE)
        unlocking.stdin.close()
        wait_for(machine.has_run)
        unlocking.send_signal(signal.SIGHUP)
        machine.folder.joinpath("go").touch()
        assert unlocking.stdout
        assert "Unlocked: root." in unlocking.stdout.read()


# ---- Commands ------------------------------------------------------------------------


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


def test_it_runs_in_a_container_whose_limits_are_lower() -> None:
    need_root()  # the command below loses its right to raise them
    low = "--core=0:0", "--data=66000000:66000000"
    rights = "--bounding-set=-sys_resource"
    ended = subprocess.run(
        [need("setpriv"), rights, need("prlimit"), *low, *MODULE, "check"],
        cwd=CHECKOUT,
        env=environment(MACHINE | {"WAKER_PIN": PIN, "WAKER_LISTEN": "127.0.0.1:0"}),
        stdout=subprocess.PIPE,
        check=False,
    )
    assert b"ok     paramiko" in ended.stdout
