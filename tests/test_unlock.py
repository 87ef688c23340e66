"""Unlocks beyond test_promises.py: other servers, bad moments, and servers that lie."""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import paramiko
import pytest
from conftest import (
    CHECKOUT,
    MAC,
    MODULE,
    PASSPHRASE,
    PIN,
    Answer,
    Daemon,
    daemon,
    environment,
    need,
    run_waker,
    shortened,
    stepping_clock,
    wait_for,
    wait_for_child,
)
from homelab import DROPBEAR, OPENSSH, new_key, public_line
from machine import WORDS, Machine
from ssh_servers import (
    HOST_KEY,
    SHORT_UNLOCK,
    Liar,
    Serve,
    Settings,
    Step,
    free_port,
    openssh,
    reads,
    settings_at,
    tcp_server,
    unlock,
)

import waker

OTHER_KEY = new_key()
OTHER = public_line(OTHER_KEY)
RIGHT = PASSPHRASE.encode()
NO_COMMAND = "error: no unlock command can run"
ONCE = "[ -e root.open ] && exit; echo >root.open"


# ---- Other servers -------------------------------------------------------------------


def test_openssh_may_be_the_initrds_server(tmp_path: Path) -> None:
    """test_promises.py has dropbear."""
    script = tmp_path / "cryptroot-unlock"
    script.write_text(f"{WORDS}disk root; disk data")
    (tmp_path / "right").write_text(RIGHT.hex())
    with openssh(tmp_path, f"exec sh {script}") as settings:
        pinned = settings["WAKER_SSH_HOST_KEY"]
        settings["WAKER_SSH_HOST_KEY"] = f"{OTHER},{pinned}"
        assert unlock(settings, "x").startswith("wrong_passphrase: ")
        assert unlock(settings) == "unlocked: Unlocked: root, data."
        assert unlock(settings).startswith("already_open: ")
    received = (tmp_path / "received").read_text().split()
    assert received == [b"x".hex(), RIGHT.hex(), RIGHT.hex()]


def test_openssh_is_told_from_an_impostor_and_may_refuse(tmp_path: Path) -> None:
    other = tmp_path / "other"
    OTHER_KEY.write_private_key_file(str(other))
    prints = [waker.fingerprint(key.asbytes()) for key in (OTHER_KEY, HOST_KEY)]
    with openssh(tmp_path, "/missing") as settings:
        said = unlock(settings | {"WAKER_SSH_HOST_KEY": OTHER})
        assert said.startswith("host_key_differs: ")
        assert "pinned {}, seen {}".format(*prints) in said
        said = unlock(settings | {"WAKER_SSH_KEY": str(other)})
        assert said.startswith("key_refused: ")
        assert prints[0] in said
        assert unlock(settings).startswith(NO_COMMAND)


def test_tinyssh_is_reported_as_sharing_no_algorithm(tmp_path: Path) -> None:
    keys, program = tmp_path / "tinyssh", need("tinysshd")
    subprocess.run([need("tinysshd-makekey"), keys], check=True)

    def serve(tcp: socket.socket) -> None:
        with tcp:  # as inetd does
            number = tcp.fileno()
            subprocess.run([program, keys], stdin=number, stdout=number, check=False)

    with tcp_server(serve) as port:
        assert "shares no algorithm" in unlock(settings_at(tmp_path, port))


def test_an_impostor_gets_no_login(tmp_path: Path) -> None:
    """A server with several host keys is none: the type that is pinned is asked for."""
    pinned = paramiko.RSAKey.generate(2048)  # the type that paramiko likes least
    server = Liar(keys=(new_key(), pinned))
    with tcp_server(server.serve) as port:
        assert unlock(settings_at(tmp_path, port)).startswith("host_key_differs: ")
        assert server.users == []
        assert unlock(settings_at(tmp_path, port, pinned)).startswith(NO_COMMAND)
    assert server.users == ["root"]


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])  # other tests use ECDSA
def test_waker_logs_in_as_the_configured_user_with_any_kind_of_key(
    tmp_path: Path, kind: str
) -> None:
    key, server = tmp_path / "own_key", Liar()
    make = [need("ssh-keygen"), "-q", "-t", kind, "-N", "", "-f", str(key)]
    subprocess.run(make, check=True)
    with tcp_server(server.serve) as port:
        settings = settings_at(tmp_path, port, SSH_USER="admin", SSH_KEY=key)
        assert unlock(settings).startswith(NO_COMMAND)
    assert server.users == ["admin"]


