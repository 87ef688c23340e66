"""The page in other engines than today's Chromium, used by keyboard alone.

`make test` leaves them out, and `make test-browsers` runs them: `-m browsers`.
"""

import contextlib
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import CHECKOUT, PASSPHRASE, PIN, Answer, Client, need, serving, wait_for
from engines import BACKSPACE, ENTER, TAB, Engine, firefox, qt, webkit
from homelab import ANOTHER_MAC, Homelab
from lightningcss import process_stylesheet
from stage import STRANGERS

# Safari before 17.4 lacks the first, before 16 the second.
OLD_SAFARI = """
delete Element.prototype.checkVisibility;
delete AbortSignal.timeout;
"""
# What the console says about a request that is refused on purpose.
EXPECTED = re.compile(r".*Failed to load resource: .* 401")
everywhere = pytest.mark.browsers
Start = Callable[[Path], contextlib.AbstractContextManager[Engine]]
TODAYS: dict[str, Start] = {"webkit": webkit, "firefox": firefox}
# Chromium 108, without what Safari 15.4 lacks.
OLDEST: dict[str, Start] = {"oldest": lambda folder: qt("6.5", folder, OLD_SAFARI)}


class Person:
    """Someone with a keyboard who reads the page."""

    def __init__(self, engine: Engine, client: Client) -> None:
        self.engine = engine
        self.client = client

    def open(self) -> "Person":
        self.engine.open(f"http://127.0.0.1:{self.client.port}/")
        return self.has_focus("pin")

    def reads(self, text: str) -> "Person":
        body = "document.body ? document.body.innerText : ''"
        wait_for(lambda: str(self.engine.run(body)), lambda seen: text in seen)
        return self

    def has_focus(self, name: str) -> "Person":
        active = "document.activeElement ? document.activeElement.id : ''"
        wait_for(lambda: self.engine.run(active), lambda seen: seen == name)
        return self

    def enters(self, text: str) -> "Person":
        self.engine.type_text(text + ENTER)
        return self


@everywhere
@pytest.mark.parametrize("name", [*TODAYS, *OLDEST])
def test_the_keyboard_cancels_a_start_and_brings_the_server_up(
    name: str, api: Client, lab: Homelab, tmp_path: Path
) -> None:
    start = (TODAYS | OLDEST)[name]
    config = lab.config(lab.settings(PIN=PIN, HOMELAB_MAC=ANOTHER_MAC))
    with serving(config) as client, start(tmp_path) as engine:  # which wakes nothing
        person = Person(engine, client).open()
        person.enters(PIN).reads("Off").has_focus("passphrase")
        person.enters(PASSPHRASE).reads("0:0").has_focus("headline")
        engine.type_text(TAB)
        person.has_focus("cancel").engine.type_text(ENTER)
        person.reads("The passphrase was not sent.").has_focus("passphrase")

        person = Person(engine, api).open()
        person.enters("12345678").reads("Wrong PIN").has_focus("pin")
        person.enters(PIN).reads("Off").has_focus("passphrase")
        person.enters("wrong").reads("Wrong passphrase.").has_focus("passphrase")
        engine.type_text(BACKSPACE * len("wrong"))
        person.enters(PASSPHRASE).reads("Started in").has_focus("headline")
        person.open().enters(PIN).reads("Started in").has_focus("headline")

        assert engine.run("!AbortSignal.timeout") == (name in OLDEST)
        field = "getComputedStyle(document.getElementById('passphrase'))"
        assert engine.run(f"{field}.borderTopWidth") == "1px"
        assert engine.run("document.documentElement.scrollWidth <= innerWidth")
        assert [text for text in engine.console() if not EXPECTED.match(text)] == []


class Proxy(ThreadingHTTPServer):
    """It passes requests on, but answers those to the API itself if told to."""

    answer: tuple[int, str] | None = None  # status and body

    def __init__(self, client: Client) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.waker = client
        self.client = Client(self.server_port)


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        method, path, fields = self.command, self.path, dict(self.headers)
        body = self.rfile.read(int(fields.get("Content-Length", 0)))
        if self.server.answer and path.startswith("/api/"):
            status, text = self.server.answer
            answer = Answer(status, {"Location": "/elsewhere"}, text.encode())
        else:
            answer = self.server.waker.call(method, path, body or None, fields)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def do_GET(self) -> None:
        self.do_POST()


@contextlib.contextmanager
def proxy(client: Client) -> Iterator[Proxy]:
    with Proxy(client) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server
        finally:
            server.shutdown()


@everywhere
@pytest.mark.parametrize("start", TODAYS.values(), ids=[*TODAYS])
def test_an_answer_of_somebody_else_is_not_taken_for_wakers(
    start: Start, api: Client, tmp_path: Path
) -> None:
    """Engines differ in what they make of redirects, and of a body that is no JSON."""
    told = {f"({status})": (status, body) for status, body, _ in STRANGERS.values()}
    told["(a redirect)"] = told.pop("(302)")
    with proxy(api) as between, start(tmp_path) as engine:
        person = Person(engine, between.client)
        for words, answer in told.items():
            between.answer = answer
            person.open().enters(PIN).reads(f"answered {words}.").has_focus("pin")
        between.answer = None
        person.open().enters(PIN).reads("Off").has_focus("passphrase")
        for words, answer in told.items():
            between.answer = answer
            person.reads(f"answered {words}.")
        between.answer = None
        person.has_focus("passphrase").enters(PASSPHRASE).reads("Started in")


@everywhere
def test_a_browser_that_is_too_old_is_told_so(api: Client, tmp_path: Path) -> None:
    """Chromium 90."""
    with qt("6.2", tmp_path) as engine:
        engine.open(f"http://127.0.0.1:{api.port}/")
        person = Person(engine, api)
        person.reads("this browser is too old: the page needs Safari 15.4, Chrome")
        assert engine.run("document.querySelector('.action').ariaDisabled") == "true"


def test_no_syntax_is_newer_than_the_oldest_browsers() -> None:
    """Translated for them, styles and scripts stay as they are."""
    source = CHECKOUT.joinpath("ui.html").read_text()
    (style,) = re.findall("(?s)<style>(.*?)</style>", source)
    # It is older, but the translator adds what light-dark() would need with it.
    style = style.replace("color-scheme: light dark;", "")
    # It would write "width >= 40rem", which is younger.
    style = re.sub(r"@media \(min-width.*?\) {", "@media screen {", style)
    oldest = ["safari 15.4", "ios_saf 15.4", "chrome 105", "firefox 115"]
    translated = process_stylesheet(style, browsers_list=oldest)
    assert translated == process_stylesheet(style)
    (script,) = re.findall("(?s)<script[^>]*>(.*?)</script>", source)
    results = []
    for target in ("safari15.4,chrome105,firefox115", "esnext"):
        command = [need("esbuild"), f"--target={target}"]
        run = subprocess.run(
            command, input=script, text=True, capture_output=True, check=False
        )
        results.append((run.returncode, run.stderr, run.stdout))
    assert results[0] == results[1] == (0, "", results[0][2])
