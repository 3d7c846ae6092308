"""What is sent to harm: refused or survived, with one log line, and the next request is answered in time."""

import io
import json
import resource
import select
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

import dubito
from dubito.serve import ServiceLimits, serve
from dubito.serve.service import _running

from .conftest import encoded, files, log_line, log_lines, network, pictures, pixels

KEY = "sesame"
MEGABYTE = 1_000_000


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


def lines_of(capfd, count: int) -> list[dict]:
    """The log lines of so many requests, of which each leaves one, and nothing else that was written."""
    text, end = "", time.monotonic() + 10
    while text.count("\n") < count and time.monotonic() < end:
        text += capfd.readouterr().err
        time.sleep(0.05)
    text += capfd.readouterr().err
    assert text.isascii()
    lines = log_lines(text)
    assert len(lines) == len(text.splitlines()) == count
    return lines


def sent(service, request: bytes) -> bytes:
    """What is answered until the service closes the connection."""
    answer = b""
    with socket.create_connection(address(service), timeout=20) as one:
        one.sendall(request)
        while piece := one.recv(65536):
            answer += piece
    return answer


@pytest.fixture(scope="module")
def keyed(guard, tmp_path_factory):
    """A service with an index, a watch and a key."""
    place = tmp_path_factory.mktemp("keyed")
    items = dubito.extract(network(), pixels(30), to=place / "items", progress=False)
    added = {"index": dubito.SafeIndex.build(items, quantile=1.0), "watch": place / "watch"}
    with serve(guard, port=0, limits=ServiceLimits(workers=1), key=KEY, **added) as running:
        yield running


@pytest.fixture(autouse=True)
def lives(service, capfd):
    """After every attack, an honest client gets its answer."""
    yield
    start = time.perf_counter()
    capfd.readouterr()
    assert httpx.post(f"{service.address}/guard", content=pictures(1)[0]).status_code == 200
    assert time.perf_counter() - start < 3
    log_line(capfd)  # or the next test would find it


@pytest.mark.parametrize("what", BROKEN)
def test_images_that_are_none(client, capfd, what):
    start = time.perf_counter()
    answer = client.post("/guard", files={"image": ("photo.jpg", BROKEN[what]())})
    assert answer.status_code == 422
    assert "photo.jpg" in answer.json()["error"]
    assert time.perf_counter() - start < 4
    line = log_line(capfd)
    assert (line["status"], line["broken"]) == (422, 1)


def test_a_bomb_among_others_costs_the_others_nothing(client, capfd):
    answer = client.post("/guard", files=files([pictures(1)[0], bomb(50_000, 50_000), pictures(1)[0]]))
    assert answer.status_code == 200
    assert ["error" in one for one in answer.json()["verdicts"]] == [False, True, False]
    assert log_line(capfd)["broken"] == 1


