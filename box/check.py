"""Find out why waking or unlocking does not work: `waker check`.

It checks what both need, in the order of use, and sends no magic packet and no secret.
"""

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final, NoReturn

import waker
from box.system import find_user_problem, read_page
from waker import Config, ConfigError, PortState, UnlockError

OK: Final = "ok"
WRONG: Final = "WRONG"
HINT: Final = "-"  # harmless, or unknown for now
LOOK: Final = "LOOK"  # right in some homes, but only the owner knows
CHECK_SECONDS: Final = 20  # for key exchange and login: slow boxes take two to four
ANSWER_SECONDS: Final = 3  # for a page that this box serves
SIOCGIFADDR: Final = 0x8915  # linux/sockios.h
IFF_BROADCAST: Final = 0x2  # linux/if.h
IFF_LOOPBACK: Final = 0x8
ATF_PERM: Final = 0x4  # linux/if_arp.h
Finding = tuple[str, str, str]  # subject, what was found and how to fix it, verdict


def explain_no_paramiko() -> str:
    """Say how to install paramiko on this system."""
    six = "apk update && apk add python3-paramiko python3-six"
    packages = {
        "apt": "apt install python3-paramiko",
        "opkg": "opkg update && opkg install python3-paramiko",
        "apk": f"{six}, or see docs/openwrt.md",
    }
    tool = next(filter(shutil.which, packages), "")
    remedy = packages.get(tool, "pip install paramiko")
    return f"paramiko is missing or incomplete; install it with: {remedy}"


def read_addresses(wanted: bytes = bytes(4)) -> dict[str, bytes]:
    """Return an IPv4 address of each interface: the wanted one, or else its first."""
    family = socket.AF_INET.to_bytes(2, sys.byteorder)
    address = (family + bytes(2) + wanted).ljust(24, b"\0")  # Source: netdevice(7)
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _, name in socket.if_nameindex():
            request = os.fsencode(name).ljust(16, b"\0") + address
            with contextlib.suppress(OSError):  # it has no address, or has gone
                addresses[name] = fcntl.ioctl(udp, SIOCGIFADDR, request)[20:24]
    return addresses


def find_interface(address: str) -> str:
    """Return the interface with this address, or an empty string."""
    wanted = socket.inet_aton(address)
    for name, own in read_addresses(wanted).items():
        if own == wanted:
            return name
    return ""


def read_interface(name: str, file: str, unknown: int) -> int:
    """Return the number in an interface's file in /sys, or else `unknown`."""
    with contextlib.suppress(OSError, ValueError):  # it is down, or has gone
        return int(Path("/sys/class/net", name, file).read_text(), 0)
    return unknown


def is_permanent(address: str) -> bool:
    """Return whether this box has a permanent ARP entry for an address."""
    arp = Path("/proc/net/arp")
    entry = rf"(?m)^{re.escape(address)} +\S+ +(0x[0-9a-f]+) "
    found = re.search(entry, arp.read_text() if arp.exists() else "")
    return bool(found and int(found[1], 16) & ATF_PERM)


def find_source_of_host(config: Config) -> str:
    """Return our address toward the server, or "" if it is unknown or an IPv6 one."""
    with contextlib.suppress(OSError):
        return waker.find_source_address(config._replace(broadcast=waker.LIMITED))
    return ""


