"""A lying server that has the pinned host key, and an impostor that does not."""

import contextlib
import os
import re
import socket
import struct
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
    MAC,
    PASSPHRASE,
    PIN,
    Answer,
    Client,
    daemon,
    need,
    no_threads,
    run_waker,
    running,
    wait_for,
    wait_for_child,
)
from homelab import DROPBEAR
from paramiko.common import AUTH_SUCCESSFUL, OPEN_SUCCEEDED
from ssh_servers import HOST_KEY, Serve, free_port, machine_at, tcp_server, unlock

import waker

Step = str | Callable[[paramiko.Channel], bytes | None]
Runs = Sequence[Sequence[Step]]
ECHOED = "correct-horse"  # a passphrase that looks like the name of a disk
PEAK = 100  # MB of memory that an unlock may take at most
BIG = 80 << 20  # bytes: more than an unlock may allocate
FLOOD = "x" * 70 + "\n"
UNSENT = r"The passphrase was not sent\."
DOUBT = r"Not confirmed: the passphrase was sent, but "
WATCH = "; watch GET /api/status"
NO_VERDICT = f"{DOUBT}the initrd did not confirm it"
NO_MEMORY = f"Failed to unlock: out of memory.* {UNSENT}"


@dataclass
class Liar(paramiko.ServerInterface):
    """An SSH server with the pinned host key; its command prints what a test wants.

    Each run of the command plays the next row of `runs`; the last row repeats. A step
    is either text to send or a function to call.
    """

    runs: Runs = ()
    # When it sends a big packet: `keys`, `login`, `channel`, or `next channel`.
    bursts_at: str = ""
    window: int | None = None  # bytes that a client may send
    received: list[bytes] = field(default_factory=list)  # one item per answer
    _number: int = -1
    _transport: Any = None

    def serve(self, connection: socket.socket) -> None:
        self._number = -1
        self._transport = paramiko.Transport(connection)
        self._transport.local_version = DROPBEAR
        self._transport.add_server_key(HOST_KEY)
        if self.window is not None:
            self._transport.default_window_size = self.window
        done = threading.Event()
        self._transport.start_server(done, self)
        done.wait(20)  # seconds
        self._burst("keys")

    def _burst(self, moment: str) -> None:
        if moment == self.bursts_at:
            with contextlib.suppress(EOFError):  # the client has gone
                send_big_packet(self._transport)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self._burst("login")
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        self._burst("channel" if self._number < 0 else "next channel")
        return OPEN_SUCCEEDED

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        self._number += 1
        run = self.runs[min(self._number, len(self.runs) - 1)]
        threading.Thread(target=self._play, args=(channel, run), daemon=True).start()
        return True

    def _play(self, channel: paramiko.Channel, run: Sequence[Step]) -> None:
        with contextlib.suppress(OSError, EOFError):  # the client has gone
            for step in run:
                if isinstance(step, str):
                    channel.sendall(step.encode())
                elif answer := step(channel):
                    self.received.append(answer)
            channel.send_exit_status(1)
            channel.shutdown_write()  # closing could overtake the reply to exec


def reads(channel: paramiko.Channel) -> bytes:
    """Read until the end of a line or of the input."""
    answer = b""
    while not answer.endswith(b"\n") and (data := channel.recv(1024)):
        answer += data
    return answer.removesuffix(b"\n")


def asks(disk: str) -> str:
    return f"Please unlock disk {disk}\n"


def opened(disk: str) -> str:
    return f"cryptsetup: {disk} set up successfully\n"


def rejected() -> str:
    return "cryptsetup: cryptsetup failed, bad password or options?\n"


def send_unasked(channel: paramiko.Channel) -> None:
    """Send 200 MB, ignoring that SSH's window is full after two."""
    for _ in range(200):
        channel.out_window_size = 1 << 40
        channel.sendall(FLOOD.encode() * 14979)


