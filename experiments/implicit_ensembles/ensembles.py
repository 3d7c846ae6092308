"""An ensemble of ensembles on CIFAR-10 against SVHN: Fig. 2 of Kirsch (2024), with networks small enough to train here.

    python experiments/implicit_ensembles/ensembles.py --data DIR --more-data DIR --nets DIR [--cache DIR] [--write]

DIR holds svhn_test_dev5000/images.png and cifar10_resnets/ (resnet20.pt to resnet56.pt), the other DIR cifar10.npz.
What was trained is kept in --nets, one file a network, so that the script goes on where it was stopped.

    24 networks   of three convolutions (32, 64, 128 channels, each with stride 2, batch norm and ReLU) and a linear
                  layer, trained for eight epochs with other seeds. The paper's are Wide-ResNet-28-1 by its text,
                  ResNet-50 by the caption, trained for 350 epochs; accuracies are not comparable.
    4 ResNets     of other depths, as others trained them (20, 32, 44, 56), joined by dubito.ensemble: 4 x 1 and 2 x 2.

For every partition, 24 x 1 to 2 x 12: mean MI on SVHN with its deciles (Fig. 2a) and the AUROC of MI, SVHN against the
CIFAR-10 test set (Fig. 2b), as means over random partitions, with bootstrap intervals. The paper's values stand in
drawings; its text says that MI concentrates on smaller values, and that the AUROC deteriorates, modestly. --limit N
takes the first N images of every set, to try the script out. The last line is one JSON object.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dubito
from dubito.cache.runner import bar, kept_memory
from dubito.data import Subset
from dubito.explain.collapse import EnsembleDiagnosis, diagnose_ensemble
from dubito.explain.pictures import COLOURS, new_figure
from dubito.metrics import MemberStream

# One folder up, where other experiments use it, too.
sys.path.append(str(Path(__file__).parents[1]))
from _resnet_cifar import resnet

EXPECTED = Path(__file__).parents[1] / "expected" / "implicit_ensembles_ensembles.json"
DEPTHS = (20, 32, 44, 56)
BATCH, RATE, MOMENTUM, DECAY = 128, 0.05, 0.9, 5e-4
PARTITIONS = 20
MEAN, DEVIATION = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
PUBLISHED = {
    "text": "24 x 1 to 2 x 12: mutual information on SVHN concentrates on smaller values as sub-ensembles grow, and "
    "the AUROC of CIFAR-10 against SVHN deteriorates, modestly; values only in drawings"
}


def main() -> None:
    """Both ensembles, two tables, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--nets", type=Path, required=True, help="trained networks are kept here")
    parser.add_argument("--cache", type=Path, help="keep what was extracted from the ResNets here")
    parser.add_argument("--pages", type=Path, help="write a page for either ensemble here")
    parser.add_argument("--picture", type=Path, help="draw the small networks' figure here")
    parser.add_argument("--members", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--limit", type=int, help="at most so many images of every set")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)  # batches are too small for more, and several of these can run side by side
    result = {"settings": {key: getattr(args, key) for key in ("members", "epochs", "limit")}, "published": PUBLISHED}
    result["small networks"] = figures("small networks", small(args), args)
    with tempfile.TemporaryDirectory() as place:
        result["resnets"] = figures("resnets", resnets(args, args.cache or Path(place)), args)
    if args.write:
        command = "python experiments/implicit_ensembles/ensembles.py --data DIR --more-data DIR --nets DIR --write"
        EXPECTED.write_text(json.dumps({"command": command} | result, indent=1) + "\n")
    print(json.dumps(result))


def small(args: argparse.Namespace) -> tuple[dubito.Table, dubito.Table]:
    """Networks trained here, asked about CIFAR-10 test images and SVHN."""
    arrays = np.load(args.more_data / "cifar10.npz")
    images = {half: pixels(arrays[f"{half}_images"][: args.limit]) for half in ("train", "test")}
    label = {half: torch.from_numpy(arrays[f"{half}_labels"][: args.limit]).long() for half in images}
    train = images.pop("train"), label["train"]
    images["SVHN"] = pixels(digits(args.data)[: args.limit])
    members = [member(args.nets, seed, train, args.epochs) for seed in range(args.members)]
    outputs = {name: torch.stack([logits_of(one, x) for one in members], 1) for name, x in images.items()}
    in_distribution = dubito.Table(name="CIFAR-10", members_logit=outputs["test"], label=label["test"])
    return in_distribution, dubito.Table(name="SVHN", members_logit=outputs["SVHN"])


def resnets(args: argparse.Namespace, cache: Path) -> tuple[dubito.Table, dubito.Table]:
    """Four pretrained ones: each extracted into a cache of its own, then joined."""
    images = {
        "CIFAR-10": dubito.open_images(f"{args.more_data / 'cifar10.npz'}#test"),
        "SVHN": dubito.open_images(digits(args.data)),
    }
    tables: dict[str, list[dubito.Table]] = {name: [] for name in images}
    for depth in DEPTHS:
        model = dubito.wrap(
            resnet(depth, args.data / "cifar10_resnets"),
            transform=dubito.Preprocess(size=(32, 32), resize=(32, 32)),
            classes=10,
            name=f"resnet{depth}",
        )
        for name, some in images.items():
            chosen = some if args.limit is None else Subset(some, range(min(args.limit, len(some))))
            space = "model" if some.labels is not None else None
            tables[name].append(dubito.extract(model, chosen, cache / f"resnet{depth}" / name, label_space=space))
    table, ood = (dubito.ensemble(some) for some in tables.values())
    table.name, ood.name = tables
    return table, ood


def figures(title: str, tables: tuple[dubito.Table, dubito.Table], args: argparse.Namespace) -> dict:
    """Fig. 2b from in-distribution and OOD images together, Fig. 2a from the OOD images alone."""
    table, ood = tables
    both = diagnose_ensemble(table, ood=ood, partitions=PARTITIONS)
    alone = diagnose_ensemble(ood, partitions=PARTITIONS)
    accuracy = accuracies(table)
    print(f"\n{title}: accuracy of members {min(accuracy['members']):.3f} to {max(accuracy['members']):.3f}, together "
          f"{accuracy['together']:.3f}\n{both}\n\n{alone}")  # fmt: skip
    if args.pages is not None:
        both.to_html(args.pages / f"{title.replace(' ', '_')}.html")
    if args.picture is not None and title == "small networks":
        draw_figure(args.picture, both)
    return {"accuracy": accuracy, "in_distribution_and_ood": both.to_dict(), "ood": alone.to_dict() | deciles(alone)}


def deciles(result: EnsembleDiagnosis) -> dict:
    """Deciles of MI on OOD images, by size of sub-ensembles: the histogram of Fig. 2a in ten numbers."""
    shares = np.linspace(0.1, 0.9, 9)
    (one,) = result.ensembles
    return {
        "deciles": {str(size): np.quantile(mi.numpy(), shares).round(5).tolist() for size, mi in one.scores.items()}
    }


def draw_figure(to: Path, result: EnsembleDiagnosis) -> None:
    """Both panels: MI of OOD images, and its AUROC, by size of sub-ensembles."""
    figure, axes = new_figure(1, 2, width=4.4, height=3.2)
    left, right = axes[0]
    (one,) = result.ensembles
    edges = np.geomspace(1e-4, max(float(one.ood_scores[1].max()), 1e-3), 41)
    for number, level in enumerate(one.levels):
        shade = 1 - number / len(one.levels)
        mi = one.ood_scores[level.size].clamp(float(edges[0]), float(edges[-1])).numpy()
        left.hist(mi, edges, histtype="step", color=(0.1 + 0.7 * (1 - shade), 0.3, 0.6 * shade), label=str(level))
    values = [level.auroc for level in one.levels if level.auroc is not None]
    low, high = zip(*((auc.value - auc.low, auc.high - auc.value) for auc in values), strict=True)
    sizes = [level.size for level in one.levels]
    right.errorbar(sizes, [auc.value for auc in values], (low, high), fmt="o-", color=COLOURS[0], capsize=3)
    left.set(title=f"MI of {one.ood} (nats)", xscale="log", yticks=[])
    left.legend(frameon=False, fontsize="x-small", loc="upper left")
    right.set(title=f"AUROC of MI, {one.ood} against {one.name}", xscale="log", xlabel="size of sub-ensembles")
    right.set_xticks(sizes, [str(size) for size in sizes])
    right.minorticks_off()
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=130)


