"""`explore`: the explorer of a table, in a server of this process on this machine.

    http://127.0.0.1:PORT/TOKEN/#...

Port and token are kept beside the table, with layouts and notes, so that an address works again after the server was
stopped, or killed, and started. One explorer at a time writes there.
"""

import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, final

import uvicorn

from dubito.errors import ArtefactError
from dubito.explore.collection import Collection
from dubito.explore.inspector import Inspector
from dubito.explore.layout import Layouts
from dubito.explore.notes import Notes
from dubito.explore.server import LOCAL, make_app
from dubito.guard import Guard, Watch
from dubito.metrics import Array
from dubito.result import Result
from dubito.storage import locked, parse_json, reading, write_json
from dubito.table import Table
from dubito.threads import RunningServer
from dubito.types import Classifier, Json, Score
from dubito.validate import check_number

_ADDRESS = "address.json"
_SECONDS = 5.0
"""For answers that are under way when the server stops."""
_FRAME = "width:100%;height:52rem;border:0"


@final
@dataclass(frozen=True)
class Explorer(RunningServer, Result):
    """A running explorer; it ends with `close`, with its `with` block, or with the process.

    Attributes:
        address: Where a browser finds it, token included.
        name: Name of the table.
        rows: Number of images.
        kept: Where layouts and notes are kept; None where they are in memory alone.
    """

    address: str
    name: str
    rows: int
    kept: Path | None
    _server: threading.Thread = field(repr=False)
    _stop: Callable[[], None] = field(repr=False)

    def title(self) -> str:
        """The table, and where to look at it."""
        return f"{self.name}: {self.rows:,} images at {self.address}"

    def facts(self) -> dict[str, str]:
        """Where layouts and notes are."""
        return {"layouts and notes": "in memory" if self.kept is None else str(self.kept)}

    def _repr_html_(self) -> str:
        address = escape(self.address)
        link = f'<a href="{address}" target="_blank">{escape(self.title())}</a>'
        return f'<div>{link}</div><iframe src="{address}" style="{_FRAME}"></iframe>'


def explore(  # noqa: PLR0913 (one call that users type; everything after `images` is optional)
    table: Table,
    images: Any = None,
    *,
    guard: Guard | None = None,
    watch: Watch | None = None,
    ood: Mapping[str, Table] | None = None,
    other: Table | None = None,
    learn_from: Table | None = None,
    scores: Mapping[str, Array | Score] | None = None,
    model: Classifier | Callable[[], Classifier] | None = None,
    folder: str | Path | None = None,
    host: str = LOCAL[0],
    port: int = 0,
    browser: bool = True,
) -> Explorer:
    """Open the explorer of a table in the browser: a map, filters, a threshold, and every image in detail.

    Args:
        table: The images to look at, from `dubito.extract` or `dubito.open`.
        images: Anything that `dubito.open_images` takes: the images themselves, for pictures.
        guard: A guard of the same model, for verdicts with a guarantee.
        watch: A watch of the guard, for the history of what it was used on; its guard is used where none is passed.
        ood: By name, tables of out-of-distribution images.
        other: The same images as another model sees them, to compare with.
        learn_from: In-distribution images for scores that learn.
        scores: By name, further fitted scores, or uncertainties of the table's rows; the first one orders images.
        model: The model that made the table, or a function that loads it: for new images, tiles and corruptions.
        folder: Where layouts, notes and the address are kept; by default beside a cache, and in memory otherwise.
        host: Where to listen. Whoever can reach it and knows the address sees the images.
        port: Where to listen; by default the port of the last time, else a free one.
        browser: Whether to open a browser.

    Raises:
        ArtefactError: Another explorer of this table is open, or the port is taken.
    """
    check_number(port, "[0, 65535]", by="explore", what="port", whole=True, hint="0 chooses a free one.")
    place = _beside(table) if folder is None else Path(folder)
    if watch is not None:
        guard = watch.guard if guard is None else guard
        watch.check_guard(guard, by="explore")
    collection = Collection(
        table, ood=ood, other=other, images=images, guard=guard, learn_from=learn_from, scores=scores
    )
    with ExitStack() as stack:
        if place is not None:
            try:
                stack.enter_context(locked(place))
            except ArtefactError as error:
                raise ArtefactError(_already_open(place, host)) from error
        layouts = Layouts(collection, place)
        stack.callback(layouts.close)
        inspector = Inspector(collection, layouts, Notes(place), model)
        listening, token = _listen(place, host, port)
        stack.callback(listening.close)
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(inspector, token, hosts=(*LOCAL, host), watch=watch),
                log_level="warning",
                lifespan="off",
                timeout_graceful_shutdown=int(_SECONDS),
            )
        )
        running = threading.Thread(target=server.run, args=([listening],), daemon=True)
        running.start()
        layouts.start_saved()
        opened = stack.pop_all()

    def stop() -> None:
        server.should_exit = True
        running.join(2 * _SECONDS)
        opened.close()

    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/{token}/"
    if browser:
        webbrowser.open(address)
    return Explorer(address, table.name, len(collection), place, running, stop)


def _beside(table: Table) -> Path | None:
    """A folder beside a cache; None for a table in memory, or where nothing can be written."""
    cache = Path(table.name)
    if not (cache / "manifest.json").is_file():
        return None
    place = cache.with_name(f"{cache.name}.explore")
    try:
        place.mkdir(exist_ok=True)
        (place / ".lock").touch()
    except OSError:
        return None
    return place


def _already_open(place: Path, host: str) -> str:
    kept: Json = {}
    with suppress(OSError, ValueError):
        kept = dict(parse_json((place / _ADDRESS).read_bytes()))
    where = f" at http://{host}:{kept['port']}/{kept['token']}/" if kept else ""
    return (
        f"explore: another explorer of this table is open{where}. Look there, end it, or keep layouts and notes in "
        f"another folder."
    )


def _listen(folder: Path | None, host: str, port: int) -> tuple[socket.socket, str]:
    """A socket and a token: those of the last time, if there was one and its port is free."""
    path = None if folder is None else folder / _ADDRESS
    kept: Json = {}
    if path is not None and path.is_file():
        with reading(f"the address in '{path}'", "Delete it."):
            kept = dict(parse_json(path.read_bytes()))
    token = str(kept.get("token") or secrets.token_urlsafe(24))
    listening = _bound(host, [port] if port else [int(kept.get("port", 0)), 0])
    if path is not None:
        path.touch(mode=0o600)
        write_json(path, {"port": listening.getsockname()[1], "token": token})
        path.chmod(0o600)  # whoever reads it can see the images
    return listening, token


def _bound(host: str, ports: list[int]) -> socket.socket:
    """A socket on the first of some ports, or where that is taken, on the next."""
    try:
        return socket.create_server((host, ports[0]), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if len(ports) > 1:
            return _bound(host, ports[1:])
        raise ArtefactError(
            f"explore cannot listen on {host}, port {ports[0]} ({error.strerror or error}). Choose another port; 0 is "
            f"any free one."
        ) from error
