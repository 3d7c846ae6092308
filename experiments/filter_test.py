"""A network as a literal filter: which of 134 million noise pictures does it find most like a digit? Fig. 7.

    python experiments/filter_test.py --more-data DIR [--draws 134217728] [--epochs 15] [--figure FILE] [--write]

Pearce et al. (2021), section 5.1 and C.4.2. DIR holds MNIST/raw (the idx files, as torchvision lays them). Digits are
averaged to 9 x 9 pixels and binarised at 0.3 (the paper does not say how; at 0.5 thin strokes are lost). A network of
three convolutions is trained on them and then sees uniform binary noise; the most confident inputs of each class are
kept. With --checkpoint FILE, a run that was ended goes on.

The paper shows the patterns and says that they "contain features reminiscent of the training data". To have a number,
every pattern is also read without the network: which class's mean training digit correlates with it most? `agreement`
is how many of the top patterns are read as the network reads them. Beside it stands the same for all noise, which is
what one gets without choosing by confidence; chance is one in ten. The last line is one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from _expected import write_expected
from _small_nets import Half, logits_of, nine_by_nine, read, trained
from torch import Tensor

from dubito.explain.literal_filter import LiteralFilter, binary_inputs, literal_filter

EXPECTED = Path(__file__).parent / "expected" / "filter_test.json"
SIDE, THRESHOLD, PLAIN = 9, 0.3, 2**16


def main() -> None:
    """Train, filter, read the patterns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=2**27)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--limit", type=int, help="training images; by default all")
    parser.add_argument("--top", type=int, default=16, help="patterns to keep of each class")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="a file to go on from")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    train = small(read(args.more_data, "MNIST", train=True, limit=args.limit))
    test = small(read(args.more_data, "MNIST", train=False))
    module = trained(nine_by_nine(seed=args.seed), train, args.epochs, seed=args.seed)
    logits = logits_of(module, test[0])
    started = time.perf_counter()
    actual = literal_filter(
        module, (SIDE, SIDE), draws=args.draws, top=args.top, seed=args.seed, checkpoint=args.checkpoint
    )
    seconds = time.perf_counter() - started
    noise = binary_inputs((SIDE, SIDE), PLAIN, seed=args.seed + 1)
    result: dict[str, Any] = {
        "settings": {key: getattr(args, key) for key in ("draws", "epochs", "limit", "top", "seed")},
        "test_accuracy": round(float((logits.argmax(1) == test[1]).double().mean()), 4),
        "test_share_above_0.9": round(float((logits.softmax(1).amax(1) >= 0.9).double().mean()), 4),
        "noise_share_above_0.9": actual.share_above(0.9),
        "noise_share_above_0.5": actual.share_above(0.5),
        **reminiscent(actual, means(train), noise, logits_of(module, noise[:, None].float()).argmax(1)),
        "counts": actual.counts.tolist(),
        "best_confidence": [round(float(p), 6) for p in actual.confidence[:, 0]],
        "best_patterns": [row[:4] for row in actual.to_dict()["patterns"]],
    }
    print("\n".join([str(actual), *lines(result)]))
    if args.figure:
        actual.plot()[0].figure.savefig(args.figure, dpi=130)
    if args.write:
        write_expected(EXPECTED, "--more-data DIR", result, published="Fig. 7, pictures")
    print(json.dumps(result | {"filter_seconds": round(seconds, 1)}))


def small(half: Half) -> Half:
    """Digits of 9 x 9 pixels, 0 or 1."""
    return (F.adaptive_avg_pool2d(half[0], SIDE) > THRESHOLD).float(), half[1]


def means(train: Half) -> Tensor:
    """The mean training digit of each class, as rows of pixels."""
    return torch.stack([train[0][train[1] == y].flatten(1).mean(0) for y in range(10)])


def correlations(patterns: Tensor, digits: Tensor) -> Tensor:
    """Of every pattern with every mean digit: noise has far more ink than digits, which this leaves out."""
    rows, columns = (F.normalize(part - part.mean(1, keepdim=True)) for part in (patterns.flatten(1).float(), digits))
    return rows @ columns.T


def reminiscent(result: LiteralFilter, digits: Tensor, noise: Tensor, taken_for: Tensor) -> dict[str, Any]:
    """Top patterns and plain noise, each read by the network and by correlation with mean digits."""
    there = result.draw >= 0
    classes = there.nonzero()[:, 0]
    chosen, plain = correlations(result.patterns[there], digits), correlations(noise, digits)
    return {
        "patterns": len(classes),
        "agreement": round(float((chosen.argmax(1) == classes).double().mean()), 4),
        "agreement_of_noise": round(float((plain.argmax(1) == taken_for).double().mean()), 4),
        "correlation": round(float(chosen.gather(1, classes[:, None]).mean()), 4),
        "correlation_of_noise": round(float(plain.gather(1, taken_for[:, None]).mean()), 4),
        "agreement_by_class": {
            str(y): int((chosen[classes == y].argmax(1) == y).sum()) for y in sorted(set(classes.tolist()))
        },
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The numbers for "reminiscent" in words."""
    return [
        f"Test digits: accuracy {result['test_accuracy']:.2%}, {result['test_share_above_0.9']:.1%} with a confidence "
        f"of 0.9 or more; noise: {result['noise_share_above_0.9']:.2%}.",
        f"Of {result['patterns']} top patterns {result['agreement']:.0%} look most like the mean digit of the class "
        f"that the network sees; of plain noise {result['agreement_of_noise']:.0%}.",
        f"Correlation with that mean digit: {result['correlation']:.2f} against {result['correlation_of_noise']:.2f}.",
    ]


if __name__ == "__main__":
    main()
