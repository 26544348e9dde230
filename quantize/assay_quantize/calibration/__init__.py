"""Text goes through the model: channel weights for the scale search, or layers whose weights are rounded by what they were fed.

In: a checkpoint, text, and for layers a plan. Out: a file of mean squared inputs, which `checkpoint.importance` reads, and a
`Calibration` record; or a file for each layer, which `checkpoint.calibrated_layers` reads, and a `CalibratedLayers` record. May
import plan and everything below it.
"""
