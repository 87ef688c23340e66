#!/usr/bin/python3
"""Wake one machine by magic packet and unlock its encrypted disk over SSH.

    waker.py [--env-file FILE] [serve | unlock | state]

Away from home, you type a PIN and the disk's passphrase into a web page. This daemon,
on a Raspberry Pi or router near the machine, wakes the machine, watches it and unlocks
its disk. The passphrase is sent only after this connection's host key matched a pinned
key and the initrd asked. "Unlocked" is reported only if the initrd said so. The
daemon writes no files; a restart invalidates all tokens. The page is ui.html.

The rules of this file:
1. Read it top to bottom, once: a name is defined before it is used.
2. Parse input once, on entry. Code past that point relies on the parsed value.
3. Handlers return a Response. One function turns every error into JSON.
4. The route table says which requests need a token.
5. Keep I/O in few functions. Only commands use arguments and the environment, and
   only they and `send_passphrase` use signals.
6. Nothing at module level changes, except the log's lock. Requests carry `now`; only
   code that waits, or reports progress, reads the clock.
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
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NewType, TypeVar, cast
from zipimport import zipimporter

if TYPE_CHECKING:  # imported only where needed, to save memory; paramiko takes 20 MB
    import io
    from subprocess import Popen

    from paramiko import Channel, PKey, Transport

__version__ = "5.0.0"
HERE: Final = Path(__file__).resolve().parent  # a folder, or the one file

# ---- Values --------------------------------------------------------------------------
# Parsers raise ValueError. No repr shows a secret.

Header = tuple[str, str]  # a field's name and value
Address = tuple[str, int]  # IP address and TCP port
Mac = NewType("Mac", bytes)  # six octets
HostKey = NewType("HostKey", bytes)  # a public key as SSH sends it, with its type
T = TypeVar("T")


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
        # Digests have equal lengths, so that comparing them takes equal time.
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

    def redact(self, text: str, limit: int = 200) -> str:
        """Shorten the initrd's text, and hide it if it contains the passphrase."""
        return "(hidden)" if self.data.decode() in text else text[:limit]


def fingerprint(blob: bytes) -> str:
    """Format a public key's fingerprint as OpenSSH does."""
    return "SHA256:" + base64.b64encode(sha256(blob)).decode().rstrip("=")


# A line of a .pub or known_hosts file has host names, a key type, the key, a comment.
HOST_KEY_LINE: Final = re.compile(
    r"(?<![^\s,])(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(?:256|384|521))\s+(AAAA[^\s,]+)"
)


def parse_host_keys(text: str) -> tuple[HostKey, ...]:
    """Parse comma-separated lines of .pub or known_hosts files, if any."""
    # With a NUL, no environment variable could pass it on.
    if re.search(r"@(revoked|cert-authority)|[\0-\x08\x0e-\x1f\x7f-\x9f]", text):
        raise ValueError
    keys: list[HostKey] = []
    for part in text.split(","):
        found = HOST_KEY_LINE.findall(part)
        # Reject an unknown type, and a second key: neither may pass as a comment.
        if len(found) > 1 or len(found) != len(re.findall(r"\bAAAA", part)):
            raise ValueError
        for kind, encoded in found:
            blob = base64.b64decode(encoded, validate=True)
            # RFC 4253, 6.6: each field follows its length in 4 bytes, and the type is
            # the first. If the fields do not fill the blob, the paste was truncated.
            first = len(kind).to_bytes(4) + kind.encode()
            end = len(first)
            while end < len(blob):
                end += 4 + int.from_bytes(blob[end : end + 4])
            if end != len(blob) or blob == first or not blob.startswith(first):
                raise ValueError
            keys.append(HostKey(blob))
    if text and not keys:
        raise ValueError
    return tuple(keys)


def plain_address(text: str) -> str:
    """Parse an IP address; turn an IPv4-mapped one into IPv4."""
    address = ipaddress.ip_address(text)
    if "%" in text:  # a scope ID such as %eth0 may be arbitrary text
        raise ValueError
    return str(getattr(address, "ipv4_mapped", None) or address)


# The unit has systemd pass a single newline for a missing file.
NOT_PASSED: Final = (
    "is missing or empty, or systemd did not pass it on; run `sudo waker check`, and if"
    " that finds it, `systemctl cat waker` shows why"
)


def shown_path(path: Path) -> Path:
    """Return the user's own path of a file that systemd may have passed."""
    is_passed = path.match("credentials/*.service/*")
    return Path("/etc/waker", path.name) if is_passed else path


class Config(NamedTuple):
    """The settings. Commands that do not need all of them leave some empty."""

    host: str = ""  # an IP address
    mac: Mac = Mac(b"")
    broadcast: str = ""  # an IPv4 address
    name: str = ""
    link: str = ""  # for people, once the machine is up
    initrd_port: int = 0
    system_port: int = 0
    user: str = ""
    key: Path = Path()
    host_key: tuple[HostKey, ...] = ()
    pin: Pin | None = None
    listen: Address = ("", 0)
    proxies: frozenset[str] = frozenset()  # whose X-Forwarded-For counts
    packet_port: int = 9  # UDP; fixed by the interface, but the demo needs another


class HttpError(Exception):
    """An HTTP error response."""

    def __init__(self, status: int, text: str, *headers: Header) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


# ---- Outcomes ------------------------------------------------------------------------
# How an unlock or a start ends. UNLOCKED and WRONG_PASSPHRASE need the initrd's words.

UNSENT: Final = "The passphrase was not sent."


class Outcome(enum.Enum):
    """A word for programs, the status of POST /api/unlock, a sentence to complete."""

    UNLOCKED = "unlocked", 200, "Unlocked: "
    ALREADY_OPEN = "already_open", 200, "All disks seem to be open already"
    UP = "up", 200, "The system is up"
    WRONG_PASSPHRASE = "wrong_passphrase", 400, "Wrong passphrase for disk "
    NOT_CONFIRMED = "not_confirmed", 500, "Not confirmed: the passphrase "
    GAVE_UP = "gave_up", 500, "the server stopped asking and must be restarted"
    HOST_KEY_DIFFERS = "host_key_differs", 500, "the host key differs: "
    KEY_REFUSED = "key_refused", 500, "the server refused waker's SSH key: "
    NOT_ASKED = "not_asked", 500, ""  # trying again is safe
    NOT_AWAKE = "not_awake", 500, ""
    NOT_UP = "not_up", 500, ""
    CANCELLED = "cancelled", 500, "Cancelled"
    ERROR = "error", 500, ""

    def __init__(self, word: str, status: int, sentence: str) -> None:
        self.word = word
        self.status = status
        self.sentence = sentence


OUTCOMES: Final = {outcome.word: outcome for outcome in Outcome}
# Their own words say whether it was sent.
SAY_SENT: Final = Outcome.UNLOCKED, Outcome.WRONG_PASSPHRASE, Outcome.NOT_CONFIRMED


class Result(NamedTuple):
    """How an unlock or a start ended."""

    outcome: Outcome
    message: str
    sent: bool  # whether the passphrase may have been sent


def make_result(outcome: Outcome, words: str = "", *, sent: bool = False) -> Result:
    message = f"{outcome.sentence}{words}."
    if outcome not in SAY_SENT:
        message += " The passphrase was sent." if sent else f" {UNSENT}"
    return Result(outcome, message, sent)


class UnlockError(Exception):
    """An unlock ended before it sent anything: an outcome, and words that follow it."""


# ---- The initrd's words --------------------------------------------------------------
# The command that unlocks, and what its output means. Debian's initrds have it; for
# systemd initrds, server/dracut has one of ours that uses the same words.

COMMAND: Final = "cryptroot-unlock"
DISK: Final = r"([^\x00-\x20\x7f-\xa0]+)"  # its name, without spaces


class InitrdSays(enum.Enum):
    """What a line of the initrd's output says: a pattern to search it for.

    The first match wins. A group names the disk, or an error.
    Source: cryptsetup-initramfs 2.6.1 to 2.8.8; the lines with COMMAND are ours.
    """

    ASKS = rf"Please unlock disk {DISK}"
    OPENED = rf"cryptsetup: {DISK} set up successfully"
    REJECTED = (  # the last pattern is for initrds prepared by waker 3
        "bad password or options|maximum number of tries"
        f"|^{COMMAND}: systemd may give up after another wrong"
    )
    GAVE_UP = f"^{COMMAND}: gave up on "
    ALL_OPEN = f"^{COMMAND}: every disk is open$"
    BOOTED = f"^{COMMAND}: the system has booted$"
    TOO_EARLY = "waiting for askpass|Try again later"
    REPORTED = f"^{COMMAND}: (.+)"


Ending = tuple[Outcome, str]  # with words that follow the outcome's sentence
NO_PROMPT: Final = Outcome.NOT_ASKED, "no disk was asking; try again in a few seconds"
# What ends an unlock that has sent nothing. Others may be about what was typed there.
UNSENT_ENDINGS: Final[Mapping[InitrdSays, Ending]] = {
    InitrdSays.GAVE_UP: (Outcome.GAVE_UP, ""),
    InitrdSays.ALL_OPEN: (Outcome.ALREADY_OPEN, ""),
    InitrdSays.BOOTED: (Outcome.UP, ""),
    InitrdSays.TOO_EARLY: NO_PROMPT,
    InitrdSays.REPORTED: (Outcome.ERROR, "the initrd reports: "),
}
NO_COMMAND: Final = Outcome.ERROR, "no unlock command can run: see docs/server.md"
BY_STATUS: Final = {0: (Outcome.ALREADY_OPEN, ""), 126: NO_COMMAND, 127: NO_COMMAND}


# ---- Log -----------------------------------------------------------------------------
# Events that matter, one per line, on standard error. No line contains a PIN, a
# passphrase, a token, or the text of an exception, which might quote one.

MAX_LOG_LINE: Final = 1000  # characters; less than PIPE_BUF, so a write is atomic
LOG_LOCK: Final = threading.Lock()  # or another thread could fill the room first


