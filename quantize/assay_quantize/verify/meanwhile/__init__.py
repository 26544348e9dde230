"""Slabs whose bytes were compared while the engine still held their rows of the source, and need only be read back.

The engine does not import this: it calls what it was given (`quantize(on_slab=...)`).
"""
