"""A whole report: its numbers are those of the rooms behind it, and what a table lacks is said, never guessed."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import beta
from tests.page.test_render import Reader
from torch import nn

import dubito
from dubito import Table
from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.explain import structure
from dubito.report import model_report, parts
from dubito.report import report as module
from dubito.report.summary import summary

N, C, D = 400, 4, 6
EVIL = """<script>alert("x")</script>&'"""


def layer() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(C, D, generator=draw), torch.randn(C, generator=draw)


def table(rows: int = N, seed: int = 0, spread: float = 1.0, **more) -> Table:
    """Clusters along the weights of a linear layer."""
    draw = torch.Generator().manual_seed(seed)
    weight, bias = layer()
    label = torch.randint(C, (rows,), generator=draw)
    feature = weight[label] + spread * torch.randn(rows, D, generator=draw)
    return Table(**{"feature": feature, "logit": feature @ weight.T + bias, "label": label, "name": "toy/val"} | more)


def without(full: Table, *columns: str) -> Table:
    return full.select(*(name for name in full.columns if name not in columns))


@pytest.fixture(scope="module")
def report():
    skipped = [("broken.jpg", "broken.jpg: not an image")]
    ood = table(150, 5, spread=3.0, label=None, name="noise")
    return model_report(table(skipped=skipped), ood={"noise": ood}, train=table(300, 7, name="toy/train"))


@pytest.fixture(scope="module")
def page(report):
    return report.to_html()


@pytest.fixture(scope="module")
def watch():
    """300 images like those of the calibration, then 200 of others; one has a name that a page must not execute."""
    guard = dubito.Guard.fit(None, table(1500, 11), risk=0.3, scores=["entropy"], sets=False)
    made = guard.watch()
    for rows, seed, spread, prefix in ((300, 12, 1.0, "calm"), (200, 13, 4.0, EVIL)):
        new = without(table(rows, seed, spread), "label").extended(id=[f"{prefix}-{row}" for row in range(rows)])
        made.update(guard.decide(new))
    return made


def section(page: str, key: str) -> str:
    return re.search(rf'<section class="part[^>]*id="{key}".*?</section>', page, re.DOTALL)[0]


def test_the_summary_states_the_accuracy_with_its_exact_interval(report):
    right = int((report.tables["images"].logit.argmax(1) == report.tables["images"].label).sum())
    low, high = beta.ppf(0.025, right, N - right + 1), beta.ppf(0.975, right + 1, N - right)  # Clopper and Pearson
    sentence = report.facts()["How good is the model?"]
    share = f"{100 * right / N:.1f}".removesuffix(".0")
    assert sentence.startswith(f"{share} % of {N} images are predicted correctly")
    assert f"(exact 95 % interval {100 * low:.0f} to {100 * high:.0f} %)" in sentence


def test_what_could_be_accepted_is_what_a_guard_accepts(report):
    images = report.tables["images"]
    guard = dubito.Guard.fit(None, images, risk=0.2, train=report.tables["learned from"], sets=False)
    for level in report.acceptance.levels:
        if level.accepted is None:
            with pytest.raises(dubito.errors.GuardError) as error:
                guard.with_risk(level.risk)
            assert level.instead in str(error.value)
        else:
            chosen = guard.with_risk(level.risk)
            assert (level.accepted, level.errors, level.of) == chosen.threshold[1:]
            ood = chosen.decide(report.tables["out-of-distribution: noise"])
            assert level.ood == {"noise": pytest.approx(ood.coverage)}
    assert {level.accepted is None for level in report.acceptance.levels} == {True, False}  # both were tested
    assert report.acceptance.reference + report.acceptance.levels[0].of == N


