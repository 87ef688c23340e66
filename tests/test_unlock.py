"""An unlock over SSH: to which server, at which moment, and what is said of it."""

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import paramiko
import pytest
from conftest import (
    BOX,
    MACHINE,
    ODD_PASSPHRASE,
    PASSPHRASE,
    PIN,
    daemon,
    each,
    interpose,
    need,
    run_waker,
    serving,
    wait_for,
    with_limits,
)
from homelab import (
    DROPBEAR,
    OPENSSH,
    SshServer,
    blackhole,
    new_key,
    public_line,
    tcp_server,
)
from machine import (
    CLOSED,
    ONCE,
    OPEN,
    SILENT,
    SOON,
    WARNS,
    Machine,
    wait_for_state,
    wait_until,
)
from namespaces import Home, ip
from paramiko import common
from ssh_servers import (
    FINGERPRINT,
    HOST_KEY,
    KEY,
    about_to_send,
    free_port,
    settings_at,
    unlock,
    unlocking,
)

RIGHT = PASSPHRASE.encode()
OTHER_KEY = new_key()
BIG = 80 << 20  # bytes: more than an unlock may allocate
UNSENT = "The passphrase was not sent."

# ---- The initrd's own words ----------------------------------------------------------


class Unlock(NamedTuple):
    """What an initrd's command does, and how often it gets the passphrase."""

    name: str
    script: str
    sent: int = 0
    words: str = ""
    given: str = PASSPHRASE
    settings: dict[str, str] = {}  # noqa: RUF012 - nobody changes it


SAYS = "echo cryptroot-unlock:"  # as our script for systemd does
GAVE_UP = f"{SAYS} gave up on root; exit 1"
THIRD = "echo cryptsetup: maximum number of tries exceeded for root"
UNASKED = "echo Error: Timeout reached while waiting for"
ROOT = "asks root; take; opens root"
OTHER_PIN = {"SSH_HOST_KEY": public_line(OTHER_KEY)}
OTHER_USER = {"SSH_USER": "nobody"}
# It may take long to ask, but nobody waits as long for another disk or for the end.
SLOW = f"[ -e root.open ] && sleep 60; sleep 2; {ONCE}; {ROOT}; sleep 60"
# Somebody tries a passphrase before the prompt, and opens a disk after it. Some of
# the output is not UTF-8.
CONSOLE = (
    f"{ONCE}; ({WARNS}; rejects) 2>&1; printf '\\377\\n'; asks root; take;"
    " printf '\\377\\n'; opens data; opens root"
)
# By outcome.
UNLOCKS = {
    "unlocked": (
        Unlock("two disks", "disk root; disk data", 2, "root.*data", ODD_PASSPHRASE),
        Unlock("slow", SLOW, 1, "root"),
        Unlock("console", CONSOLE, 1, "root"),
        Unlock("had given up on another", f"disk data; {GAVE_UP}", 1, "data"),
    ),
    "already_open": (
        Unlock("ours", f"{SAYS} every disk is open"),
        Unlock("Debian's", "exit 0"),
    ),
    "up": (Unlock("booted", "printf 'cryptroot-unlock: the system has booted'"),),
    "wrong_passphrase": (
        Unlock("second disk", "disk root; asks data; take; rejects", 2, "data.*root"),
        Unlock("third time", f"asks root; take; {THIRD}", 1, "root"),
        Unlock("warned", f"asks root; take; {WARNS}; rejects", 1, "root.$"),
        Unlock("passphrase in name", "asks my-x1; take; rejects", 1, "hidden", "x1"),
    ),
    "not_confirmed": (
        Unlock("slow key derivation", f"asks root; take; {UNASKED} PID 9.; exit 1", 1),
        Unlock("hangs up", "asks root; take; kill -9 $PPID", 1, "did not confirm"),
        Unlock("silent", "asks root; take; sleep 60", 1),
        Unlock("opens another", f"{ONCE}; asks root; take; opens data; exit 1", 1),
        # Though neither name is shown.
        Unlock("hidden", f"{ONCE}; asks a-x; take; opens b-x; exit 1", 1, given="x"),
        Unlock("asks again", "asks root; take; opens root", 1),
        Unlock("17 disks", "n=$(cat received | wc -l); asks $n; take; opens $n", 16),
        # The server may boot without the other disk.
        Unlock(
            "gives up", f"disk data; asks root; take; {GAVE_UP}", 2, "gave up on.* data"
        ),
    ),
    "gave_up": (
        Unlock("before", f"{SAYS} gave up on root", 0, "restart"),
        Unlock("after", f"asks root; take; {GAVE_UP}", 1, "restart"),
    ),
    "not_asked": (
        Unlock("times out", f"{UNASKED} askpass. >&2; exit 1"),
        Unlock("too early", "echo Try again later"),
        Unlock("hangs up", "kill -9 $PPID"),
        Unlock("never asks", "sleep 60", 0, "no disk was asking"),
    ),
    "error": (
        Unlock("not executable", "exit 126", 0, "command"),
        Unlock("not there", "exit 127", 0, "command"),
        Unlock("cannot", f"{SAYS} a helper is missing; exit 1", 0, "a helper"),
        Unlock("passphrase", f"{SAYS} no x1 here; exit 1", 0, "hidden", "x1"),
        Unlock("cut", f"{SAYS} {'x' * 180}{'no' * 30}", 0, "hidden", "no" * 30),
    ),
    "host_key_differs": (Unlock("another", "disk root", settings=OTHER_PIN),),
    "key_refused": (
        Unlock("user", "", 0, "SHA256:.*nobody.*be locked", settings=OTHER_USER),
    ),
}
ROWS = {
    f"{outcome}, {row.name}": (outcome, row)
    for outcome, rows in UNLOCKS.items()
    for row in rows
}
LIMITS = {  # seconds, by the name of a row that waits for them
    "slow": {"NEXT_PROMPT_SECONDS": 1, "END_SECONDS": 1},
    "never asks": {"PROMPT_SECONDS": 3},
    # Five of these are reserved for the report.
    "silent": {"UNLOCK_SECONDS": 10},
}


