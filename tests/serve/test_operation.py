"""What people who run a service rely on: metrics, log lines, keys, the watch, searches and the document."""

import json
import re
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import dubito
from dubito.errors import ArtefactError, TableError
from dubito.serve import ServiceLimits, serve
from dubito.serve.engine import Engine
from dubito.serve.server import make_app

from .conftest import SlowModel, files, log_lines, network, pictures, pixels

SMALL = ServiceLimits(workers=1)


def samples(address: str) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(httpx.get(f"{address}/metrics").text)
    return {
        (one.name, tuple(one.labels[key] for key in sorted(one.labels))): one.value
        for family in families
        for one in family.samples
    }


def test_metrics_count_what_was_answered(guard, capfd):
    with serve(guard, port=0, limits=SMALL) as service:
        url = f"{service.address}/guard"
        answer = httpx.post(url, files=files([*pictures(20), b"text"]))
        httpx.get(f"{service.address}/no\u2028where")
        seen = samples(service.address)
    verdicts = [one for one in answer.json()["verdicts"] if "error" not in one]
    accepted = sum(one["accept"] for one in verdicts)
    assert seen["dubito_images_total", ("", "accepted")] == accepted
    refused = {reason: n for (name, (reason, kind)), n in _labelled(seen) if kind == "abstained"}
    assert sum(refused.values()) == 20 - accepted > 0
    assert set(refused) <= {
        *("unlike the reference images", "new to the model", "ambiguous between two classes", "no class stands out"),
        *("ambiguous image", "more uncertain than the threshold"),
    }
    assert seen["dubito_images_total", ("", "broken")] == 1
    assert seen["dubito_uncertainty_rank_count", ()] == 20
    assert seen["dubito_uncertainty_rank_sum", ()] == pytest.approx(sum(one["rank"] for one in verdicts))
    assert seen["dubito_batch_images_sum", ()] == 20
    assert seen["dubito_queue_images", ()] == 0
    assert seen["dubito_request_seconds_count", ("/guard", "200")] == 1
    assert seen["dubito_request_seconds_count", ("other", "404")] == 1
    first, second, *_ = log_lines(capfd.readouterr().err)
    kept = {key: first[key] for key in ("method", "path", "status", "images", "broken", "accepted", "client")}
    assert kept == {
        "method": "POST", "path": "/guard", "status": 200, "images": 21, "broken": 1, "accepted": accepted,
        "client": "127.0.0.1",
    }  # fmt: skip
    assert verdicts[0]["id"] == f"{first['request']}-0"
    assert second["path"] == "/no\u2028where"


def _labelled(seen):
    return [(key, value) for key, value in seen.items() if key[0] == "dubito_images_total"]


def test_without_the_key_nothing_but_health_and_the_documentation(guard):
    with (
        serve(guard, port=0, limits=SMALL, key="s\u00e9same") as service,
        httpx.Client(base_url=service.address) as ask,
    ):
        right = {"X-API-Key": "s\u00e9same".encode()}
        for path in (
            "/v2",
            "/metrics",
            "/docs2",
            "/docs/x",
            "/nowhere",
            "/v2/models/guard",
            "/v2/healthy",
            "/v2/health/x",
        ):
            assert ask.get(path).status_code == 401
            assert ask.get(path, headers={"X-API-Key": "wrong"}).status_code == 401
        assert ask.post("/guard", content=pictures(1)[0]).status_code == 401
        assert ask.get("/v2/health/ready").status_code == ask.get("/v2/health/live").status_code == 200
        assert ask.post("/guard", content=pictures(1)[0], headers=right).status_code == 200
        document = ask.get("/openapi.json").json()
        assert document == ask.get("/openapi.json", headers=right).json()
        assert document["paths"]["/guard"]["post"]["security"] == [{"key": []}]
        for path in ("/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs"):
            assert "security" not in document["paths"][path]["get"]
        page = ask.get("/docs")  # a browser that opens it sends no header of ours
        assert page.status_code == 200
        assert "need the key of the service in the header <code>X-API-Key</code>" in page.text
        assert "401" in page.text


