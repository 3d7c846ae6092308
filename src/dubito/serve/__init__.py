"""The HTTP service of a guard."""

from dubito.serve.service import Service, ServiceLimits, serve

__all__ = ["Service", "ServiceLimits", "serve"]
