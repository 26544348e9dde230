"""Channel weights for scale search, measured while transformers runs the model on text that is given or that it writes itself.

In: a checkpoint that fits into memory, text. Out: a file of mean squared inputs, which `checkpoint.importance` reads, and a
`Calibration` record. May import plan and everything below it.
"""
