"""The program as users run it: commands, log, the unlocking process, secrets."""

import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import paramiko
import pytest
from conftest import (
    CHECKOUT,
    MAC,
    MACHINE,
    MODULE,
    PASSPHRASE,
    PIN,
    PROGRAM,
    Client,
    daemon,
    environment,
    need,
    need_root,
    new_app,
    run_waker,
    wait_for,
    wait_for_child,
)
from cryptroot_unlock import Disks
from homelab import new_key, public_line
from ssh_servers import free_port, paramiko_server, settings_at

import waker

ONE = {"d": PASSPHRASE}
RIGHT = PASSPHRASE.encode()
NOT_SENT = "The passphrase was not sent."


def test_a_missing_or_damaged_page_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, shutil.copy(PROGRAM, tmp_path)]
    settings = environment(MACHINE | {"WAKER_PIN": PIN})
    page = tmp_path / "ui.html"
    missing = f"the page {page}: No such file or directory\n"
    for message in (missing, "ui.html is damaged; reinstall it\n"):
        ended = subprocess.run(
            command, env=settings, stderr=subprocess.PIPE, check=False, timeout=60
        )
        assert (ended.returncode, ended.stderr.decode()) == (78, message)
        page.write_text("<!DOCTYPE html>\n")


def test_an_unlock_can_be_given_at_most_9999_seconds() -> None:
    settings = {"WAKER_HOMELAB_HOST": "127.0.0.1"}
    for seconds, status in ((9999, 1), (10_000, 2)):
        ended = run_waker("unlock", f"--seconds={seconds}", settings=settings)
        assert ended.returncode == status


def test_it_runs_where_limits_are_lower_already() -> None:
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


def test_an_unlock_finds_paramiko_where_the_daemon_finds_it(tmp_path: Path) -> None:
    """`waker check` in the same environment says that all is well."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    modules = Path(paramiko.__file__).parent.parent
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        settings = initrd.settings() | MAC | {"PYTHONPATH": str(modules)}
        with daemon(settings, program=(python, PROGRAM)) as started:
            answer = started.client.log_in().unlock()
    assert answer.json == {"success": True, "message": "Unlocked: d."}


def test_state_and_unlock_read_only_what_they_need() -> None:
    settings = {"WAKER_HOMELAB_HOST": "127.0.0.1", "WAKER_SYSTEM_SSH_PORT": "1"}
    settings["WAKER_SSH_HOST_KEY"] = public_line(new_key())  # and no key of our own
    ended = run_waker("state", settings=settings)
    assert (ended.returncode, json.loads(ended.stdout)["state"]) == (0, "booting")
    ended = run_waker("unlock", settings={"WAKER_INITRD_SSH_PORT": "x"}, given="p")
    assert (ended.returncode, ended.stdout) == (78, "")
    names = [line.split()[0] for line in ended.stderr.splitlines()]
    assert names == ["WAKER_HOMELAB_HOST", "WAKER_INITRD_SSH_PORT"]


# ---- The log -------------------------------------------------------------------------


def test_the_log_never_names_a_trusted_proxy() -> None:
    """Or a ban by those addresses would shut out everybody behind the proxy."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no ::1: {error.strerror}")
    settings = {"WAKER_LISTEN": "[::]:0", "WAKER_TRUSTED_PROXY": "::1"}
    with daemon(MACHINE | settings) as started:
        client = started.client  # over IPv4
        client.raw(b"nonsense\r\n\r\n")
        client.raw(b"GET /a%1b'b HTTP/1.1\r\n\r\n")
        client.host = "::1"
        client.raw(b"nonsense\r\n\r\n")
        client.attempt("wrong!")
        client.attempt("wrong!", {"X-Forwarded-For": "192.0.2.1"})
        started.stop()
    assert [line.partition(" A request")[0] for line in started.log[1:]] == [
        "ip=127.0.0.1 refused a request: 400",
        "ip=127.0.0.1 refused GET /a%1b'b: 404 No such path",
        "refused a request: 400",
        "refused POST /api/auth: 401 Wrong PIN",
        "ip=192.0.2.1 refused POST /api/auth: 401 Wrong PIN",
        "stopping",
    ]


