"""What a person does with the page, and every state that it can be in.

`Stage` stands between the page and the daemon: it loses answers, or gives its own, so
that the page can be seen in states that take a real machine minutes.
"""

import http.client
import http.server
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from conftest import PASSPHRASE, PIN, Client
from playwright.sync_api import Page, expect

import waker
from waker import Outcome


@dataclass
class Phone:
    """A browser's page, and what a person does with it."""

    page: Page
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, client: "Client | Stage", host: str = "127.0.0.1") -> "Phone":
        self.page.goto(f"http://{host}:{client.port}/")
        return self

    def give_pin(self, pin: str = PIN) -> "Phone":
        self.page.get_by_label("PIN").fill(pin)
        return self.press("Continue")

    def type_passphrase(self, passphrase: str = PASSPHRASE) -> "Phone":
        self.page.locator("#passphrase").fill(passphrase)
        return self

    def start(self, passphrase: str = PASSPHRASE) -> "Phone":
        self.type_passphrase(passphrase).page.locator("#start").click()
        return self

    def press(self, button: str) -> "Phone":
        self.page.get_by_role("button", name=button).click()
        return self

    def sees(self, view: str) -> "Phone":
        expect(self.page.locator("main")).to_have_attribute("data-view", view)
        return self

    def reads(self, text: str) -> "Phone":
        expect(self.page.locator("main")).to_contain_text(text)
        return self

    def look(self) -> "Phone":
        """Have the page ask now, as when it comes to the front."""
        self.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        return self

    def buttons(self) -> list[str]:
        return self.page.locator("button.second:visible").all_inner_texts()

    def focus(self) -> str:
        return str(self.page.evaluate("document.activeElement.id"))


