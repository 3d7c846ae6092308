"""How messages of the library are translated into the words of the command line."""

import pytest

from dubito.cli._translate import translate

OPTIONS = {"ood": "--ood", "train": "--learn-from", "per_class": "--per-class", "held_out": "--held-out", "to": "--to"}
OPTIONS |= {"transform": "--input-size", "groups": "--groups", "missed": "--missed"}


@pytest.mark.parametrize(
    ("text", "translated"),
    [
        ("evaluate: ood (cache/x) and y must come", "--ood (cache/x) and y must come"),
        ("held_out: a share must lie", "--held-out: a share must lie"),
        ("compare: ood 'cats' needs rows", "--ood 'cats' needs rows"),
        ("these images are also in train (cache/x)", "these images are also in --learn-from (cache/x)"),
        ("Pass to=.", "Pass --to."),
        ("Give ood=..., or train='x'.", "Give --ood ..., or --learn-from 'x'."),
        ("per_class=True needs labels", "--per-class needs labels"),
        ("they train on ood images", "they train on ood images"),
        ("see `train=1` and dubito.f(to=1, g(ood=2))", "see `train=1` and dubito.f(to=1, g(ood=2))"),
        ("Make one with dubito.extract(model, images, to='c').", "Make one with `dubito extract MODEL IMAGES --to c`."),
        ("acquire: to is 3", "--to is 3"),
        ("no guard in 'g'. Save one with Guard.save.", "no guard in 'g'. Save one with `dubito guard fit`."),
        (
            "by the probe (dubito.extract(..., probes=[dubito.probes.PreActivation()])).",
            "by the probe (`dubito extract ... --probe pre_activation`).",
        ),
        (
            "Use it: transform=dubito.Preprocess(..., mean=(0.5, 0.4, 0.3), std=(1, 1, 1)), on pixels.",
            "Use it: --mean 0.5,0.4,0.3 --std 1,1,1, on pixels.",
        ),
        (
            "guard.refit: accept less (guard.with_risk), as `guard.refit(x)`, guard.refit(new).",
            "dubito guard refit: accept less (`dubito guard with-risk`), as `guard.refit(x)`, `dubito guard refit`.",
        ),
        ("guard: to must be a number", "--to must be a number"),
        (
            "guard needs it; x has no column 'camera'. Add it: table.extended(camera=[...]), one name or whole number "
            "per row.",
            "guard needs it; x has no column 'camera'. Add it: --groups FILE.csv with the columns path and camera.",
        ),
        ('such as missed={1: 0.05}, or missed={"a b": 0.1}.', "such as --missed 1=0.05, or --missed a b=0.1."),
        ("auto.train=1 and pre-train=2", "auto.train=1 and pre-train=2"),
    ],
)
def test_arguments_become_options(text: str, translated: str) -> None:
    assert translate(text, OPTIONS) == translated
