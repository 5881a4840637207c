"""The data: put your own in place of the handwritten digits."""

from flwr.app import Context
from torch import Tensor

from flatfed.data.datasets.digits import load_digits_tensors

SITES = 4


def load(context: Context) -> tuple[Tensor, Tensor]:
    """This site's training samples as (inputs, targets); called on the site, whose data never leave it.

    `context.node_config` has what the site's operator gave to its SuperNode with --node-config, for instance
    the path of a file. Every call must return the same samples in the same order.
    """
    site = int(str(context.node_config["name"]).removeprefix("site-"))
    data = load_digits_tensors()
    return data.train_inputs[site - 1 :: SITES], data.train_targets[site - 1 :: SITES]


def test() -> tuple[Tensor, Tensor]:
    """Test samples that the server holds itself; without any, leave `test` out of `server_app`."""
    data = load_digits_tensors()
    return data.test_inputs, data.test_targets
