"""The page in a real browser, against the real daemon.

If an answer would take a real machine minutes, or needs a bad network, the test's
`Phone` answers instead of the daemon.
"""

import contextlib
import ctypes.util
import itertools
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from conftest import CHECKOUT, PASSPHRASE, PIN, Client, need, running, wait_for
from machine import CLOSED, OPEN, Machine
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

SOURCE = Path(waker.__file__).with_name("ui.html").read_text()
CHROMIUM = "chromium", "chromium-browser", "google-chrome-stable", "google-chrome"
FONTS = CHECKOUT / "tests/support/browsers/fonts.conf"
# What the console shows if a request is refused or lost on purpose.
EXPECTED = re.compile(r"Failed to load resource: (.* (40[01349]|429|50\d) |net::ERR_)")
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
def new_phone(chromium: Browser) -> Iterator[NewPhone]:
    """Make phones, whose consoles must be empty at the end."""
    phones: list[Phone] = []

    def make(client: Client, **options: Any) -> Phone:
        page = chromium.new_page(has_touch=True, is_mobile=True, **options)
        page.set_viewport_size({"width": 320, "height": 640})
        phones.append(Phone(page, client))
        return phones[-1]

    yield make
    for phone in phones:
        phone.page.close()
        assert [text for text in phone.console if not EXPECTED.match(text)] == []


@pytest.fixture
def phone(api: Client, new_phone: NewPhone) -> Phone:
    return new_phone(api)


def test_the_page_can_be_read_in_one_sitting() -> None:
    """And comes within the first packets of a connection."""
    assert len(SOURCE.splitlines()) <= 840
    assert len(waker.Page().packed.body) <= 13_800  # bytes


# ---- What is shown, and to whom ------------------------------------------------------

# Only violations are wanted, and the page has no style sheets to load.
VIOLATIONS = """async (rules) => {
    const options = { resultTypes: ["violations"], preload: false, ...rules };
    return (await axe.run(options)).violations;
}"""
# In the dark only the colours differ.
RULES: dict[Any, dict[str, str]] = {"light": {}, "dark": {"runOnly": "color-contrast"}}
# What is cut, or too small for a finger. An iPhone zooms into a field with small text.
FAULTS = """() => [...document.querySelectorAll("label, button, input, summary, li, p")]
    .filter((e) => e.getClientRects().length)
    .filter((e) => !e.matches("[role=status], [readonly]"))  // not for the eye
    .filter((e) => {
        const { width, height } = e.getBoundingClientRect();
        const size = parseFloat(getComputedStyle(e).fontSize);
        const isSmall = Math.min(width, height) < 44;
        if (isSmall && e.matches("button, input, summary")) return true;
        if (e.matches("input")) return size < 16 || e.clientWidth < 7 * size;
        return e.scrollWidth > e.clientWidth;
    }).map((e) => e.id || e.textContent)"""


LARGEST = """() => {
    const size = (e) => parseFloat(getComputedStyle(e).fontSize);
    const texts = [...document.querySelectorAll("h1, label, p, li, button, #number")];
    const seen = texts.filter((e) => e.textContent && e.getClientRects().length);
    return seen.sort((one, other) => size(other) - size(one))[0].id;
}"""


@pytest.mark.parametrize("go", [during_a_start, around_a_start])
def test_every_state_is_accessible_and_fits_a_small_screen(
    phone: Phone, go: Any, request: pytest.FixtureRequest
) -> None:
    """With --screenshots FOLDER, pictures of all states are put there."""
    folder = request.config.getoption("--screenshots")
    page = phone.page
    page.add_init_script(Axe().axe_script)
    for state in go(phone):
        page.set_viewport_size({"width": 390, "height": 844})
        for scheme, rules in RULES.items():
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(VIOLATIONS, rules) == [], (state, scheme)
            if folder:
                name = f"{folder}/{state}, {scheme}.png"
                page.screenshot(path=name, animations="disabled")
        page.set_viewport_size({"width": 320, "height": 640})
        for size in ("200%", "100%"):
            page.evaluate(f"document.documentElement.style.fontSize = '{size}'")
            assert page.evaluate("document.documentElement.scrollWidth") <= 320, state
            assert page.evaluate(FAULTS) == [], (state, size)
            assert page.evaluate(LARGEST) == "headline", (state, size)


def test_steps_and_times_come_from_waker(phone: Phone) -> None:
    """So a phone that was opened late shows what the first one does."""
    phone.stop_clock().tell("booting", "booting", "unlocked", 0, 38, 42, 60).open()
    phone.give_pin().reads("1:00").reads("Starting")
    expect(phone.page.locator("[aria-current=step]")).to_contain_text("Boot")
    expect(phone.page.locator("li.done")).to_have_count(2)
    expect(phone.page).to_have_title(re.compile("1:00.*Home server"))
    expect(phone.part("line")).to_have_text(re.compile("carry on booting"))


