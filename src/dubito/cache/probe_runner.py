"""Probes on one batch: what they write is checked, and a model that answers at random is refused.

    change = mean |logit' - logit| / std(logit)        two passes over the same images, under two seeds

Above 1e-3, or 1e-2 in half precision, it is random: far above rounding, far below what any random layer does.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.errors import ModelError, NondeterministicModelWarning, TableError, ValueRangeError
from dubito.models.from_onnx import OnnxNetwork
from dubito.threads import seeded
from dubito.types import BaseProbe, Classifier, Inputs, Mixed, Probe, SharingProbe, Targets, has_logits

Columns = dict[str, Tensor]
ROW_COLUMNS = ("id", "label", "epoch", "image_index")
"""What the loop itself knows of every row; no probe may write these."""


@final
class ProbeRunner:
    """Runs probes on batches and checks what they write: one owner per column, one row per image, finite values.

    Args:
        model: The model that the probes run.
        probes: The probes by name.
        owners: Columns that exist already, with the name of who writes each.
        steady: Whether the model is known to predict the same in every pass; otherwise the first batch shows it.

    Attributes:
        current: The probe that runs at the moment; after an error, the one that raised it.
    """

    def __init__(
        self,
        model: Classifier,
        probes: Mapping[str, Probe],
        owners: Mapping[str, str] | None = None,
        *,
        steady: bool = True,
    ) -> None:
        further = [name for name, probe in probes.items() if not isinstance(probe, BaseProbe)]
        if further and isinstance(model.module, OnnxNetwork):
            raise ModelError(
                f"probe '{further[0]}' needs the layers of {model.name}, which an ONNX graph does not have. Load the "
                f"model that it was exported from."
            )
        self.model, self.probes = model, dict(probes)
        self._steady = steady
        self._owners = {**(owners or {}), **dict.fromkeys(ROW_COLUMNS, "extract")}
        self._written: dict[str, set[str]] = {}
        self.current: str | None = None

    def run(
        self,
        x: Inputs,
        ids: Sequence[str],
        *,
        names: Sequence[str] | None = None,
        target: Targets | None = None,
        mixed: Mixed | None = None,
    ) -> dict[str, Columns]:
        """The columns of each probe, on the CPU.

        Args:
            x: The model's inputs.
            ids: Names of the images, for errors.
            names: Probes to run; all by default.
            target: What the task loss compares the logits with.
            mixed: Of images that are mixed from two: the other one's target, and the weight of the first.
        """
        if not self._steady:
            check_steady(self.model, x)
            self._steady = True
        chosen = {name: self.probes[name] for name in (self.probes if names is None else names)}
        label = target if mixed is None else None  # two images in one have no class of their own
        shared: dict[str, Mapping[str, Tensor]] = {}
        feature = None
        sharing = next(((name, probe) for name, probe in chosen.items() if isinstance(probe, SharingProbe)), None)
        if sharing and any(isinstance(probe, BaseProbe) for probe in chosen.values()):  # one pass for both
            self.current = sharing[0]
            shared[sharing[0]], feature = sharing[1].run_and_share(self.model, x, label)
        written: dict[str, Columns] = {}
        for name, probe in chosen.items():
            self.current = name
            if name in shared:
                columns = shared[name]
            elif isinstance(probe, BaseProbe):
                columns = probe.run(self.model, x, target, mixed=mixed, feature=feature)
            else:
                columns = probe.run(self.model, x, label)
            written[name] = {key: value.detach().cpu() for key, value in columns.items()}
            self._check(name, written[name], ids)
        self.current = None
        return written

    def _check(self, name: str, columns: Mapping[str, Tensor], ids: Sequence[str]) -> None:
        usual = self._written.setdefault(name, set(columns))
        if set(columns) != usual:
            raise TableError(
                f"probe {name} must write the same columns for every batch; got {', '.join(sorted(usual))} before and "
                f"{', '.join(sorted(columns))} from image '{ids[0]}' on. Write the same columns for all images."
            )
        for key, column in columns.items():
            owner = self._owners.setdefault(key, name)
            if owner != name:
                raise TableError(
                    f"probe {name} writes column '{key}', which {owner} writes already. Rename the column."
                )
            if column.shape[:1] != (len(ids),):
                raise TableError(
                    f"probe {name} must write one row per image; got column '{key}' of shape {tuple(column.shape)} for "
                    f"{len(ids)} images. Return (n, ...) tensors."
                )
            bad = ~torch.isfinite(column.flatten(1) if column.dim() > 1 else column[:, None]).all(1)
            if bad.any():
                row = int(bad.nonzero()[0, 0])
                what = f"the model gives NaN or infinite values in '{key}'. Look at its weights, at the transform"
                if key == "loss":  # which may fail where the model does not
                    what = f"the task loss is {float(column[row])}. Look at task_loss, at the target, at the logits"
                raise ValueRangeError(
                    f"image '{ids[row]}': {what} and at that image; an extraction keeps its finished shards."
                )


def check_steady(model: Classifier, x: Inputs) -> None:
    """Raise ModelError for a model that answers at random, which half of a batch shows, run twice under two seeds.

    Where no more than rounding differs, as between some kernels of GPUs, it is a warning.
    """
    x = x[: -(-len(x) // 2)]
    passes = []
    for seed in (1, 2):
        with seeded(seed, {model.device, x.device}):
            z = model.features(x)
            passes.append((model.logits(z) if has_logits(model) else z).cpu())
    first, again = passes
    if torch.equal(first, again) or not bool(first.isfinite().all()):  # of infinite ones, the image is named later
        return
    change = logit_change(first, again)
    differing = (
        f"{model.name} predicts something else in every pass: two passes over the same {len(x)} images give logits "
        f"that differ by {change:.1%} of their standard deviation"
    )
    if not is_random(first, again):
        warnings.warn(
            f"{differing} at most, as from operations that round differently each time. Two extractions of the same "
            f"images will not be equal to the last bit; torch.use_deterministic_algorithms(True) makes them so.",
            NondeterministicModelWarning,
            stacklevel=2,
        )
        return
    raise ModelError(
        f"{differing}, also in eval mode, so a cache would hold noise. Look for dropout that is always on, such as "
        f"F.dropout(x) without training=self.training, and for random augmentation in its forward; for uncertainty by "
        f"dropout, pass probes=[Dropout()], which turns it on itself."
    )


def is_random(first: Float[Tensor, "n c"], again: Float[Tensor, "n c"]) -> bool:
    """Whether logits of the same images differ from pass to pass by more than rounding explains."""
    return logit_change(first, again) > (1e-3 if first.dtype in (torch.float32, torch.float64) else 1e-2)


def logit_change(before: Float[Tensor, "n c"], after: Float[Tensor, "n c"]) -> float:
    """Mean change of a logit, as a share of the logits' standard deviation."""
    spread = float(before.double().std(correction=0))
    change = float((after.double() - before.double()).abs().mean())
    return change / spread if spread > 0 else change
