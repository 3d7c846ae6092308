"""`dubito serve`: a guard over HTTP."""

import os
import re
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter

import dubito
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option
from dubito.storage import Place

_KEY = "DUBITO_API_KEY"


@command
def serve(
    screen: Screen,
    guard: Annotated[Place, Argument(metavar="GUARD", help="A folder that `dubito guard fit` wrote.")],
    *,
    host: Annotated[str, option("Where to listen: with another one, others can reach it.", "HOST")] = "127.0.0.1",
    port: Annotated[int, option("Where to listen; 0 is any free one.", "N")] = 8000,
    index: Annotated[Place | None, option("Also answer searches in this index.", "DIR")] = None,
    watch: Annotated[Path | None, option("Watch what the guard decides; the state is kept here.", "DIR")] = None,
    key_file: Annotated[
        Path | None, option(f"A file with the key that clients must send (also: {_KEY}).", "FILE")
    ] = None,
    max_batch: Annotated[int, option("Images through the model together.", "N", min=1)] = 32,
    max_wait_ms: Annotated[float, option("Milliseconds that an image waits for others.", min=0)] = 5.0,
    queue: Annotated[int, option("Images under way; beyond them, clients get 429.", "N", min=1)] = 256,
    deadline_s: Annotated[float, option("Seconds until a request must be answered.")] = 10.0,
    max_mb: Annotated[float, option("Megabytes of a request.")] = 20.0,
    workers: Annotated[int, option("Processes that decode images.", "N", min=1)] = 2,
    model: options.OtherModel = None,
    load: options.ModelOptions,
) -> None:
    """Answer requests for the verdicts of a GUARD over HTTP; /docs of the address describes them.

    One log line per request goes to standard error. Ctrl-C and SIGTERM end the service, after what it has accepted.
    """
    key = _read_key(key_file)
    with screen.waiting("loading guard and model"):
        from dubito.serve import ServiceLimits
        from dubito.serve import serve as start

        limits = ServiceLimits(max_batch, max_wait_ms, queue, deadline_s, max_mb, workers)
        named = dubito.Guard.load(guard)
        loaded = dubito.Guard.load(guard, load.load_stored(screen, model, named, f"the guard in '{guard}'"))
        searched = None if index is None else dubito.SafeIndex.load(index)
        name = re.sub(r"[^\w.-]", "_", guard.resolve().name, flags=re.ASCII) or "guard"
        service = start(loaded, name=name, host=host, port=port, limits=limits, index=searched, watch=watch, key=key)
    screen.show(service, guard=str(guard))
    if key is None and host not in ("127.0.0.1", "localhost", "::1"):
        screen.note(f"whoever can reach {host} can use it: set {_KEY}, or pass --key-file.")
    screen.flush()
    service.wait()


def _read_key(file: Path | None) -> str | None:
    key = os.environ.get(_KEY) if file is None else file.read_text(encoding="utf-8").strip()
    if key is not None and not key.strip():
        raise BadParameter(f"the key must not be empty; that of {_KEY if file is None else f'{file}'} is.")
    return key
