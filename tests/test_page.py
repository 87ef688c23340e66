"""The page in a real browser, against the real daemon and the homelab.

Where a test needs an answer that takes a real machine minutes, or a bad network, its
`Phone` answers in the daemon's place.
"""

import contextlib
import ctypes.util
import itertools
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from conftest import PASSPHRASE, PIN, Client, need, running
from cryptroot_unlock import Disks
from homelab import Homelab
from playwright.sync_api import Browser, Playwright, Route, expect, sync_playwright
from stage import Phone, after_a_start, before_a_start, during_a_start

import waker

SOURCE = Path(waker.__file__).with_name("ui.html").read_text()
# What the console tells of a request that was refused or lost on purpose.
EXPECTED = re.compile(r"Failed to load resource: (.* (40[019]|429|500) |net::ERR_)")
README = {
    ("off", "light"): "phone-light-3-off",
    ("booting as usual", "dark"): "phone-dark-7-booting",
}
expect.set_options(timeout=60_000)


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    if not ctypes.util.find_library("atomic"):
        pytest.skip("libatomic1 is not installed: Playwright's Node.js needs it")
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def chromium(playwright: Playwright) -> Iterator[Browser]:
    browser = playwright.chromium.launch(
        executable_path=need("chromium"),
        args=["--no-sandbox", "--host-resolver-rules=MAP waker.lan 127.0.0.1"],
    )
    with contextlib.closing(browser):
        yield browser


NewPhone = Callable[..., Phone]


@pytest.fixture
def new_phone(chromium: Browser) -> Iterator[NewPhone]:
    """Makes phones; at the end their consoles must be empty."""
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
    """A machine that no packet wakes: its start goes on until it is cancelled."""
    return config._replace(mac=waker.Mac(b"\0" * 6))


# A field must have room for seven characters; other text must not be cut.
CUT = """() => [...document.querySelectorAll("label, button, input, summary, h1, p")]
    .filter((e) => e.checkVisibility() && e.id !== "live")
    .filter((e) => e.tagName !== "INPUT" ? e.scrollWidth > e.clientWidth
        : e.clientWidth < 7 * parseFloat(getComputedStyle(e).fontSize))
    .map((e) => e.id || e.textContent)"""
LOW = """() => [...document.querySelectorAll("button, input, summary")]
    .filter((e) => e.checkVisibility()).filter((e) => {
        const { width, height } = e.getBoundingClientRect();
        return width < 44 || height < 44;
    }).map((e) => e.id)"""
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
        page.set_viewport_size({"width": 390, "height": 600})
        for scheme, rules in RULES.items():
            page.emulate_media(color_scheme=scheme)
            found = page.evaluate("(rules) => axe.run(rules)", rules)
            assert found["violations"] == [], (state, scheme)
            if folder:
                name = README.get((state, scheme), f"{state}, {scheme}")
                page.screenshot(path=f"{folder}/{name}.png", animations="disabled")
        page.set_viewport_size({"width": 320, "height": 640})
        assert page.evaluate(LOW) == [], state
        for size in ("200%", "100%"):
            page.evaluate(f"document.documentElement.style.fontSize = '{size}'")
            assert page.evaluate("document.documentElement.scrollWidth") <= 320, state
            assert page.evaluate(CUT) == [], (state, size)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", ground))) < 64  # it was the dark scheme


RECORD = """() => {
    window.told = [];
    const live = document.querySelector("[role=status]");
    new MutationObserver(() => told.push(live.textContent))
        .observe(live, {childList: true, characterData: true, subtree: true});
}"""


