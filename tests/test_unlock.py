"""The unlock against real SSH servers: every outcome told as what was seen."""

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import paramiko
import pytest
from conftest import CHECKOUT, MODULE, PASSPHRASE, environment
from cryptroot_unlock import Disks
from homelab import (
    DROPBEAR,
    OPENSSH,
    Blackhole,
    Homelab,
    SshServer,
    bind,
    new_key,
    public_line,
)
from paramiko.common import AUTH_SUCCESSFUL, OPEN_SUCCEEDED
from ssh_servers import (
    SERVERS,
    Initrd,
    free_port,
    paramiko_server,
    prepare,
    tinysshd,
)
from test_daemon import wait_for

import waker

Start = Callable[..., Initrd]
ODD = "-n '$(id)` a\\tb\\0 " + "é" * 244 + "xy \u00a0 "  # 512 bytes


@pytest.fixture(params=SERVERS)
def initrd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts the initrd of each kind of SSH server."""
    with contextlib.ExitStack() as stack:

        def start(disks: Disks | None = None, *, command: bool = True) -> Initrd:
            disks = disks or Disks({"cryptroot": PASSPHRASE})
            server = SERVERS[request.param](tmp_path, disks, command=command)
            return stack.enter_context(server)

        yield start


def unlock(
    machine: waker.Machine,
    passphrase: str = PASSPHRASE,
    seconds: int = 20,
    command: Sequence[str] = (),
) -> waker.Result:
    """Run `waker.py unlock` as the daemon does; returns what is told."""
    began = time.monotonic()
    child = subprocess.run(
        [*command, *MODULE, "unlock", "--seconds", str(seconds)],
        cwd=CHECKOUT,
        env=environment(machine.settings()),
        input=passphrase.encode(),
        capture_output=True,
        timeout=seconds + 5,
        check=False,
    )
    assert child.stderr == b""
    assert time.monotonic() - began < seconds
    *sent, last = map(json.loads, child.stdout.splitlines())
    outcome = waker.Result(**last)
    assert child.returncode == (outcome.outcome != "unlocked")
    assert outcome.sent == bool(sent)
    assert all(line == {"sent": True} for line in sent)
    if outcome.outcome not in ("unlocked", "wrong_passphrase"):
        told = "was sent" if outcome.sent else "was not sent"
        assert outcome.message.endswith(f"The passphrase {told}.")
    return outcome


def test_the_right_passphrase_arrives_exactly_and_unlocks(initrd: Start) -> None:
    machine = initrd()
    outcome = unlock(machine.machine())
    assert outcome == waker.Result("unlocked", True, "Unlocked: cryptroot.")
    assert machine.received() == [PASSPHRASE.encode()]


@pytest.mark.parametrize("passphrase", [" ", ODD])
def test_odd_passphrases_arrive_exactly(tmp_path: Path, passphrase: str) -> None:
    with paramiko_server(tmp_path, Disks({"cryptroot": passphrase})) as machine:
        outcome = unlock(machine.machine(), passphrase)
        assert machine.received() == [passphrase.encode()]
    assert outcome.outcome == "unlocked"


def test_a_wrong_passphrase_is_told_as_wrong(initrd: Start) -> None:
    machine = initrd()
    outcome = unlock(machine.machine(), "wrong")
    assert outcome == waker.Result(
        "wrong_passphrase", True, "Wrong passphrase for disk cryptroot."
    )
    assert machine.received() == [b"wrong"]


def test_two_disks_with_one_passphrase_are_both_unlocked(initrd: Start) -> None:
    machine = initrd(Disks({"root": PASSPHRASE, "home": PASSPHRASE}))
    outcome = unlock(machine.machine())
    assert outcome == waker.Result("unlocked", True, "Unlocked: root, home.")
    assert machine.received() == [PASSPHRASE.encode()] * 2


def test_the_second_disk_is_asked_for_when_the_first_command_has_ended(
    tmp_path: Path,
) -> None:
    disks = Disks({"root": PASSPHRASE, "home": PASSPHRASE}, lingers=True)
    with paramiko_server(tmp_path, disks) as machine:
        outcome = unlock(machine.machine())
    assert outcome.message == "Unlocked: root, home."


def test_a_second_disk_with_another_passphrase_is_named(initrd: Start) -> None:
    machine = initrd(Disks({"root": PASSPHRASE, "home": "another"}))
    outcome = unlock(machine.machine())
    message = "Wrong passphrase for disk home; unlocked: root."
    assert outcome == waker.Result("wrong_passphrase", True, message)


def test_a_slow_key_derivation_is_not_confirmed_while_the_initrd_waits(
    initrd: Start,
) -> None:
    machine = initrd(Disks({"cryptroot": PASSPHRASE}, gives_up=True))
    there = machine.machine()._replace(system_port=free_port())
    outcome = unlock(there, "wrong", seconds=9)
    assert outcome == waker.Result(
        "not_confirmed",
        True,
        "not confirmed: no answer came after the passphrase was sent; the initrd"
        " still waits: probably a wrong passphrase. The passphrase was sent.",
    )
    assert machine.received() == [b"wrong"]


@pytest.mark.parametrize(
    ("disks", "told"),
    [
        (Disks({"d": "p"}, idle=True), "not_asked: no disk asks for a passphrase"),
        (Disks({"d": "p"}, early=True), "not_asked: the initrd is not ready yet"),
        (
            Disks({}),
            "already_open: no passphrase is needed: every disk is already open",
        ),
    ],
    ids=["nothing asks", "too early", "all unlocked"],
)
def test_nothing_is_sent_when_nothing_asks(
    initrd: Start, disks: Disks, told: str
) -> None:
    machine = initrd(disks)
    outcome = unlock(machine.machine())
    assert f"{outcome.outcome}: {outcome.message}".startswith(told)
    assert machine.received() == []


def test_a_command_that_never_asks_gets_nothing_within_the_deadline(
    initrd: Start,
) -> None:
    machine = initrd(Disks({"d": "p"}, mute=True))
    outcome = unlock(machine.machine(), seconds=8)
    assert "no disk asked" in outcome.message
    assert machine.received() == []


def test_a_missing_unlock_command_is_told(initrd: Start) -> None:
    machine = initrd(command=False)
    outcome = unlock(machine.machine())
    assert "there is no unlock command" in outcome.message


def test_a_refused_key_is_told_with_its_fingerprint(
    initrd: Start, tmp_path: Path
) -> None:
    other = new_key()
    other.write_private_key_file(str(tmp_path / "other"))
    machine = initrd().machine()._replace(key=tmp_path / "other")
    outcome = unlock(machine)
    assert "refused our key" in outcome.message
    assert waker.fingerprint(other.asbytes()) in outcome.message


def test_another_host_key_is_told_with_both_fingerprints(initrd: Start) -> None:
    start = initrd()
    pinned = waker.HostKey.parse(public_line(new_key()))
    outcome = unlock(start.machine()._replace(host_keys=(pinned,)))
    (shown,) = waker.HostKey.parse_all(start.host_key)
    assert f"pinned {waker.fingerprint(pinned.blob)}" in outcome.message
    assert f"seen {waker.fingerprint(shown.blob)}" in outcome.message
    assert start.received() == []


def test_a_server_without_a_key_of_the_pinned_type_gets_nothing(initrd: Start) -> None:
    pinned = waker.HostKey.parse(public_line(paramiko.RSAKey.generate(2048)))
    start = initrd()
    outcome = unlock(start.machine()._replace(host_keys=(pinned,)))
    # Dropbear offers RSA even if it has no such key, and dies when that is chosen.
    told = "(pinned: ssh-rsa)", "the host key differs"
    assert any(text in outcome.message for text in told)
    assert start.received() == []


def test_one_of_several_pins_is_enough(initrd: Start) -> None:
    start = initrd()
    (right,) = waker.HostKey.parse_all(start.host_key)
    first, last = (waker.HostKey.parse(public_line(new_key())) for _ in range(2))
    outcome = unlock(start.machine()._replace(host_keys=(first, right, last)))
    assert outcome.outcome == "unlocked"


class Eavesdropper(paramiko.ServerInterface):
    """An impostor's SSH server: it lets everybody in and notes all that it gets."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def get_allowed_auths(self, username: str) -> str:
        self.heard.append(username)
        return "publickey,password,none"

    def check_auth_none(self, username: str) -> int:
        self.heard.append(username)
        return 0

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.heard += [username, key.get_base64()]
        return 0

    def check_channel_request(self, kind: str, chanid: int) -> int:
        self.heard += [kind, str(chanid)]
        return 0


