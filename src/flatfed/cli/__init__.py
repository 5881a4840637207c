"""The command line. Each module registers its commands with the one application."""

from flatfed.cli import bench, data, diagnose, flower, look, papers, report, sweep, training
from flatfed.cli.terminal import app

__all__ = [
    "app",
    "bench",
    "data",
    "diagnose",
    "flower",
    "look",
    "main",
    "papers",
    "report",
    "sweep",
    "training",
]


def main() -> None:
    app()
