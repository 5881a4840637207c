"""A Hugging Face text classifier, whose sentences have different lengths.

    pip install 'flatfed[transformers]'
    python examples/text_classifier.py --rounds 10

The network is a BERT of a tiny random configuration, so nothing is downloaded; with from_pretrained and a
tokenizer the rest stays as it is. Inputs are the dictionary that such models take, model(input_ids=…,
attention_mask=…); they return an object with logits, which the default loss and the accuracy find by
themselves.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification

import flatfed as ff

WORDS, PADDING = 40, 0


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Made up: the first word says which class it is, and others say nothing."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length = int(torch.randint(4, 13, (), generator=generator))
        words = torch.randint(1, WORDS, (length,), generator=generator)
        samples.append({"words": words, "label": int(words[0] >= WORDS // 2)})
    return samples


def collate(samples: list[dict[str, Any]]) -> tuple[dict[str, Tensor], Tensor]:
    """All sentences padded to the longest, with a mask of what is no padding."""
    words = pad_sequence([sample["words"] for sample in samples], batch_first=True, padding_value=PADDING)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": words, "attention_mask": (words != PADDING).long()}, labels


def network() -> nn.Module:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=2,
        # A network of this size learns nothing from the usual 0.02, which is meant for hundreds of units.
        initializer_range=0.1,
    )
    return BertForSequenceClassification(config)


def main(rounds: int) -> ff.Run:
    torch.manual_seed(0)
    clients, size = 8, 40
    federation = ff.Federation.from_dataset(
        sentences(clients * size, seed=1),
        [range(size * client, size * (client + 1)) for client in range(clients)],
        test=sentences(200, seed=0),
        collate=collate,
    )
    training = ff.Training(rounds=rounds, participation=0.5, local_epochs=2, batch_size=10, lr=0.05)
    return ff.train(ff.Task(network(), federation), ff.fedavg(), training)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a text classifier of transformers.")
    parser.add_argument("--rounds", type=int, default=10)
    print(f"accuracy {main(parser.parse_args().rounds).history[-1]['test_accuracy']:.3f}")
