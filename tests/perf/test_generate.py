"""perf.generate on a CPU: what it times, whom it compares, and what it calls a disagreement."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[transformers]'")

import transformers
import tvm_ffi

import cute_kernels as ck
from cute_kernels.append import plan as append_plan
from cute_kernels.attention import plan as attention_plan
from cute_kernels.attention.reference import cpu_variant
from cute_kernels.integrations.transformers import register
from cute_kernels.planning.variants import PRETEND
from perf.generate import __main__ as program
from perf.generate import models
from perf.generate.agree import Agreement, agreements
from perf.generate.kernels import specs_for
from perf.generate.measure import Timed, batched, generated
from perf.generate.models import Work, model_of, prompts_of, use
from tests.support.transformers import block_tables

__all__ = ["block_tables"]

WORK = Work(2, 20, 6)
CPU = torch.device("cpu")


def test_providers_give_sdpas_tokens() -> None:
    model = model_of(2, True, CPU)
    prompts = prompts_of(WORK, model.config.vocab_size)
    use("sdpa", model)
    sdpa = generated(model, "sdpa", prompts, WORK)
    for provider in ("ours", "fa3"):
        use(provider, model)
        found = batched(model, provider, prompts, WORK)
        assert [len(tokens) for tokens in found.tokens] == [6, 6] and found.seconds > 0 and found.device_ms is None
        for row in agreements(model, prompts, sdpa.tokens, found.tokens):
            assert row.holds and row.ours[0] < 0.01 and row.below < 0.01
    wrong = [[(token + 1) % 211 for token in tokens] for tokens in sdpa.tokens]
    assert all(row.below > 0.05 for row in agreements(model, prompts, sdpa.tokens, wrong))


@pytest.mark.parametrize("kv_dtype", [None, ck.KVDtype.E4M3])
def test_what_is_compiled_beforehand_is_what_runs(kv_dtype, no_plans, block_tables, monkeypatch) -> None:
    """With the heads of Llama-3-8B, whose launches the CPU computes: chunks, mixed steps, decode, and generate."""
    monkeypatch.setattr(models, "TINY", {**models.TINY, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128})
    used, explain, append_of = set(), attention_plan.explain, append_plan.explain

    def launch_of(spec, descriptor):
        used.add(spec)
        compute, words = cpu_variant(descriptor.problem), torch.zeros(4, dtype=torch.int32)

        def launch(*operands):
            *tensors, scale, num_ctas, _ = (torch.from_dlpack(t) if isinstance(t, tvm_ffi.Tensor) else t for t in operands)
            compute(*tensors, scale, num_ctas, words)

        return launch

    monkeypatch.setattr(
        attention_plan, "explain", lambda problem, facts, preference: explain(problem, PRETEND["h200"], preference)
    )
    monkeypatch.setattr(attention_plan, "_launch_of", launch_of)

    def on_h200(descriptor, facts, preference):
        used.add(append_of(descriptor, PRETEND["h200"], preference).chosen.spec)
        return append_of(descriptor, facts, preference)

    monkeypatch.setattr(append_plan, "explain", on_h200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    work = Work(4, 40, 6)
    model = model_of(1, True, CPU)
    prompts = prompts_of(work, model.config.vocab_size)
    use("ours" if kv_dtype is None else "ours e4m3", model)
    small = transformers.generation.ContinuousBatchingConfig
    monkeypatch.setattr(
        transformers.generation, "ContinuousBatchingConfig", lambda **sizes: small(**{**sizes, "max_batch_tokens": 48})
    )
    batched(model, "ours", prompts, work, once=True)
    if kv_dtype is None:
        generated(model, "ours", prompts, work)
    register()
    known = set(specs_for(work, kv_dtype is not None, PRETEND["h200"]))
    assert len(used) >= 4 and used <= known, used - known


@pytest.mark.parametrize(
    ("tie", "difference", "error", "holds"),
    [
        (None, None, 1.0, True),
        (3, 3, 1.0, True),
        (3, 5, 1.0, True),
        (3, 2, 1.0, False),
        (None, 5, 1.0, False),
        (3, None, 1.2, False),
    ],
)
def test_what_is_a_disagreement(tie: int | None, difference: int | None, error: float, holds: bool) -> None:
    assert Agreement(8, tie, difference, (error, 1.0), (1.0, 1.0), 0.0, 0.0).holds is holds


def test_ratios_are_of_the_same_work() -> None:
    timed = [
        Timed("ours", "generate_batch", WORK, 1.0, 2.0, 0.5, []),
        Timed("fa3", "generate_batch", WORK, 2.0, None, None, []),
        Timed("sdpa", "generate_batch", Work(2, 20, 3), 3.0, None, None, []),
    ]
    rows = list(zip(*(list(column.cells) for column in program.table_of(timed).columns), strict=True))
    assert rows[0] == ("generate_batch", "2 x 20 + 6", "ours", "12", "2.00", "", "2.00", "0.50")
    assert rows[2][4:6] == ("", "1.00")


@pytest.mark.parametrize(("gpu", "name"), [(True, "fa3"), (False, "fa3 (ours stands in)")])
def test_a_stand_in_is_named_and_noise_is_no_time(gpu: bool, name: str, monkeypatch) -> None:
    """On a CPU our own kernel runs under fa3's name; the time of a step is a difference, which noise may turn around."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    table = program.table_of([Timed("fa3", "generate_batch", WORK, 1.0, -0.25, None, [])])
    assert [str(column.header) for column in table.columns][4] == f"of {name}"
    row = [next(iter(column.cells)) for column in table.columns]
    assert row[2] == name and row[6:] == ["-", ""]
