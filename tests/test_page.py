"""The page in a real browser, against the real daemon.

If an answer would take a real machine minutes, or needs a bad network, the test's
`Phone` answers instead of the daemon.
"""

from __future__ import annotations  # names of waker.py may go

import contextlib
import ctypes.util
import itertools
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from conftest import CHECKOUT, PASSPHRASE, PIN, Client, need, serving
from engines import listening
from homelab import ANOTHER_MAC, PACKET, Homelab
from playwright.sync_api import Browser, Playwright, expect, sync_playwright
from stage import (
    ALARM,
    KEYS,
    STRANGERS,
    TOLD,
    WAKERS,
    Phone,
    around_a_start,
    during_a_start,
)

import waker

SOURCE = CHECKOUT.joinpath("ui.html").read_text()
CHROMIUM = "chromium", "chromium-browser", "google-chrome-stable", "google-chrome"
FONTS = CHECKOUT / "tests/support/browsers/fonts.conf"
# What the console shows if a request is refused or lost on purpose.
EXPECTED = re.compile(r"Failed to load resource: (.* (40[01349]|429|50\d) |net::ERR_)")
STARTED = {"message": "Started"}
EXPIRED = {"error": "Expired"}
OLD = {"name": "Home server", "state": "off", "reachable": False, "start": None}
expect.set_options(timeout=60_000)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    if not ctypes.util.find_library("atomic"):
        pytest.skip("need libatomic, for Playwright (package libatomic1)")
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def chromium(playwright: Playwright) -> Iterator[Browser]:
    """Chromium, without its windows and tabs if possible: that is twice as fast."""
    browser = playwright.chromium.launch(
        executable_path=need("chromium-headless-shell", *CHROMIUM),
        args=["--no-sandbox", "--host-resolver-rules=MAP waker.lan 127.0.0.1"],
        env={**os.environ, "FONTCONFIG_FILE": str(FONTS)},
    )
    with contextlib.closing(browser):
        yield browser


NewPhone = Callable[..., Phone]


@pytest.fixture
def inter() -> None:
    """Skip without the font in which these places and breaks are known."""
    if not [*Path("/usr/share/fonts").rglob("Inter-*")]:
        pytest.skip("need the font Inter (package fonts-inter)")


@pytest.fixture
def new_phone(chromium: Browser) -> Iterator[NewPhone]:
    """Make phones, whose consoles must be empty at the end."""
    phones: list[Phone] = []

    def make(client: Client, **options: Any) -> Phone:
        usual: dict[str, Any] = {"has_touch": True, "is_mobile": True}
        usual |= {"reduced_motion": "reduce"}  # animations take a processor
        page = chromium.new_page(**usual | options)
        phones.append(Phone(page, client).resize(320, 640))
        return phones[-1]

    yield make
    for phone in phones:
        phone.page.close()
        assert [text for text in phone.console if not EXPECTED.match(text)] == []


@pytest.fixture
def phone(api: Client, new_phone: NewPhone) -> Phone:
    return new_phone(api)


def test_the_page_can_be_read_in_one_sitting(api: Client) -> None:
    """And comes within the first packets of a connection."""
    assert len(SOURCE.splitlines()) <= 920
    packed = api.call("GET", "/", headers={"Accept-Encoding": "gzip"})
    head = ["HTTP/1.1 200 OK", *map(": ".join, packed.headers.items()), "", ""]
    assert len("\r\n".join(head)) + len(packed.body) <= 14_600  # bytes


# ---- What is shown, and to whom ------------------------------------------------------

# Only violations are wanted, and the page has no style sheets to load.
VIOLATIONS = """async (rules) => {
    const options = { resultTypes: ["violations"], preload: false, ...rules };
    return (await axe.run(options)).violations;
}"""
# In the dark only the colours differ.
RULES: dict[Any, dict[str, str]] = {"light": {}, "dark": {"runOnly": "color-contrast"}}
# What is cut, or too small for a finger. An iPhone zooms into a field with small text.
FAULTS = """() => [...document.querySelectorAll(
        "label, button, input, a, summary, li, p")]
    .filter((e) => e.getClientRects().length)
    .filter((e) => !e.matches("[role=status], [readonly]"))  // not for the eye
    .filter((e) => {
        const { width, height } = e.getBoundingClientRect();
        const size = parseFloat(getComputedStyle(e).fontSize);
        const isSmall = Math.min(width, height) < 44;
        if (isSmall && e.matches("button, input, a, summary")) return true;
        if (e.matches("input")) return size < 16 || e.clientWidth < 7 * size;
        return e.scrollWidth > e.clientWidth;
    }).map((e) => e.id || e.textContent)"""
WIDTH = "document.documentElement.scrollWidth"
# Until what fades in is there: before that, its contrast is too low.
FADED_IN = """Promise.allSettled(document.getAnimations()
    .filter((each) => each.animationName === "appear").map((each) => each.finished))"""


@pytest.mark.browsers
@pytest.mark.parametrize("go", [during_a_start, around_a_start])
def test_every_state_is_accessible_and_fits_a_small_screen(
    phone: Phone, go: Any, request: pytest.FixtureRequest
) -> None:
    """With --screenshots FOLDER, pictures of all states are put there."""
    folder = request.config.getoption("--screenshots")
    page = phone.page
    page.add_init_script(Axe().axe_script)
    for state in go(phone):
        phone.resize(390, 844)
        page.evaluate(FADED_IN)
        for scheme, rules in RULES.items():
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(VIOLATIONS, rules) == [], (state, scheme)
            if folder:
                name = f"{folder}/{state}, {scheme}.png"
                page.screenshot(path=name, animations="disabled")
        phone.resize(320, 640)
        for percent in (200, 100):
            phone.enlarge(percent)
            assert page.evaluate(WIDTH) <= 320, state
            assert page.evaluate(FAULTS) == [], (state, percent)


def test_a_phone_that_is_opened_late_shows_the_same_start(phone: Phone) -> None:
    """Steps, times, and what can be undone: all come from waker."""
    steps = phone.page.locator("li")
    phone.stop_clock().tell("booting", "booting", "unlocked", 0, 38, 42, 60).open()
    phone.give_pin().reads("1:00").reads("Unlocked").reads("You can close this page.")
    expect(phone.page).to_have_title(re.compile("1:00.*Home server"))
    expect(steps.and_(phone.page.locator(".done"))).to_have_count(2)
    here = steps.and_(phone.page.locator("[aria-current=step]"))
    expect(here).to_have_text("Boot")
    dot = "(each) => getComputedStyle(each, '::before').content"
    assert here.evaluate(dot) == '""'  # it is drawn: fonts have other ones
    for outcome in ("unlocked", "already_open", "not_confirmed"):
        phone.show("booting", "booting", outcome).offers("Stop watching")
    times = 0, 38, 42, 60
    phone.show("booting", "booting", "not_confirmed", *times)
    expect(steps.and_(phone.page.locator(".done"))).to_have_text("Wake")
    # Only this person can help if the passphrase was wrong.
    phone.reads("Starting").reads("Stay until it is up.").does_not_read("close this")
    phone.show("off", "waking").offers("Cancel").reads("Stay until it is unlocked.")


def test_a_server_that_is_locked_is_not_woken(phone: Phone) -> None:
    steps = phone.page.locator("li:visible")
    phone.tell("locked").open().give_pin().sees("locked")
    phone.ignore("status").answer("start", 200, STARTED).start().sees("starting")
    expect(steps).to_have_text(["Unlock the disk", "Boot"])
    phone.show("locked", "unlocking", "", woke=False)
    expect(steps).to_have_text(["Unlock the disk", "Boot"])
    expect(phone.page.locator("[aria-current=step]")).to_have_text("Unlock the disk")
    phone.show("off", "waking", "", woke=False)  # no packet could leave so far
    expect(steps).to_have_text(["Wake", "Unlock the disk", "Boot"])


