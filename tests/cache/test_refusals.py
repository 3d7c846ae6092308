"""What extraction refuses, before or without harm to what is there."""

import numpy as np
import pytest
import torch

import dubito
from dubito.errors import (
    CacheError,
    ImagesError,
    StaleCacheError,
    TableError,
    ValueRangeError,
)
from tests.cache.conftest import contents, edit_manifest, small_network


def extract(model, images, to, **options):
    return dubito.extract(model, images, to, **{"batch_size": 4, "shard_size": 8, "workers": 0, **options})


def refused(model, images, cache, message, **options):
    before = contents(cache)
    with pytest.raises(StaleCacheError, match=message):
        extract(model, images, cache, **options)
    assert contents(cache) == before


class Constant:
    """A probe that writes its setting."""

    name, price = "constant", "nothing"

    def __init__(self, value, fails_at=None):
        self.value, self.fails_at, self.seen = value, fails_at, 0

    def run(self, model, x, label):
        self.seen += 1
        if self.seen == self.fails_at:
            raise KeyboardInterrupt
        return {"constant": torch.full((len(x),), float(self.value))}

    def settings(self):
        return {"value": self.value}


def test_a_further_probe_that_was_interrupted_keeps_its_settings(model, folder, tmp_path):
    extract(model, folder, tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        extract(model, folder, tmp_path / "cache", probes=[Constant(1, fails_at=5)])
    message = r"constant probe \(value=1 there, 2 here\)\. Extract .* or use the settings that this cache has"
    refused(model, folder, tmp_path / "cache", f"the settings of the {message}", probes=[Constant(2)])
    table = extract(model, folder, tmp_path / "cache", probes=[Constant(1)])
    assert table.whole("constant").tolist() == [1.0] * 23


def test_a_probe_s_name_must_fit_into_a_file_s(model, folder, tmp_path):
    probe = Constant(1)
    probe.name = "flip2"
    with pytest.raises(
        CacheError, match="must be lower-case letters and underscores, and neither 'rows' nor 'head'; got 'flip2'"
    ):
        extract(model, folder, tmp_path / "cache", probes=[probe])
    probe.name = "rows"
    with pytest.raises(CacheError, match="neither 'rows' nor 'head'; got 'rows'"):
        extract(model, folder, tmp_path / "cache", probes=[probe])


def test_two_probes_of_one_name_are_not_one(model, folder, tmp_path):
    with pytest.raises(CacheError) as error:
        extract(
            model,
            folder,
            tmp_path / "cache",
            probes=[dubito.probes.Tiles([2]), Constant(1), dubito.probes.Tiles([2, 3])],
        )
    assert str(error.value) == (
        "extract: probes must have different names; two are called 'tiles': Tiles(grids=(2,), keep='summary', "
        "temperature=1.0, dtype='float16') and Tiles(grids=(2, 3), keep='summary', temperature=1.0, dtype='float16'). "
        "Extract the second into another folder."
    )
    assert not (tmp_path / "cache").exists()
    with pytest.raises(CacheError, match="two are called 'forward'"):
        extract(
            model,
            folder,
            tmp_path / "cache",
            probes=[dubito.probes.Forward(), dubito.probes.Forward(store_logit=False)],
        )
    table = extract(
        model, folder, tmp_path / "cache", probes=[Constant(1), dubito.probes.Forward(feature_dtype="float32")]
    )
    assert table.feature.dtype == torch.float32  # the one that was given, not the usual one
    assert "constant" in table


def test_the_same_images_elsewhere_give_the_same_bytes(model, folder, tmp_path):
    extract(model, folder, tmp_path / "here")
    extract(model, folder.rename(tmp_path / "moved"), tmp_path / "there")
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_other_peoples_unfinished_files_are_left_alone(model, folder, tmp_path):
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "film.part").write_text("half")
    with pytest.raises(CacheError, match=r"holds other things \(film\.part\)"):
        extract(model, folder, tmp_path / "downloads")
    assert (tmp_path / "downloads" / "film.part").read_text() == "half"


def test_our_own_unfinished_files_are_swept(model, folder, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "manifest.json.part").write_text("half")
    (tmp_path / "cache" / "forward-00000-0123abcd.safetensors.part").write_text("half")
    extract(model, folder, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.part"))


def test_another_head_of_the_same_weights_is_another_model(folder, tmp_path):
    class TwoHeads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = small_network(), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x):
            return self.a(self.body(x)) * self.b(self.body(x))

    module, transform = TwoHeads(), dubito.Preprocess((16, 16), 16)
    extract(dubito.wrap(module, transform=transform, head="a"), folder, tmp_path / "cache")
    other = dubito.wrap(module, transform=transform, head="b")
    refused(other, folder, tmp_path / "cache", r"the layer taken as classifying \(layer=a there, b here\)")