def test_the_forecast_is_wakers_and_for_starts_that_wake(phone: Phone) -> None:
    """Half of all starts take longer than the median, so that alone is no news."""
    phone.stop_clock().tell("off", "waking", "", 0, 1).open().give_pin()
    phone.sees("starting").reads("This can take a few minutes").does_not_read("left")
    phone.show("up", "done", "up", 0, 38, 42, 62, 62)  # is remembered by waker alone
    phone.show("off", "waking", "", 0, 17).reads("a few minutes")
    for seconds, words in (
        (17, "About 45\u00a0s left"),
        (62, "Any moment now"),
        (80, "Any moment now"),
        (81, "Longer than usual"),
    ):
        phone.show("off", "waking", "", 0, seconds, usual=62)
        phone.reads(words).reads("You can put your phone away")
    # The ring closes when the server is up.
    expect(phone.part("arc")).to_have_attribute("stroke-dasharray", "96 100")
    phone.show("locked", "unlocking", "", 0, 0, 17, usual=62, woke=False)
    phone.reads("a few minutes").does_not_read("left")


def test_the_end_is_worth_waiting_for(phone: Phone) -> None:
    """The ring closes, it is day, and the steps stay where they were."""
    place = """() => [...document.querySelectorAll("h1, #line, li")]
        .map((e) => e.getBoundingClientRect().top)"""
    icon, arc = phone.page.locator("[rel=icon]"), phone.part("arc")
    phone.stop_clock().tell("off").open().give_pin().sees("off")
    icons = [icon.get_attribute("href")]
    assert phone.dawn() == 0
    booting = "booting", "booting", "unlocked", 0, 38, 42
    dawns, places = [], []
    for told in (("off", "waking", "", 0, 9), (*booting, 50), (*booting, 99)):
        phone.show(*told, usual=62).sees("starting")
        dawns.append(phone.dawn())
        places.append(phone.page.evaluate(place))
        icons.append(icon.get_attribute("href"))
    assert 0 < dawns[0] < dawns[1] < dawns[2] < 1, dawns
    expect(arc).to_have_attribute("stroke-dasharray", "96 100")
    phone.show("up", "done", "up", 0, 38, 42, 62, 62).sees("up")
    phone.reads("Up\n\nStarted in 1\u00a0min 2\u00a0s.\nReady.")
    spoken = re.compile("Started in 1\u00a0min 2\u00a0s.")
    expect(phone.page.get_by_role("status")).to_have_text(spoken)
    expect(arc).to_have_attribute("stroke-dasharray", "100 100")
    expect(phone.page.locator("li.done")).to_have_count(3)
    took = [item.get_attribute("data-took") for item in phone.page.locator("li").all()]
    assert took == ["0:38", "0:04", "0:20"]
    assert phone.dawn() == 1
    icons.append(icon.get_attribute("href"))
    assert len({*icons}) == len(icons)
    assert phone.page.evaluate(place) == places[0] == places[1] == places[2]
    # The sun does not set if the initrd did not report.
    phone.show("locked", "booting", "not_confirmed", 0, 38, 42, 50, usual=62)
    assert phone.sees("doubtful").dawn() == dawns[1]
    expect(arc).not_to_have_attribute("stroke-dasharray", re.compile(""))
    phone.tell("up").look().reads("Ready").does_not_read("Boot")
    phone.tell("up", "done", "up", 0, 5).look().open_details()  # it was up
    phone.reads("From waker").reads("Ready").does_not_read("Boot")


def test_dawn_needs_no_motion_and_leaves_forced_colours_alone(phone: Phone) -> None:
    phone.stop_clock().tell("up").open().give_pin().sees("up")
    phone.page.emulate_media(reduced_motion="reduce")
    expect(phone.part("dawn")).to_have_css("opacity", "1")
    expect(phone.part("dawn")).to_have_css("transition-duration", "0s")
    phone.page.emulate_media(forced_colors="active")
    expect(phone.part("dawn")).to_have_css("display", "none")
    for edge in ("card", "strip"):  # have no colour of their own then
        expect(phone.part(edge)).to_have_css("border-top-width", "1px")
    phone.show("off", "waking", "", 0, 9, usual=62).sees("starting")
    colours = [phone.css(part, "stroke") for part in ("track", "arc")]
    assert colours[0] != colours[1]


def test_nothing_is_added_while_a_start_runs(phone: Phone) -> None:
    place = """() => [...document.querySelectorAll("h1, li, button, summary")]
        .map((e) => e.getBoundingClientRect().top)"""
    phone.stop_clock().tell("off").open().give_pin().sees("off")
    phone.ignore("status").answer("start", 200, {"message": "Started"}).start()
    places = [phone.sees("starting").page.evaluate(place)]
    for told in (
        ("off", "waking", "", 0, 5),
        ("locked", "unlocking", "", 0, 38, 40),
        ("booting", "booting", "unlocked", 0, 38, 42, 50),
    ):
        phone.show(*told, usual=45).reads("Details")
        places.append(phone.page.evaluate(place))
    assert [each for each in places if each != places[0]] == []


