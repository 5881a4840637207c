"""Low-rank adapters beside frozen weights, and pretrained weights of any kind."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import flatfed
from problems import FEATURES, federation, network, run
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.flat import Layout
from flatfed.engines.execution import Execution
from flatfed.engines.local import LocalEngine
from flatfed.engines.planning import make_plan
from flatfed.models import MODELS
from flatfed.runs.identity import run_identity
from flatfed.training.config import Config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed: pip install 'flatfed[peft]'"
)
TRAINED_HEAD = {"rank": 2, "targets": ("0",), "train": ("2",)}


def adapted(**options: Any) -> nn.Module:
    return ff.lora(network(), **{**TRAINED_HEAD, **options})


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, value in model.named_parameters() if value.requires_grad]


def test_an_adapted_layer_is_the_frozen_one_and_a_product_of_low_rank():
    original = network()
    model = ff.lora(original, rank=2, alpha=6, targets=("0",))
    inputs = torch.randn(3, FEATURES, dtype=torch.float64)
    assert torch.equal(model(inputs), original(inputs)), "B is zero at first"
    assert trained_names(model) == ["0.lora_A.default.weight", "0.lora_B.default.weight"]
    assert all(value.requires_grad for value in original.parameters()), "the user's own is as it was"
    layer = model[0]
    b = torch.randn(5, 2, dtype=torch.float64)
    with torch.no_grad():
        layer.lora_B["default"].weight.copy_(b)
    weight = original[0].weight + 6 / 2 * b @ layer.lora_A["default"].weight
    expected = inputs @ weight.T + original[0].bias
    assert torch.allclose(layer(inputs), expected, rtol=0, atol=1e-12)


def test_a_is_drawn_under_the_seed_alone():
    model, before = network(), torch.get_rng_state()
    first, again, other = (
        ff.lora(model, targets=("0",), seed=seed)[0].lora_A["default"].weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "sharing", "numbers"),
    [
        ({}, {}, 2 * 4 + 5 * 2 + 18),
        ({"freeze_a": True}, {}, 5 * 2 + 18),
        ({}, {"private": ("*.lora_B.*", "2")}, 2 * 4),
    ],
    ids=["FedIT", "FFA-LoRA", "FedSA-LoRA"],
)
def test_what_travels_is_the_trained_and_shared_part(options, sharing, numbers):
    model = adapted(**options)
    finished = run(ff.fedavg(), model=model, sharing=sharing)
    assert [line["bytes_up"] for line in finished.history] == [3 * 8 * numbers] * 5
    assert [line["bytes_down"] for line in finished.history] == [3 * 8 * numbers] * 5
    before, after = model.state_dict(), finished.model.state_dict()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    shared = [name for name in trained_names(model) if not sharing or "lora_A" in name]
    assert moved == set(shared)
    assert [name for name in before if "base_layer" in name and name in moved] == []


def test_the_mean_of_frozen_a_is_exact_and_that_of_both_is_not():
    """FFA-LoRA averages products; FedIT averages factors (the mean of B A is another matrix)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, several = draw(2, 4), [(draw(5, 2), draw(2, 4)) for _ in range(3)]
    mean_b = sum(b for b, _ in several) / 3
    assert torch.allclose(sum(b @ a for b, _ in several) / 3, mean_b @ a)
    mean_a = sum(own for _, own in several) / 3
    error = sum((b - mean_b) @ (own - mean_a) for b, own in several) / 3
    exact = sum(b @ own for b, own in several) / 3
    assert torch.allclose(exact - mean_b @ mean_a, error) and float(error.norm()) > 0.1


def test_adapters_are_part_of_the_identity_which_covers_them():
    def identity(model: nn.Module) -> Any:
        task, training = ff.Task(model, federation()), ff.Training(rounds=1)
        plan = make_plan(model, task.federation, ff.fedavg(), task.loss, {}, training, "cpu")
        return run_identity(task, plan)

    first = identity(adapted())
    assert first.uncovered == ()
    assert first.digest == identity(adapted()).digest
    for other in (adapted(alpha=8), adapted(seed=1), adapted(freeze_a=True), adapted(rank=1)):
        assert identity(other).digest != first.digest


def test_a_run_with_adapters_goes_on(tmp_path):
    options = {"model": adapted(), "sharing": {"private": ("*.lora_B.*", "2")}}
    straight = run(ff.scaffold(), **options)
    run(ff.scaffold(), **options, rounds=3, folder=tmp_path)
    resumed = run(ff.scaffold(), **options, folder=tmp_path)
    assert all(torch.equal(value, resumed.server[key]) for key, value in straight.server.items())
    for client in straight.clients.clients():
        assert torch.equal(straight.clients.row(client), resumed.clients.row(client))


def test_all_workers_of_a_machine_have_the_same_frozen_weights():
    model = ff.lora(nn.Sequential(nn.Linear(FEATURES, 2000), nn.Linear(2000, 3)), rank=1, train=("1",))
    data = ff.Federation.from_tensors([(torch.randn(4, FEATURES), torch.tensor([0, 1, 2, 0]))] * 4)
    training = ff.Training(rounds=1, participants=4)
    plan = make_plan(model, data, ff.fedavg(), nn.functional.cross_entropy, {}, training, "cpu")
    engine = LocalEngine(plan, model, data, Execution(workers=3))
    try:
        workers = [engine._threads._idle.get() for _ in range(3)]
        places = {
            name: {dict(worker.bound.module.named_parameters())[name].data_ptr() for worker in workers}
            for name, _ in model.named_parameters()
        }
        frozen = {
            name: value.data_ptr() for name, value in model.named_parameters() if not value.requires_grad
        }
        assert len(frozen) == 2
        assert all(places[name] == {place} for name, place in frozen.items()), "and those are the user's own"
        modules = {id(worker.bound.module) for worker in workers}
        assert len(modules) == 3
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"targets": ("3",)}, r"^lora.targets: the model has no '3'; choose from: 0, 2$"),
        ({"train": ("head",)}, "^lora.train: the model has no 'head'; choose from: 0, 2$"),
        (
            {"targets": ("0",), "train": ("0", "2")},
            "^lora.targets: there are no linear layers but those in train",
        ),
        ({"rank": 0}, "^rank = 0: input should be greater than or equal to 1"),
        ({"ranks": 1}, "^ranks: unknown; did you mean 'rank'"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_one_line(options, line):
    with pytest.raises(ff.FlatfedError, match=line):
        ff.lora(network(), **options)


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ff.FlatfedError, match=r"^peft: not installed; pip install 'flatfed\[peft\]'$"):
        ff.lora(network())


