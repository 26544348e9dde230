"""Calibration files and calibrated layers of a run: text, items it may not hold, and sentences on what was seen."""