def test_seconds_pass_between_polls_and_never_run_back(phone: Phone) -> None:
    phone.stop_clock().tell("off", "waking", "", 0, 3).open().give_pin().reads("0:03")
    phone.ignore("status").wait(2).reads("0:05")
    phone.show("off", "waking", "", 0, 4).reads("0:05").wait(1).reads("0:06")
    phone.show("locked", "unlocking", "", 0, 9, 9).reads("0:09")
    phone.lose_connection().wait(5).reads("0:09")
    phone.show("off").show("off", "waking", "", 0, 1).reads("0:01")


def test_only_a_server_that_is_unlocked_is_said_to_boot(phone: Phone) -> None:
    phone.tell("booting", "booting", "unlocked").open().give_pin().reads(
        "carry on booting"
    )
    phone.show("off", "booting", "not_confirmed").does_not_read("carry on booting")
    expect(phone.page.locator("li.done")).to_have_text("Wake")
    expect(phone.page.locator("li.unsure")).to_have_text("Unlock the disk")


def test_only_what_can_be_undone_can_be_cancelled(phone: Phone) -> None:
    phone.tell("off", "waking").open().give_pin().sees("starting").offers("Cancel")
    for outcome in ("unlocked", "already_open", "not_confirmed"):
        phone.show("booting", "booting", outcome).offers("Stop watching")


RECORD = """() => {
    window.announced = [];
    const live = document.querySelector("[role=status]");
    new MutationObserver(() => announced.push(live.textContent))
        .observe(live, {childList: true, characterData: true, subtree: true});
}"""


def test_two_secrets_and_two_enters_bring_the_server_up(
    machine: Machine, new_phone: NewPhone
) -> None:
    """It is announced, and a second phone sees it. The browser keeps no secret."""
    machine.make_keys()
    with machine.waker() as started:
        phone, other = (new_phone(started.client).open() for _ in range(2))
        phone.page.evaluate(RECORD)
        other.give_pin().sees("off")
        phone.page.keyboard.type(PIN)
        phone.page.keyboard.press("Enter")
        phone.sees("off")
        phone.page.keyboard.type(PASSPHRASE)
        phone.page.keyboard.press("Enter")
        phone.sees("starting")
        other.sees("starting")
        wait_for(machine.packets)
        machine.ask()
        phone.reads("carry on booting")
        machine.show(CLOSED, OPEN)
        phone.sees("up")
        other.sees("up")
        assert phone.page.inner_text("main") == other.page.inner_text("main")
        announced = phone.page.evaluate("announced")
    assert machine.received() == [PASSPHRASE.encode()]
    assert [text for text, _ in itertools.groupby(announced)] == announced
    assert announced[0] == "Off", announced
    assert re.match(r"Up\. Started in \d+\s+s\.", announced[-1]), announced
    assert "Boot" in announced
    places = "[{...localStorage}, {...sessionStorage}, document.cookie, location.href]"
    kept = phone.page.evaluate(f"JSON.stringify({places})")
    assert "name" in kept
    assert not re.search("2468|horse", kept)  # of the two secrets
    assert (phone.part("pin").input_value(), phone.passphrase()) == ("", "")


# ---- What fits where -----------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(390, 664), (320, 568)])
def test_what_a_form_needs_stays_above_a_phones_keyboard(
    phone: Phone, width: int, height: int
) -> None:
    bottom = """() => Math.max(...[...document.querySelectorAll(".action")]
        .slice(0, 2).map((e) => e.getBoundingClientRect().bottom))"""
    phone.page.set_viewport_size({"width": width, "height": height})
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
        assert phone.page.evaluate(bottom) <= 380  # px that a keyboard leaves
        assert phone.css("sign", "width") == "40px"


def test_a_phone_on_its_side_shows_all_of_a_start(phone: Phone) -> None:
    phone.page.set_viewport_size({"width": 844, "height": 390})
    phone.tell("off", "waking", "", 0, 9).open().give_pin().sees("starting")
    for part in ("steps", "cancel", "line"):
        box: Any = phone.part(part).bounding_box()
        assert box["y"] + box["height"] <= 390, part


def test_on_a_desktop_the_card_does_not_hang_from_the_top(phone: Phone) -> None:
    phone.page.set_viewport_size({"width": 1280, "height": 800})
    box: Any = phone.open().part("card").bounding_box()
    assert 80 <= box["y"] <= 200


@pytest.mark.parametrize("name", ["2001:db8:1234:5678:9abc:def0:1234:5678", "x" * 41])
def test_a_long_name_does_not_push_the_page_sideways(phone: Phone, name: str) -> None:
    wide = "document.documentElement.scrollWidth"
    for told in (("off",), ("off", "waking", "", 0, 9)):
        phone.tell(*told, name=name).open().give_pin().reads(name)
        for size in ("100%", "200%"):
            phone.page.evaluate(f"document.documentElement.style.fontSize = '{size}'")
            assert phone.page.evaluate(wide) <= 320


def test_show_stands_at_the_fields_end_at_200_percent(phone: Phone) -> None:
    ends = """() => ["show-pin", "sign-in"].map((id) =>
        document.getElementById(id).getBoundingClientRect().right)"""
    phone.open().page.evaluate("document.documentElement.style.fontSize = '200%'")
    show, field = phone.page.evaluate(ends)
    assert abs(show - field) <= 1


