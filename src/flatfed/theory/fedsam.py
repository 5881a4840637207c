"""The theorems of the FedSAM paper (Qu et al., 2022), of FedSAM and of MoFedSAM.

σ_l² is the variance of unit gradients, E‖u(g) − u(∇F_i)‖² ≤ 4, and σ_g² holds for every client. Every bound
counts the randomness of the perturbation only, not that of the minibatch gradient itself (Lemma A.4): at ρ
= 0 all noise vanishes, so they describe full-batch descent with a noisy perturbation.
"""

import math
from collections.abc import Sequence

from flatfed.theory.statement import Setting, Statement, at_most, positive, ratio, total

NOISE = "the noise of minibatch gradients is left out (Lemma A.4)"
SQUARED = (
    "what is bounded is the gradient at the perturbed point, which the proof equates with that at x; " + NOISE
)


def perturbation_noise(s: Setting) -> Statement:
    """Lemma A.4: the noise of a sum of K perturbed gradients."""
    return Statement("Lemma A.4", s.K * s.L**2 * s.rho**2 * s.noise, "as printed", remark=NOISE)


def gradient_disagreement(s: Setting) -> Statement:
    """Lemma A.5: ‖∇F_i(x + δ_i) − ∇F(x + δ)‖² ≤ 3 σ_g² + 6 L² ρ²."""
    return Statement("Lemma A.5", 3 * s.spread + 6 * s.L**2 * s.rho**2, "bound")


def perturbation_difference(s: Setting) -> Statement:
    """Lemma B.1: E_δ = mean_i E‖δ_{i,k} − δ‖² ≤ 2 K² L² η² ρ²."""
    return Statement(
        "Lemma B.1",
        2 * s.K**2 * s.L**2 * s.eta**2 * s.rho**2,
        "as printed",
        (at_most("η", s.eta, 1 / (4 * s.K * s.L)),),
        remark="the proof takes the client's own first perturbation for the global δ: two with orthogonal "
        "gradients give 0.5858 ρ² for any η; fresh minibatches do so, too",
    )


def drift(s: Setting, gradient: float) -> Statement:
    """Lemma B.2: E_w = mean_i E‖x_{i,k} − x‖², with `gradient` = ‖∇f̃‖² at the perturbed point."""
    disagreement = gradient_disagreement(s).value
    inner = 2 * s.L**2 * s.rho**2 * s.noise + 6 * s.K * (disagreement + gradient)
    moved, size = 5 * s.K * s.eta**2 * inner, s.K**3 * s.eta**4 * s.L**4 * s.rho**2
    return Statement(
        "Lemma B.2",
        moved + 24 * size,
        "as printed",
        (at_most("η", s.eta, 1 / (10 * s.K * s.L)),),
        corrected=moved + 120 * s.K * size,
        remark="the last term is added in every step, so it is 120 K⁴η⁴L⁴ρ²; " + NOISE,
    )


def mean_update(s: Setting, of_clients: float, of_all: float) -> Statement:
    """E‖Δ̄‖² by Lemma B.4 (S = N) or B.7: Σ_i ‖Σ_k ∇f̃_i‖² and ‖Σ_{i,k} ∇f̃_i‖² are what gradients sum up
    to."""
    noise = s.K * s.eta**2 * s.L**2 * s.rho**2 * s.noise / s.S
    if s.S == s.N:
        return Statement("Lemma B.4", noise + s.eta**2 / s.N**2 * of_all, "as printed", remark=NOISE)
    sampled = s.eta**2 / (s.N * s.S) * of_clients + (s.S - 1) * s.eta**2 / (s.S * s.N**2) * of_all
    return Statement("Lemma B.7", noise + sampled, "as printed", remark=NOISE)


