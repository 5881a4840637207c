"""How a cell of a paper's table becomes a config.

What the papers state is taken from them. What they leave open comes from the code that they were run
with, as far as it is public: weight decay 1e-3 and gradient clipping at 10 for the FedSWA, FedSAGD and
FedNSAM tables, their augmentation and normalisation, and the baselines' hyper-parameters. Step sizes are
those that the papers or their code name; `tuned.json` keeps what sweeps found instead, and only `--tuned`
uses it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets import DATASETS as LOADERS
from flatfed.papers import sweeps, table
from flatfed.training.config import Config, with_assignments

Values = dict[str, Any]
SWEEP = "flatfed sweep"

# -- what the papers call things --------------------------------------------------------------------------

DATASETS: dict[str, Values] = {
    "CIFAR-10": {"dataset": "cifar10"},
    "CIFAR-100": {"dataset": "cifar100"},
    "Tiny-ImageNet": {"dataset": "tiny_imagenet"},
    "CINIC-10": {"dataset": "cinic10"},
    "Fashion-MNIST": {"dataset": "fashion_mnist"},
    "EMNIST-L": {"dataset": "emnist_l"},
    "EMNIST": {"dataset": "emnist", "options": {"split": "byclass"}},
    "Shakespeare": {"dataset": "shakespeare"},
    "FEMNIST (LEAF)": {"dataset": "femnist"},
}
MODELS: dict[str, Values] = {
    "LeNet-5": {"name": "feddyn_cnn"},
    "CNN (FedDyn)": {"name": "feddyn_cnn"},
    "VGG-11": {"name": "vgg11"},
    "ResNet-18": {"name": "resnet18", "stem": "cifar"},
    "ResNet-18-GN (7x7 stem)": {"name": "resnet18", "stem": "imagenet"},
    "logistic regression": {"name": "logistic_regression"},
    "2-layer LSTM-100": {"name": "char_lstm"},
    "CNN 2 conv + 2 dense": {"name": "emnist_cnn"},
    "2-conv CNN (LEAF)": {"name": "femnist_cnn"},
    "ViT-Base (pre-trained)": {"name": "vit_base"},
    "ViT-Base": {"name": "vit_base"},
    "Swin-Small": {"name": "swin_small"},
    "Swin-Base": {"name": "swin_base"},
    "2-layer MLP": {"name": "mlp", "hidden": [128, 128]},
    "ConvNet": {"name": "convnet"},
}
# The Dirichlet splits of the papers' code: with refilled class pools, or without replacement.
DIRICHLET = {
    "fedswa": "dirichlet_client_refill",
    "fednsam": "dirichlet_client_refill",
    "fedsagd": "dirichlet_client",
    "fedsam": "dirichlet_client",
    "fedsynsam": "dirichlet_class",
}
AUGMENTATION: dict[str, Values] = {
    "fedswa": {"augmentation": "crop_flip", "normalisation": "fedswa"},
    "fednsam": {"augmentation": "crop_flip", "normalisation": "fedswa"},
    "fedsagd": {"augmentation": "half_crop_flip", "normalisation": "feddyn"},
    "fedsam": {"augmentation": "crop_flip", "normalisation": "fedswa"},
    "fedsynsam": {"augmentation": "none", "normalisation": "fedswa"},
}

# -- the methods' hyper-parameters ------------------------------------------------------------------------


def _method(name: str, lr: float | None = None, **options: Any) -> Values:
    training = {} if lr is None else {"training": {"lr": lr}}
    return {"algorithm": {"name": name, **options}, **training}


def _parts(lr: float | None = None, **slots: Any) -> Values:
    return {"algorithm": slots, **({} if lr is None else {"training": {"lr": lr}})}


FEDSWA_METHODS: dict[str, Values] = {
    "FedAvg": _method("fedavg"),
    "FedDyn": _method("feddyn", regularisation=0.01),
    "SCAFFOLD": _method("scaffold"),
    "FedSAM": _method("fedsam", radius=0.05),
    "MoFedSAM": _method("mofedsam", radius=0.1),
    "FedLESAM": _method("fedlesam", radius=0.01),
    "FedASAM": _method("fedasam"),
    "FedACG": _method("fedacg"),
    "FedSMOO": _method("fedsmoo"),
    "FedGAMMA": _method("fedgamma", radius=0.05),
    # The authors advise twice FedAvg's step size for these.
    "FedSWA": _method("fedswa", lr=0.2),
    "FedMo": _method("fedmo"),
    "FedMoSWA": _method("fedmoswa", lr=0.2),
    "FedAvgM": _method("fedavgm"),
    "FedNSAM": _method("fednsam"),
    "FedNSAM-S": _method("fednsam_s"),
    "FedNSAM-D": _method("fednsam_d"),
    "FedAvg+Nesterov": _method("fedacg", proximal_weight=0.0),
    "FedSAM+Nesterov": _parts(
        start={"part": "look_ahead", "weight": 0.85},
        gradient={"part": "sharpness_aware", "radius": 0.05},
        server={"part": "momentum", "decay": 0.85},
    ),
    # The perturbation stays, the look-ahead goes.
    "FedNSAM - Nesterov": _parts(
        gradient={"part": "along_momentum", "radius": 0.1, "lookahead": 0.0},
        server={"part": "momentum", "decay": 0.85},
    ),
}
FEDSAGD_METHODS: dict[str, Values] = {
    "FedAvg": _method("fedavg"),
    "FedProx": _method("fedprox", proximal_weight=0.001),
    "FedDyn": _method("feddyn", regularisation=0.01),
    "SCAFFOLD": _method("scaffold"),
    "FedAvgM": _method("fedavgm"),
    "FedAdam": _method("fedadam", server_rate=0.1),
    "FedCM": _method("fedcm"),
    "MimeLite": _method("mimelite", momentum_decay=0.2),
    "FedACG": _method("fedacg", lookahead=0.9),
    "FedANAG": _method("fedanag"),
    "FedLNAG": _method("fedlnag"),
    "FedSAM": _method("fedsam", radius=0.05),
    "FedSpeed": _method("fedspeed"),
    "FedSAGD": _method("fedsagd"),
    "momentum only": _method("fedsagd", proximal_weight=0.0, decay_weight=0.0),
    "hybrid proximal term only": _method("fedsagd", momentum_decay=0.0),
}
FEDSAM_METHODS: dict[str, Values] = {
    "FedAvg": _method("fedavg"),
    "SCAFFOLD": _method("scaffold"),
    "FedRobust": _method("fedrobust", shift="channel"),
    "FedCM": _method("fedcm"),
    # Its β = 0.1 weighs the fresh gradient.
    "MimeLite": _method("mimelite", momentum_decay=0.9),
    "FedSAM": _method("fedsam"),
    "MoFedSAM": _method("mofedsam"),
}
FEDSYNSAM_METHODS: dict[str, Values] = {
    "FedAvg": _method("fedavg"),
    # What the paper describes, and what was published under that name.
    "DynaFed": _method("dynafed_syn_only"),
    "DynaFed (as published)": _method("dynafed"),
    "FedSAM": _method("fedsam", radius=0.05),
    "FedLESAM": _method("fedlesam", radius=0.05),
    "FedSMOO": _method("fedsmoo", radius=0.05),
    "FedGAMMA": _method("fedgamma", radius=0.05),
    "FedLESAM-D": _method("fedlesam_d", radius=0.05),
    "FedLESAM-S": _method("fedlesam_s", radius=0.05),
    "FedSynSAM": _method("fedsynsam", radius=0.05),
}
# The paper's distillation on colour images; the defaults are those for Fashion-MNIST.
COLOUR_DISTILLATION: Values = {"span": 5, "optimizer": "sgd", "sample_rate": 1000.0}
METHODS: dict[str, dict[str, Values]] = {
    "fedswa": FEDSWA_METHODS,
    "fednsam": {**FEDSWA_METHODS, "MoFedSAM": _method("mofedsam", radius=0.05)},
    "fedsagd": FEDSAGD_METHODS,
    "fedsam": FEDSAM_METHODS,
    "fedsynsam": FEDSYNSAM_METHODS,
}
# Rows that our tables have and the papers' do not.
MORE_METHODS = {"DynaFed": "DynaFed (as published)"}
COMPRESSORS: dict[str, Values | None] = {
    "w/o Compression": None,
    "qsgd(4)": {"part": "quantize", "bits": 4},
    "4-bit Quantization": {"part": "quantize", "bits": 4},
    "qsgd(8)": {"part": "quantize", "bits": 8},
    "8-bit Quantization": {"part": "quantize", "bits": 8},
    "topk(0.1)": {"part": "top_k", "ratio": 0.1},
    "topk(0.25)": {"part": "top_k", "ratio": 0.25},
    "Top-k (0.25 sparsity)": {"part": "top_k", "ratio": 0.25},
}
# Names that carry a remark in some tables.
ALIASES = {
    "FedSWA (ours)": "FedSWA",
    "FedMoSWA (ours)": "FedMoSWA",
    "FedSWA (i)": "FedSWA",
    "FedMo (ii)": "FedMo",
    "FedMoSWA (i+ii)": "FedMoSWA",
    "FedNSAM + Nesterov": "FedNSAM",
    "both (FedSAGD)": "FedSAGD",
    "Alg12": "FedDyn",
}
FEDSAM_RADIUS = {"EMNIST": 0.2, "CIFAR-10": 0.5, "CIFAR-100": 0.6}
SWEPT_OPTION = {
    "rho": "final_rate",
    "beta": "momentum_decay",
    "mu": "decay_weight",
    "lambda": "proximal_weight",
    "images_per_class": "samples_per_class",
    "R": "warm_rounds",
    "eta_x": "sample_rate",
}


@dataclass(frozen=True)
class Cell:
    """One number of a table: who, where, and what the paper prints."""

    block: int
    title: str
    """The block's setting in words."""
    method: str
    swept: Any
    """The value of the swept setting, or None."""
    config: Values
    printed: Mapping[str, Any]
    targets: tuple[float, ...]
    """Accuracies to count rounds to, as shares."""
    dataset: str
    origin: str
    """Where the step size comes from, and after a colon what else there is to say about it."""

    @property
    def label(self) -> str:
        return self.method if self.swept is None else f"{self.method}, {self.swept}"


