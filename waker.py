#!/usr/bin/python3
"""Wake one machine by magic packet and unlock its encrypted disk over SSH.

    waker.py [--env-file FILE] [serve | check | unlock | state]

Away from home, you type a PIN and the disk's passphrase into a web page. This daemon,
on a Raspberry Pi or router near the machine, wakes the machine, watches it and unlocks
its disk. The passphrase is sent only after this connection's host key matched a pinned
key and the initrd asked. "Unlocked" is reported only if the initrd said so. The
daemon writes no files; a restart invalidates all tokens.

The rules of this file:
1. Read it top to bottom, once: a name is defined before it is used.
2. Parse input once, on entry. Code past that point relies on the parsed value.
3. Handlers return a Response. One function turns every error into JSON.
4. The route table says which requests need a token.
5. Keep I/O in few functions. Only commands use arguments, signals and
   the environment.
6. Nothing at module level changes. Requests carry `now`; only code that waits, or
   reports progress, reads the clock.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older Python must say so
    sys.exit("waker needs Python 3.11 or later")

import argparse
import base64
import contextlib
import enum
import errno
import functools
import hashlib
import importlib.util
import ipaddress
import json
import math
import os
import re
import resource
import secrets
import select
import signal
import socket
import socketserver
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NewType, cast

if TYPE_CHECKING:  # imported only where needed, to save memory; paramiko takes 20 MB
    import io
    import ssl
    from subprocess import Popen

    from paramiko import PKey, Transport

__version__ = "3.0.0.dev0"

# ---- Values --------------------------------------------------------------------------
# Parsers raise ValueError. No repr shows a secret.

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
HeaderFields = tuple[tuple[str, str], ...]  # names and values of header fields
Address = tuple[str, int]  # IP address and TCP port
Mac = NewType("Mac", bytes)  # six octets


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def parse_mac(text: str) -> Mac:
    """Parse six hex pairs, separated by `:` or by `-`."""
    pair = "[0-9A-Fa-f]{2}"
    found = re.fullmatch(rf"{pair}([:-]){pair}(\1{pair}){{4}}", text)
    octets = bytes.fromhex(re.sub("[:-]", "", text))
    if not found or octets[0] & 1 or not any(octets):  # multicast, or zeros
        raise ValueError
    return Mac(octets)


class Pin:
    """A PIN of 8 to 128 characters, kept as a digest."""

    def __init__(self, text: str) -> None:
        if not 8 <= len(text) <= 128 or text != text.strip():
            raise ValueError
        self._digest: Final = sha256(text.encode())
        self.is_number: Final = text.isdecimal()

    def matches(self, text: str) -> bool:
        return secrets.compare_digest(sha256(text.encode()), self._digest)


class Passphrase:
    """A LUKS passphrase: 1 to 512 bytes of UTF-8 without control characters."""

    def __init__(self, text: str) -> None:
        self.data: Final = text.encode()  # as typed: not stripped, not normalised
        # cryptsetup reads 512 bytes. A control character could edit the input line.
        if not 1 <= len(self.data) <= 512 or re.search(r"[\x00-\x1f\x7f-\x9f]", text):
            raise ValueError


def fingerprint(blob: bytes) -> str:
    """Format a public key's fingerprint as OpenSSH does."""
    return "SHA256:" + base64.b64encode(sha256(blob)).decode().rstrip("=")


# A line has host names, a key type, the key and a comment. Host names and comments may
# contain commas, so a comma ends a line only if another key follows. Lines that begin
# with @revoked or @cert-authority do not match.
KEY_TYPE: Final = "(?:ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(?:256|384|521))"
HOSTS: Final = r"\s*(?:[^\s@]\S*\s+)?"
HOST_KEY: Final = re.compile(
    rf"{HOSTS}({KEY_TYPE})\s+([^\s,]+)"
    rf"(?:\s(?:(?!{KEY_TYPE}\s+AAAA|@revoked|@cert-authority).)*?)?"
    rf"(?:,(?={HOSTS}{KEY_TYPE}\s+AAAA)|\s*$)"
)


class HostKey(NamedTuple):
    """A public host key."""

    kind: str
    blob: bytes  # as SSH sends it

    @classmethod
    def parse(cls, kind: str, encoded: str) -> "HostKey":
        """Parse one key from its type and base64 text."""
        blob = base64.b64decode(encoded, validate=True)
        # RFC 4253, 6.6: each field of the blob follows its length in 4 bytes. The first
        # is the type. If the fields do not fill the blob, the paste was truncated.
        first = len(kind).to_bytes(4) + kind.encode()
        end = len(first)
        while end < len(blob):
            end += 4 + int.from_bytes(blob[end : end + 4])
        if end != len(blob) or blob == first or not blob.startswith(first):
            raise ValueError
        return cls(kind, blob)

    @classmethod
    def parse_all(cls, text: str) -> tuple["HostKey", ...]:
        """Parse comma-separated lines of .pub or known_hosts files, if any."""
        keys: list[HostKey] = []
        end = 0
        while end < len(text):
            found = HOST_KEY.match(text, end)
            if not found:
                raise ValueError
            keys.append(cls.parse(found[1], found[2]))
            end = found.end()
        return tuple(keys)

    def __str__(self) -> str:
        return f"{self.kind} {base64.b64encode(self.blob).decode()}"


def plain_address(text: str) -> str:
    """Parse an IP address; turn an IPv4-mapped one into IPv4."""
    address = ipaddress.ip_address(text)
    if "%" in text:  # a scope ID such as %eth0 may be arbitrary text
        raise ValueError
    return str(getattr(address, "ipv4_mapped", None) or address)


def in_networks(address: str, networks: Iterable[Network]) -> bool:
    return any(ipaddress.ip_address(address) in network for network in networks)


class FileKind(NamedTuple):
    """A kind of file that a setting names."""

    remedy: str  # how to create it; {} is its path
    wrong: tuple[tuple[str, str], ...] = ()  # how wrong files begin, and the fix
    private: bool = False  # must not be readable by others

    def find_problem(self, path: Path) -> str:
        """Return what is wrong with a file and how to fix it, or an empty string."""
        try:
            mode = path.stat().st_mode
            if not path.is_file():
                return f"{path} is not a file; correct the path"
            content = path.read_bytes().decode("latin-1")
        except FileNotFoundError:
            return f"{path} is missing; correct the path, or {self.remedy.format(path)}"
        except PermissionError:
            advice = "use sudo; for the service, keep the file in /etc/waker"
            return f"{path} cannot be read; {advice}"
        except OSError as error:
            return f"{path}: {error.strerror}; correct the path"
        # waker.service passes a single newline for a missing file.
        if content == "\n" and "credentials" in path.parts:
            source = f"/etc/waker/{path.name}"
            return f"{source} is missing; {self.remedy.format(source)}"
        if not content.strip():
            return f"{path} is empty; {self.remedy.format(path)}"
        for beginning, fix in self.wrong:
            if re.match(beginning, content):
                return f"{path} {fix.format(path)}"
        if self.private and mode & 0o007:
            return f"{path} is open to others; chmod 600 {path}"
        return ""


PKCS8_FIX: Final = (
    "is in PKCS#8 format; convert it with: ssh-keygen -p -N '' -f {} (for Ed25519,"
    " OpenSSH 9.6 or later)"
)
# How common wrong files begin, and the fix. The first match wins.
NOT_KEYS: Final = (
    (r"(ssh|ecdsa)-", "is a public key; name the private one, without .pub"),
    (r"PuTTY-", "is in PuTTY's format; run puttygen {0} -O private-openssh -o {0}.new"),
    (
        r"\0\0\0",
        "is in dropbear's format; run dropbearconvert dropbear openssh {0} {0}.new",
    ),
    (r"(?s)(?!.*PRIVATE KEY)", "must be an Ed25519, ECDSA or RSA private key"),
)
NOT_SSH_KEYS: Final = (
    (r"\s*-+BEGIN (ENCRYPTED )?PRIVATE KEY", PKCS8_FIX),
    *NOT_KEYS,
)
MAKE_KEY: Final = "make it with: ssh-keygen -t ed25519 -N '' -f {}"
MAKE_CERT: Final = (
    "make certificate and key with: openssl req -x509 -newkey rsa:3072 -nodes -days 365"
    " -subj /CN=waker -keyout key.pem -out cert.pem"
)
SSH_KEY: Final = FileKind(MAKE_KEY, NOT_SSH_KEYS, private=True)
TLS_CERT: Final = FileKind(MAKE_CERT)
TLS_KEY: Final = FileKind(MAKE_CERT, NOT_KEYS, private=True)
SETTINGS_FILE: Final = FileKind("copy waker.env.example there and edit it")


class Fault(Exception):
    """An HTTP error response."""

    def __init__(self, status: int, text: str, *headers: tuple[str, str]) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


# ---- Outcomes ------------------------------------------------------------------------
# The outcomes of an unlock. Only text printed by the initrd means UNLOCKED or
# WRONG_PASSPHRASE.

UNSENT: Final = "The passphrase was not sent."
SENT_BUT: Final = "Not confirmed: the passphrase was sent, but "
OLD_SCRIPT_FIX: Final = (
    "the initrd's unlock script is waker 2's. Type the passphrase at the server, or put"
    " waker 2.1 back on this box; then renew the initrd's unlock script"
    " (docs/initrds.md)"
)
MAY_GIVE_UP: Final = (
    ". Be careful: after another wrong passphrase, systemd may give up until you"
    " restart the server (unless crypttab has tries=0)"
)
SUCCESSES: Final = ("unlocked", "already_open", "up")  # words of Outcome


class Outcome(enum.Enum):
    """The outcome of an unlock: a word for programs and a sentence for people.

    A detail may follow the sentence.
    """

    UNLOCKED = "unlocked", "Unlocked: "
    WRONG_PASSPHRASE = "wrong_passphrase", "Wrong passphrase for "
    GAVE_UP = (
        "gave_up",
        "the server stopped asking for the passphrase and must be restarted",
    )
    ASKS = "not_confirmed", f"{SENT_BUT}a disk is still asking"
    NOT_CONFIRMED = "not_confirmed", SENT_BUT
    # Before the passphrase was sent:
    ALL_OPEN = "already_open", "no passphrase is needed: all disks seem to be open"
    BOOTED = "up", "no passphrase is needed: the system is already up"
    OTHER_HOST_KEY = "host_key_differs", "the host key differs: "
    KEY_REFUSED = "key_refused", "the server refused waker's SSH key "
    UNREACHABLE = "not_asked", "port "
    BROKEN_OFF = "not_asked", "the SSH server hung up or stopped responding during "
    TOO_EARLY = "not_asked", "the initrd is not ready yet; try again in a few seconds"
    IDLE = "not_asked", "no disk is asking yet: too early, or already unlocked"
    LOST = "not_asked", "the connection was lost before a disk asked; try again"
    SILENT = "not_asked", "logged in, but no disk asked for its passphrase in time"
    TOO_MUCH = "not_asked", "the unlock command wrote too much text without asking"
    ENDED = "not_asked", "the unlock command ended without asking; try again"
    MISSING = "error", "logged in, but there is no unlock command: see docs/initrds.md"
    REFUSED = "error", "logged in, but the server refuses to run the unlock command"
    OLD_SCRIPT = "error", OLD_SCRIPT_FIX
    NO_MEMORY = "error", "out of memory while talking to the SSH server"
    REPORTED = "error", "the initrd reports: "
    ERROR = "error", ""


class Result(NamedTuple):
    """The result of an unlock as it is reported; `outcome` is for programs."""

    outcome: str
    sent: bool  # whether the passphrase may have been sent
    message: str

    @classmethod
    def of(cls, outcome: Outcome, detail: str = "", *, sent: bool) -> "Result":
        """Build the message; add whether it was sent unless the words imply it."""
        word, sentence = outcome.value
        message = f"{sentence}{detail}."
        if word not in ("unlocked", "not_confirmed", "wrong_passphrase"):
            message += " The passphrase was sent." if sent else f" {UNSENT}"
        return cls(word, sent, message)


