"""The server's side: the app, and a whole run over Flower's grid."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flatfed.core.errors import DivergedError, FlatfedError, shown
from flatfed.data.samples import Samples
from flatfed.deployment import wire
from flatfed.deployment.engine import FlowerEngine
from flatfed.deployment.nodes import Nodes
from flatfed.deployment.sites import Sites
from flatfed.deployment.spec import FederationSpec
from flatfed.deployment.states import KeptStates
from flatfed.runs.files import RunFolderError
from flatfed.runs.train import Run, run_engine
from flatfed.training.checks import too_short
from flatfed.training.loop import Callback

log = logging.getLogger("flwr.flatfed")


def server_app(
    spec: FederationSpec, test: Callable[[], Samples] | None = None, callbacks: Sequence[Callback] = ()
) -> ServerApp:
    """A Flower ServerApp that runs a federation's rounds.

    The run's folder is `folder` of the app's run config; a run that is started again with the same folder
    goes on after its last finished round, or after an earlier one if the run config has a `from-round` that
    is not 0. `test()` returns test data of the server's own, if it has some.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        folder, from_round = context.run_config.get("folder"), context.run_config.get("from-round", 0)
        try:
            if not isinstance(folder, str) or not folder:
                raise FlatfedError('folder: missing; add folder = "runs/…" to [tool.flwr.app.config]')
            if not isinstance(from_round, int) or isinstance(from_round, bool) or from_round < 0:
                raise FlatfedError(f"from-round = {shown(from_round)}: give the number of a round")
            serve(spec, grid, Path(folder), test and test(), callbacks, from_round or None)
        except FlatfedError as error:
            log.error("%s", wire.plain(str(error), 2000))
            raise

    return app


def serve(
    spec: FederationSpec,
    grid: Grid,
    folder: Path,
    test: Samples | None = None,
    callbacks: Sequence[Callback] = (),
    from_round: int | None = None,
) -> Run:
    """A whole run over Flower's grid, from the folder's last state or that after `from_round` rounds."""
    states = KeptStates(folder, spec.federation.keep_states)
    if from_round is not None:
        states.go_back(from_round)
        log.warning("the run goes back to its state after round %d", from_round)
    try:
        return _serve(spec, grid, folder, test, callbacks, states)
    except FlatfedError as error:
        damaged = isinstance(error, RunFolderError) and str(error).startswith(f"{folder}{os.sep}")
        if not (damaged or isinstance(error, DivergedError)):
            raise
        raise type(error)(f"{error}{states.hint(from_round)}") from error.__cause__


def _serve(
    spec: FederationSpec,
    grid: Grid,
    folder: Path,
    test: Samples | None,
    callbacks: Sequence[Callback],
    states: KeptStates,
) -> Run:
    federation, nodes = spec.federation, Nodes(grid, spec.federation)
    sites = Sites.stored(folder)
    if sites is None:
        sites = Sites.of(nodes.assemble())
    sites.check(federation, spec.training.weighting)
    spec.training.cohort_size(len(sites.names))
    if (note := too_short(spec.algorithm, spec.training)) is not None:
        log.warning("%s", note)
    model = spec.model()
    engine = FlowerEngine(spec, model, nodes, sites, states.restarts)
    settings = {
        "training": spec.training.model_dump(),
        "execution": {**spec.execution.model_dump(), "federation": federation.model_dump()},
    }
    log.info("the federation is %s; the run's folder is %s", ", ".join(sites.names), folder)
    try:
        return run_engine(
            engine,
            model,
            {} if test is None else {"test": test},
            [engine.after_round, states.add, *callbacks],
            engine.evaluate_on_sites,
            folder,
            {"algorithm": spec.algorithm.describe(), **settings, "federation": sites.model_dump()},
            spec.identity(model),
            # Every round is saved: sites keep only the states that belong to the last few.
            checkpoint_every=1,
        )
    finally:
        engine.close()
