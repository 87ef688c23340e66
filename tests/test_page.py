"""The page in a real browser, against the real daemon and the homelab.

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
from conftest import (
    CHECKOUT,
    PASSPHRASE,
    PIN,
    Client,
    need,
    new_app,
    running,
    serving,
)
from homelab import Homelab
from playwright.sync_api import Browser, Playwright, Route, expect, sync_playwright
from stage import Phone, after_a_start, before_a_start, during_a_start

import waker

SOURCE = Path(waker.__file__).with_name("ui.html").read_text()
CHROMIUM = "chromium", "chromium-browser", "google-chrome-stable", "google-chrome"
FONTS = CHECKOUT / "tests/browsers/fonts.conf"
# What the console shows if a request is refused or lost on purpose.
EXPECTED = re.compile(r"Failed to load resource: (.* (40[019]|429|50[02]) |net::ERR_)")
expect.set_options(timeout=60_000)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    if not ctypes.util.find_library("atomic"):
        pytest.skip("need libatomic, for Playwright (package libatomic1)")
    with sync_playwright() as started:
        yield started


@contextlib.contextmanager
def launch(playwright: Playwright, program: str) -> Iterator[Browser]:
    browser = playwright.chromium.launch(
        executable_path=program,
        args=[
            "--no-sandbox",
            "--host-resolver-rules=MAP waker.lan 127.0.0.1",
        ],
        env={**os.environ, "FONTCONFIG_FILE": str(FONTS)},
    )
    with contextlib.closing(browser):
        yield browser


@pytest.fixture(scope="session")
def chromium(playwright: Playwright) -> Iterator[Browser]:
    """Chromium, without its windows and tabs if possible: that is twice as fast."""
    with launch(playwright, need("chromium-headless-shell", *CHROMIUM)) as browser:
        yield browser


NewPhone = Callable[..., Phone]


@pytest.fixture
def new_phone(chromium: Browser) -> Iterator[NewPhone]:
    """Make phones, whose consoles must be empty at the end."""
    phones: list[Phone] = []

    def make(**options: Any) -> Phone:
        page = chromium.new_page(has_touch=True, is_mobile=True, **options)
        page.set_viewport_size({"width": 320, "height": 640})
        phones.append(Phone(page))
        return phones[-1]

    yield make
    for phone in phones:
        phone.page.close()
        assert [text for text in phone.console if not EXPECTED.match(text)] == []


@pytest.fixture
def phone(new_phone: NewPhone) -> Phone:
    return new_phone()


@pytest.fixture
def asleep(config: waker.Config) -> waker.Config:
    """A machine that no packet wakes: a start goes on until it is cancelled."""
    return config._replace(mac=waker.Mac(b"\0" * 6))


# A field must have room for seven characters. Other text must not be cut, and a word
# that is broken has boxes on two lines.
TEXTS = """[...document.querySelectorAll("label, button, input, summary, li, h1, p")]
    .filter((e) => e.getClientRects().length && !/live|more/.test(e.id))"""
CUT = f"""() => {TEXTS}
    .filter((e) => e.tagName !== "INPUT" ? e.scrollWidth > e.clientWidth
        : e.clientWidth < 7 * parseFloat(getComputedStyle(e).fontSize))
    .map((e) => e.id || e.textContent)"""
BROKEN = f"""() => {TEXTS}.filter((e) => e.firstChild).flatMap((e) =>
    [...e.textContent.matchAll(/[^\\s-]+/g)].map((word) => {{
        const range = document.createRange();
        range.setStart(e.firstChild, word.index);
        range.setEnd(e.firstChild, word.index + word[0].length);
        const tops = [...range.getClientRects()].map((box) => Math.round(box.top));
        return new Set(tops).size > 1 && word[0];
    }})).filter(Boolean)"""
LOW = """() => [...document.querySelectorAll("button, input, summary")]
    .filter((e) => e.getClientRects().length).filter((e) => {
        const { width, height } = e.getBoundingClientRect();
        return width < 44 || height < 44;
    }).map((e) => e.id)"""
# An iPhone zooms into a field with smaller text.
SMALL = """() => [...document.querySelectorAll("input")]
    .filter((e) => parseFloat(getComputedStyle(e).fontSize) < 16).map((e) => e.id)"""
# Of the card, with as much room below it as above.
HEIGHT = """(({top, bottom}) => top + bottom)(
    document.querySelector("main").getBoundingClientRect())"""
# Only violations are wanted, and the page has no style sheets to load.
VIOLATIONS = """async (rules) => {
    const options = { resultTypes: ["violations"], preload: false, ...rules };
    return (await axe.run(options)).violations;
}"""
# In the dark only the colours differ.
RULES: dict[Any, dict[str, str]] = {"light": {}, "dark": {"runOnly": "color-contrast"}}


@pytest.mark.parametrize("go", [before_a_start, during_a_start, after_a_start])
def test_every_state_is_accessible_and_fits_a_small_screen(
    api: Client, phone: Phone, go: Any, request: pytest.FixtureRequest
) -> None:
    """With --screenshots FOLDER, pictures of all states are put there."""
    folder = request.config.getoption("--screenshots")
    page = phone.page
    page.add_init_script(Axe().axe_script)
    for state in go(phone, api):
        page.set_viewport_size({"width": 390, "height": 640})
        for scheme, rules in RULES.items():
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(VIOLATIONS, rules) == [], (state, scheme)
            if folder:
                height = page.evaluate(HEIGHT)
                clip: Any = {"x": 0, "y": 0, "width": 390, "height": height}
                name = f"{folder}/{state}, {scheme}.png"
                page.screenshot(path=name, animations="disabled", clip=clip)
        page.set_viewport_size({"width": 320, "height": 640})
        assert page.evaluate(LOW) == [], state
        assert page.evaluate(SMALL) == [], state
        for size in ("200%", "100%"):
            page.evaluate(f"document.documentElement.style.fontSize = '{size}'")
            assert page.evaluate("document.documentElement.scrollWidth") <= 320, state
            assert page.evaluate(CUT) == [], (state, size)
            assert page.evaluate(BROKEN) == [], (state, size)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", ground))) < 64  # the dark scheme is dark


RING = "getComputedStyle(document.activeElement).outlineWidth"
RECORD = """() => {
    window.announced = [];
    const live = document.querySelector("[role=status]");
    new MutationObserver(() => announced.push(live.textContent))
        .observe(live, {childList: true, characterData: true, subtree: true});
}"""


def test_two_secrets_and_two_enters_bring_the_machine_up(
    tmp_path: Path, new_phone: NewPhone
) -> None:
    """It is announced; a second phone sees it; no secret is kept or goes elsewhere."""
    lab = Homelab(tmp_path, PASSPHRASE, pace=2)
    config = waker.read_config({"WAKER_PIN": PIN} | lab.settings(), tmp_path)
    config = config._replace(packet_port=lab.packet_port)
    app = new_app(config, lab.settings())
    with contextlib.closing(lab), serving(app) as client:
        phone, other = new_phone().open(client), new_phone().open(client)
        phone.page.evaluate(RECORD)
        other.give_pin().sees("off")
        keyboard = phone.page.keyboard
        keyboard.type(PIN)
        keyboard.press("Enter")
        phone.sees("off")
        expect(phone.page.locator("#blocked")).to_have_count(0)
        keyboard.type(PASSPHRASE)
        keyboard.press("Enter")
        for view in ("starting", "up"):
            phone.sees(view)
            other.sees(view)
    phone.reads("It took ").open_details("Details").reads("Unlocked: cryptroot.")
    other.open_details("Details")
    expect(phone.page.locator("button:visible, input:visible")).to_have_count(0)
    assert phone.page.inner_text("main") == other.page.inner_text("main")
    announced = phone.page.evaluate("announced")
    assert [text for text, _ in itertools.groupby(announced)] == announced
    assert announced[0] == "Off"
    assert "Booting" in announced
    assert announced[-1] == "Up"
    origin = f"http://127.0.0.1:{client.port}/"
    asked = {url for url in phone.requests if not url.startswith("data:")}
    assert asked == {origin} | {f"{origin}api/{n}" for n in ("auth", "status", "start")}
    kept = phone.page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )
    keys = {"digits", "warned", "seconds", "name"}
    assert set(re.findall(r'\\"(\w+)\\":', kept)) == keys
    assert PIN not in kept
    assert PASSPHRASE not in kept
    values = "[...document.querySelectorAll('input:not([hidden])')].map((i) => i.value)"
    assert phone.page.evaluate(values) == ["", ""]


def test_the_keyboard_alone_is_enough_and_focus_is_never_lost(
    api: Client, phone: Phone
) -> None:
    keyboard = phone.tell("off").open(api).page.keyboard
    assert phone.focus() == "pin"
    keyboard.type(PIN)
    keyboard.press("Enter")
    phone.sees("off")
    assert phone.focus() == "passphrase"
    for kind, label in (("text", "Hide passphrase"), ("password", "Show passphrase")):
        keyboard.press("Tab")
        assert phone.focus() == "show"
        assert phone.page.evaluate(RING) != "0px"
        keyboard.press("Enter")
        assert phone.page.locator("#passphrase").get_attribute("type") == kind
        assert phone.page.locator("#show").get_attribute("aria-label") == label
        keyboard.press("Shift+Tab")
    phone.answer("wol", 200, {"message": "Sent to somebody"})
    for key in ("Tab", "Tab", "Tab", "Enter"):  # to Wake only
        keyboard.press(key)
    phone.reads("The wake-up signal was sent.")
    assert phone.focus() == "wake"
    phone.tell("booting").sees("booting")
    expect(phone.page.locator("#wake")).to_be_hidden()
    assert phone.focus() == "passphrase"
    phone.tell("off").sees("off")
    expect(phone.page.locator("#message")).to_be_empty()  # the signal is old news
    phone.tell("booting").sees("booting")
    keyboard.type(PASSPHRASE)
    phone.answer("start", 200, {"message": "Started"})
    phone.page.route("**/api/status", lambda _: None)  # no request is answered
    keyboard.press("Enter")
    phone.sees("starting")  # before the daemon is asked how it goes
    assert phone.focus() == "headline"
    keyboard.press("Tab")
    assert phone.focus() == "cancel"
    phone.tell("booting", "booting", "unlocked").reads("Stop watching")
    phone.tell("up", "done", "up").sees("up")
    assert phone.focus() == "headline"


def test_steps_times_and_the_usual_duration_come_from_the_daemon(
    api: Client, phone: Phone
) -> None:
    """A phone that was opened late shows what the first one does."""
    phone.tell("off").open(api).give_pin().sees("off")
    for state, phase, outcome, times, step in (
        ("off", "waking", "", (0, 0), "Waking"),
        ("booting", "waking", "", (0, 2), "Waiting for the passphrase prompt"),
        ("locked", "unlocking", "", (0, 38, 40), "Unlocking"),
        ("booting", "booting", "unlocked", (0, 38, 42, 60), "Booting"),
    ):
        phone.tell(state, phase, outcome, "", *times)
        expect(phone.page.locator("[aria-current=step]")).to_have_text(step)
        title = f"Starting 0:{times[-1]:02} \N{EN DASH} Home server"
        expect(phone.page).to_have_title(title.replace("0:60", "1:00"))
    phone.reads("Starting 1:00").reads("You can close this page.")
    steps = phone.page.locator("li")
    taken = steps.evaluate_all("(steps) => steps.map((li) => li.dataset.took ?? '')")
    assert taken == ["", "0:38", "0:04", ""]
    assert "Usually" not in phone.page.inner_text("main")
    phone.tell("up", "done", "up", "Fine.", 0, 38, 42, 62, 62).sees("up")
    expect(phone.page).to_have_title("Up \N{EN DASH} Home server")
    expect(steps.first).to_be_hidden()
    phone.tell("up", "done", "up", "It was up already.", 0, 99).sees("up")
    phone.tell("off", "waking", "", "", 0, 63).reads("Longer than usual.")
    for usual in ("1:02", "1:02", "1:02", "1:02", "0:50"):  # the longest of five
        phone.tell("up", "done", "up", "Fine.", 0, 38, 42, 50, 50).sees("up")
        phone.tell("off", "waking", "", "", 0, 1).reads(f"Usually up within {usual}.")


def test_a_wrong_pin_can_be_typed_again_and_the_keyboard_stays_open(
    api: Client, phone: Phone
) -> None:
    phone.open(api)
    expect(phone.page.get_by_text("Not encrypted.")).to_be_hidden()
    phone.give_pin("12345678").reads("Wrong PIN")
    expect(phone.page.get_by_role("status")).to_contain_text("Wrong PIN")
    assert phone.focus() == "pin"
    expect(phone.page.locator("#pin")).to_have_attribute("aria-invalid", "true")
    phone.page.keyboard.type(PIN)  # replaces what was typed, because it is selected
    phone.page.evaluate(
        """() => {
            window.focused = [];
            addEventListener("focusin", (event) => focused.push(event.target.id));
        }"""
    )
    phone.page.locator("#continue").tap()
    phone.sees("off")
    assert phone.page.evaluate("focused") == ["passphrase"]
    phone.page.locator("#show").tap()
    expect(phone.page.locator("#show")).to_have_text("Hide")
    assert phone.focus() == "passphrase"


def test_the_next_visit_has_the_same_keypad_and_no_second_http_warning(
    api: Client, phone: Phone
) -> None:
    pin, keys = phone.page.locator("#pin"), phone.page.locator("#keys")
    notice = phone.page.get_by_text("Not encrypted.")
    phone.open(api, "waker.lan")
    expect(notice).to_be_visible()
    expect(pin).to_have_attribute("inputmode", "numeric")
    keys.press("Enter")
    expect(pin).to_have_attribute("inputmode", "text")
    assert phone.focus() == "pin"
    phone.give_pin().sees("off")  # it has letters
    phone.open(api, "waker.lan").sees("pin")
    expect(notice).to_be_hidden()
    expect(pin).to_have_attribute("inputmode", "text")


def test_too_many_attempts_are_counted_down(api: Client, phone: Phone) -> None:
    phone.stop_clock().open(api)
    for _ in range(10):
        api.attempt("wrong!")
    phone.give_pin().reads("Too many attempts. Try again in")
    message = phone.page.locator("#message")
    first = int(re.findall(r"\d+", message.inner_text())[0])
    assert 5 < first <= 60  # less than a minute, if this machine is busy
    phone.look().page.clock.run_for(5000)
    expect(message).to_have_text(f"Too many attempts. Try again in {first - 5} s.")
    button = phone.page.locator("#continue")
    expect(button).to_have_attribute("aria-disabled", "true")
    phone.page.keyboard.press("Enter")
    asked = [url for url in phone.requests if "/api/" in url]
    # Nothing else: without a token it would be refused, and logged.
    assert asked == [f"http://127.0.0.1:{api.port}/api/auth"]
    phone.page.clock.run_for(first * 1000)
    expect(message).to_be_empty()
    expect(button).not_to_have_attribute("aria-disabled", "true")


def test_a_wrong_passphrase_stays_and_can_be_corrected(
    api: Client, phone: Phone
) -> None:
    wrong = "wrong "
    phone.open(api).give_pin().start(wrong)
    message = "Wrong passphrase. Try again. It ended with a space."
    expect(phone.page.locator("#message")).to_have_text(message)
    assert phone.focus() == "passphrase"
    field = phone.page.locator("#passphrase")
    expect(field).to_have_value(wrong)
    assert phone.page.evaluate("getSelection().toString().length") == len(wrong)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(phone.page.locator("#start")).to_have_text("Unlock")
    phone.open_details("Details").reads("Wrong passphrase for disk cryptroot.")
    field.focus()
    phone.page.keyboard.type(PASSPHRASE)
    expect(field).not_to_have_attribute("aria-invalid", "true")
    phone.page.keyboard.press("Enter")
    phone.sees("up")


def test_what_is_typed_while_a_start_is_sent_is_not_called_wrong(
    api: Client, phone: Phone
) -> None:
    phone.tell("locked").open(api).give_pin().sees("locked").hold("start").start("x")
    phone.reads("Starting…").type_passphrase("typed meanwhile")
    phone.tell("locked", "failed", "wrong_passphrase", "Wrong passphrase for x.")
    phone.release(200, {"message": "Started"}).reads("Wrong passphrase.")
    field = phone.page.locator("#passphrase")
    expect(field).to_have_value("typed meanwhile")
    expect(field).not_to_have_attribute("aria-invalid", "true")


def test_an_old_failure_marks_no_field_as_wrong(api: Client, phone: Phone) -> None:
    phone.tell("locked", "failed", "wrong_passphrase", "Wrong passphrase for x.")
    phone.open(api).give_pin().reads("Last time: Wrong passphrase.")
    expect(phone.page.locator("[aria-invalid]")).to_have_count(0)
    hint = "Be careful: it was the last but one."
    phone.tell("locked", "failed", "wrong_passphrase", "For x.", hint=hint)
    phone.reads("Wrong passphrase. Try again. Be careful: it was the last but one.")


def test_an_expired_token_loses_neither_the_passphrase_nor_a_start(
    asleep: waker.Config, phone: Phone
) -> None:
    with running(asleep) as client:
        phone.open(client).give_pin().sees("off")
        client.expire_tokens()
        phone.sees("pin").give_pin().sees("off").type_passphrase()
        expect(phone.page.locator("#age")).to_be_empty()
        client.expire_tokens()
        phone.reads("Signed out after 15 minutes.").sees("off")
        phone.press("Wake and unlock").sees("pin").reads("Your session has ended.")
        phone.give_pin().sees("off").press("Wake and unlock").sees("starting")
        client.expire_tokens()
        phone.sees("pin").reads("Enter your PIN again.").reads("Last seen starting")
        expect(phone.page.locator("#details")).to_be_hidden()
        phone.give_pin().sees("starting")


def lose(route: Route) -> None:
    """Drop the daemon's answer."""
    route.fetch()
    route.abort()


