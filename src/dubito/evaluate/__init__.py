"""How good uncertainties are: `evaluate`, `compare` and selective prediction."""

from dubito.evaluate.compare import Comparison, compare
from dubito.evaluate.evaluate import Evaluation, evaluate
from dubito.evaluate.rejection import rejection_study
from dubito.evaluate.rejection_result import RejectionStudy

__all__ = ["Comparison", "Evaluation", "RejectionStudy", "compare", "evaluate", "rejection_study"]
