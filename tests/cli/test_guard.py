"""`dubito guard`: every command does what the library does; errors are one sentence."""

import csv
from pathlib import Path
from typing import Any

import pytest

import dubito
from dubito.guard import PredictionSets
from dubito.table import Provenance

from .conftest import COUNT, MODEL, Run, write_images

COVER = ("--novel", 0, "--coverage", 0.5, "--confidence", 0.6, "-s", "max_probability", "--sets", 0)


@pytest.fixture(scope="module")
def guard(run: Run, labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guards") / "guard"
    answer = run("guard", "fit", labelled, "--to", folder, *COVER, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["guarantee"] == {"kind": "coverage", "level": 0.5, "confidence": 0.6}
    assert answer.json["weights"] == {"max_probability": 1.0}
    assert answer.json["guard"] == str(folder)
    return folder


def test_fit_is_that_of_the_library(guard: Path, labelled: Path) -> None:
    table = dubito.open(labelled)
    same = dubito.Guard.fit(
        None, table, confidence=0.6, coverage=0.5, scores=["max_probability"], sets=False, novel=0.0
    )
    assert dubito.Guard.load(guard).threshold == same.threshold


def test_fit_shows_the_guarantee(run: Run, labelled: Path, tmp_path: Path) -> None:
    answer = run("guard", "fit", labelled, "--to", tmp_path / "guard", *COVER)
    assert answer.code == 0, answer.err
    assert "that it was calibrated on, at least 50 % are accepted (confidence 60 %)." in answer.out
    assert f"written: {tmp_path / 'guard'}" in answer.out


def test_settings_of_scores(run: Run, labelled: Path, tmp_path: Path) -> None:
    fit = ("guard", "fit", labelled, "--to", tmp_path / "guard", *COVER[:-4], "--sets", 0)
    answer = run(*fit, "-s", "scaled_entropy", "--set", "scaled_entropy.scale=0.2")
    assert answer.code == 0, answer.err
    assert dubito.Guard.load(tmp_path / "guard").selection.scores["scaled_entropy"] == dubito.scores.ScaledEntropy(
        scale=0.2
    )
    answer = run(*fit, "-s", "scaled_entropy", "--set", "scaled_entropy.size=0.2")
    assert (answer.code, "--set: scaled_entropy" in answer.err) == (2, True), answer.err
    answer = run(*fit, "--set", "scaled_entropy.scale=0.2")
    assert (answer.code, "Pass --score NAME, too." in answer.err) == (2, True)


def test_too_few_images_are_reported_and_nothing_is_written(run: Run, labelled: Path, tmp_path: Path) -> None:
    answer = run("guard", "fit", labelled, "--to", tmp_path / "guard", "-s", "entropy", "--novel", "0")
    assert answer.code == 1
    assert "needs at least 59 calibration images" in answer.err
    assert f"Of the table's {COUNT} rows, " in answer.err
    assert "may not help" not in answer.err  # twelve images cannot show that
    assert not (tmp_path / "guard").exists()


def test_coverage_of_images_without_labels(run: Run, cache: Path, tmp_path: Path) -> None:
    answer = run("guard", "fit", cache, "--to", tmp_path / "guard", *COVER[:-2], "--json")
    assert answer.code == 0, answer.err
    assert answer.json["sets"] is None


def test_run_decides_and_writes(run: Run, guard: Path, images: Path, weights: Path, tmp_path: Path) -> None:
    options = ("--model", MODEL, "--weights", weights)
    answer = run("guard", "run", guard, images, *options, "--csv", tmp_path / "verdicts.csv", "--json")
    assert answer.code == 0, answer.err
    result = answer.json
    loaded = dubito.Guard.load(guard, dubito.load(MODEL, weights=weights))
    assert result["verdicts"] == [verdict.to_dict() for verdict in loaded(images)]
    assert result["images"] == COUNT
    assert result["accepted"] == sum(verdict["accept"] for verdict in result["verdicts"])
    with (tmp_path / "verdicts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["reason"] for row in rows] == [one["reason"] for one in result["verdicts"]]
    assert {row["label"] for row in rows} == {""}


def test_run_decides_on_a_cache_without_the_model(
    run: Run, guard: Path, labelled: Path, images: Path, weights: Path, tmp_path: Path
) -> None:
    answer = run("guard", "run", guard, labelled, "--csv", tmp_path / "verdicts.csv", "--json")
    assert answer.code == 0, answer.err
    labels = dubito.open(labelled).label.tolist()
    assert [one["label"] for one in answer.json["verdicts"]] == labels
    with (tmp_path / "verdicts.csv").open(newline="") as file:
        assert [int(row["label"]) for row in csv.DictReader(file)] == labels
    requested = run("guard", "run", guard, images, "--weights", weights, "--json").json
    assert [one["id"] for one in answer.json["verdicts"]] == [one["id"] for one in requested["verdicts"]]
    assert answer.json["accepted"] == requested["accepted"]


def test_calibration_images_are_recognised(run: Run, guard: Path, labelled: Path, tmp_path: Path) -> None:
    share = dubito.Guard.load(guard).threshold.of / COUNT
    own = f"About {share:.0%} of these images are the guard's own calibration images".replace("%", " %")
    assert own in run("guard", "run", guard, labelled).out
    assert run("guard", "run", guard, labelled, "--json").json["check"]["own"] == share
    assert own in run("report", labelled, "--guard", guard, "--to", tmp_path / "report.html").out
    refitted = run("guard", "refit", guard, labelled, "--to", tmp_path / "new", "--json")
    assert refitted.code == 0
    assert f"dubito guard refit: about {share:.0%} of".replace("%", " %") in refitted.json["notes"][0]


@pytest.mark.parametrize("option", [("--model", MODEL), ("--weights", "none"), ("--device", "cpu")])
def test_options_of_a_model_are_refused_where_a_cache_needs_none(
    run: Run, guard: Path, labelled: Path, option: tuple[str, str]
) -> None:
    answer = run("guard", "run", guard, labelled, *option)
    assert answer.code == 2
    message = " ".join(answer.err.replace("│", " ").split())
    assert "a CACHE holds what a model predicted: --model, --weights and all other options that load a model" in message
    assert "have no effect on it. Leave them out, or pass images." in message


def test_a_guard_of_a_wrapped_model_says_what_to_do(run: Run, labelled: Path, images: Path, tmp_path: Path) -> None:
    made = dubito.Guard.fit(
        None, dubito.open(labelled), confidence=0.6, coverage=0.5, scores=["entropy"], sets=False, novel=0.0
    )
    for provenance, output in (
        (Provenance("mine"), "belongs to mine, which was wrapped in Python"),
        (None, "does not name"),
    ):
        made.provenance = provenance
        answer = run("guard", "run", made.save(tmp_path / "guard"), images)
        assert answer.code == 2
        message = " ".join(answer.err.replace("│", " ").split())
        assert output in message
        assert "or --model python:FILE.py:FUNCTION for a module of your own" in message


OWN = """
import dubito, timm, torch
from dubito.table import Provenance

def make():
    torch.manual_seed(3)
    return dubito.wrap(timm.create_model("test_resnet", num_classes=5), transform=dubito.Preprocess(32), name="mine")
"""


def test_a_model_of_one_s_own(run: Run, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_models.py").write_text(OWN)
    answer = run("extract", "python:my_models.py:make", images, "--to", "cache", "--workers", 0, "--json")
    assert answer.code == 0, answer.err
    assert dubito.open("cache").provenance.model == "python:my_models.py:make"
    assert run("guard", "fit", "cache", "--to", "guard", *COVER[:-2]).code == 0
    own = ("--model", "python:my_models.py:make")
    answer = run("guard", "run", "guard", images, *own, "--json")
    assert answer.code == 0, answer.err
    cached = run("guard", "run", "guard", "cache", "--json").json
    assert [one["accept"] for one in answer.json["verdicts"]] == [one["accept"] for one in cached["verdicts"]]
    Path("my_models.py").write_text(OWN.replace("manual_seed(3)", "manual_seed(4)"))
    answer = run("guard", "run", "guard", images, *own)
    assert answer.code == 1
    assert "belongs to another model" in answer.err


def test_a_guard_of_a_wrapped_model_takes_the_code_that_makes_it(run: Run, images: Path, tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text(OWN)
    source = f"python:{tmp_path / 'my_models.py'}:make"
    spaces: dict[str, Any] = {}
    exec(OWN, spaces)  # noqa: S102 (the text above)
    table = dubito.extract(spaces["make"](), str(images), tmp_path / "cache", workers=0, progress=False)
    made = dubito.Guard.fit(None, table, confidence=0.6, coverage=0.5, scores=["entropy"], sets=False, novel=0.0)
    assert made.provenance.model == "mine"
    answer = run("guard", "run", made.save(tmp_path / "guard"), images, "--model", source, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["images"] == COUNT


def test_code_that_a_guard_names_is_not_run_unasked(run: Run, labelled: Path, images: Path, tmp_path: Path) -> None:
    made = dubito.Guard.fit(
        None, dubito.open(labelled), confidence=0.6, coverage=0.5, scores=["entropy"], sets=False, novel=0.0
    )
    file = tmp_path / "evil.py"
    made.provenance = Provenance(f"python:{file}:make")
    made.save(tmp_path / "guard")
    file.write_text("open(__file__ + '.ran', 'w').close()")
    answer = run("guard", "run", tmp_path / "guard", images)
    assert answer.code == 2
    assert "which dubito does not run on its own" in " ".join(answer.err.replace("│", " ").split())
    assert not file.with_name("evil.py.ran").exists()
    answer = run("guard", "run", tmp_path / "guard", images, "--model", f"python:{file}:make")
    assert "has no 'make'" in answer.err
    assert file.with_name("evil.py.ran").exists()


def test_fit_does_not_write_among_other_things(run: Run, labelled: Path, images: Path) -> None:
    before = sorted(images.iterdir())
    answer = run("guard", "fit", labelled, "--to", images, *COVER)
    assert answer.code == 1
    assert "it holds other things" in answer.err
    assert "Choose a new or empty folder, or the folder of the guard to replace." in answer.err
    assert sorted(images.iterdir()) == before


def test_run_shows_reasons(run: Run, guard: Path, images: Path, weights: Path) -> None:
    answer = run("guard", "run", guard, images, "--weights", weights, "--top", 3)  # the guard names its model
    assert answer.code == 0, answer.err
    assert f"of {COUNT} images accepted" in answer.out
    assert f"and {COUNT - 3} more" in answer.out
    assert "at least 50 % are accepted" in answer.out
    assert answer.out.count(".png") == 3
    assert "of the reference images" in answer.out or "ambiguous between" in answer.out


def test_another_model_is_refused(run: Run, guard: Path, images: Path) -> None:
    answer = run("guard", "run", guard, images, "--weights", "none")
    assert answer.code == 1
    assert "belongs to another model" in answer.err


@pytest.fixture(scope="module")
def others(run: Run, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of other images, without labels."""
    folder = tmp_path_factory.mktemp("others")
    write_images(folder / "images", COUNT, seed=1)
    options = ("--to", folder / "cache", "--weights", weights, "--workers", 0)
    assert run("extract", MODEL, folder / "images", *options).code == 0
    return folder / "cache"


def test_refit_keeps_the_scores_and_calibrates_on_other_images(
    run: Run, guard: Path, others: Path, tmp_path: Path
) -> None:
    answer = run("guard", "refit", guard, others, "--to", tmp_path / "new", "--json")
    assert answer.code == 0, answer.err
    same = dubito.Guard.load(guard).refit(dubito.open(others))
    assert dubito.Guard.load(tmp_path / "new").fingerprint == same.fingerprint
    assert (answer.json["rows"]["calibrate"], answer.json["guard"]) == (COUNT, str(tmp_path / "new"))
    shown = run("guard", "refit", guard, others, "--to", tmp_path / "new")
    assert f"Of images like the {COUNT} that it was calibrated on, at least 50 % are accepted" in shown.out


def test_with_risk_changes_the_threshold(run: Run, guard: Path, tmp_path: Path) -> None:
    answer = run("guard", "with-risk", guard, 0.7, "--to", tmp_path / "new", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["guarantee"] == {"kind": "risk", "level": 0.7, "confidence": 0.6}
    assert dubito.Guard.load(tmp_path / "new").threshold == dubito.Guard.load(guard).with_risk(0.7).threshold
    surer = run("guard", "with-risk", guard, 0.7, "--confidence", 0.7, "--to", tmp_path / "new", "--json")
    assert surer.json["guarantee"]["confidence"] == 0.7


def test_errors_of_another_threshold_speak_of_commands(
    run: Run, guard: Path, others: Path, images: Path, tmp_path: Path
) -> None:
    risky, to = tmp_path / "risky", ("--to", tmp_path / "new")
    assert run("guard", "with-risk", guard, 0.7, "--to", risky).code == 0
    for arguments, code, text in (
        (("refit", risky, others, *to), 1, "error: dubito guard refit needs column 'label'"),
        (("refit", others, guard, *to), 2, f"GUARD and CACHE are swapped: '{guard}' is the guard."),
        (("refit", guard, others, "--to", images), 1, "it holds other things"),
        (("with-risk", guard, 0.01, *to), 1, "error: dubito guard with-risk: an error rate of at most 0.01"),
        (("with-risk", guard, 0.01, *to), 1, "With these images, RISK 0."),
        (("with-risk", guard, 5, *to), 1, "error: RISK must be a number in (0, 1); got 5.0. 5 % is 0.05."),
        (("with-risk", guard, 0.5, "--confidence", 95, *to), 1, "error: --confidence must be a number in (0, 1)"),
    ):
        answer = run("guard", *arguments)
        assert answer.code == code
        assert text in " ".join(answer.err.replace("│", " ").split())
    assert not (tmp_path / "new").exists()


def test_a_risk_that_new_images_do_not_allow(run: Run, guard: Path, labelled: Path, tmp_path: Path) -> None:
    made = dubito.Guard.load(guard).with_risk(0.7)
    made.guarantee = dubito.guard.Guarantee("risk", 0.05, 0.6)
    answer = run("guard", "refit", made.save(tmp_path / "strict"), labelled, "--to", tmp_path / "new")
    assert answer.code == 1
    assert "With these images, a risk of 0." in answer.err  # which is no option of this command
    assert "risk=" not in answer.err


def test_export_shows_the_size(
    run: Run, guard: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(_: object, to: Path, example: object = None) -> Path:
        assert example is None
        to.write_bytes(b"0" * 2_000_000)
        return to

    monkeypatch.setattr("dubito.guard.onnx.export_onnx", written)
    answer = run("guard", "export", guard, "--to", tmp_path / "guard.onnx", "--weights", weights)
    assert answer.code == 0, answer.err
    assert f"size: 2.0 MB\nwritten: {tmp_path / 'guard.onnx'}" in answer.out


def test_a_folder_that_is_no_guard(run: Run, images: Path) -> None:
    answer = run("guard", "run", images, images)
    assert answer.code == 1
    assert "no guard in" in answer.err
    assert "guard.json is not there" in answer.err


def test_watch_takes_images_asks_for_labels_and_remembers(run: Run, labelled: Path, tmp_path: Path) -> None:
    fitted = run("guard", "fit", labelled, "--to", tmp_path / "guard", *COVER[:-4], "-s", "entropy", "--sets", 0)
    assert fitted.code == 0, fitted.err
    first = run("watch", tmp_path / "guard", labelled, "--csv", tmp_path / "verdicts.csv", "--json")
    assert (first.code, first.json["images"]) == (0, COUNT)
    assert len((tmp_path / "verdicts.csv").read_text().splitlines()) == COUNT + 1
    again = run("watch", tmp_path / "guard", labelled)
    assert f"{2 * COUNT} images, no alarm" in again.out
    assert "Nothing has to be done." in again.out
    state = run("watch", tmp_path / "guard", "--json").json
    report = dubito.Guard.load(tmp_path / "guard").watch(tmp_path / "guard.watch").report()
    assert state == report.to_dict() | {"to_label": [], "notes": []}
    for options, text in ((("--csv", "v.csv"), "--csv writes verdicts"), (("--drawn",), "--drawn is about labels")):
        assert text in run("watch", tmp_path / "guard", *options).err
    wrong = run("watch", tmp_path / "guard", "--alpha", 0.05)
    assert (wrong.code, "is of another guard, or of another alpha or seed" in wrong.err) == (1, True)
    state = ("--state", tmp_path / "state")
    assert run("watch", tmp_path / "guard", "--alpha", 0.05, *state, "--json").json["alpha"] == 0.05
    assert run("watch", tmp_path / "guard", *state, "--json").json["alpha"] == 0.05  # that of the state


def test_watch_ends_with_3_once_the_guarantee_is_broken(run: Run, labelled: Path, tmp_path: Path) -> None:
    table = dubito.open(labelled)
    guard = dubito.Guard.fit(None, table, coverage=0.5, confidence=0.6, scores=["entropy"], sets=False, novel=0.0)
    strict = dubito.guard.Threshold(-1e9, 0, None, guard.threshold.of)  # accepts nothing
    guard.threshold = strict
    guard.save(tmp_path / "guard")
    codes = [run("watch", tmp_path / "guard", labelled).code for _ in range(4)]
    assert codes[0] == 0
    assert codes[-1] == 3
    shown = run("watch", tmp_path / "guard").out
    assert "The guarantee is broken: refused images above 50 % since about image 1 (100 % from 48 outcomes)." in shown
    page, watch = tmp_path / "r.html", ("--guard", tmp_path / "guard", "--watch", tmp_path / "guard.watch")
    report = run("report", labelled, "--to", page, *watch, "--json").json["watch"]["advice"]
    for text in (shown, run("watch", tmp_path / "guard", "--json").json["advice"], report, page.read_text()):
        assert "`dubito guard refit`" in text  # what to do next, as commands
        assert "guard.refit" not in text


@pytest.fixture
def watched(guard: Path, tmp_path: Path) -> Path:
    """A guard that bounds a risk, and has seen nothing."""
    return dubito.Guard.load(guard).with_risk(0.7).save(tmp_path / "guard")


def test_labels_are_requested_filled_in_and_tested(run: Run, watched: Path, others: Path, tmp_path: Path) -> None:
    """From the first images to the first errors, by files alone."""
    to = tmp_path / "to_label.csv"
    first = run("watch", watched, others, "--request-labels", 4, "--to", to, "--json")
    assert first.code == 0, first.err
    names = first.json["to_label"]
    assert (first.json["requested"], len(names), first.json["to"]) == (4, 4, str(to))
    assert to.read_text() == "path,label\n" + "".join(f"{name},\n" for name in names)
    predicted = dubito.Guard.load(watched).decide(dubito.open(others))
    answers = dict(zip(predicted.ids, predicted.predicted[:, 0].tolist(), strict=True))
    rows = [f"{names[0]},{answers[names[0]]}", f"{names[1]},{(answers[names[1]] + 1) % 1000}"]
    to.write_text("\n".join(["path,label", *rows, *(f"{name}," for name in names[2:])]))
    second = run("watch", watched, "--labels", to, "--request-labels", 2, "--json")
    assert second.code == 0, second.err
    assert (second.json["outcomes"], second.json["waiting"], second.json["images"]) == (0, 2, COUNT)
    assert second.json["to_label"] == names[2:]  # whose labels are still awaited
    assert second.json["notes"] == ["--labels: 2 of 4 images have no label yet."]
    shown = run("watch", watched, "--request-labels", 2)
    assert f"label these: {names[2]}, {names[3]}" in shown.out
    assert "2, for those of images that were drawn before" in shown.out
    to.write_text("\n".join(["path,label", *(f"{name},?" for name in names[2:])]))  # cannot be labelled
    third = run("watch", watched, "--labels", to, "--json")
    assert (third.json["outcomes"], third.json["missing"], third.json["requested"]) == (2, 2, 0)


def test_what_cannot_be_done_with_labels_changes_nothing(run: Run, watched: Path, others: Path, tmp_path: Path) -> None:
    wrong, filled = tmp_path / "wrong.csv", tmp_path / "filled.csv"
    wrong.write_text("path,label\n00.png,zebra crossing\n")
    filled.write_text("path,label\n00.png,1\n")
    for options, code, text in (
        (("--labels", wrong), 1, "error: dubito watch: a label must be a class of the model"),
        (("--labels", tmp_path / "nowhere.csv"), 1, "nowhere.csv' must be a file; there is none"),
        (("--request-labels", 2, "--to", filled), 2, "exists, and labels that were filled in would be lost."),
        (("--to", tmp_path / "new.csv"), 2, "--to writes the images of --request-labels: pass that, too."),
    ):
        answer = run("watch", watched, others, *options)
        assert answer.code == code
        assert text in " ".join(answer.err.replace("│", " ").split())
    assert run("watch", watched, "--json").json["images"] == 0  # a second try counts them once
    assert filled.read_text() == "path,label\n00.png,1\n"


def test_no_file_is_written_where_no_labels_are_needed(run: Run, guard: Path, others: Path, tmp_path: Path) -> None:
    options = ("--state", tmp_path / "state", "--request-labels", 3, "--to", tmp_path / "to_label.csv")
    answer = run("watch", guard, others, *options)
    assert answer.code == 0, answer.err
    assert "no labels are requested: a guaranteed coverage needs none" in answer.out
    assert not (tmp_path / "to_label.csv").exists()


def test_the_history_of_a_watch_is_shown_beside_its_guard_alone(run: Run, labelled: Path, tmp_path: Path) -> None:
    for name, level in (("guard", 0.5), ("other", 0.4)):
        options = {"confidence": 0.6, "scores": ["entropy"], "sets": False}
        dubito.Guard.fit(None, dubito.open(labelled), coverage=level, **options).save(tmp_path / name)
    assert run("watch", tmp_path / "guard", labelled, "--alpha", 0.05, "--state", tmp_path / "state").code == 0
    page, guard, state = tmp_path / "r.html", ("--guard", tmp_path / "guard"), ("--watch", tmp_path / "state")
    shown = run("report", labelled, "--to", page, *guard, *state, "--json")  # alpha is the state's own
    assert (shown.code, shown.json["watch"]["images"], shown.json["watch"]["alpha"]) == (0, COUNT, 0.05)
    assert f"{COUNT} images, no alarm" in page.read_text()
    assert f"--watch {tmp_path / 'state'}" in page.read_text()  # in the command that makes it again
    for command in (("report", labelled, "--to", page), ("explore", labelled, "--no-browser")):
        alone = run(*command, *state)
        assert (alone.code, "--watch shows what a guard was used on: pass --guard, too." in alone.err) == (2, True)
        other = run(*command, "--guard", tmp_path / "other", *state)
        assert (other.code, "is of another guard, or of another alpha or seed" in other.err) == (1, True)
        nowhere = run(*command, *guard, "--watch", tmp_path / "nowhere")
        assert (nowhere.code, "must be the folder of a watch" in nowhere.err) == (1, True)
        assert not (tmp_path / "nowhere").exists()


def test_classes_costs_and_missed_classes(run: Run, labelled: Path, tmp_path: Path) -> None:
    """What images do not suffice for is said in the words of the command line; with so many, that is all of them."""
    costs = tmp_path / "costs.csv"
    classes = dubito.open(labelled).shape("logit")[1]
    costs.write_text("\n".join(",".join("0" if i == j else "1" for j in range(classes)) for i in range(classes)))
    fit = ("guard", "fit", labelled, "--to", tmp_path / "guard", "-s", "max_probability", "--novel", 0)
    answer = run(*fit, "--per", "class")
    assert "no predicted class has a threshold that keeps the guarantee" in answer.err
    answer = run(*fit, "--missed", "0=0.01")
    message = " ".join(answer.err.split())
    assert "error: dubito guard fit: to miss at most 0.01 of the images of class" in message
    assert "Pass more of them, or choose a larger share in --missed." in message
    answer = run(*fit, "--costs", costs, "--risk", 0.9, "--confidence", 0.2)
    assert "cost at most 0.9 on average" in answer.out or "no threshold keeps" in answer.err
    costs.write_text(costs.read_text().replace("1", "5"))
    assert run(*fit, "--costs", costs, "--risk", 4.9, "--confidence", 0.2).code == 0
    strict = run("guard", "with-risk", tmp_path / "guard", 1.5, "--to", tmp_path / "new", "--confidence", 0.2)
    assert "error rate of at most 0.3" in strict.err or "cost at most 1.5 on average" in strict.out
    answer = run(*fit, "--costs", costs, "--risk", 5)
    assert "error: --risk must be a number in (0, 5); got 5.0. With costs, it is the largest" in answer.err
    costs.write_text("0,1\n2,0\n")
    assert f"costs must be a matrix ({classes}, {classes})" in run(*fit, "--costs", costs).err
    costs.write_text("class,b\n2,0\n")
    assert "must be a CSV file of numbers alone" in run(*fit, "--costs", costs).err
    assert "must be CLASS=SHARE, such as crack=0.01; got 'crack'" in run(*fit, "--missed", "crack").err


def test_groups_come_from_a_file(run: Run, labelled: Path, tmp_path: Path) -> None:
    """Of every second image the camera is known, then of all: by risk and by prediction sets."""
    names = dubito.open(labelled).row_ids()
    cameras = ["left" if row % 2 else "right" for row in range(COUNT)]
    lines = ["path,Camera", *(f"{name},{camera}" for name, camera in zip(names, cameras, strict=True))]
    file = tmp_path / "cameras.csv"
    file.write_text("\n".join(lines[:1] + lines[1::2]))
    fit = ("guard", "fit", labelled, "--to", tmp_path / "guard", "--risk", 0.9, "--confidence", 0.6)
    fit = (*fit, "-s", "max_probability", "--novel", 0, "--sets", 0.5)
    answer = run(*fit, "--per", "camera")
    assert "has no column 'camera'. Add it: --groups FILE.csv with the columns path and camera." in answer.err
    answer = run(*fit, "--per", "camera", "--groups", file)
    assert (answer.code, "6 of 12 images have none" in " ".join(answer.err.split())) == (2, True)
    file.write_text("\n".join(lines))
    answer = run(*fit, "--groups", file)
    assert (answer.code, "--groups: neither guarantee nor prediction sets" in answer.err) == (2, True)
    answer = run(*fit, "--per", "camera", "--sets-per", "camera", "--groups", file, "--json")
    assert answer.code == 0, answer.err
    same = dubito.Guard.fit(
        None,
        dubito.open(labelled).extended(camera=cameras),
        0.9,
        0.6,
        per="camera",
        scores=["max_probability"],
        novel=0.0,
        sets=PredictionSets(0.5, per="camera"),
    )
    assert answer.json["groups"] == same.to_dict()["groups"]
    assert answer.json["sets"] == same.to_dict()["sets"]
    decided = run("guard", "run", tmp_path / "guard", labelled, "--groups", file, "--json").json["verdicts"]
    own = same.decide(dubito.open(labelled).extended(camera=cameras))
    assert [one["accept"] for one in decided] == own.accept.tolist()
    assert "Add it: --groups" in run("guard", "run", tmp_path / "guard", labelled).err
    refitted = run("guard", "refit", tmp_path / "guard", labelled, "--groups", file, "--to", tmp_path / "new", "--json")
    assert [one["of"] for one in refitted.json["groups"]] == [6, 6]


def test_settings_of_prediction_sets(run: Run, labelled: Path, tmp_path: Path) -> None:
    fit = ("guard", "fit", labelled, "--to", tmp_path / "guard", *COVER[:-2], "--json")
    options = ("--set-method", "raps", "--penalty", 0.2, "--free-ranks", 3)
    answer = run(*fit, "--sets", 0.5, *options)
    made = dubito.Guard.load(tmp_path / "guard").sets
    assert answer.json["sets"] == made.to_json()
    assert (made.method, made.penalty, made.free_ranks, made.coverage) == ("raps", 0.2, 3, 0.5)
    clustered = run(*fit, "--sets", 0.5, "--clusters", 2).json["sets"]
    assert clustered["clusters"] == 2
    assert "got class_wise and clusters" in run(*fit, "--clusters", 2, "--class-wise").out
    answer = run(*fit, "--sets", 95)
    assert (answer.code, "--sets must be" in answer.out, "--coverage" in answer.out) == (2, True, False), answer.out