# ---- Only what is true now -----------------------------------------------------------


def test_a_lost_connection_is_shown_and_recovers_by_itself(phone: Phone) -> None:
    network = phone.stop_clock().open().page.context
    network.set_offline(True)
    phone.is_current().give_pin().reads("Couldn't reach waker").sees("pin")
    network.set_offline(False)
    phone.press("Sign in").sees("off").is_current()
    network.set_offline(True)
    phone.wait(3).reads("Can't reach waker").sees("off")
    expect(phone.page.locator("[data-old]")).to_have_count(1)
    expect(phone.page.get_by_role("status")).to_contain_text("Can't reach waker")
    network.set_offline(False)
    phone.wait(2).does_not_read("Can't reach").is_current()


@pytest.mark.parametrize(
    ("status", "body", "helps"), STRANGERS.values(), ids=[*STRANGERS]
)
def test_an_answer_of_somebody_else_is_not_taken_for_wakers(
    phone: Phone, status: int, body: str, helps: bool
) -> None:
    told = f"not waker ({status})"

    def fulfil(path: str) -> None:
        phone.page.route(
            f"**/api/{path}", lambda route: route.fulfill(status=status, body=body)
        )

    phone.stop_clock().tell("off").open()
    fulfil("auth")
    phone.give_pin().reads(told).offers("Sign in", *["Reload"] * helps).sees("pin")
    phone.tell("off").give_pin().sees("off")
    fulfil("status")
    phone.look().reads(told).sees("off").does_not_read("[object")
    expect(phone.page.get_by_role("button", name="Reload")).to_have_count(int(helps))
    phone.tell("locked").wait(1.5).sees("locked").is_current()  # when waker is back
    fulfil("start")
    phone.start().reads(told)
    if 400 <= status < 500:  # it has not passed the request on
        phone.does_not_read("may have got through")
    else:
        phone.reads("may have got through")
    if helps:
        phone.press("Reload").sees("pin").reads("Sign in")


def test_details_say_how_old_a_state_is(phone: Phone) -> None:
    phone.stop_clock().tell("up").open().give_pin().sees("up").open_details()
    phone.does_not_read("ago").lose_connection().wait(65)
    phone.reads("Up").reads("Last checked 1\u00a0min 5\u00a0s ago.")


def test_a_restart_of_waker_during_a_start_is_told(
    config: waker.Config, new_phone: NewPhone
) -> None:
    """Then its tokens and the start are gone, but not what is in the field."""
    asleep = config._replace(mac=waker.Mac(b"\0" * 6))  # no packet wakes it
    with running(asleep) as client:
        phone = new_phone(client).open().give_pin().sees("off").start()
        phone.sees("starting").page.context.set_offline(True)
        phone.reads("Can't reach waker")
    with running(asleep, client.port):
        phone.page.context.set_offline(False)
        phone.reads("Signed out during a start").give_pin().sees("off")
        phone.reads("waker has lost this start")
        assert phone.passphrase() == PASSPHRASE


def test_a_start_that_waker_has_lost_is_not_passed_over(phone: Phone) -> None:
    lost = "waker has lost this start"
    phone.tell("off", "waking").open().give_pin().sees("starting")
    phone.show("off").reads(lost).show("locked").does_not_read(lost)
    phone.show("off", "waking").sees("starting").show("up").does_not_read(lost)
    phone.show("off").expire().reads("Signed out. Enter your PIN")


def test_a_redirect_is_told_from_silence(phone: Phone) -> None:
    phone.stop_clock().tell("off").open().give_pin().sees("off")
    away = {"Location": "/elsewhere"}
    phone.page.route(
        "**/api/status", lambda route: route.fulfill(status=302, headers=away)
    )
    phone.look().reads("not waker (a redirect)").offers("Wake and", "Wake only", "Rel")
    phone.lose_connection().does_not_read("redirect").offers("Wake and", "Wake only")


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
            phone.press("Wake only" if view == "off" else "Send the wake-up signal")
        phone.reads("was sent. Nothing confirms it.")
        expect(phone.part("message")).not_to_have_attribute("data-kind", "good")


def test_polls_go_on_though_the_clock_is_set_back(phone: Phone) -> None:
    phone.stop_clock().tell("off", "waking", "", 0, 9).open().give_pin().reads("0:09")
    phone.page.clock.set_system_time("2029-12-31")
    phone.wait(3).reads("0:1")
    count = phone.count("status")
    for _ in range(5):
        phone.wait(1).has_no_poll_under_way()
    assert phone.count("status") > count
    phone.does_not_read("-")


def test_an_error_of_another_script_goes_and_one_of_ours_stays(phone: Phone) -> None:
    fail = "setTimeout(() => { throw new Error('from an extension'); })"
    reject = "void Promise.reject(new Error('from an app'))"
    phone.tell("off").open().give_pin().sees("off")
    for script in (fail, reject):
        with phone.page.expect_event("pageerror"):
            phone.page.evaluate(script)
        expect(phone.part("blocked")).to_be_empty()
    phone.page.evaluate("document.querySelector('#line').remove()")
    phone.reads("Something went wrong").page.goto("about:blank")
    phone.console.clear()