class NotSent(Exception):
    """Why an unlock ends before the passphrase is sent."""

    def __init__(self, outcome: Outcome, detail: str = "") -> None:
        super().__init__(outcome.value[1] + detail)
        self.result = Result.of(outcome, detail, sent=False)


# ---- The initrd's words --------------------------------------------------------------
# The command that unlocks, and what its output means. Debian's initrds have it; for
# systemd initrds, docs/dracut has one of ours that uses the same words.

COMMAND: Final = "cryptroot-unlock"
DISK: Final = r"([^\x00-\x20\x7f-\xa0]+)"  # its name, without spaces
CAREFUL: Final = f"{COMMAND}: systemd may give up after another wrong passphrase"
# Each line of output is searched for these patterns, and the first match wins. A group
# names the disk, or an error. Source: cryptsetup-initramfs 2.6.1 to 2.8.8.
WORDS: Final = (
    (rf"Please unlock disk {DISK}", Outcome.ASKS),
    (rf"cryptsetup: {DISK} set up successfully", Outcome.UNLOCKED),
    ("bad password or options", Outcome.WRONG_PASSPHRASE),
    ("maximum number of tries", Outcome.WRONG_PASSPHRASE),
    ("Timeout reached while waiting for askpass", Outcome.IDLE),
    ("Try again later", Outcome.TOO_EARLY),
    # These are ours.
    (f"^{COMMAND}: every disk is open$", Outcome.ALL_OPEN),
    (f"^{COMMAND}: gave up on ", Outcome.GAVE_UP),
    (f"^{COMMAND}: the system has booted$", Outcome.BOOTED),
    (f"^{COMMAND}: (.+)", Outcome.REPORTED),
    ("^waker:", Outcome.OLD_SCRIPT),
)


class Machine(NamedTuple):
    """The machine to wake and unlock."""

    host: str
    initrd_port: int
    system_port: int
    user: str
    key: Path
    host_keys: tuple[HostKey, ...]

    def settings(self) -> dict[str, str]:
        return {
            "WAKER_HOMELAB_HOST": self.host,
            "WAKER_INITRD_SSH_PORT": str(self.initrd_port),
            "WAKER_SYSTEM_SSH_PORT": str(self.system_port),
            "WAKER_SSH_USER": self.user,
            "WAKER_SSH_KEY": str(self.key),
            "WAKER_SSH_HOST_KEY": ",".join(map(str, self.host_keys)),
        }


class Config(NamedTuple):
    """All settings, in the order of SETTINGS, and constants that only tests change."""

    machine: Machine
    mac: Mac
    broadcast: IPv4Address
    name: str
    pin: Pin
    listen: Address
    tls_cert: Path | None
    tls_key: Path | None
    proxies: tuple[Network, ...]  # whose X-Forwarded-For is believed
    packet_port: int = 9  # UDP; fixed by the interface
    unlock_seconds: int = 90  # room for a slow key derivation on a slow machine
    packet_seconds: float = 10  # between packets, while nothing answers
    retry_seconds: float = 5  # between tries to unlock, while no disk asks
    prompt_seconds: float = 120  # for a disk to ask, counted from the first try
    doubt_seconds: float = 45  # before the message says that the initrd still runs
    start_seconds: float = 600  # for the initrd to come up, and then for the system


# ---- Watching ------------------------------------------------------------------------
# Check the machine by connecting to its two ports, within a second.

PROBE_SECONDS: Final = 0.8  # for a port to answer: a LAN takes milliseconds


class PortState(enum.Enum):
    """The state of a TCP port, in words for people."""

    OPEN = "is open"
    CLOSED = "refuses connections"  # which proves that the machine is on
    SILENT = "does not answer"
    UNKNOWN = "could not be checked; is WAKER_HOMELAB_HOST right?"  # our own failure


class PortStates(NamedTuple):
    """The states of the machine's two ports."""

    initrd: PortState
    system: PortState

    def members(self) -> dict[str, object]:
        """Return the machine's part of GET /api/status."""
        state = "off"
        if PortState.CLOSED in self:
            state = "booting"
        if self.initrd is PortState.OPEN:
            state = "locked"
        if PortState.UNKNOWN in self:
            state = "unknown"
        if self.system is PortState.OPEN:
            state = "up"
        return {
            "state": state,
            "reachable": PortState.OPEN in self or PortState.CLOSED in self,
            "initrd_ssh_open": self.initrd is PortState.OPEN,
            "system_ssh_open": self.system is PortState.OPEN,
        }


def open_tcp(host: str, port: int, seconds: float) -> socket.socket:
    """Connect; `seconds` limits each operation on the socket. Raises: OSError."""
    # Bytes avoid the idna codec, which OpenWrt packages separately.
    address: Any = host.encode(), port
    return socket.create_connection(address, seconds)


def probe_port(host: str, port: int, *, banner: bool = False) -> tuple[PortState, str]:
    """Return a port's state and, if asked for, its SSH banner."""
    deadline = time.monotonic() + PROBE_SECONDS
    try:
        tcp = open_tcp(host, port, PROBE_SECONDS)
    except (ConnectionRefusedError, ConnectionResetError):
        return PortState.CLOSED, ""
    except OSError as error:
        # EHOSTUNREACH: nothing answered ARP. Other errors are local.
        if isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH:
            return PortState.SILENT, ""
        return PortState.UNKNOWN, ""
    state, received = PortState.UNKNOWN, b""
    with tcp, contextlib.suppress(OSError):  # no banner in time, or the peer has gone
        tcp.getpeername()  # fails unless connected; Linux may report success too early
        state = PortState.OPEN
        while banner and b"\n" not in received and len(received) < 255:
            tcp.settimeout(max(deadline - time.monotonic(), 0.001))
            received += tcp.recv(255) or b"\n"
    return state, received.partition(b"\n")[0].decode("latin-1").strip()


def check_ports(machine: Machine) -> PortStates:
    """Check both ports at once; on a shared port, dropbear means the initrd."""
    if machine.initrd_port == machine.system_port:
        state, banner = probe_port(machine.host, machine.system_port, banner=True)
        if state is not PortState.OPEN:
            return PortStates(state, state)
        if not banner:  # SSH is not up yet
            return PortStates(PortState.CLOSED, PortState.CLOSED)
        if "dropbear" in banner:
            return PortStates(initrd=PortState.OPEN, system=PortState.CLOSED)
        return PortStates(initrd=PortState.CLOSED, system=PortState.OPEN)
    ports = machine.initrd_port, machine.system_port
    states = dict.fromkeys(ports, PortState.UNKNOWN)

    def probe(port: int) -> None:
        states[port], _ = probe_port(machine.host, port)

    other = threading.Thread(target=probe, args=(machine.system_port,))
    with contextlib.suppress(RuntimeError):  # no thread can start: both stay unknown
        other.start()
        probe(machine.initrd_port)
        other.join()
    return PortStates(*states.values())


