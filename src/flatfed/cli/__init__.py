"""The command line. Each module registers its commands with the one application."""

from flatfed.cli import bench, data, diagnose, flower, look, report, reproduce, sweep, training
from flatfed.cli.terminal import app

__all__ = [
    "app",
    "bench",
    "data",
    "diagnose",
    "flower",
    "look",
    "main",
    "report",
    "reproduce",
    "sweep",
    "training",
]


def main() -> None:
    app()
