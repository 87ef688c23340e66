"""`waker check`: a table that says what does not work, and why."""

import contextlib
import json
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path

import paramiko
import pytest
from conftest import CHECKOUT, MACHINE, MODULE, PIN, environment, run_waker
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptroot_unlock import Disks
from homelab import DROPBEAR, OPENSSH, Homelab, SshServer, bind, new_key, public_line
from namespaces import Home, udp_packets
from ssh_servers import Initrd, free_port

import waker

BASE = MACHINE | {
    "WAKER_PIN": PIN,
    "WAKER_LISTEN": "127.0.0.1:0",
    "WAKER_INITRD_SSH_PORT": str(free_port()),
    "WAKER_SYSTEM_SSH_PORT": str(free_port()),
}
NOT_SEEN = "- not seen; check again while the initrd waits for its passphrase"
Table = dict[str, str]  # what was checked: the verdict, and what was seen


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
    """The rows are in the order of use."""
    status, table = run(BASE | lab.settings(), tmp_path)
    seen = {
        "configuration": "ok all settings are valid",
        "web port": "ok 0 is free",
        "magic packet": "ok would leave from 127.0.0.1 to 127.255.255.255",
        "initrd's port": f"- 127.0.0.1, port {lab.initrd_port} does not answer",
        "system's port": f"- 127.0.0.1, port {lab.system_port} does not answer",
        "paramiko": f"ok {paramiko.__version__}",
        "SSH key": table["SSH key"],
        "host key": NOT_SEEN,
    }
    assert [*table.items()] == [*seen.items()]
    assert table["SSH key"].startswith("ok ecdsa-sha2-nistp256 SHA256:")
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
    remedy = waker.explain_no_paramiko()
    assert wrong == {"paramiko": f"WRONG {remedy} ({reason})"}
    assert status == 1
    key = str(tmp_path / "ssh_key")
    new_key().write_private_key_file(key)
    settings = {"WAKER_SSH_KEY": key, "WAKER_SSH_HOST_KEY": public_line(new_key())}
    settings["PYTHONPATH"] = str(tmp_path)
    ended = run_waker("unlock", settings=BASE | settings, given="x")
    message = f"{remedy}. The passphrase was not sent."
    assert json.loads(ended.stdout)["message"] == message


@pytest.mark.parametrize(
    ("tool", "remedy"),
    [
        ("apt", "apt install python3-paramiko"),
        ("opkg", "opkg install python3-paramiko"),
        ("apk", "apk add python3-paramiko python3-six"),
        ("another", "pip install paramiko"),
    ],
)
def test_the_systems_own_command_installs_paramiko(
    tmp_path: Path, tool: str, remedy: str
) -> None:
    (tmp_path / tool).touch(0o755)
    (tmp_path / "paramiko.py").write_text("import no_such_six")
    settings = BASE | {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    assert (
        f"install it with: {remedy} (" in run_waker("check", settings=settings).stdout
    )


@pytest.mark.parametrize("mode", [0o602, 0o604], ids=["writable", "readable"])
def test_settings_that_are_open_to_others_are_wrong(
    lab: Homelab, tmp_path: Path, mode: int
) -> None:
    """Even if everything after them is right."""
    status, table = run(BASE | lab.settings(), tmp_path, mode)
    file = tmp_path / "waker.env"
    problem = f"WRONG {file} is open to others; chmod 600 {file}"
    assert table["configuration"] == problem
    wrong = [thing for thing, seen in table.items() if seen.startswith("WRONG")]
    assert (status, wrong) == (1, ["configuration"])
    assert table["host key"] == NOT_SEEN


NOBODY_THERE = {"WAKER_HOMELAB_HOST": "127.255.255.255", "WAKER_SYSTEM_SSH_PORT": "22"}
WHERE = "- 127.255.255.255, port 22 could not be checked; is WAKER_HOMELAB_HOST right?"
COMMON = {"WAKER_SYSTEM_SSH_PORT": "{port}"}  # of initrd and system
UP = {"WAKER_SYSTEM_SSH_PORT": "{open}"}
SWAPPED = {"WAKER_INITRD_SSH_PORT": "{closed}", "WAKER_SYSTEM_SSH_PORT": "{port}"}
UNPINNED = {"WAKER_SSH_HOST_KEY": ""}
IMPOSTOR = {"WAKER_SSH_HOST_KEY": "{our_line}"}  # pins another key
OPEN = "ok 127.0.0.1, port {port} is open; it says {ident}"
SEEN = {
    "web port in use": (
        *(DROPBEAR, {"WAKER_LISTEN": "127.0.0.1:{open}"}),
        *("web port", "- WAKER_LISTEN: Address already in use"),
    ),
    "nobody there": (DROPBEAR, NOBODY_THERE, "system's port", WHERE),
    "no banner": (
        *(DROPBEAR, UP, "system's port"),
        "ok 127.0.0.1, port {open} is open; it says nothing",
    ),
    "OpenSSH": (OPENSSH, {}, "initrd's port", OPEN),
    "swapped ports": (
        *(DROPBEAR, SWAPPED, "system's port"),
        "- 127.0.0.1, port {port} is open; it says {ident}; are the two ports swapped?",
    ),
    "shared port": (DROPBEAR, COMMON, "system's port", OPEN),
    "shared port, initrd up": (DROPBEAR, COMMON, "login", "ok root can log in"),
    "shared port, system up": (OPENSSH, COMMON, "host key", NOT_SEEN),
    "own port, system up": (DROPBEAR, UP | UNPINNED, "host key", NOT_SEEN),
    "host key not pinned": (
        *(DROPBEAR, UNPINNED, "host key"),
        "- the host key {seen} is not pinned",
    ),
    "no login if not pinned": (DROPBEAR, UNPINNED, "login", ""),
    "another key pinned": (
        *(DROPBEAR, IMPOSTOR, "host key"),
        "WRONG the host key differs: pinned {ours}, seen {seen}.",
    ),
    "no login at an impostor's": (DROPBEAR, IMPOSTOR, "login", ""),
}


@pytest.mark.parametrize(
    ("ident", "settings", "thing", "expected"), SEEN.values(), ids=[*SEEN]
)
def test_the_table_shows_what_was_seen(
    tmp_path: Path, ident: str, settings: dict[str, str], thing: str, expected: str
) -> None:
    """An SSH server answers at the initrd's port, and another port is open."""
    host_key, listener = new_key(), bind("127.0.0.1", 0)
    initrd = Initrd(tmp_path, Disks({}), public_line(host_key))
    (ours,) = waker.parse_host_keys(initrd.authorized)
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
            "ours": waker.fingerprint(ours),
        }
        usual = {
            "WAKER_INITRD_SSH_PORT": "{port}",
            "WAKER_SSH_KEY": str(initrd.ssh_key),
            "WAKER_SSH_HOST_KEY": "{line}",
        }
        values = (BASE | usual | settings).items()
        status, table = run({n: v.format(**words) for n, v in values}, tmp_path)
    if expected:
        assert table[thing].startswith(expected.format(**words))
    else:
        assert thing not in table
    assert status == any(seen.startswith("WRONG") for seen in table.values())


