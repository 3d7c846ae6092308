"""Only tests are collected: the harness imports servers and clusters, which takes seconds."""

from pathlib import Path

collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")]
