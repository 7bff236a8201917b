"""How long the server waits for clients, and what it does about those that do not answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from equifed.training.play_round import MissingPolicy


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of an exchange, and the policy for missing clients.

    An error and silence are the same event: the client is missing.

    Parameters
    ----------
    on_missing : {"fail", "wait", "continue"}
        "fail": stop the run (it can be resumed). "wait": ask again, every ``pause`` seconds and
        for at most ``wait`` seconds, then stop. "continue": repeat the round with those who
        answer, as long as they are a ``quorum`` of all clients.
    timeout : float
        Seconds until a silent client counts as missing.
    grace : float
        Under "continue", seconds to wait for the rest once a quorum has answered.
    quorum : float
        Fraction of all clients that must take part, under "continue".
    wait, pause : float
        See "wait".
    poll : float
        Most seconds between two looks at the mailbox; at the start of an exchange they are fewer.
    """

    on_missing: Literal["fail", "wait", "continue"] = "fail"
    timeout: float = 600.0
    grace: float = 60.0
    quorum: float = 0.5
    wait: float = 3600.0
    pause: float = 5.0
    poll: float = 0.1

    def __post_init__(self) -> None:
        if self.on_missing not in ("fail", "wait", "continue"):
            raise ValueError(
                f"on_missing must be 'fail', 'wait' or 'continue', got {self.on_missing!r}."
            )
        for name in ("timeout", "grace", "wait", "pause", "poll"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a number of seconds of at least 0, got {value}.")
        if not 0 <= self.quorum <= 1:
            raise ValueError(f"quorum must be a fraction in [0, 1], got {self.quorum}.")

    def to_policy(self) -> MissingPolicy:
        """Return the policy for the training loop, which repeats rounds.

        >>> Deadlines("wait").to_policy().policy
        'fail'
        """
        again = self.on_missing == "continue"
        return MissingPolicy("continue", self.quorum) if again else MissingPolicy("fail")
