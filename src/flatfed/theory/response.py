"""The response of one round to its gradients and to what is remembered, read off by running the round
itself.

Most parts are linear in the vectors that they get. All of their algebra is written for any number of
coordinates, so one run of `client_round` and `server_round` on unit vectors, a coordinate for each source
(a server's vector, a client's, the gradient of each step), gives all coefficients at once, for any
composition. A run on random vectors then tells whether the composition is linear at all.

What clients remember enters as inputs of bounded length instead: which clients take part is not known. The
bounds are the fixed point of their own rows. A server's vector that is the mean of all clients' has their
bound.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from flatfed.core.algorithm import Algorithm
from flatfed.core.context import ClientContext, MergeContext, Oracle
from flatfed.core.flat import Layout
from flatfed.core.part import Compressor, Gradient, ServerTask, Synthetic
from flatfed.core.rounds import ClientResult, broadcast, client_round, reduced_uploads, server_round
from flatfed.core.settings import Training

NEGLIGIBLE = 1e-12
"""Smaller coefficients are rounding errors."""
LATE = 10**6
"""A round after which nothing changes any more; rules that differ from round to round have no response."""
SCALES = (1e-3, 1.0, 1e3)
"""Of the random vectors: a part may be linear near zero only."""


class Response(NamedTuple):
    """s ← state · s + inputs · u for the server's vectors s, the model first, and inputs u.

    Inputs are gradients, full gradients and what is remembered, in units of the longest gradient; those
    that act alike are one.
    """

    state: Tensor
    """[n, n]"""
    inputs: Tensor
    """[n, m]"""
    local: Tensor
    """How far inputs move the local model in k steps, [K + 1]; without what all clients have in common."""


class _Round(NamedTuple):
    """What came out of a round, in terms of what went in."""

    after: Tensor
    """The server's vectors, then the client's."""
    local: Tensor
    """The displacement after k steps, [K + 1, P]."""


def readable(algorithm: Algorithm) -> Algorithm | None:
    """The composition whose response is that of the algorithm; None if none can be read off."""
    if algorithm.compressed or not algorithm.aggregate.streams or not algorithm.gradient.bounded:
        return None
    if isinstance(algorithm.server, ServerTask):
        return None
    # Where gradients are taken does not matter to how long they are.
    bare = replace(algorithm, gradient=Gradient(), synthetic=Synthetic(), compress=Compressor())
    sizes = {vector.size for vector in (*bare.server_vectors, *bare.client_vectors)}
    return bare if sizes <= {"model"} else None


class Probe:
    """Runs rounds of one composition, with `steps` local steps."""

    def __init__(self, algorithm: Algorithm, training: Training, steps: int) -> None:
        self.algorithm, self.steps = algorithm, steps
        self.training = training.replaced(clip=None, clip_stage="loss")
        self.server_keys = ["model", *(vector.name for vector in algorithm.server_vectors)]
        self.client_keys = [vector.name for vector in algorithm.client_vectors]
        # The sources are the server's vectors, the client's, the steps' gradients and the full gradient.
        self.kept = len(self.server_keys) + len(self.client_keys)
        self.units = torch.eye(self.kept + steps + 1, dtype=torch.float64)
        module = nn.Module()
        module.register_parameter("model", nn.Parameter(self.units[0]))
        self.layout = Layout(module)

    def is_linear(self, rate: float) -> bool:
        """Whether random vectors, of two clients, come out as the coefficients of unit vectors say, in all
        rounds."""
        after = self._run(self.units, rate).after
        used, servers = sorted(self._used(after)), len(self.server_keys)
        generator = torch.Generator().manual_seed(0)
        if not _same(after, self._run(self.units, rate, number=LATE).after):
            return False
        for scale in SCALES:
            drawn = scale * torch.randn(2, *self.units.shape, generator=generator, dtype=torch.float64)
            drawn[1, :servers] = drawn[0, :servers]
            expected = torch.cat([after[:servers] @ drawn.mean(0), after[servers:] @ drawn[0]])[used]
            computed = self._run(drawn[0], rate, others=[drawn[1]]).after[used]
            size = expected.abs().amax(1, keepdim=True) + scale
            if not bool(((computed - expected).abs() <= 1e-8 * size).all()):
                return False
        return True

    def decays_gradients(self, rate: float) -> bool:
        """Whether a round is the same when weight decay is counted to the gradients."""
        return _same(self._run(self.units, rate).after, self._run(self.units, rate, decayed=True).after)

    def response(self, rate: float) -> Response | None:
        """At one step size; None if there is no end to what clients remember."""
        after, local = self._run(self.units, rate)
        means, used = self._means_of_clients(after, rate), self._used(after)
        states = [place for place in range(len(self.server_keys)) if place in used and place not in means]
        means = {place: owner for place, owner in means.items() if place in used}
        remembered = sorted({*means.values(), *(place for place in used if place >= len(self.server_keys))})
        lengths = self._lengths(after, means, remembered, states)
        if lengths is None:
            return None
        # What is remembered counts by how long it may be, gradients count once.
        weights = torch.zeros(len(self.units), dtype=torch.float64)
        weights[self.kept :] = 1.0
        for place, length in lengths.items():
            weights[place] = length
        for place, owner in means.items():
            weights[place] = lengths[owner]
        of_client = weights.clone()
        of_client[: len(self.server_keys)] = 0.0
        return Response(
            state=after[states][:, states],
            inputs=_joined(after[states] * weights),
            local=local.abs() @ of_client,
        )

    def _run(
        self,
        sources: Tensor,
        rate: float,
        fraction: float = 0.0,
        decayed: bool = False,
        others: Sequence[Tensor] = (),
        number: int = 1,
    ) -> _Round:
        """A round on a row of `sources` [P, P] for each source; `fraction` of the clients take part.

        With `decayed` the gradients contain the weight decay, which is done nowhere else then. `others`
        are the sources of further participants, `number` that of the round (the first may be special).
        """
        server = dict(zip(self.server_keys, sources.clone(), strict=False))
        results = [self._client(server, own, rate, decayed, number) for own in (sources, *others)]
        uploads = [reduced_uploads(self.algorithm, result.upload) for result, _ in results]
        mean = {key: torch.stack([upload[key] for upload in uploads]).mean(0) for key in uploads[0]}
        total_rate = sum(self.algorithm.schedule.rates(rate, self.steps))
        merged = server_round(self.algorithm, server, mean, MergeContext(number, fraction, total_rate))
        (result, local), *_ = results
        after = [merged[key] for key in self.server_keys] + [result.client[key] for key in self.client_keys]
        return _Round(torch.stack(after), local)

    def _client(
        self, server: dict[str, Tensor], sources: Tensor, rate: float, decayed: bool, number: int
    ) -> tuple[ClientResult, Tensor]:
        """A client's round, and its displacement after k steps, [K + 1, P]."""
        servers, steps = len(self.server_keys), self.steps
        client = dict(zip(self.client_keys, sources[servers:].clone(), strict=False))
        received, displacement = broadcast(self.algorithm, server, {}).vectors, torch.zeros_like(sources[0])
        decay = self.training.weight_decay if decayed else 0.0
        local: list[Tensor] = []

        def oracle(gradient: Tensor) -> Oracle:
            def gradient_at(point: Tensor) -> Tensor:
                local.append(displacement.clone())
                return gradient.add(point, alpha=decay)

            return cast(Oracle, gradient_at)

        context = ClientContext(
            round=number,
            received=received,
            client=client,
            rates=self.algorithm.schedule.rates(rate, steps),
            layout=self.layout,
            input_shape=(1,),
            full_gradient=sources[-1].clone,
            displacement=displacement,
        )
        training = self.training.replaced(weight_decay=0.0) if decayed else self.training
        oracles = [oracle(gradient) for gradient in sources[self.kept : -1]]
        result = client_round(self.algorithm, context, oracles, training, received["model"].clone())
        return result, torch.stack([*local, result.displacement])

    def _used(self, after: Tensor) -> set[int]:
        """The vectors on which the model depends, at once or by others."""
        used, new = {0}, [0]
        while new:
            row = after[new.pop(), : self.kept].abs() > NEGLIGIBLE
            reached = set(row.nonzero().flatten().tolist()) - used
            used |= reached
            new += sorted(reached)
        return used

    def _means_of_clients(self, after: Tensor, rate: float) -> dict[int, int]:
        """The server's vectors that are means of what all clients remember, and of what.

        Such a vector changes by the participants' mean change times their share of the population.
        """
        servers = len(self.server_keys)
        if servers == self.kept:  # clients remember nothing
            return {}
        changes = after - self.units[: self.kept]
        of_all = self._run(self.units, rate, fraction=1.0).after - self.units[: self.kept]
        return {
            place: owner
            for owner in range(servers, self.kept)
            for place in range(1, servers)
            if _same(changes[place], torch.zeros_like(changes[place]))
            and _same(of_all[place], changes[owner])
            if not _same(changes[owner], torch.zeros_like(changes[owner]))
        }

    def _lengths(
        self, after: Tensor, means: dict[int, int], remembered: Sequence[int], states: Sequence[int]
    ) -> dict[int, float] | None:
        """How long the clients' vectors may become, in units of the longest gradient; None if without end."""
        if not remembered:
            return {}
        if bool((after[remembered][:, states].abs() > NEGLIGIBLE).any()):
            return None
        rows = after[remembered].abs()
        own = rows[:, remembered].clone()
        for place, owner in means.items():
            own[:, remembered.index(owner)] += rows[:, place]
        if float(torch.linalg.eigvals(own).abs().max()) > 1 - NEGLIGIBLE:
            return None
        unit = torch.eye(len(own), dtype=torch.float64)
        lengths = torch.linalg.solve(unit - own, rows[:, self.kept :].sum(1))
        return dict(zip(remembered, lengths.tolist(), strict=True))


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() < NEGLIGIBLE).all())


def _joined(columns: Tensor) -> Tensor:
    """Columns in one direction as one column of their whole length: |a| + |b| is the length of both."""
    lengths = torch.linalg.vector_norm(columns, dim=0)
    columns, lengths = columns[:, lengths > 0], lengths[lengths > 0]
    directions = columns / lengths
    alike = (directions.T @ directions).abs() > 1 - 1e-12
    first = alike.int().argmax(1)
    return (directions * torch.zeros_like(lengths).index_add(0, first, lengths))[:, first.unique()]
