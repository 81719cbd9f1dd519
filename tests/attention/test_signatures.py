"""A run whose operands differ from those of a checked one in anything that a check looks at is checked again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.append import checks as append_checks
from cute_kernels.attention import checks
from cute_kernels.merge import checks as merge
from cute_kernels.planning import base as plan_base
from tests.support.inputs import Shape, make_operands

DEVICES = torch.device("cuda", 0), torch.device("cuda", 1)


@dataclass(frozen=True)
class Described:
    """What a signature reads of a tensor."""

    shape: tuple[int, ...] = (4, 8, 64)
    strides: tuple[int, ...] = (512, 64, 1)
    dtype: torch.dtype = torch.float16
    address: int = 4096
    device: torch.device = DEVICES[0]

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def data_ptr(self) -> int:
        return self.address


CHANGES: dict[str, dict[str, Any]] = {
    "extents": {"shape": (4, 4, 64)},
    "strides": {"strides": (1024, 64, 1)},
    "dtype": {"dtype": torch.bfloat16},
    "address": {"address": 8192},
    "device": {"device": DEVICES[1]},
}
SIGNATURES = {
    "decode": (lambda *t: checks.Operands(*t).signature(), checks.Operands._fields),
    "append": (lambda *t: append_checks.Operands(*t).signature(), append_checks.Operands._fields),
    "merge": (lambda *t: merge.Operands(*t).signature(), merge.Operands._fields),
}
OF_EACH = [(name, operand, change) for name, (_, operands) in SIGNATURES.items() for operand in operands for change in CHANGES]


def test_a_decode_signature_names_every_operand() -> None:
    assert len(SIGNATURES["decode"][1]) == len(checks.Operands._fields)


@pytest.mark.parametrize(("name", "operand", "change"), OF_EACH)
def test_every_property_of_every_operand_counts(name: str, operand: str, change: str) -> None:
    signature, operands = SIGNATURES[name]
    same = [Described() for _ in operands]
    other = [replace(t, **CHANGES[change]) if name == operand else t for name, t in zip(operands, same, strict=True)]
    assert signature(*same) == signature(*[replace(t) for t in same]) != signature(*other)
    assert hash(signature(*same)) == hash(signature(*[replace(t) for t in same]))


@pytest.mark.parametrize("operand", ["table0", "table1", "table2", "k_scale", "v_scale", "workspace"])
def test_an_absent_operand_counts(operand: str) -> None:
    signature, operands = SIGNATURES["decode"]
    same = [Described() for _ in operands]
    assert signature(*same) != signature(*[None if name == operand else t for name, t in zip(operands, same, strict=True)])


CASE = Shape(lengths=(3, 40, 17), table_format="csr", head_dim=64, name="signatures")
SAME_SIZE = {torch.bfloat16: torch.float16, torch.float32: torch.int32, torch.int32: torch.float32, torch.uint8: torch.int8}
VIEWS = {
    "extents": lambda t: t[:-1],
    "strides": lambda t: t.as_strided(t.shape, (0, *t.stride()[1:])),
    "dtype": lambda t: t.view(SAME_SIZE[t.dtype]),
    "device": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("change", VIEWS)
@pytest.mark.parametrize("operand", checks.Operands._fields)
def test_a_run_that_differs_in_one_operand_is_checked(
    pretend_h200: list, monkeypatch: pytest.MonkeyPatch, operand: str, change: str
) -> None:
    """Of the run before it: the same memory with other extents, strides or dtype; or the operand on another device."""
    scales = {"k_scale": ck.KVScale.TOKEN, "v_scale": ck.KVScale.TOKEN}
    plan, inputs = ck.PagedDecodePlan.select(replace(CASE.descriptor(), **scales), "cpu"), make_operands(CASE)
    tokens = (len(inputs.k_cache), CASE.page_size, CASE.num_kv_heads)
    given = {
        **dict(zip(("q", "k_cache", "v_cache"), inputs[:3], strict=True)),
        **dict(zip(("table0", "table1", "table2"), inputs.page_table.operands, strict=True)),
        **{name: torch.ones(tokens) for name in scales},
        "out": torch.empty_like(inputs.q),
        "lse": torch.empty(inputs.q.shape[:2]),
        "workspace": torch.zeros(plan.workspace_size() + 16, dtype=torch.uint8),
    }

    def run(operands: dict[str, torch.Tensor]) -> None:
        tables = tuple(operands[f"table{i}"] for i in range(3))
        rest = {name: tensor for name, tensor in operands.items() if not name.startswith("table")}
        plan.run(**rest, page_table=ck.PageTable("csr", tables))

    run(given)
    found: list[checks.Operands] = []
    real = checks.check
    monkeypatch.setattr(checks, "check", lambda rules, operands, *rest: (found.append(operands), real(rules, operands, *rest))[1])
    run(given)
    assert not found
    changed = VIEWS[change](given[operand])
    with contextlib.suppress(ck.CuteKernelsError):
        run({**given, operand: changed})
    assert len(found) == 1
    assert getattr(found[0], operand) is changed


@pytest.mark.parametrize(
    "other", [{"descriptor": "other"}, {"device": DEVICES[1]}, {"preference": ck.PlanPreference(validate=True)}]
)
def test_a_plan_is_remembered_by_descriptor_device_and_preference(no_plans: None, other: dict[str, Any]) -> None:
    key = {"descriptor": "one", "device": DEVICES[0], "preference": ck.PlanPreference()}

    def kind(*_: object) -> Any:
        return object()

    first = plan_base.remembered(kind, **key)
    assert plan_base.remembered(kind, **key) is first
    assert plan_base.remembered(kind, **{**key, **other}) is not first
