"""The unlock against real SSH servers: every outcome told as what was seen."""

import contextlib
import json
import re
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paramiko
import pytest
from conftest import CHECKOUT, MODULE, PASSPHRASE, environment, wait_for
from cryptroot_unlock import Disks
from homelab import DROPBEAR, OPENSSH, Blackhole, SshServer, bind, new_key, public_line
from paramiko.common import AUTH_SUCCESSFUL, OPEN_SUCCEEDED
from ssh_servers import (
    SERVERS,
    Initrd,
    free_port,
    machine_at,
    paramiko_server,
    prepare,
    tinysshd,
)

import waker

ODD = "-n '$(id)` a\\tb\\0 " + "é" * 244 + "xy \u00a0 "  # 512 bytes
RSA = waker.HostKey("ssh-rsa", b"\0\0\0\7ssh-rsa\0\0\0\1x")  # nobody has this key
OTHER_KEY = new_key()
OTHER = waker.HostKey.parse(public_line(OTHER_KEY))
RIGHT = PASSPHRASE.encode()
ONE = {"d": PASSPHRASE}
TWO = {"root": PASSPHRASE, "home": PASSPHRASE}
OPEN = "no passphrase is needed: every disk is already open."
WAITS = "not confirmed: no answer came after the passphrase was sent; the initrd still"
GONE = "not confirmed: the connection was lost after the passphrase was sent; the"


def unlock(
    machine: waker.Machine, passphrase: str = PASSPHRASE, seconds: int = 60
) -> waker.Result:
    """Run `waker.py unlock` as the daemon does; returns what is told in time."""
    child = subprocess.run(
        [*MODULE, "unlock", "--seconds", str(seconds)],
        cwd=CHECKOUT,
        env=environment(machine.settings()),
        input=passphrase.encode(),
        capture_output=True,
        check=False,
    )
    assert child.stderr == b""
    *sent, last = map(json.loads, child.stdout.splitlines())
    result = waker.Result(**last)
    assert child.returncode == (result.outcome != "unlocked")
    assert result.sent == bool(sent)
    assert all(line == {"sent": True} for line in sent)
    if result.outcome not in ("unlocked", "wrong_passphrase"):
        told = "was sent" if result.sent else "was not sent"
        assert result.message.endswith(f"The passphrase {told}.")
    return result


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    "case",
    [
        (Disks(ONE), PASSPHRASE, "unlocked", "Unlocked: d.", [RIGHT]),
        (Disks({"d": ODD}), ODD, "unlocked", "Unlocked: d.", [ODD.encode()]),
        (Disks({"d": " "}), " ", "unlocked", "Unlocked: d.", [b" "]),
        (Disks(ONE), "x", "wrong_passphrase", "Wrong passphrase for disk d.", [b"x"]),
        (Disks(TWO), PASSPHRASE, "unlocked", "Unlocked: root, home.", [RIGHT] * 2),
        (
            *(Disks(TWO | {"home": "x"}), PASSPHRASE, "wrong_passphrase"),
            *("Wrong passphrase for disk home; unlocked: root.", [RIGHT] * 2),
        ),
        (Disks(ONE, gives_up=True), "x", "not_confirmed", WAITS, [b"x"]),
        (Disks(ONE, wordless=True), PASSPHRASE, "not_confirmed", WAITS, [RIGHT]),
        (Disks(ONE, dies="after"), PASSPHRASE, "not_confirmed", GONE, [RIGHT]),
        (Disks(ONE, dies="before"), "x", "not_asked", "the connection was lost be", []),
        (Disks(ONE, idle=True), "x", "not_asked", "no disk asks for a passphrase", []),
        (Disks(ONE, early=True), "x", "not_asked", "the initrd is not ready yet", []),
        (Disks(ONE, mute=True), "x", "not_asked", "logged in, but no disk asked", []),
        (Disks({}), "x", "already_open", OPEN, []),
    ],
    ids=[
        *("right", "odd", "blank", "wrong", "two", "another", "slow", "wordless"),
        *("dies after", "dies before", "idle", "early", "mute", "open"),
    ],
)
def test_an_end_is_told_as_what_was_seen(
    tmp_path: Path, server: str, case: Any
) -> None:
    disks, passphrase, outcome, told, received = case
    with SERVERS[server](tmp_path, disks) as initrd:
        machine = initrd.machine()._replace(system_port=free_port())
        waits = disks.mute or outcome == "not_confirmed"  # to the end of its time
        result = unlock(machine, passphrase, seconds=14 if waits else 60)
        assert result.outcome == outcome
        assert result.message.startswith(told)
        assert initrd.received() == received


