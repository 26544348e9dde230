"""A scheme for every layer and role under a limit of bytes: the mix that loses least, and the uniform recipes beside it.

In: headers, a base recipe, a sensitivity record, what the hardware allows. Out: `assay.records.choice.mix.Mix` and the text of
an ordinary precision recipe. Reads no weights. May import plan and everything below it.
"""