def test_no_connection_replaces_a_closed_standard_error() -> None:
    """Or its client would read the log."""
    port = free_port()
    where = {"WAKER_LISTEN": f"127.0.0.1:{port}", "WAKER_PIN": PIN}
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *MODULE]
    with subprocess.Popen(
        command, cwd=CHECKOUT, env=environment(MACHINE | where)
    ) as process:
        client = Client(port)

        def answers() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                return client.attempt("wrong!").status == 401
            return False

        try:
            wait_for(answers)
            for _ in range(9):
                answer = client.raw(b"GET /x HTTP/1.1\r\n\r\n")
                assert answer == (404, b'{"error": "No such path"}')
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


# ---- The child that unlocks ----------------------------------------------------------


def run_child(
    config: waker.Config,
    folder: Path,
    code: str,
    cancelled: threading.Event | None = None,
) -> waker.Result:
    """Unlock by a child of which the test says what it does."""
    program = folder / "child.py"
    program.write_text(f"import json, os, pathlib, sys, time\n{code}\n")
    unlocker = waker.Unlocker(config, program, os.environ)
    events = cancelled or threading.Event(), threading.Event()
    result = unlocker.run(waker.Passphrase(PASSPHRASE), *events)
    assert events[1].is_set() == result.sent
    return result


SENT = '{"sent": true}\n'
RESULT = '{"outcome": "%s", "sent": true, "message": "m", "hint": null}'


@pytest.mark.parametrize(
    ("printed", "outcome"),
    [
        ("", "error"),
        ("hello", "error"),
        ("[]", "error"),
        (RESULT % "opened", "error"),
        (SENT, "not_confirmed"),
        (f"{SENT}hello", "not_confirmed"),
        (f'{SENT}{{"outcome": "unlocked"}}', "not_confirmed"),
        (SENT + RESULT % "opened", "not_confirmed"),
        (f"{SENT}{RESULT % 'unlocked'}\nhello", "not_confirmed"),
    ],
)
def test_only_a_complete_result_is_believed(
    config: waker.Config,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    printed: str,
    outcome: str,
) -> None:
    result = run_child(config, tmp_path, f"print({printed!r})\nsys.exit('why')")
    assert (result.outcome.word, result.sent) == (outcome, SENT in printed)
    assert "ended with status 1; see waker's log" in result.message
    assert result.hint is None
    assert "why\n" in capfd.readouterr().err  # the log


def test_a_child_that_ends_without_reading_is_believed(
    config: waker.Config, tmp_path: Path
) -> None:
    """The passphrase breaks its pipe, and its output still says why it ended."""
    closed = tmp_path / "closed"
    result = '{"outcome": "error", "sent": false, "message": "why", "hint": "a hint"}'
    code = f"os.close(0)\npathlib.Path({str(closed)!r}).touch()\nprint({result!r})"

    class Waits(threading.Event):
        def is_set(self) -> bool:
            wait_for(closed.exists)
            return super().is_set()

    ended = run_child(config, tmp_path, code, Waits())
    assert ended.outcome is waker.Outcome.ERROR
    assert (ended.message, ended.hint) == ("why", "a hint")


