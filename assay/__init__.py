"""assay: make the 4-bit checkpoint, and say how much of the model is left in it."""

__version__ = "0.1.0"
