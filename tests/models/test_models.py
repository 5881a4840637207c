"""Every model: its size, its outputs, its errors, and that it trains on both engine paths alike."""

from __future__ import annotations

import importlib.util
import inspect
import sys

import pytest
import torch
import torch.nn.functional as F
from problems import train
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import flatfed as ff
from flatfed.core.flat import Layout
from flatfed.models import MODELS
from flatfed.models.recurrent import lstm_states
from flatfed.training.config import Config

torch.set_num_threads(1)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install 'flatfed[transformers]'",
)
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)
TINY_VIT = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "image_size": 8,
    "patch_size": 4,
}
TINY_SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 4,
    "depths": [2, 2],
    "num_heads": [1, 2],
    "window_size": 2,
}
STILL_SWIN = {**TINY_SWIN, "drop_path_rate": 0.0}
TINY_LSTM = {"embedding": 4, "hidden": 6}


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def build(name, input_shape, classes, seed=0, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](input_shape, classes, **options)


def parameters(name, input_shape, classes, **options):
    """The number of parameters, without memory for them."""
    with torch.device("meta"):
        model = MODELS[name](input_shape, classes, **options)
    count = sum(value.numel() for value in model.parameters())
    assert Layout(model).size == count, "every parameter is trained"
    return count


# -- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "input_shape", "classes", "options", "expected"),
    [
        ("logistic_regression", MNIST, 10, {}, 7_850),
        ("mlp", MNIST, 10, {}, 118_282),
        ("feddyn_cnn", CIFAR, 10, {}, 797_962),
        ("feddyn_cnn", CIFAR, 100, {}, 815_332),
        ("feddyn_cnn", CIFAR, 10, {"width": 16}, 51_274),
        ("lenet5", MNIST, 10, {}, 61_706),
        ("lenet5", CIFAR, 10, {}, 62_006),
        ("emnist_cnn", MNIST, 62, {}, 1_206_590),
        ("femnist_cnn", MNIST, 62, {}, 6_603_710),
        ("convnet", CIFAR, 10, {}, 320_010),
        ("convnet", MNIST, 10, {}, 317_706),
        ("vgg11", CIFAR, 10, {}, 9_272_790),
        ("vgg11", CIFAR, 100, {}, 9_377_508),
        ("resnet18", CIFAR, 10, {}, 11_173_962),
        ("resnet18", CIFAR, 100, {}, 11_220_132),
        ("resnet18", (3, 64, 64), 200, {}, 11_271_432),
        ("resnet18", CIFAR, 10, {"stem": "imagenet"}, 11_181_642),
        ("resnet18", CIFAR, 100, {"stem": "imagenet"}, 11_227_812),
        ("resnet18", CIFAR, 10, {"norm": "batch"}, 11_173_962),
        ("char_lstm", (80,), 80, {}, 133_520),
    ],
)
def test_parameter_counts(name, input_shape, classes, options, expected):
    assert parameters(name, input_shape, classes, **options) == expected


@needs_transformers
@pytest.mark.parametrize(
    ("name", "ten", "hundred", "thousand"),
    [
        ("vit_base", 85_806_346, 85_875_556, 86_567_656),
        ("swin_small", 48_844_948, 48_914_158, 49_606_258),
        ("swin_base", 86_753_474, 86_845_724, 87_768_224),
    ],
)
def test_parameter_counts_of_transformers(name, ten, hundred, thousand):
    """With 1,000 classes the published 86, 50 and 88 million."""
    for classes, expected in ((10, ten), (100, hundred), (1000, thousand)):
        assert parameters(name, (3, 224, 224), classes) == expected


# -- the registry ------------------------------------------------------------------------------------------


def test_the_registry_holds_functions_under_their_names():
    for name, make in MODELS.items():
        first, second, *options = inspect.signature(make).parameters.values()
        assert make.__name__ == name and make.__doc__
        assert (first.name, second.name) == ("input_shape", "classes")
        assert all(option.default is not inspect.Parameter.empty for option in options)


