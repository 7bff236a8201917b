"""Local steps of fully connected networks on a GPU: one Triton program per client, all its steps.

A plan says beforehand whether a model and its work are of this kind and fit into a multiprocessor,
or else why not. Tiles are the fastest of a few, measured once a shape has had many walks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from equifed.contract import Index, LocalWork
from equifed.engines.stacked.dense_layers import ACTIVATIONS, DenseLayersRule, Linear
from equifed.engines.stacked.fused_shapes import DOWN, UP, Shape, Tiles, find_shared, pad
from equifed.engines.stacked.gradient_rules import GradientRule
from equifed.engines.stacked.samples import Chunk
from equifed.engines.stacked.walk import ChunkWork, Made
from equifed.engines.threads import Precision, empty_rows
from equifed.models.flat import FlatModel

PRECISIONS = ("full", "tf32")
"""Full ones are made of three products of rounded factors."""

LOSSES = ("cross_entropy", "binary_logistic", "squared")

OLDEST = "3.4"
"""Version of Triton, of those that the tests pass with."""

INTERPRETED = False
"""Whether programs also run on a CPU, through Triton's interpreter: for tests."""

ENTRIES = 1 << 26
"""Places of shuffled samples that are drawn at once; more clients come in parts."""

COMPARED = 1 << 26
"""Pairs of shuffle keys up to which comparing all, in one launch, is faster than sorting."""

MINE = 32
"""Samples of which one program finds the places in a shuffled order."""

PROGRAMS = 512
"""Programs of a pass over all samples at least: with fewer clients each is divided."""

DELTAS = 1 << 28
"""Numbers that such a pass keeps between its two halves; more clients come in parts."""

WRONG: dict[Precision, float] = {"full": 1e-3, "tf32": 3e-2}
"""Differences from the module that are no rounding: a driver or compiler of another version."""

PAYS = 200
"""Walks of a shape after which its tiles are measured: compiling them takes half a minute."""


def cut(rows: Tensor, some: slice) -> Tensor:
    """Return some rows; views cost microseconds, so all rows are no view."""
    return rows if some.start == 0 and some.stop >= len(rows) else rows[some]


