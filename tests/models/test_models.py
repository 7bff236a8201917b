"""Models have the promised shapes, and start where their address says."""

import numpy as np
import pytest
import torch
from torch import nn

from equifed.contract.streams import Stream
from equifed.models import LOSSES, MODELS, build, initialise

SHAPES = {
    "linear": (3, 4),
    "logistic": (7,),
    "mlp": (1, 28, 28),
    "cnn": (3, 16, 16),
    "lstm": (12,),
}


def inputs(name, batch_size=5):
    draw = torch.Generator().manual_seed(0)
    if name == "lstm":
        return torch.randint(9, (batch_size, *SHAPES[name]), generator=draw)
    return torch.randn(batch_size, *SHAPES[name], generator=draw)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_gives_one_row_of_outputs_per_sample(name):
    module = build(name, SHAPES[name], 9)
    assert module(inputs(name)).shape == (5, 9)
    assert list(module.buffers()) == []  # no running statistics


@pytest.mark.parametrize("name", MODELS)
def test_outputs_of_a_sample_do_not_depend_on_its_batch(name):
    module = initialise(build(name, SHAPES[name], 9), Stream(0)).double()
    x = inputs(name) if name == "lstm" else inputs(name).double()
    together = module(x)
    for i in range(5):
        torch.testing.assert_close(module(x[i : i + 1])[0], together[i])


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in MODELS if n != "lstm"])
def test_models_run_under_vmap_over_clients(name):
    module = build(name, SHAPES[name], 9)
    models = [initialise(build(name, SHAPES[name], 9), Stream(s)) for s in range(3)]
    stacked = {
        key: torch.stack([dict(m.named_parameters())[key].detach() for m in models])
        for key, _ in module.named_parameters()
    }
    x, y = inputs(name), torch.arange(5)

    def loss(parameters):
        return LOSSES["cross_entropy"](
            torch.func.functional_call(module, parameters, (x,)), y
        ).sum()

    slopes = torch.func.vmap(torch.func.grad(loss))(stacked)
    for i, model in enumerate(models):
        alone = torch.autograd.grad(
            LOSSES["cross_entropy"](model(x), y).sum(), list(model.parameters())
        )
        for key, slope in zip(stacked, alone, strict=True):
            torch.testing.assert_close(slopes[key][i], slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "logistic"])
def test_convex_models_start_at_zero(name):
    module = initialise(build(name, (4,), 3), Stream(5))
    assert flat(build(name, (4,), 3)).abs().max() == flat(module).abs().max() == 0


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm"])
def test_the_start_depends_on_the_address_alone(name):
    before = torch.random.get_rng_state()
    module = build(name, SHAPES[name], 9)
    first = flat(initialise(module, Stream(1)))
    torch.rand(17)
    again = flat(initialise(build(name, SHAPES[name], 9), Stream(1)))
    repeated = flat(initialise(module, Stream(1)))
    other = flat(initialise(module, Stream(2)))
    assert torch.equal(first, again) and torch.equal(first, repeated)
    assert not torch.equal(first, other)
    torch.random.set_rng_state(before)


@pytest.mark.parametrize("name", MODELS)
def test_the_global_random_state_is_untouched(name):
    before = torch.random.get_rng_state()
    initialise(build(name, SHAPES[name], 9), Stream(1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_both_precisions_start_at_the_same_point():
    single, double = build("mlp", (4,), 3), build("mlp", (4,), 3).double()
    initialise(single, Stream(3))
    initialise(double, Stream(3))
    assert flat(double).dtype == torch.float64
    assert torch.equal(flat(single), flat(double).float())


def test_the_start_has_the_default_spread_of_torch():
    """Uniform on +-1/sqrt(fan_in): standard deviation 1/sqrt(3 fan_in)."""
    weight = initialise(build("mlp", (400,), 10, hidden=[300]), Stream(0))[1].weight.detach()
    assert weight.abs().max() <= 1 / 20
    np.testing.assert_allclose(weight.std(), 1 / np.sqrt(1200), rtol=0.01)
    assert abs(weight.mean()) < 1e-3


def test_layers_draw_different_numbers():
    first, second = (
        p.detach()
        for n, p in initialise(build("mlp", (9,), 9, hidden=[9]), Stream(0)).named_parameters()
        if "weight" in n
    )
    assert not torch.equal(first, second)


def test_parameters_are_counted_as_described():
    assert flat(build("mlp", (784,), 10, hidden=[50])).numel() == 784 * 50 + 50 + 50 * 10 + 10
    assert flat(build("linear", (10,), 1, bias=False)).numel() == 10
    assert flat(build("mlp", (4,), 2, hidden=[])).numel() == 10


def test_dropout_and_group_norm_are_put_where_asked():
    kinds = [type(m) for m in build("mlp", (4,), 2, hidden=[3, 3], dropout=0.5).modules()]
    assert kinds.count(nn.Dropout) == 2
    kinds = [type(m) for m in build("cnn", (1, 28, 28), 2, groups=4).modules()]
    assert kinds.count(nn.GroupNorm) == 2
    kinds = [type(m) for m in build("cnn", (1, 28, 28), 2).modules()]
    assert nn.GroupNorm not in kinds and nn.BatchNorm2d not in kinds


def test_cnn_takes_images_without_a_channel():
    assert build("cnn", (28, 28), 3)(torch.ones(2, 28, 28)).shape == (2, 3)


def test_lstm_reads_the_order_of_tokens():
    module = initialise(build("lstm", (4,), 6), Stream(0))
    forth, back = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[3, 2, 1, 0]])
    assert not torch.allclose(module(forth), module(back))


def own_model(input_shape, outputs, scale=1.0):
    layer = nn.Linear(input_shape[0], outputs)
    with torch.no_grad():
        layer.bias.fill_(scale)
    return layer


def not_a_model(input_shape, outputs):
    return outputs


def test_own_factories_are_imported_and_called_alike():
    name = f"{__name__}:own_model"
    import sys

    assert __name__ in sys.modules
    before = torch.random.get_rng_state()
    first, second = (build(name, (3,), 2, scale=2.5) for _ in range(2))
    assert torch.equal(flat(first), flat(second)) and (first.bias == 2.5).all()
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(ValueError, match=r"must return a torch\.nn\.Module, got int"):
        build(f"{__name__}:not_a_model", (3,), 2)


@pytest.mark.parametrize(
    ("name", "shape", "params", "message"),
    [
        ("resnet", (3,), {}, "no model 'resnet'; choose from linear, logistic"),
        ("no_such_package:f", (3,), {}, "Cannot import the model"),
        ("mlp", (3,), {"layers": 2}, "no parameter 'layers'; it has hidden, dropout"),
        ("mlp", (3,), {"hidden": [0]}, "hidden must be whole numbers above 0"),
        ("mlp", (3,), {"dropout": 1.0}, r"dropout must lie in \[0, 1\)"),
        ("cnn", (784,), {}, r"needs images .* got samples of shape \(784,\)"),
        ("cnn", (1, 3, 3), {}, "at least 4 pixels"),
        ("lstm", (3, 4), {}, "needs sequences of tokens"),
    ],
)
def test_models_that_do_not_fit_are_refused(name, shape, params, message):
    with pytest.raises(ValueError, match=message):
        build(name, shape, 2, **params)


def test_a_model_needs_an_output():
    with pytest.raises(ValueError, match="at least one output"):
        build("linear", (3,), 0)
