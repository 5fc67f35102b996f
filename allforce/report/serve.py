"""`dp report --watch`: the report of a run that goes on, on this machine only, to whoever has its token."""

from __future__ import annotations

import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from allforce.errors import UserError
from allforce.report.html import as_json, collect, page


class Server(ThreadingHTTPServer):
    """Listens on the loopback interface; the token is new for each start."""

    daemon_threads = True

    def __init__(self, folder: str, port: int = 0):
        self.folder, self.token = Path(folder), secrets.token_urlsafe(24)
        collect(self.folder)  # a folder without a run is told now
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}. Choose another one, or 0 for any.") from None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        # A name of somebody else's that leads here (DNS rebinding) is refused like a wrong token.
        known = self.headers.get("Host") in [f"{h}:{self.server.server_port}" for h in ("127.0.0.1", "localhost")]
        given = parse_qs(url.query).get("token", [""])[0].encode()
        if not known or not secrets.compare_digest(given, self.server.token.encode()):
            self._answer(403, "text/plain", "The token is missing or wrong: use the address that dp report printed.\n")
        elif url.path in ("/", "/data"):
            try:
                data = collect(self.server.folder)
            except (OSError, UserError) as error:
                self._answer(503, "text/plain", f"{error}\n")
            else:
                kind, text = ("text/html", page(data)) if url.path == "/" else ("application/json", as_json(data))
                self._answer(200, kind, text)
        else:
            self._answer(404, "text/plain", "There is nothing here.\n")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass  # the token is part of the address


def watch(folder: str, port: int) -> None:
    """Serve until ctrl-C."""
    with Server(folder, port) as server:
        print(f"{server.address}\nserved to this machine until ctrl-C", flush=True)
        server.serve_forever()
