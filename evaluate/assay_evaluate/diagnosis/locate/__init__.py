"""Where two servers, precisions or tensor-parallel ranks part: the first layer, expert and rank that differ.

In: two servers that run `assay_vllm.activations` in their workers. Out: a `Location`, with a precision recipe as remedy where
there is one. May import the rooms below diagnosis, not the probes.
"""
