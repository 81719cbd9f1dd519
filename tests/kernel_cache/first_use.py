"""The seconds from torch.cuda.init() to a first decode result in this process, as JSON, and what was imported for it.

python first_use.py     the package, the plan, the kernel from disk or compiled, and one run
"""

from __future__ import annotations

import json
import sys
import time

import torch

torch.manual_seed(0)  # else each process has data of its own
torch.cuda.init()
start = time.perf_counter()
seconds = {}

import cute_kernels as ck  # noqa: E402

batch, pages = 64, 1024
q = torch.randn(batch, 32, 128, dtype=torch.bfloat16, device="cuda")
k, v = torch.randn(2, pages, 8, 16, 128, dtype=torch.bfloat16, device="cuda")
table = torch.arange(pages, device="cuda").int().view(batch, -1)
lengths = torch.full((batch,), 256, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
seconds["tensors"] = time.perf_counter() - start

desc = ck.PagedDecodeDescriptor(batch_size=batch, num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, q_dtype=q.dtype)
plan = ck.PagedDecodePlan.select(desc, device="cuda")
seconds["plan"] = time.perf_counter() - start

out, lse = plan.run(q, k, v, ck.PageTable.dense(table, lengths), workspace=plan.new_workspace())
torch.cuda.synchronize()
seconds["result"] = time.perf_counter() - start
assert out.isfinite().all() and lse.isfinite().all()
print(json.dumps({**seconds, "compiler": "cutlass" in sys.modules, "sum": float(out.double().sum())}))
