"""The only room that knows how to use the disk: page-aligned buffers, files written past the page cache, fast hashes.

In: paths and bytes. Out: bytes and SHA-256. Knows nothing of tensors. May import `assay` only.
"""