def test_models_are_built_by_name_from_a_config():
    config = Config.checked(
        {
            "training": {"rounds": 1},
            "data": {"clients": 4},
            "model": {"name": "convnet", "width": 4, "depth": 2},
        }
    )
    model = config.make_model(config.make_federation())
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_config_with_too_small_images_is_refused_in_one_line():
    config = Config.checked({"training": {"rounds": 1}, "data": {"clients": 4}, "model": {"name": "vgg11"}})
    with pytest.raises(ff.FlatfedError, match=r"^model.vgg11: input_shape = \[1, 8, 8\]: .* too small"):
        config.make_model(config.make_federation())


# -- outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "input_shape", "options"),
    [
        ("logistic_regression", MNIST, {}),
        ("mlp", MNIST, {}),
        ("feddyn_cnn", CIFAR, {}),
        ("feddyn_cnn", MNIST, {}),
        ("lenet5", CIFAR, {}),
        ("lenet5", MNIST, {}),
        ("emnist_cnn", MNIST, {}),
        ("femnist_cnn", MNIST, {}),
        ("convnet", CIFAR, {}),
        ("convnet", MNIST, {}),
        ("vgg11", CIFAR, {}),
        ("vgg11", (3, 64, 64), {"hidden": 7, "width": 2}),
        ("resnet18", CIFAR, {}),
        ("resnet18", CIFAR, {"norm": "batch"}),
        ("resnet18", (3, 64, 64), {"stem": "imagenet"}),
    ],
)
def test_images_become_logits(name, input_shape, options):
    model = build(name, input_shape, 7, **options)
    with torch.no_grad():
        outputs = model(torch.randn(2, *input_shape))
    assert outputs.shape == (2, 7) and bool(outputs.isfinite().all())
    assert bool((outputs.logsumexp(1).abs() > 0.01).all()), "logits, not log-probabilities"


def test_characters_become_logits():
    assert build("char_lstm", (80,), 80)(torch.randint(80, (2, 80))).shape == (2, 80)
    model = build("char_lstm", (5,), 3, vocabulary=9, layers=1)
    assert model(torch.full((2, 5), 8)).shape == (2, 3)


def test_the_same_seed_gives_the_same_weights():
    for name, shape in (("resnet18", CIFAR), ("char_lstm", (80,)), ("lenet5", CIFAR)):
        first, again, other = (build(name, shape, 10, seed).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(value, again[key]) for key, value in first.items())
        assert not all(torch.equal(value, other[key]) for key, value in first.items())


def test_resnet_has_group_norm_with_two_groups_and_nothing_to_average():
    model = build("resnet18", CIFAR, 10, width=4)
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == 20 and {module.num_groups for module in norms} == {2}
    assert not list(model.buffers())


def test_resnet_with_batch_norm_keeps_group_norm_after_the_stem():
    model = build("resnet18", CIFAR, 10, norm="batch", width=4)
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.GroupNorm | nn.BatchNorm2d)]
    assert kinds == [nn.GroupNorm] + [nn.BatchNorm2d] * 19


def test_resnet_halves_the_image_in_the_right_places():
    sides = {"cifar": [32, 32, 16, 8, 4], "imagenet": [16, 8, 4, 2, 1]}
    for stem, expected in sides.items():
        model, seen, value = build("resnet18", CIFAR, 10, stem=stem, width=2), [], torch.zeros(1, *CIFAR)
        with torch.no_grad():
            for number, layer in enumerate(model[:-3]):
                value = layer(value)
                if number == 0 or getattr(layer, "residual", None) is not None:
                    seen.append(value.shape[-1])
        assert [seen[0], *seen[2::2]] == expected


