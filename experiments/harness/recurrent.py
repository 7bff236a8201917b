"""A recurrent model for the roles of Shakespeare that is small enough for a processor."""

from __future__ import annotations

from torch import Tensor, nn

from equifed.models.architectures import NextToken


class Recent(nn.Module):
    """A model of the last tokens of a sequence only."""

    def __init__(self, inner: nn.Module, recent: int) -> None:
        super().__init__()
        self.inner, self.recent = inner, recent

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to scores (batch, outputs)."""
        scores: Tensor = self.inner(tokens[:, -self.recent :])
        return scores


def recent_lstm(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    recent: int = 30,
    embedding: int = 8,
    hidden: int = 64,
    layers: int = 1,
) -> nn.Module:
    """LSTM that predicts the next token from the last ``recent`` ones.

    The windows of Shakespeare hold 80 characters; most of the time goes into the early ones, and
    they say little about the next character.
    """
    (length,) = input_shape
    if not 1 <= recent <= length:
        raise ValueError(f"recent must lie in 1..{length}, the length of a sample, got {recent}.")
    return Recent(NextToken(outputs, outputs, embedding, hidden, layers), recent)
