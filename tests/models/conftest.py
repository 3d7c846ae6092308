"""What all tests of models share."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    # The models are tiny: on shared cores, waiting for threads would take most of the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
