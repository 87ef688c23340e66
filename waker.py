#!/usr/bin/python3
"""Wake one machine by magic packet and unlock its encrypted disk over SSH.

    waker.py [--env-file FILE] [serve | check | unlock | state]

Away from home, a person types a PIN and the passphrase of a disk into a page. This
daemon, on a Pi or a router near the machine, wakes it, watches it and unlocks its disk.
But it sends the passphrase only after the pinned host key was verified in that very
connection and the machine asked for it; it never says "unlocked" unless that was seen;
and it keeps nothing: no file is written, and its tokens are gone when it stops.

The laws of this file:
1. Read it top to bottom, once: a name is defined before it is used.
2. Parse, don't validate: once a value has entered, its type is the proof.
3. Handlers return a Response. One function makes every error of it.
4. Authorisation is a column of the route table, closed by default.
5. Few functions touch network or files; only commands use argv, signals, environment.
6. Nothing at module level changes. Time is handed in; only what waits reads the clock.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = ["paramiko>=2.12"]
# ///

import argparse
import base64
import contextlib
import enum
import errno
import functools
import hashlib
import importlib.util
import io
import ipaddress
import json
import logging
import math
import os
import re
import resource
import secrets
import select
import signal
import socket
import socketserver
import stat
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

if TYPE_CHECKING:  # imported lazily: they would cost memory for the daemon's whole life
    import ssl

    import paramiko  # the daemon itself never imports it: 20 MB

__version__ = "2.0.0.dev0"

# ---- Values --------------------------------------------------------------------------
# Checked once, when they are made; a parser raises ValueError. No secret is in a repr.

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
UNLOCK_SECONDS: Final = 90  # room for a slow key derivation on a slow machine


def sha256(data: bytes) -> bytes:
    """Digest data into 32 bytes."""
    return hashlib.sha256(data).digest()


class Mac(NamedTuple):
    """A MAC address: six octets."""

    octets: bytes

    @classmethod
    def parse(cls, text: str) -> "Mac":
        """Read six hex pairs, all joined by `:` or all by `-`."""
        pair = "[0-9A-Fa-f]{2}"
        found = re.fullmatch(rf"{pair}([:-]){pair}(\1{pair}){{4}}", text)
        octets = bytes.fromhex(re.sub("[:-]", "", text))
        if not found or octets[0] & 1 or not any(octets):  # multicast, or zeros
            raise ValueError
        return cls(octets)

    def __str__(self) -> str:
        return self.octets.hex(":")


class Pin:
    """The PIN, of 8 to 128 characters, as its digest; the text is not kept."""

    def __init__(self, text: str) -> None:
        if not 8 <= len(text) <= 128:
            raise ValueError
        self._digest: Final = sha256(text.encode())
        self.is_number: Final = text.isdecimal()  # it has digits only

    def matches(self, text: str) -> bool:
        """Compare in constant time."""
        return secrets.compare_digest(sha256(text.encode()), self._digest)


class Passphrase:
    """A LUKS passphrase: 1 to 512 bytes of UTF-8 without control characters."""

    def __init__(self, text: str) -> None:
        self.data: Final = text.encode()  # exactly: nothing is stripped or normalised
        # 512 is cryptsetup's documented limit for what is typed at a prompt; a control
        # character would end or edit the answer in some initrds.
        if not 1 <= len(self.data) <= 512 or re.search(r"[\x00-\x1f\x7f-\x9f]", text):
            raise ValueError


def fingerprint(blob: bytes) -> str:
    """Write a public key's fingerprint the way OpenSSH does."""
    return "SHA256:" + base64.b64encode(sha256(blob)).decode().rstrip("=")


class HostKey(NamedTuple):
    """A pinned public host key: its type, and its bytes on the wire."""

    kind: str
    blob: bytes

    @classmethod
    def parse(cls, text: str) -> "HostKey":
        """Read a line as ssh-keyscan, `dropbearkey -y` or a .pub file has it."""
        found = re.fullmatch(
            r"(?:[^\s@]\S*\s+)?"  # no @revoked, no @cert-authority: those are no pins
            r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(?:256|384|521))\s+(\S+)(?:\s.*)?",
            text.strip(),
        )
        if not found:
            raise ValueError
        kind, blob = found[1], base64.b64decode(found[2], validate=True)
        # RFC 4253, 6.6: the strings of the key, each after its length in 4 bytes, the
        # type first. One that ends elsewhere than the text was not pasted whole.
        first = len(kind).to_bytes(4) + kind.encode()
        end = len(first)
        while end < len(blob):
            end += 4 + int.from_bytes(blob[end : end + 4])
        if end != len(blob) or blob == first or not blob.startswith(first):
            raise ValueError
        return cls(kind, blob)

    @classmethod
    def parse_all(cls, text: str) -> tuple["HostKey", ...]:
        """Read several, separated by commas; none where there is no text."""
        return tuple(map(cls.parse, text.split(","))) if text else ()

    def __str__(self) -> str:
        return f"{self.kind} {base64.b64encode(self.blob).decode()}"


def plain_address(text: str) -> str:
    """Read an IP address; an IPv4-mapped one counts as IPv4. Raises: ValueError."""
    address = ipaddress.ip_address(text)
    if "%" in text:  # a scope such as %eth0: in X-Forwarded-For it could be any text
        raise ValueError
    return str(getattr(address, "ipv4_mapped", None) or address)


def within(address: str, networks: Iterable[Network]) -> bool:
    """Tell whether an address is in one of the networks."""
    return any(ipaddress.ip_address(address) in network for network in networks)


class Listen(NamedTuple):
    """Where the daemon listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Listen":
        """Read `ADDRESS:PORT`, an IPv6 address in brackets; port 0 is any free one."""
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})", text)
        if not found or int(found[3]) > 65535:
            raise ValueError
        return cls(plain_address(found[1] or found[2]), int(found[3]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Dialect(NamedTuple):
    """How one kind of initrd is asked to unlock, and what its words mean.

    A match in the output of `command` is an event, named by the group that took part;
    the group's text is the disk, or disks, where the initrd names any. `asks` says that
    a passphrase is awaited on standard input; `opened` and `rejected` are verdicts;
    `working` says that key derivation still runs. For other events, see Outcome.
    """

    name: str
    command: str
    events: re.Pattern[str]
    ending: bytes = b""  # of an answer; if empty, the end of input takes its place
    warning: str = ""  # about the next wrong passphrase


# Each open prompt is a file. A password agent answers all of them, each with a line of
# its standard input, which never ends: an end would count as an empty passphrase. A new
# prompt for an answered disk means that the passphrase was wrong; the states of the
# disks' units tell the rest. Nothing is done unless `printf` is the shell's own: a
# passphrase must not be an argument. Source: systemd's PASSWORD_AGENTS; tried with 257.
SYSTEMD_COMMAND: Final = r"""
say() { printf 'waker: %s\n' "$*"; exit 1; }
find_prompts() { # sets new: disks that ask; and again: those that were answered
    new='' again='' marks=''
    for file in /run/systemd/ask-password/ask.*; do
        id='' disk=''
        while IFS='=' read -r name text; do
            case $name in Id) id=$text ;; Message) disk=${text#*disk } ;; esac
        done 2>/dev/null <"$file" || continue
        case $id in cryptsetup:*) disk=${disk%:} ;; *) say foreign ;; esac
        case $answered in
            *"<$file>"*) ;;
            *"<$disk>"*) again="$again, $disk" ;;
            *) new="$new, $disk" marks="$marks<$file><$disk>" ;;
        esac
    done
}
find_verdict() { # of all disks together
    case $(systemctl is-active 'systemd-cryptsetup@*.service' cryptsetup.target) in
        *activating*) verdict=waiting ;;
        *failed*) verdict=dead ;;
        *inactive*) verdict=waiting ;;
        *active*) verdict=opened ;;
        *) verdict=waiting ;; # it told nothing
    esac
}
[ "$(command -v printf)" = printf ] || exit 127
command -v systemd-tty-ask-password-agent >/dev/null || exit 127
[ -e /etc/initrd-release ] || say booted
answered='' names='' count=0
while find_verdict && find_prompts && [ ! "$new" ]; do
    [ $verdict = opened ] && say settled
    if [ $((count += 1)) -gt 20 ]; then
        [ $verdict = dead ] && say dead
        say idle
    fi
    sleep 0.5
done
printf 'waker: asks %s\n' "${new#, }"
IFS= read -r passphrase || exit 1
while find_verdict && find_prompts && [ $((count += 1)) -lt 400 ]; do
    printf '\n' || exit 1 # nobody listens any more: forget the passphrase
    [ "$again" ] && say rejected "${again#, }"
    if [ "$new" ]; then
        while printf '%s\n' "$passphrase"; do :; done 2>/dev/null |
            systemd-tty-ask-password-agent --query >/dev/null 2>&1
        answered=$answered$marks names=$names$new
    elif [ $verdict = dead ]; then
        say dead
    elif [ $verdict = opened ]; then
        [ "$names" ] && say opened "${names#, }"
        say settled # somebody else was faster
    fi
    sleep 0.3
