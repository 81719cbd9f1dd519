"""Tests import shared modules from this folder: `from decode.harness import ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
