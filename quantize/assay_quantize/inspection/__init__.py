"""What any published checkpoint is, and what is wrong with it. In: a folder, hub id or URL of files; out: an `Inspection`.

Headers and small files first, scales of a folder next, weights only where asked for. Nothing is trusted and nothing refused
half-way: what cannot be read is a finding of its own. May import `decoding`, `checkpoint`, `formats`, `storage`.
"""
