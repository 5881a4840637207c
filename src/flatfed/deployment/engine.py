"""An engine whose cohorts train at the sites of a federation."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import nn

from flatfed.core.aggregate import Aggregate
from flatfed.core.errors import DivergedError, FlatfedError, shown
from flatfed.core.flat import apply_buffer_change, no_longer_finite
from flatfed.core.rounds import Broadcast, reduced_uploads
from flatfed.core.sampling import divided_rates, local_steps
from flatfed.core.state import State, Vector, initial_state
from flatfed.data.samples import Samples
from flatfed.deployment import bounds, wire
from flatfed.deployment.nodes import Nodes, send_and_wait
from flatfed.deployment.sites import Sites
from flatfed.deployment.spec import FederationSpec
from flatfed.engines.client_store import ClientStore
from flatfed.engines.evaluator import Evaluator, Snapshot
from flatfed.engines.planning import Population, SampleShape, plan_from_shape
from flatfed.engines.sums import CohortCollector, CohortSums, Piece, rows_of
from flatfed.engines.threads import WorkerThreads, available_cores
from flatfed.training.loop import Progress
from flatfed.training.own_models import own_model_names

log = logging.getLogger("flwr.flatfed")

AnyReply = TypeVar("AnyReply", wire.TrainReply, wire.EvaluateReply)
Accepted = TypeVar("Accepted")


@dataclass(frozen=True)
class Upload:
    """One client's numbers, and how long its vectors are."""

    sums: CohortSums
    norms: dict[str, float]


