"""Figures that README and docs promise, as numbers.

A test that compares with the program's own constant cannot notice that it changed.
"""

import pytest

import waker


@pytest.mark.parametrize(
    ("figure", "promised"),
    [
        ("PACKET_SECONDS", 10),
        ("RETRY_SECONDS", 5),
        ("READY_SECONDS", 120),
        ("DOUBT_SECONDS", 45),
        ("START_SECONDS", 600),
        ("UNLOCK_SECONDS", 90),
        ("PROBE_SECONDS", 0.4),
        ("LOST_SECONDS", 10),
        ("PROMPT_SECONDS", 50),
        ("NEXT_PROMPT_SECONDS", 15),
        ("MAX_DISKS", 16),
        ("SHOWN_SECONDS", 3600),
        ("TOKEN_SECONDS", 900),
        ("MAX_TOKENS", 64),
        ("MAX_ATTEMPTS", 10),
        ("ATTEMPT_SECONDS", 60),
        ("MAX_CLIENTS", 4096),
        ("MAX_HEAD", 16384),
        ("MAX_FIELDS", 100),
        ("MAX_BODY", 16384),
        ("MAX_CONNECTIONS", 64),
        ("CLIENT_SECONDS", 10),
        ("DRAIN_SECONDS", 2),
        ("MAX_MEMORY", 64 * 1024 * 1024),
        ("MAX_LOG_LINE", 1000),
    ],
)
def test_a_limit_is_as_promised(figure: str, promised: float) -> None:
    assert getattr(waker, figure) == promised


def test_magic_packets_go_to_port_9() -> None:
    assert waker.Config().packet_port == 9


def test_an_unlock_by_hand_has_90_seconds() -> None:
    assert waker.parse_arguments(["unlock"]).seconds == 90