def cells(name: str) -> list[Cell]:
    """All cells of a table, in its order."""
    paper = name.partition("/")[0]
    content = table(name)
    if "diagnostic" in content:
        raise FlatfedError(f"{name}: not accuracies but {content['diagnostic']}; there is nothing to run")
    return [cell for index, block in enumerate(content["blocks"]) for cell in _cells(paper, index, block)]


def _cells(paper: str, index: int, block: Mapping[str, Any]) -> Iterator[Cell]:
    setting = _completed(paper, block["setting"])
    targets = setting.get("targets") or ([setting["target"]] if "target" in setting else [])
    rows = dict(block["results"])
    if paper == "fedsynsam":
        rows |= {more: {} for method, more in MORE_METHODS.items() if method in rows}
    for method, printed in rows.items():
        for position, swept in enumerate(setting.get("values", [None])):
            chosen = {
                key: value[position] if isinstance(value, list) else value for key, value in printed.items()
            }
            yield Cell(
                block=index,
                title=_title(setting),
                method=method,
                swept=swept,
                config=_config(paper, setting, method, swept),
                printed=chosen if "values" in setting else printed,
                targets=tuple(target / 100 for target in targets),
                dataset=setting["dataset"],
                origin=_origin(paper, setting),
            )


def _completed(paper: str, setting: Values) -> Values:
    """A block's setting with what the tables leave to the text."""
    setting = dict(setting)
    if paper == "fedsagd":
        # The table that repeats others' accuracies names only the data.
        setting["dataset"] = {"EMNIST": "EMNIST-L"}.get(setting["dataset"], setting["dataset"])
        by_dataset: dict[str, Values] = {
            "EMNIST-L": {
                "model": "logistic regression",
                "clients": 500,
                "participation": 0.01,
                "batch_size": 48,
                "local_epochs": 20,
            },
            "CIFAR-10": {"model": "CNN (FedDyn)", "clients": 200, "participation": 0.02},
            "CIFAR-100": {"model": "ResNet-18-GN (7x7 stem)", "clients": 200, "participation": 0.02},
            "Shakespeare": {
                "model": "2-layer LSTM-100",
                "clients": 100,
                "participation": 0.03,
                "batch_size": 100,
                "rounds": 1000,
                "partition": "natural",
            },
            "FEMNIST (LEAF)": {"batch_size": 50, "local_epochs": 5, "partition": "natural"},
        }
        known = by_dataset[setting["dataset"]]
        keep = ("clients", "participation", "model")
        setting = {**setting, **{k: v for k, v in known.items() if k not in setting or k not in keep}}
        setting.setdefault("local_epochs", 5)
        setting.setdefault("batch_size", 50)
    if paper == "fednsam":
        setting.setdefault("local_epochs", 5)
        if not isinstance(setting["clients"], int):
            setting["clients"] = 100
    if paper == "fedsam":
        setting.setdefault("rounds", 1000)
    if paper == "fedsynsam":
        # The table of eigenvalues names only data, model and clients; elsewhere ten take part in a round.
        setting = {"rounds": 300, "local_steps": 10, "batch_size": 128, "participation": 0.1, **setting}
    if setting.get("partition", "not stated").startswith("not stated"):
        setting["partition"] = "dirichlet(0.6)"
    return setting