def test_the_forecast_is_wakers_and_for_starts_that_wake(phone: Phone) -> None:
    """Half of all starts take longer than the median, so that alone is no news."""
    phone.stop_clock().tell("off", "waking", "", 0, 1).open().give_pin()
    phone.sees("starting").reads("This can take a few minutes").does_not_read("left")
    phone.show("up", "done", "up", 0, 38, 42, 62, 62)  # is remembered by waker alone
    phone.show("off", "waking", "", 0, 17).reads("a few minutes")
    usual: Any = {"usual_seconds": 62, "usual_unlock_seconds": 40}
    booting = "booting", "booting"
    for told, words in (  # until it is unlocked, and then until it is up
        (("off", "waking", "", 0, 16), "About 25\u00a0s left."),
        (("locked", "unlocking", "", 0, 30, 35), "About 5\u00a0s left."),
        (("locked", "unlocking", "", 0, 30, 40), "Any moment now."),
        (("locked", "unlocking", "", 0, 30, 51), "Any moment now."),
        (("locked", "unlocking", "", 0, 30, 52), "Longer than usual."),
        ((*booting, "unlocked", 0, 30, 53, 57), "Up in about 5\u00a0s."),
        ((*booting, "not_confirmed", 0, 30, 53, 57), "About 5\u00a0s left."),
        ((*booting, "unlocked", 0, 30, 53, 80), "Any moment now."),
        ((*booting, "unlocked", 0, 30, 53, 81), "Longer than usual."),
    ):
        phone.show(*told, **usual).reads(words)
    # The ring closes when the server is up.
    expect(phone.part("arc")).to_have_attribute("stroke-dasharray", "96 100")
    phone.show("locked", "unlocking", "", 0, 0, 17, **usual, woke=False)
    phone.reads("a few minutes").does_not_read("left")


RECORD = """() => {
    window.announced = [];
    const live = document.querySelector("[role=status]");
    new MutationObserver(() => announced.push(live.textContent))
        .observe(live, {childList: true, characterData: true, subtree: true});
}"""
# Of all that moves from now on.
ADD_SHIFTS = """() => {
    window.shift = 0;
    new PerformanceObserver((list) => list.getEntries().forEach(
        (each) => { shift += each.value; })).observe({type: "layout-shift"});
}"""
PLACES = """() => [...document.querySelectorAll("h1, #line, li, #cancel, summary")]
    .map((e) => e.getBoundingClientRect().top)"""


@pytest.mark.usefixtures("inter")
def test_the_end_is_worth_waiting_for(phone: Phone) -> None:
    """Nothing moves until then. The ring closes, it is day, and the steps stay."""
    page, arc = phone.page, phone.part("arc")
    phone.stop_clock().tell("off").open().page.evaluate(RECORD)
    assert phone.give_pin().sees("off").dawn() == 0
    phone.ignore("status").answer("start", 200, STARTED).start().sees("starting")
    page.screenshot()  # when it is taken, the change of view has been drawn
    page.evaluate(ADD_SHIFTS)
    places = [page.evaluate(PLACES)]
    dawns = []
    for told in (
        ("off", "waking", "", 0, 9),
        ("locked", "unlocking", "", 0, 38, 40),
        ("booting", "booting", "unlocked", 0, 38, 42, 50),
        ("booting", "booting", "unlocked", 0, 38, 42, 99),
    ):
        phone.show(*told, usual_seconds=62)
        dawns.append(phone.dawn())
        places.append(page.evaluate(PLACES))
    assert [place for place in places if place != places[0]] == []
    assert [0, *dawns, 1] == sorted({0, *dawns, 1})
    expect(arc).to_have_attribute("stroke-dasharray", "96 100")
    assert page.evaluate("shift") <= 0.001
    phone.show("up", "done", "up", 0, 38, 42, 62, 62).sees("up")
    phone.reads("Up\n\nStarted in 1\u00a0min 2\u00a0s.")
    assert page.evaluate(PLACES)[:5] == places[0][:5]
    expect(arc).to_have_attribute("stroke-dasharray", "100 100")
    expect(page.locator("li.done")).to_have_count(3)
    took = [item.get_attribute("data-took") for item in page.locator("li").all()]
    assert took == ["0:38", "0:04", "0:20"]
    assert phone.dawn() == 1
    said = page.evaluate("announced")
    # The focus has said the headlines before, and nothing stays to be found by swiping.
    spoken = [
        "Unlock the disk.",
        "Unlocked. You can close this page. Boot.",
        "Up. Started in 1\u00a0min 2\u00a0s.",
    ]
    assert [each for each in said if each] == spoken
    phone.wait(4)
    expect(page.get_by_role("status")).to_be_empty()
    # The sun does not set if the initrd did not report.
    phone.show("locked", "booting", "not_confirmed", 0, 38, 42, 50, usual_seconds=62)
    assert phone.sees("doubtful").dawn() == dawns[2]
    expect(arc).not_to_have_attribute("stroke-dasharray", re.compile(""))
    phone.tell("up").look().sees("up").does_not_read("Boot")
    phone.tell("up", "done", "up", 0, 5).look().open_details()  # it was up
    phone.reads("From waker").sees("up").does_not_read("Boot")


def test_the_moment_when_it_is_unlocked_is_seen(phone: Phone) -> None:
    """Whoever waited for it may go."""
    ticks = phone.page.locator("[data-sign=done]")
    phone.stop_clock().tell("locked", "unlocking", "", 0, 38, 40).open().give_pin()
    phone.reads("Starting").does_not_read("close this page")
    phone.show("booting", "booting", "unlocked", 0, 38, 42, 43, usual_seconds=62)
    phone.reads("Unlocked").reads("You can close this page.")
    expect(ticks).to_have_count(1)
    expect(phone.part("sign")).to_have_attribute("aria-hidden", "true")
    phone.wait(5).reads("0:48").reads("Unlocked")
    expect(ticks).to_have_count(0)
    expect(phone.part("sign")).not_to_have_attribute("aria-hidden", "true")  # a time
    phone.show("booting", "booting", "not_confirmed", 0, 38, 42, 43).reads("Starting")
    expect(ticks).to_have_count(0)


def test_the_end_leads_to_what_the_server_is_for(phone: Phone) -> None:
    link = phone.page.get_by_role("link")
    phone.tell("up").open().give_pin().sees("up").does_not_read("Open")
    address = "https://home.example/start?x#y"
    phone.show("up", "done", "up", 0, 38, 42, 62, 62, link=address).offers()
    expect(link).to_have_text("Open Home server")
    expect(link).to_have_attribute("href", address)
    phone.show("off", "done", "up", 0, 38, 42, 62, 62, link=address).sees("off")
    expect(link).to_have_count(0)
    # That start was an earlier one.
    phone.open_details().reads("Last time: From waker")


def test_motion_and_colours_are_left_to_their_owner(phone: Phone) -> None:
    page, dawn = phone.page, phone.part("dawn")
    turning = """document.getAnimations().filter(
        (each) => each.effect.getTiming().iterations === Infinity).length"""
    page.emulate_media(reduced_motion="no-preference")
    phone.stop_clock().tell("booting", "waking").open().give_pin().sees("starting")
    assert page.evaluate(turning) > 0
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(turning) == 0
    phone.show("up")
    expect(dawn).to_have_css("transition-duration", "0s")
    expect(dawn).to_have_css("opacity", "1")
    page.emulate_media(forced_colors="active")
    expect(dawn).to_have_css("display", "none")
    for edge in ("card", "trouble"):  # have no colour of their own then
        expect(phone.part(edge)).to_have_css("border-top-width", "1px")
    arc, number = phone.css("arc", "stroke"), phone.css("number", "fill")
    assert {arc, number} == {phone.css("headline", "color")}  # not the tick's green
    phone.show("off", "waking", "", 0, 9, usual_seconds=62).sees("starting")
    assert phone.css("track", "stroke") != phone.css("arc", "stroke")
    # Nor does anything turn while nothing is known.
    page.emulate_media(reduced_motion="no-preference", forced_colors="none")
    quiet = phone.css("line", "color")
    page.emulate_media(contrast="more")
    assert phone.css("line", "color") == phone.css("headline", "color") != quiet
    phone.show("booting", "waking").sees("starting")
    assert page.evaluate(turning) > 0
    phone.lose_connection().sees("starting")
    assert page.evaluate(turning) == 0


