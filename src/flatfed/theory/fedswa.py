"""The theorems of the FedSWA paper (Liu et al., 2025), of FedSWA and of FedMoSWA.

Here Z bounds the gradient of the loss on any single sample, σ² (`noise`) is the variance of single samples'
gradients in the generalisation part and of minibatches' in the other, and σ_g (`spread` = σ_g²) is a mean
of norms or of squares. n is a client's number of samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatfed.theory.statement import Setting, Statement, at_most, ratio, saturated


@dataclass(frozen=True)
class Losses:
    """What the generalisation bounds need besides a setting."""

    Z: float
    """The longest gradient on a sample."""
    n: float
    """Samples of a client."""
    convexity: float = 0.0
    """μ of strongly convex losses; 0 for any losses."""


def growth(s: Setting, convexity: float = 0.0) -> tuple[float, float]:
    """c̃ (or b̃ of strongly convex losses) as printed and as it follows from the paper's recursion."""
    if convexity:
        printed = 1 + (convexity / ((s.L + convexity) * s.K)) ** (s.K - 1) / s.T
        return printed, 1 + 1 / s.T
    step = 1 / (s.K * s.T)
    printed = saturated(lambda: 1 + (2 + step) ** (s.K - 1) / s.T)
    return printed, 1 + (1 + step) ** (s.K - 1) / s.T


GROWTH = (
    "c ≥ 1 + Lη_k is raised as (1 + c)^(K−1), so c̃ doubles with every step, and most of the advantage of "
    "control variates is due to that; for α = 1 and all clients only"
)


def _prefactor(s: Setting, losses: Losses) -> float:
    exponent = 1 + 1 / s.T
    if losses.convexity:
        exponent = 1 - losses.convexity / ((s.L + losses.convexity) * s.T)
    return losses.Z / (s.N * losses.n * s.L) * math.exp(exponent)


def _spread_over(factor: float, s: Setting, losses: Losses, controlled: bool) -> float:
    """factor · (Z + σ_g + σ), where control variates take the factor from σ_g."""
    spread, noise = math.sqrt(s.spread), math.sqrt(s.noise)
    return factor * (losses.Z + noise) + (1.0 if controlled else factor) * spread


def generalization(s: Setting, losses: Losses, controlled: bool = False) -> Statement:
    """Theorem 5.1 (E.3): |E(F_D − F_S)| of FedSWA, or of FedMoSWA if `controlled`."""
    printed, corrected = growth(s, losses.convexity)
    front = 2 * _prefactor(s, losses)
    return Statement(
        "Theorem 5.1",
        front * _spread_over(printed, s, losses, controlled),
        "as printed",
        (at_most("η", s.eta, 1 / (s.L * s.K * s.T)), at_most("N", s.N, s.S)),
        {"c̃": printed, "c̃ corrected": corrected},
        front * _spread_over(corrected, s, losses, controlled),
        GROWTH,
    )


def constant_growth(s: Setting, total_rate: float | None = None) -> float:
    """c̄ = 1 + (1 + c)^(K−1) L Σ_k η_k of constant steps with c = 1 + Lη (Theorem I.3)."""
    length = s.K * s.eta if total_rate is None else total_rate
    return saturated(lambda: 1 + (2 + s.L * s.eta) ** (s.K - 1) * s.L * length)


def generalization_order(
    s: Setting, losses: Losses, controlled: bool = False, factor: float | None = None
) -> Statement:
    """Table 1's generalisation: Theorem 5.1 without the 2; `factor` takes the place of c̃."""
    printed, corrected = growth(s, losses.convexity)
    front = _prefactor(s, losses)
    return Statement(
        "Table 1, generalisation",
        front * _spread_over(printed if factor is None else factor, s, losses, controlled),
        "as printed",
        (at_most("η", s.eta, 1 / (s.L * s.K * s.T)), at_most("N", s.N, s.S)),
        {"c̃": printed, "c̃ corrected": corrected},
        front * _spread_over(corrected, s, losses, controlled),
        GROWTH,
    )


