"""An object store on this machine, behind a proxy that fails and delays requests.

refused          the answer is 503, Slow Down, and the store never sees the request
reset            the connection is reset before the store sees the request
lost answer      the store does what it should, and the connection is reset before the answer
cut answer       the connection ends in the middle of the answer
delay            the answer takes its time
outage           all connections are reset from one request on
"""

import contextlib
import http.client
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REFUSED, RESET, LOST_ANSWER, CUT_ANSWER = "refused", "reset", "lost answer", "cut answer"
DELAY, OUTAGE, SIGNAL = "delay", "outage", "signal"
_BUSY = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>'
_OF_ONE_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")
"""Headers that are not handed on."""


@dataclass(frozen=True)
class Failure:
    """What goes wrong.

    Attributes:
        kind: See above; `SIGNAL` calls `strike`, and then goes on.
        first: The number of the first request that fails, from 0.
        count: How many fail.
        seconds: How long a delay is.
        strike: Called when the first of them arrives.
        after: Whether it is called when the store has done what it should, and not before.
    """

    kind: str
    first: int
    count: int = 1
    seconds: float = 0.0
    strike: Callable[[], Any] = lambda: None
    after: bool = False


class Proxy(ThreadingHTTPServer):
    """Hands requests on to a store, but for those that fail."""

    daemon_threads = True

    def __init__(self, store: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store, self.failure, self.requests, self.failed = store, Failure("", -1, 0), 0, 0
        self._alone = threading.Lock()

    @property
    def address(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def arm(self, failure: Failure | None = None) -> None:
        """Count requests from here; some of them fail."""
        with self._alone:
            self.failure, self.requests, self.failed = failure or Failure("", -1, 0), 0, 0

    def next(self) -> Failure | None:
        """What goes wrong with the request that has just arrived."""
        with self._alone:
            number, failure = self.requests, self.failure
            self.requests += 1
            last = float("inf") if failure.kind == OUTAGE else failure.first + failure.count
            if not failure.first <= number < last:
                return None
            self.failed += 1
            return failure

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that were killed are no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _answer(self) -> None:
        body, failure = self.rfile.read(int(self.headers.get("Content-Length") or 0)), self.server.next()
        kind = failure.kind if failure else ""
        if failure and not failure.after:
            failure.strike()
        if kind == DELAY and failure:
            time.sleep(failure.seconds)
        if kind in (RESET, OUTAGE):
            self._reset()
        elif kind == REFUSED:
            self._send(503, [("Content-Type", "application/xml")], _BUSY)
        else:
            status, headers, content = self._forward(body)
            if failure and failure.after:
                failure.strike()
            if kind == LOST_ANSWER or (kind == CUT_ANSWER and not content):
                self._reset()
            else:
                self._send(status, headers, content, cut=kind == CUT_ANSWER)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {key: value for key, value in self.headers.items() if key.lower() not in ("connection", "expect")}
        with contextlib.closing(http.client.HTTPConnection(*self.server.store, timeout=30)) as store:
            store.request(self.command, self.path, body, headers)
            answer = store.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        size = dict(headers).get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        for key, value in headers:
            if key.lower() not in _OF_ONE_CONNECTION:
                self.send_header(key, value)
        self.send_header("Content-Length", size)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._reset()

    def _reset(self) -> None:
        """End the connection at once, as a machine that restarts does."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def running_store() -> Iterator[tuple[str, Proxy]]:
    """A store, by its own address, and a proxy before it."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 (it takes seconds)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    store = server.get_host_and_port()
    proxy = Proxy(store)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://{store[0]}:{store[1]}", proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()
