"""Virtual machines are woken, unlocked and booted; their consoles prove it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from computer import Computer, Owner, computer_of, waker_on
from conftest import CHECKOUT, PASSPHRASE
from guests import GUESTS, OTHER, Guest, ready

KINDS = {guest.name: guest for guest in GUESTS}
WRONG = 400, "Wrong passphrase for disk cryptroot."
UNSENT = "The passphrase was not sent."

# What Debian's console shows when it asks, and when it was answered.
ASKING = "Please unlock disk cryptroot: "
TAKEN = f"{ASKING}\n"

WORDS = "may have been sent, but the initrd did not confirm it"
SILENT = f"Not confirmed: the passphrase {WORDS}"
NOT_CONFIRMED = 500, f"{SILENT}; watch GET /api/status"
# Depends on what waker sees first.
NOTHING_TO_DO = {
    f"All disks seem to be open already. {UNSENT}",
    f"The system is up. {UNSENT}",
    f"no disk was asking; try again in a few seconds. {UNSENT}",
}

Machine = tuple[Computer, Owner]
SLOW, SHELL, DIFFER = (
    pytest.mark.parametrize("guest", [name], indirect=True)
    for name in ("slow", "dracut-shell", "dracut-differ")
)
MODULE = CHECKOUT / "server/dracut/46initrd-ssh/module-setup.sh"


@pytest.fixture
def guest(request: pytest.FixtureRequest) -> Guest:
    ready()
    return KINDS[request.param]


@pytest.fixture
def machine(guest: Guest, tmp_path: Path) -> Iterator[Machine]:
    """A machine that is off, and waker beside it."""
    with computer_of(guest.hardware(), tmp_path) as computer:
        with waker_on(computer.router, guest.settings()) as owner:
            yield computer, owner


def wake(computer: Computer, owner: Owner) -> None:
    """Wake a machine, and wait until it is locked."""
    owner.wait_for("off")
    assert owner.call("POST", "/api/wol").status == 200
    assert computer.listen()
    owner.wait_for("locked")


@pytest.mark.parametrize(
    "guest",
    [name for name in KINDS if name not in ("dracut-shell", "dracut-differ")],
    indirect=True,
)
def test_one_request_starts_a_machine(
    guest: Guest, machine: Machine, pytestconfig: pytest.Config
) -> None:
    computer, owner = machine
    name, disks = guest.name, ", ".join(guest.disks)
    ends = {f"The system is up. Unlocked: {disks}."}
    if name == "dracut":  # systemd tries the first disk's passphrase by itself
        ends.add("The system is up. Unlocked: cryptroot.")
    wrong = {"wrong_passphrase"}
    if name == "slow":  # the initrd may stop waiting, or end before it confirms
        wrong.add("not_confirmed")
        ends.add(f"The system is up. {SILENT}.")
    for _ in range(pytestconfig.getoption("--cycles")):
        computer.router.run(owner.client.log_in)  # a token ends after 15 minutes
        owner.wait_for("off")
        start = owner.start("wrong", computer.listen, "not_confirmed")
        assert start["outcome"] in wrong, start
        if name == "dracut":  # waker's key opens no shell
            said = computer.ssh("echo shell", port=guest.port).stdout
            assert said == b"Please unlock disk cryptroot\n"
        if name == "dropbear":  # it keeps asking: without tries=0, six would end that
            assert [owner.unlock("wrong") for _ in range(7)] == [WRONG] * 7
        if guest.tries == 0:  # then systemd keeps asking
            assert [owner.unlock("wrong")[0] for _ in range(3)] == [400] * 3
        start = owner.start(PASSPHRASE)
        assert (start["outcome"], start["message"] in ends) == ("up", True), start
        assert name != "slow" or start["seconds"] > 10
        computer.wait_for("guest login:")
        status, message = owner.unlock(PASSPHRASE)
        assert (status, message) == (200, f"The system is up. {UNSENT}")
        computer.cut_power()


@SHELL
def test_it_is_reported_that_systemd_gave_up(machine: Machine) -> None:
    computer, owner = machine
    wake(computer, owner)
    assert owner.unlock("wrong") == WRONG
    assert "Emergency" not in computer.console
    gave_up = "the server stopped asking"
    status, error = owner.unlock("wrong again")
    assert (status, gave_up in error) == (500, True)
    assert error.endswith("The passphrase was sent.")
    computer.wait_for("Emergency")
    status, error = owner.unlock(PASSPHRASE)
    assert (status, gave_up in error, error.endswith(UNSENT)) == (500, True, True)


@SHELL
def test_only_the_disk_that_asks_gets_the_passphrase(
    guest: Guest, machine: Machine
) -> None:
    """A TPM's prompt gets nothing. A unit that failed before does not matter."""
    computer, owner = machine
    wake(computer, owner)
    ask = "systemd-ask-password --no-tty --timeout=0 --id=tpm2-pin PIN: >/run/pin"
    asks = "[[ $(cat /run/systemd/ask-password/ask.*) == *tpm2-pin* ]]"
    unit = "systemd-cryptsetup@other.service"
    run = "systemd-run --property=DefaultDependencies=no"  # nothing to wait for
    for command in (
        f"{run} sh -c '{ask}'",
        f"until {asks}; do sleep 0.1; done",
        f"{run} --unit={unit} sh -c 'exit 1'",
        f"until systemctl is-failed {unit}; do sleep 0.1; done",
    ):
        computer.run(command, port=guest.port)
    start = owner.start(PASSPHRASE)
    assert start["message"] == "The system is up. Unlocked: cryptroot."
    assert computer.run("cat /run/pin") == ""

    # In the booted system, dracut's module knows which lines of crypttab are needed.
    root, home = "cryptroot /dev/x none luks", "home /dev/y none x-initrd.attach"
    crypttab = f"{root}\ndata /dev/z /etc/keys/data luks\n{home}\n"
    computer.run("cat >/etc/crypttab", crypttab.encode())
    module = MODULE.read_bytes()
    module += b"require_binaries() { :; }; derror() { echo $*; }; dwarn() { :; }\n"
    printed = computer.run("bash", module + b"print_crypttab")
    added = f"{root},x-initrd.attach,tries=0\n{home},tries=0\n"
    assert printed == added
    computer.run("sed -i s/^cryptroot/renamed/ /etc/crypttab; mkdir /etc/initrd-ssh")
    computer.run("cd /etc/initrd-ssh; echo x | tee lan.network >authorized_keys")
    said = computer.run("bash", module + b"check; echo $?")
    assert said.endswith("begins with that name\n1\n")


@DIFFER
def test_a_disk_with_another_passphrase_is_answered_last(machine: Machine) -> None:
    """The root disk is open by then. The other's passphrase is typed at the console."""
    computer, owner = machine
    owner.wait_for("off")
    start = owner.start(PASSPHRASE, computer.listen)
    wrong = "Wrong passphrase for disk cryptdata; unlocked: cryptroot."
    assert (start["outcome"], start["message"]) == ("wrong_passphrase", wrong)
    computer.type(OTHER + "\n")
    owner.wait_for("up")
    computer.wait_for("guest login:")


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
    owner.wait_for("off")  # one silence is not believed


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
