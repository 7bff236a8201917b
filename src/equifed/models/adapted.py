"""A module as engines call it: one tensor of rows in, one tensor of outputs out.

Where a sample consists of several arrays, its row is taken apart just before the module's own
``forward``. Of a dict or an object that any module returns, ``logits`` is taken.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.data.federation import Federation
from equifed.data.fields import KINDS, Layout
from equifed.models.checks import check_module

COARSE = (torch.float16, torch.bfloat16)
"""Precisions that lack whole numbers as small as 257."""


class Adapted(nn.Module):
    """What an adapted module is beside its own class; calls with its own arguments pass through."""

    equifed_layout: Layout
    equifed_call: str

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer rows with one tensor, and whatever else as the module itself does."""
        layout = self.equifed_layout
        rows = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(rows, Tensor) or rows.shape[1:] != (layout.width,):
            return super().forward(*args, **kwargs)
        if rows.dtype in COARSE and any(field.kind != KINDS["f"] for field in layout.fields):
            raise ValueError(
                f"The samples have whole numbers ({layout}), which {rows.dtype} does not hold; use "
                "dtype=torch.float32."
            )
        return self.equifed_answer(layout.unpack(rows))

    def equifed_answer(self, parts: dict[str, Tensor]) -> Any:
        """Return the logits for the arrays of samples."""
        inner = super().forward
        if self.equifed_call == "names":
            return take_logits(inner(**parts))
        if self.equifed_call == "places":
            return take_logits(inner(*parts.values()))
        return take_logits(inner(parts if self.equifed_layout.named else tuple(parts.values())))

    @override
    def __reduce__(self) -> Any:
        """Copy and pickle the module itself: an adapted class has no name to find it by."""
        kind: Any = type(self).__bases__[1]
        plain = kind.__new__(kind)
        plain.__dict__.update({k: v for k, v in vars(self).items() if not k.startswith("equifed_")})
        return adapt, (plain, self.equifed_layout)


class ByRow(nn.Module):
    """A program that takes the arrays of samples, called with rows."""

    def __init__(self, program: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.program, self.layout = program, layout

    @override
    def forward(self, rows: Tensor) -> Any:
        """Return what the program returns."""
        parts = self.layout.unpack(rows)
        return self.program(parts if self.layout.named else tuple(parts.values()))


@functools.cache
def _adapted_class(kind: Any) -> Any:
    return type(kind.__name__, (Adapted, kind), {"__module__": kind.__module__})


def adapt(module: nn.Module, layout: Layout | None) -> nn.Module:
    """Return a module with the same parameters, under the same names, that takes rows.

    It is the module itself where a sample is one array (no layout).

    >>> class Sum(nn.Module):
    ...     def forward(self, tokens, mask):
    ...         return {"logits": (tokens * mask).sum(1, keepdim=True)}
    >>> from equifed.data.fields import pack
    >>> rows, layout = pack({"tokens": [[3, 4], [5, 9]], "mask": [[1, 1], [1, 0]]}, "X")
    >>> adapt(Sum(), layout)(torch.as_tensor(rows))
    tensor([[7],
            [5]])
    """
    if layout is None:
        return module
    if "forward" in vars(module):
        raise ValueError(
            f"The model ({type(module).__name__}) has had its forward replaced (by torch.compile "
            "or a hook); pass the module that was wrapped."
        )
    made: Any = copy.copy(module)
    if isinstance(module, Adapted):  # to other data
        made.__class__ = type(module).__bases__[1]
    made.equifed_layout, made.equifed_call = layout, _choose_call(made, layout)
    kind: Any = type(made)
    made.__class__ = _adapted_class(kind)
    return made  # type: ignore[no-any-return]


def adapt_to_data(module: nn.Module, data: Federation) -> nn.Module:
    """Return the module as engines call it."""
    if data.layout is not None:
        check_module(module)
    return adapt(module, data.layout)


def take_logits(outputs: Any) -> Any:
    """Return the logits of a dict or an object that has some; anything else as it is."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def _choose_call(module: nn.Module, layout: Layout) -> str:
    """Return how forward takes the arrays: by name, by place, or all of them as one argument."""
    known = inspect.signature(module.forward).parameters
    kinds = {p.kind for p in known.values()}
    names = [field.name for field in layout.fields]
    places = [p for p in known.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [
        p.name
        for p in known.values()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if not layout.named:
        enough = len(names) <= len(places) or inspect.Parameter.VAR_POSITIONAL in kinds
        if enough and set(needed) <= {p.name for p in places[: len(names)]}:
            return "places"
    elif set(needed) <= set(names) and (
        set(names) <= set(known) or inspect.Parameter.VAR_KEYWORD in kinds
    ):
        return "names"
    if places and len(needed) <= 1 and not set(names) & set(known):
        return "mapping"
    odd = [n for n in names if n not in known] if layout.named else []
    lacks = [n for n in needed if n not in names] if layout.named else needed
    wrong = f"does not take {', '.join(odd)}" if odd else f"needs {', '.join(lacks)}"
    raise ValueError(
        f"The model's forward takes {', '.join(known) or 'nothing'}; a sample is {layout}: it "
        f"{wrong}. Leave these arrays out of the data, or wrap the model in a module whose forward "
        "takes the samples' arrays."
    )