@pytest.mark.parametrize(
    ("version", "outcome"), [(OPENSSH, "up"), (DROPBEAR, "host_key_differs")]
)
def test_on_one_port_for_both_only_dropbear_can_be_an_impostor(
    tmp_path: Path, version: str, outcome: str
) -> None:
    server = Liar(version=version)
    with tcp_server(server.serve) as port:
        said = unlock(settings_at(tmp_path, port, OTHER_KEY, SYSTEM_SSH_PORT=port))
    assert (said.partition(":")[0], server.users) == (outcome, [])


def sends(data: bytes) -> Serve:
    """Send the data, and nothing more."""
    held: list[socket.socket] = []  # connections to keep open

    def serve(connection: socket.socket) -> None:
        held.append(connection)
        connection.sendall(data)

    return serve


@contextlib.contextmanager
def connected(folder: Path) -> Iterator[paramiko.Transport]:
    """Connect in this process, and go no further."""
    with tcp_server(sends(b"SSH-2.0-x\r\n")) as port:
        settings = settings_at(folder, port)
        config = waker.read_config(settings, Path(), waker.UNLOCK_SETTINGS)
        with contextlib.closing(waker.open_transport(config, 60)) as transport:
            yield transport


def test_no_weak_algorithm_is_offered(tmp_path: Path) -> None:
    """`make test-paramiko` sees this with an older one, which would offer more."""
    with connected(tmp_path) as transport:
        options = transport.get_security_options()
    for kind in ("kex", "key_types", "ciphers", "digests"):
        names = getattr(options, kind)
        assert names
        assert not re.search(r"sha1|md5|cbc|dss|\bssh-rsa", " ".join(names))


def test_a_machine_that_loses_its_power_is_noticed_in_ten_seconds(
    tmp_path: Path,
) -> None:
    with connected(tmp_path) as transport:
        assert isinstance(transport.sock, socket.socket)
        options = (
            *(socket.SO_KEEPALIVE, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL),
            socket.TCP_USER_TIMEOUT,
        )
        levels = socket.SOL_SOCKET, *[socket.IPPROTO_TCP] * 3
        found = [*map(transport.sock.getsockopt, levels, options)]
    assert found == [1, 5, 1, 10_000]  # the last in milliseconds, others in seconds


# ---- Just before the passphrase leaves -----------------------------------------------


