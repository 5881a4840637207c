"""The theorems of the FedNSAM paper (Liu et al., 2026), with Φ = x + λ m, the point that local training
looks ahead to.

σ_l² (`noise`) is the variance of minibatch gradients.
"""

import math

from flatfed.theory import fedsam
from flatfed.theory.statement import Setting, Statement, at_most, ratio, total


def largest_rate(s: Setting, decay: float) -> float:
    """The largest η of Theorem 1, (1 − λ)²/(128KL)."""
    return (1 - decay) ** 2 / (128 * s.K * s.L)


def order(s: Setting, decay: float) -> Statement:
    """Theorem 1, main text; `terms` have the appendix's, which has no term in ρ, too."""
    rest = 1 - decay
    first = s.noise + s.K * (1 - s.S / s.N) * s.spread
    second = s.noise / s.K + s.spread
    root = math.sqrt(first)
    terms = {
        "noise": root * math.sqrt(s.L * s.F0) / math.sqrt(s.T * s.K * s.S * rest),
        "spread": (s.L * s.F0) ** (2 / 3) * second ** (1 / 3) / s.T ** (2 / 3),
        "start": s.L * s.F0 / (s.T * rest),
        "radius": s.L**4 * rest / s.T,
    }
    gap = s.F0 / rest
    appendix = root * math.sqrt(s.L * gap) / math.sqrt(s.T * s.K * s.S)
    appendix += (s.L * gap * rest**2) ** (2 / 3) * second ** (1 / 3) / (s.T + 1) ** (2 / 3) + s.L * gap / s.T
    return Statement(
        "Theorem 1",
        total(terms.values()),
        "order",
        (at_most("η", s.eta, largest_rate(s, decay)), at_most("ρ", s.rho, 1 / math.sqrt(s.T))),
        {**terms, "M₁": root, "M₂": second, "appendix": appendix},
        remark="ignores 1/√(1 − λ) where it calls itself better than FedSAM's",
    )


def convergence(s: Setting, decay: float) -> Statement:
    """Theorem 1 before O(·): mean_t E‖∇F(Φ)‖² at η̃ = ηK/(4(1 − λ)²)."""
    rest, L, K = 1 - decay, s.L, s.K
    length = s.eta * K / (4 * rest**2)
    start = ratio(s.F0, length * s.T * rest)
    sampling, noise = 4 * (1 - s.S / s.N) * s.spread / s.S, s.noise / (K * s.S)
    front = 35 * L**2 * rest**4 * length**2
    printed = start + front * (6 * s.spread + 3 * s.noise / K) + 8 * L * length * (sampling + noise)
    printed += 35 * L**2 * rest * (24 * K * L**2 * s.rho**2 + 2 * s.rho**2)
    corrected = start + front * (24 * s.spread + 6 * s.noise / K) + 48 * L * length * (sampling + noise)
    corrected += 2.1875 * L**2 * (24 * K**2 * s.eta**2 * L**2 * s.rho**2 + 2 * s.rho**2)
    return Statement(
        "Theorem 1, with constants",
        printed,
        "as printed",
        (at_most("η", s.eta, largest_rate(s, decay)),),
        {"start": start},
        corrected,
        "the corrected value follows from the paper's lemmas and the line above the printed one",
    )


def mean_update(s: Setting, drift: float, gradient: float) -> Statement:
    """E‖Δ‖² from the drift at the evaluated points and ‖∇F(Φ)‖²."""
    sampling = 4 * (1 - s.S / s.N) * s.spread / s.S + s.noise / (s.K * s.S)
    value = 2 * (s.eta * s.K) ** 2 * (2 * s.L**2 * drift + 8 * gradient + sampling)
    return Statement("Update", value, "bound")


def drift(s: Setting, gradient: float) -> Statement:
    """Drift at the evaluated points, mean_{i,k} E‖x_{i,k+½} − Φ‖², with ‖∇F(Φ)‖²."""
    moved = 24 * s.eta**2 * s.K**2 * (s.spread + gradient) + 6 * s.eta**2 * s.K * s.noise + 2 * s.rho**2
    radius = 24 * s.K * s.L**2 * s.rho**2
    corrected = moved + radius * s.K * s.eta**2
    conditions = (at_most("η", s.eta, 1 / (128 * s.K * s.L)),)
    return Statement("Drift", moved + radius, "as printed", conditions, corrected=corrected)