# -- on the command line -----------------------------------------------------------------------------------

CONFIG = """
[data]
clients = 10
[model]
name = "mlp"
hidden = [4]
lora = { rank = 2, targets = ["1"], train = ["3"] }
[training]
rounds = 1
participants = 2
local_steps = 1
[execution]
workers = 1
"""


def test_configs_adapt_any_model(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    model = Config.read(path).make_task().model
    assert trained_names(model) == [
        "1.lora_A.default.weight",
        "1.lora_B.default.weight",
        "3.weight",
        "3.bias",
    ]
    other = Config.read(path, ["training.seed=1", "model.lora.rank=1"]).make_task().model
    assert Layout(other).size < Layout(model).size
    for assignment, line in (
        ("model.lora.ranks=1", "model.lora.ranks: unknown; did you mean 'rank'"),
        ("model.lora=3", "model.lora = 3: give a table"),
    ):
        with pytest.raises(ff.FlatfedError, match=line):
            Config.read(path, [assignment])


TASK_FILE = """
import torch
from torch import nn
import flatfed as ff

SHARING = {{"private": ["*.lora_B.*", "classifier"]}}
settings = {{"training": {{"rounds": 1, "participants": 2, "sharing": SHARING}}}}


def make(rank: int = 2) -> ff.Task:
    model = ff.models.MODELS["auto"]((6,), 3, pretrained={folder!r})
    model = ff.lora(model, rank=rank, targets=("query", "value"), train=("classifier",))
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randint(0, 20, (4, 6), generator=generator), torch.randint(0, 3, (4,), generator=generator))
        for _ in range(3)
    ]
    return ff.Task(model, ff.Federation.from_tensors(clients))
"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny BERT as sentence encoders are stored: without a classifier."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    transformers.BertModel(config).save_pretrained(folder)
    yield str(folder)


def test_a_task_file_with_adapters_on_pretrained_weights_runs_on_the_command_line(encoder, tmp_path):
    file = tmp_path / "adapters.py"
    file.write_text(TASK_FILE.format(folder=encoder))
    folder = tmp_path / "run"
    done = flatfed("run", f"{file}:make", "--folder", folder, "--set", "task.rank=1")
    assert done.returncode == 0, done.stderr
    (line,) = [json.loads(text) for text in (folder / "history.jsonl").read_text().splitlines()]
    # A of rank 1 of two layers, as long as the hidden size.
    assert line["bytes_up"] == 2 * 4 * (2 * 8) + 2 * _buffer_bytes(encoder)
    assert "clients' own personal train data: mean accuracy" in done.stdout


def _buffer_bytes(folder: str) -> int:
    model = MODELS["auto"]((6,), 3, pretrained=folder)
    return sum(value.nbytes for value in model.buffers())


# -- any model of transformers -----------------------------------------------------------------------------


def test_auto_loads_what_the_folder_has(encoder):
    model = MODELS["auto"]((6,), 3, pretrained=encoder).eval()
    stored = __import__("safetensors.torch", fromlist=["load_file"]).load_file(
        Path(encoder) / "model.safetensors"
    )
    own = model.state_dict()
    assert all(torch.equal(own[f"bert.{name}"], value) for name, value in stored.items())
    assert own["classifier.weight"].shape == (3, 8)
    assert model(torch.randint(0, 20, (2, 6))).logits.shape == (2, 3)
    fresh = MODELS["auto"]((6,), 3, pretrained=encoder, random_weights=True).state_dict()
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert fresh[name].shape == own[name].shape and not torch.equal(fresh[name], own[name])


def test_auto_classifies_images_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    model = MODELS["auto"]((3, 12, 12), 5, pretrained=str(tmp_path))
    assert model(torch.randn(2, 3, 12, 12)).shape == (2, 5)
    with pytest.raises(ff.FlatfedError, match="weights are missing or of another shape"):
        MODELS["auto"]((1, 12, 12), 5, pretrained=str(tmp_path))


def test_the_hub_is_asked_only_by_name(monkeypatch):
    """A folder with a typing error must not become a download."""
    transformers = pytest.importorskip("transformers")
    asked = []

    def from_pretrained(pretrained_model_name_or_path: str, **options: Any) -> None:
        asked.append((pretrained_model_name_or_path, options.get("local_files_only", False)))
        raise OSError("no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(ff.FlatfedError, match="cannot build the model: no network"):
        MODELS["vit_base"]((3, 8, 8), 5, pretrained="hub:google/vit-base")
    with pytest.raises(
        ff.FlatfedError, match=r"not a folder with config\.json; .* or give its name on the Hub"
    ):
        MODELS["vit_base"]((3, 8, 8), 5, pretrained="google/vit-base")
    assert asked == [("google/vit-base", False)]
