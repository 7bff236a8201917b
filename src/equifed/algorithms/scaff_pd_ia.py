"""SCAFF-PD-IA: SCAFF-PD for relative fairness, with a phi that may choose itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from equifed.algorithms.safeguarded import Automatic
from equifed.algorithms.scaff_pd import ScaffPD, State
from equifed.contract import Clients, Federated, Info, LocalSGD, Losses, Proof, Stream, Vector
from equifed.contract.absence import PATIENCE
from equifed.contract.arrays import check_settings
from equifed.objectives import Relative, RelativeFairness, SaddleObjective, WorstCase
from equifed.steps.automatic import AutoSteps
from equifed.steps.phi import beyond_theory, choose_phi
from equifed.steps.schedules import Schedule


@dataclass(frozen=True)
class ScaffPDIAState(State):
    """SCAFF-PD's state, the phi in force (None before it is chosen), and the rounds so far.

    ``before`` holds the losses at which phi was chosen, those of phi = 0.
    """

    phi: float | None = None
    round: int = 0
    before: Losses | None = None


@dataclass(frozen=True)
class ScaffPDIA(Relative, Automatic, Federated):
    r"""SCAFF-PD-IA: SCAFF-PD on the integrated set of relative fairness.

    .. math:: \min_x \max_{\lambda \in \Lambda_\varphi(A, B)} \sum_i \lambda_i f_i(x), \qquad
              \Lambda_\varphi(A, B) = \Bigl\{\frac{a - \varphi b}{1 - \varphi}\Bigr\}

    With a number for phi it is ``ScaffPD(RelativeFairness(phi, upper, lower, rho))`` (Algorithm 1;
    the dual step is exact). With ``phi = "auto"`` it follows Section 5.3: ``warmup`` rounds with
    phi = 0, then phi from equation (8) at the saddle point reached
    (:func:`equifed.steps.phi.choose_phi`, two exchanges for each Hessian-vector product of its
    conjugate gradients), then on with that phi. Events record the choice and the trade-off that it
    predicts, weights larger than any proof covers, and a phi that in truth (as many rounds later)
    serves every client worse than phi = 0 did.

    ``local.radius`` is that of the ball Theta onto which the server's step is projected, as in
    Algorithm 1, and ``local.onto`` projects onto any other Theta; the local steps are not
    projected, as in Algorithm 2. Where Theta binds, several local
    steps turn the update away from the gradient, and the solution is exact for one local step
    alone (the paper assumes that it does not bind, Assumption 7).

    Parameters
    ----------
    phi : float or "auto"
        Weight of the well-served side, in [0, 1).
    upper, lower, rho
        As for :class:`equifed.objectives.RelativeFairness`.
    warmup : int
        Rounds with phi = 0 before phi is chosen.
    local, steps, gradient_batch_size, participation, loss_batch_size, patience
        As for :class:`equifed.algorithms.scaff_pd.ScaffPD`.
    cap, scale
        As for :class:`equifed.objectives.RelativeFairness`.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.ScaffPDIA(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.6
    """

    phi: float | Literal["auto"] = "auto"
    upper: SaddleObjective = WorstCase()  # noqa: RUF009 - a frozen value
    lower: SaddleObjective = WorstCase()  # noqa: RUF009 - a frozen value
    rho: float = 0.0
    warmup: int = 50
    local: LocalSGD = LocalSGD(lr=1.0, steps=8)  # noqa: RUF009 - a frozen value
    steps: Schedule = AutoSteps()  # noqa: RUF009 - a frozen value
    gradient_batch_size: int | None = None
    participation: float = 1.0
    loss_batch_size: int | None = None
    patience: int = PATIENCE
    cap: float | None = None
    scale: float | None = None

    one_sum: ClassVar = True

    def __post_init__(self) -> None:
        if isinstance(self.phi, str) and self.phi != "auto":
            raise ValueError(f'phi is a number in [0, 1) or "auto", got {self.phi!r}.')
        check_settings(self, warmup="[1, inf]")
        self._with(0.0 if isinstance(self.phi, str) else self.phi)  # refuses wrong arguments now

    def init(self, clients: Clients, x: Vector) -> ScaffPDIAState:
        """Return the state before the first round."""
        given = None if isinstance(self.phi, str) else self.phi
        first = self._with(given or 0.0).init(clients, x)
        return ScaffPDIAState(x, first.weights, phi=given)

    def round(
        self, state: ScaffPDIAState, clients: Clients, stream: Stream
    ) -> tuple[ScaffPDIAState, Info]:
        """Return the state after one round of SCAFF-PD; choose phi first when its time has come."""
        notes: tuple[str, ...] = ()
        if chosen := state.phi is None and state.round >= self.warmup:
            state, notes = self._choose(state, clients, stream)
        elif state.phi is not None and state.round == 0:
            notes = beyond_theory(self.objective_at(state), clients)
        moved, info = self._with(state.phi or 0.0).round(state, clients, stream)
        moved = replace(moved, x=self.local.project(moved.x.clone()))  # Theta
        before = info.losses if chosen else state.before
        after = replace(state, **vars(moved) | {"round": state.round + 1, "before": before})
        numbers = {**info.numbers, "phi": state.phi or 0.0}
        proof = info.proof
        if isinstance(proof, Proof):
            proof = replace(proof, final=state.phi is not None)
        if state.before is not None and info.losses is not None:
            notes += self._regret(state, info.losses - state.before)
        return after, replace(info, numbers=numbers, notes=info.notes + notes, proof=proof)

    def objective_at(self, state: ScaffPDIAState) -> RelativeFairness:
        """Return the objective with the phi in force."""
        return RelativeFairness(
            state.phi or 0.0, self.upper, self.lower, self.rho, self.cap, self.scale
        )

    def _with(self, phi: float) -> ScaffPD:
        objective = RelativeFairness(phi, self.upper, self.lower, self.rho, self.cap, self.scale)
        local = replace(self.local, radius=None, onto=None)
        return ScaffPD(
            objective, local, self.steps, self.gradient_batch_size, self.participation,
            self.loss_batch_size, self.patience,
        )  # fmt: skip

    def _choose(
        self, state: ScaffPDIAState, clients: Clients, stream: Stream
    ) -> tuple[ScaffPDIAState, tuple[str, ...]]:
        """Choose phi at the saddle point of phi = 0 and start anew there with the larger set."""
        plain = self.objective_at(state)
        choice = choose_phi(clients, state.x, state.weights, plain, stream.at("phi"))
        fresh = replace(state, losses=None, sizes=None, phi=choice.phi)
        relative = self.objective_at(fresh)
        fresh = replace(fresh, weights=relative.prox(state.weights, 0.0))
        return fresh, choice.notes() + beyond_theory(relative, clients)

    def _regret(self, state: ScaffPDIAState, rise: Losses) -> tuple[str, ...]:
        """Say that every client is worse off, once the new problem had as long as the first."""
        if state.round < 2 * self.warmup or not (rise > 0).all():
            return ()
        return (f"with phi = {state.phi:.4g} every client is worse off than with phi = 0",)
