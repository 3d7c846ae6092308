"""The shelf: heads that ship with dubito, and the user's own in one folder; each by its name.

    dubito/heads/pretrained/NAME/      shipped
    DUBITO_HEADS/NAME/                 the user's own; by default in the system's folder for data of programs
    DUBITO_HEADS/NAME/seed-1/          one of several, by the name NAME/seed-1

Of two with the same name, the user's own is taken. Of several heads for one model (`entry_for`), the user's own go
before those that ship; among them the training that ended last goes first, by its median seed; then the names decide.
"""

import json
import os
import re
import sys
import warnings
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, final

from dubito.errors import ArtefactError, DubitoError, DubitoWarning
from dubito.heads.checkpoint import CARD, CONFIG, WEIGHTS, PretrainedHead, read_config, read_head
from dubito.table import Provenance

SHIPPED = Path(__file__).parent / "pretrained"
VARIABLE = "DUBITO_HEADS"
Where = Literal["shipped", "local"]
TRAINING = "training.json"
_HUB = "hub:"
_PYTORCH = (".pth.tar", ".pth", ".pt", ".tar", ".bin")


@final
@dataclass(frozen=True)
class HeadEntry:
    """One head on the shelf, as it is listed.

    Attributes:
        name: What `find_head` takes.
        path: Its folder.
        model: Its backbone.
        features: The width of what it reads.
        size: Bytes of its own files: weights, config and card, not the state of its training.
        where: "shipped" or "local".
        about: On what it was trained, in one line.
    """

    name: str
    path: Path
    model: str | None
    features: int
    size: int
    where: Where
    about: str


def local_folder() -> Path:
    """Where the user's own heads are: `DUBITO_HEADS`, or the system's folder for data of programs."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Application Support"
    else:
        base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "dubito" / "heads"


def list_heads() -> list[HeadEntry]:
    """All heads on the shelf, by name; one that cannot be read is left out with a warning."""
    found = _entries("shipped", SHIPPED) | _entries("local", local_folder())
    return [found[name] for name in sorted(found)]


def find_head(name_or_path: str | Path, **options: Any) -> PretrainedHead:
    """A head by whatever names it.

    Args:
        name_or_path: A folder that save_pretrained wrote, or that `train` wrote (then its median seed), a name on the
            shelf, a `vit_*_checkpoint.pth.tar` of the paper's authors, or an id on the Hugging Face hub, "org/name" or
            "hub:org/name".
        options: For the hub: revision, token, cache_dir, force_download, local_files_only.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name.startswith(_HUB):
        return _from_hub(name.removeprefix(_HUB), options)
    if path.is_file() or name.endswith(_PYTORCH):
        return _from_file(path)
    entries = {entry.name: entry.path for entry in list_heads()} | _trainings(path, name)
    if (path / CONFIG).is_file() or (path.is_dir() and name not in entries):
        return read_head(path)
    if name in entries:
        return read_head(entries[name])
    if isinstance(name_or_path, Path) or name.startswith((".", "/", "~")) or "\\" in name:
        return read_head(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _from_hub(name, options)
    raise _unknown(name, list(entries))


def _trainings(path: Path, name: str) -> dict[str, Path]:
    """The name, if it is that of a training: a folder, or on the shelf."""
    found = [folder for folder in (path, local_folder() / name) if (folder / TRAINING).is_file()]
    return {name: _median(found[0])} if found and not (found[0] / CONFIG).is_file() else {}


def _median(training: Path) -> Path:
    """Of a folder that `dubito.train` wrote, the head of the median seed."""
    try:
        seed = int(json.loads((training / TRAINING).read_text())["median_seed"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ArtefactError(
            f"head: '{training / TRAINING}' cannot be read ({error}). Name one of the heads in the folder, such as "
            f"'{training / 'seed-1'}'."
        ) from error
    return training / f"seed-{seed}"


def head_for(provenance: Provenance | None, *, shipped_only: bool = False) -> PretrainedHead | None:
    """The shelf's head whose backbone is a table's provenance, or None; of several, see `entry_for`."""
    entry = entry_for(provenance, shipped_only=shipped_only)
    return None if entry is None else read_head(entry.path)


def entry_for(provenance: Provenance | None, *, shipped_only: bool = False) -> HeadEntry | None:
    """Where `head_for` finds it. A head counts only if its backbone is the very same (`Provenance.difference`).

    Of several, in this order: the user's own before those that ship; the training that ended last, as its training.json
    says, and behind it by name those without one; of one training the median seed.

    Args:
        provenance: `Table.provenance`, or `model_identity` of a model.
        shipped_only: Leave the user's own aside: the same answer on every machine.
    """
    if provenance is None:
        return None
    entries = _entries("shipped", SHIPPED).values() if shipped_only else list_heads()
    return min((entry for entry in entries if _fits(entry, provenance)), key=_preference, default=None)


def _fits(entry: HeadEntry, provenance: Provenance) -> bool:
    known = read_config(entry.path).provenance
    return known is not None and known.difference(provenance) is None


def _preference(entry: HeadEntry) -> tuple[bool, float, str, bool, str]:
    """The lowest is taken."""
    ended, median = 0.0, None
    try:
        told = json.loads((entry.path.parent / TRAINING).read_text())
        median = f"seed-{told['median_seed']}"
        ended = datetime.fromisoformat(told["finished"]).timestamp()
    except (OSError, KeyError, TypeError, ValueError):  # kept by hand, or before times were recorded
        pass
    return entry.where != "local", -ended, entry.name.partition("/")[0], entry.path.name != median, entry.name


def _entries(where: Where, folder: Path) -> dict[str, HeadEntry]:
    """The heads of one place by name."""
    found = {}
    for path in sorted([*folder.glob(f"*/{CONFIG}"), *folder.glob(f"*/*/{CONFIG}")]):
        name = path.parent.relative_to(folder).as_posix()
        try:
            found[name] = _entry(name, path.parent, where)
        except DubitoError as error:
            warnings.warn(f"left out: {error}", DubitoWarning, stacklevel=3)
    return found


def _entry(name: str, path: Path, where: Where) -> HeadEntry:
    config = read_config(path)
    corpus = str(config.trained.get("corpus", "not recorded"))
    return HeadEntry(
        name=name,
        path=path,
        model=config.model,
        features=config.features,
        size=sum((path / name).stat().st_size for name in (WEIGHTS, CONFIG, CARD) if (path / name).is_file()),
        where=where,
        about=next(iter(corpus.splitlines()), ""),
    )


def _from_hub(name: str, options: dict[str, Any]) -> PretrainedHead:
    from dubito.heads.hub import from_pretrained  # noqa: PLC0415 (the hub's client is slow to import)

    return from_pretrained(name, **options)


def _from_file(path: Path) -> PretrainedHead:
    if not path.name.endswith(_PYTORCH):
        raise ArtefactError(
            f"head: '{path}' is a file. Give the folder that save_pretrained wrote, or a vit_*_checkpoint.pth.tar."
        )
    from dubito.heads.authors import import_authors_head  # noqa: PLC0415 (timm is slow to import)

    return import_authors_head(path)


def _unknown(name: str, known: list[str]) -> ArtefactError:
    near = get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"Nearest: {', '.join(near)}." if near else f"On the shelf: {', '.join(known) or 'nothing'}."
    return ArtefactError(
        f"head: there is no '{name}'. {hint} Give a name of `dubito list heads`, a folder that save_pretrained wrote, "
        f"or an id on the hub, 'org/name'."
    )
