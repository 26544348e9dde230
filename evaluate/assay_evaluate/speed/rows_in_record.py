"""Rows that were not measured here, put into the record of a run: imported ones, and those that somebody predicts."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from assay.errors import AssayError
from assay.foreign_text import one_line
from assay.records.speed import NotMeasured, SpeedRecord, SpeedRow


def with_rows(record: SpeedRecord | None, rows: Sequence[SpeedRow], left_out: Sequence[NotMeasured] = ()) -> SpeedRecord:
    """The record with these rows, which replace those of the same point and source. AssayError: two of them are one point.

    left_out: what has no row, and why; said once.
    """
    points = {row.point for row in rows}
    kept = [] if record is None else [row for row in record.rows if row.point not in points]
    before = SpeedRecord(rows=()) if record is None else record
    noted = (*before.not_measured, *(entry for entry in left_out if entry not in before.not_measured))
    try:
        return SpeedRecord.model_validate(
            {**before.model_dump(), "rows": [entry.model_dump() for entry in (*kept, *rows)], "not_measured": noted}
        )
    except ValidationError as error:
        raise AssayError(one_line(error.errors()[0]["msg"])) from None
