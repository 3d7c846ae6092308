"""A running service: what it answers, and what it refuses."""

import http.client
import time

import httpx
import pytest

import dubito
from dubito.errors import ArtefactError, GuardError, ValueRangeError
from dubito.serve import ServiceLimits, serve
from dubito.serve.decoding import DecoderError

from .conftest import encoded, files, log_lines, network, pictures, pixels


def test_one_image_as_the_body_has_the_guards_own_verdict(client, guard):
    answer = client.post("/guard", content=encoded(pixels(1, seed=7)[0]), headers={"Content-Type": "image/png"})
    assert answer.status_code == 200
    (verdict,) = answer.json()["verdicts"]
    own = guard(pixels(1, seed=7)).to_dict()["verdicts"][0]
    for key in ("predicted", "predicted_class", "accept", "reason", "prediction_set"):
        assert verdict[key] == own[key]
    for key in ("probability", "aleatoric", "epistemic", "density_rank", "uncertainty", "rank"):
        assert verdict[key] == pytest.approx(own[key], abs=1e-6)
    assert "label" not in verdict


def test_the_guarantee_and_the_fingerprint_come_with_the_verdicts(client, guard, tmp_path):
    answer = client.post("/guard", content=pictures(1)[0]).json()
    assert answer["guarantee"] == {
        "kind": "risk",
        "level": 0.1,
        "confidence": 0.95,
        "n": 450,  # nine tenths of 500
        "sentence": "Of images like the 450 that it was calibrated on, at most 10 % of those accepted are wrong "
        "(confidence 95 %).",
    }
    again = dubito.Guard.load(guard.save(tmp_path / "guard"), network())
    assert answer["fingerprint"] == guard.fingerprint == again.fingerprint
    assert guard.with_risk(0.2).fingerprint != guard.fingerprint


def test_many_images_in_order_and_broken_ones_with_their_reason(client, guard):
    contents = pictures(5)
    contents[2] = b"this is text"
    answer = client.post("/guard", files=files(contents))
    assert answer.status_code == 200
    verdicts = answer.json()["verdicts"]
    assert [one["name"] for one in verdicts] == [f"{number}.png" for number in range(5)]
    assert len({one["id"] for one in verdicts}) == 5
    assert "must be an image file" in verdicts[2]["error"]
    expected = guard(pixels(5, seed=7)).predicted[:, 0].tolist()
    assert [one["predicted"] for one in verdicts if "error" not in one] == [*expected[:2], *expected[3:]]


@pytest.mark.parametrize("content", [b"text", encoded(pixels(1)[0], "JPEG")[:400], b"\x89PNG\r\n\x1a\n"])
def test_an_only_image_that_cannot_be_decoded_is_422(client, content):
    answer = client.post("/guard", content=content)
    assert answer.status_code == 422
    assert answer.json()["error"] == answer.json()["verdicts"][0]["error"]


def test_answers_do_not_wait_for_acknowledgements(service):
    connection = http.client.HTTPConnection(service.address.removeprefix("http://"))
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        connection.request("POST", "/guard")  # without a body: nothing is computed
        connection.getresponse().read()
        seconds.append(time.perf_counter() - start)
    connection.close()
    assert sorted(seconds)[10] < 0.03  # the kernel would wait for 0.04


def test_bodies_that_hold_no_image(client):
    assert client.post("/guard").status_code == 422
    assert "must be a file" in client.post("/guard", data={"a": "b"}, files={"x": (None, b"1")}).json()["error"]
    broken = client.post("/guard", content=b"--x", headers={"Content-Type": "multipart/form-data; boundary=y"})
    assert broken.status_code in (400, 422)
    assert client.post("/guard", content=b"x", headers={"Content-Type": "multipart/form-data"}).status_code == 400
    assert client.post("/guard", content=b"x", headers={"Content-Encoding": "gzip"}).status_code == 415
    assert client.get("/guard").status_code == 405


def test_errors_are_json(client):
    assert client.get("/nowhere").json()["error"].startswith("nothing is answered at this path; /docs lists what is")
    assert client.get("/guard").json() == {"error": "this path takes POST alone; /docs describes it."}
    assert client.post("/search", content=b"x").status_code == 404  # without an index
    assert client.get("/watch").status_code == client.post("/labels", json={}).status_code == 404  # without a watch


def test_a_failure_of_the_decoders_is_the_services_own(guard, monkeypatch, capfd):
    def fail(_):
        raise DecoderError("no more processes")

    with serve(guard, port=0, limits=ServiceLimits(workers=1)) as service:
        url = f"{service.address}/guard"
        with monkeypatch.context() as patched:
            patched.setattr("dubito.serve.decoding._Worker.start", fail)
            answer = httpx.post(url, content=pictures(1)[0])
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert "cannot decode images at the moment" in answer.json()["error"]
        assert httpx.post(url, content=pictures(1)[0]).status_code == 200
    errors = [one.get("error") for one in log_lines(capfd.readouterr().err)]
    assert errors[-2:] == ["DecoderError: no more processes", None]  # a line of the test before may come late


def test_what_cannot_be_served(guard, tmp_path):
    with pytest.raises(GuardError, match="images need the model"):
        serve(dubito.Guard.load(guard.save(tmp_path / "guard")), port=0)
    with serve(guard, port=0, limits=ServiceLimits(workers=1)) as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(ArtefactError, match=f"cannot listen on 127.0.0.1, port {port}"):
            serve(guard, port=port)
    with pytest.raises(httpx.ConnectError):
        httpx.get(first.address)
    for name in ("a/b", "", "{x}", "a b"):
        with pytest.raises(ValueRangeError, match="name must be letters"):
            serve(guard, port=0, name=name)
    with pytest.raises(ValueRangeError, match="key must not be empty"):
        serve(guard, port=0, key=" ")
    with pytest.raises(ValueRangeError, match="workers"):
        ServiceLimits(workers=0)
