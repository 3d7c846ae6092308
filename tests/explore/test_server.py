"""The server: what it answers, what it refuses, and that nobody without the token gets anything."""

import base64
import csv
import io

import numpy as np
import pytest
from starlette.testclient import TestClient

import dubito
from dubito.active import add_labels
from dubito.explore.server import make_app

from .conftest import EVIL

TOKEN = "secret"  # noqa: S105


@pytest.fixture
def client(inspector):
    return TestClient(make_app(inspector, TOKEN, hosts=("testserver",)), raise_server_exceptions=False)


def get(client, path, **options):
    return client.get(f"/{TOKEN}/api/{path}", **options)


def bits(rows, n=40) -> bytes:
    mask = np.zeros(n, dtype=bool)
    mask[rows] = True
    return np.packbits(mask, bitorder="little").tobytes()


def test_columns_are_bytes_of_the_tables_values(client, table):
    about = get(client, "about").json()
    assert about["rows"] == 40
    assert {one["name"]: one["kind"] for one in about["columns"]}["correct"] == "flag"
    entropy = np.frombuffer(get(client, "column/entropy").content, "<f4")
    np.testing.assert_allclose(entropy, dubito.Entropy().score(table), rtol=1e-6)
    assert np.frombuffer(get(client, "column/label").content, "<i4").tolist() == table.label.tolist()
    assert len(get(client, "layout/pca").content) == 8 * 40
    assert get(client, "layout/umap").status_code == 202


@pytest.fixture
def watch(table, tmp_path):
    guard = dubito.Guard.fit(None, table, coverage=0.5, confidence=0.6, scores=["entropy"], sets=False)
    return guard.watch(tmp_path / "watch")


def test_the_watch_is_read_again_each_time_and_its_images_are_rows(inspector, table, watch, tmp_path):
    app = make_app(inspector, TOKEN, hosts=("testserver",), watch=watch)
    client = TestClient(app, raise_server_exceptions=False)
    assert get(client, "about").json()["watch"] is True
    empty = get(client, "watch").json()
    assert (empty["title"], empty["alarm"], empty["examples"]) == ("0 images, no alarm", False, [])
    guard = watch.guard
    rows = dubito.Entropy().score(table).argsort()[-5:].tolist()  # the most uncertain images alone: a change
    other = dubito.guard.Watch.open(guard, tmp_path / "watch")  # as another process would
    for _ in range(20):
        other.update(guard.decide(table.rows(rows)))
    other.update(guard.decide(table.rows(rows[:1]).extended(id=["gone-\udcff.png"])))
    shown, report = get(client, "watch").json(), other.report()
    assert (shown["title"], shown["alarm"]) == (report.title(), True)
    assert [one["svg"][:4] for one in shown["figures"]] == ["<svg", "<svg"]  # refused images are known without labels
    assert shown["sentences"][-1] == report.advice
    names = table.row_ids()
    assert {one["id"]: one["row"] for one in shown["examples"] if one["row"] is not None} == {
        name: names.index(name) for test in report.examples.values() for name in test if name in names
    }
    assert any(one["row"] is not None for one in shown["examples"])


def test_without_a_watch_there_is_none(client):
    assert get(client, "about").json()["watch"] is False
    refused = get(client, "watch")
    assert (refused.status_code, refused.json()["error"]) == (
        404,
        "explore: there is no watch. Open the explorer with one.",
    )


@pytest.mark.parametrize(
    "path", ["/", "/api/about", "/wrong/", "/wrong/api/about", "/wrong/static/app.js", "/secre/", "/secrets/api/about"]
)
def test_without_the_token_there_is_nothing(client, path):
    refused = client.get(path)
    assert refused.status_code == 403
    assert "token is wrong or missing" in refused.json()["error"]
    page = client.get(path, headers={"accept": "text/html"})
    assert "token is wrong or missing" in page.text


def test_requests_for_another_host_are_refused(client):
    assert client.get(f"/{TOKEN}/api/about", headers={"host": "evil.example"}).status_code == 400