def printable(text: str) -> str:
    return re.sub("[^ -~]", lambda odd: ascii(odd[0])[1:-1], text)


def log(text: str) -> None:
    """Write a line, or drop it if writing would block the daemon."""
    # A broken log must not stop the daemon, and neither must a lack of memory.
    with LOG_LOCK, contextlib.suppress(OSError, MemoryError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"{printable(text)[:MAX_LOG_LINE]}\n".encode())


def describe_bug(error: BaseException) -> str:
    """Return the type and place of an error, but not its text."""
    where = ""
    place = error.__traceback__
    while place:
        where = f", {Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}"
        place = place.tb_next
    return f"bug: {type(error).__name__}{where}"


# ---- Waking and watching -------------------------------------------------------------
# A magic packet leaves by the interface that leads to the machine. A probe connects to
# one of its two ports. Probing both takes less than a second.

PROBE_SECONDS: Final = 0.4  # for each port to answer: a LAN takes milliseconds
SYSTEM_SECONDS: Final = 8  # between probes of the system's port
OPEN_SECONDS: Final = 10  # after a port was seen open, to ignore one lost packet
LIMIT_SECONDS: Final = 30  # in which `ufw limit` refuses the sixth connection
MAX_OPENS: Final = 4  # connections in that time; the owner's own SSH needs one more
LIMITED: Final = "255.255.255.255"  # has no route, and crosses no router


def find_source_address(config: Config, *, to_neighbour: bool = False) -> str:
    """Return the address that the magic packet leaves from. Raises: OSError.

    With `to_neighbour`, PermissionError means that it goes to a broadcast address of a
    network of this box, and any other OSError that it needs a router.
    """
    toward = config.host if config.broadcast == LIMITED else config.broadcast
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, not to_neighbour)
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_DONTROUTE, to_neighbour)
        udp.connect((toward, config.packet_port))
        return str(udp.getsockname()[0])


class Destination(enum.Enum):
    """What the magic packet is sent to, as this box's kernel sees it."""

    BROADCAST = enum.auto()  # a broadcast address of a network of this box
    DEVICE = enum.auto()  # another address on such a network
    ELSEWHERE = enum.auto()  # an address on another network


def find_destination(config: Config) -> Destination:
    """Return what the packet is sent to; for LIMITED, what the machine's address is."""
    try:
        direct = find_source_address(config, to_neighbour=True)
        routed = find_source_address(config)
    except PermissionError:
        return Destination.BROADCAST
    except OSError:
        return Destination.ELSEWHERE
    # A policy may route packets to a neighbour by another interface.
    return Destination.DEVICE if direct == routed else Destination.ELSEWHERE


def find_packet_problem(config: Config) -> str:
    """Return why the magic packet reaches no sleeping machine, or an empty string."""
    destination = find_destination(config)
    if destination is Destination.BROADCAST:
        return ""
    if config.broadcast == LIMITED:
        if destination is Destination.ELSEWHERE:
            return f"the server is on another network, and {LIMITED} crosses no router"
        return ""
    # On another network, only a netmask is surely wrong.
    is_netmask = ipaddress.ip_address(config.broadcast).is_reserved
    if destination is Destination.DEVICE or is_netmask:
        return f"{config.broadcast} is not a broadcast address here"
    return ""


def wake(config: Config) -> str:
    """Send the magic packet (AMD 20213); return a success message. Raises: OSError."""
    packet = b"\xff" * 6 + config.mac * 16
    address = config.broadcast, config.packet_port
    source = find_source_address(config)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        udp.bind((source, 0))
        udp.sendto(packet, address)
        with contextlib.suppress(OSError):  # the first has left, which may be enough
            for _ in range(2):  # UDP loses some
                udp.sendto(packet, address)
    return f"Magic packet sent to {config.mac.hex(':')} from {source}"


class PortState(enum.Enum):
    """The state of a TCP port, in words for people."""

    OPEN = "is open"
    CLOSED = "refuses connections"  # which proves that something answers
    SILENT = "does not answer"
    UNKNOWN = "could not be checked: see WAKER_HOMELAB_HOST and this box's network"


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
    received = b""
    try:
        with open_tcp(host, port, PROBE_SECONDS) as tcp:
            # Raises OSError unless connected; Linux may report success too early.
            tcp.getpeername()
            with contextlib.suppress(OSError):  # none in time, or the peer has gone
                received = tcp.recv(255) if banner else b""
    except (ConnectionRefusedError, ConnectionResetError):
        return PortState.CLOSED, ""
    except OSError as error:
        # EHOSTUNREACH: nothing answered ARP. Other errors are local.
        if isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH:
            return PortState.SILENT, ""
        return PortState.UNKNOWN, ""
    # dropbear's key exchange follows at once. Ignore an incomplete banner.
    line, end, _ = received.partition(b"\n")
    return PortState.OPEN, line.decode("latin-1").strip() if end else ""


def probe_shared_port(host: str, port: int) -> PortStates:
    """Probe one port for both; dropbear means the initrd."""
    state, banner = probe_port(host, port, banner=True)
    if not banner:  # not open, or SSH is not up yet
        state = PortState.CLOSED if state is PortState.OPEN else state
        return PortStates(state, state)
    if "dropbear" in banner:
        return PortStates(initrd=PortState.OPEN, system=PortState.CLOSED)
    return PortStates(initrd=PortState.CLOSED, system=PortState.OPEN)


class WatchedPort:
    """A port as it was seen last, and as the status shows it."""

    def __init__(self) -> None:
        self.seen = PortState.UNKNOWN
        self.open_at = -math.inf  # when it was seen open, in monotonic seconds
        self.fell_silent = False  # at the last probe; it was open at the one before

    def update(self, state: PortState, now: float) -> None:
        was_open = self.seen is PortState.OPEN
        self.fell_silent = was_open and state is PortState.SILENT
        self.seen = state
        if state is PortState.OPEN:
            self.open_at = now

    def shown(self, now: float) -> PortState:
        """Return what the status shows. An open port survives one lost packet."""
        survives = self.fell_silent and now < self.open_at + OPEN_SECONDS
        return PortState.OPEN if survives else self.seen


class Watcher:
    """Probes the ports, the system's rarely, and shares the result for a second."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._is_shared = config.initrd_port == config.system_port
        self._lock = threading.Lock()
        self._initrd, self._system = WatchedPort(), WatchedPort()
        self._due = -math.inf  # the next probe, in monotonic seconds
        self._system_due = -math.inf  # and the next of the system's port
        self._system_opens = deque([-math.inf] * MAX_OPENS, MAX_OPENS)  # when

    @property
    def system_open_at(self) -> float:
        """When the system's port was last seen open, in monotonic seconds."""
        return self._system.open_at

    def probe(self, now: float, *, fresh: bool = False) -> PortStates:
        """Probe both ports if fresh, or else what is due; return what was seen last."""
        with self._lock:
            if fresh or now >= self._due:
                self._probe_ports(now, fresh=fresh)
            return PortStates(self._initrd.seen, self._system.seen)

    def probe_for_status(self, now: float) -> PortStates:
        """Probe what is due, or wait for another's probe; return what is shown."""
        is_idle = self._lock.acquire(blocking=False)
        # Wait for one probe, but not for those of several decisions.
        has_lock = is_idle or self._lock.acquire(timeout=2 * PROBE_SECONDS + 0.1)
        try:
            if is_idle and now >= self._due:
                self._probe_ports(now, fresh=False)
            return PortStates(self._initrd.shown(now), self._system.shown(now))
        finally:
            if has_lock:
                self._lock.release()

    def _probe_ports(self, now: float, *, fresh: bool) -> None:
        """Probe the initrd's port and, if it is due, the system's."""
        if not self._is_shared:
            before = self._initrd.seen
            state, _ = probe_port(self.config.host, self.config.initrd_port)
            self._initrd.update(state, now)
            if state is not before:  # the system may be coming, or going
                self._system_due = now
        # A firewall that counts connections, such as ufw's, refuses: it is not silent.
        is_silent = self._system.seen is PortState.SILENT
        may_probe = is_silent or now >= self._system_opens[0] + LIMIT_SECONDS
        if fresh or (may_probe and now >= self._system_due):
            self._probe_system(now)
        self._due = now + 1

    def _probe_system(self, now: float) -> None:
        """Probe the system's port, which may also be the initrd's."""
        host, port = self.config.host, self.config.system_port
        if self._is_shared:
            initrd, system = probe_shared_port(host, port)
            self._initrd.update(initrd, now)
        else:
            system, _ = probe_port(host, port)
        self._system.update(system, now)
        if system is PortState.OPEN:
            self._system_opens.append(now)
        is_awaited = self._is_shared and system is not PortState.OPEN
        self._system_due = now + SYSTEM_SECONDS
        if self._system.fell_silent or is_awaited:
            self._system_due = now + 1


# ---- Unlocking -----------------------------------------------------------------------
# `waker.py unlock` unlocks one machine once and exits, which frees its memory. Until it
# is about to send, SIGTERM ends it; then, only the verdict or its deadline does. Even a
# verified server may lie: report only disk names and the words of our own script.

CONNECT_SECONDS: Final = 5  # a LAN takes milliseconds
BANNER_SECONDS: Final = 10  # for the first line, which an SSH server sends at once
KEX_SECONDS: Final = 30  # for the key exchange: slow boxes take two
LOST_SECONDS: Final = 10  # without acknowledgement, before the connection is lost
PROMPT_SECONDS: Final = 50  # for the first prompt: an emulated machine took 30
NEXT_PROMPT_SECONDS: Final = 15  # for the next disk
STILL_SECONDS: Final = 0.03  # in which a command ends that was answered elsewhere
END_SECONDS: Final = 3  # for a command to end after its verdict
UNLOCK_SECONDS: Final = 90  # for all that; a slow machine derives keys slowly
REPORT_SECONDS: Final = 5  # of these, to report; after as many more, it is killed
MAX_LINE: Final = 65536  # bytes of output; no initrd writes a longer line
MAX_DISKS: Final = 16  # disks to answer; a lying server could keep asking
SENT_REPORT: Final = b'{"sent": true}'  # printed before the passphrase is sent
NO_PARAMIKO: Final = "paramiko is missing or incomplete; `waker check` says what to do"
ANY_ERROR: Final = Exception  # paramiko re-raises whatever ended its thread


