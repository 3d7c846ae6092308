from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import dubito
from dubito.cache.runner import predict_table
from dubito.data.open import one_or_many
from dubito.errors import ImagesError, ModelError
from dubito.models.wrap import WrappedClassifier
from dubito.probes import Layers, Tiles
from dubito.scores import LayerMahalanobis

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> WrappedClassifier:
    torch.manual_seed(0)
    return dubito.wrap(
        timm.create_model("test_resnet").eval(), transform=dubito.Preprocess((96, 96), resize=96), name="tiny"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(5):
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return place


def test_a_folder_with_the_name_of_an_image_is_many(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "holiday.jpg"
    place.mkdir()
    (place / "1.png").write_bytes((folder / "1.png").read_bytes())
    images, single = one_or_many(place)
    assert (len(images), single) == (1, False)


@pytest.mark.parametrize("kind", ["path", "text", "pillow", "pixels", "grey"])
def test_one_image_in_many_forms(model: WrappedClassifier, folder: Path, kind: str) -> None:
    picture = Image.open(folder / "1.png")
    forms = {
        "path": folder / "1.png",
        "text": str(folder / "1.png"),
        "pillow": picture,
        "pixels": np.asarray(picture),
        "grey": np.asarray(picture.convert("L")),
    }
    images, single = one_or_many(forms[kind])
    assert single
    result = predict_table(model, images, [])
    assert len(result) == 1
    if kind != "grey":
        assert torch.allclose(result.logit, predict_table(model, one_or_many(folder)[0], []).logit[1:2], atol=1e-5)


def test_inputs_have_channels_first() -> None:
    assert one_or_many(torch.zeros(3, 8, 8))[1]
    assert not one_or_many(torch.zeros(2, 3, 8, 8))[1]
    assert not one_or_many(np.zeros((2, 8, 8, 3), np.uint8))[1]


def test_lists_of_files_and_of_pictures(model: WrappedClassifier, folder: Path) -> None:
    files, single = one_or_many([folder / "2.png", str(folder / "0.png")])
    assert not single
    result = predict_table(model, files, [])
    whole = predict_table(model, one_or_many(folder)[0], []).logit
    assert torch.allclose(result.logit, whole[[2, 0]], atol=1e-5)
    pictures, single = one_or_many([Image.open(folder / "2.png")])
    assert (len(pictures), single) == (1, False)


def test_features_are_as_precise_as_those_the_guard_was_fitted_on(model: WrappedClassifier, tmp_path: Path) -> None:
    x = torch.randn(120, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    for dtype in ("float16", "float32"):
        forward = dubito.probes.Forward(feature_dtype=dtype)
        table = dubito.extract(model, x, tmp_path / dtype, probes=[forward], workers=0, progress=False)
        guard = dubito.Guard.fit(model, table, coverage=0.5, scores={"neighbours": dubito.Neighbours(k=3)})
        predicted = guard.predict(x[:16])
        assert torch.equal(predicted.feature, table.feature[:16])
        assert (predicted.feature.half().float() == predicted.feature).all() == (dtype == "float16")
        guard.save(tmp_path / f"guard-{dtype}")
        loaded = dubito.Guard.load(tmp_path / f"guard-{dtype}", model)
        assert torch.equal(loaded.predict(x[:16]).feature, table.feature[:16])


def test_a_guard_of_tiles_asks_the_tiles(model: WrappedClassifier, tmp_path: Path) -> None:
    x = torch.randn(120, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    table = dubito.extract(model, x, tmp_path / "cache", probes=[Tiles([2])], workers=0, progress=False)
    guard = dubito.Guard.fit(model, table, coverage=0.5, scores={"tiles": dubito.MutualInformation(of="tiles_2")})
    result = guard(x[:8])
    assert result.uncertainty.tolist() == pytest.approx(guard.decide(table).uncertainty[:8].tolist(), abs=1e-6)
    assert guard.selection.roles.epistemic == "tiles"


def test_a_guard_of_layers_runs_the_layers_probe(model: WrappedClassifier, tmp_path: Path) -> None:
    x = torch.randn(120, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    labels = [number % 3 for number in range(len(x))]
    options = {"labels": labels, "label_space": "model", "workers": 0, "progress": False}
    table = dubito.extract(model, x, tmp_path / "cache", probes=[Layers()], **options)
    guard = dubito.Guard.fit(model, table, coverage=0.5, scores={"layers": LayerMahalanobis(regularisation=0.1)})
    expected = guard.decide(table).uncertainty[:8].tolist()
    guard.save(tmp_path / "guard")
    for one in (guard, dubito.Guard.load(tmp_path / "guard", model)):
        assert one(x[:8]).uncertainty.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 8, 8), r"shape \(3, 8, 8\) may be one picture with channels first, or three grey ones"),
        ((8, 8, 4), r"\(1, 8, 8, 4\)\. Pass images\[..., :3\]"),
        ((8, 8, 1), r"\(1, 8, 8, 1\)\. Pass images\[..., 0\]"),
    ],
)
def test_a_picture_with_other_channels_is_no_stack_of_grey_ones(shape: tuple[int, ...], message: str) -> None:
    for array in (np.zeros(shape, np.uint8), torch.zeros(shape, dtype=torch.uint8)):
        with pytest.raises(ImagesError, match=message):
            one_or_many(array)


def test_inputs_that_the_model_cannot_take_are_reported(model: WrappedClassifier) -> None:
    images, single = one_or_many(np.zeros((96, 96, 3), np.float32))
    assert single
    with pytest.raises(ModelError, match=r"tiny cannot take inputs of shape \(n, 96, 96, 3\) .* as uint8 \(h, w, 3\)"):
        predict_table(model, images, [])
