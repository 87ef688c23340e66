"""Pictures of the page in every state, light and dark, on a phone.

    python3 tests/screenshots.py

One sheet shows them all: dist/page.png. The README has two of them.
"""

import base64
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Literal

from conftest import PASSPHRASE, PIN, need, running
from cryptroot_unlock import Disks
from homelab import Homelab
from playwright.sync_api import Browser, sync_playwright
from stage import STATES, Phone, Stage

import waker

HERE = Path(__file__).resolve().parent
SHEET = HERE.parent / "dist" / "page.png"
Scheme = Literal["light", "dark"]
README: dict[str, tuple[Scheme, Path]] = {
    "off": ("light", HERE / "screenshots" / "phone-light-3-off.png"),
    "booting as usual": ("dark", HERE / "screenshots" / "phone-dark-7-booting.png"),
}


def take(browser: Browser, stage: Stage, scheme: Scheme) -> dict[str, bytes]:
    """Go through all states with one phone; returns their pictures by name."""
    phone = browser.new_page(
        viewport={"width": 390, "height": 600}, color_scheme=scheme, is_mobile=True
    )
    pictures = {}
    for name, go in STATES.items():
        go(Phone(phone), stage)
        pictures[name] = phone.screenshot()
    phone.close()
    return pictures


def draw_sheet(browser: Browser, pictures: dict[Scheme, dict[str, bytes]]) -> bytes:
    """Put all pictures beside each other, by name."""
    figures = "".join(
        f"<figure><figcaption>{name}</figcaption>"
        + "".join(
            f'<img src="data:image/png;base64,{base64.b64encode(data).decode()}">'
            for data in (pictures["light"][name], pictures["dark"][name])
        )
        + "</figure>"
        for name in STATES
    )
    style = "body { display: flex; flex-wrap: wrap; font: 16px sans-serif } "
    style += "figure { margin: 8px } img { width: 195px; border: 1px solid }"
    page = browser.new_page(viewport={"width": 2600, "height": 600})
    page.set_content(f"<style>{style} figcaption {{ margin: 4px }}</style>{figures}")
    return page.screenshot(full_page=True)


def main() -> int:
    """Take all pictures."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lab = Homelab(folder, disks=Disks({"cryptroot": PASSPHRASE}))
        stack.callback(lab.close)
        settings = {"WAKER_PIN": PIN} | lab.settings()
        client = stack.enter_context(running(waker.read_config(settings, folder)))
        stage = stack.enter_context(contextlib.closing(Stage(client)))
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=need("chromium"),
            args=["--no-sandbox", "--host-resolver-rules=MAP waker.lan 127.0.0.1"],
        )
        schemes: tuple[Scheme, Scheme] = "light", "dark"
        pictures = {scheme: take(browser, stage, scheme) for scheme in schemes}
        SHEET.parent.mkdir(exist_ok=True)
        SHEET.write_bytes(draw_sheet(browser, pictures))
        for name, (scheme, file) in README.items():
            file.write_bytes(pictures[scheme][name])
        browser.close()
    print(f"All {len(STATES)} states are in {SHEET}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
