"""Weight files as the authors of ViT and Swin released them, under the names of transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flatfed as ff
from flatfed.models import MODELS

pytest.importorskip("transformers")
WIDTH, LAYERS, HEADS, INNER, SIDE, PATCH = 8, 2, 2, 12, 8, 4
TINY_VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "image_size": SIDE,
    "patch_size": PATCH,
}
TINY_SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 4,
    "depths": [2, 2],
    "num_heads": [1, 2],
    "window_size": 2,
}


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}


def layer(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def block(name: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        **norm(f"{name}.norm1", width),
        **layer(f"{name}.attn.qkv", 3 * width, width),
        **layer(f"{name}.attn.proj", width, width),
        **norm(f"{name}.norm2", width),
        **layer(f"{name}.mlp.fc1", inner, width),
        **layer(f"{name}.mlp.fc2", width, inner),
    }


def vit_file() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, 1 + (SIDE // PATCH) ** 2, WIDTH),
        "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (WIDTH,),
        **norm("norm", WIDTH),
        **layer("pre_logits.fc", WIDTH, WIDTH),
        **layer("head", 21843, WIDTH),
    }
    for number in range(LAYERS):
        shapes |= block(f"blocks.{number}", WIDTH, INNER)
    return drawn(shapes)


def vit_features(stored: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """The released network, written out up to the normalised first token."""

    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, stored[f"{name}.weight"], stored[f"{name}.bias"])

    def normed(name: str, value: Tensor) -> Tensor:
        return F.layer_norm(value, (WIDTH,), stored[f"{name}.weight"], stored[f"{name}.bias"], 1e-6)

    patches = F.conv2d(inputs, stored["patch_embed.proj.weight"], stored["patch_embed.proj.bias"], PATCH)
    tokens = patches.flatten(2).transpose(1, 2)
    tokens = torch.cat([stored["cls_token"].expand(len(inputs), -1, -1), tokens], 1) + stored["pos_embed"]
    for number in range(LAYERS):
        name = f"blocks.{number}"
        fused = linear(f"{name}.attn.qkv", normed(f"{name}.norm1", tokens))
        count = tokens.shape[1]
        query, key, value = fused.view(len(inputs), count, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        mixed = (weights @ value).transpose(1, 2).reshape(len(inputs), count, WIDTH)
        tokens = tokens + linear(f"{name}.attn.proj", mixed)
        inner = F.gelu(linear(f"{name}.mlp.fc1", normed(f"{name}.norm2", tokens)))
        tokens = tokens + linear(f"{name}.mlp.fc2", inner)
    return normed("norm", tokens)[:, 0]


def test_a_released_vit_computes_what_it_did(tmp_path):
    stored = vit_file()
    torch.save(stored, tmp_path / "vit_base_patch16_224_in21k.pth")
    path = str(tmp_path / "vit_base_patch16_224_in21k.pth")
    model = MODELS["vit_base"]((3, SIDE, SIDE), 5, pretrained=path, config=TINY_VIT).eval()
    inputs = torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    head = model.network.classifier
    with torch.no_grad():
        expected = F.linear(vit_features(stored, inputs), head.weight, head.bias)
        torch.testing.assert_close(model(inputs), expected, rtol=1e-4, atol=1e-5)


def swin_file() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (4, 3, 2, 2),
        "patch_embed.proj.bias": (4,),
        **norm("patch_embed.norm", 4),
        "layers.0.downsample.reduction.weight": (8, 16),
        **norm("layers.0.downsample.norm", 16),
        **norm("norm", 8),
        **layer("head", 21841, 8),
        "layers.0.blocks.1.attn_mask": (16, 4, 4),
    }
    for stage, width in enumerate((4, 8)):
        for number in range(2):
            name = f"layers.{stage}.blocks.{number}"
            shapes |= block(name, width, 4 * width)
            shapes[f"{name}.attn.relative_position_bias_table"] = (9, stage + 1)
            shapes[f"{name}.attn.relative_position_index"] = (4, 4)
    return drawn(shapes)


def test_every_weight_of_a_released_swin_has_its_place(tmp_path):
    stored, path = swin_file(), tmp_path / "swin.pth"
    torch.save({"model": stored}, path)
    model = MODELS["swin_small"]((3, 16, 16), 5, pretrained=str(path), config=TINY_SWIN)
    loaded = {name: value for name, value in model.network.named_parameters() if "classifier" not in name}
    pieces = {
        f"{name}{part}": third
        for name, value in stored.items()
        if not name.startswith("head") and not name.endswith(("attn_mask", "relative_position_index"))
        for part, third in enumerate(value.chunk(3) if ".qkv." in name else [value])
    }
    assert len(pieces) == len(loaded)
    places = {}
    for name, value in loaded.items():
        (source,) = [key for key, piece in pieces.items() if torch.equal(piece, value)]
        places[source] = name
    assert len(places) == len(pieces)
    for part, letter in enumerate("qkv"):
        place = places[f"layers.1.blocks.0.attn.qkv.weight{part}"]
        assert "layers.1.blocks.0" in place and (f"{letter}_proj" in place or f".{letter}" in place)


def test_other_files_are_refused_in_one_line(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(vit_file(), path)
    with pytest.raises(ff.FlatfedError, match="is no weight of a swin; give its own file"):
        MODELS["swin_small"]((3, 16, 16), 5, pretrained=str(path), config=TINY_SWIN)
    path.write_bytes(b"nothing")
    with pytest.raises(ff.FlatfedError, match="cannot be read as weights") as caught:
        MODELS["vit_base"]((3, 8, 8), 5, pretrained=str(path), config=TINY_VIT)
    assert "\n" not in str(caught.value)
