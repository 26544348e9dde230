"""From questions to requests: a session with one served checkpoint, in the dialect it speaks.

In: messages, seeds, a budget. Out: replies, in order, with what was truncated or in the wrong script; how many
drafted tokens were accepted. May import client and statistics.
"""
