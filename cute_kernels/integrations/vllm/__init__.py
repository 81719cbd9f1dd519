"""vLLM's attention over the plans of this package: the backend CUTE_KERNELS, which an entry point of vLLM's plugins registers.

docs/engines.md has the lines to write, and says what is served and how vLLM reports what is not.
"""

from .register import NAME, plugin, register

__all__ = ["NAME", "plugin", "register"]
