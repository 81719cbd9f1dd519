"""The backend CUTE_KERNELS over stand-ins of vLLM's interfaces, against dense attention in f64, a row at a time."""

from __future__ import annotations

import dataclasses
import pickle
import re
import runpy
import sys
from enum import Enum
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.api.plan_cache import alignment
from cute_kernels.integrations import vllm as integration
from cute_kernels.integrations.flash_attn import attend
from cute_kernels.integrations.vllm.cache import cache_of, stored_as
from tests.support import vllm
from tests.support.vllm import DIM, HEADS, STEPS, CommonAttentionMetadata, Engine, Layer, Requests, run, run_later

CACHES = ("auto", "fp8", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head")
MODIFIERS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 9},
    "softcap": {"logits_soft_cap": 2.5},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "scale": {"scale": 0.3},
    "window, softcap, sinks": {"sliding_window": 17, "logits_soft_cap": 4.0, "sinks": torch.ones(HEADS)},
}


@pytest.fixture
def registered() -> list[Any]:
    return []


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, registered: list[Any]) -> Any:
    """The backend module over stand-ins of vLLM 0.26, whose enumeration is this test's own."""
    backends = Enum("Backends", {"FLASH_ATTN": "vllm.FlashAttentionBackend", "CUSTOM": None})
    return vllm.put_in_place(monkeypatch, backends, lambda backend, class_path=None: registered.append((backend, class_path)))