done
exit 1
"""
DIALECTS: Final = (
    # Source: cryptroot-unlock of cryptsetup-initramfs 2.6.1 to 2.8.8. Where it has no
    # terminal it takes all bytes up to the end of input; a newline would count.
    Dialect(
        name="cryptroot",
        command="cryptroot-unlock",
        events=re.compile(
            r"Please unlock disk (?P<asks>[!-~]{1,64})\n"
            r"|cryptsetup: (?P<opened>[!-~]{1,64}) set up successfully"
            r"|(?P<rejected>)(?:bad password or options|maximum number of tries)"
            r"|(?P<working>)Timeout reached while waiting for PID"
            r"|(?P<idle>)Timeout reached while waiting for askpass"
            r"|(?P<early>)Try again later"
        ),
    ),
    Dialect(
        name="systemd",
        command=SYSTEMD_COMMAND,
        ending=b"\n",
        events=re.compile(
            r"(?m)^waker: (?:asks (?P<asks>[ -~\ufffd]+)|(?P<open>)settled"
            r"|opened (?P<opened>[ -~\ufffd]+)|rejected (?P<rejected>[ -~\ufffd]+)"
            r"|(?P<idle>)idle|(?P<dead>)dead|(?P<foreign>)foreign|(?P<booted>)booted)\n"
        ),
        warning=" Beware: the next wrong one may be the last. Unless crypttab has"
        " tries=0, systemd then gives up on the disk until the machine is restarted.",
    ),
)


class Machine(NamedTuple):
    """The machine to wake: where it is, and how its initrd is known and unlocked."""

    host: str
    dialect: Dialect
    initrd_port: int
    system_port: int
    user: str
    key: Path
    host_keys: tuple[HostKey, ...]

    def settings(self) -> dict[str, str]:
        """Write what `read_machine` reads."""
        return {
            "WAKER_HOMELAB_HOST": self.host,
            "WAKER_INITRD": self.dialect.name,
            "WAKER_INITRD_SSH_PORT": str(self.initrd_port),
            "WAKER_SYSTEM_SSH_PORT": str(self.system_port),
            "WAKER_SSH_USER": self.user,
            "WAKER_SSH_KEY": str(self.key),
            "WAKER_SSH_HOST_KEY": ",".join(map(str, self.host_keys)),
        }


class Config(NamedTuple):
    """The settings in their order, and figures that only tests change."""

    machine: Machine
    mac: Mac
    broadcast: IPv4Address
    name: str
    pin: Pin
    listen: Listen
    tls_cert: Path | None
    tls_key: Path | None
    proxies: tuple[Network, ...]  # whose X-Forwarded-For is believed
    packet_port: int = 9  # UDP; fixed by the interface
    unlock_seconds: int = UNLOCK_SECONDS
    packet_seconds: float = 10  # between packets, where a start finds no sign of life
    start_seconds: float = 600  # for the initrd to come up, and then for the system


# ---- Configuration -------------------------------------------------------------------
# One table drives the parsing and --help. All mistakes are told together, each with
# what would be right. Values are not repeated: one may be a secret in the wrong place.
# An unknown WAKER_ name is a mistake: a typo must not weaken anything silently.

ENV_FILE: Final = "/etc/waker/waker.env"
LIMITED_BROADCAST: Final = IPv4Address("255.255.255.255")


class ConfigError(Exception):
    """What is wrong with the configuration: a line per mistake."""


def matching(pattern: str, text: str) -> str:
    """Take a text that matches the pattern as a whole. Raises: ValueError."""
    if not re.fullmatch(pattern, text, re.ASCII):
        raise ValueError
    return text


def parse_host(text: str) -> str:
    """Read the machine's address. A name is looked up once, to tell its address."""
    try:
        return plain_address(text)
    except ValueError:
        matching(r"\w[\w.-]{0,252}", text)
    # Bytes avoid the idna codec, which OpenWrt packages separately.
    rows = socket.getaddrinfo(text.encode(), None, type=socket.SOCK_STREAM)
    raise ConfigError(
        f"WAKER_HOMELAB_HOST must be an IP address: {text} is {rows[0][4][0]} now;"
        " write that, and reserve it in your router's DHCP"
    )


def parse_port(text: str) -> int:
    """Read a TCP port."""
    if int(matching("[1-9][0-9]{0,4}", text)) > 65535:
        raise ValueError
    return int(text)


def parse_path(text: str) -> Path | None:
    """Read a path; None where there is no text."""
    return Path(matching(r"[^\x00-\x1f]+", text)) if text else None


def parse_dialect(text: str) -> Dialect:
    """Find the row of DIALECTS."""
    return DIALECTS[[dialect.name for dialect in DIALECTS].index(text)]


def parse_networks(text: str) -> tuple[Network, ...]:
    """Read addresses and networks, separated by commas; none where there is no text."""
    return tuple(map(ipaddress.ip_network, text.split(","))) if text else ()


class Setting(NamedTuple):
    """A setting: an environment variable, or a line of FILE. Empty means not set."""

    name: str
    default: str
    parse: Callable[[str], object]  # raises ValueError or OSError
    right: str  # what it must be


USER: Final = functools.partial(matching, "[!-~]{1,64}")
TITLE: Final = functools.partial(matching, "[^\x00-\x1f\x7f-\x9f]{0,64}")
SETTINGS: Final = (  # the fields of Machine, then those of Config but for its figures
    Setting("WAKER_HOMELAB_HOST", "", parse_host, "an IP address such as 192.168.1.20"),
    Setting("WAKER_INITRD", "cryptroot", parse_dialect, "cryptroot or systemd"),
    Setting("WAKER_INITRD_SSH_PORT", "2222", parse_port, "a port, 1 to 65535"),
    Setting("WAKER_SYSTEM_SSH_PORT", "22", parse_port, "a port, 1 to 65535"),
    Setting("WAKER_SSH_USER", "root", USER, "a user's name"),
    Setting("WAKER_SSH_KEY", "ssh_key", parse_path, "the path of our private key"),
    Setting(
        "WAKER_SSH_HOST_KEY",
        "",
        HostKey.parse_all,
        "a line such as ssh-ed25519 AAAA...",
    ),
    Setting(
        "WAKER_HOMELAB_MAC", "", Mac.parse, "a MAC address such as 52:54:00:12:34:56"
    ),
    Setting(
        "WAKER_HOMELAB_BROADCAST", "255.255.255.255", IPv4Address, "an IPv4 address"
    ),
    Setting("WAKER_HOMELAB_NAME", "", TITLE, "a name of at most 64 characters"),
    Setting("WAKER_PIN", "", Pin, "8 to 128 characters"),
    Setting(
        "WAKER_LISTEN", "[::]:8080", Listen.parse, "address and port: 127.0.0.1:8080"
    ),
    Setting("WAKER_TLS_CERT", "", parse_path, "the path of a certificate"),
    Setting("WAKER_TLS_KEY", "", parse_path, "the path of its private key"),
    Setting(
        "WAKER_TRUSTED_PROXY", "", parse_networks, "addresses or networks: 10.0.0.0/8"
    ),
)


def file_fault(path: Path, *, private: bool = False) -> str:
    """Tell why a file is of no use, and what helps; empty if it is fine."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            return f"{path} is not a file; correct the path"
        path.open("rb").close()
    except FileNotFoundError:
        return f"{path} is missing or empty"
    except OSError as error:
        return f"{path}: {error.strerror}; by hand, use sudo"
    if about.st_size < 2:  # our unit hands over a line end for no file
        copied = f"systemd copies it from /etc/waker/{path.name}"
        return f"{path} is missing or empty ({copied})"
    if private and about.st_mode & 0o007:  # its group may: systemd's copies have one
        return f"{path} is open to others; chmod 600 {path}"
    return ""


def read_env_file(path: Path) -> dict[str, str]:
    """Read its lines WAKER_NAME=value. Raises: ConfigError, which quotes no line."""
    if fault := file_fault(path):
        raise ConfigError(fault)
    try:
        text = path.read_text("utf-8-sig")  # some editors begin with a mark
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{path} must be readable, and UTF-8") from None
    values: dict[str, str] = {}
    faults = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        found = re.fullmatch(r"(\w+)=\s*(?:\"(.*)\"|'(.*)'|([^'\"].*)?)", line)
        where = f"{path}, line {number}"
        if not line or line.startswith("#"):
            continue
        if not found:
            faults.append(f"{where} must be NAME=value")
        elif not found[1].startswith("WAKER_"):
            continue  # it is none of ours
        elif found[1] in values:
            faults.append(f"{where} sets {found[1]} again; delete one of the two lines")
        elif found[4] and re.search(r"\s#", line):
            faults.append(f"{where} has a # in it; move the comment or quote the value")
        else:
            values[found[1]] = found[2] or found[3] or found[4] or ""
    if faults:
        raise ConfigError("\n".join(faults))
    return values


def find_conflicts(parsed: Mapping[str, object]) -> Iterator[str]:
    """Tell what is wrong with settings that are right one by one."""
    get = parsed.get
    port = get("WAKER_INITRD_SSH_PORT")
    one_port = port and port == get("WAKER_SYSTEM_SSH_PORT")
    if one_port and get("WAKER_INITRD") == parse_dialect("systemd"):
        yield "WAKER_INITRD_SSH_PORT must differ from WAKER_SYSTEM_SSH_PORT for systemd"
    limited = get("WAKER_HOMELAB_BROADCAST") == LIMITED_BROADCAST
    if limited and ":" in str(get("WAKER_HOMELAB_HOST")):
        yield "WAKER_HOMELAB_BROADCAST must be your network's, for a machine with IPv6"
    if (get("WAKER_TLS_CERT") is None) != (get("WAKER_TLS_KEY") is None):
        yield "WAKER_TLS_CERT and WAKER_TLS_KEY must both be set"
    for name, path in parsed.items():
        unused = name == "WAKER_SSH_KEY" and get("WAKER_SSH_HOST_KEY") == ()
        if isinstance(path, Path) and not unused:
            fault = file_fault(path, private=name.endswith("KEY"))
            if fault:
                yield f"{name} {fault}"


def parse_settings(count: int, values: Mapping[str, str], folder: Path) -> list[object]:
    """Parse the first settings; paths begin at `folder`. Raises: ConfigError."""
    known = [setting.name for setting in SETTINGS]
    faults = []
    for name in sorted(values.keys() - set(known)):
        import difflib

        near = difflib.get_close_matches(name, known, 1, 0)[0]
        faults.append(f"{name} is not a setting; the nearest one is {near}")
    parsed: dict[str, object] = {}
    for name, default, parse, right in SETTINGS[:count]:
        text = values.get(name) or default
        try:
            value = parse(text)
            parsed[name] = folder / value if isinstance(value, Path) else value
        except (ValueError, OSError):
            faults.append(f"{name}{'' if text else ' is not set; it'} must be {right}")
        except ConfigError as error:
            faults.append(str(error))
    faults += find_conflicts(parsed)
    if faults:
        raise ConfigError("\n".join(faults))
    return list(parsed.values())


def read_machine(values: Mapping[str, str], folder: Path) -> Machine:
    """Read what an unlock needs. Raises: ConfigError."""
    return Machine._make(parse_settings(len(Machine._fields), values, folder))


def read_config(values: Mapping[str, str], folder: Path) -> Config:
    """Read everything. Raises: ConfigError."""
    parsed, count = parse_settings(len(SETTINGS), values, folder), len(Machine._fields)
    machine, figures = Machine._make(parsed[:count]), Config._field_defaults.values()
    config = Config._make([machine, *parsed[count:], *figures])
    return config._replace(name=config.name or machine.host)


# ---- Answers -------------------------------------------------------------------------
# A handler returns a Response or raises a Fault; only `refuse` writes the error.

BODY: Final = 16384  # bytes: a PIN or a passphrase, with much room
BRACKETS: Final = 600  # in a body: a passphrase may have 512; 16,000 nested ones would
# overflow the stack of a thread in the json of Python 3.13


class Request(NamedTuple):
    """What a handler sees of a request."""

    method: str
    path: str
    client: str  # its address
    now: float  # monotonic seconds
    content_type: str = ""
    token: str = ""
    body: bytes | None = b""  # None: longer than BODY, and not read

    def __repr__(self) -> str:
        return f"Request({self.method} {self.path} of {self.client})"


class Response(NamedTuple):
    """What goes back, apart from the header fields that all have."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Response({self.status}, …)"  # a token may be in it


class Fault(Exception):
    """An error for the client: HTTP status, text, and header fields that go with it."""

    def __init__(self, status: int, text: str, *headers: tuple[str, str]) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


def reply(members: Mapping[str, object]) -> Response:
    """Answer with a JSON object."""
    return Response(HTTPStatus.OK, json.dumps(members).encode())