def test_a_cancelled_unlock_is_given_no_passphrase(
    config: waker.Config, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    cancelled = threading.Event()
    cancelled.set()
    code = f"pathlib.Path({str(given)!r}).write_text(sys.stdin.read())"
    result = run_child(config, tmp_path, code, cancelled)
    assert result.outcome is waker.Outcome.CANCELLED
    assert given.read_text() == ""


def test_a_report_that_crosses_the_cancel_is_believed(
    config: waker.Config, tmp_path: Path
) -> None:
    """The passphrase may have been sent. This child, unlike waker, obeys SIGTERM."""
    program = tmp_path / "child.py"
    program.write_text(
        f"import sys, time\nsys.stdin.read()\nprint({SENT!r}, flush=True)\n"
        "time.sleep(60)\n"
    )
    cancelled, sent = threading.Event(), threading.Event()
    unlocker = waker.Unlocker(config, program, os.environ)
    with ThreadPoolExecutor() as pool:
        given = waker.Passphrase(PASSPHRASE)
        unlocking = pool.submit(unlocker.run, given, cancelled, sent)
        wait_for(sent.is_set)
        cancelled.set()
        unlocker.cancel()
        result = unlocking.result()
    assert result.outcome is waker.Outcome.NOT_CONFIRMED
    assert result.sent
    assert result.message.startswith("Not confirmed: the passphrase was sent, but")
    assert "ended with status -15" in result.message


def test_only_the_child_loads_paramiko_and_gets_the_machines_settings(
    tmp_path: Path,
) -> None:
    """Without its own port 2222, the system would have the initrd's, and be refused."""
    with paramiko_server(tmp_path, Disks(ONE, mute=True)) as initrd:
        settings = initrd.settings(SSH_USER="root", SYSTEM_SSH_PORT=2222)
        with daemon(settings | MAC | {"WAKER_HOMELAB_NAME": "x"}) as started:
            started.client.log_in().start()
            child = wait_for_child(started.process.pid)
            wait_for(lambda: re.search(MODULES, read_proc(child, "maps")))
            assert not re.search(MODULES, read_proc(started.process.pid, "maps"))
            lines = read_proc(child, "environ").split("\0")
    found = dict(line.split("=", 1) for line in lines if line.startswith("WAKER_"))
    assert found == settings


MODULES = "cryptography|nacl"  # which paramiko needs


def read_proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def begin_unlock(client: Client) -> socket.socket:
    """Ask for an unlock, and leave it to the caller to read the answer."""
    body = json.dumps({"passphrase": PASSPHRASE}).encode()
    head = f"POST /api/unlock HTTP/1.1\r\nAuthorization: Bearer {client.token}\r\n"
    head += "Content-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    tcp = socket.create_connection((client.host, client.port))
    tcp.sendall(head.encode() + body)
    return tcp


def test_sigterm_lets_an_unlock_finish_whose_client_has_gone(tmp_path: Path) -> None:
    """A phone that loses its network while it waits resets the connection."""
    with paramiko_server(tmp_path, Disks(ONE, slow=2)) as initrd:
        with daemon(initrd.settings() | MAC) as started:
            with begin_unlock(started.client.log_in()) as tcp:
                wait_for(lambda: initrd.received() == [RIGHT])
                linger = struct.pack("ii", 1, 0)  # so that closing it resets it
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            assert started.stop() == 0
    assert started.log[-2:] == ["stopping", "ip=127.0.0.1 Unlocked: d."]


def test_after_sigterm_nobody_waits_for_clients_to_close(tmp_path: Path) -> None:
    """Usually, a client has two seconds to do so after its answer."""
    with paramiko_server(tmp_path, Disks(ONE, slow=2)) as initrd:
        with daemon(initrd.settings() | MAC) as started:
            with begin_unlock(started.client.log_in()) as tcp:
                wait_for(lambda: initrd.received() == [RIGHT])
                started.process.terminate()
                assert tcp.recv(9).startswith(b"HTTP/1.1")
                answered = time.monotonic()
                assert started.process.wait(60) == 0
                assert time.monotonic() - answered < 1.8


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
    ids=["systemd stops it", "interrupt", "hang-up"],
)
def test_an_unlock_that_has_sent_survives_every_signal(
    tmp_path: Path, number: int
) -> None:
    """systemd signals all processes, and a terminal those of the daemon's group."""
    usual = "setsid", "env", f"--default-signal={number}"
    with (
        paramiko_server(tmp_path, Disks(ONE, slow=2)) as initrd,
        ThreadPoolExecutor() as pool,
        daemon(initrd.settings() | MAC, *usual) as started,
    ):
        answer = pool.submit(started.client.log_in().unlock)
        child = wait_for_child(started.process.pid)
        wait_for(lambda: initrd.received() == [RIGHT])
        os.kill(child, number)
        os.killpg(started.process.pid, number)
        has_ended = number == signal.SIGHUP  # which the daemon does not handle
        assert started.process.wait(60) == (-number if has_ended else 0)
        assert started.process.stderr
        log = started.process.stderr.read()  # until the child has ended, too
        assert Disks.load(initrd.state).locked == {}  # it waited for the verdict
    assert "bug:" not in log
    if not has_ended:
        assert answer.result().json["message"] == "Unlocked: d."


