"""What tests of several rooms share."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """For tiny models: on shared cores, waiting for threads would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