def test_the_imagenet_stem_starts_from_hes_distribution():
    model = build("resnet18", CIFAR, 10, stem="imagenet")
    largest = max((m for m in model.modules() if isinstance(m, nn.Conv2d)), key=lambda m: m.weight.numel())
    assert float(largest.weight.detach().std()) == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    default = build("resnet18", CIFAR, 10)
    largest = max((m for m in default.modules() if isinstance(m, nn.Conv2d)), key=lambda m: m.weight.numel())
    assert float(largest.weight.detach().std()) == pytest.approx((1 / (3 * 512 * 9)) ** 0.5, rel=0.01)


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "input_shape", "options", "message"),
    [
        ("lenet5", (64,), {}, r"^input_shape = \[64\]: this model takes images"),
        ("resnet18", (80,), {}, r"^input_shape = \[80\]: this model takes images"),
        ("vit_base", (80,), {}, r"^input_shape = \[80\]: this model takes images"),
        ("feddyn_cnn", (1, 8, 8), {}, r"^input_shape = \[1, 8, 8\]: the images are too small"),
        ("char_lstm", (1, 8, 8), {}, r"^input_shape = \[1, 8, 8\]: char_lstm takes sequences"),
        ("resnet18", CIFAR, {"stem": "cifra"}, r"^stem = 'cifra': input should be 'cifar' or 'imagenet'"),
        ("resnet18", CIFAR, {"norm": "layer"}, r"^norm = 'layer': input should be 'group' or 'batch'"),
    ],
)
def test_impossible_models_are_refused_in_one_line(name, input_shape, options, message):
    with pytest.raises(ff.FlatfedError, match=message) as caught:
        MODELS[name](input_shape, 10, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["vit_base", "swin_small", "swin_base"])
def test_a_missing_extra_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ff.FlatfedError) as caught:
        MODELS[name]((3, 224, 224), 10)
    assert str(caught.value) == "transformers: not installed; pip install 'flatfed[transformers]'"


# -- training on both paths --------------------------------------------------------------------------------

SETTINGS = {"rounds": 2, "local_steps": 2, "batch_size": 2, "lr": 0.05, "workers": 1}


def images(input_shape, classes, clients=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return ff.Federation.from_tensors(
        [
            (
                torch.randn(4, *input_shape, generator=generator).to(dtype),
                torch.randint(classes, (4,), generator=generator),
            )
            for _ in range(clients)
        ]
    )


def characters(length, classes, clients=3):
    generator = torch.Generator().manual_seed(1)
    return ff.Federation.from_tensors(
        [
            (
                torch.randint(classes, (4, length), generator=generator),
                torch.randint(classes, (4,), generator=generator),
            )
            for _ in range(clients)
        ]
    )


def both_paths_agree(model, federation, algorithm, tolerance=2e-5, **settings):
    runs = {
        path: train(model, federation, algorithm, path=path, **{**SETTINGS, **settings})
        for path in ("client", "matrix")
    }
    one, other = runs["client"], runs["matrix"]
    assert (one.path, other.path) == ("client", "matrix")
    start = Layout(model).vector(model)
    assert float((one.server["model"] - start).abs().max()) > 100 * tolerance, "it was not trained"
    for name, value in one.server.items():
        torch.testing.assert_close(other.server[name], value, rtol=0, atol=tolerance, msg=name)
    for left, right in zip(one.history, other.history, strict=True):
        assert right["train_loss"] == pytest.approx(left["train_loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "input_shape", "options"),
    [
        ("logistic_regression", (1, 8, 8), {}),
        ("mlp", (1, 8, 8), {}),
        ("feddyn_cnn", (1, 16, 16), {}),
        ("lenet5", MNIST, {}),
        ("femnist_cnn", (1, 4, 4), {}),
        ("convnet", (3, 8, 8), {"width": 6, "depth": 2}),
        ("vgg11", CIFAR, {"width": 2}),
        ("resnet18", (3, 8, 8), {"width": 4}),
        ("resnet18", (3, 32, 32), {"width": 4, "stem": "imagenet"}),
    ],
)
def test_image_models_train_alike_on_both_paths(name, input_shape, options):
    both_paths_agree(build(name, input_shape, 5, **options), images(input_shape, 5), ff.fedavg())


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("emnist_cnn", {}, "the model draws random numbers"),
        ("resnet18", {"norm": "batch", "width": 4}, "the model changes its buffers"),
        pytest.param(
            "swin_small", {"config": TINY_SWIN}, "the model draws random numbers", marks=needs_transformers
        ),
    ],
)
def test_models_that_draw_or_keep_statistics_train_client_by_client(name, options, reason):
    shape = MNIST if name == "emnist_cnn" else (3, 16, 16)
    model, federation = build(name, shape, 5, **options), images(shape, 5)
    run = train(model, federation, ff.fedavg(), **SETTINGS)
    assert (run.path, run.path_reason) == ("client", reason)
    again = train(model, federation, ff.fedavg(), **{**SETTINGS, "workers": 2})
    assert torch.equal(run.server["model"], again.server["model"]), "the workers do not change the numbers"
    with pytest.raises(ff.FlatfedError, match=f"^path = 'matrix': {reason}; use path = 'client' or 'auto'$"):
        train(model, federation, ff.fedavg(), path="matrix", **SETTINGS)


