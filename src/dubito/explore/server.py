"""What the explorer's page asks for: its modules, columns, layouts, pictures, details, thresholds, notes and files.

    /TOKEN/                page and modules            whoever does not know the token gets 403
    /TOKEN/api/...         answers in JSON or, of whole columns, bytes: little-endian; sets of rows are bits

Other sites cannot use it: their pages do not know the token, requests for another host name are refused, and the page's
Content-Security-Policy lets it talk to this server alone.
"""

import base64
import csv
import io
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Bool

from dubito.data.thumbnails import jpeg
from dubito.errors import (
    BrokenImageError,
    DubitoError,
    GuardError,
    MissingPackageError,
    UnknownNameError,
)
from dubito.explore.inspector import Inspector
from dubito.explore.thresholds import CONFIDENCE, risk_target, threshold_curve
from dubito.guard import Guard, Watch
from dubito.guard.watch_picture import watch_figures, watch_key
from dubito.storage import encode, parse_json
from dubito.types import Json

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Mount, Route
except ImportError as error:
    raise MissingPackageError("explore needs its server: pip install 'dubito[explore]'") from error

LOCAL = ("127.0.0.1", "localhost", "[::1]")
_UPLOAD = 32 << 20
_CARDS = 500
_THUMBNAIL, _PICTURE = 192, 1024
_KEPT = 4096
"""Thumbnails in memory, about 8 KB each."""
_LARGEST = float(np.finfo(np.float32).max)
"""The page gets scores as float32."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self' http://localhost:* "
    "http://127.0.0.1:*",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_STATIC = files("dubito.explore").joinpath("static")
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_REFUSED = (
    "This address is not the explorer's: its token is wrong or missing. Open the whole address that `dubito explore` "
    "printed."
)


def make_app(
    inspector: Inspector, token: str, *, hosts: tuple[str, ...] = LOCAL, watch: Watch | None = None
) -> Starlette:
    """The application, for a server or a test."""
    api = _Api(inspector, watch)
    routes = [
        Route("/about", _json(api.about)),
        Route("/column/{name}", _bytes(api.column)),
        Route("/layout/{name}", api.layout),
        Route("/layout/{name}", _json(api.start_layout), methods=["POST"]),
        Route("/find", _bytes(api.find)),
        Route("/rows", _json(api.rows), methods=["POST"]),
        Route("/thumbnail/{row:int}", partial(api.picture, side=_THUMBNAIL)),
        Route("/picture/{row:int}", partial(api.picture, side=_PICTURE)),
        Route("/image/{row:int}", _json(api.image)),
        Route("/tiles/{row:int}", _json(api.tiles)),
        Route("/corruption/{row:int}", _json(api.corruption)),
        Route("/new", _json(api.new), methods=["POST"]),
        Route("/threshold/{name}", _json(api.threshold)),
        Route("/risk", _json(api.risk)),
        Route("/watch", _json(api.watched)),
        Route("/notes", _json(api.all_notes)),
        Route("/notes", _json(api.mark), methods=["POST"]),
        Route("/notes/{row:int}", _json(api.note), methods=["PUT"]),
        Route("/export", api.export, methods=["POST"]),
    ]
    below = [Route("/", _page), Route("/static/{name}", _static), Mount("/api", routes=routes)]
    return Starlette(
        routes=[Mount(f"/{token}", routes=below)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        exception_handlers={DubitoError: _on_error, HTTPException: _on_http_error},
    )


def _shown_line(guard: Guard) -> float:
    """Up to which float32 the page accepts: below the line, to which the next image's value may be rounded.

    Not so where thresholds differ, because the line is then 0, and small differences from it are not rounded to 0.
    """
    if guard.groups:
        return guard.line
    return float(np.nextafter(np.float32(min(guard.line, _LARGEST)), np.float32(-np.inf)))


@final
class _Api:
    """What the page asks for; every method returns plain values, arrays or a response."""

    def __init__(self, inspector: Inspector, watch: Watch | None = None) -> None:
        self.inspector, self.collection, self.watch = inspector, inspector.collection, watch
        self.layouts, self.notes = inspector.layouts, inspector.notes
        self._jpeg = lru_cache(_KEPT)(self._encoded)

    def about(self, _: Request, __: bytes) -> Json:
        """Everything that is known before any column is computed."""
        collection, table, guard = self.collection, self.collection.table, self.collection.guard
        described = None
        if guard is not None:
            described = {
                "guarantee": guard.guarantee.sentence(guard.threshold.of),
                "findings": collection.guard_findings,
                "threshold": _shown_line(guard),
                "score": "guard",
            }
        sets = zip(collection.sets.items(), (False, *[True] * len(collection.sets)), strict=False)
        return {
            "name": table.name,
            "model": table.provenance.model if table.provenance else None,
            "rows": len(collection),
            "sets": [{"name": name, "rows": len(one), "ood": ood} for (name, one), ood in sets],
            "classes": _names(table.classes),
            "label_names": _names(table.label_names),
            "columns": collection.describe(),
            "score": collection.first_score,
            "labels": int("correct" in collection.columns and len(table)),
            "guard": described,
            "watch": self.watch is not None,
            "pictures": {"there": collection.pictures.images is not None, "words": collection.pictures.words()},
            "model_loaded": self.inspector.has_model,
            "layouts": self.layouts.describe(),
            "notices": collection.notices,
            "limits": {"upload_bytes": _UPLOAD},
        }

    def column(self, request: Request, _: bytes) -> np.ndarray:
        """All values of one column."""
        return self.collection.values(request.path_params["name"])

    async def layout(self, request: Request) -> Response:
        """Coordinates, or how far a layout is."""
        name = request.path_params["name"]
        points = await run_in_threadpool(self.layouts.points, name)
        if points is None:
            state = next(one for one in self.layouts.describe() if one["name"] == name)
            return JSONResponse(state, 202, headers=_HEADERS)
        return Response(points.tobytes(), media_type="application/octet-stream", headers=_HEADERS)

    def start_layout(self, request: Request, _: bytes) -> Json:
        """Begin to compute a layout."""
        self.layouts.start(request.path_params["name"])
        return {}

    def find(self, request: Request, _: bytes) -> np.ndarray:
        """Which images have a text in their names."""
        return np.packbits(self.collection.containing(request.query_params.get("text", "")), bitorder="little")

    def rows(self, _: Request, body: bytes) -> list[Json]:
        """Cards of some images."""
        rows = _parsed(body).get("rows", [])
        if not isinstance(rows, list) or len(rows) > _CARDS or not all(isinstance(row, int) for row in rows):
            raise HTTPException(422, f"rows must be a list of at most {_CARDS} row numbers.")
        return self.inspector.rows(rows)

    async def picture(self, request: Request, *, side: int) -> Response:
        """An image as JPEG."""
        data = await run_in_threadpool(self._jpeg, request.path_params["row"], side)
        return Response(data, media_type="image/jpeg", headers=_HEADERS)

    def _encoded(self, row: int, side: int) -> bytes:
        return jpeg(self.inspector.picture(row), side=side)

    def image(self, request: Request, _: bytes) -> Json:
        """One image in detail."""
        return self.inspector.image(request.path_params["row"])

    def tiles(self, request: Request, _: bytes) -> Json:
        """Uncertainty by tile."""
        return self.inspector.tiles(request.path_params["row"])

    def corruption(self, request: Request, _: bytes) -> Json:
        """Uncertainty under corruption."""
        return self.inspector.corruption(request.path_params["row"])

    def new(self, request: Request, body: bytes) -> Json:
        """An image that somebody dropped onto the page."""
        return self.inspector.new(body, request.query_params.get("name", "new image")[:200])

    def threshold(self, request: Request, _: bytes) -> Json:
        """What every threshold on a score costs."""
        at = request.query_params.get("at")
        return threshold_curve(
            *self._outcomes(request.path_params["name"]), at=float("nan") if at is None else _number(at)
        )

    def risk(self, request: Request, _: bytes) -> Json:
        """A threshold that keeps a risk."""
        query = request.query_params
        confidence = _number(query.get("confidence", str(CONFIDENCE)))
        return risk_target(
            *self._outcomes(query.get("score", "")), risk=_number(query.get("risk", "")), confidence=confidence
        )

    def _outcomes(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A score of the table's images, which are wrong, and of which that is known."""
        if (column := self.collection.columns.get(name)) is not None and column.kind != "score":
            raise UnknownNameError(f"explore: a threshold needs a score; '{name}' is a {column.kind}.")
        u = self.collection.values(name)[: self.collection.rows]
        correct = np.full(len(u), -1)
        if "correct" in self.collection.columns:
            correct = self.collection.values("correct")[: self.collection.rows]
        return u, correct == 0, correct >= 0

    def watched(self, _: Request, __: bytes) -> Json:
        """What the watch has seen by now, drawn and in words, and the images that show a change."""
        if self.watch is None:
            raise UnknownNameError("explore: there is no watch. Open the explorer with one.")
        report = self.watch.report()
        examples = dict.fromkeys(name for names in report.examples.values() for name in names).keys()
        row_of = {name: row for row, name in reversed(self.collection.named(examples).items())}  # the table's own first
        return {
            "title": report.title(),
            "alarm": report.alarm,
            "figures": [
                {"svg": _text(svg), "title": title, "small": small} for svg, title, small in watch_figures(report)
            ],
            "key": [{"name": name, "kind": kind, "dashes": dashes} for name, kind, dashes in watch_key(report)],
            "sentences": _names([*report.alarms_in_words(), *report.findings()]),
            "facts": report.facts(),
            "examples": [{"id": _text(name), "row": row_of.get(name)} for name in examples],
        }

    def all_notes(self, _: Request, __: bytes) -> Json:
        """What people noted, by row."""
        noted = dict(self.notes.items())
        return {"notes": {row: noted[name] for row, name in self.collection.named(noted.keys()).items()}}

    def note(self, request: Request, body: bytes) -> Json:
        """Change the note of one image."""
        name = self.collection.ids([request.path_params["row"]])[0]
        self.notes.change([name], _parsed(body))
        return {"note": self.notes.of(name)}

    def mark(self, _: Request, body: bytes) -> Json:
        """Mark many images, or remove their marks."""
        sent = _parsed(body)
        try:
            mask = self._mask(base64.b64decode(str(sent.get("mask", "")), validate=True))
        except ValueError as error:
            raise HTTPException(422, f"mask must be base64 ({error}).") from error
        self.notes.change(self.collection.ids(np.flatnonzero(mask).tolist()), {"marked": bool(sent.get("marked"))})
        return {"marked": int(mask.sum())}

    async def export(self, request: Request) -> Response:
        """A CSV of some images: all that is known of them, or lists that other commands read."""
        mask = self._mask(await _body(request))
        kind = request.query_params.get("format", "csv")
        text = await run_in_threadpool(self._csv, np.flatnonzero(mask).tolist(), kind)
        headers = {**_HEADERS, "Content-Disposition": f'attachment; filename="{kind}.csv"'}
        return Response(text, media_type="text/csv; charset=utf-8", headers=headers)

    def _csv(self, rows: list[int], kind: str) -> bytes:
        if kind not in ("csv", "acquire", "label-issues"):
            raise HTTPException(422, f"format must be csv, acquire or label-issues; got '{kind}'.")
        shown = {"label": "label_name", "predicted": "predicted_name", "probability": "probability"}
        scores = [one for one in self.collection.columns.values() if kind == "csv" and one.kind in ("score", "flag")]
        columns = {one.name: self.collection.values(one.name) for one in scores}
        text = io.StringIO(newline="")
        out = csv.writer(text, lineterminator="\n")
        lists = {"acquire": ("id", "label"), "label-issues": ("id", "label", "predicted")}
        header = lists.get(kind, ("id", "set", *shown, *columns, "marked", "new_label", "note"))
        out.writerow(header)
        for row, name in zip(rows, self.collection.ids(rows), strict=True):
            card, note = self.inspector.rows([row])[0], self.notes.of(name) or {}
            written = note.get("label", "")
            record = {key: card[source] for key, source in shown.items()}
            record |= {
                "id": name,
                "set": card["set"],
                "marked": note.get("marked", False),
                "note": note.get("note", ""),
            }
            record |= {key: values[row] for key, values in columns.items()} | {"new_label": written}
            if kind != "csv":  # what people fill in, or correct
                record["label"] = written or (record["label"] if kind == "label-issues" else "")
            out.writerow([record[key] for key in header])
        return encode(text.getvalue())

    def _mask(self, bits: bytes) -> Bool[np.ndarray, "n"]:
        expected = (len(self.collection) + 7) // 8
        if len(bits) != expected:
            raise HTTPException(422, f"a mask of {len(self.collection)} rows has {expected} bytes; got {len(bits)}.")
        unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(self.collection), bitorder="little")
        return unpacked.astype(bool)