class Unlocking:
    """`waker unlock` as a process, whose standard output is a full pipe.

    So it stops when it is about to send the passphrase, until somebody reads that.
    """

    def __init__(self, settings: Settings, seconds: int) -> None:
        self.output, its = os.pipe()
        os.write(its, b"\n" * fcntl.fcntl(its, fcntl.F_SETPIPE_SZ, 1))
        default = "env", "--default-signal=INT,HUP"  # nohup would ignore them
        self.process = subprocess.Popen(
            [*default, *MODULE, "unlock", f"--seconds={seconds}"],
            cwd=CHECKOUT,
            env=environment(settings),
            stdin=subprocess.PIPE,
            stdout=its,
            stderr=subprocess.PIPE,
        )
        os.close(its)

    def give(self, passphrase: str = PASSPHRASE) -> None:
        assert self.process.stdin
        self.process.stdin.write(passphrase.encode())
        self.process.stdin.close()

    def is_about_to_send(self) -> bool:
        """Return whether it ignores SIGTERM."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"SigIgn:\t(\w+)", status)
        return bool(found and int(found[1], 16) & 1 << signal.SIGTERM - 1)

    def finish(self) -> tuple[str, str]:
        """Read to its end; returns what it printed, and its standard error."""
        with open(self.output, closefd=False) as output:
            printed = output.read().lstrip("\n")
        assert self.process.stderr
        self.process.wait(60)
        return printed, self.process.stderr.read().decode()


@contextlib.contextmanager
def unlocking(settings: Settings, seconds: int = 60) -> Iterator[Unlocking]:
    """Run `waker unlock`; whoever wants it to begin must give it a passphrase."""
    child = Unlocking(settings, seconds)
    with child.process:
        try:
            yield child
        finally:
            child.process.kill()
            os.close(child.output)


@contextlib.contextmanager
def about_to_send(
    settings: Settings, given: str = PASSPHRASE, seconds: int = 60
) -> Iterator[Unlocking]:
    """Run `waker unlock` until a disk has asked, and nothing was sent yet."""
    with unlocking(settings, seconds) as child:
        child.give(given)
        wait_for(child.is_about_to_send)
        yield child


SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


@pytest.mark.parametrize("ending", SIGNALS, ids=lambda ending: ending.name)
def test_a_signal_ends_it_before_it_sends(
    machine: Machine, ending: signal.Signals
) -> None:
    with unlocking(machine.ask("sleep 60").settings()) as child:
        child.give()
        wait_for(machine.has_run)
        child.process.send_signal(ending)
        printed, complaints = child.finish()
    assert ('"sent": true' in printed, complaints) == (False, "")
    assert child.process.returncode in (1, -ending)


def test_no_signal_ends_it_once_it_sends(machine: Machine) -> None:
    """Nobody could know whether the disk is open."""
    machine.ask(
        f"{ONCE}; asks root; take; until [ -e go ]; do sleep 0.1; done; opens root"
    )
    with about_to_send(machine.settings()) as child:
        for ending in SIGNALS:
            child.process.send_signal(ending)
        assert machine.received() == []
        os.read(child.output, 1 << 16)  # so that it goes on
        wait_for(machine.received, lambda seen: seen == [RIGHT])
        for ending in SIGNALS:
            child.process.send_signal(ending)
        machine.folder.joinpath("go").touch()
        printed, complaints = child.finish()
    assert json.loads(printed.splitlines()[-1])["outcome"] == "unlocked"
    assert (child.process.returncode, complaints) == (0, "")


def test_nothing_is_sent_if_nobody_reads_that_it_is(machine: Machine) -> None:
    machine.ask("asks root; take; echo >ended")
    with about_to_send(machine.settings()) as child:
        nobody = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nobody, child.output)
        os.close(nobody)
        assert child.finish() == ("", "")
        assert child.process.returncode > 1
    wait_for(machine.folder.joinpath("ended").exists)
    assert machine.received() == []


def test_output_from_before_the_answer_is_not_a_verdict(machine: Machine) -> None:
    wait = "until [ -e more ]; do sleep 0.1; done"
    machine.ask(f"{ONCE}; asks root; {wait}; opens root 2>&1; echo >said; take")
    with about_to_send(machine.settings()) as child:
        machine.folder.joinpath("more").touch()
        wait_for(machine.folder.joinpath("said").exists)
        time.sleep(1)  # for its thread to take what has arrived
        result = json.loads(child.finish()[0].splitlines()[-1])
    assert result["outcome"] == "not_confirmed"
    assert machine.received() == [RIGHT]


def make_room(channel: Any) -> None:
    """Open the window, so that the client may send."""
    packet = paramiko.Message()
    packet.add_byte(paramiko.common.cMSG_CHANNEL_WINDOW_ADJUST)
    packet.add_int(channel.remote_chanid)
    packet.add_int(1000)
    channel.transport._send_user_message(packet)  # noqa: SLF001


ASKS = "Please unlock disk root\n"
OPENED = "cryptsetup: root set up successfully\n"


@pytest.mark.parametrize("late", [(), (make_room, reads)], ids=["never", "afterwards"])
def test_success_is_not_believed_if_the_passphrase_could_not_be_sent(
    tmp_path: Path, late: Sequence[Step]
) -> None:
    """The server leaves no room in its window, and then reports success."""

    def pause(_: paramiko.Channel) -> None:
        time.sleep(1)

    liar = Liar([(ASKS, pause, OPENED, *late), ()], window=0)
    with tcp_server(liar.serve) as port:
        assert unlock(settings_at(tmp_path, port)).startswith("not_confirmed: ")
    assert liar.received == []


# ---- Servers that lie ----------------------------------------------------------------


class Lie(NamedTuple):
    """What an initrd's command does, and how often it gets the passphrase."""

    script: str
    message: str
    answers: int = 1
    passphrase: str = PASSPHRASE


