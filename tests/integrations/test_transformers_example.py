"""The example script, on its small model."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch

from tests.support.transformers import excess

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "transformers_generate.py"


def test_it_generates_what_eager_attention_would(capsys) -> None:
    example = runpy.run_path(str(EXAMPLE))
    answers = example["main"](["--new-tokens", "6"])
    requests = [list(prompt.encode()) for prompt in example["PROMPTS"]]
    assert [len(answer) for answer in answers] == [6, 6, 6]
    assert excess(example["small_llama"]().eval(), requests, answers) < 2
    said = capsys.readouterr().out
    assert f"generate, static cache: {answers[0]}" in said and example["PROMPTS"][2] in said
    assert torch.get_default_dtype() == torch.float32
