"""`waker.py check`: why it does not work, in one table."""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import paramiko
import pytest
from conftest import CHECKOUT, MACHINE, MODULE, PIN, environment, run_waker
from cryptroot_unlock import Disks
from homelab import DROPBEAR, OPENSSH, Homelab, SshServer, bind, new_key, public_line
from namespaces import Namespace, home, udp_packets
from ssh_servers import free_port, prepare

import waker

BASE = MACHINE | {
    "WAKER_PIN": PIN,
    "WAKER_LISTEN": "127.0.0.1:0",
    "WAKER_INITRD_SSH_PORT": str(free_port()),
    "WAKER_SYSTEM_SSH_PORT": str(free_port()),
}
OTHER_KEY = new_key()
OTHER = {"WAKER_SSH_HOST_KEY": public_line(OTHER_KEY)}
UNPINNED = {"WAKER_SSH_HOST_KEY": ""}
NOT_SEEN = "- not seen; check again while the initrd waits for its passphrase"
NOT_PINNED = "- no host key is pinned; run waker check while the initrd waits"
Table = dict[str, str]  # of each thing: the verdict, and what was seen
__all__ = ["home"]  # a fixture
Home = tuple[Namespace, Namespace, Namespace]


def check(settings: dict[str, str]) -> Table:
    config = waker.read_config(settings, Path())
    findings = list(waker.check(config, None))
    table = {thing: f"{verdict} {seen}" for thing, seen, verdict in findings}
    assert len(table) == len(findings)
    return table


def run(settings: dict[str, str], folder: Path, mode: int = 0o640) -> tuple[int, Table]:
    """Run the command; returns its status, and the table.

    The folder gets a file with the settings; a paramiko.py in it would be imported.
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


@contextlib.contextmanager
def ssh_server(folder: Path, ident: str = DROPBEAR) -> Iterator[dict[str, str]]:
    """Run an initrd's; yields the settings for it."""
    _, ssh_key, authorized = prepare(folder, Disks({}))
    host_key, listener = new_key(), bind("127.0.0.1", 0)
    with contextlib.closing(SshServer(listener, host_key, ident, authorized)):
        yield BASE | {
            "WAKER_INITRD_SSH_PORT": str(listener.getsockname()[1]),
            "WAKER_SSH_KEY": str(ssh_key),
            "WAKER_SSH_HOST_KEY": public_line(host_key),
        }


def test_a_machine_that_is_off_is_nothing_wrong(lab: Homelab, tmp_path: Path) -> None:
    status, table = run(BASE | lab.settings(), tmp_path)
    key = table["SSH key"]
    assert key.startswith("ok ecdsa-sha2-nistp256 SHA256:")
    assert table == {
        "configuration": "ok every value is right",
        "web port": "ok 0 is free",
        "magic packet": "ok would leave from 127.0.0.1 to 127.0.0.1",
        "initrd's port": f"- {lab.initrd_port} does not answer",
        "system's port": f"- {lab.system_port} does not answer",
        "paramiko": f"ok {paramiko.__version__}",
        "host key": NOT_SEEN,
        "SSH key": key,
    }
    assert status == 0


@pytest.mark.parametrize(
    ("mode", "paramiko", "thing", "told"),
    [
        (0o604, "", "configuration", "{0} is open to others; chmod 600 {0}"),
        (
            0o640,
            "import no_such_six",
            "paramiko",
            f"{waker.NO_PARAMIKO} (No module named 'no_such_six')",
        ),
        (
            0o640,
            "import os; os.TripleDES",
            "paramiko",
            f"{waker.NO_PARAMIKO} (module 'os' has no attribute 'TripleDES')",
        ),
    ],
)
def test_a_box_with_anything_wrong_is_told_by_the_status_as_well(
    tmp_path: Path, mode: int, paramiko: str, thing: str, told: str
) -> None:
    (tmp_path / "paramiko.py").write_text(paramiko)
    status, table = run(BASE, tmp_path, mode)
    assert table[thing] == f"WRONG {told.format(tmp_path / 'waker.env')}"
    assert status == 1


TAKEN = "- Address already in use; correct WAKER_LISTEN, unless waker itself is running"
ABROAD = "WRONG Cannot assign requested address; correct WAKER_LISTEN"
# The service is not root, whoever checks.
LOW = "WRONG 81 needs root; use 1024 or above"
DIGITS = "- digits only: enough behind a VPN, not on the internet"
EVERYBODY = {"WAKER_HOMELAB_HOST": "255.255.255.255", "WAKER_SYSTEM_SSH_PORT": "22"}
WHERE = "- 22 could not be checked; is WAKER_HOMELAB_HOST right?"
NO_KEY = {"WAKER_SSH_KEY": "/nowhere"}


