"""OpenOOD v1.5 on stand-ins of a few small images, in exactly the layout of its download script."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics as sk
from torch import nn

import dubito
from dubito.errors import ImagesError, NotFittedError, TableError, ValueRangeError
from dubito.protocols.openood import OPENOOD, OodMetrics, OpenOod, ood_metrics, openood, precision_area
from dubito.scores import Energy, Entropy, Neighbours

QUICK = {"progress": False, "workers": 0}
pytestmark = pytest.mark.usefixtures("one_thread")
LABELLED = ("imagenet_v2", "imagenet_c", "imagenet_r", "cifar10c")
Layout = Callable[..., Path]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Writes a benchmark: lists with 'path label' in every line, random pixels, and darker ones for OOD images."""

    def write(benchmark: str, leave_out: tuple[str, ...] = (), count: int = 6) -> Path:
        about, draw = OPENOOD[benchmark], np.random.default_rng(0)
        lists = {"id": about.test, "train": about.train, **about.shifted, **about.ood}
        for name, one in lists.items():
            if name in leave_out:
                continue
            labelled = name in ("id", "train", *LABELLED)
            lines = []
            for row in range(count):
                path = f"{name}/{'n0001' if labelled else 'some'}/{row}.png"
                (tmp_path / one.folder / path).parent.mkdir(parents=True, exist_ok=True)
                pixels = draw.integers(0, 256 if labelled else 90, (9, 9, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / one.folder / path)
                lines.append(f"{path} {row % 3 if labelled else -1}\n")
            file = tmp_path / "benchmark_imglist" / one.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(lines))
        return tmp_path

    return write


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    return dubito.wrap(layers, transform=dubito.Preprocess((8, 8), 8), name="small")


def test_lists_are_those_of_version_1_5():
    imagenet, cifar = OPENOOD["imagenet"], OPENOOD["cifar100"]
    assert imagenet.test == ("imagenet/test_imagenet.txt", "images_largescale")
    assert imagenet.near == {
        "ssb_hard": ("imagenet/test_ssb_hard.txt", "images_largescale"),
        "ninco": ("imagenet/test_ninco.txt", "images_largescale"),
    }
    assert list(imagenet.far) == ["inaturalist", "textures", "openimage_o"]
    assert imagenet.far["textures"] == ("imagenet/test_textures.txt", "images_classic")
    assert imagenet.shifted["imagenet_c"].file == "imagenet/test_imagenet_c.txt"
    assert OPENOOD["imagenet200"].shifted["imagenet_r"].file == "imagenet200/test_imagenet200_r.txt"
    assert cifar.near == {
        "cifar10": ("cifar100/test_cifar10.txt", "images_classic"),
        "tin": ("cifar100/test_tin.txt", "images_classic"),
    }
    assert list(cifar.far) == ["mnist", "svhn", "texture", "places365"]
    assert cifar.train.file == "cifar100/train_cifar100.txt"
    assert [one.download for one in OPENOOD.values()] == ["imagenet-1k", "imagenet-200", "cifar-10", "cifar-100"]


def test_metrics_by_hand():
    # Uncertainties: in-distribution 1 and 3, OOD 2 and 4. Pairs that OOD wins: (2,1), (4,1), (4,3) of four: 75 %.
    # All OOD images need the threshold 2, and 3 of the two in-distribution images is above it: 50 %.
    # OOD as positives, from the highest: hit, miss, hit, miss: precision 1, 1/2, 2/3 at recall 1/2, 1/2, 1, so that
    # straight lines give 1/2 · 1 + 1/2 · (1/2 + 2/3) / 2 = 19/24. From the other end it is the same.
    assert ood_metrics(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0])) == pytest.approx(
        (50, 75, 1900 / 24, 1900 / 24)
    )