def text_member(request: Request, name: str) -> str:
    """Take the only member of a JSON body, a text. Raises: Fault 400, 413, 415."""
    if not re.fullmatch(r"(?i)application/json[ \t]*(;.*)?", request.content_type):
        raise Fault(415, "Content-Type must be application/json")
    if request.body is None:
        raise Fault(413, f"The body must have at most {BODY} bytes")
    try:
        if request.body.count(b"[") + request.body.count(b"{") > BRACKETS:
            raise ValueError
        # As a tuple of pairs, an object shows a name twice, and differs from an array.
        body = json.loads(request.body.decode(), object_pairs_hook=tuple)
        text = body[0][1]
        if body != ((name, text),) or not isinstance(text, str) or not text.encode():
            raise ValueError
    except (ValueError, TypeError, LookupError, RecursionError):
        raise Fault(400, f'The body must be {{"{name}": "<some text>"}}') from None
    return text


# ---- Tokens and limits ---------------------------------------------------------------
# Bounded in memory whatever happens, and without a clock of their own.

TOKEN_SECONDS: Final = 900  # fixed by the interface
TOKENS: Final = 64  # alive at a time: a household, its scripts, and room
ATTEMPTS: Final = 10  # a client's, a minute; fixed by the interface
ATTEMPT_SECONDS: Final = 60
CLIENTS: Final = 4096  # whose attempts are remembered: half a megabyte


class Tokens:
    """The bearer tokens that are alive, each by its digest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[bytes, float] = {}  # the oldest first

    def issue(self, now: float) -> str:
        """Make a token; where there are too many, the oldest one ends."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            while len(self._ends) >= TOKENS:
                del self._ends[next(iter(self._ends))]
            self._ends[sha256(token.encode())] = now + TOKEN_SECONDS
        return token

    def valid(self, token: str, now: float) -> bool:
        """Tell whether a token is alive."""
        with self._lock:
            return now < self._ends.get(sha256(token.encode()), now)


def counted_as(client: str) -> str:
    """Tell as whom an address counts: IPv4 whole, IPv6 by its /56, a household's."""
    if "." in client:
        return client
    return f"{int(ipaddress.IPv6Address(client)) >> 72:x}::/56"


class Attempts:
    """Counts who tries the PIN; a limit on all together would lock the owner out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: OrderedDict[str, deque[float]] = OrderedDict()  # by last attempt

    def count(self, client: str, now: float) -> None:
        """Count an attempt. Raises: Fault 429, which tells when to come again."""
        name = counted_as(client)
        with self._lock:
            times = self._times.setdefault(name, deque(maxlen=ATTEMPTS))
            self._times.move_to_end(name)
            if len(self._times) > CLIENTS:
                self._times.popitem(last=False)
            if len(times) < ATTEMPTS or times[0] + ATTEMPT_SECONDS <= now:
                times.append(now)
                return
            wait = str(math.ceil(times[0] + ATTEMPT_SECONDS - now))
        text = f"Too many attempts; try again in {wait} s"
        raise Fault(429, text, ("Retry-After", wait))


# ---- Waking --------------------------------------------------------------------------
# One magic packet, by the interface that leads to the machine.


def magic_packet(mac: Mac) -> bytes:
    """Build the 102 bytes. Source: AMD publication 20213, Magic Packet Technology."""
    return b"\xff" * 6 + mac.octets * 16


def find_source(config: Config, *, on_link: bool = False) -> str:
    """Tell from which of our addresses the magic packet leaves. Raises: OSError."""
    limited = config.broadcast == LIMITED_BROADCAST  # it would take the default route
    toward = config.machine.host if limited else str(config.broadcast)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_DONTROUTE, on_link)  # no router
        udp.connect((toward, config.packet_port))
        return str(udp.getsockname()[0])


def wake(config: Config) -> str:
    """Send the magic packet, and return words that tell so. Raises: Fault 500."""
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
    return f"Magic packet sent to {config.mac} from {source}"


# ---- Watching ------------------------------------------------------------------------
# What is seen of the machine within a second, by connecting to its two ports. What was
# not seen, because of a failure of our own, is not said.

KNOCK_SECONDS: Final = 0.8  # for a port to answer: a LAN takes milliseconds
REUSE_SECONDS: Final = 1.0  # OpenSSH from 9.8 on shuts out who connects twice a second


class Port(enum.Enum):
    """What a TCP port did, in words for people."""

    OPEN = "is open"
    CLOSED = "refuses connections"  # so the machine is there
    SILENT = "does not answer"
    UNSEEN = "could not be looked at"


class Sight(NamedTuple):
    """What the machine's two ports did."""

    initrd: Port
    system: Port

    def state(self) -> str:
        """Tell in one word what the machine is doing."""
        if self.system is Port.OPEN:
            return "up"
        if Port.UNSEEN in self:
            return "unknown"
        if self.initrd is Port.OPEN:
            return "locked"
        return "booting" if Port.CLOSED in self else "off"

    def members(self) -> dict[str, object]:
        """Write it as the status has it."""
        return {
            "state": self.state(),
            "reachable": Port.OPEN in self or Port.CLOSED in self,
            "initrd_ssh_open": self.initrd is Port.OPEN,
            "system_ssh_open": self.system is Port.OPEN,
        }


def open_tcp(host: str, port: int, seconds: float) -> socket.socket:
    """Connect, each step within `seconds`. Raises: OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as closing:
        tcp = closing.enter_context(socket.socket(family, socket.SOCK_STREAM))
        tcp.settimeout(seconds)
        tcp.connect((host, port))
        closing.pop_all()
    return tcp


def knock(host: str, port: int, *, read_ident: bool = False) -> tuple[Port, str]:
    """Tell what a port does and, if wanted, the line it says, within KNOCK_SECONDS."""
    deadline = time.monotonic() + KNOCK_SECONDS
    try:
        tcp = open_tcp(host, port, KNOCK_SECONDS)
    except (ConnectionRefusedError, ConnectionResetError):
        return Port.CLOSED, ""
    except OSError as error:  # EHOSTUNREACH: no answer to ARP; others: our failure
        silent = isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH
        return (Port.SILENT if silent else Port.UNSEEN), ""
    ident = b""
    with tcp, contextlib.suppress(OSError):  # it is late, or gone; the port was open
        while read_ident and b"\n" not in ident and len(ident) < 255:
            tcp.settimeout(max(deadline - time.monotonic(), 0.001))
            ident += tcp.recv(255) or b"\n"
    return Port.OPEN, ident.partition(b"\n")[0].decode("latin-1").strip()


def look(machine: Machine) -> Sight:
    """Connect to both ports at once; if they are one, dropbear means the initrd."""
    if machine.initrd_port == machine.system_port:
        port, ident = knock(machine.host, machine.system_port, read_ident=True)
        if port is not Port.OPEN:
            return Sight(port, port)
        if not ident:
            return Sight(Port.UNSEEN, Port.UNSEEN)
        in_initrd = "dropbear" in ident
        return Sight(*((port, Port.CLOSED) if in_initrd else (Port.CLOSED, port)))
    seen = {machine.initrd_port: Port.UNSEEN, machine.system_port: Port.UNSEEN}

    def knock_at(port: int) -> None:
        """Note what a port does."""
        seen[port], _ = knock(machine.host, port)

    other = threading.Thread(target=knock_at, args=(machine.system_port,))
    with contextlib.suppress(RuntimeError):  # there is no thread: nothing is seen
        other.start()
        knock_at(machine.initrd_port)
        other.join()
    return Sight(*seen.values())


class Watcher:
    """Takes one look at a time, and shares it with all who ask within a second."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = threading.Lock()
        self._began = -math.inf  # the last look; monotonic seconds
        self._sight = Sight(Port.UNSEEN, Port.UNSEEN)

    def look(self, now: float) -> Sight:
        """Tell what is seen, at most a second old."""
        with self._lock:
            if now >= self._began + REUSE_SECONDS:
                self._sight = look(self._machine)
                self._began = now
            return self._sight


# ---- Unlocking: outcomes -------------------------------------------------------------
# `waker.py unlock`: one passphrase, one machine, then the process ends, and with it all
# memory and threads that knew the passphrase. Nothing that the machine writes is told
# but a disk's name: it might repeat the passphrase. What is `not_asked` may be retried.

NO_PARAMIKO: Final = (
    "paramiko is missing or incomplete: Debian has it in python3-paramiko, OpenWrt in"
    " python3-paramiko and python3-six"
)
NO_PIN: Final = (
    "no host key is pinned, so anybody might get the passphrase. While the initrd"
    " waits, `waker check` prints the line for WAKER_SSH_HOST_KEY"
)


class Outcome(enum.Enum):
    """What an unlock came to: for programs, and for people, where {} is a detail."""

    UNLOCKED = "unlocked", "Unlocked: {}"
    SEEN_UP = "unlocked", "{}; then the system's SSH answered"
    SETTLED = "unlocked", "no disk asks any more, though no verdict on disk {} came"
    OPEN = "already_open", "nothing asks for a passphrase: every disk is open already"
    BOOTED = "up", "nothing asks for a passphrase: the system is up already"
    WAITS = "not_confirmed", "{}; the initrd still waits: probably it was a wrong one"
    GONE = "not_confirmed", "{}; the machine may be booting, or have lost its power"
    UNTOLD = "not_confirmed", "not confirmed: {}"
    REJECTED = "wrong_passphrase", "Wrong passphrase for disk {}"
    DEAD = "gave_up", "the initrd has given up on a disk; restart the machine"
    HOST_KEY = "host_key_differs", "the host key differs: {}"
    KEY = "key_refused", "the initrd refused our key {}"
    UNREACHED = "not_asked", "port {}"
    BROKEN = "not_asked", "the connection broke off in the {}"
    FROZEN = "not_asked", "the SSH server fell silent in the {}"
    EARLY = "not_asked", "the initrd is not that far yet; try again in a few seconds"
    IDLE = "not_asked", "nothing asks for a passphrase: not so far yet, or open already"
    LOST = "not_asked", "the connection was lost before a disk asked for its passphrase"
    SILENT = "not_asked", "logged in, but no disk asked for its passphrase in time"
    ENDED = "not_asked", "the unlock command ended without asking; try again"
    KEY_FILE = "error", "our key {}"
    MISSING = "error", "logged in, but there is no command to unlock with"
    REFUSED = "error", "logged in, but the server refuses to run the unlock command"
    FOREIGN = "error", "something asks for a secret that is not of a disk"
    ERROR = "error", "{}"


class Result(NamedTuple):
    """What is told of an unlock; the outcome is the word for programs."""

    outcome: str
    sent: bool  # the passphrase has left us, or may have
    message: str

    @classmethod
    def of(cls, outcome: Outcome, detail: str = "", *, sent: bool) -> "Result":
        """Put it in words, which tell whether the passphrase was sent, if in doubt."""
        word, sentence = outcome.value
        message = f"{sentence.format(detail)}."
        if outcome not in (Outcome.UNLOCKED, Outcome.SEEN_UP, Outcome.REJECTED):
            message += f" The passphrase was {'' if sent else 'not '}sent."
        return cls(word, sent, message)