@pytest.mark.parametrize(
    ("settings", "thing", "told"),
    [
        ({"WAKER_PIN": "24681012"}, "PIN", DIGITS),
        ({"WAKER_LISTEN": "127.0.0.1:{0}"}, "web port", TAKEN),
        ({"WAKER_LISTEN": "203.0.113.9:8080"}, "web port", ABROAD),
        ({"WAKER_LISTEN": "127.0.0.1:81"}, "web port", LOW),
        (EVERYBODY, "system's port", WHERE),
        (NO_KEY, "SSH key", "WRONG SSH key /nowhere is missing or empty"),
        (NO_KEY, "host key", NOT_PINNED),
    ],
)
def test_what_can_be_seen_without_the_machine_is_told(
    settings: dict[str, str], thing: str, told: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        more = {name: value.format(port) for name, value in settings.items()}
        assert check(BASE | more)[thing] == told


def test_an_initrd_that_waits_is_logged_in_to(tmp_path: Path) -> None:
    with ssh_server(tmp_path) as settings:
        port, closed = (
            settings[f"WAKER_{name}_SSH_PORT"] for name in ("INITRD", "SYSTEM")
        )
        table = check(settings)
        assert table["initrd's port"] == f"ok {port} is open; it says {DROPBEAR}"
        assert table["system's port"] == f"- {closed} refuses connections"
        assert table["host key"] == "ok pinned and verified"
        assert table["login"] == "ok root can log in; unlock not tried"
        common = check(settings | {"WAKER_SYSTEM_SSH_PORT": port})
        assert common["common port"] == table["initrd's port"]
        assert common["login"] == table["login"]
        assert not common.keys() & {"initrd's port", "system's port"}
        OTHER_KEY.write_private_key_file(settings["WAKER_SSH_KEY"])
        refused = check(settings)["login"]
    assert refused.startswith(
        f"WRONG the initrd refused our key {waker.fingerprint(OTHER_KEY.asbytes())}"
    )


NEW = (
    "- {seen} is not pinned yet. If this key is your machine's, set"
    " WAKER_SSH_HOST_KEY={line}"
)
IMPOSTOR = (
    "WRONG the host key differs: pinned {other}, seen {seen}."
    " Is the system already up? If not, suspect an impostor"
)


@pytest.mark.parametrize(
    ("up", "pins", "told"),
    [
        (False, UNPINNED, NEW),
        (False, OTHER, IMPOSTOR),  # which is not to be pasted
        (True, UNPINNED, NOT_PINNED),
        (True, OTHER, NOT_SEEN),
    ],
)
def test_only_the_host_key_of_an_initrd_that_waits_is_told(
    tmp_path: Path, up: bool, pins: dict[str, str], told: str
) -> None:
    with bind("127.0.0.1", 0) as system, ssh_server(tmp_path) as settings:
        if up:
            system.listen()
        settings["WAKER_SYSTEM_SSH_PORT"] = str(system.getsockname()[1])
        table = check(settings | pins)
    line = settings["WAKER_SSH_HOST_KEY"]
    seen = waker.fingerprint(waker.HostKey.parse(line).blob)
    other = waker.fingerprint(OTHER_KEY.asbytes())
    assert table["host key"] == told.format(seen=seen, line=line, other=other)
    assert "login" not in table


def test_an_openssh_where_dropbear_should_be_is_wrong_and_not_to_be_pinned(
    tmp_path: Path,
) -> None:
    with ssh_server(tmp_path, OPENSSH) as settings:
        table = check(settings | UNPINNED)
        systemd = check(settings | {"WAKER_INITRD": "systemd"})
    told = ": is this the booted system? If not, set WAKER_INITRD=systemd"
    right = systemd["initrd's port"]
    assert right.endswith(OPENSSH)
    assert table["initrd's port"] == right.replace("ok", "WRONG", 1) + told
    assert table["host key"] == NOT_PINNED
    assert systemd["login"].startswith("ok")


def test_it_ends_without_a_word_when_nobody_reads_on() -> None:
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


def test_what_a_port_says_is_shown_with_its_control_characters_escaped(
    tmp_path: Path,
) -> None:
    (tmp_path / "paramiko.py").touch()  # the real one would take half a second
    with bind("127.0.0.1", 0) as listener, ThreadPoolExecutor() as pool:
        listener.listen()
        listener.settimeout(60)
        port = str(listener.getsockname()[1])
        running = pool.submit(run, BASE | {"WAKER_SYSTEM_SSH_PORT": port}, tmp_path)
        with listener.accept()[0] as tcp:
            tcp.sendall(b"\x1b[31m\xff\x00red\x07\r\nand its key exchange")
        _, table = running.result()
    seen = rf"{port} is open; it says \x1b[31m\xff\x00red\x07"
    assert table["system's port"] == f"ok {seen}"


def test_the_way_of_the_packet_is_told_and_none_is_sent(home: Home) -> None:
    router, machine, provider = home
    lan, wan, limited = "192.168.77.1", "198.51.100.2", "255.255.255.255"
    way = "would leave from {} to {}"
    far = f"{way}; the machine is on another network, and routers stop broadcasts"
    lost = "Network is unreachable; connect this box to the machine's network"
    with machine.capture() as at_machine, provider.capture() as at_provider:
        for box, host, broadcast, source, told, verdict in (
            (router, "192.168.77.20", limited, lan, way, "ok"),
            (router, "203.0.113.9", limited, wan, far, "-"),
            (router, "192.168.77.20", "192.168.77.255", lan, way, "ok"),
            (router, "192.168.77.20", "10.7.7.255", wan, far, "-"),
            (machine, "203.0.113.9", limited, "", lost, "WRONG"),
        ):
            where = {"WAKER_HOMELAB_HOST": host, "WAKER_HOMELAB_BROADCAST": broadcast}
            config = waker.read_config(BASE | where, Path())
            found = box.run(partial(waker.check_packet, config))
            assert found == ("magic packet", told.format(source, broadcast), verdict)
        assert udp_packets(at_machine) == udp_packets(at_provider) == []