def _title(setting: Values) -> str:
    words = [setting["dataset"], setting["model"]]
    if setting.get("sweep") != "dirichlet":
        words.append(setting["partition"].split(" (")[0])
    if isinstance(setting.get("local_steps"), dict):
        words += [f"{method} {steps} steps" for method, steps in setting["local_steps"].items()]
    part = setting.get("participation", setting.get("participants_per_round"))
    if isinstance(part, float):
        words.append(f"{setting['clients']} clients at {part:.0%}")
    if "compressor" in setting:
        words.append(setting["compressor"])
    if "eta_alpha" in setting:
        words.append(f"inner_rate_rate {setting['eta_alpha']:g}")
    return ", ".join(words)


def _config(paper: str, setting: Values, method: str, swept: Any) -> Values:
    # The table of eigenvalues has compressors for rows.
    name = setting["method"] if method in COMPRESSORS else ALIASES.get(method, method)
    made = METHODS[paper][name]
    algorithm: Values = dict(made["algorithm"])
    if paper == "fedsynsam":
        algorithm |= _distillation(setting, algorithm["name"])
        compressor = COMPRESSORS[method if method in COMPRESSORS else setting["compressor"]]
        algorithm |= {} if compressor is None else {"compress": compressor}
    training: Values = {
        "rounds": setting["rounds"],
        **_local_work(setting, method),
        "batch_size": setting["batch_size"],
        **_training(paper, setting, algorithm),
        **made.get("training", {}),
    }
    if "participants_per_round" in setting:
        training["participants"] = setting["participants_per_round"]
    else:
        training["participation"] = setting["participation"]
    partition = setting["partition"]
    kind = setting.get("sweep")
    if kind == "dirichlet":
        partition = "iid" if swept == "iid" else f"dirichlet({swept})"
    elif kind == "participation_percent":
        training["participation"] = swept / 100
    elif kind is not None:
        algorithm[SWEPT_OPTION[kind]] = int(swept) if kind in {"images_per_class", "R"} else swept
        if kind == "rho" and swept == 1.0:
            # The table's last column is the runs without extrapolation, FedAvg and FedMo.
            algorithm["server_rate"] = 1.0
            training["lr"] = 0.1
    if paper == "fedsam" and "radius" not in algorithm and algorithm["name"] in {"fedsam", "mofedsam"}:
        algorithm["radius"] = FEDSAM_RADIUS[setting["dataset"]]
    return {
        "data": _data(paper, setting),
        "partition": _partition(paper, partition),
        "model": dict(MODELS[setting["model"]]),
        "algorithm": algorithm,
        "training": training,
    }


