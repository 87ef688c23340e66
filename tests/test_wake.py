"""The magic packet: its bytes, and the interface by which it leaves."""

import pytest
from conftest import Client, daemon, need_root
from homelab import Homelab, bind_udp
from namespaces import Namespace, home, udp_packets

import waker

__all__ = ["home"]  # a fixture

MAC = "52:54:00:12:34:56"
PACKET = bytes.fromhex("ff" * 6 + "525400123456" * 16)
Home = tuple[Namespace, Namespace, Namespace]


def test_the_packet_is_102_exact_bytes() -> None:
    packet = waker.magic_packet(waker.Mac.parse("01:23:45:67:89:ab"))
    assert len(packet) == 102
    assert packet[:6] == b"\xff\xff\xff\xff\xff\xff"
    assert packet[6:] == b"\x01\x23\x45\x67\x89\xab" * 16


def test_a_wol_request_wakes_the_machine(owner: Client, lab: Homelab) -> None:
    answer = owner.call("POST", "/api/wol")
    lab.wait_for("locked")
    assert lab.packets[0] == PACKET
    assert answer.status == 200
    assert answer.json == {
        "success": True,
        "message": f"Magic packet sent to {lab.mac} via 127.0.0.1 (lo)",
    }


def test_it_goes_to_udp_port_9_of_the_configured_address_three_times() -> None:
    need_root()
    address = "127.83.12.9"
    settings = {
        "WAKER_HOMELAB_MAC": MAC,
        "WAKER_HOMELAB_HOST": "127.0.0.1",
        "WAKER_HOMELAB_BROADCAST": address,
    }
    with bind_udp(address, 9) as card, daemon(settings) as started:
        card.settimeout(5)
        answer = started.client.log_in().call("POST", "/api/wol")
        assert answer.status == 200, answer.body
        assert [card.recv(2048) for _ in range(3)] == [PACKET] * 3
        card.setblocking(False)
        with pytest.raises(BlockingIOError):
            card.recv(2048)


@pytest.mark.parametrize("broadcast", ["255.255.255.255", "192.168.77.255"])
def test_the_packet_leaves_by_the_machines_interface(
    home: Home, broadcast: str
) -> None:
    router, machine, provider = home
    settings = {
        "WAKER_HOMELAB_MAC": MAC,
        "WAKER_HOMELAB_HOST": "192.168.77.20",
        "WAKER_HOMELAB_BROADCAST": broadcast,
    }
    at_machine, at_provider = machine.capture(), provider.capture()
    with at_machine, at_provider, daemon(settings, *router.command()) as started:
        answer = router.run(lambda: started.client.log_in().call("POST", "/api/wol"))
        assert udp_packets(at_machine) == [(f"{broadcast}:9", PACKET)] * 3
        assert udp_packets(at_provider) == []
    message = f"Magic packet sent to {MAC} via 192.168.77.1 (lan)"
    assert answer.json == {"success": True, "message": message}


def test_without_a_route_the_system_says_why(home: Home) -> None:
    _, _, lonely = home
    settings = {
        "WAKER_HOMELAB_MAC": MAC,
        "WAKER_HOMELAB_HOST": "203.0.113.20",
    }
    with daemon(settings, *lonely.command()) as started:
        answer = lonely.run(lambda: started.client.log_in().call("POST", "/api/wol"))
        assert started.stop() == 0
    assert answer.status == 500
    assert answer.error == "Failed to send WOL packet: Network is unreachable"
    assert "500 Failed to send WOL packet: Network is unreachable" in started.log[-2]


def test_a_host_without_an_ipv4_address_is_woken_by_a_guess_that_says_so(
    home: Home, config: waker.Config
) -> None:
    router, _, provider = home
    machine = config.machine._replace(host="2001:db8::9")
    guess = config._replace(machine=machine, broadcast="255.255.255.255", packet_port=9)
    with provider.capture() as at_provider:
        way = router.run(lambda: waker.send_magic_packet(guess))
        assert udp_packets(at_provider) == [("255.255.255.255:9", PACKET)] * 3
    doubt = "a guess, as 2001:db8::9 has no known IPv4 address"
    assert str(way) == f"198.51.100.2 (wan; {doubt})"


def test_an_interface_without_a_name_for_the_address_is_not_invented() -> None:
    assert waker.interface_of("127.0.0.1") == "lo"
    assert waker.interface_of("192.0.2.77") == "interface unknown"
