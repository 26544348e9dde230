"""Any published checkpoint as FP32 weights: what each is stored as, and which activations and KV cache go with it.

In: a checkpoint's headers and config (`checkpoint.Checkpoint`, opened with `allow_quantized`), or GGUF files. Out: a
`StoredCheckpoint` (`open_stored.py`, `gguf_files.py`): its weights, each with format, bits and rules of activations, and their
rows in FP32. May import checkpoint and below; torch and compressed-tensors only inside functions that decode.

One module for each publisher's format reads what config.json declares and gives every module of a checkpoint a `StoredWeight`,
which is data; `decode.py` makes numbers of it. Tensors are trusted, lists in config.json are not: a weight is what its parts
are.
"""
