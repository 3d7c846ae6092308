import platform

import pytest
import torch

from dubito.cache.memory import kept_memory


def faults(block: int) -> int:
    """Page faults of taking and freeing a large block a few times."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.empty(block, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


if platform.libc_ver()[0] == "glibc":

    def test_the_usual_limits_come_back_after_an_error():
        with pytest.raises(KeyError), kept_memory():
            raise KeyError("in the middle")
        assert faults(128 * 2**20) > 8 * 32

    def test_freed_memory_is_used_again_inside_and_given_back_outside():
        block = 128 * 2**20
        with kept_memory():
            faults(block)
            inside = faults(block)
        outside = faults(block)
        assert inside < 100
        assert outside > 8 * 32  # at the least one fault a huge page, every time