DIFFERS = "host_key_differs"
# The answer of POST /api/unlock, and the phase of the start that it began.
FAILED = 500, "Failed to unlock: ", "failed"
ANSWERS = {
    "unlocked": (200, "Unlocked: ", "booting"),
    "already_open": (200, "All disks seem to be open", "booting"),
    "up": (200, "The system is up", "done"),
    "wrong_passphrase": (400, "Wrong passphrase for disk ", "failed"),
    "not_confirmed": (500, "Not confirmed: (?=.*watch GET /api/status)", "booting"),
}


@each("outcome row", ROWS)
def test_only_the_initrds_own_words_decide(
    machine: Machine, outcome: str, row: Unlock
) -> None:
    """The passphrase is sent only if it asks, once to each disk, and is never shown."""
    settings = machine.ask(row.script, row.given).settings(**row.settings)
    with contextlib.ExitStack() as stack:
        if limits := LIMITS.get(row.name):
            client = stack.enter_context(machine.waker(settings, **limits)).client
        else:
            config = machine.config({"WAKER_PIN": PIN} | settings)
            client = stack.enter_context(serving(config, settings)).log_in()
        answer = client.unlock(row.given)
        status, begins, phase = ANSWERS.get(outcome, FAILED)
        start = wait_until(client, phase)
    assert answer.status == status
    text = answer.json["message"] if status == 200 else answer.error
    assert re.match(f"{begins}.*{row.words}", text)
    assert (start["outcome"], start["sent"]) == (outcome, bool(row.sent))
    assert start["seconds"] < 45  # of 90
    assert start["message"].rstrip(".") in text
    assert machine.received() == [row.given.encode()] * row.sent
    # waker's key can be limited to this.
    assert {*machine.commands()} <= {"cryptroot-unlock"}
    if "hidden" in row.words:
        assert row.given not in text
    # People read whether it was sent, unless the words imply it.
    if outcome not in ("unlocked", "wrong_passphrase"):
        assert ("not sent" in text) == (not row.sent)
        assert "sent" in text


