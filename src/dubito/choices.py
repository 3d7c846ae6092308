"""What may be chosen by name, each written once: for the rooms that act on it, and for options of the command line.

Nothing is imported here, so that `dubito train --help` need not wait for torch.
"""

from typing import Literal

Kind = Literal["aleatoric", "epistemic", "total"]
LabelSpace = Literal["model", "own"]
Strong = Literal["augmix", "cutmix", "mixup", "blur", "crop", "box"]
KnownLoss = Literal["cross_entropy", "bce"]

LossName = Literal["ranking", "l2", "l1", "log_l2", "variance_nll"]
Target = Literal["given", "expected", "mixed"]
Optimizer = Literal["adamw", "adam", "sgd", "lion"]
Schedule = Literal["cosine", "step", "constant"]
Init = Literal["default", "zero"]

Covariance = Literal["full", "tied", "diagonal", "spherical"]
Space = Literal["z", "log"]
Nonlinearity = Literal["after", "before"]
"""Which features a density reads: those of the last layer, or what lies before their non-linearity."""
Start = Literal["class", "free"]