def send_big_packet(transport: Any) -> None:
    """Send the first block of a packet of 80 MB, encrypted by AES in counter mode."""
    packetizer = transport.packetizer
    cipher = packetizer._Packetizer__block_engine_out  # noqa: SLF001
    # SSH allows only sizes that are twelve more than a multiple of 16.
    with packetizer._Packetizer__write_lock:  # noqa: SLF001
        packetizer.write_all(cipher.update(struct.pack(">I", BIG + 12) + bytes(12)))


def send_big(channel: paramiko.Channel) -> None:
    send_big_packet(channel.get_transport())


def stay(_: paramiko.Channel) -> None:
    time.sleep(30)  # seconds; the client disconnects earlier


@contextlib.contextmanager
def api_for(folder: Path, serve: Serve) -> Iterator[Client]:
    """Run a daemon whose machine is a TCP server; yields a client with a token."""
    with tcp_server(serve) as port:
        machine = machine_at(folder, port)._replace(system_port=free_port())
        settings = {"WAKER_PIN": PIN} | MAC | machine.settings()
        with running(waker.read_config(settings, folder)) as client:
            yield client.log_in()


def start(client: Client, passphrase: str) -> Any:
    """Start, and wait until the passphrase was sent or the start has ended."""
    assert client.start(passphrase).status == 200
    ended = "booting", "done", "failed"
    return wait_for(lambda: client.status()["start"], lambda now: now["phase"] in ended)


def measure(call: Callable[[], Answer]) -> tuple[Answer, float]:
    """Make a request that unlocks; returns the answer and the child's peak in MB."""
    peak = 0
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(call)
        status = Path(f"/proc/{wait_for_child(os.getpid())}/status")
        while not answer.done():
            with contextlib.suppress(OSError):  # it has ended
                found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
                peak = max(peak, int(found[1]) if found else 0)
            time.sleep(0.002)
        assert peak
        return answer.result(), peak / 1024


