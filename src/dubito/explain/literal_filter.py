"""The network taken literally as a filter: pour in noise, and look at what comes through with the highest confidence.

    x ~ uniform over {0, 1}^shape;   for every class y, the `top` inputs with argmax p(x) = y and the largest max p(x)

Pearce et al. 2021 (arXiv 2106.04972), section 5.1 and Fig. 7: 2^27 inputs of 9 x 9 pixels. We rank by the log-odds
log p/(1-p) = logit_y - log sum_(j != y) exp(logit_j): the order of max p, but in float32 confident inputs keep apart.
On equal log-odds the earlier draw stays.

Input i is row i mod b of batch i div b, and the bits of a batch are those of a counter-based generator with the key
(seed, batch). So a killed run resumes from its checkpoint, and the inputs of winners are made again from their numbers.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from dubito.cache.disk import differing_parts
from dubito.cache.runner import bar, kept_memory
from dubito.errors import ArtefactError, ModelError, ValueRangeError
from dubito.explain.pictures import new_figure
from dubito.models.frozen import frozen
from dubito.models.weights import module_digests
from dubito.result import Axes, Result
from dubito.storage import read_tensors, reading, to_path, write_tensors
from dubito.types import Classifier, Json, finite
from dubito.validate import check_number, check_seed

BINS = 100
"""Of max p, from 0 to 1."""
_EVERY = 20.0
"""Seconds between two checkpoints."""
_PARTS = {"weights": "the model", "shape": "the shape", "top": "top", "batch": "the batch", "seed": "the seed"}


@final
@dataclass(frozen=True)
class LiteralFilter(Result):
    """What passed the filter: print it, plot it, or take it as JSON.

    Attributes:
        name: The name of the model.
        draws: How many inputs it saw.
        seed: The seed of the draws.
        histogram: By predicted class and confidence, how many inputs: bin j holds max p in [j, j + 1) / BINS.
        log_odds: Of the most confident inputs of each class, falling; -inf where there were fewer.
        draw: The number of each; -1 where there were fewer.
        patterns: The inputs themselves, 0 and 1.
    """

    titles: ClassVar[Mapping[str, str]] = {"confidence": "highest confidence"}

    name: str
    draws: int
    seed: int
    histogram: Int64[Tensor, "c bins"] = field(repr=False)
    log_odds: Float[Tensor, "c k"] = field(repr=False)
    draw: Int64[Tensor, "c k"] = field(repr=False)
    patterns: UInt8[Tensor, "c k ..."] = field(repr=False)

    @property
    def counts(self) -> Int64[Tensor, "c"]:
        """How many inputs each class was predicted for."""
        return self.histogram.sum(1)

    @property
    def confidence(self) -> Float[Tensor, "c k"]:
        """The largest probability of the most confident inputs; exactly 1 where float32 cannot tell."""
        return self.log_odds.sigmoid()

    def share_above(self, confidence: float) -> float:
        """Which share of all inputs has max p in the bins from a confidence on."""
        return float(self.histogram[:, math.ceil(confidence * BINS - 1e-9) :].sum()) / self.draws

    def title(self) -> str:
        """The model and the number of inputs."""
        return f"{self.name} as a filter of {self.draws:,} inputs"

    def records(self) -> list[dict[str, Any]]:
        """One row per class: how many inputs it was predicted for, and the highest confidence among them."""
        rows = zip(self.counts.tolist(), self.confidence[:, 0].tolist(), strict=True)
        return [
            {"class": y, "inputs": count, "share": count / self.draws, "confidence": best if count else None}
            for y, (count, best) in enumerate(rows)
        ]

    def findings(self) -> list[str]:
        """What the numbers mean."""
        most = int(self.counts.argmax())

        def listed(which: Tensor) -> str:
            names = ", ".join(map(str, which.nonzero()[:10, 0].tolist()))
            return f"{int(which.sum())} of {len(which)}" + (f" ({names})" if names else "")

        return [
            f"Of {self.draws:,} inputs of pure noise, {self.share_above(0.9):.2%} have a confidence of 0.9 or more, "
            f"{self.share_above(0.5):.2%} of 0.5 or more.",
            f"{int(self.counts[most]) / self.draws:.1%} are classified as class {most}.",
            f"Classes that no input was classified as: {listed(self.counts == 0)}.",
            f"Classes with a confidence of 0.9999 or more: {listed(self.log_odds[:, 0] >= math.log(1e4))}.",
        ]

    def to_dict(self) -> Json:
        """Plain values; a pattern as one string of 0 and 1, row after row."""
        kept = [row >= 0 for row in self.draw]
        return {
            **super().to_dict(),
            "shape": list(self.patterns.shape[2:]),
            "counts": self.counts.tolist(),
            "histogram": self.histogram.sum(0).tolist(),
            "log_odds": [row[k].tolist() for row, k in zip(self.log_odds, kept, strict=True)],
            "draw": [row[k].tolist() for row, k in zip(self.draw, kept, strict=True)],
            "patterns": [
                ["".join(map(str, pattern.flatten().tolist())) for pattern in row[k]]
                for row, k in zip(self.patterns, kept, strict=True)
            ],
        }

    def plot(self, classes: Sequence[str] | None = None, *, most: int = 8) -> list[Axes]:
        """Fig. 7: one row of panels per class, its most confident inputs from left to right."""
        shape = tuple(self.patterns.shape[2:])
        if len(shape) < 2 or math.prod(shape[:-2]) != 1:
            raise ValueRangeError(
                f"LiteralFilter.plot needs inputs of one picture each; got shape {shape}. Draw `patterns` yourself."
            )
        _, grid = new_figure(len(self.patterns), min(most, self.patterns.shape[1]), width=0.9, height=1.0)
        for y, row in enumerate(grid):
            row[0].set_ylabel(str(y) if classes is None else classes[y], rotation=0, labelpad=12, va="center")
            for k, panel in enumerate(row):
                panel.set(xticks=[], yticks=[])
                if self.draw[y, k] >= 0:
                    panel.imshow(self.patterns[y, k].reshape(self.patterns.shape[-2:]).numpy(), cmap="gray_r")
                    panel.set_title(f"{float(self.confidence[y, k]):.3f}", fontsize="xx-small", pad=2)
        return list(grid.flatten())


def literal_filter(
    model: nn.Module | Classifier,
    shape: tuple[int, ...] = (9, 9),
    *,
    draws: int = 2**27,
    top: int = 16,
    batch: int = 2048,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> LiteralFilter:
    """Run uniform binary inputs through a network and keep the most confident ones of every predicted class.

    Args:
        model: A classifier, or a module that returns logits (n, c). It reads zeros and ones as they are, in
            the precision of its weights: put whatever scales them in front of it.
        shape: Shape of one input; two numbers are an image with one channel.
        draws: How many inputs to draw.
        top: How many inputs to keep of each class.
        batch: How many inputs pass through the network at once; it determines what is drawn.
        seed: Seed of the draws.
        checkpoint: A file that is replaced every twenty seconds. The same call resumes from it and ends with the same
            bits; so does a call with more draws.
        progress: Show a progress bar.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    >>> _ = nn.init.constant_(net[1].weight[0], 1.0), nn.init.zeros_(net[1].weight[1])
    >>> result = literal_filter(net, (2, 2), draws=200, top=1)
    >>> result.patterns[0, 0].tolist(), result.log_odds[0].tolist()  # four pixels, one logit each
    ([[1, 1], [1, 1]], [4.0])
    """
    sizes = {"draws": draws, "top": top, "batch": batch, "every side of shape": min(shape, default=0)}
    for what, size in sizes.items():
        hint = "The paper has 2**27 draws of shape (9, 9)."
        check_number(size, "[1, inf)", by="literal_filter", what=what, whole=True, hint=hint)
    check_seed(seed, by="literal_filter")
    module, name, run = _network(model)
    kept = None if checkpoint is None else to_path(checkpoint, "checkpoint")
    identity = {"shape": list(shape), "top": top, "batch": batch, "seed": seed}
    if kept is not None:
        identity["weights"] = module_digests(module)["weights"]
    state = FilterState() if kept is None else _read_state(kept, identity, draws)
    saved = time.monotonic()
    with kept_memory(), bar("filter", draws, done=state.done, unit="inputs", show=progress) as advance:
        while state.done < draws:
            index, offset = divmod(state.done, batch)
            x = binary_inputs(shape, batch, seed=seed, index=index)[offset : draws - index * batch]
            with frozen(module):
                output = run(x)
            state.add(output, top)
            advance(len(x))
            if kept is not None and (state.done >= draws or time.monotonic() - saved >= _EVERY):
                kept.parent.mkdir(parents=True, exist_ok=True)
                tensors = {key: value for key, value in vars(state).items() if isinstance(value, Tensor)}
                write_tensors(kept, tensors, {"identity": identity, "done": state.done})
                saved = time.monotonic()
    patterns = _patterns(state.draw, shape, batch, seed)
    return LiteralFilter(name, draws, seed, state.histogram, state.log_odds, state.draw, patterns)


def binary_inputs(shape: tuple[int, ...], batch: int, *, seed: int = 0, index: int = 0) -> UInt8[Tensor, "n ..."]:
    """One batch of uniform binary inputs, by its number: 64 bits of a Philox generator at a time, unpacked.

    >>> binary_inputs((3, 3), 2, index=7).shape
    torch.Size([2, 3, 3])
    """
    bits = batch * math.prod(shape)
    words = np.random.Philox(key=np.array([seed, index], dtype=np.uint64)).random_raw(-(-bits // 64))
    packed = words.astype("<u8", copy=False).view(np.uint8)  # the same bits on machines of the other byte order
    return torch.from_numpy(np.unpackbits(packed, count=bits)).view(batch, *shape)


def _network(model: nn.Module | Classifier) -> tuple[nn.Module, str, Callable[[Tensor], Tensor]]:
    """The module, its name, and a function from inputs to logits."""
    module, name = (model, type(model).__name__) if isinstance(model, nn.Module) else (model.module, model.name)
    # Half-precision modules take half-precision inputs: like their first weight, where there is one.
    weights = (tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.is_floating_point())
    like = next(weights, torch.zeros(()))
    device = like.device if isinstance(model, nn.Module) else model.device

    def run(x: UInt8[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
        inputs = (x[:, None] if x.dim() == 3 else x).to(device, like.dtype)
        output: Any = model(inputs) if isinstance(model, nn.Module) else model.logits(model.features(inputs))
        if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[0] != len(x) or output.shape[1] < 2:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ModelError(
                f"literal_filter: {name} must return logits (n, c) of two classes or more; got {got} for {len(x)} "
                f"inputs. Wrap it in a module that does."
            )
        return finite(output.float().cpu(), f"literal_filter: logits of {name}")

    return module, name, run


def _patterns(draw: Int64[Tensor, "c k"], shape: tuple[int, ...], batch: int, seed: int) -> UInt8[Tensor, "c k ..."]:
    """The inputs behind the numbers, each batch made once more; zeros where there is none."""
    inputs = torch.zeros(*draw.shape, *shape, dtype=torch.uint8)
    index = draw.div(batch, rounding_mode="floor")
    for i in sorted(set(index[draw >= 0].tolist())):
        where = index == i
        inputs[where] = binary_inputs(shape, batch, seed=seed, index=i)[draw[where] % batch]
    return inputs


def log_odds(logits: Float[Tensor, "n c"]) -> tuple[Float[Tensor, "n"], Int64[Tensor, "n"]]:
    """The log-odds of the predicted class, and the class; the first of equal logits is predicted.

    >>> odds, label = log_odds(torch.tensor([[0.0, 60.0], [50.0, 0.0]]))  # max p is 1.0 for both in float32
    >>> odds.tolist(), label.tolist()
    ([60.0, 50.0], [1, 0])
    """
    highest, label = logits.max(1)
    others = logits.scatter(1, label[:, None], -math.inf)
    return highest - others.logsumexp(1), label


@final
class FilterState:
    """How far a run has come: the most confident inputs of each class so far."""

    def __init__(self) -> None:
        self.done = 0
        self.histogram = torch.zeros(0, BINS, dtype=torch.int64)
        self.log_odds = torch.zeros(0, 0)
        self.draw = torch.zeros(0, 0, dtype=torch.int64)

    def add(self, logits: Float[Tensor, "n c"], top: int) -> None:
        """Count the next inputs."""
        classes = logits.shape[1]
        if not len(self.histogram):
            self.histogram = torch.zeros(classes, BINS, dtype=torch.int64)
            self.log_odds = torch.full((classes, top), -math.inf)
            self.draw = torch.full((classes, top), -1, dtype=torch.int64)
        odds, label = log_odds(logits)
        place = (odds.sigmoid() * BINS).long().clamp(max=BINS - 1)
        self.histogram += torch.bincount(label * BINS + place, minlength=classes * BINS).view(classes, BINS)
        rising = (odds > self.log_odds[label, -1]).nonzero()[:, 0]
        for y in sorted(set(label[rising].tolist())):
            rows = rising[label[rising] == y]
            merged = torch.cat([self.log_odds[y], odds[rows]])
            numbers = torch.cat([self.draw[y], self.done + rows])
            best = merged.argsort(descending=True, stable=True)[:top]  # stable: earlier draws stand first
            self.log_odds[y], self.draw[y] = merged[best], numbers[best]
        self.done += len(logits)


def _read_state(path: Path, identity: Json, draws: int) -> FilterState:
    """The state in a checkpoint, or a new one; ArtefactError if it is another run's or cannot be read."""
    state = FilterState()
    if not path.exists():
        return state
    with reading(f"'{path}'", "Delete it to filter from the beginning."):
        tensors, notes = read_tensors(path)
        state.done = int(notes["done"])
        state.histogram, state.log_odds, state.draw = (tensors[key] for key in ("histogram", "log_odds", "draw"))
        differing = differing_parts(_PARTS, notes["identity"], identity)
    if state.done > draws:
        differing.append(f"the draws ({state.done} there, {draws} here)")
    if differing:
        raise ArtefactError(
            f"'{path}' holds another filter run: {'; '.join(differing)}. Name another file, or delete this one."
        )
    return state
