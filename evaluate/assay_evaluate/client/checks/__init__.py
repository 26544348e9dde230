"""Replies held against themselves: text against token ids, counts against text, log-probabilities against what they can be.

In: what replies carry. Out: contradictions, each with its sentence. Pure: nothing is asked. May import the client's records of
replies.
"""
