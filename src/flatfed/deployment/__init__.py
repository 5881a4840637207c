"""The Flower engine: the same algorithms between organisations, each training on its own machine.

    spec = FederationSpec.read(Path(__file__).with_name("federation.toml"))
    client = client_app(spec, load)       # load(context) -> (inputs, targets) of this site
    server = server_app(spec)

A round is that of the other engines: the server broadcasts what the algorithm's parts declare, sites train by
`Worker.train_client`, their uploads travel as the bytes of the algorithm's compressor, and the server adds
them up in the order of the cohort. So a federation gives the numbers that the local engine gives on the same
data. What a site keeps between rounds stays on the site's disk.
"""

from flatfed.core.errors import FlatfedError

try:
    import flwr  # noqa: F401
except ImportError:
    raise FlatfedError("engine: Flower is not installed; pip install 'flatfed[flower]'") from None

from flatfed.deployment.client import client_app
from flatfed.deployment.server import server_app
from flatfed.deployment.spec import FederationSettings, FederationSpec

__all__ = ["FederationSettings", "FederationSpec", "client_app", "server_app"]
