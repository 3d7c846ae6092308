"""An .npz file of arrays in place of a cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dubito
from dubito.errors import CacheError, TableError

LOGIT = np.array([[2.0, 0.0], [0.0, 1.0], [0.5, 0.25]])


def written(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_columns_classes_and_ids(tmp_path: Path) -> None:
    more = {"label": [0, 1, 1], "classes": ["cat", "dog"], "camera": ["a", "b", "a"], "name": [7, 8, 9]}
    table = dubito.open(written(tmp_path / "val.npz", logit=LOGIT, feature=np.eye(3, dtype=np.float16), **more))
    assert table.name == str(tmp_path / "val.npz")
    assert torch.equal(table.logit, torch.from_numpy(LOGIT))
    assert table.feature.dtype == torch.float32
    assert table.label.tolist() == [0, 1, 1]
    assert table.classes == table.label_names == ["cat", "dog"]
    assert table.id.tolist() == ["000000", "000001", "000002"]
    assert table.whole("camera").tolist() == ["a", "b", "a"]
    assert table.whole("name").tolist() == [7, 8, 9]  # a column, not the name of the table
    assert table.model_id is None
    named = dubito.open(written(tmp_path / "named.npz", feature=np.eye(3), id=["x", "y", "z"]), labels=[0, 1, 1])
    assert named.id.tolist() == ["x", "y", "z"]
    assert named.label.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"logits": LOGIT}, r"x\.npz': the array 'logits' must be called 'logit'\. Rename it\."),
        ({"logit": LOGIT, "labels": [0, 1, 1]}, r"the array 'labels' must be called 'label'"),
        ({"label": [0, 1, 1]}, r"must hold arrays logit or feature; it has label\. Write plain arrays with numpy"),
        ({"images": LOGIT}, r"it has images\. Run a model over images first: dubito\.extract\(model, '.*x\.npz', to="),
        ({"logit": LOGIT, "classes": ["cat"]}, r"classes must be one name per logit; got 1 for .* \(3, 2\)\. Put them"),
        ({"logit": np.array([1, "a"], dtype=object)}, r"cannot be read \(Object arrays .*\)\. Write plain arrays"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, arrays: dict[str, Any], expected: str) -> None:
    with pytest.raises(CacheError, match=expected):
        dubito.open(written(tmp_path / "x.npz", **arrays))


def test_lengths_files_and_models_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="must have one length; logit has 3, label has 2"):
        dubito.open(written(tmp_path / "x.npz", logit=LOGIT, label=[0, 1]))
    (tmp_path / "junk.npz").write_text("no arrays")
    with pytest.raises(CacheError, match=r"junk\.npz' cannot be read \(File is not a zip file\)"):
        dubito.open(tmp_path / "junk.npz")
    with pytest.raises(CacheError, match=r"lost\.npz' cannot be read \(.*No such file"):
        dubito.open(tmp_path / "lost.npz")
    path = written(tmp_path / "y.npz", logit=LOGIT)
    with pytest.raises(CacheError, match=r"open: the arrays of '.*' do not record their model\. Leave model out\."):
        dubito.open(path, model=dubito.wrap(torch.nn.Linear(3, 2), classes=2))
