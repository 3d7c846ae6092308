"""The Open Inference Protocol, as a real client speaks it, and requests that are not as it says."""

import base64
import json

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from dubito.errors import ImagesError
from dubito.serve.inference_protocol import InferRequest

from .conftest import CLASSES, pictures, pixels

OUTPUTS = ["predicted", "predicted_class", "probability", "uncertainty", "accept", "reason"]


@pytest.fixture
def real(service):
    client = triton.InferenceServerClient(service.address.removeprefix("http://"))
    yield client
    client.close()


def tensor(contents):
    one = triton.InferInput("image", [len(contents)], "BYTES")
    return one.set_data_from_numpy(np.array(contents, dtype=np.object_), binary_data=True)


def test_health_and_metadata(real):
    assert real.is_server_live()
    assert real.is_server_ready()
    assert real.is_model_ready("guard")
    assert not real.is_model_ready("other")
    assert real.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    model = real.get_model_metadata("guard")
    assert model["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert [one["name"] for one in model["outputs"]] == OUTPUTS
    assert model["parameters"]["classes"] == CLASSES


@pytest.mark.parametrize("binary", [None, True, False])
def test_outputs_are_the_guards_verdicts(real, guard, binary):
    wanted = None if binary is None else [triton.InferRequestedOutput(name, binary_data=binary) for name in OUTPUTS]
    answer = real.infer("guard", [tensor(pictures(3))], outputs=wanted, request_id="mine")
    own = guard(pixels(3, seed=7))
    assert answer.get_response()["id"] == "mine"
    assert answer.as_numpy("predicted").tolist() == own.predicted[:, 0].tolist()
    texts = [one.decode() if isinstance(one, bytes) else one for one in answer.as_numpy("predicted_class").tolist()]
    assert texts == [CLASSES[one] for one in own.predicted[:, 0].tolist()]
    assert answer.as_numpy("accept").tolist() == own.accept.tolist()
    np.testing.assert_allclose(answer.as_numpy("probability"), own.probability[:, 0], atol=1e-6)
    np.testing.assert_allclose(answer.as_numpy("uncertainty"), own.uncertainty, atol=1e-5)
    reasons = [one.decode() if isinstance(one, bytes) else one for one in answer.as_numpy("reason").tolist()]
    assert reasons == [one.reason for one in own]


def test_images_in_base64_and_chosen_outputs(client, guard):
    data = [base64.b64encode(one).decode() for one in pictures(2)]
    sent = {"name": "image", "datatype": "BYTES", "shape": [2, 1], "data": [[one] for one in data]}
    answer = client.post("/v2/models/guard/infer", json={"inputs": [sent], "outputs": [{"name": "accept"}]})
    assert answer.json() == {
        "model_name": "guard",
        "outputs": [{"name": "accept", "datatype": "BOOL", "shape": [2], "data": guard(pixels(2, 7)).accept.tolist()}],
    }


def test_a_broken_image_fails_its_request_and_is_named(real):
    with pytest.raises(InferenceServerException, match="image '1' must be an image file"):
        real.infer("guard", [tensor([pictures(1)[0], b"text"])])


GOOD = '{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["AAAA"]}]}'


@pytest.mark.parametrize(
    ("body", "length", "words"),
    [
        ("{", None, "must be JSON"),
        ("[" * 100_000, None, "nested too deeply"),
        ("[]", None, "one input"),
        ('{"inputs": []}', None, "one input"),
        ('{"inputs": {"a": 1}}', None, "one input"),
        (GOOD.replace("BYTES", "FP32"), None, "Got datatype 'FP32'"),
        (GOOD.replace("[1]", "[true]"), None, "shape"),
        (GOOD.replace("[1]", "[1, 2]"), None, "shape"),
        (GOOD.replace("[1]", "[2]"), None, "as many images"),
        (GOOD.replace("AAAA", "?"), None, "base64"),
        (GOOD.replace('"AAAA"', "7"), None, "base64"),
        (GOOD[:-1] + ', "outputs": [{"name": "x"}]}', None, "among predicted, predicted_class"),
        (GOOD[:-1] + ', "outputs": [{"name": ["x"]}]}', None, "among predicted, predicted_class"),
        (GOOD, "-1", "at most the length"),
        (GOOD, "99999", "at most the length"),
        (GOOD, "x", "at most the length"),
        (GOOD.replace('"data": ["AAAA"]', '"parameters": {"binary_data_size": 9}'), None, "binary_data_size"),
    ],
)
def test_requests_that_cannot_be_read(body, length, words):
    with pytest.raises(ImagesError, match=words):
        InferRequest.parse(body.encode(), length)


def test_binary_images_that_are_cut_off():
    head = b'{"inputs": [{"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": %d}}]}'
    for tail, images in ((b"\x02\0\0\0ab", [b"ab"]), (b"\x03\0\0\0ab", None), (b"\x02\0", None)):
        body = head % len(tail)
        if images is not None:
            assert InferRequest.parse(body + tail, str(len(body))).images == images
        else:
            with pytest.raises(ImagesError, match="cut off"):
                InferRequest.parse(body + tail, str(len(body)))


def test_a_name_with_half_a_character_is_sent_back_as_text(client):
    sent = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(pictures(1)[0]).decode()]}
    body = json.dumps({"id": "\ud800", "inputs": [sent]})
    answer = client.post("/v2/models/guard/infer", content=body)
    assert (answer.status_code, answer.json()["id"]) == (200, "?")
