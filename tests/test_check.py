"""`waker.py check`: why it does not work, in one table."""

import signal
import socket
import subprocess
import sys
import venv
from collections.abc import Mapping
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from conftest import (
    CHECKOUT,
    MODULE,
    PASSPHRASE,
    PIN,
    PROGRAM,
    environment,
)
from cryptroot_unlock import Disks
from homelab import Homelab, bind, new_key, public_line
from namespaces import Namespace, home, ip, udp_packets
from ssh_servers import SERVERS, Initrd, free_port, openssh, paramiko_server

import waker

BASE = {
    "WAKER_PIN": PIN,
    "WAKER_HOMELAB_MAC": "52:54:00:12:34:56",
    "WAKER_LISTEN": "127.0.0.1:0",
}
CHECK = sys.executable, PROGRAM, "check"
NOT_SEEN = "-", "not seen; check again while the initrd waits for its passphrase"
NOT_PINNED = "-", "no host key is pinned; run waker check while the initrd waits"
UNPINNED = {"WAKER_SSH_HOST_KEY": ""}
Table = dict[str, tuple[str, str]]
__all__ = ["home"]  # a fixture
Home = tuple[Namespace, Namespace, Namespace]


def read(printed: str) -> Table:
    """Read the table: each thing's verdict, and what was seen of it."""
    rows = [line.split(None, 1)[0] for line in printed.splitlines()]
    things = [line[7:22].strip() for line in printed.splitlines()]
    seen = [line[22:] for line in printed.splitlines()]
    assert len(set(things)) == len(things), printed
    return dict(zip(things, zip(rows, seen, strict=True), strict=True))


def check(settings: Mapping[str, str], *command: str) -> tuple[int, Table]:
    """Returns the exit status, and the table."""
    ended = subprocess.run(
        command or (*MODULE, "check"),
        cwd=CHECKOUT,
        env=environment(settings),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""
    return ended.returncode, read(ended.stdout)


def settings_of(initrd: Initrd) -> dict[str, str]:
    """Tell the settings for an initrd beside which no system is up."""
    port = str(free_port())
    return BASE | initrd.machine().settings() | {"WAKER_SYSTEM_SSH_PORT": port}


def test_a_machine_that_is_off_is_nothing_wrong(lab: Homelab) -> None:
    status, table = check(BASE | lab.settings())
    assert status == 0
    key = table["SSH key"][1]
    assert table == {
        "configuration": ("ok", "every value is right"),
        "magic packet": ("ok", "would leave from 127.0.0.1 to 127.0.0.1"),
        "initrd's port": ("-", f"{lab.initrd_port} does not answer"),
        "system's port": ("-", f"{lab.system_port} does not answer"),
        "web port": table["web port"],
        "paramiko": ("ok", table["paramiko"][1]),
        "SSH key": ("ok", key),
        "host key": NOT_SEEN,
    }
    assert key.startswith("ecdsa-sha2-nistp256 SHA256:")
    assert lab.packets == []


DIGITS = "- digits only: enough behind a VPN, not on the internet"
TAKEN = "- Address already in use; correct WAKER_LISTEN, unless waker itself is running"
ABROAD = "WRONG Cannot assign requested address; correct WAKER_LISTEN"
LOW = (
    "WRONG 81 needs root; use 1024 or above"  # the service is not root, whoever checks
)
WHERE = "- 22 could not be checked; is WAKER_HOMELAB_HOST right?"
LOCKED = "WRONG SSH key {0}/locked must not be encrypted; ssh-keygen -p -f {0}/locked"
EVERYBODY = {"WAKER_HOMELAB_HOST": "255.255.255.255", "WAKER_SYSTEM_SSH_PORT": "22"}


@pytest.mark.parametrize(
    ("settings", "thing", "told"),
    [
        ({"WAKER_PIN": "24681012"}, "PIN", DIGITS),
        ({"WAKER_LISTEN": "127.0.0.1:0"}, "web port", "ok 0 is free"),
        ({"WAKER_LISTEN": "127.0.0.1:{1}"}, "web port", TAKEN),
        ({"WAKER_LISTEN": "203.0.113.9:8080"}, "web port", ABROAD),
        ({"WAKER_LISTEN": "127.0.0.1:81"}, "web port", LOW),
        (EVERYBODY, "system's port", WHERE),
        (UNPINNED, "host key", " ".join(NOT_PINNED)),
        (
            UNPINNED | {"WAKER_SSH_KEY": "/nowhere"},
            "SSH key",
            "WRONG SSH key /nowhere is missing or empty",
        ),
        ({"WAKER_SSH_KEY": "{0}/locked"}, "SSH key", LOCKED),
    ],
)
def test_what_can_be_seen_without_the_machine_is_told(
    lab: Homelab, tmp_path: Path, settings: dict[str, str], thing: str, told: str
) -> None:
    new_key().write_private_key_file(str(tmp_path / "locked"), password="secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = tmp_path, server.getsockname()[1]
        more = {name: value.format(*words) for name, value in settings.items()}
        status, table = check(BASE | lab.settings() | more)
    assert " ".join(table[thing]) == told.format(*words)
    assert status == told.startswith("WRONG")


@pytest.mark.parametrize(
    ("mode", "verdict", "seen"),
    [
        (0o604, "WRONG", "{0} is open to others; chmod 600 {0}"),
        (0o440, "ok", "every value is right"),  # as systemd hands it over
    ],
)
def test_settings_that_others_can_read_are_wrong(
    lab: Homelab, tmp_path: Path, mode: int, verdict: str, seen: str
) -> None:
    file = tmp_path / "waker.env"
    settings = (f"{name}={value}\n" for name, value in (lab.settings() | BASE).items())
    file.write_text("".join(settings))
    file.chmod(mode)
    status, table = check({}, *CHECK, "--env-file", str(file))
    assert table["configuration"] == (verdict, seen.format(file))
    assert status == (verdict == "WRONG")


@pytest.mark.parametrize("server", SERVERS)
def test_an_initrd_that_would_take_the_passphrase_is_told_so(
    server: str, tmp_path: Path
) -> None:
    dialect = {"WAKER_INITRD": "systemd" if server == "openssh" else "cryptroot"}
    with SERVERS[server](tmp_path, Disks({"cryptroot": PASSPHRASE})) as initrd:
        status, table = check(settings_of(initrd) | dialect)
        assert initrd.received() == []
    assert status == 0
    verdict, seen = table["initrd's port"]
    assert verdict == "ok"
    assert seen.startswith(f"{initrd.port} is open; it says SSH-2.0-")
    assert table["system's port"][1].endswith(" refuses connections")
    assert table["host key"] == ("ok", "pinned and verified")
    assert table["login"] == ("ok", "root can log in; unlock not tried")


def test_the_line_to_pin_a_host_key_can_be_pasted(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"cryptroot": PASSPHRASE})) as initrd:
        settings = settings_of(initrd)
        del settings["WAKER_SSH_HOST_KEY"]
        status, table = check(settings)
        assert status == 0
        verdict, seen = table["host key"]
        (pin,) = waker.HostKey.parse_all(initrd.host_key)
        assert verdict == "-"
        assert seen.startswith(f"{waker.fingerprint(pin.blob)} is not pinned yet")
        name, _, line = seen.rpartition(" set ")[2].partition("=")
        status, table = check(settings | {name: line})
    assert (status, table["login"][0]) == (0, "ok")