class NotSent(Exception):
    """Why the unlock ends before the passphrase was sent."""

    def __init__(self, outcome: Outcome, detail: str = "") -> None:
        super().__init__(outcome.value[1].format(detail))
        self.result = Result.of(outcome, detail, sent=False)


# ---- Unlocking: the connection -------------------------------------------------------
# From a TCP connection to a login; on the way the host key has to be a pinned one. Only
# this section and `check` import paramiko.

CONNECT_SECONDS: Final = 5  # a LAN takes milliseconds
LOST_SECONDS: Final = 10  # without a sign of life from the machine's kernel: it is gone
HANDSHAKE_SECONDS: Final = 10  # key exchange, and login: slow boxes take one or two
PEER_ERRORS: Final = Exception  # of any kind: paramiko raises what its thread died of


def dial(machine: Machine) -> socket.socket:
    """Connect to the initrd's port, and see that SSH is there. Raises: NotSent."""
    try:
        tcp = open_tcp(machine.host, machine.initrd_port, CONNECT_SECONDS)
        ident = tcp.recv(255, socket.MSG_PEEK)
        if ident and b"SSH-".startswith(ident[:4]):
            return tcp
        reason = "does not speak SSH to us"
    except ConnectionRefusedError:
        reason = "refuses connections: the initrd's SSH is not there"
    except TimeoutError:
        reason = f"did not answer within {CONNECT_SECONDS} s"
    except OSError as error:
        reason = f"cannot be reached: {error.strerror}"
    where = f"{machine.initrd_port} of {machine.host}"
    raise NotSent(Outcome.UNREACHED, f"{where} {reason}")


def begin(machine: Machine) -> "paramiko.Transport":
    """Connect, and offer nothing with SHA-1, MD5 or CBC. Raises: NotSent."""
    try:
        import paramiko

        paramiko.util.get_logger("paramiko").setLevel("CRITICAL")  # it logs tracebacks
    except (ImportError, AttributeError):  # a new cryptography lacks something
        raise NotSent(Outcome.ERROR, NO_PARAMIKO) from None
    tcp = dial(machine)
    for level, name, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),  # small packets would wait
        # The rest notices a machine that has lost its power.
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_SECONDS // 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000),
    ):
        tcp.setsockopt(level, name, value)
    transport = paramiko.Transport(tcp)
    transport.auth_timeout = HANDSHAKE_SECONDS
    options = transport.get_security_options()
    options.kex = [name for name in options.kex if "sha1" not in name]
    options.digests = [name for name in options.digests if "sha2" in name]
    options.ciphers = [name for name in options.ciphers if re.search("ctr|gcm", name)]
    # The pinned types come first, so that a server with several host keys shows the one
    # we know. The others stay: another machine is told by its fingerprint, and not as a
    # failed handshake. An RSA key signs with rsa-sha2-512 or rsa-sha2-256.
    pinned = tuple(key.kind.replace("ssh-rsa", "rsa-sha2") for key in machine.host_keys)
    strong = [name for name in options.key_types if name not in ("ssh-rsa", "ssh-dss")]
    options.key_types = sorted(strong, key=lambda name: not name.startswith(pinned))
    return transport


def exchange_keys(transport: "paramiko.Transport", machine: Machine) -> HostKey:
    """Take the host key that the server proved to have. Raises: NotSent."""
    import paramiko

    try:
        transport.start_client(timeout=HANDSHAKE_SECONDS)
    except paramiko.ssh_exception.IncompatiblePeer:
        reason = "the SSH server has no algorithm in common with paramiko (tinyssh, for"
        reason += " one, has only a cipher that paramiko lacks)"
        raise NotSent(Outcome.ERROR, reason) from None
    except PEER_ERRORS:
        detail = "key exchange"
        if machine.host_keys:
            detail += "; dropbear does that, too, if it has no host key of the pinned"
            detail += f" type {' or '.join(key.kind for key in machine.host_keys)}"
        raise NotSent(Outcome.BROKEN, detail) from None
    if not transport.initial_kex_done:  # then start_client only got tired of waiting
        raise NotSent(Outcome.FROZEN, "key exchange")
    key = transport.get_remote_server_key()
    return HostKey(key.get_name(), key.asbytes())


def verify(transport: "paramiko.Transport", machine: Machine) -> None:
    """Exchange keys, and see that the host key is a pinned one. Raises: NotSent."""
    seen = exchange_keys(transport, machine)
    if seen not in machine.host_keys:
        pins = " or ".join(fingerprint(key.blob) for key in machine.host_keys)
        detail = f"pinned {pins}, seen {fingerprint(seen.blob)}. The system that is up"
        detail += " already would show another key, and so would an impostor"
        raise NotSent(Outcome.HOST_KEY, detail)


def load_key(path: Path) -> "paramiko.PKey":
    """Load our private key, of whichever type it is. Raises: NotSent."""
    import paramiko

    if fault := file_fault(path, private=True):
        raise NotSent(Outcome.KEY_FILE, fault)
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            return kind.from_private_key_file(str(path))
        except paramiko.PasswordRequiredException:
            raise NotSent(Outcome.KEY_FILE, f"{path} must not be encrypted") from None
        except PEER_ERRORS:
            continue  # it is of another type, or damaged
    fault = f"{path} must be an Ed25519, ECDSA or RSA private key"
    raise NotSent(Outcome.KEY_FILE, fault)


def log_in(transport: "paramiko.Transport", machine: Machine) -> None:
    """Authenticate with our key, and no other one is tried. Raises: NotSent."""
    key = load_key(machine.key)
    try:
        transport.auth_publickey(machine.user, key)
    except PEER_ERRORS as error:
        if not transport.is_active():
            raise NotSent(Outcome.BROKEN, "login") from None
        if "timeout" in str(error):
            raise NotSent(Outcome.FROZEN, "login") from None
    if not transport.is_authenticated():
        detail = f"{fingerprint(key.asbytes())} for user {machine.user}: it is not in"
        detail += " its authorized_keys, or the initrd was not rebuilt since"
        raise NotSent(Outcome.KEY, detail)


# ---- Unlocking: the conversation -----------------------------------------------------
# The command is run, and heard as a sequence of events. A disk is answered once, after
# it has asked. If no verdict comes, nothing is asked again: the machine is looked at.

ASK_SECONDS: Final = 60  # for the first disk to ask; an emulated machine took 30
END_SECONDS: Final = 3  # for a command to end that told its verdict: it does at once
NEXT_SECONDS: Final = 15  # for another disk to ask, after one was unlocked
CONFIRM_SECONDS: Final = 45  # for the system to be seen up without a verdict: a boot
PAUSE_SECONDS: Final = 2  # between two looks at it, for OpenSSH's sake
MARGIN_SECONDS: Final = 5  # for the outcome to be told before we are killed
OUTPUT_KEPT: Final = 65536  # characters; no initrd writes so many


class Command:
    """One run of the dialect's command, heard as a sequence of events."""

    def __init__(self, transport: "paramiko.Transport", dialect: Dialect) -> None:
        self.disk = ""  # that was named last, or several disks
        self._dialect = dialect
        self._output = ""
        self._channel = transport.open_session()
        self._channel.set_combine_stderr(True)
        self._channel.exec_command(dialect.command)

    def wait_for_end(self) -> None:
        """Let it end: dropbear sometimes ends a channel that is opened just then."""
        self._channel.status_event.wait(END_SECONDS)

    def hear(self, until: float) -> str:
        """Wait for an event of the dialect, the end of the command, or else silence."""
        while (left := until - time.monotonic()) > 0:
            found = self._dialect.events.search(self._output)
            if found and found.lastgroup:
                self._output = self._output[found.end() :]
                self.disk = found[found.lastgroup] or self.disk
                return found.lastgroup
            self._channel.settimeout(left)
            try:
                data = self._channel.recv(4096)
            except TimeoutError:
                break
            if not data:
                self.wait_for_end()
                endings = {0: "open", 126: "missing", 127: "missing"}
                return endings.get(self._channel.exit_status, "ended")
            self._output = self._output[-OUTPUT_KEPT:] + data.decode("ascii", "replace")
        return "silent"

    def answer(self, passphrase: Passphrase, until: float) -> str:
        """Send the passphrase, exactly; returns the event that follows."""
        try:
            self._channel.sendall(passphrase.data + self._dialect.ending)
            if not self._dialect.ending:
                self._channel.shutdown_write()
            return self.hear(until)
        except PEER_ERRORS:
            return "ended"


def end_of(transport: "paramiko.Transport", event: str, deadline: float) -> str:
    """Tell a connection that ended from a command that did: lost, or silent by us."""
    if event in ("ended", "refused"):
        transport.join(1)  # it may be about to notice the end
        if not transport.is_active():
            return "lost" if time.monotonic() < deadline else "silent"
    return event


def confirm(
    transport: "paramiko.Transport",
    machine: Machine,
    event: str,
    before: Sight,
    deadline: float,
) -> tuple[Outcome, str]:
    """Look what becomes of a machine that gave no verdict on the passphrase."""
    lost = end_of(transport, event, deadline) == "lost"
    why = "the connection was lost" if lost else "there was no verdict"
    why += " after the passphrase was sent"
    transport.close()
    deadline = min(deadline, time.monotonic() + CONFIRM_SECONDS)
    while True:
        sight = look(machine)
        # A port that was silent before proves nothing: it may have been open.
        if before.system is Port.CLOSED and sight.system is Port.OPEN:
            return Outcome.SEEN_UP, why
        if time.monotonic() + PAUSE_SECONDS > deadline:
            outcome = Outcome.WAITS if sight.initrd is Port.OPEN else Outcome.GONE
            return outcome, f"not confirmed: {why}"
        time.sleep(PAUSE_SECONDS)


def converse(
    transport: "paramiko.Transport",
    machine: Machine,
    passphrase: Passphrase,
    tell_sent: Callable[[], None],
    deadline: float,
) -> Result:
    """Answer every disk that asks, once, until none asks any more. Raises: NotSent."""
    told = {"rejected": Outcome.REJECTED, "open": Outcome.SETTLED, "dead": Outcome.DEAD}
    opened: list[str] = []
    until = min(deadline, time.monotonic() + ASK_SECONDS)
    while True:
        try:
            command = Command(transport, machine.dialect)
            event = command.hear(until)
        except PEER_ERRORS:
            event = "refused"
        if event != "asks" or command.disk in opened:
            break
        before = look(machine)
        tell_sent()
        event = command.answer(passphrase, deadline)
        if event != "opened":
            outcome, detail = told.get(event), command.disk
            if not outcome:
                outcome, detail = confirm(transport, machine, event, before, deadline)
            detail += f"; it did unlock {', '.join(opened)}" if opened else ""
            result = Result.of(outcome, detail, sent=True)
            warning = machine.dialect.warning if event == "rejected" else ""
            return result._replace(message=result.message + warning)
        opened.append(command.disk)
        command.wait_for_end()
        until = min(deadline, time.monotonic() + NEXT_SECONDS)
    if opened:
        return Result.of(Outcome.UNLOCKED, ", ".join(opened), sent=True)
    event = end_of(transport, event, deadline)
    strange = event in ("opened", "rejected", "working")
    raise NotSent(Outcome.ENDED if strange else Outcome[event.upper()])


