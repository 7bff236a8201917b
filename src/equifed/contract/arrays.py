"""Arrays that travel through the library, handles for vectors that clients keep, names as text.

What the server decides about clients is NumPy in float64, whatever the model's precision; what has
the model's size is a flat torch tensor in the model's dtype on its device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


import math
from numbers import Real

Losses: TypeAlias = NDArray[np.float64]
"""One loss per client, shape (n,)."""

Weights: TypeAlias = NDArray[np.float64]
"""One weight per client, shape (n,); sums to one, may be negative for relative fairness."""

Index: TypeAlias = NDArray[np.int64]
"""Positions of clients in the federation, shape (m,), without repeats."""

if TYPE_CHECKING:
    Vector: TypeAlias = torch.Tensor
    """A model, a gradient or an update, flattened, shape (d,)."""
else:
    Vector = "torch.Tensor"


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A square matrix in blocks; coordinates in none of them are left alone."""

    blocks: Vector  # (b, q, q), in float64
    places: Vector  # (k, q): where each block's coordinates lie; b is k, or 1 where shared

    def to(self, like: Vector) -> BlockMatrix:
        """Return it in the precision of a vector, on its device."""
        return BlockMatrix(self.blocks.to(like), self.places.to(like.device))

    def multiply(self, rows: Vector) -> Vector:
        """Return A v for a vector v, or for the rows of a matrix; other coordinates stay."""
        blocks, places, out = self.blocks.to(rows), self.places.to(rows.device), rows.clone()
        parts = rows[..., places]  # (..., k, q)
        if blocks.shape[-1] == 1:
            out[..., places] = parts * blocks[:, 0]
        elif len(blocks) == 1:
            out[..., places] = parts @ blocks[0].mT
        else:
            each = parts.movedim(-2, 0)
            found = each.reshape(len(blocks), -1, each.shape[-1]) @ blocks.mT
            out[..., places] = found.reshape(each.shape).movedim(0, -2)
        return out


class ClientVectors(ABC):
    """One vector per client, kept where it was computed.

    A handle gives out weighted sums and norms, never a single client's vector.

    >>> import equifed as ef, torch
    >>> data = ef.Federation.from_clients({"north": ([[2.0]], [1.0]), "south": ([[1.0]], [1.0])})
    >>> clients = ef.simulate(data, "linear")
    >>> losses, gradients = clients.value_and_gradient(torch.zeros(2), ef.contract.Stream(0))
    >>> gradients.weighted_sum(np.array([0.5, 0.5])), gradients.squared_norms()
    (tensor([-3., -2.]), array([20.,  8.]))
    """

    @abstractmethod
    def weighted_sum(self, weights: Weights) -> Vector:
        """Return sum_i weights_i v_i, summed in the order of the clients."""

    @abstractmethod
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        """Return |v_i|^2 for every client, or <v_i, A v_i> for a symmetric matrix ``scale``."""

    def step(self, weights: Weights, everyone: Weights | None = None) -> Vector:
        """Return the weighted sum that moves the model; absent clients may count in it.

        ``everyone`` are the weights of all clients, there or not, for who remembers them.
        """
        return self.weighted_sum(weights)

    def weighted_difference(self, old: ClientVectors, weights: Weights) -> Vector:
        """Return sum_i weights_i (v_i - old_i); as one sum where sums are hidden."""
        return self.weighted_sum(weights) - old.weighted_sum(weights)

    def allows(self, weights: Weights) -> bool:
        """Tell whether a sum that is not needed may be asked for; hidden ones may show too much."""
        return True

    def collect(self) -> ClientVectors:
        """Return them as a value that a checkpoint can hold; all processes of a group call it."""
        return self

    @property
    def at_hand(self) -> bool:
        """Whether norms cost neither an exchange nor work done again."""
        return False

    @property
    def claimed(self) -> bool:
        """Whether norms are the clients' own word, because nobody sees their vectors."""
        return False

    @property
    def behind(self) -> ClientVectors:
        """What a view looks at; any other handle is itself."""
        return self


@dataclass(frozen=True)
class KeyedMemory(ClientVectors):
    """A key of every client's vector, "" for zero; ``clients.remembered`` makes a handle."""

    keys: tuple[str, ...]

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("Ask clients.remembered(memory, index) for a handle first.")

    weighted_sum: ClassVar[Any] = _refuse
    squared_norms: ClassVar[Any] = _refuse


def multiply_rows(rows: Vector) -> Vector:
    """Return the inner products of the rows of a matrix, in float64."""
    rows = rows.double().contiguous()  # products of other strides may have other bits
    return rows @ rows.T


# -- names come from other people: what is shown or written of them is harmless --------------------

FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")
"""How a cell begins that a spreadsheet computes, and what is put before it instead."""


def show_text(text: str) -> str:
    r"""Return a text as a terminal may have it: what is not printable is written out.

    >>> show_text("north\x1b[31m\n")
    'north\\x1b[31m\\n'
    """
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if text.isprintable() else "".join(shown)


def to_cell(name: str) -> str:
    r"""Return a name as a cell of a CSV file, in one line and different for different names.

    >>> to_cell("=1+1"), to_cell("'=1+1"), to_cell("north"), to_cell("a\nb")
    ("'=1+1", "''=1+1", 'north', 'a\\nb')
    """
    line = show_text(name.replace("\\", "\\\\"))
    return "'" + line if line.startswith(FORMULA) else line


# -- settings: numbers in an interval, or one of a few words ---------------------------------------


def check_settings(given: object, cure: str = "", **allowed: str | tuple[str, ...]) -> None:
    """Refuse an attribute outside of its interval, or not among its words; None is not a value.

    >>> check_settings(slice(0, 2), "1 is all of it", start="[0, 1)", stop="(0, 1]")
    Traceback (most recent call last):
    ...
    ValueError: slice stop must lie in (0, 1], got 2; 1 is all of it.
    """
    for name, those in allowed.items():
        value = getattr(given, name)
        wanted = None if value is None else _find_fault(value, those)
        if wanted is not None:
            seen = value if isinstance(value, Real) else repr(value)
            told = f"{type(given).__name__} {name} must {wanted}, got {seen}"
            raise ValueError(f"{told}; {cure}." if cure else f"{told}.")


def _find_fault(value: Any, those: str | tuple[str, ...]) -> str | None:
    """Return what a value must do and does not."""
    if isinstance(those, tuple):
        words = f"be {', '.join(map(repr, those[:-1]))} or {those[-1]!r}"
        return None if value in those else words
    if not issubclass(type(value), Real):
        return "be a number"
    low, high = map(float, those[1:-1].split(","))
    above = value >= low if those[0] == "[" else value > low
    below = value <= high if those[-1] == "]" else value < high
    if above and below:
        return None
    if high < math.inf:
        return f"lie in {those}"
    least = f"at least {low:g}" if those[0] == "[" else f"above {low:g}" if low else "positive"
    return f"be {least}" if math.isfinite(value) else f"be {least} and finite"
