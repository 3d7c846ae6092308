"""Pretrained uncertainty heads: the network, its losses, its training, and its files."""

from dubito.heads.checkpoint import HeadConfig, PretrainedHead
from dubito.heads.joint import JointOutput, WithUncertainty, joint_loss, with_uncertainty
from dubito.heads.losses import l1_loss, l2_loss, log_l2_loss, ranking_loss, variance_nll
from dubito.heads.module import HeadModule
from dubito.heads.recipe import Recipe, expected_loss, with_expected_loss
from dubito.heads.score import Training, UncertaintyHead, train
from dubito.heads.shelf import list_heads

__all__ = [
    "HeadConfig",
    "HeadModule",
    "JointOutput",
    "PretrainedHead",
    "Recipe",
    "Training",
    "UncertaintyHead",
    "WithUncertainty",
    "expected_loss",
    "joint_loss",
    "l1_loss",
    "l2_loss",
    "list_heads",
    "log_l2_loss",
    "ranking_loss",
    "train",
    "variance_nll",
    "with_expected_loss",
    "with_uncertainty",
]
