"""Engines: where blocks of images are worked on, in this process or on a Ray cluster."""

from typing import get_args

from dubito.choices import EngineName
from dubito.engines.engine import Block, BlockWork, ExtractionEngine, LocalEngine
from dubito.engines.ray import RayEngine
from dubito.validate import check_choice

__all__ = ["Block", "BlockWork", "ExtractionEngine", "LocalEngine", "RayEngine", "as_engine"]


def as_engine(engine: ExtractionEngine | str, *, by: str) -> ExtractionEngine:
    """An engine as it is, or the one of a name with its default settings."""
    if isinstance(engine, ExtractionEngine):
        return engine
    check_choice(engine, get_args(EngineName), by=by, what="engine")
    return LocalEngine() if engine == "local" else RayEngine()
