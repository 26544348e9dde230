"""Parts of a model card: metadata of the hub, columns side by side, the command that serves it.

In: records of a run. Out: text and data for `card.py`. Every part says nothing where its record is missing. May import the
records, recipes, and the modules of `assay_reports` that load and name things; not `assay_reports.card`.
"""