@pytest.mark.parametrize("server", SERVERS)
def test_who_is_not_pinned_gets_nothing(tmp_path: Path, server: str) -> None:
    with SERVERS[server](tmp_path, Disks(ONE)) as initrd:
        machine = initrd.machine()
        (right,) = machine.host_keys
        pins = (OTHER.blob, right.blob)
        both = "pinned {}, seen {}".format(*map(waker.fingerprint, pins))
        for host_keys, told in (
            ((OTHER,), f"the host key differs: {both}"),
            # Dropbear offers RSA even without such a key, and dies if that is chosen.
            ((RSA,), r".*\(pinned: ssh-rsa\)|the host key differs"),
            ((), "no host key is pinned; run waker check while the initrd waits"),
        ):
            assert initrd.received() == []
            message = unlock(machine._replace(host_keys=host_keys)).message
            assert re.match(told.replace("+", r"\+"), message)
        there = machine._replace(host_keys=(OTHER, right))
        assert unlock(there).message == "Unlocked: d."


@pytest.mark.parametrize("server", SERVERS)
def test_what_is_missing_is_told(tmp_path: Path, server: str) -> None:
    with SERVERS[server](tmp_path, Disks(ONE), command=False) as initrd:
        assert "there is no unlock command" in unlock(initrd.machine()).message
        OTHER_KEY.write_private_key_file(str(initrd.ssh_key))
        result = unlock(initrd.machine())
    assert result.outcome == "key_refused"
    assert waker.fingerprint(OTHER_KEY.asbytes()) in result.message


def test_one_command_runs_at_a_time(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(TWO, lingers=True)) as initrd:
        assert unlock(initrd.machine()).message == "Unlocked: root, home."


# ---- Servers that go wrong -----------------------------------------------------------

HOST_KEY = new_key()
HELD: list[socket.socket] = []
Speak = Callable[[socket.socket], object]


@contextlib.contextmanager
def peer(speak: Speak) -> Iterator[int]:
    """Listen, and let each client hear that; yields the port."""
    listener = bind("127.0.0.1", 0)
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


def says(data: bytes) -> Speak:
    """Say that, and nothing more."""

    def speak(connection: socket.socket) -> None:
        HELD.append(connection)
        connection.sendall(data)

    return speak


def drip(connection: socket.socket) -> None:
    """Send an endless identification string, a byte at a time."""
    connection.sendall(b"SSH-2.0-")
    connection.settimeout(0.2)
    while True:
        connection.sendall(b"x")
        with contextlib.suppress(TimeoutError):
            connection.recv(1)


class Moody(paramiko.ServerInterface):
    """A server that lets everybody in, notes all it gets, and then goes wrong."""

    def __init__(self, mood: str) -> None:
        self._mood = mood
        self._end = threading.Event()
        self.heard: list[object] = []

    def get_allowed_auths(self, username: str) -> str:
        self.heard.append(username)
        return "publickey,password,none"

    def check_auth_none(self, username: str) -> int:
        self.heard.append(username)
        return AUTH_SUCCESSFUL

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.heard.append(username)
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
        return self._mood != "refusing"

    def _write(self, channel: paramiko.Channel) -> None:
        """Write without end; if chatty, after a right conversation."""
        with contextlib.suppress(OSError):
            if self._mood == "chatty":
                channel.sendall(b"Please unlock disk d\n")
                channel.makefile("rb").read()
                channel.sendall(b"cryptsetup: d set up successfully\n")
            while True:
                channel.sendall(b"x" * 9999)
                self._end.wait(0.1)  # or it would be the processor that is tried

    def serve(self, connection: socket.socket, *keys: paramiko.PKey) -> None:
        transport = paramiko.Transport(connection)
        for key in keys or (HOST_KEY,):
            transport.add_server_key(key)
        transport.start_server(threading.Event(), self)


@pytest.mark.parametrize(
    ("speak", "told"),
    [
        (HELD.append, "did not answer within 5 s"),
        (socket.socket.close, "does not speak SSH"),
        (says(b"HTTP/1.1 400 No\r\n\r\n"), "does not speak SSH"),
        (says(b"Not allowed at this time\r\n"), "does not speak SSH"),
        (says(b"SSH-2.0-x\r\n" + b"\1" * 999), "fell silent during key exchange"),
        (says(b"SSH-2.0-x\r\n"), "fell silent during key exchange"),
        (drip, "fell silent during key exchange"),
        (Moody("frozen in the login").serve, "fell silent during login"),
        (Moody("frozen in exec").serve, "no disk asked for its passphrase in time"),
        (Moody("endless").serve, "no disk asked for its passphrase in time"),
        (Moody("refusing").serve, "the server refuses to run the unlock command"),
    ],
    ids=[
        *("silent", "closing", "web", "busy", "garbage", "frozen"),
        *("dripping", "login", "exec", "endless", "refusing"),
    ],
)
def test_a_server_that_goes_wrong_gets_nothing(
    tmp_path: Path, speak: Speak, told: str
) -> None:
    with peer(speak) as port:
        result = unlock(machine_at(tmp_path, port, HOST_KEY), seconds=15)
    assert told in result.message
    assert not result.sent


