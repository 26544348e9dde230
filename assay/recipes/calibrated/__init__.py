"""What a precision recipe says under `calibration`: how text that goes through the model changes what weights become.

In: the mapping of a recipe. Out: a frozen record of the method and its options. Imports `assay.recipes.base` only.
"""