def _local_work(setting: Values, method: str) -> Values:
    if "local_epochs" in setting:
        return {"local_epochs": setting["local_epochs"]}
    steps = setting["local_steps"]
    return {"local_steps": steps[method] if isinstance(steps, dict) else steps}


def _distillation(setting: Values, name: str) -> Values:
    """How synthetic samples are made; the DynaFed baselines get as many, and as long, as FedSynSAM."""
    if name not in {"fedsynsam", "dynafed", "dynafed_syn_only"}:
        return {}
    colour = setting["dataset"] != "Fashion-MNIST"
    chosen: Values = {"samples_per_class": 40} if setting["dataset"] == "CINIC-10" else {}
    if name == "fedsynsam":
        more = {"inner_rate_rate": setting["eta_alpha"]} if "eta_alpha" in setting else {}
        return {**chosen, **(COLOUR_DISTILLATION if colour else {}), **more}
    return {"models": 32, "samples_per_class": 20, "iterations": 200, **chosen}


def _training(paper: str, setting: Values, algorithm: Values) -> Values:
    if paper in {"fedswa", "fednsam"}:
        decay = setting.get("lr_decay_per_round", 0.998)
        return {"lr": setting.get("lr", 0.1), "lr_decay": decay, "weight_decay": 1e-3, "clip": 10.0}
    if paper == "fedsam":
        return {"lr": 0.1, "sampling": "bernoulli"}
    if paper == "fedsynsam":
        return {"lr": 0.05}
    rates = {"EMNIST-L": 0.1 if algorithm["name"] == "fedavg" else 0.001, "Shakespeare": 1.0}
    # FedSAGD's own μ is weight decay; the baselines get as much in the shape of weight decay.
    own_decay = algorithm["name"] == "fedsagd"
    return {
        "lr": rates.get(setting["dataset"], 0.1),
        "lr_decay": 1.0 if setting["dataset"] == "EMNIST-L" else 0.998,
        "weight_decay": 0.0 if own_decay else 1e-3,
        "clip": 10.0,
    }


