"""One door to the disk: page-aligned buffers, files written past the page cache, hashes at the disk's speed.

In: paths and bytes. Out: bytes and SHA-256. Knows nothing of tensors. May import `assay` only.
"""