def stability_recursion(
    lengths: Sequence[float], gradients: Sequence[float], s: Setting, losses: Losses, server_rate: float = 1.0
) -> float:
    """log E‖x_T − x'_T‖ of two trainings that differ in a sample, at any step sizes; with all clients.

    D ← (|1 − α| + α E) D + 2α/(Nn) · η̃ E (1 + Lη̃E)(‖∇F(x_t)‖ + σ_g + σ) with E = e^(Lη̃) and η̃ = Σ η_k,
    for the `lengths` η̃ and `gradients` ‖∇F(x_t)‖ of the rounds. As a logarithm, because it overflows.
    """
    logarithm = -math.inf
    for length, gradient in zip(lengths, gradients, strict=True):
        exponent = s.L * length
        kept = _log_sum(math.log(server_rate) + exponent, _log(abs(1 - server_rate)))
        deviation = gradient + math.sqrt(s.spread) + math.sqrt(s.noise)
        added = _log(2 * server_rate / (s.N * losses.n) * length * deviation) + exponent
        added += _log_sum(0.0, _log(exponent) + exponent)
        logarithm = _log_sum(logarithm + kept, added)
    return logarithm


def sample_stability(
    lengths: Sequence[float], gradients: Sequence[float], s: Setting, losses: Losses, server_rate: float = 1.0
) -> Statement:
    """|E(F_D − F_S)| ≤ Z times the distance of that recursion."""
    logarithm = stability_recursion(lengths, gradients, s, losses, server_rate) + _log(losses.Z)
    return Statement(
        "Generalisation by sample stability",
        saturated(lambda: math.exp(logarithm)),
        "bound",
        (at_most("N", s.N, s.S),),
        {"log10": logarithm / math.log(10)},
    )


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _log_sum(one: float, other: float) -> float:
    """log(e^one + e^other)."""
    high, low = max(one, other), min(one, other)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def drift(s: Setting, length: float, gradient: float, controlled: bool = False, Z: float = 0.0) -> Statement:
    """Lemma E.4 (or F.4, controlled): E‖x_{i,k} − x‖ ≤ (1 + c)^(K−1) η̃ (‖∇F‖ + σ_g + σ), c = 1 + Lη.

    Corrected, (1 + c)^(K−1) is e^(Lη̃), and that is a bound for any step size.
    """
    inner = Z + math.sqrt(s.noise) if controlled else gradient + math.sqrt(s.spread) + math.sqrt(s.noise)
    return Statement(
        "Lemma F.4" if controlled else "Lemma E.4",
        saturated(lambda: (2 + s.L * s.eta) ** (s.K - 1) * length * inner),
        "bound",
        corrected=saturated(lambda: math.exp(s.L * length) * length * inner),
    )


# -- optimisation: Theorem 5.2 and what is behind it -------------------------------------------------------


def convergence_order(s: Setting) -> Statement:
    """Theorem 5.2 for any losses; `terms` have Table 1's, with S/α² for N/α²."""
    root, last = (
        math.sqrt(s.noise * s.F0) / math.sqrt(s.T * s.K * s.S),
        s.L * s.F0 / s.T * _share(s) ** (-2 / 3),
    )
    return Statement(
        "Theorem 5.2",
        root * math.sqrt(1 + s.N / s.eta_g**2) + last,
        "order",
        (at_most("η", s.eta, _share(s) ** (2 / 3) / (s.K * s.eta_g * s.L)),),
        {
            "Table 1": root * math.sqrt(1 + s.S / s.eta_g**2) + last,
            "SCAFFOLD, as quoted": root * math.sqrt(1 + s.N) + last,
        },
        remark="N/α² in the theorem, S/α² in Table 1 and Lemma G.18; the dimension wants σ√(L F0); γ is in "
        "no rate, and α = 1.5 is compared with SCAFFOLD at α = 1",
    )


def _share(s: Setting) -> float:
    return s.S / s.N


def convex_convergence_order(s: Setting, convexity: float, distance: float) -> Statement:
    """Theorem 5.2 for strongly convex losses; `distance` is D² = ‖x_0 − x*‖² + Σ‖c_i − ∇F_i(x*)‖²/(2NL²)."""
    noise = s.noise / (convexity * s.T * s.K * s.S) * (1 + s.S / s.eta_g**2)
    exponent = -(_share(s) + convexity / s.L) * s.T
    start = s.N * convexity / s.S * distance * math.exp(exponent)
    largest = min(1 / (s.L * s.K * s.eta_g), s.S / (convexity * s.N * s.K * s.eta_g))
    conditions = (
        at_most("η", s.eta, largest),
        at_most("max(L/μ, N/S)", max(s.L / convexity, s.N / s.S), s.T),
    )
    return Statement(
        "Theorem 5.2, strongly convex", noise + start, "order", conditions, {"noise": noise, "start": start}
    )