def test_two_secrets_and_two_enters_bring_the_machine_up(
    tmp_path: Path, new_phone: NewPhone
) -> None:
    """It is announced; a second phone sees it; no secret is kept or goes elsewhere."""
    lab = Homelab(tmp_path, disks=Disks({"cryptroot": PASSPHRASE}), pace=2)
    config = waker.read_config({"WAKER_PIN": PIN} | lab.settings(), tmp_path)
    config = config._replace(packet_port=lab.packet_port)
    with contextlib.closing(lab), running(config) as client:
        phone, other = new_phone().open(client), new_phone().open(client)
        phone.page.evaluate(RECORD)
        other.give_pin().sees("ready")
        keyboard = phone.page.keyboard
        keyboard.type(PIN)
        keyboard.press("Enter")
        phone.sees("ready").reads("Off: nothing answers")
        expect(phone.page.locator("#blocked")).to_have_count(0)
        keyboard.type(PASSPHRASE)
        keyboard.press("Enter")
        for view in ("running", "started"):
            phone.sees(view)
            other.sees(view)
    phone.reads("Up and running").reads("Unlocked: cryptroot. The system is up.")
    expect(phone.page.locator("button:visible, input:visible")).to_have_count(0)
    assert phone.page.inner_text("main") == other.page.inner_text("main")
    told = phone.page.evaluate("told")
    assert [text for text, _ in itertools.groupby(told)] == told
    assert told[:2] == ["Checking…", "Off: nothing answers"]
    assert "Booting" in told
    assert re.fullmatch(r"Started in 0:\d\d Up and running", told[-1])
    origin = f"http://127.0.0.1:{client.port}/"
    asked = {url for url in phone.requests if not url.startswith("data:")}
    assert asked == {origin} | {f"{origin}api/{n}" for n in ("auth", "status", "start")}
    kept = phone.page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )
    assert set(re.findall(r"waker / (\w+)", kept)) == {"digits", "warned", "seconds"}
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
    phone.sees("ready")
    assert phone.focus() == "passphrase"
    for kind, label in (("text", "Hide passphrase"), ("password", "Show passphrase")):
        keyboard.press("Tab")
        assert phone.focus() == "show"
        keyboard.press("Enter")
        assert phone.page.locator("#passphrase").get_attribute("type") == kind
        assert phone.page.locator("#show").get_attribute("aria-label") == label
        keyboard.press("Shift+Tab")
    phone.answer("wol", 200, {"message": "Sent"})
    for key in ("Tab", "Tab", "Tab", "Enter", "Tab", "Enter"):  # to Wake only
        keyboard.press(key)
    phone.reads("Sent").tell("booting")
    expect(phone.page.locator("#wake")).to_be_hidden()
    assert phone.focus() == "name"
    keyboard.press("Tab")
    keyboard.type(PASSPHRASE)
    phone.answer("start", 200, {"message": "Started"})
    phone.page.route("**/api/status", lambda _: None)  # no request is answered
    keyboard.press("Enter")
    phone.sees("running")  # before the daemon is asked how it goes
    assert phone.focus() == "going"
    keyboard.press("Tab")
    assert phone.focus() == "cancel"
    phone.tell("booting", "booting", "unlocked").reads("Stop watching")
    phone.tell("up", "done", "up").sees("started")
    assert phone.focus() == "going"


def test_each_step_and_the_usual_duration_are_told(api: Client, phone: Phone) -> None:
    progress, usual = phone.page.locator("progress"), phone.page.locator("#usual")
    phone.tell("off").open(api).give_pin().sees("ready")
    for state, phase, outcome, seconds, step in (
        ("off", "waking", "", 0, "Waking"),
        ("booting", "waking", "", 2, "Waiting for the disk prompt"),
        ("locked", "unlocking", "", 58, "Unlocking"),  # nobody looked before
        ("booting", "booting", "unlocked", 60, "Booting"),
    ):
        phone.tell(state, phase, outcome, seconds=seconds)
        expect(phone.page.locator("[aria-current=step]")).to_have_text(step)
        expect(phone.page).to_have_title(re.compile(f"^{step} . my machine$"))
        expect(phone.page.locator("#state")).to_be_hidden()
    expect(phone.page.locator("#time")).to_have_text("1:00")
    expect(progress).to_be_hidden()
    expect(usual).to_be_empty()
    phone.tell("up", "done", "up", seconds=62).sees("started")
    expect(phone.page).to_have_title(re.compile("^Up and running . my machine$"))
    steps = phone.page.locator("li.past")
    times = steps.evaluate_all("(steps) => steps.map((li) => li.dataset.took)")
    assert times == ["0:02", None, None, "0:02", None]
    phone.tell("off", "waking", seconds=62).sees("running").reads("usually 1:02")
    expect(progress).to_have_js_property("value", 62)
    expect(progress).to_have_js_property("max", 62)
    phone.tell("off", "waking", seconds=63)  # overdue
    expect(progress).to_have_js_property("position", -1)


def test_a_wrong_pin_can_be_typed_again_and_the_keyboard_stays_open(
    api: Client, phone: Phone
) -> None:
    phone.open(api)
    expect(phone.page.get_by_text("This page came over plain HTTP")).to_be_hidden()
    phone.give_pin("12345678").reads("Wrong PIN")
    assert phone.focus() == "pin"
    expect(phone.page.locator("#pin")).to_have_attribute("aria-invalid", "true")
    phone.page.keyboard.type(PIN)  # what is there is selected, so this takes its place
    phone.page.evaluate(
        """() => {
            window.focused = [];
            addEventListener("focusin", (event) => focused.push(event.target.id));
        }"""
    )
    phone.page.locator("#continue").tap()
    phone.sees("ready")
    assert phone.page.evaluate("focused") == ["passphrase"]


