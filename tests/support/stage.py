"""What people do with the page, and every state that it can be in."""

import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from conftest import PASSPHRASE, PIN, Client
from playwright.sync_api import FloatRect, Locator, Page, Route, expect

# By this, the page knows waker's errors from those of others.
WAKERS = {"Cross-Origin-Resource-Policy": "same-origin"}
# Who answers in waker's place, and whether to load the page again helps.
STRANGERS = {
    "basic auth": (401, "<h1>Authorization Required</h1>", True),
    "single sign-on": (401, '{"error": "Unauthorized"}', True),
    "no permission": (403, "<h1>Forbidden</h1>", True),
    "no slash": (404, "<h1>Not Found</h1>", False),
    "bad gateway": (502, "<h1>Bad Gateway</h1>", False),
    "timeout": (504, '{"error": "Gateway timeout"}', False),
    "unavailable": (503, '{"error": {"code": 503}}', False),
    "other JSON": (200, '{"name": "x", "state": "fine", "error": null}', False),
    "a redirect": (302, "", True),
}
ALARM = "failed", "host_key_differs"
KEYS = f"Pinned SHA256:{'x' * 43}, shown SHA256:{'y' * 43}."
# How the buttons of each view begin.
BUTTONS = {
    "off": ("Wake and",),
    "booting": ("Unlock",),
    "locked": ("Unlock",),
    "starting": ("",),  # Cancel, or Stop watching
    "doubtful": ("Enter another", "Stop watching"),
    "up": (),
    "opened": ("Enter the passphrase again",),
    "silent": ("Enter passphrase",),
    "unknown": ("Enter passphrase",),
    "foreign": ("Try again",),
    "stuck": ("I've restarted it",),
}
PHASES = ("waking", "unlocking", "booting", "done")
SENT = ("unlocked", "not_confirmed", "wrong_passphrase", "gave_up", "up")
# Where the focus is: a button's name, a field's id, or the headline.
FOCUS = """(({tagName, ariaLabel, innerText, id}) =>
    tagName === "H1" ? "headline" : ariaLabel || innerText || id)(
    document.activeElement)"""
COUNT_POLLS = """
window.polls = 0;
const send = window.fetch;
window.fetch = (path, ...more) => {
    window.polls += path === "api/status";
    return send(path, ...more);
};
"""
# What the old page still does must not count.
FORGET_TAB = "Storage.prototype.setItem = () => {}, sessionStorage.clear()"
NAMES = "(buttons) => buttons.map((each) => each.ariaLabel || each.innerText)"


