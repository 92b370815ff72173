# Trainers of your own loop, without vLLM: docker build -f configs/kubernetes/trainer.Dockerfile -t weightsync-trainer:0.1.0 .
# The pins are the engines', so that Ray, torch and NCCL have equal versions in both images.
FROM python:3.12-slim-trixie
# Triton compiles with gcc, torch.compile with g++. NCCL loads libibverbs for RDMA. KubeRay's probes call wget.
RUN apt-get update && apt-get install -y --no-install-recommends g++ ibverbs-providers wget && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/weightsync
COPY pyproject.toml setup.py README.md LICENSE ./
COPY requirements requirements
COPY configs configs
COPY actors actors
COPY recipes recipes
COPY weightsync weightsync
RUN pip install --no-cache-dir ".[cuda13]" -c requirements/vllm.txt
WORKDIR /runs
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