MANY = [f"disk{number:02}" for number in range(40)]
SIXTEEN = ", ".join(MANY[:16])
LONG = [f"{number}-{'n' * 300}" for number in range(16)]
CASES: dict[str, tuple[str, Runs, int, str, int]] = {
    # passphrase, runs, status, message, answers
    "another disk opens": (
        PASSPHRASE,
        *([(asks("root"), reads, opened("other"))], 500, NO_VERDICT, 1),
    ),
    "another disk opens first": (
        PASSPHRASE,
        [(asks("root"), reads, opened("other"), opened("root")), ()],
        *(200, r"Unlocked: root\.", 1),
    ),
    "asks again after its own success": (
        PASSPHRASE,
        [(asks("root"), reads, opened("root"))],
        *(500, f"{DOUBT}a disk is still asking; unlocked: root", 1),
    ),
    "the second disk rejects": (
        PASSPHRASE,
        [(asks("root"), reads, opened("root")), (asks("home"), reads, rejected())],
        *(400, r"Wrong passphrase for disk home; unlocked: root\.", 2),
    ),
    "asks endlessly": (
        PASSPHRASE,
        [(asks(name), reads, opened(name)) for name in MANY],
        500,
        f"{DOUBT}a disk is still asking; unlocked: {SIXTEEN}",
        16,
    ),
    "sixteen disks": (
        PASSPHRASE,
        [*((asks(name), reads, opened(name)) for name in MANY[:16]), ()],
        *(200, rf"Unlocked: {SIXTEEN}\.", 16),
    ),
    "repeats the passphrase": (
        ECHOED,
        [
            (asks("root"), reads, opened(ECHOED), opened("root")),
            (asks(f"x{ECHOED}y"), reads, rejected()),
        ],
        *(400, r"Wrong passphrase for disk \(hidden\); unlocked: root\.", 2),
    ),
    "repeats the passphrase in its own words": (
        "stäple of ,, a, b",
        [("cryptroot-unlock: no x stäple of ,, a, by\n",)],
        *(500, rf"Failed to unlock: the initrd reports: \(hidden\)\. {UNSENT}", 0),
    ),
    "repeats it as two names": (
        "alpha, beta",
        [
            (asks("alpha"), reads, opened("alpha")),
            (asks("beta"), reads, opened("beta")),
            (),
        ],
        *(200, r"Unlocked: \(hidden\)\.", 2),
    ),
    "says more than fits": (
        PASSPHRASE,
        [("cryptroot-unlock: " + "n" * 10_000,)],
        *(500, f"Failed to unlock: the initrd reports: n{{200}}\\. {UNSENT}", 0),
    ),
    "disks that differ in one letter": (
        PASSPHRASE,
        [
            (asks("dä"), reads, opened("dä")),
            (asks("dö"), reads, opened("dö")),
            (),
        ],
        *(200, r"Unlocked: dä, dö\.", 2),
    ),
    "half a letter, and a control character": (
        PASSPHRASE,
        [(f"{asks('x')[:-1]}\x9f\n", reads, opened("x")), ()],
        *(200, r"Unlocked: x\.", 1),
    ),
    "a nameless disk": (
        PASSPHRASE,
        [(asks(""),)],
        *(500, f"Failed to unlock: the unlock command ended.* {UNSENT}", 0),
    ),
    "sixteen long names": (
        PASSPHRASE,
        [*((asks(name), reads, opened(name)) for name in LONG), ()],
        *(200, r"Unlocked: .{600}\.", 16),
    ),
    "writes too much after its success": (
        PASSPHRASE,
        [
            (asks("root"), reads, opened("root"), FLOOD * 20_000),
            (asks("home"), reads, opened("home")),
        ],
        *(200, r"Unlocked: root\.", 1),
    ),
    "has the passphrase in its name": (
        "crypt",
        [(asks("nvme0n1p3_crypt"), reads, opened("nvme0n1p3_crypt")), ()],
        *(200, r"Unlocked: \(hidden\)\.", 1),
    ),
    "says everything in advance": (
        PASSPHRASE,
        [(asks("root") + opened("root"), reads)],
        *(500, NO_VERDICT, 1),
    ),
    "says half of it in advance": (
        PASSPHRASE,
        [(asks("root") + opened("root")[:25], reads, opened("root")[25:])],
        *(500, NO_VERDICT, 1),
    ),
    "opened and rejected before it asks": (
        PASSPHRASE,
        [(opened("root") + rejected() + asks("root"), reads, opened("root")), ()],
        *(200, r"Unlocked: root\.", 1),
    ),
    "ends without a line end": (
        PASSPHRASE,
        [(asks("root"), reads, opened("root").strip()), ()],
        *(200, r"Unlocked: root\.", 1),
    ),
    "rejects in advance": (
        PASSPHRASE,
        [(asks("root") + rejected(), reads)],
        *(500, NO_VERDICT, 1),
    ),
    "a name of 60 KB": (
        PASSPHRASE,
        [(asks("n" * 60_000), reads, opened("n" * 60_000)), ()],
        *(200, r"Unlocked: n{200}\.", 1),
    ),
    "names of 60 KB that differ at the end": (
        PASSPHRASE,
        [(asks("n" * 60_000), reads, opened("n" * 59_999))],
        *(500, NO_VERDICT, 1),
    ),
    "a name of 200 KB": (
        PASSPHRASE,
        [(asks("n" * 200_000),)],
        *(500, f"Failed to unlock: the unlock command ended.* {UNSENT}", 0),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_lying_server_gains_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], case: Any
) -> None:
    passphrase, runs, status, pattern, answers = case
    liar = Liar(runs)
    with api_for(tmp_path, liar.serve) as client:
        answer = client.unlock(passphrase)
        assert answer.status == status, answer.body
        message = str(answer.json.get("error") or answer.json["message"])
        assert re.fullmatch(pattern, message.removesuffix(WATCH)), message
        assert len(message) <= 1000
        assert liar.received == [passphrase.encode()] * answers
    log = capfd.readouterr().err
    assert waker.printable(message) in log  # all of it
    for secret in passphrase, waker.printable(passphrase):
        assert secret not in message + log


