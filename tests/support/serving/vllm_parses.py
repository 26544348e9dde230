"""Run with the serving environment's Python: what vLLM's own argument parser makes of `vllm serve` commands.

python vllm_parses.py < COMMANDS: a JSON list of pairs, the words of a command and names of values; prints a JSON list on the
last line, for each command these values as they were parsed, or the error.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any


def parsed(words: list[str], names: list[str]) -> dict[str, Any] | str:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(required=False, dest="subparser"))
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            found = parser.parse_args(words[1:])
            validate_parsed_serve_args(found)
    except (SystemExit, TypeError, ValueError) as error:
        return f"{error}: {told.getvalue()}"
    return {name: getattr(found, name) for name in names}


if __name__ == "__main__":
    print("\n" + json.dumps([parsed(words, names) for words, names in json.load(sys.stdin)], default=str))
