"""The program as its users run it: its commands, its log, its child, its secrets."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import (
    CHECKOUT,
    MAC,
    MACHINE,
    MODULE,
    PASSPHRASE,
    PIN,
    daemon,
    environment,
    need,
    new_app,
    run_waker,
    running,
    wait_for,
    wait_for_child,
)
from cryptroot_unlock import Disks
from homelab import Homelab
from ssh_servers import paramiko_server

import waker

ONE = {"d": PASSPHRASE}
NO_PASSPHRASE = "a passphrase is 1 to 512 bytes of UTF-8, no control characters"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_stops_on_a_signal(end: signal.Signals) -> None:
    with daemon(MACHINE) as started:
        line = rf"waker {re.escape(waker.__version__)} listens on port \d+\n"
        assert re.fullmatch(line, started.log[0])
        started.process.send_signal(end)
        assert started.process.wait(10) == 0
        started.stop()
    assert started.log[1:] == ["stopping"]


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_every_address_is_listened_on_for_both_families(loopback: str) -> None:
    family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
    try:
        socket.create_server((loopback, 0), family=family).close()
    except OSError as error:
        pytest.skip(f"this machine has no {loopback}: {error.strerror}")
    with daemon(MACHINE | {"WAKER_LISTEN": "[::]:0"}) as started:
        started.client.host = loopback
        started.client.log_in()
        started.stop()
    assert f"ip={loopback} PIN accepted" in started.log


def test_a_port_in_use_is_told_with_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = "127.0.0.1:{1}".format(*taken.getsockname())
        ended = run_waker(settings=MACHINE | {"WAKER_PIN": PIN, "WAKER_LISTEN": where})
    assert ended.returncode == 1
    assert ended.stderr.startswith("WAKER_LISTEN: Address already in use")


def test_a_page_that_is_missing_is_told_with_its_path(tmp_path: Path) -> None:
    alone = tmp_path / "waker.py"
    alone.write_bytes(Path(waker.__file__).read_bytes())
    settings = environment(MACHINE | {"WAKER_PIN": PIN})
    command = [sys.executable, str(alone)]
    ended = subprocess.run(command, env=settings, capture_output=True, check=False)
    told = f"the page {tmp_path}/ui.html: No such file or directory\n"
    assert (ended.returncode, ended.stderr.decode()) == (78, told)
    (tmp_path / "ui.html").write_text("<title>another page</title>")
    ended = subprocess.run(command, env=settings, capture_output=True, check=False)
    assert ended.stderr == b"ui.html is damaged; reinstall it\n"


def test_version_and_help_need_no_configuration() -> None:
    version = run_waker("--version")
    assert (version.returncode, version.stdout) == (0, f"waker {waker.__version__}\n")
    told = run_waker("--help").stdout
    for name, _, _, right in waker.SETTINGS:
        assert name in told
        assert right.partition(";")[0] in told
    assert run_waker("shutdown").returncode == 2


def test_without_paramiko_it_wakes_and_watches(lab: Homelab, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    without = subprocess.run([python, "-c", "import paramiko"], check=False, stderr=-3)
    assert without.returncode == 1
    with daemon(lab.settings(), program=(python, *MODULE[1:])) as started:
        client = started.client.log_in()
        assert client.status()["state"] == "off"
        assert client.call("POST", "/api/wol").status == 200
        answer = client.start()
        assert answer.status == 500
        assert answer.error == f"Failed to start: {waker.NO_PARAMIKO}"
        answer = client.unlock()
    assert answer.status == 500
    told = f"Failed to unlock: {waker.NO_PARAMIKO}. The passphrase was not sent."
    assert answer.error == told


def test_a_state_is_printed_without_a_pin() -> None:
    host = {"WAKER_HOMELAB_HOST": "127.0.0.1"}
    ended = run_waker("state", settings=host | {"WAKER_SYSTEM_SSH_PORT": "1"})
    assert ended.returncode == 0
    assert json.loads(ended.stdout) == {
        "state": "booting",
        "reachable": True,
        "initrd_ssh_open": False,
        "system_ssh_open": False,
    }
    ended = run_waker("state", settings=host | {"WAKER_INITRD": "x"})
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr == "WAKER_INITRD must be cryptroot (dropbear) or systemd\n"


# ---- The log -------------------------------------------------------------------------


def test_the_log_has_a_line_for_every_event_that_matters() -> None:
    with daemon(MACHINE) as started:
        client = started.client
        client.attempt("wrong!")
        client.log_in().status()
        client.raw(b"GET /\xe4\x1b[31m HTTP/1.1\r\n\r\n")
        client.raw(b"GET /a%1b'b HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(9):
            client.attempt("wrong!")
        started.stop()
    wrong = "ip=127.0.0.1 refused POST /api/auth: 401 Wrong PIN"
    line = "The request line must be METHOD TARGET HTTP/1.1"
    assert started.log[1:-2] == [
        wrong,
        "ip=127.0.0.1 PIN accepted",
        f"ip=127.0.0.1 refused a request: 400 {line}",
        "ip=127.0.0.1 refused GET /a%1b'b: 404 No such path",
        *[wrong] * 8,
    ]
    limited = "ip=127.0.0.1 refused POST /api/auth: 429 Too many attempts; "
    assert started.log[-2].startswith(limited)


def test_the_log_never_names_a_trusted_proxy() -> None:
    """Or who bans the addresses in it would ban everybody behind the proxy."""
    with daemon(MACHINE | {"WAKER_TRUSTED_PROXY": "127.0.0.1"}) as started:
        started.client.raw(b"nonsense\r\n\r\n")
        started.client.attempt("wrong-pin")
        started.client.attempt("wrong-pin", {"X-Forwarded-For": "192.0.2.1"})
        started.stop()
    assert started.log[1:] == [
        "refused a request: 400 The request line must be METHOD TARGET HTTP/1.1",
        "refused POST /api/auth: 401 Wrong PIN",
        "ip=192.0.2.1 refused POST /api/auth: 401 Wrong PIN",
        "stopping",
    ]


# ---- The child that unlocks ----------------------------------------------------------


def test_sigterm_lets_a_running_unlock_finish(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE, slow=2)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            client, pool = started.client.log_in(), ThreadPoolExecutor()
            answer = pool.submit(client.unlock)
            child = wait_for_child(started.process.pid)
            wait_for(initrd.received)
            with socket.create_connection((client.host, client.port), 20) as waiting:
                waiting.sendall(b"GET / HTTP/1.1\r\n")
                assert client.call("GET", "/").status == 200  # time passes
                os.kill(child, signal.SIGTERM)  # systemd may tell the whole group
                started.process.terminate()
                assert waiting.recv(1) == b""  # nothing new is begun
            assert started.process.wait(60) == 0
    unlocked = {"success": True, "message": "Unlocked: d."}
    assert answer.result().json == unlocked
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("disks", "told"),
    [
        (Disks(ONE, mute=True), "{}. The passphrase was not sent."),
        (Disks(ONE, slow=9), "not confirmed: {}. The passphrase was sent."),
    ],
)
def test_a_child_that_hangs_or_dies_is_not_believed(
    config: waker.Config, tmp_path: Path, disks: Disks, told: str
) -> None:
    """It stops by itself before its time is over; here it is made unable to."""
    (tmp_path / "initrd").mkdir()
    with paramiko_server(tmp_path / "initrd", disks) as initrd:
        seconds = 90 if disks.slow else 6
        slow = config._replace(machine=initrd.machine(), unlock_seconds=seconds)
        with running(slow) as client, ThreadPoolExecutor() as pool:
            answer = pool.submit(client.log_in().unlock)
            child = wait_for_child(os.getpid())
            if disks.slow:
                wait_for(initrd.received)
            os.kill(child, signal.SIGKILL if disks.slow else signal.SIGSTOP)
            try:
                wait_for(lambda: not Path(f"/proc/{child}").exists())
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
    told = told.format("the unlocking process ended with status -9")
    assert answer.result().status == 500
    assert answer.result().error == f"Failed to unlock: {told}"


def test_an_unlock_leaves_nothing_in_the_daemon(tmp_path: Path) -> None:
    """No process, no thread, no descriptor, and none of paramiko's libraries."""
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            idle, proc = started.uses(), Path(f"/proc/{started.process.pid}")
            client = started.client.log_in()
            assert [client.unlock(p).status for p in ("x", PASSPHRASE)] == [400, 200]
            wait_for(lambda: started.uses() == idle)
            assert not (proc / f"task/{proc.name}/children").read_text()
            assert not re.search("cryptography|nacl", (proc / "maps").read_text())


