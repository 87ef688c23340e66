"""A lying server that has the pinned host key, and an impostor that does not."""

import contextlib
import json
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
    MODULE,
    PASSPHRASE,
    PIN,
    Answer,
    Daemon,
    daemon,
    need,
    run_waker,
    shortened,
    wait_for_child,
)
from homelab import DROPBEAR
from paramiko.common import AUTH_SUCCESSFUL, OPEN_SUCCEEDED
from ssh_servers import (
    HOST_KEY,
    SHORT_UNLOCK,
    Serve,
    Settings,
    free_port,
    settings_at,
    tcp_server,
    unlock,
)
from test_unlock import about_to_send

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
NO_PROMPT = f"Failed to unlock: logged in, but no disk asked.* {UNSENT}"
NO_VERDICT = f"{DOUBT}the initrd did not confirm it"


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


def floods(channel: paramiko.Channel) -> None:
    """Write for as long as the client reads."""
    while True:
        channel.sendall(FLOOD.encode() * 14979)


def floods_unasked(channel: paramiko.Channel) -> None:
    """Send without end, ignoring that SSH's window is full after two megabytes."""
    while True:
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


def box_settings(folder: Path, port: int) -> Settings:
    """Return a daemon's settings for a server whose system is not up."""
    return MAC | settings_at(folder, port, SYSTEM_SSH_PORT=free_port())


@contextlib.contextmanager
def daemon_for(
    folder: Path, serve: Serve, *command: str, program: tuple[str, ...] = MODULE
) -> Iterator[Daemon]:
    """Run a daemon whose machine is a TCP server; its client has a token."""
    with tcp_server(serve) as port:
        settings = box_settings(folder, port)
        with daemon(settings, *command, program=program) as box:
            box.client.log_in()
            yield box


def measure(box: Daemon) -> tuple[Answer, float]:
    """Unlock; returns the answer and the child's peak in MB."""
    peak = 0
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(box.client.unlock)
        status = Path(f"/proc/{wait_for_child(box.process.pid)}/status")
        while not answer.done():
            with contextlib.suppress(OSError):  # it has ended
                found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
                peak = max(peak, int(found[1]) if found else 0)
            time.sleep(0.002)
        assert peak
        return answer.result(), peak / 1024


