"""Runs every variant of 16 and 8 bits, several query rows, weights, merges and appends once on small shapes: `make sanitize`.

Inputs are made and results checked on the CPU, so that the sanitizer sees little but the kernels of the package. A result
that the tests would not accept fails the run: a kernel that does nothing is not clean.

    python -m tests.sanitize [--list] [NAME ...]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

import cute_kernels as ck
from cute_kernels.attention.choice import tuned
from cute_kernels.config.decode import DecodeConfig
from tests.attention.test_gathered import CASES as GATHERED
from tests.attention.test_long_queries import CUT, CUT_RAGGED, LONG
from tests.support.attention_cases import CASES as ATTENTION_CASES
from tests.support.attention_cases import F32_CASES, make_attention
from tests.support.attention_harness import assert_close as assert_attention_close
from tests.support.attention_harness import run as run_attention
from tests.support.attention_harness import select as select_attention
from tests.support.backward_cases import CASES as BACKWARD_CASES
from tests.support.backward_cases import in_f32, make_backward
from tests.support.backward_harness import assert_close as assert_gradients_close
from tests.support.backward_harness import run as run_backward
from tests.support.backward_harness import select as select_backward
from tests.support.harness import assert_close, run, select
from tests.support.inputs import Inputs, Shape, make_inputs
from tests.support.merge_cases import assert_close as assert_merge_close
from tests.support.metadata import equivalent
from tests.support.weights_cases import CASES as WEIGHTS_CASES
from tests.support.weights_cases import assert_close as assert_weights_close
from tests.support.weights_cases import make_weights
from tests.support.weights_cases import run as run_weights
from tests.support.weights_cases import select as select_weights

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAMES = {F16: "f16", BF16: "bf16", F32: "f32"}
LENGTHS = (0, 1, 700, 17, 129, 300)  # the long rows are cut where a plan cuts rows
BAD_ROW, BAD_PAGE = 4, 2**31 - 1  # its first page is none of the pool: memcheck sees whether it is read
PREFERENCES: dict[str, dict[str, object]] = {
    "whole": {"max_workspace_bytes": 0},
    "balanced": {},
    "invariant": {"batch_invariant": True},
    "f32": {},
    "beside": {"sm_count": 12},  # enough that decode rows leave SMs to prompts
    "few": {"sm_count": 16},  # so few that a CTA works on several rows
    "dealt": {"sm_count": 1},  # the fewest SMs that items of a few rows are dealt to
}


E4M3, E5M2, INT8 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8
NONE, HEAD, TOKEN, TOKEN_F16 = ck.KVScale.NONE, ck.KVScale.HEAD, ck.KVScale.TOKEN, ck.KVScale.TOKEN_F16


@dataclass(frozen=True)
class Case:
    """page_size 0: a contiguous cache, whose rows all have 700 tokens. group: query heads a KV head; there are two.

    alone: one row. k_dtype, v_dtype: what the caches store; None is q's. config: instead of the one that the heuristics choose.
    """

    arch: str
    table_format: str
    partition: str
    head_dim: int
    group: int
    page_size: int
    dtype: torch.dtype
    k_dtype: ck.KVDtype | None = None
    v_dtype: ck.KVDtype | None = None
    k_scale: ck.KVScale = NONE
    v_scale: ck.KVScale = NONE
    config: DecodeConfig | None = None
    alone: bool = False

    def __str__(self) -> str:
        cache = f"{self.table_format}-page{self.page_size}" if self.page_size else "contiguous"
        element = NAMES[self.dtype]
        own = f"{self.arch}-{cache}-{self.partition}-d{self.head_dim}-group{self.group}-{element}"
        own += f"-{self.config.unit_heads}heads" if self.config else ""
        own += "-alone" if self.alone else ""
        stored = ((self.k_dtype, self.k_scale), (self.v_dtype, self.v_scale))
        if stored == ((None, NONE), (None, NONE)):
            return own
        names = ((element if dtype is None else dtype.value, str(scale).replace(" ", "_")) for dtype, scale in stored)
        return "-".join([own, *(f"{cache}_{name}_{scale}" for cache, (name, scale) in zip("kv", names, strict=True))])

    @property
    def shape(self) -> Shape:
        lengths = (3000,) if self.alone else LENGTHS if self.page_size else (700, 700)
        heads = {"num_heads": 2 * self.group, "num_kv_heads": 2, "head_dim": self.head_dim}
        own = ck.KVDtype(NAMES[self.dtype])
        storage = {"kv_dtype": self.k_dtype or own, "v_dtype": self.v_dtype or own}
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        table = {"page_size": self.page_size, "lengths": lengths, "table_format": self.table_format}
        return Shape(**heads, **table, dtype=self.dtype, **storage, **scales)


PAIRED = DecodeConfig(16, 16, 8, 1, unit_heads=2)
CASES = (
    Case("sm90", "dense", "whole", 64, 1, 8, BF16),
    Case("sm90", "dense", "balanced", 128, 4, 16, BF16),
    Case("sm90", "dense", "invariant", 128, 4, 16, BF16),
    Case("sm90", "dense", "balanced", 128, 16, 64, BF16),
    Case("sm90", "dense", "invariant", 64, 32, 64, F16),
    Case("sm90", "dense", "balanced", 256, 8, 16, BF16),
    Case("sm90", "csr", "balanced", 128, 8, 64, F16),
    Case("sm90", "csr", "invariant", 64, 4, 16, F16),
    Case("sm90", "csr", "whole", 256, 4, 8, BF16),
    Case("sm90", "dense", "balanced", 128, 4, 0, BF16),
    Case("sm90", "dense", "invariant", 64, 8, 0, F16),
    Case("sm90", "dense", "whole", 256, 1, 0, BF16),
    Case("sm80", "dense", "balanced", 128, 4, 1, BF16),
    Case("sm80", "dense", "whole", 64, 1, 16, F16),
    Case("sm80", "dense", "balanced", 64, 32, 64, BF16),
    Case("sm80", "csr", "invariant", 128, 8, 8, BF16),
    Case("sm80", "csr", "balanced", 256, 4, 1, F16),
    Case("sm80", "dense", "invariant", 128, 4, 0, BF16),
    Case("sm90", "dense", "balanced", 128, 4, 16, BF16, E4M3, E4M3),
    Case("sm90", "csr", "whole", 64, 1, 64, F16, E5M2, E5M2, HEAD, HEAD),
    Case("sm90", "dense", "balanced", 128, 8, 16, BF16, INT8, INT8, TOKEN_F16, TOKEN_F16),
    Case("sm90", "csr", "invariant", 64, 16, 8, F16, INT8, INT8, TOKEN, TOKEN),
    Case("sm90", "dense", "balanced", 128, 4, 16, F16, None, E4M3, NONE, HEAD),
    Case("sm90", "dense", "balanced", 256, 16, 64, BF16, E4M3, E4M3, TOKEN_F16, TOKEN),
    Case("sm90", "dense", "invariant", 128, 4, 0, BF16, INT8, INT8, TOKEN_F16, TOKEN_F16),
    Case("sm90", "dense", "balanced", 64, 4, 16, BF16, None, None, TOKEN, HEAD),
    Case("sm90", "dense", "balanced", 128, 4, 16, BF16, INT8, INT8, TOKEN_F16, TOKEN_F16, PAIRED),
    Case("sm90", "csr", "whole", 64, 2, 64, F16, E4M3, E4M3, TOKEN, TOKEN, PAIRED),
    Case("sm90", "dense", "balanced", 128, 1, 0, BF16, None, INT8, NONE, TOKEN_F16, PAIRED),
    Case("sm90", "dense", "balanced", 128, 71, 64, BF16),  # warpgroups, here and below
    Case("sm90", "dense", "balanced", 128, 71, 16, BF16, E4M3, E4M3),
    Case("sm90", "csr", "invariant", 64, 40, 8, F16, INT8, INT8, TOKEN, TOKEN),
    Case("sm90", "dense", "whole", 256, 20, 16, BF16, None, E4M3, NONE, HEAD),
    Case("sm80", "dense", "balanced", 128, 4, 1, BF16, E4M3, E4M3),
    Case("sm80", "csr", "invariant", 64, 1, 16, F16, E5M2, E5M2, HEAD, TOKEN),
    Case("sm80", "dense", "whole", 128, 16, 5, BF16, INT8, INT8, TOKEN_F16, TOKEN_F16),
    Case("sm80", "dense", "balanced", 256, 4, 16, BF16, INT8, INT8, TOKEN, TOKEN),
    Case("sm80", "csr", "balanced", 128, 8, 64, F16, None, E4M3, NONE, TOKEN_F16),
    Case("sm90", "dense", "balanced", 128, 4, 16, BF16, alone=True),
    Case("sm90", "csr", "balanced", 128, 8, 16, BF16, INT8, INT8, TOKEN_F16, TOKEN_F16, alone=True),
    Case("sm90", "dense", "invariant", 128, 4, 16, BF16, E4M3, E4M3, alone=True),
    Case("sm80", "dense", "balanced", 128, 4, 1, BF16, alone=True),
    Case("sm80", "dense", "balanced", 33, 4, 1, BF16, E4M3, E4M3, HEAD, NONE),  # a byte a load
    Case("sm80", "dense", "balanced", 128, 4, 0, BF16, INT8, INT8, TOKEN_F16, TOKEN_F16),
    Case("sm90", "dense", "balanced", 128, 4, 16, F32),
    Case("sm90", "csr", "invariant", 64, 16, 8, F32),
    Case("sm90", "dense", "whole", 256, 1, 0, F32),
    Case("sm80", "dense", "balanced", 33, 4, 1, F32),
)


# several query rows, masks and functions of a score: names of attention_cases, by backend and preference
ATTENTION = {
    ("sm90", "balanced"): (
        "causal",
        "window_both",
        "everything",
        "one_row_everything",
        "tree_2_words",
        "prefill",
        "e4m3_head_scales",
        "int8_token_scales_everything",
        "lengths",
        "packed_everything",
        "verify_32_e4m3_ragged",
        "verify_32_int8_everything",
        "verify_64_e4m3_everything",
        "verify_64_int8",
        "verify_64_int8_f16",
        "verify_128_int8",
        "verify_128_k_bf16_v_e4m3",
        "verify_128_token_scales",
        "alone_everything",
        "alone_32_e4m3",
        "alone_32_int8",
        "alone_64",
        "alone_64_int8",
    ),
    ("sm90", "few"): (
        "cut",
        "cut_f16_page_64",
        "cut_d256",
        "cut_int8_token",
        "verify_32_e4m3_ragged",
        "verify_32_e4m3",
        "verify_32_int8_everything",
        "two_kv_heads",
        "two_kv_heads_everything",
    ),
    ("sm90", "invariant"): ("everything", "int8_token_scales_packed"),
    ("sm90", "f32"): ("f32_everything", "f32_prefill_d128", "f32_rows_64"),
    ("sm90", "whole"): ("uniform_tree",),
    ("sm90", "dealt"): (
        "causal",
        "everything",
        "tree_2_words",
        "prefill",
        "prefill_e4m3",
        "prefill_int8",
        "long_uniform",
        "long_uniform_everything",
        "long_int8_token_d128_uniform",
        "lengths",
        "packed_everything",
        "page_1_uniform",
        "page_5_d96",
        "page_7_d80_everything",
    ),
    ("sm90", "beside"): ("long_beside_decode", "cut_beside_decode_16_bits"),
    ("sm80", "balanced"): ("everything", "tree_2_words", "int8_token_scales_packed"),
    ("sm80", "dealt"): ("page_5_d96", "page_1_everything", "long_d256"),
}
MERGES = (
    ("sm90", ck.MergeStatesDescriptor(3, 4, 5, 64, BF16)),
    ("sm90", ck.MergeStatesDescriptor(11, 2, 8, 128, F16)),  # more states than a thread has in flight
    ("sm80", ck.MergeStatesDescriptor(2, 3, 4, 7, torch.float32)),  # no pairs of columns
)

APPEND = ck.KVAppendDescriptor(9, 3, 128, 8, BF16, INT8, ck.KVLayout.NHD, k_scale=TOKEN_F16, v_scale=TOKEN_F16)
ROTARY = ck.Rotary(num_heads=6, rotary_dim=64)
APPENDS = (
    ("sm90", APPEND),
    ("sm80", replace(APPEND, head_dim=5, kv_dtype=E4M3, layout=ck.KVLayout.HND)),  # an element a load, in integers
    ("sm90", replace(APPEND, head_dim=252, kv_dtype=E4M3, dtype=F16)),  # several loads a thread
    ("sm90", replace(APPEND, table_format="dense")),
    ("sm80", replace(APPEND, table_format="csr", kv_dtype=E4M3)),
    ("sm90", replace(APPEND, rotary=ROTARY)),
    ("sm80", replace(APPEND, rotary=replace(ROTARY, pairing="interleaved"), layout=ck.KVLayout.HND)),
    ("sm90", replace(APPEND, num_tokens=2**16, num_kv_heads=8)),  # several rows a thread
)

# names of backward_cases, and of weights_cases, by backend
BACKWARDS = {
    "sm90": (
        "everything",
        "everything_f16_base2",
        "csr",
        "d256",
        "prefill_d128",
        "uniform_strided_everything",
        "everything in f32",
    ),
    "sm80": ("everything", "page_5_d40", "group_5_d96", "lengths_nhd_everything", "d192 in f32"),
}
WEIGHTS = {
    "sm90": ("usual", "csr_p128_bf16", "odd_keys", "int8_token_f16", "everything_e4m3_lengths", "group_71", "d256", "page_256"),
    "sm80": ("usual_bf16", "int8_token_csr", "everything_int8", "page_5", "page_17_d40_e4m3", "d33", "whole"),
}


def to_gpu(inputs: Inputs) -> tuple[Inputs, ck.PageTable | None]:
    """The inputs and their page table on the GPU, by copies alone."""
    table = inputs.table() if inputs.shape.page_size else None
    if table is not None:
        table = table._replace(operands=tuple(t if t is None else t.cuda() for t in table.operands))
    scales = {name: None if scale is None else scale.cuda() for name, scale in inputs.scales.items()}
    return replace(inputs, q=inputs.q.cuda(), k=inputs.k.cuda(), v=inputs.v.cuda(), **scales), table


def decode(case: Case) -> None:
    """A decode case, compared with f64."""
    inputs = make_inputs(case.shape, "cpu")
    if case.page_size:
        inputs.rows[0 if case.alone else BAD_ROW][0] = BAD_PAGE
    with tuned.forced(case.config):
        plan = select(case.shape, case.arch, **PREFERENCES[case.partition])
    assert case.config in (None, plan.explain().chosen.config), plan.explain()
    assert (plan.workspace_size() > 0) == (case.partition != "whole"), plan.explain()
    on_gpu, table = to_gpu(inputs)
    out, lse = (t.cpu() for t in run(plan, on_gpu, table=table))
    meant = inputs if table is None else equivalent(inputs, inputs.table())[0]
    assert_close(meant, out, lse)


def attention(name: str, arch: str, partition: str) -> None:
    """A case of several query rows, masks or functions of a score, compared with f64."""
    inputs = make_attention(
        next(case for case in (*ATTENTION_CASES, *F32_CASES, *GATHERED, *LONG, *CUT, *CUT_RAGGED) if case.name == name)
    )
    plan = select_attention(inputs.case, arch, **PREFERENCES[partition])
    spec = plan.explain().chosen.spec
    assert partition != "dealt" or spec.dealt or spec.shares_ring, plan.explain()
    table = inputs.table._replace(operands=tuple(t if t is None else t.cuda() for t in inputs.table.operands))
    scales, extras = ({k: t if t is None else t.cuda() for k, t in given.items()} for given in (inputs.scales, inputs.extras))
    on_gpu = replace(inputs, q=inputs.q.cuda(), k=inputs.k.cuda(), v=inputs.v.cuda(), table=table, scales=scales, extras=extras)
    out, lse = (t.cpu() for t in run_attention(plan, on_gpu))
    assert_attention_close(inputs, (out, lse))


def merge(arch: str, descriptor: ck.MergeStatesDescriptor) -> None:
    """The same of a merge whose first state is empty and holds NaN in half of the batch, as all states do in its first row."""
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(descriptor.num_states, *descriptor.shape, generator=generator).to(descriptor.dtype)
    lses = torch.randn(outs.shape[:-1], generator=generator)
    for empty in ((0, slice(0, None, 2)), (slice(None), 0)):
        outs[empty], lses[empty] = math.nan, -math.inf
    plan = ck.MergeStatesPlan.select(descriptor, "cuda", ck.PlanPreference(arch=arch))
    out = torch.full(descriptor.shape, math.nan, dtype=descriptor.dtype, device="cuda")
    lse = torch.full(descriptor.shape[:2], math.nan, device="cuda")
    plan.run(outs.cuda(), lses.cuda(), out=out, lse=lse)
    assert_merge_close(descriptor, (out.cpu(), lse.cpu()), outs, lses)


def weights(name: str, arch: str) -> None:
    """A case of attention weights, compared with f64."""
    inputs = make_weights(next(case for case in WEIGHTS_CASES if case.name == name))
    table = inputs.given["page_table"]
    table = table._replace(operands=tuple(t if t is None else t.cuda() for t in table.operands))
    given = {key: t.cuda() for key, t in inputs.given.items() if isinstance(t, torch.Tensor)}
    result = run_weights(select_weights(inputs.case, arch), inputs, **given, page_table=table, device="cuda")
    assert_weights_close(inputs, ck.AttentionWeights(*(t if t is None else t.cpu() for t in result)))


def backward(name: str, arch: str) -> None:
    """A case of attention's backward, or the same in f32, compared with f64."""
    one = next(case for case in BACKWARD_CASES if case.name == name.removesuffix(" in f32"))
    inputs = make_backward(in_f32(one) if name.endswith("in f32") else one)
    own = inputs.attention
    table = own.table._replace(operands=tuple(t if t is None else t.cuda() for t in own.table.operands))
    attention = replace(own, q=own.q.cuda(), k=own.k.cuda(), v=own.v.cuda(), table=table)
    tensors = {key: getattr(inputs, key).cuda() for key in ("out", "lse", "dout")}
    extras = {key: t.cuda() for key, t in inputs.extras.items()}
    on_gpu = replace(inputs, attention=attention, extras=extras, **tensors)
    result = run_backward(select_backward(inputs.case, arch), on_gpu)
    assert_gradients_close(inputs, ck.AttentionGradients(*(t if t is None else t.cpu() for t in result)))


