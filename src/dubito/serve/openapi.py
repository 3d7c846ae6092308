"""The OpenAPI document of a service, and a page of it that needs no network."""

import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib.metadata import version
from typing import Any, NamedTuple

from dubito.serve.inference_protocol import LENGTH_HEADER, OUTPUTS
from dubito.types import Json


class Limits(NamedTuple):
    """The largest value of a whole number in a query, and the one that is taken without it."""

    most: int
    default: int


NEIGHBOURS = Limits(100, 5)
LABEL_REQUESTS = Limits(1000, 50)
_NUMBER, _TEXT, _SHARE = {"type": "number"}, {"type": "string"}, {"type": ["number", "null"]}
_VERDICT = {
    "predicted": {"type": "integer"},
    "predicted_class": {"type": ["string", "null"]},
    "probability": _NUMBER,
    "aleatoric": _SHARE,
    "epistemic": _SHARE,
    "density_rank": _SHARE,
    "uncertainty": _NUMBER,
    "rank": _NUMBER,
    "accept": {"type": "boolean"},
    "reason": _TEXT,
    "prediction_set": {"type": ["array", "null"], "items": {"type": "integer"}},
}
_NEIGHBOURS = {
    "refused": {"type": "boolean"},
    "ids": {"type": "array", "items": _TEXT},
    "similarities": {"type": "array", "items": _NUMBER},
    "labels": {"type": "array", "items": {"type": "integer"}},
    "uncertainty": _NUMBER,
    "reason": {"type": ["string", "null"]},
}
_GUARANTEE = {
    "kind": {"type": "string", "enum": ["risk", "coverage", "false_alarms", "cost"]},
    "level": _NUMBER,
    "confidence": _NUMBER,
    "n": {"type": "integer"},
    "sentence": _TEXT,
}
_GUARANTEED_BESIDES = {
    "per": _TEXT,
    "largest": _NUMBER,
    "two_costs": {"type": "boolean"},
    "missed": {"type": "array", "items": {"type": "object"}},
}
"""Where it holds for every class, is about costs, or has missed classes."""
_FILE = {"type": "string", "format": "binary"}
_FILES = {"type": "object", "additionalProperties": {"oneOf": [_FILE, {"type": "array", "items": _FILE}]}}
_IMAGES = {
    "required": True,
    "content": {"image/*": {"schema": _FILE}, "multipart/form-data": {"schema": _FILES}},
}
_REFUSALS = {
    "400": "The multipart body cannot be read.",
    "408": "The body was not sent in time.",
    "413": "The body is too large, or has more images than the queue.",
    "415": "The body is compressed.",
    "422": "No image could be decoded, or the request is not as described here.",
    "429": "The queue is full: send it again after Retry-After seconds.",
    "500": "The service has failed.",
    "503": "The service cannot decode images at the moment: send them again after Retry-After seconds.",
    "504": "There was no answer in time.",
}

_WITHOUT_KEY = ("/openapi.json", "/docs", "/v2/health/live", "/v2/health/ready")
"""Paths for everybody: orchestrators ask for health, and a browser that opens a page sends no header of ours."""
_UNREADY = "It is stopping, no longer runs batches, or a batch takes longer than the deadline of a request."


def openapi(name: str, paths: Iterable[str], *, keyed: bool) -> Json:
    """The document of a service with some paths.

    Args:
        name: The model's name.
        paths: Those that it answers.
        keyed: Whether clients need a key.
    """
    answered = set(paths)
    described = {path: one for path, one in _paths(f"/v2/models/{name}").items() if path in answered}
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": f"dubito: guard '{name}'", "version": version("dubito")},
        "paths": described,
        "components": {"schemas": {"Error": _object({"error": _TEXT})}},
    }
    if keyed:
        for path, methods in described.items():
            for one in methods.values():
                if needs_key(path):
                    one["responses"]["401"] = _error("The key is missing or wrong.")
                    one["security"] = [{"key": []}]
        document["components"]["securitySchemes"] = {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
    return document


def needs_key(path: str) -> bool:
    """Whether a path is answered to clients with the key alone, if there is one."""
    return path not in _WITHOUT_KEY


def docs_page(document: Json) -> str:
    """The document for people."""
    parts = []
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            rows = "".join(
                f"<tr><td>{status}<td>{escape(answer['description'])}" for status, answer in one["responses"].items()
            )
            parts.append(
                f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(one['summary'])}</p>"
                f"<table>{rows}</table><details><summary>as JSON</summary>"
                f"<pre>{escape(json.dumps(one, indent=2))}</pre></details>"
            )
    title = escape(document["info"]["title"])
    style = "body{font:1rem/1.5 system-ui;max-width:50rem;margin:2rem auto;padding:0 1rem}td{padding-right:1rem}"
    lead = "Every answer is JSON unless it says otherwise; errors have the key <code>error</code>."
    if "securitySchemes" in document["components"]:
        lead += (
            " Requests need the key of the service in the header <code>X-API-Key</code>; those for health and for this "
        )
        lead += "document do not."
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{style}</style>"
        f"<h1>{title}</h1><p>{lead}</p>{''.join(parts)}</html>"
    )