def convergence(s: Setting) -> Statement:
    """Theorem B.6 (S = N) or B.9: min_t E‖∇F‖² with all constants, at the largest C."""
    K, L, eta, rho, step = s.K, s.L, s.eta, s.rho, s.eta_g * s.eta
    c = 0.5 - 30 * K**2 * L**2 * eta**2
    conditions = [at_most("η", eta, 1 / (10 * K * L)), at_most("η_g η", step, 1 / (K * L))]
    first = [
        10 * K * L**4 * eta**2 * rho**2 * s.noise,
        90 * K**2 * L**2 * eta**2 * s.spread,
        180 * K**2 * L**4 * eta**2 * rho**2,
    ]
    printed = [*first, 120 * K**4 * L**6 * eta**6 * rho**2, 16 * K**3 * L**6 * eta**4 * rho**2]
    corrected = [*first, 120 * K**4 * L**6 * eta**4 * rho**2, 2 * K**2 * L**4 * eta**2 * rho**2]
    noise = step * L**3 * rho**2 * s.noise
    if s.S == s.N:
        printed, corrected = [*printed, noise / s.N], [*corrected, noise / (2 * s.N)]
    else:
        c -= L * step / (2 * s.S) * (3 * K + 180 * K**3 * L**2 * eta**2)
        conditions.append(at_most("K L η_g η", K * L * step, (s.S - 1) / s.S))
        printed += [noise / (2 * s.S), step / s.S * total(_sampling_as_printed(s))]
        corrected += [noise / (2 * s.S), step / s.S * total(_sampling(s))]
    start = ratio(s.F0, c * K * step * s.T)
    phi = ratio(total(printed), c)
    return Statement(
        "Theorem B.6" if s.S == s.N else "Theorem B.9",
        start + phi,
        "as printed",
        (*conditions, positive("C", c)),
        {"C": c, "start": start, "Φ": phi},
        start + ratio(total(corrected), c),
        SQUARED,
    )


def _sampling_as_printed(s: Setting) -> Sequence[float]:
    K, L, eta, rho = s.K, s.L, s.eta, s.rho
    return (
        30 * K * L**5 * eta**2 * rho**2 * s.noise,
        180 * K**2 * L**3 * eta**2 * s.spread,
        360 * K * L**5 * eta**2 * rho**2,
        72 * K**3 * L**7 * eta**4 * rho**2,
        6 * K**3 * L**3 * eta**2 * rho**2,
        6 * K * L * s.spread,
        6 * K * L**3 * rho**2,
    )


def _sampling(s: Setting) -> Sequence[float]:
    K, L, eta, rho = s.K, s.L, s.eta, s.rho
    return (
        30 * K**2 * L**5 * eta**2 * rho**2 * s.noise,
        270 * K**3 * L**3 * eta**2 * s.spread,
        540 * K**3 * L**5 * eta**2 * rho**2,
        360 * K**5 * L**7 * eta**4 * rho**2,
        6 * K**3 * L**5 * eta**2 * rho**2,
        4.5 * K * L * s.spread,
        9 * K * L**3 * rho**2,
    )


def order(s: Setting) -> Statement:
    """Theorem 3.1, for all or some clients."""
    K, L, T, root = s.K, s.L, s.T, math.sqrt(s.T * s.K * s.S)
    if s.S == s.N:
        noise = L**2 * s.noise / (T**1.5 * math.sqrt(K * s.N))
        terms = {"start": L * s.F0 / root, "spread": s.spread / T, "noise": noise}
    else:
        spread = math.sqrt(K) * s.spread / math.sqrt(T * s.S)
        terms = {"start": L * s.F0 / root, "spread": spread, "noise": L**2 * s.noise / (T**1.5 * K)}
    terms["smoothness"] = L**2 / T**2
    corrected = None
    if s.S < s.N:
        corrected = total(terms.values()) - L**2 / T**2 + math.sqrt(K) * L**2 / (T**1.5 * math.sqrt(s.S))
    conditions = (at_most("max(100, K S)", max(100, K * s.S), T),)
    name = "Theorem 3.1, all clients" if s.S == s.N else "Theorem 3.1, some clients"
    return Statement(name, total(terms.values()), "order", conditions, terms, corrected)


def robust_order(s: Setting) -> Statement:
    """What the paper quotes for FedRobust."""
    value = s.L * s.F0 / (s.T * s.N) ** (1 / 3) + s.L**2 / (s.T ** (1 / 3) * s.N ** (2 / 3))
    return Statement("FedRobust's rate, as quoted", value, "order")


def client_momentum_order(s: Setting, fresh: float) -> Statement:
    """What the paper quotes for FedCM."""
    value = math.sqrt(s.K * s.S * s.L) / math.sqrt(s.T) + s.L / (fresh ** (2 / 3) * s.T ** (2 / 3))
    return Statement("FedCM's rate, as quoted", value, "order")


# -- with momentum: `fresh` is β, the weight of new gradients ----------------------------------------------

BETA = "the speed-up by β does not follow: with this η_g the first term has no β"


def momentum_drift(s: Setting, fresh: float, gradient: float) -> Statement:
    """Lemma D.1: E_w with momentum."""
    inner = 2 * fresh**2 * s.L**2 * s.rho**2 * s.noise + 7 * s.K * fresh**2 * gradient_disagreement(s).value
    inner += 14 * s.K * (1 - fresh) ** 2 * gradient
    last = 28 * fresh**2 * s.K**3 * s.L**4 * s.eta**4 * s.rho**2
    return Statement(
        "Lemma D.1",
        5 * s.K * s.eta**2 * inner + last,
        "as printed",
        (at_most("η", s.eta, 1 / (math.sqrt(30) * fresh * s.K * s.L)), at_most("β", fresh, 0.5)),
        remark="assumes that the momentum is the mean perturbed gradient",
    )


