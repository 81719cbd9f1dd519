"""Device memory that outlives the call in which it is made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def lasting_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that any stream may use at once, and that later calls may keep. Waits for the device's current stream.

    A separate thread makes them, since the calling thread may be in a mode that later calls are not in: inference mode, or that
    of torch.compile's CUDA graphs. Their warm-up run takes all that its thread allocates from the graphs' pool, and raises
    RuntimeError if some of that memory is still in use afterwards.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def make() -> Tensor:
        if stream is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        with torch.cuda.stream(stream):
            zeros = torch.zeros(shape, dtype=dtype, device=device)
        stream.synchronize()
        return zeros

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
