"""An unlock over SSH: to which server, at which moment, and what is said of it."""

import contextlib
import json
import re
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
from typing import Any, NamedTuple

import paramiko
import pytest
from conftest import (
    MACHINE,
    ODD_PASSPHRASE,
    PASSPHRASE,
    PIN,
    daemon,
    each,
    need,
    preload,
    run_waker,
    shortened,
    wait_for,
)
from homelab import DROPBEAR, OPENSSH, Blackhole, bind, new_key, public_line
from machine import CLOSED, ONCE, OPEN, SLOWLY, SOON, WARNS, Machine, wait_until
from namespaces import Home, ip
from paramiko.common import (
    AUTH_SUCCESSFUL,
    OPEN_FAILED_RESOURCE_SHORTAGE,
    OPEN_SUCCEEDED,
)
from ssh_servers import (
    HOST_KEY,
    Settings,
    about_to_send,
    free_port,
    says,
    settings_at,
    tcp_server,
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
    seconds: int = 60  # for the unlock


SAYS = "echo cryptroot-unlock:"  # as our script for systemd does
GAVE_UP = f"{SAYS} gave up on root; exit 1"
THIRD = "echo cryptsetup: maximum number of tries exceeded for root"
EARLY_OPENED = "sed 'a cryptsetup: root set up successfully'"
OPENS = f"{ONCE}; asks root; take; opens root"
SILENT = "echo Error: Timeout reached while waiting for"
BOTH_OPEN = "asks root; take; opens data; opens root"
OPENED_ROOT = 1, r"^Unlocked: root\. None$"  # without a hint
# By outcome. REACHED, below, has more of them.
UNLOCKS = {
    "unlocked": (
        Unlock("two disks", "disk root; disk data", 2, "root.*data"),
        # It may take 50 seconds to ask, but nobody waits as long for another disk.
        Unlock("slow to ask", f"[ -e root.open ] || sleep 17; {OPENS}", *OPENED_ROOT),
        Unlock("no other disk", f"[ -e root.open ] && sleep 60; {OPENS}", *OPENED_ROOT),
        Unlock(
            "never ends", f"{OPENS}; while sleep 0.1; do echo x; done", *OPENED_ROOT
        ),
        Unlock("warned before", f"{WARNS}; {OPENS}", *OPENED_ROOT),
        # Somebody tries a passphrase before the prompt, and opens a disk after it.
        Unlock("console", f"{ONCE}; (rejects) 2>&1; {BOTH_OPEN}", *OPENED_ROOT),
        Unlock("had given up on another", f"disk data; {GAVE_UP}", 1, "data"),
        Unlock("passphrase in names", "disk al; disk be", 2, "hidden", "al, be"),
    ),
    "already_open": (Unlock("all open", f"{SAYS} every disk is open", 0, "open"),),
    "wrong_passphrase": (
        Unlock("second disk", "disk root; asks data; take; rejects", 2, "data.*root"),
        Unlock("third time", f"asks root; take; {THIRD}", 1, "root"),
        Unlock("warned", f"asks root; take; {WARNS}; rejects", 1, "root.*give up"),
        Unlock("passphrase in name", "asks my-x1; take; rejects", 1, "hidden", "x1"),
    ),
    "not_confirmed": (
        Unlock("no word", "asks root; take", 1),
        Unlock("slow key derivation", f"asks root; take; {SILENT} PID 9.; exit 1", 1),
        Unlock("hangs up", "asks root; take; kill -9 $PPID", 1, "did not confirm"),
        Unlock("silent", "asks root; take; sleep 60", 1, seconds=12),
        Unlock("opens another", f"{ONCE}; asks root; take; opens data; exit 1", 1),
        # Though neither name is shown.
        Unlock("hidden", f"{ONCE}; asks a-x; take; opens b-x; exit 1", 1, given="x"),
        Unlock("opens early", f"{ONCE}; opens root 2>&1; asks root; take; exit 1", 1),
        Unlock("opens unasked", f"{ONCE}; asks root | {EARLY_OPENED}; take", 1),
        Unlock("asks again", "asks root; take; opens root", 1),
        Unlock("17 disks", "n=$(cat received | wc -l); asks $n; take; opens $n", 16),
        # The server may boot without the other disk.
        Unlock(
            "gives up", f"disk data; asks root; take; {GAVE_UP}", 2, "gave up on.* data"
        ),
    ),
    "gave_up": (Unlock("systemd", f"asks root; take; {GAVE_UP}", 1, "restart"),),
    "not_asked": (
        Unlock("times out", f"{SILENT} askpass. >&2; exit 1"),
        Unlock("ends", "exit 1"),
        Unlock("hangs up", "kill -9 $PPID"),
        Unlock("silent", "sleep 60", 0, "no disk asked", seconds=10),
    ),
    "error": (
        Unlock("not executable", "exit 126", 0, "command"),
        Unlock("cannot", f"{SAYS} a helper is missing; exit 1", 0, "a helper"),
        Unlock(
            "waker 2", "echo waker: asks root; take; exit 1", 0, "put waker 2.1 back"
        ),
        Unlock("passphrase", f"{SAYS} no x1 here; exit 1", 0, "hidden", "x1"),
        Unlock("cut", f"{SAYS} {'x' * 180}{'no' * 30}", 0, "hidden", "no" * 30),
    ),
}
ROWS = {
    f"{outcome}, {row.name}": (outcome, row)
    for outcome, rows in UNLOCKS.items()
    for row in rows
}


@each("outcome row", ROWS)
def test_only_the_initrds_own_words_decide(
    machine: Machine, outcome: str, row: Unlock
) -> None:
    """The passphrase is sent only if it asks, once to each disk, and is never shown."""
    began = time.monotonic()
    result = machine.ask(row.script, row.given).unlock(row.given, row.seconds)
    assert time.monotonic() < began + 40
    assert (result["outcome"], result["sent"]) == (outcome, bool(row.sent))
    assert re.search(row.words, f"{result['message']} {result['hint']}")
    assert machine.received() == [row.given.encode()] * row.sent
    # waker's key can be limited to this.
    assert {*machine.commands()} == {"cryptroot-unlock"}
    if "hidden" in row.words:
        assert row.given not in result["message"]
    # People read whether it was sent, unless the words imply it.
    if outcome not in ("unlocked", "wrong_passphrase"):
        assert ("not sent" in result["message"]) == (not row.sent)
        assert "sent" in result["message"]


class Reach(NamedTuple):
    """An initrd, the answer of POST /api/unlock, and where a start gets.

    A failed start is forgotten once the system is up, but not an alarm.
    """

    script: str
    status: int
    begins: str
    says: str
    phase: str
    outcome: str
    settings: dict[str, str] = {}  # noqa: RUF012 - nobody changes it


FAILED = 500, "Failed to unlock: ", "was not sent", "failed"
OTHER_PIN = {"SSH_HOST_KEY": public_line(OTHER_KEY)}
REACHED = (
    Reach("disk root", 200, "", "root", "booting", "unlocked"),
    Reach("", 200, "", "open.*not sent", "booting", "already_open"),
    Reach(f"{SAYS} the system has booted", 200, "", "up.*not sent", "done", "up"),
    Reach(
        f"asks root; take; {WARNS}; rejects",
        *(400, "Wrong passphrase", "root.*give up", "failed", "wrong_passphrase"),
    ),
    Reach(
        "asks root; take",
        *(500, "Not confirmed: (?=.*GET /api/status)", "was sent"),
        *("booting", "not_confirmed"),
    ),
    Reach("echo Try again later", *FAILED, "not_asked"),
    Reach(f"{SAYS} gave up on root", *FAILED, "gave_up"),
    Reach("exit 127", *FAILED, "error"),
    Reach("disk root", *FAILED, "host_key_differs", OTHER_PIN),
    Reach("disk root", *FAILED, "key_refused", {"SSH_USER": "nobody"}),
)


@pytest.mark.parametrize("row", REACHED, ids=lambda row: row.outcome)
def test_each_outcome_reaches_client_and_status(machine: Machine, row: Reach) -> None:
    settings = machine.ask(row.script).settings(**row.settings)
    ready = 15 if row.outcome == "not_asked" else 120  # seconds
    with machine.waker(settings, READY_SECONDS=ready, RETRY_SECONDS=0.5) as started:
        client = started.client
        answer = client.unlock()
        assert answer.status == row.status
        if row.status == 200:
            assert answer.json.keys() == {"success", "message"}
            assert answer.json["success"] is True
        text = answer.json["message"] if row.status == 200 else answer.error
        assert re.match(f"{row.begins}.*{row.says}", text)
        machine.ask(row.script)
        assert client.start().json["success"] is True
        start = wait_until(client, row.phase)
        is_sent = bool(machine.received())
        assert (start["outcome"], start["sent"]) == (row.outcome, is_sent)
        assert re.search(row.says, f"{start['message']} {start['hint']}")
        if row.outcome == "not_asked":
            assert len(machine.commands()) > 1
        if row.phase == "failed":
            # Any listener could open the port, and erase an alarm.
            is_alarm = row.outcome == "host_key_differs"
            machine.show(CLOSED, OPEN)
            seen = wait_for(client.status, lambda now: now["state"] == "up", pause=0.2)
            assert (seen["start"] is not None) == is_alarm
            machine.show()  # what is forgotten does not come back
            seen = wait_for(client.status, lambda now: now["state"] == "off", pause=0.2)
            assert (seen["start"] is not None) == is_alarm


def test_an_unlock_of_a_system_that_is_up_is_a_success(machine: Machine) -> None:
    """Whether or not waker could unlock it: here, no host key is pinned."""
    settings = machine.show(CLOSED, OPEN).settings(SSH_HOST_KEY="")
    with machine.waker(settings) as started:
        answer = started.client.unlock()
    assert answer.status == 200
    assert "not sent" in answer.json["message"]


# ---- The passphrase ------------------------------------------------------------------


def test_a_passphrase_is_sent_as_it_was_given(machine: Machine) -> None:
    """Byte by byte, and without a newline. One that ends the input is removed."""
    odd = ODD_PASSPHRASE
    assert len(odd.encode()) == 512
    assert machine.ask("disk root", odd).unlock(f"{odd}\n")["outcome"] == "unlocked"
    assert machine.received() == [odd.encode()]
    with machine.ask("disk root", odd).waker() as started:
        started.client.start(odd)
        assert wait_until(started.client, "booting")["outcome"] == "unlocked"
    assert machine.received() == [odd.encode()]


@pytest.mark.parametrize("given", ["", "two\n\n", "x" * 2000, "\x07"], ids=len)
def test_input_that_is_no_passphrase_is_an_error(machine: Machine, given: str) -> None:
    result = machine.ask().unlock(given)
    assert (result["outcome"], result["sent"]) == ("error", False)
    assert "512" in result["message"]
    assert machine.commands() == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_before_it_sends(machine: Machine, ending: int) -> None:
    with unlocking(machine.ask("sleep 60").settings()) as child:
        child.give(PASSPHRASE)
        wait_for(machine.commands)
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


def test_an_unlock_survives_its_terminal_if_that_is_wanted(machine: Machine) -> None:
    """As with nohup, or in a shell script that ignores the signal."""
    settings = machine.ask(f"{SOON}; disk root").settings()
    with unlocking(settings, by=["env", "--ignore-signal=HUP"]) as child:
        child.give(PASSPHRASE)
        wait_for(machine.commands)
        child.process.send_signal(signal.SIGHUP)
        machine.touch("go")
        assert child.finish()["outcome"] == "unlocked"


def test_a_person_may_take_time_to_type(tmp_path: Path) -> None:
    with unlocking(settings_at(tmp_path, free_port()), seconds=6) as child:
        time.sleep(7)
        child.give(PASSPHRASE)
        assert child.finish()["outcome"] == "not_asked"


def test_output_from_before_the_answer_is_not_a_verdict(machine: Machine) -> None:
    machine.ask(f"{ONCE}; asks root; {SOON}; seq 9999; opens root; echo >said; take")
    with about_to_send(machine.settings()) as child:
        machine.touch("go")
        wait_for(machine.folder.joinpath("said").exists)
        time.sleep(1)  # for its thread to take what has arrived
        assert child.finish()["outcome"] == "not_confirmed"
    assert machine.received() == [RIGHT]


# ---- To the right server only --------------------------------------------------------

REFUSED = {
    "another user": (
        {"SSH_USER": "nobody"},
        "key_refused",
        "SHA256:.*nobody.*may be locked",
    ),
    "not pinned": ({"SSH_HOST_KEY": ""}, "error", "pinned"),
    "closed": ({"INITRD_SSH_PORT": "CLOSED"}, "not_asked", "refused"),
    "not SSH": ({"INITRD_SSH_PORT": "WEB"}, "not_asked", "SSH"),
    "silent": ({"INITRD_SSH_PORT": "MUTE"}, "not_asked", ""),
}


@each("settings outcome words", REFUSED)
def test_a_server_that_cannot_be_asked_gets_nothing(
    machine: Machine, settings: dict[str, str], outcome: str, words: str
) -> None:
    machine.ask()
    web = says(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with web as web_port, bind("127.0.0.1", 0) as mute:
        mute.listen()
        ports = {"CLOSED": machine.system_port, "WEB": web_port}
        ports["MUTE"] = mute.getsockname()[1]
        values = {
            name: str(ports.get(value, value)) for name, value in settings.items()
        }
        result = machine.unlock(**values)
    assert (result["outcome"], result["sent"]) == (outcome, False)
    assert re.search(f"{words}.*not sent", result["message"])
    assert machine.commands() == []


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


DIFFERS = "host_key_differs: .*SHA256:.*SHA256:.*not sent"
OTHERS = f"{public_line(OTHER_KEY)},{public_line(new_key())}"
SERVERS = {
    "an impostor": (DROPBEAR, OTHERS, "own port", DIFFERS),
    "an impostor on one port": (DROPBEAR, OTHERS, "one port", DIFFERS),
    "the initrd on one port": (
        *(DROPBEAR, f"{OTHERS},{public_line(HOST_KEY)}", "one port", NO_PROMPT),
    ),
    "the system on one port": (OPENSSH, OTHERS, "one port", "up: "),
}


@each("version pinned ports expected", SERVERS)
def test_waker_logs_in_only_to_an_initrd_whose_host_key_is_pinned(
    tmp_path: Path, version: str, pinned: str, ports: str, expected: str
) -> None:
    server = Liar(version=version)
    with tcp_server(server.serve) as port:
        settings = settings_at(tmp_path, port, SSH_HOST_KEY=pinned)
        is_shared = ports == "one port"
        settings["WAKER_SYSTEM_SSH_PORT"] = str(port if is_shared else free_port())
        message = unlock(settings)
    assert re.match(expected, message)
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


# ---- Networks that fail --------------------------------------------------------------


@contextlib.contextmanager
def serving(liar: Liar, home: Home, folder: Path) -> Iterator[Settings]:
    """Let the liar be the machine at home; yields settings for the router."""
    address = "192.168.77.20"
    with contextlib.ExitStack() as stack:
        at = tcp_server(liar.serve, address)
        port = home[1].run(lambda: stack.enter_context(at))
        yield settings_at(folder, port, HOMELAB_HOST=address)


def test_a_server_that_loses_its_power_is_noticed(home: Home, tmp_path: Path) -> None:
    """Long before the deadline, although there is nothing left to send."""
    router, server, _ = home
    liar = Liar([ASKS, reads, lambda _: ip(f"-n {server.name} link set eth0 down")])
    with serving(liar, home, tmp_path) as settings:
        began = time.monotonic()
        message = router.run(lambda: unlock(settings, seconds=90))
    assert time.monotonic() < began + 60  # by TCP, not by the limit
    assert message.startswith("not_confirmed: ")
    assert liar.received == [RIGHT]


def test_an_unlock_survives_a_network_that_fails(home: Home, tmp_path: Path) -> None:
    """For two seconds, just as the passphrase is sent, which TCP has to repeat."""
    router, server, _ = home
    liar = Liar([ASKS, reads, OPENED])
    with contextlib.ExitStack() as stack:
        settings = stack.enter_context(serving(liar, home, tmp_path))
        starting = about_to_send(settings)
        child = router.run(lambda: stack.enter_context(starting))
        pool = stack.enter_context(ThreadPoolExecutor())
        ip(f"-n {server.name} link set eth0 down")
        result = pool.submit(child.finish)

        def count_repeats() -> int:
            """Return how often TCP has repeated what is not acknowledged."""
            table = Path(f"/proc/{child.process.pid}/net/tcp").read_text()
            port = int(settings["WAKER_INITRD_SSH_PORT"])
            found = re.findall(rf":{port:04X} 01 \S+ \S+ (\S+)", table)
            return max((int(count, 16) for count in found), default=0)

        wait_for(lambda: result.done() or count_repeats() > 2)
        ip(f"-n {server.name} link set eth0 up")
        assert result.result()["outcome"] == "unlocked"
    assert liar.received == [RIGHT]


# ---- Servers that attack -------------------------------------------------------------

SHORT_UNLOCK = 18  # seconds, of which five are reserved for reporting the outcome


def test_success_is_not_believed_if_nothing_could_be_sent(tmp_path: Path) -> None:
    """The server leaves no room in its window, and then reports success."""
    liar = Liar([ASKS, lambda _: time.sleep(1), OPENED], window=0)
    with tcp_server(liar.serve) as port:
        message = unlock(settings_at(tmp_path, port))
    assert message.startswith("not_confirmed: ")
    assert liar.received == []


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


@each("liar pattern", ATTACKS)
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


def test_a_server_that_ignores_the_window_is_cut_off(tmp_path: Path) -> None:
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


def test_a_server_that_says_nothing_is_tried_again(tmp_path: Path) -> None:
    """And nobody is told that its initrd will never ask."""

    def stay_silent(connection: socket.socket) -> None:
        with connection:
            while connection.recv(4096):
                pass

    limits = {"KEX_SECONDS": 1, "READY_SECONDS": 1, "RETRY_SECONDS": 0.1}
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


# ---- Difficult boxes -----------------------------------------------------------------

# Importing paramiko takes long, as it does from an SD card that is busy.
SLOW_IMPORT = """
import sys, time

def wait(event, arguments):
    if event == "import" and arguments[0] == "paramiko":
        time.sleep({})

sys.addaudithook(wait)
"""


SLOW_BOXES = {  # seconds to import it, and to unlock
    "login": (True, 4, 10),
    "port": (False, 2, 6),
}


@each("is_answered slow limit", SLOW_BOXES)
def test_a_box_that_loads_paramiko_slowly(
    tmp_path: Path, *, is_answered: bool, slow: int, limit: int
) -> None:
    """It still reports in time, of which less is left to wait for a silent server."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT.format(slow))
    silent = Liar(moment="login", act=freeze)
    hole = Blackhole("127.0.0.1", silent_port := free_port())
    with tcp_server(silent.serve) as port, contextlib.closing(hole):
        settings = settings_at(tmp_path, port if is_answered else silent_port)
        settings["PYTHONPATH"] = str(tmp_path)
        message = unlock(settings, seconds=limit)
    assert message.startswith("not_asked: ")


# The wall clock, an hour ahead as soon as the file that STEPPED names exists.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now)
{
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, now);
    if (id == CLOCK_REALTIME && access(getenv("STEPPED"), F_OK) == 0)
        now->tv_sec += 3600;
    return result;
}
"""


def test_a_step_of_the_clock_discards_no_verdict(machine: Machine) -> None:
    """A box without a clock of its own sets it when it reaches a time server."""
    stepped = machine.folder / "stepped"
    machine.ask(SLOWLY.replace("sleep 1", "sleep 1; echo >stepped; sleep 0.5"))
    clock = preload(machine.folder, CLOCK) | {"STEPPED": str(stepped)}
    ended = run_waker("unlock", settings=machine.settings() | clock, given=PASSPHRASE)
    assert stepped.exists()
    assert json.loads(ended.stdout.splitlines()[-1])["outcome"] == "unlocked"


def test_an_unlock_works_despite_a_large_stack_limit(machine: Machine) -> None:
    """If threads had stacks of that size, an unlock would run out of memory."""
    limit = need("prlimit"), "--stack=67108864:67108864"
    with daemon(machine.ask().settings(), *limit) as started:
        assert started.client.log_in().unlock().status == 200