def test_keypad_and_notice_of_plain_http_are_as_the_last_visit_left_them(
    api: Client, phone: Phone
) -> None:
    pin, keys = phone.page.locator("#pin"), phone.page.locator("#keys")
    notice = phone.page.get_by_text("This page came over plain HTTP")
    phone.open(api, "waker.lan")
    expect(notice).to_be_visible()
    expect(pin).to_have_attribute("inputmode", "numeric")
    keys.press("Enter")
    expect(pin).to_have_attribute("inputmode", "text")
    assert phone.focus() == "pin"
    phone.give_pin().sees("ready")  # it has letters
    phone.open(api, "waker.lan").sees("pin")
    expect(notice).to_be_hidden()
    expect(pin).to_have_attribute("inputmode", "text")


def test_too_many_attempts_are_counted_down(api: Client, phone: Phone) -> None:
    for _ in range(10):
        api.attempt("wrong!")
    phone.page.clock.install()
    phone.open(api).give_pin().reads("Too many attempts. Try again in")
    told = phone.page.locator("#text")
    first = int(re.findall(r"\d+", told.inner_text())[0])
    assert 50 < first <= 60
    phone.page.clock.run_for(5000)
    expect(told).to_have_text(f"Too many attempts. Try again in {first - 5} s.")
    button = phone.page.locator("#continue")
    expect(button).to_have_attribute("aria-disabled", "true")
    phone.page.keyboard.press("Enter")
    assert len([url for url in phone.requests if url.endswith("auth")]) == 1
    phone.page.clock.run_for(first * 1000)
    expect(told).to_be_empty()
    expect(button).not_to_have_attribute("aria-disabled", "true")


def test_a_wrong_passphrase_is_asked_for_again(api: Client, phone: Phone) -> None:
    phone.open(api).give_pin().start("wrong")
    phone.reads("Wrong passphrase for disk cryptroot. Type it once more.")
    assert phone.focus() == "passphrase"
    field = phone.page.locator("#passphrase")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(phone.page.locator("#start")).to_have_text("Unlock")
    phone.page.keyboard.type(PASSPHRASE)
    expect(field).not_to_have_attribute("aria-invalid", "true")
    phone.page.keyboard.press("Enter")
    phone.reads("Up and running")


def test_a_token_that_expires_costs_nothing_that_is_typed_or_under_way(
    asleep: waker.Config, phone: Phone
) -> None:
    with running(asleep) as client:
        phone.open(client).give_pin().sees("ready")
        client.expire_tokens()
        phone.sees("pin").give_pin().sees("ready").type_passphrase()
        client.expire_tokens()
        phone.reads("Your 15 minutes are over").sees("ready")
        phone.press("Wake and unlock").sees("pin").reads("Your PIN again, please")
        phone.give_pin().sees("ready").press("Wake and unlock").sees("running")
        client.expire_tokens()
        phone.sees("pin").reads("Your PIN again, please").reads("Last seen 0:0")
        phone.give_pin().sees("running")


def test_an_unlock_goes_on_while_the_token_expires(api: Client, phone: Phone) -> None:
    phone.tell("locked").open(api).give_pin().open_details("One step at a time")
    phone.type_passphrase().hold("unlock").press("Unlock only").reads("Unlocking…")
    phone.expire().reads("Your 15 minutes are over")
    phone.release(200, {"message": "Unlocked."}).sees("pin")
    phone.tell("booting").give_pin().reads("Unlocked; still booting")


def lose(route: Route) -> None:
    """Lose what the daemon answers."""
    route.fetch()
    route.abort()


def test_a_start_is_still_shown_after_a_lost_answer_a_reload_and_a_restart_of_waker(
    asleep: waker.Config, phone: Phone
) -> None:
    with running(asleep) as client:
        phone.page.route("**/api/start", lose)
        phone.open(client).give_pin().sees("ready").start()
        phone.sees("running")  # though nobody told so
        expect(phone.page.locator("#message")).to_be_hidden()
        phone.log_in_again().sees("running")
    phone.reads("waker does not answer. Trying again…")
    with running(asleep, port=client.port):
        phone.sees("pin").give_pin().sees("ready")
        phone.reads("waker was restarted, so this start has ended.")


