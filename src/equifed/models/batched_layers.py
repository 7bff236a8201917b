"""Layers written as plain products, for programs that batch over clients.

``torch.func.vmap`` has no rule for the fused kernels behind ``nn.LSTM`` and ``nn.GRU``: on a CPU it
falls back to one client after the other, on a GPU it fails. It batches convolutions as grouped
ones, which GPUs are slow at; under ``torch.compile`` patches times a matrix are faster. The layers
here compute the same from the same parameters.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from equifed.models.dropout import AddressedAttention


def write_out(module: nn.Module, convolutions: bool = False) -> None:
    """Let recurrent layers, attention, and convolutions if asked, compute by plain products.

    Only layers that are exactly torch's own are changed, and only where they do nothing special.
    """
    for part in module.modules():
        plain = isinstance(part, nn.RNNBase) and (part.dropout == 0 or part.num_layers == 1)
        if type(part) is nn.LSTM and part.proj_size == 0 and plain:
            part.__class__ = WrittenLSTM
        elif type(part) is nn.GRU and plain:
            part.__class__ = WrittenGRU
        elif type(part) is AddressedAttention:
            part.products = True
        elif convolutions and type(part) is nn.Conv2d and _is_simple(part):
            part.__class__ = WrittenConv2d


def _is_simple(part: nn.Conv2d) -> bool:
    whole = part.groups == 1 and part.dilation == (1, 1)
    return whole and part.padding_mode == "zeros" and not isinstance(part.padding, str)


class _Recurrent(nn.RNNBase):
    """Layers and directions of a recurrent network, one product per step."""

    states = 1

    def forward(self, inputs: Any, start: Any = None) -> Any:
        """Return the states of all steps, and the last ones of every layer and direction."""
        if isinstance(inputs, PackedSequence) or inputs.dim() != 3:
            raise ValueError(
                f"{type(self).__bases__[-1].__name__} of packed or unbatched sequences cannot be "
                "batched over clients; use engine='loop'."
            )
        hidden = inputs.transpose(0, 1) if self.batch_first else inputs
        begins = self._begins(hidden, start)
        ends: list[list[Tensor]] = []
        for layer in range(self.num_layers):
            outputs = []
            for reverse in range(1 + self.bidirectional):
                begin = [s[len(ends)] for s in begins]
                seen, end = self._run(hidden, begin, f"_l{layer}{'_reverse' * reverse}", reverse)
                outputs.append(seen)
                ends.append(end)
            hidden = torch.cat(outputs, dim=2)
        last = tuple(torch.stack(each) for each in zip(*ends, strict=True))
        out = hidden.transpose(0, 1) if self.batch_first else hidden
        return out, last if self.states > 1 else last[0]

    def _begins(self, hidden: Tensor, start: Any) -> tuple[Tensor, ...]:
        if start is not None:
            return tuple(start) if self.states > 1 else (start,)
        rows = self.num_layers * (1 + self.bidirectional)
        return (hidden.new_zeros(rows, hidden.shape[1], self.hidden_size),) * self.states

    def _run(
        self, inputs: Tensor, state: list[Tensor], name: str, reverse: int
    ) -> tuple[Tensor, list[Tensor]]:
        first, second = (
            (getattr(self, f"weight_{k}{name}"), getattr(self, f"bias_{k}{name}", None))
            for k in ("ih", "hh")
        )
        gates = functional.linear(inputs, *first).unbind(0)  # all steps in one product
        seen = []
        for gate in reversed(gates) if reverse else gates:
            state = self.step(gate, functional.linear(state[0], *second), state)
            seen.append(state[0])
        return torch.stack(seen[::-1] if reverse else seen), state

    @abstractmethod
    def step(self, gate: Tensor, recurrent: Tensor, state: list[Tensor]) -> list[Tensor]:
        """Return the next state: hidden, and the cell of an LSTM."""


class WrittenLSTM(_Recurrent, nn.LSTM):
    """``nn.LSTM`` by plain products."""

    states = 2

    @override
    def step(self, gate: Tensor, recurrent: Tensor, state: list[Tensor]) -> list[Tensor]:
        i, f, g, o = (gate + recurrent).chunk(4, dim=-1)
        cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return [torch.sigmoid(o) * torch.tanh(cell), cell]


class WrittenGRU(_Recurrent, nn.GRU):
    """``nn.GRU`` by plain products."""

    @override
    def step(self, gate: Tensor, recurrent: Tensor, state: list[Tensor]) -> list[Tensor]:
        (r, z, n), (other_r, other_z, other_n) = gate.chunk(3, dim=-1), recurrent.chunk(3, dim=-1)
        reset, update = torch.sigmoid(r + other_r), torch.sigmoid(z + other_z)
        new = torch.tanh(n + reset * other_n)
        return [new + update * (state[0] - new)]


class WrittenConv2d(nn.Conv2d):
    """``nn.Conv2d`` as patches times a matrix."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the images' convolutions."""
        if inputs.dim() == 3:  # one image
            return self.forward(inputs.unsqueeze(0)).squeeze(0)
        patches = self._patches(inputs)
        # All samples side by side: one large product for a client, not one for each sample, whose
        # batches would repeat the weights and add up as many gradients.
        out = self.weight.flatten(1) @ patches.flatten(0, 2).flatten(1)
        if self.bias is not None:
            out = out + self.bias.unsqueeze(1)
        return out.view(len(out), *patches.shape[3:]).transpose(0, 1)

    def _patches(self, inputs: Tensor) -> Tensor:
        """Return what the kernel sees, (channels, its rows, its columns, samples, rows, columns).

        Shifted images side by side: compiled, both ways are plain copies and sums. ``unfold`` would
        compute anew what comes before the layer for every place of the kernel, and its derivative
        would be a sum in no order. Columns first: the many copies then are of whole rows.
        """
        assert not isinstance(self.padding, str)
        (high, wide), (down, across) = self.kernel_size, self.stride
        above, beside = self.padding
        images = functional.pad(inputs, (beside, beside, above, above)).transpose(0, 1)
        bottom, right = images.shape[2] - high + 1, images.shape[3] - wide + 1
        columns = torch.stack([images[..., k : k + right : across] for k in range(wide)], dim=1)
        return torch.stack([columns[..., k : k + bottom : down, :] for k in range(high)], dim=1)
