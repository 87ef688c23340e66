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
    packet = waker.magic_packet(waker.parse_mac("02:23:45:67:89:ab"))
    assert len(packet) == 102
    assert packet[:6] == b"\xff\xff\xff\xff\xff\xff"
    assert packet[6:] == b"\x02\x23\x45\x67\x89\xab" * 16


def test_a_wol_request_wakes_the_machine(owner: Client, lab: Homelab) -> None:
    answer = owner.call("POST", "/api/wol")
    lab.wait_for("locked")
    assert lab.packets[0] == PACKET
    assert answer.status == 200
    assert answer.json == {
        "success": True,
        "message": f"Magic packet sent to {lab.mac} from 127.0.0.1",
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
    message = f"Magic packet sent to {MAC} from 192.168.77.1"
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
