"""Times generate_batch and generate, and a decode step on the device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from perf.generate.models import Work
from perf.timing import GraphClock, Rotation

PAGE = 256
REPLAYS = 20
SHORT = 32  # new tokens of the short run, whose time is subtracted from the whole run's for the time of a step


@dataclass(frozen=True)
class Timed:
    """The times and tokens of a run.

    seconds: the whole run's, prompts included. step_ms: wall-clock time of a decode step of all prompts. device_ms: its time on
    the device, None if no graph was captured. tokens: of each prompt.
    """

    provider: str
    api: str
    work: Work
    seconds: float
    step_ms: float | None
    device_ms: float | None
    tokens: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return self.work.tokens / self.seconds


def pages_of(work: Work) -> int:
    """Pages that a prompt and its new tokens may need."""
    return -(-(work.prompt_len + work.new_tokens) // PAGE) + 1


def table_columns(work: Work) -> int:
    """Entries of a request in the block table."""
    return pages_of(work) + pages_of(work) % 2


def batch_config(work: Work, graphs: bool) -> Any:
    """Continuous batching with room for all prompts at once, and CUDA graphs of decode steps."""
    kind = transformers.generation.ContinuousBatchingConfig
    pages = pages_of(work)
    sizes = {"page_size" if hasattr(kind(), "page_size") else "block_size": PAGE, "num_blocks": work.prompts * pages}
    room = {"max_blocks_per_request": table_columns(work), "max_requests_per_batch": work.prompts}
    return kind(**sizes, **room, max_batch_tokens=8192, allow_block_sharing=False, use_cuda_graph=(False, graphs))


def batched(model: Any, provider: str, prompts: list[list[int]], work: Work, once: bool = False) -> Timed:
    """Runs generate_batch three times: for graphs and kernels, then timed with few and all new tokens. once: only the first."""
    graphs = torch.cuda.is_available() and provider != "sdpa"  # sdpa has no block tables, so no graphs of decode

    def run(new_tokens: int) -> tuple[float, list[list[int]]]:
        greedy = transformers.GenerationConfig(max_new_tokens=work.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        config = batch_config(work, graphs)
        synchronize()
        started = time.perf_counter()
        answers = model.generate_batch(
            prompts,
            generation_config=greedy,
            continuous_batching_config=config,
            persistent_manager=True,
            warmup=False,
            max_new_tokens=new_tokens,
        )
        synchronize()
        seconds = time.perf_counter() - started
        failed = [answer.error for answer in answers.values() if answer.error]
        if failed or len(answers) != len(prompts):
            raise RuntimeError(f"{provider}: {len(answers)} of {len(prompts)} answers, {failed[:1]}")
        by_prompt = {tuple(answer.prompt_ids): list(answer.generated_tokens) for answer in answers.values()}
        return seconds, [by_prompt[tuple(prompt)] for prompt in prompts]

    few = min(SHORT, work.new_tokens // 2)
    try:
        if provider != "sdpa":
            first = run(work.new_tokens)
            if once:
                return Timed(provider, "generate_batch", work, first[0], None, None, first[1])
        short, _ = run(few)
        seconds, tokens = run(work.new_tokens)
        step = 1e3 * (seconds - short) / (work.new_tokens - few)
        device = device_step(model, work)
    finally:
        model.destroy_cached_continuous_batching_manager()
    return Timed(provider, "generate_batch", work, seconds, step, device, tokens)


def generated(model: Any, provider: str, prompts: list[list[int]], work: Work) -> Timed:
    """Runs generate with a static cache, not compiled: all prompts are equally long, so that none is padded."""
    ids = torch.tensor(prompts, device=model.device)
    times: list[float] = []
    few = min(SHORT, work.new_tokens // 2)
    for new_tokens in (few, work.new_tokens) if provider == "sdpa" else (2, few, work.new_tokens):  # 2: compiles
        synchronize()
        started = time.perf_counter()
        with torch.no_grad():
            found = model.generate(
                ids, max_new_tokens=new_tokens, do_sample=False, cache_implementation="static", disable_compile=True
            )
        synchronize()
        times.append(time.perf_counter() - started)
        model._cache = None  # 5.17 keeps a static cache for the next call
    step = 1e3 * (times[-1] - times[-2]) / (work.new_tokens - few)
    return Timed(provider, "generate, static cache", work, times[-1], step, None, found[:, ids.shape[1] :].tolist())


def device_step(model: Any, work: Work) -> float | None:
    """Milliseconds of one replay of the graph of a decode step with all prompts at their full length."""
    manager = model._cached_continuous_batching_manager
    ios = manager.batch_processor.inputs_and_outputs
    io = ios.io_pairs[0].device_io if hasattr(ios, "io_pairs") else ios
    graph = io.graphs.get_graph((work.prompts,))
    if graph is None:
        return None
    context, lengths = work.prompt_len + work.new_tokens, io.cumulative_seqlens_k["full_attention"]
    pages = -(-context // PAGE)
    lengths[: work.prompts + 1] = torch.arange(work.prompts + 1, device=lengths.device, dtype=lengths.dtype) * context
    table = torch.arange(work.prompts * pages, device=lengths.device, dtype=torch.int32).view(work.prompts, pages)
    allocator = getattr(manager.batch_processor.cache, "cache_allocators", {}).get("full_attention")  # transformers 5.23
    stride = PAGE if allocator is None else allocator.block_physical_stride
    io.block_table[0, : work.prompts, :pages] = table * (stride // PAGE)
    io.input_ids[: work.prompts] = 1  # -1 may stand there, for the token of a step that is not carried over now
    io.carry_over_ids[: work.prompts] = -1
    return GraphClock().times([Rotation(graph.replay, 1)], REPLAYS)[0].median / 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
