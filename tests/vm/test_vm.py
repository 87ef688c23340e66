"""Virtual machines are woken, unlocked and booted; their consoles prove it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from computer import Computer, Owner, computer_of, owner_of
from conftest import PASSPHRASE
from guests import GUESTS

import waker

KINDS = {guest.name: guest for guest in GUESTS}
WRONG = 400, "Wrong passphrase for disk cryptroot."
UNSENT = "The passphrase was not sent."

# What Debian's console shows when it asks, and when it was answered.
ASKING = "Please unlock disk cryptroot: "
TAKEN = f"{ASKING}\n"

LOST = (
    "Not confirmed: the passphrase was sent, but the connection was lost before the"
    " initrd confirmed it"
)
SILENT = "Not confirmed: the passphrase was sent, but the initrd did not confirm it"
NOT_CONFIRMED = 500, f"{LOST}; watch GET /api/status"
# Depends on what waker sees first.
NOTHING_TO_DO = {
    waker.NotSent(outcome).result.message
    for outcome in (
        waker.Outcome.ALL_OPEN,
        waker.Outcome.IDLE,
        waker.Outcome.ENDED,
        waker.Outcome.LOST,
    )
}

Machine = tuple[Computer, Owner]
SLOW = pytest.mark.parametrize("machine", ["slow"], indirect=True)


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    """A machine that is off, and waker beside it."""
    with computer_of(KINDS[request.param], tmp_path) as computer:
        with owner_of(computer) as owner:
            yield computer, owner


def wake(computer: Computer, owner: Owner) -> None:
    """Wake a machine, and wait until it is locked."""
    owner.wait_for("off")
    assert owner.call("POST", "/api/wol").status == 200
    assert computer.listen()
    owner.wait_for("locked")


@pytest.mark.parametrize("machine", KINDS, indirect=True)
def test_one_request_starts_a_machine(
    machine: Machine, pytestconfig: pytest.Config
) -> None:
    computer, owner = machine
    name, disks = computer.guest.name, ", ".join(computer.guest.disks)
    ends = {f"Unlocked: {disks}. The system is up."}
    wrong = {"wrong_passphrase"}
    if name == "slow":  # the initrd may stop waiting, or end before it confirms
        wrong.add("not_confirmed")
        ends |= {f"The system is up. {text}." for text in (LOST, SILENT)}
    for _ in range(pytestconfig.getoption("--cycles")):
        owner.wait_for("off")
        start = owner.start("wrong", computer.listen, waker.STILL_LOCKED)
        assert start["outcome"] in wrong, start
        if name == "dropbear":  # it keeps asking
            assert [owner.unlock("wrong") for _ in range(3)] == [WRONG] * 3
            computer.wait_for("maximum number of tries exceeded")
        if computer.guest.tries == 0:  # then systemd keeps asking
            assert [owner.unlock("wrong")[0] for _ in range(3)] == [400] * 3
        start = owner.start(PASSPHRASE)
        assert (start["outcome"], start["message"] in ends) == ("up", True), start
        assert name != "slow" or start["seconds"] > 10
        computer.wait_for("guest login:")
        status, error = owner.unlock(PASSPHRASE)
        reason = "host key differs" if name == "port-22" else "Connection refused"
        assert (status, reason in error, error.endswith(UNSENT)) == (500, True, True)
        computer.cut_power()


@pytest.mark.parametrize("machine", ["dracut-shell"], indirect=True)
def test_systemd_gives_up_only_after_a_warning(machine: Machine) -> None:
    computer, owner = machine
    wake(computer, owner)
    status, error = owner.unlock("wrong")
    assert status == 400
    assert "after another wrong passphrase, systemd may give up" in error
    assert "Emergency" not in computer.console
    gave_up = "the server stopped asking for the passphrase"
    status, error = owner.unlock("wrong again")
    assert (status, gave_up in error) == (500, True)
    assert error.endswith("The passphrase was sent.")
    computer.wait_for("Emergency")
    status, error = owner.unlock(PASSPHRASE)
    assert (status, gave_up in error, error.endswith(UNSENT)) == (500, True, True)


@SLOW
def test_an_unlock_during_a_power_cut_is_not_confirmed(machine: Machine) -> None:
    computer, owner = machine
    wake(computer, owner)
    with ThreadPoolExecutor() as pool:
        unlock = pool.submit(owner.unlock, PASSPHRASE)
        computer.wait_for(TAKEN)
        assert owner.unlock(PASSPHRASE)[0] == 409
        computer.cut_power()
    assert unlock.result() == NOT_CONFIRMED
    assert owner.status()["state"] == "off"


@SLOW
def test_an_unlock_during_a_network_cut_is_not_confirmed_but_boots(
    machine: Machine,
) -> None:
    computer, owner = machine
    wake(computer, owner)
    with ThreadPoolExecutor() as pool:
        unlock = pool.submit(owner.unlock, PASSPHRASE)
        computer.wait_for(TAKEN)
        computer.plug(in_=False)
        assert unlock.result() == NOT_CONFIRMED
    computer.wait_for("guest login:")
    computer.plug(in_=True)
    owner.wait_for("up")


@SLOW
def test_nothing_is_sent_if_the_console_was_answered_first(
    machine: Machine,
) -> None:
    computer, owner = machine
    wake(computer, owner)
    computer.wait_for(ASKING)
    computer.type(PASSPHRASE + "\n")
    computer.wait_for(TAKEN)
    message = owner.unlock(PASSPHRASE)[1]
    assert message.removeprefix("Failed to unlock: ") in NOTHING_TO_DO
    owner.wait_for("up")
    computer.wait_for("guest login:")