@each("outcome pinned", {"forgotten": ("gave_up", {}), "alarm": (DIFFERS, OTHER_PIN)})
def test_a_failed_start_is_forgotten_once_the_system_is_up(
    machine: Machine, outcome: str, pinned: dict[str, str]
) -> None:
    """But not an alarm: any listener could open the port, and erase it."""
    settings = machine.ask(f"{SAYS} gave up on root").settings(**pinned)
    with machine.waker(settings) as started:
        client = started.client
        client.unlock()
        assert client.status()["start"]["outcome"] == outcome
        for ports, state in (((CLOSED, OPEN), "up"), ((SILENT, SILENT), "off")):
            machine.show(*ports)  # what is forgotten does not come back
            start = wait_for_state(client, state)["start"]
            assert bool(start) == bool(pinned)


def test_a_start_that_fails_after_a_power_cut_is_not_forgotten(
    machine: Machine,
) -> None:
    """Four unlocks found the system up, so it is not probed again for a while."""
    machine.show(CLOSED, OPEN)
    limits = {"OPEN_SECONDS": 60, "LIMIT_SECONDS": 60}  # for a busy computer
    with contextlib.ExitStack() as stack, machine.waker(**limits) as started:
        client = started.client
        for _ in range(4):
            assert client.unlock().json["message"] == f"The system is up. {UNSENT}"
        machine.ask("asks root; take; rejects")
        stack.enter_context(blackhole(machine.address, machine.system_port))
        assert client.start().status == 200
        start = wait_until(client, "failed")
    assert start["outcome"] == "wrong_passphrase"


PRINTED = {  # by an initrd's script: whether it is sent, and the exit status
    "unlocked": (ROOT, True, 0),
    "already_open": ("exit 0", False, 0),
    "up": (f"{SAYS} the system has booted", False, 0),
    "wrong_passphrase": ("asks root; take; rejects", True, 1),
    "gave_up": (GAVE_UP, False, 1),
}


@pytest.mark.parametrize("outcome", PRINTED)
def test_waker_unlock_prints_when_it_sends_and_then_the_result(
    machine: Machine, outcome: str
) -> None:
    script, is_sent, status = PRINTED[outcome]
    settings = machine.ask(f"{ONCE}; {script}").settings()
    ended = run_waker("unlock", settings=settings, given=PASSPHRASE)
    assert (ended.returncode, ended.stderr) == (status, "")
    *sent, result = map(json.loads, ended.stdout.splitlines())
    assert sent == [{"sent": True}] * is_sent
    assert result.keys() == {"outcome", "sent", "message"}
    assert (result["outcome"], result["sent"]) == (outcome, is_sent)


def test_a_result_that_cannot_be_printed_has_a_status_of_its_own() -> None:
    full = "sh", "-c", 'exec "$@" >/dev/full', "sh"
    ended = run_waker("unlock", settings=MACHINE, by=full)
    words = "the result cannot be printed: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (os.EX_IOERR, words)


# ---- The passphrase ------------------------------------------------------------------


def test_a_passphrase_is_sent_as_it_was_given(machine: Machine) -> None:
    """Byte by byte. A newline that ends the input is removed."""
    assert len(ODD_PASSPHRASE.encode()) == 512
    settings = machine.ask("disk root", ODD_PASSPHRASE).settings()
    assert unlock(settings, f"{ODD_PASSPHRASE}\n") == "unlocked: Unlocked: root."
    assert machine.received() == [ODD_PASSPHRASE.encode()]


@pytest.mark.parametrize("given", ["", "two\n\n", "x" * 2000, "\x07"], ids=len)
def test_input_that_is_no_passphrase_is_an_error(tmp_path: Path, given: str) -> None:
    message = unlock(settings_at(tmp_path, free_port()), given)
    assert re.match("error: .* 1 to 512 bytes .* not sent", message)


