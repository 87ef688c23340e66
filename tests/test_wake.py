"""The magic packet: its bytes, and the interface that it leaves from."""

import pytest
from conftest import MAC, daemon
from namespaces import Home, home, udp_packets

__all__ = ["home"]  # a fixture

PACKET = bytes.fromhex("ff" * 6 + "525400123456" * 16)


@pytest.mark.parametrize(
    "broadcast", ["255.255.255.255", "192.168.77.255"], ids=["limited", "directed"]
)
def test_the_packet_leaves_from_the_interface_that_leads_to_the_machine(
    home: Home, broadcast: str
) -> None:
    router, machine, provider = home
    settings = MAC | {
        "WAKER_HOMELAB_HOST": "192.168.77.20",
        "WAKER_HOMELAB_BROADCAST": broadcast,
    }
    at_machine, at_provider = machine.capture(), provider.capture()
    with at_machine, at_provider, daemon(settings, *router.command()) as started:
        answer = router.run(lambda: started.client.log_in().call("POST", "/api/wol"))
        assert udp_packets(at_machine) == [(f"{broadcast}:9", PACKET)] * 3
        assert udp_packets(at_provider) == []
    assert answer.json["message"].endswith(" from 192.168.77.1")


def test_a_missing_route_is_reported(home: Home) -> None:
    _, _, isolated = home
    settings = MAC | {"WAKER_HOMELAB_HOST": "203.0.113.20"}
    with daemon(settings, *isolated.command()) as started:
        answer = isolated.run(lambda: started.client.log_in().call("POST", "/api/wol"))
        started.stop()
    error = "Failed to send WOL packet: Network is unreachable"
    assert (answer.status, answer.error) == (500, error)
    assert started.log[-2].endswith(f"500 {error}")
