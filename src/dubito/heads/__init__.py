"""Pretrained uncertainty heads: the network, what it is trained on, how, and how it is kept."""

from dubito.heads.losses import l1_loss, l2_loss, log_l2_loss, ranking_loss, variance_nll
from dubito.heads.module import HeadModule

__all__ = ["HeadModule", "l1_loss", "l2_loss", "log_l2_loss", "ranking_loss", "variance_nll"]
