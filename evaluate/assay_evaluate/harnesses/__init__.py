"""Results of other harnesses: their files in, scores of items out, which are judged as if the questions had been asked here.

May import `assay`, `statistics` and `transport`. `find.py` says which files of a folder are results, a module each reads one
format, `pairing.py` proves that both sides were asked the same, `measurement.py` makes records of them.
"""