def test_the_page_can_talk_to_this_server_alone(client):
    page = client.get(f"/{TOKEN}/")
    policy = page.headers["content-security-policy"]
    assert page.status_code == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("app.js", "points.js", "style.css"):
        assert client.get(f"/{TOKEN}/static/{name}").status_code == 200
    for name in ("..%2Fserver.py", "server.py", "%2Fetc%2Fpasswd", "nothing.js"):
        assert client.get(f"/{TOKEN}/static/{name}").status_code in (403, 404)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("column/entropi", 404, "Did you mean entropy?"),
        ("image/40", 404, "rows 0 to 39; got 40"),
        ("image/x", 404, "Not Found"),
        ("layout/som", 404, "som"),
        ("threshold/label", 404, "needs a score"),
        ("risk?score=entropy&risk=a", 422, "expected a number; got 'a'"),
        ("risk?score=entropy&risk=2", 400, "risk"),
        ("risk?score=entropy&risk=0.001", 422, "Pass more labelled images"),
    ],
)
def test_bad_requests_get_clear_words(client, path, status, words):
    answer = get(client, path)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_bad_bodies_get_clear_words(client):
    def post(path, **options):
        return client.post(f"/{TOKEN}/api/{path}", **options)

    assert post("rows", content=b"{").status_code == 422
    assert post("rows", json=[1]).status_code == 422
    assert post("rows", json={"rows": list(range(501))}).status_code == 422
    assert "a mask of 40 rows has 5 bytes; got 3" in post("export", content=b"abc").json()["error"]
    assert post("notes", json={"mask": "%"}).status_code == 422
    assert post("new", content=b"x" * (33 << 20)).status_code == 413
    assert client.put(f"/{TOKEN}/api/notes/3", json={"marked": "yes"}).status_code == 400


def test_names_are_found_as_bits(client, table):
    mask = np.unpackbits(np.frombuffer(get(client, "find?text=onerror").content, np.uint8), bitorder="little")
    assert np.flatnonzero(mask).tolist() == [table.row_ids().index(EVIL)]


def test_notes_are_kept_and_many_are_marked_at_once(client):
    marked = client.post(f"/{TOKEN}/api/notes", json={"mask": base64.b64encode(bits([2, 4])).decode(), "marked": True})
    assert marked.json() == {"marked": 2}
    client.put(f"/{TOKEN}/api/notes/4", json={"note": EVIL})
    notes = get(client, "notes").json()["notes"]
    assert set(notes) == {"2", "4"}
    assert notes["4"] == {"marked": True, "label": "", "note": EVIL}
    assert client.post(f"/{TOKEN}/api/rows", json={"rows": [4]}).json()[0]["note"]["note"] == EVIL


def exported(client, rows, kind) -> list[dict[str, str]]:
    answer = client.post(f"/{TOKEN}/api/export?format={kind}", content=bits(rows))
    assert answer.headers["content-disposition"] == f'attachment; filename="{kind}.csv"'
    return list(csv.DictReader(io.StringIO(answer.content.decode())))


def test_an_export_holds_what_was_selected(client, table):
    rows = exported(client, [1, 3, 38], "csv")
    ids = table.row_ids()
    assert [row["id"] for row in rows] == [ids[1], ids[3], ids[38]]
    assert float(rows[1]["entropy"]) == pytest.approx(float(dubito.Entropy().score(table)[3]), rel=1e-6)


def test_lists_are_read_by_the_commands_that_they_are_for(client, table, tmp_path):
    client.put(f"/{TOKEN}/api/notes/3", json={"label": "dog"})
    for kind in ("acquire", "label-issues"):
        path = tmp_path / f"{kind}.csv"
        path.write_bytes(client.post(f"/{TOKEN}/api/export?format={kind}", content=bits([3])).content)
        assert add_labels(table, path).label[3] == 2
    assert exported(client, [5], "acquire")[0]["label"] == ""


def test_pictures_are_small_jpegs_and_missing_ones_are_said(client, folder, table):
    thumbnail = get(client, "thumbnail/0")
    assert thumbnail.headers["content-type"] == "image/jpeg"
    assert thumbnail.content[:2] == b"\xff\xd8"
    lost = folder / table.row_ids()[39]
    content = lost.read_bytes()
    lost.unlink()
    try:
        missing = get(client, "thumbnail/39")
    finally:
        lost.write_bytes(content)
    assert missing.status_code == 404
    assert table.row_ids()[39] in missing.json()["error"]
