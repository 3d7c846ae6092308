import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from dubito.cache.extract import extract
from dubito.errors import ModelError
from dubito.models import wrap

from .conftest import Mlp, X, check

IMAGES = torch.randn(4, 3, 8, 6, generator=torch.Generator().manual_seed(1))


def test_the_head_is_found_or_named():
    module = Mlp()
    for model in (wrap(module), wrap(module, head="fc")):
        check(model, module, X)
        weight, bias = model.head()
        assert torch.equal(weight, module.fc.weight)
        assert torch.equal(bias, module.fc.bias)
        assert not weight.requires_grad


def test_a_named_head_overrules_the_output():
    module = Mlp(then=lambda logits: 3 * logits + 1)
    with pytest.raises(ModelError, match=r"Mlp: its logits differ from those of its last linear layer \(by up to"):
        wrap(module).features(X)
    model = wrap(module, head="fc")
    with torch.no_grad():
        assert torch.allclose(model.logits(model.features(X)), module.fc(module.hidden(X).relu()), atol=1e-6)


def test_a_head_that_is_not_there():
    with pytest.raises(ModelError, match=r"head: Mlp has no layer 'hiden'\. Nearest: hidden\."):
        wrap(Mlp(), head="hiden")
    with pytest.raises(ModelError, match=r"head: Sequential has no layer 'classifier'\. Nearest: 0\."):
        wrap(nn.Sequential(nn.Linear(6, 2)), head="classifier")
    with pytest.raises(ModelError, match=r"head: layer '1' has no weight \(ReLU\)\. Name a linear layer"):
        wrap(nn.Sequential(nn.Linear(6, 3), nn.ReLU()), head="1")


@pytest.mark.parametrize("layer", ["hidden", "unused"])
def test_a_named_layer_that_gives_no_logits(layer):
    module = Mlp()
    module.unused = nn.Linear(5, 3)
    with pytest.raises(
        ModelError, match=r"head: the layer you named in Mlp does not give its 3 outputs.*Name the layer that gives"
    ):
        wrap(module, head=layer).features(X)


def test_softmax_outputs_are_reported_and_undone():
    module = Mlp(then=lambda logits: logits.softmax(-1))
    with pytest.raises(
        ModelError, match=r'Its rows sum to one: if it ends in a softmax, pass output="probabilities"\. To take one'
    ):
        wrap(module).features(X)
    model = wrap(module, output="probabilities")
    with torch.no_grad():
        assert torch.allclose(model.logits(model.features(X)), module.fc(module.hidden(X).relu()), atol=1e-6)
        assert torch.allclose(model.logits(model.features(X)).softmax(-1), module(X), atol=1e-6)


def test_log_softmax_outputs_are_reported_and_undone():
    module = Mlp(then=lambda logits: logits.log_softmax(-1))
    with pytest.raises(ModelError, match=r'It looks like log_softmax: pass output="log_probabilities"\.'):
        wrap(module).features(X)
    model = wrap(module, output="log_probabilities")
    with torch.no_grad():
        assert torch.allclose(model.logits(model.features(X)), module.fc(module.hidden(X).relu()), atol=1e-6)


@pytest.mark.parametrize("output", ["probabilities", "log_probabilities"])
def test_logits_that_are_announced_as_something_else(output):
    with pytest.raises(ModelError, match=rf'Mlp: its {output} differ from .*It returns logits: pass output="logits"\.'):
        wrap(Mlp(), output=output).features(X)


def test_an_output_of_another_kind_has_no_hint():
    with pytest.raises(ModelError) as error:
        wrap(Mlp(then=torch.sigmoid)).features(X)
    assert str(error.value).startswith("Mlp: its logits differ from those of its last linear layer (by up to ")
    assert str(error.value).endswith("). To take one layer's output as logits, name that layer with head='...'.")


def test_a_module_without_a_head():
    with pytest.raises(
        ModelError,
        match=r"Tanh: no linear layer or 1x1 convolution before a pool gives its 6 outputs\. Name the classifying",
    ):
        wrap(nn.Tanh()).features(X)


