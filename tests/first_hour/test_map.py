"""The map: the most uncertain images are ringed, so that they are seen although they are the most transparent."""

import numpy as np
import torch

import dubito
from dubito import Table


def test_the_most_uncertain_are_ringed_and_keep_the_papers_size_and_opacity():
    draw = torch.Generator().manual_seed(0)
    table = Table(logit=torch.randn(60, 3, generator=draw), feature=torch.randn(60, 4, generator=draw))
    drawn = dubito.draw_map(table)
    most = np.argsort(-drawn.u)[:3]  # 5 % of 60
    assert sorted(np.flatnonzero(drawn.ringed)) == sorted(most)
    low, high = np.quantile(drawn.u, (0.02, 0.98))
    share = np.clip((drawn.u - low) / (high - low), 0, 1)
    np.testing.assert_allclose(drawn.radius, 1 + 3 * share)
    np.testing.assert_allclose(drawn.opacity, 0.9 - 0.7 * share)


def test_of_equal_uncertainties_none_is_ringed():
    table = Table(feature=torch.randn(20, 4, generator=torch.Generator().manual_seed(0)))
    assert not dubito.draw_map(table, torch.ones(20)).ringed.any()
