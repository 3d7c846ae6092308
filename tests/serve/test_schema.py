"""The OpenAPI document against the running service: requests generated from it, right and wrong ones."""

import base64
import json

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

import dubito
from dubito.serve import ServiceLimits, serve

from .conftest import files, network, pictures, pixels

CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance),
    *(response_schema_conformance, unsupported_method),
]
KEY = "sesame"
PICTURE = pictures(1)[0]
TEXT = base64.b64encode(PICTURE).decode()
load_all_checks()
schemathesis.openapi.media_type("image/*", st.sampled_from(pictures(3)) | st.binary(max_size=100))
schemathesis.openapi.format(
    "byte", st.just(TEXT) | st.binary(max_size=9).map(lambda one: base64.b64encode(one).decode())
)


@pytest.fixture(scope="module", params=["plain", "watch, index and key"])
def running(request, guard, tmp_path_factory):
    """The address of a service, and the headers that it requires."""
    limits = ServiceLimits(workers=1, max_mb=1.0)
    if request.param == "plain":
        with serve(guard, port=0, limits=limits) as service:
            yield service.address, {}
        return
    place = tmp_path_factory.mktemp("schema")
    items = dubito.extract(network(), pixels(30), to=place / "items", progress=False)
    index = dubito.SafeIndex.build(items, quantile=1.0)
    with serve(guard, port=0, limits=limits, watch=place / "watch", index=index, key=KEY) as service:
        yield service.address, {"X-API-Key": KEY}


@pytest.fixture(scope="module")
def schema(running):
    address, headers = running
    return schemathesis.openapi.from_url(f"{address}/openapi.json", headers=dict(headers))


def operations(schema):
    return [one.ok() for one in schema.get_all_operations()]


def answered(case, running, seen):
    """Send a case; its answer must be as the document says."""
    address, headers = running
    response = case.call(base_url=address, headers=dict(headers), timeout=30)
    seen.add((case.method, case.path, response.status_code))
    case.validate_response(response, checks=CHECKS)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_random_requests(running, schema, mode):
    seen = set()
    for operation in operations(schema):
        if mode == GenerationMode.NEGATIVE and not operation.body:
            continue  # there is nothing that could be wrong

        @seed(0)
        @settings(
            max_examples=15 if operation.body else 2,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            answered(case, running, seen)

        ask()
    paths = {(method, path) for method, path, _ in seen}
    both = mode == GenerationMode.POSITIVE
    assert paths == {(one.method.upper(), one.path) for one in operations(schema) if one.body or both}
    assert (("POST", "/guard", 200) in seen) == both
    assert (("POST", "/labels/requests", 200) in seen) == (both and bool(running[1]))


def test_limits_of_every_parameter_and_other_methods(running, schema):
    """Values at and beyond the limits, what is missing, a wrong key, and methods that are not in the document."""
    seen = set()
    for operation in operations(schema):
        for case in schema.iter_coverage_cases(
            operation, generation_modes=list(GenerationMode), generation_config=schema.config.generation
        ):
            answered(case, running, seen)
    assert {status for _, _, status in seen} >= {200, 405, 422}
    keyed = {(method, path) for method, path, status in seen if status == 401}
    documented = {
        (one.method.upper(), one.path) for one in operations(schema) if "401" in one.definition.raw["responses"]
    }
    assert keyed >= documented
    assert bool(documented) == bool(running[1])


def test_every_operation_documents_what_happens_without_the_key(running, schema):
    address, headers = running
    for operation in operations(schema):
        response = httpx.request(operation.method, f"{address}{operation.path}", timeout=30)
        operation.validate_response(response)
        open_to_all = not headers or operation.path.startswith(("/v2/health/", "/docs", "/openapi.json"))
        assert (response.status_code == 401) != open_to_all


def test_answers_of_honest_clients(running, schema):
    address, headers = running
    infer = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [TEXT]}]}
    binary = infer | {"id": "mine", "parameters": {"binary_data_output": True}}
    mixed = infer | {"outputs": [{"name": "predicted"}, {"name": "reason", "parameters": {"binary_data": True}}]}
    body = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1]}]}
    body["inputs"][0]["parameters"] = {"binary_data_size": len(PICTURE) + 4}
    head = json.dumps(body).encode()
    packed = head + len(PICTURE).to_bytes(4, "little") + PICTURE
    sent = [
        ("/guard", {"content": PICTURE}),
        ("/guard", {"files": files([PICTURE, b"text"])}),
        *(("/v2/models/guard/infer", {"json": one}) for one in (infer, binary, mixed)),
        ("/v2/models/guard/infer", {"content": packed, "headers": {"Inference-Header-Content-Length": str(len(head))}}),
    ]
    if headers:
        verdict = httpx.post(f"{address}/guard", content=PICTURE, headers=headers, timeout=30).json()["verdicts"][0]
        sent += [("/labels", {"json": {verdict["id"]: label}}) for label in ("ant", 0)]
        sent += [("/labels/requests", {}), ("/labels/requests?count=1000", {})]
        sent += [("/search", {"content": PICTURE}), ("/search?k=100", {"files": files([PICTURE, b"text"])})]
    for path, options in sent:
        own = headers | options.pop("headers", {})
        response = httpx.post(address + path, headers=own, timeout=30, **options)
        assert response.status_code == 200, (path, response.text)
        response.request.read()
        schema[path.split("?")[0]]["POST"].validate_response(response)