def test_the_browsers_bar_has_the_pages_colour(phone: Phone) -> None:
    """In both schemes, and where nothing else is drawn."""
    told = """() => {
        const bars = [...document.querySelectorAll("[name=theme-color]")];
        const bar = bars.find((each) => matchMedia(each.media).matches);
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.color = bar.content;
        return [getComputedStyle(probe).color,
            getComputedStyle(document.body).backgroundColor];
    }"""
    phone.open()
    colours = []
    for scheme in RULES:
        phone.page.emulate_media(color_scheme=scheme)
        colours.append(phone.page.evaluate(told))
    assert [bar for bar, ground in colours] == [ground for bar, ground in colours]
    assert colours[0] != colours[1]


def test_seconds_pass_between_polls_and_never_run_back(phone: Phone) -> None:
    phone.stop_clock().tell("off", "waking", "", 0, 3).open().give_pin().reads("0:03")
    phone.ignore("status").wait(2).reads("0:05")
    phone.show("off", "waking", "", 0, 4).reads("0:05").wait(1).reads("0:06")
    phone.show("locked", "unlocking", "", 0, 9, 9).reads("0:09")
    phone.show("off").show("off", "waking", "", 0, 1).reads("0:01")
    # What this page began has no id before waker tells it.
    phone.show("off").answer("start", 200, STARTED).ignore("status").start()
    phone.sees("starting").wait(2).reads("0:02")
    phone.show("off", "waking", "", 0, 1).reads("0:02")
    # Not even if the phone's clock is set back.
    phone.page.clock.set_system_time("2029-12-31")
    phone.wait(3.5).reads("0:05")
    with phone.page.expect_request("**/api/status"):
        phone.wait(5)


# ---- What fits where -----------------------------------------------------------------


@pytest.mark.usefixtures("inter")
def test_what_a_form_needs_stays_above_a_phones_keyboard(phone: Phone) -> None:
    bottom = """() => Math.max(...[...document.querySelectorAll(".action")]
        .slice(0, 2).map((e) => e.getBoundingClientRect().bottom))"""
    phone.tell("off").open().sees("pin")
    steps: list[Callable[[], object]] = [
        lambda: phone,
        lambda: phone.give_pin("12345678").marks(1),
        lambda: phone.give_pin().sees("off"),
        lambda: phone.show("booting"),
        lambda: phone.tell("locked", "failed", "wrong_passphrase").open().give_pin(),
        lambda: phone.show("locked", *ALARM).press("Try again"),
    ]
    for go in steps:
        go()
        for width, height in ((390, 664), (320, 568)):
            phone.resize(width, height)
            assert phone.page.evaluate(bottom) <= 380  # px that a keyboard leaves
            assert phone.css("sign", "width") == "40px"


SIDEWAYS = (844, 390), (844, 340), (600, 340)
LOWEST = """() => Math.max(...[...document.querySelectorAll("input, .action")].map(
    (e) => e.getBoundingClientRect().bottom))"""


@pytest.mark.slow
def test_every_view_fits_a_phone_on_its_side_and_a_desktop(phone: Phone) -> None:
    """Without scrolling to a button."""
    phone.tell("off").open().sees("pin")
    for size in SIDEWAYS:
        assert phone.resize(*size).page.evaluate(LOWEST) <= size[1]
    phone.give_pin().sees("off")
    for told, view, _ in [(("off",), "off", ""), *TOLD.values()]:
        phone.show(*told).sees(view)
        for size in SIDEWAYS:
            assert phone.resize(*size).page.evaluate(LOWEST) <= size[1], (view, size)
    phone.show("off", "waking", "", 0, 9).sees("starting")
    for size in SIDEWAYS:
        assert max(map(phone.resize(*size).bottom, ("steps", "line"))) <= size[1]
    phone.resize(844, 390)
    phone.show("locked").open_details()  # beside a high column
    assert phone.bottom("headline") - phone.box("card")["y"] < 100
    phone.resize(1280, 800)
    assert 80 <= phone.box("card")["y"] <= 200  # it does not hang from the top


PIN_ROWS = "show-pin", "pin", "sign-in"
# Words of the headline that are broken, and whether the clock is outside of its ring.
BROKEN = """() => {
    const range = document.createRange();
    const isCut = (node, start, end) => {
        range.setStart(node, start);
        range.setEnd(node, end);
        return range.getClientRects().length > 1;
    };
    const words = (node) => [...node.data.matchAll(/\\S+/g)].filter(
        ({index, 0: word}) => isCut(node, index, index + word.length)).map(String);
    const box = (id) => document.getElementById(id).getBoundingClientRect();
    const [number, sign] = [box("number"), box("sign")];
    const isOut = number.width > 0 &&
        (number.left < sign.left + 12 || number.right > sign.right - 12);
    const broken = words(document.querySelector("h1").firstChild);
    return isOut ? [...broken, "clock"] : broken;
}"""


@pytest.mark.slow
def test_text_that_a_browser_enlarges_is_not_cut(phone: Phone) -> None:
    """As Samsung's browser and Android's WebViews do, whatever the sizes in styles."""
    adjust = "text-size-adjust: 200% !important"
    enlarge = f"document.documentElement.style = '{adjust}'"
    phone.tell("off").open().give_pin().sees("off").page.evaluate(enlarge)
    assert phone.css("line", "text-size-adjust") == "200%"
    told = [each for each, _, _ in TOLD.values()]
    for each in [*told, ("off", "waking", "", 0, 599), ("booting",), ("locked",)]:
        phone.show(*each)
        for width, height in ((320, 640), (390, 844), (844, 390)):
            phone.resize(width, height)
            assert phone.page.evaluate(WIDTH) <= width, (each, width)
            assert phone.page.evaluate(FAULTS) == [], (each, width)
            assert phone.page.evaluate(BROKEN) == [], (each, width)


def test_large_letters_and_long_names_fit(phone: Phone) -> None:
    phone.tell("off").open().enlarge(200)
    edges = [(box["x"], box["x"] + box["width"]) for box in map(phone.box, PIN_ROWS)]
    assert edges[0][1] == edges[1][1]
    assert edges[1] == edges[2]
    phone.give_pin().sees("off")
    names = "2001:db8:1234:5678:9abc:def0:1234:5678", "x" * 41
    for name, phase, percent in itertools.product(names, ("", "waking"), (100, 200)):
        phone.tell("off", phase, name=name).look().reads(name).enlarge(percent)
        assert phone.page.evaluate(WIDTH) <= 320


@pytest.mark.slow
def test_no_button_slides_under_a_finger(phone: Phone) -> None:
    """When a message comes or goes: the second of two taps could start the server."""
    page = phone.page
    places = """() => [...document.querySelectorAll("button, summary")]
        .filter((e) => e.getClientRects().length)
        .map((e) => [e.id, e.getBoundingClientRect().y])"""
    doubtful = "locked", "booting", "not_confirmed"
    failed = "off", "failed", "not_awake"
    # What is shown, a button, and the path of its request, which fails.
    steps: list[tuple[Any, str, str]] = [
        (("off",), "Wake only", "wol"),
        (failed, "Wake only", "wol"),
        (("locked",), "Unlock", "start"),
        (failed, "Wake and unlock", "start"),
        (doubtful, "Stop watching", "start"),
        (doubtful, "Unlock", "start"),
        (("off", "waking"), "Cancel", "start"),
    ]
    for told, button, path in steps:
        phone.tell(*told).open().give_pin()
        expect(phone.part("details")).to_be_visible()
        if told == doubtful:
            phone.press("Enter another")
        if button == "Wake only":
            phone.open_details()
        elif button != "Cancel":
            phone.type_passphrase()
        before = dict(page.evaluate(places))
        phone.answer(path, 500, {"error": "It failed. " * 20})
        phone.press(button).reads("It failed. It failed")
        after = dict(page.evaluate(places))
        below = {"", "signal"} if button != "Wake only" else set()
        moved = {name for name in before if before[name] != after[name]}
        assert moved <= below, (button, moved)