ECHOED = "correct-horse"  # a passphrase that looks like the name of a disk
NAME = "n" * 200
LONG = "7" * 60_000
LIES = {
    "another disk opens first": Lie(
        f"{ONCE}; asks root; take; opens other; opens root", r"Unlocked: root\."
    ),
    "repeats the passphrase": Lie(
        f"[ -e root.open ] || {{ opens {ECHOED} 2>&1; disk root; }};"
        f" asks x{ECHOED}y; take; rejects",
        *(r"Wrong passphrase for disk \(hidden\); unlocked: root\.", 2, ECHOED),
    ),
    "repeats the passphrase in its own words": Lie(
        "echo 'cryptroot-unlock: no x stäple of ,, a, by'",
        *(
            r".*: the initrd reports: \(hidden\)\. .* not sent\.",
            0,
            "stäple of ,, a, b",
        ),
    ),
    "repeats it as two names": Lie(
        "disk alpha; disk beta", r"Unlocked: \(hidden\)\.", 2, "alpha, beta"
    ),
    "says more than fits": Lie(
        f"echo cryptroot-unlock: {'n' * 10_000}",
        *(r".*: the initrd reports: n{200}\. The passphrase was not sent\.", 0),
    ),
    "disks that differ in one letter": Lie(
        "disk dä; disk dö", r"Unlocked: dä, dö\.", 2
    ),
    "sixteen long names": Lie(
        f"for n in $(seq 10 25); do disk ${{n}}{NAME}; done", r"Unlocked: .{600}\.", 16
    ),
    "long names that differ at the end": Lie(
        f"asks {LONG}; take; opens {LONG[1:]}8", ".*initrd did not confirm it.*"
    ),
    "writes much after its success": Lie(
        "[ -e root.open ] || { (disk root); seq 300000; exit; }; disk data",
        *(r"Unlocked: root, data\.", 2),
    ),
    "says half of it in advance": Lie(
        f"{ONCE}; printf 'Please unlock disk root\\ncryptsetup: root set'; take;"
        " echo ' up successfully'",
        ".*initrd did not confirm it.*",
    ),
    "opened and rejected before it asks": Lie(
        f"{ONCE}; {{ opens root; (rejects); }} 2>&1; asks root; take; opens root",
        r"Unlocked: root\.",
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=[*LIES])
def test_a_lying_server_gains_nothing(machine: Machine, lie: Lie) -> None:
    machine.ask(lie.script, lie.passphrase)
    with daemon(machine.settings()) as started:
        answer = started.client.log_in().unlock(lie.passphrase)
        started.stop()
    message = str(answer.json.get("error") or answer.json["message"])
    assert re.fullmatch(lie.message, message), message
    assert len(message) <= 1000
    assert machine.received() == [lie.passphrase.encode()] * lie.answers
    log = "\n".join(started.log)
    assert waker.printable(message) in log  # all of it
    for secret in lie.passphrase, waker.printable(lie.passphrase):
        assert secret not in message + log


# ---- Memory --------------------------------------------------------------------------

PEAK = 100  # MB of memory that an unlock may take at most
BIG = 80 << 20  # bytes: more than an unlock may allocate


def floods(channel: paramiko.Channel) -> None:
    """Write for as long as the client reads."""
    while True:
        channel.sendall(b"x\n" * 5000)
        time.sleep(0.01)


def floods_unasked(channel: paramiko.Channel) -> None:
    """Send without end, ignoring that SSH's window is full after two megabytes."""
    while True:
        channel.out_window_size = 1 << 40
        channel.sendall(b"x\n" * 500_000)


def send_big(channel: Any) -> None:
    send_big_packet(channel.get_transport())


def send_big_packet(transport: Any) -> None:
    """Send the first block of a packet of 80 MB, encrypted by AES in counter mode."""
    packetizer = transport.packetizer
    cipher = packetizer._Packetizer__block_engine_out  # noqa: SLF001
    # SSH allows only sizes that are twelve more than a multiple of 16.
    with packetizer._Packetizer__write_lock:  # noqa: SLF001
        packetizer.write_all(cipher.update(struct.pack(">I", BIG + 12) + bytes(12)))


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


@contextlib.contextmanager
def daemon_for(folder: Path, port: int) -> Iterator[Daemon]:
    """Run a daemon that has a short time to unlock a server, whose system is not up."""
    settings = MAC | settings_at(folder, port, SYSTEM_SSH_PORT=free_port())
    program = shortened(folder, unlock_seconds=SHORT_UNLOCK)
    with daemon(settings, program=program) as started:
        started.client.log_in()
        yield started
    assert "Traceback" not in "\n".join(started.log)


def measure(started: Daemon) -> tuple[Answer, float]:
    """Unlock; returns the answer and the child's peak in MB."""
    peak = 0
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(started.client.unlock)
        status = Path(f"/proc/{wait_for_child(started.process.pid)}/status")
        while not answer.done():
            with contextlib.suppress(OSError):  # it has ended
                found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
                peak = max(peak, int(found[1]) if found else 0)
            time.sleep(0.005)
        assert peak
        return answer.result(), peak / 1024


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ((floods,), "was not sent"),
        ((floods_unasked,), "was not sent"),
        ((ASKS, reads, floods_unasked), "was sent, but"),
        ((ASKS, reads, send_big), "was sent, but"),
    ],
    ids=["text", "early", "late", "late packet"],
)
def test_too_much_output_exhausts_neither_memory_nor_time(
    tmp_path: Path, run: Sequence[Step], words: str
) -> None:
    liar = Liar([run])
    with tcp_server(liar.serve) as port, daemon_for(tmp_path, port) as started:
        began = time.monotonic()
        answer, peak = measure(started)
        assert time.monotonic() - began < SHORT_UNLOCK + 10
    assert answer.status == 500
    assert words in answer.error
    assert peak <= PEAK
    assert liar.received == [RIGHT] * (reads in run)