def test_convolutional_and_recurrent_models_choose_the_client_path():
    run = train(build("lenet5", MNIST, 5), images(MNIST, 5), ff.fedavg(), **SETTINGS)
    assert run.path == "client"
    run = train(build("char_lstm", (5,), 6, **TINY_LSTM), characters(5, 6), ff.fedavg(), **SETTINGS)
    assert run.path == "client" and "recurrent" in run.path_reason


FLOAT_INPUTS = {
    name for name, make in ff.ALGORITHMS.items() if any(p.needs_float_inputs for p in make().parts)
}
"""Algorithms that shift inputs or make some up."""


@pytest.mark.parametrize("name", sorted(set(ff.ALGORITHMS) - FLOAT_INPUTS))
def test_the_lstm_trains_alike_on_both_paths_with_every_algorithm(name):
    both_paths_agree(build("char_lstm", (5,), 6, **TINY_LSTM), characters(5, 6), ff.ALGORITHMS[name]())


@pytest.mark.parametrize("path", ["client", "matrix", "auto"])
@pytest.mark.parametrize("name", sorted(FLOAT_INPUTS))
def test_algorithms_that_need_float_inputs_refuse_characters(name, path):
    model, algorithm = build("char_lstm", (5,), 6, **TINY_LSTM), ff.ALGORITHMS[name]()
    with pytest.raises(
        ff.FlatfedError, match=f"^algorithm: {name} changes or makes up inputs.* int64$"
    ) as caught:
        train(model, characters(5, 6), algorithm, path=path, **SETTINGS)
    assert "\n" not in str(caught.value)


def test_which_algorithms_need_float_inputs():
    expected = {"dynafed", "dynafed_syn_only", "fedrobust", "fedsynsam"}
    assert expected == FLOAT_INPUTS


@needs_transformers
@pytest.mark.parametrize("name", sorted(ff.ALGORITHMS))
def test_a_vision_transformer_trains_alike_on_both_paths_with_every_algorithm(name):
    # In double precision: AdamW and Muon make steps of gradients that are zero but for rounding, as those of
    # the keys' biases are.
    model = build("vit_base", (3, 8, 8), 5, config=TINY_VIT).double()
    both_paths_agree(model, images((3, 8, 8), 5, dtype=torch.float64), ff.ALGORITHMS[name](), tolerance=1e-7)


@needs_transformers
@pytest.mark.parametrize("name", ["swin_small", "swin_base"])
def test_a_swin_transformer_without_stochastic_depth_trains_alike_on_both_paths(name):
    model = build(name, (3, 16, 16), 5, config=STILL_SWIN)
    both_paths_agree(model, images((3, 16, 16), 5), ff.fedsam())


@pytest.mark.parametrize("path", ["client", "matrix"])
def test_the_numbers_of_an_lstm_do_not_depend_on_the_workers(path):
    model, federation = build("char_lstm", (5,), 6, **TINY_LSTM), characters(5, 6, clients=70)
    one, two = (
        train(model, federation, ff.scaffold(), path=path, **{**SETTINGS, "rounds": 1, "workers": workers})
        for workers in (1, 2)
    )
    assert torch.equal(one.server["model"], two.server["model"])