def unlock(
    machine: Machine,
    passphrase: Passphrase,
    tell_sent: Callable[[], None],
    deadline: float,
) -> Result:
    """Unlock the machine's disks, or tell truthfully why not."""
    try:
        if not machine.host_keys:
            raise NotSent(Outcome.ERROR, NO_PIN)
        transport = begin(machine)
        # Some of paramiko's waits know no timeout, but all end with the connection.
        watchdog = threading.Timer(deadline - time.monotonic(), transport.close)
        watchdog.daemon = True
        watchdog.start()
        verify(transport, machine)
        log_in(transport, machine)
        return converse(transport, machine, passphrase, tell_sent, deadline)
    except NotSent as why:
        return why.result


# ---- Unlocking, seen from the daemon -------------------------------------------------
# That process, one at a time. A kill is the one deadline that cannot hang.


class Unlocker:
    """Runs the process, for one who claimed it, and believes only what it told."""

    def __init__(
        self, config: Config, environment: Mapping[str, str], program: Path
    ) -> None:
        command = sys.executable, str(program.resolve()), "unlock"
        self._command = (*command, "--seconds", str(config.unlock_seconds))
        self._seconds = config.unlock_seconds
        others = {n: v for n, v in environment.items() if not n.startswith("WAKER_")}
        self._environment = others | config.machine.settings()  # the PIN is not in it
        self.busy = threading.Lock()  # held by who claimed it
        self.cancelled = threading.Event()  # ends the process, unless that has sent

    def claim(self) -> None:
        """Have it for oneself. Raises: Fault 409 while somebody else has."""
        if not self.busy.acquire(blocking=False):
            raise Fault(409, "Another unlock or start is running; wait for it to end")
        self.cancelled.clear()

    def run(self, passphrase: Passphrase) -> Result:
        """Do one unlock."""
        import subprocess

        try:
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,  # so that ^C ends the daemon, but not an unlock
            )
        except OSError as error:
            reason = f"the unlocking process cannot start: {error.strerror}"
            return Result.of(Outcome.ERROR, reason, sent=False)
        told, ends = b"", time.monotonic() + self._seconds
        stdin = cast("io.BufferedWriter", child.stdin)
        stdout = cast("io.BufferedReader", child.stdout)
        with child:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                stdin.write(b"" if self.cancelled.is_set() else passphrase.data)
                stdin.close()
            while True:  # it looks for a cancel ten times a second
                if select.select([stdout], [], [], 0.1)[0]:
                    told += (chunk := os.read(stdout.fileno(), 4096))
                    if not chunk:
                        break
                # Before it sends, it tells that: who has told nothing may be killed.
                elif time.monotonic() > ends or (self.cancelled.is_set() and not told):
                    child.kill()
        lines = [json.loads(line) for line in told.splitlines()]
        if lines and "outcome" in lines[-1]:
            return Result(**lines[-1])
        reason = f"the unlocking process ended with status {child.returncode}"
        outcome = Outcome.UNTOLD if lines else Outcome.ERROR
        return Result.of(outcome, reason, sent=bool(lines))


# ---- Log -----------------------------------------------------------------------------
# A line per event that matters, on standard error; fail2ban can read it. No line has a
# PIN, a passphrase, a token, or text of an error that might quote one.

LINE: Final = 1000  # characters; a pipe that has any room takes that many at once
LOG: Final = logging.getLogger("waker")


def printable(text: str) -> str:
    """Escape all but printable ASCII."""
    return re.sub("[^ -~]", lambda odd: ascii(odd[0])[1:-1], text)


class LogHandler(logging.Handler):
    """Writes each event as one line of printable ASCII to standard error.

    A line that would have to wait is dropped, or a log that nobody reads would stop us.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line."""
        line = printable(record.getMessage())[:LINE] + "\n"
        with contextlib.suppress(OSError):  # nor must a log that is broken
            if select.select([], [2], [], 0)[1]:
                os.write(2, line.encode())


def describe_bug(error: BaseException) -> str:
    """Tell the kind and the place, not the text: there might be a secret in it."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = Path(frame.f_code.co_filename).name
    return f"bug: {type(error).__name__} in line {line} of {file}"


# ---- Starting ------------------------------------------------------------------------
# Wake, wait, unlock and watch: what a phone asks for with one tap, and may sleep over.
# The passphrase is kept until it is handed over or not wanted any more, and no longer.

GLANCE_SECONDS: Final = 1  # between two looks at the machine
RETRY_SECONDS: Final = 5  # between two unlocks, where nothing asked so far
EARLY_SECONDS: Final = 120  # for which that is not given up
CANCEL_SECONDS: Final = 2  # for a start to end: a look takes most of a second
KEPT_SECONDS: Final = 3600  # for which is told how the last start ended
AWAITED: Final = ("unlocked", "already_open", "not_confirmed")  # so the system may boot


class Start(NamedTuple):
    """How far a start is, or how it ended."""

    phase: str  # waking, unlocking, booting; in the end done, failed or cancelled
    outcome: str | None  # a word for programs, once something is known
    message: str
    began: float  # monotonic seconds, and so is the end
    ended: float = math.inf


class Ended(Exception):
    """How a start ends: phase, outcome and message."""


class Starter:
    """Runs one start at a time; tells how far it is, or how the last one ended."""

    def __init__(self, config: Config, watcher: Watcher, unlocker: Unlocker) -> None:
        self._config = config
        self._watcher = watcher
        self._unlocker = unlocker
        self._lock = threading.Lock()
        self._start = Start("done", None, "", -math.inf, -math.inf)  # long forgotten
        self._thread: threading.Thread | None = None

    def _tell(self, phase: str, outcome: str | None, message: str) -> None:
        """Tell how far it is; the log, only what is new."""
        known = self._start
        self._start = known._replace(phase=phase, outcome=outcome, message=message)
        if known != self._start:
            LOG.info("start: %s: %s", phase, message)

    def _pause(self, seconds: float, result: Result | None = None) -> None:
        """Wait, unless the start is cancelled; what the unlock told by then is kept."""
        if self._unlocker.cancelled.wait(seconds):
            word = result.outcome if result else "cancelled"
            sent = result and result.sent
            text = f"Cancelled. The passphrase was {'' if sent else 'not '}sent."
            raise Ended("cancelled", word, text)

    def _wake(self, deadline: float) -> None:
        """Wait for the initrd's SSH; while the machine is silent, wake it."""
        why = "did not wake: is it plugged in, and Wake-on-LAN switched on?"
        packet_due, unsent = -math.inf, "The passphrase was not sent."
        while True:
            now = time.monotonic()
            sight = self._watcher.look(now)
            self._pause(0)
            if sight.system is Port.OPEN:
                raise Ended("done", "up", f"The system is up already. {unsent}")
            if sight.initrd is Port.OPEN:
                return
            awake = Port.CLOSED in sight  # if only by refusing a connection
            if awake:
                message = "The machine is awake; its initrd is not ready"
                why = "was awake, but the SSH of its initrd is not open."
            if now > deadline:
                raise Ended("failed", "not_awake", f"The machine {why} {unsent}")
            if now >= packet_due and not awake:
                try:
                    message = wake(self._config)
                except Fault as fault:
                    if packet_due < 0:  # later, a waking machine may break its link
                        raise Ended("failed", "error", f"{fault}. {unsent}") from None
                    message = f"{fault}; trying again"
                packet_due = now + self._config.packet_seconds
            self._tell("waking", None, message)
            self._pause(GLANCE_SECONDS)

    def _go(self, given: list[Passphrase]) -> None:
        """Do it all. Raises: Ended, in any case."""
        passphrase = given.pop()  # or the thread would keep it, in its arguments
        deadline = time.monotonic() + self._config.start_seconds
        message, patience = "The SSH of the initrd is open", math.inf
        while True:
            self._wake(deadline)
            self._tell("unlocking", None, message)
            result = self._unlocker.run(passphrase)
            now = time.monotonic()
            patience = min(patience, now + EARLY_SECONDS)
            if result.outcome != "not_asked" or now > min(patience, deadline):
                break
            message = result.message
            self._tell("unlocking", None, message)
            self._pause(RETRY_SECONDS)
        del passphrase
        if result.outcome not in AWAITED:
            if not result.sent:  # a cancel may have prevented it
                self._pause(0)
            phase = "done" if result.outcome == "up" else "failed"
            raise Ended(phase, result.outcome, result.message)
        self._tell("booting", result.outcome, result.message)
        deadline = time.monotonic() + self._config.start_seconds
        while time.monotonic() < deadline:
            self._pause(GLANCE_SECONDS, result)
            if self._watcher.look(time.monotonic()).system is Port.OPEN:
                raise Ended("done", "up", f"{result.message} The system is up.")
        text = f"{result.message} The system was not seen up since."
        raise Ended("failed", "not_up", text)

    def _run(self, given: list[Passphrase]) -> None:
        """Do it all, in a thread, and tell how it ended."""
        try:
            self._go(given)
        except Ended as ended:
            end = ended.args
        except Exception as error:  # noqa: BLE001 - nobody else would tell of a bug
            text = f"{describe_bug(error)}. The passphrase may have been sent."
            end = "failed", "error", text
        with self._lock:  # who reads that it has ended may begin the next one
            self._tell(*end)
            self._start = self._start._replace(ended=time.monotonic())
            self._unlocker.busy.release()

    def begin(self, passphrase: Passphrase, now: float) -> None:
        """Start. Raises: Fault 409 while another start or unlock runs; 500; 503."""
        if not self._config.machine.host_keys:
            raise Fault(500, f"Failed to start: {NO_PIN}")
        if not importlib.util.find_spec("paramiko"):  # to import it would cost 20 MB
            raise Fault(500, f"Failed to start: {NO_PARAMIKO}")
        thread = threading.Thread(target=self._run, args=([passphrase],), daemon=True)
        with self._lock:
            self._unlocker.claim()
            known = self._start
            self._start = Start("waking", None, "Looking for the machine", now)
            try:
                thread.start()
            except RuntimeError:
                self._start = known
                self._unlocker.busy.release()
                raise Fault(503, "No room for a thread", ("Retry-After", "5")) from None
            self._thread = thread

    def cancel(self) -> str:
        """End it and tell how; the passphrase is forgotten. Raises: Fault 409."""
        with self._lock:
            if not self._thread or self._start.ended < math.inf:
                raise Fault(409, "No start is running")
            self._unlocker.cancelled.set()
            thread = self._thread
        thread.join(CANCEL_SECONDS)
        if thread.is_alive():
            return "Cancelling; the status will tell whether the passphrase was sent"
        return self._start.message

    def stop(self) -> None:
        """Cancel a start, if there is one; an unlock that has sent may finish."""
        with contextlib.suppress(Fault):
            self.cancel()
        if self._thread:
            self._thread.join()

    def members(self, now: float) -> dict[str, object] | None:
        """Tell it as the status has it; None if there was no start of late."""
        start = self._start
        if start.ended + KEPT_SECONDS < now:
            return None
        seconds = max(int(min(now, start.ended) - start.began), 0)
        about = {"phase": start.phase, "outcome": start.outcome}
        return {**about, "message": start.message, "seconds": seconds}


