"""The answer about one checkpoint: what it is, what is wrong with it, how far it is from its base."""

from __future__ import annotations

from typing import Literal

from assay.records.base import Part, Record
from assay.records.inspection import Inspection
from assay.records.screening import Screening


class LinkStep(Part):
    """What would tell more. command: None where no command does."""

    sentence: str
    command: str | None = None


class LinkAnswer(Record):
    """`assay judge` of a single checkpoint."""

    kind: Literal["link"] = "link"
    inspection: Inspection
    base: str | None
    """Folder or pack it was compared with, or the base that it names; None: it names none."""
    screening: Screening | None
    not_screened: str | None
    """Why it was not compared."""
    steps: tuple[LinkStep, ...]

    @property
    def is_refused(self) -> bool:
        """Whether it has a defect, is another model than its base, or surely diverges beyond the limit for its bits."""
        return not self.inspection.is_clean or (self.screening is not None and bool(self.screening.refused))
