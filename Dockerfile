# rlexp for GPUs: torch for CUDA 13, flash-attn 4 and adapters. The driver is the machine's own (580 or later).
#   docker build -t rlexp .
#   docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD:/work" -v "$HOME/.cache:/home/me/.cache" rlexp python -m rlexp +experiment=lora_8b
# It runs as you, so that no file of a run is root's; your cache holds the models, and your token of the hub.
# Not built yet: the machines of the tests have no Docker. The same packages resolve and install there without it.
FROM python:3.12-slim-bookworm

# Triton compiles its kernels' launchers with gcc.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE constraints.txt /opt/rlexp/
COPY rlexp /opt/rlexp/rlexp
COPY conf /opt/rlexp/conf
COPY launchers /opt/rlexp/launchers
COPY sweeps /opt/rlexp/sweeps
RUN pip install --no-cache-dir -c /opt/rlexp/constraints.txt "/opt/rlexp[gpu,lora,gguf]"

# A user of any number has a home folder and a name there, which torch and triton ask for.
RUN mkdir -m 1777 /home/me
ENV HOME=/home/me USER=me
USER nobody

# Runs are written where the command is typed.
WORKDIR /work
CMD ["python", "-m", "rlexp", "--help"]
