"""How fast checkpoints are served.

Comes in: checkpoints, a profile and a suite, whose prompts are asked; or a file that another tool wrote. Goes out:
`SpeedRecord` (assay/records/speed.py). May import: every other room. `measure` runs the ladder, `imported` reads files of other
tools (`formats` has one reader a format), `ratio` compares rows.
"""
