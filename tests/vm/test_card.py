"""A Raspberry Pi that gets waker from its card, by a real cloud-init."""

import contextlib
import shutil
from functools import partial
from pathlib import Path

from computer import Owner, computer_of
from conftest import PIN, Client, make
from guests import ADDRESS, PI, ROUTER, ready, run
from test_box import IS_COMPILED, LISTENS, Box, check_all_steps, new_machine

CARD = "/boot/firmware/waker"
# What cloud-init does at each further boot.
AGAIN = "cloud-init single --name scripts_per_boot --frequency always"
# As Raspberry Pi Imager leaves it there.
IMAGER = {
    "meta-data": "dsmode: local\ninstance_id: rpios-image\n",
    "network-config": "# nothing\n",
    "user-data": "#cloud-config\nhostname: pi\nruncmd:\n- [touch, /root/ran]\n",
}


def test_a_card_is_all_that_a_raspberry_pi_needs(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shown = make(checkout, "card").stdout
    folder = checkout / "dist/card/waker"
    assert folder.joinpath("ssh_key.pub").read_text().strip() in shown
    for name, text in IMAGER.items():
        checkout.joinpath("dist/card", name).write_text(text)
    card = tmp_path / "card"
    run("mkfs.vfat", "-n", "bootfs", "-C", card, "65536")  # KiB

    ready()
    with computer_of(PI.hardware(), tmp_path) as computer:
        computer.card = card
        router = computer.router
        machine = router.run(partial(new_machine, tmp_path, ROUTER))
        with contextlib.closing(machine):
            shutil.copy(machine.ssh_key, folder)
            run("mcopy", "-s", "-i", card, *folder.parent.iterdir(), "::")
            computer.switch_on()
            box = Box(computer)

            # The example as it is: the report says what to fill in, and all stays.
            box.wait(f"grep 'not ready' {CARD}/report.txt")
            report = box.run(f"cat {CARD}/report.txt")
            assert report.count(" has no value") == 3
            box.run(f"cd {CARD}; cat ssh_key waker.env")
            assert computer.ssh(LISTENS).returncode != 0

            settings = machine.settings() | {"WAKER_PIN": PIN}
            for name in ("WAKER_SSH_KEY", "WAKER_HOMELAB_BROADCAST"):
                del settings[name]
            lines = [f"{name}={value}\n" for name, value in settings.items()]
            box.run(f"cat >{CARD}/waker.env", "".join(lines).encode())
            box.run(AGAIN)
            box.wait(LISTENS)
            check_all_steps(Owner(Client(8080, host=ADDRESS), router))

            # Its own Python, which is newer than the one here, has compiled it.
            assert box.run(f"python3 -c '{IS_COMPILED}'") == "True\n"

            # The settings and the key are root's alone now, and the card has neither.
            assert box.run(f"ls {CARD}") == "report.txt\n"
            report = box.run(f"cat {CARD}/report.txt /root/ran")
            assert "waker answers on port 8080" in report
            assert "waker is installed. What is still" in report
            assert box.run("stat -c %a /etc/waker/*").split() == ["600"] * 3

            # A later mistake changes nothing, and is reported.
            box.run(f"echo WAKER_PIN=short >{CARD}/waker.env")
            assert computer.ssh(AGAIN).returncode != 0
            assert "WAKER_PIN must be" in box.run(f"cat {CARD}/report.txt")
            box.run("systemctl restart waker")
            box.wait(LISTENS)
