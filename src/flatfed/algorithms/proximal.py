"""Pulls towards the received model, and duals that remember them."""

from typing import Literal

from flatfed.algorithms import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Decay, NonNegative, Share
from flatfed.parts import (
    ConsensusPerturbation,
    DynamicRegulariser,
    LookAhead,
    Momentum,
    PerturbedStart,
    Proximal,
    SharpnessAware,
)


@register
def fedprox(proximal_weight: NonNegative = 0.01) -> Algorithm:
    """FedProx: a proximal pull towards the received model (Li et al., 2020).

        y ← y − η (g(y) + μ (y − x))
        x ← x + mean(y_K − x)

    Limits: μ = 0 is FedAvg; so is K = 1 for any μ.
    Deviations: none.
    """
    return Algorithm(correct=Proximal(proximal_weight))


@register
def fedacg(lookahead: Decay = 0.85, proximal_weight: NonNegative = 2e-3) -> Algorithm:
    """FedACG: accelerated client gradient (Kim et al., 2024).

        φ ← x + λ m                                the server sends φ
        y ← y − η (g(y) + β (y − φ))               y_0 = φ
        m ← λ m + mean(y_K − φ)
        x ← x + m                                  the plain mean of the local models

    Limits: λ = 0 is FedProx(β); β = 0 is FedNSAM without its perturbation.
    Deviations: the authors' loss has β/2 = 1e-3 before ‖y − φ‖²; their code also decays η after every local
    epoch, which is not done here.
    """
    return Algorithm(
        start=LookAhead(lookahead), correct=Proximal(proximal_weight), server=Momentum(lookahead)
    )


@register
def feddyn(regularisation: NonNegative = 0.01) -> Algorithm:
    """FedDyn: dynamic regularisation (Acar et al., 2021).

        y   ← y − η (g(y) + α (y − x + h_i))
        h_i ← h_i + (y_K − x)                      h = mean of all clients' h_i
        x   ← x + mean(y_K − x) + h

    The duals are kept in the units of the model; the paper's ĝ_i is −α h_i.

    Limits: α = 0 is not FedAvg, because h goes on summing displacements.
    Deviations: the broadcast model is evaluated; the authors' script reports the mean of the active clients'
    models, for which there is the setting evaluate = "active_mean". All clients use the same α; that script
    divides it by the client's relative number of samples.
    """
    return Algorithm(correct=DynamicRegulariser(regularisation))


@register
def fedspeed(
    radius: NonNegative = 0.1,
    mix: Share = 1.0,
    proximal_weight: NonNegative = 0.1,
    duals: Literal["participants", "server"] = "participants",
    normalize: bool = True,
) -> Algorithm:
    """FedSpeed: prox-correction with a mixed perturbed gradient (Sun et al., 2023).

        ε   ← ρ g(y)/‖g(y)‖
        y   ← y − η ((1 − α) g(y) + α g(y + ε) + (1/λ) (y − x + h_i))
        h_i ← h_i + (y_K − x)
        x   ← mean over participants of (y_K + h_i)

    `proximal_weight` is 1/λ and `mix` is α.

    Limits: ρ = 0 or α = 0 is FedDyn(1/λ) when every client takes part; with duals = "server" always.
    Deviations: the participants' corrected models are averaged, as in the paper; one simulator adds the mean
    dual of all clients instead (duals = "server"). The ascent step is normalised, as in the authors' code;
    `normalize=False` is the other reading.
    """
    return Algorithm(
        gradient=SharpnessAware(radius, mix, normalize),
        correct=DynamicRegulariser(proximal_weight, duals),
    )


@register
def fedgloss(
    server_radius: NonNegative = 0.15, radius: NonNegative = 0.15, regularisation: NonNegative = 0.1
) -> Algorithm:
    """FedGloSS: sharpness-aware minimisation on the server's side too, at no extra traffic.

        x̃ ← x − ρ u(Δ̄ of the round before)          what clients receive; x̃ = x in the first round
        y ← y − η (g(y + ρ_l u(g(y))) + α (y − x̃ + h_i))       from y = x̃
        h_i ← h_i + Δ_i                               Δ_i = y_K − x̃
        h ← h + (S/N) Δ̄
        x ← x + Δ̄ + h

    `regularisation` is α, which the paper writes 1/β.

    Caldarola, Cagnasso, Caputo, Ciccone, "Beyond Local Sharpness: Communication-Efficient Global
    Sharpness-aware Minimization for Federated Learning", CVPR 2025.

    Limits: ρ = ρ_l = 0 is FedDyn(α); ρ = 0 is FedSpeed with the server's duals and nothing mixed in; ρ_l = 0
    without the regulariser is FedLESAM with the server's memory.
    Deviations: h is the mean over all N clients; the released code divides by N times S. The radius does not
    grow over the first rounds, which that code means to do. Its proximal centre and dual are renewed every
    epoch, here every round. x is evaluated, not x̃.
    """
    return Algorithm(
        start=PerturbedStart(server_radius),
        gradient=SharpnessAware(radius),
        correct=DynamicRegulariser(regularisation),
    )


@register
def fedsmoo(
    radius: NonNegative = 0.1,
    regularisation: NonNegative = 0.1,
    upload: Literal["residual", "dual"] = "residual",
) -> Algorithm:
    """FedSMOO: dynamic regularisation with a perturbation that clients agree on (Sun et al., 2023).

        ŝ   ← ρ u(g(y) − μ_i − s)                  u(v) = v/‖v‖
        μ_i ← μ_i + ŝ − s
        y   ← y − η (g(y + ŝ) + α (y − x + h_i))
        h_i ← h_i + (y_K − x),   h = mean of all clients' h_i
        s   ← ρ u(mean(μ_i − ŝ_K))
        x   ← x + mean(y_K − x) + h

    Limits: ρ = 0 is FedDyn(α).
    Deviations: clients upload μ_i − ŝ_K; the authors' code uploads μ_i alone (upload = "dual").
    """
    return Algorithm(
        gradient=ConsensusPerturbation(radius, upload), correct=DynamicRegulariser(regularisation)
    )