@pytest.mark.parametrize("levels", [4, 1000])  # many ties, hardly any
def test_metrics_are_those_of_scikit_learn(levels: int):
    # OpenOOD calls these functions with conf = -u.
    draw = np.random.default_rng(1)
    known, other = draw.integers(0, levels, 300), draw.integers(levels // 4, levels + levels // 4, 170)
    conf, is_ood = -np.concatenate([known, other]).astype(float), np.arange(470) >= 300
    alarms, hits, _ = sk.roc_curve(is_ood, -conf, drop_intermediate=False)
    precision_in, recall_in, _ = sk.precision_recall_curve(~is_ood, conf)
    precision_out, recall_out, _ = sk.precision_recall_curve(is_ood, -conf)
    expected = (
        alarms[np.argmax(hits >= 0.95)],
        sk.auc(alarms, hits),
        sk.auc(recall_in, precision_in),
        sk.auc(recall_out, precision_out),
    )
    got = ood_metrics(torch.tensor(known).double(), torch.tensor(other).double())
    assert got == pytest.approx([100 * value for value in expected])
    # Steps and straight lines differ, and so do the two choices of positives.
    assert precision_area(torch.tensor(-conf), torch.tensor(is_ood)) != sk.average_precision_score(is_ood, -conf)
    assert abs(got.aupr_in - got.aupr_out) > 1


def test_imagenet(layout: Layout, model, tmp_path: Path):
    root = layout("imagenet")
    result = openood(model, root, tmp_path / "caches", scores=["entropy", Energy()], **QUICK)
    assert list(result["entropy"]) == [
        *("ssb_hard", "ninco", "nearood"),
        *("inaturalist", "textures", "openimage_o", "farood"),
    ]
    tables = {name: dubito.open(tmp_path / "caches" / name) for name in ("id", "ninco", "textures")}
    assert tables["id"].label.tolist() == [0, 1, 2, 0, 1, 2]
    assert "label" not in tables["ninco"]
    assert tables["textures"].id[0] == "textures/some/0.png"
    u = {name: Entropy().score(table) for name, table in tables.items()}
    assert result["entropy"]["ninco"] == ood_metrics(u["id"], u["ninco"])
    assert result["entropy"]["textures"] == ood_metrics(u["id"], u["textures"])
    assert result.accuracy == pytest.approx(100 * dubito.metrics.table_accuracy(tables["id"]))
    near = [result["energy"][name] for name in ("ssb_hard", "ninco")]
    assert result["energy"]["nearood"] == pytest.approx(np.mean(near, axis=0))
    assert result.images == dict.fromkeys(("id", "ssb_hard", "ninco", "inaturalist", "textures", "openimage_o"), 6)
    assert not (tmp_path / "caches" / "train").exists()


def test_cifar_and_scores_that_learn(layout: Layout, model, tmp_path: Path):
    root = layout("cifar10")
    result = openood(
        model, root, tmp_path / "caches", benchmark="cifar10", scores=[Neighbours(k=1)], train=4, seed=3, **QUICK
    )
    assert list(result["neighbours"])[-5:] == ["mnist", "svhn", "texture", "places365", "farood"]
    learned = dubito.open(tmp_path / "caches" / "train-4-3")
    drawn = np.sort(np.random.default_rng(3).choice(6, 4, replace=False))
    assert [int(Path(name).stem) for name in learned.id] == drawn.tolist()
    u = {name: Neighbours(k=1).fit(learned).score(dubito.open(tmp_path / "caches" / name)) for name in ("id", "tin")}
    assert result["neighbours"]["tin"] == ood_metrics(u["id"], u["tin"])
    assert "Scores that learn were fitted on 4 images" in result.findings()[0]
    given = openood(
        model, root, tmp_path / "caches", benchmark="cifar10", scores={"near": Neighbours(k=1)}, train=learned, **QUICK
    )
    assert given.learned_from == (learned.name, 4)


def test_the_whole_list_is_learned_from_where_more_is_asked_for(layout: Layout, model):
    result = openood(model, layout("cifar100"), benchmark="cifar100", scores=[Neighbours(k=1)], train=100, **QUICK)
    assert result.learned_from is not None
    assert result.learned_from[1] == 6


def test_all_scores_by_default(layout: Layout, model):
    result = openood(model, layout("imagenet200"), benchmark="imagenet200", **QUICK)
    assert {"entropy", "max_logit", "energy"} <= set(result.scores)
    assert "neighbours" in result.scores_left_out
    assert any(sentence.startswith("Best mean AUROC on near OOD sets: ") for sentence in result.findings())


def test_a_finished_run_opens_its_caches(layout: Layout, model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = layout("cifar10")
    first = openood(model, root, tmp_path / "caches", benchmark="cifar10", scores="entropy", **QUICK)
    monkeypatch.setattr(model.module, "forward", lambda *_: pytest.fail("the model ran again"))
    assert openood(model, root, tmp_path / "caches", benchmark="cifar10", scores="entropy", **QUICK) == first


def test_full_spectrum_counts_shifted_images_as_in_distribution(layout: Layout, model, tmp_path: Path):
    root = layout("imagenet")
    result = openood(model, root, tmp_path / "caches", scores="entropy", full_spectrum=True, **QUICK)
    names = ("id", "imagenet_v2", "imagenet_c", "imagenet_r")
    tables = [dubito.open(tmp_path / "caches" / name) for name in names]
    known = torch.cat([Entropy().score(table) for table in tables])
    other = Entropy().score(dubito.open(tmp_path / "caches" / "ninco"))
    assert result["entropy"]["ninco"] == ood_metrics(known, other)
    # Four sets of six images, each counting the same: the accuracy of all of them together.
    assert result.accuracy == pytest.approx(np.mean([100 * dubito.metrics.table_accuracy(table) for table in tables]))
    assert result.shifted == names[1:]
    assert "full spectrum" in result.title()


def rows() -> OpenOod:
    of = {name: OodMetrics(10.0 * i, 90.0 - i, 80.123, 1234.5) for i, name in enumerate(OPENOOD["cifar10"].ood)}
    return OpenOod("cifar10", "small", {"id": 9}, 95.0, scores={"msp": of})


def test_text_and_json():
    lines = rows().lines()
    assert lines[0] == ["score", "data set", "FPR@95", "AUROC", "AUPR_IN", "AUPR_OUT", "ACC"]
    assert lines[1] == ["msp", "cifar100", "0.00", "90.00", "80.12", "1,234.50", "95.00"]
    assert [line[1] for line in lines[2:]] == ["tin", "nearood", "mnist", "svhn", "texture", "places365", "farood"]
    assert lines[3][2:4] == ["5.00", "89.50"]  # means of 0 and 10, of 90 and 89
    assert lines[-1][2:4] == ["35.00", "86.50"]  # (20 + 30 + 40 + 50) / 4, (88 + 87 + 86 + 85) / 4
    plain = json.loads(rows().to_json())
    assert plain["scores"]["msp"]["farood"]["fpr95"] == 35
    assert plain["accuracy"] == 95


def test_only_some_sets(layout: Layout, model):
    result = openood(
        model, layout("imagenet", ("ninco", "textures")), sets=["openimage_o", "ssb_hard"], scores="entropy", **QUICK
    )
    assert list(result["entropy"]) == ["ssb_hard", "nearood", "openimage_o", "farood"]
    assert result.findings() == [
        "Left out: ninco, inaturalist, textures. Means over the remaining sets are no figures of OpenOOD."
    ]
    far = openood(model, layout("imagenet"), sets=["textures"], scores="entropy", **QUICK)
    assert list(far["entropy"]) == ["textures", "farood"]


def test_what_is_missing_is_listed_at_once(layout: Layout, model):
    root = layout("imagenet", ("ninco", "id"))
    (root / "images_classic/textures/some/2.png").unlink()
    with pytest.raises(ImagesError) as error:
        openood(model, root, scores="entropy", **QUICK)
    text = str(error.value)
    assert "id (there is no list 'benchmark_imglist/imagenet/test_imagenet.txt')" in text
    assert "ninco (there is no list 'benchmark_imglist/imagenet/test_ninco.txt')" in text
    assert "textures (1 of 6 images below 'images_classic': 'textures/some/2.png')" in text
    assert "scripts/download/download.py with contents=datasets, datasets=imagenet-1k, dataset_mode=benchmark" in text
    assert "pass sets=" not in text  # without in-distribution images, no choice of sets helps


def test_what_is_there_is_offered(layout: Layout, model):
    root = layout("cifar10", ("tin", "mnist"))
    with pytest.raises(ImagesError, match=r"or pass sets= with what is there: cifar100, svhn, texture, places365\."):
        openood(model, root, benchmark="cifar10", scores="entropy", **QUICK)


def test_errors(layout: Layout, model):
    root = layout("cifar10")
    with pytest.raises(ValueRangeError, match=r"benchmark must be one of imagenet, .*; got 'cifar'"):
        openood(model, root, benchmark="cifar")
    with pytest.raises(ValueRangeError, match=r"set of cifar10 must be one of cifar100, tin, .*; got 'ninco'"):
        openood(model, root, benchmark="cifar10", sets=["ninco"])
    with pytest.raises(TableError, match=r"sets must be a list of cifar100, tin.*; got 'tin'"):
        openood(model, root, benchmark="cifar10", sets="tin")
    with pytest.raises(NotFittedError, match=r"neighbours learns from feature.*such as train=50_000"):
        openood(model, root, benchmark="cifar10", scores="neighbours", **QUICK)
    with pytest.raises(ValueRangeError, match="train must be a whole number, at least 1; got 0"):
        openood(model, root, benchmark="cifar10", train=0)
    (root / "benchmark_imglist/cifar10/test_tin.txt").write_text("tin/some/0.png\n")
    with pytest.raises(ImagesError, match=r"test_tin.txt' must have 'path label' in every line"):
        openood(model, root, benchmark="cifar10", **QUICK)


def test_test_images_among_those_learned_from_are_reported(layout: Layout, model, tmp_path: Path):
    root = layout("cifar10")
    openood(model, root, tmp_path / "caches", benchmark="cifar10", scores="entropy", **QUICK)
    seen = dubito.open(tmp_path / "caches" / "id")
    with pytest.warns(UserWarning, match="openood: .*train"):
        openood(model, root, tmp_path / "caches", benchmark="cifar10", scores=[Neighbours(k=1)], train=seen, **QUICK)


def test_a_score_of_the_users_own_is_left_as_it_was(layout: Layout, model, tmp_path: Path):
    root, own = layout("cifar10"), Neighbours(k=1)
    openood(model, root, tmp_path / "caches", benchmark="cifar10", scores=own, train=5, **QUICK)
    assert not own.is_fitted


def test_plot(axes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows().plot(axes) is axes
    assert axes.lines[0].get_xdata().tolist()[:3] == [90, 89, 89.5]
