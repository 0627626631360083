"""Train one model on far-flung, unreliable machines."""

__version__ = "0.1.0"
