"""Pretrained uncertainty heads: the network, what it is trained on, how, and how it is kept."""

from dubito.heads.joint import JointOutput, WithUncertainty, joint_loss, with_uncertainty
from dubito.heads.losses import l1_loss, l2_loss, log_l2_loss, ranking_loss, variance_nll
from dubito.heads.module import HeadModule
from dubito.heads.recipe import Recipe
from dubito.heads.targets import expected_loss, with_expected_loss

__all__ = [
    "HeadModule",
    "JointOutput",
    "Recipe",
    "WithUncertainty",
    "expected_loss",
    "joint_loss",
    "l1_loss",
    "l2_loss",
    "log_l2_loss",
    "ranking_loss",
    "variance_nll",
    "with_expected_loss",
    "with_uncertainty",
]
