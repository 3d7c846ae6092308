"""Layouts: principal components against scikit-learn's, and how far t-SNE is."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from dubito import Table
from dubito.report.layout import Components, lay_out, principal_components

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_principal_components_are_scikit_learns(offset):
    feature = Table(feature=torch.randn(50, 8, generator=torch.Generator().manual_seed(0))).feature.double() + offset
    result = principal_components(Table(feature=feature), 4)
    theirs = PCA(4, svd_solver="full").fit_transform(feature.numpy())
    np.testing.assert_allclose(abs(result), abs(theirs), atol=1e-6)


def test_wide_features_have_the_same_components_without_their_covariance(monkeypatch):
    table = Table(feature=torch.randn(50, 8, generator=torch.Generator().manual_seed(0)))
    exact = principal_components(table, 3)
    monkeypatch.setattr("dubito.report.layout._WIDE", 4)
    np.testing.assert_allclose(principal_components(table, 3), exact, atol=1e-6)
    wide = Table(feature=torch.randn(7, 60_000, generator=torch.Generator().manual_seed(0)))
    result = principal_components(wide, 6)  # 60,000 x 60,000 numbers would be 29 GB
    apart = torch.cdist(wide.feature.double(), wide.feature.double()).numpy()
    np.testing.assert_allclose(np.linalg.norm(result[:, None] - result[None], axis=-1), apart, rtol=1e-4, atol=1e-3)


def test_other_rows_are_projected_as_the_components_own():
    table = Table(feature=torch.randn(40, 6, generator=torch.Generator().manual_seed(0)))
    found = Components.of(table, 3)
    np.testing.assert_allclose(found.project(table.feature[5:7]), principal_components(table, 3)[5:7])
    assert found.project(found.mean[None].float())[0].tolist() == pytest.approx([0, 0, 0], abs=1e-6)


def test_tsne_reports_how_far_it_is():
    pytest.importorskip("openTSNE")
    shares: list[float] = []
    lay_out(np.random.default_rng(0).normal(size=(40, 3)), "tsne", progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) == 30  # 750 iterations, one report every 25