def open_transport(config: Config, until: float) -> "Transport":
    """Connect by `until`, in monotonic seconds, securely. Raises: UnlockError."""
    try:
        import paramiko

        paramiko.util.get_logger("paramiko").setLevel("CRITICAL")  # it logs tracebacks
    except (ImportError, AttributeError):  # a newer cryptography has removed something
        raise UnlockError(Outcome.ERROR, NO_PARAMIKO) from None
    try:
        left = max(until - time.monotonic(), 0.1)  # importing may have been slow
        tcp = open_tcp(config.host, config.initrd_port, min(left, CONNECT_SECONDS))
    except OSError as error:
        detail = f"port {config.initrd_port} of {config.host} could not be reached"
        reason = error.strerror or "no answer"
        raise UnlockError(Outcome.NOT_ASKED, f"{detail}: {reason}") from None
    # Send small packets at once, and notice a machine that has lost its power.
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_SECONDS // 2)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)
    transport = paramiko.Transport(tcp)
    # paramiko's limits follow the wall clock, which a box without a battery sets late.
    # Closing its packetizer ends every wait; close() would not end the one for keys.
    transport.banner_timeout = transport.auth_timeout = math.inf
    watchdog = threading.Timer(until - time.monotonic(), transport.packetizer.close)
    watchdog.daemon = True
    watchdog.start()
    options = transport.get_security_options()  # no SHA-1, MD5, CBC
    options.kex = [name for name in options.kex if "sha1" not in name]
    options.digests = [name for name in options.digests if "sha2" in name]
    options.ciphers = [name for name in options.ciphers if re.search("ctr|gcm", name)]
    # Prefer pinned types. Accept others, to report their fingerprint. RSA needs SHA-2.
    kinds = (key[4 : 4 + int.from_bytes(key[:4])] for key in config.host_key)
    pinned = tuple(kind.decode().replace("ssh-rsa", "rsa-sha2") for kind in kinds)
    strong = [name for name in options.key_types if name not in ("ssh-rsa", "ssh-dss")]
    options.key_types = sorted(strong, key=lambda name: not name.startswith(pinned))
    return transport


def verify_host_key(transport: "Transport", config: Config) -> None:
    """Exchange keys; check that the host key is pinned. Raises: UnlockError."""
    is_over = threading.Event()
    try:
        transport.start_client(is_over)
        is_over.wait(BANNER_SECONDS)
        if transport.remote_version:  # the first line has come
            is_over.wait(KEX_SECONDS)
        key = transport.get_remote_server_key()
    except ANY_ERROR:
        detail = "the SSH server hung up, stopped responding, or has no algorithm that"
        raise UnlockError(Outcome.NOT_ASKED, f"{detail} paramiko accepts") from None
    is_shared = config.initrd_port == config.system_port
    if is_shared and "dropbear" not in transport.remote_version:
        raise UnlockError(Outcome.UP, "")
    if key.asbytes() not in config.host_key:
        pins = " or ".join(map(fingerprint, config.host_key)) or "none"
        detail = f"pinned {pins}, seen {fingerprint(key.asbytes())}. If the initrd was"
        detail += " waiting, and the pinned key is the initrd's, suspect an impostor"
        raise UnlockError(Outcome.HOST_KEY_DIFFERS, detail)


def find_key_problem(path: Path) -> str:
    """Return what is wrong with the file of our private key, or an empty string."""
    shown = shown_path(path)
    remedy = f"make it with: ssh-keygen -t ed25519 -N '' -f {shown}"
    try:
        if path.exists() and not path.is_file():  # a pipe could block the daemon
            return f"{shown} is not a regular file; correct the path"
        text = path.read_text("latin-1")
        if shown != path and not text.strip():
            return f"{shown} {NOT_PASSED}"
        if "PRIVATE KEY" not in text:
            return f"{shown} is not a private key; {remedy}"
        if path.stat().st_mode & 0o007:
            return f"{shown} is open to others; as its owner, run: chmod 600 {shown}"
    except FileNotFoundError:
        return f"{shown} is missing; correct the path, or {remedy}"
    except OSError as error:
        return f"{shown}: {error.strerror}"
    return ""


def load_key(path: Path) -> "PKey":
    """Load our private key, whatever its type. Raises: UnlockError."""
    import paramiko

    shown = shown_path(path)
    problem = find_key_problem(path)
    if not problem:
        for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
            with contextlib.suppress(ANY_ERROR):  # another type
                return kind.from_private_key_file(str(path))
        problem = f"{shown} has a passphrase, is damaged, or is not in OpenSSH format"
    raise UnlockError(Outcome.ERROR, f"SSH key {problem}")


def log_in(transport: "Transport", config: Config) -> None:
    """Authenticate with WAKER_SSH_KEY and nothing else. Raises: UnlockError."""
    key = load_key(config.key)
    with contextlib.suppress(ANY_ERROR):
        transport.auth_publickey(config.user, key)
    if not transport.is_active():
        detail = "the SSH server hung up or stopped responding during login"
        raise UnlockError(Outcome.NOT_ASKED, detail)
    if not transport.is_authenticated():
        detail = f"{fingerprint(key.asbytes())} for user {config.user}. Add it to the"
        detail += " initrd's authorized_keys and rebuild the initrd, or correct"
        detail += " WAKER_SSH_USER. If it is there, that user may be locked (root:! in"
        detail += " the initrd's /etc/shadow)"
        raise UnlockError(Outcome.KEY_REFUSED, detail)


def read_lines(channel: "Channel", until: float) -> Iterator[tuple[InitrdSays, str]]:
    """Yield what the command says, and the disk or error in it, by `until`."""
    rest = b""  # a line that is not complete yet
    data = b"x"
    while data:
        # With a timeout of 0, `recv` still returns what arrived in time.
        channel.settimeout(max(until - time.monotonic(), 0))
        try:
            data = channel.recv(65536)
        except TimeoutError:
            if time.monotonic() < until:  # paramiko asked the wall clock, which was set
                continue
            return
        end = data or b"\n"  # the end completes the last line
        *lines, rest = (rest + end).split(b"\n")
        rest = rest[-MAX_LINE:]
        for line in lines:
            text = line.decode(errors="backslashreplace")
            for kind in InitrdSays:
                found = re.search(kind.value, text)
                if found:
                    yield kind, "".join(found.groups())
                    break


def wait_for_prompt(
    transport: "Transport", passphrase: Passphrase, until: float
) -> tuple["Channel", str]:
    """Run the command until a disk asks; return the disk. Raises: UnlockError."""
    try:
        channel = transport.open_session(timeout=math.inf)
        channel.set_combine_stderr(True)
        channel.exec_command(COMMAND)
    except ANY_ERROR:  # the connection was lost, or the server is too busy
        raise UnlockError(*NO_PROMPT) from None
    for said, name in read_lines(channel, until):
        if said is InitrdSays.ASKS:
            # Did somebody answer at the server? Is a key exchange in the way?
            has_ended = channel.status_event.wait(STILL_SECONDS) or channel.eof_received
            if has_ended or not transport.clear_to_send.is_set():
                raise UnlockError(*NO_PROMPT)
            return channel, name
        if said in UNSENT_ENDINGS:
            outcome, words = UNSENT_ENDINGS[said]
            raise UnlockError(outcome, words + passphrase.redact(name))
    if channel.eof_received or channel.closed:
        channel.status_event.wait(END_SECONDS)  # the status may follow the output
    raise UnlockError(*BY_STATUS.get(channel.exit_status, NO_PROMPT))


def send_passphrase(
    channel: "Channel", passphrase: Passphrase, disk: str, until: float
) -> InitrdSays | None:
    """Send the passphrase; return the verdict, if there is one.

    Ignore earlier output, and success messages for other disks. Raises: OSError if
    the report cannot be printed; then nothing is sent.
    """
    # From now on, ignore ^C, a closed terminal and a cancel.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, SENT_REPORT + b"\n")
    try:
        if channel.recv_ready():
            channel.recv(1 << 30)
        channel.settimeout(0)  # an honest server's window has room for it
        # No newline: Debian's command would take it for a part of the passphrase.
        channel.sendall(passphrase.data)
    except ANY_ERROR:
        return None
    with contextlib.suppress(ANY_ERROR):  # the command may have ended already
        channel.shutdown_write()
    for said, name in read_lines(channel, until):
        if said is not InitrdSays.OPENED or name == disk:
            return said
    return None


def explain_verdict(verdict: InitrdSays | None, disk: str, listed: str) -> Ending:
    """Return how an unlock ended if the passphrase did not open the disk."""
    outcome = Outcome.NOT_CONFIRMED
    words = "may have been sent, but the initrd did not confirm it"
    if verdict is InitrdSays.REJECTED:
        outcome, words = Outcome.WRONG_PASSPHRASE, disk
    elif verdict is InitrdSays.ASKS:
        words = "was sent, but a disk is still asking"
    elif verdict is InitrdSays.GAVE_UP and not listed:
        outcome, words = Outcome.GAVE_UP, ""
    elif verdict is InitrdSays.GAVE_UP:  # the server may boot without this disk
        words = f"was sent, but the initrd gave up on disk {disk}"
    return outcome, f"{words}; unlocked: {listed}" if listed else words


