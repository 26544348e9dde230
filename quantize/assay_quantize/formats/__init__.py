"""Tables without I/O: the schemes, how config.json describes them, vLLM's matching rules, casts between float dtypes.

In: names, shapes and dtypes. Out: the stored parts of a weight, `quantization_config`, whether vLLM would load a module
quantized. May import `assay` only.
"""