def test_a_start_is_shown_after_a_lost_answer_a_reload_and_a_restart_of_waker(
    asleep: waker.Config, phone: Phone
) -> None:
    with running(asleep) as client:
        phone.page.route("**/api/start", lose)
        phone.open(client).give_pin().sees("off").start()
        phone.sees("starting")  # although the answer was lost
        expect(phone.page.locator("#message")).to_be_hidden()
        phone.log_in_again().sees("starting")
    phone.reads("Can't reach waker. Retrying…")
    with running(asleep, port=client.port):
        phone.sees("pin").give_pin().sees("off")
        phone.reads("waker restarted and stopped this start.")


def test_the_spinner_stops_if_the_connection_is_lost_or_motion_is_unwanted(
    api: Client, phone: Phone
) -> None:
    def moving() -> int:
        return int(phone.page.evaluate("document.getAnimations().length"))

    phone.tell("booting", "waking", "", "", 0, 1).open(api).give_pin().reads("0:01")
    assert moving() == 1
    phone.page.emulate_media(reduced_motion="reduce")
    assert moving() == 0
    phone.page.emulate_media(reduced_motion="no-preference")
    phone.lose_connection().reads("Can't reach waker. Retrying…").reads("0:01")
    assert moving() == 0
    phone.page.unroute("**/api/status")
    phone.sees("off")


