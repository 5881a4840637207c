"""The command line. Importing a module registers its commands with the one application."""

from flatfed.cli import bench, data, diagnose, flower, list, papers, report, show, split, training, tune
from flatfed.cli.terminal import app

__all__ = [
    "app",
    "bench",
    "data",
    "diagnose",
    "flower",
    "list",
    "main",
    "papers",
    "report",
    "show",
    "split",
    "training",
    "tune",
]


def main() -> None:
    app()
