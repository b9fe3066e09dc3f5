# SPDX-License-Identifier: Apache-2.0
# For NVIDIA GPUs: torch 2.13, vLLM 0.32, Python 3.12. The CUDA libraries come with torch's wheels, so the host
# needs only a driver that is new enough for them and the NVIDIA container toolkit; nothing here needs nvcc.
#
#     docker build -t easy-verl .
#     docker run --gpus all --ipc=host -it -v "$PWD":/workspace easy-verl
#     docker run --gpus all --ipc=host easy-verl verl-doctor     # says what is missing
#
# `--ipc=host`: processes share decoded media and NCCL's buffers in /dev/shm, which containers limit to 64 MiB.
#
# For CPUs, with the packages of the extra `cpu`; INDEX is the address of the PyTorch project's CPU wheel index:
#
#     docker build -t easy-verl-cpu --build-arg EXTRA=cpu --build-arg PACKAGES=torch==2.13.0 \
#         --build-arg PIP_EXTRA_INDEX_URL=INDEX .
#
# `make docker-check` runs every RUN and COPY in order in an empty Debian root, without Docker, with the packages for
# CPUs, then `--help` of the command, `pip list` and the doctor inside. Not run anywhere yet: `docker build` itself,
# the image python:3.12-slim (Debian's Python 3.11 is used instead), the packages for GPUs.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# Triton builds a launcher of its kernels with gcc while the program runs.
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/verl
COPY pyproject.toml setup.py README.md LICENSE ./
COPY verl verl
COPY examples examples
COPY scripts scripts

# First the packages whose builds fit together, then the project. An empty index adds none.
ARG EXTRA=gpu
ARG PACKAGES="torch==2.13.0 torchvision==0.28.0 vllm==0.32.0"
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir $PACKAGES \
    && pip install --no-cache-dir --editable ".[$EXTRA]"

CMD ["bash"]
