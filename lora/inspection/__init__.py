"""What a LoRA file is, before anything is composed: who made it, what it covers, how much it changes.

``survey(path)`` reads the header and a few numbers; ``measure(survey)`` reads the factors, a layer at a time.
"""

from .measuring import measure
from .survey import LayerFacts, Survey, survey

__all__ = ["LayerFacts", "Survey", "measure", "survey"]
