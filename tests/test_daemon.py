"""The program as users run it: the process that unlocks, signals, log and secrets."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest
from conftest import (
    CHECKOUT,
    MACHINE,
    MODULE,
    PASSPHRASE,
    PIN,
    PROGRAM,
    daemon,
    environment,
    need,
    need_root,
    new_app,
    run_waker,
    wait_for,
    wait_for_child,
)
from machine import CLOSED, Machine

import waker

RIGHT = PASSPHRASE.encode()
# It needs a second to open the disk, and then notes that it is about to say so.
SLOWLY = "[ -e said ] && exit; asks root; take; sleep 1; echo >said; opens root"


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


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
    ids=["systemd stops it", "interrupt", "hang-up"],
)
def test_an_unlock_that_has_sent_survives_every_signal(
    machine: Machine, number: int
) -> None:
    """systemd signals all processes, and a terminal those of the daemon's group."""
    usual = "setsid", "env", f"--default-signal={number}"
    with (
        ThreadPoolExecutor() as pool,
        daemon(machine.ask(SLOWLY).settings(), *usual) as started,
    ):
        answer = pool.submit(started.client.log_in().unlock)
        child = wait_for_child(started.process.pid)
        wait_for(machine.received, lambda seen: seen == [RIGHT])
        os.kill(child, number)
        os.killpg(started.process.pid, number)
        has_ended = number == signal.SIGHUP  # which the daemon does not handle
        assert started.process.wait(60) == (-number if has_ended else 0)
        assert started.process.stderr
        log = started.process.stderr.read()  # until the child has ended, too
        assert machine.folder.joinpath("said").exists()  # it waited for the verdict
    assert machine.received() == [RIGHT]
    assert "bug:" not in log
    if not has_ended:
        assert answer.result().json["message"] == "Unlocked: root."