class Looped(nn.Module):
    """Asks its layer once for each image: for a row by itself, or for a batch of one."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.fc, self.alone = nn.Linear(6, 3), alone

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(row) if self.alone else self.fc(row[None])[0] for row in x])


@pytest.mark.parametrize("head", [None, "fc"])
@pytest.mark.parametrize(("alone", "shape"), [(True, "(6,)"), (False, "(1, 6)")])
def test_a_loop_over_images_is_reported(alone, shape, head):
    with pytest.raises(ModelError) as error:
        wrap(Looped(alone), head=head).features(X)
    assert str(error.value) == (
        "Looped: its last linear layer must see all images of a batch at once, (n, 6); for 2 images it was called 2 "
        f"times, with inputs of shape {shape}. Write its forward without a loop over images."
    )


def test_nan_at_first_sight_is_reported():
    with pytest.raises(
        ModelError, match=r"Mlp: its output for the first images is NaN\. Look at its weights and at the scale"
    ):
        wrap(Mlp(then=lambda logits: logits * float("nan"))).features(X)


def test_a_masked_class_does_not_hide_the_wrong_head():
    # With a class at -inf, a tolerance taken from the largest output would accept any layer.
    def masked(logits):
        return (2 * logits).index_fill(1, torch.tensor([0]), -torch.inf)

    with pytest.raises(ModelError, match="its logits differ from those of its last linear layer"):
        wrap(Mlp(then=masked)).features(X)


@pytest.mark.parametrize(
    ("then", "what"),
    [
        (lambda logits: {"boxes": logits[0], "loss": 0.1}, "dict of boxes, loss"),
        (lambda logits: [None], "list of 0"),
        (lambda logits: 3, "int"),
    ],
)
def test_an_output_without_a_tensor_of_rows(then, what):
    with pytest.raises(ModelError) as error:
        wrap(Mlp(then=then), name="mine").features(X)
    assert str(error.value) == (
        f"mine must return a tensor (n, classes), alone or in a dict, tuple or dataclass; got {what}. "
        "Wrap a module that returns the logits."
    )


@pytest.mark.parametrize(
    ("then", "what"),
    [
        (lambda logits: logits[:, None], r"\(2, 1, 3\) for 2 images"),
        (lambda logits: logits.sum(1), r"\(2,\) for 2 images"),
        (lambda logits: torch.cat([logits, logits]), r"\(4, 3\) for 2 images"),
    ],
)
def test_an_output_of_another_shape(then, what):
    with pytest.raises(ModelError, match=rf"Mlp must return \(n, classes\); got {what}"):
        wrap(Mlp(then=then)).features(X)


def test_classes_are_counted():
    assert wrap(Mlp(), classes=["a", "b", "c"]).classes == ["a", "b", "c"]
    assert wrap(Mlp(), classes=3).classes is None
    for classes in (4, ["a", "b", "c", "d"]):
        with pytest.raises(
            ModelError, match=r"Mlp: classes says 4, the module gives 3 outputs\. Pass one name per output, in order\."
        ):
            wrap(Mlp(), classes=classes).features(X)


def test_features_of_another_width():
    model = wrap(Mlp())
    model.features(X)
    with pytest.raises(
        ModelError, match=r"Mlp\.logits: features must be 5 wide; got 7\. Features of another model, or of another"
    ):
        model.logits(torch.zeros(2, 7))


def test_a_head_is_not_known_before_a_batch():
    with pytest.raises(ModelError, match=r"Mlp has not seen a batch yet, .*Call features\(x\) once before"):
        wrap(Mlp()).logits(torch.zeros(2, 5))
    with pytest.raises(ModelError, match=r"Mlp: its first batch has no images\. Pass at least one"):
        wrap(Mlp()).features(X[:0])


def test_after_a_first_batch_an_empty_one_is_fine():
    model = wrap(Mlp())
    model.features(X)
    assert model.logits(model.features(X[:0])).shape == (0, 3)


@pytest.mark.parametrize("classes", [1, 2])
def test_one_and_two_classes(classes):
    module = Mlp(classes)
    model = wrap(module)
    check(model, module, X)
    assert model.head()[0].shape == (classes, 5)


@pytest.mark.parametrize("head", [None, "fc"])
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_head_whose_weight_is_made_anew_every_pass(norm, head):
    module = Mlp()
    module.fc = norm(module.fc)
    module.eval()
    check(wrap(module, head=head), module, X)


def test_a_hidden_layer_as_wide_as_the_output_is_not_the_head():
    module = Mlp(classes=3, hidden=3)
    model = wrap(module)
    check(model, module, X)
    assert torch.equal(model.head()[0], module.fc.weight)


def test_identical_layers_are_distinguished_by_their_place():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].load_state_dict(module[0].state_dict())
    x = X[:, :3]
    model = wrap(module, head="0")
    with torch.no_grad():
        assert torch.allclose(model.logits(model.features(x)), module[0](x), atol=1e-6)
        assert torch.equal(model.features(x), x)


class Shared(nn.Module):
    """One head, used for two views of the image and averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(self.one(x).relu()) + self.fc(self.two(x).tanh())) / 2


def test_a_head_that_is_used_twice():
    module = Shared()
    model = wrap(module)
    assert model.features(X).shape == (4, 8)
    check(model, module, X)
    weight, bias = model.head()
    assert torch.allclose(weight, torch.cat([module.fc.weight, module.fc.weight], dim=1) / 2)
    assert torch.allclose(bias, module.fc.bias)


