# syntax=docker/dockerfile:1
# The environment of `burst`, and one stage for each system it is compared with.
#   burst setup image build                                                   CUDA 13
#   TORCH_INDEX_URL=... burst setup image build --cuda 12 --tag burst:cuda12  CUDA 12, for older drivers
#   burst setup image build --cuda none --tag burst:cpu                       CPUs alone
# Of these the last, the stage `test` and the stage `deepspeed` have been built, with podman on a Debian base made by
# debootstrap. What starts from NVIDIA's images has not been built: expect errors there. docs/install.md says more.

# CUDA's libraries come with torch's wheels; the base says which driver the image needs.
ARG CUDA=13
ARG CUDA_13_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04
ARG CUDA_12_IMAGE=nvidia/cuda:12.6.3-base-ubuntu24.04
ARG CUDA_NONE_IMAGE=library/debian:bookworm
# What a compared system runs in: with compilers, for what pip has to build. Copies of the paper want another: docs/install.md.
ARG DEVEL_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
ARG BASELINE_IMAGE=devel

FROM ${CUDA_13_IMAGE} AS cuda13
FROM ${CUDA_12_IMAGE} AS cuda12
FROM ${CUDA_NONE_IMAGE} AS cudanone

# The distribution's Python, and what Triton and FlashAttention-4 build their kernels' launchers with when first called.
FROM cuda${CUDA} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/burst/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

# The virtual environment, before the code, which changes more often. Nothing of this stage but its results is in the
# image: no index address, no build tool.
FROM base AS needed
ARG CUDA
RUN python3 -m venv /opt/burst

# pyproject.toml says what is needed and which versions will do; these are the ones taken.
COPY pins.txt /opt/burst/pins.txt

# torch is most of the image and changes least, so it has a layer of its own. pip's own index has its builds for CUDA 13;
# those without CUDA come from TORCH_INDEX_URL, or from where the builder's own configuration of pip finds them.
ARG TORCH_INDEX_URL
RUN if [ "$CUDA" = 12 ] && [ -z "$TORCH_INDEX_URL" ]; then echo "CUDA $CUDA needs TORCH_INDEX_URL" >&2; exit 2; fi; \
    pip install --constraint /opt/burst/pins.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
RUN python -c "import torch; cuda = str(torch.version.cuda).lower(); assert cuda.split('.')[0] == '$CUDA', 'torch has CUDA ' + cuda"

# FlashAttention-4 is built on CUTLASS's DSL, whose libraries for CUDA 12 come always and those for CUDA 13 as an extra.
WORKDIR /burst
COPY pyproject.toml README.md LICENSE ./
RUN case "$CUDA" in \
        13) set -- --editable '.[gpu,peers,ray,train]' ;; \
        none) set -- --editable '.[ray,train]' ;; \
        *) set -- --editable '.[peers,ray,train]' flash-attn-4 nvidia-cutlass-dsl nvidia-ml-py quack-kernels ;; \
    esac; \
    DS_BUILD_OPS=0 pip install --constraint /opt/burst/pins.txt "$@"

FROM needed AS build
COPY . .
RUN pip install --no-deps --editable .
RUN python -m compileall -q burst engine baselines cluster harness \
    && mkdir -p results/runs

