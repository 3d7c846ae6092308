"""A proxy that fails as it should, or the store would seem to survive what never happened."""

import http.client
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.faults.proxy import CUT_ANSWER, DELAY, LOST_ANSWER, OUTAGE, REFUSED, RESET, SIGNAL, Failure, Proxy

CONTENT = b"0123456789"


class _Store(BaseHTTPRequestHandler):
    """Answers with the same content, and keeps what it was sent."""

    def do_PUT(self):
        self.server.received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *_):
        pass


@contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Store)
    server.received = []
    with running(server):
        yield server


@pytest.fixture
def proxy(store):
    with running(Proxy(store.server_address)) as proxy:
        yield proxy


def put(proxy, body=b"new"):
    connection = http.client.HTTPConnection(*proxy.server_address, timeout=10)
    try:
        connection.request("PUT", "/bucket/file", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_requests_are_handed_on(proxy, store):
    assert put(proxy) == (200, CONTENT)
    assert store.received == [b"new"]


@pytest.mark.parametrize(
    ("kind", "error", "received"),
    [
        (RESET, ConnectionError, 0),
        (OUTAGE, ConnectionError, 0),
        (LOST_ANSWER, ConnectionError, 1),
        (CUT_ANSWER, (http.client.IncompleteRead, ConnectionError), 1),
    ],
)
def test_connections_that_end(proxy, store, kind, error, received):
    proxy.arm(Failure(kind, 1))
    assert put(proxy) == (200, CONTENT)
    with pytest.raises(error):
        put(proxy, b"second")
    assert store.received == [b"new"] + [b"second"] * received
    if kind == OUTAGE:
        with pytest.raises(error):
            put(proxy)
        proxy.arm()
    assert put(proxy) == (200, CONTENT)


def test_refused_requests(proxy, store):
    proxy.arm(Failure(REFUSED, 0, 2))
    assert [put(proxy)[0] for _ in range(3)] == [503, 503, 200]
    assert (len(store.received), proxy.failed) == (1, 2)


def test_a_late_answer(proxy):
    proxy.arm(Failure(DELAY, 0, seconds=0.2))
    begin = time.monotonic()
    assert put(proxy) == (200, CONTENT)
    assert time.monotonic() - begin >= 0.2


@pytest.mark.parametrize("after", [False, True])
def test_a_strike_before_or_after_the_store_has_acted(proxy, store, after):
    seen = []
    proxy.arm(Failure(SIGNAL, 0, strike=lambda: seen.append(len(store.received)), after=after))
    put(proxy)
    put(proxy)
    assert seen == [int(after)]
