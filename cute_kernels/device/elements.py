"""The DSL's element types that kernels take and compute with, by their names in specs."""

import cutlass
from cutlass import Float32

ELEMENT_TYPES = {"f32": Float32, "f16": cutlass.Float16, "bf16": cutlass.BFloat16}
STORED_TYPES = {"int8": cutlass.Int8, "e4m3": cutlass.Uint8, "e5m2": cutlass.Uint8}


def stored_element(stored_type: str) -> type:
    """The element type of a cache as a kernel takes it: fp8 as bytes."""
    return STORED_TYPES.get(stored_type) or ELEMENT_TYPES[stored_type]
