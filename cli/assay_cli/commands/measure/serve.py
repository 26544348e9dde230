"""The `assay serve` command."""

from __future__ import annotations

from typing import Annotated

import typer

from assay_cli.options import JsonOption, OutFolderOption, ProfileOption, TargetArgument, TensorParallelOption
from assay_cli.terminal import emit, escape, results, say
from assay_pipeline.interrupted import interruptible
from assay_pipeline.profiles import profile_for


def serve(
    target: TargetArgument,
    profile: ProfileOption = None,
    tensor_parallel_size: TensorParallelOption = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1. Default: a free one.")
    ] = None,
    out: OutFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a checkpoint with vLLM in the foreground, exactly as an evaluation does. Ctrl-C stops it.

    With --json: its URL, log and fingerprint, once it is ready.
    """
    import time

    from assay.records.run import folder_name
    from assay_evaluate.serving.server import ServerSpec, environment_for
    from assay_evaluate.serving.server import serve as start
    from assay_pipeline.places import place_for, run_holding
    from assay_pipeline.targets import local_checkpoint, resolve_target

    resolved = resolve_target(target)
    chosen = profile_for(resolved, profile, tensor_parallel_size=tensor_parallel_size)
    checkpoint = local_checkpoint(resolved.location, say=say)
    environment_for(chosen)  # before a folder is made
    place, name = place_for("serve", "logs", run=run_holding(checkpoint), out=out, say=say), folder_name(checkpoint)
    spec = ServerSpec(
        checkpoint=checkpoint, profile=chosen, serving=resolved.recipe.serving, speculate=True, port=port,
        served_model_name=name, log_path=place.logs / f"vllm-serve-{name}.log", is_open=True,
    )  # fmt: skip
    with interruptible(lambda: "the server is stopped"), start(spec, on_progress=say) as server:
        if as_json:
            where = {"checkpoint": str(checkpoint), "model": server.model, "base_url": server.base_url}
            emit(where | {"log": str(spec.log_path), "fingerprint": server.fingerprint.model_dump(mode="json")})
        else:
            line = f"serving {checkpoint} as '{server.model}' at {server.base_url}/v1; log: {spec.log_path}; Ctrl-C stops it"
            results().print(escape(line))
        while True:
            server.check_alive()
            time.sleep(1)
