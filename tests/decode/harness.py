"""Names that moved to tests.support, for tests/compile/test_compile_ahead.py."""

from tests.support.harness import Shape, assert_close, make_inputs, run, select

__all__ = ["Shape", "assert_close", "make_inputs", "run", "select"]
