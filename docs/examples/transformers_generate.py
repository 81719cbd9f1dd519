"""A transformers model generates over cute_kernels' attention: all prompts by generate_batch, then one by generate.

python docs/examples/transformers_generate.py [--model NAME_OR_FOLDER] [--new-tokens N]

Without --model it is a small Llama with random weights, which shows the lines to write and needs no download.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers

from cute_kernels.integrations.transformers import register

PROMPTS = ["The capital of France is", "A short poem about the sea:", "def fibonacci(n):"]


def small_llama() -> Any:
    """Two layers of random weights over bytes."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).bfloat16()


def main(arguments: list[str] | None = None) -> list[list[int]]:
    """Returns the tokens that generate_batch adds to each prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a checkpoint of the hub or a folder")
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)

    attention = register()  # before the model is made
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.model:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(options.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16", attn_implementation=attention)
        prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    else:
        tokenizer, model = None, small_llama()
        model.set_attn_implementation(attention)
        prompts = [list(prompt.encode()) for prompt in PROMPTS]
    model.to(device).eval()

    # on a GPU transformers takes what memory is left for pages; a CPU has other uses for it
    config = transformers.generation.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256) if device == "cpu" else None
    answers = model.generate_batch(prompts, max_new_tokens=options.new_tokens, continuous_batching_config=config)
    by_prompt = {tuple(answer.prompt_ids): list(answer.generated_tokens) for answer in answers.values()}
    for prompt in prompts:
        tokens = by_prompt[tuple(prompt)]
        print(tokenizer.decode(prompt + tokens) if tokenizer else f"{bytes(prompt).decode()} {tokens}")

    ids = torch.tensor(prompts[:1], device=device)
    with torch.no_grad():
        one = model.generate(ids, max_new_tokens=options.new_tokens, do_sample=False, cache_implementation="static")
    print("generate, static cache:", one[0, ids.shape[1] :].tolist())
    return [by_prompt[tuple(prompt)] for prompt in prompts]


if __name__ == "__main__":
    main()
