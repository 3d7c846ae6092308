"""How each kind of operation passes a gradient on to the weights that it reads, image by image.

    linear         sum_t g_t a_t^T                             (Goodfellow 2015, arXiv 1510.01799)
    convolution    the same over patches                       (Rochette et al. 2019, arXiv 1912.06015)
    normalisation  sum_t g_t * x^_t, x^ the normalised input;  its bias, as any bias: sum_t g_t
    embedding      row v: the sum of g_t over the positions t that picked v
    x + w, x * w   g or g * x, summed over what w was spread over: position embeddings, scales
    expand         the same: class tokens

g is the gradient of what the operation gave. Each rule reads what the operation itself has kept for its backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dubito.gradients.parts import Dense, Outer, Part, Patches, Picked, Window


@dataclass(frozen=True)
class Layout:
    """Where in a tensor the images of a batch lie: along one axis, perhaps with tokens or windows beside them.

    Attributes:
        axis: Whose length is images * each.
        each: Rows of the axis that belong to one image.
        last: Images change fastest along the axis (token 0 of all images first), as where tokens come before images.
    """

    axis: int
    each: int = 1
    last: bool = False

    def rows(self, values: Shaped[Tensor, "..."], images: int) -> Shaped[Tensor, "n t ..."]:
        """The tensor by image; what an image has several of, also copies of itself, lies along the second axis.

        >>> tokens_first = torch.arange(6).view(6, 1)  # two tokens of three images
        >>> Layout(0, each=2, last=True).rows(tokens_first, 3).flatten(1).tolist()
        [[0, 3], [1, 4], [2, 5]]
        """
        values = values.movedim(self.axis, 0)
        rest = values.shape[1:]
        copies = len(values) // (images * self.each)
        if not self.last or self.each == 1:
            return values.reshape(images, copies * self.each, *rest)
        by_token = values.reshape(self.each, images, copies, *rest)
        return by_token.transpose(0, 1).reshape(images, self.each * copies, *rest)


def layout_of(two: Shaped[Tensor, "..."], three: Shaped[Tensor, "..."]) -> Layout | None:
    """How images lie in a tensor.

    One image's numbers would not do: those of a single token, such as a class token, fit both orders. The first of two
    images and the last of three together do not, whichever tokens have numbers.

    Args:
        two: The tensor for two images, of which only the first has numbers that are not zero.
        three: The tensor for three images, of which only the last has.

    Returns:
        None where not just one axis grows with the images, or images lie along it in another way; also where an image
        has several rows and no numbers at all, which fits every order.
    """
    grown = [axis for axis, (a, b) in enumerate(zip(two.shape, three.shape, strict=True)) if a != b]
    if len(grown) != 1 or two.shape[grown[0]] * 3 != three.shape[grown[0]] * 2:
        return None
    axis, each = grown[0], two.shape[grown[0]] // 2
    if each > 1 and not (two.any() and three.any()):
        return None
    for layout in [Layout(axis, each)] if each == 1 else [Layout(axis, each), Layout(axis, each, last=True)]:
        if not layout.rows(two, 2)[1:].any() and not layout.rows(three, 3)[:2].any():
            return layout
    return None


@dataclass(frozen=True)
class WeightUse:
    """One operation on images that reads a weight.

    Attributes:
        node: The operation in the graph.
        slot: Which of its arguments the weight is.
        layout: How images lie in what it gave.
        shape: Of the weight as the operation reads it.
        images: How many.
    """

    node: Any
    slot: int
    layout: Layout
    shape: torch.Size
    images: int

    def rows(self, values: Shaped[Tensor, "..."]) -> Shaped[Tensor, "n t ..."]:
        """A tensor that lies as the result does, by image."""
        return self.layout.rows(values, self.images)


def _product(at: WeightUse, g: Tensor) -> Part | None:
    """Of addmm and mm: images from the left, the weight from the right; or the bias that is added."""
    node, bias = at.node, at.node.name() == "AddmmBackward0"
    if bias and (node._saved_alpha != 1 or node._saved_beta != 1):
        return None
    if bias and at.slot == 0:
        return _spread(at, g)
    if at.slot != (2 if bias else 1) or at.layout.axis != 0:
        return None
    a = node._saved_mat1 if bias else node._saved_self
    return Outer(at.rows(_full(a)), at.rows(_full(g)), turned=True)


def _convolution(at: WeightUse, g: Tensor) -> Part | None:
    node = at.node
    if at.layout.axis != 0:
        return None
    if at.slot == 2:
        return Dense(_by_channel(at, g))
    if at.slot != 1:
        return None
    spec = (tuple(node._saved_stride), tuple(node._saved_padding), tuple(node._saved_dilation))
    window = Window(tuple(at.shape[2:]), *spec, node._saved_groups)
    a, g = at.rows(_full(node._saved_input)), at.rows(_full(g))
    if node._saved_transposed:
        a, g = g, a  # it is the other way round of a convolution from what it gives to what it reads
    if not window.plain:
        return Patches(a, g, window)
    a, g = (values.flatten(3).transpose(2, 3).flatten(1, 2) for values in (a, g))
    return Outer(a, g)


def _batch_norm(at: WeightUse, g: Tensor) -> Part | None:
    node = at.node
    if node._saved_training or node._saved_running_mean is None or at.layout.axis != 0:
        return None
    if at.slot == 2:
        return Dense(_by_channel(at, g))
    x, g = (_full(values).unsqueeze(-1).flatten(2) for values in (node._saved_input, g))
    scaled = torch.linalg.vecdot(g, x) - g.sum(2) * node._saved_running_mean  # sum_t g_t (x_t - mean)
    return Dense(at.rows(scaled / (node._saved_running_var + node._saved_eps).sqrt()).sum(1))


def _layer_norm(at: WeightUse, g: Tensor) -> Part | None:
    node = at.node
    if at.slot == 1:
        g = _full(g) * ((_full(node._saved_input) - node._saved_result1) * node._saved_result2)
    return _spread(at, g)


def _group_norm(at: WeightUse, g: Tensor) -> Part | None:
    node = at.node
    if at.layout.axis != 0:
        return None
    if at.slot == 1:
        x = _full(node._saved_input)
        grouped = x.reshape(len(x), node._saved_group, -1)
        mean, rstd = (saved.view(len(x), node._saved_group, 1) for saved in (node._saved_result1, node._saved_result2))
        g = _full(g) * ((grouped - mean) * rstd).view_as(x)
    return Dense(_by_channel(at, g))


def _embedding(at: WeightUse, g: Tensor) -> Part | None:
    node = at.node
    if node._saved_scale_grad_by_freq or at.layout.axis >= node._saved_indices.dim():
        return None
    index, g = at.rows(node._saved_indices).flatten(1), at.rows(_full(g)).flatten(1, -2)
    if node._saved_padding_idx >= 0:
        g = g * (index != node._saved_padding_idx)[..., None]
    return Picked(index, g, at.shape[0])


def _sum(at: WeightUse, g: Tensor) -> Part | None:
    alpha = -at.node._saved_alpha if at.node.name() == "SubBackward0" else at.node._saved_alpha
    return _spread(at, g * alpha if at.slot == 1 else g)


def _scaling(at: WeightUse, g: Tensor) -> Part | None:
    other = at.node._saved_other if at.slot == 0 else at.node._saved_self
    return None if other is None else _spread(at, _full(g) * _full(other))


def _prelu(at: WeightUse, g: Tensor) -> Part | None:
    return _spread(at, _full(g) * _full(at.node._saved_self).clamp_max(0)) if at.slot == 1 else None


def _repeated(at: WeightUse, g: Tensor) -> Part | None:
    """A vector repeated once per image, as in instance norms."""
    if len(at.shape) != 1 or g.dim() != 1 or at.layout.each != at.shape[0]:
        return None
    return Dense(at.rows(_full(g)).view(at.images, -1, *at.shape).sum(1))


def _spread(at: WeightUse, g: Float[Tensor, "..."]) -> Dense | None:
    """Of a weight that was spread over images, and perhaps over positions: the sum over them."""
    aligned = (*[1] * (g.dim() - len(at.shape)), *at.shape)
    if len(aligned) != g.dim() or aligned[at.layout.axis] != 1:
        return None
    rows = at.rows(_full(g))
    kept = [size for axis, size in enumerate(aligned) if axis != at.layout.axis]
    over = [axis + 2 for axis, size in enumerate(kept) if size == 1]
    return Dense(rows.sum([1, *over]).reshape(at.images, *at.shape))


def _by_channel(at: WeightUse, g: Float[Tensor, "rows c ..."]) -> Float[Tensor, "n c"]:
    """The sum over all that an image has of each channel."""
    rows = at.rows(_full(g))
    return rows.sum([1, *range(3, rows.dim())])


def _full(values: Tensor) -> Tensor:
    """Half precision has too few digits, and too short a range, for sums of squares."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


RULES: dict[str, Callable[[WeightUse, Tensor], Part | None]] = {
    "AddmmBackward0": _product,
    "MmBackward0": _product,
    "ConvolutionBackward0": _convolution,
    "NativeBatchNormBackward0": _batch_norm,
    "CudnnBatchNormBackward0": _batch_norm,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeGroupNormBackward0": _group_norm,
    "EmbeddingBackward0": _embedding,
    "AddBackward0": _sum,
    "SubBackward0": _sum,
    "MulBackward0": _scaling,
    "ExpandBackward0": _spread,
    "RepeatBackward0": _repeated,
    "PreluKernelBackward0": _prelu,
}
"""By the name of the operation in the graph. A rule that turns out wrong is detected when a model is first planned."""