def momentum_convergence(s: Setting, fresh: float) -> Statement:
    """Theorem D.4 (S = N) or D.7, by the proof; `terms` have the statement's Φ, which differs, for D.4."""
    K, L, eta, rho, b = s.K, s.L, s.eta, s.rho, fresh
    c = 0.75 - 2 * (1 - b) * L / (K * s.N) - 70 * (1 - b) * K**2 * L**2 * eta**2
    phi = total(
        (
            10 * b**2 * L**4 * eta**2 * rho**2 * s.noise,
            35 * b**2 * K * L**2 * eta**2 * gradient_disagreement(s).value,
            28 * b**2 * K**3 * L**6 * eta**4 * rho**2,
            2 * K**2 * L**4 * eta**2 * rho**2,
            b * L**3 * s.eta_g**2 * rho**2 * s.noise / (2 * K * s.S),
        )
    )
    terms = {}
    if s.S == s.N:
        limit = at_most("η_g", s.eta_g, 1 / (b * L))
        terms["Φ of the statement"] = ratio(total(_momentum_statement(s, b)), c)
    else:
        c -= 90 * b * L**3 * s.eta_g * eta**2 / s.S + 3 * b * L * s.eta_g / (2 * s.S)
        limit = at_most("η_g", s.eta_g, ratio(s.S, 2 * b * L * (s.S - 1)))
        phi += b * L * s.eta_g / (K**2 * s.S * s.N) * total(_momentum_sampling(s))
    start = ratio(s.F0, c * b * s.eta_g * s.T)
    phi = ratio(phi, c)
    return Statement(
        "Theorem D.4" if s.S == s.N else "Theorem D.7",
        start + phi,
        "as printed",
        (at_most("η", eta, 1 / (math.sqrt(30) * b * K * L)), limit, positive("C", c)),
        {"C": c, "start": start, "Φ": phi, **terms},
        remark="Lemma D.2's (1 − β)²/(KN) must be (1 − β)², which forces a smaller η_g; " + NOISE,
    )


def _momentum_statement(s: Setting, b: float) -> Sequence[float]:
    K, L, eta, rho = s.K, s.L, s.eta, s.rho
    return (
        20 * b**3 * L**4 * eta**2 * rho**2 * s.noise,
        25 * b**2 * K**2 * L**2 * eta**2 * s.spread,
        20 * b**2 * K**4 * L**5 * eta**4 * rho**2,
        4 * b**2 * K * L**4 * eta**2 * rho**2,
        b * L**3 * rho**2 * s.eta_g**2 / (2 * K * s.N),
    )


def _momentum_sampling(s: Setting) -> Sequence[float]:
    K, L, N, eta, rho = s.K, s.L, s.N, s.eta, s.rho
    return (
        30 * N * K**2 * L**4 * eta**2 * rho**2 * s.noise,
        270 * N * K**3 * L**2 * eta**2 * s.spread,
        540 * N * K**2 * L**4 * eta**2 * rho**2,
        72 * K**4 * L**6 * eta**4 * rho**2,
        6 * N * K**4 * L**2 * eta**2 * rho**2,
        4 * N * K**2 * s.spread,
        3 * N * K**2 * L**2 * rho**2,
    )


def momentum_order(s: Setting, fresh: float) -> Statement:
    """Theorem 4.1, for all or some clients; for all, `terms` have what Theorem D.4 itself gives."""
    K, L, T = s.K, s.L, s.T
    start = fresh * L * s.F0 / math.sqrt(T * K * s.S)
    if s.S == s.N:
        value = start + fresh * s.spread / (T * L**2) + L * s.noise / (T**2 * fresh) + fresh * L**2 / T**2
        own = start + fresh**2 * s.spread / T + L * s.noise / (T**2 * fresh) + L**2 / (T**2 * fresh**2)
        return Statement("Theorem 4.1, all clients", value, "order", (), {"Theorem D.4": own}, remark=BETA)
    value = start + fresh * math.sqrt(K) * s.spread / math.sqrt(T * s.S) + L**2 * s.noise / (T**1.5 * K)
    value += math.sqrt(K) * L**2 / (T**1.5 * math.sqrt(s.S))
    return Statement("Theorem 4.1, some clients", value, "order", remark=BETA)
