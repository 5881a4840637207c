"""The server's side: the rounds of every other training, whose cohorts train elsewhere."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from pydantic import ValidationError, model_validator
from torch import Tensor, nn

from flatfed.core.errors import DivergedError, FlatfedError, one_line
from flatfed.core.flat import apply_buffer_change, no_longer_finite
from flatfed.core.sampling import local_steps
from flatfed.core.state import State, Vector, initial_state
from flatfed.data.federation import ClientData, Federation, Samples
from flatfed.deployment.nodes import Nodes, ask
from flatfed.deployment.task import Task
from flatfed.deployment.wire import (
    DIVERGED,
    LARGEST,
    Description,
    Evaluation,
    Header,
    Order,
    RunName,
    SampleCount,
    Shape,
    Upload,
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
from flatfed.engines.local import LocalEngine
from flatfed.engines.sums import Piece, Totals
from flatfed.runs.folder import read_json
from flatfed.training.checks import too_short
from flatfed.training.loop import Callback, Progress, Run, run_engine

log = logging.getLogger("flwr.flatfed")


def server_app(
    task: Task, test: Callable[[], Samples] | None = None, callbacks: Sequence[Callback] = ()
) -> ServerApp:
    """A Flower ServerApp that runs a task's rounds.

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
            serve(task, grid, Path(folder), test and test(), callbacks)
        except FlatfedError as error:
            log.error("%s", error)
            raise

    return app


