"""Whether to compile a network's gradients on a GPU: a few exchanges of a run tell.

Compiling takes half a minute and may halve what comes after it. So the first exchanges of local
steps are timed; where those to come take long enough, gradients are compiled, timed again, and kept
if they are faster. Torch keeps compiled programs on disk (``TORCHINDUCTOR_CACHE_DIR``): a second
run compiles in seconds.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from equifed.contract.local import LocalWork
from equifed.engines.stacked.gradient_rules import (
    FunctionRule,
    GradientRule,
    PenalisedRule,
    StepSamples,
)
from equifed.engines.stacked.samples import Chunk
from equifed.models.flat import FlatModel

WHERE = ("cuda",)
"""Devices on which it may pay."""

WATCHED = 4
"""Exchanges that are timed each way: the first compiles, the second is recorded as a graph."""

SECONDS, EACH = 15.0, 0.0125
"""What compiling takes for samples of one shape, about: so much, and so much an operation."""

SAVED = 0.5
"""The part of an exchange's time that compiling may save."""

BETTER = 0.97
"""What is compiled must take less than this share of the time before."""


OPTIONS = {"recompile_limit": 64, "allow_rnn": True}
"""Of the compiler, where it has them: models of a process, each with its shapes, and LSTMs."""


class CompiledRule(GradientRule):
    """A rule by ``torch.func``, compiled if that is possible: slow at the start."""

    def __init__(
        self, model: FlatModel, plain: FunctionRule, shapes: set[torch.Size] | None = None
    ) -> None:
        self._plain, self._shapes = plain, shapes
        """Shapes of samples, each with a program; others are computed without. None: all."""
        written = FunctionRule(model, patches=model.device.type == "cuda")
        dynamic = None if shapes is None else False
        self._compiled = torch.compile(written.compute, dynamic=dynamic)
        has = partial(hasattr, torch._dynamo.config)
        self._options = {key: value for key, value in OPTIONS.items() if has(key)}

    @override
    def gradient(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, Tensor]:
        if self._shapes is None or samples.inputs.shape in self._shapes:
            try:
                with torch._dynamo.config.patch(self._options):
                    return self._compiled(u, samples)
            except Exception as error:  # a user's own will come again
                said = (str(error).splitlines() or [type(error).__name__])[0]
                told = f"The model cannot be compiled ({said}); it is computed without."
                warnings.warn(told, UserWarning, stacklevel=2)
                self._shapes = set()
        return self._plain.gradient(u, samples)


class Trial:
    """Times exchanges of local steps, plain and compiled, and takes the faster rule."""

    def __init__(
        self, rule: PenalisedRule, compiled: Callable[[set[torch.Size]], CompiledRule],
        changed: Callable[[], None], tell: Callable[[str], object],
    ) -> None:  # fmt: skip
        assert isinstance(rule.data, FunctionRule)
        self._rule, self._plain, self._make = rule, rule.data, compiled
        self._changed, self._tell = changed, tell
        self._left, self._before, self._settled = 0, 0.0, False
        self._kinds: list[object] = []
        self._times: list[float] = []

    def expect(self, rounds: int) -> None:
        """Hear how many exchanges are to come at least."""
        self._left = 0 if self._settled else rounds
        self._kinds, self._times = [], []

    @contextmanager
    def watch(self, work: LocalWork, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Watch an exchange, if it is to be known whether to compile."""
        if self._left <= 0:
            yield
            return
        each = [(len(c), c.width, work.steps_for(c.sizes).tobytes()) for c in chunks]
        kind = work.batch_size, each  # others of it have samples of the same shapes
        if [kind] != self._kinds[-1:]:
            self._kinds, self._times = [*self._kinds, kind], []
            self._changed()
            self._plain.counts = {}
        _wait()
        start = time.perf_counter()
        yield
        _wait()
        self._times.append(time.perf_counter() - start)
        self._left -= 1
        if len(self._kinds) > WATCHED:
            self._use(self._plain)
            self._end("not compiled: the clients of an exchange change")
        elif len(self._times) == WATCHED:
            self._decide() if self._rule.data is self._plain else self._settle()

    def _decide(self) -> None:
        """Compile, if what is left takes long enough."""
        self._before = min(self._times[2:])
        seconds, counts = self._left * self._before, self._plain.counts or {}
        cost = sum(SECONDS + EACH * count for count in counts.values())
        if seconds * SAVED < cost:
            told = f"the {self._left} exchanges to come take {seconds:.3g} s, compiling {cost:.0f}"
            self._end(f"not compiled: {told} s or so")
            return
        self._times = []
        self._use(self._make({*counts}))

    def _settle(self) -> None:
        """Keep what is compiled, if it is faster."""
        after, self._settled = min(self._times[2:]), True
        told = f"compiled in {self._times[0]:.3g} s"
        if after >= BETTER * self._before:
            self._use(self._plain)
            told += " and left again"
        times = f"{1e3 * after:.3g} ms an exchange, {1e3 * self._before:.3g} without"
        self._end(f"{told}: {times}")

    def _use(self, rule: GradientRule) -> None:
        self._rule.data = rule
        self._changed()

    def _end(self, told: str) -> None:
        self._left, self._plain.counts = 0, None
        self._tell(f"Gradients on the GPU: {told}.")


def _wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
