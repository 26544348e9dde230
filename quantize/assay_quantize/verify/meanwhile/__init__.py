"""What `verify` need not look at again, because it was looked at while the checkpoint was made.

`judged.py`: slabs whose bytes were compared while the engine still held their rows of the source. `finished.py`: finished
shards, read back from the disk. The engine imports neither: it calls what it was given.
"""