def test_a_person_may_take_time_to_type(machine: Machine) -> None:
    """The seconds that an unlock has begin afterwards."""
    seconds = 12
    program = with_limits(machine.folder, UNLOCK_SECONDS=seconds)
    with unlocking(machine.ask().settings(), program=program) as child:
        time.sleep(seconds + 1)
        child.give(PASSPHRASE)
        assert child.finish()["outcome"] == "unlocked"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_before_it_sends(machine: Machine, ending: int) -> None:
    with unlocking(machine.ask("sleep 60").settings()) as child:
        child.give(PASSPHRASE)
        wait_for(machine.commands)
        child.process.send_signal(ending)
        assert child.finish() is None
        assert child.process.returncode == -ending
        assert child.process.stderr
        assert child.process.stderr.read() == b""  # no traceback


def test_no_signal_ends_it_once_it_is_about_to_send(machine: Machine) -> None:
    """Nobody could know whether the disk is open. Until then, nohup is respected."""
    settings = machine.ask(f"{SOON}; disk root").settings()
    with unlocking(settings, by=["env", "--ignore-signal=HUP"]) as child:
        child.give(PASSPHRASE)
        wait_for(machine.commands)
        child.process.send_signal(signal.SIGHUP)
        machine.touch("go")
        wait_for(child.is_about_to_send)
        for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            child.process.send_signal(ending)
        assert machine.received() == []
        assert child.finish()["outcome"] == "unlocked"
        assert child.process.returncode == 0
    assert machine.received() == [RIGHT]


def test_output_from_before_the_answer_is_not_a_verdict(machine: Machine) -> None:
    machine.ask(f"{ONCE}; asks root; {SOON}; seq 9999; opens root; echo >said; take")
    with about_to_send(machine.settings()) as child:
        machine.touch("go")
        wait_for(machine.folder.joinpath("said").exists)
        time.sleep(1)  # for its thread to take what has arrived
        assert child.finish()["outcome"] == "not_confirmed"
    assert machine.received() == [RIGHT]


# ---- To the right server only --------------------------------------------------------

Step = Callable[[paramiko.Channel], bytes | None]


@dataclass
class Liar(SshServer):
    """An SSH server that lets anybody in, and does what no honest one would do.

    Its command runs once, in steps: text to send, or a function to call. Without steps,
    it cannot run.
    """

    keys: Sequence[paramiko.PKey] = (HOST_KEY,)
    steps: Sequence[str | Step] = ()
    pause_seconds: float = 0  # before it lets somebody in, or opens a channel
    window: int = 1 << 20  # bytes that a client may send
    opens: int = common.OPEN_SUCCEEDED  # or why it opens no channel
    users: list[str] = field(default_factory=list)  # who tried to log in
    received: list[bytes] = field(default_factory=list)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.users.append(username)
        self.transport.default_window_size = self.window
        time.sleep(self.pause_seconds)
        return common.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        time.sleep(self.pause_seconds)
        return self.opens

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        can_run = bool(self.steps)
        return can_run and super().check_channel_exec_request(channel, command)

    def run(self, channel: paramiko.Channel) -> int:
        steps, self.steps = self.steps, ()
        for step in steps:
            if isinstance(step, str):
                channel.sendall(step.encode())
            elif answer := step(channel):
                self.received.append(answer)
        return 1


ASKS = "Please unlock disk root\n"
OPENED = "cryptsetup: root set up successfully\n"
NO_PROMPT = f"not_asked: no disk was asking; try again in a few seconds. {UNSENT}"


def reads(channel: paramiko.Channel) -> bytes:
    """Read to the end of the input."""
    return channel.makefile("rb").read()


OTHERS = f"{KEY},{public_line(new_key())}"
BOTH = f"{OTHERS},{public_line(HOST_KEY)}"
PINNED = f"pinned {re.escape(FINGERPRINT)} or SHA256:"
IMPOSTOR = f"{DIFFERS}: .*{PINNED}.*, seen SHA256:.*not sent"
SERVERS = {
    "an impostor": (DROPBEAR, OTHERS, "own port", IMPOSTOR),
    "an impostor on one port": (DROPBEAR, OTHERS, "one port", IMPOSTOR),
    "the initrd on one port": (DROPBEAR, BOTH, "one port", NO_PROMPT),
    "the system on one port": (OPENSSH, OTHERS, "one port", "up: "),
    "nothing pinned": (DROPBEAR, "", "own port", f"{DIFFERS}: .*pinned none.*not sent"),
}


