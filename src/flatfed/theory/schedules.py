"""The step sizes and radii at which the papers' theorems hold, from the constants of a problem.

They are what the proofs need, not what trains best: most are far below the steps that experiments use.
"""

import math
from dataclasses import replace

from flatfed.core.errors import FlatfedError, check_choice
from flatfed.core.settings import Training
from flatfed.theory.statement import Setting

SCHEDULES = ("accelerated", "averaged", "look_ahead", "perturbed")


def scheduled(name: str, s: Setting, *, decay: float = 0.0) -> Setting:
    """The setting with a theorem's own step sizes and radius.

    "perturbed" (FedSAM's Theorem 3.1): η = 1/(√T K L), η_g = √(KS), ρ = 1/√T. "accelerated" (FedSAGD's
    Theorem 4.1): η = 1/(√T K L), η_g = √(KS). "averaged" (FedSWA's Theorem 5.1): η = 1/(L K T), η_g = 1.
    "look_ahead" (FedNSAM's Theorem 1): η = (1 − λ)²/(128 K L), ρ = 1/√T, with `decay` λ.
    """
    check_choice("schedule", name, SCHEDULES)
    if s.L <= 0:
        raise FlatfedError(f"L = {s.L:g}: the smoothness must be above 0")
    small = 1 / (math.sqrt(s.T) * s.K * s.L)
    server = math.sqrt(s.K * s.S)
    if name == "averaged":
        return replace(s, eta=1 / (s.L * s.K * s.T), eta_g=1.0)
    if name == "look_ahead":
        return replace(s, eta=(1 - decay) ** 2 / (128 * s.K * s.L), eta_g=1.0, rho=1 / math.sqrt(s.T))
    radius = 1 / math.sqrt(s.T) if name == "perturbed" else s.rho
    return replace(s, eta=small, eta_g=server, rho=radius)


def theorem_training(training: Training, s: Setting) -> Training:
    """A training with the steps and the step size of a setting; η_g and ρ are options of the algorithm."""
    return training.replaced(
        rounds=s.T, local_steps=s.K, local_epochs=None, participants=s.S, participation=None, lr=s.eta
    )
