"""What can go wrong, as one family: every message says what was expected, what was passed and how to repair it."""

import re
import sys
import traceback

_MOST_LETTERS = 2000
"""Of a message: values from a file may have any length."""
_LONG_WORD = re.compile(r"\S{501,}")


class DubitoError(Exception):
    """The root: catch it to catch every error that dubito raises on purpose."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*(_shortened(part) if isinstance(part, str) else part for part in parts))


class ModelError(DubitoError):
    """A model cannot be found, loaded or understood."""


class RefusedInputsError(ModelError, RuntimeError):
    """A module raised on its inputs. Also a RuntimeError, as most of what torch raises then."""


class CheckpointError(ModelError):
    """A weights file is missing, does not fit the model, or is not safe to open."""


class MissingPackageError(DubitoError):
    """An optional package is not installed; the message gives the pip line."""


class ImagesError(DubitoError):
    """A set of images cannot be opened: no such place, nothing in it, or labels that do not match."""


class BrokenImageError(DubitoError):
    """One image cannot be decoded. Extraction skips it and lists it; reading it alone raises."""


class TableError(DubitoError):
    """Columns that do not fit together, or not what they are used for."""


class UnlabelledError(TableError):
    """Rows to train on have no labels yet: people have to label them."""


class MissingColumnError(TableError, AttributeError):
    """A score or metric needs a column that the table does not have."""


class NotFittedError(DubitoError):
    """A score is used before it has been fitted."""


class ValueRangeError(DubitoError):
    """NaN, infinity or another value that has no meaning here."""


class UnknownNameError(ValueRangeError, KeyError):
    """A name that is none of those that are known; the message lists them. Also a KeyError, for results by name."""

    __str__ = Exception.__str__  # a KeyError would put its text in quotes


class CacheError(DubitoError):
    """A cache on disk cannot be used."""


class StaleCacheError(CacheError):
    """The cache was made from other weights, images or settings; the message names which."""


class DamagedShardError(CacheError):
    """A shard is missing, short or altered; the message names it."""


class CacheBusyError(CacheError):
    """Another extraction is writing into the same folder."""


class DiskFullError(CacheError):
    """No space left; what was finished is safe, and the same call continues from there."""


class EngineError(DubitoError):
    """An engine cannot run: no cluster, no room in it, code that cannot be sent, or blocks that keep failing."""


class LostProcessError(EngineError):
    """A process of a training has ended, or cannot be reached."""


class StoreError(DubitoError):
    """A remote location, such as s3://bucket/cache, cannot be reached or refuses access; what was finished is kept."""


class ServerError(DubitoError):
    """A database server cannot be reached, went away, or lacks what is needed; the message says what is safe."""


class ArtefactError(DubitoError):
    """A saved score, guard or index cannot be read back or written."""


class GuardError(DubitoError):
    """No guarantee is possible with these images; the message says how many would do."""


class DubitoWarning(UserWarning):
    """The root of all warnings."""


class SkippedImagesWarning(DubitoWarning):
    """Images that could not be decoded were left out of a table."""


class LeftOutFilesWarning(DubitoWarning):
    """Files of a folder or archive are hidden or not images, and were left out; the message counts them by ending."""


class DamagedArchiveWarning(DubitoWarning):
    """A tar file is cut off or damaged; the images that are whole are used, and the message counts them."""


class NondeterministicModelWarning(DubitoWarning):
    """A model's predictions for the same images differ in their last bits from pass to pass."""


class RepairedShardWarning(DubitoWarning):
    """A damaged or missing shard of a cache is being extracted again."""


class FailedBlocksWarning(DubitoWarning):
    """Blocks of images failed again and again and were left out, as their engine allows; the message names them."""


class ClusterWarning(DubitoWarning):
    """A cluster has GPUs that an extraction does not use, or no room for its workers at the moment."""


class OwnLabelsWarning(DubitoWarning):
    """None of the class names is a class of the model: labels are stored, but no loss and no accuracy."""


class LabelOrderWarning(DubitoWarning):
    """The model's predictions fit the labels much better with classes exchanged; dubito.audit says what to repair."""


class ConstantHeadWarning(DubitoWarning):
    """A trained head predicts the same for every image: it has not learned anything."""


class GradientFallbackWarning(DubitoWarning):
    """Gradients of some layers are computed image by image: correct, but slow; the message names the layers."""


class UnusedLayersWarning(DubitoWarning):
    """Some layers do not contribute to the logits, so they have no gradient; the message names them."""


def first_words(text: object, most: int = 200) -> str:
    """What an error of another package says, in one line that ends between two words; its type where it says nothing.

    >>> first_words(ValueError("size mismatch for head: 1000 classes here, 10 in the file."), 40)
    'size mismatch for head: 1000 classes ...'
    """
    words = str(text).split() or [type(text).__name__]
    line = words[0] if len(words[0]) < most else f"{words[0][: most - len(' ...')]}..."
    for word in words[1:]:
        if len(line) + len(word) + len(" ...") >= most:
            return f"{line} ..."
        line += f" {word}"
    return line.rstrip(".")


def users_level() -> int:
    """The `stacklevel` of a warning that points at the line outside dubito, however deep the call is."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_stack(sys._getframe(1))]
    return 1 + max(level for level, name in enumerate(modules, 1) if name.partition(".")[0] == "dubito")


def _shortened(text: str) -> str:
    """Without the middle of its longest words, then without its own, if a message is longer than people read."""
    if len(text) <= _MOST_LETTERS:
        return text
    return _without_middle(_LONG_WORD.sub(lambda word: _without_middle(word[0], 500), text), _MOST_LETTERS)


def _without_middle(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
