"""Unlocks over real SSH servers: each outcome, and what is reported."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paramiko
import pytest
from conftest import (
    CHECKOUT,
    MODULE,
    PASSPHRASE,
    environment,
    need,
    wait_for,
    wait_for_child,
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
from ssh_servers import (
    HOST_KEY,
    ODD_PASSPHRASE,
    SERVERS,
    SHORT_UNLOCK,
    Serve,
    dropbear,
    free_port,
    machine_at,
    paramiko_server,
    tcp_server,
    unlock,
)

import waker

RSA = waker.HostKey("ssh-rsa", b"\0\0\0\7ssh-rsa\0\0\0\1x")  # nobody has this key
OTHER_KEY = new_key()
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
THREE = {"root": ODD_PASSPHRASE, "home": "  ", "data": "  "}
WRONG = "wrong_passphrase: Wrong passphrase for disk "
NOT_CONFIRMED = "not_confirmed: Not confirmed: the passphrase was sent, but "
NO_VERDICT = f"{NOT_CONFIRMED}the initrd did not confirm it."
AGAIN = f"{NOT_CONFIRMED}a disk is still asking"
LOST = f"{NOT_CONFIRMED}the connection was lost before the initrd confirmed it."
NOT_SENT = " The passphrase was not sent."
ALL_OPEN = "all disks seem to be open"
OPENS = "echo Please unlock disk d; cat; echo cryptsetup: d set up successfully"
REFUSED = (
    "error: logged in, but the server refuses to run the unlock command." + NOT_SENT
)


@pytest.mark.parametrize("server", SERVERS)
def test_each_disk_that_asks_is_answered_once(tmp_path: Path, server: str) -> None:
    with SERVERS[server](tmp_path, Disks(THREE, lingers=True)) as initrd:
        machine = initrd.machine()
        machine = machine._replace(host_keys=(OTHER, *machine.host_keys))
        messages = [unlock(machine, given) for given in (ODD_PASSPHRASE, "  ", "x")]
        assert messages == [
            f"{WRONG}home; unlocked: root.",
            "unlocked: Unlocked: home, data.",
            f"already_open: no passphrase is needed: {ALL_OPEN}.{NOT_SENT}",
        ]
        assert initrd.received() == [ODD_PASSPHRASE.encode()] * 2 + [b"  "] * 2


def test_the_third_wrong_passphrase_is_reported_as_wrong(tmp_path: Path) -> None:
    """Debian words the third failure differently, and keeps asking."""
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        messages = [unlock(initrd.machine(), given) for given in ("1", "2", "3", "4")]
    assert messages == [f"{WRONG}d."] * 4


@pytest.mark.parametrize("server", ["dropbear", "openssh"])
@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"host_keys": (OTHER,)}, "the host key differs: pinned {other}, seen {seen}"),
        # Dropbear offers RSA even without such a key, and dies if that is chosen.
        ({"host_keys": (RSA,)}, "pinned: ssh-rsa|the host key differs"),
        ({"host_keys": ()}, "no host key is pinned; run waker check"),
        ({"initrd_port": free_port()}, "Connection refused"),
        ({"key": "other"}, "^key_refused: the server refused waker's SSH key {other}"),
        ({"key": "damaged"}, "is damaged, or not an Ed25519, ECDSA or RSA key"),
        ({}, "there is no unlock command"),
    ],
    ids=[
        *("another host key", "another type", "no host key", "closed port"),
        *("refused key", "damaged key", "no command"),
    ],
)
def test_a_failure_is_explained_and_nothing_is_sent(
    tmp_path: Path, server: str, change: dict[str, Any], pattern: str
) -> None:
    other, damaged = tmp_path / "other", tmp_path / "damaged"
    OTHER_KEY.write_private_key_file(str(other))
    os.truncate(shutil.copy(other, damaged), 150)
    if "key" in change:
        change = {"key": tmp_path / change["key"]}
    with SERVERS[server](tmp_path, Disks(ONE)) as initrd:
        if not change and server == "dropbear":
            initrd.command.unlink()
        elif not change:
            initrd.command.chmod(0o644)  # not executable
        machine = initrd.machine()
        seen = waker.fingerprint(machine.host_keys[0].blob)
        pattern = pattern.format(other=waker.fingerprint(OTHER.blob), seen=seen)
        message = unlock(machine._replace(**change))
        assert re.search(pattern.replace("+", r"\+"), message)
        assert initrd.received() == []


@pytest.mark.parametrize(
    ("disks", "expected", "received"),
    [
        (Disks(ONE, wordless=True), NO_VERDICT, [RIGHT]),
        (Disks(ONE, dies="hangs up"), LOST, [RIGHT]),
        (Disks(ONE, dies="before"), "not_asked: the connection was lost before", []),
        (Disks(ONE, idle=True), "not_asked: no disk is asking yet", []),
        (Disks(ONE, mute=True), "not_asked: logged in, but no disk asked", []),
    ],
    ids=["wordless", "hangs up", "dies before", "idle", "mute"],
)
def test_an_unlock_without_a_verdict_is_not_called_a_success(
    tmp_path: Path, disks: Disks, expected: str, received: list[bytes]
) -> None:
    with paramiko_server(tmp_path, disks) as initrd:
        machine = initrd.machine()._replace(system_port=free_port())
        assert unlock(machine, seconds=SHORT_UNLOCK).startswith(expected)
        assert initrd.received() == received


def test_an_open_port_does_not_confirm_an_unlock(tmp_path: Path) -> None:
    """Any program may listen there. Only the initrd can confirm an unlock."""
    with paramiko_server(tmp_path, Disks(ONE, dies="after")) as initrd:
        machine = initrd.machine()._replace(system_port=free_port())

        def listen() -> SshServer:
            wait_for(initrd.received)
            return SshServer(bind("127.0.0.1", machine.system_port), HOST_KEY, OPENSSH)

        with ThreadPoolExecutor() as pool:
            listening = pool.submit(listen)
            assert unlock(machine) == LOST
            listening.result().close()


def test_output_that_arrived_before_the_deadline_counts(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        machine = initrd.machine()
        with contextlib.closing(waker.open_transport(machine)) as transport:
            waker.exchange_keys(transport, machine)
            waker.log_in(transport, machine)
            command = waker.Command(transport)
            past = time.monotonic()
            asks = waker.Outcome.ASKS, "d"
            wait_for(lambda: command.next_event(past), lambda event: event == asks)


def test_a_disk_that_asks_again_is_not_called_unlocked(tmp_path: Path) -> None:
    """It had reported success. The passphrase is not sent again."""
    with dropbear(tmp_path, Disks(ONE)) as initrd:
        count = tmp_path / "count"
        initrd.command.write_text(f"#!/bin/sh\necho >>{count}\n{OPENS}\n")
        assert unlock(initrd.machine()) == f"{AGAIN}; unlocked: d."
        assert len(count.read_text()) == 2


@pytest.mark.timeout(40)  # seconds; waiting for the command would take 55
def test_an_endless_command_does_not_delay_the_result(tmp_path: Path) -> None:
    endless = "while sleep 0.1; do echo x; done"
    with dropbear(tmp_path, Disks(ONE)) as initrd:
        once = f"[ -e {tmp_path}/ran ] && exit; touch {tmp_path}/ran"
        initrd.command.write_text(f"#!/bin/sh\n{once}\n{OPENS}\n{endless}\n")
        assert unlock(initrd.machine()) == "unlocked: Unlocked: d."


def test_the_passphrase_may_arrive_until_the_unlock_times_out(tmp_path: Path) -> None:
    """Without a limit, a caller that never closes the pipe would wait for ever."""
    with contextlib.ExitStack() as stack:
        initrd = stack.enter_context(paramiko_server(tmp_path, Disks(ONE)))
        late, never, endless = (
            stack.enter_context(
                subprocess.Popen(
                    [*MODULE, "unlock", f"--seconds={SHORT_UNLOCK}"],
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
        time.sleep(SHORT_UNLOCK - 2)
        assert b"Unlocked: d." in late.communicate(RIGHT)[0]
        assert never.stdout
        message = json.loads(never.stdout.read())["message"]
        assert (
            message == f"no passphrase was entered within {SHORT_UNLOCK} s.{NOT_SENT}"
        )
        assert never.wait() == 1


# ---- Servers that misbehave ----------------------------------------------------------

HELD: list[socket.socket] = []  # connections to keep open


def sends(data: bytes) -> Serve:
    """Send the data, and nothing more."""

    def serve(connection: socket.socket) -> None:
        HELD.append(connection)
        connection.sendall(data)

    return serve


class OpenServer(paramiko.ServerInterface):
    """Accepts any SSH key, then freezes in one phase or refuses to run commands.

    Or it hangs up during the login.
    """

    def __init__(self, freezes_in: str = "", *, hangs_up: bool = False) -> None:
        self._freezes_in = freezes_in
        self._hangs_up = hangs_up
        self._connection: socket.socket | None = None
        self.users: list[str] = []  # who tried to log in

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.users.append(username)
        if self._hangs_up and self._connection:
            self._connection.shutdown(socket.SHUT_RDWR)
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
        self._connection = connection
        transport = paramiko.Transport(connection)
        for key in keys or (HOST_KEY,):
            transport.add_server_key(key)
        transport.start_server(threading.Event(), self)


@pytest.mark.parametrize(
    ("serve", "expected"),
    [
        (HELD.append, "did not answer within 5 s"),
        (sends(b"HTTP/1.1 400 No\r\n\r\n"), "does not speak SSH"),
        (sends(b"SSH-2.0-x\r\n"), "stopped responding during key exchange"),
        (OpenServer("login").serve, "stopped responding during login"),
        (OpenServer(hangs_up=True).serve, "hung up or stopped responding during login"),
        (OpenServer("exec").serve, "no disk asked for its passphrase in time"),
    ],
    ids=[
        *("silent", "web server", "frozen", "frozen login", "hang-up"),
        "frozen command",
    ],
)
def test_a_misbehaving_server_is_not_sent_the_passphrase(
    tmp_path: Path, serve: Serve, expected: str
) -> None:
    # A frozen command uses up all the time; the steps before it have limits.
    seconds = SHORT_UNLOCK if "no disk asked" in expected else 60
    with tcp_server(serve) as port:
        message = unlock(machine_at(tmp_path, port), seconds=seconds)
    assert message.startswith("not_asked: ")
    assert expected in message
    assert message.endswith(NOT_SENT)


def test_tinyssh_is_reported_as_sharing_no_algorithm(tmp_path: Path) -> None:
    keys, program = tmp_path / "tinyssh", need("tinysshd")
    subprocess.run([need("tinysshd-makekey"), keys], check=True)

    def serve(tcp: socket.socket) -> None:
        with tcp:  # as inetd does
            number = tcp.fileno()
            subprocess.run([program, keys], stdin=number, stdout=number, check=False)

    with tcp_server(serve) as port:
        assert "share no algorithm" in unlock(machine_at(tmp_path, port))


def test_waker_does_not_log_in_to_an_impostor(tmp_path: Path) -> None:
    """A server with several host keys is no impostor if one of them is pinned."""
    pinned = paramiko.RSAKey.generate(2048)  # the type that paramiko likes least
    server = OpenServer()
    with tcp_server(lambda tcp: server.serve(tcp, new_key(), pinned)) as port:
        message = unlock(machine_at(tmp_path, port, OTHER_KEY))
        assert (message.split(":")[0], server.users) == ("host_key_differs", [])
        message = unlock(machine_at(tmp_path, port, pinned))
    assert message == REFUSED
    assert server.users == ["root"]


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])  # other tests use ECDSA
def test_waker_logs_in_as_the_configured_user_with_any_kind_of_key(
    tmp_path: Path, kind: str
) -> None:
    key, server = tmp_path / "own_key", OpenServer()
    make = [need("ssh-keygen"), "-q", "-t", kind, "-N", "", "-f", str(key)]
    subprocess.run(make, check=True)
    with tcp_server(server.serve) as port:
        machine = machine_at(tmp_path, port)._replace(user="admin", key=key)
        assert unlock(machine) == REFUSED
    assert server.users == ["admin"]


@pytest.mark.parametrize("pinned", [HOST_KEY, ED25519], ids=["ECDSA", "Ed25519"])
def test_the_pinned_host_key_type_is_requested(
    tmp_path: Path, pinned: paramiko.PKey
) -> None:
    """The server has a key of each type, and paramiko prefers Ed25519."""

    def serve(connection: socket.socket) -> None:
        transport = paramiko.Transport(connection)
        for key in (HOST_KEY, ED25519):
            transport.add_server_key(key)
        with contextlib.suppress(paramiko.SSHException, EOFError):
            transport.start_server(server=paramiko.ServerInterface())
        transport.join(20)

    with tcp_server(serve) as port:
        message = unlock(machine_at(tmp_path, port, pinned))
    assert message.startswith("key_refused: ")  # so the host key was right


@pytest.mark.parametrize("kind", ["kex", "key_types", "ciphers", "digests"])
def test_no_weak_algorithm_is_offered(tmp_path: Path, kind: str) -> None:
    """`make test-paramiko` sees this with an older one, which would offer more."""
    with tcp_server(sends(b"SSH-2.0-x\r\n")) as port:
        transport = waker.open_transport(machine_at(tmp_path, port))
    with contextlib.closing(transport):
        options = transport.get_security_options()
    assert options.key_types[0] == HOST_KEY.get_name()
    names = getattr(options, kind)
    assert names
    assert not re.search(r"sha1|md5|cbc|dss|\bssh-rsa", " ".join(names))


def test_a_machine_that_loses_its_power_is_noticed_by_keepalive(tmp_path: Path) -> None:
    """While it derives the key, nothing else is sent that could remain unanswered."""
    with paramiko_server(tmp_path, Disks(ONE, slow=3)) as initrd:
        with ThreadPoolExecutor() as pool:
            unlocking = pool.submit(unlock, initrd.machine())
            command = [need("ss"), "-Htno", f"dport = :{initrd.port}"]
            wait_for(
                lambda: subprocess.run(command, check=True, capture_output=True).stdout,
                lambda seen: b"timer:(keepalive," in seen,
            )
        assert unlocking.result() == "unlocked: Unlocked: d."


def test_a_machine_that_loses_its_power_is_noticed_in_ten_seconds(
    tmp_path: Path,
) -> None:
    with tcp_server(sends(b"SSH-2.0-x\r\n")) as port:
        transport = waker.open_transport(machine_at(tmp_path, port))
    with contextlib.closing(transport):
        assert isinstance(transport.sock, socket.socket)
        idle, between, unanswered = (
            transport.sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                *(socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL),
                socket.TCP_USER_TIMEOUT,
            )
        )
    assert (idle, between) == (5, 1)  # seconds
    assert unanswered == 10_000  # milliseconds


def test_an_unlock_writes_no_core_dump(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE, slow=2)) as initrd:
        with ThreadPoolExecutor() as pool:
            unlocking = pool.submit(unlock, initrd.machine())
            limits = Path(f"/proc/{wait_for_child(os.getpid())}/limits")
            wait_for(limits.read_text, re.compile("core file size +1 +1 ").search)
        assert unlocking.result() == "unlocked: Unlocked: d."


def test_a_second_disk_has_15_seconds_to_ask_and_the_first_has_more(
    tmp_path: Path,
) -> None:
    disks, slow_folder = Disks(ONE | {"second": "x"}, lingers=True), tmp_path / "slow"
    slow_folder.mkdir()
    with contextlib.ExitStack() as stack:
        initrd = stack.enter_context(paramiko_server(tmp_path, disks))
        slow = stack.enter_context(dropbear(slow_folder, Disks(ONE)))
        pool = stack.enter_context(ThreadPoolExecutor())
        once = f"[ -e {slow_folder}/ran ] && exit; touch {slow_folder}/ran"
        slow.command.write_text(f"#!/bin/sh\n{once}\nsleep 17\n{OPENS}\n")
        patient = pool.submit(unlock, slow.machine())
        unlocking = pool.submit(unlock, initrd.machine())
        wait_for(lambda: "d" not in Disks.load(initrd.state).locked)
        Disks({"second": "x"}, mute=True).save(initrd.state)
        began = time.monotonic()
        assert unlocking.result() == "unlocked: Unlocked: d."
        assert 14 < time.monotonic() - began < 40  # for the first one it is 60
        assert patient.result() == "unlocked: Unlocked: d."
