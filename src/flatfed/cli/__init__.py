"""The command line. Each module registers its commands with the one application."""

from flatfed.cli import data, diagnose, look, papers, sweep, training
from flatfed.cli.terminal import app

__all__ = ["app", "data", "diagnose", "look", "main", "papers", "sweep", "training"]


def main() -> None:
    app()
