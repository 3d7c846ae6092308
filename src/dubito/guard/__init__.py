"""Accept or abstain, with a guarantee that holds: `Guard`, and the thresholds and prediction sets behind it."""

from dubito.guard.check import GuaranteeCheck
from dubito.guard.conformal import PredictionSets
from dubito.guard.guarantee import Guarantee
from dubito.guard.guard import Guard
from dubito.guard.shift import Observations, Shift, find_shift
from dubito.guard.shift_weights import DensityRatio
from dubito.guard.thresholds import Threshold, needed, risk_threshold, share_threshold
from dubito.guard.verdict import Decisions, Verdict
from dubito.guard.watch import Watch
from dubito.guard.watch_report import WatchReport

__all__ = [
    "Decisions",
    "DensityRatio",
    "Guarantee",
    "GuaranteeCheck",
    "Guard",
    "Observations",
    "PredictionSets",
    "Shift",
    "Threshold",
    "Verdict",
    "Watch",
    "WatchReport",
    "find_shift",
    "needed",
    "risk_threshold",
    "share_threshold",
]
