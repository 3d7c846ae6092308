"""One loop for all: extraction, tables in memory and the audit read the same bytes from it, and these bytes stay."""

import hashlib
import multiprocessing
import platform
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import dubito
from dubito.audit.audit import draw_subset, take_sample
from dubito.audit.duplicates import take_fingerprints
from dubito.cache.disk import model_identity
from dubito.cache.runner import default_workers, in_batches, kept_memory, open_stream, predict_table
from dubito.errors import BrokenImageError, ImagesError, SkippedImagesWarning
from dubito.models.transform import FunctionTransform
from dubito.probes import Forward, PreActivation, Tiles

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::dubito.errors.SkippedImagesWarning"),
]


class Pixels:
    """Whole numbers as inputs, so that every sum of the network is exact and the bytes are those of any machine."""

    def prepare(self, image):
        return torch.from_numpy(np.array(image))

    def finish(self, batch):
        return batch.permute(0, 3, 1, 2).float()

    def describe(self):
        return {"kind": "pixels"}


@pytest.fixture
def exact():
    layers = [nn.Conv2d(3, 4, 2, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    network = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for weights in network.parameters():
            weights.copy_((torch.arange(weights.numel()).reshape(weights.shape) * 7 % 5 - 2).float())
    return dubito.wrap(network, transform=Pixels(), name="exact")


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for index in range(21):
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index:03d}.png")
    (tmp_path / "images" / "007.png").write_bytes(b"no image")
    return dubito.open_images(tmp_path / "images")


def sha(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()[:16]


FEATURE, LOGIT, FEATURE_32 = "8b35be85086452fd", "b3b52d8af12f6a90", "487a77dd3898f163"
"""Before there was one loop, four of them gave these."""


def test_bytes_of_an_extraction(exact, images, tmp_path):
    sizes = {"batch_size": 4, "shard_size": 8, "workers": 0}
    table = dubito.extract(exact, images, tmp_path / "half", probes=[PreActivation()], **sizes)
    assert [sha(table.whole(name)) for name in ("feature", "logit", "pre_activation")] == [
        FEATURE,
        LOGIT,
        "0727f413e62ef876",
    ]
    whole = dubito.extract(exact, images, tmp_path / "whole", probes=[Forward(feature_dtype="float32")], **sizes)
    assert sha(whole.feature) == FEATURE_32


def test_bytes_of_a_table_in_memory(exact, images):
    table = predict_table(exact, images, [PreActivation()])
    assert [sha(table.whole(name)) for name in ("feature", "logit", "pre_activation")] == [
        FEATURE,
        LOGIT,
        "6fb80bcb0540650b",
    ]
    assert sha(predict_table(exact, images, feature_dtype="float32").feature) == FEATURE_32
    assert [name for name, _ in table.skipped] == ["007.png"]
    assert list(table.id) == [name for name in images.ids if name != "007.png"]


def test_bytes_of_the_audits_sample_and_fingerprints(exact, images):
    sample, _, broken = take_sample(exact, draw_subset(images, 15, 0), batch_size=4, workers=0, progress=False)
    assert sample.rows.tolist() == list(range(15))
    assert broken == []
    assert [sha(values) for values in (sample.feature, sample.logit, sample.x)] == [
        "c47059ed9d45df91",
        "20624bfbae3f5361",
        "7d895cdcaccea04a",
    ]
    assert sha(sample.predictions[0].predicted) == "0c2e6022f9be2c0a"
    prints = take_fingerprints(images, workers=0, progress=False)
    assert sha(prints.thumbnails) == "edb71bb8982f1927"
    assert hashlib.sha256(b"".join(prints.hashes)).hexdigest()[:16] == "db53d59809a2f8f7"


@pytest.mark.parametrize("recorded", ["float16", "float32"])
def test_features_are_as_precise_as_in_the_cache_that_the_provenance_describes(exact, images, tmp_path, recorded):
    forward = Forward(feature_dtype=recorded)
    table = dubito.extract(exact, images, tmp_path / "cache", probes=[forward], workers=0)
    again = predict_table(exact, images, provenance=table.provenance)
    assert torch.equal(again.feature, table.feature)
    assert again.provenance.probes["forward"] == table.provenance.probes["forward"]
    assert again.model_id == table.model_id


def test_features_beyond_half_precision_are_not_rounded():
    z = torch.tensor([[1.0001, 1e5, -70000.0]])
    assert Forward().as_stored(z).tolist() == [[1.0, 1e5, -70000.0]]
    assert torch.equal(Forward(feature_dtype="float32").as_stored(z), z)


def test_a_provenance_is_given_on_with_the_probes(exact, images):
    assert predict_table(exact, images).provenance is None
    table = predict_table(exact, images, [PreActivation()], provenance=model_identity(exact))
    assert set(table.provenance.probes) == {"forward", "pre_activation"}


def test_images_that_cannot_be_decoded(exact, images, tmp_path):
    with pytest.warns(SkippedImagesWarning, match=r"1 of 21 images could not be decoded and were skipped: .*007\.png"):
        predict_table(exact, images)
    with pytest.raises(BrokenImageError, match=r"007\.png"):
        predict_table(exact, dubito.open_images(tmp_path / "images" / "007.png"))


def test_workers_give_the_same_table(exact, images):
    alone, helped = predict_table(exact, images), predict_table(exact, images, workers=2)
    assert torch.equal(alone.logit, helped.logit)
    assert list(alone.id) == list(helped.id)


def test_a_daemonic_process_decodes_by_itself(folder, monkeypatch):
    images = dubito.open_images(folder)
    assert default_workers(images) > 0
    monkeypatch.setattr(multiprocessing.current_process(), "daemon", True, raising=False)
    assert default_workers(images) == 0


def test_features_of_a_shared_pass_are_those_of_a_pass_of_their_own(model, folder):
    shared = predict_table(model, dubito.open_images(folder), [Tiles([2])])
    assert torch.equal(shared.feature, predict_table(model, dubito.open_images(folder)).feature)


def test_a_stream_gives_every_group_once_and_sets_broken_images_apart(exact, images):
    with open_stream(images, exact.transform, in_batches([5, 6, 7, 8, 2], 2)) as stream:
        result = [(batch.indices, [index for index, _ in batch.broken]) for batch in stream]
    assert result == [([5, 6], []), ([8], [7]), ([2], [])]


@pytest.mark.parametrize(("dtype", "ready"), [(torch.float32, True), (torch.uint8, False)])
def test_the_audit_knows_ready_inputs_without_reading_an_image_twice(exact, monkeypatch, dtype, ready):
    images, reads = dubito.open_images(torch.zeros(5, 8, 8, 3).to(dtype).numpy()), []
    read = type(images).read
    monkeypatch.setattr(type(images), "read", lambda self, index: reads.append(index) or read(self, index))
    with open_stream(images, exact.transform, in_batches(range(5), 2)) as stream:
        assert [batch.ready for batch in stream] == [ready] * 3
    reads.clear()
    take_sample(exact, draw_subset(images, 5, 0), batch_size=2, workers=0, progress=False)
    assert reads == [0, 1, 2, 3, 4]


def faults(block: int) -> int:
    """Page faults of taking and freeing a large block a few times."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.empty(block, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


if platform.libc_ver()[0] == "glibc":

    def test_the_usual_limits_come_back_after_an_error():
        with pytest.raises(KeyError), kept_memory():
            raise KeyError("in the middle")
        assert faults(128 * 2**20) > 8 * 32

    def test_freed_memory_is_used_again_inside_and_given_back_outside():
        block = 128 * 2**20
        with kept_memory():
            faults(block)
            inside = faults(block)
        outside = faults(block)
        assert inside < 100
        assert outside > 8 * 32  # at the least one fault a huge page, every time

    def test_the_last_one_that_keeps_memory_gives_it_back():
        block = 128 * 2**20
        with kept_memory():
            faults(block)
            for _ in range(2):
                with kept_memory():
                    assert faults(block) < 100  # kept, although somebody inside has ended


class Noisy(torch.utils.data.Dataset):
    """Images that draw from every global generator."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        pixels = np.random.randint(0, 256, (8, 8, 3), dtype=np.uint8)  # noqa: NPY002
        return Image.fromarray(pixels).rotate(random.choice([0, 90])), int(torch.randint(3, ()))  # noqa: S311


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("run", ["predict_table", "audit"])
def test_random_states_are_as_they_were(exact, run):
    def states():
        return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002

    images = dubito.open_images(Noisy())
    before = states()
    predict_table(exact, images, workers=2 if run == "predict_table" else 0)
    if run == "audit":
        dubito.audit(exact, images, progress=False)
    assert states() == before


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("broken model")


@pytest.mark.parametrize("fails", ["model", "transform"])
def test_workers_end_with_an_error_while_its_traceback_is_kept(fails, tmp_path):
    for number in range(40):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"{number}.png")

    def refuse(image):
        raise ValueError("broken transform")

    transform = dubito.Preprocess(8) if fails == "model" else FunctionTransform(refuse)
    groups, before = in_batches(range(40), 2), set(multiprocessing.active_children())
    kept = None
    try:
        with open_stream(dubito.open_images(tmp_path), transform, groups, workers=2) as stream:
            for batch in stream:
                Raising()(batch.inputs)
    except (ValueError, ImagesError) as error:
        kept = error
    assert f"broken {fails}" in str(kept)
    assert set(multiprocessing.active_children()) == before
