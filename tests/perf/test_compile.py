"""perf.compile: the kernels of cases, without a GPU, under the keys by which a GPU's process finds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from cute_kernels.compile.cache import key_of
from cute_kernels.planning.variants import PRETEND
from perf.case_sets import select_cases
from perf.compile import main, specs_for
from perf.providers.ours import descriptor, spec_of

PROMPT, DECODE = "gqa_paged_attention_h32_kv8_d128_ps16_bf16_q8192_b1_l8k", "gqa_paged_decode_h32_kv8_d128_ps16_bf16_b64_l8k"


def test_specs_are_those_of_plans() -> None:
    (prompt,), (decode,) = select_cases([PROMPT]), select_cases([DECODE])
    wanted = {spec_of(descriptor(case).problem, PRETEND["h200"]) for case in (prompt, prompt.plain, decode)}
    found = specs_for([prompt, decode], ["ours", "fa3"], "h200")
    assert len(found) == len(set(found)) and set(found) == wanted
    assert specs_for([decode], ["fa3"], "h200") == []


def test_kernels_lie_under_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kernels"
    for said in ("0 from before", "all from before: nothing was compiled"):
        with pytest.raises(typer.Exit) as ended:
            main(folder, DECODE, "ours", "h200", 1)
        assert ended.value.exit_code == 0
        assert f"1 of 1 kernels are in {folder}, {said}" in capsys.readouterr().out.replace("\n", "")
    (spec,) = specs_for(select_cases([DECODE]), ["ours"], "h200")
    assert [path.stem for path in folder.glob("*.kernel")] == [key_of(spec)]


@pytest.mark.parametrize("given", [("", "ours"), (DECODE, "fa3"), (DECODE, " ,")])
def test_nothing_to_compile(given: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        main(tmp_path / "kernels", *given, "h200", 1)
    assert ended.value.exit_code == 2 and "nothing" in capsys.readouterr().out
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize("given", [("nothing-like-it", "ours", "h200"), (DECODE, "nobody", "h200"), (DECODE, "ours", "abacus")])
def test_unknown_names(given: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        main(tmp_path / "kernels", *given, 1)
    assert ended.value.exit_code == 2
    assert next(name for name in given if name in ("nothing-like-it", "nobody", "abacus")) in capsys.readouterr().out
    assert not (tmp_path / "kernels").exists()
