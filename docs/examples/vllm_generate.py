"""vLLM generates over cute_kernels' attention backend.

python docs/examples/vllm_generate.py [--model NAME_OR_FOLDER] [--kv-cache-dtype fp8] [--max-tokens N]

Needs vLLM with its kernels, a GPU and a checkpoint. The plugin registers the backend: its name is all there is to write.
"""

from __future__ import annotations

import argparse

try:
    from vllm import LLM, SamplingParams
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: this example needs vLLM with its kernels (pip install vllm)") from None

PROMPTS = ["The capital of France is", "A short poem about the sea:", "def fibonacci(n):"]


def main(arguments: list[str] | None = None) -> list[str]:
    """Returns what is added to each prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a checkpoint of the hub or a folder")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, fp8, fp8_e5m2, int8_per_token_head or fp8_per_token_head")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args(arguments)

    model = LLM(model=options.model, attention_backend="CUTE_KERNELS", kv_cache_dtype=options.kv_cache_dtype)
    answers = model.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=options.max_tokens))
    texts = [answer.outputs[0].text for answer in answers]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(prompt + text)
    return texts


if __name__ == "__main__":
    main()
