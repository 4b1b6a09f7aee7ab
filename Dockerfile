# SPDX-License-Identifier: Apache-2.0
# vLLM's official image (x86-64 and arm64) with this plugin; how to run it: recipes/README.md.
#     docker build -t vllm-ling .
# Pin the base by its digest where builds must repeat: --build-arg VLLM_IMAGE=vllm/vllm-openai@sha256:...
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0

FROM ${VLLM_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY quant quant
COPY spec_decode spec_decode
COPY eval eval
COPY vllm_ling vllm_ling
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM ${VLLM_IMAGE}
# One volume at /root/.cache keeps the weights and everything that was compiled.
ENV TRITON_CACHE_DIR=/root/.cache/triton HUMMING_CACHE_DIR=/root/.cache/humming
# The image has every dependency; they are lower bounds, so pip leaves vLLM's versions alone. Ubuntu's own Python refuses
# pip without the variable. The last command finds a broken installation while building.
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir /wheel/*.whl \
    && vllm-ling --help >/dev/null
EXPOSE 8000
ENTRYPOINT ["vllm-ling", "serve"]
