"""The two apps that Flower starts: `server` beside the SuperLink, `client` beside every SuperNode."""

from pathlib import Path

from flatfed.deployment import Task, client_app, server_app

from .data import load, test

task = Task.read(Path(__file__).with_name("federation.toml"))

client = client_app(task, load)

server = server_app(task, test)
