"""Is the set-up right? One kind of check per file."""

from dubito.audit.audit import Audit, audit
from dubito.audit.finding import Finding

__all__ = ["Audit", "Finding", "audit"]
