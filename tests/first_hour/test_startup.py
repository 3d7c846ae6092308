"""Start-up: what scores do not need is imported where it is needed."""

import json
import subprocess
import sys

import torch
from torch import nn

import dubito

HEAVY = (
    *("torchvision", "timm", "transformers", "sklearn", "faiss", "matplotlib", "pandas", "polars"),
    *("scipy", "torch._dynamo", "huggingface_hub", "onnx"),
)


def heavy_modules(code: str) -> set[str]:
    """Those of HEAVY that a process has loaded after running some code."""
    last = f"import json, sys; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{last}"], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_scores_of_a_cache_import_nothing_heavy(tmp_path):
    cache = str(tmp_path / "cache")
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    dubito.extract(dubito.wrap(module), torch.randn(6, 3, 2, 2), to=cache, progress=False)
    in_python = f"import dubito\ndubito.Entropy().score(dubito.open({cache!r}))"
    on_the_command_line = f"from dubito.cli import main\nassert main(['score', {cache!r}]) == 0"
    assert heavy_modules(f"{in_python}\n{on_the_command_line}") <= heavy_modules("import torch")


def test_importing_leaves_pythons_random_state_alone():
    code = "import random; s = random.getstate(); import dubito; dubito.extract; assert random.getstate() == s"
    subprocess.run([sys.executable, "-c", code], check=True)