# With the programs of the tests; the tests themselves are mounted.
FROM needed AS test
RUN apt-get update && apt-get install --yes --no-install-recommends git make procps && rm -rf /var/lib/apt/lists/*
RUN pip install --constraint /opt/burst/pins.txt --editable '.[test]'
COPY . .
RUN pip install --no-deps --editable .
RUN useradd --create-home --uid 10001 burst && install --directory --owner burst results/runs
USER burst

# Compared systems: fetched as baselines/<system>/pin.yaml says, then installed where nothing of ours is.
FROM build AS fetch
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates git && rm -rf /var/lib/apt/lists/*

FROM ${DEVEL_IMAGE} AS devel
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM ${BASELINE_IMAGE} AS baseline
ENV PATH=/opt/baseline/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
# The copies of the paper use the torch of their image, hence its packages are seen.
RUN python3 -m venv --system-site-packages /opt/baseline/venv \
    && useradd --create-home --uid 10001 burst
WORKDIR /opt/baseline

# Stages of compared systems, by python -m baselines.stages
FROM fetch AS burst-attention-source
ARG FLAVOUR=paper
RUN python -m baselines.checkout burst_attention --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS burst-attention
COPY --from=burst-attention-source /opt/baseline /opt/baseline
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
RUN cp -r source/Burst-Attention /tmp/build && pip install --no-deps --no-build-isolation /tmp/build && rm -rf /tmp/build
USER burst

FROM fetch AS burst-engine-source
ARG FLAVOUR=paper
RUN python -m baselines.checkout burst_engine --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS burst-engine
COPY --from=burst-engine-source /opt/baseline /opt/baseline
ENV FLASH_ATTENTION_FORCE_BUILD=TRUE
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
RUN cp -r source/BMTrain /tmp/build && pip install --no-deps --no-build-isolation /tmp/build && rm -rf /tmp/build
RUN cp -r source/flash-attention /tmp/build && pip install --no-deps --no-build-isolation /tmp/build && rm -rf /tmp/build
RUN cp -r source/ml-cross-entropy /tmp/build && pip install --no-deps --no-build-isolation /tmp/build && rm -rf /tmp/build
RUN cp -r source/Burst-Attention /tmp/build && pip install --no-deps --no-build-isolation /tmp/build && rm -rf /tmp/build
USER burst

FROM fetch AS deepspeed-source
ARG FLAVOUR=current
RUN python -m baselines.checkout deepspeed --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS deepspeed
COPY --from=deepspeed-source /opt/baseline /opt/baseline
ENV DS_BUILD_OPS=0 HF_HUB_OFFLINE=1
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS internevo-source
ARG FLAVOUR=paper
RUN python -m baselines.checkout internevo --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS internevo
COPY --from=internevo-source /opt/baseline /opt/baseline
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS loongtrain-source
ARG FLAVOUR=paper
RUN python -m baselines.checkout loongtrain --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS loongtrain
COPY --from=loongtrain-source /opt/baseline /opt/baseline
ENV FLASH_ATTN_STAND_IN=2.6
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS megatron-core-source
ARG FLAVOUR=current
RUN python -m baselines.checkout megatron_core --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS megatron-core
COPY --from=megatron-core-source /opt/baseline /opt/baseline
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS megatron-deepspeed-source
ARG FLAVOUR=paper
RUN python -m baselines.checkout megatron_deepspeed --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS megatron-deepspeed
COPY --from=megatron-deepspeed-source /opt/baseline /opt/baseline
ENV DS_BUILD_OPS=0
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS megatron-lm-source
ARG FLAVOUR=paper
RUN python -m baselines.checkout megatron_lm --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS megatron-lm
COPY --from=megatron-lm-source /opt/baseline /opt/baseline
ENV NVTE_FRAMEWORK=pytorch
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS ring-flash-attn-source
ARG FLAVOUR=current
RUN python -m baselines.checkout ring_flash_attn --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS ring-flash-attn
COPY --from=ring-flash-attn-source /opt/baseline /opt/baseline
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS torchtitan-source
ARG FLAVOUR=current
RUN python -m baselines.checkout torchtitan --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS torchtitan
COPY --from=torchtitan-source /opt/baseline /opt/baseline
ENV HF_HUB_OFFLINE=1
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS transformer-engine-source
ARG FLAVOUR=current
RUN python -m baselines.checkout transformer_engine --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS transformer-engine
COPY --from=transformer-engine-source /opt/baseline /opt/baseline
ENV NVTE_FLASH_ATTN=0 NVTE_FRAMEWORK=pytorch
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS transformers-source
ARG FLAVOUR=current
RUN python -m baselines.checkout transformers --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS transformers
COPY --from=transformers-source /opt/baseline /opt/baseline
ENV HF_HUB_OFFLINE=1
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS trl-source
ARG FLAVOUR=current
RUN python -m baselines.checkout trl --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS trl
COPY --from=trl-source /opt/baseline /opt/baseline
ENV HF_HUB_OFFLINE=1
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst

FROM fetch AS yunchang-source
ARG FLAVOUR=current
RUN python -m baselines.checkout yunchang --flavour "$FLAVOUR" --into /opt/baseline

FROM baseline AS yunchang
COPY --from=yunchang-source /opt/baseline /opt/baseline
RUN python -c 'import torch' 2>/dev/null || pip install --requirement torch.txt
RUN pip install --no-deps --require-hashes --requirement build.txt \
    && pip install --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
USER burst
# End of the stages of compared systems

# The last stage is what `docker build` makes when nobody asks for another.
FROM base AS burst
RUN useradd --create-home --uid 10001 burst
COPY --from=build /opt/burst /opt/burst
COPY --from=build /burst /burst
WORKDIR /burst
RUN install --directory --owner burst results/runs

# The commit records name: an image has no git history.
ARG CUDA
ARG BURST_COMMIT=
ENV BURST_COMMIT=${BURST_COMMIT}
LABEL org.opencontainers.image.title="burst-harness" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="${BURST_COMMIT}" \
    burst.cuda="${CUDA}"

USER burst
ENTRYPOINT ["burst"]
CMD ["doctor"]
