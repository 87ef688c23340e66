"""Unlocks over real SSH servers: what each server needs, and what is reported."""

import contextlib
import fcntl
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import termios
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
    stepping_clock,
    wait_for,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptroot_unlock import Disks
from homelab import DROPBEAR, OPENSSH, new_key, public_line
from paramiko.common import AUTH_SUCCESSFUL, OPEN_SUCCEEDED
from ssh_servers import (
    HOST_KEY,
    ODD_PASSPHRASE,
    SERVERS,
    SHORT_UNLOCK,
    Serve,
    Settings,
    dropbear,
    free_port,
    paramiko_server,
    settings_at,
    tcp_server,
    unlock,
)

import waker

RSA = "ssh-rsa AAAAB3NzaC1yc2EAAAABeA=="  # nobody has this key
OTHER_KEY = new_key()
ED25519 = paramiko.Ed25519Key.from_private_key(
    io.StringIO(
        Ed25519PrivateKey.generate()
        .private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        .decode()
    )
)
OTHER = public_line(OTHER_KEY)
RIGHT = PASSPHRASE.encode()
ONE = {"d": PASSPHRASE}
THREE = {"root": ODD_PASSPHRASE, "home": "  ", "data": "  "}
WRONG = "wrong_passphrase: Wrong passphrase for disk "
UNLOCKED = "unlocked: Unlocked: d."
NOT_SENT = " The passphrase was not sent."
OPENS = "echo Please unlock disk d; cat; echo cryptsetup: d set up successfully"
NO_COMMAND = f"error: no unlock command can run: see docs/initrds.md.{NOT_SENT}"


@pytest.mark.parametrize("server", SERVERS)
def test_each_disk_that_asks_is_answered_once(tmp_path: Path, server: str) -> None:
    with SERVERS[server](tmp_path, Disks(THREE, lingers=True)) as initrd:
        settings = initrd.settings(SSH_HOST_KEY=f"{OTHER},{initrd.host_key}")
        messages = [unlock(settings, given) for given in (ODD_PASSPHRASE, "  ", "x")]
        assert messages == [
            f"{WRONG}home; unlocked: root.",
            "unlocked: Unlocked: home, data.",
            f"already_open: all disks seem to be open already.{NOT_SENT}",
        ]
        assert initrd.received() == [ODD_PASSPHRASE.encode()] * 2 + [b"  "] * 2


@pytest.mark.parametrize("server", ["dropbear", "openssh"])
@pytest.mark.parametrize(
    ("name", "value", "pattern"),
    [
        ("SSH_HOST_KEY", OTHER, "^host_key_differs: .*: pinned {other}, seen {seen}"),
        # Dropbear offers RSA even without such a key, and dies if that is chosen.
        ("SSH_HOST_KEY", RSA, "hung up|the host key differs"),
        (
            "SSH_KEY",
            "other",
            "^key_refused: the server refused waker's SSH key {other}",
        ),
        ("SSH_KEY", "damaged", "^error: SSH key .*/damaged .* is damaged"),
        ("", "", f"^{NO_COMMAND}$"),
    ],
    ids=[
        "another host key",
        "another type",
        "refused key",
        "damaged key",
        "no command",
    ],
)
def test_a_failure_is_explained_and_nothing_is_sent(
    tmp_path: Path, server: str, name: str, value: str, pattern: str
) -> None:
    other, damaged = tmp_path / "other", tmp_path / "damaged"
    OTHER_KEY.write_private_key_file(str(other))
    os.truncate(shutil.copy(other, damaged), 150)
    if name == "SSH_KEY":
        value = str(tmp_path / value)
    with SERVERS[server](tmp_path, Disks(ONE)) as initrd:
        if not name and server == "dropbear":
            initrd.command.unlink()
        elif not name:
            initrd.command.chmod(0o644)  # not executable
        (seen,) = waker.parse_host_keys(initrd.host_key)
        prints = {"other": OTHER_KEY.asbytes(), "seen": seen}
        for each, blob in prints.items():
            text = re.escape(waker.fingerprint(blob))
            pattern = pattern.replace(f"{{{each}}}", text)
        message = unlock(initrd.settings(**({name: value} if name else {})))
        assert re.search(pattern, message), message
        assert message.endswith(NOT_SENT)
        assert initrd.received() == []


