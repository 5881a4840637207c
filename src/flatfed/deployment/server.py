"""The server's side: an engine whose cohorts train at the sites."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import nn

from flatfed.core.aggregate import Aggregate
from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.core.flat import apply_buffer_change, no_longer_finite
from flatfed.core.rounds import Broadcast, reduced_uploads
from flatfed.core.sampling import local_steps
from flatfed.core.state import State, Vector, initial_state
from flatfed.data.federation import Samples
from flatfed.deployment import wire
from flatfed.deployment.nodes import Nodes, send_and_wait
from flatfed.deployment.sites import Sites
from flatfed.deployment.spec import FederationSpec
from flatfed.engines.client_store import ClientStore
from flatfed.engines.planning import Population, SampleShape, plan_from_shape
from flatfed.engines.sums import CohortCollector, CohortSums, Piece, rows_of
from flatfed.engines.threads import WorkerThreads, available_cores
from flatfed.engines.worker import Evaluator, Snapshot
from flatfed.runs.train import Run, run_engine
from flatfed.training.checks import too_short
from flatfed.training.loop import Callback, Progress

log = logging.getLogger("flwr.flatfed")

AnyReply = TypeVar("AnyReply", wire.TrainReply, wire.EvaluateReply)
Accepted = TypeVar("Accepted")


def server_app(
    spec: FederationSpec, test: Callable[[], Samples] | None = None, callbacks: Sequence[Callback] = ()
) -> ServerApp:
    """A Flower ServerApp that runs a federation's rounds.

    The run's folder is `folder` of the app's run config; a run that is started again with the same folder
    goes on after its last finished round. `test()` returns test data of the server's own, if it has some.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        folder = context.run_config.get("folder")
        try:
            if not isinstance(folder, str) or not folder:
                raise FlatfedError('folder: missing; add folder = "runs/…" to [tool.flwr.app.config]')
            serve(spec, grid, Path(folder), test and test(), callbacks)
        except FlatfedError as error:
            log.error("%s", error)
            raise

    return app