class Watcher:
    """Checks the ports at most once a second and shares the result."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = threading.Lock()
        self._checked = -math.inf  # `now` of the last check, in monotonic seconds
        self._states = PortStates(PortState.UNKNOWN, PortState.UNKNOWN)

    def check(self, now: float) -> PortStates:
        """Return a result that is at most a second old."""
        with self._lock:
            if now >= self._checked + 1:  # OpenSSH 9.8 penalises frequent connections
                self._states = check_ports(self._machine)
                self._checked = now
            return self._states


# ---- Unlocking -----------------------------------------------------------------------
# `waker.py unlock` unlocks one machine once and exits, which frees its memory. Even a
# verified server may lie: trust as little of its output as possible, and report only
# disk names. After `not_asked`, retrying is safe.

CONNECT_SECONDS: Final = 5  # a LAN takes milliseconds
LOST_SECONDS: Final = 10  # without acknowledgement, before the connection is lost
HANDSHAKE_SECONDS: Final = 10  # key exchange, and login: slow boxes take one or two
PROMPT_SECONDS: Final = 60  # for the first prompt: an emulated machine took 30
NEXT_PROMPT_SECONDS: Final = 15  # for the next disk
END_SECONDS: Final = 3  # for a command to end after its verdict
MAX_LINE: Final = 65536  # bytes of output; no initrd writes a longer line
MAX_OUTPUT: Final = 1 << 20  # bytes of output of one command
MAX_DISKS: Final = 16  # disks to answer; a lying server could keep asking
VERDICTS: Final = (Outcome.UNLOCKED, Outcome.WRONG_PASSPHRASE)
SENT_REPORT: Final = '{"sent": true}'  # printed before the passphrase is sent
NO_PARAMIKO: Final = "paramiko is missing or incomplete; install python3-paramiko"
NOT_PINNED: Final = "no host key is pinned; run waker check while the initrd waits"
# paramiko re-raises whatever ended its thread, so catch everything.
PEER_ERRORS: Final = Exception
SHORTAGES: Final = MemoryError, RuntimeError  # no memory left, or no thread can start


def open_transport(machine: Machine) -> "Transport":
    """Connect; offer no SHA-1, MD5 or CBC. Raises: NotSent."""
    try:
        import paramiko

        paramiko.util.get_logger("paramiko").setLevel("CRITICAL")  # it logs tracebacks
    except (ImportError, AttributeError):  # a newer cryptography has removed something
        raise NotSent(Outcome.ERROR, NO_PARAMIKO) from None
    reason = "does not speak SSH"
    try:
        tcp = open_tcp(machine.host, machine.initrd_port, CONNECT_SECONDS)
        banner = tcp.recv(255, socket.MSG_PEEK)
    except TimeoutError:
        banner = b""
        reason = f"did not answer within {CONNECT_SECONDS} s"
    except OSError as error:
        banner = b""
        reason = f"cannot be reached: {error.strerror}"
    if not banner or not b"SSH-".startswith(banner[:4]):
        where = f"{machine.initrd_port} of {machine.host}"
        raise NotSent(Outcome.UNREACHABLE, f"{where} {reason}")
    # Send small packets at once, and notice a machine that has lost its power.
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_SECONDS // 2)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)
    transport = paramiko.Transport(tcp)
    transport.auth_timeout = HANDSHAKE_SECONDS
    options = transport.get_security_options()
    options.kex = [name for name in options.kex if "sha1" not in name]
    options.digests = [name for name in options.digests if "sha2" in name]
    options.ciphers = [name for name in options.ciphers if re.search("ctr|gcm", name)]
    # Prefer the pinned key type, but accept others so that their fingerprint can be
    # reported. RSA signs with rsa-sha2-256 or -512.
    pinned = tuple(key.kind.replace("ssh-rsa", "rsa-sha2") for key in machine.host_keys)
    strong = [name for name in options.key_types if name not in ("ssh-rsa", "ssh-dss")]
    options.key_types = sorted(strong, key=lambda name: not name.startswith(pinned))
    return transport


def exchange_keys(transport: "Transport", machine: Machine) -> HostKey:
    """Return the host key that the server proved to have. Raises: NotSent."""
    try:
        transport.start_client(timeout=HANDSHAKE_SECONDS)
        key = transport.get_remote_server_key()
    except SHORTAGES:
        raise
    except PEER_ERRORS:
        kinds = " or ".join(key.kind for key in machine.host_keys) or "none"
        detail = "key exchange; the server and paramiko may share no algorithm or"
        detail += f" host key type (pinned: {kinds})"
        raise NotSent(Outcome.BROKEN_OFF, detail) from None
    return HostKey(key.get_name(), key.asbytes())


def verify(seen: HostKey, machine: Machine) -> None:
    """Check that the host key is pinned. Raises: NotSent."""
    if seen not in machine.host_keys:
        pins = " or ".join(fingerprint(key.blob) for key in machine.host_keys)
        detail = f"pinned {pins}, seen {fingerprint(seen.blob)}. Is the system"
        detail += " up, or was its key pinned? If neither, suspect an impostor"
        raise NotSent(Outcome.OTHER_HOST_KEY, detail)


def load_key(path: Path) -> "PKey":
    """Load our private key, whatever its type. Raises: NotSent."""
    import paramiko

    problem = SSH_KEY.find_problem(path)
    if problem:
        raise NotSent(Outcome.ERROR, f"SSH key {problem}")
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            return kind.from_private_key_file(str(path))
        except paramiko.PasswordRequiredException:
            reason = f"SSH key {path} has a passphrase; remove it with: ssh-keygen -p"
            reason += f" -N '' -f {path}"
            raise NotSent(Outcome.ERROR, reason) from None
        except SHORTAGES:
            raise
        except PEER_ERRORS:
            continue  # another type, or damaged
    reason = f"SSH key {path} is damaged, or not an Ed25519, ECDSA or RSA key"
    raise NotSent(Outcome.ERROR, reason)


def log_in(transport: "Transport", machine: Machine) -> None:
    """Authenticate with WAKER_SSH_KEY and nothing else. Raises: NotSent."""
    key = load_key(machine.key)
    try:
        transport.auth_publickey(machine.user, key)
    except SHORTAGES:
        raise
    except PEER_ERRORS as error:
        if isinstance(transport.saved_exception, MemoryError):
            raise NotSent(Outcome.NO_MEMORY) from None
        if "timeout" in str(error) or not transport.is_active():
            raise NotSent(Outcome.BROKEN_OFF, "login") from None
    if not transport.is_authenticated():
        detail = f"{fingerprint(key.asbytes())} for user {machine.user}: add it"
        detail += " to the initrd's authorized_keys and rebuild the initrd, or correct"
        detail += " WAKER_SSH_USER, or install that user's shell in the initrd"
        raise NotSent(Outcome.KEY_REFUSED, detail)


class Command:
    """One run of the unlock command, read as a sequence of events."""

    def __init__(self, transport: "Transport") -> None:
        self.careful = False  # whether the initrd has warned of giving up
        self._lines: deque[bytes] = deque()  # of the output, not yet read as events
        self._rest = b""  # a line that is not complete yet
        self._received = 0  # bytes, in all
        self._channel = transport.open_session()
        self._channel.set_combine_stderr(True)
        self._channel.exec_command(COMMAND)

    def _receive(self) -> bool:
        """Take some output; False if it has ended. Raises: TimeoutError."""
        data = self._channel.recv(65536)
        self._received += len(data)
        end = data or b"\n"  # the end completes the last line
        *lines, rest = (self._rest + end).split(b"\n")
        self._lines += lines
        self._rest = rest[-MAX_LINE:]
        return bool(data)

    def _find_event(self) -> tuple[Outcome, str] | None:
        """Return the next event in the lines, and the disk that it names."""
        while self._lines:
            line = self._lines.popleft().decode(errors="backslashreplace")
            if line == CAREFUL:
                self.careful = True
                continue
            for pattern, event in WORDS:
                found = re.search(pattern, line)
                if found:
                    return event, "".join(found.groups())
        return None

    def next_event(self, until: float) -> tuple[Outcome, str]:
        """Return the next event and the disk that it names, or why there is none."""
        ended = False
        while not (event := self._find_event()):
            if ended:
                self._channel.status_event.wait(END_SECONDS)  # it may follow the output
                missing = Outcome.MISSING
                endings = {0: Outcome.ALL_OPEN, 126: missing, 127: missing}
                return endings.get(self._channel.exit_status, Outcome.ENDED), ""
            if self._received > MAX_OUTPUT:
                self._channel.get_transport().close()
                return Outcome.TOO_MUCH, ""
            # With a timeout of 0, `recv` still returns what arrived in time.
            self._channel.settimeout(max(until - time.monotonic(), 0))
            try:
                ended = not self._receive()
            except TimeoutError:
                return Outcome.SILENT, ""
        return event

    def answer(self, passphrase: Passphrase, disk: str, until: float) -> Outcome:
        """Send the passphrase and return the verdict.

        Ignore earlier output, and success messages for other disks.
        """
        while self._channel.recv_ready() and self._received <= MAX_OUTPUT:
            self._receive()
        self._lines.clear()
        self._rest = b""
        try:
            self._channel.settimeout(0)  # an honest server's window has room for it
            # Debian's command reads to the end of input, so a newline would become
            # part of the passphrase.
            self._channel.sendall(passphrase.data)
        except PEER_ERRORS:
            return Outcome.ENDED
        with contextlib.suppress(PEER_ERRORS):  # the command may have ended already
            self._channel.shutdown_write()
        event, named = self.next_event(until)
        while event is Outcome.UNLOCKED and named != disk:
            event, named = self.next_event(until)
        return event


class Session:
    """An authenticated connection to a verified machine."""

    def __init__(
        self, transport: "Transport", passphrase: Passphrase, deadline: float
    ) -> None:
        self._transport = transport
        self._passphrase = passphrase
        self._deadline = deadline
        self._opened: list[str] = []  # disks, in this session
        self._answered: set[str] = set()  # disks that asked

    def _explain_end(self, event: Outcome) -> Outcome:
        """Return the event; if the connection ended with the command, return why."""
        if event not in (Outcome.ENDED, Outcome.REFUSED):
            return event
        self._transport.join(1)  # it may be about to notice that the connection ended
        if isinstance(self._transport.saved_exception, MemoryError):
            return Outcome.NO_MEMORY
        if self._transport.is_active():
            return event
        return Outcome.LOST if time.monotonic() < self._deadline else Outcome.SILENT

    def _show(self, text: str, limit: int = 200) -> str:
        """Shorten the initrd's text, and hide it if it contains the passphrase."""
        if self._passphrase.data.decode() in text:
            return "(hidden)"
        return text[:limit]

    def _list_opened(self) -> str:
        return self._show(", ".join(map(self._show, self._opened)), 600)

    def _wait_for_prompt(self, seconds: float) -> tuple[Command, str]:
        """Run the command until it asks; return the disk that does. Raises: NotSent."""
        until = min(self._deadline, time.monotonic() + seconds)
        try:
            command = Command(self._transport)
        except SHORTAGES:
            raise
        except PEER_ERRORS:
            raise NotSent(self._explain_end(Outcome.REFUSED)) from None
        event, named = command.next_event(until)
        while event in VERDICTS:  # somebody else answered
            event, named = command.next_event(until)
        if event is Outcome.REPORTED:
            raise NotSent(event, self._show(named))
        if event is not Outcome.ASKS:
            raise NotSent(self._explain_end(event))
        return command, named

    def _explain_failure(
        self, event: Outcome, disk: str = "", *, careful: bool = False
    ) -> Result:
        """Return the result for anything but UNLOCKED after the passphrase was sent."""
        unlocked = f"; unlocked: {self._list_opened()}" if self._opened else ""
        named = self._show(disk)
        if event is Outcome.WRONG_PASSPHRASE:
            detail = f"disk {named}{unlocked}{MAY_GIVE_UP if careful else ''}"
            return Result.of(event, detail, sent=True)
        if event is Outcome.ASKS or (event is Outcome.GAVE_UP and not self._opened):
            return Result.of(event, unlocked, sent=True)
        reasons = {
            # The server boots all the same, unless this is its root disk.
            Outcome.GAVE_UP: f"the initrd gave up on disk {named}",
            Outcome.LOST: "the connection was lost before the initrd confirmed it",
            Outcome.NO_MEMORY: "waker ran out of memory before the initrd confirmed it",
        }
        reason = reasons.get(event, "the initrd did not confirm it")
        return Result.of(Outcome.NOT_CONFIRMED, reason + unlocked, sent=True)

    def _answer_disks(self, before_sending: Callable[[], None]) -> Result:
        """Answer each disk that asks, once, until no new disk asks."""
        seconds = PROMPT_SECONDS
        while True:
            try:
                command, disk = self._wait_for_prompt(seconds)
            except NotSent as why:
                if not self._opened:
                    return why.result
                return Result.of(Outcome.UNLOCKED, self._list_opened(), sent=True)
            # Never answer a disk twice.
            if disk in self._answered or len(self._answered) == MAX_DISKS:
                return self._explain_failure(Outcome.ASKS)
            self._answered.add(disk)
            before_sending()
            event = command.answer(self._passphrase, disk, self._deadline)
            if event is not Outcome.UNLOCKED:
                event = self._explain_end(event)
                return self._explain_failure(event, disk, careful=command.careful)
            self._opened.append(disk)
            # Dropbear may end a channel that is opened before the last one has ended.
            command.next_event(time.monotonic() + END_SECONDS)
            seconds = NEXT_PROMPT_SECONDS

    def unlock(self, before_sending: Callable[[], None]) -> Result:
        """Unlock the disks; call `before_sending` each time before it is sent."""
        try:
            return self._answer_disks(before_sending)
        except SHORTAGES:
            if not self._answered:
                return Result.of(Outcome.NO_MEMORY, sent=False)
            if self._answered <= set(self._opened):  # nothing is in doubt
                return Result.of(Outcome.UNLOCKED, self._list_opened(), sent=True)
            return self._explain_failure(Outcome.NO_MEMORY)


def unlock(
    machine: Machine,
    passphrase: Passphrase,
    deadline: float,
    before_sending: Callable[[], None],
) -> Result:
    """Unlock the disks; call `before_sending` each time before it is sent."""
    try:
        if not machine.host_keys:
            raise NotSent(Outcome.ERROR, NOT_PINNED)
        transport = open_transport(machine)
        # Some of paramiko's waits have no timeout, but all end with the connection.
        watchdog = threading.Timer(deadline - time.monotonic(), transport.close)
        watchdog.daemon = True
        watchdog.start()
        verify(exchange_keys(transport, machine), machine)
        log_in(transport, machine)
    except NotSent as why:
        return why.result
    except SHORTAGES:
        return Result.of(Outcome.NO_MEMORY, sent=False)
    session = Session(transport, passphrase, deadline)
    return session.unlock(before_sending)


class Unlocker:
    """Runs `waker.py unlock`, one at a time, in a process that can be killed."""

    def __init__(self, config: Config, program: Path, env: Mapping[str, str]) -> None:
        command = sys.executable, str(program.resolve()), "unlock"
        self._command = (*command, "--seconds", str(config.unlock_seconds))
        self._seconds = config.unlock_seconds
        self._machine = config.machine
        # Variables such as PYTHONPATH may be what makes paramiko available. The
        # machine's settings do not include the PIN.
        others = {n: v for n, v in env.items() if not n.startswith("WAKER_")}
        self._environment = others | config.machine.settings()
        self.claimed = threading.Lock()  # another thread may release it

    def claim(self, purpose: str) -> None:
        """Reserve the unlocker. Raises: Fault 409 if it is taken; 500."""
        problem = SSH_KEY.find_problem(self._machine.key)
        if problem:
            problem = f"SSH key {problem}"
        if not importlib.util.find_spec("paramiko"):  # importing it would take 20 MB
            problem = NO_PARAMIKO
        if not self._machine.host_keys:
            problem = NOT_PINNED
        if problem:
            raise Fault(500, f"Failed to {purpose}: {problem}. {UNSENT}")
        if not self.claimed.acquire(blocking=False):
            raise Fault(409, "Another unlock or start is running; wait for it to end")

    def _read_reports(
        self, child: "Popen[bytes]", cancelled: Event, sent: Event
    ) -> bytes:
        """Read all that the process prints; kill it at its deadline or on a cancel."""
        stdout = cast("io.BufferedReader", child.stdout)
        deadline = time.monotonic() + self._seconds + 5  # for the process to start
        reports = b""
        while True:
            if select.select([stdout], [], [], 0.1)[0]:  # seconds between checks
                data = os.read(stdout.fileno(), 4096)
                if not data:
                    return reports
                reports += data
            if SENT_REPORT.encode() in reports:
                sent.set()
            unwanted = cancelled.is_set() and not sent.is_set()
            if unwanted or time.monotonic() > deadline:
                child.kill()  # keep reading: it may have reported before it died

    def run(self, passphrase: Passphrase, cancelled: Event, sent: Event) -> Result:
        """Unlock. `sent` is set before sending; a cancel before that kills it."""
        import subprocess

        try:
            # The process inherits blocked signals; its own session keeps SIGHUP away.
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            reason = f"the unlocking process cannot start: {error.strerror}"
            return Result.of(Outcome.ERROR, reason, sent=False)
        with child:  # waits for its end
            stdin = cast("io.BufferedWriter", child.stdin)
            with contextlib.suppress(BrokenPipeError):  # the child's output says why
                if not cancelled.is_set():
                    stdin.write(passphrase.data)  # fits into the pipe: cannot block
                stdin.close()
            reports = self._read_reports(child, cancelled, sent)
        *_, last = reports.splitlines() or [b""]
        with contextlib.suppress(ValueError, TypeError):  # it is not a result
            return Result(**json.loads(last))
        reason = f"the unlocking process ended with status {child.returncode}"
        outcome = Outcome.NOT_CONFIRMED if sent.is_set() else Outcome.ERROR
        return Result.of(outcome, f"{reason}; see waker's log", sent=sent.is_set())


