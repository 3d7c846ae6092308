"""Real colour photographs that ship inside scikit-image and scikit-learn, for a demo without a network.

The last three are what a model of everyday photographs has never seen: galaxies, the back of an eye, stained tissue.
"""

import importlib.util
from pathlib import Path

from PIL import Image

from dubito.data.decode import decode
from dubito.errors import MissingPackageError

_FILES = (
    ("astronaut", "skimage", "data/astronaut.png"),
    ("cat", "skimage", "data/chelsea.png"),
    ("coffee", "skimage", "data/coffee.png"),
    ("rocket", "skimage", "data/rocket.jpg"),
    ("motorcycle", "skimage", "data/motorcycle_left.png"),
    ("temple", "sklearn", "datasets/images/china.jpg"),
    ("flower", "sklearn", "datasets/images/flower.jpg"),
    ("galaxies", "skimage", "data/hubble_deep_field.jpg"),
    ("retina", "skimage", "data/retina.jpg"),
    ("tissue", "skimage", "data/ihc.png"),
)


def photos() -> list[tuple[str, Image.Image]]:
    """The photographs with their names, in RGB, read from the installed packages; nothing is downloaded."""
    return [(name, decode(_find(package, file), name)) for name, package, file in _FILES]


def _find(package: str, file: str) -> Path:
    # The packages are located, not imported: their files are all that is needed.
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / file if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise MissingPackageError(
            f"photos needs the file {file} that ships with {package}; it is not installed. "
            f'Install it: pip install "dubito[demo]"'
        )
    return path