def perturbation_difference(s: Setting) -> Statement:
    """FedSAM's mean_i E‖δ_{i,k} − δ_{i,0}‖², at most 4ρ² at any rate; FedNSAM's is 0."""
    value = 2 * s.K**2 * s.L**2 * s.eta**2 * s.rho**2
    return Statement(
        "Perturbation difference",
        value,
        "as printed",
        (at_most("η", s.eta, 1 / (4 * s.K * s.L)),),
        {"at most": min(value, 4 * s.rho**2)},
        remark="fresh minibatches make it 2ρ²(1 − ‖E u‖²) however small η is",
    )


# -- flatness distance -------------------------------------------------------------------------------------


def flatness_order(s: Setting) -> Statement:
    """Theorem 2, of FedSAM at η ~ 1/(√T K L) and ρ ~ 1/√T."""
    K, L, T, N = s.K, s.L, s.T, s.N
    terms = (
        s.noise / (K * T**2),
        s.spread / (L**2 * T),
        math.sqrt(K) * s.spread / (L**2 * math.sqrt(N) * T**1.5),
        L**2 / T,
        s.F0 / (L * math.sqrt(K * N) * T**1.5),
    )
    corrected = total(terms) - L**2 / T + L**2 / T**2
    return Statement("Theorem 2", total(terms), "order", corrected=corrected, remark="L²/T should be 1/T²")


def nesterov_flatness_order(s: Setting, decay: float) -> Statement:
    """Theorem 3, of FedNSAM at η ~ (1 − λ)²/(KL)."""
    K, L, T = s.K, s.L, s.T
    last = math.sqrt(s.noise * s.F0) / (T**1.5 * L**1.5 * math.sqrt(K * s.N * (1 - decay)))
    value = s.noise / (K * T**2) + s.spread / (L**2 * T) + L**2 / T + last
    return Statement(
        "Theorem 3", value, "order", remark="no proof; with that η the term in σ_g² would not shrink with T"
    )


def flatness_distance(s: Setting, gradient: float) -> Statement:
    """Theorem 2 with constants, of FedSAM with all clients and ‖∇f̃‖²."""
    K, L, eta, rho = s.K, s.L, s.eta, s.rho
    noise = (
        2 * K * eta**2 * L**2 * rho**2 / s.N
        + 40 * eta**4 * L**4 * K**3 * rho**2
        + 20 * L**2 * rho**2 * K * eta**2
    )
    spread = 360 * L**2 * K**4 * eta**4 + 180 * K**2 * eta**2
    radius = 720 * L**4 * K**4 * eta**4 + 96 * K**5 * eta**6 * L**6 + 48 * K**3 * eta**4 * L**4
    printed, corrected = radius + 360 * L**2, radius + 360 * K**2 * eta**2 * L**2
    rest = noise * s.noise + spread * s.spread + (120 * L**2 * K**4 * eta**4 + 64 * K**2 * eta**2) * gradient
    return Statement(
        "Theorem 2, with constants",
        rest + printed * rho**2,
        "as printed",
        (at_most("N", s.N, s.S),),
        {"one drift": fedsam.drift(s, gradient).value},
        rest + corrected * rho**2,
        "360 L² must be 360 K²η²L²; one drift is enough: a variance is no more than the mean square",
    )


def nesterov_flatness_distance(s: Setting, gradient: float) -> Statement:
    """FedNSAM's flatness distance by its drift, with ‖∇F(Φ)‖²."""
    moved = 12 * s.eta**2 * s.K**2 * (s.spread + gradient) + 3 * s.eta**2 * s.K * s.noise
    radius = 12 * s.K**2 * s.eta**2 * s.L**2 * s.rho**2
    conditions = (at_most("η", s.eta, 1 / (128 * s.K * s.L)),)
    return Statement("Flatness distance by drift", moved + radius, "bound", conditions)
