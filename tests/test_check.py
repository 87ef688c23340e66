"""`waker check`: a table that says what does not work, and why."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import MACHINE, PIN, each, need, run_waker
from homelab import bind, public_line
from machine import Machine
from namespaces import IFF_TUN, Home, ip, udp_packets
from ssh_servers import HOST_KEY, Settings, says

OWN = {"PIN": PIN, "LISTEN": "127.0.0.1:0"}
BASE = MACHINE | {f"WAKER_{name}": value for name, value in OWN.items()}
OTHER_KEY = public_line(HOST_KEY)  # which no initrd has
Table = dict[str, str]  # what was checked: the verdict, and what was seen


def run(settings: Settings, *options: str, by: Sequence[str] = ()) -> Table:
    """Run the command; returns the table, which decides the status."""
    ended = run_waker("check", *options, settings=settings, by=by)
    assert ended.stderr == ""
    assert ended.stdout.replace("\n", " ").isprintable()
    lines = ended.stdout.splitlines()
    table = {line[7:22].strip(): f"{line[:7].strip()} {line[22:]}" for line in lines}
    assert ended.returncode == any(seen.startswith("WRONG") for seen in table.values())
    return table


# ---- Ports, keys and login -----------------------------------------------------------


def test_a_server_that_is_off_is_not_wrong(machine: Machine) -> None:
    """The rows are in the order of use."""
    table = run(machine.settings(**OWN))
    verdicts = {subject: seen.partition(" ")[0] for subject, seen in table.items()}
    assert [*verdicts.items()] == [
        *(("configuration", "ok"), ("web port", "ok"), ("magic packet", "ok")),
        *(("initrd's port", "-"), ("system's port", "-")),
        *(("paramiko", "ok"), ("SSH key", "ok"), ("host key", "-")),
    ]


def test_what_is_right_is_shown_and_nothing_is_sent(machine: Machine) -> None:
    table = run(machine.ask().settings(**OWN))
    for subject, seen in (
        ("magic packet", "ok .*127.0.0.1 to 127.255.255.255"),
        (
            "initrd's port",
            f"ok .*port {machine.initrd_port} is open; it says SSH-2.0-d",
        ),
        ("system's port", f"- .*port {machine.system_port} refuses"),
        ("host key", "ok pinned and verified"),
        ("login", "ok root can log in"),
    ):
        assert re.match(seen, table[subject])
    assert machine.commands() == []
    assert machine.packets() == []


SEEN = {
    "PIN": ({"PIN": "24681012"}, {"PIN": "- digits"}),
    "web port in use": ({"LISTEN": "127.0.0.1:INITRD"}, {"web port": "- .*in use"}),
    "one is wrong": (
        {"LISTEN": "203.0.113.9:8080"},
        {"web port": "WRONG", "login": "ok root"},
    ),
    "swapped ports": (
        {"INITRD_SSH_PORT": "CLOSED", "SYSTEM_SSH_PORT": "INITRD"},
        {"system's port": "- .* says SSH-2.0-dropbear.*; are the two ports swapped"},
    ),
    "one port": ({"SYSTEM_SSH_PORT": "INITRD"}, {"login": "ok root can"}),
    "control characters": ({"SYSTEM_SSH_PORT": "RED"}, {"system's port": "ok .*red"}),
    "system up": ({"SYSTEM_SSH_PORT": "MUTE"}, {"host key": "- not seen"}),
    "no pin yet": (
        {"SYSTEM_SSH_PORT": "MUTE", "SSH_HOST_KEY": ""},
        {"host key": "- WAKER_SSH_HOST_KEY is not set; check again"},
    ),
    "no pin": (
        {"SSH_HOST_KEY": ""},
        {
            "host key": "- .*not pinned.*WAKER_SSH_HOST_KEY=ssh-ed25519 AAAA",
            "login": "",
        },
    ),
    "another pin": (
        {"SSH_HOST_KEY": OTHER_KEY},
        {"host key": "WRONG .*pinned SHA256:.*SHA256:", "login": ""},
    ),
    "another user": ({"SSH_USER": "nobody"}, {"login": "WRONG .*SHA256:.*nobody"}),
}


@each("settings expected", SEEN)
def test_the_table_shows_what_was_seen(
    machine: Machine, settings: dict[str, str], expected: dict[str, str]
) -> None:
    """It does not log in to a stranger, nor if no key is pinned."""
    machine.ask()
    red = says(b"SSH-2.0-\x1b[31mred\x07\xc2\x9b\r\n")
    with red as red_port, bind("127.0.0.1", 0) as mute:
        mute.listen()
        mute_port = mute.getsockname()[1]
        ports = {"INITRD": machine.initrd_port, "CLOSED": machine.system_port}
        for name, port in (ports | {"MUTE": mute_port, "RED": red_port}).items():
            settings = {n: v.replace(name, str(port)) for n, v in settings.items()}
        table = run(machine.settings(**OWN | settings))
    for subject, seen in expected.items():
        assert re.fullmatch(f"{seen}.*" if seen else "", table.get(subject, ""))


def test_a_private_key_is_checked_even_if_no_host_key_is_pinned(tmp_path: Path) -> None:
    file = tmp_path / "ssh_key"
    command = [need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "secret", "-f"]
    subprocess.run([*command, str(file)], check=True)
    table = run(BASE | {"WAKER_SSH_KEY": str(file)})
    assert re.match(f"WRONG .*{file} has a passphrase", table["SSH key"])


def test_settings_that_are_open_to_others_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    file.write_text("".join(f"{name}={value}\n" for name, value in BASE.items()))
    for mode, seen in ((0o640, "ok"), (0o604, f"WRONG .*chmod 600 {file}")):
        file.chmod(mode)
        assert re.match(seen, run({}, "--env-file", str(file))["configuration"])


@pytest.mark.parametrize(
    ("tool", "module", "remedy"),
    [
        ("apt", "import no_such_six", "apt install python3-paramiko"),
        (
            "apk",
            "import os; os.TripleDES",
            "apk add python3-paramiko python3-six, or see docs/openwrt.md",
        ),
    ],
)
def test_a_broken_paramiko_is_wrong_and_the_systems_tool_mends_it(
    tmp_path: Path, tool: str, module: str, remedy: str
) -> None:
    (tmp_path / tool).touch(0o755)
    (tmp_path / "paramiko.py").write_text(module)
    table = run(BASE | {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)})
    assert table["paramiko"].startswith("WRONG")
    assert f"install it with: {remedy} (" in table["paramiko"]


# ---- Networks ------------------------------------------------------------------------

NEAR, FAR, LIMITED = "192.168.77.30", "203.0.113.9", "255.255.255.255"


def test_the_packets_route_is_shown_and_nothing_is_sent(home: Home) -> None:
    """Of a server that is off, the ARP table has no MAC address to compare."""
    router, machine, provider = home
    with machine.capture() as at_machine, provider.capture() as at_provider:
        for box, host, broadcast, seen in (
            (router, NEAR, LIMITED, f"ok .* from 192.168.77.1 to {LIMITED}$"),
            (router, NEAR, "10.7.7.255", "- .* from 198.51.100.2 .* another network"),
            (machine, FAR, LIMITED, "WRONG .*unreachable; connect this box"),
        ):
            where = {"WAKER_HOMELAB_HOST": host, "WAKER_HOMELAB_BROADCAST": broadcast}
            table = run(BASE | where, by=box.command())
            assert re.match(seen, table["magic packet"])
            assert "MAC address" not in table
        assert udp_packets(at_machine) == udp_packets(at_provider) == []


def test_a_tunnel_cannot_broadcast(home: Home) -> None:
    """As Tailscale's or WireGuard's, if it has a route to the server."""
    router, _, _ = home
    with router.plug_in(IFF_TUN, "tun0", "10.8.0.2/24"):
        ip(f"-n {router.name} address add 10.9.0.2/24 dev tun0")
        for host, broadcast, seen in (
            ("10.8.0.9", LIMITED, "WRONG .* from 10.8.0.2 .*tun0.*cannot broadcast"),
            ("10.9.0.9", LIMITED, "WRONG .* from 10.9.0.2 .*tun0.*BROADCAST"),
            ("10.8.0.9", "10.8.0.255", "ok .* from 10.8.0.2 "),
            ("192.168.77.20", LIMITED, "ok .* from 192.168.77.1 "),
        ):
            where = {"WAKER_HOMELAB_HOST": host, "WAKER_HOMELAB_BROADCAST": broadcast}
            table = run(BASE | where, by=router.command())
            assert re.match(seen, table["magic packet"])


def test_the_mac_address_is_compared_with_arp(home: Home) -> None:
    """The commonest mistake is the address of another card.

    A stranger that answers in the server's place is not overlooked, but is not wrong: a
    server may have two cards.
    """
    router, machine, _ = home
    seen, mac = "02:00:00:00:00:20", BASE["WAKER_HOMELAB_MAC"]
    ip(f"-n {machine.name} link set eth0 address {seen}")
    ip(f"-n {router.name} neighbour add {NEAR} lladdr {seen} dev lan")
    differs = f"has {seen} .*{mac}.*address"
    for host, own, words in (
        ("192.168.77.20", seen, f"ok {seen}"),
        ("192.168.77.20", mac, f"LOOK 192.168.77.20 {differs}"),
        (NEAR, mac, f"- {NEAR} {differs}"),
    ):
        where = {"WAKER_HOMELAB_HOST": host, "WAKER_HOMELAB_MAC": own}
        assert re.match(words, run(BASE | where, by=router.command())["MAC address"])