# ---- Handlers ------------------------------------------------------------------------
# A handler knows nothing of sockets; the routes below decide who may call it.


class App(NamedTuple):
    """All that lives as long as the daemon."""

    config: Config
    page: Response
    icon: Response
    attempts: Attempts
    tokens: Tokens
    watcher: Watcher
    unlocker: Unlocker
    starter: Starter


def post_auth(app: App, request: Request) -> Response:
    """Exchange the PIN for a token. Every call counts as an attempt."""
    app.attempts.count(request.client, request.now)
    if not app.config.pin.matches(text_member(request, "pin")):
        raise Fault(401, "Wrong PIN", ("WWW-Authenticate", "Bearer"))
    LOG.info("ip=%s PIN accepted", request.client)
    return reply({"token": app.tokens.issue(request.now), "expires_in": TOKEN_SECONDS})


def get_status(app: App, request: Request) -> Response:
    """Tell what is seen of the machine."""
    sight = app.watcher.look(request.now)
    start = app.starter.members(request.now)
    return reply({"name": app.config.name, **sight.members(), "start": start})


def post_wol(app: App, request: Request) -> Response:
    """Send the magic packet."""
    message = wake(app.config)
    LOG.info("ip=%s %s", request.client, message)
    return reply({"success": True, "message": message})


def take_passphrase(request: Request) -> Passphrase:
    """Take the passphrase out of a body. Raises: Fault 400, 413, 415."""
    try:
        return Passphrase(text_member(request, "passphrase"))
    except ValueError:
        text = "The passphrase must have 1 to 512 bytes and no control character"
        raise Fault(400, text) from None


def post_unlock(app: App, request: Request) -> Response:
    """Hand the passphrase to the machine."""
    passphrase = take_passphrase(request)
    app.unlocker.claim()
    try:
        result = app.unlocker.run(passphrase)
    finally:
        app.unlocker.busy.release()
    if result.outcome == "wrong_passphrase":
        raise Fault(400, result.message)
    if result.outcome not in ("unlocked", "already_open", "up"):
        raise Fault(500, f"Failed to unlock: {result.message}")
    LOG.info("ip=%s %s", request.client, result.message)
    return reply({"success": True, "message": result.message})


def post_start(app: App, request: Request) -> Response:
    """Begin to wake and unlock the machine; the status tells how it goes."""
    passphrase = take_passphrase(request)
    LOG.info("ip=%s wants a start", request.client)
    app.starter.begin(passphrase, request.now)
    return reply({"success": True, "message": "Started; the status tells how it goes"})


def delete_start(app: App, request: Request) -> Response:
    """Cancel the start."""
    LOG.info("ip=%s wants the start cancelled", request.client)
    return reply({"success": True, "message": app.starter.cancel()})


# ---- Routes --------------------------------------------------------------------------
# The whole API. First the path (404), then the method (405), then the token (401); the
# handler comes last, and it alone looks at the body.


class Route(NamedTuple):
    """What is asked for, who answers, and whether anybody may ask."""

    method: str
    path: str
    handler: Callable[[App, Request], Response]
    open_to_all: bool = False


ROUTES: Final = (
    Route("GET", "/", lambda app, _: app.page, open_to_all=True),
    Route("GET", "/apple-touch-icon.png", lambda app, _: app.icon, open_to_all=True),
    Route("POST", "/api/auth", post_auth, open_to_all=True),
    Route("GET", "/api/status", get_status),
    Route("POST", "/api/wol", post_wol),
    Route("POST", "/api/unlock", post_unlock),
    Route("POST", "/api/start", post_start),
    Route("DELETE", "/api/start", delete_start),
)


def dispatch(app: App, request: Request) -> Response:
    """Find the row and call its handler, if the token allows. Raises: Fault."""
    rows = {row.method: row for row in ROUTES if row.path == request.path}
    if "GET" in rows:
        rows["HEAD"] = rows["GET"]
    if not rows:
        raise Fault(404, "There is nothing at this path")
    if request.method not in rows:
        allowed = ", ".join(sorted(rows))
        raise Fault(405, f"This path takes {allowed} only", ("Allow", allowed))
    row = rows[request.method]
    if not row.open_to_all and not app.tokens.valid(request.token, request.now):
        raise Fault(401, "Invalid or expired token", ("WWW-Authenticate", "Bearer"))
    return row.handler(app, request)


def refuse(app: App, fault: Fault, what: str, client: str) -> Response:
    """Log what is refused and why, and answer with the error."""
    # A trusted proxy is not named: to ban it, as fail2ban might, would ban everybody.
    whose = "" if within(client, app.config.proxies) else f"ip={client} "
    LOG.warning("%srefused %s: %d %s", whose, what, fault.status, fault)
    body = json.dumps({"error": str(fault)}).encode()
    return Response(fault.status, body, headers=fault.headers)


def respond(app: App, received: Request | Fault, peer: str) -> Response:
    """Answer a request, or tell what was wrong with it."""
    if isinstance(received, Fault):
        return refuse(app, received, "a request", peer)
    what = f"{received.method} {received.path}"
    try:
        return dispatch(app, received)
    except Fault as fault:
        return refuse(app, fault, what, received.client)
    except Exception as error:  # noqa: BLE001 - a client gets an answer all the same
        LOG.error("%s", describe_bug(error))
        bug = Fault(500, "Internal error; the log tells where")
        return refuse(app, bug, what, received.client)


# ---- HTTP: what is said --------------------------------------------------------------
# What is not plainly right is refused: a request that can be read in two ways can be
# smuggled past a proxy. Every expression takes linear time. Sources: RFC 9110, 9112.

HEAD: Final = 16384  # bytes: the request line and the header fields
FIELDS: Final = 100
HOPS: Final = 16  # proxies in a row
TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
AUTHORITY: Final = rb"(?:[\w.~-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?"
PATH: Final = rb"/(?:[\w.~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"
QUERY: Final = rb"\?(?:[\w.~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*"
START: Final = re.compile(  # a path, or an absolute URL with or without one
    rb"(%b+) (?:(?i:https?)://%b(?=[/? ])|(?=/))(%b)?(?:%b)? HTTP/1\.([01])\r\n"
    % (TOKEN, AUTHORITY, PATH, QUERY)
)
FIELD: Final = re.compile(rb"(%b+):([\t -~\x80-\xff]*)\r\n" % TOKEN)
ONCE: Final = ("authorization", "content-length", "content-type", "host")


class Head(NamedTuple):
    """A request without its body."""

    method: str
    path: str
    fields: Mapping[str, str]  # by lower-case name
    length: int  # of the body, in bytes
    expects_continue: bool  # the client waits for a word before it sends the body


def read_lines(file: io.BufferedReader) -> Iterator[bytes]:
    """Read the lines of a head up to the empty one. Raises: Fault 431."""
    left = HEAD
    while (line := file.readline(left)) != b"\r\n":
        left -= len(line)
        if not left:
            raise Fault(431, f"The head must have at most {HEAD} bytes")
        yield line


def read_head(file: io.BufferedReader) -> Head:
    """Read a head and judge each line as it comes. Raises: Fault 400, 431, 501."""
    lines = read_lines(file)
    # What begins otherwise may be TLS, which has no lines to wait for.
    start = re.match(TOKEN, file.peek(1)) and START.fullmatch(next(lines))
    if not start:
        raise Fault(400, "The request line must be METHOD TARGET HTTP/1.1")
    fields: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        found = FIELD.fullmatch(line)
        if not found:
            raise Fault(400, "A header field must be NAME: VALUE, and end with CR LF")
        name, value = found[1].decode().lower(), found[2].decode("latin-1").strip(" \t")
        if number > FIELDS:
            raise Fault(431, f"There must be at most {FIELDS} header fields")
        if name in fields and name in ONCE:
            raise Fault(400, "A header field is there twice, and must not be")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    method, path, version = start.groups()
    host = fields.get("host", "" if version == b"1" else "none").encode("latin-1")
    if not re.fullmatch(AUTHORITY, host):
        raise Fault(400, "Host must be a name or an address, and maybe a port")
    if "transfer-encoding" in fields:
        raise Fault(501, "Transfer-Encoding is not supported; send Content-Length")
    length = fields.get("content-length", "0")
    if not re.fullmatch("0|[1-9][0-9]{0,17}", length):
        raise Fault(400, "Content-Length must be one decimal number")
    waits = version == b"1" and fields.get("expect", "").lower() == "100-continue"
    return Head(method.decode(), (path or b"/").decode(), fields, int(length), waits)


def find_client(peer: str, forwarded: str, proxies: Sequence[Network]) -> str:
    """Tell who asks: the last one in X-Forwarded-For who is no proxy that we trust."""
    client, hops = peer, forwarded.rsplit(",", HOPS)
    with contextlib.suppress(ValueError):  # it is no address: we know no more
        while hops and within(client, proxies):
            client = plain_address(hops.pop().strip(" \t"))
    return client


def read_request(
    file: io.BufferedReader, head: Head, peer: str, proxies: Sequence[Network]
) -> Request:
    """Read the body, unless it is too long. Raises: Fault 400 if it ends early."""
    body = file.read(head.length) if head.length <= BODY else None
    if body is not None and len(body) < head.length:
        raise Fault(400, "The request ended before it was complete")
    now = time.monotonic()  # an attempt counts when it is complete
    client = find_client(peer, head.fields.get("x-forwarded-for", ""), proxies)
    scheme, _, token = head.fields.get("authorization", "").partition(" ")
    token = token.strip(" ") if scheme.lower() == "bearer" else ""
    kind = head.fields.get("content-type", "")
    return Request(head.method, head.path, client, now, kind, token, body)


# ---- HTTP: the connections -----------------------------------------------------------
# A thread for each connection, which carries one request. http.server has no limits of
# its own; here they are. Nothing can be held up for long by who is slow, and nobody is
# kept out by those who are many: if there are too many, one of the many goes.

CLIENT_SECONDS: Final = 10  # for a whole request to come; again, to take the answer
DRAIN_SECONDS: Final = 2  # for a client to hang up that has its answer
DRAIN: Final = 1 << 20  # bytes that it may send meanwhile
THREADS: Final = 64  # connections at a time: half a megabyte each at the worst
PER_CLIENT: Final = 24  # of them, if it is no proxy that we trust; a browser opens 6
STACK: Final = 512 << 10  # bytes for each thread; musl's 128 KiB are too few for json
BACKLOG: Final = 4096  # connections that wait for their thread in the kernel
DROP_SECONDS: Final = 0.05  # for a connection to end, which frees what it had
RETURN_SECONDS: Final = 3  # after a drop: who comes back so soon may have to go again


