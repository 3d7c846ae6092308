"""What tests of several rooms share."""

import pytest
import torch
from jaxtyping import config
from matplotlib.figure import Figure


@pytest.fixture(scope="module")
def one_thread():
    """For tiny models: on shared cores, waiting for threads would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unchecked():
    """Without the type checks of the tests, which draw from Python's generator."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def axes():
    """Axes for `Result.plot`, of a figure without a window, which nobody has to close."""
    return Figure().subplots()