def unlock_disks(
    transport: "Transport", passphrase: Passphrase, deadline: float
) -> Result:
    """Answer each disk that asks, once, until no new disk asks. Raises: UnlockError."""
    opened: list[str] = []  # disks
    seconds = PROMPT_SECONDS
    while True:
        listed = passphrase.redact(", ".join(map(passphrase.redact, opened)), 600)
        try:
            until = min(deadline, time.monotonic() + seconds)
            channel, disk = wait_for_prompt(transport, passphrase, until)
        except ANY_ERROR:  # what is open stays open
            if not opened:
                raise
            return make_result(Outcome.UNLOCKED, listed, sent=True)
        verdict: InitrdSays | None = InitrdSays.ASKS
        if disk not in opened and len(opened) < MAX_DISKS:  # never answer a disk twice
            verdict = send_passphrase(channel, passphrase, disk, deadline)
        if verdict is not InitrdSays.OPENED:
            ending = explain_verdict(verdict, passphrase.redact(disk), listed)
            return make_result(*ending, sent=True)
        opened.append(disk)
        # Dropbear may end a channel that is opened before the last one has ended.
        channel.status_event.wait(END_SECONDS)
        seconds = NEXT_PROMPT_SECONDS


def unlock(config: Config, passphrase: Passphrase, deadline: float) -> Result:
    """Unlock the disks by `deadline`, in monotonic seconds."""
    try:
        transport = open_transport(config, deadline + 2)
        verify_host_key(transport, config)
        log_in(transport, config)
        return unlock_disks(transport, passphrase, deadline)
    except UnlockError as error:
        return make_result(*error.args)


def find_unlock_problem(config: Config) -> str:
    """Return what would make an unlock fail on this box, or an empty string."""
    if not config.host_key:
        return "no host key is pinned; run waker check while the initrd waits"
    if not importlib.util.find_spec("paramiko"):  # importing it would take 20 MB
        return NO_PARAMIKO
    problem = find_key_problem(config.key)
    return f"SSH key {problem}" if problem else ""


# ---- Configuration -------------------------------------------------------------------
# One table drives parsing and --help. All mistakes are reported at once, each with the
# valid form but without the value, which may be a misplaced secret.

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


def parse_path(text: str) -> Path:
    """Parse a path; `~` is not expanded, since waker may run as another user."""
    return Path(match_whole(r"(?!~)[^\x00-\x1f]+", text))


def parse_ipv4(text: str) -> str:
    return str(ipaddress.IPv4Address(text))