def append(arch: str, descriptor: ck.KVAppendDescriptor) -> None:
    """An append of nine tokens to the last slots of a cache, of which two are skipped.

    One has no slot, or no length; one has a slot past the cache, or a page that is none of its. What the others read as is within
    a step of the storage of what was appended, and the scales are those of every token and KV head.
    """
    d, generator, pages, tokens = descriptor, torch.Generator().manual_seed(0), 4, 9
    x = (torch.randn(2, tokens, d.num_kv_heads, d.head_dim, generator=generator) * 0.1).to(d.dtype)
    last = torch.arange(pages * d.page_size - tokens, pages * d.page_size)
    kept = slice(2, None)
    inner = (d.page_size, d.num_kv_heads) if d.layout.order == "NHD" else (d.num_kv_heads, d.page_size)
    caches = [torch.zeros(pages, *inner, d.head_dim, dtype=torch.uint8).view(d.stored[0].torch_dtype).cuda() for _ in range(2)]
    scales = [torch.zeros(pages * d.page_size * d.num_kv_heads, dtype=d.k_scale.dtype).cuda() for _ in range(2)]
    plan = ck.KVAppendPlan.select(d, "cuda", ck.PlanPreference(arch=arch))
    rotary, k = rotary_operands(d, x[0])
    on_device = {name: tensor.cuda() for name, tensor in rotary.items()}
    plan.run(x[0].cuda(), x[1].cuda(), *caches, append_slots(d, last), k_scale=scales[0], v_scale=scales[1], **on_device)
    scale = torch.stack([t.cpu().double().view(-1, d.num_kv_heads)[last[kept]] for t in scales])
    by_slot = [(t if d.layout.order == "NHD" else t.transpose(1, 2)).flatten(0, 1) for t in (c.cpu().double() for c in caches)]
    stored = torch.stack([t[last[kept]] for t in by_slot])
    largest, step = {INT8: (127, 1 / 254), E4M3: (448, 1 / 28)}[d.stored[0]]  # half the widest step, over the largest
    x = torch.stack([k, x[1]])[:, kept].double()
    peak = x.abs().amax(-1)
    assert ((scale - peak / largest).abs() <= 2**-10 * peak / largest).all(), "scales"
    assert ((stored * scale[..., None] - x).abs() <= (step + 2**-10) * peak[..., None]).all(), "what was stored"