def test_a_lost_network_is_shown_and_recovers_by_itself(
    api: Client, phone: Phone
) -> None:
    phone.open(api).page.context.set_offline(True)
    phone.give_pin().reads("Couldn't reach waker. Try again.").sees("pin")
    phone.page.context.set_offline(False)
    phone.press("Continue").sees("off")
    phone.page.context.set_offline(True)
    phone.reads("Can't reach waker. Retrying…").start()
    phone.reads("Your passphrase may have arrived. Watch the status before you try")
    assert phone.page.locator("#passphrase").input_value() == PASSPHRASE
    phone.page.context.set_offline(False)
    expect(phone.page.locator("#age")).to_be_empty()


def test_a_network_that_is_back_is_used_at_once(api: Client, phone: Phone) -> None:
    phone.stop_clock().open(api).give_pin().sees("off")
    phone.page.context.set_offline(True)
    phone.look().reads("Can't reach waker. Retrying…")
    with phone.page.expect_request("**/api/status"):  # though no time passes
        phone.page.context.set_offline(False)


@pytest.mark.parametrize(
    ("kind", "body"),
    [("text/html", "<h1>Bad gateway</h1>"), ("application/json", '{"code": 502}')],
    ids=["HTML", "JSON"],
)
def test_a_proxys_own_error_is_no_answer(
    api: Client, phone: Phone, kind: str, body: str
) -> None:
    def fail(route: Route) -> None:
        route.fulfill(status=502, content_type=kind, body=body)

    phone.tell("off").open(api).give_pin().sees("off")
    phone.page.route("**/api/start", fail)
    phone.start().reads("Your passphrase may have arrived.").sees("off")
    phone.page.route("**/api/status", fail)
    phone.look().reads("Can't reach waker. Retrying…").sees("off")