def test_a_start_reports_a_lie_as_an_unlock_does(tmp_path: Path) -> None:
    """An unconfirmed unlock is watched; any other lie ends the start as failed."""
    liar = Liar([(asks("root"), reads, opened(ECHOED))])
    with api_for(tmp_path, liar.serve) as client:
        status = start(client, ECHOED)
        assert (status["phase"], status["outcome"]) == ("booting", "not_confirmed")
        assert re.fullmatch(NO_VERDICT + r"\.", status["message"])
        liar.runs = [(asks(ECHOED), reads, rejected())]
        status = start(client, ECHOED)
        assert status["outcome"] == "wrong_passphrase"
        assert status["message"] == "Wrong passphrase for disk (hidden)."
        assert liar.received == [ECHOED.encode()] * 2


def test_output_from_before_the_answer_is_not_a_verdict(tmp_path: Path) -> None:
    more = threading.Event()

    def pause(_: paramiko.Channel) -> None:
        more.wait(60)  # seconds, at most

    liar = Liar([(asks("root"), pause, opened("root"), reads)])
    with tcp_server(liar.serve) as port:
        machine = machine_at(tmp_path, port)
        with contextlib.closing(waker.open_transport(machine)) as transport:
            waker.exchange_keys(transport, machine)
            waker.log_in(transport, machine)
            command = waker.Command(transport)
            until = time.monotonic() + 60
            assert command.next_event(until) == (waker.Outcome.ASKS, "root")
            more.set()
            wait_for(command._channel.recv_ready)  # noqa: SLF001
            given = waker.Passphrase(PASSPHRASE)
            assert command.answer(given, "root", until) is waker.Outcome.ENDED


@pytest.mark.parametrize(
    ("run", "pattern"),
    [
        ([FLOOD * 20_000, stay], f"Failed to unlock: the .* too much text.* {UNSENT}"),
        ([asks("d"), reads, FLOOD * 20_000, stay], NO_VERDICT),
        ([send_unasked], f"Failed to unlock: the .* too much text.* {UNSENT}"),
        ([asks("d"), reads, send_unasked], NO_VERDICT),
        ([send_big], NO_MEMORY),
        (
            [asks("d"), reads, send_big],
            f"{DOUBT}waker ran out of memory before the initrd confirmed it",
        ),
    ],
    ids=["text", "late", "no window", "no window, late", "packet", "packet, late"],
)
def test_too_much_output_ends_the_connection(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], run: list[Step], pattern: str
) -> None:
    liar = Liar([run])
    with api_for(tmp_path, liar.serve) as client:
        began = time.monotonic()
        answer, peak = measure(client.unlock)
        assert re.fullmatch(pattern, answer.error.removesuffix(WATCH)), answer.error
        assert peak <= PEAK
        assert time.monotonic() - began < 30
        assert len(liar.received) == run.count(reads)
    assert "Traceback" not in capfd.readouterr().err


def test_too_much_output_without_a_prompt_means_that_no_disk_asked(
    tmp_path: Path,
) -> None:
    liar = Liar([(FLOOD * 20_000, stay)])
    with tcp_server(liar.serve) as port:
        message = unlock(machine_at(tmp_path, port))
    assert message.startswith("not_asked: the unlock command wrote too much text")


@pytest.mark.parametrize("moment", ["keys", "login", "channel"])
def test_running_out_of_memory_is_not_reported_as_a_refusal(
    tmp_path: Path, moment: str
) -> None:
    liar = Liar([(stay,)], bursts_at=moment)
    with api_for(tmp_path, liar.serve) as client:
        assert re.fullmatch(NO_MEMORY, client.unlock().error)


