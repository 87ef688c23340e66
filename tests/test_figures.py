"""Figures that README and docs promise, as numbers.

A test that compares with the program's own constant cannot notice that it changed.
The tests of each section count attempts, tokens, disks and fields.
"""

import pytest

import waker

FIGURES = {
    "SYSTEM_SECONDS": 8,
    "PACKET_SECONDS": 10,
    "RETRY_SECONDS": 5,
    "READY_SECONDS": 120,
    "DOUBT_SECONDS": 45,
    "START_SECONDS": 600,
    "SHOWN_SECONDS": 3600,
    "UNLOCK_SECONDS": 90,
    "TOKEN_SECONDS": 900,
    "ATTEMPT_SECONDS": 60,
    "MAX_CLIENTS": 4096,
    "MAX_HEAD": 16384,
    "MAX_BODY": 16384,
    "MAX_CONNECTIONS": 64,
    "CLIENT_SECONDS": 10,
    "MAX_MEMORY": 64 * 1024 * 1024,
}


@pytest.mark.parametrize(("figure", "promised"), FIGURES.items())
def test_a_limit_is_as_promised(figure: str, promised: float) -> None:
    assert getattr(waker, figure) == promised


def test_magic_packets_go_to_port_9_and_an_unlock_by_hand_has_90_seconds() -> None:
    assert waker.Config().packet_port == 9
    assert waker.parse_arguments(["unlock"]).seconds == 90
