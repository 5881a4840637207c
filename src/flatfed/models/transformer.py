"""Transformers, through the optional package of that name."""

import importlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.models import image_shape, register, released

Fields = Mapping[str, Any] | None
HUB = "hub:"
_IMAGES = "AutoModelForImageClassification"
_SWIN_DEPTHS = [2, 2, 18, 2]
# torch's fused attention has no batching rule and no second derivative; plain attention has both, and with a
# few hundred patches it is hardly slower.
_LOADING = {"attn_implementation": "eager", "dtype": torch.float32}


@register
def vit_base(
    input_shape: Sequence[int], classes: int, pretrained: str | None = None, config: Fields = None
) -> nn.Module:
    """ViT-Base with 16×16 patches of 224×224 images; the FedSWA and FedNSAM papers fine-tune it.

    85,806,346 parameters with 10 classes, 85,875,556 with 100. Images of another size are resized.
    `pretrained` is a folder with `config.json` and the weights, a model of the Hub as "hub:OWNER/NAME",
    or a released file as the papers' code reads it (vit_base_patch16_224_in21k.pth); a last layer for
    other classes is replaced, that of a released file always. Without it the weights are random. `config`
    replaces fields of transformers' ViTConfig, for instance `{"num_hidden_layers": 2}`.
    """
    shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    return _classifier("vit", shape, input_shape, classes, pretrained, config)


@register
def swin_small(
    input_shape: Sequence[int], classes: int, pretrained: str | None = None, config: Fields = None
) -> nn.Module:
    """Swin-Small with 4×4 patches of 224×224 images and windows of 7; the FedNSAM paper fine-tunes it.

    48,844,948 parameters with 10 classes, 48,914,158 with 100. Options as in `vit_base`, with the fields of
    SwinConfig. Its stochastic depth of 0.1 draws random numbers, so clients train one by one;
    `{"drop_path_rate": 0.0}` switches it off.
    """
    shape = {"embed_dim": 96, "depths": _SWIN_DEPTHS, "num_heads": [3, 6, 12, 24]}
    return _classifier("swin", shape, input_shape, classes, pretrained, config)


@register
def swin_base(
    input_shape: Sequence[int], classes: int, pretrained: str | None = None, config: Fields = None
) -> nn.Module:
    """Swin-Base with 4×4 patches of 224×224 images and windows of 7; the FedNSAM paper fine-tunes it.

    86,753,474 parameters with 10 classes, 86,845,724 with 100. Options as in `swin_small`.
    """
    shape = {"embed_dim": 128, "depths": _SWIN_DEPTHS, "num_heads": [4, 8, 16, 32]}
    return _classifier("swin", shape, input_shape, classes, pretrained, config)


@register
def auto(
    input_shape: Sequence[int], classes: int, pretrained: str = "", random_weights: bool = False
) -> nn.Module:
    """Any classifier of images [channels, height, width] or of sequences [length] that transformers knows.

    `pretrained` as in `vit_base`; the network is what the `config.json` there says. `random_weights` takes
    that alone. Images of another size than the config's, if it has one, are resized.
    """
    if not pretrained:
        raise FlatfedError("pretrained: missing; give a folder with config.json, or hub:OWNER/NAME")
    transformers, images = _transformers(), len(input_shape) == 3
    kind = _IMAGES if images else "AutoModelForSequenceClassification"
    given = {"num_labels": classes, **({"num_channels": input_shape[0]} if images else {})}
    with _one_line_errors(f"pretrained = {pretrained!r}"):
        config = _stored_config(transformers, pretrained, given, {})
        if random_weights:
            network = getattr(transformers, kind).from_config(config, **_LOADING)
        else:
            network = _stored(transformers, kind, pretrained, config)
    if not images:
        return network
    return ImageClassifier(network, _sides(getattr(config, "image_size", None) or input_shape[-2:]))


class ImageClassifier(nn.Module):
    """A network of transformers that takes images of any size and returns the logits alone."""

    def __init__(self, network: nn.Module, sides: tuple[int, int]) -> None:
        super().__init__()
        self.network, self.sides = network, sides

    def forward(self, inputs: Tensor) -> Tensor:
        if tuple(inputs.shape[-2:]) != self.sides:
            inputs = F.interpolate(inputs, size=self.sides, mode="bilinear", antialias=True)
        return self.network(pixel_values=inputs).logits


