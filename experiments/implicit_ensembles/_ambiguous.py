"""Ambiguous digits: pictures half-way between two classes, made by a small variational autoencoder.

Mukhoti et al. (2023) decode such pictures from the latent space of an autoencoder and keep those on which classifiers
waver; their files are not at hand, so the same is done here, smaller. Two test digits of different classes are
encoded, the middle of their codes is decoded, and the picture is kept if a network that has no other part in the
study gives each of the two classes at least LEAST. The label is one of the two, by a coin. "Dirty" digits are, as
there, one half plain digits and one half ambiguous ones.
"""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from _mlps import mlp, read, trained
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dubito.cache.runner import bar

CODE, HIDDEN, BATCH, EPOCHS, RATE = 16, 512, 128, 10, 1e-3
LEAST, COUNT, LABELLER = 0.3, 10_000, 1000
"""The smaller probability of the two classes, how many pictures, and the seed of the network that judges."""


class Autoencoder(nn.Module):
    """A variational one, of two layers each way."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 784))

    def forward(self, x: Tensor) -> Tensor:
        """Minus the evidence lower bound, in nats an image."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        drawn = self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())
        wrong = F.binary_cross_entropy_with_logits(drawn, x.flatten(1), reduction="none").sum(1)
        return (wrong + (mean**2 + log_variance.exp() - log_variance - 1).sum(1) / 2).mean()


def dirty_mnist(data: Path, folder: Path) -> tuple[Tensor, Tensor]:
    """The MNIST test set, and as many ambiguous digits."""
    plain, ambiguous = read(data, "MNIST", train=False), ambiguous_mnist(data, folder)
    return torch.cat([plain[0], ambiguous[0]]), torch.cat([plain[1], ambiguous[1]])


def ambiguous_mnist(data: Path, folder: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 28, 28) between 0 and 1, and labels (n); made once and kept in the folder."""
    path = folder / "ambiguous_mnist.safetensors"
    if not path.exists():
        images, labels = made(data)
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file({"images": (255 * images).round().to(torch.uint8), "labels": labels}, part)
        part.rename(path)
    kept = load_file(path)
    return kept["images"].float() / 255, kept["labels"]


@torch.no_grad()
def made(data: Path) -> tuple[Tensor, Tensor]:
    """COUNT ambiguous pictures from pairs of test digits."""
    train, (x, y) = read(data, "MNIST", train=True), read(data, "MNIST", train=False)
    with torch.enable_grad():
        autoencoder = _trained(train[0])
        labeller = trained(mlp(8, seed=LABELLER), *train, 4, seed=LABELLER, title="the judge of ambiguity")
    code = autoencoder.encoder(x)[:, :CODE]
    draw = torch.Generator().manual_seed(0)
    images, labels, result = [], [], 0
    while result < COUNT:
        one, two = torch.randint(len(x), (2, 10_000), generator=draw)
        picture = autoencoder.decoder((code[one] + code[two]) / 2).sigmoid().view(-1, 1, 28, 28)
        p = labeller(picture).softmax(1)
        both = torch.stack([p.gather(1, y[which][:, None])[:, 0] for which in (one, two)])
        good = (y[one] != y[two]) & (both.amin(0) > LEAST)
        coin = torch.rand(len(one), generator=draw) < 0.5
        images.append(picture[good])
        labels.append(torch.where(coin, y[one], y[two])[good])
        result += int(good.sum())
    return torch.cat(images)[:COUNT], torch.cat(labels)[:COUNT]


def _trained(x: Tensor) -> Autoencoder:
    torch.manual_seed(0)
    model = Autoencoder()
    step = torch.optim.Adam(model.parameters(), lr=RATE)
    with bar("autoencoder", EPOCHS * len(x)) as advance:
        for epoch in range(EPOCHS):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
            for rows in order.split(BATCH):
                loss = model(x[rows])
                step.zero_grad()
                loss.backward()
                step.step()
                advance(len(rows))
    return model.eval()
