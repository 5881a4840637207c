"""Options that are worth tuning, with their ranges: parts declare them beside their other options.

An algorithm's constructor repeats the type for its one or two options that matter; all others keep their
values. Ranges are our choice.
"""

from typing import Annotated

from flatfed.core.types import Decay, NonNegative, Positive, Range, Share

Radius = Annotated[NonNegative, Range(0.01, 1.0)]
"""Of a perturbation."""
ServerRate = Annotated[Positive, Range(0.3, 3.0)]
"""The server's step size along a mean displacement."""
AdaptiveServerRate = Annotated[Positive, Range(0.003, 0.3)]
"""The server's step size where steps are scaled coordinate by coordinate."""
Momentum = Annotated[Decay, Range(0.5, 0.98, "decay")]
ProximalWeight = Annotated[NonNegative, Range(1e-4, 1.0)]
RegulariserWeight = Annotated[NonNegative, Range(1e-3, 1.0)]
FreshWeight = Annotated[Share, Range(0.05, 1.0)]
"""Of what is new beside what is remembered."""
MomentumWeight = Annotated[Share, Range(0.1, 0.9, "linear")]
"""Of what is remembered; what is new has the rest."""
AddedMomentum = Annotated[NonNegative, Range(0.1, 0.9, "linear")]
"""Of what is remembered, beside all of what is new."""
FinalRate = Annotated[NonNegative, Range(0.01, 1.0)]
"""The last step size of a round as a share of the first."""
Stability = Annotated[NonNegative, Range(1e-4, 0.1)]
InputRate = Annotated[NonNegative, Range(0.005, 0.5)]
"""Of steps that change inputs."""
FineTuningRate = Annotated[Positive, Range(1e-5, 1e-2)]