OWN = Ed25519PrivateKey.generate()
GOOD = OWN.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
PKCS8 = OWN.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
LOCKED = OWN.private_bytes(  # one round: each process of pytest makes this key
    Encoding.PEM,
    PrivateFormat.OpenSSH,
    PrivateFormat.OpenSSH.encryption_builder().kdf_rounds(1).build(b"secret"),
)
LOCKED_PKCS8 = OWN.private_bytes(
    Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
)
UNUSABLE = "WRONG SSH key {} has a passphrase, is damaged, or not in OpenSSH's format"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (GOOD, "ok ssh-ed25519 SHA256:"),
        (GOOD[:150], UNUSABLE),
        (LOCKED, UNUSABLE),
        (PKCS8, UNUSABLE),
        (LOCKED_PKCS8, UNUSABLE),
        (None, "WRONG SSH key {} is missing; correct the path, or make it with:"),
    ],
    ids=["right", "damaged", "locked", "PKCS#8", "locked PKCS#8", "missing"],
)
def test_a_private_key_is_loaded_without_a_host_key_too(
    tmp_path: Path, key: bytes | None, words: str
) -> None:
    file = tmp_path / "ssh_key"
    if key:
        file.touch(0o600)
        file.write_bytes(key)
    status, table = run(BASE, tmp_path)
    assert table["SSH key"].startswith(words.format(file))
    assert status == (key != GOOD)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGPIPE])
def test_it_ends_silently_when_interrupted_or_when_its_reader_has_gone(
    number: signal.Signals,
) -> None:
    """While it waits for a server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = {"WAKER_INITRD_SSH_PORT": str(silent.getsockname()[1])}
        with subprocess.Popen(
            [*MODULE, "check"],
            cwd=CHECKOUT,
            env=environment(BASE | port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as checking:
            assert checking.stdout
            assert checking.stderr
            assert checking.stdout.readline().startswith(b"ok     configuration")
            if number is signal.SIGPIPE:
                checking.stdout.close()
            else:
                checking.send_signal(number)
            assert checking.stderr.read() == b""
            assert checking.wait(60) == -number


def test_the_packets_route_is_shown_and_nothing_is_sent(home: Home) -> None:
    router, machine, provider = home
    lan, wan, limited = "192.168.77.1", "198.51.100.2", "255.255.255.255"
    near = "ok", "would leave from {} to {}"
    far = "-", f"{near[1]}; that is another network, and routers stop broadcasts"
    fix = "connect this box to the server's network"
    lost = "WRONG", f"Network is unreachable; {fix}"
    with machine.capture() as at_machine, provider.capture() as at_provider:
        for box, host, broadcast, source, (verdict, words) in (
            (router, "192.168.77.20", limited, lan, near),
            (router, "192.168.77.20", "192.168.77.255", lan, near),
            (router, "2001:db8::20", "192.168.77.255", lan, near),
            (router, "203.0.113.9", limited, wan, far),
            (router, "192.168.77.20", "10.7.7.255", wan, far),
            (machine, "203.0.113.9", limited, "", lost),
        ):
            where = {"WAKER_HOMELAB_HOST": host, "WAKER_HOMELAB_BROADCAST": broadcast}
            config = waker.read_config(BASE | where, Path())
            check = partial(list[waker.Finding], waker.check_box(config, None))
            expected = "magic packet", words.format(source, broadcast), verdict
            assert box.run(check)[-1] == expected, where
        assert udp_packets(at_machine) == udp_packets(at_provider) == []


def test_the_mac_address_of_a_server_that_is_off_is_unknown(home: Home) -> None:
    """It is in the ARP table, without a MAC address."""
    router, _, _ = home
    ended = subprocess.run(
        [*router.command(), *MODULE, "check"],
        cwd=CHECKOUT,
        env=environment(BASE | {"WAKER_HOMELAB_HOST": "192.168.77.30"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "system's port" in ended.stdout, ended.stderr
    assert "MAC address" not in ended.stdout
