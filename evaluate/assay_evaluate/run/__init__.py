"""A whole evaluation: every checkpoint served and measured, the reference first.

In: candidates, a suite, a profile. Out: `Measurement` records, and probe reports where the suite asks for them. May import
every other room of this package.
"""
