import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from dubito.errors import ArtefactError, TableError, ValueRangeError
from dubito.scores import (
    SCORES,
    Entropy,
    Margin,
    Neighbours,
    ScaledEntropy,
    Temperature,
    load_score,
    make_score,
    save_score,
)
from dubito.scores.registry import by_name
from dubito.table import Table
from dubito.types import Score

TABLE = Table(feature=torch.eye(5) + 0.1, logit=torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]]).repeat(2, 1)[:5])


def test_names_are_those_of_the_scores():
    assert list(SCORES) == [score.name for score in SCORES.values()]
    assert {
        "max_probability",
        "entropy",
        "scaled_entropy",
        "margin",
        "max_logit",
        "energy",
        "temperature",
        "neighbours",
    } <= set(SCORES)


def test_made_by_name_with_settings():
    assert make_score("scaled_entropy", scale=0.2) == ScaledEntropy(scale=0.2)
    assert make_score("neighbours", k=3) == Neighbours(k=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("entropi", "got 'entropi'. Did you mean entropy?"),
        ("neighbors", "got 'neighbors'. Did you mean neighbours?"),
        ("maxlogit", "got 'maxlogit'. Did you mean max_logit?"),
        ("zzz", "got 'zzz'."),
    ],
)
def test_an_unknown_name_is_answered_with_near_ones(name, message):
    with pytest.raises(ValueRangeError) as error:
        make_score(name)
    assert str(error.value).startswith("make_score: score must be one of max_probability, entropy, scaled_entropy")
    assert str(error.value).endswith(message)


def test_an_unknown_setting():
    with pytest.raises(
        ValueRangeError,
        match=r"'scaled_entropy' does not take these settings \(.*'temperature'.*\)\. Look at help\(ScaledEntropy\)\.",
    ):
        make_score("scaled_entropy", temperature=0.1)


@pytest.mark.parametrize(
    ("original", "result"),
    [
        (Entropy(), {"entropy": Entropy()}),
        ("entropy", {"entropy": Entropy()}),
        ([ScaledEntropy(scale=0.2), "margin"], {"scaled_entropy": ScaledEntropy(scale=0.2), "margin": Margin()}),
        (("margin", "entropy"), {"margin": Margin(), "entropy": Entropy()}),
        (
            {"mine": [0.1, 0.2], "cold": ScaledEntropy(), "e": "entropy"},
            {"mine": [0.1, 0.2], "cold": ScaledEntropy(), "e": Entropy()},
        ),
        ([], {}),
    ],
)
def test_what_a_user_gives_as_scores_by_name(original, result):
    assert list(by_name(original, by="x").items()) == list(result.items())