def test_the_second_of_two_taps_hits_nothing(phone: Phone) -> None:
    """On its side, "Cancel" comes to stand where "Wake and unlock" was."""
    phone.tell("off").open().give_pin().sees("off").type_passphrase().resize(844, 390)
    box, tap = phone.box("start"), phone.page.touchscreen.tap
    place = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    phone.until(lambda: phone.page.evaluate("!document.getAnimations().length"))
    slow = phone.page.context.new_cdp_session(phone.page)
    slow.send("Animation.enable")
    slow.send("Animation.setPlaybackRate", {"playbackRate": 0.01})
    phone.tell("off", "waking").answer("start", 200, STARTED)
    tap(*place)
    phone.sees("starting").has_at(place, "cancel")
    tap(*place)
    phone.show("off", "waking", "", 0, 5)
    assert phone.count("start") == 1
    slow.send("Animation.setPlaybackRate", {"playbackRate": 1000})
    phone.press("Cancel").until(lambda: phone.count("start") == 2)


def test_what_can_be_clicked_looks_like_it_and_responds(
    api: Client, new_phone: NewPhone
) -> None:
    """Each button has an outline: nobody touches one that is not seen."""
    phone = new_phone(api, has_touch=False, is_mobile=False)
    page = phone.page
    phone.tell("up", link="http://x/").open().give_pin().sees("up")
    cursors = """[...document.querySelectorAll("button, summary, a")]
        .map((each) => getComputedStyle(each).cursor)"""
    assert {*page.evaluate(cursors)} == {"pointer"}
    phone.show("off", "waking").sees("starting")
    quiet, field = (phone.css(each, "border-color") for each in ("cancel", "pin"))
    assert quiet == field
    for part in (phone.part("cancel"), page.locator("summary")):
        look = "(each) => getComputedStyle(each).boxShadow"
        looks = [part.evaluate(look)]
        part.hover()
        looks.append(part.evaluate(look))
        page.mouse.down()
        looks.append(part.evaluate(look))
        assert len({*looks}) == 3
        page.mouse.move(0, 0)  # or it would be a click
        page.mouse.up()


# ---- Only what is true now -----------------------------------------------------------


def test_a_start_goes_on_without_the_phone(phone: Phone) -> None:
    phone.stop_clock().tell("off", "waking", "", 0, 9).open().give_pin()
    phone.sees("starting").reads("0:09").lose_connection()
    expect(phone.page).to_have_title(re.compile("^Can't reach waker . Home server"))
    phone.waits_for("Last seen 15\u00a0s ago.").reads("need this connection.")
    phone.reads("0:24")  # for as long as it has run, which it does
    phone.tell("off", "waking", "", 0, 30).waits_for("a few minutes")
    phone.does_not_read("need this connection").does_not_read("Last seen")


def test_a_reload_during_a_start_needs_no_pin(phone: Phone) -> None:
    """Nor does a tab that a phone threw away. The token is kept only that long."""
    page, kept = phone.page, "Object.values(sessionStorage)"
    phone.stop_clock().tell("off").open().give_pin().sees("off")
    assert page.evaluate(kept) == []
    phone.show("off", "waking", "", 0, 9).sees("starting")
    assert page.evaluate(kept) == ["token 0"]
    size = phone.box("sign")["width"]
    phone.hold("status").reload().sees("resuming").does_not_read("PIN")
    phone.part("pin").evaluate("(e) => { e.value = 'typed before'; }")
    phone.take_held().abort()
    phone.waits_for("Stay until it is unlocked").sees("starting")
    assert phone.box("sign")["width"] == size
    assert phone.part("pin").input_value() == ""
    phone.tell("off", "failed", "not_awake").look().sees("off")
    assert page.evaluate(kept) == []
    phone.reload().sees("pin")
    phone.tell("off", "waking").give_pin().sees("starting")
    phone.answer("status", 401, EXPIRED).reload()
    phone.reads("Signed out. Enter your PIN again.").sees("pin")
    assert page.evaluate(kept) == []


def test_a_translator_is_left_alone(phone: Phone) -> None:
    """It puts other text into the page, which stays until there is something new."""
    phone.stop_clock().tell("off").open().give_pin().sees("off")
    translate = """() => {
        const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
        while (walk.nextNode()) walk.currentNode.data = "übersetzt";
        window.changes = 0;
        new MutationObserver((all) => { changes += all.length; }).observe(
            document, {subtree: true, childList: true, characterData: true});
    }"""
    phone.page.evaluate(translate)
    phone.wait(10).has_no_poll_under_way().reads("übersetzt")
    assert phone.page.evaluate("changes") == 0
    phone.show("locked").reads("Locked").reads("Unlock")


def test_a_lost_connection_is_shown_and_recovers_by_itself(phone: Phone) -> None:
    network = phone.stop_clock().open().page.context
    network.set_offline(True)
    phone.is_current().give_pin().reads("Can't reach waker.").sees("pin")
    network.set_offline(False)
    phone.press("Sign in").sees("off").is_current()
    network.set_offline(True)
    phone.wait(4).is_current().waits_for("Can't reach waker").sees("off")
    expect(phone.page.locator("[data-old]")).to_have_count(1)
    expect(phone.page.get_by_role("status")).to_contain_text("Can't reach waker")
    network.set_offline(False)
    phone.wait(4).does_not_read("Can't reach").is_current()
    phone.show("up").open_details().does_not_read("ago").lose_connection()
    phone.waits_for("Last seen 1\u00a0min 5\u00a0s ago.").sees("up")


def test_after_a_night_in_a_drawer_nothing_is_shown_as_now(phone: Phone) -> None:
    old = phone.page.locator("[data-old]")
    phone.stop_clock().tell("up").open().give_pin().sees("up").ignore("status")
    phone.wait(14)  # two polls are under way
    assert phone.polls() == 2
    phone.page.clock.set_system_time("2030-01-02T08:00:01Z")
    phone.look().sees("up").does_not_read("Last seen")  # no words flash up
    expect(old).to_have_count(1)
    expect(phone.page.locator("header")).to_have_css("filter", "grayscale(1)")
    assert phone.polls() == 3
    phone.wait(1.5).reads("Last seen 8\u00a0h ago.").sees("up")
    expect(phone.page.get_by_role("status")).to_have_text("Not current.")
    expect(phone.page).to_have_title(re.compile("^Last seen 8\u00a0h ago . Home"))
    phone.wait(11).reads("Slow connection. Last seen 8\u00a0h ago.")
    phone.tell("off").waits_for("It does not answer.").is_current()


@pytest.mark.slow
def test_an_answer_of_somebody_else_is_not_taken_for_wakers(phone: Phone) -> None:
    phone.stop_clock().tell("off").open()
    for status, body, helps in STRANGERS.values():
        told = "answered (a redirect)" if status == 302 else f"answered ({status})"
        reload = ["Reload"] * helps
        phone.answer("auth", status, body)
        phone.give_pin().reads(told).offers("Sign in", *reload).sees("pin")
        phone.tell("off").give_pin().sees("off").answer("status", status, body)
        phone.look().waits_for(told).sees("off").does_not_read("[object")
        phone.offers("Wake and", *reload)
        phone.tell("locked").wait(1.5).sees("locked").is_current()  # waker is back
        phone.answer("start", status, body).start().reads(told)
        if 300 <= status < 500:  # it has not passed the request on
            phone.does_not_read("may have got through")
        else:
            phone.reads("may have got through")
        (phone.press("Reload") if helps else phone.open()).sees("pin").reads("Sign in")


@pytest.mark.slow
def test_every_view_without_a_start_can_send_the_wake_up_signal(phone: Phone) -> None:
    """Something that answers at the address may not be the server."""
    phone.answer("wol", 200, {"message": "Sent to somebody"}).tell("off").open()
    phone.give_pin().sees("off")
    for told, view, _ in TOLD.values():
        phone.show(*told).sees(view)
        if view in ("starting", "doubtful"):
            continue
        phone.part("details").evaluate("(e) => { e.open = true; }")
        if told[0] not in ("off", "unknown"):
            phone.reads("another device is answering at its address")
        with phone.page.expect_request("**/api/wol"):
            phone.press("Wake only")
        phone.reads("was sent. Nothing confirms it.")
        expect(phone.part("message")).not_to_have_attribute("data-kind", "good")


def test_an_error_of_another_script_goes_and_one_of_ours_stays(phone: Phone) -> None:
    phone.tell("off").open().give_pin().sees("off")
    with phone.page.expect_event("pageerror"):
        phone.page.evaluate("setTimeout(() => { throw new Error('an extension'); })")
    expect(phone.part("blocked")).to_be_empty()
    phone.page.evaluate("document.querySelector('#line').remove()")
    phone.is_blocked("Something went wrong").page.goto("about:blank")
    phone.console.clear()


