"""What bench.py measures waker against: the same page, served by others.

    python3 -m peers NAME

Each is as short as people would write it, with its log of requests off. But: none has
an API, looks at a machine, or drops a slow client.
"""

import os
import sys

with open("ui.html", "rb") as file:  # noqa: PTH123 - pathlib would be a weight on all
    PAGE = file.read()


def use_http_server(host: str, port: int) -> None:
    """Serve with nothing but the standard library: the floor."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(PAGE)))
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((host, port), Handler).serve_forever()


def use_aiohttp(host: str, port: int) -> None:
    """Serve with aiohttp's own server."""
    from aiohttp import web

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=PAGE, content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    web.run_app(app, host=host, port=port, access_log=None, print=None)


def use_flask(host: str, port: int) -> None:
    """Serve with Flask on waitress."""
    import flask
    import waitress

    app = flask.Flask(__name__)
    app.add_url_rule("/", view_func=lambda: flask.Response(PAGE, mimetype="text/html"))
    waitress.serve(app, host=host, port=port, _quiet=True)


PEERS = {
    "http.server": use_http_server,
    "aiohttp": use_aiohttp,
    "Flask": use_flask,
}

if __name__ == "__main__":
    place, _, number = os.environ["WAKER_LISTEN"].rpartition(":")
    PEERS[sys.argv[1]](place, int(number))
