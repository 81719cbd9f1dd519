"""Bitwise comparison of results on their device: nothing synchronises until the caller reads the result."""

from __future__ import annotations

import torch

Result = tuple[torch.Tensor, torch.Tensor]


def differing_rows(got: Result, expected: Result) -> torch.Tensor:
    """bool [rows]: rows of (out, lse) that are not equal bit for bit; out has 16-bit elements."""
    (out, lse), (expected_out, expected_lse) = got, expected
    wrong_out = (out.view(torch.int16) != expected_out.view(torch.int16)).flatten(1).any(1)
    return wrong_out | (lse.view(torch.int32) != expected_lse.view(torch.int32)).any(1)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal bit for bit; NaN is compared like any other value."""
    return torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