def test_while_requests_hang_one_more_is_sent_and_what_is_shown_is_called_old(
    config: waker.Config, new_phone: NewPhone
) -> None:
    """As when a phone leaves its Wi-Fi."""
    with serving(config) as client:
        phone = new_phone(client)
        phone.stop_clock().open().give_pin().sees("off")
    body = json.dumps(OLD | {"state": "locked"})
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    with waker.listen(("127.0.0.1", client.port)) as silent:
        silent.settimeout(10)  # seconds
        phone.wait(3.5)
        with silent.accept()[0] as first:
            assert first.recv(4) == b"GET "
            phone.wait(2)
            assert phone.polls() == 1  # though the last answer is 5.5 s old
            phone.wait(1)
            with silent.accept()[0] as second:
                assert second.recv(4) == b"GET "
                phone.wait(5).is_current().wait(3).reads("Slow").sees("off")
                assert phone.polls() == 2
                second.sendall(answer.encode())
                phone.sees("locked").is_current()


def test_polls_that_hang_do_not_hide_how_a_start_ends(phone: Phone) -> None:
    phone.stop_clock().tell("off").open().give_pin().sees("off").ignore("status")
    phone.wait(7).answer("start", 200, STARTED)
    assert phone.polls() == 2
    phone.start().sees("starting").tell("off", "failed", "not_awake")
    phone.wait(2).reads("From waker.").sees("off")


def test_a_late_answer_changes_nothing(phone: Phone) -> None:
    phone.stop_clock().answer("start", 200, STARTED)

    def sign_in_again() -> None:
        phone.expire().wait(3.5).sees("pin").tell("off").give_pin()

    # What happens while the answer is under way, the answer, and what stays.
    steps: list[tuple[Callable[[], object], int, object, str]] = [
        (lambda: phone.tell("up").wait(3.5), 200, OLD, "up"),
        (lambda: phone.ignore("status").start(), 200, OLD, "starting"),
        (sign_in_again, 401, EXPIRED, "off"),
        (lambda: phone.answer("status", 401, EXPIRED).wait(3.5), 200, OLD, "pin"),
    ]
    for happens, status, body, view in steps:
        phone.tell("off").open().give_pin().sees("off")
        late = phone.hold("status").look().take_held()
        happens()
        phone.sees(view).ignore("status")
        with phone.page.expect_event("requestfinished"):
            late.fulfill(status=status, json=body, headers=WAKERS)
        phone.wait(0.5).sees(view)


# Record twenty times a second what is visible, and where.
WATCH = """() => {
    const place = (e) => `${e.id} ${e.getBoundingClientRect().top}`;
    window.seen = [];
    setInterval(() => {
        const { view, old } = document.querySelector("main").dataset;
        const parts = [...document.querySelectorAll("h1, button, input")];
        const number = document.querySelector("#number").textContent;
        seen.push([view, old, parts.map(place).join(), number]);
    }, 50);
}"""


@pytest.mark.browsers
def test_at_2_s_per_round_trip_nothing_moves_or_is_called_old(phone: Phone) -> None:
    """A minute, with a whole start in it. Each request takes two round trips."""
    network = phone.open().page.context.new_cdp_session(phone.page)
    line = {"latency": 4000, "downloadThroughput": -1, "uploadThroughput": -1}
    network.send("Network.emulateNetworkConditions", {"offline": False} | line)
    phone.page.evaluate(WATCH)
    phone.give_pin().sees("off")
    assert phone.count("status") == 0  # the state came with the token
    phone.page.wait_for_timeout(20_000)
    phone.start().sees("starting").sees("up").page.wait_for_timeout(20_000)
    seen = phone.page.evaluate("seen")
    assert {old for _, old, _, _ in seen} == {None}
    shown = [int(number.partition(":")[2]) for *_, number in seen if number]
    assert {later - now for now, later in itertools.pairwise(shown)} <= {0, 1, 2}
    # Where the buttons and fields are depends on nothing but the view.
    places = {(view, place) for view, _, place, _ in seen}
    assert sorted(view for view, _ in places) == ["off", "pin", "starting", "up"]


# ---- The two secrets -----------------------------------------------------------------


def test_two_secrets_bring_the_server_up(lab: Homelab, new_phone: NewPhone) -> None:
    """Both wrong at first; a second phone sees it, and the browser keeps no secret."""
    settings = lab.settings(PIN=PIN, HOMELAB_MAC=ANOTHER_MAC)
    with serving(lab.config(settings), settings) as client:  # which wakes nothing
        phone, other = (new_phone(client).open().give_pin() for _ in range(2))
        phone.sees("off").press("Show").hold("start").start().is_busy()
        expect(phone.part("passphrase")).to_have_attribute("type", "password")
        phone.part("passphrase").press("Enter")  # the first has not been answered yet
        phone.take_held().continue_()
        phone.sees("starting").press("Cancel").sees("off")
        phone.reads("The passphrase was not sent")
        assert phone.count("start") == 2  # once to begin it, and once to cancel it
        assert (phone.focus(), phone.passphrase()) == ("passphrase", PASSPHRASE)
        phone.start("wrong ").sees("starting")
        other.sees("starting")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.sendto(PACKET, ("127.0.0.1", lab.packet_port))
        phone.reads("look for a typo. It began or ended with a space").marks(1)
        assert (phone.focus(), phone.passphrase()) == ("passphrase", "wrong ")
        phone.page.keyboard.type("er")  # is added to what was typed
        assert phone.marks(0).passphrase() == "wrong er"
        phone.start()
        phone.sees("up")
        other.sees("up")
        for part in ("header", "#steps"):
            assert phone.page.inner_text(part) == other.page.inner_text(part)
    places = "[{...localStorage}, {...sessionStorage}, document.cookie, location.href]"
    kept = phone.page.evaluate(f"JSON.stringify({places})")
    assert "waker at /" in kept  # is the key of the server's name
    assert not re.search("2468|horse|wrong", kept)  # of the secrets
    assert (phone.part("pin").input_value(), phone.passphrase()) == ("", "")


def test_a_pin_can_be_corrected_on_an_open_keyboard(phone: Phone) -> None:
    phone.resize(320, 568)  # a small iPhone's
    phone.tell("off").open().sees("pin").offers("Sign in")
    signs = [phone.part("glyph").get_attribute("d")]
    for short in ("", "1234567"):
        phone.give_pin(short).reads("A PIN has at least 8 characters.").marks(1)
        assert (phone.focus(), phone.count("auth")) == ("pin", 0)
    phone.hold("auth").give_pin("12345678").is_busy().part("pin").press("Enter")
    assert phone.message() == ""  # that was about the last one
    phone.take_held().fulfill(status=401, json={"error": "Wrong"}, headers=WAKERS)
    message = phone.reads("Wrong").marks(1).part("message")
    assert (phone.focus(), phone.count("auth")) == ("pin", 1)
    expect(phone.page.get_by_role("status")).to_contain_text(message.inner_text())
    assert phone.bottom("message") <= 340  # px that its keyboard leaves
    assert phone.css("pin", "outline-color") == phone.css("message", "color")
    phone.page.keyboard.type(PIN)  # replaces what was typed, because it is selected
    phone.press("Show").page.get_by_role("button", name="Sign in").tap()
    expect(phone.sees("off").part("pin")).to_have_attribute("type", "password")
    phone.page.get_by_role("button", name="Show").tap()
    expect(phone.part("passphrase")).to_have_attribute("type", "text")
    assert phone.focus() == "passphrase"
    signs.append(phone.part("glyph").get_attribute("d"))
    assert signs[0] != signs[1]
    phone.start("").reads("Type the disk's pass")
    assert phone.count("start") == 0