def _json(answer: Callable[[Request, bytes], Any]) -> Callable[[Request], Any]:
    """An endpoint that answers with JSON; it runs in a thread, as it may compute."""

    async def endpoint(request: Request) -> Response:
        body = await _body(request)
        return JSONResponse(await run_in_threadpool(answer, request, body), headers=_HEADERS)

    return endpoint


def _bytes(answer: Callable[[Request, bytes], np.ndarray]) -> Callable[[Request], Any]:
    """An endpoint that answers with the bytes of an array."""

    async def endpoint(request: Request) -> Response:
        values = await run_in_threadpool(answer, request, b"")
        little = values.astype(values.dtype.newbyteorder("<"), copy=False)
        return Response(little.tobytes(), media_type="application/octet-stream", headers=_HEADERS)

    return endpoint


async def _body(request: Request) -> bytes:
    """What was sent, up to 32 MiB."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _UPLOAD:
            raise HTTPException(413, f"at most {_UPLOAD >> 20} MiB can be sent.")
    return bytes(body)


def _page(_: Request) -> Response:
    return HTMLResponse(_STATIC.joinpath("index.html").read_text(encoding="utf-8"), headers=_HEADERS)


def _static(request: Request) -> Response:
    """A module or style sheet of the page; the renderer is the one of map pages."""
    name = request.path_params["name"]
    folder = files("dubito.report").joinpath("templates") if name == "points.js" else _STATIC
    path = folder.joinpath(name)
    if Path(name).name != name or not path.is_file() or Path(name).suffix not in _TYPES:
        raise HTTPException(404, f"there is no file '{name}'.")
    return Response(path.read_text(encoding="utf-8"), media_type=_TYPES[Path(name).suffix], headers=_HEADERS)


def _on_error(_: Request, error: Exception) -> Response:
    """Errors of the library, in their own words."""
    kinds = ((UnknownNameError, 404), (BrokenImageError, 404), (GuardError, 422))
    status = next((number for kind, number in kinds if isinstance(error, kind)), 400)
    return JSONResponse({"error": str(error)}, status, headers=_HEADERS)


def _on_http_error(request: Request, error: Exception) -> Response:
    """Requests that cannot be answered; whatever is not below the token is refused."""
    status, words = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, str(error))
    if status == 404 and "endpoint" not in request.scope:
        status, words = 403, _REFUSED
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(f"<!doctype html><title>dubito</title><p>{words}</p>", status, headers=_HEADERS)
    return JSONResponse({"error": words}, status, headers=_HEADERS)


def _parsed(body: bytes) -> Json:
    try:
        value = parse_json(body)
    except ValueError as error:
        raise HTTPException(422, f"the request must be JSON ({error}).") from error
    if not isinstance(value, dict):
        raise HTTPException(422, "the request must be a JSON object.")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise HTTPException(422, f"expected a number; got '{text}'.") from error


def _names(names: Any) -> list[str] | None:
    return None if names is None else [_text(name) for name in names]


def _text(name: Any) -> str:
    """As UTF-8: names of files may hold other bytes."""
    return str(name).encode(errors="replace").decode()
