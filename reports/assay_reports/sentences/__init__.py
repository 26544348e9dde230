"""The English of what readers get, one module a page: limits, the page of a run, cards, a comparison, a choice.

Templates only: the module of the same name outside this room knows the records and fills in the `{names}`. To edit a sentence
nothing else need be read; a `{name}` may be moved or left out, and a new one needs a line there. May import nothing.
"""
