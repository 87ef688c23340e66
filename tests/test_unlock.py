"""An unlock over SSH: to which server, at which moment, and what a liar can do."""

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paramiko
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
    run_waker,
    shortened,
    wait_for,
)
from homelab import DROPBEAR, OPENSSH, new_key
from machine import WORDS, Machine, wait_until
from namespaces import Home, ip
from paramiko.common import (
    AUTH_SUCCESSFUL,
    OPEN_FAILED_RESOURCE_SHORTAGE,
    OPEN_SUCCEEDED,
)
from ssh_servers import (
    HOST_KEY,
    SHORT_UNLOCK,
    Settings,
    free_port,
    prepare_sshd,
    process,
    settings_at,
    tcp_server,
    unlock,
)

RIGHT = PASSPHRASE.encode()
OTHER_KEY = new_key()
BIG = 80 << 20  # bytes: more than an unlock may allocate
UNSENT = "The passphrase was not sent."
ONCE = "[ -e root.open ] && exit; echo >root.open"
OPENS = f"{ONCE}; asks root; take; opens root"
Step = Callable[[paramiko.Channel], bytes | None]


@dataclass
class Liar(paramiko.ServerInterface):
    """An SSH server that lets anybody in, and does what no honest one would do.

    Its command runs once, in steps: text to send, or a function to call. Without steps,
    it cannot run.
    """

    steps: Sequence[str | Step] = ()
    # It acts at one moment: `login`, `channel`, `exec` or `next channel`.
    moment: str = ""
    act: "Callable[[Liar], object]" = print
    version: str = DROPBEAR
    keys: Sequence[paramiko.PKey] = (HOST_KEY,)
    window: int | None = None  # bytes that a client may send
    opens: int = OPEN_SUCCEEDED  # or why it opens no channel
    users: list[str] = field(default_factory=list)  # who tried to log in
    received: list[bytes] = field(default_factory=list)
    transport: Any = None

    def serve(self, connection: socket.socket) -> None:
        self.transport = paramiko.Transport(connection)
        self.transport.local_version = self.version
        for key in self.keys:
            self.transport.add_server_key(key)
        if self.window is not None:
            self.transport.default_window_size = self.window
        self.transport.start_server(threading.Event(), self)

    def _reach(self, moment: str) -> None:
        if moment == self.moment:
            with contextlib.suppress(EOFError):  # the client has gone
                self.act(self)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.users.append(username)
        self._reach("login")
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        self._reach("next channel" if self.received else "channel")
        return self.opens

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        self._reach("exec")
        steps, self.steps = self.steps, ()
        if steps:
            arguments = channel, steps
            threading.Thread(target=self._play, args=arguments, daemon=True).start()
        return bool(steps)

    def _play(self, channel: paramiko.Channel, steps: Sequence[str | Step]) -> None:
        with contextlib.suppress(OSError, EOFError):  # the client has gone
            for step in steps:
                if isinstance(step, str):
                    channel.sendall(step.encode())
                elif answer := step(channel):
                    self.received.append(answer)
            channel.send_exit_status(1)
            channel.shutdown_write()  # closing could overtake the reply to exec


ASKS = "Please unlock disk root\n"
OPENED = "cryptsetup: root set up successfully\n"
NO_PROMPT = f"not_asked: no disk asked; try again in a few seconds. {UNSENT}"


def reads(channel: paramiko.Channel) -> bytes:
    """Read to the end of the input."""
    return channel.makefile("rb").read()


# ---- To the right server only --------------------------------------------------------

SERVERS = {
    "an impostor": (DROPBEAR, OTHER_KEY, "own port", "host_key_differs: "),
    "an impostor on one port": (DROPBEAR, OTHER_KEY, "one port", "host_key_differs: "),
    "the initrd on one port": (DROPBEAR, HOST_KEY, "one port", NO_PROMPT),
    "the system on one port": (OPENSSH, OTHER_KEY, "one port", "up: "),
}


@pytest.mark.parametrize(
    ("version", "pinned", "ports", "expected"), SERVERS.values(), ids=[*SERVERS]
)
def test_waker_logs_in_only_to_an_initrd_whose_host_key_is_pinned(
    tmp_path: Path, version: str, pinned: paramiko.PKey, ports: str, expected: str
) -> None:
    server = Liar(version=version)
    with tcp_server(server.serve) as port:
        system = port if ports == "one port" else free_port()
        message = unlock(settings_at(tmp_path, port, pinned, SYSTEM_SSH_PORT=system))
    assert message.startswith(expected)
    assert server.users == (["root"] if expected == NO_PROMPT else [])