# -- the LSTM's two ways -----------------------------------------------------------------------------------


def clients_of(model, count):
    """Parameters [count, …] that differ from client to client."""
    generator = torch.Generator().manual_seed(2)
    return {
        name: value.detach() + 0.1 * torch.randn(count, *value.shape, generator=generator)
        for name, value in model.named_parameters()
    }


def test_the_lstm_keeps_torchs_parameter_names():
    model = build("char_lstm", (80,), 80)
    assert set(model.lstm.state_dict()) == set(nn.LSTM(8, 100, 2).state_dict())


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_lstm_gives_the_same_numbers_step_by_step(layers):
    model = build("char_lstm", (20,), 80, layers=layers)
    everybody = clients_of(model, 3)
    inputs = torch.randint(80, (3, 4, 20), generator=torch.Generator().manual_seed(3))
    targets = torch.randint(80, (3, 4), generator=torch.Generator().manual_seed(4))

    def loss(values, own_inputs, own_targets):
        return F.cross_entropy(functional_call(model, values, (own_inputs,)), own_targets)

    together = vmap(lambda values, own: functional_call(model, values, (own,)))(everybody, inputs)
    slopes = vmap(grad(loss))(everybody, inputs, targets)
    for client in range(3):
        own = {name: value[client].clone().requires_grad_() for name, value in everybody.items()}
        outputs = functional_call(model, own, (inputs[client],))
        torch.testing.assert_close(together[client], outputs.detach(), rtol=0, atol=1e-6)
        expected = torch.autograd.grad(F.cross_entropy(outputs, targets[client]), list(own.values()))
        for name, value in zip(own, expected, strict=True):
            torch.testing.assert_close(slopes[name][client], value, rtol=0, atol=1e-6, msg=name)


def test_the_lstm_uses_torchs_kernel_unless_it_is_transformed(monkeypatch):
    lstm, calls = nn.LSTM(2, 3, batch_first=True), []
    original = nn.LSTM.forward
    monkeypatch.setattr(nn.LSTM, "forward", lambda *given: calls.append(1) or original(*given))
    inputs = torch.randn(4, 5, 6, 2)
    with torch.no_grad():
        plain = torch.stack([lstm_states(lstm, each) for each in inputs])
        assert len(calls) == 4
        torch.testing.assert_close(
            vmap(lambda each: lstm_states(lstm, each))(inputs), plain, rtol=0, atol=1e-6
        )
        assert len(calls) == 4


@pytest.mark.parametrize("name", ["char_lstm", pytest.param("vit_base", marks=needs_transformers)])
def test_second_derivatives_exist(name):
    """A Hessian-vector product against a difference of gradients, in float64."""
    if name == "char_lstm":
        model, inputs = build(name, (5,), 6, **TINY_LSTM).double(), torch.randint(6, (4, 5))
    else:
        model = build(name, (3, 8, 8), 6, config=TINY_VIT).double()
        inputs = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    layout, targets = Layout(model), torch.randint(6, (4,))

    def loss(point):
        return F.cross_entropy(functional_call(model, layout.views(point), (inputs,)), targets)

    point = layout.vector(model)
    direction = torch.randn_like(point)
    direction /= direction.norm()
    _, product = jvp(grad(loss), (point,), (direction,))
    # transformers takes the softmax of the attention in float32, so the difference cannot be finer.
    step, tolerance = (1e-5, 1e-8) if name == "char_lstm" else (1e-3, 3e-5)
    expected = (grad(loss)(point + step * direction) - grad(loss)(point - step * direction)) / (2 * step)
    assert float(product.abs().max()) > 1000 * tolerance
    torch.testing.assert_close(product, expected, rtol=0, atol=tolerance)


# -- transformers ------------------------------------------------------------------------------------------