def test_images_that_may_be_of_a_missed_class_are_not_accepted():
    guard = dubito.Guard.fit(None, table(3000, 3), risk=0.2, missed={1: 0.05}, scores=["entropy"], sets=False)
    noise = table(400, 5, spread=3.0, label=None, name="noise")
    acceptance = parts.Parts(table(), {"noise": noise}, None, 0.95, 0).acceptance(guard)
    at = {level.risk: level for level in acceptance.levels}[0.1]
    chosen = guard.with_risk(0.1)  # whose thresholds hold together with those of the missed class
    assert (at.accepted, at.errors, at.of) == chosen.threshold[1:]
    assert at.ood["noise"] == pytest.approx(chosen.decide(noise).coverage)
    alerts = chosen.decide(noise).rules
    assert len(alerts) > 5
    assert (chosen.decide(noise).uncertainty[list(alerts)] <= chosen.threshold.value).any()  # certain, and refused


def test_infeasible_risks_say_what_is_feasible_in_per_cent(report):
    accepted = report.facts()["What could be accepted?"]
    infeasible = [level for level in report.acceptance.levels if level.accepted is None]
    assert f"A risk of {100 * infeasible[0].risk:g} % cannot be guaranteed. With these images, a risk of " in accepted
    assert "risk=" not in accepted
    assert "confidence 0.95" not in accepted
    tested = (
        f"was selected on {report.acceptance.reference} of these images, and the thresholds were tested on the other"
    )
    assert tested in accepted


def test_a_guard_of_ones_own_is_used_and_its_guarantee_is_stated():
    guard = dubito.Guard.fit(None, table(600, 3), risk=0.2)
    report = model_report(table(), guard=guard)
    assert report.acceptance.own
    assert report.trust.order_by == "guard"
    accepted = report.facts()["What could be accepted?"]
    assert f"tested on the {guard.threshold.of} images that it was calibrated on" in accepted
    assert guard.guarantee.sentence(guard.threshold.of) in accepted
    assert "independent" not in accepted
    # It needs no labels of the images themselves.
    unlabelled = model_report(without(table(), "label"), guard=guard)
    assert unlabelled.acceptance.levels == report.acceptance.levels


def test_a_report_on_a_guards_own_calibration_images_says_so():
    images = table(600, 3)
    report = model_report(images, guard=dubito.Guard.fit(None, images, risk=0.2))
    sentence = "About 90 % of these images are the guard's own calibration images, so this is no independent check."
    assert sentence in report.facts()["What could be accepted?"]
    assert sentence.replace("'", "&#39;").replace(" %", "\u00a0%") in report.to_html()


def test_a_tie_is_called_a_tie_and_a_lead_a_lead():
    right = torch.tensor([[4.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 3.0]] * 10)
    tied = model_report(Table(logit=right, label=[0, 0, 1, 1] * 10))  # of two classes, all scores order alike
    answer = summary(tied)[1]
    assert answer.sentences[0].startswith("It is a tie: at finding wrong predictions, ")
    assert answer.short.replace(" ", "_") == tied.comparison.choice
    assert "None of them needs fewer columns" in answer.sentences[0]


def test_the_last_layer_is_recovered_from_features_and_logits(report):
    expected = structure(layer(), report.tables["images"])
    assert report.structure.distance == pytest.approx(expected.distance, abs=1e-4)
    assert report.structure.bias.mean == pytest.approx(expected.bias.mean, abs=1e-4)
    assert report.structure.means.alignment.mean == pytest.approx(expected.means.alignment.mean, abs=1e-4)


def test_too_few_images_or_another_layer_leave_the_geometry_out():
    assert "6 images and 5 independent features" in model_report(table(6)).missing["geometry"].why
    other = Table(feature=torch.randn(50, 3), logit=torch.randn(50, 4))
    assert "are not those of a linear layer" in model_report(other).missing["geometry"].why


