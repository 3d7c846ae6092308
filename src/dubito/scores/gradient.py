"""How far an image would move the weights: norms of gradients in all layers, from the columns of the gradient probe.

    regrad               sum_l lambda_l s_l,  s_l one of
                         fisher       sum_y p_y ||grad_l log p_y||_2^2          the trace of its Fisher information
                         root         sum_y sqrt(p_y) ||grad_l log p_y||_2
                         expected_l1  sum_y p_y ||grad_l log p_y||_1            ExGrad
    predicted_gradient   sum_l lambda_l ||grad_l log p_yhat||_2^2,              yhat the predicted class

Wang & Ji 2024 (arXiv 2404.10124), REGrad: a class weighting by roots, layers weighed exponentially in their depth, and
gradients averaged over noisy copies of the image, which the probe does. Which class weighting is the paper's own, and
its beta, are OPEN: we could not find them stated. `fisher` is our default, because the theory is about it. ExGrad is
that of Igoe et al. 2022. What the last layer alone tells, without a backward pass, is in `last_layer_gradient`.
"""

from dataclasses import dataclass
from typing import final, get_args

from dubito.choices import ClassWeighting
from dubito.errors import ValueRangeError
from dubito.scores._layers import BETA, Layers, ScoreOfLayers

SUFFIXES: dict[str, str] = {"fisher": "", "root": "_root", "expected_l1": "_l1"}
"""How the column of a class weighting is called, after the probe's name."""


@final
@dataclass
class REGrad(ScoreOfLayers):
    """How far an image would move the weights of all layers, whichever class it is of.

    Attributes:
        weighting: Of the classes: "fisher", "root" or "expected_l1". Which of them is the paper's is open.
        layers: "exponential": lambda_l = exp(beta (d + 1) / L) / exp(beta) at depth d = 0 ... L - 1. "uniform": all
            alike. "kept": all that a truncated probe has written, alike. Or a weight for each layer of the column.
        beta: Of exponential weights; 0 weighs all layers alike, a large one leaves the last alone. The paper's value is
            open, and 4 is no more than a start: `tune_regrad` chooses one for your model, on images that it knows.
        of: The name of the gradient probe, which is that of its first column.
    """

    weighting: ClassWeighting = "fisher"
    layers: Layers = "exponential"
    beta: float = BETA
    of: str = "gradient"

    name = "regrad"
    kind = "epistemic"
    needs = ("gradient",)

    def __post_init__(self) -> None:
        check_weighting(self.weighting, self.name)
        super().__post_init__()

    @property
    def column(self) -> str:
        """That of the class weighting."""
        return self.of + SUFFIXES[self.weighting]


@final
@dataclass
class PredictedGradient(ScoreOfLayers):
    """How far an image would move the weights of all layers if it were of the class that the model says.

    Attributes:
        layers: See `REGrad`.
        beta: See `REGrad`.
        of: See `REGrad`.
    """

    layers: Layers = "exponential"
    beta: float = BETA
    of: str = "gradient"

    name = "predicted_gradient"
    kind = "epistemic"
    needs = ("gradient_predicted",)

    @property
    def column(self) -> str:
        """That of the predicted class."""
        return f"{self.of}_predicted"


def check_weighting(weighting: str, by: str) -> None:
    """Raise ValueRangeError for a class weighting that there is not."""
    if weighting not in get_args(ClassWeighting):
        raise ValueRangeError(f"{by}: weighting must be one of {', '.join(SUFFIXES)}; got '{weighting}'.")