# SSH allows only sizes that are four more than a multiple of eight.
@pytest.mark.parametrize("size", [(1 << 32) - 4, (36 << 20) + 4], ids=["4 GB", "36 MB"])
def test_an_impostor_cannot_exhaust_the_box(tmp_path: Path, size: int) -> None:
    with tcp_server(impostor(size)) as port:
        with daemon_for(tmp_path, port) as started:
            answer, peak = measure(started)
        assert re.search("hung up.* was not sent", answer.error)
        assert peak <= PEAK
        settings = MAC | {"WAKER_PIN": PIN} | settings_at(tmp_path, port)
        ended = run_waker("check", settings=settings)
        assert re.search("WRONG +host key .*hung up", ended.stdout), ended.stdout
        assert ended.stderr == ""


@pytest.mark.parametrize("moment", ["keys", "login", "channel"])
def test_running_out_of_memory_is_not_reported_as_a_refusal(
    tmp_path: Path, moment: str
) -> None:
    with tcp_server(Liar(acts={moment: send_big_packet}).serve) as port:
        said = unlock(settings_at(tmp_path, port))
    assert re.match("not_asked: .* (hung up|lost).* was not sent", said), said


def test_running_out_of_memory_later_unsays_no_success(tmp_path: Path) -> None:
    liar = Liar([(ASKS, reads, OPENED)], acts={"next channel": send_big_packet})
    with tcp_server(liar.serve) as port:
        assert unlock(settings_at(tmp_path, port)) == "unlocked: Unlocked: root."


