"""Recordings of servers, and what facts.py makes of them.

They are what the functions of probes.sh printed: of networks and disks in a virtual
machine with Debian 12, and of packages and kernels in Debian 12 and 13.
"""

import json

from conftest import CHECKOUT
from facts import Facts, understand

SERVERS = CHECKOUT / "tests/support/servers"
RECORDED = json.loads((SERVERS / "recorded.json").read_text())
GRUB = (SERVERS / "grub.cfg").read_text()
GRUB_KERNEL = "6.1.0-47-cloud-amd64"
TABLE = "vda2_crypt UUID=00000000-0000-4000-8000-000000000001 none luks,discard\n"
BOX = "192.168.1.2 50000 192.168.1.20 22"


def probed(
    builder: str = "initramfs-tools",
    network: str = "one card",
    root: str = "LVM in LUKS",
    **others: str,
) -> dict[str, str]:
    """Put recordings together; `others` replace what they say."""
    whole: dict[str, str] = {"crypttab": TABLE, "running": "", "grub": GRUB}
    whole |= RECORDED["everywhere"] | RECORDED["systems"][builder]
    whole |= RECORDED["networks"][network] | RECORDED["disks"][root]
    return whole | others


def find(connection: str = BOX, card: str = "", **recordings: str) -> Facts:
    return understand(probed(**recordings), card, connection)
