"""Under which licence a checkpoint stands: that of its source, as the model's recipe or the LICENSE file beside it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from assay.recipes.model import ModelRecipe
from assay.safe_files import open_inside

FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "LICENCE.md")
MAX_BYTES = 1 << 20
"""Of a licence: more is none, and is not read."""
_MIT = (
    'permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated '
    'documentation files (the "software"), to deal in the software without restriction, including without '
    'limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the '
    'software, and to permit persons to whom the software is furnished to do so, subject to the following '
    'conditions: the above copyright notice and this permission notice shall be included in all copies or '
    'substantial portions of the software. the software is provided "as is", without warranty of any kind, express '
    'or implied, including but not limited to the warranties of merchantability, fitness for a particular purpose '
    'and noninfringement. in no event shall the authors or copyright holders be liable for any claim, damages or '
    'other liability, whether in an action of contract, tort or otherwise, arising from, out of or in connection '
    'with the software or the use or other dealings in the software.'
)  # fmt: skip
"""https://opensource.org/license/mit, lower case, spaces single. A licence that says more ("modified MIT") is another one."""
_MIT_HEAD = re.compile(r"(?:(?:the )?mit license )?(?:\(mit\) )?(?:copyright .{0,300})?")
"""Lower case: what may stand before it."""
_APACHE_PARTS = (
    "apache license version 2.0, january 2004",
    "terms and conditions for use, reproduction, and distribution",
    "limitation of liability. in no event and under no legal theory",
    "end of terms and conditions",
)
_APACHE_MOST_CHARACTERS = 11_500
"""The text with its appendix has 11,000 (https://www.apache.org/licenses/LICENSE-2.0.txt); with additions it is another one."""


class Licence(NamedTuple):
    """As the hub's metadata has it; name and link of `other` only."""

    id: str
    name: str | None = None
    link: str | None = None


def find_licence(checkpoint: Path, recipe: ModelRecipe | None) -> Licence | None:
    """The recipe's, else that of the licence file in `checkpoint`: `other` if its text is none of those known here.

    None: neither is there; a licence is not guessed.
    """
    if recipe is not None and recipe.licence is not None:
        return Licence(recipe.licence.id, recipe.licence.name, recipe.licence.link)
    name = next((name for name in FILES if (checkpoint / name).is_file()), None)
    if name is None:
        return None
    with open_inside(checkpoint, name) as file:
        known = _known(file.read(MAX_BYTES).decode("utf-8", errors="replace"))
    return Licence(known) if known else Licence("other", "see-license-file", name)


def _known(text: str) -> str | None:
    plain = re.sub(r"\s+", " ", text).strip().lower()
    if plain.endswith(_MIT) and _MIT_HEAD.fullmatch(plain[: -len(_MIT)]):
        return "mit"
    if all(part in plain for part in _APACHE_PARTS) and len(plain) <= _APACHE_MOST_CHARACTERS:
        return "apache-2.0"
    return None
