"""Views of an image: what they show, and what the model says of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dubito
from dubito.errors import ModelError, ValueRangeError
from dubito.metrics.streaming import SUMMARY
from dubito.probes import Views
from dubito.probes.views import DEFAULT, VIEWS, view

X = torch.randn(4, 3, 16, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(one_thread):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
    return dubito.wrap(nn.Sequential(*layers), transform=dubito.Preprocess((16, 24)), name="net")


def enlarged(part: torch.Tensor) -> torch.Tensor:
    return F.interpolate(part, (16, 24), mode="bilinear", antialias=True)


def test_what_each_view_shows():
    # Of 16 x 24 an eighth is 2 x 3; an image that is moved goes by half of it, 1 x 2 (1.5, rounded to even).
    torch.testing.assert_close(view(X, "identity"), X)
    torch.testing.assert_close(view(X, "flip"), X[..., range(23, -1, -1)])
    torch.testing.assert_close(view(X, "zoom_in"), enlarged(X[..., 1:15, 2:23]))
    torch.testing.assert_close(view(X, "top_left"), enlarged(X[..., :14, :21]))
    torch.testing.assert_close(view(X, "top_right"), enlarged(X[..., :14, 3:]))
    torch.testing.assert_close(view(X, "bottom_left"), enlarged(X[..., 2:, :21]))
    torch.testing.assert_close(view(X, "bottom_right"), enlarged(X[..., 2:, 3:]))
    torch.testing.assert_close(view(X, "shift_down")[..., 1:, :], X[..., :-1, :])
    torch.testing.assert_close(view(X, "shift_up")[..., :-1, :], X[..., 1:, :])
    torch.testing.assert_close(view(X, "shift_right")[..., 2:], X[..., :-2])
    torch.testing.assert_close(view(X, "shift_left")[..., :-2], X[..., 2:])
    torch.testing.assert_close(view(X, "shift_right")[..., :2], X[..., [2, 1]])  # the border is mirrored
    torch.testing.assert_close(view(X, "zoom_out"), enlarged(F.pad(X, (2, 2, 1, 1), mode="reflect")))
    torch.testing.assert_close(view(X, "zoom_in+flip"), view(X, "zoom_in").flip(-1))


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("amount", [0.02, 0.3])
def test_the_shape_stays_and_the_input_too(name, amount):
    x = X.clone()
    assert view(x, name, amount).shape == x.shape
    assert torch.equal(x, X)
    flat = torch.full((1, 3, 9, 7), 2.0)
    torch.testing.assert_close(view(flat, name, amount), flat)  # nothing comes in that was not there


def test_members_are_the_models_answers(model):
    columns = Views(keep="logits").run(model, X, torch.tensor([0, 1, 2, 3]))
    assert set(columns) == {"views", "views_between", "views_loss", "views_logit"}
    assert columns["views_logit"].shape == (4, 8, 4)
    with torch.no_grad():
        for place, name in enumerate(DEFAULT):
            torch.testing.assert_close(columns["views_logit"][:, place], model.module(view(X, name)))
        torch.testing.assert_close(columns["views_logit"][:, 1], model.module(X.flip(3)))


def test_a_view_that_changes_nothing_tells_nothing(model):
    same = Views(["identity", "identity"]).run(model, X, None)["views"]
    assert same[:, SUMMARY.index("epistemic")].abs().max() < 1e-6
    even = torch.cat([X, X.flip(3)], 3)[..., ::2]  # the same from both sides
    even = (even + even.flip(3)) / 2
    both = Views(["identity", "flip"]).run(model, even, None)["views"]
    assert both[:, SUMMARY.index("epistemic")].max() < 1e-6


def test_settings():
    probe = Views(["identity", "zoom_in+flip"], amount=0.2)
    assert probe.settings() == {
        "views": ["identity", "zoom_in+flip"],
        "amount": 0.2,
        "keep": "summary",
        "temperature": 1.0,
    }
    assert (probe.name, len(probe), len(Views())) == ("views", 2, 8)


def test_what_is_no_view(model):
    with pytest.raises(
        ValueRangeError, match=r"views: a view must be one of identity, flip, .*; got 'flap'\. Did you mean flip\?"
    ):
        Views(["identity", "zoom_in+flap"])
    with pytest.raises(ValueRangeError, match=r"a view must be one of identity, flip, zoom_in.*; got 'QQ'\.$"):
        Views(["QQ", "identity"])
    for views, got in (([], 0), (["flip"], 1)):
        with pytest.raises(ValueRangeError, match=f"views: their number must be .* at least 2; got {got}. Add some of"):
            Views(views)
    with pytest.raises(ValueRangeError, match=r"views must be a list of names; got 'flip'"):
        Views("flip")
    for amount in (0.0, 0.5):
        with pytest.raises(ValueRangeError, match=rf"views: amount must be a number in \(0, 0.5\); got {amount}"):
            Views(amount=amount)


def test_inputs_that_are_no_images():
    torch.manual_seed(0)
    rows = dubito.wrap(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), name="rows")
    with pytest.raises(ModelError, match=r"views: inputs of rows must be images, .*; got \(2, 5\)"):
        Views().run(rows, torch.zeros(2, 5), None)
