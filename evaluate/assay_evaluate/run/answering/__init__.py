"""Who answers: which weights, under which names, and whether as they did when they were asked first.

In: servers, the journal of a run. Out: signatures, evidence of replies; MeasureError where somebody else answers. May import
what `run` may.
"""
