"""What a checkpoint is known by: the state of its files on the disk, and the hash of its weights.

In: a checkpoint's folder and headers. Out: stamps, a SHA-256. May import what `checkpoint` may.
"""
