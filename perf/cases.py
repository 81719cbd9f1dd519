"""One case: a shape, the lengths of its rows, the type that its caches store, and the bar that it may have to meet.

A name says everything about its case, in FlashInfer's scheme: gqa_paged_decode_h32_kv8_d128_ps16_bf16_kve4m3_b64_l8k. An append's
name is kv_append_kv8_d128_ps16_bf16_kve4m3_t8k. A name of attention has, before the rows, the options that decode lacks, such as
four query rows per request (gqa_paged_attention_h32_kv8_d128_ps16_bf16_q4_b64_l8k) or a soft cap (..._softcap50_b64_l8k). A mixed
batch has there the most query rows that its plan serves, and each group's query rows after its tokens:
..._q2048_ragged_b61_60x4k-q1+1x8k-q2048.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

Operation = Literal["decode", "attention", "append", "weights", "backward"]
Dtype = Literal["bf16", "f16", "f32"]
Layout = Literal["HND", "NHD"]
TableFormat = Literal["dense", "csr", "none"]
EightBit = Literal["e4m3", "e5m2", "int8"]
Scale = Literal["tensor", "head", "token", "token-f16"]
DTYPES: tuple[Dtype, ...] = ("bf16", "f16")
LAYOUTS: tuple[Layout, ...] = ("HND", "NHD")
OPERATIONS: tuple[Operation, ...] = ("decode", "attention", "append", "weights", "backward")
READ, COPY, WGMMA = "read", "copy", "wgmma"
FLOORS = (READ, COPY, WGMMA)  # the providers without a result; a case's other times are divided by the time of one of them
PLAIN = "ours-plain"  # the provider that is our plain decode over the caches of an attention case
WIDE = "ours-16bit"  # the provider that is our attention over 16-bit caches of the values that an 8-bit case's caches hold
PARTS = "ours-parts"  # the provider that serves the parts of a mixed batch one after the other, each by a plan of its own
LONG_QUERY = 256  # from so many query rows on, the tensor core limits a case, not the memory
BALANCE = 190  # for a mixed batch, the limit in FLOP per byte: an H200 at 1.6 GHz (132 SMs x 4096 per clock) that reads 4.5 TB/s
BACKWARD_FLOP = 2.5  # times the forward's FLOP: five products in place of two
SLOT_BYTES = 8  # bytes of a token's slot
WEIGHT_BYTES = 4  # bytes of a weight
TABLE_FORMATS: tuple[TableFormat, ...] = ("dense", "csr")

ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1, "int8": 1}
SCALE_BYTES = {"tensor": 4, "head": 4, "token": 4, "token-f16": 2}


@dataclass(frozen=True)
class Rows:
    """Lengths given as groups of (rows, tokens), in an order shuffled by `seed`: ((1, 131072), (31, 4096)).

    seed None: in the order of the groups.
    """

    groups: tuple[tuple[int, int], ...]
    seed: int | None = 0

    def tokens(self) -> tuple[int, ...]:
        """KV tokens of each row."""
        lengths = [tokens for rows, tokens in self.groups for _ in range(rows)]
        if self.seed is not None:
            random.Random(self.seed).shuffle(lengths)
        return tuple(lengths)

    @property
    def label(self) -> str:
        if len(self.groups) == 1:
            rows, tokens = self.groups[0]
            return f"b{rows}_l{short(tokens)}"
        return f"b{sum(rows for rows, _ in self.groups)}_" + "+".join(f"{rows}x{short(tokens)}" for rows, tokens in self.groups)


@dataclass(frozen=True)
class Spread:
    """Random lengths of `batch` rows in low..high, both included: uniform, or uniform in the logarithm."""

    kind: Literal["uniform", "loguniform"]
    batch: int
    low: int
    high: int
    seed: int = 0

    def tokens(self) -> tuple[int, ...]:
        """KV tokens of each row."""
        draw = random.Random(self.seed)
        if self.kind == "uniform":
            return tuple(draw.randint(self.low, self.high) for _ in range(self.batch))
        return tuple(round(math.exp(draw.uniform(math.log(self.low), math.log(self.high)))) for _ in range(self.batch))

    @property
    def label(self) -> str:
        return f"b{self.batch}_{self.kind}{short(self.low)}-{short(self.high)}"


@dataclass(frozen=True)
class Mixed:
    """A batch whose requests differ in their query rows: groups of (requests, tokens, query rows), in the order of the groups.

    ((60, 4096, 1), (1, 8192, 2048)) is 60 decode rows and then a chunk of a prompt. Requests of fewer query rows come first, as
    engines order a batch, so requests with equally many query rows are neighbours. Raises ValueError for another order.
    """

    groups: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        rows = [q_rows for _, _, q_rows in self.groups]
        if rows != sorted(rows):
            raise ValueError(f"groups: {self.groups} have query rows {rows}, which must not fall")

    def tokens(self) -> tuple[int, ...]:
        """KV tokens of each request."""
        return tuple(tokens for requests, tokens, _ in self.groups for _ in range(requests))

    def query_rows(self) -> tuple[int, ...]:
        """Query rows of each request."""
        return tuple(q_rows for requests, _, q_rows in self.groups for _ in range(requests))

    def parts(self) -> dict[int, Rows]:
        """For each number of query rows, the lengths of the requests that have it, in the order of the groups."""
        found = groupby(self.groups, key=lambda group: group[2])
        return {q_rows: Rows(tuple(group[:2] for group in groups), seed=None) for q_rows, groups in found}

    @property
    def label(self) -> str:
        groups = [f"{short(tokens)}-q{q_rows}" for _, tokens, q_rows in self.groups]
        if len(groups) == 1:
            return f"b{self.groups[0][0]}_l{groups[0]}"
        each = "+".join(f"{group[0]}x{label}" for group, label in zip(self.groups, groups, strict=True))
        return f"b{len(self.tokens())}_{each}"


@dataclass(frozen=True)
class Case:
    """One decode step: a query token for each row, over a paged or contiguous cache.

    Or, by `operation`: the step's attention weights, attention of several query rows, its backward, or an append.

    operation: an append stores one token per row, so that batch_size is the number of tokens; its num_heads is num_kv_heads.
    page_size is 0 and table_format "none" for a contiguous cache, whose rows all have one length. kv_dtype: the type of K and V
    if it is not q's dtype. kv_scale: the scales of both, one for the tensor, each KV head, or each token and KV head (f32, or
    f16 for "token-f16"); None: the stored values are the real ones.

    The other fields belong to "attention". q_len: query rows per request, which are its last tokens, and each sees no later one;
    None: one row, as in decode; for a mixed batch, which is ragged, the most rows that the plan is described for. query: how q is
    handed over; None stands for uniform. window_left: tokens before its own that a query row sees. softcap: of the scores.
    alibi, sinks: whether each head has a slope, and a logit in the denominator. tree_mask: whether a bit mask says which new
    tokens each query row sees.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    lengths: Rows | Spread | Mixed
    dtype: Dtype = "bf16"
    table_format: TableFormat = "dense"
    layout: Layout = "HND"
    kv_dtype: EightBit | None = None
    kv_scale: Scale | None = None
    operation: Operation = "decode"
    q_len: int | None = None
    query: Literal["ragged"] | None = None
    window_left: int | None = None
    softcap: float | None = None
    alibi: bool | None = None
    sinks: bool | None = None
    tree_mask: bool | None = None

    @property
    def floor(self) -> str:
        """The provider that does only the work that limits the case: it moves as many bytes, or multiplies as much."""
        if self.operation == "append":
            return COPY
        return WGMMA if self.long else READ

    @property
    def source(self) -> str:
        return "paged" if self.page_size else "contiguous"

    @property
    def name(self) -> str:
        page = f"_ps{self.page_size}" if self.page_size else ""
        shape = f"kv{self.num_kv_heads}_d{self.head_dim}{page}"
        kind = f"gqa_{self.source}_{self.operation}_h{self.num_heads}"
        shape = f"kv_append_{shape}" if self.operation == "append" else f"{kind}_{shape}"
        storage = f"_kv{self.kv_dtype}" if self.kv_dtype else ""
        scale = f"_{self.kv_scale}" if self.kv_scale else ""
        options = "".join(f"_{o}" for o in (self.layout.lower(), self.table_format) if o in ("nhd", "csr"))
        scores = "".join(f"_{label}" for label in self.score_labels)
        rows = f"t{short(self.batch_size)}" if self.operation == "append" else self.lengths.label
        return f"{shape}_{self.dtype}{storage}{scale}{options}{scores}_{rows}"

    @property
    def score_labels(self) -> tuple[str, ...]:
        """The query rows and score modifiers of an attention case, as its name has them."""
        found = {
            f"q{self.q_len}": self.q_len,
            str(self.query): self.query,
            f"window{self.window_left}": self.window_left is not None,
            f"softcap{self.softcap or 0:g}": self.softcap,
            "alibi": self.alibi,
            "sinks": self.sinks,
            "tree": self.tree_mask,
        }
        return tuple(label for label, there in found.items() if there)

    def tokens(self) -> tuple[int, ...]:
        """KV tokens of each row."""
        return self.lengths.tokens()

    @property
    def batch_size(self) -> int:
        return len(self.tokens())

    @property
    def mixed(self) -> bool:
        """Whether the case's requests may differ in their query rows."""
        return isinstance(self.lengths, Mixed)

    def query_rows(self) -> tuple[int, ...]:
        """Query rows of each request."""
        return self.lengths.query_rows() if isinstance(self.lengths, Mixed) else (self.q_len or 1,) * self.batch_size

    @property
    def q_rows(self) -> int:
        """Query rows of a request; in a mixed batch, the most that a request has."""
        return max(self.lengths.query_rows()) if isinstance(self.lengths, Mixed) else self.q_len or 1

    def requests(self) -> tuple[tuple[int, int], ...]:
        """KV tokens and query rows of each request."""
        return tuple(zip(self.tokens(), self.query_rows(), strict=True))

    @property
    def packed_rows(self) -> int:
        """Query rows of a request that read the same KV head."""
        return self.q_rows * (self.num_heads // self.num_kv_heads)

    @property
    def tflop(self) -> float:
        """TFLOP of both products, over all pairs of a query row and a key that it sees: its request's keys up to its own.

        For the backward BACKWARD_FLOP times as many, however many products it makes.
        """
        pairs = sum(n * (length - n) + n * (n + 1) // 2 for length, n in self.requests())
        return 4e-12 * self.num_heads * self.head_dim * pairs * (BACKWARD_FLOP if self.operation == "backward" else 1)

    def tflops(self, us: float) -> float:
        """The rate, in TFLOP/s, of a call that takes `us` microseconds."""
        return 1e6 * self.tflop / us

    @property
    def long(self) -> bool:
        """Whether the tensor core limits the case, not the memory; for a mixed batch, whether FLOP take longer than bytes."""
        if self.mixed:
            return 1e12 * self.tflop >= BALANCE * self.kv_bytes
        return self.q_rows >= LONG_QUERY

    @property
    def query_shape(self) -> tuple[int, ...]:
        """The shape of q, and of the result."""
        heads = (self.num_heads, self.head_dim)
        if self.mixed:
            return (sum(self.query_rows()), *heads)
        return (self.batch_size, *heads) if self.q_len is None else (self.batch_size, self.q_len, *heads)

    @property
    def plain(self) -> Case:
        """Decode of one query row per request, without modifiers, over the caches of an attention case.

        With a window, a row has at most as many tokens as the window holds. Raises ValueError for a window over a Spread.
        """
        lengths = self.lengths
        if isinstance(lengths, Mixed):
            lengths = Rows(tuple(group[:2] for group in lengths.groups), seed=None)
        if self.window_left is not None:
            if not isinstance(lengths, Rows):
                raise ValueError(f"lengths: {lengths.label} has no window in every row")
            held = self.window_left + 1
            lengths = replace(lengths, groups=tuple((rows, min(tokens, held)) for rows, tokens in lengths.groups))
        own = {name: getattr(self, name) for name in ("dtype", "table_format", "layout", "kv_dtype", "kv_scale")}
        return Case(self.num_heads, self.num_kv_heads, self.head_dim, self.page_size, lengths, **own)

    @property
    def wide(self) -> Case:
        """The same case over caches of q's dtype."""
        return replace(self, kv_dtype=None, kv_scale=None)

    def parts(self) -> tuple[Case, ...]:
        """For a mixed batch, a case of uniform query rows for each number of query rows, in order; else the case itself alone.

        The part of one query row is decode, with the batch's modifiers.
        """
        if not isinstance(self.lengths, Mixed):
            return (self,)
        own = ((n if n > 1 else None, rows) for n, rows in self.lengths.parts().items())
        return tuple(replace(self, lengths=rows, q_len=q_len, query=None) for q_len, rows in own)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K, V and their scales that a step has to read, for live tokens only.

        Attention: tokens that some query row sees, and q and the result. An append: all that it reads and writes. Weights: K and
        its scales, and the result. The backward: K, V, dK and dV, and q, out and the gradients of both.
        """
        tokens = self.tokens()
        if self.window_left is not None:
            tokens = tuple(min(length, self.window_left + n) for length, n in self.requests())
        stored = self._stored_bytes(sum(tokens))
        if self.operation == "decode":
            return stored
        if self.operation == "attention":
            return stored + 2 * self.query_bytes
        if self.operation == "backward":
            return 2 * stored + 4 * self.query_bytes
        if self.operation == "weights":
            return stored // 2 + self.weight_bytes
        moved = 2 * sum(tokens) * self.num_kv_heads * self.head_dim * ELEMENT_BYTES[self.dtype]
        return stored + moved + SLOT_BYTES * self.batch_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the f32 weights, their mean and the pages' masses, for as many keys per row as the longest row has."""
        keys = max(self.tokens())
        pages = -(-keys // self.page_size) if self.page_size else 0
        return WEIGHT_BYTES * self.batch_size * (keys * (self.num_heads + 1) + pages)

    @property
    def query_bytes(self) -> int:
        """Bytes of q; the result has as many."""
        return math.prod(self.query_shape) * ELEMENT_BYTES[self.dtype]

    @property
    def cache_bytes(self) -> int:
        """Bytes of K, V and their scales for all tokens, including those outside a window."""
        return self._stored_bytes(sum(self.tokens()))

    def _stored_bytes(self, tokens: int) -> int:
        vectors = tokens * self.num_kv_heads
        scales = {None: 0, "tensor": 1, "head": self.num_kv_heads}.get(self.kv_scale, vectors)
        scale_bytes = scales * SCALE_BYTES[self.kv_scale] if self.kv_scale else 0
        return 2 * (vectors * self.head_dim * ELEMENT_BYTES[self.kv_dtype or self.dtype] + scale_bytes)


@dataclass(frozen=True)
class Bar:
    """The time that a case must reach: at most `limit` times its floor's time plus `plus` us ("ratio"), or `limit` us ("us").

    beside: the provider whose time in the same run replaces the floor's in a ratio. peer: a provider that the case must also not
    be slower than. read_share: the share of the floor's time that is added to `beside`'s, for bytes that `beside` does not move.
    """

    metric: Literal["ratio", "us"]
    limit: float
    plus: float = 0.0
    beside: str | None = None
    peer: str | None = None
    read_share: float | None = None

    def met(self, us: float, read_us: float | None, others: Mapping[str, float] | None = None) -> bool | None:
        """Whether `us` meets the bar; None if a time that this needs is missing. others: times by provider."""
        if self.metric == "us":
            return us <= self.limit
        others = others or {}
        base = others.get(self.beside) if self.beside else read_us
        if base is not None and self.read_share is not None:
            base = None if read_us is None else base + self.read_share * read_us
        parts = [None if base is None else us <= self.limit * base + self.plus]
        if self.peer:
            theirs = others.get(self.peer)
            parts.append(None if theirs is None else us <= theirs)
        return False if False in parts else None if None in parts else True

    def fields(self) -> dict[str, object]:
        """The fields that a record has of the bar: those that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        if self.metric == "us":
            return f"{self.limit:g} us"
        text = f"{self.limit:g} + {self.plus:g} us" if self.plus else f"{self.limit:g}"
        base = f"({self.beside} + {self.read_share:.1%} of {READ})" if self.read_share is not None else self.beside
        text += f" x {base}" if self.beside else ""
        return f"{text}, {self.peer}" if self.peer else text


def short(tokens: int) -> str:
    """A length as people write it: 8192 -> "8k", 100 -> "100"."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def fixed(batch: int, tokens: int) -> Rows:
    """`batch` rows of one length."""
    return Rows(((batch, tokens),))


def append_case(tokens: int, **changes: Any) -> Case:
    """An append of `tokens` tokens with 8 heads of 128, bf16, to pages of 16."""
    shape: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "table_format": "none"}
    return Case(**shape | changes, lengths=fixed(tokens, 1), operation="append")


def weights_case(rows: Rows | Spread, **changes: Any) -> Case:
    """The weights of decode with 32/8 heads of 128, bf16, over pages of 16."""
    shape: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}
    return Case(**shape | changes, lengths=rows, operation="weights")


def backward_case(rows: Rows, **changes: Any) -> Case:
    """The backward of prompts with as many query rows as keys, 32/8 heads of 128, bf16, contiguous; rows have one length."""
    shape: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 0, "q_len": rows.groups[0][1]}
    table = {} if changes.get("page_size") else {"table_format": "none"}
    return Case(**shape | table | changes, lengths=rows, operation="backward")


def attention_case(rows: Rows | Mixed, **changes: Any) -> Case:
    """Attention with 32/8 heads of 128, bf16, over pages of 16."""
    shape: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}
    return Case(**shape | changes, lengths=rows, operation="attention")


def mixed_case(*groups: tuple[int, int, int], max_q_len: int | None = None, **changes: Any) -> Case:
    """Attention of a mixed batch of (requests, tokens, query rows). max_q_len: the plan's; by default the most in the batch."""
    batch = Mixed(groups)
    return attention_case(batch, q_len=max_q_len or max(batch.query_rows()), query="ragged", **changes)
