"""The page of several runs side by side. `compare.py` fills it in; what is fixed is in `templates/compare.html.j2`."""

NO_PAIR = "{run}: no item is paired with the first run"
NO_DIFFERENCE = "{run}: no paired task shows a difference from the first run"
DIFFERENCES = "{run} against the first run: {changes}{more}"
CHANGE = "{task} of {checkpoint} {change}"
MORE = ", and {number} more"
POINT = "{run}: {checkpoint}"