# ---- Configuration -------------------------------------------------------------------
# One table drives parsing and --help. All mistakes are reported at once, each with the
# valid form but without the value, which may be a misplaced secret. An unknown WAKER_
# name is a mistake: a typo must not weaken anything silently.

ENV_FILE: Final = "/etc/waker/waker.env"


class ConfigError(Exception):
    """What is wrong with the configuration, one mistake per line."""


def match_whole(pattern: str, text: str) -> str:
    """Return the text if all of it matches the pattern."""
    if not re.fullmatch(pattern, text, re.ASCII):
        raise ValueError
    return text


def parse_port(text: str) -> int:
    if int(match_whole("[1-9][0-9]{0,4}", text)) > 65535:
        raise ValueError
    return int(text)


def parse_path(text: str) -> Path | None:
    """Parse a path; `~` is not expanded, since waker may run as another user."""
    return Path(match_whole(r"(?!~)[^\x00-\x1f]+", text)) if text else None


def parse_host(text: str) -> str:
    """Parse the address of a single machine."""
    host = plain_address(text)
    address = ipaddress.ip_address(host)
    if address.is_multicast or address.is_unspecified or host == "255.255.255.255":
        raise ValueError
    if ":" in host and address.is_link_local:  # it would need a scope ID
        raise ValueError
    return host


