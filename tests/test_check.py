"""`waker check`: a table that says what does not work, and why."""

import re
import subprocess
from pathlib import Path

import pytest
from conftest import CHECKOUT, MACHINE, MODULE, PIN, environment, need
from homelab import bind, public_line
from machine import Machine
from namespaces import IFF_TUN, Home, ip, udp_packets
from ssh_servers import HOST_KEY

BASE = MACHINE | {"WAKER_PIN": PIN, "WAKER_LISTEN": "127.0.0.1:0"}
OWN = {"PIN": PIN, "LISTEN": "127.0.0.1:0"}
Table = dict[str, str]  # what was checked: the verdict, and what was seen


def run(settings: dict[str, str], *command: str) -> Table:
    """Run the command; returns the table, which decides the status."""
    ended = subprocess.run(
        [*(command or MODULE), "check"],
        cwd=CHECKOUT,
        env=environment(settings),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    table = {line[7:22].strip(): f"{line[:7].strip()} {line[22:]}" for line in lines}
    assert ended.returncode == any(seen.startswith("WRONG") for seen in table.values())
    return table


def test_a_server_that_is_off_is_not_wrong(machine: Machine) -> None:
    """The rows are in the order of use."""
    machine.make_keys()
    table = run(machine.settings(**OWN))
    verdicts = {subject: seen.partition(" ")[0] for subject, seen in table.items()}
    assert [*verdicts.items()] == [
        *(("configuration", "ok"), ("web port", "ok"), ("magic packet", "ok")),
        *(("initrd's port", "-"), ("system's port", "-")),
        *(("paramiko", "ok"), ("SSH key", "ok"), ("host key", "-")),
    ]


SEEN = {
    "web port in use": ({"LISTEN": "127.0.0.1:{initrd}"}, "web port", "- .*in use"),
    "swapped ports": (
        {"INITRD_SSH_PORT": "{closed}", "SYSTEM_SSH_PORT": "{initrd}"},
        *("system's port", "- .* says SSH-2.0-dropbear.*; are the two ports swapped"),
    ),
    "system up": ({"SYSTEM_SSH_PORT": "{open}"}, "host key", "- not seen"),
    "no pin yet": (
        {"SYSTEM_SSH_PORT": "{open}", "SSH_HOST_KEY": ""},
        *("host key", "- WAKER_SSH_HOST_KEY is not set; check again"),
    ),
    "one port": ({"SYSTEM_SSH_PORT": "{initrd}"}, "login", "ok root can"),
}


@pytest.mark.parametrize(("settings", "subject", "seen"), SEEN.values(), ids=[*SEEN])
def test_the_table_shows_what_was_seen(
    machine: Machine, settings: dict[str, str], subject: str, seen: str
) -> None:
    machine.ask()
    with bind("127.0.0.1", 0) as mute:
        mute.listen()
        ports = {"initrd": machine.initrd_port, "closed": machine.system_port}
        ports["open"] = mute.getsockname()[1]
        values = {name: value.format(**ports) for name, value in settings.items()}
        table = run(machine.settings(**OWN | values))
    assert re.match(seen, table[subject])


def test_it_does_not_log_in_to_a_stranger(machine: Machine) -> None:
    """Nor if no key is pinned."""
    machine.ask()
    for pinned in ("", public_line(HOST_KEY)):
        table = run(machine.settings(SSH_HOST_KEY=pinned, **OWN))
        assert "pinned" in table["host key"]
        assert "login" not in table


def test_settings_that_are_open_to_others_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "waker.env"
    file.write_text("".join(f"{name}={value}\n" for name, value in BASE.items()))
    for mode, seen in ((0o640, "ok"), (0o604, f"WRONG .*chmod 600 {file}")):
        file.chmod(mode)
        table = run({}, *MODULE, "--env-file", str(file))
        assert re.match(seen, table["configuration"])


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


def test_the_packets_route_is_shown_and_nothing_is_sent(home: Home) -> None:
    """Of a server that is off, the ARP table has no MAC address to compare."""
    router, machine, provider = home
    near, limited = "192.168.77.30", "255.255.255.255"
    with machine.capture() as at_machine, provider.capture() as at_provider:
        for box, host, broadcast, seen in (
            (router, near, limited, f"ok .* from 192.168.77.1 to {limited}$"),
            (router, near, "10.7.7.255", "- .* from 198.51.100.2 .* another network"),
            (machine, "203.0.113.9", limited, "WRONG .*unreachable; connect this box"),
        ):
            where = {"WAKER_HOMELAB_HOST": host, "WAKER_HOMELAB_BROADCAST": broadcast}
            table = run(BASE | where, *box.command(), *MODULE)
            assert re.match(seen, table["magic packet"])
            assert "MAC address" not in table
        assert udp_packets(at_machine) == udp_packets(at_provider) == []


def test_a_tunnel_cannot_broadcast(home: Home) -> None:
    """As Tailscale's or WireGuard's, if it has a route to the server."""
    router, _, _ = home
    limited, directed = "255.255.255.255", "10.8.0.255"
    with router.plug_in(IFF_TUN, "tun0", "10.8.0.2/24"):
        ip(f"-n {router.name} address add 10.9.0.2/24 dev tun0")
        for host, broadcast, seen in (
            ("10.8.0.9", limited, "WRONG .* from 10.8.0.2 .*tun0.*cannot broadcast"),
            ("10.9.0.9", limited, "WRONG .* from 10.9.0.2 .*tun0.*BROADCAST"),
            ("10.8.0.9", directed, "ok .* from 10.8.0.2 "),
            ("192.168.77.20", limited, "ok .* from 192.168.77.1 "),
        ):
            where = {"WAKER_HOMELAB_HOST": host, "WAKER_HOMELAB_BROADCAST": broadcast}
            table = run(BASE | where, *router.command(), *MODULE)
            assert re.match(seen, table["magic packet"])


def test_a_stranger_that_answers_in_the_servers_place_is_not_overlooked(
    home: Home,
) -> None:
    """But is not wrong: a server may have two cards."""
    router, machine, _ = home
    seen = "02:00:00:00:00:20"
    ip(f"-n {machine.name} link set eth0 address {seen}")
    ip(f"-n {router.name} neighbour add 192.168.77.30 lladdr {seen} dev lan")
    for host, verdict in (("192.168.77.20", "LOOK"), ("192.168.77.30", "-")):
        where = {"WAKER_HOMELAB_HOST": host}
        table = run(BASE | where, *router.command(), *MODULE)
        words = f"{verdict} {host} has {seen} .*{BASE['WAKER_HOMELAB_MAC']}.*address"
        assert re.match(words, table["MAC address"])


def test_a_private_key_is_checked_even_if_no_host_key_is_pinned(tmp_path: Path) -> None:
    file = tmp_path / "ssh_key"
    command = [need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "secret", "-f"]
    subprocess.run([*command, str(file)], check=True)
    table = run(BASE | {"WAKER_SSH_KEY": str(file)})
    assert re.match(f"WRONG .*{file} has a passphrase", table["SSH key"])