@pytest.mark.parametrize("order", ["NHD", "HND", "strided"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_stores_and_attends(backend: Any, step: str, cache: str, order: str) -> None:
    run(Engine(backend, Layer(cache, order=order), STEPS[step]), CommonAttentionMetadata)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("step", ["decode", "padded decode"])
def test_an_h200_has_kernels_for_it(computing_h200: None, backend: Any, step: str, cache: str, monkeypatch) -> None:
    """Decode's plans are chosen as there, and the CPU computes what they launch."""
    monkeypatch.setattr(attend, "stream_workspace", lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8, device=device))
    attend.forget_plans()
    run(Engine(backend, Layer(cache, heads=(8, 2, 128)), STEPS[step]), CommonAttentionMetadata)
    attend.forget_plans()


@pytest.mark.parametrize("step", ["decode", "mixed", "drafts"])
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_masks_and_scores(backend: Any, modifier: str, step: str) -> None:
    run(Engine(backend, Layer(options=MODIFIERS[modifier]), STEPS[step]), CommonAttentionMetadata)


@pytest.mark.parametrize("window", [None, 9])
def test_rows_that_see_later_tokens(backend: Any, window: int | None) -> None:
    layer = Layer(causal=False, options={"sliding_window": window})
    run(Engine(backend, layer, STEPS["mixed"]), CommonAttentionMetadata)


def test_scales_a_head(backend: Any) -> None:
    run(Engine(backend, Layer("fp8", scales=([0.5, 0.25], [0.125, 0.75])), STEPS["mixed"]), CommonAttentionMetadata)


def test_f16_and_tensors_longer_than_the_step(backend: Any) -> None:
    run(Engine(backend, Layer(dtype=torch.float16), STEPS["mixed"]), CommonAttentionMetadata, extra=5)


@pytest.mark.parametrize("cache", ["auto", "int8_per_token_head"])
def test_one_kv_head(backend: Any, cache: str) -> None:
    """Whose two orders are one."""
    run(Engine(backend, Layer(cache, order="HND", heads=(HEADS, 1, DIM)), STEPS["mixed"]), CommonAttentionMetadata)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_rows_with_a_scale_each_stay_aligned_for_tma(backend: Any, order: str) -> None:
    engine = Engine(backend, Layer("int8_per_token_head", order=order, heads=(8, 2, 128)), STEPS["decode"])
    cache = cache_of(engine.kv_cache, stored_as("int8_per_token_head"), 128)
    assert alignment(cache.k, cache.v) == 16 and cache.k_scale.shape == cache.v_scale.shape == cache.k.shape[:3]


def test_sinks_are_taken_after_weights_are_loaded_and_again(backend: Any) -> None:
    """bf16, as a model keeps them; the tensor that a graph has captured stays the one that is read."""
    sinks = torch.nn.Parameter(torch.zeros(HEADS, dtype=torch.bfloat16), requires_grad=False)
    engine = Engine(backend, Layer(options={"sinks": sinks}), STEPS["drafts"])
    engine.impl.process_weights_after_loading(torch.bfloat16)
    read = engine.impl.attention._sinks
    sinks.copy_(torch.tensor([3.0, -1.0, 0.5, 1.0]))
    run(engine, CommonAttentionMetadata)
    assert engine.impl.attention._sinks is read and read.dtype == torch.float32


def test_rows_that_pad_a_step_are_not_stored(backend: Any) -> None:
    engine = Engine(backend, Layer(), STEPS["padded drafts"])
    before = engine.kv_cache.clone()
    _, k, v = engine.tokens()
    engine.impl.do_kv_cache_update(engine.module, k, v, engine.kv_cache, torch.full((len(k),), -1))
    assert torch.equal(before.view(torch.int16), engine.kv_cache.view(torch.int16))


def test_a_group_of_layers_with_other_blocks(backend: Any) -> None:
    """update_block_table: the metadata of another group, without a build."""
    engine, other = (Engine(backend, Layer(options={"scale": s}), STEPS["mixed"]) for s in (0.2, 0.3))
    other.table = other.table.flip(1).contiguous()
    builder = backend.CuteKernelsMetadataBuilder(None, [], None, torch.device("cpu"))
    first, wanted = engine.metadata(CommonAttentionMetadata, engine.requests), other.metadata(
        CommonAttentionMetadata, other.requests
    )  # fmt: skip
    updated = builder.update_block_table(first, other.table, wanted.slot_mapping)
    other.fill()
    q, k, v = other.tokens()
    other.impl.do_kv_cache_update(other.module, k, v, other.kv_cache, updated.slot_mapping)
    output = torch.empty_like(q)
    other.check(other.impl.forward(other.module, q, k, v, other.kv_cache, updated, output), q, other.requests)
    assert first.block_table is not updated.block_table and torch.equal(first.block_table, engine.table)


def test_without_metadata_output_is_zero(backend: Any) -> None:
    engine = Engine(backend, Layer(), STEPS["decode"])
    q, k, v = engine.tokens()
    output = torch.full_like(q, torch.nan)
    assert torch.equal(engine.impl.forward(engine.module, q, k, v, torch.tensor([]), None, output), torch.zeros_like(q))
    engine.impl.do_kv_cache_update(engine.module, k, v, torch.tensor([]), torch.zeros(len(k), dtype=torch.int64))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("step", ["decode", "padded decode", "drafts", "padded drafts", "mixed"])
def test_a_step_follows_its_tensors(backend: Any, step: str, cache: str) -> None:
    """Lengths, slots and starts that change in place, as under a captured graph."""
    spare = 3 * max(STEPS[step].rows)
    run_later(Engine(backend, Layer(cache), STEPS[step], spare=spare), CommonAttentionMetadata, lambda calls: calls)


def test_an_empty_step(backend: Any) -> None:
    engine = Engine(backend, Layer(), STEPS["decode"])
    step = engine.metadata(CommonAttentionMetadata, STEPS["decode"])
    step = dataclasses.replace(step, num_actual_tokens=0, one_each=False, query_start_loc=torch.zeros(5, dtype=torch.int32))
    q, k, v = engine.tokens()
    output = torch.full_like(q, 7.0)
    engine.impl.forward(engine.module, q, k, v, engine.kv_cache, step, output)
    assert torch.equal(output, torch.full_like(q, 7.0))


def test_a_graph_is_captured_with_the_plan_of_its_warm_up(backend: Any) -> None:
    """vLLM warms up with the batch's max_seq_len and captures with the model's: nothing may be selected anew."""
    engine, kept = Engine(backend, Layer(), STEPS["drafts"]), []
    q, k, v = engine.tokens()
    attend.forget_plans()
    for longest in (3, 131072):
        step = engine.metadata(lambda **given: CommonAttentionMetadata(**{**given, "max_seq_len": longest}), engine.requests)  # noqa: B023
        engine.impl.forward(engine.module, q, k, v, engine.kv_cache, step, torch.empty_like(q))
        kept.append(list(attend._plans.values()))
    assert len(kept[0]) == 1 and kept[0] == kept[1]


def test_plans_are_for_rounded_numbers(backend: Any) -> None:
    """Steps that differ in their longest chunk and row share a plan; drafts have one of their own."""
    step = vllm.Engine(backend, Layer(), STEPS["mixed"]).metadata
    found = [step(CommonAttentionMetadata, Requests((rows, 1), (rows, 40))).max_query_len for rows in (1, 3, 16, 17, 40)]
    assert found == [1, 3, 16, 4096, 4096]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"causal": torch.ones(3, dtype=torch.bool)}, "causal"),
        ({"mm_req_doc_ranges": {0: [(0, 3)]}}, "mm_req_doc_ranges"),
        ({"rswa_prefix_lens": torch.zeros(3)}, "rswa_prefix_lens"),
    ],
)
def test_a_step_that_is_not_served(backend: Any, change: dict[str, Any], named: str) -> None:
    engine = Engine(backend, Layer(), STEPS["decode"])
    with pytest.raises(ck.Unsupported, match=named):
        engine.metadata(lambda **given: CommonAttentionMetadata(**{**given, **change}), STEPS["decode"])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kv_cache_dtype": "int4_per_token_head"}, "kv_cache_dtype"),
        ({"attn_type": "encoder_only"}, "attn_type"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt"),
        ({"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_a_layer_that_is_not_served(backend: Any, given: dict[str, Any], named: str) -> None:
    with pytest.raises((ck.Unsupported, ck.InvalidProblem), match=named):
        backend.CuteKernelsImpl(HEADS, DIM, 0.2, **given)


def test_an_output_of_8_bits_is_not_served(backend: Any) -> None:
    engine = Engine(backend, Layer(), STEPS["decode"])
    q, k, v = engine.tokens()
    step = engine.metadata(CommonAttentionMetadata, STEPS["decode"])
    with pytest.raises(ck.Unsupported, match="output_scale"):
        engine.impl.forward(engine.module, q, k, v, engine.kv_cache, step, q, output_scale=torch.ones(1))


def test_a_cache_of_other_axes_is_named(backend: Any) -> None:
    engine = Engine(backend, Layer(), STEPS["decode"])
    _, k, v = engine.tokens()
    for cache in (torch.zeros(2, 3, 16, 2, DIM), torch.zeros(3, 2, 16, DIM)):
        with pytest.raises(ck.InvalidProblem, match=r"kv_cache\.shape"):
            engine.impl.do_kv_cache_update(engine.module, k, v, cache, torch.zeros(len(k), dtype=torch.int64))


EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "vllm_generate.py"
H200 = SimpleNamespace(major=9, minor=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"kv_cache_dtype": "int8_per_token_head", "head_size": 256}, None),
        ({"device_capability": SimpleNamespace(major=8, minor=9)}, None),
        ({"kv_cache_dtype": "bfloat16"}, None),
        ({"head_size": 320}, "head_size"),
        ({"head_size": 100}, "head_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype = float16: must be the model's"),
        ({"device_capability": SimpleNamespace(major=10, minor=0)}, "compute capability"),
    ],
)
def test_what_vllm_hears(backend: Any, change: dict[str, Any], reason: str | None) -> None:
    given: dict[str, Any] = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    found = backend.CuteKernelsBackend.validate_configuration(**{**given, "device_capability": H200, **change})
    assert (found == []) if reason is None else any(reason in each for each in found)