def test_a_command_without_an_end_is_not_waited_for(tmp_path: Path) -> None:
    with peer(Moody("chatty").serve) as port:
        result = unlock(machine_at(tmp_path, port, HOST_KEY))
    assert result == ("unlocked", True, "Unlocked: d.")


def test_tinyssh_is_told_as_what_it_is(tmp_path: Path) -> None:
    with tinysshd(tmp_path, Disks(ONE)) as initrd:
        assert "share no algorithm" in unlock(initrd.machine()).message


def test_an_impostor_hears_nothing_at_all(tmp_path: Path) -> None:
    impostor = Moody("refusing")
    with peer(impostor.serve) as port:
        result = unlock(machine_at(tmp_path, port, OTHER_KEY))
    assert result.outcome == "host_key_differs"
    assert impostor.heard == []


def test_a_server_with_several_host_keys_shows_the_pinned_one(tmp_path: Path) -> None:
    pinned = paramiko.RSAKey.generate(2048)  # the type that paramiko likes least
    server = Moody("refusing")
    with peer(lambda tcp: server.serve(tcp, new_key(), pinned)) as port:
        result = unlock(machine_at(tmp_path, port, pinned))
    assert "refuses to run the unlock command" in result.message


def test_a_port_that_refuses_is_told_from_silence(tmp_path: Path) -> None:
    machine = machine_at(tmp_path, free_port(), HOST_KEY)
    assert "Connection refused" in unlock(machine).message
    with contextlib.closing(Blackhole("127.0.0.1")) as hole:
        message = unlock(machine._replace(initrd_port=hole.port)).message
    assert "did not answer within 5 s" in message


def test_nothing_weak_is_offered(tmp_path: Path) -> None:
    offers: list[list[str]] = []  # RFC 4253, 7.1: exchange, host keys, ciphers, MACs

    def hear(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-x\r\n")
        with connection, connection.makefile("rb") as file:
            file.readline()
            length, _ = struct.unpack(">IB", file.read(5))
            message = paramiko.Message(file.read(length - 1))
        message.get_bytes(17)  # the kind of the message, and its cookie
        offers.extend(message.get_list() for _ in range(6))

    with peer(hear) as port:
        unlock(machine_at(tmp_path, port, HOST_KEY))
    assert offers[1][0] == HOST_KEY.get_name()
    for names in offers:
        assert names
        assert not re.search(r"sha1|md5|cbc|dss|\bssh-rsa", " ".join(names))


# ---- Without a verdict ---------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_a_system_that_comes_up_proves_it(tmp_path: Path, shared: bool) -> None:
    state, ssh_key, authorized = prepare(tmp_path, Disks(ONE, dies="after"))
    port = free_port()
    first = SshServer(bind("127.0.0.1", port), HOST_KEY, DROPBEAR, authorized, state)
    initrd = Initrd(port, public_line(HOST_KEY), ssh_key, state).machine()
    machine = initrd._replace(system_port=port if shared else free_port())

    def boot() -> SshServer:
        first.ended.wait()
        return SshServer(bind("127.0.0.1", machine.system_port), new_key(), OPENSSH)

    with ThreadPoolExecutor() as pool:
        booting = pool.submit(boot)
        result = unlock(machine)
    booting.result().close()
    message = "the connection was lost after the passphrase was sent; then the system's"
    assert result == waker.Result("unlocked", True, f"{message} SSH answered.")


@pytest.mark.parametrize("at_first", ["silent", "open"])
def test_a_port_not_seen_closed_proves_nothing(tmp_path: Path, at_first: str) -> None:
    port = free_port()
    hole = Blackhole("127.0.0.1", port) if at_first == "silent" else None

    def listen() -> socket.socket:
        if hole:
            wait_for(initrd.received)
            hole.close()
        system = bind("127.0.0.1", port)
        system.listen()
        return system

    with ThreadPoolExecutor() as pool:
        with paramiko_server(tmp_path, Disks(ONE, dies="after")) as initrd:
            opening = pool.submit(listen)
            if not hole:
                opening.result()
            machine = initrd.machine()._replace(system_port=port)
            message = unlock(machine, "wrong", seconds=14).message
            with opening.result():
                assert waker.look(machine).system is waker.Port.OPEN
    assert message.startswith("not confirmed: ")


# ---- Our key -------------------------------------------------------------------------


def test_a_key_of_ours_that_is_damaged_or_encrypted_is_told(tmp_path: Path) -> None:
    path = tmp_path / "key"
    new_key().write_private_key_file(str(path))
    whole = path.read_text().splitlines()
    for damaged in (whole[:-1], whole[:2], ["nonsense"], [*whole[:1], whole[-1]]):
        path.write_text("\n".join(damaged) + "\n")
        with pytest.raises(waker.NotSent, match="must be an Ed25519, ECDSA or RSA pri"):
            waker.load_key(path)
    new_key().write_private_key_file(str(path), password="secret")
    with pytest.raises(waker.NotSent, match="must not be encrypted"):
        waker.load_key(path)