def test_a_second_signal_ends_the_daemon_at_once(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE, slow=30)) as initrd:
        usual = "env", "--default-signal=INT"
        with daemon(initrd.settings() | MAC, *usual) as started:
            process = started.process
            started.client.log_in().start()
            wait_for(lambda: initrd.received() == [RIGHT])
            process.terminate()
            assert process.stderr
            wait_for(process.stderr.readline, lambda line: line == "stopping\n")
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == -signal.SIGINT  # the unlock goes on for 30 s


def test_an_unlocking_process_that_cannot_start_has_sent_nothing(
    config: waker.Config,
) -> None:
    unlocker = waker.Unlocker(config, Path(PROGRAM), os.environ)
    _, hard = limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        events = threading.Event(), threading.Event()
        result = unlocker.run(waker.Passphrase(PASSPHRASE), *events)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert result.outcome is waker.Outcome.ERROR
    reason = "the unlocking process cannot start: Too many open files"
    assert result.message == f"{reason}. {NOT_SENT}"


@pytest.mark.parametrize(
    "kind", ["passphrase", "pin", "config", "request", "response", "gate", "app"]
)
def test_a_value_does_not_show_its_secret_when_it_is_printed(kind: str) -> None:
    config = waker.read_config(MACHINE | {"WAKER_PIN": PIN}, Path())
    app = new_app(config)
    token = app.gate.issue_token(0)
    body = json.dumps({"passphrase": PASSPHRASE}).encode()
    values = {
        "passphrase": waker.Passphrase(PASSPHRASE),
        "pin": config.pin,
        "config": config,
        "request": waker.Request("POST", "/x", {"x": token}, body, "192.0.2.1", 0),
        "response": waker.Response({"token": token}),
        "gate": app.gate,
        "app": app,
    }
    shown = f"{values[kind]} {values[kind]!r} {[values[kind]]}"
    secrets = [PIN, "horse", token]
    for digest in (waker.sha256(PIN.encode()), waker.sha256(token.encode())):
        secrets += [digest.hex(), repr(digest)[2:-1]]
    assert [secret for secret in secrets if secret in shown] == []


def test_a_bug_is_logged_without_the_text_of_its_error() -> None:
    """The text may quote a secret, as this one does. The place is the innermost."""
    with pytest.raises(ValueError, match="horse") as caught:
        Fraction(PASSPHRASE)
    line = waker.describe_bug(caught.value)
    assert re.fullmatch(r"bug: ValueError, fractions\.py:\d+", line)


def test_a_bug_in_an_unlock_is_logged_without_the_text_of_its_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "paramiko.py").write_text(f"raise ValueError({PASSPHRASE!r})")
    settings = settings_at(tmp_path, 1) | {"PYTHONPATH": str(tmp_path)}
    ended = run_waker("unlock", settings=settings, given=PASSPHRASE)
    assert ended.stderr == "bug: ValueError, paramiko.py:1\n"
    assert (ended.returncode, ended.stdout) == (70, "")


