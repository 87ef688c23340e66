"""`waker check`: a table that says what does not work, and why."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path

import paramiko
import pytest
from conftest import CHECKOUT, MACHINE, MODULE, PIN, environment, run_waker
from cryptroot_unlock import Disks
from homelab import DROPBEAR, OPENSSH, Homelab, SshServer, bind, new_key, public_line
from namespaces import Namespace, home, ip, udp_packets
from ssh_servers import Initrd, free_port

import waker

BEHIND_PROXY = "only this box can connect; that is right if a proxy runs here"
BASE = MACHINE | {
    "WAKER_PIN": PIN,
    "WAKER_LISTEN": "127.0.0.1:0",
    "WAKER_INITRD_SSH_PORT": str(free_port()),
    "WAKER_SYSTEM_SSH_PORT": str(free_port()),
}
Table = dict[str, str]  # what was checked: the verdict, and what was seen
__all__ = ["home"]  # a fixture
Home = tuple[Namespace, Namespace, Namespace]


def run(settings: dict[str, str], folder: Path, mode: int = 0o640) -> tuple[int, Table]:
    """Run the command; returns its status, and the table.

    The folder gets a file with the settings. A paramiko.py in it is imported.
    """
    file = folder / "waker.env"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    file.chmod(mode)
    path = {"PYTHONPATH": str(folder)}
    ended = run_waker("--env-file", str(file), "check", settings=path)
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    table = {line[7:22].strip(): f"{line[:7].strip()} {line[22:]}" for line in lines}
    return ended.returncode, table


def test_a_machine_that_is_off_is_not_wrong(lab: Homelab, tmp_path: Path) -> None:
    status, table = run(BASE | lab.settings(), tmp_path)
    assert table["SSH key"].startswith("ok ecdsa-sha2-nistp256 SHA256:")
    assert table == {
        "configuration": "ok all settings are valid",
        "web port": f"- 0 is free, but {BEHIND_PROXY}",
        "magic packet": "ok would leave from 127.0.0.1 to 127.255.255.255",
        "initrd's port": f"- 127.0.0.1, port {lab.initrd_port} does not answer",
        "system's port": f"- 127.0.0.1, port {lab.system_port} does not answer",
        "paramiko": f"ok {paramiko.__version__}",
        "host key": "- not seen; check again while the initrd waits for its passphrase",
        "SSH key": table["SSH key"],
    }
    assert status == 0


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import no_such_six", "No module named 'no_such_six'"),
        ("import os; os.TripleDES", "module 'os' has no attribute 'TripleDES'"),
        (
            "import warnings; warnings.warn('deprecated')",  # which is not shown
            "module 'paramiko' has no attribute '__version__'",
        ),
    ],
    ids=["module", "attribute", "empty"],
)
def test_a_broken_paramiko_is_wrong(tmp_path: Path, module: str, reason: str) -> None:
    """By itself it makes the command fail."""
    (tmp_path / "paramiko.py").write_text(module)
    status, table = run(BASE, tmp_path)
    wrong = {name: seen for name, seen in table.items() if seen.startswith("WRONG")}
    assert wrong == {"paramiko": f"WRONG {waker.NO_PARAMIKO} ({reason})"}
    assert status == 1
    key = str(tmp_path / "ssh_key")
    new_key().write_private_key_file(key)
    settings = {"WAKER_SSH_KEY": key, "WAKER_SSH_HOST_KEY": public_line(new_key())}
    settings["PYTHONPATH"] = str(tmp_path)
    ended = run_waker("unlock", settings=BASE | settings, given="x")
    message = f"{waker.NO_PARAMIKO}. The passphrase was not sent."
    assert json.loads(ended.stdout)["message"] == message


def test_one_thing_that_is_wrong_is_enough_to_fail(
    tmp_path: Path, lab: Homelab
) -> None:
    """Even if everything after it is right."""
    status, table = run(BASE | lab.settings(), tmp_path, mode=0o604)
    file = tmp_path / "waker.env"
    assert table["configuration"] == f"WRONG {file} is open to others; chmod 600 {file}"
    wrong = [thing for thing, seen in table.items() if seen.startswith("WRONG")]
    assert (status, wrong) == (1, ["configuration"])
    assert [*table][-1] != "configuration"


@pytest.mark.parametrize("mode", [0o602, 0o604], ids=["writable", "readable"])
def test_settings_that_are_open_to_others_are_wrong(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "waker.env"
    file.touch()
    file.chmod(mode)
    config = waker.read_config(BASE, tmp_path)
    problem = f"{file} is open to others; chmod 600 {file}"
    assert next(waker.check(config, file)) == ("configuration", problem, "WRONG")


DIGITS = "- digits only: enough behind a VPN, not on the internet"
TAKEN = "- port {open} is in use; waker may be running already"
ABROAD = "WRONG 203.0.113.9 is not an address of this box; correct WAKER_LISTEN"
NOBODY_THERE = {"WAKER_HOMELAB_HOST": "127.255.255.255", "WAKER_SYSTEM_SSH_PORT": "22"}
WHERE = "- 127.255.255.255, port 22 could not be checked; is WAKER_HOMELAB_HOST right?"
COMMON = {"WAKER_SYSTEM_SSH_PORT": "{port}"}
UP = {"WAKER_SYSTEM_SSH_PORT": "{open}"}
UNPINNED = {"WAKER_SSH_HOST_KEY": ""}
OURS = {"WAKER_SSH_HOST_KEY": "{our_line}"}  # the wrong key
MISSING = (
    "WRONG SSH key /nowhere is missing; correct the path, or make it with: ssh-keygen"
    " -t ed25519 -N '' -f /nowhere"
)
NOBODY = {"WAKER_SSH_USER": "nobody"}
NO_KEY = UNPINNED | {"WAKER_SSH_KEY": "/nowhere"}
SAYS = "127.0.0.1, port {port} is open; it says {ident}"
REFUSED = (
    "WRONG the server refused waker's SSH key {ours} for user nobody: add it to the"
    " initrd's authorized_keys and rebuild the initrd, or correct WAKER_SSH_USER, or"
    " install that user's shell in the initrd"
)
NOT_PINNED = "- no host key is pinned; run waker check while the initrd waits"
NEW = (
    "- {seen} is not pinned yet. If this key is your server's, set"
    " WAKER_SSH_HOST_KEY={line}"
)
IMPOSTOR = (
    "WRONG the host key differs: pinned {ours}, seen {seen}. Is the system up, or was"
    " its key pinned? If neither, suspect an impostor"
)


@pytest.mark.parametrize(
    ("ident", "settings", "thing", "expected"),
    [
        (DROPBEAR, {"WAKER_PIN": "24681012"}, "PIN", DIGITS),
        (DROPBEAR, {"WAKER_LISTEN": "127.0.0.1:{open}"}, "web port", TAKEN),
        (DROPBEAR, {"WAKER_LISTEN": "203.0.113.9:8080"}, "web port", ABROAD),
        (DROPBEAR, {"WAKER_LISTEN": "0.0.0.0:0"}, "web port", "ok 0 is free"),
        (DROPBEAR, {"WAKER_TRUSTED_PROXY": "127.0.0.1,::1"}, "proxy", ""),
        (DROPBEAR, NOBODY_THERE, "system's port", WHERE),
        (
            DROPBEAR,
            UP,
            "system's port",
            "ok 127.0.0.1, port {open} is open; it says nothing",
        ),
        (
            DROPBEAR,
            {},
            "system's port",
            "- 127.0.0.1, port {closed} refuses connections",
        ),
        (DROPBEAR, {}, "initrd's port", f"ok {SAYS}"),
        (OPENSSH, {}, "initrd's port", f"ok {SAYS}"),
        (DROPBEAR, COMMON, "initrd's port", ""),
        (DROPBEAR, COMMON, "shared port", f"ok {SAYS}"),
        (OPENSSH, COMMON, "shared port", f"ok {SAYS}"),
        (DROPBEAR, {}, "host key", "ok pinned and verified"),
        (DROPBEAR, UNPINNED, "host key", NEW),
        (DROPBEAR, OURS, "host key", IMPOSTOR),
        (DROPBEAR, UP | UNPINNED, "host key", NOT_PINNED),
        (DROPBEAR, NO_KEY, "SSH key", MISSING),
        (DROPBEAR, COMMON, "login", "ok root can log in; unlock not tried"),
        (DROPBEAR, UNPINNED, "login", ""),
        (DROPBEAR, NOBODY, "login", REFUSED),
    ],
    ids=[
        "PIN of digits",
        "web port in use",
        "web port of another box",
        "web port of every address",
        "single proxies",
        "nobody there",
        "system up",
        "system refuses",
        "dropbear",
        "OpenSSH",
        "no initrd port of its own",
        "shared port",
        "shared port, system up",
        "pinned",
        "not pinned",
        "another key pinned",
        "not pinned, system up",
        "SSH key missing",
        "login works",
        "no login if not pinned",
        "login refused",
    ],
)
def test_the_table_shows_what_was_seen(
    tmp_path: Path, ident: str, settings: dict[str, str], thing: str, expected: str
) -> None:
    """An SSH server answers at the initrd's port, and another port is open."""
    host_key, listener = new_key(), bind("127.0.0.1", 0)
    initrd = Initrd(tmp_path, Disks({}), public_line(host_key))
    with (
        contextlib.closing(SshServer(listener, host_key, ident, initrd.authorized)),
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        words = {
            "ident": ident,
            "port": listener.getsockname()[1],
            "open": other.getsockname()[1],
            "closed": BASE["WAKER_SYSTEM_SSH_PORT"],
            "line": initrd.host_key,
            "seen": waker.fingerprint(host_key.asbytes()),
            "our_line": initrd.authorized,
            "ours": waker.fingerprint(
                waker.HostKey.parse_all(initrd.authorized)[0].blob
            ),
        }
        usual = {
            "WAKER_INITRD_SSH_PORT": "{port}",
            "WAKER_SSH_KEY": str(initrd.ssh_key),
            "WAKER_SSH_HOST_KEY": "{line}",
        }
        values = (BASE | usual | settings).items()
        config = waker.read_config({n: v.format(**words) for n, v in values}, Path())
        found = waker.check(config, None)
        table = {name: f"{verdict} {seen}" for name, seen, verdict in found}
    assert table.get(thing, "") == expected.format(**words)


FOR_ROOT = "only if waker runs as root; waker.service does not"


@pytest.mark.parametrize(
    ("port", "words"),
    [(1023, FOR_ROOT), (1024, BEHIND_PROXY)],
    ids=["1023", "1024"],
)
def test_a_port_below_1024_is_noted(port: int, words: str) -> None:
    """Even for root: on OpenWrt waker runs as root, but waker.service does not."""
    if os.geteuid():
        pytest.skip("needs root, to listen on port 1023")
    settings = BASE | {"WAKER_LISTEN": f"127.0.0.1:{port}"}
    found = waker.check(waker.read_config(settings, Path()), None)
    table = {name: f"{verdict} {seen}" for name, seen, verdict in found}
    assert table["web port"] == f"- {port} is free, but {words}"


def test_it_ends_silently_when_its_reader_has_gone() -> None:
    with subprocess.Popen(
        [*MODULE, "check"],
        cwd=CHECKOUT,
        env=environment(BASE),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as checking:
        assert checking.stdout
        assert checking.stderr
        assert checking.stdout.readline().startswith(b"ok     configuration")
        checking.stdout.close()
        assert checking.stderr.read() == b""
        assert checking.wait() == -signal.SIGPIPE


def test_it_ends_silently_when_it_is_interrupted() -> None:
    """While it waits for a server that accepts connections and says nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        subprocess.Popen(
            [*MODULE, "check"],
            cwd=CHECKOUT,
            env=environment(
                BASE | {"WAKER_INITRD_SSH_PORT": str(silent.getsockname()[1])}
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as checking,
    ):
        assert checking.stdout
        assert checking.stdout.readline().startswith(b"ok     configuration")
        checking.send_signal(signal.SIGINT)
        _, complaints = checking.communicate(timeout=60)
        assert (checking.returncode, complaints) == (-signal.SIGINT, b"")


def test_control_characters_from_a_port_are_escaped(
    tmp_path: Path,
) -> None:
    (tmp_path / "paramiko.py").touch()  # the real one would take half a second
    listener, ident = bind("127.0.0.1", 0), "SSH-2.0-\x1b[31mred\xff\x07"
    port = str(listener.getsockname()[1])
    with contextlib.closing(SshServer(listener, new_key(), ident)):
        _, table = run(BASE | {"WAKER_SYSTEM_SSH_PORT": port}, tmp_path)
    expected = (
        rf"ok 127.0.0.1, port {port} is open; it says SSH-2.0-\x1b[31mred\xc3\xbf\x07"
    )
    assert table["system's port"] == expected


def test_the_packets_route_is_shown_and_nothing_is_sent(home: Home) -> None:
    router, machine, provider = home
    lan, wan, limited = "192.168.77.1", "198.51.100.2", "255.255.255.255"
    way = "would leave from {} to {}"
    far = f"{way}; {{}} is on another network, and routers stop broadcasts"
    far_server = far.format("{}", "{}", "the server 203.0.113.9")
    far_broadcast = far.format("{}", "{}", "WAKER_HOMELAB_BROADCAST")
    no_broadcast = f"{way}; not a broadcast address of this network; a sleeping server"
    no_broadcast += " cannot receive packets sent to its own address"
    wan_broadcast = "198.51.100.255"
    elsewhere = f"{way}; 192.168.77.20 is reached from {lan} instead; is"
    elsewhere += " WAKER_HOMELAB_BROADCAST right?"
    lost = "Network is unreachable; connect this box to the server's network"
    with machine.capture() as at_machine, provider.capture() as at_provider:
        for box, host, broadcast, source, words, verdict in (
            (router, "192.168.77.20", limited, lan, way, "ok"),
            (router, "203.0.113.9", limited, wan, far_server, "-"),
            (router, "192.168.77.20", "10.7.7.255", wan, far_broadcast, "-"),
            (router, "192.168.77.20", "192.168.77.255", lan, way, "ok"),
            (router, "2001:db8::20", "192.168.77.255", lan, way, "ok"),
            (router, "192.168.77.20", lan, lan, no_broadcast, "-"),
            (router, "192.168.77.20", "192.168.77.30", lan, no_broadcast, "-"),
            (router, "192.168.77.20", wan_broadcast, wan, elsewhere, "-"),
            (machine, "203.0.113.9", limited, "", lost, "WRONG"),
        ):
            where = {"WAKER_HOMELAB_HOST": host, "WAKER_HOMELAB_BROADCAST": broadcast}
            config = waker.read_config(BASE | where, Path())
            found = box.run(partial(waker.check_packet, config))
            assert found == (
                "magic packet",
                words.format(source, broadcast),
                verdict,
            ), where
        assert udp_packets(at_machine) == udp_packets(at_provider) == []


SERVER = "192.168.77.20"
OTHER_MAC = f"- +MAC address +{SERVER} has {{}} according to ARP, not 52:54:00:12:34:56"
NOTHING = r"(?s)\A(?!.*MAC address)"  # ARP does not know a server that is off
RIGHT_MAC = f"ok +MAC address +matches this box's ARP entry for {SERVER}"


@pytest.mark.parametrize(
    ("host", "mac", "words"),
    [
        ("192.168.77.30", "52:54:00:12:34:56", NOTHING),
        (SERVER, "52:54:00:12:34:56", OTHER_MAC.format("02:00:00:00:00:20")),
        (SERVER, "02:00:00:00:00:20", RIGHT_MAC),
    ],
    ids=["server off", "another MAC", "right MAC"],
)
def test_the_mac_address_is_compared_with_arp(
    home: Home, host: str, mac: str, words: str
) -> None:
    router, machine, _ = home
    ip(f"-n {machine.name} link set eth0 address 02:00:00:00:00:20")
    settings = BASE | {"WAKER_HOMELAB_HOST": host, "WAKER_HOMELAB_MAC": mac}
    ended = subprocess.run(
        [*router.command(), *MODULE, "check"],
        cwd=CHECKOUT,
        env=environment(settings),
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(words, ended.stdout), ended.stdout + ended.stderr
