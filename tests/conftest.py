"""Tests import shared modules from this folder: `from decode.harness import ...`. One torch thread: processes share the cores."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
