"""The magic packet: its bytes, and the interface by which it leaves."""

import pytest
from conftest import MAC, daemon
from namespaces import Home, home, udp_packets

__all__ = ["home"]  # a fixture

PACKET = bytes.fromhex("ff" * 6 + "525400123456" * 16)


@pytest.mark.parametrize("broadcast", ["255.255.255.255", "192.168.77.255"])
def test_broadcasts_leave_by_the_machines_interface(home: Home, broadcast: str) -> None:
    router, machine, provider = home
    where = {"WAKER_HOMELAB_HOST": "192.168.77.20"}
    settings = MAC | where | {"WAKER_HOMELAB_BROADCAST": broadcast}
    at_machine, at_provider = machine.capture(), provider.capture()
    with at_machine, at_provider, daemon(settings, *router.command()) as started:
        answer = router.run(lambda: started.client.log_in().call("POST", "/api/wol"))
        assert udp_packets(at_machine) == [(f"{broadcast}:9", PACKET)] * 3
        assert udp_packets(at_provider) == []
    assert answer.json["message"].endswith(" from 192.168.77.1")


def test_without_a_route_the_system_says_why(home: Home) -> None:
    _, _, lonely = home
    settings = MAC | {"WAKER_HOMELAB_HOST": "203.0.113.20"}
    with daemon(settings, *lonely.command()) as started:
        answer = lonely.run(lambda: started.client.log_in().call("POST", "/api/wol"))
        started.stop()
    error = "Failed to send WOL packet: Network is unreachable"
    assert (answer.status, answer.error) == (500, error)
    assert started.log[-2].endswith(f"500 {error}")