@dataclass
class Phone:
    """A browser's page, what a person does with it, and the answers that it gets.

    The daemon answers, unless a test does: some states would take a real machine
    minutes. The newest answer for a path replaces the older ones.
    """

    page: Page
    client: Client
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # requests, answered or given up
    held: list[Route] = field(default_factory=list)
    is_stopped: bool = False  # its clock
    numbers: Iterator[int] = field(default_factory=itertools.count)
    start_id: int = 0  # of the start that was told last
    phase: str = ""  # of that

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        for event in ("requestfinished", "requestfailed"):
            self.page.on(event, lambda request: self.ended.append(request.url))

    def open(self, host: str = "127.0.0.1") -> "Phone":
        """Open the page in a new tab, so to speak."""
        if self.page.url != "about:blank":
            self.page.evaluate(FORGET_TAB)
        self.page.goto(f"http://{host}:{self.client.port}/")
        return self

    def reload(self) -> "Phone":
        self.page.reload()
        return self

    def give_pin(self, pin: str = PIN) -> "Phone":
        self.part("pin").fill(pin)
        self.part("pin").press("Enter")
        return self

    def type_passphrase(self, passphrase: str = PASSPHRASE) -> "Phone":
        self.part("passphrase").fill(passphrase)
        return self

    def start(self, passphrase: str = PASSPHRASE) -> "Phone":
        self.type_passphrase(passphrase).part("passphrase").press("Enter")
        return self

    def press(self, button: str) -> "Phone":
        self.page.get_by_role("button", name=button).click()
        return self

    def open_details(self) -> "Phone":
        self.page.get_by_text("Details", exact=True).click()
        return self

    def look(self) -> "Phone":
        """Make the page poll now, as when it comes to the front."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        return self

    def until(self, look: Callable[[], object], pause: float = 10) -> "Phone":
        """Let Playwright and the page work until that is true. The pause is in ms."""
        deadline = time.monotonic() + 50  # seconds
        while not look():
            assert time.monotonic() < deadline, self.page.inner_text("main")
            self.page.wait_for_timeout(pause)
        return self

    def part(self, name: str) -> Locator:
        return self.page.locator(f"#{name}")

    def sees(self, view: str) -> "Phone":
        expect(self.page.locator("main")).to_have_attribute("data-view", view)
        return self

    def reads(self, text: str) -> "Phone":
        seen = self.page.locator("main")
        expect(seen).to_contain_text(text, use_inner_text=True, ignore_case=True)
        return self

    def does_not_read(self, text: str) -> "Phone":
        seen = self.page.locator("main")
        expect(seen).not_to_contain_text(text, use_inner_text=True, ignore_case=True)
        return self

    def is_blocked(self, text: str) -> "Phone":
        """Assert what is said of a script that cannot run. It appears after 3 s."""
        self.page.evaluate("document.getAnimations().forEach((each) => each.finish())")
        expect(self.part("blocked")).to_contain_text(text, use_inner_text=True)
        return self

    def is_busy(self) -> "Phone":
        expect(self.page.get_by_role("button", disabled=True).first).to_be_visible()
        return self

    def is_current(self) -> "Phone":
        """Assert that what is shown is not marked as old."""
        expect(self.page.locator("[data-old]")).to_have_count(0)
        return self

    def polls(self) -> int:
        """Count the polls that the page has sent since its clock was stopped.

        A busy browser may be late in telling Playwright, while that clock runs on.
        """
        return int(self.page.evaluate("polls"))

    def has_no_poll_under_way(self) -> "Phone":
        """Wait until each has been answered or given up."""
        url = self.page.url + "api/status"
        return self.until(lambda: self.ended.count(url) >= self.polls(), 1)

    def marks(self, count: int) -> "Phone":
        """Assert that so many fields are marked as wrong."""
        expect(self.page.locator("[aria-invalid=true]")).to_have_count(count)
        return self

    def offers(self, *beginnings: str) -> "Phone":
        """Assert how the buttons' names begin, without those that help to type."""
        names = self.page.get_by_role("button").evaluate_all(NAMES)
        names = [each for each in names if not re.match("Show|Hide", each)]
        assert len(names) == len(beginnings), names
        assert all(map(str.startswith, names, beginnings)), names
        return self

    def resize(self, width: int, height: int) -> "Phone":
        self.page.set_viewport_size({"width": width, "height": height})
        return self

    def enlarge(self, percent: int) -> "Phone":
        """Choose the size of texts, as in the browser's settings."""
        self.page.evaluate(f"document.documentElement.style.fontSize = '{percent}%'")
        return self

    def box(self, part: str) -> FloatRect:
        box = self.part(part).bounding_box()
        assert box
        return box

    def bottom(self, part: str) -> float:
        return self.box(part)["y"] + self.box(part)["height"]

    def has_at(self, place: tuple[float, float], part: str) -> "Phone":
        """Assert that a part of the page covers a place, in px."""
        box = self.box(part)
        assert box["x"] <= place[0] <= box["x"] + box["width"]
        assert box["y"] <= place[1] <= box["y"] + box["height"]
        return self

    def css(self, part: str, name: str) -> str:
        style = f"(e) => getComputedStyle(e).getPropertyValue('{name}')"
        return str(self.part(part).evaluate(style))

    def dawn(self) -> float:
        """Return how much of the day has come: 0 is night."""
        return float(self.css("dawn", "--dawn"))

    def focus(self) -> str:
        return str(self.page.evaluate(FOCUS))

    def message(self) -> str:
        """Return the message as it is now, marked if a field is."""
        is_marked = self.page.locator("[aria-invalid=true]").count() > 0
        return self.part("message").inner_text() + " (marked)" * is_marked

    def passphrase(self) -> str:
        return self.part("passphrase").input_value()

    def count(self, path: str) -> int:
        return sum(url.endswith(f"/api/{path}") for url in self.requests)

    def answer(self, path: str, status: int, body: object) -> "Phone":
        """Answer all further requests for a path. A text is not waker's answer."""
        told: dict[str, Any] = {"json": body, "headers": WAKERS}
        if isinstance(body, str):
            told = {"body": body, "headers": {"Location": "/elsewhere"}}
        self.page.route(
            f"**/api/{path}", lambda route: route.fulfill(status=status, **told)
        )
        return self

    def ignore(self, path: str) -> "Phone":
        """Let no further request for a path be answered."""
        self.page.route(f"**/api/{path}", lambda _: None)
        return self

    def hold(self, path: str) -> "Phone":
        """Hold the next request for a path until a test takes and answers it."""

        def keep(route: Route) -> None:
            self.held.append(route)

        self.page.route(f"**/api/{path}", keep, times=1)
        return self

    def take_held(self) -> Route:
        """Wait until a request is held: the page may not have sent it yet."""
        return self.until(lambda: self.held).held.pop()

    def abort(self, path: str) -> "Phone":
        """Let all further requests for a path be lost at once."""
        self.page.route(f"**/api/{path}", lambda route: route.abort())
        return self

    def lose_connection(self) -> "Phone":
        self.abort("status").look()
        if self.is_stopped:
            self.waits_for("Can't reach waker")  # what is soon over is not told
        return self.reads("Can't reach waker")

    def expire(self) -> "Phone":
        """Let the token's 15 minutes pass."""
        return self.answer("{status,start}", 401, {"error": "Expired"}).look()

    def tell(
        self, state: str, phase: str = "", outcome: str = "", *times: int, **more: Any
    ) -> "Phone":
        """Answer all further polls with a state of the server, and a start.

        `times` are seconds: when each phase began, and how long the start has run. What
        was running goes on, unless its phase is an earlier one: then it is a new start.
        `more` are members of the status, or of the start.
        """
        *begun, seconds = times or (0, 9)
        was, self.phase = self.phase, phase
        if was not in PHASES[:3] or phase in PHASES[: PHASES.index(was)]:
            self.start_id += 1
        start = {
            "id": self.start_id,
            "phase": phase,
            "outcome": outcome or None,
            "message": "From waker.",
            "seconds": seconds,
            "sent": outcome in SENT,
            "woke": bool(begun),
            "times": dict(zip(PHASES, begun, strict=False)),
        }
        status = {
            "name": "Home server",
            "state": state,
            "reachable": state not in {"off", "unknown"},
            "usual_seconds": None,
            "usual_unlock_seconds": None,
            "link": None,
        }
        for name, value in more.items():
            (status if name in status else start)[name] = value
        status["start"] = start if phase else None

        def sign_in(route: Route) -> None:
            """As waker, which would look at the machine's ports first: that is slow."""
            is_right = route.request.post_data_json == {"pin": PIN}
            code = 200 if is_right else 401
            token = f"token {next(self.numbers)}"
            right = {"token": token, "status": status}
            body = right if is_right else {"error": "Wrong PIN"}
            route.fulfill(status=code, json=body, headers=WAKERS)

        self.page.route("**/api/auth", sign_in)
        return self.answer("status", 200, status)

    def show(self, state: str, *start: Any, **members: Any) -> "Phone":
        """Tell, and wait until the page has drawn it."""
        if start:
            members = {"message": f"From waker, {next(self.numbers)}."} | members
        self.tell(state, *start, **members)
        main = self.page.locator("main")

        def is_drawn() -> bool:
            shown = main.text_content() or ""
            if start:  # it may be folded away
                found = members["message"] in shown
            else:
                found = main.get_attribute("data-view") == state
                found = found and members.get("name", "") in shown
            if not found:  # a poll that is under way brings what was told before
                self.look()
            return found

        return self.until(is_drawn, 50)

    def stop_clock(self) -> "Phone":
        """Let time pass only when a test says so."""
        self.page.add_init_script(COUNT_POLLS)
        self.page.clock.install(time="2030-01-01")  # this clock would still tick
        self.page.clock.pause_at("2030-01-02")
        self.is_stopped = True
        return self

    def waits_for(self, text: str) -> "Phone":
        """Let time pass on a clock that has been stopped, until the page says that."""
        seen = self.page.locator("main")
        return self.until(lambda: text in seen.inner_text() or not self.wait(0.5))

    def wait(self, seconds: float) -> "Phone":
        """Let time pass on a clock that has been stopped."""
        self.page.clock.run_for(round(seconds * 1000))
        return self


