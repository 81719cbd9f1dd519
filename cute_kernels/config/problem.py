"""The properties of a problem that change an attention kernel's generated code: types, cache, query rows and masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .modifiers import UNMODIFIED, Modifiers, QueryForm

Source = Literal["paged", "contiguous"]
TableFormat = Literal["dense", "csr", "none", "lengths", "packed"]  # the last three say how long a contiguous cache's rows are
ElementType = Literal["f16", "bf16", "f32"]
StoredType = Literal["f16", "bf16", "f32", "e4m3", "e5m2", "int8"]
ScaleForm = Literal["none", "head", "token_f16", "token_f32"]
LseBase = Literal["e", "2"]

ELEMENT_BYTES: dict[StoredType, int] = {"f16": 2, "bf16": 2, "f32": 4, "e4m3": 1, "e5m2": 1, "int8": 1}
MMA_K = 16  # depth of one m16n8k16 step
LDMATRIX_BYTES = 32  # bytes of a token that one ldmatrix.x4 brings
UNIT_BYTES = 2  # tiles are kept, moved and read in units of 16 bits, whatever they hold
ANY_Q_LEN = 2**31 - 1  # query rows: no limit
WEIGHT_BITS = 14  # softmax weights reach 2 ** 14 if P is f16, so that weights 2 ** 38 times smaller still count


@dataclass(frozen=True)
class QueryLengths:
    """Requests of `least` to `most` query rows.

    dealt_from: from so many query rows on, a later phase deals the blocks of a request, and this phase may leave it CTAs
    (device/schedule/work_scheduler.leaves); 0: this phase leaves none.
    """

    least: int
    most: int = ANY_Q_LEN
    dealt_from: int = 0


@dataclass(frozen=True, kw_only=True)
class ProblemSpec:
    """The fields of a kernel's spec that a problem decides.

    element_type: the type of q and out; k_type, v_type: what the caches store. k_scale, v_scale: "head" for one scale per KV
    head or one for all, "token_..." for one per token and KV head. vector_bytes: bytes that one cp.async moves (16 for TMA).
    page_size: 0 if rows are contiguous. head_dim: of q and K; v_head_dim: of V and out. query: how many query rows a request
    has. modifiers: masks and functions of scores. q_lens: the requests that a phase of a mixed kernel serves; to that phase all
    other requests have no query rows. None: it serves all requests.
    """

    source: Source
    table_format: TableFormat
    element_type: ElementType
    k_type: StoredType
    v_type: StoredType
    k_scale: ScaleForm
    v_scale: ScaleForm
    head_dim: int
    v_head_dim: int
    group_size: int
    page_size: int
    vector_bytes: int
    lse_base: LseBase
    query: QueryForm = "one"
    modifiers: Modifiers = UNMODIFIED
    q_lens: QueryLengths | None = None

    @property
    def opens_kernel(self) -> bool:
        """Whether this is a whole kernel, or the first phase of one: either makes its own mbarriers."""
        return self.q_lens is None or self.q_lens.least == 1

    @property
    def leaves_ctas(self) -> bool:
        """Whether this phase of a kernel may leave CTAs to one that deals blocks of long queries."""
        return self.q_lens is not None and self.q_lens.dealt_from > 0

    @property
    def plain(self) -> bool:
        """Whether a request has one query row whose scores are only scaled: such a kernel takes no further operands."""
        return self.query == "one" and self.modifiers == UNMODIFIED

    @property
    def several(self) -> bool:
        """Whether a request may have several query rows."""
        return self.query != "one"

    @property
    def unit_rows(self) -> int:
        """Packed rows of a query row: the query heads of a KV head, or of a unit's two (TilingSpec)."""
        return self.group_size

    @property
    def padded_head_dim(self) -> int:
        """head_dim rounded up to whole steps over the narrower cache."""
        return padded_head_dim(self.head_dim, min(self.k_bytes, self.v_bytes))

    @property
    def padded_v_head_dim(self) -> int:
        """padded_head_dim of V and of the output."""
        return padded_head_dim(self.v_head_dim, min(self.k_bytes, self.v_bytes))

    @property
    def q_bytes(self) -> int:
        """Bytes of an element of q, and of out."""
        return ELEMENT_BYTES[self.element_type]

    @property
    def k_bytes(self) -> int:
        """Bytes of an element of K."""
        return ELEMENT_BYTES[self.k_type]

    @property
    def v_bytes(self) -> int:
        """Bytes of an element of V."""
        return ELEMENT_BYTES[self.v_type]

    @property
    def k_math(self) -> ElementType:
        """The type of the operands of Q K^T."""
        return self.math_of(self.k_type)

    @property
    def v_math(self) -> ElementType:
        """The type of the operands of P V."""
        return self.math_of(self.v_type)

    def math_of(self, stored: StoredType) -> ElementType:
        """The type of a product's operands for elements of a cache: f16 holds each of 8 bits exactly, three bf16 an f32."""
        return {1: "f16", 2: self.element_type, 4: "bf16"}[ELEMENT_BYTES[stored]]

    @property
    def splits(self) -> bool:
        """Whether operands are f32: products take each as three bf16 (device/attend/split_mma.py)."""
        return self.element_type == "f32"

    @property
    def rescales_query(self) -> bool:
        """Whether rows of the query are multiplied by a power of two and a sign (device/attend/query_range.py)."""
        return self.limits_query or self.k_scale == "head"

    @property
    def limits_query(self) -> bool:
        """Whether rows of the query are brought into f16's range (device/attend/query_range.py)."""
        return self.k_bytes == 1 and self.k_math == "f16"

    @property
    def k_token_scale(self) -> bool:
        """Whether K has a scale per token."""
        return self.k_scale.startswith("token")

    @property
    def v_token_scale(self) -> bool:
        """Whether V has a scale per token."""
        return self.v_scale.startswith("token")

    @property
    def token_scales(self) -> int:
        """How many of K and V have a scale per token."""
        return self.k_token_scale + self.v_token_scale

    @property
    def weight_bits(self) -> int:
        """Softmax weights are at most 2 ** weight_bits."""
        return WEIGHT_BITS if self.v_math == "f16" else 0


def step_columns(element_bytes: int) -> int:
    """Columns of a step of Q K^T: 16, or for 8-bit elements the 32 that one ldmatrix.x4 brings."""
    return max(MMA_K, LDMATRIX_BYTES // element_bytes)


def padded_head_dim(head_dim: int, element_bytes: int) -> int:
    """head_dim rounded up to whole steps."""
    columns = step_columns(element_bytes)
    return -(-head_dim // columns) * columns