def _origin(paper: str, setting: Values) -> str:
    if paper == "fedsynsam":
        return "not stated: the paper names grids for step size and radius; these are one point of them"
    if setting["dataset"] == "FEMNIST (LEAF)":
        return "not stated: the paper's step size for CIFAR-10"
    if paper in {"fedswa", "fednsam"} and "lr" not in setting:
        return "released code: the paper names a grid, the code this step size"
    return "paper"


def with_tuning(name: str, cell: Cell) -> Cell:
    """The cell with the settings that a sweep found for it; the cell itself if there was no sweep."""
    for found in sweeps():
        meant = cell.dataset == found["dataset"] and found.get("part", "") in cell.title
        if name in found["tables"] and meant and cell.method in found["best"]:
            config = with_assignments(cell.config, found["best"][cell.method])
            return replace(cell, config=config, origin=f"{SWEEP}: {found['origin']}")
    return cell


def _data(paper: str, setting: Values) -> Values:
    made = DATASETS[setting["dataset"]]
    options = dict(made.get("options", {}))
    if setting["dataset"] in {"CIFAR-10", "CIFAR-100"}:
        options |= AUGMENTATION[paper]
    elif setting["dataset"] == "Tiny-ImageNet":
        options["augmentation"] = AUGMENTATION[paper]["augmentation"]
    values = {"dataset": made["dataset"], "clients": setting["clients"], "options": options}
    # FedSAM's deviations between clients on CIFAR's iid split are those of chance with 100 samples each.
    return {**values, "client_tests": 100} if paper == "fedsam" else values


def _partition(paper: str, text: str) -> Values:
    if text in {"iid", "natural"}:
        return {"name": text}
    if text == "path(1)":
        # One class each, all classes present: what the paper's accuracies take for granted.
        return {"name": "pathological_balanced", "classes_per_client": 1}
    found = re.match(r"dirichlet\(([\d.]+)\)", text)
    if found is None:
        raise FlatfedError(f"partition {text!r}: not understood")
    return {"name": DIRICHLET[paper], "concentration": float(found[1])}


def small(config: Values) -> Values:
    """The same config cut down so that it runs in seconds on a few samples."""
    training = {
        key: value
        for key, value in config["training"].items()
        if key not in {"local_epochs", "participation", "participants"}
    }
    algorithm = dict(config["algorithm"])
    if algorithm.get("name") == "fedsynsam":
        algorithm |= {"warm_rounds": 1, "span": 1, "samples_per_class": 1, "iterations": 2}
    elif "iterations" in algorithm:  # DynaFed
        algorithm |= {"models": 2, "span": 1, "steps": 1, "samples_per_class": 1, "iterations": 2}
    model = dict(config["model"])
    if model["name"] in TINY_TRANSFORMERS:
        model["config"] = TINY_TRANSFORMERS[model["name"]]
    elif model["name"] in {"resnet18", "vgg11"}:
        model["width"] = 4
    name, options = config["data"]["dataset"], dict(config["data"]["options"])
    if name == "shakespeare":
        options |= {"roles": 4, "train_samples": 8, "test_samples": 8}
    # An excerpt will do, where the loader knows how many samples there ought to be.
    if "verify" in inspect.signature(LOADERS[name]).parameters:
        options["verify"] = False
    partition = dict(config["partition"])
    if partition["name"] == "dirichlet_class":
        partition["minimum"] = 1
    data = {**config["data"], "clients": 4, "options": options}
    if "client_tests" in data:
        data["client_tests"] = 1
    return {
        **config,
        "algorithm": algorithm,
        "data": data,
        "partition": partition,
        "model": model,
        "training": {**training, "participants": 2, "local_steps": 1, "batch_size": 2, "rounds": 2},
    }


TINY_TRANSFORMERS: dict[str, Values] = {
    "vit_base": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 32,
        "patch_size": 16,
    },
    "swin_small": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "image_size": 32, "window_size": 4},
    "swin_base": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "image_size": 32, "window_size": 4},
}


def checked(cell: Cell) -> Config:
    return Config.checked(cell.config)