@pytest.mark.parametrize(("owner", "name"), [(vllm.AttentionImpl, "forward"), (vllm.AttentionMetadataBuilder, "build")])
def test_a_version_that_has_moved_is_a_reason(backend: Any, owner: Any, name: str, monkeypatch) -> None:
    monkeypatch.setattr(owner, name, lambda self, other: None)
    assert backend.CuteKernelsBackend.validate_configuration(head_size=128) == [
        reason for reason in backend.CuteKernelsBackend.validate_configuration() if f"{owner.__name__}.{name} takes no" in reason
    ]
    assert "vllm 0.0.stand-in" in backend.CuteKernelsBackend.validate_configuration()[0]


@pytest.mark.parametrize("owner", [vllm.AttentionImpl, vllm.AttentionMetadataBuilder])
def test_a_version_that_asks_for_more_is_a_reason(backend: Any, owner: Any, monkeypatch) -> None:
    mine = next(each for each in vars(backend).values() if isinstance(each, type) and owner in each.__mro__[1:])
    monkeypatch.setattr(mine, "__abstractmethods__", frozenset({"reshape_queries"}))
    (reason,) = backend.CuteKernelsBackend.validate_configuration()
    assert "vllm 0.0.stand-in" in reason and f"{owner.__name__} asks for reshape_queries" in reason