def test_only_a_wrong_pin_is_marked_and_a_wait_is_counted_down(phone: Phone) -> None:
    phone.stop_clock().tell("off").open()
    for status, body, words in (
        (500, {"error": "It failed"}, "It failed."),
        (200, {"token": "x"}, "couldn't check"),
    ):
        phone.answer("auth", status, body).give_pin().reads(words).marks(0)
    error = {"error": "Too many attempts; try again in 125 s"}
    fields = WAKERS | {"Retry-After": "125"}
    refused = phone.hold("auth").give_pin().take_held()
    refused.fulfill(status=429, json=error, headers=fields)
    phone.reads("Too many attempts; try again in 2\u00a0min 5\u00a0s.").marks(0)
    said = phone.page.get_by_role("status")
    expect(said).to_have_text("Too many attempts; try again in 125 s.")
    phone.wait(66).reads("in 59\u00a0s.").wait(58).reads("in 1\u00a0s.")
    expect(said).to_be_empty()  # it is not said again every second
    phone.wait(2).reads("You can try again.").does_not_read("Too many")
    expect(said).to_have_text("You can try again.")


def test_after_two_wrong_pins_the_page_says_where_the_right_one_is(
    phone: Phone,
) -> None:
    """Above the keyboard of a small iPhone, which leaves 340 px."""
    hint = "The PIN is in /etc/waker/waker.env on the box."
    phone.tell("off").open().resize(320, 568)
    phone.give_pin("12345678").marks(1).does_not_read(hint)
    phone.hold("auth").give_pin("12345679").is_busy().take_held().continue_()
    phone.reads("Wrong PIN").marks(1).reads(hint)
    assert phone.bottom("message") <= 340
    phone.give_pin().sees("off").expire().sees("pin").tell("off")
    phone.give_pin("12345678").marks(1).does_not_read(hint)


def test_a_sign_in_that_hangs_says_so(phone: Phone) -> None:
    phone.stop_clock().ignore("auth").open().give_pin().is_busy().wait(4.5)
    phone.does_not_read("Slow").wait(1).reads("Slow connection. Still trying.")
    phone.wait(10).reads("Can't reach waker.").does_not_read("Slow").marks(0)


def test_caps_lock_is_told(phone: Phone) -> None:
    phone.tell("off").open().give_pin().sees("off").part("passphrase").focus()
    options = "{bubbles: true, key: '%s', modifierCapsLock: %s}"
    event = f"new KeyboardEvent('keyup', {options})"
    for key, state, told in (
        ("CapsLock", "true", phone.does_not_read),  # systems differ in what it says
        ("a", "true", phone.reads),
        ("b", "false", phone.does_not_read),
        ("c", "true", phone.reads),
    ):
        up = event % (key, state)
        phone.page.evaluate(f"document.activeElement.dispatchEvent({up})")
        told("Caps Lock is on.")
    phone.look().does_not_read("Caps Lock")  # elsewhere, it may have been turned off
    plain = "document.activeElement.dispatchEvent(new Event('keyup', {bubbles: true}))"
    phone.page.evaluate(plain)  # as a password manager does
    assert phone.sees("off").console == []


def test_secrets_are_sent_as_they_were_typed(phone: Phone) -> None:
    """Neither the page nor a phone's keyboard changes them."""
    spaced = " A\N{COMBINING DIAERESIS}".ljust(510) + " "  # of 512 bytes
    phone.tell("off").open()
    for pin in ("12345678", ("123456789-" * 13)[:128]):  # the shortest, the longest
        phone.hold("auth").page.keyboard.insert_text(pin)
        phone.page.keyboard.press("Enter")
        request = phone.take_held()
        assert request.request.post_data_json == {"pin": pin}
        error = {"error": f"Wrong, of {len(pin)}"}
        request.fulfill(status=401, json=error, headers=WAKERS)
        phone.reads(f"Wrong, of {len(pin)}")
    phone.give_pin().sees("off")
    for field in ("pin", "passphrase"):  # may be shown
        for name in ("autocapitalize", "autocorrect", "spellcheck"):
            expected = re.compile("off|false")
            expect(phone.part(field)).to_have_attribute(name, expected)
    phone.hold("start").page.keyboard.insert_text(spaced)
    phone.page.keyboard.press("Enter")
    assert phone.take_held().request.post_data_json == {"passphrase": spaced}


def test_password_managers_can_keep_the_two_secrets_apart(phone: Phone) -> None:
    phone.open()
    forms = phone.page.locator("form").evaluate_all(
        """(forms) => forms.map((form) => [...form].filter((e) => e.autocomplete)
            .map((e) => [e.type, e.autocomplete, e.hidden, e.value]))"""
    )
    assert forms == [
        [["text", "username", False, name], ["password", "current-password", False, ""]]
        for name in ("PIN", "Disk passphrase")
    ]
    for field in phone.page.locator("[autocomplete=username]:visible").all():
        box: Any = field.bounding_box()
        assert (box["width"], box["height"]) == (1, 1)


def test_a_token_without_a_status_leaves_the_pin_in_its_field(phone: Phone) -> None:
    """Or what is typed on could land in the field for the passphrase."""
    phone.stop_clock().answer("auth", 200, {"token": "x"}).open().give_pin()
    phone.reads("waker couldn't check the server").wait(5).sees("pin")
    assert (phone.part("pin").input_value(), phone.count("status")) == (PIN, 0)
    phone.tell("off").give_pin().sees("off")
    assert (phone.part("pin").input_value(), phone.passphrase()) == ("", "")


def test_a_passphrase_without_an_answer_may_have_arrived(phone: Phone) -> None:
    maybe, nothing = "may have got through", "Nothing has started so far."
    phone.stop_clock().tell("off").open().give_pin().sees("off")
    phone.abort("status").hold("start").start().is_busy().take_held()
    phone.wait(14).is_busy().wait(1.5).reads(maybe).reads("Can't reach waker.")
    assert phone.passphrase() == PASSPHRASE
    # The message ends with the next answer, but waker may read a request for 10 s.
    phone.tell("off").waits_for(nothing).does_not_read(maybe)
    phone.show("off", name="Shed").reads(nothing)
    phone.show("locked").does_not_read(nothing)
    # Unless it has come, even if it ended before the page saw it run.
    phone.hold("start").start().take_held().abort()
    phone.tell("locked", "failed", "not_asked").waits_for("From waker")
    phone.does_not_read(nothing).wait(12).does_not_read(nothing).show("off")
    phone.hold("start").start().tell("off", "waking").take_held().abort()
    phone.wait(4).sees("starting").does_not_read(maybe)
    phone.abort("{start,status}").press("Cancel").reads("Can't reach waker.")
    phone.tell("off", "waking").wait(2).does_not_read("Can't reach").sees("starting")
    phone.open().give_pin().sees("starting").answer("start", 200, STARTED)
    phone.tell("off", "cancelled", "cancelled").press("Cancel").sees("off")  # at once
    phone.type_passphrase().press("Show").look()  # as when it is hidden, or shown again
    expect(phone.part("passphrase")).to_have_attribute("type", "password")
    phone.press("Show").tell("up").wait(4).sees("up")
    assert phone.passphrase() == ""
    expect(phone.part("passphrase")).to_have_attribute("type", "password")


def test_signing_in_again_loses_neither_passphrase_nor_start(phone: Phone) -> None:
    lost = "waker has lost this start: it may have restarted. Your passphrase may have"
    phone.tell("off").open().give_pin().sees("off").expire().sees("pin")
    phone.reads("Signed out. Enter your PIN").tell("off")
    phone.give_pin("87654321").reads("Wrong PIN").give_pin().sees("off")
    phone.type_passphrase().expire().reads("Signed out").sees("off")
    expect(phone.page.get_by_role("status")).to_contain_text("Signed out")
    phone.offers("Sign in again").press("Sign in again").sees("pin")
    phone.reads("Enter your PIN again").tell("off").give_pin().sees("off")
    phone.answer("start", 401, EXPIRED).press("Wake and unlock").sees("pin")
    phone.tell("off").give_pin().sees("off")
    phone.offers("Wake and unlock").show("off", "waking").sees("starting")
    phone.expire().reads("Enter your PIN to see how the start goes.")
    phone.does_not_read("Details")
    phone.tell("off", "waking").give_pin().sees("starting")
    # After its restart, waker knows nothing of a start.
    phone.expire().sees("pin").tell("off").give_pin().reads(lost)
    assert (phone.passphrase(), phone.count("start")) == (PASSPHRASE, 1)
    phone.show("locked").does_not_read(lost)
    phone.show("off", "waking").sees("starting").show("up").does_not_read(lost)
    # What was shown of the passphrase is not shown of the PIN.
    phone.show("locked").press("Show").open_details().answer("wol", 401, EXPIRED)
    phone.press("Wake only").sees("pin")
    expect(phone.part("pin")).to_have_attribute("type", "password")