MANY = [f"disk{number:02}" for number in range(16)]
LONG = [f"{number}-{'n' * 300}" for number in range(16)]
CASES: dict[str, tuple[str, Runs, int, str, int]] = {
    # passphrase, runs, status, message, answers
    "another disk opens first": (
        PASSPHRASE,
        [(asks("root"), reads, opened("other"), opened("root")), ()],
        *(200, r"Unlocked: root\.", 1),
    ),
    "sixteen disks": (
        PASSPHRASE,
        [*((asks(name), reads, opened(name)) for name in MANY), ()],
        *(200, rf"Unlocked: {', '.join(MANY)}\.", 16),
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
        *(500, NO_PROMPT, 0),
    ),
    "sixteen long names": (
        PASSPHRASE,
        [*((asks(name), reads, opened(name)) for name in LONG), ()],
        *(200, r"Unlocked: .{600}\.", 16),
    ),
    "writes much after its success": (
        PASSPHRASE,
        [
            (asks("root"), reads, opened("root"), FLOOD * 20_000),
            (asks("home"), reads, opened("home")),
            (),
        ],
        *(200, r"Unlocked: root, home\.", 2),
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
        *(500, NO_PROMPT, 0),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_lying_server_gains_nothing(tmp_path: Path, case: Any) -> None:
    passphrase, runs, status, pattern, answers = case
    liar = Liar(runs)
    with daemon_for(tmp_path, liar.serve) as box:
        answer = box.client.unlock(passphrase)
    assert answer.status == status, answer.body
    message = str(answer.json.get("error") or answer.json["message"])
    assert re.fullmatch(pattern, message.removesuffix(WATCH)), message
    assert len(message) <= 1000
    assert liar.received == [passphrase.encode()] * answers
    log = "\n".join(box.log)
    assert waker.printable(message) in log  # all of it
    for secret in passphrase, waker.printable(passphrase):
        assert secret not in message + log


def test_output_from_before_the_answer_is_not_a_verdict(tmp_path: Path) -> None:
    more, said = threading.Event(), threading.Event()

    def wait(_: paramiko.Channel) -> None:
        more.wait(60)  # seconds, at most

    def tell(_: paramiko.Channel) -> None:
        said.set()

    liar = Liar([(asks("root"), wait, opened("root"), tell, reads)])
    with tcp_server(liar.serve) as port:
        with about_to_send(settings_at(tmp_path, port)) as child:
            more.set()
            said.wait(60)
            time.sleep(1)  # for its thread to take what has arrived
            result = json.loads(child.finish()[0].splitlines()[-1])
    assert re.fullmatch(NO_VERDICT + r"\.", result["message"])
    assert liar.received == [PASSPHRASE.encode()]


@pytest.mark.parametrize(
    "flood", [floods, floods_unasked, send_big], ids=["text", "no window", "packet"]
)
@pytest.mark.parametrize(
    ("before", "pattern"),
    [((), f"Failed to unlock: .+ {UNSENT}"), ((asks("d"), reads), f"{DOUBT}.+")],
    ids=["early", "late"],
)
def test_too_much_output_exhausts_neither_memory_nor_time(
    tmp_path: Path, flood: Step, before: Sequence[Step], pattern: str
) -> None:
    liar = Liar([(*before, flood)])
    program = shortened(tmp_path, unlock_seconds=SHORT_UNLOCK)
    with daemon_for(tmp_path, liar.serve, program=program) as box:
        began = time.monotonic()
        answer, peak = measure(box)
        assert answer.status == 500
        assert re.fullmatch(pattern, answer.error.removesuffix(WATCH)), answer.error
        assert peak <= PEAK
        assert time.monotonic() - began < SHORT_UNLOCK + 10
        assert liar.received == [PASSPHRASE.encode()] * (reads in before)
    log = "\n".join(box.log)
    assert "Traceback" not in log
    assert waker.printable(PASSPHRASE) not in log


@pytest.mark.parametrize("moment", ["keys", "login", "channel"])
def test_running_out_of_memory_is_not_reported_as_a_refusal(
    tmp_path: Path, moment: str
) -> None:
    liar = Liar([(reads,)], bursts_at=moment)
    with tcp_server(liar.serve) as port:
        message = unlock(settings_at(tmp_path, port))
    assert re.fullmatch(f"not_asked: .* (hung up|lost).* {UNSENT}", message), message


def test_running_out_of_memory_later_unsays_no_success(tmp_path: Path) -> None:
    liar = Liar([(asks("root"), reads, opened("root"))], bursts_at="next channel")
    with tcp_server(liar.serve) as port:
        assert unlock(settings_at(tmp_path, port)) == "unlocked: Unlocked: root."


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
    with tcp_server(liar.serve) as port:
        message = unlock(settings_at(tmp_path, port))
    assert re.fullmatch(rf"not_confirmed: {NO_VERDICT}\.", message)
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
def test_an_impostor_cannot_exhaust_the_box(tmp_path: Path, size: int) -> None:
    with tcp_server(impostor(size)) as port:
        settings = box_settings(tmp_path, port)
        with daemon(settings) as box:
            box.client.log_in()
            answer, peak = measure(box)
        assert re.fullmatch(f"Failed to unlock: .* hung up.* {UNSENT}", answer.error)
        assert peak <= PEAK
        assert "Traceback" not in "\n".join(box.log)
        ended = run_waker("check", settings=settings | {"WAKER_PIN": PIN})
        assert re.search("WRONG +host key .*hung up", ended.stdout), ended.stdout
        assert ended.stderr == ""


def test_an_unlock_works_despite_a_large_stack_limit(tmp_path: Path) -> None:
    """If threads had stacks of that size, an unlock would run out of memory."""
    liar = Liar([(asks("d"), reads, opened("d")), ()])
    limit = need("prlimit"), "--stack=67108864:67108864"
    with daemon_for(tmp_path, liar.serve, *limit) as box:
        answer = box.client.unlock()
        assert answer.json == {"success": True, "message": "Unlocked: d."}
