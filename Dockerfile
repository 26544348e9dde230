# assay with all that `assay run` needs on a CPU or, with --gpus all and a driver, on GPUs: docker build -t assay .
#   docker run --rm -it -v $PWD:/work assay judge http://HOST:8000 http://HOST:8001
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ git && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir "/src[quantize,calibrate,evaluate]" && rm -rf /src
# `docker run -v assay:/data IMAGE setup` builds vLLM's environment once, for the GPUs that the container sees.
ENV XDG_DATA_HOME=/data HF_HOME=/data/huggingface
VOLUME /data
WORKDIR /work
ENTRYPOINT ["assay"]
