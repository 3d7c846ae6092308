import pytest

from dubito.errors import DubitoError
from dubito.scores import SCORES, Cool, Neighbours, make_score


def test_names_are_those_of_the_scores():
    assert list(SCORES) == [score.name for score in SCORES.values()]
    assert {"max_probability", "entropy", "cool", "margin", "max_logit", "energy", "temperature", "neighbours"} <= set(
        SCORES
    )


def test_made_by_name_with_settings():
    assert make_score("cool", scale=0.2) == Cool(scale=0.2)
    assert make_score("neighbours", k=3) == Neighbours(k=3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("entropi", "score: there is no 'entropi'. Nearest: entropy"),
        ("neighbors", "score: there is no 'neighbors'. Nearest: neighbours"),
        ("maxlogit", "score: there is no 'maxlogit'. Nearest: max_logit"),
        ("zzz", "score: there is no 'zzz'. Known: max_probability, entropy, cool, margin, max_logit, energy"),
    ],
)
def test_an_unknown_name_is_answered_with_near_ones(name, said):
    with pytest.raises(DubitoError) as error:
        make_score(name)
    assert str(error.value).startswith(said)


def test_an_unknown_setting():
    with pytest.raises(DubitoError, match=r"score 'cool' does not take these settings \(.*'temperature'.*\)\."):
        make_score("cool", temperature=0.1)
