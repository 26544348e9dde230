"""A teacher-forced pass of any stored checkpoint over token sequences, one decoder layer at a time: states, and what its head
makes of them. It needs torch and transformers; no layer but the one that runs has weights."""