def parse_listen(text: str) -> Address:
    """Parse ADDRESS:PORT, with an IPv6 address in brackets; port 0 is any free one."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})", text)
    if not found or int(found[3]) > 65535:
        raise ValueError
    return plain_address(found[1] or found[2]), int(found[3])


def parse_addresses(text: str) -> frozenset[str]:
    parts = text.split(",") if text else ()
    return frozenset(plain_address(part.strip()) for part in parts)


# Field of Config, default, parser, valid form. An empty value counts as not set.
Setting = tuple[str, str, Callable[[str], object], str]
PARSE_USER: Final = functools.partial(match_whole, "[!-~]{1,64}")
PARSE_NAME: Final = functools.partial(
    match_whole, r"[^\0-\x1f\x7f-\x9f\ud800-\udfff]{0,64}"
)
PARSE_LINK: Final = functools.partial(match_whole, r"(https?://[\w\[][!-~]*)?")
SETTINGS: Final[Mapping[str, Setting]] = {
    "WAKER_HOMELAB_HOST": ("host", "", plain_address, "the server's IP address"),
    "WAKER_INITRD_SSH_PORT": ("initrd_port", "2222", parse_port, "a port, 1 to 65535"),
    "WAKER_SYSTEM_SSH_PORT": ("system_port", "22", parse_port, "a port, 1 to 65535"),
    "WAKER_SSH_USER": ("user", "root", PARSE_USER, "a user's name"),
    "WAKER_SSH_KEY": ("key", "ssh_key", parse_path, "the SSH key's path, without ~"),
    "WAKER_SSH_HOST_KEY": ("host_key", "", parse_host_keys, "whole lines, with commas"),
    "WAKER_HOMELAB_MAC": ("mac", "", parse_mac, "a MAC address: 52:54:00:12:34:56"),
    "WAKER_HOMELAB_BROADCAST": ("broadcast", LIMITED, parse_ipv4, "an IPv4 address"),
    "WAKER_HOMELAB_NAME": ("name", "", PARSE_NAME, "a name of at most 64 characters"),
    "WAKER_HOMELAB_LINK": ("link", "", PARSE_LINK, "an http or https address"),
    "WAKER_PIN": ("pin", "", Pin, "8 to 128 characters, without a space at either end"),
    "WAKER_LISTEN": ("listen", "[::]:8080", parse_listen, "written as 0.0.0.0:8080"),
    "WAKER_TRUSTED_PROXY": ("proxies", "", parse_addresses, "addresses: 127.0.0.1,::1"),
}
# What `state` needs, and what `unlock` needs besides.
PORTS: Final = "WAKER_HOMELAB_HOST", "WAKER_INITRD_SSH_PORT", "WAKER_SYSTEM_SSH_PORT"
LOGIN: Final = "WAKER_SSH_USER", "WAKER_SSH_KEY", "WAKER_SSH_HOST_KEY"
OUR_LINE: Final = re.compile(r"(WAKER_\w+)\s*=\s*(.*)")
# A comment, nothing, or another program's setting.
OTHER_LINE: Final = re.compile(r"(?i)[#;]|$|(?!.*WAKER_)\w+\s*=")
# In a value without quotes: a curly quote, a comment, or a second setting.
AMBIGUOUS: Final = re.compile(r"^[#\u2018-\u201f]|\s(#|WAKER_\w+=)")


def read_env_text(path: Path) -> str:
    """Read the file of settings. Raises: ConfigError."""
    shown = shown_path(path)
    try:
        # Some editors add a byte order mark. Parsers judge what is not UTF-8.
        text = path.read_text("utf-8-sig", "surrogateescape")
    except FileNotFoundError:
        fix = "correct the path, or run `sudo waker install`"
        raise ConfigError(f"{shown} is missing; {fix}") from None
    except PermissionError:
        raise ConfigError(f"{shown} cannot be read; use sudo") from None
    except OSError as error:
        raise ConfigError(f"{shown}: {error.strerror}") from None
    if "\0" in text:
        raise ConfigError(f"{shown} is UTF-16, or damaged: save it as UTF-8")
    if not text.strip():
        problem = "is empty; delete it, and run `sudo waker install`"
        raise ConfigError(f"{shown} {problem if shown == path else NOT_PASSED}")
    return text


def unquote(text: str) -> str | None:
    """Return a value without its quotes, or None if it could be misread."""
    quote = text[:1]
    if quote in ('"', "'"):
        return text[1:-1] if text.find(quote, 1) == len(text) - 1 else None
    return None if AMBIGUOUS.search(text) else text


def read_env_file(path: Path) -> dict[str, str]:
    """Parse lines WAKER_NAME=value. Raises: ConfigError, which quotes no line."""
    values: dict[str, str] = {}
    mistakes: list[str] = []
    lines = map(str.strip, read_env_text(path).splitlines())
    for number, line in enumerate(lines, 1):
        if OTHER_LINE.match(line):
            continue
        place = f"{shown_path(path)}, line {number}"
        found = OUR_LINE.fullmatch(line)
        value = unquote(found[2]) if found else None
        if not found or value is None:
            form = 'WAKER_NAME=value or WAKER_NAME="value"; comments on their own lines'
            mistakes.append(f"{place} must be {form}")
        elif found[1] in values:
            mistakes.append(f"{place}: {found[1]} is set twice")
        else:
            values[found[1]] = value
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return values


def read_config(
    values: Mapping[str, str], folder: Path, needs: Iterable[str] = SETTINGS
) -> Config:
    """Parse the settings in `needs`; paths start at `folder`. Raises: ConfigError."""
    unknown = sorted(values.keys() - SETTINGS.keys())
    mistakes = [f"{name} is not a setting; see `waker --help`" for name in unknown]
    parsed: dict[str, Any] = {}
    for name in needs:
        field, default, parse, form = SETTINGS[name]
        text = values.get(name) or default
        try:
            value = parse(text)
        except ValueError:
            problem = "must be"
            if not text:
                problem = "has no value" if name in values else "is not set"
                problem += "; it must be"
            mistakes.append(f"{name} {problem} {form}")
        else:
            parsed[field] = folder / value if isinstance(value, Path) else value
    config = Config(**parsed)
    if config.broadcast == LIMITED and ":" in config.host:
        form = "your network's own, such as 192.168.1.255"
        reason = "because WAKER_HOMELAB_HOST is an IPv6 address"
        mistakes.append(f"WAKER_HOMELAB_BROADCAST must be {form}, {reason}")
    if config.host_key and "key" in parsed:
        problem = find_key_problem(config.key)
        if problem:
            mistakes.append(f"WAKER_SSH_KEY {problem}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config._replace(name=config.name or config.host)


# ---- The unlocking process -----------------------------------------------------------
# The daemon runs `waker.py unlock` as a child process, whose memory is freed when it
# ends. It reads the passphrase, reports when it sends it, and prints the result.

Program = tuple[Sequence[str], Mapping[str, str]]  # its arguments and environment


class UnlockProcess:
    """Keeps the passphrase until it is forgotten, and runs the child process."""

    def __init__(self, program: Program, passphrase: Passphrase) -> None:
        self._program = program
        self._passphrase: Passphrase | None = passphrase
        self._child: Popen[bytes] | None = None  # the last that ran
        self._is_cancelled = False

    @property
    def has_begun(self) -> bool:
        return self._child is not None

    def forget_passphrase(self) -> None:
        self._passphrase = None

    def cancel(self) -> None:
        """Give and send nothing. A child that is about to send ignores SIGTERM."""
        self._is_cancelled = True
        if self._child:
            self._child.terminate()

    def run(self, on_sent: Callable[[], None]) -> Result:
        """Unlock. Call `on_sent` when the passphrase is about to be sent, or later."""
        try:
            self._child = child = self._spawn()
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", "there is not enough memory")
            return make_result(Outcome.ERROR, f"waker unlock cannot start: {reason}")
        with child:  # waits for its end
            output = self._talk(child, on_sent)
        return self._read_result(output, child.returncode)

    def _spawn(self) -> "Popen[bytes]":
        """Start the child. Raises: OSError, MemoryError."""
        import subprocess

        command, environment = self._program
        # The child inherits blocked signals, and unblocks them when it has read the
        # passphrase. In its own session, it gets none from a terminal.
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def _talk(self, child: "Popen[bytes]", on_sent: Callable[[], None]) -> bytes:
        """Give it the passphrase; return what it prints. Kill it at its deadline."""
        deadline = time.monotonic() + UNLOCK_SECONDS + REPORT_SECONDS
        stdin = cast("io.BufferedWriter", child.stdin)
        stdout = cast("io.BufferedReader", child.stdout).fileno()
        with contextlib.suppress(BrokenPipeError):  # its output says why
            if self._passphrase and not self._is_cancelled:
                stdin.write(self._passphrase.data)  # fits into the pipe
            stdin.close()
        output = b""
        while True:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([stdout], [], [], left)[0]:
                child.kill()  # its own alarm starts once it has the passphrase
            data = os.read(stdout, 65536)
            if not data:
                return output
            output += data
            if SENT_REPORT in output:
                on_sent()

    def _read_result(self, output: bytes, status: int) -> Result:
        """Return the result in the last line of the output, or why there is none."""
        sent = SENT_REPORT in output
        if self._is_cancelled and not sent:
            return make_result(Outcome.CANCELLED)
        with contextlib.suppress(ValueError, LookupError, TypeError):  # no result
            members = json.loads(output.splitlines()[-1])
            return Result(OUTCOMES[members["outcome"]], members["message"], sent)
        reason = f"the unlocking process ended with status {status}; see waker's log"
        if not sent:
            return make_result(Outcome.ERROR, reason)
        words = f"may have been sent, but {reason}"
        return make_result(Outcome.NOT_CONFIRMED, words, sent=True)


# ---- Starting ------------------------------------------------------------------------
# Wake, wait, unlock and watch, in a thread: the phone may go to sleep. Only `_show`
# changes phase, message and outcome. The first look at the ports is fresh, and so is
# the last.

PACKET_SECONDS: Final = 10  # between magic packets, while no port is open
RETRY_SECONDS: Final = 5  # between tries to unlock, while no disk asks
READY_SECONDS: Final = 120  # for a disk to ask, once the initrd is reached: two tries
START_SECONDS: Final = 600  # for the initrd to come up, and then for the system
SHOWN_SECONDS: Final = 3600  # how long the status shows a finished start
CONNECTING: Final = "Connecting to the initrd"
NEVER_ASKS: Final = (
    "no disk asked, and the server may never ask again by itself: look at its screen,"
    " and restart it"
)


def explain_asleep(config: Config, ports: PortStates, failure: str) -> str:
    """Return why the initrd did not come up; `failure` is why no packet ever left."""
    if PortState.CLOSED in ports:
        return "the server answered, but its initrd's SSH port was closed"
    if failure:
        return f"the server did not answer, and {failure}"
    if PortState.UNKNOWN in ports:
        return f"the server {PortState.UNKNOWN.value}"
    advice = find_packet_problem(config) or "check power, cable and Wake-on-LAN"
    return f"the server did not answer: {advice}"


class Phase(enum.Enum):
    """The phase of a start. The last three are its ends."""

    WAKING = "waking"
    UNLOCKING = "unlocking"
    BOOTING = "booting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


RUNNING: Final = Phase.WAKING, Phase.UNLOCKING, Phase.BOOTING
SHOULD_BOOT: Final = Outcome.UNLOCKED, Outcome.ALREADY_OPEN, Outcome.NOT_CONFIRMED
PHASE_AFTER: Final = {
    Outcome.UP: Phase.DONE,
    Outcome.CANCELLED: Phase.CANCELLED,
    **dict.fromkeys(SHOULD_BOOT, Phase.BOOTING),
}


class Start:
    """A start, or an unlock, which is a start that does not wait for the initrd."""

    def __init__(
        self, watcher: Watcher, process: UnlockProcess, *, waits: bool
    ) -> None:
        self._watcher = watcher
        self._process = process
        self._waits = waits
        self._lock = threading.Lock()
        self.id = secrets.randbits(32)  # a counter would repeat after a restart
        self.began = time.monotonic()  # monotonic seconds, like `ended`
        self.ended = math.inf  # while it runs
        self.phase = Phase.WAKING if waits else Phase.UNLOCKING
        self.message = "Looking for the server" if waits else CONNECTING
        self.outcome: Outcome | None = None  # until something is known
        self.woke = False  # a magic packet was sent
        self.sent = False  # the passphrase may have been sent
        self.result = Result(Outcome.ERROR, "", sent=True)  # until `unlock_ended`
        self.unlock_ended = threading.Event()
        self.cancelled = threading.Event()
        self.times = {self.phase.value: 0}  # seconds from the start to each phase

    def _show(self, phase: Phase, text: str, outcome: Outcome | None = None) -> None:
        """Change what the status shows. It must stay true until the next change."""
        with self._lock:
            is_news = (phase, text) != (self.phase, self.message)
            self.phase, self.message, self.outcome = phase, text, outcome
            self.times.setdefault(phase.value, int(time.monotonic() - self.began))
            if phase not in RUNNING:
                self.ended = time.monotonic()
        if is_news:
            log(f"start: {phase.value}: {text}")

    def _show_sent(self) -> None:
        self.sent = True
        self._show(Phase.UNLOCKING, "Waiting for the initrd's verdict")

    def _finish_unlock(self, result: Result) -> None:
        """Show how the unlock ended, and forget the passphrase."""
        self._process.forget_passphrase()
        self.result = result
        self.sent = result.sent
        phase = PHASE_AFTER.get(result.outcome, Phase.FAILED)
        self._show(phase, result.message, result.outcome)
        self.unlock_ended.set()

    def _wait_for_initrd(self, seconds: float) -> Result | None:
        """Wake the machine until the initrd listens. After `seconds`, say why not."""
        config = self._watcher.config
        packet_due = -math.inf  # monotonic seconds
        text, failure = "", ""
        is_first = True
        while True:
            now = time.monotonic()
            taken = now - self.began
            ports = self._watcher.probe(now, fresh=is_first or taken > seconds)
            is_first = False
            if ports.system is PortState.OPEN:
                return make_result(Outcome.UP)
            if ports.initrd is PortState.OPEN:
                return None
            if self.cancelled.is_set():
                return make_result(Outcome.CANCELLED)
            if taken > seconds:
                why = explain_asleep(config, ports, "" if self.woke else failure)
                words = f"after {int(taken) // 60} minutes, {why}"
                return make_result(Outcome.NOT_AWAKE, words)
            if now >= packet_due:
                packet_due = now + PACKET_SECONDS
                try:
                    text, failure = wake(config), ""
                    self.woke = True
                except OSError as error:  # the link may drop while the machine wakes
                    failure = f"no magic packet could be sent ({error.strerror})"
                    text = f"{failure}; trying again"
            answers = "The server answers; waiting for its initrd or its system"
            is_answering = PortState.CLOSED in ports and not failure
            self._show(Phase.WAKING, answers if is_answering else text)
            self.cancelled.wait(1)  # second

    def _unlock_when_ready(self) -> Result | None:
        """Unlock; try again while no disk asks. Return None if the initrd has gone."""
        give_up = time.monotonic() + READY_SECONDS
        self._show(Phase.UNLOCKING, CONNECTING)
        while True:
            tried = time.monotonic()
            result = self._process.run(self._show_sent)
            if result.outcome is not Outcome.NOT_ASKED:
                return result
            now = time.monotonic()
            is_last = now + (now - tried) > give_up  # another try may take as long
            self._show(Phase.UNLOCKING, "The initrd was not ready; looking again")
            if self.cancelled.wait(RETRY_SECONDS):
                return make_result(Outcome.CANCELLED)
            ports = self._watcher.probe(time.monotonic(), fresh=True)
            if ports.initrd is not PortState.OPEN or ports.system is PortState.OPEN:
                return None
            if is_last:
                is_idle = result == make_result(*NO_PROMPT)
                return make_result(Outcome.NOT_ASKED, NEVER_ASKS) if is_idle else result

    def _unlock(self) -> Result:
        """Unlock, after waking the machine if it waits; return how that ended."""
        seconds = START_SECONDS
        result = None if self._waits else self._process.run(self._show_sent)
        while not result:  # or the initrd has gone away again
            result = self._wait_for_initrd(seconds)
            if not result:
                result = self._unlock_when_ready()
                seconds = 2 * START_SECONDS  # for the system as well
        if result.outcome is Outcome.HOST_KEY_DIFFERS:  # the system has its own
            ports = self._watcher.probe(time.monotonic(), fresh=True)
            if ports.system is PortState.OPEN:
                text = f"{Outcome.UP.sentence}, but {result.message}"
                return result._replace(outcome=Outcome.UP, message=text)
        return result

    def _watch(self) -> None:
        """Wait until the system's port opens, or time is up."""
        result = self.result
        deadline = time.monotonic() + START_SECONDS
        while not self.cancelled.wait(1):  # second
            now = time.monotonic()
            ports = self._watcher.probe(now, fresh=now > deadline)
            if ports.system is PortState.OPEN:
                text = f"The system is up. {result.message}"
                self._show(Phase.DONE, text, Outcome.UP)
                return
            if now > deadline:
                text = f"{result.message} The system has not answered yet."
                self._show(Phase.FAILED, text, Outcome.NOT_UP)
                return
        self._show(Phase.CANCELLED, result.message, result.outcome)

    def run(self) -> None:
        """Unlock, and watch the machine boot. Show even a bug."""
        try:
            self._finish_unlock(self._unlock())
            if self.phase is Phase.BOOTING:
                self._watch()
        except Exception as error:  # noqa: BLE001 - the status must show a bug
            log(describe_bug(error))
        finally:
            if self.phase in RUNNING:  # there was a bug, and the next may begin
                may_be_sent = self._process.has_begun
                words = "The passphrase may have been sent." if may_be_sent else UNSENT
                text = f"Internal error; see waker's log. {words}"
                self._finish_unlock(Result(Outcome.ERROR, text, may_be_sent))

    def cancel(self) -> None:
        """Stop watching, and send nothing."""
        self.cancelled.set()
        self._process.cancel()

    def members(self, now: float) -> dict[str, object]:
        """Return what the status says of it."""
        with self._lock:
            return {
                "id": self.id,
                "phase": self.phase.value,
                "outcome": self.outcome.word if self.outcome else None,
                "message": self.message,
                "seconds": max(int(min(now, self.ended) - self.began), 0),
                "sent": self.sent,
                "woke": self.woke,
                "times": dict(self.times),
            }


