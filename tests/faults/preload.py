"""What all children need, imported once in the process that they are forked from, which runs no thread."""

import s3fs  # noqa: F401
import torch
import torch._dynamo
import torch.nested
import torchvision  # noqa: F401

import tests.faults.victims  # noqa: F401

torch.set_num_threads(1)
