"""Many clients at once in one process; results equal the loop engine's to rounding.

Samples stay flat and ragged. Clients are taken in chunks: their models are the rows of one matrix,
moved by one batched program. Vectors of all clients are kept if they fit into ``memory``; else a
handle makes them again, the same ones, chunk by chunk, while it adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from typing_extensions import override

from equifed.contract import ClientVectors, Index, LocalWork, Losses, Stream, Weights
from equifed.data.federation import Federation
from equifed.engines.in_process import InProcessClients
from equifed.engines.minibatches import Minibatches
from equifed.engines.ordered_sums import (
    DenseVectors,
    InProcessVectors,
    has_one_order,
    in_process,
    put_rows,
    to_numpy,
)
from equifed.engines.own import plain_work
from equifed.engines.stacked.compiling import WHERE, CompiledRule, Trial
from equifed.engines.stacked.cuda_graph import Graphs
from equifed.engines.stacked.dense_layers import DenseLayersRule, ProfileRule, choose_rule
from equifed.engines.stacked.fused import Fused, plan
from equifed.engines.stacked.gradient_rules import (
    FunctionRule,
    GradientRule,
    PenalisedRule,
    StepSamples,
)
from equifed.engines.stacked.least_squares import LeastSquares
from equifed.engines.stacked.samples import (
    CPU_CHUNK,
    CUDA_CHUNK,
    PROFILE_CHUNK,
    Chunk,
    PlannedBatches,
    Supply,
    as_slice,
    common_widths,
    round_up,
    sample_bytes,
    split_into_chunks,
)
from equifed.engines.stacked.walk import (
    ChunkWalk,
    ChunkWork,
    Made,
    RemadeVectors,
    Run,
    square_lengths,
)
from equifed.engines.threads import Precision, Workspace, empty_rows, row_bytes
from equifed.models.losses import SampleLoss

MEMORY = 1 << 30
"""Default bound, in bytes, on the client vectors that the engine keeps; a GPU may keep more."""

SHARE = 8
"""One part in so many of a GPU's memory is the default bound there."""


PADDED = 4
"""A GPU's minibatches are padded to multiples of this for tensor cores, which want 16 bytes."""

CALL = 1 << 17
"""What another chunk costs, in samples times parameters: clients of different sizes share one as
long as their padding costs less."""