def _paths(model: str) -> dict[str, Json]:
    broken = _object({"id": _TEXT, "name": _TEXT, "error": _TEXT})
    verdicts = {"type": "array", "items": {"oneOf": [_named(_VERDICT), broken]}}
    queries = {"type": "array", "items": {"oneOf": [_named(_NEIGHBOURS, ("refused", "ids", "similarities")), broken]}}
    guarantee = _object(_GUARANTEE | _GUARANTEED_BESIDES, tuple(_GUARANTEE))
    guarded = _object({"verdicts": verdicts, "guarantee": guarantee, "fingerprint": _TEXT})
    k = _whole("k", "How many items, if the index has as many.", NEIGHBOURS)
    return {
        "/guard": {
            "post": _posted("Verdicts of one image (the body) or several (multipart), each with its reason.", guarded)
        },
        "/search": {
            "post": {
                **_posted("Similar items of an index; uncertain images are refused.", _object({"queries": queries})),
                "parameters": [k],
            }
        },
        "/watch": {"get": _got("Are images still like those of the calibration, and is the guarantee kept?")},
        "/labels": {"post": _labels()},
        "/labels/requests": {"post": _label_requests()},
        "/v2": {"get": _got("Metadata of the server (Open Inference Protocol).")},
        "/v2/health/live": {"get": _health("Whether the service runs batches; needs no key.", "It must be restarted.")},
        "/v2/health/ready": {"get": _health("Whether it answers requests; needs no key.", _UNREADY)},
        model: {"get": _got("Metadata of the model: its inputs, outputs and classes.")},
        f"{model}/ready": {"get": _health("Whether the model answers requests.", _UNREADY)},
        f"{model}/infer": {"post": _infer()},
        "/metrics": {"get": _got("Counters, in the text format of Prometheus.", "text/plain", _TEXT)},
        "/openapi.json": {"get": _got("This document; needs no key.")},
        "/docs": {"get": _got("This document, for people; needs no key.", "text/html", _TEXT)},
    }


def _labels() -> Json:
    labels = {"type": "object", "additionalProperties": {"type": ["integer", "string", "null"]}}
    summary = "True classes, by number or name, of images by the ids of their verdicts; null for those that have none."
    posted = _without_images(_posted(summary, {"type": "object"}), "The report of the watch.")
    return {**posted, "requestBody": {"required": True, "content": _json(labels)}}


def _label_requests() -> Json:
    summary = "Images to label by a schedule, so that the watch can test the guarantee: send their classes to /labels."
    ids = _object({"ids": {"type": "array", "items": _TEXT}})
    posted = _without_images(
        _posted(summary, ids), "Ids of verdicts: first those whose labels are awaited, then others, drawn at random."
    )
    del posted["requestBody"]
    return {**posted, "parameters": [_whole("count", "How many images at most.", LABEL_REQUESTS)]}


def _without_images(posted: Json, answer: str) -> Json:
    """As of a request that sends no images."""
    posted["responses"]["200"]["description"] = answer
    for status in ("400", "503"):
        del posted["responses"][status]
    return posted


def _whole(name: str, description: str, limits: Limits) -> Json:
    schema = {"type": "integer", "minimum": 1, "maximum": limits.most, "default": limits.default}
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _infer() -> Json:
    name, flag = {"type": "string", "enum": list(OUTPUTS)}, {"type": "boolean"}
    shape = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "maxItems": 2}
    data = {"type": "array", "items": {"type": "string", "format": "byte"}}
    sent = {"name": _TEXT, "datatype": {"type": "string", "const": "BYTES"}, "shape": shape, "data": data}
    wanted = _object({"name": name, "parameters": _object({"binary_data": flag}, ())}, ("name",))
    request = {
        "id": _TEXT,
        "parameters": _object({"binary_data_output": flag}, ()),
        "inputs": {
            "type": "array",
            "items": _object(sent, ("name", "datatype", "shape")),
            "minItems": 1,
            "maxItems": 1,
        },
        "outputs": {"type": "array", "items": wanted},
    }
    output = {
        "name": name,
        "datatype": {"type": "string", "enum": sorted({kind for kind, _ in OUTPUTS.values()})},
        "shape": shape,
        "data": {"type": "array"},
        "parameters": _object({"binary_data_size": {"type": "integer"}}),
    }
    outputs = {"type": "array", "items": _object(output, ("name", "datatype", "shape"))}
    answer = _object({"model_name": _TEXT, "id": _TEXT, "outputs": outputs}, ("model_name", "outputs"))
    posted = _posted(
        "Verdicts by the Open Inference Protocol: files of images as BYTES, in base64 or in binary.", answer
    )
    binary = {"application/octet-stream": {"schema": _FILE}}
    length = {"description": "Bytes of JSON, which binary data follow.", "schema": {"type": "integer", "minimum": 0}}
    posted["responses"]["200"]["content"] |= binary
    posted["responses"]["200"]["headers"] = {LENGTH_HEADER: length}
    body = {"required": True, "content": _json(_object(request, ("inputs",))) | binary}
    return {**posted, "requestBody": body, "parameters": [{"name": LENGTH_HEADER, "in": "header", **length}]}


def _posted(summary: str, answer: Json) -> Json:
    refusals = {status: _error(words) for status, words in _REFUSALS.items()}
    answered = {"description": "An answer for every image.", "content": _json(answer)}
    return {"summary": summary, "requestBody": _IMAGES, "responses": {"200": answered, **refusals}}


def _got(summary: str, kind: str = "application/json", schema: Mapping[str, Any] = {"type": "object"}) -> Json:
    return {
        "summary": summary,
        "responses": {"200": {"description": "As above.", "content": {kind: {"schema": schema}}}},
    }


def _health(summary: str, problem: str) -> Json:
    answered = _got(summary)
    answered["responses"]["503"] = _error(problem)
    return answered


def _named(properties: Mapping[str, Any], required: tuple[str, ...] | None = None) -> Json:
    needed = None if required is None else ("id", "name", *required)
    return _object({"id": _TEXT, "name": _TEXT, **properties}, needed)


def _object(properties: Mapping[str, Any], required: tuple[str, ...] | None = None) -> Json:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties if required is None else required),
    }


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _error(words: str) -> Json:
    return {"description": words, "content": _json({"$ref": "#/components/schemas/Error"})}
