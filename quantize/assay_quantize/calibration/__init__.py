"""Channel weights for scale search: the model at work in transformers, on given or its own text.

In: a checkpoint that fits into memory, text. Out: a file of mean squared inputs (`checkpoint.importance` reads it) and a
`Calibration` record. May import plan and everything below it.
"""