def test_a_start_that_is_over_for_hours_is_not_called_lost(phone: Phone) -> None:
    """waker forgets it after one."""
    phone.stop_clock().tell("off", "waking").open().give_pin().sees("starting")
    phone.expire().sees("pin").page.clock.set_system_time("2030-01-03")
    phone.tell("off").give_pin().sees("off").does_not_read("lost")


def test_a_wrong_passphrase_is_told_with_what_may_help(phone: Phone) -> None:
    """What was typed since, or on another phone, is not called wrong."""
    wrong = "locked", "failed", "wrong_passphrase"
    phone.tell(*wrong).open().give_pin().reads("Last time: Wrong passphrase.")
    phone.marks(0).hold("start").start("x").is_busy().type_passphrase("typed since")
    phone.ignore("status").take_held().fulfill(json=STARTED)
    phone.sees("starting").show(*wrong).sees("locked")
    phone.reads("Wrong passphrase").does_not_read("Last time").marks(0)
    assert phone.passphrase() == "typed since"
    phone.answer("start", 200, STARTED)
    for given in ("\u00a0x", "x ", "x"):  # as pasting may bring
        phone.show("off").start(given).show(*wrong).reads("Wrong passphrase").marks(1)
        if given.strip() != given:
            phone.reads("It began or ended with a space")
    phone.does_not_read("a space").reads("Show it, and look for a typo.")
    caret = "(e) => [e.selectionStart, e.selectionEnd]"
    assert phone.part("passphrase").evaluate(caret) == [1, 1]
    phone.open_details().hold("wol").press("Wake only").is_busy()
    assert phone.message().endswith("(marked)")
    phone.take_held().abort()
    phone.hold("start").start("y").is_busy()
    assert phone.message() == ""
    phone.take_held().fulfill(json=STARTED)
    assert phone.count("start") == 5
    phone.show("booting", "booting", "unlocked").show(*wrong).sees("locked").marks(0)
    # Nor is what this phone has cancelled, if another one is wrong then.
    phone.answer("start", 200, STARTED).start("never sent").sees("starting")
    phone.show("locked", "cancelled", "cancelled").sees("locked").show(*wrong)
    phone.reads("Wrong passphrase.").marks(0).does_not_read("look for a typo")
    assert phone.passphrase() == "never sent"


def test_what_another_phone_did_is_not_blamed_on_this_one(phone: Phone) -> None:
    """Its start has another id. A request without an answer may have begun it."""
    wrong = "locked", "failed", "wrong_passphrase"
    other: Any = {"id": 99}
    phone.tell("off").open().give_pin().sees("off").answer("start", 200, STARTED)
    for seen in ((), ("locked", "unlocking", "", 0, 1, 2)):
        phone.show("off").ignore("status").start("mine").sees("starting")
        phone.show("off", "waking", "", 0, 5)
        if seen:  # the other start, while it runs
            phone.show(*seen, **other)
        phone.tell(*wrong, **other).look().sees("locked").reads("Wrong passphrase.")
        phone.does_not_read("typo").marks(0)
        assert ("Last time" in phone.message()) == (not seen)
        assert phone.passphrase() == "mine"
    phone.show("off").hold("start").start("x ").take_held().abort()
    phone.tell(*wrong).look().sees("locked").reads("with a space").marks(0)
    phone.does_not_read("Last time")
    # And even if it was tried again meanwhile.
    phone.show("off").hold("start").start("x ").take_held().abort()
    phone.answer("start", 409, {"error": "Another start is running"}).start("x ")
    phone.reads("Another start").tell("off", "waking", "", 0, 2).look().sees("starting")
    phone.show(*wrong).reads("with a space")
    # What is typed since stays.
    phone.type_passphrase("corrected")
    phone.show("locked", "booting", "not_confirmed", **other).sees("doubtful")
    assert phone.passphrase() == "corrected"


def test_what_an_administrator_needs_stands_in_the_details(phone: Phone) -> None:
    key = f"SHA256:{'x' * 43}"
    refused = (
        f"the server refused waker's SSH key: {key} for user root. " + "Add it. " * 20
    )
    phone.tell("locked", "failed", "key_refused", message=refused).open().give_pin()
    phone.reads("Last time: The server refused waker's SSH key. See Details.")
    phone.does_not_read("Add it").open_details().reads("Add it").reads("for user root")
    short = "after 10 minutes, the server did not answer: check Wake-on-LAN."
    phone.tell("off", "failed", "not_awake", message=short).look()
    phone.reads("did not answer: check Wake\u2011on\u2011LAN.")  # does not break in two


def test_typing_is_not_interrupted_by_news(phone: Phone) -> None:
    phone.tell("off").open().give_pin().sees("off").type_passphrase()
    doubt = "booting", "not_confirmed"
    for state, view in (("unknown", "unknown"), ("locked", "locked")):
        phone.show(state).sees(view)
        assert (phone.focus(), phone.passphrase()) == ("passphrase", PASSPHRASE)
    for button, states, start, view in (
        ("Enter another", ("locked", "off"), doubt, "doubtful"),
        ("Try again", ("locked", "up"), ALARM, "foreign"),
    ):
        phone.show("off", "waking").sees("starting").show(states[0], *start)
        phone.press(button).type_passphrase()
        phone.show(states[1], *start).sees(view)
        assert (phone.focus(), phone.passphrase()) == ("passphrase", PASSPHRASE)


def test_a_server_that_did_not_confirm_can_get_another_passphrase(phone: Phone) -> None:
    phone.tell("locked", "booting", "not_confirmed").open().give_pin()
    phone.sees("doubtful").press("Enter another").offers("Unlock", "Stop watching")
    assert phone.focus() == "passphrase"
    phone.hold("start").start("another").is_busy()
    phone.tell("locked", "unlocking").take_held().fulfill(json=STARTED)
    phone.sees("starting").show("locked", "booting", "not_confirmed").sees("doubtful")
    phone.offers("Enter another", "Stop watching")
    assert phone.passphrase() == ""
    # Nor if the page has not seen it run, because the connection was lost.
    phone.press("Enter another").ignore("status").hold("start").start("another")
    phone.take_held().abort()
    phone.reads("may have got through")
    new = {"id": 99}
    phone.show("locked", "booting", "not_confirmed", 0, 1, 2, 5, **new).sees("doubtful")
    phone.does_not_read("Nothing has started").does_not_read("may have got through")
    assert phone.passphrase() == ""


def test_an_alarm_says_what_it_can_be_and_presses_nobody(phone: Phone) -> None:
    """Nor does a server that is unlocked."""
    filled = "getComputedStyle(document.querySelector('.action:not([hidden])'))"
    colour = f"{filled}.backgroundColor"
    phone.tell("locked", "unlocking").open().give_pin().sees("starting")
    phone.tell("locked", *ALARM, message=KEYS).look().sees("foreign")
    phone.reads("another device")
    phone.reads("a new key").reads("The passphrase was not sent")
    assert phone.focus() == "headline"
    expect(phone.page.locator("input:visible")).to_have_count(0)
    phone.offers("Try again").does_not_read("SHA256").open_details()
    keys = phone.page.locator("#more code")
    expect(keys).to_have_text([f"SHA256:{'x' * 43}", f"SHA256:{'y' * 43}"])
    expect(keys.first).to_have_css("display", "block")
    key, around = (each.bounding_box() for each in (keys.first, phone.part("more")))
    assert key
    assert around
    middles = [each["x"] + each["width"] / 2 for each in (key, around)]
    assert middles[0] == pytest.approx(middles[1], abs=1)
    assert phone.page.evaluate(colour) == "rgba(0, 0, 0, 0)"
    phone.press("Try again").sees("foreign").offers("Unlock", "Wake only")
    assert phone.focus() == "passphrase"
    phone.tell("up", *ALARM).open().give_pin().sees("foreign").offers("Try again")
    phone.show("locked", "cancelled", "unlocked").sees("opened").offers("Enter the")
    assert phone.page.evaluate(colour) == "rgba(0, 0, 0, 0)"