@pytest.mark.parametrize(
    ("option", "value"), [("batch_size", 0), ("batch_size", -1), ("shard_size", 0), ("workers", -1)]
)
def test_sizes_that_make_no_sense(model, folder, tmp_path, option, value):
    with pytest.raises(ValueRangeError, match=f"extract: {option} must be a whole number, at least [01]; got {value}"):
        extract(model, folder, tmp_path / "cache", **{option: value})
    assert not (tmp_path / "cache").exists()


def test_a_failed_first_try_does_not_bind(model, folder, tmp_path):
    with pytest.raises(ImagesError, match="labels must be classes"):
        extract(model, folder, tmp_path / "cache", labels=[7] * 23)
    assert len(extract(model, folder, tmp_path / "cache", labels=[0] * 23)) == 23


class Odd:
    """A probe that breaks a rule."""

    name, price = "odd", "nothing"

    def __init__(self, column, rows):
        self.column, self.rows = column, rows

    def run(self, model, x, label):
        return {self.column: self.rows(x)}

    def settings(self):
        return {}


@pytest.mark.parametrize(
    ("column", "rows", "message"),
    [
        ("short", lambda x: torch.zeros(len(x) - 1), r"one row per image; got column 'short' of shape \(3,\) for 4"),
        ("scalar", lambda x: torch.zeros(()), r"one row per image; got column 'scalar' of shape \(\)"),
        ("logit", lambda x: torch.zeros(len(x)), "writes column 'logit', which forward writes already"),
        ("label", lambda x: torch.zeros(len(x)), "writes column 'label', which extract writes already"),
    ],
)
def test_a_probe_that_breaks_a_rule_does_not_harm_the_rest(model, folder, tmp_path, column, rows, message):
    extract(model, folder, tmp_path / "cache")
    with pytest.raises(TableError, match=message):
        extract(model, folder, tmp_path / "cache", probes=[Odd(column, rows)])
    with pytest.raises(TableError, match=message):
        extract(model, folder, tmp_path / "new", probes=[Odd(column, rows)])


class Moody:
    """Writes a second column for some batches only."""

    name, price = "moody", "nothing"

    def __init__(self, batches):
        self.batches, self.seen = batches, 0

    def run(self, model, x, label):
        self.seen += 1
        more = {"sometimes": torch.zeros(len(x))} if self.seen in self.batches else {}
        return {"always": torch.zeros(len(x)), **more}

    def settings(self):
        return {}


@pytest.mark.parametrize("batches", [(1,), (2, 3), (3, 4)])  # two batches a shard: within one, and between two
def test_a_probe_whose_columns_come_and_go(model, folder, tmp_path, batches):
    with pytest.raises(TableError, match=r"probe moody must write the same columns for every batch; got always.*"):
        extract(model, folder, tmp_path / "cache", probes=[Moody(batches)])


def test_a_manifest_of_another_make(model, folder, tmp_path):
    extract(model, folder, tmp_path / "cache")
    edit_manifest(tmp_path / "cache", lambda entries: entries.update(more=1))
    with pytest.raises(CacheError, match=r"cache .* cannot be read \(.*'more'\)\. Extract again into"):
        dubito.open(tmp_path / "cache")


def test_a_fitted_score_refuses_another_model(model, folder, tmp_path):
    table = extract(model, folder, tmp_path / "cache")
    other = dubito.wrap(small_network(), transform=dubito.Preprocess((16, 16), 18))
    different = extract(other, folder, tmp_path / "other")
    score = dubito.Neighbours(k=2).fit(table)
    assert score.score(table).shape == (23,)
    with pytest.raises(TableError, match=r"neighbours\.score: .* must come from one model"):
        score.score(different)
    with pytest.raises(TableError, match="must come from one model"):
        dubito.load_score(dubito.save_score(score, tmp_path / "saved")).score(different)


@pytest.mark.parametrize("stored", [True, False])
def test_rows_of_a_cache_are_those_of_memory(model, folder, tmp_path, stored):
    disk = extract(model, folder, tmp_path / "cache", probes=[dubito.probes.Forward(store_logit=stored)])
    memory = dubito.Table(feature=disk.feature, logit=disk.logit, label=disk.label, id=disk.id)
    mask = np.arange(23) % 3 == 0
    for rows in (slice(3, 19), slice(None, None, -2), [5, -1, 5], np.array([22, 0]), mask, torch.tensor(mask), []):
        got, expected = disk.rows(rows), memory.rows(rows)
        assert list(got.id) == list(expected.id)
        torch.testing.assert_close(got.logit, expected.logit)
        assert torch.equal(got.feature, expected.feature)
    for table in (disk, memory):
        with pytest.raises(TableError, match=r"indices below 23; got torch.int64 of shape \(1,\), up to 100"):
            table.rows(torch.tensor([100]))