KINDS: dict[str, Callable[[str], paramiko.PKey]] = {
    "ecdsa": paramiko.ECDSAKey.from_private_key_file,
    "ed25519": paramiko.Ed25519Key.from_private_key_file,
    "rsa": paramiko.RSAKey.from_private_key_file,
}


def test_the_keys_of_both_sides_may_be_of_any_kind(tmp_path: Path) -> None:
    """The server has a host key of each kind, and is asked for the pinned one."""
    keys: dict[str, paramiko.PKey] = {}
    for kind, load in KINDS.items():
        file = str(tmp_path / kind)
        make = [need("ssh-keygen"), "-q", "-t", kind, "-N", "", "-f", file]
        subprocess.run(make, check=True)
        keys[kind] = load(file)
    server = Liar(keys=[*keys.values()])
    with tcp_server(server.serve) as port:
        for kind, key in keys.items():
            own = {"SSH_USER": kind, "SSH_KEY": tmp_path / kind}
            assert unlock(settings_at(tmp_path, port, key, **own)) == NO_PROMPT
    assert server.users == [*KINDS]


def test_no_weak_algorithm_is_offered(tmp_path: Path) -> None:
    """`make test-paramiko` sees this with an older one, which would offer more."""
    offered = []

    def read(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            connection.sendall(b"SSH-2.0-x\r\n")
            file.readline()
            offered.append(file.read(int.from_bytes(file.read(4))).decode("latin-1"))

    with tcp_server(read) as port:
        assert unlock(settings_at(tmp_path, port)).startswith("not_asked: ")
    (names,) = offered
    assert re.search("hmac-sha2-.*none", names)
    assert not re.search(r"sha1|md5|cbc|dss|\bssh-rsa", names)


def test_the_initrd_may_run_openssh(tmp_path: Path) -> None:
    port, settings, start = prepare_sshd(tmp_path)
    command = tmp_path / "cryptroot-unlock"
    command.write_text(f"{WORDS} disk root; disk data")
    tmp_path.joinpath("right").write_text(RIGHT.hex())
    forced = shlex.quote(f"ForceCommand=exec sh {command}")
    with process(port, f"{start} -o {forced}"):
        assert re.match("wrong_passphrase: .*root", unlock(settings, "wrong"))
        assert re.match("unlocked: .*root, data", unlock(settings))
        assert re.match("already_open: .*not sent", unlock(settings))
    received = tmp_path.joinpath("received").read_text().split()
    assert [*map(bytes.fromhex, received)] == [b"wrong", RIGHT, RIGHT]


def test_a_user_that_is_locked_is_named_as_a_reason(tmp_path: Path) -> None:
    """As root is, wherever an installer made a user for sudo."""
    port, settings, start = prepare_sshd(tmp_path)
    (tmp_path / "shadow").write_text("root:!:1::::::\n")
    with process(port, start):
        assert re.search("key_refused: .* that user may be locked", unlock(settings))


def test_tinyssh_is_reported_as_sharing_no_algorithm(tmp_path: Path) -> None:
    keys, program = tmp_path / "tinyssh", need("tinysshd")
    subprocess.run([need("tinysshd-makekey"), keys], check=True)

    def serve(tcp: socket.socket) -> None:
        with tcp:  # as inetd does
            number = tcp.fileno()
            subprocess.run([program, keys], stdin=number, stdout=number, check=False)

    with tcp_server(serve) as port:
        assert "shares no algorithm" in unlock(settings_at(tmp_path, port))


# ---- When the passphrase leaves ------------------------------------------------------


@dataclass
class Unlocking:
    """`waker unlock` as a process, whose standard output is a full pipe.

    So it stops when it is about to send the passphrase, until somebody reads that.
    """

    process: subprocess.Popen[bytes]
    output: int

    def give(self, passphrase: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(passphrase.encode())
        self.process.stdin.close()

    def is_about_to_send(self) -> bool:
        """Return whether it ignores SIGTERM."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"SigIgn:\t(\w+)", status)
        return bool(found and int(found[1], 16) & 1 << signal.SIGTERM - 1)

    def finish(self) -> Any:
        """Read to its end; returns the result, or None if it printed none."""
        with open(self.output, closefd=False) as output:
            lines = output.read().strip().splitlines()
        assert self.process.stderr
        assert self.process.stderr.read() == b""
        self.process.wait(60)
        return json.loads(lines[-1]) if lines else None


@contextlib.contextmanager
def unlocking(settings: Settings, seconds: int = 60) -> Iterator[Unlocking]:
    """Run `waker unlock`; whoever wants it to begin must give it a passphrase."""
    output, its = os.pipe()
    os.write(its, b"\n" * fcntl.fcntl(its, fcntl.F_SETPIPE_SZ, 1))
    default = "env", "--default-signal=INT,HUP"  # nohup would ignore them
    with subprocess.Popen(
        [*default, *MODULE, "unlock", f"--seconds={seconds}"],
        cwd=CHECKOUT,
        env=environment(settings),
        stdin=subprocess.PIPE,
        stdout=its,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(its)
        try:
            yield Unlocking(process, output)
        finally:
            process.kill()
            os.close(output)


@contextlib.contextmanager
def about_to_send(
    settings: Settings, given: str = PASSPHRASE, seconds: int = 60
) -> Iterator[Unlocking]:
    """Run `waker unlock` until a disk has asked, and nothing was sent yet."""
    with unlocking(settings, seconds) as child:
        child.give(given)
        wait_for(child.is_about_to_send)
        yield child


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_before_it_sends(machine: Machine, ending: int) -> None:
    with unlocking(machine.ask("sleep 60").settings()) as child:
        child.give(PASSPHRASE)
        wait_for(machine.has_run)
        child.process.send_signal(ending)
        assert child.finish() is None
        assert child.process.returncode == -ending


def test_no_signal_ends_it_once_it_is_about_to_send(machine: Machine) -> None:
    """Nobody could know whether the disk is open."""
    with about_to_send(machine.ask().settings()) as child:
        for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            child.process.send_signal(ending)
        assert machine.received() == []
        assert child.finish()["outcome"] == "unlocked"
        assert child.process.returncode == 0
    assert machine.received() == [RIGHT]


def test_output_from_before_the_answer_is_not_a_verdict(machine: Machine) -> None:
    wait = "until [ -e go ]; do sleep 0.1; done"
    machine.ask(f"{ONCE}; asks root; {wait}; seq 9999; opens root; echo >said; take")
    with about_to_send(machine.settings()) as child:
        machine.folder.joinpath("go").touch()
        wait_for(machine.folder.joinpath("said").exists)
        time.sleep(1)  # for its thread to take what has arrived
        assert child.finish()["outcome"] == "not_confirmed"
    assert machine.received() == [RIGHT]


def test_success_is_not_believed_if_nothing_could_be_sent(tmp_path: Path) -> None:
    """The server leaves no room in its window, and then reports success."""
    liar = Liar([ASKS, lambda _: time.sleep(1), OPENED], window=0)
    with tcp_server(liar.serve) as port:
        message = unlock(settings_at(tmp_path, port))
    assert message.startswith("not_confirmed: ")
    assert liar.received == []


def test_a_person_may_take_time_to_type(tmp_path: Path) -> None:
    with unlocking(settings_at(tmp_path, free_port()), seconds=6) as child:
        time.sleep(7)
        child.give(PASSPHRASE)
        assert child.finish()["outcome"] == "not_asked"


# ---- What is reported ----------------------------------------------------------------

LEAKS = {
    "disk": ("secret", "asks my-secret-disk; take; rejects"),
    "error": ("secret", "echo cryptroot-unlock: no secret here; exit 1"),
    "cut": ("secret" * 9, f"echo cryptroot-unlock: {'x' * 180}{'secret' * 9}; exit 1"),
    "two disks": ("alpha, beta", "disk alpha; disk beta"),
}


@pytest.mark.parametrize(("given", "script"), LEAKS.values(), ids=[*LEAKS])
def test_the_initrd_cannot_make_waker_show_the_passphrase(
    machine: Machine, given: str, script: str
) -> None:
    result = machine.ask(script, given).unlock(given)
    assert "(hidden)" in result["message"]
    assert given not in result["message"]


WARNING = "cryptroot-unlock: systemd may give up after another wrong passphrase"
SUCCESSES = {
    "slow to ask": f"[ -e root.open ] || sleep 17; {OPENS}",
    "silent afterwards": f"[ -e root.open ] && sleep 60; {OPENS}",
    "warned before": f"echo {WARNING}; {OPENS}",
    "never ends": f"{OPENS}; while sleep 0.1; do echo x; done",
    # Somebody tries a passphrase before the prompt, and opens another disk after it.
    "console": f"{ONCE}; (rejects) 2>&1; asks root; take; opens data; opens root",
}


@pytest.mark.parametrize("script", SUCCESSES.values(), ids=[*SUCCESSES])
def test_a_disk_that_opens_is_reported_in_time_whatever_else_happens(
    machine: Machine, script: str
) -> None:
    """It may take 50 seconds to ask, but nobody waits as long for another."""
    began = time.monotonic()
    assert machine.ask(script).unlock()["message"] == "Unlocked: root."
    assert time.monotonic() < began + 40


def test_a_server_that_loses_its_power_is_noticed(home: Home, tmp_path: Path) -> None:
    """Long before the deadline, although there is nothing left to send."""
    router, server, _ = home
    liar = Liar([ASKS, reads, lambda _: ip(f"-n {server.name} link set eth0 down")])
    address = "192.168.77.20"
    with contextlib.ExitStack() as stack:
        serving = tcp_server(liar.serve, address)
        port = server.run(lambda: stack.enter_context(serving))
        settings = settings_at(tmp_path, port, HOMELAB_HOST=address)
        began = time.monotonic()
        message = router.run(lambda: unlock(settings, seconds=90))
    assert time.monotonic() < began + 60  # by TCP, not by the limit
    assert message.startswith("not_confirmed: ")
    assert liar.received == [RIGHT]


def test_an_unlock_survives_a_network_that_fails_for_two_seconds(
    home: Home, tmp_path: Path
) -> None:
    """Just as the passphrase is sent, which TCP has to repeat several times."""
    router, server, _ = home
    liar = Liar([ASKS, reads, OPENED])
    address = "192.168.77.20"
    with contextlib.ExitStack() as stack:
        serving = tcp_server(liar.serve, address)
        port = server.run(lambda: stack.enter_context(serving))
        settings = settings_at(tmp_path, port, HOMELAB_HOST=address)
        starting = about_to_send(settings)
        child = router.run(lambda: stack.enter_context(starting))
        pool = stack.enter_context(ThreadPoolExecutor())
        ip(f"-n {server.name} link set eth0 down")
        result = pool.submit(child.finish)

        def count_repeats() -> int:
            """Return how often TCP has repeated what is not acknowledged."""
            table = Path(f"/proc/{child.process.pid}/net/tcp").read_text()
            found = re.findall(rf":{port:04X} 01 \S+ \S+ (\S+)", table)
            return max((int(count, 16) for count in found), default=0)

        wait_for(lambda: result.done() or count_repeats() > 2)
        ip(f"-n {server.name} link set eth0 up")
        assert result.result()["outcome"] == "unlocked"
    assert liar.received == [RIGHT]


# ---- Servers that attack -------------------------------------------------------------


def freeze(_: Liar) -> None:
    time.sleep(20)  # seconds; the client disconnects earlier


def send_big(liar: Liar) -> None:
    """Send the first block of a packet of 80 MB, encrypted by AES in counter mode."""
    packetizer = liar.transport.packetizer
    cipher = packetizer._Packetizer__block_engine_out  # noqa: SLF001
    # SSH allows only sizes that are twelve more than a multiple of 16.
    with packetizer._Packetizer__write_lock:  # noqa: SLF001
        packetizer.write_all(cipher.update(struct.pack(">I", BIG + 12) + bytes(12)))


LOST = "not_asked: .*(hung up|no disk asked)"
SHORT_OF_MEMORY = Liar(opens=OPEN_FAILED_RESOURCE_SHORTAGE)
ATTACKS = {
    "packet at login": (Liar(moment="login", act=send_big), LOST),
    "packet at the channel": (Liar(moment="channel", act=send_big), LOST),
    "packet later": (Liar([ASKS, reads, OPENED], "next channel", send_big), "unlocked"),
    "endless output": (Liar(["x" * (1 << 16)] * (BIG >> 16)), "not_asked: "),
    "silence at login": (Liar(moment="login", act=freeze), LOST),
    "silence at the command": (Liar(moment="exec", act=freeze), LOST),
    "no channel": (SHORT_OF_MEMORY, "not_asked: no disk asked"),
}


@pytest.mark.parametrize(("liar", "pattern"), ATTACKS.values(), ids=[*ATTACKS])
def test_an_attack_does_not_change_what_is_reported(
    tmp_path: Path, liar: Liar, pattern: str
) -> None:
    """It unsays no success, and a lack of memory or time is not taken for a refusal."""
    with tcp_server(liar.serve) as port:
        message = unlock(settings_at(tmp_path, port), seconds=SHORT_UNLOCK)
    assert re.match(pattern, message)
    is_sent = pattern == "unlocked"
    assert liar.received == [RIGHT] * is_sent
    assert message.endswith(UNSENT) != is_sent


def test_a_server_that_ignores_the_window_cannot_exhaust_the_box(
    tmp_path: Path,
) -> None:
    """It sends 100 MB of lines, though SSH's window is full after two."""

    def flood(channel: paramiko.Channel) -> bytes:
        channel.out_window_size = 1 << 40
        for _ in range(100):
            channel.sendall(b"x\n" * (1 << 19))
        return b"swallowed"

    liar, seconds = Liar([ASKS, reads, flood]), f"--seconds={SHORT_UNLOCK}"
    with tcp_server(liar.serve) as port:
        settings = settings_at(tmp_path, port)
        ended = run_waker("unlock", seconds, settings=settings, given=PASSPHRASE)
    assert liar.received == [RIGHT]
    assert "unlocked" not in ended.stdout
    assert re.fullmatch("(bug: MemoryError, .*\n)?", ended.stderr)


SLOWLY = """
import sys, time
time.sleep(4)
sys.path.remove({folder!r})
del sys.modules["paramiko"]
import paramiko
"""


def test_a_box_that_loads_paramiko_slowly_still_reports_in_time(tmp_path: Path) -> None:
    """A router takes seconds for that. Meanwhile, the time to unlock passes."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "paramiko.py").write_text(SLOWLY.format(folder=str(folder)))
    silent = Liar(moment="login", act=freeze)
    with tcp_server(silent.serve) as port:
        settings = settings_at(tmp_path, port) | {"PYTHONPATH": str(folder)}
        assert re.match(LOST, unlock(settings, seconds=10))


def test_a_server_that_says_nothing_is_given_up_for_another_try(
    tmp_path: Path,
) -> None:
    """And nobody is told that its initrd will never ask."""

    def stay_silent(connection: socket.socket) -> None:
        with connection:
            while connection.recv(4096):
                pass

    limits = {"kex_seconds": 1, "prompt_seconds": 1, "retry_seconds": 0.1}
    program = shortened(tmp_path, **limits)
    with tcp_server(stay_silent) as port:
        settings = settings_at(tmp_path, port, SYSTEM_SSH_PORT=free_port())
        with daemon(MACHINE | settings, program=program) as started:
            client = started.client.log_in()
            assert client.start().status == 200
            start = wait_until(client, "failed")
    assert (start["outcome"], start["hint"]) == ("not_asked", None)
    assert "hung up" in start["message"]
    assert start["seconds"] < 60  # of the 90 that an unlock may take


def test_an_impostor_cannot_exhaust_the_box(tmp_path: Path) -> None:
    """It announces a packet of 80 MB, and sends as much as the client reads."""
    swallowed = []

    def serve(connection: socket.socket) -> None:
        # SSH allows only sizes that are four more than a multiple of eight.
        size = BIG + 4
        with connection, contextlib.suppress(OSError):  # the client has gone
            connection.sendall(f"{DROPBEAR}\r\n".encode() + struct.pack(">I", size))
            connection.sendall(bytes(size))
            swallowed.append(size)

    with tcp_server(serve) as port:
        settings = settings_at(tmp_path, port, SYSTEM_SSH_PORT=free_port())
        assert re.match("not_asked: .*hung up", unlock(settings))
        ended = run_waker("check", settings=MACHINE | settings | {"WAKER_PIN": PIN})
    assert re.search("WRONG +host key .*hung up", ended.stdout)
    assert ended.stderr == ""
    assert swallowed == []


def test_an_unlock_works_despite_a_large_stack_limit(machine: Machine) -> None:
    """If threads had stacks of that size, an unlock would run out of memory."""
    limit = need("prlimit"), "--stack=67108864:67108864"
    with daemon(machine.ask().settings(), *limit) as started:
        assert started.client.log_in().unlock().status == 200