# ---- Keys and browsers ---------------------------------------------------------------


def test_the_keyboard_alone_is_enough_and_focus_is_never_lost(phone: Phone) -> None:
    ring = "getComputedStyle(document.activeElement).outlineWidth"
    keyboard = phone.tell("off").open().page.keyboard
    assert phone.focus() == "pin"
    phone.give_pin().sees("off")
    assert phone.focus() == "passphrase"
    for name, kind in (("Show", "text"), ("Hide", "password")):
        keyboard.press("Tab")
        assert phone.focus() == f"{name} passphrase"
        expect(phone.part("show-passphrase")).to_have_text(name)
        assert phone.page.evaluate(ring) != "0px"
        keyboard.press("Enter")
        expect(phone.part("passphrase")).to_have_attribute("type", kind)
        keyboard.press("Shift+Tab")
    phone.answer("wol", 200, {"message": "Sent to somebody"})
    for key in ("Tab", "Tab", "Tab", "Enter", "Tab", "Enter"):
        keyboard.press(key)
    phone.reads("was sent")
    assert phone.focus() == "Wake only"
    phone.show("booting").offers("Unlock", "Wake only")
    phone.show("off").does_not_read("was sent")
    assert phone.focus() == "Wake only"
    phone.answer("start", 200, STARTED).ignore("status").start()
    phone.sees("starting")  # before waker is asked how it goes
    assert phone.focus() == "headline"
    keyboard.press("Tab")
    assert phone.focus() == "Cancel"
    phone.show("up", "done", "up").sees("up")
    assert phone.focus() == "headline"


def test_polls_are_rare_while_nothing_happens(phone: Phone) -> None:
    """Every 3 s, and every 9 s once the server is up.

    Asked within 10 s, waker overlooks one lost packet.
    """
    phone.stop_clock().tell("off").open().give_pin().sees("off").type_passphrase()
    for state, pause in (("off", 3), ("up", 9)):
        count = phone.show(state).polls()
        for _ in range(4 * pause):  # each poll has a second of that for its answer
            phone.wait(1).has_no_poll_under_way()
        assert 3 <= phone.polls() - count <= 5
        count = phone.look().polls()
        assert phone.has_no_poll_under_way().wait(pause + 1).polls() > count
    assert phone.passphrase() == ""


@pytest.mark.browsers
def test_a_hidden_page_sends_no_requests_and_hides_what_is_shown(
    api: Client, tmp_path: Path, playwright: Playwright
) -> None:
    """Without Playwright's defaults, which make every page visible all the time."""
    command = [need(*CHROMIUM), "--headless", "--no-sandbox", "about:blank"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={tmp_path}/profile"]
    with listening(command) as address:
        browser = playwright.chromium.connect_over_cdp(address, no_defaults=True)
        page, other = browser.contexts[0].pages[0], browser.contexts[0].new_page()
        phone = Phone(page, api)

        def is_hidden_behind_another_tab(field: str) -> None:
            phone.press("Show")
            expect(phone.part(field)).to_have_attribute("type", "text")
            other.bring_to_front()
            expect(phone.part(field)).to_have_attribute("type", "password")

        def rests() -> bool:
            page.wait_for_function("document.hidden")
            count = phone.polls()
            return phone.wait(60).polls() == count

        page.bring_to_front()
        phone.stop_clock().tell("off").open().part("pin").fill(PIN)
        is_hidden_behind_another_tab("pin")
        page.bring_to_front()
        phone.give_pin().sees("off").type_passphrase()
        is_hidden_behind_another_tab("passphrase")
        assert rests()
        with page.expect_request("**/api/status"):  # though no time passes
            page.bring_to_front()
        # But a tab in the background shows how a start ends, and then rests.
        phone.tell("off", "waking").look().sees("starting")
        other.bring_to_front()
        page.wait_for_function("document.hidden")
        phone.tell("up", "done", "up", 0, 38, 42, 62, 62).wait(2).sees("up")
        expect(page).to_have_title(re.compile("^Up .*Home server"))
        phone.wait(0.5).has_no_poll_under_way()
        assert rests()


POLICY = "<meta http-equiv=Content-Security-Policy content=\"script-src 'self'\">"
# What is changed in the page, and what people are told then.
UNABLE = {
    "no JavaScript": ("", "", "JavaScript may be off"),
    "a proxy retypes": (' type="module"', ' type="x-module"', "a proxy may have"),
    "a proxy forbids": ("<title", f"{POLICY}<title", "a proxy may have"),
    "too old": ("<main", "<script>delete Object.hasOwn</script><main", "too old"),
    "syntax": ("const clock", "konst clock", "a proxy may have"),
    "exception": ("const clock =", "const clock = nobody;", "a proxy may have"),
    "later": ("const view = viewOf(", "const view = nobody(", "nobody is not defined"),
}


@pytest.mark.slow
def test_a_browser_that_cannot_run_the_page_says_why(
    api: Client, new_phone: NewPhone
) -> None:
    for old, new, words in UNABLE.values():
        assert old in SOURCE
        phone = new_phone(api, java_script_enabled=bool(old))
        phone.page.set_content(SOURCE.replace(old, new))
        phone.is_blocked(words).page.goto("about:blank")
        phone.console.clear()


def send_slowly(server: socket.socket, answer: bytes, is_over: threading.Event) -> None:
    """Answer one request, with 2,000 bytes a second; the last few come late."""
    tail = len(answer) - 92
    with server.accept()[0] as tcp:
        tcp.recv(65536)
        for start in range(0, tail, 200):
            tcp.sendall(answer[start : min(start + 200, tail)])
            is_over.wait(0.1)
        is_over.wait(3.5)
        tcp.sendall(answer[tail:])
    is_over.set()


def test_a_page_that_comes_slowly_blames_nobody_and_can_be_filled_in(
    api: Client, phone: Phone
) -> None:
    """Its script arrives after more than the 3 s after which a missing one is told."""
    packed = api.call("GET", "/", headers={"Accept-Encoding": "gzip"})
    head = (
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\r\n"
    )
    has_come, told = threading.Event(), False
    with waker.listen(("127.0.0.1", 0)) as slow:
        arguments = slow, head.encode() + packed.body, has_come
        sender = threading.Thread(target=send_slowly, args=arguments)
        sender.start()
        url = f"http://127.0.0.1:{slow.getsockname()[1]}/"
        phone.tell("off").page.goto(url, wait_until="commit")
        phone.give_pin()  # nothing happens so far
        assert not has_come.is_set()
        while not has_come.is_set():
            told = told or phone.part("blocked").is_visible()
            phone.page.wait_for_timeout(50)
        sender.join()
    assert not told
    expect(phone.part("blocked")).to_be_empty()
    phone.press("Sign in").sees("off").console.clear()  # there is no icon


def test_the_next_visit_knows_the_name(phone: Phone) -> None:
    """Two wakers at one address are kept apart, even on a home screen."""
    page, path_of = phone.page, re.compile("/(one|two)/")
    base = f"http://127.0.0.1:{phone.client.port}"
    page.route("**", lambda route: route.abort())  # what is not below a path
    page.route(
        path_of,
        lambda route: route.continue_(url=path_of.sub("/", route.request.url)),
    )
    for path in ("one", "two"):
        page.goto(f"{base}/{path}/")
        expect(page).to_have_title("waker")
        status = OLD | {"name": f"Number {path}"}
        phone.answer("auth", 200, {"token": "x", "status": status})
        phone.give_pin().sees("off").reads(f"Number {path}")
    for path in ("one", "two"):
        page.goto(f"{base}/{path}/")
        expect(page).to_have_title(f"Number {path}")
        app = page.locator("[name=apple-mobile-web-app-title]")
        expect(app).to_have_attribute("content", f"Number {path}")


def test_a_browser_without_storage_is_good_enough(phone: Phone) -> None:
    damage = "for (const key of Object.keys(localStorage)) localStorage[key] += '}'"
    phone.tell("off").open().page.evaluate(damage)
    phone.reload().give_pin().sees("off")
    refuse = "Object.defineProperty(window, 'localStorage', {get() { throw 0; }})"
    phone.page.add_init_script(refuse)
    phone.tell("off").open().does_not_read("not encrypted").give_pin().sees("off")
