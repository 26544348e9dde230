"""GGUF files: what they are, and what is wrong with them. In: a folder with one model; out: an `Inspection`.

Names are llama.cpp's; what a defect does is said of llama.cpp, because vLLM 0.32 reads no GGUF without a plugin. May import
`decoding` and the modules of `inspection` that know no format.
"""
