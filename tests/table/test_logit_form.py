import pytest
import torch

from dubito.errors import DubitoWarning, TableError
from dubito.table import Table, check_size_of_logits, form_of, warn_of_probabilities

LOGITS = 3 * torch.randn(20, 5, generator=torch.Generator().manual_seed(0))


def test_forms_of_rows():
    assert form_of(LOGITS) is None
    assert form_of(LOGITS.softmax(1)) == "probabilities"
    assert form_of(LOGITS.log_softmax(1)) == "log_probabilities"
    assert form_of(LOGITS[:0]) is None
    assert form_of(torch.zeros(3, 1)) is None  # the softmax of one class is 1, whatever the logits


def test_log_probabilities_are_refused_where_enough_rows_show_them():
    log_p = LOGITS.log_softmax(1)
    with pytest.raises(
        TableError, match=r"energy.score needs logits .* holds log-probabilities.*Pass the model's logits"
    ):
        check_size_of_logits(Table(logit=log_p), by="energy.score")
    check_size_of_logits(Table(logit=LOGITS), by="energy.score")
    check_size_of_logits(Table(logit=log_p[:1]), by="energy.score")  # one row of logits may be like this by chance
    mixed = torch.cat([log_p, LOGITS])
    check_size_of_logits(Table(logit=mixed), by="energy.score")


def test_probabilities_are_warned_of_where_enough_rows_show_them(recwarn):
    for logit in (LOGITS, LOGITS.log_softmax(1), LOGITS.softmax(1)[:1], torch.eye(9)):
        warn_of_probabilities(Table(logit=logit))
    assert not recwarn
    with pytest.warns(DubitoWarning, match=r"must hold logits; its rows .* sum to 1.*or the logarithms of the prob"):
        warn_of_probabilities(Table(logit=LOGITS.softmax(1)))
