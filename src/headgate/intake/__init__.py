"""What clients send becomes tasks here, or a refusal with a code, a field and a message."""

from headgate.intake.reading import Batch, Defaults, Draft, Draining, Intake

__all__ = ["Batch", "Defaults", "Draft", "Draining", "Intake"]
