"""Tool-call fidelity: does a checkpoint call a tool when one is right, the right one, with valid and right arguments?

Catalogues of 1 to 128 generated tools, alike in name and schema, and prompts that grow by dialogue: long catalogues and long
prompts are where quantized models were seen to fail.

In: a session with a served checkpoint, a `tools` task. Out: a `TaskResult` with figures for every number of tools. May import
what `tasks` may.
"""
