"""What a rejection study is given: clear words at the edges."""

import pytest
import torch
from tests.evaluate.rejected import QUICK, data

from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.evaluate.rejection import rejection_study
from dubito.metrics import MemberStream
from dubito.table import Provenance, Table


@pytest.fixture(scope="module")
def table() -> Table:
    return data()


@pytest.fixture(scope="module")
def calibration() -> Table:
    return data(90, seed=1)


class TestMessages:
    def test_a_summary_of_another_temperature(self, table):
        stream = MemberStream(temperature=3.0)
        stream.add(table.whole("tiles_2_logit"))
        warm = table.extended(tiles_2=stream.summary().float())
        text = (
            r"'tiles_2' of set 0 must be the summary of 'tiles_2_logit' at T = 1; in row \d+ its total .* temperature=1"
        )
        with pytest.raises(TableError, match=text):
            rejection_study(warm, ["tiles_2"], **QUICK)

    def test_a_summary_that_is_known_to_be_of_another_temperature(self, table):
        stream = MemberStream(temperature=3.0)
        stream.add(table.whole("tiles_2_logit"))
        warm = data(grids=(2,)).extended(tiles_2=stream.summary().float())
        warm.provenance = Provenance(probes={"tiles": {"settings": {"temperature": 3.0}}})
        text = r"the summary 'tiles_2' at T = 1, or column 'tiles_2_logit'; .* with temperature=3\. Extract it with"
        with pytest.raises(TableError, match=text):
            rejection_study(warm.select("logit", "label", "tiles_2", "tiles_2_loss"), **QUICK)
        found, plain = (rejection_study(t, ["tiles_2"], **QUICK).results[1] for t in (warm, table))  # from the logits
        assert found.figures["aurc"].value == pytest.approx(plain.figures["aurc"].value, abs=1e-3)

    def test_kept_logits_may_be_halved(self, table):
        halved = table.extended(tiles_2_logit=table.whole("tiles_2_logit").half())
        assert rejection_study(halved, ["tiles_2"], **QUICK).results

    @pytest.mark.parametrize("wrong", [{"confidence": 95.0}, {"resamples": 0}, {"seed": -1}])
    def test_intervals_that_cannot_be_drawn(self, table, wrong):
        name, value = next(iter(wrong.items()))
        with pytest.raises(ValueRangeError, match=rf"at least one resample and a seed .*{name}={value}.* are usual"):
            rejection_study(table, **wrong)

    def test_calibration_without_ids_on_the_same_rows(self, table):
        bare = table.select("logit", "label")
        with pytest.raises(TableError, match=r"set 0 has the logits of set 0, row by row\. Give half of them"):
            rejection_study(bare, calibration=table)
        assert len(rejection_study(bare, calibration=data(len(table), seed=1), **QUICK).temperatures) == 2

    def test_calibration_with_other_classes(self, table, calibration):
        fewer = Table(name="few", logit=calibration.logit[:, :4], label=calibration.label % 4, id=calibration.id)
        with pytest.raises(
            TableError, match=r"calibration must have the classes of set 0, 6; few has 4\. Extract both"
        ):
            rejection_study(table, calibration=fewer)

    def test_pooled_weights_of_another_ensemble(self, table, calibration):
        fewer = calibration.extended(tiles_2_logit=calibration.whole("tiles_2_logit")[:, :3])
        with pytest.raises(TableError, match="has 4 members in 'tiles_2_logit'; weights were fitted for 3"):
            rejection_study(table, ["tiles_2"], calibration=fewer, uncertainties=["pooled_sum"], **QUICK)

    def test_no_labels(self, table):
        with pytest.raises(MissingColumnError, match="rejection_study needs column 'label'"):
            rejection_study(table.select("logit", "tiles_2"))

    def test_labels_of_another_set(self, table):
        own = Table(logit=table.logit, label=table.label, label_space="own", name="birds")
        with pytest.raises(
            TableError, match="needs labels of the model's own classes; those of birds are another set's"
        ):
            rejection_study(own)

    def test_no_such_ensemble(self, table):
        text = r"needs an ensemble 'tiles_5'; set 0 has tiles_2, tiles_3\. It is written by the probe of tiles"
        with pytest.raises(MissingColumnError, match=text):
            rejection_study(table, ["tiles_5"])

    def test_fewer_rows_than_buckets(self, table):
        with pytest.raises(ValueRangeError, match=r"buckets must be 2 to the number of rows, 4 in set 0; got 10"):
            rejection_study(table.rows(slice(0, 4)))

    def test_temperature_without_calibration(self, table):
        with pytest.raises(TableError, match=r"needs as calibration=\.\.\.; got none\. Give a table of other labelled"):
            rejection_study(table, temperatures=["optimal"])

    def test_temperature_without_logits(self, table, calibration):
        summaries = data(keep=False)
        text = r"T = [\d.]+ needs column 'tiles_2_logit'.*dubito\.Tiles\(.*keep=.logits"
        with pytest.raises(MissingColumnError, match=text):
            rejection_study(summaries, calibration=calibration)
        assert rejection_study(summaries, calibration=calibration, temperatures=(1.0,), **QUICK).temperatures == (1.0,)

    def test_calibration_on_the_evaluated_rows(self, table):
        with pytest.raises(TableError, match=r"must be of other images; 30 of 120 images .* such as '0/0'"):
            rejection_study(table, calibration=table.rows(slice(0, 30)))

    def test_shared_images_are_compared_a_few_at_a_time(self, table, monkeypatch):
        monkeypatch.setattr("dubito.evaluate._rejection_given._ROWS", 7)
        with pytest.raises(TableError, match=r"must be of other images; 30 of 120 images .* such as '0/0'"):
            rejection_study(table, calibration=table.rows(slice(0, 30)))

    def test_other_images_may_have_the_same_names(self, table, calibration):
        renamed = calibration.extended(id=table.id[: len(calibration)])
        assert len(rejection_study(table, calibration=renamed, **QUICK).temperatures) == 2

    def test_calibration_of_another_model(self, table, calibration):
        mine, other = (
            Table(logit=t.logit, label=t.label, provenance=Provenance(weights=weights))
            for t, weights in ((table, "a"), (calibration, "b"))
        )
        with pytest.raises(TableError, match=r"was made by another model \(\w+\) than table in memory \(\w+\)"):
            rejection_study(mine, calibration=other)

    def test_pooled_without_calibration(self, table):
        with pytest.raises(TableError, match=r"pooled_sum learns its weights on other images.*or choose weighted_log"):
            rejection_study(table, uncertainties=["pooled_sum"])

    def test_names_and_choices(self, table):
        with pytest.raises(ValueRangeError, match=r"'mutual_info' came\. Nearest: mutual_information"):
            rejection_study(table, uncertainties=["mutual_info"])
        with pytest.raises(ValueRangeError, match="uncertainties must be a list of names; got 'mutual_information'"):
            rejection_study(table, uncertainties="mutual_information")
        with pytest.raises(ValueRangeError, match=r"temperatures must be positive numbers or 'optimal'; got -1"):
            rejection_study(table, temperatures=[-1])

    def test_one_name_is_no_list(self, table):
        with pytest.raises(
            ValueRangeError, match=r"ensembles must be a list of names; got 'tiles_2'\. Give \['tiles_2'\]"
        ):
            rejection_study(table, "tiles_2")

    def test_nan_of_members_names_its_column(self, table):
        spoilt = table.whole("tiles_2_logit").clone()
        spoilt[3, 1] = torch.nan
        with pytest.raises(ValueRangeError, match="rejection_study: column 'members_logit' of set 0"):
            rejection_study(table.extended(members_logit=spoilt), ["members"])

    def test_other_classes(self, table):
        with pytest.raises(TableError, match="'members' must predict the classes of the logits, 6; its members have 2"):
            rejection_study(table.extended(members_logit=torch.zeros(len(table), 3, 2)), ["members"])

    def test_columns_of_another_kind(self, table):
        with pytest.raises(TableError, match=r"'mine' of set 0 must have the axes \(n, 9\); got \(120, 6\)"):
            rejection_study(table.extended(mine=table.logit), ["mine"])
        with pytest.raises(TableError, match=r"'mine_logit' of set 0 must have the axes \(n, members, classes\); "):
            rejection_study(table.extended(mine_logit=table.logit), ["mine"])

    def test_one_member(self, table):
        with pytest.raises(TableError, match="'members' of set 0 has one member, which agrees with itself"):
            rejection_study(table.extended(members_logit=table.logit[:, None]), ["members"])
