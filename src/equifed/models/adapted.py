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

COARSE = (torch.float16, torch.bfloat16)  # precisions that lack whole numbers as small as 257


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
        return self.equifed_answer(unpack(layout, rows))

    def equifed_answer(self, parts: Any) -> Any:
        """Return the logits for the arrays of samples, as :func:`unpack` has them."""
        how, inner = self.equifed_call, super().forward
        if how == "names":
            return take_logits(inner(**parts))
        return take_logits(inner(*parts) if how == "places" else inner(parts))

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
        return self.program(unpack(self.layout, rows))


def unpack(layout: Layout, rows: Tensor) -> Any:
    """Return the arrays of samples: a mapping where they have names, else a tuple."""
    parts = layout.unpack(rows)
    return parts if layout.named else tuple(parts.values())


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
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def _fits(signature: inspect.Signature, *given: Any, **named: Any) -> bool:
    try:
        signature.bind(*given, **named)
    except TypeError:
        return False
    return True


def _choose_call(module: nn.Module, layout: Layout) -> str:
    """Return how forward takes the arrays: by name, by place, or all of them as one argument."""
    signature, names = inspect.signature(module.forward), [one.name for one in layout.fields]
    known = signature.parameters
    if layout.named and _fits(signature, **dict.fromkeys(names)):
        return "names"
    if not layout.named and _fits(signature, *names):
        return "places"
    if _fits(signature, names) and not set(names) & set(known):
        return "mapping"
    loose = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [p.name for p in known.values() if p.default is p.empty and p.kind not in loose]
    odd = [n for n in names if n not in known] if layout.named else []
    lacks = [n for n in needed if n not in names] if layout.named else needed
    wrong = f"does not take {', '.join(odd)}" if odd else f"needs {', '.join(lacks)}"
    raise ValueError(
        f"The model's forward takes {', '.join(known) or 'nothing'}; a sample is {layout}: it "
        f"{wrong}. Leave these arrays out of the data, or wrap the model in a module whose forward "
        "takes the samples' arrays."
    )