@pytest.mark.parametrize(
    ("original", "message"),
    [
        (
            [ScaledEntropy(0.1), Entropy(), ScaledEntropy(0.2)],
            r"x: scores in a list must have different names; two are called 'scaled_entropy'\. Pass a mapping",
        ),
        (["entropy", Entropy()], "two are called 'entropy'"),
        (Entropy, r"x: scores must be scores, such as dubito\.Entropy\(\), or names of them; got the class Entropy\."),
        ({"u": Entropy}, r"such as dubito\.Entropy\(\), or names of them; got the class Entropy\."),
        ([0.1, 0.2], r"x: scores must be .* names of them; got float\. Pass arrays by name: \{'mine': array\}\."),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_score(original, message):
    with pytest.raises(TableError, match=message):
        by_name(original, by="x")
    with pytest.raises(ValueRangeError, match=r"got 'entropi'\. Did you mean entropy\?"):
        by_name(["entropi"], by="x")


def test_arrays_where_only_scores_will_do():
    assert by_name({"e": "entropy"}, by="x", arrays=False) == {"e": Entropy()}
    for value in ({"mine": [0.1, 0.2]}, [[0.1, 0.2]]):
        with pytest.raises(TableError, match=r"names of them; got list\. Leave them out for all that there are\."):
            by_name(value, by="x", arrays=False)


@pytest.fixture
def saved(tmp_path):
    return save_score(Neighbours(k=2).fit(TABLE), tmp_path / "score")


def read(folder):
    """What score.json says, without its hashes: as the first scores were written."""
    described = json.loads((folder / "score.json").read_text())
    return {key: value for key, value in described.items() if key not in ("digest", "state_file")}


def rewrite(folder, **changes):
    (folder / "score.json").write_text(json.dumps({**read(folder), **changes}))


def test_what_is_written(tmp_path):
    score = Temperature(ScaledEntropy(0.2))
    score.temperature_ = 1.5
    folder = save_score(score, tmp_path)
    assert read(folder) == {
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


def test_values_that_were_changed_since(saved, tmp_path):
    text = (saved / "score.json").read_text()
    (saved / "score.json").write_text(text.replace('"k": 2', '"k": 3'))
    with pytest.raises(ArtefactError, match=r"score\.json was changed after it was written"):
        load_score(saved)
    (saved / "score.json").write_text(text)
    other = save_score(Neighbours(k=2).fit(TABLE.rows(slice(0, 2))), tmp_path / "other")
    (other / "state.safetensors").rename(saved / "state.safetensors")
    with pytest.raises(ArtefactError, match=r"state\.safetensors is not the file that score\.json was written with"):
        load_score(saved)
    rewrite(saved)
    assert len(load_score(saved).bank_) == 2


def test_learned_tensors_that_do_not_fit_together(saved):
    save_file({"bank_": torch.zeros(3)}, saved / "state.safetensors")
    rewrite(saved)
    with pytest.raises(TableError, match=r"neighbours\.score: what it has learned, as its file says, does not fit"):
        load_score(saved).score(TABLE)


def test_a_state_cut_short(saved):
    content = (saved / "state.safetensors").read_bytes()
    (saved / "state.safetensors").write_bytes(content[:-5])
    with pytest.raises(ArtefactError, match="cannot be read"):
        load_score(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "oracle"}, r"\(format 1, score oracle\)"),
        ({"score": ["neighbours"]}, r"\(format 1, score \['neighbours'\]\)"),
        ({"format": 2}, r"\(format 2, score neighbours\)"),
    ],
)
def test_a_kind_from_elsewhere(saved, changes, message):
    rewrite(saved, **changes)
    with pytest.raises(
        ArtefactError,
        match=rf"is of a kind that this dubito does not know {message}\. Update dubito, or save the score again\.",
    ):
        load_score(saved)


def test_a_description_that_is_no_description(saved):
    (saved / "score.json").write_text("[1, 2]")
    with pytest.raises(ArtefactError, match=r"does not know \(format None, score None\)"):
        load_score(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"k": 2, "colour": "red"}}, "colour"),
        ({"settings": None}, ""),
        ({"settings": [1]}, ""),
        ({"learned": None}, ""),
        ({"learned": 3}, ""),
    ],
)
def test_contents_that_make_no_score(saved, changes, message):
    rewrite(saved, **changes)
    with pytest.raises(
        ArtefactError, match=rf"saved score in '.*score' cannot be read \(.*{message}.*\)\. Save it again\."
    ):
        load_score(saved)


def test_parts_that_are_missing(saved):
    described = read(saved)
    for key in ("settings", "learned"):
        (saved / "score.json").write_text(json.dumps({k: v for k, v in described.items() if k != key}))
        with pytest.raises(ArtefactError, match="cannot be read"):
            load_score(saved)


def test_an_inner_score_that_is_unknown(tmp_path):
    folder = save_score(Temperature(), tmp_path)
    rewrite(folder, settings={"score_of": {"score": "oracle", "settings": {}}})
    with pytest.raises(ArtefactError, match=r"cannot be read \(this dubito has no score 'oracle'\)"):
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