@each("version pinned ports expected", SERVERS)
def test_waker_logs_in_only_to_an_initrd_whose_host_key_is_pinned(
    tmp_path: Path, version: str, pinned: str, ports: str, expected: str
) -> None:
    server = Liar(version=version)
    with tcp_server(server.serve) as port:
        system_port = port if ports == "one port" else free_port()
        settings = settings_at(tmp_path, port, SYSTEM_SSH_PORT=system_port)
        message = unlock(settings | {"WAKER_SSH_HOST_KEY": pinned})
    assert re.match(expected, message)
    assert server.users == (["root"] if expected == NO_PROMPT else [])


KINDS: dict[str, tuple[int, Callable[[str], paramiko.PKey]]] = {
    "ecdsa": (256, paramiko.ECDSAKey.from_private_key_file),
    "ed25519": (256, paramiko.Ed25519Key.from_private_key_file),
    "rsa": (2048, paramiko.RSAKey.from_private_key_file),
}


def test_the_keys_of_both_sides_may_be_of_any_kind(tmp_path: Path) -> None:
    """The server has a host key of each kind, and is asked for the pinned one."""
    keys: dict[str, paramiko.PKey] = {}
    for kind, (bits, load) in KINDS.items():
        file = str(tmp_path / kind)
        make = [need("ssh-keygen"), "-q", "-t", kind, "-b", str(bits), "-N", "", "-f"]
        subprocess.run([*make, file], check=True)
        keys[kind] = load(file)
    server = Liar([*keys.values()])
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


# ---- Networks that fail --------------------------------------------------------------


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_short_failure_is_survived_and_a_long_one_noticed(
    home: Home, tmp_path: Path, comes_back: bool
) -> None:
    """The network fails as the passphrase is sent: for good, or for a second.

    Then it fails again, when nothing is left to send. Neither waits for the deadline.
    """
    router, server, _ = home
    address = "192.168.77.20"
    program = with_limits(tmp_path, LOST_SECONDS=5, UNLOCK_SECONDS=40)

    def link(state: str) -> None:
        ip(f"-n {server.name} link set eth0 {state}")

    def count_unacknowledged() -> list[str]:
        table = Path(f"/proc/{child.process.pid}/net/tcp").read_text()
        return re.findall(" 01 (.{8}):", table)  # of each connection, in bytes

    def fail_again(_: paramiko.Channel) -> None:
        wait_for(count_unacknowledged, lambda counts: counts == ["0" * 8])
        link("down")

    liar = Liar(steps=[ASKS, reads, fail_again])
    with contextlib.ExitStack() as stack:
        at = tcp_server(liar.serve, address)
        port = server.run(lambda: stack.enter_context(at))
        settings = settings_at(tmp_path, port, HOMELAB_HOST=address)
        starting = about_to_send(settings, program=program)
        child = router.run(lambda: stack.enter_context(starting))
        pool = stack.enter_context(ThreadPoolExecutor())
        link("down")
        result = pool.submit(child.finish)
        if comes_back:
            time.sleep(1)
            link("up")
        assert result.result(20)["outcome"] == "not_confirmed"
    assert liar.received == [RIGHT] * comes_back


# ---- Servers that attack -------------------------------------------------------------


def exchanges_keys(channel: paramiko.Channel) -> None:
    """Begin a key exchange, and never go on with it."""
    transport = channel.get_transport()
    transport.clear_to_send_lock.acquire()  # which the next step would need
    begins = paramiko.Message()
    begins.add_bytes(bytes([common.MSG_KEXINIT]) + bytes(16))
    for names in ("curve25519-sha256@libssh.org", HOST_KEY.get_name()):
        begins.add_string(names)
    for names in ("aes128-ctr", "hmac-sha2-256", "none", ""):
        begins.add_string(names)
        begins.add_string(names)
    begins.add_bytes(bytes(5))
    transport.packetizer.send_message(begins)


