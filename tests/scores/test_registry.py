import pytest

from dubito.errors import TableError, ValueRangeError
from dubito.scores import SCORES, Entropy, Margin, Neighbours, ScaledEntropy, make_score
from dubito.scores.registry import by_name


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
        ValueRangeError, match=r"score 'scaled_entropy' does not take these settings \(.*'temperature'.*\)\."
    ):
        make_score("scaled_entropy", temperature=0.1)


@pytest.mark.parametrize(
    ("given", "found"),
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
def test_what_a_user_gives_as_scores_by_name(given, found):
    assert list(by_name(given, by="x").items()) == list(found.items())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [ScaledEntropy(0.1), Entropy(), ScaledEntropy(0.2)],
            r"x: scores in a list must have different names; two are called 'scaled_entropy'\. Give them by name",
        ),
        (["entropy", Entropy()], "two are called 'entropy'"),
        (Entropy, r"x: scores must be scores, such as dubito\.Entropy\(\), or names of them; got the class Entropy\."),
        ({"u": Entropy}, r"such as dubito\.Entropy\(\), or names of them; got the class Entropy\."),
        ([0.1, 0.2], r"x: scores must be .* names of them; got float\. Give arrays by name: \{'mine': array\}\."),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_score(given, said):
    with pytest.raises(TableError, match=said):
        by_name(given, by="x")
    with pytest.raises(ValueRangeError, match=r"got 'entropi'\. Did you mean entropy\?"):
        by_name(["entropi"], by="x")


def test_arrays_where_only_scores_will_do():
    assert by_name({"e": "entropy"}, by="x", arrays=False) == {"e": Entropy()}
    for given in ({"mine": [0.1, 0.2]}, [[0.1, 0.2]]):
        with pytest.raises(TableError, match=r"names of them; got list\. Leave them out for all that there are\."):
            by_name(given, by="x", arrays=False)
