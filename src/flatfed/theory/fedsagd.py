"""The theorems of the FedSAGD paper: Table 1's bounds on stability, and convergence.

Θ bounds the mean length of a gradient: √(σ_l² + 2σ_g² + 2Z²) with the longest client gradient Z, though
√(σ_l² + Z²) is enough. The bounds hold for any two trainings from one model: no proof uses that they differ
in one client only. `stability` has bounds for any composition, which follow from the rules alone.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flatfed.core.algorithm import Algorithm
from flatfed.core.part import SLOTS, Part
from flatfed.parts import (
    Adam,
    Average,
    ControlVariate,
    DynamicRegulariser,
    FullGradientMomentum,
    GlobalMomentum,
    HybridProximal,
    LocalMomentum,
    LookAhead,
    Momentum,
    Proximal,
)
from flatfed.theory.statement import Label, Setting, Statement, at_most, positive, ratio, total


def gradient_bound(noise: float, spread: float, longest: float) -> tuple[float, float]:
    """Θ as printed (Lemma C.1) and as it suffices, from σ_l², σ_g² and Z."""
    return math.sqrt(noise + 2 * spread + 2 * longest**2), math.sqrt(noise + longest**2)


def path(weight: float, eta: float, steps: int) -> float:
    """φ_k(a) = [1 − (1 − aη)^k]/a: how far k steps of unit gradients lead against a pull; ηk without one."""
    return (1 - (1 - weight * eta) ** steps) / weight if weight else eta * steps


# -- Table 1 -----------------------------------------------------------------------------------------------


class TableRow(NamedTuple):
    """A method's bound on E‖x_T − x'_T‖ as Table 1 prints it, and on ‖x_{i,k} − x_{j,k}‖ within a round."""

    formula: str
    value: float
    local: float
    """After K steps."""
    label: Label
    remark: str = ""
    terms: Mapping[str, float] = {}


class _Run(NamedTuple):
    theta: float
    eta: float
    K: int
    T: int


def _plain(run: _Run) -> TableRow:
    return TableRow(
        "2ηKΘT", 2 * run.eta * run.K * run.theta * run.T, 2 * run.eta * run.K * run.theta, "bound"
    )


def _proximal(run: _Run, proximal: Proximal) -> TableRow:
    length = 2 * path(proximal.weight, run.eta, run.K) * run.theta
    return TableRow("2λ⁻¹Θ[1 − (1 − λη)^K]T", length * run.T, length, "bound")


def _controlled(run: _Run, control: ControlVariate) -> TableRow | None:
    if control.weight != 1 or control.option != "II":
        return None
    length = 6 * run.eta * run.K * run.theta
    return TableRow("6ηKΘT", length * run.T, length, "bound")


def _dynamic(run: _Run, regulariser: DynamicRegulariser) -> TableRow:
    length = 4 * path(regulariser.weight, run.eta, run.K) * run.theta
    return TableRow(
        "4λ⁻¹Θ[1 − (1 − λη)^K]T",
        length * run.T,
        length,
        "as printed",
        "exceeded: the server's h is left out, and a dual is a gradient only after exact local minimisation",
    )


def _accelerated(run: _Run, momentum: LocalMomentum) -> TableRow:
    length, rest = 2 * run.eta * run.theta, 1 - momentum.decay
    local = length * math.fsum(1 - momentum.decay**step for step in range(1, run.K + 1))
    if momentum.damped and momentum.state == "reset" and not momentum.nesterov:
        return TableRow("2ηKΘT", length * run.K * run.T, local, "bound")
    remark = f"for m ← βm + (1 − β)g, reset every round; undamped as run: times {1 / rest:.3g}"
    if momentum.damped:
        remark = "for m reset every round, and steps along it"
    return TableRow("2ηKΘT", length * run.K * run.T, local, "as printed", remark)


def _adaptive(run: _Run, adam: Adam) -> TableRow:
    row = _plain(run)
    remark = f"times the server's rate of {adam.rate:g}"
    if adam.stability > 1:
        remark += "; with the √(v + τ) that the paper prints, only if τ ≤ 1"
    return TableRow("2τ⁻¹ηKΘT", row.value / adam.stability, row.local, "bound", remark)


def _momentum(run: _Run, momentum: GlobalMomentum) -> TableRow | None:
    fresh, old = momentum.gradient_weight, momentum.momentum_weight
    if momentum.memory == 0:
        if not math.isclose(fresh + old, 1):
            return None
        remark = "in units of a gradient; in units of the model 2η_g ηKΘT"
        return TableRow("2ΘT", 2 * run.theta * run.T, 2 * run.eta * run.K * run.theta, "as printed", remark)
    beta = momentum.memory / (1 - momentum.memory)
    if beta >= 1 or not (math.isclose(fresh, 1 + beta) and math.isclose(old, beta**2)):
        return None
    length = 2 / (1 - beta) * run.eta * run.K * run.theta
    return TableRow("2(1 − β)⁻¹ηKΘT", length * run.T, length, "bound", "attained in the limit")


def _full_momentum(run: _Run, momentum: FullGradientMomentum) -> TableRow:
    return _plain(run)


def _looking_ahead(run: _Run, start: LookAhead, proximal: Proximal, server: Momentum) -> TableRow:
    row, rest = _plain(run), 1 - server.decay
    remark = "loose: a factor λ was dropped; with it 2ηKΘT/(1 − λ)"
    return TableRow(
        "(4 − 2λ)(1 − λ)⁻¹ηKΘT", (2 - server.decay) / rest * row.value, row.local, "bound", remark
    )


def _hybrid(run: _Run, momentum: GlobalMomentum, hybrid: HybridProximal) -> TableRow | None:
    if momentum.assumed_length is None:
        return None
    pull, decay = hybrid.weight, hybrid.decay
    length = path(pull + decay, run.eta, run.K)
    kept = 2 * (momentum.gradient_weight + momentum.momentum_weight * momentum.assumed_length) * run.theta
    gamma = decay * length
    reached = -math.expm1(run.T * math.log1p(-gamma)) if 0 < gamma < 1 else 1.0
    theorem = kept * (reached / decay if decay else length * run.T)
    printed = ratio(kept * reached, (pull + decay) * gamma)
    return TableRow(
        "(λ + μ)⁻¹Γ⁻¹(2 + 2β)Θ[1 − (1 − Γ)^T]",
        printed,
        kept * length,
        "as printed",
        "Theorem C.12, on which it rests, is exceeded: it takes ‖v‖ ≤ Θ, but v is no mean of gradients",
        {"Γ": gamma, "ζ": length, "Theorem C.12": theorem},
    )


_ROWS: Mapping[tuple[type[Part], ...], Callable[..., TableRow | None]] = {
    (): _plain,
    (Proximal,): _proximal,
    (ControlVariate,): _controlled,
    (DynamicRegulariser,): _dynamic,
    (LocalMomentum,): _accelerated,
    (Adam,): _adaptive,
    (GlobalMomentum,): _momentum,
    (FullGradientMomentum,): _full_momentum,
    (LookAhead, Proximal, Momentum): _looking_ahead,
    (GlobalMomentum, HybridProximal): _hybrid,
}
"""By the parts that make the difference."""


def table_row(algorithm: Algorithm, theta: float, eta: float, K: int, T: int) -> TableRow | None:
    """Table 1's row of the method that these parts make; None if it has none.

    Where gradients are taken makes no difference to it, nor does a server's own rate appear.
    """
    acting = {
        type(part): part
        for part in (algorithm.start, *algorithm.corrections, algorithm.server)
        if type(part) is not SLOTS[part.slot] and type(part) is not Average
    }
    kinds = next((kinds for kinds in _ROWS if set(kinds) == acting.keys()), None)
    if kinds is None or type(algorithm.schedule) is not SLOTS["schedule"]:
        return None
    return _ROWS[kinds](_Run(theta, eta, K, T), *(acting[kind] for kind in kinds))


def theorem_3_7(row: TableRow, longest: float) -> Statement:
    """The difference of losses: Z times the distance."""
    return Statement("Theorem 3.7", longest * row.value, row.label, remark=row.remark)


def dual_bound(theta: float, eta: float, K: int, T: int, weight: float) -> Statement:
    """What holds for dynamic regularisation: ‖h_i‖ ≤ Θ/α, so 2ΘT/α · [2(1 − c) + 1] with c = (1 − αη)^K."""
    away = 2 * (1 - (1 - weight * eta) ** K) + 1
    return Statement("Dynamic regularisation", 2 * theta * T / weight * away, "bound")


# -- convergence -------------------------------------------------------------------------------------------


def drift(s: Setting, gradient: float, momentum: float, decay: float) -> Statement:
    """Lemma D.10: mean_i E‖x_{i,k} − x‖² with ‖∇f̂‖² and ‖v‖² of f̂ = f + μ‖x‖²/2; `decay` is β."""
    value = 36 * s.eta**2 * s.K**2 * (gradient + s.spread) + 3 * s.eta**2 * s.K * s.noise
    value += 18 * decay**2 * s.eta**2 * s.K**2 * momentum
    conditions = (at_most("η", s.eta, 1 / (15 * s.K * s.L)),)
    return Statement("Lemma D.10", value, "bound", conditions, remark="printed with η ≤ 1/(KL)")


def sampled_square(s: Setting, of_clients: float, of_sum: float) -> float:
    """Lemma D.4: E‖S⁻¹ΣX_i‖² of S clients drawn from N, from Σ‖X_i‖² and ‖ΣX_i‖²."""
    if s.N == 1:
        return of_sum
    return ((s.N - s.S) * of_clients + (s.S - 1) * of_sum) / (s.N * s.S * (s.N - 1))


class _Geometry(NamedTuple):
    """What the proximal pull makes of K steps."""

    alpha: float
    share: float
    """α' = α/K."""
    rest: float
    """1 − α'β."""

    @staticmethod
    def of(s: Setting, decay: float, pull: float) -> "_Geometry":
        alpha = path(pull, s.eta, s.K) / s.eta
        return _Geometry(alpha, alpha / s.K, 1 - alpha / s.K * decay)