def test_galleries_are_in_the_order_of_trust(report, page):
    u = report.comparison.uncertainties[report.trust.order_by][None]
    assert u[int(report.trust.images[-1].id)] == u.min()
    certain = re.findall(r'<p class="caption"><span>(\d+)</span>', section(page, "certain"))
    assert certain == [image.id for image in report.trust.images[:-13:-1]]
    mistakes = re.findall(r'<p class="caption"><span>(\d+)</span>', section(page, "mistakes"))
    wrong = [image.id for image in reversed(report.trust.images) if image.label != image.predicted]
    assert mistakes == wrong[:12]
    assert section(page, "mistakes").count("wrong: ") == len(mistakes)


def test_a_planted_label_issue_is_in_its_gallery():
    logit = 6 * torch.eye(2)[[0, 1] * 20]
    label = torch.tensor([0, 1] * 19 + [1, 1])  # of row 38, the model says 0
    report = model_report(Table(logit=logit, label=label, classes=["ant, emmet", "bee"]))
    shown = section(report.to_html(), "issues")
    assert re.findall(r'<p class="caption"><span>(\d+)</span>', shown) == ["38"]
    assert "labelled bee; the likeliest other class is ant" in shown
    assert (
        "Label issues: one label may well be wrong; by estimate, about 1 is."
        in report.facts()["What should worry you?"]
    )


def test_confident_mistakes_beyond_the_probabilities_are_a_worry():
    logit = torch.tensor([[9.0, 0.0]] * 100)
    few = model_report(Table(logit=logit, label=[0] * 100))
    assert "Confident mistakes" not in few.facts()["What should worry you?"]
    many = model_report(Table(logit=logit, label=[0] * 80 + [1] * 20))
    # Each probability is 1 / (1 + exp(-9)), so that 0.012 of 100 should be wrong.
    worry = "20 of 100 predictions with 90 % or more are wrong (20 %); by its own probabilities, about 0 should be."
    assert worry in many.facts()["What should worry you?"]
    assert (
        "Miscalibration: probabilities are too high by 20 points on average." in many.facts()["What should worry you?"]
    )


def test_where_nothing_could_be_examined_nothing_is_called_good():
    worries = summary(model_report(Table(logit=torch.eye(3))))[3]
    assert (worries.short, worries.tone) == ("not known", "fair")


def test_out_of_distribution_images_that_look_certain_are_a_worry(report):
    noise = report.tables["out-of-distribution: noise"]
    confident = float((noise.logit.softmax(1).amax(1) >= 0.9).double().mean())
    assert report.confident_ood == {"noise": pytest.approx(confident)}
    assert f"{100 * confident:.1f}".removesuffix(".0") + " % of noise" in report.facts()["What should worry you?"]


KEYS = ["scores", "calibration", "risk", "histograms", "corruption", "causes", "geometry"]
KEYS += ["certain", "uncertain", "mistakes", "issues", "undecodable", "provenance"]


def test_all_sections_are_there_in_order(page):
    assert re.findall(r'<section class="part[^>]*id="(\w+)"', page) == KEYS
    assert re.findall(r'href="#(\w+)"', page) == KEYS
    assert re.findall(r'<section class="part absent" id="(\w+)"', page) == ["corruption"]
    for key in ("calibration", "risk", "histograms", "causes", "geometry"):
        assert 'role="img" aria-label="' in section(page, key)
    assert "broken.jpg: not an image" in section(page, "undecodable")


@pytest.mark.parametrize(
    ("columns", "absent", "need"),
    [
        (
            ["label"],
            ["scores", "calibration", "risk", "mistakes", "issues"],
            "Labels of the model&#39;s classes would add",
        ),
        (["feature"], ["geometry"], "Features would add this section"),
        ([], ["histograms", "causes"], "Out-of-distribution images would add this section"),
    ],
)
def test_what_a_table_lacks_is_said_with_the_call_that_adds_it(columns, absent, need):
    page = model_report(without(table(60), *columns)).to_html()
    for key in absent:
        assert need in section(page, key)
        assert "<code>dubito." in section(page, key)


