"""The error of this package."""

from __future__ import annotations

from assay.errors import MeasureError


class RulerError(MeasureError):
    """An item cannot be made: text or question file, tokenizer, length; or a saved one was changed."""