@pytest.mark.parametrize("name", ["MultipleOf", "AttentionCGSupport", "AttentionImpl", "UNIFORM_BATCH"])
def test_a_version_without_what_the_backend_takes_is_named(backend: Any, name: str, monkeypatch) -> None:
    module = sys.modules["vllm.v1.attention.backend"]
    monkeypatch.delattr(module if name != "UNIFORM_BATCH" else module.AttentionCGSupport, name)
    monkeypatch.delitem(sys.modules, vllm.BACKEND)
    with pytest.raises(ck.Unsupported, match=rf"vllm 0\.0\.stand-in: v1\.attention\.backend.*{name}"):
        import_module(vllm.BACKEND)


def test_the_cache_in_memory(backend: Any, monkeypatch) -> None:
    served = backend.CuteKernelsBackend
    assert served.get_kv_cache_shape(7, 16, 2, 64) == (7, 2, 16, 128)
    assert served.get_kv_cache_shape(7, 16, 2, 64, "int8_per_token_head") == (7, 2, 16, 2 * 68)
    assert served.get_kv_cache_stride_order() == (0, 2, 1, 3)
    assert served.get_kv_cache_stride_order(include_num_layers_dimension=True) == (1, 0, 3, 2, 4)
    spec = dataclasses.make_dataclass("Spec", ["head_size", "kv_quant_mode", ("state_content_bytes", Any, None)])
    of_tokens, plain = SimpleNamespace(is_per_token_head=True), SimpleNamespace(is_per_token_head=False)
    assert served.customize_spec(spec(64, of_tokens)).state_content_bytes == 2 * 68
    assert served.customize_spec(spec(64, plain)).state_content_bytes is None


def test_registering_makes_one_member_that_a_config_can_carry(backend: Any, registered: list[Any]) -> None:
    member = integration.register()
    assert integration.register() is member and len(registered) == 1
    assert member.name == "CUTE_KERNELS" == backend.CuteKernelsBackend.get_name()
    assert type(member)["CUTE_KERNELS"] is member and member in list(type(member))
    module, _, name = registered[0][1].rpartition(".")
    assert (module, getattr(backend, name)) == (vllm.BACKEND, backend.CuteKernelsBackend)
    kept = pickle.dumps(member)
    assert pickle.loads(kept) is member


