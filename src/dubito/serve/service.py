"""`serve`: the HTTP service of a guard, in a thread of this process.

It listens in one process, so that all requests share one queue and one model. TLS, more than one machine, and limits on
connections per client are the work of a proxy in front of it.
"""

import re
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from dubito.errors import ArtefactError, MissingPackageError, ValueRangeError
from dubito.guard import Guard
from dubito.result import Result
from dubito.search import SafeIndex
from dubito.serve.engine import Engine
from dubito.serve.server import make_app
from dubito.threads import RunningServer
from dubito.validate import check_number

try:
    import uvicorn

    from dubito.serve.connection import ClientConnection
except ImportError as error:
    raise MissingPackageError("serve needs its server: pip install 'dubito[serve]'") from error

_START_SECONDS = 30.0
_BACKLOG = 2048
_KEEP_ALIVE = 5
"""Seconds that a connection may be idle."""
_SLACK = 2.0
"""Seconds beyond the deadline for requests that are under way when the service stops."""


@final
@dataclass(frozen=True)
class ServiceLimits:
    """How much a service takes on.

    Attributes:
        max_batch: Images through the model together.
        max_wait_ms: Milliseconds that an image waits for others, while others are being decoded.
        queue: Images under way; whoever sends more gets 429.
        deadline_s: Seconds from the head of a request to its answer; then it gets 504, or 408 if its body is not there
            yet. Decoding an image may take half of them.
        max_mb: Megabytes (10^6 bytes) of a request; whoever sends more gets 413.
        workers: Processes that decode.
    """

    max_batch: int = 32
    max_wait_ms: float = 5.0
    queue: int = 256
    deadline_s: float = 10.0
    max_mb: float = 20.0
    workers: int = 2

    def __post_init__(self) -> None:
        for name, usual in (("max_batch", 32), ("queue", 256), ("workers", 2)):
            hint = f"{usual} is usual."
            check_number(getattr(self, name), "[1, inf)", by="serve", what=name, whole=True, hint=hint)
        check_number(self.max_wait_ms, "[0, inf)", by="serve", what="max_wait_ms", hint="5 is usual.")
        check_number(self.deadline_s, "(0, inf)", by="serve", what="deadline_s", hint="10 is usual.")
        check_number(self.max_mb, "(0, inf)", by="serve", what="max_mb", hint="20 is usual.")


@final
@dataclass(frozen=True)
class Service(RunningServer, Result):
    """A running service; it ends with `close`, with its `with` block, or with the process.

    Attributes:
        address: Where clients find it.
        name: The model's name in the Open Inference Protocol.
        guarantee: What is guaranteed, as a sentence.
        fingerprint: Of the guard.
        keyed: Whether clients need a key.
    """

    address: str
    name: str
    guarantee: str
    fingerprint: str
    keyed: bool
    _server: threading.Thread = field(repr=False)
    _stop: Callable[[], None] = field(repr=False)
    _run: Callable[[], None] = field(repr=False)

    def title(self) -> str:
        """Where it is."""
        return f"guard '{self.name}' at {self.address}"

    def facts(self) -> dict[str, str]:
        """What is guaranteed, and who may ask."""
        key = "required" if self.keyed else "none: whoever reaches the address may use it"
        return {"guarantee": self.guarantee, "fingerprint": self.fingerprint, "key": key}

    def wait(self) -> None:
        """Return when the service has ended; Ctrl-C and SIGTERM end it, after what it has accepted.

        Meanwhile the model runs in this thread, the main one.
        """

        def stop(*_: object) -> None:
            threading.Thread(target=self.close, name="stop").start()  # this thread is needed for what was accepted

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.close()


def serve(
    guard: Guard,
    *,
    name: str = "guard",
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: ServiceLimits | None = None,
    index: SafeIndex | None = None,
    watch: str | Path | None = None,
    key: str | None = None,
) -> Service:
    """Answer requests for a guard's verdicts over HTTP.

    Args:
        guard: The guard, with its model.
        name: The model's name in the Open Inference Protocol.
        host: Where to listen. With another than this machine's own, whoever can reach it can use it: pass a key.
        port: Where to listen; 0 is any free port.
        limits: How much it takes on.
        index: An index of the same model, for searches.
        watch: Folder of a watch that takes note of every image, new or with its own alpha; see `Guard.watch`.
        key: Whoever does not send it in the header X-API-Key is refused.

    Raises:
        ArtefactError: The port is taken, or the watch is of another guard.
        ImagesError: The model's transform does not take images, or cannot be sent to worker processes.
    """
    check_number(port, "[0, 65535]", by="serve", what="port", whole=True, hint="0 is any free one.")
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ValueRangeError(f"serve: name must be letters, digits, '.', '_' and '-'; got {name!r}. 'guard' is usual.")
    if key is not None and not key.strip():
        raise ValueRangeError("serve: key must not be empty. Leave it out to let everybody in.")
    limits = limits or ServiceLimits()
    listening = _bound(host, port)
    with ExitStack() as stack:
        stack.callback(listening.close)
        engine = Engine(
            guard,
            workers=limits.workers,
            seconds=limits.deadline_s / 2,
            index=index,
            watch=None if watch is None else guard.watch(watch),
            capacity=limits.queue,
            max_batch=limits.max_batch,
            max_wait=limits.max_wait_ms / 1000,
        )
        stack.callback(engine.close)
        app = make_app(engine, name=name, max_bytes=int(limits.max_mb * 1e6), deadline=limits.deadline_s, key=key)
        running, stop = _running(app, listening, limits.deadline_s + _SLACK, engine.close)
        opened = stack.pop_all()

    def close() -> None:
        engine.stopping = True
        stop()
        opened.close()

    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}"
    sentence = guard.guarantee.sentence(guard.threshold.of)
    return Service(
        address, name, sentence, guard.fingerprint, key is not None, running, close, engine.model_thread.take_over
    )


def _running(
    app: Any, listening: socket.socket, patience: float, ended: Callable[[], None]
) -> tuple[threading.Thread, Callable[[], None]]:
    """The thread of a server that answers, and what stops it; however it ends, `ended` is called."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=ClientConnection,
            ws="none",
            log_level="error",
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=int(patience + 1),
        )
    )

    def run() -> None:
        try:
            server.run([listening])
        finally:
            ended()

    thread = threading.Thread(target=run, name="serve", daemon=True)
    thread.start()
    waited = 0.0
    while not server.started and thread.is_alive() and waited < _START_SECONDS:
        thread.join(0.02)
        waited += 0.02

    def stop() -> None:
        server.should_exit = True
        thread.join(patience + 2 * _SLACK)

    return thread, stop


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ArtefactError(
            f"serve cannot listen on {host}, port {port} ({error.strerror or error}). Choose another port; 0 is any "
            f"free one."
        ) from error
    # Connections inherit it. Without it, an answer waits for the client's acknowledgement of its head, 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
