"""Groups of command-line options (a shape, query rows and scores, a device), and the problems that they describe."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import torch
import typer
from typer.core import TyperGroup

from .attention.attention_descriptor import PagedAttentionDescriptor
from .attention.descriptors import DecodeProblem, FlashDecodingDescriptor, PagedDecodeDescriptor
from .errors import CuteKernelsError, InvalidArgument, InvalidProblem, Unsupported
from .kv.scale import NAMED_SCALES
from .kv.types import KVDtype, KVLayout
from .planning.variants import PRETEND, DeviceFacts, PlanPreference, VariantArch


class Dtype(str, Enum):
    """q's dtype, as the command line spells it."""

    f16 = "f16"
    bf16 = "bf16"
    f32 = "f32"


class Scales(str, Enum):
    """The granularity of the scales of K and of V."""

    none = "none"
    tensor = "tensor"
    head = "head"
    token = "token"
    token_f16 = "token-f16"


class Queries(str, Enum):
    """How many query rows a request has: as an indptr on the device says, or the same number for each request."""

    ragged = "ragged"
    uniform = "uniform"


class Causal(str, Enum):
    """Where the causal diagonal ends."""

    bottom_right = "bottom-right"
    top_left = "top-left"
    none = "none"


TORCH_DTYPES = {Dtype.f16: torch.float16, Dtype.bf16: torch.bfloat16, Dtype.f32: torch.float32}


@dataclass(frozen=True)
class Rows:
    """Query rows and the modifiers of their scores: by default one row per request, whose scores are only scaled."""

    max_q_len: Annotated[int | None, typer.Option(help="The most query rows of a request; default: each has one.")] = None
    queries: Annotated[Queries | None, typer.Option(help="Their number in each request. Default: ragged.")] = None
    causal: Annotated[Causal | None, typer.Option(help="Where their diagonal ends. Default: bottom-right.")] = None
    window_left: Annotated[int | None, typer.Option(help="Keys that a row sees before its own.")] = None
    window_right: Annotated[int | None, typer.Option(help="Keys that a row sees past its own, with --causal none.")] = None
    softcap: Annotated[float | None, typer.Option(help="What bounds scores, by tanh.")] = None
    alibi: Annotated[bool, typer.Option("--alibi", help="A slope a head, less for each token between.")] = False
    sinks: Annotated[bool, typer.Option("--sinks", help="A logit a head in the softmax's denominator.")] = False
    tree_mask: Annotated[bool, typer.Option("--tree-mask", help="Which new tokens a row sees is given bit by bit.")] = False

    @property
    def operation(self) -> str | None:
        """The operation's name in plans of several query rows; None for a decode plan."""
        return None if self.max_q_len is None else "paged_attention"

    def fields_of_one(self) -> dict[str, Any]:
        """Fields of a decode descriptor. Raises InvalidArgument for an option that only several query rows have."""
        for name in ("queries", "causal", "window_right", "tree_mask"):
            value = getattr(self, name)
            if value is not None and value is not False:
                said = value.value if isinstance(value, Enum) else value
                raise InvalidArgument(name, f"got {said}, needs max_q_len too: one query row stands at its last key")
        return self._of_scores()

    def fields_of_several(self) -> dict[str, Any]:
        """Fields of a PagedAttentionDescriptor."""
        causal = (self.causal or Causal.bottom_right).value.replace("-", "_")
        return {
            **self._of_scores(),
            "max_q_len": self.max_q_len,
            "query_format": (self.queries or Queries.ragged).value,
            "causal": None if causal == "none" else causal,
            "window_right": self.window_right,
            "tree_mask": self.tree_mask,
        }

    def _of_scores(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("window_left", "softcap", "alibi", "sinks")}


ONE_ROW = Rows()


