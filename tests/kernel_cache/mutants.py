"""What may become of an object on disk, or be put in its place."""

from __future__ import annotations

import random

from cute_kernels.compile.objects import MAGIC, Compiled, seal


def flip(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def zero(data: bytes, chance: random.Random) -> bytes:
    """A range of it, as a crashed file system leaves a page; code_of has none of them."""
    at = chance.randrange(len(data) - 64)
    return data[:at] + bytes(64) + data[at + 64 :]


def extend(data: bytes, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.randrange(1, 64))


def swap(data: bytes, chance: random.Random) -> bytes:
    """Another kernel's object, whole."""
    return seal(f"{chance.getrandbits(256):064x}", Compiled("shared", chance.randbytes(4096)), {})


def plant(data: bytes, chance: random.Random) -> bytes:
    """A shared library as it is, or under our first bytes."""
    return (b"\x7fELF", MAGIC + b"\x7fELF")[chance.randrange(2)] + chance.randbytes(4096)


MUTATIONS = (flip, truncate, zero, extend, swap, plant)