def test_what_turns_stops_with_the_connection_and_for_who_wants_no_motion(
    api: Client, phone: Phone
) -> None:
    def moving() -> int:
        return int(phone.page.evaluate("document.getAnimations().length"))

    phone.tell("booting", "waking", seconds=1).open(api).give_pin().reads("0:01")
    assert moving() == 1
    phone.page.emulate_media(reduced_motion="reduce")
    assert moving() == 0
    phone.page.emulate_media(reduced_motion="no-preference")
    phone.lose_connection().reads("waker does not answer. Trying again…")
    phone.reads("Last seen 0:01, waiting for the disk prompt")
    assert moving() == 0
    assert phone.page.locator("#time").inner_text() == ""
    phone.page.unroute("**/api/status")
    phone.sees("ready").reads("Off: nothing answers")


def test_a_network_that_is_lost_is_told_and_recovers_by_itself(
    api: Client, phone: Phone
) -> None:
    phone.open(api).page.context.set_offline(True)
    phone.give_pin().reads("waker did not answer. Try again.").sees("pin")
    phone.page.context.set_offline(False)
    phone.press("Continue").reads("Off: nothing answers")
    phone.page.context.set_offline(True)
    phone.reads("waker does not answer. Trying again…").start()
    phone.reads("waker did not answer, but may have got the passphrase.")
    assert phone.page.locator("#passphrase").input_value() == PASSPHRASE
    phone.page.context.set_offline(False)
    phone.reads("Off: nothing answers")


def test_an_answer_that_hangs_is_told_and_does_not_hold_back_the_next(
    config: waker.Config, phone: Phone
) -> None:
    phone.page.clock.install()
    with running(config) as client:
        phone.open(client).give_pin().sees("ready")
    with waker.listen(("127.0.0.1", client.port)) as silent:
        silent.settimeout(10)  # seconds; the page gives up the first request after 15
        phone.look()
        with silent.accept()[0] as first:
            assert first.recv(4) == b"GET "
            phone.page.clock.run_for(4000)
            phone.reads("Waiting for waker to answer…").look()
            with silent.accept()[0] as second:
                assert second.recv(4) == b"GET "


def test_a_start_is_made_once_and_can_be_cancelled(
    asleep: waker.Config, phone: Phone
) -> None:
    with running(asleep) as client:
        phone.open(client).give_pin().sees("ready").hold("start").start()
        phone.reads("Starting…")
        button = phone.page.locator("#start")
        expect(button).to_have_attribute("aria-disabled", "true")
        button.click(force=True)  # the first one has not been answered yet
        phone.held.pop().continue_()
        phone.sees("running")
        assert len([url for url in phone.requests if url.endswith("/start")]) == 1
        phone.press("Cancel").sees("ready")
    phone.reads("Cancelled. The passphrase was not sent.")
    assert phone.focus() == "passphrase"
    assert phone.page.locator("#passphrase").input_value() == ""


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ("unlocked", "Unlocked; still booting"),
        ("not_confirmed", "Passphrase sent, not confirmed"),
    ],
)
def test_what_was_sent_is_no_longer_watched_until_the_machine_asks_again(
    api: Client, phone: Phone, outcome: str, told: str
) -> None:
    phone.tell("locked", "booting", outcome).open(api).give_pin().sees("running")
    phone.answer("start", 200, {}).press("Stop watching")
    phone.tell("locked", "cancelled", outcome)  # the initrd is about to go
    phone.sees("sent" if outcome == "unlocked" else "ready")
    phone.tell("booting", "cancelled", outcome).sees("sent").reads(told)
    assert phone.buttons() == ["Enter the passphrase again"]
    phone.log_in_again().sees("sent").reads(told)
    phone.tell("locked", "cancelled", outcome).sees("ready")  # it is another boot
    phone.tell("off", "cancelled", outcome).sees("sent")
    phone.press("Enter the passphrase again").sees("ready")
    assert phone.focus() == "passphrase"


def test_another_host_key_is_told_with_a_warning(api: Client, phone: Phone) -> None:
    phone.tell("locked", "unlocking").open(api).give_pin().sees("running")
    phone.tell("locked", "failed", "host_key_differs", "the keys: x, y.").sees("ready")
    told = phone.page.locator("#message")
    expect(told.locator("#text")).to_have_text(
        "This is not the machine you pinned. The passphrase was not sent."
    )
    assert phone.focus() == "message"
    assert "Unlock" in phone.buttons()
    expect(told.locator("#rest")).to_be_hidden()
    phone.open_details("Details").reads("The keys: x, y. Do not try again before")


