"""From questions to requests: a session with one served checkpoint, in the dialect it speaks.

In: messages, seeds, a budget. Out: replies in order, each marked if it was truncated or is in the wrong script; how many
drafted tokens were accepted. May import client and statistics.
"""
