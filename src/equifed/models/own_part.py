"""The own part: parameters that every client keeps, chosen, fitted and put into the module.

At fixed shared parameters the own part of one client is a convex problem of a few numbers: the rows
of its design are what enters the last layer and a one, or a one for its bias alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from equifed.contract.local import OwnL2, OwnSteps, own_strength
from equifed.models.losses import FittedLoss
from equifed.models.newton import fit_linear

OwnParameters = Mapping[str, Tensor]
"""Own parameters by name, clients first: (N, ...)."""

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
# Words that name own parameters
WORDS = {
    "bias": "the bias of the last layer",
    "head": "weight and bias of the last layer",
    "norm": "scales and shifts of the normalisation layers",
}

# How far random models lie from the start at which own parameters must show an effect: the outputs
# of a wide network with parameters of size 1 are so large that a bias is lost in them
SCALES = (1.0, 0.1, 0.01)
EFFECT = 1e-4  # smallest change of outputs, as a part of their size, that is not rounding


@dataclass(frozen=True)
class OwnPart:
    r"""Parameters v_i that client i keeps, beside the shared ones u.

    .. math:: f_i(u, v_i) = \text{mean loss of client i's samples}
              + \frac{\text{l2}}{2} |u|^2 + \frac{\text{own\_l2}}{2} |v_i|^2
    """

    names: tuple[str, ...]
    steps: OwnSteps
    l2: OwnL2

    def strength(self, samples: int) -> float:
        """Return the penalty's strength for a client with so many training samples."""
        return own_strength(self.l2, samples)

    @property
    def penalty(self) -> str:
        """The penalty in words."""
        return f"own_l2 = {self.l2}" if isinstance(self.l2, str) else f"own_l2 = {self.l2:g}"

    @property
    def varies(self) -> bool:
        """Whether the strength depends on the client's number of samples."""
        return isinstance(self.l2, str)

    def __str__(self) -> str:
        how = {
            "profile": "profile losses: each client's is its best one for the shared model",
            "joint": "joint local steps on shared and own parameters, kept from round to round",
            "alternating": "alternating local steps: the own part first, then the shared one",
        }
        return f"own part {', '.join(self.names)} by {how[self.steps]}; {self.penalty}"


def choose_own(module: nn.Module, own: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the trained parameters that clients keep, in the module's order.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> choose_own(net, "bias"), choose_own(net, "norm"), choose_own(net, ["0.*"])
    (('2.bias',), ('1.weight', '1.bias'), ('0.weight', '0.bias'))
    """
    alone, patterns = isinstance(own, str), [own] if isinstance(own, str) else own
    if not isinstance(own, Sequence) or not own or not all(isinstance(o, str) for o in own):
        raise ValueError(
            f"own is one of {', '.join(map(repr, WORDS))}, or names and patterns of parameters, "
            f"got {own!r}."
        )
    trained = {p: n for n, p in module.named_parameters() if p.requires_grad}
    held = module.named_parameters(remove_duplicate=False)
    every = {n: trained[p] for n, p in held if p.requires_grad}  # tied ones have a first name
    wanted: set[str] = set()
    for pattern in patterns:
        found = [name for name in every if fnmatchcase(name, pattern)]
        if alone and pattern in WORDS:
            found = _by_word(module, pattern)
        if not found:
            what = WORDS.get(pattern, f"named {pattern!r}") if alone else repr(pattern)
            words = f"; the words are {', '.join(WORDS)}" if alone else ""
            if pattern in WORDS and not alone:
                words = f"; {pattern!r} must be given alone: own={pattern!r}"
            raise ValueError(
                f"own: the model trains no parameter {what}; it trains "
                f"{', '.join(trained.values())}{words}."
            )
        wanted |= {every[name] for name in found}
    if wanted == set(trained.values()):
        raise ValueError(
            f"own: nothing would be shared, since the model trains {', '.join(trained.values())} "
            "alone; leave some parameters to all clients."
        )
    return tuple(name for name in trained.values() if name in wanted)


def is_last_bias(module: nn.Module, names: Sequence[str]) -> bool:
    """Tell whether own parameters are the bias of the last layer and nothing else."""
    last, first = _by_word(module, "bias"), {p: n for n, p in module.named_parameters()}
    return bool(last) and list(names) == [first[module.get_parameter(name)] for name in last]


def _by_word(module: nn.Module, word: str) -> list[str]:
    """Return the trained parameters that a word names; none if the module has no such."""
    parts = {
        place: [f"{place}.{n}" if place else n for n, p in owned if p.requires_grad]
        for place, part in module.named_modules()
        if (owned := list(part.named_parameters(recurse=False)))
    }
    if word == "norm":
        norms = [place for place, part in module.named_modules() if isinstance(part, NORMS)]
        return [name for place in norms for name in parts.get(place, [])]
    trained = [names for names in parts.values() if names]
    last = trained[-1] if trained else []
    return last if word == "head" else [n for n in last if n.rpartition(".")[2] == "bias"]


def check_effect(
    outputs: Callable[[Tensor], Tensor], like: Tensor, own: Mapping[str, torch.Size]
) -> None:
    """Refuse own parameters, the last ones of the vector, whose change no output shows."""
    draw = torch.Generator().manual_seed(0)

    def drawn(size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64).to(like.device, like.dtype)

    at = like.numel() - sum(shape.numel() for shape in own.values())
    for name, shape in own.items():
        for scale in SCALES:
            x = like + scale * drawn(like.numel())
            other = x.clone()
            other[at : at + shape.numel()] += drawn(shape.numel())
            with torch.no_grad():
                before, after = outputs(x), outputs(other)
            if not bool((after - before).abs().max() <= EFFECT * before.abs().max()):
                break
        else:
            raise ValueError(
                f"own: the parameter {name} has no effect on the model's outputs (a layer after it "
                "takes it out again); leave it out."
            )
        at += shape.numel()


def read_last_layer(
    module: nn.Module, names: Sequence[str], run: Callable[[nn.Module], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return what own parameters are multiplied with (m, q), and outputs (m, k), in float64."""
    place, layer = _find_last_layer(module, names)
    seen: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _, given, __: seen.append(given[0].detach()))
    with hook:
        outputs = run(module).double()
    if not len(outputs):  # nothing was run
        outputs = outputs.new_zeros(0, layer.out_features)
    entered = torch.cat(seen).double() if seen else outputs.new_zeros(0, layer.in_features)
    if entered.dim() == 2 and len(entered) == len(outputs):
        wanted = entered @ layer.weight.double().T
        wanted = wanted + (0.0 if layer.bias is None else layer.bias.double())
        alike = wanted.shape == outputs.shape
        if alike and torch.allclose(wanted, outputs, rtol=1e-3, atol=1e-4):
            ones = entered.new_ones(len(entered), 1)
            return torch.cat([entered, ones], dim=1) if len(names) == 2 else ones, outputs
    raise ValueError(
        f"The model's outputs are not those of its last linear layer {place!r}, so the own part "
        "cannot be fitted at fixed shared parameters; train with own= instead."
    )


def _find_last_layer(module: nn.Module, names: Sequence[str]) -> tuple[str, nn.Linear]:
    """Return the linear layer whose bias, or weight and bias, the names are."""
    places, _, parts = zip(*(name.rpartition(".") for name in names), strict=True)
    layer, kinds = module.get_submodule(places[0]), ({"bias"}, {"weight", "bias"})
    if not isinstance(layer, nn.Linear) or len(set(places)) > 1 or set(parts) not in kinds:
        raise ValueError(
            f"An own part is fitted at fixed shared parameters where it is the bias, or weight and "
            f"bias, of the last linear layer, not {', '.join(names)}; for others train with own=."
        )
    return places[0], layer


def split_own(
    v: Tensor, names: Sequence[str], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Return v (q, k) by the names of the own parameters: the last row is the bias."""
    parts = {"bias": v[-1], "weight": v[:-1].T}
    return {n: parts[n.rpartition(".")[2]].reshape(shapes[n]).clone() for n in names}


def check_fit(loss: FittedLoss | None, l2: float) -> FittedLoss:
    """Refuse losses that own parts are not fitted to, and penalties with which there is no best."""
    if loss is None:
        raise ValueError(
            "Own parts are fitted to cross_entropy, logistic and squared losses without class "
            "weights; the model was trained with another."
        )
    if not (l2 >= 0 and math.isfinite(l2)) or (l2 == 0 and loss != "squared"):
        raise ValueError(
            f"own_l2 must be a number above 0, got {l2:g}: the best own part of a client without "
            "some class would be infinite; give own_l2=1e-3."
        )
    return loss


def fit_new_client(
    module: nn.Module, names: Sequence[str], run: Callable[[nn.Module], Tensor], targets: Tensor,
    loss: FittedLoss | None, l2: float,
) -> nn.Module:  # fmt: skip
    """Return the module with the best own parameters for a client's samples."""
    own = {name: module.get_parameter(name) for name in names}
    design, _ = read_last_layer(module, names, run)
    known = check_fit(loss, l2)
    with torch.no_grad():
        plain = run(put_own(module, {name: torch.zeros_like(p) for name, p in own.items()}))
    v = fit_linear(design, plain.double(), targets, known, l2)
    return put_own(module, split_own(v, names, {name: p.shape for name, p in own.items()}))


def check_own(module: nn.Module, own: OwnParameters, clients: Sequence[str]) -> None:
    """Refuse own parameters that are not those of the module and of the clients."""
    held = dict(module.named_parameters(remove_duplicate=False))
    for name, rows in own.items():
        if name not in held:
            raise ValueError(
                f"own: the module has no parameter {name!r}; it has {', '.join(held)}."
            )
        wanted = (len(clients), *held[name].shape)
        if tuple(rows.shape) != wanted:
            raise ValueError(
                f"own: {name} has the shape {tuple(rows.shape)}, expected {wanted}: one row for "
                f"each of {len(clients)} clients; take both from the same run."
            )


def put_own(module: nn.Module, own: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of the module with these own parameters."""
    found = copy.deepcopy(module)
    with torch.no_grad():
        for name, value in own.items():  # not by load_state_dict: tied parameters are there twice
            found.get_parameter(name).copy_(value)
    return found
