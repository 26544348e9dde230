"""Would a GPU machine load this checkpoint? vLLM's own model classes and loaders, run where there is no GPU.

    python -m assay_vllm.replay REQUEST.json ANSWER.json

Run by the serving environment's interpreter. vLLM is told that it runs on the GPU that the request names (`foreseen_gpu.py`);
what a GPU machine has installed and this one has not is stood in for (`stand_ins.py`). vLLM then parses the server's own
arguments, chooses model classes, quantization methods and kernels, and builds target and draft on the meta device, once for
each rank. Names, shapes and dtypes of the weights come from a plan or from the headers of shards; the loader is ours, with its
strict check and its census. Nothing is computed and no weight is read.

What it cannot see: what vLLM does to weights after loading (`process_weights_after_loading`), kernels and CUDA graphs at run
time, memory, communication between ranks.

In: a request as JSON (`request.py`): one machine, and cells, each a folder and the arguments of its server. Out: an answer as
JSON: for every cell what was built, what was refused, which quantization method and kernel every module got. May import vLLM,
torch and the modules of `assay_vllm`; imports none of the other packages.
"""
