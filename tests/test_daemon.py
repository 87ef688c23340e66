"""The program as its users run it: start, stop, log, and the unlocking child."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from conftest import (
    CHECKOUT,
    MODULE,
    PASSPHRASE,
    PIN,
    Client,
    daemon,
    environment,
    need,
    run_waker,
    running,
)
from cryptroot_unlock import Disks
from homelab import Homelab
from ssh_servers import paramiko_server

import waker

T = TypeVar("T")

MAC = {"WAKER_HOMELAB_MAC": "52:54:00:12:34:56"}


def children(pid: int) -> list[int]:
    """List the child processes of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def wait_for(condition: Callable[[], T]) -> T:
    """Wait until there is something; returns it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)  # or this would take the processor from what it waits for
    raise TimeoutError


def wait_for_child(pid: int) -> int:
    """Wait until a process has a child that unlocks; returns its pid.

    Until it has begun to, the child is a copy of its parent, which waits for it:
    whoever stops it then, stops both.
    """

    def unlocking() -> list[int]:
        return [
            child
            for child in children(pid)
            if b"\0unlock\0" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]

    return wait_for(unlocking)[0]


def unlock_in_background(client: Client) -> tuple[threading.Thread, list[object]]:
    """Begin an unlock; its answer will be in the list when the thread ends."""
    answers: list[object] = []

    def call() -> None:
        answer = client.call("POST", "/api/unlock", {"passphrase": PASSPHRASE})
        answers.append((answer.status, answer.json))

    thread = threading.Thread(target=call)
    thread.start()
    return thread, answers


def test_it_says_where_it_listens_and_stops_on_sigterm(lab: Homelab) -> None:
    with daemon(lab.settings()) as started:
        assert re.fullmatch(
            rf"waker {re.escape(waker.__version__)} listens on port \d+\n",
            started.log[0],
        )
        assert started.stop() == 0
    assert started.log[1:] == ["stopping"]


def test_sigint_stops_it_as_well(lab: Homelab) -> None:
    with daemon(lab.settings()) as started:
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(10) == 0


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_every_address_is_listened_on_for_both_families(
    lab: Homelab, family: socket.AddressFamily
) -> None:
    loopback = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}[family]
    try:
        socket.create_server((loopback, 0), family=family).close()
    except OSError as error:
        pytest.skip(f"this machine has no {loopback}: {error.strerror}")
    with daemon(lab.settings() | {"WAKER_LISTEN": "[::]:0"}) as started:
        started.client.host = loopback
        started.client.log_in()
        assert started.stop() == 0
    assert f"ip={loopback} PIN accepted" in started.log


def test_a_port_in_use_is_told_with_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {
            "WAKER_PIN": PIN,
            "WAKER_HOMELAB_HOST": "127.0.0.1",
            "WAKER_LISTEN": f"127.0.0.1:{port}",
        } | MAC
        ended = run_waker(settings=settings)
    assert ended.returncode == 1
    assert ended.stderr == (
        "WAKER_LISTEN: Address already in use (while attempting to bind on address"
        f" ('127.0.0.1', {port}))\n"
    )


def test_a_page_that_is_missing_is_told_with_its_path(
    lab: Homelab, tmp_path: Path
) -> None:
    alone = tmp_path / "waker.py"
    alone.write_bytes(Path(waker.__file__).read_bytes())
    settings = {"WAKER_PIN": PIN, **lab.settings()}
    command = [sys.executable, str(alone)]
    ended = subprocess.run(
        command, env=settings, capture_output=True, text=True, check=False
    )
    page = tmp_path / "ui.html"
    assert ended.returncode == 78
    assert ended.stderr == f"the page {page}: No such file or directory\n"
    page.write_text("<title>another page</title>")
    ended = subprocess.run(
        command, env=settings, capture_output=True, text=True, check=False
    )
    assert ended.stderr == "ui.html is damaged; reinstall it\n"


def test_version_and_help_need_no_configuration() -> None:
    version = run_waker("--version")
    assert (version.returncode, version.stdout) == (0, f"waker {waker.__version__}\n")
    told = run_waker("--help").stdout
    for name, _, _, right in waker.SETTINGS:
        assert name in told
        assert right.partition(";")[0] in told


def test_an_unknown_command_is_refused() -> None:
    assert run_waker("shutdown").returncode == 2


def test_sigterm_lets_a_running_unlock_finish(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"d": PASSPHRASE}, slow=2)) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            thread, answers = unlock_in_background(started.client.log_in())
            child = wait_for_child(started.process.pid)
            wait_for(initrd.received)
            address = (started.client.host, started.client.port)
            with socket.create_connection(address, 20) as waiting:
                waiting.sendall(b"GET / HTTP/1.1\r\n")
                assert started.client.call("GET", "/").status == 200  # time passes
                os.kill(child, signal.SIGTERM)  # systemd may tell the whole group
                started.process.terminate()
                assert waiting.recv(1) == b""  # nothing new is begun
                assert thread.is_alive()
            assert started.process.wait(60) == 0
            thread.join()
    assert answers == [(200, {"success": True, "message": "Unlocked: d."})]
    assert not Path(f"/proc/{child}").exists()


def test_an_unlock_without_end_is_killed_and_told(
    config: waker.Config, tmp_path: Path
) -> None:
    """The child stops by itself before its time is over; here it is made unable to."""
    folder = tmp_path / "initrd"
    folder.mkdir()
    disks = Disks({"d": PASSPHRASE}, mute=True)
    with paramiko_server(folder, disks) as initrd:
        slow = config._replace(machine=initrd.machine(), unlock_seconds=6)
        with running(slow) as client:
            thread, answers = unlock_in_background(client.log_in())
            child = wait_for_child(os.getpid())
            os.kill(child, signal.SIGSTOP)
            thread.join(30)
    text = "the unlocking process ended with status -9. The passphrase was not sent."
    assert answers == [(500, {"error": f"Failed to unlock: {text}"})]
    assert not Path(f"/proc/{child}").exists()


def test_a_child_that_dies_is_not_believed(
    config: waker.Config, tmp_path: Path
) -> None:
    folder = tmp_path / "initrd"
    folder.mkdir()
    with paramiko_server(folder, Disks({"d": PASSPHRASE}, slow=9)) as initrd:
        with running(config._replace(machine=initrd.machine())) as client:
            thread, answers = unlock_in_background(client.log_in())
            child = wait_for_child(os.getpid())
            wait_for(initrd.received)
            os.kill(child, signal.SIGKILL)
            thread.join()
    text = "not confirmed: the unlocking process ended with status -9. The passphrase"
    text += " was sent."
    assert answers == [(500, {"error": f"Failed to unlock: {text}"})]


def test_an_unlock_leaves_no_process_thread_or_descriptor(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"d": "p"})) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            idle = started.threads(), started.descriptors()
            client = started.client.log_in()
            for _ in range(3):
                client.call("POST", "/api/unlock", {"passphrase": "wrong"})
            wait_for(lambda: (started.threads(), started.descriptors()) == idle)
            assert children(started.process.pid) == []


def test_a_machine_without_paramiko_still_wakes_and_watches(
    lab: Homelab, tmp_path: Path
) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    without = subprocess.run([python, "-c", "import paramiko"], check=False, stderr=-3)
    assert without.returncode == 1
    with daemon(lab.settings(), program=(python, *MODULE[1:])) as started:
        client = started.client.log_in()
        assert client.call("GET", "/api/status").json["state"] == "off"
        assert client.call("POST", "/api/wol").status == 200
        answer = client.call("POST", "/api/start", {"passphrase": PASSPHRASE})
        assert answer.status == 500
        assert answer.error == f"Failed to start: {waker.NO_PARAMIKO}"
        answer = client.call("POST", "/api/unlock", {"passphrase": PASSPHRASE})
        assert started.stop() == 0
    assert answer.status == 500
    assert answer.error == (
        f"Failed to unlock: {waker.NO_PARAMIKO}. The passphrase was not sent."
    )


def test_the_daemon_never_imports_paramiko(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"d": PASSPHRASE})) as initrd:
        with daemon(initrd.machine().settings() | MAC) as started:
            client = started.client.log_in()
            body = {"passphrase": PASSPHRASE}
            assert client.call("POST", "/api/unlock", body).status == 200
            maps = Path(f"/proc/{started.process.pid}/maps").read_text()
    assert "cryptography" not in maps
    assert "nacl" not in maps


def test_the_log_has_a_line_for_every_event_that_matters(
    lab: Homelab,
) -> None:
    with daemon(lab.settings()) as started:
        client = started.client
        client.call("POST", "/api/auth", {"pin": "wrong!"})
        client.log_in()
        client.call("GET", "/api/status")
        client.raw(b"GET /\xe4\x1b[31m HTTP/1.1\r\n\r\n")
        client.raw(b"GET /a%1b'b HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(9):
            client.call("POST", "/api/auth", {"pin": "wrong!"})
        assert started.stop() == 0
    assert started.log[1:] == [
        "ip=127.0.0.1 refused POST /api/auth: 401 Wrong PIN",
        "ip=127.0.0.1 PIN accepted",
        "ip=127.0.0.1 refused a request: 400"
        " The request line must be METHOD TARGET HTTP/1.1",
        "ip=127.0.0.1 refused GET /a%1b'b: 404 No such path",
        *["ip=127.0.0.1 refused POST /api/auth: 401 Wrong PIN"] * 8,
        started.log[-2],
        "stopping",
    ]
    assert re.fullmatch(
        r"ip=127\.0\.0\.1 refused POST /api/auth: 429 Too many attempts; .*",
        started.log[-2],
    )


def test_the_log_never_names_a_trusted_proxy(lab: Homelab) -> None:
    """Or who bans the addresses in it would ban everybody behind the proxy."""
    with daemon(lab.settings() | {"WAKER_TRUSTED_PROXY": "127.0.0.1"}) as started:
        client = started.client
        client.raw(b"nonsense\r\n\r\n")
        for fields in ({}, {"X-Forwarded-For": "192.0.2.1"}):
            client.call("POST", "/api/auth", {"pin": "wrong-pin"}, fields)
        assert started.stop() == 0
    assert started.log[1:] == [
        "refused a request: 400 The request line must be METHOD TARGET HTTP/1.1",
        "refused POST /api/auth: 401 Wrong PIN",
        "ip=192.0.2.1 refused POST /api/auth: 401 Wrong PIN",
        "stopping",
    ]


@pytest.mark.parametrize(
    "given",
    ["", "\n", "a" * 513, "two\n\n", "two\nlines", "tab\t"],
    ids=["nothing", "empty", "long", "two ends", "two lines", "tab"],
)
def test_unlock_by_hand_refuses_an_impossible_passphrase(
    tmp_path: Path, given: str
) -> None:
    with paramiko_server(tmp_path, Disks({"d": "p"})) as initrd:
        ended = run_waker("unlock", settings=initrd.machine().settings(), given=given)
        assert initrd.received() == []
    assert ended.returncode == 1
    outcome = waker.Result(**json.loads(ended.stdout))
    assert outcome.message.startswith("a passphrase is 1 to 512 bytes of UTF-8")


def test_unlock_by_hand_tells_its_configuration_faults() -> None:
    ended = run_waker("unlock", settings={"WAKER_INITRD_SSH_PORT": "x"}, given="p")
    assert (ended.returncode, ended.stdout) == (78, "")
    first, second = ended.stderr.splitlines()
    assert first.startswith("WAKER_HOMELAB_HOST is not set; it must be")
    assert second.startswith("WAKER_INITRD_SSH_PORT must be")


def test_unlock_by_hand_takes_a_line(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"d": PASSPHRASE})) as initrd:
        settings, given = initrd.machine().settings(), f"{PASSPHRASE}\n"
        assert run_waker("unlock", settings=settings, given=given).returncode == 0
        assert initrd.received() == [PASSPHRASE.encode()]


@pytest.mark.parametrize("key", [b"\x03", b"\x04", b"\n"], ids=["^C", "^D", "Enter"])
def test_unlock_by_hand_can_be_given_up_at_the_prompt(
    tmp_path: Path, key: bytes
) -> None:
    ours, its = os.openpty()
    with paramiko_server(tmp_path, Disks({"d": "p"})) as initrd:
        with subprocess.Popen(
            [need("setsid"), "--ctty", *MODULE, "unlock"],
            cwd=CHECKOUT,
            env=environment(initrd.machine().settings()),
            stdin=its,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert os.read(ours, 12) == b"Passphrase: "
            os.write(ours, key)
            printed, complaints = child.communicate(timeout=60)
    os.close(ours)
    os.close(its)
    assert json.loads(printed)["message"].startswith("a passphrase is 1 to 512 bytes")
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


def test_the_state_is_printed_without_a_pin(lab: Homelab) -> None:
    ended = run_waker("state", settings={"WAKER_HOMELAB_HOST": lab.address})
    assert ended.returncode == 0
    assert json.loads(ended.stdout).keys() == {
        *("state", "reachable", "initrd_ssh_open", "system_ssh_open")
    }
    settings = lab.settings() | {"WAKER_SSH_HOST_KEY": ""}
    ended = run_waker("state", settings=settings)
    assert json.loads(ended.stdout)["state"] == "off"
    ended = run_waker("state", settings=settings | {"WAKER_INITRD": "x"})
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr == "WAKER_INITRD must be cryptroot (dropbear) or systemd\n"


def test_unlock_by_hand_reads_the_env_file(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"d": "p"})) as initrd:
        settings = initrd.machine().settings() | {"WAKER_PIN": PIN, "WAKER_SSH_KEY": ""}
        file = tmp_path / "waker.env"
        file.write_text("".join(f"{n}={v}\n" for n, v in settings.items()))
        ended = run_waker("--env-file", str(file), "unlock", given="p")
    assert ended.returncode == 0, ended.stdout
    assert json.loads(ended.stdout.splitlines()[-1])["outcome"] == "unlocked"


@pytest.mark.parametrize("seconds", ["0", "5", "-1", "x", "99999"])
def test_unlock_by_hand_needs_a_sensible_time(seconds: str) -> None:
    assert run_waker("unlock", f"--seconds={seconds}").returncode == 2


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_the_passphrase_is_utf8_whatever_the_locale(
    tmp_path: Path, encoding: str
) -> None:
    with paramiko_server(tmp_path, Disks({"d": PASSPHRASE})) as initrd:
        settings = initrd.machine().settings() | {"PYTHONIOENCODING": encoding}
        ended = run_waker("unlock", settings=settings, given=PASSPHRASE)
        assert initrd.received() == [PASSPHRASE.encode()]
    assert ended.returncode == 0
