"""From the records of a run to its report and model cards. No number is typed by hand, none is computed in a template.

In: the folder of a run, or of one checkpoint. Out: `report/{index.html,report.json,report.md}`, and a card (README.md) in
each checkpoint's folder. May import `assay` and `assay_evaluate.statistics`; it measures nothing and judges nothing.
"""
