"""What is sent to harm: refused or survived, with one log line, and the next request is answered in time."""

import contextlib
import io
import socket
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image

from .conftest import encoded, files, log_line, pictures, pixels


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, and whose few bytes of data unpack to much."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    data = zlib.compress(bytes(20_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def grey(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


JPEG = encoded(pixels(1)[0], "JPEG")
BROKEN = {
    "a decompression bomb": lambda: bomb(50_000, 50_000),
    "a bomb below the limit": lambda: bomb(9_000, 9_000),
    "100 megapixels": lambda: grey(10_000),
    "text called .jpg": lambda: b"hello, world\n" * 100,
    "a truncated JPEG": lambda: JPEG[: len(JPEG) // 2],
    "an SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "nothing but zeros": lambda: bytes(100_000),
}


def address(service) -> tuple[str, int]:
    host, port = service.address.removeprefix("http://").split(":")
    return host, int(port)


@pytest.fixture(autouse=True)
def lives(service, capfd):
    """After every attack, an honest client gets its answer."""
    yield
    start = time.perf_counter()
    assert httpx.post(f"{service.address}/guard", content=pictures(1)[0]).status_code == 200
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize("what", BROKEN)
def test_images_that_are_none(client, capfd, what):
    start = time.perf_counter()
    answer = client.post("/guard", files={"image": ("photo.jpg", BROKEN[what]())})
    assert answer.status_code == 422
    assert "photo.jpg" in answer.json()["error"]
    assert time.perf_counter() - start < 4
    line = log_line(capfd)
    assert (line["status"], line["broken"]) == (422, 1)


def test_a_bomb_among_others_costs_the_others_nothing(client):
    answer = client.post("/guard", files=files([pictures(1)[0], bomb(50_000, 50_000), pictures(1)[0]]))
    assert answer.status_code == 200
    assert ["error" in one for one in answer.json()["verdicts"]] == [False, True, False]


@pytest.mark.parametrize("length", ["1073741824", "9" * 20])
def test_a_huge_body_is_refused_before_it_is_sent(service, capfd, length):
    with socket.create_connection(address(service), timeout=5) as attacker:
        attacker.sendall(f"POST /guard HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
        assert attacker.recv(100).startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))


def test_a_huge_body_without_a_length_is_cut_off(client):
    def endless():
        for _ in range(1000):
            yield bytes(100_000)

    with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError):  # closed before the client has sent all
        assert client.post("/guard", content=endless()).status_code == 413


def test_slow_clients_hold_up_nobody_and_are_sent_away(service, capfd):
    slow = [socket.create_connection(address(service), timeout=20) for _ in range(20)]
    try:
        for one in slow:
            one.sendall(b"POST /guard HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx")
        start = time.perf_counter()
        assert httpx.post(f"{service.address}/guard", content=pictures(1)[0]).status_code == 200
        assert time.perf_counter() - start < 2
        assert all(one.recv(100).startswith(b"HTTP/1.1 408") for one in slow)
    finally:
        for one in slow:
            one.close()


def test_clients_that_disconnect_at_any_moment(service):
    content = pictures(1)[0]
    request = f"POST /guard HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    for end in range(0, len(request), 40):
        with socket.create_connection(address(service), timeout=5) as one:
            one.sendall(request[:end])
    deadline = time.monotonic() + 5
    while "dubito_queue_images 0.0" not in httpx.get(f"{service.address}/metrics").text:
        assert time.monotonic() < deadline


def test_many_clients_at_once(client):
    def ask(content: bytes) -> int:
        return client.post("/guard", content=content).status_code

    with ThreadPoolExecutor(40) as clients:
        statuses = list(clients.map(ask, pictures(200)))
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 16  # the queue's room


def test_names_are_only_text(client, capfd):
    names = ["../../etc/passwd", "a\x1b[31m.png", "<script>", "x" * 3000, "\u202egnp.exe", "%00", "a\\b"]
    sent = [("image", (name, b"text")) for name in names]
    answer = client.post("/guard", files=sent)
    assert answer.status_code == 422
    assert max(len(one["name"]) for one in answer.json()["verdicts"]) == 200
    assert log_line(capfd)["broken"] == len(names)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/../../etc/passwd",
            "/docs/../../etc/passwd",
            "/%2e%2e/%2e%2e/etc/passwd",
            "/guard%00",
            "/v2/models/..%2f..",
        ),
        *("/v2/models/guard%0d%0aX: y/infer", "/" + "a" * 5000, "/\\..\\..", "//etc/passwd", "/guard/"),
    ],
)
def test_paths_lead_nowhere(service, capfd, path):
    with socket.create_connection(address(service), timeout=5) as one:
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        status = one.recv(12)
    assert status in (b"HTTP/1.1 404", b"HTTP/1.1 400", b"HTTP/1.1 307")


@pytest.mark.parametrize("text", [b"\0\0\0\0\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\r\n\r\n"])
def test_what_is_no_http(service, text):
    with socket.create_connection(address(service), timeout=5) as one:
        one.sendall(text)
        assert one.recv(12) in (b"HTTP/1.1 400", b"")
