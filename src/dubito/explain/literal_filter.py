"""The network taken literally as a filter: pour in noise, and look at what comes through with the highest confidence.

    x ~ uniform over {0, 1}^shape;   for every class y, the `top` inputs with argmax p(x) = y and the largest max p(x)

Pearce et al. 2021 (arXiv 2106.04972), section 5.1 and Fig. 7: 2^27 inputs of 9 x 9 pixels. We rank by the log-odds
log p/(1-p) = logit_y - log sum_(j != y) exp(logit_j): the order of max p, but in float32 confident inputs keep apart.
On equal log-odds the earlier draw stays.

Input i is row i mod b of batch i div b, and the bits of a batch are those of a counter-based generator with the key
(seed, batch). So nothing is carried from batch to batch: a run that was killed goes on where its checkpoint was, the
inputs of the winners are made again from their numbers, and memory does not grow with the draws.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from dubito.cache.runner import kept_memory
from dubito.cache.progress import bar
from dubito.errors import ModelError, ValueRangeError
from dubito.explain._filter_state import BINS, State, read_state, write_state
from dubito.explain.pictures import new_figure
from dubito.models.fingerprint import module_digests
from dubito.models.frozen import frozen
from dubito.types import Classifier, Json, finite

_EVERY = 20.0
"""Seconds between two checkpoints."""


@final
@dataclass(frozen=True)
class LiteralFilter:
    """What came through: print it, draw it, or take it as JSON.

    Attributes:
        name: The model.
        draws: How many inputs it saw.
        seed: Of the draws.
        histogram: By predicted class and confidence, how many inputs: bin j holds max p in [j, j + 1) / BINS.
        log_odds: Of the most confident inputs of each class, falling; -inf where there were fewer.
        draw: The number of each; -1 where there were fewer.
        patterns: The inputs themselves, 0 and 1.
    """

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

    def to_json(self) -> Json:
        """Plain numbers; a pattern as one string of 0 and 1, row after row."""
        found = [int((row >= 0).sum()) for row in self.draw]
        return {
            "name": self.name,
            "draws": self.draws,
            "seed": self.seed,
            "shape": list(self.patterns.shape[2:]),
            "counts": self.counts.tolist(),
            "histogram": self.histogram.sum(0).tolist(),
            "log_odds": [row[:k].tolist() for row, k in zip(self.log_odds, found, strict=True)],
            "draw": [row[:k].tolist() for row, k in zip(self.draw, found, strict=True)],
            "patterns": [
                ["".join(map(str, pattern.flatten().tolist())) for pattern in row[:k]]
                for row, k in zip(self.patterns, found, strict=True)
            ],
            "sentences": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """What the numbers mean."""
        most = int(self.counts.argmax())
        best = self.log_odds[:, 0]
        told = [
            f"Of {self.draws:,} inputs of pure noise, {self.share_above(0.9):.2%} have a confidence of 0.9 or more, "
            f"{self.share_above(0.5):.2%} of 0.5 or more.",
            f"{int(self.counts[most]) / self.draws:.1%} are taken for class {most}.",
        ]
        missing = (self.counts == 0).nonzero()[:, 0].tolist()
        if missing:
            told.append(f"No input was taken for {_listed(missing)}.")
        certain = (best >= math.log(1e4)).nonzero()[:, 0].tolist()
        told.append(
            f"An input with a confidence of 0.9999 or more came for {_listed(certain)}."
            if certain
            else "No input reached a confidence of 0.9999."
        )
        return told

    def figure(self, classes: Sequence[str] | None = None, *, most: int = 8) -> Any:
        """Fig. 7 as a matplotlib figure: one row a class, its most confident inputs from left to right."""
        _check_drawable(self.patterns)
        columns = min(most, self.patterns.shape[1])
        figure, axes = new_figure(len(self.patterns), columns, width=0.9, height=1.0)
        for y, row in enumerate(axes):
            row[0].set_ylabel(str(y) if classes is None else classes[y], rotation=0, labelpad=12, va="center")
            for k, panel in enumerate(row):
                panel.set(xticks=[], yticks=[])
                if self.draw[y, k] >= 0:
                    panel.imshow(self.patterns[y, k].reshape(self.patterns.shape[-2:]).numpy(), cmap="gray_r")
                    panel.set_title(f"{float(self.confidence[y, k]):.3f}", fontsize="xx-small", pad=2)
        return figure

    def __str__(self) -> str:
        return "\n".join([f"{self.name} as a filter of {self.draws:,} inputs", *self.sentences()])


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
        shape: Of one input; two numbers are an image with one channel.
        draws: How many inputs.
        top: How many to keep of each class.
        batch: Inputs in one pass of the network; part of what is drawn.
        seed: Of the draws.
        checkpoint: A file that is replaced every twenty seconds. The same call goes on from it and ends with the same
            bits; a call with more draws goes on as well.
        progress: Show a bar.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    >>> _ = nn.init.constant_(net[1].weight[0], 1.0), nn.init.zeros_(net[1].weight[1])
    >>> found = literal_filter(net, (2, 2), draws=200, top=1)
    >>> found.patterns[0, 0].tolist(), found.log_odds[0].tolist()  # four pixels, one logit each
    ([[1, 1], [1, 1]], [4.0])
    """
    _check(shape, seed, draws=draws, top=top, batch=batch)
    module, run, place, name = _runner(model)
    kept = None if checkpoint is None else Path(checkpoint)
    identity = {"shape": list(shape), "top": top, "batch": batch, "seed": seed}
    if kept is not None:
        identity["weights"] = module_digests(module)["weights"]
    state = State() if kept is None else read_state(kept, identity, draws)
    saved = time.monotonic()
    with frozen(module), kept_memory(), bar("filter", draws, done=state.done, unit="inputs", show=progress) as advance:
        while state.done < draws:
            index, offset = divmod(state.done, batch)
            x = binary_inputs(shape, batch, seed=seed, index=index)[offset : draws - index * batch]
            state.add(_logits(run(_as_image(x).to(place)), len(x), name), top)
            advance(len(x))
            if kept is not None and (state.done >= draws or time.monotonic() - saved >= _EVERY):
                write_state(kept, identity, state)
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