def serve(
    spec: FederationSpec,
    grid: Grid,
    folder: Path,
    test: Samples | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """A whole run over Flower's grid."""
    federation = spec.federation
    nodes = Nodes(grid, federation.round_timeout)
    sites = Sites.stored(folder) or Sites.of(nodes.assemble(federation.clients, federation.wait))
    sites.check(federation.clients)
    spec.training.cohort_size(len(sites.names))
    if (note := too_short(spec.algorithm, spec.training)) is not None:
        log.warning("%s", note)
    model = spec.model()
    engine = FlowerEngine(spec, model, nodes, sites)
    settings = {"training": spec.training.model_dump(), "execution": spec.execution.model_dump()}
    log.info("the federation is %s; the run's folder is %s", ", ".join(sites.names), folder)
    try:
        return run_engine(
            engine,
            model,
            test,
            [engine.after_round, *callbacks],
            engine.evaluate_on_sites,
            folder,
            {"algorithm": spec.algorithm.describe(), **settings, "federation": sites.model_dump()},
            spec.identity(model),
            # Every round is saved: sites keep only the states before and after the last one.
            checkpoint_every=1,
        )
    finally:
        engine.close()


class FlowerEngine:
    """Trains cohorts at the sites; everything else happens here.

    What is kept here about a client is the last round of which its upload was merged. The mean displacement
    of the clients' models is known if it is what they upload.
    """

    def __init__(self, spec: FederationSpec, model: nn.Module, nodes: Nodes, sites: Sites) -> None:
        if spec.training.evaluate == "active_mean" and not spec.algorithm.uploads_displacement:
            raise FlatfedError(
                "evaluate = 'active_mean': the participants' models do not travel with this algorithm or "
                "compressor; use broadcast"
            )
        self.spec, self.nodes, self.sites = spec, nodes, sites
        input_dtype, target_dtype = wire.dtype_of(sites.input_dtype), wire.dtype_of(sites.target_dtype)
        self.plan = plan_from_shape(
            model,
            SampleShape(sites.input_shape, input_dtype, sites.target_shape, target_dtype),
            Population(len(sites.names), sum(sites.samples), sites.samples[0]),
            spec.algorithm,
            spec.loss,
            spec.used_metrics,
            spec.site_training,
            spec.execution.device,
        )
        self.workers = spec.execution.workers or available_cores()
        self._memory_bytes = spec.execution.client_memory_bytes
        kept = [Vector("merged_round", "one")]
        self.clients = ClientStore(kept, self.plan.dimensions, torch.float64, self._memory_bytes)
        evaluators = [Evaluator(self.plan, model, spec.transform) for _ in range(self.workers)]
        self._threads = WorkerThreads(evaluators)
        self.digest = spec.digest(model)
        self.stored_at_site: dict[int, tuple[str, ...]] = {}
        """Which of the vectors that are sent once lie on a site's disk, as far as it has said."""
        self.diverged: set[int] = set()
        """Those of the clients last asked who answered that their training diverged."""
        self.refusals: dict[int, str] = {}
        """Why clients were last left out."""

    def train(self, broadcast: Broadcast, round: int, cohort: Sequence[int]) -> Aggregate:
        """The valid uploads of a cohort; a round with too few of them is repeated."""
        settings = self.spec.federation
        needed = min(settings.minimum_clients, len(cohort))
        accepted: dict[int, CohortSums] = {}
        once = self._sent_once(broadcast.vectors)
        for attempt in range(settings.attempts):
            missing = [client for client in cohort if client not in accepted]
            requests = [self._request(client, round, attempt=attempt, kept=once) for client in missing]
            accepted |= self._uploads(broadcast, requests, needed - len(accepted))
            if len(accepted) >= needed:
                break
            if self.diverged == set(missing) - accepted.keys():
                # All that are missing; they would do the same steps again.
                names = ", ".join(self.sites.names[client] for client in sorted(self.diverged))
                training = self.plan.training
                raise DivergedError(
                    f"round {round + 1}: training diverged at {names}; lower lr (now {training.lr:g}) or set "
                    f"clip (now {training.clip})"
                )
            log.warning(
                "round %d: %d of at least %d uploads after attempt %d of %d",
                *(round + 1, len(accepted), needed, attempt + 1, settings.attempts),
            )
        else:
            first = next(client for client in cohort if client not in accepted)
            raise FlatfedError(
                f"minimum_clients = {settings.minimum_clients}: round {round + 1} had {len(accepted)} "
                f"valid uploads after {settings.attempts} attempts ({self.sites.names[first]}: "
                f"{self.refusals[first]}); started again, the run goes on from there"
            )
        collector = CohortCollector(self.plan.algorithm, len(accepted), self._memory_bytes)
        for place, client in enumerate(sorted(accepted)):
            self.clients.stage_row(client, torch.tensor([float(round)], dtype=torch.float64))
            collector.add(Piece(place, 1, accepted[client]))
        return collector.aggregate(broadcast.buffers)

    def _uploads(
        self, broadcast: Broadcast, requests: list[wire.Request], needed: int
    ) -> dict[int, CohortSums]:
        """Those of the clients' uploads that arrive in time and are in order."""
        # Packed once, however many messages they go into.
        packed, buffers = wire.pack(broadcast.vectors), wire.pack(broadcast.buffers)
        messages = []
        for request in requests:
            # What is not in order may come from a site that lost its disk; what it lacks is sent again.
            stored = self.stored_at_site.pop(request.client, ())
            omitted = {key for key, wanted in request.kept.items() if not wanted or wanted in stored}
            vectors = ArrayRecord({key: array for key, array in packed.items() if key not in omitted})
            messages.append((request, wire.content(request, vectors=vectors, buffers=buffers)))

        def accept(reply: wire.TrainReply, answer: RecordDict) -> CohortSums:
            sums = self._sums(reply, answer, broadcast.buffers)
            self.stored_at_site[reply.client] = reply.kept
            return sums

        return self._ask("train", wire.TrainReply, messages, accept, needed)

    def _sums(self, reply: wire.TrainReply, answer: RecordDict, buffers: State) -> CohortSums:
        """A client's numbers, of which the server works out itself whatever it can."""
        plan, client = self.plan, reply.client
        algorithm, samples = plan.algorithm, self.sites.samples[client]
        if reply.samples != samples:
            raise FlatfedError(f"samples = {reply.samples}: it had {samples} when the run began")
        record = wire.array_record(answer, "vectors")
        decoded, size = wire.decode_payloads(record, algorithm, plan.dimensions, plan.layout.dtype)
        unpacked = wire.unpack(wire.array_record(answer, "buffers"), wire.change_shapes(buffers))
        for name, value in [*decoded.items(), *unpacked.items()]:
            if value.numel() and float(value.abs().max()) > wire.LARGEST:
                raise FlatfedError(f"{name}: it holds numbers beyond {wire.LARGEST:g}")
        changes = {name: value.to(plan.device) for name, value in unpacked.items()}
        diverged = no_longer_finite(buffers, apply_buffer_change(buffers, changes))
        if diverged is not None:
            raise FlatfedError(f"{diverged}: with this change it would not be finite")
        received = {key: value.to(plan.device) for key, value in decoded.items()}
        uploads = reduced_uploads(algorithm, received)
        rates = algorithm.schedule.rates(plan.training.rate(reply.round), local_steps(plan.training, samples))
        weight, streams = plan.weight(samples), algorithm.aggregate.streams
        displacement = None
        if algorithm.uploads_displacement and not streams:
            displacement = received["displacement"]
        sums = CohortSums(
            uploads=uploads if streams else {},
            buffers=changes if streams else {},
            displacement=displacement,
            total_rate=sum(rates),
            loss=reply.loss,
            gradient_evaluations=reply.gradient_evaluations,
            bytes_up=size,
            drift=reply.drift,
            squared_displacement=reply.squared_displacement,
        )
        if not streams:
            sums.rows = rows_of(
                torch.tensor([weight], dtype=torch.float64),
                {key: value[None] for key, value in uploads.items()},
                {name: change[None] for name, change in changes.items()},
            )
        return sums.times(weight)

    def evaluate(self, snapshot: Snapshot, samples: Samples) -> dict[str, float]:
        """On samples that the server has itself."""
        return self._threads.evaluate(snapshot, samples)

    def evaluate_on_sites(self, snapshot: Snapshot, round_number: int = 0) -> list[dict[str, float]]:
        """Loss and metrics of a model at the sites that answer, on their own data."""
        vectors, buffers = wire.pack({"model": snapshot.model}), wire.pack(snapshot.buffers)
        requests = [self._request(client, round_number) for client in range(len(self.sites.names))]
        messages = [(item, wire.content(item, vectors=vectors, buffers=buffers)) for item in requests]
        records = self._ask("evaluate", wire.EvaluateReply, messages, self._metrics, 0)
        return [records[client] for client in sorted(records)]

    def _metrics(self, reply: wire.EvaluateReply, _: RecordDict) -> dict[str, float]:
        own = {"samples", "loss", *self.plan.metrics}
        names = set(reply.metrics)
        if names not in (own, own | {f"test_{name}" for name in own}):
            raise FlatfedError(f"metrics: {sorted(names)} where {sorted(own)} belong")
        if reply.metrics["samples"] != self.sites.samples[reply.client]:
            raise FlatfedError("samples: not as many as when the run began")
        if reply.metrics.get("test_samples", 1) < 1:
            raise FlatfedError(f"test_samples = {reply.metrics['test_samples']:g}: at least 1 belongs")
        return {"client": reply.client, **reply.metrics}

    def after_round(self, progress: Progress) -> dict[str, float]:
        """Logs how far the run is, and evaluates on the sites' data when that is due."""
        record, settings = progress.record, self.spec.federation
        log.info(
            "round %d of %d: %d of %d clients, loss %.4f%s",
            *(progress.round, self.plan.training.rounds, record["participants"], len(progress.cohort)),
            *(record["train_loss"], f", test {record['test_loss']:.4f}" if "test_loss" in record else ""),
        )
        if settings.evaluate_every is None or progress.round % settings.evaluate_every:
            return {}
        snapshot = Snapshot(progress.server["model"], progress.buffers)
        return weighted_means(self.evaluate_on_sites(snapshot, progress.round))

    def _request(self, client: int, round_number: int, **options: Any) -> wire.Request:
        row = self.clients.row(client)
        return wire.Request(
            run=self.sites.run,
            client=client,
            round=round_number,
            spec=self.digest,
            merged=-1 if row is None else int(row[0]),
            **options,
        )

    def _ask(
        self,
        kind: str,
        reply_kind: type[AnyReply],
        messages: list[tuple[wire.Request, RecordDict]],
        accept: Callable[[AnyReply, RecordDict], Accepted],
        needed: int,
    ) -> dict[int, Accepted]:
        """What is made of the clients' answers that come in time and are in order; others are refused."""
        online = self.nodes.wait(needed, [self.sites.names[request.client] for request, _ in messages])
        requests, contents = {}, {}
        for request, content in messages:
            node = online.get(self.sites.names[request.client])
            if node is None:
                self._refuse(request.client, f"{kind}: not connected")
            else:
                requests[node], contents[node] = request, content
        timeout = self.spec.federation.round_timeout
        answers, failures = send_and_wait(self.nodes.grid, kind, contents, timeout)
        self.diverged = set()
        for node, failure in failures.items():
            self._refuse(requests[node].client, f"{kind}: {failure.reason}")
            if failure.code == wire.DIVERGED:
                self.diverged.add(requests[node].client)
        accepted = {}
        for node, answer in answers.items():
            request = requests[node]
            try:
                reply = wire.read_header(reply_kind, answer)
                for field in wire.Answer.model_fields:
                    value, expected = getattr(reply, field), getattr(request, field)
                    if value != expected:
                        raise FlatfedError(f"{field} = {value}: it should be {expected}")
                accepted[request.client] = accept(reply, answer)
            except FlatfedError as error:
                self._refuse(request.client, f"{kind} in round {request.round + 1}: refused, {error}")
        return accepted

    def _refuse(self, client: int, reason: str) -> None:
        self.refusals[client] = reason
        log.warning("%s (client %d) is left out: %s", self.sites.names[client], client, reason)

    def _sent_once(self, vectors: State) -> dict[str, str]:
        """The digests of the vectors that are sent once; "" as long as they are not made."""
        algorithm = self.plan.algorithm
        declared = [vector for vector in algorithm.server_vectors if vector.name in algorithm.sent_once]
        initial = initial_state(declared, self.plan.dimensions, vectors["model"])
        return {
            key: "" if torch.equal(vectors[key], value) else wire.digest(vectors[key])
            for key, value in initial.items()
        }

    def close(self) -> None:
        self._threads.close()


def weighted_means(sites: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the sites' samples, as "clients_…", and over their test samples."""
    means = {}
    for prefix in ("", "test_"):
        measured = [site for site in sites if f"{prefix}samples" in site]
        total = math.fsum(site[f"{prefix}samples"] for site in measured)
        for name in measured[0] if measured else ():
            if name.startswith("test_") == bool(prefix) and not name.endswith(("samples", "client")):
                weighted = math.fsum(site[f"{prefix}samples"] * site[name] for site in measured)
                means[f"clients_{name}"] = weighted / total
    return means
