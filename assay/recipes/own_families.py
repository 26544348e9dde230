"""Families of the user's own that this process knows, for as long as it lives: `family_names.py` fills these two tables.

Which families there are is a property of the process, as the search path of recipes is: every room looks names up by the
family's name alone, and a worker of another process takes the family up from the plan that it is given.
"""

from __future__ import annotations

from assay.recipes.family import FamilyRecipe

FILES: dict[str, str] = {}
"""Family -> its file, absolute."""
RECORDED: dict[str, FamilyRecipe] = {}
"""Family that a checkpoint's manifest has -> what it says; there is no file."""