def test_labels_of_other_classes_give_no_accuracy():
    report = model_report(table(80, label_space="own"))
    assert (report.evaluation, report.acceptance, report.missing["calibration"].need) == (None, None, "label")
    assert report.issues.cross_validated  # by classifiers on the features
    assert "labels of other classes" in report.to_html()


def test_classifiers_that_would_take_long_are_left_to_their_own_command(monkeypatch):
    monkeypatch.setattr(parts, "_MOST_TO_CLASSIFY", 80 * D * C - 1)
    report = model_report(table(80, label_space="own"))
    assert report.issues is None
    assert "<code>dubito.find_label_issues(table)</code>" in section(report.to_html(), "issues")
    assert model_report(table(80)).issues is not None  # labels of the model's classes take none


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("labelled", [True, False])
def test_a_handful_of_images_is_no_reason_to_fail(rows, labelled):
    few = table(rows) if labelled else without(table(rows), "label")
    report = model_report(few)
    articles = Reader(report.to_html()).all("article")
    assert len(articles) >= rows
    assert str(report).startswith("toy/val: the ")
    assert labelled is False or "a guarantee takes more images" in report.facts()["What could be accepted?"]


def test_many_classes_and_all_right_or_all_wrong():
    draw = torch.Generator().manual_seed(0)
    logit = torch.randn(50, 1000, generator=draw)
    for label, why in (
        (logit.argmax(1), "All 50 predictions are right"),
        (logit.argmin(1), "All 50 predictions are wrong"),
    ):
        page = model_report(Table(logit=logit, label=label)).to_html()
        assert why in section(page, "scores")
        assert "compare:" not in page


def test_names_stay_text():
    full = table(40, id=[f"{EVIL}{i}" for i in range(40)], classes=[f"{EVIL}{i}" for i in range(C)], name=EVIL)
    full.skipped = [(EVIL, EVIL)]
    page = model_report(full, ood={EVIL: table(20, 2, label=None)}).to_html()
    read = Reader(page)
    assert read.open == []
    assert not read.all("script")
    assert EVIL in "".join(read.text)
    assert not [key for _, attributes in read.tags for key in attributes if key.startswith("on")]


def test_the_page_loads_nothing_and_is_one_file(tmp_path, page):
    read = Reader(page)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:\"" in page  # and no script
    links = [value for _, attributes in read.tags for key, value in attributes.items() if key in ("src", "href")]
    assert all(value.startswith(("#", "data:")) for value in links)
    assert model_report(table(30)).to_html(tmp_path / "new" / "r.html") == tmp_path / "new" / "r.html"


def test_pictures_and_images_that_have_moved(tmp_path):
    for place in range(30):
        Image.new("RGB", (300, 200), (place, 0, 0)).save(tmp_path / f"{place}.png")
    full = table(40, id=[f"{place}.png" for place in range(40)])
    report = model_report(full, tmp_path, gallery=5)
    assert "10 of the 40 images are not in" in report.notes[0]
    (tmp_path / "3.png").write_text("no image any more")
    shown = [one.id for one in (*report.trust.images[:5], *report.trust.images[-5:])]
    there = [name for name in shown if int(name[:-4]) < 30 and name != "3.png"]
    page = report.to_html()
    pictures = [one["alt"] for one in Reader(section(page, "certain") + section(page, "uncertain")).all("img")]
    assert sorted(pictures) == sorted(there)
    (tmp_path / "else").mkdir()
    Image.new("RGB", (30, 20)).save(tmp_path / "else" / "other.png")
    with pytest.raises(TableError, match=r"ids must be images of .*else, such as 'other.png'; got '0.png'"):
        model_report(full, tmp_path / "else")


def test_model_inputs_have_no_pictures():
    report = model_report(table(20, id=[f"{i:06d}" for i in range(20)]), torch.zeros(20, 3, 4, 4))
    assert Reader(report.to_html()).all("img") == []