def parse_listen(text: str) -> Address:
    """Parse ADDRESS:PORT, with an IPv6 address in brackets; port 0 is any free one."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})", text)
    if not found or int(found[3]) > 65535:
        raise ValueError
    return plain_address(found[1] or found[2]), int(found[3])


def parse_networks(text: str) -> tuple[Network, ...]:
    parts = text.split(",") if text else ()
    return tuple(ipaddress.ip_network(part.strip()) for part in parts)


# Name, default, parser, valid form. Text after a `;` appears only in error messages.
# In the order of Machine and Config. An empty value means that a setting is not set.
Setting = tuple[str, str, Callable[[str], object], str]
PARSE_USER: Final = functools.partial(match_whole, "[!-~]{1,64}")
PARSE_NAME: Final = functools.partial(match_whole, "[^\x00-\x1f\x7f-\x9f]{0,64}")
ADDRESS_FORM: Final = (
    "the server's own IP address, such as 192.168.1.20; `ping NAME` shows it"
)
MAC_FORM: Final = (
    "a MAC address such as 52:54:00:12:34:56; the network card's own, as `ip link`"
    " shows it, not a group address"
)
WHOLE: Final = "; write the full path, without ~"
KEY_FORM: Final = (
    "a line such as ssh-ed25519 AAAA...; the whole key, not its fingerprint"
)
PROXY_FORM: Final = (
    "addresses such as 10.0.0.2,10.0.0.3; the host part of a network must be zero, as"
    " in 10.0.0.0/24"
)
SETTINGS: Final[tuple[Setting, ...]] = (
    ("WAKER_HOMELAB_HOST", "", parse_host, ADDRESS_FORM),
    ("WAKER_INITRD_SSH_PORT", "2222", parse_port, "a port, 1 to 65535"),
    ("WAKER_SYSTEM_SSH_PORT", "22", parse_port, "a port, 1 to 65535"),
    ("WAKER_SSH_USER", "root", PARSE_USER, "a user's name"),
    ("WAKER_SSH_KEY", "ssh_key", parse_path, f"the path of the SSH key{WHOLE}"),
    ("WAKER_SSH_HOST_KEY", "", HostKey.parse_all, KEY_FORM),
    ("WAKER_HOMELAB_MAC", "", parse_mac, MAC_FORM),
    ("WAKER_HOMELAB_BROADCAST", "255.255.255.255", IPv4Address, "an IPv4 address"),
    ("WAKER_HOMELAB_NAME", "", PARSE_NAME, "a name of at most 64 characters"),
    ("WAKER_PIN", "", Pin, "8 to 128 characters, without a space at either end"),
    ("WAKER_LISTEN", "[::]:8080", parse_listen, "ADDRESS:PORT such as 0.0.0.0:8080"),
    ("WAKER_TLS_CERT", "", parse_path, f"the path of a certificate{WHOLE}"),
    ("WAKER_TLS_KEY", "", parse_path, f"the path of the TLS key{WHOLE}"),
    ("WAKER_TRUSTED_PROXY", "", parse_networks, PROXY_FORM),
)
# How wrong values in FILE begin, and the fix. The first match wins.
NOT_VALUES: Final = (
    (r"#|(['\"]).*\1\s+#|[^'\"].*\s#", "move the comment to its own line, or quote it"),
    (r"[\u2018-\u201f]", "use straight quotes, or none"),
    (r"(['\"]).*\1\s+['\"]", "quote the value once, as a whole"),
    (r"(['\"])(?!.*\1$)", "end the value with the quote that begins it"),
    (r"(?!['\"]).*\sWAKER_\w+=", "give each setting a line of its own"),
)


def read_env_file(path: Path) -> dict[str, str]:
    """Parse lines WAKER_NAME=value. Raises: ConfigError, which quotes no line."""
    problem = SETTINGS_FILE.find_problem(path)
    if problem:
        raise ConfigError(problem)
    try:
        text = path.read_text("utf-8-sig")  # some editors add a byte order mark
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; save it as UTF-8") from None
    values: dict[str, str] = {}
    mistakes: dict[str, list[str]] = {}  # the numbers of the lines, by problem
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        # Other programs' names have one case; the rest of a key, ending in =, has both.
        if re.match(r"[#;]|$|(?!(?i:waker_))([A-Z0-9_]+|[a-z0-9_]+)\s*=", line):
            continue  # a comment, or not ours
        found = re.fullmatch(r"((?i:waker_)\w+)\s*=\s*(.*)", line)
        if found:
            name, value = found.groups()
            problem = next((fix for bad, fix in NOT_VALUES if re.match(bad, value)), "")
            if name in values:
                problem = f"{name} is set twice; delete one of the two lines"
            values[name] = value[1:-1] if value.startswith(("'", '"')) else value
        else:
            problem = (
                "write NAME=value, without `export` or `Environment`; or join it to"
            )
            problem += " the line above"
        if problem:
            mistakes.setdefault(problem, []).append(str(number))
    if mistakes:
        rows = (f"{path}, line {', '.join(mistakes[fix])}: {fix}" for fix in mistakes)
        raise ConfigError("\n".join(rows))
    return values


FILES: Final = (
    ("WAKER_SSH_KEY", SSH_KEY),
    ("WAKER_TLS_CERT", TLS_CERT),
    ("WAKER_TLS_KEY", TLS_KEY),
)


def is_public_half(host_key: HostKey, path: Path) -> bool:
    """Return whether a file in OpenSSH's format is this key's private half."""
    lines = path.read_text("latin-1").splitlines()
    body = "".join(line for line in lines if not line.startswith("-"))
    with contextlib.suppress(ValueError):  # another format
        return host_key.blob in base64.b64decode(body)
    return False


def find_conflicts(parsed: Mapping[str, Any]) -> Iterator[str]:
    """Report bad files, and settings that are valid alone but conflict."""
    get = parsed.get
    host, broadcast = get("WAKER_HOMELAB_HOST"), str(get("WAKER_HOMELAB_BROADCAST"))
    if broadcast == "255.255.255.255" and ":" in str(host):
        yield "WAKER_HOMELAB_BROADCAST must be set: WAKER_HOMELAB_HOST is IPv6"
    if broadcast == host:
        yield "WAKER_HOMELAB_HOST and WAKER_HOMELAB_BROADCAST must differ"
    tls = [
        parsed[name] for name in ("WAKER_TLS_CERT", "WAKER_TLS_KEY") if name in parsed
    ]
    if len(tls) == 2 and bool(tls[0]) != bool(tls[1]):
        yield "WAKER_TLS_CERT and WAKER_TLS_KEY must both be set"
    host_keys = get("WAKER_SSH_HOST_KEY")
    for name, kind in FILES:
        path = get(name)
        if not path or (kind is SSH_KEY and host_keys == ()):
            continue  # not used
        problem = kind.find_problem(path)
        if problem:
            yield f"{name} {problem}"
        elif kind is SSH_KEY and any(is_public_half(k, path) for k in host_keys or ()):
            yield "WAKER_SSH_HOST_KEY is waker's own key; paste the server's host key"


def parse_settings(count: int, values: Mapping[str, str], folder: Path) -> list[Any]:
    """Parse the first `count` settings; relative paths start at `folder`."""
    unknown = sorted(values.keys() - {setting[0] for setting in SETTINGS})
    mistakes = [f"{name} is not a setting; see `waker --help`" for name in unknown]
    parsed: dict[str, object] = {}
    for name, default, parse, form in SETTINGS[:count]:
        text = values.get(name) or default
        try:
            value = parse(text)
        except ValueError:
            mistake = f"must be {form}"
            if not text:
                mistake = "is not set (names without WAKER_ are ignored); add a line"
                mistake += f" `{name}=...` with"
                mistake += f" {form.partition(';')[0]}"
            mistakes.append(f"{name} {mistake}")
        else:
            parsed[name] = folder / value if isinstance(value, Path) else value
    mistakes += find_conflicts(parsed)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return list(parsed.values())


def read_config(values: Mapping[str, str], folder: Path) -> Config:
    """Parse all settings; relative paths start at `folder`. Raises: ConfigError."""
    parsed = parse_settings(len(SETTINGS), values, folder)
    count = len(Machine._fields)
    config = Config(Machine(*parsed[:count]), *parsed[count:])
    return config._replace(name=config.name or config.machine.host)


# ---- Waking --------------------------------------------------------------------------
# A magic packet leaves by the interface that leads to the machine.


def magic_packet(mac: Mac) -> bytes:
    """Build the packet. Source: AMD publication 20213, Magic Packet Technology."""
    return b"\xff" * 6 + mac * 16


def find_source(
    config: Config, *, on_link: bool = False, may_broadcast: bool = True
) -> str:
    """Return the address that the magic packet leaves from. Raises: OSError."""
    limited = str(config.broadcast) == "255.255.255.255"  # which has no route
    toward = config.machine.host if limited else str(config.broadcast)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, may_broadcast)
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_DONTROUTE, on_link)
        udp.connect((toward, config.packet_port))
        return str(udp.getsockname()[0])


def wake(config: Config) -> str:
    """Send the magic packet and return a success message. Raises: Fault 500."""
    packet = magic_packet(config.mac)
    try:
        source = find_source(config)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            udp.bind((source, 0))
            for _ in range(3):  # UDP loses some
                udp.sendto(packet, (str(config.broadcast), config.packet_port))
    except OSError as error:
        raise Fault(500, f"Failed to send WOL packet: {error.strerror}") from None
    return f"Magic packet sent to {config.mac.hex(':')} from {source}"


# ---- Log -----------------------------------------------------------------------------
# Events that matter, one per line, on standard error. No line contains a PIN, a
# passphrase, a token, or the text of an exception, which might quote one.

MAX_LOG_LINE: Final = 1000  # characters; less than PIPE_BUF, so a write is atomic


def printable(text: str) -> str:
    return re.sub("[^ -~]", lambda odd: ascii(odd[0])[1:-1], text)


def log(text: str) -> None:
    """Write a line, or drop it if writing would block the daemon."""
    with contextlib.suppress(OSError):  # a broken log must not stop the daemon
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{printable(text)[:MAX_LOG_LINE]}\n".encode())


def describe_bug(error: BaseException) -> str:
    """Return the type and place of an error, but not its text."""
    place = error.__traceback__
    while place and place.tb_next:
        place = place.tb_next
    if not place:
        return f"bug: {type(error).__name__}"
    file = Path(place.tb_frame.f_code.co_filename).name
    return f"bug: {type(error).__name__}, {file}:{place.tb_lineno}"


# ---- Starting ------------------------------------------------------------------------
# Wake, wait, unlock and watch, in a thread: the phone may go to sleep. The passphrase
# is kept until the unlocking process has ended.

SHOWN_SECONDS: Final = 3600  # how long the status shows a finished start
STILL_LOCKED: Final = (
    "The initrd is still running: it may still be checking the passphrase, or the"
    " passphrase was wrong."
)


class Phase(enum.Enum):
    """The phase of a start, for programs."""

    WAKING = "waking"
    UNLOCKING = "unlocking"
    BOOTING = "booting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


CLAIMING: Final = (Phase.WAKING, Phase.UNLOCKING)  # no other unlock may run
ENDINGS: Final = (Phase.DONE, Phase.FAILED, Phase.CANCELLED)


class Ended(Exception):
    """Ends a start. Its arguments are phase, outcome and message."""


class Start:
    """One start, as the status shows it. The lock of Starter guards it."""

    def __init__(self, began: float) -> None:
        self.began = began  # monotonic seconds, as are the next two
        self.ended = math.inf  # while it runs
        self.packet_due = -math.inf  # the next magic packet
        self.phase = Phase.WAKING
        self.outcome: str | None = None  # until something is known
        self.message = "Looking for the server"
        self.times = {"waking": 0}  # seconds from the start to each phase
        self.cancelled = Event()
        self.sent = Event()  # the passphrase may have been sent


class Starter:
    """Runs one start at a time and reports its progress, or how the last one ended.

    It claims the unlocker until the system may boot. Then it only watches, and a new
    start or unlock may replace it.
    """

    def __init__(self, config: Config, watcher: Watcher, unlocker: Unlocker) -> None:
        self._config = config
        self._watcher = watcher
        self._unlocker = unlocker
        self._lock = threading.RLock()
        self._last: Start | None = None  # running, or shown until it is forgotten

    def _report(
        self, start: Start, phase: Phase, outcome: str | None, text: str
    ) -> None:
        """Show a phase and a message, unless the start has ended or was replaced."""
        with self._lock:
            if start.phase in ENDINGS:
                return
            was_claiming = start.phase in CLAIMING
            is_news = (phase, text) != (start.phase, start.message)
            start.phase = phase
            start.outcome = outcome
            start.message = text
            now = time.monotonic()
            start.times.setdefault(phase.value, int(now - start.began))
            if phase in ENDINGS:
                start.ended = now
            if was_claiming and phase not in CLAIMING:
                self._unlocker.claimed.release()
            if is_news:
                log(f"start: {phase.value}: {text}")

    def _pause(self, start: Start, seconds: float) -> None:
        """Wait. Raises: Ended if the start is cancelled."""
        if start.cancelled.wait(seconds):
            raise Ended(Phase.CANCELLED, "cancelled", f"Cancelled. {UNSENT}")

    def _send_packet(self, start: Start, now: float) -> str:
        """Send a magic packet; return a message. Raises: Ended if the first fails."""
        is_first = start.packet_due < 0
        start.packet_due = now + self._config.packet_seconds
        try:
            return wake(self._config)
        except Fault as fault:
            if is_first:
                raise Ended(Phase.FAILED, "error", f"{fault}. {UNSENT}") from None
            return f"{fault}; trying again"  # the link may drop while the machine wakes

    def _wait_for_initrd(self, start: Start, deadline: float) -> None:
        """Wake the machine until the initrd's port is open. Raises: Ended."""
        why = "did not wake: check power, network cable and Wake-on-LAN."
        if start.phase is Phase.UNLOCKING:  # an earlier try reached the initrd
            why = "stopped responding."
        message = start.message
        while True:
            now = time.monotonic()
            ports = self._watcher.check(now)
            self._pause(start, 0)
            if ports.system is PortState.OPEN:
                raise Ended(Phase.DONE, "up", f"The system is already up. {UNSENT}")
            if ports.initrd is PortState.OPEN:
                return
            if now > deadline:
                if PortState.UNKNOWN in ports:
                    why = "could not be checked; is WAKER_HOMELAB_HOST right?"
                raise Ended(Phase.FAILED, "not_awake", f"The server {why} {UNSENT}")
            if PortState.CLOSED in ports:
                message = "The server is awake and starting up"
                why = "woke, but its initrd's SSH port stayed closed."
            elif now >= start.packet_due:
                message = self._send_packet(start, now)
            self._report(start, Phase.WAKING, None, message)
            self._pause(start, 1)  # second

    def _unlock(self, start: Start, passphrase: Passphrase) -> Result:
        """Wake and unlock; try again while no disk asks. Raises: Ended."""
        deadline = time.monotonic() + self._config.start_seconds
        give_up = math.inf
        message = "Connecting to the initrd"
        while True:
            self._wait_for_initrd(start, deadline)
            self._report(start, Phase.UNLOCKING, None, message)
            result = self._unlocker.run(passphrase, start.cancelled, start.sent)
            now = time.monotonic()
            give_up = min(give_up, now + self._config.prompt_seconds)
            if result.outcome != "not_asked" or now > give_up:
                return result
            message = result.message
            self._report(start, Phase.UNLOCKING, None, message)
            self._pause(start, self._config.retry_seconds)

    def _wait_for_system(self, start: Start, result: Result) -> None:
        """Watch until the system's port opens. Raises: Ended."""
        confirmed = result.outcome != "not_confirmed"
        began = time.monotonic()
        message = result.message
        while time.monotonic() < began + self._config.start_seconds:
            if start.cancelled.wait(1):  # second
                raise Ended(Phase.CANCELLED, result.outcome, message)
            now = time.monotonic()
            ports = self._watcher.check(now)
            if ports.system is PortState.OPEN:
                parts = [message, "The system is up."]
                if not confirmed:
                    parts = ["The system is up.", result.message]
                raise Ended(Phase.DONE, "up", " ".join(parts))
            message = result.message
            is_late = now >= began + self._config.doubt_seconds
            if not confirmed and is_late and ports.initrd is PortState.OPEN:
                message = f"{result.message} {STILL_LOCKED}"
            self._report(start, Phase.BOOTING, result.outcome, message)
        raise Ended(
            Phase.FAILED, "not_up", f"{message} The system has not answered yet."
        )

    def _run(self, start: Start, given: list[Passphrase]) -> None:
        try:
            # Pop it, so that only `_unlock` refers to the passphrase.
            result = self._unlock(start, given.pop())
            if result.outcome not in ("unlocked", "already_open", "not_confirmed"):
                if result.outcome in ("not_asked", "error") and not result.sent:
                    self._pause(start, 0)  # a cancel may be the reason
                phase = Phase.DONE if result.outcome == "up" else Phase.FAILED
                raise Ended(phase, result.outcome, result.message)
            self._report(start, Phase.BOOTING, result.outcome, result.message)
            self._wait_for_system(start, result)
        except Ended as ended:
            self._report(start, *ended.args)
        except Exception as error:  # noqa: BLE001 - the status must show a bug
            start.sent.set()
            text = f"{describe_bug(error)}. The passphrase may have been sent."
            self._report(start, Phase.FAILED, "error", text)

    def end_watch(self) -> None:
        """End a watch that a new start or unlock replaces; keep what it showed."""
        with self._lock:
            start = self._last
            if start and start.phase is Phase.BOOTING:
                self._report(start, Phase.CANCELLED, start.outcome, start.message)
                start.cancelled.set()

    def begin(self, passphrase: Passphrase, now: float) -> None:
        """Start. Raises: Fault 409 while another start or unlock runs; 500; 503."""
        with self._lock:
            self._unlocker.claim("start")
            try:
                start = Start(now)
                # Not a daemon thread: on exit, Python waits for it.
                arguments = start, [passphrase]
                threading.Thread(
                    name="start", target=self._run, args=arguments, daemon=False
                ).start()
            except (RuntimeError, MemoryError):
                self._unlocker.claimed.release()
                raise Fault(503, "Too busy; try again", ("Retry-After", "5")) from None
            self.end_watch()
            self._last = start

    def cancel(self) -> None:
        """Cancel the running start. Raises: Fault 409 if no start is running."""
        with self._lock:
            if not self._last or self._last.phase in ENDINGS:
                raise Fault(409, "No start is running")
            self._last.cancelled.set()

    def members(self, now: float, ports: PortStates) -> dict[str, object] | None:
        """Return the last start for the status, or None if there is none to show."""
        with self._lock:
            start = self._last
            if not start:
                return None
            # Keep a host key alarm: an impostor could clear it by opening the port.
            stays = start.phase is Phase.DONE or start.outcome == "host_key_differs"
            is_over = start.phase in ENDINGS and ports.system is PortState.OPEN
            if (is_over and not stays) or start.ended + SHOWN_SECONDS < now:
                self._last = None
                return None
            return {
                "phase": start.phase.value,
                "outcome": start.outcome,
                "message": start.message,
                "seconds": max(int(min(now, start.ended) - start.began), 0),
                "sent": start.sent.is_set(),
                "times": dict(start.times),
            }


# ---- Tokens and attempts -------------------------------------------------------------
# Memory is bounded. Clients share no limit of attempts, or an attacker could use it to
# lock the owner out.

TOKEN_SECONDS: Final = 900  # fixed by the interface
MAX_TOKENS: Final = 64  # at a time, for a household and its scripts
MAX_ATTEMPTS: Final = 10  # per client and minute; fixed by the interface
ATTEMPT_SECONDS: Final = 60
MAX_CLIENTS: Final = 4096  # whose attempts are remembered, in 2.2 MB


def group_client(client: str) -> str:
    """Return a client's key for counting: its IPv4 address, or its IPv6 /56."""
    if ":" not in client:
        return client
    return f"{int(ipaddress.IPv6Address(client)) >> 72:x}::/56"


class Gate:
    """Counts PIN attempts per client, and stores tokens as digests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: dict[str, list[float]] = {}  # times, by client; newest last
        self._expiry: dict[bytes, float] = {}  # by token's digest; oldest first

    def count_attempt(self, client: str, now: float) -> None:
        """Count an attempt. Raises: Fault 429 with Retry-After."""
        name = group_client(client)
        with self._lock:
            times = self._attempts.pop(name, [])
            self._attempts[name] = times
            if len(self._attempts) > MAX_CLIENTS:
                del self._attempts[next(iter(self._attempts))]
            if len(times) < MAX_ATTEMPTS or times[0] + ATTEMPT_SECONDS <= now:
                times.append(now)
                del times[:-MAX_ATTEMPTS]
                return
            wait = str(math.ceil(times[0] + ATTEMPT_SECONDS - now))
        text = f"Too many attempts; try again in {wait} s"
        raise Fault(429, text, ("Retry-After", wait))

    def issue_token(self, now: float) -> str:
        """Issue a token; discard the oldest if there are too many."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            while len(self._expiry) >= MAX_TOKENS:
                del self._expiry[next(iter(self._expiry))]
            self._expiry[sha256(token.encode())] = now + TOKEN_SECONDS
        return token

    def is_valid(self, token: str, now: float) -> bool:
        expiry = self._expiry.get(sha256(token.encode()))
        return expiry is not None and now < expiry