def test_a_second_signal_ends_the_daemon_at_once(machine: Machine) -> None:
    machine.ask("asks root; take; sleep 60")
    with daemon(machine.settings(), "env", "--default-signal=INT") as started:
        process = started.process
        started.client.log_in().start()
        wait_for(machine.received, lambda seen: seen == [RIGHT])
        process.terminate()
        assert process.stderr
        wait_for(process.stderr.readline, lambda line: line == "stopping\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT


def unlock_by(
    folder: Path, code: str, cancelled: threading.Event | None = None
) -> waker.Result:
    """Unlock by a process of which the test says what it does."""
    program = folder / "child.py"
    program.write_text(f"import pathlib, sys\n{code}\n")
    config = waker.read_config(MACHINE | {"WAKER_PIN": PIN}, Path())
    unlocker = waker.Unlocker(config, program, os.environ)
    events = cancelled or threading.Event(), threading.Event()
    return unlocker.run(waker.Passphrase(PASSPHRASE), *events)


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


def test_a_cancelled_unlock_is_given_no_passphrase(tmp_path: Path) -> None:
    """The cancel may come while the process begins."""
    given = tmp_path / "given"
    cancelled = threading.Event()
    cancelled.set()
    code = f"pathlib.Path({str(given)!r}).write_text(sys.stdin.read())"
    result = unlock_by(tmp_path, code, cancelled)
    assert result.outcome is waker.Outcome.CANCELLED
    assert given.read_text() == ""


def test_only_the_process_that_unlocks_loads_paramiko(machine: Machine) -> None:
    """It gets the machine's settings, and no others."""
    system = {"SYSTEM_SSH_PORT": "2222"}  # the default is another
    settings = machine.ask("sleep 60").settings(**system)
    with daemon(settings) as started:
        started.client.log_in().start()
        child = wait_for_child(started.process.pid)
        wait_for(machine.has_run)
        maps = [Path(f"/proc/{pid}/maps") for pid in (child, started.process.pid)]
        loaded = ["cryptography" in each.read_text() for each in maps]
        lines = Path(f"/proc/{child}/environ").read_text().split("\0")
    assert loaded == [True, False]
    found = dict(line.split("=", 1) for line in lines if line.startswith("WAKER_"))
    others = "WAKER_HOMELAB_MAC", "WAKER_HOMELAB_NAME", "WAKER_HOMELAB_BROADCAST"
    assert found == {n: v for n, v in settings.items() if n not in others}


def test_an_unlock_uses_the_daemons_own_python_and_modules(
    machine: Machine, tmp_path: Path
) -> None:
    """If that Python has gone, nothing is sent."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = tmp_path / "bare/bin/python"
    modules = {"PYTHONPATH": str(Path(paramiko.__file__).parent.parent)}
    settings = machine.ask().settings() | modules
    with daemon(settings, program=(str(python), PROGRAM)) as started:
        client = started.client.log_in()
        assert client.unlock().json["message"] == "Unlocked: root."
        python.unlink()
        answer = client.unlock()
    assert answer.status == 500
    assert re.search("cannot start: No such file.*not sent", answer.error)
    assert machine.received() == [RIGHT]


# ---- Commands ------------------------------------------------------------------------


def test_state_and_unlock_read_only_what_they_need(machine: Machine) -> None:
    machine.show(CLOSED, CLOSED)
    names = "WAKER_HOMELAB_HOST", "WAKER_INITRD_SSH_PORT", "WAKER_SYSTEM_SSH_PORT"
    settings = {name: machine.settings()[name] for name in names}
    ended = run_waker("state", settings=settings)
    assert (ended.returncode, json.loads(ended.stdout)["state"]) == (0, "booting")
    ended = run_waker("unlock", settings=settings, given="p")
    assert (ended.returncode, json.loads(ended.stdout)["outcome"]) == (1, "not_asked")


def test_unlock_takes_a_passphrase_in_pieces_in_any_locale(machine: Machine) -> None:
    middle = RIGHT.index(b"\xa4")  # within a character
    with subprocess.Popen(
        [*MODULE, "unlock"],
        cwd=CHECKOUT,
        env=environment(machine.ask().settings() | {"PYTHONIOENCODING": "ascii"}),
        stdin=subprocess.PIPE,
    ) as child:
        assert child.stdin
        os.write(child.stdin.fileno(), RIGHT[:middle])
        pipe, unread = child.stdin.fileno(), bytes(4)
        wait_for(lambda: fcntl.ioctl(pipe, termios.FIONREAD, unread) == unread)
        os.write(child.stdin.fileno(), RIGHT[middle:])
        child.stdin.close()
        assert child.wait(60) == 0
    assert machine.received() == [RIGHT]


def unlock_by_hand(
    settings: dict[str, str], command: str, typed: bytes = b""
) -> tuple[int, str, bytes]:
    """Return the exit status, what was printed, and what the terminal shows."""
    ours, its = os.openpty()
    with subprocess.Popen(
        ["sh", "-c", command, "sh", *MODULE, "unlock"],
        cwd=CHECKOUT,
        env=environment(settings),
        stdin=its,
        stdout=subprocess.PIPE,
        stderr=its,
        text=True,
    ) as child:
        if typed:
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
    return child.returncode, printed, shown


# Under nohup, ^C would be ignored.
PROMPT = 'exec setsid --ctty env --default-signal=INT "$@"'


def test_a_passphrase_typed_at_the_prompt_is_not_shown(machine: Machine) -> None:
    """It is taken as it is, spaces included."""
    given = f" {PASSPHRASE} "
    settings = machine.ask("disk root", given).settings()
    status, _, shown = unlock_by_hand(settings, PROMPT, f"{given}\n".encode())
    assert (status, shown) == (0, b"\r\n.")
    assert machine.received() == [given.encode()]


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        ('"$@" <&-', b""),
        ("printf '\\377' | \"$@\"", b""),
        (PROMPT, b"\x03"),
        (PROMPT, b"\x04"),
    ],
    ids=["closed", "no UTF-8", "^C at the prompt", "^D at the prompt"],
)
def test_unlock_by_hand_says_what_is_wrong(command: str, typed: bytes) -> None:
    status, printed, shown = unlock_by_hand(MACHINE, command, typed)
    assert "1 to 512 bytes" in json.loads(printed)["message"]
    assert status == 1
    assert b"Traceback" not in shown


def test_a_missing_page_is_reported(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, shutil.copy(PROGRAM, tmp_path)],
        env=environment(MACHINE | {"WAKER_PIN": PIN}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 78
    assert f"{tmp_path}/ui.html: No such file" in ended.stderr


def test_it_runs_where_limits_are_lower_already() -> None:
    """As in a container."""
    need_root()  # the command below loses its right to raise them
    low = "--core=0:0", "--data=66000000:66000000"
    rights = "--bounding-set=-sys_resource"
    ended = subprocess.run(
        [need("setpriv"), rights, need("prlimit"), *low, *MODULE, "check"],
        cwd=CHECKOUT,
        env=environment(MACHINE | {"WAKER_PIN": PIN, "WAKER_LISTEN": "127.0.0.1:0"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""
    assert f"ok     paramiko       {paramiko.__version__}\n" in ended.stdout


# ---- The log -------------------------------------------------------------------------


def test_the_log_never_names_a_trusted_proxy() -> None:
    """Or a ban by those addresses would shut out everybody behind the proxy."""
    with daemon(MACHINE | {"WAKER_TRUSTED_PROXY": "127.0.0.1"}) as started:
        client = started.client
        client.raw(b"nonsense\r\n\r\n")
        client.attempt("wrong!")
        client.attempt("wrong!", {"X-Forwarded-For": "192.0.2.1"})
        started.stop()
    refused = [line.partition(": ")[0] for line in started.log if "refused" in line]
    assert refused == [
        "refused a request",
        "refused POST /api/auth",
        "ip=192.0.2.1 refused POST /api/auth",
    ]
