"""What a service answers over HTTP.

    POST /guard                      verdicts            POST /search      similar items, with an index
    GET  /v2 ...                     the Open Inference Protocol, see `inference_protocol`
    GET  /watch                      its report          POST /labels      true classes, with a watch
    POST /labels/requests            images to label     GET  /metrics     for Prometheus
    GET  /openapi.json   /docs       this list, for programs and for people

Every request is bounded: in bytes (413), in seconds until its body is there (408) and it is answered (504), in images
(429 where the queue is full, or the bodies of all requests together take too much memory). A request leaves one
line of JSON on standard error.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, TypeVar, final

from dubito.errors import BrokenImageError, DubitoError, GuardError, ImagesError, MissingPackageError, first_words
from dubito.guard import WatchReport
from dubito.serve.batching import QueueFullError
from dubito.serve.decoding import DecoderError
from dubito.serve.engine import GUARD, Engine, Search, Upload, verdict_json, write_log
from dubito.serve.inference_protocol import LENGTH_HEADER, InferRequest, describe
from dubito.serve.openapi import LABEL_REQUESTS, NEIGHBOURS, Limits, docs_page, needs_key, openapi
from dubito.storage import parse_json
from dubito.types import Json

try:
    import python_multipart  # noqa: F401 (starlette reads multipart bodies with it)
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.datastructures import Headers, UploadFile
    from starlette.exceptions import HTTPException
    from starlette.formparsers import MultiPartException, MultiPartParser
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise MissingPackageError("serve needs its server: pip install 'dubito[serve]'") from error

KEY_HEADER = "X-API-Key"
_BODIES = 16
"""Bodies of the largest size that are in memory at a time, or as many smaller ones as are as large together."""
_NAME, _PATH, _WORDS = 200, 200, 400
_GONE = 499
"""As nginx calls it, in the log: the client has closed the connection."""
_NOTES = "dubito.notes"
_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
_PAGE = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Referrer-Policy": "no-referrer"}
Answer = TypeVar("Answer")
# Without a handler, what it says about broken bodies would be lines beside those of requests.
logging.getLogger("python_multipart").addHandler(logging.NullHandler())


def make_app(engine: Engine, *, name: str, max_bytes: int, deadline: float, key: str | None = None) -> Starlette:
    """The application.

    Args:
        engine: What it runs.
        name: The model's name in the Open Inference Protocol.
        max_bytes: The largest body of a request.
        deadline: Seconds from the head of a request to its answer.
        key: Whoever does not send this key is refused; None lets everybody in.
    """
    api = _Endpoints(engine, name, max_bytes, deadline)
    model = f"/v2/models/{name}"
    routes = [
        Route("/guard", api.guard, methods=["POST"]),
        Route("/v2", api.server),
        Route("/v2/health/live", api.live),
        Route("/v2/health/ready", api.ready),
        Route(model, api.model),
        Route(f"{model}/ready", api.ready),
        Route(f"{model}/infer", api.infer, methods=["POST"]),
        Route("/metrics", api.metrics),
        Route("/openapi.json", api.openapi),
        Route("/docs", api.docs),
    ]
    if engine.index is not None:
        routes.append(Route("/search", api.search, methods=["POST"]))
    if engine.watch is not None:
        routes += [Route("/watch", api.watch), Route("/labels", api.labels, methods=["POST"])]
        routes.append(Route("/labels/requests", api.label_requests, methods=["POST"]))
    api.document = openapi(name, [route.path for route in routes], keyed=key is not None)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        yield
        await engine.stop()

    paths = frozenset(route.path for route in routes)
    return Starlette(
        routes=routes,
        middleware=[Middleware(_Observed, engine=engine, paths=paths), Middleware(_Keyed, key=key)],
        exception_handlers={HTTPException: _on_error, DubitoError: _on_error},
        lifespan=lifespan,
    )


@final
class _Endpoints:
    """One method per path."""

    def __init__(self, engine: Engine, name: str, max_bytes: int, deadline: float) -> None:
        self.engine, self.name, self.max_bytes, self.deadline = engine, name, max_bytes, deadline
        self.document: Json = {}
        self._held = 0
        guard = engine.guard
        self._about: Json = {
            "guarantee": {
                **guard.guarantee.to_json(),
                "n": guard.threshold.of,
                "sentence": guard.guarantee.sentence(guard.threshold.of),
            },
            "fingerprint": guard.fingerprint,
        }

    async def guard(self, request: Request) -> Response:
        """Verdicts of the images of a request."""
        return await self._answered(request, GUARD, "verdicts", verdict_json, self._about)

    async def search(self, request: Request) -> Response:
        """Items like the images of a request."""
        return await self._answered(request, Search(_whole(request, "k", NEIGHBOURS)), "queries", dict, {})

    async def infer(self, request: Request) -> Response:
        """The same verdicts by the Open Inference Protocol, which has no room for images without one."""
        async with self._body(request) as body:
            sent = InferRequest.parse(body, request.headers.get(LENGTH_HEADER))
            uploads = [Upload(str(number), image) for number, image in enumerate(sent.images)]
            answers = await self._run(request, GUARD, uploads)
        broken = [answer for answer in answers if isinstance(answer, BrokenImageError)]
        if broken:
            raise broken[0]
        content, length = sent.answer(self.name, answers)
        headers = _HEADERS | ({} if length is None else {LENGTH_HEADER: str(length)})
        return Response(
            content, media_type="application/json" if length is None else "application/octet-stream", headers=headers
        )

    async def server(self, _: Request) -> Response:
        """Metadata of the server."""
        about = {"name": "dubito", "version": version("dubito"), "extensions": ["binary_tensor_data"]}
        return JSONResponse(about, headers=_HEADERS)

    async def model(self, _: Request) -> Response:
        """Metadata of the model."""
        return JSONResponse(describe(self.name, self.engine.guard.classes), headers=_HEADERS)

    async def live(self, _: Request) -> Response:
        """Whether the service can still answer anything, or must be restarted."""
        return _empty() if self.engine.live else _error(503, "batches are no longer run. Restart the service.")

    async def ready(self, _: Request) -> Response:
        """Whether it would answer a request now."""
        words = f"the service is stopping, runs no batches, or one takes longer than {self.deadline:g} s. Try later."
        return _empty() if self.engine.ready(self.deadline) else _error(503, words)

    async def metrics(self, _: Request) -> Response:
        """Counters for Prometheus."""
        text = await run_in_threadpool(self.engine.metrics_text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8", headers=_HEADERS)

    async def watch(self, _: Request) -> Response:
        """The report of the watch."""
        assert self.engine.watch is not None  # noqa: S101 (the path exists only with a watch)
        report = await run_in_threadpool(self.engine.watch.report)
        return _report(report)

    async def labels(self, request: Request) -> Response:
        """True classes of images, by the ids of their verdicts, and what the watch then reports."""
        async with self._body(request) as body:
            try:
                labels = parse_json(body)
            except ValueError as error:
                raise HTTPException(422, f"the body must be JSON ({error}).") from error
            if not isinstance(labels, dict):
                raise HTTPException(422, 'the body must be an object of classes by the ids of verdicts: {"ID": "cat"}.')
            try:
                return _report(await self._while_there(request, self.engine.label(labels)))
            except (GuardError, ValueError) as error:  # or a number of more digits than Python reads
                raise HTTPException(422, first_words(error, _WORDS)) from error

    async def label_requests(self, request: Request) -> Response:
        """Ids of images whose labels would show whether the guarantee is kept, drawn at random."""
        count = _whole(request, "count", LABEL_REQUESTS)
        async with self._body(request):
            ids = await self._while_there(request, self.engine.request_labels(count))
        return JSONResponse({"ids": ids}, headers=_HEADERS)

    async def openapi(self, _: Request) -> Response:
        """The OpenAPI document."""
        return JSONResponse(self.document, headers=_HEADERS)

    async def docs(self, _: Request) -> Response:
        """The same for people."""
        return HTMLResponse(docs_page(self.document), headers=_HEADERS | _PAGE)

    async def _answered(
        self, request: Request, kind: Hashable, key: str, shown: Callable[[Any], Json], about: Json
    ) -> Response:
        """One entry per image: its answer, or why it is broken. 422 where no image could be decoded."""
        async with self._body(request) as body:
            uploads = await _uploads(request, body)
            answers = await self._run(request, kind, uploads)
        entries: list[Json] = []
        for number, (upload, answer) in enumerate(zip(uploads, answers, strict=True)):
            broken = isinstance(answer, BrokenImageError)
            name = {"id": f"{_notes(request)['request']}-{number}", "name": upload.name}
            entries.append(name | ({"error": str(answer)} if broken else {**shown(answer), **name}))
        errors = [entry["error"] for entry in entries if "error" in entry]
        status = 422 if len(errors) == len(entries) else 200
        problem = {"error": errors[0]} if status == 422 else {}
        return JSONResponse({**problem, key: entries, **about}, status, headers=_HEADERS)

    async def _run(self, request: Request, kind: Hashable, uploads: list[Upload]) -> list[Any]:
        notes = _notes(request)
        notes["images"] = len(uploads)
        if len(uploads) > self.engine.batcher.capacity:
            raise HTTPException(413, f"at most {self.engine.batcher.capacity} images fit into the queue.")
        answers = await self._while_there(request, self.engine.answers(kind, uploads, notes["request"]))
        notes["broken"] = sum(isinstance(answer, BrokenImageError) for answer in answers)
        if kind == GUARD:
            notes["accepted"] = sum(getattr(answer, "accept", False) for answer in answers)
        return answers

    async def _while_there(self, request: Request, work: Awaitable[Answer]) -> Answer:
        """What some work gives, unless the deadline passes or the client goes first: then it is cancelled."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            left = max(request.state.end - time.monotonic(), 0)
            await asyncio.wait({task, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise ClientDisconnect
            raise HTTPException(504, f"there was no answer within {self.deadline:g} s. Send fewer images at a time.")
        finally:
            task.cancel()
            gone.cancel()

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """What was sent; it counts towards the memory of all requests until the end of the context."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "bodies must not be compressed: images are already.")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 15 or int(declared) > self.max_bytes):
            raise self._too_large()
        request.state.end = time.monotonic() + self.deadline
        body = bytearray()
        try:
            try:
                await asyncio.wait_for(self._read(request, body), self.deadline)
            except asyncio.TimeoutError as error:
                raise HTTPException(408, f"the body must be sent within {self.deadline:g} s.") from error
            _notes(request)["bytes"] = len(body)
            yield bytes(body)
        finally:
            self._held -= len(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        async for piece in request.stream():
            if len(body) + len(piece) > self.max_bytes:
                raise self._too_large()
            if self._held + len(piece) > _BODIES * self.max_bytes:
                raise QueueFullError("requests that are under way take all the memory there is for them. Try later.")
            self._held += len(piece)
            body += piece

    def _too_large(self) -> HTTPException:
        repair = "Shrink the image, or send fewer at a time."
        return HTTPException(413, f"a request may have at most {self.max_bytes:,} bytes. {repair}")


@final
class _Observed:
    """Outermost: a name for every request, its log line, its seconds; and no error goes further."""

    def __init__(self, app: ASGIApp, engine: Engine, paths: frozenset[str]) -> None:
        self.app, self.engine, self.paths = app, engine, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        notes: Json = {"request": secrets.token_hex(8)}
        scope[_NOTES] = notes
        start, status = time.perf_counter(), _GONE

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except ClientDisconnect:
            pass  # the log line has its status
        except Exception as error:
            notes["traceback"] = traceback.format_exc()
            if status == _GONE:
                await _on_error(Request(scope), error)(scope, receive, sending)
        finally:
            seconds = time.perf_counter() - start
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.engine.metrics.seconds.labels(path, str(status)).observe(seconds)
            client = (scope.get("client") or ("",))[0]
            line = {"method": scope["method"], "path": scope["path"][:_PATH], "status": status, "client": client}
            write_log({**line, "seconds": round(seconds, 4), **notes})


@final
class _Keyed:
    """Refuses requests without the key before their bodies are read; health and the documentation are for everybody."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app, self.digest = app, None if key is None else _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.digest is not None and needs_key(scope["path"]):
            sent = Headers(scope=scope).get(KEY_HEADER, "").encode("latin-1", "replace")
            if not hmac.compare_digest(_digest(sent), self.digest):
                words = f"the header {KEY_HEADER} must have the key of this service."
                await _error(401, words, {"WWW-Authenticate": "ApiKey"})(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _whole(request: Request, name: str, limits: Limits) -> int:
    """A whole number of the query."""
    text = request.query_params.get(name, str(limits.default))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= limits.most):
        raise HTTPException(422, f"{name} must be a whole number from 1 to {limits.most}; got '{text[:_NAME]}'.")
    return int(text)


async def _uploads(request: Request, body: bytes) -> list[Upload]:
    """The files of a multipart body, or the one file that a body is."""
    kind = request.headers.get("content-type", "")
    if not body:
        raise HTTPException(422, "the body must be an image, or several as multipart/form-data; it is empty.")
    if not kind.lower().startswith("multipart/form-data"):
        return [Upload("image", body)]
    parser = MultiPartParser(request.headers, _once(body))
    parser.spool_max_size = len(body)  # in memory, where it is already
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise HTTPException(400, f"the multipart body cannot be read: {error.message}") from error
    try:
        parts = form.multi_items()
        files = [(name, part) for name, part in parts if isinstance(part, UploadFile)]
        uploads = [Upload((part.filename or name)[:_NAME], await part.read()) for name, part in files]
    finally:
        await form.close()
    if len(uploads) < len(parts) or not uploads:
        raise HTTPException(422, "every part of a multipart body must be a file, with a filename; there must be one.")
    return uploads


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _report(report: WatchReport) -> Response:
    return JSONResponse({"title": report.title(), **report.to_dict()}, headers=_HEADERS)


def _empty() -> Response:
    return JSONResponse({}, headers=_HEADERS)


def _on_error(request: Request, error: Exception) -> Response:
    """Every error as JSON, in words; those of our own code without its details."""
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        usual = {
            404: "nothing is answered at this path; /docs lists what is. /search needs an index, /watch a watch.",
            405: f"this path takes {headers.get('Allow', 'another method')} alone; /docs describes it.",
        }
        return _error(error.status_code, usual.get(error.status_code, error.detail), headers)
    if isinstance(error, QueueFullError):
        return _error(429, str(error), {"Retry-After": "1"})
    if isinstance(error, BrokenImageError | ImagesError) and not isinstance(error, DecoderError):
        return _error(422, str(error))
    _notes(request)["error"] = f"{type(error).__name__}: {error}"
    if isinstance(error, DecoderError):
        words = "the service cannot decode images at the moment; its log says why. Send them again later."
        return _error(503, words, {"Retry-After": "1"})
    return _error(500, str(error) if isinstance(error, DubitoError) else "the service has failed; its log says why.")


def _error(status: int, words: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": words}, status, headers=_HEADERS | (headers or {}))


def _notes(request: Request) -> Json:
    """What the log line of a request will say."""
    notes: Json = request.scope[_NOTES]
    return notes


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
