"""Weight files of ViT and Swin as their authors released them, as a folder that transformers reads.

The FedSWA and FedNSAM code starts from such files: `vit_base_patch16_224_in21k.pth` and
`swin_small_patch4_window7_224.pth`. As there, the last layer is left out.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flatfed.core.errors import FlatfedError, first_line

# In order; the names on the right are those of models on the Hub. `{}` is query, key and value in turn.
_BLOCK = {
    r"norm1\.": "layernorm_before.",
    r"norm2\.": "layernorm_after.",
    r"mlp\.fc1\.": "intermediate.dense.",
    r"mlp\.fc2\.": "output.dense.",
    r"attn\.proj\.": "attention.output.dense.",
}
_VIT = r"blocks\.(\d+)\."
_SWIN = r"layers\.(\d+)\.blocks\.(\d+)\."
NAMES: Mapping[str, Mapping[str, str]] = {
    "vit": {
        r"cls_token$": "vit.embeddings.cls_token",
        r"pos_embed$": "vit.embeddings.position_embeddings",
        r"patch_embed\.proj\.": "vit.embeddings.patch_embeddings.projection.",
        **{_VIT + old: rf"vit.encoder.layer.\1.{new}" for old, new in _BLOCK.items()},
        _VIT + r"attn\.qkv\.": r"vit.encoder.layer.\1.attention.attention.{}.",
        r"norm\.": "vit.layernorm.",
    },
    "swin": {
        r"patch_embed\.proj\.": "swin.embeddings.patch_embeddings.projection.",
        r"patch_embed\.norm\.": "swin.embeddings.norm.",
        **{_SWIN + old: rf"swin.encoder.layers.\1.blocks.\2.{new}" for old, new in _BLOCK.items()},
        _SWIN + r"attn\.qkv\.": r"swin.encoder.layers.\1.blocks.\2.attention.self.{}.",
        _SWIN + r"attn\.relative_position_bias_table$": (
            r"swin.encoder.layers.\1.blocks.\2.attention.self.relative_position_bias_table"
        ),
        r"layers\.(\d+)\.downsample\.": r"swin.encoder.layers.\1.downsample.",
        r"norm\.": "swin.layernorm.",
    },
}
FIELDS: Mapping[str, Mapping[str, Any]] = {"vit": {"layer_norm_eps": 1e-6}, "swin": {}}
"""What of the networks is not in the weights, nor as transformers has it."""
LEFT_OUT = re.compile(r"head\.|pre_logits\.|.*\.(attn_mask|relative_position_index)$")
"""The last layer, and what follows from the shape."""


def write_folder(path: Path, kind: str, config: Any, folder: Path) -> None:
    """The file's weights under the names of the Hub, beside their config."""
    config.save_pretrained(folder)
    save_file(dict(_renamed(_read(path), kind, path)), folder / "model.safetensors", {"format": "pt"})


def _read(path: Path) -> Mapping[str, Tensor]:
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        stored = stored.get("model", stored)
        tensors = {name: value for name, value in stored.items() if isinstance(value, Tensor)}
    except Exception as error:
        # What torch raises for a file that is no such thing is not documented.
        raise FlatfedError(
            f"pretrained = {str(path)!r}: cannot be read as weights ({first_line(error)})"
        ) from None
    return tensors


def _renamed(tensors: Mapping[str, Tensor], kind: str, path: Path) -> Iterator[tuple[str, Tensor]]:
    for name, value in tensors.items():
        if LEFT_OUT.match(name):
            continue
        new = next(
            (re.sub(f"^{old}", to, name) for old, to in NAMES[kind].items() if re.match(old, name)), None
        )
        if new is None:
            raise FlatfedError(
                f"pretrained = {str(path)!r}: {name} is no weight of a {kind}; give its own file"
            )
        if "{}" not in new:
            yield new, value.contiguous()
            continue
        for part, third in zip(("query", "key", "value"), value.chunk(3), strict=True):
            yield new.format(part), third.contiguous()
