"""Guards that were exported to ONNX, as models: the same network by ONNX Runtime, which fuses its layers.

    onnx:guard.onnx    a file of `guard.export_onnx` or `dubito guard export`

The file holds the network up to the features, the last layer, the transform's settings, the names of the classes and
the fingerprint of the model that it was exported from. So that model's guards and heads take it for the same one;
features agree to rounding, about 1e-5. A file whose features of a fixed input are not those that PyTorch had, because
somebody has changed or quantised it since, is refused. A cache holds rows of one runtime alone. Gradients, members and
tiles need layers, which a graph does not have.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dubito.errors import MissingPackageError, ModelError, first_words
from dubito.models.transform import NewTransform, NoTransform, Preprocess, changed_transform
from dubito.storage import reading
from dubito.threads import cores
from dubito.types import Json

FEATURE, WEIGHT, BIAS = "feature", "head_weight", "head_bias"
"""Outputs of an export besides the guard's own: what the last layer reads, and the last layer."""


_METADATA = ("transform", "classes", "model", "sample")
_AGREES = 1e-3


def fixed_input(shape: Sequence[int]) -> Float[Tensor, "1 ..."]:
    """One input of a shape, always the same: smooth, and unlike along every axis."""
    waves = torch.arange(math.prod(shape), dtype=torch.float64).mul(0.37).sin() * 1.5
    return waves.float().reshape(1, *shape)


def build(
    name: str,
    options: dict[str, Any],
    *,
    pretrained: bool,  # noqa: ARG001 (as of any source)
    transform: NewTransform | None = None,
) -> dict[str, Any]:
    """The network of an exported guard, as arguments of `wrap`.

    Args:
        name: The file.
        options: None are known.
        pretrained: Plays no part: the file holds its weights.
        transform: Another one than the file describes.
    """
    if options:
        raise ModelError(f"load: 'onnx:{name}' takes no options; got {', '.join(options)}. Leave them out.")
    with reading(f"load: 'onnx:{name}'", "Export the guard again, and leave the file as it is.", error=ModelError):
        return _settings(name, transform)


def _settings(name: str, transform: NewTransform | None) -> dict[str, Any]:
    network = OnnxNetwork(Path(name).expanduser())
    settings = network.metadata["transform"] or {"kind": "none"}
    if settings["kind"] not in ("none", "preprocess") and transform is None:
        raise ModelError(
            f"load: the transform of 'onnx:{name}' is a function, which is not in the file. Pass transform=..., the "
            f"model's own."
        )
    own: Any = NoTransform()
    if settings["kind"] == "preprocess":
        own = Preprocess(**{key: value for key, value in settings.items() if key != "kind"})
    classes = network.metadata["classes"] or len(network.head.weight)
    return {"module": network, "transform": changed_transform(own, transform, f"onnx:{name}"), "classes": classes}


@final
class OnnxNetwork(nn.Module):
    """An exported network and its last layer.

    Attributes:
        metadata: What the file records: transform, classes, model.
        recorded: The fingerprint of the model that was exported.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file, self._session = file, _session(file)
        texts = self._session.get_modelmeta().custom_metadata_map
        outputs = [one.name for one in self._session.get_outputs()]
        if "dubito.sample" not in texts or not {FEATURE, WEIGHT, BIAS} <= set(outputs):
            exported = "dubito.model" in texts
            why = (
                "has no features, as its last layer is not one plain nn.Linear" if exported else "is no exported guard"
            )
            raise ModelError(
                f"load: 'onnx:{file}' {why}. Write one with dubito guard export, or load the model itself."
            )
        self.metadata: Json = {key: json.loads(texts[f"dubito.{key}"]) for key in _METADATA}
        made = self.metadata["model"]
        self.recorded: Json = {key: made.get(key) for key in ("weights", "tensors", "operations", "head")}
        self.recorded["weights"] = f"{made.get('weights')} by ONNX Runtime"  # of a cache; guards compare tensors
        self._input = self._session.get_inputs()[0]
        x = fixed_input(self._input.shape[1:])
        z, weight, bias = self._session.run([FEATURE, WEIGHT, BIAS], {self._input.name: x.numpy()})
        expected = torch.tensor(self.metadata["sample"])
        off = float((torch.from_numpy(z[0]) - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
        if off > _AGREES:
            raise ModelError(
                f"load: 'onnx:{file}' is not what was exported: its features differ by {off:.2g} of the largest from "
                f"those that were recorded. Export the guard again, and leave the file as it is."
            )
        self.head = nn.Linear(weight.shape[1], weight.shape[0])
        self.head.load_state_dict({"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)})

    def forward(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n c"]:
        """Logits."""
        if list(x.shape[1:]) != self._input.shape[1:]:
            shape = ", ".join(map(str, self._input.shape[1:]))
            raise ValueError(f"it was exported for inputs of shape (n, {shape})")
        (z,) = self._session.run([FEATURE], {self._input.name: x.numpy()})
        logits: Tensor = self.head(torch.from_numpy(z))
        return logits

    def __deepcopy__(self, _: object) -> "OnnxNetwork":
        return OnnxNetwork(self._file)

    def __reduce__(self) -> tuple[type["OnnxNetwork"], tuple[Path]]:
        return OnnxNetwork, (self._file,)


def _session(file: Path) -> Any:
    try:
        import onnxruntime  # noqa: PLC0415 (optional)
    except ImportError as error:
        raise MissingPackageError("load: onnx: needs its runtime: pip install 'dubito[onnx]'") from error
    if not file.is_file():
        raise ModelError(f"load: there is no file '{file}'. Write one with dubito guard export.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # others need the cores between passes
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of the runtime, which raises kinds of its own
        raise ModelError(
            f"load: '{file}' cannot be read as an ONNX graph ({first_words(error)}). Export the guard again."
        ) from error