def test_waking_and_unlocking_are_there_one_by_one(api: Client, phone: Phone) -> None:
    phone.open(api).give_pin().sees("ready").open_details("One step at a time")
    assert phone.buttons() == ["Wake only"]
    phone.press("Wake only").reads("Waiting for the passphrase")
    assert phone.buttons() == ["Unlock only"]
    expect(phone.page.locator("#message")).to_be_hidden()  # of the packet
    phone.type_passphrase("wrong").press("Unlock only")
    phone.reads("Wrong passphrase for disk cryptroot.")
    assert phone.focus() == "passphrase"
    phone.page.keyboard.type(PASSPHRASE)  # the wrong one is selected
    phone.press("Unlock only").sees("up").reads("Up and running")


def test_a_machine_that_is_up_is_left_in_peace(api: Client, phone: Phone) -> None:
    phone.page.clock.install()
    phone.tell("up").open(api).give_pin().sees("up").reads("Up and running")
    expect(phone.page.locator("button:visible, input:visible")).to_have_count(0)
    count = len(phone.requests)
    phone.page.clock.run_for(9000)
    assert len(phone.requests) == count
    with phone.page.expect_request("**/api/status"):
        phone.page.clock.run_for(1500)


def test_a_page_that_is_not_seen_asks_for_nothing(
    api: Client, tmp_path: Path, playwright: Playwright
) -> None:
    """In a browser without Playwright's defaults, by which a page is always seen."""
    command = [need("chromium"), "--headless", "--no-sandbox"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={tmp_path}/profile"]
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stderr
        address = next(line.split()[-1] for line in process.stderr if "ws://" in line)
        browser = playwright.chromium.connect_over_cdp(address, no_defaults=True)
        phone = Phone(browser.contexts[0].pages[0])
        phone.page.clock.install()
        phone.open(api).give_pin().sees("ready")
        with phone.page.expect_request("**/api/status"):
            phone.page.clock.run_for(1500)
        browser.contexts[0].new_page().bring_to_front()
        phone.page.wait_for_function("document.hidden")
        count = len(phone.requests)
        phone.page.clock.run_for(60_000)
        assert len(phone.requests) == count
        with phone.page.expect_request("**/api/status"):
            phone.page.bring_to_front()


@pytest.mark.parametrize("script", ["off", "too new"])
def test_without_its_script_there_is_one_sentence(
    api: Client, new_phone: NewPhone, script: str
) -> None:
    phone = new_phone(java_script_enabled=script != "off")
    if script == "off":
        phone.open(api)
    else:
        phone.page.set_content(SOURCE.replace("const STATES", "konst STATES"))
        assert "Unexpected identifier" in phone.console.pop()
    text = phone.page.inner_text("main")
    assert re.fullmatch(r"waker\s+Loading… If this stays, [^\n]* browser\.", text)


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


def test_below_a_path_of_a_reverse_proxy_it_can_be_put_on_a_home_screen(
    api: Client, phone: Phone
) -> None:
    phone.page.route("**", lambda route: route.abort())  # what is not below the path
    phone.page.route(
        "**/at/home/**",
        lambda route: route.continue_(url=route.request.url.replace("/at/home", "")),
    )
    outside = f"http://127.0.0.1:{api.port}/at/home/"
    phone.page.goto(outside)
    phone.give_pin().sees("ready")
    link = phone.page.locator("link[rel=apple-touch-icon]")
    expect(link).to_have_js_property("href", f"{outside}apple-touch-icon.png")
    cdp = phone.page.context.new_cdp_session(phone.page)
    manifest = cdp.send("Page.getAppManifest")
    assert manifest["errors"] == []
    assert '"name":"waker"' in manifest["data"]
    errors = cdp.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [error["errorId"] for error in errors] == ["in-incognito"]  # as tests are
    icon = api.call("GET", "/apple-touch-icon.png")
    assert struct.unpack(">2I", icon.body[16:24]) == (180, 180)


def test_the_disc_is_seen_in_forced_colours(api: Client, phone: Phone) -> None:
    phone.page.emulate_media(forced_colors="active")
    phone.tell("locked").open(api).give_pin().sees("ready")
    style = "getComputedStyle(document.getElementById('state'), '::before')"
    drawn = phone.page.evaluate(f"{style}.backgroundImage")
    assert re.match(r"conic-gradient\(.*50%", drawn)