HANGS_UP = ASKS, reads, OPENED, lambda channel: channel.get_transport().close()
BEGUN = lambda _: time.sleep(1)  # noqa: E731 - until the client knows that it has
# The server leaves no room for the passphrase, and then reports success.
OPENS_BY_ITSELF = ASKS, BEGUN, OPENED
SHORTAGE = common.OPEN_FAILED_RESOURCE_SHORTAGE
ATTACKS = {
    "endless output": (Liar(steps=["x" * (1 << 16)] * (BIG >> 16)), "not_asked: "),
    "no channel": (Liar(opens=SHORTAGE), "not_asked: no disk"),
    # As when somebody has just answered at the server.
    "asks and ends": (Liar(steps=[ASKS]), NO_PROMPT),
    "asks and stops": (
        Liar(steps=[ASKS, lambda c: c.shutdown_write(), BEGUN]),
        NO_PROMPT,
    ),
    "asks and hangs": (Liar(steps=[BEGUN, ASKS, exchanges_keys]), NO_PROMPT),
    "no window": (Liar(steps=OPENS_BY_ITSELF, window=0), "not_confirmed.* may have"),
    "hangs up": (Liar(steps=HANGS_UP), "unlocked"),
}


@each("liar pattern", ATTACKS)
def test_an_attack_does_not_change_what_is_reported(
    tmp_path: Path, liar: Liar, pattern: str
) -> None:
    """It unsays no success, and a lack of memory is not taken for a refusal."""
    # A busy computer is too slow for the usual STILL_SECONDS.
    program = with_limits(tmp_path, STILL_SECONDS=0.3, UNLOCK_SECONDS=12)
    with tcp_server(liar.serve) as port:
        message = unlock(settings_at(tmp_path, port), program=program)
    assert re.match(pattern, message)
    assert liar.received == [RIGHT] * (pattern == "unlocked")


class Slow:
    """A connection that waits before its first and its second message."""

    def __init__(self, connection: socket.socket, *seconds: float) -> None:
        self._connection = connection
        self._seconds = [*seconds]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, data: bytes) -> int:
        time.sleep(self._seconds.pop(0) if self._seconds else 0)
        return self._connection.send(data)


@pytest.mark.parametrize("seconds", [(2,), (0, 4)])
def test_a_slow_server_has_its_time(tmp_path: Path, seconds: tuple[float, ...]) -> None:
    """For its first line, and more for its keys."""
    liar = Liar(steps=[ASKS, reads, OPENED])
    program = with_limits(tmp_path, BANNER_SECONDS=3)

    def serve(connection: Any) -> None:
        liar.serve(Slow(connection, *seconds))  # type: ignore[arg-type]

    with tcp_server(serve) as port:
        settings = settings_at(tmp_path, port)
        ended = run_waker(
            "unlock", settings=settings, given=PASSPHRASE, program=program
        )
    assert json.loads(ended.stdout.splitlines()[-1])["outcome"] == "unlocked"


def test_the_system_on_the_initrds_port_is_no_impostor(tmp_path: Path) -> None:
    """It may open that port first, and the one that tells it apart a moment later.

    But an impostor could open that port as well: the log keeps both fingerprints.
    """
    liar, system_port, probes = Liar([OTHER_KEY]), free_port(), []

    def serve(connection: socket.socket) -> None:
        probes.append(connection)
        if len(probes) == 3:  # after two looks, for the login and for the start
            stack.enter_context(socket.create_server(("127.0.0.1", system_port)))
        liar.serve(connection)

    with contextlib.ExitStack() as stack, tcp_server(serve) as port:
        settings = settings_at(tmp_path, port, SYSTEM_SSH_PORT=system_port)
        with daemon(MACHINE | settings) as started:
            client = started.client.log_in()
            client.start()
            start = wait_until(client, "done")
            started.stop()
    assert (start["outcome"], start["sent"]) == ("up", False)
    differs = r"The system is up, but the host key differs: pinned \S+, seen SHA256:"
    assert re.match(f"{differs}.*not sent", start["message"])
    assert re.search(differs, "\n".join(started.log))


