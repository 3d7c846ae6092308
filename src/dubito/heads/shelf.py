"""The shelf: heads by name, those that ship with dubito and the user's own in one folder.

    dubito/heads/pretrained/NAME/      shipped
    DUBITO_HEADS/NAME/                 the user's own; by default in the system's folder for application data
    DUBITO_HEADS/NAME/seed-1/          one of several seeds, by the name NAME/seed-1

Of two heads with the same name, the user's own is taken.
"""

import os
import re
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from dubito.choices import nearest
from dubito.errors import ArtefactError, DubitoError, DubitoWarning
from dubito.heads.checkpoint import CARD, CONFIG, WEIGHTS, PretrainedHead, read_config, read_head
from dubito.storage import Place, application_folder, is_url, parse_json, reading, to_path, to_place
from dubito.table import Provenance

SHIPPED = Path(__file__).parent / "pretrained"
VARIABLE = "DUBITO_HEADS"
Where = Literal["shipped", "local"]
TRAINING = "training.json"
_HUB = "hub:"
_PYTORCH = (".pth.tar", ".pth", ".pt", ".tar", ".bin")


@final
class HeadEntry(NamedTuple):
    """One head on the shelf, as it is listed.

    Attributes:
        name: The name that `find_head` takes.
        path: Its folder.
        model: Its backbone.
        features: Width of the features that it reads.
        size: Bytes of its weights, config and card, without the state of its training.
        where: "shipped" or "local".
        about: What it was trained on, in one line.
    """

    name: str
    path: Path
    model: str | None
    features: int
    size: int
    where: Where
    about: str


def local_folder() -> Path:
    """The folder of the user's own heads: `DUBITO_HEADS`, or one in the system's folder for application data."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser()
    return application_folder("data") / "heads"


def list_heads() -> list[HeadEntry]:
    """All heads on the shelf, by name; one that cannot be read is left out with a warning."""
    entries = _entries("shipped", SHIPPED) | _entries("local", local_folder())
    return [entries[name] for name in sorted(entries)]


def find_head(name_or_path: str | Place, **options: Any) -> PretrainedHead:
    """A head by name, path or id.

    Args:
        name_or_path: A folder that save_pretrained wrote, or that `train` wrote (then its median seed), or its address,
            a name on the shelf, a `vit_*_checkpoint.pth.tar` of the paper's authors, or an id on the Hugging Face hub,
            "org/name" or "hub:org/name".
        options: Options of the hub: revision, token, cache_dir, force_download, local_files_only.
    """
    name, path = str(name_or_path), to_place(name_or_path)
    if not name.startswith(_HUB) and (path.is_file() or name.endswith(_PYTORCH)):
        if not path.name.endswith(_PYTORCH):
            raise ArtefactError(
                f"head: '{path}' is a file. Pass the folder that save_pretrained wrote, or a vit_*_checkpoint.pth.tar."
            )
        from dubito.heads.authors import import_authors_head  # noqa: PLC0415 (timm is slow to import)

        return import_authors_head(to_path(path, "head: a checkpoint of the authors"))
    entries = {entry.name: entry.path for entry in list_heads()} | _trainings(path, name)
    is_path = (
        not isinstance(name_or_path, str)
        or is_url(name)
        or name.startswith((".", "/", "~"))
        or "\\" in name
        or path.is_dir()
    )
    if is_path or name in entries:
        return read_head(path if (path / CONFIG).is_file() else entries.get(name, path))
    if re.fullmatch(rf"{_HUB}.*|[\w.-]+/[\w.-]+", name):
        from dubito.heads.hub import from_pretrained  # noqa: PLC0415 (the hub's client is slow to import)

        return from_pretrained(name.removeprefix(_HUB), **options)
    near = nearest(name, entries, or_first=False)
    hint = f"Nearest: {', '.join(near)}." if near else f"On the shelf: {', '.join(entries) or 'nothing'}."
    raise ArtefactError(
        f"head: there is no '{name}'. {hint} Pass a name of `dubito list heads`, a folder that save_pretrained wrote, "
        f"or an id on the hub, 'org/name'."
    )


def _trainings(path: Place, name: str) -> dict[str, Place]:
    """The median head by name, if the name is that of a training: a folder, or one on the shelf."""
    folders = [folder for folder in (path, local_folder() / name) if (folder / TRAINING).is_file()]
    if not folders or (folders[0] / CONFIG).is_file():
        return {}
    training = folders[0]
    repair = f"Name one of the heads in the folder, such as '{training / 'seed-1'}'."
    with reading(f"head: '{training / TRAINING}'", repair):
        seed = int(parse_json((training / TRAINING).read_bytes())["median_seed"])
    return {name: training / f"seed-{seed}"}


def entry_for(provenance: Provenance | None, *, shipped_only: bool = False) -> HeadEntry | None:
    """The entry of the head for a model, or None. Its backbone must be the same in every part.

    Of several, the user's own come before those that ship; then the training that ended last according to its
    training.json, before heads without one, by name; of one training, the median seed.

    Args:
        provenance: `Table.provenance`, or `model_identity` of a model.
        shipped_only: Whether to ignore the user's own heads: the result is the same on every machine.
    """
    if provenance is None:
        return None
    fitting = []
    for entry in _entries("shipped", SHIPPED).values() if shipped_only else list_heads():
        backbone = read_config(entry.path).provenance
        if backbone is not None and backbone.difference(provenance) is None:
            fitting.append(entry)
    return min(fitting, key=_preference, default=None)


def _preference(entry: HeadEntry) -> tuple[bool, float, str, bool, str]:
    """The sort key of `entry_for`."""
    ended, median = 0.0, None
    try:
        report = parse_json((entry.path.parent / TRAINING).read_bytes())
        median = f"seed-{report['median_seed']}"
        ended = datetime.fromisoformat(report["finished"]).timestamp()
    except (OSError, KeyError, TypeError, ValueError):  # no report: copied by hand
        pass
    return entry.where != "local", -ended, entry.name.partition("/")[0], entry.path.name != median, entry.name


def _entries(where: Where, folder: Path) -> dict[str, HeadEntry]:
    """The heads of one folder by name."""
    entries = {}
    for path in sorted(one.parent for depth in ("*", "*/*") for one in folder.glob(f"{depth}/{CONFIG}")):
        name = path.relative_to(folder).as_posix()
        try:
            config = read_config(path)
        except DubitoError as error:
            warnings.warn(f"left out: {error}", DubitoWarning, stacklevel=3)
            continue
        about = next(iter(str(config.trained.get("corpus", "not recorded")).splitlines()), "")
        size = sum(file.stat().st_size for part in (WEIGHTS, CONFIG, CARD) if (file := path / part).is_file())
        entries[name] = HeadEntry(name, path, config.model, config.features, size, where, about)
    return entries