# ---- Handlers and routes -------------------------------------------------------------
# A handler returns a Response or raises a Fault, which `respond` turns into JSON. Path,
# method and token are checked in this order; then the handler checks the body.

MAX_BODY: Final = 16384  # bytes: a PIN or a passphrase, with room to spare


class Request(NamedTuple):
    """A request, as a handler sees it."""

    method: str
    path: str
    client: str  # its address
    now: float  # monotonic seconds
    content_type: str = ""
    token: str = ""
    body: bytes | None = b""  # None if it is longer than MAX_BODY, and unread

    def __repr__(self) -> str:
        return f"Request({self.method} {self.path} from {self.client})"


class Response:
    """An answer, without the header fields that all answers have."""

    def __init__(
        self,
        data: Mapping[str, object] | bytes,
        status: int = 200,
        headers: HeaderFields = (),
    ) -> None:
        self.body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.status = status
        self.headers = headers


def text_member(request: Request, name: str) -> str:
    """Return the text of a JSON body's only member. Raises: Fault 400, 413, 415."""
    if not re.fullmatch(r"(?i)application/json[ \t]*(;.*)?", request.content_type):
        raise Fault(415, "Content-Type must be application/json")
    if request.body is None:
        raise Fault(413, f"The body must have at most {MAX_BODY} bytes")
    # Accept exactly one member, which rules out duplicate names and nesting.
    member = rf'\s*{{\s*"{name}"\s*:\s*("(?:[^"\\]|\\.)*")\s*}}\s*'
    try:
        found = re.fullmatch(member, request.body.decode(), re.ASCII)
        text = str(json.loads(found[1])) if found else ""
        if not text.encode():  # which raises ValueError for half a surrogate pair
            raise ValueError
    except ValueError:
        raise Fault(400, f'The body must be {{"{name}": "<some text>"}}') from None
    return text


# `make dist` puts ui.html here. Otherwise it is beside this file.
PAGE: Final = r"""
"""


