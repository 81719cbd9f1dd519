"""Traces and compiles a mixed kernel: it takes the operands of an attention kernel."""

from ...config.mixed import MixedSpec
from ..kernels.mixed import MixedKernel
from .decode import arguments
from .fakes import compile_kernel


def build_mixed(spec: MixedSpec, options: str = ""):
    """Compiles `spec` for its target; needs no GPU. `options` are further compiler options, such as --keep-ptx."""
    return compile_kernel(MixedKernel(spec), arguments(spec.few, spec.takes_workspace), spec.target, options)
