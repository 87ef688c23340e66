"""A proxy between a browser and waker that may answer in waker's place."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from conftest import Answer, Client


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
            away = {"Location": "/elsewhere"} if status == 302 else {}
            answer = Answer(status, away, text.encode())
        else:
            answer = self.server.waker.call(method, path, body or None, fields)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def proxy(client: Client) -> Iterator[Proxy]:
    with Proxy(client) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield server
        finally:
            server.shutdown()
