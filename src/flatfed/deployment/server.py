"""The server's side: an engine whose cohorts train at the sites."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from pydantic import ValidationError, model_validator
from torch import nn

from flatfed.core.aggregate import Aggregate
from flatfed.core.errors import DivergedError, FlatfedError, one_line
from flatfed.core.flat import apply_buffer_change, no_longer_finite
from flatfed.core.rounds import Broadcast, reduced_uploads
from flatfed.core.sampling import local_steps
from flatfed.core.state import State, Vector, initial_state
from flatfed.data.federation import Samples
from flatfed.deployment.nodes import Nodes, send_and_wait
from flatfed.deployment.spec import FederationSpec
from flatfed.deployment.wire import (
    DIVERGED,
    LARGEST,
    EvaluateReply,
    Header,
    Request,
    RunName,
    SampleCount,
    Shape,
    SiteDescription,
    TrainReply,
    array_record,
    change_shapes,
    content,
    decode_payloads,
    digest,
    dtype_of,
    pack,
    read_header,
    unpack,
)
from flatfed.engines.client_store import ClientStore
from flatfed.engines.planning import Plan, Population, SampleShape, plan_from_shape
from flatfed.engines.sums import CohortCollector, CohortSums, Piece, rows_of
from flatfed.engines.threads import WorkerThreads, available_cores
from flatfed.engines.worker import Evaluator, Snapshot
from flatfed.runs.files import read_json
from flatfed.runs.train import Run, run_engine
from flatfed.training.checks import too_short
from flatfed.training.loop import Callback, Progress

log = logging.getLogger("flwr.flatfed")


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
    sites = _stored(folder)
    if sites is None:
        sites = Sites.of(nodes.assemble(federation.clients, federation.wait))
    sites.check(federation.clients)
    spec.training.cohort_size(len(sites.names))
    if (note := too_short(spec.algorithm, spec.training)) is not None:
        log.warning("%s", note)
    model = spec.model()
    engine = FlowerEngine(spec, model, nodes, sites)
    log.info("the federation is %s; the run's folder is %s", ", ".join(sites.names), folder)
    try:
        return run_engine(
            engine,
            model,
            test,
            [engine.after_round, *callbacks],
            engine.evaluate_on_sites,
            folder,
            {**spec.recorded(), "federation": sites.model_dump()},
            spec.identity(model),
            # Every round is saved: sites keep only the states before and after the last one.
            checkpoint_every=1,
        )
    finally:
        engine.close()


class Sites(Header):
    """The sites of a run: client i is always the same one."""

    run: RunName
    """A name of this run alone, so that sites never use what they kept for another."""
    names: list[str]
    samples: list[SampleCount]
    input_shape: Shape
    input_dtype: str
    target_shape: Shape
    target_dtype: str

    @model_validator(mode="after")
    def _as_many(self) -> Sites:
        if not self.names or len(self.names) != len(self.samples):
            raise ValueError(f"samples: {len(self.samples)} numbers for {len(self.names)} names")
        return self

    @classmethod
    def of(cls, descriptions: dict[str, SiteDescription]) -> Sites:
        (first_name, first), *others = descriptions.items()
        for name, site in others:
            for what in ("input_shape", "input_dtype", "target_shape", "target_dtype"):
                here, there = getattr(site, what), getattr(first, what)
                if here != there:
                    raise FlatfedError(
                        f"{what}: {here} at {name}, {there} at {first_name}; all sites need the same form"
                    )
        return cls(
            run=uuid.uuid4().hex,
            names=list(descriptions),
            samples=[site.samples for site in descriptions.values()],
            input_shape=first.input_shape,
            input_dtype=first.input_dtype,
            target_shape=first.target_shape,
            target_dtype=first.target_dtype,
        )

    def check(self, clients: int | tuple[str, ...]) -> None:
        same = len(self.names) == clients if isinstance(clients, int) else self.names == sorted(set(clients))
        if not same:
            raise FlatfedError(
                f"clients = {clients}: the run in the folder is that of {', '.join(self.names)}; choose "
                "another folder or the same clients"
            )

    @property
    def sample_shape(self) -> SampleShape:
        return SampleShape(
            self.input_shape, dtype_of(self.input_dtype), self.target_shape, dtype_of(self.target_dtype)
        )

    @property
    def population(self) -> Population:
        return Population(len(self.names), sum(self.samples), self.samples[0])


def _stored(folder: Path) -> Sites | None:
    """The sites of the run that is in the folder."""
    path = folder / "config.json"
    if not path.exists():
        return None
    try:
        stored = read_json(path)["federation"]
    except (KeyError, TypeError):
        raise FlatfedError(
            f"{folder}: it holds a run that was no federation; choose another folder"
        ) from None
    try:
        return Sites.model_validate(stored)
    except ValidationError as error:
        complaint = one_line(error, Sites.model_fields, prefix="federation")
        raise FlatfedError(f"{path}: {complaint}; restore the file or choose another folder") from None


def _plan(spec: FederationSpec, model: nn.Module, sites: Sites) -> Plan:
    if spec.training.evaluate == "active_mean" and not spec.algorithm.uploads_displacement:
        raise FlatfedError(
            "evaluate = 'active_mean': the participants' models do not travel with this algorithm or "
            "compressor; use broadcast"
        )
    return plan_from_shape(
        model,
        sites.sample_shape,
        sites.population,
        spec.algorithm,
        spec.loss,
        spec.used_metrics,
        spec.site_training,
        spec.execution.device,
    )


class FlowerEngine:
    """Trains cohorts at the sites; everything else happens here.

    What is kept here about a client is the last round of which its upload was merged. The mean displacement
    of the clients' models is known if it is what they upload.
    """

    def __init__(self, spec: FederationSpec, model: nn.Module, nodes: Nodes, sites: Sites) -> None:
        self.spec, self.nodes, self.sites = spec, nodes, sites
        self.plan = _plan(spec, model, sites)
        self.workers = spec.execution.workers or available_cores()
        self._memory_bytes = spec.execution.client_memory_bytes
        kept = [Vector("merged_round", "one")]
        self.clients = ClientStore(kept, self.plan.dimensions, torch.float64, self._memory_bytes)
        evaluators = [Evaluator(self.plan, model, spec.transform) for _ in range(self.workers)]
        self._threads = WorkerThreads(evaluators)
        self.digest = spec.digest(model)
        self.stored_at_site: dict[int, set[str]] = {}
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
            requests = {
                client: Request(
                    run=self.sites.run,
                    spec=self.digest,
                    client=client,
                    round=round,
                    merged=-1 if (row := self.clients.row(client)) is None else int(row[0]),
                    attempt=attempt,
                    kept=once,
                )
                for client in missing
            }
            accepted |= self._uploads(broadcast, requests, needed - len(accepted))
            if len(accepted) >= needed:
                break
            if self.diverged == set(missing) - accepted.keys():
                # All that are missing; they would do the same steps again.
                raise DivergedError(self._divergence(round))
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

    def _divergence(self, round_number: int) -> str:
        names = ", ".join(self.sites.names[client] for client in sorted(self.diverged))
        training = self.plan.training
        return (
            f"round {round_number + 1}: training diverged at {names}; lower lr (now {training.lr:g}) or set "
            f"clip (now {training.clip})"
        )

    def _uploads(
        self, broadcast: Broadcast, requests: dict[int, Request], needed: int
    ) -> dict[int, CohortSums]:
        """Those of the clients' uploads that arrive in time and are in order."""
        # Packed once, however many messages they go into.
        packed, packed_buffers = pack(broadcast.vectors), pack(broadcast.buffers)

        def message(request: Request) -> RecordDict:
            stored = self.stored_at_site.get(request.client, set())
            omitted = {key for key, wanted in request.kept.items() if not wanted or wanted in stored}
            vectors = ArrayRecord({key: array for key, array in packed.items() if key not in omitted})
            return content(request, vectors=vectors, buffers=packed_buffers)

        messages = {client: message(request) for client, request in requests.items()}
        accepted = {}
        for client, answer in self._ask("train", messages, needed).items():
            request = requests[client]
            try:
                reply = read_header(TrainReply, answer)
                self._check_header(reply, client, request.round)
                accepted[client] = self._sums(reply, answer, broadcast.buffers)
            except FlatfedError as error:
                self._refuse(client, f"round {request.round + 1}: refused, {error}")
                continue
            self.stored_at_site[client] = set(reply.kept)
        for client in requests.keys() - accepted.keys():
            # It may have lost its disk; what it lacks is sent again.
            self.stored_at_site.pop(client, None)
        return accepted

    def _sums(self, reply: TrainReply, answer: RecordDict, buffers: State) -> CohortSums:
        """A client's numbers, of which the server works out itself whatever it can."""
        plan, client = self.plan, reply.client
        algorithm, samples = plan.algorithm, self.sites.samples[client]
        if reply.samples != samples:
            raise FlatfedError(f"samples = {reply.samples}: it had {samples} when the run began")
        record = array_record(answer, "vectors")
        decoded, size = decode_payloads(record, algorithm, plan.dimensions, plan.layout.dtype)
        unpacked = unpack(array_record(answer, "buffers"), change_shapes(buffers))
        for name, value in [*decoded.items(), *unpacked.items()]:
            if value.numel() and float(value.abs().max()) > LARGEST:
                raise FlatfedError(f"{name}: it holds numbers beyond {LARGEST:g}")
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
        vectors, buffers = pack({"model": snapshot.model}), pack(snapshot.buffers)
        requests = {
            client: content(
                Request(run=self.sites.run, spec=self.digest, client=client, round=round_number),
                vectors=vectors,
                buffers=buffers,
            )
            for client in range(len(self.sites.names))
        }
        records = []
        for client, answer in sorted(self._ask("evaluate", requests, 0).items()):
            try:
                reply = read_header(EvaluateReply, answer)
                self._check_header(reply, client, round_number)
                records.append(self._checked(reply, client))
            except FlatfedError as error:
                self._refuse(client, f"evaluation refused, {error}")
        return records

    def _checked(self, reply: EvaluateReply, client: int) -> dict[str, float]:
        own = {"samples", "loss", *self.plan.metrics}
        names = set(reply.metrics)
        if names not in (own, own | {f"test_{name}" for name in own}):
            raise FlatfedError(f"metrics: {sorted(names)} where {sorted(own)} belong")
        if reply.metrics["samples"] != self.sites.samples[client]:
            raise FlatfedError("samples: not as many as when the run began")
        if reply.metrics.get("test_samples", 1) < 1:
            raise FlatfedError(f"test_samples = {reply.metrics['test_samples']:g}: at least 1 belongs")
        return {"client": client, **reply.metrics}

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

    def _ask(self, kind: str, contents: dict[int, RecordDict], needed: int) -> dict[int, RecordDict]:
        """The answers of clients that are connected and answer in time; the others are named in the log."""
        names = {client: self.sites.names[client] for client in contents}
        online = self.nodes.wait(needed, names.values())
        by_node = {online[name]: client for client, name in names.items() if name in online}
        for client, name in names.items():
            if name not in online:
                self._refuse(client, f"{kind}: not connected")
        answers, failures = send_and_wait(
            self.nodes.grid,
            kind,
            {node: contents[client] for node, client in by_node.items()},
            self.spec.federation.round_timeout,
        )
        for node, failure in failures.items():
            self._refuse(by_node[node], f"{kind}: {failure.reason}")
        self.diverged = {by_node[node] for node, failure in failures.items() if failure.code == DIVERGED}
        return {by_node[node]: answer for node, answer in answers.items()}

    def _check_header(self, header: TrainReply | EvaluateReply, client: int, round_number: int) -> None:
        for field, value, expected in (
            ("run", header.run, self.sites.run),
            ("client", header.client, client),
            ("round", header.round, round_number),
        ):
            if value != expected:
                raise FlatfedError(f"{field} = {value}: it should be {expected}")

    def _refuse(self, client: int, reason: str) -> None:
        self.refusals[client] = reason
        log.warning("%s (client %d) is left out: %s", self.sites.names[client], client, reason)

    def _sent_once(self, vectors: State) -> dict[str, str]:
        """The digests of the vectors that are sent once; "" as long as they are not made."""
        declared = [vector for vector in self.plan.algorithm.server_vectors if vector.sent_once]
        declared = [vector for vector in declared if vector.name in vectors]
        initial = initial_state(declared, self.plan.dimensions, vectors["model"])
        return {
            key: "" if torch.equal(vectors[key], value) else digest(vectors[key])
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