def test_an_impostor_gets_nothing_at_all(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"cryptroot": PASSPHRASE})) as real:
        machine = real.machine()
    ears, listener = Eavesdropper(), bind("127.0.0.1", real.port)
    listener.listen()

    def accept() -> None:
        transport = paramiko.Transport(listener.accept()[0])
        transport.add_server_key(new_key())
        with contextlib.suppress(EOFError, OSError):  # it has seen enough
            transport.start_server(server=ears)
        transport.join()

    thread = threading.Thread(target=accept)
    thread.start()
    outcome = unlock(machine)
    thread.join()
    listener.close()
    assert "the host key differs" in outcome.message
    assert ears.heard == []


def test_without_a_pin_nothing_is_even_connected(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"cryptroot": PASSPHRASE})) as start:
        outcome = unlock(start.machine()._replace(host_keys=()))
    assert "no host key is pinned" in outcome.message
    assert "run `waker check` while the initrd waits" in outcome.message


def test_tinyssh_is_told_as_what_it_is(tmp_path: Path) -> None:
    with tinysshd(tmp_path, Disks({"cryptroot": PASSPHRASE})) as start:
        outcome = unlock(start.machine())
    assert "share no algorithm" in outcome.message


@contextlib.contextmanager
def peer(speak: Callable[[socket.socket], None], port: int = 0) -> Iterator[int]:
    """Listen, and let each client hear that; yields the port."""
    listener = bind("127.0.0.1", port)
    listener.listen()

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed, or the client has gone
            while True:
                speak(listener.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def drip(connection: socket.socket) -> None:
    """Send an endless identification string, a byte at a time."""
    connection.sendall(b"SSH-2.0-")
    connection.settimeout(0.2)
    while True:
        connection.sendall(b"x")
        with contextlib.suppress(TimeoutError):
            connection.recv(1)


HELD: list[socket.socket] = []


def freeze(connection: socket.socket) -> None:
    """Begin like an SSH server, and do nothing more."""
    connection.sendall(b"SSH-2.0-x\r\n")
    HELD.append(connection)


@pytest.mark.parametrize(
    ("speak", "told"),
    [
        (HELD.append, "did not answer within 5 s"),
        (lambda peer: peer.close(), "does not speak SSH"),
        (lambda peer: peer.sendall(b"HTTP/1.1 400 No\r\n\r\n"), "does not speak SSH"),
        (lambda peer: peer.sendall(os.urandom(99)), "does not speak SSH"),
        (lambda peer: peer.sendall(b"Not allowed at this time\r\n"), "not speak SSH"),
        (lambda peer: (peer.sendall(b"SSH-2.0-x\r\n"), peer.close()), "hung up or"),
        (lambda peer: peer.sendall(b"SSH-2.0-x\r\n" + b"\1" * 999), "hung up or"),
    ],
    ids=[
        "silent",
        "closing",
        "web",
        "random",
        "busy",
        "leaving",
        "garbage",
    ],
)
def test_a_peer_that_is_no_ssh_server_gets_nothing(
    tmp_path: Path, speak: Callable[[socket.socket], None], told: str
) -> None:
    with paramiko_server(tmp_path, Disks({})) as start:
        machine = start.machine()
    with peer(speak) as port:
        outcome = unlock(machine._replace(initrd_port=port))
    assert outcome.outcome != "unlocked"
    assert told in outcome.message
    assert not outcome.sent


def test_a_port_that_refuses_and_one_that_swallows_are_told_apart(
    tmp_path: Path, lab: Homelab
) -> None:
    with paramiko_server(tmp_path, Disks({})) as start:
        machine = start.machine()
    outcome = unlock(machine)
    assert "Connection refused" in outcome.message
    outcome = unlock(machine._replace(initrd_port=lab.initrd_port))
    assert "did not answer within 5 s" in outcome.message


def test_power_lost_before_it_asks_means_nothing_was_sent(initrd: Start) -> None:
    machine = initrd(Disks({"cryptroot": PASSPHRASE}, dies="before"))
    outcome = unlock(machine.machine())
    assert "the connection was lost before a disk asked" in outcome.message
    assert machine.received() == []


def test_power_lost_after_sending_is_not_called_unlocked(initrd: Start) -> None:
    machine = initrd(Disks({"cryptroot": PASSPHRASE}, dies="after"))
    outcome = unlock(machine.machine(), seconds=9)
    assert outcome.message == (
        "not confirmed: the connection was lost after the passphrase was sent; the"
        " machine may be booting, or have lost its power. The passphrase was sent."
    )
    assert outcome.sent


@pytest.mark.parametrize("shared", [True, False])
def test_a_system_that_comes_up_after_the_connection_was_lost_proves_it(
    tmp_path: Path, shared: bool
) -> None:
    disks = Disks({"cryptroot": PASSPHRASE}, dies="after")
    state, ssh_key, authorized = prepare(tmp_path, disks)
    host_key, port = new_key(), free_port()
    first = SshServer(bind("127.0.0.1", port), host_key, DROPBEAR, authorized, state)
    initrd = Initrd(port, public_line(host_key), ssh_key, state).machine()
    machine = initrd._replace(system_port=port if shared else free_port())
    systems: list[SshServer] = []

    def boot() -> None:
        first.ended.wait()
        listener = bind("127.0.0.1", machine.system_port)
        systems.append(SshServer(listener, new_key(), OPENSSH))

    thread = threading.Thread(target=boot)
    thread.start()
    outcome = unlock(machine)
    thread.join()
    systems[0].close()
    assert outcome == waker.Result(
        "unlocked",
        True,
        "the connection was lost after the passphrase was sent; then the system's SSH"
        " answered.",
    )


def test_a_command_that_ends_well_without_a_word_is_no_verdict(initrd: Start) -> None:
    machine = initrd(Disks({"cryptroot": PASSPHRASE}, wordless=True))
    outcome = unlock(machine.machine(), seconds=10)
    assert (outcome.outcome, outcome.sent) == ("not_confirmed", True)
    assert outcome.message.startswith("not confirmed: no answer came after")


@pytest.mark.parametrize("at_first", ["silent", "open"])
def test_a_port_of_the_system_that_was_not_seen_closed_before_proves_nothing(
    tmp_path: Path, at_first: str
) -> None:
    disks = Disks({"cryptroot": PASSPHRASE}, dies="after")
    port = free_port()
    holes = [Blackhole("127.0.0.1", port)] if at_first == "silent" else []
    listeners = [] if holes else [bind("127.0.0.1", port)]
    for listener in listeners:
        listener.listen()

    def open_later() -> None:
        wait_for(start.received)
        for hole in holes:
            hole.close()
            listeners.append(bind("127.0.0.1", port))
            listeners[0].listen()

    with paramiko_server(tmp_path, disks) as start:
        thread = threading.Thread(target=open_later)
        thread.start()
        machine = start.machine()._replace(system_port=port)
        outcome = unlock(machine, "wrong", seconds=9)
        thread.join()
        assert waker.look(machine).system is waker.Port.OPEN
    listeners[0].close()
    assert outcome.message.startswith("not confirmed: ")


class Moody(paramiko.ServerInterface):
    """A server that goes wrong in some way after the key exchange."""

    def __init__(self, mood: str) -> None:
        self._mood = mood
        self._end = threading.Event()

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if self._mood == "frozen in the login":
            self._end.wait(20)
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        if self._mood == "frozen in exec":
            self._end.wait(15)
        if self._mood in ("endless", "chatty"):
            threading.Thread(target=self._write, args=(channel,), daemon=True).start()
        return self._mood not in ("refusing", "silent by now")

    def _write(self, channel: paramiko.Channel) -> None:
        with contextlib.suppress(OSError):
            if self._mood == "chatty":
                channel.sendall(b"Please unlock disk d\n")
                channel.makefile("rb").read()
                channel.sendall(b"cryptsetup: d set up successfully\n")
                self._mood = "silent by now"
            while True:
                channel.sendall(b"x" * 9999)
                self._end.wait(0.1)  # or it would be the processor that is tried


def moody(mood: str, *host_keys: paramiko.PKey) -> Callable[[socket.socket], None]:
    """Serve a connection, and go wrong in that way."""

    def serve(connection: socket.socket) -> None:
        transport = paramiko.Transport(connection)
        for key in host_keys:
            transport.add_server_key(key)
        transport.start_server(threading.Event(), Moody(mood))

    return serve


def test_who_falls_silent_is_given_up(tmp_path: Path) -> None:
    """Each in a thread, so that they are waited for at the same time."""
    host_key, told = new_key(), []
    with paramiko_server(tmp_path, Disks({})) as start:
        pin = waker.HostKey.parse(public_line(host_key))
        machine = start.machine()._replace(host_keys=(pin,))

    def give_up(speak: Callable[[socket.socket], None]) -> None:
        with peer(speak) as port:
            outcome = unlock(machine._replace(initrd_port=port))
        told.append(outcome.message)

    login = moody("frozen in the login", host_key)
    threads = [
        threading.Thread(target=give_up, args=(speak,))
        for speak in (freeze, drip, login)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    silent, unsent = "the SSH server hung up or fell silent during", "was not sent."
    exchange = f"{silent} key exchange; the server and paramiko may share no algorithm"
    assert [message.startswith(exchange) for message in sorted(told)] == [1, 1, 0]
    assert sorted(told)[2:] == [
        f"{silent} login. The passphrase {unsent}",
    ]


@pytest.mark.parametrize(
    ("mood", "told"),
    [
        ("frozen in exec", "no disk asked for its passphrase in time"),
        ("endless", "no disk asked for its passphrase in time"),
        ("refusing", "the server refuses to run the unlock command"),
    ],
)
def test_a_server_that_goes_wrong_is_told_in_time(
    tmp_path: Path, mood: str, told: str
) -> None:
    with paramiko_server(tmp_path, Disks({})) as start:
        machine = start.machine()
    host_key = new_key()
    pin = waker.HostKey.parse(public_line(host_key))
    with peer(moody(mood, host_key)) as port:
        there = machine._replace(initrd_port=port, host_keys=(pin,))
        outcome = unlock(there, seconds=8)
    assert told in outcome.message
    assert not outcome.sent


def test_nothing_weak_is_offered_and_the_pinned_type_comes_first(
    tmp_path: Path,
) -> None:
    offers: list[
        list[str]
    ] = []  # RFC 4253, 7.1: key exchange, host keys, ciphers, MACs

    def hear(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-x\r\n")
        with connection.makefile("rb") as file:
            file.readline()
            length, _ = struct.unpack(">IB", file.read(5))
            message = paramiko.Message(file.read(length - 1))
        message.get_bytes(17)  # the kind of the message, and its cookie
        offers.extend(message.get_list() for _ in range(6))

    with paramiko_server(tmp_path, Disks({})) as start, peer(hear) as port:
        unlock(start.machine()._replace(initrd_port=port))
    (pin,) = waker.HostKey.parse_all(start.host_key)
    assert offers[1][0] == pin.kind
    for names in offers:
        assert names
        assert not re.search(r"sha1|md5|cbc|dss|\bssh-rsa", " ".join(names))


def test_a_command_that_does_not_end_after_its_verdict_is_not_waited_for(
    tmp_path: Path,
) -> None:
    with paramiko_server(tmp_path, Disks({})) as start:
        machine = start.machine()
    host_key = new_key()
    pin = waker.HostKey.parse(public_line(host_key))
    with peer(moody("chatty", host_key)) as port:
        there = machine._replace(initrd_port=port, host_keys=(pin,))
        outcome = unlock(there, seconds=15)
    assert outcome == waker.Result("unlocked", True, "Unlocked: d.")


def test_a_server_with_several_host_keys_shows_the_pinned_one(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({})) as start:
        machine = start.machine()
    pinned = paramiko.RSAKey.generate(2048)  # the type that paramiko likes least
    with peer(moody("refusing", new_key(), pinned)) as port:
        pin = waker.HostKey.parse(public_line(pinned))
        both = machine._replace(initrd_port=port, host_keys=(pin,))
        assert "refuses to run the unlock command" in unlock(both).message


def disconnect(text: bytes) -> bytes:
    """Write an SSH packet that ends a connection with this text, RFC 4253, 11.1."""
    payload = b"\1" + bytes([0, 0, 0, 2]) + len(text).to_bytes(4, "big") + text
    payload += bytes(4)
    padding = 8 - (len(payload) + 5) % 8 + 8
    length = (len(payload) + padding + 1).to_bytes(4, "big")
    return length + bytes([padding]) + payload + bytes(padding)


def test_nonsense_from_a_peer_is_its_fault_and_not_the_passphrases(
    tmp_path: Path,
) -> None:
    with paramiko_server(tmp_path, Disks({})) as start:
        machine = start.machine()
    nonsense = b"SSH-2.0-x\r\n" + disconnect(b"\xff\xfe")
    with peer(lambda connection: connection.sendall(nonsense)) as port:
        outcome = unlock(machine._replace(initrd_port=port))
    assert "hung up or fell silent during key exchange" in outcome.message


def test_a_damaged_key_of_ours_is_told(tmp_path: Path) -> None:
    path = tmp_path / "key"
    new_key().write_private_key_file(str(path))
    whole = path.read_text().splitlines()
    for damaged in (whole[:-1], whole[:2], ["nonsense"], [*whole[:1], whole[-1]]):
        path.write_text("\n".join(damaged) + "\n")
        with pytest.raises(waker.NotSent) as told:
            waker.load_key(path)
        assert "must be an Ed25519, ECDSA or RSA private key" in str(told.value)


def test_an_encrypted_key_of_ours_is_told(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"d": "p"})) as start:
        new_key().write_private_key_file(str(start.ssh_key), password="secret")
        outcome = unlock(start.machine())
    assert "must not be encrypted" in outcome.message
