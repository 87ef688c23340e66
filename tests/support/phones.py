"""The phone that gets waker's messages: an HTTP server, as ntfy's."""

import contextlib
import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WAITING = "The server is waiting for its passphrase."
UP = "The server is up."


def hello(state: str) -> str:
    return f"Messages from waker arrive here. The server is {state}."


class Phone(ThreadingHTTPServer):
    """Receives messages. Like ntfy, it repeats the topic in its answer."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        super().__init__((address, 0), Receiver)
        self.topic = f"/{secrets.token_hex(8)}"
        self.url = f"http://{address}:{self.server_port}{self.topic}"
        self.status = 200
        self.paths: list[str] = []
        self.tokens: list[str] = []
        self.messages: list[str] = []  # that it has accepted
        self.processes = b""  # their arguments and environments, when one arrived

    @contextlib.contextmanager
    def listening(self) -> Iterator["Phone"]:
        with self:
            threading.Thread(target=self.serve_forever, args=(0.05,)).start()
            try:
                yield self
            finally:
                self.shutdown()


class Receiver(BaseHTTPRequestHandler):
    server: Phone

    def do_POST(self) -> None:
        message = self.rfile.read(int(self.headers["Content-Length"])).decode()
        for file in ("cmdline", "environ"):
            for path in Path("/proc").glob(f"[0-9]*/{file}"):
                with contextlib.suppress(OSError):  # it has ended, or is another user's
                    self.server.processes += path.read_bytes()
        self.server.paths.append(self.path)
        self.server.tokens.append(self.headers.get("Authorization", ""))
        if self.server.status == 200:
            self.server.messages.append(message)
        self.send_response(self.server.status)
        self.send_header("Location", f"/elsewhere{self.path}")  # followed by a GET
        self.end_headers()
        self.wfile.write(f'{{"topic": "{self.path}"}}'.encode())

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