def parse(settings: Settings) -> waker.Config:
    return waker.read_config(settings, Path(), waker.UNLOCK_SETTINGS)


def connect(config: waker.Config) -> contextlib.closing[paramiko.Transport]:
    """Connect in this process, and go no further."""
    return contextlib.closing(waker.open_transport(config, 60))


def test_output_that_arrived_before_the_deadline_counts(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        config = parse(initrd.settings())
        with connect(config) as transport:
            waker.verify(transport, config)
            waker.log_in(transport, config)
            channel = transport.open_session()
            channel.exec_command(waker.COMMAND)
            wait_for(channel.recv_ready)
            event = next(waker.read_events(channel, time.monotonic()))
            assert event == (waker.Event.ASKS, "d")


@pytest.mark.timeout(40)  # seconds; waiting for the command would take 55
def test_an_endless_command_does_not_delay_the_result(tmp_path: Path) -> None:
    endless = "while sleep 0.1; do echo x; done"
    with dropbear(tmp_path, Disks(ONE)) as initrd:
        once = f"[ -e {tmp_path}/ran ] && exit; touch {tmp_path}/ran"
        initrd.command.write_text(f"#!/bin/sh\n{once}\n{OPENS}\n{endless}\n")
        assert unlock(initrd.settings()) == UNLOCKED


# ---- What happens just before the passphrase leaves ----------------------------------


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

    def give(self, passphrase: str) -> None:
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
@pytest.mark.parametrize("moment", ["typing", "waiting"])
def test_a_signal_ends_it_before_it_sends(
    tmp_path: Path, ending: signal.Signals, moment: str
) -> None:
    server = OpenServer("exec", freeze)
    with (
        tcp_server(server.serve) as port,
        unlocking(settings_at(tmp_path, port)) as child,
    ):
        assert child.process.stdin
        if moment == "typing":
            pipe, unread = child.process.stdin.fileno(), bytes(4)
            os.write(pipe, b"half")
            wait_for(lambda: fcntl.ioctl(pipe, termios.FIONREAD, unread) == unread)
        else:
            child.give(PASSPHRASE)
            wait_for(lambda: server.users)
        child.process.send_signal(ending)
        printed, complaints = child.finish()
        assert complaints == ""
        assert '{"sent": true}' not in printed
        assert child.process.returncode in (1, -ending)
        assert bool(server.users) == (moment == "waiting")


def test_no_signal_ends_it_once_it_sends(tmp_path: Path) -> None:
    """Nobody could know whether the disk is open."""
    with paramiko_server(tmp_path, Disks(ONE, slow=1)) as initrd:
        with about_to_send(initrd.settings()) as child:
            for ending in SIGNALS:
                child.process.send_signal(ending)
            assert initrd.received() == []
            os.read(child.output, 1 << 16)  # so that it goes on
            wait_for(initrd.received, lambda seen: seen == [RIGHT])
            for ending in SIGNALS:
                child.process.send_signal(ending)
            printed, complaints = child.finish()
            assert json.loads(printed.splitlines()[-1])["outcome"] == "unlocked"
            assert (child.process.returncode, complaints) == (0, "")


def test_nothing_is_sent_if_nobody_reads_that_it_is(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks(ONE)) as initrd:
        with about_to_send(initrd.settings()) as child:
            nobody = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nobody, child.output)
            os.close(nobody)
            assert child.finish() == ("", "")
            assert child.process.returncode > 1
        # The emulation sees an empty answer when its client hangs up.
        assert wait_for(initrd.received) == [b""]


def test_a_person_may_take_time_to_type(tmp_path: Path) -> None:
    with unlocking(settings_at(tmp_path, free_port()), seconds=6) as child:
        time.sleep(7)
        child.give(PASSPHRASE)
        assert json.loads(child.finish()[0])["outcome"] == "not_asked"


# ---- Servers that misbehave ----------------------------------------------------------

HELD: list[socket.socket] = []  # connections to keep open


def sends(data: bytes) -> Serve:
    """Send the data, and nothing more."""

    def serve(connection: socket.socket) -> None:
        HELD.append(connection)
        connection.sendall(data)

    return serve


