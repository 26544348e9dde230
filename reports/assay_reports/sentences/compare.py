"""The page of several runs side by side. `compare.py` fills it in; what is fixed is in `templates/compare.html.j2`."""

NO_PAIR = "{run}: no item is shared with the first run"
NO_DIFFERENCE = "{run}: no significant difference from the first run on shared items"
DIFFERENCES = "{run} compared with the first run: {changes}{more}"
CHANGE = "{task} of {checkpoint} {change}"
MORE = ", and {number} more"
POINT = "{run}: {checkpoint}"