def test_while_requests_hang_one_more_is_sent_and_what_is_shown_is_called_old(
    config: waker.Config, new_phone: NewPhone
) -> None:
    """As when a phone leaves its Wi-Fi."""
    with running(config) as client:
        phone = new_phone(client)
        phone.stop_clock().open().give_pin().sees("off")
    body = json.dumps({"name": "x", "state": "locked", "start": None})
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    with waker.listen(("127.0.0.1", client.port)) as silent:
        silent.settimeout(10)  # seconds
        phone.look()
        with silent.accept()[0] as first:
            assert first.recv(4) == b"GET "
            phone.wait(3.5)
            with silent.accept()[0] as second:
                assert second.recv(4) == b"GET "
                phone.wait(5).is_current().wait(3).reads("is slow").sees("off")
                assert phone.count("status") == 2
                second.sendall(answer.encode())
                phone.sees("locked").is_current()


OLD = {"name": "Home server", "state": "off", "start": None}


def test_an_older_answer_never_replaces_a_newer_one(phone: Phone) -> None:
    phone.stop_clock().tell("off").open().give_pin().sees("off")
    first = phone.hold("status").look().take_held()
    phone.tell("up").wait(3.5).sees("up").ignore("status")
    with phone.page.expect_event("requestfinished"):
        first.fulfill(json=OLD)
    phone.wait(0.1).sees("up")


def test_a_late_401_does_not_end_a_new_token(phone: Phone) -> None:
    phone.stop_clock().tell("off").open().give_pin().sees("off")
    first = phone.hold("status").look().take_held()
    phone.expire().wait(3.5).sees("pin").tell("off").give_pin().sees("off")
    with phone.page.expect_event("requestfinished"):
        first.fulfill(status=401, json={"error": "Expired"}, headers=WAKERS)
    phone.wait(0.5).sees("off").ignore("status").wait(0.5).sees("off")


def test_a_status_from_before_a_start_does_not_hide_it(phone: Phone) -> None:
    phone.stop_clock().tell("off").open().give_pin().sees("off")
    before = phone.hold("status").look().take_held()
    phone.ignore("status").answer("start", 200, {"message": "Started"})
    phone.start().sees("starting")
    with phone.page.expect_event("requestfinished"):
        before.fulfill(json=OLD)
    phone.wait(0.5).sees("starting")


def test_nothing_turns_offline_or_if_motion_is_unwanted(phone: Phone) -> None:
    moving = """document.getAnimations().filter(
        (each) => each.effect.getTiming().iterations === Infinity).length"""
    phone.tell("booting", "waking").open().give_pin().sees("starting")
    assert phone.page.evaluate(moving) > 0
    phone.page.emulate_media(reduced_motion="reduce")
    assert phone.page.evaluate(moving) == 0
    phone.page.emulate_media(reduced_motion="no-preference")
    assert phone.page.evaluate(moving) > 0
    phone.lose_connection().sees("starting")
    assert phone.page.evaluate(moving) == 0


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


def test_a_token_without_a_status_leaves_the_pin_in_its_field(phone: Phone) -> None:
    """Or what is typed on could land in the field for the passphrase."""
    phone.stop_clock().answer("auth", 200, {"token": "x"}).open().give_pin()
    phone.reads("waker couldn't check the server").wait(5).sees("pin")
    assert phone.part("pin").input_value() == PIN
    assert phone.count("status") == 0
    phone.tell("off").give_pin().sees("off")
    assert (phone.part("pin").input_value(), phone.passphrase()) == ("", "")


# ---- The passphrase ------------------------------------------------------------------


def test_a_start_is_made_once_and_can_be_cancelled(
    config: waker.Config, new_phone: NewPhone
) -> None:
    asleep = config._replace(mac=waker.Mac(b"\0" * 6))  # no packet wakes it
    with running(asleep) as client:
        phone = new_phone(client).open().give_pin().sees("off").press("Show")
        phone.hold("start").start().is_busy()
        expect(phone.part("passphrase")).to_have_attribute("type", "password")
        phone.part("start").click(force=True)  # the first has not been answered yet
        phone.take_held().continue_()
        phone.sees("starting").press("Cancel").sees("off")
    phone.reads("The passphrase was not sent")
    assert phone.count("start") == 2  # once to begin it, and once to cancel it
    assert phone.focus() == "passphrase"
    assert phone.passphrase() == ""


def test_a_passphrase_without_an_answer_may_have_arrived(phone: Phone) -> None:
    phone.stop_clock().tell("off").open().give_pin().sees("off")
    for body in ("<h1>Bad gateway</h1>", '{"code": 502}'):  # a proxy's, no answer
        phone.hold("start").start().take_held().fulfill(status=502, body=body)
        phone.reads("may have got through").tell("up").look().sees("up")
        phone.show("off").does_not_read("may have got through")
    phone.hold("start").start().take_held()
    phone.wait(14).is_busy().wait(1.5).reads("may have got through").sees("off")
    assert phone.passphrase() == PASSPHRASE


