"""Real machines: woken, unlocked and booted, with their consoles as the witness."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
from computer import MAC, Computer, Lan, Owner, home_lan, owner_of
from conftest import PASSPHRASE, need
from guests import GUESTS, ready

import waker

KINDS = {guest.name: guest for guest in GUESTS}
RIGHT = waker.parse_mac(MAC)

# What the console shows for a wrong passphrase, and how often: systemd 257 takes each
# of them for two. And what Debian's shows when it asks, and when it was answered.
WRONG = {
    "cryptroot": ("No key available with this passphrase.", 1),
    "systemd": ("Failed to activate with specified passphrase", 2),
}
ASKING = "Please unlock disk cryptroot: "
TAKEN = f"{ASKING}\n"

LOST = "the connection was lost after the passphrase was sent"
SILENT = "no answer came after the passphrase was sent"
UP_THOUGH = {f"{why}; then the system's SSH answered." for why in (LOST, SILENT)}
NOT_CONFIRMED = (
    f"Failed to unlock: not confirmed: {LOST}; the machine may be booting, or have lost"
    " its power. The passphrase was sent."
)
OPEN = "no passphrase is needed: every disk is already open"
FASTER = [
    (200, f"{OPEN}. The passphrase was not sent."),
    *(
        (500, f"Failed to unlock: {reason}. The passphrase was not sent.")
        for reason in (
            "no disk asks for a passphrase: too early, or already open",
            "the unlock command ended without asking; try again",
            "the connection was lost before a disk asked; try again",
        )
    ),
]

Start = Callable[[str], tuple[Computer, Owner]]
Told = tuple[int, str]


@pytest.fixture(scope="session")
def guests() -> None:
    need("qemu-system-x86_64")
    ready()


@pytest.fixture
def lan() -> Iterator[Lan]:
    with home_lan() as lan:
        yield lan


@pytest.fixture
def start(guests: None, lan: Lan, tmp_path: Path) -> Iterator[Start]:
    """Sets up a machine that is off, and waker beside it."""
    with contextlib.ExitStack() as stack:

        def start(name: str) -> tuple[Computer, Owner]:
            guest = KINDS[name]
            computer = Computer(guest, lan, tmp_path / "console")
            stack.callback(lambda: print(computer.console))  # where a test fails
            stack.callback(computer.cut_power)
            return computer, stack.enter_context(owner_of(guest, lan))

        yield start


def wake(computer: Computer, owner: Owner) -> None:
    """Have a machine woken, and wait until it is locked."""
    owner.wait_for("off", 3)
    assert owner.call("POST", "/api/wol").status == 200
    assert computer.hear()
    owner.wait_for("locked")


def broadcast(packet: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.sendto(packet, ("192.168.77.255", 9))


def in_background(owner: Owner, passphrase: str) -> tuple[Thread, list[Told]]:
    """Begin an unlock; what it told will be in the list when the thread ends."""
    told: list[Told] = []
    thread = Thread(target=lambda: told.append(owner.unlock(passphrase)))
    thread.start()
    return thread, told


def see_it_boot(computer: Computer, owner: Owner) -> None:
    """Wait until waker and the guest agree that the system is up."""
    owner.wait_for("up")
    computer.wait_for("guest login:")


@pytest.mark.parametrize("name", KINDS)
def test_a_machine_is_woken_unlocked_and_seen_to_boot(start: Start, name: str) -> None:
    computer, owner = start(name)
    guest = computer.guest
    wake(computer, owner)
    status, error = owner.unlock("wrong")
    assert (status, error.partition(".")[0]) == (
        400,
        "Wrong passphrase for disk cryptroot",
    )
    text, count = WRONG[guest.dialect]
    computer.wait_for(text, count)
    assert owner.state() == "locked"
    began = time.monotonic()
    unlocked = {f"Unlocked: {', '.join(guest.disks)}."}
    if guest.name == "slow":  # its SSH may end before it has told
        unlocked |= UP_THOUGH
    status, message = owner.unlock(PASSPHRASE)
    assert status == 200
    assert message in unlocked
    assert guest.name != "slow" or time.monotonic() - began > 10
    see_it_boot(computer, owner)
    assert computer.console.count(text) == count
    status, error = owner.unlock(PASSPHRASE)
    assert status == 500
    reason = "host key differs" if guest.port == 22 else "Connection refused"
    assert reason in error
    assert error.endswith("The passphrase was not sent.")


def test_only_the_right_magic_packet_switches_a_machine_on(
    start: Start, lan: Lan
) -> None:
    computer, owner = start("dropbear")
    other = waker.parse_mac("52:54:00:12:34:57")
    for packet in (waker.magic_packet(other), waker.magic_packet(RIGHT)[:-1]):
        lan.router.run(partial(broadcast, packet))
        assert not computer.hear()
    assert not computer.is_on()
    assert owner.state() == "off"
    assert owner.unlock(PASSPHRASE)[1].endswith("The passphrase was not sent.")


def test_three_wrong_passphrases_leave_debian_asking(start: Start) -> None:
    computer, owner = start("dropbear")
    wake(computer, owner)
    for _ in range(3):
        assert owner.unlock("wrong") == (400, "Wrong passphrase for disk cryptroot.")
    computer.wait_for("maximum number of tries exceeded")
    assert owner.unlock("wrong") == (400, "Wrong passphrase for disk cryptroot.")
    assert owner.unlock(PASSPHRASE) == (200, "Unlocked: cryptroot.")
    see_it_boot(computer, owner)


def test_systemd_gives_up_only_after_a_warning(start: Start) -> None:
    computer, owner = start("dracut")
    wake(computer, owner)
    status, error = owner.unlock("wrong")
    assert status == 400
    assert "after another wrong passphrase, systemd may give up" in error
    assert "Emergency" not in computer.console
    status, error = owner.unlock("wrong again")
    assert status == 500
    assert "the initrd has given up on a disk" in error
    assert error.endswith("The passphrase was sent.")
    computer.wait_for("Emergency")
    status, error = owner.unlock(PASSPHRASE)
    assert status == 500
    assert "the initrd has given up on a disk" in error
    assert error.endswith("The passphrase was not sent.")


def test_power_that_fails_during_an_unlock_is_told_as_a_loss(start: Start) -> None:
    computer, owner = start("slow")
    wake(computer, owner)
    thread, told = in_background(owner, PASSPHRASE)
    computer.wait_for(TAKEN)
    assert owner.unlock(PASSPHRASE)[0] == 409
    computer.cut_power()
    thread.join()
    assert told == [(500, NOT_CONFIRMED)]
    assert owner.state() == "off"


def test_a_network_that_fails_after_sending_is_told_as_a_loss(
    start: Start, lan: Lan
) -> None:
    computer, owner = start("slow")
    wake(computer, owner)
    thread, told = in_background(owner, PASSPHRASE)
    computer.wait_for(TAKEN)
    lan.cut(cut=True)
    thread.join()
    assert told == [(500, NOT_CONFIRMED)]
    lan.cut(cut=False)
    see_it_boot(computer, owner)


def test_a_network_that_comes_back_shows_what_became_of_the_machine(
    start: Start, lan: Lan
) -> None:
    computer, owner = start("slow")
    wake(computer, owner)
    thread, told = in_background(owner, PASSPHRASE)
    computer.wait_for(TAKEN)
    lan.cut(cut=True)
    computer.wait_for("guest login:")
    lan.cut(cut=False)
    thread.join()
    assert told[0][0] == 200
    assert told[0][1] in UP_THOUGH


def test_an_answer_at_the_console_first_is_told_as_nothing_to_do(start: Start) -> None:
    computer, owner = start("slow")
    wake(computer, owner)
    computer.wait_for(ASKING)
    computer.type(PASSPHRASE + "\n")
    computer.wait_for(TAKEN)
    assert owner.unlock(PASSPHRASE) in FASTER
    see_it_boot(computer, owner)


def test_an_impostor_at_the_address_of_the_machine_gets_nothing(
    start: Start, lan: Lan
) -> None:
    computer, _ = start("dracut")
    with owner_of(KINDS["dropbear"], lan) as owner:
        wake(computer, owner)
        status, error = owner.unlock(PASSPHRASE)
        assert status == 500
        assert "the host key differs" in error
        assert error.endswith("The passphrase was not sent.")
        assert owner.state() == "locked"


@pytest.mark.parametrize("name", ["dropbear", "dracut"])
def test_one_request_starts_a_machine(
    start: Start, name: str, pytestconfig: pytest.Config
) -> None:
    computer, owner = start(name)
    for _ in range(pytestconfig.getoption("--cycles")):
        owner.wait_for("off", 3)
        answer = owner.call("POST", "/api/start", {"passphrase": PASSPHRASE})
        assert answer.status == 200
        assert computer.hear(10)
        told = owner.wait_for_start()
        assert told["phase"] == "done"
        assert told["message"] == "Unlocked: cryptroot. The system is up."
        see_it_boot(computer, owner)
        computer.cut_power()
        print(f"up within {told['seconds']} s")
