"""Pictures of the page in every state, light and dark, on a phone and on a desktop.

    python3 tests/screenshots.py [FOLDER]

The README has two of them.
"""

import contextlib
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from conftest import PASSPHRASE, need, running
from cryptroot_unlock import Disks
from homelab import Homelab
from playwright.sync_api import Browser, sync_playwright
from test_page import STOPS, Phone, configure

HERE = Path(__file__).resolve().parent
SCREENS: dict[str, dict[str, Any]] = {
    "phone": {
        "viewport": {"width": 390, "height": 600},
        "has_touch": True,
        "is_mobile": True,
    },
    "desktop": {"viewport": {"width": 1024, "height": 640}},
}


def take(browser: Browser, folder: Path, screen: str, scheme: Any) -> None:
    """Go through all states with one browser, and take a picture of each."""
    with tempfile.TemporaryDirectory() as name:
        files = Path(name)
        lab = Homelab(files, disks=Disks({"cryptroot": PASSPHRASE}), pace=3)
        with contextlib.closing(lab), running(configure(lab, files)) as client:
            options = SCREENS[screen] | {"color_scheme": scheme}
            with contextlib.closing(browser.new_context(**options)) as context:
                phone = Phone(context.new_page()).open(client)
                for number, (state, go) in enumerate(STOPS.items(), 1):
                    go(phone)
                    words = state.lower().replace(" ", "-")
                    file = f"{screen}-{scheme}-{number}-{words}.png"
                    phone.page.screenshot(path=folder / file)


def main() -> int:
    """Take all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "screenshots"
    with sync_playwright() as playwright:
        program = need("chromium")
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"]
        )
        for screen, scheme in itertools.product(SCREENS, ("light", "dark")):
            take(browser, folder, screen, scheme)
        browser.close()
    print(f"The pictures are in {folder}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