def test_a_start_is_shown_after_a_lost_answer_and_a_reload(phone: Phone) -> None:
    phone.tell("off").open().give_pin().sees("off").hold("start").start()
    phone.tell("off", "waking").take_held().abort()
    phone.sees("starting").does_not_read("may have got through")
    phone.open().give_pin().sees("starting")


def test_an_expired_token_loses_neither_passphrase_nor_start(phone: Phone) -> None:
    phone.tell("off").open().give_pin().sees("off").expire().sees("pin")
    phone.tell("off").give_pin().sees("off").type_passphrase()
    phone.expire().reads("Signed out").sees("off").offers("Sign in again", "Wake only")
    expect(phone.page.get_by_role("status")).to_contain_text("Signed out")
    phone.press("Sign in again").sees("pin").reads("Enter your PIN again")
    assert phone.count("start") == 0
    phone.tell("off").give_pin().sees("off").offers("Wake and unlock", "Wake only")
    assert phone.passphrase() == PASSPHRASE
    phone.show("off", "waking").sees("starting").expire().sees("pin")
    phone.does_not_read("Details")
    phone.tell("off", "waking").give_pin().sees("starting")


def test_a_wrong_passphrase_stays_and_can_be_corrected(phone: Phone) -> None:
    wrong = "wrong "
    phone.open().give_pin().start(wrong).reads("Wrong passphrase. It")
    phone.reads("ended with a space").marks(1)
    assert phone.focus() == "passphrase"
    assert phone.passphrase() == wrong
    assert phone.page.evaluate("getSelection().toString().length") == len(wrong)
    phone.page.keyboard.type(PASSPHRASE)
    phone.marks(0).page.keyboard.press("Enter")
    phone.sees("up")


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


def test_what_a_paste_may_add_is_pointed_out(phone: Phone) -> None:
    phone.tell("off").open().give_pin().sees("off").start("a\ttab").reads("a tab")
    assert phone.count("start") == 0
    for given in ("\u00a0x", "x ", "x"):
        phone.show("off").answer("start", 200, {"message": "Started"}).start(given)
        phone.show("locked", "failed", "wrong_passphrase").reads("Wrong passphrase")
        if given.strip() != given:
            phone.reads("It began or ended with a space")
    phone.does_not_read("a space")


def test_what_was_typed_since_or_elsewhere_is_not_called_wrong(phone: Phone) -> None:
    wrong = "locked", "failed", "wrong_passphrase"
    hint = "It was the last but one."
    phone.tell(*wrong, hint=hint).open().give_pin().reads("Last time:").reads(hint)
    phone.marks(0).hold("start").start("x").is_busy().type_passphrase("typed since")
    phone.tell(*wrong).take_held().fulfill(json={"message": "Started"})
    phone.reads("Wrong passphrase").does_not_read("Last time").marks(0)
    assert phone.passphrase() == "typed since"


def test_a_server_that_did_not_confirm_can_get_another_passphrase(phone: Phone) -> None:
    phone.tell("locked", "booting", "not_confirmed").open().give_pin()
    phone.sees("doubtful").press("Enter another").offers("Unlock", "Stop watching")
    assert phone.focus() == "passphrase"
    phone.hold("start").start("another").is_busy()
    phone.tell("locked", "unlocking").take_held().fulfill(json={"message": "Started"})
    phone.sees("starting").show("locked", "booting", "not_confirmed").sees("doubtful")
    phone.offers("Enter another", "Stop watching")
    assert phone.passphrase() == ""


def test_an_alarm_says_what_it_can_be_and_presses_nobody(phone: Phone) -> None:
    """Nor does a server that is unlocked. While something is up, there is no form."""
    filled = "getComputedStyle(document.querySelector('.action:not([hidden])'))"
    phone.tell("locked", "unlocking").open().give_pin().sees("starting")
    phone.show("locked", *ALARM, message=KEYS).sees("foreign").reads("another device")
    phone.reads("a new key").reads("The passphrase was not sent")
    assert phone.focus() == "headline"
    expect(phone.page.locator("input:visible")).to_have_count(0)
    phone.offers("Try again").does_not_read(KEYS).open_details().reads(KEYS)
    colour = phone.page.evaluate(f"{filled}.backgroundColor")
    assert colour == "rgba(0, 0, 0, 0)"
    phone.press("Try again").sees("foreign").offers("Unlock", "Send")
    assert phone.focus() == "passphrase"
    phone.tell("up", *ALARM).open().give_pin().sees("foreign").offers()
    phone.show("locked", "cancelled", "unlocked").sees("opened").offers("Enter pass")
    assert phone.page.evaluate(f"{filled}.backgroundColor") == "rgba(0, 0, 0, 0)"


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


# ---- Buttons, keys and browsers ------------------------------------------------------


