"""Quantize a mixture-of-experts checkpoint for vLLM, and measure what was lost: the contract, and the command line.

    cli -> recipes -> records -> small modules: errors, safe_files, atomic_files, safetensors_index, hub_errors, foreign_text,
                                 quantities, callbacks

In: recipes that a person wrote. Out: records that every stage reads and writes. Needs neither torch nor vllm. Only `cli`
imports assay_quantize, assay_evaluate and assay_reports.
"""

__version__ = "0.1.0"
