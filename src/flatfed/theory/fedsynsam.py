"""The theorems of the FedSynSAM paper: FedSAM's with a perturbation from mixed gradients, and unbiased
compression.

γ bounds ‖∇F_i(x + ε̂_i) − ∇F(x + ε)‖² and q the relative variance of the compressor, E‖Q(v) − v‖² ≤ q‖v‖².
Top-k is biased, so nothing here is about it. What is said of noise in `fedsam` holds here, too.
"""

import math

from flatfed.theory import fedsam
from flatfed.theory.statement import Setting, Statement, at_most, positive, ratio, total


def quantization_variance(size: int, levels: int) -> float:
    """q of stochastic quantization of vectors (or buckets) of a size to ± s levels: min(size/s², √size/s)."""
    return min(size / levels**2, math.sqrt(size) / levels)


def perturbation_disagreement(s: Setting, cosine: float) -> Statement:
    """Lemma 1: γ = 2σ_g² + 4L²ρ²(1 − cos θ), θ between a client's ascent direction and the global
    gradient."""
    return Statement("Lemma 1", 2 * s.spread + 4 * s.L**2 * s.rho**2 * (1 - cosine), "bound")


def misalignment(local_weight: float, spread: float, synthetic: float, norms: float = 1.0) -> float:
    """1 − cos θ from βσ_g + (1 − β)√κ, κ = E‖∇F_syn − ∇F‖²; `norms` is the product of both gradients'
    lengths."""
    apart = local_weight * math.sqrt(spread) + (1 - local_weight) * math.sqrt(synthetic)
    return apart**2 / (2 * norms)


def order(s: Setting, gamma: float, q: float) -> Statement:
    """Theorem 1 (all clients) or 2; corrected, the compression's terms with the L/2 that was lost."""
    K, L, T, S = s.K, s.L, s.T, s.S
    start, last = s.F0 * L / math.sqrt(T * K * S), q * L * s.noise / (T**1.5 * math.sqrt(K * S))
    compressed = q * math.sqrt(K) * gamma / math.sqrt(T * S)
    if s.S == s.N:
        rest = start + gamma / T + L**2 * s.noise / (T**1.5 * math.sqrt(K * S))
    else:
        rest = start + math.sqrt(K) * gamma / math.sqrt(T * S) + L**2 * s.noise / (T**1.5 * K)
    return Statement(
        "Theorem 1" if s.S == s.N else "Theorem 2",
        rest + compressed / L + last,
        "order",
        corrected=rest + (compressed / L + last) * L / 2,
        remark="the factor L/2 of the compression's terms is lost after (40)",
    )


def convergence(s: Setting, gamma: float, q: float) -> Statement:
    """Theorem 1 (42) or 2 (48) before O(·), at the largest C; corrected with the lost L/2."""
    K, L, eta, rho, S = s.K, s.L, s.eta, s.rho, s.S
    step = s.eta_g * eta
    conditions = [at_most("η", eta, 1 / (10 * K * L)), at_most("η_g η", step, 1 / (K * L))]
    conditions.append(at_most("η_g η", step, ratio(s.N, 150 * K * q)))
    c = 0.5 - 30 * K**2 * L**2 * eta**2
    terms = [
        10 * K * L**4 * eta**2 * rho**2 * s.noise,
        30 * K**2 * L**2 * eta**2 * gamma,
        120 * K**4 * L**6 * eta**6 * rho**2,
        16 * K**3 * L**6 * eta**4 * rho**2,
    ]
    noise = step * L**3 * rho**2 * s.noise
    if s.S == s.N:
        terms.append(noise / s.N)
    else:
        conditions.append(at_most("η_g η", step, S / (12 * K * L + 150 * K * q)))
        c -= L * step / (2 * S) * (3 * K + 180 * K**3 * L**2 * eta**2)
        sampling = (
            30 * K * L**5 * eta**2 * rho**2 * s.noise,
            60 * K**2 * L**3 * eta**2 * gamma,
            72 * K**3 * L**7 * eta**4 * rho**2,
            6 * K**3 * L**3 * eta**2 * rho**2,
            2 * K * L * gamma,
        )
        terms += [noise / (2 * S), step / S * total(sampling)]
    inner = 10 * eta * L**2 * rho**2 * s.noise + 30 * K * eta * gamma + 24 * K**2 * eta**3 * L**4 * rho**2

    def at(weight: float) -> tuple[float, dict[str, float]]:
        """The sum and its terms with the compression's weighted."""
        largest = c - weight * 30 * K * q * step / S
        weighted = {
            "C": largest,
            "start": ratio(s.F0, largest * K * step * s.T),
            "Φ": ratio(total(terms), largest),
            "compression": weight * ratio(q * s.eta_g * inner, largest * S),
        }
        return total(value for name, value in weighted.items() if name != "C"), weighted

    printed, parts = at(1.0)
    return Statement(
        "Theorem 1, with constants" if s.S == s.N else "Theorem 2, with constants",
        printed,
        "as printed",
        (*conditions, positive("C", parts["C"])),
        parts,
        at(L / 2)[0],
        f"the factor L/2 of the compression's terms is lost; {fedsam.NOISE}",
    )
