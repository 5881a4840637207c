"""The two apps that Flower starts: `server` beside the SuperLink, `client` beside every SuperNode."""

from pathlib import Path

from flatfed.deployment import FederationSpec, client_app, server_app

from .data import load, test

spec = FederationSpec.read(Path(__file__).with_name("federation.toml"))

client = client_app(spec, load)

server = server_app(spec, test)