def _runner(model: nn.Module | Classifier) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor, str]:
    """The module, how to get logits, a number where and as it reads them, and its name."""
    if isinstance(model, nn.Module):
        return model, model, _place(model), type(model).__name__
    place = _place(model.module).to(model.device)
    return model.module, lambda x: model.logits(model.features(x)), place, model.name


def _place(module: nn.Module) -> Tensor:
    """Half-precision modules take half-precision inputs: like their first weight, where there is one."""
    weights = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.is_floating_point()]
    return torch.zeros((), dtype=weights[0].dtype, device=weights[0].device) if weights else torch.zeros(())


def _as_image(x: Tensor) -> Tensor:
    return x[:, None] if x.dim() == 3 else x


def _logits(output: Any, n: int, name: str) -> Float[Tensor, "n c"]:
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[0] != n or output.shape[1] < 2:
        came = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"literal_filter: {name} must return logits (n, c) of two classes or more; for {n} inputs {came} came. "
            f"Wrap it in a module that does."
        )
    return finite(output.float().cpu(), f"literal_filter: logits of {name}")


def _patterns(draw: Int64[Tensor, "c k"], shape: tuple[int, ...], batch: int, seed: int) -> UInt8[Tensor, "c k ..."]:
    """The inputs behind the numbers, each batch made once more; zeros where there is none."""
    found = torch.zeros(*draw.shape, *shape, dtype=torch.uint8)
    index = torch.where(draw >= 0, draw.div(batch, rounding_mode="floor"), -1)
    for i in sorted(set(index.flatten().tolist())):
        if i >= 0:
            where = index == i
            found[where] = binary_inputs(shape, batch, seed=seed, index=i)[draw[where] % batch]
    return found


def _check(shape: tuple[int, ...], seed: int, **counts: int) -> None:
    bad = [f"{key}={value}" for key, value in counts.items() if value < 1]
    if not shape or min(shape) < 1:
        bad.append(f"shape={shape}")
    if seed < 0:
        bad.append(f"seed={seed}")
    if bad:
        raise ValueRangeError(
            f"literal_filter needs draws, top, batch and every side of shape to be at least 1, and a seed that is not "
            f"negative; got {', '.join(bad)}. The paper has 2**27 draws of shape (9, 9)."
        )


def _check_drawable(patterns: UInt8[Tensor, "c k ..."]) -> None:
    shape = tuple(patterns.shape[2:])
    if len(shape) < 2 or math.prod(shape[:-2]) != 1:
        raise ValueRangeError(
            f"a figure of the filter needs inputs of one picture each; got shape {shape}. Draw `patterns` yourself."
        )


def _listed(classes: Sequence[int]) -> str:
    few = ", ".join(map(str, classes[:10])) + (" and more" if len(classes) > 10 else "")
    return f"class {few}" if len(classes) == 1 else f"{len(classes)} classes ({few})"