def test_an_unlock_works_despite_a_large_stack_limit(machine: Machine) -> None:
    """If threads had stacks of that size, an unlock would run out of memory."""
    limit = need("prlimit"), "--stack=67108864:67108864"
    with daemon(machine.ask().settings(), *limit) as started:
        assert started.client.log_in().unlock().status == 200


# ---- Time ----------------------------------------------------------------------------


def test_a_person_may_take_time_to_type(tmp_path: Path) -> None:
    with unlocking(settings_at(tmp_path, free_port()), seconds=6) as child:
        time.sleep(7)
        child.give()
        assert json.loads(child.finish()[0])["outcome"] == "not_asked"


def test_the_first_disk_may_take_long_to_ask(machine: Machine) -> None:
    machine.ask("[ -e root.open ] || sleep 17; disk root")
    assert machine.unlock()["outcome"] == "unlocked"


def test_a_second_disk_has_15_seconds_to_ask(machine: Machine) -> None:
    machine.ask("disk root; sleep 60")
    with ThreadPoolExecutor() as pool:
        result = pool.submit(machine.unlock)
        wait_for(machine.folder.joinpath("root.open").exists)
        began = time.monotonic()
        assert result.result()["message"] == "Unlocked: root."
    assert 14 < time.monotonic() - began < 40  # for the first one it is 50


@pytest.mark.timeout(40)  # seconds; waiting for the command would take 55
def test_an_endless_command_does_not_delay_the_result(machine: Machine) -> None:
    endless = "while sleep 0.1; do echo x; done"
    machine.ask(f"{ONCE}; asks root; take; opens root; {endless}")
    assert machine.unlock()["outcome"] == "unlocked"


def freeze(_: paramiko.Transport) -> None:
    time.sleep(20)  # seconds; the client disconnects earlier


def hang_up(transport: Any) -> None:
    transport.sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("serve", "expected"),
    [
        (sends(b"SSH-2.0-x\r\n"), "stopped responding, or shares no algorithm"),
        (Liar(acts={"login": freeze}).serve, "stopped responding during login"),
        (Liar(acts={"login": hang_up}).serve, "hung up or stopped .* during login"),
        (Liar(acts={"exec": freeze}).serve, "before a disk asked"),
    ],
    ids=["frozen", "frozen login", "hang-up", "frozen command"],
)
def test_a_server_that_stops_responding_delays_nothing_for_long(
    tmp_path: Path, serve: Serve, expected: str
) -> None:
    with tcp_server(serve) as port:
        said = unlock(settings_at(tmp_path, port), seconds=SHORT_UNLOCK)
    assert re.match(f"not_asked: .*{expected}.* was not sent", said), said


@pytest.mark.parametrize("moment", ["login", "channel", "exec"])
def test_a_step_of_the_clock_ends_no_wait(tmp_path: Path, moment: str) -> None:
    """A box without a clock of its own sets it when it reaches a time server."""
    clock, stepped = stepping_clock(tmp_path)

    def step(_: paramiko.Transport) -> None:
        time.sleep(1)  # until the client waits
        stepped.touch()
        time.sleep(1)

    with tcp_server(Liar(acts={moment: step}).serve) as port:
        assert unlock(settings_at(tmp_path, port) | clock).startswith(NO_COMMAND)
    assert stepped.exists()