def test_running_out_of_memory_later_unsays_no_success(tmp_path: Path) -> None:
    liar = Liar([(asks("root"), reads, opened("root"))], bursts_at="next channel")
    with api_for(tmp_path, liar.serve) as client:
        answer = client.unlock()
        assert answer.json == {"success": True, "message": "Unlocked: root."}


def make_room(channel: Any) -> None:
    """Open the window, so that the client may send."""
    packet = paramiko.Message()
    packet.add_byte(paramiko.common.cMSG_CHANNEL_WINDOW_ADJUST)
    packet.add_int(channel.remote_chanid)
    packet.add_int(1000)
    channel.transport._send_user_message(packet)  # noqa: SLF001


def pause(_: paramiko.Channel) -> None:
    time.sleep(1)


@pytest.mark.parametrize("late", [(), (make_room, reads)], ids=["never", "afterwards"])
def test_success_is_not_believed_if_the_passphrase_could_not_be_sent(
    tmp_path: Path, late: Sequence[Step]
) -> None:
    """The server leaves no room in its window, and then reports success."""
    liar = Liar([(asks("root"), pause, opened("root"), *late), ()], window=0)
    with api_for(tmp_path, liar.serve) as client:
        assert re.fullmatch(NO_VERDICT + WATCH, client.unlock().error)
    assert liar.received == []


def impostor(size: int) -> Serve:
    """Announce a packet of `size` bytes, and send it for at most ten seconds."""

    def serve(connection: socket.socket) -> None:
        deadline = time.monotonic() + 10
        with connection, contextlib.suppress(OSError):  # the client has gone
            connection.sendall(f"{DROPBEAR}\r\n".encode() + struct.pack(">I", size))
            sent = 0
            while sent < size and time.monotonic() < deadline:
                sent += connection.send(bytes(min(size - sent, 1 << 16)))

    return serve


# SSH allows only sizes that are four more than a multiple of eight.
@pytest.mark.parametrize(
    "size",
    [(200 << 20) + 4, (1 << 32) - 4, (36 << 20) + 4],
    ids=["200 MB", "4 GB", "36 MB"],
)
def test_an_impostor_cannot_exhaust_the_box(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], size: int
) -> None:
    with api_for(tmp_path, impostor(size)) as client:
        answer, peak = measure(client.unlock)
        assert re.fullmatch(NO_MEMORY, answer.error), answer.error
        assert peak <= PEAK
        status = start(client, PASSPHRASE)
        assert status["outcome"] == "error"
        assert re.fullmatch(f"out of memory.* {UNSENT}", status["message"])
        config = client.app.config if client.app else None
        assert config
        settings = {"WAKER_PIN": PIN} | MAC | config.machine.settings()
        table = run_waker("check", settings=settings).stdout
        assert re.search("WRONG +host key +out of memory", table), table
    assert "Traceback" not in capfd.readouterr().err


def test_an_unlock_works_despite_a_large_stack_limit(tmp_path: Path) -> None:
    """If threads had stacks of that size, an unlock would run out of memory."""
    liar = Liar([(asks("d"), reads, opened("d")), ()])
    with tcp_server(liar.serve) as port:
        machine = machine_at(tmp_path, port)._replace(system_port=free_port())
        command = [need("prlimit"), "--stack=67108864:67108864"]
        with daemon(MAC | machine.settings(), *command) as box:
            answer = box.client.log_in().unlock()
            assert answer.json == {"success": True, "message": "Unlocked: d."}


def test_a_thread_that_cannot_start_is_reported(tmp_path: Path) -> None:
    with tcp_server(impostor(0)) as port:
        machine = machine_at(tmp_path, port)
        deadline = time.monotonic() + 60
        with no_threads():
            given = waker.Passphrase("x")
            result = waker.unlock(machine, given, deadline, pytest.fail)
    assert re.fullmatch(f"out of memory.* {UNSENT}", result.message)
