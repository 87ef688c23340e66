"""What bench.py measures waker against: the same three routes, made by others.

Each is as short as people would write it, with its log of requests off: the page, a PIN
that gets a token, and a status for the token. They read the PIN and the port from the
settings of waker.

    python3 -m peers NAME

But: they look at no machine, count no attempts, and drop no slow client.
"""

import hmac
import json
import os
import sys

with open("ui.html", "rb") as file:  # noqa: PTH123 - pathlib would be a weight on all
    PAGE = file.read()
TOKEN = os.urandom(32).hex()
DENIED = {"error": "denied"}
STATUS = {
    "name": "127.0.0.1",
    "state": "up",
    "reachable": True,
    "initrd_ssh_open": False,
    "system_ssh_open": True,
    "start": None,
}


def admits(pin: str) -> bool:
    """Tell whether this is the PIN."""
    return hmac.compare_digest(pin.encode(), os.environ["WAKER_PIN"].encode())


def allows(authorization: str) -> bool:
    """Tell whether a header field has the token."""
    return hmac.compare_digest(authorization.encode(), f"Bearer {TOKEN}".encode())


def use_http_server(host: str, port: int) -> None:
    """Serve with nothing but the standard library: the floor."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, members: object, page: bytes = b"") -> None:
            body = page or json.dumps(members).encode()
            self.send_response(status)
            self.send_header(
                "Content-Type", "text/html" if page else "application/json"
            )
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/":
                self.answer(200, None, PAGE)
            elif allows(self.headers.get("Authorization", "")):
                self.answer(200, STATUS)
            else:
                self.answer(401, DENIED)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            right = admits(body["pin"])
            self.answer(200 if right else 401, {"token": TOKEN} if right else DENIED)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((host, port), Handler).serve_forever()


def use_aiohttp(host: str, port: int) -> None:
    """Serve with aiohttp's own server."""
    from aiohttp import web

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=PAGE, content_type="text/html")

    async def auth(request: web.Request) -> web.Response:
        if admits((await request.json())["pin"]):
            return web.json_response({"token": TOKEN})
        return web.json_response(DENIED, status=401)

    async def status(request: web.Request) -> web.Response:
        if allows(request.headers.get("Authorization", "")):
            return web.json_response(STATUS)
        return web.json_response(DENIED, status=401)

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_post("/api/auth", auth)
    app.router.add_get("/api/status", status)
    web.run_app(app, host=host, port=port, access_log=None, print=None)


def use_flask(host: str, port: int) -> None:
    """Serve with Flask on waitress."""
    import logging

    import flask
    import waitress

    def page() -> object:
        return flask.Response(PAGE, mimetype="text/html")

    def auth() -> object:
        return {"token": TOKEN} if admits(flask.request.json["pin"]) else (DENIED, 401)

    def status() -> object:
        right = allows(flask.request.headers.get("Authorization", ""))
        return STATUS if right else (DENIED, 401)

    logging.getLogger("waitress.queue").setLevel("ERROR")  # a line for each that waits
    app = flask.Flask(__name__)
    app.add_url_rule("/", view_func=page)
    app.add_url_rule("/api/auth", view_func=auth, methods=["POST"])
    app.add_url_rule("/api/status", view_func=status)
    waitress.serve(app, host=host, port=port, _quiet=True)


PEERS = {
    "http.server": use_http_server,
    "aiohttp": use_aiohttp,
    "flask": use_flask,
}

if __name__ == "__main__":
    place, _, number = os.environ["WAKER_LISTEN"].rpartition(":")
    PEERS[sys.argv[1]](place, int(number))