@pytest.mark.parametrize("length", ["1073741824", "9" * 20])
def test_a_huge_body_is_refused_before_it_is_sent(service, capfd, length):
    with socket.create_connection(address(service), timeout=5) as attacker:
        attacker.sendall(f"POST /guard HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
        assert attacker.recv(100).startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
    assert log_line(capfd)["status"] in (413, 400)


def flood(service, head: bytes, piece: bytes, pieces: int) -> tuple[bytes, int]:
    """What is answered while pieces are sent, whatever is answered, and how many had been sent by then."""
    answer, before = b"", pieces
    with socket.create_connection(address(service), timeout=20) as attacker:
        attacker.sendall(head)
        for number in range(pieces):
            if not answer and select.select([attacker], [], [], 0)[0]:
                answer, before = attacker.recv(100), number
            try:
                attacker.sendall(piece)
            except OSError:  # the service has had enough
                break
        return answer or attacker.recv(100), before


@pytest.mark.parametrize("chunked", [False, True])
def test_a_gigabyte_is_refused_early_and_never_in_memory(service, capfd, chunked):
    data, pieces = bytes(MEGABYTE), 1000
    piece = b"%x\r\n%b\r\n" % (MEGABYTE, data) if chunked else data
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {pieces * MEGABYTE}"
    process, ended, peak = psutil.Process(), threading.Event(), [0]

    def measure() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], process.memory_info().rss)

    before = process.memory_info().rss
    with ThreadPoolExecutor(1) as beside:
        measuring = beside.submit(measure)
        answer, early = flood(service, f"POST /guard HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode(), piece, pieces)
        ended.set()
        measuring.result()
    assert answer.startswith(b"HTTP/1.1 413")
    assert early < pieces / 10
    assert peak[0] - before < 8 * 2 * MEGABYTE  # a request may have 2 MB
    assert log_line(capfd)["status"] == 413


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
    assert sorted(line["status"] for line in lines_of(capfd, 21)) == [200] + 20 * [408]


def test_clients_that_disconnect_at_any_moment(service, capfd):
    content = pictures(1)[0]
    request = f"POST /guard HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    ends = range(0, len(request), 40)
    for end in ends:
        with socket.create_connection(address(service), timeout=5) as one:
            one.sendall(request[:end])
    heads = sum(end > request.index(b"\r\n\r\n") + 3 for end in ends)
    assert {line["status"] for line in lines_of(capfd, heads)} == {499}
    deadline = time.monotonic() + 5
    while "dubito_queue_images 0.0" not in httpx.get(f"{service.address}/metrics").text:
        assert time.monotonic() < deadline


def test_many_clients_at_once(client, capfd):
    def ask(content: bytes) -> int:
        return client.post("/guard", content=content).status_code

    with ThreadPoolExecutor(40) as clients:
        statuses = list(clients.map(ask, pictures(200)))
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 16  # the queue's room
    assert sorted(line["status"] for line in lines_of(capfd, 200)) == sorted(statuses)


CROWD = """
import collections, json, resource, socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
request = b"POST /guard HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 4\\r\\n\\r\\ntext"
crowd = []
for number in range(count):
    crowd.append(socket.create_connection((host, port), timeout=60))
    crowd[-1].sendall({0: request, 1: request[:9]}.get(number % 10, b""))  # the others send nothing
print("connected", flush=True)
answers = collections.Counter()
for one in crowd:
    answer = b""
    try:
        while piece := one.recv(4096):
            answer += piece
    except ConnectionError:
        pass
    answers[answer[9:12].decode()] += 1
    one.close()
print(json.dumps(answers))
"""


def test_ten_thousand_connections(service, capfd):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, hard - 1000) // 10 * 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    command = [sys.executable, "-c", CROWD, *map(str, (*address(service), count))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as crowd:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "connected\n"
        start, asked = time.perf_counter(), 1
        while httpx.post(f"{service.address}/guard", content=pictures(1)[0], timeout=30).status_code == 429:
            asked += 1
            time.sleep(0.2)
        assert time.perf_counter() - start < 10
        answers = json.loads(crowd.stdout.read())  # when the service has closed the last one
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answers.pop("") == count * 9 // 10
    assert set(answers) <= {"422", "429", "504"}
    assert sum(answers.values()) == count // 10
    lines_of(capfd, count // 10 + asked)


@pytest.fixture
def brief(guard, monkeypatch):
    """A service whose connections may be idle for one second."""
    monkeypatch.setattr("dubito.serve.service._KEEP_ALIVE", 1)
    with serve(guard, port=0, limits=ServiceLimits(workers=1)) as running:
        yield running


def test_a_connection_ends_unless_requests_begin(brief):
    head = b"GET /v2 HTTP/1.1\r\nHost: x\r\n"
    with socket.create_connection(address(brief), timeout=20) as silent, \
            socket.create_connection(address(brief), timeout=20) as slow:  # fmt: skip
        start = time.perf_counter()
        slow.sendall(head + b"\r\n")  # a request, and then a head that never ends
        while select.select([slow], [], [], 0.1)[0] and slow.recv(4096):
            pass
        for number in range(80):
            try:
                slow.sendall(b"%c" % head[number % 3])
            except OSError:
                break
            time.sleep(0.1)
        assert 1 < time.perf_counter() - start < 5  # within twice the second of keep-alive, and some slack
        assert silent.recv(1) == b""


def test_a_request_that_takes_longer_than_keep_alive_is_answered(brief, monkeypatch):
    predict = dubito.Guard.predict
    monkeypatch.setattr(dubito.Guard, "predict", lambda *args: (time.sleep(2.5), predict(*args))[1])
    with httpx.Client(base_url=brief.address, timeout=30) as client:
        assert client.post("/guard", content=pictures(1)[0]).status_code == 200
        assert client.get("/v2").status_code == 200  # by the same connection


def test_a_slow_reader_receives_all_of_its_answer(monkeypatch):
    monkeypatch.setattr("dubito.serve.service._KEEP_ALIVE", 0.2)
    size = 30 * MEGABYTE  # more than the system takes off the service's hands
    app = Starlette(routes=[Route("/", lambda _: Response(bytes(size)))])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _, stop = _running(app, listening, 1.0, lambda: None)
        with socket.create_connection(listening.getsockname(), timeout=20) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(0.1)
            slow.sendall(b"G")  # another head begins, and does not end
            time.sleep(1.0)
            received = 0
            while piece := slow.recv(MEGABYTE):
                received += len(piece)
        stop()
    assert received > size  # and its head


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
    assert log_line(capfd)["status"] == int(status[9:])


@pytest.mark.parametrize("key", [b"wrong", b"", b"sesame2", b"sesam", b"\xff\xfe", b"x" * 8000, b"../../key", b"a\0b"])
def test_wrong_keys(keyed, capfd, key):
    head = b"POST /guard HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\nX-API-Key: "
    status = int(sent(keyed, head + key + b"\r\n\r\n")[9:12])
    assert status == (400 if b"\0" in key else 401)
    (line,) = lines_of(capfd, 1)
    assert line["status"] == status
    assert not key or key.decode("latin-1") not in json.dumps(line)


HOSTILE = [
    *(b"../../etc/passwd", b"..%2f..%2fetc%2fpasswd", b"%00", b"\0", b"\x1b[31m", b"%1b%5b31m", b"%0d%0aX-Own:%20y"),
    *(b"\r\nX-Own: y", b"\xe2\x80\xae", b"\xff", b'"', b"{}", b"x" * 3000, b"9" * 5000, b"-1", b"1e9"),
    *(b"000000001" + b"0" * 5000, b"NaN"),
]
PLACES = {
    "the query": (b"/search?k=%b", b"", b"x"),
    "the number of labels": (b"/labels/requests?count=%b", b"", b""),
    "the name of the model": (b"/v2/models/%b/infer", b"", b"{}"),
    "the type of the body": (b"/guard", b"Content-Type: %b", b"x"),
    "the boundary": (b"/guard", b"Content-Type: multipart/form-data; boundary=%b", b"--x\r\n\r\n--x--"),
    "the encoding of the body": (b"/guard", b"Content-Encoding: %b", b"x"),
    "the length of the JSON": (b"/v2/models/guard/infer", b"Inference-Header-Content-Length: %b", b"{}"),
    "the host": (b"/guard", b"X-Forwarded-Host: %b", b"x"),
    "the name of a part": (
        b"/guard",
        b"Content-Type: multipart/form-data; boundary=x",
        b'--x\r\nContent-Disposition: form-data; name="%b"; filename="a"\r\n\r\ntext\r\n--x--\r\n',
    ),
    "the name of a file": (
        b"/guard",
        b"Content-Type: multipart/form-data; boundary=x",
        b'--x\r\nContent-Disposition: form-data; name="a"; filename="%b"\r\n\r\ntext\r\n--x--\r\n',
    ),
    "the id": (
        b"/v2/models/guard/infer",
        b"",
        b'{"id": "%b", "inputs": [{"datatype": "BYTES", "shape": [1], "data": ["eA=="]}]}',
    ),
    "the name of an output": (
        b"/v2/models/guard/infer",
        b"",
        b'{"inputs": [{"datatype": "BYTES", "shape": [1], "data": ["eA=="]}], "outputs": [{"name": "%b"}]}',
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_hostile_values_in_every_parameter(keyed, capfd, place):
    for value in HOSTILE:
        path, header, body = (part.replace(b"%b", value) for part in PLACES[place])
        head = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Connection: close", b"X-API-Key: sesame"]
        head += [b"Content-Length: %d" % len(body), *([header] if header else [])]
        answer = sent(keyed, b"\r\n".join(head) + b"\r\n\r\n" + body)
        assert 400 <= int(answer[9:12]) < 500, (value, answer)
        assert b"x-own" not in answer.partition(b"\r\n\r\n")[0].lower()
        (line,) = lines_of(capfd, 1)
        assert line["status"] == int(answer[9:12])
        assert len(line.get("path", "")) <= 200


def test_the_id_comes_back_as_text(keyed, capfd):
    picture = encoded(pixels(1)[0])
    head = {"inputs": [{"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(picture) + 4}}]}
    for name in ("../../etc/passwd", "\x1b[31m\0", "\ud800", "\r\nX-Own: y", "\u202e"):
        text = json.dumps(head | {"id": name}).encode()
        body = text + len(picture).to_bytes(4, "little") + picture
        headers = {"X-API-Key": KEY, "Inference-Header-Content-Length": str(len(text))}
        answer = httpx.post(f"{keyed.address}/v2/models/guard/infer", content=body, headers=headers, timeout=30)
        assert answer.status_code == 200
        assert answer.json()["id"] == name.encode(errors="replace").decode()
        assert "x-own" not in answer.headers
        assert lines_of(capfd, 1)[0]["status"] == 200


def test_a_body_that_is_no_http_ends_with_its_connection(service, capfd):
    head = b"POST /guard HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert sent(service, head + b"not a length\r\n") == b""
    assert lines_of(capfd, 1)[0]["status"] == 499


@pytest.mark.parametrize("text", [b"\0\0\0\0\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\r\n\r\n"])
def test_what_is_no_http(service, capfd, text):
    with socket.create_connection(address(service), timeout=5) as one:
        one.sendall(text)
        assert one.recv(12) in (b"HTTP/1.1 400", b"")
    assert lines_of(capfd, 1)[0]["event"] == "no HTTP"