def bound_memory(device: torch.device) -> int:
    """Return the default bound on the client vectors that are kept on a device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return MEMORY
    return max(MEMORY, torch.cuda.get_device_properties(device).total_memory // SHARE)


class NotBatched(ValueError):
    """The module cannot be batched over clients, and why."""


class StackedClients(InProcessClients):
    """Clients in chunks; see :func:`equifed.simulate` for the arguments."""

    engine = "stacked"

    def __init__(
        self, data: Federation, model: nn.Module | str, loss: SampleLoss | str = "auto", *,
        device: str | torch.device = "cpu", memory: int | None = None, chunk: int | None = None,
        fast: bool = True, compiled: bool | Literal["auto"] = "auto",
        precision: Precision = "full", **common: Any,
    ) -> None:  # fmt: skip
        if memory is not None and memory < 1:
            raise ValueError(f"memory is a bound in bytes of at least 1, got {memory}.")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is a number of clients of at least 1, got {chunk}.")
        self._chunk, self._precision = chunk, precision
        self._notes: dict[str, bool] = {}  # and whether they are still to be told
        super().__init__(data, model, loss, device=device, **common)
        if precision != "full":
            self.coarse = f"gradients are computed in {precision}, whose rounding no bound covers"
        self._memory = bound_memory(self.model.device) if memory is None else memory
        self.workspace = Workspace(self._memory)
        self._all_sizes: Index = self._sizes
        self._chunks: dict[int | None, tuple[Index, list[Chunk]]] = {}
        self._choose_ways(choose_rule(self.model, fast))
        self._check_batched()
        self.trial = self._try_compiling() if compiled == "auto" else None
        plain = self.rule.data
        if compiled is True and isinstance(plain, FunctionRule):
            self.rule.data = CompiledRule(self.model, plain)

    def _choose_ways(self, rule: GradientRule) -> None:
        """Choose how gradients and local steps are computed."""
        strengths = None
        if self.own is not None and self.own.varies:  # with the number of samples
            each = [[self.own.strength(int(n))] for n in self._sizes]
            strengths = torch.tensor(each, dtype=self.model.dtype, device=self.model.device)
        self.rule = PenalisedRule(rule, self.model.l2, self._precision, self.model, strengths)
        if self.offsets is not None:
            self.rule = ProfileRule(rule, self.model, self.offsets, self._precision)
        layer = LeastSquares.layer_of(rule, self.model.loss)
        if self.own is not None or self.model.penalised is not None:
            layer = None  # its coordinates know one strength for all parameters
        # Profile losses have no graphs: the number of Newton steps varies.
        on_device = self.model.device.type == "cuda" and self.offsets is None
        self.fused = plan(self.model, rule, self._precision, self._inputs, self._targets)
        self._evaluator.quick = self.fused.evaluate if isinstance(self.fused, Fused) else None
        self.graphs = Graphs(self.rule, bool(self.model.dropouts)) if on_device else None
        # Written-out gradients touch no module, so several threads may use them at once; the
        # matrices that least squares remembers are in one place, which they may not.
        written_out = isinstance(rule, DenseLayersRule) and layer is None
        self.independent = written_out and self.model.device.type == "cpu"
        least = None if layer is None else LeastSquares(layer, self.model.l2, self._memory)
        self.least_squares = least

    def _try_compiling(self) -> Trial | None:
        """Return what finds out whether to compile gradients, where that can pay."""
        rule, graphs = self.rule, self.graphs
        if not isinstance(rule.data, FunctionRule) or self.model.device.type not in WHERE:
            return None
        compiled = partial(CompiledRule, self.model, rule.data)
        forget = graphs.forget if graphs is not None else lambda: None
        notes = self._notes  # not self: a cycle would hold the GPU's memory
        return Trial(rule, compiled, forget, lambda told: notes.setdefault(told, True))

    @override
    def expect(self, algorithm: Any, rounds: int, stream: Stream, done: int = 0) -> str | None:
        if self.trial is not None:
            self.trial.expect(rounds - done)
        return super().expect(algorithm, rounds, stream, done)

    def worth_measuring(self) -> bool:
        """Tell whether another engine could be faster: no gradients of its own, data at hand."""
        written_out = isinstance(self.rule.data, DenseLayersRule)
        return not written_out and self.own is None and self._inputs.nbytes <= self._memory

    # The verbs.

    @override
    def measure_losses(self, x: Tensor, stream: Stream, batch_size: int | None) -> Tensor:
        values = x.new_zeros(len(self.index))
        with torch.no_grad():
            for chunk in self.chunks(batch_size):
                found = self.pass_over(x, chunk, gradient=False) if batch_size is None else None
                if found is not None:
                    total = found[0] + self.model.penalty(x)
                elif self.own is not None:  # every client has a model of its own
                    blocks = self.supply(chunk, stream, batch_size).at(0)
                    total = self.rule.begin(chunk.ids).value(self.models(x, chunk), blocks)
                else:
                    total = self.model.penalty(x)
                    for block in self.supply(chunk, stream, batch_size).at(0):
                        total = total + self._mean_losses(x, block)
                put_rows(values, chunk.places, total)
        return values

    def _mean_losses(self, x: Tensor, samples: StepSamples) -> Tensor:
        """Return weighted sums of the losses of each client's samples at one model."""
        keys = None if samples.keys is None else samples.keys.flatten(0, 1)
        inputs, targets = samples.inputs.flatten(0, 1), samples.targets.flatten(0, 1)
        each = self.model.sample_losses(x, inputs, targets, keys)
        return (each.view_as(samples.weights) * samples.weights).sum(dim=1)

    @override
    def differentiate(
        self, x: Tensor, stream: Stream, batch_size: int | None
    ) -> tuple[Losses, ClientVectors]:
        def make(clients: StackedClients, chunk: Chunk, room: Tensor | None) -> Made:
            return clients._make_gradients(chunk, x, stream, batch_size)

        run = Run(self, x, batch_size, ["gradient"], ("loss", "squared gradient norm"), make)
        if self.rows_at_once(1) < len(self.index):
            losses = to_numpy(self.measure_losses(x, stream, batch_size))
            return self.require_finite(losses, "loss"), RemadeVectors(run, "gradient")
        matrices, numbers = run.everything()
        return numbers(), DenseVectors(matrices["gradient"])

    def _make_gradients(
        self, chunk: Chunk, x: Tensor, stream: Stream, batch_size: int | None
    ) -> Made:
        """Return losses and gradients of a chunk's clients."""
        found = self.pass_over(x, chunk) if batch_size is None else None
        if found is not None:
            gradient, value = self.rule.penalise(x.expand(len(chunk), -1), found[1], found[0])
        else:
            rule, samples = self.rule.begin(chunk.ids), self.supply(chunk, stream, batch_size).at(0)
            gradient, value = rule.gradient(self.models(x, chunk), samples)
        gradient = gradient[:, : self.model.size]
        return Made({"gradient": gradient}, value, square_lengths(gradient))

    @override
    def move(
        self, x: Tensor, work: LocalWork, stream: Stream, control: ClientVectors | None,
        target: Tensor | None, slopes: Weights | None,
    ) -> tuple[Mapping[str, ClientVectors], Losses | None]:  # fmt: skip
        kept, index = None if control is None else in_process(control), self.index

        def make(clients: StackedClients, chunk: Chunk, room: Tensor | None) -> Made:
            given = clients._begin_chunk(chunk, x, work, stream, index, kept, target, slopes)
            return clients.walk(given, room)

        what, kinds = ("threshold", "squared length of the local update"), list(work.results)
        run = Run(self, x, work.batch_size, kinds, what, make, moves_own=self.remembers_own())
        if self.rows_at_once(len(kinds)) < len(self.index):
            now = work.hinge is not None or self.remembers_own()
            thresholds = run.everything(keep=False)[1]() if now else None
            return {kind: RemadeVectors(run, kind) for kind in kinds}, thresholds
        chunks = self.chunks(work.batch_size)
        with nullcontext() if self.trial is None else self.trial.watch(work, chunks):
            matrices, numbers = run.everything()
        if self.model.device.type == "cuda" and work.hinge is None:  # it is still computing
            return {kind: DenseVectors(m, numbers) for kind, m in matrices.items()}, None
        thresholds = numbers()
        return {kind: DenseVectors(matrix) for kind, matrix in matrices.items()}, thresholds

    def _begin_chunk(
        self, chunk: Chunk, x: Tensor, work: LocalWork, stream: Stream, index: Index,
        control: InProcessVectors | None, target: Tensor | None, slopes: Weights | None,
    ) -> ChunkWork:  # fmt: skip
        """Return what a chunk's clients are to do; ``index`` are those who were asked."""
        slope, correction, size = None, None, None
        places = as_slice(np.searchsorted(index, chunk.clients))
        if slopes is not None:
            slope = torch.as_tensor(slopes[places], dtype=x.dtype, device=x.device)
        if target is not None and control is not None:
            correction = target - control.of_chunk(chunk, places)
            if work.correction != 1:
                correction.mul_(work.correction)
        if self.remembers_own():
            x, size = self.models(x, chunk), self.model.size
            if correction is not None:  # of the shared part only
                correction = pad(correction, (0, self.model.own_size))
        return ChunkWork(x, work, stream, chunk, correction, slope, size)

    @override
    def best_own(self, x: Tensor) -> Iterator[tuple[slice | Index, Tensor, Tensor, Tensor]]:
        assert isinstance(self.rule, ProfileRule)
        for chunk in self.chunks(None):
            samples = self.supply(chunk, Stream(0), None).at(0)
            yield chunk.places, *self.rule.best(x.expand(len(chunk), -1), samples)

    # Chunks of clients.

    def models(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return the model of each of a chunk's clients, with own parameters that it keeps."""
        if not self.remembers_own():
            return x.expand(len(chunk), -1)
        own = self.own_rows.start.index_select(0, chunk.ids)
        rows = empty_rows(len(chunk), x.new_empty(self.model.size + self.model.own_size))
        rows[:, : self.model.size], rows[:, self.model.size :] = x, own
        return rows

    def chunks(self, batch_size: int | None) -> list[Chunk]:
        """Return the clients in chunks of similar sizes, so that padding stays small."""
        index, known = self._chunks.get(batch_size, (None, []))
        if index is not self.index:
            length_for, device = partial(self._length_for, batch_size), self.model.device
            given = self._offsets, *self._widths(batch_size), length_for, device
            known = list(split_into_chunks(self.index, *given))
            self._chunks[batch_size] = (self.index, known)
        return known

    @override
    def divide_as(self, sizes: Index, groups: Index) -> None:
        super().divide_as(sizes, groups)
        self._all_sizes = sizes  # batches are padded for all of them

    def _widths(self, batch_size: int | None) -> tuple[Index, bool]:
        """Return the columns of every client's batches, and whether chunks may mix them."""
        used = self._all_sizes if batch_size is None else np.minimum(self._all_sizes, batch_size)
        if has_one_order(self.model.dtype, self.model.device):
            # What every layer makes of a client's batch then begins at a whole block of memory.
            rows = [self._inputs[0].numel(), *(n for s in self.model.shapes.values() for n in s)]
            multiple = math.lcm(*(8 // math.gcd(8, n) for n in rows))
            return common_widths(used, multiple, CALL // self.model.size), False
        rounded = self.model.device.type == "cuda" and self._precision != "full"
        padded = rounded and batch_size is not None
        return round_up(used, PADDED if padded else 1), True

    def _length_for(self, batch_size: int | None, size: int) -> int:
        """Return how many clients share a chunk of which the largest has so many samples."""
        model = (self.model.size + self.model.own_size) * self.model.dtype.itemsize
        budget = CPU_CHUNK if self.offsets is None else PROFILE_CHUNK
        budget = CUDA_CHUNK if self.model.device.type == "cuda" else budget
        width = size if batch_size is None else min(size, batch_size)
        most = budget // (model + width * sample_bytes(self._inputs))
        if self._chunk is not None or not 1 < most < len(self.index) or not self.independent:
            return self._chunk or max(1, most)
        turns = math.ceil(len(self.index) / (most * torch.get_num_threads()))
        return math.ceil(len(self.index) / (turns * torch.get_num_threads()))

    def supply(self, chunk: Chunk, stream: Stream, batch_size: int | None) -> Supply:
        """Return the samples of a chunk's clients, step by step."""
        drops, dtype = bool(self.model.dropouts), self.model.dtype
        given = stream, chunk.ids, chunk.sizes, batch_size, dtype, drops, chunk.width, chunk.starts
        return self._supply(chunk, Minibatches(*given))

    def _supply(self, chunk: Chunk, batches: Minibatches | PlannedBatches) -> Supply:
        return Supply(self._inputs, self._targets, chunk, batches)

    def walk(self, given: ChunkWork, room: Tensor | None) -> Made:
        """Carry out the local steps of a chunk's clients, in the fastest way there is."""
        chunk, quick, graphs = given.chunk, self.least_squares, self.graphs
        here = room[chunk.places] if room is not None and isinstance(chunk.places, slice) else None
        if (fused := self._choose_fused(given)) is not None:
            return fused.walk(given, self._inputs, self._targets, here)
        supply = self.supply(chunk, given.stream, given.work.batch_size)
        if quick is not None and (walk := quick.walk(given, supply, here)) is not None:
            return walk
        if self.own is not None and self.own.steps == "alternating":
            return self._alternate(given, here).carry_out(self.rule, supply)
        replayed = None if graphs is None else graphs.walk(given, self._supply, here)
        return replayed or ChunkWalk(given, here).carry_out(self.rule, supply)

    def pass_over(
        self, x: Tensor, chunk: Chunk, gradient: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Return losses and gradients on all samples by programs, where there are some."""
        if not isinstance(self.fused, Fused):
            return None
        return self.fused.pass_over(x, chunk, self._inputs, self._targets, gradient)

    def _choose_fused(self, given: ChunkWork) -> Fused | None:
        """Return what carries out local steps as Triton programs, or note why nothing does."""
        fused = self.fused if isinstance(self.fused, Fused) else None
        why = fused.refuse(given.work, given.chunk.sizes) if fused else self.fused
        if self.model.device.type == "cuda":
            told = "one Triton program per client" if why is None else f"not as one program: {why}"
            self._notes.setdefault(f"Local steps on the GPU: {told}.", True)
        return fused if why is None else None

    @override
    def take_notes(self) -> list[tuple[str, str]]:
        new = [note for note, fresh in self._notes.items() if fresh]
        self._notes.update(dict.fromkeys(new, False))
        return [("note", note) for note in new]

    def _alternate(self, given: ChunkWork, room: Tensor | None) -> ChunkWalk:
        """Return the walk of the shared parameters after as many plain steps on the own ones."""
        work, shared = plain_work(given.work), slice(given.size)
        first = ChunkWalk(replace(given, work=work, correction=None, slope=None), held=shared)
        supply = self.supply(given.chunk, given.stream.at("own"), work.batch_size)
        first.take(range(first.longest), self.rule.begin(given.chunk.ids), supply, None)
        return ChunkWalk(replace(given, x=first.u), room, held=slice(given.size, None))

    def _check_batched(self) -> None:
        """Refuse a module that cannot be batched over clients, by trying."""
        try:
            pair = self.subset(np.flatnonzero(self.sizes)[:2])
            one = 1 if self.offsets is None else None  # profile losses are of all samples
            for chunk in pair.chunks(one):
                pair._make_gradients(chunk, self.model.flatten(self._template), Stream(0), one)
        except RuntimeError as error:
            raise NotBatched(
                f"{type(self._template).__name__} cannot be batched over clients "
                f"({str(error).splitlines()[0][:120]}); use the loop engine."
            ) from error

    def rows_at_once(self, matrices: int) -> int:
        """Return of how many clients that many vectors each stay within the memory bound."""
        return self._memory // (matrices * row_bytes(self.model.size, self.model.dtype))
