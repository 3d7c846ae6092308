import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from dubito.errors import ArtefactError
from dubito.scores import Entropy, Neighbours, ScaledEntropy, Temperature, load_score, save_score
from dubito.table import Table
from dubito.types import Score

TABLE = Table(feature=torch.eye(5) + 0.1, logit=torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]]).repeat(2, 1)[:5])


@pytest.fixture
def saved(tmp_path):
    return save_score(Neighbours(k=2).fit(TABLE), tmp_path / "score")


def rewrite(folder, **changes):
    described = json.loads((folder / "score.json").read_text())
    (folder / "score.json").write_text(json.dumps({**described, **changes}))


def test_what_is_written(tmp_path):
    score = Temperature(ScaledEntropy(0.2))
    score.temperature_ = 1.5
    folder = save_score(score, tmp_path)
    assert json.loads((folder / "score.json").read_text()) == {
        "format": 1,
        "score": "temperature",
        "settings": {"score_of": {"score": "scaled_entropy", "settings": {"scale": 0.2}}},
        "learned": {"temperature_": 1.5},
        "provenance": None,
    }
    assert load_file(folder / "state.safetensors") == {}
    loaded = load_score(folder)
    assert (loaded, loaded.temperature_, loaded.kind) == (Temperature(ScaledEntropy(0.2)), 1.5, "total")


def test_tensors_are_kept_bit_by_bit(saved):
    assert torch.equal(load_score(str(saved)).bank_, Neighbours(k=2).fit(TABLE).bank_)
    assert list(load_file(saved / "state.safetensors")) == ["bank_"]


def test_a_tensor_that_is_a_view_can_be_saved(tmp_path):
    score = Neighbours(k=2).fit(TABLE)
    score.bank_ = score.bank_.T
    assert torch.equal(load_score(save_score(score, tmp_path)).bank_, score.bank_)


def test_saving_again_replaces(saved):
    save_score(Entropy(), saved)
    assert load_score(saved) == Entropy()
    assert sorted(path.name for path in saved.iterdir()) == ["score.json", "state.safetensors"]


@pytest.mark.parametrize("file", ["score.json", "state.safetensors"])
def test_a_missing_file(saved, file):
    (saved / file).unlink()
    with pytest.raises(
        ArtefactError, match=rf"no saved score in '.*score': {file} is not there\. Save one with dubito\.save_score\."
    ):
        load_score(saved)


def test_a_missing_folder(tmp_path):
    with pytest.raises(ArtefactError, match=r"no saved score in '.*gone': score\.json is not there"):
        load_score(tmp_path / "gone")


@pytest.mark.parametrize("file", ["score.json", "state.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"\x00" * 100])
def test_a_damaged_file(saved, file, content):
    (saved / file).write_bytes(content)
    with pytest.raises(ArtefactError, match=r"saved score in '.*score' cannot be read \(.*\)\. Save it again\."):
        load_score(saved)


def test_a_state_cut_short(saved):
    content = (saved / "state.safetensors").read_bytes()
    (saved / "state.safetensors").write_bytes(content[:-5])
    with pytest.raises(ArtefactError, match="cannot be read"):
        load_score(saved)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"score": "oracle"}, r"\(format 1, score oracle\)"),
        ({"score": ["neighbours"]}, r"\(format 1, score \['neighbours'\]\)"),
        ({"format": 2}, r"\(format 2, score neighbours\)"),
    ],
)
def test_a_kind_from_elsewhere(saved, changes, said):
    rewrite(saved, **changes)
    with pytest.raises(
        ArtefactError, match=rf"is of a kind that this dubito does not know {said}\. Update dubito or save it again"
    ):
        load_score(saved)


def test_a_description_that_is_no_description(saved):
    (saved / "score.json").write_text("[1, 2]")
    with pytest.raises(ArtefactError, match=r"does not know \(format None, score None\)"):
        load_score(saved)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": {"k": 2, "colour": "red"}}, "colour"),
        ({"settings": None}, ""),
        ({"settings": [1]}, ""),
        ({"learned": None}, ""),
        ({"learned": 3}, ""),
    ],
)
def test_contents_that_make_no_score(saved, changes, said):
    rewrite(saved, **changes)
    with pytest.raises(
        ArtefactError, match=rf"saved score in '.*score' cannot be restored \(.*{said}.*\)\. Save it again\."
    ):
        load_score(saved)


def test_parts_that_are_missing(saved):
    described = json.loads((saved / "score.json").read_text())
    for key in ("settings", "learned"):
        (saved / "score.json").write_text(json.dumps({k: v for k, v in described.items() if k != key}))
        with pytest.raises(ArtefactError, match="cannot be restored"):
            load_score(saved)


def test_an_inner_score_that_is_unknown(tmp_path):
    folder = save_score(Temperature(), tmp_path)
    rewrite(folder, settings={"score_of": {"score": "oracle", "settings": {}}})
    with pytest.raises(ArtefactError, match=r"cannot be restored \(make_score: score must be .*got 'oracle'"):
        load_score(folder)


def test_a_foreign_key_among_the_learned(saved):
    rewrite(saved, learned={"fit": 3})
    with pytest.raises(ArtefactError, match=r"saved score in '.*score' holds 'fit', which neighbours does not learn\."):
        load_score(saved)
    rewrite(saved, learned={})
    save_file({"other_": torch.ones(1)}, saved / "state.safetensors")
    with pytest.raises(ArtefactError, match=r"holds 'other_', which neighbours does not learn\."):
        load_score(saved)


def test_a_wrapper_from_elsewhere_is_not_saved(tmp_path):
    @dataclass
    class Wrapper(Score):
        score_of: Score
        name = "wrapper"
        kind = "total"
        needs = ("logit",)

        def score_batch(self, table):
            return self.score_of.score_batch(table)

    with pytest.raises(ArtefactError, match=r"'wrapper' .* cannot be saved: it is not one of dubito's own"):
        save_score(Wrapper(Entropy()), tmp_path / "mine")
