"""Names that moved to tests.support, for tests/compile/test_compile_ahead.py."""

from tests.support.harness import assert_close, run, select
from tests.support.inputs import Shape, make_inputs

__all__ = ["Shape", "assert_close", "make_inputs", "run", "select"]
