"""The next-character model of the Shakespeare experiments."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfed.core.errors import FlatfedError
from flatfed.core.types import Count
from flatfed.models import Layers, register


@register
def char_lstm(
    input_shape: Sequence[int],
    classes: int,
    vocabulary: Count | None = None,
    embedding: Count = 8,
    hidden: Count = 100,
    layers: Layers = 2,
) -> nn.Module:
    """The LSTM of FedDyn and FedSAGD on LEAF's Shakespeare task: the next character after a sequence.

    Inputs are character numbers [batch, length] as int64; the papers' length is 80. 133,520 parameters with
    80 classes. `vocabulary` is the number of input characters; the classes, unless given.
    """
    if len(input_shape) != 1:
        raise FlatfedError(
            f"input_shape = {list(input_shape)}: char_lstm takes sequences of character numbers [length]; "
            "choose another model or reshape the inputs"
        )
    return CharacterLSTM(vocabulary or classes, embedding, hidden, layers, classes)


class CharacterLSTM(nn.Module):
    """Embedding, stacked LSTM, and a linear layer on the last step."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier(lstm_states(self.lstm, self.embedding(inputs))[:, -1])


def lstm_states(lstm: nn.LSTM, inputs: Tensor) -> Tensor:
    """The last layer's states [B, T, H] of a plain batch-first LSTM that starts from zeros.

    torch's fused kernel has no batching rule and no forward-mode derivative. Inside `torch.func` transforms,
    which the matrix path is made of, the same equations run step by step instead.
    """
    if torch._C._functorch.maybe_current_level() is None:
        return lstm(inputs)[0]
    for layer in range(lstm.num_layers):
        input_weight, state_weight, input_bias, state_bias = (
            getattr(lstm, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        from_inputs = F.linear(inputs, input_weight, input_bias + state_bias)  # [B, T, 4H]
        state = cell = inputs.new_zeros(inputs.shape[0], state_weight.shape[1])
        states = []
        for step in from_inputs.unbind(1):
            enter, forget, candidate, leave = (step + F.linear(state, state_weight)).chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
            state = leave.sigmoid() * cell.tanh()
            states.append(state)
        inputs = torch.stack(states, dim=1)
    return inputs
