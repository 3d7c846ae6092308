"""Who writes which column, and which settings change its numbers."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dubito
from dubito.probes import PROBES
from dubito.table import Provenance, Table, ensembles_in, recorded_settings, settings_difference, writer_of
from dubito.table.columns import ColumnFamily, compared_names, families
from dubito.table.views import MEMBERS

KEPT = ', with keep="logits"'


def extracted(probe: str) -> str:
    return f"(dubito.extract(..., probes=[dubito.probes.{probe}]))"


DROPOUT = f"the Monte-Carlo dropout probe {extracted('Dropout()')}"
TILES = f"the tiles probe {extracted('Tiles()')}"
MODELS = f"the probe of several models {extracted('Members(models)')}"
MASKS = "masks of the last layer (dubito.ensembles.HeadMasks().fit(train).extend(table))"


@pytest.mark.parametrize(
    ("column", "writer"),
    [
        ("feature", "the forward probe, which every extraction runs"),
        ("id", "every extraction"),
        ("members", MODELS),
        ("members_between", MODELS),
        (
            "checkpoints_loss",
            f"the probe of checkpoints {extracted('Members.checkpoints(model, paths)')}, where labels are the model's "
            f"classes",
        ),
        ("tiles_7", TILES),
        ("masks_logit", MASKS),
        ("masks_variance", MASKS + ", from whose logits it is computed"),
        ("tiles_16_logit", TILES + KEPT),
        ("members_logit", MODELS + KEPT + ", or by dubito.ensemble(tables) of one table per model"),
        ("noise_variance", f"the probe of noisy copies {extracted('Noise()')}"),
        ("dropout_variance", DROPOUT + KEPT + ", from which it is computed"),
        *((name, None) for name in ("tiles", "tiles_logit", "members_2", "mine", "mine_logit", "xmembers", "views_x")),
    ],
)
def test_who_writes_the_columns_of_ensembles(column, writer):
    assert writer_of(column) == writer


@pytest.mark.parametrize(
    ("column", "settings"),
    [
        ("gradient", ""),
        ("gradient_root", ', with method="exact" and weightings=["root"]'),
        ("gradient_l1", ', with method="exact" and weightings=["expected_l1"]'),
        ("gradient_predicted", ', with any method but "signs"'),
        ("gradient_uniform", ", with uniform=True"),
        ("gradient_bound", ', with method="top"'),
        ("very_noisy_uniform", " named 'very_noisy', with uniform=True"),
    ],
)
def test_who_writes_the_columns_of_gradients(column, settings):
    assert writer_of(column) == f"the gradient probe {extracted('Gradient()')}{settings}"
    assert writer_of("_root") is writer_of("9_root") is writer_of("roots") is None


def test_every_ensemble_has_its_columns():
    names = [f"{name}_2" if name == "tiles" else name for name, family in families().items() if family.ensemble]
    assert len(names) == 7
    for name in names:
        assert ensembles_in([name]) == ensembles_in([f"{name}_logit", f"{name}_loss"]) == (name,)
    assert ensembles_in(["members_loss", "views_between", "noise_variance", "logit", "mine_logit"]) == ()


def test_every_probe_declares_its_columns():
    assert set(PROBES) <= set(families())


def test_a_table_knows_writers_before_any_probe_is_imported():
    code = (
        "import sys; from dubito.table import Table, writer_of; "
        "assert not any(name.startswith('dubito.probes') for name in sys.modules); print(writer_of('tiles_2'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == TILES


def test_the_room_names_no_probe():
    """Probes declare their columns; only the columns that `ensemble` itself makes are named here."""
    names = {*PROBES, *(name for name, family in families().items() if family.ensemble)} - {MEMBERS, "views"}
    for path in (Path(dubito.__file__).parent / "table").glob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        code = " ".join(text for text in texts if isinstance(text, str))
        assert not [name for name in names if re.search(rf"\b{name}(_|\b)", code)], path.name


def test_patterns():
    family = ColumnFamily(r"(?P<name>(?P<probe>mine)_\d)(?P<part>_more)?", "me")
    assert family.match("mine_2") == {"name": "mine_2", "probe": "mine", "part": ""}
    assert family.match("mine_2_more")["part"] == "_more"
    assert family.match("mine") is None


def probes(**settings: dict) -> Provenance:
    return Provenance(probes={name: {"settings": each} for name, each in settings.items()})


def test_settings_of_ensembles():
    def table(**settings):
        return Table(provenance=probes(tiles=settings, members={"members": ["ab" * 16] * 3}))

    cold, warm = table(temperature=1.0, keep="logits"), table(temperature=2.0, more=1)
    assert recorded_settings(cold, "tiles_7") == {"temperature": 1.0, "keep": "logits"}
    assert recorded_settings(cold, "views") is recorded_settings(Table(), "views") is None
    assert settings_difference(cold, warm, "tiles_7") == "temperature=1.0 and temperature=2.0, more=None and more=1"
    assert settings_difference(cold, table(temperature=1.0, keep="summary"), "tiles_7") is None
    assert settings_difference(cold, warm, "members") is None
    assert settings_difference(cold, warm, "views") is settings_difference(cold, Table(), "tiles_7") is None  # unknown
    others = Table(provenance=probes(members={"members": ["cd" * 16] * 3}))
    assert settings_difference(cold, others, "members") == "members"  # nobody reads hashes


def test_settings_of_gradients():
    def table(**settings):
        settings = {**settings, "probe": "gradient"}
        return Table(noisy=[[1.0]], provenance=probes(noisy=settings, gone=settings))

    first, second = table(copies=2, sigma=0.1, seed=0, uniform=True), table(copies=8, sigma=0.1, seed=1, uniform=False)
    assert settings_difference(first, second, "noisy") == "copies=2 and copies=8, seed=0 and seed=1"
    assert settings_difference(first, table(copies=2, sigma=0.1, seed=0, weightings=["fisher"]), "noisy") is None
    assert settings_difference(table(method="exact"), table(method="exact"), "noisy") is None
    signs = [table(method="signs", seed=seed) for seed in (0, 1)]
    assert settings_difference(*signs, "noisy") == "seed=0 and seed=1"
    assert settings_difference(first, Table(), "noisy") is None
    assert compared_names(first, first.columns) == ("noisy",)  # of the other there is no column
    assert compared_names(Table(), ["noisy"]) == compared_names(Table(provenance=Provenance()), ["noisy"]) == ()
    assert compared_names(Table(), ["tiles_2", "logit"]) == ("tiles_2",)


def test_settings_of_a_probe_of_ones_own():
    one, two = (Table(mine=[1.0], provenance=probes(mine={"seed": seed})) for seed in (0, 1))
    assert settings_difference(one, two, "mine") == "seed=0 and seed=1"  # whatever it records changes its columns