def test_a_server_that_says_nothing_is_tried_again(tmp_path: Path) -> None:
    """And nobody is told that its initrd will never ask."""
    limits = {"BANNER_SECONDS": 1, "READY_SECONDS": 1, "RETRY_SECONDS": 0.1}
    program = with_limits(tmp_path, **limits)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        settings = settings_at(tmp_path, port, SYSTEM_SSH_PORT=free_port())
        with daemon(MACHINE | settings, program=program) as started:
            client = started.client.log_in()
            assert client.start().status == 200
            start = wait_until(client, "failed")
    assert start["outcome"] == "not_asked"
    assert re.search("hung up(?!.*screen)", start["message"])
    assert start["seconds"] < 20  # of the 90 that an unlock may take


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
        settings |= MACHINE | {"WAKER_PIN": PIN}
        ended = run_waker("check", settings=settings, program=BOX)
    assert re.search("WRONG +host key .*hung up", ended.stdout)
    assert ended.stderr == ""
    assert swallowed == []


# ---- Difficult boxes -----------------------------------------------------------------


def test_paramiko_does_not_import_what_waker_has_no_use_for(tmp_path: Path) -> None:
    """Importing invoke takes as long as the rest of paramiko."""
    (tmp_path / "invoke.py").write_text("raise SystemExit")
    settings = settings_at(tmp_path, free_port(), SYSTEM_SSH_PORT=free_port())
    settings |= MACHINE | {"WAKER_PIN": PIN, "PYTHONPATH": str(tmp_path)}
    assert unlock(settings).startswith("not_asked: ")
    checked = run_waker("check", settings=settings, program=BOX).stdout
    assert re.search("ok +paramiko ", checked)


# The wall clock gains a day each second.
FAST_CLOCK = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static double began;
    struct timespec time;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &time);
    double seconds = time.tv_sec + time.tv_nsec / 1e9;
    began = began ? began : seconds;
    int result = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME)
        now->tv_sec += 86400 * (seconds - began);
    return result;
}
"""


def test_a_clock_that_is_set_meanwhile_ends_no_wait(tmp_path: Path) -> None:
    """A Raspberry Pi has no battery, and gets the time from the network."""

    def pause(_: object) -> None:
        time.sleep(0.5)

    def serve(connection: socket.socket) -> None:
        pause(connection)
        liar.serve(connection)

    liar = Liar(steps=[pause, ASKS, reads, pause, OPENED], pause_seconds=0.5)
    with tcp_server(serve) as port:
        settings = settings_at(tmp_path, port)
        settings["LD_PRELOAD"] = interpose(tmp_path, FAST_CLOCK)
        assert unlock(settings).startswith("unlocked: ")


# Importing paramiko takes two seconds, as it may on a slow box.
SLOW_IMPORT = """
import sys, time

def wait(event, arguments):
    if event == "import" and arguments[0] == "paramiko":
        time.sleep(2)

sys.addaudithook(wait)
"""


SILENCES = "from the start", "before the login", "port"


@pytest.mark.parametrize("silence", SILENCES)
def test_a_box_that_loads_paramiko_slowly(tmp_path: Path, silence: str) -> None:
    """It still reports in time, of which less is left to wait for a silent server."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    hole = blackhole("127.0.0.1", silent_port := free_port())
    server = tcp_server(Liar(pause_seconds=20).serve)
    # It has two seconds to unlock, and much longer to report that it could not.
    limits = dict.fromkeys(("CONNECT_SECONDS", "BANNER_SECONDS", "KEX_SECONDS"), 99)
    program = with_limits(tmp_path, UNLOCK_SECONDS=42, REPORT_SECONDS=40, **limits)
    with server as port, hole, socket.create_server(("127.0.0.1", 0)) as mute:
        ports = [mute.getsockname()[1], port, silent_port]
        ports_of = dict(zip(SILENCES, ports, strict=True))
        settings = settings_at(tmp_path, ports_of[silence])
        settings["PYTHONPATH"] = str(tmp_path)
        assert re.match("not_asked: ", unlock(settings, program=program))
