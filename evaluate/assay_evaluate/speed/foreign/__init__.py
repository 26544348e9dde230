"""Speeds that other tools measured, as imported rows of a `SpeedRecord`. What a file does not state stays None.

`read.py` takes a file and what the user adds to it; `vllm_bench`, `inferencex`, `guidellm` and `table` know one format each.
"""