def everything_told(pid: int) -> str:
    """Read what other processes may read of one: its arguments, its environment."""
    proc = Path(f"/proc/{pid}")
    return (proc / "cmdline").read_text() + (proc / "environ").read_text()


def test_no_secret_is_where_others_could_read_it(tmp_path: Path) -> None:
    secret = "the-secret-passphrase"
    with paramiko_server(tmp_path, Disks({"d": secret}, slow=1)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            client, pool = started.client, ThreadPoolExecutor()
            client.attempt("a-wrong-pin")
            unlocking = pool.submit(client.log_in().unlock, secret)
            pids = wait_for_child(started.process.pid), started.process.pid
            wait_for(initrd.received)
            of_child, of_daemon = map(everything_told, pids)
            for pid in pids:  # nor in a core dump
                limits = Path(f"/proc/{pid}/limits").read_text()
                assert re.search(r"core file size +1 +1 ", limits)  # not 0: see main()
            answers = [unlocking.result(), client.unlock(secret + "\n")]
            path = f"/api/unlock?{secret}"
            answers += [client.call("POST", path, b"not JSON " + secret.encode())]
            started.stop()
    assert [answer.status for answer in answers] == [200, 400, 400]
    told = b"".join(answer.body for answer in answers).decode()
    log = "\n".join(started.log)
    for one in (secret, client.token):
        assert one not in of_child + of_daemon + log + told
    for pin in (PIN, "a-wrong-pin"):
        assert pin not in of_child + log
    assert PIN in of_daemon  # the environment that the user put it into


def test_no_secret_is_in_a_repr(config: waker.Config) -> None:
    app = new_app(config)
    token = app.gate.issue(0)
    body = PASSPHRASE.encode()
    request = waker.Request("POST", "/x", "192.0.2.1", 0, token=token, body=body)
    answer = waker.Response({"token": token})
    told = repr((app, app.gate, config, waker.Passphrase(PASSPHRASE), request, answer))
    digest = waker.sha256(PIN.encode())
    for secret in (token, PASSPHRASE, repr(body), PIN, digest.hex(), repr(digest)):
        assert secret not in told


# ---- `waker unlock` by hand ----------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["", "\n", "a" * 513, "two\n\n", "two\nlines", "tab\t"]
)
def test_unlock_refuses_what_is_no_passphrase(lab: Homelab, given: str) -> None:
    ended = run_waker("unlock", settings=lab.settings(), given=given)
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["message"].startswith(NO_PASSPHRASE)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_unlock_takes_utf8_in_any_locale(tmp_path: Path, encoding: str) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        settings = initrd.machine().settings() | {"PYTHONIOENCODING": encoding}
        ended = run_waker("unlock", settings=settings, given=f"{PASSPHRASE}\n")
        assert initrd.received() == [PASSPHRASE.encode()]
    assert ended.returncode == 0


