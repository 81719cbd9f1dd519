"""Which models keep transformers' own attention: a model is judged once, when it takes the name of an implementation."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from typing import Any

from ...config.append import MAX_HEAD_DIM

CHOSEN_KEYS = ("index_topk", "index_topk_blocks")  # a config with one of these has layers that choose their keys
INTERFACES = "ALL_ATTENTION_FUNCTIONS"  # the table in which a layer of transformers looks up its attention
MASK_PLACE = 4  # the mask's index among the arguments of an attention interface


def unserved(model: Any) -> str | None:
    """Returns the reason why no plan serves a model's layers, or None if attention judges each layer as it is called."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        return f"head_dim = {head_dim}, above {MAX_HEAD_DIM}"
    if not getattr(model, "_supports_attention_backend", True):
        return "layers that take no attention implementation"
    chosen = next((name for name in CHOSEN_KEYS if getattr(config, name, None) is not None), None)
    if chosen is not None:
        return f"layers that choose their keys ({chosen} = {getattr(config, chosen)})"
    layer = next(filter(None, map(mask_maker, _modules_of(model))), None)
    return None if layer is None else f"layers that make a mask of their own ({layer})"


def _modules_of(model: Any) -> list[str]:
    """Returns the modules of a model's class and of the classes that it is derived from, up to transformers' PreTrainedModel."""
    classes = type(model).__mro__
    derived = [each for each in classes if hasattr(each, "config_class") and each.__name__ != "PreTrainedModel"]
    return list(dict.fromkeys(each.__module__ for each in derived))


@functools.cache
def mask_maker(module: str) -> str | None:
    """Returns the first class in a module that gives attention another mask than the class was given; None for no such class.

    The module's source tells: such a class does arithmetic on the mask, or adds its choice of keys to the mask, and it knows only
    the masks of transformers' own implementations. A module whose source is missing counts as having no such class.
    """
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return None
    if INTERFACES not in source:
        return None
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return next((each.name for each in classes if any(map(_makes_a_mask, each.body))), None)


def _makes_a_mask(function: ast.stmt) -> bool:
    """Whether a method calls an attention interface with a mask that the method has made."""
    if not isinstance(function, ast.FunctionDef):
        return False
    values = _values(function)
    interfaces = {name for name, given in values.items() if any(each and INTERFACES in ast.unparse(each) for each in given)}
    masks: list[ast.expr] = []
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in interfaces:
            masks += [given.value for given in call.keywords if given.arg == "attention_mask"]
            masks += call.args[MASK_PLACE : MASK_PLACE + 1]
    sources = [each for mask in masks for each in (values.get(mask.id, []) if isinstance(mask, ast.Name) else [mask])]
    return not all(map(_as_it_came, sources))


def _values(function: ast.FunctionDef) -> dict[str, list[ast.expr | None]]:
    """Returns the expressions that a function assigns to each name. None stands for a name that is assigned in part only."""
    values: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(function):
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            whole = isinstance(target, ast.Name) and not isinstance(node, ast.AugAssign)
            for name in (each.id for each in ast.walk(target) if isinstance(each, ast.Name)):
                values.setdefault(name, []).append(node.value if whole else None)
    return values


def _as_it_came(mask: ast.expr | None) -> bool:
    """Whether an expression is a mask that the layer was given: a name, a choice of two, or an entry of a dictionary."""
    if isinstance(mask, (ast.IfExp, ast.BoolOp)):
        return all(map(_as_it_came, [mask.body, mask.orelse] if isinstance(mask, ast.IfExp) else mask.values))
    if isinstance(mask, ast.Subscript):
        return isinstance(mask.slice, (ast.Constant, ast.Name, ast.Attribute))
    if isinstance(mask, ast.Call):
        return isinstance(mask.func, ast.Attribute) and mask.func.attr == "get"
    return isinstance(mask, (ast.Name, ast.Constant))