DROPPED = "the momentum's lag terms are dropped or mis-indexed before the lemmas"


def explicit_convergence(s: Setting) -> Statement:
    """Lemma G.18 at η̃ = Kαη; `terms` have the largest η̃ and the value at the best one (Lemma G.6)."""
    length = s.K * s.eta_g * s.eta
    largest = _share(s) ** (2 / 3) / (24 * s.L)
    noise = s.noise * (1 + s.S / s.eta_g**2) / (s.K * s.S)
    value = ratio(14 * s.F0, length * s.T) + 70 * s.L * length * noise
    best = 336 * s.L * s.F0 * _share(s) ** (-2 / 3) / s.T + 2 * math.sqrt(980 * s.L * s.F0 * noise / s.T)
    terms = {"largest η̃": largest, "best η̃": best}
    return Statement(
        "Lemma G.18", value, "as printed", (at_most("η̃", length, largest),), terms, remark=DROPPED
    )


def convex_convergence(s: Setting, convexity: float, distance: float, control: float) -> Statement:
    """Lemma G.13: the weighted mean of F − F*, with ‖x_0 − x*‖² and C_0 = mean ‖c_i − ∇F_i(x*)‖²."""
    length = s.K * s.eta_g * s.eta
    start = distance + 9 * s.N * length**2 * control / s.S
    noise = 12 * length * s.noise * (1 + s.S / s.eta_g**2) / (s.K * s.S)
    largest = min(1 / (81 * s.L * s.K * s.eta_g), s.S / (15 * convexity * s.N * s.K * s.eta_g))
    return Statement(
        "Lemma G.13",
        1.5 * convexity * start * math.exp(-convexity * length * s.T / 2) + noise,
        "as printed",
        (at_most("η", s.eta, largest), at_most("1/(μη̃)", ratio(1, convexity * length), s.T)),
        remark=DROPPED,
    )


def control_lag(s: Setting, lag: float, gap: float, drift: float) -> float:
    """Lemma G.10: the next C_t = mean ‖E c_i − ∇F_i(x*)‖², from this one, F − F* and E_t."""
    return (1 - _share(s)) * lag + _share(s) * (4 * s.L * gap + 2 * s.L**2 * drift)


def drift_comparison(s: Setting, length: float, control: float, momentum: float, gap: float) -> Statement:
    """Theorem H.1: E_t = mean_{i,k} E‖x_{i,k} − x‖² at constant steps; `terms` have its third, for falling
    ones."""
    value = length * (control + momentum) / (9 * s.L) + gap / (75 * s.eta_g**2 * s.L)
    value += length * s.noise / (3 * s.K * s.eta_g**2 * s.L)
    return Statement(
        "Theorem H.1",
        value,
        "as printed",
        (at_most("η̃", length, 1 / (81 * s.L)),),
        {"falling steps": value / 3},
        remark="no proof is printed; it compares upper bounds, for geometric steps and not the linear ones",
    )


def averaging_order(s: Setting) -> Statement:
    """Table 1's optimisation of FedSWA."""
    spread = math.sqrt(s.spread)
    first = (
        s.L * (math.sqrt(s.noise) + math.sqrt(s.K) * spread) * math.sqrt(s.F0) / math.sqrt(s.T * s.K * s.S)
    )
    second = s.F0 ** (2 / 3) * (s.L * s.spread) ** (1 / 3) / s.T ** (2 / 3)
    return Statement(
        "Table 1, optimisation",
        first + second + s.L * s.F0 / s.T,
        "order",
        remark="the paper has no proof of it",
    )


def perturbed_order(s: Setting, Z: float) -> Statement:
    """Table 1's optimisation of FedSAM."""
    value = s.L * s.F0 / math.sqrt(s.T * s.K * s.S) + math.sqrt(s.K) * s.spread / math.sqrt(s.T * s.S)
    value += Z**2 * s.noise / (s.T**1.5 * s.K) + Z**2 / s.T**2
    return Statement("Table 1, optimisation", value, "order", remark="Z² should be L²")