def test_a_passphrase_without_an_answer_may_have_arrived(
    api: Client, phone: Phone
) -> None:
    phone.stop_clock().tell("off").open(api).give_pin().sees("off")
    with phone.page.expect_request("**/api/start"):
        phone.hold("start").start()
    phone.page.clock.run_for(14_000)
    expect(phone.page.locator("#start")).to_have_text("Starting…")
    phone.page.clock.run_for(1500)
    phone.reads("Your passphrase may have arrived. Watch the status before you try")


def test_a_late_answer_is_shown_and_does_not_delay_the_next(
    config: waker.Config, phone: Phone
) -> None:
    """While two requests hang, no third is sent. The second one follows after 3 s."""
    with running(config) as client:
        phone.stop_clock().open(client).give_pin().sees("off")
    with waker.listen(("127.0.0.1", client.port)) as silent:
        silent.settimeout(10)  # seconds
        phone.look()
        with silent.accept()[0] as first:
            assert first.recv(4) == b"GET "
            phone.page.clock.run_for(1500)
            silent.settimeout(0.2)
            with pytest.raises(TimeoutError):
                silent.accept()
            silent.settimeout(10)
            phone.page.clock.run_for(2000)
            with silent.accept()[0] as second:
                assert second.recv(4) == b"GET "
                age = phone.page.locator("#age")
                phone.page.clock.run_for(5000)
                expect(age).to_be_empty()  # for 8 s
                phone.page.clock.run_for(1500)
                expect(age).to_contain_text("s ago. Retrying…")
                phone.sees("off")
                silent.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    silent.accept()
                phone.page.clock.run_for(110_000)
                expect(age).to_have_text("Checked 2 min ago. Retrying…")


