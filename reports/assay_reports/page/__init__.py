"""The page of a report: what was found, said by the program; pictures as SVG; the browser of items.

In: a `Report`, and the folder of its run for prompts and replies. Out: strings that the templates put into one file. Nothing
here is computed from anything but records, and nothing of it needs a script but the browser of items.
"""
