"""Image by image, for what no rule knows: by vmap where it can, else by a loop; the numbers are right either way."""

import pytest
import torch
from torch import nn

from dubito.errors import GradientFallbackWarning
from dubito.gradients import fallback
from tests.gradients.reference import classifier, error, inputs, jacobian, squares_and_totals, swept

pytestmark = pytest.mark.usefixtures("one_thread")


class Bilinear(nn.Module):
    """An operation that torch has and no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.head = nn.Linear(12, 5), nn.Bilinear(5, 5, 6), nn.Linear(6, 4)

    def forward(self, x):
        z = torch.tanh(self.first(x.flatten(1)))
        return self.head(torch.tanh(self.pair(z, z)))


class Choosing(nn.Module):
    """Looks at numbers to decide what to do, which vmap cannot; its scan has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.head = nn.Linear(12, 6), nn.GRUCell(6, 6), nn.Linear(6, 4)
        self.power = nn.Parameter(torch.rand(6) + 1)

    def forward(self, x):
        z = torch.sigmoid(self.first(x.flatten(1)))
        if bool((z.detach() < 0).any()):
            return self.head(z)
        return self.head(self.cell(z**self.power))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.rnn(x.flatten(2).transpose(1, 2))[0][:, -1])


@pytest.mark.parametrize(
    ("make", "named", "looped"),
    [(Bilinear, "pair of net", False), (Choosing, "net .*there is no rule for", True)],
)
@pytest.mark.parametrize("images", [4, 2])
def test_the_numbers_are_right(monkeypatch, make, named, looped, images):
    torch.manual_seed(0)
    module = make().double()
    model, x = classifier(module), inputs(4, 3, 2, 2).double()
    alone, loops = fallback._alone, []
    monkeypatch.setattr(fallback, "_alone", lambda *a: loops.append(1) or alone(*a))
    cotangent = inputs(4, 4, seed=3).double()
    with pytest.warns(GradientFallbackWarning, match=named):
        squares, totals, layers = swept(model, x, cotangent, images)
    assert bool(loops) == looped
    parts = zip(x.unflatten(0, (images, -1)), cotangent.unflatten(0, (images, -1)), strict=True)
    truth = [squares_and_totals(jacobian(module, rows)[1], c, layers) for rows, c in parts]
    assert error(squares, torch.stack([one for one, _ in truth])) < 1e-9
    assert error(totals, torch.stack([one for _, one in truth])) < 1e-9


def test_a_few_images_at_a_time(monkeypatch):
    torch.manual_seed(0)
    model, x = classifier(Bilinear().double()), inputs(5, 3, 2, 2).double()
    cotangent = inputs(5, 4, seed=3).double()
    with pytest.warns(GradientFallbackWarning):
        whole = swept(model, x, cotangent)[0]
    monkeypatch.setattr(fallback, "BYTES", 4 * 2 * (5 * 5 * 6 + 6))
    vmapped, sizes = fallback._vmapped, []
    monkeypatch.setattr(fallback, "_vmapped", lambda *a: sizes.append(len(a[2])) or vmapped(*a))
    with pytest.warns(GradientFallbackWarning):
        torch.testing.assert_close(swept(model, x, cotangent)[0], whole)
    assert sizes == [2, 2, 1]


def test_a_recurrent_layer():
    """A loop of linear layers over time: torch's own rules are enough."""
    torch.manual_seed(0)
    module = Recurrent().double()
    model, x, cotangent = classifier(module), inputs(3, 3, 2, 2).double(), inputs(3, 4, seed=3).double()
    squares, _, layers = swept(model, x, cotangent)
    pairs = zip(x, cotangent, strict=True)
    truth = [squares_and_totals(jacobian(module, row[None])[1], c[None], layers)[0] for row, c in pairs]
    assert error(squares, torch.stack(truth)) < 1e-9
