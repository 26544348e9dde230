"""RULER's published texts: essays, SQuAD, HotpotQA. Which files they are, where they lie, which of them a run uses.

In: a task of a suite, the journal of a run. Out: files that have the published hashes, or why there are none. May import
transport, and of tasks only `ruler`.
"""
