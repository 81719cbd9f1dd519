"""Fake tensors with dynamic shapes and strides, from which kernels are traced, and the call of the compiler."""

import warnings

import cutlass.cute as cute
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.cute.runtime import make_fake_tensor


def rows(dtype: type, shape: tuple, divisibility: int, align: int):
    """A tensor with a unit last stride and any other strides that are multiples of `divisibility` elements."""
    strides = tuple(cute.sym_int64(divisibility=divisibility) for _ in shape[:-1])
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)


def scalars(dtype: type, shape: tuple):
    """A tensor of any strides, read one element at a time."""
    return make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=dtype.width // 8)


def compile_kernel(kernel: object, fakes: tuple, target: str, options: str):
    """Compiles a jitted callable for `target`, to be called through TVM FFI; needs no GPU."""
    flags = f"--gpu-arch {target} --enable-tvm-ffi {options}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DSLOptimizationWarning)  # fragments are unrolled on purpose
        return cute.compile(kernel, *fakes, options=flags)