class FlowerEngine:
    """Trains cohorts at the sites; everything else happens here.

    What is kept here about a client is the last round of which its upload was merged and how many of its
    answers were refused. A refused upload is treated like a lost one: it does not enter the mean, whose
    weights are those of the others, and the client goes on from its state before it. The mean displacement of
    the clients' models is known if it is what they upload.
    """

    def __init__(
        self, spec: FederationSpec, model: nn.Module, nodes: Nodes, sites: Sites, restarts: int
    ) -> None:
        if spec.training.evaluate == "active_mean" and not spec.algorithm.uploads_displacement:
            raise FlatfedError(
                "evaluate = 'active_mean': the participants' models do not travel with this algorithm or "
                "compressor; use broadcast"
            )
        if spec.training.sharing.normalisation == "recompute":
            raise FlatfedError(
                "sharing.normalisation = 'recompute': a federation's server has no samples for that; use "
                "average, local or frozen"
            )
        self.spec, self.nodes, self.sites, self.restarts = spec, nodes, sites, restarts
        input_dtype, target_dtype = wire.dtypes_of(sites.input_dtype), wire.dtypes_of(sites.target_dtype)
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
        kept = [Vector("merged_round", "one"), Vector("refusals", "one")]
        self.clients = ClientStore(kept, self.plan.dimensions, torch.float64, self._memory_bytes)
        evaluators = [Evaluator(self.plan, model, spec.transform) for _ in range(self.workers)]
        self._threads = WorkerThreads(evaluators)
        self.digest = spec.digest(model)
        self.stored_at_site: dict[int, tuple[str, ...]] = {}
        """Which of the vectors that are sent once lie on a site's disk, as far as it has said."""
        self.diverged: set[int] = set()
        """Those of the clients last asked who answered that their training diverged."""
        self.reasons: dict[int, str] = {}
        """Why clients were last left out of a round."""
        self.refused: Counter[int] = Counter()
        """How many answers of each client were refused in this round."""
        self.refusals: dict[int, int] = {}
        """How many in all, for those of whom some were refused since the server started."""
        self._merging: dict[int, int] = {}
        """The last round, by those of whom an upload was merged in it."""
        self.limits: dict[str, float] = {}
        """The norms beyond which uploads were refused in this round."""

    def train(self, broadcast: Broadcast, round: int, cohort: Sequence[int]) -> Aggregate:
        """The valid uploads of a cohort; a round with too few of them is repeated."""
        settings = self.spec.federation
        needed = min(settings.minimum_clients, len(cohort))
        uploads: dict[int, Upload] = {}
        once = self._sent_once(broadcast.vectors)
        self.refused, self.limits, attempt = Counter(), {}, 0
        while True:
            members = self._members(cohort, needed)
            missing = [client for client in members if client not in uploads]
            if not missing or attempt == settings.attempts:
                raise self._too_few(round, cohort, uploads)
            refused = self.refused.total()
            requests = [self._request(client, round, attempt=attempt, kept=once) for client in missing]
            uploads |= self._uploads(broadcast, requests, needed - len(uploads))
            self._refuse_long(uploads, broadcast)
            if len(uploads) >= needed:
                break
            if self.diverged and self.diverged == set(missing) - uploads.keys():
                # All that are missing; they would do the same steps again.
                names = ", ".join(self.sites.names[client] for client in sorted(self.diverged))
                training = self.plan.training
                raise DivergedError(
                    f"round {round + 1}: training diverged at {names}; lower lr (now {training.lr:g}) or set "
                    f"clip (now {training.clip})"
                )
            log.warning(
                "round %d: %d of at least %d uploads after attempt %d of %d",
                *(round + 1, len(uploads), needed, attempt + 1, settings.attempts),
            )
            # Until it is no longer asked, a site that is refused must not use up the attempts of the others.
            attempt += self.refused.total() == refused
        collector = CohortCollector(self.plan.algorithm, len(uploads), self._memory_bytes)
        for place, client in enumerate(sorted(uploads)):
            collector.add(Piece(place, 1, uploads[client].sums))
        for client in uploads.keys() | self.refusals.keys():
            merged = round if client in uploads else self._merged_round(client)
            row = torch.tensor([merged, self._refusals(client)], dtype=torch.float64)
            self.clients.stage_row(client, row)
        self._merging = dict.fromkeys(uploads, round)
        return collector.aggregate(broadcast.buffers)

    def _too_few(self, round_number: int, cohort: Sequence[int], uploads: dict[int, Upload]) -> FlatfedError:
        settings = self.spec.federation
        first = next(client for client in cohort if client not in uploads)
        return FlatfedError(
            f"minimum_clients = {settings.minimum_clients}: round {round_number + 1} had {len(uploads)} "
            f"valid uploads after {settings.attempts} attempts ({self.sites.names[first]}: "
            f"{self._exclusion(first) or self.reasons[first]}); started again, the run goes on from there"
        )

    def _merged_round(self, client: int) -> int:
        """The last round of which a client's upload was merged, −1 if none."""
        return -1 if (row := self.clients.row(client)) is None else int(row[0])

    def _refusals(self, client: int) -> int:
        """How many of a client's answers were refused in this run."""
        row = self.clients.row(client)
        return self.refusals.get(client, 0 if row is None else int(row[1]))

    def _exclusion(self, client: int) -> str | None:
        """Why a site is not asked at all, None if it is asked."""
        settings, refusals = self.spec.federation, self._refusals(client)
        if self.sites.names[client] in settings.leave_out:
            return "leave_out names it"
        if refusals >= settings.max_refusals:
            return f"{refusals} of its answers were refused, and max_refusals is {settings.max_refusals}"
        return None

    def _members(self, cohort: Sequence[int], needed: int) -> list[int]:
        """A cohort without sites that are not asked; if it is too small, the next ones take their places."""
        count = len(self.sites.names)
        following = [(cohort[0] + step) % count for step in range(count)]
        members = [client for client in cohort if self._exclusion(client) is None]
        others = [client for client in following if client not in cohort and self._exclusion(client) is None]
        return sorted(members + others[: max(0, needed - len(members))])

    def _refuse_long(self, uploads: dict[int, Upload], broadcast: Broadcast) -> None:
        """Takes uploads away that are far longer than those of the others, or than anything plausible."""
        ratio = self.spec.federation.max_norm_ratio
        plausible = bounds.plausible_norms(broadcast, self.plan.algorithm.uploads, ratio)
        limits = bounds.norm_bounds([upload.norms for upload in uploads.values()], plausible, ratio)
        for client, upload in list(uploads.items()):
            name = next((name for name, norm in upload.norms.items() if norm > limits[name].norm), None)
            if name is not None:
                self.limits[name] = limits[name].norm
                norm, source = upload.norms[name], limits[name].source
                self._refuse(client, f"{name}: its norm {norm:.3g} is beyond {source}")
                del uploads[client]

    def _uploads(self, broadcast: Broadcast, requests: list[wire.Request], needed: int) -> dict[int, Upload]:
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

        def accept(reply: wire.TrainReply, answer: RecordDict) -> Upload:
            upload = self._upload(reply, answer, broadcast.buffers)
            self.stored_at_site[reply.client] = reply.kept
            return upload

        return self._ask("train", wire.TrainReply, messages, accept, needed)

    def _upload(self, reply: wire.TrainReply, answer: RecordDict, buffers: State) -> Upload:
        """A client's numbers, of which the server works out itself whatever it can."""
        plan, client = self.plan, reply.client
        algorithm, samples = plan.algorithm, self.sites.samples[client]
        if reply.samples != samples:
            raise FlatfedError(f"samples = {reply.samples}: it had {samples} when the run began")
        record = wire.array_record(answer, "vectors")
        decoded, size = wire.decode_payloads(record, algorithm, plan.dimensions, plan.layout.dtype)
        unpacked = wire.unpack(wire.array_record(answer, "buffers"), wire.change_shapes(buffers))
        for name, value in [*decoded.items(), *unpacked.items()]:
            most = wire.largest(value.dtype)
            if value.numel() and float(value.abs().max()) > most:
                raise FlatfedError(f"{name}: it holds numbers beyond {most:g}")
        changes = {name: value.to(plan.device) for name, value in unpacked.items()}
        diverged = no_longer_finite(buffers, apply_buffer_change(buffers, changes))
        if diverged is not None:
            raise FlatfedError(f"{diverged}: with this change it would not be finite")
        received = {key: value.to(plan.device) for key, value in decoded.items()}
        uploads = reduced_uploads(algorithm, received)
        every_rate = algorithm.schedule.rates(
            plan.training.rate(reply.round), local_steps(plan.training, samples)
        )
        _, rates = divided_rates(plan.training, every_rate)
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
        norms = bounds.norms(received | {f"buffer {name}": change for name, change in changes.items()})
        return Upload(sums.times(weight), norms)

    def evaluate(self, snapshot: Snapshot, samples: Samples) -> dict[str, float]:
        """On samples that the server has itself."""
        return self._threads.evaluate(snapshot, samples)

    def evaluate_on_sites(self, snapshot: Snapshot, round_number: int = 0) -> list[dict[str, float]]:
        """Loss and metrics of a model at the sites that answer, on their own data."""
        vectors = wire.pack({"model": snapshot.model})
        buffers = wire.pack(self.plan.division.travelling(snapshot.buffers))
        clients = [client for client in range(len(self.sites.names)) if self._exclusion(client) is None]
        # After a round but before it is committed, as callbacks are, its uploads have been merged.
        merged = {
            client: max(self._merged_round(client), self._merging.get(client, -1)) for client in clients
        }
        requests = [self._request(client, round_number, merged=merged[client]) for client in clients]
        messages = [(item, wire.content(item, vectors=vectors, buffers=buffers)) for item in requests]
        records = self._ask("evaluate", wire.EvaluateReply, messages, self._metrics, 0)
        return [records[client] for client in sorted(records)]

    def _metrics(self, reply: wire.EvaluateReply, _: RecordDict) -> dict[str, float]:
        measured = {"loss", *self.plan.metrics}
        own = {"samples", *measured}
        for kind in own_model_names(self.plan):
            own |= {f"{kind}_{name}" for name in measured}
        names = set(reply.metrics)
        if names not in (own, own | {f"test_{name}" for name in own}):
            raise FlatfedError(f"metrics: {shown(sorted(names))} where {shown(sorted(own))} belong")
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
        means = {}
        if settings.evaluate_every is not None and progress.round % settings.evaluate_every == 0:
            snapshot = Snapshot(progress.server["model"], progress.buffers)
            means = weighted_means(self.evaluate_on_sites(snapshot, progress.round))
        return means | self._refusal_record()

    def _refusal_record(self) -> dict[str, float]:
        """What the history says about refusals; nothing if there were none."""
        record = {f"refused_client_{client}": float(count) for client, count in sorted(self.refused.items())}
        record |= {f"norm_limit_{name}": limit for name, limit in self.limits.items()}
        left_out = sum(self._exclusion(client) is not None for client in range(len(self.sites.names)))
        totals = {"refused": float(self.refused.total()), "left_out": float(left_out)}
        return record | {name: number for name, number in totals.items() if number}

    def _request(self, client: int, round_number: int, **options: Any) -> wire.Request:
        options = {"merged": self._merged_round(client), **options}
        return wire.Request(
            run=self.sites.run,
            client=client,
            round=round_number,
            spec=self.digest,
            restarts=self.restarts,
            oldest=max(0, round_number - self.spec.federation.keep_states),
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
                self._leave_out(request.client, f"{kind}: not connected")
            else:
                requests[node], contents[node] = request, content
        timeout = self.spec.federation.round_timeout
        answers, failures = send_and_wait(self.nodes.grid, kind, contents, timeout)
        self.diverged = set()
        for node, failure in failures.items():
            client = requests[node].client
            if failure.code == wire.REPEATED:
                self._refuse(client, f"{failure.reason}")
            else:
                self._leave_out(client, f"{kind}: {failure.reason}")
            if failure.code == wire.DIVERGED:
                self.diverged.add(client)
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
                self._refuse(request.client, f"{error}")
        return accepted

    def _leave_out(self, client: int, reason: str) -> None:
        """Notes why a client is left out of a round."""
        self.reasons[client] = wire.plain(reason)
        log.warning("%s (client %d) is left out: %s", self.sites.names[client], client, self.reasons[client])

    def _refuse(self, client: int, reason: str) -> None:
        """Counts an answer that is not in order, beside leaving it out."""
        self._leave_out(client, f"refused, {reason}")
        self.refused[client] += 1
        self.refusals[client] = self._refusals(client) + 1
        if (exclusion := self._exclusion(client)) is not None:
            log.warning("%s (client %d) is no longer asked: %s", self.sites.names[client], client, exclusion)

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
