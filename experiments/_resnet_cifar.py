"""ResNet-20 to ResNet-56 for CIFAR-10 (He et al. 2016, section 4.2), with shortcuts without weights ("option A").

Names of layers are those of the checkpoints of github.com/akamaster/pytorch_resnet_cifar10.
"""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from safetensors.torch import load_file
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a shortcut: every second pixel, new channels filled with zeros; or a 1x1 convolution."""

    def __init__(self, before: int, after: int, *, projected: bool = False) -> None:
        super().__init__()
        self.grown = after - before
        stride = 2 if self.grown else 1
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        if projected and self.grown:
            convolution = nn.Conv2d(before, after, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """After the second non-linearity."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if hasattr(self, "shortcut"):
            return F.relu(out + self.shortcut(x))
        half = self.grown // 2
        return F.relu(out + (F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, half)) if self.grown else x))


class ResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels, (depth - 2) / 6 blocks each; 64 features, 10 classes."""

    def __init__(self, depth: int, *, projected: bool = False) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(before, after, projected=projected), *(Block(after, after) for _ in range(blocks - 1)))
            for before, after in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def resnet(depth: int, folder: Path) -> ResNet:
    """With the weights of a folder, in eval mode."""
    module = ResNet(depth)
    module.load_state_dict(torch.load(folder / f"resnet{depth}.pt", weights_only=True))
    return module.eval()


def resnet56_45k(folder: Path) -> ResNet:
    """ResNet-56 with 1x1 convolutions as shortcuts, trained on 45,000 images, in eval mode; inputs are pixels / 255."""
    module = ResNet(56, projected=True)
    module.load_state_dict(load_file(folder / "resnet56_45k.safetensors"))
    return module.eval()
