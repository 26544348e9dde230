"""The first layer, expert and rank in which two servers, precisions or tensor-parallel ranks differ.

In: two servers that run `assay_vllm.activations` in their workers. Out: a `LocateReport`, with a precision recipe as remedy
where there is one. May import the rooms below diagnosis, not the probes.
"""