def test_an_older_answer_never_replaces_a_newer_one(api: Client, phone: Phone) -> None:
    phone.stop_clock().tell("off").open(api).give_pin().sees("off")
    with phone.hold("status").look().page.expect_event("requestfinished"):
        phone.page.clock.run_for(3500)  # another one is sent
    phone.page.clock.run_for(100)
    phone.tell("up").sees("up")
    phone.page.route("**/api/status", lambda _: None)  # no further one is answered
    with phone.page.expect_event("requestfinished"):
        phone.release(200, {"name": "Home server", "state": "off", "start": None})
    phone.page.clock.run_for(100)
    phone.sees("up")


def test_a_status_from_before_a_start_does_not_hide_it(
    api: Client, phone: Phone
) -> None:
    phone.stop_clock().tell("off").open(api).give_pin().sees("off").hold(
        "status"
    ).look()
    before = phone.take_held()
    phone.page.route("**/api/status", lambda _: None)  # no further one is answered
    with phone.page.expect_request("**/api/status"):
        phone.answer("start", 200, {"message": "Started"}).start()
    phone.page.clock.run_for(500)
    phone.sees("starting")
    with phone.page.expect_event("requestfinished"):
        before.fulfill(json={"name": "Home server", "state": "off", "start": None})
    phone.page.clock.run_for(500)
    phone.sees("starting")


def test_after_an_hour_a_start_is_forgotten_and_not_called_stopped(
    api: Client, phone: Phone
) -> None:
    phone.stop_clock().tell("off", "waking").open(api).give_pin().sees("starting")
    phone.page.route("**/api/status", lambda route: route.abort())
    phone.page.clock.fast_forward(3600_000)
    phone.tell("off").sees("off")
    assert "waker restarted" not in phone.page.locator("main").inner_text()
    phone.tell("off", "waking").sees("starting").tell("up").sees("up")  # in the end
    assert "waker restarted" not in phone.page.locator("main").inner_text()


def test_a_late_401_does_not_end_a_new_token(api: Client, phone: Phone) -> None:
    phone.stop_clock().tell("off").open(api).give_pin().sees("off")
    with phone.hold("status").look().page.expect_event("requestfinished"):
        phone.page.clock.run_for(3500)  # another one is sent
    phone.page.clock.run_for(100)
    phone.expire().sees("pin").tell("off").give_pin().sees("off")
    with phone.page.expect_event("requestfinished"):
        phone.release(401, {"error": "Expired"})
    phone.page.clock.run_for(100)
    phone.sees("off")