def test_the_keyboard_alone_is_enough_and_focus_is_never_lost(phone: Phone) -> None:
    ring = "getComputedStyle(document.activeElement).outlineWidth"
    keyboard = phone.tell("off").open().page.keyboard
    assert phone.focus() == "pin"
    phone.give_pin().sees("off")
    assert phone.focus() == "passphrase"
    for name, kind in (("Show", "text"), ("Hide", "password")):
        keyboard.press("Tab")
        assert phone.focus() == f"{name} passphrase"
        assert phone.page.evaluate(ring) != "0px"
        keyboard.press("Enter")
        expect(phone.part("passphrase")).to_have_attribute("type", kind)
        keyboard.press("Shift+Tab")
    phone.answer("wol", 200, {"message": "Sent to somebody"})
    for key in ("Tab", "Tab", "Tab", "Enter"):
        keyboard.press(key)
    phone.reads("was sent")
    assert phone.focus() == "Wake only"
    phone.show("booting").offers("Unlock").show("off").does_not_read("was sent")
    assert phone.focus() == "passphrase"
    phone.answer("start", 200, {"message": "Started"}).ignore("status").start()
    phone.sees("starting")  # before waker is asked how it goes
    assert phone.focus() == "headline"
    keyboard.press("Tab")
    assert phone.focus() == "Cancel"
    phone.show("up", "done", "up").sees("up")
    assert phone.focus() == "headline"


def test_a_wrong_pin_can_be_typed_over_on_an_open_keyboard(phone: Phone) -> None:
    phone.page.set_viewport_size({"width": 320, "height": 568})  # a small iPhone's
    phone.open().give_pin("12345678").marks(1)
    message = phone.part("message")
    expect(phone.page.get_by_role("status")).to_contain_text(message.inner_text())
    place: Any = message.bounding_box()
    assert place["y"] + place["height"] <= 340  # px that its keyboard leaves
    assert phone.focus() == "pin"
    phone.page.keyboard.type(PIN)  # replaces what was typed, because it is selected
    phone.page.get_by_role("button", name="Sign in").tap()
    phone.sees("off").page.get_by_role("button", name="Show").tap()
    expect(phone.part("passphrase")).to_have_attribute("type", "text")
    assert phone.focus() == "passphrase"


def test_two_enters_send_the_pin_once(phone: Phone) -> None:
    phone.open().hold("auth").give_pin("12345678").is_busy()
    phone.part("pin").press("Enter")
    error = {"error": "Wrong"}
    phone.take_held().fulfill(status=401, json=error, headers=WAKERS)
    assert phone.reads("Wrong").count("auth") == 1


def test_a_wrong_pin_makes_the_fields_border_red(phone: Phone) -> None:
    phone.open().give_pin("12345678").marks(1)
    assert phone.focus() == "pin"
    assert phone.css("pin", "outline-color") == phone.css("message", "color")


@pytest.mark.parametrize("pin", ["", "1234567"])
def test_a_short_pin_is_answered_by_the_page(phone: Phone, pin: str) -> None:
    phone.open().give_pin(pin).reads("A PIN has at least 8 characters.").marks(1)
    assert phone.count("auth") == 0
    assert phone.focus() == "pin"
    phone.tell("off").give_pin().sees("off").start("").reads("Type the disk's pass")
    assert phone.count("start") == 0


def test_signing_in_has_a_sign_and_a_button_of_its_own(phone: Phone) -> None:
    sign = phone.part("glyph")
    phone.tell("off").open().sees("pin").offers("Sign in")
    first = sign.get_attribute("d")
    phone.give_pin().sees("off")
    assert sign.get_attribute("d") != first


def test_too_many_attempts_say_when_to_try_again(phone: Phone) -> None:
    for _ in range(10):
        phone.client.attempt("12345678")
    phone.open().give_pin().reads("Too many attempts; try again in ").sees("pin")


def test_polls_are_rare_while_nothing_happens(phone: Phone) -> None:
    """Every 3 s, and every 10 s once the server is up."""
    phone.stop_clock().tell("off").open().give_pin().sees("off").type_passphrase()

    def polled_within(seconds: int) -> int:
        """Count the polls, each of which has a second of that time for its answer."""
        count = phone.count("status")
        for _ in range(seconds):
            phone.wait(1).has_no_poll_under_way()
        return phone.count("status") - count

    for state, seconds in (("off", 3), ("up", 10)):
        phone.show(state)
        # On a busy computer, the page may see an answer a second later.
        assert 7 <= polled_within(10 * seconds) <= 11
    assert phone.passphrase() == ""