def _classifier(
    kind: str,
    shape: Mapping[str, Any],
    input_shape: Sequence[int],
    classes: int,
    pretrained: str | None,
    overrides: Fields,
) -> nn.Module:
    channels, *_ = image_shape(input_shape)
    transformers = _transformers()
    kinds = {"vit": transformers.ViTConfig, "swin": transformers.SwinConfig}
    general = transformers.PretrainedConfig().to_dict()
    known = set(kinds[kind]().to_dict()) - {*general, "num_channels"}  # The channels are the inputs'.
    overrides = overrides or {}
    for name in overrides:
        if name not in known:
            raise FlatfedError(f"config.{name}: unknown; {did_you_mean(str(name), known)}")
    given = {**shape, **overrides, "num_labels": classes, "num_channels": channels}
    with _one_line_errors("config" if pretrained is None else f"pretrained = {pretrained!r}"):
        if pretrained is None:
            config = kinds[kind](**given)
            network = transformers.AutoModelForImageClassification.from_config(config, **_LOADING)
        elif (file := Path(pretrained).expanduser()).is_file():
            config = kinds[kind](**{**released.FIELDS[kind], **given})
            with tempfile.TemporaryDirectory() as folder:
                released.write_folder(file, kind, config, Path(folder))
                network = _stored(transformers, _IMAGES, folder, config)
        else:
            expected = {"model_type": kind} | {name: given[name] for name in (*shape, "num_channels")}
            config = _stored_config(transformers, pretrained, given, expected)
            network = _stored(transformers, _IMAGES, pretrained, config)
    return ImageClassifier(network, _sides(config.image_size))


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise FlatfedError("transformers: not installed; pip install 'flatfed[transformers]'") from None


def _sides(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, Sequence) else (size, size)
    return height, width


@contextmanager
def _one_line_errors(where: str) -> Iterator[None]:
    try:
        yield
    except FlatfedError:
        raise
    except Exception as error:  # What transformers raises for a bad field is not documented.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FlatfedError(f"{where}: cannot build the model: {reason}") from error


def _place(pretrained: str) -> dict[str, Any]:
    """Where transformers should look: in a folder of this machine, or on the Hub if that is said."""
    if pretrained.startswith(HUB):
        return {"pretrained_model_name_or_path": pretrained.removeprefix(HUB)}
    folder = Path(pretrained).expanduser()
    if not (folder / "config.json").is_file():
        raise FlatfedError(
            f"pretrained = {pretrained!r}: not a folder with config.json; download the model and give its "
            f"folder, or give its name on the Hub as {HUB}OWNER/NAME"
        )
    return {"pretrained_model_name_or_path": str(folder), "local_files_only": True}


def _stored_config(
    transformers: Any, pretrained: str, given: Mapping[str, Any], expected: Mapping[str, Any]
) -> Any:
    """The stored config with the given fields; that of another model is an error."""
    place = _place(pretrained)
    stored = transformers.AutoConfig.from_pretrained(**place)
    for name, value in expected.items():
        stored_value = getattr(stored, name)
        if stored_value != value:
            raise FlatfedError(
                f"pretrained = {pretrained!r}: its {name} is {stored_value}, not {value}; give the folder of "
                "this model for such inputs"
            )
    return transformers.AutoConfig.from_pretrained(**place, **given)


def _stored(transformers: Any, kind: str, pretrained: str, config: Any) -> nn.Module:
    """The stored weights, with a new last layer if need be; any other weight that is missing is an error."""
    with _quiet(transformers):
        network, loading = getattr(transformers, kind).from_pretrained(
            **_place(pretrained),
            config=config,
            **_LOADING,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    mismatched = {item if isinstance(item, str) else item[0] for item in loading["mismatched_keys"]}
    body = f"{network.base_model_prefix}."
    absent = sorted(name for name in {*loading["missing_keys"], *mismatched} if name.startswith(body))
    # What encoders were trained with by guessing words have none.
    absent = [name for name in absent if not name.startswith(f"{body}pooler.")]
    if absent:
        raise FlatfedError(
            f"pretrained = {pretrained!r}: {len(absent)} weights are missing or of another shape, for "
            f"instance {absent[0]}; give the folder of this model and leave its shape in config alone"
        )
    return network


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bar and no report about the last layer."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