class Excited(nn.Module):
    """A squeeze-and-excitation block, whose pool is inside the network, before a head on flattened pixels."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.conv, self.gate, self.end = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), end
        self.fc = nn.Linear(4 * 24 if end == "flatten" else 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()
        if self.end == "flatten":
            return self.fc(x.flatten(1))
        return self.fc(x.amax((2, 3)) if self.end == "max" else x.mean((2, 3)))


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("end", ["flatten", "max"])
def test_a_pool_inside_a_block_is_no_feature_map(end, n):
    module = Excited(end)
    model = wrap(module)
    check(model, module, IMAGES[:n])
    with pytest.raises(ModelError, match="Excited has no feature map: nothing pools tiles or tokens"):
        model.feature_map(IMAGES[:n])


def test_a_pool_at_the_end_is_found_behind_one_inside():
    module = Excited("mean")
    model = wrap(module)
    check(model, module, IMAGES)
    assert torch.allclose(model.feature_map(IMAGES).mean(1), model.features(IMAGES), atol=1e-6)


class Strict(nn.Module):
    """Checks behind the pool that there is one row per image."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.fc, self.error = nn.Linear(3, 2), error

    def forward(self, x: Tensor) -> Tensor:
        z = x.mean((2, 3))
        if len(z) != len(x):
            raise self.error("rows were added")
        return self.fc(z)


@pytest.mark.parametrize("error", [AssertionError, TypeError, RuntimeError, KeyError])
def test_a_module_that_refuses_tiles_has_no_map_but_works(error):
    module = Strict(error)
    model = wrap(module)
    check(model, module, IMAGES)
    with pytest.raises(ModelError, match="has no feature map"):
        model.feature_map(IMAGES)


class Convolutional(nn.Module):
    """The head is a 1x1 convolution on the map; the pool comes last."""

    def __init__(self, between) -> None:
        super().__init__()
        self.stem, self.conv, self.between = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1), between

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.between(self.conv(self.stem(x))), 1).flatten(1)


@pytest.mark.parametrize(
    ("between", "width"), [(lambda y: y, 5), (F.relu, 7), (lambda y: y.relu_(), 7), (torch.tanh, 7)]
)
def test_a_convolutional_head_stays_linear_whatever_follows_it(between, width):
    module = Convolutional(between)
    model = wrap(module)
    assert model.features(IMAGES).shape == (4, width)
    check(model, module, IMAGES)
    tiles = model.feature_map(IMAGES)
    with torch.no_grad():
        output = between(module.conv(module.stem(IMAGES))).flatten(2).transpose(1, 2)
    assert torch.allclose(model.logits(tiles), output, atol=1e-6)
    assert torch.allclose(model.logits(tiles).mean(1), model.logits(model.features(IMAGES)), atol=1e-6)
    assert model.feature_grid(IMAGES).shape == (4, 6, 4, width)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (2, 1, 3, 8, 6),
            r"mine cannot take inputs of shape \(n, 1, 3, 8, 6\) \(RuntimeError: .*\)\. There is one axis "
            r"too many: transform=\.\.\. must return \(3, h, w\), without unsqueeze\(0\)\.$",
        ),
        ((1, 8, 6, 3), r"shape \(n, 8, 6, 3\) .*\)\. Channels come last: put them first, .* as uint8"),
        ((2, 1, 8, 6), r"shape \(n, 1, 8, 6\) .* 3 channels, but got 1 .*\)\. Pass a transform="),
    ],
)
def test_inputs_that_the_module_refuses(shape, message, seen):
    model = wrap(Excited("mean"), name="mine")
    if seen:
        model.features(IMAGES)
    with pytest.raises(ModelError, match=message) as error:
        model.features(torch.zeros(shape))
    assert isinstance(error.value.__cause__, RuntimeError)
    assert isinstance(error.value, RuntimeError)  # as torch's own, for those who expect that
    assert model.features(IMAGES).shape == (4, 4)


class Raises(nn.Module):
    """Raises what it was given."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize("error", [AssertionError(), IndexError("one\ntwo"), ValueError("too many to unpack")])
def test_whatever_a_module_says_of_its_inputs_is_reported(error):
    words = f"{type(error).__name__}: {error}".replace("\n", " ").rstrip(": ")
    with pytest.raises(ModelError, match=rf"\({words}\)\. Pass a transform=") as caught:
        wrap(Raises(error)).features(X)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), NotImplementedError("mps"), KeyError("key")])
def test_what_is_no_fault_of_the_inputs_is_left_alone(error):
    with pytest.raises(type(error)) as caught:
        wrap(Raises(error)).features(X)
    assert caught.value is error


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda x: x[None], r"shape \(n, 1, 3, 8, 6\) .*one axis too many"),
        (lambda x: x[:1], r"shape \(n, 1, 8, 6\) .*3 channels, but got 1 channels"),
    ],
)
def test_an_extraction_reports_what_came_out_of_the_transform(then, message, tmp_path):
    def transform(image):
        return then(torch.from_numpy(np.asarray(image) / 255).permute(2, 0, 1).float())

    pixels = np.zeros((3, 8, 6, 3), np.uint8)
    model = wrap(Excited("mean"), transform=transform, name="mine")
    with pytest.raises(ModelError, match=rf"mine cannot take inputs of {message}"):
        extract(model, [Image.fromarray(one) for one in pixels], tmp_path, workers=0, progress=False)
