"""Tables, without I/O: the schemes, how config.json describes them, vLLM's matching rules, casts between float dtypes.

In: names, shapes and dtypes. Out: stored parts of a weight, `quantization_config`, what vLLM would do with a module's name.
May import `assay` only.
"""