# What waker tells (state, phase, outcome, times), the view, and some of its words.
TOLD: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "waking": (("off", "waking", "", 0, 3), "starting", "until it is unlocked"),
    "unlocking": (("locked", "unlocking", "", 0, 38, 40), "starting", "Cancel"),
    "unlocked": (
        ("booting", "booting", "unlocked", 0, 38, 42, 42),
        "starting",
        "Unlocked",
    ),
    "booting": (
        ("booting", "booting", "unlocked", 0, 38, 42, 47),
        "starting",
        "can close this page",
    ),
    "unchecked": (("unknown", "done", "up", 0, 1, 2, 3, 3), "unknown", "couldn't"),
    "up after a start": (("up", "done", "up", 0, 38, 42, 62, 62), "up", "Started in"),
    "not confirmed": (("locked", "booting", "not_confirmed"), "doubtful", "be wrong"),
    "key refused": (("locked", "failed", "key_refused"), "locked", "From waker"),
    "nothing asks": (("booting", "failed", "not_asked"), "booting", "From waker"),
    "not awake": (("off", "failed", "not_awake"), "off", "From waker"),
    "not up": (("off", "failed", "not_up"), "silent", "check its screen"),
    "given up": (("locked", "failed", "gave_up"), "stuck", "must restart it"),
    "switched off": (("off", "failed", "gave_up"), "off", ""),
    "refusing": (("booting", "failed", "not_up"), "silent", "check its screen"),
    "sent": (("off", "cancelled", "not_confirmed"), "silent", "check its screen"),
    "silent": (("off", "cancelled", "unlocked"), "silent", "may still be booting"),
    "opened": (("locked", "cancelled", "unlocked"), "opened", "still booting"),
    "already open": (("booting", "cancelled", "already_open"), "opened", "It is still"),
    "another host key": (("locked", *ALARM), "foreign", "was not sent"),
}


