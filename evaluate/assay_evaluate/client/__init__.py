"""From requests to replies: retries, several servers at once, and the journal that keeps every reply.

In: requests under an identity (checkpoint, fingerprint, suite). Out: replies; one that is in the journal is not asked for
again. Or, without a journal: requests in numbered waves, and exchanges that a ledger keeps. May import `assay` and transport.
"""