class OpenServer(paramiko.ServerInterface):
    """Accepts any SSH key, and refuses to run commands.

    It does something else first at one moment: `keys`, `login`, `channel` or `exec`.
    """

    def __init__(
        self, moment: str = "", act: "Callable[[OpenServer], object]" = print
    ) -> None:
        self._moment, self._act = moment, act
        self.version = OPENSSH
        self.connection: socket.socket | None = None
        self.users: list[str] = []  # who tried to log in
        self.reached: list[str] = []

    def reach(self, moment: str) -> None:
        self.reached.append(moment)
        if moment == self._moment:
            self._act(self)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.users.append(username)
        self.reach("login")
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        self.reach("channel")
        return OPEN_SUCCEEDED

    def check_channel_exec_request(
        self, channel: paramiko.Channel, command: bytes
    ) -> bool:
        self.reach("exec")
        return False

    def serve(self, connection: socket.socket, *keys: paramiko.PKey) -> None:
        self.connection = connection
        transport = Transport(connection)
        transport.local_version = self.version
        transport.before_keys = lambda: self.reach("keys")
        for key in keys or (HOST_KEY,):
            transport.add_server_key(key)
        transport.start_server(threading.Event(), self)


class Transport(paramiko.Transport):
    """A connection that is about to exchange keys, and has sent its banner."""

    before_keys: Callable[[], None]

    def _send_kex_init(self) -> None:
        self.before_keys()
        super()._send_kex_init()  # type: ignore[misc]


def freeze(_: OpenServer) -> None:
    time.sleep(20)  # seconds; the client disconnects earlier


def hang_up(server: OpenServer) -> None:
    assert server.connection
    server.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("serve", "expected"),
    [
        (sends(b"SSH-2.0-x\r\n"), "stopped responding, or shares no algorithm"),
        (OpenServer("login", freeze).serve, "stopped responding during login"),
        (OpenServer("login", hang_up).serve, "hung up or stopped .* during login"),
        (OpenServer("exec", freeze).serve, "before a disk asked"),
    ],
    ids=["frozen", "frozen login", "hang-up", "frozen command"],
)
def test_a_misbehaving_server_is_not_sent_the_passphrase(
    tmp_path: Path, serve: Serve, expected: str
) -> None:
    with tcp_server(serve) as port:
        message = unlock(settings_at(tmp_path, port), seconds=SHORT_UNLOCK)
    assert re.match(f"not_asked: .*{expected}", message), message
    assert message.endswith(NOT_SENT)


@pytest.mark.parametrize("moment", ["keys", "login", "channel", "exec"])
def test_a_step_of_the_clock_ends_no_wait(tmp_path: Path, moment: str) -> None:
    """A box without a clock of its own sets it when it reaches a time server."""
    clock, stepped = stepping_clock(tmp_path)

    def step(_: OpenServer) -> None:
        time.sleep(1)  # until the client waits
        stepped.touch()
        time.sleep(1)

    server = OpenServer(moment, step)
    with tcp_server(server.serve) as port:
        assert unlock(settings_at(tmp_path, port) | clock) == NO_COMMAND
    assert stepped.exists()
    assert server.reached == ["keys", "login", "channel", "exec"]


@pytest.mark.parametrize(
    ("version", "pinned", "expected"),
    [
        (OPENSSH, HOST_KEY, f"up: the system is already up.{NOT_SENT}"),
        (OPENSSH, OTHER_KEY, f"up: the system is already up.{NOT_SENT}"),
        (DROPBEAR, HOST_KEY, NO_COMMAND),
        (DROPBEAR, OTHER_KEY, "host_key_differs: "),
    ],
    ids=["system", "system, another key", "initrd", "initrd, another key"],
)
def test_on_one_port_for_both_only_dropbear_is_the_initrd(
    tmp_path: Path, version: str, pinned: paramiko.PKey, expected: str
) -> None:
    server = OpenServer()
    server.version = version
    with tcp_server(server.serve) as port:
        message = unlock(settings_at(tmp_path, port, pinned, SYSTEM_SSH_PORT=port))
    assert message.startswith(expected)
    assert bool(server.users) == (expected == NO_COMMAND)