def load_page() -> tuple[Response, Response]:
    """Load the page, and from it the icon for iPhones. Raises: ConfigError."""
    path = Path(__file__).resolve().with_name("ui.html")
    try:
        source = PAGE[1:].encode() or path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the page {path}: {error.strerror}") from None
    icon = re.search(rb"png;base64,([\w+/=]+)", source)
    # The policy allows the page's own styles and scripts, by hash, and no others.
    hashes = {b"style": "", b"script": ""}
    for name, code in re.findall(rb"(?s)<(style|script)\b[^>]*>(.*?)</\1>", source):
        hashes[name] += f" 'sha256-{base64.b64encode(sha256(code)).decode()}'"
    if not icon or not all(hashes.values()):
        raise ConfigError("ui.html is damaged; reinstall it")
    policy = (
        f"default-src 'none'; script-src{hashes[b'script']};"
        f" style-src{hashes[b'style']};"
        " connect-src 'self'; img-src 'self' data:; manifest-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    )
    html = "Content-Type", "text/html; charset=utf-8"
    page = Response(source, 200, (("Content-Security-Policy", policy), html))
    png = "Content-Type", "image/png"
    return page, Response(base64.b64decode(icon[1]), 200, (png,))


class App:
    """The parts of the daemon."""

    def __init__(
        self, config: Config, unlocker: Unlocker, tls: "ssl.SSLContext | None" = None
    ) -> None:
        self.config = config
        self.tls = tls
        self.page, self.icon = load_page()
        self.gate = Gate()
        self.watcher = Watcher(config.machine)
        self.unlocker = unlocker
        self.starter = Starter(config, self.watcher, unlocker)


def succeed(request: Request, message: str) -> Response:
    log(f"ip={request.client} {message}")
    return Response({"success": True, "message": message})


def post_auth(app: App, request: Request) -> Response:
    """Exchange the PIN for a token. A malformed body does not count."""
    pin = text_member(request, "pin").strip()  # pasting may add spaces
    app.gate.count_attempt(request.client, request.now)
    if not app.config.pin.matches(pin):
        raise Fault(401, "Wrong PIN", ("WWW-Authenticate", "Bearer"))
    log(f"ip={request.client} PIN accepted")
    return Response(
        {"token": app.gate.issue_token(request.now), "expires_in": TOKEN_SECONDS}
    )


def get_status(app: App, request: Request) -> Response:
    ports = app.watcher.check(request.now)
    start = app.starter.members(request.now, ports)
    return Response({"name": app.config.name, **ports.members(), "start": start})


def post_wol(app: App, request: Request) -> Response:
    return succeed(request, wake(app.config))


def take_passphrase(request: Request) -> Passphrase:
    try:
        return Passphrase(text_member(request, "passphrase"))
    except ValueError:
        text = "The passphrase must be 1 to 512 bytes without control characters"
        raise Fault(400, text) from None


def post_unlock(app: App, request: Request) -> Response:
    passphrase = take_passphrase(request)
    app.unlocker.claim("unlock")
    try:
        app.starter.end_watch()
        result = app.unlocker.run(passphrase, Event(), Event())
    finally:
        app.unlocker.claimed.release()
    if result.outcome == "wrong_passphrase":
        raise Fault(400, result.message)
    if result.outcome == "not_confirmed":
        raise Fault(500, f"{result.message[:-1]}; watch GET /api/status")
    if result.outcome not in SUCCESSES:
        raise Fault(500, f"Failed to unlock: {result.message}")
    return succeed(request, result.message)


def post_start(app: App, request: Request) -> Response:
    app.starter.begin(take_passphrase(request), request.now)
    return succeed(request, "Started; the status shows progress")


def delete_start(app: App, request: Request) -> Response:
    app.starter.cancel()
    return succeed(request, "Cancelling; the status shows the result")


RouteHandler = Callable[[App, Request], Response]
# Method, path, handler, and whether it works without a token.
ROUTES: Final[tuple[tuple[str, str, RouteHandler, bool], ...]] = (
    ("GET", "/", lambda app, _: app.page, True),
    ("GET", "/apple-touch-icon.png", lambda app, _: app.icon, True),
    ("POST", "/api/auth", post_auth, True),
    ("GET", "/api/status", get_status, False),
    ("POST", "/api/wol", post_wol, False),
    ("POST", "/api/unlock", post_unlock, False),
    ("POST", "/api/start", post_start, False),
    ("DELETE", "/api/start", delete_start, False),
)


def dispatch(app: App, request: Request) -> Response:
    """Find the route, check the token and call the handler. Raises: Fault."""
    rows = {row[0]: row[2:] for row in ROUTES if row[1] == request.path}
    if "GET" in rows:
        rows["HEAD"] = rows["GET"]
    if not rows:
        raise Fault(404, "No such path")
    if request.method not in rows:
        allowed = ", ".join(sorted(rows))
        raise Fault(405, f"Allowed here: {allowed}", ("Allow", allowed))
    handler, open_to_all = rows[request.method]
    if not open_to_all and not app.gate.is_valid(request.token, request.now):
        raise Fault(401, "Invalid or expired token", ("WWW-Authenticate", "Bearer"))
    return handler(app, request)


def respond(app: App, received: Request | Fault, peer: str) -> Response:
    """Answer a request, or a Fault that was raised while reading it."""
    what = "a request"
    client = peer
    try:
        if isinstance(received, Fault):
            raise received
        what = f"{received.method} {received.path}"
        client = received.client
        return dispatch(app, received)
    except Fault as error:
        fault = error.with_traceback(None)  # breaks a reference cycle
    except Exception as error:  # noqa: BLE001 - every client gets an answer
        log(describe_bug(error))
        fault = Fault(500, "Internal error; see waker's log")
    line = f"refused {what}: {fault.status} {fault}"
    # A trusted proxy is not named: fail2ban would ban everybody behind it.
    if not in_networks(client, app.config.proxies):
        line = f"ip={client} {line}"
    log(line)
    return Response({"error": str(fault)}, fault.status, fault.headers)


# ---- HTTP ----------------------------------------------------------------------------
# Refuse ambiguous requests, which could be smuggled past a proxy. All patterns run in
# linear time. A connection has a thread, one request and a deadline. If there are
# too many connections, some are dropped. Sources: RFC 9110, 9112.

MAX_HEAD: Final = 16384  # bytes, with the empty line
MAX_FIELDS: Final = 100  # a browser sends 20; thousands of tiny ones cost CPU
MAX_CONNECTIONS: Final = 64  # at a time: half a megabyte each at worst
CLIENT_SECONDS: Final = 10  # to send the request, and again to read the answer
DRAIN_SECONDS: Final = 2  # for a client to hang up after its answer
TCHAR: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
AUTHORITY: Final = rb"(?:[\w.~-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?"
PATH: Final = rb"/(?:[\w.~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"
QUERY: Final = rb"\?(?:[\w.~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*"
REQUEST_LINE: Final = re.compile(
    rb"(%b+) (%b)(?:%b)? HTTP/1\.([01])" % (TCHAR, PATH, QUERY)
)
FIELD: Final = re.compile(rb"(%b+):([\t -~\x80-\xff]*)" % TCHAR)
ONCE: Final = ("authorization", "content-length", "content-type", "host")


def parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return method, path, and fields by lower-case name. Raises: Fault 400, 431."""
    first, *lines = head.split(b"\r\n")
    request_line = REQUEST_LINE.fullmatch(first)
    if not request_line:
        raise Fault(400, "The request line must be METHOD TARGET HTTP/1.1")
    if len(lines) > MAX_FIELDS:
        raise Fault(431, f"The head must have at most {MAX_FIELDS} fields")
    fields: dict[str, str] = {}
    for line in lines:
        found = FIELD.fullmatch(line)
        if not found:
            raise Fault(400, "A header field must be NAME: VALUE, and end with CR LF")
        name = found[1].decode().lower()
        value = found[2].decode("latin-1").strip(" \t")
        if name in fields and name in ONCE:
            raise Fault(400, "A header field must not be repeated")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    if request_line[3] == b"0":  # HTTP/1.0 needs no Host
        fields.setdefault("host", "none")
    return request_line[1].decode(), request_line[2].decode(), fields


def receive_head(data: bytes, receive: Callable[[], bytes]) -> bytes:
    """Receive until `data` contains the head. Raises: Fault 431.

    Return at once what cannot become one, such as a TLS hello or a bare LF: its empty
    line may never come.
    """
    is_checked = False  # the request line
    while b"\r\n\r\n" not in data[:MAX_HEAD]:
        if not re.match(TCHAR, data) or data.count(b"\n") != data.count(b"\r\n"):
            return data
        if not is_checked and b"\r\n" in data:
            is_checked = True
            if not REQUEST_LINE.fullmatch(data.partition(b"\r\n")[0]):
                return data
        if len(data) >= MAX_HEAD:
            raise Fault(431, f"The head must have at most {MAX_HEAD} bytes")
        data += receive()
    return data


def read_request(
    data: bytes, receive: Callable[[], bytes], peer: str, proxies: Sequence[Network]
) -> Request:
    """Read a request that begins with `data`. Raises: Fault; OSError by `receive`.

    A body that is too long stays unread.
    """

    def receive_more() -> bytes:
        more = receive()
        if not more:
            raise Fault(400, "The request ended before it was complete")
        return more

    data = receive_head(data, receive_more)
    head, _, body = data.partition(b"\r\n\r\n")
    method, path, fields = parse_head(head)
    if not re.fullmatch(AUTHORITY, fields.get("host", "").encode("latin-1")):
        raise Fault(400, "Host must be HOST or HOST:PORT")
    if "transfer-encoding" in fields:
        raise Fault(501, "Transfer-Encoding is not supported; send Content-Length")
    length = fields.get("content-length", "0")
    if not re.fullmatch("0|[1-9][0-9]{0,17}", length):
        raise Fault(400, "Content-Length must be one decimal number")
    is_short = int(length) <= MAX_BODY
    while is_short and len(body) < int(length):
        body += receive_more()
    now = time.monotonic()  # a PIN attempt is timed when its request is complete
    # The client is the last X-Forwarded-For address that is not a trusted proxy.
    client = peer
    hops = fields.get("x-forwarded-for", "").rsplit(",", 16)
    with contextlib.suppress(ValueError):  # not an address: stop here
        while hops and in_networks(client, proxies):
            client = plain_address(hops.pop().strip(" \t"))
    scheme, _, token = fields.get("authorization", "").partition(" ")
    token = token.strip(" ") if scheme.lower() == "bearer" else ""
    kind = fields.get("content-type", "")
    content = body[: int(length)] if is_short else None
    return Request(method, path, client, now, kind, token, content)


def listen(where: Address) -> socket.socket:
    """Open a TCP port; with the address `::`, also for IPv4. Raises: OSError."""
    dual = where[0] == "::" and socket.has_dualstack_ipv6()
    if where[0] == "::" and not dual:
        where = "0.0.0.0", where[1]  # noqa: S104 - the user wants every address
    kind = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    tcp = socket.create_server(where, family=kind, backlog=4096, dualstack_ipv6=dual)
    # Clients that send nothing stay in the kernel and take no threads.
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, CLIENT_SECONDS)
    return tcp


def explain_listening(error: OSError, where: Address) -> str:
    """Explain why a port cannot be opened."""
    host, port = where
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; waker may be running already"
    if error.errno == errno.EACCES:
        return f"port {port} is for root only; set WAKER_LISTEN to a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this box; correct WAKER_LISTEN"
    return f"{os.strerror(error.errno or 0)}; correct WAKER_LISTEN"


class State(enum.Enum):
    """What a connection's thread is doing."""

    BUSY = "working, or reading what has arrived"
    READING = "waiting for the client to send"
    WRITING = "waiting for the client to take the answer, or to close"
    DROPPED = "about to end: the connection was closed"


class Connection:
    """A client's connection: its state, and reading and writing with one deadline."""

    def __init__(self, server: "Server", tcp: socket.socket, group: str) -> None:
        self._server = server
        self._tcp = tcp
        self._deadline = time.monotonic() + CLIENT_SECONDS
        self.group = group  # connections of one group are counted together
        self.state = State.BUSY

    def mark(self, state: State) -> None:
        """Set the state. Raises: ConnectionAbortedError if it was dropped before."""
        with self._server.lock:
            if self.state is State.DROPPED:
                raise ConnectionAbortedError
            self.state = state
            self._server.lock.notify()

    def drop(self) -> None:
        """Shut it down to make room; its thread will notice and end."""
        self.state = State.DROPPED
        with contextlib.suppress(OSError):  # SSLSocket's own would go on in plain text
            socket.socket.shutdown(self._tcp, socket.SHUT_RDWR)

    def _transfer(self, action: Callable[[], Any], waiting: State) -> Any:
        """Receive or send; set the state `waiting` while it blocks. Raises: OSError."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        try:
            self._tcp.settimeout(0)
            return action()  # with TLS, this includes the handshake
        except OSError as error:
            if error.errno not in (errno.EAGAIN, 2, 3):  # SSL_ERROR_WANT_READ, _WRITE
                raise
        # Mark it only after a read found nothing: a complete request is never dropped.
        self.mark(waiting)
        self._tcp.settimeout(left)
        result = action()
        self.mark(State.BUSY)
        return result

    def receive(self) -> bytes:
        """Return what arrives next; nothing at the end. Raises: OSError."""
        return bytes(self._transfer(lambda: self._tcp.recv(4096), State.READING))

    def send_all(self, data: bytes) -> None:
        """Send the whole answer within CLIENT_SECONDS. Raises: OSError."""
        self._deadline = time.monotonic() + CLIENT_SECONDS
        while data:
            send = functools.partial(self._tcp.send, data)
            data = data[self._transfer(send, State.WRITING) :]
        self.mark(State.WRITING)  # until the client closes


class Handler(BaseHTTPRequestHandler):
    """One connection: read one request, answer it, and let the client hang up."""

    server: "Server"

    def render(self, response: Response, *, with_body: bool) -> bytes:
        headers = {
            "Date": self.date_time_string(),
            "Connection": "close",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Content-Type": "application/json",
            "Content-Length": str(len(response.body)),
            **dict(response.headers),
        }
        lines = [f"HTTP/1.1 {response.status} {self.responses[response.status][0]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "\r\n"]).encode()
        return head + response.body if with_body else head

    def drain(self) -> None:
        """Wait for the client to close: closing first could lose the answer."""
        deadline = time.monotonic() + DRAIN_SECONDS
        self.request.settimeout(DRAIN_SECONDS)
        if self.server.app.tls:
            with contextlib.suppress(OSError):  # the client may still be sending
                self.request.unwrap()
        socket.socket.shutdown(self.request, socket.SHUT_WR)
        while time.monotonic() < deadline:
            self.request.settimeout(max(deadline - time.monotonic(), 0.001))
            if not socket.socket.recv(self.request, 65536):
                return

    def handle(self) -> None:
        """Answer one request, unless the connection ends or is dropped first."""
        connection = self.server.connections[self.request]
        app, peer = self.server.app, self.client_address[0]
        with contextlib.suppress(OSError):
            data = connection.receive()
            if not data:  # close without an answer or a log line
                return
            received: Request | Fault
            try:
                proxies = app.config.proxies
                received = read_request(data, connection.receive, peer, proxies)
            except Fault as fault:
                received = fault
            except TimeoutError:
                received = Fault(408, f"The request took over {CLIENT_SECONDS} s")
            connection.mark(State.BUSY)
            response = respond(app, received, peer)
            is_head = isinstance(received, Request) and received.method == "HEAD"
            connection.send_all(self.render(response, with_body=not is_head))
            self.drain()


class Server(ThreadingHTTPServer):
    """Gives each connection a thread, and drops some if there are too many."""

    def __init__(self, app: App, tcp: socket.socket) -> None:
        # HTTPServer would look up the name of our address, and hang if DNS is down.
        socketserver.BaseServer.__init__(self, tcp.getsockname()[:2], Handler)
        self.socket, self.app = tcp, app
        self.lock = threading.Condition()  # notified when a connection ends or waits
        self.connections: dict[socket.socket, Connection] = {}  # each has a thread

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Let a client in. Raises: OSError, which the base class ignores."""
        try:
            tcp, address = self.socket.accept()
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls := self.app.tls:
                tcp = tls.wrap_socket(
                    tcp, server_side=True, do_handshake_on_connect=False
                )
        except Exception as error:
            temporary = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM
            if not isinstance(error, OSError):
                log(describe_bug(error))
            elif error.errno not in temporary:
                raise  # the client has gone
            time.sleep(0.05)  # seconds, or it would spin while resources are short
            raise OSError from error  # any other would end the serving thread
        # An IPv4-mapped address counts as IPv4; a link-local one keeps its scope ID.
        return tcp, (address[0].removeprefix("::ffff:"), address[1])

    def _make_room(self) -> None:
        """Drop a random waiting connection of the client that has the most."""
        waiting = {t: e for t, e in self.connections.items() if e.state != State.BUSY}
        states = {tcp: each.state for tcp, each in waiting.items()}
        if State.DROPPED in states.values():
            return  # a place is about to become free
        reading = [tcp for tcp, state in states.items() if state is State.READING]
        for tcp in select.select(reading, [], [], 0)[0]:
            del waiting[tcp]  # its thread is about to read something
        counts = Counter(each.group for each in self.connections.values())
        most = max((counts[each.group] for each in waiting.values()), default=0)
        if most > 6:  # a browser opens six, so up to that all clients are equal
            busiest = {t: e for t, e in waiting.items() if counts[e.group] == most}
            waiting = busiest
        if waiting:
            secrets.choice([*waiting.values()]).drop()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread; make room first if there are too many."""
        with self.lock:
            while len(self.connections) >= MAX_CONNECTIONS:
                self._make_room()
                self.lock.wait()
            group = group_client(client_address[0])
            self.connections[request] = Connection(self, request, group)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and free its place. Every connection ends here."""
        with self.lock:  # `_make_room` must not find a closed socket
            self.close_request(request)
            self.connections.pop(request, None)
            self.lock.notify()

    def handle_error(self, request: object, client_address: object) -> None:
        if error := sys.exception():
            log(describe_bug(error))

    def stop(self) -> None:
        """Stop listening, and wait until all running requests are answered."""
        self.socket.shutdown(socket.SHUT_RDWR)  # this wakes `serve_forever`
        self.shutdown()
        with self.lock:
            for tcp, connection in self.connections.items():
                if connection.state is State.READING:
                    connection.state = State.DROPPED
                with contextlib.suppress(OSError):  # stop reading, keep writing
                    socket.socket.shutdown(tcp, socket.SHUT_RD)
            while self.connections:
                self.lock.wait()
        self.socket.close()


# ---- Checking ------------------------------------------------------------------------
# Find out why it does not work. Check what waking and unlocking need, in the order of
# use. Send no magic packet and no secret.

OK: Final = "ok"
WRONG: Final = "WRONG"
HINT: Final = "-"  # harmless, or unknown for now
Finding = tuple[str, str, str]  # subject, what was found and how to fix it, verdict


def check_packet(config: Config) -> Finding:
    """Check whether a magic packet would arrive."""
    try:
        route = f"would leave from {find_source(config)} to {config.broadcast}"
    except OSError as error:
        fix = "connect this box to the server's network"
        return "magic packet", f"{error.strerror}; {fix}", WRONG
    limited = config._replace(broadcast=IPv4Address("255.255.255.255"))
    host = config.machine.host
    problem = ""
    try:
        find_source(config, on_link=True)
    except OSError:
        what = f"the server {host}" if config == limited else "WAKER_HOMELAB_BROADCAST"
        problem = f"{what} is on another network, and routers stop broadcasts"
    if config != limited and not problem:
        with contextlib.suppress(PermissionError):  # raised for a broadcast address
            find_source(config, may_broadcast=False)
            problem = "not a broadcast address of this network; a sleeping server"
            problem += " cannot receive packets sent to its own address"
        with contextlib.suppress(OSError):  # there is no IPv4 route to the server
            reached_from = find_source(limited)
            if reached_from != find_source(config):
                problem = f"{host} is reached from {reached_from} instead; is"
                problem += " WAKER_HOMELAB_BROADCAST right?"
    if problem:
        return "magic packet", f"{route}; {problem}", HINT
    return "magic packet", route, OK


def check_certificate(path: Path) -> Finding:
    """Check whether a certificate is still valid."""
    subject = "certificate"
    try:
        from cryptography import x509  # a dependency of paramiko
    except (ImportError, AttributeError):
        return subject, f"not checked: {NO_PARAMIKO}", HINT
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        return subject, "its dates could not be read", HINT
    # Version 38, as in Debian 12, lacks the newer names.
    begin = getattr(certificate, "not_valid_before_utc", None)
    end = getattr(certificate, "not_valid_after_utc", None)
    begin = begin or certificate.not_valid_before.replace(tzinfo=UTC)
    end = end or certificate.not_valid_after.replace(tzinfo=UTC)
    now = datetime.now(UTC)
    if now < begin:
        problem = f"not valid before {begin:%Y-%m-%d}; is this box's clock right?"
        return subject, problem, HINT
    if end < now:
        return subject, f"expired on {end:%Y-%m-%d}; browsers will warn", HINT
    return subject, f"valid until {end:%Y-%m-%d}", OK


def check_unlocking(machine: Machine, *, in_initrd: bool) -> Iterator[Finding]:
    """Check what an unlock needs, and the login if the initrd is up."""
    subject = "paramiko"
    try:
        import paramiko

        yield subject, paramiko.__version__, OK
        subject = "host key"
        if in_initrd:
            transport = open_transport(machine)
            seen = exchange_keys(transport, machine)
            if machine.host_keys:
                verify(seen, machine)
                yield subject, "pinned and verified", OK
            else:
                text = f"{fingerprint(seen.blob)} is not pinned yet. If this key is"
                text += f" your server's, set WAKER_SSH_HOST_KEY={seen}"
                yield subject, text, HINT
        elif machine.host_keys:
            text = "not seen; check again while the initrd waits for its passphrase"
            yield subject, text, HINT
        else:
            yield subject, NOT_PINNED, HINT
        subject = "SSH key"
        key = load_key(machine.key)
        yield subject, f"{key.get_name()} {fingerprint(key.asbytes())}", OK
        subject = "login"
        if in_initrd and machine.host_keys:
            log_in(transport, machine)
            yield subject, f"{machine.user} can log in; unlock not tried", OK
    except (ImportError, AttributeError) as error:
        yield subject, f"{NO_PARAMIKO} ({error})", WRONG
    except SHORTAGES:
        yield subject, Outcome.NO_MEMORY.value[1], WRONG
    except NotSent as why:
        yield subject, str(why), WRONG


def check_mac(config: Config) -> Iterator[Finding]:
    """Compare the MAC address with what ARP has found."""
    subject, mac = "MAC address", config.mac.hex(":")
    with contextlib.suppress(OSError):  # this box has no ARP table
        entry = rf"(?m)^{re.escape(config.machine.host)} .* (..:..:..:..:..:..) "
        found = re.search(entry, Path("/proc/net/arp").read_text())
        if not found or found[1] == "00:00:00:00:00:00":
            return
        if found[1] == mac:
            yield subject, f"matches this box's ARP entry for {config.machine.host}", OK
        else:
            hint = f"{config.machine.host} has {found[1]} according to ARP, not {mac};"
            yield subject, f"{hint} compare with `ip link` on the server", HINT


def check_machine(machine: Machine) -> Iterator[Finding]:
    """Check SSH on each port, then as much as the machine's state allows."""
    ports = {"initrd's port": machine.initrd_port, "system's port": machine.system_port}
    if machine.initrd_port == machine.system_port:
        ports = {"shared port": machine.initrd_port}
    in_initrd = check_ports(machine).members()["state"] == "locked"
    for subject, port in ports.items():
        state, banner = probe_port(machine.host, port, banner=True)
        text, verdict = f"{machine.host}, port {port} {state.value}", HINT
        if state is PortState.OPEN:
            text, verdict = f"{text}; it says {banner or 'nothing'}", OK
        if subject == "system's port" and "dropbear" in banner:
            text, verdict = f"{text}; are the two ports swapped?", HINT
        yield subject, text, verdict
    yield from check_unlocking(machine, in_initrd=in_initrd)


def check_listening(config: Config) -> Finding:
    """Check whether the web page's port can be opened."""
    port = config.listen[1]
    try:
        listen(config.listen).close()
    except OSError as error:
        verdict = HINT if error.errno == errno.EADDRINUSE else WRONG
        return "web port", explain_listening(error, config.listen), verdict
    if 0 < port < 1024:
        hint = "only if waker runs as root; waker.service does not"
        return "web port", f"{port} is free, but {hint}", HINT
    if ipaddress.ip_address(config.listen[0]).is_loopback:
        hint = "only this box can connect; that is right if a proxy runs here"
        return "web port", f"{port} is free, but {hint}", HINT
    return "web port", f"{port} is free", OK


def check(config: Config, file: Path | None) -> Iterator[Finding]:
    if file and file.stat().st_mode & 0o007:
        problem = f"{file} is open to others; chmod 600 {file}"
        yield "configuration", problem, WRONG
    else:
        yield "configuration", "all settings are valid", OK
    if config.pin.is_number:
        yield "PIN", "digits only: enough behind a VPN, not on the internet", HINT
    yield check_listening(config)
    if config.tls_cert:
        yield check_certificate(config.tls_cert)
    wide = [str(network) for network in config.proxies if network.num_addresses > 1]
    if wide:
        risk = "could evade the limit on PIN attempts; name only the proxy"
        yield "proxy", f"any host in {' and '.join(wide)} {risk}", HINT
    yield check_packet(config)
    yield from check_machine(config.machine)
    yield from check_mac(config)  # last: the probes fill the ARP table


# ---- Commands ------------------------------------------------------------------------
# What `waker.py` does when it is run.

MAX_MEMORY: Final = 64 << 20  # bytes of data; twice what an unlock or check needs


def make_tls(config: Config) -> "ssl.SSLContext | None":
    """Load the certificate, if there is one. Raises: ConfigError."""
    cert, key = config.tls_cert, config.tls_key
    if not cert or not key:
        return None
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")  # from TLS 1.2 on
    # One curve only: with OpenSSL's ffdhe8192, a hello would cost 100 ms of CPU. P-256
    # costs modern clients a round trip, so it is only for a Python without X25519.
    context.set_ecdh_curve("prime256v1")
    with contextlib.suppress(ssl.SSLError):  # Python 3.11.2, as in Debian 12, fails
        context.set_ecdh_curve("X25519")
    try:
        context.load_cert_chain(cert, key, password=b"")  # or it would ask for one
    except OSError as error:  # which does not say which file
        form = "must be a certificate and its private key, both PEM, not encrypted"
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            form = "do not match; waker's own certificate must come first in its file"
        raise ConfigError(f"WAKER_TLS_CERT and WAKER_TLS_KEY {form}") from None
    return context


def serve(app: App) -> int:
    """Run until SIGTERM or ^C; then answer running requests and cancel a start."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # in all threads
    try:
        tcp = listen(app.config.listen)
    except OSError as error:
        log(f"WAKER_LISTEN: {explain_listening(error, app.config.listen)}")
        return 1
    server = Server(app, tcp)
    threading.Thread(target=server.serve_forever, args=(None,)).start()
    log(f"waker {__version__} listens on port {tcp.getsockname()[1]}")
    signal.sigwait(signals)
    log("stopping")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second signal ends it at once
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    server.stop()
    with contextlib.suppress(Fault):  # after the server: no new start can begin
        app.starter.cancel()
    return 0  # Python waits for the last thread, which may be an unlock


def read_passphrase(seconds: int) -> Passphrase:
    """Read it from the terminal, or all of standard input.

    Raises: ValueError; TimeoutError if standard input does not end in time.
    """
    if os.isatty(0):
        import getpass

        return Passphrase(getpass.getpass("Passphrase: "))
    deadline = time.monotonic() + seconds
    given = b""
    while len(given) < 1024:  # bytes; more than any valid passphrase
        left = max(deadline - time.monotonic(), 0)
        if not select.select([0], [], [], left)[0]:
            raise TimeoutError
        part = os.read(0, 1024)
        if not part:
            break
        given += part
    return Passphrase(given.decode().removesuffix("\n"))


def unlock_once(machine: Machine, seconds: int) -> Result:
    """Read a passphrase within `seconds`, then unlock within `seconds`."""
    try:
        passphrase = read_passphrase(seconds)
    except TimeoutError:
        reason = f"no passphrase was entered within {seconds} s"
        return Result.of(Outcome.ERROR, reason, sent=False)
    except (EOFError, KeyboardInterrupt):
        return Result.of(Outcome.ERROR, "no passphrase was entered", sent=False)
    except (ValueError, OSError):
        reason = "a passphrase is 1 to 512 bytes of UTF-8 without control characters"
        return Result.of(Outcome.ERROR, reason, sent=False)
    signal.alarm(seconds)  # ends the process even if something hangs
    deadline = time.monotonic() + seconds - 5  # which leaves time to report
    report = functools.partial(print, SENT_REPORT, flush=True)
    return unlock(machine, passphrase, deadline, report)


def print_unlock(machine: Machine, seconds: int) -> int:
    """Unlock once and print the result; return the exit status."""
    try:
        result = unlock_once(machine, seconds)
    except Exception as error:  # noqa: BLE001 - its text might quote a secret
        log(describe_bug(error))
        return os.EX_SOFTWARE
    with contextlib.suppress(BrokenPipeError):  # the daemon has gone
        print(json.dumps(result._asdict()), flush=True)
    return int(result.outcome not in SUCCESSES)


def print_table(findings: Iterable[Finding]) -> int:
    """Print each finding at once; return 1 if anything is wrong."""
    for number in (signal.SIGINT, signal.SIGPIPE):  # end without a traceback
        signal.signal(number, signal.SIG_DFL)
    status = 0
    for subject, text, verdict in findings:
        print(printable(f"{verdict:7}{subject:15}{text}"), flush=True)
        if verdict == WRONG:
            status = 1
    return status


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    epilog = f"settings, from the environment and FILE, or else from {ENV_FILE}:"
    for name, default, _, form in SETTINGS:
        epilog += f"\n  {name:25}{form.partition(';')[0]} [{default or 'none'}]"
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(epilog=epilog, formatter_class=kind)
    parser.description = "Wake a server by magic packet and unlock its disk over SSH."
    add = parser.add_argument
    add("--version", action="version", version=f"waker {__version__}")
    add("--env-file", metavar="FILE", type=Path, help="settings: lines NAME=value")
    add(
        "--seconds",
        metavar="N",
        type=int,
        default=90,
        help="limit for unlock, 6 to 9999 [90]",
    )
    about = "run the web page, check the settings, unlock once with a passphrase from "
    about += "standard input, or print the server's state [serve]"
    commands = "serve", "check", "unlock", "state"
    add("command", nargs="?", choices=commands, default="serve", help=about)
    arguments = parser.parse_args(argv)
    if not 5 < arguments.seconds < 10_000:
        parser.error("argument --seconds: N must be 6 to 9999")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Run a command; `argv` is like sys.argv. Return the exit status."""
    # Open standard streams that are closed, or a socket would take their place.
    spare = os.open(os.devnull, os.O_RDWR)
    while spare <= 2:
        spare = os.open(os.devnull, os.O_RDWR)
    os.close(spare)
    arguments = parse_arguments(argv[1:])
    # No secret goes into a core dump. With a limit of 0 instead of 1, the kernel would
    # still pipe one to systemd-coredump. Source: do_coredump in fs/coredump.c.
    with contextlib.suppress(ValueError):  # only root may raise a limit of 0
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    threading.stack_size(512 << 10)  # bytes; musl's 128 KiB are too few for json
    if arguments.command in ("unlock", "check"):
        # paramiko buffers packets of any size, even from an unverified server.
        with contextlib.suppress(ValueError):  # the limit is lower already
            resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    warnings.simplefilter("ignore")  # paramiko uses what cryptography deprecates
    ours = {n: v for n, v in os.environ.items() if n.startswith("WAKER_")}
    file = arguments.env_file or (None if ours else Path(ENV_FILE))
    folder = file.resolve().parent if file else Path.cwd()
    try:
        values = (read_env_file(file) if file else {}) | ours
        if values.pop("WAKER_INITRD", None):
            log("WAKER_INITRD has no effect since waker 3; delete it")
        if arguments.command == "state":
            settings = parse_settings(3, values, folder)  # up to the ports
            machine = Machine(*[*settings, "", Path(), ()])
            print(json.dumps(check_ports(machine).members()))
            return 0
        if arguments.command == "unlock":
            machine = Machine(*parse_settings(len(Machine._fields), values, folder))
            # Not sys.exit: paramiko's threads would take 15 s to end.
            os._exit(print_unlock(machine, arguments.seconds))
        config = read_config(values, folder)
        app = App(config, Unlocker(config, Path(argv[0]), os.environ), make_tls(config))
        if arguments.command == "check":
            os._exit(print_table(check(config, file)))
    except ConfigError as error:
        for line in str(error).splitlines():
            log(line)
        return os.EX_CONFIG  # the unit does not restart it then
    return serve(app)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