def test_another_host_key_is_wrong_and_told_by_both_fingerprints(
    tmp_path: Path,
) -> None:
    pin = public_line(new_key())
    with paramiko_server(tmp_path, Disks({"cryptroot": PASSPHRASE})) as initrd:
        status, table = check(settings_of(initrd) | {"WAKER_SSH_HOST_KEY": pin})
    assert status == 1
    verdict, seen = table["host key"]
    assert verdict == "WRONG"
    for line in pin, initrd.host_key:
        (key,) = waker.HostKey.parse_all(line)
        assert waker.fingerprint(key.blob) in seen
    assert "login" not in table
    assert "WAKER_SSH_HOST_KEY=" not in seen  # an impostor's is not to be pasted


def test_a_key_that_is_not_let_in_is_wrong(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"cryptroot": PASSPHRASE})) as initrd:
        new_key().write_private_key_file(str(initrd.ssh_key))
        status, table = check(settings_of(initrd))
    assert (status, table["host key"][0], table["login"][0]) == (1, "ok", "WRONG")
    assert "add it to the initrd's authorized_keys" in table["login"][1]


@pytest.mark.parametrize("port", ["of its own", "of the initrd, too"])
@pytest.mark.parametrize("pinned", [True, False])
def test_the_key_of_a_system_that_is_up_is_not_to_be_pinned(
    tmp_path: Path, port: str, pinned: bool
) -> None:
    with (
        bind("127.0.0.1", 0) as other,
        paramiko_server(tmp_path, Disks({})) as system,
    ):
        other.listen()
        settings = BASE | system.machine().settings()
        settings["WAKER_SYSTEM_SSH_PORT"] = str(other.getsockname()[1])
        if port == "of its own":
            other.close()
            settings["WAKER_SYSTEM_SSH_PORT"] = str(system.port)
            settings["WAKER_INITRD_SSH_PORT"] = str(free_port())
        pin = public_line(new_key()) if pinned else ""
        status, table = check(settings | {"WAKER_SSH_HOST_KEY": pin})
    assert (status, table["host key"]) == (0, NOT_SEEN if pinned else NOT_PINNED)


