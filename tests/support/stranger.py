"""A proxy between a browser and waker that may answer in waker's place."""

import contextlib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from conftest import Client


class Proxy(ThreadingHTTPServer):
    """It passes requests on, but answers those to the API itself if told to."""

    answer: tuple[int, str] | None = None  # status and body

    def __init__(self, client: Client) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.waker = f"http://127.0.0.1:{client.port}"
        self.client = Client(self.server_port)


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def answer(self, status: int, fields: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in fields:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        if self.server.answer and self.path.startswith("/api/"):
            status, body = self.server.answer
            away = [("Location", "/elsewhere")] if status == 302 else []
            self.answer(status, away, body.encode())
            return
        length = int(self.headers.get("Content-Length") or 0)
        request = urllib.request.Request(
            self.server.waker + self.path,
            self.rfile.read(length) or None,
            dict(self.headers),
            method=self.command,
        )
        try:
            response = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            self.answer(response.status, response.getheaders(), response.read())

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def proxy(client: Client) -> Iterator[Proxy]:
    with Proxy(client) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
