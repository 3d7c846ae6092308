"""What gradients are by definition: the whole Jacobian of one image at a time, in float64, by torch.func.jacrev."""

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import dubito
from dubito.gradients.sweep import Prepared, Sweep

Jacobian = dict[str, Tensor]


def classifier(module: nn.Module, *, seed: int = 0, **options):
    """A wrapped module whose parameters are all in use: none is zero, no norm is the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() < 2:
                parameter.copy_(torch.empty(parameter.shape).uniform_(0.4, 1.2, generator=generator))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(torch.empty(buffer.shape).uniform_(0.5, 2.0, generator=generator))
    return dubito.wrap(module, name="net", **options)


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def owner(parameter: str) -> str:
    """The module that a parameter belongs to, written down anew: what names of columns are held against."""
    path = parameter.split(".")
    if "parametrizations" in path:
        return ".".join(path[: path.index("parametrizations")])
    return ".".join(path[:-1]) or parameter


def jacobian(module: nn.Module, rows: Tensor) -> tuple[Tensor, Jacobian]:
    """Logits (r, c) of an image and its copies, and d logits / d parameter (r, c, p) of each, by parameter."""
    twin = copy.deepcopy(module).eval().double().requires_grad_(False)
    parameters = {name: parameter.clone() for name, parameter in twin.named_parameters()}
    rows = rows.double() if rows.is_floating_point() else rows

    def output(chosen: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(twin, chosen, (torch.stack([row, row]),))[0]

    logits = torch.stack([output(parameters, row) for row in rows])
    result = [jacrev(output, chunk_size=1)(parameters, row) for row in rows]
    return logits, {name: torch.stack([one[name].reshape(len(logits[0]), -1) for one in result]) for name in parameters}


def squares_and_totals(jacobians: Jacobian, cotangent: Tensor, layers: list[str]) -> tuple[Tensor, Tensor]:
    """||J_l^T c||_2^2 and ||J_l^T c||_1 of every layer; c (r, c), averaged over copies before the norm."""
    squares, totals = torch.zeros(len(layers)).double(), torch.zeros(len(layers)).double()
    for name, j in jacobians.items():
        g = torch.einsum("rc,rcp->p", cotangent, j) / len(cotangent)
        if owner(name) in layers:
            squares[layers.index(owner(name))] += g.square().sum()
            totals[layers.index(owner(name))] += g.abs().sum()
        else:
            assert not g.any(), f"{name} has a gradient and no column"
    return squares, totals


def columns(module: nn.Module, images: list[Tensor], layers: list[str], name: str = "gradient") -> dict[str, Tensor]:
    """All columns of the exact method, of images that come with their copies (r, ...), by definition."""
    ends = ("", "_root", "_l1", "_predicted", "_uniform")
    result: dict[str, list[Tensor]] = {name + end: [] for end in ends}
    for rows in images:
        logits, j = jacobian(module, rows)
        p_rows, p = logits.softmax(1), logits[0].softmax(0)
        eye = torch.eye(len(p)).double()
        by_class = [squares_and_totals(j, eye[y] - p_rows, layers) for y in range(len(p))]
        s, t = (torch.stack(values) for values in zip(*by_class, strict=True))
        made = {
            "": p @ s,
            "_root": p.sqrt() @ s.sqrt(),
            "_l1": p @ t,
            "_predicted": s[p.argmax()],
            "_uniform": squares_and_totals(j, p_rows - 1 / len(p), layers)[1],
        }
        for end in ends:
            result[name + end].append(made[end])
    return {key: torch.stack(values) for key, values in result.items()}


def error(ours: Tensor, truth: Tensor) -> float:
    """The largest relative error of any image and layer; of what is zero but for rounding, relative to the image."""
    floor = 1e-10 * truth.amax(1, keepdim=True)
    return float(((ours.double() - truth).abs() / truth.clamp_min(floor)).max())


def swept(model, x: Tensor, cotangent: Tensor, images: int | None = None) -> tuple[Tensor, Tensor, list[str]]:
    """Squares and totals as the room has them, in the model's own precision, and the names of the layers."""
    prepared = Prepared(model, x, lambda layers: layers)
    with Sweep(prepared.plan, x, images or len(x)) as sweep:
        norms = sweep.norms(cotangent, ("squares", "totals"))
    return norms["squares"], norms["totals"], list(prepared.layers)