def health(ask) -> list[int]:
    return [ask.get(path).status_code for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/guard/ready")]


def test_a_service_is_not_ready_while_a_batch_takes_longer_than_the_deadline(guard, monkeypatch):
    slow = SlowModel(guard, monkeypatch)
    limits = ServiceLimits(workers=1, deadline_s=0.5)
    with serve(guard, port=0, limits=limits) as service, httpx.Client(base_url=service.address) as ask:
        assert health(ask) == [200, 200, 200]
        assert ask.post("/guard", content=pictures(1)[0]).status_code == 504
        time.sleep(0.1)  # decoding came first
        assert health(ask) == [200, 503, 503]
        assert "takes longer than 0.5 s" in ask.get("/v2/health/ready").json()["error"]
        slow.release.set()
        assert ask.post("/guard", content=pictures(1)[0]).status_code == 200
        assert health(ask) == [200, 200, 200]


def test_a_service_that_stops_is_not_ready_and_one_without_its_loop_is_dead(guard):
    engine = Engine(guard, workers=1, seconds=1.0, capacity=1, max_batch=1, max_wait=0.0)
    with TestClient(make_app(engine, name="guard", max_bytes=1000, deadline=1.0)) as ask:
        assert health(ask) == [200, 200, 200]
        engine.stopping = True
        assert health(ask) == [200, 503, 503]
        engine.stopping = False
        engine._loop.get_loop().call_soon_threadsafe(engine._loop.cancel)
        ask.get("/v2")
        assert health(ask) == [503, 503, 503]


def test_the_watch_takes_note_of_every_image(guard, tmp_path):
    place = tmp_path / "watch"
    guard.watch(place, alpha=0.05)
    with serve(guard, port=0, limits=SMALL, watch=place) as service:
        httpx.post(f"{service.address}/guard", files=files([*pictures(5), b"text"]))
        answer = httpx.post(f"{service.address}/guard", content=pictures(1)[0]).json()
        end = time.monotonic() + 10
        while httpx.get(f"{service.address}/watch").json()["images"] < 6 and time.monotonic() < end:
            time.sleep(0.05)
        report = httpx.get(f"{service.address}/watch").json()
        assert (report["images"], report["alarms"], report["alpha"]) == (6, [], 0.05)
        assert report["title"] == "6 images, no alarm"
        assert samples(service.address)["dubito_watch_images", ()] == 6
    watch = guard.watch(place)
    watch.label({answer["verdicts"][0]["id"]: "ant"})
    assert watch.report().volunteered == 1  # the id in the answer is the one that labels come for
    with pytest.raises(ArtefactError, match="of another guard"):
        serve(guard.with_risk(0.2), port=0, limits=SMALL, watch=place)


def test_labels_reach_the_watch(guard, tmp_path):
    place = tmp_path / "watch"
    with serve(guard, port=0, limits=SMALL, watch=place) as service, httpx.Client(base_url=service.address) as ask:
        first, second, third = ask.post("/guard", files=files(pictures(3))).json()["verdicts"]
        answer = ask.post("/labels", json={first["id"]: "ant", second["id"]: 2, "nobody": 0})
        assert (answer.status_code, answer.json()["volunteered"], answer.json()["unknown"]) == (200, 2, 1)
        assert ask.get("/watch").json() == answer.json()
        for wrong in ("dog", 3, -1, 0.5, [1], {"a": 1}, "x" * 100_000):
            refused = ask.post("/labels", json={third["id"]: wrong})
            assert refused.status_code == 422
            assert "a label must be a class of the model" in refused.json()["error"]
            assert len(refused.content) < 1000
        assert ask.post("/labels", json={third["id"]: "9" * 5000}).status_code == 422
        for body in (b"", b"{", b'{"x": ' + b"9" * 5000 + b"}", b"[]", b"1", b'"x"', b"\xff", b"[" * 100_000):
            assert ask.post("/labels", content=body).status_code == 422
        assert ask.post("/labels", json={}).status_code == 200
        assert ask.post("/labels", content=bytes(20_000_001)).status_code == 413
        assert ask.get("/watch").json() == answer.json()  # what was refused has changed nothing
    assert guard.watch(place).report().volunteered == 2


def test_labels_are_requested_from_a_running_service(guard, tmp_path):
    place = tmp_path / "watch"
    with serve(guard, port=0, limits=SMALL, watch=place) as service, httpx.Client(base_url=service.address) as ask:
        assert ask.post("/labels/requests").json() == {"ids": []}
        verdicts = ask.post("/guard", files=files(pictures(60)), timeout=30).json()["verdicts"]
        accepted = {one["id"]: one["predicted"] for one in verdicts if one["accept"]}
        drawn = ask.post("/labels/requests?count=5").json()["ids"]
        assert len(drawn) == 5
        assert set(drawn) < accepted.keys()
        assert ask.get("/watch").json()["requested"] == 5
        assert ask.post("/labels/requests", params={"count": 3}).json()["ids"] == drawn[:3]  # their labels are awaited
        report = ask.post("/labels", json={name: accepted[name] for name in drawn[1:]} | {drawn[0]: None}).json()
        counts = {name: report[name] for name in ("outcomes", "observed", "requested", "missing")}
        assert counts == {"outcomes": 4, "observed": 0.0, "requested": 0, "missing": 1}  # one image is lost
        for wrong in ("0", "-1", "1001", "1e1", "x", "", "9" * 5000):
            refused = ask.post("/labels/requests", params={"count": wrong})
            assert refused.status_code == 422
            assert "count must be a whole number from 1 to 1000; got" in refused.json()["error"]
        assert ask.get("/labels/requests").status_code == 405
        assert ask.get("/watch").json() == report
    assert guard.watch(place).report().outcomes == 4  # `dubito watch` sees the same
    with serve(guard, port=0, limits=SMALL) as service:
        assert httpx.post(f"{service.address}/labels/requests").status_code == 404


def test_an_alarm_by_labels_is_a_metric_at_once(guard, tmp_path):
    with serve(guard, port=0, limits=SMALL, watch=tmp_path / "watch") as service:
        answer = httpx.post(f"{service.address}/guard", files=files(pictures(128)), timeout=30).json()
        predicted = {one["id"]: one["predicted"] for one in answer["verdicts"]}
        drawn = httpx.post(f"{service.address}/labels/requests?count=40").json()["ids"]
        wrong = {name: (predicted[name] + 1) % 3 for name in drawn}
        assert samples(service.address)["dubito_watch_alarms", ("guarantee",)] == 0
        report = httpx.post(f"{service.address}/labels", json=wrong).json()
        assert [alarm["kind"] for alarm in report["alarms"]][-1] == "guarantee"
        assert samples(service.address)["dubito_watch_alarms", ("guarantee",)] == 1


def test_an_alarm_of_the_watch_is_a_metric(guard, tmp_path):
    with serve(guard, port=0, limits=SMALL, watch=tmp_path / "watch") as service:
        same = pictures(1)[0]
        for _ in range(4):
            httpx.post(f"{service.address}/guard", files=files([same] * 64), timeout=30)
        end = time.monotonic() + 20
        while samples(service.address)["dubito_watch_images", ()] < 256 and time.monotonic() < end:
            time.sleep(0.1)
        assert samples(service.address)["dubito_watch_alarms", ("images",)] == 1
        assert samples(service.address)["dubito_watch_alarms", ("guarantee",)] == 0
        guard.watch(tmp_path / "watch").update(guard(pixels(4, seed=9)))  # another process, say
        assert samples(service.address)["dubito_watch_images", ()] == 260


def test_a_watch_that_cannot_write_does_not_stop_the_service(guard, tmp_path, monkeypatch, capfd):
    def full(*_, **__):
        raise OSError(28, "no space left")

    with serve(guard, port=0, limits=SMALL, watch=tmp_path / "watch") as service:
        monkeypatch.setattr(dubito.guard.Watch, "update", full)
        assert httpx.post(f"{service.address}/guard", content=pictures(1)[0]).status_code == 200
        assert httpx.post(f"{service.address}/guard", content=pictures(1)[0]).status_code == 200
    assert sum(one.get("event") == "watch failed" for one in log_lines(capfd.readouterr().err)) == 2


def test_searches(guard, tmp_path):
    model = network()
    items = dubito.extract(model, pixels(30, seed=7), to=tmp_path / "items", progress=False)
    index = dubito.SafeIndex.build(items, quantile=1.0)
    with serve(guard, port=0, limits=SMALL, index=index) as service, httpx.Client(base_url=service.address) as ask:
        answer = ask.post("/search?k=3", files=files([*pictures(2), b"text"])).json()
        first, second, broken = answer["queries"]
        assert (first["ids"][0], second["ids"][0], len(first["ids"])) == ("000000", "000001", 3)
        assert first["similarities"][0] == pytest.approx(1, abs=1e-3)
        assert "error" in broken
        for k in ("0", "101", "x", "-1", "1e3", "\u0663", "9" * 30, "../../etc/passwd", "\x00"):
            assert ask.post("/search", params={"k": k}, content=b"x").status_code == 422
        assert "/search" in ask.get("/openapi.json").json()["paths"]
    other = dubito.extract(network(seed=1), pixels(30), to=tmp_path / "other", progress=False)
    with pytest.raises(TableError, match="model"):
        serve(guard, port=0, limits=SMALL, index=dubito.SafeIndex.build(other))


def test_the_document_lists_what_is_answered(client):
    document = client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert not {"/search", "/watch"} & document["paths"].keys()
    for path, methods in document["paths"].items():
        for method in ("get", "post", "put", "delete"):
            status = client.request(method, path).status_code
            assert (status == 405) == (method not in methods), (method, path)
            assert status == 405 or str(status) in methods[method]["responses"]
    verdict = document["paths"]["/guard"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    entry = verdict["properties"]["verdicts"]["items"]["oneOf"][0]["properties"]
    answer = client.post("/guard", content=pictures(1)[0]).json()
    assert set(entry) == set(answer["verdicts"][0])
    assert set(verdict["properties"]) == set(answer)
    text = json.dumps(document)
    assert [one for one in re.findall(r'"\$ref": "([^"]*)"', text) if one != "#/components/schemas/Error"] == []


def test_the_page_needs_no_network(client):
    page = client.get("/docs")
    assert "POST /guard" in page.text
    assert not re.search(r"(src|href)=|<script|@import|url\(", page.text)
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "X-API-Key" not in page.text  # this service has no key
