"""From measured damages and their intervals to the numbers that are added up, of all schemes of one part together.

A divergence is rare events: most positions do not move, a few do, and whether one of them is among the texts decides. So of a
part that matters little one scheme may look ten times better than another that rounds alike, by luck, and a choice among many
estimates takes the lucky ones. But what a scheme does to a weight is known: the squared error of its codes. Within a part,
damages of schemes of one kind are close to proportional to it. Each damage is therefore drawn towards that line, the more the
less certain the part's own figures are: hardly where they are, almost fully where they are noise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from scipy.special import log_ndtr, ndtri

from assay.recipes.calibrated.methods import INTEGERS
from assay.records.base import Interval
from assay_quantize.formats.schemes import SCHEMES

Z_95 = 1.959963984540054
SQUARED_ERROR = {
    "w4a16": 0.0123, "w4a16_g64": 0.0106, "w4a16_g32": 0.0090, "w4a16_channel": 0.0197, "w4a16_asym": 0.0101,
    "fp8_block": 0.00071, "fp8_channel": 0.00071, "fp8_static": 0.00071, "nvfp4a16": 0.0091, "nvfp4": 0.0091,
    "mxfp4": 0.0126, "mxfp8": 0.00071, "w8a8": 0.00008,
}  # fmt: skip
"""||rounded - w||^2 / ||w||^2 of normal weights with 2,048 columns, scales by `minmax`; a test makes them again."""
SPREAD = 0.2
"""How far damages of one part lie off the line, as a share: of the parts of tiny-glm that are known to 10 %, 0.16 to 0.20."""


def standard_error(interval: Interval | None) -> float | None:
    """Half the interval's width over the normal quantile of its level. None: there is no interval."""
    if interval is None:
        return None
    return (interval.high - interval.low) / (2 * float(ndtri((1 + interval.level) / 2)))


def not_negative(value: float, error: float) -> float:
    """The mean of a normal distribution of this mean and standard error that is cut off at zero."""
    if error <= 0:
        return max(0.0, value)
    at = value / error
    density = math.exp(-0.5 * at * at - 0.5 * math.log(2 * math.pi) - float(log_ndtr(at)))
    return max(0.0, value + error * density)


def shrunken_damages(
    measured: Mapping[str, tuple[float, Interval | None]], *, is_calibrated: bool = False
) -> dict[str, tuple[float, float | None]]:
    """Scheme -> (nats that count, their standard error; None: not known), of one part.

    measured: scheme -> its damage and interval. Schemes without an interval stand for themselves, 0 at least. is_calibrated:
    INT4 weights were rounded by text, so that they are of one kind among themselves only.
    """
    kinds: dict[object, dict[str, tuple[float, float]]] = defaultdict(dict)
    shrunken: dict[str, tuple[float, float | None]] = {}
    for scheme, (value, interval) in measured.items():
        error = standard_error(interval)
        if error is None:
            shrunken[scheme] = (max(0.0, value), None)
        else:
            row = SCHEMES[scheme]
            # what rounds activations, and what has 8 bits, does other damage than its weights' error says
            kind = row.preset in ("W4A16", "W4A16_ASYM", "NVFP4A16"), row.weight_dtype in ("F8_E4M3", "I8")
            kinds[kind, is_calibrated and scheme in INTEGERS][scheme] = (value, error)
    for damages in kinds.values():
        shrunken |= _shrunken_kind(damages)
    return shrunken


def _shrunken_kind(damages: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float | None]]:
    """Schemes of one kind: value and standard error -> the same, drawn towards the line through all of them.

    With r the error of these figures as a share of them, and `SPREAD` that of the truth around the line, a figure keeps
    SPREAD^2 / (SPREAD^2 + r^2) of its distance from it. r is the kind's as a whole: the interval of a single scheme in which no
    rare event happened to fall is far too narrow.
    """
    length = sum(SQUARED_ERROR[scheme] for scheme in damages)
    total = not_negative(sum(value for value, _ in damages.values()), math.hypot(*(error for _, error in damages.values())))
    errors = math.sqrt(sum(error**2 for _, error in damages.values()) / len(damages))
    share = errors * len(damages) / total if total else 0.0
    keeps = SPREAD**2 / (SPREAD**2 + share**2) if len(damages) > 1 else 1.0
    shrunken: dict[str, tuple[float, float | None]] = {}
    for scheme, (value, error) in damages.items():
        line = total * SQUARED_ERROR[scheme] / length
        own = not_negative(value, error)
        of_line = share * line / math.sqrt(len(damages))
        shrunken[scheme] = (line + keeps * (own - line), math.hypot(keeps * error, (1 - keeps) * of_line))
    return shrunken