def judge_packet(config: Config, source: str) -> tuple[str, str]:
    """Return what may keep a packet from this address from waking the server."""
    is_limited = config.broadcast == waker.LIMITED
    name = find_interface(source)
    flags = read_interface(name, "flags", IFF_BROADCAST)
    is_tunnel = not flags & (IFF_BROADCAST | IFF_LOOPBACK)
    if is_tunnel and is_limited:
        return f"{name} cannot broadcast (a VPN?). Correct the route", WRONG
    problem = waker.find_packet_problem(config)
    if problem and is_limited:
        fix = "Put this box into the server's network, or correct its netmask"
        return f"{problem}. {fix}", WRONG
    if is_tunnel and not ipaddress.ip_address(config.broadcast).is_reserved:
        return f"what it does there depends on the other end of {name}", HINT
    if problem and is_permanent(config.broadcast):
        return f"{problem}, but a permanent ARP entry leads there", LOOK
    if problem:
        return f"{problem}. Delete WAKER_HOMELAB_BROADCAST, or correct it", WRONG
    if waker.find_destination(config) is waker.Destination.ELSEWHERE:
        return "it goes to another network, and most routers stop broadcasts", HINT
    reached = find_source_of_host(config)
    if reached not in ("", source):
        return f"the server is reached from {reached}: is it another network?", LOOK
    if not read_interface(name, "carrier", 1):
        return f"{name} has no link. Is its cable plugged in?", LOOK
    return "", OK


def check_packet(config: Config) -> tuple[str, str]:
    """Return where the magic packet leaves and what is wrong there, and a verdict."""
    try:
        source = waker.find_source_address(config)
    except OSError as error:
        problem = f"{error.strerror}; connect this box to the server's network"
        if read_addresses().keys() <= {"lo"}:
            problem = "this box has no IPv4 address to send the packet from"
        return problem, WRONG
    problem, verdict = judge_packet(config, source)
    route = f"would leave from {source} to {config.broadcast}"
    return (f"{route}; {problem}" if problem else route), verdict


def judge_listener(config: Config) -> tuple[str, str]:
    """Return what answers on an occupied web port, and a verdict."""
    port = config.listen[1]
    page = read_page(config.listen, ANSWER_SECONDS)
    if b">waker</title>" in page:  # of any version
        return f"waker's page is on {port}", OK
    fix = "Stop what uses it, or choose another port in WAKER_LISTEN"
    if not page:  # waker may be starting
        return f"{port} is in use, but waker's page is not there. {fix}", LOOK
    return f"another program answers on {port}. {fix}", WRONG


def check_box(config: Config, file: Path | None) -> Iterator[Finding]:
    """Check settings, web port and magic packet."""
    if file and file.stat().st_mode & 0o007:
        problem = f"{file} is open to others; as its owner, run: chmod 600 {file}"
        yield "configuration", problem, WRONG
    else:
        yield "configuration", "all settings are valid", OK
    if config.pin and config.pin.is_number:
        yield "PIN", "digits only: enough behind a VPN, not on the internet", HINT
    finding = f"{config.listen[1]} is free", OK
    try:
        waker.listen(config.listen).close()
    except OSError as error:
        finding = f"WAKER_LISTEN: {error.strerror}", WRONG
        if error.errno == errno.EADDRINUSE:
            finding = judge_listener(config)
    yield "web port", *finding
    if problem := find_user_problem():
        yield "user", problem, WRONG
    yield "magic packet", *check_packet(config)


def check_ports_and_mac(config: Config) -> Iterator[Finding]:
    """Check what each port says, and compare the MAC address with ARP."""
    mac = config.mac.hex(":")
    ports = {
        "initrd's port": config.initrd_port,
        "system's port": config.system_port,
    }
    for subject, port in ports.items():
        state, banner = waker.probe_port(config.host, port, banner=True)
        text, verdict = f"{config.host}, port {port} {state.value}", HINT
        if state is PortState.OPEN:
            text = f"{text}; it says {banner or 'nothing'}"
            verdict = OK if banner else HINT
        if port != config.initrd_port and "dropbear" in banner:
            text, verdict = f"{text}; are the two ports swapped?", HINT
        yield subject, text, verdict
    # Probing the ports has filled the ARP table.
    arp = Path("/proc/net/arp")
    entry = rf"(?m)^{re.escape(config.host)} .* (..:..:..:..:..:..) "
    found = re.search(entry, arp.read_text() if arp.exists() else "")
    if found and found[1] == mac:
        yield "MAC address", f"{mac}, as in this box's ARP table", OK
    elif found and found[1] != "00:00:00:00:00:00":
        hint = f"{config.host} has {found[1]} according to ARP, not {mac}. If the"
        hint += " server is off, another device has its address: give each its own. If"
        hint += " it is on, take the MAC of the card that wakes it from `ip link` there"
        hint += " (or ignore this, if a Wi-Fi repeater answers for the server)"
        yield "MAC address", hint, LOOK


