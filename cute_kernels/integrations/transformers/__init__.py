"""transformers models over the plans of this package: generate, and continuous batching.

docs/engines.md has the lines to write, and says what is served and what transformers' own attention does instead.
"""

from .register import NAME, register

__all__ = ["NAME", "register"]