class Stage:
    """A reverse proxy before the daemon, which shows the page what a test wants.

    `answers` has by path what is answered instead: a status and JSON; None, which loses
    the daemon's answer; or an event, before which there is none. All is below `prefix`.
    """

    def __init__(self, client: Client, prefix: str = "/") -> None:
        self.answers: dict[str, tuple[int, object] | threading.Event | None] = {}
        self._expired = False
        stage = self

        class Forward(http.server.BaseHTTPRequestHandler):
            def forward(self) -> None:
                path = self.path.removeprefix(prefix)
                own = stage.answers.get(path)
                if isinstance(own, threading.Event):
                    own.wait(20)
                    own = stage.answers.get(path)
                if path == self.path:
                    self.send_error(404)
                elif isinstance(own, tuple):
                    fields = [("Retry-After", "42")] if own[0] == 429 else []
                    self.reply(own[0], json.dumps(own[1]).encode(), fields)
                else:
                    stage.relay(client, self, path)

            def reply(self, status: int, body: bytes, fields: list[Any]) -> None:
                self.send_response(status)
                for name, value in fields:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_DELETE = forward  # noqa: N815 - the base class's names

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forward)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def relay(self, client: Client, handler: Any, path: str) -> None:
        """Ask the daemon."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        fields = dict(handler.headers)
        self._expired &= path != "api/auth"
        if self._expired:
            fields.pop("Authorization", None)
        connection = http.client.HTTPConnection(client.host, client.port)
        connection.request(handler.command, f"/{path}", body, fields)
        answer = connection.getresponse()
        if path not in self.answers:
            handler.reply(answer.status, answer.read(), answer.getheaders())

    def expire(self) -> None:
        """Let 15 minutes pass for every token: the daemon gets none until the PIN."""
        self._expired = True

    def show(
        self, state: str, phase: str = "", outcome: str | None = None, **start: Any
    ) -> None:
        """Show a state of the machine, and of a start."""
        told = {"message": "", "seconds": 9} | start
        self.answers["api/status"] = (
            200,
            {
                "name": "my machine",
                "state": state,
                "reachable": state not in {"off", "unknown"},
                "initrd_ssh_open": state == "locked",
                "system_ssh_open": state == "up",
                "start": {"phase": phase, "outcome": outcome} | told if phase else None,
            },
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


State = Callable[[Phone, Stage], object]


def told(outcome: Outcome, detail: str = "cryptroot", *, sent: bool = True) -> str:
    return waker.Result.of(outcome, detail, sent=sent).message


def first(*parts: State) -> State:
    """Do one thing after the other."""

    def go(phone: Phone, stage: Stage) -> None:
        for part in parts:
            part(phone, stage)

    return go


def set_status(state: str, phase: str = "", outcome: str = "", **start: Any) -> State:
    """Have the daemon tell a state of the machine, as soon as it is asked."""
    return lambda _, stage: stage.show(state, phase, outcome or None, **start)


def sight(state: str, phase: str = "", outcome: str = "", **start: Any) -> State:
    """Show a state of the machine."""
    main = f"main[data-state={state}]"
    return first(
        set_status(state, phase, outcome, **start),
        lambda phone, _: phone.look(),
        lambda phone, _: expect(phone.page.locator(main)).to_be_visible(),
    )


def failed(outcome: Outcome, detail: str = "", *, sent: bool = False) -> State:
    """Show how a start failed."""
    message = told(outcome, detail, sent=sent)
    return first(
        sight("locked", "unlocking"),
        sight("locked", "failed", outcome.value[0], message=message),
        sees("ready"),
    )


def sees(view: str) -> State:
    return lambda phone, _: phone.sees(view)


def click(text: str) -> State:
    return lambda phone, _: phone.page.get_by_text(text, exact=True).click()


def fill_in_pin(phone: Phone, _: Stage) -> None:
    phone.page.get_by_label("PIN").fill(PIN)


def type_passphrase(phone: Phone, _: Stage) -> None:
    phone.type_passphrase()


def hold(path: str, button: str) -> State:
    """Press a button; the answer does not come yet."""
    return first(
        lambda _, stage: stage.answers.update({path: threading.Event()}),
        click(button),
    )


def answer(path: str, status: int, told: object, text: str) -> State:
    """Answer what is held or comes next; `text` is what is seen then."""

    def go(phone: Phone, stage: Stage) -> None:
        held = stage.answers.get(path)
        stage.answers[path] = status, told
        if isinstance(held, threading.Event):
            held.set()
        else:
            phone.page.keyboard.press("Enter")
        phone.reads(text)
        del stage.answers[path]

    return go


def lose(phone: Phone, stage: Stage) -> None:
    stage.answers["api/status"] = None
    phone.look().reads("waker does not answer")


def log_in(phone: Phone, _: Stage) -> None:
    phone.page.reload()
    phone.give_pin()


def expire(phone: Phone, stage: Stage) -> None:
    stage.expire()
    stage.answers.clear()
    phone.look()


UNLOCKED = told(Outcome.UNLOCKED)
LATE = told(Outcome.GONE, "not confirmed: the connection was lost")
KEYS = "pinned SHA256:" + "x" * 43 + ", shown SHA256:" + "y" * 43
CANCELLED = "Cancelled. The passphrase was not sent."
NOT_AWAKE = "The machine did not wake: check power, network cable and Wake-on-LAN."
NOT_UP = "The system has not answered yet."
PACKET = "Magic packet sent to 52:54:00:12:34:56 from 192.168.1.2"
EARLY = "Failed to unlock: " + told(Outcome.EARLY, sent=False)
# In the order in which one page goes through them, from its address to the end.
STATES: dict[str, State] = {
    "PIN": lambda phone, stage: phone.open(stage).sees("pin"),
    "PIN, plain HTTP": lambda phone, stage: phone.open(stage, "waker.lan").sees("pin"),
    "PIN, being checked": first(fill_in_pin, hold("api/auth", "Continue")),
    "PIN, wrong": answer("api/auth", 401, {"error": "Wrong PIN"}, "Wrong PIN"),
    "PIN, too many": answer("api/auth", 429, {"error": "Too many"}, "again in 4"),
    "off": first(
        set_status("off"), lambda phone, stage: phone.open(stage), log_in, sees("ready")
    ),
    "off, one step at a time": click("One step at a time"),
    "off, packet being sent": hold("api/wol", "Wake only"),
    "off, packet sent": answer("api/wol", 200, {"message": PACKET}, PACKET),
    "awake": sight("booting"),
    "asks": sight("locked"),
    "asks, passphrase shown": first(type_passphrase, click("Show")),
    "asks, being unlocked": hold("api/unlock", "Unlock only"),
    "asks, not unlocked": answer("api/unlock", 500, {"error": EARLY}, "not ready yet"),
    "asks, being unlocked again": hold("api/unlock", "Unlock only"),
    "unlocked, nothing watched": answer(
        "api/unlock", 200, {"message": UNLOCKED}, UNLOCKED
    ),
    "not known": sight("unknown"),
    "waking": sight("off", "waking", message=PACKET, seconds=0),
    "waiting": sight("booting", "waking", message="The machine is awake", seconds=2),
    "unlocking": sight(
        "locked", "unlocking", message="Connecting to the initrd", seconds=4
    ),
    "booting": sight("booting", "booting", "unlocked", message=UNLOCKED, seconds=6),
    "started": sight("up", "done", "up", message=f"{UNLOCKED} It is up.", seconds=8),
    "off again": sight("off"),
    "waking as usual": sight("off", "waking", message=PACKET, seconds=2),
    "booting as usual": sight(
        "off", "booting", "unlocked", message=UNLOCKED, seconds=6
    ),
    "overdue": sight("off", "booting", "not_confirmed", message=LATE, seconds=99),
    "start, connection lost": lose,
    "start, PIN again": first(expire, sees("pin")),
    "start, being cancelled": first(
        set_status("booting", "waking"),
        log_in,
        sees("running"),
        hold("api/start", "Cancel"),
    ),
    "cancelled": first(
        set_status("booting", "cancelled", "cancelled", message=CANCELLED),
        answer("api/start", 200, {}, CANCELLED),
    ),
    "unlocked, not watched": sight("booting", "cancelled", "unlocked"),
    "sent, not watched": sight("off", "cancelled", "not_confirmed"),
    "wrong passphrase": failed(Outcome.WRONG, "cryptroot", sent=True),
    "another host key": failed(Outcome.HOST_KEY, KEYS),
    "another host key, details": click("Details"),
    "key refused": failed(Outcome.KEY, "SHA256:" + "z" * 43),
    "nothing asks": failed(Outcome.IDLE),
    "given up": failed(Outcome.DEAD, sent=True),
    "not awake": sight("off", "failed", "not_awake", message=NOT_AWAKE),
    "not up": sight("off", "failed", "not_up", message=f"{UNLOCKED} {NOT_UP}"),
    "restarted": first(sight("locked", "unlocking"), sight("off"), sees("ready")),
    "typing, time over": first(
        type_passphrase,
        expire,
        lambda phone, _: phone.reads("Your 15 minutes are over"),
    ),
    "PIN again": first(click("Wake and unlock"), sees("pin")),
    "failed last time": first(
        set_status("locked", "failed", "gave_up", message=told(Outcome.DEAD)),
        log_in,
        sees("ready"),
    ),
    "connection lost": lose,
    "waker is slow": first(
        lambda _, stage: stage.answers.update({"api/status": threading.Event()}),
        lambda phone, _: phone.look().reads("Waiting for waker"),
    ),
    "up, last start": first(
        set_status("up", "done", "up", message=f"{UNLOCKED} It is up."),
        log_in,
        sees("up"),
    ),
    "up": sight("up"),
    "done, not known": sight("unknown", "done", "up", message=UNLOCKED),
}
