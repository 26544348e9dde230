"""The `assay serve` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.options import ProfileOption
from assay.cli.stages import profile_for
from assay.cli.terminal import say


def serve(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    profile: ProfileOption = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1; default: a free one.")
    ] = None,
) -> None:
    """vLLM in the foreground, exactly as an evaluation would run it. Ctrl-C stops it."""
    import time

    from assay.cli.targets import resolve_target
    from assay_evaluate.serving.server import ServerSpec
    from assay_evaluate.serving.server import serve as start

    aim = resolve_target(str(checkpoint))
    chosen = profile_for(aim, profile)
    log_path = Path("runs") / "serve" / f"{checkpoint.resolve().name}.log"
    spec = ServerSpec(
        checkpoint=checkpoint, profile=chosen, serving=aim.recipe.serving, speculate=True, log_path=log_path, port=port
    )
    with start(spec, on_progress=say) as server:
        say(f"serving {checkpoint} as '{server.model}' at {server.base_url}/v1; log: {log_path}; Ctrl-C stops it")
        while True:
            server.check_alive()
            time.sleep(1)
