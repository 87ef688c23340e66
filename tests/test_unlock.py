"""The unlock against real SSH servers: every outcome told as what was seen."""

import contextlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest
from conftest import (
    CHECKOUT,
    MODULE,
    PASSPHRASE,
    environment,
    need,
    run_waker,
    wait_for,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptroot_unlock import Disks
from homelab import OPENSSH, SshServer, bind, new_key, public_line
from paramiko.common import AUTH_SUCCESSFUL, OPEN_SUCCEEDED
from ssh_servers import SERVERS, Initrd, dropbear, free_port, paramiko_server

import waker

ODD = "-n '$(id)` a\\tb\\0 " + "é" * 244 + "xy \u00a0 "  # 512 bytes
RSA = waker.HostKey("ssh-rsa", b"\0\0\0\7ssh-rsa\0\0\0\1x")  # nobody has this key
HOST_KEY, OTHER_KEY = new_key(), new_key()
ED25519 = paramiko.Ed25519Key.from_private_key(
    io.StringIO(
        Ed25519PrivateKey.generate()
        .private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        .decode()
    )
)
(OTHER,) = waker.HostKey.parse_all(public_line(OTHER_KEY))
RIGHT = PASSPHRASE.encode()
ONE = {"d": PASSPHRASE}
THREE = {"root": ODD, "home": " ", "data": " "}
WRONG = "wrong_passphrase: Wrong passphrase for disk "
NOT_CONFIRMED = "not_confirmed: Not confirmed: the passphrase was sent, but "
NO_VERDICT = f"{NOT_CONFIRMED}the initrd did not confirm it."
AGAIN = f"{NOT_CONFIRMED}a disk is still asking"
LOST = f"{NOT_CONFIRMED}the connection was lost before the initrd confirmed it."
NOT_SENT = " The passphrase was not sent."
# Seconds that include five to tell the outcome in. What waits to the end of its time
# waits for the other seven; a busy machine needs some of them to log in.
SHORT = 12


def unlock(machine: waker.Machine, given: str = PASSPHRASE, seconds: int = 60) -> str:
    """Run `waker.py unlock` as the daemon does; returns the outcome and the message."""
    limit = f"--seconds={seconds}"
    child = run_waker("unlock", limit, settings=machine.settings(), given=given)
    assert child.stderr == ""
    *sent, last = map(json.loads, child.stdout.splitlines())
    result = waker.Result(**last)
    is_success = result.outcome in ("unlocked", "already_open", "up")
    assert child.returncode == (not is_success)
    assert result.sent == bool(sent)
    assert all(line == {"sent": True} for line in sent)
    if result.outcome not in ("unlocked", "wrong_passphrase", "not_confirmed"):
        told = "was sent" if result.sent else "was not sent"
        assert result.message.endswith(f"The passphrase {told}.")
    return f"{result.outcome}: {result.message}"


@pytest.mark.parametrize("server", SERVERS)
def test_each_disk_that_asks_is_answered_once(tmp_path: Path, server: str) -> None:
    with SERVERS[server](tmp_path, Disks(THREE, lingers=True)) as initrd:
        machine = initrd.machine()
        machine = machine._replace(host_keys=(OTHER, *machine.host_keys))
        for passphrase, told in (
            (ODD, f"{WRONG}home; unlocked: root."),
            (" ", "unlocked: Unlocked: home, data."),
            ("x", "already_open: no passphrase is needed: all disks seem to be open."),
        ):
            assert unlock(machine, passphrase).removesuffix(NOT_SENT) == told
        assert initrd.received() == [ODD.encode()] * 2 + [b" "] * 2


def test_the_third_wrong_passphrase_is_reported_as_wrong(tmp_path: Path) -> None:
    """Debian has other words for it, and goes on asking."""
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        told = [unlock(initrd.machine(), given) for given in ("1", "2", "3", "4")]
    assert told == [f"{WRONG}d."] * 4


@pytest.mark.parametrize("server", ["dropbear", "openssh"])
def test_what_is_not_right_is_told_and_nothing_sent(
    tmp_path: Path, server: str
) -> None:
    other, damaged = tmp_path / "other", tmp_path / "damaged"
    OTHER_KEY.write_private_key_file(str(other))
    os.truncate(shutil.copy(other, damaged), 150)
    with SERVERS[server](tmp_path, Disks(ONE)) as initrd:
        machine = initrd.machine()
        prints = [waker.fingerprint(key.blob) for key in (OTHER, *machine.host_keys)]
        for change, told in (
            ({"host_keys": (OTHER,)}, "the host key differs: pinned {}, seen {}"),
            # Dropbear offers RSA even without such a key, and dies if that is chosen.
            ({"host_keys": (RSA,)}, "pinned: ssh-rsa|the host key differs"),
            ({"host_keys": ()}, "no host key is pinned; run waker check"),
            ({"initrd_port": free_port()}, "Connection refused"),
            ({"key": other}, "^key_refused: the server refused waker's SSH key {}"),
            ({"key": damaged}, "is damaged, or not an Ed25519, ECDSA or RSA key"),
        ):
            pattern = told.format(*prints).replace("+", r"\+")
            assert re.search(pattern, unlock(machine._replace(**change)))
        initrd.command.unlink()
        assert "there is no unlock command" in unlock(machine)
        assert initrd.received() == []


@pytest.mark.parametrize(
    ("disks", "told", "received"),
    [
        (Disks(ONE, wordless=True), NO_VERDICT, [RIGHT]),
        (Disks(ONE, dies="hangs up"), LOST, [RIGHT]),
        (Disks(ONE, dies="before"), "not_asked: the connection was lost before", []),
        (Disks(ONE, idle=True), "not_asked: no disk is asking yet", []),
        (Disks(ONE, mute=True), "not_asked: logged in, but no disk asked", []),
    ],
    ids=["wordless", "hangs up", "dies before", "idle", "mute"],
)
def test_an_unlock_without_a_verdict_claims_nothing(
    tmp_path: Path, disks: Disks, told: str, received: list[bytes]
) -> None:
    with paramiko_server(tmp_path, disks) as initrd:
        machine = initrd.machine()._replace(system_port=free_port())
        assert unlock(machine, seconds=SHORT).startswith(told)
        assert initrd.received() == received


def test_a_port_that_opens_afterwards_confirms_nothing(tmp_path: Path) -> None:
    """Any program may listen there: only the initrd can confirm an unlock."""
    with paramiko_server(tmp_path, Disks(ONE, dies="after")) as initrd:
        machine = initrd.machine()._replace(system_port=free_port())

        def listen() -> SshServer:
            wait_for(initrd.received)
            return SshServer(bind("127.0.0.1", machine.system_port), HOST_KEY, OPENSSH)

        with ThreadPoolExecutor() as pool:
            listening = pool.submit(listen)
            assert unlock(machine) == LOST
            listening.result().close()


def test_what_arrived_before_the_deadline_counts(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        machine = initrd.machine()
        with contextlib.closing(waker.open_transport(machine)) as transport:
            waker.exchange_keys(transport, machine)
            waker.log_in(transport, machine)
            command = waker.Command(transport, machine.dialect)
            past = time.monotonic()
            asks = waker.Outcome.ASKS, ["d"]
            wait_for(lambda: command.next_event(past), lambda event: event == asks)


def test_a_disk_that_asks_again_is_not_called_unlocked(tmp_path: Path) -> None:
    """It said that it is open. The passphrase is not sent again."""
    words = "echo Please unlock disk d; cat; echo cryptsetup: d set up successfully"
    with dropbear(tmp_path, Disks(ONE)) as initrd:
        count = tmp_path / "count"
        initrd.command.write_text(f"#!/bin/sh\necho >>{count}\n{words}\n")
        told = unlock(initrd.machine())
        assert told == f"{AGAIN}; unlocked: d."
        assert len(count.read_text()) == 2


@pytest.mark.timeout(40)  # seconds; who waits for it takes 55
def test_a_command_without_an_end_is_not_waited_for(tmp_path: Path) -> None:
    words = "echo Please unlock disk d; cat; echo cryptsetup: d set up successfully"
    endless = "while sleep 0.1; do echo x; done"
    with dropbear(tmp_path, Disks(ONE)) as initrd:
        once = f"[ -e {tmp_path}/ran ] && exit; touch {tmp_path}/ran"
        initrd.command.write_text(f"#!/bin/sh\n{once}\n{words}\n{endless}\n")
        assert unlock(initrd.machine()) == "unlocked: Unlocked: d."


def test_a_passphrase_has_as_much_time_as_the_unlock(tmp_path: Path) -> None:
    """Otherwise, whatever forgets to close the pipe would wait for ever."""
    with contextlib.ExitStack() as stack:
        initrd = stack.enter_context(paramiko_server(tmp_path, Disks(ONE)))
        late, never, endless = (
            stack.enter_context(
                subprocess.Popen(
                    [*MODULE, "unlock", f"--seconds={SHORT}"],
                    cwd=CHECKOUT,
                    env=environment(initrd.machine().settings()),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for _ in range(3)
        )
        for child in late, never, endless:
            assert child.stdin
            stack.callback(child.kill)
        assert endless.stdin
        assert endless.stdout
        endless.stdin.write(b"x" * 1024)
        endless.stdin.flush()
        assert b"1 to 512 bytes" in endless.stdout.read()
        time.sleep(SHORT - 2)
        assert b"Unlocked: d." in late.communicate(RIGHT)[0]
        assert never.stdout
        told = f"no passphrase was entered within {SHORT} s. {NOT_SENT.strip()}"
        assert json.loads(never.stdout.read())["message"] == told
        assert never.wait() == 1


# ---- Servers that go wrong -----------------------------------------------------------

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


def machine_at(
    folder: Path, port: int, host_key: paramiko.PKey = HOST_KEY
) -> waker.Machine:
    """Tell of a machine where any server may listen, with that host key pinned."""
    initrd = Initrd(folder, Disks({}), public_line(host_key))
    return initrd.machine()._replace(initrd_port=port, system_port=port)


def says(data: bytes) -> Speak:
    """Say that, and nothing more."""

    def speak(connection: socket.socket) -> None:
        HELD.append(connection)
        connection.sendall(data)

    return speak


class Moody(paramiko.ServerInterface):
    """A server that lets everybody in, and freezes in a phase, or refuses commands."""

    def __init__(self, freezes_in: str = "") -> None:
        self._freezes_in = freezes_in
        self.heard: list[str] = []  # whoever wanted in

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.heard.append(username)
        time.sleep(20 if self._freezes_in == "login" else 0)
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        time.sleep(20 if self._freezes_in == "exec" else 0)
        return False

    def serve(self, connection: socket.socket, *keys: paramiko.PKey) -> None:
        transport = paramiko.Transport(connection)
        for key in keys or (HOST_KEY,):
            transport.add_server_key(key)
        transport.start_server(threading.Event(), self)


@pytest.mark.parametrize(
    ("speak", "told"),
    [
        (HELD.append, "did not answer within 5 s"),
        (says(b"HTTP/1.1 400 No\r\n\r\n"), "does not speak SSH"),
        (says(b"SSH-2.0-x\r\n"), "stopped responding during key exchange"),
        (Moody("login").serve, "stopped responding during login"),
        (Moody("exec").serve, "no disk asked for its passphrase in time"),
    ],
    ids=["silent", "web", "frozen", "login", "exec"],
)
def test_a_server_that_goes_wrong_gets_nothing(
    tmp_path: Path, speak: Speak, told: str
) -> None:
    with peer(speak) as port:
        message = unlock(machine_at(tmp_path, port), seconds=SHORT)
    assert told in message
    assert message.endswith(NOT_SENT)


def test_tinyssh_is_told_as_what_it_is(tmp_path: Path) -> None:
    keys, program = tmp_path / "tinyssh", need("tinysshd")
    subprocess.run([need("tinysshd-makekey"), keys], check=True)

    def run(tcp: socket.socket) -> None:
        with tcp:  # as inetd does
            number = tcp.fileno()
            subprocess.run([program, keys], stdin=number, stdout=number, check=False)

    with peer(run) as port:
        assert "share no algorithm" in unlock(machine_at(tmp_path, port))


def test_an_impostor_hears_nothing_at_all(tmp_path: Path) -> None:
    """A server with several host keys is no impostor: it shows the pinned one."""
    pinned = paramiko.RSAKey.generate(2048)  # the type that paramiko likes least
    server = Moody()
    with peer(lambda tcp: server.serve(tcp, new_key(), pinned)) as port:
        message = unlock(machine_at(tmp_path, port, OTHER_KEY))
        assert (message.split(":")[0], server.heard) == ("host_key_differs", [])
        message = unlock(machine_at(tmp_path, port, pinned))
    assert "the server refuses to run the unlock command" in message
    assert server.heard == ["root"]


def test_the_pinned_type_of_host_key_is_asked_for(tmp_path: Path) -> None:
    """The server has a key of each type, and paramiko would prefer the other one."""

    def serve(connection: socket.socket) -> None:
        transport = paramiko.Transport(connection)
        for key in (HOST_KEY, ED25519):
            transport.add_server_key(key)
        with contextlib.suppress(paramiko.SSHException, EOFError):
            transport.start_server(server=paramiko.ServerInterface())
        transport.join(20)

    with peer(serve) as port:
        for key in (HOST_KEY, ED25519):
            told = unlock(machine_at(tmp_path, port, key))
            assert told.startswith("key_refused: ")  # so the host key was right


def test_nothing_weak_is_offered(tmp_path: Path) -> None:
    with peer(says(b"SSH-2.0-x\r\n")) as port:
        transport = waker.open_transport(machine_at(tmp_path, port))
    with contextlib.closing(transport):
        options = transport.get_security_options()
    assert options.key_types[0] == HOST_KEY.get_name()
    for names in options.kex, options.key_types, options.ciphers, options.digests:
        assert names
        assert not re.search(r"sha1|md5|cbc|dss|\bssh-rsa", " ".join(names))
