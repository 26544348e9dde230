"""The `assay serve` command."""

from __future__ import annotations

from typing import Annotated

import typer

from assay.cli.options import OutFolderOption, ProfileOption, TargetArgument
from assay.cli.stages import profile_for
from assay.cli.terminal import say
from assay.errors import AssayError


def serve(
    target: TargetArgument,
    profile: ProfileOption = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1; default: a free one.")
    ] = None,
    out: OutFolderOption = None,
) -> None:
    """vLLM in the foreground, exactly as an evaluation would run it. Ctrl-C stops it."""
    import time

    from assay.cli.places import place_for, run_holding
    from assay.cli.targets import local_checkpoint, resolve_target
    from assay.records.run import folder_name
    from assay_evaluate.serving.server import ServerSpec
    from assay_evaluate.serving.server import serve as start

    aim = resolve_target(target)
    chosen = profile_for(aim, profile)
    if chosen.urls:
        raise AssayError(f"profile {chosen.name}: its server runs already; there is nothing to start")
    checkpoint = local_checkpoint(aim.location)
    place, name = place_for("serve", "logs", run=run_holding(checkpoint), out=out), folder_name(checkpoint)
    spec = ServerSpec(
        checkpoint=checkpoint, profile=chosen, serving=aim.recipe.serving, speculate=True, port=port, served_model_name=name,
        log_path=place.logs / f"vllm-serve-{name}.log",
    )  # fmt: skip
    with start(spec, on_progress=say) as server:
        say(f"serving {checkpoint} as '{server.model}' at {server.base_url}/v1; log: {spec.log_path}; Ctrl-C stops it")
        while True:
            server.check_alive()
            time.sleep(1)
