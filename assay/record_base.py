"""What every part of a record is made of: beside records.py, so that modules of records can use it and be used there."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """Base of everything inside a record: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Interval(Part):
    """A number with its confidence interval (95 % unless `level` says otherwise) and the n behind it."""

    value: float
    low: float
    high: float
    n: int
    level: float = 0.95
