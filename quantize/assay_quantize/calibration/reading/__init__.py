"""How text of any size is read: of a large file pieces that lie all over it, of a long text a part at a time.

In: a file, a text. Out: pieces in their order. May import nothing of its siblings.
"""
