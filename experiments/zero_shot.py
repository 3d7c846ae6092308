"""Does a head hold on data sets that it was not trained for? Table 2 and Figure 8 of Kirchhof et al. (2024).

    python experiments/zero_shot.py --data DIR [--more-data DIR] [--head NAME] [--cache DIR] [--gallery DIR] [--write]

DIR holds tiny_imagenet_val_dev2400/ and dtd10_dev400/ (images.zip and labels.csv each), svhn_test_dev5000/ (labels.npz
with y, and images.png, the pixels of all digits one after the other) and imagenet_val_dev2000/ (images256.zip). The
other DIR holds cifar10.npz (test_images, test_labels), of which the first 2,000 are used. NAME is a head for
EfficientNet-Lite0: by default the one that ships, else a name of `dubito list heads` or a folder.

    Table 2     R-AUROC of the head and, beside it, of the classifier's entropy; Recall@1 of the features
    Figure 8    AUROC of each data set's images, and of all together, against ImageNet photographs

all with 95 % intervals over images. Nothing is fitted here, and labels serve the measurement only. The in-distribution
photographs of Figure 8 are all of imagenet_val_dev2000, which the head that ships has learned from (the paper, too,
compares with images of the pretraining); with --split-seed, only the second half of that random order, for a head that
was trained on the first. The published columns are ViT-Base's, on the whole data sets. --gallery writes a page of the
textures that the head finds clearest and most unclear; --write puts the result into experiments/expected. The last line
is one JSON object.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from _expected import write_expected
from _own_classes import sets_of_own_classes
from PIL import Image

import dubito
from dubito.data import Subset
from dubito.models import WrappedClassifier
from dubito.report.gallery import write_gallery
from dubito.types import Images

EXPECTED = Path(__file__).parent / "expected" / "zero_shot.json"


def main() -> None:
    """Extract, score, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path, help="the folder of cifar10.npz; without it, CIFAR-10 is left out")
    parser.add_argument("--head", default="efficientnet_lite0")
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here")
    parser.add_argument("--images", type=int, help="at most so many of every data set")
    parser.add_argument("--split-seed", type=int, help="of the halves of the ImageNet photographs")
    parser.add_argument("--gallery", type=Path, help="folder for the page of textures")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    head = dubito.UncertaintyHead.from_pretrained(args.head)
    model = dubito.load("pypi:efficientnet_lite0")
    head.check_model(model)
    with tempfile.TemporaryDirectory() as place:
        cache = args.cache or Path(place)
        sets = {name: first(images, args.images) for name, images in data_sets(args.data, args.more_data)}
        tables = {name: extracted(model, images, cache / name) for name, images in sets.items()}
        split = args.split_seed
        id_images = first(in_distribution(args.data, split), args.images)
        id_table = extracted(model, id_images, cache / f"in-distribution-{'all' if split is None else split}")
        transfer = dubito.protocols.transfer({"head": head}, tables)
        by_dataset = dubito.protocols.ood_auroc_by_dataset(
            {"head": head, "entropy": dubito.Entropy()}, id_table, tables
        )
        if args.gallery:
            textures = tables["dtd10"]
            page = args.gallery / "textures.html"
            write_gallery(
                sets["dtd10"], head.score(textures), page, ids=textures.id, title="Clear and unclear textures"
            )
    print(f"{transfer}\n\n{by_dataset}")
    result = {
        "head": Path(args.head).name,
        "corpus": head.trained_.get("corpus"),
        "transfer": transfer.to_dict(),
        "ood_auroc_by_dataset": by_dataset.to_dict() | {"in_distribution": "imagenet_val_dev2000"},
    }
    if args.write:
        write_expected(EXPECTED, f"--data DIR{' --more-data DIR' if args.more_data else ''}", result)
    print(json.dumps(result))


def data_sets(data: Path, more: Path | None) -> Iterator[tuple[str, Images]]:
    """By name, labelled by their own classes; those of Table 2 by its names."""
    yield from sets_of_own_classes(data, more)
    yield "svhn", digits(data / "svhn_test_dev5000")


def digits(folder: Path) -> Images:
    """The digits that are stored one after the other in one tall picture."""
    pixels = np.asarray(Image.open(folder / "images.png")).reshape(-1, 32, 32, 3)
    with np.load(folder / "labels.npz") as labels:
        return dubito.open_images(pixels, labels["y"].astype(np.int64))


def in_distribution(data: Path, split_seed: int | None) -> Images:
    """ImageNet photographs: all of them, or the second half of a random order."""
    photos = dubito.open_images(data / "imagenet_val_dev2000" / "images256.zip")
    if split_seed is None:
        return photos
    order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(split_seed))
    return Subset(photos, sorted(order[len(photos) // 2 :].tolist()))


def first(images: Images, count: int | None) -> Images:
    """The first images of a set, or all."""
    return images if count is None or count >= len(images) else Subset(images, range(count))


def extracted(model: WrappedClassifier, images: Images, to: Path) -> dubito.Table:
    """Their columns, with a bar while they are made."""
    return dubito.extract(model, images, to, label_space=None if images.labels is None else "own")


if __name__ == "__main__":
    main()
