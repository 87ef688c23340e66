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
from typing import Any

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
    running,
    wait_for,
    wait_for_child,
)
from cryptroot_unlock import Disks
from homelab import Homelab, new_key, public_line
from ssh_servers import Initrd, free_port, paramiko_server

import waker

ONE = {"d": PASSPHRASE}
NOT_SENT = "The passphrase was not sent."
NOT_CONFIRMED = "Not confirmed: the passphrase was sent, but "
ENDED = "the unlocking process ended with status -9; see waker's log"


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
        source = Path(PROGRAM).with_name("ui.html").read_text()
        page.write_text(source.partition("<script")[0])


def test_version_and_help_need_no_configuration() -> None:
    assert run_waker("--version").stdout == f"waker {waker.__version__}\n"
    text = run_waker("--help").stdout
    for name, _, _, form in waker.SETTINGS:
        assert name in text
        assert form.partition(";")[0] in text, name


@pytest.mark.parametrize(
    "argument",
    ["shutdown", "--seconds=5", "--seconds=10000"],
    ids=["unknown command", "too few seconds", "too many seconds"],
)
def test_a_wrong_argument_is_refused(argument: str) -> None:
    assert run_waker(argument).returncode == 2


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


def test_without_paramiko_it_wakes_and_watches(lab: Homelab, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    with daemon(lab.settings(), program=(python, PROGRAM)) as started:
        client = started.client.log_in()
        assert client.status()["state"] == "off"
        assert client.call("POST", "/api/wol").status == 200
        answers = [client.start(), client.unlock()]
    assert [(answer.status, answer.error) for answer in answers] == [
        (500, f"Failed to start: {waker.NO_PARAMIKO}. {NOT_SENT}"),
        (500, f"Failed to unlock: {waker.NO_PARAMIKO}. {NOT_SENT}"),
    ]


def test_an_unlock_finds_paramiko_where_the_daemon_finds_it(tmp_path: Path) -> None:
    """`waker check` in the same environment says that all is well."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    modules = Path(paramiko.__file__).parent.parent
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        settings = initrd.machine().settings() | MAC | {"PYTHONPATH": str(modules)}
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


def test_the_log_names_the_client_and_never_a_trusted_proxy() -> None:
    """Or a ban by those addresses would shut out everybody behind the proxy."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no ::1: {error.strerror}")
    settings = {"WAKER_LISTEN": "[::]:0", "WAKER_TRUSTED_PROXY": "::1"}
    with daemon(MACHINE | settings) as started:
        client = started.client  # over IPv4
        client.log_in().status()
        client.raw(b"GET /\xe4\x1b[31m HTTP/1.1\r\n\r\n")
        client.raw(b"GET /a%1b'b HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(10):
            client.attempt("wrong!")
        client.host = "::1"
        client.raw(b"nonsense\r\n\r\n")
        client.attempt("wrong!")
        client.attempt("wrong!", {"X-Forwarded-For": "192.0.2.1"})
        started.stop()
    assert "refused POST /api/auth: 429 Too many attempts; " in started.log.pop(-5)
    line = "The request line must be METHOD TARGET HTTP/1.1"
    assert started.log[1:] == [
        "ip=127.0.0.1 PIN accepted",
        f"ip=127.0.0.1 refused a request: 400 {line}",
        "ip=127.0.0.1 refused GET /a%1b'b: 404 No such path",
        *["ip=127.0.0.1 refused POST /api/auth: 401 Wrong PIN"] * 9,
        f"refused a request: 400 {line}",
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
            assert Path(f"/proc/{process.pid}/fd/2").readlink() == Path("/dev/null")
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_an_idle_daemon_does_not_wake_up() -> None:
    with daemon(MACHINE) as started:
        idle = started.uses()
        started.client.log_in().status()
        wait_for(lambda: started.uses() == idle)  # its threads have ended
        tasks = Path(f"/proc/{started.process.pid}/task")

        def count_switches() -> int:
            shown = "".join(path.read_text() for path in tasks.glob("*/status"))
            return sum(map(int, re.findall(r"ctxt_switches:\t(\d+)", shown)))

        def sleeps() -> bool:
            before = count_switches()
            time.sleep(1.2)  # more than any usual interval
            return count_switches() == before

        wait_for(sleeps, seconds=20)


# ---- The child that unlocks ----------------------------------------------------------


def test_a_box_that_stalls_loses_no_passphrase(
    config: waker.Config, tmp_path: Path
) -> None:
    """A thread of a busy one may pause for 150 ms whenever it has waited for a file."""
    program = tmp_path / "child.py"
    program.write_text(
        "import json, sys\n"
        "given = sys.stdin.buffer.read().decode()\n"
        "print(json.dumps({'outcome': 'unlocked', 'sent': True, 'message': given}))\n"
    )

    def stall(frame: object, event: str, function: Any) -> None:
        if event == "c_return" and function.__name__ in {"poll", "select"}:
            time.sleep(0.15)

    config = config._replace(unlock_seconds=10)
    unlocker = waker.Unlocker(config, program, os.environ)
    sys.setprofile(stall)
    try:
        events = threading.Event(), threading.Event()
        result = unlocker.run(waker.Passphrase(PASSPHRASE), *events)
    finally:
        sys.setprofile(None)
    assert result == waker.Result("unlocked", sent=True, message=PASSPHRASE)


@pytest.mark.parametrize(
    ("printed", "outcome"),
    [
        ("", "error"),
        ("hello", "error"),
        ('{"sent": true}', "not_confirmed"),
        ('{"sent": true}\nhello', "not_confirmed"),
        ('{"sent": true}\n{"outcome": "unlocked"}', "not_confirmed"),
    ],
    ids=["nothing", "word", "only sent", "sent and word", "incomplete"],
)
def test_only_a_complete_result_is_believed(
    config: waker.Config,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    printed: str,
    outcome: str,
) -> None:
    program = tmp_path / "child.py"
    program.write_text(f"import sys\nprint({printed!r})\nsys.exit('why')\n")
    unlocker = waker.Unlocker(config, program, os.environ)
    events = threading.Event(), threading.Event()
    result = unlocker.run(waker.Passphrase(PASSPHRASE), *events)
    assert (result.outcome, result.sent) == (outcome, "sent" in printed)
    assert "ended with status 1; see waker's log" in result.message
    assert "why\n" in capfd.readouterr().err  # the log


def test_the_child_gets_all_settings_of_the_machine(tmp_path: Path) -> None:
    """Without its own port 2222, the system would have the initrd's, and be refused."""
    key = tmp_path / "key"
    new_key().write_private_key_file(str(key))
    lines = ",".join(public_line(new_key()) for _ in range(2))
    machine = waker.Machine(
        host="192.0.2.1",
        initrd_port=22,
        system_port=2222,
        user="admin",
        key=key,
        host_keys=waker.HostKey.parse_all(lines),
    )
    values = waker.parse_settings(len(machine), machine.settings(), Path())
    assert waker.Machine(*values) == machine


def test_a_child_that_ends_without_reading_is_believed(
    config: waker.Config, tmp_path: Path
) -> None:
    """The passphrase breaks its pipe, and its output still says why it ended."""
    closed = tmp_path / "closed"
    program = tmp_path / "child.py"
    program.write_text(
        "import json, os, pathlib\n"
        "os.close(0)\n"
        f"pathlib.Path({str(closed)!r}).touch()\n"
        "print(json.dumps({'outcome': 'error', 'sent': False, 'message': 'why'}))\n"
    )

    class Waits(threading.Event):
        def is_set(self) -> bool:
            wait_for(closed.exists)
            return super().is_set()

    unlocker = waker.Unlocker(config, program, os.environ)
    result = unlocker.run(waker.Passphrase(PASSPHRASE), Waits(), threading.Event())
    assert result == waker.Result("error", sent=False, message="why")


def test_a_child_that_reports_before_it_is_killed_is_believed(
    config: waker.Config, tmp_path: Path
) -> None:
    """The cancel and the report that the passphrase was sent may cross."""
    program = tmp_path / "child.py"
    program.write_text(
        "import pathlib, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "sys.stdin.read()\n"
        "(folder / 'given').touch()\n"
        "while not (folder / 'cancelled').exists():\n"
        "    time.sleep(0.01)\n"
        "print('{\"sent\": true}', flush=True)\n"
        "(folder / 'reported').touch()\n"
        "time.sleep(60)\n"
    )

    class Crosses(threading.Event):
        def is_set(self) -> bool:
            if super().is_set():
                (tmp_path / "cancelled").touch()
                wait_for((tmp_path / "reported").exists)
            return super().is_set()

    cancelled, sent = Crosses(), threading.Event()
    unlocker = waker.Unlocker(config, program, os.environ)
    with ThreadPoolExecutor() as pool:
        given = waker.Passphrase(PASSPHRASE)
        unlocking = pool.submit(unlocker.run, given, cancelled, sent)
        wait_for((tmp_path / "given").exists)
        cancelled.set()
        message = f"{NOT_CONFIRMED}{ENDED}."
        assert unlocking.result() == waker.Result("not_confirmed", True, message)


def test_a_cancelled_unlock_is_given_no_passphrase(
    config: waker.Config, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    program = tmp_path / "child.py"
    program.write_text(
        "import pathlib, sys\n"
        "given = sys.stdin.read()\n"
        f"pathlib.Path({str(given)!r}).write_text(given)\n"
    )
    cancelled = threading.Event()
    cancelled.set()
    unlocker = waker.Unlocker(config, program, os.environ)
    unlocker.run(waker.Passphrase(PASSPHRASE), cancelled, threading.Event())
    assert not given.exists() or given.read_text() == ""  # it may have been killed


def test_sigterm_lets_a_running_unlock_finish(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE, slow=2)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            client, pool = started.client.log_in(), ThreadPoolExecutor()
            answer = pool.submit(client.unlock)
            child = wait_for_child(started.process.pid)
            wait_for(initrd.received)
            with socket.create_connection((client.host, client.port), 6) as waiting:
                waiting.sendall(b"GET / HTTP/1.1\r\n")
                for _ in range(5):  # time passes
                    assert client.call("GET", "/").status == 200
                os.kill(child, signal.SIGTERM)  # systemd may signal the whole group
                started.process.terminate()
                assert waiting.recv(1) == b""  # although a request has ten seconds
            assert started.process.wait(60) == 0
    assert answer.result().json["message"] == "Unlocked: d."
    assert not Path(f"/proc/{child}").exists()


def test_sigterm_lets_an_unlock_finish_whose_client_has_gone(tmp_path: Path) -> None:
    """A phone that loses its network while it waits resets the connection."""
    body = json.dumps({"passphrase": PASSPHRASE}).encode()
    with paramiko_server(tmp_path, Disks(ONE, slow=2)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            client = started.client.log_in()
            head = "POST /api/unlock HTTP/1.1\r\nHost: x\r\n"
            head += f"Authorization: Bearer {client.token}\r\n"
            head += "Content-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\n\r\n"
            with socket.create_connection((client.host, client.port)) as tcp:
                tcp.sendall(head.encode() + body)
                wait_for(initrd.received)
                linger = struct.pack("ii", 1, 0)  # so that closing it resets it
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            assert started.stop() == 0
    assert started.log[-2:] == ["stopping", "ip=127.0.0.1 Unlocked: d."]


def test_a_second_signal_ends_the_daemon_at_once(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE, slow=30)) as initrd:
        settings = initrd.machine().settings() | MAC | {"WAKER_PIN": PIN}
        with subprocess.Popen(
            ["env", "--default-signal=INT", *MODULE],
            cwd=CHECKOUT,
            env=environment(settings | {"WAKER_LISTEN": "127.0.0.1:0"}),
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr
            client = Client(int(process.stderr.readline().split()[-1]))
            client.log_in().start()
            wait_for(initrd.received)
            process.terminate()
            wait_for(
                lambda: process.stderr and process.stderr.readline() == "stopping\n"
            )
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == -signal.SIGINT  # the unlock goes on for 30 s


def test_an_unlocking_process_that_cannot_start_has_sent_nothing(
    config: waker.Config,
) -> None:
    unlocker = new_app(config).unlocker
    _, hard = limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        events = threading.Event(), threading.Event()
        result = unlocker.run(waker.Passphrase(PASSPHRASE), *events)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    reason = "the unlocking process cannot start: Too many open files"
    assert result == waker.Result("error", sent=False, message=f"{reason}. {NOT_SENT}")


def is_connected(pid: int) -> bool:
    """Tell whether a process has a socket."""
    with contextlib.suppress(FileNotFoundError):  # it has just closed one
        files = Path(f"/proc/{pid}/fd").iterdir()
        return any("socket:" in str(path.readlink()) for path in files)
    return False


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGHUP], ids=["interrupt", "hang-up"]
)
def test_a_running_unlock_survives_its_terminal(tmp_path: Path, number: int) -> None:
    """^C and a hang-up reach every process of the daemon's group."""
    terminal = "setsid", "env", f"--default-signal={number}"
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        with daemon(initrd.machine().settings() | MAC, *terminal) as started:
            client = started.client.log_in()
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(client.unlock)
                child = wait_for_child(started.process.pid)
                wait_for(lambda: is_connected(child))  # it has read the passphrase
                os.killpg(started.process.pid, number)
                wait_for(initrd.received)
            if number == signal.SIGINT:
                assert answer.result().json["message"] == "Unlocked: d."
                assert started.process.wait(60) == 0
            else:
                assert started.process.wait(60) == -number


@pytest.mark.parametrize(
    ("disks", "seconds", "message"),
    [
        (Disks(ONE, mute=True), 6, f"Failed to unlock: {ENDED}. {NOT_SENT}"),
        (Disks(ONE, slow=9), 90, f"{NOT_CONFIRMED}{ENDED}; watch GET /api/status"),
    ],
    ids=["hangs", "dies"],
)
def test_a_child_that_hangs_or_dies_is_not_believed(
    tmp_path: Path, disks: Disks, seconds: int, message: str
) -> None:
    """By itself it would stop in time."""
    with paramiko_server(tmp_path, disks) as initrd:
        settings = {"WAKER_PIN": PIN} | MAC | initrd.machine().settings()
        config = waker.read_config(settings, tmp_path)._replace(unlock_seconds=seconds)
        with running(config) as client, ThreadPoolExecutor() as pool:
            answer = pool.submit(client.log_in().unlock)
            child = wait_for_child(os.getpid())
            if disks.slow:
                wait_for(initrd.received)
            os.kill(child, signal.SIGKILL if disks.slow else signal.SIGSTOP)
            assert answer.result().error == message
    assert answer.result().status == 500


def test_an_unlock_leaves_nothing_and_shows_no_secret(tmp_path: Path) -> None:
    """Other processes and the log do not see it, and no memory keeps it."""
    secret = "the-secret-passphrase"
    with paramiko_server(tmp_path, Disks({"d": secret}, slow=1)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            idle, client = started.uses(), started.client
            shown: dict[int, str] = {}
            client.attempt("a-wrong-pin")
            with ThreadPoolExecutor() as pool:
                unlocking = pool.submit(client.log_in().unlock, secret)
                child, parent = wait_for_child(started.process.pid), started.process.pid
                wait_for(initrd.received)
                for pid in (child, parent):
                    proc = Path(f"/proc/{pid}")
                    shown[pid] = (proc / "cmdline").read_text()
                    shown[pid] += (proc / "environ").read_text()
                    limits = (proc / "limits").read_text()
                    assert re.search(r"core file size +1 +1 ", limits)  # see main()
            answers = [unlocking.result(), client.unlock(secret + "\n")]
            path = f"/api/unlock?{secret}"
            answers += [client.call("POST", path, b"not JSON " + secret.encode())]
            wait_for(lambda: started.uses() == idle)
            assert not (proc / f"task/{parent}/children").read_text()
            assert not re.search("cryptography|nacl", (proc / "maps").read_text())
            started.stop()
    assert [answer.status for answer in answers] == [200, 400, 400]
    said = b"".join(answer.body for answer in answers).decode()
    log = "\n".join(started.log)
    for hidden in (secret, client.token):
        assert hidden not in shown[child] + shown[parent] + log + said
    for pin in (PIN, "a-wrong-pin"):
        assert pin not in shown[child] + log
    assert PIN in shown[parent]  # the environment that the user put it into


@pytest.mark.parametrize(
    "kind", ["pin", "passphrase", "config", "request", "response", "gate", "app"]
)
def test_a_value_does_not_show_its_secret_when_it_is_printed(kind: str) -> None:
    config = waker.read_config(MACHINE | {"WAKER_PIN": PIN}, Path())
    app = new_app(config)
    token = app.gate.issue_token(0)
    body = json.dumps({"passphrase": PASSPHRASE}).encode()
    values = {
        "pin": config.pin,
        "passphrase": waker.Passphrase(PASSPHRASE),
        "config": config,
        "request": waker.Request("POST", "/x", "192.0.2.1", 0, token=token, body=body),
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
    machine = Initrd(tmp_path, Disks({}), public_line(new_key())).machine()
    settings = machine.settings() | {"PYTHONPATH": str(tmp_path)}
    ended = run_waker("unlock", settings=settings, given=PASSPHRASE)
    assert ended.stderr == "bug: ValueError, paramiko.py:1\n"
    assert (ended.returncode, ended.stdout) == (70, "")


# ---- `waker unlock` by hand ----------------------------------------------------------


def test_unlock_by_hand_takes_utf8_in_any_locale(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        settings = initrd.machine().settings() | {"WAKER_SSH_KEY": ""}
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
            env=environment(initrd.machine().settings()),
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
        assert (stderr.read(), child.wait(60)) == (b"", 0)
        assert initrd.received() == [given]


def test_unlock_by_hand_does_not_wait_forever() -> None:
    """The shortest limit of the command would be 6 s."""
    script = "import waker; print(waker.unlock_once(None, 1).message)"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout
        printed = child.stdout.read()
    assert printed == f"no passphrase was entered within 1 s. {NOT_SENT}\n"


# Under nohup, ^C would be ignored.
PROMPT = 'exec setsid --ctty env --default-signal=INT "$@"'
FORM = "a passphrase is 1 to 512 bytes of UTF-8 without control characters"
NOTHING = "no passphrase was entered"


@pytest.mark.parametrize(
    ("command", "key", "message"),
    [
        ('"$@" <&-', b"", FORM),
        ("printf 'two\\n\\n' | \"$@\"", b"", FORM),
        ("printf '\\377' | \"$@\"", b"", FORM),
        (PROMPT, b"\x03", NOTHING),
        (PROMPT, b"\x04", NOTHING),
    ],
    ids=["closed", "two line ends", "no UTF-8", "^C at the prompt", "^D at the prompt"],
)
def test_unlock_by_hand_says_what_is_wrong(
    command: str, key: bytes, message: str
) -> None:
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
    assert json.loads(printed)["message"].startswith(message)
    assert (child.returncode, complaints) == (1, "")


def test_a_passphrase_typed_at_the_prompt_is_not_shown(tmp_path: Path) -> None:
    """It is taken as it is, spaces included."""
    given = f" {PASSPHRASE} "
    ours, its = os.openpty()
    with paramiko_server(tmp_path, Disks({"d": given})) as initrd:
        with subprocess.Popen(
            ["sh", "-c", PROMPT, "sh", *MODULE, "unlock"],
            cwd=CHECKOUT,
            env=environment(initrd.machine().settings()),
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