@dataclass(frozen=True)
class Shape:
    """The shape options, the same for every problem that a command is given. page_size 0: a contiguous cache."""

    heads: Annotated[int, typer.Option(help="Query heads.")] = 32
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8
    head_dim: Annotated[int, typer.Option(help="Elements of one head.")] = 128
    page_size: Annotated[int, typer.Option(help="Tokens of a page; 0 for a contiguous cache.")] = 16
    scales: Annotated[Scales, typer.Option(help="What carries a scale of K, and one of V.")] = Scales.none
    table: Annotated[
        str, typer.Option(help="Page table: dense (default) or csr; with --page-size 0: none (default), lengths or packed.")
    ] = ""
    alignment: Annotated[int, typer.Option(help="Bytes that strides and pointers keep.")] = 16

    def problem(self, batch: int, seq_len: int, dtype: Dtype, kv_dtype: KVDtype | None, rows: Rows = ONE_ROW) -> DecodeProblem:
        """The problem of one batch size, one length and one pair of types."""
        kind, scale = TORCH_DTYPES[dtype], NAMED_SCALES[self.scales.value]
        named = {"batch_size": batch, "num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}
        common: dict[str, Any] = {**named, "kv_dtype": kv_dtype, "k_scale": scale, "v_scale": scale}
        table = self.table or ("dense" if self.page_size else "none")
        if rows.max_q_len is None and not self.page_size:
            if table != "none":
                raise InvalidProblem("table_format", table, 'must be "none" with page_size = 0, unless max_q_len is given')
            common |= {"dtype": kind, "seq_len": seq_len, "alignment_bytes": self.alignment}
            return FlashDecodingDescriptor(**common, **rows.fields_of_one()).problem
        common |= {"q_dtype": kind, "page_size": self.page_size or None, "max_seq_len": seq_len, "table_format": table}
        common["layout"] = KVLayout("HND", self.alignment)
        if rows.max_q_len is None:
            return PagedDecodeDescriptor(**common, **rows.fields_of_one()).problem
        return PagedAttentionDescriptor(**common, **rows.fields_of_several()).problem


@dataclass(frozen=True)
class Device:
    """A device, here or not, and the preference for the choice among its variants."""

    gpu: Annotated[str, typer.Option(help=f"Pretend a device: {', '.join(PRETEND)}. Default: this machine's.")] = ""
    arch: Annotated[str, typer.Option(help="Force a variant: sm90, sm80 or cpu.")] = ""
    sm_count: Annotated[int | None, typer.Option(help="SMs that a plan of attention uses. Default: all.")] = None

    @property
    def facts(self) -> DeviceFacts:
        """The facts of the whole device."""
        if not self.gpu:
            return DeviceFacts.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if self.gpu.lower() not in PRETEND:
            raise typer.BadParameter(f"{self.gpu!r} is not one of {', '.join(PRETEND)}", param_hint="--gpu")
        return PRETEND[self.gpu.lower()]

    @property
    def preference(self) -> PlanPreference:
        """The preference that a plan would be selected with."""
        return PlanPreference(arch=cast("VariantArch | None", self.arch or None), sm_count=self.sm_count)


# parameters of the package whose options have another name; the options of SAME have the parameter's name, with dashes
RENAMED = {
    "batch_size": "--batch",
    "num_heads": "--heads",
    "num_kv_heads": "--kv-heads",
    "q_dtype": "--dtype",
    "k_scale": "--scales",
    "v_scale": "--scales",
    "table_format": "--table",
    "max_seq_len": "--seq-len",
    "query_format": "--queries",
    "rotary.rotary_dim": "--rotary-dim",
    "rotary.pairing": "--pairing",
    "num_states": "--merge",
    "layout.alignment_bytes": "--alignment",
    "alignment_bytes": "--alignment",
}
SAME = (
    *("model", "batch", "context", "out", "folder", "results", "device", "arch", "dtype", "seq_len", "head_dim", "page_size"),
    *("kv_dtype", "max_q_len", "queries", "causal", "window_left", "window_right", "softcap", "alibi", "sinks", "tree_mask"),
    *("sm_count", "max_new_tokens"),
)
OPTIONS = RENAMED | {name: f"--{name.replace('_', '-')}" for name in SAME}
_NAMES = "|".join(re.escape(name) for name in sorted(OPTIONS, key=len, reverse=True))
FIRST = re.compile(rf"({_NAMES})(?=:| =)")  # the parameter that an error is about
LATER = re.compile(rf"(?<![\w.-])(?:({_NAMES})(?= ?=)|([a-z]+(?:_[a-z]+)+)(?![\w(]))")


def in_options(error: CuteKernelsError) -> str:
    """An error's text, with the package's parameters replaced by the options that set them, and None by "left out"."""
    text = str(error)
    if not isinstance(error, InvalidProblem | InvalidArgument | Unsupported):
        return text
    text = FIRST.sub(lambda found: OPTIONS[found[1]], text, count=1) if FIRST.match(text) else text
    text = LATER.sub(lambda found: OPTIONS.get(found[1] or found[2], found[0]), text)
    text = text.replace("bottom_right", "bottom-right").replace("top_left", "top-left").replace("got None", "got none")
    return re.sub(r"\bNone\b", "0" if text.startswith("--page-size") else "left out", text)


class Commands(TyperGroup):
    """The commands, whose usage errors name the value that was given and not the parser's own terms."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            errors = getattr(error.__cause__, "errors", None)
            if errors is not None:
                said = error.message.removeprefix("Value error, ")
                rest = said.removeprefix("Input ")
                error.message = f"got {errors()[0]['input']!r}, {rest}" if rest != said else said
            raise


def check_writable(out: Path, name: str = "--out") -> None:
    """Opens the file that a command will write, before its work. Raises InvalidArgument, which names the option, if it cannot."""
    if not out.parent.is_dir():
        raise InvalidArgument(name, f"{out}: the folder {out.parent} does not exist")
    try:
        there = out.exists()
        with out.open("a"):
            pass
    except OSError as error:
        raise InvalidArgument(name, f"{out}: {error.strerror}") from error
    if not there:
        out.unlink()


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with each parameter of a dataclass replaced by one option per field; other parameters stay as they are."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in parameters if is_dataclass(each.annotation)}
    options: list[inspect.Parameter] = []
    for each in parameters:
        options += _options_of(groups[each.name]) if each.name in groups else [each]

    def taking(**given: Any) -> None:
        made = {name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()}
        command(**given, **made)

    taking.__doc__, taking.__name__ = command.__doc__, command.__name__
    taking.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    taking.__annotations__ = {option.name: option.annotation for option in options}
    return taking


def _options_of(kind: Any) -> list[inspect.Parameter]:
    """One parameter per field of a dataclass."""
    hints, keyword = get_type_hints(kind, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(each.name, keyword, default=each.default, annotation=hints[each.name]) for each in fields(kind)]
