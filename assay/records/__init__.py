"""Records: what one stage hands to the next. Frozen, typed, versioned, written as JSON by rename; one module a stage.

In: nothing but their own fields. Out: JSON files, and the hashes by which two records are compared or refused. May import the
small modules of `assay`, the standard library and pydantic, so that a record can be read without the stages.
"""