def find_median(seconds: Sequence[float]) -> int | None:
    """Return the median in whole seconds; of an even number, the larger one."""
    return int(sorted(seconds)[len(seconds) // 2]) if seconds else None


class Starter:
    """Runs one start at a time, and keeps the last one for the status."""

    def __init__(self, watcher: Watcher, program: Program) -> None:
        self._watcher = watcher
        self._program = program
        self._lock = threading.Lock()
        self._last: Start | None = None  # running, or shown until it is forgotten
        self._is_stopping = False
        self._usual: deque[Start] = deque(maxlen=5)  # woke it, and it came up

    def _run(self, start: Start) -> None:
        start.run()
        if start.woke and start.outcome is Outcome.UP:
            self._usual.append(start)

    def begin(self, passphrase: Passphrase, *, waits: bool) -> Start:
        """Begin a start or an unlock, which may replace one that only watches.

        Raises: HttpError 409 while another may still send its passphrase; 500 if this
        box cannot unlock; 503 if it is stopping or too busy.
        """
        # This may take time, so not under the lock.
        problem = find_unlock_problem(self._watcher.config)
        if problem:
            purpose = "start" if waits else "unlock"
            raise HttpError(500, f"Failed to {purpose}: {problem}. {UNSENT}")
        process = UnlockProcess(self._program, passphrase)
        start = Start(self._watcher, process, waits=waits)
        # Not a daemon thread: on exit, Python waits for it.
        thread = threading.Thread(target=self._run, args=(start,), daemon=False)
        with self._lock:
            last = self._last
            if self._is_stopping:
                raise HttpError(503, "waker is stopping")
            if last and last.phase in (Phase.WAKING, Phase.UNLOCKING):
                busy = "Another unlock or start is running; wait until it ends"
                raise HttpError(409, busy)
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                start.cancel()  # it may run after all
                raise HttpError(503, "Too busy", ("Retry-After", "5")) from None
            if last:
                last.cancelled.set()  # it only watches
            self._last = start
        return start

    def cancel(self) -> None:
        """Cancel the running start. Raises: HttpError 409 if no start is running."""
        with self._lock:
            if not self._last or self._last.phase not in RUNNING:
                raise HttpError(409, "No start is running")
            self._last.cancel()

    def stop(self) -> None:
        """Cancel what runs, and let nothing else begin."""
        with self._lock:
            self._is_stopping = True
            if self._last:
                self._last.cancel()

    def forget(self, now: float, system_open_at: float) -> None:
        """Forget an old start, or a failed one if the system was seen open since."""
        # Keep a host key alarm: an impostor could clear it by opening the port.
        kept = Outcome.UP, Outcome.HOST_KEY_DIFFERS
        with self._lock:
            start = self._last
            if not start:
                return
            is_old = start.ended + SHOWN_SECONDS < now
            has_come_up = start.ended < system_open_at
            if is_old or (has_come_up and start.outcome not in kept):
                self._last = None

    def usual_times(self) -> dict[str, int | None]:
        """Return the members of the status that say how long starts take."""
        usual = [*self._usual]  # at once: another thread may append
        unlocked = [each.times["booting"] for each in usual if "booting" in each.times]
        return {
            "usual_seconds": find_median([each.ended - each.began for each in usual]),
            "usual_unlock_seconds": find_median(unlocked),
        }

    def members(self, now: float) -> dict[str, object] | None:
        """Return what the status says of the start, if it shows one."""
        with self._lock:
            start = self._last
        return start.members(now) if start else None


# ---- Tokens and attempts -------------------------------------------------------------
# Memory is bounded. Each client has its own limit, or one could lock the owner out.

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


class PinLimiter:
    """Counts attempts to guess the PIN, per client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: dict[str, list[float]] = {}  # times, by client; newest last

    def count(self, client: str, now: float) -> None:
        """Count an attempt. Raises: HttpError 429 with Retry-After."""
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
        raise HttpError(429, text, ("Retry-After", wait))


class TokenStore:
    """Issues bearer tokens, and keeps their digests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expiry: dict[bytes, float] = {}  # by token's digest; oldest first

    def issue(self, now: float) -> str:
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
# A handler returns a Response or raises an HttpError, which `respond` turns into JSON.
# Path, method and token are checked in this order; then the handler checks the body.

MAX_BODY: Final = 16384  # bytes: a PIN or a passphrase, with room to spare
# In Accept-Encoding. With a quality of 0, the client refuses it.
GZIP: Final = re.compile(r"(?i)(?:^|,)\s*gzip\s*(?!;\s*q=0(\.0*)?\s*(,|$))(?:[;,]|$)")
# JSON with exactly one member, which rules out duplicate names and nesting.
SPACE: Final = r"[ \t\r\n]*"
STRING: Final = rf'{SPACE}("(?:[^"\\]|\\.)+"){SPACE}'
ONLY_MEMBER: Final = re.compile(f"{SPACE}{{{STRING}:{STRING}}}{SPACE}")


class Request(NamedTuple):
    """A request, as a handler sees it."""

    method: str
    path: str
    fields: Mapping[str, str]  # of its head, by lower-case name
    body: bytes | None  # None if it is longer than MAX_BODY, and unread
    client: str  # its address
    now: float  # monotonic seconds

    def __repr__(self) -> str:
        return f"Request({self.method} {self.path} from {self.client})"


class Response:
    """An answer, without the header fields that all answers have."""

    def __init__(
        self, data: Mapping[str, object] | bytes, status: int = 200, *headers: Header
    ) -> None:
        self.body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.status = status
        self.headers = headers


def parse_body(request: Request, name: str, parse: Callable[[str], T]) -> T:
    """Parse the text of a JSON body's only member. Raises: HttpError 400, 413, 415."""
    if request.body is None:
        raise HttpError(413, f"The body must have at most {MAX_BODY} bytes")
    kind = request.fields.get("content-type", "")
    if not re.fullmatch(r"(?i)application/json[ \t]*(;.*)?", kind):
        raise HttpError(415, "Content-Type must be application/json")
    try:
        found = ONLY_MEMBER.fullmatch(request.body.decode())
        if not found or json.loads(found[1]) != name:
            raise ValueError
        text: str = json.loads(found[2])
        text.encode()  # raises ValueError for half a surrogate pair
        return parse(text)
    except ValueError:
        form = f'{{"{name}": "<1 to 512 bytes without control characters>"}}'
        raise HttpError(400, f"The body must be {form}") from None


class Page:
    """The page and the icon for iPhones, as they are sent. Raises: ConfigError."""

    def __init__(self) -> None:
        try:
            if HERE.is_dir():
                source = HERE.joinpath("ui.html").read_bytes()
            else:
                source = zipimporter(str(HERE)).get_data("ui.html")
        except OSError as error:
            raise ConfigError(f"the page {HERE}/ui.html: {error.strerror}") from None
        # The icon is served by itself.
        whole = re.fullmatch(rb"(?s)(.*)<!-- icon: ([\w+/=]+) -->\n", source)
        if not whole:
            raise ConfigError("ui.html is damaged; reinstall it")
        source, icon = whole.groups()
        # The policy allows the page's own styles and scripts, by hash, and no others.
        hashes = {b"style": "", b"script": ""}
        for name, code in re.findall(rb"(?s)<(style|script)\b[^>]*>(.*?)</\1>", source):
            hashes[name] += f" 'sha256-{base64.b64encode(sha256(code)).decode()}'"
        policy = (
            f"default-src 'none'; script-src{hashes[b'script']};"
            f" style-src{hashes[b'style']};"
            " connect-src 'self'; img-src 'self';"
            " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
            " require-trusted-types-for 'script'"
        )
        html = "Content-Type", "text/html; charset=utf-8"
        headers = ("Content-Security-Policy", policy), html, ("Vary", "Accept-Encoding")
        self.plain = Response(source, 200, *headers)
        packed = zlib.compress(source, 9, wbits=31)  # in gzip's format
        self.packed = Response(packed, 200, *headers, ("Content-Encoding", "gzip"))
        png = "Content-Type", "image/png"
        self.icon = Response(base64.b64decode(icon), 200, png)


class App:
    """The parts of the daemon."""

    def __init__(self, config: Config, program: Program) -> None:
        self.config = config
        self.page = Page()
        self.pin_limiter = PinLimiter()
        self.tokens = TokenStore()
        self.watcher = Watcher(config)
        self.starter = Starter(self.watcher, program)


def succeed(request: Request, message: str) -> Response:
    log(f"ip={request.client} {message}")
    return Response({"success": True, "message": message})


def status_members(app: App, now: float) -> dict[str, object]:
    """Probe what is due, and forget what is over; return GET /api/status."""
    ports = app.watcher.probe_for_status(now)
    app.starter.forget(now, app.watcher.system_open_at)
    return {
        "name": app.config.name,
        **ports.members(),
        **app.starter.usual_times(),
        "link": app.config.link or None,
        "start": app.starter.members(now),
    }


def post_auth(app: App, request: Request) -> Response:
    """Exchange the PIN for a token. A malformed body does not count."""
    pin = parse_body(request, "pin", str.strip)  # pasting may add spaces
    app.pin_limiter.count(request.client, request.now)
    if not app.config.pin or not app.config.pin.matches(pin):
        raise HttpError(401, "Wrong PIN", ("WWW-Authenticate", "Bearer"))
    log(f"ip={request.client} PIN accepted")
    token = app.tokens.issue(request.now)
    members = {"token": token, "expires_in": TOKEN_SECONDS}
    try:
        return Response(members | {"status": status_members(app, request.now)})
    except Exception as error:  # noqa: BLE001 - the token is worth more
        log(describe_bug(error))
        return Response(members)


def get_page(app: App, request: Request) -> Response:
    is_packed = GZIP.search(request.fields.get("accept-encoding", ""))
    return app.page.packed if is_packed else app.page.plain


def get_status(app: App, request: Request) -> Response:
    return Response(status_members(app, request.now))


def post_wol(app: App, request: Request) -> Response:
    try:
        return succeed(request, wake(app.config))
    except OSError as error:
        raise HttpError(500, f"Failed to send WOL packet: {error.strerror}") from None


def post_unlock(app: App, request: Request) -> Response:
    passphrase = parse_body(request, "passphrase", Passphrase)
    result = make_result(Outcome.UP)
    if app.watcher.probe(request.now, fresh=True).system is not PortState.OPEN:
        start = app.starter.begin(passphrase, waits=False)
        start.unlock_ended.wait()
        result = start.result
    status, text = result.outcome.status, result.message
    if status == 200:
        return succeed(request, text)
    if result.outcome is Outcome.NOT_CONFIRMED:
        text = f"{text[:-1]}; watch GET /api/status"
    elif status == 500:
        text = f"Failed to unlock: {text}"
    raise HttpError(status, text)


def post_start(app: App, request: Request) -> Response:
    passphrase = parse_body(request, "passphrase", Passphrase)
    app.starter.begin(passphrase, waits=True)
    return succeed(request, "Started; the status shows progress")


def delete_start(app: App, request: Request) -> Response:
    app.starter.cancel()
    return succeed(request, "Cancelling; the status shows the result")


RouteHandler = Callable[[App, Request], Response]
# Method, path, handler, and whether it works without a token.
ROUTES: Final[tuple[tuple[str, str, RouteHandler, bool], ...]] = (
    ("GET", "/", get_page, True),
    ("GET", "/apple-touch-icon.png", lambda app, _: app.page.icon, True),
    ("POST", "/api/auth", post_auth, True),
    ("GET", "/api/status", get_status, False),
    ("POST", "/api/wol", post_wol, False),
    ("POST", "/api/unlock", post_unlock, False),
    ("POST", "/api/start", post_start, False),
    ("DELETE", "/api/start", delete_start, False),
)


def dispatch(app: App, request: Request) -> Response:
    """Find the route, check the token and call the handler. Raises: HttpError."""
    rows = {row[0]: row[2:] for row in ROUTES if row[1] == request.path}
    if "GET" in rows:
        rows["HEAD"] = rows["GET"]
    if not rows:
        raise HttpError(404, "No such path")
    if request.method not in rows:
        allowed = ", ".join(sorted(rows))
        raise HttpError(405, f"Allowed here: {allowed}", ("Allow", allowed))
    handler, open_to_all = rows[request.method]
    scheme, _, token = request.fields.get("authorization", "").partition(" ")
    is_known = app.tokens.is_valid(token.strip(" "), request.now)
    if not open_to_all and not (is_known and scheme.lower() == "bearer"):
        raise HttpError(401, "Invalid or expired token", ("WWW-Authenticate", "Bearer"))
    return handler(app, request)


def respond(app: App, received: Request | HttpError, peer: str) -> Response:
    """Answer a request, or an HttpError that was raised while reading it."""
    what = "a request"
    client = peer
    try:
        if isinstance(received, HttpError):
            raise received
        what = f"{received.method} {received.path}"
        client = received.client
        return dispatch(app, received)
    except HttpError as error:
        refusal = error.with_traceback(None)  # breaks a reference cycle
    except Exception as error:  # noqa: BLE001 - every client gets an answer
        log(describe_bug(error))
        refusal = HttpError(500, "Internal error; see waker's log")
    line = f"refused {what}: {refusal.status} {refusal}"
    # A trusted proxy is not named: fail2ban would ban everybody behind it.
    if client not in app.config.proxies:
        line = f"ip={client} {line}"
    log(line)
    return Response({"error": str(refusal)}, refusal.status, *refusal.headers)


# ---- HTTP ----------------------------------------------------------------------------
# http.server accepts connections; the grammar is ours, because its own reads a bare CR
# as a new field. Refuse ambiguous requests, which could be smuggled past a proxy. All
# patterns run in linear time. Sources: RFC 9110, 9112.

MAX_HEAD: Final = 16384  # bytes, with the empty line
MAX_FIELDS: Final = 100  # a browser sends 20; thousands of tiny ones cost CPU
MAX_CONNECTIONS: Final = 64  # at a time: half a megabyte each at worst
CLIENT_SECONDS: Final = 10  # to send the request, and again to read the answer
DRAIN_SECONDS: Final = 2  # for a client to hang up after its answer
MAX_DRAIN: Final = 1 << 20  # bytes that it may still send in that time
TCHAR: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
# A request line, whose query is ignored, and fields; each line with its CR LF.
HEAD: Final = re.compile(
    rb"(%b+) (/[!->@-~]*)(?:\?[!-~]*)? HTTP/1\.[01]\r\n"
    rb"((?:%b+:[\t -~\x80-\xff]*\r\n)*)" % (TCHAR, TCHAR)
)


def parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return method, path, fields by lower-case name. Raises: HttpError 400, 431."""
    if head.count(b"\r\n") > MAX_FIELDS + 1:
        raise HttpError(431, f"The head must have at most {MAX_FIELDS} fields")
    found = HEAD.fullmatch(head)
    if not found:
        form = "METHOD PATH HTTP/1.1 and fields NAME: VALUE, each with CR LF"
        raise HttpError(400, f"A request must begin with {form}")
    fields: dict[str, str] = {}
    for line in found[3].decode("latin-1").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name = name.lower()
        before = f"{fields[name]}, " if name in fields else ""  # it is repeated
        fields[name] = before + value.strip(" \t")
    return found[1].decode(), found[2].decode(), fields


def read_request(
    data: bytes, receive: Callable[[], bytes], peer: str, proxies: frozenset[str]
) -> Request:
    """Read a request that begins with `data`. Raises: HttpError, OSError."""
    if not re.match(TCHAR, data):  # no method begins so: do not wait for more
        looks = "https://" if data[:1] == b"\x16" else "another protocol"
        advice = "if the browser switched by itself, open the page by an IP address"
        raise HttpError(400, f"This looks like {looks}; use http://, and {advice}")
    while b"\r\n\r\n" not in data[:MAX_HEAD]:
        if len(data) >= MAX_HEAD:
            raise HttpError(431, f"The head must have at most {MAX_HEAD} bytes")
        data += receive()
    head, _, body = data.partition(b"\r\n\r\n")
    method, path, fields = parse_head(head + b"\r\n")
    if "transfer-encoding" in fields:
        raise HttpError(501, "Transfer-Encoding is not supported; send Content-Length")
    length = fields.get("content-length", "0")
    if not re.fullmatch("0|[1-9][0-9]{0,17}", length):
        raise HttpError(400, "Content-Length must be one decimal number")
    is_short = int(length) <= MAX_BODY
    while is_short and len(body) < int(length):
        body += receive()
    forwarded = fields.get("x-forwarded-for", "")
    # Behind an unknown proxy, all clients share one limit. Polls come with a token.
    if forwarded and peer not in proxies and "authorization" not in fields:
        log(f"ip={peer} sends X-Forwarded-For, but is not in WAKER_TRUSTED_PROXY")
    # The client is the last address that is not a trusted proxy.
    client, hops = peer, forwarded.rsplit(",", 16)
    with contextlib.suppress(ValueError):  # not an address: stop here
        while hops and client in proxies:
            client = plain_address(hops.pop().strip(" \t"))
    content = body[: int(length)] if is_short else None
    # `now` is read here: an attempt counts from when its request is complete.
    return Request(method, path, fields, content, client, time.monotonic())


def listen(where: Address) -> socket.socket:
    """Open a TCP port; with the address `::`, also for IPv4. Raises: OSError."""
    dual = where[0] == "::" and socket.has_dualstack_ipv6()
    if where[0] == "::" and not dual:
        where = "0.0.0.0", where[1]  # noqa: S104 - the user wants every address
    kind = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    tcp = socket.create_server(where, family=kind, backlog=4096, dualstack_ipv6=dual)
    # Clients that send nothing stay in the kernel and take no threads.
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, CLIENT_SECONDS)
    # Every answer fits into the kernel's buffer, so no thread waits for its reader.
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
    return tcp


class Connection(BaseHTTPRequestHandler):
    """One connection: read one request, answer it, and let the client hang up."""

    server: "Server"
    beginning = b""  # of the request

    def drop(self) -> None:
        """Read no more from the client. A complete request is still answered."""
        self.is_dropped = True
        with contextlib.suppress(OSError):  # the client has gone
            self.request.shutdown(socket.SHUT_RD)

    def receive(self) -> bytes:
        """Return what has arrived, or arrives next. Raises: OSError; HttpError 400."""
        self.request.settimeout(max(self.deadline - time.monotonic(), 0.001))
        self.server.waiting.add(self)  # and may be dropped
        if self.server.is_stopping:
            self.drop()
        try:
            data = bytes(self.request.recv(65536))
        finally:
            self.server.waiting.discard(self)
        if time.monotonic() > self.deadline:
            raise TimeoutError
        if not data and self.is_dropped:
            raise ConnectionAbortedError
        self.beginning = (self.beginning + data)[:5]
        if not data:
            raise HttpError(400, "The request ended before it was complete")
        return data

    def render(self, response: Response, *, with_body: bool) -> bytes:
        headers = {
            "Date": self.date_time_string(),
            "Connection": "close",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",  # the page looks for it
            "Content-Type": "application/json",
            "Content-Length": str(len(response.body)),
            **dict(response.headers),
        }
        lines = [f"HTTP/1.1 {response.status} {self.responses[response.status][0]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "\r\n"]).encode()
        return head + response.body if with_body else head

    def handle(self) -> None:
        """Answer one request, unless the connection ends or is dropped first."""
        app, peer = self.server.app, self.client_address[0]
        self.group = group_client(peer)
        self.deadline = time.monotonic() + CLIENT_SECONDS
        self.is_dropped = False
        with contextlib.suppress(OSError, HttpError):  # it has gone, or is too slow
            data = self.receive()
            received: Request | HttpError
            try:
                received = read_request(data, self.receive, peer, app.config.proxies)
            except HttpError as refusal:
                received = refusal
            except TimeoutError:
                received = HttpError(408, f"The request took over {CLIENT_SECONDS} s")
            response = respond(app, received, peer)
            is_head = self.beginning == b"HEAD "  # even if the request is malformed
            self.request.settimeout(CLIENT_SECONDS)
            self.request.sendall(self.render(response, with_body=not is_head))
            # Wait for the client to close: closing first could lose the answer.
            self.request.shutdown(socket.SHUT_WR)
            self.deadline = time.monotonic() + DRAIN_SECONDS
            unread = MAX_DRAIN
            while unread > 0:
                unread -= len(self.receive())


class Server(ThreadingHTTPServer):
    """Gives each connection a thread, and drops some if there are too many."""

    daemon_threads = False  # Python waits for them when it ends
    block_on_close = False

    def __init__(self, app: App, tcp: socket.socket) -> None:
        # HTTPServer would look up the name of our address, and hang if DNS is down.
        socketserver.BaseServer.__init__(self, tcp.getsockname()[:2], Connection)
        self.socket, self.app = tcp, app
        self.free_places = threading.Semaphore(MAX_CONNECTIONS)
        # Those that wait for their clients. Each change is atomic.
        self.waiting: set[Connection] = set()
        self.is_stopping = False

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Let a client in. Raises: OSError, which the base class ignores."""
        try:
            tcp, address = self.socket.accept()
        except Exception as error:
            self.make_room()  # descriptors may be short
            time.sleep(0.02)  # seconds, or it would spin until one is free
            raise OSError from error  # any other would end the serving thread
        # An IPv4-mapped address counts as IPv4; a link-local one keeps its scope ID.
        return tcp, (address[0].removeprefix("::ffff:"), address[1])

    def make_room(self) -> None:
        """Drop a random waiting connection of the client that has most of them."""
        with contextlib.suppress(MemoryError):  # which would end the serving thread
            waiting = self.waiting.copy()
            counts = Counter(each.group for each in waiting)
            most = max(counts.values(), default=0)
            if most > 6:  # a browser opens six: up to that, all clients are equal
                waiting = {each for each in waiting if counts[each.group] == most}
            if waiting:
                secrets.choice([*waiting]).drop()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread; make room first if there are too many."""
        wait = 0.0
        while not self.free_places.acquire(timeout=wait):
            self.make_room()
            wait = 0.02  # seconds for a thread to end
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and free its place. Every connection ends here."""
        self.close_request(request)
        self.free_places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        if error := sys.exception():
            log(describe_bug(error))

    def stop(self) -> None:
        """Stop listening, and drop clients whose request is incomplete."""
        self.socket.shutdown(socket.SHUT_RDWR)  # this wakes `serve_forever`
        self.shutdown()
        self.is_stopping = True
        for connection in self.waiting.copy():  # the others are answered first
            connection.drop()
        self.server_close()


# ---- Commands ------------------------------------------------------------------------
# What `waker.py` does when it is run.

MAX_MEMORY: Final = 64 << 20  # bytes of data; twice what an unlock or check needs
COMMANDS: Final = {
    "serve": "run the web page; the default",
    "unlock": "unlock once, with a passphrase from standard input",
    "state": "print the server's state as JSON",
}


def serve(app: App) -> int:
    """Run until SIGTERM or ^C; then answer running requests and cancel a start."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # in all threads
    try:
        tcp = listen(app.config.listen)
    except OSError as error:
        log(f"WAKER_LISTEN: {error.strerror}")
        return 1
    server = Server(app, tcp)
    threading.Thread(target=server.serve_forever, args=(None,)).start()  # no polling
    log(f"waker {__version__} listens on port {tcp.getsockname()[1]}")
    signal.sigwait(signals)
    log("stopping")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second signal ends it at once
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    app.starter.stop()
    server.stop()
    return 0  # Python waits for the last thread


def read_passphrase() -> Passphrase:
    """Read it from the terminal, or all of standard input. Raises: ValueError."""
    if os.isatty(0):
        import getpass

        return Passphrase(getpass.getpass("Passphrase: "))
    with open(0, "rb", closefd=False) as stdin:
        given = stdin.read(1024)  # bytes; more than any valid passphrase
    return Passphrase(given.decode().removesuffix("\n"))


def read_and_unlock(config: Config) -> Result:
    """Read a passphrase, and unlock within UNLOCK_SECONDS."""
    try:
        passphrase = read_passphrase()
    except KeyboardInterrupt:
        return make_result(Outcome.CANCELLED)
    except (ValueError, EOFError, OSError):
        form = "1 to 512 bytes of UTF-8 without control characters"
        return make_result(Outcome.ERROR, f"a passphrase must be {form}")
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end without a traceback
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or a cancel has no effect
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the daemon blocks them
    signal.alarm(UNLOCK_SECONDS)  # ends the process even if something hangs
    deadline = time.monotonic() + UNLOCK_SECONDS - REPORT_SECONDS
    return unlock(config, passphrase, deadline)


def print_unlock(config: Config) -> int:
    """Unlock, print the result, and return the exit status."""
    try:
        result = read_and_unlock(config)
        members = result._asdict() | {"outcome": result.outcome.word}
        os.write(1, f"{json.dumps(members)}\n".encode())
    except OSError as error:  # the daemon has ended, or a disk is full
        log(f"the result cannot be printed: {error.strerror}")
        return os.EX_IOERR
    except Exception as error:  # noqa: BLE001 - its text might quote a secret
        log(describe_bug(error))
        return os.EX_SOFTWARE
    return int(result.outcome.status != 200)


def parse_argv(argv: Sequence[str], commands: dict[str, str]) -> argparse.Namespace:
    lines = [f"  {name:25}{purpose}" for name, purpose in commands.items()]
    lines += ["", f"settings, from the environment and FILE, or else from {ENV_FILE}:"]
    for name, (_, default, _, form) in SETTINGS.items():
        lines.append(f"  {name:25}{form} [{default or 'none'}]")
    parser = argparse.ArgumentParser(
        description="Wake a server by magic packet and unlock its disk over SSH.",
        epilog="\n".join(["commands:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"waker {__version__}")
    add("--env-file", metavar="FILE", type=Path, help="settings: lines NAME=value")
    add("command", nargs="?", choices=commands, default="serve", help="what to do")
    return parser.parse_args(argv)


def read_values(env_file: Path | None) -> tuple[dict[str, str], Path, Path | None]:
    """Return the settings, the folder of relative paths, and the file if there is one.

    Raises: ConfigError.
    """
    ours = {n: v for n, v in os.environ.items() if n.startswith("WAKER_")}
    file = env_file or (None if ours else Path(ENV_FILE))
    folder = file.absolute().parent if file else Path.cwd()
    values = read_env_file(file) if file else {}
    return values | ours, folder, file


def run_command(parsed: argparse.Namespace) -> int:
    """Read the settings and run a command. Raises: ConfigError."""
    values, folder, _ = read_values(parsed.env_file)
    if parsed.command == "state":
        config = read_config(values, folder, PORTS)
        ports = Watcher(config).probe(time.monotonic(), fresh=True)
        print(json.dumps(ports.members()))
        return 0
    if parsed.command == "unlock":
        return print_unlock(read_config(values, folder, PORTS + LOGIN))
    config = read_config(values, folder)
    # For the process that unlocks: not the PIN. PYTHONPATH may lead to paramiko.
    environment = {n: v for n, v in os.environ.items() if not n.startswith("WAKER_")}
    environment |= {name: values[name] for name in PORTS + LOGIN if name in values}
    environment["WAKER_SSH_KEY"] = str(config.key)
    path = Path(__file__).resolve() if HERE.is_dir() else HERE
    unlocks = sys.executable, str(path), "unlock"
    return serve(App(config, (unlocks, environment)))


def protect_process(*, loads_paramiko: bool) -> None:
    """Protect the log from clients, secrets from core dumps, and the box's memory."""
    # Open descriptors 0 to 2 if they are closed: 2 is the log, and must be no client.
    spare = os.open(os.devnull, os.O_RDWR)
    while spare <= 2:
        spare = os.dup(spare)
    os.close(spare)
    # No secret goes into a core dump. With a limit of 0 instead of 1, the kernel would
    # still pipe one to systemd-coredump. Source: do_coredump in fs/coredump.c.
    with contextlib.suppress(ValueError):  # only root may raise a limit of 0
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    threading.stack_size(512 << 10)  # bytes; musl's 128 KiB are too few for json
    if loads_paramiko:
        sys.modules["invoke"] = cast("Any", None)  # or paramiko imports it, slowly
        # paramiko buffers packets of any size, even from an unverified server.
        with contextlib.suppress(ValueError):  # the limit is lower already
            resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    warnings.simplefilter("ignore")  # paramiko uses what cryptography deprecates


def log_mistakes(error: ConfigError) -> int:
    """Log each mistake; return an exit status after which the unit does not restart."""
    for line in str(error).splitlines():
        log(line)
    return os.EX_CONFIG


def main(argv: Sequence[str], commands: dict[str, str] = COMMANDS) -> int:
    """Run a command, and return the exit status."""
    parsed = parse_argv(argv, commands)
    is_unlock = parsed.command == "unlock"
    protect_process(loads_paramiko=is_unlock)
    try:
        status = run_command(parsed)
    except ConfigError as error:
        return log_mistakes(error)
    if is_unlock:
        os._exit(status)  # paramiko's threads would take 15 s to end
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