# ---- `waker unlock` by hand ----------------------------------------------------------


def test_unlock_by_hand_takes_utf8_in_any_locale(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        settings = initrd.settings() | {"WAKER_SSH_KEY": ""}
        file = tmp_path / "waker.env"  # the key is beside it
        file.write_text("".join(f"{n}={v}\n" for n, v in settings.items()))
        command = "--env-file", str(file), "unlock"
        locale = {"PYTHONIOENCODING": "ascii"}
        ended = run_waker(*command, settings=locale, given=f"{PASSPHRASE}\n")
        assert initrd.received() == [PASSPHRASE.encode()]
    assert ended.returncode == 0


def test_unlock_by_hand_takes_a_passphrase_that_comes_in_pieces(tmp_path: Path) -> None:
    """Nobody needs to read its output to the end."""
    given = PASSPHRASE.encode()
    middle = given.index(b"\xa4")  # within a character
    with (
        paramiko_server(tmp_path, Disks(ONE, slow=1)) as initrd,
        subprocess.Popen(
            [*MODULE, "unlock"],
            cwd=CHECKOUT,
            env=environment(initrd.settings()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as child,
    ):
        stdin, stdout, stderr = child.stdin, child.stdout, child.stderr
        assert stdin
        assert stdout
        assert stderr
        os.write(stdin.fileno(), given[:middle])
        unread = bytes(4)
        wait_for(lambda: fcntl.ioctl(stdin, termios.FIONREAD, unread) == unread)
        os.write(stdin.fileno(), given[middle:])
        stdin.close()
        assert stdout.readline() == b'{"sent": true}\n'
        stdout.close()
        assert (stderr.read(), child.wait(60)) == (b"", os.EX_IOERR)
        assert initrd.received() == [given]


# Under nohup, ^C would be ignored.
PROMPT = 'exec setsid --ctty env --default-signal=INT "$@"'


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ('"$@" <&-', b""),
        ("printf '\\377' | \"$@\"", b""),
        (PROMPT, b"\x03"),
        (PROMPT, b"\x04"),
    ],
    ids=["closed", "no UTF-8", "^C at the prompt", "^D at the prompt"],
)
def test_unlock_by_hand_says_what_is_wrong(command: str, key: bytes) -> None:
    ours, its = os.openpty()
    with subprocess.Popen(
        ["sh", "-c", command, "sh", sys.executable, PROGRAM, "unlock"],
        env=environment(MACHINE),
        stdin=its,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        if key:
            assert os.read(ours, 12) == b"Passphrase: "
            stat = Path(f"/proc/{child.pid}/stat")
            wait_for(lambda: ") S " in stat.read_text())  # it reads; before, ^C is lost
            os.write(ours, key)
        printed, complaints = child.communicate(timeout=60)
    os.close(ours)
    os.close(its)
    assert json.loads(printed)["message"].startswith("a passphrase is 1 to 512 bytes")
    assert (child.returncode, complaints) == (1, "")


def test_a_passphrase_typed_at_the_prompt_is_not_shown(tmp_path: Path) -> None:
    """It is taken as it is, spaces included."""
    given = f" {PASSPHRASE} "
    ours, its = os.openpty()
    with paramiko_server(tmp_path, Disks({"d": given})) as initrd:
        with subprocess.Popen(
            ["sh", "-c", PROMPT, "sh", *MODULE, "unlock"],
            cwd=CHECKOUT,
            env=environment(initrd.settings()),
            stdin=its,
            stdout=its,
            stderr=its,
        ) as child:
            assert os.read(ours, 12) == b"Passphrase: "
            os.write(ours, f"{given}\n".encode())
            assert child.wait(60) == 0
        assert initrd.received() == [given.encode()]
    shown = os.read(ours, 4096)
    os.close(ours)
    os.close(its)
    assert shown.startswith(b'\r\n{"sent": true}\r\n')
    assert b"horse" not in shown