class Fused:
    """The programs for one model; :func:`plan` says why there are none, where so."""

    def __init__(self, model: FlatModel, rule: DenseLayersRule, precision: Precision) -> None:
        layers = [layer for layer in rule.layers if isinstance(layer, Linear)]
        self._units, self._features = tuple(one.fan_out for one in layers), layers[0].fan_in
        self._bias, self._tanh = layers[0].bias, ACTIVATIONS[nn.Tanh] in rule.layers
        self._model, self._precision = model, precision
        self._checked: set[tuple[bool, int]] = set()  # passes: with gradients, of how many clients
        self._doubt: str | None = None
        self._walks: dict[object, int] = {}
        known = partial(Shape, precision=precision, shared=find_shared(model.device))
        self._shape = lru_cache(partial(known, self._features, self._units))

    def refuse(self, work: LocalWork, sizes: Any) -> str | None:
        """Return why local steps of clients of these sizes are not carried out here, if so."""
        if self._doubt is not None:
            return self._doubt
        if work.batch_size is None:
            return "local steps are on all samples"
        if work.radius is not None or work.onto is not None:
            return "local steps are projected"
        if work.scale is not None or work.hinge is not None:
            return "local steps transform gradients"
        if work.mean_gradient and work.proximal:
            return "mean gradients are asked for beside a proximal term"
        if not sizes.min():
            return "a client has no samples"
        return self._shape(min(work.batch_size, int(sizes.max()))).refused

    def walk(self, given: ChunkWork, inputs: Tensor, targets: Tensor, room: Tensor | None) -> Made:
        """Carry out the local steps of a chunk's clients."""
        from equifed.engines.stacked import fused_kernels

        work, chunk, x, corrected = given.work, given.chunk, given.x, given.correction
        longest = int(chunk.sizes[0])
        u = empty_rows(len(chunk), x) if room is None else room
        vectors, squares = {"displacement": u}, x.new_empty(len(chunk))
        for kind, wanted in (("snapshot", work.snapshot), ("average", work.average)):
            vectors |= {kind: empty_rows(len(chunk), x)} if wanted else {}
        shape = self._shape(min(work.batch_size or longest, longest))
        constants = self._constants(shape, given, targets)
        keep = 1 - work.lr * work.proximal
        held = keep - work.lr * self._model.l2
        numbers = (longest, work.steps or 0, work.epochs or 0, work.snapshot or 0,
                   work.lr, held, held if self._model.penalised is None else keep,
                   work.lr * work.proximal)  # fmt: skip
        more = [corrected, vectors.get("snapshot"), vectors.get("average")]
        for some, orders in self._orders(given):
            rows = [cut(u, some), *(x if one is None else cut(one, some) for one in more)]
            strides = [orders.shape[1], *(one.stride(0) for one in rows)]
            samples = inputs, targets, orders, cut(chunk.starts, some), cut(chunk.counts, some), x
            launch = partial(
                fused_kernels.walk[(len(orders),)], *samples, *rows, cut(squares, some), *strides,
                *numbers, **constants,
            )  # fmt: skip
            self._launch(launch, shape, tuple(constants.items()))
        if work.average or work.mean_gradient:
            steps = torch.as_tensor(given.steps, device=x.device).unsqueeze(1)
            if work.average:
                vectors["average"] /= steps
            if work.mean_gradient:  # there was no projection
                mean = u / (work.lr * steps).to(u)
                vectors["mean_gradient"] = mean if corrected is None else mean - corrected
        if work.multiplier and corrected is not None:  # c_i - c + proximal (x - u)
            vectors["multiplier"] = work.proximal * u - corrected
        return Made(vectors, torch.zeros_like(squares), squares)  # and no hinge

    def pass_over(
        self, x: Tensor, chunk: Chunk, inputs: Tensor, targets: Tensor, gradient: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Return losses and, if asked, gradients on all samples of a chunk's clients, no penalty.

        Losses alone are in full precision. None where they are not computed here.
        """
        shape = self._pass_shape(gradient)
        if shape.refused or self._doubt is not None or not chunk.sizes.min():
            return None
        longest = int(chunk.sizes[0])
        value, found = x.new_empty(len(chunk)), empty_rows(len(chunk) if gradient else 0, x)
        most = max(1, DELTAS // (shape.padded[0] * longest))
        for first in range(0, len(chunk), most):
            some = slice(first, first + most)
            here = inputs, targets, cut(chunk.starts, some), cut(chunk.counts, some), longest
            value[some] = self._pass(x, *here, shape, cut(found, some) if gradient else None)[0]
        if (kind := (gradient, len(chunk))) not in self._checked:
            self._checked.add(kind)
            self._doubt = self._compare(x, chunk, inputs, targets, value, found)
        return (value, found) if self._doubt is None else None

    def _compare(
        self, x: Tensor, chunk: Chunk, inputs: Tensor, targets: Tensor, value: Tensor, found: Tensor
    ) -> str | None:
        """Return what is wrong with the answer for the smallest client, by the module itself."""
        first, size = int(chunk.starts[-1]), int(chunk.sizes[-1])
        rows, told = inputs[first : first + size], targets[first : first + size]
        with torch.enable_grad():
            at = x.detach().clone().requires_grad_()
            loss = self._model.sample_losses(at, rows, told).mean()
            (true,) = torch.autograd.grad(loss, at)
        most = WRONG[self._precision]
        loss = loss.detach()
        away = (value[-1] - loss).abs() / (1 + loss.abs())
        if len(found):
            scale = true.norm() + rows.flatten(1).norm(dim=1).mean()
            away = torch.maximum(away, (found[-1] - true).norm() / scale)
        if bool(away <= most):  # which no NaN is
            return None
        return f"programs differ from the module by {float(away):.1g}, more than {most:g}"

    def evaluate(
        self, x: Tensor, inputs: Tensor, targets: Tensor, offsets: Index
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return clients' mean losses, how many samples are answered correctly, and which.

        None where they are not computed here: of one output, of no classes, without samples.
        """
        shape, counts = self._pass_shape(False), np.diff(offsets)
        known = shape.units[-1] > 1 and not targets.is_floating_point()
        if shape.refused or not known or not counts.min():
            return None
        correct = torch.empty(len(inputs), dtype=torch.bool, device=x.device)
        starts, sizes = torch.as_tensor(np.stack([offsets[:-1], counts]), device=x.device)
        here = inputs, targets, starts, sizes, int(counts.max())
        return *self._pass(x, *here, shape, None, correct), correct

    def _pass_shape(self, gradient: bool) -> Shape:
        """Return how a pass over all samples is laid out, losses alone in full precision."""
        precision = self._precision if gradient else "full"
        return replace(self._shape(UP[precision][0]), precision=precision, passing=True)

    def _pass(
        self, x: Tensor, inputs: Tensor, targets: Tensor, starts: Tensor, sizes: Tensor,
        longest: int, shape: Shape, found: Tensor | None, correct: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return losses and numbers of right answers of some clients.

        Gradients are put into ``found`` if it is there, right answers into ``correct``.
        """
        from equifed.engines.stacked.fused_passes import go_down, go_up

        count, padded, exact = len(starts), shape.padded[0], shape.precision == "full"
        (rows, up), (down_rows, down) = UP[shape.precision], DOWN[shape.precision]
        splits = max(1, min(PROGRAMS // count, -(-longest // rows)))
        high = (x.view(torch.int32) & -8192).view(x.dtype) if exact else x
        numbers, width = x.new_empty(2, count, splits), -(-longest // 16) * 16
        deltas, parts, stride = x, x, len(x)
        if found is not None:
            deltas = x.new_empty(count, width, padded)
            parts = found if splits == 1 else x.new_empty(count, splits, len(x))
            stride = found.stride(0) if splits == 1 else len(x)
        go_up[(count, splits)](
            inputs, targets, starts, sizes, x, high, x - high, *numbers,
            numbers if correct is None else correct, deltas, parts, width, stride, splits,
            ROWS=rows, GRADIENT=found is not None, HITS=correct is not None, EXACT=exact,
            **self._model_constants(shape, targets), **_options(up),
        )  # fmt: skip
        if found is not None:
            go_down[(count * splits, -(-shape.features // down.block))](
                inputs, starts, sizes, deltas, parts, width, stride, splits, 1.0,
                D=shape.features, H=shape.units[0], HB=padded, ROWS=down_rows, EXACT=exact,
                **_options(down),
            )  # fmt: skip
            if splits > 1:
                torch.sum(parts, dim=1, out=found)
        value, right = numbers.sum(dim=2)
        return value, right

    def _model_constants(self, shape: Shape, targets: Tensor) -> dict[str, Any]:
        """Return what programs are compiled for, by name: the model, and its padding."""
        units, padded = shape.units, shape.padded
        return {
            "LAYERS": len(units), "D": shape.features, "H": units[0], "G": units[-2:][0],
            "C": units[-1], "HB": padded[0], "GB": padded[-2:][0], "CB": padded[-1],
            "LOSS": self._model.known_loss, "CLASSES": not targets.is_floating_point(),
            "TARGETS": targets[:1].numel(), "TANH": self._tanh, "BIAS": int(self._bias),
        }  # fmt: skip

    def _constants(self, shape: Shape, given: ChunkWork, targets: Tensor) -> dict[str, Any]:
        """Return what the program of local steps is compiled for, by name."""
        work = given.work
        return self._model_constants(shape, targets) | {
            "BATCH": shape.batch, "ROWS": shape.rows,
            "CORRECTED": given.correction is not None, "PROXIMAL": bool(work.proximal),
            "SNAPSHOT": work.snapshot is not None, "AVERAGE": work.average,
            "EXACT": shape.precision == "full",
        }  # fmt: skip

    def _orders(self, given: ChunkWork) -> Iterator[tuple[slice, Tensor]]:
        """Yield which clients, and their shuffled samples, pass after pass."""
        from equifed.engines.stacked.fused_kernels import draw_keys, draw_orders

        chunk, longest = given.chunk, int(given.chunk.sizes[0])
        turns = -(-chunk.sizes // min(given.work.batch_size or longest, longest))
        passes = int((-(-given.steps // turns)).max())
        salt, block = given.stream.at("shuffle").salt(), min(1024, pad(longest))
        most = max(1, ENTRIES // (passes * longest))
        for first in range(0, len(chunk), most):
            some = slice(first, first + most)
            ids = cut(chunk.ids, some)
            drawn = ids.new_empty(len(ids) * passes, longest)
            tell = drawn, ids, cut(chunk.counts, some), salt, passes, longest
            if len(drawn) * longest**2 <= COMPARED:
                draw_orders[len(drawn), -(-longest // MINE)](*tell, MINE, 2 * MINE)
            else:
                draw_keys[len(drawn), -(-longest // block)](*tell, block)
                drawn = drawn.argsort(dim=1, stable=True)
            yield some, drawn.view(len(ids), -1)

    def _launch(self, launch: Callable[..., Any], shape: Shape, key: object) -> None:
        """Launch a program with the best tiles that are known, or find them."""
        seen = self._walks[key] = self._walks.get(key, 0) + 1
        fitting, tiles = shape.fitting, _MEASURED.get(key)
        if tiles is None and seen >= PAYS and self._model.device.type == "cuda":
            times = {one: _measure(partial(launch, **_options(one))) for one in fitting}
            tiles = _MEASURED[key] = min(times, key=times.__getitem__)
        launch(**_options(tiles or fitting[0]))


_MEASURED: dict[object, Tiles] = {}
"""The fastest tiles, by what a program is compiled for."""


def _options(tiles: Tiles) -> dict[str, int]:
    return {"BLOCK": tiles.block, "num_warps": tiles.warps, "num_stages": tiles.stages}


def _measure(launch: Callable[[], Any]) -> float:
    """Return the seconds of a launch, after one that compiles."""
    launch()
    torch.cuda.synchronize()
    start = time.perf_counter()
    launch()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def plan(
    model: FlatModel, rule: GradientRule, precision: Precision, inputs: Tensor, targets: Tensor
) -> Fused | str:
    """Return the programs for a model on these samples, or why there are none."""
    why = _refuse_place(model, precision) or _refuse_samples(model, inputs, targets)
    if why is not None:
        return why
    if not isinstance(rule, DenseLayersRule):
        return "the model is not fully connected"
    linear = [layer for layer in rule.layers if isinstance(layer, Linear)]
    between = rule.layers[1::2]
    chain = linear == rule.layers[::2] and len(rule.layers) % 2 == 1 and len(linear) <= 3
    if not chain or any(layer not in ACTIVATIONS.values() for layer in between):
        return "the model is not a chain of at most three linear maps with ReLU or tanh between"
    if len({id(layer) for layer in between}) > 1 or len({layer.bias for layer in linear}) > 1:
        return "its layers differ in activation or bias"
    return Fused(model, rule, precision)


def _refuse_place(model: FlatModel, precision: Precision) -> str | None:
    cuda = model.device.type == "cuda"
    if not cuda and not INTERPRETED:
        return f"the device is {model.device.type}"
    if cuda and torch.cuda.get_device_capability(model.device) < (8, 0):
        return "the GPU has no tensor cores for float32"
    if model.dtype != torch.float32 or precision not in PRECISIONS:
        held = str(model.dtype).removeprefix("torch.")
        return f"the model is in {held}, its products in {precision}"
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    if TorchVersion(triton.__version__) < TorchVersion(OLDEST):
        return f"Triton {triton.__version__} is older than {OLDEST}"
    return None


def _refuse_samples(model: FlatModel, inputs: Tensor, targets: Tensor) -> str | None:
    if model.own_size:
        return "clients have own parameters"
    if model.known_loss not in LOSSES:
        return "the loss is weighted or unknown"
    whole = inputs.is_contiguous() and targets.is_contiguous() and inputs.is_floating_point()
    if not whole or (model.known_loss == "cross_entropy" and targets.is_floating_point()):
        return "samples are not as the programs read them"
    return None