def append_slots(d: ck.KVAppendDescriptor, last: torch.Tensor) -> torch.Tensor | ck.PageTable:
    """What sends tokens to the slots `last`, but the first and the second nowhere."""
    if d.table_format == "none":
        slots = last.clone()
        slots[0], slots[1] = -1, BAD_PAGE
        return slots.cuda()
    pages, lengths = (last // d.page_size).int(), (last % d.page_size + 1).int()
    pages[1] = BAD_PAGE
    lengths[0] = 0
    if d.table_format == "dense":
        return ck.PageTable.dense(pages[:, None].cuda(), lengths.cuda())
    return ck.PageTable.csr(torch.arange(len(last) + 1).int().cuda(), pages.cuda(), lengths.cuda())


def rotary_operands(d: ck.KVAppendDescriptor, k: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(what a rotary embedding is given, k rotated); a token that is skipped has a position past the table."""
    if d.rotary is None or d.rotary.rotary_dim is None:
        return {}, k
    angles = torch.linspace(0, 3, 11)[:, None] * torch.linspace(1, 0, d.rotary.rotary_dim // 2)
    given = {"cos_sin_cache": torch.cat([angles.cos(), angles.sin()], 1), "positions": torch.arange(len(k))}
    given["positions"][0] = 2**40
    rotated = ck.apply_rotary(k, **given, rotary=d.rotary)
    return given | {"q": k.repeat_interleave(d.rotary.num_heads // d.num_kv_heads, 1)}, rotated


def all_runs() -> dict[str, Callable[[], None]]:
    """What each name runs; a wrong result raises AssertionError."""
    runs: dict[str, Callable[[], None]] = {str(case): partial(decode, case) for case in CASES}
    for (arch, partition), names in ATTENTION.items():
        for name in names:
            runs[f"{arch}-attention-{partition}-{name}"] = partial(attention, name, arch, partition)
    for arch, d in MERGES:
        runs[f"{arch}-merge{d.num_states}-d{d.head_dim}-{d.element_type}"] = partial(merge, arch, d)
    for arch, a in APPENDS:
        how = "" if a.table_format == "none" else f"-{a.table_format}"
        how += "" if a.rotary is None else f"-{a.rotary.pairing}"
        how += "-wide" if a.num_tokens > APPEND.num_tokens else ""
        runs[f"{arch}-append-d{a.head_dim}-{a.cache_type}{how}"] = partial(append, arch, a)
    for arch, names in WEIGHTS.items():
        runs |= {f"{arch}-weights-{name}": partial(weights, name, arch) for name in names}
    for arch, names in BACKWARDS.items():
        runs |= {f"{arch}-backward-{name.replace(' ', '-')}": partial(backward, name, arch) for name in names}
    return runs


def verdict(check: Callable[[], None]) -> str:
    """What is wrong with a result; empty where nothing is."""
    try:
        check()
    except AssertionError as error:
        return str(error) or "an assertion without a message"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="every variant once, checked; for compute-sanitizer")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only these cases")
    arguments = parser.parse_args()
    runs = all_runs()
    if unknown := set(arguments.names) - set(runs):
        parser.error(f"no case is called {', '.join(sorted(unknown))}")
    if arguments.list:
        print("\n".join(runs))
        return 0
    if not torch.cuda.is_available():
        print("tests.sanitize runs kernels on a CUDA device; none is here. --list names the cases", file=sys.stderr)
        return 2
    wrong = 0
    for name in arguments.names or runs:
        found = verdict(runs[name])
        wrong += found != ""
        print(f"WRONG {name}: {found}" if found else f"ok    {name}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