def test_a_hidden_page_sends_no_requests_and_hides_what_is_shown(
    api: Client, tmp_path: Path, playwright: Playwright
) -> None:
    """Without Playwright's defaults, which make every page visible all the time."""
    command = [need(*CHROMIUM), "--headless", "--no-sandbox", "about:blank"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={tmp_path}/profile"]
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stderr
        address = next(line.split()[-1] for line in process.stderr if "ws://" in line)
        browser = playwright.chromium.connect_over_cdp(address, no_defaults=True)
        phone = Phone(browser.contexts[0].pages[0], api)
        phone.stop_clock().open().part("pin").fill(PIN)
        other = browser.contexts[0].new_page()
        phone.page.bring_to_front()
        phone.press("Show PIN")
        expect(phone.part("pin")).to_have_attribute("type", "text")
        other.bring_to_front()
        expect(phone.part("pin")).to_have_attribute("type", "password")
        phone.page.bring_to_front()
        phone.give_pin().sees("off").type_passphrase().press("Show")
        expect(phone.part("passphrase")).to_have_attribute("type", "text")
        other.bring_to_front()
        phone.page.wait_for_function("document.hidden")
        expect(phone.part("passphrase")).to_have_attribute("type", "password")
        count = len(phone.requests)
        phone.wait(60)
        assert len(phone.requests) == count
        with phone.page.expect_request("**/api/status"):  # though no time passes
            phone.page.bring_to_front()
        # But a tab in the background shows how a start ends, and then rests.
        phone.tell("off", "waking").look().sees("starting")
        other.bring_to_front()
        phone.page.wait_for_function("document.hidden")
        phone.tell("up", "done", "up", 0, 38, 42, 62, 62).wait(2).sees("up")
        expect(phone.page).to_have_title(re.compile("^Up .*Home server"))
        phone.wait(0.5).has_no_poll_under_way()
        count = len(phone.requests)
        phone.wait(60)
        assert len(phone.requests) == count


POLICY = "<meta http-equiv=Content-Security-Policy content=\"script-src 'self'\">"
# What is changed in the page, and what people are told then.
UNABLE = {
    "no JavaScript": ("", "", "needs JavaScript"),
    "a proxy retypes": (' type="module"', ' type="x-module"', "A proxy may have"),
    "a proxy forbids": ("<title>", f"{POLICY}<title>", "A proxy may have"),
    "too old": ("<main", "<script>delete Object.hasOwn</script><main", "too old"),
    "syntax": ("const clock", "konst clock", "Unexpected identifier"),
    "exception": ("const clock =", "const clock = nobody;", "nobody is not defined"),
}


@pytest.mark.parametrize(("old", "new", "words"), UNABLE.values(), ids=[*UNABLE])
def test_a_browser_that_cannot_run_the_page_says_why(
    api: Client, new_phone: NewPhone, old: str, new: str, words: str
) -> None:
    assert old in SOURCE
    phone = new_phone(api, java_script_enabled=bool(old))
    phone.page.set_content(SOURCE.replace(old, new))
    phone.reads(words)
    if words != "too old":
        phone.does_not_read("too old")
    # It looks like what it will be, as on a slow line.
    expect(phone.part("headline")).to_have_text("Sign in")
    expect(phone.page.get_by_role("button")).to_have_count(0)
    phone.console.clear()


def test_a_browser_without_storage_is_good_enough(phone: Phone) -> None:
    refuse = "Object.defineProperty(window, 'localStorage', {get() { throw 0; }})"
    phone.page.add_init_script(refuse)
    phone.open().give_pin().sees("off")


def test_only_http_to_another_computer_is_called_not_encrypted(phone: Phone) -> None:
    phone.open().sees("pin").does_not_read("not encrypted")
    phone.open("waker.lan").reads("not encrypted")


def test_the_next_visit_has_the_right_keypad(phone: Phone) -> None:
    phone.open()
    for pin, keypad in (("12345678", "numeric"), ("1 or more", "text")):
        expect(phone.part("pin")).to_have_js_property("inputMode", "text")
        phone.answer("auth", 200, {"token": "x", "status": OLD}).give_pin(pin)
        phone.sees("off").open().sees("pin")
        expect(phone.part("pin")).to_have_js_property("inputMode", keypad)
        phone.answer("auth", 401, {"error": "Wrong"}).give_pin("87654321")
        phone.reads("Wrong").open().sees("pin")


def test_two_wakers_at_one_address_keep_their_names_apart(phone: Phone) -> None:
    """On a home screen, too, before the PIN is given."""
    page, path_of = phone.page, re.compile("/(one|two)/")
    base = f"http://127.0.0.1:{phone.client.port}"
    page.route("**", lambda route: route.abort())  # what is not below a path
    page.route(
        path_of,
        lambda route: route.continue_(url=path_of.sub("/", route.request.url)),
    )
    for path in ("one", "two"):
        page.goto("about:blank")  # or the page before could still get the new answer
        phone.answer("status", 200, OLD | {"name": f"Number {path}"})
        page.goto(f"{base}/{path}/")
        expect(page).to_have_title("waker")
        phone.give_pin().sees("off").reads(f"Number {path}")
    for path in ("one", "two"):
        page.goto(f"{base}/{path}/")
        expect(page).to_have_title(f"Number {path}")
        manifest = str(page.locator("[rel=manifest]").get_attribute("href"))
        known = json.loads(unquote(manifest.partition(",")[2]))
        assert (known["name"], known["display"]) == (f"Number {path}", "standalone")
        assert known["start_url"] == f"{base}/{path}/"
        assert known["background_color"]
        assert known["icons"][0]["purpose"] == "any maskable"