def test_a_missed_check_forgets_nothing(api: Client, phone: Phone) -> None:
    phone.tell("booting", "booting", "unlocked").open(api).give_pin().sees("starting")
    phone.tell("unknown", "done", "up", "", 0, 1, 2, 9, 9).sees("up")
    phone.reads("waker couldn't check.").tell("up", "done", "up", "", 0, 1, 2, 9, 9)
    expect(phone.page.locator("#age")).to_be_empty()
    phone.lose_connection().reads("Can't reach waker. Retrying…").sees("up")
    phone.tell("unknown").log_in_again().sees("unknown")
    assert phone.buttons() == ["Try anyway"]


def test_a_start_is_made_once_and_can_be_cancelled(
    asleep: waker.Config, phone: Phone
) -> None:
    with running(asleep) as client:
        phone.open(client).give_pin().sees("off").press("Show").hold("start").start()
        phone.reads("Starting…")
        field = phone.page.locator("#passphrase")
        expect(field).to_have_attribute("type", "password")
        button = phone.page.locator("#start")
        expect(button).to_have_attribute("aria-disabled", "true")
        button.click(force=True)  # the first one has not been answered yet
        phone.take_held().continue_()
        phone.sees("starting")
        assert len([url for url in phone.requests if url.endswith("/start")]) == 1
        phone.press("Cancel").sees("off")
    phone.reads("Cancelled. The passphrase was not sent.")
    assert phone.focus() == "passphrase"
    assert phone.page.locator("#passphrase").input_value() == ""


def test_a_server_that_did_not_confirm_gets_another_passphrase(
    api: Client, phone: Phone
) -> None:
    phone.tell("locked", "booting", "not_confirmed").open(api).give_pin()
    phone.sees("doubtful").reads("is still checking it, or it was wrong.")
    phone.press("Try another passphrase")
    assert phone.focus() == "passphrase"
    assert phone.buttons() == ["Unlock", "Stop watching"]
    phone.hold("start").start("another").reads("Starting…")
    phone.tell("locked", "unlocking").release(200, {})
    phone.sees("starting").tell("off", "booting", "not_confirmed")
    phone.reads("Stop watching").sees("starting")  # the initrd has ended
    phone.tell("locked", "booting", "not_confirmed").sees("doubtful")
    assert phone.buttons() == ["Try another passphrase", "Stop watching"]
    assert phone.page.locator("#passphrase").input_value() == ""


def test_a_start_can_be_cancelled_until_the_passphrase_is_sent(
    api: Client, phone: Phone
) -> None:
    phone.tell("locked", "unlocking").open(api).give_pin().reads("Waiting for")
    assert phone.buttons() == ["Cancel"]
    phone.tell("locked", "unlocking", sent=True).reads("Stop watching")
    phone.tell("booting", "booting", "unlocked").reads("(the server keeps booting)")


def test_the_line_below_the_state_knows_how_the_last_start_ended(
    api: Client, phone: Phone
) -> None:
    phone.tell("off").open(api).give_pin().sees("off")
    line, more = phone.page.locator("#line"), phone.page.locator("#more")
    silent = "It doesn't answer. It may still be booting."
    closed = "It isn't asking for the passphrase yet."
    opened = "It is unlocked and booting."
    for state, phase, outcome, text in (
        ("off", "failed", "not_awake", ""),
        ("off", "failed", "not_up", silent),
        ("off", "cancelled", "not_confirmed", silent),
        ("booting", "cancelled", "not_confirmed", closed),
        ("booting", "cancelled", "already_open", opened),
    ):
        phone.tell(state, phase, outcome, f"{state} {outcome}")
        expect(more).to_have_text(f"{state} {outcome}", ignore_case=True)
        expect(line).to_have_text(text)


@pytest.mark.parametrize(
    ("outcome", "view", "advice"),
    [
        ("host_key_differs", "foreign", "Find out why before you try again."),
        ("gave_up", "stuck", "Someone must restart it."),
    ],
)
def test_an_alarm_is_the_headline_and_hides_the_form(
    api: Client, phone: Phone, outcome: str, view: str, advice: str
) -> None:
    phone.tell("locked", "unlocking").open(api).give_pin().sees("starting")
    phone.tell("locked", "failed", outcome, "the keys: x, y.").sees(view).reads(advice)
    assert phone.focus() == "headline"
    assert phone.buttons() == ["Try anyway"]
    expect(phone.page.locator("input:visible")).to_have_count(0)
    expect(phone.page.locator("#more")).to_be_hidden()
    phone.open_details("Details").reads("The keys: x, y.").press("Try anyway")
    assert phone.focus() == "passphrase"
    assert phone.buttons() == ["Unlock"]
    phone.sees(view).tell("off", "failed", outcome, "it is off.").reads("It is off.")
    phone.sees("off" if view == "stuck" else view)  # a restart helps
    phone.tell("up", "failed", outcome, "the keys: x, y.").sees("up")
    quiet = "The last start reached another server." if view == "foreign" else ""
    expect(phone.page.locator("#line")).to_have_text(quiet)


