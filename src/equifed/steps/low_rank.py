"""Inner products in a metric of low rank, without applying it to every vector."""

from __future__ import annotations

from equifed.contract.arrays import Vector

PANEL = 256
"""Rows whose products with all rows before them are taken at once: half of all is enough."""


def multiply_in_low_rank(
    rows: Vector, places: Vector, basis: Vector, values: Vector, rest: Vector
) -> Vector:
    r"""Return :math:`\langle v_i, P^{-1} v_j\rangle` for the rows v of a matrix, in float64.

    P is U diag(values) U' + rest (1 - U U') in each block of coordinates. With z = U'v and
    v' = v - U z, the part of v that is orthogonal to the eigenvectors, this is

    .. math:: \sum_b \langle z_i, \mathrm{diag}(\mathrm{values}_b)^{-1} z_j\rangle
              + \langle v'_i, v'_j\rangle / \mathrm{rest}_b ,

    sums of squares on the diagonal: nothing cancels, however large the eigenvalues are.
    """
    out = rows.new_zeros((len(rows), len(rows))).double()
    for k, block in enumerate(places):
        b = k if len(basis) == len(places) else 0
        part = rows[:, block].double()
        along = part @ basis[b]
        part.addmm_(along, basis[b].T, alpha=-1.0)
        _add_products(out, part / rest[b].sqrt())
        _add_products(out, along / values[b].sqrt())
    return out.tril() + out.tril(-1).T


def multiply_exactly(rows: Vector, others: Vector) -> Vector:
    """Return all inner products of rows with a few others, in float64, a few rows at a time."""
    import torch

    return torch.cat([some.double() @ others.T for some in torch.split(rows, PANEL)])


def _add_products(out: Vector, rows: Vector) -> None:
    """Add all inner products of rows to the lower triangle."""
    for begin in range(0, len(rows), PANEL):
        end = begin + PANEL
        out[begin:end, :end].addmm_(rows[begin:end], rows[:end].T)