# Each opens the page, goes through some states, and yields their names.


def during_a_start(phone: Phone) -> Iterator[str]:
    phone.tell("off").open()
    yield "PIN"
    phone.give_pin().sees("off")
    yield "off"
    for name, (told, view, words) in TOLD.items():
        phone.show(*told).sees(view).reads(words).offers(*BUTTONS[view])
        yield name
    phone.show("up", *ALARM).sees("foreign").reads("was not sent").offers("Try again")
    yield "up, after another host key"
    late = "off", "booting", "not_confirmed", 0, 38, 42
    phone.show(*late, 99, usual_seconds=62).reads("Longer than")
    yield "overdue"
    usual: Any = {"usual_seconds": 62, "usual_unlock_seconds": 42}
    phone.show("off", "waking", "", 0, 17, **usual).reads("About 25\u00a0s left.")
    yield "starting"
    phone.show("booting", "booting", "unlocked", 0, 38, 42, 47, **usual)
    phone.reads("Up in about 15\u00a0s.")
    yield "unlocked, with a forecast"
    phone.show("up", "done", "up", 0, 38, 42, 62, 62).reads("Started in 1\u00a0min")
    yield "up"
    link = "https://home.example/"
    phone.show("up", "done", "up", 0, 38, 42, 62, 62, link=link).reads("Open Home")
    yield "up, with a link"


def around_a_start(phone: Phone) -> Iterator[str]:
    phone.page.clock.install()  # it ticks: axe would wait for a stopped one for ever
    phone.tell("unknown").open("waker.lan").reads("at home or through a VPN")
    yield "PIN, not encrypted"
    phone.give_pin("12345678").marks(1)
    yield "PIN, wrong"
    phone.give_pin("12345679").reads("on the box")
    yield "PIN, wrong again"
    error = {"error": "Too many attempts; try again in 57 s"}
    many: Any = {"status": 429, "headers": WAKERS | {"Retry-After": "57"}}
    phone.hold("auth").give_pin().take_held().fulfill(json=error, **many)
    phone.reads("again in 5")
    yield "PIN, too many"
    phone.hold("auth").give_pin().wait(6).reads("Still trying").take_held().abort()
    phone.reads("Can't reach")
    yield "PIN, connection lost"
    phone.give_pin().sees("unknown").offers("Enter passphrase")
    yield "unknown"
    phone.answer("wol", 200, {"message": KEYS}).show("off").open_details()
    phone.press("Wake only").reads("was sent")
    yield "off, packet sent"
    phone.show("locked").type_passphrase().press("Show")
    yield "asks, passphrase shown"
    phone.answer("start", 409, {"error": "Another unlock is running"})
    phone.start().reads("Another unlock")
    yield "asks, refused"
    phone.expire().reads("Signed out")
    yield "typing, signed out"
    phone.tell("locked", "failed", "wrong_passphrase").open().give_pin()
    phone.reads("Last time: Wrong passphrase")
    yield "failed last time"
    phone.show("locked", "booting", "not_confirmed").press("Enter another")
    yield "not confirmed, another passphrase"
    phone.abort("status").wait(4).reads("reach waker")
    yield "not confirmed, connection lost"
    phone.tell("off", "waking").open().give_pin().sees("starting").expire()
    phone.reads("how the start goes")
    yield "PIN, during a start"
    phone.tell("up").open().give_pin().sees("up").ignore("status")
    phone.wait(40).reads("Last seen")
    yield "up, seen long ago"
    phone.tell("up").open().give_pin().sees("up").open_details()
    phone.reads("another device").offers("Wake only")
    yield "up, details"
    phone.lose_connection()
    yield "up, connection lost"
    phone.answer("status", 403, "<h1>Forbidden</h1>").look()
    phone.reads("answered (403)").offers("Wake only", "Reload")
    yield "up, somebody else answers"
