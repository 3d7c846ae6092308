"""Messages of errors."""

import pickle

import pytest

from dubito.errors import DubitoError, MissingColumnError, UnknownNameError


@pytest.mark.parametrize("kind", [DubitoError, MissingColumnError, UnknownNameError])
def test_a_message_with_a_value_of_any_length_is_one_that_people_read(kind):
    error = kind("names 'a', got '" + "y" * 100_000 + "'. Save it again.")
    text = str(error)
    assert len(text) < 2100
    assert text.startswith("names 'a', got 'yyy")
    assert text.endswith("yyy'. Save it again.")
    assert str(pickle.loads(pickle.dumps(error))) == text  # noqa: S301


def test_what_was_expected_stays_between_two_long_values():
    text = str(DubitoError(f"'{'y' * 5000}' must be a number; got {'z' * 5000}. Save it again."))
    assert "yyy' must be a number; got zzz" in text
    assert len(text) < 1200


def test_a_message_of_many_words_loses_its_middle():
    text = str(DubitoError("word " * 5000 + "Save it again."))
    assert len(text) == 2005
    assert text.endswith("Save it again.")


def test_a_usual_message_stays_as_it_is():
    assert str(DubitoError("x" * 2000)) == "x" * 2000