def test_registering_by_a_name(monkeypatch) -> None:
    """As vLLM 0.33 does: register_backend makes the member."""
    made, backends = SimpleNamespace(), SimpleNamespace(__members__={}, register=None)

    def register_backend(backend: str, class_path: str | None = None) -> None:
        backends.__members__[backend] = made

    vllm.put_in_place(monkeypatch, backends, register_backend)
    assert integration.register() is made and list(backends.__members__) == ["CUTE_KERNELS"]


def test_a_vllm_that_has_moved_gets_one_line(monkeypatch, caplog) -> None:
    monkeypatch.setattr("cute_kernels.integrations.engine._told", set())
    vllm.put_in_place(monkeypatch, Enum("Backends", {"CUSTOM": None}), lambda other: None)
    with pytest.raises(ck.Unsupported, match=r"vllm 0\.0\.stand-in: .*register_backend takes no backend, class_path"):
        integration.register()
    integration.plugin(), integration.plugin()
    assert len(caplog.records) == 1 and "there is no attention backend CUTE_KERNELS" in caplog.text


def refusing(backend: Any, class_path: str | None = None) -> None:
    raise ValueError("declare the backend elsewhere")


class Broken:
    """Imports that fail in vLLM's registry of backends."""

    def find_spec(self, name: str, *others: Any) -> None:
        if name == "vllm.v1.attention.backends.registry":
            raise ImportError("cannot import name 'resolve'", name="vllm")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("raises", "register_backend raised ValueError: declare the backend elsewhere"),
        ("no enumeration", "AttentionBackendEnum is not there"),
        ("no import", "registry cannot be imported: cannot import name 'resolve'"),
        ("no version", "vllm .*register_backend raised ValueError"),
    ],
)
def test_the_plugin_ends_no_process(broken: str, said: str, monkeypatch, caplog) -> None:
    monkeypatch.setattr("cute_kernels.integrations.engine._told", set())
    vllm.put_in_place(monkeypatch, Enum("Backends", {"CUSTOM": None}), refusing)
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    if broken == "no enumeration":
        monkeypatch.delattr(registry, "AttentionBackendEnum")
    if broken == "no import":
        monkeypatch.delitem(sys.modules, registry.__name__)
        monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    if broken == "no version":
        monkeypatch.delattr(sys.modules["vllm"], "__version__")
    integration.plugin(), integration.plugin()
    (line,) = caplog.messages
    assert re.search(said, line) and "there is no attention backend CUTE_KERNELS" in line
    assert broken == "no version" or "vllm 0.0.stand-in: " in line


def test_the_entry_point() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    table = text.split('[project.entry-points."vllm.general_plugins"]\n')[1].split("\n\n")[0]
    name, value = (part.strip().strip('"') for part in table.split("="))
    assert (name, EntryPoint(name, value, "vllm.general_plugins").load()) == ("cute_kernels", integration.plugin)


def test_the_example_asks_for_the_backend(monkeypatch, capsys) -> None:
    """Over a stand-in of vLLM's engine, which needs a GPU; test_vllm_installed.py holds its arguments to vLLM's."""
    asked: dict[str, Any] = {}

    class LLM:
        def __init__(self, **options: Any) -> None:
            asked.update(options)

        def generate(self, prompts: list[str], sampling: Any) -> list[Any]:
            return [SimpleNamespace(outputs=[SimpleNamespace(text=f" {len(prompt)}")]) for prompt in prompts]

    vllm.put_in_place(monkeypatch, Enum("Backends", {"CUSTOM": None}), lambda backend, class_path=None: None)
    monkeypatch.setattr(sys.modules["vllm"], "LLM", LLM, raising=False)
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", SimpleNamespace, raising=False)
    example = runpy.run_path(str(EXAMPLE))
    assert example["main"](["--model", "tiny", "--kv-cache-dtype", "fp8"]) == [" 24", " 27", " 17"]
    assert asked == {"model": "tiny", "attention_backend": integration.NAME, "kv_cache_dtype": "fp8"}
    assert "The capital of France is 24" in capsys.readouterr().out