def test_tinyssh_is_reported_as_sharing_no_algorithm(tmp_path: Path) -> None:
    keys, program = tmp_path / "tinyssh", need("tinysshd")
    subprocess.run([need("tinysshd-makekey"), keys], check=True)

    def serve(tcp: socket.socket) -> None:
        with tcp:  # as inetd does
            number = tcp.fileno()
            subprocess.run([program, keys], stdin=number, stdout=number, check=False)

    with tcp_server(serve) as port:
        assert "shares no algorithm" in unlock(settings_at(tmp_path, port))


def test_waker_does_not_log_in_to_an_impostor(tmp_path: Path) -> None:
    """A server with several host keys is no impostor if one of them is pinned."""
    pinned = paramiko.RSAKey.generate(2048)  # the type that paramiko likes least
    server = OpenServer()
    with tcp_server(lambda tcp: server.serve(tcp, new_key(), pinned)) as port:
        message = unlock(settings_at(tmp_path, port, OTHER_KEY))
        assert (message.split(":")[0], server.users) == ("host_key_differs", [])
        message = unlock(settings_at(tmp_path, port, pinned))
    assert message == NO_COMMAND
    assert server.users == ["root"]


@pytest.mark.parametrize("kind", ["ed25519", "rsa"])  # other tests use ECDSA
def test_waker_logs_in_as_the_configured_user_with_any_kind_of_key(
    tmp_path: Path, kind: str
) -> None:
    key, server = tmp_path / "own_key", OpenServer()
    make = [need("ssh-keygen"), "-q", "-t", kind, "-N", "", "-f", str(key)]
    subprocess.run(make, check=True)
    with tcp_server(server.serve) as port:
        settings = settings_at(tmp_path, port, SSH_USER="admin", SSH_KEY=key)
        assert unlock(settings) == NO_COMMAND
    assert server.users == ["admin"]


@pytest.mark.parametrize("pinned", [HOST_KEY, ED25519], ids=["ECDSA", "Ed25519"])
def test_the_pinned_host_key_type_is_requested(
    tmp_path: Path, pinned: paramiko.PKey
) -> None:
    """The server has a key of each type, and paramiko prefers Ed25519."""
    server = OpenServer()
    with tcp_server(lambda tcp: server.serve(tcp, HOST_KEY, ED25519)) as port:
        assert unlock(settings_at(tmp_path, port, pinned)) == NO_COMMAND


@pytest.mark.parametrize("kind", ["kex", "key_types", "ciphers", "digests"])
def test_no_weak_algorithm_is_offered(tmp_path: Path, kind: str) -> None:
    """`make test-paramiko` sees this with an older one, which would offer more."""
    with tcp_server(sends(b"SSH-2.0-x\r\n")) as port:
        with connect(parse(settings_at(tmp_path, port))) as transport:
            options = transport.get_security_options()
    assert options.key_types[0] == HOST_KEY.get_name()
    names = getattr(options, kind)
    assert names
    assert not re.search(r"sha1|md5|cbc|dss|\bssh-rsa", " ".join(names))


def test_a_machine_that_loses_its_power_is_noticed_by_keepalive(tmp_path: Path) -> None:
    """While it derives the key, nothing else is sent that could remain unanswered."""
    with paramiko_server(tmp_path, Disks(ONE, slow=3)) as initrd:
        with ThreadPoolExecutor() as pool:
            result = pool.submit(unlock, initrd.settings())
            command = [need("ss"), "-Htno", f"dport = :{initrd.port}"]
            wait_for(
                lambda: subprocess.run(command, check=True, capture_output=True).stdout,
                lambda seen: b"timer:(keepalive," in seen,
            )
        assert result.result() == UNLOCKED


def test_a_machine_that_loses_its_power_is_noticed_in_ten_seconds(
    tmp_path: Path,
) -> None:
    with tcp_server(sends(b"SSH-2.0-x\r\n")) as port:
        with connect(parse(settings_at(tmp_path, port))) as transport:
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
        patient = pool.submit(unlock, slow.settings())
        result = pool.submit(unlock, initrd.settings())
        wait_for(lambda: "d" not in Disks.load(initrd.state).locked)
        Disks({"second": "x"}, mute=True).save(initrd.state)
        began = time.monotonic()
        assert result.result() == UNLOCKED
        assert 14 < time.monotonic() - began < 40  # for the first one it is 60
        assert patient.result() == UNLOCKED