def convergence(s: Setting, decay: float, pull: float) -> Statement:
    """Theorem 4.1 (Lemma D.12) before O(·): mean_t E‖∇f̂(x_t)‖², at the largest c; F0 is D_0 of f̂."""
    K, L, S, eta, step = s.K, s.L, s.S, s.eta, s.eta_g * s.eta
    alpha, share, rest = _Geometry.of(s, decay, pull)
    square = alpha**2 * decay**2
    kappa = 1 - 36 * square * eta**2 * L**2 / rest**2
    b = (
        4 * square * step**2 * L**2 / (rest**4 * K)
        + 18 * decay**2 * eta**2 * L**2 / rest**2
        + step * L / (2 * rest)
    )
    f = ratio((s.N - S) / max(S * (s.N - 1), 1), kappa)
    of_noise = 3 * eta**2 * L**2 * K / alpha + step * L / (2 * rest * S)
    of_noise += 4 * alpha * square * step**2 * L**2 / (rest**4 * S * K)
    of_noise += 18 * alpha * decay**2 * eta**2 * L**2 / (rest**2 * S)
    inner = 6 * alpha * eta**2 * L**2 * K + 36 * alpha * square * eta**2 * L**2 / (rest * S)
    of_noise += inner * f * b
    sampled = (72 * alpha * eta**2 * L**2 * K**2 + 4 * alpha) * f * b
    moved = 36 * eta**2 * L**2 * K**2 / alpha
    c = 0.5 - moved - sampled if kappa > 0 else -math.inf
    terms = {
        "start": ratio(rest * s.F0, c * alpha * step * s.T),
        "noise": ratio(of_noise * s.noise, c),
        "spread": ratio((sampled + moved) * s.spread, c),
    }
    limits = (
        rest**2 * math.sqrt(K) / (4 * alpha * decay * L * math.sqrt(3 * alpha)) if decay else math.inf,
        rest * s.eta_g / (6 * decay * L * math.sqrt(2 * alpha)) if decay else math.inf,
        rest / (2 * alpha * L),
    )
    sampling = s.N * (S - 1) / (S * (s.N - 1)) if s.N > 1 else 1.0
    conditions = (
        at_most("η", eta, 1 / (16 * K * L)),
        at_most("η_g η", step, sampling * min(limits)),
        positive("κ", kappa),
        positive("c", c),
    )
    return Statement(
        "Theorem 4.1, with constants",
        total(terms.values()),
        "as printed",
        conditions,
        {"c": c, "κ": kappa, "α": alpha, "α'": share, **terms},
        remark="κ's inequality and η_g in the first term are misprinted; S = 1 allows no step at all",
    )


def order(s: Setting) -> Statement:
    """Theorem 4.1, at η_g = O(√(SK)) and η = O(1/(LK√T))."""
    K, S, T = s.K, s.S, s.T
    root = math.sqrt(S * K * T)
    first = (s.L * s.F0 + s.noise) / root
    second = (s.noise / K**2 + K * s.noise + s.noise / (S * K) + s.spread / K) / T
    sampling = (s.N - S) / max(s.N - 1, 1) * (1 / T + 1 / (S * K**2 * T) + 1 / root)
    terms = {
        "start and noise": first,
        "local steps": second,
        "Ψ_l": (1 / T + K / (S * T)) * sampling * s.noise,
        "Ψ_g": (K / T + K) * sampling * s.spread,
    }
    remark = "with sampling the leading term is √K σ_g²/√(ST), not the abstract's 1/√(SKT)"
    return Statement("Theorem 4.1", total(terms.values()), "order", (), terms, remark=remark)