def listen(where: Listen) -> socket.socket:
    """Open the port, for IPv4 too where it is IPv6's `::`. Raises: OSError."""
    host = where.host
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104 - every address is what the user wants
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tcp = socket.create_server(
        (host, where.port), family=family, backlog=BACKLOG, dualstack_ipv6=host == "::"
    )
    # The kernel keeps a client that has said nothing so far: it takes no thread.
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, CLIENT_SECONDS)
    return tcp


def why_not_listening(where: Listen, error: OSError) -> str:
    """Tell why the port cannot be opened, and what helps."""
    remedies = {
        errno.EACCES: "; only root may have a port below 1024: take a higher one",
        errno.EADDRINUSE: "; end the program that has this port, or take another one",
        errno.EADDRNOTAVAIL: "; this box has no such address so far",
    }
    remedy = remedies.get(error.errno or 0, "")
    return f"WAKER_LISTEN {where}: {os.strerror(error.errno or 0)}{remedy}"


class Incoming(io.RawIOBase):
    """A connection; reads by one deadline, because a timeout is for each `recv`."""

    def __init__(self, server: "Server", tcp: socket.socket, name: str) -> None:
        super().__init__()
        self._server, self._tcp = server, tcp
        self._ends = time.monotonic() + CLIENT_SECONDS
        something_came = bool(select.select([tcp], [], [], 0)[0])
        self._may_wait = bool(server.tls) or not something_came
        self.name = name  # by which the connections of a client are counted
        dropped = server.drops.get(name, -math.inf)
        self.returned = time.monotonic() < dropped + RETURN_SECONDS
        self.waits = False  # for the client, so that it may be dropped
        self.answered = self.dropped = False  # dropped: hung up on, about to end

    def mark(self, *, waits: bool, answered: bool = False) -> None:
        """Note its state. Raises: ConnectionAbortedError if it was dropped before."""
        with self._server.lock:
            if self.dropped:
                raise ConnectionAbortedError
            self.waits, self.answered = waits, answered

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what there is. Raises: TimeoutError at the deadline; OSError."""
        if self._may_wait:
            self.mark(waits=True)
        self._may_wait = True
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._tcp.settimeout(left)
        return self._tcp.recv_into(buffer)  # the first one of TLS shakes hands as well


class Handler(BaseHTTPRequestHandler):
    """One connection: reads one request, answers it, and lets the client hang up."""

    server: "Server"
    protocol_version = request_version = "HTTP/1.1"
    command = ""  # the method, once it is known

    def answer(self, connection: Incoming, file: io.BufferedReader) -> Response:
        """Read a request, and answer it or what is wrong with it. Raises: OSError."""
        peer, proxies = self.client_address[0], self.server.app.config.proxies
        try:
            head = read_head(file)
            self.command = head.method
            if head.expects_continue and head.length <= BODY:
                self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            received: Request | Fault = read_request(file, head, peer, proxies)
        except Fault as fault:
            received = fault.with_traceback(None)  # or garbage would pile up: a cycle
        except TimeoutError:
            received = Fault(408, f"The request did not come within {CLIENT_SECONDS} s")
        connection.mark(waits=False)
        return respond(self.server.app, received, peer)

    def handle(self) -> None:
        """Answer one request, unless the client goes, or has to go, before that."""
        connection = self.server.open[self.request]
        file: io.BufferedReader = io.BufferedReader(connection)
        with contextlib.suppress(OSError):
            if not file.peek(1):  # who comes and goes gets no word, nor a line
                return
            response = self.answer(connection, file)
            self.wfile = written = io.BytesIO()
            self.send_response_only(response.status)
            self.send_header("Date", self.date_time_string())
            self.send_header("Server", "waker")
            self.send_header("Connection", "close")
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Type", response.content_type)
            self.send_header("Content-Length", str(len(response.body)))
            for name, value in response.headers:
                self.send_header(name, value)
            self.end_headers()
            body = b"" if self.command == "HEAD" else response.body
            self.request.settimeout(CLIENT_SECONDS)  # for the whole answer together
            connection.mark(waits=True)
            self.request.sendall(written.getvalue() + body)
            # Now the client is to hang up: if we did, it might lose its answer.
            connection.mark(waits=True, answered=True)
            ends, left = time.monotonic() + DRAIN_SECONDS, DRAIN
            self.request.settimeout(DRAIN_SECONDS)
            if self.server.tls:
                with contextlib.suppress(OSError):  # it sends on, and takes no farewell
                    self.request.unwrap()
            socket.socket.shutdown(self.request, socket.SHUT_WR)
            while left > 0 and (seconds := ends - time.monotonic()) > 0:
                self.request.settimeout(seconds)
                left -= len(socket.socket.recv(self.request, 4096)) or left  # its end


class Server(ThreadingHTTPServer):
    """Gives each connection a thread, and decides who goes where there are too many."""

    daemon_threads = False  # SIGTERM lets a running unlock end

    def __init__(
        self, app: App, tcp: socket.socket, tls: "ssl.SSLContext | None" = None
    ) -> None:
        # HTTPServer would look up the name of our address, and wait for a dead DNS.
        socketserver.BaseServer.__init__(self, tcp.getsockname()[:2], Handler)
        self.socket, self.app, self.tls = tcp, app, tls
        self.lock = threading.Condition()  # notified when a connection has ended
        self.open: dict[socket.socket, Incoming] = {}  # each has a thread
        self.drops: dict[str, float] = {}  # when a name was dropped; monotonic seconds

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Let a client in. Raises: OSError, which the base class passes over."""
        try:
            tcp, (host, port, *_) = self.socket.accept()
        except OSError:
            time.sleep(DROP_SECONDS)  # or it would spin while descriptors are short
            raise
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls := self.tls:
            with contextlib.suppress(BlockingIOError):  # nothing has come so far
                if tcp.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b"\x16":
                    tcp.close()
                    raise ConnectionAbortedError  # no TLS: that is not worth a thread
            tcp = tls.wrap_socket(tcp, server_side=True, do_handshake_on_connect=False)
        # An IPv4-mapped address counts as IPv4; a link-local one keeps its scope.
        return tcp, (host.removeprefix("::ffff:"), port)

    def _drop(self, name: str = "") -> None:
        """Hang up on a connection that waits for its client, of that name or of any.

        First goes one that has its answer; then one of the client that has the most;
        then, where many have returned soon after a drop, one of those: where few have,
        one may be the owner. Else any one: the oldest is often an owner's, far away.
        """
        many = sum(c.returned for c in self.open.values()) > THREADS // 8
        crowds = Counter(c.name for c in self.open.values() if not c.dropped)
        ranks = {
            tcp: (c.answered, crowds[c.name], many and c.returned, secrets.randbits(32))
            for tcp, c in self.open.items()
            if c.waits and not c.dropped and name in ("", c.name)
        }
        if ranks:
            tcp = max(ranks, key=ranks.__getitem__)
            self.open[tcp].dropped = True
            if len(self.drops) >= CLIENTS:
                self.drops.clear()
            self.drops[self.open[tcp].name] = time.monotonic()
            with contextlib.suppress(OSError):  # SSLSocket's would go on in plain text
                socket.socket.shutdown(tcp, socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread; where there are too many, drop another one."""
        trusted = within(client_address[0], self.app.config.proxies)
        name = "" if trusted else counted_as(client_address[0])
        with self.lock:
            own = [c for c in self.open.values() if c.name == name and not c.dropped]
            if name and len(own) >= PER_CLIENT:
                self._drop(name)
            while len(self.open) >= THREADS:
                self._drop()
                self.lock.wait(DROP_SECONDS)
            self.open[request] = Incoming(self, request, name)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Hang up, and free the thread's place: every connection ends here."""
        super().shutdown_request(request)
        with self.lock:
            self.open.pop(request, None)
            self.lock.notify()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a bug of ours."""
        if error := sys.exception():
            LOG.error("%s", describe_bug(error))

    def stop(self) -> None:
        """Listen no more, and return when every running request has its answer."""
        self.socket.shutdown(socket.SHUT_RDWR)  # this wakes `serve_forever`
        self.shutdown()
        with self.lock:
            for tcp, connection in self.open.items():
                if connection.waits:
                    connection.dropped = True
                with contextlib.suppress(OSError):  # it reads no more, but writes on
                    socket.socket.shutdown(tcp, socket.SHUT_RD)
        with contextlib.suppress(RuntimeError):  # of a thread that could not start
            self.server_close()


# ---- The page ------------------------------------------------------------------------
# ui.html lies beside this file. In the one file of `make dist` it stands here instead.

PAGE: Final = r"""
"""


def load_page() -> tuple[Response, Response]:
    """Load the page and, out of it, the icon for iPhones. Raises: ConfigError."""
    path = Path(__file__).resolve().with_name("ui.html")
    try:
        source = PAGE[1:].encode() or path.read_bytes()
    except OSError as error:
        remedy = "it belongs beside waker.py; `make dist` makes one file of both"
        raise ConfigError(f"the page {path}: {error.strerror}; {remedy}") from None
    found = re.search(
        rb"(?s)data:image/png;base64,([\w+/=]+).*<style>(.*?)</style>"
        rb'.*<script type="module">(.*?)</script>',
        source,
    )
    if not found:
        raise ConfigError("ui.html is not the page of waker")
    codes = found.group(2, 3)  # the only ones that the policy allows, by hash
    style, script = (base64.b64encode(sha256(code)).decode() for code in codes)
    policy = (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}';"
        " connect-src 'self'; img-src 'self' data:; manifest-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    )
    headers = (
        ("Content-Security-Policy", policy),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
    )
    page = Response(HTTPStatus.OK, source, "text/html; charset=utf-8", headers)
    return page, Response(HTTPStatus.OK, base64.b64decode(found[1]), "image/png")


# ---- Checking ------------------------------------------------------------------------
# Why does it not work? Each thing that waking and unlocking need is looked at, in the
# order in which they need it. No packet is sent, and no secret.

WRONG: Final = "WRONG"
UNSEEN: Final = "-"  # it cannot be told just now, or is nothing to mind


class Finding(NamedTuple):
    """What was seen of one thing, and what to do about it."""

    thing: str
    seen: str
    verdict: str = "ok"


def check_packet(config: Config) -> Finding:
    """See from where the magic packet would leave, and whether it would arrive."""
    seen = ""
    try:
        seen = f"would leave from {find_source(config)} to {config.broadcast}"
        find_source(config, on_link=True)
    except OSError as error:
        if not seen:
            remedy = "give this box an address in the machine's network"
            return Finding("magic packet", f"{error.strerror}; {remedy}", WRONG)
        seen += "; the machine is not in a network of this box, and routers stop"
        return Finding("magic packet", f"{seen} broadcasts", UNSEEN)
    return Finding("magic packet", seen)


def check_unlocking(machine: Machine, *, waits: bool) -> Iterator[Finding]:
    """See what an unlock needs, and whether an initrd that waits lets us in."""
    try:
        import paramiko

        yield Finding("paramiko", paramiko.__version__)
    except (ImportError, AttributeError) as error:
        yield Finding("paramiko", f"{NO_PARAMIKO} ({error})", WRONG)
        return
    try:
        key = load_key(machine.key)
        yield Finding("SSH key", f"{key.get_name()} {fingerprint(key.asbytes())}")
    except NotSent as why:
        yield Finding("SSH key", f"{why}; to wake alone takes no key", WRONG)
    thing = "host key"
    try:
        if waits and machine.host_keys:
            transport = begin(machine)
            verify(transport, machine)
            yield Finding(thing, "it is the pinned one")
            thing = "login"
            log_in(transport, machine)
            yield Finding(thing, f"{machine.user} is let in; unlocking was not tried")
        elif waits:
            shown = exchange_keys(begin(machine), machine)
            seen = f"none is pinned, and {fingerprint(shown.blob)} is shown. If that is"
            seen += f" your machine's, pin it: WAKER_SSH_HOST_KEY={shown}"
            yield Finding(thing, seen, UNSEEN)
        elif machine.host_keys:
            yield Finding(thing, "not seen, as the initrd's SSH is not there", UNSEEN)
        else:
            seen = "none is pinned, so waker refuses to unlock; check again while the"
            seen += " initrd waits, or take it from the machine itself"
            yield Finding(thing, seen, UNSEEN)
    except NotSent as why:
        yield Finding(thing, str(why), WRONG)


def check_machine(machine: Machine) -> Iterator[Finding]:
    """See what SSH says on each port, and look on as far as the machine is there."""
    ports = {"initrd's port": machine.initrd_port, "system's port": machine.system_port}
    if machine.initrd_port == machine.system_port:
        ports = {"common port": machine.initrd_port}
    wrong_port = False
    for thing, port in ports.items():
        did, ident = knock(machine.host, port, read_ident=True)
        seen, verdict = f"{port} {did.value}", UNSEEN
        if did is Port.OPEN:
            seen, verdict = f"{seen}; it says {ident or 'nothing'}", "ok"
        in_dropbears_place = thing == "initrd's port" and "OpenSSH" in ident
        if in_dropbears_place and machine.dialect.name == "cryptroot":
            seen += ": this is the booted system, or WAKER_INITRD=systemd is missing"
            verdict, wrong_port = WRONG, True
        yield Finding(thing, seen, verdict)
    state = look(machine).state()
    seen = {
        "off": "off, or a firewall is between; wake it, and check again",
        "booting": "it answers, but not with SSH; check again while its initrd waits",
        "locked": "the initrd's port is open",
        "up": "the system is up; to see the initrd, restart it and check again",
        "unknown": "waker could not see whether it answers",
    }[state]
    yield Finding("machine", seen, "ok" if state == "locked" else UNSEEN)
    yield from check_unlocking(machine, waits=state == "locked" and not wrong_port)


def check(config: Config) -> Iterator[Finding]:
    """Look at everything; the configuration itself is right already."""
    yield Finding("configuration", "every value is right")
    if config.pin.is_number:
        seen = "digits only: enough behind a VPN, too little for the open internet"
        yield Finding("PIN", seen, UNSEEN)
    where = config.listen
    seen, verdict = f"{where} can be opened", "ok"
    if os.geteuid() == 0 and 0 < where.port < 1024:
        seen, verdict = f"{where} is for root; the service needs 1024 or more", WRONG
    try:
        listen(where).close()
    except OSError as error:
        seen, verdict = why_not_listening(where, error), WRONG
        if error.errno == errno.EADDRINUSE:
            seen, verdict = f"{where} is in use: by waker itself, if it runs", UNSEEN
    yield Finding("our port", seen, verdict)
    yield check_packet(config)
    yield from check_machine(config.machine)


# ---- Commands ------------------------------------------------------------------------
# What `waker.py` does when it is run.

EX_CONFIG: Final = 78  # sysexits.h; the unit does not start it again after that


def make_app(config: Config, environment: Mapping[str, str], program: Path) -> App:
    """Put the parts together; `program`, this one, unlocks. Raises: ConfigError."""
    watcher, unlocker = Watcher(config.machine), Unlocker(config, environment, program)
    starter = Starter(config, watcher, unlocker)
    return App(config, *load_page(), Attempts(), Tokens(), watcher, unlocker, starter)


def make_tls(config: Config) -> "ssl.SSLContext | None":
    """Load the certificate, if there is one. Raises: ConfigError."""
    cert, key = config.tls_cert, config.tls_key
    if not cert or not key:
        return None
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")
    # One curve alone: a hello for OpenSSL's ffdhe8192 would take 100 ms of CPU. A NIST
    # curve costs modern clients one more round trip, but keeps ffdhe off all the same.
    context.set_ecdh_curve("prime256v1")
    with contextlib.suppress(ssl.SSLError):  # Python 3.11.2, as in Debian 12, fails
        context.set_ecdh_curve("X25519")
    try:
        context.load_cert_chain(cert, key, password=b"")  # or it would ask for one
    except OSError:  # it would not tell which of them
        raise ConfigError(
            f"WAKER_TLS_CERT {cert} and WAKER_TLS_KEY {key} must be a certificate"
            " and its private key, in PEM, the key without a passphrase"
        ) from None
    return context


def serve(app: App, tls: "ssl.SSLContext | None" = None) -> int:
    """Run until SIGTERM or ^C; running requests are answered, a start is cancelled."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # in all threads to come
    threading.stack_size(STACK)
    try:
        tcp = listen(app.config.listen)
    except OSError as error:
        LOG.error(why_not_listening(app.config.listen, error))
        return 1
    server = Server(app, tcp, tls)
    threading.Thread(target=server.serve_forever, args=(None,)).start()
    LOG.info("waker %s listens on %s", __version__, Listen(*tcp.getsockname()[:2]))
    if not app.config.machine.host_keys:
        LOG.warning("WAKER_SSH_HOST_KEY is not set: waker will refuse to unlock")
    if not importlib.util.find_spec("paramiko"):  # to import it would cost 20 MB
        LOG.warning("waker cannot unlock: %s", NO_PARAMIKO)
    signal.sigwait(signals)
    LOG.info("stopping")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second signal ends it at once
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    with contextlib.suppress(Fault):
        app.starter.cancel()  # nothing is to be sent any more
    server.stop()
    app.starter.stop()  # after the server: no new start can begin
    return 0


def print_json(members: Mapping[str, object]) -> None:
    """Print a line, at once."""
    os.write(1, json.dumps(members).encode() + b"\n")


def unlock_once(machine: Machine, seconds: int) -> Result:
    """Read a passphrase, do one unlock; print a line of JSON when it is sent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd tells the whole group
    try:
        if os.isatty(0):
            import getpass

            text = getpass.getpass("Passphrase: ")
        else:
            with os.fdopen(0, "rb", closefd=False) as stdin:
                text = stdin.read().decode().removesuffix("\n")
        passphrase = Passphrase(text)
    except (ValueError, OSError, EOFError, KeyboardInterrupt):
        reason = "a passphrase has 1 to 512 bytes of UTF-8 and no control character"
        return Result.of(Outcome.ERROR, reason, sent=False)
    tell_sent = functools.partial(print_json, {"sent": True})
    signal.alarm(seconds)  # ends us even where something hangs
    deadline = time.monotonic() + seconds - MARGIN_SECONDS
    return unlock(machine, passphrase, tell_sent, deadline)


def print_table(findings: Iterable[Finding]) -> int:
    """Print each as it is found; returns 1 if anything is wrong."""
    for number in (signal.SIGINT, signal.SIGPIPE):  # to end quietly is enough
        signal.signal(number, signal.SIG_DFL)
    wrong = 0
    for thing, seen, verdict in findings:
        os.write(1, printable(f"{verdict:7}{thing:15}{seen}").encode() + b"\n")
        wrong |= verdict == WRONG
    return wrong


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    epilog = f"settings, from the environment or FILE; if neither is given, {ENV_FILE}:"
    for name, default, _, right in SETTINGS:
        epilog += f"\n  {name:25}{right} [{default or 'none'}]"
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=epilog
    )
    parser.description = "Wake a machine by magic packet and unlock its disk over SSH."
    add = parser.add_argument
    add("--version", action="version", version=f"waker {__version__}")
    about = "read lines NAME=value, and let the environment win over them"
    add("--env-file", metavar="FILE", type=Path, help=about)
    about = "for unlock: give up after N seconds, more than 5 [%(default)s]"
    seconds = functools.partial(matching, "[6-9]|[1-9][0-9]{1,3}")  # above the margin
    add("--seconds", metavar="N", type=seconds, default=UNLOCK_SECONDS, help=about)
    about = "serve: be the daemon (default); check: tell what is wrong; unlock: unlock"
    about += " once, with a passphrase from standard input; state: tell what is seen"
    commands = "serve", "check", "unlock", "state"
    add("command", nargs="?", choices=commands, default="serve", help=about)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run a command, the program's name before it; the result is the exit status."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # it takes the place of a closed standard stream, which a socket would
    os.close(spare)
    arguments = parse_arguments(argv[1:])
    # No secret goes into a core dump. The limit is 1 byte: with 0, the kernel would
    # still pipe one to systemd-coredump. Source: do_coredump, fs/coredump.c.
    with contextlib.suppress(ValueError):  # it is 0, and cannot be raised
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    warnings.simplefilter("ignore")  # paramiko's, of what cryptography will drop
    LOG.setLevel(logging.INFO)
    LOG.addHandler(LogHandler())
    ours = {n: v for n, v in os.environ.items() if n.startswith("WAKER_")}
    file = arguments.env_file or (None if ours else Path(ENV_FILE))
    folder = file.resolve().parent if file else Path.cwd()
    try:
        values = (read_env_file(file) if file else {}) | ours
        if arguments.command == "unlock":
            result = unlock_once(read_machine(values, folder), int(arguments.seconds))
            print_json(result._asdict())
            os._exit(result.outcome != "unlocked")  # paramiko's timers would take 15 s
        if arguments.command == "state":
            print_json(look(read_machine(values, folder)).members())
            return 0
        config = read_config(values, folder)
        app, tls = make_app(config, os.environ, Path(argv[0])), make_tls(config)
    except ConfigError as error:
        lines = str(error).splitlines()
        if arguments.command == "unlock":
            print_json(Result.of(Outcome.ERROR, "; ".join(lines), sent=False)._asdict())
        elif arguments.command == "check":
            print_table(Finding("configuration", line, WRONG) for line in lines)
        else:
            for line in lines:
                LOG.error(line)
        return EX_CONFIG
    if arguments.command == "check":
        os._exit(print_table(check(config)))  # which hangs up as well
    return serve(app, tls)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
