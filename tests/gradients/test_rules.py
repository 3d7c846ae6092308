"""Every rule in float64, where only a mistake could make a difference; with copies, in other batches, in half."""

import pytest
import torch

from dubito.gradients.plan import Borrowed, Seen
from dubito.gradients.rules import RULES
from tests.gradients.reference import classifier, error, inputs, jacobian, squares_and_totals, swept
from tests.gradients.zoo import KINDS, SIZES, C, made

pytestmark = pytest.mark.usefixtures("one_thread")


def truth(module, x, cotangent, layers, images: int):
    result = []
    for rows, c in zip(x.unflatten(0, (images, -1)), cotangent.unflatten(0, (images, -1)), strict=True):
        result.append(squares_and_totals(jacobian(module, rows)[1], c, layers))
    squares, totals = zip(*result, strict=True)
    return torch.stack(squares), torch.stack(totals)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_in_float64_for_images_and_their_copies(kind):
    """Two images, each with a copy: what a rule may mix up are rows, tokens and copies."""
    module = made(kind).double()
    model, x = classifier(module), inputs(4, 3, SIZES[kind], SIZES[kind]).double()
    cotangent = inputs(4, C, seed=3).double()
    squares, totals, layers = swept(model, x, cotangent, 2)
    expected = truth(module, x, cotangent, layers, 2)
    assert error(squares, expected[0]) < 1e-9
    assert error(totals, expected[1]) < 1e-9


@pytest.mark.parametrize("kind", ["encoder_class_token_first", "shared", "windows", "depthwise_5", "scaled", "lines"])
def test_a_row_does_not_depend_on_its_batch(kind):
    model, x = classifier(made(kind).double()), inputs(7, 3, SIZES[kind], SIZES[kind]).double()
    cotangent = inputs(7, C, seed=3).double()
    whole = swept(model, x, cotangent)[0]
    for rows in (slice(3, 5), slice(0, 3), slice(2, 7)):
        torch.testing.assert_close(swept(model, x[rows], cotangent[rows])[0], whole[rows], rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["conv_stride_padding", "depthwise_5", "batch_norm", "group_norm", "encoder", "pixels"]
)
def test_half_precision(kind, dtype):
    """Activations have three digits, or two: so have norms; none is lost to their short range."""
    module = made(kind)
    model = classifier(module.to(dtype))
    size = SIZES[kind]
    x, cotangent = inputs(3, 3, size, size).to(dtype), inputs(3, C, seed=3).double()
    squares, totals, layers = swept(model, x, cotangent)
    expected = truth(module, x, cotangent, layers, 3)
    close = 0.03 if dtype == torch.float16 else 0.2
    for ours, exact in zip((squares, totals), expected, strict=True):
        assert float(((ours - exact).norm(dim=0) / exact.norm(dim=0)).max()) < close


def test_tiny_gradients_survive_half_precision():
    """A cotangent of 1e-9 would underflow in float16; norms of it are those of a larger one, scaled."""
    model, x = classifier(made("conv").half()), inputs(3, 3, 8, 8).half()
    cotangent = inputs(3, C).double()
    large, tiny = swept(model, x, cotangent)[0], swept(model, x, 1e-9 * cotangent)[0]
    torch.testing.assert_close(tiny, 1e-18 * large, rtol=1e-3, atol=0)


def test_every_rule_is_met():
    """The networks above leave no rule untried, but for those of other hardware."""

    met = set()
    for kind in KINDS:
        module = made(kind)
        borrowed = Borrowed(classifier(module))
        x = inputs(2, 3, SIZES[kind], SIZES[kind])
        met |= {name for name, *_ in Seen(borrowed, x, only=0).graph.signature()}
    assert set(RULES) - met <= {"CudnnBatchNormBackward0"}