def check_unlocking(config: Config) -> Iterator[Finding]:
    """Check what an unlock needs, and the login if the initrd is up."""
    try:
        import paramiko  # noqa: PLC0415 - it may be missing

        yield "paramiko", paramiko.__version__, OK
    except (ImportError, AttributeError) as error:
        yield "paramiko", f"{explain_no_paramiko()} ({error})", WRONG
        return
    subject, transport = "SSH key", None
    try:
        key = waker.load_key(config.key)
        yield subject, f"{key.get_name()} {waker.fingerprint(key.asbytes())}", OK
        subject = "host key"
        ports = waker.Watcher(config).probe(time.monotonic(), fresh=True)
        if ports.initrd is not PortState.OPEN or ports.system is PortState.OPEN:
            seen, verdict = "not seen", HINT
            if not config.host_key:
                seen = "WAKER_SSH_HOST_KEY is not set, so waker cannot unlock"
                verdict = LOOK
            text = f"{seen}; check again while the initrd waits for its passphrase"
            yield subject, text, verdict
            return
        transport = waker.open_transport(config, time.monotonic() + CHECK_SECONDS)
        waker.verify_host_key(transport, config)
        yield subject, "pinned and verified", OK
        subject = "login"
        waker.log_in(transport, config)
        yield subject, f"{config.user} can log in; unlocking is untested", OK
    except UnlockError as error:
        outcome, words = error.args
        text, verdict = outcome.sentence + words, WRONG
        differs = outcome is waker.Outcome.HOST_KEY_DIFFERS
        if transport and differs and not config.host_key:
            seen_key = transport.get_remote_server_key()
            text = f"{waker.fingerprint(seen_key.asbytes())} is not pinned, so waker"
            text += " cannot unlock. If it is your server's, set WAKER_SSH_HOST_KEY="
            text += f"{seen_key.get_name()} {seen_key.get_base64()}"
            verdict = LOOK
        yield subject, text, verdict


def check(config: Config, file: Path | None) -> int:
    """Print each finding at once; return 1 if anything is wrong."""
    for number in (signal.SIGINT, signal.SIGPIPE):  # end without a traceback
        signal.signal(number, signal.SIG_DFL)
    waker.Page()  # or waker would not start
    status = 0
    findings = check_box(config, file), check_ports_and_mac(config)
    for subject, text, verdict in chain(*findings, check_unlocking(config)):
        try:
            print(waker.printable(f"{verdict:7}{subject:15}{text}"), flush=True)
        except OSError as error:
            waker.log(f"standard output: {error.strerror}")
            os._exit(1)  # or Python would try to write the rest, and complain
        status |= verdict == WRONG
    return status


def explain_empty_settings(env_file: Path) -> None:
    """If all settings are still empty, say what fills them in."""
    with contextlib.suppress(ConfigError):  # which was reported
        if not any(waker.read_env_file(env_file).values()):
            is_default = env_file == Path(waker.ENV_FILE)
            option = "" if is_default else f"--config {env_file.parent} "
            waker.log(f"To fill them in, run: waker prepare {option}me@192.168.1.20")


def main(arguments: list[str], commands: dict[str, str]) -> NoReturn:
    """Run the command, and exit."""
    given = waker.parse_argv(arguments, commands).env_file
    waker.protect_process(loads_paramiko=True)
    try:
        values, folder, file = waker.read_values(given)
        status = check(waker.read_config(values, folder), file)
    except ConfigError as error:
        status = waker.log_mistakes(error)
        explain_empty_settings(given or Path(waker.ENV_FILE))
    os._exit(status)  # paramiko's threads would take 15 s to end