def accuracies(in_distribution: dubito.Table) -> dict:
    """Of every member, and of their mean."""
    logits, label = in_distribution.whole("members_logit").float(), in_distribution.label
    stream = MemberStream()
    stream.add(logits)
    right = (logits.argmax(-1) == label[:, None]).double().mean(0)
    return {"members": right.tolist(), "together": float((stream.probs().argmax(1) == label).double().mean())}


def member(folder: Path, seed: int, train: tuple[Tensor, Tensor], epochs: int) -> nn.Sequential:
    """From the folder if it is there, otherwise trained and put there."""
    path = folder / f"small_{len(train[0])}images_epochs{epochs}_seed{seed}.safetensors"
    module = network(seed)
    if path.exists():
        module.load_state_dict(load_file(path))
        return module.eval()
    spent = time.process_time()
    module = trained(module, *train, epochs, seed)
    print(f"member {seed}: {time.process_time() - spent:.0f} core-seconds")
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({key: value.contiguous() for key, value in module.state_dict().items()}, part)
    part.rename(path)
    return module


def network(seed: int) -> nn.Sequential:
    """Three convolutions, 4 x 4 x 128, their mean, ten classes."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return module.to(memory_format=torch.channels_last)


def trained(module: nn.Sequential, x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Sequential:
    """The same module in eval mode; the rate rises for a fifth of the steps and falls to nothing."""
    steps = epochs * -(-len(x) // BATCH)
    step = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)
    rate = torch.optim.lr_scheduler.OneCycleLR(step, 4 * RATE, total_steps=steps, pct_start=0.2, cycle_momentum=False)
    module.train()
    with kept_memory(), bar(f"member {seed}", epochs * len(x)) as advance:
        for epoch in range(epochs):
            draw = torch.Generator().manual_seed(1000 * seed + epoch)
            for rows in torch.randperm(len(x), generator=draw).split(BATCH):
                with torch.autocast("cpu", torch.bfloat16):
                    logits = module(moved(x[rows], draw))
                loss = F.cross_entropy(logits.float(), y[rows])
                step.zero_grad()
                loss.backward()
                step.step()
                rate.step()
                advance(len(rows))
    return module.eval()


def moved(x: Tensor, draw: torch.Generator) -> Tensor:
    """Shifted by up to four pixels, the batch as a whole, and mirrored, half of the images."""
    down, right = torch.randint(-4, 5, (2,), generator=draw).tolist()
    x = F.pad(x, (4, 4, 4, 4))[:, :, 4 + down : 36 + down, 4 + right : 36 + right]
    mirrored = torch.rand(len(x), generator=draw) < 0.5
    return torch.where(mirrored[:, None, None, None], x.flip(3), x).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def logits_of(module: nn.Module, x: Tensor) -> Tensor:
    """In blocks, in float32."""
    return torch.cat([module(part.contiguous(memory_format=torch.channels_last)) for part in x.split(500)])


def pixels(images: np.ndarray) -> Tensor:
    """(n, 3, 32, 32), normalised."""
    return ((torch.from_numpy(images).float() / 255 - MEAN) / DEVIATION).movedim(3, 1).contiguous()


def digits(data: Path) -> np.ndarray:
    """SVHN: one tall picture of all digits."""
    return np.array(Image.open(data / "svhn_test_dev5000" / "images.png")).reshape(-1, 32, 32, 3)


if __name__ == "__main__":
    main()