@pytest.mark.parametrize("pinned", [True, False])
def test_an_openssh_where_dropbear_should_be_is_wrong_and_not_to_be_pinned(
    tmp_path: Path, pinned: bool
) -> None:
    with openssh(tmp_path, Disks({"cryptroot": PASSPHRASE})) as system:
        status, table = check(settings_of(system) | ({} if pinned else UNPINNED))
    assert (status, table["initrd's port"][0]) == (1, "WRONG")
    told = ": is this the booted system? If not, set WAKER_INITRD=systemd"
    assert table["initrd's port"][1].endswith(told)
    assert table["host key"] == (NOT_SEEN if pinned else NOT_PINNED)


def test_a_port_of_both_is_one_line(tmp_path: Path) -> None:
    with paramiko_server(tmp_path, Disks({"cryptroot": PASSPHRASE})) as initrd:
        status, table = check(BASE | initrd.machine().settings())
    assert (status, table["login"][0]) == (0, "ok")
    ports = [thing for thing in table if thing.endswith("port")]
    assert ports == ["web port", "common port"]


def test_it_ends_without_a_word_when_nobody_reads_on(lab: Homelab) -> None:
    with subprocess.Popen(
        CHECK,
        env=environment(BASE | lab.settings()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as checking:
        assert checking.stdout
        assert checking.stderr
        assert checking.stdout.readline().startswith(b"ok     configuration")
        checking.stdout.close()
        assert checking.stderr.read() == b""
        assert checking.wait() == -signal.SIGPIPE


def test_what_a_port_says_is_shown_with_its_control_characters_escaped(
    lab: Homelab,
) -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        settings = BASE | lab.settings() | {"WAKER_SYSTEM_SSH_PORT": str(port)}
        with subprocess.Popen(
            CHECK, env=environment(settings), stdout=subprocess.PIPE, text=True
        ) as checking:
            with listener.accept()[0] as tcp:
                tcp.sendall(b"\x1b[31m\xff\x00red\x07\r\nand its key exchange")
            table = read(checking.communicate()[0])
    seen = rf"{port} is open; it says \x1b[31m\xff\x00red\x07"
    assert table["system's port"] == ("ok", seen)


def test_the_way_of_the_packet_is_told_and_none_is_sent(
    home: Home, config: waker.Config
) -> None:
    router, machine, provider = home
    ip(f"-n {router.name} address add 10.9.9.1/24 dev lan")  # a second one
    far = "; the machine is on another network, and routers stop broadcasts"
    limited = "255.255.255.255"
    with machine.capture() as at_machine, provider.capture() as at_provider:
        for host, broadcast, source, more in (
            ("192.168.77.20", limited, "192.168.77.1", ""),
            ("10.9.9.9", limited, "10.9.9.1", ""),
            ("203.0.113.9", limited, "198.51.100.2", far),
            ("192.168.77.20", "192.168.77.255", "192.168.77.1", ""),
            ("2001:db8::9", "192.168.77.255", "192.168.77.1", ""),
            ("192.168.77.20", "10.7.7.255", "198.51.100.2", far),
        ):
            there = config.machine._replace(host=host)
            asked = config._replace(machine=there, broadcast=IPv4Address(broadcast))
            told = f"would leave from {source} to {broadcast}{more}"
            found = router.run(partial(waker.check_packet, asked))
            verdict = "-" if more else "ok"
            assert found == ("magic packet", told, verdict)
        assert udp_packets(at_machine) == udp_packets(at_provider) == []


def test_a_box_without_a_way_to_the_machine_is_wrong(home: Home, lab: Homelab) -> None:
    _, machine, _ = home
    settings = BASE | lab.settings() | {"WAKER_HOMELAB_HOST": "198.51.100.9"}
    settings |= {"WAKER_HOMELAB_BROADCAST": "255.255.255.255"}
    status, table = check(settings, *machine.command(), *CHECK)
    assert status == 1
    told = "Network is unreachable; connect this box to the machine's network"
    assert table["magic packet"] == ("WRONG", told)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (None, "(No module named 'paramiko')"),
        ("import no_such_six", "(No module named 'no_such_six')"),
        ("import os; os.TripleDES", "(module 'os' has no attribute 'TripleDES')"),
    ],
)
def test_a_paramiko_that_is_missing_or_incomplete_is_wrong(
    source: str | None, told: str, lab: Homelab, tmp_path: Path
) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    if source:
        (tmp_path / "paramiko.py").write_text(source)
    settings = BASE | lab.settings() | {"PYTHONPATH": str(tmp_path)}
    python = str(tmp_path / "bare" / "bin" / "python")
    status, table = check(settings, python, *CHECK[1:])
    assert (status, table["paramiko"]) == (1, ("WRONG", f"{waker.NO_PARAMIKO} {told}"))
