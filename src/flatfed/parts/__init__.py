"""The ingredients of algorithms, by slot."""

from flatfed.parts.aggregate import TrimmedMean
from flatfed.parts.compress import ErrorFeedback, ErrorFeedback21, Quantize, Sign, TopK
from flatfed.parts.correct import (
    ControlVariate,
    DynamicRegulariser,
    FullGradientMomentum,
    GlobalMomentum,
    HybridProximal,
    MomentumControlVariate,
    Proximal,
)
from flatfed.parts.optimizer import AdamW, LocalMomentum, Muon
from flatfed.parts.perturb import (
    AdaptiveSharpnessAware,
    AlongMomentum,
    ConsensusPerturbation,
    LastModel,
    SharpnessAware,
    ShiftedInputs,
)
from flatfed.parts.schedule import LinearDecay
from flatfed.parts.server import Adam, Average, Extrapolate, LateAverage, Momentum
from flatfed.parts.start import LookAhead, PerturbedLookAhead, PerturbedStart, Unaveraged
from flatfed.parts.synthetic import FineTune, SyntheticMix, TrajectoryMatching

__all__ = [
    "Adam",
    "AdamW",
    "AdaptiveSharpnessAware",
    "AlongMomentum",
    "Average",
    "ConsensusPerturbation",
    "ControlVariate",
    "DynamicRegulariser",
    "ErrorFeedback",
    "ErrorFeedback21",
    "Extrapolate",
    "FineTune",
    "FullGradientMomentum",
    "GlobalMomentum",
    "HybridProximal",
    "LastModel",
    "LateAverage",
    "LinearDecay",
    "LocalMomentum",
    "LookAhead",
    "Momentum",
    "MomentumControlVariate",
    "Muon",
    "PerturbedLookAhead",
    "PerturbedStart",
    "Proximal",
    "Quantize",
    "SharpnessAware",
    "ShiftedInputs",
    "Sign",
    "SyntheticMix",
    "TopK",
    "TrajectoryMatching",
    "TrimmedMean",
    "Unaveraged",
]