def serve(
    task: Task,
    grid: Grid,
    folder: Path,
    test: Samples | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """A whole run over Flower's grid."""
    federation = task.federation
    nodes = Nodes(grid, federation.round_timeout)
    known = _stored(folder)
    if known is None:
        known = Population.of(nodes.assemble(federation.clients, federation.wait))
    known.check(federation.clients)
    task.settings.cohort_size(len(known.names))
    if (note := too_short(task.algorithm, task.settings)) is not None:
        log.warning("%s", note)
    engine = FlowerEngine(task, task.model(), nodes, known, test)
    asked = {
        "algorithm": task.algorithm.describe(),
        "training": task.settings.model_dump(),
        "federation": known.model_dump(),
    }
    log.info("the federation is %s; the run's folder is %s", ", ".join(known.names), folder)
    return run_engine(engine, folder, asked, [engine.after_round, *callbacks], evaluate_clients=True)


class Population(Header):
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
    def _as_many(self) -> Population:
        if not self.names or len(self.names) != len(self.samples):
            raise ValueError(f"samples: {len(self.samples)} numbers for {len(self.names)} names")
        return self

    @classmethod
    def of(cls, sites: dict[str, Description]) -> Population:
        (first_name, first), *others = sites.items()
        for name, site in others:
            for what in ("input_shape", "input_dtype", "target_shape", "target_dtype"):
                here, there = getattr(site, what), getattr(first, what)
                if here != there:
                    raise FlatfedError(
                        f"{what}: {here} at {name}, {there} at {first_name}; all sites need the same form"
                    )
        return cls(
            run=uuid.uuid4().hex,
            names=list(sites),
            samples=[site.samples for site in sites.values()],
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


def _stored(folder: Path) -> Population | None:
    """The population of the run that is in the folder."""
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
        return Population.model_validate(stored)
    except ValidationError as error:
        complaint = one_line(error, Population.model_fields, prefix="federation")
        raise FlatfedError(f"{path}: {complaint}; restore the file or choose another folder") from None


class SitesFederation(Federation):
    """The sites as the server sees them: how many samples each has, and samples that only look like them."""

    def __init__(self, known: Population, test: Samples | None) -> None:
        self.known, self.test = known, test

    def __len__(self) -> int:
        return len(self.known.names)

    def client(self, number: int) -> ClientData:
        known, samples = self.known, self.known.samples[number]

        def blank(shape: Sequence[int], dtype: str) -> Tensor:
            return torch.zeros(1, *shape, dtype=dtype_of(dtype)).expand(samples, *shape)

        return ClientData(
            blank(known.input_shape, known.input_dtype), blank(known.target_shape, known.target_dtype)
        )

    @property
    def total_samples(self) -> int:
        return sum(self.known.samples)

    @property
    def common_size(self) -> None:
        return None

    def to(self, device: torch.device) -> SitesFederation:
        return SitesFederation(self.known, self.test and (self.test[0].to(device), self.test[1].to(device)))


class FlowerEngine(LocalEngine):
    """Trains cohorts at the sites; everything else happens here.

    What is kept here about a client is the last round of which its upload was merged. With compressed uploads
    the recorded flatness distance is that of the uploads as they arrive.
    """

    client_dtype = torch.float64

    def __init__(
        self, task: Task, model: nn.Module, nodes: Nodes, known: Population, test: Samples | None
    ) -> None:
        altered = any(part.alters_displacement for part in task.algorithm.parts)
        if task.settings.evaluate == "active_mean" and (altered or task.algorithm.compressed):
            raise FlatfedError(
                "evaluate = 'active_mean': the participants' models do not travel with this algorithm or "
                "compressor; use broadcast"
            )
        super().__init__(
            model,
            SitesFederation(known, test),
            task.algorithm,
            task.loss,
            # Every round is saved: sites keep only the states before and after the last one.
            task.engine_settings(checkpoint_every=1),
            task.chosen_metrics,
        )
        self.task, self.nodes, self.known = task, nodes, known
        self.digest = task.digest(model)
        # Which of the vectors that are sent once lie on a site's disk, as far as it has told.
        self.kept: dict[int, set[str]] = {}
        # Those of the clients asked last who answered that their training diverged.
        self.diverged: set[int] = set()

    @property
    def client_vectors(self) -> tuple[Vector, ...]:
        return (Vector("merged_round", "one"),)

    def _pieces(
        self,
        received: State,
        buffers: State,
        store: ClientStore,
        round_number: int,
        chunks: Sequence[Sequence[int]],
    ) -> Iterator[Piece]:
        """The valid uploads in the order of the cohort."""
        settings = self.task.federation
        cohort = [client for chunk in chunks for client in chunk]
        needed = min(settings.minimum_clients, len(cohort))
        accepted: dict[int, Totals] = {}
        once = self._once(received)
        for attempt in range(settings.attempts):
            missing = [client for client in cohort if client not in accepted]
            orders = {
                client: Order(
                    run=self.known.run,
                    task=self.digest,
                    client=client,
                    round=round_number,
                    merged=-1 if (row := store.row(client)) is None else int(row[0]),
                    attempt=attempt,
                    kept=once,
                )
                for client in missing
            }
            accepted |= self._trained(received, buffers, orders, needed - len(accepted))
            if len(accepted) >= needed:
                break
            if self.diverged == set(missing) - accepted.keys():
                # All that are missing; they would do the same steps again.
                raise DivergedError(self._divergence(round_number))
            log.warning(
                "round %d: %d of at least %d uploads after attempt %d of %d",
                *(round_number + 1, len(accepted), needed, attempt + 1, settings.attempts),
            )
        else:
            raise FlatfedError(
                f"minimum_clients = {settings.minimum_clients}: round {round_number + 1} had {len(accepted)} "
                f"valid uploads after {settings.attempts} attempts; started again, the run goes on from there"
            )
        for place, client in enumerate(sorted(accepted)):
            store.stage_row(client, torch.tensor([float(round_number)], dtype=self.client_dtype))
            yield Piece(place, 1, accepted[client])

    def _divergence(self, round_number: int) -> str:
        names = ", ".join(self.known.names[client] for client in sorted(self.diverged))
        settings = self.plan.settings
        return (
            f"round {round_number + 1}: training diverged at {names}; lower lr (now {settings.lr:g}) or set "
            f"clip (now {settings.clip})"
        )

    def _trained(
        self, received: State, buffers: State, orders: dict[int, Order], needed: int
    ) -> dict[int, Totals]:
        """Those of the clients' uploads that come in time and are in order."""
        # Packed once, however many messages they go into.
        packed, packed_buffers = pack(received), pack(buffers)

        def message(order: Order) -> RecordDict:
            kept = self.kept.get(order.client, set())
            needless = {name for name, wanted in order.kept.items() if not wanted or wanted in kept}
            vectors = ArrayRecord({name: each for name, each in packed.items() if name not in needless})
            return content(order, vectors=vectors, buffers=packed_buffers)

        answers = self._ask("train", {client: message(order) for client, order in orders.items()}, needed)
        accepted = {}
        for client, answer in answers.items():
            order = orders[client]
            try:
                upload = read_header(Upload, answer)
                self._check_header(upload, client, order.round)
                accepted[client] = self._totals(upload, answer, buffers)
            except FlatfedError as error:
                self._refuse(client, f"round {order.round + 1}: refused, {error}")
                continue
            self.kept[client] = set(upload.kept)
        for client in orders.keys() - accepted.keys():
            # It may have lost its disk; what it lacks is sent again.
            self.kept.pop(client, None)
        return accepted

    def _totals(self, upload: Upload, answer: RecordDict, buffers: State) -> Totals:
        """A client's numbers, of which the server works out itself whatever it can."""
        plan, client = self.plan, upload.client
        expected = self.known.samples[client]
        if upload.samples != expected:
            raise FlatfedError(f"samples = {upload.samples}: it had {expected} when the run began")
        record = array_record(answer, "vectors")
        decoded, size = decode_payloads(record, plan.algorithm, plan.layout.size, plan.layout.dtype)
        changes = unpack(array_record(answer, "buffers"), change_shapes(buffers))
        vectors = {name: value.to(plan.device) for name, value in decoded.items()}
        for name, value in [*decoded.items(), *changes.items()]:
            if value.numel() and float(value.abs().max()) > LARGEST:
                raise FlatfedError(f"{name}: it holds numbers beyond {LARGEST:g}")
        moved = {name: value.to(plan.device) for name, value in changes.items()}
        spoilt = no_longer_finite(buffers, apply_buffer_change(buffers, moved))
        if spoilt is not None:
            raise FlatfedError(f"{spoilt}: with this change it would not be finite")
        steps = local_steps(plan.settings, expected)
        totals = Totals(
            upload=vectors,
            buffers=moved,
            rate=sum(plan.algorithm.schedule.rates(plan.settings.rate(upload.round), steps)),
            loss=upload.loss,
            evaluations=upload.evaluations,
            bytes_up=size,
            drift=upload.drift,
            squared=float(torch.linalg.vector_norm(vectors["displacement"]).square()),
        )
        return totals.times(plan.weight(expected))

    def evaluate_clients(
        self, model: Tensor, buffers: State, clients: Sequence[int], round_number: int = 0
    ) -> list[dict[str, float]]:
        """What the sites that answer find on their own data."""
        vectors, packed = pack({"model": model}), pack(buffers)
        orders = {
            client: content(
                Order(run=self.known.run, task=self.digest, client=client, round=round_number),
                vectors=vectors,
                buffers=packed,
            )
            for client in clients
        }
        found = []
        for client, answer in sorted(self._ask("evaluate", orders, 0).items()):
            try:
                evaluation = read_header(Evaluation, answer)
                self._check_header(evaluation, client, round_number)
                found.append(self._checked(evaluation, client))
            except FlatfedError as error:
                self._refuse(client, f"evaluation refused, {error}")
        return found

    def _checked(self, evaluation: Evaluation, client: int) -> dict[str, float]:
        own = {"samples", "loss", *self.plan.metrics}
        names = set(evaluation.found)
        if names not in (own, own | {f"test_{name}" for name in own}):
            raise FlatfedError(f"found: {sorted(names)} where {sorted(own)} belong")
        if evaluation.found["samples"] != self.known.samples[client]:
            raise FlatfedError("samples: not as many as when the run began")
        if evaluation.found.get("test_samples", 1) < 1:
            raise FlatfedError(f"test_samples = {evaluation.found['test_samples']:g}: at least 1 belongs")
        return {"client": client, **evaluation.found}

    def after_round(self, progress: Progress) -> dict[str, float]:
        """Tells how far the run is, and evaluates on the sites' data when that is due."""
        record, settings = progress.record, self.task.federation
        log.info(
            "round %d of %d: %d of %d clients, loss %.4f%s",
            *(progress.round, self.plan.settings.rounds, record["participants"], len(progress.cohort)),
            *(record["train_loss"], f", test {record['test_loss']:.4f}" if "test_loss" in record else ""),
        )
        if settings.evaluate_every is None or progress.round % settings.evaluate_every:
            return {}
        everybody = range(len(self.known.names))
        found = self.evaluate_clients(progress.server["model"], progress.buffers, everybody, progress.round)
        return weighted_means(found)

    def _ask(self, kind: str, contents: dict[int, RecordDict], needed: int) -> dict[int, RecordDict]:
        """The answers of clients that are there and answer in time; the others are named in the log."""
        names = {client: self.known.names[client] for client in contents}
        online = self.nodes.wait(needed, names.values())
        by_node = {online[name]: client for client, name in names.items() if name in online}
        for client, name in names.items():
            if name not in online:
                self._refuse(client, f"{kind}: not connected")
        answers, failures = ask(
            self.nodes.grid,
            kind,
            {node: contents[client] for node, client in by_node.items()},
            self.task.federation.round_timeout,
        )
        for node, failure in failures.items():
            self._refuse(by_node[node], f"{kind}: {failure.reason}")
        self.diverged = {by_node[node] for node, failure in failures.items() if failure.code == DIVERGED}
        return {by_node[node]: answer for node, answer in answers.items()}

    def _check_header(self, header: Upload | Evaluation, client: int, round_number: int) -> None:
        for what, found, expected in (
            ("run", header.run, self.known.run),
            ("client", header.client, client),
            ("round", header.round, round_number),
        ):
            if found != expected:
                raise FlatfedError(f"{what} = {found}: it should be {expected}")

    def _refuse(self, client: int, reason: str) -> None:
        log.warning("%s (client %d) is left out: %s", self.known.names[client], client, reason)

    def _once(self, received: State) -> dict[str, str]:
        """The digests of the vectors that are sent once; none as long as they are not made."""
        vectors = [each for each in self.plan.algorithm.server_vectors if each.sent_once]
        vectors = [each for each in vectors if each.name in received]
        initial = initial_state(vectors, self.plan.dimensions, received["model"])
        return {
            each.name: ""
            if torch.equal(received[each.name], initial[each.name])
            else digest(received[each.name])
            for each in vectors
        }


def weighted_means(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the sites' samples, as "clients_…", and over their test samples."""
    means = {}
    for prefix in ("", "test_"):
        sites = [site for site in found if f"{prefix}samples" in site]
        total = math.fsum(site[f"{prefix}samples"] for site in sites)
        for name in sites[0] if sites else ():
            if name.startswith("test_") == bool(prefix) and not name.endswith(("samples", "client")):
                weighted = math.fsum(site[f"{prefix}samples"] * site[name] for site in sites)
                means[f"clients_{name}"] = weighted / total
    return means
