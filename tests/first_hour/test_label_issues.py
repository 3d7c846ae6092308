"""Planted wrong labels are found among all images, and the result says how far to believe it."""

import numpy as np
import torch

import dubito


def test_most_planted_labels_are_found_and_few_others() -> None:
    draw = torch.Generator().manual_seed(0)
    label = torch.randint(10, (6000,), generator=draw)
    logit = 6 * torch.eye(10)[label] + 1.5 * torch.randn(6000, 10, generator=draw)
    wrong = torch.randperm(6000, generator=draw)[:300]
    noisy = label.clone()
    noisy[wrong] = (noisy[wrong] + torch.randint(1, 10, (300,), generator=draw)) % 10
    issues = dubito.find_label_issues(dubito.Table(logit=logit, feature=logit, label=noisy))
    hit = np.isin(issues.rows, wrong.numpy())
    assert hit.mean() > 0.93
    assert hit.sum() > 0.98 * 300
    assert abs((1 - hit.mean()) - issues.expected_right) < 0.05
    agree, expect, *_ = issues.findings()
    assert agree.startswith("The model's predictions agree with 9")
    assert expect.startswith(f"Of the {len(issues)} labels above, expect about ")