def test_unlock_by_hand_reads_the_env_file_and_tells_its_faults(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        settings = initrd.machine().settings() | {"WAKER_PIN": PIN, "WAKER_SSH_KEY": ""}
        file = tmp_path / "waker.env"
        file.write_text("".join(f"{n}={v}\n" for n, v in settings.items()))
        ended = run_waker("--env-file", str(file), "unlock", given=PASSPHRASE)
    assert json.loads(ended.stdout.splitlines()[-1])["outcome"] == "unlocked"
    ended = run_waker("unlock", settings={"WAKER_INITRD_SSH_PORT": "x"}, given="p")
    assert (ended.returncode, ended.stdout) == (78, "")
    first, second = ended.stderr.splitlines()
    assert first.startswith("WAKER_HOMELAB_HOST is not set; it must be")
    assert second.startswith("WAKER_INITRD_SSH_PORT must be")


@pytest.mark.parametrize("key", [b"\x03", b"\x04", b"\n"], ids=["^C", "^D", "Enter"])
def test_unlock_by_hand_can_be_given_up_at_the_prompt(lab: Homelab, key: bytes) -> None:
    ours, its = os.openpty()
    with subprocess.Popen(
        # Under nohup, ^C would be ignored.
        [need("setsid"), "--ctty", "env", "--default-signal=INT", *MODULE, "unlock"],
        cwd=CHECKOUT,
        env=environment(lab.settings()),
        stdin=its,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert os.read(ours, 12) == b"Passphrase: "
        stat = Path(f"/proc/{child.pid}/stat")
        wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")  # reads
        os.write(ours, key)
        printed, complaints = child.communicate(timeout=60)
    os.close(ours)
    os.close(its)
    assert json.loads(printed)["message"].startswith(NO_PASSPHRASE)
    assert (child.returncode, complaints) == (1, "")


@pytest.mark.parametrize("redirection", ["<&-", "</dev/null"])
def test_unlock_by_hand_without_any_input_says_what_it_takes(
    lab: Homelab, redirection: str
) -> None:
    ended = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {redirection}', *MODULE, "unlock"],
        cwd=CHECKOUT,
        env=environment(lab.settings()),
        capture_output=True,
        text=True,
        check=False,
    )
    message = json.loads(ended.stdout)["message"]
    assert message.startswith("a passphrase is 1 to 512 bytes of UTF-8")
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize("seconds", ["5", "x", "99999"])
def test_unlock_by_hand_needs_a_sensible_time(seconds: str) -> None:
    assert run_waker("unlock", f"--seconds={seconds}").returncode == 2