@needs_transformers
def test_transformers_resize_images_and_return_logits():
    for name, config in (("vit_base", TINY_VIT), ("swin_small", TINY_SWIN), ("swin_base", TINY_SWIN)):
        model = build(name, (1, 20, 12), 7, config=config).eval()
        with torch.no_grad():
            outputs = model(torch.randn(2, 1, 20, 12))
        assert isinstance(outputs, torch.Tensor) and outputs.shape == (2, 7)


@needs_transformers
def test_images_of_the_right_size_are_not_touched():
    model = build("vit_base", (3, 8, 8), 7, config=TINY_VIT).eval()
    inputs = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(inputs), model.network(pixel_values=inputs).logits)


@needs_transformers
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hiden_size": 8}, r"^config.hiden_size: unknown; did you mean 'hidden_size'\?$"),
        ({"num_channels": 1}, "^config.num_channels: unknown; "),
        ({"num_labels": 3}, "^config.num_labels: unknown; "),
        ({"return_dict": False}, "^config.return_dict: unknown; "),
        ({"hidden_size": "wide"}, "^config: cannot build the model: .*hidden_size"),
    ],
)
def test_bad_fields_are_refused_in_one_line(config, message):
    with pytest.raises(ff.FlatfedError, match=message) as caught:
        MODELS["vit_base"]((3, 8, 8), 5, config={**TINY_VIT, **config})
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A tiny ViT with three classes as a folder, and the model itself."""
    folder, model = tmp_path_factory.mktemp("vit"), build("vit_base", (3, 8, 8), 3, config=TINY_VIT)
    model.network.save_pretrained(folder)
    return str(folder), model


@needs_transformers
def test_pretrained_weights_are_loaded_under_a_new_last_layer(stored, capfd):
    folder, original = stored
    model = build("vit_base", (3, 8, 8), 5, pretrained=folder, config=TINY_VIT)
    own = dict(model.named_parameters())
    assert own["network.classifier.weight"].shape == (5, 8)
    assert {value.dtype for value in own.values()} == {torch.float32}
    for name, value in original.named_parameters():
        if "classifier" not in name:
            assert torch.equal(own[name], value), name
    assert capfd.readouterr() == ("", ""), "loading says nothing"
    both_paths_agree(model, images((3, 8, 8), 5), ff.fedavg())


@needs_transformers
def test_a_last_layer_that_fits_is_kept(stored):
    folder, original = stored
    model = build("vit_base", (3, 8, 8), 3, pretrained=folder, config=TINY_VIT)
    inputs = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(inputs), original(inputs))


@needs_transformers
@pytest.mark.parametrize(
    ("name", "channels", "config", "message"),
    [
        ("vit_base", 3, {}, "its hidden_size is 8, not 768"),
        ("vit_base", 1, TINY_VIT, "its num_channels is 3, not 1"),
        ("swin_base", 3, TINY_SWIN, "its model_type is vit, not swin"),
        ("vit_base", 3, {**TINY_VIT, "intermediate_size": 10}, "6 weights are missing or of another shape"),
    ],
)
def test_folders_of_another_model_are_refused(stored, name, channels, config, message):
    with pytest.raises(ff.FlatfedError, match=message) as caught:
        MODELS[name]((channels, 8, 8), 5, pretrained=stored[0], config=config)
    assert str(caught.value).startswith(f"pretrained = {stored[0]!r}: ") and "\n" not in str(caught.value)


@needs_transformers
def test_folders_without_a_model_are_refused(stored, tmp_path):
    with pytest.raises(ff.FlatfedError, match=r"not a folder with config\.json"):
        MODELS["vit_base"]((3, 8, 8), 5, pretrained=str(tmp_path))
    stored[1].network.config.save_pretrained(tmp_path)
    with pytest.raises(ff.FlatfedError, match="cannot build the model") as caught:
        MODELS["vit_base"]((3, 8, 8), 5, pretrained=str(tmp_path), config=TINY_VIT)
    assert "\n" not in str(caught.value)