def test_pressing_a_button_moves_nothing(api: Client, phone: Phone) -> None:
    """Neither does a late answer or a lost connection."""
    boxes = """() => [...document.querySelectorAll("main *")]
        .filter((e) => e.id !== "age" && e.id !== "live")
        .map((e) => Object.values(e.getBoundingClientRect().toJSON()).join())"""

    def rest(page: Any) -> Any:
        page.mouse.move(0, 0)
        return page.evaluate(boxes)

    before = rest(phone.stop_clock().tell("off").open(api).page)
    phone.hold("auth").give_pin().reads("Checking…")
    assert rest(phone.page) == before
    phone.release(200, {"token": "x"}).sees("off")
    before = rest(phone.page)
    phone.hold("wol").press("Wake only").reads("Waking…")
    assert rest(phone.page) == before
    phone.release(500, {"error": "no"}).reads("No").type_passphrase()
    before = rest(phone.page)
    phone.hold("start").press("Wake and unlock").reads("Starting…")
    assert rest(phone.page) == before
    phone.lose_connection().reads("Can't reach waker. Retrying…")
    assert rest(phone.page) == before
    phone.page.clock.run_for(10_000)
    phone.reads("s ago. Retrying…")
    assert rest(phone.page) == before


def test_a_phones_keyboard_covers_no_message(api: Client, phone: Phone) -> None:
    """The smallest iPhone's keyboard leaves some 340 px of the page."""
    phone.page.set_viewport_size({"width": 320, "height": 568})
    message = phone.page.locator("#message")
    phone.open(api)
    for text in ("Wrong PIN", "Wrong passphrase. Try again."):
        if "PIN" in text:
            phone.give_pin("12345678")
        else:
            phone.give_pin().sees("off").start("wrong")
        phone.reads(text)
        box = message.bounding_box()
        assert box, text
        assert box["y"] + box["height"] <= 340, text


def test_a_server_can_be_woken_without_a_passphrase(api: Client, phone: Phone) -> None:
    phone.open(api).give_pin().sees("off")
    assert phone.buttons() == ["Wake and unlock", "Wake only"]
    phone.press("Wake only").sees("locked").reads("Waiting for the passphrase")
    assert phone.buttons() == ["Unlock"]
    expect(phone.page.locator("#message")).to_be_hidden()  # of the packet
    phone.start().sees("up")


def test_a_server_that_is_up_is_polled_every_10_s(api: Client, phone: Phone) -> None:
    phone.stop_clock().tell("off").open(api).give_pin().sees("off").type_passphrase()
    phone.tell("up").sees("up")
    assert phone.page.locator("#passphrase").input_value() == ""
    expect(phone.page.locator("button:visible, input:visible")).to_have_count(0)
    count = len(phone.requests)
    phone.page.clock.run_for(9000)
    assert len(phone.requests) == count
    expect(phone.page.locator("#age")).to_be_empty()
    with phone.page.expect_request("**/api/status"):
        phone.page.clock.run_for(1500)
    phone.tell("off").sees("off").tell("up").sees("up")  # that one was answered
    phone.lose_connection().reads("Can't reach waker. Retrying…").sees("up")
    with phone.page.expect_request("**/api/status"):
        phone.page.clock.run_for(1500)