def test_a_model_and_images_add_the_corruption_curve():
    net = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 3))
    torch.manual_seed(0)
    model = dubito.wrap(net, transform=dubito.Preprocess(size=16))
    pixels = np.random.default_rng(0).integers(0, 256, (30, 24, 24, 3), dtype=np.uint8)
    full = dubito.extract(model, pixels, progress=False, workers=0)
    report = model_report(full, pixels, model=model, corrupted=8)
    assert (report.corruption.rows, report.corruption.severities) == (8, (0, 1, 3, 5))
    shown = section(report.to_html(), "corruption")
    assert "Measured on 8 of the images, drawn at random, at severities 0, 1, 3, 5" in shown
    assert shown.count("<path") == 4  # one line for each corruption
    assert model_report(full, pixels, model=model, corrupted=0).corruption is None


def test_a_large_table_is_sampled_and_says_so(monkeypatch):
    monkeypatch.setattr(module, "_MOST_ROWS", 100)
    report = model_report(table(300))
    assert (report.trust.total, report.evaluation.rows) == (100, 100)
    assert report.notes == ("100 of the 300 images, drawn with seed 0, stand for all of them.",)
    assert report.notes[0] in report.to_html()


def test_as_json_csv_and_text(report, tmp_path):
    values = json.loads(report.to_json())
    assert len(values["images"]) == 20  # as many as the text has
    assert values["summary"] == report.facts()
    assert values["comparison"]["choice"] == report.comparison.choice
    assert [level["risk"] for level in values["acceptance"]["levels"]] == [0.01, 0.05, 0.1]
    assert values["missing"] == {"corruption": {"need": "model", "why": ""}}
    lines = report.to_csv(tmp_path / "r.csv").read_text().splitlines()
    assert len(lines) == 1 + N + 1  # every image, and the one that could not be decoded
    assert "and 380 more" in str(report)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: model_report(without(table(9), "logit")), MissingColumnError, "model_report needs column 'logit'"),
        (lambda: model_report(Table(logit=torch.zeros(9, 1))), ValueRangeError, "needs at least two classes"),
        (lambda: model_report(table(9), ood=Table(logit=torch.zeros(3, 9))), TableError, "must be 4 wide"),
        (lambda: model_report(table(9), gallery=0), ValueRangeError, "gallery must be a whole number, at least 1"),
        (lambda: model_report(table(9), corrupted=-1), ValueRangeError, "corrupted must be a whole number, at least 0"),
    ],
)
def test_what_cannot_be_reported_on_is_a_clear_error(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_watch_is_a_section_with_the_numbers_of_its_report(watch):
    report = model_report(table(60), watch=watch)
    seen = watch.report()
    (alarm,) = seen.alarms
    assert 300 < alarm["images"] < 500
    assert report.watch.to_dict() == seen.to_dict()
    assert report.to_dict()["watch"]["alarms"] == list(seen.alarms)
    assert report.acceptance.own  # the guard is the watch's
    shown = section(report.to_html(), "watch")
    words = " ".join(Reader(shown).text)
    assert "500 images: images have changed" in words
    assert f"Alarm 1 after {alarm['images']} images, at '{alarm['id']}': images have changed" in words
    assert seen.advice in words
    assert EVIL in alarm["id"]
    assert "<script" not in shown
    # 252 pixels right of a margin of 40, for 500 images.
    assert f'<line class="end" x1="{40 + 252 * alarm["images"] / 500:.1f}"' in shown
    worries = report.facts()["What should worry you?"]
    assert worries.startswith("Watch: 500 images: images have changed. The guarantee says nothing about such images")


def test_without_a_watch_there_is_no_section(page):
    assert 'id="watch"' not in page
    assert "#watch" not in page


def test_a_watch_of_another_guard_is_refused(watch):
    with pytest.raises(dubito.errors.GuardError, match="model_report: watch must be a watch of this guard"):
        model_report(table(60), guard=watch.guard.with_risk(0.4), watch=watch)
