"""All tests of models run on one thread and from one seed; a small network and what every wrapped one must do."""

import pytest
import torch
from torch import Tensor, nn

from dubito.models import WrappedClassifier

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Mlp(nn.Module):
    """A hidden layer, a head, and whatever should happen to its output."""

    def __init__(self, classes: int = 3, then=lambda logits: logits, hidden: int = 5) -> None:
        super().__init__()
        self.hidden, self.fc, self.then = nn.Linear(6, hidden), nn.Linear(hidden, classes), then

    def forward(self, x: Tensor):
        return self.then(self.fc(self.hidden(x).relu()))


def check(model: WrappedClassifier, module: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        expected = module.eval()(x)
    assert torch.allclose(model.logits(model.features(x)), expected, atol=1e-6)