def test_a_hidden_page_sends_no_requests(
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
        phone = Phone(browser.contexts[0].pages[0])
        phone.stop_clock().open(api).give_pin().sees("off")
        with phone.page.expect_request("**/api/status"):
            phone.page.clock.run_for(1500)
        phone.type_passphrase().press("Show")
        field = phone.page.locator("#passphrase")
        expect(field).to_have_attribute("type", "text")
        browser.contexts[0].new_page().bring_to_front()
        phone.page.wait_for_function("document.hidden")
        expect(field).to_have_attribute("type", "password")
        count = len(phone.requests)
        phone.page.clock.run_for(60_000)
        assert len(phone.requests) == count
        with phone.page.expect_request("**/api/status"):  # though no time passes
            phone.page.bring_to_front()


def test_a_browser_that_is_too_old_is_told_so(api: Client, phone: Phone) -> None:
    phone.page.add_init_script("delete Object.hasOwn")
    phone.open(api)
    phone.reads("This browser is too old for this page: update it, or use Safari 15.4")
    assert phone.buttons() == []


@pytest.mark.parametrize("storage", ["blocked", "damaged"])
def test_a_browser_that_remembers_nothing_is_good_enough(
    api: Client, phone: Phone, storage: str
) -> None:
    phone.page.add_init_script(
        """Object.defineProperty(window, "localStorage", {
            get() { throw new DOMException("blocked", "SecurityError"); },
        })"""
        if storage == "blocked"
        else "localStorage.setItem('waker /', '{')"
    )
    phone.open(api).give_pin().sees("off")


@pytest.mark.parametrize("script", ["off", "too new", "throws"])
def test_without_its_script_the_page_says_why(
    api: Client, new_phone: NewPhone, script: str
) -> None:
    phone = new_phone(java_script_enabled=script != "off")
    if script == "off":
        phone.open(api).reads("your browser is too old or JavaScript is off.")
        return
    broken = SOURCE.replace("const clock", "konst clock")
    if script == "throws":
        broken = SOURCE.replace("const clock =", "const clock = nobody;")
    phone.page.set_content(broken)
    reason = "nobody is not defined" if script == "throws" else "Unexpected identifier"
    assert reason in phone.console.pop()
    phone.reads(reason).reads("update this browser, or use another one.")
    assert phone.buttons() == []


def test_a_later_exception_is_shown(api: Client, phone: Phone) -> None:
    phone.tell("off").open(api).give_pin().sees("off")
    phone.page.evaluate("() => void Promise.reject(new Error('on purpose'))")
    phone.reads("Something went wrong: Error: on purpose. Reload this page.").sees(
        "off"
    )
    assert "on purpose" in phone.console.pop()


def test_the_longest_pin_can_be_typed(config: waker.Config, phone: Phone) -> None:
    pin = "123456789-" * 12 + "12345678"
    with running(config._replace(pin=waker.Pin(pin))) as client:
        phone.open(client).page.keyboard.insert_text(pin)
        phone.page.keyboard.press("Enter")
        phone.sees("off")


def test_a_passphrase_is_sent_as_it_was_typed(api: Client, phone: Phone) -> None:
    """Neither the page nor a phone's keyboard changes it."""
    typed = " A\N{COMBINING DIAERESIS}".ljust(510) + " "  # of 512 bytes
    phone.tell("off").open(api).give_pin().sees("off")
    field = phone.page.locator("#passphrase")
    for name, value in (
        ("autocapitalize", "off"),
        ("autocorrect", "off"),
        ("spellcheck", "false"),
    ):
        expect(field).to_have_attribute(name, value)
    phone.page.keyboard.insert_text(typed)
    phone.answer("start", 200, {"message": "Started"})
    with phone.page.expect_request("**/api/start") as request:
        phone.page.keyboard.press("Enter")
    assert request.value.post_data_json == {"passphrase": typed}


def test_password_managers_can_keep_the_two_secrets_apart(
    api: Client, phone: Phone
) -> None:
    phone.open(api)
    forms = phone.page.locator("form").evaluate_all(
        """(forms) => forms.map((form) => [...form].filter((e) => e.autocomplete)
            .map((e) => [e.type, e.autocomplete, e.hidden && e.value]))"""
    )
    assert forms == [
        [["text", "username", name], ["password", "current-password", False]]
        for name in ("waker", "luks")
    ]


def test_the_page_can_be_installed_from_a_reverse_proxys_subpath(
    api: Client, playwright: Playwright
) -> None:
    with launch(playwright, need(*CHROMIUM)) as chromium:
        page = chromium.new_page()
        page.route("**", lambda route: route.abort())  # what is not below the path
        page.route(
            "**/at/home/**",
            lambda route: route.continue_(
                url=route.request.url.replace("/at/home", "")
            ),
        )
        outside = f"http://127.0.0.1:{api.port}/at/home/"
        page.goto(outside)
        Phone(page).give_pin().sees("off")
        link = page.locator("link[rel=apple-touch-icon]")
        expect(link).to_have_js_property("href", f"{outside}apple-touch-icon.png")
        cdp = page.context.new_cdp_session(page)
        manifest = cdp.send("Page.getAppManifest")
        assert manifest["errors"] == []
        assert '"name":"127.0.0.1"' in manifest["data"]  # not waker's: may be two
        errors = cdp.send("Page.getInstallabilityErrors")["installabilityErrors"]
        assert [error["errorId"] for error in errors] == ["in-incognito"]  # tests are


def test_two_wakers_at_one_address_keep_their_names_apart(
    api: Client, phone: Phone
) -> None:
    """On a home screen, too, before the PIN is given. A name may be long."""
    names = {"one": "x" * 64, "two": "Home server"}
    base = f"http://127.0.0.1:{api.port}/"
    path_of = re.compile("/(one|two)/")
    page = phone.page
    page.route(
        path_of,
        lambda route: route.continue_(url=path_of.sub("/", route.request.url)),
    )
    for path, name in names.items():
        page.goto("about:blank")  # or the page before could still get the new answer
        phone.answer("status", 200, {"name": name, "state": "off", "start": None})
        page.goto(f"{base}{path}/")
        expect(page).to_have_title("waker")
        phone.give_pin().sees("off").reads(name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
    for path, name in names.items():
        page.goto(f"{base}{path}/")
        expect(page).to_have_title(name)
        app = page.locator("[name=apple-mobile-web-app-title]")
        expect(app).to_have_attribute("content", name)
        manifest = str(page.locator("[rel=manifest]").get_attribute("href"))
        known = json.loads(unquote(manifest.partition(",")[2]))
        assert (known["name"], known["start_url"]) == (name, f"{base}{path}/")
